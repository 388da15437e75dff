//! A small ONNX writer: enough to put a network of known shape into a file. Protobuf by hand, since
//! only varint and length-delimited fields are needed. Never reads a network and never checks one.

/// A protobuf message.
#[derive(Clone, Debug, Default)]
pub struct Message(Vec<u8>);

/// `TensorProto.DataType`.
#[derive(Clone, Copy, Debug)]
pub enum Type {
    /// Float32.
    Float = 1,
    /// Int64.
    Int64 = 7,
}

/// `AttributeProto.AttributeType`.
const INT: u64 = 2;
const INTS: u64 = 7;

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn number(mut self, field: u64, value: u64) -> Self {
        self.varint(field << 3);
        self.varint(value);
        self
    }

    fn bytes(mut self, field: u64, value: &[u8]) -> Self {
        self.varint(field << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    fn text(self, field: u64, value: &str) -> Self {
        self.bytes(field, value.as_bytes())
    }

    fn message(self, field: u64, value: &Self) -> Self {
        self.bytes(field, &value.0)
    }

    fn each<T>(self, values: &[T], add: impl Fn(Self, &T) -> Self) -> Self {
        values.iter().fold(self, add)
    }
}

/// The attribute `name` with one number.
pub fn int(name: &str, value: u64) -> Message {
    Message::default().text(1, name).number(3, value).number(20, INT)
}

/// The attribute `name` with a list of numbers.
pub fn ints(name: &str, values: &[u64]) -> Message {
    Message::default().text(1, name).each(values, |m, v| m.number(8, *v)).number(20, INTS)
}

/// A tensor without its values.
fn tensor(name: &str, kind: Type, shape: &[usize]) -> Message {
    Message::default()
        .each(shape, |m, n| m.number(1, *n as u64))
        .number(2, kind as u64)
        .text(8, name)
}

/// A graph in the making.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    nodes: Vec<Message>,
    constants: Vec<Message>,
    inputs: Vec<Message>,
    outputs: Vec<Message>,
}

impl Graph {
    /// Adds a node; its output has the name that is returned.
    pub fn node(
        &mut self,
        op: &str,
        inputs: &[&str],
        output: &str,
        attributes: &[Message],
    ) -> String {
        let node = Message::default().each(inputs, |m, name| m.text(1, name)).text(2, output);
        let node = node.text(3, output).text(4, op).each(attributes, |m, a| m.message(5, a));
        self.nodes.push(node);
        output.to_owned()
    }

    /// Adds a constant of floats.
    pub fn floats(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.constants.push(tensor(name, Type::Float, shape).bytes(9, &bytes));
    }

    /// Adds a constant of integers.
    pub fn integers(&mut self, name: &str, shape: &[usize], values: &[i64]) {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.constants.push(tensor(name, Type::Int64, shape).bytes(9, &bytes));
    }

    /// Adds a constant of floats that lie in a file beside the network's.
    pub fn external(&mut self, name: &str, shape: &[usize], file: &str) {
        let location = Message::default().text(1, "location").text(2, file);
        self.constants.push(tensor(name, Type::Float, shape).message(13, &location).number(14, 1));
    }

    /// Adds an input `[batch, shape]`.
    pub fn input(&mut self, name: &str, kind: Type, shape: &[usize]) {
        self.inputs.push(value_info(name, kind, shape));
    }

    /// Adds an output `[batch, shape]` of floats.
    pub fn output(&mut self, name: &str, shape: &[usize]) {
        self.outputs.push(value_info(name, Type::Float, shape));
    }

    /// The file, in opset 13.
    pub fn file(&self) -> Vec<u8> {
        let add = |field| move |graph: Message, m: &Message| graph.message(field, m);
        let graph = Message::default().each(&self.nodes, add(1)).text(2, "graph");
        let graph = graph.each(&self.constants, add(5)).each(&self.inputs, add(11));
        let graph = graph.each(&self.outputs, add(12));
        let opset = Message::default().text(1, "").number(2, 13);
        Message::default().number(1, 7).text(2, "hatchback").message(7, &graph).message(8, &opset).0
    }
}

/// A `ValueInfoProto`.
fn value_info(name: &str, kind: Type, shape: &[usize]) -> Message {
    let batch = Message::default().text(2, "batch");
    let shape = Message::default().message(1, &batch).each(shape, |m, n| {
        let size = Message::default().number(1, *n as u64);
        m.message(1, &size)
    });
    let tensor = Message::default().number(1, kind as u64).message(2, &shape);
    Message::default().text(1, name).message(2, &Message::default().message(1, &tensor))
}
