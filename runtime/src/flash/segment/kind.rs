//! The description of a segment: its part of the table, its kind, its counts, and the layout of its
//! trailer. Never reads or writes a file.

use crate::bundle::manifest::{Generation, sha256};
use crate::io::page::{PageBytes, PageKind, seal, u64_at};
use crate::limits::{PAGE_BYTES, PAGE_HEADER_BYTES};
use crate::schema::{KeySpace, Table};
use hatchback_kernels::cache::codec::{Codec, RowFormat};
use serde::{Deserialize, Serialize};

const MAGIC: &[u8; 8] = b"HATCHSEG";
/// The format of segments.
pub const SEGMENT_FORMAT: u32 = 1;
pub(crate) const PAYLOAD_BYTES: usize = PAGE_BYTES - PAGE_HEADER_BYTES;
pub(crate) const KEYS_PER_PAGE: usize = PAYLOAD_BYTES / 8;
/// Fences of fewer rows a page are whole hashes. In a table of some hundred thousand rows, two rows
/// have equal top halves of their hashes.
const ROWS_OF_HALF_FENCES: usize = 5;

/// The part of its table that a segment holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Part {
    /// Every row.
    Base,
    /// The rows that one generation changed and the keys that it deleted.
    Delta,
}

/// Everything in the trailer of a segment except the counts.
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
    /// Returns the kind of a segment of table `number`, written in the folder of `generation`;
    /// `None` if the table's unit does not fit its codec. `serial` is 0 for the base or delta of a
    /// bundle. Each compaction takes the next serial.
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

    /// Returns the encoding of the rows.
    pub fn format(&self) -> RowFormat {
        self.format
    }

    /// Returns the key space of the table.
    pub fn keys(&self) -> KeySpace {
        self.keys
    }

    /// Returns the kind of the pages that hold rows.
    pub(crate) fn page_kind(&self) -> PageKind {
        match (self.part, self.keys) {
            (Part::Base, KeySpace::Index) => PageKind::Index,
            // A delta of an index table has some of the keys only, so its pages list them.
            _ => PageKind::Hashed,
        }
    }

    /// Returns whether the segment has a fence for each data page.
    pub(crate) fn has_fences(&self) -> bool {
        self.part == Part::Base && self.keys == KeySpace::Sparse
    }

    /// Returns the low bits of a hash that its fence leaves out.
    pub(crate) fn fence_shift(&self) -> u32 {
        if self.rows_per_page() < ROWS_OF_HALF_FENCES { 0 } else { 32 }
    }

    /// Returns the number of fences in a full page of them.
    pub(crate) fn fences_per_page(&self) -> usize {
        if self.fence_shift() == 0 { KEYS_PER_PAGE } else { PAYLOAD_BYTES / 4 }
    }

    /// Returns the number of rows of a full page.
    pub fn rows_per_page(&self) -> usize {
        let key = if self.page_kind() == PageKind::Hashed { 8 } else { 0 };
        PAYLOAD_BYTES / (key + self.format.row_bytes())
    }

    /// Returns the sealed trailer of a segment of this kind with `counts`.
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
        };
        let sparse = u8::from(self.keys == KeySpace::Sparse);
        put(64, &[part, sparse, codec, self.unit_exp as u8]);

        let number = counts.data_pages.saturating_add(counts.index_pages);
        seal(&mut page, self.id, number, PageKind::Trailer, 1);
        page
    }
}

/// The numbers of rows, deletes and pages of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Counts {
    pub rows: u64,
    /// Keys that a delta deletes.
    pub deletes: u64,
    /// Pages with rows.
    pub data_pages: u32,
    /// Pages between the data pages and the trailer.
    pub index_pages: u32,
}

impl Counts {
    /// Reads the counts of a trailer.
    pub(super) fn read(page: &PageBytes) -> Self {
        let pages = u64_at(page, 48);
        Self {
            rows: u64_at(page, 32),
            deletes: u64_at(page, 40),
            data_pages: pages as u32,
            index_pages: (pages >> 32) as u32,
        }
    }

    /// Returns the bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        (u64::from(self.data_pages) + u64::from(self.index_pages) + 1) * PAGE_BYTES as u64
    }
}
