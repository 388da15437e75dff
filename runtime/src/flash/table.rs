//! The rows of one table on flash: a base and the deltas. The overlays map a key to the delta with
//! its newest version. One page read finds any row.
//!
//! The next generation of a table shares the open segments and the overlays of the previous one,
//! and adds an overlay for its own deltas. A key is looked up in the newest overlay first. If there
//! are more than [`OVERLAYS_MAX`] overlays, the two neighbours with the fewest keys together are
//! merged.

use crate::flash::overlay::{Newest, Overlay};
use crate::flash::segment::fences::LOCATE_KEYS;
use crate::flash::segment::{Segment, SegmentError};
use crate::limits::{DELTA_PAGES_MAX, DELTAS_MAX, OVERLAYS_MAX};
use std::sync::Arc;

const _: () = assert!(DELTAS_MAX < u8::MAX as usize, "u8 numbers the base and the deltas");

/// The page that holds the newest version of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RowLocation {
    /// 0 is the base, 1 the oldest delta, and so on.
    pub segment: u8,
    /// The page of the segment.
    pub page: u32,
}

impl RowLocation {
    /// Packs both fields into one word. The words sort by segment and then by page.
    pub fn pack(self) -> u64 {
        u64::from(self.segment) << 32 | u64::from(self.page)
    }

    /// Unpacks a word of [`RowLocation::pack`].
    ///
    /// # Panics
    /// If `word` is not a result of `pack`.
    pub fn unpack(word: u64) -> Self {
        assert!(word >> 40 == 0, "a packed location has 40 bits");
        Self { segment: (word >> 32) as u8, page: word as u32 }
    }
}

/// All versions of a table's rows.
pub struct TableRows {
    /// The base, then the deltas from the oldest.
    segments: Vec<Arc<Segment>>,
    /// From the oldest.
    overlays: Vec<Arc<Overlay>>,
    /// Number of keys that the deltas change or delete.
    changed: usize,
}

impl TableRows {
    /// Returns the rows of `base`, as `deltas`, oldest first, override them.
    ///
    /// # Errors
    /// [`SegmentError`] if a key page is damaged, or if there are more deltas or pages than
    /// [`DELTAS_MAX`] and [`DELTA_PAGES_MAX`].
    pub fn new(base: Arc<Segment>, deltas: Vec<Arc<Segment>>) -> Result<Self, SegmentError> {
        let base = Self { segments: vec![base], overlays: Vec::new(), changed: 0 };
        base.with_deltas(deltas)
    }

    /// Returns these rows with further `deltas`, oldest first. Both share the segments and
    /// overlays.
    ///
    /// # Errors
    /// Those of [`TableRows::new`].
    pub fn after(&self, deltas: Vec<Arc<Segment>>) -> Result<Self, SegmentError> {
        let before = Self {
            segments: self.segments.clone(),
            overlays: self.overlays.clone(),
            changed: self.changed,
        };
        before.with_deltas(deltas)
    }

    /// Adds `deltas` with one overlay for all their keys.
    fn with_deltas(mut self, deltas: Vec<Arc<Segment>>) -> Result<Self, SegmentError> {
        let keys = deltas.iter().map(|d| d.counts().rows.saturating_add(d.counts().deletes));
        let mut overlay = Overlay::with_capacity(keys.sum());
        for delta in deltas {
            let (number, pages) = (self.segments.len() - 1, delta.counts().data_pages);
            if number >= DELTAS_MAX || pages > DELTA_PAGES_MAX {
                let problem = format!("delta {number} of {pages} pages is beyond the limits");
                return Err(SegmentError::field(delta.path(), "deltas", problem));
            }
            delta.each_key(|order, page| {
                let newest = page.map_or(Newest::Deleted, |page| Newest::Delta(number, page));
                // A key that several deltas change counts once.
                let before = overlay.set(order, newest).or_else(|| self.newest(order));
                self.changed += usize::from(before.is_none());
            })?;
            self.segments.push(delta);
        }

        if !overlay.is_empty() {
            self.overlays.push(Arc::new(overlay));
        }
        if self.overlays.len() > OVERLAYS_MAX {
            self.merge_overlays();
        }
        Ok(self)
    }

    /// Merges the two neighbouring overlays with the fewest keys.
    fn merge_overlays(&mut self) {
        let keys = |&at: &usize| self.overlays[at].len() + self.overlays[at + 1].len();
        let Some(at) = (0..self.overlays.len() - 1).min_by_key(keys) else { return };
        let merged = self.overlays[at].with(&self.overlays[at + 1]);
        self.overlays[at] = Arc::new(merged);
        self.overlays.remove(at + 1);
    }

    /// Returns the page to read for `key`; `None` if the table cannot have the key. The page may
    /// lack the key: a sparse base has a page for every key.
    pub fn locate(&self, key: u64) -> Option<RowLocation> {
        let mut location = [None];
        self.locate_all(&[key], &mut location);
        location[0]
    }

    /// Writes the location of each key to `locations` `[keys]`. Faster than `locate` for each key,
    /// because the cache misses of the keys overlap.
    pub fn locate_all(&self, keys: &[u64], locations: &mut [Option<RowLocation>]) {
        let base = &self.segments[0];
        let order = |key: u64| base.kind().keys().order(key);
        for (keys, locations) in keys.chunks(LOCATE_KEYS).zip(locations.chunks_mut(LOCATE_KEYS)) {
            for overlay in &self.overlays {
                keys.iter().for_each(|key| overlay.prefetch(order(*key)));
            }
            let mut pages = [None; LOCATE_KEYS];
            // Also for keys that an overlay has: while this search runs, the prefetched slots
            // arrive.
            base.locate(keys, &mut pages);

            for ((key, location), page) in keys.iter().zip(locations).zip(pages) {
                *location = match self.newest(order(*key)) {
                    None => page.map(|page| RowLocation { segment: 0, page }),
                    Some(Newest::Delta(delta, page)) => {
                        Some(RowLocation { segment: delta as u8 + 1, page })
                    }
                    Some(Newest::Deleted) => None,
                };
            }
        }
    }

    /// Returns the newest version of the key with this order if a delta changed or deleted it;
    /// `None` if only the base may have it.
    pub fn newest(&self, order: u64) -> Option<Newest> {
        self.overlays.iter().rev().find_map(|overlay| overlay.get(order))
    }

    /// Returns the base, then the deltas from the oldest.
    pub fn segments(&self) -> &[Arc<Segment>] {
        &self.segments
    }

    /// Returns the segment of a location.
    #[inline]
    pub fn segment(&self, location: RowLocation) -> &Segment {
        &self.segments[usize::from(location.segment)]
    }

    /// Returns the number of rows in the base.
    pub fn base_rows(&self) -> u64 {
        self.segments[0].counts().rows
    }

    /// Returns the data pages of the longest segment.
    pub fn pages_max(&self) -> usize {
        self.segments.iter().map(|s| s.counts().data_pages as usize).max().unwrap_or(0)
    }

    /// Returns the number of keys that the deltas change or delete.
    pub fn changed(&self) -> usize {
        self.changed
    }

    /// Returns the bytes of the indexes in memory.
    pub fn index_bytes(&self) -> usize {
        let overlays: usize = self.overlays.iter().map(|overlay| overlay.bytes()).sum();
        overlays + self.segments.iter().map(|segment| segment.index_bytes()).sum::<usize>()
    }

    /// Returns the bytes of the indexes in memory that `before` does not share.
    pub fn own_index_bytes(&self, before: &Self) -> usize {
        let is_own =
            |overlay: &&Arc<Overlay>| !before.overlays.iter().any(|b| Arc::ptr_eq(b, overlay));
        let overlays: usize = self.overlays.iter().filter(is_own).map(|o| o.bytes()).sum();
        let is_own =
            |segment: &&Arc<Segment>| !before.segments.iter().any(|b| Arc::ptr_eq(b, segment));
        overlays + self.segments.iter().filter(is_own).map(|s| s.index_bytes()).sum::<usize>()
    }

    /// Returns the bytes on flash.
    pub fn file_bytes(&self) -> u64 {
        self.segments.iter().map(|s| s.counts().file_bytes()).sum()
    }

    /// Passes the newest version of every row to `take`, with the order of its key, segment by
    /// segment. Passes the error of a damaged page to `damaged` and skips its rows.
    ///
    /// # Errors
    /// [`SegmentError::Io`] if the device refused.
    pub fn scan(
        &self,
        mut take: impl FnMut(u64, &[u8]),
        mut damaged: impl FnMut(SegmentError),
    ) -> Result<(), SegmentError> {
        for (number, segment) in self.segments.iter().enumerate() {
            segment.scan(
                |order, row| {
                    let newest = match self.newest(order) {
                        None => 0,
                        Some(Newest::Delta(delta, _)) => delta + 1,
                        Some(Newest::Deleted) => usize::MAX,
                    };
                    if newest == number {
                        take(order, row);
                    }
                },
                &mut damaged,
            )?;
        }
        Ok(())
    }
}
