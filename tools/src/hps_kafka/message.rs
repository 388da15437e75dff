//! One message: `u32 0x52544348 ("HCTR") | u32 value bytes | { key | f32 values }...`, all
//! little-endian. A message of the header alone is a beacon. The width of keys is not in the
//! message: HugeCTR's producer writes i64. Never allocates more than the message has bytes.

/// The first four bytes, as u32.
const MAGIC: u32 = 0x5254_4348;
/// Bytes before the first row.
const HEADER_BYTES: usize = 8;

/// The width of the keys of a topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyWidth {
    /// u32, zero-extended.
    Four,
    /// i64, as a u64 of the same bits.
    Eight,
}

impl KeyWidth {
    fn bytes(self) -> usize {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }
}

/// A decoded message.
#[derive(Clone, Debug, PartialEq)]
pub enum HpsMessage {
    /// A header without rows. Readers skip it before they look at the number.
    Beacon(u32),
    /// Rows of one table.
    Rows {
        /// The key of each row.
        keys: Vec<u64>,
        /// The values, `[keys.len(), dim]`.
        values: Vec<f32>,
    },
}

/// Why a message is refused.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum MessageError {
    #[error("message: {bytes} bytes are too few for the header of {HEADER_BYTES}")]
    Short { bytes: usize },
    #[error("message: magic is {found:#010x}, not {MAGIC:#010x}")]
    Magic { found: u32 },
    #[error("message: value bytes is {found}, but the table's dim {dim} takes {expected}")]
    ValueBytes { found: u32, expected: usize, dim: usize },
    #[error("message: {bytes} bytes of rows are not a multiple of {row_bytes}")]
    Length { bytes: usize, row_bytes: usize },
    #[error("message: row {row}, column {column} is {value}, not finite")]
    NotFinite { row: usize, column: usize, value: f32 },
    #[error("message: key {key} does not fit in 4 bytes")]
    Key { key: u64 },
}

impl HpsMessage {
    /// Decodes `bytes`, a message of a table of `dim` values a row.
    ///
    /// # Errors
    /// [`MessageError`] with the first field that is not allowed.
    pub fn decode(bytes: &[u8], dim: usize, width: KeyWidth) -> Result<Self, MessageError> {
        let Some((head, rows)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return Err(MessageError::Short { bytes: bytes.len() });
        };
        let word =
            |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (found, value_bytes) = (word(0), word(4));
        if found != MAGIC {
            return Err(MessageError::Magic { found });
        }
        if rows.is_empty() {
            return Ok(Self::Beacon(value_bytes));
        }

        let expected = 4 * dim;
        if value_bytes as usize != expected {
            return Err(MessageError::ValueBytes { found: value_bytes, expected, dim });
        }
        let row_bytes = width.bytes() + expected;
        if !rows.len().is_multiple_of(row_bytes) {
            return Err(MessageError::Length { bytes: rows.len(), row_bytes });
        }
        Self::decode_rows(rows, row_bytes, width)
    }

    fn decode_rows(rows: &[u8], row_bytes: usize, width: KeyWidth) -> Result<Self, MessageError> {
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (number, row) in rows.chunks_exact(row_bytes).enumerate() {
            let (key, row) = row.split_at(width.bytes());
            let mut bytes = [0; 8];
            bytes[..key.len()].copy_from_slice(key);
            keys.push(u64::from_le_bytes(bytes));
            for (column, value) in row.as_chunks().0.iter().enumerate() {
                let value = f32::from_le_bytes(*value);
                if !value.is_finite() {
                    return Err(MessageError::NotFinite { row: number, column, value });
                }
                values.push(value);
            }
        }
        Ok(Self::Rows { keys, values })
    }

    /// Encodes the message.
    ///
    /// # Errors
    /// [`MessageError::Key`] if a key does not fit the width.
    ///
    /// # Panics
    /// If the number of values is not a multiple of the number of keys.
    pub fn encode(&self, width: KeyWidth) -> Result<Vec<u8>, MessageError> {
        let mut bytes = MAGIC.to_le_bytes().to_vec();
        let (keys, values) = match self {
            Self::Beacon(number) => {
                bytes.extend(number.to_le_bytes());
                return Ok(bytes);
            }
            Self::Rows { keys, values } => (keys, values),
        };

        let dim = values.len().checked_div(keys.len()).unwrap_or_default();
        assert_eq!(dim * keys.len(), values.len(), "rows have one length");
        bytes.extend((4 * dim as u32).to_le_bytes());
        for (key, row) in keys.iter().zip(values.chunks(dim.max(1))) {
            let all = key.to_le_bytes();
            if all[width.bytes()..].iter().any(|byte| *byte != 0) {
                return Err(MessageError::Key { key: *key });
            }
            bytes.extend(&all[..width.bytes()]);
            row.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rows(keys: &[u64], values: &[f32]) -> HpsMessage {
        HpsMessage::Rows { keys: keys.to_vec(), values: values.to_vec() }
    }

    #[test]
    fn golden_bytes() {
        let golden = [
            0x48, 0x43, 0x54, 0x52, 8, 0, 0, 0, 0x2a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x80, 0x3f, 0, 0,
            0, 0xbf,
        ];
        let message = rows(&[42], &[1.0, -0.5]);
        assert_eq!(message.encode(KeyWidth::Eight).unwrap(), golden);
        assert_eq!(HpsMessage::decode(&golden, 2, KeyWidth::Eight).unwrap(), message);
        let beacon = HpsMessage::Beacon(7);
        assert_eq!(beacon.encode(KeyWidth::Eight).unwrap(), b"HCTR\x07\0\0\0");
        assert_eq!(HpsMessage::decode(b"HCTR\x07\0\0\0", 2, KeyWidth::Eight).unwrap(), beacon);
    }

    #[test]
    fn every_wrong_length_and_field_is_named() {
        let good = rows(&[1, 2], &[0.5; 6]).encode(KeyWidth::Eight).unwrap();
        let refused = |bytes: &[u8], dim| {
            HpsMessage::decode(bytes, dim, KeyWidth::Eight).unwrap_err().to_string()
        };
        for cut in 0..good.len() {
            let whole = [8, 28, 48].contains(&cut);
            assert_eq!(HpsMessage::decode(&good[..cut], 3, KeyWidth::Eight).is_ok(), whole);
        }
        assert!(refused(b"HCTR", 3).contains("4 bytes are too few"));
        assert!(refused(b"HCTX\0\0\0\0", 3).contains("magic is 0x58544348"));
        assert!(refused(&good, 4).contains("value bytes is 12, but the table's dim 4 takes 16"));
        assert!(refused(&good[..40], 3).contains("32 bytes of rows are not a multiple of 20"));
        let nan = rows(&[1], &[1.0, f32::NAN]).encode(KeyWidth::Eight).unwrap();
        assert!(refused(&nan, 2).contains("row 0, column 1 is NaN"));
        let wide = rows(&[1 << 32], &[1.0]).encode(KeyWidth::Four).unwrap_err();
        assert_eq!(wide, MessageError::Key { key: 1 << 32 });
    }

    proptest! {
        #[test]
        fn what_is_encoded_decodes(
            keys in prop::collection::vec(any::<u32>(), 1..20),
            dim in 1usize..9,
            is_wide: bool,
        ) {
            let width = if is_wide { KeyWidth::Eight } else { KeyWidth::Four };
            let keys: Vec<u64> = keys.into_iter().map(u64::from).collect();
            let values: Vec<f32> = (0..keys.len() * dim).map(|i| i as f32 / 8.0 - 3.0).collect();
            let message = rows(&keys, &values);
            let bytes = message.encode(width).unwrap();
            prop_assert_eq!(HpsMessage::decode(&bytes, dim, width).unwrap(), message);
        }

        #[test]
        fn any_bytes_decode_or_are_refused(
            bytes in prop::collection::vec(any::<u8>(), 0..80),
            dim in 0usize..6,
        ) {
            let framed = [b"HCTR", &(4 * dim as u32).to_le_bytes()[..], &bytes].concat();
            for bytes in [&bytes, &framed] {
                let _ = HpsMessage::decode(bytes, dim, KeyWidth::Four);
                let _ = HpsMessage::decode(bytes, dim, KeyWidth::Eight);
            }
        }
    }
}
