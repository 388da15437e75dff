//! Updater against a repository and a link that mean harm, one test a threat, with real signatures:
//! every attack is an error of its name, what was live stays live, and the car recovers by itself
//! when the attack ends.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::sha256;
use hatchback::flash::{Flash, FlashError};
use hatchback::io::disk::{self, Disk};
use hatchback::maintenance::wear::WearBudget;
use hatchback::update::Updater;
use hatchback::update::error::UpdateError;
use hatchback::update::link::{Fetcher, Link, LinkError, LinkLimits, Take};
use hatchback::update::release::Release;
use hatchback::update::staging::Staging;
use hatchback::update::state::{UpdateState, UpdateStatus};
use hatchback::update::trust::Trust;
use hatchback_link::{DirectoryLink, HttpLink, LinkOptions};
use hatchback_tests::fleet::{Car, FRESH_S, Fleet, ROOT_S, T0, Ticks, VERSIONS};
use hatchback_tests::random::Random;
use hatchback_tests::rewrite::Parts;
use hatchback_tests::sim_disk::SimDisk;
use hatchback_tests::wire::{Faults, Wire};
use hatchback_tools::repository::keys::rotate;
use hatchback_tools::repository::prune::{Window, prune};
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::{Object, Objects, Store};
use std::cell::Cell;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;
use tough::schema::RoleType;

/// Releases that proved themselves.
fn committed(status: &UpdateStatus) -> usize {
    status.history.iter().filter(|e| e.state == UpdateState::Committed).count()
}

#[test]
fn a_car_follows_the_releases() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    assert_eq!(car.live(), 1);
    fleet.delta(T0 + 10, 2);
    fleet.delta(T0 + 20, 3);
    let status = car.run(&mut fleet.link(), T0 + 30).unwrap();
    assert_eq!((car.live(), committed(&status), status.newest), (3, 3, Some(3)));
    let mut wire = Wire::new(fleet.link(), Faults::default());
    let status = car.run(&mut wire, T0 + 40).unwrap();
    assert_eq!(status.state, UpdateState::Committed);
    assert_eq!(
        wire.asked,
        ["metadata/2.root.json", "metadata/timestamp.json"],
        "a poll asks for no more"
    );
    assert_eq!(status.bytes_received, wire.bytes);
    // What was on the way is gone, though it is still listed.
    let left = car.disk.list(Path::new("/sync/staged")).unwrap();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn arbitrary_software() {
    let fleet = Fleet::new();
    for chunk in [true, false] {
        let (car, bad) = (Car::new(&fleet), fleet.fork());
        let path = match chunk {
            true => bad.chunks(&VERSIONS.snapshots[0]).remove(1),
            false => {
                let folder =
                    std::fs::read_dir(bad.file("targets")).unwrap().next().unwrap().unwrap().path();
                std::fs::read_dir(folder).unwrap().next().unwrap().unwrap().path()
            }
        };
        let mut content = std::fs::read(&path).unwrap();
        content[20] ^= 1;
        std::fs::write(&path, content).unwrap();
        let named = |e: &UpdateError| matches!(e, UpdateError::ArbitrarySoftware { .. });
        car.survives(&mut bad.link(), T0 + 1, named, (&fleet, T0 + 2, 1));
    }
}

#[test]
fn a_chunk_swapped_for_another_valid_one() {
    let fleet = Fleet::new();
    let chunks = fleet.chunks(&VERSIONS.snapshots[0]);
    let (short, long) = (&chunks[0], &chunks[chunks.len() - 1]);
    for (from, to) in [(short, long), (long, short)] {
        let (car, bad) = (Car::new(&fleet), fleet.fork());
        let inside = |path: &Path| {
            bad.file(path.strip_prefix(fleet.repository()).unwrap().to_str().unwrap())
        };
        std::fs::copy(from, inside(to)).unwrap();
        let named = |e: &UpdateError| {
            matches!(e, UpdateError::ArbitrarySoftware { .. } | UpdateError::EndlessData { .. })
        };
        car.survives(&mut bad.link(), T0 + 1, named, (&fleet, T0 + 2, 1));
    }
}

#[test]
fn rollback() {
    let fleet = Fleet::new();
    let old = fleet.fork();
    fleet.delta(T0 + 10, 2);
    let car = Car::new(&fleet);
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    let named = |e: &UpdateError| matches!(e, UpdateError::Rollback { trusted: 2, offered: 1, .. });
    car.survives(&mut old.link(), T0 + 12, named, (&fleet, T0 + 13, 2));
}

#[test]
fn replay_after_torn_metadata() {
    let fleet = Fleet::new();
    let old = fleet.fork();
    fleet.delta(T0 + 10, 2);
    let files =
        ["timestamp.json", "snapshot.json", "targets.json", "root.json", "floor.a", "floor.b"];
    for torn in 0..1 << files.len() {
        let car = Car::new(&fleet);
        car.run(&mut fleet.link(), T0 + 11).unwrap();
        for (i, name) in files.iter().enumerate().filter(|(i, _)| torn >> i & 1 == 1) {
            let path = car.sync.directory.join(name);
            if i % 2 == 0 {
                drop(car.disk.create(&path))
            } else {
                car.disk.remove_file(&path).unwrap()
            }
        }
        let error = car.run(&mut old.link(), T0 + 12).unwrap_err();
        let both_floors = torn >> 4 == 3;
        match &error {
            UpdateError::Floor { .. } => assert!(both_floors, "{torn:b}"),
            UpdateError::Replay { .. } | UpdateError::Rollback { .. } => {
                assert!(!both_floors, "{torn:b}")
            }
            other => panic!("{torn:b}: {other:?}"),
        }
        assert_eq!(car.live(), 2);
        let healed = car.run(&mut fleet.link(), T0 + 13);
        assert_eq!(healed.is_err(), both_floors, "{torn:b}: {healed:?}");
    }
}

/// One copy of the floor is as good as two, whether the other is torn or the device does not give
/// it.
#[test]
fn a_floor_that_cannot_be_read_in_one_copy() {
    let fleet = Fleet::new();
    let old = fleet.fork();
    fleet.delta(T0 + 10, 2);
    for copy in ["floor.a", "floor.b"].map(|name| Path::new("/sync").join(name)) {
        let car = Car::new(&fleet);
        car.run(&mut fleet.link(), T0 + 11).unwrap();
        car.disk.spoil(&copy);
        let error = car.run(&mut old.link(), T0 + 12).unwrap_err();
        assert!(matches!(error, UpdateError::Rollback { .. }), "{error:?}");
        car.run(&mut fleet.link(), T0 + 13).unwrap();
        car.disk.read(&copy).expect("was written anew");
    }
}

/// A record that is there and cannot be read is none of a car that begins: neither its day nor its
/// probation is forgotten.
#[test]
fn a_record_that_cannot_be_read_is_left_as_it_is() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let record = Path::new("/sync/status");
    car.disk.spoil(record);
    let unreadable = |e: UpdateError| {
        assert!(matches!(&e, UpdateError::Io { path, .. } if path == record), "{e:?}")
    };
    unreadable(car.run(&mut fleet.link(), T0 + 12).unwrap_err());
    unreadable(car.sync.begin(T0 + 12).unwrap_err());
    unreadable(car.sync.consent(T0 + 12).unwrap_err());
    car.disk.read(record).expect_err("was replaced");
}

#[test]
fn freeze() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let frozen = fleet.fork();
    fleet.delta(T0 + FRESH_S, 2);
    let named =
        |e: &UpdateError| matches!(e, UpdateError::Freeze { role, .. } if role == "timestamp");
    car.survives(&mut frozen.link(), T0 + FRESH_S + 1, named, (&fleet, T0 + FRESH_S + 2, 2));
}

#[test]
fn a_clock_of_1970_or_2090() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    let behind = |e: &UpdateError| matches!(e, UpdateError::Clock { now: 0, floor: T0 });
    let ahead = |e: &UpdateError| matches!(e, UpdateError::Freeze { role, .. } if role == "root");
    car.survives(&mut fleet.link(), 0, behind, (&fleet, T0 + 11, 2));
    fleet.delta(T0 + 20, 3);
    car.survives(&mut fleet.link(), 3_786_912_000, ahead, (&fleet, T0 + 21, 3));
}

#[test]
fn mix_and_match() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let (bad, other) = (fleet.fork(), fleet.fork());
    bad.delta(T0 + 10, 2);
    other.delta(T0 + 11, 3);
    fleet.delta(T0 + 12, 2);
    // Signed by the right keys, of the same version, but not of the same moment.
    std::fs::copy(other.file("metadata/2.snapshot.json"), bad.file("metadata/2.snapshot.json"))
        .unwrap();
    let named = |e: &UpdateError| matches!(e, UpdateError::MixAndMatch { .. });
    let error = car.run(&mut bad.link(), T0 + 13).unwrap_err();
    assert!(named(&error), "{error:?}");
    // The bad mirror's timestamp was a good one: the next good version is a higher one.
    fleet.delta(T0 + 14, 3);
    car.run(&mut fleet.link(), T0 + 15).unwrap();
    assert_eq!(car.live(), 3);
}

#[test]
fn endless_data() {
    let fleet = Fleet::new();
    for path in
        ["metadata/timestamp", "metadata/1.snapshot", "metadata/1.targets", "targets/", "chunks/"]
    {
        let car = Car::new(&fleet);
        let mut wire = Wire::new(fleet.link(), Faults { endless: Some(path), ..Faults::default() });
        let named = |e: &UpdateError| matches!(e, UpdateError::EndlessData { path: p, .. } if p.starts_with(path));
        car.survives(&mut wire, T0 + 1, named, (&fleet, T0 + 2, 1));
        assert!(wire.bytes < 200_000, "{} bytes were taken", wire.bytes);
    }
}

#[test]
fn slow_retrieval() {
    let fleet = Fleet::new();
    let car = Car::new(&fleet);
    let mut wire = Wire::new(fleet.link(), Faults { single_bytes: true, ..Faults::default() });
    let error =
        car.run_timed(&mut wire, T0 + 1, &Ticks(AtomicU64::new(0), 1), LinkLimits::default());
    assert!(matches!(error, Err(UpdateError::SlowRetrieval { bytes: 30..40, .. })), "{error:?}");
    assert_eq!(car.live(), 0);
    car.run(&mut fleet.link(), T0 + 2).unwrap();
    assert_eq!(car.live(), 1);
}

#[test]
fn wrong_keys() {
    let (fleet, stranger) = (Fleet::new(), Fleet::new());
    let car = Car::at_first_release(&fleet);
    stranger.delta(T0 + 5, 2);
    fleet.delta(T0 + 10, 2);
    let named =
        |e: &UpdateError| matches!(e, UpdateError::WrongKey { role, .. } if role == "timestamp");
    car.survives(&mut stranger.link(), T0 + 11, named, (&fleet, T0 + 12, 2));
    // And a root that only its own keys sign.
    rotate(&stranger.keys(), RoleType::Timestamp, T0 + ROOT_S).unwrap();
    stranger.delta(T0 + 13, 3);
    fleet.delta(T0 + 13, 3);
    let named = |e: &UpdateError| matches!(e, UpdateError::WrongKey { role, .. } if role == "root");
    car.survives(&mut stranger.link(), T0 + 14, named, (&fleet, T0 + 15, 3));
}

#[test]
fn threshold_not_met() {
    let fleet = Fleet::signed_by([(2, 2), (2, 2), (2, 2), (2, 2)]);
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    let bad = fleet.fork();
    let path = bad.file("metadata/timestamp.json");
    let mut stamp: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    stamp["signatures"].as_array_mut().unwrap().pop().unwrap();
    std::fs::write(&path, stamp.to_string()).unwrap();
    let named =
        |e: &UpdateError| matches!(e, UpdateError::Threshold { found: 1, threshold: 2, .. });
    car.survives(&mut bad.link(), T0 + 11, named, (&fleet, T0 + 12, 2));
}

#[test]
fn a_revoked_key_and_fast_forward_recovery() {
    let fleet = Fleet::new();
    let (fresh, car) = (Car::at_first_release(&fleet), Car::at_first_release(&fleet));
    // Whoever stole the online keys signs many versions ahead; one car takes it up.
    let thief = fleet.fork();
    (0..5).for_each(|n| thief.delta(T0 + 10 + n, 2));
    car.run(&mut thief.link(), T0 + 20).unwrap();
    assert_eq!(car.floor()[1], 6);
    fleet.delta(T0 + 20, 2);
    let named = |e: &UpdateError| matches!(e, UpdateError::Rollback { trusted: 6, offered: 2, .. });
    assert!(named(&car.run(&mut fleet.link(), T0 + 21).unwrap_err()));
    rotate(&fleet.keys(), RoleType::Timestamp, T0 + ROOT_S).unwrap();
    rotate(&fleet.keys(), RoleType::Root, T0 + ROOT_S).unwrap();
    // The root's keys go back to where they are kept; releases are signed without them.
    let away = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fleet.keys()).unwrap().map(Result::unwrap) {
        if entry.file_name().to_string_lossy().starts_with("root-") {
            std::fs::rename(entry.path(), away.path().join(entry.file_name())).unwrap();
        }
    }
    assert_eq!(away.path().read_dir().unwrap().count(), 2);
    fleet.delta(T0 + 30, 3);
    car.run(&mut fleet.link(), T0 + 31).unwrap();
    assert_eq!(
        (car.live(), car.floor()[0], car.floor()[1]),
        (3, 3, 3),
        "the lower versions are accepted again"
    );
    // The stolen key signs no more, even where the new root is handed on.
    for version in 2..=3 {
        let name = format!("metadata/{version}.root.json");
        std::fs::copy(fleet.file(&name), thief.file(&name)).unwrap();
    }
    let named =
        |e: &UpdateError| matches!(e, UpdateError::WrongKey { role, .. } if role == "timestamp");
    for car in [&car, &fresh] {
        car.survives(&mut thief.link(), T0 + 32, named, (&fleet, T0 + 33, 3));
    }
}

#[test]
fn what_a_thief_listed_is_not_signed_by_the_new_keys() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    // The targets' key is stolen: a release is listed that nobody made.
    fleet.delta(T0 + 20, 3);
    rotate(&fleet.keys(), RoleType::Targets, T0 + ROOT_S).unwrap();
    let (store, keys) = (Objects::directory(&fleet.repository()).unwrap(), fleet.keys());
    let words = |words: &[&str]| words.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>();
    let change = |carry: &[&str], revoke: &[&str]| Change {
        bundles: vec![VERSIONS.merged(2, 4)],
        carry: words(carry),
        revoke: words(revoke),
        expires_s: FRESH_S,
        ..Change::default()
    };
    let before = store.list().unwrap().len();
    for (carry, open) in [(&[][..], "1-snapshot"), (&["1", "2"], "3-from-000000000002 sha256 ")] {
        let refused = publish(&store, &keys, &change(carry, &[]), T0 + 30).unwrap_err().to_string();
        assert!(refused.contains(open), "{refused}");
        assert_eq!(store.list().unwrap().len(), before, "nothing was put up");
    }
    let window = Window { releases: Some(1), grace_s: 0, expires_s: FRESH_S };
    let refused = prune(&store, &keys, &window, T0 + 30).unwrap_err().to_string();
    assert!(refused.contains("publish first"), "{refused}");
    let done = publish(&store, &keys, &change(&["1", "2"], &["3"]), T0 + 30).unwrap();
    assert_eq!(
        (done.carried.len(), done.revoked),
        (2, words(&["versions/000000000003-from-000000000002"]))
    );
    car.run(&mut fleet.link(), T0 + 31).unwrap();
    assert_eq!(car.live(), 4);
    let again = publish(&store, &keys, &change(&["1"], &[]), T0 + 40).unwrap_err().to_string();
    assert!(again.contains("--carry"), "{again}");
}

#[test]
fn a_name_that_cars_were_shown_stands_for_one_content() {
    let fleet = Fleet::new();
    let store = Objects::directory(&fleet.repository()).unwrap();
    // The second release is packed anew and nobody thought of its sequence.
    let other = fleet.folder.path().join("other.hatch");
    let mut parts = Parts::read(&VERSIONS.deltas[1]);
    parts.manifest.probe = None;
    parts.manifest.schema.features[0].hotness_max += 1;
    std::fs::write(&other, parts.bytes()).unwrap();
    let change = |revoke: &[&str]| Change {
        bundles: vec![other.clone()],
        revoke: revoke.iter().map(|r| (*r).to_owned()).collect(),
        expires_s: FRESH_S,
        ..Change::default()
    };
    let refused = |now, revoke: &[&str]| {
        let refused = publish(&store, &fleet.keys(), &change(revoke), now).unwrap_err().to_string();
        assert!(refused.contains("was published with other content"), "{refused}");
    };
    fleet.delta(T0 + 10, 2);
    refused(T0 + 11, &[]);
    refused(T0 + 12, &["2"]);
    fleet.revoke(T0 + 13, 2);
    fleet.delta(T0 + 14, 2);
    fleet.revoke(T0 + 15, 2);
    refused(T0 + 16, &[]);
    // Nobody was shown what a publish left that was killed before its timestamp.
    let fleet = Fleet::new();
    let store = Objects::directory(&fleet.repository()).unwrap();
    let first = Change {
        bundles: vec![VERSIONS.deltas[1].clone()],
        expires_s: FRESH_S,
        ..Change::default()
    };
    let writes = (0..).find(|&writes| {
        let _ = publish(&Dies(&store, Cell::new(writes)), &fleet.keys(), &first, T0 + 10);
        fleet.file("metadata/2.snapshot.json").exists()
    });
    assert!(writes.is_some());
    publish(&store, &fleet.keys(), &change(&[]), T0 + 11).unwrap();
}

#[test]
fn a_chunk_that_a_power_cut_emptied_is_put_up_again() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let chunk = fleet.chunks(&VERSIONS.deltas[1]).remove(0);
    std::fs::create_dir_all(chunk.parent().unwrap()).unwrap();
    std::fs::write(&chunk, b"").unwrap();
    fleet.delta(T0 + 10, 2);
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    assert_eq!(car.live(), 2);
}

#[test]
fn a_bundle_that_no_car_would_take_is_refused() {
    let fleet = Fleet::new();
    let path = fleet.folder.path().join("odd.hatch");
    let mut parts = Parts::read(&VERSIONS.snapshots[1]);
    parts.manifest.generation.lineage = ".versions".to_owned();
    std::fs::write(&path, parts.bytes()).unwrap();
    let change = Change { bundles: vec![path], ..Change::default() };
    let store = Objects::directory(&fleet.repository()).unwrap();
    let refused = publish(&store, &fleet.keys(), &change, T0 + 10).unwrap_err().to_string();
    assert!(refused.contains("cars take no release named"), "{refused}");
}

/// A link whose server is in no hurry: meanwhile another process tries to sync the same car.
struct Meanwhile<'a>(DirectoryLink, &'a Car);

impl Link for Meanwhile<'_> {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        let refused = self.1.run(&mut self.0, T0 + 1);
        assert!(matches!(refused, Err(UpdateError::Busy { .. })), "{refused:?}");
        self.0.get(path, from, take)
    }
}

/// With the system's own locks, which the simulated disk only stands for.
#[test]
fn one_process_at_a_time_changes_a_directory() {
    let (fleet, folder, disk) = (Fleet::new(), tempfile::tempdir().unwrap(), disk::system());
    let flash = folder.path().join("flash");
    let bundle = |n: usize| BundleReader::open(&VERSIONS.snapshots[n]).unwrap();
    let prepared = Flash::prepare(&disk, &flash, &mut bundle(0), |_| ()).unwrap();
    let second = || Flash::install(&disk, &flash, &mut bundle(1), |_| ());
    assert!(matches!(second(), Err(FlashError::Busy { .. })));
    prepared.commit().unwrap();
    second().unwrap();

    let mut car = Car::new(&fleet);
    let directory = folder.path().join("sync");
    car.sync = Updater { disk, directory, flash: folder.path().join("new"), ..car.sync };
    let root = std::fs::read(fleet.keys().join("1.root.json")).unwrap();
    Trust::init(car.sync.disk.as_ref(), &car.sync.directory, &root).unwrap();
    let (mut link, clock) = (Meanwhile(fleet.link(), &car), Ticks(AtomicU64::new(0), 0));
    let mut fetcher = Fetcher::new(&mut link, &clock, LinkLimits::default());
    let status = car.sync.fetch(&mut fetcher, T0 + 1, |_, _| ()).unwrap();
    assert_eq!(status.state, UpdateState::Staged);
    while car.sync.advance(&car.host(), T0 + 1).unwrap() {}
    assert_eq!(car.live(), 1);
}

#[test]
fn a_captive_portal() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    let page: &[u8] = b"<!DOCTYPE html><title>Welcome to our Wi-Fi</title>";
    let mut wire = Wire::new(fleet.link(), Faults { portal: Some(page), ..Faults::default() });
    let named = |e: &UpdateError| matches!(e, UpdateError::Malformed { .. });
    car.survives(&mut wire, T0 + 11, named, (&fleet, T0 + 12, 2));
}

#[test]
fn a_delta_for_another_parent_leads_nowhere() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let bad = fleet.fork();
    bad.delta(T0 + 10, 3);
    let named = |e: &UpdateError| matches!(e, UpdateError::NoWay { newest: 3, .. });
    bad.publish(T0 + 11, &VERSIONS.snapshots[0]);
    let error = car.run(&mut bad.link(), T0 + 12).unwrap_err();
    assert!(named(&error) && car.live() == 1, "{error:?}");
    bad.delta(T0 + 13, 2);
    car.run(&mut bad.link(), T0 + 14).unwrap();
    assert_eq!(car.live(), 3);
}

/// The release of the first snapshot, as the repository lists it.
fn first_release() -> Release {
    let bundle = BundleReader::open(&VERSIONS.snapshots[0]).unwrap();
    let content = bundle.manifest_bytes();
    Release {
        generation: bundle.manifest().generation.clone(),
        parent: None,
        bytes: 0,
        share: 100,
        manifest_bytes: content.len() as u64,
        manifest: sha256(content),
    }
}

#[test]
fn a_download_cut_at_every_byte_goes_on_at_the_chunk() {
    let (fleet, release, clock) = (Fleet::new(), first_release(), Ticks(AtomicU64::new(0), 0));
    let bundle = BundleReader::open(&VERSIONS.snapshots[0]).unwrap();
    let blobs = &bundle.manifest().blobs;
    let largest = blobs.iter().flat_map(|b| &b.chunks).map(|c| u64::from(c.stored)).max().unwrap();
    let largest = largest.max(release.manifest_bytes);
    let total = release.manifest_bytes + blobs.iter().map(|b| b.stored_bytes()).sum::<u64>();
    let stage = |disk: &SimDisk, wire: &mut Wire<DirectoryLink>| {
        let staging = Staging::open(disk, Path::new("/staged")).unwrap();
        staging
            .stage(&release, &mut Fetcher::new(wire, &clock, LinkLimits::default()), |_, _| Ok(()))
    };
    for cut in 0..total {
        let disk = SimDisk::default();
        let mut wire =
            Wire::new(fleet.link(), Faults { breaks_after: Some(cut), ..Faults::default() });
        let error = stage(&disk, &mut wire).unwrap_err();
        assert!(matches!(error, UpdateError::Link { .. }), "cut {cut}: {error:?}");
        wire.faults = Faults::default();
        let path = stage(&disk, &mut wire).unwrap();
        assert_eq!(
            disk.read(&path).unwrap(),
            std::fs::read(&VERSIONS.snapshots[0]).unwrap(),
            "cut {cut}"
        );
        assert!(wire.bytes < total + largest, "cut {cut}: {} bytes instead of {total}", wire.bytes);
    }
    println!("{total} cuts");
    // Breaks that leave something each time do not even end the run.
    let mut wire =
        Wire::new(fleet.link(), Faults { breaks_each: Some(largest / 20), ..Faults::default() });
    stage(&SimDisk::default(), &mut wire).unwrap();
    assert_eq!(wire.bytes, total);
}

#[test]
fn a_power_cut_at_every_call_ends_in_the_newest_generation() {
    let fleet = Fleet::new();
    let before = fleet.fork();
    fleet.delta(T0 + 10, 2);
    fleet.delta(T0 + 11, 3);
    let run = |cut: Option<u64>, seed: u64| {
        let car = Car::at_first_release(&before);
        let calls = car.disk.calls();
        if let Some(cut) = cut {
            car.disk.cut_after(cut);
            let _ = car.run(&mut fleet.link(), T0 + 12);
            car.disk.reboot(seed);
            assert!((1..=3).contains(&car.live()), "cut {cut}: {}", car.live());
        }
        car.run(&mut fleet.link(), T0 + 13).unwrap_or_else(|e| panic!("cut {cut:?}: {e}"));
        assert_eq!(car.live(), 3, "cut {cut:?}");
        let replayed = car.run(&mut before.link(), T0 + 14);
        assert!(replayed.is_err(), "cut {cut:?}: a replay was accepted");
        car.disk.calls() - calls
    };
    let (calls, mut random) = (run(None, 0), Random::new(5));
    for cut in 0..calls {
        run(Some(cut), random.bits());
    }
    println!("{calls} cuts");
}

/// A web server over a directory: answers two of 29 requests with an error, breaks every answer off
/// after `breaks` bytes, and knows ranges or does not.
fn serve(folder: PathBuf, breaks: usize, ranges: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/models", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for (n, stream) in listener.incoming().enumerate() {
            let (mut stream, mut from, mut path) = (stream.unwrap(), 0, String::new());
            for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                let line = line.unwrap_or_default().to_lowercase();
                if let Some(rest) = line.strip_prefix("get /models/") {
                    path = rest.split(' ').next().unwrap().to_owned();
                } else if let Some(range) = line.strip_prefix("range: bytes=") {
                    from = if ranges { range.trim_end_matches('-').parse().unwrap() } else { 0 };
                } else if line.is_empty() {
                    break;
                }
            }
            let head = |status: &str, bytes| {
                format!("HTTP/1.1 {status}\r\nContent-Length: {bytes}\r\nConnection: close\r\n\r\n")
            };
            let answer = match std::fs::read(folder.join(&path)) {
                _ if n % 29 >= 27 => head("503 Busy", 0).into_bytes(),
                Err(_) => head("404 Not Found", 0).into_bytes(),
                Ok(content) => {
                    let status = if from > 0 { "206 Partial Content" } else { "200 OK" };
                    let rest = &content[from..];
                    [head(status, rest.len()).as_bytes(), &rest[..rest.len().min(breaks)]].concat()
                }
            };
            let _ = stream.write_all(&answer);
        }
    });
    address
}

#[test]
fn over_http_with_broken_answers_and_error_storms() {
    let fleet = Fleet::new();
    for (breaks, ranges) in [(usize::MAX, true), (3_000, true), (usize::MAX, false)] {
        let car = Car::new(&fleet);
        let mut link =
            HttpLink::new(&serve(fleet.repository(), breaks, ranges), &LinkOptions::default())
                .unwrap();
        let (mut runs, mut bytes) = (0, 0);
        while car.live() == 0 {
            if let Err(e) = car.run(&mut link, T0 + 1) {
                assert!(matches!(e, UpdateError::Link { .. }), "{e:?}");
            }
            bytes += car.sync.status().unwrap().bytes_received;
            runs += 1;
            assert!(runs < 50, "never ends: {:?}", car.sync.status().unwrap());
        }
        println!("breaks {breaks}, ranges {ranges}: {runs} runs, {bytes} bytes");
    }
}

/// What a server without ranges sends again is received all the same.
#[test]
fn bytes_that_come_twice_are_counted() {
    let (listener, content) = (TcpListener::bind("127.0.0.1:0").unwrap(), [7; 10_000]);
    let address = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for (n, stream) in listener.incoming().enumerate() {
            let mut stream = stream.unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            lines.map_while(Result::ok).find(String::is_empty);
            let sent = if n == 0 { 3_000 } else { content.len() };
            let head = format!(
                "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
                content.len()
            );
            // A client that breaks off is not the server's concern.
            let _ = stream.write_all(&[head.as_bytes(), &content[..sent]].concat());
        }
    });
    let (mut link, clock) =
        (HttpLink::new(&address, &LinkOptions::default()).unwrap(), Ticks(AtomicU64::new(0), 0));
    let mut fetcher = Fetcher::new(&mut link, &clock, LinkLimits::default());
    assert_eq!(fetcher.get("object", 20_000).unwrap(), content);
    assert_eq!(fetcher.bytes(), 13_000);
}

/// A store that dies after so many writes.
struct Dies<'a>(&'a dyn Store, Cell<u32>);

impl Store for Dies<'_> {
    fn get(&self, path: &str) -> anyhow::Result<Option<Vec<u8>>> {
        self.0.get(path)
    }
    fn bytes(&self, path: &str) -> anyhow::Result<Option<u64>> {
        self.0.bytes(path)
    }
    fn put(&self, path: &str, content: Vec<u8>) -> anyhow::Result<()> {
        anyhow::ensure!(self.1.get() > 0, "killed");
        self.1.set(self.1.get() - 1);
        self.0.put(path, content)
    }

    fn put_new(&self, path: &str, content: Vec<u8>) -> anyhow::Result<()> {
        anyhow::ensure!(self.1.get() > 0, "killed");
        self.1.set(self.1.get() - 1);
        self.0.put_new(path, content)
    }
    fn replace(&self, path: &str, before: Option<&[u8]>, content: Vec<u8>) -> anyhow::Result<()> {
        anyhow::ensure!(self.1.get() > 0, "killed");
        self.1.set(self.1.get() - 1);
        self.0.replace(path, before, content)
    }
    fn list(&self) -> anyhow::Result<Vec<Object>> {
        self.0.list()
    }
    fn delete(&self, path: &str) -> anyhow::Result<()> {
        self.0.delete(path)
    }
}

#[test]
fn a_killed_publish_leaves_nothing_that_a_car_sees() {
    let start = Fleet::new();
    let change = Change {
        bundles: vec![VERSIONS.deltas[1].clone()],
        expires_s: FRESH_S,
        ..Change::default()
    };
    for writes in 0.. {
        let fleet = start.fork();
        let car = Car::at_first_release(&start);
        let store = Objects::directory(&fleet.repository()).unwrap();
        let done = publish(&Dies(&store, Cell::new(writes)), &fleet.keys(), &change, T0 + 10);
        let status = car.run(&mut fleet.link(), T0 + 11).unwrap();
        assert_eq!(
            (car.live(), status.newest),
            if done.is_ok() { (2, Some(2)) } else { (1, Some(1)) }
        );
        publish(&store, &fleet.keys(), &change, T0 + 12).unwrap();
        car.run(&mut fleet.link(), T0 + 13).unwrap();
        assert_eq!(car.live(), 2);
        if done.is_ok() {
            assert!(writes > 5, "only {writes} writes");
            break;
        }
    }
}

#[test]
fn a_byte_budget_stops_and_goes_on() {
    let fleet = Fleet::new();
    let car = Car::new(&fleet);
    // Less than anything that there is to fetch: a run brings a chunk all the same.
    let limits = LinkLimits { bytes_max: 1, ..LinkLimits::default() };
    let runs = runs_until_live(&fleet, &car, limits, |e| {
        matches!(e, UpdateError::Budget { bytes_max: 1 })
    });
    // The end of the hours in which it may fetch stops it as often.
    let limits = LinkLimits { open: Duration::ZERO, ..LinkLimits::default() };
    let car = Car::new(&fleet);
    assert_eq!(runs_until_live(&fleet, &car, limits, |e| matches!(e, UpdateError::Closed)), runs);
}

/// How many runs within `limits` a new car needs, each of which ends so.
fn runs_until_live(
    fleet: &Fleet,
    car: &Car,
    limits: LinkLimits,
    ends: fn(&UpdateError) -> bool,
) -> u32 {
    let (mut runs, clock) = (0, Ticks(AtomicU64::new(0), 0));
    while car.live() == 0 {
        let ran = car.run_timed(&mut fleet.link(), T0 + 1, &clock, limits);
        assert!(ran.as_ref().err().is_none_or(ends), "{ran:?}");
        runs += 1;
        assert!(runs < 100, "never ends");
    }
    assert!(runs > 1);
    runs
}

/// A car whose power goes at any moment has paid for every byte that came: the day's budget holds.
#[test]
fn bytes_of_a_run_that_dies_are_counted() {
    let fleet = Fleet::new();
    let now = std::time::Duration::from_secs(T0 + 1);
    let received = |car: &Car| {
        let budget = WearBudget { bytes_per_day_max: u64::MAX };
        u64::MAX - car.sync.status().unwrap().received.left(budget, now)
    };
    let whole = Car::new(&fleet);
    let calls = whole.disk.calls();
    let mut wire = Wire::new(fleet.link(), Faults::default());
    whole.run(&mut wire, T0 + 1).unwrap();
    assert_eq!(received(&whole), wire.bytes, "a run that ends has paid what came");
    let calls = whole.disk.calls() - calls;
    for cut in 0..calls {
        let (car, mut wire) = (Car::new(&fleet), Wire::new(fleet.link(), Faults::default()));
        car.disk.cut_after(cut);
        let _ = car.run(&mut wire, T0 + 1);
        car.disk.reboot(cut);
        assert!(received(&car) >= wire.bytes, "cut {cut}: {} of {}", received(&car), wire.bytes);
    }
}

#[test]
fn a_damaged_staged_bundle_is_fetched_again_and_a_car_without_root_says_so() {
    let fleet = Fleet::new();
    let car = Car::new(&fleet);
    let release = first_release();
    let staged = PathBuf::from("/sync/staged");
    let staging = Staging::open(&car.disk, &staged).unwrap();
    let clock = Ticks(AtomicU64::new(0), 0);
    let mut link = fleet.link();
    let path = staging
        .stage(&release, &mut Fetcher::new(&mut link, &clock, LinkLimits::default()), |_, _| Ok(()))
        .unwrap();
    car.disk.flip(&path, 1000 * 8);
    let error = car.run(&mut fleet.link(), T0 + 1).unwrap_err();
    assert!(matches!(error, UpdateError::NotUsed { .. }), "{error:?}");
    assert!(!staging.is_refused(&release));
    car.run(&mut fleet.link(), T0 + 2).unwrap();
    assert_eq!(car.live(), 1);

    let disk: Arc<dyn Disk> = disk::system();
    let empty = tempfile::tempdir().unwrap();
    let error = Trust::open(&disk, empty.path()).err().unwrap();
    assert!(matches!(error, UpdateError::NotProvisioned { .. }), "{error:?}");
}
