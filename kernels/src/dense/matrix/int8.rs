//! Matrix products that compute in int8. The weights of a column share a scale. Each row of the
//! left operand is quantized by itself, so a result does not depend on the other rows of the batch.
//! A sum of products is an exact integer, and what follows it is the same f32 arithmetic on every
//! instruction set. A product never allocates.

use crate::dense::matrix::int8_kernel::{Int8Tile, bytes_for};
use crate::dense::matrix::microkernel::{Finish, ROWS_MAX};
use crate::dense::matrix::quantize::{GROUP, Quantize, RowScale};
use crate::dense::matrix::tiling::{ProductShape, next_panel, padded, panels, tiles};
use crate::simd::dispatch;
use crate::simd::huge_pages::Zeroed;
use crate::simd::isa::Isa;

/// Rows of weights at most, so that no sum overflows: each product is below 2^15.
pub(in crate::dense) const K_MAX: usize = 1 << 16;
/// Rows of the left operand that are quantized at a time.
const ROWS: usize = 96;
/// The greatest weight. -128 is left out, so that every weight has a negative.
const WEIGHT_MAX: f32 = 127.0;

/// Weights in panels, one after the other, each `[k / 4, width, 4]`: four weights of a column are
/// side by side, as the instructions take them.
pub(in crate::dense) struct Int8Panels {
    weights: Zeroed<i8>,
    /// The sum of each column's weights, padding included.
    column_sums: Vec<i32>,
}

/// The memory of one worker's quantized rows.
pub(in crate::dense) struct Int8Scratch {
    /// `[ROWS, k]`, with `k` padded.
    rows: Zeroed<u8>,
    scales: Vec<RowScale>,
}

impl Int8Scratch {
    /// Creates the memory for matrices of up to `k` rows.
    pub fn new(k: usize) -> Self {
        let scales = if k > 0 { vec![RowScale::default(); ROWS] } else { Vec::new() };
        Self { rows: Zeroed::new(ROWS * k.next_multiple_of(GROUP)), scales }
    }

    /// Returns the bytes of such a memory.
    pub fn bytes(k: usize) -> usize {
        let scales = if k > 0 { ROWS * size_of::<RowScale>() } else { 0 };
        ROWS * k.next_multiple_of(GROUP) + scales
    }
}

impl Int8Panels {
    /// Rounds and packs the weights `w(row, column)` of a matrix `[k, n]`. Writes the scale of each
    /// column to `scale`.
    pub fn pack(k: usize, n: usize, w: &dyn Fn(usize, usize) -> f32, scale: &mut [f32]) -> Self {
        let groups = k.div_ceil(GROUP);
        let mut weights = Zeroed::new(groups * GROUP * padded(n));
        let mut column_sums = vec![0; padded(n)];
        for (first, width) in panels(n) {
            let panel = &mut weights[first * groups * GROUP..];
            for column in first..n.min(first + width) {
                let most = (0..k).map(|i| w(i, column).abs()).fold(0.0, f32::max);
                let step = most / WEIGHT_MAX;
                scale[column] = if step >= f32::MIN_POSITIVE { step } else { 1.0 };
                for i in 0..k {
                    let weight = (w(i, column) / scale[column]).round() as i8;
                    let at = (i / GROUP * width + column - first) * GROUP + i % GROUP;
                    panel[at] = weight;
                    column_sums[column] += i32::from(weight);
                }
            }
        }
        Self { weights, column_sums }
    }

    /// Returns the rows `rows` of this matrix `[k, n]`. The columns keep their scales.
    pub fn with_rows(&self, k: usize, n: usize, rows: &[usize]) -> Self {
        let (from, to) = (k.div_ceil(GROUP), rows.len().div_ceil(GROUP));
        let mut weights = Zeroed::new(to * GROUP * padded(n));
        let mut column_sums = vec![0; padded(n)];
        for (first, width) in panels(n) {
            let at = |i: usize, j: usize| (i / GROUP * width + j) * GROUP + i % GROUP;
            let panel = &self.weights[first * from * GROUP..];
            let own = &mut weights[first * to * GROUP..];
            for column in 0..width {
                for (i, &row) in rows.iter().enumerate() {
                    own[at(i, column)] = panel[at(row, column)];
                    column_sums[first + column] += i32::from(panel[at(row, column)]);
                }
            }
        }
        Self { weights, column_sums }
    }

    /// Returns the bytes of weights and sums.
    pub fn bytes(&self) -> usize {
        self.weights.len() + 4 * self.column_sums.len()
    }

    /// Computes `out[m, n] = a[m, k] x self`, then `finish`, which is as wide as all panels.
    pub fn multiply(
        &self,
        shape: ProductShape,
        a: &[f32],
        out: &mut [f32],
        finish: Finish,
        isa: Isa,
        scratch: &mut Int8Scratch,
    ) {
        let ProductShape { m, k, n } = shape;
        let bytes = bytes_for(isa);
        let stride = k.next_multiple_of(GROUP);
        let parts = a[..m * k].chunks(ROWS * k).zip(out[..m * n].chunks_mut(ROWS * n));
        for (a, out) in parts {
            let rows = a.len() / k;
            let (to, scales) = (&mut scratch.rows[..rows * stride], &mut scratch.scales[..rows]);
            dispatch(isa, Quantize { a, k, bytes, to, stride, scales });
            self.multiply_rows(shape, &scratch.rows, &scratch.scales[..rows], out, finish, isa);
        }
    }

    /// Multiplies quantized rows, one for each of `scales`.
    fn multiply_rows(
        &self,
        shape: ProductShape,
        rows: &[u8],
        scales: &[RowScale],
        out: &mut [f32],
        finish: Finish,
        isa: Isa,
    ) {
        let ProductShape { k, n, .. } = shape;
        let (groups, stride) = (k.div_ceil(GROUP), k.next_multiple_of(GROUP));
        for (first, width) in panels(n) {
            let (scale, bias) = (&finish.scale[first..], &finish.bias[first..]);
            let panel = &self.weights[first * stride..][..width * stride];
            for (number, (row, count)) in tiles(scales.len(), ROWS_MAX).enumerate() {
                Int8Tile {
                    a: &rows[row * stride..],
                    scales: &scales[row..row + count],
                    groups,
                    panel,
                    width,
                    column_sums: &self.column_sums[first..],
                    out: &mut out[row * n + first..],
                    stride: n,
                    columns: width.min(n - first),
                    finish: Finish { scale, bias, relu: finish.relu },
                    // A single row is bound by memory and loads the next panel soon enough itself.
                    ahead: next_panel(panel, if scales.len() > 1 { number } else { usize::MAX }),
                }
                .run(isa);
            }
        }
    }
}
