//! An embedding cache that already holds the rows of all tables. Never reads flash.

use anyhow::{Context, Result};
use hatchback::{RowFormat, RowKey};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::KeySpaces;
use hatchback_tools::workload::synthetic::push_normals;
use std::panic::resume_unwind;
use std::thread;

/// Tables of the measured models, each with one bag per sample: those of MLPerf's Criteo model.
pub const TABLES: usize = 26;

/// Bytes of a slot besides its row.
const SLOT_OVERHEAD_BYTES: usize = 7;
/// Slots per row: sets that are 77 % full on average seldom overflow.
const SLOTS_PER_ROW: f64 = 1.3;

/// Encoded rows of one length, which repeat.
pub struct SampleRows {
    bytes: Vec<u8>,
    row_bytes: usize,
}

impl SampleRows {
    /// Returns `row`, repeated.
    pub fn repeated(row: &[u8]) -> Self {
        Self { bytes: row.to_vec(), row_bytes: row.len() }
    }

    /// Returns `count` different rows of random values close to N(0, 1/sqrt(dim)).
    ///
    /// # Errors
    /// The codec cannot hold a value.
    pub fn random(format: RowFormat, count: usize) -> Result<Self> {
        let (dim, row_bytes) = (format.dim(), format.row_bytes());
        let (mut bytes, mut values) = (vec![0; count * row_bytes], Vec::new());
        for (number, row) in bytes.chunks_exact_mut(row_bytes).enumerate() {
            values.clear();
            let (seed, some) = ((number as u64) << 16, dim.next_multiple_of(2));
            push_normals(seed, some, 1.0 / (dim as f32).sqrt(), &mut values);
            format.encode(&values[..dim], row)?;
        }
        Ok(Self { bytes, row_bytes })
    }

    /// Returns row `number`, counted on from the first row after the last.
    pub fn row(&self, number: usize) -> &[u8] {
        let rows = self.bytes.len() / self.row_bytes;
        &self.bytes[number % rows * self.row_bytes..][..self.row_bytes]
    }
}

/// A cache and the keys that it holds.
pub struct FilledCache {
    /// The cache.
    pub cache: Cache,
    /// The cached keys of each table. If the cache hashes its rows, some sets overflow, so a few
    /// keys are not cached.
    pub keys: Vec<Vec<u64>>,
}

impl FilledCache {
    /// Builds a cache that hashes its rows, for tables of keys below `keys_end`. Inserts one of
    /// `samples` under each of the keys below `rows` of each table.
    ///
    /// # Errors
    /// `rows` is too small for a cache.
    pub fn hashed(keys_end: usize, rows: usize, samples: &SampleRows) -> Result<Self> {
        let key_spaces = KeySpaces::new(vec![Some(keys_end as u64); TABLES]);
        let slots = (rows * TABLES) as f64 * SLOTS_PER_ROW;
        let bytes = slots * (samples.row_bytes + SLOT_OVERHEAD_BYTES) as f64;
        let cache = Cache::new(samples.row_bytes, bytes as usize, &key_spaces)
            .with_context(|| format!("{rows} rows are too few for a cache"))?;
        Ok(Self::fill(cache, rows, samples))
    }

    /// Builds a whole cache for tables of `rows` rows and inserts one of `samples` under every key.
    ///
    /// # Errors
    /// The rows are too many for a cache.
    pub fn whole(rows: usize, samples: &SampleRows) -> Result<Self> {
        let key_spaces = KeySpaces::new(vec![Some(rows as u64); TABLES]);
        let cache = Cache::whole(samples.row_bytes, usize::MAX, &key_spaces)
            .with_context(|| format!("{TABLES} tables of {rows} rows are too many for a cache"))?;
        Ok(Self::fill(cache, rows, samples))
    }

    fn fill(cache: Cache, rows: usize, samples: &SampleRows) -> Self {
        let row_key = |table: usize, key| RowKey { table: table as u16, key: key as u64 };
        each_table(|table| {
            for key in 0..rows {
                let row = row_key(table, key);
                cache.insert(row, samples.row(table * rows + key), cache.epoch(row));
            }
        });

        let keys = each_table(|table| {
            let mut out = vec![0; samples.row_bytes];
            let mut is_cached = |key: &usize| cache.query(row_key(table, *key), &mut out);
            (0..rows).filter(&mut is_cached).map(|key| key as u64).collect()
        });
        Self { cache, keys }
    }
}

/// Returns the results of `work` for every table. Works on all CPUs that this thread may use.
fn each_table<T: Send>(work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(TABLES);
    let (tables, work) = ((0..TABLES).collect::<Vec<_>>(), &work);
    thread::scope(|scope| {
        let parts: Vec<_> = tables
            .chunks(TABLES.div_ceil(threads))
            .map(|some| scope.spawn(move || some.iter().map(|&t| work(t)).collect::<Vec<T>>()))
            .collect();
        let results = parts.into_iter().flat_map(|part| match part.join() {
            Ok(results) => results,
            Err(panic) => resume_unwind(panic),
        });
        results.collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use hatchback::Codec;

    #[test]
    fn cached_keys_have_random_rows_of_their_own() {
        for codec in [Codec::F32, Codec::F16, Codec::U8, Codec::U4] {
            let format = RowFormat::new(codec, 64, 0).unwrap();
            let samples = SampleRows::random(format, 64).unwrap();
            let FilledCache { cache, keys } = FilledCache::hashed(2000, 500, &samples).unwrap();
            let cached: usize = keys.iter().map(Vec::len).sum();
            assert!(cached > 450 * TABLES, "{cached} of {}", 500 * TABLES);
            let mut row = vec![0; format.row_bytes()];
            for (table, &key) in
                keys.iter().enumerate().flat_map(|(t, k)| k.iter().map(move |k| (t, k)))
            {
                assert!(cache.query(RowKey { table: table as u16, key }, &mut row));
                assert_eq!(row, samples.row(table * 500 + key as usize));
                assert!(key == 0 || row != samples.row(table * 500 + key as usize - 1));
            }
        }
    }
}
