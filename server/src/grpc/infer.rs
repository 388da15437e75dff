//! `ModelInfer` over gRPC: from the message of a request to the message of its answer.

use crate::connections::memory::{ByteBudget, Share};
use crate::grpc;
use crate::grpc::request::Request;
use crate::http::Answered;
use crate::infer::{Call, Order, Shown, shorter_timeout, submit};
use crate::limits::REQUEST_BYTES;
use crate::problem::Problem;
use crate::proto::{InferOutputTensor, InferParameter, ModelInferResponse, ParameterValue};
use crate::tensors::outputs::{Want, Wants};
use crate::tensors::{Layout, Read, batch_of};
use hatchback::Schema;
use hatchback::schema::batch::Batch;
use hyper::body::Bytes;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of an answer, and of each of its outputs, beside numbers and names.
const ANSWER_BYTES: usize = 256;
/// Bytes of a number of an answer, at most.
const NUMBER_BYTES: usize = 8;

/// Answers `body`, whose call waits for `timeout`.
///
/// # Errors
/// The request is malformed, refused, or has no scores.
pub async fn infer(
    call: &mut Call<'_>,
    body: Bytes,
    timeout: Option<Duration>,
) -> Result<Answered, Problem> {
    let message = grpc::message_of(&body)?;
    let (submitted, id) = {
        let request = Request::read(&message, &mut call.memory)?;
        let tensors = request.tensors(&mut call.memory)?;
        let order = Order {
            model: request.model,
            version: request.version,
            timeout: shorter_timeout(request.timeout, timeout),
            tensors: &tensors,
            asked: &request.asked,
            every: Want::Binary,
            top_k: request.top_k,
        };
        (submit(call, &order)?, request.id.to_owned())
    };
    // The slot has the samples.
    drop((message, body));
    call.memory.shrink(REQUEST_BYTES);

    let scored = submitted.wait().await;
    scored.encode(call, &id, |shown, call| Ok(grpc::reply(response(shown, &id, call)?.into())))
}

/// Decodes `message`, a request to a model with `schema`, into a batch; for fuzzing. Never keeps
/// more bytes than the front door's budget allows.
///
/// # Errors
/// The request is malformed, does not fit the model, or exceeds the budget.
pub fn decode(message: &[u8], schema: &Arc<Schema>, batch_max: usize) -> Result<Batch, Problem> {
    let mut memory = Share::new(&ByteBudget::new(64 << 20, 32 << 20)).reservation();
    memory.grow(message.len())?;
    let request = Request::read(message, &mut memory)?;
    let layout = Layout::new(Arc::clone(schema));
    Wants::new(&layout.outputs, &request.asked, Want::Binary, request.top_k.is_some())?;
    let tensors = request.tensors(&mut memory)?;
    batch_of(&layout, &tensors, Read::All, batch_max, &mut memory)
}

/// Returns the framed message of an answer. Counts it in the memory of `call`.
fn response(shown: &Shown<'_>, id: &str, call: &mut Call<'_>) -> Result<Vec<u8>, Problem> {
    let outputs = shown.outputs().map(|(output, _, _)| ANSWER_BYTES + output.name.len());
    let names = call.model.len() + id.len() + outputs.sum::<usize>();
    // In memory twice: as fields, and in the frame.
    call.memory.grow(2 * (ANSWER_BYTES + names + NUMBER_BYTES * shown.numbers()))?;

    let mut message = ModelInferResponse {
        model_name: call.model.clone(),
        model_version: shown.sequence().to_string(),
        id: id.to_owned(),
        ..Default::default()
    };
    for (name, inputs) in shown.differences().parameters() {
        let value = InferParameter { parameter_choice: Some(ParameterValue::StringParam(inputs)) };
        message.parameters.insert(name.to_owned(), value);
    }
    for (output, _, numbers) in shown.outputs() {
        let (name, datatype) = (output.name.clone(), output.datatype().to_owned());
        let shape = numbers.shape().iter().map(|side| *side as i64).collect();
        message.outputs.push(InferOutputTensor { name, datatype, shape });
        let mut bytes = Vec::with_capacity(output.number_bytes() * numbers.count());
        numbers.write(&mut bytes);
        message.raw_output_contents.push(bytes.into());
    }
    Ok(grpc::frame(&message))
}
