//! `model.toml`: the description of a trained model that `pack` reads. Turns names into the numbers
//! of a schema; never reads rows. `docs/model.md` is the reference of its keys.

use crate::import::Source;
use crate::limits::HEADER_BYTES_MAX;
use crate::pack::hugectr_network::HugectrNetwork;
use crate::pack::key_spec::KeySpec;
use crate::pack::spec_line::{at_line, line_of, parse_toml};
use crate::report::input;
use anyhow::{Context, Result, ensure};
use hatchback::schema::key_function::KeyFunction;
use hatchback::schema::lookup::Lookup;
use hatchback::schema::{
    DenseFeature, Feature, InputSource, KeySpace, MissPolicy, Network, NetworkInput, NetworkOutput,
    Placement, Schema, SchemaError, Table,
};
use hatchback::{Activation, Codec, Pooling};
use serde::{Deserialize, Deserializer};
use std::path::{Path, PathBuf};

/// The format of `model.toml` that this version reads.
const SPEC_FORMAT: u32 = 1;

/// A model.toml.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// Version of the file's format: 1.
    pub format: u32,
    /// Lineage of the model.
    pub name: String,
    /// Sequence of the generation; a later one is higher.
    pub sequence: u64,
    /// The dense features, in the order of a request's values.
    #[serde(default)]
    pub dense_features: Vec<DenseSpec>,
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
}

/// An entry of `dense_features`.
#[derive(Clone, Debug, Deserialize)]
#[serde(
    untagged,
    deny_unknown_fields,
    expecting = "dense_features has names, or tables with `name`, `missing`, `shared` and `retired`"
)]
pub enum DenseSpec {
    /// The name of a feature without options.
    Name(String),
    /// A feature with options.
    Table {
        /// Name of the feature.
        name: String,
        /// The value that replaces a missing one.
        missing: Option<f32>,
        /// Whether all samples of a request have one value.
        #[serde(default)]
        shared: bool,
        /// Whether the network no longer takes it.
        #[serde(default)]
        retired: bool,
    },
}

impl DenseSpec {
    /// Returns the feature of the schema.
    pub fn feature(&self) -> DenseFeature {
        match self {
            Self::Name(name) => DenseFeature::plain(name),
            Self::Table { name, missing, shared, retired } => DenseFeature {
                name: name.clone(),
                missing: *missing,
                shared: *shared,
                retired: *retired,
            },
        }
    }
}

impl From<String> for DenseSpec {
    fn from(name: String) -> Self {
        Self::Name(name)
    }
}

/// `[network]`: the dense network.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetworkSpec {
    /// Path of the ONNX file.
    pub onnx: Option<PathBuf>,
    /// Whether the ONNX file takes flat inputs, table by table, as Triton's HPS ensembles do.
    #[serde(default)]
    pub table_major: bool,
    /// The graph and the weights of HugeCTR, instead of an ONNX file.
    pub hugectr: Option<HugectrNetwork>,
    /// The network's output, or its outputs.
    pub output: OutputsSpec,
    /// Function that turns the only output into a score.
    pub activation: Option<Activation>,
    /// `[[network.input]]`, one for each input of the ONNX file.
    #[serde(rename = "input")]
    pub inputs: Vec<InputSpec>,
}

/// `output` of `[network]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "output is the name of an output, or a list of tables with a name and an activation"
)]
pub enum OutputsSpec {
    /// The name of the only output; its activation is beside it.
    One(String),
    /// Several outputs.
    Several(Vec<OutputSpec>),
}

/// One of several outputs.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputSpec {
    /// Name of the output in the ONNX file.
    pub name: String,
    /// Function that turns the output into a score.
    pub activation: Activation,
}

/// `[[network.input]]`: one of `dense = true`, `features`, `lengths` and `masks`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputSpec {
    /// Name of the input in the ONNX file.
    pub name: String,
    /// Whether the dense features feed this input.
    #[serde(default)]
    pub dense: bool,
    /// Sparse features that feed this input with their vectors, in this order. `feature@table` is
    /// the vector that a feature has of one of its tables.
    #[serde(default)]
    pub features: Vec<String>,
    /// Sparse features that feed this input with the lengths of their bags.
    #[serde(default)]
    pub lengths: Vec<String>,
    /// Sparse features that feed this input with the masks of their bags.
    #[serde(default)]
    pub masks: Vec<String>,
}

impl InputSpec {
    /// Returns the input that takes the dense features.
    pub fn dense(name: &str) -> Self {
        Self { name: name.to_owned(), dense: true, ..Self::default() }
    }

    /// Returns an input that takes the vectors of `features`.
    pub fn vectors(name: &str, features: Vec<String>) -> Self {
        Self { name: name.to_owned(), features, ..Self::default() }
    }
}

/// The codec of a table's rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum CodecChoice {
    /// f16 for a table of at most 4 MiB as f16, u8 for a larger one, f32 for values beyond these
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
#[serde(untagged, expecting = "default is \"zeros\", \"mean\" or a list of numbers")]
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
    /// Names of the tables in which its keys are looked up: one, or a list.
    #[serde(rename = "table", deserialize_with = "one_or_several")]
    pub tables: Vec<String>,
    /// How the rows of a bag become one vector, for each table.
    pub pooling: Pooling,
    /// Keys in a bag at most.
    pub hotness_max: u32,
    /// Whether each key comes with a weight, which multiplies its rows.
    #[serde(default)]
    pub weights: bool,
    /// How raw values become keys.
    pub key: Option<KeySpec>,
    /// The key that fills a bag up, which masks and pooled bags count as no key.
    pub padding: Option<u64>,
    /// The key of a missing value.
    pub null: Option<u64>,
    /// Whether all samples of a request share one bag.
    #[serde(default)]
    pub shared: bool,
    /// Whether the model no longer uses it; callers may still send it.
    #[serde(default)]
    pub retired: bool,
}

/// Reads one name, or a list of names.
fn one_or_several<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "table is the name of a table, or a list of names")]
    enum Names {
        One(String),
        Several(Vec<String>),
    }
    Ok(match Names::deserialize(from)? {
        Names::One(name) => vec![name],
        Names::Several(names) => names,
    })
}

impl FeatureSpec {
    /// Returns a feature of keys that sums their rows.
    pub fn sum(name: &str, table: &str, hotness_max: u32) -> Self {
        Self {
            name: name.to_owned(),
            tables: vec![table.to_owned()],
            pooling: Pooling::Sum,
            hotness_max,
            weights: false,
            key: None,
            padding: None,
            null: None,
            shared: false,
            retired: false,
        }
    }
}

/// `[probe]`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProbeSpec {
    /// A file of samples, one line of JSON each.
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
        let text =
            input::read_text(path, HEADER_BYTES_MAX).with_context(|| path.display().to_string())?;
        Self::parse(&text, path)
    }

    /// Parses `text`, the content of the file at `path`.
    ///
    /// # Errors
    /// The text is not a model.toml of the supported format. The error names the line.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        let spec: Self = parse_toml(text, path)?;
        let format = spec.format;
        ensure!(
            format == SPEC_FORMAT,
            "{}: format: {format} is not supported, only {SPEC_FORMAT} is",
            at_line(path, line_of(text, "format"))
        );
        Ok(spec)
    }

    /// Returns the key function of each feature. `base` is the folder of the file.
    ///
    /// # Errors
    /// The file of a vocabulary cannot be read or is wrong.
    pub fn key_functions(&self, base: &Path) -> Result<Vec<KeyFunction>> {
        let names: Vec<&str> = self.features.iter().map(|f| f.name.as_str()).collect();
        let load = |feature: &FeatureSpec| match &feature.key {
            Some(_) if feature.retired => Ok(KeyFunction::Key),
            None => Ok(KeyFunction::Key),
            Some(key) => {
                key.load(base, &names).with_context(|| format!("feature `{}`", feature.name))
            }
        };
        self.features.iter().map(load).collect()
    }

    /// Returns the schema of the model with `tables` as its tables and `keys` as the key functions
    /// of its features.
    ///
    /// # Errors
    /// A name refers to nothing, or the schema contradicts itself.
    pub fn schema(&self, tables: Vec<Table>, keys: &[KeyFunction]) -> Result<Schema, SchemaError> {
        let feature = |(spec, key): (&FeatureSpec, &KeyFunction)| Feature {
            name: spec.name.clone(),
            hotness_max: spec.hotness_max,
            weighted: spec.weights && !spec.retired,
            key: key.clone(),
            padding: spec.padding,
            null: spec.null.filter(|_| !spec.retired),
            shared: spec.shared && !spec.retired,
            retired: spec.retired,
        };
        let features = self.features.iter().zip(keys).map(feature).collect();
        // First, because the names of vectors depend on them.
        let lookups = self.lookups()?;
        let inputs = self.network.inputs.iter().enumerate().map(|(i, input)| self.input(i, input));
        let network =
            Network { inputs: inputs.collect::<Result<_, _>>()?, outputs: self.outputs()? };

        let dense_features = self.dense_features.iter().map(DenseSpec::feature).collect();
        let schema = Schema { dense_features, tables, features, lookups, network };
        schema.check()?;
        Ok(schema)
    }

    fn outputs(&self) -> Result<Vec<NetworkOutput>, SchemaError> {
        let refuse = |problem: &str| Err(fault("network.activation".to_owned(), problem));
        match (&self.network.output, self.network.activation) {
            (OutputsSpec::One(name), Some(activation)) => {
                Ok(vec![NetworkOutput { name: name.clone(), activation }])
            }
            (OutputsSpec::One(_), None) => refuse("is missing"),
            (OutputsSpec::Several(outputs), None) => {
                let output = |output: &OutputSpec| {
                    let (name, activation) = (output.name.clone(), output.activation);
                    NetworkOutput { name, activation }
                };
                Ok(outputs.iter().map(output).collect())
            }
            (OutputsSpec::Several(_), Some(_)) => {
                refuse("belongs to each output, as `output` is a list")
            }
        }
    }

    /// Returns the lookups of each feature in turn, in the order of its tables.
    fn lookups(&self) -> Result<Vec<Lookup>, SchemaError> {
        let mut lookups = Vec::new();
        let used = |(_, spec): &(usize, &FeatureSpec)| !spec.retired;
        for (number, spec) in self.features.iter().enumerate().filter(used) {
            let refuse = |problem: String| fault(format!("feature[{number}].table"), problem);
            if spec.tables.is_empty() {
                return Err(refuse("is empty".to_owned()));
            }
            for (i, name) in spec.tables.iter().enumerate() {
                if spec.tables[..i].contains(name) {
                    return Err(refuse(format!("`{name}` occurs twice")));
                }
                let table = position(self.tables.iter().map(|t| t.name.as_str()), name);
                let table = table.ok_or_else(|| refuse(format!("there is no table `{name}`")))?;
                let feature = u16::try_from(number).map_err(|e| refuse(e.to_string()))?;
                lookups.push(Lookup { feature, table, pooling: spec.pooling });
            }
        }
        Ok(lookups)
    }

    fn input(&self, number: usize, spec: &InputSpec) -> Result<NetworkInput, SchemaError> {
        let InputSpec { features, lengths, masks, .. } = spec;
        let lists = [("features", features), ("lengths", lengths), ("masks", masks)];
        let mut given = lists.iter().filter(|(_, names)| !names.is_empty());
        let source = match (spec.dense, given.next(), given.next()) {
            (true, None, None) => InputSource::Dense,
            (false, Some((field, names)), None) => {
                let place = format!("network.input[{number}].{field}");
                let each = |number_of: &dyn Fn(&str) -> Result<u16, String>| {
                    let numbers = names.iter().map(|name| number_of(name));
                    numbers.collect::<Result<_, _>>().map_err(|problem| fault(place, problem))
                };
                match *field {
                    "features" => InputSource::Vectors(each(&|name| self.lookup_number(name))?),
                    "lengths" => InputSource::Lengths(each(&|name| self.feature_number(name))?),
                    _ => InputSource::Masks(each(&|name| self.feature_number(name))?),
                }
            }
            _ => {
                let problem = "takes one of `dense = true`, `features`, `lengths` and `masks`";
                return Err(fault(format!("network.input[{number}]"), problem));
            }
        };
        Ok(NetworkInput { name: spec.name.clone(), source })
    }

    /// Returns the number of the feature `name`.
    fn feature_number(&self, name: &str) -> Result<u16, String> {
        position(self.features.iter().map(|f| f.name.as_str()), name)
            .ok_or_else(|| format!("there is no feature `{name}`"))
    }

    /// Returns the number of the lookup whose vector is `name`: `feature`, or `feature@table`.
    fn lookup_number(&self, name: &str) -> Result<u16, String> {
        let mut first = 0;
        for FeatureSpec { name: feature, tables, .. } in
            self.features.iter().filter(|feature| !feature.retired)
        {
            let vector = |table: &String| format!("{feature}@{table}");
            let table = match (feature == name, tables.as_slice()) {
                (true, [_]) => Some(0),
                (true, several) => {
                    let vectors: Vec<String> = several.iter().map(vector).collect();
                    let vectors = vectors.join("` or `");
                    return Err(format!("`{name}` has several tables; write `{vectors}`"));
                }
                _ => tables.iter().position(|table| vector(table) == name),
            };
            if let Some(table) = table {
                return u16::try_from(first + table).map_err(|e| e.to_string());
            }
            first += tables.len();
        }
        Err(format!("there is no feature `{name}`"))
    }
}
