//! Valid inputs for each parser, from which mutations and fuzzers start.

use crate::models::{FeaturePlan, ModelPlan, TablePlan, repository};
use crate::parsers::{golden_generation, golden_tables, join};
use hatchback::Weights;
use hatchback::bundle::manifest::{Generation, Layer, Manifest, Restored, sha256};
use hatchback::flash::live::{self, HotList, LiveRecord, SegmentRef, TableState};
use hatchback::flash::segment::writer::SegmentWriter;
use hatchback::flash::segment::{Part, SegmentKind};
use hatchback::io::daily_bytes::DailyBytes;
use hatchback::io::paired_record::PairedRecord;
use hatchback::mix;
use hatchback::schema::key_function::{KeyFunction, Side, Unknown};
use hatchback::schema::lookup::Lookup;
use hatchback::schema::sample::Sample;
use hatchback::schema::vocabulary::Vocabulary;
use hatchback::schema::{Feature, InputSource, KeySpace, NetworkInput, NetworkOutput, Schema};
use hatchback::update::accepted::Accepted;
use hatchback::update::fetch_status::{FetchState, FetchStatus, Offer, SetAside};
use hatchback::update::host::Watched;
use hatchback::update::install_status::{
    Attempted, InstallState, InstallStatus, Refused, Repair, Retry,
};
use hatchback::update::release::Release;
use hatchback::update::rollback_floor::RollbackFloor;
use hatchback::update::status::{UpdateEvent, UpdateState};
use hatchback::{Activation, Pooling};
use hatchback_kernels::dense::narrow_all;
use hatchback_server::proto::{
    InferInputTensor, InferParameter, InferRequestedOutputTensor, InferTensorContents,
    ModelInferRequest, ParameterValue,
};
use hatchback_tools::pack::spec::CodecChoice;
use prost::Message;
use std::sync::Arc;

/// Returns a file of the repository.
pub fn file(path: &str) -> Vec<u8> {
    std::fs::read(repository(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

fn layout(path: &str) -> Vec<u8> {
    file(&format!("tests/data/layouts/{path}"))
}

fn layouts(paths: &[&str]) -> Vec<u8> {
    let files: Vec<Vec<u8>> = paths.iter().map(|p| layout(p)).collect();
    join(&files.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

/// Returns a model that is small enough for mutations of the whole bundle.
fn plan() -> ModelPlan {
    let tables = vec![
        TablePlan { counts: true, ..TablePlan::cached(KeySpace::Sparse, 300, 4, CodecChoice::U8) },
        TablePlan::cached(KeySpace::Index, 40, 6, CodecChoice::F32),
    ];
    let features =
        vec![FeaturePlan { hotness_max: 3, ..FeaturePlan::one_hot(0) }, FeaturePlan::one_hot(1)];
    ModelPlan { name: "golden".to_owned(), sequence: 1, seed: 1, dense: 2, tables, features }
}

/// Returns the schema of the sample lines.
pub fn schema() -> Schema {
    plan().pack().schema
}

fn segments() -> Vec<Vec<u8>> {
    let segment = |(number, table, part): (usize, &hatchback::schema::Table, Part)| {
        let kind = SegmentKind::new(&golden_generation(), 0, number, table, part).unwrap();
        let format = kind.format();
        let mut keys: Vec<u64> = (0..table.rows).collect();
        if table.keys == KeySpace::Sparse {
            keys.sort_by_key(|&key| mix(key));
        }
        let mut writer = SegmentWriter::new(Vec::new(), kind);
        let mut row = vec![0; format.row_bytes()];
        for key in keys {
            format.encode(&[key as f32 / 8.0; 8], &mut row).unwrap();
            writer.push(table.keys.order(key), &row).unwrap();
        }
        writer.finish().unwrap().0
    };
    let tables = golden_tables();
    let parts = |(n, table)| [Part::Base, Part::Delta].map(|part| (n, table, part));
    tables.iter().enumerate().flat_map(parts).map(segment).collect()
}

fn lines(path: &str) -> Vec<Vec<u8>> {
    file(path).split(|b| *b == b'\n').take(40).map(<[u8]>::to_vec).collect()
}

fn sample_lines() -> Vec<Vec<u8>> {
    vec![
        concat!(
            r#"{"dense":[0.5,-1e3],"sparse":{"f0":[1,2,18446744073709551615],"f1":[7]},"#,
            r#""label":1,"score":0.25}"#
        )
        .into(),
        br#"{"dense":[0,0]}"#.to_vec(),
        br#"{"dense":[1.5,2],"sparse":{"f1":[]},"label":null}"#.to_vec(),
        br#"{"dense":[0,1],"sparse":{"f0":["a",-7,0.5]},"weights":{"f0":[1,2,3]},"label":[1]}"#
            .to_vec(),
        br#"{"dense":[0,1],"score":{"out":0.25}}"#.to_vec(),
    ]
}

fn probe_sets() -> Vec<Vec<u8>> {
    let samples: Vec<Sample> = (0..20).map(|id| plan().sample(id)).collect();
    let weights = vec![vec![0.5], vec![]];
    let whole = Sample { weights, scores: vec![Some(0.5), None], ..samples[0].clone() };
    let sets: [&[Sample]; 3] = [&samples, &[], &[whole]];
    sets.map(|set| Sample::encode_set(set).unwrap()).to_vec()
}

/// Inputs of a request for the golden schema: two samples, padded and jagged.
fn request_inputs() -> Vec<InferInputTensor> {
    let input = |name: &str, datatype: &str, shape: &[i64]| InferInputTensor {
        name: name.to_owned(),
        datatype: datatype.to_owned(),
        shape: shape.to_vec(),
        ..InferInputTensor::default()
    };
    vec![
        input("dense", "FP32", &[2, 2]),
        input("f0", "INT64", &[2, 2]),
        input("f1.keys", "INT64", &[3]),
        input("f1.offsets", "INT32", &[3]),
    ]
}

fn grpc_requests() -> Vec<Vec<u8>> {
    let timeout = InferParameter { parameter_choice: Some(ParameterValue::Int64Param(1000)) };
    let whole = ModelInferRequest {
        model_name: "m".to_owned(),
        id: "7".to_owned(),
        parameters: [("timeout".to_owned(), timeout)].into(),
        inputs: request_inputs(),
        outputs: vec![InferRequestedOutputTensor {
            name: "score".to_owned(),
            ..Default::default()
        }],
        raw_input_contents: raw_inputs().into_iter().map(Into::into).collect(),
        ..ModelInferRequest::default()
    };
    let mut typed = ModelInferRequest { raw_input_contents: Vec::new(), ..whole.clone() };
    let contents = [
        InferTensorContents { fp32_contents: vec![0.5, 1.0, 2.0, 3.0], ..Default::default() },
        InferTensorContents { int64_contents: vec![1, -1, 2, 3], ..Default::default() },
        InferTensorContents { int64_contents: vec![7, 8, 9], ..Default::default() },
        InferTensorContents { int_contents: vec![0, 1, 3], ..Default::default() },
    ];
    for (input, contents) in typed.inputs.iter_mut().zip(contents) {
        input.contents = Some(contents);
    }
    vec![whole.encode_to_vec(), typed.encode_to_vec()]
}

/// The raw values of [`request_inputs`].
fn raw_inputs() -> [Vec<u8>; 4] {
    [
        [0.5f32, 1.0, 2.0, 3.0].into_iter().flat_map(f32::to_le_bytes).collect(),
        [1i64, -1, 2, 3].into_iter().flat_map(i64::to_le_bytes).collect(),
        [7i64, 8, 9].into_iter().flat_map(i64::to_le_bytes).collect(),
        [0i32, 1, 3].into_iter().flat_map(i32::to_le_bytes).collect(),
    ]
}

/// Requests over HTTP, after the length of their JSON: one all in JSON, one with binary data.
fn http_requests() -> Vec<Vec<u8>> {
    let json = concat!(
        r#"{"id":"7","parameters":{"timeout":1000,"binary_data_output":true},"inputs":["#,
        r#"{"name":"dense","datatype":"FP32","shape":[1,2],"data":[[0.5,1e3]]},"#,
        r#"{"name":"f0","datatype":"UINT64","shape":[1,2],"data":[1,18446744073709551615]}],"#,
        r#""outputs":[{"name":"score","parameters":{"binary_data":true}}]}"#
    );
    let raw = raw_inputs();
    let inputs: Vec<String> = request_inputs()
        .iter()
        .zip(&raw)
        .map(|(input, raw)| {
            let InferInputTensor { name, datatype, shape, .. } = input;
            let size = raw.len();
            format!(
                "{{\"name\":{name:?},\"datatype\":{datatype:?},\"shape\":{shape:?},\
                 \"parameters\":{{\"binary_data_size\":{size}}}}}"
            )
        })
        .collect();
    let head = format!("{{\"inputs\":[{}]}}", inputs.join(","));
    let with_length = |head: &str, binary: &[u8]| {
        [&(head.len() as u16).to_le_bytes()[..], head.as_bytes(), binary].concat()
    };
    vec![with_length(json, &[]), with_length(&head, &raw.concat())]
}

fn golden_release() -> Release {
    Release {
        generation: golden_generation(),
        parent: None,
        bytes: 1 << 20,
        share: 5,
        manifest_bytes: 700,
        manifest: sha256(b"golden"),
        ..Release::default()
    }
}

fn golden_history() -> Vec<UpdateEvent> {
    let (at, note) = (1_800_000_000, Some("rolled back: the probe is off".to_owned()));
    let release = Some(golden_generation().to_string());
    let event = |(order, state)| {
        let (release, note) = (release.clone(), note.clone());
        UpdateEvent { order, at, state, release, note }
    };
    [(7, UpdateState::Fetching), (9, UpdateState::Failed)].map(event).to_vec()
}

/// Returns a record of the sync process with every field in use.
fn fetch_status() -> FetchStatus {
    FetchStatus {
        state: FetchState::Staged,
        release: Some(golden_release()),
        offer: Some(Offer { number: 3, release: golden_release() }),
        cohort: 42,
        revoked: Some(sha256(b"revoked")),
        newest: Some(1),
        received: DailyBytes::unknown(),
        set_aside: vec![SetAside { manifest: sha256(b"lost"), failures: 1, times: 2, polls: 3 }],
        history: golden_history(),
        skipped: Some("release golden@7 needs operator Warp".to_owned()),
        ..FetchStatus::default()
    }
}

/// Returns a record of the serving process with every field in use.
fn install_status() -> InstallStatus {
    InstallStatus {
        state: InstallState::Probation,
        offer: 3,
        release: Some(golden_release()),
        trials: 3,
        watched_before: Watched { requests: 300, faults: 2, slow: 1, car_faults: 3 },
        watched: Watched { requests: 40, faults: 1, slow: 0, car_faults: 0 },
        attempted: vec![Attempted {
            manifest: sha256(b"attempted"),
            attempts: 2,
            at: 1_800_000_000,
            retry: Retry::WithRoom(1 << 30),
        }],
        repair: Repair::NewerSnapshot,
        committed: Some(golden_generation()),
        refused: vec![
            Refused { manifest: sha256(b"refused"), by: None },
            Refused { manifest: sha256(b"unreadable"), by: Some("0.1.0".to_owned()) },
        ],
        version: "0.1.0".to_owned(),
        history: golden_history(),
        ..InstallStatus::default()
    }
}

/// Returns the live record of a small model.
fn live_record(generation: Generation, encoded: &[u8]) -> LiveRecord {
    let table = |serial| TableState {
        base: SegmentRef { sequence: 1, serial: 0 },
        deltas: vec![SegmentRef { sequence: 1, serial }],
        hot: Some(HotList { sequence: 1, bytes: 80, sha256: sha256(encoded) }),
    };
    let live =
        live::LiveState { generation, manifest: sha256(encoded), tables: vec![table(1), table(2)] };
    LiveRecord { previous: Some(live.clone()), live, least: 1, rebuilds: 2 }
}

/// Returns a manifest whose schema has every kind of key function, input and output.
fn whole_manifest(manifest: &Manifest) -> Vec<u8> {
    let mut manifest = manifest.clone();
    let words = ["Rome", "Köln"].into_iter().zip(2..).map(|(word, key)| (word.to_owned(), key));
    let words = Arc::new(Vocabulary::new(words.collect()).unwrap());
    let schema = &mut manifest.schema;
    schema.features[0].weighted = true;
    let unknown = Unknown::Buckets { first: 9, buckets: 4 };
    schema.features[1].key = KeyFunction::Vocabulary { words, unknown };
    schema.features[1].null = Some(3);
    schema.dense_features[0].missing = Some(0.5);
    let extra = |name: &str, source| NetworkInput { name: name.to_owned(), source };
    schema.network.inputs.extend([
        extra("lengths", InputSource::Lengths(vec![0, 1])),
        extra("masks", InputSource::Masks(vec![0])),
        extra("again", InputSource::Vectors(vec![1])),
    ]);
    let (name, activation) = ("cvr".to_owned(), Activation::Sigmoid);
    schema.network.outputs.push(NetworkOutput { name, activation });
    let boundaries = vec![0.5, 1.5];
    let key = KeyFunction::Buckets { boundaries, first: 0, side: Side::Below };
    schema.features.push(Feature { key, ..Feature::plain("age", 2) });
    let key = KeyFunction::Cross { columns: vec![1, 2], buckets: 3, first: 1 };
    schema.features.push(Feature { key, ..Feature::plain("cross", 20) });
    let lookup = |feature, table, pooling| Lookup { feature, table, pooling };
    let pooled =
        [lookup(2, 1, Pooling::Max), lookup(2, 0, Pooling::None), lookup(3, 0, Pooling::Sum)];
    schema.lookups.extend(pooled);
    schema.network.inputs.push(extra("age", InputSource::Vectors(vec![2, 3, 4])));
    manifest.encode().unwrap()
}

/// Returns the manifest of a release that restores `manifest` and a delta after it.
fn restored_manifest(mut manifest: Manifest) -> Vec<u8> {
    let tables = (0..manifest.tables.len()).map(|table| {
        let base = manifest.layers(table)[0];
        vec![base, Layer { sequence: base.sequence + 1, ..base }]
    });
    let sequence = manifest.generation.sequence + 1;
    manifest.restored = Some(Restored { sequence, tables: tables.collect() });
    manifest.generation.sequence += 2;
    manifest.encode().unwrap()
}

/// Returns valid inputs for the parser of that name.
pub fn goldens(parser: &str) -> Vec<Vec<u8>> {
    let families = ["dlrm", "dcnv2", "deepfm", "wide_deep", "mmoe", "din", "dien", "bst", "hstu"];
    match parser {
        "manifest" | "bundle" | "live_record" => {
            let packed = plan().pack();
            let bundle = std::fs::read(&packed.bundle).unwrap();
            let manifest = crate::rewrite::Parts::read(&packed.bundle).manifest;
            let encoded = manifest.encode().unwrap();
            match parser {
                "manifest" => vec![encoded, whole_manifest(&manifest), restored_manifest(manifest)],
                "bundle" => vec![bundle],
                _ => vec![live_record(manifest.generation, &encoded).encode(4)],
            }
        }
        "fetch_status" => vec![fetch_status().encode(0), FetchStatus::default().encode(0)],
        "install_status" => vec![install_status().encode(0), InstallStatus::default().encode(0)],
        "accepted" => {
            vec![Accepted { root: b"a root".to_vec(), targets: 700 }.encode(5)]
        }
        "floor" => {
            let (root, timestamp, snapshot, targets) = (2, 300, 200, 200);
            vec![
                RollbackFloor { root, timestamp, snapshot, targets, time: 1_800_000_000 }.encode(9),
            ]
        }
        "segment" => segments(),
        "page" => segments().iter().flat_map(|s| s.chunks(4096).map(<[u8]>::to_vec)).collect(),
        "sample" => {
            let others = families
                .iter()
                .flat_map(|f| lines(&format!("tests/data/families/{f}/probe.jsonl")));
            sample_lines().into_iter().chain(others).collect()
        }
        "probe_set" => probe_sets(),
        "grpc_infer" => grpc_requests(),
        "http_infer" => http_requests(),
        "model_spec" => {
            families.iter().map(|f| file(&format!("tests/data/families/{f}/model.toml"))).collect()
        }
        "onnx" => {
            let ours = crate::onnx::concat(&[("dense".to_owned(), 2), ("a".to_owned(), 34)], "out");
            let network = |f| file(&format!("tests/data/families/{f}/dense.onnx"));
            let narrow = [(Weights::F16, "dlrm"), (Weights::Int8, "dien")]
                .map(|(weights, family)| narrow_all(&network(family), weights).unwrap());
            families.into_iter().map(network).chain([ours]).chain(narrow).collect()
        }
        "target" => ["base", "cpu", "drive-orin", "x86-cuda"]
            .map(|t| file(&format!("targets/{t}.toml")))
            .to_vec(),
        "safetensors" => vec![layout("safetensors/model.safetensors")],
        "npy" => vec![
            layouts(&["npy/keys.npy", "npy/a.npy"]),
            layouts(&["npy/keys.npy", "npy/v2.npy"]),
            layouts(&["npy/counts.npy", "npy/half.npy"]),
        ],
        "hugectr" => {
            let files =
                ["key", "meta", "emb_vector"].map(|name| format!("hugectr/localized/{name}"));
            vec![layouts(&[&files[0], &files[1], &files[2]])]
        }
        "sok" => vec![layouts(&["sok/emb_user_0-key", "sok/meta_info", "sok/emb_user_0-weight"])],
        "embedding_collection" => ["0", "1"]
            .map(|e| {
                let at = |name: &str| format!("embedding_collection_{e}/{name}");
                layouts(&[&at("meta_data"), &at("key1"), &at("weight1")])
            })
            .to_vec(),
        other => panic!("no golden input for `{other}`"),
    }
}
