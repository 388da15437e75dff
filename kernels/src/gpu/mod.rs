//! The GPU code for tables and networks: the twins of `lookup` and `dense`. Their results equal the
//! CPU's to the bit, unless cuBLAS or TensorRT computes the products. Narrow weights are widened to
//! f32 here, so int8 weights are the other exception.
//!
//! * `launch`, `dense_kernels`: one typed function for each kernel; `numbers`: the numbers that
//!   kernels and host share. The kernels are CUDA C++ in `kernels/cuda`, built by its `make` and
//!   embedded here.
//! * [`tables`]: the caches and resident tables in device memory; [`lookup`]: the query of a batch;
//!   `feature`, `request`, `samples`: its features, the memory of its keys, and its sizes; `tile`:
//!   the work of a warp; `turns`: the order of queries and changes.
//! * `dense_plan`, `dense_engine`, `precision`, `input_type`: the dense network; [`tensorrt`]: the
//!   network by TensorRT.
//! * [`step`]: a whole request as one CUDA graph.
//! * [`device_info`]: a report about a GPU and its driver; [`gather`]: the limit with which lookups
//!   are compared.

mod dense_engine;
mod dense_error;
mod dense_kernels;
mod dense_loader;
mod dense_plan;
pub mod device_info;
mod feature;
pub mod gather;
mod input_type;
mod launch;
pub mod lookup;
mod numbers;
mod precision;
mod request;
mod samples;
pub mod step;
pub mod tables;
pub mod tensorrt;
mod tile;
mod turns;

pub use dense_engine::{
    DenseNetwork, DeviceEngine, DeviceOptions, DeviceScratch, GpuDense, TensorRtOptions,
};
pub use dense_error::GpuDenseError;
pub use dense_loader::BuiltPlan;
pub use dense_plan::RunShape;
pub use input_type::InputType;
pub use precision::Precision;
