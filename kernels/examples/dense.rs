//! Times one ONNX network on one core: this crate's kernels with each weight format, and rten. The
//! runs alternate. The results are microseconds of CPU time a batch, the median of the rounds, and
//! billions of multiplications and additions a second. For comparison it prints the time of a loop
//! that only reads as many bytes as the weights have.
//!
//!     cargo run --release -p hatchback-kernels --example dense -- NETWORK.onnx NAME=WIDTH.. OUTPUT
//!
//! Environment variables limit the runs: `ISA=avx2`, `WEIGHTS=int8`, `BATCH=64` (without rten).

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback_kernels::dense::{Activation, DenseEngine, InputPart, Weights, narrow_all};
use hatchback_kernels::simd::isa::Isa;
use rten::{Dimension, Model, NodeId, RunOptions, ThreadPool, ValueOrView, ValueView};
use std::sync::Arc;
use std::time::Duration;

const BATCHES: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

/// Returns the CPU time of all threads of this process.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the microseconds of one call, the mean over enough calls to take 15 ms.
fn time(mut call: impl FnMut()) -> f64 {
    let (begin, mut calls) = (cpu_time(), 0);
    loop {
        call();
        calls += 1;
        let spent = cpu_time() - begin;
        if spent > Duration::from_millis(15) {
            return spent.as_secs_f64() * 1e6 / f64::from(calls);
        }
    }
}

/// Returns the microseconds of a loop that reads `bytes` bytes, which are in the CPU's caches if
/// they fit.
fn time_to_read(bytes: usize) -> f64 {
    let words = vec![1u64; bytes / 8];
    time(|| {
        std::hint::black_box(std::hint::black_box(&words).iter().sum::<u64>());
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns values of nearly normal distribution, from a fixed seed.
fn values(len: usize) -> Vec<f32> {
    let mut state = 7u64;
    let mut uniform = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..len).map(|_| (0..4).map(|_| uniform()).sum::<f32>() * 1.7).collect()
}

/// Returns `data` as rten's input `name`.
fn feed<'a>(rten: &Model, name: &str, batch: usize, data: &'a [f32]) -> (NodeId, ValueOrView<'a>) {
    let has_name = |id: &NodeId| rten.node_info(*id).unwrap().name() == Some(name);
    let at = rten.input_ids().iter().position(has_name).unwrap();
    let fixed = rten.input_shape(at).unwrap().into_iter().skip(1);
    let fixed = fixed.map(|d| if let Dimension::Fixed(n) = d { n } else { panic!("open") });
    let shape: Vec<usize> = std::iter::once(batch).chain(fixed).collect();
    (rten.input_ids()[at], ValueView::from_shape(&shape, data).unwrap().into())
}

/// Returns whether the environment's variable `name`, if it is set, is `value`.
fn is_selected(name: &str, value: &str) -> bool {
    std::env::var(name).map_or(true, |only| only == value)
}

/// Loads the network for each instruction set and format of weights, each with its name.
fn load(onnx: &[u8], inputs: &[(&str, usize)], output: &str) -> Vec<(String, DenseEngine)> {
    let mut engines = Vec::new();
    for isa in Isa::available().into_iter().skip(1).filter(|isa| is_selected("ISA", isa.name())) {
        for weights in [Weights::F32, Weights::F16, Weights::Int8] {
            if is_selected("WEIGHTS", &weights.to_string()) {
                let (onnx, activation) = (narrow_all(onnx, weights).unwrap(), Activation::Sigmoid);
                let engine = DenseEngine::load_for(
                    isa,
                    onnx,
                    inputs,
                    &InputPart::whole(inputs, &vec![false; inputs.len()]),
                    output,
                    activation,
                );
                engines.push((format!("{} {weights:?}", isa.name()), engine.unwrap()));
            }
        }
    }
    engines
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (path, inputs, output) = (&args[0], &args[1..args.len() - 1], &args[args.len() - 1]);
    let onnx = std::fs::read(path).unwrap();
    let inputs: Vec<(&str, usize)> = inputs
        .iter()
        .map(|i| i.split_once('=').unwrap())
        .map(|(n, w)| (n, w.parse().unwrap()))
        .collect();

    let engines = load(&onnx, &inputs, output);
    let rten = Model::load(onnx).unwrap();
    let mut options = RunOptions::default();
    options.thread_pool = Some(Arc::new(ThreadPool::with_num_threads(1)));

    let rounds = std::env::var("ROUNDS").map_or(9, |r| r.parse().unwrap());
    println!("{:>16} {:>12} {:>12} largest difference from f32", "", "bytes", "µs to read");
    let mut scores = Vec::new();
    for (name, engine) in &engines {
        let data: Vec<Vec<f32>> = inputs.iter().map(|(_, w)| values(256 * w)).collect();
        let mut out = vec![0.0; 256 * engine.outputs()];
        engine.run(256, &data, &mut out, &mut engine.scratch(256)).unwrap();
        scores.push(out);
        let far = scores[0].iter().zip(&scores[scores.len() - 1]).map(|(a, b)| (a - b).abs());
        let read = median((0..rounds).map(|_| time_to_read(engine.bytes())).collect());
        let far = far.fold(0.0, f32::max);
        println!("{name:>16} {:>12} {read:>12.1} {far:.1e}", engine.bytes());
    }

    for batch in BATCHES.into_iter().filter(|b| is_selected("BATCH", &b.to_string())) {
        let data: Vec<Vec<f32>> = inputs.iter().map(|(_, w)| values(batch * w)).collect();
        let mut times = vec![Vec::new(); engines.len() + 1];
        for _ in 0..rounds {
            for ((_, engine), times) in engines.iter().zip(&mut times) {
                let (mut out, mut scratch) =
                    (vec![0.0; batch * engine.outputs()], engine.scratch(batch));
                times.push(time(|| engine.run(batch, &data, &mut out, &mut scratch).unwrap()));
            }
            if std::env::var_os("BATCH").is_some() {
                continue;
            }
            times[engines.len()].push(time(|| {
                let fed: Vec<_> = inputs
                    .iter()
                    .zip(&data)
                    .map(|(i, data)| feed(&rten, i.0, batch, data))
                    .collect();
                rten.run(fed, &[rten.output_ids()[0]], Some(options.clone())).unwrap();
            }));
        }

        print!("batch {batch:>4}:");
        let names = engines.iter().map(|(name, _)| name.as_str()).chain(["rten"]);
        let operations = 2.0 * (engines[0].1.parameters() * batch) as f64;
        for (name, times) in names.zip(times).filter(|(_, times)| !times.is_empty()) {
            let us = median(times);
            print!("  {name} {us:.0} ({:.0} G/s)", operations / us / 1e3);
        }
        println!();
    }
}
