//! Releases that change the schema reach a fleet by deltas, while callers of the old and of the new
//! model ask every car. No request is refused, and every score is that of the caller's inputs.

use crate::changing::{DIM, ROWS, pack, releases, spec, value};
use hatchback::bundle::manifest::Manifest;
use hatchback::flash::Flash;
use hatchback::request::worker::Worker;
use hatchback::update::error::UpdateError;
use hatchback::update::status::UpdateState;
use hatchback::{Budget, Model, SystemClock};
use hatchback_server::decode_request;
use hatchback_tests::fleet::{Car, Fleet, T0};
use hatchback_tests::models::install;
use hatchback_tests::wire::{Faults, Wire};
use hatchback_tools::pack::spec::{DenseSpec, InputSpec, ModelSpec, ProbeSpec};
use hatchback_tools::repository::publish::Change;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;

fn input(name: &str, datatype: &str, value: Value, optional: bool) -> Value {
    let mut input = json!({"name": name, "datatype": datatype, "shape": [1, 1], "data": [value]});
    input["parameters"] = json!({"optional": optional});
    input
}

/// Asks the car `n` as a caller of release 1 and as one of release 2, and checks the scores.
fn ask(car: &Car, n: u64) {
    let [a, b, c] = [n % ROWS, (n + 1) % ROWS, (n + 2) % ROWS];
    let (is_new, scores) = scores(car, [a, b, c]);
    let expected = match is_new {
        false => [value(0, a) + value(0, b), value(0, a)],
        true => [value(0, a) + 0.5, value(0, a) + value(1, c) + 3.0],
    };
    assert_eq!(scores, expected.map(|score| vec![score; DIM]), "car {n}");
}

/// Returns whether a car has a release after the first, and the scores of a caller of release 1
/// and of one of release 2 with these keys.
fn scores(car: &Car, [a, b, c]: [u64; 3]) -> (bool, [Vec<f32>; 2]) {
    let flash = Flash::open(&car.sync.disk, &car.sync.flash).unwrap();
    let model = Model::from_flash(&flash, Budget::default()).unwrap();
    let is_new = model.generation().sequence > 1;
    let mut worker = Worker::new(Arc::new(model), Arc::new(SystemClock::default()));
    let old = vec![input("a", "INT64", json!(a), false), input("b", "INT64", json!(b), false)];
    let new = vec![
        input("a", "INT64", json!(a), false),
        input("c", "INT64", json!(c), true),
        input("dense", "FP32", json!(3.0), true),
    ];
    let scores = [old, new].map(|inputs| {
        let body = json!({ "inputs": inputs }).to_string();
        let schema = Arc::clone(worker.model().schema());
        let batch = decode_request(body.as_bytes(), Some(body.len()), &schema, 1).unwrap();
        worker.score(&batch, None).unwrap().values.to_vec()
    });
    (is_new, scores)
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
            let live = car.flash();
            let reached = if n % 2 == 0 || release != 1 { release + 1 } else { 1 };
            assert_eq!(live.manifest().generation.sequence, reached as u64, "car {n}");
        }
    }
    // A rollback to the generation before brings its inputs back.
    let car = &cars[0];
    car.flash().rollback().unwrap();
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

    // `publish` compares with the manifest of release 1, which a thief has removed.
    let bundle = pack(&gone, None, folder.path()).unwrap();
    let thief = Fleet { folder: tempfile::tempdir().unwrap() };
    hatchback_tests::versions::copy(fleet.folder.path(), thief.folder.path());
    std::fs::remove_dir_all(thief.file("targets")).unwrap();
    let bundles = vec![bundle.clone()];
    let done = thief.try_change(T0 + 6, Change { bundles, ..Change::default() }).unwrap();
    assert_eq!(done.not_compared, done.added);
    let mut link = Wire::new(thief.link(), Faults::default());
    let refused = car.run(&mut link, T0 + 7).unwrap_err();
    assert!(matches!(&refused, UpdateError::Callers { .. }), "{refused}");
    assert!(refused.to_string().contains(why), "{refused}");
    assert!(link.asked.iter().all(|path| !path.starts_with("chunks")), "{:?}", link.asked);
}

/// Returns release 2 with everything of release 1.
fn grown() -> ModelSpec {
    let mut grown = spec(2);
    grown.features[1].retired = false;
    grown.network.inputs.push(InputSpec::vectors("b", vec!["b".to_owned()]));
    grown
}

/// Release 2 adds a table, a feature and a dense feature, and is then taken back.
#[test]
fn a_release_before_a_new_feature_is_restored_and_callers_of_both_are_served() {
    let folder = tempfile::tempdir().unwrap();
    // The probe set of release 1 has no place for what release 2 adds.
    let sample = json!({"sparse": {"a": [3], "b": [4]}, "score": value(0, 3) + value(0, 4)});
    std::fs::write(folder.path().join("probe.jsonl"), format!("{sample}\n")).unwrap();
    let probe = Some(ProbeSpec { samples: "probe.jsonl".into() });
    let first = pack(&ModelSpec { probe, ..spec(1) }, None, folder.path()).unwrap();
    let desk = folder.path().join("desk");
    install(&desk, &first);
    let second = pack(&grown(), Some(&desk), folder.path()).unwrap();

    for is_revoked in [false, true] {
        let fleet = Fleet::of(&first);
        let cars = [Car::at_first_release(&fleet), Car::at_first_release(&fleet), Car::new(&fleet)];
        fleet.publish(T0 + 10, &second);
        cars[1].run(&mut fleet.link(), T0 + 11).unwrap();
        assert_eq!(scores(&cars[1], [1, 2, 3]).1[1][0], value(0, 1) + value(1, 3) + 3.0);

        let revoke = if is_revoked { vec!["2".to_owned()] } else { vec![] };
        let restore = Some("1".to_owned());
        let done = fleet.try_change(T0 + 12, Change { revoke, restore, ..Change::default() });
        assert_eq!(done.unwrap().added.len(), 2);
        for (n, car) in cars.iter().enumerate() {
            let status = car.run(&mut fleet.link(), T0 + 13).unwrap();
            assert_eq!((status.state, status.error), (UpdateState::Committed, None), "car {n}");
            let live = car.flash();
            let Manifest { generation, schema, .. } = live.manifest();
            assert_eq!((generation.sequence, schema.tables.len()), (3, 1), "car {n}");
            let retired = schema.features.iter().map(|f| (f.name.as_str(), f.retired));
            assert_eq!(retired.collect::<Vec<_>>(), [("a", false), ("b", false), ("c", true)]);
            assert!(schema.dense_features.iter().all(|dense| dense.retired), "car {n}");
            let samples = live.probe().unwrap();
            assert_eq!((samples.len(), samples[0].sparse.len()), (1, 3), "car {n}");
            let expected = [value(0, 1) + value(0, 2), value(0, 1)].map(|score| vec![score; DIM]);
            assert_eq!(scores(car, [1, 2, 3]).1, expected, "car {n}");
        }
        // The same again is the same release.
        let again = Change { restore: Some("1".to_owned()), ..Change::default() };
        assert_eq!(fleet.try_change(T0 + 14, again).unwrap().chunks, 0);
    }

    // Release 2 retires `b`: nothing was checked of what callers have sent for it since.
    let retired = pack(&spec(2), Some(&desk), folder.path()).unwrap();
    let fleet = Fleet::of(&first);
    fleet.publish(T0 + 10, &retired);
    let restore = Change { restore: Some("1".to_owned()), ..Change::default() };
    let refused = fleet.try_change(T0 + 12, restore).unwrap_err();
    assert!(refused.contains("changing@2 cannot use it: feature `b`: was retired"), "{refused}");
}

/// A fill changes as weights do. A request in flight may have the key of null already.
#[test]
fn a_delta_may_change_the_fill_of_a_missing_value_but_not_drop_it_nor_move_null() {
    let folder = tempfile::tempdir().unwrap();
    let release = |sequence, missing, null| {
        let mut spec = ModelSpec { sequence, ..grown() };
        let name = "d".to_owned();
        spec.dense_features[0] = DenseSpec::Table { name, missing, shared: false, retired: false };
        spec.features[0].null = Some(null);
        spec
    };
    let first = pack(&release(1, Some(0.5), 5), None, folder.path()).unwrap();
    let desk = folder.path().join("desk");
    install(&desk, &first);
    for (changed, why) in [
        (release(2, None, 5), "dense feature `d`: may no longer be missing"),
        (release(2, Some(0.5), 6), "feature `a`: key: makes other keys of the same values"),
    ] {
        let refused = pack(&changed, Some(&desk), folder.path()).unwrap_err();
        assert!(refused.contains(why), "{refused}");
    }

    let fleet = Fleet::of(&first);
    let car = Car::at_first_release(&fleet);
    assert_eq!(scores(&car, [1, 2, 3]).1[0], [value(0, 1) + value(0, 2) + 0.5; DIM]);
    fleet.publish(T0 + 10, &pack(&release(2, Some(2.5), 5), Some(&desk), folder.path()).unwrap());
    car.run(&mut fleet.link(), T0 + 11).unwrap();
    assert_eq!(scores(&car, [1, 2, 3]).1[0], [value(0, 1) + value(0, 2) + 2.5; DIM]);
}

/// A revoked release, and one of the same publish: a car may serve either, and refuses what its
/// callers cannot use.
#[test]
fn publish_compares_with_every_release_that_a_car_may_serve() {
    let folder = tempfile::tempdir().unwrap();
    let first = pack(&spec(1), None, folder.path()).unwrap();
    let desk = folder.path().join("desk");
    install(&desk, &first);
    let second = pack(&grown(), Some(&desk), folder.path()).unwrap();
    let third = pack(&ModelSpec { sequence: 3, ..spec(1) }, None, folder.path()).unwrap();
    let why = "callers of changing@2 cannot use it: dense feature `d`: is gone";
    let revoked = || vec!["2".to_owned()];
    let change = |revoke, bundles: &[&PathBuf]| {
        let bundles = bundles.iter().map(|bundle| bundle.to_path_buf()).collect();
        Change { revoke, bundles, ..Change::default() }
    };

    let fleet = Fleet::of(&first);
    let refused = fleet.try_change(T0 + 10, change(vec![], &[&second, &third])).unwrap_err();
    assert!(refused.contains(why), "{refused}");
    fleet.publish(T0 + 11, &second);
    let refused = fleet.try_change(T0 + 12, change(revoked(), &[&third])).unwrap_err();
    assert!(refused.contains(why), "{refused}");
    fleet.revoke(T0 + 13, 2);
    let refused = fleet.try_change(T0 + 14, change(vec![], &[&third])).unwrap_err();
    assert!(refused.contains(why), "{refused}");

    // A lost manifest is said, and the release before that is compared.
    let lost = format!("targets/changing/{}", entry_of(&fleet, "000000000002"));
    std::fs::write(fleet.file(&lost), "<html>").unwrap();
    let done = fleet.try_change(T0 + 15, change(vec![], &[&third])).unwrap();
    assert_eq!(done.not_compared, done.added);
}

/// Returns the file name of the manifest of the release with this sequence.
fn entry_of(fleet: &Fleet, sequence: &str) -> String {
    let entries = std::fs::read_dir(fleet.file("targets/changing")).unwrap();
    let mut names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.find(|name| name.contains(&format!(".{sequence}-"))).unwrap()
}
