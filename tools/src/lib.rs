//! The datacenter and the desk: what the `hatchback` program does, as a library for its tests.

#![forbid(unsafe_code)]

pub mod import;
pub mod pack;
pub mod sort;
pub mod spec;
