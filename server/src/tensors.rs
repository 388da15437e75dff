//! Tensors of a request and the batch that they become. A sparse feature is one tensor of keys,
//! `[batch, hotness]` padded with -1, or two: jagged keys and offsets. The dense features are one
//! tensor. Never copies a tensor.

use crate::limits::DIMENSIONS_MAX;
use crate::memory::Reservation;
use crate::problem::Problem;
use hatchback::schema::batch::Batch;
use hatchback::{Feature, Schema};
use std::collections::HashMap;
use std::sync::Arc;

/// The key that fills a bag up to the width of its tensor.
const PADDING: i64 = -1;

/// The output with the scores, FP32 `[batch, n]`.
pub const SCORE: &str = "score";
/// The output with the statuses, INT32 `[batch, 5]`: fresh, defaulted, absent, damaged, late.
pub const STATUS: &str = "status";
/// The output with the sequence of the generation that scored the request, INT64 `[1]`.
pub const GENERATION: &str = "generation";
/// Numbers of a sample's status.
pub const STATUS_FIELDS: usize = 5;

/// Values of a tensor, as the protocol carried them.
#[derive(Clone, Copy, Debug)]
pub enum Values<'a> {
    /// Little-endian bytes of the tensor's type.
    Bytes(&'a [u8]),
    I32(&'a [i32]),
    I64(&'a [i64]),
    U64(&'a [u64]),
    F32(&'a [f32]),
}

/// A tensor of a request.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    pub name: &'a str,
    pub datatype: &'a str,
    pub shape: &'a [i64],
    pub values: Values<'a>,
}

/// The part of a sample that a tensor has.
#[derive(Clone, Copy, Debug)]
enum Part {
    Dense,
    /// The padded keys of a feature.
    Padded(usize),
    /// The jagged keys of a feature.
    Keys(usize),
    /// The offsets of jagged keys.
    Offsets(usize),
    /// The weights of the keys of a weighted feature, padded or jagged as the keys are.
    Weights(usize),
}

/// The names of the tensors of a model.
#[derive(Debug)]
pub struct Layout {
    pub schema: Arc<Schema>,
    parts: HashMap<String, Part>,
    /// The name of the tensor of dense features.
    pub dense: String,
}

impl Layout {
    /// Returns the layout of `schema`.
    pub fn new(schema: Arc<Schema>) -> Self {
        let mut parts = HashMap::new();
        for (f, feature) in schema.features.iter().enumerate() {
            parts.insert(format!("{}.keys", feature.name), Part::Keys(f));
            parts.insert(format!("{}.offsets", feature.name), Part::Offsets(f));
            if feature.weighted {
                parts.insert(format!("{}.weights", feature.name), Part::Weights(f));
            }
        }
        // A feature's own name wins.
        let named = schema.features.iter().enumerate();
        parts.extend(named.map(|(f, feature)| (feature.name.clone(), Part::Padded(f))));

        let mut free = ["dense", "dense_features", "dense.values"].into_iter();
        let dense = free.find(|name| !parts.contains_key(*name)).unwrap_or("").to_owned();
        if !schema.dense_features.is_empty() {
            parts.insert(dense.clone(), Part::Dense);
        }
        Self { schema, parts, dense }
    }
}

/// Integers of a tensor.
#[derive(Clone, Copy, Debug)]
enum Integers<'a> {
    I32Bytes(&'a [u8]),
    I64Bytes(&'a [u8]),
    U64Bytes(&'a [u8]),
    I32(&'a [i32]),
    I64(&'a [i64]),
    U64(&'a [u64]),
}

/// A key of a tensor.
enum Key {
    Padding,
    Is(u64),
    Negative,
}

fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&bytes[N * at..N * at + N]);
    value
}

impl<'a> Integers<'a> {
    fn of(tensor: &Tensor<'a>) -> Result<Self, Problem> {
        let elements = elements(tensor)?;
        let (found, expected, integers) = match (tensor.datatype, tensor.values) {
            ("INT64", Values::Bytes(b)) => (b.len(), 8 * elements, Self::I64Bytes(b)),
            ("UINT64", Values::Bytes(b)) => (b.len(), 8 * elements, Self::U64Bytes(b)),
            ("INT32", Values::Bytes(b)) => (b.len(), 4 * elements, Self::I32Bytes(b)),
            ("INT64", Values::I64(v)) => (v.len(), elements, Self::I64(v)),
            ("UINT64", Values::U64(v)) => (v.len(), elements, Self::U64(v)),
            ("INT32", Values::I32(v)) => (v.len(), elements, Self::I32(v)),
            ("INT64" | "UINT64" | "INT32", _) => {
                return Err(fault(tensor, "its values are of another type than it says"));
            }
            (other, _) => {
                let problem = format!("{other}; it takes INT64, UINT64 or INT32");
                return Err(fault(tensor, &problem));
            }
        };
        check_length(tensor, found, expected)?;
        Ok(integers)
    }

    fn key(self, at: usize) -> Key {
        let value = match self {
            Self::U64Bytes(b) => return Key::Is(u64::from_le_bytes(bytes_at(b, at))),
            Self::U64(v) => return Key::Is(v[at]),
            Self::I32Bytes(b) => i32::from_le_bytes(bytes_at(b, at)).into(),
            Self::I64Bytes(b) => i64::from_le_bytes(bytes_at(b, at)),
            Self::I32(v) => v[at].into(),
            Self::I64(v) => v[at],
        };
        match u64::try_from(value) {
            Ok(key) => Key::Is(key),
            Err(_) if value == PADDING => Key::Padding,
            Err(_) => Key::Negative,
        }
    }

    /// Returns the value at `at` if it is an offset.
    fn offset(self, at: usize) -> Option<usize> {
        match self.key(at) {
            Key::Is(offset) => usize::try_from(offset).ok(),
            Key::Padding | Key::Negative => None,
        }
    }
}

/// Numbers of a tensor.
#[derive(Clone, Copy, Debug)]
enum Floats<'a> {
    /// No tensor, where the dense features do not matter.
    Zeros,
    Bytes(&'a [u8]),
    Values(&'a [f32]),
}

impl<'a> Floats<'a> {
    fn of(tensor: &Tensor<'a>) -> Result<Self, Problem> {
        let elements = elements(tensor)?;
        let (found, expected, floats) = match (tensor.datatype, tensor.values) {
            ("FP32", Values::Bytes(b)) => (b.len(), 4 * elements, Self::Bytes(b)),
            ("FP32", Values::F32(v)) => (v.len(), elements, Self::Values(v)),
            (other, _) => return Err(fault(tensor, &format!("{other}; it takes FP32"))),
        };
        check_length(tensor, found, expected)?;
        Ok(floats)
    }

    fn get(self, at: usize) -> f32 {
        match self {
            Self::Bytes(b) => f32::from_le_bytes(bytes_at(b, at)),
            Self::Values(v) => v[at],
            Self::Zeros => 0.0,
        }
    }
}

fn fault(tensor: &Tensor<'_>, problem: &str) -> Problem {
    Problem::invalid(format!("input `{}`: {problem}", tensor.name.escape_debug()))
}

fn check_length(tensor: &Tensor<'_>, found: usize, expected: usize) -> Result<(), Problem> {
    if found == expected {
        return Ok(());
    }
    let what = if matches!(tensor.values, Values::Bytes(_)) { "bytes" } else { "values" };
    let Tensor { datatype, shape, .. } = tensor;
    let problem = format!("{found} {what}, and {datatype} {shape:?} has {expected}");
    Err(fault(tensor, &problem))
}

/// Returns the values of a tensor, as its shape says.
fn elements(tensor: &Tensor<'_>) -> Result<usize, Problem> {
    let shape = tensor.shape;
    let product = |sum: usize, side: &i64| sum.checked_mul(usize::try_from(*side).ok()?);
    let elements = shape.iter().try_fold(1, product).filter(|n| *n <= isize::MAX as usize / 8);
    match elements {
        Some(elements) if (1..=DIMENSIONS_MAX).contains(&shape.len()) => Ok(elements),
        _ => Err(fault(tensor, &format!("{shape:?} is no shape"))),
    }
}

/// The keys of a feature.
#[derive(Clone, Copy, Debug, Default)]
struct Bags<'a> {
    keys: Option<Integers<'a>>,
    offsets: Option<Integers<'a>>,
    /// Weights of the keys, and how many there are.
    weights: Option<(Floats<'a>, usize)>,
    /// Keys of each sample where there are no offsets, padding included.
    width: usize,
    /// Keys in all bags.
    count: usize,
}

/// The columns of a request.
struct Columns<'a> {
    /// Samples; `None` before the first tensor says.
    size: Option<usize>,
    dense: Option<Floats<'a>>,
    bags: Vec<Bags<'a>>,
}

impl<'a> Columns<'a> {
    fn of(layout: &Layout, tensors: &[Tensor<'a>]) -> Result<Self, Problem> {
        let bags = vec![Bags::default(); layout.schema.features.len()];
        let mut columns = Self { size: None, dense: None, bags };
        for tensor in tensors {
            let part = layout.parts.get(tensor.name).copied();
            let part = part.ok_or_else(|| fault(tensor, "the model has no such input"))?;
            columns.add(layout, tensor, part)?;
        }
        columns.check_offsets(&layout.schema)?;
        columns.check_weights(&layout.schema)?;
        Ok(columns)
    }

    fn add(&mut self, layout: &Layout, tensor: &Tensor<'a>, part: Part) -> Result<(), Problem> {
        let twice = || fault(tensor, "occurs twice, or beside the feature's other form");
        match part {
            Part::Dense => {
                let (floats, [rows, width]) = (Floats::of(tensor)?, matrix(tensor)?);
                let expected = layout.schema.dense_features.len();
                if width != expected {
                    let problem = format!("{width} values a sample, the model takes {expected}");
                    return Err(fault(tensor, &problem));
                }
                if self.dense.replace(floats).is_some() {
                    return Err(twice());
                }
                self.set_size(tensor, rows)
            }
            Part::Padded(f) => {
                let (keys, [rows, width]) = (Integers::of(tensor)?, matrix(tensor)?);
                let (weights, count) = (self.bags[f].weights, rows * width);
                let padded = Bags { keys: Some(keys), offsets: None, weights, width, count };
                let before = std::mem::replace(&mut self.bags[f], padded);
                if before.keys.is_some() || before.offsets.is_some() {
                    return Err(twice());
                }
                self.set_size(tensor, rows)
            }
            Part::Keys(f) => {
                let (keys, count) = (Integers::of(tensor)?, vector(tensor)?);
                if self.bags[f].keys.replace(keys).is_some() {
                    return Err(twice());
                }
                self.bags[f].count = count;
                Ok(())
            }
            Part::Weights(f) => {
                let weights = (Floats::of(tensor)?, elements(tensor)?);
                match self.bags[f].weights.replace(weights) {
                    None => Ok(()),
                    Some(_) => Err(twice()),
                }
            }
            Part::Offsets(f) => {
                let (offsets, count) = (Integers::of(tensor)?, vector(tensor)?);
                let is_padded = self.bags[f].width > 0;
                if is_padded || self.bags[f].offsets.replace(offsets).is_some() {
                    return Err(twice());
                }
                let rows = count.checked_sub(1);
                let rows = rows.ok_or_else(|| fault(tensor, "has no offset; it starts with 0"))?;
                self.set_size(tensor, rows)
            }
        }
    }

    fn set_size(&mut self, tensor: &Tensor<'_>, rows: usize) -> Result<(), Problem> {
        match self.size.replace(rows) {
            Some(before) if before != rows => {
                let problem = format!("has {rows} samples, and the inputs before it {before}");
                Err(fault(tensor, &problem))
            }
            _ => Ok(()),
        }
    }

    /// Checks that there are as many weights as keys, padding included.
    fn check_weights(&self, schema: &Schema) -> Result<(), Problem> {
        for (feature, bags) in schema.features.iter().zip(&self.bags) {
            let (keys, weights) = (bags.count, bags.weights.map(|(_, count)| count));
            if weights.is_some_and(|weights| weights != keys) {
                let (name, weights) = (feature.name.escape_debug(), weights.unwrap_or_default());
                let message = format!("input `{name}.weights`: {weights} values for {keys} keys");
                return Err(Problem::invalid(message));
            }
        }
        Ok(())
    }

    /// Checks that jagged keys have offsets that start at 0, never fall, and end at their number.
    fn check_offsets(&self, schema: &Schema) -> Result<(), Problem> {
        let jagged = schema.features.iter().zip(&self.bags).filter(|(_, bags)| bags.width == 0);
        for (Feature { name, .. }, bags) in jagged {
            let name = name.escape_debug();
            match (bags.keys, bags.offsets) {
                (None, None) => {}
                (None, Some(_)) => {
                    return Err(Problem::invalid(format!("input `{name}.keys` is missing")));
                }
                (Some(_), None) if bags.count == 0 => {}
                (Some(_), None) => {
                    return Err(Problem::invalid(format!("input `{name}.offsets` is missing")));
                }
                (Some(_), Some(offsets)) => {
                    let mut last = 0;
                    for at in 0..=self.size.unwrap_or(0) {
                        let offset = offsets.offset(at).filter(|offset| {
                            *offset >= last && *offset <= bags.count && (at > 0 || *offset == 0)
                        });
                        last = offset.ok_or_else(|| wrong_offset(&name, at))?;
                    }
                    if last != bags.count {
                        return Err(wrong_offset(&name, self.size.unwrap_or(0)));
                    }
                }
            }
        }
        Ok(())
    }
}

fn wrong_offset(name: &impl std::fmt::Display, at: usize) -> Problem {
    let rule = "offsets start at 0, never fall, and end at the number of keys";
    Problem::invalid(format!("input `{name}.offsets`: offset {at} is wrong: {rule}"))
}

/// Returns rows and columns of a tensor; a vector has one column.
fn matrix(tensor: &Tensor<'_>) -> Result<[usize; 2], Problem> {
    let side = |side: i64| usize::try_from(side).unwrap_or(0);
    match *tensor.shape {
        [rows] => Ok([side(rows), 1]),
        [rows, width] => Ok([side(rows), side(width)]),
        _ => Err(fault(tensor, &format!("{:?} is not [batch, values]", tensor.shape))),
    }
}

fn vector(tensor: &Tensor<'_>) -> Result<usize, Problem> {
    match *tensor.shape {
        [length] => Ok(usize::try_from(length).unwrap_or(0)),
        _ => Err(fault(tensor, &format!("{:?} is not one dimension", tensor.shape))),
    }
}

/// Makes a batch of `tensors`, which has at most `batch_max` samples. Counts the batch in `memory`.
///
/// # Errors
/// A tensor does not fit the model, or the budget has no room for the batch.
pub fn batch_of(
    layout: &Layout,
    tensors: &[Tensor<'_>],
    batch_max: usize,
    memory: &mut Reservation,
) -> Result<Batch, Problem> {
    let columns = Columns::of(layout, tensors)?;
    if columns.dense.is_none() && !layout.schema.dense_features.is_empty() {
        return Err(Problem::invalid(format!("input `{}` is missing", layout.dense)));
    }
    columns.batch(&layout.schema, batch_max, memory)
}

/// Makes a batch of the keys of `tensors`, as [`batch_of`] does, without dense features.
///
/// # Errors
/// Those of [`batch_of`].
pub fn keys_of(
    layout: &Layout,
    tensors: &[Tensor<'_>],
    batch_max: usize,
    memory: &mut Reservation,
) -> Result<Batch, Problem> {
    let columns = Columns { dense: Some(Floats::Zeros), ..Columns::of(layout, tensors)? };
    columns.batch(&layout.schema, batch_max, memory)
}

impl Columns<'_> {
    fn batch(
        &self,
        schema: &Schema,
        batch_max: usize,
        memory: &mut Reservation,
    ) -> Result<Batch, Problem> {
        let size = match self.size {
            Some(size) if size > 0 && size <= batch_max => size,
            Some(size) => {
                let message = format!("{size} samples; a request has 1 to {batch_max} (batch_max)");
                return Err(Problem::invalid(message));
            }
            None => return Err(Problem::invalid("the request has no input")),
        };

        memory.grow(Batch::bytes(schema, size))?;
        let (mut batch, width) = (Batch::new(schema, size), schema.dense_features.len());
        for sample in 0..size {
            let values = sample * width..(sample + 1) * width;
            let floats = self.dense.unwrap_or(Floats::Zeros);
            let dense = values.map(|at| floats.get(at));
            batch.push_with(schema, dense, |f, keys, weights| {
                append_bag(&schema.features[f], &self.bags[f], sample, keys, weights)
            })?;
        }
        Ok(batch)
    }
}

/// Appends the keys of `sample` to `keys`, at most one more than the feature may have, and their
/// weights, if there are any, to `weights`.
fn append_bag(
    feature: &Feature,
    bags: &Bags<'_>,
    sample: usize,
    keys: &mut Vec<u64>,
    weights: &mut Vec<f32>,
) -> Result<(), Problem> {
    let Some(integers) = bags.keys else { return Ok(()) };
    let range = match bags.offsets {
        None if bags.width == 0 => 0..0,
        None => sample * bags.width..(sample + 1) * bags.width,
        Some(offsets) => {
            offsets.offset(sample).unwrap_or(0)..offsets.offset(sample + 1).unwrap_or(0)
        }
    };

    let full = keys.len() + feature.hotness_max as usize;
    for at in range {
        match integers.key(at) {
            // The batch refuses a bag with one key too many.
            _ if keys.len() > full => break,
            Key::Is(key) => {
                keys.push(key);
                weights.extend(bags.weights.map(|(weights, _)| weights.get(at)));
            }
            Key::Padding if bags.offsets.is_none() => {}
            Key::Padding | Key::Negative => {
                let name = feature.name.escape_debug();
                let message = format!("input `{name}`: sample {sample} has a negative key");
                return Err(Problem::invalid(message));
            }
        }
    }
    Ok(())
}
