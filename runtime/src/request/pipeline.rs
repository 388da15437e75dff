//! The pipeline: many callers, one model. A request takes one of a fixed number of slots and waits
//! in order of arrival. A worker on its own thread scores it, in one batch with others that wait,
//! and writes the scores into the slot. A caller may offer its own thread for short requests.
//! Without a free slot the caller receives [`RequestError::Busy`] immediately. Never grows and
//! never spins.

use crate::bundle::manifest::Generation;
use crate::clock::Clock;
use crate::model::Model;
use crate::request::check::check_batch;
use crate::request::queue::RequestQueue;
use crate::request::slot::Request;
use crate::request::worker::live_model::LiveModel;
use crate::request::worker::{Scores, TableCounts, Worker};
use crate::request::worker_state::WorkerState;
use crate::request::workers::{Threads, Workers};
use crate::schema::batch::Batch;
use std::io;
use std::sync::atomic::{Ordering, fence};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, MutexGuard};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::Duration;

pub use crate::request::error::RequestError;
pub use crate::request::queue::Stats;

/// Time between two checks whether a worker still uses a replaced model.
const LEAVE_POLL: Duration = Duration::from_micros(200);

/// A served model. A drop answers the waiting requests and then ends the threads.
///
/// ```no_run
/// use hatchback::clock::SystemClock;
/// use hatchback::flash::Flash;
/// use hatchback::model::Model;
/// use hatchback::model::budget::Budget;
/// use hatchback::request::pipeline::Pipeline;
/// use std::path::Path;
/// use std::sync::Arc;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let flash = Flash::open(&hatchback::io::disk::system(), Path::new("flash"))?;
/// let model = Arc::new(Model::from_flash(&flash, Budget::default())?);
/// let batch = model.batch();
/// let pipeline = Pipeline::new(model, Arc::new(SystemClock::default()))?;
///
/// let ticket = pipeline.submit(&batch, None)?;
/// let answer = ticket.wait()?;
/// println!("{:?}", answer.scores().values);
/// # Ok(())
/// # }
/// ```
pub struct Pipeline {
    workers: Arc<Workers>,
    live: Arc<LiveModel>,
    threads: Vec<JoinHandle<()>>,
}

impl Pipeline {
    /// Serves `model` with the slots and workers of its budget and takes all their memory.
    ///
    /// # Errors
    /// The system refused to start a thread, or the GPU has no memory for a worker.
    pub fn new(model: Arc<Model>, clock: Arc<dyn Clock>) -> io::Result<Self> {
        let mut pipeline = Self::without_threads(model, clock, Threads::Own)?;
        for number in 0..pipeline.model().budget().workers as usize {
            let (workers, name) = (Arc::clone(&pipeline.workers), format!("worker {number}"));
            let run = move || workers.run(number);
            // On an error `pipeline` is dropped, which ends the threads that have started.
            pipeline.threads.push(std::thread::Builder::new().name(name).spawn(run)?);
        }
        Ok(pipeline)
    }

    /// Serves `model` with one worker that has no thread: [`Pipeline::step`] does its work.
    ///
    /// # Errors
    /// The GPU has no memory for a worker.
    pub fn stepped(model: Arc<Model>, clock: Arc<dyn Clock>) -> io::Result<Self> {
        Self::without_threads(model, clock, Threads::Stepped)
    }

    fn without_threads(
        model: Arc<Model>,
        clock: Arc<dyn Clock>,
        threads: Threads,
    ) -> io::Result<Self> {
        let count = if threads == Threads::Own { model.budget().workers } else { 1 };
        let live = LiveModel::new(model);
        let queue = RequestQueue::new(Arc::clone(&live), clock);
        let state = |_| worker_of(&queue).map(WorkerState::new);
        let states = (0..count).map(state).collect::<io::Result<_>>()?;
        let workers = Arc::new(Workers::new(queue, threads, states));
        Ok(Self { workers, live, threads: Vec::new() })
    }

    /// Does one piece of work of a pipeline without threads. Returns false if there is none, if
    /// another caller is inside this function, or if threads do the work.
    pub fn step(&self) -> bool {
        self.workers.step_one()
    }

    /// Returns the model that is served now.
    pub fn model(&self) -> Arc<Model> {
        self.live.model()
    }

    /// Returns the model that is served now, and how it is replaced.
    pub(crate) fn live(&self) -> &LiveModel {
        &self.live
    }

    /// Waits until no worker uses the version of the model that `users` counts. Calls `yield_now`
    /// while it waits.
    pub(crate) fn wait_until_left(&self, users: &Arc<()>, yield_now: &dyn Fn()) {
        self.workers.queue.wake();
        while Arc::strong_count(users) > 1 {
            // A pipeline without threads leaves the old model only if somebody takes its steps.
            if !self.step() {
                std::thread::sleep(LEAVE_POLL);
                yield_now();
            }
        }
        // Pairs with the workers' drops of `users`: their earlier writes are visible after this.
        fence(Ordering::Acquire);
    }

    /// Starts the statistics anew.
    pub(crate) fn reset_stats(&self) {
        self.workers.queue.reset_stats();
    }

    /// Copies `batch` into a free slot and queues it. For `deadline` see [`Worker::score`].
    ///
    /// # Errors
    /// [`RequestError::Busy`] if all slots are taken, [`RequestError::Score`] if the batch does not
    /// fit the model.
    pub fn submit(
        &self,
        batch: &Batch,
        deadline: Option<Duration>,
    ) -> Result<Ticket, RequestError> {
        self.submit_with(deadline, |model, slot| {
            check_batch(model, batch)?;
            let fits = slot.append(batch);
            assert!(fits, "the batch was checked");
            Ok(())
        })
    }

    /// Submits a request that `fill` writes directly into a slot's empty batch, which has room for
    /// `batch_max` samples. Otherwise as [`Pipeline::submit`].
    ///
    /// # Errors
    /// Those of [`Pipeline::submit`] and of `fill`, after which nothing is submitted.
    pub fn submit_with<E: From<RequestError>>(
        &self,
        deadline: Option<Duration>,
        fill: impl FnOnce(&Model, &mut Batch) -> Result<(), E>,
    ) -> Result<Ticket, E> {
        let queued = self.queue_with(deadline, fill)?;
        queued.0.workers.queue.notify();
        Ok(queued.0)
    }

    /// Queues a request as [`Pipeline::submit_with`] does, but does not notify a worker. The caller
    /// queues its other requests too, and then calls [`Queued::start`] of each.
    ///
    /// # Errors
    /// Those of [`Pipeline::submit_with`].
    pub fn queue_with<E: From<RequestError>>(
        &self,
        deadline: Option<Duration>,
        fill: impl FnOnce(&Model, &mut Batch) -> Result<(), E>,
    ) -> Result<Queued, E> {
        // A swap may replace the model before the request is scored. A batch of the old model then
        // has the new one's shape and values, or is answered with an error.
        let slot = self.workers.queue.submit(deadline, fill)?;
        Ok(Queued(Ticket { workers: Arc::clone(&self.workers), slot, deadline }))
    }

    /// Queues keys of feature `feature` that later requests will look up. Workers fetch their rows
    /// into the cache while no request waits. Keys for which the prefetch queue has no room are
    /// dropped and counted. Returns how many keys were queued for all cached tables of the feature.
    pub fn prefetch(&self, feature: usize, keys: &[u64]) -> usize {
        let model = self.live.model();
        let tables = model.schema().lookups_of(feature).map(|lookup| lookup.table);
        let cached = tables.filter(|&table| model.is_cached(table));
        cached.map(|table| self.workers.queue.prefetch(table, keys)).min().unwrap_or(0)
    }

    /// Returns the counts of each table's lookups since the model was loaded.
    pub fn table_counts(&self) -> Vec<TableCounts> {
        self.live.table_counts()
    }

    /// Wakes the workers. Returns how often workers that can score have looked for work. A later
    /// call returns another number, unless all of them hang or their GPU failed.
    pub fn turns(&self) -> u64 {
        self.workers.queue.turns()
    }

    /// Returns the statistics since the current model was opened or swapped in.
    pub fn stats(&self) -> Stats {
        self.workers.queue.stats()
    }
}

/// Returns a worker of the pipeline with `queue`, with all its memory.
fn worker_of(queue: &RequestQueue) -> io::Result<Worker> {
    let worker = queue.new_worker();
    worker.failure().map_or(Ok(()), |e| Err(io::Error::other(Arc::clone(e))))?;
    Ok(worker)
}

impl Drop for Pipeline {
    fn drop(&mut self) {
        self.workers.queue.close();
        // Without threads nobody else would answer the requests that wait.
        while self.step() {}
        for thread in self.threads.drain(..) {
            // The requests of a worker that panicked were answered with an error.
            let _ = thread.join();
        }
    }
}

/// Starts pipelines on a thread of its own. That thread has the scheduling class, priority and CPUs
/// of the thread that made it, and worker threads inherit them. A swap runs on the low-priority
/// thread of an update, whose scheduling the workers must not inherit.
pub(crate) struct PipelineStarter(Sender<Order>);

struct Order {
    model: Arc<Model>,
    clock: Arc<dyn Clock>,
    reply: Sender<io::Result<Pipeline>>,
}

impl PipelineStarter {
    /// Starts the thread. It ends when the starter is dropped.
    pub(crate) fn new() -> Self {
        let (orders, received) = channel::<Order>();
        let run = move || {
            received.iter().for_each(|order| {
                // The caller of `start` waits for the reply, so the receiver exists.
                let _ = order.reply.send(Pipeline::new(order.model, order.clock));
            });
        };
        // If the system refuses to start a thread, `start` returns the error.
        let _ = std::thread::Builder::new().name("pipelines".to_owned()).spawn(run);
        Self(orders)
    }

    /// Serves `model`, as [`Pipeline::new`] does.
    pub(crate) fn start(&self, model: Arc<Model>, clock: Arc<dyn Clock>) -> io::Result<Pipeline> {
        let (reply, pipeline) = channel();
        let gone = || io::Error::other("the thread that starts pipelines is not running");
        self.0.send(Order { model, clock, reply }).map_err(|_| gone())?;
        pipeline.recv().map_err(|_| gone())?
    }
}

/// A queued request of which no worker was notified yet. A drop frees its slot.
pub struct Queued(Ticket);

impl Queued {
    /// Scores the waiting requests on this thread, if all their rows are in memory and they are
    /// expected to take at most `CALLER_SCORE_US_MAX` of `limits`. Otherwise notifies a worker.
    /// Never reads flash and never waits for a device or another thread.
    pub fn start(self) -> Ticket {
        self.0.workers.start();
        self.0
    }
}

/// A submitted request. A drop frees its slot, immediately or when its worker has finished.
pub struct Ticket {
    workers: Arc<Workers>,
    slot: u16,
    deadline: Option<Duration>,
}

/// The scores of a request, read in its slot.
pub struct Answer<'a> {
    request: MutexGuard<'a, Request>,
}

impl Answer<'_> {
    /// Returns the generation that scored the request.
    pub fn generation(&self) -> &Arc<Generation> {
        &self.request.generation
    }

    /// Returns the time at which a worker took the request, by the pipeline's clock.
    pub fn taken_at(&self) -> Duration {
        self.request.taken_at
    }

    /// Returns the scores with their statuses.
    pub fn scores(&self) -> Scores<'_> {
        let Request { batch, scores, statuses, outputs, .. } = &*self.request;
        Scores { values: &scores[..batch.size() * outputs], statuses: &statuses[..batch.size()] }
    }
}

impl Ticket {
    /// Returns whether [`Ticket::wait`] would return without waiting.
    pub fn is_done(&self) -> bool {
        self.workers.queue.is_done(self.slot)
    }

    /// Returns whether [`Ticket::wait`] would return without waiting. If not, `waker` is woken when
    /// the request is done. A caller that must not block its thread passes a waker here. It calls
    /// [`Ticket::wait`] after the wake, or when the deadline has passed.
    pub fn poll_done(&self, waker: &Waker) -> bool {
        self.workers.queue.poll_done(self.slot, waker)
    }

    /// Waits for the scores. With a deadline the wait ends at most `DEADLINE_GRACE_US` of `limits`
    /// after it, even if the workers or the device are stuck.
    ///
    /// # Errors
    /// [`RequestError::DeadlineExceeded`] if there are no scores in time. [`RequestError::Score`]
    /// if the worker could not score the batch. [`RequestError::NotFinite`] if a score of the
    /// request is not a number. [`RequestError::Replaced`] if a swap came before the worker.
    /// [`RequestError::Panicked`] if the worker panicked.
    pub fn wait(&self) -> Result<Answer<'_>, RequestError> {
        self.workers.queue.wait(self.slot, self.deadline).map(|request| Answer { request })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.workers.queue.release(self.slot);
    }
}
