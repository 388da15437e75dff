//! What crosses crates. The library holds what the test files share: a plain [`reference`] of the
//! request flow, small random [`models`], the GPU that they run on ([`standin`]), a [`rewrite`]r
//! that makes hostile bundles with valid hashes, and the one list of all [`parsers`]. Never part of
//! the product.

#![deny(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used)]

pub mod flash_check;
pub mod fleet;
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
pub mod standin;
pub mod versions;
pub mod victim;
pub mod wire;
