//! The keys of a synthetic load: seeded distributions over a model's key spaces, and batches drawn
//! from them. Never scores; runs outside measured time.
//!
//! A distribution draws popularity ranks. [`Scatter`] maps each rank to a position in the table by
//! a fixed bijection, so that hot keys are not neighbours and share pages no more often than other
//! keys. A position is the key itself in an index table. In a sparse table it is the position in
//! key-hash order, the order of the segment. The bijection depends only on the number and the rows
//! of the table: every seed has the same hot keys.

use crate::pack::read_samples;
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use hatchback::flash::Flash;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, Schema};
use hatchback::{mix, unmix};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rand_distr::StandardNormal;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

/// Default exponent of a power law: that of NVIDIA's synthetic models.
pub const ALPHA: f64 = 1.05;

/// The distribution of lookups over the keys of a table.
#[derive(Clone, Debug, PartialEq)]
pub enum Distribution {
    /// Every key has the same probability.
    Uniform,
    /// Rank `k` has a probability of about `(k + 1)^-alpha`: the generator of NVIDIA's synthetic
    /// models.
    PowerLaw {
        /// The exponent.
        alpha: f64,
    },
    /// A share of the lookups goes to a share of the keys. Both parts are uniform.
    HotKey {
        /// Share of the lookups that goes to the hot keys, `0..=1`.
        lookups: f64,
        /// Share of the keys that are hot, `0..1`.
        keys: f64,
    },
    /// Keys as frequent as in a file of samples, one line of JSON each. A feature without keys in
    /// the file gets empty bags.
    Histogram(PathBuf),
}

/// Text that is not a distribution.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}`: {problem}")]
pub struct ParseError {
    text: String,
    problem: &'static str,
}

impl FromStr for Distribution {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let refuse = |problem| ParseError { text: text.to_owned(), problem };
        let (name, rest) =
            text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
        match (name, rest) {
            ("uniform", None) => Ok(Self::Uniform),
            ("powerlaw", None) => Ok(Self::PowerLaw { alpha: ALPHA }),
            ("powerlaw", Some(alpha)) => parse_alpha(alpha).map_err(refuse),
            ("hotkey", Some(shares)) => parse_shares(shares).map_err(refuse),
            ("hotkey", None) => {
                Err(refuse("is written hotkey:LOOKUPS/KEYS, both in per cent, such as hotkey:90/1"))
            }
            ("histogram", Some(file)) if !file.is_empty() => Ok(Self::Histogram(file.into())),
            ("histogram", _) => Err(refuse("is written histogram:FILE")),
            _ => Err(refuse(
                "is not uniform, powerlaw[:ALPHA], hotkey:LOOKUPS/KEYS or histogram:FILE",
            )),
        }
    }
}

fn parse_alpha(text: &str) -> Result<Distribution, &'static str> {
    match text.parse::<f64>() {
        Ok(alpha) if alpha > 0.0 && alpha <= 10.0 => Ok(Distribution::PowerLaw { alpha }),
        _ => Err("ALPHA is not a number above 0, at most 10"),
    }
}

fn parse_shares(text: &str) -> Result<Distribution, &'static str> {
    let percent =
        |s: &str| s.parse::<f64>().ok().filter(|p| *p > 0.0 && *p <= 100.0).map(|p| p / 100.0);
    match text.split_once('/').map(|(lookups, keys)| (percent(lookups), percent(keys))) {
        Some((Some(lookups), Some(keys))) if keys < 1.0 => {
            Ok(Distribution::HotKey { lookups, keys })
        }
        _ => {
            Err("LOOKUPS/KEYS are not two shares in per cent, above 0, at most 100, KEYS below 100")
        }
    }
}

impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Six digits hide the rounding error of the division by 100.
        let percent = |share: f64| (share * 1e8).round() / 1e6;
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::PowerLaw { alpha } => write!(f, "powerlaw:{alpha}"),
            Self::HotKey { lookups, keys } => {
                write!(f, "hotkey:{}/{}", percent(*lookups), percent(*keys))
            }
            Self::Histogram(file) => write!(f, "histogram:{}", file.display()),
        }
    }
}

/// Returns the share of the lookups that the `k` most popular of `rows` keys get under a power law.
pub fn powerlaw_share(alpha: f64, rows: u64, k: u64) -> f64 {
    let (b, all, upto) = (1.0 - alpha, (rows + 1) as f64, (k.min(rows) + 1) as f64);
    // `exp_m1` and `ln` keep the digits that the powers themselves lose near alpha 1.
    if b == 0.0 { upto.ln() / all.ln() } else { (b * upto.ln()).exp_m1() / (b * all.ln()).exp_m1() }
}

/// Returns the rank `y - 1` of a uniform `r`: `y = (r (kmax^b - kmin^b) + kmin^b)^(1/b)` with `b =
/// 1 - alpha`, kmin 1 and kmax rows + 1.
fn powerlaw_rank(alpha: f64, rows: u64, r: f64) -> u64 {
    let (b, all) = (1.0 - alpha, ((rows + 1) as f64).ln());
    let y = if b == 0.0 { (r * all).exp() } else { ((r * (b * all).exp_m1()).ln_1p() / b).exp() };
    (y as u64).clamp(1, rows) - 1
}

impl Distribution {
    /// Draws a popularity rank out of `0..rows`. A histogram has no ranks and draws uniformly.
    fn rank(&self, rows: u64, rng: &mut StdRng) -> u64 {
        match *self {
            Self::PowerLaw { alpha } => powerlaw_rank(alpha, rows, rng.random()),
            Self::HotKey { lookups, keys } => {
                let hot = ((rows as f64 * keys).ceil() as u64).clamp(1, rows);
                let in_hot = hot == rows || rng.random_bool(lookups);
                if in_hot { rng.random_range(0..hot) } else { rng.random_range(hot..rows) }
            }
            Self::Uniform | Self::Histogram(_) => rng.random_range(0..rows),
        }
    }
}

/// A fixed bijection of `0..rows`: four Feistel rounds over the next even number of bits, repeated
/// until the result is in range (cycle walking).
#[derive(Clone, Copy, Debug)]
pub struct Scatter {
    rows: u64,
    half_bits: u32,
    rounds: [u64; 4],
}

impl Scatter {
    /// Returns the bijection of table `number` with `rows` rows.
    pub fn of_table(number: usize, rows: u64) -> Self {
        let bits = 64 - rows.saturating_sub(1).leading_zeros();
        let rounds = [1, 2, 3, 4].map(|round| mix((number as u64) << 8 | round));
        Self { rows, half_bits: bits.div_ceil(2).max(1), rounds }
    }

    /// Returns the position of popularity rank `rank`, which is below `rows`.
    pub fn position(&self, rank: u64) -> u64 {
        let mut at = self.step(rank);
        while at >= self.rows {
            at = self.step(at);
        }
        at
    }

    fn step(&self, v: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let halves = (v >> self.half_bits, v & mask);
        let (left, right) = self
            .rounds
            .iter()
            .fold(halves, |(left, right), key| (right, left ^ (mix(right ^ key) & mask)));
        left << self.half_bits | right
    }
}

/// The number of keys in a bag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum BagSizes {
    /// As many as the feature allows
    #[default]
    Full,
    /// From 1 to as many as the feature allows
    Random,
}

/// The keys from which one feature draws.
#[derive(Clone)]
enum KeySource {
    Index(Scatter),
    Sparse(Scatter, Arc<[u64]>),
    Observed(Arc<Observed>),
}

/// The keys of a feature in a file of samples.
#[derive(Default)]
struct Observed {
    keys: Vec<u64>,
    /// For each key, the occurrences of all keys up to it.
    up_to: Vec<u64>,
}

impl Observed {
    fn of_feature(samples: &[Sample], feature: usize) -> Self {
        let mut counts = BTreeMap::<u64, u64>::new();
        samples
            .iter()
            .flat_map(|s| &s.sparse[feature])
            .for_each(|&k| *counts.entry(k).or_default() += 1);
        let mut observed = Self::default();
        for (key, count) in counts {
            observed.keys.push(key);
            observed.up_to.push(observed.up_to.last().unwrap_or(&0) + count);
        }
        observed
    }

    fn draw(&self, rng: &mut StdRng) -> Option<u64> {
        let at = rng.random_range(0..*self.up_to.last()?);
        self.keys.get(self.up_to.partition_point(|&n| n <= at)).copied()
    }
}

impl KeySource {
    fn draw(&self, distribution: &Distribution, rng: &mut StdRng) -> Option<u64> {
        match self {
            Self::Index(scatter) => Some(scatter.position(distribution.rank(scatter.rows, rng))),
            Self::Sparse(scatter, keys) => {
                let position = scatter.position(distribution.rank(scatter.rows, rng));
                keys.get(usize::try_from(position).ok()?).copied()
            }
            Self::Observed(observed) => observed.draw(rng),
        }
    }
}

/// An endless sequence of random samples for one model.
pub struct Workload {
    schema: Arc<Schema>,
    distribution: Distribution,
    sizes: BagSizes,
    features: Vec<KeySource>,
    rng: StdRng,
    sample: Sample,
}

impl Workload {
    /// Returns a load on the live generation of `flash`. Reads the keys of sparse tables from their
    /// segments.
    ///
    /// # Errors
    /// A segment or the sample file cannot be read.
    pub fn new(
        flash: &Flash,
        distribution: &Distribution,
        sizes: BagSizes,
        seed: u64,
    ) -> Result<Self> {
        let schema = Arc::new(flash.manifest().schema.clone());
        let features = match distribution {
            Distribution::Histogram(file) => observed_keys(&schema, &read_samples(file, &schema)?),
            _ => table_keys(flash, &schema)?,
        };
        let (sparse, weights) = (vec![Vec::new(); features.len()], vec![vec![]; features.len()]);
        let sample = Sample { sparse, weights, ..Sample::default() };
        let (distribution, rng) = (distribution.clone(), StdRng::seed_from_u64(seed));
        Ok(Self { schema, distribution, sizes, features, rng, sample })
    }

    /// Returns this load with another seed.
    pub fn with_seed(&self, seed: u64) -> Self {
        Self {
            schema: Arc::clone(&self.schema),
            distribution: self.distribution.clone(),
            sizes: self.sizes,
            features: self.features.clone(),
            rng: StdRng::seed_from_u64(seed),
            sample: self.sample.clone(),
        }
    }

    /// Returns the distribution of the keys.
    pub fn distribution(&self) -> &Distribution {
        &self.distribution
    }

    /// Draws the next sample: dense values from N(0, 1), keys from the distribution, each with the
    /// weight 1. Retired features have empty bags.
    pub fn sample(&mut self) -> &Sample {
        let rng = &mut self.rng;
        let dense = self
            .schema
            .dense_features
            .iter()
            .map(|_| rng.sample::<f32, _>(StandardNormal))
            .collect();
        self.sample.dense = dense;
        for (f, bag) in self.sample.sparse.iter_mut().enumerate() {
            let feature = &self.schema.features[f];
            let most = feature.hotness_max;
            let size = if self.sizes == BagSizes::Full { most } else { rng.random_range(1..=most) };
            bag.clear();
            bag.extend((0..size).filter_map(|_| self.features[f].draw(&self.distribution, rng)));
            self.sample.weights[f].resize(if feature.weighted { bag.len() } else { 0 }, 1.0);
        }
        &self.sample
    }

    /// Draws the `n` samples of a request, which have the shared features of its first sample.
    pub fn request(&mut self, n: usize) -> Vec<Sample> {
        let schema = Arc::clone(&self.schema);
        let mut samples: Vec<Sample> = (0..n).map(|_| self.sample().clone()).collect();
        let Some((first, others)) = samples.split_first_mut() else { return samples };
        for sample in others {
            for f in (0..schema.features.len()).filter(|f| schema.features[*f].shared) {
                sample.sparse[f].clone_from(&first.sparse[f]);
                sample.weights[f].clone_from(&first.weights[f]);
            }
            for d in (0..sample.dense.len()).filter(|d| schema.dense_features[*d].shared) {
                sample.dense[d] = first.dense[d];
            }
        }
        samples
    }

    /// Replaces the content of `batch` by a request of `n` samples.
    ///
    /// # Errors
    /// The batch has too little room.
    pub fn fill(&mut self, batch: &mut Batch, n: usize) -> Result<()> {
        batch.clear();
        let schema = Arc::clone(&self.schema);
        Ok(batch.push_request(&schema, &self.request(n))?)
    }
}

fn observed_keys(schema: &Schema, samples: &[Sample]) -> Vec<KeySource> {
    (0..schema.features.len())
        .map(|f| KeySource::Observed(Arc::new(Observed::of_feature(samples, f))))
        .collect()
}

/// Returns the keys of each feature's smallest table. Features of one table share its keys. A
/// retired feature has none.
fn table_keys(flash: &Flash, schema: &Schema) -> Result<Vec<KeySource>> {
    let mut tables = BTreeMap::new();
    let mut keys = |f: usize| {
        if schema.features[f].retired {
            return Ok(KeySource::Observed(Arc::default()));
        }
        let numbers = schema.lookups_of(f).map(|lookup| usize::from(lookup.table));
        let smallest = numbers.min_by_key(|&number| schema.tables[number].rows);
        let number = smallest.context("a feature without a table")?;
        if let Entry::Vacant(table) = tables.entry(number) {
            table.insert(keys_of(flash, schema, number)?);
        }
        tables.get(&number).cloned().context("a table without keys")
    };
    (0..schema.features.len()).map(&mut keys).collect()
}

fn keys_of(flash: &Flash, schema: &Schema, number: usize) -> Result<KeySource> {
    let table = &schema.tables[number];
    if table.keys == KeySpace::Index {
        return Ok(KeySource::Index(Scatter::of_table(number, table.rows)));
    }
    let (mut keys, mut damaged) = (Vec::with_capacity(usize::try_from(table.rows)?), None);
    flash.table(number)?.scan(|hash, _| keys.push(unmix(hash)), |e| damaged = Some(e))?;
    if let Some(e) = damaged {
        return Err(e.into());
    }
    ensure!(!keys.is_empty(), "table `{}` has no rows", table.name);
    Ok(KeySource::Sparse(Scatter::of_table(number, keys.len() as u64), keys.into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DRAWS: usize = 200_000;

    /// Share of the draws below each of the given ranks.
    fn shares(distribution: &str, rows: u64, below: &[u64]) -> Vec<f64> {
        let distribution: Distribution = distribution.parse().unwrap();
        let mut rng = StdRng::seed_from_u64(7);
        let ranks: Vec<u64> = (0..DRAWS).map(|_| distribution.rank(rows, &mut rng)).collect();
        assert!(ranks.iter().all(|&r| r < rows));
        let share = |k| ranks.iter().filter(|&&r| r < k).count() as f64 / DRAWS as f64;
        below.iter().map(|&k| share(k)).collect()
    }

    fn assert_near(found: &[f64], expected: &[f64]) {
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 0.005, "{found} is not near {expected}");
        }
    }

    #[test]
    fn draws_follow_the_stated_shares() {
        assert_near(&shares("uniform", 1000, &[100, 500]), &[0.1, 0.5]);
        assert_near(&shares("hotkey:90/1", 100_000, &[500, 1000, 50_500]), &[0.45, 0.9, 0.95]);
        assert_near(&shares("hotkey:50/10", 1, &[1]), &[1.0]);
        for (text, alpha) in [
            ("powerlaw", 1.05),
            ("powerlaw:1", 1.0),
            ("powerlaw:1.45", 1.45),
            ("powerlaw:0.5", 0.5),
        ] {
            let ranks = [1, 10, 1000, 100_000];
            let expected = ranks.map(|k| powerlaw_share(alpha, 1_000_000, k));
            assert_near(&shares(text, 1_000_000, &ranks), &expected);
        }
        // (1 - 11^-0.05) / (1 - 1000001^-0.05), the generator's formula solved for r, by another
        // program.
        assert!((powerlaw_share(1.05, 1_000_000, 10) - 0.226510).abs() < 1e-6);
        assert_eq!(powerlaw_share(1.05, 1000, 1000), 1.0);
    }

    proptest! {
        #[test]
        fn scatter_is_a_bijection(rows in 1u64..3000, number in 0usize..100) {
            let scatter = Scatter::of_table(number, rows);
            let mut places: Vec<u64> = (0..rows).map(|r| scatter.position(r)).collect();
            places.sort_unstable();
            prop_assert!(places.into_iter().eq(0..rows));
        }

        #[test]
        fn distributions_print_as_they_parse(
            lookups in 1u32..=100,
            keys in 1u32..100,
            alpha in 1u32..500,
        ) {
            let alpha = f64::from(alpha) / 100.0;
            for text in [format!("hotkey:{lookups}/{keys}"), format!("powerlaw:{alpha}")] {
                prop_assert_eq!(text.parse::<Distribution>().unwrap().to_string(), text);
            }
        }
    }

    #[test]
    fn hot_places_are_not_neighbours() {
        let scatter = Scatter::of_table(3, 1_000_000);
        let mut hot: Vec<u64> = (0..1000).map(|r| scatter.position(r)).collect();
        hot.sort_unstable();
        // A thousand random places out of a million: about one pair in a thousand is adjacent.
        assert!(hot.windows(2).filter(|w| w[1] - w[0] == 1).count() < 10);
        assert_ne!(Scatter::of_table(4, 1_000_000).position(0), scatter.position(0));
    }

    #[test]
    fn mistakes_are_named() {
        let error = |text: &str| text.parse::<Distribution>().unwrap_err().to_string();
        for (text, named) in [
            ("zipf", "is not uniform"),
            ("uniform:3", "is not uniform"),
            ("powerlaw:x", "ALPHA"),
            ("powerlaw:-1", "ALPHA"),
            ("powerlaw:nan", "ALPHA"),
            ("hotkey", "hotkey:90/1"),
            ("hotkey:90", "LOOKUPS/KEYS"),
            ("hotkey:90/0", "LOOKUPS/KEYS"),
            ("hotkey:101/1", "LOOKUPS/KEYS"),
            ("histogram:", "histogram:FILE"),
        ] {
            assert!(error(text).contains(named) && error(text).contains(text), "{}", error(text));
        }
    }

    #[test]
    fn observed_keys_come_as_often_as_observed() {
        let sample =
            |keys: &[u64]| Sample { sparse: vec![keys.to_vec(), vec![]], ..Sample::default() };
        let samples = [sample(&[5, 5, 5]), sample(&[9]), sample(&[])];
        let observed = Observed::of_feature(&samples, 0);
        let mut rng = StdRng::seed_from_u64(1);
        let drawn: Vec<u64> = (0..10_000).filter_map(|_| observed.draw(&mut rng)).collect();
        let fives = drawn.iter().filter(|&&k| k == 5).count() as f64 / 10_000.0;
        assert!((fives - 0.75).abs() < 0.02 && drawn.iter().all(|k| [5, 9].contains(k)));
        assert_eq!(Observed::of_feature(&samples, 1).draw(&mut rng), None);
    }
}
