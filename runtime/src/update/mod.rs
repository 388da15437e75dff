//! Updater: from a repository's signed releases to the live generation, and back if one does not
//! prove itself. Two sides share one directory and one record (`state.rs`): `fetch`, which has the
//! link and writes nothing but this directory, and `advance` (`apply.rs`), which has the flash
//! directory and no link. Each can be stopped anywhere and run again: every step is found done, or
//! done as far as it was, from what lies on disk.
//!
//! ```text
//! DIR/root.json timestamp.json ...  the newest signed metadata, as they came
//! DIR/root.factory root.2 ...       the root that was put here first, and those after it
//! DIR/floor.a floor.b               versions and time below which nothing is accepted
//! DIR/status                        the state of the update, and the last steps
//! DIR/lock                          held by whoever changes the status, for as long as that takes
//! DIR/fetching                      held by whoever fetches, waits for the link included
//! DIR/staged/HASH.manifest          a release's manifest
//! DIR/staged/HASH.hatch.part        its bundle, as far as it has come
//! DIR/staged/HASH.hatch             its bundle
//! DIR/staged/HASH.refused           why it is never to be installed again
//! ```

pub mod apply;
pub mod error;
pub mod link;
pub mod probe;
pub mod release;
pub mod rollback_floor;
pub mod staging;
pub mod state;
pub mod trust;

use crate::bundle::manifest::Generation;
use crate::flash::Flash;
use crate::io::disk::{Disk, Lock};
use crate::limits::CHUNK_BYTES;
use apply::Host;
use error::{UpdateError, io_error};
use link::Fetcher;
use release::{Release, lineage_of, releases, way};
use staging::Staging;
use state::{UpdateState, UpdateStatus};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use trust::Trust;

/// Bytes that are paid for at once.
const AHEAD_BYTES: u64 = 4 * CHUNK_BYTES as u64;

/// The status' lock is held for moments, but for some steps of the side that serves: how often it
/// is tried...
const LOCK_TRIES: u32 = 200;
/// ...and how long after each other.
const LOCK_WAIT: Duration = Duration::from_millis(10);

/// One car's sync.
#[derive(Clone)]
pub struct Updater {
    /// The disk of both directories.
    pub disk: Arc<dyn Disk>,
    /// The sync directory.
    pub directory: PathBuf,
    /// The flash directory.
    pub flash: PathBuf,
    /// Which model, where nothing is live yet and the repository has several.
    pub lineage: Option<String>,
    /// When this car gets a release that is given to a share of the fleet first: 0 with the first
    /// per cent, 99 with the last.
    pub cohort: u8,
}

impl Updater {
    /// Where the update is.
    ///
    /// # Errors
    /// The record cannot be read; one that is missing or damaged can be.
    pub fn status(&self) -> Result<UpdateStatus, UpdateError> {
        UpdateStatus::read(self.disk.as_ref(), &self.directory)
    }

    /// Both sides in turn, where one process is both, until nothing is left to do or the owner is
    /// to be asked. As of `now` (seconds since 1970); `progress` is told the bytes of the release
    /// in hand that are there, and of all of it.
    ///
    /// # Errors
    /// Why it stopped. What was live is live, or a release on the way to the newest.
    pub fn run(
        &self,
        fetcher: &mut Fetcher<'_>,
        host: &Host<'_>,
        now: u64,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<UpdateStatus, UpdateError> {
        loop {
            while self.advance(host, now)? {}
            let status = self.fetch(fetcher, now, &mut progress)?;
            if status.state != UpdateState::Staged && status.state != UpdateState::RollingBack {
                return Ok(status);
            }
            while self.advance(host, now)? {}
            let status = self.status()?;
            match status.state {
                UpdateState::Committed => {}
                UpdateState::Failed => {
                    let release =
                        status.release.map(|r| r.generation.to_string()).unwrap_or_default();
                    return Err(UpdateError::NotUsed {
                        release,
                        why: status.error.unwrap_or_default(),
                    });
                }
                _ => return Ok(status),
            }
        }
    }

    /// The side that fetches: takes up what was signed, and stages the next release on the way to
    /// the newest. Where the other side has a release in hand it only looks whether that one was
    /// taken back. While it waits for the link the record is the other side's to change.
    ///
    /// # Errors
    /// Why it stopped.
    pub fn fetch(
        &self,
        fetcher: &mut Fetcher<'_>,
        now: u64,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<UpdateStatus, UpdateError> {
        let _fetching = self.hold("fetching", 1)?;
        let mut paid = fetcher.bytes();
        self.pay(now, &mut paid)?;
        let ran = self.stage_next(fetcher, (now, &mut paid), &mut progress);
        let settled = self.change(|status| {
            status.bytes_received = fetcher.bytes();
            status.received.spend(Duration::from_secs(now), fetcher.bytes().saturating_sub(paid));
            status.received.refund(paid.saturating_sub(fetcher.bytes()));
            status.live = self.live().ok().flatten().map(|g| g.to_string());
            if let Err(e) = &ran
                && status.state.is_fetching()
            {
                status.enter(UpdateState::Failed, now, Some(e.to_string()));
            }
            Ok(status.clone())
        });
        ran?;
        settled
    }

    fn stage_next(
        &self,
        fetcher: &mut Fetcher<'_>,
        (now, paid): (u64, &mut u64),
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), UpdateError> {
        let targets = Trust::open(&self.disk, &self.directory)?.refresh(fetcher, now)?;
        let staged = self.directory.join("staged");
        let staging = Staging::open(self.disk.as_ref(), &staged)?;
        let listed = releases(&targets)?;
        let chosen = self.change(|status| {
            let release = self.choose(status, &staging, listed, now)?;
            Ok(release.map(|release| (release, (status.state, status.release.clone()))))
        })?;
        let Some((release, before)) = chosen else { return Ok(()) };
        staging.stage(&release, fetcher, |there, will_have| {
            progress(there, release.bytes);
            if will_have > *paid { self.pay(now, paid) } else { Ok(()) }
        })?;
        self.change(|status| {
            // The other side went on with what it had in hand, and the way may be another: the next
            // look tells.
            if before != (status.state, status.release.clone()) {
                return Ok(());
            }
            // What waited is on offer until the newer one is there whole.
            if let Some(older) = &status.release
                && older.manifest != release.manifest
            {
                staging.drop_bundle(older)?;
            }
            status.release = Some(release);
            status.enter(UpdateState::Staged, now, None);
            Ok(())
        })
    }

    /// The release to be fetched next of those `listed`, with what that makes of `status`; `None`
    /// where there is none.
    fn choose(
        &self,
        status: &mut UpdateStatus,
        staging: &Staging<'_>,
        mut listed: Vec<Release>,
        now: u64,
    ) -> Result<Option<Release>, UpdateError> {
        let all = listed.clone();
        let live = self.live()?;
        let lineage = lineage_of(live.as_ref(), self.lineage.as_deref(), &listed)?;
        listed.retain(|r| Some(&r.generation.lineage) == lineage.as_ref() && self.cohort < r.share);
        status.newest = listed.iter().map(|r| r.generation.sequence).max();
        status.withdrawn = live.as_ref().is_some_and(|live| status.newest < Some(live.sequence));
        let in_hand = status.release.clone().filter(|_| !status.state.is_fetching());
        let waits = matches!(status.state, UpdateState::Staged | UpdateState::AwaitConsent);
        let on_offer =
            in_hand.clone().filter(|hand| listed.iter().any(|r| r.manifest == hand.manifest));
        if in_hand.is_some() && !waits {
            if on_offer.is_none() {
                status.enter(UpdateState::RollingBack, now, Some("it was taken back".to_owned()));
            }
            return Ok(None);
        }
        listed.retain(|r| !staging.is_refused(r));
        let takes_deltas = live.is_some() && !Flash::open(&self.disk, &self.flash)?.is_full();
        let lineage = lineage.as_deref().unwrap_or_default();
        let next = way(live.map(|g| g.sequence), takes_deltas, lineage, &listed);
        let next = next.map(|way| way.into_iter().next());
        staging.reclaim(&all, next.as_ref().ok().into_iter().flatten().chain(&on_offer));
        let Some(release) = next? else {
            status.release = None;
            if !matches!(status.state, UpdateState::Idle | UpdateState::Committed) {
                status.enter(UpdateState::Idle, now, None);
            }
            return Ok(None);
        };
        if on_offer.as_ref().is_some_and(|hand| hand.manifest == release.manifest) {
            return Ok(None);
        }
        if on_offer.is_none() {
            status.release = Some(release.clone());
            status.starts = 0;
            status.enter(UpdateState::Notified, now, None);
            self.write(status)?;
            status.enter(UpdateState::Fetching, now, None);
        }
        Ok(Some(release))
    }

    /// Pays for the next bytes before they come, durably: a run that is killed has paid too much
    /// and never too little.
    fn pay(&self, now: u64, paid: &mut u64) -> Result<(), UpdateError> {
        *paid += AHEAD_BYTES;
        self.change(|status| {
            status.received.spend(Duration::from_secs(now), AHEAD_BYTES);
            Ok(())
        })
    }

    /// Lets `change` change the record, under its lock and durably; also what it changed before an
    /// error.
    fn change<T>(
        &self,
        change: impl FnOnce(&mut UpdateStatus) -> Result<T, UpdateError>,
    ) -> Result<T, UpdateError> {
        let _lock = self.lock()?;
        let mut status = self.status()?;
        let before = status.clone();
        let changed = change(&mut status);
        if status != before {
            self.write(&status)?;
        }
        changed
    }

    fn write(&self, status: &UpdateStatus) -> Result<(), UpdateError> {
        status.write(self.disk.as_ref(), &self.directory)
    }

    /// The lock of the record.
    fn lock(&self) -> Result<Lock, UpdateError> {
        self.hold("lock", LOCK_TRIES)
    }

    fn hold(&self, name: &str, tries: u32) -> Result<Lock, UpdateError> {
        let path = self.directory.join(name);
        self.disk.create_dir(&self.directory).map_err(io_error(&self.directory))?;
        for n in 0..tries {
            if n > 0 {
                std::thread::sleep(LOCK_WAIT);
            }
            if let Some(lock) = self.disk.lock(&path).map_err(io_error(&path))? {
                return Ok(lock);
            }
        }
        Err(UpdateError::Busy { path })
    }

    fn live(&self) -> Result<Option<Generation>, UpdateError> {
        match self.disk.read(&self.flash.join("live")) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            _ => Ok(Some(Flash::open(&self.disk, &self.flash)?.manifest().generation.clone())),
        }
    }

    /// Whether what is live is `release`.
    fn is_live(&self, release: &Release) -> Result<bool, UpdateError> {
        match self.live()? {
            None => Ok(false),
            Some(_) => {
                Ok(Flash::open(&self.disk, &self.flash)?.record().live.manifest == release.manifest)
            }
        }
    }
}
