//! The miss-ratio curve of the product's own cache, in one pass over the lookups. Each size of the
//! caches is simulated by small caches of the same kind, which see a sample of the rows chosen by
//! hash (SHARDS, miniature simulation). A small cache has as many rows for each of its sets as the
//! large one would have, so it misses at the same rate. Never reads a row.

use anyhow::{Context, Result};
use hatchback::flash::Flash;
use hatchback::model::budget::Budget;
use hatchback::model::capacity::{CachePlan, plan_caches};
use hatchback::schema::Schema;
use hatchback::{RowKey, mix};
use hatchback_kernels::cache::Cache;

/// Sets that a simulated cache has at most. Larger caches are sampled, with an error of some tenths
/// of a percentage point.
const SETS_MAX: usize = 2048;
/// Bytes of a simulated row, whose content does not matter.
const ROW_BYTES: usize = 4;
/// Makes the sample independent of the hash that chooses a row's set.
const SAMPLE_SALT: u64 = 0x5348_4152_4453;

/// A lookup of a cached table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Lookup {
    /// Whether the model has the row. An absent row always misses.
    pub is_present: bool,
    /// The row.
    pub row: RowKey,
}

/// All simulated sizes.
pub struct Curve {
    sizes: Vec<SimulatedSize>,
    /// The number of the cache of each table; `None` if the table is resident.
    cache_of: Vec<Option<usize>>,
    /// Counted lookups of cached tables.
    lookups: u64,
    /// Counted requests.
    requests: u64,
}

/// The caches at one size of the budget.
struct SimulatedSize {
    cache_bytes: u64,
    caches: Vec<SimulatedCache>,
}

/// A cache that simulates one of `rows_for_one` rows.
struct SimulatedCache {
    cache: Cache,
    rows_for_one: f64,
    /// A row is in the sample if its hash is at most this.
    hash_max: u64,
    slots: u64,
    missed: u64,
    /// The missing rows of the current request.
    missing: Vec<RowKey>,
}

/// A point of the curve.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct CurvePoint {
    /// Bytes of all caches.
    pub cache_bytes: u64,
    /// Rows that fit.
    pub slots: u64,
    /// Per cent of the lookups of cached tables that hit.
    pub hit_percent: f64,
    /// Missing rows of a request.
    pub misses: f64,
}

impl Curve {
    /// Returns the simulation of caches of `sizes` bytes, of a model of `schema` in `budget`.
    ///
    /// # Errors
    /// A size is below the least that the model works with.
    pub fn new(schema: &Schema, budget: &Budget, sizes: &[u64]) -> Result<Self> {
        let plan = |bytes| plan_caches(schema, &Budget { cache_bytes_max: bytes, ..*budget });
        let cache_of = plan(u64::MAX >> 8)?.cache_of;
        let sizes = sizes
            .iter()
            .map(|&bytes| SimulatedSize::new(bytes, &plan(bytes)?))
            .collect::<Result<_>>()?;
        Ok(Self { sizes, cache_of, lookups: 0, requests: 0 })
    }

    /// Returns whether the rows of `table` go through a cache.
    pub fn is_cached(&self, table: u16) -> bool {
        self.cache_of[usize::from(table)].is_some()
    }

    /// Fills the caches with the hot lists of `flash`, as a model does when it is opened.
    ///
    /// # Errors
    /// A hot list cannot be read.
    pub fn preload(&mut self, flash: &Flash) -> Result<()> {
        let tables = &flash.manifest().schema.tables;
        for (number, table) in tables.iter().enumerate() {
            let Some(cache) = self.cache_of[number] else { continue };
            let sharing = tables.iter().zip(&self.cache_of).filter(|(_, of)| **of == Some(cache));
            let rows: u64 = sharing.map(|(table, _)| table.rows).sum();
            let keys = flash.hot_keys(number)?;
            for size in &mut self.sizes {
                let simulated = &mut size.caches[cache];
                let share = u128::from(simulated.slots) * u128::from(table.rows);
                let share = (share / u128::from(rows.max(1)) * 3 / 4) as usize;
                for &key in keys.iter().take(share) {
                    let row = RowKey { table: number as u16, key };
                    let lookup = Lookup { is_present: true, row };
                    simulated.look_up(&lookup, sample_of(row), false);
                }
                simulated.insert_missing();
            }
        }
        Ok(())
    }

    /// Simulates one request. Its misses are inserted after its last lookup, as a worker does.
    pub fn request(&mut self, lookups: &[Lookup], is_counted: bool) {
        if is_counted {
            self.lookups += lookups.len() as u64;
            self.requests += 1;
        }
        let sampled: Vec<u64> = lookups.iter().map(|lookup| sample_of(lookup.row)).collect();
        for size in &mut self.sizes {
            for (lookup, sampled) in lookups.iter().zip(&sampled) {
                let cache = self.cache_of[usize::from(lookup.row.table)];
                if let Some(cache) = cache.and_then(|number| size.caches.get_mut(number)) {
                    cache.look_up(lookup, *sampled, is_counted);
                }
            }
            size.caches.iter_mut().for_each(SimulatedCache::insert_missing);
        }
    }

    /// Returns the points, by ascending size. Of several sizes with equally many rows, only the
    /// smallest is kept.
    pub fn points(&self) -> Vec<CurvePoint> {
        let (lookups, requests) = (self.lookups.max(1) as f64, self.requests.max(1) as f64);
        let point = |size: &SimulatedSize| {
            let missed = size.caches.iter().map(|c| c.missed as f64 * c.rows_for_one).sum::<f64>();
            CurvePoint {
                cache_bytes: size.cache_bytes,
                slots: size.caches.iter().map(|cache| cache.slots).sum(),
                hit_percent: (100.0 * (1.0 - missed / lookups)).clamp(0.0, 100.0),
                misses: missed / requests,
            }
        };
        let mut points: Vec<CurvePoint> = self.sizes.iter().map(point).collect();
        points.dedup_by_key(|point| point.slots);
        points
    }
}

/// Returns the hash that decides whether a row is in a sample.
fn sample_of(row: RowKey) -> u64 {
    mix(row.hash() ^ SAMPLE_SALT)
}

impl SimulatedSize {
    fn new(cache_bytes: u64, plan: &CachePlan) -> Result<Self> {
        let mut caches = Vec::new();
        for planned in &plan.caches {
            let sets = planned.sets.min(SETS_MAX);
            let cache = Cache::with_sets(ROW_BYTES, sets, &planned.keys);
            let cache = cache.context("the model has too many tables for a simulated cache")?;
            let rows_for_one = planned.sets as f64 / sets as f64;
            let ways = cache.slots() / sets;
            caches.push(SimulatedCache {
                cache,
                rows_for_one,
                hash_max: (u64::MAX as f64 / rows_for_one) as u64,
                slots: (planned.sets * ways) as u64,
                missed: 0,
                missing: Vec::new(),
            });
        }
        Ok(Self { cache_bytes, caches })
    }
}

impl SimulatedCache {
    fn look_up(&mut self, lookup: &Lookup, sampled: u64, is_counted: bool) {
        if sampled > self.hash_max || self.cache.query(lookup.row, &mut [0; ROW_BYTES]) {
            return;
        }
        self.missed += u64::from(is_counted);
        if lookup.is_present {
            self.missing.push(lookup.row);
        }
    }

    fn insert_missing(&mut self) {
        self.missing.sort_unstable();
        self.missing.dedup();
        for row in self.missing.drain(..) {
            self.cache.insert(row, &[0; ROW_BYTES], self.cache.epoch(row));
        }
    }
}
