//! Functions of several values of one sample: sums, extremes, softmax and orders. Each takes its
//! values in their order, so its bits depend on neither the batch nor the instruction set. Nothing
//! here allocates.

use crate::dense::graph::functions::Zip;
use crate::dense::graph::node::Fold;
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

/// Most values of which each one's rank is counted.
const COUNTED_MAX: usize = 128;

/// Writes the positions of the `k` best values along the middle axis of `[.., n, inner]` to
/// `[.., k, inner]`, the best first. Of equal values the first is better; NaN is the worst.
pub(in crate::dense) fn order(from: &[f32], sizes: [usize; 3], largest: bool, out: &mut [f32]) {
    let [n, inner, k] = sizes;
    // A whole number with the order of the values. It is the least one for NaN.
    let key = |x: f32| {
        let x = if largest { x } else { -x } + 0.0; // -0.0 equals 0.0
        let bits = x.to_bits() as i32;
        if x.is_nan() { i32::MIN } else { bits ^ (((bits >> 31) as u32) >> 1) as i32 }
    };
    let mut keys = [0; COUNTED_MAX];
    for (from, out) in from.chunks_exact(n * inner).zip(out.chunks_exact_mut(k * inner)) {
        for column in 0..inner {
            let values = from[column..].iter().step_by(inner);
            if n > COUNTED_MAX || n > 8 * k {
                let mut last = None;
                for rank in 0..k {
                    let all = values.clone().enumerate().map(|(i, x)| (key(*x), -(i as i64)));
                    last = all.filter(|x| last.is_none_or(|last| *x < last)).max();
                    out[rank * inner + column] = last.map_or(f32::NAN, |(_, i)| -i as f32);
                }
                continue;
            }

            // The rank of a value is the number of better ones: a count without a branch.
            keys.iter_mut().zip(values).for_each(|(to, x)| *to = key(*x));
            for i in 0..n {
                let (before, behind) = (&keys[..i], &keys[i + 1..n]);
                let first = before.iter().map(|x| u32::from(*x >= keys[i])).sum::<u32>();
                let rank = behind.iter().map(|x| u32::from(*x > keys[i])).sum::<u32>() + first;
                // A rank of `k` or more has no place in the result.
                out.get_mut(rank as usize * inner + column)
                    .into_iter()
                    .for_each(|to| *to = i as f32);
            }
        }
    }
}

/// Sets the flag of each sample with a value outside of the range, or NaN.
pub(in crate::dense) fn check(range: [f32; 2], width: usize, values: &[f32], failed: &mut [bool]) {
    let range = range[0]..=range[1];
    for (values, failed) in values.chunks_exact(width).zip(failed) {
        *failed |= !values.iter().all(|x| range.contains(x));
    }
}
