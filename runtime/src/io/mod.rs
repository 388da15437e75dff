//! Files, pages and records: everything of the runtime that reads from or writes to flash. Knows
//! nothing of models, bundles or generations.

pub mod atomic_write;
pub mod disk;
pub mod field_error;
pub mod in_order;
pub mod page;
pub(crate) mod paired_record;
pub mod reader;
pub mod record;
mod uring;
