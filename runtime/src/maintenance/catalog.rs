//! The catalog: what is nice to have beside the segments and can be had again without it, in sled.
//! Holds no commit point and no row: lost, stale, damaged or full of garbage, it is moved aside and
//! made anew from the live record and the segments. Never says what is live.

use crate::flash::Flash;
use crate::maintenance::catalog_entries::{CatalogEntries, Entries};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Memory for sled's own cache; the catalog itself is smaller.
const CACHE_BYTES: u64 = 16 << 20;
/// Quarantined catalogs that are kept for whoever wants to look.
const QUARANTINED_MAX: usize = 2;
/// How often, and how far apart, to ask for the lock of a catalog that is being closed: 1 s in all.
const LOCK_WAITS: u32 = 200;
const LOCK_WAIT: Duration = Duration::from_millis(5);

/// Why the catalog cannot be used. None of this touches what is served.
#[derive(Debug, thiserror::Error)]
pub enum CatalogError {
    /// A file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// sled refused.
    #[error("{path}: {problem}", path = path.display())]
    Sled {
        /// Its directory.
        path: PathBuf,
        /// What it said.
        problem: String,
    },
    /// Another process has it open.
    #[error("{path}: is in use by another process", path = path.display())]
    InUse {
        /// Its directory.
        path: PathBuf,
    },
}

/// How the catalog was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CatalogState {
    /// Whole, and written for the live generation.
    Kept,
    /// Not there.
    Missing,
    /// Written for another generation than the live one.
    Stale {
        /// That generation's sequence.
        sequence: u64,
    },
    /// Unreadable, or not what was written.
    Damaged {
        /// What is wrong with it.
        error: String,
    },
}

/// An open catalog.
pub struct Catalog {
    directory: PathBuf,
    /// Absent only while it is being dropped.
    db: Option<sled::Db>,
    /// sled's one file that holds everything.
    file: File,
    entries: Entries,
    quarantined: u64,
}

impl Catalog {
    /// Opens the catalog in `directory` (its own), or makes it anew where it is missing, stale or
    /// damaged. Returns what it holds and how it was found.
    ///
    /// # Errors
    /// Another process has it open, or it can neither be read nor be made anew.
    pub fn open(
        directory: &Path,
        flash: &Flash,
    ) -> Result<(Self, CatalogEntries, CatalogState), CatalogError> {
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
        let (notes, found) = match Self::read(directory) {
            Err(error) => {
                (CatalogEntries::lost(), CatalogState::Damaged { error: error.to_string() })
            }
            Ok((catalog, mut notes))
                if notes.sequence == flash.record().live.generation.sequence =>
            {
                notes.follow(flash);
                return Ok((catalog, notes, CatalogState::Kept));
            }
            // What it says of the device holds whatever is live.
            Ok((_, old)) => (old.of_the_device(), CatalogState::Stale { sequence: old.sequence }),
        };
        // What was opened just now may still be closing; where a panic left it open for ever, so be
        // it.
        is_free(directory);
        quarantine(directory)?;
        log::warn!("{}: made anew: {found:?}", directory.display());
        Self::rebuild(directory, notes, flash, found)
    }

    /// The catalog's directory in a flash directory.
    pub fn place(flash: &Path) -> PathBuf {
        flash.join("catalog")
    }

    /// What the catalog in `directory` says, read from a copy of its files in `scratch`, an empty
    /// directory: nothing is changed, and whoever has it open goes on. A copy that was taken amid a
    /// commit may be refused.
    ///
    /// # Errors
    /// There is none, or the copy is not one commit's.
    pub fn peek(directory: &Path, scratch: &Path) -> Result<CatalogEntries, CatalogError> {
        for entry in fs::read_dir(directory).map_err(io_error(directory))? {
            let path = entry.map_err(io_error(directory))?.path();
            // sled keeps values in a folder only where they are larger than any entry here.
            if let (true, Some(name)) = (path.is_file(), path.file_name()) {
                fs::copy(&path, scratch.join(name)).map_err(io_error(&path))?;
            }
        }
        Self::read(scratch).map(|(_, notes)| notes)
    }

    /// Catalogs that were moved aside so far.
    pub fn quarantined(&self) -> u64 {
        self.quarantined
    }

    /// Makes the catalog say `notes`: one batch of what differs, and durable when this returns. On
    /// a file that was damaged without sled noticing, a later open may still find the catalog of
    /// some commit before.
    ///
    /// # Errors
    /// sled or the device refused; the catalog on flash is as it was or as it should be.
    pub fn write(&mut self, notes: &CatalogEntries) -> Result<(), CatalogError> {
        let entries = notes.encode();
        let mut batch = sled::Batch::default();
        for (key, value) in entries.iter().filter(|(k, v)| self.entries.get(*k) != Some(v)) {
            batch.insert(key.as_slice(), value.as_slice());
        }
        self.entries
            .keys()
            .filter(|k| !entries.contains_key(*k))
            .for_each(|k| batch.remove(k.as_slice()));
        let Some(db) = &self.db else { return Ok(()) };
        guarded(&self.directory, || {
            db.apply_batch(batch)?;
            db.flush().map(drop)
        })?;
        // sled's flush ends in sync_file_range, which leaves the data in the device's cache:
        // without this an acknowledged batch is lost at a power cut.
        self.file.sync_all().map_err(io_error(&self.directory))?;
        self.entries = entries;
        Ok(())
    }

    fn rebuild(
        directory: &Path,
        mut notes: CatalogEntries,
        flash: &Flash,
        found: CatalogState,
    ) -> Result<(Self, CatalogEntries, CatalogState), CatalogError> {
        notes.follow(flash);
        fs::create_dir_all(directory).map_err(io_error(directory))?;
        let mut catalog = Self::open_sled(directory)?;
        catalog.write(&notes)?;
        for path in [directory, parent_of(directory)] {
            File::open(path).and_then(|d| d.sync_all()).map_err(io_error(path))?;
        }
        Ok((catalog, notes, found))
    }

    fn open_sled(directory: &Path) -> Result<Self, CatalogError> {
        let config =
            sled::Config::new().path(directory).cache_capacity(CACHE_BYTES).flush_every_ms(None);
        let db = guarded(directory, || config.open())?;
        let path = directory.join("db");
        let file = File::open(&path).map_err(io_error(&path))?;
        let quarantined = quarantines(directory).map_err(io_error(directory))?;
        let quarantined = quarantined.last().map_or(0, |(n, _)| *n);
        let (directory, db) = (directory.to_owned(), Some(db));
        Ok(Self { directory, db, file, entries: Entries::new(), quarantined })
    }

    /// Opens what is there and reads all of it.
    fn read(directory: &Path) -> Result<(Self, CatalogEntries), CatalogError> {
        let mut catalog = Self::open_sled(directory)?;
        if let Some(db) = &catalog.db {
            catalog.entries = guarded(directory, || {
                db.iter().map(|pair| pair.map(|(k, v)| (k.to_vec(), v.to_vec()))).collect()
            })?;
        }
        let refused = |problem| CatalogError::Sled { path: directory.to_owned(), problem };
        let notes = CatalogEntries::decode(&catalog.entries).map_err(refused)?;
        Ok((catalog, notes))
    }
}

impl Drop for Catalog {
    fn drop(&mut self) {
        let db = self.db.take();
        if let Err(e) = guarded(&self.directory, || {
            drop(db);
            Ok(())
        }) {
            log::warn!("closing the catalog: {e}");
        }
    }
}

/// sled asserts where it could return an error: a file that was changed under it makes it panic, at
/// open and later. Such a panic is damage like any other here, and must not end the process that
/// serves.
fn guarded<T>(directory: &Path, call: impl FnOnce() -> sled::Result<T>) -> Result<T, CatalogError> {
    let problem = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(e)) => e.to_string(),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            format!("sled panicked: {}", text.unwrap_or("for no reason given"))
        }
    };
    Err(CatalogError::Sled { path: directory.to_owned(), problem })
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> CatalogError + '_ {
    move |source| CatalogError::Io { path: path.to_owned(), source }
}

fn parent_of(directory: &Path) -> &Path {
    directory.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether nobody has the catalog open: such a one is not damaged, and must not be moved away under
/// them. sled gives up its lock some time after it is closed, when its threads are done.
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

/// The catalogs moved aside that are still there, oldest first, with their numbers.
fn quarantines(directory: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    let start = format!("{name}.bad-");
    let mut found = Vec::new();
    for entry in fs::read_dir(parent_of(directory))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if let Some(Ok(number)) = name.strip_prefix(&start).map(str::parse) {
            found.push((number, path));
        }
    }
    found.sort();
    Ok(found)
}

fn quarantine(directory: &Path) -> Result<(), CatalogError> {
    let old = quarantines(directory).map_err(io_error(directory))?;
    let number = old.last().map_or(0, |(n, _)| *n).saturating_add(1);
    let aside = directory.with_extension(format!("bad-{number}"));
    fs::rename(directory, &aside).map_err(io_error(directory))?;
    for (_, path) in old.iter().rev().skip(QUARANTINED_MAX - 1) {
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        if let Err(e) = removed {
            log::warn!("{}: not removed: {e}", path.display());
        }
    }
    Ok(())
}
