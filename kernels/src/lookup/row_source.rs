//! The sources of rows for the lookup pipeline: the embedding cache, and a resident table. A whole
//! cache has a source of its own (`whole_rows.rs`). Each implements the stages of the pipeline. No
//! row of a resident table changes during a lookup, so its rows need no validation. This file never
//! pools.

use crate::cache::address::{SetTag, TableHasher, TableSlots};
use crate::cache::raw_rows::RawRows;
use crate::cache::resident::Resident;
use crate::cache::set_header::{Probe, SetHeaders};
use crate::cache::{Cache, Epoch};
use crate::lookup::probe_ring::{GROUP_KEYS, GroupProbe, ProbeRing, RING_KEYS};
use crate::simd::Simd;
use std::ops::Range;

/// The result of reading the row of one key.
pub(crate) enum ReadResult<'a> {
    /// The slice starts with the encoded row.
    Row(&'a [u8]),
    /// The table does not have the key.
    Absent,
    /// The cache does not hold the row; with the epoch of its set.
    Miss(Epoch),
}

/// The rows of a feature. The default methods are for rows that do not change during a lookup.
pub(crate) trait RowSource {
    /// Hashes a group of keys, at most `GROUP_KEYS`, into the ring from position `at` on. For the
    /// `first` keys of a pipeline also prefetches the memory that `match_group` reads.
    fn hash(&self, keys: &[u64], ring: &mut ProbeRing, at: usize, first: bool);

    /// Starts the probe of a group of `keys` keys that were hashed to position `at`. Prefetches the
    /// memory that it will read for the hashed keys at the positions `next`.
    #[inline(always)]
    fn match_group<S: Simd>(
        &self,
        _ring: &mut ProbeRing,
        _at: usize,
        _keys: usize,
        _next: Range<usize>,
    ) {
    }

    /// Finds the slots of a group of keys that `match_group` has seen at position `at`. For the
    /// `first` keys of a pipeline also prefetches their rows.
    fn finish_probe(
        &self,
        keys: &[u64],
        ring: &mut ProbeRing,
        at: usize,
        first: bool,
    ) -> GroupProbe;

    /// Returns the rows, in the order of their slots.
    fn rows(&self) -> RawRows<'_>;

    /// Reads the row of one key without the pipeline, perhaps into `buffer`.
    fn read_row<'b, S: Simd>(&'b self, key: u64, buffer: &'b mut [u8]) -> ReadResult<'b>;

    /// Returns one bit for each of the probed `keys`, at most 64, the first key in the lowest bit.
    /// The bit is set if the row is missing now. Returns `None` if `finish_probe` found the missing
    /// rows.
    #[inline(always)]
    fn missing_now(&self, _ring: &ProbeRing, _keys: Range<usize>) -> Option<u64> {
        None
    }

    /// Returns the number of writes that have ended. The pipeline samples it before it probes.
    #[inline(always)]
    fn write_count(&self) -> u32 {
        0
    }

    /// Returns whether no write overlapped the reads since `write_count()` returned `since`. If so,
    /// every row read was complete and belongs to its key.
    #[inline(always)]
    fn no_writes_since(&self, _since: u32) -> bool {
        true
    }

    /// Counts a use of the row at position `at` of the ring.
    #[inline(always)]
    fn touch(&self, _ring: &ProbeRing, _at: usize) {}

    /// Returns whether no write changed the sets of `keys` since their probes. Also counts a use of
    /// each row.
    #[inline(always)]
    fn validate(&self, _ring: &ProbeRing, _keys: Range<usize>) -> bool {
        true
    }
}

/// The rows of one table in the embedding cache.
pub(crate) struct CachedRows<'a> {
    pub(super) cache: &'a Cache,
    headers: SetHeaders<'a>,
    hasher: TableHasher,
    /// The largest key that the table has.
    last: u64,
}

impl<'a> CachedRows<'a> {
    /// Creates the view of `table`, whose keys are below `keys_end` if it is indexed.
    pub fn new(cache: &'a Cache, table: u16, keys_end: Option<u64>) -> Self {
        // A table without keys has no rows in the cache, so `last` may be 0.
        let last = keys_end.map_or(u64::MAX, |end| end.saturating_sub(1));
        let hasher = cache.addresses().table_hasher(table);
        Self { cache, headers: cache.headers(), hasher, last }
    }

    #[inline(always)]
    fn address_of(&self, key: u64) -> SetTag {
        let address = self.cache.addresses().hash(self.hasher, key);
        SetTag { tag: if key <= self.last { address.tag } else { 0 }, ..address }
    }

    /// Returns the sets and tags of a whole group of keys.
    #[inline(always)]
    fn hash_group(&self, keys: &[u64; GROUP_KEYS]) -> ([u32; GROUP_KEYS], [u64; GROUP_KEYS]) {
        self.cache.addresses().hash_all(self.hasher, self.last, keys)
    }

    /// Calls `each` with the address of every key.
    #[inline(always)]
    fn for_each_address(&self, keys: &[u64], each: impl Fn(SetTag)) {
        let (groups, rest) = keys.as_chunks();
        for keys in groups {
            let (sets, tags) = self.hash_group(keys);
            sets.into_iter().zip(tags).for_each(|(set, tag)| each(SetTag { set, tag }));
        }
        rest.iter().for_each(|key| each(self.address_of(*key)));
    }

    /// Prefetches the set headers of `keys`.
    #[inline(always)]
    pub fn prefetch_sets(&self, keys: &[u64]) {
        self.for_each_address(keys, |address| self.headers.prefetch(address.set));
    }

    /// Prefetches the rows of those `keys` that are cached.
    #[inline(always)]
    pub fn prefetch_rows<S: Simd>(&self, keys: &[u64]) {
        self.for_each_address(keys, |address| {
            let probe = self.headers.probe::<S>(address);
            if probe.is_hit() {
                self.cache.prefetch_row(probe.slot());
            }
        });
    }

    /// Matches the tags of a group, and prefetches the set headers of the hashed keys at the
    /// positions `next`. Matches and prefetches alternate, so that loads from memory overlap the
    /// matches.
    #[inline(always)]
    fn match_tags<S: Simd, const WIDE: bool>(
        &self,
        ring: &mut ProbeRing,
        at: usize,
        keys: usize,
        next: Range<usize>,
    ) {
        let (headers, next) = (self.headers, &ring.sets[next]);
        let addresses = ring.sets[at..][..keys].iter().zip(&ring.tags[at..][..keys]);
        let states = ring.sequences[at..][..keys].iter_mut().zip(&mut ring.uses[at..][..keys]);
        let results = ring.ways[at..][..keys].iter_mut().zip(states);
        for (n, ((&set, &tag), (way, (sequence, uses)))) in addresses.zip(results).enumerate() {
            next.get(n).inspect(|set| headers.prefetch(**set));
            let found = headers.match_tags::<S, WIDE>(SetTag { set, tag });
            (*way, *sequence, *uses) = (found.hits, found.sequence, found.uses);
        }
    }
}

impl RowSource for CachedRows<'_> {
    #[inline(always)]
    fn hash(&self, keys: &[u64], ring: &mut ProbeRing, at: usize, first: bool) {
        let range = at..at + keys.len();
        // The compiler vectorises the hashes of a whole group only.
        match keys.first_chunk() {
            Some(keys) => {
                let (sets, tags) = self.hash_group(keys);
                ring.sets[range.clone()].copy_from_slice(&sets);
                ring.tags[range.clone()].copy_from_slice(&tags);
            }
            None => {
                let to = ring.sets[range.clone()].iter_mut().zip(&mut ring.tags[range.clone()]);
                for (key, (set, tag)) in keys.iter().zip(to) {
                    let address = self.address_of(*key);
                    (*set, *tag) = (address.set, address.tag);
                }
            }
        }

        if first {
            let headers = self.headers;
            ring.sets[range].iter().for_each(|set| headers.prefetch(*set));
        }
    }

    #[inline(always)]
    fn match_group<S: Simd>(
        &self,
        ring: &mut ProbeRing,
        at: usize,
        keys: usize,
        next: Range<usize>,
    ) {
        match self.headers.is_wide() {
            true => self.match_tags::<S, true>(ring, at, keys, next),
            false => self.match_tags::<S, false>(ring, at, keys, next),
        }
    }

    #[inline(always)]
    fn finish_probe(
        &self,
        keys: &[u64],
        ring: &mut ProbeRing,
        at: usize,
        first: bool,
    ) -> GroupProbe {
        let result = ring.finish_probe(at);

        if first {
            let hits = (0..keys.len()).filter(|n| result.missing >> n & 1 == 0);
            hits.for_each(|n| self.cache.prefetch_row(ring.slots[at + n]));
        }
        result
    }

    #[inline(always)]
    fn rows(&self) -> RawRows<'_> {
        self.cache.rows()
    }

    #[inline(always)]
    fn read_row<'b, S: Simd>(&'b self, key: u64, buffer: &'b mut [u8]) -> ReadResult<'b> {
        let address = self.address_of(key);
        if self.cache.read::<S>(address, buffer) {
            ReadResult::Row(buffer)
        } else if address.tag == 0 {
            ReadResult::Absent
        } else {
            // The epoch is taken before the row is read from flash. A change after that refuses the
            // insert.
            ReadResult::Miss(self.cache.epoch_at(address))
        }
    }

    #[inline(always)]
    fn write_count(&self) -> u32 {
        self.cache.writes().ended()
    }

    #[inline(always)]
    fn no_writes_since(&self, since: u32) -> bool {
        self.cache.writes().no_writes_since(since)
    }

    #[inline(always)]
    fn touch(&self, ring: &ProbeRing, at: usize) {
        self.headers.touch(ring.sets[at], ring.ways[at]);
    }

    #[inline(always)]
    fn validate(&self, ring: &ProbeRing, keys: Range<usize>) -> bool {
        let probe =
            |i: usize| Probe { set: ring.sets[i], way: ring.ways[i], sequence: ring.sequences[i] };
        self.headers.validate(keys.map(|key| probe(key % RING_KEYS)))
    }
}

impl RowSource for &Resident {
    #[inline(always)]
    fn hash(&self, keys: &[u64], _ring: &mut ProbeRing, _at: usize, _first: bool) {
        keys.iter().for_each(|key| self.prefetch(*key));
    }

    #[inline(always)]
    fn finish_probe(
        &self,
        keys: &[u64],
        ring: &mut ProbeRing,
        at: usize,
        first: bool,
    ) -> GroupProbe {
        if !self.is_hashed() {
            let slots = TableSlots { first: 0, rows: self.rows_len() as u64 };
            let missing = ring.number_slots(keys, slots, at);
            if first {
                let those = (0..keys.len()).filter(|n| missing >> n & 1 == 0);
                those.for_each(|n| self.prefetch_row(ring.slots[at + n]));
            }
            return GroupProbe { missing, untouched: 0 };
        }

        let mut missing = 0;
        for (n, (key, to)) in keys.iter().zip(&mut ring.slots[at..at + keys.len()]).enumerate() {
            match self.slot(*key) {
                Some(slot) => {
                    if first {
                        self.prefetch_row(slot);
                    }
                    *to = slot;
                }
                // The slot of an earlier key stays. Pooling stops before this key, and a prefetch
                // of any slot is harmless.
                None => missing |= 1 << n,
            }
        }
        GroupProbe { missing, untouched: 0 }
    }

    #[inline(always)]
    fn rows(&self) -> RawRows<'_> {
        Resident::rows(self)
    }

    #[inline(always)]
    fn read_row<'b, S: Simd>(&'b self, key: u64, buffer: &'b mut [u8]) -> ReadResult<'b> {
        if self.read::<S>(key, buffer) { ReadResult::Row(buffer) } else { ReadResult::Absent }
    }
}
