//! Inference over HTTP: a head of JSON, with the tensors in it or as binary data after it, and an
//! answer of the same form.

use crate::connections::memory::Reservation;
use crate::http::{Answered, header_text, reply};
use crate::infer::{Call, NO_NUMBER, Order, Shown, submit, turn};
use crate::models::describe;
use crate::problem::{Problem, checked};
use crate::tensors::outputs::{
    Asked, CLASSIFICATION, Numbers, SHARED_MEMORY, Want, check_parameter,
};
use crate::tensors::values::{Tensor, write_null, write_text};
use crate::tensors::{Read, batch_of};
use hatchback::Shortened;
use hatchback::schema::object::Object;
use hyper::body::Bytes;
use hyper::header::{HeaderName, HeaderValue};
use hyper::{HeaderMap, StatusCode};
use serde::de::{DeserializeSeed, Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;

/// The header with the length of the JSON before the binary data.
pub const HEAD_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");
/// Most bytes in memory for a byte of JSON. The vectors have twice the room that they need.
pub const GROWTH: usize = 32;
const _: () = assert!(2 * size_of::<u64>() <= GROWTH * "1,".len());
const _: () = assert!(
    2 * (size_of::<HeadOutput<'_>>() + size_of::<Asked<'_>>()) <= GROWTH * r#"{"name":""},"#.len()
);
/// Bytes of a score or a count in JSON, with its comma, and of any number as binary data, at most.
const TEXT_BYTES: usize = "-1.17549435e-38,".len();
const BINARY_BYTES: usize = 8;
/// Bytes of a character of a name in JSON, at most.
const ESCAPE_BYTES: usize = r"\u0001".len();
/// Bytes of an answer beside its numbers and names.
const ANSWER_BYTES: usize = 1024;

/// The JSON of a request. Unknown fields are skipped.
#[derive(Deserialize)]
struct Head<'a> {
    #[serde(borrow, default)]
    id: Cow<'a, str>,
    #[serde(borrow, default)]
    parameters: Object<Parameters<'a>>,
    #[serde(borrow)]
    inputs: Vec<Object<HeadInput<'a>>>,
    #[serde(borrow, default)]
    outputs: Vec<Object<HeadOutput<'a>>>,
}

/// The parameters of a request, of an input and of an output.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Parameters<'a> {
    /// Of a request: see [`Order::set`].
    #[serde(borrow)]
    timeout: Option<&'a RawValue>,
    #[serde(borrow)]
    top_k: Option<&'a RawValue>,
    /// Of a request: whether its outputs are binary data.
    binary_data_output: bool,
    /// Of an input: the bytes of its binary data.
    binary_data_size: Option<usize>,
    /// Of an output: whether it is binary data, whatever the request says.
    binary_data: Option<bool>,
    /// Of an input or output: see [`check_parameter`].
    #[serde(borrow)]
    classification: Option<&'a RawValue>,
    #[serde(borrow)]
    shared_memory_region: Option<&'a RawValue>,
    /// Of an input: whether a model that has no such input may ignore it.
    optional: bool,
}

impl Parameters<'_> {
    /// Checks those of the `tensor` of this `name`.
    fn check(&self, tensor: &str, name: &str) -> Result<(), Problem> {
        let Self { classification, shared_memory_region, .. } = self;
        let other = [(CLASSIFICATION, classification), (SHARED_MEMORY, shared_memory_region)];
        let mut other = other.iter().filter(|(_, value)| value.is_some());
        other.try_for_each(|(parameter, _)| check_parameter(tensor, name, parameter))
    }
}

#[derive(Deserialize)]
struct HeadInput<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow)]
    datatype: Cow<'a, str>,
    shape: Vec<i64>,
    #[serde(borrow, default)]
    parameters: Object<Parameters<'a>>,
    /// The text of the values, which are read when their type is known.
    #[serde(borrow)]
    data: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct HeadOutput<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    #[serde(borrow, default)]
    parameters: Object<Parameters<'a>>,
}

/// A text, which is copied only if it has escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// Passes each value of arrays in arrays to `take`.
struct Nested<'v, T> {
    /// The values of an array at each level; -1 is any number.
    sides: &'v [i64],
    /// Set if an array has another number of values.
    is_ragged: &'v Cell<bool>,
    take: &'v mut dyn FnMut(T),
}

impl<'de, T: Deserialize<'de>> DeserializeSeed<'de> for Nested<'_, T> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        match self.sides {
            [] => T::deserialize(from).map(self.take),
            _ => from.deserialize_seq(self),
        }
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for Nested<'_, T> {
    type Value = ();

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let (Some((&side, sides)), mut found) = (self.sides.split_first(), 0) else {
            return Ok(());
        };
        let Self { is_ragged, take, .. } = self;
        while items.next_element_seed(Nested { sides, is_ragged, take: &mut *take })?.is_some() {
            found += 1;
        }
        if side >= 0 && side != found {
            is_ragged.set(true);
        }
        Ok(())
    }
}

/// The data of a tensor: flat, or nested as its shape says.
struct Data<'a> {
    json: &'a str,
    sides: &'a [i64],
    is_ragged: Cell<bool>,
}

impl<'a> Data<'a> {
    fn new(json: &'a RawValue, shape: &'a [i64]) -> Self {
        let json = json.get();
        let is_open = |c: &char| *c == '[' || c.is_ascii_whitespace();
        let depth = json.chars().take_while(is_open).filter(|c| *c == '[').count();
        // The number of flat values is compared with the shape where they are read.
        let sides: &[i64] = if depth == 1 { &[-1] } else { shape };
        Self { json, sides, is_ragged: Cell::new(depth != 1 && depth != shape.len()) }
    }

    /// Passes each value to `take`, unless the data is ragged.
    fn each<T: Deserialize<'a>>(&self, mut take: impl FnMut(T)) -> Result<(), serde_json::Error> {
        if self.is_ragged.get() {
            return Ok(());
        }
        let mut from = serde_json::Deserializer::from_str(self.json);
        let (sides, is_ragged) = (self.sides, &self.is_ragged);
        Nested { sides, is_ragged, take: &mut take }.deserialize(&mut from)
    }

    /// Returns the values as bytes of the type `datatype`.
    fn bytes(&self, datatype: &str) -> Result<Vec<u8>, serde_json::Error> {
        let mut to = Vec::with_capacity(self.json.len());
        // A missing value is NaN in binary data.
        match datatype {
            "FP32" => {
                let mut is_beyond = false;
                self.each(|x: Option<f64>| {
                    let x = x.map_or(f32::NAN, |x| x as f32);
                    is_beyond |= x.is_infinite();
                    to.extend(x.to_le_bytes());
                })?;
                if is_beyond {
                    return Err(Error::custom("beyond the range of FP32"));
                }
            }
            "FP64" => self.each(|x: Option<f64>| to.extend(x.unwrap_or(f64::NAN).to_le_bytes()))?,
            "BYTES" => self.each(|text: Option<Text<'_>>| match text {
                Some(Text(text)) => write_text(&mut to, text.as_bytes()),
                None => write_null(&mut to),
            })?,
            "UINT64" => self.each(|n: u64| to.extend(n.to_le_bytes()))?,
            "INT32" => self.each(|n: i32| to.extend(n.to_le_bytes()))?,
            _ => self.each(|n: i64| to.extend(n.to_le_bytes()))?,
        }
        Ok(to)
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
    let order = order(target, json_bytes, &body, &mut call.memory)?;
    let submitted = submit(call, &order)?;
    drop(order);
    let encode = |shown: &Shown<'_>, call: &mut Call<'_>| {
        let bytes = |(_, want, numbers): (_, _, Numbers<'_>)| {
            numbers.count() * if want == Want::Text { TEXT_BYTES } else { BINARY_BYTES }
        };
        let numbers_bytes: usize = shown.outputs().map(bytes).sum();
        // In memory twice: a vector that grew, or the binary data and the answer.
        let twice = numbers_bytes + ESCAPE_BYTES * shown.differences().bytes();
        call.memory.grow(ANSWER_BYTES + shown.id().len() + 2 * twice)?;
        Ok(response(&call.model, shown))
    };
    submitted.answer(call, body, encode).await
}

/// Queues the keys of `body` to prefetch. Returns how many keys fit into the queue.
///
/// # Errors
/// The request is malformed or does not fit the model, or the car sheds load.
pub fn prefetch(
    call: &mut Call<'_>,
    target: Target<'_>,
    json_bytes: Option<usize>,
    body: &[u8],
) -> Result<usize, Problem> {
    let Target { model, version } = target;
    let served = call.front.served(model)?;
    let opened = describe::version(&served, version)?;
    // The keys make reads of flash, which a hot car has to shed too.
    let _turn = turn(call.front, &served)?;
    let order = order(target, json_bytes, body, &mut call.memory)?;
    let layout = call.front.layout(model, opened.schema());
    let batch_max = opened.budget().batch_max as usize;
    let batch = batch_of(&layout, &order.tensors, Read::Keys, batch_max, &mut call.memory)?;
    let queue = |f: usize| served.prefetch(f, batch.bags(f).keys);
    Ok((0..batch.features()).map(queue).sum())
}

/// Returns the length of the JSON of a request, if its `headers` have one.
///
/// # Errors
/// The header is not a number.
pub fn json_bytes(headers: &HeaderMap) -> Result<Option<usize>, Problem> {
    let Some(value) = headers.get(HEAD_LENGTH) else { return Ok(None) };
    let length = value.to_str().ok().and_then(|text| text.parse().ok());
    let wrong = || {
        let value = header_text(value);
        Problem::invalid(format!("{HEAD_LENGTH}: `{value}` is no number of bytes"))
    };
    length.ok_or_else(wrong).map(Some)
}

/// Reads a request, which has `json_bytes` bytes of JSON, and binary data after it. Counts what is
/// kept of it in `memory`.
///
/// # Errors
/// The bytes are not a request, or the budget has no room for it.
pub fn order<'a>(
    target: Target<'a>,
    json_bytes: Option<usize>,
    body: &'a [u8],
    memory: &mut Reservation,
) -> Result<Order<'a>, Problem> {
    let length = json_bytes.unwrap_or(body.len());
    let Some((json, mut binary)) = body.split_at_checked(length) else {
        let bytes = body.len();
        return Err(Problem::invalid(format!("{HEAD_LENGTH}: {length} of {bytes} bytes")));
    };
    // Before the JSON is parsed, because the parser allocates.
    memory.grow(GROWTH * json.len())?;
    let Object(Head { id, parameters, inputs, outputs }) =
        serde_json::from_slice(json).map_err(|e| Problem::invalid(e.to_string()))?;
    checked(&id)?;

    let Object(Parameters { timeout, top_k, binary_data_output: is_binary, .. }) = parameters;
    let Target { model, version } = target;
    let mut order = Order { model, version, id, every: encoding(is_binary), ..Order::default() };
    for (name, value) in [("timeout", timeout), ("top_k", top_k)] {
        // Any other value than a number is not quoted: the answer would escape it.
        let is_number = |text: &&str| text.starts_with(|c: char| c == '-' || c.is_ascii_digit());
        let number = |json: &'a RawValue| Some(json.get()).filter(is_number).unwrap_or(NO_NUMBER);
        value.map_or(Ok(()), |json| order.set(name, number(json)))?;
    }
    for Object(input) in inputs {
        order.tensors.push(tensor(input, &mut binary)?);
    }
    for Object(HeadOutput { name, parameters }) in outputs {
        checked(&name)?;
        parameters.0.check("output", &name)?;
        let want = encoding(parameters.0.binary_data.unwrap_or(is_binary));
        order.asked.push(Asked { name, want });
    }
    if !binary.is_empty() {
        return Err(Problem::invalid(format!("{} bytes belong to no input", binary.len())));
    }
    Ok(order)
}

/// Returns the tensor of `input`, which takes its part of the `binary` data.
fn tensor<'a>(input: HeadInput<'a>, binary: &mut &'a [u8]) -> Result<Tensor<'a>, Problem> {
    let HeadInput { name, datatype, shape, parameters: Object(parameters), data } = input;
    checked(&name)?;
    checked(&datatype)?;
    parameters.check("input", &name)?;
    let optional = parameters.optional;
    let mut tensor = Tensor { name, datatype, optional, ..Tensor::default() };
    shape.into_iter().try_for_each(|side| tensor.add_side(side))?;
    tensor.values = match (data, parameters.binary_data_size) {
        (None, Some(bytes)) => {
            let beyond = || {
                let left = binary.len();
                tensor
                    .fault(&format!("binary_data_size is {bytes}, and the request has {left} more"))
            };
            let own;
            (own, *binary) = binary.split_at_checked(bytes).ok_or_else(beyond)?;
            Cow::Borrowed(own)
        }
        (None, None) => return Err(tensor.fault("has no data")),
        (Some(_), Some(_)) => return Err(tensor.fault("has data and binary data")),
        (Some(json), None) => {
            let Tensor { datatype, shape, .. } = &tensor;
            let data = Data::new(json, shape);
            let bytes = data.bytes(datatype).map_err(|_| {
                let datatype = Shortened(datatype);
                tensor.fault(&format!("its data has values that are not {datatype}"))
            })?;
            if data.is_ragged.get() {
                let problem = format!("its data is nested otherwise than its shape {shape:?}");
                return Err(tensor.fault(&problem));
            }
            Cow::Owned(bytes)
        }
    };
    Ok(tensor)
}

fn encoding(is_binary: bool) -> Want {
    if is_binary { Want::Binary } else { Want::Text }
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
    shape: Vec<i64>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    parameters: BTreeMap<&'static str, usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<Numbers<'a>>,
}

fn response(model_name: &str, shown: &Shown<'_>) -> Answered {
    let (mut outputs, mut binary) = (Vec::new(), Vec::new());
    for (output, want, numbers) in shown.outputs() {
        let mut parameters = BTreeMap::new();
        if want == Want::Binary {
            let before = binary.len();
            numbers.write(&mut binary);
            parameters.insert("binary_data_size", binary.len() - before);
        }
        outputs.push(AnswerOutput {
            name: &output.name,
            datatype: output.datatype(),
            shape: numbers.shape(),
            parameters,
            data: (want == Want::Text).then_some(numbers),
        });
    }

    let (id, model_version) = (shown.id(), shown.sequence().to_string());
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
