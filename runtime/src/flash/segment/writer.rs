//! Writes a segment in one pass. The caller adds the rows in key order. Never seeks in its output.

use crate::flash::segment::key_steps::{self, STEPS_PER_PAGE_MIN};
use crate::flash::segment::kind::{Counts, KEYS_PER_PAGE, PAYLOAD_BYTES, Part, SegmentKind};
use crate::io::page::{Page, PageBytes, PageFault, PageKind, seal};
use crate::limits::{PAGE_BYTES, PAGE_HEADER_BYTES};
use std::io::{self, Write};

/// Why rows cannot become a segment.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The destination refused the bytes.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The orders of the keys do not ascend strictly.
    #[error("key order {0:#018x} does not ascend: rows are unsorted or a key occurs twice")]
    Order(u64),
    /// The keys of an index table's base are not `0, 1, 2...`.
    #[error("key {found} follows where {expected} belongs")]
    #[allow(missing_docs)]
    Hole { expected: u64, found: u64 },
    /// More keys share the top 32 bits of their hash than fit in a page.
    #[error("too many keys share the hash prefix {0:#010x}")]
    Prefix(u32),
    /// A base deletes a key.
    #[error("only a delta deletes keys")]
    Delete,
    /// The file would have more than 2^32 pages.
    #[error("the table is over 16 TiB")]
    TooLarge,
}

/// The data pages that an unfinished segment already has.
#[derive(Default)]
pub struct WrittenPages {
    counts: Counts,
    fences: Vec<u64>,
    last: Option<u64>,
}

impl WrittenPages {
    /// Returns the state before page `number`. A writer that resumes from it builds that page
    /// alone.
    pub fn before(kind: &SegmentKind, number: u32) -> Self {
        let indexed = kind.page_kind() == PageKind::Index;
        let rows = if indexed { u64::from(number) * kind.rows_per_page() as u64 } else { 0 };
        Self { counts: Counts { rows, data_pages: number, ..Counts::default() }, ..Self::default() }
    }

    /// Checks and adds the next page of a base of `kind`.
    ///
    /// # Errors
    /// [`PageFault`] if `page` is not the next page; nothing was added.
    pub fn take(&mut self, kind: &SegmentKind, page: &PageBytes) -> Result<(), PageFault> {
        let (page_kind, per_page) = (kind.page_kind(), kind.rows_per_page());
        let checked = Page::check(page, kind.id, self.counts.data_pages, page_kind, per_page)?;
        let rows = self.counts.rows + checked.count() as u64;
        if page_kind == PageKind::Hashed {
            checked.check_order(self.last)?;
            self.fences.push(checked.order(0) >> kind.fence_shift());
            self.last = Some(checked.order(checked.count() - 1));
        } else {
            self.last = Some(rows - 1);
        }
        self.counts.rows = rows;
        self.counts.data_pages += 1;
        Ok(())
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> u32 {
        self.counts.data_pages
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> u64 {
        self.counts.rows
    }

    /// Returns the order of the last row.
    pub fn last(&self) -> Option<u64> {
        self.last
    }
}

/// A segment that is being written.
pub struct SegmentWriter<W> {
    out: W,
    kind: SegmentKind,
    /// The orders and rows of the page that is not full yet.
    orders: Vec<u64>,
    rows: Vec<u8>,
    fences: Vec<u64>,
    /// The orders of all rows of a delta.
    keys: Vec<u64>,
    deletes: Vec<u64>,
    counts: Counts,
    last: Option<u64>,
}

impl<W: Write> SegmentWriter<W> {
    /// Starts a segment of `kind`.
    pub fn new(out: W, kind: SegmentKind) -> Self {
        Self::resume(out, kind, WrittenPages::default())
    }

    /// Continues a base whose first pages are `written`. `out` receives the pages after those.
    pub fn resume(out: W, kind: SegmentKind, written: WrittenPages) -> Self {
        let (orders, rows, keys, deletes) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let WrittenPages { counts, fences, last } = written;
        Self { out, kind, orders, rows, fences, keys, deletes, counts, last }
    }

    /// Returns the destination.
    pub fn out(&mut self) -> &mut W {
        &mut self.out
    }

    /// Returns the bytes of the data pages written so far, including the resumed ones.
    pub fn bytes(&self) -> u64 {
        u64::from(self.counts.data_pages) * PAGE_BYTES as u64
    }

    /// Returns an upper bound of the bytes that `finish` will write: the last data pages, the index
    /// and the trailer.
    pub fn finish_bytes(&self) -> u64 {
        let pages = |entries: usize, per_page: usize| entries.div_ceil(per_page) as u64;
        let waiting = pages(self.orders.len(), 1).min(2);
        let fences = pages(self.fences.len() + 2, self.kind.fences_per_page())
            * u64::from(self.kind.has_fences());
        let keys =
            pages(self.keys.len(), STEPS_PER_PAGE_MIN) + pages(self.deletes.len(), KEYS_PER_PAGE);
        (waiting + fences + keys + 1) * PAGE_BYTES as u64
    }

    /// Adds the encoded `row` `[row_bytes]` of the key with `order`
    /// ([`crate::schema::KeySpace::order`]).
    ///
    /// # Errors
    /// [`WriteError`] if the orders do not ascend or the destination refused the bytes.
    pub fn push(&mut self, order: u64, row: &[u8]) -> Result<(), WriteError> {
        assert_eq!(row.len(), self.kind.format.row_bytes(), "rows have one length");
        self.advance(order)?;
        if self.kind.page_kind() == PageKind::Index && order != self.counts.rows {
            return Err(WriteError::Hole { expected: self.counts.rows, found: order });
        }
        if self.orders.len() == self.kind.rows_per_page() {
            // Only now is the next row known, which decides how many rows the full page keeps.
            self.end_page(order)?;
        }

        self.orders.push(order);
        self.rows.extend_from_slice(row);
        self.counts.rows += 1;
        Ok(())
    }

    /// Adds a deleted key with `order` to a delta, after all rows.
    ///
    /// # Errors
    /// [`WriteError`] if the orders do not ascend or the segment is not a delta.
    pub fn delete(&mut self, order: u64) -> Result<(), WriteError> {
        if self.kind.part != Part::Delta {
            return Err(WriteError::Delete);
        }
        self.advance(order)?;
        self.deletes.push(order);
        self.counts.deletes += 1;
        Ok(())
    }

    fn advance(&mut self, order: u64) -> Result<(), WriteError> {
        if self.last.is_some_and(|last| order <= last) {
            return Err(WriteError::Order(order));
        }
        self.last = Some(order);
        Ok(())
    }

    /// Writes a full page. In a segment with fences, rows that the next row's fence does not tell
    /// from it move to the next page. A lookup therefore finds the page by its fence alone.
    fn end_page(&mut self, next: u64) -> Result<(), WriteError> {
        let shift = self.kind.fence_shift();
        let n = if self.kind.has_fences() {
            self.orders.partition_point(|&h| h >> shift < next >> shift)
        } else {
            self.orders.len()
        };
        if n == 0 {
            return Err(WriteError::Prefix((next >> 32) as u32));
        }
        self.write_page(n)
    }

    /// Writes the first `n` rows as a data page.
    fn write_page(&mut self, n: usize) -> Result<(), WriteError> {
        assert!(0 < n && n <= self.kind.rows_per_page(), "{n} rows do not fit in a page");
        if self.kind.part == Part::Delta {
            self.keys.extend_from_slice(&self.orders[..n]);
        }

        let mut page = [0; PAGE_BYTES];
        let (hashed, row_bytes) =
            (self.kind.page_kind() == PageKind::Hashed, self.kind.format.row_bytes());
        let (keys, rows) = page[PAGE_HEADER_BYTES..].split_at_mut(if hashed { 8 * n } else { 0 });
        keys.chunks_exact_mut(8)
            .zip(&self.orders)
            .for_each(|(k, o)| k.copy_from_slice(&o.to_le_bytes()));
        rows[..n * row_bytes].copy_from_slice(&self.rows[..n * row_bytes]);

        if self.kind.has_fences() {
            self.fences.push(self.orders[0] >> self.kind.fence_shift());
        }
        self.emit(page, self.kind.page_kind(), n)?;
        self.counts.data_pages += 1;
        self.orders.drain(..n);
        self.rows.drain(..n * row_bytes);
        Ok(())
    }

    /// Seals `page` with the next number and writes it.
    fn emit(
        &mut self,
        mut page: PageBytes,
        kind: PageKind,
        count: usize,
    ) -> Result<(), WriteError> {
        let number = self.counts.data_pages.checked_add(self.counts.index_pages);
        // One number is left for the trailer, so that the pages still count in 32 bits.
        let number = number.filter(|n| *n < u32::MAX - 1).ok_or(WriteError::TooLarge)?;
        seal(&mut page, self.kind.id, number, kind, count);
        Ok(self.out.write_all(&page)?)
    }

    /// Writes `entries`, whose `bytes` are `N` each, to index pages.
    fn write_index<const N: usize>(
        &mut self,
        kind: PageKind,
        entries: &[u64],
        bytes: impl Fn(u64) -> [u8; N],
    ) -> Result<(), WriteError> {
        for entries in entries.chunks(PAYLOAD_BYTES / N) {
            let mut page = [0; PAGE_BYTES];
            page[PAGE_HEADER_BYTES..]
                .chunks_exact_mut(N)
                .zip(entries)
                .for_each(|(p, e)| p.copy_from_slice(&bytes(*e)));
            self.emit(page, kind, entries.len())?;
            self.counts.index_pages += 1;
        }
        Ok(())
    }

    /// Writes the ascending `orders` of the rows of a delta to index pages.
    fn write_key_steps(&mut self, mut orders: &[u64]) -> Result<(), WriteError> {
        while !orders.is_empty() {
            let mut page = [0; PAGE_BYTES];
            let count = key_steps::pack(orders, &mut page[PAGE_HEADER_BYTES..]);
            self.emit(page, PageKind::KeySteps, count)?;
            self.counts.index_pages += 1;
            orders = &orders[count..];
        }
        Ok(())
    }

    /// Writes the last rows, the index and the trailer. Returns the destination and the counts.
    ///
    /// # Errors
    /// [`WriteError::Io`] if the destination refused the bytes, [`WriteError::TooLarge`] if the
    /// segment has too many pages.
    pub fn finish(mut self) -> Result<(W, Counts), WriteError> {
        // At most one page is left, because `push` ends a full one.
        while !self.orders.is_empty() {
            self.write_page(self.orders.len())?;
        }

        let (fences, keys) = (std::mem::take(&mut self.fences), std::mem::take(&mut self.keys));
        let deletes = std::mem::take(&mut self.deletes);
        if self.kind.fence_shift() == 0 {
            self.write_index(PageKind::Fences, &fences, u64::to_le_bytes)?;
        } else {
            self.write_index(PageKind::Fences, &fences, |fence| (fence as u32).to_le_bytes())?;
        }
        self.write_key_steps(&keys)?;
        self.write_index(PageKind::Deletes, &deletes, u64::to_le_bytes)?;

        self.out.write_all(&self.kind.trailer(self.counts))?;
        Ok((self.out, self.counts))
    }
}
