//! The nodes of a graph: what a run does to each sample, operation by operation. This file runs
//! nothing.

use crate::dense::graph::functions::{Map, Zip};
use crate::dense::graph::tensor::Id;
use crate::dense::matrix::gemm::Matrix;

/// The nodes of a network in the order of execution. The first values are its inputs, in the
/// caller's order.
pub(crate) struct Graph {
    /// The number of floats in one sample of each value.
    pub widths: Vec<usize>,
    pub nodes: Vec<Node>,
    pub output: Id,
}

impl Graph {
    /// Adds a node whose result has `width` values a sample. Returns the result.
    pub fn add(&mut self, inputs: Vec<Id>, op: Op, width: usize) -> Id {
        let output = self.widths.len();
        self.widths.push(width);
        self.nodes.push(Node { inputs, op, output });
        output
    }
}

/// A node: its operands, its operation and its result.
pub(crate) struct Node {
    pub inputs: Vec<Id>,
    pub op: Op,
    pub output: Id,
}

/// The operation of a node on each sample.
pub(crate) enum Op {
    /// A product `[rows, k] x [k, n]` with weights. It continues the sums in the second operand, if
    /// there is one.
    Matrix { rows: usize, matrix: Box<Matrix> },
    /// A product with weights of the rows that two operands make side by side. Only a GPU's layout
    /// has this.
    Joined(Box<Matrix>),
    /// A product with weights, multiplied by the second operand, value by value. Then the third is
    /// added, if there is one. Only a GPU's layout has this.
    Crossed { rows: usize, matrix: Box<Matrix> },
    /// `count` products `[m, k] x [k, n]` of two operands. The second is `[n, k]` if `transposed`.
    Products { count: usize, m: usize, k: usize, n: usize, transposed: bool },
    /// Some products of every two rows `[n, k] x [k, n]`, of which operand `i` has `rows[i]`:
    /// those at the positions `picks`. In a GPU's layout `VALUE | i` picks value `i` of the rows.
    Pairs { rows: Vec<usize>, k: usize, picks: Vec<u32> },
    /// A function of each value.
    Map(Map),
    /// A function of each pair of values.
    Zip { zip: Zip, left: Operand, right: Operand },
    /// The second operand where the first is not 0, else the third.
    Select(Box<[Operand; 3]>),
    /// Sums over the middle axis of `[outer, n, inner]`, in order, divided by `divisor`.
    Sum { outer: usize, n: usize, inner: usize, divisor: f32 },
    /// A function of the values along the middle axis of `[outer, n, inner]`.
    Fold { fold: Fold, n: usize, inner: usize },
    /// `e^x` divided by the sum of these along the middle axis of `[outer, n, inner]`.
    Softmax { n: usize, inner: usize },
    /// A recurrent network over inputs that are multiplied by their weights already.
    Recurrent(Box<Recurrent>),
    /// The operands side by side, `outer` times. Operand `i` gives `parts[i]` values each time.
    Concat { outer: usize, parts: Vec<usize> },
    /// Value `i` of the result is value `picks[i]` of the operand.
    Pick(Vec<u32>),
    /// Value `i` is value `base + positions[at]` of the data, where `picks[i]` is `[base, at]`. The
    /// last operand has the positions.
    Lookup { data: Operand, picks: Vec<[u32; 2]> },
    /// The positions of the `k` largest or smallest values along the middle axis of `[outer, n,
    /// inner]`, the best first, and the first of equal ones.
    Order { n: usize, inner: usize, k: usize, largest: bool },
    /// The operand. A sample with a value outside of the range, or NaN, gets NaN as its scores.
    Check { range: [f32; 2] },
}

/// Marks a pick of [`Op::Pairs`] that copies a value.
pub(crate) const VALUE: u32 = 1 << 31;

impl Op {
    /// Returns whether this is a product. A GPU has a kernel for each, and one for all others.
    pub fn is_product(&self) -> bool {
        let is_by_weights =
            matches!(self, Self::Matrix { .. } | Self::Joined(_) | Self::Crossed { .. });
        is_by_weights || matches!(self, Self::Products { .. } | Self::Pairs { .. })
    }

    /// Returns the multiply-adds of one sample, whose result has `width` values.
    pub fn multiply_adds(&self, width: usize) -> u64 {
        let factors = match self {
            Self::Matrix { matrix, .. } | Self::Joined(matrix) | Self::Crossed { matrix, .. } => {
                [width, matrix.k, 1]
            }
            Self::Products { k, .. } | Self::Pairs { k, .. } => [width, *k, 1],
            Self::Sum { n, .. } | Self::Fold { n, .. } => [width, *n, 1],
            Self::Recurrent(cell) => [width, cell.kind.gates(), cell.hidden],
            Self::Order { n, .. } => [width, *n, 1],
            _ => [width, 1, 1],
        };
        factors.iter().fold(1, |product, &n| product.saturating_mul(n as u64))
    }
}

/// A function of several values, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fold {
    Max,
    Min,
    Product,
}

/// One side of a `Zip`.
pub(crate) enum Operand {
    /// Operand number `input`: its values in order, or value `picks[i]` for result `i`.
    Value { input: usize, picks: Option<Vec<u32>> },
    /// Equal for every sample, as wide as the result.
    Constant(Vec<f32>),
}

impl Operand {
    /// Returns whether this is a value of the network, read in order.
    pub fn is_whole(&self) -> bool {
        matches!(self, Self::Value { picks: None, .. })
    }
}

/// The function of a recurrent network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CellKind {
    /// `h' = (1 - z) h~ + z h`, with the gates `z`, `r` and the candidate `h~`.
    Gru,
    /// `c' = f c + i c~`, `h' = o tanh(c')`, with the gates `i`, `o`, `f` and the candidate `c~`.
    Lstm,
    Tanh,
    Relu,
}

impl CellKind {
    /// Returns how many values of each step make one value of the state.
    pub fn gates(self) -> usize {
        match self {
            Self::Gru => 3,
            Self::Lstm => 4,
            Self::Tanh | Self::Relu => 1,
        }
    }
}

/// One direction of a recurrent network. The first operand is `[steps, gates * hidden]`. The result
/// is the state after each step and, if `has_last`, the last state and the last cell.
pub(crate) struct Recurrent {
    pub kind: CellKind,
    pub steps: usize,
    pub hidden: usize,
    /// Multiplies the state: `[hidden, gates * hidden]`, without the columns of `candidate`.
    pub matrix: Box<Matrix>,
    /// Multiplies the reset state of a GRU, if that is reset before its product.
    pub candidate: Option<Box<Matrix>>,
    pub backwards: bool,
    /// The operands with the first state, the first cell, and the number of steps of the sample.
    pub state: Option<usize>,
    pub cell: Option<usize>,
    pub length: Option<usize>,
    pub has_last: bool,
}

impl Recurrent {
    /// Returns the rows of the result after those of the steps.
    pub fn last_rows(kind: CellKind, has_last: bool) -> usize {
        if has_last { 1 + usize::from(kind == CellKind::Lstm) } else { 0 }
    }
}
