//! The keys of the measured launches. Key sets rotate: a set is launched again only after the sets
//! between have touched more memory than the GPU's second-level cache holds. Otherwise a loop would
//! measure that cache. Never measures.

use crate::filled_cache::TABLES;
use anyhow::{Result, ensure};
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::gpu::lookup::GpuLookup;
use hatchback_kernels::lookup::Bags;
use rand::rngs::StdRng;
use rand::seq::index;
use rand::{RngExt, SeedableRng};
use rand_distr::{Distribution, Zipf};
use serde::Serialize;
use std::sync::Arc;

/// Exponent of the power law, as of the Criteo data's keys.
const ZIPF: f64 = 1.05;
/// Least key sets of a rotation.
const SETS: usize = 4;
/// Bytes of a set's header, which a lookup reads before the row.
pub const HEADER_BYTES: usize = 64;
/// Rows of a set.
const SET_ROWS: usize = 14;
/// Bytes that a lookup reads for a key beside its row: the key, and its set's header.
pub const KEY_BYTES: usize = 8 + HEADER_BYTES;

/// The keys of one launch, table by table: `[TABLES, bags * hotness]`.
pub type KeySet = Vec<Vec<u64>>;

/// How keys are distributed over the cached rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skew {
    /// Every row is as frequent as every other.
    Uniform,
    /// A power law.
    Zipf,
}

impl Skew {
    /// Returns the name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
        }
    }
}

/// Draws keys of filled tables.
pub struct KeyDraw {
    /// The cached keys of each table.
    cached: Arc<[Vec<u64>]>,
    /// For each table the next key that was never looked up.
    next_missing: Vec<u64>,
    /// Keys from here on belong to no table.
    keys_end: u64,
    rng: StdRng,
}

impl KeyDraw {
    /// Draws from the `cached` keys of each table. The keys from `rows` to `keys_end` are not
    /// cached.
    pub fn new(cached: Vec<Vec<u64>>, rows: usize, keys_end: usize) -> Self {
        let rng = StdRng::seed_from_u64(7);
        let (cached, next_missing) = (cached.into(), vec![rows as u64; TABLES]);
        Self { cached, next_missing, keys_end: keys_end as u64, rng }
    }

    /// Returns this draw with another seed.
    pub fn with_seed(&self, seed: u64) -> Self {
        let Self { cached, next_missing, keys_end, .. } = self;
        let (cached, next_missing) = (Arc::clone(cached), next_missing.clone());
        Self { cached, next_missing, keys_end: *keys_end, rng: StdRng::seed_from_u64(seed) }
    }

    /// Returns the cached keys of each table.
    pub fn cached(&self) -> &Arc<[Vec<u64>]> {
        &self.cached
    }

    /// Draws `count` cached keys of each table.
    pub fn draw(&mut self, count: usize, skew: Skew) -> KeySet {
        let Self { cached, rng, .. } = self;
        let draw_table = |cached: &Vec<u64>| {
            let ranks = Zipf::new(cached.len() as f64, ZIPF).ok();
            let mut key = || match (skew, &ranks) {
                (Skew::Zipf, Some(ranks)) => cached[ranks.sample(&mut *rng) as usize - 1],
                _ => cached[rng.random_range(0..cached.len())],
            };
            (0..count).map(|_| key()).collect()
        };
        cached.iter().map(draw_table).collect()
    }

    /// Draws one key a bag for `batch` samples. `missing` of all keys were never looked up before,
    /// so their rows are in no cache.
    ///
    /// # Errors
    /// The tables have no such keys left.
    pub fn draw_with_misses(&mut self, batch: usize, missing: usize) -> Result<KeySet> {
        let mut keys = self.draw(batch, Skew::Uniform);
        for place in index::sample(&mut self.rng, batch * TABLES, missing) {
            let (table, sample) = (place / batch, place % batch);
            let next = &mut self.next_missing[table];
            ensure!(*next < self.keys_end, "table {table} has no key left that was never cached");
            keys[table][sample] = *next;
            *next += 1;
        }
        Ok(keys)
    }

    /// Draws dense features for `batch` samples.
    pub fn draw_dense(&mut self, batch: usize, width: usize) -> Vec<f32> {
        (0..batch * width).map(|_| self.rng.random_range(-1.0..1.0)).collect()
    }
}

/// The memory that one rotation of key sets touches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Rotation {
    /// Key sets, each launched once a rotation.
    pub sets: usize,
    /// Different rows that all sets read.
    pub rows_a_rotation: usize,
    /// Bytes of the keys, of these rows and of their sets' headers.
    pub bytes_a_rotation: usize,
}

impl Rotation {
    /// Returns what `sets` of keys below `rows` touch in caches of `row_bytes`.
    pub fn new(sets: &[KeySet], rows: usize, row_bytes: usize) -> Self {
        let mut is_read = vec![false; rows];
        let (mut rows_read, mut keys) = (0, 0);
        for table in 0..TABLES {
            is_read.fill(false);
            for &key in sets.iter().flat_map(|set| &set[table]) {
                is_read[key as usize] = true;
                keys += 1;
            }
            rows_read += is_read.iter().filter(|is_read| **is_read).count();
        }
        // Rows that share a header may all be in one set, so this is the least.
        let headers = rows_read.div_ceil(SET_ROWS);
        let bytes_a_rotation = keys * 8 + rows_read * row_bytes + headers * HEADER_BYTES;
        Self { sets: sets.len(), rows_a_rotation: rows_read, bytes_a_rotation }
    }
}

/// Returns the key sets of a loop of `launches`, each of which touches `launch_bytes`. They touch
/// twice the second-level cache of `gpu`, or no set is launched twice.
///
/// # Errors
/// The driver does not tell the size of that cache.
pub fn rotating_sets(gpu: &Gpu, launch_bytes: usize, launches: usize) -> Result<usize> {
    Ok(sets_beyond(2 * gpu.l2_bytes()?, launch_bytes, launches))
}

fn sets_beyond(bytes: usize, launch_bytes: usize, launches: usize) -> usize {
    bytes.div_ceil(launch_bytes).min(launches).max(SETS)
}

/// Gives `lookup`, which has no further requests yet, a request for each of `sets`. Each launch
/// then takes the next one. `offsets` are those of each feature, `[batch + 1]`.
///
/// # Errors
/// The GPU has no memory for them.
pub fn load_sets(lookup: &mut GpuLookup, sets: &[KeySet], offsets: &[u32]) -> Result<()> {
    let batch = offsets.len() - 1;
    for _ in 1..sets.len() {
        lookup.add_request(batch)?;
    }
    for keys in sets {
        lookup.next_request();
        lookup.write_request(batch, batch, |f| Bags::new(&keys[f], offsets));
        lookup.copy_keys(batch)?;
    }
    Ok(lookup.stream().wait()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw() -> KeyDraw {
        KeyDraw::new(vec![(0..100).collect(); TABLES], 100, 120)
    }

    #[test]
    fn a_missing_key_is_drawn_once() {
        let mut draw = draw();
        let mut missing = Vec::new();
        for _ in 0..10 {
            let keys = draw.draw_with_misses(2, TABLES).unwrap();
            let is_new = |key: &&u64| **key >= 100;
            missing.extend(keys.iter().enumerate().flat_map(|(table, keys)| {
                keys.iter().filter(is_new).map(move |key| (table, *key))
            }));
        }
        assert_eq!(missing.len(), 10 * TABLES);
        missing.sort_unstable();
        missing.dedup();
        assert_eq!(missing.len(), 10 * TABLES);
        let error = draw.draw_with_misses(20, 20 * TABLES).unwrap_err().to_string();
        assert!(error.contains("no key left"), "{error}");
    }

    #[test]
    fn a_rotation_counts_each_row_once() {
        let set = |keys: [u64; 3]| vec![keys.to_vec(); TABLES];
        let rotation = Rotation::new(&[set([1, 2, 2]), set([2, 3, 99])], 100, 16);
        assert_eq!((rotation.sets, rotation.rows_a_rotation), (2, 4 * TABLES));
        assert_eq!(rotation.bytes_a_rotation, TABLES * (6 * 8 + 4 * 16) + 8 * HEADER_BYTES);
    }

    #[test]
    fn sets_exceed_the_cache_or_are_launched_once() {
        assert_eq!(sets_beyond(100 << 20, 40 << 20, 150), SETS);
        assert_eq!(sets_beyond(100 << 20, 10 << 20, 150), 10);
        assert_eq!(sets_beyond(100 << 20, 5_000, 600), 600);
        assert_eq!(sets_beyond(0, 5_000, 2), SETS);
    }

    #[test]
    fn both_distributions_draw_cached_keys() {
        let mut draw = draw();
        for skew in [Skew::Uniform, Skew::Zipf] {
            let keys = draw.draw(50, skew);
            assert!(keys.len() == TABLES && keys.iter().flatten().all(|&key| key < 100));
        }
    }
}
