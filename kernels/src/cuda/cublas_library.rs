//! The parts that cuBLAS and cuBLASLt share: their errors, the rounding of factors, and the loading
//! of a library that has several possible names. Calls no function of either library.

use crate::cuda::error::{CudaError, load_problem};

/// Why cuBLAS is not used.
#[allow(missing_docs)]
#[derive(Debug, thiserror::Error)]
pub enum CublasError {
    /// No library could be loaded; `tried` has the loader's reason for each name.
    #[error("no {library} on this machine: {tried}")]
    NoLibrary { library: &'static str, tried: String },
    /// The library refused a call with this `cublasStatus_t`.
    #[error("cuBLAS: {call}: status {status}")]
    Refused { call: &'static str, status: i32 },
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// The type to which the factors of a product are rounded. Sums are always f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Factors {
    /// f32: not rounded.
    F32,
    /// TF32: 11 bits, with the range of f32.
    Tf32,
    /// f16: 11 bits.
    F16,
}

impl Factors {
    /// Returns the `cublasComputeType_t`.
    pub(super) fn compute_type(self) -> i32 {
        match self {
            Self::F32 => 68,
            Self::F16 => 74,
            Self::Tf32 => 77,
        }
    }
}

pub(super) fn check(call: &'static str, status: i32) -> Result<(), CublasError> {
    if status == 0 { Ok(()) } else { Err(CublasError::Refused { call, status }) }
}

/// Loads `library` under the first of `names` that `load_as` can load.
pub(super) fn load_any<C>(
    library: &'static str,
    names: &[&str],
    load_as: impl Fn(&str) -> Result<C, libloading::Error>,
) -> Result<C, CublasError> {
    let mut tried = Vec::new();
    for name in names {
        match load_as(name) {
            Ok(calls) => return Ok(calls),
            Err(e) => tried.push(load_problem(&e)),
        }
    }
    Err(CublasError::NoLibrary { library, tried: tried.join("; ") })
}
