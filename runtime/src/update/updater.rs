//! One car's update: its directories, its status record and the locks around that record. Never
//! decides which release comes next (`fetch.rs`) and never changes the live generation
//! (`apply.rs`).

use crate::bundle::manifest::Generation;
use crate::flash::Flash;
use crate::io::disk::{Disk, Lock};
use crate::update::error::{UpdateError, io_error};
use crate::update::release::Release;
use crate::update::state::UpdateStatus;
use std::io::ErrorKind::NotFound;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Longest wait for the status lock. Either process holds that lock only for moments, except in
/// some steps of `advance`.
const LOCK_WAIT: Duration = Duration::from_secs(2);

/// Brings one car's flash directory forward to a repository's newest release.
#[derive(Clone)]
pub struct Updater {
    /// The disk of both directories.
    pub disk: Arc<dyn Disk>,
    /// The sync directory.
    pub directory: PathBuf,
    /// The flash directory.
    pub flash: PathBuf,
    /// The model to follow while nothing is live. Needed if the repository has several models.
    pub lineage: Option<String>,
    /// This car's place in a gradual rollout: 0 is in the first per cent of the fleet, 99 in the
    /// last.
    pub cohort: u8,
}

impl Updater {
    /// Returns the status record. A missing or damaged record is read as the default.
    ///
    /// # Errors
    /// `UpdateError::Io` if the record exists and the disk does not give its bytes.
    pub fn status(&self) -> Result<UpdateStatus, UpdateError> {
        UpdateStatus::read(self.disk.as_ref(), &self.directory)
    }

    /// Runs `change` on the status record under its lock and writes the record durably if it
    /// changed. Changes that `change` made before it failed are written too.
    pub(super) fn change<T>(
        &self,
        change: impl FnOnce(&mut UpdateStatus) -> Result<T, UpdateError>,
    ) -> Result<T, UpdateError> {
        let _lock = self.lock_status()?;
        let mut status = self.status()?;
        let before = status.clone();
        let changed = change(&mut status);

        if status != before {
            self.write(&status)?;
        }
        changed
    }

    /// Writes `status` durably. The caller holds the status lock.
    pub(super) fn write(&self, status: &UpdateStatus) -> Result<(), UpdateError> {
        status.write(self.disk.as_ref(), &self.directory)
    }

    /// Takes the lock of the status record.
    pub(super) fn lock_status(&self) -> Result<Lock, UpdateError> {
        self.lock("lock", LOCK_WAIT)
    }

    /// Takes the lock that one fetch holds from its start to its end.
    pub(super) fn lock_fetch(&self) -> Result<Lock, UpdateError> {
        self.lock("fetching", Duration::ZERO)
    }

    fn lock(&self, name: &str, wait: Duration) -> Result<Lock, UpdateError> {
        let path = self.directory.join(name);
        self.disk.create_dir(&self.directory).map_err(io_error(&self.directory))?;
        let lock = self.disk.lock_within(&path, wait).map_err(io_error(&path))?;
        lock.ok_or(UpdateError::Busy { path })
    }

    /// Returns the live generation, or `None` if nothing is live.
    pub(super) fn live(&self) -> Result<Option<Generation>, UpdateError> {
        match self.disk.read(&self.flash.join("live")) {
            Err(e) if e.kind() == NotFound => Ok(None),
            _ => Ok(Some(Flash::open(&self.disk, &self.flash)?.manifest().generation.clone())),
        }
    }

    /// Returns whether `release` is live, by the hash of its manifest.
    pub(super) fn is_live(&self, release: &Release) -> Result<bool, UpdateError> {
        if self.live()?.is_none() {
            return Ok(false);
        }
        let flash = Flash::open(&self.disk, &self.flash)?;
        Ok(flash.record().live.manifest == release.manifest)
    }
}
