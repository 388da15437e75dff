//! Matrix products with packed weights of f32, f16 and int8, for every instruction set. A product
//! allocates nothing, and knows no graph.

pub(in crate::dense) mod blocks;
mod column;
pub(crate) mod gemm;
mod int8;
mod int8_kernel;
mod lanes;
pub(in crate::dense) mod math;
pub(in crate::dense) mod microkernel;
pub(crate) mod pairs;
mod quantize;
mod sparse_rows;
pub(crate) mod tiling;
mod transpose;
