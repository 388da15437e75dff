//! The catalog: a sled database beside the segments. Its one value has the wear state and the
//! position of the scrub. It holds no row and no commit point, so no request and no install depends
//! on sled. A stale or damaged catalog is moved aside, and a new one begins. The catalog never
//! decides which generation is live.

use crate::flash::Flash;
use crate::io::disk;
use crate::limits::QUARANTINED_CATALOGS_MAX;
use crate::maintenance::catalog_entries::CatalogEntries;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The key of the value.
const KEY: &[u8] = b"entries";
/// Bytes of sled's own cache. The catalog is smaller.
const CACHE_BYTES: u64 = 16 << 20;
/// Number of attempts to take the lock of a catalog that is being closed, and the time between
/// them: 1 s in all.
const LOCK_WAITS: u32 = 200;
const LOCK_WAIT: Duration = Duration::from_millis(5);

/// Why the catalog cannot be used. Serving is not affected.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CatalogError {
    /// The system refused to read or write a file.
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    /// sled returned an error or panicked, or the value is missing or does not decode.
    #[error("{path}: {problem}", path = path.display())]
    Sled { path: PathBuf, problem: String },
    /// Another process has the catalog open.
    #[error("{path}: is in use by another process", path = path.display())]
    InUse { path: PathBuf },
}

/// The state in which `open` found the catalog.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum CatalogState {
    /// Whole, and written for the live generation.
    Kept,
    /// The directory did not exist.
    Missing,
    /// Written for the generation with `sequence`, which is not the live one.
    Stale { sequence: u64 },
    /// Unreadable, or changed since it was written.
    Damaged { error: String },
}

/// An open catalog.
pub struct Catalog {
    directory: PathBuf,
    /// `None` only while the catalog is being dropped.
    db: Option<sled::Db>,
    /// The file in which sled stores the database.
    file: File,
    quarantined: u64,
}

/// Removes files that sled did not make, such as a link or a pipe in place of the directory or of
/// one of its files. The database would follow the link or wait for the pipe.
fn remove_foreign(directory: &Path) -> io::Result<()> {
    let found = match fs::symlink_metadata(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?.file_type(),
    };
    if !found.is_dir() {
        // `open` moves a file aside.
        return if found.is_file() { Ok(()) } else { fs::remove_file(directory) };
    }
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        // sled stores large values in the folder `blobs`. The catalog has none.
        let is_expected = kind.is_file() || kind.is_dir() && entry.file_name() == "blobs";
        if !is_expected {
            log::warn!("{}: is no file of the catalog and is removed", entry.path().display());
            if kind.is_dir() {
                fs::remove_dir_all(entry.path())
            } else {
                fs::remove_file(entry.path())
            }?;
        }
    }
    Ok(())
}

impl Catalog {
    /// Opens the catalog in `directory`, or rebuilds a missing, stale or damaged one. Returns the
    /// catalog, its entries and the state in which it was.
    ///
    /// # Errors
    /// [`CatalogError::InUse`] if another process has the catalog open; [`CatalogError`] if it can
    /// be neither read nor rebuilt.
    pub fn open(
        directory: &Path,
        flash: &Flash,
    ) -> Result<(Self, CatalogEntries, CatalogState), CatalogError> {
        remove_foreign(directory).map_err(io_error(directory))?;
        if !directory.try_exists().map_err(io_error(directory))? {
            return Self::rebuild(
                directory,
                CatalogEntries::default(),
                flash,
                CatalogState::Missing,
            );
        }
        if !is_free(directory) {
            return Err(CatalogError::InUse { path: directory.to_owned() });
        }

        let (entries, found) = match Self::read(directory) {
            Err(error) => {
                // The bytes written today are unknown. Assuming none would allow a second budget
                // after each loss.
                (CatalogEntries::lost(), CatalogState::Damaged { error: error.to_string() })
            }
            Ok((catalog, mut entries))
                if entries.sequence == flash.record().live.generation.sequence =>
            {
                entries.follow(flash);
                return Ok((catalog, entries, CatalogState::Kept));
            }
            // The wear state is valid for any live generation.
            Ok((_, old)) => (old.device_wide(), CatalogState::Stale { sequence: old.sequence }),
        };

        // The database that `read` opened may still be closing. After a panic of sled it may stay
        // open. The rename works in both cases.
        is_free(directory);
        let aside = quarantine(directory)?;
        let (old, new) = (aside.display(), directory.display());
        match &found {
            // A process that ends soon after an update leaves such a catalog.
            CatalogState::Stale { sequence } => {
                log::info!("{new}: the catalog of sequence {sequence} was moved to {old}, rebuilt");
            }
            CatalogState::Damaged { error } => {
                log::warn!("{new}: the catalog was moved to {old} and rebuilt: {error}");
            }
            CatalogState::Kept | CatalogState::Missing => {}
        }
        Self::rebuild(directory, entries, flash, found)
    }

    /// Returns the catalog's directory in a flash directory.
    pub fn path_in(flash: &Path) -> PathBuf {
        flash.join("catalog")
    }

    /// Reads the entries of the catalog in `directory` from a copy of its files in `scratch`, an
    /// empty directory. Does not change the catalog, and does not disturb a process that has it
    /// open. A copy taken during a commit may not decode.
    ///
    /// # Errors
    /// [`CatalogError`] if there is no catalog or the copy is not of one commit.
    pub fn peek(directory: &Path, scratch: &Path) -> Result<CatalogEntries, CatalogError> {
        for entry in fs::read_dir(directory).map_err(io_error(directory))? {
            let path = entry.map_err(io_error(directory))?.path();
            // sled stores only values larger than any entry of the catalog in a folder.
            if let (true, Some(name)) = (path.is_file(), path.file_name()) {
                fs::copy(&path, scratch.join(name)).map_err(io_error(&path))?;
            }
        }
        Self::read(scratch).map(|(_, entries)| entries)
    }

    /// Returns the number of catalogs that were moved aside so far.
    pub fn quarantined(&self) -> u64 {
        self.quarantined
    }

    /// Commits `entries`, durable when this returns. If the file has damage that sled did not
    /// notice, a later open may return the entries of an earlier commit.
    ///
    /// # Errors
    /// [`CatalogError`] if sled or the device refused; the catalog on flash then holds the old or
    /// the new entries.
    pub fn write(&self, entries: &CatalogEntries) -> Result<(), CatalogError> {
        let Some(db) = &self.db else { return Ok(()) };
        guarded(&self.directory, || {
            db.insert(KEY, entries.encode())?;
            db.flush().map(drop)
        })?;
        // sled's flush ends in sync_file_range, which leaves the data in the device's cache.
        // Without this sync a power cut loses an acknowledged batch.
        self.file.sync_all().map_err(io_error(&self.directory))
    }

    fn rebuild(
        directory: &Path,
        mut entries: CatalogEntries,
        flash: &Flash,
        found: CatalogState,
    ) -> Result<(Self, CatalogEntries, CatalogState), CatalogError> {
        entries.follow(flash);
        fs::create_dir_all(directory).map_err(io_error(directory))?;
        let catalog = Self::open_sled(directory)?;
        catalog.write(&entries)?;

        // The sync of a file does not make its name durable.
        for path in [directory, disk::directory_of(directory)] {
            File::open(path).and_then(|d| d.sync_all()).map_err(io_error(path))?;
        }
        Ok((catalog, entries, found))
    }

    fn open_sled(directory: &Path) -> Result<Self, CatalogError> {
        // Who may read the database could hold its lock.
        let private = Permissions::from_mode(0o700);
        fs::set_permissions(directory, private).map_err(io_error(directory))?;
        let config =
            // No flushes by a thread of sled: `write` makes each commit durable, and its caller
            // counts the wear.
            sled::Config::new().path(directory).cache_capacity(CACHE_BYTES).flush_every_ms(None);
        let db = guarded(directory, || config.open())?;
        let path = directory.join("db");
        let file = File::open(&path).map_err(io_error(&path))?;

        let quarantined = quarantines(directory).map_err(io_error(directory))?;
        let quarantined = quarantined.last().map_or(0, |(n, _)| *n);
        let (directory, db) = (directory.to_owned(), Some(db));
        Ok(Self { directory, db, file, quarantined })
    }

    /// Opens an existing catalog and decodes its value.
    fn read(directory: &Path) -> Result<(Self, CatalogEntries), CatalogError> {
        let catalog = Self::open_sled(directory)?;
        let value = guarded(directory, || catalog.db.as_ref().map_or(Ok(None), |db| db.get(KEY)))?;
        // Missing bytes do not decode.
        let entries = CatalogEntries::decode(&value.unwrap_or_default());
        let refused = |problem| CatalogError::Sled { path: directory.to_owned(), problem };
        Ok((catalog, entries.map_err(refused)?))
    }
}

impl Drop for Catalog {
    fn drop(&mut self) {
        let db = self.db.take();
        if let Err(e) = guarded(&self.directory, || {
            drop(db);
            Ok(())
        }) {
            log::warn!("the catalog did not close cleanly, the next open checks it: {e}");
        }
    }
}

/// Calls sled and converts a panic into an error. sled panics instead of returning an error when
/// its file changed, at open and later. Such a panic counts as damage and must not end the process
/// that serves requests.
fn guarded<T>(directory: &Path, call: impl FnOnce() -> sled::Result<T>) -> Result<T, CatalogError> {
    let problem = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(e)) => e.to_string(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            format!("sled panicked: {}", text.unwrap_or("without a message"))
        }
    };
    Err(CatalogError::Sled { path: directory.to_owned(), problem })
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> CatalogError + '_ {
    move |source| CatalogError::Io { path: path.to_owned(), source }
}

/// Returns whether no process has the catalog open. An open catalog is not damaged and must not be
/// moved. This function waits, because sled releases its lock some time after a close, when its
/// threads have ended.
fn is_free(directory: &Path) -> bool {
    let Ok(file) = File::open(directory.join("db")) else { return true };
    for _ in 0..LOCK_WAITS {
        if flock(&file, FlockOperation::NonBlockingLockExclusive) != Err(Errno::WOULDBLOCK) {
            return true;
        }
        std::thread::sleep(LOCK_WAIT);
    }
    false
}

/// Returns the numbers and paths of the catalogs that were moved aside and still exist, oldest
/// first.
fn quarantines(directory: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    let start = format!("{name}.bad-");
    let mut found = Vec::new();
    for entry in fs::read_dir(disk::directory_of(directory))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if let Some(Ok(number)) = name.strip_prefix(&start).map(str::parse) {
            found.push((number, path));
        }
    }
    found.sort();
    Ok(found)
}

/// Moves the catalog aside and removes older ones. Returns its new path.
fn quarantine(directory: &Path) -> Result<PathBuf, CatalogError> {
    let old = quarantines(directory).map_err(io_error(directory))?;
    let number = old.last().map_or(0, |(n, _)| *n).saturating_add(1);
    let aside = directory.with_extension(format!("bad-{number}"));
    fs::rename(directory, &aside).map_err(io_error(directory))?;

    for (_, path) in old.iter().rev().skip(QUARANTINED_CATALOGS_MAX - 1) {
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        if let Err(e) = removed {
            log::warn!("{}: the old catalog was not removed: {e}", path.display());
        }
    }
    Ok(aside)
}
