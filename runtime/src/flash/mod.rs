//! The flash directory: the generations on flash, and the record that says which of them is live.
//!
//! ```text
//! DIR/live.a live.b                 the live record
//! DIR/lock                          held by the one process that changes the directory
//! DIR/g000000000001/manifest        one folder for each generation that was installed
//! DIR/g000000000001/t0000-0000.seg  the rows of table 0: a base, or in a delta the changed rows
//! DIR/g000000000001/t0000-0001.seg  the base after a compaction
//! DIR/g000000000001/t0000-*.part    an unfinished compaction; the name is a hash of its inputs
//! DIR/g000000000001/t0000.hot       the hot list: the most used keys of table 0
//! DIR/g000000000001/dense.onnx
//! DIR/g000000000001/probe
//! DIR/g000000000001-1/...           the same since the first rebuild of a damaged generation
//! ```
//!
//! Invariants of this folder:
//! * A generation becomes live only after all its files are written, checked and durable. The
//!   replacement of the live record is the only commit point.
//! * A segment that the live or the previous generation uses never changes.
//! * A table has at most [`DELTAS_MAX`](crate::limits::DELTAS_MAX) deltas, ordered from the oldest.

mod directory;
mod error;
mod install;
pub mod live;
pub mod merge;
pub mod overlay;
mod paths;
mod room;
pub mod row_version;
pub mod segment;
mod settled;
pub mod table;

pub use directory::Flash;
pub(crate) use directory::Found;
pub use error::FlashError;
pub(crate) use error::io_error;
pub use install::{Prepared, Rebuild};
pub(crate) use room::check_space;
pub use settled::read_settled;
