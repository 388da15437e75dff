//! An answer names the inputs that were not read, and the features that were not sent, over HTTP
//! and gRPC. The metrics count both.

use crate::front_pages::{get, infer, open, post};
use hatchback_server::proto::{
    InferInputTensor, InferParameter, InferRequestedOutputTensor, ModelInferRequest,
    ModelInferResponse, ParameterValue,
};
use hatchback_tests::front_door::FrontDoor;
use serde_json::{Value, json};
use std::collections::HashMap;

const WIDTH: usize = 7;

/// Sends dense features and the optional input `other`, which the model does not have.
fn over_http(door: &FrontDoor, is_optional: bool) -> (u16, Value) {
    let dense = json!({"name": "dense", "datatype": "FP32", "shape": [1, WIDTH],
        "data": [[0.5, 1, 2, 3, 4, 5, 6]]});
    let other = json!({"name": "other", "datatype": "INT64", "shape": [1, 1], "data": [[1]],
        "parameters": {"optional": is_optional}});
    let body = json!({"inputs": [dense, other]}).to_string();
    post(door, "/v2/models/coupon/infer", &body)
}

fn over_grpc(door: &FrontDoor, optional: ParameterValue) -> Result<ModelInferResponse, String> {
    let input = |name: &str, datatype: &str, shape: Vec<i64>| InferInputTensor {
        name: name.to_owned(),
        datatype: datatype.to_owned(),
        shape,
        ..Default::default()
    };
    let mut other = input("other", "INT64", vec![1, 1]);
    let optional = InferParameter { parameter_choice: Some(optional) };
    other.parameters.insert("optional".to_owned(), optional);
    let request = ModelInferRequest {
        model_name: "coupon".to_owned(),
        inputs: vec![input("dense", "FP32", vec![1, WIDTH as i64]), other],
        raw_input_contents: vec![vec![0; 4 * WIDTH].into(), vec![0; 8].into()],
        ..Default::default()
    };
    infer(door, &request)
}

#[test]
fn an_answer_names_what_was_ignored_and_absent_and_the_metrics_count_it() {
    let door = open();
    let schema = door.serving.model("coupon").unwrap().schema().clone();
    let features: Vec<&str> = schema.features.iter().map(|f| f.name.as_str()).collect();
    let absent = features.join(",");

    let (code, answer) = over_http(&door, true);
    assert_eq!(code, 200, "{answer}");
    assert_eq!(answer["parameters"], json!({"absent_inputs": absent, "ignored_inputs": "other"}));
    let answer = over_grpc(&door, ParameterValue::BoolParam(true)).unwrap();
    let text = |name: &str| match &answer.parameters[name].parameter_choice {
        Some(ParameterValue::StringParam(text)) => text.clone(),
        other => panic!("{name}: {other:?}"),
    };
    assert_eq!((text("ignored_inputs").as_str(), text("absent_inputs")), ("other", absent));
    assert_eq!(answer.parameters.len(), 2);

    // An input that the caller needs is no difference but an error.
    let (code, refused) = over_http(&door, false);
    assert_eq!(code, 400);
    assert!(refused["error"].as_str().unwrap().contains("input `other`: the model has no such"));
    assert!(over_grpc(&door, ParameterValue::BoolParam(false)).unwrap_err().contains("no such"));
    let wrong = over_grpc(&door, ParameterValue::StringParam("yes".to_owned())).unwrap_err();
    assert!(wrong.contains("input `other`: `optional` is no truth value"), "{wrong}");

    let line = |outcome: &str, count: usize| {
        format!("hatchback_inputs_total{{model=\"coupon\",outcome=\"{outcome}\"}} {count}\n")
    };
    // The metrics are made once a second.
    let lines = [line("ignored", 2), line("absent", 2 * features.len())];
    loop {
        let text = get(&door, "/metrics");
        if lines.iter().all(|line| text.contains(line)) {
            break;
        }
        std::thread::yield_now();
    }
}

/// The protocol lets the parameter of an output override that of the request.
#[test]
fn an_output_that_is_asked_for_as_text_is_text_in_a_binary_answer() {
    let door = open();
    let dense =
        json!({"name": "dense", "datatype": "FP32", "shape": [1, WIDTH], "data": vec![0; WIDTH]});
    let output = json!({"name": "score", "parameters": {"binary_data": false}});
    let parameters = json!({"binary_data_output": true});
    let body = json!({"inputs": [dense], "outputs": [output], "parameters": parameters});
    let (code, answer) = post(&door, "/v2/models/coupon/infer", &body.to_string());
    assert!(code == 200 && answer["outputs"][0]["data"][0].is_number(), "{answer}");
}

/// A caller that gets other numbers than it asked for would take them for those.
#[test]
fn a_tensor_in_classes_or_in_shared_memory_is_refused() {
    let door = open();
    let dense = json!({"name": "dense", "datatype": "FP32", "shape": [1, WIDTH],
        "data": [0.5, 1, 2, 3, 4, 5, 6]});
    let values = [
        ("classification", json!(2), ParameterValue::Int64Param(2)),
        ("shared_memory_region", json!("r"), ParameterValue::StringParam("r".to_owned())),
    ];
    for (parameter, value, choice) in values {
        let said =
            |tensor: &str| format!("{tensor}: the parameter `{parameter}` is not implemented");
        let parameters = json!({parameter: value});
        let output = json!({"name": "score", "parameters": parameters});
        let input =
            json!({"name": "x", "datatype": "FP32", "shape": [1], "parameters": parameters});
        for (body, tensor) in [
            (json!({"inputs": [dense], "outputs": [output]}), "output `score`"),
            (json!({"inputs": [dense, input]}), "input `x`"),
        ] {
            let (code, answer) = post(&door, "/v2/models/coupon/infer", &body.to_string());
            assert_eq!((code, answer["error"].as_str()), (501, Some(said(tensor).as_str())));
        }

        let choice = InferParameter { parameter_choice: Some(choice) };
        let parameters = HashMap::from([(parameter.to_owned(), choice)]);
        let request = ModelInferRequest { model_name: "coupon".to_owned(), ..Default::default() };
        let with_output = ModelInferRequest {
            outputs: vec![InferRequestedOutputTensor {
                name: "score".to_owned(),
                parameters: parameters.clone(),
            }],
            ..request.clone()
        };
        let input = InferInputTensor { name: "x".to_owned(), parameters, ..Default::default() };
        let with_input = ModelInferRequest { inputs: vec![input], ..request };
        for (request, tensor) in [(with_output, "output `score`"), (with_input, "input `x`")] {
            assert!(infer(&door, &request).unwrap_err().contains(&said(tensor)));
        }
    }
}
