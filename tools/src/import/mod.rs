//! Importers: how `hatchback pack` reads the embedding tables of a trainer.
//!
//! Every file layout consists of an array of values and perhaps arrays of keys and counts. The
//! module of a layout parses its headers into the places of these arrays; one reader (`rows.rs`)
//! streams them. An import never holds a whole table in memory, never unpickles and never repairs.
//! It refuses a file that does not match its layout exactly, and names file, field and value.
//!
//! An import does not detect duplicate keys: `pack` does when it sorts the rows. It does not drop
//! the padding rows of tables that DeepLearningExamples deployed.
//!
//! ```toml
//! [[table]]
//! name = "user"
//! dim = 64
//! source = { format = "hugectr", path = "dcn0_sparse_2000.model" }
//! ```

mod array;
mod column;
mod deployed;
mod dtype;
mod embedding_collection;
mod error;
mod frequent;
#[cfg(test)]
mod golden;
mod head;
mod hugectr;
mod npy;
pub mod onnx_writer;
mod rows;
mod safetensors;
mod sok;
mod source;

pub use error::ImportError;
pub use frequent::FrequentRows;
pub use rows::{BLOCK_BYTES, Blocks, RowBlock, Rows};
pub use source::{RowSource, Source, TakeBlock};
