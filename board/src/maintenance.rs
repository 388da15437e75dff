//! The maintenance thread of one flash directory, a background thread: calls
//! `hatchback::car::maintenance_steps` until it is stopped.

use crate::shed::Shed;
use anyhow::Result;
use hatchback::car::maintenance_steps::{IDLE, MaintenanceSteps};
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::maintenance::MaintenanceRules;
use hatchback::maintenance::background::Background;
use hatchback::maintenance::catalog::Catalog;
use hatchback::update::Updater;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

/// The maintenance thread. `stop` waits for its last record; dropping it does not.
pub struct MaintenanceThread {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl MaintenanceThread {
    /// Starts maintenance of `directory`, whose updates `updater` has, by `rules`. The thread waits
    /// until the directory has a live generation, and while `shed` holds maintenance.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(
        directory: &Path,
        updater: Option<Updater>,
        rules: MaintenanceRules,
        shed: Arc<Shed>,
    ) -> Result<Self> {
        let (stop, stopped) = channel();
        let directory = directory.to_owned();
        let run = move || {
            let background = Background::enter(rules.busy());
            let catalog = Catalog::path_in(&directory);
            let (mut steps, mut pause) = (None, Duration::ZERO);
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                if pause < IDLE {
                    background.paused()
                } else {
                    background.resume()
                }
                if steps.is_none() {
                    let flash = Flash::open(&disk::system(), &directory).ok();
                    let updater = updater.clone();
                    steps = flash.map(|flash| {
                        MaintenanceSteps::new(flash, updater, rules, Some(&catalog), now())
                    });
                }
                pause = match &mut steps {
                    Some(steps) if !shed.holds_maintenance() => {
                        steps.step(background.clock(), now())
                    }
                    _ => IDLE,
                };
                // The share counts the time while work is due, also the time without a CPU.
                if pause < IDLE {
                    pause = background.worked();
                }
            }
            steps.into_iter().for_each(|steps| steps.end(now()));
        };

        let thread = std::thread::Builder::new().name("maintenance".to_owned()).spawn(run)?;
        Ok(Self { stop, thread })
    }

    /// Ends maintenance after its current step; a merge continues from there at the next start.
    pub fn stop(self) {
        drop(self.stop);
        if self.thread.join().is_err() {
            log::error!("the maintenance thread panicked");
        }
    }
}

/// Returns the time since 1970.
fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
