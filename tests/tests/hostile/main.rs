//! Hostile inputs: bundles, flash directories, callers, and bytes of any kind.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod frames;
mod fuzz_smoke;
mod hostile_bundle;
mod hostile_callers;
mod hostile_flash;
mod hostile_floods;
mod hostile_network;
mod hostile_schema;
mod hostile_segments;
mod open;
