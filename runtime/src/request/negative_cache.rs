//! Keys that a worker found not to be in their tables, so that the next request for them reads
//! nothing. A fixed number of places, one a hash, the newest stays: it may forget, and never names
//! a key that is there.

use crate::limits::ABSENT_MAX;
use hatchback_kernels::cache::address::RowKey;

/// The keys found absent. Good for one generation: what is absent in it stays absent.
pub(crate) struct NegativeCache {
    places: Box<[Option<RowKey>]>,
}

impl NegativeCache {
    /// None yet.
    pub fn new() -> Self {
        Self { places: vec![None; ABSENT_MAX].into() }
    }

    /// Bytes that it holds.
    pub fn bytes() -> usize {
        ABSENT_MAX * size_of::<Option<RowKey>>()
    }

    fn place(&self, row: RowKey) -> usize {
        row.hash() as usize % self.places.len()
    }

    /// Whether `row` was found absent and is not forgotten.
    pub fn holds(&self, row: RowKey) -> bool {
        self.places[self.place(row)] == Some(row)
    }

    /// Remembers that a sound page, the only one that could hold `row`, does not.
    pub fn note(&mut self, row: RowKey) {
        let place = self.place(row);
        self.places[place] = Some(row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgets_but_never_invents() {
        let mut absent = NegativeCache::new();
        let row = |key: u64| RowKey { table: (key % 3) as u16, key };
        for key in 0..3 * ABSENT_MAX as u64 {
            absent.note(row(2 * key));
            assert!(absent.holds(row(2 * key)));
        }
        let held = (0..6 * ABSENT_MAX as u64).filter(|&key| absent.holds(row(key)));
        assert!(held.inspect(|key| assert_eq!(key % 2, 0)).count() > ABSENT_MAX / 2);
    }
}
