//! The rows of one table on flash: a base, the deltas over it, and the overlay that says which of them has
//! the newest version of a key. One page read finds any row.

use crate::overlay::{DELTA_PAGES_MAX, DELTAS_MAX, Newest, Overlay};
use crate::segment::{Segment, SegmentError};

/// The page that holds the newest version of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// 0 for the base, then the deltas from the oldest.
    pub segment: u8,
    /// The page in it.
    pub page: u32,
}

impl Place {
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
    overlay: Overlay,
}

impl TableRows {
    /// Puts `deltas`, oldest first, over `base`.
    ///
    /// # Errors
    /// A delta's pages of keys are damaged, or there are too many.
    pub fn new(base: Segment, deltas: Vec<Segment>) -> Result<Self, SegmentError> {
        let counts = deltas.iter().map(|d| d.counts());
        let mut overlay = Overlay::with_capacity(counts.map(|c| c.rows + c.deletes).sum());
        for (number, delta) in deltas.iter().enumerate() {
            if number >= DELTAS_MAX || delta.counts().data_pages > DELTA_PAGES_MAX {
                let problem =
                    format!("delta {number} of {} pages is beyond the limits", delta.counts().data_pages);
                return Err(SegmentError::Field { path: delta.path().to_owned(), field: "deltas", problem });
            }
            delta.each_delta_key(|order, page| {
                overlay.set(order, page.map_or(Newest::Deleted, |page| Newest::Delta(number, page)));
            })?;
        }
        let segments = std::iter::once(base).chain(deltas).collect();
        Ok(Self { segments, overlay })
    }

    /// The page to read for `key`; `None` if the table does not have it.
    #[inline]
    pub fn locate(&self, key: u64) -> Option<Place> {
        let base = &self.segments[0];
        match self.overlay.get(base.kind().keys().order(key)) {
            None => base.locate(key).map(|page| Place { segment: 0, page }),
            Some(Newest::Delta(delta, page)) => Some(Place { segment: delta as u8 + 1, page }),
            Some(Newest::Deleted) => None,
        }
    }

    /// Where the newest version of the key with this order is; `None` if no delta has it.
    pub fn newest(&self, order: u64) -> Option<Newest> {
        self.overlay.get(order)
    }

    /// The base, then the deltas from the oldest.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The segment of a place.
    pub fn segment(&self, place: Place) -> &Segment {
        &self.segments[usize::from(place.segment)]
    }

    /// Rows in the base.
    pub fn base_rows(&self) -> u64 {
        self.segments[0].counts().rows
    }

    /// Keys that the deltas hold or delete.
    pub fn changed(&self) -> usize {
        self.overlay.len()
    }

    /// Bytes of the indexes in memory.
    pub fn index_bytes(&self) -> usize {
        self.overlay.bytes() + self.segments.iter().map(Segment::index_bytes).sum::<usize>()
    }

    /// Bytes on flash.
    pub fn file_bytes(&self) -> u64 {
        self.segments.iter().map(|s| s.counts().file_bytes()).sum()
    }

    /// Hands the newest version of every row to `take`, with the order of its key, segment by segment. A
    /// damaged page goes to `damaged` and its rows are left out.
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
