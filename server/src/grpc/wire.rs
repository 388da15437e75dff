//! The wire format of Protocol Buffers, for a request for scores: fields are parsed in place, and
//! counted before any is kept. Knows no message.

use crate::problem::{Problem, checked};
use prost::encoding::decode_varint;

/// The value of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// A field of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field<'a> {
    pub number: u64,
    pub value: Value<'a>,
}

/// Returns the problem of bytes that are not a message.
pub fn malformed() -> Problem {
    Problem::invalid("the message is malformed")
}

impl<'a> Field<'a> {
    /// Returns the bytes of a message, a text, bytes or a packed list.
    ///
    /// # Errors
    /// The field is a number.
    pub fn bytes(&self) -> Result<&'a [u8], Problem> {
        match self.value {
            Value::Bytes(bytes) => Ok(bytes),
            Value::Number(_) => Err(malformed()),
        }
    }

    /// Passes each number to `take`: the only one, or those of a packed list.
    ///
    /// # Errors
    /// A number is malformed, or `take` fails.
    pub fn each_number(
        &self,
        mut take: impl FnMut(u64) -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        let mut packed = match self.value {
            Value::Number(number) => return take(number),
            Value::Bytes(packed) => Fields(packed),
        };
        while !packed.0.is_empty() {
            take(packed.varint().ok_or_else(malformed)?)?;
        }
        Ok(())
    }

    /// Returns the text, which is a name in each message of the protocol.
    ///
    /// # Errors
    /// The field is not a text in UTF-8, or is longer than a name.
    pub fn text(&self) -> Result<&'a str, Problem> {
        checked(std::str::from_utf8(self.bytes()?).map_err(|_| malformed())?)
    }
}

/// The remaining fields of a message. Ends after a malformed one.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    /// Takes a varint; returns `None` if there is none.
    fn varint(&mut self) -> Option<u64> {
        decode_varint(&mut self.0).ok()
    }

    fn take(&mut self, bytes: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(usize::try_from(bytes).ok()?)?;
        self.0 = rest;
        Some(taken)
    }

    /// Takes a field; returns `None` if there is none. A number of fixed width is its bytes.
    fn field(&mut self) -> Option<Field<'a>> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => Value::Number(self.varint()?),
            1 => Value::Bytes(self.take(8)?),
            2 => {
                let bytes = self.varint()?;
                Value::Bytes(self.take(bytes)?)
            }
            5 => Value::Bytes(self.take(4)?),
            // The other types are groups, which no message of the protocol has.
            _ => return None,
        };
        Some(Field { number: key >> 3, value })
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>, Problem>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field().ok_or_else(malformed);
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}
