//! The live record, which has two copies. It lists the segments and hot lists of the live
//! generation's tables, and those of the previous generation. Its replacement is the only commit
//! point of the flash tier. This file never reads or writes a file.

use crate::bundle::manifest::{Generation, Hash};
use crate::flash::segment::Part;
use crate::io::paired_record::PairedRecord;
use crate::limits::LIVE_BYTES_MAX;
use serde::{Deserialize, Serialize};

/// A segment file of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentRef {
    /// Sequence of the generation in whose folder the file is.
    pub sequence: u64,
    /// 0 for the base or delta of the bundle. Every compaction in the generation takes the next
    /// serial.
    pub serial: u32,
}

/// The segments of one table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableState {
    /// The segment with every row of the table.
    pub base: SegmentRef,
    /// The rows that changed since the base, oldest delta first.
    pub deltas: Vec<SegmentRef>,
    /// The most used keys; `None` if the trainer counted no lookups.
    pub hot: Option<HotList>,
}

/// A hot list of this generation, or of an earlier one if the deltas since brought none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct HotList {
    /// Sequence of the generation that brought the list.
    pub sequence: u64,
    pub bytes: u64,
    pub sha256: Hash,
}

impl TableState {
    /// Returns all segments: the base, then the deltas.
    pub fn segments(&self) -> impl Iterator<Item = (SegmentRef, Part)> {
        let deltas = self.deltas.iter().map(|s| (*s, Part::Delta));
        std::iter::once((self.base, Part::Base)).chain(deltas)
    }
}

/// The state of one generation on flash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct LiveState {
    pub generation: Generation,
    /// SHA-256 of the manifest file.
    pub manifest: Hash,
    /// The tables in schema order.
    pub tables: Vec<TableState>,
}

/// The content of the live record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveRecord {
    /// The generation that is served.
    pub live: LiveState,
    /// The generation that was live before. It is kept for a rollback.
    pub previous: Option<LiveState>,
    /// The lowest sequence that may be served. It is above that of `live` while a damaged
    /// generation is rebuilt from an older snapshot and the deltas that follow it.
    pub least: u64,
    /// Number of snapshots that replaced a damaged generation.
    pub rebuilds: u64,
}

/// The identity of a live generation: equal values mean the same rows in the same files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveId {
    /// SHA-256 of the manifest file.
    pub manifest: Hash,
    /// As in [`LiveRecord`].
    pub rebuilds: u64,
}

impl PairedRecord for LiveRecord {
    const MAGIC: &'static [u8; 8] = b"HATCHLIV";
    const FORMAT: u32 = 1;
    const NAMES: [&'static str; 2] = ["live.a", "live.b"];
    const BYTES_MAX: u64 = LIVE_BYTES_MAX;
}

impl LiveRecord {
    /// Returns the identity of the live generation.
    pub fn id(&self) -> LiveId {
        LiveId { manifest: self.live.manifest, rebuilds: self.rebuilds }
    }

    /// Returns whether the live generation may be served.
    pub fn may_serve(&self) -> bool {
        self.live.generation.sequence >= self.least
    }
}
