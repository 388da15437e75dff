//! Builds the small ONNX files of these tests.

use hatchback_kernels::dense::graph::onnx::*;

/// Attributes that are lists, also of one integer.
const LISTS: [&str; 8] =
    ["perm", "axes", "split", "starts", "ends", "strides", "dilations", "pads"];

pub fn tensor(name: &str, dims: &[i64], ints: &[i64]) -> TensorProto {
    TensorProto {
        name: Some(name.to_owned()),
        dims: dims.to_vec(),
        data_type: Some(INT64),
        int64_data: ints.to_vec(),
        ..TensorProto::default()
    }
}

pub fn ints(name: &str, values: &[i64]) -> TensorProto {
    tensor(name, &[values.len() as i64], values)
}

pub fn floats(name: &str, dims: &[i64], values: &[f32]) -> TensorProto {
    TensorProto { data_type: Some(FLOAT), float_data: values.to_vec(), ..tensor(name, dims, &[]) }
}

/// Returns as many values of 0.25 as `dims` has room for.
pub fn quarters(name: &str, dims: &[i64]) -> TensorProto {
    floats(name, dims, &vec![0.25; dims.iter().product::<i64>() as usize])
}

/// Returns a node whose name is that of its first output.
pub fn node(
    op: &str,
    inputs: &[&str],
    outputs: &[&str],
    attributes: &[(&str, &[i64])],
) -> NodeProto {
    let owned = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect();
    let attribute = |(name, values): &(&str, &[i64])| {
        let is_list = values.len() != 1 || LISTS.contains(name);
        let (i, ints) = if is_list { (None, values.to_vec()) } else { (Some(values[0]), vec![]) };
        let (name, r#type) = (Some((*name).to_owned()), Some(if is_list { 7 } else { 2 }));
        AttributeProto { name, i, ints, r#type, ..AttributeProto::default() }
    };
    NodeProto {
        input: owned(inputs),
        output: owned(outputs),
        name: Some(outputs[0].to_owned()),
        op_type: Some(op.to_owned()),
        attribute: attributes.iter().map(attribute).collect(),
        ..NodeProto::default()
    }
}

/// Returns an input or an output of any shape.
pub fn info(name: &str) -> ValueInfoProto {
    ValueInfoProto { name: Some(name.to_owned()), r#type: None }
}

/// Returns a network with the output `out`.
pub fn model(
    opset: i64,
    input: Vec<ValueInfoProto>,
    node: Vec<NodeProto>,
    initializer: Vec<TensorProto>,
) -> ModelProto {
    let output = vec![info("out")];
    let graph = GraphProto { node, initializer, input, output, ..GraphProto::default() };
    let opset = OperatorSetIdProto { domain: Some(String::new()), version: Some(opset) };
    let (graph, opset_import) = (Some(graph), vec![opset]);
    ModelProto { ir_version: Some(7), graph, opset_import, ..ModelProto::default() }
}
