//! ONNX files, as far as the dense network needs them: the protobuf messages, and the checks that
//! make a file safe to use. In a file that passes, every tensor has the bytes that its shape
//! declares.

use crate::dense::error::DenseError;
use crate::dense::graph::onnx_scan;
use crate::dense::graph::tensor::{Kind, RANK_MAX, Size, Values, product};
use half::f16;
use prost::Message;
use prost::bytes::Bytes;

#[derive(Clone, PartialEq, Message)]
pub struct ModelProto {
    #[prost(int64, optional, tag = "1")]
    pub ir_version: Option<i64>,
    #[prost(string, optional, tag = "2")]
    pub producer_name: Option<String>,
    #[prost(message, optional, tag = "7")]
    pub graph: Option<GraphProto>,
    #[prost(message, repeated, tag = "8")]
    pub opset_import: Vec<OperatorSetIdProto>,
}

#[derive(Clone, PartialEq, Message)]
pub struct OperatorSetIdProto {
    #[prost(string, optional, tag = "1")]
    pub domain: Option<String>,
    #[prost(int64, optional, tag = "2")]
    pub version: Option<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub struct GraphProto {
    #[prost(message, repeated, tag = "1")]
    pub node: Vec<NodeProto>,
    #[prost(string, optional, tag = "2")]
    pub name: Option<String>,
    #[prost(message, repeated, tag = "5")]
    pub initializer: Vec<TensorProto>,
    #[prost(message, repeated, tag = "11")]
    pub input: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "12")]
    pub output: Vec<ValueInfoProto>,
}

#[derive(Clone, PartialEq, Message)]
pub struct NodeProto {
    #[prost(string, repeated, tag = "1")]
    pub input: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub output: Vec<String>,
    #[prost(string, optional, tag = "3")]
    pub name: Option<String>,
    #[prost(string, optional, tag = "4")]
    pub op_type: Option<String>,
    #[prost(message, repeated, tag = "5")]
    pub attribute: Vec<AttributeProto>,
    #[prost(string, optional, tag = "6")]
    pub doc_string: Option<String>,
    #[prost(string, optional, tag = "7")]
    pub domain: Option<String>,
    #[prost(message, repeated, tag = "9")]
    pub metadata_props: Vec<StringStringEntryProto>,
}

#[derive(Clone, PartialEq, Message)]
pub struct AttributeProto {
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    #[prost(float, optional, tag = "2")]
    pub f: Option<f32>,
    #[prost(int64, optional, tag = "3")]
    pub i: Option<i64>,
    #[prost(bytes = "bytes", optional, tag = "4")]
    pub s: Option<Bytes>,
    #[prost(message, optional, tag = "5")]
    pub t: Option<TensorProto>,
    #[prost(message, optional, boxed, tag = "6")]
    pub g: Option<Box<GraphProto>>,
    #[prost(float, repeated, packed = "false", tag = "7")]
    pub floats: Vec<f32>,
    #[prost(int64, repeated, packed = "false", tag = "8")]
    pub ints: Vec<i64>,
    #[prost(bytes = "bytes", repeated, tag = "9")]
    pub strings: Vec<Bytes>,
    #[prost(int32, optional, tag = "20")]
    pub r#type: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TensorProto {
    #[prost(int64, repeated, packed = "false", tag = "1")]
    pub dims: Vec<i64>,
    #[prost(int32, optional, tag = "2")]
    pub data_type: Option<i32>,
    #[prost(float, repeated, tag = "4")]
    pub float_data: Vec<f32>,
    #[prost(int32, repeated, tag = "5")]
    pub int32_data: Vec<i32>,
    #[prost(int64, repeated, tag = "7")]
    pub int64_data: Vec<i64>,
    #[prost(string, optional, tag = "8")]
    pub name: Option<String>,
    #[prost(bytes = "bytes", optional, tag = "9")]
    pub raw_data: Option<Bytes>,
    #[prost(double, repeated, tag = "10")]
    pub double_data: Vec<f64>,
    #[prost(message, repeated, tag = "13")]
    pub external_data: Vec<StringStringEntryProto>,
    /// 1 if the data is stored in another file.
    #[prost(int32, optional, tag = "14")]
    pub data_location: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct StringStringEntryProto {
    #[prost(string, optional, tag = "1")]
    pub key: Option<String>,
    #[prost(string, optional, tag = "2")]
    pub value: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ValueInfoProto {
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    #[prost(message, optional, tag = "2")]
    pub r#type: Option<TypeProto>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TypeProto {
    #[prost(message, optional, tag = "1")]
    pub tensor_type: Option<TensorTypeProto>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TensorTypeProto {
    #[prost(int32, optional, tag = "1")]
    pub elem_type: Option<i32>,
    #[prost(message, optional, tag = "2")]
    pub shape: Option<TensorShapeProto>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TensorShapeProto {
    #[prost(message, repeated, tag = "1")]
    pub dim: Vec<Dimension>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Dimension {
    #[prost(int64, optional, tag = "1")]
    pub dim_value: Option<i64>,
    #[prost(string, optional, tag = "2")]
    pub dim_param: Option<String>,
}

/// `TensorProto.DataType`.
pub const FLOAT: i32 = 1;
pub const INT8: i32 = 3;
pub const INT32: i32 = 6;
pub const INT64: i32 = 7;
pub const BOOL: i32 = 9;
pub const FLOAT16: i32 = 10;
pub const DOUBLE: i32 = 11;
pub const BFLOAT16: i32 = 16;

/// Nodes of a graph, at most. Recommendation models have tens.
const NODES_MAX: usize = 1 << 14;

/// Parses a file and checks all its tensors.
///
/// # Errors
/// [`DenseError::Load`] if the bytes are not an ONNX file, or if a tensor's data does not have the
/// size of its shape.
pub(crate) fn read(bytes: Bytes) -> Result<ModelProto, DenseError> {
    let model = parse(bytes)?;
    let graph = model
        .graph
        .as_ref()
        .ok_or_else(|| DenseError::Load("not an ONNX file: no graph".into()))?;
    check_graph(graph)?;
    Ok(model)
}

/// Parses a file, whose tensors may still be in files beside it.
///
/// # Errors
/// [`DenseError::Load`] if the bytes are not an ONNX file, and [`DenseError::Unsupported`] if they
/// would take too much memory.
pub fn parse(bytes: Bytes) -> Result<ModelProto, DenseError> {
    onnx_scan::check(&bytes)?;
    ModelProto::decode(bytes).map_err(|e| DenseError::Load(format!("not an ONNX file: {e}")))
}

fn check_graph(graph: &GraphProto) -> Result<(), DenseError> {
    if graph.node.len() > NODES_MAX {
        let nodes = graph.node.len();
        return Err(DenseError::Unsupported(format!("{nodes} nodes, over {NODES_MAX}")));
    }
    graph.initializer.iter().try_for_each(check_tensor)?;
    for attribute in graph.node.iter().flat_map(|n| &n.attribute) {
        attribute.t.iter().try_for_each(check_tensor)?;
        attribute.g.iter().try_for_each(|g| check_graph(g))?;
    }
    Ok(())
}

fn check_tensor(tensor: &TensorProto) -> Result<(), DenseError> {
    let at = |problem: String| format!("tensor `{}`: {problem}", tensor.name());
    let refuse = |problem: String| Err(DenseError::Load(at(problem)));
    if tensor.data_location.unwrap_or(0) != 0 {
        return refuse("its data is stored in another file, which `pack` reads".to_owned());
    }

    let shape = format!("shape {:?}", tensor.dims);
    let sizes = tensor.dims.iter().map(|&d| usize::try_from(d).ok()).collect::<Option<Vec<_>>>();
    let Some(sizes) = sizes else { return refuse(shape) };
    let values = product(&sizes).filter(|_| sizes.len() <= RANK_MAX);
    let Some(values) = values else { return Err(DenseError::Unsupported(at(shape))) };

    let (bytes, typed) = match tensor.data_type() {
        FLOAT => (4, tensor.float_data.len()),
        INT64 => (8, tensor.int64_data.len()),
        2 | INT8 | BOOL => (1, tensor.int32_data.len()),
        INT32 => (4, tensor.int32_data.len()),
        FLOAT16 | BFLOAT16 => (2, tensor.int32_data.len()),
        DOUBLE => (8, tensor.double_data.len()),
        other => {
            let other = type_name(other.into());
            return Err(DenseError::Unsupported(at(format!("element type {other}"))));
        }
    };
    let whole = match &tensor.raw_data {
        Some(raw) => values.checked_mul(bytes) == Some(raw.len()),
        None => values == typed,
    };
    if whole { Ok(()) } else { refuse(format!("its data is not of {shape}")) }
}

impl TensorProto {
    /// Returns the size of each axis.
    pub fn sizes(&self) -> Vec<usize> {
        self.dims.iter().map(|&d| d as usize).collect()
    }

    /// Returns the values of a tensor of int8; `None` for another type.
    pub(crate) fn int8_values(&self) -> Option<Vec<i8>> {
        let values = match &self.raw_data {
            Some(raw) => raw.iter().map(|&b| b as i8).collect(),
            None => self.int32_data.iter().map(|&n| n as i8).collect(),
        };
        (self.data_type() == INT8).then_some(values)
    }

    /// Returns the type of the values; `None` for a type that no graph has.
    pub(crate) fn kind(&self) -> Option<Kind> {
        match self.data_type() {
            BFLOAT16 => Some(Kind::Float),
            other => kind_of(i64::from(other)),
        }
    }

    /// Returns the values; `None` for a type that no graph has.
    pub(crate) fn values(&self) -> Option<Values> {
        fn each<const N: usize, T>(raw: &[u8], value: impl Fn([u8; N]) -> T) -> Vec<T> {
            raw.as_chunks().0.iter().map(|b| value(*b)).collect()
        }
        let raw = self.raw_data.as_deref();
        let ints = |values: Vec<i64>| Values::Ints(values.into_iter().map(Size::fixed).collect());
        let narrow = || self.int32_data.iter().map(|&n| i64::from(n)).collect();
        let brain = |bits: u16| f32::from_bits(u32::from(bits) << 16);
        Some(match (self.kind()?, raw) {
            (Kind::Float, None) if self.data_type() == BFLOAT16 => {
                Values::Floats(self.int32_data.iter().map(|&n| brain(n as u16)).collect())
            }
            (Kind::Float, Some(raw)) if self.data_type() == BFLOAT16 => {
                Values::Floats(each(raw, |b| brain(u16::from_le_bytes(b))))
            }
            (Kind::Float, None) if self.data_type() == DOUBLE => {
                Values::Floats(self.double_data.iter().map(|&n| n as f32).collect())
            }
            (Kind::Float, Some(raw)) if self.data_type() == DOUBLE => {
                Values::Floats(each(raw, |b| f64::from_le_bytes(b) as f32))
            }
            (Kind::Float, None) => Values::Floats(self.float_data.clone()),
            (Kind::Float, Some(raw)) => Values::Floats(each(raw, f32::from_le_bytes)),
            (Kind::Half, None) => {
                let half = |n: &i32| f16::from_bits(*n as u16).to_f32();
                Values::Floats(self.int32_data.iter().map(half).collect())
            }
            (Kind::Half, Some(raw)) => {
                Values::Floats(each(raw, |b| f16::from_le_bytes(b).to_f32()))
            }
            (Kind::Int64, None) => ints(self.int64_data.clone()),
            (Kind::Int64, Some(raw)) => ints(each(raw, i64::from_le_bytes)),
            (Kind::Int32 | Kind::Bool, None) => ints(narrow()),
            (Kind::Int32, Some(raw)) => ints(each(raw, |b| i64::from(i32::from_le_bytes(b)))),
            (Kind::Bool, Some(raw)) => ints(each(raw, |[b]| i64::from(b != 0))),
        })
    }
}

/// Returns ONNX's name of an element type.
pub(crate) fn type_name(number: i64) -> &'static str {
    const NAMES: &str = "UNDEFINED FLOAT UINT8 INT8 UINT16 INT16 INT32 INT64 STRING BOOL FLOAT16 \
        DOUBLE UINT32 UINT64 COMPLEX64 COMPLEX128 BFLOAT16 FLOAT8E4M3FN FLOAT8E4M3FNUZ FLOAT8E5M2 \
        FLOAT8E5M2FNUZ UINT4 INT4 FLOAT4E2M1 FLOAT8E8M0 UINT2 INT2";
    let at = usize::try_from(number).unwrap_or(usize::MAX);
    NAMES.split(' ').nth(at).unwrap_or("unknown")
}

/// Returns the kind of an element type of ONNX; `None` for a type that no graph has.
pub(crate) fn kind_of(data_type: i64) -> Option<Kind> {
    let kinds = [
        (FLOAT, Kind::Float),
        (FLOAT16, Kind::Half),
        (DOUBLE, Kind::Float),
        (INT64, Kind::Int64),
        (INT32, Kind::Int32),
        (BOOL, Kind::Bool),
    ];
    kinds.iter().find(|(number, _)| i64::from(*number) == data_type).map(|(_, kind)| *kind)
}

impl ModelProto {
    /// Returns the version of ONNX's operators; 0 if the file names none.
    pub fn opset(&self) -> i64 {
        let own = |o: &&OperatorSetIdProto| matches!(o.domain(), "" | "ai.onnx");
        self.opset_import.iter().find(own).map_or(0, OperatorSetIdProto::version)
    }
}

impl NodeProto {
    /// Returns the line of Python that made the node, if the exporter wrote it: the last one of the
    /// new exporter's trace, the first one of the old exporter's.
    pub fn source(&self) -> Option<String> {
        const CHARS_MAX: usize = 120;
        let trace = |p: &&StringStringEntryProto| p.key() == "pkg.torch.onnx.stack_trace";
        let trace = self.metadata_props.iter().find(trace).map(StringStringEntryProto::value);
        let is_text = |line: &&str| !line.trim().is_empty();
        let line = match trace {
            Some(trace) => trace.lines().rfind(is_text),
            None => self.doc_string().lines().find(is_text),
        };
        let plain = |c: &char| !c.is_control();
        line.map(|line| line.trim().chars().filter(plain).take(CHARS_MAX).collect())
    }

    fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        self.attribute.iter().find(|a| a.name() == name)
    }

    /// Returns an integer attribute, or `default` if the node does not have the attribute.
    pub fn int(&self, name: &str, default: i64) -> i64 {
        self.attribute(name).and_then(|a| a.i).unwrap_or(default)
    }

    /// Returns a float attribute, or `default` if the node does not have the attribute.
    pub fn float(&self, name: &str, default: f32) -> f32 {
        self.attribute(name).and_then(|a| a.f).unwrap_or(default)
    }

    /// Returns an integer attribute.
    pub fn maybe_int(&self, name: &str) -> Option<i64> {
        self.attribute(name).and_then(|a| a.i)
    }

    /// Returns a float attribute.
    pub fn maybe_float(&self, name: &str) -> Option<f32> {
        self.attribute(name).and_then(|a| a.f)
    }

    /// Returns a text attribute; empty if the node does not have it.
    pub fn text(&self, name: &str) -> &str {
        let text = self.attribute(name).and_then(|a| a.s.as_deref());
        text.and_then(|s| std::str::from_utf8(s).ok()).unwrap_or_default()
    }

    /// Returns an attribute that is a list of texts; a text that is no UTF-8 is empty.
    pub fn strings(&self, name: &str) -> Option<Vec<&str>> {
        let text = |s| std::str::from_utf8(s).unwrap_or_default();
        self.attribute(name).map(|a| a.strings.iter().map(|s| text(s)).collect())
    }

    /// Returns an attribute that is a list of floats.
    pub fn floats(&self, name: &str) -> Option<&[f32]> {
        self.attribute(name).map(|a| a.floats.as_slice())
    }

    /// Returns an attribute that is a list of integers.
    pub fn ints(&self, name: &str) -> Option<&[i64]> {
        self.attribute(name).map(|a| a.ints.as_slice())
    }

    /// Returns an attribute that is a graph.
    pub fn graph(&self, name: &str) -> Option<&GraphProto> {
        self.attribute(name).and_then(|a| a.g.as_deref())
    }

    /// Returns an attribute that is a tensor.
    pub fn tensor(&self, name: &str) -> Option<&TensorProto> {
        self.attribute(name).and_then(|a| a.t.as_ref())
    }
}

impl ValueInfoProto {
    /// Returns the type of the values; `None` if the file does not say it.
    pub fn element_type(&self) -> Option<i32> {
        self.r#type.as_ref()?.tensor_type.as_ref()?.elem_type
    }

    /// Returns the axes; none if the file does not say them.
    pub fn axes(&self) -> &[Dimension] {
        let of = self.r#type.as_ref().and_then(|t| t.tensor_type.as_ref()?.shape.as_ref());
        of.map_or(&[], |shape| &shape.dim)
    }

    /// Returns the size of the first axis, that of the batch; `None` if it is not fixed.
    pub fn fixed_batch(&self) -> Option<i64> {
        self.axes().first()?.dim_value
    }
}
