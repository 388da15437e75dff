//! The rows of one table on flash: a base, the placed copies of its most used rows, the deltas over
//! it, and the overlay that says which of them to read for a key. One page read finds any row.

use crate::flash::overlay::{DELTA_PAGES_MAX, DELTAS_MAX, Newest, Overlay};
use crate::flash::segment::fences::AT_ONCE;
use crate::flash::segment::{Segment, SegmentError};

/// The placed segment's number in a [`RowLocation`].
pub const PLACED: u8 = u8::MAX;

/// The page that holds the newest version of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RowLocation {
    /// 0 for the base, then the deltas from the oldest; [`PLACED`] for the placed segment.
    pub segment: u8,
    /// The page in it.
    pub page: u32,
}

impl RowLocation {
    /// Both in one word, in the order in which pages are best read.
    pub fn pack(self) -> u64 {
        u64::from(self.segment) << 32 | u64::from(self.page)
    }

    /// What `pack` made.
    pub fn unpack(word: u64) -> Self {
        Self { segment: (word >> 32) as u8, page: word as u32 }
    }
}

/// All versions of a table's rows.
pub struct TableRows {
    /// The base, then the deltas from the oldest.
    segments: Vec<Segment>,
    placed: Option<Segment>,
    overlay: Overlay,
    /// Keys that the deltas hold or delete.
    changed: usize,
}

impl TableRows {
    /// Puts `deltas`, oldest first, over `base` and what is `placed` of it.
    ///
    /// # Errors
    /// Pages of keys are damaged, or there are too many.
    pub fn new(
        base: Segment,
        placed: Option<Segment>,
        deltas: Vec<Segment>,
    ) -> Result<Self, SegmentError> {
        let counts = deltas.iter().chain(&placed).map(|d| d.counts());
        let mut overlay = Overlay::with_capacity(counts.map(|c| c.rows + c.deletes).sum());
        if let Some(placed) = &placed {
            if placed.counts().data_pages > DELTA_PAGES_MAX {
                let problem = format!("{} pages are beyond the limit", placed.counts().data_pages);
                return Err(SegmentError::Field {
                    path: placed.path().to_owned(),
                    field: "placed",
                    problem,
                });
            }
            placed.each_key(|order, page| {
                overlay.set(order, page.map_or(Newest::Deleted, Newest::Placed));
            })?;
        }
        let mut changed = 0;
        for (number, delta) in deltas.iter().enumerate() {
            if number >= DELTAS_MAX || delta.counts().data_pages > DELTA_PAGES_MAX {
                let problem = format!(
                    "delta {number} of {} pages is beyond the limits",
                    delta.counts().data_pages
                );
                return Err(SegmentError::Field {
                    path: delta.path().to_owned(),
                    field: "deltas",
                    problem,
                });
            }
            delta.each_key(|order, page| {
                let newest = page.map_or(Newest::Deleted, |page| Newest::Delta(number, page));
                let before = overlay.set(order, newest);
                changed += usize::from(matches!(before, None | Some(Newest::Placed(_))));
            })?;
        }
        let segments = std::iter::once(base).chain(deltas).collect();
        Ok(Self { segments, placed, overlay, changed })
    }

    /// The page to read for `key`; `None` if the table does not have it.
    pub fn locate(&self, key: u64) -> Option<RowLocation> {
        let mut place = [None];
        self.locate_all(&[key], &mut place);
        place[0]
    }

    /// The same for as many keys as there are, faster: their cache misses overlap.
    pub fn locate_all(&self, keys: &[u64], places: &mut [Option<RowLocation>]) {
        let base = &self.segments[0];
        let order = |key: u64| base.kind().keys().order(key);
        for (keys, places) in keys.chunks(AT_ONCE).zip(places.chunks_mut(AT_ONCE)) {
            keys.iter().for_each(|key| self.overlay.prefetch(order(*key)));
            let mut pages = [None; AT_ONCE];
            base.locate(keys, &mut pages);
            for ((key, place), page) in keys.iter().zip(places).zip(pages) {
                *place = match self.overlay.get(order(*key)) {
                    None => page.map(|page| RowLocation { segment: 0, page }),
                    Some(Newest::Delta(delta, page)) => {
                        Some(RowLocation { segment: delta as u8 + 1, page })
                    }
                    Some(Newest::Placed(page)) => Some(RowLocation { segment: PLACED, page }),
                    Some(Newest::Deleted) => None,
                };
            }
        }
    }

    /// Which delta has the newest version of the key with this order, or that it is deleted; `None`
    /// if no delta has it, so that the base has the newest version.
    pub fn newest(&self, order: u64) -> Option<Newest> {
        self.overlay.get(order).filter(|newest| !matches!(newest, Newest::Placed(_)))
    }

    /// The base, then the deltas from the oldest.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The copies of the base's most used rows.
    pub fn placed(&self) -> Option<&Segment> {
        self.placed.as_ref()
    }

    /// The segment of a place.
    #[inline]
    pub fn segment(&self, place: RowLocation) -> &Segment {
        match &self.placed {
            Some(placed) if place.segment == PLACED => placed,
            _ => &self.segments[usize::from(place.segment)],
        }
    }

    /// Rows in the base.
    pub fn base_rows(&self) -> u64 {
        self.segments[0].counts().rows
    }

    /// Keys that the deltas hold or delete.
    pub fn changed(&self) -> usize {
        self.changed
    }

    /// Bytes of the indexes in memory.
    pub fn index_bytes(&self) -> usize {
        self.overlay.bytes() + self.segments.iter().map(Segment::index_bytes).sum::<usize>()
    }

    /// Bytes on flash.
    pub fn file_bytes(&self) -> u64 {
        self.segments.iter().chain(&self.placed).map(|s| s.counts().file_bytes()).sum()
    }

    /// Hands the newest version of every row to `take`, with the order of its key, segment by
    /// segment; placed copies are left aside. A damaged page goes to `damaged` and its rows are
    /// left out.
    ///
    /// # Errors
    /// The device refused.
    pub fn scan(
        &self,
        mut take: impl FnMut(u64, &[u8]),
        mut damaged: impl FnMut(SegmentError),
    ) -> Result<(), SegmentError> {
        for (number, segment) in self.segments.iter().enumerate() {
            segment.scan(
                |order, row| {
                    let newest = match self.overlay.get(order) {
                        None | Some(Newest::Placed(_)) => 0,
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
