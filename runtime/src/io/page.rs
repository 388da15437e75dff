//! One 4 KiB page. A CRC-32C detects changed bits. The segment, number and kind detect a page that
//! was written to or read from the wrong place. FORMAT.md draws the bytes. Never reads a file.

use crate::limits::{PAGE_BYTES, PAGE_HEADER_BYTES};
use crc_fast::crc32_iscsi as crc32c;

/// The bytes of a page.
pub type PageBytes = [u8; PAGE_BYTES];

/// A page in memory, aligned for direct reads (O_DIRECT).
#[repr(C, align(4096))]
pub struct AlignedPage(pub PageBytes);

impl AlignedPage {
    /// Returns a page of zeros.
    pub fn zeroed() -> Self {
        Self([0; PAGE_BYTES])
    }
}

/// The kind of a page's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum PageKind {
    /// Rows of an index table, in key order, without their keys.
    Index = 1,
    /// The orders of keys, strictly ascending, followed by their rows.
    Hashed = 2,
    /// The top 32 bits of the first hash of each hashed page.
    Fences = 3,
    /// The last page of a segment, which describes the segment.
    Trailer = 4,
    /// A copy of the orders of all rows of a delta: the first order, then the difference to each
    /// next one. An open reads only these pages and those of the deleted keys.
    KeySteps = 5,
    /// The orders of the keys that a delta deletes.
    Deletes = 6,
}

impl PageKind {
    /// Returns the kind with this number.
    fn of(number: u16) -> Option<Self> {
        use PageKind::*;
        [Index, Hashed, Fences, Trailer, KeySteps, Deletes]
            .into_iter()
            .find(|k| *k as u16 == number)
    }
}

/// Returns the kind that an unchecked page claims.
pub fn claimed_kind(page: &PageBytes) -> Option<PageKind> {
    PageKind::of(u16_at(page, 14))
}

/// Why a page must not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageFault {
    /// The stored checksum differs from the computed one: bits changed, or a write was incomplete.
    #[error("checksum is {found:#010x}, the bytes give {computed:#010x}")]
    #[allow(missing_docs)]
    Checksum { found: u32, computed: u32 },
    /// The page belongs to another segment.
    #[error("belongs to segment {0:#010x}")]
    Segment(u32),
    /// The page has another number in its segment: a read or a write was misdirected.
    #[error("says it is page {0}")]
    Number(u32),
    /// The page is of another kind than expected.
    #[error("is of kind {0}")]
    Kind(u16),
    /// The page claims no entry, or more entries than fit.
    #[error("claims {0} entries")]
    Count(u16),
    /// Keys do not ascend strictly: they are unsorted, or a key occurs twice.
    #[error("keys do not ascend at entry {0}")]
    Order(usize),
}

pub(crate) fn u32_at(page: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]])
}

fn u16_at(page: &PageBytes, at: usize) -> u16 {
    u16::from_le_bytes([page[at], page[at + 1]])
}

/// Returns the little-endian u64 at byte `at`.
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Writes the header of a page whose payload is complete. The checksum comes last.
pub fn seal(page: &mut PageBytes, segment: u32, number: u32, kind: PageKind, count: usize) {
    assert!(count > 0, "every page has an entry");
    let Ok(count) = u16::try_from(count) else {
        unreachable!("a page has fewer entries than bytes")
    };

    page[4..8].copy_from_slice(&segment.to_le_bytes());
    page[8..12].copy_from_slice(&number.to_le_bytes());
    page[12..14].copy_from_slice(&count.to_le_bytes());
    page[14..16].copy_from_slice(&(kind as u16).to_le_bytes());

    let checksum = crc32c(&page[4..]);
    page[..4].copy_from_slice(&checksum.to_le_bytes());
}

/// Moves a checked page to another segment.
pub(crate) fn move_to(page: &mut PageBytes, segment: u32) {
    page[4..8].copy_from_slice(&segment.to_le_bytes());
    let checksum = crc32c(&page[4..]);
    page[..4].copy_from_slice(&checksum.to_le_bytes());
}

/// A page that passed its checks. Holding one proves that it is the expected page and that its
/// bytes are those that `seal` covered with the checksum.
#[derive(Clone, Copy)]
pub struct Page<'a> {
    bytes: &'a PageBytes,
    count: usize,
}

impl<'a> Page<'a> {
    /// Checks that `bytes` are page `number` of `segment`, of `kind`, with at most `count_max`
    /// entries.
    ///
    /// # Errors
    /// The first [`PageFault`] found.
    pub fn check(
        bytes: &'a PageBytes,
        segment: u32,
        number: u32,
        kind: PageKind,
        count_max: usize,
    ) -> Result<Self, PageFault> {
        let (found, computed) = (u32_at(bytes, 0), crc32c(&bytes[4..]));
        let count = u16_at(bytes, 12);

        if found != computed {
            Err(PageFault::Checksum { found, computed })
        } else if u32_at(bytes, 4) != segment {
            Err(PageFault::Segment(u32_at(bytes, 4)))
        } else if u32_at(bytes, 8) != number {
            Err(PageFault::Number(u32_at(bytes, 8)))
        } else if u16_at(bytes, 14) != kind as u16 {
            Err(PageFault::Kind(u16_at(bytes, 14)))
        } else if count == 0 || usize::from(count) > count_max {
            Err(PageFault::Count(count))
        } else {
            Ok(Self { bytes, count: usize::from(count) })
        }
    }

    /// Returns a page that `check` has accepted and that has not changed since.
    pub(crate) fn checked(bytes: &'a PageBytes, count: usize) -> Self {
        Self { bytes, count }
    }

    /// Returns the number of entries.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the bytes after the header.
    pub fn payload(&self) -> &'a [u8] {
        &self.bytes[PAGE_HEADER_BYTES..]
    }

    /// Returns the order of entry `i` of a page of keys or of hashed rows.
    pub fn order(&self, i: usize) -> u64 {
        u64_at(self.payload(), 8 * i)
    }

    /// Returns the position of `order` in a page of hashed rows.
    pub fn position(&self, order: u64) -> Option<usize> {
        let (mut low, mut high) = (0, self.count);
        while low < high {
            let middle = (low + high) / 2;
            match self.order(middle).cmp(&order) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
                std::cmp::Ordering::Equal => return Some(middle),
            }
        }
        None
    }

    /// Returns row `i` of a page of `kind`, `[row_bytes]`.
    pub fn row(&self, kind: PageKind, row_bytes: usize, i: usize) -> &'a [u8] {
        let start = if kind == PageKind::Hashed { 8 * self.count } else { 0 } + i * row_bytes;
        &self.payload()[start..start + row_bytes]
    }

    /// Checks that the orders of a page of keys or of hashed rows ascend strictly and that the
    /// first is above `after`.
    ///
    /// # Errors
    /// [`PageFault::Order`] with the first entry that does not ascend.
    pub fn check_order(&self, after: Option<u64>) -> Result<(), PageFault> {
        let mut last = after;
        for i in 0..self.count {
            if last.is_some_and(|l| self.order(i) <= l) {
                return Err(PageFault::Order(i));
            }
            last = Some(self.order(i));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_is_found() {
        let mut page = [7u8; PAGE_BYTES];
        seal(&mut page, 0xabcd, 3, PageKind::Index, 30);
        assert_eq!(Page::check(&page, 0xabcd, 3, PageKind::Index, 30).map(|p| p.count()), Ok(30));
        for bit in 0..PAGE_BYTES * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert!(Page::check(&page, 0xabcd, 3, PageKind::Index, 30).is_err(), "bit {bit}");
            page[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn a_whole_page_in_the_wrong_place_is_found() {
        let mut page = [0u8; PAGE_BYTES];
        seal(&mut page, 1, 2, PageKind::Hashed, 4);
        let fault = |s, n, k, c| Page::check(&page, s, n, k, c).err();
        assert_eq!(fault(9, 2, PageKind::Hashed, 4), Some(PageFault::Segment(1)));
        assert_eq!(fault(1, 9, PageKind::Hashed, 4), Some(PageFault::Number(2)));
        assert_eq!(fault(1, 2, PageKind::Index, 4), Some(PageFault::Kind(2)));
        assert_eq!(fault(1, 2, PageKind::Hashed, 3), Some(PageFault::Count(4)));
        let page = Page::check(&page, 1, 2, PageKind::Hashed, 4).unwrap();
        assert_eq!(page.check_order(None), Err(PageFault::Order(1)), "four equal keys");
    }
}
