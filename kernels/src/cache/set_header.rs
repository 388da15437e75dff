//! The headers of a cache's sets, which a lookup reads before the row. A header is one cache line
//! with the tags, the sequence number and the use counts of the set's ways. If tags have 64 bits, a
//! second line holds their high halves. Readers take no lock: a read is valid if the set's sequence
//! number did not change. This file changes only use counts.

use crate::cache::address::SetTag;
use crate::cache::eviction::{WAYS, used};
use crate::simd::atomics::{AtomicU32, Ordering, fence};
use crate::simd::prefetch::prefetch_l2;
use crate::simd::{LINE_WORDS, Simd};

/// Position of the set's sequence number in its header, in words.
pub(crate) const SEQUENCE: usize = LINE_WORDS - 2;
/// Position of the use counts of the set's ways in its header, in words.
pub(crate) const USES: usize = LINE_WORDS - 1;

/// The result of a probe: the location of the row, and the sequence number before the probe.
#[derive(Clone, Copy)]
pub(crate) struct Probe {
    pub set: u32,
    /// `WAYS` if no way has the tag.
    pub way: u32,
    pub sequence: u32,
}

impl Probe {
    /// Creates the probe from the mask `hits` of the ways whose tags matched.
    #[inline(always)]
    pub fn from_hits(address: SetTag, hits: u32, sequence: u32) -> Self {
        Self { set: address.set, way: found_ways(address, hits).trailing_zeros(), sequence }
    }

    /// Creates the probe that [`Probe::from_hits`] creates, in steps that the compiler vectorises.
    /// The exponent of a power of two is the number of its trailing zeros.
    #[inline(always)]
    pub fn from_hits_in_vector(address: SetTag, hits: u32, sequence: u32) -> Self {
        let ways = found_ways(address, hits) as i32;
        let lowest = (ways & -ways) as f32;
        let way = (lowest.to_bits() >> (f32::MANTISSA_DIGITS - 1)) - (f32::MAX_EXP as u32 - 1);
        Self { set: address.set, way, sequence }
    }

    /// Returns the row's slot. If no way has the tag, this is the first slot of the next set.
    #[inline(always)]
    pub fn slot(self) -> u32 {
        self.set.wrapping_mul(WAYS as u32).wrapping_add(self.way)
    }

    /// Returns whether the row was found in a set that no writer was changing.
    #[inline(always)]
    pub fn is_hit(self) -> bool {
        self.way < WAYS as u32 && self.sequence & 1 == 0
    }
}

/// Returns the ways of the mask `hits` that hold the row, and the bit of `WAYS`.
#[inline(always)]
fn found_ways(address: SetTag, hits: u32) -> u32 {
    // Tag 0 marks an empty way; no row has it.
    let hits = if address.tag == 0 { 0 } else { hits & ((1 << WAYS) - 1) };
    hits | 1 << WAYS
}

/// The result of comparing the tags of one set with a tag, and the rest of the header.
pub(crate) struct TagMatch {
    /// One bit for each way whose tag is equal, the first way in the lowest bit. Bits from `WAYS`
    /// up have no meaning.
    pub hits: u32,
    /// The set's sequence number, read before the tags.
    pub sequence: u32,
    /// The use counts of the set's ways.
    pub uses: u32,
}

/// The headers of all sets. A copy of this struct can stay in registers while the caller stores to
/// memory.
#[derive(Clone, Copy)]
pub(crate) struct SetHeaders<'a> {
    lines: &'a [[AtomicU32; LINE_WORDS]],
    /// Whether a header has two lines.
    wide: bool,
}

impl<'a> SetHeaders<'a> {
    /// Views `words` as headers, of two lines each if tags are `wide`.
    #[inline(always)]
    pub fn new(words: &'a [AtomicU32], wide: bool) -> Self {
        Self { lines: words.as_chunks().0, wide }
    }

    /// Returns whether tags have 64 bits.
    #[inline(always)]
    pub fn is_wide(self) -> bool {
        self.wide
    }

    /// Returns the first line of a set's header, which lacks the high halves of wide tags. Its
    /// sequence number is odd while the set's one writer changes the set.
    #[inline(always)]
    pub fn of(self, set: u32) -> &'a [AtomicU32; LINE_WORDS] {
        &self.lines[(set as usize) << u32::from(self.wide)]
    }

    /// Returns the high halves of a set's tags if tags are wide.
    #[inline(always)]
    pub fn high(self, set: u32) -> Option<&'a [AtomicU32; LINE_WORDS]> {
        self.wide.then(|| &self.lines[2 * set as usize + 1])
    }

    /// Prefetches the header of a set for `probe`.
    #[inline(always)]
    pub fn prefetch(self, set: u32) {
        let header = self.lines.as_ptr().wrapping_add((set as usize) << u32::from(self.wide));
        prefetch_l2(header);
        if self.wide {
            prefetch_l2(header.wrapping_add(1));
        }
    }

    /// Compares the tags of a set with the tag of `address`. `WIDE` must equal `is_wide()`.
    #[inline(always)]
    pub fn match_tags<S: Simd, const WIDE: bool>(self, address: SetTag) -> TagMatch {
        // A sequence lock, after Boehm, "Can Seqlocks Get Along With Programming Language Memory
        // Models?", MSPC 2012.
        let header = &self.lines[(address.set as usize) << u32::from(WIDE)];
        let sequence = header[SEQUENCE].load(Ordering::Acquire);
        let mut hits = S::find(header, address.tag as u32);
        if WIDE {
            let high = &self.lines[2 * address.set as usize + 1];
            hits &= S::find(high, (address.tag >> 32) as u32);
        }
        TagMatch { hits, sequence, uses: header[USES].load(Ordering::Relaxed) }
    }

    /// Looks for a row in its set. The bytes of the row that the caller then reads are valid only
    /// if `validate` returns true.
    #[inline(always)]
    pub fn probe<S: Simd>(self, address: SetTag) -> Probe {
        let found = if self.wide {
            self.match_tags::<S, true>(address)
        } else {
            self.match_tags::<S, false>(address)
        };
        Probe::from_hits(address, found.hits, found.sequence)
    }

    /// Returns whether the sets of all `rows`, which must be hits, are unchanged since they were
    /// probed. Every row that the caller read since then was complete and belongs to its key.
    /// Counts a use of each row.
    #[inline(always)]
    pub fn validate(self, rows: impl Iterator<Item = Probe>) -> bool {
        fence(Ordering::Acquire);
        let mut changed = 0;
        for row in rows {
            let header = self.of(row.set);
            changed |= header[SEQUENCE].load(Ordering::Relaxed) ^ row.sequence;
            self.touch(row.set, row.way);
        }
        changed == 0
    }

    /// Counts a use of a row.
    #[inline(always)]
    pub fn touch(self, set: u32, way: u32) {
        let header = self.of(set);
        let uses = header[USES].load(Ordering::Relaxed);
        let more = used(uses, way as usize);
        if more != uses {
            // Load and store are not one atomic step, which would wait for all earlier stores. A
            // count that is lost to another reader or to the writer makes eviction a little less
            // accurate.
            header[USES].store(more, Ordering::Relaxed);
        }
    }
}
