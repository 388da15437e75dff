//! TensorRT: a dense network built on this GPU from its ONNX file, kept on disk, and run on a
//! stream. All calls go through `tensorrt/shim.cpp`, a separate library, which is built on machines
//! with TensorRT's headers. Hatchback can be built and started without TensorRT and without this
//! library. Never uses a plan that another machine built; never runs code that a plan contains.

mod build;
mod error;
mod plans;
mod shim;

pub use build::{BatchClass, Build, BuildInput, Types};
pub use error::{TensorRtError, Version};
pub use plans::{OpenBuild, Plans};
pub use shim::{Context, Engine, TensorRt};
