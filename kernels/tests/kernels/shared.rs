//! Requests whose samples share inputs. What a request computes once has the bits of a run in which
//! each sample has a copy of the shared values, and such a run allocates nothing.

use crate::dense::{ALLOCATIONS, NETWORKS, bits, inputs, load_sharing};
use crate::onnx_files::{floats, info, ints, model, node};
use hatchback_kernels::dense::{Activation, DenseEngine, InputPart, Weights};
use hatchback_kernels::simd::isa::Isa;
use prost::Message;

/// The ends of the samples of some requests: a long one, several short ones, one without samples.
const ENDS: [&[usize]; 6] =
    [&[5], &[2, 2, 5], &[1, 2, 4], &[0, 2, 3], &[230], &[1, 3, 40, 41, 41, 180, 181, 230]];

/// Compares a run of requests with one of samples. `values` has `[samples, width]` of each input.
/// Returns the inputs of the latter, part by part, and its scores.
fn compare(
    name: &str,
    engine: &DenseEngine,
    parts: &[InputPart],
    values: &[Vec<f32>],
    ends: &[usize],
) -> (Vec<Vec<f32>>, Vec<f32>) {
    let (samples, mut start) = (ends[ends.len() - 1], 0);
    let mut requests: Vec<Vec<f32>> = vec![Vec::new(); parts.len()];
    let mut tiled = requests.clone();
    for (request, &end) in ends.iter().enumerate() {
        for (i, part) in parts.iter().enumerate() {
            let (width, values) = (part.width, &values[part.input]);
            let row = |n: usize| values[n * width % (values.len() - width + 1)..][..width].to_vec();
            if part.shared {
                requests[i].extend(row(request));
            }
            for sample in start..end {
                let own = row(if part.shared { request } else { sample });
                if !part.shared {
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
    assert_eq!(bits(&scores), bits(&expected), "{name}, {parts:?}, {ends:?}");
    (tiled, expected)
}

/// Returns every choice of shared inputs but that of none.
fn masks(inputs: usize) -> impl Iterator<Item = Vec<bool>> {
    (1..1 << inputs).map(move |bits: usize| (0..inputs).map(|i| bits >> i & 1 == 1).collect())
}

/// Returns each of `inputs` in up to three parts, and every second one of all parts shared.
fn divided(inputs: &[(&str, usize)], seed: usize) -> Vec<InputPart> {
    let mut parts: Vec<InputPart> = Vec::new();
    for (input, (_, width)) in inputs.iter().enumerate() {
        let mut ends = [width * (seed % 5) / 5, width * (3 + seed % 2) / 5, *width];
        ends.sort_unstable();
        let mut start = 0;
        for end in ends {
            if end > start {
                let shared = (parts.len() + seed).is_multiple_of(2);
                parts.push(InputPart { input, width: end - start, shared, vectors: true });
                start = end;
            }
        }
    }
    parts
}

/// Returns `[samples, width]` of each input, whose parts have the values `parted`.
fn joined(parts: &[InputPart], parted: &[Vec<f32>], samples: usize) -> Vec<Vec<f32>> {
    let inputs = parts[parts.len() - 1].input + 1;
    let mut whole = vec![Vec::new(); inputs];
    for sample in 0..samples {
        for (part, values) in parts.iter().zip(parted) {
            whole[part.input].extend(&values[sample * part.width..][..part.width]);
        }
    }
    whole
}

#[test]
fn requests_of_random_networks_have_the_bits_of_their_samples() {
    let mut runs = 0;
    for file in ["random.bin", "zoo.bin"] {
        for case in crate::onnx_cases::read(file) {
            let inputs: Vec<(&str, usize)> =
                case.inputs.iter().map(|(name, width)| (name.as_str(), *width)).collect();
            let whole = masks(inputs.len().min(3)).map(|mut shared| {
                shared.resize(inputs.len(), true);
                InputPart::whole(&inputs, &shared)
            });
            for parts in whole.chain((0..10).map(|seed| divided(&inputs, seed))) {
                let (onnx, none) = (case.onnx.clone(), Activation::None);
                let isa = Isa::detect();
                let engine =
                    DenseEngine::load_for(isa, onnx, &inputs, &parts, &case.output, none).unwrap();
                for ends in ENDS[..4].iter().copied() {
                    compare(&case.name, &engine, &parts, &case.values, ends);
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
            let own = vec![false; network.1.len()];
            let whole = load_sharing(network, isa, weights, &InputPart::whole(network.1, &own));
            let choices = masks(network.1.len()).map(|shared| InputPart::whole(network.1, &shared));
            for parts in choices.chain((0..10).map(|seed| divided(network.1, seed))) {
                let engine = load_sharing(network, isa, weights, &parts);
                for ends in ENDS {
                    let values = inputs(network, 230);
                    let (tiled, scores) = compare(network.0, &engine, &parts, &values, ends);
                    let (samples, mut expected) = (ends[ends.len() - 1], scores.clone());
                    let (mut scratch, tiled) =
                        (whole.scratch(samples), joined(&parts, &tiled, samples));
                    whole.run(samples, &tiled, &mut expected, &mut scratch).unwrap();
                    // Split sums are rounded in another way, and int8 also scales both parts.
                    let bound = if weights == Weights::Int8 { 0.05 } else { 1e-5 };
                    let far = scores.iter().zip(&expected).map(|(a, b)| (a - b).abs());
                    let far = far.fold(0.0, f32::max);
                    assert!(far <= bound, "{}, {weights}, {parts:?}: {far}", network.0);
                }
            }
        }
    }
}

#[test]
fn what_only_shared_inputs_reach_is_counted_once_a_request() {
    let network = ("tests/data/families/din", NETWORKS[5].1);
    let counted = |shared: [bool; 3]| {
        let parts = InputPart::whole(network.1, &shared);
        load_sharing(network, Isa::detect(), Weights::F32, &parts).multiply_adds()
    };
    let none = counted([false; 3]);
    assert_eq!(none.request, 0);
    let counted = counted([true, false, true]);
    println!("DIN: {none:?}, with a shared history {counted:?}");
    // Of the four parts that a position's unit reads, only the product is left to a sample.
    assert!(counted.request > 0 && 20 * counted.sample < 11 * none.sample);
}

#[test]
fn the_shared_columns_of_an_input_are_computed_once_as_an_input_of_their_own_is() {
    // The dense features and the first two of six vectors of a DLRM are the driver's.
    let network = ("tests/data/families/dlrm", NETWORKS[0].1);
    let counted = |widths: &[(usize, usize, bool)]| {
        let part = |&(input, width, shared)| InputPart { input, width, shared, vectors: true };
        let parts: Vec<InputPart> = widths.iter().map(part).collect();
        load_sharing(network, Isa::detect(), Weights::F32, &parts).multiply_adds()
    };
    let none = counted(&[(0, 3, false), (1, 48, false)]);
    let dense = counted(&[(0, 3, true), (1, 48, false)]);
    let driver = counted(&[(0, 3, true), (1, 16, true), (1, 32, false)]);
    println!("DLRM: {none:?}, with shared dense features {dense:?}, and two vectors {driver:?}");
    assert!(driver.sample < dense.sample && dense.sample < none.sample);
    // Of half of the dense features nothing is left but the sums that they begin.
    let half = counted(&[(0, 1, false), (0, 2, true), (1, 48, false)]);
    assert!(half.sample < none.sample && half.request > 0, "{half:?}");
}

#[test]
fn the_difference_of_large_values_keeps_its_digits() {
    let nodes = vec![
        node("Reshape", &["history", "steps"], &["h"], &[]),
        node("Reshape", &["candidate", "one"], &["c"], &[]),
        node("Tile", &["c", "times"], &["all"], &[]),
        node("Sub", &["h", "all"], &["d"], &[]),
        node("Concat", &["h", "all", "d"], &["parts"], &[("axis", &[2])]),
        node("MatMul", &["parts", "w"], &["p"], &[]),
        node("ReduceSum", &["p", "axes"], &["out"], &[("keepdims", &[0])]),
    ];
    let tensors = vec![
        ints("steps", &[-1, 2, 1]),
        ints("one", &[-1, 1, 1]),
        ints("times", &[1, 2, 1]),
        ints("axes", &[1]),
        floats("w", &[3, 1], &[0.0, 0.0, 0.1]),
    ];
    let onnx = model(17, vec![info("history"), info("candidate")], nodes, tensors).encode_to_vec();
    let inputs = [("history", 2), ("candidate", 1)];
    let part = |input, width, shared| InputPart { input, width, shared, vectors: false };
    let (parts, none) = ([part(0, 2, true), part(1, 1, false)], Activation::None);
    let isa = Isa::detect();
    let engine = DenseEngine::load_for(isa, onnx, &inputs, &parts, "out", none).unwrap();
    let (values, mut scores) = ([vec![1e6, 1e6 - 1.0], vec![1e6 + 1.0]], [0.0]);
    engine.run_requests(&[1], &values, &mut scores, &mut engine.scratch(1)).unwrap();
    assert!((scores[0] + 0.3).abs() < 1e-6, "{scores:?}");
}

#[test]
fn ends_that_descend_and_short_inputs_are_refused() {
    let network = NETWORKS[0];
    let parts = InputPart::whole(network.1, &[true, false]);
    let engine = load_sharing(network, Isa::detect(), Weights::F32, &parts);
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
