//! Joins several outputs of a network into one, `[batch, outputs]`, with nodes of ONNX's own, so
//! that every engine runs such a network as it is: the kernels of this crate, the GPU and TensorRT.
//! A score's function becomes a node too. This file runs nothing.

use crate::dense::error::DenseError;
use crate::dense::graph::onnx::{AttributeProto, GraphProto, NodeProto, ValueInfoProto, read};
use crate::dense::weights::Activation;
use prost::Message;

/// The output that the others are joined into.
pub const JOINED_OUTPUT: &str = "hatchback.scores";
/// `AttributeProto.AttributeType` of an integer.
const INT: i32 = 2;

/// Returns the bytes of `onnx` with the `outputs`, each a name with the function of its score, side
/// by side in the one output [`JOINED_OUTPUT`]. Each of them has one value a sample, which
/// [`check_joined`] proves once the network is loaded.
///
/// # Errors
/// [`DenseError::Load`] if the file is malformed, and [`DenseError::NoOutput`] if it does not have
/// one of the outputs.
pub fn join_outputs(onnx: &[u8], outputs: &[(&str, Activation)]) -> Result<Vec<u8>, DenseError> {
    let mut model = read(onnx.to_vec().into())?;
    let graph = model.graph.get_or_insert_default();
    let taken = |name: &String| name.starts_with(JOINED_OUTPUT);
    if let Some(name) = graph.node.iter().flat_map(|node| &node.output).find(|name| taken(name)) {
        return Err(DenseError::Load(format!("a value has the reserved name `{name}`")));
    }

    let mut columns = Vec::new();
    for (number, (name, activation)) in outputs.iter().enumerate() {
        if !graph.output.iter().any(|value| value.name() == *name) {
            return Err(DenseError::NoOutput((*name).to_owned()));
        }
        let score = match activation {
            Activation::None => (*name).to_owned(),
            Activation::Sigmoid => {
                // `x - x` is 0, and NaN if the logit `x` is infinite: that is no score.
                let mut add = |operator, inputs: [&str; 2], result: &str| {
                    let inputs = inputs.into_iter().filter(|name| !name.is_empty());
                    let inputs = inputs.map(str::to_owned).collect();
                    add(graph, operator, inputs, format!("{number}.{result}"), None)
                };
                let sigmoid = add("Sigmoid", [name, ""], "sigmoid");
                let zero = add("Sub", [name, name], "zero");
                add("Add", [&sigmoid, &zero], "score")
            }
        };
        columns.push(add(graph, "Flatten", vec![score], format!("{number}"), Some(1)));
    }

    add(graph, "Concat", columns, String::new(), Some(1));
    let name = Some(JOINED_OUTPUT.to_owned());
    graph.output = vec![ValueInfoProto { name, r#type: None }];
    Ok(model.encode_to_vec())
}

/// Checks that a loaded network of [`join_outputs`] has one value a sample for each output.
///
/// # Errors
/// [`DenseError::Outputs`] with the number of values.
pub fn check_joined(names: &[&str], values: usize) -> Result<(), DenseError> {
    if values == names.len() {
        return Ok(());
    }
    Err(DenseError::Outputs { names: names.join("`, `"), outputs: names.len(), values })
}

/// Adds a node with the attribute `axis`, if that is given. Returns the name of its result.
fn add(
    graph: &mut GraphProto,
    operator: &str,
    input: Vec<String>,
    result: String,
    axis: Option<i64>,
) -> String {
    let output = match result.as_str() {
        "" => JOINED_OUTPUT.to_owned(),
        result => format!("{JOINED_OUTPUT}.{result}"),
    };
    let attribute = |value| AttributeProto {
        name: Some("axis".to_owned()),
        i: Some(value),
        r#type: Some(INT),
        ..AttributeProto::default()
    };
    graph.node.push(NodeProto {
        input,
        output: vec![output.clone()],
        name: Some(output.clone()),
        op_type: Some(operator.to_owned()),
        attribute: axis.map(attribute).into_iter().collect(),
        ..NodeProto::default()
    });
    output
}
