//! A tiny ONNX writer: one `Concat` of all inputs, so that a model's scores are its network's inputs and can be
//! compared bit for bit. Protobuf by hand, since only varint and length-delimited fields are needed.

/// Float32 in ONNX's `TensorProto.DataType`.
const FLOAT: u64 = 1;
/// `INT` in ONNX's `AttributeProto.AttributeType`.
const INT: u64 = 2;

#[derive(Default)]
struct Message(Vec<u8>);

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

    fn message(self, field: u64, value: Self) -> Self {
        self.bytes(field, &value.0)
    }
}

/// A `ValueInfoProto` of floats, `[batch, width]`.
fn value_info(name: &str, width: usize) -> Message {
    let batch = Message::default().text(2, "batch");
    let columns = Message::default().number(1, width as u64);
    let shape = Message::default().message(1, batch).message(1, columns);
    let tensor = Message::default().number(1, FLOAT).message(2, shape);
    Message::default().text(1, name).message(2, Message::default().message(1, tensor))
}

/// A network that puts its inputs, each `[batch, width]`, side by side into `output`.
pub fn concat(inputs: &[(String, usize)], output: &str) -> Vec<u8> {
    let axis = Message::default().text(1, "axis").number(3, 1).number(20, INT);
    let node = inputs.iter().fold(Message::default(), |node, (name, _)| node.text(1, name));
    let node = node.text(2, output).text(3, "concat").text(4, "Concat").message(5, axis);
    let graph = Message::default().message(1, node).text(2, "inputs");
    let graph = inputs.iter().fold(graph, |graph, (name, width)| graph.message(11, value_info(name, *width)));
    let graph = graph.message(12, value_info(output, inputs.iter().map(|(_, width)| width).sum()));
    let opset = Message::default().text(1, "").number(2, 13);
    Message::default().number(1, 7).text(2, "hatchback-tests").message(7, graph).message(8, opset).0
}
