//! The values of a tensor, read one by one in the form in which the protocol carried them:
//! integers, floats, and raw values for a key function. Checks that there are as many as the shape
//! says. Never copies a tensor; a list of texts takes a pointer for each text.

use crate::connections::memory::Reservation;
use crate::limits::DIMENSIONS_MAX;
use crate::problem::Problem;
use hatchback::Shortened;
use hatchback::schema::raw_value::RawValue;
use hyper::body::Bytes;

/// The key that fills a bag up to the width of its tensor.
const PADDING: i64 = -1;
/// Bytes of the length before each text of binary data.
const TEXT_PREFIX_BYTES: usize = 4;

/// Values of a tensor, as the protocol carried them.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// Little-endian bytes of the tensor's type; a text is its length in four bytes and its bytes.
    Bytes(&'a [u8]),
    I32(&'a [i32]),
    I64(&'a [i64]),
    U64(&'a [u64]),
    F32(&'a [f32]),
    F64(&'a [f64]),
    /// Texts of gRPC.
    Texts(&'a [Bytes]),
    /// Texts of JSON.
    Raw(&'a [RawValue<'a>]),
}

/// A tensor of a request.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    pub name: &'a str,
    pub datatype: &'a str,
    pub shape: &'a [i64],
    pub values: Values<'a>,
}

impl Tensor<'_> {
    /// Returns a problem that names this tensor.
    pub fn fault(&self, problem: &str) -> Problem {
        Problem::invalid(format!("input `{}`: {problem}", Shortened(self.name)))
    }

    /// Returns the problem that the tensor's type is none of `taken`.
    fn wrong_type(&self, taken: &str) -> Problem {
        self.fault(&format!("{}; it takes {taken}", Shortened(self.datatype)))
    }

    /// Returns the number of values, as the shape says.
    pub fn elements(&self) -> Result<usize, Problem> {
        let shape = self.shape;
        // Before the shape is shown: it may have a million sides.
        if !(1..=DIMENSIONS_MAX).contains(&shape.len()) {
            let sides = shape.len();
            return Err(self.fault(&format!("{sides} dimensions; at most {DIMENSIONS_MAX}")));
        }
        let product = |sum: usize, side: &i64| sum.checked_mul(usize::try_from(*side).ok()?);
        // With this limit the bytes of the elements, up to eight each, do not overflow.
        let elements = shape.iter().try_fold(1, product).filter(|n| *n <= isize::MAX as usize / 8);
        elements.ok_or_else(|| self.fault(&format!("{shape:?} is not a shape")))
    }

    /// Returns rows and columns; a vector has one column.
    pub fn matrix(&self) -> Result<[usize; 2], Problem> {
        // `elements` has refused a negative side before.
        let side = |side: i64| usize::try_from(side).unwrap_or(0);
        match *self.shape {
            [rows] => Ok([side(rows), 1]),
            [rows, width] => Ok([side(rows), side(width)]),
            _ => Err(self.fault(&format!("{:?} is not [batch, values]", self.shape))),
        }
    }

    /// Returns the length of a vector.
    pub fn vector(&self) -> Result<usize, Problem> {
        match *self.shape {
            [length] => Ok(usize::try_from(length).unwrap_or(0)),
            _ => Err(self.fault(&format!("{:?} is not one dimension", self.shape))),
        }
    }

    fn check_length(&self, found: usize, expected: usize) -> Result<(), Problem> {
        if found == expected {
            return Ok(());
        }
        let what = if matches!(self.values, Values::Bytes(_)) { "bytes" } else { "values" };
        let Tensor { datatype, shape, .. } = self;
        let problem = format!("{found} {what}, and {datatype} {shape:?} has {expected}");
        Err(self.fault(&problem))
    }
}

/// Integers of a tensor.
#[derive(Clone, Copy, Debug)]
pub enum Integers<'a> {
    I32Bytes(&'a [u8]),
    I64Bytes(&'a [u8]),
    U64Bytes(&'a [u8]),
    I32(&'a [i32]),
    I64(&'a [i64]),
    U64(&'a [u64]),
}

/// A key of a tensor.
pub enum Key {
    /// -1, which is a key where bags have offsets.
    Padding,
    Is(u64),
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
    pub fn of(tensor: &Tensor<'a>) -> Result<Self, Problem> {
        let elements = tensor.elements()?;
        let (found, expected, integers) = match (tensor.datatype, tensor.values) {
            ("INT64", Values::Bytes(b)) => (b.len(), 8 * elements, Self::I64Bytes(b)),
            ("UINT64", Values::Bytes(b)) => (b.len(), 8 * elements, Self::U64Bytes(b)),
            ("INT32", Values::Bytes(b)) => (b.len(), 4 * elements, Self::I32Bytes(b)),
            ("INT64", Values::I64(v)) => (v.len(), elements, Self::I64(v)),
            ("UINT64", Values::U64(v)) => (v.len(), elements, Self::U64(v)),
            ("INT32", Values::I32(v)) => (v.len(), elements, Self::I32(v)),
            ("INT64" | "UINT64" | "INT32", _) => {
                return Err(tensor.fault("its values are of another type than it says"));
            }
            _ => return Err(tensor.wrong_type("INT64, UINT64 or INT32")),
        };
        tensor.check_length(found, expected)?;
        Ok(integers)
    }

    /// Returns the key at `at`.
    pub fn key(self, at: usize) -> Key {
        match self.value(at) {
            Ok(key) => Key::Is(key),
            Err(PADDING) => Key::Padding,
            // As in `pack`, a negative key is the u64 of the same bits.
            Err(key) => Key::Is(key as u64),
        }
    }

    /// Returns the value at `at`, or as the error a value below 0.
    fn value(self, at: usize) -> Result<u64, i64> {
        let value = match self {
            Self::U64Bytes(b) => return Ok(u64::from_le_bytes(bytes_at(b, at))),
            Self::U64(v) => return Ok(v[at]),
            Self::I32Bytes(b) => i32::from_le_bytes(bytes_at(b, at)).into(),
            Self::I64Bytes(b) => i64::from_le_bytes(bytes_at(b, at)),
            Self::I32(v) => v[at].into(),
            Self::I64(v) => v[at],
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
    Values(&'a [f32]),
}

impl<'a> Floats<'a> {
    /// Returns the numbers of `tensor`.
    ///
    /// # Errors
    /// The tensor has another type or another length.
    pub fn of(tensor: &Tensor<'a>) -> Result<Self, Problem> {
        let elements = tensor.elements()?;
        let (found, expected, floats) = match (tensor.datatype, tensor.values) {
            ("FP32", Values::Bytes(b)) => (b.len(), 4 * elements, Self::Bytes(b)),
            ("FP32", Values::F32(v)) => (v.len(), elements, Self::Values(v)),
            _ => return Err(tensor.wrong_type("FP32")),
        };
        tensor.check_length(found, expected)?;
        Ok(floats)
    }

    /// Returns the number at `at`.
    pub fn get(self, at: usize) -> f32 {
        match self {
            Self::Bytes(b) => f32::from_le_bytes(bytes_at(b, at)),
            Self::Values(v) => v[at],
            Self::Zeros => 0.0,
        }
    }
}

/// Values of a feature from which its key function makes keys.
#[derive(Clone, Debug)]
pub enum RawValues<'a> {
    Integers(Integers<'a>),
    F32(Floats<'a>),
    F64Bytes(&'a [u8]),
    F64(&'a [f64]),
    /// Texts; JSON has nulls among them.
    Texts(Vec<Option<&'a str>>),
}

impl<'a> RawValues<'a> {
    /// Returns the values of `tensor`. Counts the list of texts in `memory`.
    ///
    /// # Errors
    /// The tensor has another type or another length, a text is not UTF-8, or the budget has no
    /// room.
    pub fn of(tensor: &Tensor<'a>, memory: &mut Reservation) -> Result<Self, Problem> {
        let elements = tensor.elements()?;
        let (found, expected, values) = match (tensor.datatype, tensor.values) {
            ("INT64" | "UINT64" | "INT32", _) => return Integers::of(tensor).map(Self::Integers),
            ("FP32", _) => return Floats::of(tensor).map(Self::F32),
            ("FP64", Values::Bytes(b)) => (b.len(), 8 * elements, Self::F64Bytes(b)),
            ("FP64", Values::F64(v)) => (v.len(), elements, Self::F64(v)),
            ("BYTES", values) => {
                let texts = texts(tensor, values, memory)?;
                (texts.len(), elements, Self::Texts(texts))
            }
            _ => return Err(tensor.wrong_type("BYTES, integers, FP32 or FP64")),
        };
        match &values {
            Self::Texts(_) if found != expected => {
                let shape = tensor.shape;
                Err(tensor.fault(&format!("{found} texts, and {shape:?} has {expected}")))
            }
            Self::Texts(_) => Ok(values),
            _ => tensor.check_length(found, expected).map(|()| values),
        }
    }

    /// Returns the value at `at`.
    pub fn get(&self, at: usize) -> RawValue<'a> {
        match self {
            Self::Integers(integers) => match integers.value(at) {
                Ok(value) => RawValue::Unsigned(value),
                Err(negative) => RawValue::Negative(negative),
            },
            Self::F32(floats) => RawValue::Float(floats.get(at).into()),
            Self::F64Bytes(b) => RawValue::Float(f64::from_le_bytes(bytes_at(b, at))),
            Self::F64(v) => RawValue::Float(v[at]),
            Self::Texts(texts) => texts[at].map_or(RawValue::Null, RawValue::from),
        }
    }
}

/// Returns the texts of `tensor`, which has the type BYTES.
fn texts<'a>(
    tensor: &Tensor<'a>,
    values: Values<'a>,
    memory: &mut Reservation,
) -> Result<Vec<Option<&'a str>>, Problem> {
    let utf8 = |bytes: &'a [u8]| {
        std::str::from_utf8(bytes).map(Some).map_err(|_| tensor.fault("a text is not UTF-8"))
    };
    let mut reserve = |count: usize| memory.grow(2 * count * size_of::<Option<&str>>());
    match values {
        Values::Texts(texts) => {
            reserve(texts.len())?;
            texts.iter().map(|text| utf8(text)).collect()
        }
        Values::Raw(values) => {
            reserve(values.len())?;
            let text = |value: &'a RawValue<'a>| match value {
                RawValue::Text(text) => Ok(Some(text.as_ref())),
                RawValue::Null => Ok(None),
                other => Err(tensor.fault(&format!("{other} is not a text"))),
            };
            values.iter().map(text).collect()
        }
        Values::Bytes(mut bytes) => {
            // Each text takes at least its prefix, so there cannot be more.
            reserve(bytes.len() / TEXT_PREFIX_BYTES)?;
            let mut texts = Vec::new();
            while !bytes.is_empty() {
                let split = bytes.split_first_chunk::<TEXT_PREFIX_BYTES>();
                let text = split.and_then(|(length, rest)| {
                    rest.split_at_checked(u32::from_le_bytes(*length) as usize)
                });
                let cut = || tensor.fault("its texts end in the middle of one");
                let (text, rest) = text.ok_or_else(cut)?;
                texts.push(utf8(text)?);
                bytes = rest;
            }
            Ok(texts)
        }
        _ => Err(tensor.fault("its values are of another type than it says")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connections::memory::{ByteBudget, Share};

    fn raw<'a>(
        datatype: &'a str,
        shape: &'a [i64],
        values: Values<'a>,
    ) -> Result<Vec<RawValue<'a>>, String> {
        let mut memory = Share::new(&ByteBudget::new(1 << 10, 1 << 9)).reservation();
        let tensor = Tensor { name: "f.values", datatype, shape, values };
        let raw = RawValues::of(&tensor, &mut memory).map_err(|e| e.to_string())?;
        Ok((0..tensor.elements().unwrap()).map(|at| raw.get(at)).collect())
    }

    #[test]
    fn texts_and_numbers_are_read_in_every_form() {
        let (a, b) = (RawValue::from("a"), RawValue::from("\u{e4}b"));
        let bytes = b"\x01\0\0\0a\x03\0\0\0\xc3\xa4b";
        let grpc = [Bytes::from("a"), Bytes::from("\u{e4}b")];
        let json = [a.clone(), b.clone()];
        for values in [Values::Bytes(bytes), Values::Texts(&grpc), Values::Raw(&json)] {
            assert_eq!(raw("BYTES", &[2], values).unwrap(), [a.clone(), b.clone()]);
        }
        let minus = (-2i64).to_le_bytes();
        assert_eq!(raw("INT64", &[1, 1], Values::Bytes(&minus)).unwrap(), [(-2i64).into()]);
        assert_eq!(raw("FP64", &[1], Values::F64(&[0.5])).unwrap(), [0.5.into()]);
        let half = 0.5f32.to_le_bytes();
        assert_eq!(raw("FP32", &[1], Values::Bytes(&half)).unwrap(), [0.5.into()]);
    }

    #[test]
    fn texts_that_are_cut_short_too_many_or_no_texts_are_refused() {
        let all: [(&str, &[i64], Values<'_>, &str); 6] = [
            ("BYTES", &[1], Values::Bytes(b"\x01\0\0"), "in the middle"),
            ("BYTES", &[1], Values::Bytes(b"\x02\0\0\0a"), "in the middle"),
            ("BYTES", &[1], Values::Bytes(b"\x01\0\0\0\xff"), "not UTF-8"),
            ("BYTES", &[2], Values::Bytes(b"\x01\0\0\0a"), "1 texts, and [2] has 2"),
            ("BYTES", &[1], Values::I64(&[1]), "another type"),
            ("BOOL", &[1], Values::Bytes(b"\x01"), "BOOL; it takes BYTES"),
        ];
        for (datatype, shape, values, expected) in all {
            let found = raw(datatype, shape, values).unwrap_err();
            assert!(found.contains(expected), "{found}");
        }
        let many = [b"\0\0\0\0".as_slice(); 1000].concat();
        let found = raw("BYTES", &[1000], Values::Bytes(&many)).unwrap_err();
        assert!(found.contains("bytes_max"), "{found}");
    }
}
