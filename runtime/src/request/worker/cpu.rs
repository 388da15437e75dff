//! A worker's backend on the CPU: the lookup in caches and tables in host memory, and the dense
//! network in host memory, which follows a lookup on a GPU too. Never reads flash.

use crate::model::Model;
use crate::model::backend::CpuTables;
use crate::model::served_tables::Storage;
use crate::request::worker::progress::Progress;
use crate::schema::batch::Batch;
use crate::schema::{InputSource, KeySpace};
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
}

impl CpuDense {
    /// Takes the memory of one worker on `model`; `device` can access the inputs.
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

    /// Copies the dense features of `batch` into their input.
    pub fn copy_features(&mut self, model: &Model, batch: &Batch) {
        for (input, data) in model.schema().network.inputs.iter().zip(&mut self.inputs) {
            if input.source == InputSource::Dense {
                data[..batch.dense().len()].copy_from_slice(batch.dense());
            }
        }
    }

    /// Computes `scores`, `[batch, outputs]`, from the inputs.
    pub fn run(&mut self, batch: usize, scores: &mut [f32]) -> Result<(), DenseError> {
        if batch == 0 {
            return Ok(());
        }
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
    /// Where the lookup continues after a full miss list was resolved.
    next: Cursor,
}

/// A feature of the batch and a sample of it.
#[derive(Clone, Copy, Default)]
struct Cursor {
    feature: usize,
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
        self.dense.copy_features(model, batch);
        self.next = Cursor::default();
        self.continue_lookup(model, batch, misses, statuses)
    }

    /// Probes and pools feature by feature, until the batch is complete or the miss list is full.
    pub fn continue_lookup(
        &mut self,
        model: &Model,
        batch: &Batch,
        misses: &mut MissList,
        statuses: &mut [LookupStatus],
    ) -> Progress {
        let (samples, features) = (batch.size(), batch.features());
        let keys = (0..features).map(|f| batch.bags(f).keys.len()).sum();
        let prefetch = FeaturePrefetch::new(keys, features);

        while self.next.feature < features {
            let f = self.next.feature;
            if self.next.sample == 0 {
                prefetch.prefetch(self.isa, f, |f| {
                    (feature_view(model, &self.tables, f), batch.bags(f))
                });
            }
            let feature = feature_view(model, &self.tables, f);
            let (bags, from) = (batch.bags(f), self.next.sample);
            let mut input = self.dense.input(model.column(f).input);
            let done = feature.query(self.isa, bags, from, &mut input, misses, statuses);
            if done < samples {
                self.next.sample = done;
                return Progress::MissListFull;
            }
            self.next = Cursor { feature: f + 1, sample: 0 };
        }
        Progress::Complete
    }

    /// Pools the bags that waited for rows of `misses`.
    pub fn finish_bags(&mut self, model: &Model, misses: &MissList, statuses: &mut [LookupStatus]) {
        for bag in misses.bags() {
            let f = usize::from(bag.feature);
            let feature = feature_view(model, &self.tables, f);
            let mut input = self.dense.input(model.column(f).input);
            feature.finish(self.isa, bag, misses, &mut input, statuses);
        }
    }
}

/// Returns feature `f` as the lookup reads it.
#[inline]
fn feature_view<'a>(model: &'a Model, tables: &'a CpuTables, f: usize) -> FeatureView<'a> {
    let schema = model.schema();
    let (feature, declared) = (&schema.features[f], schema.table_of(f));
    let table = &model.tables()[usize::from(feature.table)];
    FeatureView {
        id: f as u16,
        table: feature.table,
        format: table.format,
        keys_end: (declared.keys == KeySpace::Index).then_some(declared.rows),
        default_row: &declared.default_row,
        pooling: feature.pooling,
        rows: match table.storage {
            Storage::Resident(number) => RowStore::Resident(&tables.residents[number]),
            Storage::Cached(cache) => RowStore::Cached(&tables.caches[cache]),
        },
        column: model.column(f).column,
        width: schema.feature_width(f),
    }
}
