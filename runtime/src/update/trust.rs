//! Trust: verifies the metadata that a repository signed, in the order of The Update Framework. The
//! `sigstore-tuf` crate makes the checks. This file adds the time floor and the rollback floor,
//! which applies even if the metadata files are damaged. It stores metadata as the signed bytes
//! arrived. It never parses content before its signature is verified, except the signed envelope.

use crate::io::atomic_write;
use crate::io::disk::Disk;
use crate::io::paired_record::{PairedRecord, Stored};
use crate::limits::{
    CLOCK_SLACK_S, ROOT_BYTES_MAX, ROTATIONS_MAX, SNAPSHOT_BYTES_MAX, TARGETS_BYTES_MAX,
    TIMESTAMP_BYTES_MAX,
};
use crate::update::error::{UpdateError, from_tuf, io_error};
use crate::update::link::Fetcher;
use crate::update::rollback_floor::RollbackFloor;
use crate::update::updater::lock_fetch;
use sigstore_tuf::{Error as TufError, MetaFile, Root, Targets, TrustedMetadataSet};
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The field of the timestamp metadata with the time of signing, seconds since 1970.
pub const PUBLISHED: &str = "published";
/// The newest verified root.
const NEWEST_ROOT: &str = "root.json";
/// The root that provisioned the directory. `open` falls back to it if `root.json` is damaged.
const FACTORY_ROOT: &str = "root.factory";

/// The trusted metadata of one sync directory.
pub struct Trust {
    disk: Arc<dyn Disk>,
    directory: PathBuf,
    set: TrustedMetadataSet,
    floor: RollbackFloor,
    /// Number of writes of the floor.
    floor_writes: u64,
    /// Both copies on disk hold `floor`.
    is_floor_saved: bool,
    /// Verified files that `save` still has to write, by name.
    writes: Vec<(String, Vec<u8>)>,
    /// A new root revoked keys that signed the cached files.
    is_rotated: bool,
}

/// The time of a refresh.
#[derive(Clone, Copy)]
struct Now {
    /// Seconds since 1970.
    seconds: u64,
    time: jiff::Timestamp,
}

impl Now {
    fn new(seconds: u64) -> Result<Self, UpdateError> {
        let time = jiff::Timestamp::from_second(i64::try_from(seconds).unwrap_or(i64::MAX));
        let time = time.map_err(|e| malformed("the clock", &e.to_string()))?;
        Ok(Self { seconds, time })
    }
}

/// Returns the keys of the timestamp and snapshot roles, which sign the cached files.
fn online_keys(root: &Root) -> [BTreeSet<String>; 2] {
    ["timestamp", "snapshot"]
        .map(|role| root.role(role).map(|r| r.keyids.iter().cloned().collect()).unwrap_or_default())
}

impl Trust {
    /// Provisions a new sync directory with the fleet's root. In a provisioned directory, replaces
    /// the root that provisioned it if that file is damaged.
    ///
    /// # Errors
    /// [`UpdateError`] if the root is not signed by its own keys, another process is syncing, or
    /// the directory cannot be written.
    pub fn init(disk: &dyn Disk, directory: &Path, root: &[u8]) -> Result<(), UpdateError> {
        let is_provisioned = || read_root(disk, directory, FACTORY_ROOT).is_some();
        // This first look needs no lock, which another process may hold during a fetch.
        if is_provisioned() {
            return Ok(());
        }
        // A fetch of another process may have raised the floor since: no lower one may follow.
        let _fetching = lock_fetch(disk, directory)?;
        if is_provisioned() {
            return Ok(());
        }

        let set = TrustedMetadataSet::from_root(root)
            .map_err(|e| from_tuf(e, "the fleet's root (--root)", 0))?;
        let replace = |name| {
            let path = directory.join(name);
            atomic_write::replace(disk, &path, root).map_err(io_error(&path))
        };
        if read_root(disk, directory, NEWEST_ROOT).is_none() {
            replace(NEWEST_ROOT)?;
        }
        let floor = match RollbackFloor::read(disk, directory) {
            // The first provisioning was interrupted during its writes.
            Err(_) if !is_present(disk, &directory.join(FACTORY_ROOT)) => None,
            floor => floor?,
        };
        if floor.is_none() {
            let floor = RollbackFloor { root: set.root().version, ..RollbackFloor::default() };
            floor.store(disk, directory, 1)?;
        }
        // This file is written last: a directory that has it and no floor has lost its floor.
        replace(FACTORY_ROOT)
    }

    /// Returns the newest root in the sync directory that can be read, as signed and verified.
    ///
    /// # Errors
    /// `UpdateError::NotProvisioned` if there is none.
    pub(super) fn newest_root(
        disk: &dyn Disk,
        directory: &Path,
    ) -> Result<(Vec<u8>, TrustedMetadataSet), UpdateError> {
        let read = |name| read_root(disk, directory, name);
        let root = read(NEWEST_ROOT).or_else(|| read(FACTORY_ROOT));
        root.ok_or_else(|| UpdateError::NotProvisioned { path: directory.to_owned() })
    }

    /// Opens the sync directory.
    ///
    /// # Errors
    /// `UpdateError::NotProvisioned`, also if no root can be read. `UpdateError::RollbackFloor` if
    /// the floor is lost.
    pub fn open(disk: &Arc<dyn Disk>, directory: &Path) -> Result<Self, UpdateError> {
        let Some(stored) = RollbackFloor::read(disk.as_ref(), directory)? else {
            let (path, problem) = (directory.to_owned(), "both copies are missing".to_owned());
            return Err(match read_root(disk.as_ref(), directory, FACTORY_ROOT) {
                Some(_) => UpdateError::RollbackFloor { path, problem },
                None => UpdateError::NotProvisioned { path },
            });
        };
        let (_, set) = Self::newest_root(disk.as_ref(), directory)?;

        let Stored { value: floor, writes: floor_writes, is_in_both } = stored;
        Ok(Self {
            disk: Arc::clone(disk),
            directory: directory.to_owned(),
            set,
            floor,
            floor_writes,
            is_floor_saved: is_in_both,
            writes: Vec::new(),
            is_rotated: false,
        })
    }

    /// Returns the rollback floor.
    pub fn floor(&self) -> RollbackFloor {
        self.floor
    }

    /// Fetches and verifies the metadata that the repository signed since the last refresh, as of
    /// `now` (seconds since 1970). Returns the targets.
    ///
    /// # Errors
    /// [`UpdateError`] for the first file that is refused or does not arrive. Files that were
    /// verified before it are stored.
    pub fn refresh(mut self, fetcher: &mut Fetcher<'_>, now: u64) -> Result<Targets, UpdateError> {
        let advanced = self.advance(fetcher, now);
        // Also after an error, so that the floor covers every file that was verified.
        self.save()?;
        advanced?;

        let targets = self.set.targets_role("targets").cloned();
        targets.ok_or_else(|| malformed("metadata/targets.json", "is missing"))
    }

    fn advance(&mut self, fetcher: &mut Fetcher<'_>, now: u64) -> Result<(), UpdateError> {
        let now = Now::new(now)?;
        // New roots come first: they may revoke the keys that signed the cached files.
        self.update_root(fetcher, now)?;
        self.restore_roots(fetcher)?;
        // After the roots, because a root with another timestamp key resets the time floor. So the
        // publisher can always free cars whose floor a stolen key or a wrong clock has raised.
        if now.seconds.saturating_add(CLOCK_SLACK_S) < self.floor.time {
            return Err(UpdateError::ClockBehind { now: now.seconds, floor: self.floor.time });
        }
        let path = fetcher.address("metadata/root.json");
        // Only the newest root must be valid today. The roots on the way to it may have expired.
        self.set.check_root_expired(now.time).map_err(|e| from_tuf(e, &path, now.seconds))?;

        if !self.is_rotated {
            self.load_cached();
        }
        self.update_timestamp(fetcher, now)?;
        self.update_snapshot(fetcher, now)?;
        self.update_targets(fetcher, now)
    }

    fn update_root(&mut self, fetcher: &mut Fetcher<'_>, now: Now) -> Result<(), UpdateError> {
        // With stolen keys a repository could list roots for ever. The next refresh follows further
        // ones.
        for _ in 0..ROTATIONS_MAX {
            let Some(version) = self.set.root().version.checked_add(1) else { break };
            let path = format!("metadata/{version}.root.json");
            let bytes = match fetcher.metadata(&path, ROOT_BYTES_MAX) {
                // The repository has no later root. Any other error could hide one, so it ends the
                // refresh.
                Err(UpdateError::NotFound { .. }) => break,
                fetched => fetched?,
            };

            let keys = online_keys(self.set.root());
            let address = fetcher.address(&path);
            self.set.update_root(&bytes).map_err(|e| from_tuf(e, &address, now.seconds))?;

            if version > self.floor.root {
                let newer = online_keys(self.set.root());
                if newer != keys {
                    // With stolen old keys any version could have been signed, so the floors that
                    // those keys set no longer count.
                    self.floor =
                        RollbackFloor { timestamp: 0, snapshot: 0, targets: 0, ..self.floor };
                    self.is_rotated = true;
                }
                if newer[0] != keys[0] {
                    // The timestamp's key signed the time.
                    self.floor.time = 0;
                }
                self.raise_floor(|floor| floor.root = version);
            }
            self.queue_write(&root_name(version), bytes.clone());
            self.queue_write(NEWEST_ROOT, bytes);
        }
        self.require_at_least("root", self.floor.root, self.set.root().version)
    }

    /// Fetches roots again if their files are lost or damaged. The serving process needs the whole
    /// chain of roots after its own.
    fn restore_roots(&mut self, fetcher: &mut Fetcher<'_>) -> Result<(), UpdateError> {
        let disk = Arc::clone(&self.disk);
        if let Some((first, mut chain)) = read_root(disk.as_ref(), &self.directory, FACTORY_ROOT) {
            let mut newest = first;
            while chain.root().version < self.set.root().version {
                newest = self.restore_root(&mut chain, fetcher)?;
            }
            if read_root(disk.as_ref(), &self.directory, NEWEST_ROOT).is_none() {
                self.queue_write(NEWEST_ROOT, newest);
            }
        }
        Ok(())
    }

    /// Adds the next root to `chain`, from its file or from the repository. Returns its bytes.
    fn restore_root(
        &mut self,
        chain: &mut TrustedMetadataSet,
        fetcher: &mut Fetcher<'_>,
    ) -> Result<Vec<u8>, UpdateError> {
        let version = chain.root().version.saturating_add(1);
        let name = root_name(version);
        let queued = self.writes.iter().find(|(queued, _)| *queued == name);
        let stored = match queued {
            Some((_, bytes)) => Some(bytes.clone()),
            None => self.disk.read(&self.directory.join(&name), ROOT_BYTES_MAX).ok(),
        };
        if let Some(bytes) = stored
            && chain.update_root(&bytes).is_ok()
        {
            return Ok(bytes);
        }

        log::warn!("{name}: is lost or damaged and is fetched again");
        let path = format!("metadata/{version}.root.json");
        let bytes = fetcher.metadata(&path, ROOT_BYTES_MAX)?;
        let address = fetcher.address(&path);
        chain.update_root(&bytes).map_err(|e| from_tuf(e, &address, 0))?;
        self.queue_write(&name, bytes.clone());
        Ok(bytes)
    }

    /// Returns the cached file `name`; nothing if it cannot be read.
    fn cached(&self, name: &str, bytes_max: u64) -> Vec<u8> {
        self.disk.read(&self.directory.join(name), bytes_max).unwrap_or_default()
    }

    /// Loads the cached files for their versions only. Their expiry does not matter here, and a
    /// damaged file is fetched again.
    fn load_cached(&mut self) {
        let long_ago = jiff::Timestamp::UNIX_EPOCH;
        let timestamp = self.cached("timestamp.json", TIMESTAMP_BYTES_MAX);
        let snapshot = self.cached("snapshot.json", SNAPSHOT_BYTES_MAX);

        let loaded = self.set.update_timestamp(&timestamp, long_ago);
        let loaded = loaded.and_then(|()| self.set.update_snapshot(&snapshot, long_ago));
        if let Err(e) = loaded {
            log::debug!("{}: cached metadata not used: {e}", self.directory.display());
        }
    }

    fn update_timestamp(&mut self, fetcher: &mut Fetcher<'_>, now: Now) -> Result<(), UpdateError> {
        let path = "metadata/timestamp.json";
        let bytes = fetcher.metadata(path, TIMESTAMP_BYTES_MAX)?;
        let path = fetcher.address(path);
        let is_new = match self.set.update_timestamp(&bytes, now.time) {
            Err(TufError::EqualVersion { .. }) => false,
            updated => updated.map(|()| true).map_err(|e| from_tuf(e, &path, now.seconds))?,
        };
        // Also for an equal version: a repository that is frozen must be noticed.
        self.set.check_timestamp_expired(now.time).map_err(|e| from_tuf(e, &path, now.seconds))?;

        let Some(timestamp) = self.set.timestamp() else {
            return Err(malformed(&path, "is missing"));
        };
        let version = timestamp.version;
        let published =
            timestamp.extra.get(PUBLISHED).and_then(serde_json::Value::as_u64).unwrap_or(0);
        if published > now.seconds.saturating_add(CLOCK_SLACK_S) {
            log::warn!("{path}: was signed {} s after this clock", published - now.seconds);
        }
        // A time ahead of this clock says that one of the two clocks is wrong. As a floor it would
        // refuse everything that is signed by the right one.
        let published = published.min(now.seconds);

        self.require_at_least("timestamp", self.floor.timestamp, version)?;
        self.raise_floor(|floor| {
            floor.timestamp = version;
            floor.time = floor.time.max(published);
        });
        if is_new {
            self.queue_write("timestamp.json", bytes);
        }
        Ok(())
    }

    fn update_snapshot(&mut self, fetcher: &mut Fetcher<'_>, now: Now) -> Result<(), UpdateError> {
        let pin = self.set.timestamp().and_then(|t| t.snapshot_meta()).cloned();
        let (path, length) = pinned(pin, "snapshot", SNAPSHOT_BYTES_MAX)?;

        let cached = self.cached("snapshot.json", SNAPSHOT_BYTES_MAX);
        // The set compares the cached file with the timestamp's pin. An error only means that it is
        // not the current one.
        if self.set.update_snapshot(&cached, now.time).is_err() {
            let bytes = fetcher.metadata(&path, length)?;
            let path = fetcher.address(&path);
            self.set
                .update_snapshot(&bytes, now.time)
                .map_err(|e| from_tuf(e, &path, now.seconds))?;
            self.queue_write("snapshot.json", bytes);
        }

        let version = self.set.snapshot().map_or(0, |s| s.version);
        self.require_at_least("snapshot", self.floor.snapshot, version)?;
        self.raise_floor(|floor| floor.snapshot = version);
        Ok(())
    }

    fn update_targets(&mut self, fetcher: &mut Fetcher<'_>, now: Now) -> Result<(), UpdateError> {
        let pin = self.set.snapshot().and_then(|s| s.meta.get("targets.json")).cloned();
        let (path, length) = pinned(pin, "targets", TARGETS_BYTES_MAX)?;

        let cached = self.cached("targets.json", TARGETS_BYTES_MAX);
        // As above: the pin in the snapshot decides.
        if self.set.update_targets(&cached, now.time).is_err() {
            let bytes = fetcher.metadata(&path, length)?;
            let path = fetcher.address(&path);
            self.set
                .update_targets(&bytes, now.time)
                .map_err(|e| from_tuf(e, &path, now.seconds))?;
            self.queue_write("targets.json", bytes);
        }

        let version = self.set.targets_role("targets").map_or(0, |t| t.version);
        self.require_at_least("targets", self.floor.targets, version)?;
        self.raise_floor(|floor| floor.targets = version);
        Ok(())
    }

    /// Returns an error if `offered` is below the `floor` of `role`.
    fn require_at_least(
        &mut self,
        role: &'static str,
        floor: u64,
        offered: u64,
    ) -> Result<(), UpdateError> {
        if offered >= floor {
            return Ok(());
        }
        // The file of this role is the replayed one, so it must not be written.
        self.writes.retain(|(name, _)| name.strip_suffix(".json") != Some(role));
        Err(UpdateError::Replay { role, floor, offered })
    }

    fn raise_floor(&mut self, change: impl FnOnce(&mut RollbackFloor)) {
        let before = self.floor;
        change(&mut self.floor);
        assert!(self.floor.is_at_least(&before), "the rollback floor never goes down");
        self.is_floor_saved &= self.floor == before;
    }

    fn queue_write(&mut self, name: &str, bytes: Vec<u8>) {
        self.writes.retain(|(queued, _)| queued != name);
        self.writes.push((name.to_owned(), bytes));
    }

    /// Writes the floor and then the queued files, so that the floor is never below a file on disk.
    fn save(&mut self) -> Result<(), UpdateError> {
        if self.is_rotated {
            for name in ["timestamp.json", "snapshot.json"] {
                // If the removal fails, the file stays and the new keys do not verify it.
                let _ = self.disk.remove_file(&self.directory.join(name));
            }
        }
        if !self.is_floor_saved {
            let disk = self.disk.as_ref();
            self.floor_writes += 1;
            self.floor.store(disk, &self.directory, self.floor_writes)?;
            self.is_floor_saved = true;
        }
        self.writes.drain(..).try_for_each(|(name, bytes)| {
            let path = self.directory.join(name);
            atomic_write::replace(self.disk.as_ref(), &path, &bytes).map_err(io_error(&path))
        })
    }
}

/// Returns whether there is a file at `path`, readable or not.
fn is_present(disk: &dyn Disk, path: &Path) -> bool {
    !disk.read(path, ROOT_BYTES_MAX).is_err_and(|e| e.kind() == ErrorKind::NotFound)
}

/// Reads the root in the file `name`, if it is whole and signed by its own keys.
fn read_root(
    disk: &dyn Disk,
    directory: &Path,
    name: &str,
) -> Option<(Vec<u8>, TrustedMetadataSet)> {
    let bytes = disk.read(&directory.join(name), ROOT_BYTES_MAX).ok()?;
    let set = TrustedMetadataSet::from_root(&bytes).ok()?;
    Some((bytes, set))
}

/// Returns the file name of a root that was accepted after the first.
pub(super) fn root_name(version: u64) -> String {
    format!("root.{version}")
}

fn malformed(path: &str, problem: &str) -> UpdateError {
    UpdateError::Malformed { path: path.to_owned(), problem: problem.to_owned() }
}

/// Returns the path of the version of `role` that `pin` requires, and its maximum length.
fn pinned(pin: Option<MetaFile>, role: &str, bytes_max: u64) -> Result<(String, u64), UpdateError> {
    let Some(pin) = pin else {
        return Err(malformed(
            &format!("metadata/{role}.json"),
            "is not listed by its parent metadata",
        ));
    };
    let path = format!("metadata/{}.{role}.json", pin.version);
    Ok((path, pin.length.map_or(bytes_max, |length| length.min(bytes_max))))
}
