//! The state folder of `select`: what the fleet holds, as a flash directory, and the backlog, which
//! is a window. Only published bundles are installed, each onto its exact parent. Holds a lock
//! while it is open. Never chooses a row.

use crate::window::folder::{closed_windows, window_folder};
use crate::window::{BacklogState, HeldGeneration, Window, WindowError};
use anyhow::{Context, Result, bail, ensure};
use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::hex;
use hatchback::flash::Flash;
use hatchback::io::disk::{self, Disk, Lock};
use hatchback::maintenance::compact::Compaction;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Deltas of a table at which `select` merges them, so that a row is in few segments.
const MERGE_DELTAS: usize = 8;
/// Pages of one step of a merge.
const MERGE_PAGES: u64 = 4096;

/// An open folder of `select`.
pub struct SelectState {
    folder: PathBuf,
    disk: Arc<dyn Disk>,
    _lock: Lock,
    /// What the fleet holds.
    pub fleet: Flash,
    /// The rows that the fleet does not hold yet; `None` before the first selection.
    pub backlog: Option<Window>,
    /// The number of the next backlog.
    next: u64,
}

impl SelectState {
    /// Opens `folder`. Installs `base` first if the folder is new, and then each of `published`
    /// that the fleet does not hold yet.
    ///
    /// # Errors
    /// The folder is new and there is no base, a bundle is refused, another process has the folder
    /// open, or a file cannot be read.
    pub fn open(folder: &Path, base: Option<&Path>, published: &[PathBuf]) -> Result<Self> {
        let disk = disk::system();
        disk.create_dir(folder).map_err(WindowError::io(folder))?;
        let path = folder.join("lock");
        let lock = disk.lock(&path, Duration::ZERO).map_err(WindowError::io(&path))?;
        let lock = lock.with_context(|| {
            format!("{}: another `select` has the folder open", folder.display())
        })?;

        let mut fleet = open_fleet(&disk, &folder.join("fleet"), base)?;
        for bundle in published {
            fleet = advance(&disk, fleet, bundle)?;
        }
        merge_deltas(&mut fleet)?;

        let (backlog, next) = open_backlog(disk.as_ref(), &folder.join("backlog"))?;
        let state = Self { folder: folder.to_owned(), disk, _lock: lock, fleet, backlog, next };
        state.check_held()?;
        Ok(state)
    }

    /// Checks that the fleet is not older than the generation that the backlog was compared with.
    fn check_held(&self) -> Result<()> {
        let Some(backlog) = self.recorded() else { return Ok(()) };
        let (held, fleet) = (&backlog.held, self.held());
        let is_same = held.sequence == fleet.sequence && held.manifest == fleet.manifest;
        ensure!(
            is_same || held.sequence < fleet.sequence,
            "{}: the fleet holds {}, but the backlog was compared with sequence {}; begin a new \
             state folder with a snapshot that is at least as new as the newest window",
            self.folder.display(),
            self.fleet.manifest().generation,
            held.sequence
        );
        Ok(())
    }

    /// Returns what the backlog records beside its rows.
    pub fn recorded(&self) -> Option<&BacklogState> {
        self.backlog.as_ref().and_then(|backlog| backlog.head.backlog.as_ref())
    }

    /// Returns the generation that the fleet holds.
    pub fn held(&self) -> HeldGeneration {
        let live = &self.fleet.record().live;
        HeldGeneration { sequence: live.generation.sequence, manifest: hex(&live.manifest) }
    }

    /// Returns the number and the folder of the next backlog. Removes what an earlier attempt left
    /// there.
    ///
    /// # Errors
    /// The folder cannot be emptied.
    pub fn next_backlog(&self) -> Result<(u64, PathBuf), WindowError> {
        let folder = window_folder(&self.folder.join("backlog"), self.next);
        match self.disk.remove_file(&folder) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(WindowError::Io { path: folder, source: e })
            }
            _ => Ok((self.next, folder)),
        }
    }

    /// Opens the backlog that was written into the folder of [`SelectState::next_backlog`], and
    /// removes the one before.
    ///
    /// # Errors
    /// The new backlog cannot be opened.
    pub fn replace_backlog(&mut self, folder: &Path) -> Result<(), WindowError> {
        let parent = self.folder.join("backlog");
        self.disk.sync_dir(&parent).map_err(WindowError::io(&parent))?;
        let old = self.backlog.replace(Window::open(folder)?);
        self.next += 1;
        if let Some(old) = old {
            // The next run removes any rest.
            let _ = self.disk.remove_file(old.folder());
        }
        Ok(())
    }

    /// Returns the path of a draft of a bundle, which is never published.
    pub fn draft(&self) -> PathBuf {
        self.folder.join("draft.hatch")
    }

    /// Returns the disk.
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }
}

fn open_fleet(disk: &Arc<dyn Disk>, directory: &Path, base: Option<&Path>) -> Result<Flash> {
    if Flash::has_live_record(disk.as_ref(), directory) {
        return Ok(Flash::open(disk, directory)?);
    }
    let Some(base) = base else {
        bail!("{}: is new; pass the fleet's snapshot with --base", directory.display())
    };
    let mut bundle = BundleReader::open(base)?;
    ensure!(
        bundle.manifest().parent.is_none(),
        "{}: is a delta; a state folder begins with a snapshot",
        base.display()
    );
    Ok(Flash::install(disk, directory, &mut bundle, |_| ())?)
}

/// Installs the published delta `path`, unless the fleet holds it or a later one already.
fn advance(disk: &Arc<dyn Disk>, fleet: Flash, path: &Path) -> Result<Flash> {
    let mut bundle = BundleReader::open(path)?;
    let (live, offered) = (&fleet.manifest().generation, &bundle.manifest().generation);
    if live.lineage == offered.lineage && offered.sequence < live.sequence {
        return Ok(fleet);
    }
    ensure!(
        bundle.manifest().parent.is_some(),
        "{}: is a snapshot, which may lack rows that this folder counts as held; begin a new state \
         folder with --base",
        path.display()
    );
    // Rows and network of the windows that wait here would take the fleet back behind it.
    ensure!(
        bundle.manifest().deferral.is_some(),
        "{}: was packed, not selected, so it has newer rows than windows from before it; begin new \
         folders of windows and of state with --base",
        path.display()
    );
    let directory = fleet.directory().to_owned();
    Flash::install(disk, &directory, &mut bundle, |_| ())
        .with_context(|| format!("{}: does not follow what the fleet holds", path.display()))
}

/// Merges the deltas of each table that has too many.
fn merge_deltas(fleet: &mut Flash) -> Result<()> {
    for table in 0..fleet.record().live.tables.len() {
        if fleet.record().live.tables[table].deltas.len() < MERGE_DELTAS {
            continue;
        }
        let Some(mut merge) = Compaction::begin(fleet, table)? else { continue };
        while merge.step(fleet, MERGE_PAGES, u64::MAX)? {}
        merge.finish(fleet)?;
    }
    Ok(())
}

/// Opens the newest closed backlog in `folder` and removes everything else there. Returns it with
/// the number of the next one.
fn open_backlog(disk: &dyn Disk, folder: &Path) -> Result<(Option<Window>, u64), WindowError> {
    disk.create_dir(folder).map_err(WindowError::io(folder))?;
    let Some(newest) = closed_windows(folder)?.pop() else { return Ok((None, 1)) };
    let backlog = Window::open(&newest.folder)?;
    for path in disk.list(folder).map_err(WindowError::io(folder))? {
        if path != newest.folder {
            disk.remove_file(&path).map_err(WindowError::io(&path))?;
        }
    }
    Ok((Some(backlog), newest.number + 1))
}
