//! Resident tables: small tables held whole in fast memory, every key answered without a miss.
//! Never changes after it is built.

use crate::cache::mix;

/// All encoded rows of one small table.
pub struct Resident {
    row_bytes: usize,
    /// Ascending hashes of the keys, in row order; `None` where the key is the row's position.
    hashes: Option<Box<[u64]>>,
    rows: Box<[u8]>,
}

impl Resident {
    /// Rows in key order `0..n`.
    pub fn indexed(row_bytes: usize, rows: Box<[u8]>) -> Self {
        assert_eq!(rows.len() % row_bytes, 0);
        Self { row_bytes, hashes: None, rows }
    }

    /// Rows in ascending order of `mix(key)`, with those hashes.
    pub fn hashed(row_bytes: usize, hashes: Box<[u64]>, rows: Box<[u8]>) -> Self {
        assert_eq!(rows.len(), row_bytes * hashes.len());
        assert!(hashes.is_sorted());
        Self { row_bytes, hashes: Some(hashes), rows }
    }

    /// The encoded row of `key`, or `None` if the table does not have it.
    #[inline]
    pub fn row(&self, key: u64) -> Option<&[u8]> {
        let position = match &self.hashes {
            None => usize::try_from(key).ok()?,
            Some(hashes) => hashes.binary_search(&mix(key)).ok()?,
        };
        let start = position.checked_mul(self.row_bytes)?;
        self.rows.get(start..start.checked_add(self.row_bytes)?)
    }

    /// All bytes held.
    pub fn bytes(&self) -> usize {
        self.rows.len() + self.hashes.as_ref().map_or(0, |h| 8 * h.len())
    }
}
