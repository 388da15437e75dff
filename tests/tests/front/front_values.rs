//! Raw values over gRPC and HTTP: in each form that the protocol has, the values of a feature with
//! a key function become the keys that `hatchback run` makes of them.

use hatchback::schema::batch::Batch;
use hatchback::schema::key_function::{KeyFunction, KeyHash, Side, Unknown};
use hatchback::schema::sample::Sample;
use hatchback::schema::vocabulary::Vocabulary;
use hatchback::schema::{Feature, Network, Schema};
use hatchback_server::decode_request;
use hatchback_server::proto::{InferInputTensor, InferTensorContents, ModelInferRequest};
use hatchback_tests::random::Random;
use hyper::body::Bytes;
use prost::Message;
use serde_json::{Value, json};
use std::sync::Arc;

const NAMES: [&str; 4] = ["hashed", "rest", "word", "bucket"];
const TYPES: [&str; 4] = ["BYTES", "INT64", "BYTES", "FP64"];
const HOTNESS: usize = 3;

fn schema() -> Arc<Schema> {
    let words = ["a", "\u{e4}", "", "two words"].iter().zip(5..);
    let words = Vocabulary::new(words.map(|(word, key)| ((*word).to_owned(), key)).collect());
    let unknown = Unknown::Buckets { first: 100, buckets: 7 };
    let functions = [
        KeyFunction::Hash { hash: KeyHash::Farmhash64, buckets: 1000, first: 2 },
        KeyFunction::Modulo { divisor: 97, first: 0 },
        KeyFunction::Vocabulary { words: Arc::new(words.unwrap()), unknown },
        KeyFunction::Buckets { boundaries: vec![-1.0, 0.0, 2.5], first: 3, side: Side::Above },
    ];
    let feature = |(name, key): (&&str, KeyFunction)| Feature {
        null: match *name {
            "hashed" => Some(4),
            "bucket" => Some(9),
            _ => None,
        },
        key,
        weighted: *name == "rest",
        ..Feature::plain(name, HOTNESS as u32)
    };
    let mut features: Vec<Feature> = NAMES.iter().zip(functions).map(feature).collect();
    let key = KeyFunction::Cross { columns: vec![0, 3], buckets: 1000, first: 0 };
    features.push(Feature { null: Some(1), key, ..Feature::plain("cross", 9) });
    Arc::new(Schema {
        dense_features: vec![],
        tables: vec![],
        features,
        lookups: vec![],
        network: Network { inputs: vec![], outputs: vec![] },
    })
}

/// Draws the values of `n` keys of feature `f`.
fn values(f: usize, n: usize, random: &mut Random) -> Vec<Value> {
    let texts = ["a", "\u{e4}", "", "two words", "\"q\"\\\n", "unseen"];
    (0..n)
        .map(|_| match f {
            0 | 3 if random.below(4) == 0 => Value::Null,
            0 | 2 => json!(texts[random.below(texts.len() as u64) as usize]),
            1 => json!(random.below(1 << 40) as i64 - (1 << 39)),
            _ => json!(random.below(80) as f64 / 8.0 - 5.0),
        })
        .collect()
}

/// The values of a feature, a bag a sample, and how its tensor is shaped.
struct Column {
    bags: Vec<Vec<Value>>,
    is_jagged: bool,
}

struct Tensor {
    name: String,
    datatype: &'static str,
    shape: Vec<usize>,
    data: Vec<Value>,
}

fn tensors(columns: &[Column]) -> Vec<Tensor> {
    let mut all = Vec::new();
    for (f, Column { bags, is_jagged }) in columns.iter().enumerate() {
        let name = |part: &str| format!("{}.{part}", NAMES[f]);
        let data: Vec<Value> = bags.iter().flatten().cloned().collect();
        let shape = if *is_jagged { vec![data.len()] } else { vec![bags.len(), bags[0].len()] };
        if f == 1 {
            let weights = (0..data.len()).map(|at| json!(at as f64 / 4.0)).collect();
            let (name, shape) = (name("weights"), shape.clone());
            all.push(Tensor { name, datatype: "FP32", shape, data: weights });
        }
        all.push(Tensor { name: name("values"), datatype: TYPES[f], shape, data });
        if *is_jagged {
            let ends = bags.iter().scan(0, |end, bag| {
                *end += bag.len();
                Some(json!(*end))
            });
            let offsets: Vec<Value> = std::iter::once(json!(0)).chain(ends).collect();
            let shape = vec![offsets.len()];
            all.push(Tensor { name: name("offsets"), datatype: "INT32", shape, data: offsets });
        }
    }
    all
}

/// Returns the binary data of a tensor.
fn binary(tensor: &Tensor) -> Vec<u8> {
    let of = |value: &Value| match tensor.datatype {
        "BYTES" => {
            let text = value.as_str().unwrap_or_default().as_bytes();
            [&(text.len() as u32).to_le_bytes()[..], text].concat()
        }
        "INT64" => value.as_i64().unwrap().to_le_bytes().to_vec(),
        "UINT64" => value.as_u64().unwrap().to_le_bytes().to_vec(),
        "INT32" => (value.as_i64().unwrap() as i32).to_le_bytes().to_vec(),
        "FP32" => (value.as_f64().unwrap() as f32).to_le_bytes().to_vec(),
        _ => value.as_f64().unwrap_or(f64::NAN).to_le_bytes().to_vec(),
    };
    tensor.data.iter().flat_map(of).collect()
}

fn contents(tensor: &Tensor) -> InferTensorContents {
    let (mut contents, data) = (InferTensorContents::default(), tensor.data.iter());
    match tensor.datatype {
        "BYTES" => {
            let text = |value: &Value| Bytes::from(value.as_str().unwrap_or_default().to_owned());
            contents.bytes_contents = data.map(text).collect();
        }
        "INT64" => contents.int64_contents = data.map(|v| v.as_i64().unwrap()).collect(),
        "UINT64" => contents.uint64_contents = data.map(|v| v.as_u64().unwrap()).collect(),
        "INT32" => contents.int_contents = data.map(|v| v.as_i64().unwrap() as i32).collect(),
        "FP32" => contents.fp32_contents = data.map(|v| v.as_f64().unwrap() as f32).collect(),
        _ => contents.fp64_contents = data.map(|v| v.as_f64().unwrap_or(f64::NAN)).collect(),
    }
    contents
}

/// Returns the batch of `tensors` in each form that the protocol has.
fn decoded(tensors: &[Tensor], schema: &Arc<Schema>) -> [Result<Batch, String>; 4] {
    let http = |is_binary: bool| {
        let (mut inputs, mut behind) = (Vec::new(), Vec::new());
        for tensor in tensors {
            let Tensor { name, datatype, shape, data } = tensor;
            let mut input = json!({"name": name, "datatype": datatype, "shape": shape});
            if is_binary {
                let bytes = binary(tensor);
                input["parameters"] = json!({"binary_data_size": bytes.len()});
                behind.extend(bytes);
            } else {
                input["data"] = json!(data);
            }
            inputs.push(input);
        }
        let head = json!({ "inputs": inputs }).to_string().into_bytes();
        let body = [&head[..], &behind].concat();
        decode_request(&body, Some(head.len()), schema, 8).map_err(|e| e.to_string())
    };
    let grpc = |is_raw: bool| {
        let input = |tensor: &Tensor| InferInputTensor {
            name: tensor.name.clone(),
            datatype: tensor.datatype.to_owned(),
            shape: tensor.shape.iter().map(|side| *side as i64).collect(),
            contents: (!is_raw).then(|| contents(tensor)),
            ..InferInputTensor::default()
        };
        let raw = tensors.iter().filter(|_| is_raw).map(|t| binary(t).into()).collect();
        let request = ModelInferRequest {
            inputs: tensors.iter().map(input).collect(),
            raw_input_contents: raw,
            ..ModelInferRequest::default()
        };
        decode_request(&request.encode_to_vec(), None, schema, 8).map_err(|e| e.to_string())
    };
    [http(false), http(true), grpc(false), grpc(true)]
}

/// Returns the batch that the samples of `columns` become as lines of JSON.
fn expected(columns: &[Column], schema: &Arc<Schema>) -> Batch {
    let samples = columns[0].bags.len();
    let (mut batch, mut weight) = (Batch::new(schema, samples), 0);
    for sample in 0..samples {
        let bag = |f: usize| json!(columns[f].bags[sample]);
        let sparse: Value = (0..NAMES.len()).map(|f| (NAMES[f].to_owned(), bag(f))).collect();
        let weights = columns[1].bags[sample].iter().map(|_| {
            weight += 1;
            f64::from(weight - 1) / 4.0
        });
        let weights = json!({ "rest": weights.collect::<Vec<_>>() });
        let line = json!({"dense": [], "sparse": sparse, "weights": weights}).to_string();
        batch.push(schema, &Sample::from_json(&line, schema).unwrap()).unwrap();
    }
    batch
}

fn draw(random: &mut Random) -> Vec<Column> {
    let samples = 1 + random.below(8) as usize;
    let column = |f: usize| {
        let (is_jagged, width) = (random.below(2) == 0, random.below(HOTNESS as u64 + 1) as usize);
        let mut bag = || {
            let n = if is_jagged { random.below(HOTNESS as u64 + 1) as usize } else { width };
            values(f, n, random)
        };
        Column { bags: (0..samples).map(|_| bag()).collect(), is_jagged }
    };
    (0..NAMES.len()).map(column).collect()
}

#[test]
fn raw_values_become_the_keys_that_lines_of_json_become() {
    let (schema, mut random) = (schema(), Random::new(11));
    for round in 0..300 {
        let columns = draw(&mut random);
        let expected = format!("{:?}", expected(&columns, &schema));
        for found in decoded(&tensors(&columns), &schema) {
            assert_eq!(format!("{:?}", found.unwrap()), expected, "round {round}");
        }
    }
}

#[test]
fn a_value_that_a_key_function_does_not_take_is_named() {
    let schema = schema();
    let one = |f: usize, datatype, value: Value| Tensor {
        name: format!("{}.values", NAMES[f]),
        datatype,
        shape: vec![1, 1],
        data: vec![value],
    };
    let long = json!("a".repeat(1025));
    let cases = [
        (one(1, "BYTES", json!("a")), "sample 0: the text `a` is not an integer of 64"),
        (one(0, "FP64", json!(0.5)), "input `hashed.values`: sample 0: 0.5 is not a text"),
        (one(2, "BYTES", long), "is not one of at most 1024 bytes"),
        (Tensor { name: "bucket.keys".to_owned(), ..one(3, "BYTES", json!("a")) }, "takes INT64"),
        (Tensor { name: "plain.values".to_owned(), ..one(0, "BYTES", json!("a")) }, "no such"),
    ];
    for (tensor, expected) in cases {
        for found in decoded(&[tensor], &schema) {
            let found = found.unwrap_err();
            assert!(found.contains(expected), "{found}");
        }
    }
    // Binary data has an empty text, which is a word like any other without a key of null.
    let [http, ..] = decoded(&[one(2, "BYTES", Value::Null)], &schema);
    let null = "input `word.values`: sample 0: null is not a text or an integer";
    assert!(http.unwrap_err().contains(null));
    let keys = Tensor { name: "hashed".to_owned(), ..one(0, "INT64", json!(1)) };
    for found in decoded(&[keys, one(3, "FP64", json!(0.5))], &schema) {
        let place = "sample 0 of feature `hashed`, for the cross `cross`: keys, and";
        assert!(found.unwrap_err().contains(place));
    }
    let twice = [
        one(0, "BYTES", json!("a")),
        Tensor { name: "hashed".to_owned(), ..one(0, "INT64", json!(1)) },
    ];
    for found in decoded(&twice, &schema) {
        assert!(found.unwrap_err().contains("beside the feature's other form"));
    }
}

#[test]
fn a_number_is_the_same_in_every_type() {
    let schema = schema();
    let of = |datatype, value: Value| {
        let name = format!("{}.values", NAMES[3]);
        let tensor = Tensor { name, datatype, shape: vec![2], data: vec![value.clone(), value] };
        let name = format!("{}.offsets", NAMES[3]);
        let (shape, data) = (vec![2], vec![json!(0), json!(2)]);
        let offsets = Tensor { name, datatype: "INT32", shape, data };
        decoded(&[tensor, offsets], &schema).map(|batch| format!("{:?}", batch.unwrap()))
    };
    let all = of("FP64", json!(2));
    for datatype in ["FP32", "INT32", "INT64", "UINT64", "FP64"] {
        assert_eq!(of(datatype, json!(2)), all, "{datatype}");
    }
    let negative = of("FP64", json!(-2));
    assert_ne!(negative[0], all[0]);
    for datatype in ["FP32", "INT32", "INT64"] {
        assert_eq!(of(datatype, json!(-2)), negative, "{datatype}");
    }
}

/// Returns the problem of one raw tensor of texts over gRPC.
fn refused(datatype: &str, shape: &[i64], values: &[u8]) -> String {
    let input = InferInputTensor {
        name: "word.values".to_owned(),
        datatype: datatype.to_owned(),
        shape: shape.to_vec(),
        ..InferInputTensor::default()
    };
    let request = ModelInferRequest {
        inputs: vec![input],
        raw_input_contents: vec![Bytes::copy_from_slice(values)],
        ..ModelInferRequest::default()
    };
    decode_request(&request.encode_to_vec(), None, &schema(), 8).unwrap_err().to_string()
}

#[test]
fn texts_that_are_cut_short_too_many_or_no_texts_are_refused() {
    let all: [(&str, &[i64], &[u8], &str); 8] = [
        ("BYTES", &[1], b"\x01\0\0", "in the middle"),
        ("BYTES", &[1], b"\x02\0\0\0a", "one: text 0 has 2 bytes, and 1 are left"),
        // The mark of a null among the values of JSON is only a length here.
        ("BYTES", &[1], b"\xff\xff\xff\xff", "text 0 has 4294967295 bytes, and 0 are left"),
        ("BYTES", &[1], b"\x01\0\0\0\xff", "not UTF-8"),
        ("BYTES", &[2], b"\x01\0\0\0a", "1 texts, and [2] has 2"),
        ("BYTES", &[1], b"\x01\0\0\0a\0\0\0\0", "more than 1 texts, and [1] has 1"),
        ("BYTES", &[-1], b"", "[-1] is not a shape"),
        ("BOOL", &[1], b"\x01", "BOOL; it takes BYTES"),
    ];
    for (datatype, shape, values, expected) in all {
        let found = refused(datatype, shape, values);
        assert!(found.contains(expected), "{found}");
    }
    // The list of texts takes four times the bytes of empty texts.
    let found = refused("BYTES", &[4 << 20], &vec![0; 16 << 20]);
    assert!(found.contains("bytes_max"), "{found}");
}

#[test]
fn json_of_another_type_than_its_tensor_is_refused_by_name() {
    let schema = schema();
    let ask = |datatype: &str, value: Value| {
        let input = json!({"name": "word.values", "datatype": datatype, "shape": [1],
            "data": [value]});
        let body = json!({ "inputs": [input] }).to_string();
        decode_request(body.as_bytes(), Some(body.len()), &schema, 8).unwrap_err().to_string()
    };
    let cases = [
        ("BYTES", json!(1)),
        ("FP32", json!("a")),
        ("FP64", json!("a")),
        ("INT64", json!(0.5)),
        ("INT64", json!(1u64 << 63)),
        ("INT32", json!("a")),
        ("INT32", json!(1i64 << 31)),
        ("INT32", json!(-(1i64 << 31) - 1)),
        ("INT32", json!(i64::MAX)),
        ("FP32", json!(1e39)),
        ("UINT64", json!(-1)),
    ];
    for (datatype, value) in cases {
        let found = ask(datatype, value);
        let expected = format!("input `word.values`: its data has values that are not {datatype}");
        assert_eq!(found, expected);
    }
}

#[test]
fn typed_values_of_grpc_in_the_field_of_another_type_are_refused() {
    let ask = |datatype: &str, contents: InferTensorContents| {
        let input = InferInputTensor {
            name: "rest.values".to_owned(),
            datatype: datatype.to_owned(),
            shape: vec![1, 1],
            contents: Some(contents),
            ..InferInputTensor::default()
        };
        let request = ModelInferRequest { inputs: vec![input], ..ModelInferRequest::default() };
        decode_request(&request.encode_to_vec(), None, &schema(), 8).unwrap_err().to_string()
    };
    let int = InferTensorContents { int_contents: vec![1], ..InferTensorContents::default() };
    let both = InferTensorContents { int64_contents: vec![1], ..int.clone() };
    for contents in [int.clone(), both] {
        let expected = "INT64 values belong into `int64_contents`, not `int_contents`";
        assert_eq!(ask("INT64", contents), format!("input `rest.values`: {expected}"));
    }
    assert!(ask("FP32", int.clone()).contains("belong into `fp32_contents`, not `int_contents`"));
    assert!(ask("BYTES", int.clone()).contains("belong into `bytes_contents`, not"));
    assert!(ask("BOOL", int).contains("BOOL; it takes BYTES"));
}
