//! Checks a segment that arrives in a bundle, page by page in file order, before the segment may be
//! used. Keeps orders, never a row.

use crate::flash::segment::error::SegmentError;
use crate::flash::segment::index_pages::{each_order, fences_in, index_entries_max};
use crate::flash::segment::kind::{Counts, KEYS_PER_PAGE, Part, SegmentKind};
use crate::io::page::{Page, PageBytes, PageFault, PageKind, claimed_kind};
use crate::limits::PAGE_BYTES;
use crate::schema::KeySpace;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The check of one segment.
pub struct SegmentVerifier {
    path: PathBuf,
    kind: SegmentKind,
    /// The number of rows of the table before this segment, and after.
    rows: Range<u64>,
    /// Rows so far with keys that the index table did not have before.
    rows_new: u64,
    counts: Counts,
    /// The order of the last row.
    last_row: Option<u64>,
    last_delete: Option<u64>,
    /// The entries that the index pages must hold: a base's fences, or a delta's keys.
    expected: Vec<u64>,
    /// Number of `expected` entries that the index pages held so far.
    repeated: usize,
    /// Whether the trailer was checked.
    is_complete: bool,
}

impl SegmentVerifier {
    /// Starts the check of a segment of `kind` that grows its table from `rows.start` to `rows.end`
    /// rows. `rows.start` is 0 for a base. Errors name `path`.
    pub fn new(path: &Path, kind: SegmentKind, rows: Range<u64>) -> Self {
        Self {
            path: path.to_owned(),
            kind,
            rows,
            rows_new: 0,
            counts: Counts::default(),
            last_row: None,
            last_delete: None,
            expected: Vec::new(),
            repeated: 0,
            is_complete: false,
        }
    }

    fn field<T>(&self, field: &str, problem: impl Into<String>) -> Result<T, SegmentError> {
        Err(SegmentError::field(&self.path, field, problem))
    }

    /// Returns the number of the next page.
    fn number(&self) -> u32 {
        self.counts.data_pages.saturating_add(self.counts.index_pages)
    }

    fn page_error(&self, source: PageFault) -> SegmentError {
        SegmentError::Page { path: self.path.clone(), page: self.number(), source }
    }

    fn page<'a>(
        &self,
        page: &'a PageBytes,
        kind: PageKind,
        entries_max: usize,
    ) -> Result<Page<'a>, SegmentError> {
        Page::check(page, self.kind.id, self.number(), kind, entries_max)
            .map_err(|e| self.page_error(e))
    }

    /// Checks the next pages of the file.
    ///
    /// # Errors
    /// [`SegmentError`] for the first page or row that is not valid, or if `bytes` are not whole
    /// pages.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), SegmentError> {
        let (pages, rest) = bytes.as_chunks::<PAGE_BYTES>();
        if !rest.is_empty() {
            return self
                .field("length", format!("{} bytes follow the last whole page", rest.len()));
        }
        for page in pages {
            if self.is_complete {
                return self.field("length", "pages follow the trailer");
            }
            match claimed_kind(page) {
                Some(PageKind::Trailer) => self.take_trailer(page)?,
                Some(PageKind::Fences) => self.take_fences(page)?,
                Some(PageKind::KeySteps) => self.take_keys(page)?,
                Some(PageKind::Deletes) => self.take_deletes(page)?,
                // A page of no known kind fails there.
                _ => self.take_rows(page)?,
            }
        }
        Ok(())
    }

    fn take_rows(&mut self, page: &PageBytes) -> Result<(), SegmentError> {
        let (kind, capacity) = (self.kind.page_kind(), self.kind.rows_per_page());
        let checked = self.page(page, kind, capacity)?;

        if self.counts.index_pages > 0 {
            return self.field("pages", format!("rows follow the index on page {}", self.number()));
        }
        // Without fences a reader finds the page by division, so only the last page may be partly
        // filled.
        if !self.kind.has_fences() && !self.counts.rows.is_multiple_of(capacity as u64) {
            return self
                .field("rows", format!("page {} follows a page that is not full", self.number()));
        }
        if kind == PageKind::Hashed {
            self.take_orders(&checked)?;
            self.check_index_keys(&checked)?;
        }

        for row in 0..checked.count() {
            let bytes = checked.row(kind, self.kind.format.row_bytes(), row);
            self.kind.format.check(bytes).map_err(|source| {
                let (path, page) = (self.path.clone(), self.number());
                SegmentError::Row { path, page, row, source }
            })?;
        }

        self.counts.rows += checked.count() as u64;
        self.counts.data_pages += 1;
        Ok(())
    }

    fn take_orders(&mut self, page: &Page<'_>) -> Result<(), SegmentError> {
        page.check_order(self.last_row).map_err(|e| self.page_error(e))?;

        if self.kind.has_fences() {
            let shift = self.kind.fence_shift();
            let prefix = page.order(0) >> shift;
            // A lookup reads the last page whose fence is not above the prefix. Rows on the page
            // before would never be found.
            if self.last_row.is_some_and(|last| last >> shift == prefix) {
                return self.field("fences", format!("hash prefix {prefix:#010x} is on two pages"));
            }
            self.expected.push(prefix);
        } else {
            self.expected.extend((0..page.count()).map(|i| page.order(i)));
        }
        self.last_row = Some(page.order(page.count() - 1));
        Ok(())
    }

    /// Checks that no key of an index table is at or above the number of rows. A merge writes a row
    /// for every key below the highest, so one huge key would fill the flash.
    fn check_index_keys(&mut self, page: &Page<'_>) -> Result<(), SegmentError> {
        if self.kind.keys() == KeySpace::Sparse {
            return Ok(());
        }
        for order in (0..page.count()).map(|i| page.order(i)) {
            if order >= self.rows.end {
                return self.field("keys", format!("{order} is not in 0..{}", self.rows.end));
            }
            self.rows_new += u64::from(order >= self.rows.start);
        }
        Ok(())
    }

    /// Checks that a base has all rows, and that a delta has all new rows of an index table.
    fn check_rows(&self) -> Result<(), SegmentError> {
        let (found, expected) = match (self.kind.part, self.kind.keys()) {
            (Part::Base, _) => (self.counts.rows, self.rows.end),
            (Part::Delta, KeySpace::Index) => {
                (self.rows_new, self.rows.end.saturating_sub(self.rows.start))
            }
            _ => return Ok(()),
        };
        if found == expected {
            return Ok(());
        }
        let which = if self.kind.part == Part::Delta { "new rows " } else { "" };
        self.field("rows", format!("{found} {which}instead of {expected}"))
    }

    fn take_fences(&mut self, page: &PageBytes) -> Result<(), SegmentError> {
        let checked = self.page(page, PageKind::Fences, self.kind.fences_per_page())?;
        if !self.kind.has_fences() {
            return self.field("fences", "this segment has none");
        }
        let kind = self.kind.clone();
        fences_in(&kind, &checked).try_for_each(|fence| self.repeat("fences", fence))?;
        self.counts.index_pages += 1;
        Ok(())
    }

    fn take_keys(&mut self, page: &PageBytes) -> Result<(), SegmentError> {
        let kind = PageKind::KeySteps;
        let checked = self.page(page, kind, index_entries_max(&self.kind, kind, page))?;
        if self.kind.part != Part::Delta || self.counts.deletes > 0 {
            return self.field("keys", "do not belong in this place");
        }
        each_order(kind, &checked, |order| self.repeat("keys", order))?;
        self.counts.index_pages += 1;
        Ok(())
    }

    /// Checks the next entry of the index against the data pages.
    fn repeat(&mut self, field: &'static str, found: u64) -> Result<(), SegmentError> {
        if self.expected.get(self.repeated) != Some(&found) {
            return self
                .field(field, format!("entry {} is not that of its row or page", self.repeated));
        }
        self.repeated += 1;
        Ok(())
    }

    fn take_deletes(&mut self, page: &PageBytes) -> Result<(), SegmentError> {
        let checked = self.page(page, PageKind::Deletes, KEYS_PER_PAGE)?;
        if self.kind.part != Part::Delta {
            return self.field("deletes", "only a delta deletes keys");
        }
        checked.check_order(self.last_delete).map_err(|e| self.page_error(e))?;

        for order in (0..checked.count()).map(|i| checked.order(i)) {
            // The rows of a delta ascend (`take_orders`), so the list is sorted.
            if self.expected.binary_search(&order).is_ok() {
                return self.field(
                    "deletes",
                    format!("key order {order:#018x} is both written and deleted"),
                );
            }
        }

        self.last_delete = Some(checked.order(checked.count() - 1));
        self.counts.deletes += checked.count() as u64;
        self.counts.index_pages += 1;
        Ok(())
    }

    fn take_trailer(&mut self, page: &PageBytes) -> Result<(), SegmentError> {
        self.page(page, PageKind::Trailer, 1)?;
        // The whole page is compared, so the bytes between the fields cannot differ either.
        if page != &self.kind.trailer(self.counts) {
            return self
                .field("trailer", "does not describe the pages before it as the manifest does");
        }
        // The trailer counts pages, so it alone does not prove that the index is complete.
        if self.repeated != self.expected.len() {
            return self
                .field("index", format!("{} entries for {}", self.repeated, self.expected.len()));
        }
        self.check_rows()?;
        self.is_complete = true;
        Ok(())
    }

    /// Returns the counts of the pages so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Ends the check and returns the counts of the segment.
    ///
    /// # Errors
    /// [`SegmentError::Field`] if the segment ended before its trailer.
    pub fn finish(self) -> Result<Counts, SegmentError> {
        if self.is_complete {
            Ok(self.counts)
        } else {
            self.field("length", "the segment ends before its trailer")
        }
    }
}
