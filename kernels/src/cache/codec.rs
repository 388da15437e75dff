//! Row codecs: the encoding of one embedding row of `dim` values in bytes. FORMAT.md specifies it
//! to the bit, and every backend decodes to the same f32 bits. This file never reads files and
//! never allocates.

use crate::simd::{Plain, Simd};
use half::f16;
use serde::{Deserialize, Serialize};

/// Maximum bytes of an encoded row. A row with its 64-bit key must fit into one flash page beside
/// the page's header.
pub const ROW_BYTES_MAX: usize = 4064;

/// The encoding of a table's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Codec {
    /// `dim` little-endian f32.
    F32,
    /// `dim` little-endian IEEE f16.
    F16,
    /// `dim` u8 codes, then f16 scale, then f16 bias.
    U8,
    /// `ceil(dim / 2)` bytes of two 4-bit codes (low nibble first), then f16 scale, then f16 bias.
    U4,
}

impl Codec {
    /// Returns the name that model files and reports use.
    pub fn name(self) -> &'static str {
        match self {
            Codec::F32 => "f32",
            Codec::F16 => "f16",
            Codec::U8 => "u8",
            Codec::U4 => "u4",
        }
    }

    /// Returns the largest code, or `None` if values are stored as floats.
    pub fn code_max(self) -> Option<f32> {
        match self {
            Codec::F32 | Codec::F16 => None,
            Codec::U8 => Some(255.0),
            Codec::U4 => Some(15.0),
        }
    }

    /// Returns whether rows have a scale and a bias, which are multiplied by the table's unit.
    pub fn is_quantized(self) -> bool {
        self.code_max().is_some()
    }

    /// Returns the bytes of the codes or values, without scale and bias.
    fn value_bytes(self, dim: usize) -> usize {
        match self {
            Codec::F32 => 4 * dim,
            Codec::F16 => 2 * dim,
            Codec::U8 => dim,
            Codec::U4 => dim.div_ceil(2),
        }
    }

    /// Returns the bytes of one encoded row of `dim` values.
    pub fn row_bytes(self, dim: usize) -> usize {
        self.value_bytes(dim) + if self.is_quantized() { 4 } else { 0 }
    }
}

/// Why a row cannot be encoded, or why encoded bytes must not be served.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum RowFault {
    /// A decoded value, a scale or a bias is NaN or infinite.
    #[error("column {column} holds {value}, which is not finite")]
    NotFinite {
        /// Column of the value; `dim` for the scale, `dim + 1` for the bias.
        column: usize,
        /// The value.
        value: f32,
    },
    /// The value is finite, but the codec cannot hold a value so large.
    #[error("column {column} holds {value:?}, beyond what {codec} holds", codec = codec.name())]
    TooLarge {
        /// Column of the value.
        column: usize,
        /// The value.
        value: f32,
        /// The requested codec.
        codec: Codec,
    },
}

/// The encoding of one table's rows. Holding one proves that `unit` is a power of two in
/// `2^-64..=2^64` (1 for float codecs). No product in `decode` is therefore rounded or subnormal,
/// and its multiplications give the same bits in any order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowFormat {
    codec: Codec,
    dim: usize,
    unit: f32,
}

/// The largest magnitude of a unit exponent.
pub const UNIT_EXP_MAX: i8 = 64;

impl RowFormat {
    /// Returns the format of rows of `dim` values, or `None` if the unit exponent is out of range
    /// for the codec.
    pub fn new(codec: Codec, dim: usize, unit_exp: i8) -> Option<Self> {
        let max = if codec.is_quantized() { UNIT_EXP_MAX } else { 0 };
        let in_range = (-max..=max).contains(&unit_exp);
        in_range.then(|| Self { codec, dim, unit: 2f32.powi(i32::from(unit_exp)) })
    }

    /// Returns the codec.
    pub fn codec(&self) -> Codec {
        self.codec
    }

    /// Returns the number of values in a row.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Returns the factor of every scale and bias, a power of two.
    pub(crate) fn unit(&self) -> f32 {
        self.unit
    }

    /// Returns the bytes of an encoded row.
    pub fn row_bytes(&self) -> usize {
        self.codec.row_bytes(self.dim)
    }

    /// Encodes `row` `[dim]` into `out` `[row_bytes]`.
    ///
    /// # Errors
    /// [`RowFault::NotFinite`] or [`RowFault::TooLarge`] for the first value that the codec cannot
    /// hold.
    pub fn encode(&self, row: &[f32], out: &mut [u8]) -> Result<(), RowFault> {
        assert_eq!(row.len(), self.dim);
        assert_eq!(out.len(), self.row_bytes());

        if let Some((column, &value)) = row.iter().enumerate().find(|(_, v)| !v.is_finite()) {
            return Err(RowFault::NotFinite { column, value });
        }

        match self.codec {
            Codec::F32 => out
                .chunks_exact_mut(4)
                .zip(row)
                .for_each(|(b, v)| b.copy_from_slice(&v.to_le_bytes())),
            Codec::F16 => {
                for (column, (b, &value)) in out.chunks_exact_mut(2).zip(row).enumerate() {
                    b.copy_from_slice(&self.to_f16(column, value)?.to_le_bytes());
                }
            }
            Codec::U8 | Codec::U4 => self.encode_codes(row, out)?,
        }
        Ok(())
    }

    fn to_f16(self, column: usize, value: f32) -> Result<f16, RowFault> {
        let half = f16::from_f32(value);
        if half.is_finite() {
            Ok(half)
        } else {
            Err(RowFault::TooLarge { column, value, codec: self.codec })
        }
    }

    /// Encodes codes, scale and bias. Scale and bias are rounded to f16 first, and the codes are
    /// computed for the rounded pair.
    fn encode_codes(&self, row: &[f32], out: &mut [u8]) -> Result<(), RowFault> {
        let code_max = self.codec.code_max().unwrap_or(1.0);
        let too_large = |_| {
            let largest = row.iter().enumerate().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()));
            let (column, &value) = largest.unwrap_or((0, &0.0));
            RowFault::TooLarge { column, value, codec: self.codec }
        };
        let low = row.iter().copied().fold(f32::INFINITY, f32::min) / self.unit;
        let high = row.iter().copied().fold(f32::NEG_INFINITY, f32::max) / self.unit;
        let bias = self.to_f16(0, if row.is_empty() { 0.0 } else { low });
        let bias = bias.map_err(too_large)?;
        let scale = if row.is_empty() { 0.0 } else { (high - bias.to_f32()) / code_max };
        let mut scale = self.to_f16(0, scale).map_err(too_large)?;
        // All values are equal, or their range vanishes in f16. With 1 every code is 0, and nothing
        // is divided by zero.
        if scale.to_f32() <= 0.0 {
            scale = f16::ONE;
        }

        let (codes, parameters) = out.split_at_mut(self.codec.value_bytes(self.dim));
        parameters[..2].copy_from_slice(&scale.to_le_bytes());
        parameters[2..].copy_from_slice(&bias.to_le_bytes());

        let code = |v: f32| {
            let steps = (v / self.unit - bias.to_f32()) / scale.to_f32();
            // Scale and bias were rounded, so the lowest and the highest value may be outside of
            // the codes.
            steps.round_ties_even().clamp(0.0, code_max) as u8
        };
        match self.codec {
            Codec::U8 => codes.iter_mut().zip(row).for_each(|(c, v)| *c = code(*v)),
            _ => codes.iter_mut().zip(row.chunks(2)).for_each(|(c, pair)| {
                *c = code(pair[0]) | pair.get(1).map_or(0, |v| code(*v) << 4);
            }),
        }
        Ok(())
    }

    /// Returns the scale and the bias of a quantized row, each multiplied by the unit. Both
    /// products are exact.
    #[inline(always)]
    fn parameters<S: Simd>(&self, row: &[u8]) -> (f32, f32) {
        let p = &row[row.len() - 4..];
        let [scale, bias, ..] =
            S::widen(&[p[0], p[1], p[2], p[3], 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        (scale * self.unit, bias * self.unit)
    }

    /// Decodes `row` `[row_bytes]` into `out` `[dim]`: `out = code * scale + bias`.
    pub fn decode(&self, row: &[u8], out: &mut [f32]) {
        self.each_value::<Plain>(row, out, |o, value| *o = value);
    }

    /// Adds the decoded `row` to `out` `[dim]`, with one rounded f32 addition a column. With
    /// `first`, `out` counts as zeros.
    #[inline(always)]
    pub(crate) fn accumulate<S: Simd>(&self, row: &[u8], out: &mut [f32], first: bool) {
        if first {
            // Not `value` alone: sums start from 0.0, and 0.0 + -0.0 is 0.0.
            self.each_value::<S>(row, out, |o, value| *o = 0.0 + value);
        } else {
            self.each_value::<S>(row, out, |o, value| *o += value);
        }
    }

    /// Adds the decoded `row` times `weight` to `out` `[dim]`, with one rounded f32 product and one
    /// rounded f32 addition a column. With `first`, `out` counts as zeros.
    #[inline(always)]
    pub(crate) fn accumulate_weighted<S: Simd>(
        &self,
        row: &[u8],
        weight: f32,
        out: &mut [f32],
        first: bool,
    ) {
        if first {
            self.each_value::<S>(row, out, |o, value| *o = 0.0 + value * weight);
        } else {
            self.each_value::<S>(row, out, |o, value| *o += value * weight);
        }
    }

    /// Replaces each column of `out` `[dim]` with the decoded value of `row` if that value is
    /// larger, or if `first`.
    #[inline(always)]
    pub(crate) fn maximize<S: Simd>(&self, row: &[u8], out: &mut [f32], first: bool) {
        let take = |o: &mut f32, value: f32| {
            if first || value > *o {
                *o = value;
            }
        };
        self.each_value::<S>(row, out, take);
    }

    /// Calls `take` with each column of `out` and the decoded value for that column.
    #[inline(always)]
    fn each_value<S: Simd>(&self, row: &[u8], out: &mut [f32], take: impl Fn(&mut f32, f32)) {
        let (row, out) = (&row[..self.row_bytes()], &mut out[..self.dim]);

        match self.codec {
            Codec::F32 => {
                for (o, b) in out.iter_mut().zip(row.chunks_exact(4)) {
                    take(o, f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                }
            }
            Codec::F16 => {
                let (mut outs, mut halves) = (out.chunks_exact_mut(8), row.chunks_exact(16));
                for (out, halves) in outs.by_ref().zip(halves.by_ref()) {
                    let values = halves.first_chunk().map_or([0.0; 8], S::widen);
                    out.iter_mut().zip(values).for_each(|(o, v)| take(o, v));
                }

                let mut last = [0; 16];
                last[..halves.remainder().len()].copy_from_slice(halves.remainder());
                outs.into_remainder().iter_mut().zip(S::widen(&last)).for_each(|(o, v)| take(o, v));
            }
            Codec::U8 => {
                let (scale, bias) = self.parameters::<S>(row);
                out.iter_mut().zip(row).for_each(|(o, &c)| take(o, f32::from(c) * scale + bias));
            }
            Codec::U4 => {
                let (scale, bias) = self.parameters::<S>(row);
                let value = |code| f32::from(code) * scale + bias;
                let mut pairs = out.chunks_exact_mut(2);
                for (o, &c) in pairs.by_ref().zip(row) {
                    take(&mut o[0], value(c & 15));
                    take(&mut o[1], value(c >> 4));
                }
                if let [o] = pairs.into_remainder() {
                    take(o, value(row[self.dim / 2] & 15));
                }
            }
        }
    }

    /// Checks that encoded bytes from outside decode to finite values only.
    ///
    /// # Errors
    /// [`RowFault::NotFinite`] for the first value, scale or bias that is not finite.
    pub fn check(&self, row: &[u8]) -> Result<(), RowFault> {
        let not_finite = |(column, value): (usize, f32)| RowFault::NotFinite { column, value };
        let bad = match self.codec {
            Codec::F32 => {
                let values =
                    row.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                values.enumerate().find(|(_, v)| !v.is_finite())
            }
            Codec::F16 => {
                let values = row.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32());
                values.enumerate().find(|(_, v)| !v.is_finite())
            }
            Codec::U8 | Codec::U4 => {
                let (scale, bias) = self.parameters::<Plain>(row);
                // The codes need no check: 255 times the largest f16, times the largest unit, is
                // far below the largest f32.
                [(self.dim, scale), (self.dim + 1, bias)].into_iter().find(|(_, v)| !v.is_finite())
            }
        };
        bad.map_or(Ok(()), |b| Err(not_finite(b)))
    }
}

/// Chooses a table's unit exponent. If every scale is a normal f16 without a unit, the exponent is
/// 0, and the bytes are those of other libraries. Otherwise the unit is the power of two that
/// brings the largest magnitude just under 2^14. Rows of a millionth of that magnitude then still
/// have a normal scale.
///
/// `magnitude_max` is the largest absolute value of the table. `range_min` is the smallest `max -
/// min` of a row that is not zero.
pub fn choose_unit_exp(codec: Codec, magnitude_max: f32, range_min: f32) -> i8 {
    let Some(code_max) = codec.code_max() else { return 0 };
    let scale_is_normal = range_min == 0.0 || range_min / code_max >= f16::MIN_POSITIVE.to_f32();
    if magnitude_max == 0.0 || (scale_is_normal && magnitude_max < 16_384.0) {
        return 0;
    }
    let exp = magnitude_max.log2().floor() as i32 - 13;
    exp.clamp(-i32::from(UNIT_EXP_MAX), i32::from(UNIT_EXP_MAX)) as i8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::isa::Isa;
    use crate::simd::{Job, dispatch};
    use proptest::prelude::*;

    fn format(codec: Codec, dim: usize) -> RowFormat {
        RowFormat::new(codec, dim, 0).unwrap()
    }

    fn encoded(codec: Codec, row: &[f32]) -> Vec<u8> {
        let f = format(codec, row.len());
        let mut out = vec![0; f.row_bytes()];
        f.encode(row, &mut out).unwrap();
        out
    }

    #[test]
    fn golden_bytes() {
        let row = [0.0, 1.0, 2.0, 3.0];
        assert_eq!(encoded(Codec::F32, &row)[..8], [0, 0, 0, 0, 0, 0, 0x80, 0x3f]);
        assert_eq!(encoded(Codec::F16, &row), [0, 0, 0x00, 0x3c, 0x00, 0x40, 0x00, 0x42]);
        // The codes are FBGEMM's for this row; the scale is 1/85 as f16.
        assert_eq!(encoded(Codec::U8, &row), [0x00, 0x55, 0xaa, 0xff, 0x06, 0x22, 0, 0]);
        // FBGEMM's fused 4-bit row with f16 scale and bias, byte for byte.
        assert_eq!(encoded(Codec::U4, &row), [0x50, 0xfa, 0x66, 0x32, 0, 0]);
    }

    #[test]
    fn flat_rows_are_exact() {
        for codec in [Codec::U8, Codec::U4] {
            let mut out = [0.0; 3];
            let bytes = encoded(codec, &[0.5; 3]);
            format(codec, 3).decode(&bytes, &mut out);
            assert_eq!(out, [0.5; 3]);
        }
    }

    #[test]
    fn nan_scale_is_refused() {
        let mut bytes = encoded(Codec::U8, &[0.0, 1.0]);
        bytes[2..4].copy_from_slice(&f16::NAN.to_le_bytes());
        assert!(matches!(
            format(Codec::U8, 2).check(&bytes),
            Err(RowFault::NotFinite { column: 2, .. })
        ));
        let infinite =
            RowFormat::new(Codec::F32, 1, 0).unwrap().check(&f32::INFINITY.to_le_bytes());
        assert!(matches!(infinite, Err(RowFault::NotFinite { column: 0, .. })));
        assert!(format(Codec::F16, 1).encode(&[70000.0], &mut [0; 2]).is_err());
    }

    #[test]
    fn a_row_too_large_for_its_codes_is_refused_by_its_largest_value() {
        let format = RowFormat::new(Codec::U8, 3, UNIT_EXP_MAX).unwrap();
        let fault = format.encode(&[1.0, -3e38, 2e38], &mut [0; 7]).unwrap_err();
        assert_eq!(fault, RowFault::TooLarge { column: 1, value: -3e38, codec: Codec::U8 });
    }

    #[test]
    fn unit_saves_tiny_rows() {
        // The rows of a DLRM table with 292,775,614 rows are initialised within 5.8e-5. Without a
        // unit their scale is subnormal.
        let edge = 1.0 / 292_775_614f32.sqrt();
        // The factor makes the subnormal scale round down and clip the top of the row.
        let edge = 0.97 * edge;
        let row: Vec<f32> = (0..128).map(|i| edge * ((i * 37 % 128) as f32 / 63.5 - 1.0)).collect();
        let exp = choose_unit_exp(Codec::U8, edge, 2.0 * edge);
        let error = |unit_exp| {
            let f = RowFormat::new(Codec::U8, 128, unit_exp).unwrap();
            let (mut bytes, mut out) = (vec![0; f.row_bytes()], vec![0.0; 128]);
            f.encode(&row, &mut bytes).unwrap();
            f.decode(&bytes, &mut out);
            let square: f32 = row.iter().zip(&out).map(|(a, b)| (a - b).powi(2)).sum();
            (square / row.iter().map(|a| a * a).sum::<f32>()).sqrt()
        };
        assert!(error(exp) < 0.005, "{}", error(exp));
        assert!(error(0) > 2.0 * error(exp));
    }

    /// Decodes in f64, with exact products and one rounding at the end.
    fn decode_reference(codec: Codec, unit_exp: i8, bytes: &[u8], dim: usize) -> Vec<f32> {
        let unit = 2f64.powi(i32::from(unit_exp));
        let half = |at: usize| f64::from(f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32());
        let end = bytes.len();
        let code = |i: usize| match codec {
            Codec::U8 => f64::from(bytes[i]),
            _ => f64::from((bytes[i / 2] >> (4 * (i % 2))) & 15),
        };
        (0..dim)
            .map(|i| match codec {
                Codec::F32 => f32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().unwrap()),
                Codec::F16 => half(2 * i) as f32,
                _ => ((code(i) * half(end - 4) + half(end - 2)) * unit) as f32,
            })
            .collect()
    }

    struct Add<'a> {
        format: RowFormat,
        row: &'a [u8],
        out: &'a mut [f32],
    }

    impl Job for Add<'_> {
        type Out = ();
        #[inline(always)]
        fn run<S: Simd>(self) {
            self.format.accumulate::<S>(self.row, self.out, false);
        }
    }

    proptest! {
        #[test]
        fn decode_equals_reference_to_the_bit(
            row in prop::collection::vec(-60000f32..60000.0, 1..70),
            codec in prop::sample::select(vec![Codec::F32, Codec::F16, Codec::U8, Codec::U4]),
            shrink in -40i32..1,
        ) {
            let row: Vec<f32> = row.iter().map(|v| v * 2f32.powi(shrink)).collect();
            let largest = row.iter().fold(0f32, |m, v| m.max(v.abs()));
            let exp = choose_unit_exp(codec, largest, 0.0f32.max(largest * 1e-3));
            let f = RowFormat::new(codec, row.len(), exp).unwrap();
            let mut bytes = vec![0; f.row_bytes()];
            f.encode(&row, &mut bytes).unwrap();
            f.check(&bytes).unwrap();
            let (mut out, mut sum) = (vec![0.0; row.len()], vec![1.0; row.len()]);
            f.decode(&bytes, &mut out);
            let reference = decode_reference(codec, exp, &bytes, row.len());
            for isa in Isa::available() {
                sum.fill(1.0);
                dispatch(isa, Add { format: f, row: &bytes, out: &mut sum });
                for i in 0..row.len() {
                    prop_assert_eq!(out[i].to_bits(), reference[i].to_bits());
                    let expected = (1.0 + reference[i]).to_bits();
                    prop_assert_eq!(sum[i].to_bits(), expected, "{}", isa.name());
                }
            }
        }

        #[test]
        fn quantization_error_is_under_one_step(row in prop::collection::vec(-1f32..1.0, 2..40)) {
            let f = format(Codec::U8, row.len());
            let (mut bytes, mut out) = (vec![0; f.row_bytes()], vec![0.0; row.len()]);
            f.encode(&row, &mut bytes).unwrap();
            f.decode(&bytes, &mut out);
            let largest = row.iter().fold(f32::MIN, |m, v| m.max(*v));
            let range = largest - row.iter().fold(f32::MAX, |m, v| m.min(*v));
            // Half a step, the rounding of the scale over 255 steps, and the rounding of the bias.
            let bound = range / 255.0 * 0.5 + range / 2048.0 + 1.0 / 2048.0 + 1e-6;
            for (v, o) in row.iter().zip(&out) {
                prop_assert!((v - o).abs() <= bound, "{v} became {o}, bound {bound}");
            }
        }
    }
}
