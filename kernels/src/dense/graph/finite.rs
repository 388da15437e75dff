//! Checks that no sigmoid before a score hides an infinite logit, so that the score is NaN. The way
//! to a score goes back from the output over shapes, sums and products of two values, and sigmoids.
//! A check is made of nodes that every device has: `f(x)` becomes `f(x) + (x - x)`. Runs nothing.

use crate::dense::graph::functions::{Map, Zip};
use crate::dense::graph::node::{Graph, Node, Op, Operand};
use crate::dense::graph::tensor::Id;
use std::collections::HashSet;

/// Of each value, what decides whether it is checked.
struct Marks {
    /// It is on the way to a score, and on no other.
    on_way: Vec<bool>,
    /// A constant of the network makes it infinite, as a mask does.
    masked: Vec<bool>,
}

/// Adds the checks to `graph`.
pub(crate) fn check_scores(graph: &mut Graph) {
    let marks = Marks::read(graph);
    // The sigmoids of `joined_outputs.rs` have their check already.
    let zero_of = |node: &Node| match (&node.op, node.inputs.as_slice()) {
        (Op::Zip { zip: Zip::Sub, left, right }, &[a, b]) if a == b => {
            (left.is_whole() && right.is_whole() && marks.on_way[node.output]).then_some(a)
        }
        _ => None,
    };
    let checked: HashSet<Id> = graph.nodes.iter().filter_map(zero_of).collect();

    for node in std::mem::take(&mut graph.nodes) {
        let logit = match (&node.op, node.inputs.as_slice()) {
            (Op::Map(map), &[x]) if is_sigmoid(*map) && marks.on_way[node.output] => Some(x),
            _ => None,
        };
        let Some(x) = logit.filter(|x| !checked.contains(x) && !marks.masked[*x]) else {
            graph.nodes.push(node);
            continue;
        };
        let width = graph.widths[node.output];
        let score = graph.add(node.inputs, node.op, width);
        let zero = graph.add(vec![x, x], of_both(Zip::Sub), width);
        // The readers of the result read the checked one.
        let (inputs, op) = (vec![score, zero], of_both(Zip::Add));
        graph.nodes.push(Node { inputs, op, output: node.output });
    }
}

/// Returns the function of two operands in order.
fn of_both(zip: Zip) -> Op {
    let [left, right] = [0, 1].map(|input| Operand::Value { input, picks: None });
    Op::Zip { zip, left, right }
}

/// Returns whether `map` makes a score of a logit.
fn is_sigmoid(map: Map) -> bool {
    matches!(map, Map::Sigmoid | Map::HardSigmoid { .. } | Map::Tanh)
}

/// Returns whether `op` has an infinite constant.
fn is_masking(op: &Op) -> bool {
    let is_infinite = |operand: &Operand| match operand {
        Operand::Constant(values) => values.iter().any(|value| value.is_infinite()),
        Operand::Value { .. } => false,
    };
    match op {
        Op::Zip { left, right, .. } => is_infinite(left) || is_infinite(right),
        Op::Select(operands) => operands.iter().any(is_infinite),
        _ => false,
    }
}

impl Marks {
    fn read(graph: &Graph) -> Self {
        let none = || vec![false; graph.widths.len()];
        let (mut on_way, mut elsewhere, mut masked) = (none(), none(), none());
        for Node { inputs, op, output } in &graph.nodes {
            // The infinity of a mask goes on until a Softmax, a product or a sigmoid ends it.
            let is_choice = matches!(op, Op::Select(_) | Op::Fold { .. });
            let carries = is_choice || is_passing(op) && !matches!(op, Op::Map(_));
            masked[*output] = is_masking(op) || carries && inputs.iter().any(|&id| masked[id]);
            if !is_passing(op) {
                inputs.iter().for_each(|&id| elsewhere[id] = true);
            }
        }
        on_way[graph.output] = true;
        for Node { inputs, op, output } in graph.nodes.iter().rev() {
            on_way[*output] &= !elsewhere[*output];
            if on_way[*output] && is_passing(op) {
                inputs.iter().for_each(|&id| on_way[id] = true);
            }
        }
        Self { on_way, masked }
    }
}

/// Returns whether the way to a score goes on over `op`.
fn is_passing(op: &Op) -> bool {
    match op {
        Op::Map(map) => is_sigmoid(*map),
        Op::Zip { zip, .. } => matches!(zip, Zip::Add | Zip::Sub | Zip::Mul),
        Op::Concat { .. } | Op::Pick(_) | Op::Check { .. } => true,
        // A score is no logit behind products by weights, or functions of several values.
        Op::Matrix { .. } | Op::Joined(_) | Op::Crossed { .. } | Op::Products { .. } => false,
        Op::Pairs { .. } | Op::Select(_) | Op::Sum { .. } | Op::Fold { .. } => false,
        Op::Softmax { .. } | Op::Recurrent(_) | Op::Lookup { .. } | Op::Order { .. } => false,
    }
}
