//! A process that serves a flash directory that another process updates. It loads the live
//! generation, and swaps to the next one after the other process made it live. Never writes to the
//! directory.

use crate::bundle::manifest::Generation;
use crate::flash::live::LiveId;
use crate::flash::{Flash, FlashError, read_settled};
use crate::io::disk::{Disk, Lock};
use crate::limits::REFUSED_LOOKS;
use crate::maintenance::share::Urgency;
use crate::model::budget::Budget;
use crate::request::serving::{Serving, ServingError, Swapped};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One model and the directory that it follows.
pub struct Follower {
    disk: Arc<dyn Disk>,
    directory: PathBuf,
    name: String,
    budget: Budget,
    /// The live generation that was refused, and the number of looks since. A look is a call of
    /// [`Follower::look`].
    refused: Option<(LiveId, u32)>,
}

impl Follower {
    /// Loads the live generation of `directory` into `serving`, as `name` or under its lineage.
    ///
    /// # Errors
    /// [`ServingError`] if it cannot be opened or does not fit the budget.
    pub fn load(
        disk: &Arc<dyn Disk>,
        directory: &Path,
        name: Option<&str>,
        serving: &Serving,
        budget: Budget,
    ) -> Result<Self, ServingError> {
        let place = || name.map_or_else(|| directory.display().to_string(), str::to_owned);
        let load = |flash: &Flash| {
            let name = name.unwrap_or(&flash.manifest().generation.lineage);
            serving.load(name, flash, budget).map(|_| name.to_owned())
        };
        let name = beside_merges(disk, directory, load).map_err(|e| unopened(place(), e))??;
        let (disk, directory) = (Arc::clone(disk), directory.to_owned());
        Ok(Self { disk, directory, name, budget, refused: None })
    }

    /// Returns the name that the model is served under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Swaps to the live generation if `serving` serves another one. Returns the generation and the
    /// counts of the swap. A refused generation is tried again after [`REFUSED_LOOKS`] looks. Calls
    /// `yield_now` between small pieces of work.
    ///
    /// # Errors
    /// [`ServingError`] if the generation is refused now. The one before is still served.
    pub fn look(
        &mut self,
        serving: &Serving,
        yield_now: &dyn Fn(Urgency),
    ) -> Result<Option<(Generation, Swapped)>, ServingError> {
        let Some(served) = serving.model(&self.name).map(|model| model.id()) else {
            return Ok(None);
        };
        let refused = &mut self.refused;
        let is_refused = |live: LiveId| match refused {
            Some((refused, looks)) if *refused == live && *looks < REFUSED_LOOKS => {
                *looks += 1;
                true
            }
            _ => false,
        };
        let changed = open_changed(&self.disk, &self.directory, Some(served), is_refused)
            .map_err(|e| unopened(self.name.clone(), e))?;
        let (flash, lock) = match changed {
            Changed::Served => {
                self.refused = None;
                return Ok(None);
            }
            Changed::Refused => return Ok(None),
            Changed::Open(flash, lock) => (flash, lock),
        };
        let _lock = match lock {
            Err(FlashError::Busy { .. }) => return Ok(None),
            lock => lock.ok(),
        };
        // A process without the right to take the lock opens without it, beside a merge.
        let swap = |flash: &Flash| {
            let swapped = serving.swap(&self.name, flash, self.budget, yield_now)?;
            Ok((flash.manifest().generation.clone(), swapped))
        };
        let swapped = beside_merges(&self.disk, &self.directory, swap)
            .unwrap_or_else(|e| Err(unopened(self.name.clone(), e)));
        self.refused = swapped.is_err().then_some((flash.record().id(), 0));
        swapped.map(Some)
    }
}

/// Opens the directory without its lock, and gives it to `read`. A merge may remove files
/// meanwhile, so both steps are repeated if the directory changed.
fn beside_merges<T>(
    disk: &Arc<dyn Disk>,
    directory: &Path,
    read: impl Fn(&Flash) -> Result<T, ServingError>,
) -> Result<Result<T, ServingError>, FlashError> {
    read_settled(|| Flash::open(disk, directory), |flash| Ok(read(flash)), Result::is_ok)
}

fn unopened(name: String, error: FlashError) -> ServingError {
    ServingError::Open { name, source: error.into() }
}

/// What the live record of a flash directory says to a process that serves the directory.
pub(crate) enum Changed {
    /// The live generation is the one that is served.
    Served,
    /// It was refused before.
    Refused,
    /// It is another one: the open directory, with its lock or the reason for none.
    Open(Box<Flash>, Result<Lock, FlashError>),
}

/// Opens the live generation of `directory` unless it is `served` or `is_refused`. The lock keeps a
/// merge from removing segments that are being opened.
pub(crate) fn open_changed(
    disk: &Arc<dyn Disk>,
    directory: &Path,
    served: Option<LiveId>,
    is_refused: impl FnOnce(LiveId) -> bool,
) -> Result<Changed, FlashError> {
    let flash = Flash::open(disk, directory)?;
    if served == Some(flash.record().id()) {
        return Ok(Changed::Served);
    }
    flash.check_servable()?;
    if is_refused(flash.record().id()) {
        return Ok(Changed::Refused);
    }

    let lock = flash.lock();
    let flash = match &lock {
        Err(FlashError::Busy { .. }) => flash,
        // A merge may have ended before the lock was taken.
        _ => Flash::open(disk, directory)?,
    };
    Ok(Changed::Open(Box::new(flash), lock))
}
