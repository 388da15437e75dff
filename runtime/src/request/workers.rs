//! The workers of a pipeline: their current work, the loop of their threads, and short requests on
//! the thread of a caller. A worker takes the first requests that can be batched, scores them as
//! one batch and writes each result into its slot. Without a request it fetches deferred and
//! prefetched rows, a few pages at a time. A caller's thread never reads flash and never waits.

use crate::locks::lock;
use crate::request::error::RequestError;
use crate::request::queue::{Next, RequestQueue};
use crate::request::worker::{BatchScores, ScoreError};
use crate::request::worker_state::{InFlight, WorkerState};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

/// Deferred pages that a worker reads before it looks for requests again.
const PAGES_PER_STEP: usize = 8;

/// The threads that run the workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// One thread for each worker, and callers that offer their threads.
    Own,
    /// One caller, step by step: a simulation.
    Stepped,
}

/// A worker; `None` after a panic, until the next work.
type Seat = Option<WorkerState>;

/// The queue of a pipeline and the workers that empty it.
pub struct Workers {
    pub queue: RequestQueue,
    threads: Threads,
    /// A worker is locked by the thread that works with it, and free while its thread sleeps.
    seats: Box<[Mutex<Seat>]>,
}

impl Workers {
    pub fn new(queue: RequestQueue, threads: Threads, states: Vec<WorkerState>) -> Self {
        let seats = states.into_iter().map(|state| Mutex::new(Some(state))).collect();
        Self { queue, threads, seats }
    }

    /// Runs the thread of worker `number` until the pipeline closes.
    pub fn run(&self, number: usize) {
        loop {
            let seat = &self.seats[number];
            // The lock ends with this statement. While the thread sleeps, a caller's thread may use
            // the worker.
            let next = self.step(&mut lock(seat));
            match next {
                Next::Work => {}
                Next::Nothing { changes, wait } => self.queue.wait_for_work(changes, wait),
                Next::Closed => return,
            }
        }
    }

    /// Does one piece of work in [`Threads::Stepped`]. Returns false if there is none, if another
    /// caller is inside this function, or if threads do the work.
    pub fn step_one(&self) -> bool {
        let seat = self.seats.first().filter(|_| self.threads == Threads::Stepped);
        // A simulation may call this function again from inside a step. The thread would wait for
        // itself.
        let seat = seat.and_then(|seat| seat.try_lock().ok());
        seat.is_some_and(|mut seat| self.step(&mut seat) == Next::Work)
    }

    /// Does one piece of work. If the worker panics, its requests in flight are answered with an
    /// error and a new worker takes its place.
    fn step(&self, seat: &mut Seat) -> Next {
        self.guard(seat, |state| {
            let next = self.queue.next(state);
            if next == Next::Work {
                self.work(state);
            }
            next
        })
        // The panic has used up a notification, and other requests may still wait.
        .unwrap_or(Next::Work)
    }

    /// Scores the first waiting requests on the calling thread. They must be short, their rows must
    /// all be in memory, and a worker must be free. Other requests are left to a worker.
    pub fn start(&self) {
        // A locked worker may read flash for milliseconds, and this thread has other callers.
        let free = || self.seats.iter().find_map(|seat| seat.try_lock().ok());
        let seat = if self.threads == Threads::Own { free() } else { None };
        if let Some(mut seat) = seat {
            self.guard(&mut seat, |state| {
                if self.queue.take_short(state) && !self.score_in_memory(state) {
                    self.queue.give_back(&mut state.in_flight);
                }
            });
        }
        self.queue.leave();
    }

    /// Returns the result of `work`. If `work` panicked, answers its requests with an error, drops
    /// the worker, and returns `None`.
    fn guard<T>(&self, seat: &mut Seat, work: impl FnOnce(&mut WorkerState) -> T) -> Option<T> {
        let state = seat.get_or_insert_with(|| WorkerState::new(self.queue.new_worker()));
        // The assertion holds: after a panic the worker's state is dropped, and only the record of
        // its requests is still read.
        let done = catch_unwind(AssertUnwindSafe(|| work(state)));
        if done.is_err() {
            let InFlight { requests, answered, is_prefetching, .. } = &state.in_flight;
            let lost = &requests[*answered..];
            log::error!(
                "a worker panicked, {} requests in flight fail; a new worker takes its place",
                lost.len()
            );
            lost.iter().for_each(|r| self.queue.fail(r.slot, RequestError::Panicked, true));
            if *is_prefetching {
                self.queue.end_prefetch();
            }
            *seat = None;
        }
        done.ok()
    }

    /// Does the work that the queue handed over: scores the requests, enqueues the keys to
    /// prefetch, and fetches some deferred rows.
    fn work(&self, state: &mut WorkerState) {
        // `score` follows the model too, but not without a request.
        state.worker.follow();
        self.score(state);

        // `next` gives keys only to a worker without deferred rows, so there is room.
        let WorkerState { worker, keys, .. } = state;
        let dropped = keys.iter().filter(|&&row| !worker.enqueue_prefetch(row)).count();
        if dropped > 0 {
            self.queue.drop_prefetch(dropped);
        }
        keys.clear();

        // Some deferred rows are fetched after each batch, so that this happens under steady load
        // too.
        worker.fetch_deferred(PAGES_PER_STEP);
    }

    /// Scores the requests in flight as one batch and answers each.
    fn score(&self, state: &mut WorkerState) {
        if !self.gather(state) {
            return;
        }
        let WorkerState { worker, batch, in_flight, .. } = state;
        let (start, misses) = (self.queue.now(), worker.counters().misses);
        let scored = worker.score_requests(batch, in_flight.deadline);
        let scored = match scored {
            Ok(all) => Ok(all),
            Err(e) => Err((e, self.queue.is_current(worker.model().generation()))),
        };
        let took = self.queue.now().saturating_sub(start);
        self.answer(in_flight, scored);
        if worker.counters().misses == misses {
            self.queue.note_time(batch.size(), took);
        }
    }

    /// Scores and answers the requests in flight if every row is in memory. Otherwise returns
    /// false.
    fn score_in_memory(&self, state: &mut WorkerState) -> bool {
        if !self.gather(state) {
            // Every caller has left or is too late, so no request is left to give back.
            return true;
        }
        let WorkerState { worker, batch, in_flight, .. } = state;
        let start = self.queue.now();
        let Some(scored) = worker.score_in_memory(batch) else { return false };
        let took = self.queue.now().saturating_sub(start);
        // The worker is on the current generation.
        self.answer(in_flight, scored.map_err(|e| (e, true)));
        self.queue.note_time(batch.size(), took);
        self.queue.count_work(state);
        true
    }

    /// Collects the requests in flight whose callers still wait into one batch. Returns whether
    /// there are any.
    fn gather(&self, state: &mut WorkerState) -> bool {
        let WorkerState { batch, in_flight, .. } = state;
        if in_flight.requests.is_empty() {
            return false;
        }
        batch.clear();
        let (queue, now) = (&self.queue, self.queue.now());
        in_flight.requests.retain(|r| !queue.expire(r) && queue.append_to(r.slot, batch, now));
        !in_flight.requests.is_empty()
    }

    /// Answers the requests in flight with `scored`. The flag beside an error says whether the
    /// current generation caused it.
    fn answer(
        &self,
        in_flight: &mut InFlight,
        scored: Result<BatchScores<'_>, (ScoreError, bool)>,
    ) {
        let (queue, mut start) = (&self.queue, 0);
        let scored = scored.map_err(|(e, is_current)| match e {
            ScoreError::DeadlineExceeded => None,
            e => Some((RequestError::from(e), is_current)),
        });
        for r in &in_flight.requests {
            match &scored {
                Ok(all) => {
                    let samples = start..start + r.samples as usize;
                    start = samples.end;
                    match all.request(samples.clone()) {
                        _ if r.version < all.filled_since() => {
                            queue.fail(r.slot, RequestError::Replaced, false);
                        }
                        Ok(scores) => queue.finish(r.slot, Ok(()), |request| {
                            request.generation = Arc::clone(all.generation());
                            request.scores[..scores.values.len()].copy_from_slice(scores.values);
                            request.statuses[..scores.statuses.len()]
                                .copy_from_slice(scores.statuses);
                        }),
                        Err(e) => {
                            let is_current = queue.is_current(all.generation());
                            queue.fail(r.slot, e.into(), is_current && !all.has_damage(samples));
                        }
                    }
                }
                Err(None) => queue.exceed(r.slot),
                Err(Some((e, is_current))) => queue.fail(r.slot, e.clone(), *is_current),
            }
            in_flight.answered += 1;
        }
        in_flight.requests.clear();
        in_flight.answered = 0;
    }
}
