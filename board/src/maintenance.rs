//! The maintenance thread of one flash directory: calls `hatchback::car::maintenance_steps` in the
//! background until it is stopped.

use crate::shed::Shed;
use anyhow::Result;
use hatchback::car::maintenance_steps::{IDLE, MaintenanceSteps};
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::maintenance::background::Background;
use hatchback::maintenance::catalog::Catalog;
use hatchback::maintenance::share::Urgency;
use hatchback::maintenance::{Maintenance, MaintenanceRules};
use hatchback::update::Updater;
use hatchback_link::daemon;
use hatchback_server::WearFacts;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Pause after a panic. Each attempt may write again what the last one wrote.
const AFTER_PANIC: Duration = Duration::from_secs(3600);

/// The newest wear figures of each flash directory.
#[derive(Clone, Debug, Default)]
pub struct Wears(Arc<Mutex<BTreeMap<PathBuf, WearFacts>>>);

impl Wears {
    fn directories(&self) -> MutexGuard<'_, BTreeMap<PathBuf, WearFacts>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, directory: &Path, maintenance: &Maintenance) {
        let (wear, damaged) = (maintenance.wear(), maintenance.damage().len() as u64);
        let (bytes_total, bytes_today) = (wear.bytes_total, wear.bytes);
        let mut directories = self.directories();
        if let Some(facts) = directories.get_mut(directory) {
            (facts.bytes_total, facts.bytes_today) = (bytes_total, bytes_today);
            facts.damaged = damaged;
            return;
        }
        let name = directory.display().to_string();
        let facts = WearFacts { directory: name, bytes_total, bytes_today, damaged };
        directories.insert(directory.to_owned(), facts);
    }

    /// Returns the wear of each directory.
    pub fn list(&self) -> Vec<WearFacts> {
        self.directories().values().cloned().collect()
    }
}

/// The maintenance thread. `stop` waits until its last record is written; dropping it does not.
pub struct MaintenanceThread {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl MaintenanceThread {
    /// Starts maintenance of `directory` by `rules`; `updater` has the directory's updates. The
    /// thread waits until the directory has a live generation, and while `shed` holds maintenance.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(
        directory: &Path,
        updater: Option<Updater>,
        rules: MaintenanceRules,
        shed: Arc<Shed>,
        wears: &Wears,
    ) -> Result<Self> {
        let (stop, stopped) = channel();
        let directory = directory.to_owned();
        let wears = wears.clone();
        let now = || Duration::from_secs(daemon::now());
        let run = move || {
            let background = Background::enter(rules.busy());
            let catalog = Catalog::path_in(&directory);
            let (mut steps, mut pause) = (None, Duration::ZERO);
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                // After `IDLE` no work was due, and that time must not earn a share.
                if pause < IDLE {
                    background.paused()
                } else {
                    background.resume()
                }
                if steps.is_none() {
                    // Nothing is live yet, or it is damaged. The next round looks again.
                    let flash = Flash::open(&disk::system(), &directory).ok();
                    let updater = updater.clone();
                    steps = flash.map(|flash| {
                        MaintenanceSteps::new(flash, updater, rules, Some(&catalog), now())
                    });
                }
                let stepped = match &mut steps {
                    Some(open) if !shed.holds_maintenance() => {
                        catch_unwind(AssertUnwindSafe(|| open.step(background.clock(), now())))
                    }
                    _ => Ok(false),
                };
                // A panic over damaged content must not end maintenance for good.
                let Ok(is_due) = stepped else {
                    let path = directory.display();
                    log::error!("{path}: maintenance panicked; it begins again in an hour");
                    (steps, pause) = (None, AFTER_PANIC);
                    continue;
                };
                if let Some(steps) = &steps {
                    wears.set(&directory, steps.maintenance());
                }
                // The thread's share of the time counts while work is due, with or without a CPU.
                pause = if is_due { background.worked(Urgency::Awaited) } else { IDLE };
            }
            steps.into_iter().for_each(|steps| steps.end(now()));
        };

        let thread = std::thread::Builder::new().name("maintenance".to_owned()).spawn(run)?;
        Ok(Self { stop, thread })
    }

    /// Ends maintenance after its current step. The next start continues an unfinished merge.
    pub fn stop(self) {
        drop(self.stop);
        if self.thread.join().is_err() {
            log::error!("the maintenance thread panicked");
        }
    }
}
