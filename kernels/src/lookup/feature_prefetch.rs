//! Features asked for ahead of their queries. A query looks ahead within its feature (`ahead.rs`);
//! of a batch with few keys the rows of many features have to be on their way from memory at a
//! time. Changes nothing but what is in the caches.

use crate::lookup::pipeline::Cached;
use crate::lookup::{Bags, FeatureView, RowStore};
use crate::simd::isa::Isa;
use crate::simd::{Job, Simd, dispatch};
use std::ops::RangeInclusive;

/// Keys of a feature that are asked for; from then on its query looks ahead.
const KEYS: usize = 32;
/// Keys whose rows are on their way at a time, about.
const KEYS_AHEAD: usize = 48;

/// How far ahead of its query a feature of a batch is asked for.
pub struct FeaturePrefetch {
    features: usize,
    /// In features; 0 where the batch has so many keys that its queries look far enough ahead by
    /// themselves.
    by: usize,
}

impl FeaturePrefetch {
    /// For a batch of so many keys in so many features.
    pub fn new(keys: usize, features: usize) -> Self {
        Self {
            features,
            by: (KEYS_AHEAD * features).checked_div(keys).unwrap_or(0).min(KEYS_AHEAD),
        }
    }

    /// Asks for what the queries behind that of feature `at` read first; called before each query,
    /// in turn. `feature` says what feature and bags have a number.
    pub fn ask<'a>(
        &self,
        isa: Isa,
        at: usize,
        feature: impl Fn(usize) -> (FeatureView<'a>, Bags<'a>),
    ) {
        let next = |ahead: usize| if at == 0 { 0..=ahead } else { at + ahead..=at + ahead };
        let those =
            |range: RangeInclusive<usize>| range.take_while(|f| *f < self.features).map(&feature);
        // What the search for rows reads comes first, as far ahead again.
        those(next((2 * self.by).max(1))).for_each(|(feature, bags)| sets(&feature, bags));
        if self.by > 0 {
            those(next(self.by))
                .for_each(|(feature, bags)| dispatch(isa, AskRows { feature, bags }));
        }
    }
}

/// Asks for what `AskRows` reads.
fn sets(feature: &FeatureView<'_>, bags: Bags<'_>) {
    let keys = bags.keys.iter().take(KEYS);
    match feature.rows {
        RowStore::Cached(cache) => Cached::new(cache, feature.table, feature.keys_end).ask(keys),
        RowStore::Resident(table) => keys.for_each(|key| table.prefetch(*key)),
    }
}

/// The first rows of a feature, asked for.
struct AskRows<'a> {
    feature: FeatureView<'a>,
    bags: Bags<'a>,
}

impl Job for AskRows<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let FeatureView { rows, table, keys_end, .. } = self.feature;
        let keys = self.bags.keys.iter().take(KEYS);
        match rows {
            RowStore::Cached(cache) => Cached::new(cache, table, keys_end).ask_rows::<S>(keys),
            RowStore::Resident(table) => {
                keys.filter_map(|key| table.slot(*key)).for_each(|slot| table.prefetch_row(slot))
            }
        }
    }
}
