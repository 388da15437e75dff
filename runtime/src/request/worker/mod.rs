//! The request flow: check -> query the cache -> read misses from flash -> insert -> pool -> dense
//! network -> scores with a status. One worker serves one request at a time out of memory that it
//! took at its start; it never waits for another worker and never allocates for the lookup.

mod deferred;
mod fetch;

use crate::flash::table::{RowLocation, TableRows};
use crate::io::reader::{PageReader, ReadMethod};
use crate::model::Model;
use crate::model::tables::{ServedTable, Store};
use crate::request::gpu::OnGpu;
use crate::request::negative_cache::NegativeCache;
use crate::schema::batch::Batch;
use crate::schema::{InputSource, KeySpace, MissPolicy, Table};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::RowKey;
use hatchback_kernels::cuda::driver::CudaError;
use hatchback_kernels::cuda::{Device, HostMemory};
use hatchback_kernels::dense::{DenseError, DenseScratch};
use hatchback_kernels::gpu::lookup::FeatureOnDevice;
use hatchback_kernels::lookup::feature_prefetch::FeaturePrefetch;
use hatchback_kernels::lookup::miss_list::{Miss, MissList};
use hatchback_kernels::lookup::{FeatureView, Input, LookupStatus, RowStore};
use hatchback_kernels::simd::isa::Isa;
use std::sync::Arc;
use std::time::Duration;

/// The time as the request flow sees it: monotonic, from any start.
pub trait Clock: Send + Sync {
    /// The time now.
    fn now(&self) -> Duration;
}

/// The system's monotonic clock.
pub struct SystemClock(std::time::Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(std::time::Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

/// Why a request has no scores. The caller falls back.
#[derive(Debug, thiserror::Error)]
pub enum ScoreError {
    /// The batch was made for another model or is larger than the budget allows.
    #[error("request: {field}: {problem}")]
    Request {
        /// Which field.
        field: &'static str,
        /// Its value and what is wrong.
        problem: String,
    },
    /// The dense network failed.
    #[error(transparent)]
    Dense(#[from] DenseError),
    /// The GPU failed, now or when the worker was made.
    #[error(transparent)]
    Cuda(#[from] Arc<CudaError>),
}

impl From<CudaError> for ScoreError {
    fn from(e: CudaError) -> Self {
        Self::Cuda(Arc::new(e))
    }
}

/// Scores of one batch, with what they were computed from.
#[derive(Clone, Copy, Debug)]
pub struct Scores<'a> {
    /// `[batch, outputs]`.
    pub values: &'a [f32],
    /// One for each sample.
    pub statuses: &'a [LookupStatus],
}

impl Scores<'_> {
    /// The statuses of all samples together.
    pub fn status(&self) -> LookupStatus {
        let mut sum = LookupStatus::default();
        self.statuses.iter().for_each(|s| sum.add(s));
        sum
    }
}

/// Running totals of one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// All lookups.
    pub lookups: u64,
    /// Lookups of cached tables.
    pub cached_lookups: u64,
    /// Lookups of cached tables that the cache did not answer.
    pub missed_lookups: u64,
    /// Distinct rows per request that the cache did not hold.
    pub misses: u64,
    /// Pages read from flash.
    pub pages: u64,
    /// Pages that failed their check or could not be read.
    pub pages_damaged: u64,
}

impl Counters {
    /// Share of the lookups of cached tables that the embedding cache answered; 1 where there were
    /// none.
    pub fn hit_rate(&self) -> f64 {
        1.0 - self.missed_lookups as f64 / self.cached_lookups.max(1) as f64
    }

    /// Adds another worker's totals.
    pub fn add(&mut self, other: &Self) {
        self.lookups += other.lookups;
        self.cached_lookups += other.cached_lookups;
        self.missed_lookups += other.missed_lookups;
        self.misses += other.misses;
        self.pages += other.pages;
        self.pages_damaged += other.pages_damaged;
    }

    /// What was counted since `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            lookups: self.lookups - earlier.lookups,
            cached_lookups: self.cached_lookups - earlier.cached_lookups,
            missed_lookups: self.missed_lookups - earlier.missed_lookups,
            misses: self.misses - earlier.misses,
            pages: self.pages - earlier.pages,
            pages_damaged: self.pages_damaged - earlier.pages_damaged,
        }
    }
}

type GpuMemory = (MissList, Vec<HostMemory<f32>>, Option<OnGpu>);

/// Serves requests on one model, one at a time.
pub struct Worker {
    model: Arc<Model>,
    clock: Arc<dyn Clock>,
    /// Where the model is on a GPU. A worker that could not be made there, or whose GPU is gone,
    /// answers every request with the reason.
    gpu: Option<Result<OnGpu, Arc<CudaError>>>,
    misses: MissList,
    /// RowStore to fetch while no request waits: those that were answered with defaults, and those
    /// that a caller named ahead.
    behind: Vec<Miss>,
    absent: NegativeCache,
    /// One buffer for each network input, `[batch_max, width]`.
    inputs: Vec<HostMemory<f32>>,
    widths: Vec<usize>,
    /// The dense network's memory where it runs here.
    dense: Option<DenseScratch>,
    scores: Vec<f32>,
    statuses: Vec<LookupStatus>,
    reader: PageReader,
    isa: Isa,
    /// Tells the reads of this request from those that an earlier one no longer waits for.
    round: u32,
    counters: Counters,
}

impl Worker {
    /// A worker on `model`. Takes all memory it will use.
    pub fn new(model: Arc<Model>, clock: Arc<dyn Clock>) -> Self {
        let (schema, budget) = (model.schema(), model.budget());
        let batch = budget.batch_max as usize;
        let widths: Vec<usize> =
            schema.network.inputs.iter().map(|i| schema.input_width(i)).collect();
        let (misses, inputs, gpu) = match Self::memory_on(&model, &model.lookup_device(), &widths) {
            Ok((misses, inputs, gpu)) => (misses, inputs, gpu.map(Ok)),
            Err(e) => {
                log::error!("a worker cannot use the GPU: {e}");
                (MissList::new(1, 1), Vec::new(), Some(Err(Arc::new(e))))
            }
        };
        Self {
            misses,
            behind: Vec::with_capacity(budget.misses_max as usize),
            absent: NegativeCache::new(),
            inputs,
            gpu,
            widths,
            dense: model.dense.as_ref().map(|dense| dense.scratch(batch)),
            scores: vec![0.0; batch * model.outputs()],
            statuses: vec![LookupStatus::default(); batch],
            reader: PageReader::on(model.device(), ReadMethod::Auto),
            isa: Isa::detect(),
            round: 0,
            counters: Counters::default(),
            clock,
            model,
        }
    }

    /// The memory that a GPU reaches too where the model is on one, and its lookup.
    fn memory_on(model: &Model, device: &Device, widths: &[usize]) -> Result<GpuMemory, CudaError> {
        let budget = model.budget();
        let (batch, misses_max) = (budget.batch_max as usize, budget.misses_max as usize);
        let misses = MissList::on(device, misses_max, model.staging_row_bytes())?;
        let inputs = widths.iter().map(|w| device.host_memory(batch * w)).collect::<Result<_, _>>();
        let mut inputs = inputs?;
        let gpu = OnGpu::new(model, widths, &mut inputs)?;
        Ok((misses, inputs, gpu))
    }

    /// Why every request of this worker will fail, if so.
    pub(crate) fn broken(&self) -> Option<&Arc<CudaError>> {
        self.gpu.as_ref().and_then(|gpu| gpu.as_ref().err())
    }

    /// Running totals.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// What the last request gave the dense network, `[batch, width]` in front of each.
    pub(crate) fn inputs(&self) -> &[HostMemory<f32>] {
        &self.inputs
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Scores `batch`. `deadline` is the clock's time from which on no more rows are fetched for
    /// tables with the miss policy `deadline`.
    ///
    /// # Errors
    /// The batch does not fit the model, or the dense network failed.
    pub fn score(
        &mut self,
        batch: &Batch,
        deadline: Option<Duration>,
    ) -> Result<Scores<'_>, ScoreError> {
        self.model.check(batch)?;
        let (n, model) = (batch.size(), Arc::clone(&self.model));
        self.statuses[..n].fill(LookupStatus::default());
        match self.gpu.take() {
            None => {
                self.copy_dense(batch);
                self.lookup(&model, batch, deadline);
            }
            Some(Err(e)) => {
                self.gpu = Some(Err(Arc::clone(&e)));
                return Err(e.into());
            }
            Some(Ok(mut gpu)) => {
                self.copy_dense(batch);
                let scored = self.score_on_gpu(&mut gpu, &model, batch, deadline);
                self.gpu = Some(if scored.is_ok() { Ok(gpu) } else { gpu.recovered() });
                if scored? {
                    let values = &self.scores[..n * model.outputs()];
                    return Ok(Scores { values, statuses: &self.statuses[..n] });
                }
            }
        }
        let scores = &mut self.scores[..n * model.outputs()];
        let (Some(dense), Some(scratch)) = (&model.dense, &mut self.dense) else {
            unreachable!("a network that is not here is on the GPU, which has scored")
        };
        if n > 0 {
            dense.run(n, &self.inputs, scores, scratch)?;
        }
        Ok(Scores { values: scores, statuses: &self.statuses[..n] })
    }

    fn copy_dense(&mut self, batch: &Batch) {
        for (input, data) in self.model.schema().network.inputs.iter().zip(&mut self.inputs) {
            if input.source == InputSource::Dense {
                data[..batch.dense().len()].copy_from_slice(batch.dense());
            }
        }
    }

    /// Fills the embedding inputs feature by feature; when the miss list is full, fetches and goes
    /// on.
    fn lookup(&mut self, model: &Model, batch: &Batch, deadline: Option<Duration>) {
        self.misses.clear();
        let (samples, features) = (batch.size(), batch.features());
        let lead =
            FeaturePrefetch::new((0..features).map(|f| batch.bags(f).keys.len()).sum(), features);
        for f in 0..features {
            lead.ask(self.isa, f, |f| (model.feature(f, model.columns[f].1), batch.bags(f)));
            let (input, column) = model.columns[f];
            let feature = model.feature(f, column);
            let mut done = 0;
            while done < samples {
                let statuses = &mut self.statuses[..samples];
                let mut into = Input { data: &mut self.inputs[input], stride: self.widths[input] };
                done = feature.query(
                    self.isa,
                    batch.bags(f),
                    done,
                    &mut into,
                    &mut self.misses,
                    statuses,
                );
                if done < samples {
                    self.settle(model, samples, deadline);
                }
            }
        }
        self.count_lookups(model, batch);
        self.settle(model, batch.size(), deadline);
    }

    fn count_lookups(&mut self, model: &Model, batch: &Batch) {
        for (f, feature) in model.schema().features.iter().enumerate() {
            let lookups = batch.bags(f).keys.len() as u64;
            self.counters.lookups += lookups;
            if model.is_cached(feature.table) {
                self.counters.cached_lookups += lookups;
            }
        }
    }

    /// The same on the GPU, scores included if the dense network is there too: returns whether it
    /// is. All features go in one launch, with the network behind them. Where nothing is missing,
    /// that is all; else what was left open is fetched and finished, bags for which the miss list
    /// had no room (or whose rows changed) are queried again behind the others, and the last of it
    /// is one more launch with the network behind.
    fn score_on_gpu(
        &mut self,
        gpu: &mut OnGpu,
        model: &Model,
        batch: &Batch,
        deadline: Option<Duration>,
    ) -> Result<bool, ScoreError> {
        let n = batch.size();
        self.count_lookups(model, batch);
        self.misses.clear();
        gpu.begin(batch)?;
        let mut more = gpu.lookup().collect(&mut self.misses, &mut self.statuses[..n])?;
        let mut open = more || !self.misses.is_empty();
        while open {
            self.fetch(model, deadline);
            gpu.settle(&self.misses, &mut self.statuses[..n], !more)?;
            self.misses.clear();
            open = more;
            more = more && gpu.lookup().again(&mut self.misses, &mut self.statuses[..n])?;
        }
        let OnGpu::Step(step) = gpu else { return Ok(false) };
        self.scores[..n * model.outputs()].copy_from_slice(step.scores(n));
        Ok(true)
    }

    /// Fetches the missing rows, puts them into the caches and pools the bags that waited.
    fn settle(&mut self, model: &Model, batch: usize, deadline: Option<Duration>) {
        if self.misses.is_empty() {
            return;
        }
        self.fetch(model, deadline);
        for bag in self.misses.bags() {
            let (input, column) = model.columns[usize::from(bag.feature)];
            let mut into = Input { data: &mut self.inputs[input], stride: self.widths[input] };
            let feature = model.feature(usize::from(bag.feature), column);
            feature.finish(self.isa, bag, &self.misses, &mut into, &mut self.statuses[..batch]);
        }
        self.misses.clear();
    }
}

impl Model {
    /// Checks that `batch` has the shape of the schema and the size that the budget allows.
    ///
    /// # Errors
    /// What does not fit.
    pub fn check(&self, batch: &Batch) -> Result<(), ScoreError> {
        let (schema, max) = (self.schema(), self.budget().batch_max as usize);
        let refuse = |field, problem| Err(ScoreError::Request { field, problem });
        if batch.size() > max {
            refuse("batch", format!("{} samples, the budget allows {max}", batch.size()))
        } else if batch.features() != schema.features.len() {
            refuse(
                "features",
                format!("{} of {} sparse features", batch.features(), schema.features.len()),
            )
        } else if batch.dense().len() != batch.size() * schema.dense_features.len() {
            refuse("dense", format!("{} values for {} samples", batch.dense().len(), batch.size()))
        } else {
            let too_hot = |&f: &usize| batch.hotness(f) > schema.features[f].hotness_max as usize;
            match (0..batch.features()).find(too_hot) {
                Some(f) => {
                    refuse("hotness", format!("feature {f} has a bag of {} keys", batch.hotness(f)))
                }
                None => Ok(()),
            }
        }
    }

    /// FeatureView `f` as the query verb takes it, its vectors from `column` on.
    fn feature(&self, f: usize, column: usize) -> FeatureView<'_> {
        let schema = self.schema();
        let (feature, declared) = (&schema.features[f], schema.table_of(f));
        let table = &self.tables[usize::from(feature.table)];
        FeatureView {
            id: f as u16,
            table: feature.table,
            format: table.format,
            keys_end: (declared.keys == KeySpace::Index).then_some(declared.rows),
            default_row: &declared.default_row,
            pooling: feature.pooling,
            rows: match &table.store {
                Store::Resident(rows) => RowStore::Resident(rows),
                Store::Cached { cache, .. } => RowStore::Cached(&self.caches[*cache]),
            },
            column,
            width: schema.feature_width(f),
        }
    }

    /// Where a row that missed lies; `None` if its table does not have it.
    fn locate(&self, row: RowKey) -> Option<RowLocation> {
        self.rows(row.table).locate(row.key)
    }

    fn rows(&self, table: u16) -> &TableRows {
        match &self.tables[usize::from(table)].store {
            Store::Cached { rows, .. } => rows,
            Store::Resident(_) => unreachable!("rows of resident tables never miss"),
        }
    }

    /// The cache of a table's rows; `None` where it is on a GPU.
    fn cache(&self, table: u16) -> Option<&Cache> {
        match &self.tables[usize::from(table)].store {
            Store::Cached { cache, .. } => self.caches.get(*cache),
            Store::Resident(_) => unreachable!("rows of resident tables never miss"),
        }
    }

    /// The features as a GPU looks them up, into the inputs that begin at `inputs` there.
    pub(crate) fn features_on_gpu(
        &self,
        inputs: &[u64],
        widths: &[usize],
    ) -> Vec<FeatureOnDevice<'_>> {
        let schema = self.schema();
        let feature = |(f, feature): (usize, &crate::schema::Feature)| {
            let ((input, column), declared) = (self.columns[f], schema.table_of(f));
            FeatureOnDevice {
                table: feature.table,
                format: self.tables[usize::from(feature.table)].format,
                keys_end: (declared.keys == KeySpace::Index).then_some(declared.rows),
                default_row: &declared.default_row,
                pooling: feature.pooling,
                hotness_max: feature.hotness_max as usize,
                input: inputs[input],
                stride: widths[input],
                column,
                width: schema.feature_width(f),
            }
        };
        schema.features.iter().enumerate().map(feature).collect()
    }

    /// Whether the rows of `table` move between flash and a cache.
    pub(crate) fn is_cached(&self, table: u16) -> bool {
        matches!(&self.tables[usize::from(table)].store, Store::Cached { .. })
    }

    /// Whether a deadline can change an answer.
    pub(crate) fn has_deadlines(&self) -> bool {
        let cut = |(table, served): (&Table, &ServedTable)| {
            table.miss == MissPolicy::Deadline && matches!(&served.store, Store::Cached { .. })
        };
        self.schema().tables.iter().zip(&self.tables).any(cut)
    }

    fn miss_policy(&self, table: u16) -> MissPolicy {
        self.schema().tables[usize::from(table)].miss
    }
}
