//! The layout of a network: its nodes in order, bias and Relu fused into the products before them,
//! and a buffer for every result, shared by results that are never alive together. What runs it, on
//! the CPU (`plan.rs`) or on a GPU (`device.rs`), runs the same nodes. Knows nothing of ONNX, never
//! runs anything.

use super::graph::{Graph, Id, Map, Node, Op, Operand, Zip};

/// Where a value lies.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Input(usize),
    Buffer(usize),
}

/// A network laid out.
pub(crate) struct Layout {
    pub nodes: Vec<Node>,
    /// Values a sample of each value.
    pub widths: Vec<usize>,
    pub places: Vec<Place>,
    /// Values a sample of each buffer.
    pub buffers: Vec<usize>,
    pub output: Id,
}

impl Layout {
    /// Lays out `graph`.
    pub fn new(mut graph: Graph) -> Self {
        fuse(&mut graph);
        drop_unused(&mut graph);
        let (places, buffers) = place(&graph);
        let Graph { nodes, widths, output } = graph;
        Self { nodes, widths, places, buffers, output }
    }

    /// Values in one sample's result.
    pub fn outputs(&self) -> usize {
        self.widths[self.output]
    }
}

/// How often each value is read.
fn uses(graph: &Graph) -> Vec<usize> {
    let mut uses = vec![0; graph.widths.len()];
    graph.nodes.iter().flat_map(|n| &n.inputs).for_each(|&id| uses[id] += 1);
    uses[graph.output] += 1;
    uses
}

/// Puts a bias that is added to a product, and the Relu after it, into the product.
fn fuse(graph: &mut Graph) {
    let uses = uses(graph);
    let mut writer: Vec<Option<usize>> = vec![None; graph.widths.len()];
    let mut kept: Vec<Node> = Vec::with_capacity(graph.nodes.len());
    for node in graph.nodes.drain(..) {
        let before = match node.inputs.as_slice() {
            &[x] if uses[x] == 1 => writer[x],
            _ => None,
        };
        let fused = before.is_some_and(|at| kept[at].absorb(&node));
        let at = if fused { before.unwrap_or_default() } else { kept.len() };
        writer[node.output] = Some(at);
        if fused { kept[at].output = node.output } else { kept.push(node) }
    }
    graph.nodes = kept;
}

impl Node {
    /// Does what `next` does to the result too, if it can.
    fn absorb(&mut self, next: &Self) -> bool {
        let Op::Matrix { rows, matrix } = &mut self.op else { return false };
        match &next.op {
            Op::Map(Map::Relu) if !matrix.relu => {
                matrix.relu = true;
                true
            }
            Op::Zip { zip: Zip::Add, left, right } if *rows == 1 && !matrix.relu => {
                match (left, right) {
                    (Operand::Value { picks: None, .. }, Operand::Constant(bias))
                    | (Operand::Constant(bias), Operand::Value { picks: None, .. }) => {
                        matrix.take_bias(bias)
                    }
                    _ => false,
                }
            }
            _ => false,
        }
    }
}

/// Drops nodes whose results nothing reads.
fn drop_unused(graph: &mut Graph) {
    let mut used = vec![false; graph.widths.len()];
    used[graph.output] = true;
    for node in graph.nodes.iter().rev() {
        if used[node.output] {
            node.inputs.iter().for_each(|&id| used[id] = true);
        }
    }
    graph.nodes.retain(|n| used[n.output]);
}

/// A place for every value: a result takes the smallest buffer that is free and large enough, else
/// the largest, which grows, else a new one.
fn place(graph: &Graph) -> (Vec<Place>, Vec<usize>) {
    let mut places: Vec<Place> = (0..graph.widths.len()).map(Place::Input).collect();
    let mut last = vec![0; graph.widths.len()];
    for (at, node) in graph.nodes.iter().enumerate() {
        node.inputs.iter().for_each(|&id| last[id] = at);
    }
    last[graph.output] = usize::MAX;
    let (mut buffers, mut free): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
    for (at, node) in graph.nodes.iter().enumerate() {
        let width = graph.widths[node.output];
        let dies = |id: Id| last[id] == at;
        if let (Op::Map(_), Place::Buffer(b), true) =
            (&node.op, places[node.inputs[0]], dies(node.inputs[0]))
        {
            places[node.output] = Place::Buffer(b);
            continue;
        }
        let fitting =
            free.iter().copied().filter(|&b| buffers[b] >= width).min_by_key(|&b| buffers[b]);
        let chosen = fitting.or_else(|| free.iter().copied().max_by_key(|&b| buffers[b]));
        let buffer = chosen.unwrap_or_else(|| {
            buffers.push(0);
            buffers.len() - 1
        });
        free.retain(|&b| b != buffer);
        buffers[buffer] = buffers[buffer].max(width);
        places[node.output] = Place::Buffer(buffer);
        for &id in &node.inputs {
            match places[id] {
                Place::Buffer(b) if dies(id) && !free.contains(&b) => free.push(b),
                _ => {}
            }
        }
    }
    (places, buffers)
}
