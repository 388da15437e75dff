//! The work of the `hatchback` program, as a library for its tests: packing, publishing and
//! serving models in the datacenter and on a developer's machine (the desk).

#![forbid(unsafe_code)]
// Output goes through `report::output`, which handles a closed pipe.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod cli;
#[cfg(feature = "kafka")]
pub mod consume;
pub mod demo;
pub mod eval;
pub mod explain;
pub mod gate;
pub mod hps_kafka;
pub mod image;
pub mod import;
pub mod inspect;
pub mod install;
mod limits;
pub mod live;
pub mod pack;
pub mod plan;
pub mod report;
pub mod repository;
pub mod run;
pub mod select;
pub mod serve;
pub mod sync;
pub mod window;
pub mod workload;
