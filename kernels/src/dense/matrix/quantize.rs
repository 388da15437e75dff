//! Quantization of activations: each row of a product's left operand becomes bytes with a scale and
//! a zero point of its own, so that no row depends on another. Plain arithmetic that is compiled
//! for each instruction set, with the same bits on all. This file never allocates.

use crate::simd::{Job, Simd};

/// Bytes of a row that a dot product takes together. Rows are padded to a multiple.
pub(in crate::dense) const GROUP: usize = 4;
/// The bits of infinity. A float of these or greater bits without its sign is not finite.
const INFINITE: u32 = f32::INFINITY.to_bits();
/// The bit of a float's sign.
const SIGN: u32 = 1 << 31;

/// What turns the bytes of a row back into values: `scale * (byte - zero)`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::dense) struct RowScale {
    /// NaN if a value of the row is not finite.
    pub scale: f32,
    pub zero: i32,
}

/// How a kernel reads the bytes of a row. Only x86-64 has instructions for unsigned ones.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::dense) enum Bytes {
    /// As `u8`.
    Unsigned,
    /// As `i8`: each byte is 128 less than the unsigned one.
    Signed,
}

/// Quantizes every row of `a` `[rows, k]` into `to`, whose rows are `stride` apart.
pub(in crate::dense) struct Quantize<'a> {
    pub a: &'a [f32],
    pub k: usize,
    pub bytes: Bytes,
    pub to: &'a mut [u8],
    pub stride: usize,
    /// One for each row.
    pub scales: &'a mut [RowScale],
}

impl Job for Quantize<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let rows = self.a.chunks_exact(self.k).zip(self.to.chunks_exact_mut(self.stride));
        for ((row, to), scale) in rows.zip(self.scales) {
            *scale = quantize(row, to, self.bytes);
        }
    }
}

/// Quantizes `row` to 0..=255, from the least to the greatest of its values and zero. Zero itself
/// is exact.
#[inline(always)]
fn quantize(row: &[f32], to: &mut [u8], bytes: Bytes) -> RowScale {
    /// Adding it rounds to the nearest integer, which is then the lowest bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    let range = Range::of(row);

    // Halves of the range cannot overflow. A range of almost nothing counts as zeros.
    let step = range.max / 255.0 - range.min / 255.0;
    let inverse = if step >= f32::MIN_POSITIVE { 1.0 / step } else { 0.0 };
    let zero = (-range.min).mul_add(inverse, ROUND) - ROUND;

    let (shift, flip) = match bytes {
        Bytes::Unsigned => (0, 0),
        Bytes::Signed => (128, 0x80),
    };
    let rounded = ROUND + zero;
    for (to, x) in to.iter_mut().zip(row) {
        let byte = x.mul_add(inverse, rounded).to_bits() as i32 - ROUND.to_bits() as i32;
        *to = byte.clamp(0, 255) as u8 ^ flip;
    }
    let scale = if range.is_finite { step } else { f32::NAN };
    RowScale { scale, zero: zero as i32 - shift }
}

/// The range of a row's values and zero.
struct Range {
    min: f32,
    max: f32,
    is_finite: bool,
}

impl Range {
    /// Compares the bits as integers: the positive floats ascend in their order, and the negative
    /// ones descend in that of unsigned integers, after all positive ones.
    #[inline(always)]
    fn of(row: &[f32]) -> Self {
        let (mut greatest, mut least) = (0i32, 0u32);
        for x in row {
            greatest = greatest.max(x.to_bits() as i32);
            least = least.max(x.to_bits());
        }
        let greatest = greatest as u32;
        let has_negative = least > SIGN;
        Self {
            min: if has_negative { f32::from_bits(least) } else { 0.0 },
            max: f32::from_bits(greatest),
            is_finite: greatest < INFINITE && least & !SIGN < INFINITE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::dispatch;
    use crate::simd::isa::Isa;
    use proptest::prelude::*;

    fn quantized(row: &[f32], isa: Isa, bytes: Bytes) -> (Vec<u8>, RowScale) {
        let (mut to, mut scales) = (vec![0; row.len()], [RowScale::default()]);
        let (k, stride) = (row.len(), row.len());
        dispatch(isa, Quantize { a: row, k, bytes, to: &mut to, stride, scales: &mut scales });
        (to, scales[0])
    }

    proptest! {
        #[test]
        fn bytes_are_within_half_a_step_of_the_values_on_every_instruction_set(
            row in prop::collection::vec(prop_oneof![
                -4f32..4.0, Just(0.0), Just(-0.0), -1e-3f32..1e3, any::<f32>().prop_filter(
                    "finite", |x| x.is_finite()),
            ], 1..80),
        ) {
            let expected = quantized(&row, Isa::available()[0], Bytes::Unsigned);
            let (bytes, RowScale { scale, zero }) = &expected;
            for (byte, x) in bytes.iter().zip(&row) {
                let back = f64::from(*scale) * f64::from(i32::from(*byte) - zero);
                let off = (back - f64::from(*x)).abs();
                let size = f64::from(*scale) * (1.0 + 1e-4);
                prop_assert!(off <= size.max(1e-35), "{} is {}, step {}", x, back, scale);
                prop_assert!(*x != 0.0 || back == 0.0);
            }
            for isa in Isa::available() {
                prop_assert_eq!(&quantized(&row, isa, Bytes::Unsigned), &expected, "{:?}", isa);
                let (signed, scale) = quantized(&row, isa, Bytes::Signed);
                let flipped: Vec<u8> = bytes.iter().map(|b| b ^ 0x80).collect();
                prop_assert_eq!(signed, flipped, "{:?}", isa);
                prop_assert_eq!(scale, RowScale { scale: expected.1.scale, zero: zero - 128 });
            }
        }
    }

    #[test]
    fn a_row_with_a_value_that_is_not_finite_has_no_scale() {
        for isa in Isa::available() {
            for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for at in [0, 16, 39] {
                    let mut row = [1.0; 40];
                    row[at] = x;
                    assert!(quantized(&row, isa, Bytes::Signed).1.scale.is_nan(), "{isa:?}, {x}");
                }
            }
            assert_eq!(quantized(&[0.0; 9], isa, Bytes::Unsigned).0, [0; 9]);
        }
    }
}
