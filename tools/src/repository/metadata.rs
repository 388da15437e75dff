//! The metadata of a publish: its versions, its signing and its upload. Never replaces the
//! timestamp, which makes a publish visible.

use crate::report;
use crate::repository::clock::timestamp;
use crate::repository::keys::roots;
use crate::repository::state::{PREVIOUS, RepositoryState};
use crate::repository::store::{Store, confirm};
use anyhow::{Context, Result, ensure};
use hatchback::limits::{
    ROOT_BYTES_MAX, SNAPSHOT_BYTES_MAX, TARGETS_BYTES_MAX, TIMESTAMP_BYTES_MAX,
};
use hatchback::update::trust::PUBLISHED;
use serde_json::Value;
use std::num::NonZeroU64;
use std::path::Path;
use tough::editor::RepositoryEditor;
use tough::key_source::KeySource;
use tough::schema::{Root, Signed, Target};
use tough::{TargetName, schema};

/// How many times longer snapshot and targets last than the timestamp.
pub const LATE: u64 = 10;

/// The versions of the metadata that a publish signs.
pub struct Versions {
    pub timestamp: u64,
    pub snapshot: u64,
    pub targets: u64,
}

/// Returns the next versions of the metadata: the first ones without a file in the store. A killed
/// publish may have left files of newer versions, to which no timestamp leads.
pub fn next_versions(store: &dyn Store, state: &RepositoryState) -> Result<Versions> {
    let mut next = Versions {
        timestamp: state.timestamp + 1,
        snapshot: state.snapshot + 1,
        targets: state.targets + 1,
    };

    while store.bytes(&format!("metadata/{}.targets.json", next.targets))?.is_some() {
        next.targets += 1;
    }
    while store.bytes(&format!("metadata/{}.snapshot.json", next.snapshot))?.is_some() {
        next.snapshot += 1;
    }
    Ok(next)
}

/// The next version of the metadata, to be signed.
pub struct Signing<'a> {
    /// Folder of the keys and roots.
    pub keys: &'a Path,
    /// The open keys.
    pub signers: Vec<Box<dyn KeySource>>,
    /// The metadata in force.
    pub state: &'a RepositoryState,
    pub next: &'a Versions,
    pub added: Vec<(TargetName, Target)>,
    pub revoked: &'a [TargetName],
    /// Time of the publish, in seconds since 1970.
    pub now: u64,
    /// Seconds until the timestamp expires.
    pub expires_s: u64,
}

impl Signing<'_> {
    /// Signs timestamp, snapshot and targets metadata and writes them into `folder`.
    pub async fn sign(self, folder: &Path) -> Result<()> {
        let roots = roots(self.keys)?;
        let newest = roots.last().with_context(|| format!("{}: no root", self.keys.display()))?;
        let mut editor = RepositoryEditor::new(&newest.path).await?;
        if let Some(signed) = &self.state.signed {
            let mut signed = signed.clone();
            signed.signed._extra.insert(PUBLISHED.to_owned(), Value::from(self.now));
            signed.signed._extra.insert(PREVIOUS.to_owned(), Value::from(self.state.snapshot));
            editor.targets(signed)?;
        }

        let version = |version: u64| NonZeroU64::new(version).context("a version of 0");
        let timestamp_version = version(self.next.timestamp)?;
        let soon = timestamp(self.now + self.expires_s)?;
        let late = timestamp(self.now + LATE * self.expires_s)?;
        let mut stamp = schema::Timestamp::new("1.0.0".to_owned(), timestamp_version, soon);
        stamp._extra.insert(PUBLISHED.to_owned(), Value::from(self.now));
        editor.timestamp(stamp)?;
        editor.timestamp_version(timestamp_version).timestamp_expires(soon);
        editor.snapshot_version(version(self.next.snapshot)?).snapshot_expires(late);
        editor.targets_version(version(self.next.targets)?)?.targets_expires(late)?;

        // Revoked targets are removed first: a bundle may replace a revoked one of the same name.
        for name in self.revoked {
            editor.remove_target(name)?;
        }
        for (name, target) in self.added {
            editor.add_target(name, target)?;
        }

        editor.sign(&self.signers).await?.write(folder).await?;
        let Versions { targets, snapshot, .. } = self.next;
        for (name, bytes_max) in [
            (format!("{targets}.targets.json"), TARGETS_BYTES_MAX),
            (format!("{snapshot}.snapshot.json"), SNAPSHOT_BYTES_MAX),
            ("timestamp.json".to_owned(), TIMESTAMP_BYTES_MAX),
        ] {
            check_length(&name, &read_signed(folder, &name)?, bytes_max)?;
        }
        Ok(())
    }
}

/// Checks that cars read all of `content`, the metadata file `name`. Prints a note if it is long.
///
/// # Errors
/// Cars would refuse it at each poll, and with it every later release.
fn check_length(name: &str, content: &[u8], bytes_max: u64) -> Result<()> {
    let bytes = content.len() as u64;
    ensure!(
        bytes <= bytes_max,
        "nothing was published: {name} has {bytes} bytes, and cars read {bytes_max}; revoke old \
         releases with --revoke"
    );
    if bytes > bytes_max / 2 {
        report::note(format_args!("{name} has {bytes} of the {bytes_max} bytes that cars read"));
    }
    Ok(())
}

/// Returns the roots of the folder `keys` that `store` lacks, with their paths in it.
///
/// # Errors
/// The store has another root of some version, or a newer one: a car that trusts that one would
/// refuse whatever these keys sign. Or the store fails.
pub fn missing_roots(store: &dyn Store, keys: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    let path = |version: u64| format!("metadata/{version}.root.json");
    let (mut missing, mut newest) = (Vec::new(), 0);
    for root in roots(keys)? {
        let (name, folder) = (path(root.version), keys.display());
        newest = newest.max(root.version);
        let content = std::fs::read(&root.path).with_context(|| root.path.display().to_string())?;
        check_length(&name, &content, ROOT_BYTES_MAX)?;
        let stored = store.get(&name)?;
        if stored.as_ref() == Some(&content) {
            continue;
        }
        // A killed upload may have left a part of it.
        let is_root = |stored: Vec<u8>| serde_json::from_slice::<Signed<Root>>(&stored).is_ok();
        ensure!(
            !stored.is_some_and(is_root),
            "nothing was published: {name} is another root than that of {folder}: use the folder \
             that made it"
        );
        missing.push((name, content));
    }
    let next = path(newest + 1);
    ensure!(
        store.bytes(&next)?.is_none(),
        "nothing was published: the repository has {next}, and {} ends before it: use the newest \
         folder of keys",
        keys.display()
    );
    Ok(missing)
}

/// Uploads the targets and snapshot metadata of the folder `signed`.
pub fn upload_metadata(store: &dyn Store, next: &Versions, signed: &Path) -> Result<()> {
    let targets = format!("{}.targets.json", next.targets);
    for name in [targets, format!("{}.snapshot.json", next.snapshot)] {
        let (path, content) = (format!("metadata/{name}"), read_signed(signed, &name)?);
        let uploaded = store.put_new(&path, content.clone()).with_context(|| {
            format!(
                "nothing was published: {name} exists, another publisher may be publishing; \
                 publish again"
            )
        });
        confirm(store, &path, &content, uploaded)?;
    }
    Ok(())
}

pub fn read_signed(folder: &Path, name: &str) -> Result<Vec<u8>> {
    std::fs::read(folder.join(name)).with_context(|| name.to_owned())
}
