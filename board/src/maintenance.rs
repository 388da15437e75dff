//! The maintenance thread of one flash directory, at the lowest priority: merges, scrubs and
//! repairs in small steps, follows the generations that other processes make live, and logs its
//! work. Never on the request path: a served model keeps its segments open while maintenance
//! removes their files.

use crate::settings;
use crate::shed::Shed;
use anyhow::Result;
use hatchback::flash::{Flash, FlashError};
use hatchback::io::disk;
use hatchback::maintenance::catalog::{Catalog, CatalogState};
use hatchback::maintenance::catalog_entries::CatalogEntries;
use hatchback::maintenance::throttle::Throttle;
use hatchback::maintenance::{Maintenance, MaintenanceRules, StepOutcome};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// Pause where no work is due, or after an error.
const IDLE: Duration = Duration::from_secs(1);

/// The maintenance thread. `stop` waits for its last record; dropping it does not.
pub struct MaintenanceThread {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl MaintenanceThread {
    /// Starts maintenance of `directory` by `rules`. The thread waits until the directory has a
    /// live generation, and while `shed` holds maintenance.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(directory: &Path, rules: MaintenanceRules, shed: Arc<Shed>) -> Result<Self> {
        let (stop, stopped) = channel();
        let directory = directory.to_owned();
        let run = move || {
            settings::run_when_idle();
            let (mut work, mut pause) = (None, Duration::ZERO);
            while stopped.recv_timeout(pause) == Err(RecvTimeoutError::Timeout) {
                if work.is_none() {
                    let flash = Flash::open(&disk::system(), &directory).ok();
                    work = flash.map(|flash| MaintenanceLoop::new(flash, rules));
                }
                pause = match &mut work {
                    Some(work) if !shed.holds_maintenance() => work.step(),
                    _ => IDLE,
                };
            }
            work.into_iter().for_each(MaintenanceLoop::end);
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

struct MaintenanceLoop {
    flash: Flash,
    maintenance: Maintenance,
    throttle: Throttle,
    /// The last logged wait, so that it is logged once.
    wait_logged: Option<StepOutcome>,
}

/// Returns the time since 1970.
fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Returns the bytes that an install of the live generation wrote.
fn installed_bytes(flash: &Flash) -> u64 {
    flash.manifest().blobs.iter().map(|b| b.raw_bytes()).sum()
}

impl MaintenanceLoop {
    fn new(flash: Flash, rules: MaintenanceRules) -> Self {
        let place = Catalog::path_in(flash.directory());
        let (catalog, entries, state) = match Catalog::open(&place, &flash) {
            Ok((catalog, entries, state)) => (Some(catalog), entries, Some(state)),
            Err(e) => {
                log::warn!("maintenance starts without its catalog, which cannot be opened: {e}");
                (None, CatalogEntries::lost(), None)
            }
        };

        let mut maintenance = Maintenance::new(rules, catalog, entries);
        if let Some(CatalogState::Stale { .. }) = state {
            maintenance.count_written(now(), installed_bytes(&flash));
        }
        let throttle = Throttle::new(rules.busy_percent_max);
        Self { flash, maintenance, throttle, wait_logged: None }
    }

    /// Takes one step. Returns how long to pause.
    fn step(&mut self) -> Duration {
        let start = Instant::now();
        match self.follow_and_step() {
            Ok(StepOutcome::Nothing | StepOutcome::Waits { .. }) => IDLE,
            Ok(_) => self.throttle.pause_after(start.elapsed()),
            Err(e) => {
                log::warn!("maintenance failed and will try again: {e}");
                IDLE
            }
        }
    }

    fn follow_and_step(&mut self) -> Result<StepOutcome, FlashError> {
        let before = self.flash.manifest().generation.clone();
        if self.flash.refresh()? && self.flash.manifest().generation != before {
            log::info!("{} is live on flash", self.flash.manifest().generation);
            self.maintenance.count_written(now(), installed_bytes(&self.flash));
        }

        let did = self.maintenance.step(&mut self.flash, now(), self.throttle.pages())?;
        self.log(&did);
        Ok(did)
    }

    fn log(&mut self, did: &StepOutcome) {
        let name = |table: &usize| &self.flash.manifest().schema.tables[*table].name;

        match did {
            StepOutcome::Nothing | StepOutcome::Scrubbed | StepOutcome::Merged { .. } => {}
            StepOutcome::Compacted { table, compacted } => {
                let (rows, bytes) = (compacted.rows, compacted.bytes);
                log::info!("merged table `{}`: {rows} rows, {bytes} bytes", name(table));
            }
            StepOutcome::ScrubEnded { pages, repaired, damaged } => {
                log::info!(
                    "scrubbed {pages} pages: {repaired} repaired, {damaged} damaged until the next \
                     snapshot"
                );
            }
            StepOutcome::Waits { table, bytes } if self.wait_logged.as_ref() != Some(did) => {
                let spent = self.maintenance.wear().bytes;
                log::info!(
                    "merge of table `{}` waits for tomorrow's wear budget: it needs {bytes} more \
                     bytes, and {spent} were written today",
                    name(table)
                );
            }
            StepOutcome::Waits { .. } => {}
        }

        self.wait_logged = matches!(did, StepOutcome::Waits { .. }).then(|| did.clone());
    }

    fn end(mut self) {
        match self.maintenance.pause(now()) {
            Ok(()) => {
                let bytes = self.maintenance.wear().bytes_total;
                log::info!("maintenance stopped; it has written {bytes} bytes in all");
            }
            Err(e) => log::warn!("maintenance stopped and could not record its progress: {e}"),
        }
    }
}
