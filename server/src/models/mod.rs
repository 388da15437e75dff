//! The models of the car, as callers see them: their descriptions, and the repository.

pub mod describe;
pub mod repository;
