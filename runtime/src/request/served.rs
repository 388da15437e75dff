//! A served model: the handle that callers keep. A swap may exchange the pipeline behind it, and an
//! unload takes the pipeline away. A handle that outlives its model refuses requests.

use crate::flash::{Flash, FlashError};
use crate::io::disk::Disk;
use crate::locks::lock;
use crate::model::Model;
use crate::request::open::NextNetwork;
use crate::request::pipeline::{Pipeline, Queued, RequestError, Stats, Ticket};
use crate::request::worker::TableCounts;
use crate::schema::batch::Batch;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

/// Copies of an ONNX file while its plan is built: the file, what is read of it, and the weights of
/// the CPU's engine, whose scores the plan must give. The builder of TensorRT takes more.
pub(crate) const NETWORK_COPIES: u64 = 3;

/// A model that a [`Serving`](crate::request::serving::Serving) serves under a name. Its methods
/// return `None` or [`RequestError::NotServed`] after the model was unloaded.
pub struct Served {
    name: String,
    disk: Arc<dyn Disk>,
    directory: PathBuf,
    /// Why the network runs without TensorRT; empty if it does not, or need not.
    plan_note: Mutex<String>,
    /// The network of the next release, until its plan is built.
    next: Mutex<Option<(NextNetwork, PlanMemory)>>,
    /// The bytes of all networks whose plans are awaited.
    plan_bytes: Arc<AtomicU64>,
    /// Locked for reading while a request is submitted, and for writing while it is exchanged.
    /// `None` after an unload, so that a handle holds no memory of the model.
    pipeline: RwLock<Option<Pipeline>>,
}

/// The memory of a network whose plan is awaited, in the sum of its model until it is dropped.
pub(crate) struct PlanMemory {
    bytes: u64,
    sum: Arc<AtomicU64>,
}

impl Drop for PlanMemory {
    fn drop(&mut self) {
        self.sum.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Served {
    /// Makes the handle of `pipeline`, whose model was loaded from `flash`.
    pub(crate) fn new(name: &str, flash: &Flash, pipeline: Pipeline) -> Self {
        Self {
            name: name.to_owned(),
            disk: Arc::clone(flash.disk()),
            directory: flash.directory().to_owned(),
            plan_note: Mutex::default(),
            next: Mutex::default(),
            plan_bytes: Arc::default(),
            pipeline: RwLock::new(Some(pipeline)),
        }
    }

    /// Returns the result of `read` for the pipeline; `None` if the model was unloaded.
    pub(crate) fn with<T>(&self, read: impl FnOnce(&Pipeline) -> T) -> Option<T> {
        self.pipeline.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(read)
    }

    /// Puts `next` in the place of the pipeline, which it returns. The caller drops that one: its
    /// drop waits for requests, and no lock may be held meanwhile.
    pub(crate) fn exchange(&self, next: Option<Pipeline>) -> Option<Pipeline> {
        std::mem::replace(&mut *self.pipeline.write().unwrap_or_else(PoisonError::into_inner), next)
    }

    /// Returns the name that the model is served under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the model that is served now.
    pub fn model(&self) -> Option<Arc<Model>> {
        self.with(Pipeline::model)
    }

    /// Does one piece of work, as [`Pipeline::step`] does. Returns false if there is none.
    pub fn step(&self) -> bool {
        self.with(Pipeline::step).unwrap_or(false)
    }

    /// Submits a request, as [`Pipeline::submit`] does.
    ///
    /// # Errors
    /// [`RequestError::NotServed`] if the model was unloaded, and the errors of
    /// [`Pipeline::submit`].
    pub fn submit(
        &self,
        batch: &Batch,
        deadline: Option<Duration>,
    ) -> Result<Ticket, RequestError> {
        self.with(|p| p.submit(batch, deadline)).unwrap_or(Err(RequestError::NotServed))
    }

    /// Submits a request, as [`Pipeline::submit_with`] does.
    ///
    /// # Errors
    /// [`RequestError::NotServed`] if the model was unloaded, and the errors of
    /// [`Pipeline::submit_with`].
    pub fn submit_with<E: From<RequestError>>(
        &self,
        deadline: Option<Duration>,
        fill: impl FnOnce(&Model, &mut Batch) -> Result<(), E>,
    ) -> Result<Ticket, E> {
        let submitted = self.with(|p| p.submit_with(deadline, fill));
        submitted.unwrap_or_else(|| Err(RequestError::NotServed.into()))
    }

    /// Queues a request, as [`Pipeline::queue_with`] does.
    ///
    /// # Errors
    /// Those of [`Served::submit_with`].
    pub fn queue_with<E: From<RequestError>>(
        &self,
        deadline: Option<Duration>,
        fill: impl FnOnce(&Model, &mut Batch) -> Result<(), E>,
    ) -> Result<Queued, E> {
        let queued = self.with(|p| p.queue_with(deadline, fill));
        queued.unwrap_or_else(|| Err(RequestError::NotServed.into()))
    }

    /// Queues keys to prefetch, as [`Pipeline::prefetch`] does. Returns how many keys were queued.
    pub fn prefetch(&self, feature: usize, keys: &[u64]) -> usize {
        self.with(|p| p.prefetch(feature, keys)).unwrap_or(0)
    }

    /// Wakes the workers and returns their turns, as [`Pipeline::turns`] does.
    pub fn turns(&self) -> Option<u64> {
        self.with(Pipeline::turns)
    }

    /// Returns the statistics since the model was loaded or swapped.
    pub fn stats(&self) -> Option<Stats> {
        self.with(Pipeline::stats)
    }

    /// Returns the counts of each table's lookups since the model was loaded.
    pub fn table_counts(&self) -> Vec<TableCounts> {
        self.with(Pipeline::table_counts).unwrap_or_default()
    }

    /// Opens the flash directory that the model was loaded from.
    pub(crate) fn flash(&self) -> Result<Flash, FlashError> {
        Flash::open(&self.disk, &self.directory)
    }

    /// Offers the network of the next release: its plan is built while this one serves.
    pub fn offer_next(&self, network: NextNetwork) {
        let memory = self.plan_memory(&network.onnx);
        *lock(&self.next) = Some((network, memory));
    }

    /// Counts the memory of the network `onnx` until the result is dropped.
    pub(crate) fn plan_memory(&self, onnx: &[u8]) -> PlanMemory {
        let bytes = NETWORK_COPIES * onnx.len() as u64;
        self.plan_bytes.fetch_add(bytes, Ordering::Relaxed);
        PlanMemory { bytes, sum: Arc::clone(&self.plan_bytes) }
    }

    /// Returns the bytes of all networks whose plans are awaited.
    pub(crate) fn plan_bytes(&self) -> u64 {
        self.plan_bytes.load(Ordering::Relaxed)
    }

    /// Takes the network that was offered last.
    pub(crate) fn take_next(&self) -> Option<(NextNetwork, PlanMemory)> {
        lock(&self.next).take()
    }

    /// Records why the network runs without TensorRT.
    pub(crate) fn note_plan(&self, note: String) {
        *lock(&self.plan_note) = note;
    }

    /// Returns what runs the dense network, in words, with the state of its plan.
    pub fn dense_runs_on(&self) -> Option<String> {
        let runs_on = self.model()?.dense_runs_on();
        let note = lock(&self.plan_note);
        Some(if note.is_empty() { runs_on } else { format!("{runs_on} ({note})") })
    }
}
