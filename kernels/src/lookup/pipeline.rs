//! Keys looked up ahead of the sums of their rows: groups of keys are named, then seen, then summed
//! bag by bag, each step some groups behind the one before, so that what it reads is on its way
//! from memory meanwhile. A bag is pooled here only if all its rows are there and stay as they are;
//! any other is left to `query.rs`, row by row.

use crate::cache::address::{RowKey, SetTag, TableHasher};
use crate::cache::codec::RowFormat;
use crate::cache::eviction::used;
use crate::cache::resident::Resident;
use crate::cache::set_header::{Seen, SetHeaders};
use crate::cache::{Cache, Epoch};
use crate::lookup::pooling::{PoolJob, RING, ROWS_AHEAD, RawRows};
use crate::simd::{Simd, prefetch, prefetch_l2};
use std::ops::Range;

/// Keys of a step.
const GROUP: usize = 16;
/// How far ahead of the sums keys are seen.
const SEE_AHEAD: usize = 48;
/// How far ahead of that keys are named, and their sets asked for.
const NAME_AHEAD: usize = 48;
/// How far ahead of that keys are read.
const KEYS_AHEAD: usize = 64;
/// Keys of a bag that are summed before they are proved to be unchanged.
const PIECE: usize = 64;
const _: () = assert!(ROWS_AHEAD <= SEE_AHEAD);
const _: () = assert!(PIECE + SEE_AHEAD + NAME_AHEAD + 2 * GROUP <= RING && PIECE <= 64);

/// What is known of the keys ahead, by their number modulo `RING`.
pub(crate) struct Ring {
    sets: [u32; RING],
    words: [u64; RING],
    ways: [u32; RING],
    sequences: [u32; RING],
    uses: [u32; RING],
    slots: [u32; RING],
}

impl Default for Ring {
    fn default() -> Self {
        let none = [0; RING];
        Self { sets: none, words: [0; RING], ways: none, sequences: none, uses: none, slots: none }
    }
}

impl Ring {
    /// Turns the hits of a group into ways and slots, many at a time.
    #[inline(always)]
    fn see(&mut self, at: usize) -> Looked {
        fn group<T>(of: &mut [T; RING], at: usize) -> Option<&mut [T; GROUP]> {
            of[at..].first_chunk_mut()
        }
        let sets = group(&mut self.sets, at);
        let (words, sequences) = (group(&mut self.words, at), group(&mut self.sequences, at));
        let (ways, slots) = (group(&mut self.ways, at), group(&mut self.slots, at));
        let (Some(sets), Some(words), Some(sequences), Some(uses), Some(ways), Some(slots)) =
            (sets, words, sequences, group(&mut self.uses, at), ways, slots)
        else {
            return Looked { lost: !0, uncounted: 0 };
        };
        let mut looked = Looked::default();
        for n in 0..GROUP {
            let seen = Seen::of(SetTag { set: sets[n], word: words[n] }, ways[n], sequences[n]);
            (ways[n], slots[n]) = (seen.way, seen.slot());
            looked.lost |= u16::from(!seen.is_there()) << n;
            looked.uncounted |= u16::from(used(uses[n], seen.way as usize) != uses[n]) << n;
        }
        looked
    }
}

/// What is known of a group of keys, a bit for each, the first in the lowest.
#[derive(Clone, Copy, Default)]
pub(crate) struct Looked {
    /// Not there.
    lost: u16,
    /// If it is there, another use of it is worth counting.
    uncounted: u16,
}

/// One bit of a `Looked` for each place of the ring.
#[derive(Clone, Copy, Default)]
struct Bits([u64; RING / 64]);

impl Bits {
    #[inline(always)]
    fn set(&mut self, at: usize, group: u16) {
        let (word, bit) = (&mut self.0[at / 64], at % 64);
        *word = *word & !(0xffff << bit) | u64::from(group) << bit;
    }

    /// Those of key `from` and the 63 behind it.
    #[inline(always)]
    fn of(&self, from: usize) -> u64 {
        let word = |i: usize| u128::from(self.0[i % self.0.len()]);
        ((word(from / 64) | word(from / 64 + 1) << 64) >> (from % 64)) as u64
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
    /// Names some keys, whose places in the ring begin at `at`, and asks for what `see` reads if
    /// they are the `first`.
    fn name(&self, keys: &[u64], ring: &mut Ring, at: usize, first: bool);
    /// Finds the rows of the same, and asks for them if they are the `first`. Asks for what it will
    /// read for the named keys at places `next`.
    fn see<S: Simd>(
        &self,
        keys: &[u64],
        ring: &mut Ring,
        at: usize,
        first: bool,
        next: Range<usize>,
    ) -> Looked;
    /// Where the rows are.
    fn rows(&self) -> RawRows<'_>;
    /// The changes that have ended; read before keys are seen.
    fn changes(&self) -> u32;
    /// Whether what was read of any keys' rows is of whole rows, and theirs, if they were seen
    /// after `changes` was read.
    fn has_none_since(&self, changes: u32) -> bool;
    /// Counts a use of the row at that place of the ring.
    fn count(&self, ring: &Ring, at: usize);
    /// Whether what was read of these keys' rows since they were seen is of whole rows, and theirs;
    /// then counts a use of each.
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
    lost: Bits,
    uncounted: Bits,
    /// The changes that had ended before key `from` was seen, and those behind it.
    changes: u32,
    from: usize,
    /// Whether sums are written past the caches.
    stream: bool,
}

impl<'a, F: Source> Ahead<'a, F> {
    pub fn new(source: &'a F, keys: &'a [u64], ring: &'a mut Ring, stream: bool) -> Self {
        let (lost, uncounted) = (Bits::default(), Bits::default());
        let changes = source.changes();
        Self { source, keys, ring, named: 0, seen: 0, lost, uncounted, changes, from: 0, stream }
    }

    /// Sees all keys before `end`, and more.
    #[inline(always)]
    fn reach<S: Simd>(&mut self, end: usize) {
        let count = self.keys.len();
        let group = |from: usize| from.min(count)..count.min(from + GROUP);
        while self.seen < count.min(end + SEE_AHEAD) {
            while self.named < count.min(self.seen + NAME_AHEAD + GROUP) {
                let keys = group(self.named);
                // The next keys of the walk, on their way from memory.
                prefetch(self.keys.as_ptr().wrapping_add(keys.start + KEYS_AHEAD));
                prefetch(self.keys.as_ptr().wrapping_add(keys.start + KEYS_AHEAD + GROUP / 2));
                let first = keys.start < NAME_AHEAD;
                self.source.name(&self.keys[keys.clone()], self.ring, self.named % RING, first);
                self.named = keys.end;
            }
            let (keys, at) = (group(self.seen), self.seen % RING);
            let first = keys.start < ROWS_AHEAD;
            let next = group(self.seen + NAME_AHEAD);
            let next = next.start % RING..next.start % RING + next.len();
            let looked = self.source.see::<S>(&self.keys[keys.clone()], self.ring, at, first, next);
            self.lost.set(at, looked.lost);
            self.uncounted.set(at, looked.uncounted);
            self.seen = keys.end;
        }
    }

    /// How many keys from `from` on are there, a piece at most.
    #[inline(always)]
    pub fn there<S: Simd>(&mut self, from: usize) -> usize {
        let end = self.keys.len().min(from + PIECE);
        self.reach::<S>(end);
        (end - from).min(self.lost.of(from).trailing_zeros() as usize)
    }

    /// Writes the sums of bags whose keys are all there, a piece at most, to `out` `[bags,
    /// stride]`. Their keys are those between `offsets`, of which `start` is the first that is
    /// walked. Returns false, and leaves anything in `out`, if some row changed meanwhile.
    #[inline(always)]
    pub fn sum<S: Simd>(
        &mut self,
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
        &mut self,
        format: RowFormat,
        offsets: &[u32],
        start: usize,
        first: bool,
        out: &mut [f32],
        stride: usize,
    ) -> bool {
        let (Some(&begin), Some(&end)) = (offsets.first(), offsets.last()) else { return true };
        let (rows, slots) = (self.source.rows(), &self.ring.slots);
        let (seen, stream) = (self.seen, self.stream);
        let keys = begin as usize - start..end as usize - start;
        S::sum(PoolJob { rows, format, slots, offsets, start, seen, first, out, stride, stream })
            && self.is_unchanged(keys)
    }

    /// Whether the rows of these keys, a piece at most, are as they were when they were seen; then
    /// counts a use of each.
    #[inline(always)]
    fn is_unchanged(&mut self, keys: Range<usize>) -> bool {
        let known = keys.start >= self.from;
        if known && self.source.has_none_since(self.changes) {
            let mut uncounted = u128::from(self.uncounted.of(keys.start)) & ((1 << keys.len()) - 1);
            while uncounted != 0 {
                self.source
                    .count(self.ring, (keys.start + uncounted.trailing_zeros() as usize) % RING);
                uncounted &= uncounted - 1;
            }
            return true;
        }
        if known {
            (self.changes, self.from) = (self.source.changes(), self.seen);
        }
        self.source.is_unchanged(self.ring, keys)
    }

    /// Asks for the rows that the sum of a bag would have asked for, where none is made.
    #[inline(always)]
    pub fn pass(&self, format: RowFormat, bag: Range<usize>) {
        let rows = self.source.rows();
        for key in (bag.start + ROWS_AHEAD..bag.end + ROWS_AHEAD).take_while(|key| *key < self.seen)
        {
            rows.prefetch(self.ring.slots[key % RING], 0, format.row_bytes(), 0);
        }
    }

    /// Like `sum`, for one bag of any length, a piece after the other; the rows are added to `out`
    /// `[dim]`, or put there side by side. Returns false also if some row is not there.
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
                self.sum::<S>(
                    format,
                    &offsets[..=end - from],
                    0,
                    &mut out[(from - bag.start) * dim..],
                    dim,
                )
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
    heads: SetHeaders<'a>,
    namer: TableHasher,
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
    fn name_of(&self, key: u64) -> SetTag {
        let name = self.cache.name(self.namer, key);
        SetTag { word: if key <= self.last { name.word } else { 0 }, ..name }
    }

    /// Asks for the sets of keys.
    pub fn ask<'k>(&self, keys: impl Iterator<Item = &'k u64>) {
        keys.for_each(|key| self.heads.prefetch(self.name_of(*key).set));
    }

    /// Asks for the rows of keys.
    #[inline(always)]
    pub fn ask_rows<'k, S: Simd>(&self, keys: impl Iterator<Item = &'k u64>) {
        let seen = keys.map(|key| self.heads.see::<S>(self.name_of(*key)));
        seen.filter(|seen| seen.is_there()).for_each(|seen| self.cache.prefetch_row(seen.slot()));
    }

    /// Looks for keys in their sets, and asks for those of the named keys at places `next`: one by
    /// one, so that memory answers meanwhile.
    #[inline(always)]
    fn look<S: Simd, const WIDE: bool>(
        &self,
        ring: &mut Ring,
        at: usize,
        keys: usize,
        next: Range<usize>,
    ) {
        let (heads, next) = (self.heads, &ring.sets[next]);
        let names = ring.sets[at..][..keys].iter().zip(&ring.words[at..][..keys]);
        let states = ring.sequences[at..][..keys].iter_mut().zip(&mut ring.uses[at..][..keys]);
        let looks = ring.ways[at..][..keys].iter_mut().zip(states);
        for (n, ((&set, &word), (way, (sequence, uses)))) in names.zip(looks).enumerate() {
            next.get(n).inspect(|set| heads.prefetch(**set));
            (*way, *sequence, *uses) = heads.look::<S, WIDE>(SetTag { set, word });
        }
    }
}

impl Source for Cached<'_> {
    #[inline(always)]
    fn name(&self, keys: &[u64], ring: &mut Ring, at: usize, first: bool) {
        let (sets, words) =
            (&mut ring.sets[at..at + keys.len()], &mut ring.words[at..at + keys.len()]);
        // Of a length that is known, the compiler makes vectors.
        match <&[u64; GROUP]>::try_from(keys) {
            Ok(keys) => self.cache.name_all(self.namer, self.last, keys, sets, words),
            Err(_) => self.cache.name_all(self.namer, self.last, keys, sets, words),
        }
        if first {
            let heads = self.heads;
            sets.iter().for_each(|set| heads.prefetch(*set));
        }
    }

    #[inline(always)]
    fn see<S: Simd>(
        &self,
        keys: &[u64],
        ring: &mut Ring,
        at: usize,
        first: bool,
        next: Range<usize>,
    ) -> Looked {
        match self.heads.is_wide() {
            true => self.look::<S, true>(ring, at, keys.len(), next),
            false => self.look::<S, false>(ring, at, keys.len(), next),
        }
        let looked = ring.see(at);
        if first {
            let there = (0..keys.len()).filter(|n| looked.lost >> n & 1 == 0);
            there.for_each(|n| self.cache.prefetch_row(ring.slots[at + n]));
        }
        looked
    }

    #[inline(always)]
    fn rows(&self) -> RawRows<'_> {
        self.cache.rows()
    }

    #[inline(always)]
    fn changes(&self) -> u32 {
        self.cache.changes().ended()
    }

    #[inline(always)]
    fn has_none_since(&self, changes: u32) -> bool {
        self.cache.changes().none_since(changes)
    }

    #[inline(always)]
    fn count(&self, ring: &Ring, at: usize) {
        self.heads.count(ring.sets[at], ring.ways[at]);
    }

    #[inline(always)]
    fn is_unchanged(&self, ring: &Ring, keys: Range<usize>) -> bool {
        let seen =
            |i: usize| Seen { set: ring.sets[i], way: ring.ways[i], sequence: ring.sequences[i] };
        self.heads.are_unchanged(keys.map(|key| seen(key % RING)))
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
    fn name(&self, keys: &[u64], _ring: &mut Ring, _at: usize, _first: bool) {
        keys.iter().for_each(|key| self.prefetch(*key));
    }

    #[inline(always)]
    fn see<S: Simd>(
        &self,
        keys: &[u64],
        ring: &mut Ring,
        at: usize,
        first: bool,
        _next: Range<usize>,
    ) -> Looked {
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
        Looked { lost, uncounted: 0 }
    }

    #[inline(always)]
    fn rows(&self) -> RawRows<'_> {
        Resident::rows(self)
    }

    fn changes(&self) -> u32 {
        0
    }

    #[inline(always)]
    fn has_none_since(&self, _changes: u32) -> bool {
        true
    }

    fn count(&self, _ring: &Ring, _at: usize) {}

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
