//! A worker's part of a GPU: the whole step, from keys to scores, or the lookup alone where the
//! dense network runs on the CPU. Never decides what is read from flash.

use crate::model::Model;
use crate::schema::InputSource;
use crate::schema::batch::Batch;
use hatchback_kernels::cuda::HostMemory;
use hatchback_kernels::cuda::driver::{CudaError, Gpu};
use hatchback_kernels::dense::DenseError;
use hatchback_kernels::gpu::lookup::{GpuLookup, Keys, LookupLimits};
use hatchback_kernels::gpu::step::Step;
use hatchback_kernels::lookup::LookupStatus;
use hatchback_kernels::lookup::miss_list::MissList;
use std::sync::Arc;

/// What a worker has on the GPU.
pub(crate) enum OnGpu {
    /// The lookup, into inputs that the host reaches too.
    GpuLookup(Box<GpuLookup>),
    /// The lookup and the dense network behind it.
    Step(Box<Step>),
}

impl OnGpu {
    /// The part of one worker on `model`, and the network's inputs where the host computes with
    /// them; `None` where the model is not on a GPU.
    pub fn new(
        model: &Model,
        widths: &[usize],
        inputs: &mut Vec<HostMemory<f32>>,
    ) -> Result<Option<Self>, CudaError> {
        let Some(tables) = &model.on_gpu else { return Ok(None) };
        let limits = model.limits_on(tables.gpu());
        let Some(engine) = &model.dense_on_gpu else {
            let at: Vec<u64> =
                inputs.iter().map(|i| i.mapped().map_or(0, |i| i.address())).collect();
            let features = model.features_on_gpu(&at, widths);
            let lookup = GpuLookup::new(tables, &features, limits)?;
            return Ok(Some(Self::GpuLookup(Box::new(lookup))));
        };
        inputs.clear();
        let dense =
            model.schema().network.inputs.iter().position(|i| i.source == InputSource::Dense);
        let step = Step::new(
            tables,
            engine,
            widths,
            dense,
            |at| model.features_on_gpu(at, widths),
            limits,
        );
        let step = step.map_err(|e| match e {
            DenseError::Cuda(e) => *e,
            e => {
                CudaError::NoKernels { gpu: tables.gpu().name().to_owned(), problem: e.to_string() }
            }
        })?;
        Ok(Some(Self::Step(Box::new(step))))
    }

    /// The lookup.
    pub fn lookup(&mut self) -> &mut GpuLookup {
        match self {
            Self::GpuLookup(lookup) => lookup,
            Self::Step(step) => step.lookup(),
        }
    }

    /// After an error: itself again, once nothing that was begun reads or writes what the next
    /// request does; else the GPU is gone.
    pub fn recovered(mut self) -> Result<Self, Arc<CudaError>> {
        self.lookup().give_up()?;
        Ok(self)
    }

    /// Begins a request: one launch, no wait.
    pub fn begin(&mut self, batch: &Batch) -> Result<(), CudaError> {
        match self {
            Self::GpuLookup(lookup) => lookup.begin(batch.size(), |f| batch.bags(f)),
            Self::Step(step) => step.begin(batch.size(), |f| batch.bags(f), batch.dense()),
        }
    }

    /// Finishes what waits in `misses` and puts its rows into the caches; with the `last` of a
    /// request the network follows.
    pub fn settle(
        &mut self,
        misses: &MissList,
        statuses: &mut [LookupStatus],
        last: bool,
    ) -> Result<(), CudaError> {
        match self {
            Self::Step(step) if last => step.settle(misses, statuses),
            _ => self.lookup().settle(misses, statuses),
        }
    }
}

impl Model {
    /// What one worker's requests on `gpu` are bounded by.
    pub(crate) fn limits_on(&self, gpu: &Gpu) -> LookupLimits {
        LookupLimits {
            batch_max: self.budget().batch_max as usize,
            misses_max: self.budget().misses_max as usize,
            row_bytes_max: self.staging_row_bytes(),
            keys: Keys::on(gpu),
        }
    }
}
