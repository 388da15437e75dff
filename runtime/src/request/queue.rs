//! What callers and workers of a pipeline share: the slots, the request queue, and the loop of a
//! worker thread. A worker takes the first requests that can be batched, scores them as one batch
//! and writes each result into its slot. Without a request it fetches deferred and prefetched rows,
//! a few pages at a time. Never allocates, never reorders requests.
//!
//! The queue is a `heapless::Deque` behind a lock and not its lock-free `mpmc` queue: a worker must
//! look at the first request before it takes it (can both be batched? is it ready?), must sleep
//! while there is none, and `mpmc` may report full or empty while another thread is half-way
//! through it. The lock is held only to move a few words.

use crate::bundle::manifest::Generation;
use crate::clock::Clock;
use crate::limits::{DEADLINE_WAIT_US, PREFETCH_MAX, SLOTS_MAX};
use crate::request::error::RequestError;
use crate::request::worker::live_model::LiveModel;
use crate::request::worker::{Counters, ScoreError, Worker};
use crate::schema::batch::Batch;
use hatchback_kernels::cache::address::RowKey;
use hatchback_kernels::lookup::LookupStatus;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

/// Deferred pages that a worker reads before it looks for requests again.
const PAGES_PER_STEP: usize = 8;

/// Keys to prefetch that a worker takes in one step.
const KEYS_PER_STEP: usize = 32;

/// What a pipeline did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that a worker took.
    pub requests: u64,
    /// Batches in which the workers scored them.
    pub batches: u64,
    /// Requests refused because every slot was taken.
    pub busy: u64,
    /// Requests that a worker answered with an error. A score that is not a number is one.
    pub failed: u64,
    /// Requests that ended without scores because their deadline had passed.
    pub expired: u64,
    /// Requests that wait now.
    pub waiting: usize,
    /// Keys to prefetch that were dropped for lack of room.
    pub prefetch_dropped: u64,
    /// Keys to prefetch that are not fetched yet.
    pub prefetch_waiting: usize,
    /// Running totals of the workers.
    pub counters: Counters,
}

/// What callers and workers of a pipeline share.
pub struct RequestQueue {
    live: Arc<LiveModel>,
    clock: Arc<dyn Clock>,
    slots: Box<[Slot]>,
    queue: Mutex<Queue>,
    /// Signals that there may be work.
    work: Condvar,
    batch_max: usize,
    batch_delay: Duration,
}

/// The memory of one request.
struct Slot {
    request: Mutex<Request>,
    done: Condvar,
}

pub struct Request {
    stage: Stage,
    pub batch: Batch,
    /// `[batch_max, outputs]`.
    pub scores: Vec<f32>,
    /// `[batch_max]`.
    pub statuses: Vec<LookupStatus>,
    pub outputs: usize,
    /// The generation that scored the request.
    pub generation: Arc<Generation>,
    /// When a worker took the request, a time of the queue's clock.
    pub taken_at: Duration,
    /// Woken when the request is done, for a caller that must not block.
    waker: Option<Waker>,
}

/// How far a request is.
enum Stage {
    Waiting,
    Done(Result<(), RequestError>),
    /// The caller dropped its ticket before the request was done.
    Abandoned,
}

/// A request in the queue.
#[derive(Clone, Copy)]
struct Waiting {
    slot: u16,
    samples: u32,
    deadline: Option<Duration>,
    /// Until this time it waits for other requests to be batched with.
    ready_at: Duration,
}

struct Queue {
    free: heapless::Vec<u16, SLOTS_MAX>,
    waiting: heapless::Deque<Waiting, SLOTS_MAX>,
    /// Samples of all waiting requests.
    samples: usize,
    prefetch: heapless::Deque<RowKey, PREFETCH_MAX>,
    /// Keys that one worker prefetches now. The other workers stay free for requests.
    prefetching: usize,
    is_closing: bool,
    stats: Stats,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RequestQueue {
    pub fn new(live: Arc<LiveModel>, clock: Arc<dyn Clock>) -> Self {
        let model = live.model();
        let budget = model.budget();
        let slot = |_| {
            let batch_max = budget.batch_max as usize;
            let request = Request {
                stage: Stage::Abandoned,
                batch: model.batch(),
                scores: vec![0.0; batch_max * model.outputs()],
                statuses: vec![LookupStatus::default(); batch_max],
                outputs: model.outputs(),
                generation: Arc::clone(model.generation()),
                taken_at: Duration::ZERO,
                waker: None,
            };
            Slot { request: Mutex::new(request), done: Condvar::new() }
        };

        let queue = Queue {
            // The slot freed last is taken first: its memory is still in the processor's caches.
            free: (0..budget.slots as u16).rev().collect(),
            waiting: heapless::Deque::new(),
            samples: 0,
            prefetch: heapless::Deque::new(),
            prefetching: 0,
            is_closing: false,
            stats: Stats::default(),
        };
        Self {
            clock,
            slots: (0..budget.slots).map(slot).collect(),
            queue: Mutex::new(queue),
            work: Condvar::new(),
            batch_max: budget.batch_max as usize,
            batch_delay: Duration::from_micros(budget.batch_delay_us_max.into()),
            live,
        }
    }

    /// Queues a request in a free slot, whose empty batch `fill` fills, and returns the slot.
    /// Returns the error of `fill`; the slot is then free again.
    pub fn submit<E: From<RequestError>>(
        &self,
        deadline: Option<Duration>,
        fill: impl FnOnce(&mut Batch) -> Result<(), E>,
    ) -> Result<u16, E> {
        let taken = {
            let mut queue = lock(&self.queue);
            let taken = queue.free.pop();
            queue.stats.busy += u64::from(taken.is_none());
            taken
        };
        let slot = taken.ok_or(RequestError::Busy(self.slots.len()))?;
        let filled = {
            let mut request = lock(&self.slots[usize::from(slot)].request);
            request.stage = Stage::Waiting;
            request.batch.clear();
            fill(&mut request.batch).map(|()| request.batch.size())
        };
        let samples = filled.inspect_err(|_| self.free(slot))?;

        // A request with a deadline has no time to wait for others.
        let is_ready = self.batch_delay.is_zero() || deadline.is_some();
        let ready_at = if is_ready { Duration::ZERO } else { self.clock.now() + self.batch_delay };

        let mut queue = lock(&self.queue);
        queue.samples += samples;
        let samples = samples as u32;
        let queued = queue.waiting.push_back(Waiting { slot, samples, deadline, ready_at });
        assert!(queued.is_ok(), "the queue has room for every slot");
        drop(queue);
        self.work.notify_one();
        Ok(slot)
    }

    fn free(&self, slot: u16) {
        let freed = lock(&self.queue).free.push(slot).is_ok();
        assert!(freed, "a slot is freed once");
    }

    /// Queues keys to prefetch as far as there is room; returns how many.
    pub fn prefetch(&self, table: u16, keys: &[u64]) -> usize {
        let mut queue = lock(&self.queue);
        let room = queue.prefetch.capacity() - queue.prefetch.len();
        let taken = room.min(keys.len());
        for &key in &keys[..taken] {
            let queued = queue.prefetch.push_back(RowKey { table, key }).is_ok();
            assert!(queued, "the prefetch queue has room");
        }
        queue.stats.prefetch_dropped += (keys.len() - taken) as u64;
        drop(queue);
        self.work.notify_one();
        taken
    }

    /// Returns the bytes of the queues and of the requests in flight of `workers`.
    pub fn queue_bytes(workers: usize) -> usize {
        size_of::<Queue>() + workers * size_of::<InFlight>()
    }

    /// Returns what the pipeline did so far.
    pub fn stats(&self) -> Stats {
        let queue = lock(&self.queue);
        let prefetch_waiting = queue.prefetch.len() + queue.prefetching;
        Stats { waiting: queue.waiting.len(), prefetch_waiting, ..queue.stats }
    }

    /// Wakes the workers that wait for requests, so that they see the current version of the model.
    pub fn wake(&self) {
        let _queue = lock(&self.queue);
        self.work.notify_all();
    }

    /// Starts the statistics anew.
    pub fn reset_stats(&self) {
        lock(&self.queue).stats = Stats::default();
    }

    fn is_current(&self, generation: &Arc<Generation>) -> bool {
        Arc::ptr_eq(self.live.model().generation(), generation)
    }

    /// Lets the workers end as soon as no request waits.
    pub fn close(&self) {
        lock(&self.queue).is_closing = true;
        self.work.notify_all();
    }

    /// Returns whether the request in `slot` is answered.
    pub fn is_done(&self, slot: u16) -> bool {
        matches!(lock(&self.slots[usize::from(slot)].request).stage, Stage::Done(_))
    }

    /// Returns whether the request in `slot` is answered. If it is not, wakes `waker` when it is.
    pub fn poll_done(&self, slot: u16, waker: &Waker) -> bool {
        let mut request = lock(&self.slots[usize::from(slot)].request);
        let is_done = matches!(request.stage, Stage::Done(_));
        if !is_done && !request.waker.as_ref().is_some_and(|before| before.will_wake(waker)) {
            request.waker = Some(waker.clone());
        }
        is_done
    }

    /// Waits for the answer to the request in `slot`, until [`DEADLINE_WAIT_US`] after its
    /// `deadline`.
    pub fn wait(
        &self,
        slot: u16,
        deadline: Option<Duration>,
    ) -> Result<MutexGuard<'_, Request>, RequestError> {
        let slot = &self.slots[usize::from(slot)];
        let mut request = lock(&slot.request);
        // From here on the condition variable wakes the caller.
        request.waker = None;
        loop {
            match &request.stage {
                Stage::Done(Ok(())) => return Ok(request),
                Stage::Done(Err(e)) => return Err(e.clone()),
                _ => {}
            }
            let left = deadline.map(|deadline| self.left(deadline));
            request = match left {
                Some(Duration::ZERO) => return Err(RequestError::DeadlineExceeded),
                Some(left) => {
                    let waited = slot.done.wait_timeout(request, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => slot.done.wait(request).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Returns for how long a caller still waits for a request with `deadline`.
    fn left(&self, deadline: Duration) -> Duration {
        deadline
            .saturating_add(Duration::from_micros(DEADLINE_WAIT_US))
            .saturating_sub(self.clock.now())
    }

    /// Ends a request whose caller has stopped waiting, because its deadline has passed. Returns
    /// whether it has.
    fn expire(&self, request: &Waiting) -> bool {
        let has_expired = self.has_expired(request);
        if has_expired {
            self.exceed(request.slot);
        }
        has_expired
    }

    fn has_expired(&self, request: &Waiting) -> bool {
        request.deadline.is_some_and(|deadline| self.left(deadline).is_zero())
    }

    /// Ends the request in `slot` without scores, because its deadline has passed. That is no fault
    /// of a generation: the caller chose the deadline.
    fn exceed(&self, slot: u16) {
        lock(&self.queue).stats.expired += 1;
        self.finish(slot, Err(RequestError::DeadlineExceeded), |_| ());
    }

    /// Releases `slot` for its caller: frees it if the request is done or no worker took it yet,
    /// else leaves that to the worker.
    pub fn release(&self, slot: u16) {
        let is_over = self.is_done(slot) || self.withdraw(slot) || {
            let mut request = lock(&self.slots[usize::from(slot)].request);
            let is_done = matches!(request.stage, Stage::Done(_));
            request.stage = Stage::Abandoned;
            request.waker = None;
            is_done
        };
        if is_over {
            self.free(slot);
        }
    }

    /// Takes the request in `slot` out of the queue for its caller, who has not released the slot
    /// yet. Returns false if a worker has the request.
    fn withdraw(&self, slot: u16) -> bool {
        let mut queue = lock(&self.queue);
        let Some(at) = queue.waiting.iter().position(|request| request.slot == slot) else {
            return false;
        };
        let mut withdrawn = None;
        for number in 0..queue.waiting.len() {
            let Some(request) = queue.waiting.pop_front() else { break };
            if number == at {
                withdrawn = Some(request);
            } else {
                // The queue had room for this request until now.
                let _ = queue.waiting.push_back(request);
            }
        }
        if let Some(request) = withdrawn {
            queue.samples -= request.samples as usize;
            queue.stats.expired += u64::from(self.has_expired(&request));
        }
        true
    }

    /// Appends the request in `slot`, which a worker took at `now`, to `batch`. If its caller
    /// abandoned it, frees the slot and returns false.
    fn append_to(&self, slot: u16, batch: &mut Batch, now: Duration) -> bool {
        let is_wanted = {
            let mut request = lock(&self.slots[usize::from(slot)].request);
            request.taken_at = now;
            let is_wanted = matches!(request.stage, Stage::Waiting);
            assert!(!is_wanted || batch.append(&request.batch), "requests in flight fit one batch");
            is_wanted
        };
        if !is_wanted {
            self.free(slot);
        }
        is_wanted
    }

    /// Ends the request in `slot` with `result`; `write` fills in its scores.
    fn finish(
        &self,
        slot: u16,
        result: Result<(), RequestError>,
        write: impl FnOnce(&mut Request),
    ) {
        let at = &self.slots[usize::from(slot)];
        let (is_abandoned, waker) = {
            let mut request = lock(&at.request);
            let is_abandoned = matches!(request.stage, Stage::Abandoned);
            if !is_abandoned {
                write(&mut request);
                request.stage = Stage::Done(result);
            }
            (is_abandoned, request.waker.take())
        };
        match waker {
            _ if is_abandoned => self.free(slot),
            Some(waker) => waker.wake(),
            None => at.done.notify_all(),
        }
    }

    /// Ends the request in `slot` with `error`. Counts it as failed if the current generation is to
    /// blame.
    fn fail(&self, slot: u16, error: RequestError, is_current: bool) {
        lock(&self.queue).stats.failed += u64::from(is_current);
        self.finish(slot, Err(error), |_| ());
    }

    /// Returns whether requests with deadlines from `earliest` to `latest` can be batched. The
    /// batch has the earliest deadline, so the others lose at most the batch delay.
    fn can_batch(&self, earliest: Option<Duration>, latest: Option<Duration>) -> bool {
        match (earliest, latest) {
            (Some(earliest), Some(latest)) => latest - earliest <= self.batch_delay,
            (earliest, latest) => earliest == latest,
        }
    }

    /// Hands over the next work: requests, keys to prefetch, or the signal that the worker has
    /// deferred rows to fetch. Without work it waits, or returns `Next::Nothing` if `idle` says so.
    fn next(&self, work: &mut WorkerState, in_flight: &mut InFlight, idle: Idle) -> Next {
        let WorkerState { worker, counted, keys, .. } = work;
        let is_current = self.is_current(worker.model().generation());
        let mut queue = lock(&self.queue);
        if is_current {
            queue.stats.counters.add(&worker.counters().since(counted));
        }
        *counted = worker.counters();
        if in_flight.is_prefetching && worker.deferred_len() == 0 {
            (in_flight.is_prefetching, queue.prefetching) = (false, 0);
        }

        loop {
            let wait = queue.take(self, in_flight);
            if !in_flight.requests.is_empty() {
                let leaves_some = !queue.waiting.is_empty();
                drop(queue);
                // Only this worker may have been notified of the requests that it leaves.
                if leaves_some {
                    self.work.notify_one();
                }
                return Next::Work;
            }
            if queue.is_closing {
                return Next::Closed;
            }
            if worker.deferred_len() > 0 || !worker.is_current() {
                return Next::Work;
            }
            if queue.prefetching == 0 && !queue.prefetch.is_empty() {
                queue.take_prefetch(keys);
                in_flight.is_prefetching = true;
                return Next::Work;
            }
            if idle == Idle::Return {
                return Next::Nothing;
            }

            queue = match wait {
                None => self.work.wait(queue).unwrap_or_else(PoisonError::into_inner),
                Some(wait) => {
                    self.work.wait_timeout(queue, wait).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

impl Queue {
    /// Moves the first requests that can be batched to `in_flight`. If the first request still
    /// waits for others, returns for how long.
    fn take(&mut self, shared: &RequestQueue, in_flight: &mut InFlight) -> Option<Duration> {
        let first = *self.waiting.front()?;
        let may_wait = first.ready_at > Duration::ZERO && self.samples < shared.batch_max;
        if may_wait && !self.is_closing {
            let left = first.ready_at.saturating_sub(shared.clock.now());
            if left > Duration::ZERO {
                return Some(left);
            }
        }

        in_flight.deadline = first.deadline;
        let (mut samples, mut latest) = (0, first.deadline);
        while let Some(&next) = self.waiting.front() {
            samples += next.samples as usize;
            let earliest = in_flight.deadline.min(next.deadline);
            let last = latest.max(next.deadline);
            if samples > shared.batch_max || !shared.can_batch(earliest, last) {
                break;
            }
            (in_flight.deadline, latest) = (earliest, last);
            self.waiting.pop_front();
            self.samples -= next.samples as usize;
            let taken = in_flight.requests.push(next).is_ok();
            assert!(taken, "a worker has room for the requests of every slot");
        }

        self.stats.batches += 1;
        self.stats.requests += in_flight.requests.len() as u64;
        None
    }

    /// Moves keys to prefetch to `keys`. The caller has checked that no worker prefetches.
    fn take_prefetch(&mut self, keys: &mut heapless::Vec<RowKey, KEYS_PER_STEP>) {
        while self.prefetching < KEYS_PER_STEP
            && let Some(row) = self.prefetch.pop_front()
        {
            self.prefetching += 1;
            let taken = keys.push(row).is_ok();
            assert!(taken, "a step has room for its keys");
        }
    }
}

/// The requests that one worker serves. Outlives a panic of the worker.
#[derive(Default)]
struct InFlight {
    requests: heapless::Vec<Waiting, SLOTS_MAX>,
    /// How many of them are answered.
    answered: usize,
    deadline: Option<Duration>,
    /// Whether this worker prefetches the queue's `prefetching` keys.
    is_prefetching: bool,
}

/// Runs a worker thread until the pipeline closes. If the worker panics, its requests in flight are
/// answered with an error and a new worker takes its place.
pub fn run_worker(queue: &RequestQueue, mut worker: Worker) {
    let mut in_flight = InFlight::default();
    while catch_unwind(AssertUnwindSafe(|| serve(queue, worker, &mut in_flight))).is_err() {
        let lost = &in_flight.requests[in_flight.answered..];
        log::error!(
            "a worker panicked, {} requests in flight fail; a new worker takes its place",
            lost.len()
        );
        lost.iter().for_each(|r| queue.fail(r.slot, RequestError::Panicked, true));
        if in_flight.is_prefetching {
            lock(&queue.queue).prefetching = 0;
        }
        in_flight = InFlight::default();
        worker = Worker::on(Arc::clone(&queue.live), Arc::clone(&queue.clock));
    }
}

/// What a worker does without work.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Idle {
    Wait,
    Return,
}

/// What the queue has for a worker.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Work,
    Nothing,
    Closed,
}

/// A worker and its memory between two steps.
struct WorkerState {
    worker: Worker,
    batch: Batch,
    /// The counters that the queue's statistics have already.
    counted: Counters,
    keys: heapless::Vec<RowKey, KEYS_PER_STEP>,
}

impl WorkerState {
    fn new(worker: Worker) -> Self {
        let batch = worker.model().batch();
        Self { worker, batch, counted: Counters::default(), keys: heapless::Vec::new() }
    }

    /// Does the work that the queue handed over: first requests, then rows that were answered with
    /// defaults, then keys to prefetch.
    fn work(&mut self, queue: &RequestQueue, in_flight: &mut InFlight) {
        let Self { worker, batch, keys, .. } = self;
        worker.follow();
        score(queue, worker, batch, in_flight);

        // `next` hands out keys only to a worker without deferred rows, so that there is room.
        let dropped = keys.iter().filter(|&&row| !worker.enqueue_prefetch(row)).count();
        if dropped > 0 {
            lock(&queue.queue).stats.prefetch_dropped += dropped as u64;
        }
        keys.clear();

        // Deferred rows are fetched after each batch, so that they arrive under steady load too.
        worker.fetch_deferred(PAGES_PER_STEP);
    }
}

/// Serves until the pipeline closes.
fn serve(queue: &RequestQueue, worker: Worker, in_flight: &mut InFlight) {
    let mut state = WorkerState::new(worker);
    while queue.next(&mut state, in_flight, Idle::Wait) == Next::Work {
        state.work(queue, in_flight);
    }
}

/// A worker without a thread: its caller takes each step. For a simulation, which chooses the order
/// of all steps of a car.
pub struct SteppedWorker {
    state: WorkerState,
    in_flight: InFlight,
}

impl SteppedWorker {
    pub fn new(worker: Worker) -> Self {
        Self { state: WorkerState::new(worker), in_flight: InFlight::default() }
    }

    /// Does one piece of work. Returns false if there is none.
    pub fn step(&mut self, queue: &RequestQueue) -> bool {
        let has_work = queue.next(&mut self.state, &mut self.in_flight, Idle::Return) == Next::Work;
        if has_work {
            self.state.work(queue, &mut self.in_flight);
        }
        has_work
    }
}

/// Scores the requests in flight as one batch and answers each.
fn score(queue: &RequestQueue, worker: &mut Worker, batch: &mut Batch, in_flight: &mut InFlight) {
    if in_flight.requests.is_empty() {
        return;
    }
    batch.clear();
    let now = queue.clock.now();
    in_flight.requests.retain(|r| !queue.expire(r) && queue.append_to(r.slot, batch, now));
    if in_flight.requests.is_empty() {
        return;
    }

    match worker.score_requests(batch, in_flight.deadline) {
        Ok(all) => {
            let mut start = 0;
            for r in &in_flight.requests {
                let samples = start..start + r.samples as usize;
                start = samples.end;
                match all.request(samples) {
                    Ok(scores) => queue.finish(r.slot, Ok(()), |request| {
                        request.generation = Arc::clone(all.generation());
                        request.scores[..scores.values.len()].copy_from_slice(scores.values);
                        request.statuses[..scores.statuses.len()].copy_from_slice(scores.statuses);
                    }),
                    Err(e) => queue.fail(r.slot, e.into(), queue.is_current(all.generation())),
                }
                in_flight.answered += 1;
            }
        }
        Err(ScoreError::DeadlineExceeded) => {
            for r in &in_flight.requests {
                queue.exceed(r.slot);
                in_flight.answered += 1;
            }
        }
        Err(e) => {
            let (e, is_current) =
                (RequestError::from(e), queue.is_current(worker.model().generation()));
            for r in &in_flight.requests {
                queue.fail(r.slot, e.clone(), is_current);
                in_flight.answered += 1;
            }
        }
    }
    in_flight.requests.clear();
    in_flight.answered = 0;
}
