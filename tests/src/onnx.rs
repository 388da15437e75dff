//! A network with one `Concat` of all inputs. The scores of its model are the inputs of the
//! network, which a test can compare bit for bit. A second network adds squares, which overflow.

use hatchback_tools::workload::onnx::{Graph, Type, int};

/// A network that puts its inputs, each `[batch, width]`, side by side into `output`.
pub fn concat(inputs: &[(String, usize)], output: &str) -> Vec<u8> {
    concat_and(inputs, output, &[])
}

/// The network of [`concat()`], with these operators more, whose results no node reads.
pub fn concat_and(inputs: &[(String, usize)], output: &str, operators: &[&str]) -> Vec<u8> {
    graph_of(inputs, output, operators).file()
}

fn graph_of(inputs: &[(String, usize)], output: &str, operators: &[&str]) -> Graph {
    let mut graph = Graph::default();
    let names: Vec<&str> = inputs.iter().map(|(name, _)| name.as_str()).collect();
    for name in operators {
        graph.node(name, &names[..1], &format!("{name}s"), &[]);
    }
    graph.node("Concat", &names, output, &[int("axis", 1)]);
    inputs.iter().for_each(|(name, width)| graph.input(name, Type::Float, &[*width]));
    graph.output(output, &[inputs.iter().map(|(_, width)| width).sum()]);
    graph
}

/// The network of [`concat_and`], with an input `c` as wide as the last, which no node reads.
pub fn concat_beside(inputs: &[(String, usize)], output: &str, operators: &[&str]) -> Vec<u8> {
    let mut graph = graph_of(inputs, output, operators);
    graph.input("c", Type::Float, &[inputs.last().map_or(1, |(_, width)| *width)]);
    graph.file()
}

/// The network of [`concat()`], with the squares of the first input after it. A value above 1.9e19
/// makes the last outputs infinite and leaves the others finite.
pub fn concat_and_square(inputs: &[(String, usize)], output: &str) -> Vec<u8> {
    let mut graph = Graph::default();
    let mut names: Vec<&str> = inputs.iter().map(|(name, _)| name.as_str()).collect();
    let (first, width) = (names[0], inputs[0].1);
    graph.node("Mul", &[first, first], "squares", &[]);
    names.push("squares");
    graph.node("Concat", &names, output, &[int("axis", 1)]);
    inputs.iter().for_each(|(name, width)| graph.input(name, Type::Float, &[*width]));
    graph.output(output, &[width + inputs.iter().map(|(_, width)| width).sum::<usize>()]);
    graph.file()
}
