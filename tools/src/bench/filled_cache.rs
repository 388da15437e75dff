//! An embedding cache that already holds the rows of all tables. Never reads flash.

use anyhow::{Context, Result};
use hatchback::RowKey;
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::KeySpaces;

/// Tables of the measured models, each with one bag per sample: those of MLPerf's Criteo model.
pub const TABLES: usize = 26;

/// Bytes of a slot besides its row.
const SLOT_OVERHEAD_BYTES: usize = 7;
/// Slots per row: sets that are 77 % full on average seldom overflow.
const SLOTS_PER_ROW: f64 = 1.3;

/// A cache and the keys that it holds.
pub struct FilledCache {
    /// The cache.
    pub cache: Cache,
    /// The cached keys of each table. If the cache hashes its rows, some sets overflow, so a few
    /// keys are not cached.
    pub keys: Vec<Vec<u64>>,
}

impl FilledCache {
    /// Builds a cache that hashes its rows, for tables of keys below `keys_end`. Inserts `row`
    /// under the keys below `rows` of each table.
    ///
    /// # Errors
    /// `rows` is too small for a cache.
    pub fn hashed(keys_end: usize, rows: usize, row: &[u8]) -> Result<Self> {
        let key_spaces = KeySpaces::new(vec![Some(keys_end as u64); TABLES]);
        let slots = (rows * TABLES) as f64 * SLOTS_PER_ROW;
        let bytes = slots * (row.len() + SLOT_OVERHEAD_BYTES) as f64;
        let cache = Cache::new(row.len(), bytes as usize, &key_spaces)
            .with_context(|| format!("{rows} rows are too few for a cache"))?;
        Ok(Self::fill(cache, rows, row))
    }

    /// Builds a whole cache for tables of `rows` rows and inserts `row` under every key.
    ///
    /// # Errors
    /// The rows are too many for a cache.
    pub fn whole(rows: usize, row: &[u8]) -> Result<Self> {
        let key_spaces = KeySpaces::new(vec![Some(rows as u64); TABLES]);
        let cache = Cache::whole(row.len(), usize::MAX, &key_spaces)
            .with_context(|| format!("{TABLES} tables of {rows} rows are too many for a cache"))?;
        Ok(Self::fill(cache, rows, row))
    }

    fn fill(cache: Cache, rows: usize, row: &[u8]) -> Self {
        let row_key = |table: usize, key| RowKey { table: table as u16, key };
        for table in 0..TABLES {
            for key in (0..rows as u64).map(|key| row_key(table, key)) {
                cache.insert(key, row, cache.epoch(key));
            }
        }

        let cached = |table| {
            let mut out = row.to_vec();
            (0..rows as u64).filter(|&key| cache.query(row_key(table, key), &mut out)).collect()
        };
        let keys = (0..TABLES).map(cached).collect();
        Self { cache, keys }
    }
}
