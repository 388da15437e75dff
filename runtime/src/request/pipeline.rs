//! The pipeline: many callers, one model. A request takes one of a fixed number of slots, waits in
//! the order of arrival, is scored by a worker on a thread of its own, together with others that
//! wait, and its scores are read in its slot. Never waits for a slot, never grows, never spins:
//! without a free slot the answer is `Busy`.

use crate::bundle::manifest::Generation;
use crate::model::Model;
use crate::request::queue::{Request, RequestQueue, work};
pub use crate::request::queue::{RequestError, Stats};
use crate::request::worker::{Clock, Scores, Worker};
use crate::schema::batch::Batch;
use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

/// A model being served. Dropping it answers what waits, then ends the threads.
pub struct Pipeline {
    lane: Arc<RequestQueue>,
    model: Arc<Model>,
    threads: Vec<JoinHandle<()>>,
}

impl Pipeline {
    /// Serves `model` with the slots and workers of its budget, all memory taken now.
    ///
    /// # Errors
    /// The system gives no thread, or the GPU no memory.
    pub fn new(model: Arc<Model>, clock: Arc<dyn Clock>) -> io::Result<Self> {
        let lane = Arc::new(RequestQueue::new(&model, Arc::clone(&clock)));
        let mut pipeline = Self { lane, model, threads: Vec::new() };
        for number in 0..pipeline.model.budget().workers {
            let worker = Worker::new(Arc::clone(&pipeline.model), Arc::clone(&clock));
            if let Some(e) = worker.broken() {
                return Err(io::Error::other(Arc::clone(e)));
            }
            let (lane, name) = (Arc::clone(&pipeline.lane), format!("worker {number}"));
            let work = move || work(&lane, worker);
            pipeline.threads.push(std::thread::Builder::new().name(name).spawn(work)?);
        }
        Ok(pipeline)
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Copies `batch` into a free slot and queues it. `deadline` is as in [`Worker::score`].
    ///
    /// # Errors
    /// All slots are taken, or the batch does not fit the model.
    pub fn submit(
        &self,
        batch: &Batch,
        deadline: Option<Duration>,
    ) -> Result<Ticket, RequestError> {
        self.model.check(batch)?;
        self.lane.submit(batch, deadline).map(|slot| Ticket { lane: Arc::clone(&self.lane), slot })
    }

    /// Names keys of feature `feature` that requests will look up soon. They are fetched into the
    /// cache while no request waits; those that there is no room for are dropped and counted.
    /// Returns how many were taken.
    pub fn prefetch(&self, feature: usize, keys: &[u64]) -> usize {
        let table = self.model.schema().features.get(feature).map(|f| f.table);
        let Some(table) = table.filter(|&t| self.model.is_cached(t)) else { return 0 };
        self.lane.prefetch(table, keys)
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        self.lane.stats()
    }
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.lane.close();
        for thread in self.threads.drain(..) {
            // What a thread had in hand when it panicked was answered.
            let _ = thread.join();
        }
    }
}

/// Makes pipelines on a thread of its own, which has the scheduling class, priority and CPUs of who
/// made this. Workers inherit those, and not what is lowest: that of an update's thread, from which
/// a swap comes.
pub(crate) struct Maker(Sender<Order>);

struct Order {
    model: Arc<Model>,
    clock: Arc<dyn Clock>,
    made: Sender<io::Result<Pipeline>>,
}

impl Maker {
    /// Starts the thread; it ends with this.
    pub(crate) fn new() -> Self {
        let (orders, taken) = channel::<Order>();
        let make = move || {
            taken.iter().for_each(|order| {
                // Who ordered waits for it.
                let _ = order.made.send(Pipeline::new(order.model, order.clock));
            });
        };
        // Without a thread nobody takes orders, and `make` says so.
        let _ = std::thread::Builder::new().name("pipelines".to_owned()).spawn(make);
        Self(orders)
    }

    /// As [`Pipeline::new`].
    pub(crate) fn make(&self, model: Arc<Model>, clock: Arc<dyn Clock>) -> io::Result<Pipeline> {
        let (made, pipeline) = channel();
        let gone = || io::Error::other("the thread that makes pipelines is gone");
        self.0.send(Order { model, clock, made }).map_err(|_| gone())?;
        pipeline.recv().map_err(|_| gone())?
    }
}

/// A request on its way. Dropping it frees its slot, at once or when its worker is done with it.
pub struct Ticket {
    lane: Arc<RequestQueue>,
    slot: u16,
}

/// The scores of a request, read in its slot.
pub struct Answer<'a> {
    request: MutexGuard<'a, Request>,
}

impl Answer<'_> {
    /// The scores with their statuses.
    pub fn scores(&self) -> Scores<'_> {
        let Request { batch, scores, statuses, outputs, .. } = &*self.request;
        Scores { values: &scores[..batch.size() * outputs], statuses: &statuses[..batch.size()] }
    }
}

impl Ticket {
    /// The generation that answers.
    pub fn generation(&self) -> &Generation {
        &self.lane.generation
    }

    /// Whether `wait` returns at once.
    pub fn is_done(&self) -> bool {
        self.lane.is_done(self.slot)
    }

    /// Waits for the scores.
    ///
    /// # Errors
    /// There are none.
    pub fn wait(&self) -> Result<Answer<'_>, RequestError> {
        self.lane.wait(self.slot).map(|request| Answer { request })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.lane.leave(self.slot);
    }
}
