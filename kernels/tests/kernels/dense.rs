//! Tests of the repository's networks on this crate's kernels. A run allocates nothing, and its
//! bits depend on neither the batch nor the instruction set.

// The allocator trait is unsafe.
#![allow(unsafe_code)]

use hatchback_kernels::dense::{
    Activation, DenseEngine, DenseError, InputPart, JOINED_OUTPUT, Weights, join_outputs,
    narrow_all,
};
use hatchback_kernels::simd::isa::Isa;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    pub static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|n| n.set(n.get() + 1));
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|n| n.set(n.get() + 1));
        // SAFETY: the caller keeps the contract of `GlobalAlloc`.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

pub type Network = (&'static str, &'static [(&'static str, usize)]);

pub const NETWORKS: [Network; 11] = [
    ("tests/data/families/dlrm", &[("dense", 3), ("emb", 48)]),
    ("tests/data/families/dcnv2", &[("dense", 3), ("emb", 28)]),
    ("tests/data/families/deepfm", &[("dense", 3), ("first", 4), ("second", 20)]),
    ("tests/data/families/wide_deep", &[("dense", 3), ("wide", 2), ("deep", 35)]),
    ("tests/data/families/mmoe", &[("dense", 3), ("emb", 15)]),
    ("tests/data/families/din", &[("dense", 3), ("target", 6), ("history", 30)]),
    ("tests/data/families/dien", &[("dense", 3), ("target", 6), ("history", 24)]),
    ("tests/data/families/bst", &[("dense", 3), ("target", 8), ("history", 40)]),
    ("tests/data/families/hstu", &[("dense", 3), ("target", 8), ("history", 40)]),
    ("tools/demo/coupon", &[("dense", 7), ("emb", 288)]),
    ("tools/demo/criteo", &[("dense", 13), ("emb", 832)]),
];

fn load(network: Network, isa: Isa, weights: Weights) -> DenseEngine {
    load_sharing(network, isa, weights, &InputPart::whole(network.1, &vec![false; network.1.len()]))
}

/// Loads a network that takes `parts`.
pub fn load_sharing(
    (folder, inputs): Network,
    isa: Isa,
    weights: Weights,
    parts: &[InputPart],
) -> DenseEngine {
    let onnx =
        std::fs::read(format!("{}/../{folder}/dense.onnx", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let (onnx, output, activation) = match folder {
        "tests/data/families/mmoe" => {
            let outputs = [("ctr", Activation::Sigmoid), ("cvr", Activation::Sigmoid)];
            (join_outputs(&onnx, &outputs).unwrap(), JOINED_OUTPUT, Activation::None)
        }
        _ => (onnx, "logit", Activation::Sigmoid),
    };
    let onnx = narrow_all(&onnx, weights).unwrap();
    let engine = DenseEngine::load_for(isa, onnx, inputs, parts, output, activation).unwrap();
    assert!(engine.layers().iter().any(|layer| layer.weights == weights), "{folder}, {weights}");
    engine
}

/// Returns inputs for `batch` samples. A sample's inputs do not depend on the batch.
pub fn inputs((_, inputs): Network, batch: usize) -> Vec<Vec<f32>> {
    let value = |i: usize| {
        ((i * 7919 % 1009) as f32 / 504.5 - 1.0) * if i.is_multiple_of(6) { 0.0 } else { 1.0 }
    };
    inputs.iter().map(|(_, width)| (0..batch * width).map(value).collect()).collect()
}

fn scores(engine: &DenseEngine, batch: usize, inputs: &[Vec<f32>]) -> Vec<f32> {
    let mut scores = vec![f32::NAN; batch * engine.outputs()];
    engine.run(batch, inputs, &mut scores, &mut engine.scratch(batch)).unwrap();
    scores
}

pub fn bits(scores: &[f32]) -> Vec<u32> {
    scores.iter().map(|s| s.to_bits()).collect()
}

#[test]
fn a_run_allocates_nothing() {
    for network in NETWORKS {
        for weights in [Weights::F32, Weights::F16, Weights::Int8] {
            let engine = load(network, Isa::detect(), weights);
            let (data, mut scratch) = (inputs(network, 200), engine.scratch(200));
            let mut scores = vec![0.0; 200 * engine.outputs()];

            for batch in [1, 2, 31, 200] {
                let before = ALLOCATIONS.get();
                engine
                    .run(batch, &data, &mut scores[..batch * engine.outputs()], &mut scratch)
                    .unwrap();
                assert_eq!(
                    ALLOCATIONS.get() - before,
                    0,
                    "{}, {weights:?}, batch {batch}",
                    network.0
                );
            }
        }
    }

    // Check that the allocator counts.
    let before = ALLOCATIONS.get();
    drop(std::hint::black_box(vec![1u8]));
    assert_eq!(ALLOCATIONS.get() - before, 1);
}

#[test]
fn scores_depend_on_neither_the_instruction_set_nor_the_batch() {
    const BATCH: usize = 120;
    for network in NETWORKS {
        for weights in [Weights::F32, Weights::F16, Weights::Int8] {
            let data = inputs(network, BATCH);
            let mut all = Vec::new();
            for isa in Isa::available() {
                let engine = load(network, isa, weights);
                all.push(bits(&scores(&engine, BATCH, &data)));
                for size in [1, 7, 50] {
                    let parts = (0..BATCH / size * size).step_by(size).flat_map(|first| {
                        let part = |(data, (_, width)): (&Vec<f32>, &(&str, usize))| {
                            data[first * width..(first + size) * width].to_vec()
                        };
                        let part: Vec<Vec<f32>> = data.iter().zip(network.1).map(part).collect();
                        bits(&scores(&engine, size, &part))
                    });
                    let parts: Vec<u32> = parts.collect();
                    assert_eq!(
                        parts,
                        all[0][..parts.len()],
                        "{}, {isa:?}, batch {size}",
                        network.0
                    );
                }
            }
            assert!(all.iter().all(|scores| *scores == all[0]), "{}, {weights:?}", network.0);
        }
    }
}

#[test]
fn shorter_weights_stay_close_and_take_less() {
    for network in NETWORKS {
        let data = inputs(network, 64);
        let exact = load(network, Isa::detect(), Weights::F32);
        let expected = scores(&exact, 64, &data);
        for (weights, bound) in [(Weights::F16, 1e-3), (Weights::Int8, 2e-2)] {
            let engine = load(network, Isa::detect(), weights);
            let ours = scores(&engine, 64, &data);
            let off = ours.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            println!(
                "{}, {weights:?}: {off:.1e}, {} of {} bytes",
                network.0,
                engine.bytes(),
                exact.bytes()
            );
            assert!(off > 0.0 && off <= bound, "{}, {weights:?}: {off}", network.0);
            assert!(engine.bytes() < exact.bytes());
        }
    }
}

#[test]
fn a_batch_larger_than_its_memory_is_refused() {
    let engine = load(NETWORKS[0], Isa::detect(), Weights::F32);
    let (data, mut scores) = (inputs(NETWORKS[0], 3), vec![0.0; 3]);
    let refused = engine.run(3, &data, &mut scores, &mut engine.scratch(2));
    assert!(matches!(refused, Err(DenseError::Batch { batch: 3, max: 2 })));
    assert!(engine.run(2, &data, &mut scores, &mut engine.scratch(2)).is_err());
    assert!(engine.run(2, &data[..1], &mut scores[..2], &mut engine.scratch(2)).is_err());
}
