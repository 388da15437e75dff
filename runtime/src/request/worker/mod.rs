//! The worker: scores one batch at a time in memory that it allocated at its start. Never waits for
//! another worker, and never allocates for a request.
//!
//! [`Worker::score`] is the request flow. It checks the batch, looks up its keys, and resolves the
//! misses: it fetches their rows and finishes the bags that waited. Then it runs the dense network
//! and returns the scores with a status for each sample. If the miss list fills up, the misses are
//! resolved early and the lookup continues. The scores of every backend are read through
//! [`BatchScores::request`], which refuses a score that is not a number.

pub(crate) mod backend;
mod counters;
mod cpu;
mod deferred;
mod fetch;
mod gpu;
pub(crate) mod live_model;
mod progress;
mod table_counts;

use crate::bundle::manifest::Generation;
use crate::clock::Clock;
use crate::model::Model;
use crate::request::check::check_batch;
use crate::request::worker::backend::WorkerBackend;
use crate::request::worker::fetch::RowFetcher;
use crate::request::worker::live_model::{Current, LiveModel};
use crate::request::worker::progress::Progress;
use crate::schema::batch::Batch;
use hatchback_kernels::cache::address::RowKey;
use hatchback_kernels::cuda::HostMemory;
use hatchback_kernels::cuda::driver::CudaError;
use hatchback_kernels::lookup::LookupStatus;
use hatchback_kernels::lookup::miss_list::MissList;
use std::cmp::Ordering;
use std::ops::Range;
use std::sync::{Arc, RwLockReadGuard};
use std::time::Duration;

pub use crate::request::error::{NotFinite, ScoreError};
pub use counters::Counters;
pub(crate) use gpu::lookup_limits;
pub(crate) use table_counts::TableCounters;
pub use table_counts::TableCounts;

/// Scores of samples, with the status of each.
#[derive(Clone, Copy, Debug)]
pub struct Scores<'a> {
    /// The scores, `[batch, outputs]`.
    pub values: &'a [f32],
    /// The status of each sample, `[batch]`.
    pub statuses: &'a [LookupStatus],
}

impl Scores<'_> {
    /// Returns the sum of all samples' statuses.
    pub fn status(&self) -> LookupStatus {
        let mut sum = LookupStatus::default();
        self.statuses.iter().for_each(|s| sum.add(s));
        sum
    }

    /// Writes the positions of the best samples by output `column` to `best`. See [`top_k`].
    pub fn top_k<'b>(&self, column: usize, best: &'b mut [u32]) -> &'b [u32] {
        top_k(self.values, self.values.len() / self.statuses.len().max(1), column, best)
    }
}

/// Ranks `scores`, `[samples, outputs]`, by their `column`. Writes the positions of the best
/// samples to `best` and returns them, best first. Of equal scores the first is better. Returns
/// fewer than `best` has room for if there are fewer samples.
pub fn top_k<'b>(scores: &[f32], outputs: usize, column: usize, best: &'b mut [u32]) -> &'b [u32] {
    // The sum makes a zero of a negative zero, which is as good.
    let score = |sample: u32| scores[sample as usize * outputs + column] + 0.0;
    let order = |a: &u32, b: &u32| score(*b).total_cmp(&score(*a)).then(a.cmp(b));
    let samples = (scores.len() / outputs.max(1)) as u32;
    let count = best.len().min(samples as usize);
    let best = &mut best[..count];
    best.iter_mut().zip(0..).for_each(|(place, sample)| *place = sample);

    // A heap with the worst at its root. A sorted list would move all its samples for a better one.
    (0..count / 2).rev().for_each(|root| sift_down(best, root, order));
    for sample in count as u32..samples {
        if let Some(worst) = best.first_mut().filter(|worst| order(&sample, worst).is_lt()) {
            *worst = sample;
            sift_down(best, 0, order);
        }
    }
    best.sort_unstable_by(order);
    best
}

/// Moves the sample at `at` of a heap down until no worse one is below it.
fn sift_down(heap: &mut [u32], mut at: usize, order: impl Fn(&u32, &u32) -> Ordering) {
    loop {
        let children = (2 * at + 1..heap.len()).take(2);
        let Some(worst) = children.max_by(|a, b| order(&heap[*a], &heap[*b])) else { return };
        if order(&heap[at], &heap[worst]).is_gt() {
            return;
        }
        heap.swap(at, worst);
        at = worst;
    }
}

/// Scores of one batch, which may hold several requests. A caller reads one request at a time.
#[derive(Clone, Copy, Debug)]
pub struct BatchScores<'a> {
    /// `[batch, outputs]`.
    values: &'a [f32],
    /// `[batch]`.
    statuses: &'a [LookupStatus],
    outputs: usize,
    generation: &'a Arc<Generation>,
    filled_since: u64,
}

impl<'a> BatchScores<'a> {
    /// Returns the generation that computed the scores.
    pub fn generation(&self) -> &Arc<Generation> {
        self.generation
    }

    /// Returns the first version of the live model that fills requests as the one that scored.
    pub(crate) fn filled_since(&self) -> u64 {
        self.filled_since
    }

    /// Returns whether one of `samples` of the batch uses a damaged row. A default row took its
    /// place, so no score of the sample shows a fault of the generation.
    pub(crate) fn has_damage(&self, samples: Range<usize>) -> bool {
        self.statuses[samples].iter().any(|status| status.damaged > 0)
    }

    /// Returns the scores of the request that has `samples` of the batch.
    ///
    /// # Errors
    /// [`NotFinite`] with the first of its scores that is not a number.
    pub fn request(&self, samples: Range<usize>) -> Result<Scores<'a>, NotFinite> {
        let values = &self.values[samples.start * self.outputs..samples.end * self.outputs];
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            let (sample, output) = (at / self.outputs, at % self.outputs);
            return Err(NotFinite { sample, output, value: values[at] });
        }
        Ok(Scores { values, statuses: &self.statuses[samples] })
    }
}

/// Serves requests on the current model of its pipeline, one at a time.
pub struct Worker {
    live: Arc<LiveModel>,
    state: ModelState,
}

/// The state and memory of a worker for one model.
struct ModelState {
    /// The version of the live model that the worker has seen last.
    version: u64,
    filled_since: u64,
    users: Arc<()>,
    model: Arc<Model>,
    /// Dropped before the fetcher: the drop waits for inserts, which read rows staged there.
    backend: WorkerBackend,
    fetcher: RowFetcher,
    /// `[batch_max, outputs]`.
    scores: Vec<f32>,
    /// `[batch_max]`.
    statuses: Vec<LookupStatus>,
}

impl Worker {
    /// Makes a worker on `model`, which is never replaced, and allocates all memory that it will
    /// use. If the GPU has no memory for the worker, every request fails with that error.
    pub fn new(model: Arc<Model>, clock: Arc<dyn Clock>) -> Self {
        Self::on(LiveModel::new(model), clock)
    }

    /// Makes a worker that follows `live` from generation to generation, as [`Worker::new`] does.
    pub(crate) fn on(live: Arc<LiveModel>, clock: Arc<dyn Clock>) -> Self {
        let state = ModelState::new(&live, clock);
        Self { live, state }
    }

    /// Returns the error of every request of this worker, if its GPU failed.
    pub(crate) fn failure(&self) -> Option<&Arc<CudaError>> {
        self.state.backend.failure()
    }

    /// Returns the running totals.
    pub fn counters(&self) -> Counters {
        self.state.fetcher.counters
    }

    /// Returns the inputs of the dense network of the last request on the CPU, `[batch, width]` at
    /// the front of each.
    pub(crate) fn inputs(&self) -> &[HostMemory<f32>] {
        self.state.backend.inputs()
    }

    /// Returns the model of the last request.
    pub fn model(&self) -> &Arc<Model> {
        &self.state.model
    }

    /// Moves the worker to the current model.
    pub(crate) fn follow(&mut self) {
        if !self.is_current() {
            self.state.follow(&self.live, &self.live.read());
        }
    }

    /// Returns whether the worker has seen the current version of the live model.
    pub(crate) fn is_current(&self) -> bool {
        self.state.version == self.live.version()
    }

    /// Scores `batch`, which is one request. After `deadline`, a time of the worker's clock, no
    /// more rows are fetched. Rows of tables with the miss policy `deadline` are then default rows.
    ///
    /// # Errors
    /// The errors of [`Worker::score_requests`], and [`ScoreError::NotFinite`] if a score is not a
    /// number.
    pub fn score(
        &mut self,
        batch: &Batch,
        deadline: Option<Duration>,
    ) -> Result<Scores<'_>, ScoreError> {
        Ok(self.score_requests(batch, deadline)?.request(0..batch.size())?)
    }

    /// Scores `batch`, which may hold several requests. For `deadline` see [`Worker::score`].
    ///
    /// # Errors
    /// [`ScoreError::Request`] if the batch does not fit the model.
    /// [`ScoreError::DeadlineExceeded`] if a row of a table with the miss policy `wait` did not
    /// arrive in time. [`ScoreError::Dense`] or [`ScoreError::Cuda`] if the dense network or the
    /// GPU failed.
    pub fn score_requests(
        &mut self,
        batch: &Batch,
        deadline: Option<Duration>,
    ) -> Result<BatchScores<'_>, ScoreError> {
        let Self { live, state } = self;
        let current = live.read();
        state.follow(live, &current);
        // Not redundant: `Worker::score` takes batches that nobody has checked, and the model may
        // be newer than the batch.
        check_batch(&state.model, batch)?;
        if let Some(e) = state.backend.failure() {
            return Err(Arc::clone(e).into());
        }

        let samples = batch.size();
        state.statuses[..samples].fill(LookupStatus::default());
        state.fetcher.start_request();
        state.fetcher.count_lookups(&state.model, batch);

        if let Err(e) = state.resolve(live, current, batch, deadline) {
            state.backend.recover();
            return Err(e);
        }

        state.run_dense(samples)
    }

    /// Scores `batch` as [`Worker::score_requests`] does, if every row that it needs is in memory.
    /// Otherwise returns `None` and counts nothing. Never reads flash, never waits for a swap, and
    /// uses no GPU.
    pub(crate) fn score_in_memory(
        &mut self,
        batch: &Batch,
    ) -> Option<Result<BatchScores<'_>, ScoreError>> {
        let Self { live, state } = self;
        // This thread does not follow a new model: that may allocate a backend and free the old
        // model, and its other callers wait.
        let current = live.try_read().filter(|current| current.version == state.version)?;
        if !matches!(state.backend, WorkerBackend::Cpu(_)) {
            return None;
        }
        if let Err(e) = check_batch(&state.model, batch) {
            return Some(Err(e));
        }

        let samples = batch.size();
        state.statuses[..samples].fill(LookupStatus::default());
        state.fetcher.misses.clear();
        let ModelState { backend, model, fetcher, statuses, .. } = state;
        match backend.lookup(model, batch, &mut fetcher.misses, &mut statuses[..samples]) {
            Ok(Progress::Complete) if fetcher.misses.is_empty() => {}
            Ok(_) => return None,
            Err(e) => return Some(Err(e)),
        }
        // The guard ends before the network runs: only lookups read resident tables, so a swap need
        // not wait for it.
        drop(current);
        state.fetcher.count_lookups(&state.model, batch);
        Some(state.run_dense(samples))
    }

    /// Adds a row that a later request will look up to those that [`Worker::fetch_deferred`] reads.
    /// Returns false if there was no room for it. A row that is in memory or in no table needs no
    /// room.
    pub fn enqueue_prefetch(&mut self, row: RowKey) -> bool {
        let ModelState { model, backend, fetcher, .. } = &mut self.state;
        backend.failure().is_none() && fetcher.enqueue_prefetch(model, row)
    }

    /// Returns the number of rows that [`Worker::fetch_deferred`] has yet to fetch.
    pub fn deferred_len(&self) -> usize {
        self.state.fetcher.deferred.len()
    }

    /// Fetches rows that the last requests answered with defaults, and prefetched rows, so that the
    /// next request finds them in the cache. Reads at most `pages_max` pages and leaves the rest
    /// for the next call. Returns how many rows were inserted.
    pub fn fetch_deferred(&mut self, pages_max: usize) -> usize {
        let Self { live, state: ModelState { model, backend, fetcher, .. } } = self;
        fetcher.fetch_deferred(model, live, backend, pages_max)
    }
}

impl ModelState {
    fn new(live: &LiveModel, clock: Arc<dyn Clock>) -> Self {
        let current = live.read();
        let model = Arc::clone(&current.model);
        let batch_max = model.budget().batch_max as usize;
        let (backend, misses) = match Self::memory(&current) {
            Ok(memory) => memory,
            Err(e) => {
                log::error!("a worker cannot use the GPU, its requests will fail: {e}");
                // The smallest list is enough: every request fails before its lookup.
                (WorkerBackend::Failed(Arc::new(e)), MissList::new(1, 1))
            }
        };
        Self {
            version: current.version,
            filled_since: current.filled_since,
            users: Arc::clone(&current.users),
            backend,
            fetcher: RowFetcher::new(&model, misses, live.new_table_counters(), clock),
            scores: vec![0.0; batch_max * model.outputs()],
            statuses: vec![LookupStatus::default(); batch_max],
            model,
        }
    }

    /// Allocates the memory that depends on the device.
    fn memory(current: &Current) -> Result<(WorkerBackend, MissList), CudaError> {
        let model = &current.model;
        let (misses_max, device) = (model.budget().misses_max as usize, model.lookup_device());
        let misses = MissList::on(&device, misses_max, model.schema().row_bytes_max())?;
        Ok((current.backend()?, misses))
    }

    /// Moves to `current` of `live`. Both models have the same tables and outputs, so the state
    /// keeps all memory except the backend.
    fn follow(&mut self, live: &LiveModel, current: &Current) {
        if self.version == current.version {
            return;
        }
        // `LiveModel::renew` starts a new version of the same model.
        if !Arc::ptr_eq(&self.model, &current.model) {
            // A failed backend stays: its GPU no longer works.
            if self.backend.failure().is_none() {
                let backend = current.backend().unwrap_or_else(|e| {
                    log::error!("a worker cannot use the GPU, its requests will fail: {e}");
                    WorkerBackend::Failed(Arc::new(e))
                });
                live.retire(std::mem::replace(&mut self.backend, backend));
            }
            self.fetcher.forget_generation();
            self.model = Arc::clone(&current.model);
        }
        self.filled_since = current.filled_since;
        // Last: the swap then frees what was retired.
        (self.version, self.users) = (current.version, Arc::clone(&current.users));
    }

    /// Runs the dense network for the first `samples` samples of its inputs.
    fn run_dense(&mut self, samples: usize) -> Result<BatchScores<'_>, ScoreError> {
        let outputs = self.model.outputs();
        let values = &mut self.scores[..samples * outputs];
        self.backend.run_dense(samples, values)?;
        let (statuses, generation) = (&self.statuses[..samples], self.model.generation());
        let filled_since = self.filled_since;
        Ok(BatchScores { values, statuses, outputs, generation, filled_since })
    }

    /// Looks the batch up, fetches the missing rows and pools the bags that waited for them.
    /// Repeats this each time the lookup fills the miss list. Bags are pooled in key order, so that
    /// caching never changes a score. Holds `current` until no lookup is left, because only lookups
    /// read resident tables.
    fn resolve(
        &mut self,
        live: &LiveModel,
        current: RwLockReadGuard<'_, Current>,
        batch: &Batch,
        deadline: Option<Duration>,
    ) -> Result<(), ScoreError> {
        let Self { model, backend, fetcher, statuses, .. } = self;
        let statuses = &mut statuses[..batch.size()];

        let mut looking_up = Some(current);
        let mut progress = backend.lookup(model, batch, &mut fetcher.misses, statuses)?;
        let mut is_open = progress == Progress::MissListFull || !fetcher.misses.is_empty();
        while is_open {
            is_open = progress == Progress::MissListFull;
            if !is_open {
                // No lookup follows. A swap need not wait for the reads below, which may take
                // milliseconds.
                looking_up = None;
            }
            fetcher.fetch(model, live, deadline);
            if fetcher.is_overdue {
                return Err(ScoreError::DeadlineExceeded);
            }
            backend.finish_bags(model, batch, &fetcher.misses, statuses, progress)?;
            fetcher.misses.clear();
            if is_open {
                progress = backend.continue_lookup(model, batch, &mut fetcher.misses, statuses)?;
            }
        }
        drop(looking_up);
        Ok(())
    }
}
