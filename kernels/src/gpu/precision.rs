//! How precisely a GPU may compute the dense network, and by how much its scores may then differ
//! from the CPU's. Never computes a score.

use crate::cuda::cublas_library::Factors;
use crate::gpu::tensorrt::Types;
use serde::Deserialize;

/// How precisely a GPU computes the dense network.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// As the CPU, to the bit: on Hatchback's kernels alone.
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
    /// Returns the largest difference of a score from the CPU's that this precision may make: a
    /// part of the score, or of 1 for scores below 1.
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

    /// Returns the name that a target has for it.
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

    /// Returns what cuBLAS rounds factors to; `None` if it cannot be used.
    pub(super) fn factors(self) -> Option<Factors> {
        match self {
            Self::Exact => None,
            Self::F32 => Some(Factors::F32),
            Self::Tf32 => Some(Factors::Tf32),
            Self::F16 => Some(Factors::F16),
        }
    }
}
