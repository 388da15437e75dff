//! What a process records of its own: its starts, the trials of a release on probation, and the
//! repair that the live generation needs.

use crate::flash::Flash;
use crate::io::disk::Lock;
use crate::update::error::UpdateError;
use crate::update::fetch_status::Offer;
use crate::update::history::last_order;
use crate::update::install_status::{Blame, InstallState, InstallStatus, Repair, Watched};
use crate::update::release::Release;
use crate::update::updater::Updater;

impl Updater {
    /// Begins the work of a process, and counts the start of a trial of the release on probation:
    /// the process is about to open it. If the process or the machine ended too many trials, the
    /// release is rolled back. The process calls this once, before it opens the live generation.
    /// `boot` differs after each start of the machine. It tells a trial that ended with a crash
    /// from one that ended with a restart of the machine.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be read or written.
    pub fn begin_process(&self, boot: u64, now: u64) -> Result<(), UpdateError> {
        let _lock = self.lock_install()?;
        let mut status = self.known_status()?;
        let is_known = status.writes > 0;
        status.begin_process(&self.program.version);
        status.count_load(boot, self.live_manifest());
        let known = last_order(&self.fetch_status().history);
        // The process ended between the commit and the record of it. The live release passed its
        // probe, and its starts count from here on.
        if self.is_committed(&status)? {
            status.end_trial();
            status.enter(InstallState::Probation, now, known, None);
        }
        if !status.is_on_probation() {
            // Without a record `adopt_unjudged` must still act if there is a previous generation,
            // so none is made here then.
            let record = Flash::last_record(self.disk.as_ref(), &self.flash)?;
            let is_first = record.is_some_and(|record| record.previous.is_none());
            return if is_known || is_first { self.write_install(&mut status) } else { Ok(()) };
        }
        if let Some(reason) = status.count_trial(boot) {
            status.blame = Blame::Release;
            status.enter(InstallState::RollingBack, now, known, Some(reason));
        }
        self.write_install(&mut status)
    }

    /// Returns whether the release that is being applied is live already, and served.
    fn is_committed(&self, status: &InstallStatus) -> Result<bool, UpdateError> {
        // A snapshot of the live release may have to replace its damaged files first.
        if status.state != InstallState::Applying || status.repair >= Repair::AnySnapshot {
            return Ok(false);
        }
        let Some(release) = &status.release else { return Ok(false) };
        let is_it = |live: &Flash| live.record().live.manifest == release.manifest;
        Ok(self.live()?.is_some_and(|live| is_it(&live) && live.record().may_serve()))
    }

    /// Records that the start has loaded the model.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be read or written.
    pub fn record_loaded(&self) -> Result<(), UpdateError> {
        self.change_install(Self::lock_install, InstallStatus::end_load)
    }

    /// Ends a trial as passed: the release answered requests.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be read or written.
    pub fn end_trial(&self) -> Result<(), UpdateError> {
        self.end_trial_under(Self::lock_install, Watched::default())
    }

    /// Ends a trial as passed, because the process ends normally, and stores what it observed of
    /// the release on probation. Waits for a step in progress.
    ///
    /// # Errors
    /// Those of [`Updater::end_trial`].
    pub fn end_process(&self, watched: Watched) -> Result<(), UpdateError> {
        self.end_trial_under(Self::lock_consent, watched)
    }

    fn end_trial_under(
        &self,
        lock: fn(&Self) -> Result<Lock, UpdateError>,
        watched: Watched,
    ) -> Result<(), UpdateError> {
        self.change_install(lock, |status| {
            let (has_trial, stored) = (status.has_open_trial(), status.watched);
            if has_trial {
                status.end_trial();
            }
            let is_open = status.end_load() || has_trial;
            if status.is_on_probation() {
                status.observe(watched);
            }
            is_open || status.watched != stored
        })
    }

    /// Makes one change of the record under `lock`. `change` returns whether it changed anything.
    fn change_install(
        &self,
        lock: fn(&Self) -> Result<Lock, UpdateError>,
        change: impl Fn(&mut InstallStatus) -> bool,
    ) -> Result<(), UpdateError> {
        // This look needs no lock. Nearly every call changes nothing, perhaps during a step.
        if !change(&mut self.install_status()?) {
            return Ok(());
        }
        let _lock = lock(self)?;
        // Read and judged again: another writer may have changed the record before the lock.
        let mut status = self.known_status()?;
        if change(&mut status) { self.write_install(&mut status) } else { Ok(()) }
    }

    /// Reads the record to change it. The caller has the lock.
    pub(super) fn known_status(&self) -> Result<InstallStatus, UpdateError> {
        let mut status = self.install_status()?;
        if status.writes == 0 {
            self.adopt_unjudged(&mut status)?;
        }
        Ok(status)
    }

    /// Records that a scrub found every page of the live generation whole.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be read or written.
    pub fn record_whole(&self) -> Result<(), UpdateError> {
        self.change_repair(|repair| match repair {
            Repair::NewerSnapshot | Repair::Replacement => Repair::None,
            repair => repair,
        })
    }

    /// Records that the live generation was opened, so that it needs no snapshot to be served.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be read or written.
    pub fn record_opened(&self) -> Result<(), UpdateError> {
        self.change_repair(|repair| match repair {
            Repair::AnySnapshot => Repair::NewerSnapshot,
            repair => repair,
        })
    }

    /// Records which snapshot would repair the live generation.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be read or written.
    pub fn require_repair(&self, repair: Repair) -> Result<(), UpdateError> {
        self.change_repair(|before| before.max(repair))
    }

    fn change_repair(&self, change: impl Fn(Repair) -> Repair) -> Result<(), UpdateError> {
        self.change_install(Self::lock_install, |status| {
            let before = status.repair;
            status.repair = change(before);
            status.repair != before
        })
    }

    /// Adopts a live generation of which there is no record, if a previous generation is kept for a
    /// rollback. The record of its probation is lost, so the probation starts again.
    fn adopt_unjudged(&self, status: &mut InstallStatus) -> Result<(), UpdateError> {
        let Some(live) = self.live()?.filter(|live| live.record().previous.is_some()) else {
            return Ok(());
        };
        log::warn!("{}: its probation starts again", live.manifest().generation);
        let release = Release {
            generation: live.manifest().generation.clone(),
            parent: live.manifest().parent,
            share: 100,
            manifest: live.record().live.manifest,
            ..Release::default()
        };
        status.take_up(&Offer { number: 0, release });
        status.state = InstallState::Applying;
        Ok(())
    }
}
