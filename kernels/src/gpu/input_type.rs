//! The type of a network input in device memory, which lookups fill. Never converts values on the
//! device.

use half::f16;

/// The type of the values of a network input. The buffer of an input has words of 32 bits: each is
/// an f32, or two f16 with the first in the low half.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InputType {
    /// f32.
    #[default]
    F32,
    /// f16, for an engine that computes in f16 and accepts f16 inputs.
    F16,
}

impl InputType {
    /// Returns the bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
        }
    }

    /// Returns the words of `values` values. The number of f16 values must be even.
    pub fn words(self, values: usize) -> usize {
        values * self.bytes() / 4
    }

    /// Returns `values` as words. The number of f16 values must be even.
    pub fn encode(self, values: &[f32]) -> Vec<f32> {
        let bits = |value: &f32| u32::from(f16::from_f32(*value).to_bits());
        let word = |pair: &[f32]| f32::from_bits(bits(&pair[0]) | bits(&pair[1]) << 16);
        match self {
            Self::F32 => values.to_vec(),
            Self::F16 => values.chunks_exact(2).map(word).collect(),
        }
    }
}
