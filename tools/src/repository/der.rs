//! The few elements of DER (X.690) that keys and signatures consist of. Reads no other form.

pub const INTEGER: u8 = 0x02;
pub const OCTETS: u8 = 0x04;
pub const NULL: u8 = 0x05;
pub const OBJECT: u8 = 0x06;
pub const SEQUENCE: u8 = 0x30;

/// Takes the next element from `bytes` if it has this tag. Returns its content.
pub fn take<'a>(bytes: &mut &'a [u8], tag: u8) -> Option<&'a [u8]> {
    let (found, rest) = bytes.split_first()?;
    let (first, mut rest) = rest.split_first()?;
    let mut length = usize::from(*first);
    if *first >= 0x80 {
        let (digits, after) = rest.split_at_checked(usize::from(*first & 0x7f))?;
        (length, rest) = (number(digits)? as usize, after);
    }
    let (content, rest) = rest.split_at_checked(length)?;
    *bytes = rest;
    (*found == tag).then_some(content)
}

/// Returns the number of these bytes, the highest first, if it is a u32.
pub fn number(bytes: &[u8]) -> Option<u32> {
    let bytes = bytes.strip_prefix(&[0]).unwrap_or(bytes);
    let is_short = bytes.len() <= 4;
    is_short.then(|| bytes.iter().fold(0, |number, byte| number << 8 | u32::from(*byte)))
}

/// Returns an element with this tag and the `parts` of its content.
pub fn put(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let digits = (content.len() as u32).to_be_bytes();
    let zeros = digits.iter().take_while(|digit| **digit == 0).count().min(3);
    let length = match content.len() {
        0..0x80 => vec![digits[3]],
        _ => [&[0x80 | (4 - zeros) as u8], &digits[zeros..]].concat(),
    };
    [vec![tag], length, content].concat()
}

/// Returns the element of a number that is not negative, of its bytes, the highest first.
pub fn put_number(bytes: &[u8]) -> Vec<u8> {
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    let bytes = &bytes[zeros.min(bytes.len().saturating_sub(1))..];
    // Without the zero a first byte from 128 on would be a sign.
    let sign: &[u8] = if bytes.first().is_none_or(|byte| *byte >= 0x80) { &[0] } else { &[] };
    put(INTEGER, &[sign, bytes])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_and_numbers_are_as_short_as_they_can_be() {
        let lengths = [0, 0x7f, 0x80, 0xff, 0x100, 0x1_0000].map(|bytes| {
            let element = put(OCTETS, &[&vec![7; bytes]]);
            assert_eq!(take(&mut &element[..], OCTETS).map(<[u8]>::len), Some(bytes));
            assert_eq!(take(&mut &element[..], INTEGER), None);
            element.len() - bytes
        });
        assert_eq!(lengths, [2, 2, 3, 3, 4, 5]);
        assert_eq!(put_number(&[0, 0, 5]), [2, 1, 5]);
        assert_eq!(put_number(&[0, 0x80]), [2, 2, 0, 0x80]);
        assert_eq!(put_number(&[0, 0]), [2, 1, 0]);
        assert_eq!(number(&[0, 1, 2]), Some(258));
        assert_eq!(number(&[1; 5]), None);
    }
}
