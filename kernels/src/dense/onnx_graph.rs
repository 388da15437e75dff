//! Turns an ONNX graph into typed nodes. Every value is `[batch, ...]`, and its shape is known but
//! for the batch. Shape arithmetic and constants are folded. A view (`Flatten`, `Reshape`, ...)
//! becomes another name of the same values. `operators.rs` translates each operator. This file runs
//! nothing.

use crate::dense::error::DenseError;
use crate::dense::gemm::Matrix;
use crate::dense::onnx::{GraphProto, ModelProto, NodeProto, TensorProto};
use crate::dense::tiling::padded;
use crate::dense::weights::Weights;
use std::collections::HashMap;
use std::rc::Rc;

/// Floats of one sample in all results together, and entries of all index tables, at most.
const VALUES_MAX: usize = 1 << 24;
/// Weights in all packed matrices together, padding counted, at most.
const WEIGHTS_MAX: usize = 1 << 28;

/// The number of a value that is computed for each sample, in `Graph::widths`.
pub(crate) type Id = usize;

/// A node: its operands, its operation and its result.
pub(crate) struct Node {
    pub inputs: Vec<Id>,
    pub op: Op,
    pub output: Id,
}

/// The operation of a node on each sample.
pub(crate) enum Op {
    /// A product `[rows, k] x [k, n]` with weights.
    Matrix { rows: usize, matrix: Box<Matrix> },
    /// `count` products `[m, k] x [k, n]` of two operands. The second is `[n, k]` if `transposed`.
    Products { count: usize, m: usize, k: usize, n: usize, transposed: bool },
    /// The products of every two rows `[n, k] x [k, n]`, of which operand `i` has `rows[i]`. Only
    /// the CPU's layout has this.
    Pairs { rows: Vec<usize>, k: usize },
    /// A function of each value.
    Map(Map),
    /// A function of each pair of values.
    Zip { zip: Zip, left: Operand, right: Operand },
    /// Sums over the middle axis of `[outer, n, inner]`, in order, divided by `divisor`.
    Sum { outer: usize, n: usize, inner: usize, divisor: f32 },
    /// The operands side by side, `outer` times. Operand `i` gives `parts[i]` values each time.
    Concat { outer: usize, parts: Vec<usize> },
    /// Value `i` of the result is value `picks[i]` of the operand.
    Pick(Vec<u32>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Map {
    Relu,
    Sigmoid,
    Tanh,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zip {
    Add,
    Sub,
    Mul,
    Div,
}

/// One side of a `Zip`.
pub(crate) enum Operand {
    /// Operand number `input`: its values in order, or value `picks[i]` for result `i`.
    Value { input: usize, picks: Option<Vec<u32>> },
    /// Equal for every sample, as wide as the result.
    Constant(Vec<f32>),
}

/// The nodes of a network in the order of execution. The first values are its inputs, in the
/// caller's order.
pub(crate) struct Graph {
    /// The number of floats in one sample of each value.
    pub widths: Vec<usize>,
    pub nodes: Vec<Node>,
    pub output: Id,
}

/// Why a graph cannot be built.
pub(crate) enum Stop {
    /// The graph has this operator, or form of an operator, which perhaps the fallback supports.
    Unsupported(String),
    /// The file is invalid, for the fallback too.
    Refused(DenseError),
}

impl From<DenseError> for Stop {
    fn from(e: DenseError) -> Self {
        Self::Refused(e)
    }
}

/// The size of an axis in shape arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    Batch,
    Fixed(i64),
}

/// What a name of the file refers to.
#[derive(Clone)]
pub(crate) enum Known {
    /// A value that is computed for each sample, with the shape of one sample.
    Value(Id, Vec<usize>),
    /// A tensor that is equal for every request.
    Constant(Rc<Constant>),
    /// Integers: axes, indices or shapes.
    Sizes { sizes: Rc<[Size]>, scalar: bool },
}

/// A tensor of floats.
pub(crate) struct Constant {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// Builds a graph, node by node.
pub(crate) struct Builder {
    pub weights: Weights,
    known: HashMap<String, Known>,
    widths: Vec<usize>,
    nodes: Vec<Node>,
    /// Values that equal another value with its last two axes swapped, and that other value.
    pub transposed: HashMap<Id, Id>,
    values: usize,
    packed: usize,
}

impl Graph {
    /// Builds the graph of `model`. `inputs` are the names and shapes of one sample of each input,
    /// in the caller's order.
    pub fn build(
        model: &ModelProto,
        inputs: &[(&str, Vec<usize>)],
        output: &str,
        weights: Weights,
    ) -> Result<Self, Stop> {
        let Some(graph) = &model.graph else { return Err(malformed("no graph")) };
        let mut builder = Builder {
            weights,
            known: HashMap::new(),
            widths: Vec::new(),
            nodes: Vec::new(),
            transposed: HashMap::new(),
            values: 0,
            packed: 0,
        };

        for (name, shape) in inputs {
            let id = builder.value(shape)?;
            builder.known.insert((*name).to_owned(), Known::Value(id, shape.clone()));
        }
        builder.read_initializers(graph)?;

        for node in &graph.node {
            if !matches!(node.domain(), "" | "ai.onnx") {
                return Err(Stop::Unsupported(format!("{}.{}", node.domain(), node.op_type())));
            }
            let results = builder.operator(node)?;
            for (name, result) in node.output.iter().zip(results) {
                builder.known.insert(name.clone(), result);
            }
        }

        match builder.known.get(output) {
            Some(Known::Value(id, _)) => {
                Ok(Self { output: *id, widths: builder.widths, nodes: builder.nodes })
            }
            _ => Err(malformed(&format!("output `{output}` does not depend on the inputs"))),
        }
    }
}

impl Builder {
    fn read_initializers(&mut self, graph: &GraphProto) -> Result<(), Stop> {
        for tensor in &graph.initializer {
            self.known.insert(tensor.name().to_owned(), constant(tensor)?);
        }
        Ok(())
    }

    /// Adds a value of this shape.
    pub fn value(&mut self, shape: &[usize]) -> Result<Id, Stop> {
        let width = shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        let width = width.filter(|w| (1..VALUES_MAX).contains(w));
        let Some(width) = width else {
            return Err(malformed(&format!("a result of shape {shape:?}")));
        };
        self.spend(width)?;
        self.widths.push(width);
        Ok(self.widths.len() - 1)
    }

    /// Counts floats and index entries, of which a small file could request any number.
    pub fn spend(&mut self, values: usize) -> Result<(), Stop> {
        self.values += values;
        let problem = || malformed(&format!("over {VALUES_MAX} values a sample"));
        if self.values <= VALUES_MAX { Ok(()) } else { Err(problem()) }
    }

    /// Counts packed weights, of which a small file could request any number.
    pub fn pack(&mut self, weights: usize) -> Result<(), Stop> {
        self.packed = self.packed.saturating_add(weights);
        let problem = || malformed(&format!("over {WEIGHTS_MAX} weights"));
        if self.packed <= WEIGHTS_MAX { Ok(()) } else { Err(problem()) }
    }

    /// Adds a node whose result has this shape.
    pub fn node(&mut self, inputs: Vec<Id>, op: Op, shape: Vec<usize>) -> Result<Known, Stop> {
        let output = self.value(&shape)?;
        self.nodes.push(Node { inputs, op, output });
        Ok(Known::Value(output, shape))
    }

    /// Adds the product of `x`, of this shape, and weights `w(row, column)` with `n` columns.
    pub fn matrix(
        &mut self,
        x: Id,
        shape: Vec<usize>,
        n: usize,
        w: &dyn Fn(usize, usize) -> f32,
        bias: impl Fn(usize) -> f32,
    ) -> Result<Known, Stop> {
        let (k, mut out) = (shape[shape.len() - 1], shape);
        self.pack(k.saturating_mul(padded(n)))?;
        out.pop();
        let rows = out.iter().product();
        out.push(n);

        let matrix = Box::new(Matrix::pack(k, n, w, self.weights, bias));
        if !matrix.is_finite() {
            return Err(malformed("a weight is not finite, or too large for its format"));
        }
        self.node(vec![x], Op::Matrix { rows, matrix }, out)
    }

    /// Returns what input `i` of `node` refers to; `None` if the node does not have that input.
    pub fn maybe(&self, node: &NodeProto, i: usize) -> Result<Option<Known>, Stop> {
        match node.input.get(i).filter(|name| !name.is_empty()) {
            None => Ok(None),
            Some(name) => match self.known.get(name) {
                Some(known) => Ok(Some(known.clone())),
                None => Err(malformed(&format!(
                    "{} reads `{name}`, which nothing writes",
                    node.op_type()
                ))),
            },
        }
    }

    /// Returns what input `i` of `node` refers to, which the operator must have.
    pub fn input(&self, node: &NodeProto, i: usize) -> Result<Known, Stop> {
        self.maybe(node, i)?
            .ok_or_else(|| malformed(&format!("{} has no input {i}", node.op_type())))
    }
}

/// Returns what a tensor of the file is to the network.
pub(crate) fn constant(tensor: &TensorProto) -> Result<Known, Stop> {
    if let Some(values) = tensor.floats() {
        if values.iter().any(|v| !v.is_finite()) {
            return Err(malformed(&format!(
                "tensor `{}` has values that are not finite",
                tensor.name()
            )));
        }
        return Ok(Known::Constant(Rc::new(Constant { shape: tensor.sizes(), values })));
    }

    match tensor.ints() {
        Some(ints) if tensor.dims.len() <= 1 => Ok(Known::Sizes {
            sizes: ints.into_iter().map(Size::Fixed).collect(),
            scalar: tensor.dims.is_empty(),
        }),
        _ => Err(Stop::Unsupported(format!(
            "tensor `{}` of type {}",
            tensor.name(),
            tensor.data_type()
        ))),
    }
}

/// Returns the error of a file that contradicts itself.
pub(crate) fn malformed(problem: &str) -> Stop {
    Stop::Refused(DenseError::Load(problem.to_owned()))
}
