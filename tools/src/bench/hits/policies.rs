//! The caches that are compared, all with the same number of slots: ours as it is, and the common
//! policies. They hold rows' numbers or four bytes a row; a miss puts the row in.

use super::traces::Trace;
use anyhow::{Context, Result};
use hatchback::{RowKey, mix};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::KeySpaces;

/// A cache of rows, asked for by their numbers.
pub trait Policy {
    /// Whether row `row` is cached; it is afterwards.
    fn look_up(&mut self, row: u32) -> bool;
}

/// What each is called, in the order of [`all`].
pub const NAMES: [&str; 5] = ["Hatchback", "LRU", "64-way LRU", "CLOCK", "FIFO"];
/// The crate that is measured with them.
pub const CRATE: &str = "quick_cache";

/// Every policy with `slots` slots for the rows of `trace`.
///
/// # Errors
/// Our cache does not come in this size.
pub fn all(trace: &Trace, slots: usize) -> Result<Vec<(&'static str, Box<dyn Policy>)>> {
    let rows = trace.rows();
    let policies: [Box<dyn Policy>; 5] = [
        Box::new(Ours::new(trace, slots)?),
        Box::new(Lru::new(rows, slots)),
        Box::new(SetLru::new(slots)),
        Box::new(Ring::new(rows, slots, true)),
        Box::new(Ring::new(rows, slots, false)),
    ];
    #[cfg_attr(not(feature = "peers"), expect(unused_mut))]
    let mut all: Vec<(&str, Box<dyn Policy>)> = NAMES.into_iter().zip(policies).collect();
    #[cfg(feature = "peers")]
    all.push((CRATE, Box::new(quick::Quick::new(slots))));
    Ok(all)
}

/// The embedding cache of the product.
struct Ours {
    cache: Cache,
    rows: Vec<RowKey>,
}

/// Bytes of a row in it.
const ROW_BYTES: usize = 4;

impl Ours {
    fn new(trace: &Trace, slots: usize) -> Result<Self> {
        let names = KeySpaces::new(trace.tables.iter().map(|&rows| Some(rows as u64)).collect());
        let cache = cache_of(slots, ROW_BYTES, &names)
            .with_context(|| format!("no cache of {slots} slots"))?;
        Ok(Self { cache, rows: trace.row_keys() })
    }
}

/// Our cache with exactly `slots` slots for rows of `row_bytes`.
fn cache_of(slots: usize, row_bytes: usize, names: &KeySpaces) -> Option<Cache> {
    let least = Cache::bytes_min(row_bytes, names);
    let of = |sets: usize| Cache::new(row_bytes, sets * least, names);
    let (one, two) = (of(1)?, of(2)?);
    let (sets, set_bytes) = (slots / one.slots(), two.bytes() - one.bytes());
    Cache::new(row_bytes, least + (sets.checked_sub(1)?) * set_bytes, names)
        .filter(|c| c.slots() == slots)
}

impl Policy for Ours {
    fn look_up(&mut self, row: u32) -> bool {
        let (key, mut bytes) = (self.rows[row as usize], [0; ROW_BYTES]);
        let hit = self.cache.query(key, &mut bytes);
        if !hit {
            self.cache.insert(key, &row.to_le_bytes(), self.cache.epoch(key));
        } else {
            assert_eq!(bytes, row.to_le_bytes(), "another row");
        }
        hit
    }
}

/// No row, no slot.
const NONE: u32 = u32::MAX;

/// Least recently used, over the whole cache.
struct Lru {
    /// The neighbours of each row in the order of use, `NONE` at the ends and where it is not
    /// cached.
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

    fn take_out(&mut self, row: u32) {
        let (newer, older) = (self.newer[row as usize], self.older[row as usize]);
        *if newer == NONE { &mut self.newest } else { &mut self.older[newer as usize] } = older;
        *if older == NONE { &mut self.oldest } else { &mut self.newer[older as usize] } = newer;
    }

    fn put_first(&mut self, row: u32) {
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
            self.take_out(row);
        } else if self.free > 0 {
            self.free -= 1;
        } else {
            let oldest = self.oldest;
            self.take_out(oldest);
            self.cached[oldest as usize] = false;
        }
        self.put_first(row);
        hit
    }
}

/// Least recently used in sets of 64, as GPU caches of embeddings have it; a few ways more where
/// the slots do not divide evenly.
struct SetLru {
    ways: usize,
    /// Each from the newest to the oldest.
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

/// Slots that are replaced in turn: FIFO, or CLOCK, which passes over a row once if it was used.
struct Ring {
    second_chance: bool,
    slot_of: Vec<u32>,
    rows: Vec<u32>,
    used: Vec<bool>,
    hand: usize,
}

impl Ring {
    fn new(rows: usize, slots: usize, second_chance: bool) -> Self {
        let (slot_of, rows, used) = (vec![NONE; rows], vec![NONE; slots], vec![false; slots]);
        Self { second_chance, slot_of, rows, used, hand: 0 }
    }
}

impl Policy for Ring {
    fn look_up(&mut self, row: u32) -> bool {
        let slot = self.slot_of[row as usize];
        if slot != NONE {
            self.used[slot as usize] = self.second_chance;
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

#[cfg(feature = "peers")]
mod quick {
    use super::Policy;
    use quick_cache::UnitWeighter;
    use quick_cache::unsync::{Cache, DefaultLifecycle};
    use std::hash::{BuildHasherDefault, DefaultHasher};

    /// The crate `quick_cache`, with a hash that is the same in every run.
    pub struct Quick(Cache<u32, u32, UnitWeighter, BuildHasherDefault<DefaultHasher>>);

    impl Quick {
        pub fn new(slots: usize) -> Self {
            let (hash, life) = (BuildHasherDefault::default(), DefaultLifecycle::default());
            Self(Cache::with(slots, slots as u64, UnitWeighter, hash, life))
        }
    }

    impl Policy for Quick {
        fn look_up(&mut self, row: u32) -> bool {
            let hit = self.0.get(&row).is_some();
            if !hit {
                self.0.insert(row, row);
            }
            hit
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hits(policy: &mut dyn Policy, rows: &[u32]) -> String {
        rows.iter().map(|&r| if policy.look_up(r) { 'h' } else { '.' }).collect()
    }

    #[test]
    fn policies_keep_what_they_say() {
        // 0 is used again before 4 comes: LRU and CLOCK drop 1, FIFO drops 0.
        let rows = [0, 1, 2, 3, 0, 4, 0, 1];
        assert_eq!(hits(&mut Lru::new(8, 4), &rows), "....h.h.");
        assert_eq!(hits(&mut SetLru::new(4), &rows), "....h.h.");
        assert_eq!(hits(&mut Ring::new(8, 4, true), &rows), "....h.h.");
        assert_eq!(hits(&mut Ring::new(8, 4, false), &rows), "....h...");
        // 1 is used again before 4 comes: CLOCK, which comes to 0 first, differs from LRU once both
        // were used.
        let rows = [0, 1, 2, 3, 1, 0, 4, 2, 1];
        assert_eq!(hits(&mut Lru::new(8, 4), &rows), "....hh..h");
        assert_eq!(hits(&mut Ring::new(8, 4, true), &rows), "....hh..h");
    }

    #[test]
    fn our_cache_has_the_slots_that_are_asked_for() {
        let trace =
            Trace { name: String::new(), tables: vec![100, 900], lookups: Vec::new(), warm_up: 0 };
        for slots in [14, 28, 210, 2002] {
            assert_eq!(Ours::new(&trace, slots).unwrap().cache.slots(), slots);
        }
        assert!(Ours::new(&trace, 17).is_err());
        let mut ours = Ours::new(&trace, 2002).unwrap();
        (0..1000).for_each(|row| assert!(!ours.look_up(row)));
        assert!((0..1000).filter(|&row| ours.look_up(row)).count() > 950);
    }
}
