//! The maintenance of one flash directory: follows the generations that become live, takes one step
//! of work at a time and logs it. Never on the request path: a served model keeps its segments open
//! while maintenance removes their files.

use crate::clock::Clock;
use crate::flash::{Flash, FlashError};
use crate::maintenance::catalog::{Catalog, CatalogState};
use crate::maintenance::catalog_entries::CatalogEntries;
use crate::maintenance::step_size::StepSize;
use crate::maintenance::{Maintenance, MaintenanceRules, StepOutcome};
use crate::update::Updater;
use crate::update::install_status::Repair;
use std::path::Path;
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
    flash: Flash,
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
        let opened = catalog.map(|path| Catalog::open(path, &flash));
        let (catalog, entries, state) = match opened {
            None => (None, CatalogEntries::lost(), None),
            Some(Ok((catalog, entries, state))) => (Some(catalog), entries, Some(state)),
            Some(Err(e)) => {
                log::warn!("maintenance starts without its catalog, which cannot be opened: {e}");
                (None, CatalogEntries::lost(), None)
            }
        };

        let mut maintenance = Maintenance::new(rules, catalog, entries);
        if let Some(CatalogState::Stale { .. }) = state {
            maintenance.count_written(now, installed_bytes(&flash));
        }
        let step_size = StepSize::default();
        Self {
            updater,
            scrub_left_damage: None,
            flash,
            maintenance,
            step_size,
            wait_logged: None,
            error_logged: String::new(),
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
        let before = self.flash.manifest().generation.clone();
        if self.flash.refresh()? && self.flash.manifest().generation != before {
            log::info!("{} is live on flash", self.flash.manifest().generation);
            self.maintenance.count_written(now, installed_bytes(&self.flash));
        }

        let did = self.maintenance.step(&mut self.flash, now, self.step_size.pages())?;
        self.log(&did);
        if let StepOutcome::ScrubEnded { damaged, .. } = did {
            self.scrub_left_damage = Some(damaged > 0);
        }
        self.record_scrub();
        Ok(did)
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
