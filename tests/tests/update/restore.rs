//! `publish --restore`: an earlier release comes back under the next sequence. Every car reaches
//! it, whatever it serves, and no row is uploaded.

use hatchback::flash::Flash;
use hatchback::update::status::UpdateState;
use hatchback_tests::flash_check::has_rows_of;
use hatchback_tests::fleet::{Car, FRESH_S, Fleet, T0, VERSIONS};
use hatchback_tests::wire::{Faults, Wire};
use hatchback_tools::repository::prune::{Retention, prune};
use hatchback_tools::repository::publish::Change;
use hatchback_tools::repository::store::{Objects, Store};
use std::collections::BTreeSet;

/// Lets the car poll, and checks that it serves `sequence` with the rows of `generation`.
fn reaches(fleet: &Fleet, car: &Car, now: u64, sequence: u64, generation: usize) {
    let status = car.run(&mut fleet.link(), now).unwrap();
    assert_eq!((status.state, status.error), (UpdateState::Committed, None));
    let flash = car.flash();
    assert_eq!(flash.manifest().generation.sequence, sequence);
    has_rows_of(&flash, &VERSIONS, generation, "the car");
}

/// Returns a fleet at release 4, and cars at 1, 2, 3, 4 and at none. Release 1 is a snapshot, and
/// each later one a delta.
fn at_four() -> (Fleet, Vec<Car>) {
    let fleet = Fleet::new();
    let mut cars = vec![Car::at_first_release(&fleet)];
    for release in 2..=4 {
        let now = T0 + 10 * release as u64;
        fleet.delta(now, release);
        cars.push(Car::new(&fleet));
        cars[release - 1].run(&mut fleet.link(), now + 1).unwrap();
    }
    cars.push(Car::new(&fleet));
    (fleet, cars)
}

fn objects(fleet: &Fleet) -> BTreeSet<String> {
    let store = Objects::directory(&fleet.repository()).unwrap();
    store.list().unwrap().into_iter().map(|object| object.path).collect()
}

fn chunks_asked(asked: &[String]) -> usize {
    asked.iter().filter(|path| path.starts_with("chunks/")).count()
}

#[test]
fn every_car_returns_to_a_restored_release_and_no_row_is_uploaded() {
    let (fleet, cars) = at_four();
    let before = objects(&fleet);
    let done = fleet.restore(T0 + 50, "2");
    assert_eq!(
        done.added,
        ["versions/000000000005-snapshot", "versions/000000000005-from-000000000002"]
    );
    // A page without rows for each table: the delta of the cars that are at release 2.
    assert_eq!(done.chunks, 2);
    let new: Vec<String> = objects(&fleet).difference(&before).cloned().collect();
    let count = |folder: &str| new.iter().filter(|path| path.starts_with(folder)).count();
    assert_eq!([count("chunks/"), count("targets/"), count("metadata/")], [2, 2, 2], "{new:?}");

    for car in &cars {
        let was = Flash::open(&car.sync.disk, &car.sync.flash).map(|f| f.record().clone());
        let mut link = Wire::new(fleet.link(), Faults::default());
        car.run(&mut link, T0 + 51).unwrap();
        reaches(&fleet, car, T0 + 52, 5, 2);
        let Ok(was) = was.map(|record| record.live) else { continue };
        if was.generation.sequence == 2 {
            // The network and two pages; the segments on flash stay.
            assert_eq!(chunks_asked(&link.asked), 3, "{:?}", link.asked);
            assert_eq!(car.flash().record().live.tables, was.tables);
        }
        if was.generation.sequence > 2 {
            // The network and two hot lists: the segments of 1 and 2 are on flash.
            assert_eq!(chunks_asked(&link.asked), 3, "{:?}", link.asked);
        }
        // What was served before is still there for a rollback; a car at release 1 came over 2.
        let previous = car.flash().record().previous.clone().unwrap().generation.sequence;
        assert_eq!(previous, was.generation.sequence.max(2));
    }
    let restored = cars[3].flash().manifest().clone().restored.unwrap();
    assert_eq!(restored.sequence, 2);
    assert_eq!(restored.tables[0].iter().map(|l| l.sequence).collect::<Vec<_>>(), [1, 2]);

    // A delta follows the restored release, whichever of its forms a car took.
    fleet.publish(T0 + 60, &VERSIONS.over(&cars[3].flash(), 6, 4));
    cars.iter().for_each(|car| reaches(&fleet, car, T0 + 61, 6, 4));
    // A restored release is restored again, with a delta after it.
    fleet.restore(T0 + 70, "versions/5");
    let fresh = Car::new(&fleet);
    cars.iter().chain([&fresh]).for_each(|car| reaches(&fleet, car, T0 + 71, 7, 2));
    fleet.restore(T0 + 80, "6");
    cars.iter().chain([&fresh]).for_each(|car| reaches(&fleet, car, T0 + 81, 8, 4));
}

#[test]
fn a_car_rolls_back_from_a_restored_release() {
    let (fleet, cars) = at_four();
    fleet.restore(T0 + 50, "2");
    reaches(&fleet, &cars[3], T0 + 51, 5, 2);
    let back = cars[3].flash().rollback().unwrap();
    assert_eq!(back.manifest().generation.sequence, 4);
    has_rows_of(&back, &VERSIONS, 4, "after the rollback");
}

#[test]
fn restoring_again_raises_the_share_of_the_same_release() {
    let (fleet, cars) = at_four();
    let share = |share| Change { restore: Some("1".to_owned()), share, ..Change::default() };
    let first = fleet.try_change(T0 + 50, share(1)).unwrap();
    let again = fleet.try_change(T0 + 60, share(100)).unwrap();
    assert_eq!(first.added, again.added);
    assert_eq!(again.chunks, 0, "everything is there already");
    reaches(&fleet, &cars[3], T0 + 61, 5, 1);

    // The restored release was a mistake: the next one restores the same content anew.
    let revoke = vec!["5".to_owned()];
    let next = fleet.try_change(T0 + 70, Change { revoke, ..share(100) }).unwrap();
    assert_eq!(next.added[0], "versions/000000000006-snapshot");
    reaches(&fleet, &cars[3], T0 + 81, 6, 1);
}

#[test]
fn what_cannot_be_restored_is_refused_by_name_and_nothing_is_written() {
    let (fleet, _) = at_four();
    fleet.revoke(T0 + 50, 2);
    let before = objects(&fleet);
    let refused = |restore: &str, revoke: &[&str]| {
        let revoke = revoke.iter().map(|word| (*word).to_owned()).collect();
        let change = Change { restore: Some(restore.to_owned()), revoke, ..Change::default() };
        let refused = fleet.try_change(T0 + 60, change).unwrap_err();
        assert_eq!(objects(&fleet), before);
        refused
    };
    for (release, revoke, why) in [
        ("4", &[][..], "--restore 4: versions/4 is the newest release already"),
        ("2", &[], "--restore 2: the repository lists no such release"),
        ("9", &[], "--restore 9: the repository lists no such release"),
        ("other/1", &[], "--restore other/1: the repository lists no such release"),
        ("1", &["1"], "--restore 1: a release that is revoked is not restored"),
        ("3", &[], "--restore 3: versions/3 is a delta, and the snapshot or the deltas before it"),
    ] {
        let refused = refused(release, revoke);
        assert!(refused.starts_with(why), "{refused}");
    }

    std::fs::remove_file(&fleet.chunks(&VERSIONS.snapshots[0])[0]).unwrap();
    let change = Change { restore: Some("1".to_owned()), ..Change::default() };
    let refused = fleet.try_change(T0 + 60, change).unwrap_err();
    assert!(refused.contains("is missing in the repository"), "{refused}");
}

#[test]
fn a_restored_release_outlives_the_releases_that_it_came_from() {
    let (fleet, cars) = at_four();
    fleet.restore(T0 + 50, "3");
    let store = Objects::directory(&fleet.repository()).unwrap();
    let window = Retention { releases: Some(1), grace_s: 0, expires_s: FRESH_S };
    prune(&store, &fleet.keys(), &window, T0 + 60).unwrap();
    let done = prune(&store, &fleet.keys(), &window, T0 + 70).unwrap();
    assert!(done.removed > 0, "{done:?}");
    cars.iter().for_each(|car| reaches(&fleet, car, T0 + 71, 5, 3));
}

#[test]
fn each_variant_is_restored_as_itself() {
    let fleet = Fleet::new();
    let new = fleet.needing(&VERSIONS.snapshots[1], &["Abs"]);
    fleet.publish_all(T0 + 10, &[&new, &VERSIONS.snapshots[1]]);
    let newer = fleet.needing(&VERSIONS.snapshots[2], &["Abs"]);
    fleet.publish_all(T0 + 20, &[&newer, &VERSIONS.snapshots[2]]);
    let cars = [Car::lacking(&fleet, "1", &["Abs"]), Car::lacking(&fleet, "2", &[])];
    cars.iter().for_each(|car| reaches(&fleet, car, T0 + 21, 3, 3));

    let done = fleet.restore(T0 + 30, "2");
    assert_eq!(done.added.len(), 4, "{done:?}");
    let networks = cars.each_ref().map(|car| {
        reaches(&fleet, car, T0 + 31, 4, 2);
        car.flash().dense().unwrap()
    });
    assert!(networks[0] != networks[1], "each car has the network of its variant");
}
