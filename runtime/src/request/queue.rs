//! The state that callers and workers of a pipeline share: the slots, the queue of requests and the
//! queue of keys to prefetch. A worker takes the first requests that can be batched. Never
//! allocates. Requests keep their order; those that a caller's thread gives back return to the
//! front.
//!
//! The queue is a `heapless::Deque` behind a lock and not its lock-free `mpmc` queue. A worker must
//! look at the first request before it takes it (can both be batched? is it ready?). It must also
//! sleep while there is none. `mpmc` may report full or empty while another thread is inside an
//! operation. The lock is held only to move a few words.

use crate::bundle::manifest::Generation;
use crate::clock::Clock;
use crate::limits::{CALLER_SCORE_US_MAX, DEADLINE_WAIT_US, PREFETCH_MAX, SLOTS_MAX};
use crate::locks::lock;
use crate::model::Model;
use crate::request::error::RequestError;
use crate::request::slot::{Request, Slot};
use crate::request::worker::live_model::LiveModel;
use crate::request::worker::{Counters, Worker};
use crate::request::worker_state::{InFlight, KEYS_PER_STEP, Waiting, WorkerState};
use crate::schema::batch::Batch;
use hatchback_kernels::cache::address::RowKey;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::task::Waker;
use std::time::Duration;

/// Statistics of a pipeline since its current model was opened or swapped in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Requests that a worker took.
    pub requests: u64,
    /// Batches in which the workers scored them.
    pub batches: u64,
    /// Requests refused because every slot was taken.
    pub busy: u64,
    /// Requests that a worker answered with an error, such as a score that is not a number.
    pub failed: u64,
    /// Those of `failed` for which the GPU failed.
    pub failed_by_car: u64,
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

/// The state that callers and workers of a pipeline share.
pub struct RequestQueue {
    live: Arc<LiveModel>,
    clock: Arc<dyn Clock>,
    slots: Box<[Slot]>,
    queue: Mutex<Queue>,
    /// Signals that there may be work.
    work: Condvar,
    batch_max: usize,
    batch_delay: Duration,
    /// Moving average of the time of a sample whose rows were all in memory, ns; 0 if unknown.
    sample_ns: AtomicU64,
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
    /// Number of changes that may be work for a worker that found none.
    changes: u64,
    /// Whether a caller's thread left requests to a worker, and no worker has called `next` since.
    is_left: bool,
    /// Calls of `next` by workers that can score.
    turns: u64,
    stats: Stats,
}

/// A slot whose request is not queued yet. Dropping this value frees the slot, also when the
/// caller's `fill` panics.
struct TakenSlot<'a> {
    queue: &'a RequestQueue,
    slot: u16,
}

impl TakenSlot<'_> {
    /// Returns the slot, which stays taken.
    fn keep(self) -> u16 {
        let slot = self.slot;
        std::mem::forget(self);
        slot
    }
}

impl Drop for TakenSlot<'_> {
    fn drop(&mut self) {
        self.queue.free(self.slot);
    }
}

impl RequestQueue {
    pub fn new(live: Arc<LiveModel>, clock: Arc<dyn Clock>) -> Self {
        let model = live.model();
        let budget = model.budget();
        let queue = Queue {
            // The slot freed last is taken first, because its memory is still in the CPU's caches.
            free: (0..budget.slots as u16).rev().collect(),
            waiting: heapless::Deque::new(),
            samples: 0,
            prefetch: heapless::Deque::new(),
            prefetching: 0,
            is_closing: false,
            changes: 0,
            is_left: false,
            turns: 0,
            stats: Stats::default(),
        };
        Self {
            clock,
            slots: (0..budget.slots).map(|_| Slot::new(&model)).collect(),
            queue: Mutex::new(queue),
            work: Condvar::new(),
            batch_max: budget.batch_max as usize,
            batch_delay: Duration::from_micros(budget.batch_delay_us_max.into()),
            sample_ns: AtomicU64::new(0),
            live,
        }
    }

    /// Returns a worker that follows the live model, with all its memory.
    pub fn new_worker(&self) -> Worker {
        Worker::on(Arc::clone(&self.live), Arc::clone(&self.clock))
    }

    /// Returns the time now, by the clock of the deadlines.
    pub fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Queues a request in a free slot, whose empty batch `fill` fills for the live model. Returns
    /// the slot and notifies no worker. If `fill` fails, returns its error, and the slot is free.
    pub fn submit<E: From<RequestError>>(
        &self,
        deadline: Option<Duration>,
        fill: impl FnOnce(&Model, &mut Batch) -> Result<(), E>,
    ) -> Result<u16, E> {
        // In this order: a swap in between makes the version too low, never too high.
        let (version, model) = (self.live.version(), self.live.model());
        let taken = self.take_slot().ok_or(RequestError::Busy(self.slots.len()))?;
        // `fill` may decode a whole message, so it runs without the lock of the queue. Other
        // callers and the workers go on meanwhile.
        let samples = self.slots[usize::from(taken.slot)].begin(|batch| fill(&model, batch))?;
        let slot = taken.keep();

        // A request with a deadline has no time to wait for others.
        let is_ready = self.batch_delay.is_zero() || deadline.is_some();
        let ready_at = if is_ready { Duration::ZERO } else { self.clock.now() + self.batch_delay };

        let mut queue = lock(&self.queue);
        queue.samples += samples;
        let samples = samples as u32;
        let needs_thread = false;
        let request = Waiting { slot, samples, deadline, version, ready_at, needs_thread };
        assert!(queue.waiting.push_back(request).is_ok(), "the queue has room for every slot");
        Ok(slot)
    }

    fn take_slot(&self) -> Option<TakenSlot<'_>> {
        let mut queue = lock(&self.queue);
        let taken = queue.free.pop();
        queue.stats.busy += u64::from(taken.is_none());
        taken.map(|slot| TakenSlot { queue: self, slot })
    }

    /// Notifies a worker that there may be work.
    pub fn notify(&self) {
        // A worker that found nothing has released the lock and may not sleep yet. It misses the
        // notification, but not the count.
        lock(&self.queue).changes += 1;
        self.work.notify_one();
    }

    fn free(&self, slot: u16) {
        let freed = lock(&self.queue).free.push(slot).is_ok();
        assert!(freed, "a slot is freed once");
    }

    /// Queues as many of the keys to prefetch as there is room for; returns their number.
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
        self.notify();
        taken
    }

    /// Returns the bytes of the queues and of the requests in flight of `workers`.
    pub fn queue_bytes(workers: usize) -> usize {
        size_of::<Queue>() + workers * size_of::<InFlight>()
    }

    /// Returns the statistics so far.
    pub fn stats(&self) -> Stats {
        let queue = lock(&self.queue);
        let prefetch_waiting = queue.prefetch.len() + queue.prefetching;
        Stats { waiting: queue.waiting.len(), prefetch_waiting, ..queue.stats }
    }

    /// Wakes the workers that wait for requests, so that they see the current version of the model.
    pub fn wake(&self) {
        // Every worker counts as a user of the version that it saw last, and only the worker itself
        // can leave it.
        lock(&self.queue).changes += 1;
        self.work.notify_all();
    }

    /// Wakes the workers. Returns how often workers that can score have looked for work.
    pub fn turns(&self) -> u64 {
        // Before the wake: the turns that it brings are for the next call.
        let turns = lock(&self.queue).turns;
        self.wake();
        turns
    }

    /// Starts the statistics anew.
    pub fn reset_stats(&self) {
        lock(&self.queue).stats = Stats::default();
    }

    pub fn is_current(&self, generation: &Arc<Generation>) -> bool {
        Arc::ptr_eq(self.live.model().generation(), generation)
    }

    /// Lets the workers end as soon as no request waits.
    pub fn close(&self) {
        lock(&self.queue).is_closing = true;
        self.wake();
    }

    /// Returns whether the request in `slot` is answered.
    pub fn is_done(&self, slot: u16) -> bool {
        self.slots[usize::from(slot)].is_done()
    }

    /// Returns whether the request in `slot` is answered. If not, `waker` is woken when it is.
    pub fn poll_done(&self, slot: u16, waker: &Waker) -> bool {
        self.slots[usize::from(slot)].poll_done(waker)
    }

    /// Waits for the answer to the request in `slot`, until [`DEADLINE_WAIT_US`] after its
    /// `deadline`.
    pub fn wait(
        &self,
        slot: u16,
        deadline: Option<Duration>,
    ) -> Result<MutexGuard<'_, Request>, RequestError> {
        self.slots[usize::from(slot)].wait(|| deadline.map(|deadline| self.left(deadline)))
    }

    /// Returns for how long a caller still waits for a request with `deadline`.
    fn left(&self, deadline: Duration) -> Duration {
        deadline
            .saturating_add(Duration::from_micros(DEADLINE_WAIT_US))
            .saturating_sub(self.clock.now())
    }

    /// If the deadline of `request` has passed, and with it the caller's wait, ends the request
    /// without scores. Returns whether it did.
    pub fn expire(&self, request: &Waiting) -> bool {
        let has_expired = self.has_expired(request);
        if has_expired {
            self.exceed(request.slot);
        }
        has_expired
    }

    fn has_expired(&self, request: &Waiting) -> bool {
        request.deadline.is_some_and(|deadline| self.left(deadline).is_zero())
    }

    /// Ends the request in `slot` without scores, because its deadline has passed. It does not
    /// count as failed: the caller chose the deadline.
    pub fn exceed(&self, slot: u16) {
        lock(&self.queue).stats.expired += 1;
        self.finish(slot, Err(RequestError::DeadlineExceeded), |_| ());
    }

    /// Releases `slot` for its caller. If a worker is scoring the request, the worker frees the
    /// slot later; otherwise the slot is free now.
    pub fn release(&self, slot: u16) {
        let is_over =
            // A worker may take or finish the request between these calls. `abandon` comes last:
            // under the slot's lock it decides which side frees the slot.
            self.is_done(slot) || self.withdraw(slot) || self.slots[usize::from(slot)].abandon();
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
        // `Deque` has no removal that keeps the order, and the requests behind this one must keep
        // theirs.
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
            // A caller that leaves before its deadline, such as one that hung up, was not too late.
            queue.stats.expired += u64::from(self.has_expired(&request));
        }
        drop(queue);
        // The slot may stay free for long, and must not keep the task of its caller alive.
        self.slots[usize::from(slot)].abandon();
        true
    }

    /// Appends the request in `slot`, which a worker took at `now`, to `batch`. If its caller
    /// abandoned it, frees the slot and returns false.
    pub fn append_to(&self, slot: u16, batch: &mut Batch, now: Duration) -> bool {
        let is_wanted = self.slots[usize::from(slot)].append_to(batch, now);
        if !is_wanted {
            self.free(slot);
        }
        is_wanted
    }

    /// Ends the request in `slot` with `result`; `write` fills in its scores.
    pub fn finish(
        &self,
        slot: u16,
        result: Result<(), RequestError>,
        write: impl FnOnce(&mut Request),
    ) {
        if !self.slots[usize::from(slot)].finish(result, write) {
            self.free(slot);
        }
    }

    /// Ends the request in `slot` with `error`. Counts it as failed if the current generation
    /// caused the error.
    pub fn fail(&self, slot: u16, error: RequestError, is_current: bool) {
        let is_of_car = is_current && error.is_fault_of_car();
        let mut queue = lock(&self.queue);
        queue.stats.failed += u64::from(is_current);
        queue.stats.failed_by_car += u64::from(is_of_car);
        drop(queue);
        self.finish(slot, Err(error), |_| ());
    }

    /// Returns whether requests with deadlines from `earliest` to `latest` can be batched. The
    /// batch has the earliest deadline, so the other requests lose at most the batch delay of their
    /// time.
    fn can_batch(&self, earliest: Option<Duration>, latest: Option<Duration>) -> bool {
        match (earliest, latest) {
            (Some(earliest), Some(latest)) => latest - earliest <= self.batch_delay,
            // A batch has one deadline or none. In a mixed batch the reads would ignore the
            // deadline, because `None` is the smallest.
            (earliest, latest) => earliest == latest,
        }
    }

    /// Moves the next work to `state`: requests, or keys to prefetch. Also returns [`Next::Work`]
    /// if the worker has deferred rows to fetch or must follow a new model.
    pub fn next(&self, state: &mut WorkerState) -> Next {
        let WorkerState { worker, counted, keys, in_flight, .. } = state;
        let mut queue = lock(&self.queue);
        queue.turns += u64::from(worker.failure().is_none());
        self.count(&mut queue, worker, counted);
        if in_flight.is_prefetching && worker.deferred_len() == 0 {
            (in_flight.is_prefetching, queue.prefetching) = (false, 0);
        }

        queue.is_left = false;
        let wait = queue.take(self, self.batch_max, in_flight);
        if !in_flight.requests.is_empty() {
            let leaves_some = !queue.waiting.is_empty();
            drop(queue);
            // Perhaps only this worker was notified of the requests that it leaves.
            if leaves_some {
                self.notify();
            }
            return Next::Work;
        }
        // Requests come first, since their callers wait. Deferred rows and keys to prefetch end
        // with the pipeline.
        if queue.is_closing {
            return Next::Closed;
        }
        // A worker without requests must leave an old model too: a swap waits until every worker
        // has.
        if worker.deferred_len() > 0 || !worker.is_current() {
            return Next::Work;
        }
        if queue.prefetching == 0 && !queue.prefetch.is_empty() {
            queue.take_prefetch(keys);
            in_flight.is_prefetching = true;
            return Next::Work;
        }
        Next::Nothing { changes: queue.changes, wait }
    }

    /// Waits until the count of changes is no longer `changes`, at most for `wait`.
    pub fn wait_for_work(&self, changes: u64, wait: Option<Duration>) {
        let (queue, is_same) = (lock(&self.queue), |queue: &mut Queue| queue.changes == changes);
        // A panic poisons the lock but leaves the queue consistent, so the result is ignored.
        match wait {
            None => drop(self.work.wait_while(queue, is_same)),
            Some(wait) => drop(self.work.wait_timeout_while(queue, wait, is_same)),
        }
    }

    /// Moves the first requests to `state`: as many as are expected to take at most
    /// [`CALLER_SCORE_US_MAX`] on a caller's thread. Returns whether there are any. If a caller's
    /// thread has left requests, none are moved before a worker has called `next`: a caller's
    /// thread must return soon.
    pub fn take_short(&self, state: &mut WorkerState) -> bool {
        let mut queue = lock(&self.queue);
        let sample_ns = self.sample_ns.load(Ordering::Relaxed);
        // Before the first measurement no request counts as short.
        let samples_max = (CALLER_SCORE_US_MAX * 1000).checked_div(sample_ns).unwrap_or(0);
        if queue.is_left || queue.waiting.iter().any(|request| request.needs_thread) {
            return false;
        }
        queue.take(self, samples_max as usize, &mut state.in_flight);
        !state.in_flight.requests.is_empty()
    }

    /// Leaves the waiting requests, if there are any, to a worker and notifies it.
    pub fn leave(&self) {
        let mut queue = lock(&self.queue);
        // The worker that was notified before takes these requests too.
        if queue.waiting.is_empty() || queue.is_left {
            return;
        }
        queue.is_left = true;
        queue.changes += 1;
        drop(queue);
        self.work.notify_one();
    }

    /// Puts requests that a caller's thread cannot score back to the front of the queue.
    pub fn give_back(&self, in_flight: &mut InFlight) {
        let mut queue = lock(&self.queue);
        // `take` has counted these requests, and will count them again for the worker. A swap may
        // have reset the counts in between, and then there is nothing to take back.
        let stats = &mut queue.stats;
        stats.batches = stats.batches.saturating_sub(1);
        stats.requests = stats.requests.saturating_sub(in_flight.requests.len() as u64);
        while let Some(request) = in_flight.requests.pop() {
            queue.samples += request.samples as usize;
            let waiting = queue.waiting.push_front(Waiting { needs_thread: true, ..request });
            assert!(waiting.is_ok(), "the queue has room for every slot");
        }
    }

    /// Adds the counters of the worker of `state` to the statistics.
    pub fn count_work(&self, state: &mut WorkerState) {
        self.count(&mut lock(&self.queue), &state.worker, &mut state.counted);
    }

    fn count(&self, queue: &mut Queue, worker: &Worker, counted: &mut Counters) {
        let counters = worker.counters();
        if self.is_current(worker.model().generation()) {
            queue.stats.counters.add(&counters.since(counted));
        }
        *counted = counters;
    }

    /// Counts keys to prefetch for which a worker has no room.
    pub fn drop_prefetch(&self, keys: usize) {
        lock(&self.queue).stats.prefetch_dropped += keys as u64;
    }

    /// Ends the prefetch of a worker that panicked.
    pub fn end_prefetch(&self) {
        lock(&self.queue).prefetching = 0;
    }

    /// Records that `samples` samples whose rows were all in memory took `time`.
    pub fn note_time(&self, samples: usize, time: Duration) {
        let ns = time.as_nanos() as u64 / samples.max(1) as u64;
        // Load and store are not one step. A lost measurement only changes which thread scores a
        // request.
        let before = self.sample_ns.load(Ordering::Relaxed);
        // The average forgets a single delay quickly, such as a thread that lost its CPU.
        let mean = if before == 0 { ns } else { (3 * before + ns) / 4 };
        self.sample_ns.store(mean.max(1), Ordering::Relaxed);
    }
}

/// The next thing for a worker to do.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Next {
    Work,
    /// Nothing until there are more `changes`, or until the time `wait` is over.
    Nothing {
        changes: u64,
        wait: Option<Duration>,
    },
    Closed,
}

impl Queue {
    /// Moves the first requests that can be batched to `in_flight`, at most `samples_max` samples.
    /// If the first request still waits for others, moves none and returns the time left.
    fn take(
        &mut self,
        shared: &RequestQueue,
        samples_max: usize,
        in_flight: &mut InFlight,
    ) -> Option<Duration> {
        let first = *self.waiting.front()?;
        // One with a deadline waits for none, nor for those before it.
        let may_wait = self.samples < shared.batch_max
            && self.waiting.iter().all(|request| request.ready_at > Duration::ZERO);
        // A closing pipeline receives no further requests that could fill the batch.
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
            // A worker always takes the first request: a slot's batch has room for `batch_max`
            // samples only.
            if samples > samples_max.min(shared.batch_max) || !shared.can_batch(earliest, last) {
                break;
            }
            (in_flight.deadline, latest) = (earliest, last);
            self.waiting.pop_front();
            self.samples -= next.samples as usize;
            let taken = in_flight.requests.push(next).is_ok();
            assert!(taken, "a worker has room for the requests of every slot");
        }

        self.stats.batches += u64::from(!in_flight.requests.is_empty());
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
