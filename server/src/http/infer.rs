//! Inference over HTTP: a head of JSON, with the tensors in it or as binary data after it, and an
//! answer of the same form.

use crate::connections::memory::{ByteBudget, Reservation, Share};
use crate::http::{Answered, header_text, reply, timeout_of};
use crate::infer::{Call, Order, Shown, shorter_timeout, submit};
use crate::limits::REQUEST_BYTES;
use crate::models::describe;
use crate::problem::{Problem, checked, not_served};
use crate::tensors::outputs::{Asked, Numbers, Want, Wants};
use crate::tensors::values::{Tensor, Values};
use crate::tensors::{Layout, Read, batch_of};
use hatchback::schema::batch::Batch;
use hatchback::schema::raw_value::RawValue;
use hatchback::{Schema, Shortened};
use hyper::body::Bytes;
use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, StatusCode};
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The header with the length of the JSON before the binary data.
pub const HEAD_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");
/// Most bytes in memory for a byte of JSON: a number of one digit with its comma is kept as 24
/// bytes and converted to 8, a text of two quotes and a comma has a pointer of 16 bytes. The
/// vectors have twice the room that they need.
const GROWTH: usize = 32;
const _: () = assert!(2 * (size_of::<RawValue<'_>>() + 8) <= 2 * GROWTH, "a digit and a comma");
const _: () = assert!(2 * (size_of::<RawValue<'_>>() + 16) <= 3 * GROWTH, "an empty text");
/// Bytes of a number in JSON, with its comma.
const NUMBER_BYTES: usize = 24;
/// Bytes of an answer beside its numbers and names.
const ANSWER_BYTES: usize = 1024;

/// The JSON of a request. Unknown fields are skipped.
#[derive(Deserialize)]
struct Head<'a> {
    #[serde(default)]
    id: String,
    #[serde(default)]
    parameters: HeadParameters,
    #[serde(borrow)]
    inputs: Vec<HeadInput<'a>>,
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
struct HeadInput<'a> {
    name: String,
    datatype: String,
    shape: Vec<i64>,
    #[serde(default)]
    parameters: InputParameters,
    #[serde(borrow)]
    data: Option<Data<'a>>,
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

/// The values of a tensor; nested arrays are flattened.
struct Data<'a>(Vec<RawValue<'a>>);

impl<'de: 'a, 'a> Deserialize<'de> for Data<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let mut values = Vec::new();
        from.deserialize_any(Flatten(&mut values))?;
        Ok(Self(values))
    }
}

/// Adds values, and those of arrays in arrays, to a list.
struct Flatten<'v, 'a>(&'v mut Vec<RawValue<'a>>);

impl<'de: 'a, 'a> Visitor<'de> for Flatten<'_, 'a> {
    type Value = ();

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("numbers or texts, or arrays of them")
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        self.0.push(value.into());
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        self.0.push(value.into());
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        self.0.push(value.into());
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        self.0.push(RawValue::Null);
        Ok(())
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<(), E> {
        self.0.push(text.into());
        Ok(())
    }

    fn visit_str<E>(self, text: &str) -> Result<(), E> {
        self.0.push(RawValue::Text(Cow::Owned(text.to_owned())));
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(Flatten(self.0))?.is_some() {}
        Ok(())
    }
}

impl<'de: 'a, 'a> serde::de::DeserializeSeed<'de> for Flatten<'_, 'a> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

/// The values of a tensor, converted from JSON to the tensor's type.
enum JsonValues<'a> {
    I64(Vec<i64>),
    U64(Vec<u64>),
    F32(Vec<f32>),
    F64(Vec<f64>),
    Raw(&'a [RawValue<'a>]),
    /// The tensor's values are binary data.
    Binary,
}

impl<'a> JsonValues<'a> {
    fn of(input: &'a HeadInput<'a>) -> Result<Self, Problem> {
        let Some(Data(values)) = &input.data else { return Ok(Self::Binary) };
        let converted = match input.datatype.as_str() {
            "FP32" => each(values, |value| real(value).map(|x| x as f32)).map(Self::F32),
            "FP64" => each(values, real).map(Self::F64),
            "BYTES" => Some(Self::Raw(values)),
            "UINT64" => each(values, |value| match value {
                RawValue::Unsigned(value) => Some(*value),
                _ => None,
            })
            .map(Self::U64),
            _ => each(values, |value| match value {
                RawValue::Unsigned(value) => i64::try_from(*value).ok(),
                RawValue::Negative(value) => Some(*value),
                _ => None,
            })
            .map(Self::I64),
        };
        converted.ok_or_else(|| {
            let (name, datatype) = (Shortened(&input.name), Shortened(&input.datatype));
            Problem::invalid(format!("input `{name}`: its data has values that are not {datatype}"))
        })
    }
}

/// Converts every value; returns `None` if `convert` refuses one.
fn each<T>(
    values: &[RawValue<'_>],
    convert: impl Fn(&RawValue<'_>) -> Option<T>,
) -> Option<Vec<T>> {
    values.iter().map(convert).collect()
}

fn real(value: &RawValue<'_>) -> Option<f64> {
    match value {
        RawValue::Text(_) => None,
        // A missing value is NaN in binary data.
        RawValue::Null => Some(f64::NAN),
        RawValue::Unsigned(value) => Some(*value as f64),
        RawValue::Negative(value) => Some(*value as f64),
        RawValue::Float(value) => Some(*value),
    }
}

/// The path of a request for scores.
#[derive(Clone, Copy)]
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
    json_bytes: Option<usize>,
    body: Bytes,
) -> Result<Answered, Problem> {
    let (submitted, id) = {
        let (head, binary) = parse(json_bytes, &body, &mut call.memory)?;
        let values = head.inputs.iter().map(JsonValues::of).collect::<Result<Vec<_>, _>>()?;
        let order = Order {
            model: target.model,
            version: target.version,
            timeout: shorter_timeout(timeout_parameter(&head)?, None),
            tensors: &tensors_of(&head, &values, binary)?,
            asked: &asked(&head),
            every: encoding(head.parameters.binary_data_output),
        };
        (submit(call, &order)?, head.id)
    };
    // The slot has the samples.
    drop(body);
    call.memory.shrink(REQUEST_BYTES);

    let scored = submitted.wait().await;
    scored.encode(call, &id, |shown, call| {
        let bytes_max = ANSWER_BYTES + id.len() + 2 * NUMBER_BYTES * shown.numbers();
        call.memory.grow(bytes_max)?;
        Ok(response(&call.model, &id, shown))
    })
}

/// Queues the keys of `body` to prefetch. Returns how many keys fit into the queue.
///
/// # Errors
/// The request is malformed or does not fit the model.
pub fn prefetch(
    call: &mut Call<'_>,
    target: Target<'_>,
    json_bytes: Option<usize>,
    body: &[u8],
) -> Result<usize, Problem> {
    let Target { model, version } = target;
    let front = call.front;
    describe::version(front, model, version)?;
    let (head, binary) = parse(json_bytes, body, &mut call.memory)?;
    let values = head.inputs.iter().map(JsonValues::of).collect::<Result<Vec<_>, _>>()?;
    let tensors = tensors_of(&head, &values, binary)?;
    let schema = front.serving.schema(model).ok_or_else(|| not_served(model))?;
    let layout = front.layout(model, &schema);
    let batch_max = front.serving.budget(model).map_or(1, |budget| budget.batch_max as usize);
    let batch = batch_of(&layout, &tensors, Read::Keys, batch_max, &mut call.memory)?;
    let queue = |f: usize| front.serving.prefetch(model, f, batch.bags(f).keys);
    Ok((0..batch.features()).map(queue).sum())
}

/// Decodes `body`, a request to a model with `schema` whose JSON has `head_bytes` bytes, into a
/// batch; for fuzzing. Never keeps more bytes than the front door's budget allows.
///
/// # Errors
/// The request is malformed, does not fit the model, or exceeds the budget.
pub fn decode(
    body: &[u8],
    head_bytes: usize,
    schema: &Arc<Schema>,
    batch_max: usize,
) -> Result<Batch, Problem> {
    let mut memory = Share::new(&ByteBudget::new(64 << 20, 32 << 20)).reservation();
    memory.grow(body.len())?;
    let (head, binary) = parse(Some(head_bytes), body, &mut memory)?;
    timeout_parameter(&head)?;
    let values = head.inputs.iter().map(JsonValues::of).collect::<Result<Vec<_>, _>>()?;
    let tensors = tensors_of(&head, &values, binary)?;
    let layout = Layout::new(Arc::clone(schema));
    Wants::new(&layout.outputs, &asked(&head), encoding(head.parameters.binary_data_output))?;
    batch_of(&layout, &tensors, Read::All, batch_max, &mut memory)
}

/// Returns the length of the JSON of a request, if its `headers` have one.
///
/// # Errors
/// The header is not a number.
pub fn json_bytes(headers: &HeaderMap) -> Result<Option<usize>, Problem> {
    let Some(value) = headers.get(HEAD_LENGTH) else { return Ok(None) };
    let length = value.to_str().ok().and_then(|text| text.parse().ok());
    let wrong = || Problem::invalid(format!("{HEAD_LENGTH}: `{}`", header_text(value)));
    length.ok_or_else(wrong).map(Some)
}

/// Returns the JSON of a request, which has `json_bytes` bytes, and the binary data after it.
fn parse<'a>(
    json_bytes: Option<usize>,
    body: &'a [u8],
    memory: &mut Reservation,
) -> Result<(Head<'a>, &'a [u8]), Problem> {
    let length = json_bytes.unwrap_or(body.len());
    let Some((json, binary)) = body.split_at_checked(length) else {
        let bytes = body.len();
        return Err(Problem::invalid(format!("{HEAD_LENGTH}: {length} of {bytes} bytes")));
    };
    // Before the JSON is parsed, because the parser allocates.
    memory.grow(GROWTH * json.len())?;
    let head: Head<'_> =
        serde_json::from_slice(json).map_err(|e| Problem::invalid(e.to_string()))?;
    let inputs = head.inputs.iter().flat_map(|input| [&input.name, &input.datatype]);
    let names = inputs.chain(head.outputs.iter().map(|output| &output.name)).chain([&head.id]);
    names.map(|name| checked(name)).try_for_each(|name| name.map(drop))?;
    Ok((head, binary))
}

fn timeout_parameter(head: &Head<'_>) -> Result<Option<Duration>, Problem> {
    let timeout = head.parameters.timeout.map(timeout_of).transpose()?;
    Ok(timeout.filter(|timeout| !timeout.is_zero()))
}

fn tensors_of<'a>(
    head: &'a Head<'a>,
    values: &'a [JsonValues<'a>],
    mut binary: &'a [u8],
) -> Result<Vec<Tensor<'a>>, Problem> {
    let mut tensors = Vec::with_capacity(values.len());
    for (input, json) in head.inputs.iter().zip(values) {
        let fault = |problem: &str| {
            Problem::invalid(format!("input `{}`: {problem}", Shortened(&input.name)))
        };
        let values = match (json, input.parameters.binary_data_size) {
            (JsonValues::Binary, Some(bytes)) => {
                let (own, rest) = binary.split_at_checked(bytes).ok_or_else(|| {
                    fault("binary_data_size is more than the bytes of the request")
                })?;
                binary = rest;
                Values::Bytes(own)
            }
            (JsonValues::Binary, None) => return Err(fault("has no data")),
            (_, Some(_)) => return Err(fault("has data and binary data")),
            (JsonValues::I64(values), None) => Values::I64(values),
            (JsonValues::U64(values), None) => Values::U64(values),
            (JsonValues::F32(values), None) => Values::F32(values),
            (JsonValues::F64(values), None) => Values::F64(values),
            (JsonValues::Raw(values), None) => Values::Raw(values),
        };
        // JSON does not tell INT32 from INT64: both are decoded as INT64.
        let is_wide = matches!(values, Values::I64(_)) && input.datatype == "INT32";
        let datatype = if is_wide { "INT64" } else { &input.datatype };
        tensors.push(Tensor { name: &input.name, datatype, shape: &input.shape, values });
    }
    if !binary.is_empty() {
        return Err(Problem::invalid(format!("{} bytes belong to no input", binary.len())));
    }
    Ok(tensors)
}

fn encoding(is_binary: bool) -> Want {
    if is_binary { Want::Binary } else { Want::Text }
}

fn asked<'a>(head: &'a Head<'_>) -> Vec<Asked<'a>> {
    let is_binary = head.parameters.binary_data_output;
    let asked = |HeadOutput { name, parameters }: &'a HeadOutput| Asked {
        name,
        want: encoding(parameters.binary_data || is_binary),
    };
    head.outputs.iter().map(asked).collect()
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
    data: Option<Numbers<'a>>,
}

#[derive(Serialize)]
struct AnswerParameters {
    binary_data_size: usize,
}

fn response(model_name: &str, id: &str, shown: &Shown<'_>) -> Answered {
    let (mut outputs, mut binary) = (Vec::new(), Vec::new());
    for (output, want, numbers) in shown.outputs() {
        let before = binary.len();
        if want == Want::Binary {
            numbers.write(&mut binary);
        }
        let binary_data_size = binary.len() - before;
        outputs.push(AnswerOutput {
            name: &output.name,
            datatype: output.datatype(),
            shape: numbers.shape(),
            parameters: (want == Want::Binary).then_some(AnswerParameters { binary_data_size }),
            data: (want == Want::Text).then_some(numbers),
        });
    }

    let model_version = shown.sequence().to_string();
    let head = AnswerHead { model_name, model_version, id, outputs };
    // Numbers and text always serialize.
    let mut bytes = serde_json::to_vec(&head).unwrap_or_default();
    if binary.is_empty() {
        return reply(StatusCode::OK, "application/json", bytes.into());
    }
    let length = HeaderValue::from(bytes.len());
    bytes.extend_from_slice(&binary);
    let mut answered = reply(StatusCode::OK, "application/octet-stream", bytes.into());
    answered.headers_mut().insert(HEAD_LENGTH, length);
    answered
}
