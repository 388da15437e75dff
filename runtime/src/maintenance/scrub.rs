//! Scrubbing: reads every data and index page of the live generation's segments, a few at a time.
//! It thus finds damaged pages before a request or a start reads them. [`Flash::repair`] replaces a
//! damaged page with a correct one.

use crate::flash::live::SegmentRef;
use crate::flash::segment::Part;
use crate::flash::{Flash, FlashError, io_error};
use crate::io::page::{AlignedPage, PageBytes};
use crate::limits::{DAMAGE_MAX, VERIFY_PAGES};
use serde::{Deserialize, Serialize};

/// A damaged page. A page that cannot be rebuilt stays damaged until a snapshot replaces the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damage {
    /// The number of the table.
    pub table: usize,
    /// The segment of the table.
    pub segment: SegmentRef,
    /// The part of the table that the segment holds.
    pub part: Part,
    /// The number of the page; 0 if the segment does not open.
    pub page: u32,
    /// The most keys that are lost with the page. The number is exact except in the base of a
    /// sparse table. A damaged index page loses all keys of its segment.
    pub keys: u64,
    /// The problem of the page.
    pub fault: String,
}

/// A pass over all pages. If the segments change during the pass, the pass continues. Segments that
/// replace ones already read are read in the next pass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scrub {
    table: usize,
    /// The position in `TableState::segments`.
    segment: usize,
    page: u32,
    /// The number of pages read in this pass.
    pub pages: u64,
    /// The damage found in this pass, at most [`DAMAGE_MAX`] pages.
    pub damage: Vec<Damage>,
}

impl Scrub {
    /// Reads up to `pages` pages. Returns whether the pass has more pages.
    pub fn step(&mut self, flash: &Flash, pages: u64) -> bool {
        let mut left = pages;
        let room = VERIFY_PAGES.min(usize::try_from(pages).unwrap_or(VERIFY_PAGES));
        let mut buffer: Vec<_> = (0..room).map(|_| AlignedPage::zeroed()).collect();
        while left > 0 {
            let Some((of, part)) = self.current(flash) else { return false };
            let segment = match retry_once(|| flash.segment_pages(self.table, of, part)) {
                Ok(segment) => segment,
                // Without a valid trailer the kinds and the number of the pages are unknown.
                Err(e) => {
                    let keys = flash.manifest().schema.tables[self.table].rows;
                    self.found(of, part, PageLoss { page: 0, keys, fault: e.to_string() });
                    self.next_segment();
                    (self.pages, left) = (self.pages.saturating_add(1), left - 1);
                    continue;
                }
            };

            let end = segment.counts().data_pages + segment.counts().index_pages;
            while self.page < end && left > 0 {
                let some = left.min(u64::from(end - self.page)).min(room as u64);
                let run = &mut buffer[..some as usize];
                segment.verify_pages(self.page, run, |page, e| {
                    let (keys, fault) = (segment.keys_of(page), e.to_string());
                    self.found(of, part, PageLoss { page, keys, fault });
                });
                self.page += some as u32;
                self.pages = self.pages.saturating_add(some);
                left -= some;
            }
            // A compaction may have made the segment shorter since the last step.
            if self.page >= end {
                self.next_segment();
            }
        }
        true
    }

    fn next_segment(&mut self) {
        (self.segment, self.page) = (self.segment.saturating_add(1), 0);
    }

    fn found(&mut self, segment: SegmentRef, part: Part, loss: PageLoss) {
        let (PageLoss { page, keys, fault }, table) = (loss, self.table);
        // The catalog stores the list, so it has a limit. The next pass lists the rest.
        if self.damage.len() < DAMAGE_MAX {
            self.damage.push(Damage { table, segment, part, page, keys, fault });
        }
    }

    /// Returns the current segment of the pass; `None` at the end.
    fn current(&mut self, flash: &Flash) -> Option<(SegmentRef, Part)> {
        loop {
            let table = flash.record().live.tables.get(self.table)?;
            match table.segments().nth(self.segment) {
                Some(segment) => return Some(segment),
                None => (self.table, self.segment) = (self.table + 1, 0),
            }
        }
    }
}

/// A damaged page of the current segment.
struct PageLoss {
    page: u32,
    keys: u64,
    fault: String,
}

/// Repeats a failed read once: the transfer may have failed, not the flash.
fn retry_once<T, E>(mut read: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    read().or_else(|_| read())
}

impl Flash {
    /// Replaces a damaged page with `page`. The checksum, segment and number of `page` must be
    /// those of the damaged page.
    ///
    /// # Errors
    /// [`FlashError::Segment`] if `page` is another page, [`FlashError::Io`] if it cannot be
    /// written.
    pub fn repair(&self, damage: &Damage, page: &PageBytes) -> Result<(), FlashError> {
        let segment = self.segment_pages(damage.table, damage.segment, damage.part)?;
        segment.check(damage.page, page)?;
        let (path, _) = self.segment_file(damage.table, damage.segment, damage.part)?;
        self.disk().write_page(&path, damage.page, page).map_err(io_error(&path))
    }
}
