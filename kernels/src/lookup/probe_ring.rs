//! The ring between the stages of the lookup pipeline. It holds the hashes and probes of the keys
//! that have passed a stage and are not pooled yet. It has no state of its own beyond the keys in
//! flight.

use crate::cache::address::{SetTag, TableSlots};
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
    /// Writes the slots of a group of `keys` from position `at` on. Returns one bit a key, the
    /// first key in the lowest bit: set if the table does not have the key.
    #[inline(always)]
    pub fn number_slots(&mut self, keys: &[u64], of: TableSlots, at: usize) -> u16 {
        let beyond = |n: usize, key: u64| u32::from(key >= of.rows) << n;
        let to = &mut self.slots[at..];
        match (keys.first_chunk::<GROUP_KEYS>(), to.first_chunk_mut::<GROUP_KEYS>()) {
            // The compiler vectorises a whole group only.
            (Some(keys), Some(slots)) => {
                *slots = keys.map(|key| of.slot(key));
                let bits: [u32; GROUP_KEYS] = std::array::from_fn(|n| beyond(n, keys[n]));
                bits.into_iter().fold(0, |all, bit| all | bit) as u16
            }
            _ => {
                let mut bits = 0;
                for (n, (key, slot)) in keys.iter().zip(to).enumerate() {
                    *slot = of.slot(*key);
                    bits |= beyond(n, *key);
                }
                bits as u16
            }
        }
    }

    /// Converts the masks of the group at `at` to ways and slots, with vector instructions.
    #[inline(always)]
    pub fn finish_probe(&mut self, at: usize) -> GroupProbe {
        // Copies of the inputs. Without them the compiled code would check for each group whether
        // inputs and results overlap, which takes longer than the conversion.
        fn group<T: Copy>(of: &[T; RING_KEYS], at: usize) -> Option<[T; GROUP_KEYS]> {
            of[at..].first_chunk().copied()
        }
        let (Some(sets), Some(tags), Some(sequences), Some(uses), Some(hits)) = (
            group(&self.sets, at),
            group(&self.tags, at),
            group(&self.sequences, at),
            group(&self.uses, at),
            group(&self.ways, at),
        ) else {
            return GroupProbe { missing: !0, untouched: 0 };
        };

        let (mut ways, mut slots) = ([0; GROUP_KEYS], [0; GROUP_KEYS]);
        // One bit a key: in the lower half that the row is missing, in the upper that its use must
        // be counted.
        let mut bits = [0; GROUP_KEYS];
        for n in 0..GROUP_KEYS {
            let address = SetTag { set: sets[n], tag: tags[n] };
            let probe = Probe::from_hits_in_vector(address, hits[n], sequences[n]);
            (ways[n], slots[n]) = (probe.way, probe.slot());
            let untouched = used(uses[n], probe.way as usize) != uses[n];
            bits[n] = u32::from(!probe.is_hit()) << n | u32::from(untouched) << (GROUP_KEYS + n);
        }
        self.ways[at..at + GROUP_KEYS].copy_from_slice(&ways);
        self.slots[at..at + GROUP_KEYS].copy_from_slice(&slots);
        let bits = bits.into_iter().fold(0, |all, bit| all | bit);
        GroupProbe { missing: bits as u16, untouched: (bits >> GROUP_KEYS) as u16 }
    }
}

/// The probes of a group of keys, one bit a key, the first key in the lowest bit.
#[derive(Clone, Copy)]
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
