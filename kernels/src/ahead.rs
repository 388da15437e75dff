//! Keys looked up ahead of the sums of their rows: groups of keys are named, then seen, then summed bag by bag, each
//! step some groups behind the one before, so that what it reads is on its way from memory meanwhile. A bag is pooled
//! here only if all its rows are there and stay as they are; any other is left to `query.rs`, row by row.

use crate::cache::{Cache, Epoch, Heads, Seen};
use crate::codec::RowFormat;
use crate::names::{Name, Namer, RowKey};
use crate::resident::Resident;
use crate::simd::{Simd, prefetch_l2};
use crate::sum::{RING, ROWS_AHEAD, Rows, Sums};
use std::ops::Range;

/// Keys of a step.
const GROUP: usize = 16;
/// How far ahead of the sums keys are seen.
const SEE_AHEAD: usize = 32;
/// How far ahead of that keys are named, and their sets asked for.
const NAME_AHEAD: usize = 32;
/// Keys of a bag that are summed before they are proved to be unchanged.
const PIECE: usize = 32;
const _: () = assert!(ROWS_AHEAD <= SEE_AHEAD);
const _: () = assert!(PIECE + SEE_AHEAD + NAME_AHEAD + 2 * GROUP <= RING && RING <= u128::BITS as usize);

/// What is known of the keys ahead, by their number modulo `RING`.
pub(crate) struct Ring {
    sets: [u32; RING],
    words: [u64; RING],
    seen: [Seen; RING],
    slots: [u32; RING],
}

impl Default for Ring {
    fn default() -> Self {
        Self { sets: [0; RING], words: [0; RING], seen: [Seen::default(); RING], slots: [0; RING] }
    }
}

/// A row that is looked for by itself.
pub(crate) enum Found<'a> {
    /// Its bytes are at the front.
    Row(&'a [u8]),
    /// There is no such key.
    Absent,
    /// It is elsewhere.
    Miss,
}

/// Where the rows of a feature are found.
pub(crate) trait Source {
    /// Names some keys, whose places in the ring begin at `at`, and asks for what `see` reads.
    fn name(&self, keys: &[u64], ring: &mut Ring, at: usize);
    /// Finds the rows of the same, and asks for them if they are the `first`; a bit for each that is not there, the first in
    /// the lowest.
    fn see<S: Simd>(&self, keys: &[u64], ring: &mut Ring, at: usize, first: bool) -> u16;
    /// Where the rows are.
    fn rows(&self) -> Rows<'_>;
    /// Whether what was read of these keys' rows since they were seen is of whole rows, and theirs.
    fn is_unchanged(&self, ring: &Ring, keys: Range<usize>) -> bool;
    /// The row of one key, perhaps in `buffer`.
    fn row<'b, S: Simd>(&'b self, key: u64, buffer: &'b mut [u8]) -> Found<'b>;
    /// The state of a row that is missing.
    fn epoch(&self, row: RowKey) -> Epoch;
}

/// A walk through the keys of a feature.
pub(crate) struct Ahead<'a, F> {
    source: &'a F,
    keys: &'a [u64],
    ring: &'a mut Ring,
    named: usize,
    seen: usize,
    /// A bit for each place of the ring whose key was not there.
    lost: u128,
}

impl<'a, F: Source> Ahead<'a, F> {
    pub fn new(source: &'a F, keys: &'a [u64], ring: &'a mut Ring) -> Self {
        Self { source, keys, ring, named: 0, seen: 0, lost: 0 }
    }

    /// Sees all keys before `end`, and more.
    #[inline(always)]
    fn reach<S: Simd>(&mut self, end: usize) {
        let group = |from: usize| from..self.keys.len().min(from + GROUP);
        while self.seen < self.keys.len().min(end + SEE_AHEAD) {
            while self.named < self.keys.len().min(self.seen + GROUP + NAME_AHEAD) {
                let keys = group(self.named);
                self.source.name(&self.keys[keys.clone()], self.ring, self.named % RING);
                self.named = keys.end;
            }
            let (keys, at) = (group(self.seen), self.seen % RING);
            let first = keys.start < ROWS_AHEAD;
            let lost = self.source.see::<S>(&self.keys[keys.clone()], self.ring, at, first);
            self.lost = self.lost & !(0xffff << at) | u128::from(lost) << at;
            self.seen = keys.end;
        }
    }

    /// How many keys from `from` on are there, a piece at most.
    #[inline(always)]
    pub fn there<S: Simd>(&mut self, from: usize) -> usize {
        let end = self.keys.len().min(from + PIECE);
        self.reach::<S>(end);
        let lost = self.lost.rotate_right((from % RING) as u32);
        (end - from).min(lost.trailing_zeros() as usize)
    }

    /// Writes the sums of bags whose keys are all there, a piece at most, to `out` `[bags, stride]`. Their keys are those
    /// between `offsets`, of which `start` is the first that is walked. Returns false, and leaves anything in `out`, if
    /// some row changed meanwhile.
    #[inline(always)]
    pub fn sum<S: Simd>(
        &self,
        format: RowFormat,
        offsets: &[u32],
        start: usize,
        out: &mut [f32],
        stride: usize,
    ) -> bool {
        self.add::<S>(format, offsets, start, true, out, stride)
    }

    #[inline(always)]
    fn add<S: Simd>(
        &self,
        format: RowFormat,
        offsets: &[u32],
        start: usize,
        first: bool,
        out: &mut [f32],
        stride: usize,
    ) -> bool {
        let (Some(&begin), Some(&end)) = (offsets.first(), offsets.last()) else { return true };
        let (rows, slots) = (self.source.rows(), &self.ring.slots);
        let seen = self.seen;
        S::sum(Sums { rows, format, slots, offsets, start, seen, first, out, stride })
            && self.source.is_unchanged(self.ring, begin as usize - start..end as usize - start)
    }

    /// Asks for the rows that the sum of a bag would have asked for, where none is made.
    #[inline(always)]
    pub fn pass(&self, format: RowFormat, bag: Range<usize>) {
        let rows = self.source.rows();
        for key in (bag.start + ROWS_AHEAD..bag.end + ROWS_AHEAD).take_while(|key| *key < self.seen) {
            rows.prefetch(self.ring.slots[key % RING], 0, format.row_bytes(), 0);
        }
    }

    /// Like `sum`, for one bag of any length, a piece after the other; the rows are added to `out` `[dim]`, or put there side
    /// by side. Returns false also if some row is not there.
    #[inline(always)]
    pub fn pool<S: Simd>(
        &mut self,
        format: RowFormat,
        bag: Range<usize>,
        side_by_side: bool,
        out: &mut [f32],
    ) -> bool {
        let dim = format.dim();
        for from in bag.clone().step_by(PIECE) {
            let end = bag.end.min(from + PIECE);
            if self.there::<S>(from) < end - from {
                return false;
            }
            let whole = if side_by_side {
                let offsets: [u32; PIECE + 1] = std::array::from_fn(|i| (from + i) as u32);
                self.sum::<S>(format, &offsets[..=end - from], 0, &mut out[(from - bag.start) * dim..], dim)
            } else {
                self.add::<S>(format, &[from as u32, end as u32], 0, from == bag.start, out, dim)
            };
            if !whole {
                return false;
            }
        }
        true
    }
}

/// The rows of one table in the embedding cache.
pub(crate) struct Cached<'a> {
    cache: &'a Cache,
    heads: Heads<'a>,
    namer: Namer,
    /// Keys beyond it are absent.
    last: u64,
}

impl<'a> Cached<'a> {
    pub fn new(cache: &'a Cache, table: u16, keys_end: Option<u64>) -> Self {
        // A table without keys has no rows in the cache either.
        let last = keys_end.map_or(u64::MAX, |end| end.saturating_sub(1));
        Self { cache, heads: cache.heads(), namer: cache.namer(table), last }
    }

    #[inline(always)]
    fn name_of(&self, key: u64) -> Name {
        let name = self.cache.name(self.namer, key);
        Name { word: if key <= self.last { name.word } else { 0 }, ..name }
    }

    /// Asks for the sets of keys.
    pub fn ask<'k>(&self, keys: impl Iterator<Item = &'k u64>) {
        keys.for_each(|key| self.heads.prefetch(self.name_of(*key).set));
    }

    #[inline(always)]
    fn name_all(&self, keys: &[u64], sets: &mut [u32], words: &mut [u64]) {
        for ((key, set), word) in keys.iter().zip(sets).zip(words) {
            let name = self.name_of(*key);
            (*set, *word) = (name.set, name.word);
        }
    }
}

impl Source for Cached<'_> {
    #[inline(always)]
    fn name(&self, keys: &[u64], ring: &mut Ring, at: usize) {
        let (sets, words) = (&mut ring.sets[at..at + keys.len()], &mut ring.words[at..at + keys.len()]);
        // Of a length that is known, the compiler makes vectors.
        match <&[u64; GROUP]>::try_from(keys) {
            Ok(keys) => self.name_all(keys, sets, words),
            Err(_) => self.name_all(keys, sets, words),
        }
        let heads = self.heads;
        sets.iter().for_each(|set| heads.prefetch(*set));
    }

    #[inline(always)]
    fn see<S: Simd>(&self, keys: &[u64], ring: &mut Ring, at: usize, first: bool) -> u16 {
        let (heads, mut lost) = (self.heads, 0);
        for (n, i) in (at..at + keys.len()).enumerate() {
            let seen = heads.see::<S>(Name { set: ring.sets[i], word: ring.words[i] });
            ring.seen[i] = seen;
            match seen.slot() {
                Some(slot) => {
                    if first {
                        self.cache.prefetch_row(slot);
                    }
                    ring.slots[i] = slot;
                }
                None => lost |= 1 << n,
            }
        }
        lost
    }

    #[inline(always)]
    fn rows(&self) -> Rows<'_> {
        self.cache.rows()
    }

    #[inline(always)]
    fn is_unchanged(&self, ring: &Ring, keys: Range<usize>) -> bool {
        self.heads.are_unchanged(keys.map(|key| ring.seen[key % RING]))
    }

    #[inline(always)]
    fn row<'b, S: Simd>(&'b self, key: u64, buffer: &'b mut [u8]) -> Found<'b> {
        let name = self.name_of(key);
        if self.cache.read::<S>(name, buffer) {
            Found::Row(buffer)
        } else if key > self.last || name.word == 0 {
            Found::Absent
        } else {
            Found::Miss
        }
    }

    fn epoch(&self, row: RowKey) -> Epoch {
        self.cache.epoch(row)
    }
}

/// A resident table has its rows in plain memory.
impl Source for &Resident {
    #[inline(always)]
    fn name(&self, keys: &[u64], _ring: &mut Ring, _at: usize) {
        keys.iter().for_each(|key| self.prefetch(*key));
    }

    #[inline(always)]
    fn see<S: Simd>(&self, keys: &[u64], ring: &mut Ring, at: usize, first: bool) -> u16 {
        let mut lost = 0;
        for (n, (key, at)) in keys.iter().zip(&mut ring.slots[at..at + keys.len()]).enumerate() {
            match self.slot(*key) {
                Some(slot) => {
                    if first {
                        self.prefetch_row(slot);
                    }
                    *at = slot;
                }
                None => lost |= 1 << n,
            }
        }
        lost
    }

    #[inline(always)]
    fn rows(&self) -> Rows<'_> {
        Resident::rows(self)
    }

    #[inline(always)]
    fn is_unchanged(&self, _ring: &Ring, _keys: Range<usize>) -> bool {
        true
    }

    #[inline(always)]
    fn row<'b, S: Simd>(&'b self, key: u64, _buffer: &'b mut [u8]) -> Found<'b> {
        Resident::row(self, key).map_or(Found::Absent, Found::Row)
    }

    fn epoch(&self, _row: RowKey) -> Epoch {
        Epoch::default()
    }
}

/// Asks for all lines of a row, or so many that the hardware has understood.
#[inline(always)]
pub(crate) fn prefetch_lines<T>(row: &[T]) {
    const LINES_MAX: usize = 8;
    let line = 64 / size_of::<T>();
    row.chunks_exact(line).take(LINES_MAX).for_each(|line| prefetch_l2(&line[0]));
    // A row need not begin with a line.
    row.last().inspect(|last| prefetch_l2(*last));
}
