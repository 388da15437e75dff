//! The updates of one model in the process that serves. The steps take a staged release through
//! probe and probation. They also serve the live generation of the flash directory, whichever
//! process made it live. Never opens a link.

use crate::bundle::manifest::{Generation, Hash};
use crate::car::follower::{Changed, open_changed};
use crate::flash::live::LiveId;
use crate::flash::{Flash, FlashError};
use crate::io::disk::Lock;
use crate::limits::{FAILED_STEPS_MAX, TRIAL_ANSWERS, TRIAL_S, TRIALS_MAX};
use crate::maintenance::share::Urgency;
use crate::model::OpenError;
use crate::model::budget::Budget;
use crate::request::pipeline::Stats;
use crate::request::served::NETWORK_COPIES;
use crate::request::serving::{Serving, ServingError, Swapped};
use crate::update::Updater;
use crate::update::error::UpdateError;
use crate::update::host::{Cause, Host, Policy, Unservable, Watched};
use crate::update::install_status::{InstallState, Repair};
use std::sync::Arc;

/// One model with its updates, as the daemon describes it.
pub struct ModelUpdates {
    /// The name that the model is served under; empty until its lineage is known.
    pub name: String,
    /// The model's sync and flash directories.
    pub updater: Updater,
    /// The budget of the model.
    pub budget: Budget,
    /// The conditions that a release must meet before it is committed.
    pub policy: Policy,
    /// The fleet's first root metadata, from a file that `hatchback-sync` cannot write.
    pub root: Option<Vec<u8>>,
    /// A number that differs after each start of the machine.
    pub boot: u64,
}

impl ModelUpdates {
    /// Begins a trial of a release on probation; to be called before the model is opened. A release
    /// is rolled back here if the process ended during too many of its trials. An error is logged
    /// and does not keep the model from being served. `now` is in seconds since 1970.
    pub fn begin(&self, now: u64) {
        if let Err(e) = self.try_begin(now) {
            let name = &self.name;
            log::error!("`{name}`: cannot record this start, so a crash will not count: {e}");
        }
        if !self.has_generation() {
            let name = &self.name;
            log::info!("`{name}`: no generation is live yet; waiting for the first release");
        } else if self.updater.is_held_back() {
            let name = &self.name;
            log::error!("`{name}`: {TRIALS_MAX} starts ended in its load; waiting for a release");
        }
    }

    fn try_begin(&self, now: u64) -> Result<(), UpdateError> {
        self.updater.begin_process(self.boot, now)?;
        let host = Host {
            policy: self.policy,
            budget: self.budget,
            watched: None,
            unservable: None,
            root: self.root.as_deref(),
            boot: self.boot,
            yield_now: &|| {},
        };
        while self.updater.install_status()?.state == InstallState::RollingBack
            && self.updater.advance(&host, now)?
        {}
        Ok(())
    }

    /// Returns whether no start loads the model: no generation is live yet, or the live one ended
    /// too many starts.
    pub fn awaits_release(&self) -> bool {
        !self.has_generation() || self.updater.is_held_back()
    }

    /// Records that the start has loaded what it can. An error is logged.
    pub fn record_loaded(&self) {
        if let Err(e) = self.updater.record_loaded() {
            let name = &self.name;
            log::warn!("`{name}`: cannot record the load, so this start counts as a crash: {e}");
        }
    }

    fn has_generation(&self) -> bool {
        Flash::has_live_record(self.updater.disk.as_ref(), &self.updater.flash)
    }
}

/// Records that this process ends normally, or for a reason that is no release's fault. `watched`
/// is what it observed of the live generation.
pub fn record_end(updater: &Updater, watched: Watched) {
    if let Err(e) = updater.end_process(watched) {
        let directory = updater.flash.display();
        log::warn!("{directory}: cannot record a normal end, so this start counts as a crash: {e}");
    }
}

/// Returns the number of requests to a generation of a model that took longer than the policy's
/// limit.
pub type SlowRequests = Box<dyn Fn(&str, &Generation) -> u64 + Send>;

/// Why the live generation is not served.
struct Failure {
    /// Its identity.
    id: LiveId,
    reason: String,
    cause: Cause,
    /// Looks in a row at which it could not be served. Each [`UpdateSteps::step`] looks once.
    looks: u32,
}

/// The updates of one model, and the models that are served.
pub struct UpdateSteps {
    update: ModelUpdates,
    serving: Arc<Serving>,
    slow_requests: SlowRequests,
    /// Its count for the served generation before that was loaded or swapped in: the generation
    /// may have been live before.
    slow_before: u64,
    /// The live generation is the one that is served.
    serves_live: bool,
    /// The release whose network was offered for a plan of TensorRT.
    offered: Option<Hash>,
    /// Why the live generation could not be served at the last look.
    failure: Option<Failure>,
    /// Looks in a row at which the device refused the live manifest. Such an error that persists is
    /// treated like a lost file.
    refused_looks: u32,
    /// Calls of [`UpdateSteps::step`] in a row that failed.
    failed_steps: u32,
    /// Looks since the start, up to `TRIAL_S`: about one a second.
    looks: u64,
    /// Damaged pages that requests met, at the last look.
    pages_damaged: u64,
    /// The trial that began with this process has ended well.
    is_proven: bool,
    /// The last logged reason of a wait, so that it is logged once.
    wait_logged: String,
    /// The last logged reason why the live generation is not served.
    open_logged: String,
}

impl UpdateSteps {
    /// Returns the steps of `update`, which load and swap generations in `serving`.
    pub fn new(update: ModelUpdates, serving: Arc<Serving>, slow_requests: SlowRequests) -> Self {
        Self {
            update,
            serving,
            slow_requests,
            slow_before: 0,
            serves_live: false,
            offered: None,
            failure: None,
            refused_looks: 0,
            failed_steps: 0,
            looks: 0,
            pages_damaged: 0,
            is_proven: false,
            wait_logged: String::new(),
            open_logged: String::new(),
        }
    }

    /// Records that this process ends normally.
    pub fn record_end(&self) {
        record_end(&self.update.updater, self.watched());
    }

    /// Serves the live generation and takes one step of the update. Returns whether the update
    /// entered another state. If so, the caller can take the next step now; otherwise it calls
    /// again after a second. Calls `yield_now` between small pieces of work. `now` is in seconds
    /// since 1970.
    pub fn step(&mut self, now: u64, yield_now: &dyn Fn(Urgency)) -> bool {
        self.serves_live = self.serve_live(yield_now);
        let stepped = self.try_step(now, &|| yield_now(Urgency::Awaited));
        if !matches!(stepped, Ok(true)) {
            self.looks = (self.looks + 1).min(TRIAL_S);
        }

        match stepped {
            Ok(entered) => {
                self.failed_steps = 0;
                if entered {
                    self.wait_logged.clear();
                }
                entered
            }
            Err(e) => {
                self.report_wait(&e.to_string());
                // Another process holds a lock, which ends by itself.
                if !e.is_busy() {
                    self.count_failure(&e.to_string(), now);
                }
                false
            }
        }
    }

    /// Records that a call of [`UpdateSteps::step`] panicked: this counts as a failed step.
    pub fn record_panic(&mut self, now: u64) {
        self.report_wait("a step panicked");
        self.count_failure("a step panicked", now);
    }

    /// Logs why a step could not be taken, once.
    fn report_wait(&mut self, reason: &str) {
        if self.wait_logged != reason {
            log::warn!("update of `{}` waits: {reason}", self.update.name);
            reason.clone_into(&mut self.wait_logged);
        }
    }

    /// Counts a failed step. Abandons the attempt after [`FAILED_STEPS_MAX`] in a row.
    fn count_failure(&mut self, reason: &str, now: u64) {
        self.failed_steps += 1;
        if self.failed_steps >= FAILED_STEPS_MAX {
            self.failed_steps = 0;
            if let Err(e) = self.update.updater.abandon(reason, now) {
                log::debug!("the attempt is not abandoned yet: {e}");
            }
        }
    }

    fn try_step(&mut self, now: u64, yield_now: &dyn Fn()) -> Result<bool, UpdateError> {
        let ModelUpdates { updater, budget, policy, root, boot, .. } = &self.update;
        self.is_proven = self.is_proven || self.end_trial(updater)?;
        if let Err(e) = updater.restore_live_record() {
            log::debug!("`{}`: the live record has one copy: {e}", self.update.name);
        }
        if updater.is_paused(now)? {
            return Ok(false);
        }
        if self.serving.allows_tensorrt()
            && let Some(served) = self.serving.get(&self.update.name)
            && let Some(release) = updater.release_in_hand(self.offered)?
        {
            self.offered = Some(release.manifest);
            let left = self.serving.memory_bytes_max().saturating_sub(self.serving.memory_taken());
            let bytes_max = left / NETWORK_COPIES;
            match updater.staged_network(&release, root.as_deref(), *boot, bytes_max) {
                Ok(network) => served.offer_next(network),
                Err(e) => log::debug!("`{}`: no plan before the swap: {e}", self.update.name),
            }
        }
        let stats = self.stats();
        let pages_damaged = stats.map_or(0, |stats| stats.counters.pages_damaged);
        if pages_damaged > self.pages_damaged {
            updater.require_repair(Repair::NewerSnapshot)?;
        }
        self.pages_damaged = pages_damaged;

        let taken = self.serving.memory_kept();
        let memory_bytes_max = self.serving.memory_bytes_max().saturating_sub(taken);
        let budget = Budget { memory_bytes_max, ..*budget };
        let failure = self.failure.as_ref().filter(|failure| failure.is_final());
        let unservable = failure.map(|Failure { id, reason, cause, .. }| Unservable {
            id: *id,
            reason,
            cause: *cause,
        });
        let (watched, root) = (Some(self.watched()), root.as_deref());
        let (policy, boot) = (*policy, *boot);
        let host = Host { policy, budget, watched, unservable, root, boot, yield_now };
        updater.advance(&host, now)
    }

    /// Returns whether the trial that began with this process may still be open. The caller then
    /// calls [`UpdateSteps::look_for_answers`] often: until the trial is recorded as ended, a crash
    /// counts against the release.
    pub fn awaits_first_answer(&self) -> bool {
        !self.is_proven
    }

    /// Ends the trial that began with this process as soon as the model has answered a request.
    pub fn look_for_answers(&mut self) {
        match self.end_trial(&self.update.updater) {
            Ok(is_proven) => self.is_proven |= is_proven,
            Err(e) => log::debug!("`{}`: the trial stays open: {e}", self.update.name),
        }
    }

    /// Ends the trial that began with this process if the model answers requests, or if it has been
    /// served for a while without any. Returns whether it ended.
    fn end_trial(&self, updater: &Updater) -> Result<bool, UpdateError> {
        let answers = self.stats().map_or(0, |stats| stats.requests.saturating_sub(stats.failed));
        let is_proven = answers >= TRIAL_ANSWERS || self.looks >= TRIAL_S;
        if is_proven {
            updater.end_trial()?;
        }
        Ok(is_proven)
    }

    /// Loads the live generation of the flash directory, or swaps it in. Holds the lock of the
    /// directory until it returns, so that a merge cannot remove segments that are being opened.
    /// Returns whether the live generation is served.
    fn serve_live(&mut self, yield_now: &dyn Fn(Urgency)) -> bool {
        if self.update.awaits_release() || self.serving.is_unloaded(&self.update.name) {
            return false;
        }
        let opened = self.open_changed();
        if opened.is_ok() {
            self.refused_looks = 0;
        }
        let (flash, _lock) = match opened {
            Ok(Some(opened)) => opened,
            Ok(None) => return self.failure.is_none(),
            Err(FlashError::Busy { .. }) => return false,
            Err(e) => {
                self.report_unserved(&e.to_string());
                self.refused_looks = match &e {
                    FlashError::Io { .. } => self.refused_looks.saturating_add(1),
                    _ => 0,
                };
                if e.is_damage() || self.refused_looks >= FAILED_STEPS_MAX {
                    self.require(Repair::AnySnapshot);
                }
                return false;
            }
        };

        let live = &flash.manifest().generation;
        if self.update.name.is_empty() {
            self.update.name.clone_from(&live.lineage);
        }
        let (name, budget) = (&self.update.name, self.update.budget);
        let result = match self.serving.get(name) {
            // An unload since the start of this look; it records itself before the model goes.
            None if self.serving.is_unloaded(name) => return false,
            None => self.serving.load(name, &flash, budget).map(|_| Swapped::default()),
            Some(_) => self.serving.swap(name, &flash, budget, yield_now),
        };
        match result {
            Ok(swapped) => {
                self.slow_before = (self.slow_requests)(name, live);
                self.failure = None;
                self.open_logged.clear();
                if let Err(e) = self.update.updater.record_opened() {
                    log::debug!("`{name}`: a snapshot is still requested: {e}");
                }
                log::info!("serving {live} as `{name}`; {swapped}");
            }
            Err(e) => self.fail(flash.record().id(), &e),
        }
        self.failure.is_none()
    }

    /// Opens the live generation under the lock of its directory. Returns `None` if it is served
    /// already or was rejected.
    fn open_changed(&mut self) -> Result<Option<(Flash, Lock)>, FlashError> {
        let ModelUpdates { name, updater, .. } = &self.update;
        let served = self.serving.model(name).map(|model| model.id());
        let failure = self.failure.as_ref();
        let is_rejected =
            |live: LiveId| failure.is_some_and(|f| f.id == live && f.cause == Cause::Release);
        match open_changed(&updater.disk, &updater.flash, served, is_rejected)? {
            Changed::Served => {
                // An earlier failure of this generation no longer counts: a snapshot has replaced
                // the damaged files, and this process still has the old ones open.
                self.failure = None;
                Ok(None)
            }
            Changed::Refused => Ok(None),
            Changed::Open(flash, lock) => Ok(Some((*flash, lock?))),
        }
    }

    /// Records that the generation `id` cannot be served.
    fn fail(&mut self, id: LiveId, error: &ServingError) {
        let reason = error.to_string();
        let before = self.failure.take().filter(|failure| failure.id == id);
        let looks = before.map_or(0, |failure| failure.looks) + 1;
        let cause = cause_of(error);
        self.failure = Some(Failure { id, reason: reason.clone(), cause, looks });

        self.report_unserved(&reason);
        // An error of the device that persists is treated like a lost file.
        let needs_snapshot = match cause {
            Cause::Flash => is_damage(error) || looks >= FAILED_STEPS_MAX,
            // A later program installed it. On probation it is rolled back instead.
            Cause::Release => {
                self.update.updater.install_status().is_ok_and(|s| !s.state.is_active())
            }
            Cause::Car => false,
        };
        if needs_snapshot {
            self.require(Repair::AnySnapshot);
        }
    }

    /// Logs why the live generation is not served, once.
    fn report_unserved(&mut self, reason: &str) {
        if self.open_logged != reason {
            log::error!("`{}`: the live generation is not served: {reason}", self.update.name);
            reason.clone_into(&mut self.open_logged);
        }
    }

    /// Requests a snapshot from the sync process.
    fn require(&self, repair: Repair) {
        if let Err(e) = self.update.updater.require_repair(repair) {
            log::debug!("`{}`: no snapshot is requested yet: {e}", self.update.name);
        }
    }

    /// Returns the statistics of the model; `None` if it is not served.
    fn stats(&self) -> Option<Stats> {
        self.serving.get(&self.update.name)?.stats()
    }

    /// Returns the counts of the live generation for its probation.
    fn watched(&self) -> Watched {
        let name = &self.update.name;
        match (self.stats(), self.serving.model(name)) {
            // Until the swap, the counts are those of the generation before.
            (Some(stats), Some(model)) if self.serves_live => Watched {
                requests: stats.requests,
                faults: stats.failed.saturating_sub(stats.failed_by_car),
                car_faults: stats.failed_by_car,
                slow: (self.slow_requests)(name, model.generation())
                    .saturating_sub(self.slow_before),
            },
            _ => Watched::default(),
        }
    }
}

/// Returns whose fault keeps a generation from being served.
fn cause_of(error: &ServingError) -> Cause {
    match error {
        ServingError::Shape { .. } => Cause::Release,
        ServingError::Open { source, .. } if source.is_fault_of_release() => Cause::Release,
        ServingError::Open { source: OpenError::Flash(_) | OpenError::Segment(_), .. } => {
            Cause::Flash
        }
        _ => Cause::Car,
    }
}

/// Returns whether a file of the live generation is missing or damaged.
fn is_damage(error: &ServingError) -> bool {
    match error {
        ServingError::Open { source: OpenError::Flash(e), .. } => e.is_damage(),
        ServingError::Open { source: OpenError::Segment(e), .. } => e.is_damage(),
        _ => false,
    }
}

impl Failure {
    /// Returns whether further attempts to serve the generation are pointless: the release is at
    /// fault, or it failed too often.
    fn is_final(&self) -> bool {
        self.cause == Cause::Release || self.looks >= FAILED_STEPS_MAX
    }
}
