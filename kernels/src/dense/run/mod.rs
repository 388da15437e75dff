//! The run of a graph on the CPU: nodes are fused and get buffers (`layout.rs`), and are run block
//! after block (`plan.rs`). What a request computes once is found in `sharing.rs`. Knows no ONNX.

mod elementwise;
pub(crate) mod layout;
mod moves;
pub(in crate::dense) mod plan;
mod recurrent;
mod sequences;
pub(crate) mod sharing;
