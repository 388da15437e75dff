//! A worker's backend on the CPU: the lookup in caches and tables in host memory, and the dense
//! network. A lookup on a GPU can also use this dense network. Never reads flash.

use crate::model::Model;
use crate::model::backend::CpuTables;
use crate::model::opened::ColumnCopy;
use crate::model::served_tables::Storage;
use crate::request::worker::progress::Progress;
use crate::schema::batch::Batch;
use crate::schema::{Feature, InputSource, KeySpace};
use hatchback_kernels::cuda::driver::CudaError;
use hatchback_kernels::cuda::{Device, HostMemory};
use hatchback_kernels::dense::{DenseEngine, DenseError, DenseScratch};
use hatchback_kernels::lookup::feature_prefetch::FeaturePrefetch;
use hatchback_kernels::lookup::miss_list::MissList;
use hatchback_kernels::lookup::{FeatureView, Input, LookupStatus, RowStore};
use hatchback_kernels::simd::isa::Isa;
use std::sync::Arc;

/// The dense network in host memory, with the inputs and the scratch memory of one worker.
pub(crate) struct CpuDense {
    engine: Arc<DenseEngine>,
    scratch: DenseScratch,
    /// One buffer for each network input, `[batch_max, width]`.
    inputs: Vec<HostMemory<f32>>,
    /// Values per sample of each input.
    widths: Vec<usize>,
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
        let inputs = widths.iter().map(|width| device.host_memory(batch_max * width));
        Ok(Self {
            engine: Arc::clone(engine),
            scratch: engine.scratch(batch_max),
            inputs: inputs.collect::<Result<_, _>>()?,
            widths,
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
        for (input, data) in schema.network.inputs.iter().zip(&mut self.inputs) {
            match &input.source {
                InputSource::Dense => data[..batch.dense().len()].copy_from_slice(batch.dense()),
                InputSource::Lengths(features) => {
                    fill_lengths(batch, features, data);
                }
                InputSource::Masks(features) => {
                    fill_masks(batch, features, &schema.features, data);
                }
                InputSource::Vectors(_) => {}
            }
        }
    }

    /// Copies the vectors that feed more than one input.
    fn copy_columns(&mut self, batch: usize) {
        for &ColumnCopy { from, to, width } in &self.copies {
            let strides = (self.widths[from.input], self.widths[to.input]);
            for sample in 0..batch {
                let source = sample * strides.0 + from.column;
                let target = sample * strides.1 + to.column;
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
        self.engine.run(batch, &self.inputs, scores, &mut self.scratch)
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
        Self { tables: Arc::clone(tables), dense, isa: Isa::detect(), next }
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
        let (samples, lookups) = (batch.size(), &model.schema().lookups);
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
            let done = view.query(self.isa, bags, from, &mut input, misses, statuses);
            if done < samples {
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
            view.finish(self.isa, bag, bags, misses, &mut input, statuses);
        }
    }
}

/// Writes the number of keys of each bag, `[batch, features]`.
fn fill_lengths(batch: &Batch, features: &[u16], data: &mut [f32]) {
    for (column, &f) in features.iter().enumerate() {
        let offsets = batch.bags(usize::from(f)).offsets;
        for (sample, bounds) in offsets.windows(2).enumerate() {
            data[sample * features.len() + column] = (bounds[1] - bounds[0]) as f32;
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
        let padding = declared[usize::from(*f)].padding;
        for (sample, bounds) in bags.offsets.windows(2).enumerate() {
            let bag = &bags.keys[bounds[0] as usize..bounds[1] as usize];
            let mask = &mut data[sample * stride + first..][..places];
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
