//! The plan of a network: its nodes in order, bias and Relu fused into the products before them, and a buffer
//! for every result, shared by results that are never alive together. A run takes no memory: the buffers are
//! the worker's. Knows nothing of ONNX.

use super::gemm::{GemmScratch, Matrix, pack_columns, padded};
use super::graph::{Graph, Id, Map, Node, Op, Operand, Zip};
use super::{math, simd};
use crate::isa::Isa;

/// Samples that go through the network together: enough to use every weight often while it is near, few enough
/// that the results stay near too.
const BLOCK: usize = 96;

/// Where a value lies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Input(usize),
    Buffer(usize),
}

/// A network ready to run. Read-only; all workers share it.
pub(super) struct Plan {
    nodes: Vec<Node>,
    widths: Vec<usize>,
    places: Vec<Place>,
    /// Values a sample of each buffer.
    buffers: Vec<usize>,
    output: Id,
    isa: Isa,
    /// Rows of the tallest matrix.
    k_max: usize,
    /// Values of the widest packed operand of a product.
    pack_max: usize,
}

/// The memory that one worker's runs take.
pub(super) struct PlanScratch {
    buffers: Vec<Vec<f32>>,
    gemm: GemmScratch,
}

impl Plan {
    /// Plans `graph` for `isa`.
    pub fn new(mut graph: Graph, isa: Isa) -> Self {
        fuse(&mut graph);
        drop_unused(&mut graph);
        let (places, buffers) = place(&graph);
        let (mut k_max, mut pack_max) = (0, 0);
        for node in &graph.nodes {
            match &node.op {
                Op::Matrix { matrix, .. } => k_max = k_max.max(matrix.k),
                Op::Products { k, n, .. } => pack_max = pack_max.max(k * padded(*n)),
                _ => {}
            }
        }
        let Graph { nodes, widths, output, .. } = graph;
        Self { nodes, widths, places, buffers, output, isa, k_max, pack_max }
    }

    /// Values in one sample's result.
    pub fn outputs(&self) -> usize {
        self.widths[self.output]
    }

    /// Weights and biases.
    pub fn parameters(&self) -> usize {
        self.matrices().map(|m| m.k * m.n + m.n).sum()
    }

    /// Bytes of the packed weights and the index tables.
    pub fn bytes(&self) -> usize {
        let tables = |op: &Op| match op {
            Op::Pick(picks) => picks.len(),
            Op::Zip { left, right, .. } => left.len() + right.len(),
            _ => 0,
        };
        let tables: usize = self.nodes.iter().map(|n| tables(&n.op)).sum();
        self.matrices().map(Matrix::bytes).sum::<usize>() + 4 * tables
    }

    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.nodes
            .iter()
            .filter_map(|n| if let Op::Matrix { matrix, .. } = &n.op { Some(&**matrix) } else { None })
    }

    /// Memory for runs of up to `batch_max` samples.
    pub fn scratch(&self, batch_max: usize) -> PlanScratch {
        let buffers = self.buffers.iter().map(|w| vec![0.0; w * batch_max.min(BLOCK)]).collect();
        PlanScratch { buffers, gemm: GemmScratch::new(self.k_max, self.pack_max) }
    }

    /// The bytes of that.
    pub fn scratch_bytes(&self, batch_max: usize) -> usize {
        4 * self.buffers.iter().sum::<usize>() * batch_max.min(BLOCK)
            + GemmScratch::bytes(self.k_max, self.pack_max)
    }

    /// Runs `batch` samples. `inputs[i]` holds at least `[batch, width of input i]`, `out` `[batch, outputs]`.
    pub fn run<I: AsRef<[f32]>>(
        &self,
        batch: usize,
        inputs: &[I],
        out: &mut [f32],
        scratch: &mut PlanScratch,
    ) {
        let blocks = batch.div_ceil(BLOCK);
        for block in 0..blocks {
            let (first, end) = (block * batch / blocks, (block + 1) * batch / blocks);
            for node in &self.nodes {
                self.step(node, first, end - first, inputs, scratch);
            }
            let width = self.outputs();
            let from = self.value(self.output, first, end - first, inputs, &scratch.buffers);
            out[first * width..end * width].copy_from_slice(from);
        }
    }

    /// The `n` samples from `first` on of a value: buffers hold only those, inputs all.
    fn value<'a, I: AsRef<[f32]>>(
        &self,
        id: Id,
        first: usize,
        n: usize,
        inputs: &'a [I],
        buffers: &'a [Vec<f32>],
    ) -> &'a [f32] {
        let width = self.widths[id];
        match self.places[id] {
            Place::Input(i) => &inputs[i].as_ref()[first * width..(first + n) * width],
            Place::Buffer(b) => &buffers[b][..n * width],
        }
    }

    fn step<I: AsRef<[f32]>>(
        &self,
        node: &Node,
        first: usize,
        n: usize,
        inputs: &[I],
        scratch: &mut PlanScratch,
    ) {
        let Place::Buffer(buffer) = self.places[node.output] else { return };
        // Taken out while it is written, so that the others can be read; an empty one takes no memory.
        let mut taken = std::mem::take(&mut scratch.buffers[buffer]);
        let width = self.widths[node.output];
        let out = &mut taken[..n * width];
        let buffers = &scratch.buffers;
        let read = |i: usize| self.value(node.inputs[i], first, n, inputs, buffers);
        match &node.op {
            Op::Matrix { rows, matrix } => {
                matrix.multiply(n * rows, read(0), out, self.isa, &mut scratch.gemm);
            }
            Op::Products { count, m, k, n: columns, transposed } => {
                let (a, b) = (read(0).chunks_exact(m * k), read(1).chunks_exact(k * columns));
                debug_assert!(a.len() == n * count);
                for ((a, b), out) in a.zip(b).zip(out.chunks_exact_mut(m * columns)) {
                    let packed = scratch.gemm.packed();
                    pack_columns(b, *k, *columns, *transposed, packed);
                    super::gemm::multiply_packed(packed, (*m, *k, *columns), a, out, self.isa);
                }
            }
            Op::Map(map) => {
                // In place where the operand is not needed any more.
                if self.places[node.inputs[0]] != Place::Buffer(buffer) {
                    out.copy_from_slice(read(0));
                }
                match map {
                    Map::Relu => out.iter_mut().for_each(|x| *x = math::relu(*x)),
                    Map::Sigmoid => simd::each(self.isa, out, math::sigmoid),
                    Map::Tanh => simd::each(self.isa, out, math::tanh),
                }
            }
            Op::Zip { zip, left, right } => {
                let (left, right) = (left.side(read), right.side(read));
                match zip {
                    Zip::Add => zip_by(&left, &right, width, out, |a, b| a + b),
                    Zip::Sub => zip_by(&left, &right, width, out, |a, b| a - b),
                    Zip::Mul => zip_by(&left, &right, width, out, |a, b| a * b),
                    Zip::Div => zip_by(&left, &right, width, out, |a, b| a / b),
                }
            }
            Op::Sum { outer, n: count, inner, divisor } => {
                debug_assert!(read(0).len() == n * outer * count * inner);
                sum(read(0), *count, *inner, *divisor, out);
            }
            Op::Concat { outer, parts } => {
                let stride: usize = parts.iter().sum();
                debug_assert!(stride * outer == width);
                let mut first = 0;
                for (i, &part) in parts.iter().enumerate() {
                    for (from, to) in read(i).chunks_exact(part).zip(out.chunks_exact_mut(stride)) {
                        to[first..first + part].copy_from_slice(from);
                    }
                    first += part;
                }
            }
            Op::Pick(picks) => {
                let from_width = self.widths[node.inputs[0]];
                for (from, to) in read(0).chunks_exact(from_width).zip(out.chunks_exact_mut(width)) {
                    to.iter_mut().zip(picks).for_each(|(to, &pick)| *to = from[pick as usize]);
                }
            }
        }
        scratch.buffers[buffer] = taken;
    }
}

/// One side of a `Zip` in a run.
enum Side<'a> {
    Values(&'a [f32]),
    Picked(&'a [f32], &'a [u32]),
    Constant(&'a [f32]),
}

impl Operand {
    fn len(&self) -> usize {
        match self {
            Self::Value { picks, .. } => picks.as_ref().map_or(0, Vec::len),
            Self::Constant(values) => values.len(),
        }
    }

    fn side<'a>(&'a self, read: impl Fn(usize) -> &'a [f32]) -> Side<'a> {
        match self {
            Self::Value { input, picks: None } => Side::Values(read(*input)),
            Self::Value { input, picks: Some(picks) } => Side::Picked(read(*input), picks),
            Self::Constant(values) => Side::Constant(values),
        }
    }
}

impl Side<'_> {
    /// Value `i` of sample number `sample` of `n`, results being `width` wide.
    #[inline(always)]
    fn at(&self, sample: usize, n: usize, width: usize, i: usize) -> f32 {
        match self {
            Self::Values(values) => values[sample * width + i],
            Self::Picked(values, picks) => values[sample * (values.len() / n) + picks[i] as usize],
            Self::Constant(values) => values[i],
        }
    }
}

#[inline(always)]
fn zip_by(left: &Side, right: &Side, width: usize, out: &mut [f32], f: impl Fn(f32, f32) -> f32) {
    if let (Side::Values(left), Side::Values(right)) = (left, right) {
        out.iter_mut().zip(left.iter().zip(*right)).for_each(|(out, (a, b))| *out = f(*a, *b));
        return;
    }
    let n = out.len() / width;
    for (sample, out) in out.chunks_exact_mut(width).enumerate() {
        for (i, out) in out.iter_mut().enumerate() {
            *out = f(left.at(sample, n, width, i), right.at(sample, n, width, i));
        }
    }
}

/// `[.., inner]` from `[.., n, inner]`, added in the order of `n`.
fn sum(from: &[f32], n: usize, inner: usize, divisor: f32, out: &mut [f32]) {
    for (from, out) in from.chunks_exact(n * inner).zip(out.chunks_exact_mut(inner)) {
        let (head, rest) = from.split_at(inner);
        out.copy_from_slice(head);
        for row in rest.chunks_exact(inner) {
            out.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        if divisor != 1.0 {
            out.iter_mut().for_each(|sum| *sum /= divisor);
        }
    }
}

/// How often each value is read.
fn uses(graph: &Graph) -> Vec<usize> {
    let mut uses = vec![0; graph.widths.len()];
    graph.nodes.iter().flat_map(|n| &n.inputs).for_each(|&id| uses[id] += 1);
    uses[graph.output] += 1;
    uses
}

/// Puts a bias that is added to a product, and the Relu after it, into the product.
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

impl Node {
    /// Does what `next` does to the result too, if it can.
    fn absorb(&mut self, next: &Self) -> bool {
        let Op::Matrix { rows, matrix } = &mut self.op else { return false };
        match &next.op {
            Op::Map(Map::Relu) if !matrix.relu => {
                matrix.relu = true;
                true
            }
            Op::Zip { zip: Zip::Add, left, right } if *rows == 1 && !matrix.relu => match (left, right) {
                (Operand::Value { picks: None, .. }, Operand::Constant(bias))
                | (Operand::Constant(bias), Operand::Value { picks: None, .. }) => matrix.take_bias(bias),
                _ => false,
            },
            _ => false,
        }
    }
}

/// Drops nodes whose results nothing reads.
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

/// A place for every value: a result takes the smallest buffer that is free and large enough, else the largest,
/// which grows, else a new one.
fn place(graph: &Graph) -> (Vec<Place>, Vec<usize>) {
    let mut places: Vec<Place> = (0..graph.widths.len()).map(Place::Input).collect();
    let mut last = vec![0; graph.widths.len()];
    for (at, node) in graph.nodes.iter().enumerate() {
        node.inputs.iter().for_each(|&id| last[id] = at);
    }
    last[graph.output] = usize::MAX;
    let (mut buffers, mut free): (Vec<usize>, Vec<usize>) = (Vec::new(), Vec::new());
    for (at, node) in graph.nodes.iter().enumerate() {
        let width = graph.widths[node.output];
        let dies = |id: Id| last[id] == at;
        if let (Op::Map(_), Place::Buffer(b), true) = (&node.op, places[node.inputs[0]], dies(node.inputs[0]))
        {
            places[node.output] = Place::Buffer(b);
            continue;
        }
        let fitting = free.iter().copied().filter(|&b| buffers[b] >= width).min_by_key(|&b| buffers[b]);
        let chosen = fitting.or_else(|| free.iter().copied().max_by_key(|&b| buffers[b]));
        let buffer = chosen.unwrap_or_else(|| {
            buffers.push(0);
            buffers.len() - 1
        });
        free.retain(|&b| b != buffer);
        buffers[buffer] = buffers[buffer].max(width);
        places[node.output] = Place::Buffer(buffer);
        for &id in &node.inputs {
            match places[id] {
                Place::Buffer(b) if dies(id) && !free.contains(&b) => free.push(b),
                _ => {}
            }
        }
    }
    (places, buffers)
}
