//! A model opened for serving: one generation's tables, caches and dense network. Knows neither
//! workers nor queues: the folder `request` opens a model and adds their memory to the model's.

pub(crate) mod backend;
pub mod budget;
pub mod capacity;
pub mod error;
pub(crate) mod generation_change;
pub(crate) mod memory_plan;
pub mod opened;
pub mod preload;
mod read_ahead;
pub(crate) mod row_writer;
pub mod served_tables;

pub use error::OpenError;
pub use opened::{CacheUse, Model};
