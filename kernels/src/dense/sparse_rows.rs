//! Products that skip the zeros of the left operand. After a Relu half of the values or more are
//! zero, and a product with zero changes no sum. The lists of the values that are not zero are made
//! once and used for all columns. Sums have the same bits as in `microkernel.rs`, as long as no
//! weight is infinite and no bias is `-0`. Nothing here allocates after its creation.

// Vector instructions work on raw pointers. Every safe function here checks its slices first.
#![allow(unsafe_code)]
// The columns of a row are numbers, not elements.
#![allow(clippy::needless_range_loop)]

#[cfg(target_arch = "aarch64")]
use crate::dense::lanes::neon;
use crate::dense::lanes::{Lanes, Plain, Stored};
use crate::dense::microkernel::{Sums, WIDTH_MAX};
use crate::simd::isa::{Family, Isa};
use crate::simd::prefetch::prefetch_l2;

/// Length of a block of `k`, at most: a position in it is a byte.
pub(super) const BLOCK_MAX: usize = 256;
/// Rows below which a block is multiplied faster than memory can load the next one.
const FEW_ROWS: usize = 48;
/// Bytes of a cache line.
const LINE: usize = 64;
/// A list is written in pieces of this many bytes.
const PIECE: usize = 16;

/// The positions of the values that are not zero in each block of each row of `[rows, k]`.
pub(super) struct Nonzero {
    rows: usize,
    k: usize,
    /// Length of a block, of which the last may be shorter.
    block: usize,
    blocks: usize,
    /// `[rows, k]`: the list of a block starts where the block does. Each entry is less than the
    /// block's length.
    lists: Vec<u8>,
    /// `[rows, blocks]`: the length of each list.
    counts: Vec<u16>,
    /// The sums of the counts of each block.
    totals: Vec<usize>,
}

impl Nonzero {
    /// Creates memory for `rows` rows of `k` values and `blocks` blocks.
    pub fn new(rows: usize, k: usize, blocks: usize) -> Self {
        let lists = vec![0; if k > 0 { rows * k + PIECE } else { 0 }];
        Self {
            rows: 0,
            k: 0,
            block: 1,
            blocks: 0,
            lists,
            counts: vec![0; rows * blocks],
            totals: vec![0; blocks],
        }
    }

    /// Returns the bytes of such memory.
    pub fn bytes(rows: usize, k: usize, blocks: usize) -> usize {
        if k > 0 { rows * k + PIECE + (2 * rows + size_of::<usize>()) * blocks } else { 0 }
    }

    /// Lists the values of `a` `[rows, k]` that are not zero, in blocks of `block`. NaN is not
    /// zero.
    pub fn list(&mut self, isa: Isa, a: &[f32], k: usize, block: usize) {
        let rows = a.len() / k;
        assert!((1..=BLOCK_MAX).contains(&block) && self.lists.len() >= rows * k + PIECE);
        assert!(self.counts.len() >= rows * k.div_ceil(block));
        (self.rows, self.k, self.block, self.blocks) = (rows, k, block, k.div_ceil(block));
        match isa.family() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Isa` proves the instructions.
            Family::Avx512 => unsafe { x86::list_avx512(self, a) },
            _ => self.list_plainly(a),
        }

        let blocks = self.blocks;
        self.totals[..blocks].fill(0);
        for counts in self.counts[..rows * blocks].chunks_exact(blocks) {
            self.totals.iter_mut().zip(counts).for_each(|(sum, n)| *sum += usize::from(*n));
        }
    }

    fn list_plainly(&mut self, a: &[f32]) {
        let (k, block) = (self.k, self.block);
        let mut counts = self.counts.iter_mut();
        for (row, lists) in a.chunks_exact(k).zip(self.lists.chunks_exact_mut(k)) {
            for (values, list) in row.chunks(block).zip(lists.chunks_mut(block)) {
                let mut len = 0;
                for (i, x) in values.iter().enumerate() {
                    list[len] = i as u8;
                    len += usize::from(*x != 0.0);
                }
                counts.next().into_iter().for_each(|count| *count = len as u16);
            }
        }
    }

    /// Returns how many values of block `number` are not zero, in all rows.
    pub fn count(&self, number: usize) -> usize {
        self.totals[number]
    }
}

/// The memory of the next block of one or two panels, which is loaded into the second level of the
/// cache during a block. It is never read here.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    parts: [*const u8; 2],
    /// The length of a part.
    bytes: usize,
    /// Lines of each part that a row prefetches.
    lines: usize,
    /// Bytes between these lines.
    step: usize,
}

impl Ahead {
    /// Returns the memory of `parts`, for `rows` rows. With few rows only every fourth line is
    /// prefetched, and the hardware loads those between: more would wait for each other.
    pub fn new<W>(parts: [&[W]; 2], rows: usize) -> Self {
        let step = if rows < FEW_ROWS { 4 * LINE } else { LINE };
        let lines = size_of_val(parts[0]).div_ceil(step).div_ceil(rows);
        let bytes = size_of_val(parts[0]);
        Self { parts: parts.map(|part| part.as_ptr().cast()), bytes, lines, step }
    }

    /// Returns where part `number` starts for a tile that prefetches `lines` lines.
    pub fn of_tile(&self, number: usize, tile: usize, lines: usize) -> *const u8 {
        let at = tile * lines * LINE;
        self.parts[number].wrapping_add(if at < self.bytes { at } else { 0 })
    }

    /// Prefetches the lines of the next row.
    #[inline(always)]
    pub fn next_row(&mut self) {
        for _ in 0..self.lines {
            for part in &mut self.parts {
                prefetch_l2(*part);
                *part = part.wrapping_add(self.step);
            }
        }
    }
}

/// A product of the listed rows by a block of one or two panels of 64 columns.
pub(super) struct SparseRows<'a, W> {
    pub nonzero: &'a Nonzero,
    /// The block of `k`.
    pub number: usize,
    /// `[rows, k]`, with all blocks.
    pub a: &'a [f32],
    /// One or two panels, each `[length of the block, 64]`.
    pub panels: &'a [&'a [W]],
    pub sums: Sums<'a>,
    pub ahead: Ahead,
}

impl<W: Stored> SparseRows<'_, W> {
    /// Computes all rows.
    pub fn run(&mut self, isa: Isa) {
        let Nonzero { rows, k, block, .. } = *self.nonzero;
        assert!(self.number * block < k && self.a.len() >= rows * k);
        let len = block.min(k - self.number * block);
        assert!((1..=2).contains(&self.panels.len()));
        assert!(self.panels.iter().all(|panel| panel.len() == len * WIDTH_MAX));
        assert!(self.sums.columns > (self.panels.len() - 1) * WIDTH_MAX);
        self.sums.check(rows, self.panels.len() * WIDTH_MAX);
        match isa.family() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Isa` proves the instructions; the slices were checked.
            Family::Avx512 => unsafe { x86::rows_avx512(self) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as for AVX-512.
            Family::Avx2 => unsafe { x86::rows_avx2(self) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as for AVX-512.
            Family::Neon => unsafe { each_panel::<neon::F32x4, W, 16>(self) },
            // SAFETY: plain lanes need no instructions; the slices were checked.
            _ => unsafe { each_panel::<Plain, W, 8>(self) },
        }
    }
}

/// Computes all rows by one panel after the other, for vectors of which `C` make a panel.
#[inline(always)]
unsafe fn each_panel<V: Lanes, W: Stored, const C: usize>(t: &mut SparseRows<W>) {
    for panel in 0..t.panels.len() {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { rows::<V, W, C, 1>(t, panel) };
    }
}

/// Computes all rows by `P` panels from panel `first` on. The sums of a row are in registers: `C`
/// vectors for each panel.
#[inline(always)]
unsafe fn rows<V: Lanes, W: Stored, const C: usize, const P: usize>(
    t: &mut SparseRows<W>,
    first: usize,
) {
    let Nonzero { rows, k, block, blocks, .. } = *t.nonzero;
    // SAFETY: `SparseRows::run` checked that the slices hold what is read and written here, and
    // each position is less than the length of its block.
    unsafe {
        let mut a = t.a.as_ptr().add(t.number * block);
        let mut list = t.nonzero.lists.as_ptr().add(t.number * block);
        let mut count = t.nonzero.counts.as_ptr().add(t.number);
        let mut panels = [std::ptr::null(); P];
        for p in 0..P {
            panels[p] = t.panels.get_unchecked(first + p).as_ptr();
        }

        for row in 0..rows {
            if first == 0 {
                t.ahead.next_row();
            }
            let mut sums = [[V::splat(0.0); C]; P];
            for p in 0..P {
                sums[p] = t.sums.start(row, (first + p) * WIDTH_MAX);
            }

            for i in 0..usize::from(*count) {
                let at = usize::from(*list.add(i));
                let x = V::splat(*a.add(at));
                for p in 0..P {
                    let w = panels[p].add(at * WIDTH_MAX);
                    for c in 0..C {
                        sums[p][c] = W::lanes::<V>(w.add(c * V::N)).mul_add(x, sums[p][c]);
                    }
                }
            }

            for p in 0..P {
                t.sums.end(row, (first + p) * WIDTH_MAX, sums[p]);
            }
            (a, list) = (a.wrapping_add(k), list.wrapping_add(k));
            count = count.wrapping_add(blocks);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::dense::lanes::x86::{F32x8, F32x16};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) unsafe fn rows_avx512<W: Stored>(t: &mut SparseRows<W>) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe {
            match t.panels.len() {
                1 => rows::<F32x16, W, 4, 1>(t, 0),
                _ => rows::<F32x16, W, 4, 2>(t, 0),
            }
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn rows_avx2<W: Stored>(t: &mut SparseRows<W>) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { each_panel::<F32x8, W, 8>(t) }
    }

    /// Lists 16 values at a time.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,popcnt")]
    pub(super) fn list_avx512(nonzero: &mut Nonzero, a: &[f32]) {
        let (k, block) = (nonzero.k, nonzero.block);
        let first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let mut counts = nonzero.counts.iter_mut();
        for (number, row) in a.chunks_exact(k).enumerate() {
            for (at, values) in row.chunks(block).enumerate() {
                let list = &mut nonzero.lists[number * k + at * block..][..values.len() + PIECE];
                let (mut len, mut positions) = (0, first);
                for piece in values.chunks(PIECE) {
                    let here = u16::MAX >> (PIECE - piece.len());
                    // SAFETY: the mask leaves out what is not in `piece`. The list has room for
                    // a piece after all of its entries.
                    unsafe {
                        let x = _mm512_maskz_loadu_ps(here, piece.as_ptr());
                        let is_value = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(x, _mm512_setzero_ps());
                        let kept = _mm512_maskz_compress_epi32(is_value, positions);
                        let bytes = _mm512_cvtepi32_epi8(kept);
                        _mm_storeu_si128(list.as_mut_ptr().add(len).cast(), bytes);
                        len += is_value.count_ones() as usize;
                    }
                    positions = _mm512_add_epi32(positions, _mm512_set1_epi32(PIECE as i32));
                }
                counts.next().into_iter().for_each(|count| *count = len as u16);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_lists_have_what_is_not_zero(
            rows in 1..5usize,
            k in 1..300usize,
            block in prop_oneof![1..70usize, Just(BLOCK_MAX)],
            seed: u64,
        ) {
            let hash = |i: usize| (seed ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let value = |i: usize| match hash(i) >> 61 {
                0..=2 => 0.0,
                3 => -0.0,
                4 => f32::NAN,
                _ => -1.5,
            };
            let a: Vec<f32> = (0..rows * k).map(value).collect();
            for isa in Isa::available() {
                let mut nonzero = Nonzero::new(rows, k, k.div_ceil(block));
                nonzero.list(isa, &a, k, block);
                for number in 0..k.div_ceil(block) {
                    let mut count = 0;
                    for (row, values) in a.chunks_exact(k).enumerate() {
                        let values = values.chunks(block).nth(number).unwrap_or_default();
                        let is_listed = |i: &usize| values[*i] != 0.0;
                        let expected: Vec<u8> =
                            (0..values.len()).filter(is_listed).map(|i| i as u8).collect();
                        let count_here = usize::from(nonzero.counts[row * nonzero.blocks + number]);
                        let list = &nonzero.lists[row * k + number * block..][..count_here];
                        prop_assert_eq!(list, &expected, "{:?}", isa);
                        count += expected.len();
                    }
                    prop_assert_eq!(nonzero.count(number), count);
                }
            }
        }
    }
}
