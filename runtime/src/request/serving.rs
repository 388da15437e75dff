//! Several models in one process, each with a name and a handle, within one memory budget. A swap
//! opens the next generation with the caches of the served one, and exchanges the two between two
//! batches. A change of one model never affects callers of another.

use crate::clock::Clock;
use crate::flash::Flash;
use crate::io::reader::DeviceDepth;
use crate::locks::lock;
use crate::maintenance::share::Urgency;
use crate::model::budget::Budget;
use crate::model::memory_plan::{MemoryPlan, Part};
use crate::model::{Model, OpenError};
use crate::request::open::OpenOptions;
use crate::request::pipeline::{Pipeline, PipelineStarter};
use crate::request::successor::{self, can_follow};
use crate::request::transition;
use crate::schema::change::{ChangeError, check_change};
use hatchback_kernels::cuda::Device;
use hatchback_kernels::gpu::GpuDense;
use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

pub use crate::request::served::Served;
pub use crate::request::transition::Swapped;

/// Why a model is not loaded, swapped or unloaded. The served models are unchanged.
#[derive(thiserror::Error)]
#[allow(missing_docs)]
pub enum ServingError {
    /// The model cannot be opened.
    #[error("model `{name}`: {source}")]
    Open { name: String, source: OpenError },
    /// The model does not fit beside the served ones, which take `taken` of `max` bytes. In a swap
    /// the old generation counts too.
    #[error("model `{name}`: memory_bytes_max = {max}, and {taken} bytes are taken: {problem}")]
    Memory { name: String, max: u64, taken: u64, problem: String },
    /// The device allows fewer reads in flight than there would be workers.
    #[error("model `{name}`: reads_max = {max}: {workers} workers of all models need a read each")]
    Reads { name: String, max: usize, workers: usize },
    /// A model of that name is served already.
    #[error("model `{0}` is served already")]
    Loaded(String),
    /// No model of that name is served.
    #[error("no model `{0}` is served")]
    NotLoaded(String),
    /// Requests to the live generation would not fit the new one.
    #[error("model `{name}`: the new generation: {problem}; load it under another name")]
    Shape { name: String, field: &'static str, problem: String },
    /// The system refused to start a thread.
    #[error("threads: {0}")]
    Threads(#[from] io::Error),
}

debug_as_display!(ServingError);

/// The line of what was measured when the GPU was opened.
const DRIVER_PART: &str = "driver of the GPU, its kernels and NVIDIA's libraries";

/// The models of one process.
pub struct Serving {
    /// Locked for writing while the list changes.
    models: RwLock<Vec<Arc<Served>>>,
    /// Held during a load, swap or unload, so that there is one at a time.
    change: Mutex<()>,
    memory_bytes_max: u64,
    /// Memory of the process beside the models, such as its callers' connections.
    beside: MemoryPlan,
    /// Models that were unloaded and not loaded again. An update does not load them.
    unloaded: Mutex<BTreeSet<String>>,
    read_depth: Arc<DeviceDepth>,
    lookups: Device,
    dense: GpuDense,
    clock: Arc<dyn Clock>,
    /// Starts the threads of a pipeline; `None` if the caller calls [`Served::step`].
    starter: Option<PipelineStarter>,
}

impl Serving {
    /// Returns a server without models. All models together take at most `memory_bytes_max` bytes
    /// and have at most `reads_max` page reads in flight. The threads of every model inherit the
    /// scheduling of the thread that calls this.
    pub fn new(memory_bytes_max: u64, reads_max: u32, clock: Arc<dyn Clock>) -> Self {
        Self {
            models: RwLock::default(),
            change: Mutex::default(),
            memory_bytes_max,
            beside: MemoryPlan::default(),
            unloaded: Mutex::default(),
            read_depth: DeviceDepth::new(reads_max as usize),
            lookups: Device::Cpu,
            dense: GpuDense::default(),
            clock,
            starter: Some(PipelineStarter::new()),
        }
    }

    /// Serves without threads: [`Served::step`] does the work of the workers. For a simulation.
    pub fn stepped(self) -> Self {
        Self { starter: None, ..self }
    }

    /// Sets the device on which every model looks up its rows. On a GPU the dense network runs
    /// there too, with the options `dense`. What its driver takes is a line beside the models.
    pub fn on(self, lookups: Device, dense: GpuDense) -> Self {
        let serving = match &lookups {
            Device::Cpu => self,
            Device::Cuda(_) => self.beside(DRIVER_PART, dense.driver_bytes(&lookups)),
        };
        Self { lookups, dense, ..serving }
    }

    /// Counts `bytes` that the process takes beside the models. The rest of the memory is for the
    /// models.
    pub fn beside(self, part: &'static str, bytes: u64) -> Self {
        let beside = self.beside.and(Part::Beside(part), bytes);
        Self { beside, ..self }
    }

    fn models(&self) -> RwLockReadGuard<'_, Vec<Arc<Served>>> {
        self.models.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the handle of the model `name`; `None` if it is not served.
    pub fn get(&self, name: &str) -> Option<Arc<Served>> {
        self.models().iter().find(|served| served.name() == name).cloned()
    }

    /// Returns the handles of all models, in the order of their loads.
    pub fn served(&self) -> Vec<Arc<Served>> {
        self.models().clone()
    }

    /// Returns the model that `name` serves.
    pub fn model(&self, name: &str) -> Option<Arc<Model>> {
        self.get(name)?.model()
    }

    /// Serves the live generation of `flash` as `name`. The memory and the reads of `budget` are
    /// replaced by those that [`Serving::new`] received. Returns the handle of the model.
    ///
    /// # Errors
    /// [`ServingError::Loaded`] if the name is taken; [`ServingError::Open`],
    /// [`ServingError::Memory`] or [`ServingError::Reads`] if the model cannot be opened within the
    /// budget.
    pub fn load(
        &self,
        name: &str,
        flash: &Flash,
        budget: Budget,
    ) -> Result<Arc<Served>, ServingError> {
        let _one = self.hold_changes();
        if self.get(name).is_some() {
            return Err(ServingError::Loaded(name.to_owned()));
        }

        // Opening takes seconds, so the list of models is not locked. `change` keeps the name free.
        let pipeline = self.open(name, flash, budget, None)?;
        let served = Arc::new(Served::new(name, flash, pipeline));
        self.models.write().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&served));
        self.unloaded().remove(name);
        Ok(served)
    }

    /// Serves the live generation of `flash` in place of the one that `name` serves now. Both share
    /// the caches and resident tables. If the tables or the budget differ too much for that, the
    /// new generation is opened beside the old one with caches of its own. Returns after the last
    /// request of the old generation is answered. Calls `yield_now` between pieces of work, during
    /// which requests are served, with whether somebody waits for the swap to go on.
    ///
    /// # Errors
    /// [`ServingError::NotLoaded`] if there is no such model. [`ServingError::Shape`] if requests
    /// to it would not fit the new generation. The errors of [`Serving::load`] if the new
    /// generation does not fit the budget beside the old one.
    pub fn swap(
        &self,
        name: &str,
        flash: &Flash,
        budget: Budget,
        yield_now: &dyn Fn(Urgency),
    ) -> Result<Swapped, ServingError> {
        let yield_awaited = &|| yield_now(Urgency::Awaited);
        // Before the lock: other models may be loaded during a proof.
        self.prove_next(flash, budget, yield_awaited);
        let _one = self.hold_changes();
        let not_loaded = || ServingError::NotLoaded(name.to_owned());
        let served = self.get(name).ok_or_else(not_loaded)?;
        let old = served.model().ok_or_else(not_loaded)?;
        if !can_follow(&old, flash, &budget) {
            drop(old);
            return self.replace(&served, flash, budget, yield_awaited);
        }

        let (budget, taken) = self.budget_beside(budget);
        let opened = successor::open(&old, flash, budget, &self.dense, yield_awaited)
            .map_err(|e| self.refusal(name, e, taken))?;
        check_shape(&old, &opened.model).map_err(|e| e.of(name))?;
        if old.outputs() != opened.model.outputs() {
            // The slots of the old pipeline have no room for other scores.
            drop((old, opened));
            return self.replace(&served, flash, budget, yield_awaited);
        }
        drop(old);

        let run = |pipeline: &Pipeline| transition::run(pipeline, opened, &*self.clock, yield_now);
        // The pipeline stays locked for reading until the swap has ended. No writer waits for it,
        // because `change` admits one change at a time.
        served
            .with(run)
            .ok_or_else(not_loaded)?
            .map_err(|e| self.refusal(name, OpenError::Cuda(e), taken))
    }

    /// Serves the live generation of `flash` as `served`, with caches of its own.
    fn replace(
        &self,
        served: &Served,
        flash: &Flash,
        budget: Budget,
        yield_now: &dyn Fn(),
    ) -> Result<Swapped, ServingError> {
        let pipeline = self.open(served.name(), flash, budget, Some(yield_now))?;
        if let Some(old) = served.model() {
            check_shape(&old, &pipeline.model()).map_err(|e| e.of(served.name()))?;
        }

        let start = self.clock.now();
        let old = served.exchange(Some(pipeline));
        let pause = self.clock.now().saturating_sub(start);

        let dropped = old.map_or(0, |old| old.model().cache_slots());
        Ok(Swapped { dropped, pause, ..Swapped::default() })
    }

    fn unloaded(&self) -> MutexGuard<'_, BTreeSet<String>> {
        lock(&self.unloaded)
    }

    /// Returns whether `name` was unloaded and not loaded again.
    pub fn is_unloaded(&self, name: &str) -> bool {
        self.unloaded().contains(name)
    }

    /// Stops serving `name` after the requests submitted to it are answered.
    ///
    /// # Errors
    /// [`ServingError::NotLoaded`] if there is no such model.
    pub fn unload(&self, name: &str) -> Result<(), ServingError> {
        let _one = self.hold_changes();
        let removed = {
            let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
            let at = models.iter().position(|served| served.name() == name);
            let removed = at.map(|at| models.remove(at));
            if removed.is_some() {
                // Under the lock of the list: whoever no longer finds the model finds this record.
                self.unloaded().insert(name.to_owned());
            }
            removed
        };
        // The drop waits for the model's last requests, and must not keep requests to other models
        // waiting. Handles that are left have no pipeline.
        let removed = removed.ok_or_else(|| ServingError::NotLoaded(name.to_owned()))?;
        drop(removed.exchange(None));
        Ok(())
    }

    /// Opens the live generation of `flash`, reads its hot keys into the caches and starts its
    /// pipeline. With a `yield_now` it reads as a background thread does.
    fn open(
        &self,
        name: &str,
        flash: &Flash,
        budget: Budget,
        yield_now: Option<&dyn Fn()>,
    ) -> Result<Pipeline, ServingError> {
        self.check_reads(name, budget.workers)?;
        let (budget, taken) = self.budget_beside(budget);
        let read_depth = Arc::clone(&self.read_depth);
        let (device, dense) = (&self.lookups, &self.dense);
        let options = OpenOptions { budget, read_depth, device, dense, yield_now };
        let model = Model::open_served(flash, options)
            .map_err(|source| self.refusal(name, source, taken))?;
        let (model, clock) = (Arc::new(model), Arc::clone(&self.clock));
        Ok(match &self.starter {
            Some(starter) => starter.start(model, clock),
            None => Pipeline::stepped(model, clock),
        }?)
    }

    /// Returns `budget` with the memory that all served models leave, and the bytes that they take.
    fn budget_beside(&self, budget: Budget) -> (Budget, u64) {
        let taken = self.memory_kept();
        let memory_bytes_max = self.memory_bytes_max.saturating_sub(taken);
        (Budget { memory_bytes_max, reads_max: self.read_depth.max() as u32, ..budget }, taken)
    }

    /// Returns the error for `name`, which was not opened beside models that take `taken` bytes.
    fn refusal(&self, name: &str, source: OpenError, taken: u64) -> ServingError {
        let (name, max) = (name.to_owned(), self.memory_bytes_max);
        match source {
            OpenError::Budget { field: "memory_bytes_max", problem, .. } => {
                ServingError::Memory { name, max, taken, problem }
            }
            source => ServingError::Open { name, source },
        }
    }

    /// Checks that every worker can have a read in flight if `workers` more are started.
    fn check_reads(&self, name: &str, workers: u32) -> Result<(), ServingError> {
        // A generation that replaces another counts beside it: until the exchange both have
        // workers.
        let models = self.served().into_iter().filter_map(|served| served.model());
        let served = models.map(|model| model.budget().workers).sum::<u32>();
        let (workers, max) = ((served + workers) as usize, self.read_depth.max());
        if workers > max {
            return Err(ServingError::Reads { name: name.to_owned(), max, workers });
        }
        Ok(())
    }

    /// Returns the time of the clock that deadlines are times of.
    pub fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Returns whether the target and the machine allow TensorRT.
    pub fn allows_tensorrt(&self) -> bool {
        matches!(self.lookups, Device::Cuda(_)) && self.dense.tensorrt().is_some()
    }

    /// Returns the release of TensorRT, or why it cannot be used; `None` if it is not allowed.
    pub fn tensorrt(&self) -> Option<Result<String, String>> {
        Some(self.dense.release_on(&self.lookups)?.map_err(|e| e.to_string()))
    }

    pub(crate) fn dense(&self) -> &GpuDense {
        &self.dense
    }

    pub(crate) fn lookups(&self) -> &Device {
        &self.lookups
    }

    /// Returns the names of the models.
    pub fn names(&self) -> Vec<String> {
        self.models().iter().map(|served| served.name().to_owned()).collect()
    }

    /// Returns the bytes that all models together may take.
    pub fn memory_bytes_max(&self) -> u64 {
        self.memory_bytes_max
    }

    /// Returns the bytes of all memory plans: those of the models and of the memory beside them.
    pub fn memory_taken(&self) -> u64 {
        let models: u64 = self.memory().iter().map(|(_, plan)| plan.total()).sum();
        models + self.beside.total()
    }

    /// Keeps models from being loaded, swapped and unloaded while the result lives.
    pub(crate) fn hold_changes(&self) -> MutexGuard<'_, ()> {
        lock(&self.change)
    }

    /// Returns the bytes of [`Serving::memory_taken`] without networks whose plans are awaited. A
    /// plan is optional, so its memory refuses no load and no update.
    pub fn memory_kept(&self) -> u64 {
        let awaited = self.served().iter().map(|served| served.plan_bytes()).sum();
        self.memory_taken().saturating_sub(awaited)
    }

    /// Returns the memory of the process beside the models.
    pub fn memory_beside(&self) -> &MemoryPlan {
        &self.beside
    }

    /// Returns the name and the memory plan of each model.
    pub fn memory(&self) -> Vec<(String, MemoryPlan)> {
        let plan = |served: Arc<Served>| {
            let (plan, awaited) = (served.model()?.memory().clone(), served.plan_bytes());
            let plan = if awaited > 0 { plan.and(Part::AwaitedPlans, awaited) } else { plan };
            Some((served.name().to_owned(), plan))
        };
        self.served().into_iter().filter_map(plan).collect()
    }
}

/// A difference between two generations because of which requests do not fit both.
struct ShapeError {
    field: &'static str,
    problem: String,
}

impl ShapeError {
    fn of(self, name: &str) -> ServingError {
        ServingError::Shape { name: name.to_owned(), field: self.field, problem: self.problem }
    }
}

/// Checks that every request that fits `old` fits `new` and means the same. A rollback takes back
/// what a release has added, so only its batches must fit.
fn check_shape(old: &Model, new: &Model) -> Result<(), ShapeError> {
    let differ = |field, problem| Err(ShapeError { field, problem });
    let (a, b) = (old.budget().batch_max, new.budget().batch_max);
    if a > b {
        return differ("batch_max", format!("{b} instead of {a}"));
    }
    let (before, after) = (old.generation(), new.generation());
    if before.lineage == after.lineage && before.sequence > after.sequence {
        return Ok(());
    }
    let refused = |e: ChangeError| ShapeError { field: e.field, problem: e.to_string() };
    check_change(old.schema(), new.schema()).map_err(refused)?;

    let (a, b) = (old.outputs(), new.outputs());
    let has_names = new.schema().network.outputs.len() > 1;
    if a > b || a < b && !has_names {
        return differ("outputs", format!("{b} instead of {a}"));
    }
    Ok(())
}
