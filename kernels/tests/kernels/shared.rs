//! Requests whose samples share inputs. What a request computes once has the bits of a run in which
//! each sample has a copy of the shared values, and such a run allocates nothing.

use crate::dense::{ALLOCATIONS, NETWORKS, bits, inputs, load_sharing};
use hatchback_kernels::dense::{Activation, DenseEngine, Weights};
use hatchback_kernels::simd::isa::Isa;

/// The ends of the samples of some requests: a long one, several short ones, one without samples.
const ENDS: [&[usize]; 6] =
    [&[5], &[2, 2, 5], &[1, 2, 4], &[0, 2, 3], &[230], &[1, 3, 40, 41, 41, 180, 181, 230]];

/// Compares a run of requests with one of samples. `values` has `[samples, width]` of each input.
/// Returns the inputs of the latter and its scores.
fn compare(
    name: &str,
    engine: &DenseEngine,
    shared: &[bool],
    values: &[Vec<f32>],
    ends: &[usize],
) -> (Vec<Vec<f32>>, Vec<f32>) {
    let (samples, mut start) = (ends[ends.len() - 1], 0);
    let mut requests: Vec<Vec<f32>> = vec![Vec::new(); values.len()];
    let mut tiled = requests.clone();
    for (request, &end) in ends.iter().enumerate() {
        for (i, values) in values.iter().enumerate() {
            let width = engine.widths()[i];
            let row = |n: usize| values[n * width % (values.len() - width + 1)..][..width].to_vec();
            if shared[i] {
                requests[i].extend(row(request));
            }
            for sample in start..end {
                let own = row(if shared[i] { request } else { sample });
                if !shared[i] {
                    requests[i].extend(&own);
                }
                tiled[i].extend(own);
            }
        }
        start = end;
    }

    let mut scratch = engine.scratch(samples);
    let mut expected = vec![f32::NAN; samples * engine.outputs()];
    engine.run(samples, &tiled, &mut expected, &mut scratch).unwrap();
    let mut scores = vec![f32::NAN; expected.len()];
    let before = ALLOCATIONS.get();
    engine.run_requests(ends, &requests, &mut scores, &mut scratch).unwrap();
    assert_eq!(ALLOCATIONS.get() - before, 0, "{name}");
    assert_eq!(bits(&scores), bits(&expected), "{name}, {shared:?}, {ends:?}");
    (tiled, expected)
}

/// Returns every choice of shared inputs but that of none.
fn masks(inputs: usize) -> impl Iterator<Item = Vec<bool>> {
    (1..1 << inputs).map(move |bits: usize| (0..inputs).map(|i| bits >> i & 1 == 1).collect())
}

#[test]
fn requests_of_random_networks_have_the_bits_of_their_samples() {
    let mut runs = 0;
    for file in ["random.bin", "zoo.bin"] {
        for case in crate::onnx_cases::read(file) {
            let inputs: Vec<(&str, usize)> =
                case.inputs.iter().map(|(name, width)| (name.as_str(), *width)).collect();
            for shared in masks(inputs.len().min(3)) {
                let mut shared = shared;
                shared.resize(inputs.len(), true);
                let (onnx, none) = (case.onnx.clone(), Activation::None);
                let isa = Isa::detect();
                let engine =
                    DenseEngine::load_for(isa, onnx, &inputs, &shared, &case.output, none).unwrap();
                for ends in ENDS[..4].iter().copied() {
                    compare(&case.name, &engine, &shared, &case.values, ends);
                    runs += 1;
                }
            }
        }
    }
    println!("{runs} runs of requests");
    assert!(runs >= 2000);
}

#[test]
fn requests_of_the_families_have_the_bits_of_their_samples_with_every_form_of_weights() {
    let isa = Isa::detect();
    for network in NETWORKS {
        for weights in [Weights::F32, Weights::F16, Weights::Int8] {
            for shared in masks(network.1.len()) {
                let engine = load_sharing(network, isa, weights, &shared);
                for ends in ENDS {
                    let values = inputs(network, 230);
                    let (tiled, scores) = compare(network.0, &engine, &shared, &values, ends);
                    let whole = load_sharing(network, isa, weights, &vec![false; shared.len()]);
                    let (samples, mut expected) = (ends[ends.len() - 1], scores.clone());
                    let mut scratch = whole.scratch(samples);
                    whole.run(samples, &tiled, &mut expected, &mut scratch).unwrap();
                    // Split sums are rounded in another way, and int8 also scales both parts.
                    let bound = if weights == Weights::Int8 { 0.05 } else { 1e-5 };
                    let far = scores.iter().zip(&expected).map(|(a, b)| (a - b).abs());
                    let far = far.fold(0.0, f32::max);
                    assert!(far <= bound, "{}, {weights}, {shared:?}: {far}", network.0);
                }
            }
        }
    }
}

#[test]
fn what_only_shared_inputs_reach_is_counted_once_a_request() {
    let network = ("tests/data/families/din", NETWORKS[5].1);
    let none = load_sharing(network, Isa::detect(), Weights::F32, &[false; 3]).multiply_adds();
    assert_eq!(none.request, 0);
    let shared = [true, false, true];
    let counted = load_sharing(network, Isa::detect(), Weights::F32, &shared).multiply_adds();
    println!("DIN: {none:?}, with a shared history {counted:?}");
    // Of the four parts that a position's unit reads, only the product is left to a sample.
    assert!(counted.request > 0 && 20 * counted.sample < 11 * none.sample);
}

#[test]
fn ends_that_descend_and_short_inputs_are_refused() {
    let network = NETWORKS[0];
    let engine = load_sharing(network, Isa::detect(), Weights::F32, &[true, false]);
    let (data, mut scratch) = (inputs(network, 4), engine.scratch(4));
    let mut run = |ends: &[usize], data: &[Vec<f32>]| {
        let mut scores = vec![0.0; ends[ends.len() - 1]];
        engine.run_requests(ends, data, &mut scores, &mut scratch)
    };
    assert!(run(&[4], &data).is_ok());
    assert!(run(&[3, 2, 4], &data).is_err() && run(&[5], &data).is_err());
    let short = [data[0][..2].to_vec(), data[1].clone()];
    assert!(run(&[4], &short).is_err());
}
