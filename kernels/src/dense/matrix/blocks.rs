//! Matrix products in blocks. A block of weights is small enough for the first level of the cache,
//! and all rows are multiplied by it before the next one. Rows with many zeros skip them. The order
//! of each sum is that of `k`, whatever the blocks are. A product never allocates.

use crate::dense::matrix::lanes::Stored;
use crate::dense::matrix::math;
use crate::dense::matrix::microkernel::{
    Finish, Output, ROWS_MAX, SUMS_WIDTH, Sums, Tile, WIDTH_MAX, decode, rows_max,
};
use crate::dense::matrix::sparse_rows::{Ahead, BLOCK_MAX, Nonzero, SparseRows, WORD};
use crate::dense::matrix::tiling::{ProductShape, padded, panels, tiles, width_for};
use crate::simd::huge_pages::Zeroed;
use crate::simd::isa::Isa;
use crate::simd::{Job, Simd, dispatch};
use std::ops::Range;

/// Values of a block of weights at most: 32 KiB of f32.
const BLOCK_VALUES: usize = 8192;
/// Rows of the left operand that are multiplied together, at most.
const ROWS: usize = 96;
/// Rows up to which memory limits a product that skips no zeros. Its weights are then streamed.
const STREAMED_ROWS: usize = 24;
/// Rows up to which memory limits every product.
const FEWEST_ROWS: usize = 6;
/// The same for weights that are decoded. A block is decoded once for all rows.
const FEWEST_ROWS_CODED: usize = 12;
/// Percent of values that are not zero, up to which skipping the zeros is faster than a tile.
const SPARSE_PERCENT: usize = 60;

/// What the products of a network need of a worker's memory for their blocks.
#[derive(Clone, Copy, Default)]
pub(in crate::dense) struct BlockSizes {
    /// Rows of the tallest product.
    rows: usize,
    /// Values of the longest row whose zeros are found, and its blocks.
    sparse: usize,
    sparse_blocks: usize,
    /// Sums are carried from block to block.
    is_split: bool,
    /// Weights are decoded.
    is_decoded: bool,
}

impl BlockSizes {
    /// Makes room for products that continue other sums.
    pub fn add_start(&mut self) {
        self.is_split = true;
    }

    /// Makes room for a product of this shape. `skips_zeros` says that it may skip zeros.
    pub fn add(&mut self, shape: ProductShape, skips_zeros: bool) {
        let ProductShape { m, k, n } = shape;
        let blocks = k.div_ceil(block_len(n));
        self.rows = self.rows.max(m.min(ROWS));
        self.is_split |= blocks > 1;
        if skips_zeros && may_skip(n) {
            self.sparse = self.sparse.max(k);
            self.sparse_blocks = self.sparse_blocks.max(blocks);
        }
    }

    /// Makes room for decoded weights of a product of `m` rows.
    pub fn add_decoded(&mut self, m: usize) {
        self.is_decoded |= m > FEWEST_ROWS_CODED;
    }

    fn partial(&self) -> usize {
        if self.is_split { self.rows * SUMS_WIDTH } else { 0 }
    }

    fn decoded(&self) -> usize {
        if self.is_decoded { BLOCK_VALUES } else { 0 }
    }

    /// Returns the bytes of the memory.
    pub fn bytes(&self) -> usize {
        let nonzero = Nonzero::bytes(self.rows, self.sparse, self.sparse_blocks);
        4 * (self.partial() + self.decoded()) + nonzero
    }
}

/// The memory of one worker's blocks.
pub(in crate::dense) struct BlockScratch {
    rows: usize,
    nonzero: Nonzero,
    /// The sums of a group of columns after some blocks: `[rows, SUMS_WIDTH]`.
    partial: Zeroed<f32>,
    /// A block of weights, decoded.
    decoded: Zeroed<f32>,
}

impl BlockScratch {
    /// Creates memory of these sizes.
    pub fn new(sizes: BlockSizes) -> Self {
        Self {
            rows: sizes.rows,
            nonzero: Nonzero::new(sizes.rows, sizes.sparse, sizes.sparse_blocks),
            partial: Zeroed::new(sizes.partial()),
            decoded: Zeroed::new(sizes.decoded()),
        }
    }
}

/// The sums that the rows of a product continue, from products with other columns of the left
/// operand.
#[derive(Clone, Copy)]
pub(in crate::dense) struct Start<'a> {
    /// `[.., rows, n]`.
    pub values: &'a [f32],
    /// Rows of a sample.
    pub rows: usize,
    /// The request whose sums a sample takes; `None` if each sample has its own.
    pub requests: Option<&'a [u32]>,
    /// Added to the sums of all rows of a sample: `[samples, n]`.
    pub repeated: Option<&'a [f32]>,
}

/// Writes the sums of the rows `rows` of a product of `n` columns, from column `first` on.
struct Begin<'a> {
    start: Start<'a>,
    rows: Range<usize>,
    n: usize,
    first: usize,
    width: usize,
    /// `[rows, SUMS_WIDTH]`.
    sums: &'a mut [f32],
}

impl Job for Begin<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self) {
        let Self { start, rows, n, first, width, sums } = self;
        let columns = first..n.min(first + width);
        for (row, to) in rows.zip(sums.chunks_exact_mut(SUMS_WIDTH)) {
            let to = &mut to[..columns.len()];
            let from = &start.row(row, n)[columns.clone()];
            match start.repeated(row, n) {
                None => to.copy_from_slice(from),
                Some(repeated) => {
                    let both = repeated[columns.clone()].iter().zip(from);
                    to.iter_mut().zip(both).for_each(|(to, (a, b))| *to = a + b);
                }
            }
        }
    }
}

impl<'a> Start<'a> {
    /// Returns the sums of row `row` of a product of `n` columns.
    #[inline(always)]
    fn row(&self, row: usize, n: usize) -> &'a [f32] {
        let row = match self.requests {
            Some(requests) => requests[row / self.rows] as usize * self.rows + row % self.rows,
            None => row,
        };
        &self.values[row * n..][..n]
    }

    /// Returns what is added to the sums of row `row`; `None` if nothing is.
    #[inline(always)]
    fn repeated(&self, row: usize, n: usize) -> Option<&'a [f32]> {
        self.repeated.map(|repeated| &repeated[row / self.rows * n..][..n])
    }

    /// Adds the sums to the complete products `out` `[m, n]`.
    pub fn add(&self, n: usize, relu: bool, out: &mut [f32]) {
        for (row, out) in out.chunks_exact_mut(n).enumerate() {
            let sums = self.row(row, n).iter();
            match self.repeated(row, n) {
                None => out.iter_mut().zip(sums).for_each(|(out, x)| *out += x),
                Some(repeated) => {
                    let both = repeated.iter().zip(sums);
                    out.iter_mut().zip(both).for_each(|(out, (a, b))| *out += a + b);
                }
            }
            if relu {
                out.iter_mut().for_each(|x| *x = math::relu(*x));
            }
        }
    }
}

/// The distance between the rows of the left operand, and of the result.
#[derive(Clone, Copy)]
pub(in crate::dense) struct Strides {
    pub a: usize,
    pub out: usize,
}

/// A product `out[m, n] = a[m, k] x packed`, whose panels are `packed`.
#[derive(Clone, Copy)]
pub(in crate::dense) struct BlockedProduct<'a, W> {
    pub shape: ProductShape,
    /// The rows of a product that skips zeros lie together.
    pub strides: Strides,
    pub packed: &'a [W],
    /// `None` starts the sums at zero.
    pub start: Option<Start<'a>>,
    /// As wide as all panels.
    pub finish: Option<Finish<'a>>,
    /// Whether the weights are finite, so that a product with zero is zero.
    pub skips_zeros: bool,
    /// Whether the weights are not f32.
    pub is_coded: bool,
    pub isa: Isa,
}

/// Columns that are computed together: two panels of 64, or one panel.
#[derive(Clone, Copy)]
struct Group {
    first: usize,
    /// Of a panel.
    width: usize,
    panels: usize,
}

/// A block of `k` of the panel from column `first` on.
struct Streamed {
    first: usize,
    width: usize,
    range: Range<usize>,
}

/// Returns the groups of `n` columns.
fn groups(n: usize) -> impl Iterator<Item = Group> {
    let mut first = 0;
    std::iter::from_fn(move || {
        let width = width_for(n.checked_sub(first).filter(|left| *left > 0)?);
        let is_pair =
            width == WIDTH_MAX && n > first + WIDTH_MAX && width_for(n - first - width) == width;
        let group = Group { first, width, panels: 1 + usize::from(is_pair) };
        first += width * group.panels;
        Some(group)
    })
}

/// Returns the length of a block of `k` in a product of `n` columns.
fn block_len(n: usize) -> usize {
    let len = BLOCK_VALUES / padded(n).min(SUMS_WIDTH);
    (len / WORD * WORD).min(BLOCK_MAX)
}

/// Returns whether a product of `n` columns may skip zeros: narrow panels leave the multipliers
/// idle.
fn may_skip(n: usize) -> bool {
    width_for(n) == WIDTH_MAX
}

impl<W: Stored> BlockedProduct<'_, W> {
    /// Computes the product.
    pub fn run(&self, a: &[f32], out: &mut [f32], scratch: &mut BlockScratch) {
        let (ProductShape { m, k, n }, rows) = (self.shape, scratch.rows);
        let fewest = if self.is_coded { FEWEST_ROWS_CODED } else { FEWEST_ROWS };
        let skips_zeros = self.skips_zeros && may_skip(n) && m > fewest;
        if m <= STREAMED_ROWS && !skips_zeros {
            return self.stream(a, out, scratch);
        }
        let Strides { a: a_stride, out: out_stride } = self.strides;
        for first in (0..m).step_by(rows) {
            let rows = rows.min(m - first);
            let (a, out) = (&a[first * a_stride..], &mut out[first * out_stride..]);
            if skips_zeros {
                scratch.nonzero.find_if_any(self.isa, &a[..rows * k], k, block_len(n));
                let nonzero = (0..k.div_ceil(block_len(n))).map(|i| scratch.nonzero.count(i));
                if m <= STREAMED_ROWS && 100 * nonzero.sum::<usize>() > SPARSE_PERCENT * m * k {
                    return self.stream(a, out, scratch);
                }
            }
            for group in groups(n) {
                self.begin(first..first + rows, group.first, group.width * group.panels, scratch);
                for number in 0..k.div_ceil(block_len(n)) {
                    self.block(group, number, rows, a, out, scratch);
                }
            }
        }
    }

    /// Writes the sums of the rows `rows` that the `width` columns from `first` on continue.
    fn begin(&self, rows: Range<usize>, first: usize, width: usize, scratch: &mut BlockScratch) {
        let (n, sums) = (self.shape.n, &mut scratch.partial[..]);
        if let Some(start) = self.start {
            dispatch(self.isa, Begin { start, rows, n, first, width, sums });
        }
    }

    /// Computes a product of few rows, by one panel after the other. The weights come from memory
    /// once, in blocks, and the first level of the cache keeps a block for all tiles.
    fn stream(&self, a: &[f32], out: &mut [f32], scratch: &mut BlockScratch) {
        let ProductShape { m, k, n } = self.shape;
        for (first, width) in panels(n) {
            self.begin(0..m, first, width, scratch);
            let len = BLOCK_VALUES / width;
            for start in (0..k).step_by(len) {
                let part = Streamed { first, width, range: start..k.min(start + len) };
                self.streamed(&part, a, out, &mut scratch.partial);
            }
        }
    }

    /// Computes a block of one panel for all rows.
    fn streamed(&self, part: &Streamed, a: &[f32], out: &mut [f32], partial: &mut [f32]) {
        let ProductShape { m, k, n } = self.shape;
        let Streamed { first, width, ref range } = *part;
        let panel = &self.packed[first * k..][range.start * width..range.end * width];
        let (is_first, is_last) = (range.start == 0 && self.start.is_none(), range.end == k);
        let Strides { a: a_stride, out: stride } = self.strides;
        for (row, rows) in tiles(m, rows_max(self.isa)) {
            let result = is_last.then(|| Output {
                out: &mut out[row * stride + first..],
                stride,
                finish: self.finish.map(|finish| finish.from(first)),
            });
            let from = if is_first && is_last { 0 } else { row * SUMS_WIDTH };
            let columns = width.min(n - first);
            let sums = Sums { partial: &mut partial[from..], is_first, columns, result };
            let (a, k_here) = (&a[row * a_stride + range.start..], range.len());
            Tile { a, a_stride, k: k_here, rows, panel, width, sums, ahead: None }.run(self.isa);
        }
    }

    /// Computes a block for `rows` rows of `a`.
    fn block(
        &self,
        group: Group,
        number: usize,
        rows: usize,
        a: &[f32],
        out: &mut [f32],
        scratch: &mut BlockScratch,
    ) {
        let ProductShape { k, n, .. } = self.shape;
        let len = block_len(n);
        let range = number * len..k.min((number + 1) * len);
        let BlockScratch { nonzero, partial, decoded, .. } = scratch;
        let is_sparse = self.skips_zeros
            && group.width == WIDTH_MAX
            && 100 * nonzero.count(number) <= SPARSE_PERCENT * rows * range.len();
        let panels = self.panels(group, range.clone());
        let block = Block {
            group,
            range,
            shape: ProductShape { m: rows, k, n },
            strides: self.strides,
            is_continued: self.start.is_some(),
            a,
            nonzero: is_sparse.then_some(nonzero),
            number,
            finish: self.finish,
            ahead: self.ahead(group, number + 1, rows),
            isa: self.isa,
        };

        let panels = &panels[..group.panels];
        if !self.is_coded {
            return block.run(panels, partial, out);
        }
        let values = panels[0].len();
        for (from, to) in panels.iter().zip(decoded.chunks_exact_mut(values)) {
            decode(self.isa, from, to);
        }
        let (one, two) = decoded.split_at(values);
        let two = if group.panels == 2 { &two[..values] } else { two };
        block.run(&[one, two][..group.panels], partial, out);
    }

    /// Returns the rows `range` of each panel of `group`; an empty slice if it has only one.
    fn panels(&self, group: Group, range: Range<usize>) -> [&[W]; 2] {
        [0, 1].map(|i| {
            if i >= group.panels {
                return &self.packed[..0];
            }
            let panel = &self.packed[(group.first + i * group.width) * self.shape.k..];
            &panel[range.start * group.width..range.end * group.width]
        })
    }

    /// Returns block `number` of `group`, or the first block of the next group; nothing after the
    /// last.
    fn ahead(&self, group: Group, number: usize, rows: usize) -> Ahead {
        let ProductShape { k, n, .. } = self.shape;
        let len = block_len(n);
        let next = if number * len < k {
            self.panels(group, number * len..k.min((number + 1) * len))
        } else {
            let first = group.first + group.panels * group.width;
            let group = groups(n).find(|next| next.first == first);
            group.map_or([&self.packed[..0]; 2], |group| self.panels(group, 0..k.min(len)))
        };
        Ahead::new(next, rows)
    }
}

/// A block of `k` by a group of columns, for all rows. The weights are known to `run` alone.
struct Block<'a> {
    group: Group,
    range: Range<usize>,
    shape: ProductShape,
    strides: Strides,
    /// The sums of the first block start with those in `partial`.
    is_continued: bool,
    /// `[m, k]`.
    a: &'a [f32],
    /// What is not zero, if the zeros are skipped.
    nonzero: Option<&'a Nonzero>,
    number: usize,
    finish: Option<Finish<'a>>,
    ahead: Ahead,
    isa: Isa,
}

impl Block<'_> {
    /// Computes the block by `panels`, each `[length of the block, width]`.
    fn run<W: Stored>(&self, panels: &[&[W]], partial: &mut [f32], out: &mut [f32]) {
        let (m, a_stride) = (self.shape.m, self.strides.a);
        let width = self.group.width;
        if let Some(nonzero) = self.nonzero {
            let sums = self.sums(0, width * panels.len(), 0, partial, out);
            let (number, a, ahead) = (self.number, self.a, self.ahead);
            return SparseRows { nonzero, number, a, panels, sums, ahead }.run(self.isa);
        }

        for (number, panel) in panels.iter().enumerate() {
            let (first, k_here) = (number * width, self.range.len());
            for (tile, (row, rows)) in tiles(m, ROWS_MAX).enumerate() {
                let a = &self.a[row * a_stride + self.range.start..];
                let sums = self.sums(first, width, row, partial, out);
                let ahead = Some(self.ahead.of_tile(number, tile, k_here));
                Tile { a, a_stride, k: k_here, rows, panel, width, sums, ahead }.run(self.isa);
            }
        }
    }

    /// Returns the sums of `width` columns from `first` of the group on, from row `row` on.
    fn sums<'s>(
        &'s self,
        first: usize,
        width: usize,
        row: usize,
        partial: &'s mut [f32],
        out: &'s mut [f32],
    ) -> Sums<'s> {
        let ProductShape { k, n, .. } = self.shape;
        let at = self.group.first + first;
        let is_first = self.range.start == 0 && !self.is_continued;
        let (is_last, stride) = (self.range.end == k, self.strides.out);
        let result = is_last.then(|| Output {
            out: &mut out[row * stride + at..],
            stride,
            finish: self.finish.map(|finish| finish.from(at)),
        });
        let from = if is_first && is_last { 0 } else { row * SUMS_WIDTH + first };
        Sums { partial: &mut partial[from..], is_first, columns: width.min(n - at), result }
    }
}
