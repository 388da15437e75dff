//! The request flow: check -> query the cache -> read misses from flash -> insert -> pool -> dense network ->
//! scores with a status. One worker serves one request at a time out of memory that it took at its start;
//! it never waits for another worker and never allocates for the lookup.

use crate::batch::Batch;
use crate::limits::PAGE_BYTES;
use crate::model::{Model, Store};
use crate::page::{Page, PageBytes};
use crate::schema::{InputSource, KeySpace, MissPolicy};
use crate::segment::Segment;
use hatchback_kernels::cache::{Cache, RowKey};
use hatchback_kernels::dense::DenseError;
use hatchback_kernels::misses::{Miss, Misses, RowState};
use hatchback_kernels::query::{Feature, Input, Rows, Status};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Stands for a key that no page can hold.
const NO_PAGE: u32 = u32::MAX;

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

/// Serves requests on one model, one at a time.
pub struct Worker {
    model: Arc<Model>,
    clock: Arc<dyn Clock>,
    misses: Misses,
    /// Misses that were answered with defaults, to be fetched behind the answer.
    behind: Vec<Miss>,
    /// One buffer for each network input, `[batch_max, width]`.
    inputs: Vec<Vec<f32>>,
    widths: Vec<usize>,
    scores: Vec<f32>,
    statuses: Vec<Status>,
    page: Box<PageBytes>,
    counters: Counters,
}

impl Worker {
    /// A worker on `model`. Takes all memory it will use.
    pub fn new(model: Arc<Model>, clock: Arc<dyn Clock>) -> Self {
        let (schema, budget) = (model.schema(), model.budget());
        let batch = budget.batch_max as usize;
        let widths: Vec<usize> = schema.network.inputs.iter().map(|i| schema.input_width(i)).collect();
        Self {
            misses: Misses::new(budget.misses_max as usize, model.staging_row_bytes()),
            behind: Vec::with_capacity(budget.misses_max as usize),
            inputs: widths.iter().map(|w| vec![0.0; batch * w]).collect(),
            widths,
            scores: vec![0.0; batch * model.outputs()],
            statuses: vec![Status::default(); batch],
            page: Box::new([0; PAGE_BYTES]),
            counters: Counters::default(),
            clock,
            model,
        }
    }

    /// Running totals.
    pub fn counters(&self) -> Counters {
        self.counters
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
        self.check(batch)?;
        let (n, model) = (batch.size(), Arc::clone(&self.model));
        self.statuses[..n].fill(Status::default());
        self.copy_dense(batch);
        self.lookup(&model, batch, deadline);
        let views: Vec<&[f32]> =
            self.inputs.iter().zip(&self.widths).map(|(data, w)| &data[..n * w]).collect();
        let scores = &mut self.scores[..n * model.outputs()];
        if n > 0 {
            model.dense.run(n, &views, scores)?;
        }
        Ok(Scores { values: scores, statuses: &self.statuses[..n] })
    }

    fn check(&self, batch: &Batch) -> Result<(), ScoreError> {
        let (schema, max) = (self.model.schema(), self.model.budget().batch_max as usize);
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

    fn copy_dense(&mut self, batch: &Batch) {
        for (input, data) in self.model.schema().network.inputs.iter().zip(&mut self.inputs) {
            if input.source == InputSource::Dense {
                data[..batch.dense().len()].copy_from_slice(batch.dense());
            }
        }
    }

    /// Fills the embedding inputs, feature by feature; when the miss list is full, fetches and goes on.
    fn lookup(&mut self, model: &Model, batch: &Batch, deadline: Option<Duration>) {
        self.misses.clear();
        for f in 0..batch.features() {
            let (input, column) = model.columns[f];
            let feature = model.feature(f, column);
            let mut done = 0;
            while done < batch.size() {
                let statuses = &mut self.statuses[..batch.size()];
                let mut into = Input { data: &mut self.inputs[input], stride: self.widths[input] };
                done = feature.query(batch.bags(f), done, &mut into, &mut self.misses, statuses);
                if done < batch.size() {
                    self.settle(model, batch.size(), deadline);
                }
            }
            let lookups = batch.bags(f).keys.len() as u64;
            self.counters.lookups += lookups;
            if let Rows::Cached(_) = feature.rows {
                self.counters.cached_lookups += lookups;
            }
        }
        self.settle(model, batch.size(), deadline);
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
            feature.finish(bag, &self.misses, &mut into, &mut self.statuses[..batch]);
        }
        self.misses.clear();
    }

    /// Goes through the missing rows page by page: first what must be waited for, then what the deadline
    /// allows. The rest is noted for `fetch_behind`.
    fn fetch(&mut self, model: &Model, deadline: Option<Duration>) {
        for miss in self.misses.list_mut() {
            miss.page = model.segment(miss.row.table).and_then(|s| s.locate(miss.row.key)).unwrap_or(NO_PAGE);
        }
        let order = |m: &Miss| (model.miss_policy(m.row.table) as u8, m.row.table, m.page);
        self.misses.list_mut().sort_unstable_by_key(order);
        self.counters.misses += self.misses.list().len() as u64;
        self.counters.missed_lookups += self.misses.lookups();
        let (mut at, end) = (0, self.misses.list().len());
        while at < end {
            let first = order(&self.misses.list()[at]);
            let n = self.misses.list()[at..].iter().take_while(|m| order(m) == first).count();
            let late = deadline.is_some_and(|d| self.clock.now() >= d);
            match model.miss_policy(first.1) {
                MissPolicy::Default => self.leave(at..at + n, RowState::Pending),
                MissPolicy::Deadline if late => self.leave(at..at + n, RowState::Late),
                _ => self.read(model, at..at + n),
            }
            at += n;
        }
    }

    fn leave(&mut self, range: Range<usize>, state: RowState) {
        for i in range {
            let miss = self.misses.list()[i];
            self.misses.set_state(miss.slot, state);
            if self.behind.len() < self.behind.capacity() {
                self.behind.push(miss);
            }
        }
    }

    /// Reads the one page that holds the misses in `range` and stages their rows.
    fn read(&mut self, model: &Model, range: Range<usize>) {
        let Miss { row: RowKey { table, .. }, page: number, .. } = self.misses.list()[range.start];
        let (Some(segment), true) = (model.segment(table), number != NO_PAGE) else {
            return range.for_each(|i| self.misses.set_state(self.misses.list()[i].slot, RowState::Absent));
        };
        let page = read_checked(segment, number, &mut self.page, &mut self.counters);
        for i in range {
            let miss = self.misses.list()[i];
            let state = match page.as_ref().map(|p| segment.row(p, miss.row.key)) {
                None => RowState::Damaged,
                Some(None) => RowState::Absent,
                Some(Some(bytes)) => {
                    self.misses.row_mut(miss.slot)[..bytes.len()].copy_from_slice(bytes);
                    model.cache(table).insert(miss.row, bytes);
                    RowState::Fresh
                }
            };
            self.misses.set_state(miss.slot, state);
        }
    }

    /// Fetches, after the answer is out, the rows that the last requests answered with defaults, so that the
    /// next request finds them in the cache. Returns how many went in.
    pub fn fetch_behind(&mut self) -> usize {
        let model = Arc::clone(&self.model);
        let mut inserted = 0;
        for misses in self.behind.chunk_by(|a, b| (a.row.table, a.page) == (b.row.table, b.page)) {
            let (table, number) = (misses[0].row.table, misses[0].page);
            let (Some(segment), true) = (model.segment(table), number != NO_PAGE) else { continue };
            let Some(page) = read_checked(segment, number, &mut self.page, &mut self.counters) else {
                continue;
            };
            for miss in misses {
                if let Some(bytes) = segment.row(&page, miss.row.key) {
                    model.cache(table).insert(miss.row, bytes);
                    inserted += 1;
                }
            }
        }
        self.behind.clear();
        inserted
    }
}

/// Reads and checks a page; a bad one is counted and reported.
fn read_checked<'a>(
    segment: &Segment,
    number: u32,
    page: &'a mut PageBytes,
    counters: &mut Counters,
) -> Option<Page<'a>> {
    counters.pages += 1;
    match segment.read_page(number, page).and_then(|()| segment.check(number, page)) {
        Ok(page) => Some(page),
        Err(e) => {
            counters.pages_damaged += 1;
            log::error!("{e}");
            None
        }
    }
}

impl Model {
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

    fn segment(&self, table: u16) -> Option<&Segment> {
        match &self.tables[usize::from(table)].store {
            Store::Resident(_) => None,
            Store::Cached { segment, .. } => Some(segment),
        }
    }

    fn cache(&self, table: u16) -> &Cache {
        match &self.tables[usize::from(table)].store {
            Store::Cached { cache, .. } => &self.caches[*cache],
            Store::Resident(_) => unreachable!("rows of resident tables never miss"),
        }
    }

    fn miss_policy(&self, table: u16) -> MissPolicy {
        self.schema().tables[usize::from(table)].miss
    }
}
