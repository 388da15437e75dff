//! The request flow: check -> query the cache -> read misses from flash -> insert -> pool -> dense network ->
//! scores with a status. One worker serves one request at a time out of memory that it took at its start;
//! it never waits for another worker and never allocates for the lookup.

use crate::absent::Absent;
use crate::batch::Batch;
use crate::model::{Model, ServedTable, Store};
use crate::on_gpu::OnGpu;
use crate::page::{Page, PageBytes};
use crate::reader::{PageReader, ReadMethod};
use crate::schema::{InputSource, KeySpace, MissPolicy, Table};
use crate::table_rows::{Place, TableRows};
use hatchback_kernels::cache::{Cache, Epoch};
use hatchback_kernels::codec::ROW_BYTES_MAX;
use hatchback_kernels::cuda::driver::CudaError;
use hatchback_kernels::cuda::lookup::FeatureOnDevice;
use hatchback_kernels::cuda::{Device, HostMemory};
use hatchback_kernels::dense::{DenseError, DenseScratch};
use hatchback_kernels::isa::Isa;
use hatchback_kernels::misses::{Miss, Misses, RowState};
use hatchback_kernels::names::RowKey;
use hatchback_kernels::query::{Feature, Input, Rows, Status};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Samples whose columns are filled before the next ones begin: few enough that their columns stay near the core.
pub const BLOCK: usize = 128;

/// Stands for a key that no page can hold.
const NO_PLACE: u64 = u64::MAX;
/// The slot of a row that a GPU has not been asked for.
const NOT_ASKED: u32 = u32::MAX - 1;
/// The slot of a row that is not to be inserted: it is in the cache already, or not on its page.
const NOT_WANTED: u32 = u32::MAX;

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
    pub statuses: &'a [Status],
}

impl Scores<'_> {
    /// The statuses of all samples together.
    pub fn status(&self) -> Status {
        let mut sum = Status::default();
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
    /// Share of the lookups of cached tables that the embedding cache answered; 1 where there were none.
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

type GpuMemory = (Misses, Vec<HostMemory<f32>>, Option<OnGpu>);

/// Serves requests on one model, one at a time.
pub struct Worker {
    model: Arc<Model>,
    clock: Arc<dyn Clock>,
    /// Where the model is on a GPU. A worker that could not be made there answers every request with the reason.
    gpu: Option<Result<OnGpu, Arc<CudaError>>>,
    misses: Misses,
    /// Rows to fetch while no request waits: those that were answered with defaults, and those that a caller
    /// named ahead.
    behind: Vec<Miss>,
    absent: Absent,
    /// One buffer for each network input, `[batch_max, width]`.
    inputs: Vec<HostMemory<f32>>,
    widths: Vec<usize>,
    /// The dense network's memory.
    dense: DenseScratch,
    scores: Vec<f32>,
    statuses: Vec<Status>,
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
        let widths: Vec<usize> = schema.network.inputs.iter().map(|i| schema.input_width(i)).collect();
        let (misses, inputs, gpu) = match Self::memory_on(&model, &model.lookup_device(), &widths) {
            Ok((misses, inputs, gpu)) => (misses, inputs, gpu.map(Ok)),
            Err(e) => {
                log::error!("a worker cannot use the GPU: {e}");
                (Misses::new(1, 1), Vec::new(), Some(Err(Arc::new(e))))
            }
        };
        Self {
            misses,
            behind: Vec::with_capacity(budget.misses_max as usize),
            absent: Absent::new(),
            inputs,
            gpu,
            widths,
            dense: model.dense.scratch(batch),
            scores: vec![0.0; batch * model.outputs()],
            statuses: vec![Status::default(); batch],
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
        let misses = Misses::on(device, misses_max, model.staging_row_bytes())?;
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

    /// Scores `batch`. `deadline` is the clock's time from which on no more rows are fetched for tables
    /// with the miss policy `deadline`.
    ///
    /// # Errors
    /// The batch does not fit the model, or the dense network failed.
    pub fn score(&mut self, batch: &Batch, deadline: Option<Duration>) -> Result<Scores<'_>, ScoreError> {
        self.model.check(batch)?;
        let (n, model) = (batch.size(), Arc::clone(&self.model));
        self.statuses[..n].fill(Status::default());
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
                self.gpu = Some(Ok(gpu));
                if scored? {
                    let values = &self.scores[..n * model.outputs()];
                    return Ok(Scores { values, statuses: &self.statuses[..n] });
                }
            }
        }
        let scores = &mut self.scores[..n * model.outputs()];
        if n > 0 {
            model.dense.run(n, &self.inputs, scores, &mut self.dense)?;
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

    /// Fills the embedding inputs, a block of samples after the other and in it feature by feature; when the miss list
    /// is full, fetches and goes on.
    fn lookup(&mut self, model: &Model, batch: &Batch, deadline: Option<Duration>) {
        self.misses.clear();
        for first in (0..batch.size()).step_by(BLOCK) {
            let end = batch.size().min(first + BLOCK);
            for f in 0..batch.features() {
                let (input, column) = model.columns[f];
                let feature = model.feature(f, column);
                let mut done = first;
                while done < end {
                    let statuses = &mut self.statuses[..end];
                    let mut into = Input { data: &mut self.inputs[input], stride: self.widths[input] };
                    done =
                        feature.query(self.isa, batch.bags(f), done, &mut into, &mut self.misses, statuses);
                    if done < end {
                        self.settle(model, batch.size(), deadline);
                    }
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

    /// The same on the GPU, scores included if the dense network is there too: returns whether it is. All features go in one
    /// launch, with the network behind them. Where nothing is missing, that is all; else what was left open is fetched and
    /// finished, bags for which the miss list had no room are queried again behind the others, and the last of it is one more
    /// launch with the network behind.
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

    /// Fetches the missing rows, many pages in flight: first what must be waited for, then what the deadline
    /// allows. The rest is noted for `fetch_behind`.
    fn fetch(&mut self, model: &Model, deadline: Option<Duration>) {
        for miss in self.misses.list_mut() {
            let place = if self.absent.holds(miss.row) { None } else { model.locate(miss.row) };
            miss.place = place.map_or(NO_PLACE, Place::pack);
        }
        let order = |m: &Miss| (model.miss_policy(m.row.table) as u8, m.row.table, m.place);
        self.misses.list_mut().sort_unstable_by_key(order);
        self.counters.misses += self.misses.list().len() as u64;
        self.counters.missed_lookups += self.misses.lookups();
        self.round = self.round.wrapping_add(1);
        let mut state = Fetch { next: 0, must: 0, may: 0 };
        loop {
            self.begin_reads(model, deadline, &mut state);
            // Misses may be left to begin although none of this request's reads is outstanding: the reader may
            // be full of those that an earlier request no longer waits for.
            let next = self.misses.list().get(state.next);
            if state.must + state.may == 0 && next.is_none() {
                return;
            }
            // Once only reads remain that the deadline may cut, it cuts the wait for them.
            let may_cut = next.is_none_or(|m| model.miss_policy(m.row.table) != MissPolicy::Wait);
            let cut = deadline.filter(|_| state.must == 0 && may_cut);
            let wait = cut.map(|d| d.saturating_sub(self.clock.now()));
            if !self.finish_read(model, wait, &mut state) {
                return self.leave_unread(model, cut.is_some(), state.next);
            }
        }
    }

    /// Begins reads in order until the reader is full or nothing is left to begin.
    fn begin_reads(&mut self, model: &Model, deadline: Option<Duration>, state: &mut Fetch) {
        while state.next < self.misses.list().len() && self.reader.has_room() {
            let range = state.next..state.next + group_len(&self.misses.list()[state.next..]);
            let Miss { row, place, .. } = self.misses.list()[range.start];
            let late = || deadline.is_some_and(|d| self.clock.now() >= d);
            state.next = range.end;
            match model.miss_policy(row.table) {
                _ if place == NO_PLACE => self.set_states(range, RowState::Absent),
                MissPolicy::Default => self.leave(range, RowState::Pending),
                MissPolicy::Deadline if late() => self.leave(range, RowState::Late),
                policy => {
                    let place = Place::unpack(place);
                    let token = u64::from(self.round) << 32 | range.start as u64;
                    self.reader.begin(model.rows(row.table).segment(place).file(), place.page, token);
                    *state.count(policy) += 1;
                }
            }
        }
    }

    /// Takes one page in; returns whether one came within `wait`.
    fn finish_read(&mut self, model: &Model, wait: Option<Duration>, state: &mut Fetch) -> bool {
        let Self { reader, misses, absent, counters, round, .. } = self;
        reader.next(wait, |token, page| {
            // A page that a request before this one no longer waited for.
            if (token >> 32) as u32 != *round {
                return;
            }
            let start = token as u32 as usize;
            let range = start..start + group_len(&misses.list()[start..]);
            *state.count(model.miss_policy(misses.list()[start].row.table)) -= 1;
            stage(model, misses, absent, range, page, counters);
        })
    }

    /// Gives up the reads that are outstanding and, from `next` on, not begun: the deadline has come, or the
    /// reader failed.
    fn leave_unread(&mut self, model: &Model, late: bool, next: usize) {
        for i in 0..self.misses.list().len() {
            let miss = self.misses.list()[i];
            match (self.misses.state(miss.slot), model.miss_policy(miss.row.table)) {
                (RowState::Pending, _) if miss.place == NO_PLACE => {
                    self.set_states(i..i + 1, RowState::Absent)
                }
                (RowState::Pending, MissPolicy::Default) if i >= next => {
                    self.leave(i..i + 1, RowState::Pending)
                }
                (RowState::Pending, MissPolicy::Default) => {}
                (RowState::Pending, _) if late => self.leave(i..i + 1, RowState::Late),
                (RowState::Pending, _) => self.leave(i..i + 1, RowState::Damaged),
                _ => {}
            }
        }
    }

    fn set_states(&mut self, range: Range<usize>, state: RowState) {
        range.for_each(|i| self.misses.set_state(self.misses.list()[i].slot, state));
    }

    fn leave(&mut self, range: Range<usize>, state: RowState) {
        self.set_states(range.clone(), state);
        let room = self.behind.capacity() - self.behind.len();
        self.behind.extend(self.misses.list()[range].iter().take(room));
    }

    /// Notes a row that a request to come will look up; `fetch_behind` fetches it. Returns whether there was
    /// room; a row that is in memory or in no table needs none.
    pub fn fetch_ahead(&mut self, row: RowKey) -> bool {
        let model = Arc::clone(&self.model);
        if !model.is_cached(row.table) {
            return true;
        }
        let Some(place) = model.locate(row) else { return true };
        if self.absent.holds(row) {
            return true;
        }
        // A GPU is asked for all of them together, in `fetch_behind`.
        let (mut epoch, mut slot) = (Epoch::default(), NOT_ASKED);
        if let Some(cache) = model.cache(row.table) {
            (epoch, slot) = (cache.epoch(row), 0);
            if cache.query(row, &mut [0; ROW_BYTES_MAX][..cache.row_bytes()]) {
                return true;
            }
        }
        let has_room = self.behind.len() < self.behind.capacity();
        if has_room {
            self.behind.push(Miss { row, slot, place: place.pack(), epoch });
        }
        has_room
    }

    /// Rows that `fetch_behind` has yet to fetch.
    pub fn behind(&self) -> usize {
        self.behind.len()
    }

    /// Fetches, after the answer is out, the rows that the last requests answered with defaults, so that the
    /// next request finds them in the cache. Reads at most `pages_max` pages and leaves the rest for the next
    /// call. Returns how many rows went in.
    pub fn fetch_behind(&mut self, pages_max: usize) -> usize {
        let model = Arc::clone(&self.model);
        let (mut next, mut begun, mut waiting, mut inserted) = (0, 0, 0, 0);
        self.ask_gpu();
        self.round = self.round.wrapping_add(1);
        self.behind.sort_unstable_by_key(|m| (m.row.table, m.place));
        loop {
            while next < self.behind.len() && begun < pages_max && self.reader.has_room() {
                let Miss { row, place, .. } = self.behind[next];
                let token = u64::from(self.round) << 32 | next as u64;
                let place = Place::unpack(place);
                self.reader.begin(model.rows(row.table).segment(place).file(), place.page, token);
                next += group_len(&self.behind[next..]);
                begun += 1;
                waiting += 1;
            }
            let Self { reader, behind, misses, absent, counters, round, .. } = self;
            let more = waiting > 0 || (next < behind.len() && begun < pages_max);
            let done = more
                && reader.next(None, |token, page| {
                    if (token >> 32) as u32 == *round {
                        waiting -= 1;
                        let start = token as u32 as usize;
                        let range = start..start + group_len(&behind[start..]);
                        inserted += insert(&model, (&mut behind[..], range), misses, absent, page, counters);
                    }
                });
            if !done {
                // Where the reader failed nothing is tried again.
                let end = if more { self.behind.len() } else { next };
                inserted += self.insert_on_gpu(if more { 0 } else { next });
                self.behind.drain(..end);
                return inserted;
            }
        }
    }

    /// Asks the GPU for rows that were named ahead: those that it holds need no reading.
    fn ask_gpu(&mut self) {
        let Some(Ok(gpu)) = &mut self.gpu else { return };
        let lookup = gpu.lookup();
        self.behind.sort_unstable_by_key(|m| m.slot == NOT_ASKED);
        let known = self.behind.partition_point(|m| m.slot != NOT_ASKED);
        let asked = lookup.probe(&mut self.behind[known..], |miss, cached, epoch| {
            (miss.slot, miss.epoch) = (if cached { NOT_WANTED } else { 0 }, epoch);
        });
        match asked {
            Ok(()) => self.behind.retain(|m| m.slot != NOT_WANTED),
            Err(e) => {
                log::error!("rows named ahead: {e}");
                self.behind.truncate(known);
            }
        }
    }

    /// Puts the first `read` rows of `behind`, which are staged in the slots that they name, into the GPU's caches.
    fn insert_on_gpu(&mut self, read: usize) -> usize {
        let Some(Ok(gpu)) = &mut self.gpu else { return 0 };
        let lookup = gpu.lookup();
        let rows = self.behind[..read].iter().filter(|m| m.slot != NOT_WANTED);
        lookup.insert(&self.misses, rows).unwrap_or_else(|e| {
            log::error!("rows that were read behind: {e}");
            0
        })
    }
}

/// Where a fetch stands.
struct Fetch {
    /// The first miss that no read was begun for.
    next: usize,
    /// Reads outstanding that the request waits for.
    must: usize,
    /// Reads outstanding that the deadline may cut.
    may: usize,
}

impl Fetch {
    fn count(&mut self, policy: MissPolicy) -> &mut usize {
        if policy == MissPolicy::Wait { &mut self.must } else { &mut self.may }
    }
}

/// How many misses at the front are of the same page.
fn group_len(misses: &[Miss]) -> usize {
    let same = |m: &&Miss| (m.row.table, m.place) == (misses[0].row.table, misses[0].place);
    misses.iter().take_while(same).count()
}

/// Checks a page that was read for `misses`; a bad one is counted and reported.
fn check_page<'a>(
    model: &Model,
    miss: Miss,
    page: io::Result<&'a PageBytes>,
    counters: &mut Counters,
) -> Option<Page<'a>> {
    counters.pages += 1;
    let place = Place::unpack(miss.place);
    match model.rows(miss.row.table).segment(place).check_read(place.page, page) {
        Ok(page) => Some(page),
        Err(e) => {
            counters.pages_damaged += 1;
            log::error!("{e}");
            None
        }
    }
}

/// Stages and caches the rows of a page for the misses in `range`, which are all of it.
fn stage(
    model: &Model,
    misses: &mut Misses,
    absent: &mut Absent,
    range: Range<usize>,
    page: io::Result<&PageBytes>,
    counters: &mut Counters,
) {
    let page = check_page(model, misses.list()[range.start], page, counters);
    for i in range {
        let miss = misses.list()[i];
        let segment = model.rows(miss.row.table).segment(Place::unpack(miss.place));
        let state = match page.as_ref().map(|p| segment.row(p, miss.row.key)) {
            None => RowState::Damaged,
            Some(None) => {
                absent.note(miss.row);
                RowState::Absent
            }
            Some(Some(bytes)) => {
                misses.row_mut(miss.slot)[..bytes.len()].copy_from_slice(bytes);
                // On a GPU all rows go in together, behind the last page.
                if let Some(cache) = model.cache(miss.row.table) {
                    cache.insert(miss.row, bytes, miss.epoch);
                }
                RowState::Fresh
            }
        };
        misses.set_state(miss.slot, state);
    }
}

/// Caches the rows of a page for the misses in `range` of `behind`, which are all of it; returns how many went in. For a GPU
/// it stages them, each in the slot of its own number.
fn insert(
    model: &Model,
    (behind, range): (&mut [Miss], Range<usize>),
    staging: &mut Misses,
    absent: &mut Absent,
    page: io::Result<&PageBytes>,
    counters: &mut Counters,
) -> usize {
    let first = behind[range.start];
    let page = check_page(model, first, page, counters);
    let segment = model.rows(first.row.table).segment(Place::unpack(first.place));
    let mut inserted = 0;
    for number in range {
        let miss = &mut behind[number];
        miss.slot = NOT_WANTED;
        let Some(page) = &page else { continue };
        match (segment.row(page, miss.row.key), model.cache(miss.row.table)) {
            (None, _) => absent.note(miss.row),
            (Some(bytes), Some(cache)) => inserted += usize::from(cache.insert(miss.row, bytes, miss.epoch)),
            (Some(bytes), None) => {
                staging.row_mut(number as u32)[..bytes.len()].copy_from_slice(bytes);
                miss.slot = number as u32;
            }
        }
    }
    inserted
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
            refuse("features", format!("{} of {} sparse features", batch.features(), schema.features.len()))
        } else if batch.dense().len() != batch.size() * schema.dense_features.len() {
            refuse("dense", format!("{} values for {} samples", batch.dense().len(), batch.size()))
        } else {
            let too_hot = |&f: &usize| batch.hotness(f) > schema.features[f].hotness_max as usize;
            match (0..batch.features()).find(too_hot) {
                Some(f) => refuse("hotness", format!("feature {f} has a bag of {} keys", batch.hotness(f))),
                None => Ok(()),
            }
        }
    }

    /// Feature `f` as the query verb takes it, its vectors from `column` on.
    fn feature(&self, f: usize, column: usize) -> Feature<'_> {
        let schema = self.schema();
        let (feature, declared) = (&schema.features[f], schema.table_of(f));
        let table = &self.tables[usize::from(feature.table)];
        Feature {
            id: f as u16,
            table: feature.table,
            format: table.format,
            keys_end: (declared.keys == KeySpace::Index).then_some(declared.rows),
            default_row: &declared.default_row,
            pooling: feature.pooling,
            rows: match &table.store {
                Store::Resident(rows) => Rows::Resident(rows),
                Store::Cached { cache, .. } => Rows::Cached(&self.caches[*cache]),
            },
            column,
            width: schema.feature_width(f),
        }
    }

    /// Where a row that missed lies; `None` if its table does not have it.
    fn locate(&self, row: RowKey) -> Option<Place> {
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
    pub(crate) fn features_on_gpu(&self, inputs: &[u64], widths: &[usize]) -> Vec<FeatureOnDevice<'_>> {
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
