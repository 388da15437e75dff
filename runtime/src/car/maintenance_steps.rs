//! The maintenance of one flash directory: follows the generations that become live, takes one step
//! of work at a time and logs it. Never on the request path: a served model keeps its segments open
//! while maintenance removes their files.

use crate::clock::Clock;
use crate::flash::live::LiveId;
use crate::flash::{Flash, FlashError};
use crate::maintenance::catalog::{Catalog, CatalogError, CatalogState};
use crate::maintenance::catalog_entries::CatalogEntries;
use crate::maintenance::step_size::StepSize;
use crate::maintenance::{Maintenance, MaintenanceRules, StepOutcome};
use crate::update::Updater;
use crate::update::install_status::Repair;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time until the next step when no work is due, or after an error.
pub const IDLE: Duration = Duration::from_secs(1);

/// The maintenance of one flash directory.
pub struct MaintenanceSteps {
    /// The updates of the directory; `None` if it has none.
    updater: Option<Updater>,
    /// Whether the last scrub left damage that only a snapshot repairs; `None` once this is
    /// recorded.
    scrub_left_damage: Option<bool>,
    /// The live generation and the requested repair before the current pass of the scrub.
    before_pass: Option<(LiveId, Repair)>,
    flash: Flash,
    /// The catalog's path while another process has the catalog open, and so maintains the
    /// directory: two merges would write one file.
    catalog_in_use: Option<PathBuf>,
    rules: MaintenanceRules,
    maintenance: Maintenance,
    step_size: StepSize,
    /// The last logged wait, so that it is logged once.
    wait_logged: Option<StepOutcome>,
    /// The last logged error; empty after a step without one.
    error_logged: String,
}

/// Returns the bytes that an install of the live generation wrote.
fn installed_bytes(flash: &Flash) -> u64 {
    flash.manifest().blobs.iter().map(|b| b.raw_bytes()).sum()
}

impl MaintenanceSteps {
    /// Returns the maintenance of `flash` by `rules`. `updater` has the directory's updates. The
    /// counters are in the catalog at `catalog`; without a path they start from zero. `now` is the
    /// time since 1970.
    pub fn new(
        flash: Flash,
        updater: Option<Updater>,
        rules: MaintenanceRules,
        catalog: Option<&Path>,
        now: Duration,
    ) -> Self {
        let mut steps = Self {
            updater,
            scrub_left_damage: None,
            before_pass: None,
            flash,
            catalog_in_use: None,
            rules,
            maintenance: Maintenance::new(rules, None, CatalogEntries::lost()),
            step_size: StepSize::default(),
            wait_logged: None,
            error_logged: String::new(),
        };
        if let Some(path) = catalog {
            steps.open_catalog(path, now);
        }
        steps
    }

    /// Opens the catalog at `path`, unless another process has it open.
    fn open_catalog(&mut self, path: &Path, now: Duration) {
        let is_first = self.catalog_in_use.take().is_none();
        match Catalog::open(path, &self.flash) {
            Ok((catalog, entries, state)) => {
                self.maintenance = Maintenance::new(self.rules, Some(catalog), entries);
                if let CatalogState::Stale { .. } = state {
                    self.maintenance.count_written(now, installed_bytes(&self.flash));
                }
            }
            Err(e @ CatalogError::InUse { .. }) => {
                self.catalog_in_use = Some(path.to_owned());
                if is_first {
                    log::warn!("maintenance waits for the process that maintains: {e}");
                }
            }
            Err(e) => {
                log::warn!("maintenance starts without its catalog, which cannot be opened: {e}");
            }
        }
    }

    /// Takes one step, timed by `clock`; `now` is the time since 1970. Returns whether more work
    /// may be due. If not, the caller takes the next step after [`IDLE`]. The caller paces the
    /// work: its thread has one share of the time, whatever it does.
    pub fn step(&mut self, clock: &dyn Clock, now: Duration) -> bool {
        let start = clock.now();
        let stepped = self.follow_and_step(now);
        if stepped.is_ok() {
            self.error_logged.clear();
        }
        match stepped {
            Ok(StepOutcome::Nothing | StepOutcome::Waits { .. } | StepOutcome::Busy { .. }) => {
                false
            }
            Ok(_) => {
                self.step_size.adapt(clock.now().saturating_sub(start));
                true
            }
            Err(e) => {
                let error = e.to_string();
                if error != self.error_logged {
                    log::warn!("maintenance failed and will try again: {error}");
                    self.error_logged = error;
                }
                false
            }
        }
    }

    fn follow_and_step(&mut self, now: Duration) -> Result<StepOutcome, FlashError> {
        let order = |flash: &Flash| (flash.record().rebuilds, flash.manifest().generation.sequence);
        let before = order(&self.flash);
        if self.flash.refresh()? && order(&self.flash) != before {
            log::info!("{} is live on flash", self.flash.manifest().generation);
            // A rollback wrote nothing.
            if order(&self.flash) > before {
                self.maintenance.count_written(now, installed_bytes(&self.flash));
            }
        }

        if let Some(path) = self.catalog_in_use.clone() {
            self.open_catalog(&path, now);
            return Ok(StepOutcome::Nothing);
        }
        if self.before_pass.is_none() {
            self.before_pass = self.repair();
        }
        let did = self.maintenance.step(&mut self.flash, now, self.step_size.pages())?;
        self.log(&did);
        if let StepOutcome::ScrubEnded { damaged, .. } = did {
            // The pass says nothing of damage that was met meanwhile, nor of new files.
            let is_known = self.before_pass.take() == self.repair();
            self.scrub_left_damage = (damaged > 0 || is_known).then_some(damaged > 0);
        }
        self.record_scrub();
        Ok(did)
    }

    /// Returns the live generation and the repair that it needs; `None` without updates.
    fn repair(&self) -> Option<(LiveId, Repair)> {
        let status = self.updater.as_ref()?.install_status().ok()?;
        Some((self.flash.record().id(), status.repair))
    }

    /// Requests the next release as a snapshot if the last scrub left damage. Withdraws the request
    /// if it left none.
    fn record_scrub(&mut self) {
        let (Some(updater), Some(is_damaged)) = (&self.updater, self.scrub_left_damage) else {
            return;
        };
        let recorded = if is_damaged {
            updater.require_repair(Repair::NewerSnapshot)
        } else {
            updater.record_whole()
        };
        match recorded {
            Ok(()) => self.scrub_left_damage = None,
            Err(e) => log::debug!("the result of the scrub is not recorded yet: {e}"),
        }
    }

    fn log(&mut self, did: &StepOutcome) {
        let name = |table: &usize| &self.flash.manifest().schema.tables[*table].name;

        match did {
            StepOutcome::Nothing
            | StepOutcome::Scrubbed
            | StepOutcome::Merged { .. }
            | StepOutcome::Busy { .. } => {}
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

    /// Returns the maintenance, for its counters.
    pub fn maintenance(&self) -> &Maintenance {
        &self.maintenance
    }

    /// Makes the progress durable before the process ends. A merge continues from there at the next
    /// start.
    pub fn end(mut self, now: Duration) {
        match self.maintenance.pause(now) {
            Ok(()) => {
                let bytes = self.maintenance.wear().bytes_total;
                log::info!("maintenance stopped; it has written {bytes} bytes in all");
            }
            Err(e) => log::warn!("maintenance stopped and could not record its progress: {e}"),
        }
    }
}
