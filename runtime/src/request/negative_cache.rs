//! The negative cache of a worker: keys that their tables do not have. The next request for such a
//! key reads no page. Each entry holds the newest of the keys that hash to it. The cache may forget
//! a key, but it never holds a key that its table has.

use crate::limits::NEGATIVE_CACHE_KEYS_MAX;
use hatchback_kernels::cache::address::RowKey;

/// Keys that one generation does not have. A new generation starts with an empty cache.
pub(crate) struct NegativeCache {
    entries: Box<[Option<RowKey>]>,
}

impl NegativeCache {
    pub fn new() -> Self {
        Self { entries: vec![None; NEGATIVE_CACHE_KEYS_MAX].into() }
    }

    /// Returns the bytes that a negative cache takes.
    pub fn bytes() -> usize {
        NEGATIVE_CACHE_KEYS_MAX * size_of::<Option<RowKey>>()
    }

    /// Forgets every key.
    pub fn clear(&mut self) {
        self.entries.fill(None);
    }

    fn entry(&self, row: RowKey) -> usize {
        row.hash() as usize % self.entries.len()
    }

    /// Returns whether `row` is known to be absent.
    pub fn contains(&self, row: RowKey) -> bool {
        self.entries[self.entry(row)] == Some(row)
    }

    /// Adds `row`. The caller has verified the only page that could hold it.
    pub fn insert(&mut self, row: RowKey) {
        let entry = self.entry(row);
        self.entries[entry] = Some(row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgets_but_never_invents() {
        let mut absent = NegativeCache::new();
        let row = |key: u64| RowKey { table: (key % 3) as u16, key };
        for key in 0..3 * NEGATIVE_CACHE_KEYS_MAX as u64 {
            absent.insert(row(2 * key));
            assert!(absent.contains(row(2 * key)));
        }
        let held = (0..6 * NEGATIVE_CACHE_KEYS_MAX as u64).filter(|&key| absent.contains(row(key)));
        let found = held.inspect(|key| assert_eq!(key % 2, 0)).count();
        assert!(found > NEGATIVE_CACHE_KEYS_MAX / 2);
    }
}
