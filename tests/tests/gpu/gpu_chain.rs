//! Counts what a request in the shape of MLPerf's DLRM waits for: the nodes of its graph, and the
//! work of other workers. The model has 26 tables, a bottom network of three layers and a top
//! network of five. The GPU starts a node after those that it depends on, so the longest chain
//! bounds the time of a small request. Scores are the CPU's to the bit.

use crate::one_key::{OneKey, exact};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::{KeySpaces, RowKey};
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::dense::{Activation, DenseEngine};
use hatchback_kernels::gpu::gather::EmptyGraph;
use hatchback_kernels::gpu::lookup::Keys;
use hatchback_kernels::gpu::step::Step;
use hatchback_kernels::gpu::tables::{DeviceTables, TableStorage};
use hatchback_kernels::gpu::{DenseNetwork, DeviceEngine, Precision};
use hatchback_kernels::lookup::miss_list::{MissList, RowState};
use hatchback_kernels::lookup::{Bags, LookupStatus};
use hatchback_tests::random::Random;
use hatchback_tests::standin;
use hatchback_tools::workload::onnx::{Graph, Type, int, ints};
use std::sync::Arc;

const TABLES: usize = 26;
const ROWS: u64 = 50;
const DIM: usize = 8;
const DENSE: usize = 13;
const BATCH_MAX: usize = 130;
/// Nodes of the longest chain: three layers below, the pairs, five layers above.
const CHAIN_MAX: u64 = 9;
/// Nodes of a request: those, the query, and the record of its event.
const NODES_MAX: u64 = 11;

fn layers(graph: &mut Graph, random: &mut Random, input: &str, widths: &[usize]) -> String {
    let mut value = input.to_owned();
    for pair in widths.windows(2) {
        let (k, n) = (pair[0], pair[1]);
        let part = |what: &str| format!("{value} {what}");
        let (weights, bias) = (part("weights"), part("bias"));
        let mut floats =
            |len: usize| (0..len).map(|_| random.signed() / k as f32).collect::<Vec<_>>();
        graph.floats(&weights, &[k, n], &floats(k * n));
        graph.floats(&bias, &[n], &floats(n));
        let sum = graph.node("Gemm", &[&value, &weights, &bias], &part("sum"), &[]);
        value = if n == 1 { sum } else { graph.node("Relu", &[&sum], &part("relu"), &[]) };
    }
    value
}

/// Returns the ONNX file and the name of its output. Its layers are narrow, because the stand-in is
/// slow.
fn dlrm(random: &mut Random) -> (Vec<u8>, String) {
    let mut graph = Graph::default();
    graph.input("dense", Type::Float, &[DENSE]);
    graph.input("rows", Type::Float, &[TABLES, DIM]);
    let x = layers(&mut graph, random, "dense", &[DENSE, 40, 12, DIM]);
    let n = TABLES + 1;
    graph.integers("as a row", &[3], &[-1, 1, DIM as i64]);
    graph.integers("as a line", &[2], &[-1, (n * n) as i64]);
    let below: Vec<i64> = (0..n).flat_map(|i| (0..i).map(move |j| (i * n + j) as i64)).collect();
    graph.integers("below", &[below.len()], &below);
    let row = graph.node("Reshape", &[&x, "as a row"], "row", &[]);
    let all = graph.node("Concat", &[&row, "rows"], "vectors", &[int("axis", 1)]);
    let turned = graph.node("Transpose", &[&all], "turned", &[ints("perm", &[0, 2, 1])]);
    let products = graph.node("MatMul", &[&all, &turned], "products", &[]);
    let line = graph.node("Reshape", &[&products, "as a line"], "line", &[]);
    let pairs = graph.node("Gather", &[&line, "below"], "pairs", &[int("axis", 1)]);
    let both = graph.node("Concat", &[&x, &pairs], "both", &[int("axis", 1)]);
    let top = [DIM + below.len(), 24, 24, 16, 12, 1];
    let logit = layers(&mut graph, random, &both, &top);
    graph.output(&logit, &[1]);
    (graph.file(), logit)
}

fn value(table: usize, key: u64, column: usize) -> f32 {
    Random::new((table * DIM + column) as u64 * 1000 + key).signed()
}

fn row(table: usize, key: u64) -> Vec<u8> {
    (0..DIM).flat_map(|column| value(table, key, column).to_le_bytes()).collect()
}

fn features() -> OneKey {
    OneKey { tables: (0..TABLES as u16).collect(), keys_end: ROWS, dim: DIM }
}

/// Returns the tables with the even keys of each cached.
fn tables(gpu: &Arc<Gpu>) -> Arc<DeviceTables> {
    let spaces = KeySpaces::new(vec![Some(ROWS); TABLES]);
    let cache = Cache::whole(features().format().row_bytes(), usize::MAX, &spaces).unwrap();
    for (table, key) in (0..TABLES).flat_map(|t| (0..ROWS).step_by(2).map(move |k| (t, k))) {
        let name = RowKey { table: table as u16, key };
        assert!(cache.insert(name, &row(table, key), cache.epoch(name)));
    }
    let storage = vec![TableStorage::Cached(0); TABLES];
    Arc::new(DeviceTables::new(gpu, storage, vec![cache], &[]).unwrap())
}

/// One worker of the model on a GPU.
struct Car {
    step: Step,
    misses: MissList,
    engine: Arc<DeviceEngine>,
    cpu: DenseEngine,
    random: Random,
    /// Largest difference of a score from the CPU's.
    bound: f32,
}

impl Car {
    /// A worker whose network runs on our kernels alone.
    fn new(tables: &Arc<DeviceTables>, keys: Keys, seed: u64) -> Self {
        Self::with(Precision::Exact, tables, keys, seed)
    }

    fn with(precision: Precision, tables: &Arc<DeviceTables>, keys: Keys, seed: u64) -> Self {
        let gpu = tables.gpu();
        let mut random = Random::new(seed);
        let (onnx, output) = dlrm(&mut random);
        let inputs = [("dense", DENSE), ("rows", TABLES * DIM)];
        let activation = Activation::Sigmoid;
        let network =
            DenseNetwork { onnx: &onnx, inputs: &inputs, parts: &[], output: &output, activation };
        let mut options = exact(BATCH_MAX, vec![0]);
        options.dense.precision = precision;
        let engine = Arc::new(DeviceEngine::load(gpu, &network, &options).unwrap());
        assert_eq!(engine.is_exact(), precision == Precision::Exact, "{:?}", engine.rejected());
        let bound = if engine.is_exact() { 0.0 } else { 1e-5 };
        let cpu = DenseEngine::load(onnx.clone(), &inputs, &output, activation).unwrap();

        let features = features();
        let limits = features.limits(BATCH_MAX, TABLES * BATCH_MAX, keys);
        let (step, misses) = features.step(tables, &engine, &inputs, limits);
        Self { step, misses, engine, cpu, random, bound }
    }

    /// Scores `batch` samples with keys that are multiples of `even`, and compares them with the
    /// CPU's. Returns how many rows were missing.
    fn score(&mut self, batch: usize, even: u64) -> usize {
        let Self { step, misses, cpu, random, bound, .. } = self;
        let dense: Vec<f32> = (0..batch * DENSE).map(|_| random.signed()).collect();
        let keys: Vec<Vec<u64>> = (0..TABLES)
            .map(|_| (0..batch).map(|_| even * random.below(ROWS / even)).collect())
            .collect();
        let offsets: Vec<u32> = (0..=batch as u32).collect();
        let mut statuses = vec![LookupStatus::default(); batch];
        let bags = |table: usize| Bags::new(&keys[table], &offsets);
        step.begin(batch, bags, |_, values| values.copy_from_slice(&dense)).unwrap();
        assert!(!step.lookup().collect(misses, &mut statuses).unwrap());
        let missed = misses.list().len();
        for miss in misses.list().to_vec() {
            misses.row_mut(miss.slot).copy_from_slice(&row(miss.row.table.into(), miss.row.key));
            misses.set_state(miss.slot, RowState::Fresh);
        }
        if missed > 0 {
            step.complete(misses, &mut statuses).unwrap();
            misses.clear();
        }

        let rows = (0..batch).flat_map(|sample| {
            let keys = &keys;
            (0..TABLES).flat_map(move |table| {
                (0..DIM).map(move |column| value(table, keys[table][sample], column))
            })
        });
        let mut expected = vec![0.0; batch];
        cpu.run(batch, &[dense, rows.collect()], &mut expected, &mut cpu.scratch(batch)).unwrap();
        for (found, expected) in step.scores(batch).iter().zip(&expected) {
            let said = format!("batch {batch}, keys x {even}: {found}, not {expected}");
            assert!((found - expected).abs() <= *bound, "{said}");
            assert!(*bound > 0.0 || found.to_bits() == expected.to_bits(), "{said}");
        }
        missed
    }
}

/// The bottom network runs beside the query, the pairs read their vectors where they are, the last
/// layer makes the scores, and no copy of the dense values comes first.
#[test]
fn the_longest_chain_of_a_request_is_the_layers_and_the_pairs() {
    let _turn = standin::alone();
    for (seed, keys) in [Keys::InPlace, Keys::Copied].into_iter().enumerate() {
        let gpu = standin::gpu(seed as u64);
        let mut car = Car::new(&tables(&gpu), keys, seed as u64);
        assert!(car.step.refused().is_none(), "{:?}", car.step.refused());
        for batch in [1, 3, 64, 65, BATCH_MAX] {
            assert_eq!(car.score(batch, 2), 0);
            let Some(counts) = standin::load().map(|s| s.counts()) else { continue };
            assert!(!counts.busy, "a branch goes on after the answer");
            let said = format!("seed {seed}, {keys:?}, batch {batch}: {counts:?}");
            assert_eq!(counts.chain, CHAIN_MAX, "{said}");
            assert_eq!(counts.nodes, NODES_MAX + u64::from(keys == Keys::Copied), "{said}");

            // A measurement compares the request with an empty graph of its shape.
            let shape = car.step.shape(batch).unwrap();
            let nodes = [counts.nodes, counts.chain].map(|nodes| nodes as usize);
            assert_eq!([shape.nodes, shape.chain], nodes, "{said}");
            EmptyGraph::new(&gpu, shape).unwrap().run().unwrap();
            let empty = standin::load().unwrap().counts();
            assert_eq!([empty.nodes, empty.chain], [counts.nodes, counts.chain], "{said}");
        }
        // Half of these rows are missing, and then some are cached.
        let missed: Vec<usize> = [7, 1, BATCH_MAX, 30].map(|batch| car.score(batch, 1)).into();
        assert!(missed[0] > 20 && missed[3] < missed[2], "seed {seed}: {missed:?}");
    }
}

/// Beside cuBLAS our kernels compute the first layer, which reads the dense values where the host
/// wrote them, and the last, which makes the scores. So the chain is no longer.
#[test]
fn the_chain_is_as_short_with_cublas() {
    let _turn = standin::alone();
    let gpu = standin::gpu(3);
    if !standin::load_cublas() {
        return println!("SKIPPED: only the stand-in counts nodes");
    }
    let mut car = Car::with(Precision::F32, &tables(&gpu), Keys::Copied, 3);
    for batch in [1, 64, BATCH_MAX] {
        assert_eq!(car.score(batch, 2), 0);
        let counts = standin::load().unwrap().counts();
        assert_eq!([counts.chain, counts.nodes], [CHAIN_MAX, NODES_MAX + 1], "{batch}: {counts:?}");
    }
    assert!(car.score(BATCH_MAX, 1) > 20);

    // The memory plan counts cuBLAS's workspace too.
    let bytes = || standin::load().unwrap().counts().bytes;
    let before = bytes();
    let _scratch = car.engine.scratch(BATCH_MAX).unwrap();
    assert_eq!(bytes() - before, car.engine.scratch_bytes([BATCH_MAX].into_iter()));
}

/// A worker that ends waits for its two streams and for the changes so far, and for nothing else:
/// not once for each piece of memory, and not for all work of other workers.
#[test]
fn a_worker_that_ends_waits_once_for_each_of_its_streams() {
    let _turn = standin::alone();
    let gpu = standin::gpu(4);
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: only the stand-in counts waits");
    };
    let tables = tables(&gpu);
    let mut other = Car::new(&tables, Keys::Copied, 4);
    let keys = vec![2; BATCH_MAX];
    let offsets: Vec<u32> = (0..=BATCH_MAX as u32).collect();
    for seed in 5..9 {
        let mut car = Car::new(&tables, Keys::Copied, seed);
        // Its insert may go on after the answer.
        assert!(car.score(3, 1) > 0);
        other.step.lookup().begin(BATCH_MAX, |_| Bags::new(&keys, &offsets)).unwrap();
        let before = stand_in.counts().waits;
        drop(car);
        let waits = stand_in.counts().waits - before;
        assert_eq!(waits, 3);
        let mut statuses = vec![LookupStatus::default(); BATCH_MAX];
        let Car { step, misses, .. } = &mut other;
        assert!(!step.lookup().collect(misses, &mut statuses).unwrap() && misses.is_empty());
    }
}

/// What a request may move over the bus. A warp counts each 32 bytes that it reads or writes once.
struct BusBudget {
    batch: usize,
    /// Bytes read if all rows are cached, with the keys in place and copied.
    read: [u64; 2],
    /// Bytes written if all rows are cached: the scores, and counters.
    written: u64,
    /// Bytes read and written for each missing row, which has 32 bytes.
    of_missing: [u64; 2],
}

const BUS_BUDGETS: [BusBudget; 5] = [
    BusBudget { batch: 1, read: [1_792, 544], written: 64, of_missing: [250, 120] },
    BusBudget { batch: 3, read: [2_592, 1_864], written: 64, of_missing: [250, 120] },
    BusBudget { batch: 64, read: [25_728, 24_168], written: 544, of_missing: [290, 170] },
    BusBudget { batch: 65, read: [38_976, 48_232], written: 1_056, of_missing: [380, 175] },
    BusBudget {
        batch: BATCH_MAX,
        read: [55_104, 48_984],
        written: 1_088,
        of_missing: [1_000, 310],
    },
];

/// A request of `batch` has `batch * (8 * 26 + 4 * 13)` bytes of keys and dense values.
#[test]
fn a_request_stays_within_its_bytes_over_the_bus() {
    let _turn = standin::alone();
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: only the stand-in counts bytes");
    };
    for (seed, keys) in [Keys::InPlace, Keys::Copied].into_iter().enumerate() {
        let gpu = standin::gpu(seed as u64);
        let mut car = Car::new(&tables(&gpu), keys, seed as u64);
        for BusBudget { batch, read, written, of_missing } in BUS_BUDGETS {
            stand_in.bus_bytes();
            assert_eq!(car.score(batch, 2), 0);
            let hit = stand_in.bus_bytes();
            let missed = car.score(batch, 1) as u64;
            let rest = stand_in.bus_bytes();
            let said =
                format!("seed {seed}, {keys:?}, {batch}: {hit:?}; {missed} missed: {rest:?}");
            // Fewer than the keys and the scores would be no count.
            let least = [batch * TABLES * size_of::<u64>(), batch * size_of::<f32>()];
            assert!(hit[0] >= least[0] as u64 && hit[1] >= least[1] as u64, "{said}");
            assert!(hit[0] <= read[seed] && hit[1] <= written, "{said}");
            let most = [read[seed] + missed * of_missing[0], written + missed * of_missing[1]];
            assert!(rest[0] <= most[0] && rest[1] <= most[1], "{said}");
        }
    }
}

/// The insert of missing rows waits for the queries of other workers. The answer does not.
#[test]
fn an_answer_with_misses_waits_for_no_query_of_another_worker() {
    let _turn = standin::alone();
    let gpu = standin::gpu(9);
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: only the stand-in tells what has not run yet");
    };
    let tables = tables(&gpu);
    let [mut one, mut other] = [9, 10].map(|seed| Car::new(&tables, Keys::InPlace, seed));
    let keys: Vec<u64> = (0..BATCH_MAX as u64).map(|sample| 2 * (sample % (ROWS / 2))).collect();
    let offsets: Vec<u32> = (0..=BATCH_MAX as u32).collect();
    let (mut answered_before, mut missed, mut rounds) = (0, 0, 0);
    // Beside other work the query often ends first. An answer that waits for it never comes before.
    while answered_before == 0 && rounds < 2000 {
        rounds += 1;
        other.step.lookup().begin(BATCH_MAX, |_| Bags::new(&keys, &offsets)).unwrap();
        let misses = one.score(1, 1);
        missed += misses;
        answered_before += usize::from(misses > 0 && stand_in.counts().busy);
        let mut statuses = vec![LookupStatus::default(); BATCH_MAX];
        let Car { step, misses, .. } = &mut other;
        assert!(!step.lookup().collect(misses, &mut statuses).unwrap() && misses.is_empty());
    }
    assert!(missed > 0 && answered_before > 0, "{missed} misses in {rounds} rounds");
}
