//! Sync: from a repository's signed releases to the live generation. One `run` refreshes what is trusted, picks
//! the way of fewest bytes, fetches, proves and stages each release and installs it. It can be stopped anywhere
//! and run again: every step is found done, or done as far as it was, from what lies on disk.
//!
//! ```text
//! DIR/root.json timestamp.json ...  the signed metadata, as they came
//! DIR/root.factory                  the root that was put here first
//! DIR/floor.a floor.b               versions and time below which nothing is accepted
//! DIR/status                        what the last run did (JSON)
//! DIR/lock                          held by the one process that syncs
//! DIR/staged/HASH.manifest          a release's manifest
//! DIR/staged/HASH.hatch.part        its bundle, as far as it has come
//! DIR/staged/HASH.hatch             its bundle
//! DIR/staged/HASH.refused           why it is never to be fetched again
//! ```

pub mod error;
pub mod floor;
pub mod link;
pub mod release;
pub mod stage;
pub mod trust;

use crate::bundle::BundleReader;
use crate::commit;
use crate::disk::Disk;
use crate::flash::{Flash, FlashError};
use crate::manifest::Generation;
use error::{SyncError, io_error};
use link::Fetcher;
use release::{Release, lineage_of, releases, way};
use serde::{Deserialize, Serialize};
use stage::Staging;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trust::Trust;

/// Where a sync is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    /// Nothing is to be done: what is live is the newest that can be reached.
    #[default]
    Idle,
    /// Taking up what was signed.
    Refreshing,
    /// Fetching a release.
    Fetching,
    /// Installing a release.
    Installing,
    /// The run stopped; `error` says why.
    Failed,
}

/// The status of a sync directory, as the last run left it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Where the run is, or how it ended.
    pub step: Step,
    /// When this was written, seconds since 1970.
    pub at: u64,
    /// What is live.
    pub live: Option<String>,
    /// The release being fetched or installed.
    pub release: Option<String>,
    /// The highest sequence that the repository lists.
    pub newest: Option<u64>,
    /// Releases that this run installed.
    pub installed: Vec<String>,
    /// Bytes that this run received.
    pub bytes_received: u64,
    /// Why it stopped.
    pub error: Option<String>,
}

/// One car's sync.
pub struct Sync {
    /// The disk of both directories.
    pub disk: Arc<dyn Disk>,
    /// The sync directory.
    pub directory: PathBuf,
    /// The flash directory.
    pub flash: PathBuf,
    /// Which model, where nothing is live yet and the repository has several.
    pub lineage: Option<String>,
}

impl Sync {
    /// The status that the last run left; the default if there was none.
    pub fn status(&self) -> Status {
        let bytes = self.disk.read(&self.directory.join("status")).unwrap_or_default();
        serde_json::from_slice(&bytes).unwrap_or_default()
    }

    /// Brings the flash directory forward as of `now` (seconds since 1970). `progress` is told the bytes of the
    /// release in hand that are there, and of all of it.
    ///
    /// # Errors
    /// Why it stopped. What was live is live, or a release on the way to the newest.
    pub fn run(
        &self,
        fetcher: &mut Fetcher<'_>,
        now: u64,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<Status, SyncError> {
        let path = self.directory.join("lock");
        self.disk.create_dir(&self.directory).map_err(io_error(&self.directory))?;
        let lock = self.disk.lock(&path).map_err(io_error(&path))?;
        let _lock = lock.ok_or(SyncError::Busy { path })?;
        let mut status = Status { step: Step::Refreshing, at: now, ..Status::default() };
        let ran = self.forward(fetcher, now, &mut status, &mut progress);
        status.bytes_received = fetcher.bytes();
        status.live = self.live().ok().flatten().map(|g| g.to_string());
        match &ran {
            Ok(()) => (status.step, status.release) = (Step::Idle, None),
            Err(e) => (status.step, status.error) = (Step::Failed, Some(e.to_string())),
        }
        let saved = self.save(&status);
        ran?;
        saved?;
        Ok(status)
    }

    fn forward(
        &self,
        fetcher: &mut Fetcher<'_>,
        now: u64,
        status: &mut Status,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), SyncError> {
        let targets = Trust::open(&self.disk, &self.directory)?.refresh(fetcher, now)?;
        let staged = self.directory.join("staged");
        let staging = Staging::open(self.disk.as_ref(), &staged)?;
        let mut listed = releases(&targets)?;
        staging.reclaim(&listed);
        let live = self.live()?;
        let Some(lineage) = lineage_of(live.as_ref(), self.lineage.as_deref(), &listed)? else {
            return Ok(());
        };
        listed.retain(|r| r.generation.lineage == lineage);
        status.newest = listed.iter().map(|r| r.generation.sequence).max();
        listed.retain(|r| !staging.is_refused(r));
        for release in way(live.map(|g| g.sequence), &lineage, &listed)? {
            status.release = Some(release.generation.to_string());
            self.note(status, Step::Fetching)?;
            let bundle = staging.stage(&release, fetcher, |bytes| progress(bytes, release.bytes))?;
            self.note(status, Step::Installing)?;
            self.install(&staging, &release, &bundle)?;
            status.installed.push(release.generation.to_string());
        }
        Ok(())
    }

    fn live(&self) -> Result<Option<Generation>, SyncError> {
        match self.disk.read(&self.flash.join("live")) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            _ => Ok(Some(Flash::open(&self.disk, &self.flash)?.manifest().generation.clone())),
        }
    }

    /// A bundle that is not installed although it is what was signed is the publisher's fault, and not fetched
    /// again; one that is damaged is fetched again.
    fn install(&self, staging: &Staging<'_>, release: &Release, bundle: &Path) -> Result<(), SyncError> {
        let opened = BundleReader::open_on(self.disk.as_ref(), bundle).map_err(FlashError::from);
        let installed =
            opened.and_then(|mut bundle| Flash::install(&self.disk, &self.flash, &mut bundle, |_| {}));
        match installed {
            Ok(_) => staging.drop_bundle(release),
            Err(e) if blames_bundle(&e) => {
                if staging.is_sound(release) {
                    staging.refuse(release, &e.to_string())?;
                }
                staging.drop_bundle(release)?;
                Err(e.into())
            }
            // No room, another process, the car's own flash: the bundle waits.
            Err(e) => Err(e.into()),
        }
    }

    fn note(&self, status: &mut Status, step: Step) -> Result<(), SyncError> {
        status.step = step;
        self.save(status)
    }

    fn save(&self, status: &Status) -> Result<(), SyncError> {
        let path = self.directory.join("status");
        // A status always has a form in JSON.
        let text = serde_json::to_vec_pretty(status).unwrap_or_default();
        commit::replace(self.disk.as_ref(), &path, &text).map_err(io_error(&path))
    }
}

fn blames_bundle(error: &FlashError) -> bool {
    matches!(
        error,
        FlashError::Bundle(_)
            | FlashError::Segment(_)
            | FlashError::Dense { .. }
            | FlashError::Probe { .. }
            | FlashError::Schema { .. }
            | FlashError::Lineage { .. }
    )
}
