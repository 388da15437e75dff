//! Releases that change the schema reach a fleet by deltas, while callers of the old and of the new
//! model ask every car. No request is refused, and every score is that of the caller's inputs.

use crate::changing::{DIM, ROWS, pack, releases, spec, value};
use hatchback::flash::Flash;
use hatchback::request::worker::Worker;
use hatchback::update::error::UpdateError;
use hatchback::{Budget, Model, SystemClock};
use hatchback_server::decode_request;
use hatchback_tests::fleet::{Car, Fleet, T0};
use hatchback_tests::models::install;
use hatchback_tests::wire::{Faults, Wire};
use serde_json::{Value, json};
use std::sync::Arc;

fn input(name: &str, datatype: &str, value: Value, optional: bool) -> Value {
    let mut input = json!({"name": name, "datatype": datatype, "shape": [1, 1], "data": [value]});
    input["parameters"] = json!({"optional": optional});
    input
}

/// Asks the car `n` as a caller of release 1 and as one of release 2, and checks the scores.
fn ask(car: &Car, n: u64) {
    let model = Model::open(&car.sync.disk, &car.sync.flash, Budget::default()).unwrap();
    let is_new = model.generation().sequence > 1;
    let mut worker = Worker::new(Arc::new(model), Arc::new(SystemClock::default()));
    let [a, b, c] = [n % ROWS, (n + 1) % ROWS, (n + 2) % ROWS];
    let old = vec![input("a", "INT64", json!(a), false), input("b", "INT64", json!(b), false)];
    let new = vec![
        input("a", "INT64", json!(a), false),
        input("c", "INT64", json!(c), true),
        input("dense", "FP32", json!(3.0), true),
    ];
    let expected = match is_new {
        false => [value(0, a) + value(0, b), value(0, a)],
        true => [value(0, a) + 0.5, value(0, a) + value(1, c) + 3.0],
    };
    for (inputs, expected) in [old, new].into_iter().zip(expected) {
        let body = json!({ "inputs": inputs }).to_string();
        let schema = Arc::clone(worker.model().schema());
        let batch = decode_request(body.as_bytes(), Some(body.len()), &schema, 1).unwrap();
        assert_eq!(worker.score(&batch, None).unwrap().values, [expected; DIM], "car {n}: {body}");
    }
}

#[test]
fn a_new_feature_reaches_200_cars_by_delta_and_no_request_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let bundles = releases(folder.path());
    let fleet = Fleet::of(&bundles[0]);
    let cars: Vec<Car> = (0..200).map(|_| Car::at_first_release(&fleet)).collect();
    for (release, bundle) in bundles.iter().enumerate() {
        let now = T0 + 10 * release as u64 + 1;
        if release > 0 {
            fleet.publish(now, bundle);
        }
        for (n, car) in cars.iter().enumerate() {
            // Half of the fleet is late by a release.
            if release == 0 || n % 2 == 0 || release == 2 {
                car.run(&mut fleet.link(), now + 1).unwrap();
            }
            ask(car, n as u64);
            let live = Flash::open(&car.sync.disk, &car.sync.flash).unwrap();
            let reached = if n % 2 == 0 || release != 1 { release + 1 } else { 1 };
            assert_eq!(live.manifest().generation.sequence, reached as u64, "car {n}");
        }
    }
    // A rollback to the generation before brings its inputs back.
    let car = &cars[0];
    Flash::open(&car.sync.disk, &car.sync.flash).unwrap().rollback().unwrap();
    ask(car, 0);
}

#[test]
fn a_change_that_callers_would_notice_is_refused_before_a_chunk_is_fetched() {
    let folder = tempfile::tempdir().unwrap();
    let first = pack(&spec(1), None, folder.path()).unwrap();
    let desk = folder.path().join("desk");
    install(&desk, &first);
    let fleet = Fleet::of(&first);
    let car = Car::at_first_release(&fleet);

    let mut gone = spec(2);
    gone.features.remove(1);
    let why = "feature `b`: is gone; keep its entry with `retired = true`";
    let refused = pack(&gone, Some(&desk), folder.path()).unwrap_err();
    assert!(refused.contains(why), "{refused}");

    // `publish` compares with what is listed, and a revoked release is not.
    let bundle = pack(&gone, None, folder.path()).unwrap();
    let thief = Fleet { folder: tempfile::tempdir().unwrap() };
    hatchback_tests::versions::copy(fleet.folder.path(), thief.folder.path());
    thief.revoke(T0 + 5, 1);
    thief.publish(T0 + 6, &bundle);
    let mut link = Wire::new(thief.link(), Faults::default());
    let refused = car.run(&mut link, T0 + 7).unwrap_err();
    assert!(matches!(&refused, UpdateError::Callers { .. }), "{refused}");
    assert!(refused.to_string().contains(why), "{refused}");
    assert!(link.asked.iter().all(|path| !path.starts_with("chunks")), "{:?}", link.asked);
}
