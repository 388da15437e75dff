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
    /// A header without rows, which readers skip.
    Beacon,
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
            return Ok(Self::Beacon);
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns a message of rows of one value with keys of eight bytes.
    fn message(value_bytes: u32, rows: &[(u64, f32)]) -> Vec<u8> {
        let rows = rows
            .iter()
            .flat_map(|(key, value)| [&key.to_le_bytes()[..], &value.to_le_bytes()].concat());
        [&b"HCTR"[..], &value_bytes.to_le_bytes(), &rows.collect::<Vec<u8>>()].concat()
    }

    #[test]
    fn golden_bytes() {
        let wide = [
            0x48, 0x43, 0x54, 0x52, 8, 0, 0, 0, // head
            0x2a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x80, 0x3f, 0, 0, 0, 0xbf, // key 42, 1, -0.5
            0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, // key -2
            0, 0, 0, 0x40, 0, 0, 0x80, 0xbe, // 2, -0.25
        ];
        let rows = |keys| HpsMessage::Rows { keys, values: vec![1.0, -0.5, 2.0, -0.25] };
        let found = HpsMessage::decode(&wide, 2, KeyWidth::Eight);
        assert_eq!(found, Ok(rows(vec![42, u64::MAX - 1])));
        let narrow = [&wide[..12], &wide[16..28], &wide[32..]].concat();
        let found = HpsMessage::decode(&narrow, 2, KeyWidth::Four);
        assert_eq!(found, Ok(rows(vec![42, u64::from(u32::MAX) - 1])));
        let beacon = HpsMessage::decode(b"HCTR\x07\0\0\0", 2, KeyWidth::Eight);
        assert_eq!(beacon, Ok(HpsMessage::Beacon));
    }

    #[test]
    fn every_wrong_length_and_field_is_named() {
        let good = message(4, &[(1, 0.5), (2, 0.5)]);
        let refused = |bytes: &[u8], dim| {
            HpsMessage::decode(bytes, dim, KeyWidth::Eight).unwrap_err().to_string()
        };
        for cut in 0..good.len() {
            let whole = [8, 20].contains(&cut);
            assert_eq!(HpsMessage::decode(&good[..cut], 1, KeyWidth::Eight).is_ok(), whole);
        }
        assert!(refused(b"HCTR", 3).contains("4 bytes are too few"));
        assert!(refused(b"HCTX\0\0\0\0", 3).contains("magic is 0x58544348"));
        assert!(refused(&good, 4).contains("value bytes is 4, but the table's dim 4 takes 16"));
        assert!(refused(&good[..30], 1).contains("22 bytes of rows are not a multiple of 12"));
        let nan = message(4, &[(1, 1.0), (2, f32::NAN)]);
        assert!(refused(&nan, 1).contains("row 1, column 0 is NaN"));
    }

    proptest! {
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
