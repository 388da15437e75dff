//! The run of a network on the CPU, node after node, in blocks of samples. A run allocates nothing:
//! it works in the worker's buffers. This file knows no ONNX.

use crate::dense::gemm::{
    GemmScratch, GemmSizes, Matrix, multiply_packed, pack_columns, pack_rows,
};
use crate::dense::layout::{Layout, Place};
use crate::dense::math;
use crate::dense::microkernel;
use crate::dense::onnx_graph::{Id, Map, Node, Op, Operand, Zip};
use crate::dense::tiling::ProductShape;
use crate::dense::weights::{DenseLayer, Weights};
use crate::simd::isa::Isa;

/// Samples that run through the network together. They are enough to use every weight often while
/// it is in the cache, and few enough that the results stay in the cache too.
const BLOCK: usize = 96;

/// A network that is ready to run. It is read-only, so all workers share it.
pub(super) struct Plan {
    layout: Layout,
    isa: Isa,
    gemm: GemmSizes,
}

/// The memory of one worker's runs.
pub(super) struct PlanScratch {
    buffers: Vec<Vec<f32>>,
    gemm: GemmScratch,
}

impl Plan {
    /// Plans a run of `layout` on `isa`.
    pub fn new(layout: Layout, isa: Isa) -> Self {
        let gemm = gemm_sizes(&layout);
        Self { layout, isa, gemm }
    }

    /// Returns the number of floats in one sample's result.
    pub fn outputs(&self) -> usize {
        self.layout.outputs()
    }

    /// Returns the number of weights and biases.
    pub fn parameters(&self) -> usize {
        self.matrices().map(|m| m.k * m.n + m.n).sum()
    }

    /// Returns the bytes of the packed weights and the index tables.
    pub fn bytes(&self) -> usize {
        let tables = |op: &Op| match op {
            Op::Pick(picks) => picks.len(),
            Op::Zip { left, right, .. } => left.len() + right.len(),
            _ => 0,
        };
        let tables: usize = self.layout.nodes.iter().map(|n| tables(&n.op)).sum();
        self.matrices().map(Matrix::bytes).sum::<usize>() + 4 * tables
    }

    /// Returns the matrices, in the order of execution.
    pub fn layers(&self) -> Vec<DenseLayer> {
        let layer = |m: &Matrix| DenseLayer { inputs: m.k, outputs: m.n, weights: m.weights() };
        self.matrices().map(layer).collect()
    }

    /// Stores the weights of matrix number `at` as `weights`, rounded from those of `trained`, the
    /// same network with f32 weights. Returns false if they do not fit.
    pub fn set_weights(&mut self, at: usize, weights: Weights, trained: &Self) -> bool {
        let repacked = trained.matrices().nth(at).and_then(|m| m.repacked(weights));
        let own = self.layout.nodes.iter_mut().filter_map(|node| match &mut node.op {
            Op::Matrix { matrix, .. } => Some(matrix),
            _ => None,
        });
        let (Some(own), Some(repacked)) = ({ own }.nth(at), repacked) else { return false };
        **own = repacked;
        self.gemm = gemm_sizes(&self.layout);
        true
    }

    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.layout.nodes.iter().filter_map(|n| {
            if let Op::Matrix { matrix, .. } = &n.op { Some(&**matrix) } else { None }
        })
    }

    /// Creates the memory for runs of up to `batch_max` samples.
    pub fn scratch(&self, batch_max: usize) -> PlanScratch {
        let buffers =
            self.layout.buffers.iter().map(|w| vec![0.0; w * batch_max.min(BLOCK)]).collect();
        PlanScratch { buffers, gemm: GemmScratch::new(self.gemm) }
    }

    /// Returns the bytes of the memory for runs of up to `batch_max` samples.
    pub fn scratch_bytes(&self, batch_max: usize) -> usize {
        4 * self.layout.buffers.iter().sum::<usize>() * batch_max.min(BLOCK)
            + GemmScratch::bytes(self.gemm)
    }

    /// Runs `batch` samples. `inputs[i]` starts with `[batch, width of input i]`, and `out` is
    /// `[batch, outputs]`.
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
            for node in &self.layout.nodes {
                self.step(node, first, end - first, inputs, scratch);
            }

            let width = self.outputs();
            let from = self.value(self.layout.output, first, end - first, inputs, &scratch.buffers);
            out[first * width..end * width].copy_from_slice(from);
        }
    }

    /// Returns the `n` samples of a value from `first` on. A buffer holds only these samples, an
    /// input holds all.
    fn value<'a, I: AsRef<[f32]>>(
        &self,
        id: Id,
        first: usize,
        n: usize,
        inputs: &'a [I],
        buffers: &'a [Vec<f32>],
    ) -> &'a [f32] {
        let width = self.layout.widths[id];
        match self.layout.places[id] {
            Place::Input(i) => &inputs[i].as_ref()[first * width..(first + n) * width],
            Place::Buffer(b) => &buffers[b][..n * width],
        }
    }

    /// Runs `node` for the `n` samples from `first` on.
    fn step<I: AsRef<[f32]>>(
        &self,
        node: &Node,
        first: usize,
        n: usize,
        inputs: &[I],
        scratch: &mut PlanScratch,
    ) {
        let Place::Buffer(buffer) = self.layout.places[node.output] else { return };
        // The buffer is taken out while it is written, so that the other buffers can be read. Its
        // empty replacement allocates nothing.
        let mut taken = std::mem::take(&mut scratch.buffers[buffer]);
        let width = self.layout.widths[node.output];
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
                let shape = ProductShape { m: *m, k: *k, n: *columns };
                for ((a, b), out) in a.zip(b).zip(out.chunks_exact_mut(m * columns)) {
                    let packed = scratch.gemm.packed();
                    pack_columns(b, *k, *columns, *transposed, packed);
                    multiply_packed(packed, shape, a, out, self.isa);
                }
            }
            Op::Pairs { rows, k } => {
                for (sample, out) in out.chunks_exact_mut(width).enumerate() {
                    let part = |i: usize| &read(i)[sample * rows[i] * k..][..rows[i] * k];
                    pairs(rows, *k, part, out, self.isa, scratch.gemm.packed());
                }
            }
            Op::Map(map) => {
                // The layout gives operand and result one buffer if the node can work in place.
                if self.layout.places[node.inputs[0]] != Place::Buffer(buffer) {
                    out.copy_from_slice(read(0));
                }
                match map {
                    Map::Relu => out.iter_mut().for_each(|x| *x = math::relu(*x)),
                    Map::Sigmoid => microkernel::each(self.isa, out, math::sigmoid),
                    Map::Tanh => microkernel::each(self.isa, out, math::tanh),
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
                debug_assert!(parts.iter().sum::<usize>() * outer == width);
                concat(parts, read, out);
            }
            Op::Pick(picks) => {
                let from_width = self.layout.widths[node.inputs[0]];
                for (from, to) in read(0).chunks_exact(from_width).zip(out.chunks_exact_mut(width))
                {
                    to.iter_mut().zip(picks).for_each(|(to, &pick)| *to = from[pick as usize]);
                }
            }
        }

        scratch.buffers[buffer] = taken;
    }
}

/// Returns what the products of `layout` need of a worker's memory.
fn gemm_sizes(layout: &Layout) -> GemmSizes {
    let mut sizes = GemmSizes::default();
    for node in &layout.nodes {
        match &node.op {
            Op::Matrix { matrix, .. } => sizes.add_matrix(matrix),
            Op::Products { k, n, .. } => sizes.add_packed(*k, *n),
            Op::Pairs { rows, k } => sizes.add_packed(*k, rows.iter().sum()),
            _ => {}
        }
    }
    sizes
}

/// The values of one side of a `Zip` in a run.
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
    /// Returns value `i` of sample `sample` of `n`. A sample's result has `width` values.
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

/// Multiplies every two of the vectors of `k` values, of which `part(i)` has `rows[i]`.
fn pairs<'a>(
    rows: &[usize],
    k: usize,
    part: impl Fn(usize) -> &'a [f32],
    out: &mut [f32],
    isa: Isa,
    packed: &mut [f32],
) {
    let n = rows.iter().sum();
    let mut first = 0;
    for (i, rows) in rows.iter().enumerate() {
        pack_rows(part(i), k, first, n, packed);
        first += rows;
    }
    first = 0;
    for (i, &m) in rows.iter().enumerate() {
        multiply_packed(packed, ProductShape { m, k, n }, part(i), &mut out[first * n..], isa);
        first += m;
    }
}

/// Copies the operands side by side into `out` `[.., sum of parts]`: `parts[i]` values of operand
/// `i`, which `read(i)` returns, at a time.
fn concat<'a>(parts: &[usize], read: impl Fn(usize) -> &'a [f32], out: &mut [f32]) {
    let stride: usize = parts.iter().sum();
    let mut first = 0;
    for (i, &part) in parts.iter().enumerate() {
        for (from, to) in read(i).chunks_exact(part).zip(out.chunks_exact_mut(stride)) {
            to[first..first + part].copy_from_slice(from);
        }
        first += part;
    }
}

/// Reduces `[.., n, inner]` to `[.., inner]`: adds in the order of `n`, then divides by `divisor`.
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
