//! The run of a network on the CPU, node after node, in blocks of samples. A run allocates nothing:
//! it works in the worker's buffers. This file knows no ONNX.

use crate::dense::graph::node::{Node, Op, Operand};
use crate::dense::graph::tensor::Id;
use crate::dense::matrix::gemm::{GemmScratch, GemmSizes, Matrix, multiply_packed, pack_columns};
use crate::dense::matrix::pairs::{self, Pairs};
use crate::dense::matrix::tiling::ProductShape;
use crate::dense::run::elementwise::{self, Side};
use crate::dense::run::layout::{Layout, Place};
use crate::dense::run::moves::Pattern;
use crate::dense::run::recurrent::Operands;
use crate::dense::run::sequences::{check, fold, order, softmax, sum};
use crate::dense::weights::DenseLayer;
use crate::simd::isa::Isa;

/// Samples that run through the network together, at most. They are enough to use every weight
/// often while it is in the core's cache, and few enough that the results stay in the cache too.
const BLOCK_MAX: usize = 96;
/// The same at least, in networks whose weights stay in the cache.
const BLOCK_MIN: usize = 4;
/// Bytes of weights that stay in the second-level cache of a core.
const WEIGHTS_CACHED: usize = 1 << 20;
/// Bytes of values that stay in the second-level cache beside such weights.
const VALUES_CACHED: usize = 512 << 10;

/// A network that is ready to run. It is read-only, so all workers share it.
pub(in crate::dense) struct Plan {
    layout: Layout,
    isa: Isa,
    /// The patterns of the index tables of each node, in the order of its operands.
    patterns: Vec<[Pattern; 3]>,
    /// Floats of the widest state of a recurrent node, with its products, for one sample.
    state_max: usize,
    /// Whether a node checks values.
    has_checks: bool,
}

/// The memory of one worker's runs.
pub(in crate::dense) struct PlanScratch {
    /// Samples that the buffers hold.
    block: usize,
    buffers: Vec<Vec<f32>>,
    gemm: GemmScratch,
    state: Vec<f32>,
    /// For each sample of the block, whether a check failed.
    failed: Vec<bool>,
}

impl Plan {
    /// Plans a run of `layout` on `isa`.
    pub fn new(layout: Layout, isa: Isa) -> Self {
        let state = |node: &Node| match &node.op {
            Op::Recurrent(cell) => cell.state_width(),
            _ => 0,
        };
        let state_max = layout.nodes.iter().map(state).max().unwrap_or(0);
        let patterns = layout.nodes.iter().map(|n| patterns_of(&n.op)).collect();
        let has_checks = layout.nodes.iter().any(|n| matches!(n.op, Op::Check { .. }));
        Self { layout, isa, patterns, state_max, has_checks }
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
            Op::Pick(picks) | Op::Pairs { picks, .. } => picks.len(),
            Op::Lookup { data, picks } => data.len() + 2 * picks.len(),
            Op::Zip { left, right, .. } => left.len() + right.len(),
            Op::Select(operands) => operands.iter().map(Operand::len).sum(),
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

    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        let all = self.layout.nodes.iter().flat_map(|n| match &n.op {
            Op::Matrix { matrix, .. } => [Some(&**matrix), None],
            Op::Recurrent(cell) => [Some(&*cell.matrix), cell.candidate.as_deref()],
            _ => [None; 2],
        });
        all.flatten()
    }

    /// Returns how many samples run through the network together. Weights that stay in the cache
    /// need not be used often, so the values of a sequence can stay there too.
    fn block(&self) -> usize {
        let values: usize = self.layout.buffers.iter().sum();
        if self.bytes() > WEIGHTS_CACHED {
            return BLOCK_MAX;
        }
        (VALUES_CACHED / (4 * values).max(1)).clamp(BLOCK_MIN, BLOCK_MAX)
    }

    /// Returns what the products of `block` samples need of a worker's memory.
    fn gemm(&self, block: usize) -> GemmSizes {
        let mut sizes = GemmSizes::default();
        for node in &self.layout.nodes {
            match &node.op {
                Op::Matrix { rows, matrix } => sizes.add_matrix(rows * block, matrix),
                Op::Recurrent(cell) => {
                    sizes.add_matrix(block, &cell.matrix);
                    cell.candidate.iter().for_each(|matrix| sizes.add_matrix(block, matrix));
                }
                Op::Products { m, k, n, .. } => {
                    sizes.add_packed(ProductShape { m: *m, k: *k, n: *n });
                }
                Op::Pairs { rows, k, .. } => {
                    sizes.add_values(pairs::memory(rows.iter().sum(), *k));
                }
                _ => {}
            }
        }
        sizes
    }

    /// Creates the memory for runs of up to `batch_max` samples.
    pub fn scratch(&self, batch_max: usize) -> PlanScratch {
        let block = batch_max.min(self.block());
        let buffers = self.layout.buffers.iter().map(|w| vec![0.0; w * block]).collect();
        let state = vec![0.0; self.state_max * block];
        let (gemm, failed) = (GemmScratch::new(self.gemm(block)), vec![false; block]);
        PlanScratch { block, buffers, gemm, state, failed }
    }

    /// Returns the bytes of the memory for runs of up to `batch_max` samples.
    pub fn scratch_bytes(&self, batch_max: usize) -> usize {
        let floats = self.layout.buffers.iter().sum::<usize>() + self.state_max;
        let block = batch_max.min(self.block());
        (4 * floats + 1) * block + GemmScratch::bytes(self.gemm(block))
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
        let blocks = batch.div_ceil(scratch.block.max(1));
        for block in 0..blocks {
            let (first, end) = (block * batch / blocks, (block + 1) * batch / blocks);
            if self.has_checks {
                scratch.failed.fill(false);
            }
            for (number, node) in self.layout.nodes.iter().enumerate() {
                self.step(node, number, first..end, inputs, scratch);
            }

            let width = self.outputs();
            let from = self.value(self.layout.output, first, end - first, inputs, &scratch.buffers);
            let out = &mut out[first * width..end * width];
            out.copy_from_slice(from);
            if self.has_checks {
                let samples = out.chunks_exact_mut(width).zip(&scratch.failed);
                samples.filter(|(_, failed)| **failed).for_each(|(out, _)| out.fill(f32::NAN));
            }
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

    /// Runs `node`, which has this number, for some samples.
    fn step<I: AsRef<[f32]>>(
        &self,
        node: &Node,
        number: usize,
        samples: std::ops::Range<usize>,
        inputs: &[I],
        scratch: &mut PlanScratch,
    ) {
        let (first, n, patterns) = (samples.start, samples.len(), &self.patterns[number]);
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
                debug_assert!(out.len() == n * count * m * columns);
                let shape = ProductShape { m: *m, k: *k, n: *columns };
                products(self.isa, shape, *transposed, [read(0), read(1)], out, &mut scratch.gemm);
            }
            Op::Pairs { rows, k, picks } => {
                let pairs = Pairs { rows, k: *k, picks };
                for (sample, out) in out.chunks_exact_mut(width).enumerate() {
                    let part = |i: usize| &read(i)[sample * rows[i] * k..][..rows[i] * k];
                    pairs.run(part, out, self.isa, scratch.gemm.packed());
                }
            }
            Op::Map(map) => {
                // The layout gives operand and result one buffer if the node can work in place.
                if self.layout.places[node.inputs[0]] != Place::Buffer(buffer) {
                    out.copy_from_slice(read(0));
                }
                elementwise::map(self.isa, *map, out);
            }
            Op::Zip { zip, left, right } => {
                let sides = [left.side(read, patterns[0]), right.side(read, patterns[1])];
                elementwise::zip(self.isa, *zip, sides, width, out);
            }
            Op::Select(operands) => {
                let side = |i: usize| operands[i].side(read, patterns[i]);
                elementwise::select([side(0), side(1), side(2)], width, out);
            }
            Op::Sum { outer, n: count, inner, divisor } => {
                debug_assert!(read(0).len() == n * outer * count * inner);
                sum(self.isa, read(0), *count, *inner, *divisor, out);
            }
            Op::Fold { fold: by, n, inner } => fold(self.isa, *by, read(0), *n, *inner, out),
            Op::Softmax { n, inner } => softmax(self.isa, read(0), *n, *inner, out),
            Op::Recurrent(cell) => {
                let operands = Operands::of(cell, read);
                let memory = &mut scratch.state[..n * cell.state_width()];
                cell.run(self.isa, &operands, out, memory, &mut scratch.gemm);
            }
            Op::Concat { outer, parts } => {
                debug_assert!(parts.iter().sum::<usize>() * outer == width);
                concat(parts, read, out);
            }
            Op::Pick(picks) => {
                patterns[0].copy(picks, read(0), self.layout.widths[node.inputs[0]], out);
            }
            Op::Lookup { data, picks } => {
                let (data, positions) = (data.side(read, patterns[0]), read(node.inputs.len() - 1));
                elementwise::lookup(data, positions, picks, n, out);
            }
            Op::Order { n, inner, k, largest } => order(read(0), [*n, *inner, *k], *largest, out),
            Op::Check { range } => {
                if self.layout.places[node.inputs[0]] != Place::Buffer(buffer) {
                    out.copy_from_slice(read(0));
                }
                check(*range, width, out, &mut scratch.failed);
            }
        }

        scratch.buffers[buffer] = taken;
    }
}

/// Returns the patterns of the index tables of a node.
fn patterns_of(op: &Op) -> [Pattern; 3] {
    let of = |operand: &Operand| match operand {
        Operand::Value { picks: Some(picks), .. } => Pattern::of(picks),
        _ => Pattern::Runs(1),
    };
    let none = Pattern::Runs(1);
    match op {
        Op::Pick(picks) => [Pattern::of(picks), none, none],
        Op::Zip { left, right, .. } => [of(left), of(right), none],
        Op::Select(operands) => operands.each_ref().map(of),
        _ => [none; 3],
    }
}

impl Operand {
    fn len(&self) -> usize {
        match self {
            Self::Value { picks, .. } => picks.as_ref().map_or(0, Vec::len),
            Self::Constant(values) => values.len(),
        }
    }

    fn side<'a>(&'a self, read: impl Fn(usize) -> &'a [f32], pattern: Pattern) -> Side<'a> {
        match self {
            Self::Value { input, picks: None } => Side::Values(read(*input)),
            Self::Value { input, picks: Some(picks) } => Side::Picked(read(*input), picks, pattern),
            Self::Constant(values) => Side::Constant(values),
        }
    }
}

/// Multiplies pairs of matrices of one `shape`, one pair after the other; `out` has their products.
fn products(
    isa: Isa,
    shape: ProductShape,
    transposed: bool,
    [a, b]: [&[f32]; 2],
    out: &mut [f32],
    scratch: &mut GemmScratch,
) {
    let ProductShape { m, k, n } = shape;
    let pairs = a.chunks_exact(m * k).zip(b.chunks_exact(k * n));
    for ((a, b), out) in pairs.zip(out.chunks_exact_mut(m * n)) {
        pack_columns(b, k, n, transposed, scratch.packed());
        multiply_packed(shape, a, out, isa, scratch);
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
