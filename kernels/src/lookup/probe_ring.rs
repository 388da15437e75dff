//! The ring between the stages of the lookup pipeline. It holds the hashes and probes of the keys
//! that have passed a stage and are not pooled yet. It has no state of its own beyond the keys in
//! flight.

use crate::cache::address::SetTag;
use crate::cache::eviction::used;
use crate::cache::set_header::Probe;

/// Maximum number of keys in the ring; a power of two.
pub(crate) const RING_KEYS: usize = 256;
/// Number of keys that pass a stage together.
pub(crate) const GROUP_KEYS: usize = 16;

/// The hashes and probes of the keys that are in the pipeline, each at its key's number modulo
/// `RING_KEYS`.
pub(crate) struct ProbeRing {
    pub sets: [u32; RING_KEYS],
    pub tags: [u64; RING_KEYS],
    /// The mask of matching ways, until `finish_probe` replaces it with the way.
    pub ways: [u32; RING_KEYS],
    pub sequences: [u32; RING_KEYS],
    pub uses: [u32; RING_KEYS],
    pub slots: [u32; RING_KEYS],
}

impl Default for ProbeRing {
    fn default() -> Self {
        let none = [0; RING_KEYS];
        Self {
            sets: none,
            tags: [0; RING_KEYS],
            ways: none,
            sequences: none,
            uses: none,
            slots: none,
        }
    }
}

impl ProbeRing {
    /// Converts the masks of the group at `at` to ways and slots, with vector instructions.
    #[inline(always)]
    pub fn finish_probe(&mut self, at: usize) -> GroupProbe {
        fn group<T>(of: &mut [T; RING_KEYS], at: usize) -> Option<&mut [T; GROUP_KEYS]> {
            of[at..].first_chunk_mut()
        }
        let sets = group(&mut self.sets, at);
        let (tags, sequences) = (group(&mut self.tags, at), group(&mut self.sequences, at));
        let (ways, slots) = (group(&mut self.ways, at), group(&mut self.slots, at));
        let (Some(sets), Some(tags), Some(sequences), Some(uses), Some(ways), Some(slots)) =
            (sets, tags, sequences, group(&mut self.uses, at), ways, slots)
        else {
            return GroupProbe { missing: !0, untouched: 0 };
        };

        let mut result = GroupProbe::default();
        for n in 0..GROUP_KEYS {
            let address = SetTag { set: sets[n], tag: tags[n] };
            let probe = Probe::from_hits(address, ways[n], sequences[n]);
            (ways[n], slots[n]) = (probe.way, probe.slot());
            result.missing |= u16::from(!probe.is_hit()) << n;
            result.untouched |= u16::from(used(uses[n], probe.way as usize) != uses[n]) << n;
        }
        result
    }
}

/// The probes of a group of keys, one bit a key, the first key in the lowest bit.
#[derive(Clone, Copy, Default)]
pub(crate) struct GroupProbe {
    /// Set if the row is not cached.
    pub missing: u16,
    /// Set if a use of the row must be counted. Clear if the row's use count is full.
    pub untouched: u16,
}

/// One bit of a `GroupProbe` for each key of the ring.
#[derive(Clone, Copy, Default)]
pub(crate) struct RingBits([u64; RING_KEYS / 64]);

impl RingBits {
    /// Sets the 16 bits of the group at `at`.
    #[inline(always)]
    pub fn set(&mut self, at: usize, group: u16) {
        let (word, bit) = (&mut self.0[at / 64], at % 64);
        *word = *word & !(0xffff << bit) | u64::from(group) << bit;
    }

    /// Returns the bits of key `from` and of the 63 keys after it.
    #[inline(always)]
    pub fn from(&self, from: usize) -> u64 {
        let word = |i: usize| u128::from(self.0[i % self.0.len()]);
        ((word(from / 64) | word(from / 64 + 1) << 64) >> (from % 64)) as u64
    }
}
