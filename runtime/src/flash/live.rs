//! The live record: which generation is live, of which segments each of its tables consists, and
//! the same of the generation before. The only commit point of the flash tier. Describes itself;
//! needs no other file.

use crate::bundle::manifest::{Generation, Hash};
use crate::flash::segment::Part;
use crate::io::record;
use serde::{Deserialize, Serialize};

const MAGIC: &[u8; 8] = b"HATCHLIV";
/// The format of the live record.
pub const LIVE_FORMAT: u32 = 2;

/// A segment file: the folder of the generation that brought it, and which compaction of that
/// generation made it.
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
    /// The most used rows of the base once more, packed together; `None` if the trainer counted no
    /// lookups, and from the first compaction on, which makes them stale.
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
pub struct LiveState {
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
    pub live: LiveState,
    /// What was served before and is kept to go back to.
    pub previous: Option<LiveState>,
}

impl LiveRecord {
    /// The bytes of the record.
    pub fn encode(&self) -> Vec<u8> {
        record::encode(MAGIC, LIVE_FORMAT, self)
    }

    /// Reads a record back.
    ///
    /// # Errors
    /// What is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        record::decode(MAGIC, LIVE_FORMAT, bytes)
    }
}
