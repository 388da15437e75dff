//! Functions of several values of one sample: sums, extremes, softmax and the GRU. Each takes its
//! values in their order, so its bits depend on neither the batch nor the instruction set. Nothing
//! here allocates.

use crate::dense::graph::functions::Zip;
use crate::dense::graph::onnx_graph::Fold;
use crate::dense::matrix::gemm::{GemmScratch, Matrix};
use crate::dense::matrix::math;
use crate::dense::matrix::microkernel;
use crate::simd::isa::Isa;
use crate::simd::{Job, Simd, dispatch};

/// Rows that are reduced at the same time. Each is still one chain in order.
const ROWS: usize = 8;

/// Reduces `[.., n, inner]` to `[.., inner]`: adds in the order of `n`, then divides by `divisor`.
pub(in crate::dense) fn sum(
    isa: Isa,
    from: &[f32],
    n: usize,
    inner: usize,
    divisor: f32,
    out: &mut [f32],
) {
    dispatch(isa, Reduce { from, n, inner, out, function: |sum, x| sum + x });
    if divisor != 1.0 {
        out.iter_mut().for_each(|sum| *sum /= divisor);
    }
}

/// Reduces `[.., n, inner]` to `[.., inner]` by `fold`, in the order of `n`.
pub(in crate::dense) fn fold(
    isa: Isa,
    fold: Fold,
    from: &[f32],
    n: usize,
    inner: usize,
    out: &mut [f32],
) {
    match fold {
        Fold::Max => {
            dispatch(isa, Reduce { from, n, inner, out, function: |a, b| Zip::Max.apply(a, b) });
        }
        Fold::Min => {
            dispatch(isa, Reduce { from, n, inner, out, function: |a, b| Zip::Min.apply(a, b) });
        }
        Fold::Product => {
            dispatch(isa, Reduce { from, n, inner, out, function: |a: f32, b| a * b });
        }
    }
}

/// A function of the values along the middle axis of `[.., n, inner]`.
struct Reduce<'a, F> {
    from: &'a [f32],
    n: usize,
    inner: usize,
    out: &'a mut [f32],
    function: F,
}

impl<F: Fn(f32, f32) -> f32> Job for Reduce<'_, F> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { from, n, inner, out, function: f } = self;
        if inner == 1 {
            let (blocks, rest) = out.as_chunks_mut::<ROWS>();
            let (in_blocks, in_rest) = from.split_at(blocks.len() * ROWS * n);
            for (rows, out) in in_blocks.chunks_exact(ROWS * n).zip(blocks) {
                *out = reduce_rows(rows, n, &f);
            }
            for (row, out) in in_rest.chunks_exact(n).zip(rest) {
                *out = row[1..].iter().fold(row[0], |sum, x| f(sum, *x));
            }
            return;
        }
        for (from, out) in from.chunks_exact(n * inner).zip(out.chunks_exact_mut(inner)) {
            let (head, rest) = from.split_at(inner);
            out.copy_from_slice(head);
            for row in rest.chunks_exact(inner) {
                out.iter_mut().zip(row).for_each(|(sum, x)| *sum = f(*sum, *x));
            }
        }
    }
}

/// Reduces each of `ROWS` rows of `n` values.
#[inline(always)]
fn reduce_rows(rows: &[f32], n: usize, f: impl Fn(f32, f32) -> f32) -> [f32; ROWS] {
    let rows: [&[f32]; ROWS] = std::array::from_fn(|r| &rows[r * n..][..n]);
    let mut sums = rows.map(|row| row[0]);
    for i in 1..n {
        for (sum, row) in sums.iter_mut().zip(rows) {
            *sum = f(*sum, row[i]);
        }
    }
    sums
}

/// Computes `e^x` divided by the sum of these over the middle axis of `[.., n, inner]`. The largest
/// value is subtracted first, so nothing overflows.
pub(in crate::dense) fn softmax(isa: Isa, from: &[f32], n: usize, inner: usize, out: &mut [f32]) {
    if inner == 1 {
        dispatch(isa, SoftmaxRows { from, n, out });
        return;
    }
    for (from, out) in from.chunks_exact(n * inner).zip(out.chunks_exact_mut(n * inner)) {
        for i in 0..inner {
            let column = from[i..].iter().step_by(inner);
            let most = column.clone().fold(f32::NEG_INFINITY, |a, &b| Zip::Max.apply(a, b));
            out[i..].iter_mut().step_by(inner).zip(column).for_each(|(o, x)| *o = x - most);
        }
    }
    microkernel::each(isa, out, math::exp);
    for out in out.chunks_exact_mut(n * inner) {
        for i in 0..inner {
            let sum = out[i..].iter().step_by(inner).fold(0.0, |sum, x| sum + x);
            out[i..].iter_mut().step_by(inner).for_each(|x| *x /= sum);
        }
    }
}

/// Softmax of rows of `n` values.
struct SoftmaxRows<'a> {
    from: &'a [f32],
    n: usize,
    out: &'a mut [f32],
}

impl Job for SoftmaxRows<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { from, n, out } = self;
        for (from, out) in from.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
            let most = from.iter().fold(from[0], |a, &b| Zip::Max.apply(a, b));
            // No closure: it might be compiled without the family's instructions.
            for (o, x) in out.iter_mut().zip(from) {
                *o = math::exp(x - most);
            }
        }
        let blocks = out.len() / n / ROWS;
        let (in_blocks, rest) = out.split_at_mut(blocks * ROWS * n);
        for rows in in_blocks.chunks_exact_mut(ROWS * n) {
            let sums = reduce_rows(rows, n, |sum, x| sum + x);
            for (row, sum) in rows.chunks_exact_mut(n).zip(sums) {
                row.iter_mut().for_each(|x| *x /= sum);
            }
        }
        for row in rest.chunks_exact_mut(n) {
            let sum = row[1..].iter().fold(row[0], |sum, x| sum + x);
            row.iter_mut().for_each(|x| *x /= sum);
        }
    }
}

/// A gated recurrent unit: `h' = (1 - z) h~ + z h`, `h~ = tanh(x + r (h R))`.
pub(in crate::dense) struct Gru<'a> {
    pub steps: usize,
    pub hidden: usize,
    /// `[hidden, 3 * hidden]`: update gate `z`, reset gate `r`, candidate `h~`.
    pub matrix: &'a Matrix,
    pub isa: Isa,
}

impl Gru<'_> {
    /// Returns the floats of one sample's state and its products.
    pub fn state_width(hidden: usize) -> usize {
        4 * hidden
    }

    /// Runs all samples of `inputs` `[samples, steps, 3 * hidden]`. Writes the state after each
    /// step to `out` `[samples, steps, hidden]`. The first state is `first` `[samples, hidden]` or
    /// zero.
    pub fn run(
        &self,
        inputs: &[f32],
        first: Option<&[f32]>,
        out: &mut [f32],
        state: &mut [f32],
        gemm: &mut GemmScratch,
    ) {
        let (hidden, columns) = (self.hidden, 3 * self.hidden);
        let samples = state.len() / Self::state_width(hidden);
        let (states, gates) = state.split_at_mut(samples * hidden);
        match first {
            Some(first) => states.copy_from_slice(first),
            None => states.fill(0.0),
        }

        for step in 0..self.steps {
            self.matrix.multiply(samples, states, gates, self.isa, gemm);
            let rows = states.chunks_exact_mut(hidden).zip(gates.chunks_exact_mut(columns));
            for (sample, (state, gates)) in rows.enumerate() {
                let at = sample * self.steps + step;
                let inputs = &inputs[at * columns..][..columns];
                self.advance(inputs, state, gates);
                out[at * hidden..][..hidden].copy_from_slice(state);
            }
        }
    }

    /// Replaces the state of one sample by its next one.
    fn advance(&self, inputs: &[f32], state: &mut [f32], gates: &mut [f32]) {
        let hidden = self.hidden;
        let (open, candidate) = gates.split_at_mut(2 * hidden);
        let (of_gates, of_candidate) = inputs.split_at(2 * hidden);
        open.iter_mut().zip(of_gates).for_each(|(gate, x)| *gate += x);
        microkernel::each(self.isa, open, math::sigmoid);

        let (update, reset) = open.split_at(hidden);
        for ((c, x), r) in candidate.iter_mut().zip(of_candidate).zip(reset) {
            *c = x + r * *c;
        }
        microkernel::each(self.isa, candidate, math::tanh);
        for ((h, c), z) in state.iter_mut().zip(candidate).zip(update) {
            *h = (1.0 - z) * *c + z * *h;
        }
    }
}
