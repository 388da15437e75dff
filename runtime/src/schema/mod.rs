//! The schema: which features a model takes, in which tables it looks them up, and how the vectors
//! feed the dense network. Plain data with one check; never reads rows.

pub mod batch;
pub mod change;
mod columns;
mod cross;
mod farmhash;
pub mod input_parts;
pub mod key_function;
pub mod lookup;
pub mod object;
pub mod outputs;
pub mod probe_set;
pub mod raw_value;
pub mod sample;
mod sample_line;
mod vectors;
pub mod vocabulary;

use crate::limits::{
    DENSE_FEATURES_MAX, DIM_MAX, FEATURES_MAX, HOTNESS_MAX, INPUT_FEATURES_MAX, INPUT_WIDTH_MAX,
    NAME_BYTES_MAX, OUTPUTS_MAX, TABLES_MAX,
};
use crate::schema::key_function::{KeyError, KeyFunction};
use crate::schema::lookup::Lookup;
use crate::schema::raw_value::{RawValue, Shortened};
use hatchback_kernels::cache::address::{mix, unmix};
use hatchback_kernels::cache::codec::{Codec, ROW_BYTES_MAX, RowFormat};
use hatchback_kernels::dense::{
    Activation, DenseEngine, DenseError, JOINED_OUTPUT, check_joined, join_outputs,
};
use hatchback_kernels::simd::isa::Isa;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// The keys that a table may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeySpace {
    /// `0..rows`.
    Index,
    /// Any u64.
    Sparse,
}

impl KeySpace {
    /// Returns the number that orders the key's row on flash. Different keys have different
    /// numbers.
    #[inline]
    pub fn order(self, key: u64) -> u64 {
        match self {
            Self::Index => key,
            Self::Sparse => mix(key),
        }
    }

    /// Returns the key whose number is `order`.
    pub fn key_of(self, order: u64) -> u64 {
        match self {
            Self::Index => order,
            Self::Sparse => unmix(order),
        }
    }
}

/// The memory that holds a table's rows while they are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Whole, in fast memory.
    Resident,
    /// On flash, with the most used rows in an embedding cache.
    Cached,
    /// Resident if small and the budget has room, else cached.
    Auto,
}

/// How a request treats a row that is not in memory. A request handles its misses in the order of
/// these variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MissPolicy {
    /// Fetches the row. If the request's deadline passes first, the request fails.
    Wait,
    /// Fetches the row. If the request's deadline passes first, uses the default row.
    Deadline,
    /// Uses the default row, and fetches the row after the answer.
    Default,
}

/// An embedding table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// Its name, unique in the model.
    pub name: String,
    /// Values in a row.
    pub dim: u32,
    /// The keys that it may have.
    pub keys: KeySpace,
    /// The number of its rows.
    pub rows: u64,
    /// The encoding of a value of a row.
    pub codec: Codec,
    /// Exponent of the power-of-two unit of quantized rows.
    pub unit_exp: i8,
    /// The memory that holds the rows while they are served.
    pub placement: Placement,
    /// How a request treats a missing row.
    pub miss: MissPolicy,
    /// The row for keys whose own row is absent, damaged or not fetched, `[dim]`.
    pub default_row: Vec<f32>,
}

impl Table {
    /// Returns how the rows are encoded; `None` if the unit does not fit the codec.
    pub fn format(&self) -> Option<RowFormat> {
        RowFormat::new(self.codec, self.dim as usize, self.unit_exp)
    }

    /// Returns whether its rows can follow those of `before` as a delta; else the field that
    /// differs.
    pub fn continues(&self, before: &Self) -> Result<(), &'static str> {
        match () {
            () if self.name != before.name => Err("name"),
            () if self.dim != before.dim => Err("dim"),
            () if self.keys != before.keys => Err("keys"),
            () if self.codec != before.codec => Err("codec"),
            () if self.unit_exp != before.unit_exp => Err("unit_exp"),
            () => Ok(()),
        }
    }

    /// Returns the bytes of an encoded row.
    pub fn row_bytes(&self) -> usize {
        self.codec.row_bytes(self.dim as usize)
    }

    /// Returns the bytes of all encoded rows.
    pub fn row_bytes_total(&self) -> u64 {
        self.rows.saturating_mul(self.row_bytes() as u64)
    }
}

/// A sparse feature of a request: a bag of keys for each sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Feature {
    /// Its name, unique in the model.
    pub name: String,
    /// Keys in its longest bag.
    pub hotness_max: u32,
    /// Whether each key comes with a weight, which multiplies its rows.
    pub weighted: bool,
    /// How the values of a request become keys.
    pub key: KeyFunction,
    /// The key that fills a bag up. Masks count it as no key, and a bag that is pooled leaves it
    /// out. With the pooling `none` its row is looked up.
    pub padding: Option<u64>,
    /// The key of a missing value: null, NaN or an empty text. Without it these are values like
    /// any other, and `key` refuses null.
    pub null: Option<u64>,
    /// Whether all samples of a request share one bag, which is looked up once.
    pub shared: bool,
    /// Whether the model no longer uses it. Callers may still send it; its values are not read. It
    /// is then not shared.
    pub retired: bool,
}

impl Feature {
    /// Returns a feature that takes keys, without weights.
    pub fn plain(name: &str, hotness_max: u32) -> Self {
        let (name, key) = (name.to_owned(), KeyFunction::Key);
        let (padding, null, shared, retired) = (None, None, false, false);
        Self { name, hotness_max, weighted: false, key, padding, null, shared, retired }
    }

    /// Returns the key of a raw value.
    ///
    /// # Errors
    /// [`KeyError`] if the key function does not take such a value.
    pub fn key_of(&self, value: &RawValue<'_>) -> Result<u64, KeyError> {
        match self.null {
            // Any key will do: a batch leaves the bags of a retired feature out.
            _ if self.retired => Ok(0),
            Some(key) if value.is_missing() => Ok(key),
            _ => self.key.apply(value),
        }
    }
}

/// A dense feature of a request: one number for each sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DenseFeature {
    /// Its name, unique in the model.
    pub name: String,
    /// The value that replaces a missing one, which is NaN. Without it a missing value is refused.
    pub missing: Option<f32>,
    /// Whether all samples of a request share its value.
    pub shared: bool,
    /// Whether the model no longer uses it. Callers still send its column; it is not read.
    pub retired: bool,
}

impl DenseFeature {
    /// Returns a feature whose values are never missing.
    pub fn plain(name: &str) -> Self {
        Self { name: name.to_owned(), missing: None, shared: false, retired: false }
    }

    /// Returns whether the network cannot take `value`, and nothing replaces it.
    pub(crate) fn refuses(&self, value: f32) -> bool {
        !(self.retired || value.is_finite() || value.is_nan() && self.missing.is_some())
    }

    /// Returns whether a request may leave its column out, if it is behind all that are sent.
    fn may_be_absent(&self) -> bool {
        self.retired || self.missing.is_some()
    }

    /// Returns `value`, or what replaces it if it is missing.
    pub(crate) fn filled(&self, value: f32) -> f32 {
        if value.is_nan() { self.missing.unwrap_or(value) } else { value }
    }
}

/// Returns how many of these columns a request may leave out: the last ones that are retired or
/// have a value for `missing`.
pub fn optional_columns<'a>(features: impl DoubleEndedIterator<Item = &'a DenseFeature>) -> usize {
    features.rev().take_while(|feature| feature.may_be_absent()).count()
}

/// The source of an input of the dense network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InputSource {
    /// The request's dense features.
    Dense,
    /// The vectors of these lookups, side by side.
    Vectors(Vec<u16>),
    /// The number of keys in the bag of each of these features.
    Lengths(Vec<u16>),
    /// For each of these features `hotness_max` values: 1 for a key, 0 for its padding and after
    /// the last key.
    Masks(Vec<u16>),
}

/// An input of the dense network, `[batch, width]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkInput {
    /// Its name in the ONNX file.
    pub name: String,
    /// The source of its values.
    pub source: InputSource,
}

/// The dense network's interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Its inputs.
    pub inputs: Vec<NetworkInput>,
    /// Its outputs. A single output is `[batch]` or `[batch, n]`; with the second, a sample has `n`
    /// scores. Each of several outputs is `[batch]` or `[batch, 1]`: a sample has one score for
    /// each.
    pub outputs: Vec<NetworkOutput>,
}

/// An output of the dense network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkOutput {
    /// Its name in the ONNX file.
    pub name: String,
    /// The function that turns the output into a score.
    pub activation: Activation,
}

/// The schema of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schema {
    /// The dense features with the retired ones, in request order.
    pub dense_features: Vec<DenseFeature>,
    /// The embedding tables.
    pub tables: Vec<Table>,
    /// The sparse features, in request order.
    pub features: Vec<Feature>,
    /// The lookups of the features' bags in tables. Each makes a vector for the dense network.
    pub lookups: Vec<Lookup>,
    /// The dense network.
    pub network: Network,
}

/// A field of a schema that contradicts another field or a limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct SchemaError {
    /// The field, such as `table[3].dim`.
    pub field: String,
    /// Its value and why it is refused.
    pub problem: String,
}

fn fault<T>(field: impl Into<String>, problem: impl Into<String>) -> Result<T, SchemaError> {
    Err(SchemaError { field: field.into(), problem: problem.into() })
}

fn check_names<'a>(
    what: &str,
    max: usize,
    names: impl Iterator<Item = &'a String>,
) -> Result<(), SchemaError> {
    let mut seen = HashSet::new();
    for (i, name) in names.enumerate() {
        let field = format!("{what}[{i}].name");
        if i >= max {
            return fault(what, format!("has more than {max} entries"));
        }
        let (bytes, shown) = (name.len(), Shortened(name));
        if !(1..=NAME_BYTES_MAX).contains(&bytes) {
            let problem = format!("`{shown}` has {bytes} bytes, a name has 1 to {NAME_BYTES_MAX}");
            return fault(field, problem);
        }
        if name.chars().any(char::is_control) {
            return fault(field, format!("`{shown}` has a character that does not print"));
        }
        if !seen.insert(name) {
            return fault(field, format!("`{name}` occurs twice"));
        }
    }
    Ok(())
}

impl Schema {
    /// Returns the bytes of the widest encoded row, which a row of a miss list takes.
    pub fn row_bytes_max(&self) -> usize {
        self.tables.iter().map(Table::row_bytes).max().unwrap_or(0)
    }

    /// Checks every field against the limits and against the other fields.
    ///
    /// # Errors
    /// [`SchemaError`] with the first field that is wrong.
    pub fn check(&self) -> Result<(), SchemaError> {
        check_names("dense_features", DENSE_FEATURES_MAX, self.dense_names())?;
        check_names("table", TABLES_MAX, self.tables.iter().map(|t| &t.name))?;
        check_names("feature", FEATURES_MAX, self.features.iter().map(|f| &f.name))?;
        check_names("network.input", FEATURES_MAX, self.network.inputs.iter().map(|i| &i.name))?;
        check_names("network.output", OUTPUTS_MAX, self.network.outputs.iter().map(|o| &o.name))?;
        if self.network.outputs.is_empty() {
            return fault("network.output", "names no output");
        }
        self.tables.iter().enumerate().try_for_each(|(i, t)| check_table(i, t))?;
        let fills = self.dense_features.iter().map(|d| d.missing.unwrap_or_default());
        if let Some((i, fill)) = fills.enumerate().find(|(_, fill)| !fill.is_finite()) {
            return fault(format!("dense_features[{i}].missing"), format!("{fill} is not finite"));
        }

        for (i, f) in self.features.iter().enumerate() {
            if f.hotness_max == 0 || f.hotness_max as usize > HOTNESS_MAX {
                return fault(
                    format!("feature[{i}].hotness_max"),
                    format!("{} is not in 1..={HOTNESS_MAX}", f.hotness_max),
                );
            }
            if f.null.is_some() && f.key.has_empty_word() {
                let problem = "has an empty word, which `null` makes a missing value";
                return fault(format!("feature[{i}].key"), problem);
            }
            if let Err(problem) = f.key.check() {
                return fault(format!("feature[{i}].key"), problem);
            }
            self.check_cross(i)?;
        }

        self.check_lookups()?;
        self.check_network()
    }

    /// Checks that every vector feeds an input, and that the dense features feed one input if there
    /// are any.
    fn check_network(&self) -> Result<(), SchemaError> {
        let mut is_fed = vec![false; self.lookups.len()];
        let (mut dense, mut listed) = (0u32, 0);
        for (i, input) in self.network.inputs.iter().enumerate() {
            let (features, lookups) = (self.features.len(), self.lookups.len());
            let (field, numbers, what, end) = match &input.source {
                InputSource::Dense => {
                    dense += 1;
                    continue;
                }
                InputSource::Vectors(numbers) => ("features", numbers, "lookup", lookups),
                InputSource::Lengths(numbers) => ("lengths", numbers, "feature", features),
                InputSource::Masks(numbers) => ("masks", numbers, "feature", features),
            };
            let field = || format!("network.input[{i}].{field}");
            if numbers.is_empty() {
                return fault(field(), "is empty");
            }
            listed += numbers.len();
            if listed > INPUT_FEATURES_MAX {
                return fault(field(), format!("with the others lists over {INPUT_FEATURES_MAX}"));
            }
            if let Some(number) = numbers.iter().find(|number| usize::from(**number) >= end) {
                return fault(field(), format!("no {what} {number}"));
            }
            if matches!(input.source, InputSource::Vectors(_)) {
                numbers.iter().for_each(|l| is_fed[usize::from(*l)] = true);
            } else if let Some(f) = self.retired_among(numbers) {
                return fault(field(), format!("`{}` is retired", f.name));
            }
        }

        let n = self.dense_width(false) + self.dense_width(true);
        if dense != u32::from(n > 0) {
            return fault("network.input", format!("{dense} inputs take the {n} dense features"));
        }
        if let Some(l) = is_fed.iter().position(|is_fed| !is_fed) {
            let problem = format!("`{}` feeds no input with its vectors", self.vector_name(l));
            return fault(format!("feature[{}]", self.lookups[l].feature), problem);
        }

        let mut widths = self.network.inputs.iter().map(|input| self.input_width(input));
        match widths.position(|width| width > INPUT_WIDTH_MAX) {
            Some(i) => fault(
                format!("network.input[{i}]"),
                format!("is wider than {INPUT_WIDTH_MAX} values"),
            ),
            None => Ok(()),
        }
    }

    /// Returns the names of the dense features.
    pub fn dense_names(&self) -> impl Iterator<Item = &String> {
        self.dense_features.iter().map(|feature| &feature.name)
    }

    /// Returns the dense features that requests send for each sample, or those that its samples
    /// share, with the retired ones.
    pub fn dense_of(&self, shared: bool) -> impl DoubleEndedIterator<Item = &DenseFeature> + Clone {
        self.dense_features.iter().filter(move |feature| feature.shared == shared)
    }

    /// Returns the names of the dense features that the network takes.
    pub(crate) fn dense_columns(&self, shared: bool) -> impl Iterator<Item = &String> {
        self.dense_of(shared).filter(|feature| !feature.retired).map(|feature| &feature.name)
    }

    /// Returns the first of the features with these `numbers` that is retired.
    fn retired_among(&self, numbers: &[u16]) -> Option<&Feature> {
        numbers.iter().map(|f| &self.features[usize::from(*f)]).find(|f| f.retired)
    }

    /// Returns the number of dense features of each sample, or of shared ones, that the network
    /// takes.
    pub fn dense_width(&self, shared: bool) -> usize {
        self.dense_columns(shared).count()
    }

    /// Returns whether the samples of a request share a feature.
    pub(crate) fn has_shared(&self) -> bool {
        self.features.iter().any(|feature| feature.shared)
            || self.dense_features.iter().any(|feature| feature.shared)
    }

    /// Returns the values per sample of a network input.
    pub fn input_width(&self, input: &NetworkInput) -> usize {
        match &input.source {
            InputSource::Dense => self.dense_width(false) + self.dense_width(true),
            InputSource::Vectors(lookups) => {
                lookups.iter().map(|&l| self.vector_width(usize::from(l))).sum()
            }
            InputSource::Lengths(features) => features.len(),
            InputSource::Masks(features) => {
                let hotness = |f: &u16| self.features[usize::from(*f)].hotness_max as usize;
                features.iter().map(hotness).sum()
            }
        }
    }

    /// Loads the dense network from the bytes of its ONNX file.
    ///
    /// # Errors
    /// [`DenseError`] if the file does not load, or if its inputs and outputs are not those of the
    /// schema.
    pub fn load_dense(&self, onnx: Vec<u8>) -> Result<DenseEngine, DenseError> {
        let network = &self.network;
        let widths: Vec<(&str, usize)> =
            network.inputs.iter().map(|i| (i.name.as_str(), self.input_width(i))).collect();
        let SingleOutput { onnx, name, activation } = self.single_output(onnx)?;
        let (isa, parts) = (Isa::detect(), self.input_parts());
        let engine = DenseEngine::load_for(isa, onnx, &widths, &parts, name, activation)?;
        if let [_, _, ..] = network.outputs.as_slice() {
            let names: Vec<&str> = network.outputs.iter().map(|o| o.name.as_str()).collect();
            check_joined(&names, engine.outputs())?;
        }
        Ok(engine)
    }

    /// Returns the dense network with one output: its only one, or several joined side by side.
    pub(crate) fn single_output(&self, onnx: Vec<u8>) -> Result<SingleOutput<'_>, DenseError> {
        if let [NetworkOutput { name, activation }] = self.network.outputs.as_slice() {
            return Ok(SingleOutput { onnx, name, activation: *activation });
        }
        let outputs: Vec<(&str, Activation)> =
            self.network.outputs.iter().map(|o| (o.name.as_str(), o.activation)).collect();
        let onnx = join_outputs(&onnx, &outputs)?;
        Ok(SingleOutput { onnx, name: JOINED_OUTPUT, activation: Activation::None })
    }

    /// Returns the key of a raw value of feature `f`.
    ///
    /// # Errors
    /// [`KeyError`] if the feature's key function does not take such a value.
    pub fn key(&self, f: usize, value: &RawValue<'_>) -> Result<u64, KeyError> {
        self.features[f].key_of(value)
    }
}

/// A dense network with one output.
pub(crate) struct SingleOutput<'a> {
    pub onnx: Vec<u8>,
    pub name: &'a str,
    pub activation: Activation,
}

fn check_table(i: usize, table: &Table) -> Result<(), SchemaError> {
    let dim = table.dim as usize;
    if dim == 0 || dim > DIM_MAX {
        return fault(format!("table[{i}].dim"), format!("{dim} is not in 1..={DIM_MAX}"));
    }

    let Some(format) = table.format() else {
        return fault(
            format!("table[{i}].unit_exp"),
            format!("{} does not fit {}", table.unit_exp, table.codec.name()),
        );
    };
    if format.row_bytes() > ROW_BYTES_MAX {
        return fault(
            format!("table[{i}].dim"),
            format!("{dim} takes {} bytes a row, over {ROW_BYTES_MAX}", format.row_bytes()),
        );
    }

    if table.default_row.len() != dim || table.default_row.iter().any(|v| !v.is_finite()) {
        return fault(format!("table[{i}].default_row"), format!("is not {dim} finite values"));
    }
    Ok(())
}
