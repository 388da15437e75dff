//! Segments: immutable files of self-checking pages that hold rows of one table. One page read
//! finds any key. FORMAT.md draws the bytes. `writer` writes a segment in one pass; `verifier`
//! checks a segment that arrives in a bundle; `reader` opens one for reads.
//!
//! * A *base* holds every row of a table. An index table finds the page of a key by division. A
//!   sparse table keeps rows in key-hash order and one fence for each page in memory (`fences`).
//! * A *delta* holds the rows that one generation changed or inserted, and the keys that it
//!   deleted. Its keys are read at open into the table's overlay.

mod error;
pub mod fences;
mod index_pages;
mod key_steps;
mod kind;
mod reader;
pub mod verifier;
pub mod writer;

pub use error::SegmentError;
pub(crate) use kind::KEYS_PER_PAGE;
pub use kind::{Counts, Part, SEGMENT_FORMAT, SegmentKind};
pub use reader::Segment;
