//! Segments: immutable files of self-checking pages that hold the rows of one table. One page read finds any
//! key. Index tables place a key by division; sparse tables keep rows in key-hash order with one 32-bit
//! fence a page in memory. Bytes in FORMAT.md. Never changes a file that is complete.

use crate::limits::{PAGE_BYTES, PAGE_HEADER_BYTES};
use crate::manifest::{Generation, sha256};
use crate::page::{Page, PageBytes, PageFault, PageKind, seal, u64_at};
use crate::schema::{KeySpace, Table};
use hatchback_kernels::cache::mix;
use hatchback_kernels::codec::{Codec, RowFault, RowFormat};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"HATCHSEG";
/// The format of segments.
pub const SEGMENT_FORMAT: u32 = 1;
const PAYLOAD_BYTES: usize = PAGE_BYTES - PAGE_HEADER_BYTES;
const FENCES_PER_PAGE: usize = PAYLOAD_BYTES / 4;

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

/// What a segment is: everything in its trailer but the counts, which follow from the rows.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentKind {
    id: u32,
    table: u32,
    keys: KeySpace,
    format: RowFormat,
    unit_exp: i8,
}

impl SegmentKind {
    /// The segment of table number `table` in `generation`; `None` if the table's unit does not fit.
    pub fn new(generation: &Generation, number: usize, table: &Table) -> Option<Self> {
        let name = format!("{}\0{}\0{number}", generation.lineage, generation.sequence);
        let hash = sha256(name.as_bytes());
        let id = u32::from_le_bytes([hash[0], hash[1], hash[2], hash[3]]);
        let (keys, unit_exp) = (table.keys, table.unit_exp);
        Some(Self { id, table: number as u32, keys, format: table.format()?, unit_exp })
    }

    /// How the rows are encoded.
    pub fn format(&self) -> RowFormat {
        self.format
    }

    fn page_kind(&self) -> PageKind {
        match self.keys {
            KeySpace::Index => PageKind::Index,
            KeySpace::Sparse => PageKind::Hashed,
        }
    }

    fn rows_per_page(&self) -> usize {
        let key = if self.keys == KeySpace::Sparse { 8 } else { 0 };
        PAYLOAD_BYTES / (key + self.format.row_bytes())
    }

    fn trailer(&self, rows: u64, data_pages: u32, fence_pages: u32) -> PageBytes {
        let mut page = [0; PAGE_BYTES];
        page[16..24].copy_from_slice(MAGIC);
        let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
        put(24, &SEGMENT_FORMAT.to_le_bytes());
        put(28, &self.table.to_le_bytes());
        put(32, &rows.to_le_bytes());
        put(40, &data_pages.to_le_bytes());
        put(44, &fence_pages.to_le_bytes());
        put(48, &(self.format.dim() as u32).to_le_bytes());
        put(52, &(self.format.row_bytes() as u32).to_le_bytes());
        put(56, &(self.rows_per_page() as u32).to_le_bytes());
        let codec = match self.format.codec() {
            Codec::F32 => 0,
            Codec::F16 => 1,
            Codec::U8 => 2,
            Codec::U4 => 3,
        };
        put(60, &[u8::from(self.keys == KeySpace::Sparse), codec, self.unit_exp as u8]);
        seal(&mut page, self.id, data_pages + fence_pages, PageKind::Trailer, 1);
        page
    }
}

/// Why rows cannot become a segment.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The destination refused the bytes.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Hashes must ascend strictly.
    #[error("key hash {0:#018x} does not ascend: rows are unsorted or a key is there twice")]
    Order(u64),
    /// More keys share the top 32 bits of their hash than a page holds rows.
    #[error("too many keys share the hash prefix {0:#010x}")]
    Prefix(u32),
    /// The file would have more than 2^32 pages.
    #[error("the table is over 16 TiB")]
    TooLarge,
}

/// Writes a segment in one pass.
pub struct SegmentWriter<W> {
    out: W,
    kind: SegmentKind,
    hashes: Vec<u64>,
    rows: Vec<u8>,
    fences: Vec<u32>,
    pages: u32,
    count: u64,
}

impl<W: Write> SegmentWriter<W> {
    /// Begins a segment.
    pub fn new(out: W, kind: SegmentKind) -> Self {
        Self { out, kind, hashes: Vec::new(), rows: Vec::new(), fences: Vec::new(), pages: 0, count: 0 }
    }

    /// Adds the encoded row of the next key: ascending by `mix(key)` in a sparse table, `0, 1, 2...` in an
    /// index table.
    ///
    /// # Errors
    /// The hashes do not ascend, or the destination refused the bytes.
    pub fn push(&mut self, key: u64, row: &[u8]) -> Result<(), WriteError> {
        assert_eq!(row.len(), self.kind.format.row_bytes());
        let hash = match self.kind.keys {
            KeySpace::Index => key,
            KeySpace::Sparse => mix(key),
        };
        if self.hashes.last().is_some_and(|&last| hash <= last) {
            return Err(WriteError::Order(hash));
        }
        if self.hashes.len() == self.kind.rows_per_page() {
            self.end_page(hash)?;
        }
        self.hashes.push(hash);
        self.rows.extend_from_slice(row);
        self.count += 1;
        Ok(())
    }

    /// Writes the rows that are complete. In a sparse table rows that share the top half of their hash with
    /// the next one stay back, so that one fence compare always finds the page.
    fn end_page(&mut self, next: u64) -> Result<(), WriteError> {
        let prefix = (next >> 32) as u32;
        let n = match self.kind.keys {
            KeySpace::Index => self.hashes.len(),
            KeySpace::Sparse => self.hashes.partition_point(|&h| ((h >> 32) as u32) < prefix),
        };
        if n == 0 {
            return Err(WriteError::Prefix(prefix));
        }
        self.write_page(n)
    }

    fn write_page(&mut self, n: usize) -> Result<(), WriteError> {
        let mut page = [0; PAGE_BYTES];
        let (hashed, row_bytes) = (self.kind.page_kind() == PageKind::Hashed, self.kind.format.row_bytes());
        let (keys, rows) = page[PAGE_HEADER_BYTES..].split_at_mut(if hashed { 8 * n } else { 0 });
        keys.chunks_exact_mut(8).zip(&self.hashes).for_each(|(k, h)| k.copy_from_slice(&h.to_le_bytes()));
        rows[..n * row_bytes].copy_from_slice(&self.rows[..n * row_bytes]);
        self.fences.push((self.hashes[0] >> 32) as u32);
        self.emit(page, self.kind.page_kind(), n)?;
        self.hashes.drain(..n);
        self.rows.drain(..n * row_bytes);
        Ok(())
    }

    fn emit(&mut self, mut page: PageBytes, kind: PageKind, count: usize) -> Result<(), WriteError> {
        seal(&mut page, self.kind.id, self.pages, kind, count);
        self.out.write_all(&page)?;
        self.pages = self.pages.checked_add(1).ok_or(WriteError::TooLarge)?;
        Ok(())
    }

    /// Completes the segment; returns the destination and the number of rows.
    ///
    /// # Errors
    /// The destination refused the bytes.
    pub fn finish(mut self) -> Result<(W, u64), WriteError> {
        if !self.hashes.is_empty() {
            self.write_page(self.hashes.len())?;
        }
        let data_pages = self.pages;
        if self.kind.keys == KeySpace::Sparse {
            for fences in std::mem::take(&mut self.fences).chunks(FENCES_PER_PAGE) {
                let mut page = [0; PAGE_BYTES];
                let places = page[PAGE_HEADER_BYTES..].chunks_exact_mut(4);
                places.zip(fences).for_each(|(place, f)| place.copy_from_slice(&f.to_le_bytes()));
                self.emit(page, PageKind::Fences, fences.len())?;
            }
        }
        let trailer = self.kind.trailer(self.count, data_pages, self.pages - data_pages);
        self.out.write_all(&trailer)?;
        Ok((self.out, self.count))
    }
}

/// Checks a segment that comes from outside, page by page in file order, before it may be used.
pub struct SegmentCheck {
    path: PathBuf,
    kind: SegmentKind,
    rows_expected: u64,
    rows: u64,
    pages: u32,
    data_pages: u32,
    last_hash: Option<u64>,
    fences: Vec<u32>,
    fences_seen: usize,
    done: bool,
}

impl SegmentCheck {
    /// A check of the segment of `kind` with `rows` rows; `path` is what errors name.
    pub fn new(path: &Path, kind: SegmentKind, rows: u64) -> Self {
        Self {
            path: path.to_owned(),
            kind,
            rows_expected: rows,
            rows: 0,
            pages: 0,
            data_pages: 0,
            last_hash: None,
            fences: Vec::new(),
            fences_seen: 0,
            done: false,
        }
    }

    fn field<T>(&self, field: &'static str, problem: impl Into<String>) -> Result<T, SegmentError> {
        Err(SegmentError::Field { path: self.path.clone(), field, problem: problem.into() })
    }

    fn page_error(&self, source: PageFault) -> SegmentError {
        SegmentError::Page { path: self.path.clone(), page: self.pages, source }
    }

    /// Takes the next whole pages.
    ///
    /// # Errors
    /// The first page or row that is wrong.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), SegmentError> {
        let (pages, rest) = bytes.as_chunks::<PAGE_BYTES>();
        if !rest.is_empty() {
            return self.field("length", format!("{} bytes follow the last whole page", rest.len()));
        }
        for page in pages {
            if self.done {
                return self.field("length", "pages follow the trailer");
            }
            match u16::from_le_bytes([page[14], page[15]]) {
                k if k == PageKind::Trailer as u16 => self.take_trailer(page)?,
                k if k == PageKind::Fences as u16 => self.take_fences(page)?,
                _ => self.take_rows(page)?,
            }
            self.pages += 1;
        }
        Ok(())
    }

    fn take_rows(&mut self, page: &PageBytes) -> Result<(), SegmentError> {
        let (kind, capacity) = (self.kind.page_kind(), self.kind.rows_per_page());
        if self.pages != self.data_pages {
            return self.field("fences", format!("page {} holds rows and follows fences", self.pages));
        }
        let checked =
            Page::check(page, self.kind.id, self.pages, kind, capacity).map_err(|e| self.page_error(e))?;
        if kind == PageKind::Hashed {
            checked.check_order(self.last_hash).map_err(|e| self.page_error(e))?;
            let prefix = (checked.hash(0) >> 32) as u32;
            if self.last_hash.is_some_and(|h| (h >> 32) as u32 == prefix) {
                return self.field("fences", format!("hash prefix {prefix:#010x} lies on two pages"));
            }
            self.fences.push(prefix);
            self.last_hash = Some(checked.hash(checked.count() - 1));
        } else if !self.rows.is_multiple_of(capacity as u64) {
            return self.field("rows", format!("page {} follows a page that is not full", self.pages));
        }
        for row in 0..checked.count() {
            let bytes = checked.row(kind, self.kind.format.row_bytes(), row);
            self.kind.format.check(bytes).map_err(|source| SegmentError::Row {
                path: self.path.clone(),
                page: self.pages,
                row,
                source,
            })?;
        }
        self.rows += checked.count() as u64;
        self.data_pages += 1;
        Ok(())
    }

    fn take_fences(&mut self, page: &PageBytes) -> Result<(), SegmentError> {
        let checked = Page::check(page, self.kind.id, self.pages, PageKind::Fences, FENCES_PER_PAGE)
            .map_err(|e| self.page_error(e))?;
        for fence in fences_in(&checked) {
            if self.fences.get(self.fences_seen) != Some(&fence) {
                return self.field("fences", format!("fence {} is not its page's", self.fences_seen));
            }
            self.fences_seen += 1;
        }
        Ok(())
    }

    fn take_trailer(&mut self, page: &PageBytes) -> Result<(), SegmentError> {
        Page::check(page, self.kind.id, self.pages, PageKind::Trailer, 1).map_err(|e| self.page_error(e))?;
        let expected = self.kind.trailer(self.rows, self.data_pages, self.pages - self.data_pages);
        if page != &expected {
            return self.field("trailer", "does not describe the pages before it as the manifest does");
        }
        if self.fences_seen != self.fences.len() {
            return self.field("fences", format!("{} for {} pages", self.fences_seen, self.fences.len()));
        }
        if self.rows != self.rows_expected {
            return self.field("rows", format!("{} instead of {}", self.rows, self.rows_expected));
        }
        self.done = true;
        Ok(())
    }

    /// Ends the check.
    ///
    /// # Errors
    /// The segment ended before its trailer.
    pub fn finish(self) -> Result<(), SegmentError> {
        if self.done { Ok(()) } else { self.field("length", "the segment ends before its trailer") }
    }
}

fn fences_in(page: &Page<'_>) -> impl Iterator<Item = u32> {
    page.payload().chunks_exact(4).take(page.count()).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

/// A segment open for reads. Holding one proves that its trailer and fences are whole and that it is the
/// segment that the manifest describes; its data pages are checked as they are read.
pub struct Segment {
    path: PathBuf,
    file: File,
    kind: SegmentKind,
    rows: u64,
    data_pages: u32,
    fences: Box<[u32]>,
}

impl Segment {
    /// Opens the segment at `path`, which must be of `kind` with `rows` rows.
    ///
    /// # Errors
    /// The file is not that segment, or its trailer or fences are damaged.
    pub fn open(path: &Path, kind: SegmentKind, rows: u64) -> Result<Self, SegmentError> {
        let io = |source| SegmentError::Io { path: path.to_owned(), source };
        let file = File::open(path).map_err(io)?;
        let bytes = file.metadata().map_err(io)?.len();
        let pages = u32::try_from(bytes / PAGE_BYTES as u64).unwrap_or(0);
        if !bytes.is_multiple_of(PAGE_BYTES as u64) || pages == 0 {
            let problem = format!("{bytes} bytes are not 1 to 2^32 - 1 pages");
            return Err(SegmentError::Field { path: path.to_owned(), field: "length", problem });
        }
        let mut segment = Self { path: path.to_owned(), file, kind, rows, data_pages: 0, fences: [].into() };
        segment.read_trailer(pages - 1)?;
        segment.read_fences(pages - 1)?;
        Ok(segment)
    }

    fn read_trailer(&mut self, last: u32) -> Result<(), SegmentError> {
        let mut page = [0; PAGE_BYTES];
        self.read_page(last, &mut page)?;
        Page::check(&page, self.kind.id, last, PageKind::Trailer, 1).map_err(|e| self.page_error(last, e))?;
        let counts = u64_at(&page, 40);
        let (data_pages, fence_pages) = (counts as u32, (counts >> 32) as u32);
        let fits = data_pages.checked_add(fence_pages) == Some(last);
        if !fits || page != self.kind.trailer(self.rows, data_pages, fence_pages) {
            let problem = "is not the segment that the manifest describes".to_owned();
            return Err(SegmentError::Field { path: self.path.clone(), field: "trailer", problem });
        }
        self.data_pages = data_pages;
        Ok(())
    }

    fn read_fences(&mut self, last: u32) -> Result<(), SegmentError> {
        let mut fences =
            Vec::with_capacity(if self.kind.keys == KeySpace::Sparse { self.data_pages as usize } else { 0 });
        let mut page = [0; PAGE_BYTES];
        for number in self.data_pages..last {
            self.read_page(number, &mut page)?;
            let checked = Page::check(&page, self.kind.id, number, PageKind::Fences, FENCES_PER_PAGE)
                .map_err(|e| self.page_error(number, e))?;
            fences.extend(fences_in(&checked));
        }
        let expected = if self.kind.keys == KeySpace::Sparse { self.data_pages as usize } else { 0 };
        if fences.len() != expected || !fences.is_sorted_by(|a, b| a < b) {
            let problem = format!("{} ascending ones expected", expected);
            return Err(SegmentError::Field { path: self.path.clone(), field: "fences", problem });
        }
        self.fences = fences.into();
        Ok(())
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Rows in the segment.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Pages that hold rows.
    pub fn data_pages(&self) -> u32 {
        self.data_pages
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        let fence_pages = self.fences.len().div_ceil(FENCES_PER_PAGE) as u64;
        (u64::from(self.data_pages) + fence_pages + 1) * PAGE_BYTES as u64
    }

    /// Bytes of the index in memory.
    pub fn index_bytes(&self) -> usize {
        4 * self.fences.len()
    }

    /// The page that holds `key` if any does; `None` if the table cannot have the key.
    #[inline]
    pub fn locate(&self, key: u64) -> Option<u32> {
        match self.kind.keys {
            KeySpace::Index => (key < self.rows).then(|| (key / self.kind.rows_per_page() as u64) as u32),
            KeySpace::Sparse => {
                let prefix = (mix(key) >> 32) as u32;
                (self.fences.partition_point(|&f| f <= prefix) as u32).checked_sub(1)
            }
        }
    }

    /// Reads page `number` into `page`, unchecked.
    ///
    /// # Errors
    /// The device refused.
    pub fn read_page(&self, number: u32, page: &mut PageBytes) -> Result<(), SegmentError> {
        let at = u64::from(number) * PAGE_BYTES as u64;
        self.file
            .read_exact_at(page, at)
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

    fn page_error(&self, page: u32, source: PageFault) -> SegmentError {
        SegmentError::Page { path: self.path.clone(), page, source }
    }

    /// The encoded row of `key` in a checked page, or `None` if the table does not have the key.
    pub fn row<'a>(&self, page: &Page<'a>, key: u64) -> Option<&'a [u8]> {
        let kind = self.kind.page_kind();
        let position = match kind {
            PageKind::Hashed => page.position(mix(key))?,
            _ => Some((key % self.kind.rows_per_page() as u64) as usize).filter(|&i| i < page.count())?,
        };
        Some(page.row(kind, self.kind.format.row_bytes(), position))
    }

    /// Hands every row to `take` in file order, with its key hash in a sparse table and its key in an index
    /// table. A damaged page goes to `damaged` and its rows are left out.
    ///
    /// # Errors
    /// The device refused.
    pub fn scan(
        &self,
        mut take: impl FnMut(u64, &[u8]),
        mut damaged: impl FnMut(SegmentError),
    ) -> Result<(), SegmentError> {
        let mut page = [0; PAGE_BYTES];
        let (kind, per_page) = (self.kind.page_kind(), self.kind.rows_per_page() as u64);
        for number in 0..self.data_pages {
            self.read_page(number, &mut page)?;
            match self.check(number, &page) {
                Err(e) => damaged(e),
                Ok(checked) => (0..checked.count()).for_each(|i| {
                    let hashed = kind == PageKind::Hashed;
                    let name = if hashed { checked.hash(i) } else { u64::from(number) * per_page + i as u64 };
                    take(name, checked.row(kind, self.kind.format.row_bytes(), i));
                }),
            }
        }
        Ok(())
    }
}
