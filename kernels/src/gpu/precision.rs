//! The precision with which a GPU may compute the dense network, and the bound on the difference of
//! its scores from the CPU's. Never computes a score.

use crate::cuda::cublas_library::Factors;
use crate::gpu::tensorrt::Types;
use serde::Deserialize;

/// The precision with which a GPU computes the dense network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// As the CPU with f32 weights, to the bit: on Hatchback's kernels alone.
    #[default]
    Exact,
    /// In f32, with sums in any order.
    F32,
    /// With factors of TF32: 11 bits, and sums of f32.
    Tf32,
    /// With factors and results of f16: 11 bits and a smaller range.
    F16,
}

impl Precision {
    /// Returns the largest allowed difference of a score from the CPU's with this precision. It is
    /// relative to the score, or to 1 for scores below 1.
    pub fn difference_bound(self) -> f32 {
        match self {
            Self::Exact => 0.0,
            Self::F32 => 1e-4,
            // Ten roundings to 11 bits.
            Self::Tf32 => 5e-3,
            // Results between layers are rounded too.
            Self::F16 => 1e-2,
        }
    }

    /// Returns its name in a target.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::F16 => "f16",
        }
    }

    /// Returns the types that TensorRT may compute in.
    pub(super) fn types(self) -> Types {
        match self {
            Self::Exact | Self::F32 => Types::F32,
            Self::Tf32 => Types::Tf32,
            Self::F16 => Types::F16,
        }
    }

    /// Returns the type to which cuBLAS rounds factors; `None` if it cannot be used.
    pub(super) fn factors(self) -> Option<Factors> {
        match self {
            Self::Exact => None,
            Self::F32 => Some(Factors::F32),
            Self::Tf32 => Some(Factors::Tf32),
            Self::F16 => Some(Factors::F16),
        }
    }
}
