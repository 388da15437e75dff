//! Values that only a run can judge: indices, lengths and integers out of their range, and infinite
//! logits. Each leaves its own sample without a score, and no other sample.

use crate::limits::{network, scores};
use crate::onnx_files::{floats, ints, node, quarters, tensor};
use hatchback_kernels::dense::graph::onnx::*;
use hatchback_kernels::dense::{Activation, DenseEngine, JOINED_OUTPUT, join_outputs};
use prost::Message;

/// The nodes that make the integer `i`, `[batch, 1]`, of the first input.
fn first_integer() -> Vec<NodeProto> {
    vec![
        node("Gather", &["x", "zero"], &["first"], &[("axis", &[1])]),
        node("Cast", &["first"], &["i"], &[("to", &[7])]),
    ]
}

/// Returns the scores of two samples with these first inputs, of the network of `nodes` after
/// `first_integer`. A score that is not finite is `None`.
fn of_integers(nodes: &[NodeProto], tensors: &[TensorProto], firsts: [f32; 2]) -> Vec<Option<f32>> {
    let x = [firsts[0], 0.5, 1.0, 2.0, firsts[1], 1.5, 3.0, 4.0];
    let nodes = [&first_integer(), nodes].concat();
    let scores = scores(nodes, [&[ints("zero", &[0])], tensors].concat(), x);
    scores.into_iter().map(|score| score.is_finite().then_some(score)).collect()
}

/// The node that makes the output of `from`.
fn output(from: &str) -> NodeProto {
    node("Cast", &[from], &["out"], &[("to", &[1])])
}

#[test]
fn an_index_out_of_range_leaves_only_its_sample_without_a_score() {
    let table = floats("table", &[3], &[10.0, 20.0, 30.0]);
    let gather = |firsts| {
        of_integers(
            &[node("Gather", &["table", "i"], &["out"], &[])],
            std::slice::from_ref(&table),
            firsts,
        )
    };
    assert_eq!(gather([1.0, -1.0]), [Some(20.0), Some(30.0)]);
    assert_eq!(gather([2.9, 3.0]), [Some(30.0), None]);
    assert_eq!(gather([-4.0, -3.0]), [None, Some(10.0)]);
    assert_eq!(gather([f32::MAX, 0.0]), [None, Some(10.0)]);

    let at = |firsts| {
        of_integers(
            &[node("GatherElements", &["x", "i"], &["out"], &[("axis", &[1])])],
            &[],
            firsts,
        )
    };
    assert_eq!(at([1.0, 3.0]), [Some(0.5), Some(4.0)]);
    assert_eq!(at([4.0, -2.0]), [None, Some(3.0)]);
}

#[test]
fn a_table_by_each_samples_index_is_shared_and_other_samples_are_not() {
    // `x[i]` would be the values of another sample.
    let nodes = [first_integer(), vec![node("Gather", &["x", "i"], &["out"], &[])]].concat();
    let model = network(nodes, vec![ints("zero", &[0])]);
    let none = Activation::None;
    let error = DenseEngine::load(model.encode_to_vec(), &[("x", 4)], "out", none).err().unwrap();
    assert!(error.to_string().contains("Gather of the batch"), "{error}");
}

#[test]
fn integers_are_exact_or_their_sample_has_no_score() {
    let by = |op: &str, number: i64, firsts| {
        let nodes = [node(op, &["i", "n"], &["r"], &[]), output("r")];
        of_integers(&nodes, &[ints("n", &[number])], firsts)
    };
    let whole = |numbers: [f32; 2]| numbers.map(Some).to_vec();
    assert_eq!(by("Div", 2, [-7.0, 7.0]), whole([-3.0, 3.0]));
    assert_eq!(by("Mod", 2, [-7.0, 7.0]), whole([1.0, 1.0]));
    assert_eq!(by("Mod", -3, [-7.0, 7.0]), whole([-1.0, -2.0]));
    assert_eq!(by("Sub", 1, [0.0, 16_777_216.0]), whole([-1.0, 16_777_215.0]));
    assert_eq!(by("Add", 1, [16_777_215.0, -9.0]), [None, Some(-8.0)]);
    assert_eq!(by("Mul", 16_777_215, [2.0, 1.0]), [None, Some(16_777_215.0)]);
    assert_eq!(by("Div", 0, [2.0, 0.0]), [None, None]);

    // f32 would round a sum on the way.
    let sum = [
        node("Concat", &["i", "i", "n"], &["all"], &[("axis", &[1])]),
        node("ReduceSum", &["all", "last"], &["r"], &[]),
        output("r"),
    ];
    let nodes = [&[node("Mul", &["i", "zero"], &["n"], &[])], &sum[..]].concat();
    let sums = of_integers(&nodes, &[ints("last", &[1])], [5.0, 8_000_000.0]);
    assert_eq!(sums, [Some(10.0), None]);
}

/// A product of 0 and a negative number is -0 as a float. An integer has no sign of 0.
#[test]
fn a_zero_that_was_an_integer_is_positive() {
    for (op, inputs) in [("Mul", &["i", "n"][..]), ("Mod", &["i", "n"]), ("Neg", &["i"])] {
        let nodes = [
            node(op, inputs, &["r"], &[]),
            node("Cast", &["r"], &["f"], &[("to", &[1])]),
            node("Reciprocal", &["f"], &["large"], &[]),
            node("Clip", &["large", "low", "high"], &["out"], &[]),
        ];
        let bound = |name: &str, value: f32| floats(name, &[], &[value]);
        let constants = [ints("n", &[-3]), bound("low", -1.0), bound("high", 1.0)];
        assert_eq!(of_integers(&nodes, &constants, [0.0, -0.0]), [Some(1.0); 2], "{op}");
    }
}

#[test]
fn known_integers_of_32_bits_wrap_around() {
    let nodes = vec![
        node("Cast", &["wide"], &["cut"], &[("to", &[6])]),
        node("Mul", &["n", "n"], &["square"], &[]),
        node("Concat", &["cut", "square"], &["both"], &[("axis", &[0])]),
        node("Cast", &["both"], &["f"], &[("to", &[1])]),
        node("Mul", &["x", "zeros"], &["none"], &[]),
        node("Add", &["none", "f"], &["out"], &[]),
    ];
    let n = TensorProto {
        data_type: Some(INT32),
        int64_data: Vec::new(),
        int32_data: vec![100_000],
        ..tensor("n", &[1], &[])
    };
    let wide = ints("wide", &[(1 << 32) + 3, i64::MAX, 5]);
    let zeros = floats("zeros", &[4], &[0.0; 4]);
    let found = scores(nodes, vec![wide, n, zeros], [1.0; 8]);
    assert_eq!(found[..4], [3.0, -1.0, 5.0, 1_410_065_408.0]);
}

#[test]
fn a_running_sum_has_no_infinity_before_the_first_one() {
    let less = [
        node("Log", &["x"], &["logs"], &[]),
        node("CumSum", &["logs", "axis"], &["sums"], &[]),
        node("Less", &["sums", "none"], &["c"], &[]),
        output("c"),
    ];
    let constants = || vec![tensor("axis", &[], &[1]), floats("none", &[], &[0.0])];
    let x = [0.5, 0.5, 0.0, 1.0, 0.5, 4.0, 0.0, 1.0];
    assert_eq!(scores(less.to_vec(), constants(), x), [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]);
    for (exclusive, reverse, sums) in
        [(0, 1, [10.0, 9.0, 7.0, 4.0]), (1, 0, [0.0, 1.0, 3.0, 6.0]), (1, 1, [9.0, 7.0, 4.0, 0.0])]
    {
        let attributes: [(&str, &[i64]); 2] =
            [("exclusive", &[exclusive]), ("reverse", &[reverse])];
        let nodes = vec![node("CumSum", &["x", "axis"], &["out"], &attributes)];
        let found = scores(nodes, constants(), [1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(found[..4], sums);
    }
}

/// Log-probabilities keep their digits beside large logits, and of a row that a mask hides whole.
#[test]
fn log_softmax_keeps_its_digits_beside_large_logits() {
    let nodes = vec![node("LogSoftmax", &["x"], &["out"], &[("axis", &[1])])];
    let found = scores(nodes, vec![], [-1e9, -1e9, -1e9, -1e9, 1e6, 1_000_001.0, 999_999.0, 0.0]);
    let quarter = -(4.0_f32.ln());
    let exact = [quarter, quarter, quarter, quarter, -1.407_606, -0.407_606, -2.407_606, -1e6];
    for (found, exact) in found.iter().zip(exact) {
        assert!((found - exact).abs() <= 2e-6 * exact.abs().max(1.0), "{found} for {exact}");
    }
}

#[test]
fn a_float_beyond_an_integers_range_and_a_cosine_below_1_are_no_scores() {
    let x = [3e9, 1.0, f32::INFINITY, f32::NAN, 2.0, 2.5, -2.0, -2.5];
    let cast = vec![node("Cast", &["x"], &["n"], &[("to", &[6])]), output("n")];
    let found = scores(cast, vec![], x);
    assert!(found[..4].iter().all(|score| !score.is_finite()), "{found:?}");
    assert_eq!(found[4..], [2.0, 2.0, -2.0, -2.0]);
    let acosh = vec![node("Acosh", &["x"], &["out"], &[])];
    let found = scores(acosh, vec![], [-1000.0, -86.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0]);
    assert!(!found[0].is_finite() && !found[1].is_finite(), "{found:?}");
}

#[test]
fn a_length_out_of_range_leaves_only_its_sample_without_a_score() {
    let nodes = [
        node("Reshape", &["i", "line"], &["flat"], &[]),
        node("Cast", &["flat"], &["length"], &[("to", &[6])]),
        node("Reshape", &["x", "steps"], &["wide"], &[]),
        node("Transpose", &["wide"], &["turned"], &[]),
        node("Reshape", &["turned", "sequence"], &["s"], &[]),
        node("RNN", &["s", "w", "r", "", "length"], &["", "last"], &[("hidden_size", &[1])]),
        node("Reshape", &["last", "column"], &["out"], &[]),
    ];
    let tensors = [
        ints("line", &[-1]),
        ints("steps", &[-1, 4]),
        ints("sequence", &[4, -1, 1]),
        ints("column", &[-1, 1]),
        quarters("w", &[1, 1, 1]),
        quarters("r", &[1, 1, 1]),
    ];
    let last = |firsts| of_integers(&nodes, &tensors, firsts);
    let one = |x: f32| (x * 0.25).tanh();
    let found = last([1.0, 5.0]);
    assert!((found[0].unwrap() - one(1.0)).abs() < 1e-6 && found[1].is_none(), "{found:?}");
    let found = last([-1.0, 0.0]);
    assert_eq!(found, [None, Some(0.0)]);
}

/// The library that ran such a network before took every sequence as long as the longest.
#[test]
fn a_gru_with_lengths_ends_where_a_shorter_one_does() {
    let run = |length: &str, steps: i64, way: &str, before: i64| {
        let mut gru = node(
            "GRU",
            &["s", "w", "r", "", length],
            &["", "last"],
            &[("hidden_size", &[1]), ("linear_before_reset", &[before])],
        );
        gru.attribute.push(AttributeProto {
            name: Some("direction".to_owned()),
            s: Some(way.as_bytes().to_vec().into()),
            r#type: Some(3),
            ..AttributeProto::default()
        });
        let nodes = [
            node("Reshape", &["i", "line"], &["flat"], &[]),
            node("Cast", &["flat"], &["length"], &[("to", &[6])]),
            node("Transpose", &["x"], &["turned"], &[]),
            node("Unsqueeze", &["turned", "end"], &["all"], &[]),
            node("Slice", &["all", "zero", "steps"], &["s"], &[]),
            gru,
            node("Reshape", &["last", "column"], &["out"], &[]),
        ];
        let r = floats("r", &[1, 3, 1], &[0.5, -0.75, 1.25]);
        let tensors = [
            ints("line", &[-1]),
            ints("end", &[2]),
            ints("steps", &[steps]),
            ints("column", &[-1, 1]),
            quarters("w", &[1, 3, 1]),
            r,
        ];
        of_integers(&nodes, &tensors, [2.0, 4.0])
    };
    for (way, before) in [("forward", 0), ("forward", 1), ("reverse", 0), ("reverse", 1)] {
        let expected = [run("", 2, way, before)[0], run("", 4, way, before)[1]];
        assert_eq!(run("length", 4, way, before), expected, "{way}, {before}");
        assert_ne!(run("", 4, way, before)[0], expected[0], "{way}, {before}");
    }
}

/// The library that ran such a network before kept an axis of one value.
#[test]
fn a_product_by_a_vector_drops_its_axis() {
    let nodes = vec![
        node("Reshape", &["x", "square"], &["m"], &[]),
        node("MatMul", &["m", "v"], &["q"], &[]),
        node("Mul", &["q", "q"], &["out"], &[]),
    ];
    let tensors = vec![ints("square", &[-1, 2, 2]), quarters("v", &[2])];
    let x = [1.0, 3.0, 2.0, 6.0, 0.0, 4.0, -4.0, 0.0];
    assert_eq!(scores(nodes, tensors, x), [1.0, 4.0, 1.0, 1.0]);
}

#[test]
fn the_sigmoid_of_an_infinite_logit_is_no_score() {
    let nodes = vec![
        node("Gather", &["x", "zero"], &["first"], &[("axis", &[1])]),
        node("Mul", &["first", "first"], &["out"], &[]),
    ];
    let model = network(nodes, vec![tensor("zero", &[1], &[0])]).encode_to_vec();
    let joined = join_outputs(&model, &[("out", Activation::Sigmoid)]).unwrap();
    for (onnx, output, activation) in
        [(model, "out", Activation::Sigmoid), (joined, JOINED_OUTPUT, Activation::None)]
    {
        let engine = DenseEngine::load(onnx, &[("x", 4)], output, activation).unwrap();
        let (x, mut scores) = ([1e30, 0.0, 0.0, 0.0, 1e3, 0.0, 0.0, 0.0], [0.0; 2]);
        engine.run(2, &[x], &mut scores, &mut engine.scratch(2)).unwrap();
        assert!(scores[0].is_nan() && scores[1] == 1.0, "{scores:?}");
    }
}

/// Returns the scores of `nodes` behind `logit`, for a logit of 2 and for `other`.
fn behind(nodes: Vec<NodeProto>, other: f32) -> Vec<f32> {
    let bound = |name: &str, value| floats(name, &[], &[value]);
    let tensors = vec![
        tensor("zero", &[1], &[0]),
        ints("flat", &[-1, 1]),
        bound("low", -1.0),
        bound("high", 1.0),
        bound("mask", f32::NEG_INFINITY),
    ];
    let first = node("Gather", &["x", "zero"], &["logit"], &[("axis", &[1])]);
    let all = std::iter::once(first).chain(nodes).collect();
    scores(all, tensors, [2.0, 0.0, 0.0, 0.0, other, 0.0, 0.0, 0.0])
}

#[test]
fn no_sigmoid_before_a_score_hides_an_infinite_logit() {
    let one = |op: &str| vec![node(op, &["logit"], &["out"], &[])];
    let to_score = |op: &str, last: NodeProto| vec![node(op, &["logit"], &["y"], &[]), last];
    let mut networks: Vec<_> = ["Sigmoid", "HardSigmoid", "Tanh"].map(one).into();
    networks.push(to_score("Sigmoid", node("Reshape", &["y", "flat"], &["out"], &[])));
    networks.push(to_score("Sigmoid", node("Mul", &["y", "y"], &["out"], &[])));
    networks.push(to_score("Sigmoid", node("Sub", &["high", "y"], &["out"], &[])));
    networks.push(to_score("Tanh", node("Sigmoid", &["y"], &["out"], &[])));
    for nodes in networks {
        let names: Vec<String> = nodes.iter().map(|n| n.op_type().to_owned()).collect();
        for other in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let scores = behind(nodes.clone(), other);
            assert!(scores[0].is_finite() && scores[1].is_nan(), "{names:?} {other}: {scores:?}");
        }
    }
}

/// A network may make an infinity of its own, and mend it.
#[test]
fn an_infinity_that_the_network_deals_with_stays_a_score() {
    let score = |nodes: Vec<NodeProto>, logit| behind(nodes, logit)[1];
    let divided = vec![
        node("Neg", &["logit"], &["minus"], &[]),
        node("Exp", &["minus"], &["e"], &[]),
        node("Add", &["e", "high"], &["sum"], &[]),
        node("Div", &["high", "sum"], &["out"], &[]),
    ];
    assert_eq!(score(divided, -100.0), 0.0);
    let masked = vec![
        node("Less", &["logit", "low"], &["off"], &[]),
        node("Where", &["off", "mask", "logit"], &["masked"], &[]),
        node("Sigmoid", &["masked"], &["out"], &[]),
    ];
    assert!(score(masked, -3.0) < 1e-37);
    let cloglog = vec![
        node("Exp", &["logit"], &["e"], &[]),
        node("Neg", &["e"], &["minus"], &[]),
        node("Exp", &["minus"], &["rest"], &[]),
        node("Sub", &["high", "rest"], &["out"], &[]),
    ];
    assert_eq!(score(cloglog, 100.0), 1.0);
    let mended = vec![
        node("Sigmoid", &["logit"], &["y"], &[]),
        node("IsNaN", &["y"], &["is_nan"], &[]),
        node("Where", &["is_nan", "low", "y"], &["out"], &[]),
    ];
    assert_eq!(score(mended, f32::INFINITY), 1.0);
    let clipped = vec![
        node("Log", &["logit"], &["log"], &[]),
        node("Clip", &["log", "low", "high"], &["out"], &[]),
    ];
    assert_eq!(score(clipped, 0.0), -1.0);
}
