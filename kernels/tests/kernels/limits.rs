//! A network that would take all memory or time is refused by name, before anything of it is
//! allocated or run. What the models of the field have is accepted.

use crate::onnx_files::{floats, info, ints, model, node, quarters, tensor};
use hatchback_kernels::dense::graph::onnx::*;
use hatchback_kernels::dense::graph::operators;
use hatchback_kernels::dense::{Activation, DenseEngine, DenseError};
use prost::Message;

/// A size that no machine has.
const HUGE: i64 = 1 << 40;

fn with_graphs(node: NodeProto, graphs: &[(&str, GraphProto)]) -> NodeProto {
    let attribute = |(name, graph): &(&str, GraphProto)| AttributeProto {
        name: Some((*name).to_owned()),
        g: Some(Box::new(graph.clone())),
        r#type: Some(5),
        ..AttributeProto::default()
    };
    NodeProto { attribute: graphs.iter().map(attribute).collect(), ..node }
}

fn branch(node: Vec<NodeProto>) -> GraphProto {
    let name = node.last().unwrap().output.first().cloned();
    let output = vec![ValueInfoProto { name, r#type: None }];
    GraphProto { node, output, ..GraphProto::default() }
}

/// Returns a network with the input `x`, `[batch, 4]`, and the output `out`.
pub fn network(nodes: Vec<NodeProto>, tensors: Vec<TensorProto>) -> ModelProto {
    model(17, vec![info("x")], nodes, tensors)
}

fn load(model: &ModelProto) -> Result<DenseEngine, DenseError> {
    DenseEngine::load(model.encode_to_vec(), &[("x", 4)], "out", Activation::None)
}

/// Checks that the network of `nodes` is refused with a text that has all of `parts`.
fn refused(nodes: Vec<NodeProto>, tensors: Vec<TensorProto>, parts: &[&str]) {
    let error = load(&network(nodes, tensors)).err().expect("a refusal");
    let text = error.to_string();
    assert!(matches!(error, DenseError::Unsupported(_)), "{text}");
    assert!(parts.iter().all(|part| text.contains(part)), "{text}: not {parts:?}");
}

/// Returns the end of a network, which reads `from` whatever its shape is.
fn ended(mut nodes: Vec<NodeProto>, from: &str) -> Vec<NodeProto> {
    nodes.push(node("ReduceSum", &[from], &["sum"], &[]));
    nodes.push(node("Sin", &["x"], &["sin"], &[]));
    nodes.push(node("Add", &["sin", "sum"], &["out"], &[]));
    nodes
}

#[test]
fn results_without_end_are_refused_by_name() {
    let over = "over 16777216 values";
    let single = |op: &str, inputs: &[&str], attributes: &[(&str, &[i64])]| {
        ended(vec![node(op, inputs, &["big"], attributes)], "big")
    };
    let huge = || ints("huge", &[1, HUGE]);
    let scalars = || [("zero", 0), ("one", 1), ("end", HUGE)].map(|(n, v)| tensor(n, &[], &[v]));
    for (nodes, tensors) in [
        (single("Tile", &["x", "huge"], &[]), vec![huge()]),
        (single("Expand", &["x", "huge"], &[]), vec![ints("huge", &[HUGE, 1, 4])]),
        (single("ConstantOfShape", &["huge"], &[]), vec![huge()]),
        (single("Range", &["zero", "end", "one"], &[]), scalars().to_vec()),
        (single("Pad", &["x", "pads"], &[]), vec![ints("pads", &[0, 0, 0, HUGE])]),
        (
            single("OneHot", &["i", "end", "two"], &[]),
            [&scalars()[..], &[ints("i", &[0]), quarters("two", &[2])]].concat(),
        ),
        // Constants are computed in the load.
        (
            ended(
                vec![node("Sin", &["w"], &["s"], &[]), node("Tile", &["s", "huge"], &["big"], &[])],
                "big",
            ),
            vec![quarters("w", &[1, 1]), huge()],
        ),
    ] {
        let op = nodes.iter().find(|node| node.output[0] == "big").unwrap().op_type().to_owned();
        refused(nodes, tensors, &[&op]);
    }

    // Each node doubles its operand, or multiplies it by itself.
    let chain = |op: &str, first: &[&str], attributes: &[(&str, &[i64])]| {
        let mut nodes = vec![node("Sin", &["x"], &["d0"], &[])];
        for i in 0..40 {
            let (from, to) = (format!("d{i}"), format!("d{}", i + 1));
            let inputs: Vec<&str> =
                first.iter().map(|n| if *n == "d" { &from } else { *n }).collect();
            nodes.push(node(op, &inputs, &[&to], attributes));
        }
        ended(nodes, "d40")
    };
    refused(chain("Concat", &["d", "d"], &[("axis", &[1])]), vec![], &["Concat", over]);
    refused(chain("Tile", &["d", "two"], &[]), vec![ints("two", &[1, 2])], &["Tile", "node `d"]);
    let again = tensor("again", &[8, 8], &[0; 64]);
    refused(chain("Gather", &["d", "again"], &[("axis", &[1])]), vec![again], &["Gather", over]);
    // Sizes that grow without end.
    let mut nodes = vec![node("Shape", &["x"], &["d0"], &[])];
    for i in 0..40 {
        let (from, to) = (format!("d{i}"), format!("d{}", i + 1));
        nodes.push(node("Mul", &[&from, "two"], &[&to], &[]));
    }
    nodes.push(node("Expand", &["x", "d40"], &["big"], &[]));
    refused(ended(nodes, "big"), vec![ints("two", &[2])], &["Expand"]);
    // The batch squared.
    let square =
        vec![node("Transpose", &["x"], &["t"], &[]), node("MatMul", &["x", "t"], &["big"], &[])];
    refused(ended(square, "big"), vec![], &["MatMul", "samples"]);
}

/// Each node makes as many values again, which no file has.
#[test]
fn values_that_the_load_computes_are_counted() {
    let many = |count: usize, op: &str, inputs: &[&str], to: &[(&str, &[i64])]| {
        let made = |i: usize| node("ConstantOfShape", &["n"], &[["f", "i"][i]], &[]);
        let mut integers = made(1);
        integers.attribute.push(AttributeProto {
            name: Some("value".to_owned()),
            t: Some(ints("", &[7])),
            r#type: Some(4),
            ..AttributeProto::default()
        });
        // A result without a name is dropped, but counted.
        let each = (0..count).map(|_| node(op, inputs, &[""], to));
        let tensors = vec![
            ints("n", &[1 << 22]),
            TensorProto {
                data_type: Some(INT8),
                raw_data: Some(vec![1; 1 << 22].into()),
                ..tensor("q", &[1 << 22], &[])
            },
            floats("scale", &[], &[0.5]),
        ];
        refused([made(0), integers].into_iter().chain(each).collect(), tensors, &[op, "weights"]);
    };
    many(70, "Cast", &["f"], &[("to", &[10])]);
    many(70, "Cast", &["i"], &[("to", &[1])]);
    many(20, "Cast", &["i"], &[("to", &[6])]);
    many(20, "Cast", &["f"], &[("to", &[7])]);
    many(20, "Neg", &["i"], &[]);
    many(70, "DequantizeLinear", &["q", "scale"], &[]);

    let truths = TensorProto {
        data_type: Some(BOOL),
        raw_data: Some(vec![1; 1 << 22].into()),
        ..tensor("", &[1 << 22], &[])
    };
    let constant = |_| NodeProto {
        attribute: vec![AttributeProto {
            name: Some("value".to_owned()),
            t: Some(truths.clone()),
            r#type: Some(4),
            ..AttributeProto::default()
        }],
        ..node("Constant", &[], &[""], &[])
    };
    refused((0..5).map(constant).collect(), vec![], &["Constant", "over 16777216 values"]);

    // A product of no terms has a value for each row and column.
    let product = ended(vec![node("MatMul", &["a", "b"], &["big"], &[])], "big");
    let empty = |name: &str, dims: [i64; 2]| floats(name, &dims, &[]);
    refused(product, vec![empty("a", [1 << 24, 0]), empty("b", [0, 1 << 24])], &["over 2684"]);
}

#[test]
fn a_list_longer_than_the_axes_is_refused_before_it_is_read() {
    let long = || vec![ints("n", &[1 << 22]), ints("all", &vec![0; 65])];
    for (op, inputs) in [
        ("ReduceSum", ["x", "all"]),
        ("Trilu", ["x", "all"]),
        ("Reshape", ["x", "all"]),
        ("Tile", ["x", "all"]),
        ("Pad", ["x", "all"]),
        ("Unsqueeze", ["x", "all"]),
    ] {
        refused(vec![node(op, &inputs, &["out"], &[])], long(), &[op, "by 65 integers, node"]);
    }
    let slice = node("Slice", &["x", "n", "all"], &["out"], &[]);
    refused(vec![slice], long(), &["Slice by 65 integers"]);
    let named = node(&"Long".repeat(1 << 18), &["x"], &["out"], &[]);
    let error = load(&network(vec![named], vec![])).err().expect("a refusal").to_string();
    assert!(error.contains("LongLong") && error.len() < 4_000, "{} bytes", error.len());
}

/// The engine walks the axes beside an empty one, and allocates by them.
#[test]
fn empty_tensors_with_other_axes_of_any_size_are_refused_by_name() {
    let slice = |op: &str| {
        let bounds: [(&str, &[i64]); 3] = [("starts", &[1]), ("ends", &[1 << 62]), ("axes", &[1])];
        node(op, &["w"], &["big"], &bounds)
    };
    for op in ["Transpose", "Slice", "TopK", "ReverseSequence", "Identity"] {
        let nodes = match op {
            "Slice" => vec![slice(op)],
            _ => vec![node(op, &["w", "one"], &["big"], &[("axis", &[1])])],
        };
        let tensors = vec![tensor("w", &[0, 1 << 62], &[]), ints("one", &[1])];
        refused(ended(nodes.clone(), "big"), tensors.clone(), &["tensor `w`: shape [0, 46"]);
        let own = [nodes, vec![node("Tanh", &["x"], &["out"], &[])]].concat();
        refused(own, tensors, &["tensor `w`: shape [0, 46"]);
    }

    // Empty tensors that a node makes.
    let made = |shape: &[i64], last: &str| {
        let nodes = vec![
            node("ConstantOfShape", &["shape"], &["w"], &[]),
            node("Transpose", &["w"], &["t"], &[]),
            node(last, &["x"], &["out"], &[]),
        ];
        load(&network(nodes, vec![ints("shape", shape)]))
    };
    // The strides of the last one are beyond 64 bits.
    let most = 1 << 22;
    for shape in [&[1 << 40, 0][..], &[0, 1 << 23], &[0, most, most, most]] {
        let error = made(shape, "Sin").err().expect("a refusal");
        assert!(
            matches!(error, DenseError::Unsupported(_))
                && error.to_string().contains("ConstantOfShape"),
            "{error}"
        );
    }
    assert!(made(&[0, 1 << 10], "Sin").is_ok());
}

/// Files that contradict ONNX, and a constant that the load computes.
#[test]
fn contradictions_are_refused_and_no_index_leaves_its_tensor() {
    let refused = |nodes: Vec<NodeProto>, tensors: Vec<TensorProto>, problem: &str| {
        let error = load(&network(nodes, tensors)).err().expect("a refusal").to_string();
        assert!(error.contains(problem), "{error}");
    };
    let squeezed = vec![
        node("Unsqueeze", &["x", "first"], &["rows"], &[]),
        node("Squeeze", &["rows", "twice"], &["out"], &[]),
    ];
    let axes = vec![ints("first", &[0]), ints("twice", &[0, 0])];
    refused(squeezed, axes, "Squeeze of axis 0 twice");
    let flat = node("Conv", &["w", "w"], &["big"], &[]);
    refused(ended(vec![flat], "big"), vec![quarters("w", &[4])], "Conv of such operands");
    // The scores of such a mask have the samples on the axis of the keys.
    let attention = vec![
        node("Reshape", &["x", "heads"], &["q"], &[]),
        node("Attention", &["q", "q", "q", "mask"], &["out"], &[]),
    ];
    let tensors = vec![ints("heads", &[-1, 1, 1, 4]), quarters("mask", &[1; 5])];
    refused(attention, tensors, "Attention with a mask");

    // Truth values of floats beside stored ones.
    let truths = vec![
        node("IsNaN", &["w"], &["nan"], &[]),
        node("Concat", &["stored", "nan"], &["both"], &[("axis", &[0])]),
        node("Gather", &["both", "last"], &["one"], &[]),
        node("Cast", &["one"], &["number"], &[("to", &[1])]),
        node("Add", &["x", "number"], &["out"], &[]),
    ];
    let stored = TensorProto {
        data_type: Some(BOOL),
        int64_data: Vec::new(),
        int32_data: vec![1, 1],
        ..tensor("stored", &[2], &[])
    };
    let x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    assert_eq!(scores(truths, vec![stored, quarters("w", &[2]), ints("last", &[3])], x), x);
}

/// Opset 11 gave the operator another name. A car that does not know it fetches no such release.
#[test]
fn scatter_is_scatter_elements() {
    let one = |name: &str| floats(name, &[1, 1], &[1.0]);
    for op in ["Scatter", "ScatterElements"] {
        let nodes = vec![
            node(op, &["row", "at", "new"], &["s"], &[("axis", &[1])]),
            node("Add", &["x", "s"], &["out"], &[]),
        ];
        let tensors = vec![quarters("row", &[1, 4]), tensor("at", &[1, 1], &[2]), one("new")];
        let x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        assert_eq!(scores(nodes, tensors, x), [1.25, 2.25, 4.0, 4.25, 5.25, 6.25, 8.0, 8.25]);
        assert!(operators().any(|known| known == op));
    }
}

#[test]
fn windows_beyond_their_tensor_are_refused_by_name() {
    // A span of 3 * dilation + 1 positions would wrap around to -2^33 - 1.
    let dilation = (((1i128 << 64) - (1 << 33)) / 3) as i64;
    let over = "values a sample";
    for (attribute, numbers, problem) in [
        ("dilations", [1, dilation, 0, 0], "Conv of such windows on axis 3"),
        ("strides", [1, 0, 0, 0], "Conv of such windows on axis 3"),
        ("pads", [0, -1, 0, 0], "Conv of such windows on axis 3"),
        ("pads", [0, 0, 0, i64::MAX], "Conv of such windows on axis 3"),
        ("pads", [1 << 22, 1 << 22, 0, 0], over),
    ] {
        let convolution = node("Conv", &["u", "k"], &["big"], &[(attribute, &numbers)]);
        let nodes = vec![node("Reshape", &["x", "image"], &["u"], &[]), convolution];
        let tensors = vec![quarters("k", &[1, 1, 1, 4]), ints("image", &[-1, 1, 1, 4])];
        refused(ended(nodes, "big"), tensors, &[problem]);
    }
}

#[test]
fn shapes_that_follow_from_values_are_refused_by_name() {
    let cast = node("Cast", &["x"], &["i"], &[("to", &[7])]);
    let zero = || vec![tensor("zero", &[], &[0]), tensor("one", &[], &[1])];
    let from_values = |op: &str, inputs: &[&str], tensors: Vec<TensorProto>| {
        let first = node("Identity", &["i"], &["most"], &[]);
        let nodes = vec![cast.clone(), first, node(op, inputs, &["big"], &[])];
        refused(ended(nodes, "big"), tensors, &[op, "node `big`"]);
    };
    from_values("Range", &["zero", "most", "one"], zero());
    from_values("Tile", &["x", "i"], vec![]);
    from_values("Expand", &["x", "i"], vec![]);
    from_values("ConstantOfShape", &["i"], vec![]);
    from_values("Reshape", &["x", "i"], vec![]);
    from_values("OneHot", &["i", "most", "x"], vec![]);
    from_values("Pad", &["x", "i"], vec![]);
    for op in ["Resize", "NonMaxSuppression", "Compress", "Unique", "SequenceConstruct", "Optional"]
    {
        from_values(op, &["x"], vec![]);
    }
}

#[test]
fn loops_branches_by_values_and_foreign_operators_are_refused_by_name() {
    let body = || branch(vec![node("Identity", &["x"], &["b"], &[])]);
    let trips = || vec![tensor("trips", &[], &[1 << 62]), tensor("yes", &[], &[1])];
    for op in ["Loop", "Scan"] {
        let node = node(op, &["trips", "yes", "x"], &["out"], &[]);
        refused(vec![with_graphs(node, &[("body", body())])], trips(), &[op, "node `out`"]);
    }
    let condition = node("Cast", &["x"], &["c"], &[("to", &[9])]);
    let branches = [("then_branch", body()), ("else_branch", body())];
    let yes = |output: &str| with_graphs(node("If", &["yes"], &[output], &[]), &branches);
    refused(vec![yes("p"), yes("out")], trips(), &["a branch that writes `b` again"]);
    let by_value = with_graphs(node("If", &["c"], &["out"], &[]), &branches);
    refused(vec![condition, by_value], vec![], &["If by a condition", "node `out`"]);
    let foreign = NodeProto {
        domain: Some("com.microsoft".to_owned()),
        ..node("FusedMatMul", &["x", "x"], &["out"], &[])
    };
    refused(vec![foreign], vec![], &["com.microsoft.FusedMatMul", "node `out`"]);
    refused(vec![node("Frobnicate", &["x"], &["out"], &[])], vec![], &["Frobnicate", "`out`"]);
}

#[test]
fn networks_that_are_too_long_or_too_slow_are_refused() {
    let row = |count: usize, op: &str| {
        let name = |i: usize| if i == count { "out".to_owned() } else { format!("d{i}") };
        let one = |i: usize| node(op, &[&name(i)], &[&name(i + 1)], &[]);
        let first = node("Sin", &["x"], &["d0"], &[]);
        std::iter::once(first).chain((0..count).map(one)).collect::<Vec<_>>()
    };
    refused(row(1 << 15, "Cos"), vec![], &["nodes, over"]);
    assert!(load(&network(row(16_000, "Cos"), vec![])).is_ok());

    // As many nodes as a file may have, beside each other.
    let names: Vec<String> = (0..16_000).map(|i| format!("w{i}")).collect();
    let mut wide: Vec<_> = names.iter().map(|name| node("Cos", &["x"], &[name], &[])).collect();
    wide.push(node("Sum", &names.iter().map(String::as_str).collect::<Vec<_>>(), &["out"], &[]));
    assert!(load(&network(wide, vec![])).is_ok());

    // One large product.
    let mut nodes = vec![
        node("Tile", &["x", "wide"], &["t"], &[]),
        node("Sin", &["t"], &["s"], &[]),
        node("Reshape", &["s", "square"], &["m"], &[]),
    ];
    nodes.push(node("MatMul", &["m", "w"], &["p"], &[]));
    nodes.push(node("ReduceSum", &["p", "axes"], &["out"], &[("keepdims", &[0])]));
    let tensors = vec![
        ints("wide", &[1, 1 << 19]),
        ints("square", &[-1, 1 << 11, 1 << 10]),
        quarters("w", &[1 << 10, 1 << 12]),
        ints("axes", &[1, 2]),
    ];
    refused(nodes, tensors, &["multiply-adds a sample"]);

    let cycle = vec![node("Sin", &["b"], &["a"], &[]), node("Cos", &["a"], &["b"], &[])];
    let error = load(&network(ended(cycle, "b"), vec![])).err().unwrap();
    assert!(error.to_string().contains("reads `b`, which nothing writes"), "{error}");
    assert!(matches!(error, DenseError::Load(_)));
    let twice = vec![node("Sin", &["x"], &["a"], &[]), node("Cos", &["x"], &["a"], &[])];
    let error = load(&network(ended(twice, "a"), vec![])).err().unwrap();
    assert!(error.to_string().contains("`a` is written twice"), "{error}");
}

/// Returns the scores of two samples of the network of `nodes`.
pub fn scores(nodes: Vec<NodeProto>, tensors: Vec<TensorProto>, x: [f32; 8]) -> Vec<f32> {
    let engine = load(&network(nodes, tensors)).unwrap_or_else(|e| panic!("{e}"));
    let mut scores = vec![9.0; 2 * engine.outputs()];
    engine.run(2, &[x], &mut scores, &mut engine.scratch(2)).unwrap();
    scores
}

#[test]
fn masks_of_the_models_of_the_field_run() {
    let batch = || {
        vec![
            node("Shape", &["x"], &["shape"], &[]),
            node("Gather", &["shape", "first"], &["batch"], &[]),
        ]
    };
    // `masked_select` by a constant mask that is expanded to the batch.
    let masked = vec![
        node("Concat", &["batch", "rest"], &["to"], &[("axis", &[0])]),
        node("Expand", &["mask", "to"], &["all"], &[]),
        node("NonZero", &["all"], &["at"], &[]),
        node("Transpose", &["at"], &["rows"], &[]),
        node("Unsqueeze", &["x", "last"], &["column"], &[]),
        node("MatMul", &["column", "line"], &["wide"], &[]),
        node("GatherND", &["wide", "rows"], &["some"], &[]),
        node("Reshape", &["some", "open"], &["out"], &[]),
    ];
    let tensors = vec![
        ints("first", &[0]),
        ints("rest", &[4, 2]),
        ints("open", &[-1, 3]),
        ints("last", &[2]),
        tensor("mask", &[4, 2], &[0, 1, 0, 0, 1, 1, 0, 0]),
        quarters("line", &[1, 2]),
    ];
    let x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    let some = scores([batch(), masked].concat(), tensors, x);
    assert_eq!(some, [0.25, 0.75, 0.75, 1.25, 1.75, 1.75]);

    // `repeat_interleave` of a mask: a OneHot whose depth is a size.
    let repeated = vec![
        node("Gather", &["shape", "end"], &["width"], &[]),
        node("OneHot", &["list", "width", "pair"], &["hot"], &[]),
        node("MatMul", &["x", "hot"], &["out"], &[]),
    ];
    let tensors = vec![
        ints("first", &[0]),
        ints("list", &[0, 1, -1, 4]),
        ints("end", &[1]),
        floats("pair", &[2], &[0.0, 1.0]),
    ];
    let hot = scores([batch(), repeated].concat(), tensors, x);
    assert_eq!(hot, [1.0, 2.0, 0.0, 3.0, 5.0, 6.0, 0.0, 7.0]);
}

#[test]
fn layers_of_the_models_of_the_field_run() {
    let recurrent = vec![
        node("Unsqueeze", &["x", "first"], &["steps"], &[]),
        node("LSTM", &["steps", "w", "r"], &["all", "last"], &[("hidden_size", &[3])]),
        node("Squeeze", &["last", "first"], &["out"], &[]),
    ];
    let weights = vec![ints("first", &[0]), quarters("w", &[1, 12, 4]), quarters("r", &[1, 12, 3])];
    assert!(load(&network(recurrent, weights)).is_ok());

    let one: &[i64] = &[1, 1];
    let attributes = [("strides", one), ("dilations", one), ("pads", &[0; 4])];
    let convolution = node("Conv", &["u", "k"], &["c"], &attributes);
    let convolved = vec![
        node("Reshape", &["x", "image"], &["u"], &[]),
        convolution,
        node("GlobalMaxPool", &["c"], &["p"], &[]),
        node("Flatten", &["p"], &["out"], &[]),
    ];
    let weights = vec![quarters("k", &[2, 1, 2, 1]), ints("image", &[-1, 1, 2, 2])];
    assert!(load(&network(convolved, weights)).is_ok());

    let top = vec![node("TopK", &["x", "two"], &["out", "at"], &[])];
    let x = [1.0, 4.0, 4.0, 2.0, -1.0, -2.0, -3.0, -0.5];
    assert_eq!(scores(top, vec![ints("two", &[2])], x), [4.0, 4.0, -0.5, -1.0]);
}

/// The square roots of negative values are NaN, and many values are equal.
#[test]
fn the_best_values_are_those_of_a_stable_sort() {
    let x = [4.0f32, 9.0, 0.25, -1.0, 1.0, -4.0, 16.0, 0.0];
    for (n, inner, k, largest) in [
        (1, 1, 1, 1),
        (9, 1, 1, 0),
        (26, 1, 26, 1),
        (26, 2, 7, 0),
        (30, 1, 3, 1),
        (128, 1, 128, 0),
        (129, 2, 129, 1),
        (200, 1, 20, 0),
        (2, 4, 2, 0),
        (3, 8, 3, 1),
        (20, 17, 20, 1),
        (32, 5, 1, 0),
        (33, 9, 33, 0),
    ] {
        let picks: Vec<i64> = (0..n * inner).map(|i| (i * 7 + i / 3) % 4).collect();
        let nodes = vec![
            node("Gather", &["x", "picks"], &["g"], &[("axis", &[1])]),
            node("Sqrt", &["g"], &["roots"], &[]),
            node("Reshape", &["roots", "shape"], &["y"], &[]),
            node("TopK", &["y", "k"], &["top", "at"], &[("axis", &[1]), ("largest", &[largest])]),
            node("Cast", &["at"], &["places"], &[("to", &[1])]),
            node("Flatten", &["places"], &["out"], &[]),
        ];
        let constants =
            vec![ints("picks", &picks), ints("shape", &[-1, n, inner]), ints("k", &[k])];
        let engine = load(&network(nodes, constants)).unwrap();
        let mut found = vec![0.0; (2 * k * inner) as usize];
        engine.run(2, &[x.to_vec()], &mut found, &mut engine.scratch(2)).unwrap();

        let [n, inner, k] = [n, inner, k].map(|size| size as usize);
        for (sample, found) in found.chunks(k * inner).enumerate() {
            for column in 0..inner {
                let root = |i: usize| x[sample * 4 + picks[i * inner + column] as usize].sqrt();
                let rank = |i: usize| if largest == 1 { -root(i) } else { root(i) };
                let mut order: Vec<usize> = (0..n).collect();
                order.sort_by(|&a, &b| {
                    let numbers = (rank(a).is_nan(), rank(b).is_nan());
                    numbers
                        .0
                        .cmp(&numbers.1)
                        .then(rank(a).partial_cmp(&rank(b)).unwrap_or(std::cmp::Ordering::Equal))
                });
                let found = found.iter().skip(column).step_by(inner).map(|at| *at as usize);
                assert!(found.eq(order.into_iter().take(k)), "{n} {inner} {k} {largest}");
            }
        }
    }
}

#[test]
fn a_choice_reads_conditions_and_values_of_every_form() {
    let x = [1.0f32, -2.0, 3.0, -4.0, -5.0, 6.0, -7.0, 8.0];
    let both = |f: &dyn Fn(&[f32], usize) -> f32| -> Vec<f32> {
        x.chunks(4).flat_map(|x| (0..8).map(move |i| (x, i))).map(|(x, i)| f(x, i)).collect()
    };
    let nodes = || {
        vec![
            node("Greater", &["x", "zero"], &["c"], &[]),
            node("Unsqueeze", &["c", "two"], &["each"], &[]),
            node("Unsqueeze", &["c", "one"], &["rows"], &[]),
            node("Unsqueeze", &["x", "two"], &["y"], &[]),
            node("Concat", &["y", "y"], &["wide"], &[("axis", &[2])]),
            node("Reshape", &["wide", "shape"], &["tall"], &[]),
            node("Unsqueeze", &["x", "one"], &["x3"], &[]),
        ]
    };
    let last = node("Flatten", &["w"], &["out"], &[]);
    let ended = |inputs: [&str; 3]| {
        let mut nodes = nodes();
        nodes.extend([node("Where", &inputs, &["w"], &[]), last.clone()]);
        let constants = vec![
            quarters("zero", &[]),
            ints("one", &[1]),
            ints("two", &[2]),
            ints("shape", &[-1, 2, 4]),
            floats("k", &[4, 2], &(0..8).map(|i| i as f32).collect::<Vec<_>>()),
        ];
        let engine = load(&network(nodes, constants)).unwrap();
        let mut found = vec![0.0; 16];
        engine.run(2, &[x.to_vec()], &mut found, &mut engine.scratch(2)).unwrap();
        found
    };
    let positive = |x: f32| x > 0.25; // the constant `zero` of these tests
    let constant = |i: usize| i as f32;
    let expected = both(&|x, i| if positive(x[i / 2]) { x[i / 2] } else { constant(i) });
    assert_eq!(ended(["each", "wide", "k"]), expected);
    let expected = both(&|x, i| if positive(x[i / 2]) { constant(i) } else { x[i / 2] });
    assert_eq!(ended(["each", "k", "y"]), expected);
    let expected = both(&|x, i| if positive(x[i % 4]) { x[i / 2] } else { x[i % 4] });
    assert_eq!(ended(["rows", "tall", "x3"]), expected);
}

/// `squeeze(1)` of PyTorch is an `If` whose condition follows from a shape.
#[test]
fn a_branch_that_follows_from_shapes_runs_on_our_engine() {
    let squeeze = branch(vec![node("Squeeze", &["sum", "one"], &["s"], &[])]);
    let same = branch(vec![node("Identity", &["sum"], &["i"], &[])]);
    let nodes = vec![
        node("ReduceSum", &["x", "one"], &["sum"], &[]),
        node("Shape", &["sum"], &["shape"], &[]),
        node("Gather", &["shape", "one"], &["size"], &[]),
        node("Equal", &["size", "one"], &["c"], &[]),
        with_graphs(
            node("If", &["c"], &["q"], &[]),
            &[("then_branch", squeeze), ("else_branch", same)],
        ),
        node("Tanh", &["q"], &["out"], &[]),
    ];
    let engine = load(&network(nodes, vec![ints("one", &[1])])).unwrap();
    let (x, mut scores) = ([vec![0.1, 0.2, 0.3, -0.2, 1.0, 0.0, 0.0, 0.0]], [0.0; 2]);
    engine.run(2, &x, &mut scores, &mut engine.scratch(2)).unwrap();
    for (score, sum) in scores.iter().zip([0.4f32, 1.0]) {
        assert!((score - sum.tanh()).abs() < 1e-6, "{scores:?}");
    }
}

#[test]
fn a_refusal_has_the_words_of_onnx_and_of_its_user() {
    let says = |nodes: Vec<NodeProto>, tensors: Vec<TensorProto>, problem: &str| {
        let error = load(&network(nodes, tensors)).err().expect("a refusal").to_string();
        assert!(error.contains(problem), "{error}");
    };
    let cast = |to| node("Cast", &["x"], &["out"], &[("to", &[to])]);
    says(vec![cast(16)], vec![], "Cast to type BFLOAT16, node `out`");
    says(vec![cast(99)], vec![], "Cast to type unknown");
    let brain = TensorProto {
        data_type: Some(BFLOAT16),
        int64_data: vec![],
        int32_data: vec![0],
        ..tensor("b", &[1], &[])
    };
    let like = node("CastLike", &["x", "b"], &["out"], &[]);
    says(vec![like], vec![brain], "CastLike to type BFLOAT16");
    let far = vec![
        node("Cast", &["w"], &["far"], &[("to", &[6])]),
        node("Tile", &["x", "far"], &["out"], &[]),
    ];
    says(far, vec![floats("w", &[2], &[1.0, 3e9])], "Cast of such a constant to INT32");
    let pick = node("Gather", &["x", "at"], &["out"], &[("axis", &[1])]);
    says(vec![pick], vec![ints("at", &[-5])], "Gather: index -5 is out of range, the axis has 4");
    let reshape = node("Reshape", &["x", "shape"], &["out"], &[]);
    says(vec![reshape], vec![ints("shape", &[2, 2])], "Reshape of [batch, 4] to [2, 2]");
    let compare = vec![
        node("Cast", &["x"], &["i"], &[("to", &[7])]),
        node("Add", &["x", "i"], &["out"], &[]),
    ];
    says(compare, vec![], "Add of types FLOAT and INT64");
    let mut weights = quarters("w", &[4, 2]);
    weights.float_data[3] = f32::NAN;
    let gemm = node("Gemm", &["x", "w"], &["out"], &[]);
    says(vec![gemm], vec![weights], "weight `w`: value [1, 1] is NaN, not finite, node `out`");
    let strings = TensorProto { data_type: Some(8), ..tensor("s", &[1], &[0]) };
    says(vec![cast(1)], vec![strings], "tensor `s`: element type STRING");

    // Ids are looked up outside of the network.
    let mut model = network(vec![cast(1)], vec![]);
    let of = TensorTypeProto { elem_type: Some(7), ..TensorTypeProto::default() };
    let ids = ValueInfoProto {
        name: Some("ids".to_owned()),
        r#type: Some(TypeProto { tensor_type: Some(of) }),
    };
    model.graph.as_mut().unwrap().input.push(ids);
    let error = load(&model).err().expect("a refusal").to_string();
    assert!(error.contains("input `ids` is INT64, only FLOAT") && error.contains("export"));
}
