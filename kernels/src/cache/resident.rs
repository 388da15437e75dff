//! Resident tables: small tables whose rows are all in memory, so that no lookup misses. A resident
//! table never changes after it was built.

use crate::cache::address::mix;
use crate::cache::raw_rows::RawRows;
use crate::simd::OVERREAD_BYTES;
use crate::simd::huge_pages::Zeroed;
use crate::simd::prefetch::{prefetch_l2, prefetch_lines};

/// Rows of a bucket, on average.
const BUCKET_ROWS: usize = 8;

/// All encoded rows of one small table.
pub struct Resident {
    row_bytes: usize,
    /// The index from key to row; `None` if the key is the row's position.
    index: Option<Index>,
    count: usize,
    /// The rows, and `OVERREAD_BYTES` after the last.
    rows: Zeroed<u8>,
}

/// The hashes of a table's keys, divided into buckets of equal parts of the hash space.
struct Index {
    /// The hashes in row order, ascending.
    hashes: Box<[u64]>,
    /// The position of each bucket's first hash, `[buckets + 1]`.
    buckets: Box<[u32]>,
}

impl Index {
    fn new(hashes: Box<[u64]>) -> Self {
        let buckets = hashes.len() / BUCKET_ROWS + 1;
        let start = |b: usize| ((b as u128) << 64).div_ceil(buckets as u128);
        let position = |b| hashes.partition_point(|&h| u128::from(h) < start(b)) as u32;
        let buckets = (0..=buckets).map(position).collect();
        Self { hashes, buckets }
    }

    #[inline(always)]
    fn bucket(&self, hash: u64) -> &[u32; 2] {
        let buckets = self.buckets.len() as u128 - 1;
        let bucket = ((u128::from(hash) * buckets) >> 64) as usize;
        // `buckets` has one entry more than there are buckets.
        self.buckets[bucket..].first_chunk().unwrap_or(&[0, 0])
    }

    #[inline(always)]
    fn position(&self, key: u64) -> Option<usize> {
        let hash = mix(key);
        let &[from, to] = self.bucket(hash);
        let within = self.hashes[from as usize..to as usize].iter().position(|&h| h == hash)?;
        Some(from as usize + within)
    }
}

impl Resident {
    /// Creates a table from `rows` `[n, row_bytes]`, in the order of the keys `0..n`.
    pub fn indexed(row_bytes: usize, rows: &[u8]) -> Self {
        Self::with(row_bytes, None, rows)
    }

    /// Creates a table from `rows` `[n, row_bytes]`, in ascending order of `hashes` `[n]`, which
    /// are `mix(key)`.
    pub fn hashed(row_bytes: usize, hashes: Box<[u64]>, rows: &[u8]) -> Self {
        assert_eq!(rows.len(), row_bytes * hashes.len());
        assert!(hashes.is_sorted());
        Self::with(row_bytes, Some(Index::new(hashes)), rows)
    }

    fn with(row_bytes: usize, index: Option<Index>, from: &[u8]) -> Self {
        assert_eq!(from.len() % row_bytes, 0);
        let count = from.len() / row_bytes;
        assert!(u32::try_from(count).is_ok(), "a row's number has 32 bits");

        let mut rows = Zeroed::new(if count == 0 { 0 } else { from.len() + OVERREAD_BYTES });
        rows[..from.len()].copy_from_slice(from);
        Self { row_bytes, index, count, rows }
    }

    /// Returns the number of the row of `key`, or `None` if the table does not have the key.
    #[inline(always)]
    pub(crate) fn slot(&self, key: u64) -> Option<u32> {
        match &self.index {
            None => (key < self.count as u64).then_some(key as u32),
            Some(index) => index.position(key).map(|position| position as u32),
        }
    }

    #[inline(always)]
    fn row_in(&self, slot: u32) -> &[u8] {
        &self.rows[slot as usize * self.row_bytes..][..self.row_bytes]
    }

    /// Returns the encoded row of `key`, or `None` if the table does not have the key.
    #[inline(always)]
    pub fn row(&self, key: u64) -> Option<&[u8]> {
        self.slot(key).map(|slot| self.row_in(slot))
    }

    /// Returns all rows.
    #[inline(always)]
    pub(crate) fn rows(&self) -> RawRows<'_> {
        RawRows::immutable(&self.rows, self.row_bytes)
    }

    /// Prefetches what `slot` reads for `key`.
    #[inline(always)]
    pub(crate) fn prefetch(&self, key: u64) {
        if let Some(index) = &self.index {
            prefetch_l2(index.bucket(mix(key)));
        }
    }

    /// Prefetches the row in `slot`.
    #[inline(always)]
    pub(crate) fn prefetch_row(&self, slot: u32) {
        prefetch_lines(self.row_in(slot));
    }

    /// Returns the bytes of a row, the rows, and the index as its hashes and buckets.
    #[allow(clippy::type_complexity)]
    pub(crate) fn parts(&self) -> (usize, &[u8], Option<(&[u64], &[u32])>) {
        (
            self.row_bytes,
            &self.rows[..self.count * self.row_bytes],
            self.index.as_ref().map(|i| (&*i.hashes, &*i.buckets)),
        )
    }

    /// Returns the bytes of memory that the table takes.
    pub fn bytes(&self) -> usize {
        self.rows.len()
            + self.index.as_ref().map_or(0, |i| 8 * i.hashes.len() + 4 * i.buckets.len())
    }
}
