//! The GPU: [`driver`] is the fence around CUDA. Kernels are CUDA C++ under `kernels/cuda`, built by its `make` and embedded
//! here.

pub mod cublas;
pub mod dense;
pub mod driver;
pub mod graph;
