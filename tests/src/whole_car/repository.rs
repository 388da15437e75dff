//! The publisher and its repository, prepared once. There are several histories of a fleet, and
//! each is the sequence of states of its repository, one after each publish. The real publisher
//! signs them. A simulation chooses a history and decides when each state, or a part of it, becomes
//! visible.

use crate::whole_car::model::{BundlePlan, Flaw, Generations, LEVELS, program};
use hatchback::SystemClock;
use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::{Hash, Manifest, sha256};
use hatchback::io::disk;
use hatchback::update::link::{Fetcher, LinkLimits};
use hatchback::update::program::Program;
use hatchback::update::release::{Release, chunk_path, parse_name};
use hatchback::update::staging::Staging;
use hatchback_link::DirectoryLink;
use hatchback_tools::repository::keys::{RoleCounts, new_fleet, rotate};
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::Objects;
use hatchback_tools::serve::install;
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
    /// The generation whose content each restored release has.
    pub contents: BTreeMap<u64, u64>,
    /// The objects of the last release's snapshot: with them alone a car can be at that release.
    pub vital: BTreeSet<String>,
}

impl History {
    /// Returns the generation whose content the release `sequence` has.
    pub fn content(&self, sequence: u64) -> u64 {
        self.contents.get(&sequence).copied().unwrap_or(sequence)
    }

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
    /// Publishes the content of a release again, as the next one.
    Restore(u64),
    /// Replaces the keys of a role, and signs these releases again.
    Rotate(RoleType, Vec<u64>),
    /// Publishes bundles while the publisher's clock is a year ahead.
    Ahead(Vec<BundlePlan>),
}

use Act::{Ahead, Publish, Restore, Revoke, Rotate};

const fn snapshot(to: u64) -> BundlePlan {
    BundlePlan { from: None, to, flaw: Flaw::None, level: 1, over: None }
}

const fn delta(from: u64, to: u64) -> BundlePlan {
    BundlePlan { from: Some(from), to, flaw: Flaw::None, level: 1, over: None }
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

/// Returns the histories with releases that are restored.
fn acts_of_restores() -> Vec<(&'static str, Vec<Act>)> {
    let to_four = |more: Vec<Act>| {
        let four = vec![all(&[delta(2, 3)]), all(&[delta(3, 4)]), Restore(3)];
        with(four.into_iter().chain(more).collect())
    };
    vec![
        ("restored", to_four(vec![])),
        (
            "a delta of a restored release",
            to_four(vec![all(&[BundlePlan { over: Some(3), ..delta(5, 6) }])]),
        ),
        ("restored twice", to_four(vec![Revoke(5), Restore(4)])),
        ("bad and restored", with(vec![flawed(Flaw::Probe), Revoke(3), Restore(2)])),
        (
            "canary restored",
            with(vec![all(&[delta(2, 3)]), Publish(vec![delta(3, 4)], 10), Restore(3)]),
        ),
        (
            "variants restored",
            with(vec![
                all(&[at(3, snapshot(3)), snapshot(3), delta(2, 3)]),
                all(&[at(3, delta(3, 4)), delta(3, 4)]),
                Restore(3),
            ]),
        ),
    ]
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
        let acts = acts.chain(acts_of_restores());
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
            Restore(sequence) => change.restore = Some(sequence.to_string()),
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
        if let Restore(sequence) = act {
            self.sign_restored(&repository, *sequence, &published.added);
        }
        self.record(&repository, act);
    }

    fn sign(&mut self, lead: BundlePlan) -> PathBuf {
        let bundle = self.generations.pack(lead);
        let BundlePlan { to: sequence, flaw, level, from, .. } = lead;
        let signed = Signed { sequence, flaw, level, variant: 0, is_delta: from.is_some() };
        self.history.signed.entry(manifest_of(&bundle)).or_insert(signed);
        self.history.last = self.history.last.max(lead.to);
        bundle
    }

    /// Records the targets `added`, which restore the release `earlier`, and installs their
    /// snapshot at the desk, as the parent of deltas.
    fn sign_restored(&mut self, repository: &Path, earlier: u64, added: &[String]) {
        let sequence = self.history.last + 1;
        let content = self.history.content(earlier);
        for name in added {
            let (generation, parent, variant) = parse_name(name).unwrap();
            assert_eq!(generation.sequence, sequence);
            let manifest = manifest_at(repository, name);
            let is_earlier = |s: &&Signed| s.sequence == earlier && s.variant == variant;
            let level = self.history.signed.values().find(is_earlier).unwrap().level;
            let (flaw, is_delta) = (Flaw::None, parent.is_some());
            let signed = Signed { sequence, flaw, level, variant, is_delta };
            self.history.signed.insert(sha256(&manifest), signed);
            let desk = self.generations.restored_flash(sequence, content);
            if !is_delta && level == 1 && !desk.exists() {
                let release = Release {
                    generation,
                    manifest_bytes: manifest.len() as u64,
                    manifest: sha256(&manifest),
                    variant,
                    ..Release::default()
                };
                let staged = self.folder.path().join("staged");
                let (disk, mut link) = (disk::system(), DirectoryLink(repository.to_owned()));
                let clock = SystemClock::default();
                let mut fetcher = Fetcher::new(&mut link, &clock, LinkLimits::default());
                let staging = Staging::open(disk.as_ref(), &staged).unwrap();
                let bundle = staging.stage(&release, &mut fetcher, |_, _| Ok(())).unwrap();
                install(&bundle, &desk).unwrap();
            }
        }
        self.history.contents.insert(sequence, content);
        self.history.last = sequence;
    }

    /// Finds the objects that must not be lost for good: at each level those of the newest listed
    /// snapshot, and of the deltas after it.
    fn find_vital(&mut self) {
        let History { states, signed, vital: objects, .. } = &mut self.history;
        let last = states.last().unwrap();
        let listed = || {
            let listed = last.listed.iter().map(|hash| (hash, signed[hash]));
            listed.filter(|(_, signed)| signed.flaw == Flaw::None)
        };
        let mut vital = BTreeSet::new();
        for level in 1..=LEVELS {
            let of_level = || listed().filter(|(_, signed)| signed.level == level);
            let snapshots = of_level().filter(|(_, signed)| !signed.is_delta);
            let Some(newest) = snapshots.map(|(_, signed)| signed.sequence).max() else { continue };
            let is_vital = |(_, signed): &(&Hash, Signed)| {
                signed.sequence > newest || signed.sequence == newest && !signed.is_delta
            };
            vital.extend(of_level().filter(is_vital).map(|(hash, _)| *hash));
        }
        for (path, content) in last.objects.iter().filter(|(path, _)| path.starts_with("targets/"))
        {
            if vital.contains(&sha256(content)) {
                objects.insert(path.clone());
                let manifest = Manifest::decode(content).unwrap();
                let chunks = manifest.blobs.iter().flat_map(|blob| &blob.chunks);
                objects.extend(chunks.map(|chunk| chunk_path(&chunk.sha256)));
            }
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
            Restore(_) => {
                let last = self.history.last;
                let signed = self.history.signed.iter();
                listed.extend(signed.filter(|(_, s)| s.sequence == last).map(|(hash, _)| *hash));
            }
            Revoke(sequence) => listed.retain(|h| self.history.signed[h].sequence != *sequence),
            Rotate(..) => {}
        }
        self.history.states.push(Published { objects, uploaded, listed });
    }
}

/// Returns the manifest of the target `name`.
fn manifest_at(repository: &Path, name: &str) -> Vec<u8> {
    let (folder, file) = name.rsplit_once('/').unwrap();
    let files = std::fs::read_dir(repository.join("targets").join(folder)).unwrap();
    let is_it = |path: &PathBuf| path.to_string_lossy().ends_with(&format!(".{file}"));
    std::fs::read(files.map(|file| file.unwrap().path()).find(is_it).unwrap()).unwrap()
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
    let contents = BTreeMap::new();
    let history = History { name, root, states, signed, last: 0, contents, vital };
    let mut publisher = Publisher { folder, generations, history };
    for (number, act) in acts.iter().enumerate() {
        publisher.take(act, T0 + 10 * number as u64);
    }
    publisher.find_vital();
    publisher.history
}
