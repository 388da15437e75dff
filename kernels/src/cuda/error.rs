//! Why the GPU cannot be used: the driver's errors as types, and the log of errors that no caller
//! can receive. Never calls the driver, except for the name of an error.

use crate::cuda::calls::{Calls, MissingDriver};
use std::error::Error;
use std::fmt;

/// The number of an error of the CUDA driver (`CUresult`). Any number may come from a driver that
/// is newer than this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverError(pub u32);

impl DriverError {
    pub(super) const OUT_OF_MEMORY: Self = Self(2);
    pub(super) const NO_DEVICE: Self = Self(100);
    pub(super) const RECORDING_INVALIDATED: Self = Self(901);
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Calls::get().ok().and_then(|calls| calls.name_of(self.0)) {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "error {}, which the driver does not name", self.0),
        }
    }
}

impl Error for DriverError {}

/// Why the GPU cannot be used. `NoDriver`, `NoGpu`, `TooOld`, `Lacks` and `NoKernels` mean that
/// this machine has no GPU for Hatchback: the caller uses the CPU or refuses to start.
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
    /// The driver library has no such function.
    #[error("the CUDA driver has no function {function}, which drivers from 11.4 on have")]
    Lacks { function: &'static str },
    /// No image of the kernels runs on this GPU; `problem` lists the images that were tried.
    #[error("no kernels for {gpu}: {problem}")]
    NoKernels { gpu: String, problem: String },
    /// The GPU's own memory has no room.
    #[error(
        "tables or buffers of {needed} bytes do not fit into the GPU's memory, of which {free} \
         bytes are free; lower cache_bytes_max or resident_bytes_max"
    )]
    NoRoom { needed: u64, free: u64 },
    /// A call into the driver failed; `call` is its purpose.
    #[error("CUDA: {call}: {error}")]
    Driver { call: &'static str, error: DriverError },
}

impl From<MissingDriver> for CudaError {
    fn from(missing: MissingDriver) -> Self {
        match missing {
            MissingDriver::Library => Self::NoDriver,
            MissingDriver::Function(function) => Self::Lacks { function },
        }
    }
}

pub(crate) type Result<T> = std::result::Result<T, CudaError>;

/// Converts the number that a call into the driver returned to a typed error.
pub(super) fn check(call: &'static str, result: u32) -> Result<()> {
    match result {
        0 => Ok(()),
        number => Err(CudaError::Driver { call, error: DriverError(number) }),
    }
}

/// Logs the failure of a destructor, which has no caller that could receive the error.
pub(crate) fn report(done: Result<()>) {
    if let Err(e) = done {
        log::error!("in a destructor: {e}");
    }
}

/// Returns the loader's reason why a library cannot be loaded. The text of `libloading` itself does
/// not include the reason.
pub(crate) fn load_problem(e: &libloading::Error) -> String {
    e.source().unwrap_or(e).to_string()
}
