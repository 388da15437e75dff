//! A worker's backend on the CPU: the lookup in caches and tables in host memory, and the dense
//! network. A lookup on a GPU can also use this dense network. Never reads flash.

use crate::model::Model;
use crate::model::backend::CpuTables;
use crate::model::served_tables::Storage;
use crate::request::worker::progress::Progress;
use crate::schema::batch::Batch;
use crate::schema::{Feature, InputSource, KeySpace, Schema};
use hatchback_kernels::cuda::driver::CudaError;
use hatchback_kernels::cuda::{Device, HostMemory};
use hatchback_kernels::dense::{DenseEngine, DenseError, DenseScratch};
use hatchback_kernels::lookup::feature_prefetch::FeaturePrefetch;
use hatchback_kernels::lookup::miss_list::MissList;
use hatchback_kernels::lookup::{
    ColumnCopy, CopiedRows, FeatureView, Input, LookupStatus, RowStore,
};
use hatchback_kernels::simd::isa::Isa;
use std::sync::Arc;

/// The dense network in host memory, with the inputs and the scratch memory of one worker.
pub(crate) struct CpuDense {
    engine: Arc<DenseEngine>,
    scratch: DenseScratch,
    /// One buffer for each network input, `[batch_max, width]`. One more has the shared vectors
    /// that are copied to each sample of their request.
    inputs: Vec<HostMemory<f32>>,
    /// Values per sample of each buffer; per request of a shared input.
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
        let (batch_max, mut widths) = (model.budget().batch_max as usize, model.input_widths());
        widths.extend(Some(model.spread_width()).filter(|width| *width > 0));
        let is_shared = model.schema().features.iter().any(|feature| feature.shared);
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

    /// Returns the inputs, `[batch, width]` at the front of each.
    pub fn inputs(&self) -> &[HostMemory<f32>] {
        &self.inputs
    }

    /// Returns the values per sample of each input.
    pub fn widths(&self) -> &[usize] {
        &self.widths
    }

    /// Fills the inputs that need no row: the dense features of `batch`, and the lengths and masks
    /// of its bags.
    pub fn fill_inputs(&mut self, model: &Model, batch: &Batch) {
        let schema = model.schema();
        self.ends.clear();
        self.ends.extend_from_slice(batch.ends());
        for (input, data) in schema.network.inputs.iter().zip(&mut self.inputs) {
            fill_input(schema, batch, &input.source, data);
        }
    }

    /// Copies the vectors that feed more than one input.
    fn copy_columns(&mut self, batch: usize) {
        for &ColumnCopy { from, to, width, rows } in &self.copies {
            let strides = (self.widths[from.input], self.widths[to.input]);
            let (count, mut request) = match rows {
                CopiedRows::Samples | CopiedRows::Spread => (batch, 0),
                CopiedRows::Requests => (self.ends.len(), 0),
            };
            for row in 0..count {
                request += usize::from(rows == CopiedRows::Spread && row == self.ends[request]);
                let read = if rows == CopiedRows::Spread { request } else { row };
                let source = read * strides.0 + from.column;
                let target = row * strides.1 + to.column;
                if from.input == to.input {
                    self.inputs[to.input].copy_within(source..source + width, target);
                } else if let Ok([source_input, target_input]) =
                    self.inputs.get_disjoint_mut([from.input, to.input])
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
            let mut input = self.dense.input(model.column(l).input);
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
            let mut input = self.dense.input(model.column(l).input);
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

/// Returns the rows that feature `f` has in an input of `features`.
fn rows_of(f: usize, features: &[u16], declared: &[Feature]) -> CopiedRows {
    match features.iter().all(|f| declared[usize::from(*f)].shared) {
        _ if !declared[f].shared => CopiedRows::Samples,
        true => CopiedRows::Requests,
        false => CopiedRows::Spread,
    }
}

/// Returns the bag of each row of an input.
fn bag_of_rows(batch: &Batch, rows: CopiedRows) -> impl Iterator<Item = usize> {
    let (ends, mut request) = (batch.ends(), 0);
    let count = if rows == CopiedRows::Requests { ends.len() } else { batch.size() };
    (0..count).map(move |row| {
        if rows != CopiedRows::Spread {
            return row;
        }
        request += usize::from(row == ends[request]);
        request
    })
}

/// Fills an input that needs no row.
pub(super) fn fill_input(schema: &Schema, batch: &Batch, source: &InputSource, data: &mut [f32]) {
    match source {
        InputSource::Dense => data[..batch.dense().len()].copy_from_slice(batch.dense()),
        InputSource::Lengths(features) => fill_lengths(batch, features, &schema.features, data),
        InputSource::Masks(features) => fill_masks(batch, features, &schema.features, data),
        InputSource::Vectors(_) => {}
    }
}

/// Writes the number of keys of each bag, `[batch, features]`.
fn fill_lengths(batch: &Batch, features: &[u16], declared: &[Feature], data: &mut [f32]) {
    for (column, f) in features.iter().map(|f| usize::from(*f)).enumerate() {
        let offsets = batch.bags(f).offsets;
        for (row, bag) in bag_of_rows(batch, rows_of(f, features, declared)).enumerate() {
            data[row * features.len() + column] = (offsets[bag + 1] - offsets[bag]) as f32;
        }
    }
}

/// Writes 1 for each key of a bag, and 0 for its padding and the rest, `[batch, sum of
/// hotness_max]`.
fn fill_masks(batch: &Batch, features: &[u16], declared: &[Feature], data: &mut [f32]) {
    let places = |f: &u16| declared[usize::from(*f)].hotness_max as usize;
    let stride: usize = features.iter().map(places).sum();
    let mut first = 0;
    for f in features {
        let (bags, places) = (batch.bags(usize::from(*f)), places(f));
        let rows = rows_of(usize::from(*f), features, declared);
        let padding = declared[usize::from(*f)].padding;
        for (row, number) in bag_of_rows(batch, rows).enumerate() {
            let bag = bags.offsets[number] as usize..bags.offsets[number + 1] as usize;
            let bag = &bags.keys[bag];
            let mask = &mut data[row * stride + first..][..places];
            let (keys, rest) = mask.split_at_mut(bag.len());
            for (one, key) in keys.iter_mut().zip(bag) {
                *one = if Some(*key) == padding { 0.0 } else { 1.0 };
            }
            // The buffer still has the masks of the batch before.
            rest.fill(0.0);
        }
        first += places;
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
