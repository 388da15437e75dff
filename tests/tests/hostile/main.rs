//! Hostile inputs: bundles, flash directories, callers, and bytes of any kind.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod fuzz_smoke;
mod hostile_bundle;
mod hostile_callers;
mod hostile_flash;
mod hostile_network;
