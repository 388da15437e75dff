//! The machine's limit for pooled lookups: adds rows in plain memory at known positions, without
//! probes, decoding or validation. Only benchmarks use this file. They compare `FeatureView::query`
//! with this limit, which counts as 1.0.

use crate::simd::huge_pages::Zeroed;
use crate::simd::isa::Isa;
use crate::simd::prefetch::prefetch_l2;
use crate::simd::{Job, Simd, dispatch};

/// The rows of one table as f32, on huge pages.
pub struct GatherRows {
    dim: usize,
    values: Zeroed<f32>,
}

impl GatherRows {
    /// Creates a table `[rows, dim]` of small numbers.
    pub fn new(rows: usize, dim: usize) -> Self {
        let mut values = Zeroed::new(rows * dim);
        values.iter_mut().enumerate().for_each(|(i, v): (usize, &mut f32)| *v = (i % 1021) as f32);
        Self { dim, values }
    }

    /// Adds the rows of each bag of `hotness` `positions` into `out` `[batch, stride]` from
    /// `column` on.
    pub fn pool(
        &self,
        isa: Isa,
        positions: &[u64],
        hotness: usize,
        out: &mut [f32],
        stride: usize,
        column: usize,
    ) {
        dispatch(isa, Gather { rows: self, positions, hotness, out, stride, column });
    }

    #[inline(always)]
    fn row(&self, position: u64) -> &[f32] {
        &self.values[position as usize * self.dim..][..self.dim]
    }
}

struct Gather<'a> {
    rows: &'a GatherRows,
    positions: &'a [u64],
    hotness: usize,
    out: &'a mut [f32],
    stride: usize,
    column: usize,
}

impl Job for Gather<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        /// Prefetch distance of the rows, in rows.
        const ROW_DISTANCE: usize = 48;
        for (sample, bag) in self.positions.chunks_exact(self.hotness).enumerate() {
            let out = &mut self.out[sample * self.stride + self.column..][..self.rows.dim];
            for (i, &position) in bag.iter().enumerate() {
                let ahead = sample * self.hotness + i + ROW_DISTANCE;
                if let Some(&next) = self.positions.get(ahead) {
                    self.rows.row(next).iter().step_by(16).for_each(|at| prefetch_l2(at));
                }

                let row = self.rows.row(position);
                if i == 0 {
                    out.copy_from_slice(row);
                } else {
                    out.iter_mut().zip(row).for_each(|(o, v)| *o += v);
                }
            }
        }
    }
}
