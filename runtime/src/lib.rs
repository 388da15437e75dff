//! Hatchback: the inference runtime that serves recommendation models with huge embedding tables in a car.
//!
//! The request flow is [`score`]: a [`batch`] of dense features and sparse keys becomes scores with a status.
//! Below it lie the opened [`model`], the [`flash`] directory, its [`segment`]s and their [`page`]s; beside it
//! the [`bundle`] in which a model arrives and the [`manifest`] and [`schema`] that describe it.
//!
//! The crate has no knowledge of the machine it runs on: directories, budgets ([`target`]) and time are
//! arguments.

#![deny(unsafe_code)]

mod absent;
pub mod batch;
pub mod budget;
pub mod bundle;
pub mod carry;
pub mod catalog;
pub mod commit;
pub mod compact;
pub mod disk;
mod fences;
mod fit;
pub mod flash;
mod lane;
pub mod limits;
pub mod live;
pub mod manifest;
pub mod merge;
pub mod model;
pub mod notes;
mod on_gpu;
pub mod overlay;
pub mod pace;
pub mod page;
pub mod pipeline;
mod preload;
pub mod reader;
pub mod repair;
pub mod sample;
pub mod schema;
pub mod score;
pub mod scrub;
mod sealed;
pub mod segment;
pub mod segment_check;
pub mod segment_write;
pub mod serving;
pub mod sync;
pub mod table_rows;
mod tables;
pub mod target;
pub mod upkeep;
mod uring;
pub mod wear;
pub mod weights;

pub use hatchback_kernels::cache::Cache;
pub use hatchback_kernels::codec::{Codec, RowFault, RowFormat, choose_unit_exp};
pub use hatchback_kernels::dense::{Activation, DenseEngine, DenseError, Weights};
pub use hatchback_kernels::names::{Names, RowKey, mix, unmix};
pub use hatchback_kernels::query::{Pooling, Status};
