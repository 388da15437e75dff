//! What callers and workers of a pipeline share: the slots, the queue, and the worker's side of
//! both. A worker takes the first requests that go together, scores them as one batch and answers
//! each in its slot; with none waiting it fetches rows behind answers and ahead of requests, a few
//! pages at a time. Never takes memory, never overtakes.
//!
//! The queue is a `heapless::Deque` behind a lock and not its lock-free `mpmc` queue: a worker must
//! look at the first request before it takes it (do they fit together? is it due?), must sleep
//! while there is none, and `mpmc` may call itself full or empty while another thread is half-way
//! through it. The lock is held to move a few words.

use crate::bundle::manifest::Generation;
use crate::limits::{PREFETCH_MAX, SLOTS_MAX};
use crate::model::Model;
use crate::request::worker::{Clock, Counters, ScoreError, Worker};
use crate::schema::batch::Batch;
use hatchback_kernels::cache::address::RowKey;
use hatchback_kernels::lookup::LookupStatus;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Pages that a worker reads ahead or behind before it looks for requests again.
const PAGES_A_STEP: usize = 8;

/// Keys that a worker takes to fetch ahead at once.
const KEYS_A_STEP: usize = 32;

/// Why there are no scores. The caller falls back.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RequestError {
    /// Every slot is taken. Nothing was done; try again later.
    #[error("busy: all {0} request slots are taken")]
    Busy(usize),
    /// The request does not fit the model, or the dense network failed.
    #[error(transparent)]
    Score(Arc<ScoreError>),
    /// No model of that name is served.
    #[error("no such model is served")]
    NotServed,
    /// The worker panicked; another took its place.
    #[error("the worker that served this request panicked")]
    Panicked,
}

impl From<ScoreError> for RequestError {
    fn from(e: ScoreError) -> Self {
        Self::Score(Arc::new(e))
    }
}

/// What a pipeline did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that a worker took up.
    pub requests: u64,
    /// Batches that they were put together to.
    pub batches: u64,
    /// Requests refused because every slot was taken.
    pub busy: u64,
    /// Requests that were answered with an error.
    pub failed: u64,
    /// Requests that wait now.
    pub waiting: usize,
    /// Keys named ahead that there was no room for.
    pub prefetch_dropped: u64,
    /// Keys named ahead that are not fetched yet.
    pub prefetch_waiting: usize,
    /// Running totals of the workers.
    pub counters: Counters,
}

/// What callers and workers share.
pub struct RequestQueue {
    pub generation: Generation,
    clock: Arc<dyn Clock>,
    slots: Box<[Slot]>,
    queue: Mutex<Queue>,
    /// There may be something to do.
    work: Condvar,
    batch_max: usize,
    gather: Duration,
    /// Deadlines matter only where a table waits as long as they allow.
    has_deadlines: bool,
}

/// The memory of one request.
struct Slot {
    request: Mutex<Request>,
    done: Condvar,
}

pub struct Request {
    stage: Stage,
    pub batch: Batch,
    pub scores: Vec<f32>,
    pub statuses: Vec<LookupStatus>,
    pub outputs: usize,
}

/// Where a request stands.
enum Stage {
    Waiting,
    Done(Result<(), RequestError>),
    /// The caller went away before it was served.
    Abandoned,
}

/// A request in the queue.
#[derive(Clone, Copy)]
struct Waiting {
    slot: u16,
    samples: u32,
    deadline: Option<Duration>,
    /// Until then it waits for others to join it.
    due: Duration,
}

struct Queue {
    free: heapless::Vec<u16, SLOTS_MAX>,
    waiting: heapless::Deque<Waiting, SLOTS_MAX>,
    samples: usize,
    prefetch: heapless::Deque<RowKey, PREFETCH_MAX>,
    /// Keys that a worker fetches ahead now. One does at a time: the others stay free for requests.
    ahead: usize,
    closing: bool,
    stats: Stats,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RequestQueue {
    pub fn new(model: &Model, clock: Arc<dyn Clock>) -> Self {
        let budget = model.budget();
        let slot = |_| {
            let (batch, n) = (model.batch(), budget.batch_max as usize);
            let (scores, statuses) =
                (vec![0.0; n * model.outputs()], vec![LookupStatus::default(); n]);
            let request = Request {
                stage: Stage::Abandoned,
                batch,
                scores,
                statuses,
                outputs: model.outputs(),
            };
            Slot { request: Mutex::new(request), done: Condvar::new() }
        };
        let queue = Queue {
            // The last is taken first: what a request left in the processor's caches the next one
            // uses.
            free: (0..budget.slots as u16).rev().collect(),
            waiting: heapless::Deque::new(),
            samples: 0,
            prefetch: heapless::Deque::new(),
            ahead: 0,
            closing: false,
            stats: Stats::default(),
        };
        Self {
            generation: model.generation().clone(),
            clock,
            slots: (0..budget.slots).map(slot).collect(),
            queue: Mutex::new(queue),
            work: Condvar::new(),
            batch_max: budget.batch_max as usize,
            gather: Duration::from_micros(budget.gather_us.into()),
            has_deadlines: model.has_deadlines(),
        }
    }

    pub fn submit(&self, batch: &Batch, deadline: Option<Duration>) -> Result<u16, RequestError> {
        let taken = {
            let mut queue = lock(&self.queue);
            let taken = queue.free.pop();
            queue.stats.busy += u64::from(taken.is_none());
            taken
        };
        let slot = taken.ok_or(RequestError::Busy(self.slots.len()))?;
        {
            let mut request = lock(&self.slots[usize::from(slot)].request);
            request.stage = Stage::Waiting;
            request.batch.clear();
            let fits = request.batch.append(batch);
            assert!(fits, "the batch was checked");
        }
        let (samples, deadline) = (batch.size() as u32, deadline.filter(|_| self.has_deadlines));
        // A request with a deadline has no time to give.
        let alone = self.gather.is_zero() || deadline.is_some();
        let due = if alone { Duration::ZERO } else { self.clock.now() + self.gather };
        let mut queue = lock(&self.queue);
        queue.samples += batch.size();
        let queued = queue.waiting.push_back(Waiting { slot, samples, deadline, due }).is_ok();
        assert!(queued, "the queue has room for every slot");
        drop(queue);
        self.work.notify_one();
        Ok(slot)
    }

    fn free(&self, slot: u16) {
        let freed = lock(&self.queue).free.push(slot).is_ok();
        assert!(freed, "a slot is freed once");
    }

    pub fn prefetch(&self, table: u16, keys: &[u64]) -> usize {
        let mut queue = lock(&self.queue);
        let room = queue.prefetch.capacity() - queue.prefetch.len();
        let taken = room.min(keys.len());
        for &key in &keys[..taken] {
            let queued = queue.prefetch.push_back(RowKey { table, key }).is_ok();
            assert!(queued, "there is room");
        }
        queue.stats.prefetch_dropped += (keys.len() - taken) as u64;
        drop(queue);
        self.work.notify_one();
        taken
    }

    /// Bytes of the queues and of what `workers` have in hand.
    pub fn queue_bytes(workers: usize) -> usize {
        size_of::<Queue>() + workers * size_of::<InFlight>()
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        let queue = lock(&self.queue);
        let prefetch_waiting = queue.prefetch.len() + queue.ahead;
        Stats { waiting: queue.waiting.len(), prefetch_waiting, ..queue.stats }
    }

    /// Lets the workers end once nothing waits.
    pub fn close(&self) {
        lock(&self.queue).closing = true;
        self.work.notify_all();
    }

    /// Whether the request in `slot` is answered.
    pub fn is_done(&self, slot: u16) -> bool {
        matches!(lock(&self.slots[usize::from(slot)].request).stage, Stage::Done(_))
    }

    /// Waits for the answer to the request in `slot`.
    pub fn wait(&self, slot: u16) -> Result<MutexGuard<'_, Request>, RequestError> {
        let slot = &self.slots[usize::from(slot)];
        let mut request = lock(&slot.request);
        loop {
            match &request.stage {
                Stage::Done(Ok(())) => return Ok(request),
                Stage::Done(Err(e)) => return Err(e.clone()),
                _ => request = slot.done.wait(request).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// The caller is done with `slot`: frees it, or leaves that to the worker that has it.
    pub fn leave(&self, slot: u16) {
        let done = {
            let mut request = lock(&self.slots[usize::from(slot)].request);
            let done = matches!(request.stage, Stage::Done(_));
            request.stage = Stage::Abandoned;
            done
        };
        if done {
            self.free(slot);
        }
    }

    /// Adds the request in `slot` to `batch`; frees the slot instead if its caller is gone.
    fn join(&self, slot: u16, batch: &mut Batch) -> bool {
        let wanted = {
            let request = lock(&self.slots[usize::from(slot)].request);
            let wanted = matches!(request.stage, Stage::Waiting);
            assert!(!wanted || batch.append(&request.batch), "requests in hand fit one batch");
            wanted
        };
        if !wanted {
            self.free(slot);
        }
        wanted
    }

    /// Ends the request in `slot`: `write` fills its scores, or it failed.
    fn finish(
        &self,
        slot: u16,
        result: Result<(), RequestError>,
        write: impl FnOnce(&mut Request),
    ) {
        let at = &self.slots[usize::from(slot)];
        let abandoned = {
            let mut request = lock(&at.request);
            let abandoned = matches!(request.stage, Stage::Abandoned);
            if !abandoned {
                write(&mut request);
                request.stage = Stage::Done(result);
            }
            abandoned
        };
        if abandoned { self.free(slot) } else { at.done.notify_all() }
    }
}

impl Queue {
    /// Moves the first requests that go together into `hand`. If the first one waits for others to
    /// join it, how long.
    fn take(&mut self, lane: &RequestQueue, hand: &mut InFlight) -> Option<Duration> {
        let first = *self.waiting.front()?;
        if first.due > Duration::ZERO && self.samples < lane.batch_max && !self.closing {
            let left = first.due.saturating_sub(lane.clock.now());
            if left > Duration::ZERO {
                return Some(left);
            }
        }
        hand.deadline = first.deadline;
        let (mut samples, mut latest) = (0, first.deadline);
        while let Some(&next) = self.waiting.front() {
            samples += next.samples as usize;
            let (earliest, last) = (hand.deadline.min(next.deadline), latest.max(next.deadline));
            if samples > lane.batch_max || !lane.go_together(earliest, last) {
                break;
            }
            (hand.deadline, latest) = (earliest, last);
            self.waiting.pop_front();
            self.samples -= next.samples as usize;
            let taken = hand.requests.push(next).is_ok();
            assert!(taken, "a hand has room for every slot");
        }
        self.stats.batches += 1;
        self.stats.requests += hand.requests.len() as u64;
        None
    }

    /// Moves keys to fetch ahead to `worker`, if no other has any.
    fn take_ahead(&mut self, keys: &mut heapless::Vec<RowKey, KEYS_A_STEP>) {
        while self.ahead < KEYS_A_STEP
            && let Some(row) = self.prefetch.pop_front()
        {
            self.ahead += 1;
            let taken = keys.push(row).is_ok();
            assert!(taken, "a step has room for its keys");
        }
    }
}

/// What one worker has in hand; outlives its panic.
#[derive(Default)]
struct InFlight {
    requests: heapless::Vec<Waiting, SLOTS_MAX>,
    /// How many of them were answered.
    answered: usize,
    deadline: Option<Duration>,
    /// Whether the queue's `ahead` keys are this worker's.
    ahead: bool,
}

/// A worker's thread. Whatever panics in it costs the requests in hand, which are told so, and
/// nothing else.
pub fn work(lane: &RequestQueue, mut worker: Worker) {
    let (model, mut hand) = (Arc::clone(worker.model()), InFlight::default());
    while catch_unwind(AssertUnwindSafe(|| serve(lane, worker, &mut hand))).is_err() {
        let lost = &hand.requests[hand.answered..];
        log::error!(
            "a worker panicked with {} requests in hand; another takes its place",
            lost.len()
        );
        lost.iter().for_each(|r| lane.finish(r.slot, Err(RequestError::Panicked), |_| ()));
        lock(&lane.queue).stats.failed += lost.len() as u64;
        if hand.ahead {
            lock(&lane.queue).ahead = 0;
        }
        hand = InFlight::default();
        worker = Worker::new(Arc::clone(&model), Arc::clone(&lane.clock));
    }
}

/// Does what there is to do until the pipeline closes: requests first, then rows that were answered
/// with defaults, then keys that were named ahead.
fn serve(lane: &RequestQueue, mut worker: Worker, hand: &mut InFlight) {
    let (mut batch, mut counted) = (worker.model().batch(), Counters::default());
    let mut keys = heapless::Vec::new();
    while lane.next(&worker, hand, &mut counted, &mut keys) {
        score(lane, &mut worker, &mut batch, hand);
        // Its list of rows behind is empty, or the worker would not have been given keys.
        let dropped = keys.iter().filter(|&&row| !worker.fetch_ahead(row)).count();
        if dropped > 0 {
            lock(&lane.queue).stats.prefetch_dropped += dropped as u64;
        }
        keys.clear();
        // Under steady load too, what was answered with defaults becomes fresh bit by bit.
        worker.fetch_behind(PAGES_A_STEP);
    }
}

impl RequestQueue {
    /// Waits until there is something to do, and hands it over: requests, keys to fetch ahead, or
    /// rows that `worker` still has to fetch. Returns whether there will ever be.
    fn next(
        &self,
        worker: &Worker,
        hand: &mut InFlight,
        counted: &mut Counters,
        keys: &mut heapless::Vec<RowKey, KEYS_A_STEP>,
    ) -> bool {
        let mut queue = lock(&self.queue);
        queue.stats.counters.add(&worker.counters().since(counted));
        *counted = worker.counters();
        if hand.ahead && worker.behind() == 0 {
            (hand.ahead, queue.ahead) = (false, 0);
        }
        loop {
            let wait = queue.take(self, hand);
            if !hand.requests.is_empty() {
                // What this worker leaves may have been announced to it alone.
                if !queue.waiting.is_empty() {
                    self.work.notify_one();
                }
                return true;
            }
            if queue.closing {
                return false;
            }
            if worker.behind() > 0 {
                return true;
            }
            if queue.ahead == 0 && !queue.prefetch.is_empty() {
                queue.take_ahead(keys);
                hand.ahead = true;
                return true;
            }
            queue = match wait {
                None => self.work.wait(queue).unwrap_or_else(PoisonError::into_inner),
                Some(wait) => {
                    self.work.wait_timeout(queue, wait).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Whether requests with deadlines from `earliest` to `latest` go together. The earliest then
    /// counts for all: none loses more than a request may have to wait for others.
    fn go_together(&self, earliest: Option<Duration>, latest: Option<Duration>) -> bool {
        match (earliest, latest) {
            (Some(earliest), Some(latest)) => latest - earliest <= self.gather,
            (earliest, latest) => earliest == latest,
        }
    }
}

/// Scores the requests in hand as one batch and answers each.
fn score(lane: &RequestQueue, worker: &mut Worker, batch: &mut Batch, hand: &mut InFlight) {
    batch.clear();
    hand.requests.retain(|r| lane.join(r.slot, batch));
    if hand.requests.is_empty() {
        return;
    }
    let outputs = worker.model().outputs();
    match worker.score(batch, hand.deadline) {
        Ok(all) => {
            let mut start = 0;
            for r in &hand.requests {
                let samples = start..start + r.samples as usize;
                start = samples.end;
                lane.finish(r.slot, Ok(()), |request| {
                    let values = &all.values[samples.start * outputs..samples.end * outputs];
                    request.scores[..values.len()].copy_from_slice(values);
                    request.statuses[..samples.len()].copy_from_slice(&all.statuses[samples]);
                });
                hand.answered += 1;
            }
        }
        Err(e) => {
            let e = Arc::new(e);
            for r in &hand.requests {
                lane.finish(r.slot, Err(RequestError::Score(Arc::clone(&e))), |_| ());
                hand.answered += 1;
            }
            lock(&lane.queue).stats.failed += hand.requests.len() as u64;
        }
    }
    hand.requests.clear();
    hand.answered = 0;
}
