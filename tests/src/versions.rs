//! A small model in several generations: a snapshot, and deltas that update, insert and delete rows
//! of an index table and of a sparse one. Each generation has the rows that it must show.

use crate::models::cached_table;
use crate::onnx;
use crate::random::Random;
use crate::rewrite::Parts;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::schema::{KeySpace, Placement};
use hatchback::{Activation, mix};
use hatchback_tools::import::{RowSource, TakeBlock};
use hatchback_tools::pack::spec::{
    CodecChoice, FeatureSpec, InputSpec, ModelSpec, NetworkSpec, OutputsSpec, TableSpec,
};
use hatchback_tools::pack::{Overrides, PackJob};
use hatchback_tools::serve::install;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The encoded rows of a table, by key order.
pub type Rows = BTreeMap<u64, Vec<u8>>;

/// The kind of model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Where both tables are served.
    pub placement: Placement,
    /// Whether a generation inserts and deletes keys; else it updates rows only.
    pub changes_keys: bool,
}

impl Default for Kind {
    fn default() -> Self {
        Self { placement: Placement::Cached, changes_keys: true }
    }
}

/// The generations of one model.
pub struct Versions {
    kind: Kind,
    folder: tempfile::TempDir,
    /// The decoded values of `rows`.
    plain: Vec<[Plain; 2]>,
    /// For each generation the bundle that leads to it from its predecessor; the first is a
    /// snapshot.
    pub deltas: Vec<PathBuf>,
    /// For each generation its snapshot bundle.
    pub snapshots: Vec<PathBuf>,
    /// For each generation the rows of both tables.
    pub rows: Vec<[Rows; 2]>,
}

/// A snapshot follows after so many updates: a table may have 64 deltas, and nothing merges them
/// here.
pub const SNAPSHOT_EVERY: u64 = 50;

const DIMS: [usize; 2] = [4, 6];
const KEYS: [KeySpace; 2] = [KeySpace::Index, KeySpace::Sparse];

#[derive(Clone)]
struct Plain {
    dim: usize,
    rows: BTreeMap<u64, Vec<f32>>,
}

impl RowSource for Plain {
    fn rows(&self) -> u64 {
        self.rows.len() as u64
    }
    fn has_keys(&self) -> bool {
        true
    }
    fn counts(&self) -> anyhow::Result<Option<Vec<u64>>> {
        Ok(Some(self.rows.keys().map(|key| mix(*key) % 5).collect()))
    }
    fn each_block(&self, take: TakeBlock<'_>) -> anyhow::Result<()> {
        let keys: Vec<u64> = self.rows.keys().copied().collect();
        let values: Vec<f32> = self.rows.values().flatten().copied().collect();
        assert_eq!(values.len(), keys.len() * self.dim);
        take(&keys, &values)
    }
}

impl Versions {
    /// Returns `n` generations of tables with about `rows` rows. Equal seeds give equal rows.
    pub fn new(n: usize, rows: u64, seed: u64) -> Self {
        Self::changing(&vec![12; n.saturating_sub(1)], rows, seed)
    }

    /// Returns a snapshot, and for each of `one_in` a generation in which one row in that many
    /// changes; no row if it is 0.
    pub fn changing(one_in: &[u64], rows: u64, seed: u64) -> Self {
        Self::of(Kind::default(), one_in, rows, seed)
    }

    /// Returns the generations of [`Versions::changing`] for a model of this kind.
    pub fn of(kind: Kind, one_in: &[u64], rows: u64, seed: u64) -> Self {
        let n = one_in.len() + 1;
        let folder = tempfile::tempdir().unwrap();
        let mut random = Random::new(seed);
        let widths: Vec<(String, usize)> =
            vec![("a".to_owned(), DIMS[0]), ("b".to_owned(), DIMS[1])];
        std::fs::write(folder.path().join("dense.onnx"), onnx::concat(&widths, "out")).unwrap();
        let mut tables: [Plain; 2] = std::array::from_fn(|t| first_table(t, rows, &mut random));
        let mut versions = Self {
            kind,
            folder,
            plain: Vec::new(),
            deltas: Vec::new(),
            snapshots: Vec::new(),
            rows: Vec::new(),
        };

        for generation in 1..=n as u64 {
            if generation > 1 {
                tables.iter_mut().enumerate().for_each(|(t, table)| {
                    let one_in = one_in[generation as usize - 2];
                    change_rows(t, table, &mut random, one_in);
                    if kind.changes_keys {
                        change_keys(t, table, &mut random, one_in);
                    }
                });
            }
            versions.add(generation, &tables);
        }
        versions
    }

    /// Returns the inputs of the network and their widths.
    pub fn widths(&self) -> [(String, usize); 2] {
        [("a".to_owned(), DIMS[0]), ("b".to_owned(), DIMS[1])]
    }

    /// Packs the merged delta from generation `from` to generation `to`. Returns its path.
    pub fn merged(&self, from: usize, to: usize) -> PathBuf {
        let out = self.folder.path().join(format!("merged{from}-{to}"));
        let parent =
            Flash::open(&disk::system(), &self.folder.path().join(format!("flash{from}"))).unwrap();
        self.pack(to as u64, &self.plain[to - 1], Some(&parent), &out);
        out
    }

    /// Packs the delta from the live generation of `parent` to the rows of `generation`, as release
    /// `sequence`. Returns its path.
    pub fn over(&self, parent: &Flash, sequence: u64, generation: usize) -> PathBuf {
        let out = self.folder.path().join(format!("over{sequence}-{generation}"));
        self.pack(sequence, &self.plain[generation - 1], Some(parent), &out);
        out
    }

    fn pack(&self, generation: u64, tables: &[Plain; 2], parent: Option<&Flash>, out: &Path) {
        let source = |table: &Plain| Box::new(table.clone()) as Box<dyn RowSource>;
        let sources: Vec<_> = tables.iter().map(source).collect();
        let spec = spec(generation, self.kind.placement);
        let job = PackJob::new(spec, self.folder.path(), Overrides::default());
        job.pack_rows(&sources, parent, out, &mut |_, _| {}).unwrap();
    }

    fn add(&mut self, generation: u64, tables: &[Plain; 2]) {
        let at = |name: &str| self.folder.path().join(format!("{name}{generation}"));
        let before = self.folder.path().join(format!("flash{}", generation - 1));
        let parent = (generation > 1).then(|| Flash::open(&disk::system(), &before).unwrap());

        // The snapshot is packed like the parent, so that both hold the same bytes.
        let snapshot = at("snapshot");
        self.pack(generation, tables, None, &snapshot);
        let delta = at("delta");
        self.pack(generation, tables, parent.as_ref(), &delta);
        // Tests publish the parent as a snapshot or as a delta, which have the same rows.
        let mut parts = Parts::read(&delta);
        parts.manifest.packed_on = None;
        std::fs::write(&delta, parts.bytes()).unwrap();

        let is_snapshot_due = (generation - 1).is_multiple_of(SNAPSHOT_EVERY);
        if let Some(parent) = parent.filter(|_| !is_snapshot_due) {
            copy(parent.directory(), &at("flash"));
        }
        let bundle = if is_snapshot_due { &snapshot } else { &delta };
        let flash = install(bundle, &at("flash")).unwrap();
        let rows = |t: usize| expected(&flash, t, &tables[t]);
        self.rows.push([rows(0), rows(1)]);
        self.plain.push(tables.clone());
        self.deltas.push(delta);
        self.snapshots.push(snapshot);
    }
}

/// Copies a folder and everything in it.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let (from, to) =
            (entry.as_ref().unwrap().path(), to.join(entry.as_ref().unwrap().file_name()));
        if from.is_dir() { copy(&from, &to) } else { std::fs::copy(&from, &to).map(drop).unwrap() }
    }
}

/// Returns the rows that the table must hold, encoded independently.
fn expected(flash: &Flash, t: usize, table: &Plain) -> Rows {
    let format = flash.manifest().schema.tables[t].format().unwrap();
    let encode = |row: &Vec<f32>| {
        let mut bytes = vec![0; format.row_bytes()];
        format.encode(row, &mut bytes).unwrap();
        bytes
    };
    table.rows.iter().map(|(key, row)| (KEYS[t].order(*key), encode(row))).collect()
}

fn row(dim: usize, random: &mut Random) -> Vec<f32> {
    (0..dim).map(|_| random.signed()).collect()
}

fn first_table(t: usize, rows: u64, random: &mut Random) -> Plain {
    let key =
        |i: u64, random: &mut Random| if KEYS[t] == KeySpace::Index { i } else { random.bits() };
    let rows = (0..rows).map(|i| (key(i, random), row(DIMS[t], random))).collect();
    Plain { dim: DIMS[t], rows }
}

/// Updates some rows.
fn change_rows(t: usize, table: &mut Plain, random: &mut Random, one_in: u64) {
    let keys: Vec<u64> = table.rows.keys().copied().collect();
    for key in keys {
        if one_in > 0 && random.one_in(one_in) {
            table.rows.insert(key, row(DIMS[t], random));
        }
    }
}

/// Inserts some rows; a sparse table also loses some.
fn change_keys(t: usize, table: &mut Plain, random: &mut Random, one_in: u64) {
    if one_in == 0 {
        return;
    }
    let keys: Vec<u64> = table.rows.keys().copied().collect();
    for key in keys {
        if KEYS[t] == KeySpace::Sparse && random.one_in(one_in * 5 / 3) {
            table.rows.remove(&key);
        }
    }
    for _ in 0..random.below(1 + 84 / one_in) {
        let key = if KEYS[t] == KeySpace::Index { table.rows.len() as u64 } else { random.bits() };
        table.rows.insert(key, row(table.dim, random));
    }
}

fn spec(sequence: u64, placement: Placement) -> ModelSpec {
    let table = |t: usize| TableSpec {
        placement,
        ..cached_table(&format!("t{t}"), KEYS[t], DIMS[t], CodecChoice::F32)
    };
    let feature = |t: usize| FeatureSpec::sum(&format!("f{t}"), &format!("t{t}"), 1);
    let input = |name: &str, f: usize| InputSpec::vectors(name, vec![format!("f{f}")]);
    ModelSpec {
        format: 1,
        name: "versions".to_owned(),
        sequence,
        dense_features: Vec::new(),
        network: NetworkSpec {
            onnx: Some("dense.onnx".into()),
            hugectr: None,
            table_major: false,
            output: OutputsSpec::One("out".to_owned()),
            activation: Some(Activation::None),
            inputs: vec![input("a", 0), input("b", 1)],
        },
        tables: vec![table(0), table(1)],
        features: vec![feature(0), feature(1)],
        probe: None,
    }
}
