//! Why a request has no scores. The application then falls back to its own default.

use hatchback_kernels::cuda::driver::CudaError;
use hatchback_kernels::dense::DenseError;
use std::sync::Arc;

const DEADLINE_EXCEEDED: &str = "deadline exceeded: the request has no scores in time";

/// A score that is NaN or infinite: the dense features or the weights of the dense network are too
/// large. Such a value is never returned as a score.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "sample {sample}: score[{output}] is {value}, as it is after an infinite value or an index out \
     of range: the release cannot score this request; its network or weights are wrong, or the \
     dense values are far beyond those of its training"
)]
pub struct NotFinite {
    /// The sample, counted from 0 in its request.
    pub sample: usize,
    /// The output of the dense network, counted from 0.
    pub output: usize,
    /// NaN or an infinity.
    pub value: f32,
}

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
    /// A score is not a number.
    #[error(transparent)]
    NotFinite(#[from] NotFinite),
    /// The deadline passed before the rows of a table with the miss policy `wait` were read.
    #[error("{DEADLINE_EXCEEDED}")]
    DeadlineExceeded,
}

impl From<CudaError> for ScoreError {
    fn from(e: CudaError) -> Self {
        Self::Cuda(Arc::new(e))
    }
}

/// Why a pipeline has no scores for a request.
#[derive(Clone, thiserror::Error)]
pub enum RequestError {
    /// Every slot is taken. The request was not queued; the caller may retry.
    #[error("busy: all {0} request slots are taken")]
    Busy(usize),
    /// A swap came before the request was scored, and the new generation fills missing values or
    /// makes keys in another way. The caller may retry.
    #[error("busy: an update has changed how values are read; send the request again")]
    Replaced,
    /// The request does not fit the model, or the worker could not score it.
    #[error(transparent)]
    Score(Arc<ScoreError>),
    /// A score of the request is not a number. Other requests of the same batch keep their scores.
    #[error(transparent)]
    NotFinite(#[from] NotFinite),
    /// No model of the requested name is served.
    #[error("no such model is served")]
    NotServed,
    /// The deadline passed before the request was scored.
    #[error("{DEADLINE_EXCEEDED}")]
    DeadlineExceeded,
    /// The worker panicked. A new worker took its place.
    #[error("the worker that served this request panicked")]
    Panicked,
}

debug_as_display!(RequestError);

impl RequestError {
    /// Returns whether the GPU failed, which is not held against a release: the same request may
    /// succeed on this car later.
    pub(crate) fn is_fault_of_car(&self) -> bool {
        matches!(self, Self::Score(e) if matches!(**e, ScoreError::Cuda(_)))
    }
}

impl From<ScoreError> for RequestError {
    fn from(e: ScoreError) -> Self {
        match e {
            ScoreError::NotFinite(e) => Self::NotFinite(e),
            ScoreError::DeadlineExceeded => Self::DeadlineExceeded,
            e => Self::Score(Arc::new(e)),
        }
    }
}
