//! The rows of a whole cache as a source for the lookup pipeline. The number of a row gives its
//! slot, so there is nothing to hash or to compare. The pipeline samples the write counter, checks
//! the bits of a run of keys, reads the rows, and compares the counter. This file never pools.

use crate::cache::Cache;
use crate::cache::address::TableSlots;
use crate::cache::raw_rows::RawRows;
use crate::lookup::probe_ring::{GroupProbe, ProbeRing, RING_KEYS};
use crate::lookup::row_source::{CachedRows, ReadResult, RowSource};
use crate::simd::Simd;
use crate::simd::atomics::Ordering;
use crate::simd::prefetch::prefetch;
use std::ops::Range;

/// The rows of one table in a whole cache. A lookup reads a row's bit and the row, and no header.
pub(crate) struct WholeRows<'a> {
    cached: CachedRows<'a>,
    slots: TableSlots,
}

impl<'a> WholeRows<'a> {
    /// Creates the view of `table`, whose keys are below `keys_end`. Returns `None` if `cache` is
    /// not whole.
    pub fn new(cache: &'a Cache, table: u16, keys_end: Option<u64>) -> Option<Self> {
        let mut slots = cache.addresses().slots_of(table)?;
        slots.rows = keys_end.map_or(slots.rows, |end| slots.rows.min(end));
        Some(Self { cached: CachedRows::new(cache, table, keys_end), slots })
    }

    /// Returns a function that returns 1 if the row in a slot is missing or there is no such slot,
    /// else 0.
    #[inline(always)]
    fn missing(&self) -> impl Fn(u32) -> u32 {
        let present = self.cached.cache.present();
        move |slot| {
            let word = present.get(slot as usize / 32);
            let word = word.map_or(0, |word| word.load(Ordering::Relaxed));
            !word >> (slot % 32) & 1
        }
    }

    /// Prefetches the bits of `keys`.
    #[inline(always)]
    pub fn prefetch_bits(&self, keys: &[u64]) {
        let present = self.cached.cache.present().as_ptr();
        let words =
            keys.iter().map(|key| present.wrapping_add(self.slots.slot(*key) as usize / 32));
        words.for_each(prefetch);
    }

    /// Prefetches the rows of `keys`.
    #[inline(always)]
    pub fn prefetch_rows(&self, keys: &[u64]) {
        let slots = keys
            .iter()
            .map(|key| self.slots.slot(*key))
            .filter(|slot| *slot != TableSlots::NO_SLOT);
        slots.for_each(|slot| self.cached.cache.prefetch_row(slot));
    }
}

impl RowSource for WholeRows<'_> {
    #[inline(always)]
    fn hash(&self, _keys: &[u64], _ring: &mut ProbeRing, _at: usize, _first: bool) {}

    #[inline(always)]
    fn finish_probe(
        &self,
        keys: &[u64],
        ring: &mut ProbeRing,
        at: usize,
        first: bool,
    ) -> GroupProbe {
        ring.number_slots(keys, self.slots, at);
        if first {
            self.prefetch_rows(keys);
        }
        // The bits are read later, by `missing_now`: they must be read after the sample of the
        // write counter.
        GroupProbe { missing: 0, untouched: 0 }
    }

    #[inline(always)]
    fn missing_now(&self, ring: &ProbeRing, keys: Range<usize>) -> Option<u64> {
        let (at, end) = (keys.start % RING_KEYS, keys.start % RING_KEYS + keys.len());
        let slots = &ring.slots[at..end.min(RING_KEYS)];
        let wrapped = &ring.slots[..end.saturating_sub(RING_KEYS)];
        // Mostly no row is missing. Then no bit needs its place.
        let is_missing = self.missing();
        let any = |slots: &[u32]| slots.iter().fold(0, |any, slot| any | is_missing(*slot));
        if any(slots) | any(wrapped) == 0 {
            return Some(0);
        }
        let slots = slots.iter().chain(wrapped).enumerate();
        Some(slots.fold(0, |all, (n, slot)| all | u64::from(is_missing(*slot)) << n))
    }

    #[inline(always)]
    fn rows(&self) -> RawRows<'_> {
        self.cached.rows()
    }

    #[inline(always)]
    fn read_row<'b, S: Simd>(&'b self, key: u64, buffer: &'b mut [u8]) -> ReadResult<'b> {
        let (since, slot) = (self.write_count(), self.slots.slot(key));
        if self.missing()(slot) == 0 {
            S::copy_racing(self.cached.cache.row(slot), buffer);
            if self.no_writes_since(since) {
                return ReadResult::Row(buffer);
            }
        }
        // Some row of the cache was written meanwhile. The set's own sequence number shows whether
        // it was this one.
        self.cached.read_row::<S>(key, buffer)
    }

    #[inline(always)]
    fn write_count(&self) -> u32 {
        self.cached.write_count()
    }

    #[inline(always)]
    fn no_writes_since(&self, since: u32) -> bool {
        self.cached.no_writes_since(since)
    }

    /// Returns false: a lookup of a whole cache reads no sequence number. The pipeline then reads
    /// the rows again.
    #[inline(always)]
    fn validate(&self, _ring: &ProbeRing, _keys: Range<usize>) -> bool {
        false
    }
}
