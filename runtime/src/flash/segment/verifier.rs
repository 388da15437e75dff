//! Checking a segment that comes from outside, page by page in file order, before it may be used;
//! and that the rows of a placed segment are those of its base. Never keeps a row.

use crate::flash::segment::{
    Counts, FENCES_PER_PAGE, KEYS_PER_PAGE, Part, SHORT_KEYS_PER_PAGE, SegmentError, SegmentKind,
    fences_in, orders_in,
};
use crate::io::page::{Page, PageBytes, PageFault, PageKind, claimed_kind};
use crate::limits::PAGE_BYTES;
use crate::schema::KeySpace;
use crc_fast::crc32_iscsi as crc32c;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// What a placed segment says of its rows: their orders, ascending, and checksums.
#[derive(Debug, Default)]
pub struct Copies(Vec<(u64, u32)>);

/// A check under way.
pub struct SegmentVerifier {
    path: PathBuf,
    kind: SegmentKind,
    /// Rows of the table: before this segment, and with it.
    rows: Range<u64>,
    /// Rows so far of keys that an index table did not have before.
    rows_new: u64,
    counts: Counts,
    /// The order of the last row.
    last_row: Option<u64>,
    last_delete: Option<u64>,
    /// The rows of a placed segment so far, or those that a base has yet to repeat.
    copies: Vec<(u64, u32)>,
    /// How many of them the base has repeated.
    copies_met: usize,
    /// What the index pages must repeat: a base's fences, or the keys of another part.
    expected: Vec<u64>,
    /// How much of it they have.
    repeated: usize,
    done: bool,
}

impl SegmentVerifier {
    /// A check of a segment of `kind`, over a table of `rows.start` rows (0 for a base or what is
    /// placed of it), that makes it one of `rows.end`; `path` is what errors name.
    pub fn new(path: &Path, kind: SegmentKind, rows: Range<u64>) -> Self {
        Self {
            path: path.to_owned(),
            kind,
            rows,
            rows_new: 0,
            counts: Counts::default(),
            last_row: None,
            last_delete: None,
            copies: Vec::new(),
            copies_met: 0,
            expected: Vec::new(),
            repeated: 0,
            done: false,
        }
    }

    /// A check of a base that `copies` must have been copied from.
    pub fn of_copied(path: &Path, kind: SegmentKind, rows: Range<u64>, copies: Copies) -> Self {
        Self { copies: copies.0, ..Self::new(path, kind, rows) }
    }

    fn field<T>(&self, field: &'static str, problem: impl Into<String>) -> Result<T, SegmentError> {
        Err(SegmentError::Field { path: self.path.clone(), field, problem: problem.into() })
    }

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
        most: usize,
    ) -> Result<Page<'a>, SegmentError> {
        Page::check(page, self.kind.id, self.number(), kind, most).map_err(|e| self.page_error(e))
    }

    /// Takes the next whole pages.
    ///
    /// # Errors
    /// The first page or row that is wrong.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), SegmentError> {
        let (pages, rest) = bytes.as_chunks::<PAGE_BYTES>();
        if !rest.is_empty() {
            return self
                .field("length", format!("{} bytes follow the last whole page", rest.len()));
        }
        for page in pages {
            if self.done {
                return self.field("length", "pages follow the trailer");
            }
            match claimed_kind(page) {
                Some(PageKind::Trailer) => self.take_trailer(page)?,
                Some(PageKind::Fences) => self.take_fences(page)?,
                Some(PageKind::Keys) => self.take_keys(page, (PageKind::Keys, KEYS_PER_PAGE))?,
                Some(PageKind::ShortKeys) => {
                    self.take_keys(page, (PageKind::ShortKeys, SHORT_KEYS_PER_PAGE))?;
                }
                Some(PageKind::Deletes) => self.take_deletes(page)?,
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
        // Where keys are found by division, every page but the last is full.
        if !self.kind.has_fences() && !self.counts.rows.is_multiple_of(capacity as u64) {
            return self
                .field("rows", format!("page {} follows a page that is not full", self.number()));
        }
        if kind == PageKind::Hashed {
            self.take_orders(&checked)?;
            self.take_keys_of_index(&checked)?;
        }
        for row in 0..checked.count() {
            let bytes = checked.row(kind, self.kind.format.row_bytes(), row);
            self.kind.format.check(bytes).map_err(|source| {
                let (path, page) = (self.path.clone(), self.number());
                SegmentError::Row { path, page, row, source }
            })?;
            let indexed = self.counts.rows + row as u64;
            let order = if kind == PageKind::Hashed { checked.order(row) } else { indexed };
            self.take_copy(order, bytes)?;
        }
        self.counts.rows += checked.count() as u64;
        self.counts.data_pages += 1;
        Ok(())
    }

    /// Notes a row of a placed segment; holds a row of a base against its copy.
    fn take_copy(&mut self, order: u64, row: &[u8]) -> Result<(), SegmentError> {
        match (self.kind.part, self.copies.get(self.copies_met)) {
            (Part::Placed, _) => self.copies.push((order, crc32c(row))),
            (Part::Base, Some(&(placed, checksum))) if placed == order => {
                if checksum != crc32c(row) {
                    return self.field(
                        "placed",
                        format!("row of key order {order:#018x} is not the base's"),
                    );
                }
                self.copies_met += 1;
            }
            _ => {}
        }
        Ok(())
    }

    fn take_orders(&mut self, page: &Page<'_>) -> Result<(), SegmentError> {
        // The pages of a placed segment are in an order of their own.
        let after = self.last_row.filter(|_| self.kind.part != Part::Placed);
        page.check_order(after).map_err(|e| self.page_error(e))?;
        if self.kind.has_fences() {
            let prefix = page.order(0) >> 32;
            if self.last_row.is_some_and(|last| last >> 32 == prefix) {
                return self
                    .field("fences", format!("hash prefix {prefix:#010x} lies on two pages"));
            }
            self.expected.push(prefix);
        } else {
            self.expected.extend((0..page.count()).map(|i| page.order(i)));
        }
        self.last_row = Some(page.order(page.count() - 1));
        Ok(())
    }

    /// The keys of an index table end with its rows: a merge fills what is below its last key.
    fn take_keys_of_index(&mut self, page: &Page<'_>) -> Result<(), SegmentError> {
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

    /// A base has all rows, and a delta all those by which an index table has grown.
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
        let which = if self.kind.part == Part::Delta { "new ones " } else { "" };
        self.field("rows", format!("{found} {which}instead of {expected}"))
    }

    fn take_fences(&mut self, page: &PageBytes) -> Result<(), SegmentError> {
        let checked = self.page(page, PageKind::Fences, FENCES_PER_PAGE)?;
        if !self.kind.has_fences() {
            return self.field("fences", "this segment has none");
        }
        fences_in(&checked).try_for_each(|fence| self.repeat("fences", u64::from(fence)))?;
        self.counts.index_pages += 1;
        Ok(())
    }

    fn take_keys(
        &mut self,
        page: &PageBytes,
        (kind, per_page): (PageKind, usize),
    ) -> Result<(), SegmentError> {
        let checked = self.page(page, kind, per_page)?;
        if self.kind.part == Part::Base || self.counts.deletes > 0 {
            return self.field("keys", "do not belong here");
        }
        orders_in(kind, &checked).try_for_each(|order| self.repeat("keys", order))?;
        self.counts.index_pages += 1;
        Ok(())
    }

    /// An index page must say what the data pages said.
    fn repeat(&mut self, field: &'static str, found: u64) -> Result<(), SegmentError> {
        if self.expected.get(self.repeated) != Some(&found) {
            return self
                .field(field, format!("entry {} is not its row's or page's", self.repeated));
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
        if page != &self.kind.trailer(self.counts) {
            return self
                .field("trailer", "does not describe the pages before it as the manifest does");
        }
        if self.repeated != self.expected.len() {
            return self
                .field("index", format!("{} entries for {}", self.repeated, self.expected.len()));
        }
        if let (Part::Base, Some((order, _))) = (self.kind.part, self.copies.get(self.copies_met)) {
            return self.field("placed", format!("key order {order:#018x} is not in the base"));
        }
        self.check_rows()?;
        self.done = true;
        Ok(())
    }

    /// What the pages so far hold.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Ends the check; returns what the segment holds.
    ///
    /// # Errors
    /// The segment ended before its trailer.
    pub fn finish(self) -> Result<Counts, SegmentError> {
        if self.done {
            Ok(self.counts)
        } else {
            self.field("length", "the segment ends before its trailer")
        }
    }

    /// Ends the check of a placed segment; returns also what its base must hold.
    ///
    /// # Errors
    /// As `finish`, or a key is there twice.
    pub fn finish_placed(mut self) -> Result<(Counts, Copies), SegmentError> {
        self.copies.sort_unstable();
        if let Some(twice) = self.copies.windows(2).find(|w| w[0].0 == w[1].0) {
            return self.field("placed", format!("key order {:#018x} is there twice", twice[0].0));
        }
        let copies = Copies(std::mem::take(&mut self.copies));
        Ok((self.finish()?, copies))
    }
}
