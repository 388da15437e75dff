//! The front door turns tensors, in JSON and in gRPC, into the same batch as the samples
//! themselves: padded and jagged keys, with weights.

use hatchback::schema::batch::Batch;
use hatchback::schema::key_function::KeyFunction;
use hatchback::schema::sample::Sample;
use hatchback::schema::{DenseFeature, Feature, Network, Schema};
use hatchback_server::proto::{InferInputTensor, InferTensorContents, ModelInferRequest};
use hatchback_server::{Code, decode_request};
use hatchback_tests::random::Random;
use prost::Message;
use serde_json::{Value, json};
use std::sync::Arc;

fn schema() -> Arc<Schema> {
    let plain = Feature::plain("plain", 3);
    let weighted = Feature { weighted: true, ..Feature::plain("weighted", 4) };
    Arc::new(Schema {
        dense_features: vec![DenseFeature { missing: Some(0.25), ..DenseFeature::plain("d") }],
        tables: vec![],
        features: vec![plain, weighted],
        lookups: vec![],
        network: Network { inputs: vec![], outputs: vec![] },
    })
}

fn sample(random: &mut Random) -> Sample {
    let mut bag = |most: u64| -> Vec<u64> {
        let keys = random.below(most + 1);
        (0..keys).map(|_| random.below(1 << 40)).collect()
    };
    let sparse = vec![bag(3), bag(4)];
    let weights = vec![vec![], sparse[1].iter().map(|key| *key as f32 * 0.25).collect()];
    // JSON has null in place of NaN.
    let dense = vec![if random.below(3) == 0 { f32::NAN } else { 0.5 }];
    Sample { dense, sparse, weights, ..Sample::default() }
}

/// A tensor: its name, type, shape, and values as JSON.
type Tensor = (String, &'static str, Vec<usize>, Vec<Value>);

/// Returns the tensors of `samples`: the first feature is padded, the second jagged or padded.
fn tensors(samples: &[Sample], is_jagged: bool) -> Vec<Tensor> {
    let size = samples.len();
    let dense = samples.iter().map(|s| json!(s.dense[0])).collect();
    let padded = |f: usize, width: usize| -> Vec<Value> {
        let bag = |s: &Sample| {
            (0..width).map(|i| json!(s.sparse[f].get(i).map_or(-1, |k| *k as i64))).collect()
        };
        samples.iter().flat_map(|s| -> Vec<Value> { bag(s) }).collect()
    };
    let mut all: Vec<Tensor> = vec![
        ("dense".to_owned(), "FP32", vec![size, 1], dense),
        ("plain".to_owned(), "INT64", vec![size, 3], padded(0, 3)),
    ];
    if is_jagged {
        let keys: Vec<Value> =
            samples.iter().flat_map(|s| &s.sparse[1]).map(|k| json!(k)).collect();
        let weights: Vec<Value> =
            samples.iter().flat_map(|s| &s.weights[1]).map(|w| json!(w)).collect();
        let mut offsets = vec![json!(0)];
        let mut end = 0;
        for s in samples {
            end += s.sparse[1].len();
            offsets.push(json!(end));
        }
        all.push(("weighted.keys".to_owned(), "INT64", vec![keys.len()], keys));
        all.push(("weighted.offsets".to_owned(), "INT64", vec![size + 1], offsets));
        all.push(("weighted.weights".to_owned(), "FP32", vec![weights.len()], weights));
    } else {
        // A weight beside padding is not read.
        let weight = |s: &Sample, i: usize| json!(s.weights[1].get(i).copied().unwrap_or(7.0));
        let weights = samples.iter().flat_map(|s| (0..4).map(move |i| weight(s, i))).collect();
        all.push(("weighted.weights".to_owned(), "FP32", vec![size, 4], weights));
        all.push(("weighted".to_owned(), "INT64", vec![size, 4], padded(1, 4)));
    }
    all
}

fn over_http(tensors: &[Tensor], schema: &Arc<Schema>) -> Result<Batch, String> {
    let inputs: Vec<Value> = tensors
        .iter()
        .map(|(name, datatype, shape, data)| {
            json!({"name": name, "datatype": datatype, "shape": shape, "data": data})
        })
        .collect();
    let body = json!({ "inputs": inputs }).to_string();
    decode_request(body.as_bytes(), Some(body.len()), schema, 8).map_err(|e| e.to_string())
}

fn over_grpc(tensors: &[Tensor], schema: &Arc<Schema>) -> Result<Batch, String> {
    let input = |(name, datatype, shape, data): &Tensor| {
        let contents = match *datatype {
            "FP32" => InferTensorContents {
                fp32_contents: data.iter().map(|v| v.as_f64().unwrap_or(f64::NAN) as f32).collect(),
                ..Default::default()
            },
            _ => InferTensorContents {
                int64_contents: data.iter().map(|v| v.as_i64().unwrap()).collect(),
                ..Default::default()
            },
        };
        InferInputTensor {
            name: name.clone(),
            datatype: (*datatype).to_owned(),
            shape: shape.iter().map(|side| *side as i64).collect(),
            contents: Some(contents),
            ..Default::default()
        }
    };
    let request = ModelInferRequest {
        inputs: tensors.iter().map(input).collect(),
        ..ModelInferRequest::default()
    };
    decode_request(&request.encode_to_vec(), None, schema, 8).map_err(|e| e.to_string())
}

#[test]
fn tensors_become_the_batch_of_their_samples() {
    let (schema, mut random) = (schema(), Random::new(7));
    for round in 0..300 {
        let samples: Vec<Sample> = (0..1 + random.below(8)).map(|_| sample(&mut random)).collect();
        let mut expected = Batch::new(&schema, samples.len());
        samples.iter().for_each(|s| expected.push(&schema, s).unwrap());
        let expected = format!("{expected:?}");
        let tensors = tensors(&samples, round % 2 == 0);
        for found in [over_http(&tensors, &schema), over_grpc(&tensors, &schema)] {
            assert_eq!(format!("{:?}", found.unwrap()), expected, "round {round}");
        }
    }
}

/// Beside the features of `schema`, with callers that still send them as before.
#[test]
fn retired_inputs_are_not_read_and_new_ones_may_be_absent() {
    let (old, mut random) = (schema(), Random::new(8));
    let mut new = Schema::clone(&old);
    let added = DenseFeature { missing: Some(7.0), ..DenseFeature::plain("new") };
    new.dense_features[0].retired = true;
    new.dense_features.push(added);
    new.features[1] = Feature { retired: true, ..Feature::plain("weighted", 1) };
    new.features.push(Feature::plain("added", 2));
    let new = Arc::new(new);
    for round in 0..100 {
        let samples: Vec<Sample> = (0..1 + random.below(8)).map(|_| sample(&mut random)).collect();
        let tensors = tensors(&samples, round % 2 == 0);
        for found in [over_http(&tensors, &new), over_grpc(&tensors, &new)] {
            let found = found.unwrap();
            assert_eq!(found.dense(), vec![7.0; samples.len()]);
            let keys: Vec<u64> = samples.iter().flat_map(|s| s.sparse[0].clone()).collect();
            assert_eq!(found.bags(0).keys, keys);
            assert!(found.bags(1).keys.is_empty() && found.bags(2).keys.is_empty());
        }
        // A caller of the new model does not find its feature in the old one.
        let mut wrong = tensors.clone();
        wrong.push((
            "added".to_owned(),
            "INT64",
            vec![samples.len(), 1],
            vec![json!(1); samples.len()],
        ));
        assert!(over_http(&wrong, &old).unwrap_err().contains("the model has no such input"));
    }
}

#[test]
fn a_shared_feature_has_one_bag_for_all_samples_or_the_same_for_each() {
    let (mut schema, mut random) = (Schema::clone(&schema()), Random::new(8));
    schema.features[1].shared = true;
    let schema = Arc::new(schema);
    for round in 0..100 {
        let samples: Vec<Sample> = (0..2 + random.below(7)).map(|_| sample(&mut random)).collect();
        let first = samples[0].clone();
        let with_first = |s: &Sample| Sample {
            sparse: vec![s.sparse[0].clone(), first.sparse[1].clone()],
            weights: first.weights.clone(),
            ..s.clone()
        };
        let equal: Vec<Sample> = samples.iter().map(with_first).collect();
        let is_jagged = round % 2 == 0;
        let repeated = tensors(&equal, is_jagged);
        let mut once = repeated[..2].to_vec();
        once.extend(tensors(&equal[..1], is_jagged).split_off(2));
        let expected = over_http(&once, &schema).unwrap();
        assert_eq!((expected.size(), expected.ends()), (equal.len(), &[equal.len()][..]));
        assert_eq!(expected.bags(1).keys, first.sparse[1]);
        for found in [
            over_grpc(&once, &schema),
            over_http(&repeated, &schema),
            over_grpc(&repeated, &schema),
        ] {
            assert_eq!(format!("{:?}", found.unwrap()), format!("{expected:?}"), "round {round}");
        }
        if let Some(at) = samples.iter().position(|s| s.sparse[1] != first.sparse[1]) {
            let refused = over_http(&tensors(&samples, is_jagged), &schema).unwrap_err();
            let said = format!("feature `weighted` is shared: sample {at} differs");
            assert!(refused.contains(&said), "{refused}");
        }
    }
}

#[test]
fn shared_dense_features_are_a_tensor_of_one_row_or_of_equal_rows() {
    let (mut schema, mut random) = (Schema::clone(&schema()), Random::new(9));
    let named =
        |name: &str, missing| DenseFeature { missing, shared: true, ..DenseFeature::plain(name) };
    // In front of and behind the feature of each sample.
    schema.dense_features.insert(0, named("hour", None));
    schema.dense_features.push(named("rain", Some(0.75)));
    let schema = Arc::new(schema);
    for round in 0..100 {
        let [hour, rain] = [random.below(24) as f32, 0.25];
        let of = |s: Sample| Sample { dense: vec![hour, s.dense[0], rain], ..s };
        let own: Vec<Sample> = (0..2 + random.below(7)).map(|_| sample(&mut random)).collect();
        let mut expected = Batch::new(&schema, own.len());
        let samples: Vec<Sample> = own.iter().cloned().map(of).collect();
        expected.push_request(&schema, &samples).unwrap();
        assert_eq!(
            (expected.shared_dense(), expected.ends()),
            (&[hour, rain][..], &[own.len()][..])
        );

        let send = |rows: usize, values: &[f32]| {
            let mut tensors = tensors(&own, round % 2 == 0);
            let row: Vec<Value> = values.iter().map(|value| json!(value)).collect();
            let shape = vec![rows, values.len()];
            let data = (0..rows).flat_map(|_| row.clone()).collect();
            tensors.push(("dense.shared".to_owned(), "FP32", shape, data));
            tensors
        };
        for tensors in [send(1, &[hour, rain]), send(own.len(), &[hour, rain])] {
            for found in [over_http(&tensors, &schema), over_grpc(&tensors, &schema)] {
                assert_eq!(format!("{:?}", found.unwrap()), format!("{expected:?}"));
            }
        }
        let filled = over_http(&send(1, &[hour]), &schema).unwrap();
        assert_eq!(filled.shared_dense(), [hour, 0.75]);

        let mut differs = send(own.len(), &[hour, rain]);
        let values = &mut differs.last_mut().unwrap().3;
        *values.last_mut().unwrap() = json!(0.5);
        let refused = over_grpc(&differs, &schema).unwrap_err();
        let said = format!("feature `rain` is shared: sample {} differs", own.len() - 1);
        assert!(refused.contains(&said), "{refused}");
        let refused = over_http(&tensors(&own, false), &schema).unwrap_err();
        assert!(refused.contains("input `dense.shared` is missing"), "{refused}");
    }
}

#[test]
fn weights_that_do_not_fit_their_keys_are_refused_by_name() {
    let (schema, mut random) = (schema(), Random::new(9));
    let one = Sample {
        sparse: vec![vec![1], vec![2, 3]],
        weights: vec![vec![], vec![0.5, 1.5]],
        ..sample(&mut random)
    };
    let whole = tensors(&[one], true);
    let with = |change: &dyn Fn(&mut Vec<Tensor>)| {
        let mut tensors = whole.clone();
        change(&mut tensors);
        let [http, grpc] =
            [over_http(&tensors, &schema), over_grpc(&tensors, &schema)].map(|e| e.unwrap_err());
        assert_eq!(http, grpc);
        http
    };
    let missing = with(&|t| drop(t.remove(4)));
    assert!(missing.contains("weights.weighted: 0 weights, 2 keys"), "{missing}");
    let short = with(&|t| {
        t[4].2 = vec![1];
        t[4].3.truncate(1);
    });
    assert!(short.contains("`weighted.weights`: 1 values for 2 keys"), "{short}");
    let twice = with(&|t| t.push(t[4].clone()));
    assert!(twice.contains("`weighted.weights`: occurs twice"), "{twice}");
    let other = with(&|t| t[4].0 = "plain.weights".to_owned());
    assert!(other.contains("no such input"), "{other}");
}

#[test]
fn a_negative_key_is_the_u64_of_the_same_bits_in_each_form_and_in_a_cross() {
    let mut schema = schema();
    let key = KeyFunction::Cross { columns: vec![1, 2], buckets: 1000, first: 0 };
    let cross = Feature { key, ..Feature::plain("cross", 2) };
    Arc::make_mut(&mut schema).features.extend([Feature::plain("other", 1), cross]);
    let sparse = json!({"plain": [-2], "weighted": [-1, i64::MIN], "other": [7]});
    let line = json!({"dense": [0.5], "sparse": sparse, "weights": {"weighted": [1, 2]}});
    let sample = Sample::from_json(&line.to_string(), &schema).unwrap();
    assert_eq!(sample.sparse[..2], [vec![u64::MAX - 1], vec![u64::MAX, 1 << 63]]);
    let mut expected = Batch::new(&schema, 1);
    expected.push(&schema, &sample).unwrap();
    // -1 is padding in the feature without offsets, and a key in the one with offsets.
    let column = |name: &str, datatype, data: Vec<Value>| {
        (name.to_owned(), datatype, vec![data.len()], data)
    };
    let tensors = [
        ("dense".to_owned(), "FP32", vec![1, 1], vec![json!(0.5)]),
        ("plain".to_owned(), "INT64", vec![1, 2], vec![json!(-2), json!(-1)]),
        column("weighted.keys", "INT64", vec![json!(-1), json!(i64::MIN)]),
        column("weighted.offsets", "INT64", vec![json!(0), json!(2)]),
        column("weighted.weights", "FP32", vec![json!(1), json!(2)]),
        ("other".to_owned(), "INT64", vec![1, 1], vec![json!(7)]),
    ];
    for found in [over_http(&tensors, &schema), over_grpc(&tensors, &schema)] {
        assert_eq!(format!("{:?}", found.unwrap()), format!("{expected:?}"));
    }
}

#[test]
fn tensors_that_contradict_their_shape_are_refused_by_name() {
    let (schema, mut random) = (schema(), Random::new(10));
    let whole = tensors(&[sample(&mut random)], false);
    let with = |shape: &[usize]| {
        let mut tensors = whole.clone();
        tensors[0].2 = shape.to_vec();
        [over_http(&tensors, &schema), over_grpc(&tensors, &schema)].map(|e| e.unwrap_err())
    };
    for problem in with(&[1; 20]) {
        assert!(problem.contains("dimensions"), "{problem}");
    }
    for problem in with(&[2, 1]) {
        assert!(problem.contains("[2, 1] has 2"), "{problem}");
    }
}

#[test]
fn a_message_of_nothing_but_empty_tensors_is_refused() {
    let schema = schema();
    let refused = |message: &[u8]| decode_request(message, None, &schema, 8).unwrap_err();
    // Fields 5, 6 and 7: inputs, outputs and raw values, each without a byte.
    for field in [5, 6, 7] {
        assert_eq!(refused(&[field * 8 + 2, 0].repeat(100_000)).code, Code::TooLarge);
    }
    // Parameters take no memory.
    let problem = refused(&[4 * 8 + 2, 0].repeat(100_000));
    assert!(problem.message.contains("the request has no input"), "{problem}");
    let id = "n".repeat(256);
    let long = ModelInferRequest { id, ..Default::default() }.encode_to_vec();
    let problem = refused(&long).message;
    assert!(problem.contains("256 bytes; at most 255") && problem.len() < 200, "{problem}");
    for malformed in [&[0xff; 11][..], &[5 * 8 + 2, 9, 0], &[3], &[8], &[1, 0]] {
        assert_eq!(refused(malformed).code, Code::Invalid, "{malformed:?}");
    }
}

#[test]
fn typed_values_that_are_malformed_or_beside_raw_ones_are_refused() {
    let schema = schema();
    let ask = |contents: Vec<u8>, datatype: &str, raw: &[u8]| {
        let mut input = InferInputTensor {
            name: "dense".to_owned(),
            datatype: datatype.to_owned(),
            shape: vec![1, 1],
            ..Default::default()
        }
        .encode_to_vec();
        input.extend([5 * 8 + 2, contents.len() as u8]);
        input.extend(contents);
        let mut message = vec![5 * 8 + 2, input.len() as u8];
        message.extend(input);
        message.extend_from_slice(raw);
        decode_request(&message, None, &schema, 8).unwrap_err()
    };
    // A packed list of three bytes, a varint for a float, and a number that does not end.
    for (contents, datatype) in [
        (vec![6 * 8 + 2, 3, 0, 0, 0], "FP32"),
        (vec![6 * 8, 0], "FP32"),
        (vec![26, 1, 255], "INT64"),
    ] {
        let problem = ask(contents, datatype, &[]);
        assert_eq!((problem.code, &*problem.message), (Code::Invalid, "the message is malformed"));
    }
    let both = ask(vec![6 * 8 + 2, 4, 0, 0, 0, 0], "FP32", &[7 * 8 + 2, 4, 0, 0, 0, 0]).message;
    assert!(both.contains("input `dense`: has raw values and typed values"), "{both}");
    let other = ask(vec![6 * 8 + 2, 4, 0, 0, 0, 0], "FP64", &[]).message;
    assert!(other.contains("input `dense`"), "{other}");
}

/// Asks over HTTP with this JSON.
fn asked(body: &str) -> Result<Batch, String> {
    decode_request(body.as_bytes(), Some(body.len()), &schema(), 8).map_err(|e| e.to_string())
}

#[test]
fn nested_data_must_have_its_shape_at_every_level() {
    let ask = |datatype: &str, shape: &str, data: &str| {
        asked(&format!(
            r#"{{"inputs":[{{"name":"plain","datatype":"{datatype}","shape":{shape},"data":{data}}},
            {{"name":"dense","datatype":"FP32","shape":[2,1],"data":[0.5,0.5]}}]}}"#
        ))
    };
    let flat = format!("{:?}", ask("INT64", "[2,2]", "[1,2,3,4]").unwrap());
    for datatype in ["INT64", "INT32", "UINT64"] {
        let nested = ask(datatype, "[2,2]", "[ [1,2], [3,4]]").unwrap();
        assert_eq!(format!("{nested:?}"), flat);
    }
    assert!(ask("INT64", "[2,0]", "[[],[]]").is_ok() && ask("INT64", "[2,0]", "[]").is_ok());
    let ragged = [
        "[[1],[2,3,4]]",
        "[[1,2,3],[4]]",
        "[[1,2,3,4]]",
        "[[1],[2],[3],[4]]",
        "[[1,2],[3,4],[]]",
        "[[[1,2],[3,4]]]",
    ];
    for data in ragged {
        for datatype in ["INT64", "INT32", "UINT64", "FP32", "FP64"] {
            let found = ask(datatype, "[2,2]", data).unwrap_err();
            let expected = "input `plain`: its data is nested otherwise than its shape [2, 2]";
            assert_eq!(found, expected, "{datatype} {data}");
        }
    }
    for (datatype, data) in [("INT64", "1"), ("FP32", "0.5"), ("BYTES", r#""[1]""#)] {
        let found = ask(datatype, "[1]", data).unwrap_err();
        assert!(found.contains("nested otherwise than its shape [1]"), "{found}");
    }
    let found = ask("BYTES", "[2,2]", r#"[["a"],["b","c","d"]]"#).unwrap_err();
    assert!(found.contains("nested otherwise"), "{found}");
    assert!(ask("INT64", "[4]", "[[1],[2],[3],[4]]").unwrap_err().contains("otherwise than"));
    assert!(ask("INT64", "[2,2]", "[[1,2],3,4]").unwrap_err().contains("that are not INT64"));
}

#[test]
fn an_array_in_place_of_an_object_is_refused_and_no_struct_is_named() {
    let inputs = r#""inputs":[{"name":"plain","datatype":"INT64","shape":[1,1],"data":[1]},
        {"name":"dense","datatype":"FP32","shape":[1,1],"data":[0.5]}]"#;
    let whole = |more: &str| format!("{{{inputs}{more}}}");
    assert!(asked(&whole(r#","parameters":{},"outputs":[{"name":"score"}]"#)).is_ok());
    let arrays = [
        whole(r#","parameters":[null,1]"#),
        whole(r#","parameters":[]"#),
        whole(r#","outputs":[["score"]]"#),
        whole(r#","outputs":[{"name":"score","parameters":[]}]"#),
        "[]".to_owned(),
        r#"["",{},[]]"#.to_owned(),
        r#"{"inputs":[["plain","INT64",[1,1],{},[1]]]}"#.to_owned(),
        whole("").replace(r#""shape":[1,1],"#, r#""shape":[1,1],"parameters":[],"#),
    ];
    for body in arrays {
        let found = asked(&body).unwrap_err();
        assert!(found.starts_with("invalid type: sequence, expected an object at"), "{found}");
    }
    assert!(asked(r#"{"inputs":[null]}"#).unwrap_err().contains("null, expected an object"));
    for line in ["[]", r#"[[0.5],{"plain":[1]}]"#] {
        let found = Sample::from_json(line, &schema()).unwrap_err().to_string();
        assert!(found.contains("sequence, expected an object"), "{found}");
    }
    let candidates = r#"{"dense":[0.5],"candidates":[[]]}"#;
    let found = Sample::request_from_json(candidates, &schema()).unwrap_err().to_string();
    assert!(found.contains("sequence, expected an object"), "{found}");
}
