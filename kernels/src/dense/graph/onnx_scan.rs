//! Counts what an ONNX file becomes in memory, before it is parsed: an empty message of two bytes
//! becomes hundreds, and a number of one byte becomes eight. This file keeps nothing of the file.

use crate::dense::error::DenseError;
use Part::{Message, Numbers, Text};
use prost::encoding::{WireType, decode_key, decode_varint};

/// Bytes that the messages, texts and numbers of a file take, beside its weights, at most.
const PARSED_BYTES_MAX: u64 = 256 << 20;
/// Bytes of a message without its fields, at most.
const MESSAGE_BYTES: u64 = 512;
/// Messages within each other, at most.
const LEVELS_MAX: usize = 64;

/// A field of a message.
#[derive(Clone, Copy)]
enum Part {
    /// A message with these fields.
    Message(&'static [(u32, Part)]),
    Text,
    /// Integers of variable length.
    Numbers,
}

static MODEL: [(u32, Part); 3] = [(2, Text), (7, Message(&GRAPH)), (8, Message(&TEXTS))];
static GRAPH: [(u32, Part); 5] = [
    (1, Message(&NODE)),
    (2, Text),
    (5, Message(&TENSOR)),
    (11, Message(&VALUE)),
    (12, Message(&VALUE)),
];
static NODE: [(u32, Part); 8] = [
    (1, Text),
    (2, Text),
    (3, Text),
    (4, Text),
    (5, Message(&ATTRIBUTE)),
    (6, Text),
    (7, Text),
    (9, Message(&TEXTS)),
];
static ATTRIBUTE: [(u32, Part); 6] =
    [(1, Text), (4, Text), (5, Message(&TENSOR)), (6, Message(&GRAPH)), (8, Numbers), (9, Text)];
static TENSOR: [(u32, Part); 5] =
    [(1, Numbers), (5, Numbers), (7, Numbers), (8, Text), (13, Message(&TEXTS))];
static VALUE: [(u32, Part); 2] = [(1, Text), (2, Message(&TYPE))];
static TYPE: [(u32, Part); 1] = [(1, Message(&TENSOR_TYPE))];
static TENSOR_TYPE: [(u32, Part); 1] = [(2, Message(&SHAPE))];
static SHAPE: [(u32, Part); 1] = [(1, Message(&TEXTS))];
static TEXTS: [(u32, Part); 2] = [(1, Text), (2, Text)];

/// Checks that parsing `file` takes little memory.
///
/// # Errors
/// [`DenseError::Load`] if the bytes are not protobuf, [`DenseError::Unsupported`] if they become
/// too many.
pub(super) fn check(file: &[u8]) -> Result<(), DenseError> {
    let mut bytes = 0;
    match scan(file, &MODEL, LEVELS_MAX, &mut bytes) {
        _ if bytes > PARSED_BYTES_MAX => Err(DenseError::Unsupported(format!(
            "an ONNX file whose messages take over {PARSED_BYTES_MAX} bytes of memory"
        ))),
        Some(()) => Ok(()),
        None => Err(DenseError::Load("not an ONNX file: its messages do not parse".to_owned())),
    }
}

/// Adds the memory of one message to `bytes`. Returns `None` for invalid bytes, and stops above the
/// limit.
fn scan(mut file: &[u8], parts: &[(u32, Part)], levels: usize, bytes: &mut u64) -> Option<()> {
    let levels = levels.checked_sub(1)?;
    *bytes += MESSAGE_BYTES;
    while !file.is_empty() && *bytes <= PARSED_BYTES_MAX {
        let (tag, wire) = decode_key(&mut file).ok()?;
        let part = parts.iter().find(|(number, _)| *number == tag).map(|(_, part)| *part);
        let skipped = match wire {
            WireType::Varint => {
                decode_varint(&mut file).ok()?;
                *bytes += 8;
                0
            }
            WireType::ThirtyTwoBit => 4,
            WireType::SixtyFourBit => 8,
            WireType::LengthDelimited => usize::try_from(decode_varint(&mut file).ok()?).ok()?,
            WireType::StartGroup | WireType::EndGroup => return None,
        };
        let (body, rest) = file.split_at_checked(skipped)?;
        file = rest;
        match part {
            Some(Message(parts)) => scan(body, parts, levels, bytes)?,
            Some(Text) => *bytes += size_of::<String>() as u64 + body.len() as u64,
            Some(Numbers) => *bytes += 8 * body.iter().filter(|&&byte| byte < 0x80).count() as u64,
            None => {}
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_files_that_become_large_are_refused_before_they_are_parsed() {
        let field = |tag: u8, body: &[u8]| {
            let mut all = vec![tag << 3 | 2];
            prost::encoding::encode_varint(body.len() as u64, &mut all);
            [&all, body].concat()
        };
        let nodes = field(7, &field(1, &[]).repeat(1 << 20));
        let numbers = field(7, &field(5, &field(7, &vec![0; 33 << 20])));
        for file in [nodes, numbers] {
            let refused = matches!(check(&file), Err(DenseError::Unsupported(_)));
            assert!(refused, "{} bytes", file.len());
        }

        let nested =
            (0..LEVELS_MAX).fold(Vec::new(), |inner, _| field(1, &field(5, &field(6, &inner))));
        for file in [&field(7, &nested), &field(7, &[0x0a, 9]), &[0x0b, 0x0c][..]] {
            assert!(matches!(check(file), Err(DenseError::Load(_))));
        }
        assert!(check(&field(7, &field(5, &field(9, &vec![0; 1 << 20])))).is_ok());
    }
}
