//! The layout of a network: its nodes in the order of execution, and a buffer for every result. A
//! bias and a Relu that follow a product are fused into the product. Results that are never live
//! together share a buffer. The CPU (`plan.rs`) and the GPU (`gpu/dense_plan.rs`) run the same
//! nodes. This file knows no ONNX and runs nothing.

use crate::dense::graph::functions::{Map, Zip};
use crate::dense::graph::node::{Node, Op, Operand, VALUE};
use crate::dense::graph::onnx_graph::Graph;
use crate::dense::graph::tensor::Id;
use crate::dense::matrix::pairs::pair;
use crate::dense::run::moves::Pattern;
use crate::dense::run::sharing::{self, InputPart};
use std::collections::{HashMap, HashSet};

/// The location of a value: an input of the network or a buffer, by its number.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Input(usize),
    Buffer(usize),
}

/// A network whose values have their locations.
pub(crate) struct Layout {
    pub nodes: Vec<Node>,
    /// The number of floats in one sample of each value.
    pub widths: Vec<usize>,
    pub places: Vec<Place>,
    /// The number of floats that one sample takes in each buffer.
    pub buffers: Vec<usize>,
    pub output: Id,
    /// Whether all samples of a request have the same value; a buffer has values of one kind.
    pub shared: Vec<bool>,
    pub shared_buffers: Vec<bool>,
    /// The first nodes that run before anything is looked up.
    pub early: usize,
}

/// Which inputs a GPU's layout has, and what its kernels can do.
pub(crate) struct GpuLayout<'a> {
    /// What is fed, one part for each input.
    pub parts: &'a [InputPart],
    /// The inputs that the host fills. Lookups fill the others.
    pub fed: &'a [usize],
    /// Whether our kernels compute the products by weights: these take two operands side by side,
    /// and end with functions of two values.
    pub own_products: bool,
    /// Values of a sample in a node that shares its launch with nodes of other widths, at most.
    pub narrow: usize,
    /// Returns whether one kernel takes pairs of this many operands, rows and columns.
    pub fits_pairs: fn(usize, usize, usize) -> bool,
}

impl Layout {
    /// Fuses the nodes of `graph`, whose inputs are `parts`, and assigns buffers, for the CPU.
    pub fn for_cpu(mut graph: Graph, parts: &[InputPart]) -> Self {
        drop_unused(&mut graph);
        fuse_pairs(&mut graph);
        fuse_silu(&mut graph);
        fuse(&mut graph);
        drop_unused(&mut graph);
        let shared = match parts.iter().any(|part| part.shared) {
            true => sharing::split(&mut graph, parts),
            false => vec![false; graph.widths.len()],
        };
        fuse_rows(&mut graph, &shared);
        fuse_repeated(&mut graph, &shared);
        drop_unused(&mut graph);
        let ends: Vec<usize> = (0..graph.nodes.len()).collect();
        Self::with_buffers(graph, shared, &ends)
    }

    /// Fuses the nodes of `graph` and assigns buffers, for a GPU. The products are those of
    /// [`Layout::for_cpu`], so the bits are too.
    pub fn for_gpu(mut graph: Graph, on: &GpuLayout<'_>) -> Self {
        drop_unused(&mut graph);
        fuse_pairs(&mut graph);
        fuse(&mut graph);
        drop_unused(&mut graph);
        let mut shared = match on.parts.iter().any(|part| part.shared) {
            true => sharing::split(&mut graph, on.parts),
            false => vec![false; graph.widths.len()],
        };
        drop_unused(&mut graph);
        part_pairs(&mut graph, &mut shared, on.fits_pairs);
        join_pairs(&mut graph, &shared);
        if on.own_products {
            cross_products(&mut graph, &shared);
            join_operands(&mut graph, &shared);
        }
        drop_unused(&mut graph);
        delay(&mut graph);
        let early = bring_forward(&mut graph, &shared, on);
        let ends = launch_ends(&graph, &shared, early, on.narrow);
        Self { early, ..Self::with_buffers(graph, shared, &ends) }
    }

    /// `ends` has for each node the last node that may run beside it.
    fn with_buffers(graph: Graph, shared: Vec<bool>, ends: &[usize]) -> Self {
        let Buffers { places, widths: buffers, shared: shared_buffers } =
            Buffers::assign(&graph, &shared, ends);
        let Graph { nodes, widths, output } = graph;
        Self { nodes, widths, places, buffers, output, shared, shared_buffers, early: 0 }
    }

    /// Returns the number of floats in one sample's result.
    pub fn outputs(&self) -> usize {
        self.widths[self.output]
    }
}

/// Returns how often each value is read. The caller reads the output once.
fn uses(graph: &Graph) -> Vec<usize> {
    let mut uses = vec![0; graph.widths.len()];
    graph.nodes.iter().flat_map(|n| &n.inputs).for_each(|&id| uses[id] += 1);
    uses[graph.output] += 1;
    uses
}

/// Fuses a product with a bias that is added to its result, and with the Relu after that.
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

impl Operand {
    /// Returns whether this reads neither a table nor operand number `number`.
    fn is_apart(&self, number: usize) -> bool {
        !matches!(self, Self::Value { input, picks } if *input == number || picks.is_some())
    }
}

impl Node {
    /// Returns this node, and leaves one without operands.
    fn take(&mut self) -> Self {
        let empty = Self { inputs: Vec::new(), op: Op::Pick(Vec::new()), output: self.output };
        std::mem::replace(self, empty)
    }

    /// Takes over the operation of `next` on this node's result. Returns false if that is
    /// impossible.
    fn absorb(&mut self, next: &Self) -> bool {
        let Op::Matrix { matrix, .. } = &mut self.op else { return false };
        match &next.op {
            Op::Map(Map::Relu) if !matrix.relu => {
                matrix.relu = true;
                true
            }
            Op::Zip { zip: Zip::Add, left, right } if !matrix.relu => {
                match (left, right) {
                    (Operand::Value { picks: None, .. }, Operand::Constant(bias))
                    | (Operand::Constant(bias), Operand::Value { picks: None, .. }) => {
                        // A bias as wide as all rows must be equal in each.
                        let (first, n) = (&bias[..matrix.n], matrix.n);
                        bias.chunks(n).all(|row| row == first) && matrix.take_bias(first)
                    }
                    _ => false,
                }
            }
            _ => false,
        }
    }

    /// Returns the result and the operands of a sum of values and a row that is repeated.
    fn repeated_sums(&self) -> Option<(Id, [Id; 2])> {
        let Op::Zip { zip: Zip::Add, left, right } = &self.op else { return None };
        let (
            Operand::Value { input: row, picks: Some(picks) },
            Operand::Value { input: sums, picks: None },
        ) = (left, right)
        else {
            return None;
        };
        matches!(Pattern::of(picks), Pattern::Rows(_))
            .then(|| (self.output, [self.inputs[*sums], self.inputs[*row]]))
    }
}

/// Lets functions of two values read a row that a node repeats, so that no run copies it. A row of
/// a request stays a copy: a run makes it once.
fn fuse_rows(graph: &mut Graph, shared: &[bool]) {
    let mut repeated: HashMap<Id, (Id, Vec<u32>)> = HashMap::new();
    for node in &mut graph.nodes {
        match &mut node.op {
            Op::Pick(picks)
                if !shared[node.output] && matches!(Pattern::of(picks), Pattern::Rows(_)) =>
            {
                repeated.insert(node.output, (node.inputs[0], picks.clone()));
            }
            Op::Zip { left, right, .. } => {
                let mut take = |one: &mut Operand, other: &Operand| {
                    if let Operand::Value { input, picks: picks @ None } = one
                        && other.is_apart(*input)
                        && let Some((from, of_row)) = repeated.get(&node.inputs[*input])
                    {
                        (node.inputs[*input], *picks) = (*from, Some(of_row.clone()));
                    }
                };
                take(left, right);
                take(right, left);
            }
            _ => {}
        }
    }
}

/// Lets a product that continues a sum read the two operands of that sum: sums of other columns,
/// and a row that all rows of a sample have. A run then stores the sum nowhere.
fn fuse_repeated(graph: &mut Graph, shared: &[bool]) {
    let sums: HashMap<Id, [Id; 2]> = graph.nodes.iter().filter_map(Node::repeated_sums).collect();
    for node in &mut graph.nodes {
        if let (Op::Matrix { matrix, .. }, &[own, before]) = (&node.op, node.inputs.as_slice())
            && let Some(&[sums, row]) = sums.get(&before)
            && graph.widths[row] == matrix.n
            && !shared[row]
        {
            node.inputs = vec![own, sums, row];
        }
    }
}

/// Lets the products of every two rows of a `Concat` read its operands, so that no run copies them.
/// If one node picks some of the products, these are the result, and half of the others are never
/// computed.
fn fuse_pairs(graph: &mut Graph) {
    let uses = uses(graph);
    let mut concats: HashMap<Id, (Vec<Id>, Vec<usize>)> = HashMap::new();
    let mut squares: HashMap<Id, (Vec<Id>, Vec<usize>, usize)> = HashMap::new();
    for node in &mut graph.nodes {
        match &node.op {
            Op::Concat { outer: 1, parts } => {
                let mut flat = (Vec::new(), Vec::new());
                for (&id, &part) in node.inputs.iter().zip(parts) {
                    let (inputs, parts) =
                        concats.get(&id).cloned().unwrap_or_else(|| (vec![id], vec![part]));
                    flat.0.extend(inputs);
                    flat.1.extend(parts);
                }
                concats.insert(node.output, flat);
            }
            Op::Products { count: 1, m: n, k, n: columns, transposed: true } if n == columns => {
                let (k, concat) = match node.inputs.as_slice() {
                    [left, right] if left == right => (*k, concats.get(left)),
                    _ => continue,
                };
                if let Some((inputs, parts)) = concat
                    && parts.iter().all(|part| part.is_multiple_of(k))
                {
                    let rows: Vec<usize> = parts.iter().map(|part| part / k).collect();
                    if uses[node.output] == 1 {
                        squares.insert(node.output, (inputs.clone(), rows.clone(), k));
                    }
                    let picks = picked_pairs(*n, 0..n * n);
                    (node.op, node.inputs) = (Op::Pairs { rows, k, picks }, inputs.clone());
                }
            }
            Op::Pick(picks) => {
                if let Some((inputs, rows, k)) = squares.remove(&node.inputs[0]) {
                    let picks = picks.iter().map(|&pick| pick as usize);
                    let picks = picked_pairs(rows.iter().sum(), picks);
                    (node.op, node.inputs) = (Op::Pairs { rows, k, picks }, inputs);
                }
            }
            _ => {}
        }
    }
}

/// Returns where `Op::Pairs` finds the products at the positions `square` of `[n, n]`.
fn picked_pairs(n: usize, square: impl Iterator<Item = usize>) -> Vec<u32> {
    square.map(|at| pair(n, at / n, at % n) as u32).collect()
}

/// Lets the products of every two rows write the concatenation of these products and of their own
/// operands, as a DLRM has it, so that no node copies them.
fn join_pairs(graph: &mut Graph, shared: &[bool]) {
    let uses = uses(graph);
    let mut pairs: HashMap<Id, usize> = HashMap::new();
    for at in 0..graph.nodes.len() {
        let Node { inputs, op, output } = &graph.nodes[at];
        match op {
            Op::Pairs { .. } if uses[*output] == 1 => {
                pairs.insert(*output, at);
            }
            Op::Concat { outer: 1, .. } => {
                let Some(&made) = inputs.iter().find_map(|id| pairs.get(id)) else { continue };
                let of_pairs = &graph.nodes[made];
                let Op::Pairs { rows, k, picks } = &of_pairs.op else { continue };
                // The first value of each operand among those of all rows.
                let firsts = rows.iter().scan(0, |next, rows| {
                    *next += rows * k;
                    Some(*next - rows * k)
                });
                let operands: HashMap<Id, usize> =
                    of_pairs.inputs.iter().copied().zip(firsts).collect();
                let picks_of = |id: &Id| match operands.get(id) {
                    _ if *id == of_pairs.output => Some(picks.clone()),
                    Some(first) => {
                        let values = *first..first + graph.widths[*id];
                        Some(values.map(|value| VALUE | value as u32).collect())
                    }
                    None => None,
                };
                let joined: Option<Vec<Vec<u32>>> = inputs.iter().map(picks_of).collect();
                if let Some(joined) = joined.filter(|_| shared[*output] == shared[of_pairs.output])
                {
                    let op = Op::Pairs { rows: rows.clone(), k: *k, picks: joined.concat() };
                    let (inputs, output) = (of_pairs.inputs.clone(), *output);
                    graph.nodes[at] = Node { inputs, op, output };
                }
            }
            _ => {}
        }
    }
}

/// Lets a product by weights end with the product of its result and a value that it depends on, and
/// with the sum with another. Each layer of a cross network is then one node less to wait for. Any
/// other value could be ready later than the operands of the product.
fn cross_products(graph: &mut Graph, shared: &[bool]) {
    let uses = uses(graph);
    let mut writers: HashMap<Id, usize> = HashMap::new();
    for at in 0..graph.nodes.len() {
        let Node { inputs, op, output } = &graph.nodes[at];
        let (zip, output, operands) = match (op, inputs.as_slice()) {
            (Op::Zip { zip, left, right }, &[a, b]) if left.is_whole() && right.is_whole() => {
                (*zip, *output, [(a, b), (b, a)])
            }
            _ => {
                writers.insert(*output, at);
                continue;
            }
        };
        let crossed = operands.into_iter().find_map(|(product, other)| {
            let writer = *writers.get(&product)?;
            let Node { inputs, op, .. } = &graph.nodes[writer];
            let ends = match (op, zip) {
                (Op::Matrix { .. }, Zip::Mul) => inputs.len() == 1,
                (Op::Crossed { .. }, Zip::Add) => inputs.len() == 2,
                _ => false,
            };
            let is_only_read = uses[product] == 1 && shared[product] == shared[output];
            let fits = ends && is_only_read && depends(graph, &writers, inputs[0], other);
            fits.then_some((writer, other))
        });
        if let Some((writer, other)) = crossed {
            let Node { mut inputs, op, .. } = graph.nodes[writer].take();
            inputs.push(other);
            let op = match op {
                Op::Matrix { rows, matrix } => Op::Crossed { rows, matrix },
                op => op,
            };
            graph.nodes[at] = Node { inputs, op, output };
        }
        writers.insert(output, at);
    }
}

/// Returns whether value `id` is `other`, or is computed of it. Looks at the nearest nodes only.
fn depends(graph: &Graph, writers: &HashMap<Id, usize>, id: Id, other: Id) -> bool {
    const NODES_MAX: usize = 64;
    let (mut next, mut seen) = (vec![id], HashSet::new());
    while let Some(id) = next.pop() {
        if id == other {
            return true;
        }
        if seen.len() < NODES_MAX
            && let Some(&writer) = writers.get(&id)
            && seen.insert(writer)
        {
            next.extend(&graph.nodes[writer].inputs);
        }
    }
    false
}

/// Lets the products by weights of a `Concat` read its two operands, so that they wait for no copy.
fn join_operands(graph: &mut Graph, shared: &[bool]) {
    let mut concats: HashMap<Id, Vec<Id>> = HashMap::new();
    for node in &mut graph.nodes {
        if let Op::Concat { outer: 1, parts } = &node.op
            && parts.len() == 2
        {
            concats.insert(node.output, node.inputs.clone());
        }
        let operands = match node.inputs.as_slice() {
            [one] if shared[*one] == shared[node.output] => concats.get(one),
            _ => None,
        };
        node.op = match (std::mem::replace(&mut node.op, Op::Pick(Vec::new())), operands) {
            (Op::Matrix { rows: 1, matrix }, Some(operands)) => {
                node.inputs = operands.clone();
                Op::Joined(matrix)
            }
            (op, _) => op,
        };
    }
}

/// Moves the nodes that are no products behind all products that do not need them. There they share
/// launches, and fewer products wait for them.
fn delay(graph: &mut Graph) {
    let writers: HashMap<Id, usize> =
        graph.nodes.iter().enumerate().map(|(at, node)| (node.output, at)).collect();
    let mut left: Vec<Option<Node>> = graph.nodes.drain(..).map(Some).collect();
    for at in 0..left.len() {
        if !left[at].as_ref().is_some_and(|node| node.op.is_product()) {
            continue;
        }
        let mut needed = vec![false; at + 1];
        needed[at] = true;
        for node in (0..=at).rev() {
            if let (Some(node), true) = (&left[node], needed[node]) {
                node.inputs
                    .iter()
                    .filter_map(|id| writers.get(id))
                    .for_each(|&at| needed[at] = true);
            }
        }
        let nodes = left.iter_mut().zip(needed).filter(|(_, needed)| *needed);
        graph.nodes.extend(nodes.filter_map(|(node, _)| node.take()));
    }
    graph.nodes.extend(left.into_iter().flatten());
}

/// Moves the nodes that need nothing looked up to the front, in their order. Returns how many can
/// run at once: with shared inputs only shared nodes, because their values are copied to the
/// samples before other nodes run.
fn bring_forward(graph: &mut Graph, shared: &[bool], on: &GpuLayout<'_>) -> usize {
    let mut awaits = vec![false; graph.widths.len()];
    (0..on.parts.len()).for_each(|input| awaits[input] = !on.fed.contains(&input));
    for node in &graph.nodes {
        awaits[node.output] = node.inputs.iter().any(|&id| awaits[id]);
    }
    // Before buffers are assigned: a later order would let two values live in one buffer.
    graph.nodes.sort_by_key(|node| (!shared[node.output], awaits[node.output]));
    let is_first = on.parts.iter().any(|part| part.shared);
    let is_early = |node: &&Node| shared[node.output] == is_first && !awaits[node.output];
    graph.nodes.iter().take_while(is_early).count()
}

/// Returns for each node the last node of its launch. Nodes of up to `narrow` values that follow
/// one another and are no products share one. In it some samples are at a later node than others,
/// so no value may take the buffer of an earlier one. Wider nodes share a launch only if their
/// memory allows it, so a long chain of them keeps few buffers.
fn launch_ends(graph: &Graph, shared: &[bool], early: usize, narrow: usize) -> Vec<usize> {
    let nodes = &graph.nodes;
    let is_wide = |node: &Node| match &node.op {
        // Its parts are written one by one.
        Op::Concat { outer, parts } => parts.iter().all(|part| outer * part > narrow),
        _ => graph.widths[node.output] > narrow,
    };
    let mut ends: Vec<usize> = (0..nodes.len()).collect();
    for at in (0..nodes.len().saturating_sub(1)).rev() {
        let [one, next] = [at, at + 1].map(|at| &nodes[at]);
        let is_one = [one, next].iter().all(|node| !node.op.is_product() && !is_wide(node));
        if is_one && shared[one.output] == shared[next.output] && at + 1 != early {
            ends[at] = ends[at + 1];
        }
    }
    ends
}

/// Replaces the products of every two rows that no kernel takes by a concatenation, a product and
/// a selection.
fn part_pairs(
    graph: &mut Graph,
    shared: &mut Vec<bool>,
    fits: impl Fn(usize, usize, usize) -> bool,
) {
    for Node { inputs, op, output } in std::mem::take(&mut graph.nodes) {
        let (rows, k, picks) = match op {
            Op::Pairs { rows, k, picks } if !fits(rows.len(), rows.iter().sum(), k) => {
                (rows, k, picks)
            }
            op => {
                graph.nodes.push(Node { inputs, op, output });
                continue;
            }
        };
        let is_shared = shared[output];
        let mut add = |inputs: Vec<Id>, op: Op, width: usize| -> Id {
            shared.push(is_shared);
            graph.add(inputs, op, width)
        };
        let n: usize = rows.iter().sum();
        let joined = match inputs.as_slice() {
            &[one] => one,
            _ => {
                let parts = rows.iter().map(|rows| rows * k).collect();
                add(inputs, Op::Concat { outer: 1, parts }, n * k)
            }
        };
        let products = Op::Products { count: 1, m: n, k, n, transposed: true };
        let square = add(vec![joined, joined], products, n * n);
        let mut places = vec![0; pair(n, n - 1, n - 1) + 1];
        for (i, j) in (0..n).flat_map(|i| (0..n).map(move |j| (i, j))) {
            places[pair(n, i, j)] = (i * n + j) as u32;
        }
        let picks = picks.iter().map(|&pick| places[pick as usize]).collect();
        graph.nodes.push(Node { inputs: vec![square], op: Op::Pick(picks), output });
    }
}

/// Replaces the product of a value and its sigmoid by one function, which works in place. The
/// sigmoid goes if no other node reads it.
fn fuse_silu(graph: &mut Graph) {
    let mut sigmoid_of: HashMap<Id, Id> = HashMap::new();
    for node in &mut graph.nodes {
        match (&node.op, node.inputs.as_slice()) {
            (Op::Map(Map::Sigmoid), &[x]) => {
                sigmoid_of.insert(node.output, x);
            }
            (Op::Zip { zip: Zip::Mul, left, right }, &[a, b])
                if left.is_whole() && right.is_whole() =>
            {
                let pair = [(a, b), (b, a)].into_iter().find(|(x, y)| sigmoid_of.get(y) == Some(x));
                if let Some((x, _)) = pair {
                    (node.op, node.inputs) = (Op::Map(Map::Silu), vec![x]);
                }
            }
            _ => {}
        }
    }
}

/// Removes the nodes whose results no node reads.
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

/// The location of every value, and the size and the kind of every buffer.
struct Buffers {
    places: Vec<Place>,
    widths: Vec<usize>,
    shared: Vec<bool>,
}

impl Buffers {
    /// Assigns a buffer to every result: the smallest free one that is large enough. If none is,
    /// the largest free buffer grows; if none is free, the result takes a new one. A buffer is free
    /// after the node in `ends` of the last node that reads its value.
    fn assign(graph: &Graph, shared: &[bool], ends: &[usize]) -> Self {
        let mut last = vec![0; graph.widths.len()];
        for (at, node) in graph.nodes.iter().enumerate() {
            for &id in &node.inputs {
                // A request's later blocks of samples read the value again.
                let stays = shared[id] && !shared[node.output];
                last[id] = if stays { usize::MAX } else { last[id].max(at) };
            }
        }
        last[graph.output] = usize::MAX;

        let places = (0..graph.widths.len()).map(Place::Input).collect();
        let mut all = Self { places, widths: Vec::new(), shared: Vec::new() };
        let (mut free, mut ended): (Vec<usize>, Vec<Id>) = (Vec::new(), Vec::new());
        for (at, node) in graph.nodes.iter().enumerate() {
            let is_last_read = |id: Id| last[id] == at;
            match (&node.op, node.inputs.as_slice()) {
                // A function of each value works in place on an operand that no later node reads.
                (Op::Map(_) | Op::Check { .. }, &[operand])
                    if matches!(all.places[operand], Place::Buffer(_)) && is_last_read(operand) =>
                {
                    all.places[node.output] = all.places[operand];
                }
                _ => {
                    let width = graph.widths[node.output];
                    let buffer = all.take(&mut free, width, shared[node.output]);
                    all.places[node.output] = Place::Buffer(buffer);
                    ended.extend(node.inputs.iter().copied().filter(|&id| is_last_read(id)));
                }
            }
            if ends[at] == at {
                for id in ended.drain(..) {
                    match all.places[id] {
                        Place::Buffer(b) if !free.contains(&b) => free.push(b),
                        _ => {}
                    }
                }
            }
        }
        all
    }

    /// Takes a buffer for a result of this width out of `free`, or a new one.
    fn take(&mut self, free: &mut Vec<usize>, width: usize, is_shared: bool) -> usize {
        let same_kind = || free.iter().copied().filter(|&b| self.shared[b] == is_shared);
        let fitting =
            same_kind().filter(|&b| self.widths[b] >= width).min_by_key(|&b| self.widths[b]);
        let chosen = fitting.or_else(|| same_kind().max_by_key(|&b| self.widths[b]));
        let buffer = chosen.unwrap_or(self.widths.len());
        if buffer == self.widths.len() {
            self.widths.push(0);
            self.shared.push(is_shared);
        }
        free.retain(|&b| b != buffer);
        self.widths[buffer] = self.widths[buffer].max(width);
        buffer
    }
}
