//! Resident tables: small tables whose rows are all in memory, so that no lookup misses. The keys
//! of a resident table never change. [`Resident::write`] replaces the row of a key; its caller
//! makes sure that no lookup runs during the write. Such a lookup would read a torn row, but would
//! stay in bounds.

use crate::cache::address::mix;
use crate::cache::codec::ROW_BYTES_MAX;
use crate::cache::raw_rows::RawRows;
use crate::simd::atomics::{AtomicU32, Ordering};
use crate::simd::huge_pages::Zeroed;
use crate::simd::prefetch::{prefetch_l2, prefetch_lines};
use crate::simd::{OVERREAD_BYTES, Plain, READ_BYTES, Simd};

/// Rows of a bucket, on average.
const BUCKET_ROWS: usize = 8;

/// All encoded rows of one small table.
pub struct Resident {
    row_bytes: usize,
    /// The index from key to row; `None` if the key is the row's position.
    index: Option<Index>,
    count: usize,
    /// Words of a row.
    row_words: usize,
    /// The rows, with `OVERREAD_BYTES` readable bytes after the last.
    rows: Zeroed<AtomicU32>,
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
        // The lowest hash of each bucket: rounded up, because `bucket` rounds down.
        let start = |b: usize| ((b as u128) << 64).div_ceil(buckets as u128);
        let position = |b| hashes.partition_point(|&h| u128::from(h) < start(b)) as u32;
        let buckets = (0..=buckets).map(position).collect();
        Self { hashes, buckets }
    }

    /// Returns the bytes of an index of `rows` rows.
    fn bytes_of(rows: usize) -> usize {
        8 * rows + 4 * (rows / BUCKET_ROWS + 2)
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
    /// Creates a table with room for `rows_max` rows of `row_bytes`, and with no row yet. A key is
    /// the position of its row.
    ///
    /// # Panics
    /// If the number of a row does not fit 32 bits.
    pub fn with_room(row_bytes: usize, rows_max: usize) -> Self {
        assert!(u32::try_from(rows_max).is_ok(), "a row's number has 32 bits");
        let rows = Zeroed::new(Self::words_in(row_bytes, rows_max));
        Self { row_bytes, index: None, count: 0, row_words: row_bytes.div_ceil(4), rows }
    }

    fn words_in(row_bytes: usize, rows_max: usize) -> usize {
        match rows_max {
            0 => 0,
            _ => rows_max * row_bytes.div_ceil(4) + OVERREAD_BYTES / 4,
        }
    }

    /// Returns the bytes of a table with room for `rows_max` rows of `row_bytes`. With an index it
    /// finds keys by their hashes.
    pub fn bytes_in(row_bytes: usize, rows_max: usize, is_hashed: bool) -> usize {
        let index = if is_hashed { Index::bytes_of(rows_max) } else { 0 };
        4 * Self::words_in(row_bytes, rows_max) + index
    }

    /// Creates a table from `rows` `[n, row_bytes]`, in the order of the keys `0..n`.
    pub fn indexed(row_bytes: usize, rows: &[u8]) -> Self {
        assert_eq!(rows.len() % row_bytes, 0);
        let mut table = Self::with_room(row_bytes, rows.len() / row_bytes);
        rows.chunks(row_bytes).for_each(|row| table.push(row));
        table
    }

    /// Adds `row` `[row_bytes]` after the last row.
    ///
    /// # Panics
    /// If there is no room for it.
    pub fn push(&mut self, row: &[u8]) {
        self.count += 1;
        self.write(self.count as u32 - 1, row);
    }

    /// Returns the table with an index of `hashes` `[n]`, the `mix(key)` of each row in the order
    /// of the rows. Sorts the rows by them in place, so that no table is in memory twice.
    pub fn hashed(mut self, mut hashes: Vec<u64>) -> Self {
        assert_eq!(self.count, hashes.len());
        if !hashes.is_sorted() {
            self.sort_rows(&hashes);
            hashes.sort_unstable();
        }
        Self { index: Some(Index::new(hashes.into())), ..self }
    }

    fn sort_rows(&mut self, hashes: &[u64]) {
        let mut order: Vec<u32> = (0..hashes.len() as u32).collect();
        order.sort_unstable_by_key(|&row| hashes[row as usize]);
        let words = self.row_words;
        let copy = |rows: &[AtomicU32], from: usize, to: usize| {
            let pairs = rows[from * words..][..words].iter().zip(&rows[to * words..][..words]);
            pairs.for_each(|(from, to)| to.store(from.load(Ordering::Relaxed), Ordering::Relaxed));
        };
        // The order is a set of cycles. Each moves its rows by one place, with one row set aside.
        let mut aside = vec![0; words];
        for first in 0..order.len() {
            let row = &self.rows[first * words..][..words];
            aside.iter_mut().zip(row).for_each(|(to, from)| *to = from.load(Ordering::Relaxed));
            let mut to = first;
            loop {
                let from = std::mem::replace(&mut order[to], to as u32) as usize;
                if from == first {
                    break;
                }
                copy(&self.rows, from, to);
                to = from;
            }
            let row = &self.rows[to * words..][..words];
            row.iter().zip(&aside).for_each(|(to, from)| to.store(*from, Ordering::Relaxed));
        }
    }

    /// Replaces the row in `slot` with `bytes` `[row_bytes]`. The caller makes sure that no lookup
    /// reads the row during the write.
    pub fn write(&self, slot: u32, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.row_bytes);
        let row = &self.rows[slot as usize * self.row_words..][..self.row_words];
        for (word, bytes) in row.iter().zip(bytes.chunks(4)) {
            let mut full = [0; 4];
            full[..bytes.len()].copy_from_slice(bytes);
            word.store(u32::from_le_bytes(full), Ordering::Relaxed);
        }
    }

    /// Returns the number of rows.
    pub fn rows_len(&self) -> usize {
        self.count
    }

    /// Returns whether the table finds a key by its hash. If not, the key is the row's number.
    #[inline(always)]
    pub(crate) fn is_hashed(&self) -> bool {
        self.index.is_some()
    }

    /// Returns the number of the row of `key`, or `None` if the table does not have the key.
    #[inline(always)]
    pub fn slot(&self, key: u64) -> Option<u32> {
        match &self.index {
            None => (key < self.count as u64).then_some(key as u32),
            Some(index) => index.position(key).map(|position| position as u32),
        }
    }

    /// Returns the row in `slot`, rounded up to whole racing reads.
    #[inline(always)]
    fn row_in(&self, slot: u32) -> &[AtomicU32] {
        let words = self.row_words.next_multiple_of(READ_BYTES / 4);
        &self.rows[slot as usize * self.row_words..][..words]
    }

    /// Copies the encoded row of `key` into `out` `[row_bytes, rounded up to READ_BYTES]`. Returns
    /// false if the table does not have the key.
    #[inline(always)]
    pub(crate) fn read<S: Simd>(&self, key: u64, out: &mut [u8]) -> bool {
        let slot = self.slot(key);
        slot.inspect(|&slot| S::copy_racing(self.row_in(slot), out)).is_some()
    }

    /// Copies the encoded row of `key` into `out` `[row_bytes]`. Returns false if the table does
    /// not have the key.
    pub fn query(&self, key: u64, out: &mut [u8]) -> bool {
        let mut bytes = [0; ROW_BYTES_MAX.next_multiple_of(READ_BYTES)];
        let bytes = &mut bytes[..self.row_bytes.next_multiple_of(READ_BYTES)];
        let has_key = self.read::<Plain>(key, bytes);
        if has_key {
            out.copy_from_slice(&bytes[..self.row_bytes]);
        }
        has_key
    }

    /// Returns all rows.
    #[inline(always)]
    pub(crate) fn rows(&self) -> RawRows<'_> {
        RawRows::racing(&self.rows, self.row_words)
    }

    /// Prefetches the memory that `slot` reads for `key`.
    #[inline(always)]
    pub(crate) fn prefetch(&self, key: u64) {
        if let Some(index) = &self.index {
            prefetch_l2(index.bucket(mix(key)));
        }
    }

    /// Prefetches the row in `slot`.
    #[inline(always)]
    pub fn prefetch_row(&self, slot: u32) {
        prefetch_lines(&self.rows[slot as usize * self.row_words..][..self.row_words]);
    }

    /// Returns the words of all rows, each row from a whole word on.
    pub(crate) fn words(&self) -> impl Iterator<Item = u32> {
        self.rows[..self.count * self.row_words].iter().map(|word| word.load(Ordering::Relaxed))
    }

    /// Returns the bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Returns the index as its hashes and buckets; `None` if a key is the position of its row.
    pub(crate) fn index(&self) -> Option<(&[u64], &[u32])> {
        self.index.as_ref().map(|i| (&*i.hashes, &*i.buckets))
    }

    /// Returns the bytes of memory that the table takes.
    pub fn bytes(&self) -> usize {
        // Pages behind the last row are mapped and never touched.
        Self::bytes_in(self.row_bytes, self.count, self.index.is_some())
    }
}
