//! TensorRT: a dense network built on this GPU from its ONNX file, kept on disk, and run on a
//! stream. All calls go through `tensorrt/shim.cpp`, a library of its own that is built where
//! TensorRT's headers are installed: Hatchback needs neither to be built nor to start. Never uses a
//! plan that another machine built; never runs code that a plan contains.

mod build;
mod error;
mod library;
mod plans;
mod shim;

pub use build::{BatchClass, Build, BuildInput, Types};
pub use error::{TensorRtError, Version};
pub use library::{Engine, TensorRt};
pub use plans::Plans;
pub use shim::Context;
