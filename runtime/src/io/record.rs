//! Small records on flash: a magic, a format number, a CRC-32C of the body, then the body in
//! postcard. Refuses every other byte string. Never reads or writes a file.

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
    bytes.extend(crc32c(&body).to_le_bytes());
    assert_eq!(bytes.len(), HEADER_BYTES, "`decode` expects the body after the header");
    bytes.extend(body);
    bytes
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
    if word(8) != format {
        return Err(format!("format {} is not {format}, the one this version reads", word(8)));
    }
    if word(12) != crc32c(body) {
        return Err("checksum does not match".to_owned());
    }

    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(format!("{} bytes follow the record", rest.len())),
        Err(e) => Err(format!("does not decode ({e})")),
    }
}
