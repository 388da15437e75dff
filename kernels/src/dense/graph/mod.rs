//! From an ONNX file to typed nodes: `onnx.rs` reads and checks the file, `onnx_graph.rs` builds
//! the graph, and the other files translate the operators. Runs nothing.

mod casts;
mod finite;
mod folding;
pub(crate) mod forms;
pub(crate) mod functions;
mod indices;
pub(crate) mod interface;
pub(crate) mod joined_outputs;
mod known;
pub(crate) mod node;
pub mod onnx;
pub(crate) mod onnx_graph;
mod onnx_scan;
mod operators;
mod padding;
mod products;
mod recurrent;
mod reductions;
mod selections;
mod shape_operators;
mod stop;
mod stored;
pub(crate) mod tensor;
mod windows;

pub use known::{operators, operators_of};
