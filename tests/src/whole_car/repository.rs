//! The publisher and its repository, prepared once. There are several histories of a fleet, and
//! each is the sequence of states of its repository, one after each publish. The real publisher
//! signs them. A simulation chooses a history and decides when each state, or a part of it, becomes
//! visible.

use crate::whole_car::model::{BundlePlan, Flaw, Generations, LEVELS, program};
use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::{Hash, sha256};
use hatchback::update::program::Program;
use hatchback::update::release::{chunk_path, manifest_path, parse_name, target_name};
use hatchback_tools::repository::keys::{RoleCounts, new_fleet, rotate};
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::Objects;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tough::schema::RoleType;

/// Time of the first publish, seconds since 1970.
pub const T0: u64 = 1_800_000_000;
const DAY_S: u64 = 24 * 3600;
/// Lifetime of a timestamp. Snapshot and targets last ten times as long. It is longer than any run,
/// because a car may be parked for a year and the simulated publisher renews no timestamp.
const LASTS_S: u64 = 2_000 * DAY_S;
/// Time by which the publisher's clock is ahead.
const YEAR_S: u64 = 365 * DAY_S;
/// Lifetime of a root.
const ROOT_LASTS_S: u64 = 3_000 * DAY_S;

/// The objects of a repository by path.
pub type Contents = BTreeMap<String, Arc<Vec<u8>>>;

/// The repository after one publish.
#[derive(Clone, Default)]
pub struct Published {
    /// All objects.
    pub objects: Contents,
    /// The paths that this publish uploaded, in the order of the upload.
    pub uploaded: Vec<String>,
    /// The listed releases.
    pub listed: BTreeSet<Hash>,
}

/// A release that was signed.
#[derive(Clone, Copy, Debug)]
pub struct Signed {
    /// Its generation's sequence.
    pub sequence: u64,
    /// Its deliberate fault.
    pub flaw: Flaw,
    /// The level of the first program that reads it.
    pub level: u8,
    /// Its variant.
    pub variant: u8,
    /// Whether it is a delta.
    pub is_delta: bool,
}

/// The life of one fleet.
pub struct History {
    /// A short description.
    pub name: &'static str,
    /// The fleet's first root.
    pub root: Vec<u8>,
    /// The repository after each publish.
    pub states: Vec<Published>,
    /// Every release that was signed, by the hash of its manifest.
    pub signed: BTreeMap<Hash, Signed>,
    /// The sequence of the last release.
    pub last: u64,
    /// The objects of the last release's snapshot: with them alone a car can be at that release.
    pub vital: BTreeSet<String>,
}

impl History {
    /// Returns the newest good release that a program of `level` reads.
    pub fn best(&self, level: u8) -> u64 {
        let listed = self.states.last().into_iter().flat_map(|state| &state.listed);
        let readable = listed.map(|hash| self.signed[hash]);
        let readable = readable.filter(|s| s.level <= level && s.flaw == Flaw::None);
        readable.map(|signed| signed.sequence).max().unwrap_or(0)
    }
}

fn manifest_of(bundle: &Path) -> Hash {
    sha256(BundleReader::open(bundle).unwrap().manifest_bytes())
}

/// An action of the publisher.
enum Act {
    /// Publishes bundles for a share of the fleet, per cent.
    Publish(Vec<BundlePlan>, u8),
    Revoke(u64),
    /// Replaces the keys of a role, and signs these releases again.
    Rotate(RoleType, Vec<u64>),
    /// Publishes bundles while the publisher's clock is a year ahead.
    Ahead(Vec<BundlePlan>),
}

use Act::{Ahead, Publish, Revoke, Rotate};

const fn snapshot(to: u64) -> BundlePlan {
    BundlePlan { from: None, to, flaw: Flaw::None, level: 1 }
}

const fn delta(from: u64, to: u64) -> BundlePlan {
    BundlePlan { from: Some(from), to, flaw: Flaw::None, level: 1 }
}

const fn at(level: u8, plan: BundlePlan) -> BundlePlan {
    BundlePlan { level, ..plan }
}

fn all(leads: &[BundlePlan]) -> Act {
    Publish(leads.to_vec(), 100)
}

fn flawed(flaw: Flaw) -> Act {
    all(&[BundlePlan { flaw, ..delta(2, 3) }])
}

/// Returns these acts after the first two of most histories.
fn with(more: Vec<Act>) -> Vec<Act> {
    [all(&[snapshot(1)]), all(&[delta(1, 2)])].into_iter().chain(more).collect()
}

/// Returns the histories with releases that need later programs.
fn acts_of_versions() -> Vec<(&'static str, Vec<Act>)> {
    vec![
        (
            "later programs",
            with(vec![
                all(&[at(2, delta(2, 3))]),
                all(&[at(2, snapshot(4)), at(2, delta(3, 4))]),
                all(&[at(3, snapshot(5)), at(3, delta(4, 5))]),
            ]),
        ),
        (
            "variants",
            with(vec![
                all(&[at(3, snapshot(3)), snapshot(3), delta(2, 3)]),
                all(&[at(3, delta(3, 4)), delta(3, 4)]),
                all(&[at(3, snapshot(5)), at(3, delta(4, 5)), snapshot(5), delta(4, 5)]),
            ]),
        ),
        (
            "variants of old snapshots",
            with(vec![
                all(&[at(3, snapshot(3)), at(2, snapshot(3)), snapshot(3)]),
                all(&[at(3, delta(3, 4)), at(2, delta(3, 4)), delta(3, 4)]),
                // A car that was downgraded leaves its variant, which takes a snapshot.
                all(&[at(3, delta(4, 5)), at(2, delta(4, 5)), snapshot(5), delta(4, 5)]),
            ]),
        ),
        (
            "one bad variant",
            with(vec![
                all(&[BundlePlan { flaw: Flaw::Probe, ..at(3, snapshot(3)) }, delta(2, 3)]),
                all(&[at(2, snapshot(4)), snapshot(4), delta(3, 4)]),
            ]),
        ),
    ]
}

/// Returns the acts of every other history. Most end with a good release that has a
/// snapshot and a delta.
fn acts() -> Vec<(&'static str, Vec<Act>)> {
    let over_bad = || all(&[snapshot(4), delta(2, 4)]);
    vec![
        ("deltas", with(vec![all(&[delta(2, 3)]), all(&[snapshot(4), delta(3, 4)])])),
        (
            "many deltas",
            with(vec![
                all(&[delta(2, 3)]),
                all(&[delta(3, 4)]),
                all(&[delta(4, 5)]),
                all(&[snapshot(6), delta(5, 6)]),
            ]),
        ),
        ("wrong probe", with(vec![flawed(Flaw::Probe), over_bad()])),
        ("malformed", with(vec![flawed(Flaw::Page), over_bad()])),
        (
            "revoked",
            with(vec![
                all(&[delta(2, 3)]),
                Revoke(3),
                all(&[snapshot(4), delta(2, 4), delta(3, 4)]),
            ]),
        ),
        (
            "widened",
            with(vec![
                Publish(vec![delta(2, 3)], 10),
                all(&[delta(2, 3)]),
                all(&[snapshot(4), delta(3, 4)]),
            ]),
        ),
        (
            "rotated keys",
            with(vec![
                Rotate(RoleType::Targets, vec![1, 2]),
                all(&[delta(2, 3)]),
                Rotate(RoleType::Timestamp, vec![]),
                Rotate(RoleType::Snapshot, vec![]),
                Rotate(RoleType::Root, vec![]),
                all(&[snapshot(4), delta(3, 4)]),
            ]),
        ),
        (
            "all of it",
            with(vec![
                flawed(Flaw::Probe),
                Revoke(3),
                Rotate(RoleType::Targets, vec![1, 2]),
                Publish(vec![delta(2, 4)], 10),
                all(&[delta(2, 4)]),
                Rotate(RoleType::Root, vec![]),
                all(&[snapshot(5), delta(4, 5)]),
            ]),
        ),
        ("killer", with(vec![flawed(Flaw::Kills), over_bad()])),
        (
            "clock ahead",
            with(vec![
                Ahead(vec![delta(2, 3)]),
                Rotate(RoleType::Timestamp, vec![]),
                all(&[snapshot(4), delta(3, 4)]),
            ]),
        ),
        ("one old snapshot", with(vec![all(&[delta(2, 3)]), all(&[delta(3, 4)])])),
    ]
}

/// Returns the history with a release whose install never ends.
fn acts_of_endless() -> Vec<(&'static str, Vec<Act>)> {
    vec![("endless", with(vec![flawed(Flaw::Endless), all(&[snapshot(4), delta(2, 4)])]))]
}

/// Everything that is prepared once for all seeds.
pub struct Prepared {
    /// The model.
    pub generations: Generations,
    /// The histories.
    pub histories: Vec<History>,
    /// The program of each level.
    pub programs: Vec<Arc<Program>>,
}

impl Prepared {
    /// Packs the model and signs every history. The keys are new ones each time; nothing that a
    /// simulation decides depends on them.
    pub fn new() -> Self {
        let generations = Generations::new();
        let acts = acts().into_iter().chain(acts_of_versions()).chain(acts_of_endless());
        let histories = acts.map(|(name, acts)| live(name, &acts, &generations));
        let histories = histories.collect();
        Self { generations, histories, programs: (1..=LEVELS).map(program).collect() }
    }
}

impl Default for Prepared {
    fn default() -> Self {
        Self::new()
    }
}

/// A publisher at work.
struct Publisher<'a> {
    folder: tempfile::TempDir,
    generations: &'a Generations,
    history: History,
}

impl Publisher<'_> {
    fn keys(&self) -> PathBuf {
        self.folder.path().join("keys")
    }

    fn take(&mut self, act: &Act, mut now: u64) {
        let mut change = Change { expires_s: LASTS_S, ..Change::default() };
        match act {
            Publish(leads, share) => {
                change.share = *share;
                for lead in leads {
                    change.bundles.push(self.sign(*lead));
                }
            }
            Ahead(leads) => {
                now += YEAR_S;
                change.bundles = leads.iter().map(|lead| self.sign(*lead)).collect();
            }
            Revoke(sequence) => change.revoke = vec![sequence.to_string()],
            Rotate(role, again) => {
                rotate(&self.keys(), *role, now + ROOT_LASTS_S).unwrap();
                change.re_sign = again.iter().map(u64::to_string).collect();
            }
        }
        let repository = self.folder.path().join("repository");
        let objects = Objects::directory(&repository).unwrap();
        let published = publish(&objects, &self.keys(), &change, now).unwrap();
        for (bundle, name) in change.bundles.iter().zip(&published.added) {
            let signed = self.history.signed.get_mut(&manifest_of(bundle)).unwrap();
            signed.variant = parse_name(name).unwrap().2;
        }
        self.record(&repository, act);
    }

    fn sign(&mut self, lead: BundlePlan) -> PathBuf {
        let bundle = self.generations.pack(lead);
        let BundlePlan { to: sequence, flaw, level, from } = lead;
        let signed = Signed { sequence, flaw, level, variant: 0, is_delta: from.is_some() };
        self.history.signed.entry(manifest_of(&bundle)).or_insert(signed);
        self.history.last = self.history.last.max(lead.to);
        bundle
    }

    /// Finds the objects that must not be lost for good: at each level those of the newest listed
    /// snapshot, and of the deltas after it.
    fn find_vital(&mut self) {
        let listed = self.history.states.last().unwrap().listed.clone();
        let is_listed = |bundle: &PathBuf| listed.contains(&manifest_of(bundle));
        let mut vital = Vec::new();
        for level in 1..=LEVELS {
            let pack = |plan| self.generations.pack(at(level, plan));
            let newest = (1..=self.history.last).rev().find(|to| is_listed(&pack(snapshot(*to))));
            let Some(newest) = newest else { continue };
            let deltas = (newest..self.history.last).map(|from| pack(delta(from, from + 1)));
            vital.extend(std::iter::once(pack(snapshot(newest))).chain(deltas.filter(is_listed)));
        }
        for bundle in vital {
            let bundle = BundleReader::open(&bundle).unwrap();
            let (manifest, hash) = (bundle.manifest(), sha256(bundle.manifest_bytes()));
            let variant = self.history.signed[&hash].variant;
            let name = target_name(&manifest.generation, manifest.parent, variant);
            let vital = &mut self.history.vital;
            vital.insert(manifest_path(&name, &hash));
            let chunks = manifest.blobs.iter().flat_map(|blob| &blob.chunks);
            vital.extend(chunks.map(|chunk| chunk_path(&chunk.sha256)));
        }
    }

    fn record(&mut self, repository: &Path, act: &Act) {
        let before = self.history.states.last().cloned().unwrap_or_default();
        let mut objects = Contents::new();
        read_tree(repository, repository, &mut objects);
        let is_new = |path: &&String| before.objects.get(*path) != objects.get(*path);
        let mut uploaded: Vec<String> = objects.keys().filter(is_new).cloned().collect();
        uploaded.sort_by_key(|path| upload_rank(path));

        let mut listed = before.listed;
        match act {
            Publish(leads, _) | Ahead(leads) => {
                let wanted = |hash: &&Hash| {
                    let signed = self.history.signed[*hash];
                    let Signed { sequence, flaw, level, .. } = signed;
                    leads.iter().any(|l| (l.to, l.flaw, l.level) == (sequence, flaw, level))
                };
                listed.extend(self.history.signed.keys().filter(wanted));
            }
            Revoke(sequence) => listed.retain(|h| self.history.signed[h].sequence != *sequence),
            Rotate(..) => {}
        }
        self.history.states.push(Published { objects, uploaded, listed });
    }
}

/// The publisher uploads chunks and manifests, then roots, targets, snapshot, and the timestamp.
fn upload_rank(path: &str) -> usize {
    let parts = ["chunks/", "targets/", ".root.json", ".targets.json", ".snapshot.json"];
    parts.iter().position(|part| path.contains(part)).unwrap_or(parts.len())
}

fn read_tree(root: &Path, folder: &Path, into: &mut Contents) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            read_tree(root, &path, into);
        } else {
            let name = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
            into.insert(name, Arc::new(std::fs::read(&path).unwrap()));
        }
    }
}

fn live(name: &'static str, acts: &[Act], generations: &Generations) -> History {
    let folder = tempfile::tempdir().unwrap();
    let counts = [(2, 2), (1, 1), (1, 1), (1, 1)];
    let counts = counts.map(|(keys, threshold)| RoleCounts { keys, threshold });
    let root = new_fleet(&folder.path().join("keys"), counts, T0 + ROOT_LASTS_S).unwrap();

    let (root, states) = (std::fs::read(root).unwrap(), Vec::new());
    let (signed, vital) = (BTreeMap::new(), BTreeSet::new());
    let history = History { name, root, states, signed, last: 0, vital };
    let mut publisher = Publisher { folder, generations, history };
    for (number, act) in acts.iter().enumerate() {
        publisher.take(act, T0 + 10 * number as u64);
    }
    publisher.find_vital();
    publisher.history
}
