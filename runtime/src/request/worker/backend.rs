//! The device on which a worker computes: the CPU, a GPU, or none after its GPU failed.

use crate::model::Model;
use crate::model::backend::ModelBackend;
use crate::request::error::ScoreError;
use crate::request::worker::cpu::{CpuBackend, CpuDense};
use crate::request::worker::gpu::GpuBackend;
use crate::request::worker::progress::Progress;
use crate::schema::batch::Batch;
use hatchback_kernels::cuda::driver::CudaError;
use hatchback_kernels::cuda::{Device, HostMemory};
use hatchback_kernels::lookup::LookupStatus;
use hatchback_kernels::lookup::miss_list::MissList;
use std::sync::Arc;

/// The device on which a worker computes, with the worker's memory there.
pub(crate) enum WorkerBackend {
    Cpu(CpuBackend),
    Gpu(GpuBackend),
    /// The worker could not be made on the GPU, or the GPU stopped working. Every request fails
    /// with this error.
    Failed(Arc<CudaError>),
}

impl WorkerBackend {
    /// Allocates the memory of one worker on `model`.
    pub fn new(model: &Model) -> Result<Self, CudaError> {
        match model.backend() {
            ModelBackend::Cpu { tables, dense } => {
                let dense = CpuDense::new(model, dense, &Device::Cpu)?;
                Ok(Self::Cpu(CpuBackend::new(tables, dense)))
            }
            ModelBackend::GpuTables { tables, dense } => {
                GpuBackend::with_cpu_dense(model, tables, dense).map(Self::Gpu)
            }
            ModelBackend::Gpu { tables, dense } => {
                GpuBackend::with_gpu_dense(model, tables, dense).map(Self::Gpu)
            }
        }
    }

    /// Returns the error of every request, if the GPU failed.
    pub fn failure(&self) -> Option<&Arc<CudaError>> {
        match self {
            Self::Cpu(_) | Self::Gpu(_) => None,
            Self::Failed(e) => Some(e),
        }
    }

    /// Returns the GPU's part, if there is one.
    pub fn gpu(&mut self) -> Option<&mut GpuBackend> {
        match self {
            Self::Gpu(gpu) => Some(gpu),
            Self::Cpu(_) | Self::Failed(_) => None,
        }
    }

    /// Returns the inputs of the dense network after a request whose network ran on the CPU.
    pub fn inputs(&self) -> &[HostMemory<f32>] {
        match self {
            Self::Cpu(cpu) => cpu.inputs(),
            Self::Gpu(GpuBackend::Lookup { dense, .. }) => dense.inputs(),
            Self::Gpu(GpuBackend::Step(_)) | Self::Failed(_) => &[],
        }
    }

    /// Probes the keys of `batch`, pools the bags whose rows are all in memory, and puts the others
    /// on the miss list.
    pub fn lookup(
        &mut self,
        model: &Model,
        batch: &Batch,
        misses: &mut MissList,
        statuses: &mut [LookupStatus],
    ) -> Result<Progress, ScoreError> {
        match self {
            Self::Cpu(cpu) => Ok(cpu.lookup(model, batch, misses, statuses)),
            Self::Gpu(gpu) => Ok(gpu.lookup(model, batch, misses, statuses)?),
            Self::Failed(e) => Err(Arc::clone(e).into()),
        }
    }

    /// Continues a lookup after its full miss list was resolved.
    pub fn continue_lookup(
        &mut self,
        model: &Model,
        batch: &Batch,
        misses: &mut MissList,
        statuses: &mut [LookupStatus],
    ) -> Result<Progress, ScoreError> {
        match self {
            Self::Cpu(cpu) => Ok(cpu.continue_lookup(model, batch, misses, statuses)),
            Self::Gpu(gpu) => Ok(gpu.continue_lookup(misses, statuses)?),
            Self::Failed(e) => Err(Arc::clone(e).into()),
        }
    }

    /// Pools the bags that waited for the rows of `misses`. Each row was fetched or has a default.
    pub fn finish_bags(
        &mut self,
        model: &Model,
        batch: &Batch,
        misses: &MissList,
        statuses: &mut [LookupStatus],
        progress: Progress,
    ) -> Result<(), ScoreError> {
        match self {
            Self::Cpu(cpu) => {
                cpu.finish_bags(model, batch, misses, statuses);
                Ok(())
            }
            Self::Gpu(gpu) => Ok(gpu.finish_bags(misses, statuses, progress)?),
            Self::Failed(e) => Err(Arc::clone(e).into()),
        }
    }

    /// Writes the scores of the dense network, `[batch, outputs]`.
    pub fn run_dense(&mut self, batch: usize, scores: &mut [f32]) -> Result<(), ScoreError> {
        match self {
            Self::Cpu(cpu) => Ok(cpu.dense().run(batch, scores)?),
            Self::Gpu(gpu) => Ok(gpu.run_dense(batch, scores)?),
            Self::Failed(e) => Err(Arc::clone(e).into()),
        }
    }

    /// Makes the backend usable again after an error of the GPU. If the GPU cannot be synchronised,
    /// every later request fails.
    pub fn recover(&mut self) {
        if let Self::Gpu(gpu) = self
            && let Err(e) = gpu.recover()
        {
            *self = Self::Failed(Arc::new(e));
        }
    }
}
