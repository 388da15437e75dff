//! `model.toml`: the description of a trained model that `pack` reads. Turns names into the numbers
//! of a schema; never reads rows. `docs/model.md` is the reference of its keys.

use crate::import::Source;
use crate::pack::spec_line::{at_line, line_at, line_of};
use anyhow::{Context, Result, anyhow, ensure};
use hatchback::schema::{
    Feature, InputSource, KeySpace, MissPolicy, Network, NetworkInput, Placement, Schema,
    SchemaError, Table,
};
use hatchback::{Activation, Codec, Pooling};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// The format of `model.toml` that this version reads.
const SPEC_FORMAT: u32 = 1;

/// A model.toml.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Version of the file's format: 1.
    pub format: u32,
    /// Lineage of the model.
    pub name: String,
    /// Sequence of the generation; a later one is higher.
    pub sequence: u64,
    /// Names of the dense features, in the order of a request's values.
    #[serde(default)]
    pub dense_features: Vec<String>,
    /// `[network]`.
    pub network: NetworkSpec,
    /// `[[table]]`, one for each embedding table.
    #[serde(rename = "table", default)]
    pub tables: Vec<TableSpec>,
    /// `[[feature]]`, one for each sparse feature.
    #[serde(rename = "feature", default)]
    pub features: Vec<FeatureSpec>,
    /// `[probe]`: the probe set.
    pub probe: Option<ProbeSpec>,
    /// `[requests]`.
    pub requests: Option<RequestsSpec>,
}

/// `[network]`: the dense network.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkSpec {
    /// Path of the ONNX file.
    pub onnx: PathBuf,
    /// Name of the network's output.
    pub output: String,
    /// Function that turns the output into a score.
    pub activation: Activation,
    /// `[[network.input]]`, one for each input of the ONNX file.
    #[serde(rename = "input")]
    pub inputs: Vec<InputSpec>,
}

/// `[[network.input]]`: either `dense = true` or `features = [...]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputSpec {
    /// Name of the input in the ONNX file.
    pub name: String,
    /// Whether the dense features feed this input.
    #[serde(default)]
    pub dense: bool,
    /// Sparse features that feed this input, in this order.
    #[serde(default)]
    pub features: Vec<String>,
}

/// The codec of a table's rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum CodecChoice {
    /// f16 for a table of at most 4 MiB as f16, u8 for a larger one
    #[default]
    Auto,
    /// 32-bit floats: exact
    F32,
    /// 16-bit floats
    F16,
    /// 8-bit codes with a scale and a bias for each row
    U8,
    /// 4-bit codes with a scale and a bias for each row
    U4,
}

impl CodecChoice {
    /// Returns the codec of a table `[rows, dim]`.
    pub fn resolve(self, rows: u64, dim: usize) -> Codec {
        /// A table of at most this size as f16 is likely to be resident.
        const SMALL_BYTES: u64 = 4 << 20;
        match self {
            Self::F32 => Codec::F32,
            Self::F16 => Codec::F16,
            Self::U8 => Codec::U8,
            Self::U4 => Codec::U4,
            Self::Auto if rows.saturating_mul(2 * dim as u64) <= SMALL_BYTES => Codec::F16,
            Self::Auto => Codec::U8,
        }
    }
}

/// The default row of a table.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum DefaultRow {
    /// Zeros.
    #[default]
    #[serde(skip)]
    Zeros,
    /// `"zeros"` or `"mean"`.
    Named(NamedRow),
    /// The values, `[dim]`.
    Values(Vec<f32>),
}

/// A default row that `pack` computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NamedRow {
    /// All zeros.
    Zeros,
    /// The mean of all rows of the table.
    Mean,
}

/// `[[table]]`: an embedding table.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    /// Name of the table, unique in the model.
    pub name: String,
    /// Values in a row.
    pub dim: usize,
    /// Key space of the table.
    pub keys: KeySpace,
    /// Codec of the rows.
    #[serde(default)]
    pub codec: CodecChoice,
    /// Whether the rows are kept in memory or cached.
    #[serde(default = "automatic")]
    pub placement: Placement,
    /// Miss policy.
    #[serde(default = "wait")]
    pub miss: MissPolicy,
    /// Default row.
    #[serde(default)]
    pub default: DefaultRow,
    /// Files of the rows.
    pub source: Source,
}

fn automatic() -> Placement {
    Placement::Auto
}

fn wait() -> MissPolicy {
    MissPolicy::Wait
}

/// `[[feature]]`: a sparse feature.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureSpec {
    /// Name of the feature, unique in the model.
    pub name: String,
    /// Name of the feature's table.
    pub table: String,
    /// How the rows of a bag become one vector.
    pub pooling: Pooling,
    /// Keys in a bag at most.
    pub hotness_max: u32,
}

/// `[probe]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbeSpec {
    /// A file of samples, one line of JSON each.
    pub samples: PathBuf,
}

/// `[requests]`: recorded requests, by which `pack` clusters the most used rows. Ten thousand are
/// enough; `pack` holds all of them in memory.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestsSpec {
    /// A file of samples, one line of JSON each. `pack` stores the rows of one sample together.
    pub samples: PathBuf,
}

/// Returns the position of `name` in a list of names.
fn position<'a>(mut names: impl Iterator<Item = &'a str>, name: &str) -> Option<u16> {
    names.position(|n| n == name).and_then(|i| u16::try_from(i).ok())
}

fn fault(field: String, problem: impl Into<String>) -> SchemaError {
    SchemaError { field, problem: problem.into() }
}

impl ModelSpec {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// The file cannot be read, or as [`ModelSpec::parse`].
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        Self::parse(&text, path)
    }

    /// Parses `text`, the content of the file at `path`.
    ///
    /// # Errors
    /// The text is not a model.toml of the supported format. The error names the line.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        let spec: Self = toml::from_str(text).map_err(|error| {
            let line = error.span().map(|span| line_at(text, span.start));
            anyhow!("{}: {}", at_line(path, line), error.message())
        })?;

        let format = spec.format;
        ensure!(
            format == SPEC_FORMAT,
            "{}: format: {format} is not supported, only {SPEC_FORMAT} is",
            at_line(path, line_of(text, "format"))
        );
        Ok(spec)
    }

    /// Returns the schema of the model with `tables` as its tables.
    ///
    /// # Errors
    /// A name refers to nothing, or the schema contradicts itself.
    pub fn schema(&self, tables: Vec<Table>) -> Result<Schema, SchemaError> {
        let features = self.features.iter().enumerate().map(|(i, f)| self.feature(i, f));
        let features = features.collect::<Result<_, _>>()?;
        let inputs = self.network.inputs.iter().enumerate().map(|(i, input)| self.input(i, input));
        let network = Network {
            inputs: inputs.collect::<Result<_, _>>()?,
            output: self.network.output.clone(),
            activation: self.network.activation,
        };

        let schema =
            Schema { dense_features: self.dense_features.clone(), tables, features, network };
        schema.check()?;
        Ok(schema)
    }

    fn feature(&self, number: usize, spec: &FeatureSpec) -> Result<Feature, SchemaError> {
        let names = self.tables.iter().map(|t| t.name.as_str());
        let table = position(names, &spec.table).ok_or_else(|| {
            fault(format!("feature[{number}].table"), format!("there is no table `{}`", spec.table))
        })?;
        Ok(Feature {
            name: spec.name.clone(),
            table,
            pooling: spec.pooling,
            hotness_max: spec.hotness_max,
        })
    }

    fn input(&self, number: usize, spec: &InputSpec) -> Result<NetworkInput, SchemaError> {
        let source = match (spec.dense, spec.features.is_empty()) {
            (true, true) => InputSource::Dense,
            (false, false) => InputSource::Features(self.input_features(number, spec)?),
            _ => {
                let problem = "takes either `dense = true` or `features = [...]`";
                return Err(fault(format!("network.input[{number}]"), problem));
            }
        };
        Ok(NetworkInput { name: spec.name.clone(), source })
    }

    fn input_features(&self, number: usize, spec: &InputSpec) -> Result<Vec<u16>, SchemaError> {
        let feature = |name: &String| {
            position(self.features.iter().map(|f| f.name.as_str()), name).ok_or_else(|| {
                let field = format!("network.input[{number}].features");
                fault(field, format!("there is no feature `{name}`"))
            })
        };
        spec.features.iter().map(feature).collect()
    }
}
