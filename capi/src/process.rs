//! A process, as a caller opens it: a budget with its models, and a thread that swaps each model to
//! its live generation. Never touches a pointer.

use crate::outcome::{Outcome, Refusal, closed, refused, request};
use hatchback::car::follower::Follower;
use hatchback::car::plan_thread;
use hatchback::clock::SystemClock;
use hatchback::io::disk::{self, Disk};
use hatchback::locks::lock;
use hatchback::maintenance::background::Background;
use hatchback::maintenance::share::BusyBounds;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::explain::explain_served;
use hatchback::request::serving::{Served, Serving};
use hatchback::schema::Schema;
use hatchback::schema::key_function::KeyError;
use hatchback::schema::raw_value::RawValue;
use hatchback::targets::Target;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

/// Interval at which the thread looks for a new live generation.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The models of one budget.
pub struct Process {
    shared: Arc<Shared>,
    /// Dropping it ends the thread's wait.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// State that callers and the thread share.
pub struct Shared {
    /// The models.
    pub serving: Arc<Serving>,
    /// The number of the system's process that opened this one. Only it has the threads.
    opener: u32,
    disk: Arc<dyn Disk>,
    budget: Budget,
    busy: BusyBounds,
    /// The models that the thread follows.
    followers: Mutex<Vec<Follower>>,
}

/// A served model.
pub struct ServedModel {
    /// The process that serves it.
    pub process: Arc<Shared>,
    /// The handle of its requests.
    pub served: Arc<Served>,
    /// The flash directory that it follows.
    flash: PathBuf,
    /// The shape of requests when the model was loaded. A later generation may have more at the end
    /// of each list; one that a rollback brings back, less.
    pub shape: CallerShape,
}

/// What the caller of a handle sends and receives, whatever generation is served.
#[derive(Clone)]
pub struct CallerShape {
    /// Columns of dense features that each sample has.
    pub dense: usize,
    /// Columns of dense features that the samples of a request share.
    pub shared_dense: usize,
    /// The sparse features, in the order of a request.
    pub features: Vec<String>,
    /// Of each feature whether all samples of a request share it.
    pub shared: Vec<bool>,
    /// The output of each column of the scores.
    pub outputs: Vec<String>,
}

impl CallerShape {
    /// Returns the shape of requests to `model`. A model with one output has its name in every
    /// column; with several outputs, each has one column.
    fn of(model: &Model) -> Self {
        let schema = model.schema();
        let outputs = &schema.network.outputs;
        let of = |column: usize| outputs.get(column).or(outputs.last());
        Self {
            dense: schema.dense_of(false).count(),
            shared_dense: schema.dense_of(true).count(),
            features: schema.features.iter().map(|f| f.name.clone()).collect(),
            shared: schema.features.iter().map(|f| f.shared).collect(),
            outputs: (0..model.outputs()).filter_map(of).map(|o| o.name.clone()).collect(),
        }
    }

    /// Returns the columns of `dense`, `[rows, self.dense]` or `[rows, self.shared_dense]`, that a
    /// generation with `schema` can take. Copies only after a rollback, which takes columns away.
    pub fn cut<'a>(&self, dense: &'a [f32], shared: bool, schema: &Schema) -> Cow<'a, [f32]> {
        let sent = if shared { self.shared_dense } else { self.dense };
        let taken = schema.dense_of(shared).count();
        if sent <= taken {
            return dense.into();
        }
        dense.chunks_exact(sent).flat_map(|row| &row[..taken]).copied().collect()
    }

    /// Returns the columns of `scores`, of a generation with `columns`, that the caller knows.
    ///
    /// # Errors
    /// The generation that a rollback has brought back has fewer.
    pub fn scores<'a>(
        &self,
        scores: &'a [f32],
        columns: usize,
    ) -> Result<impl Iterator<Item = f32> + use<'a>, Refusal> {
        let known = self.outputs.len();
        if columns < known {
            let problem = format!("the generation has {columns} scores a sample, not {known}");
            return Err(refused(format!("{problem}; load the model again")));
        }
        Ok(scores.chunks_exact(columns).flat_map(move |row| &row[..known]).copied())
    }
}

impl Process {
    /// Opens the budget of the target file at `path`, without models.
    ///
    /// # Errors
    /// The target is refused, or the machine has no such device or thread.
    pub fn open(path: &Path) -> Result<Self, Refusal> {
        let target = Target::load(path).map_err(refused)?;
        let device = target.device.open(target.tegra_profile);
        let device = device.map_err(|e| refused(format!("{}: device: {e}", path.display())))?;
        let serving = new_serving(target.budget).on(device, target.gpu_dense());
        Self::start(serving, target.budget, target.update.busy())
    }

    /// Opens the default budget of a developer's machine, on the CPU.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn on_desk() -> Result<Self, Refusal> {
        let budget = Budget::default();
        Self::start(new_serving(budget), budget, BusyBounds { percent_min: 5, percent_max: 100 })
    }

    fn start(serving: Serving, budget: Budget, busy: BusyBounds) -> Result<Self, Refusal> {
        let (disk, followers) = (disk::system(), Mutex::default());
        let opener = std::process::id();
        let serving = Arc::new(serving);
        let threads = |e| refused(format!("threads: {e}"));
        plan_thread::start(&serving, busy).map_err(threads)?;
        let shared = Arc::new(Shared { serving, opener, disk, budget, busy, followers });

        let (stop, stopped) = channel();
        let follows = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("follow".to_owned())
            .spawn(move || follow(&follows, &stopped))
            .map_err(threads)?;
        Ok(Self { shared, stop: Some(stop), thread: Some(thread) })
    }

    /// Loads the model in the directory `flash`, as `name` or under its lineage.
    ///
    /// # Errors
    /// The model is refused, does not fit the budget beside the others, or its name is taken.
    pub fn load(&self, flash: &Path, name: Option<&str>) -> Result<ServedModel, Refusal> {
        let Shared { serving, disk, budget, .. } = &*self.shared;
        let follower = Follower::load(disk, flash, name, serving, *budget)?;
        let served = serving.get(follower.name()).ok_or_else(|| closed("model"))?;
        self.shared.followers().push(follower);
        let shape = CallerShape::of(&*served.model().ok_or_else(|| closed("model"))?);
        let (process, flash) = (Arc::clone(&self.shared), flash.to_owned());
        Ok(ServedModel { process, served, flash, shape })
    }

    /// Returns whether this process serves `model`.
    pub fn has(&self, model: &ServedModel) -> bool {
        Arc::ptr_eq(&self.shared, &model.process)
    }

    /// Returns what callers and the thread share.
    pub fn shared(&self) -> &Shared {
        &self.shared
    }
}

fn new_serving(budget: Budget) -> Serving {
    let clock = Arc::new(SystemClock::default());
    Serving::new(budget.memory_bytes_max, budget.reads_max, clock)
}

impl Shared {
    /// Checks that this is not a copy in a child made by `fork`, which has none of the threads. A
    /// request there would wait for ever.
    ///
    /// # Errors
    /// Another process of the system opened this one.
    pub fn check_opener(&self) -> Result<(), Refusal> {
        let (opener, own) = (self.opener, std::process::id());
        let problem = || format!("process {opener} opened this; its fork {own} cannot use it");
        if opener == own { Ok(()) } else { Err(Refusal(Outcome::Closed, problem())) }
    }

    fn followers(&self) -> MutexGuard<'_, Vec<Follower>> {
        lock(&self.followers)
    }
}

impl ServedModel {
    /// Returns the model that is served now.
    ///
    /// # Errors
    /// It was unloaded.
    pub fn model(&self) -> Result<Arc<Model>, Refusal> {
        self.served.model().ok_or_else(|| closed("model"))
    }

    /// Ends serving the model, after its requests are answered.
    ///
    /// # Errors
    /// The model is not served.
    pub fn unload(&self) -> Result<(), Refusal> {
        let name = self.served.name();
        self.process.followers().retain(|follower| follower.name() != name);
        self.process.serving.unload(name).map_err(|_| closed("model"))
    }

    /// Explains the score of the sample in `line`. Returns the report of `hatchback explain`.
    ///
    /// # Errors
    /// The line is not a sample of the model, or the flash directory cannot be read.
    pub fn explain(&self, line: &str) -> Result<String, Refusal> {
        let explained =
            explain_served(&self.process.serving, self.served.name(), &self.flash, line)?;
        serde_json::to_string(&explained).map_err(|e| Refusal(Outcome::Failed, e.to_string()))
    }

    /// Returns the key of a raw value, by the key function of the feature with the number
    /// `feature`.
    ///
    /// # Errors
    /// The model has no such feature, or the feature does not take the value.
    pub fn key(&self, feature: usize, value: &RawValue<'_>) -> Result<u64, Refusal> {
        self.key_by(feature, |schema| schema.key(feature, value))
    }

    /// Returns the key of the cross with the number `feature`, for a raw value of each column.
    ///
    /// # Errors
    /// As of `key`, and the feature crosses not so many columns.
    pub fn cross_key(&self, feature: usize, values: &[RawValue<'_>]) -> Result<u64, Refusal> {
        self.key_by(feature, |schema| schema.cross_key(feature, values))
    }

    fn key_by(
        &self,
        feature: usize,
        key: impl FnOnce(&Schema) -> Result<u64, KeyError>,
    ) -> Result<u64, Refusal> {
        let model = self.model()?;
        self.check_feature(feature)?;
        // After a rollback the feature may be gone. Its keys are not read, nor are a retired one's.
        let known = model.schema().features.get(feature).filter(|feature| !feature.retired);
        let Some(feature) = known else { return Ok(0) };
        key(model.schema()).map_err(|e| request(format!("feature `{}`: {e}", feature.name)))
    }

    /// Checks that the caller's requests have a feature with the number `feature`.
    ///
    /// # Errors
    /// They have fewer.
    pub fn check_feature(&self, feature: usize) -> Result<(), Refusal> {
        let features = self.shape.features.len();
        let missing = || request(format!("feature = {feature}: the model has {features}"));
        if feature < features { Ok(()) } else { Err(missing()) }
    }

    /// Returns the number of the sparse feature `name`.
    ///
    /// # Errors
    /// The model has no such feature.
    pub fn feature(&self, name: &str) -> Result<i32, Refusal> {
        let at = self.shape.features.iter().position(|feature| feature == name);
        Ok(at.ok_or_else(|| request(format!("the model has no feature `{name}`")))? as i32)
    }

    /// Returns the first column of the output `name` in the scores.
    ///
    /// # Errors
    /// The model has no such output.
    pub fn output(&self, name: &str) -> Result<i32, Refusal> {
        let names = &self.shape.outputs;
        let at = names.iter().position(|output| output == name);
        let missing = || request(format!("the model has no output `{name}`, but {names:?}"));
        Ok(at.ok_or_else(missing)? as i32)
    }
}

/// Looks for a new live generation of each model every second, and swaps to it, until `stopped` is
/// closed.
fn follow(shared: &Shared, stopped: &Receiver<()>) {
    let background = Background::enter(shared.busy);
    // The last error of each model, so that it is logged once.
    let mut logged = BTreeMap::new();
    while stopped.recv_timeout(LOOK_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        background.resume();
        let yield_now = |urgency| background.yield_now(urgency, std::thread::sleep);
        for follower in &mut *shared.followers() {
            match follower.look(&shared.serving, &yield_now) {
                Ok(None) => {}
                Ok(Some((live, swapped))) => {
                    logged.remove(follower.name());
                    log::info!("serving {live} as `{}`; {swapped}", follower.name());
                }
                Err(e) => {
                    let (name, reason) = (follower.name(), e.to_string());
                    if logged.get(name) != Some(&reason) {
                        log::error!("the live generation of `{name}` is not served: {reason}");
                        logged.insert(name.to_owned(), reason);
                    }
                }
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.shared.check_opener().is_err() {
            // A child made by `fork` can neither join the threads of its parent nor wake them. The
            // memory of its copy stays until the child ends.
            std::mem::forget((self.stop.take(), self.thread.take(), Arc::clone(&self.shared)));
            return;
        }
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The panic was printed when it happened.
            let _ = thread.join();
        }
    }
}
