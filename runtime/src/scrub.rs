//! Scrubbing: reading every page of the live generation's segments again, a few at a time, to find what went
//! bad before a request does; and putting a good page in a bad one's place. Never guesses a page's content.

use crate::flash::{Flash, FlashError, io_error};
use crate::live::SegmentRef;
use crate::page::PageBytes;
use crate::reader::AlignedPage;
use crate::segment::{Part, Segment, SegmentError};

/// A page that must be fetched again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Number of the table.
    pub table: usize,
    /// Which of its segments.
    pub segment: SegmentRef,
    /// Whether that is a base or a delta.
    pub part: Part,
    /// Which page.
    pub page: u32,
    /// What is wrong with it.
    pub fault: String,
}

/// A pass over all pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scrub {
    table: usize,
    /// 0 for the base, then the deltas.
    segment: usize,
    page: u32,
    /// Pages read in this pass.
    pub pages: u64,
    /// What was found in this pass.
    pub damage: Vec<Damage>,
}

impl Scrub {
    /// Reads up to `pages` pages. Returns whether more is left of the pass.
    ///
    /// # Errors
    /// A segment cannot be opened at all.
    pub fn step(&mut self, flash: &Flash, pages: u64) -> Result<bool, FlashError> {
        let until = self.pages + pages;
        while self.pages < until {
            let Some((of, part)) = self.current(flash) else { return Ok(false) };
            let segment = flash.segment(self.table, of, part)?;
            let mut page = AlignedPage::zeroed();
            while self.page < segment.counts().data_pages && self.pages < until {
                if let Err(e) = check(&segment, self.page, &mut page) {
                    let (table, page, fault) = (self.table, self.page, e.to_string());
                    self.damage.push(Damage { table, segment: of, part, page, fault });
                }
                self.page += 1;
                self.pages += 1;
            }
            if self.page == segment.counts().data_pages {
                (self.segment, self.page) = (self.segment + 1, 0);
            }
        }
        Ok(true)
    }

    /// The segment that the pass is in; `None` at its end.
    fn current(&mut self, flash: &Flash) -> Option<(SegmentRef, Part)> {
        loop {
            let table = flash.record().live.tables.get(self.table)?;
            match self.segment {
                0 => return Some((table.base, Part::Base)),
                n => match table.deltas.get(n - 1) {
                    Some(delta) => return Some((*delta, Part::Delta)),
                    None => (self.table, self.segment) = (self.table + 1, 0),
                },
            }
        }
    }
}

fn check(segment: &Segment, number: u32, page: &mut AlignedPage) -> Result<(), SegmentError> {
    // A page that fails once is read once more: the transfer may have been at fault.
    for attempt in 0..2 {
        let read = segment.read_page(number, page).and_then(|()| segment.check(number, &page.0).map(drop));
        match read {
            Err(e) if attempt == 1 => return Err(e),
            Err(_) => {}
            Ok(()) => return Ok(()),
        }
    }
    Ok(())
}

impl Flash {
    /// Puts `page`, fetched again from where the segment came from, in the place of a damaged one. It must be
    /// exactly that page: its own checksum, segment and number prove it.
    ///
    /// # Errors
    /// The page is not the one that is damaged, or it cannot be written.
    pub fn repair(&self, damage: &Damage, page: &PageBytes) -> Result<(), FlashError> {
        let segment = self.segment(damage.table, damage.segment, damage.part)?;
        segment.check(damage.page, page)?;
        let (path, _) = self.segment_place(damage.table, damage.segment, damage.part)?;
        self.disk().write_page(&path, damage.page, page).map_err(io_error(&path))
    }
}
