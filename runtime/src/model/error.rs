//! Why a model cannot be opened or served.

use crate::flash::FlashError;
use crate::flash::segment::SegmentError;
use hatchback_kernels::cuda::driver::CudaError;
use hatchback_kernels::dense::DenseError;
use hatchback_kernels::gpu::GpuDenseError;

/// Why a model cannot be served.
#[derive(thiserror::Error)]
#[allow(missing_docs)]
pub enum OpenError {
    /// The flash directory cannot be used.
    #[error(transparent)]
    Flash(#[from] FlashError),
    /// A segment cannot be used.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The dense network cannot be used.
    #[error(transparent)]
    Dense(#[from] DenseError),
    /// The dense network cannot run on the GPU.
    #[error(transparent)]
    GpuDense(#[from] GpuDenseError),
    /// The GPU cannot hold or run the model.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A sample of the probe set cannot be scored.
    #[error("probe sample {sample}: {problem}")]
    Probe { sample: usize, problem: String },
    /// The model does not fit into the budget; `field` is the one to change.
    #[error("budget.{field} = {value}: {problem}")]
    Budget { field: &'static str, value: u64, problem: String },
}

debug_as_display!(OpenError);

impl OpenError {
    /// Returns true if the release is at fault: no car can serve it. The other errors depend on the
    /// car: its flash, its memory, its device and its engine.
    pub fn is_fault_of_release(&self) -> bool {
        matches!(self, Self::Dense(_) | Self::Probe { .. })
    }
}
