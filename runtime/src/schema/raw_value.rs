//! A value as the application has it: a text, a number or none. A key function makes its key. A
//! text without escapes is borrowed from its line of JSON, not copied.

use crate::limits::SHORTENED_BYTES_MAX;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer};
use std::borrow::Cow;
use std::fmt;

/// A text of a caller, as a message shows it: escaped, and cut after [`SHORTENED_BYTES_MAX`]
/// bytes.
#[derive(Clone, Copy, Debug)]
pub struct Shortened<'a>(pub &'a str);

impl fmt::Display for Shortened<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut left = SHORTENED_BYTES_MAX;
        // Character by character: a text of megabytes is never escaped whole.
        for character in self.0.escape_debug() {
            let Some(rest) = left.checked_sub(character.len_utf8()) else {
                return f.write_str("\u{2026}");
            };
            left = rest;
            write!(f, "{character}")?;
        }
        Ok(())
    }
}

/// A value of a sparse feature before it becomes a key.
#[derive(Clone, Debug, PartialEq)]
pub enum RawValue<'a> {
    /// Text, as UTF-8.
    Text(Cow<'a, str>),
    /// An integer that is not negative.
    Unsigned(u64),
    /// A negative integer.
    Negative(i64),
    /// Any other number.
    Float(f64),
    /// A number that its caller has as f32.
    Float32(f32),
    /// No value.
    Null,
}

impl RawValue<'_> {
    /// Returns whether the value is missing where a feature has a key for that: null, NaN, or the
    /// empty text, which a column of texts has instead.
    pub fn is_missing(&self) -> bool {
        match self {
            Self::Null => true,
            Self::Text(text) => text.is_empty(),
            Self::Float(x) => x.is_nan(),
            Self::Float32(x) => x.is_nan(),
            Self::Unsigned(_) | Self::Negative(_) => false,
        }
    }
}

impl fmt::Display for RawValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => write!(f, "the text `{}`", Shortened(text)),
            Self::Unsigned(n) => write!(f, "{n}"),
            Self::Negative(n) => write!(f, "{n}"),
            // A larger integer of JSON was rounded.
            Self::Float(x) if x.abs() >= 2f64.powi(53) => write!(f, "about {x:?}"),
            Self::Float(x) => write!(f, "{x:?}"),
            Self::Float32(x) => write!(f, "{x:?}"),
            Self::Null => f.write_str("null"),
        }
    }
}

impl<'a> From<&'a str> for RawValue<'a> {
    fn from(text: &'a str) -> Self {
        Self::Text(Cow::Borrowed(text))
    }
}

impl From<u64> for RawValue<'_> {
    fn from(n: u64) -> Self {
        Self::Unsigned(n)
    }
}

impl From<i64> for RawValue<'_> {
    fn from(n: i64) -> Self {
        u64::try_from(n).map_or(Self::Negative(n), Self::Unsigned)
    }
}

impl From<f64> for RawValue<'_> {
    fn from(x: f64) -> Self {
        Self::Float(x)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for RawValue<'a> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(RawValueVisitor)
    }
}

struct RawValueVisitor;

impl<'de> Visitor<'de> for RawValueVisitor {
    type Value = RawValue<'de>;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a text, a number or null")
    }

    fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(RawValue::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(RawValue::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_u64<E: Error>(self, n: u64) -> Result<Self::Value, E> {
        Ok(n.into())
    }

    fn visit_i64<E: Error>(self, n: i64) -> Result<Self::Value, E> {
        Ok(n.into())
    }

    fn visit_f64<E: Error>(self, x: f64) -> Result<Self::Value, E> {
        Ok(x.into())
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(RawValue::Null)
    }
}
