//! Tests with networks whose outputs ONNX Runtime computed. They are random graphs of the operators
//! that the engine supports, and the architectures of the field from PyTorch's exporters.
//! `tests/onnx/README.md` explains how the files are made and how 5,000 random graphs are compared.

#![allow(clippy::unwrap_used)]

use crate::dense::ALLOCATIONS;
use hatchback_kernels::simd::isa::Isa;

pub fn read(file: &str) -> Vec<crate::cases::Case> {
    let path = format!("{}/../tests/data/onnx/{file}", env!("CARGO_MANIFEST_DIR"));
    crate::cases::read(&std::fs::read(path).unwrap())
}

/// Runs all cases of `file`; returns their number.
fn all_run_on_our_engine(file: &str) -> usize {
    let all = read(file);
    let mut furthest = 0.0f32;
    for case in &all {
        match case.run() {
            Ok(difference) => furthest = furthest.max(difference),
            Err(problem) => panic!("{}: {problem}", case.name),
        }
    }
    println!("{file}: {} networks, at most {furthest:.1e} from ONNX Runtime", all.len());
    all.len()
}

#[test]
fn random_networks_give_the_outputs_of_onnx_runtime() {
    assert!(all_run_on_our_engine("random.bin") >= 200);
}

#[test]
fn a_run_of_a_random_network_allocates_nothing() {
    for case in read("random.bin") {
        let engine = case.load(Isa::detect()).unwrap();
        let mut scores = vec![0.0; case.batch * engine.outputs()];
        let mut scratch = engine.scratch(case.batch);
        let before = ALLOCATIONS.get();
        engine.run(case.batch, &case.values, &mut scores, &mut scratch).unwrap();
        assert_eq!(ALLOCATIONS.get() - before, 0, "{}", case.name);
    }
}

#[test]
fn the_architectures_of_the_field_run_on_our_engine() {
    assert!(all_run_on_our_engine("zoo.bin") >= 46);
}

#[test]
fn a_wrong_expectation_is_found() {
    let mut case = read("random.bin").remove(0);
    case.expected[0] += 1e-3;
    assert!(case.run().is_err());
}
