//! A request for its best samples: positions and scores of these only, over HTTP and gRPC.

use crate::front_pages::{infer, open, open_with, post};
use hatchback::model::budget::Budget;
use hatchback_server::proto::{
    InferInputTensor, InferParameter, InferRequestedOutputTensor, InferTensorContents,
    ModelInferRequest, ModelInferResponse, ParameterValue,
};
use hatchback_tests::client::Client;
use hatchback_tests::front_door::FrontDoor;
use serde_json::{Value, json};
use std::cmp::Ordering;

const SAMPLES: usize = 9;
const WIDTH: usize = 7;

/// Dense features of samples, of which several are equal.
fn dense() -> Vec<f32> {
    (0..SAMPLES * WIDTH)
        .map(|at| [0.5, 3.0, 0.0, 1.0][at / WIDTH % 4] * (at % WIDTH) as f32)
        .collect()
}

/// Asks over HTTP for `outputs`, with the parameter `top_k` as JSON. Returns the outputs by name.
fn over_http(door: &FrontDoor, top_k: Option<Value>, outputs: &[&str]) -> Result<Value, String> {
    let input = json!({
        "name": "dense", "datatype": "FP32", "shape": [SAMPLES, WIDTH], "data": dense(),
    });
    let mut body = json!({"inputs": [input]});
    if let Some(k) = top_k {
        body["parameters"] = json!({ "top_k": k });
    }
    body["outputs"] = outputs.iter().map(|name| json!({ "name": name })).collect();
    let (code, answer) = post(door, "/v2/models/coupon/infer", &body.to_string());
    if code != 200 {
        return Err(answer["error"].as_str().unwrap().to_owned());
    }
    let outputs = answer["outputs"].as_array().unwrap().iter();
    Ok(outputs.map(|one| (one["name"].as_str().unwrap().to_owned(), one.clone())).collect())
}

/// Asks over gRPC for all outputs. Returns the answer, or the text of the refusal.
fn over_grpc(door: &FrontDoor, top_k: ParameterValue) -> Result<ModelInferResponse, String> {
    let input = InferInputTensor {
        name: "dense".to_owned(),
        datatype: "FP32".to_owned(),
        shape: vec![SAMPLES as i64, WIDTH as i64],
        contents: Some(InferTensorContents { fp32_contents: dense(), ..Default::default() }),
        ..Default::default()
    };
    let parameter = InferParameter { parameter_choice: Some(top_k) };
    let names = ["position", "score", "status"];
    let output =
        |name: &str| InferRequestedOutputTensor { name: name.to_owned(), ..Default::default() };
    let request = ModelInferRequest {
        model_name: "coupon".to_owned(),
        inputs: vec![input],
        parameters: [("top_k".to_owned(), parameter)].into(),
        outputs: names.map(output).to_vec(),
        ..Default::default()
    };
    infer(door, &request)
}

fn numbers(output: &Value) -> Vec<f64> {
    output["data"].as_array().unwrap().iter().map(|one| one.as_f64().unwrap()).collect()
}

#[test]
fn an_answer_has_the_best_samples_in_order_and_ties_by_position() {
    let door = open();
    let whole = over_http(&door, None, &[]).unwrap();
    assert!(whole.get("position").is_none());
    let scores = numbers(&whole["score"]);
    let mut order: Vec<usize> = (0..SAMPLES).collect();
    // A stable sort keeps the order of equal scores.
    order.sort_by(|a, b| scores[*b].partial_cmp(&scores[*a]).unwrap_or(Ordering::Equal));
    assert!(order.windows(2).any(|two| scores[two[0]] == scores[two[1]]));

    for k in [1, 4, SAMPLES, 1000] {
        let best = over_http(&door, Some(k.into()), &[]).unwrap();
        let want = &order[..k.min(SAMPLES)];
        assert_eq!(best["position"]["data"], json!(want));
        assert_eq!(best["position"]["shape"], json!([want.len()]));
        let expected: Vec<f64> = want.iter().map(|at| scores[*at]).collect();
        assert_eq!(numbers(&best["score"]), expected);
        assert_eq!(best["score"]["shape"], json!([want.len(), 1]));
        assert_eq!(best["status"]["shape"], json!([1, 5]), "the sum of all samples");

        let answer = over_grpc(&door, ParameterValue::Int64Param(k as i64)).unwrap();
        let raw = answer.raw_output_contents;
        assert_eq!(raw.len(), 3);
        let bytes: Vec<u8> = expected.iter().flat_map(|one| (*one as f32).to_le_bytes()).collect();
        let at = |name: &str| answer.outputs.iter().position(|one| one.name == name).unwrap();
        assert_eq!(raw[at("score")], bytes);
        let bytes: Vec<u8> = want.iter().flat_map(|one| (*one as i32).to_le_bytes()).collect();
        assert_eq!(raw[at("position")], bytes);
    }
    let named = over_http(&door, Some(2.into()), &["score"]).unwrap();
    assert_eq!(named.as_object().unwrap().len(), 1);
    let every = over_http(&door, None, &["position"]).unwrap();
    assert_eq!(every["position"]["data"], json!((0..SAMPLES).collect::<Vec<_>>()));
}

#[test]
fn a_number_of_samples_that_is_no_number_or_below_one_is_refused() {
    let door = open();
    for k in ["0", "-3", "\"ten\"", "\"3\"", "2.5", "1e2", "true", "[3]", "18446744073709551616"] {
        let refused = over_http(&door, Some(serde_json::from_str(k).unwrap()), &[]).unwrap_err();
        let is_number = serde_json::from_str::<Value>(k).unwrap().is_number();
        let number = serde_json::from_str::<Value>(k).unwrap().to_string();
        let shown = if is_number { &*number } else { "of another type" };
        let said = format!("parameters.top_k is {shown}, must be an integer of 1 or more");
        assert!(refused.contains(&said), "{refused}");
    }
    for (k, shown) in [
        (ParameterValue::Int64Param(0), "0"),
        (ParameterValue::Int64Param(i64::MIN), "-9223372036854775808"),
        (ParameterValue::BoolParam(true), "of another type"),
        (ParameterValue::StringParam("ten".to_owned()), "of another type"),
    ] {
        let refused = over_grpc(&door, k).unwrap_err();
        let said = format!("parameters.top_k is {shown}, must be an integer of 1 or more");
        assert!(refused.contains(&said), "{refused}");
    }
}

/// The answer of all outputs as text would take more memory than the front door has.
#[test]
fn a_binary_answer_is_charged_for_its_binary_bytes() {
    const MANY: usize = 1 << 16;
    let door = open_with(Budget { workers: 1, batch_max: MANY as u32, ..Budget::default() });
    let ask = |parameters: Value, output: &str| {
        let input = json!({
            "name": "dense", "datatype": "FP32", "shape": [MANY, WIDTH],
            "parameters": {"binary_data_size": 4 * WIDTH * MANY},
        });
        let mut head = json!({"inputs": [input], "parameters": parameters});
        if !output.is_empty() {
            head["outputs"] = json!([{ "name": output, "parameters": {"binary_data": true} }]);
        }
        let head = head.to_string().into_bytes();
        let length = head.len();
        let body = [head, vec![0; 4 * WIDTH * MANY]].concat();
        let path = "/v2/models/coupon/infer HTTP/1.1";
        let header = format!("{path}\r\ninference-header-content-length: {length}\r\nx: y");
        let mut client = Client::connect(&door.socket()).unwrap();
        client.send(&header, Some(&body)).unwrap();
        client.receive().unwrap()
    };
    for (parameters, output) in [(json!({"binary_data_output": true}), ""), (json!({}), "status")] {
        let answer = ask(parameters, output);
        let said = String::from_utf8_lossy(&answer.body[..answer.body.len().min(200)]).into_owned();
        assert_eq!(answer.code, 200, "{said}");
        assert!(answer.body.len() > 4 * 5 * MANY, "{said}");
    }
}
