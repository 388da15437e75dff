//! Software-pipelined lookup (group prefetching; Chen et al., "Improving Hash Join Performance
//! through Prefetching", ICDE 2004). Groups of 16 keys pass three stages: *hash* (key to set and
//! tag), *probe* (set header to slot) and *pool* (decode the row and add it). Each of the first two
//! stages runs 64 keys ahead of the next one and prefetches what the next one reads.
//!
//! The pipeline pools a bag only if the cache holds all its rows and no write changed them during
//! the read. `query.rs` pools every other bag, row by row.

use crate::cache::codec::RowFormat;
use crate::lookup::pooling::{Combine, PoolJob, ROW_DISTANCE};
use crate::lookup::probe_ring::{GROUP_KEYS, ProbeRing, RING_KEYS, RingBits};
use crate::lookup::row_source::RowSource;
use crate::simd::Simd;
use crate::simd::prefetch::{prefetch, prefetch_l2};
use std::ops::Range;

/// Prefetch distance of the rows: number of keys by which the probe stage is ahead of pooling.
/// Up to `VALIDATE_KEYS` keys pass a stage before the next stage has its turn. With a shorter
/// distance a stage would read what it has prefetched in the same turn, some nanoseconds before.
const PROBE_DISTANCE: usize = 64;
/// Prefetch distance of the set headers: number of keys by which the hash stage is ahead of the
/// probe stage.
const HASH_DISTANCE: usize = 64;
/// Prefetch distance of the key array: number of keys by which the prefetch is ahead of the hash
/// stage.
const KEY_DISTANCE: usize = 64;
/// Keys of a bag that are pooled before their rows are validated.
pub(crate) const VALIDATE_KEYS: usize = 64;
const _: () = assert!(ROW_DISTANCE <= PROBE_DISTANCE);
const _: () = assert!(VALIDATE_KEYS <= PROBE_DISTANCE && VALIDATE_KEYS <= HASH_DISTANCE);
const _: () = assert!(VALIDATE_KEYS <= 64, "`hits_from` looks at the bits of one word");
const _: () = assert!(VALIDATE_KEYS + PROBE_DISTANCE + HASH_DISTANCE + 3 * GROUP_KEYS <= RING_KEYS);

/// The pipeline over the keys of one feature. Keys are numbered from the first.
pub(crate) struct LookupPipeline<'a, S> {
    source: &'a S,
    keys: &'a [u64],
    ring: &'a mut ProbeRing,
    /// Keys that have passed the hash stage.
    hashed: usize,
    /// Keys that have passed the first half of the probe stage.
    matched: usize,
    /// Keys that have passed the probe stage.
    probed: usize,
    missing: RingBits,
    untouched: RingBits,
    /// The write count that was sampled before the tags of the keys from `counted_from` on were
    /// matched.
    write_count: u32,
    counted_from: usize,
    /// The combination of a bag's rows.
    combine: Combine<'a>,
    /// Whether pooled bags are stored past the caches.
    stream: bool,
}

impl<'a, S: RowSource> LookupPipeline<'a, S> {
    /// Creates the pipeline of `keys`. With `stream`, pooled bags are stored past the caches, and
    /// the caller calls `simd::stream_fence` after the last.
    pub fn new(
        source: &'a S,
        keys: &'a [u64],
        ring: &'a mut ProbeRing,
        combine: Combine<'a>,
        stream: bool,
    ) -> Self {
        Self {
            source,
            keys,
            ring,
            hashed: 0,
            matched: 0,
            probed: 0,
            missing: RingBits::default(),
            untouched: RingBits::default(),
            write_count: source.write_count(),
            counted_from: 0,
            combine,
            stream,
        }
    }

    /// Probes all keys before `end`, and `PROBE_DISTANCE` keys after them.
    #[inline(always)]
    fn probe_until<V: Simd>(&mut self, end: usize) {
        let count = self.keys.len();
        while self.probed < count.min(end + PROBE_DISTANCE) {
            // A group is finished only after the next group was matched. The processor delays a
            // vector load of words that it has just stored one by one.
            while self.matched < count.min(self.probed + 2 * GROUP_KEYS) {
                self.match_group::<V>();
            }

            let (keys, at) = (self.group(self.probed), self.probed % RING_KEYS);
            let first = keys.start < ROW_DISTANCE;
            let result = self.source.finish_probe(&self.keys[keys.clone()], self.ring, at, first);
            self.missing.set(at, result.missing);
            self.untouched.set(at, result.untouched);
            self.probed = keys.end;
        }
    }

    /// Returns the numbers of the keys of the group at `from`; none after the last key.
    #[inline(always)]
    fn group(&self, from: usize) -> Range<usize> {
        let count = self.keys.len();
        from.min(count)..count.min(from + GROUP_KEYS)
    }

    /// Starts the probe of one more group, after the hash stage of the keys up to `HASH_DISTANCE`
    /// keys after it.
    #[inline(always)]
    fn match_group<V: Simd>(&mut self) {
        while self.hashed < self.keys.len().min(self.matched + HASH_DISTANCE + GROUP_KEYS) {
            let keys = self.group(self.hashed);
            // This may point past the last key. A prefetch reads nothing and cannot fault.
            let ahead = self.keys.as_ptr().wrapping_add(keys.start + KEY_DISTANCE);
            prefetch(ahead);
            prefetch(ahead.wrapping_add(GROUP_KEYS / 2));

            let (at, first) = (self.hashed % RING_KEYS, keys.start < HASH_DISTANCE);
            self.source.hash(&self.keys[keys.clone()], self.ring, at, first);
            self.hashed = keys.end;
        }

        let keys = self.group(self.matched);
        let next = self.group(self.matched + HASH_DISTANCE);
        let next = next.start % RING_KEYS..next.start % RING_KEYS + next.len();
        self.source.match_group::<V>(self.ring, self.matched % RING_KEYS, keys.len(), next);
        self.matched = keys.end;
    }

    /// Returns the number of keys from `from` up to the first miss, at most `VALIDATE_KEYS`.
    #[inline(always)]
    pub fn hits_from<V: Simd>(&mut self, from: usize) -> usize {
        let end = self.keys.len().min(from + VALIDATE_KEYS);
        self.probe_until::<V>(end);
        // Before the look at the rows: a write after the sample makes `validate` fail.
        let sampled = self.source.write_count();
        let missing = match self.source.missing_now(self.ring, from..end) {
            Some(missing) => {
                (self.write_count, self.counted_from) = (sampled, from);
                missing
            }
            None => self.missing.from(from),
        };
        (end - from).min(missing.trailing_zeros() as usize)
    }

    /// Pools bags into `out` `[bags, stride]`. Together they have at most `VALIDATE_KEYS` keys,
    /// which are all hits. The keys of a bag are those between its two `offsets`, which count from
    /// `start`. Returns false if a write changed a row during the read. `out` is then undefined.
    #[inline(always)]
    pub fn pool_bags<V: Simd>(
        &mut self,
        format: RowFormat,
        offsets: &[u32],
        start: usize,
        out: &mut [f32],
        stride: usize,
    ) -> bool {
        let bags = Bounds { offsets, start, from_zero: true };
        self.pool_within::<V>(format, bags, out, stride)
    }

    #[inline(always)]
    fn pool_within<V: Simd>(
        &mut self,
        format: RowFormat,
        bags: Bounds<'_>,
        out: &mut [f32],
        stride: usize,
    ) -> bool {
        let Bounds { offsets, start, from_zero } = bags;
        let (Some(&begin), Some(&end)) = (offsets.first(), offsets.last()) else { return true };
        let (rows, slots) = (self.source.rows(), &self.ring.slots);
        let (combine, probed, stream) = (self.combine, self.probed, self.stream);
        let keys = begin as usize - start..end as usize - start;
        let job = PoolJob {
            combine,
            rows,
            format,
            slots,
            offsets,
            start,
            probed,
            from_zero,
            out,
            stride,
            stream,
        };
        V::run_vectors(job) && self.validate(keys)
    }

    /// Returns whether the rows of `keys`, at most `VALIDATE_KEYS`, did not change since their
    /// probes. Also counts a use of each.
    #[inline(always)]
    fn validate(&mut self, keys: Range<usize>) -> bool {
        let counted = keys.start >= self.counted_from;
        if counted && self.source.no_writes_since(self.write_count) {
            let mut untouched =
                u128::from(self.untouched.from(keys.start)) & ((1 << keys.len()) - 1);
            while untouched != 0 {
                let key = keys.start + untouched.trailing_zeros() as usize;
                self.source.touch(self.ring, key % RING_KEYS);
                untouched &= untouched - 1;
            }
            return true;
        }

        // A write has overlapped the reads. Keys whose tags are matched from now on use a new
        // sample of the write count. These keys are validated by the sequence numbers of their
        // sets.
        if counted {
            (self.write_count, self.counted_from) = (self.source.write_count(), self.matched);
        }
        self.source.validate(self.ring, keys)
    }

    /// Prefetches the rows that the pooling of `bag` would prefetch. The caller uses this for a bag
    /// that it pools row by row.
    #[inline(always)]
    pub fn prefetch_bag(&self, format: RowFormat, bag: Range<usize>) {
        let rows = self.source.rows();
        let ahead = bag.start + ROW_DISTANCE..bag.end + ROW_DISTANCE;
        for key in ahead.take_while(|key| *key < self.probed) {
            let slot = self.ring.slots[key % RING_KEYS];
            rows.prefetch(slot, 0, [format.row_bytes(), 0], prefetch_l2);
        }
    }

    /// Pools one bag of any length, `VALIDATE_KEYS` keys at a time. Adds the rows to `out` `[dim]`,
    /// or writes them to `out` `[keys, dim]` if `side_by_side`. Returns false if a row is not
    /// cached or a write changed a row during the read. `out` is then undefined.
    #[inline(always)]
    pub fn pool_bag<V: Simd>(
        &mut self,
        format: RowFormat,
        bag: Range<usize>,
        side_by_side: bool,
        out: &mut [f32],
    ) -> bool {
        let dim = format.dim();
        for from in bag.clone().step_by(VALIDATE_KEYS) {
            let end = bag.end.min(from + VALIDATE_KEYS);
            if self.hits_from::<V>(from) < end - from {
                return false;
            }

            let whole = if side_by_side {
                let offsets: [u32; VALIDATE_KEYS + 1] = std::array::from_fn(|i| (from + i) as u32);
                let out = &mut out[(from - bag.start) * dim..];
                self.pool_bags::<V>(format, &offsets[..=end - from], 0, out, dim)
            } else {
                let offsets = &[from as u32, end as u32];
                let part = Bounds { offsets, start: 0, from_zero: from == bag.start };
                self.pool_within::<V>(format, part, out, dim)
            };
            if !whole {
                return false;
            }
        }
        true
    }
}

/// The bags of one pooling. Their `offsets` `[bags + 1]` count from `start`. If not `from_zero`,
/// their sums start from the values in `out`.
#[derive(Clone, Copy)]
struct Bounds<'a> {
    offsets: &'a [u32],
    start: usize,
    from_zero: bool,
}
