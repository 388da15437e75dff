//! `prune`: removes objects from a repository that no release needs any more: chunks, manifests and
//! old metadata. It keeps every object that is referenced by metadata to which a timestamp led cars
//! within the grace period, and every object that was uploaded within it, because a running publish
//! may be about to reference it. It removes object after object and none that a listed release
//! references: an interrupted prune leaves a valid repository, and the next prune continues. It
//! also removes what killed publishes left in a directory. Never removes a root.

use crate::report;
use crate::report::Json;
use crate::repository::clock::{DAY_S, now, signing_time};
use crate::repository::publish::{Change, check_root, publish};
use crate::repository::state::{Past, RepositoryState, TIMESTAMP};
use crate::repository::store::{DryRun, Object, Objects, Store, split_leftover};
use crate::say;
use anyhow::{Context, Result, ensure};
use clap::Args;
use hatchback::bundle::manifest::{Generation, Hash, Manifest};
use hatchback::update::release::{SHARE, chunk_path, manifest_path, parse_name};
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use tough::schema::{Target, Targets};

/// Removes objects from a repository that no release needs any more
#[derive(Args, Debug)]
pub struct PruneArgs {
    /// The repository, as for `publish`
    #[arg(long)]
    to: String,
    /// The folder of the keys and roots
    #[arg(long)]
    keys: PathBuf,
    /// First unlists all but the newest RELEASES of each model, but never the newest snapshot or a
    /// later release: every car finds a way to the newest release. Keep more releases than are
    /// published while a car is on probation [default: all that are listed]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    releases: Option<u64>,
    /// Days for which unlisted objects stay: longer than the slowest download, and longer than any
    /// cache in front of the repository keeps a file
    #[arg(long, default_value_t = 14, value_parser = clap::value_parser!(u64).range(..36_500))]
    grace_days: u64,
    /// Days until the new timestamp expires, if releases are unlisted
    #[arg(long, default_value_t = 7, value_parser = report::args::days)]
    days: u64,
    /// Prints what would be done, and removes nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    json: Json,
}

/// The rules by which a prune keeps objects.
#[derive(Clone, Copy, Debug)]
pub struct Retention {
    /// Releases of each model that stay listed; `None` for all.
    pub releases: Option<u64>,
    /// Seconds for which unlisted objects stay.
    pub grace_s: u64,
    /// Seconds until a new timestamp expires.
    pub expires_s: u64,
}

/// The result of a prune.
#[derive(Debug, Default, Serialize)]
pub struct Pruned {
    /// Targets that were unlisted. Objects that only they reference go after the grace period.
    pub unlisted: Vec<String>,
    /// Objects that were removed.
    pub removed: u64,
    /// Bytes of the removed objects.
    pub removed_bytes: u64,
    /// Objects that stay.
    pub kept: u64,
    /// Bytes of the objects that stay.
    pub kept_bytes: u64,
}

/// Runs the command.
///
/// # Errors
/// The repository is incomplete or not this fleet's, and nothing was removed. Or the store fails.
pub fn run(args: &PruneArgs) -> Result<()> {
    let store = Objects::existing(&args.to)?;
    let dry = DryRun(&store);
    let store: &dyn Store = if args.dry_run { &dry } else { &store };
    let (grace_s, expires_s) = (args.grace_days * DAY_S, args.days * DAY_S);
    let retention = Retention { releases: args.releases, grace_s, expires_s };
    let now = now()?;
    check_root(&args.keys, now)?;
    let done = prune(store, &args.keys, &retention, now)?;

    args.json.write(&done, || {
        done.print()?;
        if args.dry_run { say!("dry run: nothing was removed") } else { Ok(()) }
    })
}

impl Pruned {
    fn print(&self) -> Result<()> {
        self.unlisted.iter().try_for_each(|name| say!("- {name}"))?;
        let [removed, kept] = [self.removed, self.kept].map(report::count);
        let [removed_bytes, kept_bytes] = [self.removed_bytes, self.kept_bytes].map(report::bytes);
        say!("{removed} objects removed, {removed_bytes}; {kept} stay, {kept_bytes}")
    }
}

/// Removes all objects from `store` that `retention` does not keep, at the time `now` in seconds
/// since 1970.
///
/// # Errors
/// The repository is incomplete or not signed by the keys in `keys`, and nothing was removed. Or
/// the store fails.
pub fn prune(store: &dyn Store, keys: &Path, retention: &Retention, now: u64) -> Result<Pruned> {
    // Objects are listed first, so that the list has none that is uploaded after the metadata were
    // read.
    let objects = store.list()?;
    let state = RepositoryState::read(store, keys)?;
    ensure!(
        !state.is_outdated,
        "the targets' key was rotated after the last publish: publish first, then prune"
    );
    let listed = &state.signed.as_ref().context("nothing is published in this repository")?.signed;
    // Before anything is removed: `publish` below would refuse the clock too late.
    signing_time(now, TIMESTAMP, state.published)?;

    let referenced = referenced(store, &state, now.saturating_sub(retention.grace_s))?;
    let mut done = Pruned { unlisted: surplus(listed, retention.releases), ..Pruned::default() };
    for object in objects {
        let is_needed = referenced.contains(&object.path);
        if !is_needed && is_removable(&object, retention.grace_s, now) {
            store.delete(&object.path)?;
            done.removed += 1;
            done.removed_bytes += object.bytes;
        } else {
            done.kept += 1;
            done.kept_bytes += object.bytes;
        }
    }

    if !done.unlisted.is_empty() {
        let change = Change {
            revoke: done.unlisted.clone(),
            expires_s: retention.expires_s,
            ..Change::default()
        };
        publish(store, keys, &change, now)?;
    }
    Ok(done)
}

/// Returns whether `publish` made `object` and the whole grace period has passed since. Of a killed
/// upload, which no car can name, whether a day has passed: a running one is shorter.
fn is_removable(object: &Object, grace_s: u64, now: u64) -> bool {
    let path = object.path.as_str();
    if let Some((path, _)) = split_leftover(path) {
        let ours = ["metadata/", "chunks/", "targets/"].iter().any(|f| path.starts_with(f));
        return ours && object.modified.saturating_add(DAY_S) <= now;
    }
    let is_version = [".targets.json", ".snapshot.json"].iter().any(|role| path.ends_with(role));
    let ours = match path.split_once('/') {
        // Every root stays: a car that was off for long needs all of them.
        Some(("metadata", _)) => is_version,
        Some(("chunks" | "targets", _)) => true,
        _ => false,
    };
    ours && object.modified.saturating_add(grace_s) <= now
}

/// Returns the objects that cars may request: all that are referenced by metadata to which a
/// timestamp led cars since the time `since`. The newest metadata must be complete; an earlier
/// prune may have removed parts of older ones.
fn referenced(store: &dyn Store, state: &RepositoryState, since: u64) -> Result<BTreeSet<String>> {
    let (mut referenced, mut next) = (BTreeSet::new(), state.snapshot);
    while next > 0 {
        let is_newest = next == state.snapshot;
        let past = Past::read(store, next)?;
        ensure!(past.is_some() || !is_newest, "metadata of version {next} are missing");
        let Some(past) = past else { break };

        for (name, target) in &past.targets.targets {
            let hash: Hash =
                target.hashes.sha256.as_ref().try_into().context(name.raw().to_owned())?;
            let path = manifest_path(name.raw(), &hash);
            if referenced.contains(&path) {
                continue;
            }
            let bytes = store.get(&path)?;
            ensure!(bytes.is_some() || !is_newest, "{path} is missing in the repository");
            let Some(bytes) = bytes else { continue };
            let manifest = Manifest::decode(&bytes).with_context(|| path.clone())?;
            let chunks = manifest.blobs.iter().flat_map(|blob| &blob.chunks);
            referenced.extend(chunks.map(|chunk| chunk_path(&chunk.sha256)));
            referenced.insert(path);
        }

        // No timestamp led cars to older metadata after this version was published.
        next = if past.published() > since { past.previous() } else { 0 };
        referenced.extend(past.paths);
    }
    Ok(referenced)
}

/// The listed releases of one variant of a model.
#[derive(Default)]
struct Releases {
    sequences: BTreeSet<u64>,
    /// The newest snapshot that the whole fleet may fetch.
    snapshot: Option<u64>,
}

/// Returns the targets of all but the newest `releases` of each variant of each model. Keeps the
/// newest snapshot of a variant that the whole fleet may fetch, and every later release of it.
fn surplus(listed: &Targets, releases: Option<u64>) -> Vec<String> {
    let Some(releases) = releases else { return Vec::new() };
    let is_for_all = |target: &Target| {
        target.custom.get(SHARE).and_then(Value::as_u64).is_none_or(|share| share >= 100)
    };

    let mut models: BTreeMap<(String, u8), Releases> = BTreeMap::new();
    for (name, target) in &listed.targets {
        let Some((generation, parent, variant)) = parse_name(name.raw()) else { continue };
        let model = models.entry((generation.lineage, variant)).or_default();
        model.sequences.insert(generation.sequence);
        if parent.is_none() && is_for_all(target) {
            model.snapshot = model.snapshot.max(Some(generation.sequence));
        }
    }

    let releases = usize::try_from(releases).unwrap_or(usize::MAX);
    let first_kept = |lineage: &str, variant: u8| {
        let model = models.get(&(lineage.to_owned(), variant))?;
        let oldest = *model.sequences.iter().rev().take(releases).next_back()?;
        Some(oldest.min(model.snapshot?))
    };
    let is_surplus = |(generation, _, variant): (Generation, Option<u64>, u8)| {
        first_kept(&generation.lineage, variant).is_some_and(|first| generation.sequence < first)
    };
    let names = listed.targets.keys().map(|name| name.raw());
    let surplus = names.filter(|name| parse_name(name).is_some_and(is_surplus));
    let mut surplus: Vec<String> = surplus.map(str::to_owned).collect();
    surplus.sort();
    surplus
}
