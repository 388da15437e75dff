//! The datacenter and the desk: what the `hatchback` program does, as a library for its tests.

#![forbid(unsafe_code)]

pub mod bench;
pub mod demo;
pub mod eval;
mod hot;
pub mod image;
pub mod import;
pub mod inspect;
pub mod keys;
pub mod metrics;
pub mod onnx;
pub mod pack;
mod pack_table;
pub mod place;
pub mod plot;
mod present;
pub mod prune;
pub mod publish;
pub mod report;
pub mod run;
pub mod serve;
pub mod signing;
pub mod sort;
pub mod spec;
pub mod store;
pub mod sync;
pub mod synthetic;
pub mod tuf;
