//! The number of writes to a cache that have started and that have ended. A lookup uses the two
//! numbers to validate all rows that it read with one comparison. It samples `ended` before its
//! reads. If `started` still equals that sample after them, no write overlapped them, and the
//! sequence numbers of the sets need no check. The counter does not record which row was written.

use crate::simd::atomics::{AtomicU32, Ordering, fence};

/// The write counter of one cache: a sequence lock for any number of writers (after Boehm, see
/// `set_header.rs`). Every ended write was started before, so equal numbers count the same writes.
/// The comparison misses a write only if 2^32 writes start within one lookup.
#[derive(Default)]
// Every write changes the counter. The alignment keeps it off the cache lines that lookups read.
#[repr(align(128))]
pub(crate) struct WriteCounter {
    started: AtomicU32,
    ended: AtomicU32,
}

impl WriteCounter {
    /// Counts the start of a write. The writer calls this before its first store to a row. Its
    /// earlier stores, such as that of the set's odd sequence number, are ordered before its later
    /// ones.
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

    /// Returns whether no write overlapped the reads since `ended()` returned `since`.
    #[inline(always)]
    pub fn no_writes_since(&self, since: u32) -> bool {
        fence(Ordering::Acquire);
        self.started.load(Ordering::Relaxed) == since
    }
}
