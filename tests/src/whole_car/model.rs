//! The model that the simulated fleet releases: its generations as bundles, and the row that each
//! generation has for each key. The network puts the pooled rows side by side, so every score shows
//! its rows bit for bit.

use crate::models::cached_table;
use crate::onnx;
use crate::random::Random;
use crate::rewrite::Parts;
use hatchback::Activation;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::schema::KeySpace;
use hatchback::schema::sample::Sample;
use hatchback::update::program::Program;
use hatchback_tools::import::{RowSource, TakeBlock};
use hatchback_tools::pack::spec::{
    CodecChoice, FeatureSpec, InputSpec, ModelSpec, NetworkSpec, OutputsSpec, ProbeSpec,
};
use hatchback_tools::pack::{Overrides, PackJob};
use hatchback_tools::serve::install;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The name of the model.
pub const LINEAGE: &str = "car";
/// Values in a row of each table.
pub const DIMS: [usize; 2] = [4, 6];
const KEYS: [KeySpace; 2] = [KeySpace::Index, KeySpace::Sparse];
/// Rows of each table in the first generation.
const ROWS: [u64; 2] = [250, 350];
/// One row in so many changes in each generation.
const CHANGED_ONE_IN: u64 = 6;
const PROBE_SAMPLES: usize = 4;
/// Generations with a third feature and its table, which are new in the first. Later ones have
/// retired the feature and removed the table.
const WITH_THIRD: std::ops::Range<u64> = 3..5;
/// Generations that are packed.
const GENERATIONS: usize = 6;

/// The rows of one table.
pub type Rows = BTreeMap<u64, Vec<f32>>;

/// A deliberate fault of a packed bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Flaw {
    /// Nothing.
    None,
    /// The recorded scores of its probe set are those of another model.
    Probe,
    /// A page of a segment fails its checksum, under valid hashes.
    Page,
    /// It ends the process in the middle of its install.
    Kills,
    /// Its install makes no progress until the ignition cuts the power.
    Endless,
}

/// A bundle to pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BundlePlan {
    /// The sequence of its parent; `None` for a snapshot.
    pub from: Option<u64>,
    /// The sequence of its generation.
    pub to: u64,
    /// Its deliberate fault.
    pub flaw: Flaw,
    /// The level of the first [`program`] that reads it, from 1 on.
    pub level: u8,
    /// The generation whose rows its parent has, if the publisher restored them as `from`.
    pub over: Option<u64>,
}

/// The operators that the networks of the levels above 1 have more.
const LATER: [&str; 2] = ["Abs", "Neg"];
/// The number of levels.
pub const LEVELS: u8 = 1 + LATER.len() as u8;

/// Returns the program of this level: the last one knows every operator.
pub fn program(level: u8) -> Arc<Program> {
    let mut program = Program::clone(&Program::this());
    program.version = format!("0.{level}.0");
    for operator in &LATER[usize::from(level) - 1..] {
        program.known.remove(&format!("operator-{operator}"));
    }
    Arc::new(program)
}

/// The generations of the model.
pub struct Generations {
    folder: tempfile::TempDir,
    /// The rows of each generation, by its sequence.
    rows: BTreeMap<u64, [Rows; 2]>,
}

#[derive(Clone)]
struct Table {
    number: usize,
    rows: Rows,
}

impl RowSource for Table {
    fn rows(&self) -> u64 {
        self.rows.len() as u64
    }
    fn has_keys(&self) -> bool {
        true
    }
    fn counts(&self) -> anyhow::Result<Option<Vec<u64>>> {
        Ok(Some(self.rows.keys().map(|key| hatchback::mix(*key) % 5).collect()))
    }
    fn each_block(&self, take: TakeBlock<'_>) -> anyhow::Result<()> {
        let keys: Vec<u64> = self.rows.keys().copied().collect();
        let values: Vec<f32> = self.rows.values().flatten().copied().collect();
        assert_eq!(values.len(), keys.len() * DIMS[self.number]);
        take(&keys, &values)
    }
}

impl Generations {
    /// Makes the rows of every generation, and the snapshot of each in a flash directory, as the
    /// parent of deltas.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let widths = [("a".to_owned(), DIMS[0]), ("b".to_owned(), DIMS[1])];
        for level in 1..=LEVELS {
            let network = onnx::concat_and(&widths, "out", &LATER[..usize::from(level) - 1]);
            std::fs::write(folder.path().join(format!("dense{level}.onnx")), network).unwrap();
            // No node reads the third vector, so that the scores stay those of two.
            let network = onnx::concat_beside(&widths, "out", &LATER[..usize::from(level) - 1]);
            std::fs::write(folder.path().join(format!("dense{level}c.onnx")), network).unwrap();
        }

        let mut random = Random::new(71);
        let mut tables: [Rows; 2] = std::array::from_fn(|t| first_rows(t, &mut random));
        let mut generations = Self { folder, rows: BTreeMap::new() };
        for sequence in 1..=GENERATIONS as u64 {
            if sequence > 1 {
                tables.iter_mut().enumerate().for_each(|(t, rows)| change(t, rows, &mut random));
            }
            generations.rows.insert(sequence, tables.clone());
            let (from, flaw, level, over) = (None, Flaw::None, 1, None);
            let snapshot = generations.pack(BundlePlan { from, to: sequence, flaw, level, over });
            install(&snapshot, &generations.flash(sequence)).unwrap();
        }
        generations
    }

    fn flash(&self, sequence: u64) -> PathBuf {
        self.folder.path().join(format!("flash{sequence}"))
    }

    /// Returns the flash directory of the release `sequence` that restores `content`.
    pub fn restored_flash(&self, sequence: u64, content: u64) -> PathBuf {
        self.folder.path().join(format!("flash{sequence}of{content}"))
    }

    /// Packs a bundle and returns its path.
    pub fn pack(&self, lead: BundlePlan) -> PathBuf {
        let BundlePlan { from, to, flaw, level, over } = lead;
        let name = format!("{}-{to}-{flaw:?}-{level}-{}", from.unwrap_or(0), over.unwrap_or(0));
        let path = |ending: &str| self.folder.path().join(format!("{name}.{ending}"));
        let out = path("hatch");
        if out.exists() {
            return out;
        }

        let shift = if flaw == Flaw::Probe { 1.0 } else { 0.0 };
        // More samples, so that its manifest is not that of the good release.
        let more = match flaw {
            Flaw::Kills => 1,
            Flaw::Endless => 2,
            Flaw::None | Flaw::Probe | Flaw::Page => 0,
        };
        let samples = PROBE_SAMPLES + more;
        std::fs::write(path("jsonl"), self.probe(to, samples, shift)).unwrap();
        let third = WITH_THIRD.contains(&to).then_some(1);
        let sources: Vec<Box<dyn RowSource>> = (0..2)
            .chain(third)
            .map(|number| Table { number, rows: self.rows[&to][number].clone() })
            .map(|table| Box::new(table) as Box<dyn RowSource>)
            .collect();
        let parent = from.map(|s| match over {
            Some(content) => self.restored_flash(s, content),
            None => self.flash(s),
        });
        let parent = parent.map(|path| Flash::open(&disk::system(), &path).unwrap());
        let spec = spec(to, level, path("jsonl").file_name().map(Path::new));
        let job = PackJob::new(spec, self.folder.path(), Overrides::default());
        job.pack_rows(&sources, parent.as_ref(), &out, &mut |_, _| {}).unwrap();

        let mut parts = Parts::read(&out);
        // The parent here is a snapshot; the fleet may have its delta alone, with the same rows.
        parts.manifest.packed_on = None;
        if flaw == Flaw::Page {
            parts.edit_segment(1, |pages| pages[0][100] ^= 1);
        }
        std::fs::write(&out, parts.bytes()).unwrap();
        out
    }

    /// Returns `samples` probe samples of a generation as lines of JSON, with the first value of
    /// each score moved by `shift`.
    fn probe(&self, sequence: u64, samples: usize, shift: f32) -> String {
        let [a, b] = &self.rows[&sequence];
        let pairs = a.iter().zip(b.keys()).take(samples);
        let mut lines = String::new();
        for ((a, row), b) in pairs {
            let score = row[0] + shift;
            writeln!(lines, "{{\"sparse\":{{\"f0\":[{a}],\"f1\":[{b}]}},\"score\":{score}}}")
                .unwrap();
        }
        lines
    }

    /// Returns a sample: mostly keys of some generation, sometimes a key of none.
    pub fn sample(&self, random: &mut Random) -> Sample {
        let sparse = (0..2).map(|t| vec![self.key(t, random)]).collect();
        Sample { dense: Vec::new(), sparse, ..Sample::default() }
    }

    fn key(&self, t: usize, random: &mut Random) -> u64 {
        if random.one_in(12) {
            return if random.one_in(2) { u64::MAX - random.below(9) } else { 1 << 33 };
        }
        let sequence = 1 + random.below(GENERATIONS as u64);
        let rows = &self.rows[&sequence][t];
        let at = random.below(rows.len() as u64) as usize;
        rows.keys().nth(at).copied().unwrap_or_default()
    }

    /// Returns the row of `key` in table `t` of a generation.
    pub fn row(&self, sequence: u64, t: usize, key: u64) -> Option<&[f32]> {
        self.rows.get(&sequence)?[t].get(&key).map(Vec::as_slice)
    }
}

impl Default for Generations {
    fn default() -> Self {
        Self::new()
    }
}

fn first_rows(t: usize, random: &mut Random) -> Rows {
    let key =
        |i: u64, random: &mut Random| if KEYS[t] == KeySpace::Index { i } else { random.bits() };
    (0..ROWS[t]).map(|i| (key(i, random), row(t, random))).collect()
}

fn row(t: usize, random: &mut Random) -> Vec<f32> {
    (0..DIMS[t]).map(|_| random.signed()).collect()
}

/// Updates some rows and inserts some; a sparse table also loses some.
fn change(t: usize, rows: &mut Rows, random: &mut Random) {
    let keys: Vec<u64> = rows.keys().copied().collect();
    for key in keys {
        if random.one_in(CHANGED_ONE_IN) {
            rows.insert(key, row(t, random));
        } else if KEYS[t] == KeySpace::Sparse && random.one_in(2 * CHANGED_ONE_IN) {
            rows.remove(&key);
        }
    }
    for _ in 0..5 {
        let key = if KEYS[t] == KeySpace::Index { rows.len() as u64 } else { random.bits() };
        rows.insert(key, row(t, random));
    }
}

fn spec(sequence: u64, level: u8, probe: Option<&Path>) -> ModelSpec {
    let table = |name: &str, t: usize| cached_table(name, KEYS[t], DIMS[t], CodecChoice::F32);
    let feature = |t: usize| FeatureSpec::sum(&format!("f{t}"), &format!("t{t}"), 1);
    let input = |name: &str, f: usize| InputSpec::vectors(name, vec![format!("f{f}")]);
    let mut tables = vec![table("t0", 0), table("t1", 1)];
    let mut features = vec![feature(0), feature(1)];
    let mut inputs = vec![input("a", 0), input("b", 1)];
    let retired = sequence >= WITH_THIRD.end;
    if sequence >= WITH_THIRD.start {
        features.push(FeatureSpec { retired, ..feature(2) });
    }
    let has_third = WITH_THIRD.contains(&sequence);
    if has_third {
        tables.push(table("t2", 1));
        inputs.push(input("c", 2));
    }
    let third = if has_third { "c" } else { "" };
    ModelSpec {
        format: 1,
        name: LINEAGE.to_owned(),
        sequence,
        dense_features: Vec::new(),
        network: NetworkSpec {
            onnx: Some(format!("dense{level}{third}.onnx").into()),
            hugectr: None,
            table_major: false,
            output: OutputsSpec::One("out".to_owned()),
            activation: Some(Activation::None),
            inputs,
        },
        tables,
        features,
        probe: probe.map(|samples| ProbeSpec { samples: samples.to_owned() }),
    }
}
