//! Products with a matrix of one column. The lanes of a vector are rows here: in `microkernel.rs`
//! they are columns, all but one of which would be padding. Each sum is the same chain of fused
//! multiply-adds, so the bits are equal. Nothing here allocates.

use crate::dense::matrix::math;
use crate::dense::matrix::microkernel::Finish;
use crate::dense::matrix::transpose::transpose;
use crate::simd::{Job, Simd};

/// Rows whose sums are computed together. A product of fewer rows goes through `microkernel.rs`.
pub(in crate::dense) const ROWS: usize = 32;

/// A product `[m, k] x [k, 1]`.
pub(in crate::dense) struct Column<'a> {
    /// `[m, k]`.
    pub a: &'a [f32],
    pub k: usize,
    /// The panel of the column: a weight at the start of each of `k` rows.
    pub panel: &'a [f32],
    pub finish: Finish<'a>,
    /// `[m]`.
    pub out: &'a mut [f32],
    /// Memory for `[k, ROWS]`.
    pub transposed: &'a mut [f32],
}

impl Job for Column<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { a, k, panel, finish, out, transposed } = self;
        let transposed = &mut transposed[..k * ROWS];
        let weights = panel.chunks_exact(panel.len() / k);
        for (rows, out) in a.chunks(ROWS * k).zip(out.chunks_mut(ROWS)) {
            // The last rows may be fewer: the sums of the other lanes are never stored.
            transpose(rows, k, transposed, ROWS);
            let mut sums = [0.0f32; ROWS];
            for (values, weight) in transposed.chunks_exact(ROWS).zip(weights.clone()) {
                let lanes = sums.iter_mut().zip(values);
                lanes.for_each(|(sum, x)| *sum = x.mul_add(weight[0], *sum));
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                let value = sum.mul_add(finish.scale[0], finish.bias[0]);
                *out = if finish.relu { math::relu(value) } else { value };
            }
        }
    }
}
