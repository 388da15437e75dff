//! Shared parts of the tests that span several crates: a plain `reference` of the request flow,
//! small random [`models`], a stand-in for the GPU ([`standin`]) and a simulated disk
//! ([`sim_disk`]). A [`rewrite`]r makes hostile bundles with valid hashes. [`parsers`] lists all
//! parsers. Never part of the product.

#![deny(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used)]

pub mod certificates;
pub mod client;
pub mod flash_check;
pub mod fleet;
pub mod front_door;
pub mod goldens;
pub mod models;
pub mod mutate;
pub mod onnx;
pub mod parsers;
pub mod random;
pub mod reference;
pub mod rewrite;
pub mod rollout;
pub mod sim_disk;
pub mod stall;
pub mod standin;
pub mod versions;
pub mod victim;
pub mod whole_car;
pub mod wire;
