//! How a network's ONNX file stores its weights. A matrix of f32 weights can be stored narrower: as
//! FLOAT16 before a `Cast`, or as INT8 before a `DequantizeLinear` with one scale for each output.
//! Both are ONNX's own operators, so every engine reads such a file. `stored.rs` tells the kernels
//! which matrix was narrow. Never changes what is not the weights of a product.

use crate::dense::error::DenseError;
use crate::dense::graph::onnx::{
    AttributeProto, FLOAT, FLOAT16, GraphProto, INT8, ModelProto, NodeProto, TensorProto, read,
};
use crate::dense::graph::tensor::Values;
use crate::dense::weights::Weights;
use half::f16;
use prost::Message;
use std::collections::{BTreeMap, HashMap, HashSet};

/// The form of each weight matrix of a network, by the name of its values in the graph.
pub type Forms = BTreeMap<String, Weights>;

/// `AttributeProto.AttributeType` of an integer.
const INT: i32 = 2;
/// The first version of ONNX whose `DequantizeLinear` has a scale for each output.
const OPSET_OF_AXES: i64 = 13;
/// Least number of weights of a matrix that is worth an operator of its own.
const WEIGHTS_MIN: usize = 64;
/// The greatest int8 weight. -128 is left out, so that every weight has a negative.
const WEIGHT_MAX: f32 = 127.0;

/// Returns the form of each weight matrix of `onnx`: those that are narrow, and those of f32 that
/// [`narrow`] can store narrower.
///
/// # Errors
/// [`DenseError::Load`] if the file is malformed.
pub fn forms(onnx: &[u8]) -> Result<Forms, DenseError> {
    let mut model = read(onnx.to_vec().into())?;
    let graph = model.graph.get_or_insert_default();
    let narrow = narrow_weights(graph).into_iter().filter(|n| n.form != Weights::F32);
    let mut forms: Forms = narrow.map(|n| (n.name, n.form)).collect();
    forms.extend(axes_of_outputs(graph).into_keys().map(|name| (name, Weights::F32)));
    Ok(forms)
}

/// Returns `onnx`, whose weights are f32, with the matrices of `forms` stored in their forms. Names
/// that `onnx` does not have, and forms that a matrix cannot have, are left out: a weight beyond
/// f16's range stays f32, and so does int8 before opset 13. [`forms`] of the result says what was
/// done.
///
/// # Errors
/// [`DenseError::Load`] if the file is malformed.
pub fn narrow(onnx: &[u8], forms: &Forms) -> Result<Vec<u8>, DenseError> {
    let mut model = read(onnx.to_vec().into())?;
    let opset = model.opset();
    let graph = model.graph.get_or_insert_default();
    let axes = axes_of_outputs(graph);
    let (mut nodes, mut initializers) = (Vec::<NodeProto>::new(), Vec::new());
    for tensor in std::mem::take(&mut graph.initializer) {
        let form = forms.get(tensor.name()).copied().unwrap_or_default();
        let stored = match (axes.get(tensor.name()), form) {
            (Some(_), Weights::F16) => to_f16(&tensor),
            (Some(axis), Weights::Int8) if opset >= OPSET_OF_AXES => to_int8(&tensor, *axis),
            _ => None,
        };
        match stored {
            Some((node, tensors)) => {
                nodes.push(node);
                initializers.extend(tensors);
            }
            None => initializers.push(tensor),
        }
    }

    // Some exporters list each initializer as an input too. A value that a node makes is none.
    let made: HashSet<&str> = nodes.iter().map(|node| node.output[0].as_str()).collect();
    graph.input.retain(|input| !made.contains(input.name()));
    graph.initializer = initializers;
    graph.node.splice(0..0, nodes);
    drop_sources(graph);
    Ok(model.encode_to_vec())
}

/// Returns `onnx`, whose weights are f32, with every matrix stored as `weights`, as [`narrow`]
/// does.
///
/// # Errors
/// [`DenseError::Load`] if the file is malformed.
pub fn narrow_all(onnx: &[u8], weights: Weights) -> Result<Vec<u8>, DenseError> {
    let all = forms(onnx)?.into_keys().map(|name| (name, weights)).collect();
    narrow(onnx, &all)
}

/// Returns `onnx` with all its weights as f32. A network without narrow weights is returned as it
/// is, byte for byte.
///
/// # Errors
/// [`DenseError::Load`] if the file is malformed.
pub fn widen(onnx: Vec<u8>) -> Result<Vec<u8>, DenseError> {
    let mut model = read(onnx.clone().into())?;
    Ok(if widen_model(&mut model) { model.encode_to_vec() } else { onnx })
}

/// Stores all weights of `model` as f32. Returns false if they are so already.
fn widen_model(model: &mut ModelProto) -> bool {
    let graph = model.graph.get_or_insert_default();
    let found = narrow_weights(graph);
    let operators: HashSet<usize> = found.iter().map(|n| n.node).collect();
    let unused: HashSet<String> = found.iter().flat_map(|n| n.stored.clone()).collect();
    let mut number = 0..;
    graph.node.retain(|_| number.next().is_none_or(|n| !operators.contains(&n)));
    let mut read = HashSet::new();
    collect_reads(graph, &mut read);
    graph.initializer.retain(|t| !unused.contains(t.name()) || read.contains(t.name()));
    graph.initializer.extend(found.iter().map(|n| float_tensor(&n.name, &n.dims, &n.values)));
    !found.is_empty()
}

/// Drops the lines of Python from nodes: a car does not need them, and they name the trainer's
/// files.
fn drop_sources(graph: &mut GraphProto) {
    for node in &mut graph.node {
        (node.doc_string, node.metadata_props) = (None, Vec::new());
        node.attribute.iter_mut().filter_map(|a| a.g.as_deref_mut()).for_each(drop_sources);
    }
}

/// Adds the names that the nodes of `graph` read, also those of graphs inside them.
fn collect_reads(graph: &GraphProto, read: &mut HashSet<String>) {
    for node in &graph.node {
        read.extend(node.input.iter().cloned());
        let inner = node.attribute.iter().filter_map(|attribute| attribute.g.as_deref());
        inner.for_each(|graph| collect_reads(graph, read));
    }
}

/// Weights that are stored narrow.
struct NarrowWeights {
    /// The name of the f32 values.
    name: String,
    /// The position of the operator that makes them.
    node: usize,
    /// The initializers that the operator reads.
    stored: Vec<String>,
    dims: Vec<i64>,
    values: Vec<f32>,
    form: Weights,
}

fn narrow_weights(graph: &GraphProto) -> Vec<NarrowWeights> {
    let stored: HashMap<&str, &TensorProto> =
        graph.initializer.iter().map(|t| (t.name(), t)).collect();
    let of_node = |(number, node): (usize, &NodeProto)| {
        let [name] = node.output.as_slice() else { return None };
        let input = |i: usize| stored.get(node.input.get(i)?.as_str()).copied();
        let tensor = input(0)?;
        let (values, form) = match node.op_type() {
            "Cast" if node.int("to", 0) == i64::from(FLOAT) => (halves(tensor)?, Weights::F16),
            "DequantizeLinear" => {
                let zero = node.input.get(2).map(|name| stored.get(name.as_str()).copied());
                let zero = zero.map_or(Some(None), |zero| zero.map(Some))?;
                let scale = Scale { scale: input(1)?, zero, axis: node.int("axis", 1) };
                // Only a file of ours asks for products in int8. Others mean the values.
                let form = if is_ours(node) { Weights::Int8 } else { Weights::F32 };
                (dequantize(tensor, &scale)?, form)
            }
            _ => return None,
        };
        let (name, dims) = (name.clone(), tensor.dims.clone());
        Some(NarrowWeights { name, node: number, stored: node.input.clone(), dims, values, form })
    };
    graph.node.iter().enumerate().filter_map(of_node).collect()
}

fn floats(tensor: &TensorProto) -> Option<Vec<f32>> {
    match tensor.values()? {
        Values::Floats(values) => Some(values),
        Values::Ints(_) => None,
    }
}

fn halves(tensor: &TensorProto) -> Option<Vec<f32>> {
    floats(tensor).filter(|_| tensor.data_type() == FLOAT16)
}

/// How int8 values become f32: `(value - zero) * scale`.
pub(crate) struct Scale<'a> {
    /// One for all, or one for each position on `axis`.
    pub scale: &'a TensorProto,
    /// As many, int8; 0 without it.
    pub zero: Option<&'a TensorProto>,
    pub axis: i64,
}

/// Returns the f32 values of `tensor`, which is int8; `None` for other operands.
pub(crate) fn dequantize(tensor: &TensorProto, by: &Scale<'_>) -> Option<Vec<f32>> {
    let quantized = tensor.int8_values()?;
    let sizes = tensor.sizes();
    let scales = floats(by.scale).filter(|_| by.scale.data_type() == FLOAT)?;
    let zeros = match by.zero {
        Some(zero) => zero.int8_values()?,
        None => vec![0; scales.len()],
    };
    if zeros.len() != scales.len() || by.scale.dims.len() > 1 {
        return None;
    }

    // A single scale holds for all values, whatever the axis.
    let (outputs, inner) = match scales.len() {
        1 => (1, 1),
        several => {
            let axis = if by.axis < 0 { by.axis + sizes.len() as i64 } else { by.axis };
            let axis = usize::try_from(axis).ok()?;
            if sizes.get(axis) != Some(&several) {
                return None;
            }
            (several, inner_of(&sizes, axis))
        }
    };
    let value = |(i, &q): (usize, &i8)| {
        let output = i / inner.max(1) % outputs.max(1);
        (f32::from(q) - f32::from(zeros[output])) * scales[output]
    };
    (outputs > 0).then(|| quantized.iter().enumerate().map(value).collect())
}

/// Returns the number of values between two positions on `axis`.
fn inner_of(sizes: &[usize], axis: usize) -> usize {
    sizes[axis + 1..].iter().product()
}

/// Returns whether [`narrow`] made `node`, by the names that it reads.
pub(crate) fn is_ours(node: &NodeProto) -> bool {
    let [name] = node.output.as_slice() else { return false };
    node.input == [stored_name(name), scale_name(name)]
}

/// Returns the f32 initializers that are the weights of products and nothing else, each with the
/// axis of the product's outputs.
fn axes_of_outputs(graph: &GraphProto) -> HashMap<String, usize> {
    let mut readers: HashMap<&str, Vec<(&NodeProto, usize)>> = HashMap::new();
    for node in &graph.node {
        for (i, name) in node.input.iter().enumerate() {
            readers.entry(name).or_default().push((node, i));
        }
    }
    let taken: HashSet<&str> = graph
        .node
        .iter()
        .flat_map(|n| n.output.iter().chain(&n.input))
        .map(String::as_str)
        .chain(graph.initializer.iter().map(|t| t.name()))
        .chain(graph.output.iter().map(|v| v.name()))
        .collect();
    let outputs: HashSet<&str> = graph.output.iter().map(|v| v.name()).collect();

    let axis = |tensor: &TensorProto| {
        let (name, rank) = (tensor.name(), tensor.dims.len());
        let weights = tensor.sizes().iter().product::<usize>();
        let is_free = !taken.contains(stored_name(name).as_str())
            && !taken.contains(scale_name(name).as_str());
        if tensor.data_type() != FLOAT
            || weights < WEIGHTS_MIN
            || !is_free
            || outputs.contains(name)
        {
            return None;
        }
        let mut axes = readers.get(name)?.iter().map(|&(node, input)| match node.op_type() {
            // The exporters of some frameworks leave the transposition of weights in the graph.
            "Transpose" => {
                let [turned] = node.output.as_slice() else { return None };
                let [(reader, input)] = readers.get(turned.as_str())?.as_slice() else {
                    return None;
                };
                let perm = node.ints("perm").map_or_else(
                    || (0..rank).rev().collect(),
                    |perm| perm.iter().map(|&a| a as usize).collect::<Vec<_>>(),
                );
                perm.get(axis_of_output(reader, *input, rank)?).copied()
            }
            _ => axis_of_output(node, input, rank),
        });
        let first = axes.next()??;
        (first < rank && axes.all(|other| other == Some(first))).then_some(first)
    };
    let all = graph.initializer.iter();
    all.filter_map(|t| Some((t.name().to_owned(), axis(t)?))).collect()
}

/// Returns the axis of the outputs in operand `input` of `node`, if that operand, of `rank` axes,
/// is the weights of a product.
fn axis_of_output(node: &NodeProto, input: usize, rank: usize) -> Option<usize> {
    match (node.op_type(), input) {
        ("MatMul", 1) if rank >= 2 => Some(rank - 1),
        ("MatMul", 0) if rank >= 2 => Some(rank - 2),
        ("Gemm", 1) if rank == 2 => Some(usize::from(node.int("transB", 0) == 0)),
        ("GRU" | "LSTM" | "RNN", 1 | 2) if rank == 3 => Some(1),
        ("Conv", 1) if rank >= 2 => Some(0),
        _ => None,
    }
}

fn stored_name(name: &str) -> String {
    format!("{name}.narrow")
}

fn scale_name(name: &str) -> String {
    format!("{name}.scale")
}

/// Returns the operator that makes the f32 values of `tensor`, and what it reads.
type Narrowed = (NodeProto, Vec<TensorProto>);

fn to_f16(tensor: &TensorProto) -> Option<Narrowed> {
    let halves: Vec<f16> = floats(tensor)?.into_iter().map(f16::from_f32).collect();
    if !halves.iter().all(|value| value.is_finite()) {
        return None;
    }
    let bytes = halves.iter().flat_map(|value| value.to_le_bytes()).collect();
    let name = stored_name(tensor.name());
    let node = operator("Cast", vec![name.clone()], tensor.name(), "to", i64::from(FLOAT));
    Some((node, vec![raw_tensor(name, FLOAT16, tensor.dims.clone(), bytes)]))
}

fn to_int8(tensor: &TensorProto, axis: usize) -> Option<Narrowed> {
    let (values, sizes) = (floats(tensor)?, tensor.sizes());
    let (outputs, inner) = (sizes[axis], inner_of(&sizes, axis));
    let output = |i: usize| i / inner % outputs;
    let mut most = vec![0.0f32; outputs];
    for (i, value) in values.iter().enumerate() {
        most[output(i)] = most[output(i)].max(value.abs());
    }
    let scale =
        |most: f32| if most >= WEIGHT_MAX * f32::MIN_POSITIVE { most / WEIGHT_MAX } else { 1.0 };
    let scales: Vec<f32> = most.into_iter().map(scale).collect();
    if !values.iter().chain(&scales).all(|value| value.is_finite()) {
        return None;
    }

    let quantize = |(i, value): (usize, &f32)| (value / scales[output(i)]).round() as i8 as u8;
    let bytes = values.iter().enumerate().map(quantize).collect();
    let (name, scale) = (stored_name(tensor.name()), scale_name(tensor.name()));
    let inputs = vec![name.clone(), scale.clone()];
    let node = operator("DequantizeLinear", inputs, tensor.name(), "axis", axis as i64);
    let quantized = raw_tensor(name, INT8, tensor.dims.clone(), bytes);
    Some((node, vec![quantized, float_tensor(&scale, &[outputs as i64], &scales)]))
}

fn raw_tensor(name: String, data_type: i32, dims: Vec<i64>, bytes: Vec<u8>) -> TensorProto {
    TensorProto {
        dims,
        data_type: Some(data_type),
        name: Some(name),
        raw_data: Some(bytes.into()),
        ..TensorProto::default()
    }
}

fn float_tensor(name: &str, dims: &[i64], values: &[f32]) -> TensorProto {
    let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
    raw_tensor(name.to_owned(), FLOAT, dims.to_vec(), bytes)
}

fn operator(op: &str, input: Vec<String>, output: &str, attribute: &str, value: i64) -> NodeProto {
    NodeProto {
        input,
        output: vec![output.to_owned()],
        name: Some(format!("{output}.wide")),
        op_type: Some(op.to_owned()),
        attribute: vec![AttributeProto {
            name: Some(attribute.to_owned()),
            i: Some(value),
            r#type: Some(INT),
            ..AttributeProto::default()
        }],
        ..NodeProto::default()
    }
}
