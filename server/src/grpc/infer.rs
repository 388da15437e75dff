//! `ModelInfer` over gRPC: from the message of a request to the message of its answer. A request is
//! parsed in place: names and raw values are not copied. An empty tensor has two bytes in the
//! message and a hundred in memory, so tensors are counted before any is kept.

use crate::connections::memory::Reservation;
use crate::grpc;
use crate::grpc::wire::{Field, Fields, Value, malformed};
use crate::http::Answered;
use crate::infer::{Call, NO_NUMBER, Order, Shown, submit};
use crate::limits::TENSORS_MAX;
use crate::problem::{Code, Problem};
use crate::proto::{InferOutputTensor, InferParameter, ModelInferResponse, ParameterValue};
use crate::tensors::outputs::{Asked, Want, check_parameter};
use crate::tensors::values::{Tensor, write_text};
use hyper::body::Bytes;
use std::borrow::Cow;

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
/// The field of a requested output with its parameters.
const OUTPUT_PARAMETERS: u64 = 2;
/// The field of an input with its typed values, and fields of these.
const CONTENTS: u64 = 5;
const FLOATS: u64 = 6;
const DOUBLES: u64 = 7;
const TEXTS: u64 = 8;
/// The names of the fields with typed values, from number 1 on.
const TYPED: [&str; 8] = ["bool", "int", "int64", "uint", "uint64", "fp32", "fp64", "bytes"];

const _: () = assert!(size_of::<Tensor<'_>>() + size_of::<Option<&[u8]>>() <= ITEM_BYTES);
/// Bytes of an answer, and of each of its outputs, beside numbers and names.
const ANSWER_BYTES: usize = 256;
/// Bytes of a number of an answer, at most.
const NUMBER_BYTES: usize = 8;

/// Answers `body`.
///
/// # Errors
/// The request is malformed, refused, or has no scores.
pub async fn infer(call: &mut Call<'_>, body: Bytes) -> Result<Answered, Problem> {
    let message = grpc::message_of(&body)?;
    let order = read(&message, &mut call.memory)?;
    let submitted = submit(call, &order)?;
    drop((order, body));
    let encode =
        |shown: &Shown<'_>, call: &mut Call<'_>| Ok(grpc::reply(response(shown, call)?.into()));
    submitted.answer(call, message, encode).await
}

/// Reads the request in `message`. Counts what is kept of it in `memory`.
///
/// # Errors
/// The bytes are not a request, it has too many tensors, an input has raw values and typed values,
/// or the budget has no room for them.
pub fn read<'a>(message: &'a [u8], memory: &mut Reservation) -> Result<Order<'a>, Problem> {
    let count = |number| Fields(message).flatten().filter(|f| f.number == number).count();
    let [inputs, outputs, raw] = [INPUTS, OUTPUTS, RAW_CONTENTS].map(count);
    let tensors = inputs + outputs + raw;
    if tensors > TENSORS_MAX {
        let message = format!("{tensors} tensors are too many");
        return Err(Problem::new(Code::TooLarge, message));
    }
    // Before any vector is allocated.
    memory.grow(ITEM_BYTES * tensors)?;

    let mut order = Order { every: Want::Binary, ..Order::default() };
    (order.tensors, order.asked) = (Vec::with_capacity(inputs), Vec::with_capacity(outputs));
    let (mut typed, mut raw) = (Vec::with_capacity(inputs), Vec::with_capacity(raw));
    for field in Fields(message) {
        let field = field?;
        match field.number {
            MODEL => order.model = field.text()?,
            VERSION => order.version = field.text()?,
            ID => order.id = field.text()?.into(),
            PARAMETERS => take_parameter(&mut order, field.bytes()?)?,
            INPUTS => {
                let (tensor, contents) = input(field.bytes()?)?;
                order.tensors.push(tensor);
                typed.push(contents);
            }
            OUTPUTS => {
                let output = field.bytes()?;
                let name = text_of(output, 1)?;
                for entry in Fields(output) {
                    let entry = entry?;
                    if entry.number == OUTPUT_PARAMETERS {
                        check_parameter("output", name, parameter(entry.bytes()?)?.0)?;
                    }
                }
                order.asked.push(Asked { name: name.into(), want: Want::Binary });
            }
            RAW_CONTENTS => raw.push(field.bytes()?),
            _ => {}
        }
    }
    if !raw.is_empty() && raw.len() != typed.len() {
        let (raw, inputs) = (raw.len(), typed.len());
        return Err(Problem::invalid(format!("{raw} raw inputs and {inputs} inputs")));
    }
    for (at, (tensor, contents)) in order.tensors.iter_mut().zip(typed).enumerate() {
        tensor.values = match (raw.get(at), contents) {
            (Some(_), Some(_)) => return Err(tensor.fault("has raw values and typed values")),
            (raw, None) => Cow::Borrowed(raw.copied().unwrap_or_default()),
            (None, Some(contents)) => Cow::Owned(raw_of(tensor, contents, memory)?),
        };
    }
    Ok(order)
}

/// Returns the name of the entry `parameter` of a map of parameters, and the field with its value.
fn parameter(parameter: &[u8]) -> Result<(&str, Option<Field<'_>>), Problem> {
    let value = field_of(parameter, 2)?.map_or(Ok(&[][..]), |field| field.bytes())?;
    Ok((text_of(parameter, 1)?, Fields(value).last().transpose()?))
}

/// Reads the entry `entry` of the request's map of parameters.
fn take_parameter(order: &mut Order<'_>, entry: &[u8]) -> Result<(), Problem> {
    let (name, Some(field)) = parameter(entry)? else { return Ok(()) };
    match (field.number, field.value) {
        // Field 2 is an int64, field 5 a uint64.
        (2, Value::Number(number)) => order.set(name, &(number as i64).to_string()),
        (5, Value::Number(number)) => order.set(name, &number.to_string()),
        _ => order.set(name, NO_NUMBER),
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
fn text_of(message: &[u8], number: u64) -> Result<&str, Problem> {
    field_of(message, number)?.map_or(Ok(""), |field| field.text())
}

/// Returns the tensor of an input, without values, and its typed values as the message has them.
fn input(message: &[u8]) -> Result<(Tensor<'_>, Option<&[u8]>), Problem> {
    let (mut tensor, mut contents) = (Tensor::default(), None);
    for field in Fields(message) {
        let field = field?;
        match field.number {
            1 => tensor.name = field.text()?.into(),
            2 => tensor.datatype = field.text()?.into(),
            3 => field.each_number(|side| tensor.add_side(side as i64))?,
            CONTENTS => contents = Some(field.bytes()?),
            INPUT_PARAMETERS => match parameter(field.bytes()?)? {
                ("optional", Some(Field { number: 1, value: Value::Number(truth) })) => {
                    tensor.optional = truth != 0;
                }
                ("optional", _) => return Err(tensor.fault("`optional` is no truth value")),
                (other, _) => check_parameter("input", &tensor.name, other)?,
            },
            _ => {}
        }
    }
    Ok((tensor, contents))
}

/// Returns the typed values in `contents` as the bytes of raw values. Counts these in `memory`.
///
/// # Errors
/// Values are in the field of another type than that of `tensor`.
fn raw_of(
    tensor: &Tensor<'_>,
    contents: &[u8],
    memory: &mut Reservation,
) -> Result<Vec<u8>, Problem> {
    // The field, the bytes of a value, and the most bytes of one byte of the message: a number may
    // take one byte, and an empty text, which becomes its length in four bytes, two.
    let (number, width, growth) = match &*tensor.datatype {
        "FP32" => (FLOATS, 4, 1),
        "FP64" => (DOUBLES, 8, 1),
        "BYTES" => (TEXTS, 1, 2),
        "INT32" => (2, 4, 4),
        "UINT64" => (5, 8, 8),
        "INT64" => (3, 8, 8),
        // No input has another type, and the reader of this one says so.
        _ => return Ok(Vec::new()),
    };
    let name = |number: u64| TYPED.get((number as usize).wrapping_sub(1));
    memory.grow(growth * contents.len())?;
    let mut bytes = Vec::with_capacity(growth * contents.len());
    for field in Fields(contents) {
        let field = field?;
        // Some encoders write the fields that have no values.
        if field.number != TEXTS && matches!(field.value, Value::Bytes([])) {
            continue;
        }
        match (number, field.value) {
            _ if field.number != number => {
                if let (Some(own), Some(other)) = (name(number), name(field.number)) {
                    let (datatype, rule) = (&tensor.datatype, "belong into");
                    let problem = format!("{datatype} values {rule} `{own}_contents`");
                    return Err(tensor.fault(&format!("{problem}, not `{other}_contents`")));
                }
            }
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

/// Returns the framed message of an answer. Counts it in the memory of `call`.
fn response(shown: &Shown<'_>, call: &mut Call<'_>) -> Result<Vec<u8>, Problem> {
    let id = shown.id();
    let outputs = shown.outputs().map(|(output, _, _)| ANSWER_BYTES + output.name.len());
    let names = call.model.len() + id.len() + outputs.sum::<usize>();
    let names = names + shown.differences().bytes();
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
        message.outputs.push(InferOutputTensor { name, datatype, shape: numbers.shape() });
        let mut bytes = Vec::with_capacity(NUMBER_BYTES * numbers.count());
        numbers.write(&mut bytes);
        message.raw_output_contents.push(bytes.into());
    }
    Ok(grpc::frame(&message))
}
