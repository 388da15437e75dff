//! The dense network: an ONNX file on the CPU. Its weights are packed once, and it reads its inputs
//! from the buffers that the lookup filled.
//!
//! The operators of recommendation models run on the kernels of this crate. These kernels allocate
//! nothing in a run, and their scores have the same bits for every batch and every instruction set.
//! A file with any other operator is refused by name. `gpu::dense_engine` is the twin on a GPU.
//!
//! A file passes these folders: `graph` (the ONNX file becomes typed nodes), `run` (the nodes get
//! buffers, and are run), `matrix` (the products of a run).

mod engine;
mod error;
#[doc(hidden)]
pub mod graph;
pub(crate) mod matrix;
pub(crate) mod run;
mod weights;

pub use engine::{DenseEngine, DenseScratch};
pub use error::DenseError;
pub use graph::forms::{Forms, forms, narrow, narrow_all, widen};
pub(crate) use graph::interface::match_interface;
pub use graph::joined_outputs::{JOINED_OUTPUT, check_joined, join_outputs};
pub use graph::{operators, operators_of};
pub use run::plan::MultiplyAdds;
pub use run::sharing::InputPart;
pub use weights::{Activation, DenseLayer, Weights};
