//! Hatchback: the inference runtime that serves recommendation models with huge embedding tables in
//! a car.
//!
//! The request flow is [`score`]: a [`batch`] of dense features and sparse keys becomes scores with
//! a status. Below it lie the opened [`model`], the [`flash`] directory, its [`segment`]s and their
//! [`page`]s; beside it the [`bundle`] in which a model arrives and the [`manifest`] and [`schema`]
//! that describe it.
//!
//! The crate has no knowledge of the machine it runs on: directories, budgets ([`target`]) and time
//! are arguments.

#![deny(unsafe_code)]

pub mod bundle;
pub mod flash;
pub mod io;
pub mod limits;
pub mod maintenance;
pub mod model;
pub mod request;
pub mod schema;
pub mod target;
pub mod update;

pub use hatchback_kernels::cache::Cache;
pub use hatchback_kernels::cache::address::{KeySpaces, RowKey, mix, unmix};
pub use hatchback_kernels::cache::codec::{Codec, RowFault, RowFormat, choose_unit_exp};
pub use hatchback_kernels::dense::{Activation, DenseEngine, DenseError, Weights};
pub use hatchback_kernels::lookup::{LookupStatus, Pooling};
