//! A look at an encoded `ModelInferRequest` before it is decoded: how many tensors and parameters
//! it has, and the most bytes that decoding takes. An empty tensor has two bytes on the wire and
//! some hundred in memory, so a decoder alone would multiply what a hostile caller sends.

use crate::limits::{PARAMETERS_MAX, TENSORS_MAX};
use crate::problem::{Code, Problem};

/// Bytes in memory of a decoded tensor or parameter beside its text and values; vectors that grow
/// have twice the room that they need.
const ITEM_BYTES: usize = 512;
/// Most bytes in memory for a byte on the wire: a varint of one byte becomes eight, in a vector
/// with twice the room that it needs.
const GROWTH: usize = 16;

const PARAMETERS: u64 = 4;
const INPUTS: u64 = 5;
const OUTPUTS: u64 = 6;
const RAW_CONTENTS: u64 = 7;
/// Parameters of a requested output.
const OUTPUT_PARAMETERS: u64 = 2;

/// A field of a message: its number, and its bytes if it has a length.
struct Field<'a> {
    number: u64,
    bytes: &'a [u8],
}

/// The fields of a message that are left.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, bytes: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(usize::try_from(bytes).ok()?)?;
        self.0 = rest;
        Some(taken)
    }

    /// Returns the next field; `None` if the bytes are none.
    fn next(&mut self) -> Option<Field<'a>> {
        let key = self.varint()?;
        let number = key >> 3;
        let bytes = match key & 7 {
            0 => self.varint().map(|_| &[][..]),
            1 => self.take(8),
            2 => self.varint().and_then(|bytes| self.take(bytes)),
            5 => self.take(4),
            _ => None,
        }?;
        Some(Field { number, bytes })
    }
}

/// What an encoded request has.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    tensors: usize,
    parameters: usize,
    /// Bytes that are not the raw values of a tensor.
    structure: usize,
}

/// Returns the most bytes that decoding `request` takes beside its own.
///
/// # Errors
/// The bytes are no message, or they have more tensors or parameters than any request needs.
pub fn decoded_bytes_max(request: &[u8]) -> Result<usize, Problem> {
    let counts = count(request).ok_or_else(|| Problem::invalid("the message is malformed"))?;
    if counts.tensors > TENSORS_MAX {
        let message = format!("{} tensors are too many", counts.tensors);
        return Err(Problem::new(Code::TooLarge, message));
    }
    if counts.parameters > PARAMETERS_MAX * (1 + counts.tensors) {
        let message = format!("{} parameters are too many", counts.parameters);
        return Err(Problem::new(Code::TooLarge, message));
    }
    Ok(ITEM_BYTES * (counts.tensors + counts.parameters) + GROWTH * counts.structure)
}

fn count(request: &[u8]) -> Option<Counts> {
    let (mut counts, mut fields) = (Counts::default(), Fields(request));
    while !fields.0.is_empty() {
        let Field { number, bytes } = fields.next()?;
        match number {
            PARAMETERS => counts.parameters += 1,
            INPUTS => {
                counts.tensors += 1;
                counts.parameters += count_of(bytes, PARAMETERS)?;
            }
            OUTPUTS => {
                counts.tensors += 1;
                counts.parameters += count_of(bytes, OUTPUT_PARAMETERS)?;
            }
            RAW_CONTENTS => {
                counts.tensors += 1;
                continue;
            }
            _ => {}
        }
        counts.structure += bytes.len();
    }
    Some(counts)
}

/// Returns how often `message` has the field `number`.
fn count_of(message: &[u8], number: u64) -> Option<usize> {
    let (mut count, mut fields) = (0, Fields(message));
    while !fields.0.is_empty() {
        count += usize::from(fields.next()?.number == number);
    }
    Some(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::{InferInputTensor, InferParameter, ModelInferRequest};
    use hyper::body::Bytes;
    use prost::Message;

    #[test]
    fn tensors_and_parameters_are_counted_and_raw_values_are_not_multiplied() {
        let parameters =
            |n: usize| (0..n).map(|n| (n.to_string(), InferParameter::default())).collect();
        let input = InferInputTensor { parameters: parameters(3), ..Default::default() };
        let request = ModelInferRequest {
            parameters: parameters(2),
            inputs: vec![input; 2],
            raw_input_contents: vec![Bytes::from(vec![7; 10_000])],
            ..Default::default()
        };
        let counts = count(&request.encode_to_vec()).unwrap();
        assert_eq!((counts.tensors, counts.parameters), (3, 8));
        assert!(counts.structure < 100, "{}", counts.structure);
    }

    #[test]
    fn a_message_of_nothing_but_empty_tensors_is_refused() {
        let tensors = [INPUTS as u8 * 8 + 2, 0].repeat(100_000);
        assert_eq!(decoded_bytes_max(&tensors).unwrap_err().code, Code::TooLarge);
        let parameters = [PARAMETERS as u8 * 8 + 2, 0].repeat(100_000);
        assert_eq!(decoded_bytes_max(&parameters).unwrap_err().code, Code::TooLarge);
        for malformed in [&[0xff; 11][..], &[5 * 8 + 2, 9, 0], &[3]] {
            assert_eq!(decoded_bytes_max(malformed).unwrap_err().code, Code::Invalid);
        }
    }
}
