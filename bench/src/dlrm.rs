//! The DLRM of MLPerf with random weights, in the form that each engine reads: a bundle for
//! Hatchback, an ONNX file with the embeddings inside for ONNX Runtime, plain arrays for PyTorch,
//! and requests for all of them. Its scores serve only to check that the engines agree. Never
//! measures.

use anyhow::{Context, Result};
use hatchback::mix;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, MissPolicy, Placement};
use hatchback_kernels::dense::{Weights, narrow_all};
use hatchback_tools::import::Source;
use hatchback_tools::import::{RowSource, TakeBlock};
use hatchback_tools::pack::spec::{CodecChoice, DefaultRow, ModelSpec, TableSpec};
use hatchback_tools::pack::{Overrides, PackJob};
use hatchback_tools::workload::onnx::{Graph, Type, int, ints};
use hatchback_tools::workload::synthetic::{DENSE, dlrm_spec, push_normals};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Tables, each with one key per sample.
pub const TABLES: usize = 26;
/// Values in a row.
pub const DIM: usize = 128;
/// Widths of the bottom network, below the interaction.
const BOTTOM: [usize; 4] = [DENSE, 512, 256, DIM];
/// Pairs of different vectors among those of the tables and the bottom network's.
const PAIRS: usize = (TABLES + 1) * TABLES / 2;
/// Widths of the top network, above the interaction.
const TOP: [usize; 6] = [DIM + PAIRS, 1024, 1024, 512, 256, 1];
/// Rows in a block.
const BLOCK_ROWS: usize = 1024;

/// The model with `rows` rows in each table.
#[derive(Clone, Copy, Debug)]
pub struct Dlrm {
    /// Rows of a table.
    pub rows: usize,
}

/// One fully connected layer, weights `[out, in]`.
struct Layer {
    shape: [usize; 2],
    weights: Vec<f32>,
    bias: Vec<f32>,
}

/// Returns the layers of a network of these widths. Their deviations keep values near 1.
fn layers(widths: &[usize], seed: u64) -> Vec<Layer> {
    let layer = |(number, pair): (usize, &[usize])| {
        let (from, to, seed) = (pair[0], pair[1], (seed + number as u64) << 32);
        let mut layer = Layer { shape: [to, from], weights: Vec::new(), bias: Vec::new() };
        let (weights, deviation) = ((to * from).next_multiple_of(2), (2.0 / from as f32).sqrt());
        push_normals(seed, weights, deviation, &mut layer.weights);
        push_normals(seed | 1 << 31, to.next_multiple_of(2), 0.1, &mut layer.bias);
        layer.weights.truncate(to * from);
        layer.bias.truncate(to);
        layer
    };
    widths.windows(2).enumerate().map(layer).collect()
}

/// The activation after the last layer. All other layers end in Relu.
#[derive(Clone, Copy, PartialEq)]
enum LastLayer {
    Relu,
    Linear,
}

/// Adds layers on top of the value `input`. Returns the name of the last value.
fn add_layers(
    graph: &mut Graph,
    name: &str,
    layers: &[Layer],
    input: &str,
    last: LastLayer,
) -> String {
    let mut value = input.to_owned();
    for (number, layer) in layers.iter().enumerate() {
        let part = |what: &str| format!("{name}.{number}.{what}");
        let (weights, bias) = (part("weights"), part("bias"));
        graph.floats(&weights, &layer.shape, &layer.weights);
        graph.floats(&bias, &layer.shape[..1], &layer.bias);
        value = graph.node("Gemm", &[&value, &weights, &bias], &part("sum"), &[int("transB", 1)]);
        if last == LastLayer::Relu || number + 1 < layers.len() {
            value = graph.node("Relu", &[&value], &part("relu"), &[]);
        }
    }
    value
}

/// Adds the network from the inputs `dense` `[batch, 13]` and `rows` `[batch, 26, 128]` to a logit.
/// Returns the logit's name.
fn add_network(graph: &mut Graph) -> String {
    let x = add_layers(graph, "bottom", &layers(&BOTTOM, 1), "dense", LastLayer::Relu);

    let n = TABLES + 1;
    graph.integers("as one row", &[3], &[-1, 1, DIM as i64]);
    graph.integers("as a line", &[2], &[-1, (n * n) as i64]);
    let below: Vec<i64> = (0..n).flat_map(|i| (0..i).map(move |j| (i * n + j) as i64)).collect();
    graph.integers("below the diagonal", &[PAIRS], &below);

    let row = graph.node("Reshape", &[&x, "as one row"], "x as one row", &[]);
    let all = graph.node("Concat", &[&row, "rows"], "vectors", &[int("axis", 1)]);
    let turned = graph.node("Transpose", &[&all], "turned", &[ints("perm", &[0, 2, 1])]);
    let products = graph.node("MatMul", &[&all, &turned], "products", &[]);
    let line = graph.node("Reshape", &[&products, "as a line"], "products as a line", &[]);
    let pairs = graph.node("Gather", &[&line, "below the diagonal"], "pairs", &[int("axis", 1)]);
    let both = graph.node("Concat", &[&x, &pairs], "x and pairs", &[int("axis", 1)]);
    add_layers(graph, "top", &layers(&TOP, 8), &both, LastLayer::Linear)
}

/// Returns the ONNX file of the network alone, as a bundle holds it.
pub fn network() -> Vec<u8> {
    let mut graph = Graph::default();
    graph.input("dense", Type::Float, &[DENSE]);
    graph.input("rows", Type::Float, &[TABLES, DIM]);
    let logit = add_network(&mut graph);
    graph.node("Identity", &[&logit], "logit", &[]);
    graph.output("logit", &[1]);
    graph.file()
}

impl Dlrm {
    /// Writes the files of the peers into `folder`: the model and `samples` samples.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, folder: &Path, samples: usize) -> Result<()> {
        let write = |name: &str, bytes: Vec<u8>| {
            std::fs::write(folder.join(name), bytes).with_context(|| name.to_owned())
        };
        let bytes =
            |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();

        write("whole.onnx", self.whole())?;
        let all = layers(&BOTTOM, 1).into_iter().chain(layers(&TOP, 8));
        let weights: Vec<f32> = all.flat_map(|l| [l.weights, l.bias].concat()).collect();
        write("dense.f32", bytes(&weights))?;

        let (mut tables, mut values) = (Vec::new(), Vec::new());
        for (table, first) in
            (0..TABLES).flat_map(|t| (0..self.rows).step_by(BLOCK_ROWS).map(move |r| (t, r)))
        {
            values.clear();
            (first..self.rows.min(first + BLOCK_ROWS))
                .for_each(|row| self.push_row(table, row, &mut values));
            tables.extend(bytes(&values));
        }
        write("tables.f32", tables)?;

        let (mut keys, mut dense) = (Vec::new(), Vec::new());
        for sample in (0..samples).map(|n| self.sample(n)) {
            keys.extend(sample.sparse.iter().flatten().flat_map(|k| k.to_le_bytes()));
            dense.extend(bytes(&sample.dense));
        }
        write("keys.i64", keys)?;
        write("dense_in.f32", dense)
    }

    /// Returns the shapes for the peers' `setup`.
    pub fn shape(&self, folder: &Path) -> Value {
        json!({
            "folder": folder, "tables": TABLES, "rows": self.rows, "dim": DIM, "dense": DENSE,
            "bottom": BOTTOM, "top": TOP,
        })
    }

    /// Returns the ONNX file of the whole model, from keys and dense features to a score. All
    /// tables form one, so that a single `Gather` reads it: the fastest form in ONNX.
    fn whole(&self) -> Vec<u8> {
        let mut graph = Graph::default();
        graph.input("dense", Type::Float, &[DENSE]);
        graph.input("keys", Type::Int64, &[TABLES]);
        graph.external("tables", &[TABLES * self.rows, DIM], "tables.f32");
        let starts: Vec<i64> = (0..TABLES).map(|t| (t * self.rows) as i64).collect();
        graph.integers("starts", &[TABLES], &starts);
        let places = graph.node("Add", &["keys", "starts"], "places", &[]);
        graph.node("Gather", &["tables", &places], "rows", &[int("axis", 0)]);
        let logit = add_network(&mut graph);
        graph.node("Sigmoid", &[&logit], "score", &[]);
        graph.output("score", &[1]);
        graph.file()
    }

    /// Packs the bundle `out`, with all tables cached in f32 and a network of `weights`.
    ///
    /// # Errors
    /// The bundle cannot be written.
    pub fn pack(
        &self,
        weights: Weights,
        out: &Path,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<()> {
        let base = tempfile::tempdir().context("a temporary folder")?;
        std::fs::write(base.path().join("dense.onnx"), narrow_all(&network(), weights)?)?;
        let sources: Vec<Box<dyn RowSource>> = (0..TABLES)
            .map(|table| Box::new(RandomTable { model: *self, table }) as Box<dyn RowSource>)
            .collect();
        let job = PackJob::new(spec(), base.path(), Overrides::default());
        job.pack_rows(&sources, None, out, progress)?;
        Ok(())
    }

    /// Returns sample number `n`: uniform keys, and dense features from N(0, 1).
    pub fn sample(&self, n: usize) -> Sample {
        let mut dense = Vec::new();
        push_normals((n as u64) << 8 | 1 << 62, DENSE + 1, 1.0, &mut dense);
        dense.truncate(DENSE);
        let key = |t: usize| mix((n * TABLES + t) as u64 | 1 << 61) % self.rows as u64;
        Sample { dense, sparse: (0..TABLES).map(|t| vec![key(t)]).collect(), ..Sample::default() }
    }

    fn push_row(&self, table: usize, row: usize, values: &mut Vec<f32>) {
        let seed = ((table * self.rows + row) * DIM) as u64;
        push_normals(seed, DIM, 1.0 / (DIM as f32).sqrt(), values);
    }
}

fn spec() -> ModelSpec {
    let names: Vec<String> = (0..TABLES).map(|n| format!("cat_{n}")).collect();

    let table = |name: &String| TableSpec {
        name: name.clone(),
        dim: DIM,
        keys: KeySpace::Index,
        codec: CodecChoice::F32,
        placement: Placement::Cached,
        miss: MissPolicy::Wait,
        default: DefaultRow::Zeros,
        // `pack` gets the rows from a `RowSource` and never opens this file.
        source: Source::Npy { path: PathBuf::new(), keys: None, counts: None },
    };

    dlrm_spec("mlperf-dlrm", 1, ["dense", "rows"], names.iter().map(table).collect())
}

/// The random rows of one table, computed when they are read.
struct RandomTable {
    model: Dlrm,
    table: usize,
}

impl RowSource for RandomTable {
    fn rows(&self) -> u64 {
        self.model.rows as u64
    }

    fn has_keys(&self) -> bool {
        false
    }

    fn counts(&self) -> Result<Option<Vec<u64>>> {
        Ok(None)
    }

    fn each_block(&self, take: TakeBlock<'_>) -> Result<()> {
        let mut values = Vec::new();
        for first in (0..self.model.rows).step_by(BLOCK_ROWS) {
            values.clear();
            let rows = first..self.model.rows.min(first + BLOCK_ROWS);
            rows.clone().for_each(|row| self.model.push_row(self.table, row, &mut values));
            take(&rows.map(|row| row as u64).collect::<Vec<_>>(), &values)?;
        }
        Ok(())
    }
}
