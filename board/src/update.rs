//! Updates on a thread of their own, on the side that serves: takes what `hatchbackd sync` has
//! staged through its probe and its probation, and serves whatever is live on flash, whoever made
//! it so. The two processes share the sync directory's record; a datagram on its socket `wake` only
//! saves a second. Never opens a link.

use crate::latency::Latencies;
use crate::settings;
use anyhow::{Context, Result};
use hatchback::flash::Flash;
use hatchback::maintenance::throttle::rests;
use hatchback::model::budget::Budget;
use hatchback::request::serving::{Serving, Swapped};
use hatchback::request::worker::SystemClock;
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

/// How long to wait for a wake-up before looking by itself.
const LOOK: Duration = Duration::from_secs(1);

/// What one model's updates are made of.
pub struct Update {
    /// The name it is served under; empty for the model's own, until that is known.
    pub name: String,
    /// Its sync and flash directories.
    pub sync: Updater,
    /// What it may use.
    pub budget: Budget,
    /// What a release must show.
    pub policy: Policy,
    /// The fleet's first root, read from a place that the syncing process cannot write.
    pub root: Option<Vec<u8>>,
}

impl Update {
    /// To be called before the model is opened: a release that kept this process from ending in
    /// good order too often goes. What keeps that from being done is said, and keeps nothing from
    /// being served.
    pub fn begin(&self) {
        if let Err(e) = self.count_start() {
            log::error!("update of `{}`: this start does not count: {e}", self.name);
        }
        if !self.is_live() {
            log::info!("`{}`: nothing is live yet; waiting for the first release", self.name);
        }
    }

    fn count_start(&self) -> Result<(), UpdateError> {
        self.sync.begin(now())?;
        let root = self.root.as_deref();
        let nobody =
            Host { policy: self.policy, budget: self.budget, watched: None, root, rest: &|| {} };
        while self.sync.status()?.state == UpdateState::RollingBack
            && self.sync.advance(&nobody, now())?
        {}
        Ok(())
    }

    /// Whether nothing is live at `flash` before this brings its first release.
    pub fn awaited_at(&self, flash: &Path) -> bool {
        self.sync.flash == flash && !self.is_live()
    }

    fn is_live(&self) -> bool {
        self.sync.flash.join("live").exists()
    }
}

/// To be called where the process ends in good order, or of something that says nothing about a
/// release.
pub fn ended(sync: &Updater) {
    if let Err(e) = sync.end() {
        log::warn!("{}: this start counts as one that did not end: {e}", sync.directory.display());
    }
}

/// The thread. `stop` ends it in good order.
pub struct UpdateThread {
    stopping: Arc<AtomicBool>,
    wake: PathBuf,
    thread: JoinHandle<()>,
}

impl UpdateThread {
    /// Starts the updates of `update` in `serving`.
    ///
    /// # Errors
    /// The socket cannot be bound, or the system gives no thread.
    pub fn start(
        update: Update,
        serving: &Arc<Serving>,
        latencies: &Arc<Latencies>,
    ) -> Result<Self> {
        let wake = wake_socket(&update.sync.directory);
        if let Err(e) = std::fs::remove_file(&wake)
            && e.kind() != io::ErrorKind::NotFound
        {
            return Err(e).with_context(|| wake.display().to_string());
        }
        let socket = UnixDatagram::bind(&wake).with_context(|| wake.display().to_string())?;
        socket.set_read_timeout(Some(LOOK))?;
        let stopping = Arc::new(AtomicBool::new(false));
        let (serving, latencies) = (Arc::clone(serving), Arc::clone(latencies));
        let stop = Arc::clone(&stopping);
        let (said, unopened) = (String::new(), String::new());
        let mut work =
            Work { stopping: stop, update, serving, latencies, failed: None, said, unopened };
        let run = move || {
            settings::behind_all();
            while !work.stopping.load(Ordering::Acquire) {
                work.look();
                // Whatever woke it, and whether anything did: it looks.
                let _ = socket.recv(&mut [0; 16]);
            }
            ended(&work.update.sync);
        };
        let thread = std::thread::Builder::new().name("update".to_owned()).spawn(run)?;
        Ok(Self { stopping, wake, thread })
    }

    /// Ends it after the step that is under way.
    pub fn stop(self) {
        self.stopping.store(true, Ordering::Release);
        if let Ok(socket) = UnixDatagram::unbound() {
            let _ = socket.send_to(b"stop", &self.wake);
        }
        if self.thread.join().is_err() {
            log::error!("updates ended in a panic");
        }
        let _ = std::fs::remove_file(&self.wake);
    }
}

struct Work {
    stopping: Arc<AtomicBool>,
    update: Update,
    serving: Arc<Serving>,
    latencies: Arc<Latencies>,
    /// The generation that could not be served, and why.
    failed: Option<(String, String)>,
    /// What was said last of a wait, so that it is said once.
    said: String,
    /// The same of what is live and cannot be opened.
    unopened: String,
}

impl Work {
    /// Takes every step that can be taken now.
    fn look(&mut self) {
        loop {
            self.follow();
            let Update { name, sync, budget, policy, root } = &self.update;
            let taken = self.serving.memory().iter().map(|(_, plan)| plan.total()).sum();
            let memory_bytes_max = self.serving.memory_bytes_max().saturating_sub(taken);
            let budget = Budget { memory_bytes_max, ..*budget };
            let watched = Some(self.watched());
            let advanced = {
                let clock = SystemClock::default();
                let (root, rest) = (root.as_deref(), &self.rests(&clock));
                let host = Host { policy: *policy, budget, watched, root, rest };
                sync.advance(&host, now())
            };
            match advanced {
                Ok(true) => self.said.clear(),
                Ok(false) => return,
                Err(e) => {
                    let text = e.to_string();
                    if self.said != text {
                        log::warn!("update of `{name}` waits: {text}");
                        self.said = text;
                    }
                    return;
                }
            }
        }
    }

    /// Rests between pieces of work as the policy has it; none once it is to stop, or where it is
    /// in nobody's way.
    fn rests<'a>(&'a self, clock: &'a SystemClock) -> impl Fn() + 'a {
        rests(self.update.policy.busy_percent_max, clock, |time| {
            if !self.stopping.load(Ordering::Acquire) && !self.serving.names().is_empty() {
                std::thread::sleep(time);
            }
        })
    }

    /// Serves what is live on flash, if something is.
    fn follow(&mut self) {
        if !self.update.is_live() {
            return;
        }
        let Update { name, sync, .. } = &mut self.update;
        let flash = match Flash::open(&sync.disk, &sync.flash) {
            Ok(flash) => flash,
            Err(e) => {
                let text = e.to_string();
                if self.unopened != text {
                    log::error!("`{name}`: what is live cannot be opened: {text}");
                    self.unopened = text;
                }
                return;
            }
        };
        self.unopened.clear();
        let live = &flash.manifest().generation;
        if name.is_empty() {
            name.clone_from(&live.lineage);
        }
        let failed =
            self.failed.as_ref().is_some_and(|(generation, _)| *generation == live.to_string());
        if self.serving.generation(name).as_ref() == Some(live) || failed {
            return;
        }
        let (name, budget) = (&self.update.name, self.update.budget);
        let served = if self.serving.generation(name).is_none() {
            self.serving.load(name, &flash, budget).map(|()| Swapped::default())
        } else {
            let clock = SystemClock::default();
            self.serving.swap(name, &flash, budget, &self.rests(&clock))
        };
        match served {
            Ok(swapped) => {
                self.failed = None;
                log::info!("serving {live} as `{name}`: {swapped:?}");
            }
            Err(e) => {
                log::error!("{live} is not served: {e}");
                self.failed = Some((live.to_string(), e.to_string()));
            }
        }
    }

    /// What was seen of the live generation. One that cannot even be served is all faults.
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
