//! What a request computes once. A value is shared if only shared inputs and constants reach it:
//! all samples of a request have the same. A product by weights over shared and own columns becomes
//! two: that of the shared columns, and that of the own ones, which continues its sums. The nodes
//! are the same whether a run shares or not, so the bits are equal. This file runs nothing.

use crate::dense::graph::node::{Node, Op, Operand};
use crate::dense::graph::onnx_graph::Graph;
use crate::dense::graph::tensor::Id;
use crate::dense::matrix::gemm::Matrix;
use std::collections::HashMap;

/// The operands of a `Concat`, each with the values that it gives each time.
struct Parts {
    outer: usize,
    parts: Vec<(Id, usize)>,
}

/// The nodes of a graph while products are split.
struct Split {
    widths: Vec<usize>,
    shared: Vec<bool>,
    nodes: Vec<Node>,
    concats: HashMap<Id, Parts>,
    /// The shared and the own columns of a `Concat`, joined.
    joined: HashMap<Id, [Id; 2]>,
}

/// Splits the products of `graph` that mix both sides and puts the nodes of shared values first.
/// The first values are the inputs, and `shared` says which of them are shared. Returns it for
/// every value.
pub(in crate::dense) fn split(graph: &mut Graph, shared: &[bool]) -> Vec<bool> {
    let widths = std::mem::take(&mut graph.widths);
    let mut marks = vec![false; widths.len()];
    marks[..shared.len()].copy_from_slice(shared);
    let (nodes, concats) = (Vec::with_capacity(graph.nodes.len()), HashMap::new());
    let mut split = Split { widths, shared: marks, nodes, concats, joined: HashMap::new() };
    graph.nodes.drain(..).for_each(|node| split.add(node));

    let Split { widths, shared, mut nodes, .. } = split;
    // Stable: a shared value depends on shared ones only.
    nodes.sort_by_key(|node| !shared[node.output]);
    (graph.widths, graph.nodes) = (widths, nodes);
    shared
}

impl Split {
    fn add(&mut self, mut node: Node) {
        self.shared[node.output] = node.inputs.iter().all(|&id| self.shared[id]);
        if !self.shared[node.output] {
            self.pick_apart(&mut node);
            self.record(&node);
            node = self.split_product(node);
        }
        self.nodes.push(node);
    }

    /// Adds a node with a value of this width. Returns the value.
    fn node(&mut self, inputs: Vec<Id>, op: Op, width: usize) -> Id {
        let (output, is_shared) = (self.widths.len(), inputs.iter().all(|&id| self.shared[id]));
        self.widths.push(width);
        self.shared.push(is_shared);
        self.nodes.push(Node { inputs, op, output });
        output
    }

    /// Gives the index table of a shared operand to a node of its own, which runs once a request.
    fn pick_apart(&mut self, node: &mut Node) {
        let Op::Zip { left, right, .. } = &mut node.op else { return };
        for operand in [left, right] {
            let Operand::Value { input, picks } = operand else { continue };
            let id = node.inputs[*input];
            if let Some(picks) = picks.take_if(|_| self.shared[id]) {
                let width = picks.len();
                node.inputs.push(self.node(vec![id], Op::Pick(picks), width));
                *input = node.inputs.len() - 1;
            }
        }
    }

    /// Records the parts of a `Concat`, those of a `Concat` among them too.
    fn record(&mut self, node: &Node) {
        let Op::Concat { outer, parts } = &node.op else { return };
        let mut all = Vec::new();
        for (&id, &part) in node.inputs.iter().zip(parts) {
            match self.concats.get(&id).filter(|within| within.outer == *outer) {
                Some(within) => all.extend_from_slice(&within.parts),
                None => all.push((id, part)),
            }
        }
        self.concats.insert(node.output, Parts { outer: *outer, parts: all });
    }

    /// Returns `node`, or what is left of it after the product of the shared columns.
    fn split_product(&mut self, node: Node) -> Node {
        let Op::Matrix { rows, matrix } = &node.op else { return node };
        let (rows, from) = (*rows, node.inputs[0]);
        let Some(concat) = self.concats.get(&from).filter(|concat| concat.outer == rows) else {
            return node;
        };
        let mut columns = [Vec::new(), Vec::new()];
        let mut first = 0;
        for (id, part) in &concat.parts {
            columns[usize::from(!self.shared[*id])].extend(first..first + part);
            first += part;
        }
        if columns.iter().any(Vec::is_empty) {
            return node;
        }

        let [shared, own] = self.join(from, rows);
        let before: Matrix = matrix.with_rows(&columns[0], false);
        let after = Box::new(matrix.with_rows(&columns[1], true));
        let op = Op::Matrix { rows, matrix: Box::new(before) };
        let sums = self.node(vec![shared], op, rows * matrix.n);
        let op = Op::Matrix { rows, matrix: after };
        Node { inputs: vec![own, sums], op, output: node.output }
    }

    /// Returns the shared and the own parts of the `Concat` `from`, each side joined.
    fn join(&mut self, from: Id, outer: usize) -> [Id; 2] {
        if let Some(joined) = self.joined.get(&from) {
            return *joined;
        }
        let joined = [true, false].map(|is_shared| {
            let parts = self.concats[&from].parts.iter();
            let (inputs, parts): (Vec<Id>, Vec<usize>) =
                parts.filter(|(id, _)| self.shared[*id] == is_shared).copied().unzip();
            let width = outer * parts.iter().sum::<usize>();
            match inputs.as_slice() {
                &[one] => one,
                _ => self.node(inputs, Op::Concat { outer, parts }, width),
            }
        });
        self.joined.insert(from, joined);
        joined
    }
}
