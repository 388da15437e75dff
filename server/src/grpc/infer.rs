//! `ModelInfer` over gRPC: from the message of a request to the message of its answer.

use crate::connections::memory::{ByteBudget, Share};
use crate::grpc;
use crate::grpc::request::Request;
use crate::grpc::wire::{write_bytes, write_head, write_packed};
use crate::http::Answered;
use crate::infer::{Call, Order, Shown, shorter_timeout, submit};
use crate::limits::REQUEST_BYTES;
use crate::problem::Problem;
use crate::tensors::outputs::{Want, Wants};
use crate::tensors::{Layout, Read, batch_of};
use hatchback::Schema;
use hatchback::schema::batch::Batch;
use hyper::body::Bytes;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of an answer, and of each of its outputs, beside numbers and names.
const ANSWER_BYTES: usize = 64;
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
        let tensors = request.tensors()?;
        let order = Order {
            model: request.model,
            version: request.version,
            timeout: shorter_timeout(request.timeout, timeout),
            tensors: &tensors,
            asked: &request.asked,
            every: Want::Binary,
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
    Wants::new(&layout.outputs, &request.asked, Want::Binary)?;
    batch_of(&layout, &request.tensors()?, Read::All, batch_max, &mut memory)
}

/// Returns the framed message of an answer, a `ModelInferResponse`. Counts it in the memory of
/// `call`.
fn response(shown: &Shown<'_>, id: &str, call: &mut Call<'_>) -> Result<Vec<u8>, Problem> {
    let outputs = shown.outputs().map(|(output, _, _)| ANSWER_BYTES + output.name.len());
    let names = call.model.len() + id.len() + outputs.sum::<usize>();
    let bytes_max = ANSWER_BYTES + names + NUMBER_BYTES * shown.numbers();
    call.memory.grow(bytes_max)?;

    let mut message = grpc::open_frame(bytes_max);
    write_bytes(&mut message, 1, call.model.as_bytes());
    write_bytes(&mut message, 2, shown.sequence().to_string().as_bytes());
    write_bytes(&mut message, 3, id.as_bytes());
    let mut tensor = Vec::with_capacity(ANSWER_BYTES);
    for (output, _, numbers) in shown.outputs() {
        tensor.clear();
        write_bytes(&mut tensor, 1, output.name.as_bytes());
        write_bytes(&mut tensor, 2, output.datatype().as_bytes());
        write_packed(&mut tensor, 3, &numbers.shape());
        write_bytes(&mut message, 5, &tensor);
    }
    for (output, _, numbers) in shown.outputs() {
        write_head(&mut message, 6, output.number_bytes() * numbers.count());
        numbers.write(&mut message);
    }
    Ok(grpc::close_frame(message))
}
