//! Writes small dense networks as ONNX files, for benchmarks and tests. It fills the protobuf
//! messages that `hatchback_kernels` reads. Never reads a network and never checks one.

use hatchback_kernels::dense::graph::onnx::{
    Dimension, FLOAT, GraphProto, INT64, ModelProto, NodeProto, OperatorSetIdProto,
    StringStringEntryProto, TensorProto, TensorShapeProto, TensorTypeProto, TypeProto,
    ValueInfoProto,
};
use prost::Message;

/// An attribute of a node.
pub use hatchback_kernels::dense::graph::onnx::AttributeProto as Attribute;

/// The version of the ONNX intermediate representation.
const IR_VERSION: i64 = 7;
/// The version of ONNX's operators.
const OPSET: i64 = 13;
/// `AttributeProto.AttributeType` of one integer and of a list of integers.
const INT: i32 = 2;
const INTS: i32 = 7;
/// `TensorProto.DataLocation`: the values are in another file.
const EXTERNAL: i32 = 1;

/// `TensorProto.DataType`.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub enum Type {
    /// Float32.
    Float = FLOAT,
    /// Int64.
    Int64 = INT64,
}

/// Returns the attribute `name` with one integer.
pub fn int(name: &str, value: i64) -> Attribute {
    let (name, r#type) = (Some(name.to_owned()), Some(INT));
    Attribute { name, i: Some(value), r#type, ..Attribute::default() }
}

/// Returns the attribute `name` with a list of integers.
pub fn ints(name: &str, values: &[i64]) -> Attribute {
    let (name, r#type) = (Some(name.to_owned()), Some(INTS));
    Attribute { name, ints: values.to_vec(), r#type, ..Attribute::default() }
}

/// Returns a tensor without values.
fn tensor(name: &str, kind: Type, shape: &[usize]) -> TensorProto {
    TensorProto {
        dims: shape.iter().map(|size| *size as i64).collect(),
        data_type: Some(kind as i32),
        name: Some(name.to_owned()),
        ..TensorProto::default()
    }
}

/// A graph under construction. Nodes must be added in the order in which they run.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    graph: GraphProto,
}

impl Graph {
    /// Adds a node with one output. Returns the name of that output.
    pub fn node(
        &mut self,
        operator: &str,
        inputs: &[&str],
        output: &str,
        attributes: &[Attribute],
    ) -> String {
        self.graph.node.push(NodeProto {
            input: inputs.iter().map(|name| (*name).to_owned()).collect(),
            output: vec![output.to_owned()],
            name: Some(output.to_owned()),
            op_type: Some(operator.to_owned()),
            attribute: attributes.to_vec(),
            ..NodeProto::default()
        });
        output.to_owned()
    }

    /// Adds a constant of floats.
    pub fn floats(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let raw_data = Some(bytes.into());
        self.constant(TensorProto { raw_data, ..tensor(name, Type::Float, shape) });
    }

    /// Adds a constant of integers.
    pub fn integers(&mut self, name: &str, shape: &[usize], values: &[i64]) {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let raw_data = Some(bytes.into());
        self.constant(TensorProto { raw_data, ..tensor(name, Type::Int64, shape) });
    }

    /// Adds a constant of floats whose values are in `file`, in the folder of the ONNX file.
    pub fn external(&mut self, name: &str, shape: &[usize], file: &str) {
        let location = StringStringEntryProto {
            key: Some("location".to_owned()),
            value: Some(file.to_owned()),
        };
        self.constant(TensorProto {
            external_data: vec![location],
            data_location: Some(EXTERNAL),
            ..tensor(name, Type::Float, shape)
        });
    }

    fn constant(&mut self, tensor: TensorProto) {
        self.graph.initializer.push(tensor);
    }

    /// Adds an input `[batch, shape]`.
    pub fn input(&mut self, name: &str, kind: Type, shape: &[usize]) {
        self.graph.input.push(value_info(name, kind, shape));
    }

    /// Adds an output `[batch, shape]` of floats.
    pub fn output(&mut self, name: &str, shape: &[usize]) {
        self.graph.output.push(value_info(name, Type::Float, shape));
    }

    /// Returns the bytes of the ONNX file.
    pub fn file(&self) -> Vec<u8> {
        let opset = OperatorSetIdProto { domain: Some(String::new()), version: Some(OPSET) };
        let graph = GraphProto { name: Some("graph".to_owned()), ..self.graph.clone() };
        let model = ModelProto {
            ir_version: Some(IR_VERSION),
            producer_name: Some("hatchback".to_owned()),
            graph: Some(graph),
            opset_import: vec![opset],
        };
        model.encode_to_vec()
    }
}

/// Returns the name, type and shape `[batch, shape]` of an input or output.
fn value_info(name: &str, kind: Type, shape: &[usize]) -> ValueInfoProto {
    let batch = Dimension { dim_param: Some("batch".to_owned()), ..Dimension::default() };
    let fixed = |size: &usize| Dimension { dim_value: Some(*size as i64), dim_param: None };
    let dim = std::iter::once(batch).chain(shape.iter().map(fixed)).collect();
    let tensor_type =
        TensorTypeProto { elem_type: Some(kind as i32), shape: Some(TensorShapeProto { dim }) };
    let r#type = Some(TypeProto { tensor_type: Some(tensor_type) });
    ValueInfoProto { name: Some(name.to_owned()), r#type }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hatchback_kernels::dense::{Activation, DenseEngine};

    /// The bytes that an earlier writer, which wrote protobuf fields by hand, made of `sample()`.
    const GOLDEN: &str = "0807120968617463686261636b3ae9010a250a01780a017912036f75741a036f75742206\
        436f6e6361742a0b0a04617869731801a001020a250a036f75741201741a017422095472616e73706f73652a0d\
        0a047065726d40004001a00107120567726170682a11080210014201774a080000803f000000402a1108011007\
        4201694a08ffffffffffffffff2a1c080410014201656a110a086c6f636174696f6e1205652e66333270015a18\
        0a017812130a110801120d0a07120562617463680a0208025a180a017912130a110801120d0a07120562617463\
        680a020803621a0a036f757412130a110801120d0a07120562617463680a02080542040a00100d";

    fn sample() -> Graph {
        let mut graph = Graph::default();
        graph.node("Concat", &["x", "y"], "out", &[int("axis", 1)]);
        graph.node("Transpose", &["out"], "t", &[ints("perm", &[0, 1])]);
        graph.floats("w", &[2], &[1.0, 2.0]);
        graph.integers("i", &[1], &[-1]);
        graph.external("e", &[4], "e.f32");
        graph.input("x", Type::Float, &[2]);
        graph.input("y", Type::Float, &[3]);
        graph.output("out", &[5]);
        graph
    }

    #[test]
    fn written_bytes_stay_the_same() {
        let hex: String = sample().file().iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, GOLDEN);
    }

    #[test]
    fn a_written_network_loads() {
        let mut graph = Graph::default();
        graph.node("Concat", &["x", "y"], "out", &[int("axis", 1)]);
        graph.input("x", Type::Float, &[2]);
        graph.input("y", Type::Float, &[3]);
        graph.output("out", &[5]);
        let inputs = [("x", 2), ("y", 3)];
        let activation = Activation::None;
        let engine = DenseEngine::load(graph.file(), &inputs, "out", activation);
        assert_eq!(engine.unwrap().outputs(), 5);
    }
}
