//! Bounds of a network that rten runs. rten allocates and computes whatever a file asks for, in a
//! load and in each run. Before rten sees a file, this pass finds how many values all results have
//! together, at most, and how many multiply-adds a sample takes. An operator without a rule in
//! `bound_rules.rs` is refused by name, and so is a shape that the inputs' shapes do not bound. An
//! `If` whose condition follows from shapes gives way to its branch. This file runs nothing.

use crate::dense::error::DenseError;
use crate::dense::graph::folding::zip_sizes;
use crate::dense::graph::functions::Zip;
use crate::dense::graph::onnx::{GraphProto, ModelProto, NodeProto, TensorProto};
use crate::dense::graph::onnx_graph::{MULTIPLY_ADDS_MAX, VALUES_MAX, at_node};
use crate::dense::graph::stop::{Stop, malformed, unsupported};
use crate::dense::graph::tensor::{Kind, RANK_MAX, Size, Values};
use std::collections::{HashMap, HashSet};

/// Integers of a list that the pass follows: sizes, axes and positions.
pub(super) const KNOWN_MAX: usize = 256;
/// Operators that rten runs in place if no other node reads their operand.
const IN_PLACE: &[&str] = &["Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"];
/// Nodes that depend on each other in a row. rten's planner calls itself for each.
const DEPTH_MAX: usize = 1 << 11;
/// `If` nodes within each other.
const LEVELS_MAX: usize = 8;
/// rten computes integers as i32. What leaves that range for a batch of this size is not followed.
const BATCH_MAX: i64 = 1 << 16;

/// The size of an axis.
#[derive(Clone, Copy)]
pub(super) struct Dim {
    /// The largest size. It is not negative for any batch.
    pub most: Size,
    /// Whether the axis always has that size.
    pub exact: bool,
}

/// What is known of a tensor before it exists.
#[derive(Clone, Default)]
pub(super) struct Bound {
    pub dims: Vec<Dim>,
    /// The integers in it, in order, as far as they are known; `None` for many, and for floats.
    pub values: Option<Vec<Option<Size>>>,
    /// Nodes that the tensor needs in a row.
    pub depth: usize,
}

/// The bounds of a network.
pub(crate) struct Bounded {
    /// Values that a run holds at once, at most: all results but those that take the place of
    /// their operand.
    pub held: Size,
    /// The network with each `If` replaced by its branch; `None` for a network without one.
    pub without_branches: Option<ModelProto>,
}

/// Walks through the nodes in their order.
#[derive(Default)]
pub(super) struct Bounds {
    pub opset: i64,
    tensors: HashMap<String, Bound>,
    /// The nodes without branches; empty for a network without an `If`.
    nodes: Vec<NodeProto>,
    has_branches: bool,
    stored: Vec<TensorProto>,
    values: Size,
    /// Values of results that take the place of their operand.
    in_place: Size,
    /// How often a node or the caller reads each tensor.
    reads: HashMap<String, usize>,
    /// Tensors that a run makes.
    made: HashSet<String>,
    pub multiply_adds: u64,
}

/// Returns the bounds of `model`. `inputs` are the names and shapes of one sample of each input.
///
/// # Errors
/// [`DenseError::Unsupported`] names the node, the operator and the limit; [`DenseError::Load`] if
/// the file contradicts itself.
pub(crate) fn bound(
    model: &ModelProto,
    inputs: &[(&str, Vec<usize>)],
) -> Result<Bounded, DenseError> {
    let graph = model.graph.as_ref().ok_or_else(|| DenseError::Load("no graph".to_owned()))?;
    let has_branches = graph.node.iter().any(|node| node.op_type() == "If");
    let mut bounds = Bounds { opset: model.opset(), has_branches, ..Bounds::default() };
    let in_error = |stop| match stop {
        Stop::Unsupported(form) => DenseError::Unsupported(form),
        Stop::Refused(e) => e,
    };
    for (name, shape) in inputs {
        let batch = Dim::of(Size { fixed: 0, batches: 1 });
        let dims = std::iter::once(batch).chain(shape.iter().map(|&n| Dim::fixed(n))).collect();
        bounds.tensors.insert((*name).to_owned(), Bound { dims, ..Bound::default() });
    }
    bounds.count_reads(graph);
    bounds.add_stored(graph).map_err(in_error)?;
    bounds.walk(&graph.node, 0).map_err(in_error)?;

    let without_branches = has_branches.then(|| {
        let mut flat = graph.clone();
        flat.node = bounds.nodes;
        flat.initializer.append(&mut bounds.stored);
        ModelProto { graph: Some(flat), ..model.clone() }
    });
    let held = zip_sizes(Zip::Sub, [bounds.values, bounds.in_place]).unwrap_or(bounds.values);
    Ok(Bounded { held, without_branches })
}

impl Dim {
    pub fn fixed(n: usize) -> Self {
        Self { most: Size::fixed(i64::try_from(n).unwrap_or(i64::MAX)), exact: true }
    }

    /// Returns the axis that has `size`, and no values where that is negative.
    pub fn of(size: Size) -> Self {
        let Size { fixed, batches } = size;
        if batches >= 0 && fixed.saturating_add(batches) >= 0 {
            Self { most: size, exact: true }
        } else {
            let least = fixed.saturating_add(batches.min(0)).max(0);
            Self { most: Size { fixed: least, batches: batches.max(0) }, exact: false }
        }
    }

    pub fn at_most(self) -> Self {
        Self { exact: false, ..self }
    }

    pub fn is(self, n: i64) -> bool {
        self.exact && self.most == Size::fixed(n)
    }

    /// Returns the size if no batch changes it.
    pub fn constant(self) -> Option<i64> {
        self.most.constant().filter(|_| self.exact)
    }

    /// Returns the axis to which two axes broadcast.
    pub fn broadcast(self, other: Self) -> Self {
        let (a, b) = (self.most, other.most);
        match (self.is(1), other.is(1)) {
            (true, _) => other,
            (_, true) => self,
            _ if a == b => Self { most: a, exact: self.exact || other.exact },
            _ => {
                let (fixed, batches) = (a.fixed.max(b.fixed), a.batches.max(b.batches));
                Self { most: Size { fixed, batches }, exact: false }
            }
        }
    }
}

impl Bound {
    pub fn of(dims: Vec<Dim>) -> Self {
        Self { dims, ..Self::default() }
    }

    /// Returns a tensor whose integers may be known.
    pub fn with(dims: Vec<Dim>, values: Option<Vec<Option<Size>>>) -> Self {
        match values {
            Some(values) => Self::known(dims, values),
            None => Self::of(dims),
        }
    }

    /// Returns a list of integers.
    pub fn list(values: Vec<Option<Size>>) -> Self {
        Self::known(vec![Dim::fixed(values.len())], values)
    }

    /// Returns a tensor of integers. The pass follows them if their number does not change.
    pub fn known(dims: Vec<Dim>, values: Vec<Option<Size>>) -> Self {
        // Rules that move values walk the other axes of an empty tensor too.
        let lanes = lanes(&dims).and_then(Size::constant);
        let is_whole = dims.iter().all(|dim| dim.exact)
            && elements(&dims) == Some(Size::fixed(values.len() as i64))
            && lanes.is_some_and(|n| n <= KNOWN_MAX as i64);
        if !is_whole {
            return Self::of(dims);
        }
        let kept = values.into_iter().map(|value| value.filter(in_range)).collect();
        Self { dims, values: Some(kept), depth: 0 }
    }

    pub fn stored(tensor: &TensorProto) -> Self {
        let dims = tensor.sizes().into_iter().map(Dim::fixed).collect::<Vec<_>>();
        let count: usize = tensor.sizes().iter().product();
        let is_int = matches!(tensor.kind(), Some(Kind::Int64 | Kind::Int32 | Kind::Bool));
        if !is_int || count > KNOWN_MAX {
            return Self::of(dims);
        }
        let Some(Values::Ints(all)) = tensor.values() else { return Self::of(dims) };
        // A bound such as the largest i64 means "to the end", and rten clips it.
        let clip = |size: Size| {
            Some(Size::fixed(size.fixed.clamp(i64::from(i32::MIN), i64::from(i32::MAX))))
        };
        Self::known(dims, all.into_iter().map(clip).collect())
    }
}

/// Returns the number of values of a tensor; `None` if two axes grow with the batch, or beyond i64.
pub(super) fn elements(dims: &[Dim]) -> Option<Size> {
    dims.iter().try_fold(Size::fixed(1), |n, dim| zip_sizes(Zip::Mul, [n, dim.most]))
}

/// Returns the number of values of a tensor as if no axis was empty; `None` as for [`elements`].
/// rten walks the other axes of an empty tensor, and allocates by them.
fn lanes(dims: &[Dim]) -> Option<Size> {
    let is_empty = |dim: &&Dim| dim.most == Size::fixed(0);
    elements(&dims.iter().filter(|dim| !is_empty(dim)).copied().collect::<Vec<_>>())
}

/// Returns whether `size` is an i32 for every batch.
pub(super) fn in_range(size: &Size) -> bool {
    let most = size.batches.saturating_mul(BATCH_MAX).saturating_add(size.fixed);
    [size.fixed, most].iter().all(|&n| i32::try_from(n).is_ok())
}

/// Returns the number for one sample, at most.
pub(super) fn for_a_sample(size: Size) -> u64 {
    u64::try_from(size.fixed.max(0).saturating_add(size.batches)).unwrap_or(0)
}

impl Bounds {
    /// Adds a tensor. Of two with one name, rten might take the other one.
    fn add(&mut self, name: &str, bound: Bound) -> Result<(), Stop> {
        match self.tensors.insert(name.to_owned(), bound) {
            Some(_) if !name.is_empty() => Err(malformed(&format!("`{name}` is written twice"))),
            _ => Ok(()),
        }
    }

    fn add_stored(&mut self, graph: &GraphProto) -> Result<(), Stop> {
        graph.initializer.iter().try_for_each(|t| self.add(t.name(), Bound::stored(t)))
    }

    /// Counts the reads of `graph`, those of graphs inside it too.
    fn count_reads(&mut self, graph: &GraphProto) {
        let outputs = graph.output.iter().map(|output| output.name());
        let inputs = graph.node.iter().flat_map(|node| node.input.iter().map(String::as_str));
        for name in outputs.chain(inputs) {
            *self.reads.entry(name.to_owned()).or_default() += 1;
        }
        let attributes = graph.node.iter().flat_map(|node| &node.attribute);
        attributes.filter_map(|a| a.g.as_deref()).for_each(|inner| self.count_reads(inner));
    }

    /// Returns whether the result of `node` takes the place of its operand.
    fn is_in_place(&self, node: &NodeProto) -> bool {
        // rten copies what the file stores and what the caller feeds.
        let is_free = |name: &String| self.made.contains(name) && self.reads.get(name) == Some(&1);
        IN_PLACE.contains(&node.op_type()) && node.input.first().is_some_and(is_free)
    }

    fn walk(&mut self, nodes: &[NodeProto], level: usize) -> Result<(), Stop> {
        for node in nodes {
            let at = |stop| match stop {
                Stop::Unsupported(form) => Stop::Unsupported(at_node(node, &form)),
                refused => refused,
            };
            if node.op_type() == "If" {
                self.branch(node, level).map_err(at)?;
            } else {
                self.node(node).map_err(at)?;
                self.nodes.extend(self.has_branches.then(|| node.clone()));
            }
        }
        Ok(())
    }

    /// Takes the branch of an `If` whose condition is known, in place of the node.
    fn branch(&mut self, node: &NodeProto, level: usize) -> Result<(), Stop> {
        let condition = self.input(node, 0)?.values.and_then(|values| match values.as_slice() {
            [Some(one)] => one.constant(),
            _ => None,
        });
        let Some(condition) = condition else {
            return Err(unsupported(node, "by a condition that does not follow from shapes"));
        };
        let name = if condition != 0 { "then_branch" } else { "else_branch" };
        let branch = node.graph(name).filter(|branch| branch.output.len() == node.output.len());
        let Some(branch) = branch else {
            return Err(malformed(&format!("If, node `{}`, without its {name}", node.name())));
        };
        if level == LEVELS_MAX {
            return Err(unsupported(node, &format!("within {LEVELS_MAX} others")));
        }

        // Branches are scopes of their own in ONNX, and one scope without branches.
        let stored = branch.initializer.iter().map(TensorProto::name);
        let mut names =
            stored.chain(branch.node.iter().flat_map(|n| n.output.iter().map(|o| &**o)));
        if let Some(name) = names.find(|n| !n.is_empty() && self.tensors.contains_key(*n)) {
            return Err(unsupported(node, &format!("with a branch that writes `{name}` again")));
        }

        self.add_stored(branch)?;
        self.stored.extend(branch.initializer.iter().cloned());
        self.walk(&branch.node, level + 1)?;
        for (from, to) in branch.output.iter().zip(&node.output) {
            let identity = NodeProto {
                input: vec![from.name().to_owned()],
                output: vec![to.clone()],
                op_type: Some("Identity".to_owned()),
                name: node.name.clone(),
                ..NodeProto::default()
            };
            self.node(&identity)?;
            self.nodes.push(identity);
        }
        Ok(())
    }

    fn node(&mut self, node: &NodeProto) -> Result<(), Stop> {
        if !matches!(node.domain(), "" | "ai.onnx") {
            return Err(Stop::Unsupported(format!("{}.{}", node.domain(), node.op_type())));
        }
        if node.attribute.iter().any(|attribute| attribute.g.is_some()) {
            return Err(unsupported(node, "with a graph of its own"));
        }
        let mut depth = 1;
        for i in 0..node.input.len() {
            let Some(input) = self.maybe(node, i)? else { continue };
            depth = depth.max(input.depth + 1);
            self.multiply(lanes(&input.dims).map_or(u64::MAX, for_a_sample));
        }
        if depth > DEPTH_MAX {
            return Err(unsupported(node, &format!("after over {DEPTH_MAX} nodes in a row")));
        }

        let results = self.results(node)?;
        let named = node.output.iter().filter(|name| !name.is_empty()).count();
        if named > results.len() {
            return Err(unsupported(node, &format!("with {named} outputs")));
        }
        let is_stored = node.op_type() == "Constant";
        let is_in_place = self.is_in_place(node);
        for (name, result) in node.output.iter().zip(results) {
            if !is_stored {
                let before = self.values;
                self.spend(node, &result.dims)?;
                self.made.insert(name.clone());
                if is_in_place {
                    let size = zip_sizes(Zip::Sub, [self.values, before]);
                    let sum = size.and_then(|size| zip_sizes(Zip::Add, [self.in_place, size]));
                    self.in_place = sum.unwrap_or(self.in_place);
                }
            }
            self.add(name, Bound { depth, ..result })?;
        }
        if self.multiply_adds > MULTIPLY_ADDS_MAX {
            let form = format!("with over {MULTIPLY_ADDS_MAX} multiply-adds a sample until here");
            return Err(unsupported(node, &form));
        }
        Ok(())
    }

    /// Counts the values of a tensor that rten makes.
    pub fn spend(&mut self, node: &NodeProto, dims: &[Dim]) -> Result<(), Stop> {
        let over = |limit: &str| {
            let sizes: Vec<String> = dims.iter().map(|dim| dim.most.to_string()).collect();
            unsupported(node, &format!("with a result [{}], {limit}", sizes.join(", ")))
        };
        let size = lanes(dims).filter(|_| dims.len() <= RANK_MAX);
        let size = size.ok_or_else(|| over("which no number of values a sample bounds"))?;
        let sum = zip_sizes(Zip::Add, [self.values, size]).unwrap_or(Size::fixed(i64::MAX));
        if for_a_sample(sum) > VALUES_MAX as u64 {
            return Err(over(&format!("with over {VALUES_MAX} values a sample until here")));
        }
        self.values = sum;
        self.multiply(for_a_sample(size));
        Ok(())
    }

    pub fn multiply(&mut self, multiply_adds: u64) {
        self.multiply_adds = self.multiply_adds.saturating_add(multiply_adds);
    }

    /// Returns input `i` of `node`; `None` if the node does not have that input.
    pub fn maybe(&self, node: &NodeProto, i: usize) -> Result<Option<Bound>, Stop> {
        match node.input.get(i).filter(|name| !name.is_empty()) {
            None => Ok(None),
            Some(name) => match self.tensors.get(name) {
                Some(bound) => Ok(Some(bound.clone())),
                None => Err(malformed(&format!(
                    "{} reads `{name}`, which nothing writes",
                    node.op_type()
                ))),
            },
        }
    }

    /// Returns input `i` of `node`, which the operator must have.
    pub fn input(&self, node: &NodeProto, i: usize) -> Result<Bound, Stop> {
        let missing = || malformed(&format!("{} has no input {i}", node.op_type()));
        self.maybe(node, i)?.ok_or_else(missing)
    }

    /// Returns the integers of input `i` or, in older files, of attribute `name`.
    pub fn sizes(&self, node: &NodeProto, i: usize, name: &str) -> Result<Option<Vec<Size>>, Stop> {
        let input = self.maybe(node, i)?;
        if let Some(ints) = node.ints(name) {
            // rten would take one of them.
            return match input {
                Some(_) => Err(unsupported(node, &format!("with {name} as attribute and input"))),
                None => Ok(Some(ints.iter().map(|&n| Size::fixed(n)).collect())),
            };
        }
        let Some(input) = input else { return Ok(None) };
        let values = input.values.map(|values| values.into_iter().collect::<Option<Vec<_>>>());
        let unknown = || unsupported(node, "by integers that do not follow from shapes");
        values.flatten().map(Some).ok_or_else(unknown)
    }

    /// Returns the integers of [`Bounds::sizes`], which no batch may change.
    pub fn integers(
        &self,
        node: &NodeProto,
        i: usize,
        name: &str,
    ) -> Result<Option<Vec<i64>>, Stop> {
        let Some(sizes) = self.sizes(node, i, name)? else { return Ok(None) };
        let fixed = sizes.iter().map(|size| size.constant()).collect::<Option<Vec<_>>>();
        fixed.map(Some).ok_or_else(|| unsupported(node, "by the batch"))
    }
}
