//! Turns the tensors of an ONNX file into known tensors of a graph. A type that no network has as a
//! constant is `Unsupported`.

use crate::dense::graph::onnx::{NodeProto, TensorProto, type_name};
use crate::dense::graph::stop::Stop;
use crate::dense::graph::tensor::{Kind, Size, Tensor, Values};

/// Returns the tensor that `proto` stores.
pub(crate) fn stored(proto: &TensorProto) -> Result<Tensor, Stop> {
    let (kind, values) = match (proto.kind(), proto.values()) {
        (Some(kind), Some(values)) => (kind, values),
        _ => {
            let (name, of) = (proto.name(), type_name(proto.data_type().into()));
            return Err(Stop::Unsupported(format!("tensor `{name}` of type {of}")));
        }
    };
    Ok(Tensor::known(kind, proto.sizes(), values))
}

/// Returns the tensor that a node `Constant` holds; `None` for a form that is unknown.
pub(crate) fn constant(node: &NodeProto) -> Option<Result<Tensor, Stop>> {
    let scalar = |kind, values| Some(Ok(Tensor::known(kind, Vec::new(), values)));
    let list = |kind, values: Values| Some(Ok(Tensor::known(kind, vec![values.len()], values)));
    let int = |n: &i64| Size::fixed(*n);

    if let Some(proto) = node.tensor("value") {
        Some(stored(proto))
    } else if let Some(value) = node.maybe_int("value_int") {
        scalar(Kind::Int64, Values::Ints(vec![int(&value)]))
    } else if let Some(value) = node.maybe_float("value_float") {
        scalar(Kind::Float, Values::Floats(vec![value]))
    } else if let Some(values) = node.ints("value_ints") {
        list(Kind::Int64, Values::Ints(values.iter().map(int).collect()))
    } else {
        node.floats("value_floats").map(|v| list(Kind::Float, Values::Floats(v.to_vec())))?
    }
}
