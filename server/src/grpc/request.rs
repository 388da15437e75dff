//! A request for scores over gRPC, parsed in place: names and raw values are not copied. An empty
//! tensor has two bytes in the message and a hundred in memory, so tensors are counted before any
//! is kept.

use crate::connections::memory::Reservation;
use crate::grpc::wire::{Field, Fields, Value, malformed};
use crate::http::{timeout_of, top_k_of};
use crate::limits::{DIMENSIONS_MAX, TENSORS_MAX};
use crate::problem::{Code, Problem};
use crate::tensors::outputs::{Asked, Want};
use crate::tensors::values::{Tensor, write_text};
use hatchback::Shortened;
use std::borrow::Cow;
use std::time::Duration;

/// Bytes in memory of a tensor beside its typed values.
const ITEM_BYTES: usize = 256;

/// Fields of a request.
const MODEL: u64 = 1;
const VERSION: u64 = 2;
const ID: u64 = 3;
const PARAMETERS: u64 = 4;
const INPUTS: u64 = 5;
const OUTPUTS: u64 = 6;
const RAW_CONTENTS: u64 = 7;
/// The field of an input with its parameters.
const INPUT_PARAMETERS: u64 = 4;
/// The field of an input with its typed values, and fields of these.
const CONTENTS: u64 = 5;
const FLOATS: u64 = 6;
const DOUBLES: u64 = 7;
const TEXTS: u64 = 8;

/// A request for scores.
#[derive(Debug, Default)]
pub struct Request<'a> {
    pub model: &'a str,
    pub version: &'a str,
    pub id: &'a str,
    /// The time in the parameter `timeout`.
    pub timeout: Option<Duration>,
    /// The number in the parameter `top_k`.
    pub top_k: Option<usize>,
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
    /// Its typed values, as the message has them.
    contents: Option<&'a [u8]>,
    /// Its parameter `optional`.
    optional: bool,
}

const _: () = assert!(size_of::<Input<'_>>() + size_of::<Tensor<'_>>() <= ITEM_BYTES);

impl<'a> Request<'a> {
    /// Reads `message`. Counts what is kept of it in `memory`.
    ///
    /// # Errors
    /// The bytes are not a request, it has too many tensors, or the budget has no room for them.
    pub fn read(message: &'a [u8], memory: &mut Reservation) -> Result<Self, Problem> {
        let count = |number| Fields(message).flatten().filter(|f| f.number == number).count();
        let [inputs, outputs, raw] = [INPUTS, OUTPUTS, RAW_CONTENTS].map(count);
        let tensors = inputs + outputs + raw;
        if tensors > TENSORS_MAX {
            let message = format!("{tensors} tensors are too many");
            return Err(Problem::new(Code::TooLarge, message));
        }
        // Before any vector is allocated.
        memory.grow(ITEM_BYTES * tensors)?;

        let mut request = Self {
            inputs: Vec::with_capacity(inputs),
            asked: Vec::with_capacity(outputs),
            raw: Vec::with_capacity(raw),
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

    /// Reads the entry `parameter` of the map of parameters: the time limit in microseconds, of
    /// which 0 is no limit, or the number of samples of the answer. Skips every other parameter.
    fn take_parameter(&mut self, parameter: &[u8]) -> Result<(), Problem> {
        let name = text_of(parameter, 1)?;
        if !["timeout", "top_k"].contains(&name) {
            return Ok(());
        }
        let value = field_of(parameter, 2)?.map_or(Ok(&[][..]), |field| field.bytes())?;
        for field in Fields(value) {
            let field = field?;
            let number = match (field.number, field.value) {
                // Field 2 is an int64, field 5 a uint64, which may be above the largest int64.
                (2, Value::Number(number)) => number as i64,
                (5, Value::Number(number)) => i64::try_from(number).unwrap_or(i64::MAX),
                _ => {
                    let message = format!("parameter `{name}` is not an integer");
                    return Err(Problem::invalid(message));
                }
            };
            match name {
                "top_k" => self.top_k = Some(top_k_of(number)?),
                _ => self.timeout = Some(timeout_of(number)?).filter(|t| !t.is_zero()),
            }
        }
        Ok(())
    }

    /// Returns the tensors. Counts their typed values in `memory`.
    ///
    /// # Errors
    /// An input has raw values and typed values, or the budget has no room for the latter.
    pub fn tensors(&self, memory: &mut Reservation) -> Result<Vec<Tensor<'_>>, Problem> {
        let inputs = self.inputs.iter().enumerate();
        inputs.map(|(at, input)| input.tensor(self.raw.get(at).copied(), memory)).collect()
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
        match field.number {
            1 => input.name = field.text()?,
            2 => input.datatype = field.text()?,
            3 => field.each_number(|size| input.add_dimension(size))?,
            CONTENTS => input.contents = Some(field.bytes()?),
            INPUT_PARAMETERS => input.take_parameter(field.bytes()?)?,
            _ => {}
        }
    }
    Ok(input)
}

impl Input<'_> {
    /// Reads whether the input is optional from the entry `parameter` of its map of parameters.
    /// Skips every other parameter.
    fn take_parameter(&mut self, parameter: &[u8]) -> Result<(), Problem> {
        if text_of(parameter, 1)? != "optional" {
            return Ok(());
        }
        let value = field_of(parameter, 2)?.map_or(Ok(&[][..]), |field| field.bytes())?;
        match field_of(value, 1)?.map(|field| field.value) {
            Some(Value::Number(truth)) => self.optional = truth != 0,
            _ => return Err(Problem::invalid("parameter `optional` is not a truth value")),
        }
        Ok(())
    }

    fn add_dimension(&mut self, size: u64) -> Result<(), Problem> {
        let Some(last) = self.shape.get_mut(self.dimensions) else {
            let message = format!("a shape has more than {DIMENSIONS_MAX} dimensions");
            return Err(Problem::invalid(message));
        };
        *last = size as i64;
        self.dimensions += 1;
        Ok(())
    }

    fn tensor<'s>(
        &'s self,
        raw: Option<&'s [u8]>,
        memory: &mut Reservation,
    ) -> Result<Tensor<'s>, Problem> {
        let Self { name, datatype, contents, optional, .. } = self;
        let values = match (raw, contents) {
            (Some(_), Some(_)) => {
                let name = Shortened(name);
                let message = format!("input `{name}` has raw values and typed values");
                return Err(Problem::invalid(message));
            }
            (raw, None) => Cow::Borrowed(raw.unwrap_or_default()),
            (None, Some(contents)) => Cow::Owned(raw_of(datatype, contents, memory)?),
        };
        let (shape, optional) = (&self.shape[..self.dimensions], *optional);
        Ok(Tensor { name, datatype, shape, values, optional })
    }
}

/// Returns the typed values in `contents` as the bytes of raw values. Counts these in `memory`.
fn raw_of(datatype: &str, contents: &[u8], memory: &mut Reservation) -> Result<Vec<u8>, Problem> {
    // The field, the bytes of a value, and the most bytes of one byte of the message: a number may
    // take one byte, and an empty text, which becomes its length in four bytes, two.
    let (number, width, growth) = match datatype {
        "FP32" => (FLOATS, 4, 1),
        "FP64" => (DOUBLES, 8, 1),
        "BYTES" => (TEXTS, 1, 2),
        "INT32" => (2, 4, 4),
        "UINT64" => (5, 8, 8),
        _ => (3, 8, 8),
    };
    memory.grow(growth * contents.len())?;
    let mut bytes = Vec::with_capacity(growth * contents.len());
    for field in Fields(contents) {
        let field = field?;
        match (number, field.value) {
            _ if field.number != number => {}
            (TEXTS, Value::Bytes(text)) => write_text(&mut bytes, text),
            (FLOATS | DOUBLES, Value::Bytes(packed)) if packed.len() % width == 0 => {
                bytes.extend_from_slice(packed);
            }
            (TEXTS | FLOATS | DOUBLES, _) => return Err(malformed()),
            _ => field.each_number(|n| {
                bytes.extend_from_slice(&n.to_le_bytes()[..width]);
                Ok(())
            })?,
        }
    }
    Ok(bytes)
}
