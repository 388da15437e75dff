//! Products that skip the zeros of the left operand. After a Relu half of the values or more are
//! zero, and a product with zero changes no sum. The bits that say which values are not zero are
//! found once and used for all columns. Sums have the same bits as in `microkernel.rs`, as long as
//! no weight is infinite and no bias is `-0`. Nothing here allocates after its creation.

// Vector instructions work on raw pointers. Every safe function here checks its slices first.
#![allow(unsafe_code)]
// The columns of a row are numbers, not elements.
#![allow(clippy::needless_range_loop)]

#[cfg(target_arch = "aarch64")]
use crate::dense::matrix::lanes::neon;
use crate::dense::matrix::lanes::{Lanes, Plain, Stored};
use crate::dense::matrix::microkernel::{Sums, WIDTH_MAX};
use crate::simd::isa::{Family, Isa};
use crate::simd::prefetch::prefetch_l2;

/// Values of a left operand that share a word of bits. A block of `k` has a multiple, at most
/// `BLOCK_MAX`.
pub(in crate::dense) const WORD: usize = u64::BITS as usize;
/// Length of a block of `k`, at most.
pub(in crate::dense) const BLOCK_MAX: usize = 4 * WORD;
/// Rows below which a block is multiplied faster than memory can load the next one.
const FEW_ROWS: usize = 48;
/// Rows that are searched for zeros before all are.
const SAMPLED_ROWS: usize = 4;
/// Bytes of a cache line.
const LINE: usize = 64;

/// A bit for each value of `[rows, k]`, which is set if the value is not zero.
pub(in crate::dense) struct Nonzero {
    rows: usize,
    k: usize,
    /// Words of a block, of which the last may be shorter.
    block_words: usize,
    /// `[rows, words of k]`. No bit stands for a value after the last.
    words: Vec<u64>,
    /// The number of set bits of each block, in all rows.
    totals: Vec<usize>,
}

impl Nonzero {
    /// Creates memory for `rows` rows of `k` values and `blocks` blocks.
    pub fn new(rows: usize, k: usize, blocks: usize) -> Self {
        let words = vec![0; rows * k.div_ceil(WORD)];
        Self { rows: 0, k: 0, block_words: 1, words, totals: vec![0; blocks] }
    }

    /// Returns the bytes of such memory.
    pub fn bytes(rows: usize, k: usize, blocks: usize) -> usize {
        rows * k.div_ceil(WORD) * size_of::<u64>() + blocks * size_of::<usize>()
    }

    /// Calls [`Nonzero::find`] if one of a few rows has a zero. Otherwise all values count as not
    /// zero. Either way the product is right: zeros that were not found are multiplied.
    pub fn find_if_any(&mut self, isa: Isa, a: &[f32], k: usize, block: usize) {
        // A Relu and the padding of a sequence leave zeros in most rows, other operators in none.
        let step = (a.len() / k).div_ceil(SAMPLED_ROWS).max(1);
        let zeros = |row: &[f32]| row.iter().filter(|x| **x == 0.0).count();
        if a.chunks_exact(k).rev().step_by(step).any(|row| zeros(row) > 0) {
            return self.find(isa, a, k, block);
        }
        self.totals[..k.div_ceil(block)].fill(a.len());
    }

    /// Finds the values of `a` `[rows, k]` that are not zero, for blocks of `block`. NaN is not
    /// zero.
    pub fn find(&mut self, isa: Isa, a: &[f32], k: usize, block: usize) {
        let (rows, row_words, blocks) = (a.len() / k, k.div_ceil(WORD), k.div_ceil(block));
        assert!(block.is_multiple_of(WORD) && (1..=BLOCK_MAX).contains(&block));
        assert!(self.words.len() >= rows * row_words && self.totals.len() >= blocks);
        (self.rows, self.k, self.block_words) = (rows, k, block / WORD);
        let words = &mut self.words[..rows * row_words];
        match isa.family() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Isa` proves the instructions.
            Family::Avx512 => unsafe { x86::find_avx512(a, k, words) },
            _ => find_plainly(a, k, words),
        }

        if blocks == 1 {
            self.totals[0] = words.iter().map(|word| word.count_ones() as usize).sum();
            return;
        }
        self.totals[..blocks].fill(0);
        for row in words.chunks_exact(row_words) {
            for (total, block) in self.totals.iter_mut().zip(row.chunks(self.block_words)) {
                *total += block.iter().map(|word| word.count_ones() as usize).sum::<usize>();
            }
        }
    }

    /// Returns how many values of block `number` are not zero, in all rows.
    pub fn count(&self, number: usize) -> usize {
        self.totals[number]
    }
}

/// Sets in `words` the bits of `a` `[rows, k]`.
fn find_plainly(a: &[f32], k: usize, words: &mut [u64]) {
    let values = a.chunks_exact(k).flat_map(|row| row.chunks(WORD));
    for (word, values) in words.iter_mut().zip(values) {
        let bit = |(i, x): (usize, &f32)| u64::from(*x != 0.0) << i;
        *word = values.iter().enumerate().map(bit).sum();
    }
}

/// The memory of the next block of one or two panels, which is loaded into the second level of the
/// cache during a block. It is never read here.
#[derive(Clone, Copy)]
pub(in crate::dense) struct Ahead {
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

/// A product of the rows of `nonzero` by a block of one or two panels of 64 columns.
pub(in crate::dense) struct SparseRows<'a, W> {
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
        let Nonzero { rows, k, block_words, .. } = *self.nonzero;
        let block = block_words * WORD;
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
    let Nonzero { rows, k, block_words, .. } = *t.nonzero;
    let (row_words, first_word) = (k.div_ceil(WORD), t.number * block_words);
    // SAFETY: `SparseRows::run` checked that the slices hold what is read and written here, and
    // a set bit stands for a value of the row.
    unsafe {
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

            for word in first_word..row_words.min(first_word + block_words) {
                let a = t.a.as_ptr().add(row * k + word * WORD);
                let mut bits = *t.nonzero.words.get_unchecked(row * row_words + word);
                while bits != 0 {
                    let at = bits.trailing_zeros() as usize;
                    bits &= bits - 1;
                    let x = V::splat(*a.add(at));
                    for p in 0..P {
                        let w = panels[p].add(((word - first_word) * WORD + at) * WIDTH_MAX);
                        for c in 0..C {
                            sums[p][c] = W::lanes::<V>(w.add(c * V::N)).mul_add(x, sums[p][c]);
                        }
                    }
                }
            }

            for p in 0..P {
                t.sums.end(row, (first + p) * WIDTH_MAX, sums[p]);
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::dense::matrix::lanes::x86::{F32x8, F32x16};
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(in crate::dense) unsafe fn rows_avx512<W: Stored>(t: &mut SparseRows<W>) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe {
            match t.panels.len() {
                1 => rows::<F32x16, W, 4, 1>(t, 0),
                _ => rows::<F32x16, W, 4, 2>(t, 0),
            }
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(in crate::dense) unsafe fn rows_avx2<W: Stored>(t: &mut SparseRows<W>) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { each_panel::<F32x8, W, 8>(t) }
    }

    /// Sets in `words` the bits of `a` `[rows, k]`, 16 values at a time.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(in crate::dense) fn find_avx512(a: &[f32], k: usize, words: &mut [u64]) {
        const LANES: usize = 16;
        let values = a.chunks_exact(k).flat_map(|row| row.chunks(WORD));
        for (word, values) in words.iter_mut().zip(values) {
            *word = 0;
            for (part, values) in values.chunks(LANES).enumerate() {
                let here = u16::MAX >> (LANES - values.len());
                // SAFETY: the mask leaves out what is not in `values`.
                let x = unsafe { _mm512_maskz_loadu_ps(here, values.as_ptr()) };
                let bits = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(x, _mm512_setzero_ps());
                *word |= u64::from(bits) << (LANES * part);
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
        fn the_bits_are_set_for_what_is_not_zero(
            rows in 1..5usize,
            k in 1..600usize,
            block in prop_oneof![Just(WORD), Just(2 * WORD), Just(BLOCK_MAX)],
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
            let row_words = k.div_ceil(WORD);
            for isa in Isa::available() {
                let mut nonzero = Nonzero::new(rows, k, k.div_ceil(block));
                nonzero.words.fill(u64::MAX);
                nonzero.find(isa, &a, k, block);
                let mut counts = vec![0; k.div_ceil(block)];
                for (at, bits) in nonzero.words.iter().enumerate() {
                    let (row, first) = (at / row_words, at % row_words * WORD);
                    for i in 0..WORD {
                        let is_set = first + i < k && a[row * k + first + i] != 0.0;
                        prop_assert_eq!(bits >> i & 1 == 1, is_set, "{:?}", isa);
                        counts[first / block] += usize::from(is_set);
                    }
                }
                prop_assert_eq!(&nonzero.totals, &counts);
            }
        }
    }
}
