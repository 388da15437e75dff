//! A model whose schema changes from release to release, as two test programs publish it. Release 1
//! has the features `a` and `b`. Release 2 retires `b`, and has a table, the feature `c` and the
//! dense feature `d` more. Release 3 has the first table as f16.

use hatchback::Activation;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::schema::KeySpace;
use hatchback_tests::models::{TableRows, cached_table, install};
use hatchback_tools::import::RowSource;
use hatchback_tools::pack::spec::{
    CodecChoice, DenseSpec, FeatureSpec, InputSpec, ModelSpec, NetworkSpec, OutputsSpec,
};
use hatchback_tools::pack::{Overrides, PackJob};
use hatchback_tools::workload::onnx::{Graph, Type};
use std::path::{Path, PathBuf};

pub const DIM: usize = 2;
pub const ROWS: u64 = 40;

/// Returns the value in both columns of row `key` of table `table`.
pub fn value(table: u64, key: u64) -> f32 {
    (1000 * table + key) as f32
}

/// Returns the model of the release `sequence`.
pub fn spec(sequence: u64) -> ModelSpec {
    let is_new = sequence > 1;
    let table = |name: &str, codec| cached_table(name, KeySpace::Index, DIM, codec);
    let first = if sequence > 2 { CodecChoice::F16 } else { CodecChoice::F32 };
    let mut tables = vec![table("first", first)];
    let mut features = vec![FeatureSpec::sum("a", "first", 1), FeatureSpec::sum("b", "first", 1)];
    let mut inputs = vec![InputSpec::vectors("a", vec!["a".to_owned()])];
    let mut dense_features = vec![];
    if is_new {
        tables.push(table("second", CodecChoice::F32));
        features[1].retired = true;
        features.push(FeatureSpec::sum("c", "second", 1));
        inputs.push(InputSpec::vectors("c", vec!["c".to_owned()]));
        inputs.push(InputSpec::dense("d"));
        let (name, missing) = ("d".to_owned(), Some(0.5));
        dense_features.push(DenseSpec::Table { name, missing, shared: false, retired: false });
    } else {
        inputs.push(InputSpec::vectors("b", vec!["b".to_owned()]));
    }
    ModelSpec {
        format: 1,
        name: "changing".to_owned(),
        sequence,
        dense_features,
        network: NetworkSpec {
            onnx: Some("dense.onnx".into()),
            hugectr: None,
            table_major: false,
            output: OutputsSpec::One("out".to_owned()),
            activation: Some(Activation::None),
            inputs,
        },
        tables,
        features,
        probe: None,
    }
}

/// Packs release `sequence` as `spec` says, a delta from the live generation of `parent`. The
/// network adds its inputs up.
pub fn pack(spec: &ModelSpec, parent: Option<&Path>, folder: &Path) -> Result<PathBuf, String> {
    let mut graph = Graph::default();
    let mut sum = "a".to_owned();
    for (n, input) in spec.network.inputs.iter().enumerate() {
        let width = if input.dense { spec.dense_features.len() } else { DIM };
        graph.input(&input.name, Type::Float, &[width]);
        if n > 0 {
            let last = n + 1 == spec.network.inputs.len();
            let next = if last { "out".to_owned() } else { format!("sum{n}") };
            graph.node("Add", &[&sum, &input.name], &next, &[]);
            sum = next;
        }
    }
    graph.output("out", &[DIM]);
    std::fs::write(folder.join("dense.onnx"), graph.file()).unwrap();
    let rows = |table: usize| -> Box<dyn RowSource> {
        let values = (0..ROWS).flat_map(|key| [value(table as u64, key); DIM]).collect();
        Box::new(TableRows { keys: None, values, dim: DIM, counts: None })
    };
    let sources: Vec<_> = (0..spec.tables.len()).map(rows).collect();
    let out = folder.join(format!("{}.hatch", spec.sequence));
    let parent = parent.map(|path| Flash::open(&disk::system(), path).unwrap());
    let job = PackJob::new(spec.clone(), folder, Overrides::default());
    let packed = job.pack_rows(&sources, parent.as_ref(), &out, &mut |_, _| {});
    packed.map(|_| out).map_err(|e| format!("{e:#}"))
}

/// The bundles of a snapshot and of the deltas after it.
pub fn releases(folder: &Path) -> Vec<PathBuf> {
    let desk = folder.join("desk");
    let mut bundles = Vec::new();
    for sequence in 1..=3 {
        let parent = Some(desk.as_path()).filter(|_| sequence > 1);
        let bundle = pack(&spec(sequence), parent, folder).unwrap();
        install(&desk, &bundle);
        bundles.push(bundle);
    }
    bundles
}
