//! Runs networks and compares their outputs with those of ONNX Runtime. The programs
//! `tests/onnx/*.py` write the files. Prints one line a case, with its difference, and the
//! counts. With `--time` it prints the microseconds of a run at three batch sizes instead.
//!
//!     cargo run --release -p hatchback-kernels --example onnx_cases -- [--time] FILE...

#![allow(clippy::unwrap_used)]

#[path = "../tests/kernels/cases/mod.rs"]
mod cases;

use hatchback_kernels::dense::{Activation, DenseEngine};
use std::process::ExitCode;
use std::time::Instant;

/// Batches whose runs are timed.
const BATCHES: [usize; 3] = [1, 8, 64];
/// Rounds, of which the fastest counts.
const ROUNDS: usize = 15;

fn main() -> ExitCode {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let timed = paths.first().is_some_and(|first| first == "--time");
    let mut all = Vec::new();
    for path in paths.iter().skip(usize::from(timed)) {
        all.extend(cases::read(&std::fs::read(path).unwrap()));
    }
    if timed {
        all.iter().for_each(time);
        return ExitCode::SUCCESS;
    }
    ExitCode::from(u8::from(compare(&all) > 0))
}

/// Prints the outcome of each case; returns the number of wrong ones.
fn compare(all: &[cases::Case]) -> usize {
    let (mut wrong, mut furthest) = (0, 0.0f32);
    for case in all {
        match case.run() {
            Err(problem) => {
                wrong += 1;
                println!("{}: WRONG: {problem}", case.name);
            }
            Ok(difference) => {
                furthest = furthest.max(difference);
                println!("{}: {difference:.1e}", case.name);
            }
        }
    }
    println!("{} cases, {wrong} wrong, difference at most {furthest:.1e}", all.len());
    wrong
}

/// Prints the microseconds of a run of `case` at each batch.
fn time(case: &cases::Case) {
    let inputs: Vec<(&str, usize)> = case.inputs.iter().map(|(n, w)| (n.as_str(), *w)).collect();
    let activation = Activation::None;
    let engine = DenseEngine::load(case.onnx.clone(), &inputs, &case.output, activation).unwrap();

    print!("{}", case.name);
    for batch in BATCHES {
        let fill = |(values, (_, width)): (&Vec<f32>, &(&str, usize))| {
            values.iter().copied().cycle().take(batch * width).collect::<Vec<f32>>()
        };
        let data: Vec<Vec<f32>> = case.values.iter().zip(&inputs).map(fill).collect();
        let (mut scores, mut scratch) =
            (vec![0.0; batch * engine.outputs()], engine.scratch(batch));
        let mut best = f64::INFINITY;
        for _ in 0..ROUNDS {
            let (start, runs) = (Instant::now(), 1 + 256 / batch);
            for _ in 0..runs {
                engine.run(batch, &data, &mut scores, &mut scratch).unwrap();
            }
            best = best.min(start.elapsed().as_secs_f64() * 1e6 / runs as f64);
        }
        print!(" {best:.1}");
    }
    println!();
}
