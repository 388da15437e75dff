//! Matrix products with weights that were packed once: `out = relu(a x w + bias)`. With f32 and f16
//! weights every element is one chain of fused multiply-adds over `k` in ascending order from `+0`,
//! and one more with the bias. `int8.rs` computes the products of int8 weights. The bits of an
//! element depend neither on the instruction set nor on the other rows of the batch. A product
//! never allocates.

use crate::dense::matrix::blocks::{BlockScratch, BlockSizes, BlockedProduct, Start, Strides};
use crate::dense::matrix::column::{self, Column};
use crate::dense::matrix::int8::{Int8Panels, Int8Scratch, K_MAX};
use crate::dense::matrix::lanes::Stored;
use crate::dense::matrix::microkernel::{Finish, NonzeroRow, Row};
use crate::dense::matrix::tiling::{ProductShape, padded, panels};
use crate::dense::matrix::transpose::transpose;
use crate::dense::weights::Weights;
use crate::simd::dispatch;
use crate::simd::huge_pages::{Zeroable, Zeroed};
use crate::simd::isa::Isa;
use half::f16;

/// The weights in panels, one after the other, each `[k, width]`.
enum Panels {
    F32(Zeroed<f32>),
    F16(Zeroed<f16>),
    Int8(Int8Panels),
}

/// A weight matrix `[k, n]`, packed for the kernels, with the scale, bias and Relu that follow.
pub(crate) struct Matrix {
    pub k: usize,
    pub n: usize,
    panels: Panels,
    /// One value for each column, padding included. So is `bias`.
    scale: Vec<f32>,
    bias: Vec<f32>,
    pub relu: bool,
}

/// What the products of a network need of a worker's memory.
#[derive(Clone, Copy, Default)]
pub(crate) struct GemmSizes {
    /// Rows of the tallest matrix.
    k: usize,
    blocks: BlockSizes,
    /// Rows of the tallest matrix of int8 weights.
    k_int8: usize,
    /// Values of the largest packed operand.
    packed: usize,
}

impl GemmSizes {
    /// Makes room for products of `m` rows by `matrix`.
    pub fn add_matrix(&mut self, m: usize, matrix: &Matrix) {
        let Matrix { k, n, .. } = *matrix;
        self.k = self.k.max(k);
        match matrix.panels {
            Panels::F32(_) => {
                self.blocks.add(ProductShape { m, k, n }, true);
                // Besides, because a run of fewer rows goes through the blocks.
                if is_column(m, n) {
                    self.add_values(k * column::ROWS);
                }
            }
            Panels::F16(_) => {
                self.blocks.add(ProductShape { m, k, n }, true);
                self.blocks.add_decoded(m);
            }
            Panels::Int8(_) => self.k_int8 = self.k_int8.max(k),
        }
    }

    /// Makes room for products that continue other sums.
    pub fn add_start(&mut self) {
        self.blocks.add_start();
    }

    /// Makes room for products of this shape by a packed operand.
    pub fn add_packed(&mut self, shape: ProductShape) {
        self.add_values(shape.k * padded(shape.n));
        self.blocks.add(shape, false);
    }

    /// Makes room for this number of values in the memory of a packed operand.
    pub fn add_values(&mut self, values: usize) {
        self.packed = self.packed.max(values);
    }
}

/// The memory of one worker's products.
pub(crate) struct GemmScratch {
    /// The entries of a row that are not zero.
    nonzero: Vec<(u32, f32)>,
    blocks: BlockScratch,
    /// The packed second operand of a product of two computed values.
    packed: Zeroed<f32>,
    /// Quantized rows of a left operand.
    int8: Int8Scratch,
}

impl GemmScratch {
    /// Creates the memory for products of these sizes.
    pub fn new(sizes: GemmSizes) -> Self {
        Self {
            nonzero: vec![(0, 0.0); sizes.k + 1],
            blocks: BlockScratch::new(sizes.blocks),
            packed: Zeroed::new(sizes.packed),
            int8: Int8Scratch::new(sizes.k_int8),
        }
    }

    /// Returns the bytes of such a memory.
    pub fn bytes(sizes: GemmSizes) -> usize {
        (sizes.k + 1) * size_of::<(u32, f32)>()
            + 4 * sizes.packed
            + sizes.blocks.bytes()
            + Int8Scratch::bytes(sizes.k_int8)
    }

    /// Returns the memory of a packed operand.
    pub fn packed(&mut self) -> &mut [f32] {
        &mut self.packed
    }
}

impl Matrix {
    /// Packs the weights `w(row, column)` and `bias(column)` of a matrix `[k, n]`. All must be
    /// finite. Weights of over [`K_MAX`] rows stay f32 where int8 is requested.
    pub fn pack(
        k: usize,
        n: usize,
        w: &dyn Fn(usize, usize) -> f32,
        weights: Weights,
        bias: impl Fn(usize) -> f32,
    ) -> Self {
        let mut scale = vec![1.0; padded(n)];
        let panels = match weights {
            Weights::Int8 if k <= K_MAX => Panels::Int8(Int8Panels::pack(k, n, w, &mut scale)),
            Weights::F16 => Panels::F16(fill(k, n, &|k, n| f16::from_f32(w(k, n)))),
            Weights::F32 | Weights::Int8 => Panels::F32(fill(k, n, w)),
        };

        // `-0 + 0` is `+0`, so the sum over a row of zeros is `+0` in any order.
        let bias = (0..scale.len()).map(|i| if i < n { bias(i) + 0.0 } else { 0.0 }).collect();
        Self { k, n, panels, scale, bias, relu: false }
    }

    /// Returns how the weights are stored.
    pub fn weights(&self) -> Weights {
        match self.panels {
            Panels::F32(_) => Weights::F32,
            Panels::F16(_) => Weights::F16,
            Panels::Int8(_) => Weights::Int8,
        }
    }

    /// Returns true if every weight, scale and bias is finite. A product with zero is then zero.
    pub fn is_finite(&self) -> bool {
        let panels = match &self.panels {
            Panels::F32(p) => p.iter().all(|w| w.is_finite()),
            Panels::F16(p) => p.iter().all(|w| w.is_finite()),
            Panels::Int8(_) => true,
        };
        panels && self.scale.iter().chain(&self.bias).all(|v| v.is_finite())
    }

    /// Sets the bias to `bias` `[n]` and returns true, unless the matrix has a bias already.
    pub fn take_bias(&mut self, bias: &[f32]) -> bool {
        let has_none = self.bias.iter().all(|b| *b == 0.0);
        if has_none {
            self.bias.iter_mut().zip(bias).for_each(|(own, bias)| *own = bias + 0.0);
        }
        has_none
    }

    /// Returns the weights `[k, n]`.
    ///
    /// # Panics
    /// If they are not f32.
    pub fn unpacked(&self) -> Vec<f32> {
        assert!(self.weights() == Weights::F32, "{} weights cannot be unpacked", self.weights());
        let Panels::F32(packed) = &self.panels else { return Vec::new() };
        let mut all = vec![0.0; self.k * self.n];
        for (first, width) in panels(self.n) {
            let panel = &packed[first * self.k..][..self.k * width];
            for (row, from) in all.chunks_exact_mut(self.n).zip(panel.chunks_exact(width)) {
                row[first..].iter_mut().zip(from).for_each(|(to, from)| *to = *from);
            }
        }
        all
    }

    /// Returns the scale and the bias of each column, both `[n]`.
    pub fn finish(&self) -> (&[f32], &[f32]) {
        (&self.scale[..self.n], &self.bias[..self.n])
    }

    /// Returns the bytes of weights, scales and biases.
    pub fn bytes(&self) -> usize {
        let panels = match &self.panels {
            Panels::F32(p) => size_of_val::<[_]>(p),
            Panels::F16(p) => size_of_val::<[_]>(p),
            Panels::Int8(p) => p.bytes(),
        };
        panels + 8 * self.scale.len()
    }

    /// Returns the matrix of the rows `rows` of this one, in that order. A product with it
    /// continues one with the other rows; `has_finish` says that scale, bias and Relu follow here.
    /// The sums of int8 weights are scaled on both sides.
    pub fn with_rows(&self, rows: &[usize], has_finish: bool) -> Self {
        let (k, n) = (rows.len(), self.n);
        let panels = match &self.panels {
            Panels::F32(p) => Panels::F32(select_rows(p, self.k, n, rows)),
            Panels::F16(p) => Panels::F16(select_rows(p, self.k, n, rows)),
            Panels::Int8(p) => Panels::Int8(p.with_rows(self.k, n, rows)),
        };
        let bias = if has_finish { self.bias.clone() } else { vec![0.0; self.bias.len()] };
        Self { k, n, panels, scale: self.scale.clone(), bias, relu: self.relu && has_finish }
    }

    /// Computes `out[m, n] = a[m, k] x self`.
    pub fn multiply(
        &self,
        m: usize,
        a: &[f32],
        out: &mut [f32],
        isa: Isa,
        scratch: &mut GemmScratch,
    ) {
        self.multiply_rows(Rows { m, a, start: None }, out, isa, scratch);
    }

    /// Computes `out[m, n] = start + rows x self`.
    pub fn multiply_rows(&self, rows: Rows, out: &mut [f32], isa: Isa, scratch: &mut GemmScratch) {
        match &self.panels {
            Panels::F32(panel) if is_column(rows.m, self.n) && rows.start.is_none() => {
                let finish = Finish { scale: &self.scale, bias: &self.bias, relu: self.relu };
                let (a, k) = (&rows.a[..rows.m * self.k], self.k);
                let transposed = &mut *scratch.packed;
                dispatch(isa, Column { a, k, panel, finish, out, transposed });
            }
            Panels::F32(p) => self.multiply_by(p, rows, out, isa, scratch),
            Panels::F16(p) => self.multiply_by(p, rows, out, isa, scratch),
            Panels::Int8(p) => {
                let shape = ProductShape { m: rows.m, k: self.k, n: self.n };
                // Relu follows what is added.
                let relu = self.relu && rows.start.is_none();
                let finish = Finish { scale: &self.scale, bias: &self.bias, relu };
                p.multiply(shape, rows.a, out, finish, isa, &mut scratch.int8);
                rows.start.iter().for_each(|start| start.add(self.n, self.relu, out));
            }
        }
    }

    fn multiply_by<W: Stored>(
        &self,
        packed: &[W],
        Rows { m, a, start }: Rows,
        out: &mut [f32],
        isa: Isa,
        scratch: &mut GemmScratch,
    ) {
        let finish = Finish { scale: &self.scale, bias: &self.bias, relu: self.relu };
        if m != 1 || start.is_some() {
            let shape = ProductShape { m, k: self.k, n: self.n };
            let strides = Strides { a: self.k, out: self.n };
            let is_coded = matches!(self.panels, Panels::F16(_));
            let (finish, skips_zeros) = (Some(finish), true);
            let product = BlockedProduct {
                shape,
                strides,
                packed,
                start,
                finish,
                skips_zeros,
                is_coded,
                isa,
            };
            return product.run(a, out, &mut scratch.blocks);
        }

        let a = NonzeroRow::list(&a[..self.k], &mut scratch.nonzero);
        for (first, width) in panels(self.n) {
            let panel = &packed[first * self.k..][..self.k * width];
            let out = &mut out[first..self.n.min(first + width)];
            Row { a, panel, width, out, finish: finish.from(first) }.run(isa);
        }
    }
}

/// The left operand of a product with weights.
#[derive(Clone, Copy)]
pub(crate) struct Rows<'a> {
    pub m: usize,
    /// `[m, k]`.
    pub a: &'a [f32],
    /// `None` starts the sums at zero.
    pub(in crate::dense) start: Option<Start<'a>>,
}

/// Returns whether `column.rs` computes a product of `m` rows by `n` columns.
fn is_column(m: usize, n: usize) -> bool {
    n == 1 && m >= column::ROWS
}

/// Returns the panels of the rows `rows` of a matrix `[k, n]`.
fn select_rows<T: Zeroable + Copy>(packed: &[T], k: usize, n: usize, rows: &[usize]) -> Zeroed<T> {
    let at = |i: usize, j: usize| {
        let (first, width) = panels(n).find(|(first, width)| j < first + width).unwrap_or((0, 0));
        packed[first * k + rows[i] * width + j - first]
    };
    fill(rows.len(), n, &at)
}

/// Packs the values of a matrix `[k, n]` into panels.
fn fill<T: Zeroable>(k: usize, n: usize, value: &dyn Fn(usize, usize) -> T) -> Zeroed<T> {
    let mut packed = Zeroed::new(k * padded(n));
    for (first, width) in panels(n) {
        let panel = &mut packed[first * k..];
        for i in 0..k {
            for column in 0..width.min(n - first) {
                panel[i * width + column] = value(i, first + column);
            }
        }
    }
    packed
}

/// Packs `[k, n]`, or `[n, k]` if `transposed`, as the second operand of `multiply_packed`.
pub(crate) fn pack_columns(b: &[f32], k: usize, n: usize, transposed: bool, packed: &mut [f32]) {
    for (first, width) in panels(n) {
        let columns = width.min(n - first);
        let panel = &mut packed[first * k..][..k * width];
        if transposed {
            transpose(&b[first * k..][..columns * k], k, panel, width);
            continue;
        }
        for (row, from) in panel.chunks_exact_mut(width).zip(b.chunks_exact(n)) {
            row[..columns].copy_from_slice(&from[first..first + columns]);
        }
    }
}

/// Computes `out[m, n] = a[m, k] x b`, where `pack_columns` packed `b` into `scratch.packed()`.
pub(in crate::dense) fn multiply_packed(
    shape: ProductShape,
    strides: Strides,
    a: &[f32],
    out: &mut [f32],
    isa: Isa,
    scratch: &mut GemmScratch,
) {
    let GemmScratch { packed, blocks, .. } = scratch;
    let (start, finish, skips_zeros, is_coded) = (None, None, false, false);
    BlockedProduct { shape, strides, packed, start, finish, skips_zeros, is_coded, isa }
        .run(a, out, blocks);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns values of about one, zeros of both signs among them.
    fn values(seed: u64, len: usize) -> Vec<f32> {
        let value = |i: u64| {
            let bits = (seed ^ i).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let bits = (bits ^ bits >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32;
            match bits % 5 {
                0 => 0.0,
                1 => -0.0,
                _ => bits as i32 as f32 / 1e9,
            }
        };
        (0..len as u64).map(value).collect()
    }

    fn product(matrix: &Matrix, m: usize, a: &[f32], isa: Isa) -> Vec<u32> {
        let mut out = vec![f32::NAN; m * matrix.n];
        let mut sizes = GemmSizes::default();
        sizes.add_matrix(m, matrix);
        let mut scratch = GemmScratch::new(sizes);
        matrix.multiply(m, a, &mut out, isa, &mut scratch);
        out.iter().map(|x| x.to_bits()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        #[test]
        fn every_instruction_set_and_batch_gives_the_same_bits(
            m in prop_oneof![1..70usize, 90..110usize],
            k in prop_oneof![1..4usize, 1..90usize, 120..140usize, 500..530usize],
            n in prop_oneof![1 => Just(1), 3 => 1..150usize],
            seed: u64,
            relu: bool,
        ) {
            let (a, w, bias) = (values(seed, m * k), values(!seed, k * n), values(seed ^ 77, n));
            for weights in [Weights::F32, Weights::F16, Weights::Int8] {
                let mut matrix = Matrix::pack(k, n, &|i, j| w[i * n + j], weights, |j| bias[j]);
                matrix.relu = relu;
                let reference = product(&matrix, m, &a, Isa::available()[0]);
                for isa in Isa::available() {
                    prop_assert_eq!(&product(&matrix, m, &a, isa), &reference, "{:?}", isa);
                    let one_by_one: Vec<u32> =
                        a.chunks(k).flat_map(|row| product(&matrix, 1, row, isa)).collect();
                    prop_assert_eq!(&one_by_one, &reference, "{:?}", isa);
                }
                let (relative, per_weight, per_input) = match weights {
                    Weights::F32 => (1e-6, 0.0, 0.0),
                    // Half the step of a tiny f16.
                    Weights::F16 => (6e-4, 3e-8, 0.0),
                    // Half a step, which is the range over 254 or 255.
                    Weights::Int8 => (1e-6, 2.2 / 254.0, 4.4 / 510.0),
                };
                for (at, bits) in reference.iter().enumerate() {
                    let (row, column) = (&a[at / n * k..][..k], at % n);
                    let weight = |i: usize| f64::from(w[i * n + column]);
                    let terms = row.iter().enumerate().map(|(i, x)| f64::from(*x) * weight(i));
                    let add = |(sum, size), term: f64| (sum + term, size + term.abs());
                    let (sum, size) = terms.fold((0.0, 0.0), add);
                    let sum = sum + f64::from(bias[column]);
                    let exact = if relu { sum.max(0.0) } else { sum };
                    let inputs: f64 = row.iter().map(|x| f64::from(x.abs())).sum();
                    let rounding = relative * (size + sum.abs()) * (k as f64).sqrt();
                    let weights_size: f64 = (0..k).map(|i| weight(i).abs() + per_weight).sum();
                    let bound =
                        rounding + per_weight * inputs + per_input * weights_size + 1e-30;
                    let off = (f64::from(f32::from_bits(*bits)) - exact).abs();
                    prop_assert!(off <= bound, "{:?}: {} from {}", weights, off, exact);
                }
            }
        }

        #[test]
        fn products_of_two_computed_operands(
            m in 1..30usize, k in 1..70usize, n in 1..70usize, seed: u64, transposed: bool,
        ) {
            let (a, b) = (values(seed, m * k), values(!seed, k * n));
            let at = |i: usize, j: usize| if transposed { b[j * k + i] } else { b[i * n + j] };
            let chain = |row: usize, j: usize| {
                (0..k).fold(0.0f32, |sum, i| at(i, j).mul_add(a[row * k + i], sum))
            };
            let expected: Vec<u32> = (0..m * n).map(|p| chain(p / n, p % n).to_bits()).collect();
            for isa in Isa::available() {
                let shape = ProductShape { m, k, n };
                let mut sizes = GemmSizes::default();
                sizes.add_packed(shape);
                let (mut scratch, mut out) = (GemmScratch::new(sizes), vec![0.0; m * n]);
                scratch.packed().fill(f32::NAN);
                pack_columns(&b, k, n, transposed, scratch.packed());
                let strides = Strides { a: k, out: n };
                multiply_packed(shape, strides, &a, &mut out, isa, &mut scratch);
                let out: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
                prop_assert_eq!(&out, &expected, "{:?}", isa);
            }
        }
    }

    #[test]
    fn nan_is_not_skipped_and_not_hidden() {
        let mut matrix = Matrix::pack(3, 2, &|_, _| 1.0, Weights::F32, |_| 0.0);
        matrix.relu = true;
        for isa in Isa::available() {
            for m in [1, 2] {
                let a = [0.0, f32::NAN, 1.0, 0.0, f32::NAN, 1.0];
                let out = product(&matrix, m, &a[..3 * m], isa);
                assert!(out.iter().all(|bits| f32::from_bits(*bits).is_nan()), "{isa:?}");
            }
        }
    }
}
