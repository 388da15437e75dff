//! The rows of one table on flash: a base, an optional clustered segment, the deltas, and the
//! overlay that says which of them has the newest version of a key. One page read finds any row.

use crate::flash::overlay::{Newest, Overlay};
use crate::flash::segment::fences::LOCATE_KEYS;
use crate::flash::segment::{Segment, SegmentError};
use crate::limits::{DELTA_PAGES_MAX, DELTAS_MAX};

/// The clustered segment's number in a [`RowLocation`].
pub const CLUSTERED: u8 = u8::MAX;

const _: () = assert!(DELTAS_MAX < CLUSTERED as usize, "u8 numbers the base and the deltas");

/// The page that holds the newest version of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RowLocation {
    /// 0 is the base, 1 the oldest delta, and so on; [`CLUSTERED`] is the clustered segment.
    pub segment: u8,
    /// The page of the segment.
    pub page: u32,
}

impl RowLocation {
    /// Packs both fields into one word. Words sort in the best order for reads.
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
    segments: Vec<Segment>,
    clustered: Option<Segment>,
    overlay: Overlay,
    /// Number of keys that the deltas change or delete.
    changed: usize,
}

impl TableRows {
    /// Puts `deltas`, oldest first, over `base` and its clustered segment.
    ///
    /// # Errors
    /// [`SegmentError`] if a key page is damaged, or if there are more deltas or pages than
    /// [`DELTAS_MAX`] and [`DELTA_PAGES_MAX`].
    pub fn new(
        base: Segment,
        clustered: Option<Segment>,
        deltas: Vec<Segment>,
    ) -> Result<Self, SegmentError> {
        let counts = deltas.iter().chain(&clustered).map(|d| d.counts());
        let mut overlay =
            Overlay::with_capacity(counts.map(|c| c.rows.saturating_add(c.deletes)).sum());

        if let Some(clustered) = &clustered {
            let pages = clustered.counts().data_pages;
            if pages > DELTA_PAGES_MAX {
                let problem = format!("{pages} pages, over {DELTA_PAGES_MAX}");
                return Err(SegmentError::field(clustered.path(), "clustered", problem));
            }
            clustered.each_key(|order, page| {
                overlay.set(order, page.map_or(Newest::Deleted, Newest::Clustered));
            })?;
        }

        let mut changed = 0;
        for (number, delta) in deltas.iter().enumerate() {
            let pages = delta.counts().data_pages;
            if number >= DELTAS_MAX || pages > DELTA_PAGES_MAX {
                let problem = format!("delta {number} of {pages} pages is beyond the limits");
                return Err(SegmentError::field(delta.path(), "deltas", problem));
            }
            delta.each_key(|order, page| {
                let newest = page.map_or(Newest::Deleted, |page| Newest::Delta(number, page));
                let before = overlay.set(order, newest);
                changed += usize::from(matches!(before, None | Some(Newest::Clustered(_))));
            })?;
        }

        let segments = std::iter::once(base).chain(deltas).collect();
        Ok(Self { segments, clustered, overlay, changed })
    }

    /// Returns the page to read for `key`; `None` if the table does not have the key.
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
            keys.iter().for_each(|key| self.overlay.prefetch(order(*key)));
            let mut pages = [None; LOCATE_KEYS];
            base.locate(keys, &mut pages);

            for ((key, location), page) in keys.iter().zip(locations).zip(pages) {
                *location = match self.overlay.get(order(*key)) {
                    None => page.map(|page| RowLocation { segment: 0, page }),
                    Some(Newest::Delta(delta, page)) => {
                        Some(RowLocation { segment: delta as u8 + 1, page })
                    }
                    Some(Newest::Clustered(page)) => Some(RowLocation { segment: CLUSTERED, page }),
                    Some(Newest::Deleted) => None,
                };
            }
        }
    }

    /// Returns the delta that has or deletes the newest version of the key with this order; `None`
    /// if no delta does, so that the base has the newest version.
    pub fn newest(&self, order: u64) -> Option<Newest> {
        self.overlay.get(order).filter(|newest| !matches!(newest, Newest::Clustered(_)))
    }

    /// Returns the base, then the deltas from the oldest.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Returns the clustered segment.
    pub fn clustered(&self) -> Option<&Segment> {
        self.clustered.as_ref()
    }

    /// Returns the segment of a location.
    #[inline]
    pub fn segment(&self, location: RowLocation) -> &Segment {
        match &self.clustered {
            Some(clustered) if location.segment == CLUSTERED => clustered,
            _ => &self.segments[usize::from(location.segment)],
        }
    }

    /// Returns the number of rows in the base.
    pub fn base_rows(&self) -> u64 {
        self.segments[0].counts().rows
    }

    /// Returns the number of keys that the deltas change or delete.
    pub fn changed(&self) -> usize {
        self.changed
    }

    /// Returns the bytes of the indexes in memory.
    pub fn index_bytes(&self) -> usize {
        self.overlay.bytes() + self.segments.iter().map(Segment::index_bytes).sum::<usize>()
    }

    /// Returns the bytes on flash.
    pub fn file_bytes(&self) -> u64 {
        self.segments.iter().chain(&self.clustered).map(|s| s.counts().file_bytes()).sum()
    }

    /// Passes the newest version of every row to `take`, with the order of its key, segment by
    /// segment. Skips the clustered segment. Passes the error of a damaged page to `damaged` and
    /// skips its rows.
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
                    let newest = match self.overlay.get(order) {
                        None | Some(Newest::Clustered(_)) => 0,
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
