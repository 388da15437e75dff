//! The repository's side.

pub mod keys;
pub mod prune;
pub mod publish;
mod state;
pub mod store;
