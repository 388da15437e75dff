//! Files and folders that a command needs only while it runs. They are removed when the command
//! ends, also by an error or a signal. The next command removes the folders of one that SIGKILL
//! ended. Never removes a path that no command claimed.

use anyhow::{Context, Result};
use hatchback::io::atomic_write::{part_of, replace};
use hatchback::io::disk::{self, SystemDisk};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Start of the names of temporary folders.
const PREFIX: &str = ".hatchback-";
/// A signal looks for claimed paths until it finds none this many times in a row, or gives up.
const QUIET_ROUNDS: usize = 3;
const ROUNDS_MAX: usize = 500;
const ROUND: Duration = Duration::from_millis(1);
/// A younger folder may be one whose command has not locked it yet.
const AGE_MIN: Duration = Duration::from_secs(60);

/// The claimed paths. A signal keeps the lock until the program has ended, so that no new path is
/// claimed and left.
static CLAIMED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn claimed() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn remove(path: &Path) {
    // One of the two is right. Nobody is left to hear of a failure.
    let _ = fs::remove_file(path).or_else(|_| fs::remove_dir_all(path));
}

/// Lets SIGINT, SIGTERM and SIGHUP remove the claimed paths before they end this program.
///
/// # Errors
/// The system refuses a handler or a thread.
pub fn remove_at_signals() -> io::Result<()> {
    // A shell lets a program in the background ignore signals, and `nohup` that of the terminal.
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0);
    let taken = [SIGHUP, SIGINT, SIGTERM].into_iter().filter(|s| ignored & 1 << (s - 1) == 0);

    let mut signals = Signals::new(taken)?;
    let wait = move || {
        let Some(signal) = signals.forever().next() else { return };
        let claimed = claimed();
        // The other threads run on, and may create again what was removed, until they fail or need
        // the lock.
        let mut quiet = 0;
        for _ in 0..ROUNDS_MAX {
            let left = claimed.iter().filter(|path| path.symlink_metadata().is_ok());
            quiet = if left.inspect(|path| remove(path)).count() == 0 { quiet + 1 } else { 0 };
            if quiet == QUIET_ROUNDS {
                break;
            }
            std::thread::sleep(ROUND);
        }
        // The shell must see that the signal ended the program.
        let _ = emulate_default_handler(signal);
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(wait).map(drop)
}

/// Runs `work`, which a signal waits for: it comes before all of it or after. For short work alone.
pub fn uninterrupted<T>(work: impl FnOnce() -> T) -> T {
    let _claimed = claimed();
    work()
}

/// A path that a signal removes while this value lives.
#[derive(Debug)]
pub struct Claim(PathBuf);

impl Claim {
    /// Claims `path`, which the caller or the library then creates, and removes after an error.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        claimed().insert(path.clone());
        Self(path)
    }

    /// Claims the path that `create` makes, before a signal can end the program between the two.
    ///
    /// # Errors
    /// Those of `create`.
    pub fn of(create: impl FnOnce() -> Result<PathBuf>) -> Result<Self> {
        let mut claimed = claimed();
        let path = create()?;
        claimed.insert(path.clone());
        Ok(Self(path))
    }

    /// Returns the claimed path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Ends the claim with `work`, which moves what is claimed to its place. A signal comes before
    /// all of it or after.
    pub fn complete<T>(self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut claimed = claimed();
        let moved = work();
        // Under the same lock: a signal in between would remove what is complete.
        if moved.is_ok() {
            claimed.remove(&self.0);
        }
        // `self` takes the lock when it is dropped.
        drop(claimed);
        moved
    }

    /// Claims the file that is written before it is renamed to `path`.
    pub fn part_of(path: &Path) -> Self {
        Self::new(part_of(path))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        claimed().remove(&self.0);
    }
}

/// A folder that exists as long as this value.
#[derive(Debug)]
pub struct TemporaryFolder {
    claim: Claim,
    /// Locked while the folder is in use.
    _lock: File,
}

impl TemporaryFolder {
    /// Creates a folder in the system's folder for temporary files.
    ///
    /// # Errors
    /// As [`TemporaryFolder::beside`].
    pub fn new() -> Result<Self> {
        Self::beside(&std::env::temp_dir().join(PREFIX))
    }

    /// Creates a folder beside `path`. Removes those beside it that no program uses any more.
    ///
    /// # Errors
    /// The folder of `path` cannot be written.
    pub fn beside(path: &Path) -> Result<Self> {
        let base = disk::directory_of(path);
        remove_unused(base);
        let named = || format!("{}: a temporary folder", base.display());
        let random = tempfile::Builder::new();
        let name = format!("{PREFIX}{}-", std::process::id());
        let create = || Ok({ random }.prefix(&name).tempdir_in(base).with_context(named)?.keep());
        let claim = Claim::of(create)?;
        let lock = File::open(claim.path()).with_context(named)?;
        lock.try_lock().with_context(named)?;
        Ok(Self { claim, _lock: lock })
    }

    /// Returns the path of the folder.
    pub fn path(&self) -> &Path {
        self.claim.path()
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        remove(self.path());
    }
}

/// Removes the temporary folders in `base` whose programs have ended.
fn remove_unused(base: &Path) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let is_old = || Some(entry.metadata().ok()?.modified().ok()?.elapsed().ok()? > AGE_MIN);
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) || is_old() != Some(true) {
            continue;
        }
        if File::open(entry.path()).is_ok_and(|folder| folder.try_lock().is_ok()) {
            remove(&entry.path());
        }
    }
}

/// Writes a file that a user named: the whole content, or nothing. A device or a pipe is written as
/// it is, and the file that a link names is replaced.
///
/// # Errors
/// The file cannot be written.
pub fn write_file(path: &Path, content: &[u8]) -> Result<()> {
    let named = || path.display().to_string();
    let to = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if to.exists() && !to.is_file() {
        return fs::write(path, content).with_context(named);
    }
    let written = uninterrupted(|| replace(&SystemDisk, &to, content));
    written.inspect_err(|_| remove(&part_of(&to))).with_context(named)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn a_folder_ends_with_its_value_and_one_of_a_killed_program_at_the_next_start() {
        let base = tempfile::tempdir().unwrap();
        let names = || fs::read_dir(base.path()).unwrap().count();
        let beside = base.path().join("m.hatch");
        let used = TemporaryFolder::beside(&beside).unwrap();
        let (dead, young) =
            (base.path().join(".hatchback-1-a"), base.path().join(".hatchback-1-b"));
        for folder in [&dead, &young] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join("rows"), "rows").unwrap();
        }
        for folder in [dead.as_path(), used.path()] {
            let long_ago = SystemTime::now() - 2 * AGE_MIN;
            File::open(folder).unwrap().set_modified(long_ago).unwrap();
        }

        let next = TemporaryFolder::beside(&beside).unwrap();
        assert!(!dead.exists() && young.exists() && used.path().exists());
        drop((next, used));
        assert_eq!(names(), 1);
    }

    #[test]
    fn a_file_is_written_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("report.json"), folder.path().join("link"));
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_file(&file, b"one").unwrap();
        write_file(&link, b"two").unwrap();
        assert!(link.is_symlink() && fs::read(&file).unwrap() == b"two");
        write_file(Path::new("/dev/null"), b"three").unwrap();
        assert!(write_file(&folder.path().join("none/report"), b"x").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
