//! `model.toml`: what `pack` is told about a trained model. Turns names into the numbers of a
//! schema; never reads rows.

use crate::import::Source;
use anyhow::{Context, Result, bail, ensure};
use hatchback::schema::{
    Feature, InputSource, KeySpace, MissPolicy, Network, NetworkInput, Placement, Schema, Table,
};
use hatchback::{Activation, Codec, Pooling};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// The format of `model.toml` that this version reads.
const SPEC_FORMAT: u32 = 1;

/// The whole file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Always 1.
    pub format: u32,
    /// The model's lineage.
    pub name: String,
    /// Its generation.
    pub sequence: u64,
    /// Names of the dense features, in request order.
    #[serde(default)]
    pub dense_features: Vec<String>,
    /// The dense network.
    pub network: NetworkSpec,
    /// The tables.
    #[serde(rename = "table", default)]
    pub tables: Vec<TableSpec>,
    /// The sparse features.
    #[serde(rename = "feature", default)]
    pub features: Vec<FeatureSpec>,
    /// The probe set.
    pub probe: Option<ProbeSpec>,
    /// Requests as they come in, by which the most used rows are placed.
    pub requests: Option<RequestsSpec>,
}

/// `[network]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkSpec {
    /// The ONNX file.
    pub onnx: PathBuf,
    /// Its output.
    pub output: String,
    /// What makes a score of the output.
    pub activation: Activation,
    /// Its inputs.
    #[serde(rename = "input")]
    pub inputs: Vec<InputSpec>,
}

/// `[[network.input]]`: either `dense = true` or `features = [...]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputSpec {
    /// Its name in the ONNX file.
    pub name: String,
    /// Whether the dense features feed it.
    #[serde(default)]
    pub dense: bool,
    /// The sparse features that feed it, in order.
    #[serde(default)]
    pub features: Vec<String>,
}

/// A codec, or the choice left to `pack`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum CodecChoice {
    /// f16 for small tables (they end up resident), u8 for the others.
    #[default]
    Auto,
    /// Exact.
    F32,
    /// Half precision.
    F16,
    /// 8-bit codes with scale and bias.
    U8,
    /// 4-bit codes with scale and bias.
    U4,
}

impl CodecChoice {
    /// The codec of a table of `rows` rows of `dim` values.
    pub fn resolve(self, rows: u64, dim: usize) -> Codec {
        /// Up to here a table is cheap to keep whole in f16.
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

/// The row for keys that cannot be answered.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(untagged)]
pub enum DefaultRow {
    /// Zeros.
    #[default]
    #[serde(skip)]
    Zeros,
    /// `"zeros"` or `"mean"`.
    Named(NamedRow),
    /// The values themselves, `[dim]`.
    Values(Vec<f32>),
}

/// A default row by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NamedRow {
    /// All zeros.
    Zeros,
    /// The mean of all rows of the table.
    Mean,
}

/// `[[table]]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    /// Unique in the model.
    pub name: String,
    /// Values in a row.
    pub dim: usize,
    /// Which keys there are.
    pub keys: KeySpace,
    /// How rows are encoded.
    #[serde(default)]
    pub codec: CodecChoice,
    /// Where rows live.
    #[serde(default = "automatic")]
    pub placement: Placement,
    /// What a miss does.
    #[serde(default = "wait")]
    pub miss: MissPolicy,
    /// The default row.
    #[serde(default)]
    pub default: DefaultRow,
    /// Where the rows come from.
    pub source: Source,
}

fn automatic() -> Placement {
    Placement::Auto
}

fn wait() -> MissPolicy {
    MissPolicy::Wait
}

/// `[[feature]]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeatureSpec {
    /// Unique in the model.
    pub name: String,
    /// Its table.
    pub table: String,
    /// How a bag becomes a vector.
    pub pooling: Pooling,
    /// Most keys in a bag.
    pub hotness_max: u32,
}

/// `[probe]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbeSpec {
    /// A file of samples, one line of JSON each.
    pub samples: PathBuf,
}

/// `[requests]`. Some ten thousand do; they are held in memory.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestsSpec {
    /// A file of samples, one line of JSON each; rows that one sample asks for are placed together.
    pub samples: PathBuf,
}

fn position<'a>(mut names: impl Iterator<Item = &'a str>, name: &str) -> Option<u16> {
    names.position(|n| n == name).and_then(|i| u16::try_from(i).ok())
}

impl ModelSpec {
    /// Reads the file at `path`.
    ///
    /// # Errors
    /// It cannot be read, does not parse, or has another format.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
        let spec: Self = toml::from_str(&text).with_context(|| path.display().to_string())?;
        let format = spec.format;
        ensure!(format == SPEC_FORMAT, "{}: format: {format} is not {SPEC_FORMAT}", path.display());
        Ok(spec)
    }

    /// The schema, with `tables` in place of the tables of the file.
    ///
    /// # Errors
    /// A name refers to nothing, or the schema contradicts itself.
    pub fn schema(&self, tables: Vec<Table>) -> Result<Schema> {
        let features = self.features.iter().map(|f| self.feature(f)).collect::<Result<_>>()?;
        let inputs = self.network.inputs.iter().map(|i| self.input(i)).collect::<Result<_>>()?;
        let network = Network {
            inputs,
            output: self.network.output.clone(),
            activation: self.network.activation,
        };
        let schema =
            Schema { dense_features: self.dense_features.clone(), tables, features, network };
        schema.check()?;
        Ok(schema)
    }

    fn feature(&self, spec: &FeatureSpec) -> Result<Feature> {
        let table = position(self.tables.iter().map(|t| t.name.as_str()), &spec.table)
            .with_context(|| {
                format!("feature `{}`: table: there is no table `{}`", spec.name, spec.table)
            })?;
        Ok(Feature {
            name: spec.name.clone(),
            table,
            pooling: spec.pooling,
            hotness_max: spec.hotness_max,
        })
    }

    fn input(&self, spec: &InputSpec) -> Result<NetworkInput> {
        let source = match (spec.dense, spec.features.is_empty()) {
            (true, true) => InputSource::Dense,
            (false, false) => InputSource::Features(self.input_features(spec)?),
            _ => bail!(
                "network.input `{}`: takes either `dense = true` or `features = [...]`",
                spec.name
            ),
        };
        Ok(NetworkInput { name: spec.name.clone(), source })
    }

    fn input_features(&self, spec: &InputSpec) -> Result<Vec<u16>> {
        let number = |name: &String| {
            position(self.features.iter().map(|f| f.name.as_str()), name).with_context(|| {
                format!("network.input `{}`: features: there is no feature `{name}`", spec.name)
            })
        };
        spec.features.iter().map(number).collect()
    }
}
