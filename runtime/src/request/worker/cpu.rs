//! A worker's backend on the CPU: the lookup in caches and tables in host memory, and the dense
//! network. A lookup on a GPU can also use this dense network. Never reads flash.

use crate::model::Model;
use crate::model::backend::CpuTables;
use crate::model::served_tables::Storage;
use crate::request::worker::progress::Progress;
use crate::schema::batch::Batch;
use crate::schema::input_parts::Item;
use crate::schema::{Feature, KeySpace};
use hatchback_kernels::cuda::driver::CudaError;
use hatchback_kernels::cuda::{Device, HostMemory};
use hatchback_kernels::dense::{DenseEngine, DenseError, DenseScratch};
use hatchback_kernels::lookup::feature_prefetch::FeaturePrefetch;
use hatchback_kernels::lookup::miss_list::MissList;
use hatchback_kernels::lookup::{ColumnCopy, FeatureView, Input, LookupStatus, RowStore};
use hatchback_kernels::simd::isa::Isa;
use std::sync::Arc;

/// The dense network in host memory, with the inputs and the scratch memory of one worker.
pub(crate) struct CpuDense {
    engine: Arc<DenseEngine>,
    scratch: DenseScratch,
    /// One buffer for each part of a network input, `[batch_max, width]`.
    inputs: Vec<HostMemory<f32>>,
    /// Values per sample of each buffer; per request of a shared part.
    widths: Vec<usize>,
    /// The end of the samples of each request of the batch; empty if nothing is shared.
    ends: Vec<usize>,
    /// Vectors that are copied from one input to another before a run.
    copies: Vec<ColumnCopy>,
}

impl CpuDense {
    /// Allocates the memory of one worker on `model`; `device` can access the inputs.
    pub fn new(
        model: &Model,
        engine: &Arc<DenseEngine>,
        device: &Device,
    ) -> Result<Self, CudaError> {
        let (batch_max, widths) = (model.budget().batch_max as usize, model.input_widths());
        let is_shared = model.schema().has_shared();
        let inputs = widths.iter().map(|width| device.host_memory(batch_max * width));
        Ok(Self {
            engine: Arc::clone(engine),
            scratch: engine.scratch(batch_max),
            inputs: inputs.collect::<Result<_, _>>()?,
            widths,
            ends: Vec::with_capacity(if is_shared { batch_max } else { 0 }),
            copies: model.copies().to_vec(),
        })
    }

    /// Returns the parts of the inputs, `[batch, width]` at the front of each.
    pub fn inputs(&self) -> &[HostMemory<f32>] {
        &self.inputs
    }

    /// Fills the inputs that need no row: the dense features of `batch`, and the lengths and masks
    /// of its bags.
    pub fn fill_inputs(&mut self, model: &Model, batch: &Batch) {
        self.ends.clear();
        self.ends.extend_from_slice(batch.ends());
        for part in 0..self.inputs.len() {
            fill_part(model, batch, part, &mut self.inputs[part]);
        }
    }

    /// Copies the vectors that feed more than one input.
    fn copy_columns(&mut self, batch: usize) {
        for &ColumnCopy { from, to, width, shared } in &self.copies {
            let strides = [from, to].map(|at| self.widths[at.part]);
            for row in 0..if shared { self.ends.len() } else { batch } {
                let source = row * strides[0] + from.column;
                let target = row * strides[1] + to.column;
                if from.part == to.part {
                    self.inputs[to.part].copy_within(source..source + width, target);
                } else if let Ok([source_input, target_input]) =
                    self.inputs.get_disjoint_mut([from.part, to.part])
                {
                    target_input[target..target + width]
                        .copy_from_slice(&source_input[source..source + width]);
                }
            }
        }
    }

    /// Computes `scores`, `[batch, outputs]`, from the inputs.
    pub fn run(&mut self, batch: usize, scores: &mut [f32]) -> Result<(), DenseError> {
        if batch == 0 {
            return Ok(());
        }
        self.copy_columns(batch);
        let inputs = &self.inputs[..self.engine.widths().len()];
        match self.ends.as_slice() {
            [] => self.engine.run(batch, inputs, scores, &mut self.scratch),
            ends => self.engine.run_requests(ends, inputs, scores, &mut self.scratch),
        }
    }

    fn input(&mut self, number: usize) -> Input<'_> {
        Input { data: &mut self.inputs[number], stride: self.widths[number] }
    }
}

/// The lookup and the dense network of one worker, both on the CPU.
pub(crate) struct CpuBackend {
    tables: Arc<CpuTables>,
    dense: CpuDense,
    isa: Isa,
    /// The position at which the lookup continues after a full miss list was resolved.
    next: Cursor,
    /// The statuses of shared lookups, `[requests]`; empty if nothing is shared.
    shared: Vec<LookupStatus>,
}

/// A position in a batch: a lookup of the schema, and a sample.
#[derive(Clone, Copy, Default)]
struct Cursor {
    lookup: usize,
    sample: usize,
}

impl CpuBackend {
    pub fn new(tables: &Arc<CpuTables>, dense: CpuDense) -> Self {
        let next = Cursor::default();
        let shared = vec![LookupStatus::default(); dense.ends.capacity()];
        Self { tables: Arc::clone(tables), dense, isa: Isa::detect(), next, shared }
    }

    pub fn dense(&mut self) -> &mut CpuDense {
        &mut self.dense
    }

    pub fn inputs(&self) -> &[HostMemory<f32>] {
        self.dense.inputs()
    }

    /// Starts the lookup of `batch`: copies its dense features, then probes and pools.
    pub fn lookup(
        &mut self,
        model: &Model,
        batch: &Batch,
        misses: &mut MissList,
        statuses: &mut [LookupStatus],
    ) -> Progress {
        self.dense.fill_inputs(model, batch);
        self.next = Cursor::default();
        self.continue_lookup(model, batch, misses, statuses)
    }

    /// Probes and pools lookup by lookup, until the batch is complete or the miss list is full.
    pub fn continue_lookup(
        &mut self,
        model: &Model,
        batch: &Batch,
        misses: &mut MissList,
        statuses: &mut [LookupStatus],
    ) -> Progress {
        let lookups = &model.schema().lookups;
        let keys = lookups.iter().map(|lookup| batch.bags(lookup.feature.into()).keys.len()).sum();
        let prefetch = FeaturePrefetch::new(keys, lookups.len());

        while self.next.lookup < lookups.len() {
            let l = self.next.lookup;
            // A lookup that continues after a full miss list has prefetched before.
            if self.next.sample == 0 {
                prefetch.prefetch(self.isa, l, |l| {
                    (lookup_view(model, &self.tables, l), batch.bags(lookups[l].feature.into()))
                });
            }
            let view = lookup_view(model, &self.tables, l);
            let (bags, from) = (batch.bags(lookups[l].feature.into()), self.next.sample);
            let mut input = self.dense.input(model.column(l).part);
            let is_shared = model.schema().feature_of(l).shared;
            let counts =
                if is_shared { &mut self.shared[..batch.ends().len()] } else { &mut *statuses };
            let rows = counts.len();
            let done = view.query(self.isa, bags, from, &mut input, misses, counts);
            if is_shared {
                count_once(batch, &mut self.shared, statuses);
            }
            if done < rows {
                self.next.sample = done;
                return Progress::MissListFull;
            }
            self.next = Cursor { lookup: l + 1, sample: 0 };
        }
        Progress::Complete
    }

    /// Pools the bags that waited for rows of `misses`.
    pub fn finish_bags(
        &mut self,
        model: &Model,
        batch: &Batch,
        misses: &MissList,
        statuses: &mut [LookupStatus],
    ) {
        for bag in misses.bags() {
            let l = usize::from(bag.feature);
            let view = lookup_view(model, &self.tables, l);
            let bags = batch.bags(model.schema().lookups[l].feature.into());
            let mut input = self.dense.input(model.column(l).part);
            let is_shared = model.schema().feature_of(l).shared;
            let counts = if is_shared { &mut self.shared[..] } else { &mut *statuses };
            view.finish(self.isa, bag, bags, misses, &mut input, counts);
        }
        count_once(batch, &mut self.shared, statuses);
    }
}

/// Moves the counts of shared lookups to the first sample of each request: a request looks a shared
/// bag up once. All of its samples are late if a shared row was.
fn count_once(batch: &Batch, shared: &mut [LookupStatus], statuses: &mut [LookupStatus]) {
    let mut start = 0;
    for (counts, &end) in shared.iter_mut().zip(batch.ends()) {
        let counts = std::mem::take(counts);
        let samples = &mut statuses[start..end];
        samples.iter_mut().for_each(|status| status.late |= counts.late);
        samples.iter_mut().take(1).for_each(|first| first.add(&counts));
        start = end;
    }
}

/// Fills the columns of part `number` of the inputs that need no row.
pub(super) fn fill_part(model: &Model, batch: &Batch, number: usize, data: &mut [f32]) {
    let (features, width) = (&model.schema().features, model.input_parts()[number].width);
    for (item, to) in model.fills().iter().filter(|(_, to)| to.part == number) {
        // A batch without samples has no rows.
        let data = data.get_mut(to.column..).unwrap_or_default();
        match *item {
            // The first feature of a part brings the others.
            Item::Dense { first, shared } if to.column == 0 => {
                fill_dense(batch, shared, first, width, data);
            }
            Item::Dense { .. } | Item::Vector(_) => {}
            Item::Length(f) => fill_lengths(batch, f, data, width),
            Item::Mask(f) => fill_masks(batch, f, &features[f], data, width),
        }
    }
}

/// Writes the dense features of a part, `[rows, width]`. `first` is the number of its first one
/// among those of its kind.
fn fill_dense(batch: &Batch, shared: bool, first: usize, width: usize, data: &mut [f32]) {
    let (values, stride) = batch.dense_rows(shared);
    if width == stride {
        return data[..values.len()].copy_from_slice(values);
    }
    for (row, to) in values.chunks_exact(stride).zip(data.chunks_exact_mut(width)) {
        to.copy_from_slice(&row[first..first + width]);
    }
}

/// Writes the number of keys of each bag of feature `f` to the front of rows of `stride` values.
fn fill_lengths(batch: &Batch, f: usize, data: &mut [f32], stride: usize) {
    for (row, ends) in batch.bags(f).offsets.windows(2).enumerate() {
        data[row * stride] = (ends[1] - ends[0]) as f32;
    }
}

/// Writes 1 for each key of a bag of feature `f`, and 0 for its padding and the rest, to the front
/// of rows of `stride` values.
fn fill_masks(batch: &Batch, f: usize, declared: &Feature, data: &mut [f32], stride: usize) {
    let bags = batch.bags(f);
    for (row, ends) in bags.offsets.windows(2).enumerate() {
        let bag = &bags.keys[ends[0] as usize..ends[1] as usize];
        let mask = &mut data[row * stride..][..declared.hotness_max as usize];
        let (keys, rest) = mask.split_at_mut(bag.len());
        for (one, key) in keys.iter_mut().zip(bag) {
            *one = if Some(*key) == declared.padding { 0.0 } else { 1.0 };
        }
        // The buffer still has the masks of the batch before.
        rest.fill(0.0);
    }
}

/// Returns the kernels' view of lookup `l`.
#[inline]
fn lookup_view<'a>(model: &'a Model, tables: &'a CpuTables, l: usize) -> FeatureView<'a> {
    let schema = model.schema();
    let (lookup, declared) = (&schema.lookups[l], schema.table_of(l));
    let table = &model.tables()[usize::from(lookup.table)];
    FeatureView {
        id: l as u16,
        table: lookup.table,
        format: table.format,
        keys_end: (declared.keys == KeySpace::Index).then_some(declared.rows),
        default_row: &declared.default_row,
        pooling: lookup.pooling,
        rows: match table.storage {
            Storage::Resident(number) => RowStore::Resident(&tables.residents[number]),
            Storage::Cached(cache) => RowStore::Cached(&tables.caches[cache]),
        },
        column: model.column(l).column,
        width: schema.vector_width(l),
    }
}
