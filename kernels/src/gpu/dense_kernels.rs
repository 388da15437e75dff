//! The kernels of `cuda/dense.cu`, with one function for each, which checks the sizes and launches
//! the kernel. The argument structures are those of `dense.cu`, field by field. Never waits.

#![allow(unsafe_code)]

use crate::cuda::driver::{Gpu, Images, Kernel, Result, Stream, images};
use crate::cuda::matrix::{DeviceMatrix, Start};
use crate::cuda::memory::View;
use crate::gpu::numbers::StepNumber;
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
/// Rows of a product that our kernels compute beside cuBLAS to save a launch, at most: for more,
/// the launch costs less than what cuBLAS gains.
pub(crate) const OWN_ROWS_MAX: usize = 512;
/// Bytes in the host's memory of which every column of tiles may read a part of its own.
pub(crate) const REREAD_BYTES_MAX: usize = 4096;
/// Operands of one launch of pairs.
const PARTS: usize = 8;
/// Steps of one launch.
const STEPS: usize = 16;
/// Values of a sample in a step that shares its launch with steps of other widths: a block has all
/// of them.
pub(crate) const NARROW: usize = 1024;
/// Floats of a block's vectors in `dense_pairs`.
const PAIR_VALUES: usize = 8192;
/// Sizes and indexes are `int` in the kernels.
const INT_END: usize = 1 << 31;

#[repr(C)]
#[derive(Clone, Copy)]
struct MatrixProduct {
    a: u64,
    rest: u64,
    w: u64,
    scale: u64,
    bias: u64,
    factor: u64,
    addend: u64,
    out: u64,
    m: i32,
    k: i32,
    n: i32,
    relu: i32,
    split: i32,
    continues: i32,
    is_score: i32,
    unused: i32,
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
#[derive(Clone, Copy, Default)]
struct StepSide {
    values: u64,
    picks: u64,
    pitch: i32,
    unused: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct StepValues {
    left: StepSide,
    right: StepSide,
    out: u64,
    pitch: i32,
    function: i32,
    width: i32,
    inner: i32,
    stride: i32,
    n: i32,
    divisor: f32,
    unused: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct StepList {
    steps: [StepValues; STEPS],
    samples: i64,
    count: i32,
    each: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Part {
    from: u64,
    rows: i32,
    before: i32,
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
const _: () = assert!(size_of::<MatrixProduct>() == 96 && size_of::<MatrixFinish>() == 40);
const _: () = assert!(size_of::<SmallProducts>() == 48 && size_of::<Pairs>() == 168);
const _: () = assert!(size_of::<StepSide>() == 24 && size_of::<StepValues>() == 88);
const _: () = assert!(size_of::<StepList>() == 1424);

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

/// A product by weights: its rows, how its sums start, and whether its results are scores, which
/// end with a sigmoid.
#[derive(Clone, Copy)]
pub(crate) struct MatrixShape {
    pub m: usize,
    pub start: Start,
    pub is_score: bool,
}

/// The operands of a product by weights besides the weights. All but `a` may be empty.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    /// The first columns of the left side, and its other columns.
    pub a: View<'a, f32>,
    pub rest: View<'a, f32>,
    /// By what each result is multiplied, and what is added then.
    pub factor: View<'a, f32>,
    pub addend: View<'a, f32>,
}

impl<'a> Operands<'a> {
    /// Returns the left side alone.
    pub fn of(a: View<'a, f32>) -> Self {
        Self { a, rest: View::none(), factor: View::none(), addend: View::none() }
    }
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

/// One operand of a [`ValueStep`].
#[derive(Clone, Copy)]
pub(crate) struct Side<'a> {
    pub values: View<'a, f32>,
    /// For each value of a result the index to read in the sample; empty to read all in order.
    pub picks: View<'a, u32>,
    /// Values of one sample; 0 if all samples have the same values.
    pub width: usize,
}

impl Side<'_> {
    /// Returns no operand.
    pub fn none() -> Self {
        Self { values: View::none(), picks: View::none(), width: 0 }
    }

    fn address(&self) -> StepSide {
        let (values, picks) = (self.values.address(), self.picks.address());
        StepSide { values, picks, pitch: self.width as i32, unused: 0 }
    }
}

/// Groups of `inner` columns that begin `stride` apart. A sum adds `n` columns of each, `inner`
/// apart, and divides by `divisor`.
#[derive(Clone, Copy)]
pub(crate) struct Groups {
    pub inner: usize,
    pub stride: usize,
    pub n: usize,
    pub divisor: f32,
}

/// A function that computes `width` values of each sample.
#[derive(Clone, Copy)]
pub(crate) struct ValueStep<'a> {
    pub function: StepNumber,
    /// Functions of one value have a right side without values.
    pub sides: [Side<'a>; 2],
    pub width: usize,
    /// What a sum reads, and what a copy writes.
    pub groups: Groups,
    pub out: View<'a, f32>,
    /// Columns of `out`, of which a copy may write some.
    pub pitch: usize,
}

impl<'a> ValueStep<'a> {
    /// Returns the step that writes `out[samples, width]`.
    pub fn new(
        function: StepNumber,
        sides: [Side<'a>; 2],
        width: usize,
        out: View<'a, f32>,
    ) -> Self {
        let groups = Groups { inner: width, stride: width, n: 1, divisor: 1.0 };
        Self { function, sides, width, groups, out, pitch: width }
    }

    /// Returns whether each value depends on those at its own place only.
    fn is_pointwise(&self) -> bool {
        let is_whole = self.sides.iter().all(|side| side.picks.is_empty());
        is_whole && !matches!(self.function, StepNumber::Sum | StepNumber::Copy)
    }

    /// Returns whether a thread may compute a value of this step before others have ended `before`,
    /// an earlier step.
    fn is_beside(&self, before: &Self) -> bool {
        let meets = |a: View<f32>, b: View<f32>| {
            let end = |view: View<f32>| view.address() + (size_of::<f32>() * view.len()) as u64;
            a.address() < end(b) && b.address() < end(a)
        };
        let reads = self.sides.iter().any(|side| meets(side.values, before.out));
        let replaces = before.sides.iter().any(|side| meets(side.values, self.out));
        let is_same = self.is_pointwise() && before.is_pointwise() && self.width == before.width;
        is_same || !(reads || replaces)
    }

    /// Panics if a step of `samples` samples would leave its memory. The plan vouches for the
    /// picks.
    fn check(&self, samples: usize) {
        let Self { function, sides: [left, right], width, groups, .. } = self;
        let Groups { inner, stride, n, .. } = *groups;
        assert!(*width > 0 && inner > 0 && width.is_multiple_of(inner) && n > 0);
        let (last, of_groups) = (samples.saturating_sub(1), width / inner * stride);
        let reads = |side: &Side, columns: usize| {
            let columns = if side.picks.is_empty() { columns } else { side.width };
            assert!(side.picks.is_empty() || side.picks.len() >= *width);
            assert!(side.values.len() >= last * side.width + columns);
        };
        // A thread of a flat launch takes one place of every operand.
        let is_whole =
            |side: &Side| !side.picks.is_empty() || side.width == 0 || side.width == *width;
        match function {
            StepNumber::Sum => {
                assert!(left.picks.is_empty() && stride >= n * inner);
                reads(left, of_groups);
            }
            StepNumber::Add | StepNumber::Subtract | StepNumber::Multiply | StepNumber::Divide => {
                assert!(is_whole(left) && is_whole(right));
                reads(left, *width);
                reads(right, *width);
            }
            StepNumber::Copy => reads(left, *width),
            _ => {
                assert!(is_whole(left));
                reads(left, *width);
            }
        }
        let written = match function {
            StepNumber::Copy => of_groups - stride + inner,
            _ => *width,
        };
        assert!(self.out.len() >= last * self.pitch + written && stride >= inner);
        assert!(of_groups.max(self.pitch).max(left.width).max(right.width) < INT_END);
    }

    fn values(&self) -> StepValues {
        let Groups { inner, stride, n, divisor } = self.groups;
        let [left, right] = self.sides.each_ref().map(Side::address);
        StepValues {
            left,
            right,
            out: self.out.address(),
            pitch: self.pitch as i32,
            function: self.function as i32,
            width: self.width as i32,
            inner: inner as i32,
            stride: stride as i32,
            n: n as i32,
            divisor,
            unused: 0,
        }
    }
}

/// Returns how many of the first `steps` may run beside each other: no thread waits for another.
fn beside(steps: &[ValueStep<'_>]) -> usize {
    let fits = |at: &usize| steps[..*at].iter().all(|before| steps[*at].is_beside(before));
    (0..steps.len()).take_while(fits).count()
}

/// Returns how many of the first `steps` share a launch.
fn joined(steps: &[ValueStep<'_>]) -> usize {
    let narrow = steps.iter().take_while(|step| step.width <= NARROW).count();
    narrow.max(beside(steps)).min(STEPS)
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

kernels!(matrix matrix_few matrix_once finish products pairs steps gather);

/// Returns at most `PARTS` operands as a kernel takes them, and the sum of their rows.
fn list_parts<'a>(
    operands: impl Iterator<Item = (View<'a, f32>, usize)>,
) -> ([Part; PARTS], usize) {
    let (mut list, mut before) = ([Part::default(); PARTS], 0);
    for (to, (from, rows)) in list.iter_mut().zip(operands) {
        *to = Part { from: from.address(), rows: rows as i32, before: before as i32 };
        before += rows;
    }
    (list, before)
}

fn strided(values: usize) -> u32 {
    values.div_ceil(THREADS as usize).min(STRIDED_GRID_BLOCKS) as u32
}

/// The functions put one launch onto the stream. Each returns the driver's error.
impl DenseKernels {
    /// Computes `out[m, n] = a[m, k] x by[k, n]`, with scale, bias, Relu, factor and addend. The
    /// rows of `a` have those of `rest` beside them.
    pub fn matrix(
        &self,
        stream: &Stream,
        MatrixShape { m, start, is_score }: MatrixShape,
        Operands { a, rest, factor, addend }: Operands<'_>,
        by: &DeviceMatrix,
        out: View<f32>,
    ) -> Result<()> {
        let (k, n) = (by.k, by.n);
        let split = if rest.is_empty() { k } else { a.len() / m };
        assert!(a.len() >= m * split && rest.len() >= m * (k - split));
        assert!(out.len() >= m * n && by.weights.len() >= k * n);
        assert!([factor, addend].iter().all(|more| more.is_empty() || more.len() >= m * n));
        assert!(by.scale.len() >= n && by.bias.len() >= n && m < INT_END && k * n < INT_END);

        // Copies of four values.
        let copied = [a.address(), rest.address(), by.weights.address()];
        assert!(copied.iter().all(|address| address.is_multiple_of(16)));
        // Small tiles issue more for a result, but reach more multiprocessors.
        let processors = stream.gpu().processors() as usize;
        let few = MATRIX_FEW.cost(m, n, processors) <= MATRIX.cost(m, n, processors);
        let fits = k <= ONCE_DEPTH && n <= ONCE_WIDTH;
        let once = (a.on_host() || rest.on_host()) && fits && 4 * m * k > REREAD_BYTES_MAX;
        let (kernel, tile, columns) = match few {
            _ if once => (&self.matrix_once, MATRIX_FEW, 1),
            true => (&self.matrix_few, MATRIX_FEW, n),
            false => (&self.matrix, MATRIX, n),
        };
        let blocks = tile.blocks(m, columns);
        let argument = MatrixProduct {
            a: a.address(),
            rest: rest.address(),
            w: by.weights.address(),
            scale: by.scale.address(),
            bias: by.bias.address(),
            factor: factor.address(),
            addend: addend.address(),
            out: out.address(),
            m: m as i32,
            k: k as i32,
            n: n as i32,
            relu: i32::from(by.relu),
            split: split as i32,
            continues: i32::from(start == Start::Sums),
            is_score: i32::from(is_score),
            unused: 0,
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
        function: StepNumber,
        from: View<f32>,
        out: View<f32>,
    ) -> Result<()> {
        let side = Side { values: from, picks: View::none(), width: 1 };
        self.steps(stream, from.len(), &[ValueStep::new(function, [side, Side::none()], 1, out)])
    }

    /// Computes `steps` of each sample in their order, with as few launches as possible. A step of
    /// up to `NARROW` values must not write what an earlier one of these reads. A function of one
    /// value may replace its operand.
    pub fn steps(&self, stream: &Stream, samples: usize, steps: &[ValueStep<'_>]) -> Result<()> {
        let mut rest = steps;
        while !rest.is_empty() && samples > 0 {
            let (now, later) = rest.split_at(joined(rest));
            rest = later;
            now.iter().for_each(|step| step.check(samples));
            let widest = now.iter().map(|step| step.width).max().unwrap_or(1);
            let is_flat = beside(now) == now.len();
            // Blocks of several samples leave fewer threads idle in narrow steps.
            let blocks_max = stream.gpu().processors() as usize * PRODUCT_BLOCKS;
            let each = (THREADS as usize / widest).max(samples.div_ceil(blocks_max)).max(1);
            let (blocks, each) = match is_flat {
                true => (strided(samples * widest), 0),
                false => (samples.div_ceil(each) as u32, each),
            };
            let mut list = [StepValues::default(); STEPS];
            list.iter_mut().zip(now).for_each(|(to, step)| *to = step.values());
            let (samples, count) = (samples as i64, now.len() as i32);
            let argument = StepList { steps: list, samples, count, each: each as i32 };
            // SAFETY: the parameter of `dense_steps`; the sizes were checked.
            unsafe { stream.launch(&self.steps, blocks, THREADS, argument)? };
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
}
