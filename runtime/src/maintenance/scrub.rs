//! Scrubbing: reading every page of the live generation's segments again, rows and index, a few at
//! a time, to find what went bad before a request or a start does; and putting a good page in a bad
//! one's place. Never guesses a page's content.

use crate::flash::live::SegmentRef;
use crate::flash::segment::Part;
use crate::flash::{Flash, FlashError, io_error};
use crate::io::page::{AlignedPage, PageBytes};
use serde::{Deserialize, Serialize};

/// Bad pages that one pass lists; a further pass, after the repair of these, lists the rest.
pub const DAMAGE_MAX: usize = 1024;

/// A bad page. Where it cannot be rebuilt it stays so until a snapshot brings the table anew.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damage {
    /// Number of the table.
    pub table: usize,
    /// Which of its segments.
    pub segment: SegmentRef,
    /// What that holds of the table.
    pub part: Part,
    /// Which page; 0 of a segment that does not open at all.
    pub page: u32,
    /// Keys that are lost with it, at most: those on it (exact but for the bases of sparse tables),
    /// or all of a segment that does not open without it.
    pub keys: u64,
    /// What is wrong with it.
    pub fault: String,
}

/// A pass over all pages. It may be kept and go on after the segments changed: those that took the
/// place of read ones wait for the next pass.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scrub {
    table: usize,
    /// Which of its segments, as `TableState::segments` has them.
    segment: usize,
    page: u32,
    /// Pages read in this pass.
    pub pages: u64,
    /// What was found in this pass.
    pub damage: Vec<Damage>,
}

impl Scrub {
    /// Reads up to `pages` pages. Returns whether more is left of the pass.
    pub fn step(&mut self, flash: &Flash, pages: u64) -> bool {
        let mut left = pages;
        let mut page = AlignedPage::zeroed();
        while left > 0 {
            let Some((of, part)) = self.current(flash) else { return false };
            let segment = match twice(|| flash.segment_pages(self.table, of, part)) {
                Ok(segment) => segment,
                // Without its trailer nothing says what its pages are.
                Err(e) => {
                    let keys = flash.manifest().schema.tables[self.table].rows;
                    self.page = 0;
                    self.found(of, part, keys, e.to_string());
                    self.next_segment();
                    (self.pages, left) = (self.pages.saturating_add(1), left - 1);
                    continue;
                }
            };
            let end = segment.counts().data_pages + segment.counts().index_pages;
            while self.page < end && left > 0 {
                if let Err(e) = twice(|| segment.prove(self.page, &mut page)) {
                    self.found(of, part, segment.keys_of(self.page), e.to_string());
                }
                self.page += 1;
                self.pages = self.pages.saturating_add(1);
                left -= 1;
            }
            // Beyond the end, where a compaction made the segment shorter since.
            if self.page >= end {
                self.next_segment();
            }
        }
        true
    }

    fn next_segment(&mut self) {
        (self.segment, self.page) = (self.segment.saturating_add(1), 0);
    }

    fn found(&mut self, segment: SegmentRef, part: Part, keys: u64, fault: String) {
        if self.damage.len() < DAMAGE_MAX {
            self.damage.push(Damage {
                table: self.table,
                segment,
                part,
                page: self.page,
                keys,
                fault,
            });
        }
    }

    /// The segment that the pass is in; `None` at its end.
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

/// What fails once is read once more: the transfer may have been at fault.
fn twice<T, E>(mut read: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    read().or_else(|_| read())
}

impl Flash {
    /// Puts `page` in the place of a damaged one. It must be exactly the page that was lost: its
    /// own checksum, segment and number prove it.
    ///
    /// # Errors
    /// The page is not the one that is damaged, or it cannot be written.
    pub fn repair(&self, damage: &Damage, page: &PageBytes) -> Result<(), FlashError> {
        let segment = self.segment_pages(damage.table, damage.segment, damage.part)?;
        segment.check(damage.page, page)?;
        let (path, _) = self.segment_place(damage.table, damage.segment, damage.part)?;
        self.disk().write_page(&path, damage.page, page).map_err(io_error(&path))
    }
}
