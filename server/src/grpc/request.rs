//! A request for scores over gRPC, parsed in place: names and raw values are not copied. An empty
//! tensor has two bytes in the message and a hundred in memory, so tensors are counted before any
//! is kept.

use crate::connections::memory::Reservation;
use crate::grpc::wire::{Field, Fields, Value, malformed};
use crate::http::timeout_of;
use crate::limits::{DIMENSIONS_MAX, TENSORS_MAX};
use crate::problem::{Code, Problem};
use crate::proto::InferTensorContents;
use crate::tensors::outputs::{Asked, Want};
use crate::tensors::values::{Tensor, Values};
use hatchback::Shortened;
use hyper::body::Bytes;
use prost::Message;
use std::time::Duration;

/// Bytes in memory of a tensor beside its typed values.
const ITEM_BYTES: usize = 384;
/// Most bytes in memory for a byte of typed numbers: a varint of one byte becomes eight, in a
/// vector with twice the room that it needs.
const GROWTH: usize = 16;
/// Bytes in memory of a typed text beside its characters; its vector may be twice too large as
/// well.
const TEXT_BYTES: usize = 2 * size_of::<Bytes>() + 32;

/// Fields of a request.
const MODEL: u64 = 1;
const VERSION: u64 = 2;
const ID: u64 = 3;
const PARAMETERS: u64 = 4;
const INPUTS: u64 = 5;
const OUTPUTS: u64 = 6;
const RAW_CONTENTS: u64 = 7;
/// Fields of an input: its typed values, and the texts among them.
const CONTENTS: u64 = 5;
const TEXTS: u64 = 8;

/// A request for scores.
#[derive(Debug, Default)]
pub struct Request<'a> {
    pub model: &'a str,
    pub version: &'a str,
    pub id: &'a str,
    /// The time in the parameter `timeout`.
    pub timeout: Option<Duration>,
    pub asked: Vec<Asked<'a>>,
    inputs: Vec<Input<'a>>,
    raw: Vec<&'a [u8]>,
}

/// An input of a request.
#[derive(Debug, Default)]
struct Input<'a> {
    name: &'a str,
    datatype: &'a str,
    shape: [i64; DIMENSIONS_MAX],
    /// The number of dimensions.
    dimensions: usize,
    contents: Option<Box<InferTensorContents>>,
}

const _: () = assert!(
    size_of::<Input<'_>>() + size_of::<InferTensorContents>() <= ITEM_BYTES,
    "an item of memory has room for an input and the lists of its typed values"
);

/// The counts of a message's parts, made before any part is kept.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    inputs: usize,
    outputs: usize,
    raw: usize,
    /// Bytes in memory of typed values.
    typed: usize,
}

impl Counts {
    fn of(message: &[u8]) -> Result<Self, Problem> {
        let mut counts = Self::default();
        for field in Fields(message) {
            let field = field?;
            match field.number {
                INPUTS => {
                    counts.inputs += 1;
                    counts.typed += typed_bytes(field.bytes()?)?;
                }
                OUTPUTS => counts.outputs += 1,
                RAW_CONTENTS => counts.raw += 1,
                _ => {}
            }
        }
        Ok(counts)
    }

    fn tensors(&self) -> usize {
        self.inputs + self.outputs + self.raw
    }
}

/// Returns the most bytes that the typed values of `input` take.
fn typed_bytes(input: &[u8]) -> Result<usize, Problem> {
    let mut bytes = 0;
    for field in Fields(input) {
        let field = field?;
        if field.number != CONTENTS {
            continue;
        }
        for values in Fields(field.bytes()?) {
            let values = values?;
            bytes += match values.value {
                Value::Number(_) => GROWTH,
                Value::Bytes(text) if values.number == TEXTS => TEXT_BYTES + text.len(),
                Value::Bytes(numbers) => GROWTH * numbers.len(),
            };
        }
    }
    Ok(bytes)
}

impl<'a> Request<'a> {
    /// Reads `message`. Counts what is kept of it in `memory`.
    ///
    /// # Errors
    /// The bytes are not a request, it has too many tensors, or the budget has no room for them.
    pub fn read(message: &'a [u8], memory: &mut Reservation) -> Result<Self, Problem> {
        let counts = Counts::of(message)?;
        if counts.tensors() > TENSORS_MAX {
            let message = format!("{} tensors are too many", counts.tensors());
            return Err(Problem::new(Code::TooLarge, message));
        }
        // Before any vector is allocated.
        memory.grow(ITEM_BYTES * counts.tensors() + counts.typed)?;

        let mut request = Self {
            inputs: Vec::with_capacity(counts.inputs),
            asked: Vec::with_capacity(counts.outputs),
            raw: Vec::with_capacity(counts.raw),
            ..Self::default()
        };
        for field in Fields(message) {
            let field = field?;
            match field.number {
                MODEL => request.model = field.text()?,
                VERSION => request.version = field.text()?,
                ID => request.id = field.text()?,
                PARAMETERS => request.take_parameter(field.bytes()?)?,
                INPUTS => request.inputs.push(input(field.bytes()?)?),
                OUTPUTS => {
                    let name = text_of(field.bytes()?, 1)?;
                    request.asked.push(Asked { name, want: Want::Binary });
                }
                RAW_CONTENTS => request.raw.push(field.bytes()?),
                _ => {}
            }
        }
        if !request.raw.is_empty() && request.raw.len() != request.inputs.len() {
            let (raw, inputs) = (request.raw.len(), request.inputs.len());
            return Err(Problem::invalid(format!("{raw} raw inputs and {inputs} inputs")));
        }
        Ok(request)
    }

    /// Reads the time limit from the entry `parameter` of the map of parameters: microseconds, and
    /// 0 is no limit. Skips every other parameter.
    fn take_parameter(&mut self, parameter: &[u8]) -> Result<(), Problem> {
        if text_of(parameter, 1)? != "timeout" {
            return Ok(());
        }
        let value = field_of(parameter, 2)?.map_or(Ok(&[][..]), |field| field.bytes())?;
        for field in Fields(value) {
            let field = field?;
            let us = match (field.number, field.value) {
                // Field 2 is an int64, field 5 a uint64, which may be above the largest int64.
                (2, Value::Number(us)) => us as i64,
                (5, Value::Number(us)) => i64::try_from(us).unwrap_or(i64::MAX),
                _ => return Err(Problem::invalid("parameter `timeout` is not an integer")),
            };
            self.timeout = Some(timeout_of(us)?).filter(|timeout| !timeout.is_zero());
        }
        Ok(())
    }

    /// Returns the tensors.
    ///
    /// # Errors
    /// An input has raw values and typed values.
    pub fn tensors(&self) -> Result<Vec<Tensor<'_>>, Problem> {
        let inputs = self.inputs.iter().enumerate();
        inputs.map(|(at, input)| input.tensor(self.raw.get(at).copied())).collect()
    }
}

/// Returns the last field `number` of `message`.
fn field_of(message: &[u8], number: u64) -> Result<Option<Field<'_>>, Problem> {
    let mut found = None;
    for field in Fields(message) {
        let field = field?;
        // Of a single field that is repeated, the last one counts in Protocol Buffers.
        if field.number == number {
            found = Some(field);
        }
    }
    Ok(found)
}

/// Returns the text in the field `number` of `message`; without one it is empty.
///
/// # Errors
/// The message is malformed, or the field is not a text of at most a name's length.
pub fn text_of(message: &[u8], number: u64) -> Result<&str, Problem> {
    field_of(message, number)?.map_or(Ok(""), |field| field.text())
}

fn input(message: &[u8]) -> Result<Input<'_>, Problem> {
    let mut input = Input::default();
    for field in Fields(message) {
        let field = field?;
        match (field.number, field.value) {
            (1, _) => input.name = field.text()?,
            (2, _) => input.datatype = field.text()?,
            (3, Value::Number(size)) => input.add_dimension(size)?,
            (3, Value::Bytes(packed)) => {
                let mut packed = Fields(packed);
                while !packed.0.is_empty() {
                    input.add_dimension(packed.varint().ok_or_else(malformed)?)?;
                }
            }
            (CONTENTS, Value::Bytes(contents)) => {
                // `read` has charged the decoded values before.
                let decoded = InferTensorContents::decode(contents);
                let decoded = decoded.map_err(|e| Problem::invalid(e.to_string()))?;
                input.contents = Some(Box::new(decoded));
            }
            (CONTENTS, Value::Number(_)) => return Err(malformed()),
            _ => {}
        }
    }
    Ok(input)
}

impl Input<'_> {
    fn add_dimension(&mut self, size: u64) -> Result<(), Problem> {
        let Some(last) = self.shape.get_mut(self.dimensions) else {
            let message = format!("a shape has more than {DIMENSIONS_MAX} dimensions");
            return Err(Problem::invalid(message));
        };
        *last = size as i64;
        self.dimensions += 1;
        Ok(())
    }

    fn tensor<'s>(&'s self, raw: Option<&'s [u8]>) -> Result<Tensor<'s>, Problem> {
        let Self { name, datatype, contents, .. } = self;
        let shape = &self.shape[..self.dimensions];
        let values = match (raw, contents) {
            (Some(raw), None) => Values::Bytes(raw),
            (Some(_), Some(_)) => {
                let name = Shortened(name);
                let message = format!("input `{name}` has raw values and typed values");
                return Err(Problem::invalid(message));
            }
            (None, None) => Values::Bytes(&[]),
            (None, Some(contents)) => typed(datatype, contents),
        };
        Ok(Tensor { name, datatype, shape, values })
    }
}

fn typed<'a>(datatype: &str, contents: &'a InferTensorContents) -> Values<'a> {
    match datatype {
        "FP32" => Values::F32(&contents.fp32_contents),
        "FP64" => Values::F64(&contents.fp64_contents),
        "BYTES" => Values::Texts(&contents.bytes_contents),
        "UINT64" => Values::U64(&contents.uint64_contents),
        "INT32" => Values::I32(&contents.int_contents),
        _ => Values::I64(&contents.int64_contents),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connections::memory::{ByteBudget, Share};
    use crate::proto::{
        InferInputTensor, InferParameter, InferRequestedOutputTensor, ModelInferRequest,
        ParameterValue,
    };

    fn memory() -> Reservation {
        Share::new(&ByteBudget::new(1 << 20, 1 << 19)).reservation()
    }

    fn timeout(value: ParameterValue) -> (String, InferParameter) {
        ("timeout".to_owned(), InferParameter { parameter_choice: Some(value) })
    }

    #[test]
    fn a_request_is_read_as_it_was_written() {
        let output = InferRequestedOutputTensor { name: "score".to_owned(), ..Default::default() };
        let input = |name: &str, contents| InferInputTensor {
            name: name.to_owned(),
            datatype: "INT64".to_owned(),
            shape: vec![2, -1],
            contents,
            ..Default::default()
        };
        let written = ModelInferRequest {
            model_name: "m".to_owned(),
            model_version: "3".to_owned(),
            id: "r".to_owned(),
            parameters: [timeout(ParameterValue::Int64Param(250))].into(),
            inputs: vec![input("a", None)],
            outputs: vec![output],
            raw_input_contents: vec![Bytes::from_static(b"xyz")],
        };
        let (bytes, mut memory) = (written.encode_to_vec(), memory());
        let read = Request::read(&bytes, &mut memory).unwrap();
        assert_eq!((read.model, read.version, read.id), ("m", "3", "r"));
        assert_eq!(read.timeout, Some(Duration::from_micros(250)));
        assert_eq!(read.asked[0].name, "score");
        let tensors = read.tensors().unwrap();
        assert_eq!((tensors[0].name, tensors[0].shape), ("a", &[2, -1][..]));
        assert!(matches!(tensors[0].values, Values::Bytes(b"xyz")));

        let contents = InferTensorContents { int64_contents: vec![-1, 5], ..Default::default() };
        let inputs = vec![input("a", Some(contents))];
        let typed = ModelInferRequest { inputs, raw_input_contents: vec![], ..written };
        let bytes = typed.encode_to_vec();
        let read = Request::read(&bytes, &mut memory).unwrap();
        assert!(matches!(read.tensors().unwrap()[0].values, Values::I64([-1, 5])));
    }

    #[test]
    fn a_timeout_is_a_number_of_microseconds_that_is_not_negative() {
        let read = |value| {
            let parameters = [timeout(value)].into();
            let bytes = ModelInferRequest { parameters, ..Default::default() }.encode_to_vec();
            let mut memory = memory();
            Request::read(&bytes, &mut memory).map(|request| request.timeout)
        };
        assert_eq!(read(ParameterValue::Int64Param(0)).unwrap(), None);
        let most = Some(Duration::from_micros(i64::MAX as u64));
        assert_eq!(read(ParameterValue::Uint64Param(u64::MAX)).unwrap(), most);
        assert!(read(ParameterValue::Int64Param(-1)).is_err());
        assert!(read(ParameterValue::StringParam("1".to_owned())).is_err());
    }

    #[test]
    fn a_message_of_nothing_but_empty_tensors_is_refused() {
        let mut memory = memory();
        let tensors = [INPUTS as u8 * 8 + 2, 0].repeat(100_000);
        assert_eq!(Request::read(&tensors, &mut memory).unwrap_err().code, Code::TooLarge);
        // Parameters take no memory.
        let parameters = [PARAMETERS as u8 * 8 + 2, 0].repeat(100_000);
        assert!(Request::read(&parameters, &mut memory).is_ok());
        let name = "n".repeat(256);
        let long = ModelInferRequest { id: name, ..Default::default() }.encode_to_vec();
        let refused = Request::read(&long, &mut memory).unwrap_err().message;
        assert!(refused.contains("256 bytes; at most 255") && refused.len() < 200, "{refused}");
        for malformed in [&[0xff; 11][..], &[5 * 8 + 2, 9, 0], &[3]] {
            assert_eq!(Request::read(malformed, &mut memory).unwrap_err().code, Code::Invalid);
        }
    }
}
