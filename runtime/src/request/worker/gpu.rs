//! A worker's backend on a GPU: the whole step from keys to scores, or the lookup alone if the
//! dense network runs on the CPU. Never decides which rows are read from flash.
//!
//! One launch probes all lookups, and the dense network follows it. If no row is missing, that
//! launch computes the scores. Otherwise the host reads the missing rows, and a second launch pools
//! the open bags. The dense network then runs again for the samples of those bags.
//!
//! A buffer that the GPU may still access is reused only after its stream is synchronised, on error
//! paths too. If synchronising fails, the worker fails every later request.

use crate::model::Model;
use crate::model::budget::Budget;
use crate::request::worker::cpu::{CpuDense, fill_part};
use crate::request::worker::progress::Progress;
use crate::schema::batch::Batch;
use crate::schema::lookup::Lookup;
use crate::schema::{KeySpace, Schema};
use hatchback_kernels::cache::Epoch;
use hatchback_kernels::cuda::driver::{CudaError, Gpu};
use hatchback_kernels::dense::{DenseEngine, DenseError};
use hatchback_kernels::gpu::lookup::{FeatureOnDevice, GpuLookup, Keys, LookupLimits, Samples};
use hatchback_kernels::gpu::step::{Step, StepInputs};
use hatchback_kernels::gpu::tables::DeviceTables;
use hatchback_kernels::gpu::{DeviceEngine, InputType};
use hatchback_kernels::lookup::LookupStatus;
use hatchback_kernels::lookup::miss_list::{Miss, MissList};
use std::sync::Arc;

/// The part of one worker on a GPU.
pub(crate) enum GpuBackend {
    /// The lookup, which writes inputs that the CPU's dense network reads. It is dropped first.
    Lookup { lookup: Box<GpuLookup>, dense: CpuDense },
    /// The lookup and the dense network.
    Step(Box<Step>),
}

impl GpuBackend {
    /// Makes the lookup of one worker whose dense network runs on the CPU.
    pub fn with_cpu_dense(
        model: &Model,
        tables: &Arc<DeviceTables>,
        engine: &Arc<DenseEngine>,
    ) -> Result<Self, CudaError> {
        let dense = CpuDense::new(model, engine, &model.lookup_device())?;
        let addresses: Vec<u64> =
            dense.inputs().iter().map(|i| i.mapped().map_or(0, |i| i.address())).collect();
        let types = vec![InputType::F32; addresses.len()];
        let features = features_on_device(model, &addresses, &types);
        let lookup = GpuLookup::new(
            tables,
            &features,
            lookup_limits(model.schema(), model.budget(), tables.gpu()),
        )?;
        Ok(Self::Lookup { lookup: Box::new(lookup), dense })
    }

    /// Makes the lookup and the dense network of one worker.
    pub fn with_gpu_dense(
        model: &Model,
        tables: &Arc<DeviceTables>,
        engine: &Arc<DeviceEngine>,
    ) -> Result<Self, CudaError> {
        let step = Step::new(
            tables,
            engine,
            StepInputs { parts: model.input_parts(), copies: model.copies() },
            |addresses| features_on_device(model, addresses, engine.input_types()),
            lookup_limits(model.schema(), model.budget(), tables.gpu()),
        );
        let step = step.map_err(|e| e.into_cuda(tables.gpu()))?;
        Ok(Self::Step(Box::new(step)))
    }

    fn gpu_lookup(&mut self) -> &mut GpuLookup {
        match self {
            Self::Lookup { lookup, .. } => lookup,
            Self::Step(step) => step.lookup(),
        }
    }

    /// Starts the lookup of `batch` with one launch, waits for it, and lists its misses.
    pub fn lookup(
        &mut self,
        model: &Model,
        batch: &Batch,
        misses: &mut MissList,
        statuses: &mut [LookupStatus],
    ) -> Result<Progress, CudaError> {
        let schema = model.schema();
        let bags = |l: usize| batch.bags(schema.lookups[l].feature.into());
        let samples = Samples { count: batch.size(), ends: batch.ends() };
        match self {
            Self::Lookup { lookup, dense } => {
                dense.fill_inputs(model, batch);
                lookup.begin(samples, bags)?;
            }
            Self::Step(step) => {
                step.begin(samples, bags, |part, values| fill_part(model, batch, part, values))?;
            }
        }
        let is_partial = self.gpu_lookup().collect(misses, statuses)?;
        Ok(progress(is_partial))
    }

    /// Looks up the remaining bags, waits, and lists their misses.
    pub fn continue_lookup(
        &mut self,
        misses: &mut MissList,
        statuses: &mut [LookupStatus],
    ) -> Result<Progress, CudaError> {
        Ok(progress(self.gpu_lookup().requery(misses, statuses)?))
    }

    /// Inserts the rows of `misses` into the caches and pools the bags that waited for them. With
    /// the last misses of a batch the dense network on the GPU follows in the same launch.
    pub fn finish_bags(
        &mut self,
        misses: &MissList,
        statuses: &mut [LookupStatus],
        progress: Progress,
    ) -> Result<(), CudaError> {
        match (self, progress) {
            (Self::Step(step), Progress::Complete) => step.complete(misses, statuses),
            (backend, _) => backend.gpu_lookup().finish_bags(misses, statuses),
        }
    }

    /// Computes `scores`, `[batch, outputs]`, or copies those that the GPU has computed.
    pub fn run_dense(&mut self, batch: usize, scores: &mut [f32]) -> Result<(), DenseError> {
        match self {
            Self::Lookup { dense, .. } => dense.run(batch, scores),
            Self::Step(step) => {
                scores.copy_from_slice(step.scores(batch));
                Ok(())
            }
        }
    }

    /// Calls `each` for each of `rows` with whether it is cached and with the epoch of its set.
    pub fn probe(
        &mut self,
        rows: &mut [Miss],
        each: impl FnMut(&mut Miss, bool, Epoch),
    ) -> Result<(), CudaError> {
        self.gpu_lookup().probe(rows, each)
    }

    /// Inserts `rows`, which `misses` has staged, into the caches; returns how many it inserted.
    pub fn insert<'a>(
        &mut self,
        misses: &MissList,
        rows: impl Iterator<Item = &'a Miss>,
    ) -> Result<usize, CudaError> {
        self.gpu_lookup().insert(misses, rows)
    }

    /// Waits, after an error, until the GPU no longer accesses the memory that the next request
    /// writes.
    pub fn recover(&mut self) -> Result<(), CudaError> {
        self.gpu_lookup().recover()
    }
}

fn progress(is_partial: bool) -> Progress {
    if is_partial { Progress::MissListFull } else { Progress::Complete }
}

/// Returns the limits of one worker's lookups on `gpu`.
pub(crate) fn lookup_limits(schema: &Schema, budget: &Budget, gpu: &Gpu) -> LookupLimits {
    LookupLimits {
        batch_max: budget.batch_max as usize,
        misses_max: budget.misses_max as usize,
        row_bytes_max: schema.row_bytes_max(),
        keys: Keys::on(gpu),
        is_shared: schema.has_shared(),
    }
}

/// Returns the lookups for a GPU, each with a copy of its keys. The network's inputs begin at
/// `addresses` on the GPU and have `types`.
fn features_on_device<'a>(
    model: &'a Model,
    addresses: &[u64],
    types: &[InputType],
) -> Vec<FeatureOnDevice<'a>> {
    let schema = model.schema();
    let on_device = |(l, lookup): (usize, &Lookup)| {
        let (at, declared, feature) = (model.column(l), schema.table_of(l), schema.feature_of(l));
        FeatureOnDevice {
            table: lookup.table,
            format: model.tables()[usize::from(lookup.table)].format,
            keys_end: (declared.keys == KeySpace::Index).then_some(declared.rows),
            default_row: &declared.default_row,
            pooling: lookup.pooling,
            weighted: feature.weighted,
            shared: feature.shared,
            hotness_max: feature.hotness_max as usize,
            input: addresses[at.part],
            input_type: types[at.part],
            stride: model.input_parts()[at.part].width,
            column: at.column,
            width: schema.vector_width(l),
        }
    };
    schema.lookups.iter().enumerate().map(on_device).collect()
}
