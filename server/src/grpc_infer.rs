//! `ModelInfer` over gRPC: the tensors of the message and the message of the answer.

use crate::grpc;
use crate::http::{Answered, timeout_of};
use crate::infer::{Call, Order, Wanted, shorter_timeout, status_numbers, submit};
use crate::memory::{ByteBudget, Reservation};
use crate::problem::Problem;
use crate::proto::{
    InferInputTensor, InferOutputTensor, InferParameter, InferTensorContents, ModelInferRequest,
    ModelInferResponse, ParameterValue,
};
use crate::scan::decoded_bytes_max;
use crate::tensors::{GENERATION, Layout, SCORE, STATUS, STATUS_FIELDS, Tensor, Values, batch_of};
use hatchback::Schema;
use hatchback::request::pipeline::Answer;
use hatchback::schema::batch::Batch;
use hyper::body::Bytes;
use prost::Message;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// Answers `body`, whose call waits for `timeout`.
///
/// # Errors
/// The request is malformed, refused, or has no scores.
pub async fn infer(
    call: &mut Call<'_>,
    body: &Bytes,
    timeout: Option<Duration>,
) -> Result<Answered, Problem> {
    let request = parse(body, &mut call.memory)?;
    let tensors = tensors_of(&request)?;
    let wanted = wanted_of(&request)?;
    let timeout = shorter_timeout(timeout_parameter(&request.parameters)?, timeout);
    let order = Order {
        model: &request.model_name,
        version: &request.model_version,
        timeout,
        tensors: &tensors,
    };
    let submitted = submit(call, &order)?;

    let scored = submitted.wait().await?;
    let memory = call.front.bytes.reserve(0)?;
    scored.encode(call, &request.id, |answer| {
        grpc::reply_with(&response(&request, wanted, answer), memory)
    })
}

/// Returns the batch of `message`, an encoded request to a model with `schema`; for fuzzing. Never
/// keeps more bytes than the front door's budget allows.
///
/// # Errors
/// Those of a call.
pub fn decode(message: &[u8], schema: &Arc<Schema>, batch_max: usize) -> Result<Batch, Problem> {
    let budget = ByteBudget::new(64 << 20);
    let mut memory = budget.reserve(2 * message.len())?;
    let framed = [&[0], &(message.len() as u32).to_be_bytes()[..], message].concat();
    let request = parse(&framed.into(), &mut memory)?;
    wanted_of(&request)?;
    timeout_parameter(&request.parameters)?;
    batch_of(&Layout::new(Arc::clone(schema)), &tensors_of(&request)?, batch_max, &mut memory)
}

fn parse(body: &Bytes, memory: &mut Reservation) -> Result<ModelInferRequest, Problem> {
    let message = grpc::message_of(body)?;
    memory.grow(decoded_bytes_max(&message)?)?;
    ModelInferRequest::decode(message).map_err(|e| Problem::invalid(e.to_string()))
}

fn wanted_of(request: &ModelInferRequest) -> Result<Wanted, Problem> {
    if request.outputs.is_empty() {
        return Ok(Wanted::ALL);
    }
    let mut wanted = Wanted::NONE;
    request.outputs.iter().try_for_each(|output| wanted.add(&output.name))?;
    Ok(wanted)
}

/// Returns the time in the parameter `timeout`, in microseconds; 0 is no limit.
fn timeout_parameter(
    parameters: &HashMap<String, InferParameter>,
) -> Result<Option<Duration>, Problem> {
    let value = parameters.get("timeout").and_then(|parameter| parameter.value.as_ref());
    let us = match value {
        None => return Ok(None),
        Some(ParameterValue::Int64(us)) => *us,
        Some(ParameterValue::Uint64(us)) => i64::try_from(*us).unwrap_or(i64::MAX),
        Some(other) => return Err(Problem::invalid(format!("timeout: {other:?}"))),
    };
    Ok(Some(timeout_of(us)?).filter(|timeout| !timeout.is_zero()))
}

fn tensors_of(request: &ModelInferRequest) -> Result<Vec<Tensor<'_>>, Problem> {
    let ModelInferRequest { inputs, raw_input_contents: raw, .. } = request;
    if !raw.is_empty() && raw.len() != inputs.len() {
        let (raw, inputs) = (raw.len(), inputs.len());
        return Err(Problem::invalid(format!("{raw} raw inputs and {inputs} inputs")));
    }
    let tensor = |number: usize, input| values_of(input, raw.get(number));
    inputs.iter().enumerate().map(|(number, input)| tensor(number, input)).collect()
}

fn values_of<'a>(
    input: &'a InferInputTensor,
    raw: Option<&'a Bytes>,
) -> Result<Tensor<'a>, Problem> {
    let InferInputTensor { name, datatype, shape, contents, .. } = input;
    let values = match (raw, contents) {
        (Some(raw), None) => Values::Bytes(raw),
        (Some(_), Some(_)) => {
            let name = name.escape_debug();
            let message = format!("input `{name}` has raw values and typed values");
            return Err(Problem::invalid(message));
        }
        (None, None) => Values::Bytes(&[]),
        (None, Some(contents)) => typed(datatype, contents),
    };
    Ok(Tensor { name, datatype, shape, values })
}

fn typed<'a>(datatype: &str, contents: &'a InferTensorContents) -> Values<'a> {
    match datatype {
        "FP32" => Values::F32(&contents.fp32_contents),
        "UINT64" => Values::U64(&contents.uint64_contents),
        "INT32" => Values::I32(&contents.int_contents),
        _ => Values::I64(&contents.int64_contents),
    }
}

fn response(
    request: &ModelInferRequest,
    wanted: Wanted,
    answer: &Answer<'_>,
) -> ModelInferResponse {
    let (scores, generation) = (answer.scores(), answer.generation().sequence);
    let samples = scores.statuses.len();
    let mut response = ModelInferResponse {
        model_name: request.model_name.clone(),
        model_version: generation.to_string(),
        id: request.id.clone(),
        ..Default::default()
    };
    let mut add = |name: &str, datatype: &str, shape: &[usize], raw: Vec<u8>| {
        let shape = shape.iter().map(|side| *side as i64).collect();
        let (name, datatype) = (name.to_owned(), datatype.to_owned());
        response.outputs.push(InferOutputTensor { name, datatype, shape });
        response.raw_output_contents.push(raw.into());
    };
    if wanted.score {
        let raw = scores.values.iter().flat_map(|score| score.to_le_bytes()).collect();
        add(SCORE, "FP32", &[samples, scores.values.len() / samples.max(1)], raw);
    }
    if wanted.status {
        let numbers = scores.statuses.iter().flat_map(status_numbers);
        let raw = numbers.flat_map(i32::to_le_bytes).collect();
        add(STATUS, "INT32", &[samples, STATUS_FIELDS], raw);
    }
    if wanted.generation {
        add(GENERATION, "INT64", &[1], generation.to_le_bytes().to_vec());
    }
    response
}
