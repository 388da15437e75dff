//! The number of writes to a cache that have started and that have ended. A lookup uses the two
//! numbers to validate all rows that it read with one comparison: if `started` still equals the
//! `ended` that the lookup sampled before its reads, no write overlapped them. The sequence numbers
//! of the sets then need no check. This counter never tells which row was written.

use crate::simd::atomics::{AtomicU32, Ordering, fence};

/// The write counter of one cache: a sequence lock for any number of writers (after Boehm, see
/// `set_header.rs`). Every ended write was started before, so equal numbers count the same writes.
/// The comparison fails to see a write only if 2^32 writes start within one lookup.
#[derive(Default)]
// Every write changes the counter. The alignment keeps it off the cache lines that lookups read.
#[repr(align(128))]
pub(crate) struct WriteCounter {
    started: AtomicU32,
    ended: AtomicU32,
}

impl WriteCounter {
    /// Counts the start of a write. The writer calls this before its first store.
    pub fn start_write(&self) {
        self.started.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
    }

    /// Counts the end of a write. The writer calls this after its last store.
    pub fn end_write(&self) {
        self.ended.fetch_add(1, Ordering::Release);
    }

    /// Returns the number of writes that have ended. A lookup samples it before its first read.
    #[inline(always)]
    pub fn ended(&self) -> u32 {
        self.ended.load(Ordering::Acquire)
    }

    /// Returns true if no write overlapped the reads since `ended()` returned `since`.
    #[inline(always)]
    pub fn no_writes_since(&self, since: u32) -> bool {
        fence(Ordering::Acquire);
        self.started.load(Ordering::Relaxed) == since
    }
}
