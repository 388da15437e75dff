//! The GPU twins of the CPU's verbs.

pub mod dense_engine;
pub mod dense_kernels;
mod dense_plan;
pub mod device_info;
mod launch;
pub mod lookup;
pub mod step;
pub mod tables;
pub mod tensorrt;
