//! A network with one `Concat` of all inputs. The scores of its model are the inputs of the
//! network, which a test can compare bit for bit.

use hatchback_tools::workload::onnx::{Graph, Type, int};

/// A network that puts its inputs, each `[batch, width]`, side by side into `output`.
pub fn concat(inputs: &[(String, usize)], output: &str) -> Vec<u8> {
    let mut graph = Graph::default();
    let names: Vec<&str> = inputs.iter().map(|(name, _)| name.as_str()).collect();
    graph.node("Concat", &names, output, &[int("axis", 1)]);
    inputs.iter().for_each(|(name, width)| graph.input(name, Type::Float, &[*width]));
    graph.output(output, &[inputs.iter().map(|(_, width)| width).sum()]);
    graph.file()
}
