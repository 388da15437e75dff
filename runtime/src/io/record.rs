//! Small records on flash: a magic, a format number, a CRC-32C of all other bytes, then the body in
//! postcard. Refuses every other byte string. Never reads or writes a file.
//!
//! A later format only appends fields to a record. So a program reads the records of an earlier
//! version, and after a downgrade those of a later one. Fields that are missing read as zero.

use crate::limits::APPENDED_BYTES_MAX;
use crc_fast::crc32_iscsi as crc32c;
use serde::Serialize;
use serde::de::DeserializeOwned;

const HEADER_BYTES: usize = 16;

/// Returns `value` as the bytes of a record.
pub(crate) fn encode(magic: &[u8; 8], format: u32, value: &impl Serialize) -> Vec<u8> {
    let Ok(body) = postcard::to_allocvec(value) else {
        unreachable!("strings and integers in memory always encode")
    };

    let mut bytes = magic.to_vec();
    bytes.extend(format.to_le_bytes());
    bytes.extend(checksum(&bytes, &body).to_le_bytes());
    assert_eq!(bytes.len(), HEADER_BYTES, "`decode` expects the body after the header");
    bytes.extend(body);
    bytes
}

/// Returns the checksum of a record: also of its format, which says what the body means.
fn checksum(start: &[u8], body: &[u8]) -> u32 {
    crc32c(&[start, body].concat())
}

/// Decodes the bytes of a record.
///
/// # Errors
/// Describes what is wrong with the bytes.
pub(crate) fn decode<T: DeserializeOwned>(
    magic: &[u8; 8],
    format: u32,
    bytes: &[u8],
) -> Result<T, String> {
    let Some((header, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return Err(format!("{} bytes are too few", bytes.len()));
    };
    let word = |at: usize| {
        u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };

    if &header[..8] != magic {
        return Err(format!("does not begin with {}", magic.escape_ascii()));
    }
    if word(8) == 0 {
        return Err("format 0 does not exist".to_owned());
    }
    if word(12) != checksum(&header[..12], body) {
        return Err("checksum does not match".to_owned());
    }

    // In postcard a zero byte is the number 0, `None`, `false`, an empty list or the first variant
    // of an enum.
    let padded = [body, &[0; APPENDED_BYTES_MAX][..]].concat();
    let body = if word(8) < format { &padded } else { body };
    match postcard::take_from_bytes(body) {
        Ok((_, rest)) if word(8) < format && rest.len() > APPENDED_BYTES_MAX => {
            Err(format!("{} bytes follow the record", rest.len() - APPENDED_BYTES_MAX))
        }
        Ok((_, rest)) if word(8) == format && !rest.is_empty() => {
            Err(format!("{} bytes follow the record", rest.len()))
        }
        Ok((value, _)) => Ok(value),
        Err(e) => Err(format!("does not decode ({e})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    const MAGIC: &[u8; 8] = b"HATCHTST";

    type First = (u64, String);
    #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
    struct Second {
        number: u64,
        text: String,
        list: Vec<u64>,
        option: Option<String>,
        is_set: bool,
    }

    #[test]
    fn programs_read_the_records_of_each_other() {
        let first: First = (7, "seven".to_owned());
        let before = encode(MAGIC, 1, &first);
        let second = Second { number: 7, text: "seven".to_owned(), ..Second::default() };
        assert_eq!(decode::<Second>(MAGIC, 2, &before).unwrap(), second, "after an upgrade");

        let full = Second { list: vec![1, 2], option: first.1.clone().into(), ..second.clone() };
        let after = encode(MAGIC, 2, &full);
        assert_eq!(decode::<First>(MAGIC, 1, &after).unwrap(), first, "after a downgrade");
        assert_eq!(decode::<Second>(MAGIC, 2, &after).unwrap(), full);

        // In one format nothing may follow, and nothing may be missing.
        assert!(decode::<First>(MAGIC, 2, &after).is_err());
        assert!(decode::<Second>(MAGIC, 1, &before).is_err());
        assert!(decode::<First>(MAGIC, 2, &encode(MAGIC, 1, &full)).is_err());
        assert!(decode::<First>(MAGIC, 1, &encode(MAGIC, 0, &first)).is_err());
    }
}
