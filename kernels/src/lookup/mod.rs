//! The verb `query`: probe, decode, pool and concatenate in one pass, straight into the dense
//! network's input. Bags with a missing row stop at it and are completed by `finish` once their
//! rows were fetched; a bag's rows are always added in key order, so the bits do not depend on what
//! was cached.

pub mod feature_prefetch;
pub mod miss_list;
pub(crate) mod pipeline;
pub(crate) mod pooling;
pub mod roofline;

use crate::cache::Cache;
use crate::cache::address::RowKey;
use crate::cache::codec::RowFormat;
use crate::cache::resident::Resident;
use crate::lookup::miss_list::{MissList, OpenBag, RowState, Scratch};
use crate::lookup::pipeline::{Ahead, Cached, Found, Source};
use crate::simd::isa::Isa;
use crate::simd::{Job, Simd, dispatch, drain};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How the rows of a bag become one vector. An empty bag is all zeros under each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// The sum of the rows, from zero, in key order.
    Sum,
    /// The sum divided by the number of keys.
    Mean,
    /// The rows side by side, `hotness_max` of them, zeros where the bag is shorter.
    None,
}

/// Where a feature's rows are looked for.
#[derive(Clone, Copy)]
pub enum RowStore<'a> {
    /// In the embedding cache; what is not there is a miss.
    Cached(&'a Cache),
    /// In a resident table; what is not there is absent.
    Resident(&'a Resident),
}

/// One sparse feature as the kernel sees it.
#[derive(Clone, Copy)]
pub struct FeatureView<'a> {
    /// The feature's number, handed back in every open bag.
    pub id: u16,
    /// The table's number.
    pub table: u16,
    /// The table's rows as bytes.
    pub format: RowFormat,
    /// Keys from here up are absent (index tables).
    pub keys_end: Option<u64>,
    /// The row that answers for a key that is absent, damaged or late, `[dim]`.
    pub default_row: &'a [f32],
    /// How a bag becomes a vector.
    pub pooling: Pooling,
    /// Where to look.
    pub rows: RowStore<'a>,
    /// First column of the feature in its network input.
    pub column: usize,
    /// Columns that the feature fills.
    pub width: usize,
}

/// A feature's keys in the jagged layout: sample `s` has `keys[offsets[s]..offsets[s + 1]]`.
#[derive(Clone, Copy)]
pub struct Bags<'a> {
    /// All keys, `[offsets[batch]]`.
    pub keys: &'a [u64],
    /// Where each sample's keys begin, `[batch + 1]`.
    pub offsets: &'a [u32],
}

/// A network input, `[batch, stride]`, row by row.
pub struct Input<'a> {
    /// The values.
    pub data: &'a mut [f32],
    /// Columns of the whole input.
    pub stride: usize,
}

/// What the rows of one sample were. Every lookup is counted once, in exactly one of the counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookupStatus {
    /// Lookups answered with the live generation's own row.
    pub fresh: u32,
    /// Lookups answered with the default row because the miss policy or the deadline did not wait.
    pub defaulted: u32,
    /// Lookups of keys that the model does not have, answered with the default row.
    pub absent: u32,
    /// Lookups of rows whose flash page failed its check, answered with the default row.
    pub damaged: u32,
    /// Whether the deadline cut fetches short.
    pub late: bool,
}

impl LookupStatus {
    /// Adds another sample's counts.
    pub fn add(&mut self, other: &LookupStatus) {
        self.fresh += other.fresh;
        self.defaulted += other.defaulted;
        self.absent += other.absent;
        self.damaged += other.damaged;
        self.late |= other.late;
    }

    /// All lookups.
    pub fn lookups(&self) -> u64 {
        [self.fresh, self.defaulted, self.absent, self.damaged].map(u64::from).iter().sum()
    }

    pub(crate) fn count(&mut self, state: RowState) {
        match state {
            RowState::Fresh => self.fresh += 1,
            RowState::Pending => self.defaulted += 1,
            RowState::Late => {
                self.defaulted += 1;
                self.late = true;
            }
            RowState::Absent => self.absent += 1,
            RowState::Damaged => self.damaged += 1,
        }
    }
}

impl FeatureView<'_> {
    /// Pools samples `from..` into `input`; rows that miss go to `misses`. Returns the number of
    /// samples done: fewer than the batch when `misses` has no room for the next bag. The caller
    /// then fetches, calls [`FeatureView::finish`] on every open bag, clears the list and calls
    /// again.
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

    #[inline(always)]
    fn columns<'o>(&self, input: &'o mut Input<'_>, sample: usize) -> &'o mut [f32] {
        let start = sample * input.stride + self.column;
        &mut input.data[start..start + self.width]
    }

    /// The columns that the row at `position` of its bag goes to, and whether it is the first to go
    /// there.
    #[inline(always)]
    fn place<'o>(&self, position: usize, out: &'o mut [f32]) -> (&'o mut [f32], bool) {
        let dim = self.format.dim();
        match self.pooling {
            Pooling::None => (&mut out[position * dim..(position + 1) * dim], true),
            Pooling::Sum | Pooling::Mean => (out, position == 0),
        }
    }

    #[inline(always)]
    fn add_row<S: Simd>(&self, bytes: &[u8], position: usize, out: &mut [f32]) {
        let (out, first) = self.place(position, out);
        self.format.accumulate::<S>(bytes, out, first);
    }

    fn add_default(&self, position: usize, out: &mut [f32]) {
        let (out, first) = self.place(position, out);
        out.iter_mut()
            .zip(self.default_row)
            .for_each(|(o, v)| *o = if first { 0.0 } else { *o } + v);
    }

    /// Completes the columns of a bag whose `keys` rows are all added.
    #[inline(always)]
    fn close(&self, keys: usize, out: &mut [f32]) {
        match self.pooling {
            Pooling::Mean if keys > 1 => out.iter_mut().for_each(|o| *o /= keys as f32),
            Pooling::None => out[keys * self.format.dim()..].fill(0.0),
            _ if keys == 0 => out.fill(0.0),
            _ => {}
        }
    }

    /// Pools the rest of an open bag of this feature from the staged rows.
    pub fn finish(
        &self,
        isa: Isa,
        bag: &OpenBag,
        misses: &MissList,
        input: &mut Input<'_>,
        statuses: &mut [LookupStatus],
    ) {
        dispatch(
            isa,
            Finish {
                feature: self,
                bag,
                misses,
                input,
                status: &mut statuses[bag.sample as usize],
            },
        );
    }
}

/// Keys of a query for which it is not worth while to look ahead.
const FEW: usize = 2;
/// Bytes of a network input from which on it is written past the caches: less than that is still
/// near the core when the network reads it.
const STREAM_FROM: usize = 4 << 20;

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
            RowStore::Cached(cache) => self.pool::<S, _>(&Cached::new(cache, *table, *keys_end)),
        }
    }
}

impl Query<'_, '_> {
    /// Some bags in one go where all their rows are there, else bag by bag, and row by row where
    /// some row is missing.
    #[inline(always)]
    fn pool<S: Simd, F: Source>(mut self, source: &F) -> usize {
        let (feature, samples, offsets) = (self.feature, self.statuses.len(), self.bags.offsets);
        let (start, end) = (offsets[self.from] as usize, offsets[samples] as usize);
        let Scratch { mut row, mut ring } = self.misses.take_scratch();
        let stream = 4 * samples * self.input.stride > STREAM_FROM;
        let mut ahead =
            Ahead::new(source, &self.bags.keys[start..end], ring.get_or_insert_default(), stream);
        let mut done = self.from;
        while end - start <= FEW && done < samples {
            let bag = offsets[done] as usize..offsets[done + 1] as usize;
            if !self.misses.has_room(bag.len()) {
                break;
            }
            self.row_by_row::<S, F>(source, done, bag, &mut row);
            done += 1;
        }
        while done < samples {
            let begin = offsets[done] as usize;
            let end = begin + ahead.there::<S>(begin - start);
            let fits = |offset: &&u32| **offset as usize <= end;
            let run = match feature.pooling {
                Pooling::None => 0,
                _ => offsets[done + 1..=samples].iter().take_while(fits).count(),
            };
            let columns = &mut self.input.data[done * self.input.stride + feature.column..];
            let bounds = &offsets[done..=done + run];
            if run > 0 && ahead.sum::<S>(feature.format, bounds, start, columns, self.input.stride)
            {
                self.close(done..done + run);
                done += run;
                continue;
            }
            let bag = begin..offsets[done + 1] as usize;
            let out = feature.columns(self.input, done);
            let side_by_side = feature.pooling == Pooling::None;
            if ahead.pool::<S>(
                feature.format,
                bag.start - start..bag.end - start,
                side_by_side,
                out,
            ) {
                self.close(done..done + 1);
            } else if self.misses.has_room(bag.len()) {
                ahead.pass(feature.format, bag.start - start..bag.end - start);
                self.row_by_row::<S, F>(source, done, bag, &mut row);
            } else {
                break;
            }
            done += 1;
        }
        self.misses.give_scratch(Scratch { row, ring });
        if stream {
            drain();
        }
        done
    }

    /// Completes bags whose rows were all there.
    #[inline(always)]
    fn close(&mut self, samples: Range<usize>) {
        for sample in samples {
            let keys = self.bags.offsets[sample + 1] - self.bags.offsets[sample];
            self.statuses[sample].fresh += keys;
            self.feature.close(keys as usize, self.feature.columns(self.input, sample));
        }
    }

    /// Adds the rows of a bag that are there up to the first missing one; from that on, notes what
    /// the bag needs.
    #[inline(always)]
    fn row_by_row<S: Simd, F: Source>(
        &mut self,
        source: &F,
        sample: usize,
        bag: Range<usize>,
        buffer: &mut [u8],
    ) {
        let feature = self.feature;
        let keys = &self.bags.keys[bag.clone()];
        let out = feature.columns(self.input, sample);
        let (mut fresh, mut absent, mut missing) = (0, 0, None);
        for (position, &key) in keys.iter().enumerate() {
            match source.row::<S>(key, buffer) {
                Found::Row(bytes) => {
                    feature.add_row::<S>(bytes, position, out);
                    fresh += 1;
                }
                Found::Absent => {
                    feature.add_default(position, out);
                    absent += 1;
                }
                Found::Miss => {
                    missing = Some(position);
                    break;
                }
            }
        }
        self.statuses[sample].fresh += fresh;
        self.statuses[sample].absent += absent;
        let Some(position) = missing else {
            return feature.close(bag.len(), out);
        };
        self.misses.open(feature.id, sample, position);
        for &key in &keys[position..] {
            match source.row::<S>(key, buffer) {
                Found::Row(bytes) => self.misses.keep(&bytes[..feature.format.row_bytes()]),
                Found::Absent => self.misses.absent(),
                Found::Miss => {
                    let row = RowKey { table: feature.table, key };
                    self.misses.miss(row, source.epoch(row));
                }
            }
        }
    }
}

/// The rest of one bag.
struct Finish<'a, 'd> {
    feature: &'a FeatureView<'a>,
    bag: &'a OpenBag,
    misses: &'a MissList,
    input: &'a mut Input<'d>,
    status: &'a mut LookupStatus,
}

impl Job for Finish<'_, '_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { feature, bag, misses, input, status } = self;
        let out = feature.columns(input, bag.sample as usize);
        for (position, (state, bytes)) in (bag.done as usize..).zip(misses.rows_of(bag)) {
            match state {
                RowState::Fresh => feature.add_row::<S>(bytes, position, out),
                _ => feature.add_default(position, out),
            }
            status.count(state);
        }
        feature.close((bag.done + bag.refs) as usize, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::address::{KeySpaces, mix, unmix};
    use crate::cache::codec::Codec;
    use crate::lookup::feature_prefetch::FeaturePrefetch;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const KEYS: u64 = 400;
    const DIM: usize = 20;

    /// A row of one number, from which the key can be told.
    fn put(cache: &Cache, format: RowFormat, key: u64, write: u64) {
        let mut bytes = vec![0; format.row_bytes()];
        format.encode(&[(key * 1024 + write % 1000) as f32; DIM], &mut bytes).unwrap();
        let row = RowKey { table: 0, key };
        if write.is_multiple_of(3) {
            cache.update(row, &bytes);
        } else {
            cache.insert(row, &bytes, cache.epoch(row));
        }
    }

    /// Pools bags of `hotness` keys and checks all whose rows were there; returns how many.
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
            Bags { keys: &keys, offsets: &offsets },
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
            let named: u64 = keys.iter().sum();
            for row in columns.chunks(DIM) {
                assert!(row.iter().all(|v| *v == row[0]), "torn: {row:?}");
            }
            match pooling {
                Pooling::None => columns.chunks(DIM).zip(keys).for_each(|(row, key)| {
                    assert_eq!(row[0] as u64 / 1024, *key, "another key's row");
                }),
                _ => assert!(
                    (named * 1024..named * 1024 + 1000 * hotness as u64)
                        .contains(&(columns[0] as u64))
                ),
            }
        }
        bags - open.len()
    }

    /// What a query of `feature` leaves: columns, statuses, and of the miss list the bags with
    /// their rows' states.
    fn left_by(
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

    /// The plain form goes row by row, the others do not where all rows of a bag are there.
    #[test]
    fn every_family_leaves_what_the_plain_form_leaves() {
        let format = RowFormat::new(Codec::U8, DIM, 0).unwrap();
        let encode = |key: u64| {
            let mut bytes = vec![0; format.row_bytes()];
            let value = |i: usize| ((key as usize * 31 + i * 7) % 101) as f32 * 0.1 - 3.0;
            format.encode(&(0..DIM).map(value).collect::<Vec<_>>(), &mut bytes).unwrap();
            bytes
        };
        let mut hashes: Vec<u64> = (0..KEYS).map(mix).collect();
        hashes.sort_unstable();
        let all: Vec<u8> = (0..KEYS).flat_map(encode).collect();
        let sorted: Vec<u8> = hashes.iter().flat_map(|hash| encode(unmix(*hash))).collect();
        let indexed = Resident::indexed(format.row_bytes(), &all);
        let hashed = Resident::hashed(format.row_bytes(), hashes.into(), &sorted);
        let caches = [Some(2 * KEYS), None].map(|end| {
            let names = KeySpaces::new(vec![end]);
            let cache =
                Cache::new(format.row_bytes(), 2000 * (format.row_bytes() + 11), &names).unwrap();
            for key in (0..KEYS).filter(|key| key % 40 != 7) {
                let row = RowKey { table: 0, key };
                assert!(cache.insert(row, &encode(key), cache.epoch(row)));
            }
            cache
        });
        for round in 0..300u64 {
            // Bags of all lengths, now and then with a key that is not there, or that the model
            // does not have.
            let offsets: Vec<u32> = (0..20)
                .scan(0, |end, bag| {
                    *end += (mix(round * 20 + bag) % [1, 3, 12, 90][(round % 4) as usize]) as u32;
                    Some(*end)
                })
                .collect();
            let key = |i: u64| mix(round << 32 | i) % [KEYS, KEYS + 9][(round / 4 % 2) as usize];
            let keys: Vec<u64> = (0..u64::from(offsets[19])).map(key).collect();
            for pooling in [Pooling::Sum, Pooling::Mean, Pooling::None] {
                let width = if pooling == Pooling::None { DIM * 90 } else { DIM };
                for (rows, keys_end) in [
                    (RowStore::Cached(&caches[0]), Some(KEYS)),
                    (RowStore::Cached(&caches[1]), None),
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
                    let bags = Bags { keys: &keys, offsets: &offsets };
                    FeaturePrefetch::new(keys.len(), 2).ask(Isa::detect(), 0, |_| (feature, bags));
                    let plain = left_by(Isa::available()[0], &feature, bags);
                    for isa in Isa::available() {
                        assert_eq!(
                            left_by(isa, &feature, bags),
                            plain,
                            "{isa:?}, {pooling:?}, round {round}"
                        );
                    }
                }
            }
        }
    }

    /// Pools with writers at work in the same sets. A bag of 70 is summed in parts.
    #[test]
    fn pooled_rows_are_whole_and_those_of_their_keys() {
        let format = RowFormat::new(Codec::F32, DIM, 0).unwrap();
        let names = KeySpaces::new(vec![Some(KEYS)]);
        // With fewer slots than keys, rows drive each other out; with more, they are only updated.
        for slots in [KEYS as usize * 3 / 4, KEYS as usize * 3] {
            let cache =
                Cache::new(format.row_bytes(), slots * (format.row_bytes() + 7), &names).unwrap();
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
                                let there = pool(isa, cache, format, hotness, pooling);
                                pooled.fetch_add(there, Ordering::Relaxed);
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
