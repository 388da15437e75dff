//! Checks that no function behind the last product hides a value that is not finite, so that a
//! score is NaN if such a value leads to it. The way to a score goes back from the output over
//! functions of each value, Softmax and shapes, and ends at a product, sum, fold or sequence. A
//! check is made of nodes that every device has: `f(x)` becomes `f(x) + (x - x)`. Runs nothing.

use crate::dense::graph::functions::{Map, Zip};
use crate::dense::graph::node::{Node, Op, Operand};
use crate::dense::graph::onnx_graph::Graph;
use crate::dense::graph::tensor::Id;
use std::collections::HashSet;

/// An operand that a function may hide: a value and the positions that are read of it.
type Hidden = (Id, Option<Vec<u32>>);

/// Of each value, what decides whether it is checked.
struct Marks {
    /// It is on the way to a score.
    on_way: Vec<bool>,
    /// A constant of the network makes it infinite, as a mask does.
    masked: Vec<bool>,
    /// It is made of an `Exp`, whose overflow is right in a divisor: `1 / (1 + exp(100))` is 0.
    exponential: Vec<bool>,
}

/// Adds the checks to `graph`.
pub(crate) fn check_scores(graph: &mut Graph) {
    let marks = Marks::read(graph);
    // The sigmoids of `joined_outputs.rs` have their check already.
    let zero_of = |node: &Node| match (&node.op, node.inputs.as_slice()) {
        (Op::Zip { zip: Zip::Sub, .. }, &[a, b]) if a == b => Some(a),
        _ => None,
    };
    let checked: HashSet<Id> = graph.nodes.iter().filter_map(zero_of).collect();

    for mut node in std::mem::take(&mut graph.nodes) {
        let mut hidden = if marks.on_way[node.output] { marks.hidden(&node) } else { Vec::new() };
        hidden.retain(|(x, _)| !checked.contains(x));
        if hidden.is_empty() {
            graph.nodes.push(node);
            continue;
        }

        let (result, width) = (node.output, graph.widths[node.output]);
        let zero =
            |(x, picks): Hidden| add(graph, Zip::Sub, [(x, picks.clone()), (x, picks)], width);
        let zeros: Vec<Id> = hidden.into_iter().map(zero).collect();
        node.output = graph.widths.len();
        graph.widths.push(width);
        let mut sum = node.output;
        graph.nodes.push(node);
        for zero in zeros {
            sum = add(graph, Zip::Add, [(sum, None), (zero, None)], width);
        }
        // The readers of the result read the checked one.
        if let Some(last) = graph.nodes.last_mut() {
            last.output = result;
        }
    }
}

/// Adds a node of two values, whose result has `width` values. Returns the result.
fn add(graph: &mut Graph, zip: Zip, sides: [Hidden; 2], width: usize) -> Id {
    let [(left, left_picks), (right, right_picks)] = sides;
    let (inputs, output) = (vec![left, right], graph.widths.len());
    let left = Operand::Value { input: 0, picks: left_picks };
    let right = Operand::Value { input: 1, picks: right_picks };
    graph.widths.push(width);
    graph.nodes.push(Node { inputs, op: Op::Zip { zip, left, right }, output });
    output
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

/// Returns whether `map` makes a finite value of one that is not.
fn hides(map: Map) -> bool {
    match map {
        Map::Relu | Map::Sigmoid | Map::Tanh | Map::Exp | Map::Erf | Map::Sign | Map::Atan => true,
        Map::Softplus | Map::HardSigmoid { .. } | Map::Elu { .. } | Map::Celu { .. } => true,
        Map::ThresholdedRelu { .. } | Map::Clip { .. } | Map::NotZero | Map::IsZero => true,
        Map::Pow(y) => y == 0.0,
        _ => false,
    }
}

impl Marks {
    fn read(graph: &Graph) -> Self {
        let none = || vec![false; graph.widths.len()];
        let mut marks = Self { on_way: none(), masked: none(), exponential: none() };
        for Node { inputs, op, output } in &graph.nodes {
            let any = |marks: &[bool]| inputs.iter().any(|&id| marks[id]);
            let is_exp = matches!(op, Op::Map(Map::Exp));
            let passes = is_passing(op) || matches!(op, Op::Sum { .. });
            marks.exponential[*output] = is_exp || (passes && any(&marks.exponential));
            let is_mask = match op {
                Op::Select(_) | Op::Zip { zip: Zip::Add, .. } => is_masking(op),
                _ => false,
            };
            let stays = match op {
                Op::Map(map) => !hides(*map),
                _ => is_passing(op) && !matches!(op, Op::Softmax { .. }),
            };
            marks.masked[*output] = is_mask || (stays && any(&marks.masked));
        }

        marks.on_way[graph.output] = true;
        for Node { inputs, op, output } in graph.nodes.iter().rev() {
            if marks.on_way[*output] && is_passing(op) {
                inputs.iter().for_each(|&id| marks.on_way[id] = true);
            }
        }
        marks
    }

    /// Returns the operands of `node` of which its result may hide that they are not finite.
    fn hidden(&self, node: &Node) -> Vec<Hidden> {
        let whole = |input: usize| Some((node.inputs[input], None));
        let side = |operand: &Operand| match operand {
            Operand::Value { input, picks } => Some((node.inputs[*input], picks.clone())),
            Operand::Constant(_) => None,
        };
        let divisor = |side: Option<Hidden>| side.filter(|(x, _)| !self.exponential[*x]);
        let sides = match &node.op {
            // The value that is not chosen hides nothing.
            Op::Select(operands) => [side(&operands[0]), None],
            _ if is_masking(&node.op) => [None, None],
            Op::Softmax { .. } => [whole(0), None],
            Op::Map(map) if hides(*map) => [whole(0), None],
            Op::Map(Map::Reciprocal) => [divisor(whole(0)), None],
            Op::Map(Map::Pow(y)) if *y < 0.0 => [divisor(whole(0)), None],
            Op::Zip { zip, left, right } => match zip {
                Zip::Div | Zip::Quotient | Zip::Modulo | Zip::Remainder => {
                    [None, divisor(side(right))]
                }
                Zip::Pow | Zip::Min | Zip::Max => [side(left), side(right)],
                Zip::Equal | Zip::Less | Zip::LessEqual => [side(left), side(right)],
                Zip::Add | Zip::Sub | Zip::Mul | Zip::PRelu => [None, None],
            },
            _ => [None, None],
        };
        sides.into_iter().flatten().filter(|(x, _)| !self.masked[*x]).collect()
    }
}

/// Returns whether each value of the result comes from single values of the operands, or from
/// those of one Softmax. `IsNaN` asks for such values, so the way ends there.
fn is_passing(op: &Op) -> bool {
    match op {
        Op::Map(map) => *map != Map::IsNan,
        Op::Zip { .. } | Op::Select(_) | Op::Concat { .. } | Op::Pick(_) => true,
        Op::Check { .. } | Op::Softmax { .. } => true,
        _ => false,
    }
}
