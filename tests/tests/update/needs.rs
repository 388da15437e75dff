//! Programs of several versions in one fleet: what a release needs, several bundles for one
//! generation, and another program on the same directories.

use hatchback::flash::{Flash, Rebuild};
use hatchback::update::host::Policy;
use hatchback::update::release::parse_name;
use hatchback::update::status::UpdateState;
use hatchback_tests::fleet::{Car, FRESH_S, Fleet, T0, VERSIONS, release_of};
use hatchback_tools::repository::prune::{Retention, prune};
use hatchback_tools::repository::publish::{Change, Published, publish};
use hatchback_tools::repository::store::Objects;
use std::path::Path;

fn publish_to(fleet: &Fleet, now: u64, bundles: &[&Path]) -> Result<Published, String> {
    let bundles = bundles.iter().map(|bundle| bundle.to_path_buf()).collect();
    let change = Change { bundles, expires_s: FRESH_S, ..Change::default() };
    let store = Objects::directory(&fleet.repository()).unwrap();
    publish(&store, &fleet.keys(), &change, now).map_err(|e| format!("{e:#}"))
}

/// Returns the variant of the live release of `car`, among the bundles `of` in their order.
fn live_of(car: &Car, of: &[&Path]) -> Option<usize> {
    let live = car.flash().record().live.manifest;
    of.iter().position(|bundle| release_of(bundle).manifest == live)
}

#[test]
fn a_release_that_the_program_cannot_read_is_skipped_before_its_fetch() {
    let fleet = Fleet::new();
    let mut car = Car::lacking(&fleet, "0.0.4", &["Abs"]);
    car.run(&mut fleet.link(), T0 + 1).unwrap();
    fleet.publish(T0 + 10, &fleet.needing(&VERSIONS.deltas[1], &["Abs"]));

    let status = car.run(&mut fleet.link(), T0 + 11).unwrap();
    let said = "release versions@2 needs operator Abs, which version 0.0.4 lacks; update the \
                program";
    assert_eq!(status.skipped.as_deref(), Some(said));
    assert_eq!(
        (status.state, status.newest, status.error),
        (UpdateState::Committed, Some(1), None)
    );
    assert!(status.bytes_received < 10_000, "{} bytes of metadata", status.bytes_received);
    assert!(status.refused.is_empty() && !status.withdrawn, "it is not marked");
    assert_eq!(car.live(), 1);

    car.set_program("0.0.5", &[]);
    let status = car.run(&mut fleet.link(), T0 + 12).unwrap();
    assert_eq!((car.live(), status.skipped), (2, None));
}

/// The sync process of another version offers what the daemon cannot read.
#[test]
fn the_daemon_compares_the_needs_itself() {
    let fleet = Fleet::new();
    let mut car = Car::at_first_release(&fleet);
    car.policy = Policy { consent: true, ..car.policy };
    fleet.publish(T0 + 10, &fleet.needing(&VERSIONS.deltas[1], &["Abs"]));
    assert_eq!(car.run(&mut fleet.link(), T0 + 11).unwrap().state, UpdateState::AwaitConsent);
    car.set_program("0.0.4", &["Abs"]);
    car.sync.consent(T0 + 12).unwrap();
    car.apply(T0 + 13);
    let install = car.sync.install_status().unwrap();
    let error = install.error.unwrap();
    assert!(error.contains("version 0.0.4 lacks operator Abs"), "{error}");
    assert!(install.refused.is_empty() && car.live() == 1);
}

#[test]
fn each_car_takes_the_first_variant_that_it_can_read() {
    let fleet = Fleet::new();
    let [old, new] = [&["Abs"][..], &[]].map(|lacks| {
        let car = Car::lacking(&fleet, if lacks.is_empty() { "2" } else { "1" }, lacks);
        car.run(&mut fleet.link(), T0 + 1).unwrap();
        car
    });
    // The variant for new programs begins with a snapshot; the old one goes on with a delta.
    let second = fleet.needing(&VERSIONS.snapshots[1], &["Abs"]);
    let done = publish_to(&fleet, T0 + 10, &[&second, &VERSIONS.deltas[1]]).unwrap();
    let variants: Vec<u8> = done.added.iter().map(|name| parse_name(name).unwrap().2).collect();
    assert_eq!(variants, [1, 0], "a variant keeps its number");
    for (car, variant) in [(&new, 0), (&old, 1)] {
        car.run(&mut fleet.link(), T0 + 11).unwrap();
        assert_eq!((car.live(), live_of(car, &[&second, &VERSIONS.deltas[1]])), (2, Some(variant)));
    }

    // Each follows the delta of its own variant, also when its generation is no longer listed.
    let third = fleet.needing(&VERSIONS.deltas[2], &["Abs"]);
    let both = [third.as_path(), &VERSIONS.deltas[2]];
    publish_to(&fleet, T0 + 20, &both).unwrap();
    fleet.revoke(T0 + 21, 2);
    for (car, variant) in [(&new, 0), (&old, 1)] {
        car.run(&mut fleet.link(), T0 + 22).unwrap();
        assert_eq!((car.live(), live_of(car, &both)), (3, Some(variant)));
    }

    // After its upgrade the old car needs a snapshot to switch, and takes it with the next release.
    let mut upgraded = old;
    upgraded.set_program("2", &[]);
    let fourth = fleet.needing(&VERSIONS.snapshots[3], &["Abs"]);
    let both = [fourth.as_path(), &VERSIONS.deltas[3]];
    publish_to(&fleet, T0 + 30, &both).unwrap();
    upgraded.run(&mut fleet.link(), T0 + 31).unwrap();
    assert_eq!((upgraded.live(), live_of(&upgraded, &both)), (4, Some(0)));
}

#[test]
fn the_publisher_refuses_variants_that_no_car_could_tell_apart() {
    let fleet = Fleet::new();
    let second = fleet.needing(&VERSIONS.deltas[1], &["Abs"]);
    let twice = publish_to(&fleet, T0 + 10, &[&VERSIONS.snapshots[1], &VERSIONS.snapshots[1]]);
    assert!(twice.unwrap_err().contains("the same needs"));
    let first = publish_to(&fleet, T0 + 10, &[&VERSIONS.deltas[1], &second]);
    assert!(first.unwrap_err().contains("never published"), "a variant begins with a delta");

    // What was published keeps its name, whatever its place, and a later one needs all together.
    fleet.publish(T0 + 10, &VERSIONS.deltas[1]);
    let snapshot = fleet.needing(&VERSIONS.snapshots[1], &["Abs"]);
    let added = publish_to(&fleet, T0 + 20, &[&snapshot, &VERSIONS.deltas[1]]).unwrap().added;
    assert_eq!(
        added,
        ["versions/000000000002-snapshot.1", "versions/000000000002-from-000000000001"]
    );
    let added = publish_to(&fleet, T0 + 30, &[&VERSIONS.deltas[1], &snapshot]).unwrap().added;
    assert_eq!(added[1], "versions/000000000002-snapshot.1");
}

#[test]
fn a_prune_keeps_the_newest_snapshot_of_every_variant() {
    let fleet = Fleet::new();
    let car = Car::lacking(&fleet, "1", &["Abs"]);
    for sequence in 1..4 {
        let snapshot = fleet.needing(&VERSIONS.snapshots[sequence], &["Abs"]);
        let now = T0 + 10 * sequence as u64;
        match sequence {
            3 => fleet.publish(now, &snapshot),
            _ => fleet.publish_all(now, &[&snapshot, &VERSIONS.deltas[sequence]]),
        }
    }
    let store = Objects::directory(&fleet.repository()).unwrap();
    let retention = Retention { releases: Some(1), grace_s: 0, expires_s: FRESH_S };
    let done = prune(&store, &fleet.keys(), &retention, T0 + 40).unwrap();
    let unlisted = ["versions/000000000002-snapshot.1", "versions/000000000003-snapshot.1"];
    assert_eq!(done.unlisted, unlisted, "the old variant has one snapshot, of generation 1");
    car.run(&mut fleet.link(), T0 + 41).unwrap();
    assert_eq!(car.live(), 3);
}

/// An older program finds a live generation that it cannot open. It takes the same generation in
/// the variant that it reads, and never an older one.
#[test]
fn after_a_downgrade_the_car_takes_the_variant_that_it_reads() {
    let fleet = Fleet::new();
    fleet.publish_all(T0 + 10, &[&VERSIONS.snapshots[1], &VERSIONS.deltas[1]]);
    let car = Car::at_first_release(&fleet);
    assert_eq!(car.live(), 2);
    // What a later program would have installed: this engine does not load it.
    let mut parts = hatchback_tests::rewrite::Parts::read(&VERSIONS.snapshots[1]);
    parts.set_content(parts.manifest.dense, b"an operator of the future");
    let path = Path::new("/bundle");
    car.disk.put(path, parts.bytes());
    let mut bundle = hatchback::BundleReader::open_on(&car.disk, path).unwrap();
    let flash = &car.sync.flash;
    let rebuild = Rebuild { least: 2, servable: true };
    let again =
        Flash::prepare_rebuild(&car.sync.disk, flash, &mut bundle, rebuild, |_| ()).unwrap();
    again.commit().unwrap();

    let repair = hatchback::update::install_status::Repair::AnySnapshot;
    car.sync.require_repair(repair).unwrap();
    car.run(&mut fleet.link(), T0 + 21).unwrap();
    assert_eq!((car.live(), live_of(&car, &[&VERSIONS.snapshots[1]])), (2, Some(0)));
    assert!(car.sync.status().unwrap().refused.is_empty());
}

/// 200 cars of three versions: each is at the best release that it can read, and is there again
/// after its upgrade or downgrade.
#[test]
fn two_hundred_cars_of_three_versions_are_each_at_the_best_release() {
    const LACKS: [&[&str]; 3] = [&["Abs", "Neg"], &["Neg"], &[]];
    let fleet = Fleet::new();
    let version = |v: usize| format!("0.{v}.0");
    let mut cars: Vec<Car> =
        (0..200).map(|n| Car::lacking(&fleet, &version(n % 3), LACKS[n % 3])).collect();
    let poll = |cars: &[Car], now: u64, best: &dyn Fn(usize) -> usize| {
        for (n, car) in cars.iter().enumerate() {
            car.run(&mut fleet.link(), now).unwrap();
            assert_eq!(car.live(), best(n), "car {n}");
            assert!(car.sync.status().unwrap().refused.is_empty());
        }
    };
    poll(&cars, T0 + 1, &|_| 1);
    let second = fleet.needing(&VERSIONS.snapshots[1], &["Abs", "Neg"]);
    fleet.publish_all(T0 + 10, &[&second, &VERSIONS.deltas[1]]);
    poll(&cars, T0 + 11, &|_| 2);
    let third =
        [&["Abs", "Neg"][..], &["Abs"]].map(|ops| fleet.needing(&VERSIONS.snapshots[2], ops));
    fleet.publish_all(T0 + 20, &[&third[0], &third[1]]);
    poll(&cars, T0 + 21, &|n| if n % 3 == 0 { 2 } else { 3 });
    let fourth = [&VERSIONS.snapshots[3], &VERSIONS.deltas[3]]
        .map(|bundle| fleet.needing(bundle, &["Abs", "Neg"]));
    fleet.publish_all(T0 + 30, &[&fourth[0], &fourth[1]]);
    poll(&cars, T0 + 31, &|n| [2, 3, 4][n % 3]);

    // Every car gets the next version, and the newest ones the oldest.
    cars.iter_mut().enumerate().for_each(|(n, car)| {
        let next = (n + 1) % 3;
        car.set_program(&version(next), LACKS[next]);
    });
    poll(&cars, T0 + 41, &|n| [3, 4, 4][n % 3]);
}
