//! The content of the catalog, one record. All of it can be rebuilt: it never decides which
//! generation is live.

use crate::flash::Flash;
use crate::io::daily_bytes::DailyBytes;
use crate::io::record;
use crate::maintenance::scrub::Scrub;
use serde::{Deserialize, Serialize};
use std::time::Duration;

const MAGIC: &[u8; 8] = b"HATCHCAT";
const FORMAT: u32 = 1;

/// The content of the catalog.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CatalogEntries {
    /// The sequence of the live generation at the last commit.
    pub sequence: u64,
    /// The bytes written to flash.
    pub wear: DailyBytes,
    /// The current scrub, or the last one if none is running.
    pub scrub: Scrub,
    /// The time at which the last scrub ended; `None` while a scrub is running.
    pub scrubbed: Option<Duration>,
}

impl CatalogEntries {
    /// Returns the entries after a loss: the wear budget of the day counts as spent.
    pub fn lost() -> Self {
        Self { wear: DailyBytes::unknown(), ..Self::default() }
    }

    /// Returns only the entries that are valid for any live generation.
    pub fn device_wide(&self) -> Self {
        Self { wear: self.wear, ..Self::default() }
    }

    /// Updates the entries to the live generation: removes the damage of other segments.
    pub fn follow(&mut self, flash: &Flash) {
        let live = &flash.record().live;
        self.sequence = live.generation.sequence;
        let is_live =
            |table: usize, of| live.tables.get(table)?.segments().find(|(live, _)| *live == of);
        self.scrub.damage.retain(|d| is_live(d.table, d.segment).is_some());
    }

    /// Encodes the entries for a store.
    pub fn encode(&self) -> Vec<u8> {
        record::encode(MAGIC, FORMAT, self)
    }

    /// Decodes entries from any bytes.
    ///
    /// # Errors
    /// Describes what is wrong with the bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        record::decode(MAGIC, FORMAT, bytes)
    }
}
