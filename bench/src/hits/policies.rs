//! The compared caches, all with the same number of slots: the product's own, and the common
//! policies. They store row numbers, or four bytes per row. Every miss inserts the row. Never
//! measures.

use super::traces::Trace;
use anyhow::{Context, Result};
use hatchback::{RowKey, mix};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::KeySpaces;

/// A cache of rows, with their numbers as keys.
pub trait Policy {
    /// Looks row `row` up, and inserts it if it is not cached. Returns whether it was cached.
    fn look_up(&mut self, row: u32) -> bool;
}

/// A cache of another crate: its name, and the function that makes one of as many slots.
pub type PeerCache = (&'static str, fn(usize) -> Box<dyn Policy>);

/// Names of the policies, in the order of [`all`].
pub const NAMES: [&str; 5] = ["Hatchback", "LRU", "64-way LRU", "CLOCK", "FIFO"];
/// The crate that `bench/stores` links.
pub const CRATE: &str = "quick_cache";

/// Returns every policy with `slots` slots for the rows of `trace`, and the caches of `peers`.
///
/// # Errors
/// The product's cache cannot have exactly `slots` slots.
pub fn all(
    trace: &Trace,
    slots: usize,
    peers: &[PeerCache],
) -> Result<Vec<(&'static str, Box<dyn Policy>)>> {
    let rows = trace.rows();
    let policies: [Box<dyn Policy>; 5] = [
        Box::new(HatchbackCache::new(trace, slots)?),
        Box::new(Lru::new(rows, slots)),
        Box::new(SetLru::new(slots)),
        Box::new(SlotRing::new(rows, slots, Reuse::SecondChance)),
        Box::new(SlotRing::new(rows, slots, Reuse::Fifo)),
    ];
    let caches = peers.iter().map(|(name, make)| (*name, make(slots)));
    Ok(NAMES.into_iter().zip(policies).chain(caches).collect())
}

/// The embedding cache of the product.
struct HatchbackCache {
    cache: Cache,
    rows: Vec<RowKey>,
}

/// Bytes of a row in [`HatchbackCache`].
const ROW_BYTES: usize = 4;

impl HatchbackCache {
    fn new(trace: &Trace, slots: usize) -> Result<Self> {
        let key_spaces =
            KeySpaces::new(trace.tables.iter().map(|&rows| Some(rows as u64)).collect());
        let cache = cache_of(slots, ROW_BYTES, &key_spaces)
            .with_context(|| format!("no cache of {slots} slots"))?;
        Ok(Self { cache, rows: trace.row_keys() })
    }
}

/// Returns the product's cache with exactly `slots` slots for rows of `row_bytes`.
fn cache_of(slots: usize, row_bytes: usize, key_spaces: &KeySpaces) -> Option<Cache> {
    let least = Cache::bytes_min(row_bytes, key_spaces);
    let of = |sets: usize| Cache::new(row_bytes, sets * least, key_spaces);
    let (one, two) = (of(1)?, of(2)?);
    let (sets, set_bytes) = (slots / one.slots(), two.bytes() - one.bytes());
    Cache::new(row_bytes, least + (sets.checked_sub(1)?) * set_bytes, key_spaces)
        .filter(|c| c.slots() == slots)
}

impl Policy for HatchbackCache {
    fn look_up(&mut self, row: u32) -> bool {
        let (key, mut bytes) = (self.rows[row as usize], [0; ROW_BYTES]);
        let hit = self.cache.query(key, &mut bytes);
        if !hit {
            self.cache.insert(key, &row.to_le_bytes(), self.cache.epoch(key));
        } else {
            assert_eq!(bytes, row.to_le_bytes(), "the cache returned another row");
        }
        hit
    }
}

/// Stands for no row or no slot.
const NONE: u32 = u32::MAX;

/// Least recently used, over the whole cache.
struct Lru {
    /// The neighbours of each row in the order of use; `NONE` at both ends, and for rows that are
    /// not cached.
    newer: Vec<u32>,
    older: Vec<u32>,
    newest: u32,
    oldest: u32,
    cached: Vec<bool>,
    free: usize,
}

impl Lru {
    fn new(rows: usize, slots: usize) -> Self {
        let (newer, older, cached) = (vec![NONE; rows], vec![NONE; rows], vec![false; rows]);
        Self { newer, older, newest: NONE, oldest: NONE, cached, free: slots }
    }

    fn unlink(&mut self, row: u32) {
        let (newer, older) = (self.newer[row as usize], self.older[row as usize]);
        *if newer == NONE { &mut self.newest } else { &mut self.older[newer as usize] } = older;
        *if older == NONE { &mut self.oldest } else { &mut self.newer[older as usize] } = newer;
    }

    fn push_newest(&mut self, row: u32) {
        (self.newer[row as usize], self.older[row as usize]) = (NONE, self.newest);
        *if self.newest == NONE {
            &mut self.oldest
        } else {
            &mut self.newer[self.newest as usize]
        } = row;
        self.newest = row;
    }
}

impl Policy for Lru {
    fn look_up(&mut self, row: u32) -> bool {
        let hit = std::mem::replace(&mut self.cached[row as usize], true);
        if hit {
            self.unlink(row);
        } else if self.free > 0 {
            self.free -= 1;
        } else {
            let oldest = self.oldest;
            self.unlink(oldest);
            self.cached[oldest as usize] = false;
        }
        self.push_newest(row);
        hit
    }
}

/// Least recently used in sets of 64 ways, the policy of GPU embedding caches. Sets have a few more
/// ways if 64 does not divide the number of slots.
struct SetLru {
    ways: usize,
    /// Rows of each set, newest first.
    sets: Vec<Vec<u32>>,
}

impl SetLru {
    fn new(slots: usize) -> Self {
        let sets = (slots / 64).max(1);
        Self { ways: slots.div_ceil(sets), sets: vec![Vec::new(); sets] }
    }
}

impl Policy for SetLru {
    fn look_up(&mut self, row: u32) -> bool {
        let at = (u128::from(mix(u64::from(row) + 1)) * self.sets.len() as u128) >> 64;
        let set = &mut self.sets[at as usize];
        let found = set.iter().position(|&r| r == row);
        match found {
            Some(at) => set[..=at].rotate_right(1),
            None => {
                set.truncate(self.ways - 1);
                set.insert(0, row);
            }
        }
        found.is_some()
    }
}

/// How [`SlotRing`] treats a row that was used since the hand last passed.
#[derive(Clone, Copy, PartialEq)]
enum Reuse {
    /// Evicts it: FIFO.
    Fifo,
    /// Passes over it once: CLOCK.
    SecondChance,
}

/// Slots that a hand replaces in turn: FIFO or CLOCK.
struct SlotRing {
    reuse: Reuse,
    slot_of: Vec<u32>,
    rows: Vec<u32>,
    used: Vec<bool>,
    hand: usize,
}

impl SlotRing {
    fn new(rows: usize, slots: usize, reuse: Reuse) -> Self {
        let (slot_of, rows, used) = (vec![NONE; rows], vec![NONE; slots], vec![false; slots]);
        Self { reuse, slot_of, rows, used, hand: 0 }
    }
}

impl Policy for SlotRing {
    fn look_up(&mut self, row: u32) -> bool {
        let slot = self.slot_of[row as usize];
        if slot != NONE {
            self.used[slot as usize] = self.reuse == Reuse::SecondChance;
            return true;
        }
        while std::mem::take(&mut self.used[self.hand]) {
            self.hand = (self.hand + 1) % self.rows.len();
        }
        let old = std::mem::replace(&mut self.rows[self.hand], row);
        if old != NONE {
            self.slot_of[old as usize] = NONE;
        }
        self.slot_of[row as usize] = self.hand as u32;
        self.hand = (self.hand + 1) % self.rows.len();
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hits(policy: &mut dyn Policy, rows: &[u32]) -> String {
        rows.iter().map(|&r| if policy.look_up(r) { 'h' } else { '.' }).collect()
    }

    #[test]
    fn policies_evict_by_their_rule() {
        // 0 is used again before 4 comes: LRU and CLOCK drop 1, FIFO drops 0.
        let rows = [0, 1, 2, 3, 0, 4, 0, 1];
        assert_eq!(hits(&mut Lru::new(8, 4), &rows), "....h.h.");
        assert_eq!(hits(&mut SetLru::new(4), &rows), "....h.h.");
        assert_eq!(hits(&mut SlotRing::new(8, 4, Reuse::SecondChance), &rows), "....h.h.");
        assert_eq!(hits(&mut SlotRing::new(8, 4, Reuse::Fifo), &rows), "....h...");
        // The lookups use 1 again before 4 comes. The hand of CLOCK reaches 0 first, so CLOCK
        // differs from LRU once both were used.
        let rows = [0, 1, 2, 3, 1, 0, 4, 2, 1];
        assert_eq!(hits(&mut Lru::new(8, 4), &rows), "....hh..h");
        assert_eq!(hits(&mut SlotRing::new(8, 4, Reuse::SecondChance), &rows), "....hh..h");
    }

    #[test]
    fn our_cache_has_the_requested_slots() {
        let trace =
            Trace { name: String::new(), tables: vec![100, 900], lookups: Vec::new(), warm_up: 0 };
        for slots in [14, 28, 210, 2002] {
            assert_eq!(HatchbackCache::new(&trace, slots).unwrap().cache.slots(), slots);
        }
        assert!(HatchbackCache::new(&trace, 17).is_err());
        let mut ours = HatchbackCache::new(&trace, 2002).unwrap();
        (0..1000).for_each(|row| assert!(!ours.look_up(row)));
        assert!((0..1000).filter(|&row| ours.look_up(row)).count() > 950);
    }
}
