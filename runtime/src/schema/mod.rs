//! The schema: what a model takes and how it is put together. Plain data with one check; never
//! touches rows.

pub mod batch;
pub mod sample;

use crate::limits::{
    DENSE_FEATURES_MAX, DIM_MAX, FEATURES_MAX, HOTNESS_MAX, INPUT_WIDTH_MAX, NAME_BYTES_MAX,
    TABLES_MAX,
};
use hatchback_kernels::cache::address::mix;
use hatchback_kernels::cache::codec::{Codec, ROW_BYTES_MAX, RowFormat};
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::dense::{
    Activation, DenseEngine, DenseError, DenseNetwork, DeviceEngine, DeviceOptions, Weights,
};
use hatchback_kernels::lookup::Pooling;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::sync::Arc;

/// Which keys a table has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeySpace {
    /// `0..rows`.
    Index,
    /// Any u64.
    Sparse,
}

impl KeySpace {
    /// What rows are ordered by on flash; equal for equal keys only.
    #[inline]
    pub fn order(self, key: u64) -> u64 {
        match self {
            Self::Index => key,
            Self::Sparse => mix(key),
        }
    }
}

/// Where a table's rows live while they are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Whole, in fast memory.
    Resident,
    /// On flash, with the embedding cache in front.
    Cached,
    /// Resident if small and the budget has room, else cached.
    Auto,
}

/// What a request does about a row that is not in fast memory, in the order in which it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MissPolicy {
    /// Fetch it now.
    Wait,
    /// Fetch it now if the request's deadline allows, else answer with the default row.
    Deadline,
    /// Answer with the default row now, fetch it behind the answer.
    Default,
}

/// An embedding table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// Unique in the model.
    pub name: String,
    /// Values in a row.
    pub dim: u32,
    /// Which keys there are.
    pub keys: KeySpace,
    /// Rows in the table.
    pub rows: u64,
    /// How rows are encoded.
    pub codec: Codec,
    /// Exponent of the power-of-two unit of quantized rows.
    pub unit_exp: i8,
    /// Where rows live.
    pub placement: Placement,
    /// What a miss does.
    pub miss: MissPolicy,
    /// The row for keys that cannot be answered, `[dim]`.
    pub default_row: Vec<f32>,
}

impl Table {
    /// How the rows are encoded; `None` if the unit does not fit the codec.
    pub fn format(&self) -> Option<RowFormat> {
        RowFormat::new(self.codec, self.dim as usize, self.unit_exp)
    }

    /// Bytes of all encoded rows.
    pub fn row_bytes_total(&self) -> u64 {
        self.rows.saturating_mul(self.codec.row_bytes(self.dim as usize) as u64)
    }
}

/// A sparse feature of a request: a bag of keys for each sample.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Feature {
    /// Unique in the model.
    pub name: String,
    /// Number of its table; several features may share one.
    pub table: u16,
    /// How a bag becomes a vector.
    pub pooling: Pooling,
    /// Most keys in a bag.
    pub hotness_max: u32,
}

/// What feeds an input of the dense network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum InputSource {
    /// The request's dense features.
    Dense,
    /// The pooled vectors of these features, side by side.
    Features(Vec<u16>),
}

/// An input of the dense network, `[batch, width]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkInput {
    /// Its name in the ONNX file.
    pub name: String,
    /// What fills it.
    pub source: InputSource,
}

/// The dense network's interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Its inputs.
    pub inputs: Vec<NetworkInput>,
    /// The name of its output in the ONNX file, `[batch]` or `[batch, n]`.
    pub output: String,
    /// What makes a score of the output.
    pub activation: Activation,
}

/// A model's schema.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schema {
    /// Names of the dense features, in request order.
    pub dense_features: Vec<String>,
    /// The embedding tables.
    pub tables: Vec<Table>,
    /// The sparse features, in request order.
    pub features: Vec<Feature>,
    /// The dense network.
    pub network: Network,
}

/// A schema that contradicts itself or a limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct SchemaError {
    /// Which field, such as `table[3].dim`.
    pub field: String,
    /// Its value and what is wrong with it.
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
            return fault(what, format!("more than {max}"));
        }
        if name.is_empty() || name.len() > NAME_BYTES_MAX || name.chars().any(char::is_control) {
            return fault(
                field,
                format!("`{}` is empty, too long or unprintable", name.escape_debug()),
            );
        }
        if !seen.insert(name) {
            return fault(field, format!("`{name}` is there twice"));
        }
    }
    Ok(())
}

impl Schema {
    /// Checks every field against the limits and against the others.
    ///
    /// # Errors
    /// The first field that is wrong.
    pub fn check(&self) -> Result<(), SchemaError> {
        check_names("dense_features", DENSE_FEATURES_MAX, self.dense_features.iter())?;
        check_names("table", TABLES_MAX, self.tables.iter().map(|t| &t.name))?;
        check_names("feature", FEATURES_MAX, self.features.iter().map(|f| &f.name))?;
        check_names("network.input", FEATURES_MAX, self.network.inputs.iter().map(|i| &i.name))?;
        self.tables.iter().enumerate().try_for_each(|(i, t)| check_table(i, t))?;
        for (i, f) in self.features.iter().enumerate() {
            if usize::from(f.table) >= self.tables.len() {
                return fault(
                    format!("feature[{i}].table"),
                    format!("{} of {} tables", f.table, self.tables.len()),
                );
            }
            if f.hotness_max == 0 || f.hotness_max as usize > HOTNESS_MAX {
                return fault(
                    format!("feature[{i}].hotness_max"),
                    format!("{} is not in 1..={HOTNESS_MAX}", f.hotness_max),
                );
            }
        }
        self.check_network()
    }

    /// Every feature feeds exactly one input; dense features feed one if there are any.
    fn check_network(&self) -> Result<(), SchemaError> {
        let mut fed = vec![0u32; self.features.len()];
        let mut dense = 0u32;
        for (i, input) in self.network.inputs.iter().enumerate() {
            match &input.source {
                InputSource::Dense => dense += 1,
                InputSource::Features(features) if features.is_empty() => {
                    return fault(format!("network.input[{i}].features"), "is empty");
                }
                InputSource::Features(features) => {
                    for &f in features {
                        match fed.get_mut(usize::from(f)) {
                            Some(n) => *n += 1,
                            None => {
                                return fault(
                                    format!("network.input[{i}].features"),
                                    format!("no feature {f}"),
                                );
                            }
                        }
                    }
                }
            }
        }
        if dense != u32::from(!self.dense_features.is_empty()) {
            let n = self.dense_features.len();
            return fault("network.input", format!("{dense} inputs take the {n} dense features"));
        }
        if let Some(f) = fed.iter().position(|&n| n != 1) {
            let name = &self.features[f].name;
            return fault(format!("feature[{f}]"), format!("`{name}` feeds {} inputs", fed[f]));
        }
        match self
            .network
            .inputs
            .iter()
            .map(|i| self.input_width(i))
            .position(|w| w > INPUT_WIDTH_MAX)
        {
            Some(i) => fault(
                format!("network.input[{i}]"),
                format!("is wider than {INPUT_WIDTH_MAX} values"),
            ),
            None => Ok(()),
        }
    }

    /// The table of feature `f`.
    pub fn table_of(&self, f: usize) -> &Table {
        &self.tables[usize::from(self.features[f].table)]
    }

    /// Values that feature `f` adds to its network input.
    pub fn feature_width(&self, f: usize) -> usize {
        let rows = if self.features[f].pooling == Pooling::None {
            self.features[f].hotness_max as usize
        } else {
            1
        };
        rows * self.table_of(f).dim as usize
    }

    /// Values a sample of a network input.
    pub fn input_width(&self, input: &NetworkInput) -> usize {
        match &input.source {
            InputSource::Dense => self.dense_features.len(),
            InputSource::Features(features) => {
                features.iter().map(|&f| self.feature_width(usize::from(f))).sum()
            }
        }
    }

    /// Loads the dense network and proves that this schema fits it.
    ///
    /// # Errors
    /// The file does not load, or its inputs and outputs are not the schema's.
    pub fn load_dense(&self, onnx: Vec<u8>, weights: Weights) -> Result<DenseEngine, DenseError> {
        let network = &self.network;
        let widths: Vec<(&str, usize)> =
            network.inputs.iter().map(|i| (i.name.as_str(), self.input_width(i))).collect();
        DenseEngine::load(onnx, &widths, &network.output, network.activation, weights)
    }

    /// The same onto a GPU.
    ///
    /// # Errors
    /// As `load_dense`, or nothing on the GPU runs it to the CPU's scores.
    pub fn load_dense_on(
        &self,
        gpu: &Arc<Gpu>,
        onnx: &[u8],
        weights: Weights,
        options: &DeviceOptions,
    ) -> Result<DeviceEngine, DenseError> {
        let network = &self.network;
        let inputs: Vec<(&str, usize)> =
            network.inputs.iter().map(|i| (i.name.as_str(), self.input_width(i))).collect();
        let (output, activation) = (network.output.as_str(), network.activation);
        DeviceEngine::load(
            gpu,
            &DenseNetwork { onnx, inputs: &inputs, output, activation, weights },
            options,
        )
    }

    /// Most lookups of one sample.
    pub fn lookups_max(&self) -> usize {
        self.features.iter().map(|f| f.hotness_max as usize).sum()
    }
}

fn check_table(i: usize, table: &Table) -> Result<(), SchemaError> {
    let dim = table.dim as usize;
    if dim == 0 || dim > DIM_MAX {
        return fault(format!("table[{i}].dim"), format!("{dim} is not in 1..={DIM_MAX}"));
    }
    if table.rows == 0 {
        return fault(format!("table[{i}].rows"), "is 0");
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
