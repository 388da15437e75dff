//! The datacenter and the desk: what the `hatchback` program does, as a library for its tests.

#![forbid(unsafe_code)]

pub mod bench;
pub mod demo;
pub mod eval;
pub mod image;
pub mod import;
pub mod inspect;
pub mod pack;
pub mod report;
pub mod repository;
pub mod run;
pub mod serve;
pub mod sync;
pub mod tuf;
pub mod workload;
