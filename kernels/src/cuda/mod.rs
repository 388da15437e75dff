//! The safe wrapper of CUDA. It knows no table and no network.
//!
//! * [`driver`]: the GPU, its streams, events and kernels; [`memory`]: device memory and pinned
//!   host memory; [`graph`]: recorded work; `branch`: a second stream beside one.
//! * [`cublas`]: matrix products by NVIDIA's library, with weights as [`matrix`] holds them.
//! * `calls`: the driver's functions; `context`: the context on a GPU, and its streams.
//! * `device`: the choice between CPU and GPU; `error`: why a GPU cannot be used.
//! * `footprint`: the memory that the driver takes.
//!
//! The GPU code for tables and networks is in `gpu`.

pub(crate) mod branch;
mod calls;
mod context;
pub mod cublas;
pub mod cublas_library;
mod cublas_lt;
mod device;
pub mod driver;
pub(crate) mod error;
mod footprint;
pub mod graph;
pub mod matrix;
pub mod memory;

pub use device::{Device, HostMemory};
