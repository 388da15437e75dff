//! A model in the shape of MLPerf's Criteo model with random rows, for measurements. Its scores are
//! meaningless: never a source of quality figures.
//!
//! The 26 cardinalities `c` are those of MLPerf DLRM. A table has `min(c, max(c * rows_max / 40 M,
//! 40 k))` rows, and at most `rows_max`: small tables keep their size, large ones their
//! proportions. For the 18 tables under 100 k rows, `pack` and the budget choose codec and
//! placement. The other eight are `u8` and `cached`; three of these have scattered u64 keys. Rows
//! have dim 32. Five features are multi-hot, with MLPerf's hotness cut to 3.

use crate::import::{RowSource, Source, TakeBlock};
use crate::pack::spec::{
    CodecChoice, DefaultRow, DenseSpec, FeatureSpec, InputSpec, ModelSpec, NetworkSpec,
    OutputsSpec, TableSpec,
};
use crate::pack::{Overrides, PackJob, Packed};
use crate::report::temporary::TemporaryFolder;
use crate::workload::key_distributions::{ALPHA, Scatter, powerlaw_share};
use anyhow::{Context, Result};
use hatchback::flash::Flash;
use hatchback::schema::{KeySpace, MissPolicy, Placement};
use hatchback::{Activation, mix};
use std::path::{Path, PathBuf};

/// Rows of the tables in MLPerf's model.
pub const CARDINALITIES: [u64; 26] = [
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282,
    10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108,
    36,
];
/// Values in a row.
pub const DIM: usize = 32;
/// Criteo's dense features.
pub const DENSE: usize = 13;
/// Features with more than one key in a bag, and their number of keys: MLPerf's, cut to 3.
const MULTI_HOT: [(usize, u32); 5] = [(0, 3), (3, 2), (9, 3), (13, 3), (20, 3)];
/// Tables with scattered keys.
const SPARSE: [usize; 3] = [9, 20, 21];
/// Features of the driver in [`pack_driver`], the first ones; the others are a candidate's.
const DRIVER_FEATURES: usize = 16;
/// The driver's feature with a history, and its keys.
const HISTORY: (usize, u32) = (9, 50);
/// A table of this cardinality or more is `cached`.
const CACHED_ROWS: u64 = 100_000;
/// Rows of a scaled table at least.
const LARGE_ROWS_MIN: u64 = 40_000;
/// Lookups in training for each row, on average, in the popularity counts.
const LOOKUPS_PER_ROW: f64 = 16.0;
/// Rows of a block.
const BLOCK_ROWS: u64 = 1024;
/// The dense network: a DLRM over 13 dense features and 26 vectors of 32 values.
pub const CRITEO_ONNX: &[u8] = include_bytes!("../../demo/criteo/dense.onnx");

/// Returns the first generation of the model, with tables of up to `rows_max` rows, as `pack` takes
/// it. Its base folder must have `dense.onnx`.
pub fn criteo(rows_max: u64) -> (ModelSpec, Vec<Box<dyn RowSource>>) {
    criteo_at(rows_max, SyntheticGeneration::FIRST)
}

/// A generation of the model. From one generation to the next some rows get other values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyntheticGeneration {
    /// Sequence of the generation, from 1.
    pub sequence: u64,
    /// One row in this many changes from one generation to the next.
    pub changed_one_in: u64,
    /// Miss policies of the tables with even and with odd numbers.
    pub misses: [MissPolicy; 2],
}

impl SyntheticGeneration {
    /// The first generation.
    pub const FIRST: Self = Self { sequence: 1, changed_one_in: 1, misses: [MissPolicy::Wait; 2] };
}

/// Returns the spec of a DLRM with Criteo's dense features: `inputs` names the network's inputs of
/// dense values and of rows. Each table has a feature of one key, with its name.
pub fn dlrm_spec(
    name: &str,
    sequence: u64,
    inputs: [&str; 2],
    tables: Vec<TableSpec>,
) -> ModelSpec {
    let names: Vec<String> = tables.iter().map(|table| table.name.clone()).collect();
    ModelSpec {
        format: 1,
        name: name.to_owned(),
        sequence,
        dense_features: (0..DENSE).map(|n| format!("int_{n}").into()).collect(),
        network: NetworkSpec {
            onnx: Some(PathBuf::from("dense.onnx")),
            hugectr: None,
            table_major: false,
            output: OutputsSpec::One("logit".to_owned()),
            activation: Some(Activation::Sigmoid),
            inputs: vec![InputSpec::dense(inputs[0]), InputSpec::vectors(inputs[1], names.clone())],
        },
        features: names.iter().map(|name| FeatureSpec::sum(name, name, 1)).collect(),
        tables,
        probe: None,
    }
}

fn criteo_at(rows_max: u64, at: SyntheticGeneration) -> (ModelSpec, Vec<Box<dyn RowSource>>) {
    let tables: Vec<Synthetic> =
        (0..CARDINALITIES.len()).map(|n| Synthetic::new(n, rows_max, at)).collect();
    let specs = tables.iter().enumerate().map(|(n, table)| table.spec(&format!("cat_{n}")));
    let mut spec = dlrm_spec("synthetic-criteo", at.sequence, ["dense", "emb"], specs.collect());
    let features = spec.tables.iter().enumerate().map(|(n, table)| feature(n, &table.name));
    spec.features = features.collect();
    (spec, tables.into_iter().map(|t| Box::new(t) as Box<dyn RowSource>).collect())
}

/// Packs the first generation into the bundle `out`. `progress` is as for `pack`.
///
/// # Errors
/// The bundle cannot be written.
pub fn pack_criteo(
    rows_max: u64,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Packed> {
    pack_criteo_at(rows_max, SyntheticGeneration::FIRST, None, out, progress)
}

/// Packs the first generation as a model that ranks candidates for one driver: the samples of a
/// request share the dense features and the driver's features, of which one is a history.
///
/// # Errors
/// The bundle cannot be written.
pub fn pack_driver(
    rows_max: u64,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Packed> {
    let (mut spec, sources) = criteo(rows_max);
    for dense in &mut spec.dense_features {
        let name = dense.feature().name;
        *dense = DenseSpec::Table { name, missing: None, shared: true, retired: false };
    }
    spec.features[..DRIVER_FEATURES].iter_mut().for_each(|feature| feature.shared = true);
    spec.features[HISTORY.0].hotness_max = HISTORY.1;
    pack(spec, &sources, None, out, progress)
}

/// Packs generation `at` into the bundle `out`: with a `parent` as a delta, otherwise as a
/// snapshot.
///
/// # Errors
/// The bundle cannot be written, or `parent` cannot be read.
pub fn pack_criteo_at(
    rows_max: u64,
    at: SyntheticGeneration,
    parent: Option<&Flash>,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Packed> {
    let (spec, sources) = criteo_at(rows_max, at);
    pack(spec, &sources, parent, out, progress)
}

fn pack(
    spec: ModelSpec,
    sources: &[Box<dyn RowSource>],
    parent: Option<&Flash>,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Packed> {
    let base = TemporaryFolder::new()?;
    let path = base.path().join("dense.onnx");
    std::fs::write(&path, CRITEO_ONNX).with_context(|| path.display().to_string())?;
    let job = PackJob::new(spec, base.path(), Overrides::default());
    job.pack_rows(sources, parent, out, progress)
}

fn feature(number: usize, name: &str) -> FeatureSpec {
    let hotness_max =
        MULTI_HOT.iter().find(|(n, _)| *n == number).map_or(1, |(_, hotness)| *hotness);
    FeatureSpec::sum(name, name, hotness_max)
}

/// Returns the rows of a table of cardinality `c` in a model of up to `rows_max` rows a table.
fn scaled(c: u64, rows_max: u64) -> u64 {
    let share = (u128::from(c) * u128::from(rows_max) / 40_000_000) as u64;
    c.min(share.max(LARGE_ROWS_MIN)).min(rows_max.max(1))
}

/// Appends `n` values close to N(0, `deviation`) to `values`, each a sum of four random bytes. `n`
/// is even. Seeds closer than `n / 2` share values.
pub fn push_normals(seed: u64, n: usize, deviation: f32, values: &mut Vec<f32>) {
    /// Mean and deviation of the sum of four uniform bytes.
    const SUM: (f32, f32) = (510.0, 147.801);
    let scale = deviation / SUM.1;
    for i in 0..n as u64 / 2 {
        let bytes = mix(seed + i).to_le_bytes();
        let (low, high) = bytes.split_at(4);
        let sum = |four: &[u8]| f32::from(four.iter().map(|b| u16::from(*b)).sum::<u16>());
        values.extend([low, high].map(|four| (sum(four) - SUM.0) * scale));
    }
}

/// Returns the expected lookups in training of each row of table `number`, with the default power
/// law. `order` has the rows' positions in the order of the segment.
pub fn powerlaw_counts(number: usize, order: &[u64]) -> Vec<u64> {
    let rows = order.len() as u64;
    let scatter = Scatter::of_table(number, rows);
    let mut counts = vec![0; order.len()];
    let (all, mut before) = (LOOKUPS_PER_ROW * rows as f64, 0.0);
    for rank in 0..rows {
        let up_to = powerlaw_share(ALPHA, rows, rank + 1);
        counts[order[scatter.position(rank) as usize] as usize] =
            (all * (up_to - before)).round() as u64;
        before = up_to;
    }
    counts
}

/// The rows of one table, generated when they are read.
struct Synthetic {
    number: usize,
    rows: u64,
    sparse: bool,
    cached: bool,
    at: SyntheticGeneration,
}

impl Synthetic {
    fn new(number: usize, rows_max: u64, at: SyntheticGeneration) -> Self {
        let cardinality = CARDINALITIES[number];
        let rows = scaled(cardinality, rows_max);
        Self {
            number,
            rows,
            sparse: SPARSE.contains(&number),
            cached: cardinality >= CACHED_ROWS,
            at,
        }
    }

    fn spec(&self, name: &str) -> TableSpec {
        TableSpec {
            name: name.to_owned(),
            dim: DIM,
            keys: if self.sparse { KeySpace::Sparse } else { KeySpace::Index },
            codec: if self.cached { CodecChoice::U8 } else { CodecChoice::Auto },
            placement: if self.cached { Placement::Cached } else { Placement::Auto },
            miss: self.at.misses[self.number % 2],
            default: DefaultRow::Zeros,
            // `pack` reads the rows from a `RowSource` and never opens this file.
            source: Source::Npy { path: PathBuf::new(), keys: None, counts: None },
        }
    }

    /// Returns the key at `position`: the position itself, or a bijective mix of it.
    fn key(&self, position: u64) -> u64 {
        if self.sparse { mix(position ^ (self.number as u64 + 1) << 48) } else { position }
    }

    /// Returns the positions in the order of the segment, to which popularity refers.
    fn order(&self) -> Vec<u64> {
        let mut order: Vec<u64> = (0..self.rows).collect();
        if self.sparse {
            order.sort_by_cached_key(|&p| mix(self.key(p)));
        }
        order
    }

    /// Returns the number of generations, from the first, before the one in which the row last
    /// changed.
    fn version(&self, position: u64) -> u64 {
        let SyntheticGeneration { sequence, changed_one_in, .. } = self.at;
        let changed = |g: &u64| {
            mix(position << 20 ^ (self.number as u64) << 52 ^ g).is_multiple_of(changed_one_in)
        };
        (2..=sequence).rev().find(changed).unwrap_or(1) - 1
    }

    /// Appends the values of the row at `position`, close to N(0, 1/sqrt(dim)).
    fn push_row(&self, position: u64, values: &mut Vec<f32>) {
        let seed =
            (position << 16 | self.number as u64) * DIM as u64 + (self.version(position) << 48);
        push_normals(seed, DIM, 1.0 / (DIM as f32).sqrt(), values);
    }
}

impl RowSource for Synthetic {
    fn rows(&self) -> u64 {
        self.rows
    }

    fn has_keys(&self) -> bool {
        self.sparse
    }

    /// Returns the expected counts of a `Distribution::PowerLaw` with the default exponent, for the
    /// cached tables of the first generation. A delta would be much smaller than a list of all hot
    /// keys.
    fn counts(&self) -> Result<Option<Vec<u64>>> {
        if !self.cached || self.at.sequence > 1 {
            return Ok(None);
        }
        Ok(Some(powerlaw_counts(self.number, &self.order())))
    }

    fn each_block(&self, take: TakeBlock<'_>) -> Result<()> {
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for first in (0..self.rows).step_by(BLOCK_ROWS as usize) {
            keys.clear();
            values.clear();
            for position in first..self.rows.min(first + BLOCK_ROWS) {
                keys.push(self.key(position));
                self.push_row(position, &mut values);
            }
            take(&keys, &values)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::{install, worker};
    use crate::workload::key_distributions::{BagSizes, Distribution, Workload};
    use hatchback::model::Model;
    use hatchback::model::budget::Budget;
    use std::collections::HashSet;
    use std::sync::Arc;

    fn read(source: &dyn RowSource) -> (Vec<u64>, Vec<f32>) {
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        source
            .each_block(&mut |k, v| {
                keys.extend_from_slice(k);
                values.extend_from_slice(v);
                Ok(())
            })
            .unwrap();
        (keys, values)
    }

    #[test]
    fn cardinalities_scale_as_documented() {
        assert_eq!(CARDINALITIES.map(|c| scaled(c, 40_000_000)), CARDINALITIES);
        let rows = CARDINALITIES.map(|c| scaled(c, 400_000));
        assert_eq!(
            (rows[0], rows[1], rows[5], rows[10], rows[11]),
            (400_000, 39_060, 3, 40_000, 40_000)
        );
        assert!(CARDINALITIES.iter().all(|&c| scaled(c, 1000) == c.min(1000)));
        assert_eq!(CARDINALITIES.iter().filter(|c| **c < CACHED_ROWS).count(), 18);
    }

    #[test]
    fn rows_are_deterministic_and_normal() {
        let (_, sources) = criteo(5000);
        let (keys, values) = read(sources[0].as_ref());
        assert_eq!((keys.len(), values.len()), (5000, 5000 * DIM));
        assert_eq!(read(criteo(5000).1[0].as_ref()), (keys, values.clone()));
        assert_ne!(read(sources[19].as_ref()).1, values);
        let n = values.len() as f64;
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let variance = values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n;
        assert!(mean.abs() < 0.002, "{mean}");
        assert!((variance * DIM as f64 - 1.0).abs() < 0.02, "{variance}");
    }

    #[test]
    fn scattered_keys_are_distinct() {
        let (_, sources) = criteo(5000);
        for (number, source) in sources.iter().enumerate() {
            assert_eq!(source.has_keys(), SPARSE.contains(&number));
            let keys: HashSet<u64> = read(source.as_ref()).0.into_iter().collect();
            assert_eq!(keys.len() as u64, source.rows());
        }
    }

    #[test]
    fn counts_fall_with_the_rank() {
        let table = Synthetic::new(9, 5000, SyntheticGeneration::FIRST);
        let (counts, order) = (table.counts().unwrap().unwrap(), table.order());
        let scatter = Scatter::of_table(9, 5000);
        let by_rank: Vec<u64> =
            (0..5000).map(|r| counts[order[scatter.position(r) as usize] as usize]).collect();
        assert!(by_rank.is_sorted_by(|a, b| a >= b) && by_rank[0] > by_rank[100]);
        assert!(Synthetic::new(1, 5000, SyntheticGeneration::FIRST).counts().unwrap().is_none());
    }

    #[test]
    fn a_load_leaves_retired_features_empty_and_weighs_each_key() {
        let directory = tempfile::tempdir().unwrap();
        let bundle = directory.path().join("a.hbm");
        let (mut spec, sources) = criteo(1000);
        let name = "gone_dense".to_owned();
        let gone = DenseSpec::Table { name, missing: None, shared: false, retired: true };
        spec.dense_features.push(gone);
        spec.features.push(FeatureSpec { retired: true, ..FeatureSpec::sum("gone", "cat_0", 2) });
        spec.features[3].weights = true;
        pack(spec, &sources, None, &bundle, &mut |_, _| ()).unwrap();

        let flash = install(&bundle, &directory.path().join("flash")).unwrap();
        let model = Arc::new(Model::from_flash(&flash, Budget::default()).unwrap());
        let mut workload =
            Workload::new(&flash, &Distribution::Uniform, BagSizes::Random, 1).unwrap();
        let sample = workload.sample();
        assert!(sample.sparse[CARDINALITIES.len()].is_empty());
        assert_eq!(sample.weights[3], vec![1.0; sample.sparse[3].len()]);
        let (mut batch, mut worker) = (model.batch(), worker(&model));
        workload.fill(&mut batch, 4).unwrap();
        assert_eq!(worker.score(&batch, None).unwrap().values.len(), 4);
    }

    /// The hot keys of the bundle are the hot keys of the load: a preloaded cache has a far higher
    /// hit rate with a power law than with uniform keys. Every drawn key is in the model.
    #[test]
    fn hot_lists_meet_the_load() {
        let directory = tempfile::tempdir().unwrap();
        let bundle = directory.path().join("a.hbm");
        pack_criteo(4000, &bundle, &mut |_, _| ()).unwrap();
        let flash = install(&bundle, &directory.path().join("flash")).unwrap();
        let budget = Budget { cache_bytes_max: 200_000, ..Budget::default() };
        let hit_rate = |keys: &str| {
            let model = Arc::new(Model::from_flash(&flash, budget).unwrap());
            let distribution: Distribution = keys.parse().unwrap();
            let mut workload = Workload::new(&flash, &distribution, BagSizes::Full, 1).unwrap();
            let (mut batch, mut worker) = (model.batch(), worker(&model));
            workload.fill(&mut batch, 64).unwrap();
            let status = worker.score(&batch, None).unwrap().status();
            assert_eq!(u64::from(status.fresh), 64 * model.schema().lookups_max() as u64);
            worker.counters().hit_rate()
        };
        let (skewed, even) = (hit_rate("powerlaw:1.05"), hit_rate("uniform"));
        assert!(skewed > even + 0.2, "{skewed} {even}");
    }
}
