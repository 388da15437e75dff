//! Turns an ONNX graph into typed nodes. Every computed value belongs to one sample, and its shape
//! is known. What does not depend on the inputs is folded. A view (`Flatten`, `Reshape`, ...)
//! becomes another name of the same values. `operators.rs` translates each operator. This file runs
//! nothing.

use crate::dense::error::DenseError;
use crate::dense::graph::finite::check_scores;
use crate::dense::graph::functions::Zip;
use crate::dense::graph::onnx::{GraphProto, ModelProto, NodeProto, TensorProto};
use crate::dense::graph::tensor::{
    Batch, Data, Id, Kind, Layout, RANK_MAX, Size, Tensor, Values, product, strides,
};
use crate::dense::matrix::gemm::Matrix;
use crate::dense::matrix::tiling::padded;
use crate::dense::weights::Weights;
use std::collections::HashMap;
use std::rc::Rc;

pub(crate) use crate::dense::graph::node::{Fold, Graph, Node, Op, Operand};
pub(crate) use crate::dense::graph::stop::{Stop, limit, malformed, unsupported};

/// Floats of one sample in all results together, and entries of all index tables, at most.
pub(crate) const VALUES_MAX: usize = 1 << 24;
/// Nodes of the graph, at most. One node of a file may become several.
const STEPS_MAX: usize = 1 << 18;
/// Multiply-adds of one sample, at most. A small file could request hours of them.
pub(crate) const MULTIPLY_ADDS_MAX: u64 = 1 << 32;
/// `If` nodes within each other, at most.
const LEVELS_MAX: usize = 8;
/// Weights in all packed matrices together, padding counted, at most. Also known values.
const WEIGHTS_MAX: usize = 1 << 28;
const NOT_FINITE: &str = "a weight is not finite, or too large for its format";
/// The versions of ONNX's operators that `operators.rs` knows.
const OPSETS: std::ops::RangeInclusive<i64> = 7..=28;

/// The value whose last two axes were swapped, and their sizes after that.
pub(crate) struct Transposed {
    pub from: Id,
    pub shape: [usize; 2],
}

/// Builds a graph, node by node.
pub(crate) struct Builder<'a> {
    /// The version of ONNX's operators in the file.
    pub opset: i64,
    pub stored: HashMap<&'a str, &'a TensorProto>,
    tensors: HashMap<String, Tensor>,
    pub widths: Vec<usize>,
    nodes: Vec<Node>,
    /// Values that equal another value with its last two axes swapped.
    pub transposed: HashMap<Id, Transposed>,
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
    ) -> Result<Self, Stop> {
        let Some(graph) = &model.graph else { return Err(malformed("no graph")) };
        let opset = model.opset();
        if !OPSETS.contains(&opset) {
            return Err(Stop::Unsupported(format!("opset {opset}")));
        }

        let mut builder = Builder {
            opset,
            stored: graph.initializer.iter().map(|t| (t.name(), t)).collect(),
            tensors: HashMap::new(),
            widths: Vec::new(),
            nodes: Vec::new(),
            transposed: HashMap::new(),
            values: 0,
            packed: 0,
        };
        for (name, shape) in inputs {
            builder.stored.remove(name);
            let shape: Vec<usize> = std::iter::once(1).chain(shape.iter().copied()).collect();
            let id = builder.value(&shape)?;
            let batch = Some(Batch { axis: 0, outer: 1 });
            let data = Data::Computed(id);
            let weights = Weights::F32;
            let tensor = Tensor { kind: Kind::Float, shape, batch, data, weights };
            builder.tensors.insert((*name).to_owned(), tensor);
        }

        builder.translate(graph, 0)?;
        builder.finish(output)
    }
}

impl<'a> Builder<'a> {
    fn translate(&mut self, graph: &'a GraphProto, level: usize) -> Result<(), Stop> {
        for node in &graph.node {
            let results = match node.op_type() {
                "If" => self.branch(node, level),
                _ => self.operator(node),
            };
            let results = results.map_err(|stop| match stop {
                Stop::Unsupported(form) => Stop::Unsupported(at_node(node, &form)),
                Stop::Refused(DenseError::Unsupported(form)) if node.op_type() != "If" => {
                    limit(at_node(node, &format!("{}: {form}", node.op_type())))
                }
                refused => self.with_weight(node, refused),
            })?;
            let named = node.output.iter().filter(|name| !name.is_empty()).count();
            if named > results.len() {
                let form = format!("{} with {named} outputs", node.op_type());
                return Err(Stop::Unsupported(at_node(node, &form)));
            }
            for (name, result) in node.output.iter().zip(results) {
                if !name.is_empty() && self.tensors.insert(name.clone(), result).is_some() {
                    return Err(malformed(&format!("`{name}` is written twice")));
                }
            }
        }
        Ok(())
    }

    /// Translates the branch of an `If` that its condition, which follows from shapes, selects.
    fn branch(&mut self, node: &'a NodeProto, level: usize) -> Result<Vec<Tensor>, Stop> {
        let condition = self.input(node, 0)?;
        let condition = match condition.known_values().map(|v| &**v) {
            Some(Values::Ints(sizes)) if sizes.len() == 1 => sizes[0].constant(),
            _ => None,
        };
        let Some(condition) = condition else {
            return Err(unsupported(node, "by a condition that does not follow from shapes"));
        };
        let name = if condition != 0 { "then_branch" } else { "else_branch" };
        let branch = node.graph(name).filter(|branch| branch.output.len() == node.output.len());
        let branch = branch.ok_or_else(|| malformed(&format!("If without its {name}")))?;
        if level == LEVELS_MAX {
            return Err(unsupported(node, &format!("within {LEVELS_MAX} others")));
        }

        // A branch is a scope of its own in ONNX; here its names join those of the graph.
        let names = branch.initializer.iter().map(TensorProto::name);
        let mut names = names.chain(branch.node.iter().flat_map(|n| n.output.iter().map(|o| &**o)));
        let is_taken = |n: &&str| self.tensors.contains_key(*n) || self.stored.contains_key(n);
        if let Some(name) = names.find(|n| !n.is_empty() && is_taken(n)) {
            return Err(unsupported(node, &format!("with a branch that writes `{name}` again")));
        }
        self.stored.extend(branch.initializer.iter().map(|t| (t.name(), t)));
        self.translate(branch, level + 1)?;
        let missing = |name: &str| malformed(&format!("If: nothing writes `{name}`"));
        let outputs =
            branch.output.iter().map(|o| self.named(o.name())?.ok_or_else(|| missing(o.name())));
        outputs.collect()
    }

    /// Returns the graph, whose result is the tensor `output`.
    fn finish(mut self, output: &str) -> Result<Graph, Stop> {
        let constant = || malformed(&format!("output `{output}` does not depend on the inputs"));
        let tensor = self.named(output)?.ok_or_else(constant)?;
        let batch = tensor.batch.ok_or_else(constant)?;
        if tensor.kind != Kind::Float {
            return Err(Stop::Unsupported(format!("output `{output}` of another type than float")));
        }
        // The samples must follow each other in the output.
        if batch.outer * tensor.shape[..batch.axis].iter().product::<usize>() != 1 {
            return Err(Stop::Unsupported(format!(
                "output `{output}`, which has its samples on axis {}",
                batch.axis
            )));
        }
        let Data::Computed(output) = tensor.data else { return Err(constant()) };
        let all = self.nodes.iter().map(|node| node.op.multiply_adds(self.widths[node.output]));
        let all = all.fold(0u64, u64::saturating_add);
        if all > MULTIPLY_ADDS_MAX {
            return Err(limit(format!("{all} multiply-adds a sample, over {MULTIPLY_ADDS_MAX}")));
        }
        let mut graph = Graph { output, widths: self.widths, nodes: self.nodes };
        check_scores(&mut graph);
        Ok(graph)
    }

    /// Adds a value of this shape.
    fn value(&mut self, shape: &[usize]) -> Result<Id, Stop> {
        let width = product(shape).filter(|w| (1..VALUES_MAX).contains(w));
        let width = width.filter(|_| shape.len() <= RANK_MAX);
        let Some(width) = width else {
            return Err(limit(format!(
                "a result of shape {shape:?}, over {VALUES_MAX} values or empty"
            )));
        };
        self.spend(width)?;
        self.widths.push(width);
        Ok(self.widths.len() - 1)
    }

    /// Counts floats and index entries, of which a small file could request any number.
    pub fn spend(&mut self, values: usize) -> Result<(), Stop> {
        self.values = self.values.saturating_add(values);
        let problem = || limit(format!("over {VALUES_MAX} values a sample"));
        if self.values <= VALUES_MAX { Ok(()) } else { Err(problem()) }
    }

    /// Counts packed weights and known values, of which a small file could request any number.
    pub fn pack(&mut self, weights: usize) -> Result<(), Stop> {
        self.packed = self.packed.saturating_add(weights);
        let problem = || limit(format!("over {WEIGHTS_MAX} weights"));
        if self.packed <= WEIGHTS_MAX { Ok(()) } else { Err(problem()) }
    }

    /// Counts `n` known values of type `kind` that a node makes of others. They stay until the
    /// graph is built.
    pub fn keep(&mut self, kind: Kind, n: usize) -> Result<(), Stop> {
        let is_float = matches!(kind, Kind::Float | Kind::Half);
        let weights = if is_float { 1 } else { size_of::<Size>() / size_of::<f32>() };
        self.pack(n.saturating_mul(weights))
    }

    /// Counts `width` values that are made of `tensor`. Known values that do not become more are as
    /// many as the file has.
    pub fn count(&mut self, tensor: &Tensor, width: usize) -> Result<(), Stop> {
        match &tensor.data {
            Data::Known(values) if width <= values.len() => self.keep(tensor.kind, width),
            _ => self.spend(width),
        }
    }

    /// Adds a node whose result are floats of this shape, with the batch on this axis.
    pub fn node(
        &mut self,
        inputs: Vec<Id>,
        op: Op,
        shape: Vec<usize>,
        batch: Option<Batch>,
    ) -> Result<Tensor, Stop> {
        if self.nodes.len() == STEPS_MAX {
            return Err(limit(format!("over {STEPS_MAX} steps")));
        }
        let output = self.value(&shape)?;
        self.nodes.push(Node { inputs, op, output });
        let (data, weights) = (Data::Computed(output), Weights::F32);
        Ok(Tensor { kind: Kind::Float, shape, batch, data, weights })
    }

    /// Returns the matrix `w` `[k, n]` with `bias(column)`, packed as `weights`.
    pub fn matrix(
        &mut self,
        weights: Weights,
        [k, n]: [usize; 2],
        w: &dyn Fn(usize, usize) -> f32,
        bias: impl Fn(usize) -> f32,
    ) -> Result<Box<Matrix>, Stop> {
        if k == 0 || n == 0 {
            return Err(malformed(&format!("weights [{k}, {n}]")));
        }
        self.pack(k.saturating_mul(padded(n)))?;
        let matrix = Box::new(Matrix::pack(k, n, w, weights, bias));
        if !matrix.is_finite() {
            return Err(malformed(NOT_FINITE));
        }
        Ok(matrix)
    }

    /// Returns the error of `node` with its place, and one about a weight with that of the weight.
    fn with_weight(&mut self, node: &NodeProto, stop: Stop) -> Stop {
        match &stop {
            Stop::Refused(DenseError::Load(problem)) if problem == NOT_FINITE => {}
            // A branch of an `If` has named its own node.
            Stop::Refused(DenseError::Load(problem)) if node.op_type() != "If" => {
                return malformed(&at_node(node, problem));
            }
            _ => return stop,
        }
        for name in &node.input {
            let Ok(Some(tensor)) = self.named(name) else { continue };
            let values = tensor.known_values().and_then(|values| values.floats());
            let values = values.unwrap_or_default();
            if let Some(at) = values.iter().position(|value| !value.is_finite()) {
                let steps = strides(&tensor.shape).into_iter().zip(&tensor.shape);
                let place: Vec<usize> = steps.map(|(step, n)| at / step % n).collect();
                let problem =
                    format!("weight `{name}`: value {place:?} is {}, not finite", values[at]);
                return malformed(&at_node(node, &problem));
            }
        }
        malformed(&at_node(node, NOT_FINITE))
    }

    /// Returns the values of `tensor` at the positions of `layout`, with the shape of `layout`.
    pub fn pick(&mut self, tensor: &Tensor, layout: &Layout) -> Result<Tensor, Stop> {
        let width = product(&layout.shape).unwrap_or(usize::MAX);
        self.count(tensor, width)?;
        self.pick_all(tensor, &layout.shape, layout.batch, layout.picks())
    }

    /// Returns the values of `tensor` at `picks`, which were counted.
    pub fn pick_all(
        &mut self,
        tensor: &Tensor,
        shape: &[usize],
        batch: Option<Batch>,
        picks: Vec<u32>,
    ) -> Result<Tensor, Stop> {
        if shape.len() > RANK_MAX {
            return Err(malformed(&format!("a result of shape {shape:?}")));
        }
        let data = match &tensor.data {
            Data::Known(values) => Data::Known(Rc::new(values.pick(&picks))),
            // An empty part, which no node computes: `Concat` drops it.
            Data::Computed(_) if picks.is_empty() => {
                let is_float = matches!(tensor.kind, Kind::Float | Kind::Half);
                let none = || Values::Ints(Vec::new());
                Data::Known(Rc::new(if is_float { Values::Floats(Vec::new()) } else { none() }))
            }
            Data::Computed(id) => {
                let is_whole = picks.len() == self.widths[*id];
                if is_whole && picks.iter().enumerate().all(|(i, &p)| i == p as usize) {
                    Data::Computed(*id)
                } else {
                    self.picked(*id, picks, shape)?
                }
            }
        };
        let (kind, weights) = (tensor.kind, tensor.weights);
        Ok(Tensor { kind, shape: shape.to_vec(), batch, data, weights })
    }

    /// Adds the node that picks values of `id`. A selection of a selection is one node.
    fn picked(&mut self, id: Id, picks: Vec<u32>, shape: &[usize]) -> Result<Data, Stop> {
        let (from, picks) = match self.selection(id) {
            Some((from, first)) => (from, picks.iter().map(|&i| first[i as usize]).collect()),
            None => (id, picks),
        };
        Ok(self.node(vec![from], Op::Pick(picks), shape.to_vec(), None)?.data)
    }

    /// Returns the value of which `x` is a selection, and the table, unless `x` is narrower.
    pub fn reordered(&self, x: &Tensor) -> Option<(Id, &[u32])> {
        let Data::Computed(id) = x.data else { return None };
        self.selection(id).filter(|(from, picks)| picks.len() >= self.widths[*from])
    }

    /// Returns the value of which `id` is a selection, and the table.
    fn selection(&self, id: Id) -> Option<(Id, &[u32])> {
        // The numbers of results ascend with their nodes.
        let at = self.nodes.binary_search_by_key(&id, |n| n.output).ok()?;
        match &self.nodes[at] {
            Node { inputs, op: Op::Pick(picks), .. } => Some((inputs[0], picks)),
            _ => None,
        }
    }

    /// Adds the check that every value of `x` is in `range`. A sample in which one is not has no
    /// scores.
    pub fn check(&mut self, x: &Tensor, range: [f32; 2]) -> Result<Tensor, Stop> {
        let id = self.computed(x)?;
        let result = self.node(vec![id], Op::Check { range }, x.shape.clone(), x.batch)?;
        Ok(Tensor { kind: x.kind, ..result })
    }

    /// Returns the number of the value of `tensor`; a known tensor becomes a node.
    pub fn computed(&mut self, tensor: &Tensor) -> Result<Id, Stop> {
        let values = match &tensor.data {
            Data::Computed(id) => return Ok(*id),
            Data::Known(values) => values.floats(),
        };
        let Some(values) = values else {
            return Err(Stop::Unsupported("a constant that is not exact as f32".to_owned()));
        };
        // `x + -0` is `x` for every `x`.
        let zeros = Operand::Constant(vec![-0.0; values.len()]);
        let op = Op::Zip { zip: Zip::Add, left: Operand::Constant(values), right: zeros };
        self.spend(tensor.width())?;
        match self.node(Vec::new(), op, tensor.shape.clone(), tensor.batch)?.data {
            Data::Computed(id) => Ok(id),
            Data::Known(_) => Err(malformed("a node without a value")),
        }
    }

    /// Returns the tensor of this name; `None` if there is none.
    fn named(&mut self, name: &str) -> Result<Option<Tensor>, Stop> {
        if let Some(tensor) = self.tensors.get(name) {
            return Ok(Some(tensor.clone()));
        }
        let Some(proto) = self.stored.get(name).copied() else { return Ok(None) };
        let tensor = self.stored_tensor(proto)?;
        self.tensors.insert(name.to_owned(), tensor.clone());
        Ok(Some(tensor))
    }

    /// Returns input `i` of `node`; `None` if the node does not have that input.
    pub fn maybe(&mut self, node: &NodeProto, i: usize) -> Result<Option<Tensor>, Stop> {
        match node.input.get(i).filter(|name| !name.is_empty()) {
            None => Ok(None),
            Some(name) => match self.named(name)? {
                Some(tensor) => Ok(Some(tensor)),
                None => Err(malformed(&format!(
                    "{} reads `{name}`, which nothing writes",
                    node.op_type()
                ))),
            },
        }
    }

    /// Returns input `i` of `node`, which the operator must have.
    pub fn input(&mut self, node: &NodeProto, i: usize) -> Result<Tensor, Stop> {
        self.maybe(node, i)?
            .ok_or_else(|| malformed(&format!("{} has no input {i}", node.op_type())))
    }
}

/// Returns the reason with the node that it is about.
pub(crate) fn at_node(node: &NodeProto, form: &str) -> String {
    let at = match node.name() {
        "" => form.to_owned(),
        name => format!("{form}, node `{name}`"),
    };
    match node.source() {
        Some(line) => format!("{at}, from the line `{line}`"),
        None => at,
    }
}

/// Returns known values of a tensor that was folded.
pub(crate) fn folded(kind: Kind, shape: Vec<usize>, batch: Option<Batch>, v: Values) -> Tensor {
    Tensor { kind, shape, batch, data: Data::Known(Rc::new(v)), weights: Weights::F32 }
}
