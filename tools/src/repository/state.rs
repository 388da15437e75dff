//! What a repository has: the metadata that are in force, verified, and those that cars were led to
//! before, as far as `prune` left them. Only reads.

use crate::repository::keys::roots;
use crate::repository::store::Store;
use anyhow::{Context, Result, bail, ensure};
use hatchback::update::trust::PUBLISHED;
use serde_json::Value;
use sigstore_tuf::{Metadata, TrustedMetadataSet};
use std::collections::HashMap;
use std::path::Path;
use tough::TargetName;
use tough::schema::{Signed, Snapshot, Target, Targets};

/// The one file that leads to everything else.
pub const TIMESTAMP: &str = "metadata/timestamp.json";

/// The field of the targets' metadata that says which version of the snapshot cars were led to
/// before.
pub const PREVIOUS: &str = "previous";

/// The metadata that a repository has now.
#[derive(Default)]
pub struct RepositoryState {
    /// The timestamp's bytes.
    pub stamp: Option<Vec<u8>>,
    /// Version of the timestamp.
    pub timestamp: u64,
    /// Of the snapshot.
    pub snapshot: u64,
    /// Of the targets.
    pub targets: u64,
    /// What is listed.
    pub signed: Option<Signed<Targets>>,
    /// Whether the targets' keys were replaced since: only an older root vouches for what is
    /// listed.
    pub is_outdated: bool,
}

impl RepositoryState {
    /// The targets that are listed.
    pub fn listed(&self) -> impl Iterator<Item = (&TargetName, &Target)> {
        self.signed.iter().flat_map(|s| &s.signed.targets)
    }
}

/// What one version of the snapshot led cars to.
pub struct Past {
    /// Where the metadata lie.
    pub paths: [String; 2],
    /// What was listed.
    pub targets: Targets,
    version: u64,
}

impl Past {
    /// What version `version` led to; `None` where a prune took it. Its signatures are not looked
    /// at.
    ///
    /// # Errors
    /// The store refused, or it is not metadata.
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
        Ok(Some(Self { paths, targets: targets.signed, version }))
    }

    /// When it was published, seconds since 1970.
    pub fn published(&self) -> u64 {
        self.number(PUBLISHED)
    }

    /// The version of the snapshot before it; 0 if it is the first.
    pub fn previous(&self) -> u64 {
        self.number(PREVIOUS).min(self.version - 1)
    }

    fn number(&self, field: &str) -> u64 {
        self.targets._extra.get(field).and_then(Value::as_u64).unwrap_or(0)
    }
}

/// What each name stood for since the oldest metadata that are still there: SHA-256 of manifests.
#[derive(Default)]
pub struct ReleaseNames(HashMap<TargetName, Vec<u8>>);

impl ReleaseNames {
    /// All of them.
    ///
    /// # Errors
    /// As `Past::read`.
    pub fn read(store: &dyn Store, present: &RepositoryState) -> Result<Self> {
        let (mut names, mut next) = (Self::default(), present.snapshot);
        while next > 0 {
            let Some(past) = Past::read(store, next)? else { break };
            next = past.previous();
            // The oldest counts: a car may have it still.
            names.0.extend(
                past.targets.targets.into_iter().map(|(n, t)| (n, t.hashes.sha256.to_vec())),
            );
        }
        Ok(names)
    }

    /// A delta says of its parent no more than the sequence: were a name given to other content,
    /// cars that have the first would take deltas from the second.
    ///
    /// # Errors
    /// The name stood for another content.
    pub fn hold(&mut self, name: &TargetName, target: &Target) -> Result<()> {
        let hash = target.hashes.sha256.to_vec();
        let same = self.0.get(name).is_none_or(|before| *before == hash);
        ensure!(
            same,
            "{}: was published with other content, which cars may have: pack it with a higher sequence",
            name.raw()
        );
        self.0.insert(name.clone(), hash);
        Ok(())
    }
}

/// Whether the keys that `root` names for the role signed the metadata of the `targets`.
fn vouches(root: &[u8], targets: &[u8]) -> Result<bool> {
    let set = TrustedMetadataSet::from_root(root)?;
    let role = set.root().role("targets").context("the root names no role targets")?;
    let targets = Metadata::<sigstore_tuf::Targets>::from_slice(targets)?;
    Ok(targets.verify_threshold(&set.root().keys, role, "targets").is_ok())
}

/// Reads and verifies what the repository has now; expiry does not matter to the publisher.
///
/// # Errors
/// No root in `keys` vouches for it, or the store refused.
pub fn present(store: &dyn Store, keys: &Path) -> Result<RepositoryState> {
    let Some(timestamp) = store.get(TIMESTAMP)? else { return Ok(RepositoryState::default()) };
    let long_ago = jiff::Timestamp::UNIX_EPOCH;
    let mut refused = None;
    // After a rotation what is there is signed by the keys of an older root.
    let roots = roots(keys)?
        .iter()
        .rev()
        .map(|(_, path)| Ok(std::fs::read(path)?))
        .collect::<Result<Vec<_>>>()?;
    for root in &roots {
        let mut set = TrustedMetadataSet::from_root(root)?;
        if let Err(e) = set.update_timestamp(&timestamp, long_ago) {
            refused = refused.or(Some(e));
            continue;
        }
        let pinned = |role: &str, version: Option<u64>| {
            let name = format!("metadata/{}.{role}.json", version.unwrap_or(0));
            store.get(&name)?.with_context(|| format!("{name} is missing"))
        };
        let snapshot =
            pinned("snapshot", set.timestamp().and_then(|t| t.snapshot_meta()).map(|m| m.version))?;
        if let Err(e) = set.update_snapshot(&snapshot, long_ago) {
            refused = refused.or(Some(e));
            continue;
        }
        let targets = set.snapshot().and_then(|s| s.meta.get("targets.json")).map(|m| m.version);
        let targets = pinned("targets", targets)?;
        if let Err(e) = set.update_targets(&targets, long_ago) {
            refused = refused.or(Some(e));
            continue;
        }
        let signed: Signed<Targets> = serde_json::from_slice(&targets)?;
        return Ok(RepositoryState {
            stamp: Some(timestamp),
            timestamp: set.timestamp().map_or(0, |t| t.version),
            snapshot: set.snapshot().map_or(0, |s| s.version),
            targets: signed.signed.version.get(),
            signed: Some(signed),
            is_outdated: !vouches(&roots[0], &targets)?,
        });
    }
    match refused {
        Some(e) => Err(e).context("the repository is not signed by this fleet's keys"),
        None => bail!("{}: holds no root", keys.display()),
    }
}
