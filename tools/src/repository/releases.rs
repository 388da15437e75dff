//! `releases`: lists the releases of a repository, when their signatures expire, and how many bytes
//! a car fetches. It reads the metadata as a publisher does and verifies no signature: a car does.

use crate::report;
use crate::report::Json;
use crate::repository::state::{Past, TIMESTAMP};
use crate::repository::store::{Objects, Store};
use crate::say;
use anyhow::{Context, Result, bail};
use clap::Args;
use hatchback::flash::live::LiveState;
use hatchback::update::program::Program;
use hatchback::update::release::{self, Base, Release, cheapest_path};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use tough::schema::{Root, Signed, Targets, Timestamp};

/// Cars for which the way to the newest release is shown, by how many releases they are behind.
const BEHIND: [usize; 2] = [1, 10];

/// Lists the releases of a repository, and what a car fetches
#[derive(Args, Debug)]
pub struct ReleasesArgs {
    /// The repository: a directory, or as for `publish --to`
    #[arg(long)]
    from: String,
    #[command(flatten)]
    json: Json,
}

/// The report of the command.
#[derive(Serialize)]
struct ReleasesReport {
    releases: Vec<ListedRelease>,
    ways: Vec<Way>,
    /// When the timestamp, the targets metadata and the newest root expire.
    timestamp_expires: String,
    metadata_expire: String,
    root_expires: String,
}

/// A release that is listed, or was.
#[derive(Serialize)]
struct ListedRelease {
    release: String,
    /// The sequence of its parent; `None` for a snapshot.
    parent: Option<u64>,
    bytes: u64,
    share: u8,
    /// Whether it is still listed: `publish --revoke` and `prune` unlist.
    is_listed: bool,
}

/// The bytes from one generation to the newest release of its model.
#[derive(Serialize)]
struct Way {
    to: String,
    /// The sequence that is live; `None` for a new car.
    from: Option<u64>,
    /// `None` if no way leads there.
    bytes: Option<u64>,
}

/// Runs the command.
///
/// # Errors
/// Nothing is published at the place, or its metadata cannot be read.
pub fn run(args: &ReleasesArgs) -> Result<()> {
    let report =
        ReleasesReport::read(&Objects::existing(&args.from)?).with_context(|| args.from.clone())?;
    args.json.write(&report, || report.print())
}

impl ReleasesReport {
    fn read(store: &dyn Store) -> Result<Self> {
        let (stamp, now) = listed(store)?;
        let listed = releases_of(&now.targets)?;

        let mut all: BTreeMap<String, (Release, bool)> = BTreeMap::new();
        let mut next = now.previous();
        while next > 0 {
            let Some(past) = Past::read(store, next)? else { break };
            next = past.previous();
            let earlier = releases_of(&past.targets)?;
            all.extend(earlier.into_iter().map(|release| (release.name(), (release, false))));
        }
        all.extend(listed.iter().map(|release| (release.name(), (release.clone(), true))));

        let one = |(release, is_listed): (Release, bool)| ListedRelease {
            release: release.generation.to_string(),
            parent: release.parent,
            bytes: release.bytes,
            share: release.share,
            is_listed,
        };
        Ok(Self {
            releases: all.into_values().map(one).collect(),
            ways: ways(&listed),
            timestamp_expires: stamp.expires.to_string(),
            metadata_expire: now.targets.expires.to_string(),
            root_expires: newest_root(store)?.map_or_else(String::new, |r| r.expires.to_string()),
        })
    }

    fn print(&self) -> Result<()> {
        let mut table = report::table(&["release", "kind", "bytes", "share", "listed"]);
        for release in &self.releases {
            let snapshot = || "snapshot".to_owned();
            let kind = release.parent.map_or_else(snapshot, |from| format!("delta from {from}"));
            table.add_row([
                release.release.clone(),
                kind,
                report::bytes(release.bytes),
                format!("{} %", release.share),
                if release.is_listed { "yes" } else { "-" }.to_owned(),
            ]);
        }
        say!("{table}")?;
        let mut table = report::table(&["a car with", "fetches", "to"]);
        for Way { to, from, bytes } in &self.ways {
            let from = from.map_or_else(|| "nothing".to_owned(), |from| from.to_string());
            table.add_row([from, report::or_dash(*bytes, report::bytes), to.clone()]);
        }
        say!("{table}")?;
        let (timestamp, metadata) = (&self.timestamp_expires, &self.metadata_expire);
        say!("expires: timestamp {timestamp}, metadata {metadata}, root {}", self.root_expires)
    }
}

/// Returns the timestamp and the metadata to which it leads.
///
/// # Errors
/// Nothing is published, or the metadata cannot be read.
pub fn listed(store: &dyn Store) -> Result<(Timestamp, Past)> {
    let Some(stamp) = store.get(TIMESTAMP)? else { bail!("nothing is published here") };
    let stamp: Signed<Timestamp> = serde_json::from_slice(&stamp).context(TIMESTAMP)?;
    let snapshot = stamp.signed.meta.get("snapshot.json").map_or(0, |meta| meta.version.get());
    let now = Past::read(store, snapshot)?.context("the newest metadata are missing")?;
    Ok((stamp.signed, now))
}

/// Returns the releases that `targets` lists, as a car reads them.
///
/// # Errors
/// The metadata are not those of a repository.
pub fn releases_of(targets: &Targets) -> Result<Vec<Release>> {
    let targets = serde_json::from_value(serde_json::to_value(targets)?)?;
    Ok(release::releases(&targets, &Program::this()))
}

/// Returns the ways to the newest release of each model, for a car in every share.
fn ways(listed: &[Release]) -> Vec<Way> {
    let lineages: BTreeSet<&str> = listed.iter().map(|r| r.generation.lineage.as_str()).collect();
    let of_lineage = |lineage: &str| {
        let own = |release: &&Release| release.generation.lineage == lineage;
        let own: Vec<&Release> = listed.iter().filter(own).collect();
        let sequences: BTreeSet<u64> = own.iter().map(|r| r.generation.sequence).collect();
        let behind = BEHIND.map(|number| sequences.iter().rev().nth(number).copied());
        let known = behind.into_iter().flatten().map(Some);
        let way = |from: Option<u64>| {
            let live = own.iter().find(|r| Some(r.generation.sequence) == from);
            let base = live.map(|live| {
                let (generation, manifest) = (live.generation.clone(), live.manifest);
                Base::new(&LiveState { generation, manifest, tables: Vec::new() }, listed)
            });
            let path = cheapest_path(from, base, lineage, listed).ok();
            let bytes_of = |r: &Release| r.bytes.saturating_add(r.manifest_bytes);
            let bytes = path.map(|p| p.iter().map(bytes_of).fold(0, u64::saturating_add));
            let newest = sequences.last().copied().unwrap_or(0);
            Way { to: format!("{lineage}@{newest}"), from, bytes }
        };
        known.chain([None]).map(way).collect::<Vec<_>>()
    };
    lineages.into_iter().flat_map(of_lineage).collect()
}

/// Returns the newest root of the repository.
fn newest_root(store: &dyn Store) -> Result<Option<Root>> {
    let mut newest = None;
    for version in 1.. {
        let path = format!("metadata/{version}.root.json");
        let Some(bytes) = store.get(&path)? else { break };
        let root: Signed<Root> = serde_json::from_slice(&bytes).with_context(|| path.clone())?;
        newest = Some(root.signed);
    }
    Ok(newest)
}
