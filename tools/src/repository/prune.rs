//! `prune`: removes from a repository what no release needs any more: chunks, manifests and old
//! metadata. What cars were led to within the grace stays, and so does what was put there within
//! it, for a publisher may be about to name it. Each object is removed by itself and none that a
//! listed release names: a prune that is killed leaves a whole repository, and the next one goes
//! on.

use crate::report;
use crate::repository::keys::DAY_S;
use crate::repository::publish::{Change, publish};
use crate::repository::state::{Past, RepositoryState, present};
use crate::repository::store::{DryRun, Object, Objects, Store};
use anyhow::{Context, Result, ensure};
use clap::Args;
use hatchback::bundle::manifest::{Hash, Manifest};
use hatchback::update::release::{SHARE, chunk_path, manifest_path, parse_name};
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use tough::schema::Targets;

/// Removes from a repository what no release needs any more
#[derive(Args, Debug)]
pub struct PruneArgs {
    /// The repository, as `publish` has it
    #[arg(long)]
    to: String,
    /// The folder of the keys and roots
    #[arg(long)]
    keys: PathBuf,
    /// Takes all but the newest so many releases of each model off the list first, but none from
    /// the newest snapshot on: every car finds a way. Keep more than are published while a car is
    /// on probation [default: all that are listed]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    releases: Option<u64>,
    /// Days for which what is no longer listed stays: longer than the slowest download, and than
    /// any cache before the repository
    #[arg(long, default_value_t = 14)]
    grace_days: u64,
    /// Days until cars take the timestamp for frozen, where releases are taken off the list
    #[arg(long, default_value_t = 7)]
    days: u64,
    /// Says what would be done, and does nothing
    #[arg(long)]
    dry_run: bool,
    /// Prints the result as JSON
    #[arg(long)]
    json: bool,
}

/// What is to stay.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Releases of each model that stay on the list; `None` for all.
    pub releases: Option<u64>,
    /// Seconds for which what is no longer listed stays.
    pub grace_s: u64,
    /// Seconds until a new timestamp expires.
    pub expires_s: u64,
}

/// What was removed.
#[derive(Debug, Default, Serialize)]
pub struct Pruned {
    /// Targets that were taken off the list. What they alone name goes once the grace is over.
    pub unlisted: Vec<String>,
    /// Objects that were removed.
    pub removed: u64,
    /// Bytes of them.
    pub removed_bytes: u64,
    /// Objects that stay.
    pub kept: u64,
    /// Bytes of them.
    pub kept_bytes: u64,
}

/// Runs the command.
///
/// # Errors
/// The repository is not whole or not this fleet's; nothing was removed then. Or the store refused.
pub fn run(args: &PruneArgs) -> Result<()> {
    let store = Objects::open(&args.to)?;
    let dry = DryRun(&store);
    let store: &dyn Store = if args.dry_run { &dry } else { &store };
    let (grace_s, expires_s) = (args.grace_days * DAY_S, args.days * DAY_S);
    let window = Window { releases: args.releases, grace_s, expires_s };
    let done = prune(store, &args.keys, &window, crate::sync::now()?)?;
    if args.json {
        return report::write_json(Path::new("-"), &done);
    }
    done.unlisted.iter().for_each(|name| println!("- {name}"));
    let [removed, kept] = [done.removed, done.kept].map(report::count);
    let [removed_bytes, kept_bytes] = [done.removed_bytes, done.kept_bytes].map(report::bytes);
    let dry = if args.dry_run { " (dry run: nothing was removed)" } else { "" };
    println!("{removed} objects removed, {removed_bytes}; {kept} stay, {kept_bytes}{dry}");
    Ok(())
}

/// Removes what is outside `window` from `store`, as of `now` (seconds since 1970).
///
/// # Errors
/// The repository is not whole or not signed by the keys in `keys`; nothing was removed then. Or
/// the store refused.
pub fn prune(store: &dyn Store, keys: &Path, window: &Window, now: u64) -> Result<Pruned> {
    // Listed before it is known what is named: what comes meanwhile is not in the list.
    let objects = store.list()?;
    let present = present(store, keys)?;
    ensure!(
        !present.is_outdated,
        "the targets' keys were replaced since the last publish: publish first"
    );
    let listed = &present.signed.as_ref().context("nothing is published here")?.signed;
    let named = named(store, &present, now.saturating_sub(window.grace_s))?;
    let mut done = Pruned { unlisted: outside(listed, window.releases), ..Pruned::default() };
    for object in objects {
        let (count, bytes) = if is_old(&object, &named, window.grace_s, now) {
            store.delete(&object.path).with_context(|| object.path.clone())?;
            (&mut done.removed, &mut done.removed_bytes)
        } else {
            (&mut done.kept, &mut done.kept_bytes)
        };
        (*count, *bytes) = (*count + 1, *bytes + object.bytes);
    }
    if !done.unlisted.is_empty() {
        let change = Change {
            revoke: done.unlisted.clone(),
            expires_s: window.expires_s,
            ..Change::default()
        };
        publish(store, keys, &change, now)?;
    }
    Ok(done)
}

/// Whether `object` is one that `publish` made, is named by nothing and has been there for the
/// whole grace.
fn is_old(object: &Object, named: &BTreeSet<String>, grace_s: u64, now: u64) -> bool {
    let path = object.path.as_str();
    let is_version = [".targets.json", ".snapshot.json"].iter().any(|role| path.ends_with(role));
    let ours = match path.split_once('/') {
        // Never a root: cars that are far behind need each of them.
        Some(("metadata", _)) => is_version,
        Some(("chunks" | "targets", _)) => true,
        _ => false,
    };
    ours && !named.contains(path) && object.modified.saturating_add(grace_s) <= now
}

/// The objects that cars may ask for: all that the metadata name which they were led to since
/// `since`. The newest must be whole; of older ones an earlier prune may have taken some.
fn named(store: &dyn Store, present: &RepositoryState, since: u64) -> Result<BTreeSet<String>> {
    let (mut named, mut next) = (BTreeSet::new(), present.snapshot);
    while next > 0 {
        let is_newest = next == present.snapshot;
        let past = Past::read(store, next)?;
        ensure!(past.is_some() || !is_newest, "metadata of version {next} are missing");
        let Some(past) = past else { break };
        for (name, target) in &past.targets.targets {
            let hash: Hash =
                target.hashes.sha256.as_ref().try_into().context(name.raw().to_owned())?;
            let path = manifest_path(name.raw(), &hash);
            if named.contains(&path) {
                continue;
            }
            let bytes = store.get(&path)?;
            ensure!(bytes.is_some() || !is_newest, "{path} is missing");
            let Some(bytes) = bytes else { continue };
            let manifest = Manifest::decode(&bytes).with_context(|| path.clone())?;
            named.extend(
                manifest.blobs.iter().flat_map(|b| &b.chunks).map(|c| chunk_path(&c.sha256)),
            );
            named.insert(path);
        }
        // What came before was left when this was published.
        next = if past.published() > since { past.previous() } else { 0 };
        named.extend(past.paths);
    }
    Ok(named)
}

/// The targets of all but the newest so many `releases` of each model; none from the newest
/// snapshot on that all may have.
fn outside(listed: &Targets, releases: Option<u64>) -> Vec<String> {
    let Some(releases) = releases else { return Vec::new() };
    let mut models: BTreeMap<String, (BTreeSet<u64>, Option<u64>)> = BTreeMap::new();
    let all = || {
        listed.targets.iter().filter_map(|(name, t)| Some((name.raw(), parse_name(name.raw())?, t)))
    };
    for (_, (generation, parent), target) in all() {
        let (sequences, snapshot) = models.entry(generation.lineage).or_default();
        sequences.insert(generation.sequence);
        let for_all =
            target.custom.get(SHARE).and_then(Value::as_u64).is_none_or(|share| share >= 100);
        if parent.is_none() && for_all {
            *snapshot = (*snapshot).max(Some(generation.sequence));
        }
    }
    let from = |lineage: &str| {
        let (sequences, snapshot) = models.get(lineage)?;
        let mut newest =
            sequences.iter().rev().take(usize::try_from(releases).unwrap_or(usize::MAX));
        Some((*newest.next_back()?).min((*snapshot)?))
    };
    let is_outside = |(name, (generation, _), _): (&str, _, _)| {
        let generation: hatchback::bundle::manifest::Generation = generation;
        (from(&generation.lineage)? > generation.sequence).then(|| name.to_owned())
    };
    let mut outside: Vec<String> = all().filter_map(is_outside).collect();
    outside.sort();
    outside
}
