//! The dense network: an ONNX file on the CPU. Its weights are packed once, and it reads its inputs
//! from the buffers that the lookup filled.
//!
//! The operators of recommendation models run on the kernels of this crate. These kernels allocate
//! nothing in a run, and their scores have the same bits for every batch and every instruction set.
//! A file with any other operator runs on rten (`fallback.rs`). `gpu::dense_engine` is the twin on
//! a GPU.
//!
//! A file passes these steps: `onnx.rs` (read and check), `onnx_graph.rs` and the files of the
//! operators (typed nodes), `layout.rs` (fused nodes and their buffers), `plan.rs` (a run).

mod blocks;
mod casts;
mod elementwise;
mod engine;
mod error;
mod fallback;
mod folding;
mod forms;
pub(crate) mod functions;
pub(crate) mod gemm;
mod int8;
mod int8_kernel;
mod interface;
mod joined_outputs;
mod lanes;
pub(crate) mod layout;
mod math;
mod microkernel;
mod moves;
#[doc(hidden)]
pub mod onnx;
pub(crate) mod onnx_graph;
mod operators;
mod padding;
mod pairs;
mod plan;
mod products;
mod quantize;
mod recurrent;
mod reductions;
mod selections;
mod sequences;
mod shape_operators;
mod sparse_rows;
mod stop;
mod stored;
pub(crate) mod tensor;
#[cfg(test)]
mod tests;
pub(crate) mod tiling;
mod transpose;
mod weights;

pub use engine::{DenseEngine, DenseScratch};
pub use error::DenseError;
pub use forms::{Forms, forms, narrow, narrow_all, widen};
pub(crate) use interface::match_interface;
pub use joined_outputs::{JOINED_OUTPUT, check_joined, join_outputs};
pub use weights::{Activation, DenseLayer, Weights};
