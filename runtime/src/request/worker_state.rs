//! A worker with its current work: its requests in flight, their batch, and keys to prefetch. Plain
//! data, which the queue fills and the workers empty.

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
    /// The version of the live model, or an earlier one, that filled the request.
    pub version: u64,
    /// Until this time the request waits for others that can be batched with it.
    pub ready_at: Duration,
    /// Whether only a worker's thread may score it, because a caller's thread found a missing row.
    pub needs_thread: bool,
}

/// The requests that one worker serves. They can be answered even after the worker panicked.
#[derive(Default)]
pub struct InFlight {
    pub requests: heapless::Vec<Waiting, SLOTS_MAX>,
    /// Number of these requests that are answered.
    pub answered: usize,
    pub deadline: Option<Duration>,
    /// Whether this worker prefetches the queue's `prefetching` keys.
    pub is_prefetching: bool,
}

/// A worker and its memory between two steps.
pub struct WorkerState {
    pub worker: Worker,
    pub batch: Batch,
    /// The worker's counters when they were last added to the queue's statistics.
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
