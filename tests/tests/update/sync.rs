//! Updates against a hostile repository, one test a threat, with real signatures. Every attack is
//! reported as its own error and leaves the live generation unchanged. The car recovers without
//! help when the attack ends.

use hatchback::bundle::BundleReader;
use hatchback::flash::{Flash, FlashError};
use hatchback::io::disk::{self, Disk};
use hatchback::io::paired_record::PairedRecord;
use hatchback::update::Updater;
use hatchback::update::error::UpdateError;
use hatchback::update::history::UpdateEvent;
use hatchback::update::link::{Fetcher, Link, LinkError, LinkLimits, Take};
use hatchback::update::rollback_floor::RollbackFloor;
use hatchback::update::staging::Staging;
use hatchback::update::status::{UpdateState, UpdateStatus};
use hatchback::update::trust::Trust;
use hatchback_link::DirectoryLink;
use hatchback_tests::fleet::{
    Car, FRESH_S, Fleet, ROOT_S, Recovery, T0, Ticks, VERSIONS, first_release,
};
use hatchback_tests::random::Random;
use hatchback_tests::wire::{Faults, Wire};
use hatchback_tools::repository::keys::rotate;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tough::schema::RoleType;

/// Returns the number of releases that were committed.
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
        "a poll without news requests no more"
    );
    assert_eq!(status.bytes_received, wire.bytes);
    // The files of releases on the path are removed, although the releases are still listed.
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
        let is_expected = |e: &UpdateError| matches!(e, UpdateError::ArbitrarySoftware { .. });
        car.survives(
            &mut bad.link(),
            T0 + 1,
            is_expected,
            Recovery { fleet: &fleet, now: T0 + 2, live: 1 },
        );
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
        let is_expected = |e: &UpdateError| {
            matches!(e, UpdateError::ArbitrarySoftware { .. } | UpdateError::EndlessData { .. })
        };
        car.survives(
            &mut bad.link(),
            T0 + 1,
            is_expected,
            Recovery { fleet: &fleet, now: T0 + 2, live: 1 },
        );
    }
}

#[test]
fn rollback() {
    let fleet = Fleet::new();
    let old = fleet.fork();
    fleet.delta(T0 + 10, 2);
    let car = Car::new(&fleet);
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    let is_expected =
        |e: &UpdateError| matches!(e, UpdateError::Rollback { trusted: 2, offered: 1, .. });
    car.survives(
        &mut old.link(),
        T0 + 12,
        is_expected,
        Recovery { fleet: &fleet, now: T0 + 13, live: 2 },
    );
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
            UpdateError::RollbackFloor { .. } => assert!(both_floors, "{torn:b}"),
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

/// Each role has a floor, which follows what the car accepted. A file below it is refused although
/// those of the other roles are above theirs, and is not stored.
#[test]
fn every_role_has_a_floor_of_its_own() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    assert_eq!(car.floor(), [1, 2, 2, 2]);

    let directory = &car.sync.directory;
    let floor = Trust::open(&car.sync.disk, directory).unwrap().floor();
    let raised = [
        ("root", RollbackFloor { root: 2, ..floor }),
        ("timestamp", RollbackFloor { timestamp: 3, ..floor }),
        ("snapshot", RollbackFloor { snapshot: 3, ..floor }),
        ("targets", RollbackFloor { targets: 3, ..floor }),
    ];
    for (writes, (role, raised)) in (100..).zip(raised) {
        let files = ["timestamp", "snapshot", "targets"].map(|role| format!("{role}.json"));
        files.iter().for_each(|name| drop(car.disk.remove_file(&directory.join(name))));
        raised.store(&car.disk, directory, writes).unwrap();
        let error = car.run(&mut fleet.link(), T0 + 12).unwrap_err();
        assert!(matches!(error, UpdateError::Replay { role: r, .. } if r == role), "{error:?}");
        let replayed = directory.join(format!("{role}.json"));
        assert!(role == "root" || car.disk.read(&replayed, u64::MAX).is_err(), "{role}");
    }
}

/// One copy of the rollback floor is enough, whether the other is torn or cannot be read.
#[test]
fn one_readable_copy_of_the_floor_is_enough() {
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
        car.disk.read(&copy, u64::MAX).expect("the copy was written again");
    }
}

/// A record of the serving process that the device does not give is not taken for a missing one:
/// the car would forget its probation. One copy is enough.
#[test]
fn an_unreadable_record_of_the_serving_process_is_not_replaced() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    car.disk.spoil(Path::new("/flash/update.a"));
    car.run(&mut fleet.link(), T0 + 12).unwrap();
    assert_eq!(car.live(), 2);

    let names = ["/flash/update.a", "/flash/update.b"].map(Path::new);
    names.iter().for_each(|name| car.disk.spoil(name));
    let unreadable = |e: UpdateError| {
        assert!(
            matches!(&e, UpdateError::Io { path, .. } if names.contains(&path.as_path())),
            "{e:?}"
        )
    };
    unreadable(car.run(&mut fleet.link(), T0 + 13).unwrap_err());
    unreadable(car.sync.begin_process(1, T0 + 13).unwrap_err());
    unreadable(car.sync.consent(T0 + 13).unwrap_err());
    names.iter().for_each(|name| {
        car.disk.read(name, u64::MAX).expect_err("the record was replaced");
    });
}

#[test]
fn freeze() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let frozen = fleet.fork();
    fleet.delta(T0 + FRESH_S, 2);
    let is_expected =
        |e: &UpdateError| matches!(e, UpdateError::Freeze { role, .. } if role == "timestamp");
    // The clock in the error differs at each poll, and is one step of the history.
    for now in T0 + FRESH_S + 1..T0 + FRESH_S + 9 {
        assert!(is_expected(&car.run(&mut frozen.link(), now).unwrap_err()));
    }
    let failed = |event: &&UpdateEvent| event.state == UpdateState::Failed;
    let history = car.sync.status().unwrap().history;
    assert_eq!(history.iter().filter(failed).count(), 1);
    assert_eq!(history.last().unwrap().at, T0 + FRESH_S + 8);
    car.survives(
        &mut frozen.link(),
        T0 + FRESH_S + 9,
        is_expected,
        Recovery { fleet: &fleet, now: T0 + FRESH_S + 10, live: 2 },
    );
}

#[test]
fn a_clock_of_1970_or_2090() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    let behind = |e: &UpdateError| matches!(e, UpdateError::ClockBehind { now: 0, floor: T0 });
    let ahead = |e: &UpdateError| matches!(e, UpdateError::Freeze { role, .. } if role == "root");
    car.survives(&mut fleet.link(), 0, behind, Recovery { fleet: &fleet, now: T0 + 11, live: 2 });
    fleet.delta(T0 + 20, 3);
    car.survives(
        &mut fleet.link(),
        3_786_912_000,
        ahead,
        Recovery { fleet: &fleet, now: T0 + 21, live: 3 },
    );
}

#[test]
fn mix_and_match() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let (bad, other) = (fleet.fork(), fleet.fork());
    bad.delta(T0 + 10, 2);
    other.delta(T0 + 11, 3);
    fleet.delta(T0 + 12, 2);
    // This file has a valid signature and the same version, but belongs to another timestamp.
    std::fs::copy(other.file("metadata/2.snapshot.json"), bad.file("metadata/2.snapshot.json"))
        .unwrap();
    let is_expected = |e: &UpdateError| matches!(e, UpdateError::MixAndMatch { .. });
    let error = car.run(&mut bad.link(), T0 + 13).unwrap_err();
    assert!(is_expected(&error), "{error:?}");
    // The bad mirror's timestamp was valid, so the next accepted version must be higher.
    assert_eq!(car.floor(), [1, 2, 1, 1]);
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
        let is_expected = |e: &UpdateError| match e {
            UpdateError::EndlessData { path: found, .. } => found.starts_with(path),
            _ => false,
        };
        car.survives(
            &mut wire,
            T0 + 1,
            is_expected,
            Recovery { fleet: &fleet, now: T0 + 2, live: 1 },
        );
        assert!(wire.bytes < 200_000, "the car took {} bytes", wire.bytes);
    }
    // Blanks alone are no page of a portal.
    let blanks: &[u8] = Box::leak(vec![b' '; 1 << 20].into());
    let faults = Faults { portal: Some(blanks), portal_at: "chunks/", ..Faults::default() };
    let error = Car::new(&fleet).run(&mut Wire::new(fleet.link(), faults), T0 + 1).unwrap_err();
    assert!(matches!(error, UpdateError::EndlessData { .. }), "{error}");
}

#[test]
fn a_release_without_room_is_not_fetched() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    car.disk.set_room(&car.sync.directory, Some(1 << 19));
    let mut link = Wire::new(fleet.link(), Faults::default());
    let error = car.run(&mut link, T0 + 11).unwrap_err();
    assert!(matches!(error, UpdateError::Flash(FlashError::Space { .. })), "{error:?}");
    assert!(!link.asked.iter().any(|path| path.starts_with("chunks/")), "{:?}", link.asked);
    car.disk.set_room(&car.sync.directory, None);
    car.run(&mut fleet.link(), T0 + 12).unwrap();
    assert_eq!(car.live(), 2);
}

/// A full file system cannot keep the record of a poll, which alone removes what fills it.
#[test]
fn a_full_sync_directory_gives_up_unfinished_bundles_then_its_offer() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    let staged = || car.disk.list(&car.sync.directory.join("staged")).unwrap();
    let limits = LinkLimits { bytes_max: 1, ..LinkLimits::default() };
    let part = |now| car.run_timed(&mut fleet.link(), now, &Ticks::still(), limits).unwrap_err();
    let whole = |now| drop(car.poll(&mut fleet.link(), now).unwrap());
    for is_offered in [false, true] {
        if is_offered {
            whole(T0 + 20)
        } else {
            drop(part(T0 + 11))
        }
        assert!(!staged().is_empty());
        car.disk.set_capacity(Some(car.disk.used()));
        let error = car.poll(&mut fleet.link(), T0 + 21).unwrap_err();
        assert!(matches!(error, UpdateError::Io { .. }), "{error:?}");
        assert!(staged().is_empty(), "{:?}", staged());
        assert_eq!(car.sync.fetch_status().error, Some(error.to_string()));

        let error = car.poll(&mut fleet.link(), T0 + 22).unwrap_err();
        assert!(matches!(error, UpdateError::Flash(FlashError::Space { .. })), "{error:?}");
        car.disk.set_capacity(None);
    }
    car.run(&mut fleet.link(), T0 + 23).unwrap();
    assert_eq!(car.live(), 2);
}

#[test]
fn slow_retrieval() {
    let fleet = Fleet::new();
    let car = Car::new(&fleet);
    let mut wire = Wire::new(fleet.link(), Faults { single_bytes: true, ..Faults::default() });
    let error = car.run_timed(&mut wire, T0 + 1, &Ticks::stepping(1), LinkLimits::default());
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
    let is_expected =
        |e: &UpdateError| matches!(e, UpdateError::WrongKey { role, .. } if role == "timestamp");
    car.survives(
        &mut stranger.link(),
        T0 + 11,
        is_expected,
        Recovery { fleet: &fleet, now: T0 + 12, live: 2 },
    );

    // A new root that only its own keys sign is refused too.
    rotate(&stranger.keys(), RoleType::Timestamp, T0 + ROOT_S).unwrap();
    stranger.delta(T0 + 13, 3);
    fleet.delta(T0 + 13, 3);
    let is_expected =
        |e: &UpdateError| matches!(e, UpdateError::WrongKey { role, .. } if role == "root");
    car.survives(
        &mut stranger.link(),
        T0 + 14,
        is_expected,
        Recovery { fleet: &fleet, now: T0 + 15, live: 3 },
    );
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
    let is_expected =
        |e: &UpdateError| matches!(e, UpdateError::Threshold { found: 1, threshold: 2, .. });
    car.survives(
        &mut bad.link(),
        T0 + 11,
        is_expected,
        Recovery { fleet: &fleet, now: T0 + 12, live: 2 },
    );
}

/// A link that lets another process try to sync the same car before each answer.
struct Contended<'a>(DirectoryLink, &'a Car);

impl Link for Contended<'_> {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        let refused = self.1.run(&mut self.0, T0 + 1);
        assert!(matches!(refused, Err(UpdateError::Busy { .. })), "{refused:?}");
        self.0.get(path, from, take)
    }
}

/// Uses the system's own locks, which the simulated disk does not have.
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
    let status = car.poll(&mut Contended(fleet.link(), &car), T0 + 1).unwrap();
    assert_eq!(status.state, UpdateState::Staged);
    car.apply(T0 + 1);
    assert_eq!(car.live(), 1);
}

#[test]
fn a_captive_portal() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    let other: [(&[u8], &str); 3] =
        [(b"", "an empty body"), (b"\x1f\x8b\x08", "gzip"), (b"\n <html>", "HTML")];
    for (answer, name) in other {
        let faults = Faults { portal: Some(answer), ..Faults::default() };
        let error = car.run(&mut Wire::new(fleet.link(), faults), T0 + 11).unwrap_err().to_string();
        let expected = format!("metadata/2.root.json: the server answered with {name}, not with");
        assert!(error.contains(&expected), "{error}");
    }
    // The page of a portal in place of a signed object is no fault of the release.
    let long: &[u8] =
        Box::leak([b"\xef\xbb\xbf<html>".to_vec(), vec![b' '; 1 << 20]].concat().into());
    for (portal_at, page) in [
        ("targets/", &b"<html>"[..]),
        ("targets/", long),
        ("chunks/", b"<html>"),
        ("chunks/", long),
        ("metadata/timestamp", long),
    ] {
        let faults = Faults { portal: Some(page), portal_at, ..Faults::default() };
        let error = car.run(&mut Wire::new(fleet.link(), faults), T0 + 11).unwrap_err();
        assert!(error.is_fault_of_car() && error.to_string().contains("HTML"), "{error}");
        assert!(error.to_string().starts_with(portal_at), "{error}");
    }
    let page: &[u8] = b"<!DOCTYPE html><title>Welcome to our Wi-Fi</title>";
    let mut wire = Wire::new(fleet.link(), Faults { portal: Some(page), ..Faults::default() });
    let is_expected = |e: &UpdateError| match e {
        UpdateError::LinkBroken { problem, .. } => problem.contains("answered with HTML"),
        _ => false,
    };
    car.survives(
        &mut wire,
        T0 + 11,
        is_expected,
        Recovery { fleet: &fleet, now: T0 + 12, live: 2 },
    );
}

#[test]
fn a_delta_for_another_parent_is_no_path() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let bad = fleet.fork();
    bad.delta(T0 + 10, 3);
    let is_expected = |e: &UpdateError| matches!(e, UpdateError::NoPath { newest: 3, .. });
    bad.publish(T0 + 11, &VERSIONS.snapshots[0]);
    let error = car.run(&mut bad.link(), T0 + 12).unwrap_err();
    assert!(is_expected(&error) && car.live() == 1, "{error:?}");
    bad.delta(T0 + 13, 2);
    car.run(&mut bad.link(), T0 + 14).unwrap();
    assert_eq!(car.live(), 3);
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

#[test]
fn a_damaged_staged_bundle_is_fetched_again_and_a_car_without_root_says_so() {
    let fleet = Fleet::new();
    let car = Car::new(&fleet);
    let release = first_release();
    let staged = PathBuf::from("/sync/staged");
    let staging = Staging::open(&car.disk, &staged).unwrap();
    let clock = Ticks::still();
    let mut link = fleet.link();
    let path = staging
        .stage(&release, &mut Fetcher::new(&mut link, &clock, LinkLimits::default()), |_, _| Ok(()))
        .unwrap();
    // The sync process finds damage from before its fetch, and the serving process finds later
    // damage.
    car.disk.flip(&path, 1000 * 8);
    car.poll(&mut link, T0 + 1).unwrap();
    assert!(staging.is_sound(&release));
    car.disk.flip(&path, 1000 * 8);
    car.apply(T0 + 1);
    let error = car.sync.status().unwrap().error.unwrap();
    assert!(error.contains("it will be fetched again"), "{error:?}");
    assert!(car.sync.status().unwrap().refused.is_empty());
    car.run(&mut fleet.link(), T0 + 2).unwrap();
    assert_eq!(car.live(), 1);

    let disk: Arc<dyn Disk> = disk::system();
    let empty = tempfile::tempdir().unwrap();
    let error = Trust::open(&disk, empty.path()).err().unwrap();
    assert!(matches!(error, UpdateError::NotProvisioned { .. }), "{error:?}");
}
