//! Turns the tensors of an ONNX file into known tensors of a graph. A type that no network has as a
//! constant is `Unsupported`.

use crate::dense::graph::onnx::{NodeProto, TensorProto, type_name};
use crate::dense::graph::onnx_graph::{Builder, Stop, unsupported};
use crate::dense::graph::tensor::{Kind, Size, Tensor, Values};

impl Builder<'_> {
    /// Returns the tensor that `proto` stores.
    pub fn stored_tensor(&mut self, proto: &TensorProto) -> Result<Tensor, Stop> {
        // Integers take more memory here than in the file.
        if proto.kind().is_some_and(|kind| kind.is_int() || kind == Kind::Bool) {
            self.spend(proto.sizes().iter().product())?;
        }
        let (Some(kind), Some(values)) = (proto.kind(), proto.values()) else {
            let (name, of) = (proto.name(), type_name(proto.data_type().into()));
            return Err(Stop::Unsupported(format!("tensor `{name}` of type {of}")));
        };
        Ok(Tensor::known(kind, proto.sizes(), values))
    }

    /// Translates `Constant`.
    pub fn constant(&mut self, node: &NodeProto) -> Result<Tensor, Stop> {
        let scalar = |kind, values| Ok(Tensor::known(kind, Vec::new(), values));
        let list = |kind, values: Values| Ok(Tensor::known(kind, vec![values.len()], values));
        let int = |n: &i64| Size::fixed(*n);

        if let Some(proto) = node.tensor("value") {
            self.stored_tensor(proto)
        } else if let Some(value) = node.maybe_int("value_int") {
            scalar(Kind::Int64, Values::Ints(vec![int(&value)]))
        } else if let Some(value) = node.maybe_float("value_float") {
            scalar(Kind::Float, Values::Floats(vec![value]))
        } else if let Some(values) = node.ints("value_ints") {
            self.spend(values.len())?;
            list(Kind::Int64, Values::Ints(values.iter().map(int).collect()))
        } else if let Some(values) = node.floats("value_floats") {
            list(Kind::Float, Values::Floats(values.to_vec()))
        } else {
            Err(unsupported(node, "of text"))
        }
    }
}
