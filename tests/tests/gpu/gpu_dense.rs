//! Compares the dense network on a GPU with the CPU's, to the bit: random networks of every
//! operator, and the networks of the repository. Runs on the stand-in for the driver, or with
//! HATCHBACK_GPU=real on the machine's GPU.

use hatchback_kernels::cuda::driver::{Gpu, Stream};
use hatchback_kernels::cuda::graph::Graphs;
use hatchback_kernels::cuda::memory::{Buffer, View};
use hatchback_kernels::dense::{Activation, DenseEngine, DenseError, InputPart};
use hatchback_kernels::gpu::lookup::RequestSize;
use hatchback_kernels::gpu::{
    DenseNetwork, DeviceEngine, DeviceOptions, DeviceScratch, GpuDense, GpuDenseError, Precision,
    RunShape,
};
use hatchback_kernels::simd::isa::Isa;
use hatchback_tests::models::repository;
use hatchback_tests::random::Random;
use hatchback_tests::standin;
use hatchback_tools::workload::onnx::{Attribute, Graph, Type, int, ints};
use std::sync::Arc;

const OWN: DeviceOptions = DeviceOptions {
    dense: GpuDense { tensorrt: None, precision: Precision::Exact },
    batch_max: 100,
    f16_inputs: Vec::new(),
    fed: Vec::new(),
};

/// A random network: inputs `x` `[batch, 4]` and `y` `[batch, 3, 4]`, some operators on the values
/// so far, and output `out`, which concatenates all of them. Values stay finite.
struct Maker {
    graph: Graph,
    random: Random,
    values: Vec<(String, Vec<usize>)>,
    names: usize,
}

impl Maker {
    fn network(seed: u64) -> Vec<u8> {
        let mut graph = Graph::default();
        graph.input("x", Type::Float, &[4]);
        graph.input("y", Type::Float, &[3, 4]);
        let values = vec![("x".to_owned(), vec![4]), ("y".to_owned(), vec![3, 4])];
        let mut maker = Self { graph, random: Random::new(seed), values, names: 0 };
        for _ in 0..3 + seed % 8 {
            maker.add();
        }
        let mut flat = Vec::new();
        for (name, shape) in maker.values.clone() {
            flat.push(if shape.len() == 1 {
                name
            } else {
                maker.node("Flatten", &[&name], &[], None)
            });
        }
        let flat: Vec<&str> = flat.iter().map(String::as_str).collect();
        maker.graph.node("Concat", &flat, "out", &[int("axis", 1)]);
        maker.graph.output("out", &[1]);
        maker.graph.file()
    }

    fn name(&mut self) -> String {
        self.names += 1;
        format!("v{}", self.names)
    }

    /// Adds a node. If its shape is given, later nodes may use its result.
    fn node(
        &mut self,
        op: &str,
        inputs: &[&str],
        with: &[Attribute],
        shape: Option<Vec<usize>>,
    ) -> String {
        let name = self.name();
        self.graph.node(op, inputs, &name, with);
        self.values.extend(shape.map(|shape| (name.clone(), shape)));
        name
    }

    fn floats(&mut self, shape: &[usize], value: impl Fn(&mut Random) -> f32) -> String {
        let name = self.name();
        let values: Vec<f32> =
            (0..shape.iter().product()).map(|_| value(&mut self.random)).collect();
        self.graph.floats(&name, shape, &values);
        name
    }

    fn integers(&mut self, values: &[i64]) -> String {
        let name = self.name();
        self.graph.integers(&name, &[values.len()], values);
        name
    }

    fn add(&mut self) {
        let at = self.random.below(self.values.len() as u64) as usize;
        let (x, shape) = self.values[at].clone();
        let last = *shape.last().unwrap();

        match self.random.below(13) {
            0 | 1 => self.product(&x, shape, last),
            11 => self.product_of_both(),
            12 => self.product_of_pairs(),
            2 => {
                let op = *self.random.pick(&["Relu", "Sigmoid", "Tanh"]);
                self.node(op, &[&x], &[], Some(shape));
            }
            3 | 4 => self.zip(&x, shape),
            5 => {
                let axis = 1 + self.random.below(shape.len() as u64) as usize;
                let mut out = shape;
                out[axis - 1] = 1;
                let axes = self.integers(&[axis as i64]);
                match self.random.one_in(2) {
                    true => self.node("ReduceSum", &[&x, &axes], &[], Some(out)),
                    false => {
                        self.node("ReduceMean", &[&x], &[ints("axes", &[axis as i64])], Some(out))
                    }
                };
            }
            6 => {
                let axis = 1 + self.random.below(shape.len() as u64) as usize;
                let mut out = shape;
                out[axis - 1] *= 2;
                self.node("Concat", &[&x, &x], &[int("axis", axis as i64)], Some(out));
            }
            7 => {
                let places: Vec<i64> = (0..1 + self.random.below(5))
                    .map(|_| self.random.below(last as u64) as i64)
                    .collect();
                let mut out = shape.clone();
                *out.last_mut().unwrap() = places.len();
                let places = self.integers(&places);
                self.node("Gather", &[&x, &places], &[int("axis", shape.len() as i64)], Some(out));
            }
            8 if shape.len() == 2 => {
                let turned = self.node(
                    "Transpose",
                    &[&x],
                    &[ints("perm", &[0, 2, 1])],
                    Some(vec![shape[1], shape[0]]),
                );
                let out = vec![shape[0], shape[0]];
                self.node("MatMul", &[&x, &turned], &[], Some(out));
            }
            9 if shape.len() == 2 => {
                let square = self.node("Transpose", &[&x], &[ints("perm", &[0, 2, 1])], None);
                let out = vec![shape[1], shape[1]];
                self.node("MatMul", &[&square, &x], &[], Some(out));
            }
            _ => {
                let two = self.floats(&[], |_| 2.0);
                let bounded = self.node("Tanh", &[&x], &[], None);
                self.node("Pow", &[&bounded, &two], &[], Some(shape));
            }
        }
    }

    /// Adds a product by weights of up to 70 columns, often followed by bias and Relu.
    fn product(&mut self, x: &str, mut shape: Vec<usize>, k: usize) {
        let n = 1 + self.random.below(70) as usize;
        let w = self.floats(&[k, n], Random::signed);
        let product = self.node("MatMul", &[x, &w], &[], None);
        *shape.last_mut().unwrap() = n;
        let bias = self.floats(&[n], Random::signed);
        let sum = self.node("Add", &[&product, &bias], &[], None);
        let op = *self.random.pick(&["Relu", "Tanh", "Identity"]);
        self.node(op, &[&sum], &[], Some(shape));
    }

    /// Adds a product of the columns of both inputs.
    fn product_of_both(&mut self) {
        let flat = self.node("Flatten", &["y"], &[], None);
        let sides = if self.random.one_in(2) { ["x", &flat] } else { [&*flat, "x"] };
        let both = self.node("Concat", &sides, &[int("axis", 1)], None);
        self.product(&both, vec![16], 16);
    }

    /// Adds a product of the products of every two rows of both inputs, as a DLRM has it.
    fn product_of_pairs(&mut self) {
        let axes = self.integers(&[1]);
        let row = self.node("Unsqueeze", &["x", &axes], &[], None);
        let rows = self.node("Concat", &["y", &row, "y"], &[int("axis", 1)], None);
        let turned = self.node("Transpose", &[&rows], &[ints("perm", &[0, 2, 1])], None);
        let square = self.node("MatMul", &[&rows, &turned], &[], None);
        let flat = self.node("Flatten", &[&square], &[], None);
        let below: Vec<i64> = (0..7).flat_map(|i| (0..i).map(move |j| 7 * i + j)).collect();
        let picks = self.integers(&below);
        let pairs = self.node("Gather", &[&flat, &picks], &[int("axis", 1)], None);
        self.product(&pairs, vec![below.len()], below.len());
    }

    fn zip(&mut self, x: &str, shape: Vec<usize>) {
        let op = *self.random.pick(&["Add", "Sub", "Mul"]);
        let other = match self.random.below(4) {
            0 => self.floats(&[], |r| 2.0 + r.signed()),
            1 => self.floats(&[*shape.last().unwrap()], Random::signed),
            2 => {
                // A computed column, which is broadcast.
                let axes = [shape.len() as i64];
                self.node("ReduceMean", &[x], &[ints("axes", &axes)], None)
            }
            _ => x.to_owned(),
        };
        let bounded = self.node("Tanh", &[x], &[], None);
        let divided = match self.random.one_in(3) {
            true => {
                let divisor = self.floats(&[*shape.last().unwrap()], |r| 1.5 + r.signed());
                self.node("Div", &[&bounded, &divisor], &[], None)
            }
            false => bounded,
        };
        let (left, right) = if self.random.one_in(2) { (divided, other) } else { (other, divided) };
        self.node(op, &[&left, &right], &[], Some(shape));
    }
}

/// Runs `n` samples on the device, directly or as a graph.
fn on_device(
    gpu: &Arc<Gpu>,
    engine: &DeviceEngine,
    n: usize,
    inputs: &[Vec<f32>],
    recorded: bool,
) -> Vec<f32> {
    shape_on_device(gpu, engine, RunShape::from(n), inputs, recorded)
}

/// Runs the samples of `shape` on the device, directly or as a graph.
fn shape_on_device(
    gpu: &Arc<Gpu>,
    engine: &DeviceEngine,
    shape: RunShape<'_>,
    inputs: &[Vec<f32>],
    recorded: bool,
) -> Vec<f32> {
    let n = shape.size.samples;
    let stream = gpu.stream().unwrap();
    let mut fed = Vec::new();
    for values in inputs {
        let buffer = gpu.buffer(values.len()).unwrap();
        stream.upload(values, &buffer, 0).unwrap();
        fed.push(buffer);
    }

    let scores = gpu.buffer::<f32>(n * engine.outputs()).unwrap();
    let mut out = vec![f32::NAN; scores.len()];
    let mut scratch = engine.scratch(n).unwrap();

    if recorded {
        let mut graphs = Graphs::new((stream, fed, scores, scratch));
        let work =
            |(stream, fed, scores, scratch): &mut (Stream, Vec<_>, Buffer<f32>, DeviceScratch)| {
                engine.enqueue(stream, shape, fed, scores.view(), scratch)
            };
        graphs.record(|named| &named.0, work).unwrap();

        let counts = || standin::load().map(|s| s.counts());
        let before = counts();
        graphs.launch(0, |named| &named.0, |_, launch| launch()).unwrap();

        if let (Some(before), Some(after)) = (before, counts()) {
            let asked = [
                after.launches - before.launches,
                after.waits - before.waits,
                after.copies - before.copies,
            ];
            assert_eq!(asked, [1, 0, 0], "launches, waits, copies");
        }

        let (stream, _, scores, _) = graphs.resources();
        stream.download(scores, 0, &mut out).unwrap();
    } else {
        engine.enqueue(&stream, shape, &fed, scores.view(), &mut scratch).unwrap();
        stream.download(&scores, 0, &mut out).unwrap();
    }

    out
}

/// Returns the bits of `values`; all NaN are one, because processors choose its bits.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| if v.is_nan() { f32::NAN } else { *v }.to_bits()).collect()
}

/// Returns `n` samples of `width` values, of which some have an infinite one.
fn samples_of(random: &mut Random, n: usize, width: usize) -> Vec<f32> {
    let mut values: Vec<f32> = (0..n * width)
        .map(|_| if random.one_in(6) { -0.0 } else { 3.0 * random.signed() })
        .collect();
    for sample in values.chunks_mut(width) {
        if random.one_in(5) {
            sample[random.below(width as u64) as usize] = f32::INFINITY;
        }
    }
    values
}

fn compare(gpu: &Arc<Gpu>, what: &str, network: &DenseNetwork, batches: &[usize]) {
    let DenseNetwork { onnx, inputs, output, activation, .. } = *network;
    let cpu = DenseEngine::load(onnx.to_vec(), inputs, output, activation).unwrap();
    let options = DeviceOptions { fed: vec![0], ..OWN };
    let engine =
        DeviceEngine::load(gpu, network, &options).unwrap_or_else(|e| panic!("{what}: {e}"));
    assert!(engine.is_exact() && engine.outputs() == cpu.outputs());
    let mut random = Random::new(batches.len() as u64);
    for &n in batches {
        let fed: Vec<Vec<f32>> =
            inputs.iter().map(|(_, width)| samples_of(&mut random, n, *width)).collect();
        let mut expected = vec![0.0; n * cpu.outputs()];
        cpu.run(n, &fed, &mut expected, &mut cpu.scratch(n)).unwrap();
        for recorded in [false, true] {
            let got = on_device(gpu, &engine, n, &fed, recorded);
            assert_eq!(bits(&got), bits(&expected), "{what}, batch {n}, as a graph: {recorded}");
        }
    }
}

#[test]
fn random_networks_give_the_cpus_bits() {
    let _turn = standin::alone();
    let activations = [Activation::None, Activation::Sigmoid];
    for seed in 0..30 {
        let gpu = standin::gpu(seed);
        let onnx = Maker::network(seed);
        let inputs = [("x", 4), ("y", 12)];
        let activation = activations[seed as usize % 2];
        let network =
            DenseNetwork { onnx: &onnx, inputs: &inputs, parts: &[], output: "out", activation };
        compare(&gpu, &format!("seed {seed}"), &network, &[1, 2, 40]);
    }
}

/// What only shared inputs reach is computed once a request, and the scores are the CPU's.
#[test]
fn random_networks_with_shared_inputs_give_the_cpus_bits() {
    let _turn = standin::alone();
    let has_cublas = standin::load_cublas();
    for seed in 0..40 {
        let (gpu, onnx) = (standin::gpu(seed), Maker::network(seed));
        let (inputs, activation) = ([("x", 4), ("y", 12)], Activation::None);
        let shared = [[true, false], [false, true], [true, true]][seed as usize % 3];
        let isa = Isa::detect();
        let part = |input, width, shared| InputPart { input, width, shared, vectors: true };
        let parts = match seed % 4 {
            0 => vec![part(0, 1, true), part(0, 3, false), part(1, 8, true), part(1, 4, false)],
            _ => InputPart::whole(&inputs, &shared),
        };
        let cpu = DenseEngine::load_for(isa, onnx.clone(), &inputs, &parts, "out", activation);
        let cpu = cpu.unwrap();
        let (inputs, output) = (&inputs, "out");
        let network = DenseNetwork { onnx: &onnx, inputs, parts: &parts, output, activation };
        let options = DeviceOptions { fed: vec![0], ..OWN };
        let engine = DeviceEngine::load(&gpu, &network, &options).unwrap();
        assert!(engine.is_exact());
        let by_cublas = DeviceEngine::load(&gpu, &network, &with(Precision::F32)).unwrap();
        let by_cublas = (has_cublas && !by_cublas.is_exact()).then_some(by_cublas);
        let mut random = Random::new(seed);
        for ends in [&[1][..], &[70], &[1, 2, 9], &[30, 31, 45]] {
            let (n, requests) = (ends[ends.len() - 1], ends.len());
            // A device's buffer has room for all samples.
            let value = |random: &mut Random| 3.0 * random.signed();
            let values = |n: usize| (0..n).map(|_| value(&mut random)).collect::<Vec<f32>>();
            let fed: Vec<Vec<f32>> = parts.iter().map(|part| n * part.width).map(values).collect();
            let mut expected = vec![0.0; n * cpu.outputs()];
            cpu.run_requests(ends, &fed, &mut expected, &mut cpu.scratch(n)).unwrap();
            let mut request_of = gpu.mapped(n).unwrap();
            let request = |sample: usize| ends.partition_point(|&end| end <= sample) as u32;
            (0..n).for_each(|sample| request_of[sample] = request(sample));
            let size = RequestSize { samples: n, requests };
            let shape = RunShape { size, request_of: request_of.view() };
            for recorded in [false, true] {
                let got = shape_on_device(&gpu, &engine, shape, &fed, recorded);
                assert_eq!(bits(&got), bits(&expected), "seed {seed}, {parts:?}, {ends:?}");
            }
            if let Some(by_cublas) = &by_cublas {
                let got = shape_on_device(&gpu, by_cublas, shape, &fed, false);
                let far = |(a, b): (&f32, &f32)| (a - b).abs() / b.abs().max(1.0);
                let most = got.iter().zip(&expected).map(far).fold(0.0, f32::max);
                assert!(most < 1e-2, "seed {seed}, {parts:?}, {ends:?}: {most}");
            }
        }
    }
}

/// Operands of all alignments, in the tiles of every kernel for products.
#[test]
fn products_of_two_operands_side_by_side_give_the_cpus_bits() {
    let _turn = standin::alone();
    for (seed, [x, y]) in (0..).zip([[3, 5], [2, 6], [63, 1], [128, 20]]) {
        let (mut graph, mut random) = (Graph::default(), Random::new(seed));
        graph.input("x", Type::Float, &[x]);
        graph.input("y", Type::Float, &[y]);
        graph.node("Concat", &["x", "y"], "both", &[int("axis", 1)]);
        let weights: Vec<f32> = (0..(x + y) * 70).map(|_| random.signed()).collect();
        graph.floats("weights", &[x + y, 70], &weights);
        graph.node("MatMul", &["both", "weights"], "out", &[]);
        graph.output("out", &[70]);
        compare_whole(seed, graph, [x, y]);
    }
}

/// A layer of a cross network is one product, with a factor and an addend of each result.
#[test]
fn products_with_factors_and_addends_give_the_cpus_bits() {
    let _turn = standin::alone();
    let activations = [Activation::None, Activation::Sigmoid];
    for (seed, [x, y]) in (0..).zip([[3, 5], [70, 33], [16, 64], [128, 20]]) {
        let (mut graph, mut random) = (Graph::default(), Random::new(seed));
        graph.input("x", Type::Float, &[x]);
        graph.input("y", Type::Float, &[y]);
        let mut floats = |name: &str, shape: &[usize]| {
            let values: Vec<f32> = (0..shape.iter().product()).map(|_| random.signed()).collect();
            graph.floats(name, shape, &values);
        };
        ["of x", "again"].iter().for_each(|name| floats(name, &[x, y]));
        ["first", "second"].iter().for_each(|name| floats(name, &[y, y]));
        floats("bias", &[y]);
        let ends_crossed = seed % 2 == 0;
        graph.node("MatMul", &["x", "of x"], "x by weights", &[]);
        graph.node("Add", &["x by weights", "y"], "begin", &[]);
        graph.node("MatMul", &["begin", "first"], "product", &[]);
        // Some layers rectify, and the operands are in any order.
        graph.node(if ends_crossed { "Relu" } else { "Identity" }, &["product"], "one", &[]);
        graph.node("Mul", &["begin", "one"], "crossed", &[]);
        graph.node("Add", &["crossed", "begin"], "sum", &[]);
        graph.node("Gemm", &["sum", "second", "bias"], "two", &[]);
        graph.node("Mul", &["two", "begin"], "crossed again", &[]);
        let last = if ends_crossed { "out" } else { "last" };
        graph.node("Add", &["sum", "crossed again"], last, &[]);
        if !ends_crossed {
            // A product that does not wait for its factor stays alone.
            graph.node("MatMul", &["x", "again"], "x again", &[]);
            graph.node("Mul", &["x again", last], "out", &[]);
        }
        graph.output("out", &[y]);
        let (onnx, inputs) = (graph.file(), [("x", x), ("y", y)]);
        for activation in activations {
            let network = DenseNetwork {
                onnx: &onnx,
                inputs: &inputs,
                parts: &[],
                output: "out",
                activation,
            };
            let gpu = standin::gpu(seed);
            compare(&gpu, &format!("{x} and {y} columns"), &network, &[1, 17, 100]);
        }
    }
}

/// A launch has wide steps only if no thread waits for another.
#[test]
fn wide_and_narrow_steps_give_the_cpus_bits() {
    let _turn = standin::alone();
    for (seed, [x, y]) in (0..).zip([[1100, 20], [20, 1100], [1024, 1025], [30, 2]]) {
        let mut graph = Graph::default();
        graph.input("x", Type::Float, &[x]);
        graph.input("y", Type::Float, &[y]);
        graph.integers("one", &[1], &[1]);
        graph.node("Mul", &["x", "x"], "squares", &[]);
        graph.node("Add", &["squares", "x"], "sums", &[]);
        graph.node("ReduceSum", &["sums", "one"], "total", &[]);
        graph.node("Relu", &["sums"], "rectified", &[]);
        graph.node("Mul", &["y", "total"], "scaled", &[]);
        graph.node("Concat", &["rectified", "scaled", "y"], "out", &[int("axis", 1)]);
        graph.output("out", &[x + 2 * y]);
        compare_whole(seed, graph, [x, y]);
    }
}

/// Long chains of wide nodes reuse their buffers.
#[test]
fn a_chain_of_wide_steps_keeps_few_buffers() {
    let _turn = standin::alone();
    let chain = |nodes: usize, x: usize| {
        let mut graph = Graph::default();
        graph.input("x", Type::Float, &[x]);
        graph.input("y", Type::Float, &[1]);
        let mut last = "x".to_owned();
        for node in 0..nodes {
            let (next, op) = (format!("n{node}"), ["Add", "Mul"][node % 2]);
            graph.node(op, &[&last, "x"], &next, &[]);
            last = next;
        }
        graph.node("Mul", &[&last, "y"], "out", &[]);
        graph.output("out", &[x]);
        graph
    };
    let gpu = standin::gpu(5);
    let scratch = |nodes: usize, x: usize| {
        let (onnx, inputs) = (chain(nodes, x).file(), [("x", x), ("y", 1)]);
        let (output, activation) = ("out", Activation::None);
        let network = DenseNetwork { onnx: &onnx, inputs: &inputs, parts: &[], output, activation };
        let options = DeviceOptions { fed: vec![0], ..OWN };
        DeviceEngine::load(&gpu, &network, &options).unwrap().scratch_bytes([1].into_iter())
    };
    assert_eq!(scratch(30, 1500), scratch(3, 1500));
    compare_whole(5, chain(30, 1500), [1500, 1]);
    compare_whole(6, chain(30, 700), [700, 1]);
}

fn compare_whole(seed: u64, graph: Graph, [x, y]: [usize; 2]) {
    let (onnx, inputs) = (graph.file(), [("x", x), ("y", y)]);
    let (output, activation) = ("out", Activation::None);
    let network = DenseNetwork { onnx: &onnx, inputs: &inputs, parts: &[], output, activation };
    compare(&standin::gpu(seed), &format!("{x} and {y} columns"), &network, &[1, 17, 100]);
}

#[test]
fn the_networks_of_the_tree_give_the_cpus_bits() {
    let _turn = standin::alone();
    let gpu = standin::gpu(7);
    let networks: [(&str, &[(&str, usize)]); 5] = [
        ("tests/data/families/dlrm", &[("dense", 3), ("emb", 48)]),
        ("tests/data/families/dcnv2", &[("dense", 3), ("emb", 28)]),
        ("tests/data/families/deepfm", &[("dense", 3), ("first", 4), ("second", 20)]),
        ("tests/data/families/wide_deep", &[("dense", 3), ("wide", 2), ("deep", 35)]),
        ("tools/demo/coupon", &[("dense", 7), ("emb", 288)]),
    ];
    for (path, inputs) in networks {
        let onnx = std::fs::read(repository(path).join("dense.onnx")).unwrap();
        let activation = Activation::Sigmoid;
        let network = DenseNetwork { onnx: &onnx, inputs, parts: &[], output: "logit", activation };
        compare(&gpu, path, &network, &[1, 7, 65]);
    }
}

fn with(precision: Precision) -> DeviceOptions {
    DeviceOptions { dense: GpuDense { tensorrt: None, precision }, ..OWN }
}

/// cuBLAS adds in another order, so its scores are the CPU's within the bound, recorded or not. A
/// missing library is reported.
#[test]
fn products_by_cublas_are_close_to_the_cpus() {
    let _turn = standin::alone();
    let gpu = standin::gpu(7);
    let onnx = std::fs::read(repository("tools/demo/coupon/dense.onnx")).unwrap();
    let inputs = [("dense", 7), ("emb", 288)];
    let activation = Activation::Sigmoid;
    let network =
        DenseNetwork { onnx: &onnx, inputs: &inputs, parts: &[], output: "logit", activation };
    let options = with(Precision::F32);
    let load = || DeviceEngine::load(&gpu, &network, &options).unwrap();
    let without = load();

    if !standin::load_cublas() {
        return println!(
            "SKIPPED: the machine's own cuBLAS is for the benchmark: {}",
            without.runs_on()
        );
    }

    // The environment may put the stand-in on the library path; then the first attempt finds it.
    if without.is_exact() {
        let why = &without.rejected()[0];
        assert!(
            why.contains("no cuBLAS on this machine") && why.contains("libcublas.so.13"),
            "{why}"
        );
    }

    let engine = load();
    assert!(
        !engine.is_exact() && engine.runs_on().contains("cuBLAS") && engine.rejected().is_empty()
    );

    let mut scratch = engine.scratch(2).unwrap();
    let refused = engine.enqueue(&gpu.stream().unwrap(), 3, &[], View::none(), &mut scratch);
    assert!(matches!(refused, Err(GpuDenseError::Dense(DenseError::Batch { batch: 3, max: 2 }))));

    std::thread::spawn(move || drop(scratch)).join().unwrap();
    let cpu = DenseEngine::load(onnx.clone(), &inputs, "logit", activation).unwrap();
    let mut random = Random::new(4);
    let mut apart = 0;

    for n in [1, 9, 64] {
        let fed =
            inputs.map(|(_, width)| (0..n * width).map(|_| random.signed()).collect::<Vec<f32>>());
        let mut expected = vec![0.0; n * cpu.outputs()];
        cpu.run(n, &fed, &mut expected, &mut cpu.scratch(n)).unwrap();
        for recorded in [false, true] {
            let got = on_device(&gpu, &engine, n, &fed, recorded);
            assert!(
                got.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5),
                "{got:?}, {expected:?}"
            );
            apart += usize::from(bits(&got) != bits(&expected));
        }
    }

    assert!(apart > 0, "sums in another order have other bits");
}

/// cuBLASLt adds the bias and applies Relu in the launch of a product. Where it refuses, they are
/// launches of their own, and the scores are within the same bound.
#[test]
fn a_product_that_ends_with_bias_and_relu_is_one_launch() {
    let _turn = standin::alone();
    let gpu = standin::gpu(7);
    if !standin::load_cublas() {
        return println!("SKIPPED: the machine's own cuBLAS is for the benchmark");
    }
    let onnx = std::fs::read(repository("tools/demo/coupon/dense.onnx")).unwrap();
    let inputs = [("dense", 7), ("emb", 288)];
    let activation = Activation::Sigmoid;
    let network =
        DenseNetwork { onnx: &onnx, inputs: &inputs, parts: &[], output: "logit", activation };
    let cpu = DenseEngine::load(onnx.clone(), &inputs, "logit", activation).unwrap();
    let mut random = Random::new(5);
    let fed = inputs.map(|(_, width)| (0..9 * width).map(|_| random.signed()).collect::<Vec<_>>());
    let mut expected = vec![0.0; 9 * cpu.outputs()];
    cpu.run(9, &fed, &mut expected, &mut cpu.scratch(9)).unwrap();

    let mut launches = [0; 2];
    for refuse in [false, true] {
        standin::refuse_epilogues(refuse);
        let engine = DeviceEngine::load(&gpu, &network, &with(Precision::F32)).unwrap();
        assert!(engine.runs_on().contains("cuBLAS"), "{:?}", engine.rejected());
        let before = gpu.calls().launches;
        let direct = on_device(&gpu, &engine, 9, &fed, false);
        launches[usize::from(refuse)] = gpu.calls().launches - before;
        let recorded = on_device(&gpu, &engine, 9, &fed, true);
        for got in [direct, recorded] {
            let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
            assert!(got.iter().zip(&expected).all(close), "{got:?}, {expected:?}");
        }
    }
    standin::refuse_epilogues(false);
    // The network has five layers with weights; none of them scales. Our kernels compute the last.
    assert_eq!(launches[1] - launches[0], 4, "{launches:?}");
    assert_eq!(standin::epilogue_objects(), 0);
}

/// On the stand-in cuBLAS rounds factors as a tensor core does.
#[test]
fn each_precision_keeps_its_own_bound() {
    let _turn = standin::alone();
    let gpu = standin::gpu(7);
    if !standin::load_cublas() {
        return println!("SKIPPED: the machine's own cuBLAS is for the benchmark");
    }
    let onnx = std::fs::read(repository("tools/demo/coupon/dense.onnx")).unwrap();
    let inputs = [("dense", 7), ("emb", 288)];
    let activation = Activation::Sigmoid;
    let network =
        DenseNetwork { onnx: &onnx, inputs: &inputs, parts: &[], output: "logit", activation };
    let cpu = DenseEngine::load(onnx.clone(), &inputs, "logit", activation).unwrap();
    let mut random = Random::new(9);
    let fed =
        inputs.map(|(_, width)| (0..70 * width).map(|_| random.signed()).collect::<Vec<f32>>());
    let mut expected = vec![0.0; 70 * cpu.outputs()];
    cpu.run(70, &fed, &mut expected, &mut cpu.scratch(70)).unwrap();

    let differences =
        [Precision::Exact, Precision::F32, Precision::Tf32, Precision::F16].map(|p| {
            let engine = DeviceEngine::load(&gpu, &network, &with(p)).unwrap();
            assert_eq!(engine.is_exact(), p == Precision::Exact, "{}", engine.runs_on());
            assert!(p == Precision::Exact || engine.runs_on().ends_with(p.name()));
            let difference = engine.difference(&fed, &expected).unwrap();
            assert!(difference <= p.difference_bound(), "{}: {difference}", p.name());
            difference
        });
    assert_eq!(differences[0], 0.0);
    // Factors of 11 bits are the same in both types here, and far worse than f32.
    assert!(differences[1] < 1e-5 && differences[2] > 1e-5, "{differences:?}");
    assert!(differences[3] > 1e-5, "{differences:?}");
}

/// The products of large factors that nearly cancel each other need more than 11 bits.
#[test]
fn a_network_that_needs_more_bits_than_the_precision_has_runs_exactly() {
    let _turn = standin::alone();
    let gpu = standin::gpu(7);
    if !standin::load_cublas() {
        return println!("SKIPPED: the machine's own cuBLAS is for the benchmark");
    }
    let mut graph = Graph::default();
    graph.input("x", Type::Float, &[1]);
    graph.node("Concat", &["x", "x"], "twice", &[int("axis", 1)]);
    // More columns than our kernels compute beside cuBLAS.
    graph.floats("w", &[2, 40], &[[100.1; 40], [-100.0; 40]].concat());
    graph.node("MatMul", &["twice", "w"], "out", &[]);
    graph.output("out", &[40]);
    let onnx = graph.file();
    let network = DenseNetwork {
        onnx: &onnx,
        inputs: &[("x", 1)],
        parts: &[],
        output: "out",
        activation: Activation::None,
    };
    for (precision, exact) in [(Precision::F32, false), (Precision::Tf32, true)] {
        let engine = DeviceEngine::load(&gpu, &network, &with(precision)).unwrap();
        assert_eq!(engine.is_exact(), exact, "{}: {:?}", engine.runs_on(), engine.rejected());
        assert!(!exact || engine.rejected()[0].contains("tf32"), "{:?}", engine.rejected());
    }
}

#[test]
fn an_operator_without_a_kernel_is_refused_by_name() {
    let _turn = standin::alone();
    let gpu = standin::gpu(7);
    let mut graph = Graph::default();
    graph.input("x", Type::Float, &[4]);
    graph.node("Abs", &["x"], "out", &[]);
    graph.output("out", &[4]);
    let onnx = graph.file();
    let network = DenseNetwork {
        onnx: &onnx,
        inputs: &[("x", 4)],
        parts: &[],
        output: "out",
        activation: Activation::None,
    };
    let said = DeviceEngine::load(&gpu, &network, &OWN).err().unwrap().to_string();
    assert!(said.contains("Abs"), "{said}");
}
