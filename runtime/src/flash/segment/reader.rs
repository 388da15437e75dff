//! Opens a segment and reads its pages: finds the page of a key, checks pages and returns rows.
//! Never writes.

use crate::flash::segment::error::SegmentError;
use crate::flash::segment::fences::{Fences, LOCATE_KEYS};
use crate::flash::segment::index_pages::{each_order, fences_in, index_entries_max};
use crate::flash::segment::kind::{Counts, KEYS_PER_PAGE, Part, SegmentKind};
use crate::io::page::{AlignedPage, Page, PageBytes, PageFault, PageKind, claimed_kind};
use crate::io::reader::PageFile;
use crate::limits::{PAGE_BYTES, VERIFY_PAGES};
use crate::schema::KeySpace;
use std::io;
use std::ops::Range;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

/// A segment open for reads. Holding one proves that its trailer is whole and that it is the
/// requested segment. Every other page is checked when it is read.
pub struct Segment {
    path: PathBuf,
    file: Arc<dyn PageFile>,
    kind: SegmentKind,
    counts: Counts,
    /// Empty in a segment without fences.
    fences: Fences,
}

impl Segment {
    /// Opens the segment of `kind` in `file`, with its fences. Errors name `path`.
    ///
    /// # Errors
    /// [`SegmentError`] if the file is not that segment, or if its trailer or a fence page is
    /// damaged.
    pub fn open(
        path: &Path,
        file: Arc<dyn PageFile>,
        kind: SegmentKind,
    ) -> Result<Self, SegmentError> {
        let mut segment = Self::open_pages(path, file, kind)?;
        if segment.kind.has_fences() {
            segment.read_fences()?;
        }
        Ok(segment)
    }

    /// Opens the segment without its fences, for a caller that reads pages and looks up no key.
    /// This reads the trailer only; a large base has thousands of fences.
    ///
    /// # Errors
    /// [`SegmentError`] if the file is not that segment or its trailer is damaged.
    pub fn open_pages(
        path: &Path,
        file: Arc<dyn PageFile>,
        kind: SegmentKind,
    ) -> Result<Self, SegmentError> {
        let io = |source| SegmentError::Io { path: path.to_owned(), source };
        let bytes = file.bytes().map_err(io)?;
        // A file with too many pages fails the check below, as an empty one does.
        let pages = u32::try_from(bytes / PAGE_BYTES as u64).unwrap_or(0);

        let (counts, fences) = (Counts::default(), Fences::default());
        let mut segment = Self { path: path.to_owned(), file, kind, counts, fences };
        if !bytes.is_multiple_of(PAGE_BYTES as u64) || pages == 0 {
            return segment.field("length", format!("{bytes} bytes are not 1 to 2^32 - 1 pages"));
        }
        segment.read_trailer(pages - 1)?;
        Ok(segment)
    }

    fn field<T>(&self, field: &str, problem: impl Into<String>) -> Result<T, SegmentError> {
        Err(SegmentError::field(&self.path, field, problem))
    }

    fn read_trailer(&mut self, last: u32) -> Result<(), SegmentError> {
        let mut page = AlignedPage::zeroed();
        self.read_page(last, &mut page)?;
        Page::check(&page.0, self.kind.id, last, PageKind::Trailer, 1)
            .map_err(|e| self.page_error(last, e))?;

        self.counts = Counts::read(&page.0);
        // The counts are checked first, because they size memory. Then every byte is compared with
        // the trailer that they make.
        if !self.counts_fit(last) || page.0 != self.kind.trailer(self.counts) {
            return self.field("trailer", "is not the segment that the manifest describes");
        }
        Ok(())
    }

    /// Returns whether the pages before the trailer, which is page `last`, can hold the counts of
    /// the trailer.
    fn counts_fit(&self, last: u32) -> bool {
        let Counts { rows, deletes, data_pages, index_pages } = self.counts;
        let rows_max = u64::from(data_pages) * self.kind.rows_per_page() as u64;
        let deletes_max = u64::from(index_pages) * KEYS_PER_PAGE as u64;
        data_pages.checked_add(index_pages) == Some(last)
            && rows <= rows_max
            && deletes <= deletes_max
    }

    fn read_fences(&mut self) -> Result<(), SegmentError> {
        let expected = self.counts.data_pages as usize;
        let mut fences = Vec::with_capacity(expected);
        self.each_index_page(|_, page| {
            fences.extend(fences_in(&self.kind, page));
            Ok(())
        })?;

        let count = fences.len();
        match Fences::new(fences, self.kind.fence_shift()).filter(|_| count == expected) {
            Some(fences) => self.fences = fences,
            None => {
                return self.field(
                    "fences",
                    format!("{count} fences instead of {expected} in ascending order"),
                );
            }
        }
        Ok(())
    }

    /// Passes each checked index page to `take`.
    fn each_index_page(
        &self,
        mut take: impl FnMut(PageKind, &Page<'_>) -> Result<(), SegmentError>,
    ) -> Result<(), SegmentError> {
        let first = self.counts.data_pages;
        self.each_page(first..first + self.counts.index_pages, |number, page| {
            let (kind, checked) = self.check_index(number, page)?;
            take(kind, &checked)
        })
    }

    /// Reads pages in order, a mebibyte at a time, and passes each to `take`. If the device refuses
    /// a mebibyte, its pages are read one by one.
    fn each_page(
        &self,
        numbers: Range<u32>,
        mut take: impl FnMut(u32, &PageBytes) -> Result<(), SegmentError>,
    ) -> Result<(), SegmentError> {
        let some = numbers.len().min(VERIFY_PAGES);
        let mut pages: Vec<_> = (0..some).map(|_| AlignedPage::zeroed()).collect();
        for first in numbers.clone().step_by(VERIFY_PAGES) {
            let pages = &mut pages[..((numbers.end - first) as usize).min(some)];
            let read = self.file.read_pages(first, pages);
            for (number, page) in (first..).zip(pages) {
                if read.is_err() {
                    self.read_page(number, page)?;
                }
                take(number, &page.0)?;
            }
        }
        Ok(())
    }

    /// Checks an index page as the kind that it claims.
    fn check_index<'a>(
        &self,
        number: u32,
        page: &'a PageBytes,
    ) -> Result<(PageKind, Page<'a>), SegmentError> {
        let kind = match claimed_kind(page) {
            Some(kind @ (PageKind::Fences | PageKind::Deletes)) => kind,
            // A page of no index kind fails the check below.
            _ => PageKind::KeySteps,
        };
        let entries_max = index_entries_max(&self.kind, kind, page);
        let checked = Page::check(page, self.kind.id, number, kind, entries_max);
        Ok((kind, checked.map_err(|e| self.page_error(number, e))?))
    }

    /// Reads data or index page `number` into `page` and checks it.
    ///
    /// # Errors
    /// [`SegmentError::Io`] if the device refused, [`SegmentError::Page`] if the page is damaged.
    fn verify_page(&self, number: u32, page: &mut AlignedPage) -> Result<(), SegmentError> {
        self.read_page(number, page)?;
        self.check_any(number, &page.0)
    }

    /// Checks data or index page `number`.
    fn check_any(&self, number: u32, page: &PageBytes) -> Result<(), SegmentError> {
        if number < self.counts.data_pages {
            self.check(number, page).map(drop)
        } else {
            self.check_index(number, page).map(drop)
        }
    }

    /// Reads the data and index pages from `first` on into `pages` and checks them. A page that
    /// fails is read again once, because the transfer may have failed and not the flash. Passes the
    /// number and the error of each damaged page to `damaged`.
    pub fn verify_pages(
        &self,
        first: u32,
        pages: &mut [AlignedPage],
        mut damaged: impl FnMut(u32, SegmentError),
    ) {
        let read = self.file.read_pages(first, pages);
        for (page, number) in pages.iter_mut().zip(first..) {
            let is_whole = read.is_ok() && self.check_any(number, &page.0).is_ok();
            if let Some(e) = (!is_whole).then(|| self.verify_page(number, page).err()).flatten() {
                damaged(number, e);
            }
        }
    }

    /// Reads and checks all data and index pages, on two threads: the device reads for one while
    /// the other checks. Returns the error of each damaged page, in the order of the pages.
    pub fn verify(&self) -> Vec<SegmentError> {
        let mut damaged = thread::scope(|scope| {
            let second = thread::Builder::new().spawn_scoped(scope, || self.verify_half(1));
            let mut damaged = self.verify_half(0);
            damaged.extend(match second {
                Ok(second) => second.join().unwrap_or_else(|panic| resume_unwind(panic)),
                // The system refused to start a thread.
                Err(_) => self.verify_half(1),
            });
            damaged
        });
        damaged.sort_unstable_by_key(|(page, _)| *page);
        damaged.into_iter().map(|(_, error)| error).collect()
    }

    /// Checks every second run of `VERIFY_PAGES` pages. `first`, 0 or 1, is the first run. Returns
    /// the number and the error of each damaged page.
    fn verify_half(&self, first: usize) -> Vec<(u32, SegmentError)> {
        let end = (self.counts.data_pages + self.counts.index_pages) as usize;
        let (mut damaged, mut pages) = (Vec::new(), Vec::new());
        for start in (first * VERIFY_PAGES..end).step_by(2 * VERIFY_PAGES) {
            pages.resize_with(VERIFY_PAGES, AlignedPage::zeroed);
            let some = &mut pages[..VERIFY_PAGES.min(end - start)];
            self.verify_pages(start as u32, some, |page, error| damaged.push((page, error)));
        }
        damaged
    }

    /// Passes the keys of a delta to `take`. `take` receives the order of each key and the number
    /// of the page with its row, or `None` if the key is deleted.
    ///
    /// # Errors
    /// [`SegmentError`] if an index page is damaged, or if the number of keys differs from the
    /// trailer's.
    pub fn each_key(&self, mut take: impl FnMut(u64, Option<u32>)) -> Result<(), SegmentError> {
        let (mut rows, mut deletes) = (0u64, 0u64);
        let per_page = self.kind.rows_per_page() as u64;
        self.each_index_page(|kind, page| {
            each_order(kind, page, |order| {
                // The caller of `each_key` sized its memory by the trailer's counts.
                if kind == PageKind::Deletes && deletes < self.counts.deletes {
                    take(order, None);
                    deletes += 1;
                } else if kind != PageKind::Deletes && rows < self.counts.rows {
                    take(order, Some((rows / per_page) as u32));
                    rows += 1;
                } else {
                    let problem = format!("more than the trailer counts: {:?}", self.counts);
                    return self.field("keys", problem);
                }
                Ok(())
            })
        })?;

        if (rows, deletes) == (self.counts.rows, self.counts.deletes) {
            return Ok(());
        }
        self.field(
            "keys",
            format!("{rows} rows and {deletes} deletes instead of {:?}", self.counts),
        )
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file.
    pub fn file(&self) -> &Arc<dyn PageFile> {
        &self.file
    }

    /// Returns the kind of the segment.
    pub fn kind(&self) -> &SegmentKind {
        &self.kind
    }

    /// Returns the counts of the trailer.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the bytes of the fences in memory.
    pub fn index_bytes(&self) -> usize {
        self.fences.bytes()
    }

    /// Finds the one page of a base that can hold each of `keys`, at most [`LOCATE_KEYS`]. Writes
    /// the pages to `pages` `[keys]`; `None` if the base cannot have the key.
    pub fn locate(&self, keys: &[u64], pages: &mut [Option<u32>]) {
        match self.kind.keys {
            KeySpace::Index => {
                let per_page = self.kind.rows_per_page() as u64;
                for (key, page) in keys.iter().zip(pages) {
                    *page = (*key < self.counts.rows).then(|| (key / per_page) as u32);
                }
            }
            KeySpace::Sparse => {
                let mut hashes = [0; LOCATE_KEYS];
                for (key, hash) in keys.iter().zip(&mut hashes) {
                    *hash = KeySpace::Sparse.order(*key);
                }
                self.fences.pages(&hashes[..keys.len()], pages);
            }
        }
    }

    /// Returns the lowest and the highest order that data page `number` of a base may hold; `None`
    /// for any other page.
    pub fn orders_of(&self, number: u32) -> Option<(u64, u64)> {
        if number >= self.counts.data_pages || self.kind.part != Part::Base {
            return None;
        }
        if self.kind.keys == KeySpace::Index {
            let per_page = self.kind.rows_per_page() as u64;
            let first = u64::from(number) * per_page;
            return Some((first, self.counts.rows.min(first + per_page).checked_sub(1)?));
        }

        let shift = self.kind.fence_shift();
        let first = |number: usize| self.fences.get(number).map(|fence| fence << shift);
        Some((
            first(number as usize)?,
            first(number as usize + 1).map_or(u64::MAX, |next| next - 1),
        ))
    }

    /// Returns the most keys that are lost if page `number` is damaged. The number is exact for a
    /// data page, except in the base of a sparse table. A damaged index page loses all keys,
    /// because the segment does not open without it.
    pub fn keys_of(&self, number: u32) -> u64 {
        if number >= self.counts.data_pages {
            return self.counts.rows.saturating_add(self.counts.deletes);
        }
        let per_page = self.kind.rows_per_page() as u64;
        if self.kind.has_fences() {
            return per_page;
        }
        self.counts.rows.saturating_sub(u64::from(number) * per_page).min(per_page)
    }

    /// Reads page `number` without checking it.
    ///
    /// # Errors
    /// [`SegmentError::Io`] if the device refused.
    pub fn read_page(&self, number: u32, page: &mut AlignedPage) -> Result<(), SegmentError> {
        self.file
            .read_page(number, page)
            .map_err(|source| SegmentError::Io { path: self.path.clone(), source })
    }

    /// Checks the bytes of data page `number`.
    ///
    /// # Errors
    /// [`SegmentError::Page`] if the page is damaged.
    pub fn check<'a>(&self, number: u32, page: &'a PageBytes) -> Result<Page<'a>, SegmentError> {
        Page::check(page, self.kind.id, number, self.kind.page_kind(), self.kind.rows_per_page())
            .map_err(|e| self.page_error(number, e))
    }

    /// Checks a page reader's result for data page `number`.
    ///
    /// # Errors
    /// [`SegmentError::Io`] if the device refused, [`SegmentError::Page`] if the page is damaged.
    pub fn check_read<'a>(
        &self,
        number: u32,
        page: io::Result<&'a PageBytes>,
    ) -> Result<Page<'a>, SegmentError> {
        let page = page.map_err(|source| SegmentError::Io { path: self.path.clone(), source })?;
        self.check(number, page)
    }

    fn page_error(&self, page: u32, source: PageFault) -> SegmentError {
        SegmentError::Page { path: self.path.clone(), page, source }
    }

    /// Returns the encoded row of `key` `[row_bytes]` in a checked page; `None` if the page does
    /// not have the key.
    pub fn row<'a>(&self, page: &Page<'a>, key: u64) -> Option<&'a [u8]> {
        let kind = self.kind.page_kind();
        let position = match kind {
            PageKind::Hashed => page.position(self.kind.keys.order(key))?,
            _ => Some((key % self.kind.rows_per_page() as u64) as usize)
                .filter(|&i| i < page.count())?,
        };
        Some(page.row(kind, self.kind.format.row_bytes(), position))
    }

    /// Returns row `i` of a checked data page with `count` rows.
    pub(crate) fn row_at<'a>(&self, page: &'a PageBytes, count: usize, i: usize) -> &'a [u8] {
        Page::checked(page, count).row(self.kind.page_kind(), self.kind.format.row_bytes(), i)
    }

    /// Passes every row of checked data page `number` to `take`, with the order of its key.
    pub fn each_row(&self, number: u32, page: &Page<'_>, mut take: impl FnMut(u64, &[u8])) {
        let (kind, per_page) = (self.kind.page_kind(), self.kind.rows_per_page() as u64);
        for i in 0..page.count() {
            let indexed = || u64::from(number) * per_page + i as u64;
            let order = if kind == PageKind::Hashed { page.order(i) } else { indexed() };
            take(order, page.row(kind, self.kind.format.row_bytes(), i));
        }
    }

    /// Passes every row to `take` in file order, with the order of its key. Passes the error of a
    /// damaged page to `damaged` and skips its rows.
    ///
    /// # Errors
    /// [`SegmentError::Io`] if the device refused.
    pub fn scan(
        &self,
        mut take: impl FnMut(u64, &[u8]),
        mut damaged: impl FnMut(SegmentError),
    ) -> Result<(), SegmentError> {
        self.each_page(0..self.counts.data_pages, |number, page| {
            match self.check(number, page) {
                Err(e) => damaged(e),
                Ok(checked) => self.each_row(number, &checked, &mut take),
            }
            Ok(())
        })
    }
}
