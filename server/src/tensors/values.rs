//! The values of a tensor, read one by one: integers, floats, and raw values for a key function.
//! Each protocol carries them as little-endian bytes, or as typed values that become such bytes.
//! Checks that there are as many as the shape says. A list of texts takes a pointer for each text.

use crate::connections::memory::Reservation;
use crate::limits::DIMENSIONS_MAX;
use crate::problem::Problem;
use hatchback::Shortened;
use hatchback::schema::raw_value::RawValue;
use std::borrow::Cow;

/// The key that fills a bag up to the width of its tensor.
const PADDING: i64 = -1;
/// Bytes of the length before each text.
const TEXT_PREFIX_BYTES: usize = 4;
/// In place of the length: no text, which JSON writes as null.
const NULL_TEXT: [u8; TEXT_PREFIX_BYTES] = [0xff; TEXT_PREFIX_BYTES];

/// A tensor of a request.
#[derive(Clone, Debug, Default)]
pub struct Tensor<'a> {
    pub name: Cow<'a, str>,
    pub datatype: Cow<'a, str>,
    pub shape: heapless::Vec<i64, DIMENSIONS_MAX>,
    /// Little-endian bytes of the tensor's type; a text is its length in four bytes and its bytes.
    pub values: Cow<'a, [u8]>,
    /// Whether the caller lets a model that has no such input ignore it.
    pub optional: bool,
}

impl Tensor<'_> {
    /// Returns a problem that names this tensor.
    pub fn fault(&self, problem: &str) -> Problem {
        Problem::invalid(format!("input `{}`: {problem}", Shortened(&self.name)))
    }

    /// Appends a dimension to the shape.
    ///
    /// # Errors
    /// There are too many.
    pub fn add_side(&mut self, side: i64) -> Result<(), Problem> {
        if self.shape.push(side).is_err() {
            return Err(self.fault(&format!("more than {DIMENSIONS_MAX} dimensions")));
        }
        Ok(())
    }

    /// Returns the problem that the tensor's type is none of `taken`.
    fn wrong_type(&self, taken: &str) -> Problem {
        self.fault(&format!("{}; it takes {taken}", Shortened(&self.datatype)))
    }

    /// Returns the number of values, as the shape says.
    pub fn elements(&self) -> Result<usize, Problem> {
        let shape = &self.shape;
        let product = |sum: usize, side: &i64| sum.checked_mul(usize::try_from(*side).ok()?);
        // With this limit the bytes of the elements, up to eight each, do not overflow.
        let elements = shape.iter().try_fold(1, product);
        let elements = elements.filter(|n| !shape.is_empty() && *n <= isize::MAX as usize / 8);
        elements.ok_or_else(|| self.fault(&format!("{shape:?} is not a shape")))
    }

    /// Returns rows and columns; a vector has one column.
    pub fn matrix(&self) -> Result<[usize; 2], Problem> {
        // `elements` has refused a negative side before.
        let side = |side: i64| usize::try_from(side).unwrap_or(0);
        match *self.shape.as_slice() {
            [rows] => Ok([side(rows), 1]),
            [rows, width] => Ok([side(rows), side(width)]),
            _ => Err(self.fault(&format!("{:?} is not [batch, values]", self.shape))),
        }
    }

    /// Returns the length of a vector.
    pub fn vector(&self) -> Result<usize, Problem> {
        match *self.shape.as_slice() {
            [length] => Ok(usize::try_from(length).unwrap_or(0)),
            _ => Err(self.fault(&format!("{:?} is not one dimension", self.shape))),
        }
    }

    /// Returns the values, each of `bytes` bytes, if there are as many as the shape says.
    fn values_of(&self, bytes: usize) -> Result<&[u8], Problem> {
        let (found, elements) = (self.values.len(), self.elements()?);
        if found == bytes * elements {
            return Ok(&self.values);
        }
        let Tensor { datatype, shape, .. } = self;
        Err(self.fault(&format!(
            "{found} bytes, and {datatype} {shape:?} has {elements} values of {bytes} bytes"
        )))
    }
}

/// Appends `text` with its length, as it is among the values of a tensor.
pub fn write_text(to: &mut Vec<u8>, text: &[u8]) {
    // A request is far below 4 GiB.
    to.extend((text.len() as u32).to_le_bytes());
    to.extend_from_slice(text);
}

/// Appends a missing text, as it is among the values of a tensor.
pub fn write_null(to: &mut Vec<u8>) {
    to.extend(NULL_TEXT);
}

/// Integers of a tensor, as bytes.
#[derive(Clone, Copy, Debug)]
pub enum Integers<'a> {
    I32(&'a [u8]),
    I64(&'a [u8]),
    U64(&'a [u8]),
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&bytes[N * at..N * at + N]);
    value
}

impl<'a> Integers<'a> {
    /// Returns the integers of `tensor`.
    ///
    /// # Errors
    /// The tensor has another type or another length.
    pub fn of(tensor: &'a Tensor<'_>) -> Result<Self, Problem> {
        match &*tensor.datatype {
            "INT64" => tensor.values_of(8).map(Self::I64),
            "UINT64" => tensor.values_of(8).map(Self::U64),
            "INT32" => tensor.values_of(4).map(Self::I32),
            _ => Err(tensor.wrong_type("INT64, UINT64 or INT32")),
        }
    }

    /// Returns the key at `at`; `None` for -1, which is a key only where bags have offsets.
    pub fn key(self, at: usize) -> Option<u64> {
        match self.value(at) {
            Ok(key) => Some(key),
            Err(PADDING) => None,
            // As in `pack`, a negative key is the u64 of the same bits.
            Err(key) => Some(key as u64),
        }
    }

    /// Returns the value at `at`, or as the error a value below 0.
    fn value(self, at: usize) -> Result<u64, i64> {
        let value = match self {
            Self::U64(b) => return Ok(u64::from_le_bytes(bytes_at(b, at))),
            Self::I32(b) => i32::from_le_bytes(bytes_at(b, at)).into(),
            Self::I64(b) => i64::from_le_bytes(bytes_at(b, at)),
        };
        u64::try_from(value).map_err(|_| value)
    }

    /// Returns the value at `at` as an offset; `None` if it is negative.
    pub fn offset(self, at: usize) -> Option<usize> {
        usize::try_from(self.value(at).ok()?).ok()
    }
}

/// Numbers of a tensor.
#[derive(Clone, Copy, Debug)]
pub enum Floats<'a> {
    /// No tensor was sent: every number is zero.
    Zeros,
    Bytes(&'a [u8]),
}

impl<'a> Floats<'a> {
    /// Returns the numbers of `tensor`.
    ///
    /// # Errors
    /// The tensor has another type or another length.
    pub fn of(tensor: &'a Tensor<'_>) -> Result<Self, Problem> {
        if tensor.datatype != "FP32" {
            return Err(tensor.wrong_type("FP32"));
        }
        tensor.values_of(4).map(Self::Bytes)
    }

    /// Returns the number at `at`.
    pub fn get(self, at: usize) -> f32 {
        match self {
            Self::Bytes(b) => f32::from_le_bytes(bytes_at(b, at)),
            Self::Zeros => 0.0,
        }
    }
}

/// Values of a feature from which its key function makes keys.
#[derive(Clone, Debug)]
pub enum RawValues<'a> {
    Integers(Integers<'a>),
    F32(Floats<'a>),
    F64(&'a [u8]),
    /// Texts; JSON has nulls among them.
    Texts(Vec<Option<&'a str>>),
}

impl<'a> RawValues<'a> {
    /// Returns the values of `tensor`. Counts the list of texts in `memory`.
    ///
    /// # Errors
    /// The tensor has another type or another length, a text is not UTF-8, or the budget has no
    /// room.
    pub fn of(tensor: &'a Tensor<'_>, memory: &mut Reservation) -> Result<Self, Problem> {
        match &*tensor.datatype {
            "INT64" | "UINT64" | "INT32" => Integers::of(tensor).map(Self::Integers),
            "FP32" => Floats::of(tensor).map(Self::F32),
            "FP64" => tensor.values_of(8).map(Self::F64),
            "BYTES" => texts(tensor, memory).map(Self::Texts),
            _ => Err(tensor.wrong_type("BYTES, INT32, INT64, UINT64, FP32 or FP64")),
        }
    }

    /// Returns the value at `at`.
    pub fn get(&self, at: usize) -> RawValue<'a> {
        match self {
            Self::Integers(integers) => match integers.value(at) {
                Ok(value) => RawValue::Unsigned(value),
                Err(negative) => RawValue::Negative(negative),
            },
            Self::F32(floats) => RawValue::Float32(floats.get(at)),
            Self::F64(b) => RawValue::Float(f64::from_le_bytes(bytes_at(b, at))),
            Self::Texts(texts) => texts[at].map_or(RawValue::Null, RawValue::from),
        }
    }
}

/// Returns the texts of `tensor`, which has the type BYTES.
fn texts<'a>(
    tensor: &'a Tensor<'_>,
    memory: &mut Reservation,
) -> Result<Vec<Option<&'a str>>, Problem> {
    let (mut bytes, elements) = (&tensor.values[..], tensor.elements()?);
    // Each text takes at least its prefix, so there cannot be more.
    let most = elements.min(bytes.len() / TEXT_PREFIX_BYTES);
    memory.grow(most * size_of::<Option<&str>>())?;
    let mut texts = Vec::with_capacity(most);
    let cut = |at: usize, length: u32, left: usize| {
        let text = format!("text {at} has {length} bytes, and {left} are left");
        tensor.fault(&format!("its texts end in the middle of one: {text}"))
    };
    // Only JSON has nulls. In the bytes of a caller the mark is a length, which is too large.
    let has_nulls = matches!(tensor.values, Cow::Owned(_));
    while !bytes.is_empty() && texts.len() < elements {
        let (at, left) = (texts.len(), bytes.len());
        let prefix = || cut(at, TEXT_PREFIX_BYTES as u32, left);
        let (length, rest) = bytes.split_first_chunk().ok_or_else(prefix)?;
        if *length == NULL_TEXT && has_nulls {
            texts.push(None);
            bytes = rest;
            continue;
        }
        let length = u32::from_le_bytes(*length);
        let text;
        let whole = rest.split_at_checked(length as usize);
        (text, bytes) = whole.ok_or_else(|| cut(at, length, rest.len()))?;
        let text = std::str::from_utf8(text).map_err(|_| tensor.fault("a text is not UTF-8"))?;
        texts.push(Some(text));
    }

    let (found, shape) = (texts.len(), &tensor.shape);
    if !bytes.is_empty() || found < elements {
        let over = if bytes.is_empty() { "" } else { "more than " };
        return Err(tensor.fault(&format!("{over}{found} texts, and {shape:?} has {elements}")));
    }
    Ok(texts)
}
