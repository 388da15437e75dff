//! Trust: what the repository signed, taken up in the order of The Update Framework. The checks are
//! those of the `sigstore-tuf` crate; added are the floor, which holds where the metadata files are
//! torn, and the time floor. Raw signed bytes are kept as they came. Never parses what is not
//! verified, but the signed envelope itself.

use crate::io::atomic_write;
use crate::io::disk::Disk;
use crate::limits::{
    CLOCK_SLACK_S, ROOT_BYTES_MAX, ROTATIONS_MAX, SNAPSHOT_BYTES_MAX, TARGETS_BYTES_MAX,
    TIMESTAMP_BYTES_MAX,
};
use crate::update::error::{UpdateError, io_error, named};
use crate::update::link::Fetcher;
use crate::update::rollback_floor::RollbackFloor;
use sigstore_tuf::{Error as TufError, MetaFile, Metadata, Root, Targets, TrustedMetadataSet};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The field of the timestamp that says when it was signed, seconds since 1970.
pub const PUBLISHED: &str = "published";
/// The root that was put here first; the way back where `root.json` is damaged.
const FACTORY_ROOT: &str = "root.factory";

/// The trusted metadata of one sync directory.
pub struct Trust {
    disk: Arc<dyn Disk>,
    directory: PathBuf,
    set: TrustedMetadataSet,
    floor: RollbackFloor,
    /// Both copies of the floor are on disk as it is here.
    floor_saved: bool,
    /// Verified files that are not on disk yet, by name.
    fresh: Vec<(String, Vec<u8>)>,
    /// A new root took away keys that signed the cached files.
    rotated: bool,
}

fn time_of(seconds: u64, what: &str) -> Result<jiff::Timestamp, UpdateError> {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    jiff::Timestamp::from_second(seconds)
        .map_err(|e| UpdateError::Malformed { path: what.to_owned(), problem: e.to_string() })
}

/// The keys of the roles that sign online: who could have signed the cached versions.
fn online_keys(root: &Root) -> [BTreeSet<String>; 2] {
    ["timestamp", "snapshot"]
        .map(|role| root.role(role).map(|r| r.keyids.iter().cloned().collect()).unwrap_or_default())
}

impl Trust {
    /// Puts the fleet's root into a new sync directory. Does nothing if one is there.
    ///
    /// # Errors
    /// The root is not signed by itself, or the directory cannot be written.
    pub fn init(disk: &dyn Disk, directory: &Path, root: &[u8]) -> Result<(), UpdateError> {
        disk.create_dir(directory).map_err(io_error(directory))?;
        if disk.read(&directory.join(FACTORY_ROOT)).is_ok() {
            return Ok(());
        }
        let set = TrustedMetadataSet::from_root(root).map_err(|e| named(e, "root", 0))?;
        let path = directory.join("root.json");
        atomic_write::replace(disk, &path, root).map_err(io_error(&path))?;
        if RollbackFloor::read(disk, directory)?.is_none() {
            RollbackFloor { root: set.root().version, ..RollbackFloor::default() }
                .write(disk, directory)?;
        }
        // The last of the three: from here on a floor that is missing is a floor that was lost.
        let path = directory.join(FACTORY_ROOT);
        atomic_write::replace(disk, &path, root).map_err(io_error(&path))
    }

    /// Opens the sync directory.
    ///
    /// # Errors
    /// It was never provisioned, or the floor or every root is lost.
    pub fn open(disk: &Arc<dyn Disk>, directory: &Path) -> Result<Self, UpdateError> {
        let roots = ["root.json", FACTORY_ROOT].map(|name| disk.read(&directory.join(name)).ok());
        let provisioned = roots[1].is_some();
        let Some((floor, floor_saved)) = RollbackFloor::read(disk.as_ref(), directory)? else {
            let path = directory.to_owned();
            if provisioned {
                return Err(UpdateError::Floor {
                    path,
                    problem: "both copies are missing".to_owned(),
                });
            }
            return Err(UpdateError::NotProvisioned { path });
        };
        let set =
            roots.iter().flatten().find_map(|bytes| TrustedMetadataSet::from_root(bytes).ok());
        let Some(set) = set else {
            return Err(UpdateError::NotProvisioned { path: directory.to_owned() });
        };
        let (disk, directory) = (Arc::clone(disk), directory.to_owned());
        Ok(Self { disk, directory, set, floor, floor_saved, fresh: Vec::new(), rotated: false })
    }

    /// The targets that were taken up last, whose signatures are proved once more, without a link
    /// and as of no time: from `root` on, where that is given, else from the newest root there.
    /// Timestamp and snapshot are not asked: whoever can write here could put back older ones too,
    /// and a refresh that broke off leaves newer ones.
    ///
    /// # Errors
    /// The files are not signed.
    pub fn kept(
        disk: &Arc<dyn Disk>,
        directory: &Path,
        root: Option<&[u8]>,
    ) -> Result<Targets, UpdateError> {
        let mut trust = Self::open(disk, directory)?;
        if let Some(root) = root {
            trust.set = TrustedMetadataSet::from_root(root).map_err(|e| named(e, "root", 0))?;
            loop {
                let name = root_name(trust.set.root().version + 1);
                let Ok(bytes) = disk.read(&directory.join(&name)) else { break };
                trust.set.update_root(&bytes).map_err(|e| named(e, &name, 0))?;
            }
        }
        let (name, root) = ("targets.json", trust.set.root());
        let path = directory.join(name);
        let bytes = disk.read(&path).map_err(io_error(&path))?;
        let targets = Metadata::<Targets>::from_slice(&bytes).map_err(|e| named(e, name, 0))?;
        let keys =
            root.role("targets").ok_or_else(|| malformed("root.json", "names no role targets"))?;
        targets.verify_threshold(&root.keys, keys, "targets").map_err(|e| named(e, name, 0))?;
        Ok(targets.into_signed())
    }

    /// The floor.
    pub fn floor(&self) -> RollbackFloor {
        self.floor
    }

    /// Takes up what the repository has signed since, as of `now` (seconds since 1970). Returns the
    /// targets.
    ///
    /// # Errors
    /// Anything of it is refused; what was verified before that is kept.
    pub fn refresh(mut self, fetcher: &mut Fetcher<'_>, now: u64) -> Result<Targets, UpdateError> {
        if now.saturating_add(CLOCK_SLACK_S) < self.floor.time {
            return Err(UpdateError::Clock { now, floor: self.floor.time });
        }
        let advanced = self.advance(fetcher, now);
        self.save()?;
        advanced?;
        let targets = self.set.targets_role("targets").cloned();
        targets.ok_or_else(|| malformed("metadata/targets.json", "is not there"))
    }

    fn advance(&mut self, fetcher: &mut Fetcher<'_>, now: u64) -> Result<(), UpdateError> {
        let time = time_of(now, "the clock")?;
        self.roots(fetcher, now)?;
        self.set.check_root_expired(time).map_err(|e| named(e, "metadata/root.json", now))?;
        if !self.rotated {
            self.load_cached();
        }
        self.timestamp(fetcher, time, now)?;
        self.snapshot(fetcher, time, now)?;
        self.targets(fetcher, time, now)
    }

    fn roots(&mut self, fetcher: &mut Fetcher<'_>, now: u64) -> Result<(), UpdateError> {
        for _ in 0..ROTATIONS_MAX {
            let version = self.set.root().version + 1;
            let path = format!("metadata/{version}.root.json");
            let bytes = match fetcher.get(&path, ROOT_BYTES_MAX) {
                Err(UpdateError::NotFound { .. }) => break,
                fetched => fetched?,
            };
            let keys = online_keys(self.set.root());
            self.set.update_root(&bytes).map_err(|e| named(e, &path, now))?;
            if version > self.floor.root {
                if online_keys(self.set.root()) != keys {
                    // Whoever had those keys could have signed any version: what they signed binds
                    // no more.
                    self.floor =
                        RollbackFloor { timestamp: 0, snapshot: 0, targets: 0, ..self.floor };
                    self.rotated = true;
                }
                self.raise(|floor| floor.root = version);
            }
            self.keep(&root_name(version), bytes.clone());
            self.keep("root.json", bytes);
        }
        self.above("root", self.floor.root, self.set.root().version)
    }

    /// The cached files only set floors here: their expiry does not matter, and one that is damaged
    /// is fetched.
    fn load_cached(&mut self) {
        let long_ago = jiff::Timestamp::UNIX_EPOCH;
        let cached = |name| self.disk.read(&self.directory.join(name)).unwrap_or_default();
        let (timestamp, snapshot) = (cached("timestamp.json"), cached("snapshot.json"));
        let loaded = self.set.update_timestamp(&timestamp, long_ago);
        let loaded = loaded.and_then(|()| self.set.update_snapshot(&snapshot, long_ago));
        if let Err(e) = loaded {
            log::debug!("{}: cached metadata not used: {e}", self.directory.display());
        }
    }

    fn timestamp(
        &mut self,
        fetcher: &mut Fetcher<'_>,
        time: jiff::Timestamp,
        now: u64,
    ) -> Result<(), UpdateError> {
        let path = "metadata/timestamp.json";
        let bytes = fetcher.get(path, TIMESTAMP_BYTES_MAX)?;
        let updated = self.set.update_timestamp(&bytes, time);
        let news = match updated {
            Err(TufError::EqualVersion { .. }) => false,
            updated => updated.map(|()| true).map_err(|e| named(e, path, now))?,
        };
        self.set.check_timestamp_expired(time).map_err(|e| named(e, path, now))?;
        let Some(timestamp) = self.set.timestamp() else {
            return Err(malformed(path, "is not there"));
        };
        let version = timestamp.version;
        let published =
            timestamp.extra.get(PUBLISHED).and_then(serde_json::Value::as_u64).unwrap_or(0);
        // A time beyond its own expiry would lock the car out.
        let published = published.min(u64::try_from(timestamp.expires.as_second()).unwrap_or(0));
        self.above("timestamp", self.floor.timestamp, version)?;
        self.raise(|floor| {
            floor.timestamp = version;
            floor.time = floor.time.max(published);
        });
        if news {
            self.keep("timestamp.json", bytes);
        }
        Ok(())
    }

    fn snapshot(
        &mut self,
        fetcher: &mut Fetcher<'_>,
        time: jiff::Timestamp,
        now: u64,
    ) -> Result<(), UpdateError> {
        let pin = self.set.timestamp().and_then(|t| t.snapshot_meta()).cloned();
        let (path, length) = pinned(pin, "snapshot", SNAPSHOT_BYTES_MAX)?;
        let cached = self.disk.read(&self.directory.join("snapshot.json")).unwrap_or_default();
        if self.set.update_snapshot(&cached, time).is_err() {
            let bytes = fetcher.get(&path, length)?;
            self.set.update_snapshot(&bytes, time).map_err(|e| named(e, &path, now))?;
            self.keep("snapshot.json", bytes);
        }
        let version = self.set.snapshot().map_or(0, |s| s.version);
        self.above("snapshot", self.floor.snapshot, version)?;
        self.raise(|floor| floor.snapshot = version);
        Ok(())
    }

    fn targets(
        &mut self,
        fetcher: &mut Fetcher<'_>,
        time: jiff::Timestamp,
        now: u64,
    ) -> Result<(), UpdateError> {
        let pin = self.set.snapshot().and_then(|s| s.meta.get("targets.json")).cloned();
        let (path, length) = pinned(pin, "targets", TARGETS_BYTES_MAX)?;
        let cached = self.disk.read(&self.directory.join("targets.json")).unwrap_or_default();
        if self.set.update_targets(&cached, time).is_err() {
            let bytes = fetcher.get(&path, length)?;
            self.set.update_targets(&bytes, time).map_err(|e| named(e, &path, now))?;
            self.keep("targets.json", bytes);
        }
        let version = self.set.targets_role("targets").map_or(0, |t| t.version);
        self.above("targets", self.floor.targets, version)?;
        self.raise(|floor| floor.targets = version);
        Ok(())
    }

    fn above(&mut self, role: &'static str, floor: u64, offered: u64) -> Result<(), UpdateError> {
        if offered >= floor {
            return Ok(());
        }
        // What was kept of this role is a replay too.
        self.fresh.retain(|(name, _)| name.strip_suffix(".json") != Some(role));
        Err(UpdateError::Replay { role, floor, offered })
    }

    fn raise(&mut self, change: impl FnOnce(&mut RollbackFloor)) {
        let before = self.floor;
        change(&mut self.floor);
        self.floor_saved &= self.floor == before;
    }

    fn keep(&mut self, name: &str, bytes: Vec<u8>) {
        self.fresh.retain(|(kept, _)| kept != name);
        self.fresh.push((name.to_owned(), bytes));
    }

    /// The floor before the files: what is on disk is never above it.
    fn save(&mut self) -> Result<(), UpdateError> {
        if self.rotated {
            for name in ["timestamp.json", "snapshot.json"] {
                // A file that stays is one that the new keys do not verify.
                let _ = self.disk.remove_file(&self.directory.join(name));
            }
        }
        if !self.floor_saved {
            self.floor.write(self.disk.as_ref(), &self.directory)?;
            self.floor_saved = true;
        }
        self.fresh.drain(..).try_for_each(|(name, bytes)| {
            let path = self.directory.join(name);
            atomic_write::replace(self.disk.as_ref(), &path, &bytes).map_err(io_error(&path))
        })
    }
}

/// Where a root is kept that was accepted after the first.
fn root_name(version: u64) -> String {
    format!("root.{version}")
}

fn malformed(path: &str, problem: &str) -> UpdateError {
    UpdateError::Malformed { path: path.to_owned(), problem: problem.to_owned() }
}

/// Where the pinned version of a role lies, and how long it may be.
fn pinned(pin: Option<MetaFile>, role: &str, bytes_max: u64) -> Result<(String, u64), UpdateError> {
    let Some(pin) = pin else {
        return Err(malformed(&format!("metadata/{role}.json"), "is not pinned"));
    };
    let path = format!("metadata/{}.{role}.json", pin.version);
    Ok((path, pin.length.map_or(bytes_max, |length| length.min(bytes_max))))
}
