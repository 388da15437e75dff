//! The update thread of one model, in the process that serves. Takes a release that
//! `hatchback-sync` has staged through probe and probation, and serves the live generation of the
//! flash directory, whichever process made it live. The two processes share the status record of
//! the sync directory; a datagram on the socket `wake` only saves a second. Never opens a link.

use crate::latency::Latencies;
use crate::settings;
use anyhow::{Context, Result};
use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::maintenance::throttle::throttled_yield;
use hatchback::model::budget::Budget;
use hatchback::request::serving::{Serving, Swapped};
use hatchback::update::Updater;
use hatchback::update::apply::{Host, Policy, Watched};
use hatchback::update::error::UpdateError;
use hatchback::update::state::UpdateState;
use hatchback_link::daemon::{now, wake_socket};
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time after which the thread reads the record without a wake-up.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The updates of one model.
pub struct Update {
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

impl Update {
    /// Records that a process starts with the live generation; to be called before the model is
    /// opened. A release under which too many starts ended abnormally is rolled back here. An error
    /// is logged and does not keep the model from being served.
    pub fn record_start(&self) {
        if let Err(e) = self.try_record_start() {
            let name = &self.name;
            log::error!("`{name}`: cannot record this start, so a crash will not count: {e}");
        }
        if !self.is_live() {
            let name = &self.name;
            log::info!("`{name}`: no generation is live yet; waiting for the first release");
        }
    }

    fn try_record_start(&self) -> Result<(), UpdateError> {
        self.updater.record_start(now())?;

        let root = self.root.as_deref();
        let host = Host {
            policy: self.policy,
            budget: self.budget,
            watched: None,
            root,
            yield_now: &|| {},
        };
        while self.updater.status()?.state == UpdateState::RollingBack
            && self.updater.advance(&host, now())?
        {}
        Ok(())
    }

    /// Returns whether `flash` is this model's directory and has no live generation yet.
    pub fn awaits_first_release_at(&self, flash: &Path) -> bool {
        self.updater.flash == flash && !self.is_live()
    }

    fn is_live(&self) -> bool {
        self.updater.flash.join("live").exists()
    }
}

/// Records that this process ends normally, or for a reason that is no release's fault.
pub fn record_end(updater: &Updater) {
    if let Err(e) = updater.record_clean_exit() {
        let directory = updater.directory.display();
        log::warn!("{directory}: cannot record a normal end, so this start counts as a crash: {e}");
    }
}

/// The thread of one model's updates.
pub struct UpdateThread {
    stopping: Arc<AtomicBool>,
    wake: PathBuf,
    thread: JoinHandle<()>,
}

impl UpdateThread {
    /// Starts the thread for `update`; it loads and swaps generations in `serving`.
    ///
    /// # Errors
    /// The socket `wake` cannot be bound, or the system refuses a thread.
    pub fn start(
        update: Update,
        serving: &Arc<Serving>,
        latencies: &Arc<Latencies>,
    ) -> Result<Self> {
        let wake = wake_socket(&update.updater.directory);
        if let Err(e) = std::fs::remove_file(&wake)
            && e.kind() != io::ErrorKind::NotFound
        {
            return Err(e).with_context(|| wake.display().to_string());
        }
        let socket = UnixDatagram::bind(&wake).with_context(|| wake.display().to_string())?;
        socket.set_read_timeout(Some(POLL_INTERVAL))?;

        let stopping = Arc::new(AtomicBool::new(false));
        let (serving, latencies) = (Arc::clone(serving), Arc::clone(latencies));
        let stop = Arc::clone(&stopping);
        let (wait_logged, open_logged) = (String::new(), String::new());
        let mut work = UpdateLoop {
            stopping: stop,
            update,
            serving,
            latencies,
            failed: None,
            wait_logged,
            open_logged,
        };
        let run = move || {
            settings::run_when_idle();
            while !work.stopping.load(Ordering::Acquire) {
                work.advance();
                // A datagram and a timeout both mean: read the record again.
                let _ = socket.recv(&mut [0; 16]);
            }
            record_end(&work.update.updater);
        };
        let thread = std::thread::Builder::new().name("update".to_owned()).spawn(run)?;
        Ok(Self { stopping, wake, thread })
    }

    /// Ends the thread after its current step, and records a normal end.
    pub fn stop(self) {
        self.stopping.store(true, Ordering::Release);
        if let Ok(socket) = UnixDatagram::unbound() {
            let _ = socket.send_to(b"stop", &self.wake);
        }
        if self.thread.join().is_err() {
            log::error!("the update thread panicked");
        }
        let _ = std::fs::remove_file(&self.wake);
    }
}

struct UpdateLoop {
    stopping: Arc<AtomicBool>,
    update: Update,
    serving: Arc<Serving>,
    latencies: Arc<Latencies>,
    /// The generation that could not be served, and why.
    failed: Option<(String, String)>,
    /// The last logged reason of a wait, so that it is logged once.
    wait_logged: String,
    /// The last logged reason why the live generation cannot be opened.
    open_logged: String,
}

impl UpdateLoop {
    /// Takes every step that can be taken now.
    fn advance(&mut self) {
        loop {
            self.serve_live();

            match self.step() {
                Ok(true) => self.wait_logged.clear(),
                Ok(false) => return,
                Err(e) => {
                    let text = e.to_string();
                    if self.wait_logged != text {
                        log::warn!("update of `{}` waits: {text}", self.update.name);
                        self.wait_logged = text;
                    }
                    return;
                }
            }
        }
    }

    /// Takes one step of the update. Returns whether there was one to take.
    fn step(&self) -> Result<bool, UpdateError> {
        let Update { updater, budget, policy, root, .. } = &self.update;
        let taken = self.serving.memory().iter().map(|(_, plan)| plan.total()).sum();
        let memory_bytes_max = self.serving.memory_bytes_max().saturating_sub(taken);
        let budget = Budget { memory_bytes_max, ..*budget };

        let clock = SystemClock::default();
        let (watched, root) = (Some(self.watched()), root.as_deref());
        let host = Host { policy: *policy, budget, watched, root, yield_now: &self.pauses(&clock) };
        updater.advance(&host, now())
    }

    /// Returns a function that pauses between pieces of work, as the policy demands. It does not
    /// pause while the thread is stopping or while no model is served.
    fn pauses<'a>(&'a self, clock: &'a SystemClock) -> impl Fn() + 'a {
        throttled_yield(self.update.policy.busy_percent_max, clock, |time| {
            if !self.stopping.load(Ordering::Acquire) && !self.serving.names().is_empty() {
                std::thread::sleep(time);
            }
        })
    }

    /// Loads the live generation of the flash directory, or swaps it in.
    fn serve_live(&mut self) {
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
            let clock = SystemClock::default();
            self.serving.swap(name, &flash, budget, &self.pauses(&clock))
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
        let Update { name, updater, .. } = &self.update;
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
                latency_us_p99: self.latencies.p99_us(name, &generation),
            },
            _ => Watched { faults: u64::MAX, ..Watched::default() },
        }
    }
}
