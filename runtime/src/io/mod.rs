//! Files, pages and records: all code of the runtime that reads from or writes to flash. Knows no
//! models, bundles or generations.

pub mod atomic_write;
pub mod daily_bytes;
pub mod disk;
pub mod field_error;
pub mod in_order;
pub mod page;
pub mod paired_record;
pub mod reader;
pub mod record;
mod uring;
