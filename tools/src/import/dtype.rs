//! The number types of stored embedding tables, and their decoders. All data is little-endian: the
//! layouts refuse big-endian data. Only f64 is rounded.

use std::fmt;

use half::{bf16, f16};

/// The stored type of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dtype {
    I32,
    I64,
    U32,
    U64,
    F16,
    Bf16,
    F32,
    F64,
}

/// Decodes bytes and appends the numbers to a list.
pub(super) type Decode<T> = fn(&[u8], &mut Vec<T>);

impl Dtype {
    /// Returns the bytes of one number.
    pub(super) fn size(self) -> u64 {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::U32 | Self::F32 => 4,
            Self::I64 | Self::U64 | Self::F64 => 8,
        }
    }

    /// Returns whether this is a signed integer type.
    pub(super) fn is_signed_integer(self) -> bool {
        matches!(self, Self::I32 | Self::I64)
    }

    /// Returns the decoder to values if this is a floating-point type. f16 and bf16 decode exactly;
    /// f64 is rounded to the nearest f32.
    pub(super) fn values(self) -> Option<Decode<f32>> {
        match self {
            Self::F16 => Some(|raw, out| decode(raw, out, |b| f16::from_le_bytes(b).to_f32())),
            Self::Bf16 => Some(|raw, out| decode(raw, out, |b| bf16::from_le_bytes(b).to_f32())),
            Self::F32 => Some(|raw, out| decode(raw, out, f32::from_le_bytes)),
            Self::F64 => Some(|raw, out| decode(raw, out, |b| f64::from_le_bytes(b) as f32)),
            Self::I32 | Self::I64 | Self::U32 | Self::U64 => None,
        }
    }

    /// Returns the decoder to keys if this is an integer type. A negative number becomes the u64 of
    /// the same 64 bits.
    pub(super) fn keys(self) -> Option<Decode<u64>> {
        match self {
            Self::I32 => Some(|raw, out| {
                decode(raw, out, |b| i64::from(i32::from_le_bytes(b)).cast_unsigned())
            }),
            Self::I64 | Self::U64 => Some(|raw, out| decode(raw, out, u64::from_le_bytes)),
            Self::U32 => Some(|raw, out| decode(raw, out, |b| u64::from(u32::from_le_bytes(b)))),
            Self::F16 | Self::Bf16 | Self::F32 | Self::F64 => None,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

fn decode<const N: usize, T>(raw: &[u8], out: &mut Vec<T>, one: impl Fn([u8; N]) -> T) {
    out.extend(raw.as_chunks::<N>().0.iter().map(|bytes| one(*bytes)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(dtype: Dtype, raw: &[u8]) -> Vec<f32> {
        let mut out = Vec::new();
        dtype.values().unwrap()(raw, &mut out);
        out
    }

    fn keys(dtype: Dtype, raw: &[u8]) -> Vec<u64> {
        let mut out = Vec::new();
        dtype.keys().unwrap()(raw, &mut out);
        out
    }

    #[test]
    fn halves_are_exact() {
        assert_eq!(
            values(Dtype::F16, &[0x00, 0x3c, 0x01, 0x00, 0xff, 0x7b]),
            [1.0, 2f32.powi(-24), 65504.0]
        );
        assert_eq!(
            values(Dtype::Bf16, &[0x80, 0x3f, 0x49, 0xc0, 0x01, 0x00]),
            [1.0, -3.140625, f32::from_bits(1 << 16)]
        );
    }

    #[test]
    fn doubles_round_to_nearest_even() {
        let half_step = 1.0 + f64::from(f32::EPSILON) / 2.0;
        assert_eq!(values(Dtype::F64, &half_step.to_le_bytes()), [1.0]);
        assert_eq!(values(Dtype::F64, &half_step.next_up().to_le_bytes()), [1.0 + f32::EPSILON]);
        assert_eq!(values(Dtype::F64, &1e300f64.to_le_bytes()), [f32::INFINITY]);
    }

    #[test]
    fn negative_keys_keep_their_64_bits() {
        assert_eq!(keys(Dtype::I32, &(-2i32).to_le_bytes()), [u64::MAX - 1]);
        assert_eq!(keys(Dtype::I64, &(-2i64).to_le_bytes()), [u64::MAX - 1]);
        assert_eq!(keys(Dtype::U32, &u32::MAX.to_le_bytes()), [u64::from(u32::MAX)]);
        assert_eq!(keys(Dtype::U64, &u64::MAX.to_le_bytes()), [u64::MAX]);
    }

    #[test]
    fn integers_are_no_values_and_floats_no_keys() {
        for dtype in [Dtype::I32, Dtype::I64, Dtype::U32, Dtype::U64] {
            assert!(dtype.values().is_none() && dtype.keys().is_some());
        }
        for dtype in [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64] {
            assert!(
                dtype.values().is_some() && dtype.keys().is_none() && !dtype.is_signed_integer()
            );
        }
    }
}
