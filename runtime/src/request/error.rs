//! Why a request has no scores. The application then falls back to its own default.

use hatchback_kernels::cuda::driver::CudaError;
use hatchback_kernels::dense::DenseError;
use std::sync::Arc;

/// Why a worker could not score a batch.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ScoreError {
    /// The batch was made for another model or is larger than the budget allows.
    #[error("request: {field}: {problem}")]
    Request { field: &'static str, problem: String },
    /// The dense network failed.
    #[error(transparent)]
    Dense(#[from] DenseError),
    /// The GPU failed, during the request or when the worker was made.
    #[error(transparent)]
    Cuda(#[from] Arc<CudaError>),
}

impl From<CudaError> for ScoreError {
    fn from(e: CudaError) -> Self {
        Self::Cuda(Arc::new(e))
    }
}

/// Why a pipeline has no scores for a request.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RequestError {
    /// Every slot is taken. Nothing was done; the caller may retry.
    #[error("busy: all {0} request slots are taken")]
    Busy(usize),
    /// The request does not fit the model, or the worker could not score it.
    #[error(transparent)]
    Score(Arc<ScoreError>),
    /// No model of the requested name is served.
    #[error("no such model is served")]
    NotServed,
    /// The worker panicked. A new worker took its place.
    #[error("the worker that served this request panicked")]
    Panicked,
}

impl From<ScoreError> for RequestError {
    fn from(e: ScoreError) -> Self {
        Self::Score(Arc::new(e))
    }
}
