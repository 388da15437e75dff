//! The wire format of Protocol Buffers, for the two large messages of a request for scores. Fields
//! are parsed in place and written straight into the answer. Knows no message.

use crate::problem::{Problem, checked};
use prost::encoding::{decode_varint, encode_varint};

/// The value of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// A field of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field<'a> {
    pub number: u64,
    pub value: Value<'a>,
}

/// Returns the problem of bytes that are not a message.
pub fn malformed() -> Problem {
    Problem::invalid("the message is malformed")
}

impl<'a> Field<'a> {
    /// Returns the bytes of a message, a text, bytes or a packed list.
    ///
    /// # Errors
    /// The field is a number.
    pub fn bytes(&self) -> Result<&'a [u8], Problem> {
        match self.value {
            Value::Bytes(bytes) => Ok(bytes),
            Value::Number(_) => Err(malformed()),
        }
    }

    /// Returns the text, which is a name in each message of the protocol.
    ///
    /// # Errors
    /// The field is not a text in UTF-8, or is longer than a name.
    pub fn text(&self) -> Result<&'a str, Problem> {
        checked(std::str::from_utf8(self.bytes()?).map_err(|_| malformed())?)
    }
}

/// The remaining fields of a message. Ends after a malformed one.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    /// Takes a varint; returns `None` if there is none.
    pub fn varint(&mut self) -> Option<u64> {
        decode_varint(&mut self.0).ok()
    }

    fn take(&mut self, bytes: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(usize::try_from(bytes).ok()?)?;
        self.0 = rest;
        Some(taken)
    }

    /// Takes a field; returns `None` if there is none. A number of fixed width is its bytes.
    fn field(&mut self) -> Option<Field<'a>> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => Value::Number(self.varint()?),
            1 => Value::Bytes(self.take(8)?),
            2 => {
                let bytes = self.varint()?;
                Value::Bytes(self.take(bytes)?)
            }
            5 => Value::Bytes(self.take(4)?),
            // The other types are groups, which no message of the protocol has.
            _ => return None,
        };
        Some(Field { number: key >> 3, value })
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>, Problem>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field().ok_or_else(malformed);
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}

/// Appends the head of a field with `length` bytes.
pub fn write_head(to: &mut Vec<u8>, number: u64, length: usize) {
    encode_varint((number << 3) | 2, to);
    encode_varint(length as u64, to);
}

/// Appends a field with `bytes`.
pub fn write_bytes(to: &mut Vec<u8>, number: u64, bytes: &[u8]) {
    // Protocol Buffers leave an empty field out.
    if !bytes.is_empty() {
        write_head(to, number, bytes.len());
        to.extend_from_slice(bytes);
    }
}

/// Appends a packed list of `numbers`.
pub fn write_packed(to: &mut Vec<u8>, number: u64, numbers: &[usize]) {
    let bytes = |number: &usize| 1 + number.checked_ilog2().unwrap_or(0) as usize / 7;
    write_head(to, number, numbers.iter().map(bytes).sum());
    numbers.iter().for_each(|number| encode_varint(*number as u64, to));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_bytes_come_back_as_they_were_written() {
        let numbers = [0, 1, 127, 128, 16_383, 16_384, usize::MAX];
        let mut written = Vec::new();
        write_packed(&mut written, 3, &numbers);
        write_bytes(&mut written, 7, b"ab");
        let fields: Vec<Field<'_>> = Fields(&written).map(Result::unwrap).collect();
        let mut packed = Fields(fields[0].bytes().unwrap());
        let read: Vec<u64> = std::iter::from_fn(|| packed.varint()).collect();
        assert_eq!(read, numbers.map(|number| number as u64));
        assert_eq!(fields[1], Field { number: 7, value: Value::Bytes(b"ab") });
        assert_eq!(fields[1].text().unwrap(), "ab");
    }

    #[test]
    fn bytes_that_are_no_field_end_the_message_with_an_error() {
        for bytes in [&[0xff; 11][..], &[5 * 8 + 2, 9, 0], &[3], &[8], &[1, 0]] {
            let mut fields = Fields(bytes);
            assert!(fields.next().unwrap().is_err() && fields.next().is_none(), "{bytes:?}");
        }
    }
}
