//! From an ONNX graph to typed nodes: every value `[batch, ...]` with its shape known but for the
//! batch, shape arithmetic and constants folded away, views (`Flatten`, `Reshape`, ...) turned into
//! other names for the same values. Never runs anything. What each operator becomes is in
//! `operators.rs`.

use super::gemm::{Matrix, padded};
use super::onnx::{GraphProto, ModelProto, NodeProto};
use super::{DenseError, Weights};
use std::collections::HashMap;
use std::rc::Rc;

/// Values of one sample in all results together, and entries of all index tables.
const VALUES_MAX: usize = 1 << 24;
/// Weights in all packed matrices together, padding counted.
const WEIGHTS_MAX: usize = 1 << 28;

/// A value computed for each sample; its number in `Graph::widths`.
pub(crate) type Id = usize;

/// A node: operands, what is done, and the result.
pub(crate) struct Node {
    pub inputs: Vec<Id>,
    pub op: Op,
    pub output: Id,
}

/// What a node does to each sample.
pub(crate) enum Op {
    /// `[rows, k] x` weights `[k, n]`.
    Matrix { rows: usize, matrix: Box<Matrix> },
    /// `count` products `[m, k] x [k, n]`; the second operand is `[n, k]` if `transposed`.
    Products { count: usize, m: usize, k: usize, n: usize, transposed: bool },
    /// A function of each value.
    Map(Map),
    /// A function of two values each.
    Zip { zip: Zip, left: Operand, right: Operand },
    /// Sums over the middle of `[outer, n, inner]`, in order, divided by `divisor`.
    Sum { outer: usize, n: usize, inner: usize, divisor: f32 },
    /// Side by side, `outer` times: operand `i` gives `parts[i]` values a time.
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
    /// Operand number `input`; each value used in order, or value `picks[i]` for result `i`.
    Value { input: usize, picks: Option<Vec<u32>> },
    /// The same for every sample, as wide as the result.
    Constant(Vec<f32>),
}

/// A whole network. The first values are its inputs, in the caller's order.
pub(crate) struct Graph {
    /// Values a sample.
    pub widths: Vec<usize>,
    pub nodes: Vec<Node>,
    pub output: Id,
}

/// Why there is no plan.
pub(crate) enum Stop {
    /// An operator, or a form of one, that only the fallback may know.
    Unsupported(String),
    /// Nothing can use this file.
    Refused(DenseError),
}

impl From<DenseError> for Stop {
    fn from(e: DenseError) -> Self {
        Self::Refused(e)
    }
}

/// A size in shape arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    Batch,
    Fixed(i64),
}

/// What a name stands for.
#[derive(Clone)]
pub(crate) enum Known {
    /// Computed for each sample; the shape is that of one sample.
    Value(Id, Vec<usize>),
    /// The same for every request.
    Constant(Rc<Constant>),
    /// Integers: axes, indices, shapes.
    Sizes { sizes: Rc<[Size]>, scalar: bool },
}

/// A tensor of floats.
pub(crate) struct Constant {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// Reads a graph node by node.
pub(crate) struct Builder {
    pub weights: Weights,
    known: HashMap<String, Known>,
    widths: Vec<usize>,
    nodes: Vec<Node>,
    /// Values that are another one with its last two axes swapped.
    pub transposed: HashMap<Id, Id>,
    values: usize,
    packed: usize,
}

impl Graph {
    /// Builds the graph of `model`; `inputs` are the names and shapes of one sample, in the
    /// caller's order.
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

    /// A new value of this shape.
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

    /// Counts memory that a small file could ask for again and again.
    pub fn spend(&mut self, values: usize) -> Result<(), Stop> {
        self.values += values;
        let problem = || malformed(&format!("over {VALUES_MAX} values a sample"));
        if self.values <= VALUES_MAX { Ok(()) } else { Err(problem()) }
    }

    /// The same of weights.
    pub fn pack(&mut self, weights: usize) -> Result<(), Stop> {
        self.packed = self.packed.saturating_add(weights);
        let problem = || malformed(&format!("over {WEIGHTS_MAX} weights"));
        if self.packed <= WEIGHTS_MAX { Ok(()) } else { Err(problem()) }
    }

    /// A new node; its result has this shape.
    pub fn node(&mut self, inputs: Vec<Id>, op: Op, shape: Vec<usize>) -> Result<Known, Stop> {
        let output = self.value(&shape)?;
        self.nodes.push(Node { inputs, op, output });
        Ok(Known::Value(output, shape))
    }

    /// A product by weights `w(k, n)`.
    pub fn matrix(
        &mut self,
        (x, shape): (Id, Vec<usize>),
        n: usize,
        w: &dyn Fn(usize, usize) -> f32,
        bias: impl Fn(usize) -> f32,
    ) -> Result<Known, Stop> {
        let (k, mut out) = (shape[shape.len() - 1], shape);
        self.pack(k.saturating_mul(padded(n)))?;
        out.pop();
        let rows = out.iter().product();
        out.push(n);
        let matrix = Box::new(Matrix::pack((k, n), w, self.weights, bias));
        if !matrix.is_finite() {
            return Err(malformed("a weight is not finite, or too large for its format"));
        }
        self.node(vec![x], Op::Matrix { rows, matrix }, out)
    }

    /// What input `i` of `node` stands for; `None` where it was left out.
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

    /// The same for an input that the operator must have.
    pub fn input(&self, node: &NodeProto, i: usize) -> Result<Known, Stop> {
        self.maybe(node, i)?
            .ok_or_else(|| malformed(&format!("{} has no input {i}", node.op_type())))
    }
}

/// What a tensor of the file stands for.
pub(crate) fn constant(tensor: &super::onnx::TensorProto) -> Result<Known, Stop> {
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

/// A file that contradicts itself.
pub(crate) fn malformed(problem: &str) -> Stop {
    Stop::Refused(DenseError::Load(problem.to_owned()))
}
