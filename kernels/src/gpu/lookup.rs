//! The query of a batch on the GPU. One launch queries all features; if every row is cached, no
//! other work follows. Otherwise the host fills the miss list from the ring that the kernel wrote
//! to host memory. After the caller has read the missing rows from flash, the host inserts them
//! into the caches and the GPU pools the open bags. The miss list is the same as after a query on
//! the CPU. Never reads flash.

use crate::cache::Epoch;
use crate::cache::address::RowKey;
use crate::cuda::branch::Branch;
use crate::cuda::driver::{Gpu, Result, Stream};
use crate::cuda::memory::{Buffer, Mapped, View};
use crate::gpu::feature::view_of;
use crate::gpu::launch::{
    AbsentCount, BagNumber, DeviceBag, DeviceFeature, Entry, MissRing, NO_SLOT, OpenBags,
    QueryBags, QueryMemory, RingCounts, StagedRows, query_warps,
};
use crate::gpu::numbers::EntryKind;
use crate::gpu::request::RequestMemory;
use crate::gpu::tables::{DeviceTables, RowChanges};
use crate::gpu::tile::{TileShape, tile_of};
use crate::gpu::turns::Reader;
use crate::lookup::miss_list::{Miss, MissList, RowState};
use crate::lookup::{Bags, LookupStatus};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

pub use crate::gpu::feature::{FeatureOnDevice, PIECE_COLUMNS};
pub use crate::gpu::request::{Keys, RequestRoom};
pub use crate::gpu::samples::{RequestSize, Samples};

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
    /// Whether the samples of a request share features, of whatever kind.
    pub is_shared: bool,
}

/// Looks up one batch at a time. All memory is allocated at the start. The streams are dropped
/// first, before the memory here and that of an owner which declares the lookup first.
pub struct GpuLookup {
    stream: Stream,
    /// Runs what needs nothing looked up, beside the query.
    branch: Branch,
    tables: Arc<DeviceTables>,
    /// The features on the device: those of each sample, then those that a request shares.
    features: Buffer<DeviceFeature>,
    views: Box<[DeviceFeature]>,
    /// The caller's number of each feature on the device.
    numbers: Box<[u16]>,
    /// The device's number of each feature of the caller.
    places: Box<[u16]>,
    /// Features that are not shared.
    own_features: usize,
    /// The keys of each feature's longest bag.
    hotness_max: Box<[usize]>,
    /// The default rows, to which the features point.
    _default_rows: Buffer<f32>,
    limits: LookupLimits,
    /// Samples of the current batch.
    batch: usize,
    /// The size that its launches are made for.
    size: RequestSize,
    /// The end of the samples of each request; empty if no feature is shared.
    ends: Vec<usize>,
    request: RequestMemory,
    /// Further requests, for [`GpuLookup::next_request`].
    later_requests: VecDeque<RequestMemory>,
    ring: MissRing,
    counters: Buffer<u32>,
    requeries: Mapped<BagNumber>,
    open: OpenBags,
    changes: RowChanges,
    reader: Reader,
    /// For each sample of the batch whether a query left one of its bags open.
    is_open: Box<[bool]>,
    /// Whether an insert may still read the staged rows.
    is_inserting: bool,
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

        let mut numbers: Vec<u16> = (0..features.len() as u16).collect();
        numbers.sort_by_key(|&f| features[usize::from(f)].shared);
        let features: Vec<_> = numbers.iter().map(|&f| &features[usize::from(f)]).collect();
        let own_features = features.iter().filter(|feature| !feature.shared).count();
        let mut places = vec![0; numbers.len()];
        numbers.iter().zip(0..).for_each(|(&f, place)| places[usize::from(f)] = place);
        let defaults: Vec<f32> = features.iter().flat_map(|f| f.default_row).copied().collect();
        let default_rows = gpu.buffer(defaults.len())?;
        stream.upload(&defaults, &default_rows, 0)?;
        let (views, mut room) =
            views_of(tables, &features, default_rows.address(), limits.batch_max);
        room.is_shared |= limits.is_shared;
        let on_device = gpu.buffer(views.len())?;
        stream.upload(&views, &on_device, 0)?;

        let bags = limits.batch_max * features.len();
        let lookup = Self {
            features: on_device,
            views: views.into(),
            numbers: numbers.into(),
            places: places.into(),
            own_features,
            hotness_max: features.iter().map(|f| f.hotness_max).collect(),
            _default_rows: default_rows,
            limits,
            batch: 0,
            size: RequestSize::from(0),
            ends: Vec::with_capacity(if room.is_shared { limits.batch_max } else { 0 }),
            request: RequestMemory::new(gpu, room, limits.batch_max, limits.keys)?,
            later_requests: VecDeque::new(),
            ring: ring(gpu, bags, limits)?,
            counters: gpu.buffer(5)?,
            requeries: gpu.mapped(bags)?,
            open: OpenBags::new(gpu, misses_max)?,
            changes: RowChanges::new(tables, misses_max)?,
            reader: tables.turns().reader(gpu)?,
            is_open: vec![false; limits.batch_max].into(),
            is_inserting: false,
            tables: Arc::clone(tables),
            branch: Branch::new(gpu)?,
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
        let LookupLimits { batch_max, misses_max, row_bytes_max, keys, .. } = limits;
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

    /// Returns the branch beside that stream.
    pub(crate) fn branch(&self) -> &Branch {
        &self.branch
    }

    /// Returns the tables.
    pub fn tables(&self) -> &Arc<DeviceTables> {
        &self.tables
    }

    /// Begins the query of `batch`, with `bags(f)` for feature `f`: one for each request if it is
    /// shared. This is one launch without a wait, after one copy of the keys with [`Keys::Copied`].
    /// If no row is missing, the network inputs are complete after the launch.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn begin<'a, 's>(
        &mut self,
        batch: impl Into<Samples<'s>>,
        bags: impl Fn(usize) -> Bags<'a>,
    ) -> Result<()> {
        let batch = batch.into();
        let requests = if batch.ends.is_empty() { batch.count } else { batch.ends.len() };
        let size = RequestSize { samples: batch.count, requests };
        self.write_request(batch, size, bags);
        self.in_turn(|| {
            self.copy_keys(size.samples)?;
            self.launch(size)
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

    /// Writes the keys and offsets of `batch` to the memory that the device reads, laid out for
    /// `size`. The samples and requests after those of the batch have no keys.
    pub fn write_request<'a, 's>(
        &mut self,
        batch: impl Into<Samples<'s>>,
        size: impl Into<RequestSize>,
        bags: impl Fn(usize) -> Bags<'a>,
    ) {
        let (Samples { count, ends }, size) = (batch.into(), size.into());
        assert!((count..=self.limits.batch_max).contains(&size.samples));
        self.ends.clear();
        if self.request.room.is_shared {
            match ends {
                [] => self.ends.extend(1..=count),
                ends => self.ends.extend_from_slice(ends),
            }
            // The kernels rely on it: each sample has a request, and each request a row.
            let ascend = |pair: &[usize]| pair[0] < pair[1];
            assert!(self.ends.windows(2).all(ascend) && self.ends.first() != Some(&0));
            assert!(self.ends.last().copied().unwrap_or(0) == count);
            assert!((self.ends.len()..=size.samples).contains(&size.requests));
        }
        (self.batch, self.size, self.request.samples) = (count, size, size.samples);
        // An empty batch launches nothing.
        self.ring.counts[0] = RingCounts::default();
        self.is_open[..count].fill(false);
        for (f, view) in self.views.iter().enumerate() {
            let (rows, rows_max) = match f < self.own_features {
                true => (count, size.samples),
                false => (self.ends.len(), size.requests),
            };
            let Bags { keys, offsets, weights } = bags(self.numbers[f].into());
            let (offsets, hotness_max) = (&offsets[..=rows], self.hotness_max[f]);
            let keys = &keys[..offsets[rows] as usize];
            // The kernel relies on these checks: all keys are in the feature's part of the request,
            // and no bag is longer than the feature's longest.
            let fits = |o: &[u32]| o[0] <= o[1] && (o[1] - o[0]) as usize <= hotness_max;
            assert!(offsets[0] == 0 && offsets.windows(2).all(fits));

            self.request.put_keys(view.keys_before as usize, keys);
            if view.weighted != 0 {
                self.request.put_weights(view.weights_before as usize, &weights[..keys.len()]);
            }
            let to = self.request.offsets_mut(f);
            to[..=rows].copy_from_slice(offsets);
            to[rows..=rows_max].fill(offsets[rows]);
        }
        if self.request.room.is_shared {
            self.request.put_requests(&self.ends);
        }
    }

    /// Returns the samples that have a bag: one, or those of its request.
    fn samples_of(&self, feature: usize, bag: u32) -> Range<usize> {
        let bag = bag as usize;
        match self.ends.get(bag) {
            Some(&end) if feature >= self.own_features => {
                (if bag == 0 { 0 } else { self.ends[bag - 1] })..end
            }
            _ => bag..bag + 1,
        }
    }

    /// Puts the copy of a request that is laid out for `samples` onto the stream, with
    /// [`Keys::Copied`]. A graph can record it.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn copy_keys(&self, samples: usize) -> Result<()> {
        let RequestMemory { words, copy, room, .. } = &self.request;
        let Some(copy) = copy else { return Ok(()) };
        self.stream.upload_async(words, copy, room.words(samples))
    }

    /// Launches the query of a request that is laid out for `size`. A graph can record it.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn launch(&self, size: impl Into<RequestSize>) -> Result<()> {
        let size = size.into();
        self.launch_in_tiles(size, self.tile(size))
    }

    /// Returns the bags of one feature that a warp takes together in a query of `size`.
    pub fn tile(&self, size: impl Into<RequestSize>) -> usize {
        let RequestSize { samples, requests } = size.into();
        // The bags of a request are few beside those of its samples.
        let (samples, features) = match self.own_features {
            0 => (requests, self.views.len()),
            features => (samples, features),
        };
        let lookups = self.hotness_max[..features].iter().sum();
        let warps = query_warps(self.tables.gpu());
        tile_of(TileShape { samples, features, lookups, warps })
    }

    /// Launches as [`GpuLookup::launch`] does, with tiles of `tile` samples, which is 1 to 32. The
    /// tile changes the time and no result.
    ///
    /// # Errors
    /// `CudaError::Driver`.
    pub fn launch_in_tiles(&self, size: impl Into<RequestSize>, tile: usize) -> Result<()> {
        self.query(size.into(), tile)?;
        self.reader.end_query(&self.stream)
    }

    fn query(&self, size: RequestSize, tile: usize) -> Result<()> {
        assert!(size.samples <= self.limits.batch_max);
        let memory = self.memory(size);
        self.tables.kernels().query(&self.stream, &memory, QueryBags::All { tile })
    }

    /// Launches as [`GpuLookup::launch`] does, and lets stream and branch meet after the query. The
    /// branch then marks its end, so the stream's next kernel does not wait for that.
    pub(crate) fn launch_beside(&self, size: RequestSize) -> Result<()> {
        self.query(size, self.tile(size))?;
        self.branch.meet(&self.stream)?;
        self.reader.end_query(self.branch.stream())
    }

    /// Allocates memory for a further request of at most `samples` samples.
    ///
    /// # Errors
    /// `CudaError::Driver` if there is not enough memory.
    pub fn add_request(&mut self, samples: usize) -> Result<()> {
        assert!(samples <= self.limits.batch_max);
        let (gpu, room) = (self.tables.gpu(), self.request.room);
        let request = RequestMemory::new(gpu, room, samples, self.limits.keys)?;
        self.later_requests.push_back(request);
        Ok(())
    }

    /// Moves on to the next request, in turn with all that were added: the functions that write,
    /// copy and launch then use its memory. A measurement launches different requests one after the
    /// other in this way. A recorded graph keeps the memory that it was recorded with.
    pub fn next_request(&mut self) {
        if let Some(next) = self.later_requests.pop_front() {
            self.later_requests.push_back(std::mem::replace(&mut self.request, next));
        }
    }

    fn memory(&self, size: RequestSize) -> QueryMemory<'_> {
        let Self { features, own_features, request, ring, counters, .. } = self;
        let request = request.addresses(size.samples);
        QueryMemory { features, own_features: *own_features, request, size, ring, counters }
    }

    /// Returns the request of each sample of a request that is laid out for `samples`, on the
    /// device; empty if no feature is shared.
    pub(crate) fn request_of(&self, samples: usize) -> View<'_, u32> {
        self.request.request_of(samples)
    }

    /// Returns the end of the samples of each request; empty if no feature is shared.
    pub(crate) fn ends(&self) -> &[usize] {
        &self.ends
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
    /// the cached rows in `statuses`, which has a zero status for each sample of the batch. The
    /// first sample of a request counts its shared bags. Returns
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
        self.is_inserting = false;
        for f in 0..self.own_features {
            let offsets = &self.request.offsets(f)[..=self.batch];
            statuses.iter_mut().zip(offsets.windows(2)).for_each(|(s, o)| s.fresh += o[1] - o[0]);
        }
        for f in self.own_features..self.views.len() {
            let offsets = &self.request.offsets(f)[..=self.ends.len()];
            for (bag, o) in offsets.windows(2).enumerate() {
                statuses[self.samples_of(f, bag as u32).start].fresh += o[1] - o[0];
            }
        }
        Ok(self.read_ring(misses, statuses))
    }

    /// Adds the bags in the ring to `misses`. All lookups of the launch are already counted as
    /// fresh.
    fn read_ring(&mut self, misses: &mut MissList, statuses: &mut [LookupStatus]) -> bool {
        let RingCounts { bags, absents, requeries, .. } = self.ring.counts[0];
        for AbsentCount { feature, sample, count } in &self.ring.absents[..absents as usize] {
            let status = &mut statuses[self.samples_of(*feature as usize, *sample).start];
            status.fresh -= count;
            status.absent += count;
        }
        for number in 0..requeries as usize {
            let bag = self.ring.requeries[number];
            let samples = self.samples_of(bag.feature as usize, bag.sample);
            statuses[samples.start].fresh -= self.bag_len(bag) as u32;
            self.is_open[samples].fill(true);
            self.requeries[number] = bag;
        }
        for bag in &self.ring.bags[..bags as usize] {
            let samples = self.samples_of(bag.feature as usize, bag.sample);
            statuses[samples.start].fresh -= bag.entries;
            self.is_open[samples].fill(true);
            self.add_open_bag(bag, misses);
        }
        requeries > 0
    }

    fn add_open_bag(&self, bag: &DeviceBag, misses: &mut MissList) {
        let view = &self.views[bag.feature as usize];
        let number = self.numbers[bag.feature as usize];
        misses.open_bag(number, bag.sample as usize, bag.pooled as usize);
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
        self.is_inserting = true;
        self.changes.begin_insert(staged)?;

        for (number, bag) in misses.bags().iter().enumerate() {
            let first = bag.first_entry as usize;
            let feature = usize::from(self.places[usize::from(bag.feature)]);
            let samples = self.samples_of(feature, bag.sample);
            let slots = self.open.slots[first..].iter_mut();
            let mut counts = LookupStatus::default();
            for (slot, (state, fresh)) in slots.zip(misses.slots_of(bag)) {
                *slot = fresh.unwrap_or(NO_SLOT);
                counts.count(state);
            }
            // A late shared row makes all samples of its request late.
            statuses[samples.clone()].iter_mut().for_each(|status| status.late |= counts.late);
            statuses[samples.start].add(&counts);
            self.open.bags[number] = DeviceBag {
                feature: feature as u32,
                sample: bag.sample,
                pooled: bag.done,
                first: first as u32,
                entries: bag.entries,
                weights: self.first_weight(feature, bag.sample as usize),
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

    /// Waits until the bags are pooled and all other work on the stream is done. The insert may go
    /// on: it waits for queries of other workers, for which no answer should wait. It has read the
    /// staged rows before the next query of this lookup begins, because [`Self::in_turn`] puts that
    /// after all changes so far.
    pub(crate) fn wait_finished(&self) -> Result<()> {
        self.stream.wait()
    }

    /// Waits for an insert that no query has followed yet.
    fn wait_inserted(&mut self) -> Result<()> {
        if std::mem::take(&mut self.is_inserting) { self.changes.made().wait() } else { Ok(()) }
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
            let counted_by = self.samples_of(bag.feature as usize, bag.sample).start;
            statuses[counted_by].fresh += self.bag_len(bag) as u32;
        }
        let memory = self.memory(self.size);
        let bags = QueryBags::Only { bags: &self.requeries, count };
        self.in_turn(|| {
            self.tables.kernels().query(&self.stream, &memory, bags)?;
            self.reader.end_query(&self.stream)
        })?;
        self.stream.wait()?;
        Ok(self.read_ring(misses, statuses))
    }

    /// Inserts prefetched rows into the caches, after [`GpuLookup::probe`]. Each of `rows` is
    /// staged in its slot of `misses`. Returns the number of rows that were inserted.
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
        // The caller stages rows after this.
        self.wait_inserted()?;
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
        self.branch.stream().wait()?;
        self.stream.wait()
    }
}

/// Returns the kernels' views of `features`, and the size of their requests. `default_row` is the
/// device address of their default rows.
fn views_of(
    tables: &DeviceTables,
    features: &[&FeatureOnDevice<'_>],
    mut default_row: u64,
    batch_max: usize,
) -> (Vec<DeviceFeature>, RequestRoom) {
    let is_shared = features.iter().any(|feature| feature.shared);
    let mut room = RequestRoom { features: features.len(), lookups: 0, weights: 0, is_shared };
    let mut views = Vec::with_capacity(features.len());
    for feature in features {
        let mut view = view_of(tables, feature);
        view.default_row = default_row;
        view.keys_before = room.lookups as u64;
        view.weights_before = room.weights as u64;
        // A kernel counts the weights of a request with 32 bits.
        assert!((room.lookups * batch_max) < u32::MAX as usize);
        // A kernel counts the columns of an input with 32 bits.
        assert!((batch_max as u64).saturating_mul(view.stride) < u64::from(u32::MAX));
        room.lookups += feature.hotness_max;
        room.weights += if feature.weighted { feature.hotness_max } else { 0 };
        default_row += size_of_val(feature.default_row) as u64;
        views.push(view);
    }
    (views, room)
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
