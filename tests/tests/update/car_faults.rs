//! Faults of the car that last: locks that another process holds, blocks that the device cannot
//! read, a GPU that fails, a budget that no way fits, and power cuts at the worst moments. None of
//! them rejects a release, and none of them ends updates.

use hatchback::car::update_steps::{ModelUpdates, UpdateSteps};
use hatchback::limits::{ATTEMPTS_MAX, FAILED_STEPS_MAX, TRIALS_MAX};
use hatchback::model::budget::Budget;
use hatchback::request::serving::Serving;
use hatchback::update::host::{Policy, Watched};
use hatchback::update::install_status::InstallState;
use hatchback::update::status::UpdateState;
use hatchback_tests::fleet::{Car, Fleet, T0, Ticks, VERSIONS, release_of};
use hatchback_tests::wire::{Faults, Wire};
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::Objects;
use std::path::Path;
use std::sync::Arc;

const DAY_S: u64 = 24 * 3600;
/// The manifests of the first two generations.
const MANIFESTS: [&str; 2] = ["/flash/g000000000001/manifest", "/flash/g000000000002/manifest"];

/// Returns a car that serves its second release on probation, and the repository.
fn on_probation() -> (Fleet, Car) {
    let fleet = Fleet::new();
    let mut car = Car::at_first_release(&fleet);
    fleet.delta(T0 + 10, 2);
    car.policy = Policy { requests_min: 1_000, ..Policy::default() };
    car.watched = Some(Watched::default());
    let status = car.run(&mut fleet.link(), T0 + 11).unwrap();
    assert_eq!((status.state, car.live()), (UpdateState::Probation, 2));
    (fleet, car)
}

/// Returns the updates of `car`, whose serving process begins.
fn begin(car: &Car) -> ModelUpdates {
    let budget = Budget { cache_bytes_max: 16 << 10, batch_max: 8, slots: 4, ..Budget::default() };
    let (name, updater, policy) = ("car".to_owned(), car.sync.clone(), car.policy);
    let update = ModelUpdates { name, updater, budget, policy, root: None, boot: 0 };
    update.begin(T0 + 12);
    update
}

/// Starts the serving process of `car`, which takes one step a second.
fn start(car: &Car) -> UpdateSteps {
    UpdateSteps::new(begin(car), server(), Box::new(|_, _| 0))
}

fn server() -> Arc<Serving> {
    Arc::new(Serving::new(1 << 30, 16, Arc::new(Ticks::still())).stepped())
}

/// Takes as many steps as may fail before an attempt is abandoned, and some more.
fn step(steps: &mut UpdateSteps, now: u64) {
    (0..u64::from(FAILED_STEPS_MAX) + 5).for_each(
        |second| {
            while steps.step(now + second, &|_| {}) {}
        },
    );
}

/// Another process has the lock of the flash directory for minutes, while a rejected release is
/// live. The rollback waits for it.
#[test]
fn a_rollback_waits_for_a_lock() {
    let (_fleet, mut car) = on_probation();
    let lock = car.flash().lock().unwrap();
    car.watched = Some(Watched { requests: 9, faults: 9, ..Watched::default() });
    assert!(car.sync.advance(&car.host(), T0 + 12).unwrap());
    let mut steps = start(&car);
    for minute in 0..3 {
        step(&mut steps, T0 + 60 * minute);
        let install = car.sync.install_status().unwrap();
        assert_eq!((install.state, install.refused.len()), (InstallState::RollingBack, 1));
    }
    drop(lock);
    step(&mut steps, T0 + 200);
    assert_eq!((car.sync.install_status().unwrap().state, car.live()), (InstallState::Failed, 1));
}

/// An error that no step survives does not end a rollback.
#[test]
fn a_rollback_outlasts_any_error() {
    let (_fleet, mut car) = on_probation();
    car.watched = Some(Watched { requests: 9, faults: 9, ..Watched::default() });
    assert!(car.sync.advance(&car.host(), T0 + 12).unwrap());
    car.sync.abandon("no step succeeds", T0 + 13).unwrap();
    assert_eq!(car.sync.install_status().unwrap().state, InstallState::RollingBack);
    car.apply(T0 + 14);
    assert_eq!((car.live(), car.sync.status().unwrap().refused.len()), (1, 1));
}

/// A release that can never be judged does not stay live without a verdict.
#[test]
fn a_probation_that_no_step_ends_is_rolled_back() {
    let (fleet, mut car) = on_probation();
    car.sync.abandon("no step succeeds", T0 + 13).unwrap();
    car.apply(T0 + 14);
    let install = car.sync.install_status().unwrap();
    assert_eq!((car.live(), install.state), (1, InstallState::Failed));
    assert!(install.refused.is_empty(), "{install:?}");
    car.watched = None;
    car.run(&mut fleet.link(), T0 + 15).unwrap();
    assert_eq!(car.live(), 2, "it is tried again");
}

/// The device never reads the manifest of the live generation again. It is replaced by a snapshot
/// of the same number.
#[test]
fn a_manifest_that_the_device_refuses_is_lost() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    car.disk.spoil(Path::new(MANIFESTS[0]));
    let mut steps = start(&car);
    car.poll(&mut fleet.link(), T0 + 12).unwrap_err();
    step(&mut steps, T0 + 13);
    car.poll(&mut fleet.link(), T0 + 50).unwrap();
    step(&mut steps, T0 + 51);
    assert_eq!((car.live(), car.flash().record().rebuilds), (1, 1));
}

/// The live release is on probation when its manifest is lost or refused. The generation before is
/// whole, and is live again.
#[test]
fn a_damaged_release_on_probation_is_rolled_back() {
    for is_lost in [false, true] {
        let (_fleet, car) = on_probation();
        match is_lost {
            true => car.disk.lose(Path::new(MANIFESTS[1])),
            false => car.disk.spoil(Path::new(MANIFESTS[1])),
        }
        let mut steps = start(&car);
        step(&mut steps, T0 + 13);
        let install = car.sync.install_status().unwrap();
        assert_eq!((car.live(), install.state), (1, InstallState::Failed), "lost: {is_lost}");
        assert!(install.refused.is_empty(), "{install:?}");
    }
}

/// Both generations are damaged: a rollback would help nobody, and a snapshot replaces the live
/// one.
#[test]
fn a_damaged_release_is_not_rolled_back_to_a_damaged_one() {
    let (fleet, mut car) = on_probation();
    MANIFESTS.iter().for_each(|path| car.disk.lose(Path::new(path)));
    car.apply(T0 + 13);
    assert_eq!(car.sync.install_status().unwrap().state, InstallState::Failed);
    fleet.publish(T0 + 14, &VERSIONS.snapshots[2]);
    car.watched = None;
    car.run(&mut fleet.link(), T0 + 15).unwrap();
    assert_eq!(car.live(), 3);
}

/// The GPU fails on probation. The release is rolled back and tried again.
#[test]
fn a_gpu_that_fails_rejects_no_release() {
    let (fleet, mut car) = on_probation();
    car.watched = Some(Watched { requests: 9, car_faults: 1, ..Watched::default() });
    car.apply(T0 + 12);
    let status = car.sync.status().unwrap();
    assert_eq!((status.state, car.live(), status.refused.len()), (UpdateState::Failed, 1, 0));
    car.watched = None;
    car.run(&mut fleet.link(), T0 + 13).unwrap();
    assert_eq!(car.live(), 2);
}

/// The power is cut between the live record of a release and the record of its probation. If the
/// release then ends each start, that counts.
#[test]
fn a_power_cut_before_the_probation_is_recorded() {
    for is_lost in [false, true] {
        let (_fleet, car) = on_probation();
        // What is on disk then: the install before its end, or no record at all.
        let mut install = car.sync.install_status().unwrap();
        (install.state, install.trials) = (InstallState::Applying, 1);
        install.write(&car.disk, &car.sync.flash).unwrap();
        if is_lost {
            ["update.a", "update.b"].iter().for_each(|name| {
                car.disk.lose(&car.sync.flash.join(name));
            });
        }
        for start in 1..=6 {
            let before = car.sync.install_status().unwrap().state;
            assert_ne!(before, InstallState::RollingBack, "start {start}");
            car.sync.begin_process(1, T0 + 20 + start).unwrap();
        }
        car.apply(T0 + 30);
        let status = car.sync.status().unwrap();
        assert_eq!((car.live(), status.refused.len()), (1, 1), "{status:?}");
    }
}

/// The flash has no room for either way to the next release. The pauses grow over both ways, and
/// each byte is fetched once, also if the process starts again.
#[test]
fn two_ways_that_fail_are_tried_ever_more_rarely() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    let bundles = vec![VERSIONS.deltas[1].clone(), VERSIONS.snapshots[1].clone()];
    let change = Change { bundles, expires_s: 9 * DAY_S, ..Change::default() };
    let repository = Objects::directory(&fleet.repository()).unwrap();
    publish(&repository, &fleet.keys(), &change, T0 + 10).unwrap();

    // Each install needs a spare MiB.
    car.disk.set_room(&car.sync.flash, Some(900_000));
    let mut wire = Wire::new(fleet.link(), Faults::default());
    let mut attempts = [0; 2];
    for day in 0..2 {
        car.sync.begin_process(1, T0 + day * DAY_S).unwrap();
        for minute in 1..24 * 60 {
            let now = T0 + day * DAY_S + 60 * minute;
            car.poll(&mut wire, now).unwrap();
            if car.sync.is_paused(now).unwrap() {
                continue;
            }
            while car.sync.advance(&car.host(), now).unwrap() {}
            let install = car.sync.install_status().unwrap();
            let is_delta =
                install.release.unwrap().manifest == release_of(&VERSIONS.deltas[1]).manifest;
            attempts[usize::from(is_delta)] += u32::from(install.at == now);
        }
    }
    // Each way has its attempts of each start, and one of them goes on, each time after twice the
    // time: ten of a day.
    assert!(attempts.iter().all(|n| *n >= 2 * ATTEMPTS_MAX), "{attempts:?}");
    assert!(attempts.iter().sum::<u32>() <= 2 * (ATTEMPTS_MAX + 12), "{attempts:?}");
    let objects = wire.asked.iter().filter(|path| !path.starts_with("metadata/")).count();
    let ways = [&VERSIONS.deltas[1], &VERSIONS.snapshots[1]];
    assert_eq!(objects, ways.iter().map(|way| fleet.chunks(way).len() + 1).sum::<usize>());
}

/// The load of a committed release ends each start of the process. After some starts updates run
/// without the model, and the next release is served.
#[test]
fn a_release_that_ends_every_load_gives_way() {
    let fleet = Fleet::new();
    let car = Car::at_first_release(&fleet);
    for _ in 0..20 {
        begin(&car).record_loaded();
    }
    for start in 0..TRIALS_MAX {
        assert!(!begin(&car).awaits_release(), "start {start}");
    }
    let (update, serving) = (begin(&car), server());
    assert!(update.awaits_release());
    let mut steps = UpdateSteps::new(update, Arc::clone(&serving), Box::new(|_, _| 0));
    step(&mut steps, T0 + 13);
    assert!(serving.names().is_empty());

    fleet.delta(T0 + 50, 2);
    car.poll(&mut fleet.link(), T0 + 51).unwrap();
    step(&mut steps, T0 + 52);
    assert_eq!((car.live(), serving.model("car").unwrap().generation().sequence), (2, 2));
    assert!(!begin(&car).awaits_release());
}
