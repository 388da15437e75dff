//! Segments: immutable files of self-checking pages that hold rows of one table. One page read
//! finds any key. Bytes in FORMAT.md; written by `segment_write`, proved on arrival by
//! `segment_check`.
//!
//! A *base* holds every row of a table: an index table places a key by division, a sparse table
//! keeps rows in key-hash order with a fence for each page in memory (`fences`). A *delta* holds
//! the rows that one generation changed, inserted or deleted; its keys are read at open and go into
//! the table's overlay. A *placed* segment repeats the most used rows of a base, packed by how they
//! are asked for; its keys go into the overlay too.

pub mod fences;
pub mod verifier;
pub mod writer;

use crate::bundle::manifest::{Generation, sha256};
use crate::flash::segment::fences::{AT_ONCE, Fences};
use crate::io::page::{
    AlignedPage, Page, PageBytes, PageFault, PageKind, claimed_kind, seal, u64_at,
};
use crate::io::reader::PageFile;
use crate::limits::{PAGE_BYTES, PAGE_HEADER_BYTES};
use crate::schema::{KeySpace, Table};
use hatchback_kernels::cache::codec::{Codec, RowFault, RowFormat};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const MAGIC: &[u8; 8] = b"HATCHSEG";
/// The format of segments.
pub const SEGMENT_FORMAT: u32 = 2;
pub(crate) const PAYLOAD_BYTES: usize = PAGE_BYTES - PAGE_HEADER_BYTES;
pub(crate) const FENCES_PER_PAGE: usize = PAYLOAD_BYTES / 4;
pub(crate) const KEYS_PER_PAGE: usize = PAYLOAD_BYTES / 8;
pub(crate) const SHORT_KEYS_PER_PAGE: usize = PAYLOAD_BYTES / 4;

/// What is wrong with a segment.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// The file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A page is damaged, misplaced or not in order.
    #[error("{path}: page {page}: {source}", path = path.display())]
    Page {
        /// The file.
        path: PathBuf,
        /// Which page.
        page: u32,
        /// What is wrong with it.
        source: PageFault,
    },
    /// A row decodes to something that is not a number.
    #[error("{path}: page {page}: row {row}: {source}", path = path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// Which page.
        page: u32,
        /// Which row of the page.
        row: usize,
        /// What is wrong with it.
        source: RowFault,
    },
    /// The segment is not the one that the manifest describes.
    #[error("{path}: {field}: {problem}", path = path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// Which field.
        field: &'static str,
        /// Its value and what was expected.
        problem: String,
    },
}

/// What a segment holds of its table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Part {
    /// Every row.
    Base,
    /// What one generation changed.
    Delta,
    /// The most used rows of a base once more, packed so that those asked for together share a
    /// page.
    Placed,
}

/// What a segment is: everything in its trailer but the counts, which follow from the rows.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentKind {
    pub(crate) id: u32,
    table: u32,
    pub(crate) part: Part,
    pub(crate) keys: KeySpace,
    pub(crate) format: RowFormat,
    unit_exp: i8,
}

impl SegmentKind {
    /// The segment of table number `number` that `generation` brought; `None` if the table's unit
    /// does not fit its codec. `serial` is 0 for what arrived in a bundle, 1 for what arrived
    /// placed, and counts up with each compaction.
    pub fn new(
        generation: &Generation,
        serial: u32,
        number: usize,
        table: &Table,
        part: Part,
    ) -> Option<Self> {
        let name = format!("{}\0{}\0{serial}\0{number}", generation.lineage, generation.sequence);
        let hash = sha256(name.as_bytes());
        let id = u32::from_le_bytes([hash[0], hash[1], hash[2], hash[3]]);
        let (keys, unit_exp) = (table.keys, table.unit_exp);
        Some(Self { id, table: number as u32, part, keys, format: table.format()?, unit_exp })
    }

    /// How the rows are encoded.
    pub fn format(&self) -> RowFormat {
        self.format
    }

    /// Which keys the table has.
    pub fn keys(&self) -> KeySpace {
        self.keys
    }

    /// The kind of the pages that hold rows.
    pub(crate) fn page_kind(&self) -> PageKind {
        match (self.part, self.keys) {
            (Part::Base, KeySpace::Index) => PageKind::Index,
            _ => PageKind::Hashed,
        }
    }

    /// Whether the segment has a fence for each data page.
    pub(crate) fn has_fences(&self) -> bool {
        self.part == Part::Base && self.keys == KeySpace::Sparse
    }

    /// Most rows of a page.
    pub fn rows_per_page(&self) -> usize {
        let key = if self.page_kind() == PageKind::Hashed { 8 } else { 0 };
        PAYLOAD_BYTES / (key + self.format.row_bytes())
    }

    pub(crate) fn trailer(&self, counts: Counts) -> PageBytes {
        let mut page = [0; PAGE_BYTES];
        page[16..24].copy_from_slice(MAGIC);
        let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
        put(24, &SEGMENT_FORMAT.to_le_bytes());
        put(28, &self.table.to_le_bytes());
        put(32, &counts.rows.to_le_bytes());
        put(40, &counts.deletes.to_le_bytes());
        put(48, &counts.data_pages.to_le_bytes());
        put(52, &counts.index_pages.to_le_bytes());
        put(56, &(self.format.dim() as u32).to_le_bytes());
        put(60, &(self.format.row_bytes() as u32).to_le_bytes());
        let codec = match self.format.codec() {
            Codec::F32 => 0,
            Codec::F16 => 1,
            Codec::U8 => 2,
            Codec::U4 => 3,
        };
        let part = match self.part {
            Part::Base => 0,
            Part::Delta => 1,
            Part::Placed => 2,
        };
        let sparse = u8::from(self.keys == KeySpace::Sparse);
        put(64, &[part, sparse, codec, self.unit_exp as u8]);
        seal(&mut page, self.id, counts.data_pages + counts.index_pages, PageKind::Trailer, 1);
        page
    }
}

/// How much a segment holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Rows.
    pub rows: u64,
    /// Keys that a delta deletes.
    pub deletes: u64,
    /// Pages that hold rows.
    pub data_pages: u32,
    /// Pages between the rows and the trailer.
    pub index_pages: u32,
}

impl Counts {
    fn read(page: &PageBytes) -> Self {
        let pages = u64_at(page, 48);
        Self {
            rows: u64_at(page, 32),
            deletes: u64_at(page, 40),
            data_pages: pages as u32,
            index_pages: (pages >> 32) as u32,
        }
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        (u64::from(self.data_pages) + u64::from(self.index_pages) + 1) * PAGE_BYTES as u64
    }
}

pub(crate) fn fences_in(page: &Page<'_>) -> impl Iterator<Item = u32> {
    page.payload()
        .chunks_exact(4)
        .take(page.count())
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

/// The orders in a page of keys, short keys or deletes.
pub(crate) fn orders_in(kind: PageKind, page: &Page<'_>) -> impl Iterator<Item = u64> {
    let width = if kind == PageKind::ShortKeys { 4 } else { 8 };
    page.payload().chunks_exact(width).take(page.count()).map(|bytes| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    })
}

/// A segment open for reads. Holding one proves that its trailer is whole and that it is the
/// segment that was asked for; its other pages are checked as they are read.
pub struct Segment {
    path: PathBuf,
    file: Arc<dyn PageFile>,
    kind: SegmentKind,
    counts: Counts,
    /// Empty where the segment has none.
    fences: Fences,
}

impl Segment {
    /// Opens the segment in `file`, which must be of `kind`; `path` is what errors name.
    ///
    /// # Errors
    /// The file is not that segment, or its trailer or fences are damaged.
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

    /// The same by its trailer alone, for who reads pages and looks no key up: a large base has
    /// thousands of fences.
    ///
    /// # Errors
    /// The file is not that segment, or its trailer is damaged.
    pub fn open_pages(
        path: &Path,
        file: Arc<dyn PageFile>,
        kind: SegmentKind,
    ) -> Result<Self, SegmentError> {
        let io = |source| SegmentError::Io { path: path.to_owned(), source };
        let bytes = file.bytes().map_err(io)?;
        let pages = u32::try_from(bytes / PAGE_BYTES as u64).unwrap_or(0);
        let (counts, fences) = (Counts::default(), Fences::default());
        let mut segment = Self { path: path.to_owned(), file, kind, counts, fences };
        if !bytes.is_multiple_of(PAGE_BYTES as u64) || pages == 0 {
            return segment.field("length", format!("{bytes} bytes are not 1 to 2^32 - 1 pages"));
        }
        segment.read_trailer(pages - 1)?;
        Ok(segment)
    }

    fn field<T>(&self, field: &'static str, problem: impl Into<String>) -> Result<T, SegmentError> {
        Err(SegmentError::Field { path: self.path.clone(), field, problem: problem.into() })
    }

    fn read_trailer(&mut self, last: u32) -> Result<(), SegmentError> {
        let mut page = AlignedPage::zeroed();
        self.read_page(last, &mut page)?;
        Page::check(&page.0, self.kind.id, last, PageKind::Trailer, 1)
            .map_err(|e| self.page_error(last, e))?;
        self.counts = Counts::read(&page.0);
        let fits = self.counts.data_pages.checked_add(self.counts.index_pages) == Some(last);
        if !fits || page.0 != self.kind.trailer(self.counts) {
            return self.field("trailer", "is not the segment that the manifest describes");
        }
        Ok(())
    }

    fn read_fences(&mut self) -> Result<(), SegmentError> {
        let expected = self.counts.data_pages as usize;
        let mut fences = Vec::with_capacity(expected);
        self.each_index_page(|_, page| {
            fences.extend(fences_in(page));
            Ok(())
        })?;
        let count = fences.len();
        match Fences::new(fences).filter(|_| count == expected) {
            Some(fences) => self.fences = fences,
            None => {
                return self.field("fences", format!("{count} are not {expected} ascending ones"));
            }
        }
        Ok(())
    }

    /// Hands the checked pages between the rows and the trailer to `take`.
    fn each_index_page(
        &self,
        mut take: impl FnMut(PageKind, &Page<'_>) -> Result<(), SegmentError>,
    ) -> Result<(), SegmentError> {
        let mut page = AlignedPage::zeroed();
        for number in self.counts.data_pages..self.counts.data_pages + self.counts.index_pages {
            self.read_page(number, &mut page)?;
            let (kind, checked) = self.check_index(number, &page.0)?;
            take(kind, &checked)?;
        }
        Ok(())
    }

    /// Checks a page between the rows and the trailer, as what it claims to be.
    fn check_index<'a>(
        &self,
        number: u32,
        page: &'a PageBytes,
    ) -> Result<(PageKind, Page<'a>), SegmentError> {
        let (kind, most) = match claimed_kind(page) {
            Some(PageKind::Fences) => (PageKind::Fences, FENCES_PER_PAGE),
            Some(PageKind::Deletes) => (PageKind::Deletes, KEYS_PER_PAGE),
            Some(PageKind::ShortKeys) => (PageKind::ShortKeys, SHORT_KEYS_PER_PAGE),
            _ => (PageKind::Keys, KEYS_PER_PAGE),
        };
        let checked = Page::check(page, self.kind.id, number, kind, most);
        Ok((kind, checked.map_err(|e| self.page_error(number, e))?))
    }

    /// Reads page `number`, of any before the trailer, into `page` and checks it.
    ///
    /// # Errors
    /// The device refused, or what is wrong with the page.
    pub fn prove(&self, number: u32, page: &mut AlignedPage) -> Result<(), SegmentError> {
        self.read_page(number, page)?;
        if number < self.counts.data_pages {
            self.check(number, &page.0).map(drop)
        } else {
            self.check_index(number, &page.0).map(drop)
        }
    }

    /// Hands the keys of a delta or a placed segment to `take`: the order of each key with the page
    /// that holds its row, or with `None` where the key is deleted.
    ///
    /// # Errors
    /// A page of keys is damaged, or they are not as many as the trailer says.
    pub fn each_key(&self, mut take: impl FnMut(u64, Option<u32>)) -> Result<(), SegmentError> {
        let (mut rows, mut deletes) = (0u64, 0u64);
        let per_page = self.kind.rows_per_page() as u64;
        self.each_index_page(|kind, page| {
            for order in orders_in(kind, page) {
                if kind == PageKind::Deletes {
                    take(order, None);
                    deletes += 1;
                } else {
                    take(order, Some((rows / per_page) as u32));
                    rows += 1;
                }
            }
            Ok(())
        })?;
        if (rows, deletes) == (self.counts.rows, self.counts.deletes) {
            return Ok(());
        }
        self.field(
            "keys",
            format!("{rows} rows and {deletes} deletes instead of {:?}", self.counts),
        )
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file.
    pub fn file(&self) -> &Arc<dyn PageFile> {
        &self.file
    }

    /// What it is.
    pub fn kind(&self) -> &SegmentKind {
        &self.kind
    }

    /// How much it holds.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Bytes of the index in memory.
    pub fn index_bytes(&self) -> usize {
        self.fences.bytes()
    }

    /// For each of `keys`, [`AT_ONCE`] at most, the page of a base that holds it if any does;
    /// `None` if the base cannot have it.
    pub fn locate(&self, keys: &[u64], pages: &mut [Option<u32>]) {
        match self.kind.keys {
            KeySpace::Index => {
                let per_page = self.kind.rows_per_page() as u64;
                for (key, page) in keys.iter().zip(pages) {
                    *page = (*key < self.counts.rows).then(|| (key / per_page) as u32);
                }
            }
            KeySpace::Sparse => {
                let mut prefixes = [0; AT_ONCE];
                for (key, prefix) in keys.iter().zip(&mut prefixes) {
                    *prefix = (KeySpace::Sparse.order(*key) >> 32) as u32;
                }
                self.fences.pages(&prefixes[..keys.len()], pages);
            }
        }
    }

    /// The lowest and the highest order that data page `number` of a base may hold.
    pub fn orders_of(&self, number: u32) -> Option<(u64, u64)> {
        if number >= self.counts.data_pages || self.kind.part != Part::Base {
            return None;
        }
        if self.kind.keys == KeySpace::Index {
            let per_page = self.kind.rows_per_page() as u64;
            let first = u64::from(number) * per_page;
            return Some((first, self.counts.rows.min(first + per_page).checked_sub(1)?));
        }
        let first = |number: usize| self.fences.get(number).map(|fence| u64::from(fence) << 32);
        Some((
            first(number as usize)?,
            first(number as usize + 1).map_or(u64::MAX, |next| next - 1),
        ))
    }

    /// Keys that are lost with page `number`, at most: those on it, exact but for the bases of
    /// sparse tables; all where it is of the index, without which the segment does not open.
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

    /// Reads page `number`, unchecked.
    ///
    /// # Errors
    /// The device refused.
    pub fn read_page(&self, number: u32, page: &mut AlignedPage) -> Result<(), SegmentError> {
        self.file
            .read_page(number, page)
            .map_err(|source| SegmentError::Io { path: self.path.clone(), source })
    }

    /// Checks a data page that was read as number `number`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check<'a>(&self, number: u32, page: &'a PageBytes) -> Result<Page<'a>, SegmentError> {
        Page::check(page, self.kind.id, number, self.kind.page_kind(), self.kind.rows_per_page())
            .map_err(|e| self.page_error(number, e))
    }

    /// Checks what a reader gave for data page `number`.
    ///
    /// # Errors
    /// The device refused, or what is wrong with the page.
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

    /// The encoded row of `key` in a checked page, or `None` if the page does not have the key.
    pub fn row<'a>(&self, page: &Page<'a>, key: u64) -> Option<&'a [u8]> {
        let kind = self.kind.page_kind();
        let position = match kind {
            PageKind::Hashed => page.position(self.kind.keys.order(key))?,
            _ => Some((key % self.kind.rows_per_page() as u64) as usize)
                .filter(|&i| i < page.count())?,
        };
        Some(page.row(kind, self.kind.format.row_bytes(), position))
    }

    /// Row `i` of a data page that was checked before and has `count` rows.
    pub(crate) fn row_at<'a>(&self, page: &'a PageBytes, count: usize, i: usize) -> &'a [u8] {
        Page::checked(page, count).row(self.kind.page_kind(), self.kind.format.row_bytes(), i)
    }

    /// Hands every row of checked data page `number` to `take`, with the order of its key.
    pub fn each_row(&self, number: u32, page: &Page<'_>, mut take: impl FnMut(u64, &[u8])) {
        let (kind, per_page) = (self.kind.page_kind(), self.kind.rows_per_page() as u64);
        for i in 0..page.count() {
            let indexed = || u64::from(number) * per_page + i as u64;
            let order = if kind == PageKind::Hashed { page.order(i) } else { indexed() };
            take(order, page.row(kind, self.kind.format.row_bytes(), i));
        }
    }

    /// Hands every row to `take` in file order, with the order of its key. A damaged page goes to
    /// `damaged` and its rows are left out.
    ///
    /// # Errors
    /// The device refused.
    pub fn scan(
        &self,
        mut take: impl FnMut(u64, &[u8]),
        mut damaged: impl FnMut(SegmentError),
    ) -> Result<(), SegmentError> {
        let mut page = AlignedPage::zeroed();
        for number in 0..self.counts.data_pages {
            self.read_page(number, &mut page)?;
            match self.check(number, &page.0) {
                Err(e) => damaged(e),
                Ok(checked) => self.each_row(number, &checked, &mut take),
            }
        }
        Ok(())
    }
}
