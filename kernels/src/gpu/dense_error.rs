//! Why a dense network cannot run on the GPU. The caller then keeps the network on the CPU, or
//! refuses to start.

use crate::cuda::cublas_library::CublasError;
use crate::cuda::driver::{CudaError, Gpu};
use crate::dense::DenseError;
use crate::gpu::tensorrt::TensorRtError;

/// Why a dense network cannot run on the GPU.
#[allow(missing_docs)]
#[derive(Debug, thiserror::Error)]
pub enum GpuDenseError {
    /// The network cannot be used on the CPU either, or a batch is too large.
    #[error(transparent)]
    Dense(#[from] DenseError),
    /// No kernel for an operator of the network.
    #[error("dense network: no kernel on the GPU for {0}")]
    Unsupported(String),
    /// A buffer of the caller is too short, or belongs to another engine.
    #[error("dense network: {0}")]
    Buffers(String),
    /// A score on the GPU differs from the CPU's by more than `bound`, relative to the score, or to
    /// 1 if that is larger.
    #[error(
        "dense network: {backend}: a score differs from the CPU's by {difference:e}, \
         {bound:e} is allowed"
    )]
    ScoresDiffer { backend: String, difference: f32, bound: f32 },
    /// The network computes in f16 and does not take inputs of f16. They stay f32.
    #[error("inputs of f16: {0}")]
    F16Inputs(#[source] Box<GpuDenseError>),
    #[error("dense network: {0}")]
    Cublas(String),
    #[error("dense network: {0}")]
    Cuda(#[source] Box<CudaError>),
    #[error("dense network: {0}")]
    TensorRt(#[source] Box<TensorRtError>),
}

impl GpuDenseError {
    /// Returns whether building a plan again cannot help.
    pub(crate) fn is_final(&self) -> bool {
        match self {
            Self::Cuda(_) => true,
            Self::TensorRt(e) => matches!(**e, TensorRtError::Useless { .. }),
            _ => false,
        }
    }

    /// Returns the driver's error; any other error becomes [`CudaError::NoKernels`] for `gpu`.
    pub fn into_cuda(self, gpu: &Gpu) -> CudaError {
        match self {
            Self::Cuda(e) => *e,
            e => CudaError::NoKernels { gpu: gpu.name().to_owned(), problem: e.to_string() },
        }
    }
}

impl From<CudaError> for GpuDenseError {
    fn from(e: CudaError) -> Self {
        Self::Cuda(Box::new(e))
    }
}

impl From<TensorRtError> for GpuDenseError {
    fn from(e: TensorRtError) -> Self {
        Self::TensorRt(Box::new(e))
    }
}

impl From<CublasError> for GpuDenseError {
    fn from(e: CublasError) -> Self {
        match e {
            CublasError::Cuda(e) => e.into(),
            e => Self::Cublas(e.to_string()),
        }
    }
}
