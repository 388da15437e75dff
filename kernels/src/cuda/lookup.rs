//! The query of a batch on the GPU, and what follows from it: the miss list filled from the ring that the kernel left in host
//! memory, the rows that came from flash put into the caches, the open bags pooled. To the host's miss list it makes no difference
//! who queried. All features go in one launch, and where every row is there nothing else happens. Never reads flash.

use crate::cache::Epoch;
use crate::codec::{Codec, RowFormat};
use crate::cuda::driver::{Buffer, CudaError, Gpu, Mapped, Stream};
use crate::cuda::launch::{
    ABSENT, Absents, BagNumber, BagView, CacheView, Counts, FeatureView, MISSING, NO_SLOT, QueryMemory, Ref,
    Ring,
};
use crate::cuda::tables::{Changes, Place, Tables};
use crate::misses::{Miss, Misses, RowState};
use crate::names::{Namer, RowKey};
use crate::query::{Bags, Pooling, Status};
use std::sync::Arc;

type Result<T> = std::result::Result<T, CudaError>;

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

/// Looks up one batch at a time. Takes all memory when it is made.
pub struct Lookup {
    tables: Arc<Tables>,
    stream: Stream,
    features: Buffer<FeatureView>,
    views: Box<[FeatureView]>,
    /// For each feature the longest bag.
    hotness: Box<[usize]>,
    /// Kept for the features.
    _default_rows: Buffer<f32>,
    batch_max: usize,
    /// Samples of the batch in hand.
    batch: usize,
    keys: Mapped<u64>,
    offsets: Mapped<u32>,
    ring: Ring,
    counters: Buffer<u32>,
    only: Mapped<BagNumber>,
    open: Mapped<BagView>,
    slots: Mapped<u32>,
    changes: Changes,
}

impl Lookup {
    /// A lookup of `features` for batches of up to `batch_max` samples, of which `misses_max` lookups can wait; the longest row of
    /// any table has `row_bytes_max` bytes.
    ///
    /// # Errors
    /// The GPU has no memory for it.
    pub fn new(
        tables: &Arc<Tables>,
        features: &[FeatureOnDevice<'_>],
        batch_max: usize,
        misses_max: usize,
        row_bytes_max: usize,
    ) -> Result<Self> {
        let (gpu, misses_max) = (tables.gpu(), misses_max.max(1));
        let stream = gpu.stream()?;
        let defaults: Vec<f32> = features.iter().flat_map(|f| f.default_row).copied().collect();
        let mut default_rows = gpu.buffer(defaults.len())?;
        stream.upload(&defaults, &mut default_rows, 0)?;
        let (mut keys, mut default_row) = (0, default_rows.address());
        let mut views = Vec::with_capacity(features.len());
        for (number, feature) in features.iter().enumerate() {
            let mut view = view_of(tables, feature);
            view.default_row = default_row;
            view.keys_at = keys as u64;
            view.offsets_at = (number * (batch_max + 1)) as u64;
            keys += batch_max * feature.hotness_max;
            default_row += size_of_val(feature.default_row) as u64;
            views.push(view);
        }
        let mut on_device = gpu.buffer(views.len())?;
        stream.upload(&views, &mut on_device, 0)?;
        let bags = batch_max * features.len();
        Ok(Self {
            features: on_device,
            views: views.into(),
            hotness: features.iter().map(|f| f.hotness_max).collect(),
            _default_rows: default_rows,
            batch_max,
            batch: 0,
            keys: gpu.mapped(keys)?,
            offsets: gpu.mapped(features.len() * (batch_max + 1))?,
            ring: ring(gpu, bags, misses_max, row_bytes_max)?,
            counters: gpu.buffer(5)?,
            only: gpu.mapped(bags)?,
            open: gpu.mapped(misses_max)?,
            slots: gpu.mapped(misses_max)?,
            changes: Changes::new(tables, misses_max)?,
            tables: Arc::clone(tables),
            stream,
        })
    }

    /// All bytes of host memory that such a lookup takes; `lookups_max` are those of one sample.
    pub fn bytes(
        features: usize,
        lookups_max: usize,
        batch_max: usize,
        misses_max: usize,
        row_bytes_max: usize,
    ) -> usize {
        let bag = 4 + size_of::<Absents>() + 2 * size_of::<BagNumber>();
        let miss = 2 * size_of::<BagView>() + size_of::<Ref>() + row_bytes_max.next_multiple_of(4) + 4;
        batch_max * (8 * lookups_max + bag * features)
            + misses_max.max(1) * miss
            + Changes::bytes(misses_max.max(1))
    }

    /// The stream that everything is on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The tables.
    pub fn tables(&self) -> &Arc<Tables> {
        &self.tables
    }

    /// Begins the query of `batch` samples, `bags(f)` for feature `f`: one launch, no wait. Behind it on the stream the inputs are
    /// whole if nothing was missing.
    ///
    /// # Errors
    /// The GPU refuses the launch.
    pub fn begin<'a>(&mut self, batch: usize, bags: impl Fn(usize) -> Bags<'a>) -> Result<()> {
        self.take(batch, bags);
        self.launch(batch)
    }

    /// Lays a batch's keys and offsets where the kernel reads them.
    pub fn take<'a>(&mut self, batch: usize, bags: impl Fn(usize) -> Bags<'a>) {
        assert!(batch <= self.batch_max);
        self.batch = batch;
        // An empty batch launches nothing.
        self.ring.counts[0] = Counts::default();
        for (f, view) in self.views.iter().enumerate() {
            let (Bags { keys, offsets }, hotness) = (bags(f), self.hotness[f]);
            let offsets = &offsets[..=batch];
            let keys = &keys[..offsets[batch] as usize];
            // What the kernel relies on: all keys are in the feature's part, no bag is longer than the miss list.
            assert!(
                offsets[0] == 0
                    && offsets.windows(2).all(|o| o[0] <= o[1] && (o[1] - o[0]) as usize <= hotness)
            );
            self.keys[view.keys_at as usize..][..keys.len()].copy_from_slice(keys);
            self.offsets[view.offsets_at as usize..][..offsets.len()].copy_from_slice(offsets);
        }
    }

    /// Lets the batch that was taken go on to `samples` with samples that have no keys.
    pub fn pad(&mut self, samples: usize) {
        assert!((self.batch..=self.batch_max).contains(&samples));
        for view in &self.views {
            let offsets = &mut self.offsets[view.offsets_at as usize..][self.batch..=samples];
            offsets.fill(offsets[0]);
        }
    }

    /// Launches the query of the first `samples` of the batch that was taken, on its stream; for a graph to record, too.
    ///
    /// # Errors
    /// The GPU refuses the launch.
    pub fn launch(&self, samples: usize) -> Result<()> {
        assert!(samples <= self.batch_max);
        // As many warps as keep every multiprocessor busy, and a few samples a warp beyond that.
        let warps = self.tables.gpu().processors() as usize * 64;
        let tile = (samples * self.views.len() / warps).clamp(1, 32);
        self.tables.kernels.query(&self.stream, &self.memory(), None, samples, tile)
    }

    fn memory(&self) -> QueryMemory<'_> {
        let Self { features, keys, offsets, ring, counters, .. } = self;
        QueryMemory { features, keys, offsets, ring, counters }
    }

    fn bag(&self, number: BagNumber) -> usize {
        let at = self.views[number.feature as usize].offsets_at as usize + number.sample as usize;
        (self.offsets[at + 1] - self.offsets[at]) as usize
    }

    /// Waits for the query and notes in `misses`, which is empty, what it left open; counts the rows that were there in
    /// `statuses`, which are of the batch and were not counted in before. Returns whether bags are left for `again`, for
    /// which there was no room.
    ///
    /// # Errors
    /// The GPU failed.
    pub fn collect(&mut self, misses: &mut Misses, statuses: &mut [Status]) -> Result<bool> {
        self.stream.wait()?;
        for view in &self.views {
            let offsets = &self.offsets[view.offsets_at as usize..][..=self.batch];
            statuses.iter_mut().zip(offsets.windows(2)).for_each(|(s, o)| s.fresh += o[1] - o[0]);
        }
        Ok(self.note(misses, statuses))
    }

    /// Takes what the ring holds; every bag of the launch is already counted as fresh.
    fn note(&mut self, misses: &mut Misses, statuses: &mut [Status]) -> bool {
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

    fn note_bag(&self, bag: &BagView, misses: &mut Misses) {
        let view = &self.views[bag.feature as usize];
        misses.open(bag.feature as u16, bag.sample as usize, bag.done as usize);
        for at in bag.first as usize..(bag.first + bag.refs) as usize {
            let Ref { key, epoch, kind } = self.ring.refs[at];
            match kind {
                MISSING => misses.miss(RowKey { table: view.table as u16, key }, Epoch::of(epoch)),
                ABSENT => misses.absent(),
                _ => misses
                    .keep(&self.ring.kept[4 * at * self.ring.kept_stride..][..view.cache.row_bytes as usize]),
            }
        }
    }

    /// After the rows of `misses` were read: puts the fresh ones into the caches, pools the open bags, counts their rows, and
    /// waits for it.
    ///
    /// # Errors
    /// The GPU failed.
    pub fn settle(&mut self, misses: &Misses, statuses: &mut [Status]) -> Result<()> {
        let Some((rows, stride)) = misses.staging() else { return Ok(()) };
        for miss in misses.list().iter().filter(|m| misses.state(m.slot) == RowState::Fresh) {
            self.changes.add(miss.row, miss.slot, miss.epoch);
        }
        let inserted = self.changes.begin_insert(rows, stride)?;
        for (number, bag) in misses.bags().iter().enumerate() {
            let first = bag.first_ref as usize;
            for (slot, (state, fresh)) in self.slots[first..].iter_mut().zip(misses.slots_of(bag)) {
                *slot = fresh.unwrap_or(NO_SLOT);
                statuses[bag.sample as usize].count(state);
            }
            let (feature, first) = (u32::from(bag.feature), first as u32);
            self.open[number] =
                BagView { feature, sample: bag.sample, done: bag.done, first, refs: bag.refs };
        }
        let count = misses.bags().len();
        self.tables.kernels.finish(
            &self.stream,
            &self.features,
            &self.open,
            &self.slots,
            count,
            (rows, stride),
        )?;
        // The staged rows are free again once both are done.
        self.stream.after(inserted)?;
        self.stream.wait()
    }

    /// Queries the bags for which there was no room, and waits; as [`Lookup::collect`].
    ///
    /// # Errors
    /// The GPU failed.
    pub fn again(&mut self, misses: &mut Misses, statuses: &mut [Status]) -> Result<bool> {
        let count = self.ring.counts[0].again as usize;
        for number in 0..count {
            let bag = self.only[number];
            statuses[bag.sample as usize].fresh += self.bag(bag) as u32;
        }
        self.tables.kernels.query(&self.stream, &self.memory(), Some(&self.only), count, 1)?;
        self.stream.wait()?;
        Ok(self.note(misses, statuses))
    }

    /// Puts rows that were read ahead into the caches: `rows` are staged in the slots that they name. Returns how many went in.
    ///
    /// # Errors
    /// The GPU failed.
    pub fn insert<'a>(&mut self, misses: &Misses, rows: impl Iterator<Item = &'a Miss>) -> Result<usize> {
        let Some((staged, stride)) = misses.staging() else { return Ok(0) };
        rows.for_each(|miss| self.changes.add(miss.row, miss.slot, miss.epoch));
        Ok(self.changes.insert(staged, stride)?.iter().map(|&done| usize::from(done)).sum())
    }

    /// Tells of each of `rows` whether it is cached, and its set's epoch.
    ///
    /// # Errors
    /// The GPU failed.
    pub fn probe(&mut self, rows: &mut [Miss], mut each: impl FnMut(&mut Miss, bool, Epoch)) -> Result<()> {
        rows.iter().for_each(|miss| self.changes.add(miss.row, 0, miss.epoch));
        self.changes.probe(|number, cached, epoch| each(&mut rows[number], cached, epoch))
    }
}

fn ring(gpu: &Arc<Gpu>, bags: usize, misses_max: usize, row_bytes_max: usize) -> Result<Ring> {
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
fn view_of(tables: &Tables, feature: &FeatureOnDevice<'_>) -> FeatureView {
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
    assert!(feature.default_row.len() == format.dim() && feature.column + feature.width <= feature.stride);
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
        Place::Cached(number) => {
            let cache = tables.cache_view(number);
            assert_eq!(cache.row_bytes as usize, format.row_bytes());
            match tables.namer(number, feature.table) {
                Namer::Indexed { base, end } => FeatureView { cache, base, end: end as u32, ..view },
                Namer::Hashed { salt, .. } => FeatureView { cache, salt, ..view },
            }
        }
        Place::Resident(number) => {
            let table = tables.resident(number);
            assert_eq!(table.row_bytes, format.row_bytes());
            let shape = CacheView {
                row_bytes: table.row_bytes as u32,
                row: table.row as u32,
                ..CacheView::default()
            };
            let (place, hashes, buckets, bucket_count) = match &table.index {
                None => (1, 0, 0, 0),
                Some((hashes, buckets)) => (2, hashes.address(), buckets.address(), buckets.len() as u64 - 1),
            };
            let (rows, count) = (table.rows.address(), table.count as u64);
            FeatureView { cache: shape, rows, count, place, hashes, buckets, bucket_count, ..view }
        }
    }
}
