//! Why the GPU cannot be used: the driver's errors, typed, and how errors that no caller can
//! receive are logged. Never calls the driver.

use cudarc::driver::DriverError;
use std::error::Error;

/// Why the GPU cannot be used. `NoDriver`, `NoGpu`, `TooOld` and `NoKernels` mean that this machine
/// has no GPU for Hatchback: the caller uses the CPU or refuses to start.
#[allow(missing_docs)]
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error("no CUDA driver on this machine (neither libcuda.so nor libcuda.so.1 can be loaded)")]
    NoDriver,
    #[error("the CUDA driver finds no GPU")]
    NoGpu,
    /// The driver or the GPU is older than the kernels.
    #[error("{what} is {found}, the kernels need {needed}")]
    TooOld { what: &'static str, found: String, needed: &'static str },
    /// No image of the kernels runs on this GPU; `problem` says which images were tried.
    #[error("no kernels for {gpu}: {problem}")]
    NoKernels { gpu: String, problem: String },
    /// A call into the driver failed; `call` says what it was for.
    #[error("CUDA: {call}: {error}")]
    Driver { call: &'static str, error: DriverError },
}

pub(crate) type Result<T> = std::result::Result<T, CudaError>;

/// Adds to a driver's error which call failed.
pub(super) trait Call<T> {
    fn call(self, call: &'static str) -> Result<T>;
}

impl<T> Call<T> for std::result::Result<T, DriverError> {
    fn call(self, call: &'static str) -> Result<T> {
        self.map_err(|error| CudaError::Driver { call, error })
    }
}

/// Logs the failure to free or destroy something: a destructor has no caller that could receive the
/// error.
pub(super) fn report(what: &str, done: std::result::Result<(), DriverError>) {
    if let Err(e) = done {
        log::error!("CUDA: failed to {what}: {e}");
    }
}

/// Returns the loader's reason why a library cannot be loaded; `libloading`'s own text only says
/// that it cannot.
pub(crate) fn load_problem(e: &libloading::Error) -> String {
    e.source().unwrap_or(e).to_string()
}
