//! `publish`: bundles become a release that cars find. Chunks go up first, each under its hash,
//! then manifests, then the signed metadata, and last of all the timestamp, the one file that leads
//! to everything else: a publish that is killed leaves nothing that a car could see. Only adds
//! objects; what is old is for `prune` to remove. Never gives a name that cars were shown to other
//! content, and never signs unasked what only keys that were replaced vouch for.

use crate::report;
use crate::repository::keys::{DAY_S, block_on, roots, sources, timestamp};
use crate::repository::state::{PREVIOUS, ReleaseNames, RepositoryState, TIMESTAMP, present};
use crate::repository::store::{DryRun, Objects, Store};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::{Blob, sha256};
use hatchback::update::release::{
    BYTES, SHARE, chunk_path, hex, manifest_path, parse_name, target_name,
};
use hatchback::update::trust::PUBLISHED;
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use tough::editor::RepositoryEditor;
use tough::schema::{Hashes, Target};
use tough::{TargetName, schema};

/// Signs bundles and puts them where cars fetch them
#[derive(Args, Debug)]
pub struct PublishArgs {
    /// Bundles: snapshots and deltas
    bundles: Vec<PathBuf>,
    /// The repository: a directory that a web server or a CDN hands out, or with the feature `s3`
    /// an `s3://BUCKET/PREFIX` (endpoint and keys from the AWS_... environment)
    #[arg(long)]
    to: String,
    /// The folder of the keys and roots (`hatchback keys new`)
    #[arg(long)]
    keys: PathBuf,
    /// Takes back this release, or one target of it by its whole name; a car that has committed it
    /// says so, and stays on it until a newer one comes
    #[arg(long, value_name = "[LINEAGE/]SEQUENCE")]
    revoke: Vec<String>,
    /// After a rotation of the targets' key: signs this release, for which only the replaced key
    /// vouches, with the new one. Each that is listed has to be named here or with `--revoke`, or
    /// given again as a bundle: whoever stole that key may have listed some
    #[arg(long, value_name = "[LINEAGE/]SEQUENCE")]
    carry: Vec<String>,
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
    /// Releases to take back: `SEQUENCE` where there is one lineage, `LINEAGE/SEQUENCE`, or a
    /// target's whole name.
    pub revoke: Vec<String>,
    /// Releases to sign again after a rotation of keys, named in the same ways.
    pub carry: Vec<String>,
    /// Seconds until the timestamp expires; snapshot and targets last ten times as long.
    pub expires_s: u64,
}

impl Default for Change {
    /// Nothing but a new timestamp, for a day.
    fn default() -> Self {
        Self {
            bundles: Vec::new(),
            share: 100,
            revoke: Vec::new(),
            carry: Vec::new(),
            expires_s: DAY_S,
        }
    }
}

/// What was published.
#[derive(Debug, Default, Serialize)]
pub struct Published {
    /// Target names added.
    pub added: Vec<String>,
    /// Target names taken back.
    pub revoked: Vec<String>,
    /// Targets that the replaced keys had signed and the new ones sign now: name and SHA-256 of the
    /// manifest.
    pub carried: Vec<String>,
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
    let (bundles, revoke, carry) = (args.bundles.clone(), args.revoke.clone(), args.carry.clone());
    let change = Change { bundles, share: args.share, revoke, carry, expires_s: args.days * DAY_S };
    let done = publish(store, &args.keys, &change, crate::sync::now()?)?;
    if args.json {
        return report::write_json(Path::new("-"), &done);
    }
    done.added.iter().for_each(|name| println!("+ {name}"));
    done.revoked.iter().for_each(|name| println!("- {name}"));
    done.carried.iter().for_each(|target| println!("= {target}"));
    let (n, bytes, known) = (
        report::count(done.chunks),
        report::bytes(done.chunk_bytes),
        report::count(done.chunks_known),
    );
    let dry = if args.dry_run { " (dry run: nothing was written)" } else { "" };
    println!("version {}: {n} chunks, {bytes}; {known} were there{dry}", done.version);
    Ok(())
}

/// The versions that a publish signs.
struct Next {
    timestamp: u64,
    snapshot: u64,
    targets: u64,
}

/// A bundle and the target that it becomes.
struct Offer {
    bundle: BundleReader,
    name: TargetName,
    target: Target,
}

impl Offer {
    fn open(path: &Path, share: u8) -> Result<Self> {
        let bundle = BundleReader::open(path)?;
        let (manifest, content) = (bundle.manifest(), bundle.manifest_bytes());
        let name = target_name(&manifest.generation, manifest.parent);
        ensure!(
            parse_name(&name).is_some(),
            "{}: cars take no release named {name:?}",
            path.display()
        );
        let bytes: u64 = manifest.blobs.iter().map(Blob::stored_bytes).sum();
        let target = Target {
            length: content.len() as u64,
            hashes: Hashes { sha256: sha256(content).to_vec().into(), _extra: HashMap::new() },
            custom: HashMap::from([
                (BYTES.to_owned(), Value::from(bytes)),
                (SHARE.to_owned(), Value::from(share)),
            ]),
            _extra: HashMap::new(),
        };
        Ok(Self { name: TargetName::new(name)?, target, bundle })
    }

    /// Puts up what the store does not have yet; what it has is added to `known` with its size.
    fn put(
        &mut self,
        store: &dyn Store,
        done: &mut Published,
        known: &mut Vec<(String, u64)>,
    ) -> Result<()> {
        self.bundle.each_stored(|chunk, stored| {
            let (at, bytes) = (chunk_path(&chunk.sha256), stored.len() as u64);
            // One of another size is what a power cut left.
            if store.bytes(&at)? == Some(bytes) {
                done.chunks_known += 1;
                known.push((at, bytes));
                return Ok(());
            }
            done.chunks += 1;
            done.chunk_bytes += bytes;
            store.put(&at, stored.to_vec())
        })?;
        let content = self.bundle.manifest_bytes();
        store.put(&manifest_path(self.name.raw(), &sha256(content)), content.to_vec())
    }
}

/// Publishes `change` in `store`, signed with the keys in `keys`, as of `now` (seconds since 1970).
///
/// # Errors
/// A bundle, a key or the repository is refused; cars see nothing of it then.
pub fn publish(store: &dyn Store, keys: &Path, change: &Change, now: u64) -> Result<Published> {
    let present = present(store, keys)?;
    let mut done = Published { version: present.timestamp + 1, ..Published::default() };
    let mut offers = change
        .bundles
        .iter()
        .map(|path| Offer::open(path, change.share))
        .collect::<Result<Vec<_>>>()?;
    let revoked = named(&present, &change.revoke, "--revoke")?;
    let carried = carried(&present, change, &revoked, &offers)?;
    let mut names = if offers.is_empty() && carried.is_empty() {
        ReleaseNames::default()
    } else {
        ReleaseNames::read(store, &present)?
    };
    carried.iter().try_for_each(|(name, target)| names.hold(name, target))?;
    offers.iter().try_for_each(|offer| names.hold(&offer.name, &offer.target))?;
    done.added = offers.iter().map(|offer| offer.name.raw().to_owned()).collect();
    done.revoked = revoked.iter().map(|name| name.raw().to_owned()).collect();
    done.carried = carried.iter().map(|(name, target)| described(name, target)).collect();
    let mut known = Vec::new();
    offers.iter_mut().try_for_each(|offer| offer.put(store, &mut done, &mut known))?;
    let folder = tempfile::tempdir()?;
    let mut next = Next {
        timestamp: present.timestamp + 1,
        snapshot: present.snapshot + 1,
        targets: present.targets + 1,
    };
    // What a killed publish left keeps its number: no car was led to it.
    while store.bytes(&format!("metadata/{}.targets.json", next.targets))?.is_some() {
        next.targets += 1;
    }
    while store.bytes(&format!("metadata/{}.snapshot.json", next.snapshot))?.is_some() {
        next.snapshot += 1;
    }
    let lasts = (now, change.expires_s);
    let added = offers.into_iter().map(|offer| (offer.name, offer.target)).collect();
    block_on(sign(keys, (&present, &next), added, &revoked, lasts, folder.path()))??;
    for (version, path) in roots(keys)? {
        let (name, root) = (format!("metadata/{version}.root.json"), std::fs::read(&path)?);
        if store.bytes(&name)? != Some(root.len() as u64) {
            store.put(&name, root)?;
        }
    }
    let signed =
        |name: &str| std::fs::read(folder.path().join(name)).with_context(|| name.to_owned());
    for name in
        [format!("{}.targets.json", next.targets), format!("{}.snapshot.json", next.snapshot)]
    {
        let put = store.put_new(&format!("metadata/{name}"), signed(&name)?);
        put.with_context(|| {
            format!("{name}: another publisher is at work? Nothing was published")
        })?;
    }
    for (chunk, bytes) in &known {
        let is_there = store.bytes(chunk)? == Some(*bytes);
        ensure!(is_there, "{chunk} was removed meanwhile; nothing was published: try again");
    }
    let put = store.replace(TIMESTAMP, present.stamp.as_deref(), signed("timestamp.json")?);
    put.context("another publisher was faster? Nothing was published: try again")?;
    Ok(done)
}

fn described(name: &TargetName, target: &Target) -> String {
    format!("{} sha256 {}", name.raw(), hex(&target.hashes.sha256))
}

/// What is to be signed again although only keys that were replaced vouch for it: what the
/// publisher named and nothing else.
fn carried(
    present: &RepositoryState,
    change: &Change,
    revoked: &[TargetName],
    offers: &[Offer],
) -> Result<Vec<(TargetName, Target)>> {
    if !present.is_outdated {
        ensure!(change.carry.is_empty(), "--carry: the newest root vouches for all that is listed");
        return Ok(Vec::new());
    }
    let named = named(present, &change.carry, "--carry")?;
    let is_open = |name: &TargetName| {
        !named.contains(name)
            && !revoked.contains(name)
            && !offers.iter().any(|offer| offer.name == *name)
    };
    let mut open: Vec<String> =
        present.listed().filter(|(name, _)| is_open(name)).map(|(n, t)| described(n, t)).collect();
    open.sort();
    ensure!(
        open.is_empty(),
        "the targets' keys were replaced, and only an older root vouches for what is listed; say with --carry or --revoke what becomes of it, or \
         give the bundle again:\n{}",
        open.join("\n")
    );
    let carried =
        present.listed().filter(|(name, _)| named.contains(name) && !revoked.contains(name));
    Ok(carried.map(|(name, target)| (name.clone(), target.clone())).collect())
}

/// The targets that `releases` name, which the command line has under `flag`. One without a lineage
/// must be of the only one.
fn named(present: &RepositoryState, releases: &[String], flag: &str) -> Result<Vec<TargetName>> {
    let names: Vec<TargetName> = present.listed().map(|(name, _)| name.clone()).collect();
    let parts = |name: &TargetName| {
        let (lineage, file) = name.raw().split_once('/')?;
        Some((lineage.to_owned(), file.split('-').next()?.parse::<u64>().ok()?))
    };
    let lineages: BTreeSet<String> =
        names.iter().filter_map(parts).map(|(lineage, _)| lineage).collect();
    let mut found = Vec::new();
    for release in releases {
        if let Some(name) = names.iter().find(|name| name.raw() == release) {
            found.push(name.clone());
            continue;
        }
        let (lineage, sequence) = match (release.split_once('/'), lineages.first()) {
            (Some((lineage, sequence)), _) => (lineage, sequence),
            (None, Some(only)) if lineages.len() == 1 => (only.as_str(), release.as_str()),
            _ => bail!("{flag} {release}: say LINEAGE/SEQUENCE; published are {lineages:?}"),
        };
        let sequence: u64 = sequence.parse().with_context(|| format!("{flag} {release}"))?;
        let before = found.len();
        let wanted = Some((lineage.to_owned(), sequence));
        found.extend(names.iter().filter(|name| parts(name) == wanted).cloned());
        ensure!(found.len() > before, "{flag} {release}: is not published");
    }
    Ok(found)
}

/// Signs the next version of all three roles into `folder`, as of `now` and for `expires_s`.
async fn sign(
    keys: &Path,
    (present, next): (&RepositoryState, &Next),
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
