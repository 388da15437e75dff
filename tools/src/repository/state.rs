//! The state of a repository: the verified metadata in force, and earlier metadata that a timestamp
//! led cars to, as far as `prune` has kept them. Only reads.

use crate::repository::content::find_manifest;
use crate::repository::keys::{RootFile, roots};
use crate::repository::store::Store;
use anyhow::{Context, Result, bail, ensure};
use hatchback::bundle::manifest::{Generation, Manifest};
use hatchback::update::release::parse_name;
use hatchback::update::trust::PUBLISHED;
use serde_json::Value;
use sigstore_tuf::{Metadata, TrustedMetadataSet};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::path::Path;
use tough::TargetName;
use tough::schema::{Signed, Snapshot, Target, Targets};

/// Path of the timestamp, the one file that leads cars to everything else.
pub const TIMESTAMP: &str = "metadata/timestamp.json";

/// Field of the targets metadata: the version of the snapshot metadata before this publish.
pub const PREVIOUS: &str = "previous";

/// The metadata in force.
#[derive(Default)]
pub struct RepositoryState {
    /// Bytes of the timestamp; `None` in an empty repository.
    pub stamp: Option<Vec<u8>>,
    /// Version of the timestamp.
    pub timestamp: u64,
    /// The time of signing of the timestamp, in seconds since 1970. 0 if its keys were replaced
    /// since: cars then forget the time that those keys signed.
    pub published: u64,
    /// The time at which the timestamp expires, in seconds since 1970.
    pub expires: u64,
    /// Version of the snapshot metadata.
    pub snapshot: u64,
    /// Version of the targets metadata.
    pub targets: u64,
    /// The targets metadata: the listed releases.
    pub signed: Option<Signed<Targets>>,
    /// Whether the targets' keys were replaced after the last publish: only keys of an older root
    /// signed the listed releases.
    pub is_outdated: bool,
    /// The roots in the folder of keys, from the newest.
    roots: Vec<Vec<u8>>,
}

impl RepositoryState {
    /// Returns the listed targets.
    pub fn listed(&self) -> impl Iterator<Item = (&TargetName, &Target)> {
        self.signed.iter().flat_map(|s| &s.signed.targets)
    }
}

/// The metadata to which one version of the snapshot metadata led cars.
pub struct Past {
    /// Paths of the snapshot and the targets metadata.
    pub paths: [String; 2],
    /// The targets that were listed.
    pub targets: Targets,
    /// The targets metadata as stored.
    signed: Vec<u8>,
    version: u64,
}

impl Past {
    /// Reads the metadata of `version`. Returns `None` if a prune has removed them. Does not verify
    /// signatures.
    ///
    /// # Errors
    /// The store fails, or an object is not metadata.
    pub fn read(store: &dyn Store, version: u64) -> Result<Option<Self>> {
        let path = format!("metadata/{version}.snapshot.json");
        let Some(bytes) = store.get(&path)? else { return Ok(None) };
        let snapshot: Signed<Snapshot> =
            serde_json::from_slice(&bytes).with_context(|| path.clone())?;
        let targets = snapshot.signed.meta.get("targets.json").map_or(0, |meta| meta.version.get());
        let paths = [path, format!("metadata/{targets}.targets.json")];
        let Some(bytes) = store.get(&paths[1])? else { return Ok(None) };
        let targets: Signed<Targets> =
            serde_json::from_slice(&bytes).with_context(|| paths[1].clone())?;
        Ok(Some(Self { paths, targets: targets.signed, signed: bytes, version }))
    }

    /// Returns the time of the publish, in seconds since 1970.
    pub fn published(&self) -> u64 {
        self.number(PUBLISHED)
    }

    /// Returns the version of the snapshot metadata before this one; 0 if this is the first.
    pub fn previous(&self) -> u64 {
        self.number(PREVIOUS).min(self.version.saturating_sub(1))
    }

    fn number(&self, field: &str) -> u64 {
        self.targets._extra.get(field).and_then(Value::as_u64).unwrap_or(0)
    }
}

/// The newest release before another.
#[derive(Default)]
pub struct Before {
    /// The manifests of its targets; empty if there is none.
    pub manifests: Vec<Manifest>,
    /// Whether a later one has no readable manifest.
    pub is_lost: bool,
}

/// The content of every release name since the oldest metadata in the store: SHA-256 of manifests.
#[derive(Clone, Default)]
pub struct ReleaseNames(HashMap<TargetName, Vec<u8>>);

impl ReleaseNames {
    /// Reads all earlier metadata that the store has.
    ///
    /// # Errors
    /// As [`Past::read`], or none of the roots signed the metadata: who can write to the store
    /// could choose the numbers of releases.
    pub fn read(store: &dyn Store, state: &RepositoryState) -> Result<Self> {
        let (mut names, mut next) = (Self::default(), state.snapshot);
        while next > 0 {
            let Some(past) = Past::read(store, next)? else { break };
            let mut is_signed = false;
            for root in &state.roots {
                is_signed = is_signed || is_signed_by(root, &past.signed)?;
            }
            ensure!(
                is_signed,
                "{}: no root in the folder of keys signed it; restore it from a backup",
                past.paths[1]
            );
            next = past.previous();
            // The oldest content of a name counts, because a car may still have it.
            names.0.extend(
                past.targets.targets.into_iter().map(|(n, t)| (n, t.hashes.sha256.to_vec())),
            );
        }
        Ok(names)
    }

    /// Returns the highest sequence of the releases of `lineage`, revoked ones included.
    pub fn newest(&self, lineage: &str) -> Option<u64> {
        let releases = self.0.keys().filter_map(|name| Some(parse_name(name.raw())?.0));
        releases.filter(|release| release.lineage == lineage).map(|r| r.sequence).max()
    }

    /// Reads the manifests of the newest release before `generation` that has a readable one.
    /// Revoked releases count: a car may serve one still, and it refuses what its callers cannot
    /// use. Each release was compared with the one before it, so one comparison is enough.
    ///
    /// # Errors
    /// The store fails.
    pub fn before(&self, store: &dyn Store, generation: &Generation) -> Result<Before> {
        let earlier = |(name, hash)| {
            let known: Generation = parse_name(TargetName::raw(name))?.0;
            let Generation { lineage, sequence } = known;
            let is_earlier = lineage == generation.lineage && sequence < generation.sequence;
            is_earlier.then_some((sequence, name, hash))
        };
        let mut earlier: Vec<(u64, &TargetName, &Vec<u8>)> =
            self.0.iter().filter_map(earlier).collect();
        earlier.sort_by_key(|release| Reverse(release.0));
        let mut before = Before::default();
        for release in earlier.chunk_by(|a, b| a.0 == b.0) {
            for (_, name, hash) in release {
                before.manifests.extend(find_manifest(store, name.raw(), hash)?);
            }
            if !before.manifests.is_empty() {
                break;
            }
            before.is_lost = true;
        }
        Ok(before)
    }

    /// Returns whether the target `name` had the content `hash`.
    pub fn is_of(&self, name: &str, hash: &[u8]) -> bool {
        self.0.iter().any(|(known, content)| known.raw() == name && content == hash)
    }

    /// Returns the contents of the names that `is_wanted`.
    pub fn hashes(&self, is_wanted: impl Fn(&TargetName) -> bool) -> impl Iterator<Item = &[u8]> {
        let wanted = self.0.iter().filter(move |(name, _)| is_wanted(name));
        wanted.map(|(_, content)| content.as_slice())
    }

    /// Records that `name` stands for the content `hash`. A name is immutable, because a delta
    /// identifies its parent only by the sequence. If a name had two contents, a car could install
    /// a delta onto the wrong parent.
    ///
    /// # Errors
    /// The name stood for other content before.
    pub fn hold(&mut self, name: &TargetName, hash: &[u8]) -> Result<()> {
        let same = self.0.get(name).is_none_or(|before| before == hash);
        ensure!(
            same,
            "{}: was published with other content, which cars may have installed; \
             pack the model with a higher sequence",
            name.raw()
        );
        self.0.insert(name.clone(), hash.to_vec());
        Ok(())
    }
}

/// Checks that `store`, which has no timestamp, never led a car to a second publish. Versions would
/// begin anew, so cars would refuse the releases, and a release name could get other content. What
/// a killed first publish leaves follows no other metadata, and so does a first publish whose
/// timestamp was lost: that one is not noticed.
///
/// # Errors
/// The timestamp was lost, or the store fails.
fn check_is_new(store: &dyn Store) -> Result<()> {
    let version = |path: &str| {
        path.strip_prefix("metadata/")?.strip_suffix(".snapshot.json")?.parse::<u64>().ok()
    };
    for version in store.list()?.iter().filter_map(|object| version(&object.path)) {
        let past = Past::read(store, version)?;
        ensure!(
            past.is_none_or(|past| past.previous() == 0),
            "{TIMESTAMP} is missing, and metadata/{version}.snapshot.json follows an earlier \
             publish: put the lost timestamp back, from a mirror or a backup"
        );
    }
    Ok(())
}

/// Returns whether the targets' keys of `root` signed the metadata `targets`.
fn is_signed_by(root: &[u8], targets: &[u8]) -> Result<bool> {
    let set = TrustedMetadataSet::from_root(root)?;
    let role = set.root().role("targets").context("the root has no role `targets`")?;
    let targets = Metadata::<sigstore_tuf::Targets>::from_slice(targets)?;
    Ok(targets.verify_threshold(&set.root().keys, role, "targets").is_ok())
}

impl RepositoryState {
    /// Reads and verifies the metadata in force. Does not check when they expire: an expired
    /// repository can be published to.
    ///
    /// # Errors
    /// No root in the folder `keys` verifies the metadata, or the store fails.
    pub fn read(store: &dyn Store, keys: &Path) -> Result<Self> {
        let Some(timestamp) = store.get(TIMESTAMP)? else {
            check_is_new(store)?;
            return Ok(Self::default());
        };
        let read = |root: &RootFile| {
            std::fs::read(&root.path).with_context(|| root.path.display().to_string())
        };
        let roots = roots(keys)?.iter().rev().map(read).collect::<Result<Vec<_>>>()?;
        let newest = roots.first().with_context(|| format!("{}: no root", keys.display()))?;

        // After a rotation the metadata in force are signed by the keys of an older root.
        let mut refused = None;
        for root in &roots {
            match verify(store, root, &timestamp)? {
                Verified::Refused(name, e) => refused = refused.or(Some((name, e))),
                Verified::Metadata(set, targets) => {
                    let signed: Signed<Targets> = serde_json::from_slice(&targets)?;
                    let stamp = set.timestamp().context("the timestamp is missing")?;
                    let published = stamp.extra.get(PUBLISHED).and_then(Value::as_u64);
                    let long_ago = jiff::Timestamp::UNIX_EPOCH;
                    let mut keys = TrustedMetadataSet::from_root(newest)?;
                    let is_by_newest = keys.update_timestamp(&timestamp, long_ago).is_ok();
                    return Ok(Self {
                        timestamp: stamp.version,
                        published: published.filter(|_| is_by_newest).unwrap_or(0),
                        expires: u64::try_from(stamp.expires.as_second()).unwrap_or(0),
                        snapshot: set.snapshot().map_or(0, |s| s.version),
                        targets: signed.signed.version.get(),
                        signed: Some(signed),
                        is_outdated: !is_signed_by(newest, &targets)?,
                        roots: roots.clone(),
                        stamp: Some(timestamp),
                    });
                }
            }
        }

        match refused {
            Some((name, e)) => bail!("{name} is not signed by the keys of {}: {e}", keys.display()),
            None => bail!("{}: no root", keys.display()),
        }
    }
}

/// The metadata that a timestamp leads to, verified from one root.
enum Verified {
    /// The verified metadata, and the bytes of the targets metadata.
    Metadata(Box<TrustedMetadataSet>, Vec<u8>),
    /// The keys of the root did not sign them: the path of the object, and why.
    Refused(String, sigstore_tuf::Error),
}

/// Verifies the metadata that `timestamp` leads to with the keys of `root`, and ignores expiry.
///
/// # Errors
/// An object is missing, or the store fails.
fn verify(store: &dyn Store, root: &[u8], timestamp: &[u8]) -> Result<Verified> {
    let long_ago = jiff::Timestamp::UNIX_EPOCH;
    let read = |role: &str, version: Option<u64>| {
        let name = format!("metadata/{}.{role}.json", version.unwrap_or(0));
        let bytes = store.get(&name)?;
        let bytes = bytes.with_context(|| format!("{name} is missing in the repository"))?;
        anyhow::Ok((name, bytes))
    };

    let mut set = TrustedMetadataSet::from_root(root)?;
    if let Err(e) = set.update_timestamp(timestamp, long_ago) {
        return Ok(Verified::Refused(TIMESTAMP.to_owned(), e));
    }

    let version = set.timestamp().and_then(|t| t.snapshot_meta()).map(|m| m.version);
    let (name, snapshot) = read("snapshot", version)?;
    if let Err(e) = set.update_snapshot(&snapshot, long_ago) {
        return Ok(Verified::Refused(name, e));
    }

    let version = set.snapshot().and_then(|s| s.meta.get("targets.json")).map(|m| m.version);
    let (name, targets) = read("targets", version)?;
    Ok(match set.update_targets(&targets, long_ago) {
        Err(e) => Verified::Refused(name, e),
        Ok(_) => Verified::Metadata(Box::new(set), targets),
    })
}
