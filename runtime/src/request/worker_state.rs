//! A worker with what it has in hand: its requests in flight, their batch, and keys to prefetch.
//! Plain data, which the queue fills and the workers empty.

use crate::limits::SLOTS_MAX;
use crate::request::worker::{Counters, Worker};
use crate::schema::batch::Batch;
use hatchback_kernels::cache::address::RowKey;
use std::time::Duration;

/// Keys to prefetch that a worker takes in one step.
pub const KEYS_PER_STEP: usize = 32;

/// A request in the queue.
#[derive(Clone, Copy)]
pub struct Waiting {
    pub slot: u16,
    pub samples: u32,
    pub deadline: Option<Duration>,
    /// Until this time it waits for other requests to be batched with.
    pub ready_at: Duration,
    /// Whether the threads of the workers score it: a caller found that it reads flash.
    pub needs_thread: bool,
}

/// The requests that one worker serves. Outlives a panic of the worker.
#[derive(Default)]
pub struct InFlight {
    pub requests: heapless::Vec<Waiting, SLOTS_MAX>,
    /// How many of them are answered.
    pub answered: usize,
    pub deadline: Option<Duration>,
    /// Whether this worker prefetches the queue's `prefetching` keys.
    pub is_prefetching: bool,
}

/// A worker and its memory between two steps.
pub struct WorkerState {
    pub worker: Worker,
    pub batch: Batch,
    /// The counters that the queue's statistics have already.
    pub counted: Counters,
    pub keys: heapless::Vec<RowKey, KEYS_PER_STEP>,
    pub in_flight: InFlight,
}

impl WorkerState {
    /// Returns `worker` without requests and without keys to prefetch.
    pub fn new(worker: Worker) -> Self {
        let (batch, counted) = (worker.model().batch(), Counters::default());
        let (keys, in_flight) = (heapless::Vec::new(), InFlight::default());
        Self { worker, batch, counted, keys, in_flight }
    }
}
