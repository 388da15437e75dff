//! Inference over HTTP: a head of JSON, with the tensors in it or as binary data behind it, and an
//! answer of the same form.

use crate::describe;
use crate::http::{Answered, hold, reply, timeout_of};
use crate::infer::{Call, Order, Wanted, shorter_timeout, status_numbers, submit};
use crate::memory::{ByteBudget, Reservation};
use crate::problem::Problem;
use crate::tensors::{
    GENERATION, Layout, SCORE, STATUS, STATUS_FIELDS, Tensor, Values, batch_of, keys_of,
};
use hatchback::Schema;
use hatchback::request::pipeline::Answer;
use hatchback::schema::batch::Batch;
use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, StatusCode};
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The header with the length of the JSON before the binary data.
pub const HEAD_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");
/// Most bytes in memory for a byte of JSON: a number of one digit with its comma is kept as 16
/// bytes and converted to 8, in vectors with twice the room that they need.
const GROWTH: usize = 32;
/// Bytes of a number in JSON, with its comma.
const NUMBER_BYTES: usize = 24;
/// Bytes of an answer beside its numbers and names.
const ANSWER_BYTES: usize = 1024;

/// The JSON of a request. Unknown fields are skipped.
#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    id: String,
    #[serde(default)]
    parameters: HeadParameters,
    inputs: Vec<HeadInput>,
    #[serde(default)]
    outputs: Vec<HeadOutput>,
}

#[derive(Default, Deserialize)]
struct HeadParameters {
    /// Microseconds to the deadline; 0 is no limit.
    timeout: Option<i64>,
    #[serde(default)]
    binary_data_output: bool,
}

#[derive(Deserialize)]
struct HeadInput {
    name: String,
    datatype: String,
    shape: Vec<i64>,
    #[serde(default)]
    parameters: InputParameters,
    data: Option<Numbers>,
}

#[derive(Default, Deserialize)]
struct InputParameters {
    binary_data_size: Option<usize>,
}

#[derive(Deserialize)]
struct HeadOutput {
    name: String,
    #[serde(default)]
    parameters: OutputParameters,
}

#[derive(Default, Deserialize)]
struct OutputParameters {
    #[serde(default)]
    binary_data: bool,
}

/// A number of JSON.
#[derive(Clone, Copy)]
enum Number {
    Integer(i64),
    Large(u64),
    Real(f64),
}

/// The numbers of a tensor; nested arrays are flattened.
struct Numbers(Vec<Number>);

impl<'de> Deserialize<'de> for Numbers {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut numbers = Vec::new();
        from.deserialize_any(Flatten(&mut numbers))?;
        Ok(Self(numbers))
    }
}

/// Adds numbers, and those of arrays in arrays, to a list.
struct Flatten<'a>(&'a mut Vec<Number>);

impl<'de> Visitor<'de> for Flatten<'_> {
    type Value = ();

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("numbers, or arrays of numbers")
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.0.push(Number::Integer(value));
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.0.push(i64::try_from(value).map_or(Number::Large(value), Number::Integer));
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        self.0.push(Number::Real(value));
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(Flatten(self.0))?.is_some() {}
        Ok(())
    }
}

impl<'de> serde::de::DeserializeSeed<'de> for Flatten<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

/// The values of a tensor that the JSON holds.
enum Held {
    I64(Vec<i64>),
    U64(Vec<u64>),
    F32(Vec<f32>),
    /// The tensor's values are binary data.
    Binary,
}

impl Held {
    fn of(input: &HeadInput) -> Result<Self, Problem> {
        let Some(Numbers(numbers)) = &input.data else { return Ok(Self::Binary) };
        let wrong = || {
            let (name, datatype) = (input.name.escape_debug(), input.datatype.escape_debug());
            Problem::invalid(format!("input `{name}`: its data has values that are no {datatype}"))
        };
        let numbers = numbers.iter();
        Ok(match input.datatype.as_str() {
            "FP32" => Self::F32(numbers.map(|number| real(*number)).collect()),
            "UINT64" => {
                let values = numbers.map(|number| match *number {
                    Number::Integer(value) => u64::try_from(value).ok(),
                    Number::Large(value) => Some(value),
                    Number::Real(_) => None,
                });
                Self::U64(values.collect::<Option<_>>().ok_or_else(wrong)?)
            }
            _ => {
                let values = numbers.map(|number| match *number {
                    Number::Integer(value) => Some(value),
                    Number::Large(_) | Number::Real(_) => None,
                });
                Self::I64(values.collect::<Option<_>>().ok_or_else(wrong)?)
            }
        })
    }
}

fn real(number: Number) -> f32 {
    match number {
        Number::Integer(value) => value as f32,
        Number::Large(value) => value as f32,
        Number::Real(value) => value as f32,
    }
}

/// The path of a request for scores.
pub struct Target<'a> {
    pub model: &'a str,
    pub version: &'a str,
}

/// Answers `body`.
///
/// # Errors
/// The request is malformed, refused, or has no scores.
pub async fn infer(
    call: &mut Call<'_>,
    target: Target<'_>,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Answered, Problem> {
    let (head, binary) = parse(headers, body, &mut call.memory)?;
    let wants = Wants::of(&head)?;
    let held = head.inputs.iter().map(Held::of).collect::<Result<Vec<_>, _>>()?;
    let tensors = tensors_of(&head, &held, binary)?;
    let order = Order {
        model: target.model,
        version: target.version,
        timeout: shorter_timeout(timeout_parameter(&head)?, None),
        tensors: &tensors,
    };
    let submitted = submit(call, &order)?;

    let scored = submitted.wait().await?;
    let mut memory = call.front.bytes.reserve(ANSWER_BYTES + head.id.len() + target.model.len())?;
    scored.encode(call, &head.id, |answer| {
        let scores = answer.scores();
        let numbers = scores.values.len() + scores.statuses.len() * STATUS_FIELDS;
        memory.grow(2 * NUMBER_BYTES * numbers)?;
        Ok(response(target.model, &head.id, wants, answer, memory))
    })
}

/// Queues the keys of `body` to prefetch. Returns how many had room.
///
/// # Errors
/// The request is malformed or does not fit the model.
pub fn prefetch(
    call: &mut Call<'_>,
    target: Target<'_>,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<usize, Problem> {
    let Target { model, version } = target;
    let front = call.front;
    describe::version(front, model, version)?;
    let (head, binary) = parse(headers, body, &mut call.memory)?;
    let held = head.inputs.iter().map(Held::of).collect::<Result<Vec<_>, _>>()?;
    let tensors = tensors_of(&head, &held, binary)?;
    let layout = front.layout(model)?;
    let batch_max = front.serving.budget(model).map_or(1, |budget| budget.batch_max as usize);
    let batch = keys_of(&layout, &tensors, batch_max, &mut call.memory)?;
    let queue = |f: usize| front.serving.prefetch(model, f, batch.bags(f).keys);
    Ok((0..batch.features()).map(queue).sum())
}

/// Returns the batch of `body`, a request to a model with `schema` whose JSON has `head_bytes`
/// bytes; for fuzzing. Never keeps more bytes than the front door's budget allows.
///
/// # Errors
/// Those of a request.
pub fn decode(
    body: &[u8],
    head_bytes: usize,
    schema: &Arc<Schema>,
    batch_max: usize,
) -> Result<Batch, Problem> {
    let budget = ByteBudget::new(64 << 20);
    let mut memory = budget.reserve(2 * body.len())?;
    let mut headers = HeaderMap::new();
    headers.insert(HEAD_LENGTH, HeaderValue::from(head_bytes));
    let (head, binary) = parse(&headers, body, &mut memory)?;
    Wants::of(&head)?;
    timeout_parameter(&head)?;
    let held = head.inputs.iter().map(Held::of).collect::<Result<Vec<_>, _>>()?;
    let tensors = tensors_of(&head, &held, binary)?;
    batch_of(&Layout::new(Arc::clone(schema)), &tensors, batch_max, &mut memory)
}

/// Returns the JSON of a request, and the binary data behind it.
fn parse<'a>(
    headers: &HeaderMap,
    body: &'a [u8],
    memory: &mut Reservation,
) -> Result<(Head, &'a [u8]), Problem> {
    let length = match headers.get(HEAD_LENGTH) {
        None => body.len(),
        Some(value) => {
            let length = value.to_str().ok().and_then(|text| text.parse::<usize>().ok());
            length.ok_or_else(|| Problem::invalid(format!("{HEAD_LENGTH}: {value:?}")))?
        }
    };
    let Some((json, binary)) = body.split_at_checked(length) else {
        let bytes = body.len();
        return Err(Problem::invalid(format!("{HEAD_LENGTH}: {length} of {bytes} bytes")));
    };
    memory.grow(GROWTH * json.len())?;
    let head = serde_json::from_slice(json).map_err(|e| Problem::invalid(e.to_string()))?;
    Ok((head, binary))
}

fn timeout_parameter(head: &Head) -> Result<Option<Duration>, Problem> {
    let timeout = head.parameters.timeout.map(timeout_of).transpose()?;
    Ok(timeout.filter(|timeout| !timeout.is_zero()))
}

fn tensors_of<'a>(
    head: &'a Head,
    held: &'a [Held],
    mut binary: &'a [u8],
) -> Result<Vec<Tensor<'a>>, Problem> {
    let mut tensors = Vec::with_capacity(held.len());
    for (input, held) in head.inputs.iter().zip(held) {
        let fault = |problem: &str| {
            Problem::invalid(format!("input `{}`: {problem}", input.name.escape_debug()))
        };
        let values = match (held, input.parameters.binary_data_size) {
            (Held::Binary, Some(bytes)) => {
                let (own, rest) = binary.split_at_checked(bytes).ok_or_else(|| {
                    fault("binary_data_size is more than the bytes of the request")
                })?;
                binary = rest;
                Values::Bytes(own)
            }
            (Held::Binary, None) => return Err(fault("has no data")),
            (_, Some(_)) => return Err(fault("has data and binary data")),
            (Held::I64(values), None) if input.datatype == "INT32" => Values::I64(values),
            (Held::I64(values), None) => Values::I64(values),
            (Held::U64(values), None) => Values::U64(values),
            (Held::F32(values), None) => Values::F32(values),
        };
        // JSON has no widths: an INT32 of JSON is an INT64 with the same value.
        let is_wide = matches!(values, Values::I64(_)) && input.datatype == "INT32";
        let datatype = if is_wide { "INT64" } else { &input.datatype };
        tensors.push(Tensor { name: &input.name, datatype, shape: &input.shape, values });
    }
    if !binary.is_empty() {
        return Err(Problem::invalid(format!("{} bytes belong to no input", binary.len())));
    }
    Ok(tensors)
}

/// Which outputs a request wants, and which of them as binary data.
#[derive(Clone, Copy)]
struct Wants {
    any: Wanted,
    binary: Wanted,
}

impl Wants {
    fn of(head: &Head) -> Result<Self, Problem> {
        let is_binary = head.parameters.binary_data_output;
        if head.outputs.is_empty() {
            let binary = if is_binary { Wanted::ALL } else { Wanted::NONE };
            return Ok(Self { any: Wanted::ALL, binary });
        }
        let mut wants = Self { any: Wanted::NONE, binary: Wanted::NONE };
        for HeadOutput { name, parameters } in &head.outputs {
            wants.any.add(name)?;
            if parameters.binary_data || is_binary {
                wants.binary.add(name)?;
            }
        }
        Ok(wants)
    }
}

/// The JSON of an answer.
#[derive(Serialize)]
struct AnswerHead<'a> {
    model_name: &'a str,
    model_version: String,
    #[serde(skip_serializing_if = "str::is_empty")]
    id: &'a str,
    outputs: Vec<AnswerOutput<'a>>,
}

#[derive(Serialize)]
struct AnswerOutput<'a> {
    name: &'a str,
    datatype: &'a str,
    shape: Vec<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<AnswerParameters>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<AnswerData<'a>>,
}

#[derive(Serialize)]
struct AnswerParameters {
    binary_data_size: usize,
}

#[derive(Serialize)]
#[serde(untagged)]
enum AnswerData<'a> {
    Scores(&'a [f32]),
    Statuses(Vec<i32>),
    Generation([u64; 1]),
}

/// Outputs of an answer, and the binary data of those that are wanted so.
#[derive(Default)]
struct Outputs<'a> {
    outputs: Vec<AnswerOutput<'a>>,
    binary: Vec<u8>,
}

impl<'a> Outputs<'a> {
    fn add(&mut self, mut output: AnswerOutput<'a>, is_binary: bool) {
        if is_binary {
            let before = self.binary.len();
            match output.data.take() {
                Some(AnswerData::Scores(v)) => {
                    self.binary.extend(v.iter().flat_map(|value| value.to_le_bytes()));
                }
                Some(AnswerData::Statuses(v)) => {
                    self.binary.extend(v.iter().flat_map(|value| value.to_le_bytes()));
                }
                Some(AnswerData::Generation([v])) => self.binary.extend(v.to_le_bytes()),
                None => {}
            }
            let binary_data_size = self.binary.len() - before;
            output.parameters = Some(AnswerParameters { binary_data_size });
        }
        self.outputs.push(output);
    }
}

fn response(
    model_name: &str,
    id: &str,
    wants: Wants,
    answer: &Answer<'_>,
    memory: Reservation,
) -> Answered {
    let (scores, generation) = (answer.scores(), answer.generation().sequence);
    let samples = scores.statuses.len();
    let mut outputs = Outputs::default();
    let output = |name, datatype, shape: &[usize], data| AnswerOutput {
        name,
        datatype,
        shape: shape.to_vec(),
        parameters: None,
        data: Some(data),
    };
    if wants.any.score {
        let shape = [samples, scores.values.len() / samples.max(1)];
        let data = AnswerData::Scores(scores.values);
        outputs.add(output(SCORE, "FP32", &shape, data), wants.binary.score);
    }
    if wants.any.status {
        let numbers = scores.statuses.iter().flat_map(status_numbers).collect();
        let data = AnswerData::Statuses(numbers);
        outputs.add(output(STATUS, "INT32", &[samples, STATUS_FIELDS], data), wants.binary.status);
    }
    if wants.any.generation {
        let data = AnswerData::Generation([generation]);
        outputs.add(output(GENERATION, "INT64", &[1], data), wants.binary.generation);
    }

    let Outputs { outputs, binary } = outputs;
    let model_version = generation.to_string();
    let head = AnswerHead { model_name, model_version, id, outputs };
    // Numbers and text always serialize.
    let mut bytes = serde_json::to_vec(&head).unwrap_or_default();
    if binary.is_empty() {
        return reply(StatusCode::OK, "application/json", hold(bytes, memory));
    }
    let length = HeaderValue::from(bytes.len());
    bytes.extend_from_slice(&binary);
    let mut answered = reply(StatusCode::OK, "application/octet-stream", hold(bytes, memory));
    answered.headers_mut().insert(HEAD_LENGTH, length);
    answered
}
