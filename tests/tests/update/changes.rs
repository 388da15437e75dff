//! Releases that change the schema reach a fleet by deltas, while callers of the old and of the new
//! model ask every car. No request is refused, and every score is that of the caller's inputs.

use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::request::worker::Worker;
use hatchback::schema::KeySpace;
use hatchback::update::error::UpdateError;
use hatchback::{Activation, Budget, Model, SystemClock};
use hatchback_server::decode_http;
use hatchback_tests::fleet::{Car, Fleet, T0};
use hatchback_tests::models::{TablePlan, TableRows, install};
use hatchback_tests::wire::{Faults, Wire};
use hatchback_tools::import::{RowSource, Source};
use hatchback_tools::pack::spec::{
    CodecChoice, DefaultRow, DenseSpec, FeatureSpec, InputSpec, ModelSpec, NetworkSpec,
    OutputsSpec, TableSpec,
};
use hatchback_tools::pack::{Overrides, PackJob};
use hatchback_tools::workload::onnx::{Graph, Type};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const DIM: usize = 2;
const ROWS: u64 = 40;

/// Returns the value in both columns of row `key` of table `table`.
fn value(table: u64, key: u64) -> f32 {
    (1000 * table + key) as f32
}

/// Returns `spec` with the sequence and name of its model. Release 1 has the features `a` and `b`.
/// Release 2 retires `b`, and has a table, the feature `c` and the dense feature `d` more. Release
/// 3 has the first table as f16.
fn spec(sequence: u64) -> ModelSpec {
    let is_new = sequence > 1;
    let table = |name: &str, codec| TableSpec {
        name: name.to_owned(),
        dim: DIM,
        keys: KeySpace::Index,
        codec,
        placement: TablePlan::cached(KeySpace::Index, ROWS, DIM, codec).placement,
        miss: hatchback::schema::MissPolicy::Wait,
        default: DefaultRow::Zeros,
        source: Source::Npy { path: "in-memory".into(), keys: None, counts: None },
    };
    let first = if sequence > 2 { CodecChoice::F16 } else { CodecChoice::F32 };
    let mut tables = vec![table("first", first)];
    let mut features = vec![FeatureSpec::sum("a", "first", 1), FeatureSpec::sum("b", "first", 1)];
    let mut inputs = vec![InputSpec::vectors("a", vec!["a".to_owned()])];
    let mut dense_features = vec![];
    if is_new {
        tables.push(table("second", CodecChoice::F32));
        features[1].retired = true;
        features.push(FeatureSpec::sum("c", "second", 1));
        inputs.push(InputSpec::vectors("c", vec!["c".to_owned()]));
        inputs.push(InputSpec::dense("d"));
        let (name, missing) = ("d".to_owned(), Some(0.5));
        dense_features.push(DenseSpec::Table { name, missing, shared: false, retired: false });
    } else {
        inputs.push(InputSpec::vectors("b", vec!["b".to_owned()]));
    }
    ModelSpec {
        format: 1,
        name: "changing".to_owned(),
        sequence,
        dense_features,
        network: NetworkSpec {
            onnx: Some("dense.onnx".into()),
            hugectr: None,
            table_major: false,
            output: OutputsSpec::One("out".to_owned()),
            activation: Some(Activation::None),
            inputs,
        },
        tables,
        features,
        probe: None,
    }
}

/// Packs release `sequence` as `spec` says, a delta from the live generation of `parent`. The
/// network adds its inputs up.
fn pack(spec: &ModelSpec, parent: Option<&Path>, folder: &Path) -> Result<PathBuf, String> {
    let mut graph = Graph::default();
    let mut sum = "a".to_owned();
    for (n, input) in spec.network.inputs.iter().enumerate() {
        let width = if input.dense { spec.dense_features.len() } else { DIM };
        graph.input(&input.name, Type::Float, &[width]);
        if n > 0 {
            let last = n + 1 == spec.network.inputs.len();
            let next = if last { "out".to_owned() } else { format!("sum{n}") };
            graph.node("Add", &[&sum, &input.name], &next, &[]);
            sum = next;
        }
    }
    graph.output("out", &[DIM]);
    std::fs::write(folder.join("dense.onnx"), graph.file()).unwrap();
    let rows = |table: usize| -> Box<dyn RowSource> {
        let values = (0..ROWS).flat_map(|key| [value(table as u64, key); DIM]).collect();
        Box::new(TableRows { keys: None, values, dim: DIM, counts: None })
    };
    let sources: Vec<_> = (0..spec.tables.len()).map(rows).collect();
    let out = folder.join(format!("{}.hatch", spec.sequence));
    let parent = parent.map(|path| Flash::open(&disk::system(), path).unwrap());
    let job = PackJob::new(spec.clone(), folder, Overrides::default());
    let packed = job.pack_rows(&sources, parent.as_ref(), &out, &mut |_, _| {});
    packed.map(|_| out).map_err(|e| format!("{e:#}"))
}

/// The bundles of a snapshot and of the deltas after it.
fn releases(folder: &Path) -> Vec<PathBuf> {
    let desk = folder.join("desk");
    let mut bundles = Vec::new();
    for sequence in 1..=3 {
        let parent = Some(desk.as_path()).filter(|_| sequence > 1);
        let bundle = pack(&spec(sequence), parent, folder).unwrap();
        install(&desk, &bundle);
        bundles.push(bundle);
    }
    bundles
}

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
        let batch = decode_http(body.as_bytes(), body.len(), &schema, 1).unwrap();
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
