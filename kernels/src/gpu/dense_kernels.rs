//! The kernels of `cuda/dense.cu`, with one function for each, which checks the sizes and launches
//! the kernel. The argument structures are those of `dense.cu`, field by field. Never waits.

#![allow(unsafe_code)]

use crate::cuda::driver::{Gpu, Images, Kernel, Result, Stream, images};
use crate::cuda::matrix::{DeviceMatrix, Start};
use crate::cuda::memory::View;
use crate::gpu::numbers::{MapNumber, ZipNumber};
use std::sync::Arc;

pub(crate) static IMAGES: Images = images!("dense");

/// Threads of a block, for every kernel but `dense_matrix_few`.
const THREADS: u32 = 256;
/// Maximum blocks of a kernel whose blocks stride over the values.
const STRIDED_GRID_BLOCKS: usize = 1 << 16;
/// Blocks of the kernel for small products, for each multiprocessor: four times those that are
/// resident, so that the multiprocessors end at about the same time.
const PRODUCT_BLOCKS: usize = 16;
/// `dense_matrix` and `dense_matrix_few`.
const MATRIX: Tile = Tile { rows: 64, columns: 64, threads: THREADS, instructions: 4600 };
const MATRIX_FEW: Tile = Tile { rows: 16, columns: 32, threads: 128, instructions: 800 };
/// Columns of the rows that `dense_matrix_once` takes, at most.
pub(crate) const ONCE_DEPTH: usize = 64;
/// Columns of its result, at most: a block computes them one tile after the other.
pub(crate) const ONCE_WIDTH: usize = 512;
/// Bytes in the host's memory of which every column of tiles may read a part of its own.
pub(crate) const REREAD_BYTES_MAX: usize = 4096;
/// Operands of one concatenation or of one launch of pairs.
const PARTS: usize = 8;
/// Floats of a block's vectors in `dense_pairs`.
const PAIR_VALUES: usize = 8192;
/// Sizes and indexes are `int` in the kernels.
const INT_END: usize = 1 << 31;

#[repr(C)]
#[derive(Clone, Copy)]
struct MatrixProduct {
    a: u64,
    w: u64,
    scale: u64,
    bias: u64,
    out: u64,
    m: i32,
    k: i32,
    n: i32,
    relu: i32,
    continues: i32,
    sigmoid: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct MatrixFinish {
    out: u64,
    scale: u64,
    bias: u64,
    values: i64,
    n: i32,
    relu: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SmallProducts {
    a: u64,
    b: u64,
    out: u64,
    products: i64,
    m: i32,
    k: i32,
    n: i32,
    transposed: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct MapValues {
    from: u64,
    to: u64,
    values: i64,
    function: MapNumber,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ZipSide {
    values: u64,
    picks: u64,
    width: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ZipValues {
    left: ZipSide,
    right: ZipSide,
    out: u64,
    values: i64,
    width: i32,
    function: ZipNumber,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SumValues {
    from: u64,
    out: u64,
    values: i64,
    n: i32,
    inner: i32,
    divisor: f32,
}

/// Also of the pairs, where `size` are rows.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Part {
    from: u64,
    size: i32,
    before: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ConcatParts {
    parts: [Part; PARTS],
    out: u64,
    rows: i64,
    count: i32,
    width: i32,
    stride: i32,
    unused: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Pairs {
    parts: [Part; PARTS],
    picks: u64,
    out: u64,
    samples: i64,
    count: i32,
    k: i32,
    width: i32,
    unused: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct PickValues {
    from: u64,
    picks: u64,
    out: u64,
    values: i64,
    width: i32,
    from_width: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GatherRows {
    from: u64,
    numbers: u64,
    to: u64,
    width: i32,
    from_stride: i32,
    to_stride: i32,
    unused: i32,
}

const _: () = assert!(size_of::<GatherRows>() == 40);
const _: () = assert!(size_of::<MatrixProduct>() == 64 && size_of::<MatrixFinish>() == 40);
const _: () = assert!(size_of::<SmallProducts>() == 48 && size_of::<MapValues>() == 32);
const _: () = assert!(size_of::<ZipSide>() == 24 && size_of::<ZipValues>() == 72);
const _: () = assert!(size_of::<SumValues>() == 40 && size_of::<ConcatParts>() == 160);
const _: () = assert!(size_of::<PickValues>() == 40 && size_of::<Pairs>() == 168);

/// Shape of one small product `[m, k] x [k, n]`; the second operand is `[n, k]` if `transposed`.
#[derive(Clone, Copy)]
pub(crate) struct ProductShape {
    pub m: usize,
    pub k: usize,
    pub n: usize,
    pub transposed: bool,
}

/// Shape `[samples, width]` of a result.
#[derive(Clone, Copy)]
pub(crate) struct ResultShape {
    pub samples: usize,
    pub width: usize,
}

/// Shape `[outer, n, inner]` of the values that [`DenseKernels::sum`] adds over `n`.
#[derive(Clone, Copy)]
pub(crate) struct SumShape {
    pub outer: usize,
    pub n: usize,
    pub inner: usize,
}

/// A product by weights: its rows, how its sums start, and whether its results are scores, which
/// end with a sigmoid.
#[derive(Clone, Copy)]
pub(crate) struct MatrixShape {
    pub m: usize,
    pub start: Start,
    pub is_score: bool,
}

/// The vectors of [`DenseKernels::pairs`]: rows of each operand, and columns.
#[derive(Clone, Copy)]
pub(crate) struct PairShape<'a> {
    pub samples: usize,
    pub rows: &'a [usize],
    pub k: usize,
}

impl PairShape<'_> {
    /// Returns whether `dense_pairs` takes `operands` with `n` rows of `k` columns together.
    pub fn fits(operands: usize, n: usize, k: usize) -> bool {
        let stride = if k.is_multiple_of(4) { k + 4 } else { k | 1 };
        operands <= PARTS && n.saturating_mul(stride) <= PAIR_VALUES
    }
}

/// Rows to copy: some columns of rows that are `stride` apart, from a first column on.
#[derive(Clone, Copy)]
pub(crate) struct RowColumns<'a> {
    pub values: View<'a, f32>,
    pub first: usize,
    pub stride: usize,
}

/// One side of a [`DenseKernels::zip`].
#[derive(Clone, Copy)]
pub(crate) struct Side<'a> {
    pub values: View<'a, f32>,
    /// For each value of a result the index to read in the sample; empty to read all in order.
    pub picks: View<'a, u32>,
    /// Values of one sample; 0 if all samples have the same values.
    pub width: usize,
}

/// The results that a block of a product computes.
struct Tile {
    rows: usize,
    columns: usize,
    threads: u32,
    /// What the block's warps issue for 16 of the summed products, in the machine code for 9.0.
    instructions: usize,
}

impl Tile {
    fn blocks(&self, m: usize, n: usize) -> usize {
        m.div_ceil(self.rows) * n.div_ceil(self.columns)
    }

    /// Returns what the multiprocessor with most blocks issues for `[m, n]` results.
    fn cost(&self, m: usize, n: usize, processors: usize) -> usize {
        self.blocks(m, n).div_ceil(processors) * self.instructions
    }
}

/// Declares the kernels, which have the prefix `dense_` in the source.
macro_rules! kernels {
    ($($name:ident)*) => {
        /// The kernels, loaded on one GPU.
        pub(crate) struct DenseKernels {
            $($name: Kernel),*
        }

        impl DenseKernels {
            /// Loads the kernels; fails if no image runs on this GPU.
            pub fn load(gpu: &Arc<Gpu>) -> Result<Self> {
                let module = gpu.module(&IMAGES)?;
                Ok(Self { $($name: module.kernel(concat!("dense_", stringify!($name)))?),* })
            }
        }
    };
}

kernels!(matrix matrix_few matrix_once finish products pairs map zip sum concat pick gather);

/// Returns at most `PARTS` operands as a kernel takes them, and the sum of their sizes.
fn list_parts<'a>(
    operands: impl Iterator<Item = (View<'a, f32>, usize)>,
) -> ([Part; PARTS], usize) {
    let (mut list, mut before) = ([Part::default(); PARTS], 0);
    for (to, (from, size)) in list.iter_mut().zip(operands) {
        *to = Part { from: from.address(), size: size as i32, before: before as i32 };
        before += size;
    }
    (list, before)
}

fn strided(values: usize) -> u32 {
    values.div_ceil(THREADS as usize).min(STRIDED_GRID_BLOCKS) as u32
}

/// The functions put one launch onto the stream. Each returns the driver's error.
impl DenseKernels {
    /// Computes `out[m, n] = a[m, k] x by[k, n]`, with scale, bias and Relu.
    pub fn matrix(
        &self,
        stream: &Stream,
        MatrixShape { m, start, is_score }: MatrixShape,
        a: View<f32>,
        by: &DeviceMatrix,
        out: View<f32>,
    ) -> Result<()> {
        let (k, n) = (by.k, by.n);
        assert!(a.len() >= m * k && out.len() >= m * n && by.weights.len() >= k * n);
        assert!(by.scale.len() >= n && by.bias.len() >= n && m < INT_END && k * n < INT_END);

        // Copies of four values.
        assert!(a.address().is_multiple_of(16) && by.weights.address().is_multiple_of(16));
        // Small tiles issue more for a result, but reach more multiprocessors.
        let processors = stream.gpu().processors() as usize;
        let few = MATRIX_FEW.cost(m, n, processors) <= MATRIX.cost(m, n, processors);
        let fits = k <= ONCE_DEPTH && n <= ONCE_WIDTH;
        let once = a.on_host() && fits && 4 * m * k > REREAD_BYTES_MAX;
        let (kernel, tile, columns) = match few {
            _ if once => (&self.matrix_once, MATRIX_FEW, 1),
            true => (&self.matrix_few, MATRIX_FEW, n),
            false => (&self.matrix, MATRIX, n),
        };
        let blocks = tile.blocks(m, columns);
        let argument = MatrixProduct {
            a: a.address(),
            w: by.weights.address(),
            scale: by.scale.address(),
            bias: by.bias.address(),
            out: out.address(),
            m: m as i32,
            k: k as i32,
            n: n as i32,
            relu: i32::from(by.relu),
            continues: i32::from(start == Start::Sums),
            sigmoid: i32::from(is_score),
        };
        // SAFETY: the parameter of all three kernels; the sizes were checked.
        unsafe { stream.launch(kernel, blocks as u32, tile.threads, argument) }
    }

    /// Applies scale, bias and Relu to a product by `by` that a library wrote to `out[m, n]`.
    pub fn finish(
        &self,
        stream: &Stream,
        m: usize,
        by: &DeviceMatrix,
        out: View<f32>,
    ) -> Result<()> {
        let (n, values) = (by.n, m * by.n);
        assert!(out.len() >= values && by.scale.len() >= n && by.bias.len() >= n);
        let argument = MatrixFinish {
            out: out.address(),
            scale: by.scale.address(),
            bias: by.bias.address(),
            values: values as i64,
            n: n as i32,
            relu: i32::from(by.relu),
        };
        // SAFETY: the parameter of `dense_finish`; the sizes were checked.
        unsafe { stream.launch(&self.finish, strided(values), THREADS, argument) }
    }

    /// Computes `products` products of `shape`: `out[products, m, n]` from `left` and `right`.
    pub fn products(
        &self,
        stream: &Stream,
        products: usize,
        shape: ProductShape,
        [left, right]: [View<f32>; 2],
        out: View<f32>,
    ) -> Result<()> {
        let ProductShape { m, k, n, transposed } = shape;
        assert!(left.len() >= products * m * k && right.len() >= products * k * n);
        assert!(out.len() >= products * m * n);
        assert!(m * k < INT_END && k * n < INT_END && m * n < INT_END);

        // A block takes one product after the other.
        let blocks_max = stream.gpu().processors() as usize * PRODUCT_BLOCKS;
        let blocks = products.min(blocks_max) as u32;
        let argument = SmallProducts {
            a: left.address(),
            b: right.address(),
            out: out.address(),
            products: products as i64,
            m: m as i32,
            k: k as i32,
            n: n as i32,
            transposed: i32::from(transposed),
        };
        // SAFETY: the parameter of `dense_products`; the sizes were checked.
        unsafe { stream.launch(&self.products, blocks, THREADS, argument) }
    }

    /// Applies `function` to each value. `out` may be `from`.
    pub fn map(
        &self,
        stream: &Stream,
        function: MapNumber,
        from: View<f32>,
        out: View<f32>,
    ) -> Result<()> {
        assert!(out.len() >= from.len());
        let (to, values) = (out.address(), from.len() as i64);
        let argument = MapValues { from: from.address(), to, values, function };
        // SAFETY: the parameter of `dense_map`; the sizes were checked.
        unsafe { stream.launch(&self.map, strided(from.len()), THREADS, argument) }
    }

    /// Computes `out[samples, width] = function(left, right)`. Picks must be below the width of
    /// their side.
    pub fn zip(
        &self,
        stream: &Stream,
        function: ZipNumber,
        [left, right]: [Side; 2],
        shape: ResultShape,
        out: View<f32>,
    ) -> Result<()> {
        let ResultShape { samples, width } = shape;
        for side in [left, right] {
            assert!(side.picks.is_empty() || side.picks.len() >= width);
            let each = if side.picks.is_empty() { width } else { side.width };
            assert!(side.values.len() >= if side.width == 0 { each } else { samples * each });
            assert!(side.width == 0 || !side.picks.is_empty() || side.width == width);
        }
        let values = samples * width;
        assert!(out.len() >= values);

        let side = |s: Side| ZipSide {
            values: s.values.address(),
            picks: s.picks.address(),
            width: s.width as i32,
        };
        let argument = ZipValues {
            left: side(left),
            right: side(right),
            out: out.address(),
            values: values as i64,
            width: width as i32,
            function,
        };
        // SAFETY: the parameter of `dense_zip`; the sizes were checked, the plan vouches for the
        // picks.
        unsafe { stream.launch(&self.zip, strided(values), THREADS, argument) }
    }

    /// Computes `out[outer, inner]` from `from[outer, n, inner]`: adds in order, then divides by
    /// `divisor`.
    pub fn sum(
        &self,
        stream: &Stream,
        from: View<f32>,
        shape: SumShape,
        divisor: f32,
        out: View<f32>,
    ) -> Result<()> {
        let SumShape { outer, n, inner } = shape;
        let values = outer * inner;
        assert!(from.len() >= values * n && out.len() >= values && n > 0 && inner > 0);
        let argument = SumValues {
            from: from.address(),
            out: out.address(),
            values: values as i64,
            n: n as i32,
            inner: inner as i32,
            divisor,
        };
        // SAFETY: the parameter of `dense_sum`; the sizes were checked.
        unsafe { stream.launch(&self.sum, strided(values), THREADS, argument) }
    }

    /// Copies `parts`, `[rows, width]` each, side by side to `out[rows, stride]`: one launch for
    /// every `PARTS` parts.
    pub fn concat(
        &self,
        stream: &Stream,
        rows: usize,
        parts: &[(View<f32>, usize)],
        out: View<f32>,
    ) -> Result<()> {
        let stride: usize = parts.iter().map(|(_, width)| width).sum();
        let mut first = 0;
        for parts in parts.chunks(PARTS) {
            assert!(parts.iter().all(|(from, width)| from.len() >= rows * width));
            let (list, width) = list_parts(parts.iter().map(|&(from, width)| (from, width)));
            assert!(out.len() >= rows * stride && stride < INT_END);
            let argument = ConcatParts {
                parts: list,
                out: out.skip(first).address(),
                rows: rows as i64,
                count: parts.len() as i32,
                width: width as i32,
                stride: stride as i32,
                unused: 0,
            };
            // SAFETY: the parameter of `dense_concat`; the sizes were checked.
            unsafe { stream.launch(&self.concat, strided(rows * width), THREADS, argument)? };
            first += width;
        }
        Ok(())
    }

    /// Computes `out[samples, picks.len()]`: for each pick the product of two vectors, or a value
    /// of one. Picks must be of the vectors.
    pub fn pairs<'a>(
        &self,
        stream: &Stream,
        shape: PairShape<'_>,
        part: impl Fn(usize) -> View<'a, f32>,
        picks: View<u32>,
        out: View<f32>,
    ) -> Result<()> {
        let PairShape { samples, rows, k } = shape;
        let operands = rows.iter().enumerate().map(|(i, &rows)| (part(i), rows));
        let (parts, n) = list_parts(operands.clone());
        assert!(PairShape::fits(rows.len(), n, k) && k > 0);
        assert!(operands.into_iter().all(|(from, rows)| from.len() >= samples * rows * k));
        assert!(out.len() >= samples * picks.len());
        let argument = Pairs {
            parts,
            picks: picks.address(),
            out: out.address(),
            samples: samples as i64,
            count: rows.len() as i32,
            k: k as i32,
            width: picks.len() as i32,
            unused: 0,
        };
        // A block takes one sample after the other.
        let blocks = samples.min(stream.gpu().processors() as usize * PRODUCT_BLOCKS) as u32;
        // SAFETY: the parameter of `dense_pairs`; the sizes were checked, the plan vouches for the
        // picks.
        unsafe { stream.launch(&self.pairs, blocks, THREADS, argument) }
    }

    /// Copies `shape` values: row `numbers[i]` of `from` to row `i` of `to`, or the rows in order
    /// without numbers. Every number must be that of a row of `from`.
    pub fn gather(
        &self,
        stream: &Stream,
        from: RowColumns,
        numbers: View<u32>,
        shape: ResultShape,
        to: RowColumns,
    ) -> Result<()> {
        let ResultShape { samples, width } = shape;
        if samples * width == 0 {
            return Ok(());
        }
        let end = |side: RowColumns| (samples - 1) * side.stride + side.first + width;
        let fits = |side: RowColumns| side.first + width <= side.stride && side.stride < INT_END;
        assert!(fits(from) && fits(to) && samples < INT_END && to.values.len() >= end(to));
        assert!(numbers.len() >= samples || (numbers.is_empty() && from.values.len() >= end(from)));
        let first = |side: RowColumns| side.values.skip(side.first).address();
        let argument = GatherRows {
            from: first(from),
            numbers: numbers.address(),
            to: first(to),
            width: width as i32,
            from_stride: from.stride as i32,
            to_stride: to.stride as i32,
            unused: 0,
        };
        // SAFETY: the parameter of `dense_gather`; the sizes were checked, the caller vouches for
        // the numbers.
        unsafe { stream.launch(&self.gather, samples as u32, THREADS, argument) }
    }

    /// Copies the values `picks[..]` of each sample of `from[samples, from_width]` to `out[samples,
    /// picks.len()]`. Picks must be below `from_width`.
    pub fn pick(
        &self,
        stream: &Stream,
        from: View<f32>,
        from_shape: ResultShape,
        picks: View<u32>,
        out: View<f32>,
    ) -> Result<()> {
        let ResultShape { samples, width: from_width } = from_shape;
        let (width, values) = (picks.len(), samples * picks.len());
        assert!(from.len() >= samples * from_width && out.len() >= values && width > 0);
        let argument = PickValues {
            from: from.address(),
            picks: picks.address(),
            out: out.address(),
            values: values as i64,
            width: width as i32,
            from_width: from_width as i32,
        };
        // SAFETY: the parameter of `dense_pick`; the sizes were checked, the plan vouches for the
        // picks.
        unsafe { stream.launch(&self.pick, strided(values), THREADS, argument) }
    }
}
