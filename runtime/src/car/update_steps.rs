//! The updates of one model in the process that serves: takes a staged release through probe and
//! probation, and serves the live generation of the flash directory, whichever process made it
//! live. Never opens a link.

use crate::bundle::manifest::Generation;
use crate::flash::Flash;
use crate::model::budget::Budget;
use crate::request::serving::{Serving, Swapped};
use crate::update::Updater;
use crate::update::apply::{Host, Policy, Watched};
use crate::update::error::UpdateError;
use crate::update::state::UpdateState;
use std::path::Path;
use std::sync::Arc;

/// The updates of one model: what the daemon is told of it.
pub struct ModelUpdates {
    /// The name that the model is served under; empty until its lineage is known.
    pub name: String,
    /// The model's sync and flash directories.
    pub updater: Updater,
    /// The budget of the model.
    pub budget: Budget,
    /// What a release must show before it is committed.
    pub policy: Policy,
    /// The fleet's first root metadata, from a file that `hatchback-sync` cannot write.
    pub root: Option<Vec<u8>>,
}

impl ModelUpdates {
    /// Records that a process starts with the live generation; to be called before the model is
    /// opened. A release under which too many starts ended abnormally is rolled back here. An error
    /// is logged and does not keep the model from being served. `now` is in seconds since 1970.
    pub fn record_start(&self, now: u64) {
        if let Err(e) = self.try_record_start(now) {
            let name = &self.name;
            log::error!("`{name}`: cannot record this start, so a crash will not count: {e}");
        }
        if !self.is_live() {
            let name = &self.name;
            log::info!("`{name}`: no generation is live yet; waiting for the first release");
        }
    }

    fn try_record_start(&self, now: u64) -> Result<(), UpdateError> {
        self.updater.record_start(now)?;

        let root = self.root.as_deref();
        let host = Host {
            policy: self.policy,
            budget: self.budget,
            watched: None,
            root,
            yield_now: &|| {},
        };
        while self.updater.status()?.state == UpdateState::RollingBack
            && self.updater.advance(&host, now)?
        {}
        Ok(())
    }

    /// Returns whether `flash` is this model's directory and has no live generation yet.
    pub fn awaits_first_release_at(&self, flash: &Path) -> bool {
        self.updater.flash == flash && !self.is_live()
    }

    fn is_live(&self) -> bool {
        self.updater.disk.read(&self.updater.flash.join("live")).is_ok()
    }
}

/// Records that this process ends normally, or for a reason that is no release's fault.
pub fn record_end(updater: &Updater) {
    if let Err(e) = updater.record_clean_exit() {
        let directory = updater.directory.display();
        log::warn!("{directory}: cannot record a normal end, so this start counts as a crash: {e}");
    }
}

/// Returns the 99th percentile of the latency of a generation of a model, µs.
pub type LatencyP99 = Box<dyn Fn(&str, &Generation) -> u64 + Send>;

/// The updates of one model, and the models that are served.
pub struct UpdateSteps {
    update: ModelUpdates,
    serving: Arc<Serving>,
    latency_us_p99: LatencyP99,
    /// The generation that could not be served, and why.
    failed: Option<(String, String)>,
    /// The last logged reason of a wait, so that it is logged once.
    wait_logged: String,
    /// The last logged reason why the live generation cannot be opened.
    open_logged: String,
}

impl UpdateSteps {
    /// Returns the steps of `update`, which load and swap generations in `serving`.
    pub fn new(update: ModelUpdates, serving: Arc<Serving>, latency_us_p99: LatencyP99) -> Self {
        let (wait_logged, open_logged) = (String::new(), String::new());
        Self { update, serving, latency_us_p99, failed: None, wait_logged, open_logged }
    }

    /// Returns the updater, to record the end of the process.
    pub fn updater(&self) -> &Updater {
        &self.update.updater
    }

    /// Serves the live generation and takes one step of the update. Returns whether the update
    /// entered another state, so that the next step can be taken now. Calls `yield_now` between
    /// small pieces of work. `now` is in seconds since 1970.
    pub fn step(&mut self, now: u64, yield_now: &dyn Fn()) -> bool {
        self.serve_live(yield_now);

        match self.advance(now, yield_now) {
            Ok(true) => {
                self.wait_logged.clear();
                true
            }
            Ok(false) => false,
            Err(e) => {
                let text = e.to_string();
                if self.wait_logged != text {
                    log::warn!("update of `{}` waits: {text}", self.update.name);
                    self.wait_logged = text;
                }
                false
            }
        }
    }

    fn advance(&self, now: u64, yield_now: &dyn Fn()) -> Result<bool, UpdateError> {
        let ModelUpdates { updater, budget, policy, root, .. } = &self.update;
        let taken = self.serving.memory().iter().map(|(_, plan)| plan.total()).sum();
        let memory_bytes_max = self.serving.memory_bytes_max().saturating_sub(taken);
        let budget = Budget { memory_bytes_max, ..*budget };

        let (watched, root) = (Some(self.watched()), root.as_deref());
        updater.advance(&Host { policy: *policy, budget, watched, root, yield_now }, now)
    }

    /// Loads the live generation of the flash directory, or swaps it in.
    fn serve_live(&mut self, yield_now: &dyn Fn()) {
        if !self.update.is_live() {
            return;
        }
        let Some(flash) = self.open_live() else { return };

        let live = &flash.manifest().generation;
        if self.update.name.is_empty() {
            self.update.name.clone_from(&live.lineage);
        }
        let (name, budget) = (&self.update.name, self.update.budget);
        let served = self.serving.generation(name);
        let has_failed =
            self.failed.as_ref().is_some_and(|(generation, _)| *generation == live.to_string());
        if served.as_ref() == Some(live) || has_failed {
            return;
        }

        let result = if served.is_none() {
            self.serving.load(name, &flash, budget).map(|()| Swapped::default())
        } else {
            self.serving.swap(name, &flash, budget, yield_now)
        };
        match result {
            Ok(swapped) => {
                self.failed = None;
                let Swapped { transferred: rows, pause } = swapped;
                log::info!(
                    "serving {live} as `{name}`; a request waited at most {pause:?}; cached rows: \
                     {} copied, {} read, {} dropped",
                    rows.copied,
                    rows.read,
                    rows.dropped
                );
            }
            Err(e) => {
                log::error!("{live} is not served: {e}");
                self.failed = Some((live.to_string(), e.to_string()));
            }
        }
    }

    /// Opens the flash directory; a failure is logged once.
    fn open_live(&mut self) -> Option<Flash> {
        let ModelUpdates { name, updater, .. } = &self.update;
        match Flash::open(&updater.disk, &updater.flash) {
            Ok(flash) => {
                self.open_logged.clear();
                Some(flash)
            }
            Err(e) => {
                let text = e.to_string();
                if self.open_logged != text {
                    log::error!("`{name}`: cannot open the live generation: {text}");
                    self.open_logged = text;
                }
                None
            }
        }
    }

    /// Returns the counts of the live generation for its probation. A generation that cannot be
    /// served counts as nothing but faults.
    fn watched(&self) -> Watched {
        let name = &self.update.name;
        match (self.failed.is_some(), self.serving.stats(name), self.serving.generation(name)) {
            (false, Some(stats), Some(generation)) => Watched {
                requests: stats.requests,
                faults: stats.failed + stats.counters.pages_damaged,
                latency_us_p99: (self.latency_us_p99)(name, &generation),
            },
            _ => Watched { faults: u64::MAX, ..Watched::default() },
        }
    }
}
