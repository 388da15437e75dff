//! Pruning a repository: which objects stay, a prune that is killed at every removal, cars that
//! fetch during a prune, and a publisher that runs at the same time.

use anyhow::Result;
use hatchback::update::link::{Link, LinkError, Take};
use hatchback_link::DirectoryLink;
use hatchback_tests::fleet::{Car, Fleet, T0, VERSIONS};
use hatchback_tools::repository::prune::{Pruned, Retention, prune};
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::{DryRun, Object, Objects, Store};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const DAY: u64 = 24 * 3600;
/// Less than half of the eleven days that the fleet's root lasts.
const GRACE: u64 = 5 * DAY;
const WINDOW: Retention = Retention { releases: Some(2), grace_s: GRACE, expires_s: 100 * DAY };

/// A repository whose objects have simulated ages, and which fails after a number of removals.
struct Aged {
    store: Objects,
    now: Cell<u64>,
    put_at: RefCell<BTreeMap<String, u64>>,
    deletes: Cell<u32>,
    /// An object that another process removes as soon as new metadata are written.
    lost: Option<String>,
}

impl Aged {
    fn new(fleet: &Fleet) -> Self {
        let store = Objects::directory(&fleet.repository()).unwrap();
        let (now, deletes) = (Cell::new(T0), Cell::new(u32::MAX));
        Self { store, now, put_at: RefCell::default(), deletes, lost: None }
    }

    fn of(fleet: &Fleet, other: &Self) -> Self {
        Self { put_at: other.put_at.clone(), ..Self::new(fleet) }
    }

    fn paths(&self) -> Vec<String> {
        let mut paths: Vec<String> =
            self.store.list().unwrap().into_iter().map(|o| o.path).collect();
        paths.sort();
        paths
    }

    fn publish(&self, fleet: &Fleet, now: u64, bundle: &Path, share: u8) -> Result<()> {
        self.now.set(now);
        let change = Change {
            bundles: vec![bundle.to_owned()],
            share,
            expires_s: 100 * DAY,
            ..Change::default()
        };
        publish(self, &fleet.keys(), &change, now).map(drop)
    }

    fn prune(&self, fleet: &Fleet, now: u64) -> Result<Pruned> {
        self.now.set(now);
        prune(self, &fleet.keys(), &WINDOW, now)
    }
}

impl Store for Aged {
    fn get(&self, path: &str) -> Result<Option<Vec<u8>>> {
        self.store.get(path)
    }
    fn bytes(&self, path: &str) -> Result<Option<u64>> {
        self.store.bytes(path)
    }
    fn put(&self, path: &str, content: Vec<u8>) -> Result<()> {
        self.put_at.borrow_mut().insert(path.to_owned(), self.now.get());
        self.store.put(path, content)
    }
    fn put_new(&self, path: &str, content: Vec<u8>) -> Result<()> {
        self.lost.iter().for_each(|lost| drop(self.store.delete(lost)));
        self.put_at.borrow_mut().insert(path.to_owned(), self.now.get());
        self.store.put_new(path, content)
    }
    fn replace(&self, path: &str, before: Option<&[u8]>, content: Vec<u8>) -> Result<()> {
        self.store.replace(path, before, content)
    }
    fn list(&self) -> Result<Vec<Object>> {
        let put_at = self.put_at.borrow();
        let aged = |o: Object| Object { modified: put_at.get(&o.path).copied().unwrap_or(T0), ..o };
        Ok(self.store.list()?.into_iter().map(aged).collect())
    }
    fn delete(&self, path: &str) -> Result<()> {
        anyhow::ensure!(self.deletes.get() > 0, "killed");
        self.deletes.set(self.deletes.get() - 1);
        self.store.delete(path)
    }
}

/// Returns a fleet, its store and a car at the first release. The fleet published a release on each
/// of four days; the third is a snapshot. On the fifth day a prune unlisted the first two.
fn unlisted() -> (Fleet, Aged, Car) {
    let fleet = Fleet::new();
    let (store, stale) = (Aged::new(&fleet), Car::at_first_release(&fleet));
    store.publish(&fleet, T0 + DAY, &VERSIONS.deltas[1], 100).unwrap();
    store.publish(&fleet, T0 + 2 * DAY, &VERSIONS.snapshots[2], 100).unwrap();
    store.publish(&fleet, T0 + 3 * DAY, &VERSIONS.deltas[3], 100).unwrap();
    std::fs::write(fleet.file("index.html"), "ours").unwrap();
    let pruned = store.prune(&fleet, T0 + 4 * DAY).unwrap();
    assert_eq!(pruned.unlisted, [OLD[0], OLD[1]]);
    assert_eq!(pruned.removed, 0, "a prune within the grace period removed something");
    (fleet, store, stale)
}

const OLD: [&str; 2] =
    ["versions/000000000001-snapshot", "versions/000000000002-from-000000000001"];
/// End of the grace period of the unlisted releases.
const LATER: u64 = T0 + 4 * DAY + GRACE;

#[test]
fn objects_that_no_release_needs_are_removed_and_every_car_finds_a_path() {
    let (fleet, store, stale) = unlisted();
    let before = store.paths();
    store.prune(&fleet, LATER - 1).unwrap();
    let chunks_and_targets = |paths: &[String]| -> Vec<String> {
        paths.iter().filter(|p| !p.starts_with("metadata/")).cloned().collect()
    };

    assert_eq!(
        chunks_and_targets(&before),
        chunks_and_targets(&store.paths()),
        "a second too early"
    );

    let before = store.paths();
    let dry = prune(&DryRun(&store), &fleet.keys(), &WINDOW, LATER).unwrap();
    assert_eq!(store.paths(), before, "a dry run removed something");

    let done = store.prune(&fleet, LATER).unwrap();
    assert_eq!(
        (dry.removed, dry.removed_bytes, dry.kept),
        (done.removed, done.removed_bytes, done.kept)
    );
    assert_eq!(before.len() - store.paths().len(), done.removed as usize);

    // Releases 1 and 2 are removed, and 3 and 4 are complete. Roots and foreign files stay.
    let chunks = |bundles: [&PathBuf; 2]| bundles.map(|b| fleet.chunks(b)).concat();
    let old = chunks([&VERSIONS.snapshots[0], &VERSIONS.deltas[1]]);
    let kept = chunks([&VERSIONS.snapshots[2], &VERSIONS.deltas[3]]);
    assert!(kept.iter().all(|path| path.exists()));
    assert!(old.iter().all(|path| path.exists() == kept.contains(path)));
    assert!(old.iter().any(|path| !kept.contains(path)));

    for (name, stays) in [
        ("index.html", true),
        ("metadata/1.root.json", true),
        ("metadata/timestamp.json", true),
        ("metadata/5.targets.json", true),
        ("metadata/4.targets.json", false),
        ("metadata/4.snapshot.json", false),
    ] {
        assert_eq!(fleet.file(name).exists(), stays, "{name}");
    }

    assert!(store.paths().iter().all(|path| !OLD.iter().any(|name| path.ends_with(&name[9..]))));
    assert_eq!(store.prune(&fleet, LATER).unwrap().removed, 0, "the first prune left objects");
    for car in [Car::new(&fleet), stale] {
        car.run(&mut fleet.link(), LATER + 1).unwrap();
        assert_eq!(car.live(), 4);
    }
}

#[test]
fn a_prune_that_is_killed_leaves_a_whole_repository() {
    let (fleet, store, _) = unlisted();
    let whole = fleet.fork();
    Aged::of(&whole, &store).prune(&whole, LATER).unwrap();
    let expected = Aged::new(&whole).paths();
    for deletes in 0.. {
        let fork = fleet.fork();
        let store = Aged::of(&fork, &store);
        store.deletes.set(deletes);
        let killed = store.prune(&fork, LATER).is_err();
        let car = Car::new(&fork);
        car.run(&mut fork.link(), LATER + 1).unwrap();
        assert_eq!(car.live(), 4, "killed at {deletes}");
        store.deletes.set(u32::MAX);
        store.prune(&fork, LATER).unwrap();
        assert_eq!(store.paths(), expected, "killed at {deletes}");
        if !killed {
            assert!(deletes > 10, "only {deletes} removals");
            break;
        }
    }
}

/// A link that prunes the repository just before the request of this number.
struct PrunedAt<'a>(DirectoryLink, u32, &'a dyn Fn());

impl Link for PrunedAt<'_> {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        if self.1 == 0 {
            self.2();
        }
        self.1 = self.1.wrapping_sub(1);
        self.0.get(path, from, take)
    }
}

#[test]
fn a_prune_does_not_break_a_download() {
    let (fleet, store, _) = unlisted();
    for at in 0.. {
        let fork = fleet.fork();
        let store = Aged::of(&fork, &store);
        let pruned = Cell::new(false);
        let go = || {
            store.prune(&fork, LATER).unwrap();
            pruned.set(true);
        };
        let car = Car::new(&fork);
        car.run(&mut PrunedAt(fork.link(), at, &go), LATER + 1).unwrap();

        assert_eq!(car.live(), 4, "pruned at request {at}");
        if !pruned.get() {
            assert!(at > 10, "only {at} requests");
            break;
        }
    }

    // A release that is unlisted during its download stays for the grace period.
    let fleet = Fleet::new();
    let (store, car) = (Aged::new(&fleet), Car::new(&fleet));
    let go = || {
        store.publish(&fleet, T0 + 2, &VERSIONS.snapshots[2], 100).unwrap();
        let window = Retention { releases: Some(1), ..WINDOW };
        assert_eq!(prune(&store, &fleet.keys(), &window, T0 + 3).unwrap().unlisted, [OLD[0]]);
    };

    car.run(&mut PrunedAt(fleet.link(), 6, &go), T0 + 4).unwrap();
    assert_eq!(car.live(), 3, "the car installed the first release and then the third");
}

#[test]
fn a_snapshot_for_a_share_of_the_fleet_unlists_nothing() {
    let fleet = Fleet::new();
    let store = Aged::new(&fleet);
    store.publish(&fleet, T0 + DAY, &VERSIONS.deltas[1], 100).unwrap();
    store.publish(&fleet, T0 + 2 * DAY, &VERSIONS.snapshots[2], 5).unwrap();
    let window = Retention { releases: Some(1), ..WINDOW };
    let pruned = |now| prune(&store, &fleet.keys(), &window, now).unwrap().unlisted;
    assert_eq!(pruned(T0 + 3 * DAY).len(), 0);
    store.publish(&fleet, T0 + 4 * DAY, &VERSIONS.snapshots[2], 100).unwrap();
    assert_eq!(pruned(T0 + 5 * DAY), OLD);
}

#[test]
fn a_publish_is_refused_if_a_chunk_is_removed_during_it() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let mut store = Aged::new(&fleet);
    let chunk = fleet.chunks(&VERSIONS.deltas[1]).remove(0);
    store.publish(&fleet, T0 + 10, &VERSIONS.deltas[1], 100).unwrap();
    fleet.revoke(T0 + 20, 2);
    store.lost = Some(chunk.strip_prefix(fleet.repository()).unwrap().to_str().unwrap().to_owned());
    let refused = store.publish(&fleet, T0 + 30, &VERSIONS.deltas[1], 100).unwrap_err();
    assert!(refused.to_string().contains("removed"), "{refused:#}");
    car.run(&mut fleet.link(), T0 + 31).unwrap();
    assert_eq!(car.live(), 1);
    store.lost = None;
    store.publish(&fleet, T0 + 40, &VERSIONS.deltas[1], 100).unwrap();
    car.run(&mut fleet.link(), T0 + 41).unwrap();
    assert_eq!(car.live(), 2);
}

#[test]
fn a_repository_of_other_keys_or_without_timestamp_is_not_pruned() {
    let (fleet, store, _) = unlisted();
    let stranger = Fleet::new();
    assert!(prune(&store, &stranger.keys(), &WINDOW, LATER).is_err());
    std::fs::remove_file(fleet.file("metadata/timestamp.json")).unwrap();
    let refused = store.prune(&fleet, LATER).unwrap_err();
    assert!(refused.to_string().contains("timestamp.json is missing"), "{refused:#}");
    assert!(store.bytes("metadata/1.targets.json").unwrap().is_some());
}

/// `object_store` never lists what a killed upload left in a directory.
#[test]
fn what_killed_uploads_left_goes_after_a_day() {
    let fleet = Fleet::new();
    let store = Objects::directory(&fleet.repository()).unwrap();
    let left = [
        "metadata/2.snapshot.json#1",
        "metadata/timestamp.json#12",
        "metadata/2.root.json#1",
        "targets/versions/1#2",
        "chunks/ab/cd#1",
    ];
    let others = ["index.html#1", "metadata/notes#x", "metadata/notes#", "ours/chunk#1"];
    let stamp = std::time::UNIX_EPOCH + std::time::Duration::from_secs(T0);
    for path in left.iter().chain(&others) {
        let path = fleet.file(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let file = std::fs::File::create(path).unwrap();
        file.set_modified(stamp).unwrap();
    }

    let whole = Retention { releases: None, grace_s: 0, ..WINDOW };
    let removed =
        |store: &dyn Store, now| prune(store, &fleet.keys(), &whole, now).unwrap().removed;
    assert_eq!(removed(&store, T0 + DAY - 1), 0, "a running publish may be writing them");
    assert_eq!(removed(&DryRun(&store), T0 + DAY), 5);
    assert!(left.iter().all(|path| fleet.file(path).exists()));
    assert_eq!(removed(&store, T0 + DAY), 5);
    assert!(!left.iter().any(|path| fleet.file(path).exists()));
    assert!(others.iter().all(|path| fleet.file(path).exists()));
}
