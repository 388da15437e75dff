//! A merge pass over a table: returns the newest version of every row in key order, from the base
//! and the deltas. Holds one page of each segment in memory. Never writes.

use crate::flash::overlay::Newest;
use crate::flash::segment::{Segment, SegmentError};
use crate::flash::table::TableRows;
use crate::io::page::AlignedPage;

/// A merge pass over the rows of a table.
pub struct Merge {
    rows: TableRows,
    cursors: Vec<Cursor>,
    pages_read: u64,
}

/// A position in a segment's rows.
struct Cursor {
    page: Box<AlignedPage>,
    /// The number of the next page to read.
    next_page: u32,
    /// The order of each row of the page ([`crate::schema::KeySpace::order`]).
    orders: Vec<u64>,
    at: usize,
}

impl Cursor {
    fn new() -> Self {
        Self { page: Box::new(AlignedPage::zeroed()), next_page: 0, orders: Vec::new(), at: 0 }
    }

    /// Returns the order of the current row; `None` at the end. Reads the next page after the last
    /// row of a page.
    fn peek(
        &mut self,
        segment: &Segment,
        pages_read: &mut u64,
    ) -> Result<Option<u64>, SegmentError> {
        while self.at == self.orders.len() {
            if self.next_page == segment.counts().data_pages {
                return Ok(None);
            }
            segment.read_page(self.next_page, &mut self.page)?;
            let checked = segment.check(self.next_page, &self.page.0)?;

            (self.at, *pages_read) = (0, *pages_read + 1);
            self.orders.clear();
            segment.each_row(self.next_page, &checked, |order, _| self.orders.push(order));
            self.next_page += 1;
        }
        Ok(Some(self.orders[self.at]))
    }

    /// Reads page `number` and moves to its first row.
    fn load(
        &mut self,
        segment: &Segment,
        number: u32,
        pages_read: &mut u64,
    ) -> Result<(), SegmentError> {
        (self.at, self.next_page) = (0, number);
        self.orders.clear();
        self.peek(segment, pages_read).map(drop)
    }

    /// Moves to the first row with an order above `after`, by binary search over the pages.
    fn seek_past(
        &mut self,
        segment: &Segment,
        after: u64,
        pages_read: &mut u64,
    ) -> Result<(), SegmentError> {
        // Pages below `low` start at or below `after`; pages from `high` on start above it.
        let (mut low, mut high) = (0, segment.counts().data_pages);
        while low < high {
            let middle = low + (high - low) / 2;
            self.load(segment, middle, pages_read)?;
            if self.orders.first().is_some_and(|first| *first <= after) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }

        self.load(segment, low.saturating_sub(1), pages_read)?;
        self.at = self.orders.partition_point(|order| *order <= after);
        Ok(())
    }
}

impl Merge {
    /// Starts a pass over `rows`.
    pub fn new(rows: TableRows) -> Self {
        let cursors = rows.segments().iter().map(|_| Cursor::new()).collect();
        Self { rows, cursors, pages_read: 0 }
    }

    /// Moves to the first row with an order above `after`.
    ///
    /// # Errors
    /// [`SegmentError`] if a page is damaged or cannot be read.
    pub fn seek_past(&mut self, after: u64) -> Result<(), SegmentError> {
        for (cursor, segment) in self.cursors.iter_mut().zip(self.rows.segments()) {
            cursor.seek_past(segment, after, &mut self.pages_read)?;
        }
        Ok(())
    }

    /// Returns the rows of the table.
    pub fn rows(&self) -> &TableRows {
        &self.rows
    }

    /// Returns the number of pages read.
    pub fn pages_read(&self) -> u64 {
        self.pages_read
    }

    /// Returns the current row `[row_bytes]` and the order of its key; `None` at the end.
    ///
    /// # Errors
    /// [`SegmentError`] if a page is damaged or cannot be read, or if a segment's index lists a key
    /// that its pages do not have.
    pub fn current(&mut self) -> Result<Option<(u64, &[u8])>, SegmentError> {
        loop {
            let Some(order) = self.lowest()? else { return Ok(None) };
            let number = match self.rows.newest(order) {
                None => 0,
                Some(Newest::Delta(delta, _)) => delta + 1,
                Some(Newest::Deleted) => {
                    // All cursors skip the key, because older segments may have rows of it too.
                    self.skip(order);
                    continue;
                }
            };

            let (cursor, segment) = (&self.cursors[number], &self.rows.segments()[number]);
            // Without this check the row of another key would be merged as the row of this key.
            if cursor.orders.get(cursor.at) != Some(&order) {
                let problem = format!("key order {order:#018x} is in the index and on no page");
                return Err(SegmentError::field(segment.path(), "keys", problem));
            }
            return Ok(Some((
                order,
                segment.row_at(&cursor.page.0, cursor.orders.len(), cursor.at),
            )));
        }
    }

    /// Moves to the next row.
    ///
    /// # Errors
    /// [`SegmentError`] if a page is damaged or cannot be read.
    pub fn advance(&mut self) -> Result<(), SegmentError> {
        if let Some(order) = self.lowest()? {
            self.skip(order);
        }
        Ok(())
    }

    /// Returns the lowest order of all cursors; `None` at the end of all segments.
    fn lowest(&mut self) -> Result<Option<u64>, SegmentError> {
        let mut lowest: Option<u64> = None;
        for (cursor, segment) in self.cursors.iter_mut().zip(self.rows.segments()) {
            if let Some(order) = cursor.peek(segment, &mut self.pages_read)? {
                lowest = Some(lowest.map_or(order, |l| l.min(order)));
            }
        }
        Ok(lowest)
    }

    /// Moves every cursor past the key with `order`.
    fn skip(&mut self, order: u64) {
        for cursor in &mut self.cursors {
            if cursor.orders.get(cursor.at) == Some(&order) {
                cursor.at += 1;
            }
        }
    }
}
