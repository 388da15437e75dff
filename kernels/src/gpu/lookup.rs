//! The query of a batch on the GPU, and what follows from it: the miss list filled from the ring
//! that the kernel left in host memory, the rows that came from flash put into the caches, the open
//! bags pooled. To the host's miss list it makes no difference who queried. All features go in one
//! launch, and where every row is there nothing else happens. Never reads flash.

use crate::cache::Epoch;
use crate::cache::address::{RowKey, TableHasher};
use crate::cache::codec::{Codec, RowFormat};
use crate::cuda::driver::{Gpu, Result, Stream};
use crate::cuda::memory::{Buffer, Mapped};
use crate::gpu::launch::{
    ABSENT, Absents, BagNumber, BagView, CacheView, Counts, FeatureView, Finish, MISSING, NO_SLOT,
    QueryMemory, Ref, Ring,
};
use crate::gpu::tables::{DeviceTables, RowChanges, TableStorage};
use crate::lookup::miss_list::{Miss, MissList, RowState};
use crate::lookup::{Bags, LookupStatus, Pooling};
use std::sync::Arc;

/// One sparse feature, and where its vectors go on the device.
pub struct FeatureOnDevice<'a> {
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
    /// Keys of a bag at most.
    pub hotness_max: usize,
    /// Where the network input begins that it feeds, `[batch_max, stride]` f32.
    pub input: u64,
    /// Columns of that input.
    pub stride: usize,
    /// First column of the feature.
    pub column: usize,
    /// Columns that the feature fills.
    pub width: usize,
}

/// Where the query reads a request's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// Where the host wrote them.
    InPlace,
    /// In device memory, where one copy on the stream brings them.
    Brought,
}

impl Keys {
    /// What suits `gpu`: a bus between it and the host is crossed once, and in one piece.
    pub fn on(gpu: &Gpu) -> Self {
        if gpu.integrated() { Self::InPlace } else { Self::Brought }
    }
}

/// Sizes of a worker's requests.
#[derive(Clone, Copy, Debug)]
pub struct LookupLimits {
    /// Samples of a request at most.
    pub batch_max: usize,
    /// Lookups that may wait for rows at once.
    pub misses_max: usize,
    /// Bytes of the longest row of any table.
    pub row_bytes_max: usize,
    /// Where keys are read.
    pub keys: Keys,
}

/// A request's keys and offsets in one piece, as words: the keys of each feature, with room for the
/// longest bags, then the offsets of each. Everything lies closer together the fewer samples there
/// are.
struct Request {
    words: Mapped<u32>,
    /// Where the device reads it, if not in `words`.
    brought: Option<Buffer<u32>>,
    /// Longest bags of all features together, and how many features.
    lookups: usize,
    features: usize,
    /// Samples of the request in hand.
    samples: usize,
}

impl Request {
    fn words(lookups: usize, features: usize, samples: usize) -> usize {
        2 * lookups * samples + features * (samples + 1)
    }

    fn new(gpu: &Arc<Gpu>, lookups: usize, features: usize, limits: LookupLimits) -> Result<Self> {
        let words = Self::words(lookups, features, limits.batch_max);
        let brought = (limits.keys == Keys::Brought).then(|| gpu.buffer(words)).transpose()?;
        Ok(Self { words: gpu.mapped(words)?, brought, lookups, features, samples: 0 })
    }

    /// Where the device finds the keys and the offsets of `samples` samples.
    fn addresses(&self, samples: usize) -> (u64, u64) {
        let keys = self.brought.as_ref().map_or(self.words.address(), Buffer::address);
        (keys, keys + 8 * (self.lookups * samples) as u64)
    }

    fn put_keys(&mut self, keys_before: usize, keys: &[u64]) {
        let words = &mut self.words[2 * keys_before * self.samples..][..2 * keys.len()];
        for (words, key) in words.chunks_exact_mut(2).zip(keys) {
            words.copy_from_slice(&[*key as u32, (*key >> 32) as u32]);
        }
    }

    /// The offsets of a feature, `[samples + 1]`.
    fn offsets(&self, feature: usize) -> &[u32] {
        &self.words[2 * self.lookups * self.samples + feature * (self.samples + 1)..]
            [..=self.samples]
    }

    fn offsets_mut(&mut self, feature: usize) -> &mut [u32] {
        &mut self.words[2 * self.lookups * self.samples + feature * (self.samples + 1)..]
            [..=self.samples]
    }
}

/// Looks up one batch at a time. Takes all memory when it is made.
pub struct GpuLookup {
    tables: Arc<DeviceTables>,
    stream: Stream,
    features: Buffer<FeatureView>,
    views: Box<[FeatureView]>,
    /// For each feature the longest bag.
    hotness: Box<[usize]>,
    /// Kept for the features.
    _default_rows: Buffer<f32>,
    limits: LookupLimits,
    /// Samples of the batch in hand.
    batch: usize,
    request: Request,
    ring: Ring,
    counters: Buffer<u32>,
    only: Mapped<BagNumber>,
    finish: Finish,
    changes: RowChanges,
}

impl GpuLookup {
    /// A lookup of `features` within `limits`.
    ///
    /// # Errors
    /// The GPU has no memory for it.
    pub fn new(
        tables: &Arc<DeviceTables>,
        features: &[FeatureOnDevice<'_>],
        limits: LookupLimits,
    ) -> Result<Self> {
        let (gpu, misses_max) = (tables.gpu(), limits.misses_max.max(1));
        let limits = LookupLimits { misses_max, ..limits };
        let stream = gpu.stream()?;
        let defaults: Vec<f32> = features.iter().flat_map(|f| f.default_row).copied().collect();
        let mut default_rows = gpu.buffer(defaults.len())?;
        stream.upload(&defaults, &mut default_rows, 0)?;
        let (mut lookups, mut default_row) = (0, default_rows.address());
        let mut views = Vec::with_capacity(features.len());
        for feature in features {
            let mut view = view_of(tables, feature);
            view.default_row = default_row;
            view.keys_before = lookups as u64;
            lookups += feature.hotness_max;
            default_row += size_of_val(feature.default_row) as u64;
            views.push(view);
        }
        let mut on_device = gpu.buffer(views.len())?;
        stream.upload(&views, &mut on_device, 0)?;
        let bags = limits.batch_max * features.len();
        let lookup = Self {
            features: on_device,
            views: views.into(),
            hotness: features.iter().map(|f| f.hotness_max).collect(),
            _default_rows: default_rows,
            limits,
            batch: 0,
            request: Request::new(gpu, lookups, features.len(), limits)?,
            ring: ring(gpu, bags, limits)?,
            counters: gpu.buffer(5)?,
            only: gpu.mapped(bags)?,
            finish: Finish::new(gpu, misses_max)?,
            changes: RowChanges::new(tables, misses_max)?,
            tables: Arc::clone(tables),
            stream,
        };
        // One sample without keys: a driver loads a kernel when it is first launched, for which it
        // takes memory.
        lookup.launch(limits.batch_max.min(1))?;
        lookup.finish(1)?;
        lookup.stream.wait()?;
        Ok(lookup)
    }

    /// All bytes that such a lookup takes, but for the tables; `lookups_max` are those of one
    /// sample.
    pub fn bytes(features: usize, lookups_max: usize, limits: LookupLimits) -> usize {
        let LookupLimits { batch_max, misses_max, row_bytes_max, keys } = limits;
        let (places, misses_max) = (if keys == Keys::Brought { 2 } else { 1 }, misses_max.max(1));
        let bag = size_of::<Absents>() + 2 * size_of::<BagNumber>();
        let miss =
            2 * size_of::<BagView>() + size_of::<Ref>() + row_bytes_max.next_multiple_of(4) + 4;
        places * 4 * Request::words(lookups_max, features, batch_max)
            + batch_max * bag * features
            + misses_max * miss
            + RowChanges::bytes(misses_max)
    }

    /// The stream that everything is on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The tables.
    pub fn tables(&self) -> &Arc<DeviceTables> {
        &self.tables
    }

    /// Begins the query of `batch` samples, `bags(f)` for feature `f`: one launch, no wait, and
    /// where keys are brought one copy. Behind it on the stream the inputs are whole if nothing was
    /// missing.
    ///
    /// # Errors
    /// The GPU refuses the launch.
    pub fn begin<'a>(&mut self, batch: usize, bags: impl Fn(usize) -> Bags<'a>) -> Result<()> {
        self.take((batch, batch), bags);
        self.bring(batch)?;
        self.launch(batch)
    }

    /// Lays the keys and offsets of a batch out, and goes on to `samples` with samples that have no
    /// keys.
    pub fn take<'a>(&mut self, (batch, samples): (usize, usize), bags: impl Fn(usize) -> Bags<'a>) {
        assert!((batch..=self.limits.batch_max).contains(&samples));
        (self.batch, self.request.samples) = (batch, samples);
        // An empty batch launches nothing.
        self.ring.counts[0] = Counts::default();
        for (f, view) in self.views.iter().enumerate() {
            let (Bags { keys, offsets }, hotness) = (bags(f), self.hotness[f]);
            let offsets = &offsets[..=batch];
            let keys = &keys[..offsets[batch] as usize];
            // What the kernel relies on: all keys are in the feature's part, no bag is longer than
            // the miss list.
            assert!(
                offsets[0] == 0
                    && offsets
                        .windows(2)
                        .all(|o| o[0] <= o[1] && (o[1] - o[0]) as usize <= hotness)
            );
            self.request.put_keys(view.keys_before as usize, keys);
            let to = self.request.offsets_mut(f);
            to[..=batch].copy_from_slice(offsets);
            to[batch..].fill(offsets[batch]);
        }
    }

    /// Puts what the device needs to bring a batch that was laid out for `samples` onto the stream;
    /// for a graph to record, too.
    ///
    /// # Errors
    /// The GPU refuses.
    pub fn bring(&self, samples: usize) -> Result<()> {
        let Request { words, brought, lookups, features, .. } = &self.request;
        let Some(brought) = brought else { return Ok(()) };
        self.stream.bring(words, brought, Request::words(*lookups, *features, samples))
    }

    /// Launches the query of a batch that was laid out for `samples`, on its stream; for a graph to
    /// record, too.
    ///
    /// # Errors
    /// The GPU refuses the launch.
    pub fn launch(&self, samples: usize) -> Result<()> {
        assert!(samples <= self.limits.batch_max);
        // As many warps as keep every multiprocessor busy, and a few samples a warp beyond that.
        let warps = self.tables.gpu().processors() as usize * 64;
        let tile = (samples * self.views.len() / warps).clamp(1, 32);
        self.tables.kernels.query(&self.stream, &self.memory(samples), None, samples, tile)
    }

    fn memory(&self, samples: usize) -> QueryMemory<'_> {
        let Self { features, request, ring, counters, .. } = self;
        let (keys, offsets) = request.addresses(samples);
        QueryMemory { features, keys, offsets, samples, ring, counters }
    }

    fn bag(&self, number: BagNumber) -> usize {
        let offsets = &self.request.offsets(number.feature as usize)[number.sample as usize..];
        (offsets[1] - offsets[0]) as usize
    }

    /// Waits for the query and notes in `misses`, which is empty, what it left open; counts the
    /// rows that were there in `statuses`, which are of the batch and were not counted in before.
    /// Returns whether bags are left for `again`: there was no room for them, or a wide row changed
    /// as it was added.
    ///
    /// # Errors
    /// The GPU failed.
    pub fn collect(
        &mut self,
        misses: &mut MissList,
        statuses: &mut [LookupStatus],
    ) -> Result<bool> {
        self.stream.wait()?;
        for f in 0..self.views.len() {
            let offsets = &self.request.offsets(f)[..=self.batch];
            statuses.iter_mut().zip(offsets.windows(2)).for_each(|(s, o)| s.fresh += o[1] - o[0]);
        }
        Ok(self.note(misses, statuses))
    }

    /// Takes what the ring holds; every bag of the launch is already counted as fresh.
    fn note(&mut self, misses: &mut MissList, statuses: &mut [LookupStatus]) -> bool {
        let Counts { bags, absents, again, .. } = self.ring.counts[0];
        for Absents { sample, count } in &self.ring.absents[..absents as usize] {
            let status = &mut statuses[*sample as usize];
            status.fresh -= count;
            status.absent += count;
        }
        for number in 0..again as usize {
            let bag = self.ring.again[number];
            statuses[bag.sample as usize].fresh -= self.bag(bag) as u32;
            self.only[number] = bag;
        }
        for bag in &self.ring.bags[..bags as usize] {
            statuses[bag.sample as usize].fresh -= bag.refs;
            self.note_bag(bag, misses);
        }
        again > 0
    }

    fn note_bag(&self, bag: &BagView, misses: &mut MissList) {
        let view = &self.views[bag.feature as usize];
        misses.open(bag.feature as u16, bag.sample as usize, bag.done as usize);
        for at in bag.first as usize..(bag.first + bag.refs) as usize {
            let Ref { key, epoch, kind } = self.ring.refs[at];
            match kind {
                MISSING => misses.miss(RowKey { table: view.table as u16, key }, Epoch::of(epoch)),
                ABSENT => misses.absent(),
                _ => misses.keep(
                    &self.ring.kept[4 * at * self.ring.kept_stride..]
                        [..view.cache.row_bytes as usize],
                ),
            }
        }
    }

    /// After the rows of `misses` were read: puts the fresh ones into the caches, pools the open
    /// bags, counts their rows, and waits for it.
    ///
    /// # Errors
    /// The GPU failed.
    pub fn settle(&mut self, misses: &MissList, statuses: &mut [LookupStatus]) -> Result<()> {
        self.ready(misses, statuses)?;
        self.finish(misses.bags().len())?;
        self.settled()
    }

    /// Begins to put the fresh rows into the caches, and tells the next `finish` of the open bags;
    /// counts their rows.
    pub(crate) fn ready(&mut self, misses: &MissList, statuses: &mut [LookupStatus]) -> Result<()> {
        let Some((rows, stride)) = misses.staging() else {
            unreachable!("the misses of a GPU's worker are staged where the GPU reaches them")
        };
        for miss in misses.list().iter().filter(|m| misses.state(m.slot) == RowState::Fresh) {
            self.changes.add(miss.row, miss.slot, miss.epoch);
        }
        self.changes.begin_insert(rows, stride)?;
        for (number, bag) in misses.bags().iter().enumerate() {
            let first = bag.first_ref as usize;
            for (slot, (state, fresh)) in
                self.finish.slots[first..].iter_mut().zip(misses.slots_of(bag))
            {
                *slot = fresh.unwrap_or(NO_SLOT);
                statuses[bag.sample as usize].count(state);
            }
            let (feature, first) = (u32::from(bag.feature), first as u32);
            self.finish.bags[number] =
                BagView { feature, sample: bag.sample, done: bag.done, first, refs: bag.refs };
        }
        self.finish.set(&self.features, misses.bags().len(), (rows, stride));
        Ok(())
    }

    /// Puts the pooling of the open bags, at most `bags_max`, onto the stream; for a graph to
    /// record, too.
    pub(crate) fn finish(&self, bags_max: usize) -> Result<()> {
        self.tables.kernels.finish(&self.stream, &self.finish, bags_max)
    }

    /// Waits until the rows are in the caches and all that was put onto the stream is done: the
    /// staged rows are free again.
    pub(crate) fn settled(&self) -> Result<()> {
        self.stream.after(self.changes.made())?;
        self.stream.wait()
    }

    /// Queries the bags that were left, and waits; as [`GpuLookup::collect`].
    ///
    /// # Errors
    /// The GPU failed.
    pub fn again(&mut self, misses: &mut MissList, statuses: &mut [LookupStatus]) -> Result<bool> {
        let count = self.ring.counts[0].again as usize;
        for number in 0..count {
            let bag = self.only[number];
            statuses[bag.sample as usize].fresh += self.bag(bag) as u32;
        }
        let memory = self.memory(self.request.samples);
        self.tables.kernels.query(&self.stream, &memory, Some(&self.only), count, 1)?;
        self.stream.wait()?;
        Ok(self.note(misses, statuses))
    }

    /// Puts rows that were read ahead into the caches: `rows` are staged in the slots that they
    /// name. Returns how many went in.
    ///
    /// # Errors
    /// The GPU failed.
    pub fn insert<'a>(
        &mut self,
        misses: &MissList,
        rows: impl Iterator<Item = &'a Miss>,
    ) -> Result<usize> {
        let Some((staged, stride)) = misses.staging() else { return Ok(0) };
        rows.for_each(|miss| self.changes.add(miss.row, miss.slot, miss.epoch));
        if self.changes.is_empty() {
            return Ok(0);
        }
        Ok(self.changes.insert(staged, stride)?.iter().map(|&done| usize::from(done)).sum())
    }

    /// Tells of each of `rows` whether it is cached, and its set's epoch.
    ///
    /// # Errors
    /// The GPU failed.
    pub fn probe(
        &mut self,
        rows: &mut [Miss],
        mut each: impl FnMut(&mut Miss, bool, Epoch),
    ) -> Result<()> {
        rows.iter().for_each(|miss| self.changes.add(miss.row, 0, miss.epoch));
        self.changes.probe(|number, cached, epoch| each(&mut rows[number], cached, epoch))
    }

    /// After an error of any of these: waits until nothing that was begun reads or writes what the
    /// next request does.
    ///
    /// # Errors
    /// The GPU is gone.
    pub fn give_up(&mut self) -> Result<()> {
        self.changes.give_up()?;
        self.stream.wait()
    }
}

fn ring(gpu: &Arc<Gpu>, bags: usize, limits: LookupLimits) -> Result<Ring> {
    let LookupLimits { misses_max, row_bytes_max, .. } = limits;
    let kept_stride = row_bytes_max.div_ceil(4);
    Ok(Ring {
        counts: gpu.mapped(1)?,
        bags: gpu.mapped(misses_max)?,
        refs: gpu.mapped(misses_max)?,
        kept: gpu.mapped(4 * misses_max * kept_stride)?,
        absents: gpu.mapped(bags)?,
        again: gpu.mapped(bags)?,
        kept_stride,
    })
}

/// A feature as the kernels see it, but for what lies beside the other features'.
fn view_of(tables: &DeviceTables, feature: &FeatureOnDevice<'_>) -> FeatureView {
    let format = feature.format;
    let codec = match format.codec() {
        Codec::F32 => 0,
        Codec::F16 => 1,
        Codec::U8 => 2,
        Codec::U4 => 3,
    };
    let pooling = match feature.pooling {
        Pooling::Sum => 0,
        Pooling::Mean => 1,
        Pooling::None => 2,
    };
    assert!(
        feature.default_row.len() == format.dim()
            && feature.column + feature.width <= feature.stride
    );
    let rows_out = if feature.pooling == Pooling::None { feature.hotness_max } else { 1 };
    assert_eq!(feature.width, rows_out * format.dim());
    let view = FeatureView {
        out: feature.input + 4 * feature.column as u64,
        stride: feature.stride as u64,
        keys_end: feature.keys_end.unwrap_or(0),
        has_end: feature.keys_end.is_some().into(),
        table: feature.table.into(),
        dim: format.dim() as u32,
        width: feature.width as u32,
        unit: format.unit(),
        codec,
        pooling,
        ..FeatureView::default()
    };
    match tables.place(feature.table) {
        TableStorage::Cached(number) => {
            let cache = tables.cache_view(number);
            assert_eq!(cache.row_bytes as usize, format.row_bytes());
            match tables.namer(number, feature.table) {
                TableHasher::Indexed { base, end } => {
                    FeatureView { cache, base, end: end as u32, ..view }
                }
                TableHasher::Hashed { salt, .. } => FeatureView { cache, salt, ..view },
            }
        }
        TableStorage::Resident(number) => {
            let table = tables.resident(number);
            assert_eq!(table.row_bytes, format.row_bytes());
            let shape = CacheView {
                row_bytes: table.row_bytes as u32,
                row: table.row as u32,
                ..CacheView::default()
            };
            let (place, hashes, buckets, bucket_count) = match &table.index {
                None => (1, 0, 0, 0),
                Some((hashes, buckets)) => {
                    (2, hashes.address(), buckets.address(), buckets.len() as u64 - 1)
                }
            };
            let (rows, count) = (table.rows.address(), table.count as u64);
            FeatureView { cache: shape, rows, count, place, hashes, buckets, bucket_count, ..view }
        }
    }
}
