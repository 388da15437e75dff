//! The heads of the embedding cache's sets: all that a lookup reads before the row. Words, sequence
//! and uses of a set share one cache line (wide words have their high halves in a second). Readers
//! take no lock: what they read counts if the sequence is then still what it was. Never changes
//! anything but the uses.

use crate::cache::address::SetTag;
use crate::cache::eviction::{WAYS, used};
use crate::simd::atomics::{AtomicU32, Ordering, fence};
use crate::simd::{LANES, Simd, prefetch_l2};

/// Units of 4 bytes in a cache line.
pub(crate) const LINE: usize = LANES;
/// Where a head has its sequence.
pub(crate) const SEQUENCE: usize = LINE - 2;
/// Where a head has the uses of its ways.
pub(crate) const USES: usize = LINE - 1;

/// Where a row was looked for, and the state of its set just before.
#[derive(Clone, Copy)]
pub(crate) struct Seen {
    pub set: u32,
    /// `WAYS` where it was not seen.
    pub way: u32,
    pub sequence: u32,
}

impl Seen {
    /// What comes of a set's hits.
    #[inline(always)]
    pub fn of(name: SetTag, hits: u32, sequence: u32) -> Self {
        // No row has word 0; an empty way has.
        let hits = if name.word == 0 { 0 } else { hits & ((1 << WAYS) - 1) };
        Self { set: name.set, way: (hits | 1 << WAYS).trailing_zeros(), sequence }
    }

    /// The row's slot; the first of the next set where it was not seen.
    #[inline(always)]
    pub fn slot(self) -> u32 {
        self.set.wrapping_mul(WAYS as u32).wrapping_add(self.way)
    }

    /// Whether the row was seen in a set at rest.
    #[inline(always)]
    pub fn is_there(self) -> bool {
        self.way < WAYS as u32 && self.sequence & 1 == 0
    }
}

/// The heads of all sets. A copy of it stays in registers, whatever else changes in memory.
#[derive(Clone, Copy)]
pub(crate) struct SetHeaders<'a> {
    lines: &'a [[AtomicU32; LINE]],
    /// Whether a head has two lines.
    wide: bool,
}

impl<'a> SetHeaders<'a> {
    /// Those in `words`, of two lines each if words are `wide`.
    #[inline(always)]
    pub fn new(words: &'a [AtomicU32], wide: bool) -> Self {
        Self { lines: words.as_chunks().0, wide }
    }

    /// Whether words have high halves.
    #[inline(always)]
    pub fn is_wide(self) -> bool {
        self.wide
    }

    /// The head of a set, without the high halves of its words. Its sequence is even while the set
    /// is stable and odd while its one writer changes it.
    #[inline(always)]
    pub fn of(self, set: u32) -> &'a [AtomicU32; LINE] {
        &self.lines[(set as usize) << u32::from(self.wide)]
    }

    /// The high halves of a set's words, where they are wide.
    #[inline(always)]
    pub fn high(self, set: u32) -> Option<&'a [AtomicU32; LINE]> {
        self.wide.then(|| &self.lines[2 * set as usize + 1])
    }

    /// Asks for the head of a set ahead of `see`.
    #[inline(always)]
    pub fn prefetch(self, set: u32) {
        let head = self.lines.as_ptr().wrapping_add((set as usize) << u32::from(self.wide));
        prefetch_l2(head);
        if self.wide {
            prefetch_l2(head.wrapping_add(1));
        }
    }

    /// The ways of a set with the word, the first in the lowest bit, and others beyond the last;
    /// the state of the set just before; and the uses of its ways. `WIDE` is what `is_wide` says.
    #[inline(always)]
    pub fn look<S: Simd, const WIDE: bool>(self, name: SetTag) -> (u32, u32, u32) {
        // A sequence lock, after Boehm, "Can Seqlocks Get Along With Programming Language Memory
        // Models?", MSPC 2012.
        let head = &self.lines[(name.set as usize) << u32::from(WIDE)];
        let sequence = head[SEQUENCE].load(Ordering::Acquire);
        let mut hits = S::find(head, name.word as u32);
        if WIDE {
            hits &= S::find(&self.lines[2 * name.set as usize + 1], (name.word >> 32) as u32);
        }
        (hits, sequence, head[USES].load(Ordering::Relaxed))
    }

    /// Looks for a row. What is read of it then counts only if `are_unchanged` says so.
    #[inline(always)]
    pub fn see<S: Simd>(self, name: SetTag) -> Seen {
        let (hits, sequence, _) =
            if self.wide { self.look::<S, true>(name) } else { self.look::<S, false>(name) };
        Seen::of(name, hits, sequence)
    }

    /// Whether the sets of rows that were there are still as they were, so that all that was read
    /// of the rows since is whole and theirs; counts a use of each.
    #[inline(always)]
    pub fn are_unchanged(self, rows: impl Iterator<Item = Seen>) -> bool {
        fence(Ordering::Acquire);
        let mut changed = 0;
        for seen in rows {
            let head = self.of(seen.set);
            changed |= head[SEQUENCE].load(Ordering::Relaxed) ^ seen.sequence;
            self.count(seen.set, seen.way);
        }
        changed == 0
    }

    /// Counts a use of a row.
    #[inline(always)]
    pub fn count(self, set: u32, way: u32) {
        let head = self.of(set);
        let uses = head[USES].load(Ordering::Relaxed);
        let more = used(uses, way as usize);
        if more != uses {
            // Not one atomic step: that would wait for all stores before it. What is lost to
            // another reader or to the writer costs a little accuracy of the eviction.
            head[USES].store(more, Ordering::Relaxed);
        }
    }
}
