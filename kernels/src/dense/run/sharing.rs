//! What a request computes once. A value is shared if only shared inputs and constants reach it:
//! all samples of a request have the same. A product by weights over shared and own columns becomes
//! two: that of the shared columns, and that of the own ones, which continues its sums. The nodes
//! are the same whether a run shares or not, so the bits are equal. This file runs nothing.

use crate::dense::graph::functions::{Map, Zip};
use crate::dense::graph::node::{Node, Op, Operand};
use crate::dense::graph::onnx_graph::Graph;
use crate::dense::graph::tensor::Id;
use crate::dense::matrix::gemm::Matrix;
use crate::dense::matrix::pairs::pair;
use std::collections::HashMap;
use std::rc::Rc;

/// Values side by side, each with its columns of the row that they make `outer` times.
#[derive(Clone)]
struct Parts {
    outer: usize,
    parts: Vec<(Id, Vec<usize>)>,
}

/// Some columns of a product's left operand, joined to one value.
struct Side {
    value: Id,
    columns: Vec<usize>,
}

/// Columns of an input that follow each other. Either all samples of a request share them, or each
/// has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputPart {
    /// The number of the input.
    pub input: usize,
    /// The number of its columns.
    pub width: usize,
    /// Whether all samples of a request have the same values.
    pub shared: bool,
    /// Whether the columns are vectors of lookups. Other values may be large, as a time in days is.
    pub vectors: bool,
}

impl InputPart {
    /// Returns one part of vectors for each of `inputs`, names and widths.
    pub fn whole(inputs: &[(&str, usize)], shared: &[bool]) -> Vec<Self> {
        let each = inputs.iter().zip(shared).enumerate();
        each.map(|(input, (&(_, width), &shared))| Self { input, width, shared, vectors: true })
            .collect()
    }
}

/// Makes each of `parts` an input of `graph`. An input of several parts becomes their `Concat`.
/// Each input has parts, which are in the order of the inputs and have their widths.
pub(crate) fn divide_inputs(graph: &mut Graph, parts: &[InputPart]) {
    let inputs = parts.last().map_or(0, |part| part.input + 1);
    let mut widths: Vec<usize> = parts.iter().map(|part| part.width).collect();
    widths.extend_from_slice(&graph.widths[inputs..]);

    let (mut nodes, mut ids) = (Vec::new(), Vec::new());
    for input in 0..inputs {
        let of_input: Vec<Id> = (0..parts.len()).filter(|p| parts[*p].input == input).collect();
        if let [one] = of_input[..] {
            ids.push(one);
            continue;
        }
        let op = Op::Concat { outer: 1, parts: of_input.iter().map(|p| parts[*p].width).collect() };
        ids.push(widths.len());
        nodes.push(Node { inputs: of_input, op, output: widths.len() });
        widths.push(graph.widths[input]);
    }
    ids.extend(parts.len()..parts.len() + graph.widths.len() - inputs);

    for node in &mut graph.nodes {
        node.inputs.iter_mut().for_each(|id| *id = ids[*id]);
        node.output = ids[node.output];
    }
    nodes.append(&mut graph.nodes);
    (graph.output, graph.widths, graph.nodes) = (ids[graph.output], widths, nodes);
}

impl Side {
    /// Returns the place of each column in the joined value.
    fn places(&self) -> HashMap<usize, u32> {
        self.columns.iter().enumerate().map(|(at, column)| (*column, at as u32)).collect()
    }
}

/// The columns of a product's left operand by what they depend on.
struct Sides {
    shared: Side,
    /// Equal in all rows of a sample: the value has one row.
    repeated: Option<Side>,
    own: Side,
}

/// The nodes of a graph while products are split.
struct Split {
    widths: Vec<usize>,
    shared: Vec<bool>,
    /// Whether only vectors of lookups and constants reach a value.
    of_vectors: Vec<bool>,
    nodes: Vec<Node>,
    /// The parts of own values.
    parts: HashMap<Id, Parts>,
    /// The sides so far of a value that makes a number of rows. Several nodes may read one.
    sides: HashMap<(Id, usize), Option<Rc<Sides>>>,
}

/// Splits the products of `graph` that mix both sides and puts the nodes of shared values first.
/// The first values are the inputs, one for each of `parts`. Returns of every value whether it is
/// shared.
pub(in crate::dense) fn split(graph: &mut Graph, parts: &[InputPart]) -> Vec<bool> {
    let widths = std::mem::take(&mut graph.widths);
    let (mut marks, mut of_vectors) = (vec![false; widths.len()], vec![false; widths.len()]);
    for (input, part) in parts.iter().enumerate() {
        (marks[input], of_vectors[input]) = (part.shared, part.vectors);
    }
    let nodes = Vec::with_capacity(graph.nodes.len());
    let (parts, sides) = (HashMap::new(), HashMap::new());
    let mut split = Split { widths, shared: marks, of_vectors, nodes, parts, sides };
    graph.nodes.drain(..).for_each(|node| split.add(node));

    let Split { widths, shared, mut nodes, .. } = split;
    // Stable: a shared value depends on shared ones only.
    nodes.sort_by_key(|node| !shared[node.output]);
    (graph.widths, graph.nodes) = (widths, nodes);
    shared
}

impl Split {
    fn add(&mut self, mut node: Node) {
        self.pick_shared(&mut node);
        self.shared[node.output] = node.inputs.iter().all(|&id| self.shared[id]);
        self.of_vectors[node.output] = node.inputs.iter().all(|&id| self.of_vectors[id]);
        if !self.shared[node.output] {
            self.pick_apart(&mut node);
            self.record(&node);
            self.record_columns(&node);
            self.split_pairs(&node);
            node = self.split_product(node);
        }
        self.nodes.push(node);
    }

    /// Adds a node with a value of this width. Returns the value.
    fn node(&mut self, inputs: Vec<Id>, op: Op, width: usize) -> Id {
        let (output, is_shared) = (self.widths.len(), inputs.iter().all(|&id| self.shared[id]));
        self.of_vectors.push(inputs.iter().all(|&id| self.of_vectors[id]));
        self.widths.push(width);
        self.shared.push(is_shared);
        self.nodes.push(Node { inputs, op, output });
        output
    }

    fn writer(&self, id: Id) -> Option<&Node> {
        self.nodes.iter().rev().find(|node| node.output == id)
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

    /// Records the parts of a `Concat`, those of its operands too.
    fn record(&mut self, node: &Node) {
        let Op::Concat { outer, parts } = &node.op else { return };
        let (mut all, mut first) = (Vec::new(), 0);
        for (&id, &width) in node.inputs.iter().zip(parts) {
            match self.parts.get(&id).filter(|within| within.outer == *outer) {
                Some(within) => all.extend(within.parts.iter().map(|(id, columns)| {
                    (*id, columns.iter().map(|column| first + column).collect())
                })),
                None => all.push((id, (first..first + width).collect())),
            }
            first += width;
        }
        self.parts.insert(node.output, Parts { outer: *outer, parts: all });
    }

    /// Lets a node that picks only shared columns of an own value pick them of the shared side.
    fn pick_shared(&mut self, node: &mut Node) {
        let (Op::Pick(picks), from) = (&mut node.op, node.inputs.first().copied()) else { return };
        let Some(sides) = from.filter(|id| !self.shared[*id]).and_then(|id| self.sides(id, 1))
        else {
            return;
        };
        let places = sides.shared.places();
        let narrowed: Option<Vec<u32>> =
            picks.iter().map(|pick| places.get(&(*pick as usize)).copied()).collect();
        if let Some(narrowed) = narrowed {
            (node.inputs, *picks) = (vec![sides.shared.value], narrowed);
        }
    }

    /// Records the parts of a function of each column of a value, or of some of its columns: that
    /// of the shared ones and that of the others. A product takes these; `node` stays for other
    /// readers.
    fn record_columns(&mut self, node: &Node) {
        let (Op::Map(_) | Op::Zip { .. } | Op::Pick(_)) = &node.op else { return };
        let &[from] = node.inputs.as_slice() else { return };
        let Some(sides) = self.sides(from, 1) else { return };
        let mut parts = Vec::new();
        for side in [&sides.shared, &sides.own] {
            let (op, columns) = match &node.op {
                Op::Map(map) => (Op::Map(*map), side.columns.clone()),
                Op::Zip { zip, left, right } => {
                    let operand = |operand: &Operand| match operand {
                        Operand::Value { picks: None, .. } => {
                            Some(Operand::Value { input: 0, picks: None })
                        }
                        Operand::Value { .. } => None,
                        Operand::Constant(values) => {
                            let values = side.columns.iter().map(|c| values.get(*c).copied());
                            values.collect::<Option<_>>().map(Operand::Constant)
                        }
                    };
                    let (Some(left), Some(right)) = (operand(left), operand(right)) else {
                        return;
                    };
                    (Op::Zip { zip: *zip, left, right }, side.columns.clone())
                }
                Op::Pick(picks) => {
                    let places = side.places();
                    let own = picks.iter().enumerate();
                    let own = own.filter_map(|(at, p)| Some((at, *places.get(&(*p as usize))?)));
                    let (columns, picks): (Vec<usize>, Vec<u32>) = own.unzip();
                    (Op::Pick(picks), columns)
                }
                _ => return,
            };
            if !columns.is_empty() {
                parts.push((self.node(vec![side.value], op, columns.len()), columns));
            }
        }
        self.parts.insert(node.output, Parts { outer: 1, parts });
    }

    /// Adds a node for the pairs of shared rows and one for the others, as parts of the result. A
    /// product takes these; `node` stays for other readers.
    fn split_pairs(&mut self, node: &Node) {
        let Op::Pairs { rows, k, picks } = &node.op else { return };
        // The number of each shared row among these.
        let (mut count, mut numbers) = (0, Vec::new());
        for (&id, &rows) in node.inputs.iter().zip(rows) {
            let is_shared = self.shared[id];
            numbers.extend((0..rows).map(|row| is_shared.then_some(count + row)));
            count += if is_shared { rows } else { 0 };
        }
        let n = numbers.len();
        let mut inner = HashMap::new();
        for (i, j) in (0..n).flat_map(|i| (0..=i).map(move |j| (i, j))) {
            if let (Some(a), Some(b)) = (numbers[i], numbers[j]) {
                inner.insert(pair(n, i, j) as u32, pair(count, a, b) as u32);
            }
        }

        let (of_request, own): (Vec<usize>, Vec<usize>) =
            (0..picks.len()).partition(|&at| inner.contains_key(&picks[at]));
        if of_request.is_empty() || own.is_empty() {
            return;
        }
        let among = |ids: &[Id]| -> (Vec<Id>, Vec<usize>) {
            let both = node.inputs.iter().copied().zip(rows.iter().copied());
            both.filter(|(id, _)| ids.contains(id)).unzip()
        };
        let shared: Vec<Id> = node.inputs.iter().copied().filter(|&id| self.shared[id]).collect();
        let mut parts = Vec::new();
        for (ids, columns) in [(&shared, of_request), (&node.inputs, own)] {
            let (inputs, rows) = among(ids);
            let is_all = inputs.len() == node.inputs.len();
            let pick = |&at: &usize| if is_all { picks[at] } else { inner[&picks[at]] };
            let op = Op::Pairs { rows, k: *k, picks: columns.iter().map(pick).collect() };
            parts.push((self.node(inputs, op, columns.len()), columns));
        }
        self.parts.insert(node.output, Parts { outer: 1, parts });
    }

    /// Returns `node`, or what is left of it after the product of the shared columns.
    fn split_product(&mut self, node: Node) -> Node {
        let Op::Matrix { rows, matrix } = &node.op else { return node };
        let (rows, n) = (*rows, matrix.n);
        let Some(sides) = self.sides(node.inputs[0], rows) else { return node };
        let before =
            |side: &Side| -> Box<Matrix> { Box::new(matrix.with_rows(&side.columns, false)) };
        let op = Op::Matrix { rows, matrix: before(&sides.shared) };
        let mut sums = self.node(vec![sides.shared.value], op, rows * n);
        if let Some(side) = &sides.repeated {
            let op = Op::Matrix { rows: 1, matrix: before(side) };
            let row = self.node(vec![side.value], op, n);
            let picks = Some((0..rows * n).map(|i| (i % n) as u32).collect());
            let left = Operand::Value { input: 0, picks };
            let right = Operand::Value { input: 1, picks: None };
            let op = Op::Zip { zip: Zip::Add, left, right };
            sums = self.node(vec![row, sums], op, rows * n);
        }
        let after = Box::new(matrix.with_rows(&sides.own.columns, true));
        let op = Op::Matrix { rows, matrix: after };
        Node { inputs: vec![sides.own.value, sums], op, output: node.output }
    }

    /// Returns the sides of the left operand `from` of a product of `outer` rows, or `None` if the
    /// product stays whole.
    fn sides(&mut self, from: Id, outer: usize) -> Option<Rc<Sides>> {
        if let Some(sides) = self.sides.get(&(from, outer)) {
            return sides.clone();
        }
        let parts = self.parts.get(&from).filter(|parts| parts.outer == outer)?.parts.clone();
        let mut sides = self.columns(&parts, outer);
        if sides[2].is_empty() {
            // Then the repeated columns are own ones: a product needs some to continue its sums.
            let (shared, own) = parts.into_iter().partition(|(id, _)| self.shared[*id]);
            sides = [shared, Vec::new(), own];
        }
        let [shared, repeated, own] = sides;
        let sides = (!shared.is_empty() && !own.is_empty()).then(|| {
            let repeated = (!repeated.is_empty()).then(|| self.join(repeated, 1));
            Rc::new(Sides {
                shared: self.join(shared, outer),
                repeated,
                own: self.join(own, outer),
            })
        });
        self.sides.insert((from, outer), sides.clone());
        sides
    }

    /// Returns the shared parts, those that are equal in all rows of a sample, and the own ones. A
    /// difference of a shared value and such a row can be two parts, whose products are added.
    fn columns(&mut self, all: &[(Id, Vec<usize>)], outer: usize) -> [Vec<(Id, Vec<usize>)>; 3] {
        let [mut shared, mut repeated, mut own] = [const { Vec::new() }; 3];
        for (id, columns) in all {
            let (id, columns) = (*id, columns.clone());
            if self.shared[id] {
                shared.push((id, columns));
            } else if let Some(row) = self.row(id, None, outer) {
                repeated.push((row, columns));
            } else if let Some([of_request, row]) = self.difference(id, outer) {
                shared.push((of_request, columns.clone()));
                repeated.push((row, columns));
            } else {
                own.push((id, columns));
            }
        }
        [shared, repeated, own]
    }

    /// Returns the row that an own value, read by an index table or in order, has `outer` times.
    fn row(&mut self, id: Id, picks: Option<&[u32]>, outer: usize) -> Option<Id> {
        let (from, picks) = match (picks, self.writer(id)) {
            (Some(picks), _) => (id, picks),
            (None, Some(Node { inputs, op: Op::Pick(picks), .. })) => (inputs[0], &picks[..]),
            _ => return None,
        };
        let row = picks[..picks.len() / outer].to_vec();
        if outer == 1 || row.is_empty() || picks.chunks(row.len()).any(|other| other != row) {
            return None;
        }
        let width = row.len();
        Some(self.node(vec![from], Op::Pick(row), width))
    }

    /// Returns the shared value and the repeated row whose sum is the difference `id`. Both are
    /// made of vectors: the products of large values would lose the digits of their difference.
    fn difference(&mut self, id: Id, outer: usize) -> Option<[Id; 2]> {
        let Node { inputs, op: Op::Zip { zip: Zip::Sub, left, right }, .. } = self.writer(id)?
        else {
            return None;
        };
        let side = |operand: &Operand| match operand {
            Operand::Value { input, picks } => Some((inputs[*input], picks.clone())),
            Operand::Constant(_) => None,
        };
        let ((left, left_picks), (right, right_picks)) = (side(left)?, side(right)?);
        if !self.of_vectors[left] || !self.of_vectors[right] {
            return None;
        }
        if self.shared[left] {
            let row = self.row(right, right_picks.as_deref(), outer)?;
            return Some([left, self.negated(row)]);
        }
        if !self.shared[right] {
            return None;
        }
        let row = self.row(left, left_picks.as_deref(), outer)?;
        Some([self.negated(right), row])
    }

    fn negated(&mut self, id: Id) -> Id {
        self.node(vec![id], Op::Map(Map::Neg), self.widths[id])
    }

    /// Joins values that make a row `outer` times.
    fn join(&mut self, parts: Vec<(Id, Vec<usize>)>, outer: usize) -> Side {
        let widths: Vec<usize> = parts.iter().map(|(_, columns)| columns.len()).collect();
        let (inputs, columns): (Vec<Id>, Vec<Vec<usize>>) = parts.into_iter().unzip();
        let columns = columns.concat();
        let value = match inputs.as_slice() {
            &[one] => one,
            _ => {
                let width = outer * columns.len();
                self.node(inputs, Op::Concat { outer, parts: widths }, width)
            }
        };
        Side { value, columns }
    }
}
