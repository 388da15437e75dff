//! Small graphs of every operator: the plan is compared with rten on the same file, and invalid
//! files are refused.

use crate::onnx_files::{floats, ints, model, node};
use hatchback_kernels::dense::graph::onnx::*;
use hatchback_kernels::dense::{Activation, DenseEngine, DenseError};
use prost::Message;
use rten::{ModelOptions, ValueOrView, ValueView};

/// Returns an input of floats, `[batch, shape]`.
fn input(name: &str, shape: &[i64]) -> ValueInfoProto {
    let fixed = |&n: &i64| Dimension { dim_value: Some(n), dim_param: None };
    input_of(name, std::iter::once(open("batch")).chain(shape.iter().map(fixed)).collect())
}

fn open(name: &str) -> Dimension {
    Dimension { dim_value: None, dim_param: Some(name.to_owned()) }
}

fn input_of(name: &str, dim: Vec<Dimension>) -> ValueInfoProto {
    let shape = Some(TensorShapeProto { dim });
    let tensor_type = Some(TensorTypeProto { elem_type: Some(FLOAT), shape });
    ValueInfoProto { name: Some(name.to_owned()), r#type: Some(TypeProto { tensor_type }) }
}

/// Returns a network with the inputs `x` `[batch, 4]` and `y` `[batch, 3, 4]`.
fn network(nodes: Vec<NodeProto>, tensors: Vec<TensorProto>) -> ModelProto {
    model(13, vec![input("x", &[4]), input("y", &[3, 4])], nodes, tensors)
}

fn load(model: &ModelProto) -> Result<DenseEngine, DenseError> {
    let inputs = [("x", 4), ("y", 12)];
    DenseEngine::load(model.encode_to_vec(), &inputs, "out", Activation::None)
}

/// Returns a network of one node, whose result is the output, and the tensors that the node reads.
fn single(
    op: &str,
    inputs: &[&str],
    attributes: &[(&str, &[i64])],
    tensors: Vec<TensorProto>,
) -> ModelProto {
    network(vec![node(op, inputs, &["out"], attributes)], tensors)
}

/// Returns `n` values of both signs.
fn w(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.7).sin()).collect()
}

fn products() -> Vec<(&'static str, ModelProto)> {
    let matrix = || floats("w", &[4, 5], &w(20));
    vec![
        ("gemm", single("Gemm", &["x", "w", "b"], &[], vec![matrix(), floats("b", &[5], &w(5))])),
        (
            "gemm, scalar bias",
            single("Gemm", &["x", "w", "b"], &[], vec![matrix(), floats("b", &[1], &[0.5])]),
        ),
        (
            "gemm turned",
            single("Gemm", &["x", "w"], &[("transB", &[1])], vec![floats("w", &[7, 4], &w(28))]),
        ),
        ("matmul of rows", single("MatMul", &["y", "w"], &[], vec![matrix()])),
        (
            "matmul, bias, relu",
            network(
                vec![
                    node("MatMul", &["x", "w"], &["a"], &[]),
                    node("Add", &["b", "a"], &["c"], &[]),
                    node("Relu", &["c"], &["out"], &[]),
                ],
                vec![matrix(), floats("b", &[5], &w(5))],
            ),
        ),
        (
            "a product read twice is not fused",
            network(
                vec![
                    node("MatMul", &["x", "w"], &["a"], &[]),
                    node("Relu", &["a"], &["c"], &[]),
                    node("Sub", &["a", "c"], &["out"], &[]),
                ],
                vec![matrix()],
            ),
        ),
        (
            "products of computed values",
            network(
                vec![
                    node("Transpose", &["y"], &["t"], &[("perm", &[0, 2, 1])]),
                    node("MatMul", &["y", "t"], &["p"], &[]),
                    node("MatMul", &["p", "y"], &["out"], &[]),
                ],
                vec![],
            ),
        ),
        ("transpose", single("Transpose", &["y"], &[("perm", &[0, 2, 1])], vec![])),
    ]
}

/// Layers of `[batch, channels, length]`; the second reads the channels beside each other.
fn convolutions() -> Vec<(&'static str, ModelProto)> {
    // rten has no defaults.
    let convolution = |inputs: &[&str], to: &str, attributes: &[(&str, &[i64])]| {
        let one: &[i64] = &[1];
        let defaults = [("strides", one), ("dilations", one), ("pads", &[0, 0])];
        let is_given = |name: &str| attributes.iter().any(|(given, _)| *given == name);
        let defaults = defaults.into_iter().filter(|(name, _)| !is_given(name));
        node("Conv", inputs, &[to], &[attributes, &defaults.collect::<Vec<_>>()].concat())
    };
    let layers = |ends: Vec<NodeProto>, weights: &[i64]| {
        let mut nodes = vec![
            convolution(&["y", "first", "b"], "c", &[("pads", &[1, 1])]),
            node("Relu", &["c"], &["r"], &[]),
        ];
        nodes.extend(ends);
        let floats = |name: &str, dims: &[i64]| {
            floats(name, dims, &w(dims.iter().product::<i64>() as usize))
        };
        let tensors = [("first", &[6, 3, 2][..]), ("b", &[6]), ("second", weights), ("b2", &[4])];
        let tensors = tensors.iter().map(|(name, dims)| floats(name, dims));
        network(nodes, tensors.chain([ints("last", &[2])]).collect())
    };
    let padded: (&str, &[i64]) = ("pads", &[2, 1]);
    vec![
        (
            "a dilated convolution with padding after one",
            layers(
                vec![convolution(&["r", "second", "b2"], "out", &[padded, ("dilations", &[2])])],
                &[4, 6, 3],
            ),
        ),
        (
            "a convolution by groups, a function and a pooling after one",
            layers(
                vec![
                    convolution(&["r", "second", "b2"], "d", &[padded, ("group", &[2])]),
                    node("Tanh", &["d"], &["t"], &[]),
                    node("Sigmoid", &["d"], &["s"], &[]),
                    node("Mul", &["d", "s"], &["silu"], &[]),
                    node("Add", &["t", "silu"], &["sum"], &[]),
                    node("GlobalMaxPool", &["sum"], &["out"], &[]),
                ],
                &[4, 3, 3],
            ),
        ),
        (
            "a convolution whose channels two nodes read",
            layers(
                vec![
                    convolution(&["r", "second"], "d", &[]),
                    node("ReduceSum", &["r", "last"], &["sums"], &[("keepdims", &[1])]),
                    node("Flatten", &["sums"], &["f"], &[]),
                    node("Flatten", &["d"], &["g"], &[]),
                    node("Concat", &["f", "g"], &["out"], &[("axis", &[1])]),
                ],
                &[4, 6, 2],
            ),
        ),
    ]
}

fn products_of_pairs() -> Vec<(&'static str, ModelProto)> {
    vec![
        (
            "products of the rows of a concat, above and below the diagonal and on it",
            network(
                vec![
                    node("Unsqueeze", &["x", "one"], &["u"], &[]),
                    node("Concat", &["y", "u"], &["v"], &[("axis", &[1])]),
                    node("Transpose", &["v"], &["t"], &[("perm", &[0, 2, 1])]),
                    node("MatMul", &["v", "t"], &["p"], &[]),
                    node("Reshape", &["p", "line"], &["l"], &[]),
                    node("Gather", &["l", "some"], &["out"], &[("axis", &[1])]),
                ],
                vec![
                    ints("one", &[1]),
                    ints("line", &[-1, 16]),
                    ints("some", &[1, 4, 2, 15, 14, 11, 5, 8]),
                ],
            ),
        ),
        (
            "products of the rows of a concat, which another node reads too",
            network(
                vec![
                    node("Unsqueeze", &["x", "one"], &["u"], &[]),
                    node("Concat", &["u", "y", "u"], &["v"], &[("axis", &[1])]),
                    node("Transpose", &["v"], &["t"], &[("perm", &[0, 2, 1])]),
                    node("MatMul", &["v", "t"], &["p"], &[]),
                    node("MatMul", &["p", "v"], &["out"], &[]),
                ],
                vec![ints("one", &[1])],
            ),
        ),
    ]
}

fn elementwise() -> Vec<(&'static str, ModelProto)> {
    vec![
        ("sigmoid", single("Sigmoid", &["y"], &[], vec![])),
        ("tanh", single("Tanh", &["x"], &[], vec![])),
        ("relu", single("Relu", &["x"], &[], vec![])),
        ("subtract a vector", single("Sub", &["y", "w"], &[], vec![floats("w", &[4], &w(4))])),
        ("from a scalar", single("Sub", &["w", "y"], &[], vec![floats("w", &[], &[2.0])])),
        (
            "divide by a column",
            single("Div", &["y", "w"], &[], vec![floats("w", &[1, 3, 1], &[2.0, -3.0, 4.0])]),
        ),
        (
            "broadcast of computed values",
            network(
                vec![
                    node("Unsqueeze", &["x", "one"], &["u"], &[]),
                    node("Mul", &["u", "y"], &["m"], &[]),
                    node("ReduceMean", &["m"], &["r"], &[("axes", &[2]), ("keepdims", &[1])]),
                    node("Add", &["r", "u"], &["out"], &[]),
                ],
                vec![ints("one", &[1])],
            ),
        ),
        (
            "a value times its sigmoid",
            network(
                vec![node("Sigmoid", &["y"], &["s"], &[]), node("Mul", &["s", "y"], &["out"], &[])],
                vec![],
            ),
        ),
        (
            "a value times its sigmoid, and the sigmoid",
            network(
                vec![
                    node("Sigmoid", &["x"], &["s"], &[]),
                    node("Mul", &["x", "s"], &["m"], &[]),
                    node("Mul", &["s", "s"], &["q"], &[]),
                    node("Sub", &["m", "q"], &["out"], &[]),
                ],
                vec![],
            ),
        ),
        ("square", single("Pow", &["y", "two"], &[], vec![floats("two", &[], &[2.0])])),
    ]
}

fn softmaxes() -> Vec<(&'static str, ModelProto)> {
    // The exponential of these values overflows.
    let large = || floats("k", &[1], &[1e3]);
    let scaled = |op: &str, input: &str, axis: i64| {
        let scale = node("Mul", &[input, "k"], &["a"], &[]);
        network(vec![scale, node(op, &["a"], &["out"], &[("axis", &[axis])])], vec![large()])
    };
    vec![
        ("softmax of large values", scaled("Softmax", "x", 1)),
        ("softmax of large values in rows", scaled("Softmax", "y", 2)),
        ("softmax of large values in columns", scaled("Softmax", "y", 1)),
    ]
}

fn sums_and_views() -> Vec<(&'static str, ModelProto)> {
    vec![
        (
            "sum of the middle",
            single("ReduceSum", &["y", "a"], &[("keepdims", &[0])], vec![ints("a", &[1])]),
        ),
        ("sum of both", single("ReduceSum", &["y", "a"], &[], vec![ints("a", &[-1, 1])])),
        ("mean", single("ReduceMean", &["y"], &[("axes", &[-1]), ("keepdims", &[0])], vec![])),
        ("concat at the end", single("Concat", &["y", "y", "y"], &[("axis", &[2])], vec![])),
        ("concat in the middle", single("Concat", &["y", "y"], &[("axis", &[-2])], vec![])),
        ("flatten", single("Flatten", &["y"], &[], vec![])),
        (
            "gather",
            single("Gather", &["y", "i"], &[("axis", &[2])], vec![ints("i", &[3, 0, -1, 0])]),
        ),
        (
            "slice",
            single(
                "Slice",
                &["y", "s", "e", "a"],
                &[],
                vec![ints("s", &[1]), ints("e", &[i64::MAX]), ints("a", &[1])],
            ),
        ),
        (
            "split",
            network(
                vec![
                    node("Split", &["y", "parts"], &["a", "b"], &[("axis", &[2])]),
                    node("Concat", &["b", "a"], &["out"], &[("axis", &[1])]),
                ],
                vec![ints("parts", &[2, 2])],
            ),
        ),
        (
            "reshape by the shape",
            network(
                vec![
                    node("Unsqueeze", &["x", "two"], &["u"], &[]),
                    node("Shape", &["y"], &["shape"], &[]),
                    node("Gather", &["shape", "zero"], &["batch"], &[("axis", &[0])]),
                    node("Concat", &["batch", "rest"], &["to"], &[("axis", &[0])]),
                    node("Reshape", &["y", "to"], &["r"], &[]),
                    node("Squeeze", &["u", "two"], &["q"], &[]),
                    node("Concat", &["q", "r"], &["out"], &[("axis", &[1])]),
                ],
                vec![ints("zero", &[0]), ints("rest", &[-1]), ints("two", &[2])],
            ),
        ),
        ("identity", single("Identity", &["y"], &[], vec![])),
    ]
}

/// Returns what the library rten gives for `model`.
fn by_rten(model: &ModelProto, inputs: &[Vec<f32>; 2], batch: usize) -> Vec<f32> {
    let model = ModelOptions::with_all_ops().load(model.encode_to_vec()).unwrap();
    let shapes = [vec![batch, 4], vec![batch, 3, 4]];
    let fed =
        ["x", "y"].iter().zip(inputs.iter().zip(&shapes)).filter_map(|(name, (data, shape))| {
            let id = model.find_node(name)?;
            Some((id, ValueOrView::from(ValueView::from_shape(shape, data).unwrap())))
        });
    let out = model.find_node("out").unwrap();
    let mut values = model.run(fed.collect(), &[out], None).unwrap();
    let tensor: rten_tensor::Tensor<f32> = values.pop().unwrap().try_into().unwrap();
    tensor.into_data()
}

#[test]
fn every_operator_gives_the_result_of_rten() {
    let values = |n: usize| (0..n).map(|i| ((i * i) as f32 * 0.37).cos()).collect::<Vec<_>>();
    let products = [products(), products_of_pairs(), convolutions()].concat();
    let lists = [products, elementwise(), softmaxes(), sums_and_views()];
    for (name, model) in lists.concat() {
        let engine = load(&model).unwrap_or_else(|e| panic!("{name}: {e}"));
        for batch in [1, 2, 5, 100] {
            let inputs = [values(4 * batch), values(12 * batch)];
            let expected = by_rten(&model, &inputs, batch);
            let mut scores = vec![f32::NAN; batch * engine.outputs()];
            assert_eq!(scores.len(), expected.len(), "{name}");
            engine.run(batch, &inputs, &mut scores, &mut engine.scratch(batch)).unwrap();
            for (a, b) in scores.iter().zip(&expected) {
                assert!((a - b).abs() <= 1e-5, "{name}, batch {batch}: {a}, rten {b}");
            }
        }
    }
}

#[test]
fn a_refused_operator_is_named_with_its_line_of_python() {
    let mut model = single("Hardmax", &["x"], &[], vec![]);
    let refusal = |model: &ModelProto| load(model).err().expect("a refusal").to_string();
    assert!(refusal(&model).ends_with("does not run Hardmax, node `out`"), "{}", refusal(&model));

    let node = &mut model.graph.as_mut().expect("a graph").node[0];
    node.doc_string = Some("/car/model.py(12): forward\n/torch/module.py(9): call".to_owned());
    assert!(refusal(&model).ends_with("from the line `/car/model.py(12): forward`"));
    let node = &mut model.graph.as_mut().expect("a graph").node[0];
    node.metadata_props = vec![StringStringEntryProto {
        key: Some("pkg.torch.onnx.stack_trace".to_owned()),
        value: Some("File \"model.py\", line 12\n    return hard(x)\n".to_owned()),
    }];
    assert!(refusal(&model).ends_with("from the line `return hard(x)`"));
}

#[test]
fn a_network_whose_samples_meet_is_refused() {
    let mean = [
        node("ReduceMean", &["x"], &["m"], &[("axes", &[0])]),
        node("Sub", &["x", "m"], &["out"], &[]),
    ];
    let sum = single("ReduceSum", &["x"], &[("keepdims", &[0])], vec![]);
    for model in [network(mean.to_vec(), vec![]), sum] {
        let error = load(&model).err().expect("samples meet");
        assert!(
            matches!(error, DenseError::Unsupported(_))
                && error.to_string().contains("over the batch"),
            "{error}"
        );
    }
}

#[test]
fn an_input_that_is_no_float_is_refused() {
    let mut model = single("Relu", &["x"], &[], vec![]);
    let input = &mut model.graph.as_mut().expect("a graph").input[0];
    input.r#type.as_mut().and_then(|t| t.tensor_type.as_mut()).expect("a tensor").elem_type =
        Some(INT64);
    let error = load(&model).err().expect("an input of integers");
    assert!(matches!(error, DenseError::InputType { of: "INT64", .. }), "{error}");
}

#[test]
fn one_open_axis_follows_from_the_width_and_others_are_refused() {
    let four = || Dimension { dim_value: Some(4), dim_param: None };
    let load_with = |dim: Vec<Dimension>, width: usize| {
        let nodes = [
            node("ReduceMax", &["y", "last"], &["most"], &[("keepdims", &[0])]),
            node("ReduceSum", &["most", "one"], &["out"], &[("keepdims", &[0])]),
        ];
        let constants = vec![ints("last", &[2]), ints("one", &[1])];
        let inputs = vec![input("x", &[4]), input_of("y", dim)];
        let model = model(13, inputs, nodes.to_vec(), constants).encode_to_vec();
        DenseEngine::load(model, &[("x", 4), ("y", width)], "out", Activation::None)
    };
    let engine = load_with(vec![open("batch"), open("steps"), four()], 12).unwrap();
    let y = vec![1.0, 9.0, 2.0, 0.0, 5.0, 5.0, 5.0, 5.0, -1.0, -2.0, -3.0, -4.0];
    let mut scores = [0.0];
    engine.run(1, &[vec![0.0; 4], y], &mut scores, &mut engine.scratch(1)).unwrap();
    assert_eq!(scores, [13.0]);

    assert!(load_with(vec![open("N"), open("N"), four()], 12).is_ok());

    for (dim, width, problem) in [
        (vec![open("batch"), open("steps"), four()], 13, "`y` takes 12 values a sample, the sch"),
        (vec![open("steps"), open("batch"), four()], 12, "`y` with the batch, `batch`, on another"),
        (vec![open("batch"), open("steps"), open("dim")], 12, "`y` with 2 open axes after the"),
    ] {
        let error = load_with(dim, width).err().expect("a refusal").to_string();
        assert!(error.contains(problem), "{error}");
    }
}

#[test]
fn a_cast_to_integers_drops_the_fraction() {
    let casts = [
        node("Cast", &["x"], &["i"], &[("to", &[7])]),
        node("Cast", &["i"], &["out"], &[("to", &[1])]),
    ];
    let engine = load(&network(casts.to_vec(), vec![])).unwrap();
    let (inputs, mut scores) = ([vec![-1.5, -0.5, 0.9, 2.0], vec![0.0; 12]], vec![9.0; 4]);
    engine.run(1, &inputs, &mut scores, &mut engine.scratch(1)).unwrap();
    assert_eq!(
        scores.iter().map(|s| s.to_bits()).collect::<Vec<_>>(),
        [(-1.0f32).to_bits(), 0.0f32.to_bits(), 0.0f32.to_bits(), 2.0f32.to_bits()]
    );
}

#[test]
fn files_that_contradict_themselves_are_refused() {
    let refused = |model: &ModelProto, what: &str| match load(model) {
        Ok(_) => panic!("not refused: {what}"),
        Err(e) => assert!(e.to_string().contains(what), "{e}, not {what}"),
    };
    let gemm = |w| single("Gemm", &["x", "w"], &[], vec![w]);

    refused(&gemm(floats("w", &[4, 1 << 40], &[1.0])), "tensor `w`");
    refused(&gemm(floats("w", &[1 << 62, 4], &[])), "tensor `w`: shape");
    refused(&gemm(floats("w", &[-4, -5], &[0.0; 20])), "tensor `w`: shape");
    refused(&gemm(floats("w", &[5, 4], &[0.0; 20])), "Gemm of width 4");
    refused(&gemm(floats("w", &[4, 1], &[0.0, 0.0, f32::INFINITY, 0.0])), "not finite");

    let elsewhere = TensorProto { data_location: Some(1), ..floats("w", &[4, 1], &[0.0; 4]) };
    refused(&gemm(elsewhere), "another file");
    refused(&single("Relu", &["z"], &[], vec![]), "reads `z`, which nothing writes");
    refused(
        &single("Gather", &["y", "i"], &[("axis", &[1])], vec![ints("i", &[3])]),
        "out of range",
    );
    refused(&single("Concat", &["x", "y"], &[("axis", &[1])], vec![]), "Concat");

    // Values that double with every node: a small file that would take all memory.
    let double = |i: usize| {
        let (from, to) = (format!("d{i}"), format!("d{}", i + 1));
        node("Concat", &[&from, &from], &[&to], &[("axis", &[1])])
    };
    let first = node("Identity", &["x"], &["d0"], &[]);
    let last = node("Identity", &["d40"], &["out"], &[]);
    let bomb = std::iter::once(first).chain((0..40).map(double)).chain([last]).collect();
    refused(&network(bomb, vec![]), "values a sample");

    // Integers that double, and weights that many nodes pass on.
    let double = |i: usize| {
        let (from, to) = (format!("d{i}"), format!("d{}", i + 1));
        node("Concat", &[&from, &from], &[&to], &[("axis", &[0])])
    };
    refused(&network((0..40).map(double).collect(), vec![ints("d0", &[1])]), "values a sample");
    let again = |op: &str| (0..200).map(|i| node(op, &["w"], &[&format!("o{i}")], &[])).collect();
    refused(
        &network(again("Transpose"), vec![floats("w", &[4, 1 << 19], &vec![0.5; 4 << 19])]),
        "weights",
    );

    // A constant that a shape makes large.
    let large =
        [node("Expand", &["w", "to"], &["e"], &[]), node("Add", &["e", "x"], &["out"], &[])];
    let one = floats("w", &[1], &[0.5]);
    refused(
        &network(large.to_vec(), vec![one, ints("to", &[1 << 13, 1 << 13])]),
        "values a sample",
    );

    // Many nodes that pack the same weights.
    let wide = floats("w", &[4, 1 << 19], &vec![0.5; 4 << 19]);
    let many = (0..200)
        .map(|i| if i == 0 { "out".to_owned() } else { format!("o{i}") })
        .map(|name| node("Gemm", &["x", "w"], &[&name], &[]))
        .collect();
    refused(&network(many, vec![wide]), "a sample");

    assert!(load(&ModelProto::default()).is_err());
}
