//! A view of encoded rows in memory that may change while it is read. The view hands out raw
//! pointers and checks that each row is inside the memory. It never reads a row.

// A row is handed out as a raw pointer; `RawRows::row` checks each slot.
#![allow(unsafe_code)]

use crate::simd::OVERREAD_BYTES;
use crate::simd::atomics::AtomicU32;
use std::marker::PhantomData;

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// Encoded rows in memory, `stride` bytes apart, with `OVERREAD_BYTES` readable bytes after the
/// last.
#[derive(Clone, Copy)]
pub(crate) struct RawRows<'a> {
    start: *const u8,
    len: usize,
    stride: usize,
    of: PhantomData<&'a [AtomicU32]>,
}

impl<'a> RawRows<'a> {
    /// Views rows that a writer may change during a read, `stride` words apart.
    pub fn racing(words: &'a [AtomicU32], stride: usize) -> Self {
        Self {
            start: words.as_ptr().cast(),
            len: 4 * words.len(),
            stride: 4 * stride,
            of: PhantomData,
        }
    }

    /// Returns the address of the row in `slot`, of which the caller reads at most `bytes +
    /// OVERREAD_BYTES` bytes.
    #[inline(always)]
    pub fn row(&self, slot: u32, bytes: usize) -> *const u8 {
        let start = slot as usize * self.stride;
        assert!(start + bytes + OVERREAD_BYTES <= self.len);
        // SAFETY: `start` is inside the rows, which are borrowed for as long as `self`.
        unsafe { self.start.add(start) }
    }

    /// Prefetches `values` bytes of the row in `slot` from byte `from` on, and the `trailer` bytes
    /// after them, which are less than a cache line. Calls `hint` for each line.
    #[inline(always)]
    pub fn prefetch(
        &self,
        slot: u32,
        from: usize,
        [values, trailer]: [usize; 2],
        hint: impl Fn(*const u8),
    ) {
        let at = self.start.wrapping_add(slot as usize * self.stride + from);
        (0..values).step_by(LINE_BYTES).for_each(|byte| hint(at.wrapping_add(byte)));
        // A row need not start on a cache line, so its end may be on one line more.
        if !self.stride.is_multiple_of(LINE_BYTES) {
            hint(at.wrapping_add(values + trailer - 1));
        }
    }
}
