//! Whether anything in a cache changes while some rows are read: how many changes have begun, and
//! how many have ended. Who finds that no more have begun than had ended before it looked has read
//! of no change, and need not look at every row's set again. Never says which row changed.

use crate::simd::atomics::{AtomicU32, Ordering, fence};

/// The changes of a cache. A sequence lock for any number of writers (after Boehm, as in
/// `heads.rs`): changes that have ended had begun, so that equal numbers are the same changes.
/// Wrong only after 2^32 changes within one walk of keys.
#[derive(Default)]
// Every change writes it: it lies apart from what is read all the time.
#[repr(align(128))]
pub(crate) struct WriteCounter {
    begun: AtomicU32,
    ended: AtomicU32,
}

impl WriteCounter {
    /// Before the first store of a change.
    pub fn begin(&self) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
    }

    /// After the last store of a change.
    pub fn end(&self) {
        self.ended.fetch_add(1, Ordering::Release);
    }

    /// To be read before anything that `none_since` is asked about.
    #[inline(always)]
    pub fn ended(&self) -> u32 {
        self.ended.load(Ordering::Acquire)
    }

    /// Whether all that was read since `ended` was read is of no change.
    #[inline(always)]
    pub fn none_since(&self, ended: u32) -> bool {
        fence(Ordering::Acquire);
        self.begun.load(Ordering::Relaxed) == ended
    }
}
