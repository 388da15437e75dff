//! One car's update: its directories, its two records and their locks. Never decides which release
//! comes next (`fetch.rs`) and never changes the live generation (`apply.rs`).

use crate::bundle::manifest::Hash;
use crate::flash::{Flash, FlashError, Found};
use crate::io::disk::{Disk, Lock};
use crate::limits::TRIALS_MAX;
use crate::update::error::{UpdateError, io_error};
use crate::update::fetch_status::{FetchStatus, Offer};
use crate::update::install_status::{InstallStatus, Repair, Retry};
use crate::update::program::Program;
use crate::update::release::Release;
use crate::update::status::UpdateStatus;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Longest time for which the owner's consent waits for a step of the serving process.
const CONSENT_WAIT: Duration = Duration::from_secs(2);

/// Updates one car's flash directory to a repository's newest release.
#[derive(Clone)]
pub struct Updater {
    /// The disk of both directories.
    pub disk: Arc<dyn Disk>,
    /// The sync directory. Only the sync process writes it.
    pub directory: PathBuf,
    /// The flash directory. Only the serving process writes it.
    pub flash: PathBuf,
    /// The model to follow while nothing is live. Needed if the repository has several models.
    pub lineage: Option<String>,
    /// This car's position in a gradual rollout: 0 is in the first per cent of the fleet, 99 in the
    /// last.
    pub cohort: u8,
    /// The version of the program. It skips a release that it cannot read. Another version tries
    /// again what this one could not install.
    pub program: Arc<Program>,
}

impl Updater {
    /// Returns the state of the update, from the records of both processes.
    ///
    /// # Errors
    /// `UpdateError::Io` if the device cannot read the serving process's record.
    pub fn status(&self) -> Result<UpdateStatus, UpdateError> {
        // The status must be readable although the flash is not.
        let live = self.live().ok().flatten().filter(|flash| flash.record().may_serve());
        let live = live.map(|flash| flash.manifest().generation.to_string());
        Ok(UpdateStatus::merge(self.fetch_status(), self.install_status()?, live))
    }

    /// Returns the lowest sequence that this car may serve: that of the newest generation which it
    /// committed, or without one, of the generation that was live last.
    ///
    /// # Errors
    /// `UpdateError::Flash` if the device refused.
    pub fn least(&self, install: &InstallStatus) -> Result<u64, UpdateError> {
        let Some(record) = Flash::last_record(self.disk.as_ref(), &self.flash)? else {
            return Ok(install.committed.as_ref().map_or(0, |newest| newest.sequence));
        };
        let live = &record.live.generation;
        // The directory may have another model since.
        let committed = install.committed.as_ref().filter(|g| g.lineage == live.lineage);
        Ok(committed.unwrap_or(live).sequence.max(record.least))
    }

    /// Returns the sync process's record. A missing or damaged record is read as the default.
    pub fn fetch_status(&self) -> FetchStatus {
        // The serving process reads it every second. The sync process says that it is lost.
        FetchStatus::read(self.disk.as_ref(), &self.directory, |_| ())
    }

    /// Returns the serving process's record. A missing or damaged record is read as the default.
    ///
    /// # Errors
    /// `UpdateError::Io` if the device cannot read the record.
    pub fn install_status(&self) -> Result<InstallStatus, UpdateError> {
        InstallStatus::read(self.disk.as_ref(), &self.flash)
    }

    /// Writes the sync process's record. The caller holds `fetching`.
    pub(super) fn write_fetch(&self, status: &mut FetchStatus) -> Result<(), UpdateError> {
        status.write(self.disk.as_ref(), &self.directory)
    }

    /// Writes the serving process's record. The caller holds `updating`.
    pub(super) fn write_install(&self, status: &mut InstallStatus) -> Result<(), UpdateError> {
        status.write(self.disk.as_ref(), &self.flash)
    }

    /// Takes the lock that each step of the serving process holds.
    pub(super) fn lock_install(&self) -> Result<Lock, UpdateError> {
        lock(self.disk.as_ref(), &self.flash, "updating", Duration::ZERO)
    }

    /// Takes the same lock, and waits for a step in progress. For the owner's consent and the
    /// process's end.
    pub(super) fn lock_consent(&self) -> Result<Lock, UpdateError> {
        lock(self.disk.as_ref(), &self.flash, "updating", CONSENT_WAIT)
    }

    /// Opens the live generation. Returns `None` if no generation is live, or if damage keeps it
    /// from being opened. An error of the device counts as damage while the record says that the
    /// generation cannot be opened: a block that cannot be read is lost.
    ///
    /// # Errors
    /// `UpdateError::Flash` if the device refused.
    pub(super) fn live(&self) -> Result<Option<Flash>, UpdateError> {
        self.find_live(log::Level::Debug)
    }

    /// Opens the live generation as [`Self::live`] does, and logs damage at `level`.
    ///
    /// # Errors
    /// As [`Self::live`].
    pub(super) fn find_live(&self, level: log::Level) -> Result<Option<Flash>, UpdateError> {
        let damage = match Flash::find(&self.disk, &self.flash) {
            Ok(Found::Live(flash)) => return Ok(Some(*flash)),
            Ok(Found::Nothing) => return Ok(None),
            Ok(Found::Damaged(e)) => e,
            Err(e @ FlashError::Io { .. }) if self.is_unopened()? => e,
            Err(e) => return Err(e.into()),
        };
        log::log!(level, "{}: counts as empty: {damage}", self.flash.display());
        Ok(None)
    }

    /// Returns whether the record says that the live generation cannot be opened.
    fn is_unopened(&self) -> Result<bool, UpdateError> {
        Ok(self.install_status()?.repair >= Repair::AnySnapshot)
    }

    /// Returns whether `release` is live, by the hash of its manifest.
    pub(super) fn is_live(&self, release: &Release) -> Result<bool, UpdateError> {
        Ok(self.live()?.is_some_and(|flash| flash.record().live.manifest == release.manifest))
    }

    /// Returns whether the live generation ended too many starts of this boot to be loaded. Updates
    /// run without it, and another generation may become live.
    pub(crate) fn is_held_back(&self) -> bool {
        let install = self.install_status().unwrap_or_default();
        install.loads > TRIALS_MAX && install.load_of == self.live_manifest()
    }

    /// Returns the hash of the live manifest by the live record, as far as it can be read.
    pub(super) fn live_manifest(&self) -> Option<Hash> {
        let record = Flash::last_record(self.disk.as_ref(), &self.flash).ok().flatten();
        record.map(|record| record.live.manifest)
    }

    /// Returns the free bytes of the flash directory's file system; 0 if it cannot tell.
    pub(super) fn free_bytes(&self) -> u64 {
        self.disk.free_bytes(&self.flash).unwrap_or(0)
    }

    /// Restores a lost or damaged copy of the live record from the other copy.
    ///
    /// # Errors
    /// `UpdateError::Flash` if no copy can be read or the copy cannot be written.
    pub(crate) fn restore_live_record(&self) -> Result<(), UpdateError> {
        Ok(Flash::restore_live_record(self.disk.as_ref(), &self.flash)?)
    }

    /// Returns whether the open offer must wait, because a fault of the car ended its last
    /// attempts.
    ///
    /// # Errors
    /// `UpdateError::Io` if the device cannot read the serving process's record.
    pub fn is_paused(&self, now: u64) -> Result<bool, UpdateError> {
        let install = self.install_status()?;
        let fetch = self.fetch_status();
        let is_paused =
            |offer: &Offer| offer.number != install.offer && install.retry_at(offer, now).is_some();
        if install.state.has_release() || !fetch.offer.as_ref().is_some_and(is_paused) {
            return Ok(false);
        }
        let retry = fetch.offer.and_then(|offer| Some(install.attempted(&offer.release)?.retry));
        let Some(Retry::WithRoom(needed)) = retry else { return Ok(true) };
        Ok(self.free_bytes() < needed)
    }
}

/// Takes the lock of the sync directory `directory`, which each writer of its records holds: a
/// fetch from its start to its end.
pub(super) fn lock_fetch(disk: &dyn Disk, directory: &Path) -> Result<Lock, UpdateError> {
    lock(disk, directory, "fetching", Duration::ZERO)
}

fn lock(
    disk: &dyn Disk,
    directory: &Path,
    name: &str,
    wait: Duration,
) -> Result<Lock, UpdateError> {
    let path = directory.join(name);
    disk.create_dir(directory).map_err(io_error(directory))?;
    disk.lock(&path, wait).map_err(io_error(&path))?.ok_or(UpdateError::Busy { path })
}
