//! `bench request --shared`: the dense networks of requests for 256 candidates of one driver. The
//! engine that knows which inputs are shared computes their part once. Another engine, and ONNX
//! Runtime, get a copy of them for each candidate. Never reads rows.

use super::bars::{Bar, bars_table};
use super::peer::{self, Peer, PeerAbout, PeerScores, RoundTimes, cpu_us, percentile};
use super::results::{BenchReport, HostMachine};
use anyhow::{Context, Result, ensure};
use hatchback_kernels::dense::{Activation, DenseEngine, InputPart, MultiplyAdds};
use hatchback_kernels::simd::isa::Isa;
use hatchback_tools::report::Json;
use hatchback_tools::report::metrics::largest_difference;
use hatchback_tools::workload::onnx::{Attribute, Graph, Type, int, ints};
use hatchback_tools::workload::synthetic::push_normals;
use hatchback_tools::{report, say};
use serde::Serialize;
use serde_json::json;
use std::path::Path;

/// Samples of the request.
const CANDIDATES: usize = 256;
/// What the measured ratio may exceed the counted one by.
const RATIO_MARGIN: f64 = 0.1;
/// The largest measured ratio of HSTU, whose history is nearly all of its work.
const HSTU_RATIO: f64 = 0.1;
/// How far our lead over ONNX Runtime must grow, of what the counted ratio allows.
const LEAD_SHARE: f64 = 0.9;
/// Largest difference of a score from that with copies, as a part of the largest score.
const SCORE_DIFFERENCE: f64 = 1e-4;
/// Positions of the histories of DIN and HSTU.
const DIN_HISTORY: usize = 100;
const HSTU_HISTORY: usize = 200;

/// The times of one family.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SharedFigures {
    /// Name of the family.
    pub family: &'static str,
    /// CPU time of a request with a copy of the shared inputs for each candidate, median, µs.
    pub copied_us: f64,
    /// The same with shared inputs.
    pub shared_us: f64,
    /// CPU time of ONNX Runtime with copies, median, µs; none without its environment.
    pub peer_us: Option<f64>,
    /// The multiply-adds with shared inputs, over those with copies.
    pub counted_ratio: f64,
}

impl SharedFigures {
    fn ratio(&self) -> f64 {
        self.shared_us / self.copied_us
    }

    fn bar(&self) -> Bar {
        let name = format!("p50 of shared / copied, {}, {CANDIDATES} candidates", self.family);
        let counted = self.counted_ratio + RATIO_MARGIN;
        Bar::at_most(name, self.ratio(), if self.family == "HSTU" { HSTU_RATIO } else { counted })
    }

    fn lead(&self) -> Bar {
        let name = format!("p50 of ONNX Runtime / ours, {}, {CANDIDATES} candidates", self.family);
        match self.peer_us {
            Some(peer_us) => {
                let copied = peer_us / self.copied_us;
                let least = LEAD_SHARE * copied / self.counted_ratio;
                Bar::at_least(name, peer_us / self.shared_us, least)
            }
            None => Bar::not_run(name, 0.0, peer::SETUP),
        }
    }
}

/// A network under construction, with random weights.
#[derive(Default)]
struct Network {
    graph: Graph,
    values: u64,
    /// Name, width, and whether all candidates of a request have the same values.
    inputs: Vec<(&'static str, usize, bool)>,
}

impl Network {
    fn input(&mut self, name: &'static str, shape: &[usize], is_shared: bool) {
        self.graph.input(name, Type::Float, shape);
        self.inputs.push((name, shape.iter().product(), is_shared));
    }

    fn name(&mut self) -> String {
        self.values += 1;
        format!("value {}", self.values)
    }

    fn node(&mut self, operator: &str, inputs: &[&str], attributes: &[Attribute]) -> String {
        let name = self.name();
        self.graph.node(operator, inputs, &name, attributes)
    }

    fn weights(&mut self, shape: &[usize]) -> String {
        let (name, n) = (self.name(), shape.iter().product::<usize>());
        let (mut values, deviation) = (Vec::new(), (2.0 / shape[0] as f32).sqrt());
        push_normals(self.values << 32, n.next_multiple_of(2), deviation, &mut values);
        self.graph.floats(&name, shape, &values[..n]);
        name
    }

    fn integers(&mut self, values: &[i64]) -> String {
        let name = self.name();
        self.graph.integers(&name, &[values.len()], values);
        name
    }

    fn reshape(&mut self, x: &str, shape: &[i64]) -> String {
        let shape = self.integers(shape);
        self.node("Reshape", &[x, &shape], &[])
    }

    fn sum(&mut self, x: &str) -> String {
        let axis = self.integers(&[1]);
        self.node("ReduceSum", &[x, &axis], &[int("keepdims", 0)])
    }

    fn silu(&mut self, x: &str) -> String {
        let sigmoid = self.node("Sigmoid", &[x], &[]);
        self.node("Mul", &[x, &sigmoid], &[])
    }

    fn layer(&mut self, x: &str, [from, to]: [usize; 2]) -> String {
        let (weights, bias) = (self.weights(&[from, to]), self.weights(&[to]));
        let product = self.node("MatMul", &[x, &weights], &[]);
        self.node("Add", &[&product, &bias], &[])
    }

    /// Adds layers of these widths, with a Relu between two of them.
    fn layers(&mut self, x: &str, widths: &[usize]) -> String {
        let mut x = self.layer(x, [widths[0], widths[1]]);
        for pair in widths[1..].windows(2) {
            let relu = self.node("Relu", &[&x], &[]);
            x = self.layer(&relu, [pair[0], pair[1]]);
        }
        x
    }

    /// Names the value `x` `[batch, outputs]` as the output.
    fn with_output(mut self, x: &str, outputs: usize) -> Self {
        self.graph.node("Identity", &[x], "logit", &[]);
        self.graph.output("logit", &[outputs]);
        self
    }
}

/// A DLRM with 17 of 26 rows and the dense features of the driver.
fn dlrm() -> Network {
    let mut network = Network::default();
    network.input("dense", &[13], true);
    network.input("driver", &[17, 128], true);
    network.input("candidate", &[9, 128], false);
    let x = network.layers("dense", &[13, 512, 256, 128]);
    let x = network.node("Relu", &[&x], &[]);
    let row = network.reshape(&x, &[-1, 1, 128]);
    let all = network.node("Concat", &[&row, "driver", "candidate"], &[int("axis", 1)]);
    let turned = network.node("Transpose", &[&all], &[ints("perm", &[0, 2, 1])]);
    let products = network.node("MatMul", &[&all, &turned], &[]);
    let line = network.reshape(&products, &[-1, 27 * 27]);
    let below: Vec<i64> = (0..27).flat_map(|i| (0..i).map(move |j| i * 27 + j)).collect();
    let below = network.integers(&below);
    let pairs = network.node("Gather", &[&line, &below], &[int("axis", 1)]);
    let both = network.node("Concat", &[&x, &pairs], &[int("axis", 1)]);
    let logit = network.layers(&both, &[128 + 351, 1024, 1024, 512, 256, 1]);
    network.with_output(&logit, 1)
}

/// A DeepFM with 26 of 39 features of the driver.
fn deepfm() -> Network {
    let mut network = Network::default();
    network.input("driver", &[26, 16], true);
    network.input("candidate", &[13, 16], false);
    let all = network.node("Concat", &["driver", "candidate"], &[int("axis", 1)]);
    let sum = network.sum(&all);
    let square_of_sum = network.node("Mul", &[&sum, &sum], &[]);
    let squares = network.node("Mul", &[&all, &all], &[]);
    let sum_of_squares = network.sum(&squares);
    let both = network.node("Sub", &[&square_of_sum, &sum_of_squares], &[]);
    let both = network.reshape(&both, &[-1, 16, 1]);
    let second = network.sum(&both);
    let line = network.reshape(&all, &[-1, 39 * 16]);
    let deep = network.layers(&line, &[39 * 16, 400, 400, 400, 1]);
    let logit = network.node("Add", &[&second, &deep], &[]);
    network.with_output(&logit, 1)
}

/// An MMoE of eight experts and two tasks with 26 of 39 features of the driver.
fn mmoe() -> Network {
    let mut network = Network::default();
    network.input("driver", &[26 * 16], true);
    network.input("candidate", &[13 * 16], false);
    let x = network.node("Concat", &["driver", "candidate"], &[int("axis", 1)]);
    let experts: Vec<String> = (0..8)
        .map(|_| {
            let expert = network.layers(&x, &[39 * 16, 256, 128]);
            let expert = network.node("Relu", &[&expert], &[]);
            network.reshape(&expert, &[-1, 1, 128])
        })
        .collect();
    let experts: Vec<&str> = experts.iter().map(String::as_str).collect();
    let experts = network.node("Concat", &experts, &[int("axis", 1)]);
    let logits = [(); 2].map(|()| {
        let gate = network.layer(&x, [39 * 16, 8]);
        let gate = network.node("Softmax", &[&gate], &[int("axis", 1)]);
        let gate = network.reshape(&gate, &[-1, 1, 8]);
        let mixed = network.node("MatMul", &[&gate, &experts], &[]);
        let mixed = network.reshape(&mixed, &[-1, 128]);
        network.layers(&mixed, &[128, 64, 1])
    });
    let logits = network.node("Concat", &[&logits[0], &logits[1]], &[int("axis", 1)]);
    network.with_output(&logits, 2)
}

/// A DIN whose driver has a history.
fn din() -> Network {
    let (mut network, n) = (Network::default(), DIN_HISTORY);
    network.input("dense", &[13], true);
    network.input("history", &[n, 64], true);
    network.input("candidate", &[64], false);
    let target = network.reshape("candidate", &[-1, 1, 64]);
    let shape = network.integers(&[1, n as i64, 64]);
    let spread = network.node("Expand", &[&target, &shape], &[]);
    let difference = network.node("Sub", &[&spread, "history"], &[]);
    let product = network.node("Mul", &[&spread, "history"], &[]);
    let parts = [&spread, "history", &difference, &product];
    let all = network.node("Concat", &parts, &[int("axis", 2)]);
    let hidden = network.layer(&all, [4 * 64, 64]);
    let slope = network.weights(&[64]);
    let hidden = network.node("PRelu", &[&hidden, &slope], &[]);
    let weights = network.layer(&hidden, [64, 1]);
    let weights = network.reshape(&weights, &[-1, 1, n as i64]);
    let weights = network.node("Softmax", &[&weights], &[int("axis", 2)]);
    let interest = network.node("MatMul", &[&weights, "history"], &[]);
    let interest = network.reshape(&interest, &[-1, 64]);
    let all = network.node("Concat", &["dense", "candidate", &interest], &[int("axis", 1)]);
    let logit = network.layers(&all, &[13 + 128, 200, 80, 1]);
    network.with_output(&logit, 1)
}

/// A ranker of two blocks of HSTU. Candidates attend to the driver's history, and it to itself.
fn hstu() -> Network {
    let (mut network, n) = (Network::default(), HSTU_HISTORY);
    network.input("history", &[n, 64], true);
    network.input("candidate", &[64], false);
    let mask: Vec<f32> = (0..n * n).map(|i| f32::from(u8::from(i % n <= i / n))).collect();
    let mask: Vec<f32> = mask.iter().map(|seen| seen / n as f32).collect();
    network.graph.floats("causal", &[n, n], &mask);
    network.graph.floats("mean", &[1, 1], &[1.0 / n as f32]);
    let mut history = "history".to_owned();
    let mut target = network.reshape("candidate", &[-1, 1, 64]);
    for _ in 0..2 {
        let weights = [(); 5].map(|()| network.weights(&[64, 64]));
        let project = |network: &mut Network, x: &str| {
            [0, 1, 2, 3].map(|i| {
                let product = network.node("MatMul", &[x, &weights[i]], &[]);
                network.silu(&product)
            })
        };
        let [gate, query, key, value] = project(&mut network, &history);
        let key = network.node("Transpose", &[&key], &[ints("perm", &[0, 2, 1])]);
        let [own_gate, own_query, ..] = project(&mut network, &target);
        let attend = |network: &mut Network, [x, gate, query, mask]: [&str; 4]| {
            let scores = network.node("MatMul", &[query, &key], &[]);
            let scores = network.silu(&scores);
            let scores = network.node("Mul", &[&scores, mask], &[]);
            let mixed = network.node("MatMul", &[&scores, &value], &[]);
            let gated = network.node("Mul", &[&mixed, gate], &[]);
            let outward = network.node("MatMul", &[&gated, &weights[4]], &[]);
            network.node("Add", &[x, &outward], &[])
        };
        target = attend(&mut network, [&target, &own_gate, &own_query, "mean"]);
        history = attend(&mut network, [&history, &gate, &query, "causal"]);
    }
    let target = network.reshape(&target, &[-1, 64]);
    let logit = network.layers(&target, &[64, 128, 1]);
    network.with_output(&logit, 1)
}

/// A family of models.
struct Family {
    name: &'static str,
    network: Network,
}

/// The inputs of a request, each as one row and as a copy for each candidate.
struct Inputs {
    one: Vec<Vec<f32>>,
    copies: Vec<Vec<f32>>,
}

impl Inputs {
    fn draw(network: &Network) -> Self {
        let (mut one, mut copies) = (Vec::new(), Vec::new());
        for (seed, (_, width, is_shared)) in network.inputs.iter().enumerate() {
            let rows = if *is_shared { 1 } else { CANDIDATES };
            let mut values = Vec::new();
            push_normals((seed as u64) << 32, (rows * width).next_multiple_of(2), 1.0, &mut values);
            values.truncate(rows * width);
            copies.push(values.repeat(CANDIDATES / rows));
            one.push(values);
        }
        Self { one, copies }
    }

    /// Writes what ONNX Runtime reads into `folder`.
    fn write(&self, family: &str, network: &Network, folder: &Path) -> Result<()> {
        std::fs::write(folder.join(family).with_extension("onnx"), network.graph.file())?;
        for ((name, ..), values) in network.inputs.iter().zip(&self.copies) {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            std::fs::write(folder.join(family).with_extension(name), bytes)?;
        }
        Ok(())
    }
}

/// Returns the figures of `network` over this number of rounds.
fn measure(
    Family { name: family, network }: &Family,
    rounds: usize,
    peer: &mut Option<Peer>,
) -> Result<SharedFigures> {
    let family = *family;
    let inputs: Vec<_> = network.inputs.iter().map(|(name, width, _)| (*name, *width)).collect();
    let load = |shared: Vec<bool>| {
        let (isa, onnx) = (Isa::detect(), network.graph.file());
        let parts = InputPart::whole(&inputs, &shared);
        DenseEngine::load_for(isa, onnx, &inputs, &parts, "logit", Activation::None)
            .with_context(|| family.to_owned())
    };
    let copied = load(vec![false; inputs.len()])?;
    let shared = load(network.inputs.iter().map(|(.., is_shared)| *is_shared).collect())?;

    let Inputs { one, copies } = Inputs::draw(network);
    let mut scores = [(); 3].map(|()| vec![0.0; CANDIDATES * copied.outputs()]);
    let mut scratch = [copied.scratch(CANDIDATES), shared.scratch(CANDIDATES)];
    let mut times = [(); 3].map(|()| Vec::new());
    let about = json!({ "family": family });
    for _ in 0..rounds {
        let start = cpu_us();
        copied.run(CANDIDATES, &copies, &mut scores[0], &mut scratch[0])?;
        let middle = cpu_us();
        shared.run_requests(&[CANDIDATES], &one, &mut scores[1], &mut scratch[1])?;
        times[0].push(middle - start);
        times[1].push(cpu_us() - middle);
        if let Some(peer) = peer {
            times[2].extend(peer.request::<RoundTimes>("round", &about)?.times_us);
        }
    }
    shared.run(CANDIDATES, &copies, &mut scores[2], &mut scratch[1])?;
    let same = scores[1].iter().zip(&scores[2]).all(|(a, b)| a.to_bits() == b.to_bits());
    ensure!(same, "{family}: shared inputs change the bits of a score");

    if let Some(peer) = peer {
        scores[2] = peer.request::<PeerScores>("scores", &about)?.scores;
    }
    let largest = scores[0].iter().fold(0.0, |largest: f32, score| largest.max(score.abs()));
    for others in [&scores[1], &scores[2]] {
        let difference = largest_difference(&scores[0], others);
        let most = SCORE_DIFFERENCE * f64::from(largest);
        ensure!(difference <= most, "{family}: off by {difference}");
    }

    let work = |MultiplyAdds { sample, request }| (CANDIDATES as u64 * sample + request) as f64;
    let counted_ratio = work(shared.multiply_adds()) / work(copied.multiply_adds());
    let [copied_us, shared_us, peer_us] = times.map(|mut times| percentile(&mut times, 0.5));
    let peer_us = peer.is_some().then_some(peer_us);
    Ok(SharedFigures { family, copied_us, shared_us, peer_us, counted_ratio })
}

/// Starts ONNX Runtime with `families`, or prints why it does not run.
fn start(families: &[Family], venv: &Path) -> Result<Option<Peer>> {
    let folder = tempfile::tempdir()?;
    for Family { name, network } in families {
        Inputs::draw(network).write(name, network, folder.path())?;
    }
    let setup = || {
        let mut peer = Peer::start(venv, peer::CANDIDATES)?;
        let _: PeerAbout = peer.request("setup", &json!({ "folder": folder.path() }))?;
        anyhow::Ok(peer)
    };
    Ok(setup().inspect_err(|e| report::note(report::explain(e))).ok())
}

/// Measures all families, beside ONNX Runtime of the environment `venv`.
///
/// # Errors
/// The engine refuses a network, or a score differs.
pub fn run(is_quick: bool, venv: &Path, json: &Json) -> Result<()> {
    let rounds = if is_quick { 7 } else { 31 };
    let families = [
        ("DLRM", dlrm()),
        ("DeepFM", deepfm()),
        ("MMoE", mmoe()),
        ("DIN", din()),
        ("HSTU", hstu()),
    ]
    .map(|(name, network)| Family { name, network });
    let mut peer = start(&families, venv)?;
    let measured = families.iter().map(|family| measure(family, rounds, &mut peer));
    let points = measured.collect::<Result<Vec<_>>>()?;
    let ratios = points.iter().map(SharedFigures::bar);
    let bars: Vec<Bar> = ratios.chain(points.iter().map(SharedFigures::lead)).collect();
    let (machine, model) = (HostMachine::this(), format!("{CANDIDATES} candidates of one driver"));
    let report = BenchReport { bench: "request --shared", machine, model, bars, points };
    json.write(&report, || {
        let mut table =
            report::table(&["family", "ONNX Runtime", "copied", "shared", "ratio", "counted"]);
        table.add_rows(report.points.iter().map(|point| {
            let [measured, counted] = [point.ratio(), point.counted_ratio];
            let ratios = [measured, counted].map(|ratio| format!("{ratio:.3}"));
            let [copied, shared] = [point.copied_us, point.shared_us].map(report::micros);
            let peer = report::or_dash(point.peer_us, report::micros);
            [vec![point.family.to_owned(), peer, copied, shared], ratios.to_vec()].concat()
        }));
        say!("{}\n{table}\n{}", report.machine, bars_table(&report.bars))
    })
}
