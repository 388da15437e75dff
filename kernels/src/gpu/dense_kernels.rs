//! The kernels of `cuda/dense.cu`, a function each: sizes are checked, then it is launched. Nothing
//! waits here, and nothing is decided but the shape of the launch.

#![allow(unsafe_code)]

use crate::cuda::driver::{Gpu, Images, Kernel, Result, Stream};
use crate::cuda::memory::{Buffer, View};
use std::sync::Arc;

pub(crate) const IMAGES: Images = Images {
    name: "dense",
    cubins: &[
        (87, include_bytes!("../../cuda/built/dense.sm_87.cubin")),
        (90, include_bytes!("../../cuda/built/dense.sm_90.cubin")),
    ],
    ptx: include_str!("../../cuda/built/dense.ptx"),
};

/// Threads of a block, of every kernel.
const THREADS: u32 = 256;
/// Blocks at most where each goes over its values in strides.
const BLOCKS_MAX: usize = 1 << 16;
/// Up to this many rows a product takes the narrow tiles.
const FEW_ROWS: usize = 32;

/// A weight matrix `[k, n]` on the device and what follows a product by it.
pub struct DeviceMatrix {
    /// Rows.
    pub k: usize,
    /// Columns.
    pub n: usize,
    /// `[k, n]`.
    pub weights: Buffer<f32>,
    /// `[n]`.
    pub scale: Buffer<f32>,
    /// `[n]`.
    pub bias: Buffer<f32>,
    /// Whether what is below zero becomes zero.
    pub relu: bool,
}

/// One side of a [`DenseKernels::zip`].
#[derive(Clone, Copy)]
pub struct Side<'a> {
    /// The values.
    pub values: View<'a, f32>,
    /// For each value of a result the one to take in the sample; empty: each in order.
    pub picks: View<'a, u32>,
    /// Values a sample; 0: the same for all samples.
    pub width: usize,
}

/// The kernels, loaded on one GPU.
pub struct DenseKernels {
    matrix: Kernel,
    matrix_few: Kernel,
    finish: Kernel,
    products: Kernel,
    map: Kernel,
    zip: Kernel,
    sum: Kernel,
    concat: Kernel,
    pick: Kernel,
}

fn strided(values: usize) -> u32 {
    values.div_ceil(THREADS as usize).min(BLOCKS_MAX) as u32
}

impl DenseKernels {
    /// Loads them.
    ///
    /// # Errors
    /// No image runs on this GPU.
    pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
        let module = gpu.module(&IMAGES)?;
        Ok(Self {
            matrix: module.kernel("dense_matrix")?,
            matrix_few: module.kernel("dense_matrix_few")?,
            finish: module.kernel("dense_finish")?,
            products: module.kernel("dense_products")?,
            map: module.kernel("dense_map")?,
            zip: module.kernel("dense_zip")?,
            sum: module.kernel("dense_sum")?,
            concat: module.kernel("dense_concat")?,
            pick: module.kernel("dense_pick")?,
        })
    }

    /// `out[m, n] = a[m, k] x matrix`, finished.
    ///
    /// # Errors
    /// The driver refuses; so with all of these.
    pub fn matrix(
        &self,
        stream: &Stream,
        m: usize,
        a: View<f32>,
        by: &DeviceMatrix,
        out: View<f32>,
    ) -> Result<()> {
        let (k, n) = (by.k, by.n);
        assert!(a.len() >= m * k && out.len() >= m * n && by.weights.len() >= k * n);
        assert!(by.scale.len() >= n && by.bias.len() >= n && m < 1 << 31 && k * n < 1 << 31);
        let few = m <= FEW_ROWS;
        let (kernel, rows, columns) =
            if few { (&self.matrix_few, 8, 32) } else { (&self.matrix, 64, 64) };
        let blocks = m.div_ceil(rows) * n.div_ceil(columns);
        let (w, scale, bias) = (by.weights.address(), by.scale.address(), by.bias.address());
        let (shape, relu) = ((m as i32, k as i32, n as i32), i32::from(by.relu));
        let arguments =
            (a.address(), w, scale, bias, out.address(), shape.0, shape.1, shape.2, relu);
        // SAFETY: the parameters of `dense_matrix` and `dense_matrix_few`; the sizes were checked.
        unsafe { stream.launch(kernel, blocks as u32, THREADS, arguments) }
    }

    /// What follows a product by `matrix` that a library left in `out[m, n]`.
    ///
    /// # Errors
    /// As `matrix`.
    pub fn finish(
        &self,
        stream: &Stream,
        m: usize,
        by: &DeviceMatrix,
        out: View<f32>,
    ) -> Result<()> {
        let (n, values) = (by.n, m * by.n);
        assert!(out.len() >= values && by.scale.len() >= n && by.bias.len() >= n);
        let (scale, bias) = (by.scale.address(), by.bias.address());
        let arguments = (out.address(), scale, bias, values as i64, n as i32, i32::from(by.relu));
        // SAFETY: the parameters of `dense_finish`; the sizes were checked.
        unsafe { stream.launch(&self.finish, strided(values), THREADS, arguments) }
    }

    /// `products` times `[m, k] x [k, n]`; the second operand is `[n, k]` if `turned`.
    ///
    /// # Errors
    /// As `matrix`.
    pub fn products(
        &self,
        stream: &Stream,
        products: usize,
        (m, k, n, turned): (usize, usize, usize, bool),
        (a, b): (View<f32>, View<f32>),
        out: View<f32>,
    ) -> Result<()> {
        assert!(a.len() >= products * m * k && b.len() >= products * k * n);
        assert!(
            out.len() >= products * m * n && m * k < 1 << 31 && k * n < 1 << 31 && m * n < 1 << 31
        );
        let (blocks, turned) = (products.min(BLOCKS_MAX) as u32, i32::from(turned));
        let (a, b, out) = (a.address(), b.address(), out.address());
        let arguments = (a, b, out, products as i64, m as i32, k as i32, n as i32, turned);
        // SAFETY: the parameters of `dense_products`; the sizes were checked.
        unsafe { stream.launch(&self.products, blocks, THREADS, arguments) }
    }

    /// A function of each value: 0 Relu, 1 the logistic function, 2 the hyperbolic tangent. `out`
    /// may be `from`.
    ///
    /// # Errors
    /// As `matrix`.
    pub fn map(&self, stream: &Stream, what: i32, from: View<f32>, out: View<f32>) -> Result<()> {
        assert!(out.len() >= from.len() && (0..3).contains(&what));
        let arguments = (from.address(), out.address(), from.len() as i64, what);
        // SAFETY: the parameters of `dense_map`; the sizes were checked.
        unsafe { stream.launch(&self.map, strided(from.len()), THREADS, arguments) }
    }

    /// `out[samples, width]` of two values each: 0 sum, 1 difference, 2 product, 3 quotient. Picks
    /// must lie in the width of their side.
    ///
    /// # Errors
    /// As `matrix`.
    pub fn zip(
        &self,
        stream: &Stream,
        what: i32,
        (left, right): (Side, Side),
        (samples, width): (usize, usize),
        out: View<f32>,
    ) -> Result<()> {
        for side in [left, right] {
            assert!(side.picks.is_empty() || side.picks.len() >= width);
            let each = if side.picks.is_empty() { width } else { side.width };
            assert!(side.values.len() >= if side.width == 0 { each } else { samples * each });
            assert!(side.width == 0 || !side.picks.is_empty() || side.width == width);
        }
        let values = samples * width;
        assert!(out.len() >= values && (0..4).contains(&what));
        let side = |s: Side| (s.values.address(), s.picks.address(), s.width as i32);
        let (l, r) = (side(left), side(right));
        let arguments =
            (l.0, l.1, l.2, r.0, r.1, r.2, out.address(), values as i64, width as i32, what);
        // SAFETY: the parameters of `dense_zip`; the sizes were checked, the picks are the caller's
        // plan's.
        unsafe { stream.launch(&self.zip, strided(values), THREADS, arguments) }
    }

    /// `out[outer, inner]` from `[outer, n, inner]`, added in order, divided by `divisor`.
    ///
    /// # Errors
    /// As `matrix`.
    pub fn sum(
        &self,
        stream: &Stream,
        from: View<f32>,
        (outer, n, inner): (usize, usize, usize),
        divisor: f32,
        out: View<f32>,
    ) -> Result<()> {
        let values = outer * inner;
        assert!(from.len() >= values * n && out.len() >= values && n > 0 && inner > 0);
        let arguments =
            (from.address(), out.address(), values as i64, n as i32, inner as i32, divisor);
        // SAFETY: the parameters of `dense_sum`; the sizes were checked.
        unsafe { stream.launch(&self.sum, strided(values), THREADS, arguments) }
    }

    /// Columns `first..first + part` of `out[rows, stride]` from `[rows, part]`.
    ///
    /// # Errors
    /// As `matrix`.
    pub fn concat(
        &self,
        stream: &Stream,
        from: View<f32>,
        (rows, part): (usize, usize),
        (stride, first): (usize, usize),
        out: View<f32>,
    ) -> Result<()> {
        let values = rows * part;
        assert!(
            from.len() >= values
                && out.len() >= rows * stride
                && first + part <= stride
                && part > 0
        );
        let (from, out) = (from.address(), out.address());
        let arguments = (from, out, values as i64, part as i32, stride as i32, first as i32);
        // SAFETY: the parameters of `dense_concat`; the sizes were checked.
        unsafe { stream.launch(&self.concat, strided(values), THREADS, arguments) }
    }

    /// `out[samples, width]`: value `picks[i]` of each sample of `from_width`. Picks must lie in
    /// that.
    ///
    /// # Errors
    /// As `matrix`.
    pub fn pick(
        &self,
        stream: &Stream,
        (from, from_width): (View<f32>, usize),
        picks: View<u32>,
        samples: usize,
        out: View<f32>,
    ) -> Result<()> {
        let (width, values) = (picks.len(), samples * picks.len());
        assert!(from.len() >= samples * from_width && out.len() >= values && width > 0);
        let (from, picks, out) = (from.address(), picks.address(), out.address());
        let arguments = (from, picks, out, values as i64, width as i32, from_width as i32);
        // SAFETY: the parameters of `dense_pick`; the sizes were checked, the picks are the
        // caller's plan's.
        unsafe { stream.launch(&self.pick, strided(values), THREADS, arguments) }
    }
}
