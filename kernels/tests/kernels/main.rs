//! The kernels on networks of the field and on random ones.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cases;
mod dense;
mod integers;
mod limits;
mod lookups;
mod onnx_cases;
mod onnx_files;
mod shared;
mod small_graphs;
