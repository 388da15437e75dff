//! The live record: which generation is live, of which segments each of its tables consists, and the same of
//! the generation before. The only commit point of the flash tier. Describes itself; needs no other file.

use crate::manifest::{Generation, Hash};
use crate::segment::Part;
use crc_fast::crc32_iscsi as crc32c;
use serde::{Deserialize, Serialize};

const MAGIC: &[u8; 8] = b"HATCHLIV";
const HEADER_BYTES: usize = 16;
/// The format of the live record.
pub const LIVE_FORMAT: u32 = 2;

/// A segment file: the folder of the generation that brought it, and which compaction of that generation made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SegmentRef {
    /// Sequence of the generation.
    pub sequence: u64,
    /// As it arrived 0, or 1 if it is placed; then counting up.
    pub serial: u32,
}

/// The segments of one table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableState {
    /// Every row, as of its generation.
    pub base: SegmentRef,
    /// The most used rows of the base once more, packed together; `None` if the trainer counted no lookups, and
    /// from the first compaction on, which makes them stale.
    pub placed: Option<SegmentRef>,
    /// What changed since, oldest first.
    pub deltas: Vec<SegmentRef>,
    /// Its most used keys; `None` if the trainer counted no lookups.
    pub hot: Option<HotList>,
}

/// A hot list: of the generation itself, or of one before that a delta left as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HotList {
    /// Sequence of the generation that brought it.
    pub sequence: u64,
    /// Its length.
    pub bytes: u64,
    /// SHA-256 of it.
    pub sha256: Hash,
}

impl TableState {
    /// All segments: the base, the placed one, the deltas.
    pub fn segments(&self) -> impl Iterator<Item = (SegmentRef, Part)> {
        let placed = self.placed.iter().map(|s| (*s, Part::Placed));
        let deltas = self.deltas.iter().map(|s| (*s, Part::Delta));
        std::iter::once((self.base, Part::Base)).chain(placed).chain(deltas)
    }
}

/// One generation as it lies on flash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Which generation.
    pub generation: Generation,
    /// SHA-256 of its manifest file.
    pub manifest: Hash,
    /// Its tables, in schema order.
    pub tables: Vec<TableState>,
}

/// The record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveRecord {
    /// What is served.
    pub live: State,
    /// What was served before and is kept to go back to.
    pub previous: Option<State>,
}

/// Why a live record is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct LiveError {
    /// Which field.
    pub field: &'static str,
    /// Its value and what is wrong.
    pub problem: String,
}

fn fault<T>(field: &'static str, problem: impl Into<String>) -> Result<T, LiveError> {
    Err(LiveError { field, problem: problem.into() })
}

impl LiveRecord {
    /// The bytes of the record: a magic, a format number, a CRC-32C, then postcard.
    pub fn encode(&self) -> Vec<u8> {
        // Strings and integers in memory always encode; an empty body would be refused by `decode`.
        let body = postcard::to_allocvec(self).unwrap_or_default();
        let mut bytes = MAGIC.to_vec();
        bytes.extend(LIVE_FORMAT.to_le_bytes());
        bytes.extend(crc32c(&body).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    /// Reads a record back.
    ///
    /// # Errors
    /// Which field is wrong and how.
    pub fn decode(bytes: &[u8]) -> Result<Self, LiveError> {
        let Some((header, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
            return fault("length", format!("{} bytes are too few", bytes.len()));
        };
        let word =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        if &header[..8] != MAGIC {
            fault("magic", "is not a live record")
        } else if word(8) != LIVE_FORMAT {
            fault("format", format!("{} is not {LIVE_FORMAT}, the one this version reads", word(8)))
        } else if word(12) != crc32c(body) {
            fault("checksum", "does not match")
        } else {
            match postcard::take_from_bytes(body) {
                Ok((record, [])) => Ok(record),
                Ok((_, rest)) => fault("length", format!("{} bytes follow the record", rest.len())),
                Err(e) => fault("record", format!("does not decode ({e})")),
            }
        }
    }
}
