//! The lookup of one feature over a batch: `FeatureView::query` pools the bags whose rows are all
//! in memory, and `FeatureView::finish` pools the others once their rows were fetched. A bag of
//! hits goes through the pipeline; a bag with a missing row is read row by row and recorded on the
//! miss list. A query never waits for a row.

use crate::cache::address::RowKey;
use crate::lookup::feature::{Bags, FeatureView, Input, Place, Pooling, RowStore};
use crate::lookup::miss_list::{MissList, OpenBag, RowState, Scratch};
use crate::lookup::pipeline::{LookupPipeline, VALIDATE_KEYS};
use crate::lookup::row_source::{CachedRows, ReadResult, RowSource};
use crate::lookup::status::LookupStatus;
use crate::lookup::whole_rows::WholeRows;
use crate::simd::isa::Isa;
use crate::simd::{Job, Simd, dispatch, stream_fence};
use std::ops::Range;

/// Queries with at most so many keys do not use the pipeline, because its start takes longer than
/// it saves.
const UNPIPELINED_KEYS_MAX: usize = 2;
/// Bytes of a network input above which pooled bags are stored past the caches. A smaller input is
/// still in the CPU's caches when the network reads it.
const STREAM_BYTES_MIN: usize = 4 << 20;

impl FeatureView<'_> {
    /// Pools the samples from `from` on into `input`, and records bags with missing rows on
    /// `misses`. Returns the number of samples that are pooled or recorded: fewer than the batch if
    /// `misses` has no room for the next bag. The caller then fetches, calls
    /// [`FeatureView::finish`] for each recorded bag, clears `misses` and calls again.
    pub fn query(
        &self,
        isa: Isa,
        bags: Bags<'_>,
        from: usize,
        input: &mut Input<'_>,
        misses: &mut MissList,
        statuses: &mut [LookupStatus],
    ) -> usize {
        dispatch(isa, Query { feature: self, bags, from, input, misses, statuses })
    }

    /// Pools the rest of a recorded bag of this feature from the fetched rows. `bags` are those of
    /// the query.
    pub fn finish(
        &self,
        isa: Isa,
        bag: &OpenBag,
        bags: Bags<'_>,
        misses: &MissList,
        input: &mut Input<'_>,
        statuses: &mut [LookupStatus],
    ) {
        let status = &mut statuses[bag.sample as usize];
        let weights = bags.weights_of(bag.sample as usize);
        dispatch(isa, Finish { feature: self, bag, weights, misses, input, status });
    }
}

/// The query of one feature over a batch.
struct Query<'a, 'd> {
    feature: &'a FeatureView<'a>,
    bags: Bags<'a>,
    from: usize,
    input: &'a mut Input<'d>,
    misses: &'a mut MissList,
    statuses: &'a mut [LookupStatus],
}

impl Job for Query<'_, '_> {
    type Out = usize;

    #[inline(always)]
    fn run<S: Simd>(self) -> usize {
        let FeatureView { rows, table, keys_end, .. } = self.feature;
        match rows {
            RowStore::Resident(table) => self.pool::<S, _>(table),
            RowStore::Cached(cache) => match WholeRows::new(cache, *table, *keys_end) {
                Some(rows) => self.pool::<S, _>(&rows),
                None => self.pool::<S, _>(&CachedRows::new(cache, *table, *keys_end)),
            },
        }
    }
}

impl Query<'_, '_> {
    /// Pools consecutive bags together while all their rows are hits. Otherwise pools one bag, and
    /// if that fails, row by row.
    #[inline(always)]
    fn pool<S: Simd, R: RowSource>(mut self, source: &R) -> usize {
        let (feature, samples, offsets) = (self.feature, self.statuses.len(), self.bags.offsets);
        let (start, end) = (offsets[self.from] as usize, offsets[samples] as usize);
        let Scratch { mut row, mut ring } = self.misses.take_scratch();
        let stream = 4 * samples * self.input.stride > STREAM_BYTES_MIN;
        let keys = &self.bags.keys[start..end];
        // The ring is there, unless an earlier query panicked and did not give it back.
        let ring_of_query = ring.get_or_insert_default();
        let combine = feature.combine(self.bags.weights, start, end);
        let mut pipeline = LookupPipeline::new(source, keys, ring_of_query, combine, stream);
        let mut done = self.from;

        while end - start <= UNPIPELINED_KEYS_MAX && done < samples {
            let bag = offsets[done] as usize..offsets[done + 1] as usize;
            // Room for every key of the bag, because a bag is recorded whole or not at all.
            if !self.misses.has_room(bag.len()) {
                break;
            }
            self.row_by_row::<S, R>(source, done, bag, &mut row);
            done += 1;
        }

        while done < samples {
            // The bags that end before the first miss, together. They have at most `VALIDATE_KEYS`
            // keys, so the search looks at as many bags.
            let begin = offsets[done] as usize;
            let hits_end = begin + pipeline.hits_from::<S>(begin - start);
            let run = match feature.pooling {
                Pooling::None => 0,
                _ => offsets[done + 1..=samples.min(done + VALIDATE_KEYS)]
                    .partition_point(|end| *end as usize <= hits_end),
            };
            let columns = &mut self.input.data[done * self.input.stride + feature.column..];
            let (bounds, stride) = (&offsets[done..=done + run], self.input.stride);
            if run > 0 && pipeline.pool_bags::<S>(feature.format, bounds, start, columns, stride) {
                self.close_bags(done..done + run);
                done += run;
                continue;
            }

            // One bag. It is long, pooled side by side, was changed during the read, or has a miss.
            let bag = begin..offsets[done + 1] as usize;
            let of_query = bag.start - start..bag.end - start;
            let out = feature.columns(self.input, done);
            let side_by_side = feature.pooling == Pooling::None;
            if pipeline.pool_bag::<S>(feature.format, of_query.clone(), side_by_side, out) {
                self.close_bags(done..done + 1);
            } else if self.misses.has_room(bag.len()) {
                pipeline.prefetch_bag(feature.format, of_query);
                self.row_by_row::<S, R>(source, done, bag, &mut row);
            } else {
                break;
            }
            done += 1;
        }

        self.misses.give_scratch(Scratch { row, ring });
        if stream {
            stream_fence();
        }
        done
    }

    /// Completes bags whose rows were all hits.
    #[inline(always)]
    fn close_bags(&mut self, samples: Range<usize>) {
        let stays_a_sum = matches!(self.feature.pooling, Pooling::Sum | Pooling::Max);
        let bounds = self.bags.offsets[samples.start..].windows(2);
        for (sample, bounds) in samples.zip(bounds) {
            let keys = bounds[1] - bounds[0];
            self.statuses[sample].fresh += keys;
            // An empty bag must become zeros. For `Max` the pooling left negative infinity.
            if stays_a_sum && keys > 0 {
                continue;
            }
            let weights = self.bags.weights_of(sample);
            let out = self.feature.columns(self.input, sample);
            self.feature.close_bag(keys as usize, weights, out);
        }
    }

    /// Pools the rows of a bag up to the first miss. Records that miss and all later keys of the
    /// bag on the miss list.
    #[inline(always)]
    fn row_by_row<S: Simd, R: RowSource>(
        &mut self,
        source: &R,
        sample: usize,
        bag: Range<usize>,
        buffer: &mut [u8],
    ) {
        let feature = self.feature;
        let keys = &self.bags.keys[bag.clone()];
        let weights = self.bags.weights_of(sample);
        let out = feature.columns(self.input, sample);

        let (mut fresh, mut absent, mut first_miss) = (0, 0, None);
        for (position, &key) in keys.iter().enumerate() {
            match source.read_row::<S>(key, buffer) {
                ReadResult::Row(bytes) => {
                    feature.add_row::<S>(bytes, Place::of(position, weights), out);
                    fresh += 1;
                }
                ReadResult::Absent => {
                    feature.add_default(Place::of(position, weights), out);
                    absent += 1;
                }
                ReadResult::Miss(_) => {
                    first_miss = Some(position);
                    break;
                }
            }
        }
        self.statuses[sample].fresh += fresh;
        self.statuses[sample].absent += absent;
        let Some(position) = first_miss else {
            return feature.close_bag(bag.len(), weights, out);
        };

        self.misses.open_bag(feature.id, sample, position);
        for &key in &keys[position..] {
            match source.read_row::<S>(key, buffer) {
                ReadResult::Row(bytes) => {
                    // A copy: rows are added in key order, and the cache may evict this row while
                    // the missing one is read.
                    self.misses.stage_hit(&bytes[..feature.format.row_bytes()]);
                }
                ReadResult::Absent => self.misses.add_absent(),
                ReadResult::Miss(epoch) => {
                    self.misses.add_miss(RowKey { table: feature.table, key }, epoch);
                }
            }
        }
    }
}

/// The pooling of the rest of one recorded bag.
struct Finish<'a, 'd> {
    feature: &'a FeatureView<'a>,
    bag: &'a OpenBag,
    /// The weights of the bag's keys; empty if the feature has none.
    weights: &'a [f32],
    misses: &'a MissList,
    input: &'a mut Input<'d>,
    status: &'a mut LookupStatus,
}

impl Job for Finish<'_, '_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { feature, bag, weights, misses, input, status } = self;
        let out = feature.columns(input, bag.sample as usize);
        for (position, (state, bytes)) in (bag.done as usize..).zip(misses.rows_of(bag)) {
            let place = Place::of(position, weights);
            match state {
                RowState::Fresh => feature.add_row::<S>(bytes, place, out),
                _ => feature.add_default(place, out),
            }
            status.count(state);
        }
        feature.close_bag((bag.done + bag.entries) as usize, weights, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::Cache;
    use crate::cache::address::{KeySpaces, mix};
    use crate::cache::codec::{Codec, RowFormat};
    use crate::cache::resident::Resident;
    use crate::lookup::feature_prefetch::FeaturePrefetch;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const KEYS: u64 = 400;
    const DIM: usize = 20;

    /// Writes a row of one repeated number, which holds the key and the number of the write.
    fn put(cache: &Cache, format: RowFormat, key: u64, write: u64) {
        let mut bytes = vec![0; format.row_bytes()];
        format.encode(&[(key * 1024 + write % 1000) as f32; DIM], &mut bytes).unwrap();
        let row = RowKey { table: 0, key };
        if cache.is_whole() && write.is_multiple_of(64) {
            cache.invalidate(row);
        } else if write.is_multiple_of(3) {
            cache.update(row, &bytes);
        } else {
            cache.insert(row, &bytes, cache.epoch(row));
        }
    }

    /// Pools bags of `hotness` keys and checks each bag whose rows were all hits. Returns the
    /// number of those bags.
    fn pool(isa: Isa, cache: &Cache, format: RowFormat, hotness: usize, pooling: Pooling) -> usize {
        let keys: Vec<u64> = (0..KEYS * 3).map(|i| i * 7 % KEYS).collect();
        let offsets: Vec<u32> =
            (0..=keys.len() / hotness).map(|bag| (bag * hotness) as u32).collect();
        let width = if pooling == Pooling::None { DIM * hotness } else { DIM };
        let feature = FeatureView {
            id: 0,
            table: 0,
            format,
            keys_end: Some(KEYS),
            default_row: &[0.0; DIM],
            pooling,
            rows: RowStore::Cached(cache),
            column: 0,
            width,
        };
        let bags = offsets.len() - 1;
        let (mut data, mut statuses) =
            (vec![f32::NAN; bags * width], vec![LookupStatus::default(); bags]);
        let mut input = Input { data: &mut data, stride: width };
        let mut misses = MissList::new(keys.len(), format.row_bytes());
        let done = feature.query(
            isa,
            Bags::new(&keys, &offsets),
            0,
            &mut input,
            &mut misses,
            &mut statuses,
        );
        assert_eq!(done, bags);
        let open: Vec<usize> = misses.bags().iter().map(|bag| bag.sample as usize).collect();
        for (bag, columns) in data.chunks(width).enumerate().filter(|(bag, _)| !open.contains(bag))
        {
            assert_eq!(statuses[bag].fresh as usize, hotness);
            let keys = &keys[bag * hotness..][..hotness];
            let key_sum: u64 = keys.iter().sum();
            for row in columns.chunks(DIM) {
                assert!(row.iter().all(|v| *v == row[0]), "torn: {row:?}");
            }
            match pooling {
                Pooling::None => columns.chunks(DIM).zip(keys).for_each(|(row, key)| {
                    assert_eq!(row[0] as u64 / 1024, *key, "another key's row");
                }),
                _ => assert!(
                    (key_sum * 1024..key_sum * 1024 + 1000 * hotness as u64)
                        .contains(&(columns[0] as u64))
                ),
            }
        }
        bags - open.len()
    }

    /// Returns the columns, the statuses and the miss list after a query of `feature`.
    fn after_query(
        isa: Isa,
        feature: &FeatureView<'_>,
        bags: Bags<'_>,
    ) -> (Vec<u32>, Vec<LookupStatus>, Vec<String>) {
        let samples = bags.offsets.len() - 1;
        let (mut data, mut statuses) =
            (vec![7.0; samples * feature.width], vec![LookupStatus::default(); samples]);
        let mut input = Input { data: &mut data, stride: feature.width };
        let mut misses = MissList::new(bags.keys.len(), feature.format.row_bytes());
        let from = usize::from(samples > 3);
        assert_eq!(feature.query(isa, bags, from, &mut input, &mut misses, &mut statuses), samples);
        let open = misses.bags().iter().map(|bag| {
            let states: Vec<_> = misses.rows_of(bag).map(|(state, _)| state).collect();
            format!(
                "{bag:?}: {states:?}, {:?}",
                misses.list().iter().map(|miss| miss.row).collect::<Vec<_>>()
            )
        });
        let open = open.collect();
        (data.iter().map(|v| v.to_bits()).collect(), statuses, open)
    }

    /// Returns each pooling without weights, and with `weights` if it takes them.
    fn poolings(weights: &[f32]) -> impl Iterator<Item = (Pooling, &[f32])> {
        let all = [Pooling::Sum, Pooling::Mean, Pooling::Sqrtn, Pooling::None, Pooling::Max];
        let plain = all.into_iter().map(|pooling| (pooling, &[] as &[f32]));
        plain.chain(all.into_iter().take(3).map(move |pooling| (pooling, weights)))
    }

    /// Returns a hashed cache of indexed keys, one of sparse keys, and a whole cache. Each holds
    /// most rows.
    fn caches_without_some(format: RowFormat, encode: impl Fn(u64) -> Vec<u8>) -> [Cache; 3] {
        let (indexed_keys, sparse_keys) =
            (KeySpaces::new(vec![Some(2 * KEYS)]), KeySpaces::new(vec![None]));
        let bytes = 2000 * (format.row_bytes() + 11);
        [
            Cache::new(format.row_bytes(), bytes, &indexed_keys),
            Cache::new(format.row_bytes(), bytes, &sparse_keys),
            Cache::whole(format.row_bytes(), bytes, &indexed_keys),
        ]
        .map(|cache| {
            let cache = cache.unwrap();
            for key in (0..KEYS).filter(|key| key % 40 != 7) {
                let row = RowKey { table: 0, key };
                assert!(cache.insert(row, &encode(key), cache.epoch(row)));
            }
            cache
        })
    }

    /// The plain family pools row by row; the others pool bags of hits in the pipeline.
    #[test]
    fn every_family_gives_the_result_of_the_plain_family() {
        let format = RowFormat::new(Codec::U8, DIM, 0).unwrap();
        let encode = |key: u64| {
            let mut bytes = vec![0; format.row_bytes()];
            let value = |i: usize| ((key as usize * 31 + i * 7) % 101) as f32 * 0.1 - 3.0;
            format.encode(&(0..DIM).map(value).collect::<Vec<_>>(), &mut bytes).unwrap();
            bytes
        };
        let all: Vec<u8> = (0..KEYS).flat_map(encode).collect();
        let indexed = Resident::indexed(format.row_bytes(), &all);
        let hashes = (0..KEYS).map(mix).collect();
        let hashed = Resident::indexed(format.row_bytes(), &all).hashed(hashes);
        let caches = caches_without_some(format, encode);
        for round in 0..300u64 {
            // Bags of all lengths, some with a key that is not cached or that the model does not
            // have.
            let offsets: Vec<u32> = (0..20)
                .scan(0, |end, bag| {
                    *end += (mix(round * 20 + bag) % [1, 3, 12, 90][(round % 4) as usize]) as u32;
                    Some(*end)
                })
                .collect();
            let key = |i: u64| mix(round << 32 | i) % [KEYS, KEYS + 9][(round / 4 % 2) as usize];
            let keys: Vec<u64> = (0..u64::from(offsets[19])).map(key).collect();
            let weights: Vec<f32> = (0..keys.len()).map(|i| (i as f32 * 0.7).sin()).collect();
            for (pooling, weights) in poolings(&weights) {
                let width = if pooling == Pooling::None { DIM * 90 } else { DIM };
                for (rows, keys_end) in [
                    (RowStore::Cached(&caches[0]), Some(KEYS)),
                    (RowStore::Cached(&caches[1]), None),
                    (RowStore::Cached(&caches[2]), Some(KEYS)),
                    (RowStore::Cached(&caches[2]), None),
                    (RowStore::Resident(&indexed), None),
                    (RowStore::Resident(&hashed), None),
                ] {
                    let default_row = &[0.25; DIM];
                    let feature = FeatureView {
                        id: 3,
                        table: 0,
                        format,
                        keys_end,
                        default_row,
                        pooling,
                        rows,
                        column: 0,
                        width,
                    };
                    let bags = Bags { keys: &keys, offsets: &offsets, weights };
                    FeaturePrefetch::new(keys.len(), 2)
                        .prefetch(Isa::detect(), 0, |_| (feature, bags));
                    let plain = after_query(Isa::available()[0], &feature, bags);
                    for isa in Isa::available() {
                        assert_eq!(
                            after_query(isa, &feature, bags),
                            plain,
                            "{isa:?}, {pooling:?}, round {round}"
                        );
                    }
                }
            }
        }
    }

    /// Pools while writers change the same sets. A bag of 70 is pooled in parts.
    #[test]
    fn pooled_rows_are_whole_and_belong_to_their_keys() {
        let format = RowFormat::new(Codec::F32, DIM, 0).unwrap();
        let names = KeySpaces::new(vec![Some(KEYS)]);
        let of_slots =
            |slots| Cache::new(format.row_bytes(), slots * (format.row_bytes() + 7), &names);
        // With fewer slots than keys, rows evict each other; with more, they are only updated. In a
        // whole cache they are also removed.
        let whole = Cache::whole(format.row_bytes(), 1 << 20, &names);
        for cache in [of_slots(KEYS as usize * 3 / 4), of_slots(KEYS as usize * 3), whole] {
            let cache = cache.unwrap();
            (0..KEYS).for_each(|key| put(&cache, format, key, 1));
            let (pooled, finished) = (AtomicUsize::new(0), AtomicUsize::new(0));
            std::thread::scope(|scope| {
                for writer in 0..2u64 {
                    let (cache, finished) = (&cache, &finished);
                    scope.spawn(move || {
                        (0..60_000)
                            .for_each(|turn| put(cache, format, (turn * 7 + writer) % KEYS, turn));
                        finished.fetch_add(1, Ordering::Release);
                    });
                }
                for isa in Isa::available() {
                    let (cache, pooled, finished) = (&cache, &pooled, &finished);
                    scope.spawn(move || {
                        loop {
                            let last = finished.load(Ordering::Acquire) == 2;
                            for (hotness, pooling) in [
                                (1, Pooling::Sum),
                                (5, Pooling::Sum),
                                (4, Pooling::None),
                                (70, Pooling::Sum),
                            ] {
                                let hits = pool(isa, cache, format, hotness, pooling);
                                pooled.fetch_add(hits, Ordering::Relaxed);
                            }
                            if last {
                                return;
                            }
                        }
                    });
                }
            });
            assert!(pooled.into_inner() > 0);
        }
    }
}
