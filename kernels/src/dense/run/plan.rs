//! The run of a network on the CPU, node after node, in blocks of samples. A run allocates nothing:
//! it works in the worker's buffers. This file knows no ONNX.

use crate::dense::graph::node::{Node, Op, Operand};
use crate::dense::graph::tensor::Id;
use crate::dense::matrix::blocks::{Start, Strides};
use crate::dense::matrix::gemm::{
    GemmScratch, GemmSizes, Matrix, Rows, multiply_packed, pack_columns,
};
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
    /// Requests that the buffers of shared values hold, and samples of an unshared run.
    block: usize,
    /// Samples that the other buffers hold, at least as many.
    block_own: usize,
    buffers: Vec<Vec<f32>>,
    gemm: GemmScratch,
    state: Vec<f32>,
    /// For each sample of the block, whether a check failed, and for each request of it.
    failed: [Vec<bool>; 2],
    /// For each sample of the block, the number of its request among those of the block.
    requests: Vec<u32>,
}

/// Some neighbours: `n` from `first` on of those in an input, and from `at` on of those in a
/// buffer.
#[derive(Clone, Copy)]
struct Range {
    first: usize,
    at: usize,
    n: usize,
}

/// What a node computes at once: some samples and the requests that they belong to.
#[derive(Clone, Copy)]
struct Span {
    samples: Range,
    requests: Range,
}

impl Span {
    /// Returns the samples from `first` to `end`, each as a request of its own.
    fn each(first: usize, end: usize) -> Self {
        let all = Range { first, at: 0, n: end - first };
        Self { samples: all, requests: all }
    }

    /// Returns the `n` samples from `at` of the block on, all of request `request` of the block.
    fn of_request(&self, at: usize, n: usize, request: usize) -> Self {
        Self {
            samples: Range { first: self.samples.first + at, at, n },
            requests: Range { first: self.requests.first + request, at: request, n: 1 },
        }
    }
}

/// Multiply-adds of the network: those of one sample, and those of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MultiplyAdds {
    /// For each sample.
    pub sample: u64,
    /// Once a request, for values that only shared inputs reach.
    pub request: u64,
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
    fn block(&self, values: usize) -> usize {
        if self.bytes() > WEIGHTS_CACHED {
            return BLOCK_MAX;
        }
        (VALUES_CACHED / (4 * values).max(1)).clamp(BLOCK_MIN, BLOCK_MAX)
    }

    /// Returns how many requests, and how many samples, a memory for `batch_max` samples holds at
    /// a time.
    fn blocks(&self, batch_max: usize) -> [usize; 2] {
        let Layout { buffers, shared_buffers, .. } = &self.layout;
        let own = buffers.iter().zip(shared_buffers).filter(|(_, shared)| !**shared);
        let own = own.map(|(width, _)| width).sum();
        [buffers.iter().sum(), own].map(|values| batch_max.min(self.block(values)))
    }

    /// Returns the multiply-adds of a sample and of a request.
    pub fn multiply_adds(&self) -> MultiplyAdds {
        let Layout { nodes, widths, shared, .. } = &self.layout;
        let sum = |of_requests: bool| {
            let nodes = nodes.iter().filter(|node| shared[node.output] == of_requests);
            let each = nodes.map(|node| match (&node.op, widths[node.output]) {
                // It also adds a row to the sums that it continues.
                (Op::Matrix { .. }, width) if node.inputs.len() == 3 => {
                    node.op.multiply_adds(width) + width as u64
                }
                (op, width) => op.multiply_adds(width),
            });
            each.sum()
        };
        MultiplyAdds { sample: sum(false), request: sum(true) }
    }

    /// Returns the floats of the buffers for blocks of these sizes.
    fn widths(&self, [block, block_own]: [usize; 2]) -> impl Iterator<Item = usize> {
        let buffers = self.layout.buffers.iter().zip(&self.layout.shared_buffers);
        buffers.map(move |(width, shared)| width * if *shared { block } else { block_own })
    }

    /// Returns what the products of `block` samples need of a worker's memory.
    fn gemm(&self, block: usize) -> GemmSizes {
        let mut sizes = GemmSizes::default();
        for node in &self.layout.nodes {
            match &node.op {
                Op::Matrix { rows, matrix } => {
                    sizes.add_matrix(rows * block, matrix);
                    if node.inputs.len() > 1 {
                        sizes.add_start();
                    }
                }
                Op::Recurrent(cell) => {
                    sizes.add_matrix(block, &cell.matrix);
                    cell.candidate.iter().for_each(|matrix| sizes.add_matrix(block, matrix));
                }
                Op::Products { m, k, n, .. } => {
                    // All samples of a request may share the second operand.
                    let rows = if self.is_mixed(node) { m * block } else { *m };
                    sizes.add_packed(ProductShape { m: rows, k: *k, n: *n });
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
        let [block, block_own] = self.blocks(batch_max);
        let buffers = self.widths([block, block_own]).map(|width| vec![0.0; width]).collect();
        let state = vec![0.0; self.state_max * block_own];
        let gemm = GemmScratch::new(self.gemm(block_own));
        let failed = [vec![false; block_own], vec![false; block]];
        let requests = vec![0; block_own];
        PlanScratch { block, block_own, buffers, gemm, state, failed, requests }
    }

    /// Returns the bytes of the memory for runs of up to `batch_max` samples.
    pub fn scratch_bytes(&self, batch_max: usize) -> usize {
        let [block, block_own] = self.blocks(batch_max);
        let floats = self.widths([block, block_own]).sum::<usize>() + self.state_max * block_own;
        4 * floats + 5 * block_own + block + GemmScratch::bytes(self.gemm(block_own))
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
        // Each sample is a request.
        scratch.requests.iter_mut().enumerate().for_each(|(i, own)| *own = i as u32);
        let blocks = batch.div_ceil(scratch.block.max(1));
        for block in 0..blocks {
            let span = Span::each(block * batch / blocks, (block + 1) * batch / blocks);
            scratch.clear_failed(self.has_checks);
            for (number, node) in self.layout.nodes.iter().enumerate() {
                self.step(node, number, span, inputs, scratch);
            }
            self.write(span, inputs, out, scratch);
        }
    }

    /// Runs requests whose samples end at `ends`. A shared input starts with `[requests, width]`,
    /// another one with `[samples, width]`, and `out` is `[samples, outputs]`.
    pub fn run_requests<I: AsRef<[f32]>>(
        &self,
        ends: &[usize],
        inputs: &[I],
        out: &mut [f32],
        scratch: &mut PlanScratch,
    ) {
        if ends.iter().enumerate().all(|(i, &end)| end == i + 1) {
            return self.run(ends.len(), inputs, out, scratch);
        }
        let start = |request: usize| if request == 0 { 0 } else { ends[request - 1] };
        let mut request = 0;
        while request < ends.len() {
            let fits = |last: &usize| {
                *last - request < scratch.block && ends[*last] - start(request) <= scratch.block_own
            };
            let last = (request + 1..ends.len()).take_while(fits).last().unwrap_or(request);
            let requests = Range { first: request, at: 0, n: last + 1 - request };
            self.run_some(requests, [start(request), ends[last]], ends, inputs, out, scratch);
            request = last + 1;
        }
    }

    /// Runs the requests `requests`, whose samples are those from `first` to `end`: as many as the
    /// memory holds, or one of any length.
    fn run_some<I: AsRef<[f32]>>(
        &self,
        requests: Range,
        [first, end]: [usize; 2],
        ends: &[usize],
        inputs: &[I],
        out: &mut [f32],
        scratch: &mut PlanScratch,
    ) {
        let (samples, nodes) = (end - first, &self.layout.nodes);
        let shared = nodes.iter().take_while(|node| self.layout.shared[node.output]).count();
        scratch.clear_failed(self.has_checks);
        let span = Span { samples: requests, requests };
        for (number, node) in nodes[..shared].iter().enumerate() {
            self.step(node, number, span, inputs, scratch);
        }

        let blocks = samples.div_ceil(scratch.block_own.max(1));
        for block in 0..blocks {
            let at = first + block * samples / blocks;
            let n = first + (block + 1) * samples / blocks - at;
            let span = Span { samples: Range { first: at, at: 0, n }, requests };
            let mut request = requests.first;
            for (i, own) in scratch.requests[..n].iter_mut().enumerate() {
                while ends[request] <= at + i {
                    request += 1;
                }
                *own = (request - requests.first) as u32;
            }
            if self.has_checks {
                scratch.failed[0].fill(false);
            }
            for (number, node) in nodes.iter().enumerate().skip(shared) {
                self.step_samples(node, number, span, inputs, scratch);
            }
            self.write(span, inputs, out, scratch);
        }
    }

    /// Runs `node` for the samples of `span`. A node that mixes shared and own values runs for each
    /// request, or for each sample.
    fn step_samples<I: AsRef<[f32]>>(
        &self,
        node: &Node,
        number: usize,
        span: Span,
        inputs: &[I],
        scratch: &mut PlanScratch,
    ) {
        if !self.is_mixed(node) || matches!(node.op, Op::Matrix { .. }) {
            return self.step(node, number, span, inputs, scratch);
        }
        let by_request =
            matches!(node.op, Op::Zip { .. } | Op::Concat { .. } | Op::Products { .. });
        let mut at = 0;
        while at < span.samples.n {
            let request = scratch.requests[at];
            let same = scratch.requests[at..span.samples.n].iter().take_while(|r| **r == request);
            let n = if by_request { same.count() } else { 1 };
            let part = span.of_request(at, n, request as usize);
            self.step(node, number, part, inputs, scratch);
            at += n;
        }
    }

    /// Returns whether the node reads both shared and own values.
    fn is_mixed(&self, node: &Node) -> bool {
        let shared = &self.layout.shared;
        !shared[node.output] && node.inputs.iter().any(|&id| shared[id])
    }

    /// Writes the result of the samples of `span` to `out`.
    fn write<I: AsRef<[f32]>>(
        &self,
        span: Span,
        inputs: &[I],
        out: &mut [f32],
        scratch: &PlanScratch,
    ) {
        let (width, Range { first, n, .. }) = (self.outputs(), span.samples);
        let from = self.value(self.layout.output, span, inputs, &scratch.buffers);
        let out = &mut out[first * width..(first + n) * width];
        let requests = || scratch.requests[..n].iter().map(|request| *request as usize);
        if self.layout.shared[self.layout.output] {
            for (out, request) in out.chunks_exact_mut(width).zip(requests()) {
                out.copy_from_slice(&from[request * width..][..width]);
            }
        } else {
            out.copy_from_slice(from);
        }
        if self.has_checks {
            let [failed, failed_requests] = &scratch.failed;
            for ((out, request), failed) in out.chunks_exact_mut(width).zip(requests()).zip(failed)
            {
                if *failed || failed_requests[request] {
                    out.fill(f32::NAN);
                }
            }
        }
    }

    /// Returns a value of the samples of `span`, or of its requests. A buffer holds only those of
    /// the block, an input holds all.
    fn value<'a, I: AsRef<[f32]>>(
        &self,
        id: Id,
        span: Span,
        inputs: &'a [I],
        buffers: &'a [Vec<f32>],
    ) -> &'a [f32] {
        let width = self.layout.widths[id];
        let Range { first, at, n } =
            if self.layout.shared[id] { span.requests } else { span.samples };
        match self.layout.places[id] {
            Place::Input(i) => &inputs[i].as_ref()[first * width..(first + n) * width],
            Place::Buffer(b) => &buffers[b][at * width..(at + n) * width],
        }
    }

    /// Runs `node`, which has this number, for the samples or the requests of `span`.
    fn step<I: AsRef<[f32]>>(
        &self,
        node: &Node,
        number: usize,
        span: Span,
        inputs: &[I],
        scratch: &mut PlanScratch,
    ) {
        let is_shared = self.layout.shared[node.output];
        let Range { at, n, .. } = if is_shared { span.requests } else { span.samples };
        let patterns = &self.patterns[number];
        let Place::Buffer(buffer) = self.layout.places[node.output] else { return };
        // The buffer is taken out while it is written, so that the other buffers can be read. Its
        // empty replacement allocates nothing.
        let mut taken = std::mem::take(&mut scratch.buffers[buffer]);
        let width = self.layout.widths[node.output];
        let out = &mut taken[at * width..(at + n) * width];
        let buffers = &scratch.buffers;
        let read = |i: usize| self.value(node.inputs[i], span, inputs, buffers);

        match &node.op {
            Op::Matrix { .. } | Op::Products { .. } | Op::Pairs { .. } => {
                self.multiply(node, span, inputs, out, scratch);
            }
            Op::Map(map) => {
                // The layout gives operand and result one buffer if the node can work in place.
                if self.layout.places[node.inputs[0]] != Place::Buffer(buffer) {
                    out.copy_from_slice(read(0));
                }
                elementwise::map(self.isa, *map, out);
            }
            Op::Zip { zip, left, right } => {
                let mut sides = [left.side(read, patterns[0]), right.side(read, patterns[1])];
                for (side, operand) in sides.iter_mut().zip([left, right]) {
                    if operand.input().is_some_and(|i| self.is_one(node.inputs[i], span)) {
                        *side = side.constant();
                    }
                }
                elementwise::zip(self.isa, *zip, sides, width, out);
            }
            Op::Select(operands) => {
                let side = |i: usize| operands[i].side(read, patterns[i]);
                elementwise::select(self.isa, [side(0), side(1), side(2)], width, out);
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
            Op::Concat { parts, .. } => concat(parts, read, out),
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
                check(*range, width, out, &mut scratch.failed[usize::from(is_shared)][at..]);
            }
            Op::Joined(_) | Op::Crossed { .. } => unreachable!("a node of a GPU's layout"),
        }

        scratch.buffers[buffer] = taken;
    }

    /// Runs a product for the samples or the requests of `span`.
    fn multiply<I: AsRef<[f32]>>(
        &self,
        node: &Node,
        span: Span,
        inputs: &[I],
        out: &mut [f32],
        scratch: &mut PlanScratch,
    ) {
        let (width, buffers) = (self.layout.widths[node.output], &scratch.buffers);
        let read = |i: usize| self.value(node.inputs[i], span, inputs, buffers);
        match &node.op {
            Op::Matrix { rows, matrix } => {
                let start = node.inputs.get(1).map(|&sums| Start {
                    values: read(1),
                    rows: *rows,
                    requests: self.layout.shared[sums].then_some(&scratch.requests),
                    repeated: node.inputs.get(2).map(|_| read(2)),
                });
                let rows = Rows { m: out.len() / matrix.n, a: read(0), start };
                matrix.multiply_rows(rows, out, self.isa, &mut scratch.gemm);
            }
            Op::Products { count, m, k, n: columns, transposed } => {
                let shape = ProductShape { m: *m, k: *k, n: *columns };
                let product = Product { shape, count: *count, transposed: *transposed };
                let (ones, sides) = (
                    [self.is_one(node.inputs[0], span), self.is_one(node.inputs[1], span)],
                    [read(0), read(1)],
                );
                product.run(self.isa, ones, sides, out, &mut scratch.gemm);
            }
            Op::Pairs { rows, k, picks } => {
                let pairs = Pairs { rows, k: *k, picks };
                for (sample, out) in out.chunks_exact_mut(width).enumerate() {
                    let part = |i: usize| &read(i)[sample * rows[i] * k..][..rows[i] * k];
                    pairs.run(part, out, self.isa, scratch.gemm.packed());
                }
            }
            _ => unreachable!("the caller passes products only"),
        }
    }

    /// Returns whether the samples of `span`, which are several, read one shared value.
    fn is_one(&self, id: Id, span: Span) -> bool {
        self.layout.shared[id] && span.requests.n == 1 && span.samples.n != 1
    }
}

impl PlanScratch {
    fn clear_failed(&mut self, has_checks: bool) {
        if has_checks {
            self.failed.iter_mut().for_each(|failed| failed.fill(false));
        }
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

    fn input(&self) -> Option<usize> {
        if let Self::Value { input, .. } = self { Some(*input) } else { None }
    }

    fn side<'a>(&'a self, read: impl Fn(usize) -> &'a [f32], pattern: Pattern) -> Side<'a> {
        match self {
            Self::Value { input, picks: None } => Side::Values(read(*input)),
            Self::Value { input, picks: Some(picks) } => Side::Picked(read(*input), picks, pattern),
            Self::Constant(values) => Side::Constant(values),
        }
    }
}

/// `count` products a sample of two computed matrices.
#[derive(Clone, Copy)]
struct Product {
    shape: ProductShape,
    count: usize,
    transposed: bool,
}

impl Product {
    /// Computes the products of all samples. `ones` says which side has the matrices of one request
    /// in place of each sample's.
    fn run(
        self,
        isa: Isa,
        ones: [bool; 2],
        [a, b]: [&[f32]; 2],
        out: &mut [f32],
        scratch: &mut GemmScratch,
    ) {
        let ProductShape { m, k, n } = self.shape;
        let [of_a, of_b, width] = [m * k, k * n, m * n].map(|len| self.count * len);
        match ones {
            [false, true] if self.count == 1 || m == 1 => {
                self.by_request(isa, [a, b], out, scratch);
            }
            [false, false] => self.in_order(isa, [a, b], out, scratch),
            _ => {
                for (sample, out) in out.chunks_exact_mut(width).enumerate() {
                    let a = &a[if ones[0] { 0 } else { sample * of_a }..][..of_a];
                    let b = &b[if ones[1] { 0 } else { sample * of_b }..][..of_b];
                    self.in_order(isa, [a, b], out, scratch);
                }
            }
        }
    }

    /// Multiplies pairs of matrices, one pair after the other; `out` has their products.
    fn in_order(self, isa: Isa, [a, b]: [&[f32]; 2], out: &mut [f32], scratch: &mut GemmScratch) {
        let ProductShape { m, k, n } = self.shape;
        let pairs = a.chunks_exact(m * k).zip(b.chunks_exact(k * n));
        for ((a, b), out) in pairs.zip(out.chunks_exact_mut(m * n)) {
            pack_columns(b, k, n, self.transposed, scratch.packed());
            multiply_packed(self.shape, Strides { a: k, out: n }, a, out, isa, scratch);
        }
    }

    /// Multiplies the matrices of each sample by those of one request. The rows of all samples are
    /// one product, as a sample has one matrix, or matrices of one row.
    fn by_request(self, isa: Isa, [a, b]: [&[f32]; 2], out: &mut [f32], scratch: &mut GemmScratch) {
        let (ProductShape { k, n, .. }, count) = (self.shape, self.count);
        let shape = ProductShape { m: out.len() / (count * n), k, n };
        let strides = Strides { a: count * k, out: count * n };
        for (i, b) in b.chunks_exact(k * n).enumerate() {
            pack_columns(b, k, n, self.transposed, scratch.packed());
            multiply_packed(shape, strides, &a[i * k..], &mut out[i * n..], isa, scratch);
        }
    }
}

/// Copies the operands side by side into `out` `[.., sum of parts]`: `parts[i]` values of operand
/// `i`, which `read(i)` returns, at a time.
fn concat<'a>(parts: &[usize], read: impl Fn(usize) -> &'a [f32], out: &mut [f32]) {
    let stride: usize = parts.iter().sum();
    debug_assert!(out.len().is_multiple_of(stride));
    let mut first = 0;
    for (i, &part) in parts.iter().enumerate() {
        let (from, to) = (read(i), out.chunks_exact_mut(stride));
        let copy = |(to, from): (&mut [f32], &[f32])| {
            to[first..first + part].copy_from_slice(from);
        };
        match from.len() / part < to.len() {
            // All samples take the values of one request.
            true => to.zip(from.chunks_exact(part).cycle()).for_each(copy),
            false => to.zip(from.chunks_exact(part)).for_each(copy),
        }
        first += part;
    }
}
