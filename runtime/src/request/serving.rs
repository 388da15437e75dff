//! Several models in one process, each by its name and with a pipeline of its own, within one
//! memory budget. A swap opens the new generation beside the old one and exchanges one pointer
//! between two requests: what was submitted before is answered by the old generation, which then
//! goes. Never shows a caller a change of another model.

use crate::bundle::manifest::Generation;
use crate::flash::Flash;
use crate::io::reader::DeviceDepth;
use crate::model::budget::{Budget, MemoryPlan};
use crate::model::cache_transfer::Transferred;
use crate::model::{Model, OpenError};
use crate::request::pipeline::{Maker, Pipeline, RequestError, Stats, Ticket};
use crate::request::worker::Clock;
use crate::schema::Schema;
use crate::schema::batch::Batch;
use hatchback_kernels::cuda::Device;
use hatchback_kernels::dense::TensorRtOptions;
use std::io;
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

/// Why a model is not loaded, swapped or unloaded. Everything is then as it was.
#[derive(Debug, thiserror::Error)]
pub enum ServingError {
    /// The model cannot be served.
    #[error("model `{name}`: {source}")]
    Open {
        /// Its name.
        name: String,
        /// Why.
        source: OpenError,
    },
    /// It does not fit beside what is served.
    #[error("model `{name}`: memory_bytes_max = {max}, and {taken} bytes are taken: {problem}")]
    Memory {
        /// Its name.
        name: String,
        /// The budget of all models.
        max: u64,
        /// What those that are served take of it; in a swap the old generation too.
        taken: u64,
        /// What it takes and what to lower.
        problem: String,
    },
    /// The device takes fewer reads than there would be workers.
    #[error("model `{name}`: reads_max = {max}: {workers} workers of all models need a read each")]
    Reads {
        /// Its name.
        name: String,
        /// Reads that the device takes at once.
        max: usize,
        /// Workers that there would be.
        workers: usize,
    },
    /// A model of that name is served already.
    #[error("model `{0}` is served already")]
    Loaded(String),
    /// No model of that name is served.
    #[error("no model `{0}` is served")]
    NotLoaded(String),
    /// Requests to the live generation would not fit the new one: it is another model.
    #[error("model `{name}`: {field} of the new generation: {problem}; load it under another name")]
    Shape {
        /// Its name.
        name: String,
        /// What differs.
        field: &'static str,
        /// How.
        problem: String,
    },
    /// The system gives no threads.
    #[error("threads: {0}")]
    Threads(#[from] io::Error),
}

/// What a swap did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swapped {
    /// What became of the warm caches' rows.
    pub carried: Transferred,
    /// How long it kept requests from being submitted at most.
    pub pause: Duration,
}

struct Served {
    name: String,
    pipeline: Pipeline,
}

/// The models of one process.
pub struct Serving {
    /// Locked for reading while a request is submitted, for writing while a pointer is exchanged.
    models: RwLock<Vec<Served>>,
    /// Held by whoever changes what is served: one at a time.
    change: Mutex<()>,
    memory_bytes_max: u64,
    device: Arc<DeviceDepth>,
    lookups: Device,
    tensorrt: Option<TensorRtOptions>,
    clock: Arc<dyn Clock>,
    maker: Maker,
}

impl Serving {
    /// Serves nothing yet. All models together take at most `memory_bytes_max`, and have at most
    /// `reads_max` page reads in flight. Whoever loads and swaps, their threads have the scheduling
    /// of the one that calls this.
    pub fn new(memory_bytes_max: u64, reads_max: u32, clock: Arc<dyn Clock>) -> Self {
        let device = DeviceDepth::new(reads_max as usize);
        let (models, change) = (RwLock::default(), Mutex::default());
        let (lookups, tensorrt, maker) = (Device::Cpu, None, Maker::new());
        Self { models, change, memory_bytes_max, device, lookups, tensorrt, clock, maker }
    }

    /// The same, with every model's lookups made on `lookups`; on a GPU its dense networks run
    /// there too, on TensorRT where that is given and there.
    pub fn on(self, lookups: Device, tensorrt: Option<TensorRtOptions>) -> Self {
        Self { lookups, tensorrt, ..self }
    }

    fn models(&self) -> RwLockReadGuard<'_, Vec<Served>> {
        self.models.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `of` says of the model `name`; `None` if it is not served.
    fn with<T>(&self, name: &str, of: impl FnOnce(&Pipeline) -> T) -> Option<T> {
        self.models().iter().find(|m| m.name == name).map(|m| of(&m.pipeline))
    }

    /// Serves the live generation of `flash` as `name`. Of `budget` the memory and the reads are
    /// what this was made with.
    ///
    /// # Errors
    /// The name is taken, or the model cannot be opened within the budget.
    pub fn load(&self, name: &str, flash: &Flash, budget: Budget) -> Result<(), ServingError> {
        let _one = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        if self.schema(name).is_some() {
            return Err(ServingError::Loaded(name.to_owned()));
        }
        let (pipeline, _) = self.open(name, flash, budget, (None, &|| {}))?;
        let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
        models.push(Served { name: name.to_owned(), pipeline });
        Ok(())
    }

    /// Serves the live generation of `flash` in place of what `name` is now, with its caches as
    /// warm as they were. Returns when the last request of the old generation is answered and its
    /// memory is free. `rest` is called between small pieces of work, beside which requests are
    /// served.
    ///
    /// # Errors
    /// There is no such model, requests to it would not fit the new generation, or both do not fit
    /// the budget.
    pub fn swap(
        &self,
        name: &str,
        flash: &Flash,
        budget: Budget,
        rest: &dyn Fn(),
    ) -> Result<Swapped, ServingError> {
        let _one = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        if self.schema(name).is_none() {
            return Err(ServingError::NotLoaded(name.to_owned()));
        }
        let old = self.with(name, |old| Arc::clone(old.model()));
        let (mut pipeline, carried) = self.open(name, flash, budget, (old.as_deref(), rest))?;
        if let Some(Err((field, problem))) =
            self.with(name, |old| takes_the_same(old.model(), pipeline.model()))
        {
            return Err(ServingError::Shape { name: name.to_owned(), field, problem });
        }
        let begun = self.clock.now();
        {
            let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
            if let Some(served) = models.iter_mut().find(|m| m.name == name) {
                std::mem::swap(&mut served.pipeline, &mut pipeline);
            }
        }
        let pause = self.clock.now().saturating_sub(begun);
        drop(pipeline);
        Ok(Swapped { carried, pause })
    }

    /// Ends serving `name`, after what was submitted to it is answered.
    ///
    /// # Errors
    /// There is no such model.
    pub fn unload(&self, name: &str) -> Result<(), ServingError> {
        let _one = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        let removed = {
            let mut models = self.models.write().unwrap_or_else(PoisonError::into_inner);
            let at = models.iter().position(|m| m.name == name);
            at.map(|at| models.remove(at))
        };
        removed.map(drop).ok_or_else(|| ServingError::NotLoaded(name.to_owned()))
    }

    /// Opens what is to be served in place of `old`, with that one's rows carried over while the
    /// caches are in host memory. Where those are nearly all, the trainer's hot keys are not read.
    fn open(
        &self,
        name: &str,
        flash: &Flash,
        budget: Budget,
        (old, rest): (Option<&Model>, &dyn Fn()),
    ) -> Result<(Pipeline, Transferred), ServingError> {
        let served = self.models().iter().map(|m| m.pipeline.model().budget().workers).sum::<u32>();
        let (workers, max) = ((served + budget.workers) as usize, self.device.max());
        if workers > max {
            return Err(ServingError::Reads { name: name.to_owned(), max, workers });
        }
        let (max, taken) =
            (self.memory_bytes_max, self.memory().iter().map(|(_, plan)| plan.total()).sum());
        let reads_max = self.device.max() as u32;
        let budget = Budget { memory_bytes_max: max.saturating_sub(taken), reads_max, ..budget };
        let is_near = old.is_some_and(|old| old.carries_to(flash));
        let mut carried = Transferred::default();
        let model =
            Model::cold(flash, budget, Arc::clone(&self.device), rest).and_then(|mut model| {
                if !is_near {
                    model.preload(flash, old.map(|_| rest))?;
                }
                if let Some(old) = old {
                    carried = model.carry(old, rest);
                }
                Ok(model)
            });
        let model = model.and_then(|model| model.onto(&self.lookups));
        let model = model
            .and_then(|model| model.with_dense(flash, self.tensorrt.as_ref()))
            .map_err(|source| {
                let name = name.to_owned();
                match source {
                    OpenError::Budget { field: "memory_bytes_max", problem, .. } => {
                        ServingError::Memory { name, max, taken, problem }
                    }
                    source => ServingError::Open { name, source },
                }
            })?;
        Ok((self.maker.make(Arc::new(model), Arc::clone(&self.clock))?, carried))
    }

    /// As [`Pipeline::submit`], to the model `name`.
    ///
    /// # Errors
    /// There is no such model, all of its slots are taken, or the batch does not fit it.
    pub fn submit(
        &self,
        name: &str,
        batch: &Batch,
        deadline: Option<Duration>,
    ) -> Result<Ticket, RequestError> {
        self.with(name, |p| p.submit(batch, deadline)).unwrap_or(Err(RequestError::NotServed))
    }

    /// As [`Pipeline::prefetch`], for the model `name`.
    pub fn prefetch(&self, name: &str, feature: usize, keys: &[u64]) -> usize {
        self.with(name, |p| p.prefetch(feature, keys)).unwrap_or(0)
    }

    /// The names of the models.
    pub fn names(&self) -> Vec<String> {
        self.models().iter().map(|m| m.name.clone()).collect()
    }

    /// The schema that requests to `name` follow.
    pub fn schema(&self, name: &str) -> Option<Arc<Schema>> {
        self.with(name, |p| Arc::clone(p.model().schema()))
    }

    /// The generation that `name` is now.
    pub fn generation(&self, name: &str) -> Option<Generation> {
        self.with(name, |p| p.model().generation().clone())
    }

    /// What `name` was opened within.
    pub fn budget(&self, name: &str) -> Option<Budget> {
        self.with(name, |p| *p.model().budget())
    }

    /// What `name` did since it was loaded or swapped.
    pub fn stats(&self, name: &str) -> Option<Stats> {
        self.with(name, Pipeline::stats)
    }

    /// What all models together may take.
    pub fn memory_bytes_max(&self) -> u64 {
        self.memory_bytes_max
    }

    /// Where the memory of each model goes.
    pub fn memory(&self) -> Vec<(String, MemoryPlan)> {
        self.models()
            .iter()
            .map(|m| (m.name.clone(), m.pipeline.model().memory().clone()))
            .collect()
    }
}

/// Whether every request that fits `old` fits `new` and means the same there; else what differs,
/// and how.
fn takes_the_same(old: &Model, new: &Model) -> Result<(), (&'static str, String)> {
    let (a, b) = (old.schema(), new.schema());
    let differ = |field, problem| Err((field, problem));
    if a.dense_features != b.dense_features {
        return differ(
            "dense_features",
            format!("{:?} instead of {:?}", b.dense_features, a.dense_features),
        );
    }
    if a.features.len() != b.features.len() {
        return differ("features", format!("{} instead of {}", b.features.len(), a.features.len()));
    }
    for (a, b) in a.features.iter().zip(&b.features) {
        if a.name != b.name {
            return differ("features", format!("`{}` in place of `{}`", b.name, a.name));
        }
        if a.hotness_max > b.hotness_max {
            let problem =
                format!("{} instead of {} for `{}`", b.hotness_max, a.hotness_max, a.name);
            return differ("hotness_max", problem);
        }
    }
    let (a, b) = (old.budget().batch_max, new.budget().batch_max);
    if a > b {
        return differ("batch_max", format!("{b} instead of {a}"));
    }
    match (old.outputs(), new.outputs()) {
        (a, b) if a != b => differ("outputs", format!("{b} instead of {a}")),
        _ => Ok(()),
    }
}
