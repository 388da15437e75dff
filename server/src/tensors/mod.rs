//! Makes a batch of the tensors of a request. A sparse feature is one tensor of keys, `[batch,
//! hotness]` padded with -1, or two: jagged keys and offsets. A feature with a key function takes
//! raw values in place of keys. A shared feature may have one bag for all samples. The dense
//! features are one tensor, and those that samples share another.

pub mod outputs;
pub mod values;

use crate::connections::memory::Reservation;
use crate::problem::Problem;
use crate::tensors::outputs::Outputs;
use crate::tensors::values::{Floats, Integers, Key, RawValues, Tensor};
use hatchback::schema::batch::Batch;
use hatchback::schema::key_function::KeyFunction;
use hatchback::schema::optional_columns;
use hatchback::schema::raw_value::RawValue;
use hatchback::{Feature, Schema};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Bytes of a note of a difference beside its name, which is in memory three times.
const NOTE_BYTES: usize = 64;

/// The part of a request that a tensor holds.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// The dense features of each sample, or the shared ones.
    Dense { shared: bool },
    /// The padded keys of a feature.
    Padded(usize),
    /// The jagged keys of a feature.
    Keys(usize),
    /// The offsets of jagged keys or values.
    Offsets(usize),
    /// The raw values of a feature with a key function, jagged or `[batch, n]`.
    Values(usize),
    /// The weights of the keys of a weighted feature, padded or jagged as the keys are.
    Weights(usize),
    /// A part of a feature that the model no longer uses.
    Retired,
}

/// The differences between the inputs of a request and those of the model that are no error.
#[derive(Debug, Default)]
pub struct Differences {
    /// Inputs that were not read: of retired features, or optional and not the model's.
    pub ignored: Vec<String>,
    /// Features that were not sent: an empty bag, or the value of `missing`, is in their place.
    pub absent: Vec<String>,
}

impl Differences {
    /// Returns the parameters of the answer that name them.
    pub fn parameters(&self) -> impl Iterator<Item = (&'static str, String)> {
        let both = [("ignored_inputs", &self.ignored), ("absent_inputs", &self.absent)];
        both.into_iter()
            .filter(|(_, names)| !names.is_empty())
            .map(|(p, names)| (p, names.join(",")))
    }
}

/// The names of the tensors of a model.
#[derive(Debug)]
pub struct Layout {
    pub schema: Arc<Schema>,
    parts: HashMap<String, Part>,
    /// The names of the tensors of dense features: of each sample, and shared.
    pub dense: [String; 2],
    pub outputs: Outputs,
}

impl Layout {
    /// Returns the layout of `schema`.
    pub fn new(schema: Arc<Schema>) -> Self {
        let mut parts = HashMap::new();
        for (f, feature) in schema.features.iter().enumerate() {
            if feature.retired {
                let forms = [".keys", ".offsets", ".weights", ".values"];
                parts.extend(forms.map(|form| (feature.name.clone() + form, Part::Retired)));
                continue;
            }
            parts.insert(format!("{}.keys", feature.name), Part::Keys(f));
            parts.insert(format!("{}.offsets", feature.name), Part::Offsets(f));
            if feature.weighted {
                parts.insert(format!("{}.weights", feature.name), Part::Weights(f));
            }
            if feature.key != KeyFunction::Key {
                parts.insert(format!("{}.values", feature.name), Part::Values(f));
            }
        }
        // A feature's own name takes precedence.
        let named = schema.features.iter().enumerate();
        parts.extend(named.map(|(f, feature)| {
            let part = if feature.retired { Part::Retired } else { Part::Padded(f) };
            (feature.name.clone(), part)
        }));

        let names = [
            ["dense", "dense_features", "dense.values"],
            ["dense.shared", "shared_dense", "dense.shared.values"],
        ];
        let dense = names.map(|names| {
            let free = names.into_iter().find(|name| !parts.contains_key(*name));
            free.unwrap_or("").to_owned()
        });
        for (name, shared) in dense.iter().zip([false, true]) {
            if schema.dense_of(shared).next().is_some() {
                parts.insert(name.clone(), Part::Dense { shared });
            }
        }
        let outputs = Outputs::new(&schema);
        Self { schema, parts, dense, outputs }
    }
}

/// The keys of a feature, or the values that become its keys.
#[derive(Clone, Debug)]
enum Keys<'a> {
    Are(Integers<'a>),
    Of(RawValues<'a>),
}

/// The bags of a feature.
#[derive(Clone, Debug, Default)]
struct Bags<'a> {
    keys: Option<Keys<'a>>,
    offsets: Option<Integers<'a>>,
    /// Weights of the keys, and their number.
    weights: Option<(Floats<'a>, usize)>,
    /// Keys of each sample if there are no offsets, padding included; 0 for values.
    width: usize,
    /// Keys in all bags.
    count: usize,
    /// Whether the feature is shared and the request has its bag once, for all samples.
    is_once: bool,
}

/// The tensor of dense features of one kind.
#[derive(Clone, Copy, Default)]
struct DenseColumns<'a> {
    floats: Option<Floats<'a>>,
    /// Columns of the tensor; 0 without it.
    width: usize,
    /// Whether the request has these values once, for all samples.
    is_once: bool,
}

impl DenseColumns<'_> {
    /// Returns a value; NaN in a column that was not sent.
    fn get(&self, sample: usize, column: usize) -> f32 {
        let row = if self.is_once { 0 } else { sample };
        match self.floats {
            Some(floats) if column < self.width => floats.get(row * self.width + column),
            _ => f32::NAN,
        }
    }
}

/// A feature's keys came in two tensors.
struct Twice;

impl<'a> Bags<'a> {
    /// Takes `keys`, `width` of them in each of `rows` samples.
    fn fill(&mut self, keys: Keys<'a>, rows: usize, width: usize) -> Result<(), Twice> {
        if self.keys.is_some() || self.offsets.is_some() {
            return Err(Twice);
        }
        (self.keys, self.width, self.count) = (Some(keys), width, rows * width);
        Ok(())
    }

    /// Takes `count` keys, which offsets divide among the samples.
    fn fill_jagged(&mut self, keys: Keys<'a>, count: usize) -> Result<(), Twice> {
        if self.keys.is_some() {
            return Err(Twice);
        }
        (self.keys, self.count) = (Some(keys), count);
        Ok(())
    }

    /// Returns the positions of the keys of `sample`.
    fn range(&self, sample: usize) -> Range<usize> {
        let sample = if self.is_once { 0 } else { sample };
        match self.offsets {
            None => sample * self.width..(sample + 1) * self.width,
            Some(offsets) => {
                // Every offset exists: `check_offsets` has read them all.
                offsets.offset(sample).unwrap_or(0)..offsets.offset(sample + 1).unwrap_or(0)
            }
        }
    }
}

/// The columns of a request.
struct Columns<'a> {
    /// The number of samples; `None` until a tensor was read.
    size: Option<usize>,
    /// The dense features of each sample, and the shared ones.
    dense: [DenseColumns<'a>; 2],
    bags: Vec<Bags<'a>>,
    differences: Differences,
}

impl<'a> Columns<'a> {
    fn of(
        layout: &Layout,
        tensors: &'a [Tensor<'_>],
        memory: &mut Reservation,
    ) -> Result<Self, Problem> {
        let bags = vec![Bags::default(); layout.schema.features.len()];
        let differences = Differences::default();
        let dense = [DenseColumns::default(); 2];
        let mut columns = Self { size: None, dense, bags, differences };
        for tensor in tensors {
            let part = layout.parts.get(tensor.name).copied();
            match part {
                Some(part) => columns.add(layout, tensor, part, memory)?,
                None if tensor.optional => columns.ignore(tensor.name, memory)?,
                None => return Err(tensor.fault("the model has no such input")),
            }
        }
        columns.note_absent(&layout.schema, memory)?;
        columns.check_offsets(&layout.schema)?;
        columns.check_weights(&layout.schema)?;
        Ok(columns)
    }

    fn add(
        &mut self,
        layout: &Layout,
        tensor: &'a Tensor<'_>,
        part: Part,
        memory: &mut Reservation,
    ) -> Result<(), Problem> {
        let twice = || tensor.fault("occurs twice, or beside the feature's other form");
        match part {
            Part::Dense { shared } => {
                let (floats, [rows, width]) = (Floats::of(tensor)?, tensor.matrix()?);
                let features = layout.schema.dense_of(shared);
                let (most, optional) = (features.clone().count(), optional_columns(features));
                if width + optional < most || width > most && !tensor.optional {
                    let problem = format!("{width} values a sample, the model takes {most}");
                    return Err(tensor.fault(&problem));
                }
                if width > most {
                    self.ignore(tensor.name, memory)?;
                }
                let (floats, is_once) = (Some(floats), shared && rows == 1);
                let dense = DenseColumns { floats, width, is_once };
                let before = std::mem::replace(&mut self.dense[usize::from(shared)], dense);
                if before.floats.is_some() {
                    return Err(twice());
                }
                if is_once { Ok(()) } else { self.set_size(tensor, rows) }
            }
            Part::Retired => self.ignore(tensor.name, memory),
            Part::Padded(f) => {
                let (keys, [rows, width]) = (Integers::of(tensor)?, tensor.matrix()?);
                self.bags[f].fill(Keys::Are(keys), rows, width).map_err(|Twice| twice())?;
                self.set_bags(layout, tensor, f, rows)
            }
            Part::Keys(f) => {
                let (keys, count) = (Integers::of(tensor)?, tensor.vector()?);
                self.bags[f].fill_jagged(Keys::Are(keys), count).map_err(|Twice| twice())
            }
            Part::Values(f) => {
                let values = Keys::Of(RawValues::of(tensor, memory)?);
                if let [_] = tensor.shape {
                    let count = tensor.vector()?;
                    return self.bags[f].fill_jagged(values, count).map_err(|Twice| twice());
                }
                let [rows, width] = tensor.matrix()?;
                self.bags[f].fill(values, rows, width).map_err(|Twice| twice())?;
                self.set_bags(layout, tensor, f, rows)
            }
            Part::Weights(f) => {
                let weights = (Floats::of(tensor)?, tensor.elements()?);
                match self.bags[f].weights.replace(weights) {
                    None => Ok(()),
                    Some(_) => Err(twice()),
                }
            }
            Part::Offsets(f) => {
                let (offsets, count) = (Integers::of(tensor)?, tensor.vector()?);
                // Padded keys need no offsets. With both it would be unclear which bags are meant.
                let is_padded = self.bags[f].width > 0;
                if is_padded || self.bags[f].offsets.replace(offsets).is_some() {
                    return Err(twice());
                }
                let rows = count.checked_sub(1);
                let rows = rows.ok_or_else(|| tensor.fault("has no offset; it starts with 0"))?;
                self.set_bags(layout, tensor, f, rows)
            }
        }
    }

    /// Takes `rows` bags of feature `f`: one for each sample, or one for all if it is shared.
    fn set_bags(
        &mut self,
        layout: &Layout,
        tensor: &Tensor<'_>,
        f: usize,
        rows: usize,
    ) -> Result<(), Problem> {
        self.bags[f].is_once = rows == 1 && layout.schema.features[f].shared;
        if self.bags[f].is_once { Ok(()) } else { self.set_size(tensor, rows) }
    }

    /// Notes that the input `name` is not read. Counts the note in `memory`.
    fn ignore(&mut self, name: &str, memory: &mut Reservation) -> Result<(), Problem> {
        memory.grow(NOTE_BYTES + 3 * name.len())?;
        self.differences.ignored.push(name.to_owned());
        Ok(())
    }

    /// Notes the features that the request has no input for. A cross needs none of its own.
    fn note_absent(&mut self, schema: &Schema, memory: &mut Reservation) -> Result<(), Problem> {
        let is_absent = |(feature, bags): &(&Feature, &Bags<'_>)| {
            let is_input = !matches!(feature.key, KeyFunction::Cross { .. }) && !feature.retired;
            is_input && bags.keys.is_none()
        };
        let sparse = schema.features.iter().zip(&self.bags).filter(is_absent);
        let dense = self.dense.iter().zip([false, true]).flat_map(|(dense, shared)| {
            schema.dense_of(shared).skip(dense.width).filter(|feature| !feature.retired)
        });
        for name in sparse.map(|(feature, _)| &feature.name).chain(dense.map(|d| &d.name)) {
            memory.grow(NOTE_BYTES + 3 * name.len())?;
            self.differences.absent.push(name.clone());
        }
        Ok(())
    }

    fn set_size(&mut self, tensor: &Tensor<'_>, rows: usize) -> Result<(), Problem> {
        match self.size.replace(rows) {
            Some(before) if before != rows => {
                let problem = format!("has {rows} samples, and the inputs before it {before}");
                Err(tensor.fault(&problem))
            }
            _ => Ok(()),
        }
    }

    /// Checks that each weighted feature has as many weights as keys, padding included.
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

    /// Checks that offsets start at 0, never fall, and end at the number of keys.
    fn check_offsets(&self, schema: &Schema) -> Result<(), Problem> {
        let jagged = schema.features.iter().zip(&self.bags).filter(|(_, bags)| bags.width == 0);
        for (Feature { name, .. }, bags) in jagged {
            let name = name.escape_debug();
            match (&bags.keys, bags.offsets) {
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
                    let rows = if bags.is_once { 1 } else { self.size.unwrap_or(0) };
                    for at in 0..=rows {
                        let offset = offsets.offset(at).filter(|offset| {
                            *offset >= last && *offset <= bags.count && (at > 0 || *offset == 0)
                        });
                        last = offset.ok_or_else(|| wrong_offset(&name, at))?;
                    }
                    if last != bags.count {
                        return Err(wrong_offset(&name, rows));
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

/// The part of a request that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    All,
    /// The dense features are zeros.
    Keys,
}

/// Fills the empty `batch` with the samples of `tensors`, at most `batch_max`. Counts further
/// memory in `memory`. Returns the differences between the inputs and the model's.
///
/// # Errors
/// A tensor does not fit the model, or the budget has no room.
pub fn fill(
    batch: &mut Batch,
    layout: &Layout,
    tensors: &[Tensor<'_>],
    batch_max: usize,
    memory: &mut Reservation,
) -> Result<Differences, Problem> {
    let columns = Columns::of(layout, tensors, memory)?;
    let samples = columns.samples(layout, Read::All, batch_max)?;
    columns.fill(batch, &layout.schema, samples)?;
    Ok(columns.differences)
}

/// Returns a new batch with the samples of `tensors`, at most `batch_max`. Counts all of its memory
/// in `memory`.
///
/// # Errors
/// A tensor does not fit the model, or the budget has no room.
pub fn batch_of(
    layout: &Layout,
    tensors: &[Tensor<'_>],
    read: Read,
    batch_max: usize,
    memory: &mut Reservation,
) -> Result<Batch, Problem> {
    let mut columns = Columns::of(layout, tensors, memory)?;
    let samples = columns.samples(layout, read, batch_max)?;
    if read == Read::Keys {
        let (floats, width) = (Some(Floats::Zeros), layout.schema.dense_features.len());
        columns.dense = [DenseColumns { floats, width, is_once: false }; 2];
    }
    memory.grow(Batch::bytes(&layout.schema, samples))?;
    let mut batch = Batch::new(&layout.schema, samples);
    columns.fill(&mut batch, &layout.schema, samples)?;
    Ok(batch)
}

impl Columns<'_> {
    /// Returns the number of samples.
    ///
    /// # Errors
    /// There is none, there are more than `batch_max`, or the dense features are missing.
    fn samples(&self, layout: &Layout, read: Read, batch_max: usize) -> Result<usize, Problem> {
        for (dense, shared) in self.dense.iter().zip([false, true]) {
            let features = layout.schema.dense_of(shared);
            let is_needed = features.clone().count() > optional_columns(features);
            if dense.floats.is_none() && is_needed && read == Read::All {
                let name = &layout.dense[usize::from(shared)];
                return Err(Problem::invalid(format!("input `{name}` is missing")));
            }
        }
        let is_once = self.dense[1].is_once || self.bags.iter().any(|bags| bags.is_once);
        let one = is_once.then_some(1);
        match self.size.or(one) {
            Some(size) if size > 0 && size <= batch_max => Ok(size),
            Some(size) => {
                let message = format!("{size} samples; a request has 1 to {batch_max} (batch_max)");
                Err(Problem::invalid(message))
            }
            None => Err(Problem::invalid("the request has no input")),
        }
    }

    fn fill(&self, batch: &mut Batch, schema: &Schema, samples: usize) -> Result<(), Problem> {
        for sample in 0..samples {
            let mut columns = [0.., 0..];
            let dense = schema.dense_features.iter().map(|feature| {
                let kind = usize::from(feature.shared);
                self.dense[kind].get(sample, columns[kind].next().unwrap_or(0))
            });
            let bag = |f: usize, keys: &mut Vec<u64>, weights: &mut Vec<f32>| {
                append_bag(&schema.features[f], &self.bags[f], sample, keys, weights)?;
                match self.bags[f].keys {
                    None => self.append_cross(schema, f, sample, keys),
                    Some(_) => Ok(()),
                }
            };
            match sample {
                0 => batch.push_with(schema, dense, bag)?,
                _ => batch.continue_with(schema, dense, |f| !self.bags[f].is_once, bag)?,
            }
        }
        Ok(())
    }
}

impl Columns<'_> {
    /// Appends the keys of feature `f` for `sample`, if it is a cross.
    fn append_cross(
        &self,
        schema: &Schema,
        f: usize,
        sample: usize,
        keys: &mut Vec<u64>,
    ) -> Result<(), Problem> {
        let fault = |c: usize, problem: &dyn std::fmt::Display| {
            let [name, cross] = [c, f].map(|f| schema.features[f].name.escape_debug());
            let place = format!("sample {sample} of feature `{name}`, for the cross `{cross}`");
            Problem::invalid(format!("{place}: {problem}"))
        };
        let range = |c: usize| self.bags[c].range(sample);
        let value = |c: usize, i: usize| match &self.bags[c].keys {
            Some(Keys::Of(values)) => Ok(values.get(range(c).start + i)),
            // The keys of a column without a function are its raw values.
            Some(Keys::Are(integers)) if schema.features[c].key == KeyFunction::Key => {
                match integers.key(range(c).start + i) {
                    Key::Is(key) => Ok(RawValue::Unsigned(key)),
                    Key::Padding => Err(fault(c, &"padding; send offsets or one key")),
                }
            }
            _ => Err(fault(c, &"keys, and the cross needs `.values`")),
        };
        let len = |c: usize| if self.bags[c].keys.is_some() { range(c).len() } else { 0 };
        schema.cross(f, len, value, |c, e| fault(c, &e), |key| keys.push(key))
    }
}

/// Appends the keys of `sample` to `keys`, at most one more than the feature may have, and their
/// weights to `weights`.
fn append_bag(
    feature: &Feature,
    bags: &Bags<'_>,
    sample: usize,
    keys: &mut Vec<u64>,
    weights: &mut Vec<f32>,
) -> Result<(), Problem> {
    let full = keys.len() + feature.hotness_max as usize;
    for at in bags.range(sample) {
        // One key too many is enough for the batch to refuse the bag.
        if keys.len() > full {
            break;
        }
        if let Some(key) = key_at(feature, bags, sample, at)? {
            keys.push(key);
            weights.extend(bags.weights.map(|(weights, _)| weights.get(at)));
        }
    }
    Ok(())
}

/// Returns the key of `sample` at the position `at`; `None` for padding.
fn key_at(
    feature: &Feature,
    bags: &Bags<'_>,
    sample: usize,
    at: usize,
) -> Result<Option<u64>, Problem> {
    match &bags.keys {
        None => Ok(None),
        Some(Keys::Of(values)) => {
            let key = feature.key_of(&values.get(at));
            key.map(Some).map_err(|e| {
                let name = feature.name.escape_debug();
                Problem::invalid(format!("input `{name}.values`: sample {sample}: {e}"))
            })
        }
        Some(Keys::Are(integers)) => match integers.key(at) {
            Key::Is(key) => Ok(Some(key)),
            Key::Padding if bags.offsets.is_none() => Ok(None),
            Key::Padding => Ok(Some(u64::MAX)),
        },
    }
}
