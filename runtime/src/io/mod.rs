//! How files are reached.

pub mod atomic_write;
pub mod disk;
pub mod page;
pub mod reader;
pub mod record;
mod uring;
