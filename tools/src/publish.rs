//! `publish`: bundles become a release that cars find. Chunks go up first, each under its hash, then manifests,
//! then the signed metadata, and last of all the timestamp, the one file that leads to everything else: a publish
//! that is killed leaves nothing that a car could see. Only adds objects; what is old is for `prune` to remove.

use crate::report;
use crate::signing::{DAY_S, block_on, roots, sources, timestamp};
use crate::store::{DryRun, Objects, Store};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hatchback::bundle::BundleReader;
use hatchback::manifest::sha256;
use hatchback::sync::release::{BYTES, SHARE, chunk_path, manifest_path, target_name};
use hatchback::sync::trust::PUBLISHED;
use serde::Serialize;
use serde_json::Value;
use sigstore_tuf::TrustedMetadataSet;
use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use tough::editor::RepositoryEditor;
use tough::schema::{Hashes, Signed, Target, Targets};
use tough::{TargetName, schema};

/// Signs bundles and puts them where cars fetch them
#[derive(Args, Debug)]
pub struct PublishArgs {
    /// Bundles: snapshots and deltas
    bundles: Vec<PathBuf>,
    /// The repository: a directory that a web server or a CDN hands out, or with the feature `s3` an `s3://BUCKET/PREFIX`
    /// (endpoint and keys from the AWS_... environment)
    #[arg(long)]
    to: String,
    /// The folder of the keys and roots (`hatchback keys new`)
    #[arg(long)]
    keys: PathBuf,
    /// Takes back this release, or one target of it by its whole name; a car that has committed it says so, and stays on it
    /// until a newer one comes
    #[arg(long, value_name = "[LINEAGE/]SEQUENCE")]
    revoke: Vec<String>,
    /// Share of the fleet that may have these bundles, per cent; publish them again to widen it
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u8).range(1..=100))]
    share: u8,
    /// Days until cars take the timestamp for frozen: publish again before that
    #[arg(long, default_value_t = 7)]
    days: u64,
    /// Says what would be done, and does nothing
    #[arg(long)]
    dry_run: bool,
    /// Prints the result as JSON
    #[arg(long)]
    json: bool,
}

/// What a publish changes.
#[derive(Clone, Debug)]
pub struct Change {
    /// Bundles to add.
    pub bundles: Vec<PathBuf>,
    /// Which share of the fleet may have them, per cent.
    pub share: u8,
    /// Releases to take back: `SEQUENCE` where there is one lineage, `LINEAGE/SEQUENCE`, or a target's whole name.
    pub revoke: Vec<String>,
    /// Seconds until the timestamp expires; snapshot and targets last ten times as long.
    pub expires_s: u64,
}

impl Default for Change {
    /// Nothing but a new timestamp, for a day.
    fn default() -> Self {
        Self { bundles: Vec::new(), share: 100, revoke: Vec::new(), expires_s: DAY_S }
    }
}

/// The one file that leads to everything else.
const TIMESTAMP: &str = "metadata/timestamp.json";

/// The field of the targets' metadata that says which version of the snapshot cars were led to before.
pub const PREVIOUS: &str = "previous";

/// What was published.
#[derive(Debug, Default, Serialize)]
pub struct Published {
    /// Target names added.
    pub added: Vec<String>,
    /// Target names taken back.
    pub revoked: Vec<String>,
    /// Chunks put up.
    pub chunks: u64,
    /// Bytes of them.
    pub chunk_bytes: u64,
    /// Chunks that were there.
    pub chunks_known: u64,
    /// Version of the timestamp that leads to it.
    pub version: u64,
}

/// Runs the command.
///
/// # Errors
/// A bundle, a key or the repository is refused; cars see nothing of it then.
pub fn run(args: &PublishArgs) -> Result<()> {
    let store = Objects::open(&args.to)?;
    let dry = DryRun(&store);
    let store: &dyn Store = if args.dry_run { &dry } else { &store };
    let (bundles, revoke) = (args.bundles.clone(), args.revoke.clone());
    let change = Change { bundles, share: args.share, revoke, expires_s: args.days * DAY_S };
    let done = publish(store, &args.keys, &change, crate::sync::now()?)?;
    if args.json {
        return report::write_json(Path::new("-"), &done);
    }
    done.added.iter().for_each(|name| println!("+ {name}"));
    done.revoked.iter().for_each(|name| println!("- {name}"));
    let (n, bytes, known) =
        (report::count(done.chunks), report::bytes(done.chunk_bytes), report::count(done.chunks_known));
    let dry = if args.dry_run { " (dry run: nothing was written)" } else { "" };
    println!("version {}: {n} chunks, {bytes}; {known} were there{dry}", done.version);
    Ok(())
}

/// The metadata that a repository has now.
#[derive(Default)]
pub(crate) struct Present {
    /// The timestamp's bytes.
    stamp: Option<Vec<u8>>,
    timestamp: u64,
    pub(crate) snapshot: u64,
    targets: u64,
    pub(crate) signed: Option<Signed<Targets>>,
}

/// The versions that a publish signs.
struct Next {
    timestamp: u64,
    snapshot: u64,
    targets: u64,
}

impl Present {
    fn next(&self) -> Next {
        Next { timestamp: self.timestamp + 1, snapshot: self.snapshot + 1, targets: self.targets + 1 }
    }
}

/// Publishes `change` in `store`, signed with the keys in `keys`, as of `now` (seconds since 1970).
///
/// # Errors
/// A bundle, a key or the repository is refused; cars see nothing of it then.
pub fn publish(store: &dyn Store, keys: &Path, change: &Change, now: u64) -> Result<Published> {
    let present = present(store, keys)?;
    let mut done = Published { version: present.timestamp + 1, ..Published::default() };
    let (mut added, mut known) = (Vec::new(), Vec::new());
    for path in &change.bundles {
        added.push(put_bundle(store, path, change.share, (&mut done, &mut known))?);
    }
    let revoked = revoked(&present, &change.revoke)?;
    done.added = added.iter().map(|(name, _)| name.raw().to_owned()).collect();
    done.revoked = revoked.iter().map(|name| name.raw().to_owned()).collect();
    let folder = tempfile::tempdir()?;
    let mut next = present.next();
    // What a killed publish left keeps its number: no car was led to it.
    while store.has(&format!("metadata/{}.targets.json", next.targets))? {
        next.targets += 1;
    }
    while store.has(&format!("metadata/{}.snapshot.json", next.snapshot))? {
        next.snapshot += 1;
    }
    let lasts = (now, change.expires_s);
    block_on(sign(keys, (&present, &next), added, &revoked, lasts, folder.path()))??;
    for (version, path) in roots(keys)? {
        let name = format!("metadata/{version}.root.json");
        if !store.has(&name)? {
            store.put(&name, std::fs::read(&path)?)?;
        }
    }
    let signed = |name: &str| std::fs::read(folder.path().join(name)).with_context(|| name.to_owned());
    for name in [format!("{}.targets.json", next.targets), format!("{}.snapshot.json", next.snapshot)] {
        let put = store.put_new(&format!("metadata/{name}"), signed(&name)?);
        put.with_context(|| format!("{name}: another publisher is at work? Nothing was published"))?;
    }
    for chunk in &known {
        ensure!(store.has(chunk)?, "{chunk} was removed meanwhile; nothing was published: try again");
    }
    let put = store.replace(TIMESTAMP, present.stamp.as_deref(), signed("timestamp.json")?);
    put.context("another publisher was faster? Nothing was published: try again")?;
    Ok(done)
}

/// Reads and verifies what the repository has now; expiry does not matter to the publisher.
pub(crate) fn present(store: &dyn Store, keys: &Path) -> Result<Present> {
    let Some(timestamp) = store.get(TIMESTAMP)? else { return Ok(Present::default()) };
    let long_ago = jiff::Timestamp::UNIX_EPOCH;
    let mut refused = None;
    // After a rotation what is there is signed by the keys of an older root.
    for (_, path) in roots(keys)?.iter().rev() {
        let mut set = TrustedMetadataSet::from_root(&std::fs::read(path)?)?;
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
        return Ok(Present {
            stamp: Some(timestamp),
            timestamp: set.timestamp().map_or(0, |t| t.version),
            snapshot: set.snapshot().map_or(0, |s| s.version),
            targets: signed.signed.version.get(),
            signed: Some(signed),
        });
    }
    match refused {
        Some(e) => Err(e).context("the repository is not signed by this fleet's keys"),
        None => bail!("{}: holds no root", keys.display()),
    }
}

/// Puts up what the store does not have yet; what it has is added to `known`.
fn put_bundle(
    store: &dyn Store,
    path: &Path,
    share: u8,
    (done, known): (&mut Published, &mut Vec<String>),
) -> Result<(TargetName, Target)> {
    let mut bundle = BundleReader::open(path)?;
    let mut bytes = 0;
    bundle.each_stored(|chunk, stored| {
        bytes += stored.len() as u64;
        let at = chunk_path(&chunk.sha256);
        if store.has(&at)? {
            done.chunks_known += 1;
            known.push(at);
            return Ok(());
        }
        done.chunks += 1;
        done.chunk_bytes += stored.len() as u64;
        store.put(&at, stored.to_vec())
    })?;
    let (manifest, content) = (bundle.manifest(), bundle.manifest_bytes());
    let name = target_name(&manifest.generation, manifest.parent);
    let hash = sha256(content);
    store.put(&manifest_path(&name, &hash), content.to_vec())?;
    let target = Target {
        length: content.len() as u64,
        hashes: Hashes { sha256: hash.to_vec().into(), _extra: HashMap::new() },
        custom: HashMap::from([
            (BYTES.to_owned(), Value::from(bytes)),
            (SHARE.to_owned(), Value::from(share)),
        ]),
        _extra: HashMap::new(),
    };
    Ok((TargetName::new(name)?, target))
}

/// The targets that `releases` name. One without a lineage must be of the only one.
fn revoked(present: &Present, releases: &[String]) -> Result<Vec<TargetName>> {
    let names: Vec<TargetName> =
        present.signed.iter().flat_map(|s| s.signed.targets.keys()).cloned().collect();
    let parts = |name: &TargetName| {
        let (lineage, file) = name.raw().split_once('/')?;
        Some((lineage.to_owned(), file.split('-').next()?.parse::<u64>().ok()?))
    };
    let lineages: BTreeSet<String> = names.iter().filter_map(parts).map(|(lineage, _)| lineage).collect();
    let mut revoked = Vec::new();
    for release in releases {
        if let Some(name) = names.iter().find(|name| name.raw() == release) {
            revoked.push(name.clone());
            continue;
        }
        let (lineage, sequence) = match (release.split_once('/'), lineages.first()) {
            (Some((lineage, sequence)), _) => (lineage, sequence),
            (None, Some(only)) if lineages.len() == 1 => (only.as_str(), release.as_str()),
            _ => bail!("--revoke {release}: say LINEAGE/SEQUENCE; published are {lineages:?}"),
        };
        let sequence: u64 = sequence.parse().with_context(|| format!("--revoke {release}"))?;
        let before = revoked.len();
        let wanted = Some((lineage.to_owned(), sequence));
        revoked.extend(names.iter().filter(|name| parts(name) == wanted).cloned());
        ensure!(revoked.len() > before, "--revoke {release}: is not published");
    }
    Ok(revoked)
}

/// Signs the next version of all three roles into `folder`, as of `now` and for `expires_s`.
async fn sign(
    keys: &Path,
    (present, next): (&Present, &Next),
    added: Vec<(TargetName, Target)>,
    revoked: &[TargetName],
    (now, expires_s): (u64, u64),
    folder: &Path,
) -> Result<()> {
    let roots = roots(keys)?;
    let (_, root) = roots.last().with_context(|| format!("{}: holds no root", keys.display()))?;
    let mut editor = RepositoryEditor::new(root).await?;
    if let Some(signed) = &present.signed {
        let mut signed = signed.clone();
        signed.signed._extra.insert(PUBLISHED.to_owned(), Value::from(now));
        signed.signed._extra.insert(PREVIOUS.to_owned(), Value::from(present.snapshot));
        editor.targets(signed)?;
    }
    let version = |version: u64| NonZeroU64::new(version).context("version");
    let (soon, late) = (timestamp(now + expires_s)?, timestamp(now + 10 * expires_s)?);
    let mut stamp = schema::Timestamp::new("1.0.0".to_owned(), version(next.timestamp)?, soon);
    stamp._extra.insert(PUBLISHED.to_owned(), Value::from(now));
    editor.timestamp(stamp)?;
    editor.timestamp_version(version(next.timestamp)?).timestamp_expires(soon);
    editor.snapshot_version(version(next.snapshot)?).snapshot_expires(late);
    editor.targets_version(version(next.targets)?)?.targets_expires(late)?;
    // A release may take the place of one of the same name that is taken back.
    for name in revoked {
        editor.remove_target(name)?;
    }
    for (name, target) in added {
        editor.add_target(name, target)?;
    }
    editor.sign(&sources(keys)?).await?.write(folder).await?;
    Ok(())
}
