//! Prefetches the first set headers and rows of later features of a batch. The lookup pipeline
//! prefetches within one feature only. In a batch with few keys a feature ends before its pipeline
//! is full. The rows of many features must then be loaded from memory at the same time. This file
//! never changes the result of a lookup.

use crate::lookup::feature::{Bags, FeatureView, RowStore};
use crate::lookup::row_source::CachedRows;
use crate::lookup::whole_rows::WholeRows;
use crate::simd::isa::Isa;
use crate::simd::{Job, Simd, dispatch};
use std::ops::RangeInclusive;

/// Number of keys of a feature that are prefetched. The feature's own pipeline prefetches the later
/// keys.
const FEATURE_KEYS: usize = 32;
/// Approximate prefetch distance of the rows, in keys.
const ROW_DISTANCE: usize = 48;

/// If features have at least so many keys on average, their own pipelines prefetch rows early
/// enough. A second probe of each key, for the prefetch of its row, would then cost more than it
/// gains.
const PIPELINED_KEYS: usize = 24;

/// The prefetch of later features while the features of one batch are looked up in turn.
pub struct FeaturePrefetch {
    features: usize,
    /// Prefetch distance of the rows, in features. It is 0 for a batch with [`PIPELINED_KEYS`] keys
    /// a feature or more.
    distance: usize,
}

impl FeaturePrefetch {
    /// Creates the prefetch for a batch of `keys` keys in `features` features.
    pub fn new(keys: usize, features: usize) -> Self {
        let distance = match keys >= PIPELINED_KEYS * features {
            true => 0,
            false => (ROW_DISTANCE * features).checked_div(keys).unwrap_or(0),
        };
        Self { features, distance: distance.min(ROW_DISTANCE) }
    }

    /// Prefetches the memory that the queries of features after `at` read first. The caller calls
    /// this before the query of each feature, in turn. `feature` returns the feature with a number,
    /// and its bags.
    pub fn prefetch<'a>(
        &self,
        isa: Isa,
        at: usize,
        feature: impl Fn(usize) -> (FeatureView<'a>, Bags<'a>),
    ) {
        // The first call fills the distance. Each later call adds one feature.
        let next = |ahead: usize| if at == 0 { 0..=ahead } else { at + ahead..=at + ahead };
        let those =
            |range: RangeInclusive<usize>| range.take_while(|f| *f < self.features).map(&feature);

        // A probe reads the set headers, so they are prefetched at twice the distance of the rows.
        those(next((2 * self.distance).max(1)))
            .for_each(|(feature, bags)| dispatch(isa, PrefetchSets { feature, bags }));
        if self.distance > 0 {
            those(next(self.distance))
                .for_each(|(feature, bags)| dispatch(isa, PrefetchRows { feature, bags }));
        }
    }
}

/// Returns the first keys of a feature.
#[inline(always)]
fn first_keys(bags: Bags<'_>) -> &[u64] {
    &bags.keys[..bags.keys.len().min(FEATURE_KEYS)]
}

/// Prefetches the set headers, bits or index buckets that `PrefetchRows` reads.
struct PrefetchSets<'a> {
    feature: FeatureView<'a>,
    bags: Bags<'a>,
}

impl Job for PrefetchSets<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let FeatureView { rows, table, keys_end, .. } = self.feature;
        let keys = first_keys(self.bags);
        match rows {
            RowStore::Cached(cache) => match WholeRows::new(cache, table, keys_end) {
                Some(rows) => rows.prefetch_bits(keys),
                None => CachedRows::new(cache, table, keys_end).prefetch_sets(keys),
            },
            RowStore::Resident(table) => keys.iter().for_each(|key| table.prefetch(*key)),
        }
    }
}

/// Prefetches the first rows of a feature.
struct PrefetchRows<'a> {
    feature: FeatureView<'a>,
    bags: Bags<'a>,
}

impl Job for PrefetchRows<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let FeatureView { rows, table, keys_end, .. } = self.feature;
        let keys = first_keys(self.bags);
        match rows {
            RowStore::Cached(cache) => match WholeRows::new(cache, table, keys_end) {
                Some(rows) => rows.prefetch_rows(keys),
                None => CachedRows::new(cache, table, keys_end).prefetch_rows::<S>(keys),
            },
            RowStore::Resident(table) => {
                let slots = keys.iter().filter_map(|key| table.slot(*key));
                slots.for_each(|slot| table.prefetch_row(slot));
            }
        }
    }
}
