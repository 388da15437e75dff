//! Opens a model for serving: on the CPU first, then on a device if there is one. A model beyond
//! its budget is refused before it serves.

use crate::bundle::manifest::Hash;
use crate::flash::Flash;
use crate::io::reader::DeviceDepth;
use crate::limits::PROBE_CACHE_BYTES_MAX;
use crate::model::backend::{CpuTables, ModelBackend, sole_owner};
use crate::model::budget::Budget;
use crate::model::memory_plan::MemoryPlan;
use crate::model::opened::f16_inputs;
use crate::model::served_tables::{ServedTable, Storage};
use crate::model::{Model, OpenError, capacity, preload};
use crate::request::memory::{Backing, ModelSizes, plan_memory};
use crate::request::opening::{Opening, Placed};
use crate::request::precision_check;
use crate::schema::{InputSource, Schema, SingleOutput};
use hatchback_kernels::cuda::Device;
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::gpu::tables::{DeviceTables, TableStorage};
use hatchback_kernels::gpu::{
    DenseNetwork, DeviceEngine, DeviceOptions, GpuDense, GpuDenseError, Precision,
};
use std::sync::Arc;

/// Most misses of a model that scores one sample at a time, unless a bag is longer.
const MISSES_OF_ONE_SAMPLE: u32 = 1024;

/// The network of a release that is not live yet.
pub struct NextNetwork {
    /// SHA-256 of the release's manifest.
    pub manifest: Hash,
    /// Its schema.
    pub schema: Schema,
    /// Its ONNX file.
    pub onnx: Vec<u8>,
}

/// How a served model is opened.
pub(crate) struct OpenOptions<'a> {
    pub budget: Budget,
    /// The reads of the model share it.
    pub read_depth: Arc<DeviceDepth>,
    /// The device of the tables.
    pub device: &'a Device,
    pub dense: &'a GpuDense,
    /// Called between pieces of work if a background thread opens the model.
    pub yield_now: Option<&'a dyn Fn()>,
}

/// The dense network of a generation, as a GPU loads it. It needs none of the generation's tables.
pub(crate) struct GpuNetwork {
    pub schema: Arc<Schema>,
    /// The ONNX file.
    pub onnx: Vec<u8>,
    pub batch_max: usize,
}

impl GpuNetwork {
    /// Returns the result of `load` on `gpu`, with the options `dense` of the target.
    pub fn on<T>(
        &self,
        gpu: &Arc<Gpu>,
        dense: &GpuDense,
        load: impl FnOnce(&Arc<Gpu>, &DenseNetwork, &DeviceOptions) -> Result<T, GpuDenseError>,
    ) -> Result<T, OpenError> {
        let Self { schema, onnx, batch_max } = self;
        let (parts, network) = (&schema.input_parts(), &schema.network);
        let is_fed = |part: &usize| {
            !matches!(network.inputs[parts[*part].input].source, InputSource::Vectors(_))
        };
        let fed = (0..parts.len()).filter(is_fed).collect();
        let (batch_max, f16_inputs) = (*batch_max, f16_inputs(schema));
        let options = DeviceOptions { dense: dense.clone(), batch_max, f16_inputs, fed };
        let inputs: Vec<(&str, usize)> =
            network.inputs.iter().map(|i| (i.name.as_str(), schema.input_width(i))).collect();
        let SingleOutput { onnx, name: output, activation } = schema.single_output(onnx.clone())?;
        let network = DenseNetwork { onnx: &onnx, inputs: &inputs, parts, output, activation };
        match load(gpu, &network, &options) {
            Ok(loaded) => Ok(loaded),
            Err(GpuDenseError::Cuda(e)) => Err(OpenError::Cuda(*e)),
            Err(e) => Err(e.into()),
        }
    }
}

impl Model {
    /// Opens the live generation of `flash` within `budget`, with preloaded caches, on the CPU.
    ///
    /// # Errors
    /// [`OpenError::Flash`] or [`OpenError::Segment`] if something on flash is missing or damaged.
    /// [`OpenError::Dense`] if the dense network cannot be used.
    /// [`OpenError::Budget`] if the budget is too small.
    pub fn from_flash(flash: &Flash, budget: Budget) -> Result<Self, OpenError> {
        Self::on_device(flash, budget, &Device::Cpu, &GpuDense::default())
    }

    /// Opens the live generation of `flash` as [`Model::from_flash`] does, with its tables on
    /// `device`. On a GPU the dense network runs there too, with the options `dense`.
    ///
    /// # Errors
    /// The same as [`Model::from_flash`], and [`OpenError::Cuda`] if the GPU has too little memory.
    pub fn on_device(
        flash: &Flash,
        budget: Budget,
        device: &Device,
        dense: &GpuDense,
    ) -> Result<Self, OpenError> {
        let read_depth = DeviceDepth::new(budget.reads_max as usize);
        let options = OpenOptions { budget, read_depth, device, dense, yield_now: None };
        Self::open_served(flash, options)
    }

    /// Opens the live generation of `flash` as `options` say, with preloaded caches.
    pub(crate) fn open_served(flash: &Flash, options: OpenOptions<'_>) -> Result<Self, OpenError> {
        let OpenOptions { budget, read_depth, device, dense, yield_now } = options;
        let rest = yield_now.unwrap_or(&|| {});
        flash.check_servable()?;
        let schema = &flash.manifest().schema;
        capacity::check_budget(schema, &budget)?;
        let is_resident = capacity::choose_resident(schema, &budget)?;
        let placed = Placed { is_resident: &is_resident, before: &[] };
        let opening = Opening::begin(flash, budget, placed, rest)?;
        let memory = opening.plan(Backing::of_tables(device))?;
        let model = opening.build(memory, read_depth, rest)?;
        // Before the move, because preloading fills caches in host memory only.
        preload::preload_hot_keys(&model, flash, yield_now);
        model.move_to_device(device)?.move_dense_to_gpu(flash, dense)
    }

    /// Opens the live generation of `flash` to score the samples of its probe set, one at a time.
    /// All rows stay on flash, behind a small cache. Calls `yield_now` between the tables.
    ///
    /// # Errors
    /// The same as [`Model::from_flash`].
    pub fn open_to_probe(
        flash: &Flash,
        budget: Budget,
        yield_now: &dyn Fn(),
    ) -> Result<Self, OpenError> {
        let mut model = Self::open_on_flash(flash, budget, PROBE_CACHE_BYTES_MAX, None, yield_now)?;
        model.wait_for_rows();
        Ok(model)
    }

    /// Opens the live generation of `flash` with all rows on flash, for one request of one sample
    /// at a time. Its caches have `cache_bytes_max` bytes, or the least possible. It has no memory
    /// plan. Shares open segments and the read depth with `before`, an earlier generation with the
    /// same tables; the caller then counts the memory. Without it the model must fit in `budget`.
    pub(crate) fn open_on_flash(
        flash: &Flash,
        budget: Budget,
        cache_bytes_max: u64,
        before: Option<&Model>,
        yield_now: &dyn Fn(),
    ) -> Result<Self, OpenError> {
        let new_depth = || DeviceDepth::new(budget.reads_max as usize);
        let read_depth = before.map_or_else(new_depth, |model| Arc::clone(model.read_depth()));
        let schema = &flash.manifest().schema;
        capacity::check_budget(schema, &budget)?;
        let is_resident = vec![false; schema.tables.len()];
        let least = capacity::cache_bytes_min(schema, &is_resident);
        let hotness = schema.features.iter().map(|f| f.hotness_max).max().unwrap_or(0);
        let small = Budget {
            cache_bytes_max: budget.cache_bytes_max.min(cache_bytes_max).max(least),
            misses_max: budget.misses_max.min(hotness.max(MISSES_OF_ONE_SAMPLE)),
            slots: 1,
            workers: 1,
            batch_delay_us_max: 0,
            batch_max: 1,
            ..budget
        };
        let placed = Placed {
            is_resident: &is_resident,
            before: before.map_or(&[], |model| model.tables()),
        };
        let opening = Opening::begin(flash, small, placed, yield_now)?;
        if before.is_none() {
            capacity::check_total(&small, &plan_memory(&opening.sizes()?, Backing::Host))?;
        }
        opening.build(MemoryPlan::default(), read_depth, yield_now)
    }

    /// Moves the caches, with their rows, and the resident tables to `device`. Does nothing if
    /// `device` is the CPU or the tables are on a GPU already.
    ///
    /// # Errors
    /// [`OpenError::Cuda`] if the GPU has too little memory. [`OpenError::Budget`] if the budget
    /// has none for the workers beside the tables.
    pub fn move_to_device(self, device: &Device) -> Result<Self, OpenError> {
        let Device::Cuda(gpu) = device else { return Ok(self) };
        let Some(tables) = self.backend().cpu_tables() else { return Ok(self) };
        // The host frees each cache after its copy, and all resident tables after the last copy.
        let peak = peak_of_move(tables);
        let memory =
            plan_memory(&ModelSizes::of(&self), Backing::GpuTables(gpu)).with_opening(peak);
        capacity::check_total(self.budget(), &memory)?;
        let storages = self.tables().iter().map(device_storage).collect();
        self.map_backend(memory, |backend| match backend {
            ModelBackend::Cpu { tables, dense } => {
                let CpuTables { caches, residents } = sole_owner(tables);
                let caches = caches.into_iter().map(sole_owner).collect();
                let residents: Vec<_> = residents.iter().map(|table| &**table).collect();
                let tables = Arc::new(DeviceTables::new(gpu, storages, caches, &residents)?);
                Ok(ModelBackend::GpuTables { tables, dense })
            }
            on_gpu => Ok(on_gpu),
        })
    }

    /// Moves the dense network to the GPU that has the tables. The network stays on the CPU if the
    /// tables do, or if no engine on the GPU can run it.
    ///
    /// # Errors
    /// [`OpenError::Flash`] if the network is not on `flash`, [`OpenError::Cuda`] if the GPU has no
    /// room for it, [`OpenError::Budget`] if the budget has none.
    pub fn move_dense_to_gpu(self, flash: &Flash, dense: &GpuDense) -> Result<Self, OpenError> {
        if dense.precision == Precision::Exact {
            return self.load_dense_to_gpu(flash, dense);
        }
        let model = self;
        let engine = match model.load_engine(flash, dense)? {
            Some(engine) if !engine.is_exact() => engine,
            engine => return model.with_engine(engine),
        };
        let (model, keeps) = precision_check::keeps_scores(model, flash, &engine, dense.precision)?;
        match keeps {
            true => model.with_engine(Some(engine)),
            false => model.load_dense_to_gpu(flash, &GpuDense::default()),
        }
    }

    /// Moves the dense network as [`Model::move_dense_to_gpu`] does, but does not score the probe
    /// set. For a generation that shares its caches with the one that is served.
    ///
    /// # Errors
    /// As [`Model::move_dense_to_gpu`].
    pub(crate) fn load_dense_to_gpu(
        self,
        flash: &Flash,
        dense: &GpuDense,
    ) -> Result<Self, OpenError> {
        let engine = self.load_engine(flash, dense)?;
        self.with_engine(engine)
    }

    /// Loads the dense network onto the GPU that has the tables. Returns `None` if they are on the
    /// CPU, or if no engine on the GPU can run the network.
    fn load_engine(
        &self,
        flash: &Flash,
        dense: &GpuDense,
    ) -> Result<Option<DeviceEngine>, OpenError> {
        if !matches!(self.backend(), ModelBackend::GpuTables { .. }) {
            return Ok(None);
        }
        match self.on_gpu(flash, dense, DeviceEngine::load) {
            Err(OpenError::GpuDense(e)) => {
                log::warn!("the dense network stays on the CPU: {e}");
                Ok(None)
            }
            engine => engine,
        }
    }

    /// Returns the result of `load` for the dense network on the GPU that has the tables; `None` if
    /// they are on the CPU.
    fn on_gpu<T>(
        &self,
        flash: &Flash,
        dense: &GpuDense,
        load: impl FnOnce(&Arc<Gpu>, &DenseNetwork, &DeviceOptions) -> Result<T, GpuDenseError>,
    ) -> Result<Option<T>, OpenError> {
        let Some(tables) = self.backend().device_tables() else { return Ok(None) };
        let network = GpuNetwork {
            schema: Arc::clone(self.schema()),
            onnx: flash.dense()?,
            batch_max: self.budget().batch_max as usize,
        };
        network.on(tables.gpu(), dense, load).map(Some)
    }

    /// Replaces the dense network on the CPU with `engine`, if there is one.
    fn with_engine(self, engine: Option<DeviceEngine>) -> Result<Self, OpenError> {
        let Some(engine) = engine else { return Ok(self) };
        let ModelBackend::GpuTables { tables, dense } = self.backend() else { return Ok(self) };
        let backing = Backing::Gpu(tables.gpu(), &engine);
        let opening = self.memory().opening_bytes().max(dense.bytes() as u64);
        let memory = plan_memory(&ModelSizes::of(&self), backing).with_opening(opening);
        capacity::check_total(self.budget(), &memory)?;
        self.map_backend(memory, |backend| match backend {
            ModelBackend::GpuTables { tables, .. } => {
                Ok(ModelBackend::Gpu { tables, dense: Arc::new(engine) })
            }
            other => Ok(other),
        })
    }
}

fn device_storage(table: &ServedTable) -> TableStorage {
    match table.storage {
        Storage::Cached(cache) => TableStorage::Cached(cache),
        Storage::Resident(number) => TableStorage::Resident(number),
    }
}

/// Returns the bytes that the move of the tables has in host memory and on the GPU at the same
/// time. These are all resident tables and the largest cache.
fn peak_of_move(CpuTables { caches, residents }: &CpuTables) -> u64 {
    let residents = residents.iter().map(|rows| rows.bytes() as u64).sum::<u64>();
    residents + caches.iter().map(|cache| cache.bytes() as u64).max().unwrap_or(0)
}
