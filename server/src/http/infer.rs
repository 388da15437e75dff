//! Inference over HTTP: a head of JSON, with the tensors in it or as binary data after it, and an
//! answer of the same form.

use crate::connections::memory::{ByteBudget, Reservation, Share};
use crate::http::{Answered, header_text, reply, timeout_of, top_k_of};
use crate::infer::{Call, Order, Shown, shorter_timeout, submit};
use crate::limits::REQUEST_BYTES;
use crate::models::describe;
use crate::problem::{Problem, checked, not_served};
use crate::tensors::outputs::{Asked, Numbers, Want, Wants};
use crate::tensors::values::{Tensor, write_null, write_text};
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
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The header with the length of the JSON before the binary data.
pub const HEAD_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");
/// Most bytes in memory for a byte of JSON: a number of one digit with its comma is kept as 24
/// bytes and converted to 8. The vectors have twice the room that they need.
const GROWTH: usize = 32;
const _: () = assert!(2 * (size_of::<RawValue<'_>>() + 8) <= 2 * GROWTH, "a digit and a comma");
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
    parameters: Parameters,
    #[serde(borrow)]
    inputs: Vec<HeadInput<'a>>,
    #[serde(default)]
    outputs: Vec<HeadOutput>,
}

/// The parameters of a request, of an input and of an output.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Parameters {
    /// Of a request: microseconds to the deadline; 0 is no limit.
    timeout: Option<i64>,
    /// Of a request: how many of the best samples the answer has.
    top_k: Option<i64>,
    /// Of a request: whether its outputs are binary data.
    binary_data_output: bool,
    /// Of an input: the bytes of its binary data.
    binary_data_size: Option<usize>,
    /// Of an output: whether it is binary data.
    binary_data: bool,
    /// Of an input: whether a model that has no such input may ignore it.
    optional: bool,
}

#[derive(Deserialize)]
struct HeadInput<'a> {
    name: String,
    datatype: String,
    shape: Vec<i64>,
    #[serde(default)]
    parameters: Parameters,
    #[serde(borrow)]
    data: Option<Data<'a>>,
}

#[derive(Deserialize)]
struct HeadOutput {
    name: String,
    #[serde(default)]
    parameters: Parameters,
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

/// Appends `value` as bytes of the type `datatype`. Returns false if it is of another type.
fn write(value: &RawValue<'_>, datatype: &str, to: &mut Vec<u8>) -> bool {
    let real = match value {
        RawValue::Text(text) => {
            write_text(to, text.as_bytes());
            return datatype == "BYTES";
        }
        RawValue::Null if datatype == "BYTES" => {
            write_null(to);
            return true;
        }
        // A missing value is NaN in binary data.
        RawValue::Null => f64::NAN,
        RawValue::Unsigned(value) => *value as f64,
        RawValue::Negative(value) => *value as f64,
        RawValue::Float(value) => *value,
    };
    match (datatype, value) {
        ("BYTES", _) => return false,
        ("FP32", _) => to.extend((real as f32).to_le_bytes()),
        ("FP64", _) => to.extend(real.to_le_bytes()),
        ("UINT64", RawValue::Negative(_))
        | (_, RawValue::Float(_) | RawValue::Text(_) | RawValue::Null) => return false,
        (_, RawValue::Negative(value)) => to.extend(value.to_le_bytes()),
        (_, RawValue::Unsigned(value)) => {
            to.extend(value.to_le_bytes());
            return datatype == "UINT64" || i64::try_from(*value).is_ok();
        }
    }
    true
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
        let order = Order {
            model: target.model,
            version: target.version,
            timeout: shorter_timeout(timeout_parameter(&head)?, None),
            tensors: &tensors_of(&head, binary)?,
            asked: &asked(&head),
            every: encoding(head.parameters.binary_data_output),
            top_k: head.parameters.top_k.map(top_k_of).transpose()?,
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
    let tensors = tensors_of(&head, binary)?;
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
    let top_k = head.parameters.top_k.map(top_k_of).transpose()?;
    let tensors = tensors_of(&head, binary)?;
    let layout = Layout::new(Arc::clone(schema));
    let every = encoding(head.parameters.binary_data_output);
    Wants::new(&layout.outputs, &asked(&head), every, top_k.is_some())?;
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

fn tensors_of<'a>(head: &'a Head<'a>, mut binary: &'a [u8]) -> Result<Vec<Tensor<'a>>, Problem> {
    let mut tensors = Vec::with_capacity(head.inputs.len());
    for HeadInput { name, datatype, shape, parameters, data } in &head.inputs {
        let fault =
            |problem: &str| Problem::invalid(format!("input `{}`: {problem}", Shortened(name)));
        let values = match (data, parameters.binary_data_size) {
            (None, Some(bytes)) => {
                let (own, rest) = binary.split_at_checked(bytes).ok_or_else(|| {
                    fault("binary_data_size is more than the bytes of the request")
                })?;
                binary = rest;
                Cow::Borrowed(own)
            }
            (None, None) => return Err(fault("has no data")),
            (Some(_), Some(_)) => return Err(fault("has data and binary data")),
            (Some(Data(values)), None) => {
                let mut bytes = Vec::with_capacity(8 * values.len());
                if !values.iter().all(|value| write(value, datatype, &mut bytes)) {
                    let datatype = Shortened(datatype);
                    return Err(fault(&format!("its data has values that are not {datatype}")));
                }
                Cow::Owned(bytes)
            }
        };
        // JSON does not tell INT32 from INT64: both are decoded as INT64.
        let is_wide = data.is_some() && datatype == "INT32";
        let datatype = if is_wide { "INT64" } else { datatype };
        let optional = parameters.optional;
        tensors.push(Tensor { name, datatype, shape, values, optional });
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
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    parameters: BTreeMap<&'static str, String>,
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
    let parameters = shown.differences().parameters().collect();
    let head = AnswerHead { model_name, model_version, id, parameters, outputs };
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
