//! A model opened for serving: one generation's tables, caches and dense network. Knows neither
//! workers nor queues: `request` opens a model and sums its memory with theirs.

pub(crate) mod backend;
pub mod budget;
pub mod capacity;
pub mod error;
pub(crate) mod generation_change;
pub mod opened;
pub mod preload;
pub(crate) mod row_writer;
pub mod served_tables;

pub use error::OpenError;
pub use opened::{CacheUse, Model};
