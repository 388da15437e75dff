//! Models to test with. A plan becomes a small random model: rows, a schema, a network whose output
//! is its inputs, and a bundle. The models of the repository are packed from their files.

use crate::onnx;
use crate::random::Random;
use hatchback::bundle::BundleReader;
use hatchback::flash::Flash;
use hatchback::io::disk::{self, Disk};
use hatchback::model::budget::Budget;
use hatchback::model::{Model, OpenError};
use hatchback::request::worker::Worker;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, MissPolicy, Placement, Schema};
use hatchback::{Activation, LookupStatus, Pooling};
use hatchback_tools::import::{RowSource, Source, TakeBlock};
use hatchback_tools::pack::spec::{
    CodecChoice, DefaultRow, FeatureSpec, InputSpec, ModelSpec, NetworkSpec, OutputsSpec,
    ProbeSpec, TableSpec,
};
use hatchback_tools::pack::{Overrides, PackJob};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// The plan of a model. Equal plans make equal models.
#[derive(Clone, Debug)]
pub struct ModelPlan {
    /// The name of the lineage.
    pub name: String,
    /// The sequence of the generation.
    pub sequence: u64,
    /// The seed of rows and samples.
    pub seed: u64,
    /// The number of dense features.
    pub dense: usize,
    /// The tables.
    pub tables: Vec<TablePlan>,
    /// The features.
    pub features: Vec<FeaturePlan>,
}

/// One table of a plan.
#[derive(Clone, Debug)]
pub struct TablePlan {
    /// The keys that it may have.
    pub keys: KeySpace,
    /// Its rows.
    pub rows: u64,
    /// Values in a row.
    pub dim: usize,
    /// How rows are encoded.
    pub codec: CodecChoice,
    /// Where rows are while they are served.
    pub placement: Placement,
    /// What a request does about a missing row.
    pub miss: MissPolicy,
    /// Whether the default row is zeros. Else its values are far from every row.
    pub default_zeros: bool,
    /// Whether the trainer counted lookups, so that the bundle has a hot list.
    pub counts: bool,
}

impl TablePlan {
    /// Plans a cached table that waits for its misses and has no hot list. Its default row is far
    /// from every row.
    pub fn cached(keys: KeySpace, rows: u64, dim: usize, codec: CodecChoice) -> Self {
        let (placement, miss) = (Placement::Cached, MissPolicy::Wait);
        Self { keys, rows, dim, codec, placement, miss, default_zeros: false, counts: false }
    }
}

/// One feature of a plan.
#[derive(Clone, Debug)]
pub struct FeaturePlan {
    /// Its first table.
    pub table: usize,
    /// Its other tables.
    pub more_tables: Vec<usize>,
    /// How the rows of a bag become a vector, for each table.
    pub pooling: Pooling,
    /// Keys in its longest bag.
    pub hotness_max: u32,
    /// Whether it feeds the second network input instead of the first.
    pub second_input: bool,
    /// Whether each key has a weight.
    pub weighted: bool,
    /// Whether all samples of a request share one bag.
    pub shared: bool,
}

impl FeaturePlan {
    /// Plans a feature of one key that feeds the first input.
    pub fn one_hot(table: usize) -> Self {
        let (pooling, hotness_max) = (Pooling::Sum, 1);
        let more_tables = Vec::new();
        let [second_input, weighted, shared] = [false; 3];
        Self { table, more_tables, pooling, hotness_max, second_input, weighted, shared }
    }

    /// Returns its tables.
    pub fn tables(&self) -> impl Iterator<Item = usize> {
        std::iter::once(self.table).chain(self.more_tables.iter().copied())
    }
}

/// The rows of one table in memory, in the order of the trainer's file.
#[derive(Clone, Debug)]
pub struct TableRows {
    /// The key of each row; `None` if a row's key is its position.
    pub keys: Option<Vec<u64>>,
    /// Values, `[rows, dim]`.
    pub values: Vec<f32>,
    /// Values in a row.
    pub dim: usize,
    /// Lookups of each row in training.
    pub counts: Option<Vec<u64>>,
}

impl TableRows {
    /// Iterates over every key with its row.
    pub fn each(&self) -> impl Iterator<Item = (u64, &[f32])> {
        let rows = self.values.chunks_exact(self.dim);
        rows.enumerate().map(|(i, row)| (self.keys.as_ref().map_or(i as u64, |keys| keys[i]), row))
    }

    /// Returns all keys.
    pub fn all_keys(&self) -> Vec<u64> {
        self.each().map(|(key, _)| key).collect()
    }
}

impl RowSource for TableRows {
    fn rows(&self) -> u64 {
        (self.values.len() / self.dim) as u64
    }

    fn has_keys(&self) -> bool {
        self.keys.is_some()
    }

    fn counts(&self) -> anyhow::Result<Option<Vec<u64>>> {
        Ok(self.counts.clone())
    }

    /// Passes on the rows in blocks of odd sizes.
    fn each_block(&self, take: TakeBlock<'_>) -> anyhow::Result<()> {
        for (keys, values) in self.all_keys().chunks(13).zip(self.values.chunks(13 * self.dim)) {
            take(keys, values)?;
        }
        Ok(())
    }
}

impl ModelPlan {
    /// Returns the rows of table `t`.
    pub fn rows(&self, t: usize) -> TableRows {
        let (plan, mut random) = (&self.tables[t], Random::of(self.seed, t as u64));
        let mut keys: Vec<u64> = match plan.keys {
            KeySpace::Index => (0..plan.rows).collect(),
            KeySpace::Sparse => sparse_keys(plan.rows, &mut random),
        };
        // An index table may come with keys of its own, in any order.
        let with_keys = plan.keys == KeySpace::Sparse || random.one_in(3);
        if with_keys {
            (1..keys.len()).for_each(|i| keys.swap(i, random.below(i as u64 + 1) as usize));
        }
        let scale = *random.pick(&[1e-3, 0.1, 1.0, 1.0, 30.0]);
        let values =
            (0..plan.rows).flat_map(|_| random_row(plan.dim, scale, &mut random)).collect();
        let counts = plan.counts.then(|| (0..plan.rows).map(|_| random.below(50)).collect());
        TableRows { keys: with_keys.then_some(keys), values, dim: plan.dim, counts }
    }

    /// Returns sample number `id`, with empty and full bags, duplicate keys, and keys that the
    /// tables do not have.
    pub fn sample(&self, id: u64) -> Sample {
        let mut random = Random::of(self.seed, 1 << 32 | id);
        let dense = (0..self.dense).map(|_| 10.0 * random.signed()).collect();
        let sparse: Vec<Vec<u64>> =
            self.features.iter().map(|f| self.bag(f, &mut random)).collect();
        let labels = vec![Some(random.below(2) as f32)];
        let mut weights = Vec::new();
        if self.features.iter().any(|f| f.weighted) {
            let of = |(f, bag): (&FeaturePlan, &Vec<u64>)| {
                let keys = if f.weighted { bag.len() } else { 0 };
                (0..keys).map(|_| 3.0 * random.signed()).collect()
            };
            weights = self.features.iter().zip(&sparse).map(of).collect();
        }
        Sample { dense, sparse, weights, labels, scores: Vec::new() }
    }

    fn bag(&self, feature: &FeaturePlan, random: &mut Random) -> Vec<u64> {
        let table = &self.tables[feature.table];
        // `rows` draws its keys first from the same stream, so these are its keys.
        let keys = match table.keys {
            KeySpace::Index => Vec::new(),
            KeySpace::Sparse => {
                sparse_keys(table.rows, &mut Random::of(self.seed, feature.table as u64))
            }
        };
        let most = u64::from(feature.hotness_max);
        let n = if random.one_in(3) { most } else { random.below(most + 1) };
        let mut bag: Vec<u64> = Vec::new();
        for _ in 0..n {
            let key = match (random.below(10), table.keys, bag.last()) {
                (0, _, Some(&last)) => last,
                (1, KeySpace::Index, _) => {
                    *random.pick(&[table.rows, table.rows + 7, 1 << 33, u64::MAX])
                }
                (1, KeySpace::Sparse, _) => random.bits(),
                (_, KeySpace::Index, _) => random.below(table.rows),
                (_, KeySpace::Sparse, _) => *random.pick(&keys),
            };
            bag.push(key);
        }
        bag
    }

    /// Returns the contents of `model.toml`. The network's inputs are `dense`, `a` and `b`; an
    /// empty one is left out.
    pub fn spec(&self) -> ModelSpec {
        let input = |input: &str, second: bool| {
            let of_input = |f: &usize| self.features[*f].second_input == second;
            let features = (0..self.features.len()).filter(of_input);
            InputSpec::vectors(input, features.flat_map(|f| self.vectors(f)).collect())
        };
        let dense = InputSpec::dense("dense");
        let inputs =
            [(self.dense > 0).then_some(dense), Some(input("a", false)), Some(input("b", true))];
        let inputs =
            inputs.into_iter().flatten().filter(|i| i.dense || !i.features.is_empty()).collect();
        let feature = |(f, plan): (usize, &FeaturePlan)| FeatureSpec {
            tables: plan.tables().map(|t| format!("t{t}")).collect(),
            pooling: plan.pooling,
            weights: plan.weighted,
            shared: plan.shared,
            ..FeatureSpec::sum(&format!("f{f}"), "", plan.hotness_max)
        };
        ModelSpec {
            format: 1,
            name: self.name.clone(),
            sequence: self.sequence,
            dense_features: (0..self.dense).map(|d| format!("d{d}").into()).collect(),
            network: NetworkSpec {
                onnx: Some("dense.onnx".into()),
                hugectr: None,
                table_major: false,
                output: OutputsSpec::One("out".to_owned()),
                activation: Some(Activation::None),
                inputs,
            },
            tables: self.tables.iter().enumerate().map(table_spec).collect(),
            features: self.features.iter().enumerate().map(feature).collect(),
            probe: Some(ProbeSpec { samples: "probe.jsonl".into() }),
        }
    }

    /// Returns the names of the vectors of feature `f`.
    fn vectors(&self, f: usize) -> Vec<String> {
        match self.features[f].more_tables.as_slice() {
            [] => vec![format!("f{f}")],
            _ => self.features[f].tables().map(|t| format!("f{f}@t{t}")).collect(),
        }
    }

    /// Returns the contents of `model.toml` with more inputs: the vectors of all features once
    /// more, in the other order, and the lengths and the masks of their bags.
    pub fn spec_with_bag_inputs(&self) -> ModelSpec {
        let mut spec = self.spec();
        let names = || spec.features.iter().map(|f| f.name.clone());
        let all: Vec<String> = (0..self.features.len()).flat_map(|f| self.vectors(f)).collect();
        let again = InputSpec::vectors("again", all.into_iter().rev().collect());
        let input = |name: &str| InputSpec { name: name.to_owned(), ..InputSpec::default() };
        let lengths = InputSpec { lengths: names().collect(), ..input("lengths") };
        let masks = InputSpec { masks: names().collect(), ..input("masks") };
        spec.network.inputs.insert(0, lengths);
        spec.network.inputs.extend([masks, again]);
        spec
    }

    /// Packs the model into a folder of its own.
    pub fn pack(&self) -> Packed {
        self.pack_with(onnx::concat)
    }

    /// Packs the model with the network that `network` makes of the inputs' names and widths and of
    /// the output's name.
    pub fn pack_with(&self, network: impl Fn(&[(String, usize)], &str) -> Vec<u8>) -> Packed {
        self.pack_spec(&self.spec(), network)
    }

    /// Packs the model as `spec` describes it, a variant of the plan's own.
    pub fn pack_spec(
        &self,
        spec: &ModelSpec,
        network: impl Fn(&[(String, usize)], &str) -> Vec<u8>,
    ) -> Packed {
        let folder = tempfile::tempdir().unwrap();
        let rows: Vec<TableRows> = (0..self.tables.len()).map(|t| self.rows(t)).collect();
        let widths: Vec<(String, usize)> =
            spec.network.inputs.iter().map(|i| (i.name.clone(), self.input_width(i))).collect();
        std::fs::write(folder.path().join("dense.onnx"), network(&widths, "out")).unwrap();
        std::fs::write(folder.path().join("probe.jsonl"), "").unwrap();
        let sources: Vec<Box<dyn RowSource>> =
            rows.iter().map(|r| Box::new(r.clone()) as Box<dyn RowSource>).collect();
        let bundle = folder.path().join("model.bundle");
        let job = PackJob::new(spec.clone(), folder.path(), Overrides::default());
        let packed = job.pack_rows(&sources, None, &bundle, &mut |_, _| {}).unwrap();
        Packed { bundle, schema: packed.schema, rows, folder }
    }

    fn input_width(&self, input: &InputSpec) -> usize {
        let feature = |name: &str| &self.features[name[1..].parse::<usize>().unwrap()];
        let width = |vector: &String| {
            let (name, table) = vector.split_once("@t").unwrap_or((vector, ""));
            let feature = feature(name);
            let rows =
                if feature.pooling == Pooling::None { feature.hotness_max as usize } else { 1 };
            rows * self.tables[table.parse().unwrap_or(feature.table)].dim
        };
        let vectors: usize = input.features.iter().map(width).sum();
        let masks: usize = input.masks.iter().map(|f| feature(f).hotness_max as usize).sum();
        vectors + masks + input.lengths.len() + if input.dense { self.dense } else { 0 }
    }
}

fn table_spec((t, plan): (usize, &TablePlan)) -> TableSpec {
    let far = |column: usize| 1000.0 + 100.0 * t as f32 + column as f32;
    let TablePlan { keys, dim, codec, placement, miss, .. } = *plan;
    let default = match plan.default_zeros {
        true => DefaultRow::Zeros,
        false => DefaultRow::Values((0..dim).map(far).collect()),
    };
    TableSpec { placement, miss, default, ..cached_table(&format!("t{t}"), keys, dim, codec) }
}

/// Returns the spec of a cached table that waits for its misses, with a default row of zeros. A
/// test gives the rows.
pub fn cached_table(name: &str, keys: KeySpace, dim: usize, codec: CodecChoice) -> TableSpec {
    TableSpec {
        name: name.to_owned(),
        dim,
        keys,
        codec,
        placement: Placement::Cached,
        miss: MissPolicy::Wait,
        default: DefaultRow::Zeros,
        source: Source::Npy { path: "in-memory".into(), keys: None, counts: None },
    }
}

/// Returns distinct keys, with the extremes among them.
fn sparse_keys(n: u64, random: &mut Random) -> Vec<u64> {
    let mut keys: Vec<u64> = vec![0, u64::MAX, 1 << 63];
    keys.truncate(n as usize);
    let mut known: HashSet<u64> = keys.iter().copied().collect();
    while (keys.len() as u64) < n {
        let key = if random.one_in(4) { random.below(1 << 40) } else { random.bits() };
        if known.insert(key) {
            keys.push(key);
        }
    }
    keys
}

/// Returns a row of values of one magnitude. Some rows are constant, some values are zeros of
/// either sign.
fn random_row(dim: usize, scale: f32, random: &mut Random) -> Vec<f32> {
    let constant = random.one_in(12).then(|| scale * random.signed());
    let value = |random: &mut Random| match random.below(16) {
        0 => 0.0,
        1 => -0.0,
        _ => scale * random.signed(),
    };
    (0..dim).map(|_| constant.unwrap_or_else(|| value(random))).collect()
}

/// A packed model.
pub struct Packed {
    /// The bundle file.
    pub bundle: PathBuf,
    /// The schema as packed.
    pub schema: Schema,
    /// The rows of each table.
    pub rows: Vec<TableRows>,
    folder: TempDir,
}

impl Packed {
    /// Returns the folder of the bundle, which is removed when this is dropped.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Installs the bundle into a flash directory beside it and returns that directory.
    pub fn install(&self) -> PathBuf {
        let flash = self.folder.path().join("flash");
        install(&flash, &self.bundle);
        flash
    }
}

/// Installs the bundle at `bundle` into the directory `flash`.
pub fn install(flash: &Path, bundle: &Path) -> Flash {
    install_on(&disk::system(), flash, bundle)
}

/// Installs the bundle at `bundle` into the directory `flash` of `disk`.
pub fn install_on(disk: &Arc<dyn Disk>, flash: &Path, bundle: &Path) -> Flash {
    Flash::install(disk, flash, &mut BundleReader::open(bundle).unwrap(), |_| {}).unwrap()
}

/// Returns the smallest budget for requests of `batch_max` samples: the shortest miss list that
/// holds a bag, and little more than one set of cache for each row width.
pub fn tiny_budget(schema: &Schema, batch_max: u32) -> Budget {
    let misses_max = schema.features.iter().map(|f| f.hotness_max).max().unwrap();
    Budget { cache_bytes_max: 256, batch_max, misses_max, ..Budget::default() }
}

/// Opens the live generation of the flash directory `flash`.
///
/// # Errors
/// Those of `Flash::open` and `Model::from_flash`.
pub fn open_model(flash: &Path, budget: Budget) -> Result<Model, OpenError> {
    Model::from_flash(&Flash::open(&disk::system(), flash)?, budget)
}

/// Opens the model with the smallest cache that has a set for each row width, found by doubling the
/// cache of `budget`.
pub fn open_with_least_cache(flash: &Path, mut budget: Budget) -> Arc<Model> {
    loop {
        match open_model(flash, budget) {
            Ok(model) => return Arc::new(model),
            Err(OpenError::Budget { field: "cache_bytes_max", .. })
                if budget.cache_bytes_max < 1 << 30 =>
            {
                budget.cache_bytes_max *= 2;
            }
            Err(e) => panic!("{e}"),
        }
    }
}

/// Makes a batch of `samples` for `model`.
pub fn batch_of(model: &Model, samples: &[Sample]) -> Batch {
    batch_for(model.schema(), model.budget().batch_max as usize, samples)
}

/// Makes a batch of `samples` with room for `capacity`.
pub fn batch_for(schema: &Schema, capacity: usize, samples: &[Sample]) -> Batch {
    let mut batch = Batch::new(schema, capacity);
    samples.iter().for_each(|s| batch.push(schema, s).unwrap());
    batch
}

/// A model of the repository, packed and installed into its own flash directory.
pub struct Installed {
    /// The flash directory.
    pub flash: PathBuf,
    /// The schema as packed.
    pub schema: Schema,
    _folder: TempDir,
}

/// Packs and installs the model that `spec` describes, a path from the root of the repository.
pub fn install_spec(
    spec: &str,
    codec: Option<CodecChoice>,
    placement: Option<Placement>,
) -> Installed {
    let folder = tempfile::tempdir().unwrap();
    let (bundle, flash) = (folder.path().join("model.bundle"), folder.path().join("flash"));
    let overrides = Overrides { codec, placement, ..Overrides::default() };
    let job = PackJob::read(&repository(spec), overrides).unwrap();
    let packed = job.pack(None, &bundle, &mut |_, _| {}).unwrap();
    install(&flash, &bundle);
    Installed { flash, schema: packed.schema, _folder: folder }
}

/// Installs the model of `tests/data/families/FAMILY` without its probe set. Nothing then chooses
/// its weights: the network stays f32, and a GPU's scores are the CPU's to the bit.
pub fn install_unprobed(
    family: &str,
    codec: CodecChoice,
    placement: Option<Placement>,
) -> Installed {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(repository(&format!("tests/data/families/{family}"))).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let path = folder.path().join("model.toml");
    let spec = std::fs::read_to_string(&path).unwrap();
    let (before, probe) = spec.split_once("[probe]").unwrap();
    assert!(!probe.contains("\n["), "the probe set is described last");
    std::fs::write(&path, before).unwrap();
    install_spec(path.to_str().unwrap(), Some(codec), placement)
}

/// Returns a path in the repository. On a machine other than the one that built this,
/// HATCHBACK_REPOSITORY is the root of the repository.
pub fn repository(path: &str) -> PathBuf {
    let here = || Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    std::env::var_os("HATCHBACK_REPOSITORY").map_or_else(here, PathBuf::from).join(path)
}

/// Scores `samples` on `worker` in batches of `size`. Returns all scores and the sum of the
/// statuses.
pub fn score_all(worker: &mut Worker, samples: &[Sample], size: usize) -> (Vec<f32>, LookupStatus) {
    let (mut all, mut status) = (Vec::new(), LookupStatus::default());
    for samples in samples.chunks(size) {
        let batch = batch_of(&Arc::clone(worker.model()), samples);
        let scores = worker.score(&batch, None).unwrap();
        all.extend_from_slice(scores.values);
        status.add(&scores.status());
    }
    (all, status)
}
