//! Inputs and outputs beyond keys and one score: named outputs, raw values that become keys,
//! weights, lengths and masks. Each is compared with a plain computation.

use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Worker;
use hatchback::schema::key_function::{KeyFunction, Unknown};
use hatchback::schema::raw_value::RawValue;
use hatchback::schema::sample::Sample;
use hatchback::schema::vocabulary::Vocabulary;
use hatchback::schema::{Feature, KeySpace};
use hatchback::{Activation, Pooling};
use hatchback_tests::models::{
    FeaturePlan, ModelPlan, Packed, TablePlan, batch_for, open_with_least_cache, score_all,
    tiny_budget,
};
use hatchback_tests::onnx;
use hatchback_tests::reference::{Reference, same_bits};
use hatchback_tools::pack::key_spec::{KeySpec, UnknownSpec};
use hatchback_tools::pack::spec::{CodecChoice, DenseSpec, OutputSpec, OutputsSpec};
use hatchback_tools::workload::onnx::{Graph, Type, int};
use std::sync::Arc;

fn plan(features: Vec<FeaturePlan>) -> ModelPlan {
    let table = TablePlan::cached(KeySpace::Index, 400, 6, CodecChoice::U8);
    let (name, tables) = ("trainer".to_owned(), vec![table]);
    ModelPlan { name, sequence: 1, seed: 77, dense: 3, tables, features }
}

fn worker(packed: &Packed) -> Worker {
    let model = open_with_least_cache(&packed.install(), tiny_budget(&packed.schema, 8));
    Worker::new(model, Arc::new(SystemClock::default()))
}

/// A network with one output for each of `outputs`: the sum of the input `a` with the dense
/// features, times a number. `wide` outputs have a second value.
fn network(outputs: &[(&str, f32)], wide: bool) -> Vec<u8> {
    let mut graph = Graph::default();
    graph.input("dense", Type::Float, &[3]);
    graph.input("a", Type::Float, &[6]);
    graph.node("Concat", &["dense", "a"], "all", &[int("axis", 1)]);
    let columns = if wide { 2 } else { 1 };
    for (name, factor) in outputs {
        let weights: Vec<f32> = (0..9 * columns).map(|i| factor * (i as f32 - 4.0)).collect();
        graph.floats(&format!("{name}.w"), &[9, columns], &weights);
        let product =
            graph.node("MatMul", &["all", &format!("{name}.w")], &format!("{name}.p"), &[]);
        // An output may be `[batch]` too.
        let (product, shape) = match (*name, wide) {
            ("cvr", false) => {
                graph.integers("axes", &[1], &[1]);
                let inputs = [product.as_str(), "axes"];
                (graph.node("ReduceSum", &inputs, "cvr.sum", &[int("keepdims", 0)]), vec![])
            }
            _ => (product, vec![columns]),
        };
        graph.node("Tanh", &[&product], name, &[]);
        graph.output(name, &shape);
    }
    graph.file()
}

fn several(names: &[(&str, Activation)]) -> OutputsSpec {
    let output = |(name, activation): &(&str, Activation)| OutputSpec {
        name: (*name).to_owned(),
        activation: *activation,
    };
    OutputsSpec::Several(names.iter().map(output).collect())
}

/// Packs `plan` with these outputs.
fn pack_outputs(plan: &ModelPlan, outputs: OutputsSpec, onnx: &[u8]) -> Packed {
    let mut spec = plan.spec();
    spec.network.activation = matches!(outputs, OutputsSpec::One(_)).then_some(Activation::Sigmoid);
    spec.network.output = outputs;
    plan.pack_spec(&spec, |_, _| onnx.to_vec())
}

#[test]
fn each_named_output_has_the_scores_of_a_model_with_that_output_alone() {
    let plan = plan(vec![FeaturePlan { hotness_max: 4, ..FeaturePlan::one_hot(0) }]);
    let unlabelled = |id| Sample { labels: Vec::new(), ..plan.sample(id) };
    let samples: Vec<Sample> = (0..40).map(unlabelled).collect();
    let onnx = network(&[("ctr", 0.01), ("cvr", -0.02), ("logit", 0.005)], false);
    let (sigmoid, none) = (Activation::Sigmoid, Activation::None);
    let names = [("cvr", sigmoid), ("logit", none), ("ctr", sigmoid)];
    let all = pack_outputs(&plan, several(&names), &onnx);
    let outputs = &all.schema.network.outputs;
    assert_eq!(
        outputs.iter().map(|o| o.name.as_str()).collect::<Vec<_>>(),
        ["cvr", "logit", "ctr"]
    );

    for batch in [1, 7] {
        let (scores, _) = score_all(&mut worker(&all), &samples, batch);
        for (column, (name, activation)) in names.iter().enumerate() {
            let mut spec = plan.spec();
            spec.network.output = OutputsSpec::One((*name).to_owned());
            spec.network.activation = Some(*activation);
            let one = plan.pack_spec(&spec, |_, _| onnx.clone());
            let (alone, _) = score_all(&mut worker(&one), &samples, batch);
            let ours: Vec<f32> = scores.iter().skip(column).step_by(3).copied().collect();
            assert!(alone.iter().any(|score| score.abs() > 1e-3));
            assert!(same_bits(&ours, &alone), "{name}, batch {batch}");
        }
    }
}

#[test]
fn outputs_that_the_network_does_not_have_or_that_are_too_wide_are_refused() {
    let plan = plan(vec![FeaturePlan::one_hot(0)]);
    let refused = |outputs: OutputsSpec, wide, problem: &str| {
        let onnx = network(&[("ctr", 0.01), ("cvr", -0.02)], wide);
        let failed = std::panic::catch_unwind(|| pack_outputs(&plan, outputs, &onnx));
        let text = failed.err().map(|e| e.downcast_ref::<String>().cloned().unwrap_or_default());
        assert!(text.as_ref().is_some_and(|text| text.contains(problem)), "{text:?}");
    };
    let both = || several(&[("ctr", Activation::None), ("cvr", Activation::None)]);
    refused(both(), true, "outputs `ctr`, `cvr` have 4 values a sample together");
    let other = several(&[("ctr", Activation::None), ("ctcvr", Activation::None)]);
    refused(other, false, "no output named `ctcvr`");
    let twice = several(&[("ctr", Activation::None), ("ctr", Activation::None)]);
    refused(twice, false, "network.output[1].name: `ctr` occurs twice");
    refused(several(&[]), false, "network.output: names no output");
}

#[test]
fn labels_and_scores_are_read_by_the_name_of_their_output() {
    let plan = plan(vec![FeaturePlan::one_hot(0)]);
    let onnx = network(&[("ctr", 0.01), ("cvr", -0.02)], false);
    let outputs = several(&[("ctr", Activation::Sigmoid), ("cvr", Activation::Sigmoid)]);
    let schema = pack_outputs(&plan, outputs, &onnx).schema;
    let read = |rest: &str| Sample::from_json(&format!("{{\"dense\":[0,0,0],{rest}}}"), &schema);
    let labels = |rest: &str| read(&format!("\"label\":{rest}")).unwrap().labels;
    assert_eq!(labels(r#"{"cvr":1,"ctr":0}"#), [Some(0.0), Some(1.0)]);
    assert_eq!(labels(r#"{"cvr":1}"#), [None, Some(1.0)]);
    assert_eq!(labels("[1,null]"), [Some(1.0), None]);
    assert!(labels("null").is_empty() && labels("[null,null]").is_empty());
    for (rest, problem) in [
        ("1", "label: one value for the outputs `ctr`, `cvr`"),
        ("[1]", "label: 1 values, the model has 2 outputs"),
        (r#"{"ctcvr":1}"#, "label: there is no output `ctcvr`"),
        (r#"{"ctr":1,"ctr":0}"#, "a label or score is a number, a list"),
        ("[1e39,0]", "label: inf is beyond the range of f32"),
        ("\"x\"", "a label or score is a number, a list"),
    ] {
        let error = read(&format!("\"label\":{rest}")).unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }

    let sample = read(r#""label":{"ctr":1},"score":[0.25,0.5]"#).unwrap();
    assert_eq!((sample.label(0), sample.label(1), sample.score(1)), (Some(1.0), None, Some(0.5)));
    let set = [sample.clone(), Sample { labels: Vec::new(), ..sample }];
    assert_eq!(Sample::decode_set(&Sample::encode_set(&set).unwrap()).unwrap(), set);
}

/// Every pooling and every input of bags, with cached and missing rows.
#[test]
fn bags_reach_the_network_as_the_reference_says() {
    let feature = |pooling, weighted| FeaturePlan {
        pooling,
        weighted,
        hotness_max: 5,
        ..FeaturePlan::one_hot(0)
    };
    let features = vec![
        feature(Pooling::Sum, true),
        feature(Pooling::Sqrtn, false),
        feature(Pooling::Mean, true),
        feature(Pooling::Sqrtn, true),
        feature(Pooling::Max, false),
        FeaturePlan { second_input: true, ..feature(Pooling::None, false) },
    ];
    let plan = plan(features);
    let packed = plan.pack_spec(&plan.spec_with_bag_inputs(), onnx::concat);
    let reference = Reference::new(&packed.schema, &packed.rows);
    let samples: Vec<Sample> = (0..60).map(|id| plan.sample(id)).collect();
    let expected: Vec<f32> = samples.iter().flat_map(|s| reference.output(s)).collect();
    for batch in [1, 8] {
        let mut worker = worker(&packed);
        // Again with rows that the first pass has cached.
        for _ in 0..2 {
            let (scores, _) = score_all(&mut worker, &samples, batch);
            assert!(same_bits(&scores, &expected), "batch {batch}");
        }
    }
}

#[test]
fn weights_that_do_not_fit_the_keys_are_refused() {
    let weighted = FeaturePlan { weighted: true, hotness_max: 3, ..FeaturePlan::one_hot(0) };
    let packed = plan(vec![weighted, FeaturePlan::one_hot(0)]).pack();
    let read = |rest: &str| {
        let line = format!("{{\"dense\":[0,0,0],\"sparse\":{{\"f0\":[1,2]}}{rest}}}");
        Sample::from_json(&line, &packed.schema).map_err(|e| e.to_string())
    };
    let sample = read(r#","weights":{"f0":[0.5,-2]}"#).unwrap();
    assert_eq!(sample.weights, [vec![0.5, -2.0], vec![]]);
    let refused = |rest: &str, problem: &str| assert_eq!(read(rest).unwrap_err(), problem);
    refused("", "weights.f0: 0 weights, 2 keys");
    refused(r#","weights":{"f0":[1]}"#, "weights.f0: 1 weights, 2 keys");
    refused(r#","weights":{"f0":[1,1e39]}"#, "weights.f0[1]: is 1e39, beyond a 32-bit float");
    let other = r#","weights":{"f0":[1,2],"f1":[1]}"#;
    refused(other, "weights.f1: 1 weights, the feature takes none");
    let unknown = r#","weights":{"f0":[1,2],"f7":[1]}"#;
    refused(unknown, "weights: the feature `f7` takes no weights");

    // A batch that was made for a model without weights.
    let plain = FeaturePlan { weighted: false, hotness_max: 3, ..FeaturePlan::one_hot(0) };
    let other = plan(vec![plain, FeaturePlan::one_hot(0)]);
    let samples: Vec<Sample> = (0..4).map(|id| other.sample(id)).collect();
    let batch = batch_for(&other.pack().schema, 4, &samples);
    let error = worker(&packed).score(&batch, None).unwrap_err().to_string();
    assert!(error.starts_with("request: weights: 0 for"), "{error}");
}

/// Raw values of every kind give the scores of the keys that the functions make.
#[test]
fn raw_values_score_as_their_keys() {
    let features = vec![FeaturePlan { hotness_max: 6, ..FeaturePlan::one_hot(0) }; 5];
    let plan = plan(features);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("cities.txt");
    std::fs::write(&path, "Rome\t40\nParis\t7\nUlm\t2\nKöln\t9\n").unwrap();
    let mut spec = plan.spec();
    spec.features[0].key = Some(KeySpec::Farmhash64 { buckets: 400, first: 0 });
    spec.features[1].key = Some(KeySpec::Vocabulary {
        path,
        first: 2,
        min_count: Some(5),
        unknown: UnknownSpec::Key(1),
    });
    spec.features[2].key = Some(KeySpec::Modulo { divisor: 100, first: 300 });
    let boundaries = vec![-1.5, 0.0, 10.0];
    let side = hatchback::schema::key_function::Side::Above;
    spec.features[3].key = Some(KeySpec::Buckets { boundaries, first: 0, side });
    spec.features[0].null = Some(399);
    spec.features[3].null = Some(7);
    spec.dense_features[1] = DenseSpec::Table {
        name: "d1".to_owned(),
        missing: Some(-2.5),
        shared: false,
        retired: false,
    };
    let packed = plan.pack_spec(&spec, onnx::concat);

    let line = concat!(
        r#"{"dense":[1,null,3],"sparse":{"f0":["a","\u00fc",17,null,""],"#,
        r#""f1":["Rome","K\u00f6ln","Ulm","Oslo"],"#,
        r#""f2":[-1,250,7],"f3":[-2,-1.5,0,9.75,10,null],"f4":[5,6]}}"#
    );
    let sample = Sample::from_json(line, &packed.schema).unwrap();
    // TensorFlow's Fingerprint64 of `a` is 12917804110809363939.
    assert_eq!(sample.sparse[0][0], 12_917_804_110_809_363_939 % 400);
    assert_eq!(sample.sparse[0][2], packed.schema.key(0, &RawValue::from("17")).unwrap());
    let expected: [&[u64]; 4] = [&[2, 4, 1, 1], &[399, 350, 307], &[0, 1, 2, 2, 3, 7], &[5, 6]];
    assert_eq!(sample.sparse[1..], expected);
    assert_eq!((&sample.sparse[0][3..], sample.dense[1]), (&[399, 399][..], -2.5));
    let refused = |line: &str| Sample::from_json(line, &packed.schema).unwrap_err().to_string();
    let named = r#"{"dense":{"d2":3,"d0":1}}"#;
    assert_eq!(Sample::from_json(named, &packed.schema).unwrap().dense, sample.dense);
    for (line, problem) in [
        (r#"{"dense":{"d1":3,"d0":1}}"#, "dense[2]: `d2` is NaN, and has no value for `missing`"),
        (r#"{"dense":{"d7":3}}"#, "dense: the model has no dense feature `d7`"),
        (r#"{"dense":[null,2,3]}"#, "dense[0]: `d0` is NaN, and has no value for `missing`"),
        (r#"{"dense":[1,2,3],"sparse":{"f1":[null]}}"#, "sparse.f1[0]: null is not a text"),
        (r#"{"dense":[1,2,3],"sparse":{"f4":[null]}}"#, "sparse.f4[0]: null is not a key"),
    ] {
        assert!(refused(line).starts_with(problem), "{}", refused(line));
    }

    let reference = Reference::new(&packed.schema, &packed.rows);
    let (scores, status) = score_all(&mut worker(&packed), std::slice::from_ref(&sample), 1);
    assert!(same_bits(&scores, &reference.output(&sample)));
    assert_eq!(status, reference.status(&sample));

    let flash = Flash::open(&disk::system(), &packed.folder().join("flash")).unwrap();
    let model = Model::from_flash(&flash, Budget::default()).unwrap();
    let line = |(name, _): &&(&str, u64)| name.contains("vocabularies");
    assert!(model.memory().lines().iter().find(line).is_some_and(|(_, bytes)| *bytes > 30));
}

#[test]
fn a_key_function_that_does_not_fit_its_table_is_refused() {
    let plan = plan(vec![FeaturePlan::one_hot(0)]);
    let refused = |key: KeySpec, problem: &str| {
        let mut spec = plan.spec();
        spec.features[0].key = Some(key);
        let failed = std::panic::catch_unwind(|| plan.pack_spec(&spec, onnx::concat));
        let text = failed.err().map(|e| e.downcast_ref::<String>().cloned().unwrap_or_default());
        assert!(text.as_ref().is_some_and(|text| text.contains(problem)), "{text:?}");
    };
    let too_many = KeySpec::Farmhash64 { buckets: 401, first: 0 };
    refused(too_many, "feature[0].key: makes keys up to 400, the table `t0` has 400 rows");
    refused(KeySpec::Modulo { divisor: 0, first: 0 }, "feature[0].key: 0 keys from 0 on");

    let mut schema = plan.pack().schema;
    schema.features[0].null = Some(400);
    let error = schema.check().unwrap_err().to_string();
    assert_eq!(error, "feature[0].null: 400, the table `t0` has 400 rows");
    let words = Vocabulary::new(vec![(String::new(), 3)]).unwrap();
    let key = KeyFunction::Vocabulary { words: Arc::new(words), unknown: Unknown::Key(0) };
    schema.features[0] = Feature { null: Some(1), key, ..Feature::plain("f0", 1) };
    let error = schema.check().unwrap_err().to_string();
    assert_eq!(error, "feature[0].key: has an empty word, which `null` makes a missing value");
    schema.features[0] = Feature::plain("f0", 1);
    schema.dense_features[1].missing = Some(f32::NAN);
    let error = schema.check().unwrap_err().to_string();
    assert_eq!(error, "dense_features[1].missing: NaN is not finite");
}
