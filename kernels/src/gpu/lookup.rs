//! The query of a batch on the GPU. One launch queries all features; if every row is cached, no
//! other work follows. Otherwise the host fills the miss list from the ring that the kernel wrote
//! to host memory. After the caller has read the missing rows from flash, the host inserts them
//! into the caches and the GPU pools the open bags. The miss list is the same as after a query on
//! the CPU. Never reads flash.

use crate::cache::Epoch;
use crate::cache::address::{RowKey, TableHasher};
use crate::cache::codec::{Codec, RowFormat};
use crate::cuda::driver::{Gpu, Result, Stream};
use crate::cuda::memory::{Buffer, Mapped};
use crate::gpu::input_type::InputType;
use crate::gpu::launch::{
    AbsentCount, BagNumber, DeviceBag, DeviceCacheView, DeviceFeature, Entry, MissRing, NO_SLOT,
    OpenBags, QueryBags, QueryMemory, RequestAddresses, RingCounts, StagedRows,
};
use crate::gpu::numbers::{Alignment, CodecNumber, EntryKind, PoolingNumber, StorageNumber};
use crate::gpu::tables::{DeviceIndex, DeviceTables, RowChanges, TableStorage};
use crate::gpu::turns::Reader;
use crate::lookup::miss_list::{Miss, MissList, RowState};
use crate::lookup::{Bags, LookupStatus, Pooling};
use std::sync::Arc;

/// One sparse feature, and the location of its vectors on the device.
pub struct FeatureOnDevice<'a> {
    /// The table's number.
    pub table: u16,
    /// The encoding of the table's rows.
    pub format: RowFormat,
    /// End of an indexed table's keys: this key and the keys above are absent.
    pub keys_end: Option<u64>,
    /// The row that is used for a key that is absent, damaged or late, `[dim]`.
    pub default_row: &'a [f32],
    /// The function that makes a vector of a bag.
    pub pooling: Pooling,
    /// Whether each row is multiplied by its key's weight. Only sums have weights.
    pub weighted: bool,
    /// The largest number of keys in a bag.
    pub hotness_max: usize,
    /// Device address of the network input that the feature fills, `[batch_max, stride]`.
    pub input: u64,
    /// The type of that input. With F16, `stride`, `column` and the row's columns must be multiples
    /// of four.
    pub input_type: InputType,
    /// Columns of that input.
    pub stride: usize,
    /// First column of the feature.
    pub column: usize,
    /// Columns that the feature fills.
    pub width: usize,
}

/// The memory from which the query reads a request's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keys {
    /// The mapped host memory to which the host wrote them.
    InPlace,
    /// Device memory, to which one copy on the stream brings them.
    Copied,
}

impl Keys {
    /// Returns the choice for `gpu`. If there is a bus between host and GPU, keys should cross it
    /// once, in one piece.
    pub fn on(gpu: &Gpu) -> Self {
        if gpu.integrated() { Self::InPlace } else { Self::Copied }
    }
}

/// Sizes of a worker's requests.
#[derive(Clone, Copy, Debug)]
pub struct LookupLimits {
    /// The largest number of samples in a request.
    pub batch_max: usize,
    /// The largest number of lookups that wait for rows at the same time.
    pub misses_max: usize,
    /// Bytes of the longest row of any table.
    pub row_bytes_max: usize,
    /// The memory from which the query reads keys.
    pub keys: Keys,
}

/// The size of a request, for one sample.
#[derive(Clone, Copy, Debug)]
pub struct RequestRoom {
    /// Sparse features.
    pub features: usize,
    /// The sum of the longest bags of all features.
    pub lookups: usize,
    /// The same sum for the features with weights only.
    pub weights: usize,
}

impl RequestRoom {
    fn words(&self, samples: usize) -> usize {
        (2 * self.lookups + self.weights) * samples + self.features * (samples + 1)
    }
}

/// A request's keys, offsets and weights in one piece of words. First come the keys of each
/// feature, with room for the longest bags. Then come the offsets of each feature, and the weights
/// of those that have some. The layout depends on the number of samples.
struct Request {
    words: Mapped<u32>,
    /// The copy in device memory, with [`Keys::Copied`].
    copy: Option<Buffer<u32>>,
    room: RequestRoom,
    /// Number of samples for which the current request is laid out.
    samples: usize,
}

impl Request {
    fn new(gpu: &Arc<Gpu>, room: RequestRoom, limits: LookupLimits) -> Result<Self> {
        let words = room.words(limits.batch_max);
        let copy = (limits.keys == Keys::Copied).then(|| gpu.buffer(words)).transpose()?;
        Ok(Self { words: gpu.mapped(words)?, copy, room, samples: 0 })
    }

    /// Returns the device addresses of the parts of a request of `samples` samples.
    fn addresses(&self, samples: usize) -> RequestAddresses {
        let keys = self.copy.as_ref().map_or(self.words.address(), Buffer::address);
        let offsets = keys + 8 * (self.room.lookups * samples) as u64;
        let weights = offsets + 4 * (self.room.features * (samples + 1)) as u64;
        RequestAddresses { keys, offsets, weights }
    }

    fn put_keys(&mut self, keys_before: usize, keys: &[u64]) {
        let words = &mut self.words[2 * keys_before * self.samples..][..2 * keys.len()];
        for (words, key) in words.chunks_exact_mut(2).zip(keys) {
            words.copy_from_slice(&[*key as u32, (*key >> 32) as u32]);
        }
    }

    fn put_weights(&mut self, weights_before: usize, weights: &[f32]) {
        let Self { room, samples, .. } = *self;
        let first = 2 * room.lookups * samples + room.features * (samples + 1);
        let words = &mut self.words[first + weights_before * samples..][..weights.len()];
        words.iter_mut().zip(weights).for_each(|(word, weight)| *word = weight.to_bits());
    }

    /// Returns the offsets of a feature, `[samples + 1]`.
    fn offsets(&self, feature: usize) -> &[u32] {
        &self.words[2 * self.room.lookups * self.samples + feature * (self.samples + 1)..]
            [..=self.samples]
    }

    fn offsets_mut(&mut self, feature: usize) -> &mut [u32] {
        &mut self.words[2 * self.room.lookups * self.samples + feature * (self.samples + 1)..]
            [..=self.samples]
    }
}

/// Looks up one batch at a time. All memory is allocated at the start.
pub struct GpuLookup {
    tables: Arc<DeviceTables>,
    stream: Stream,
    features: Buffer<DeviceFeature>,
    views: Box<[DeviceFeature]>,
    /// The keys of each feature's longest bag.
    hotness_max: Box<[usize]>,
    /// The default rows, to which the features point.
    _default_rows: Buffer<f32>,
    limits: LookupLimits,
    /// Samples of the current batch.
    batch: usize,
    request: Request,
    ring: MissRing,
    counters: Buffer<u32>,
    requeries: Mapped<BagNumber>,
    open: OpenBags,
    changes: RowChanges,
    reader: Reader,
    /// For each sample of the batch whether a query left one of its bags open.
    is_open: Box<[bool]>,
}

impl GpuLookup {
    /// Allocates a lookup of `features` within `limits`.
    ///
    /// # Errors
    /// `CudaError::Driver` if the GPU has no memory for it.
    pub fn new(
        tables: &Arc<DeviceTables>,
        features: &[FeatureOnDevice<'_>],
        limits: LookupLimits,
    ) -> Result<Self> {
        let (gpu, misses_max) = (tables.gpu(), limits.misses_max.max(1));
        let limits = LookupLimits { misses_max, ..limits };
        let stream = gpu.stream()?;

        let defaults: Vec<f32> = features.iter().flat_map(|f| f.default_row).copied().collect();
        let default_rows = gpu.buffer(defaults.len())?;
        stream.upload(&defaults, &default_rows, 0)?;
        let mut room = RequestRoom { features: features.len(), lookups: 0, weights: 0 };
        let mut default_row = default_rows.address();
        let mut views = Vec::with_capacity(features.len());
        for feature in features {
            let mut view = view_of(tables, feature);
            view.default_row = default_row;
            view.keys_before = room.lookups as u64;
            view.weights_before = room.weights as u64;
            // A kernel counts the weights of a request with 32 bits.
            assert!((room.lookups * limits.batch_max) < u32::MAX as usize);
            // A kernel counts the columns of an input with 32 bits.
            assert!((limits.batch_max as u64).saturating_mul(view.stride) < u64::from(u32::MAX));
            room.lookups += feature.hotness_max;
            room.weights += if feature.weighted { feature.hotness_max } else { 0 };
            default_row += size_of_val(feature.default_row) as u64;
            views.push(view);
        }
        let on_device = gpu.buffer(views.len())?;
        stream.upload(&views, &on_device, 0)?;

        let bags = limits.batch_max * features.len();
        let lookup = Self {
            features: on_device,
            views: views.into(),
            hotness_max: features.iter().map(|f| f.hotness_max).collect(),
            _default_rows: default_rows,
            limits,
            batch: 0,
            request: Request::new(gpu, room, limits)?,
            ring: ring(gpu, bags, limits)?,
            counters: gpu.buffer(5)?,
            requeries: gpu.mapped(bags)?,
            open: OpenBags::new(gpu, misses_max)?,
            changes: RowChanges::new(tables, misses_max)?,
            reader: tables.turns().reader(gpu)?,
            is_open: vec![false; limits.batch_max].into(),
            tables: Arc::clone(tables),
            stream,
        };

        // Queries one sample without keys. A driver loads a kernel, and allocates memory for it, at
        // the kernel's first launch.
        lookup.launch(limits.batch_max.min(1))?;
        lookup.finish(1)?;
        lookup.stream.wait()?;
        Ok(lookup)
    }

    /// Returns the bytes that a lookup takes without the tables.
    pub fn bytes(room: RequestRoom, limits: LookupLimits) -> usize {
        let LookupLimits { batch_max, misses_max, row_bytes_max, keys } = limits;
        let (copies, misses_max) = (if keys == Keys::Copied { 2 } else { 1 }, misses_max.max(1));
        let bag = size_of::<AbsentCount>() + 2 * size_of::<BagNumber>();
        let miss =
            2 * size_of::<DeviceBag>() + size_of::<Entry>() + row_bytes_max.next_multiple_of(4) + 4;
        copies * 4 * room.words(batch_max)
            + batch_max * bag * room.features
            + misses_max * miss
            + RowChanges::bytes(misses_max)
    }

    /// Returns the stream of every launch except changes to the caches.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Returns the tables.
    pub fn tables(&self) -> &Arc<DeviceTables> {
        &self.tables
    }

    /// Begins the query of `batch` samples, with `bags(f)` for feature `f`. This is one launch
    /// without a wait, after one copy of the keys with [`Keys::Copied`]. If no row is missing, the
    /// network inputs are complete after the launch.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn begin<'a>(&mut self, batch: usize, bags: impl Fn(usize) -> Bags<'a>) -> Result<()> {
        self.write_request(batch, batch, bags);
        self.in_turn(|| {
            self.copy_keys(batch)?;
            self.launch(batch)
        })
    }

    /// Calls `launch`, which puts a query onto the stream, in the order that `Turns` keeps between
    /// queries and changes.
    ///
    /// # Errors
    /// `CudaError::Driver`, or the error of `launch`.
    pub(crate) fn in_turn(&self, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        self.tables.turns().query(&self.reader, &self.stream, launch)
    }

    /// Writes the keys and offsets of `batch` samples to the memory that the device reads, laid out
    /// for `samples` samples. The samples after the batch have no keys.
    pub fn write_request<'a>(
        &mut self,
        batch: usize,
        samples: usize,
        bags: impl Fn(usize) -> Bags<'a>,
    ) {
        assert!((batch..=self.limits.batch_max).contains(&samples));
        (self.batch, self.request.samples) = (batch, samples);
        // An empty batch launches nothing.
        self.ring.counts[0] = RingCounts::default();
        self.is_open[..batch].fill(false);
        for (f, view) in self.views.iter().enumerate() {
            let (Bags { keys, offsets, weights }, hotness_max) = (bags(f), self.hotness_max[f]);
            let offsets = &offsets[..=batch];
            let keys = &keys[..offsets[batch] as usize];
            // The kernel relies on these checks: all keys are in the feature's part of the request,
            // and no bag is longer than the feature's longest.
            let fits = |o: &[u32]| o[0] <= o[1] && (o[1] - o[0]) as usize <= hotness_max;
            assert!(offsets[0] == 0 && offsets.windows(2).all(fits));

            self.request.put_keys(view.keys_before as usize, keys);
            if view.weighted != 0 {
                self.request.put_weights(view.weights_before as usize, &weights[..keys.len()]);
            }
            let to = self.request.offsets_mut(f);
            to[..=batch].copy_from_slice(offsets);
            to[batch..].fill(offsets[batch]);
        }
    }

    /// Puts the copy of a request that is laid out for `samples` onto the stream, with
    /// [`Keys::Copied`]. A graph can record it.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn copy_keys(&self, samples: usize) -> Result<()> {
        let Request { words, copy, room, .. } = &self.request;
        let Some(copy) = copy else { return Ok(()) };
        self.stream.upload_async(words, copy, room.words(samples))
    }

    /// Launches the query of a request that is laid out for `samples`. A graph can record it.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn launch(&self, samples: usize) -> Result<()> {
        assert!(samples <= self.limits.batch_max);
        // There are enough tiles to keep every multiprocessor busy. With many samples a tile has
        // several.
        let warps = self.tables.gpu().processors() as usize * 64;
        let tile = (samples * self.views.len() / warps).clamp(1, 32);
        let memory = self.memory(samples);
        self.tables.kernels().query(&self.stream, &memory, QueryBags::All { tile })?;
        self.reader.end_query(&self.stream)
    }

    fn memory(&self, samples: usize) -> QueryMemory<'_> {
        let Self { features, request, ring, counters, .. } = self;
        QueryMemory { features, request: request.addresses(samples), samples, ring, counters }
    }

    /// Returns the number of a bag's first weight.
    fn first_weight(&self, feature: usize, sample: usize) -> u32 {
        let before = self.views[feature].weights_before as usize * self.request.samples;
        before as u32 + self.request.offsets(feature)[sample]
    }

    /// Returns the number of keys in a bag.
    fn bag_len(&self, number: BagNumber) -> usize {
        let offsets = &self.request.offsets(number.feature as usize)[number.sample as usize..];
        (offsets[1] - offsets[0]) as usize
    }

    /// Waits for the query and adds the bags that it left open to `misses`, which is empty. Counts
    /// the cached rows in `statuses`, which has a zero status for each sample of the batch. Returns
    /// whether bags are left for [`GpuLookup::requery`], because the ring had no room for them.
    ///
    /// # Errors
    /// `CudaError::Driver`.
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
        Ok(self.read_ring(misses, statuses))
    }

    /// Adds the bags in the ring to `misses`. All lookups of the launch are already counted as
    /// fresh.
    fn read_ring(&mut self, misses: &mut MissList, statuses: &mut [LookupStatus]) -> bool {
        let RingCounts { bags, absents, requeries, .. } = self.ring.counts[0];
        for AbsentCount { sample, count } in &self.ring.absents[..absents as usize] {
            let status = &mut statuses[*sample as usize];
            status.fresh -= count;
            status.absent += count;
        }
        for number in 0..requeries as usize {
            let bag = self.ring.requeries[number];
            self.is_open[bag.sample as usize] = true;
            statuses[bag.sample as usize].fresh -= self.bag_len(bag) as u32;
            self.requeries[number] = bag;
        }
        for bag in &self.ring.bags[..bags as usize] {
            statuses[bag.sample as usize].fresh -= bag.entries;
            self.is_open[bag.sample as usize] = true;
            self.add_open_bag(bag, misses);
        }
        requeries > 0
    }

    fn add_open_bag(&self, bag: &DeviceBag, misses: &mut MissList) {
        let view = &self.views[bag.feature as usize];
        misses.open_bag(bag.feature as u16, bag.sample as usize, bag.pooled as usize);
        for at in bag.first as usize..(bag.first + bag.entries) as usize {
            let Entry { key, epoch, kind } = self.ring.entries[at];
            match EntryKind::of(kind) {
                EntryKind::Missing => {
                    misses.add_miss(RowKey { table: view.table as u16, key }, Epoch::of(epoch))
                }
                EntryKind::Absent => misses.add_absent(),
                EntryKind::Hit => {
                    let row = &self.ring.hit_rows[4 * at * self.ring.hit_stride..];
                    misses.stage_hit(&row[..view.cache.row_bytes as usize]);
                }
            }
        }
    }

    /// Returns for each sample of the batch whether a query of this request left one of its bags
    /// open.
    pub(crate) fn open_samples(&self) -> &[bool] {
        &self.is_open[..self.batch]
    }

    /// Finishes the open bags after the caller has read the rows of `misses`. Inserts the fresh
    /// rows into the caches, pools the bags, counts their rows in `statuses` and waits.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn finish_bags(&mut self, misses: &MissList, statuses: &mut [LookupStatus]) -> Result<()> {
        self.begin_finish(misses, statuses)?;
        self.finish(misses.bags().len())?;
        self.wait_finished()
    }

    /// Begins to insert the fresh rows into the caches, and sets the open bags for the next
    /// [`GpuLookup::finish`]. Counts their rows in `statuses`.
    pub(crate) fn begin_finish(
        &mut self,
        misses: &MissList,
        statuses: &mut [LookupStatus],
    ) -> Result<()> {
        let Some((rows, stride_words)) = misses.staging() else {
            unreachable!(
                "the misses of a GPU's worker are staged in memory that the GPU can access"
            )
        };
        let staged = StagedRows { rows, stride_words };
        for miss in misses.list().iter().filter(|m| misses.state(m.slot) == RowState::Fresh) {
            self.changes.add(miss.row, miss.slot, miss.epoch);
        }
        self.changes.begin_insert(staged)?;

        for (number, bag) in misses.bags().iter().enumerate() {
            let first = bag.first_entry as usize;
            let slots = self.open.slots[first..].iter_mut();
            for (slot, (state, fresh)) in slots.zip(misses.slots_of(bag)) {
                *slot = fresh.unwrap_or(NO_SLOT);
                statuses[bag.sample as usize].count(state);
            }
            self.open.bags[number] = DeviceBag {
                feature: u32::from(bag.feature),
                sample: bag.sample,
                pooled: bag.done,
                first: first as u32,
                entries: bag.entries,
                weights: self.first_weight(bag.feature.into(), bag.sample as usize),
            };
        }
        let weights = self.request.addresses(self.request.samples).weights;
        self.open.set(&self.features, misses.bags().len(), staged, weights);
        Ok(())
    }

    /// Puts the pooling of the open bags, at most `bags_max`, onto the stream. A graph can record
    /// it.
    pub(crate) fn finish(&self, bags_max: usize) -> Result<()> {
        self.tables.kernels().finish(&self.stream, &self.open, bags_max)
    }

    /// Waits until the rows are in the caches and all work on the stream is done. The caller may
    /// then reuse the staged rows.
    pub(crate) fn wait_finished(&self) -> Result<()> {
        self.stream.after(self.changes.made())?;
        self.stream.wait()
    }

    /// Queries the remaining bags again, and waits. For arguments and result see
    /// [`GpuLookup::collect`].
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn requery(
        &mut self,
        misses: &mut MissList,
        statuses: &mut [LookupStatus],
    ) -> Result<bool> {
        let count = self.ring.counts[0].requeries as usize;
        for number in 0..count {
            let bag = self.requeries[number];
            statuses[bag.sample as usize].fresh += self.bag_len(bag) as u32;
        }
        let memory = self.memory(self.request.samples);
        let bags = QueryBags::Only { bags: &self.requeries, count };
        self.in_turn(|| {
            self.tables.kernels().query(&self.stream, &memory, bags)?;
            self.reader.end_query(&self.stream)
        })?;
        self.stream.wait()?;
        Ok(self.read_ring(misses, statuses))
    }

    /// Inserts prefetched rows into the caches; each of `rows` is staged in its slot of `misses`.
    /// Returns the number of rows that were inserted.
    ///
    /// # Errors
    /// `CudaError::Driver`.
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

    /// Calls `each(row, cached, epoch)` for each of `rows`, with whether it is cached, and its
    /// set's epoch.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn probe(
        &mut self,
        rows: &mut [Miss],
        mut each: impl FnMut(&mut Miss, bool, Epoch),
    ) -> Result<()> {
        rows.iter().for_each(|miss| self.changes.add(miss.row, 0, miss.epoch));
        self.changes.probe(|number, cached, epoch| each(&mut rows[number], cached, epoch))
    }

    /// Waits until no launch accesses memory that the next request uses. The caller calls this
    /// after an error of any function of this type.
    ///
    /// # Errors
    /// `CudaError::Driver` if the GPU cannot be waited for.
    pub fn recover(&mut self) -> Result<()> {
        self.changes.recover()?;
        self.stream.wait()
    }
}

fn ring(gpu: &Arc<Gpu>, bags: usize, limits: LookupLimits) -> Result<MissRing> {
    let LookupLimits { misses_max, row_bytes_max, .. } = limits;
    let hit_stride = row_bytes_max.div_ceil(4);
    Ok(MissRing {
        counts: gpu.mapped(1)?,
        bags: gpu.mapped(misses_max)?,
        entries: gpu.mapped(misses_max)?,
        hit_rows: gpu.mapped(4 * misses_max * hit_stride)?,
        absents: gpu.mapped(bags)?,
        requeries: gpu.mapped(bags)?,
        hit_stride,
    })
}

/// Returns the kernels' view of a feature, without the fields that depend on earlier features.
fn view_of(tables: &DeviceTables, feature: &FeatureOnDevice<'_>) -> DeviceFeature {
    let format = feature.format;
    assert_eq!(feature.default_row.len(), format.dim());
    assert!(feature.column + feature.width <= feature.stride);
    let rows_out = if feature.pooling == Pooling::None { feature.hotness_max } else { 1 };
    assert_eq!(feature.width, rows_out * format.dim());
    assert!(!feature.weighted || feature.pooling == Pooling::Sum);
    let in_pieces = [format.dim(), feature.column, feature.stride]
        .iter()
        .all(|columns| columns.is_multiple_of(PIECE_COLUMNS));
    assert!(feature.input_type == InputType::F32 || (in_pieces && feature.input.is_multiple_of(8)));
    // A bag of at most one key without a weight is its row.
    let one_row = feature.hotness_max == 1 && !feature.weighted && feature.pooling != Pooling::Max;
    let pooling = if one_row { Pooling::None } else { feature.pooling };

    let view = DeviceFeature {
        out: address_of(feature),
        out_bytes: feature.input_type.bytes() as u32,
        stride: feature.stride as u64,
        keys_end: feature.keys_end.unwrap_or(0),
        has_end: feature.keys_end.is_some().into(),
        table: feature.table.into(),
        dim: format.dim() as u32,
        width: feature.width as u32,
        unit: format.unit(),
        codec: CodecNumber::from(format.codec()) as u32,
        pooling: PoolingNumber::from(pooling) as u32,
        weighted: feature.weighted.into(),
        ..DeviceFeature::default()
    };
    let view = match tables.storage(feature.table) {
        TableStorage::Cached(number) => view_of_cached(tables, feature, number, view),
        TableStorage::Resident(number) => view_of_resident(tables, feature, number, view),
    };
    DeviceFeature { lane_bits: lane_bits(format), aligned: alignment(feature) as u32, ..view }
}

/// Columns of a piece of a row, which a lane reads or writes together.
pub const PIECE_COLUMNS: usize = 4;

/// Returns the device address of the first column that `feature` fills.
fn address_of(feature: &FeatureOnDevice<'_>) -> u64 {
    feature.input + (feature.input_type.bytes() * feature.column) as u64
}

/// Returns the base-2 logarithm of the number of lanes that read one row together, which is 4 to
/// 32. A lane has up to four pieces (see `Code` of `pool.cuh`).
fn lane_bits(format: RowFormat) -> u32 {
    let pieces = match format.codec() {
        Codec::F32 => 1,
        Codec::F16 => 2,
        Codec::U8 | Codec::U4 => 4,
    };
    let lanes = format.dim().div_ceil(PIECE_COLUMNS * pieces);
    lanes.next_power_of_two().clamp(4, 32).trailing_zeros()
}

/// Returns the accesses of `feature` that a kernel may make 16 bytes at a time.
fn alignment(feature: &FeatureOnDevice<'_>) -> Alignment {
    let (format, codec) = (feature.format, feature.format.codec());
    let row_bytes = format.row_bytes();
    let stride = row_bytes.next_multiple_of(4);
    let is_plain = !feature.weighted && feature.pooling != Pooling::Max;
    let is_aligned = match codec {
        Codec::F32 => stride.is_multiple_of(16),
        Codec::F16 => stride.is_multiple_of(8),
        // The scale is the last word.
        Codec::U8 | Codec::U4 => row_bytes.is_multiple_of(4),
    };
    if !(format.dim().is_multiple_of(PIECE_COLUMNS) && is_aligned && is_plain) {
        return Alignment::Unaligned;
    }

    let bytes = feature.input_type.bytes();
    let is_aligned = address_of(feature).is_multiple_of(16)
        && (feature.stride * bytes).is_multiple_of(16)
        && (format.dim() * bytes).is_multiple_of(16);
    match feature.input_type {
        _ if !is_aligned => Alignment::AlignedRows,
        InputType::F32 => Alignment::AlignedF32,
        InputType::F16 => Alignment::AlignedF16,
    }
}

fn view_of_cached(
    tables: &DeviceTables,
    feature: &FeatureOnDevice<'_>,
    cache: usize,
    view: DeviceFeature,
) -> DeviceFeature {
    let (hasher, cache) = (tables.table_hasher(cache, feature.table), tables.cache_view(cache));
    assert_eq!(cache.row_bytes as usize, feature.format.row_bytes());

    let rows = cache.rows;
    let view = DeviceFeature { cache, rows, storage: StorageNumber::Cached as u32, ..view };
    match hasher {
        TableHasher::Indexed { base, end } | TableHasher::Numbered { base, end } => {
            DeviceFeature { base, end: end as u32, ..view }
        }
        TableHasher::Hashed { salt, .. } => DeviceFeature { salt, ..view },
    }
}

fn view_of_resident(
    tables: &DeviceTables,
    feature: &FeatureOnDevice<'_>,
    number: usize,
    view: DeviceFeature,
) -> DeviceFeature {
    let table = tables.resident(number);
    assert_eq!(table.row_bytes, feature.format.row_bytes());

    let view = DeviceFeature {
        cache: DeviceCacheView {
            row_bytes: table.row_bytes as u32,
            row_words: table.row_words as u32,
            ..DeviceCacheView::default()
        },
        rows: table.rows.address(),
        count: table.count as u64,
        storage: StorageNumber::Resident as u32,
        ..view
    };
    match &table.index {
        None => view,
        Some(DeviceIndex { hashes, buckets }) => DeviceFeature {
            storage: StorageNumber::ResidentHashed as u32,
            hashes: hashes.address(),
            buckets: buckets.address(),
            bucket_count: buckets.len() as u64 - 1,
            ..view
        },
    }
}
