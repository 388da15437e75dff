//! Maintenance on a thread of its own, at the lowest priority: merges, scrubs and mends in small
//! steps, follows what other processes make live, and says what it did. Never on a request's path;
//! what is served keeps the segments that it opened, whatever is reclaimed meanwhile.

use crate::settings;
use crate::shed::Shed;
use anyhow::Result;
use hatchback::flash::{Flash, FlashError};
use hatchback::io::disk;
use hatchback::maintenance::catalog::{Catalog, CatalogState};
use hatchback::maintenance::catalog_entries::CatalogEntries;
use hatchback::maintenance::throttle::Throttle;
use hatchback::maintenance::{Did, Maintenance, MaintenanceRules};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// How long to rest where nothing is due, or something failed.
const IDLE: Duration = Duration::from_secs(1);

/// The thread. Dropping it ends upkeep without its last word; `stop` waits for that.
pub struct UpkeepThread {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl UpkeepThread {
    /// Starts upkeep of `directory` by `rules`; it waits until something is live there, and while
    /// `shed` says so.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(directory: &Path, rules: MaintenanceRules, shed: Arc<Shed>) -> Result<Self> {
        let (stop, stopped) = channel();
        let directory = directory.to_owned();
        let worker = move || {
            settings::behind_all();
            let (mut worker, mut rest) = (None, Duration::ZERO);
            while stopped.recv_timeout(rest) == Err(RecvTimeoutError::Timeout) {
                if worker.is_none() {
                    worker = Flash::open(&disk::system(), &directory)
                        .ok()
                        .map(|flash| Work::new(flash, rules));
                }
                rest = match &mut worker {
                    Some(worker) if !shed.upkeep() => worker.step(),
                    _ => IDLE,
                };
            }
            worker.into_iter().for_each(Work::end);
        };
        Ok(Self {
            stop,
            thread: std::thread::Builder::new().name("upkeep".to_owned()).spawn(worker)?,
        })
    }

    /// Ends upkeep after the step that is under way; what was merged so far is durable.
    pub fn stop(self) {
        drop(self.stop);
        if self.thread.join().is_err() {
            log::error!("upkeep ended in a panic");
        }
    }
}

struct Work {
    flash: Flash,
    upkeep: Maintenance,
    pace: Throttle,
    /// What was said last of a wait, so that it is said once.
    waits: Option<Did>,
}

fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Bytes that an install of what is live wrote.
fn installed_bytes(flash: &Flash) -> u64 {
    flash.manifest().blobs.iter().map(|b| b.raw_bytes()).sum()
}

impl Work {
    fn new(flash: Flash, rules: MaintenanceRules) -> Self {
        let (catalog, notes, found) =
            match Catalog::open(&Catalog::place(flash.directory()), &flash) {
                Ok((catalog, notes, found)) => (Some(catalog), notes, Some(found)),
                Err(e) => {
                    log::warn!("upkeep starts without what it knew: {e}");
                    (None, CatalogEntries::lost(), None)
                }
            };
        let mut upkeep = Maintenance::new(rules, catalog, notes);
        if let Some(CatalogState::Stale { .. }) = found {
            upkeep.wrote(now(), installed_bytes(&flash));
        }
        Self { flash, upkeep, pace: Throttle::new(rules.busy_percent_max), waits: None }
    }

    /// Does a step; returns how long to rest.
    fn step(&mut self) -> Duration {
        let start = Instant::now();
        match self.follow_and_step() {
            Ok(Did::Nothing | Did::Waits { .. }) => IDLE,
            Ok(_) => self.pace.rest(start.elapsed()),
            Err(e) => {
                log::warn!("upkeep: {e}");
                IDLE
            }
        }
    }

    fn follow_and_step(&mut self) -> Result<Did, FlashError> {
        let before = self.flash.manifest().generation.clone();
        if self.flash.refresh()? && self.flash.manifest().generation != before {
            log::info!("{} is live on flash", self.flash.manifest().generation);
            self.upkeep.wrote(now(), installed_bytes(&self.flash));
        }
        let did = self.upkeep.step(&mut self.flash, now(), self.pace.pages())?;
        self.say(&did);
        Ok(did)
    }

    fn say(&mut self, did: &Did) {
        let name = |table: &usize| &self.flash.manifest().schema.tables[*table].name;
        match did {
            Did::Nothing | Did::Scrubbed | Did::Merged { .. } => {}
            Did::Compacted { table, compacted } => {
                let (rows, bytes) = (compacted.rows, compacted.bytes);
                log::info!("merged table `{}`: {rows} rows, {bytes} bytes", name(table));
            }
            Did::ScrubEnded { pages, repaired, damaged } => {
                log::info!(
                    "scrubbed {pages} pages: {repaired} repaired, {damaged} bad until the next snapshot"
                );
            }
            Did::Waits { table, bytes } if self.waits.as_ref() != Some(did) => {
                let spent = self.upkeep.wear().bytes;
                log::info!(
                    "table `{}` waits for the day's budget: {spent} spent, {bytes} more to get on",
                    name(table)
                );
            }
            Did::Waits { .. } => {}
        }
        self.waits = matches!(did, Did::Waits { .. }).then(|| did.clone());
    }

    fn end(mut self) {
        match self.upkeep.pause(now()) {
            Ok(()) => log::info!(
                "upkeep stopped, {} bytes written in all",
                self.upkeep.wear().bytes_total
            ),
            Err(e) => log::warn!("upkeep stopped: {e}"),
        }
    }
}
