//! A model opened for serving: one generation's tables, caches and dense network. Read-only and
//! shared by all workers; a request that began on it ends on it.

pub mod budget;
pub mod cache_transfer;
pub mod capacity;
pub mod preload;
pub mod tables;

use crate::bundle::manifest::Generation;
use crate::flash::segment::SegmentError;
use crate::flash::{Flash, FlashError};
use crate::io::disk::Disk;
use crate::io::reader::{DeviceDepth, PageReader};
use crate::model::budget::{Budget, MemoryPlan};
use crate::model::tables::{ServedTable, Store, open_tables};
use crate::request::negative_cache::NegativeCache;
use crate::request::queue::RequestQueue;
use crate::request::weight_check;
use crate::schema::batch::Batch;
use crate::schema::{InputSource, Schema};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::resident::Resident;
use hatchback_kernels::cuda::Device;
use hatchback_kernels::cuda::driver::CudaError;
use hatchback_kernels::dense::{
    DenseEngine, DenseError, DeviceEngine, DeviceOptions, TensorRtOptions, Weights,
};
use hatchback_kernels::gpu::lookup::GpuLookup;
use hatchback_kernels::gpu::step::Step;
use hatchback_kernels::gpu::tables::{DeviceTables, TableStorage as TablePlace};
use hatchback_kernels::lookup::LookupStatus;
use hatchback_kernels::lookup::miss_list::{Miss, MissList};
use std::path::Path;
use std::sync::Arc;

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The flash directory is not usable.
    #[error(transparent)]
    Flash(#[from] FlashError),
    /// A segment is not usable.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The dense network is not usable.
    #[error(transparent)]
    Dense(#[from] DenseError),
    /// The GPU does not take the model.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The dense network does not bear the weights that the budget asks for.
    #[error(
        "budget.dense_weights = {weights}: probe sample {sample}: {problem}; take wider weights"
    )]
    Weights {
        /// The field's value.
        weights: Weights,
        /// Which sample, from 0.
        sample: usize,
        /// What it scores.
        problem: String,
    },
    /// The budget cannot hold the model.
    #[error("budget.{field} = {value}: {problem}")]
    Budget {
        /// The field to change.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What does not fit.
        problem: String,
    },
}

/// Lines of the memory plan that go where the dense network goes to a GPU.
const DENSE_WEIGHTS: &str = "dense network weights";
const DENSE_RESULTS: &str = "dense network results between layers, all workers";

/// A model ready to serve.
pub struct Model {
    generation: Generation,
    schema: Arc<Schema>,
    budget: Budget,
    device: Arc<DeviceDepth>,
    pub(crate) tables: Vec<ServedTable>,
    /// None where they are on a GPU.
    pub(crate) caches: Vec<Cache>,
    /// The caches and resident tables where they are on a GPU.
    pub(crate) on_gpu: Option<Arc<DeviceTables>>,
    /// None where the network is on a GPU.
    pub(crate) dense: Option<DenseEngine>,
    /// The dense network where it is on a GPU.
    pub(crate) dense_on_gpu: Option<Arc<DeviceEngine>>,
    outputs: usize,
    /// For each feature its network input and its first column there.
    pub(crate) columns: Vec<(usize, usize)>,
    plan: MemoryPlan,
}

impl Model {
    /// Opens the live generation under `directory` within `budget`.
    ///
    /// # Errors
    /// Something on flash is missing or damaged, or the budget is too small.
    pub fn open(disk: &Arc<dyn Disk>, directory: &Path, budget: Budget) -> Result<Self, OpenError> {
        Self::from_flash(&Flash::open(disk, directory)?, budget)
    }

    /// The same, on a directory that is open already.
    ///
    /// # Errors
    /// As `open`.
    pub fn from_flash(flash: &Flash, budget: Budget) -> Result<Self, OpenError> {
        Self::on_device(flash, budget, DeviceDepth::new(budget.reads_max as usize))
    }

    /// The same, beside other models that read from the same device.
    ///
    /// # Errors
    /// As `open`.
    pub fn on_device(
        flash: &Flash,
        budget: Budget,
        device: Arc<DeviceDepth>,
    ) -> Result<Self, OpenError> {
        let model = Self::cold(flash, budget, device, &|| {})?;
        model.preload(flash, None)?;
        Ok(model)
    }

    /// The same with empty caches, `rest` between the tables.
    pub(crate) fn cold(
        flash: &Flash,
        budget: Budget,
        device: Arc<DeviceDepth>,
        rest: &dyn Fn(),
    ) -> Result<Self, OpenError> {
        let schema = Arc::new(flash.manifest().schema.clone());
        capacity::check(&schema, &budget)?;
        let dense = schema.load_dense(flash.dense()?, budget.dense_weights)?;
        let resident = capacity::choose_resident(&schema, &budget)?;
        let caches = capacity::make_caches(&schema, &resident, &budget)?;
        let tables = open_tables(flash, &schema, &resident, &caches, rest)?;
        let columns = columns_of(&schema);
        let generation = flash.manifest().generation.clone();
        let plan = MemoryPlan::default();
        let (on_gpu, dense_on_gpu) = (None, None);
        let mut model = Self {
            generation,
            schema,
            budget,
            device,
            tables,
            caches,
            on_gpu,
            outputs: dense.outputs(),
            dense: Some(dense),
            dense_on_gpu,
            columns,
            plan,
        };
        model.plan = model.sum_memory();
        model.check_total()?;
        weight_check::check(model, flash)
    }

    /// Takes the caches, as they are now, and the resident tables to where `lookups` are to be
    /// made.
    ///
    /// # Errors
    /// The GPU has no room for them, or the budget none for what the workers need beside it.
    pub fn onto(mut self, lookups: &Device) -> Result<Self, OpenError> {
        let Device::Cuda(gpu) = lookups else { return Ok(self) };
        let (features, lookups) = (self.schema.features.len(), self.schema.lookups_max());
        let bytes = GpuLookup::bytes(features, lookups, self.limits_on(gpu));
        let what = "keys, rings and changes that the GPU shares, all workers";
        self.plan.add(what, u64::from(self.budget.workers) * bytes as u64);
        self.check_total()?;
        let (mut places, mut residents) = (Vec::with_capacity(self.tables.len()), Vec::new());
        for table in &self.tables {
            places.push(match &table.store {
                Store::Cached { cache, .. } => TablePlace::Cached(*cache),
                Store::Resident(rows) => {
                    residents.push(rows);
                    TablePlace::Resident(residents.len() - 1)
                }
            });
        }
        // One cache after the other is given back; the resident tables once they are all there.
        let tables = residents.iter().map(|rows| rows.bytes() as u64).sum::<u64>();
        self.plan
            .note_opening(tables + self.caches.iter().map(|c| c.bytes() as u64).max().unwrap_or(0));
        let caches = std::mem::take(&mut self.caches);
        self.on_gpu = Some(Arc::new(DeviceTables::new(gpu, places, caches, &residents)?));
        for table in &mut self.tables {
            if let Store::Resident(rows) = &mut table.store {
                *rows = Resident::indexed(table.format.row_bytes(), &[]);
            }
        }
        Ok(self)
    }

    /// Takes the dense network, too, to the GPU on which the tables are. Where nothing there can
    /// run it, it stays on the CPU.
    ///
    /// # Errors
    /// The network is not on `flash`, the GPU has no room for it, or the budget has none.
    pub fn with_dense(
        mut self,
        flash: &Flash,
        tensorrt: Option<&TensorRtOptions>,
    ) -> Result<Self, OpenError> {
        let Some(tables) = &self.on_gpu else { return Ok(self) };
        let (batch_max, weights) = (self.budget.batch_max as usize, self.budget.dense_weights);
        let options = DeviceOptions { tensorrt: tensorrt.cloned(), cublas: false, batch_max };
        let engine =
            match self.schema.load_dense_on(tables.gpu(), &flash.dense()?, weights, &options) {
                Ok(engine) => engine,
                Err(e @ DenseError::Cuda(_)) => return Err(e.into()),
                Err(e) => {
                    log::warn!("the dense network stays on the CPU: {e}");
                    return Ok(self);
                }
            };
        // What it was held against is given back.
        self.plan.note_opening(self.dense.take().map_or(0, |dense| dense.bytes() as u64));
        self.plan.remove(DENSE_WEIGHTS);
        self.plan.remove(DENSE_RESULTS);
        let widths: usize =
            self.schema.network.inputs.iter().map(|i| self.schema.input_width(i)).sum();
        let worker = Step::bytes(&engine, widths, batch_max);
        self.plan.add("dense network on the GPU, weights", engine.bytes() as u64);
        self.plan
            .add("dense network on the GPU, all workers", u64::from(self.budget.workers) * worker);
        self.check_total()?;
        self.dense_on_gpu = Some(Arc::new(engine));
        Ok(self)
    }

    /// What runs the dense network, in words.
    pub fn dense_runs_on(&self) -> String {
        match (&self.dense_on_gpu, self.dense.as_ref().and_then(DenseEngine::falls_back_for)) {
            (Some(engine), _) => engine.runs_on(),
            (None, Some(operator)) => format!("the CPU, by rten (for {operator})"),
            (None, None) => "the CPU".to_owned(),
        }
    }

    /// Where its rows are looked up.
    pub fn lookup_device(&self) -> Device {
        self.on_gpu.as_ref().map_or(Device::Cpu, |tables| Device::Cuda(Arc::clone(tables.gpu())))
    }

    /// What is served.
    pub fn generation(&self) -> &Generation {
        &self.generation
    }

    /// How the model is put together.
    pub fn schema(&self) -> &Arc<Schema> {
        &self.schema
    }

    /// What its reads share with others.
    pub(crate) fn device(&self) -> &Arc<DeviceDepth> {
        &self.device
    }

    /// What the model was opened within.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Where the memory goes.
    pub fn memory(&self) -> &MemoryPlan {
        &self.plan
    }

    /// Values in a sample's score.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Rows that the embedding caches hold at most.
    pub fn cache_slots(&self) -> usize {
        let on_gpu = self.on_gpu.as_ref().map_or(0, |tables| tables.slots());
        on_gpu + self.caches.iter().map(Cache::slots).sum::<usize>()
    }

    /// An empty batch of the size that the budget allows.
    pub fn batch(&self) -> Batch {
        Batch::new(&self.schema, self.budget.batch_max as usize)
    }

    /// Notes memory that was taken for a moment while the model was opened.
    pub(crate) fn note_opening(&mut self, bytes: u64) {
        self.plan.note_opening(bytes);
    }

    fn check_total(&self) -> Result<(), OpenError> {
        capacity::check_total(&self.budget, &self.plan, &self.caches)
    }

    fn sum_memory(&self) -> MemoryPlan {
        let mut plan = MemoryPlan::default();
        let workers = u64::from(self.budget.workers);
        let batch = self.budget.batch_max as usize;
        let sum = |f: &dyn Fn(&Store) -> usize| {
            self.tables.iter().map(|t| f(&t.store)).sum::<usize>() as u64
        };
        plan.add("embedding caches", self.caches.iter().map(|c| c.bytes() as u64).sum());
        plan.add(
            "resident tables",
            sum(&|s| if let Store::Resident(r) = s { r.bytes() } else { 0 }),
        );
        plan.add(
            "indexes of the segments and overlays of their deltas",
            sum(&|s| if let Store::Cached { rows, .. } = s { rows.index_bytes() } else { 0 }),
        );
        plan.add(DENSE_WEIGHTS, self.dense.as_ref().map_or(0, |dense| dense.bytes() as u64));
        let waiting = self.budget.misses_max as usize;
        let misses =
            MissList::bytes(waiting, self.staging_row_bytes()) + waiting * size_of::<Miss>();
        let misses = misses + NegativeCache::bytes();
        plan.add("miss lists, staging rows and absent keys, all workers", workers * misses as u64);
        let reads = PageReader::bytes(self.budget.reads_max as usize);
        plan.add("page buffers, all workers", workers * reads as u64);
        let widths: usize =
            self.schema.network.inputs.iter().map(|i| self.schema.input_width(i)).sum();
        plan.add("dense network inputs, all workers", workers * (4 * batch * widths) as u64);
        let dense = self.dense.as_ref().map_or(0, |dense| dense.scratch_bytes(batch) as u64);
        plan.add(DENSE_RESULTS, workers * dense);
        let per_sample = size_of::<LookupStatus>() + 4 * self.outputs();
        plan.add("scores and statuses, all workers", workers * (batch * per_sample) as u64);
        let request = Batch::bytes(&self.schema, batch);
        plan.add("batches, all workers", workers * request as u64);
        let slots = u64::from(self.budget.slots) * (request + batch * per_sample) as u64;
        plan.add("request slots: batches, scores and statuses", slots);
        plan.add(
            "queues of requests and of keys to prefetch",
            RequestQueue::queue_bytes(self.budget.workers as usize) as u64,
        );
        plan
    }

    /// The widest row that can wait in a miss list.
    pub(crate) fn staging_row_bytes(&self) -> usize {
        self.tables.iter().map(|t| t.format.row_bytes()).max().unwrap_or(0)
    }
}

fn columns_of(schema: &Schema) -> Vec<(usize, usize)> {
    let mut columns = vec![(0, 0); schema.features.len()];
    for (number, input) in schema.network.inputs.iter().enumerate() {
        let InputSource::Features(features) = &input.source else { continue };
        let mut column = 0;
        for &f in features {
            columns[usize::from(f)] = (number, column);
            column += schema.feature_width(usize::from(f));
        }
    }
    columns
}
