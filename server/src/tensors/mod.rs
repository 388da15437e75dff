//! Makes a batch of the tensors of a request. A sparse feature is one tensor of keys, `[batch,
//! hotness]` padded with -1, or two: jagged keys and offsets. A feature with a key function takes
//! raw values in place of keys. A shared feature may have one bag for all samples. The dense
//! features are one tensor, and those that samples share another.

pub mod outputs;
pub mod values;

use crate::connections::memory::Reservation;
use crate::problem::Problem;
use crate::tensors::outputs::Outputs;
use crate::tensors::values::{Floats, Integers, RawValues, Tensor};
use hatchback::schema::batch::Batch;
use hatchback::schema::key_function::KeyFunction;
use hatchback::schema::optional_columns;
use hatchback::schema::raw_value::RawValue;
use hatchback::{Feature, Schema};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// What is wrong with a tensor of which the feature has another one.
const TWICE: &str = "occurs twice, or beside the feature's other form";
/// Bytes of a note of a difference beside its name.
const NOTE_BYTES: usize = 64;

/// The part of a request that a tensor holds.
#[derive(Clone, Copy, Debug)]
enum Part {
    /// The dense features of each sample, or the shared ones.
    Dense { shared: bool },
    /// The keys of a feature, or the raw values that become its keys.
    Keys(usize, Form),
    /// The offsets of jagged keys or values.
    Offsets(usize),
    /// The weights of the keys of a weighted feature, padded or jagged as the keys are.
    Weights(usize),
    /// A part of a feature that the model no longer uses.
    Retired,
}

/// The form of a feature's keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Padded,
    Jagged,
    /// Raw values for the key function, jagged or `[batch, n]`.
    Raw,
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
    /// Returns the bytes in memory of the notes.
    pub fn bytes(&self) -> usize {
        self.ignored.iter().chain(&self.absent).map(|name| NOTE_BYTES + name.len()).sum()
    }

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
            parts.insert(format!("{}.keys", feature.name), Part::Keys(f, Form::Jagged));
            parts.insert(format!("{}.offsets", feature.name), Part::Offsets(f));
            if feature.weighted {
                parts.insert(format!("{}.weights", feature.name), Part::Weights(f));
            }
            if feature.key != KeyFunction::Key {
                parts.insert(format!("{}.values", feature.name), Part::Keys(f, Form::Raw));
            }
        }
        // A feature's own name takes precedence.
        let named = schema.features.iter().enumerate();
        parts.extend(named.map(|(f, feature)| {
            let part = Part::Keys(f, Form::Padded);
            (feature.name.clone(), if feature.retired { Part::Retired } else { part })
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

/// The tensors of a feature in a request.
#[derive(Clone, Copy, Default)]
struct Sent<'a> {
    keys: Option<(&'a Tensor<'a>, Form)>,
    offsets: Option<&'a Tensor<'a>>,
    weights: Option<&'a Tensor<'a>>,
}

/// The bags of a feature.
#[derive(Clone, Debug, Default)]
struct Bags<'a> {
    keys: Option<Keys<'a>>,
    offsets: Option<Integers<'a>>,
    weights: Option<Floats<'a>>,
    /// Keys of each sample if there are no offsets, padding included.
    width: usize,
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

impl Bags<'_> {
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

    /// Returns the key at `at` of `integers`; `None` for padding. With offsets no bag is padded,
    /// and -1 is a key.
    fn key(&self, integers: Integers<'_>, at: usize) -> Option<u64> {
        integers.key(at).or(self.offsets.is_some().then_some(u64::MAX))
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
        let features = &layout.schema.features;
        let (bags, differences) = (Vec::with_capacity(features.len()), Differences::default());
        let dense = [DenseColumns::default(); 2];
        let mut columns = Self { size: None, dense, bags, differences };
        let mut sent = vec![Sent::default(); features.len()];
        for tensor in tensors {
            let is_second = match layout.parts.get(&*tensor.name).copied() {
                None if !tensor.optional => return Err(tensor.fault("the model has no such input")),
                None | Some(Part::Retired) => {
                    note(&mut columns.differences.ignored, &tensor.name, memory)?;
                    false
                }
                Some(Part::Dense { shared }) => {
                    columns.add_dense(layout, tensor, memory, shared)?
                }
                Some(Part::Keys(f, form)) => sent[f].keys.replace((tensor, form)).is_some(),
                Some(Part::Offsets(f)) => sent[f].offsets.replace(tensor).is_some(),
                Some(Part::Weights(f)) => sent[f].weights.replace(tensor).is_some(),
            };
            if is_second {
                return Err(tensor.fault(TWICE));
            }
        }
        for (feature, sent) in features.iter().zip(sent) {
            let bags = columns.bags_of(feature, sent, memory)?;
            columns.bags.push(bags);
        }
        columns.note_absent(&layout.schema, memory)?;
        Ok(columns)
    }

    /// Takes the dense features. Returns whether they came before.
    fn add_dense(
        &mut self,
        layout: &Layout,
        tensor: &'a Tensor<'_>,
        memory: &mut Reservation,
        shared: bool,
    ) -> Result<bool, Problem> {
        let (floats, [rows, width]) = (Floats::of(tensor)?, tensor.matrix()?);
        let features = layout.schema.dense_of(shared);
        let (most, optional) = (features.clone().count(), optional_columns(features));
        if width + optional < most || width > most && !tensor.optional {
            let problem = format!("{width} values a sample, the model takes {most}");
            return Err(tensor.fault(&problem));
        }
        if width > most {
            note(&mut self.differences.ignored, &tensor.name, memory)?;
        }
        let (floats, is_once) = (Some(floats), self.take_rows(tensor, rows, shared)?);
        let dense = DenseColumns { floats, width, is_once };
        let before = std::mem::replace(&mut self.dense[usize::from(shared)], dense);
        Ok(before.floats.is_some())
    }

    /// Returns the bags of `feature` in the tensors that were `sent`: one for each sample, or one
    /// for all if it is shared.
    fn bags_of(
        &mut self,
        feature: &Feature,
        sent: Sent<'a>,
        memory: &mut Reservation,
    ) -> Result<Bags<'a>, Problem> {
        let (mut bags, mut count) = (Bags::default(), 0);
        let missing = |part: &str| {
            let name = feature.name.escape_debug();
            Problem::invalid(format!("input `{name}.{part}` is missing"))
        };
        if let Some((tensor, form)) = sent.keys {
            bags.keys = Some(match form {
                Form::Raw => Keys::Of(RawValues::of(tensor, memory)?),
                Form::Padded | Form::Jagged => Keys::Are(Integers::of(tensor)?),
            });
            count = tensor.elements()?;
            let is_flat = form == Form::Jagged || form == Form::Raw && tensor.shape.len() == 1;
            let rows = match sent.offsets {
                Some(offsets) if is_flat => {
                    tensor.vector()?;
                    bags.offsets = Some(Integers::of(offsets)?);
                    Some((offsets, check_offsets(offsets, count)?))
                }
                // With both it would be unclear which bags are meant.
                Some(offsets) => return Err(offsets.fault(TWICE)),
                None if is_flat && count > 0 => return Err(missing("offsets")),
                None if is_flat => None,
                None => {
                    let [rows, width] = tensor.matrix()?;
                    bags.width = width;
                    Some((tensor, rows))
                }
            };
            if let Some((tensor, rows)) = rows {
                bags.is_once = self.take_rows(tensor, rows, feature.shared)?;
            }
        } else if sent.offsets.is_some() {
            return Err(missing("keys"));
        }
        if let Some(weights) = sent.weights {
            bags.weights = Some(Floats::of(weights)?);
            let values = weights.elements()?;
            if values != count {
                return Err(weights.fault(&format!("{values} values for {count} keys")));
            }
            if let Some((keys, _)) = sent.keys
                && keys.shape != weights.shape
            {
                let problem = format!("shape {:?}, the keys have {:?}", weights.shape, keys.shape);
                return Err(weights.fault(&problem));
            }
        }
        Ok(bags)
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
            note(&mut self.differences.absent, name, memory)?;
        }
        Ok(())
    }

    /// Takes `rows` as the number of samples, unless they are one row of a `shared` input for all
    /// samples. Returns whether they are.
    fn take_rows(
        &mut self,
        tensor: &Tensor<'_>,
        rows: usize,
        shared: bool,
    ) -> Result<bool, Problem> {
        if shared && rows == 1 {
            return Ok(true);
        }
        match self.size.replace(rows) {
            Some(before) if before != rows => {
                let problem = format!("has {rows} samples, and the inputs before it {before}");
                Err(tensor.fault(&problem))
            }
            _ => Ok(false),
        }
    }
}

/// Adds `name` to `notes`, and its bytes to `memory`.
fn note(notes: &mut Vec<String>, name: &str, memory: &mut Reservation) -> Result<(), Problem> {
    memory.grow(NOTE_BYTES + name.len())?;
    notes.push(name.to_owned());
    Ok(())
}

/// Returns the number of bags that `offsets` make of `keys` keys.
///
/// # Errors
/// The offsets do not start at 0, fall, or do not end at the number of keys.
fn check_offsets(offsets: &Tensor<'_>, keys: usize) -> Result<usize, Problem> {
    let (values, mut last) = (Integers::of(offsets)?, 0);
    let rows = offsets.vector()?.checked_sub(1);
    let rows = rows.ok_or_else(|| offsets.fault("has no offset; it starts with 0"))?;
    for at in 0..=rows {
        let is_right = |offset: &usize| {
            *offset >= last
                && *offset <= keys
                && (at > 0 || *offset == 0)
                && (at < rows || *offset == keys)
        };
        last = values.offset(at).filter(is_right).ok_or_else(|| {
            let rule = "offsets start at 0, never fall, and end at the number of keys";
            offsets.fault(&format!("offset {at} is wrong: {rule}"))
        })?;
    }
    Ok(rows)
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
        let dense = |sample: usize| {
            let mut columns = [0.., 0..];
            schema.dense_features.iter().map(move |feature| {
                let kind = usize::from(feature.shared);
                self.dense[kind].get(sample, columns[kind].next().unwrap_or(0))
            })
        };
        let bag = |sample: usize, f: usize, keys: &mut Vec<u64>, weights: &mut Vec<f32>| {
            append_bag(&schema.features[f], &self.bags[f], sample, keys, weights)?;
            match self.bags[f].keys {
                None => self.append_cross(schema, f, sample, keys),
                Some(_) => Ok(()),
            }
        };
        batch.push_with(schema, samples, dense, |f| !self.bags[f].is_once, bag)
    }

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
                match self.bags[c].key(*integers, range(c).start + i) {
                    Some(key) => Ok(RawValue::Unsigned(key)),
                    None => Err(fault(c, &"padding; send offsets or one key")),
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
        let key = match &bags.keys {
            None => break,
            Some(Keys::Of(values)) => feature.key_of(&values.get(at)).map_err(|e| {
                let name = feature.name.escape_debug();
                Problem::invalid(format!("input `{name}.values`: sample {sample}: {e}"))
            })?,
            Some(Keys::Are(integers)) => match bags.key(*integers, at) {
                None => continue,
                Some(key) => key,
            },
        };
        keys.push(key);
        weights.extend(bags.weights.map(|weights| weights.get(at)));
    }
    Ok(())
}
