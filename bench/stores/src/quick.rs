//! The crate `quick_cache` as a cache of `hits`.

use hatchback_bench::hits::policies::Policy;
use quick_cache::UnitWeighter;
use quick_cache::unsync::{Cache, DefaultLifecycle};
use std::hash::{BuildHasherDefault, DefaultHasher};

/// The cache, with the same hash in every run.
pub struct QuickCache(Cache<u32, u32, UnitWeighter, BuildHasherDefault<DefaultHasher>>);

impl QuickCache {
    /// Creates a cache of `slots` rows.
    pub fn make(slots: usize) -> Box<dyn Policy> {
        let (hash, life) = (BuildHasherDefault::default(), DefaultLifecycle::default());
        Box::new(Self(Cache::with(slots, slots as u64, UnitWeighter, hash, life)))
    }
}

impl Policy for QuickCache {
    fn look_up(&mut self, row: u32) -> bool {
        let hit = self.0.get(&row).is_some();
        if !hit {
            self.0.insert(row, row);
        }
        hit
    }
}
