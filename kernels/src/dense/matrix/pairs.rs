//! The products of every two of a sample's vectors, as the interaction of a DLRM takes them. Only
//! one of each two equal products is computed. Every product is one chain of fused multiply-adds in
//! ascending order from `+0`, with the same bits as in `microkernel.rs`. This file never allocates.

// Vector instructions work on raw pointers. The safe function checks its slices first.
#![allow(unsafe_code)]
// The rows and columns of a tile are numbers, not elements.
#![allow(clippy::needless_range_loop)]

#[cfg(target_arch = "aarch64")]
use crate::dense::matrix::lanes::neon;
use crate::dense::matrix::lanes::{Lanes, Plain};
use crate::dense::matrix::transpose::transpose;
use crate::simd::isa::{Family, Isa};

/// Columns of a tile.
const COLUMNS: usize = 16;

/// Which products of vectors of `k` values are the result of a sample. Operand `i` has `rows[i]`
/// of the vectors.
pub(in crate::dense) struct Pairs<'a> {
    pub rows: &'a [usize],
    pub k: usize,
    /// The positions of the results, as `pair` returns them.
    pub picks: &'a [u32],
}

/// Returns the position of the product of vectors `i` and `j` of `n`.
pub(crate) fn pair(n: usize, i: usize, j: usize) -> usize {
    i.max(j) * width(n) + i.min(j)
}

/// Returns the vectors of `n` whose product is at `position`, the later one first.
pub(crate) fn vectors(n: usize, position: usize) -> [usize; 2] {
    [position / width(n), position % width(n)]
}

/// Returns the floats of the memory for `n` vectors of `k` values.
pub(in crate::dense) fn memory(n: usize, k: usize) -> usize {
    (k + width(n)) * width(n)
}

/// Returns `n` vectors with the padding of the last tile.
fn width(n: usize) -> usize {
    n.next_multiple_of(COLUMNS)
}

impl Pairs<'_> {
    /// Computes the products of one sample, of which `part(i)` is operand `i`.
    pub fn run<'a>(
        &self,
        part: impl Fn(usize) -> &'a [f32],
        out: &mut [f32],
        isa: Isa,
        memory: &mut [f32],
    ) {
        let n = self.rows.iter().sum();
        let (columns, products) = memory.split_at_mut(self.k * width(n));
        let mut first = 0;
        for (i, rows) in self.rows.iter().enumerate() {
            transpose(part(i), self.k, &mut columns[first..], width(n));
            first += rows;
        }
        Triangle { columns, products, k: self.k, n }.run(isa);
        out.iter_mut().zip(self.picks).for_each(|(to, pick)| *to = products[*pick as usize]);
    }
}

/// The products of every two of `n` columns, those with themselves included.
struct Triangle<'a> {
    /// `[k, width(n)]`.
    columns: &'a [f32],
    /// `[width(n), width(n)]`. A product whose column is after its row may have any value.
    products: &'a mut [f32],
    k: usize,
    n: usize,
}

impl Triangle<'_> {
    fn run(&mut self, isa: Isa) {
        let width = width(self.n);
        assert!(self.n > 0 && self.columns.len() >= self.k * width);
        assert!(self.products.len() >= width * width);
        match isa.family() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Isa` proves the instructions; the slices were checked.
            Family::Avx512 => unsafe { x86::triangle_avx512(self) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as for AVX-512.
            Family::Avx2 => unsafe { x86::triangle_avx2(self) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as for AVX-512.
            Family::Neon => unsafe { triangle::<neon::F32x4, 6, 4>(self) },
            // SAFETY: plain lanes need no instructions; the slices were checked.
            _ => unsafe { triangle::<Plain, 6, 2>(self) },
        }
    }
}

/// Computes tiles of `R` rows, at most 16, by 16 columns, which are `C` vectors.
#[inline(always)]
unsafe fn triangle<V: Lanes, const R: usize, const C: usize>(t: &mut Triangle) {
    for column in (0..t.n).step_by(COLUMNS) {
        for row in (column..t.n).step_by(R) {
            // The last tile overlaps the one before. Rows after `n` are padding.
            let row = row.min(t.n.saturating_sub(R));
            // SAFETY: the tile is within `width(n)` rows and columns: `R` is at most `COLUMNS`.
            unsafe { tile::<V, R, C>(t, row, column) };
        }
    }
}

/// Computes the products of `R` columns from `row` on and the 16 from `column` on.
#[inline(always)]
unsafe fn tile<V: Lanes, const R: usize, const C: usize>(
    t: &mut Triangle,
    row: usize,
    column: usize,
) {
    let width = width(t.n);
    // SAFETY: `Triangle::run` checked that the slices hold all rows of `width` values.
    unsafe {
        let mut sums = [[V::splat(0.0); C]; R];
        let mut values = t.columns.as_ptr();
        for _ in 0..t.k {
            let mut w = [V::splat(0.0); C];
            for c in 0..C {
                w[c] = V::load(values.add(column + c * V::N));
            }
            for r in 0..R {
                let x = V::splat(*values.add(row + r));
                for c in 0..C {
                    sums[r][c] = w[c].mul_add(x, sums[r][c]);
                }
            }
            values = values.wrapping_add(width);
        }

        for r in 0..R {
            let products = t.products.as_mut_ptr().add((row + r) * width + column);
            for c in 0..C {
                sums[r][c].store(products.add(c * V::N));
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::dense::matrix::lanes::x86::{F32x8, F32x16};

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(in crate::dense) unsafe fn triangle_avx512(t: &mut Triangle) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { triangle::<F32x16, 14, 1>(t) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(in crate::dense) unsafe fn triangle_avx2(t: &mut Triangle) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { triangle::<F32x8, 6, 2>(t) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_product_is_one_chain_on_every_instruction_set(
            parts in prop::collection::vec(1..30usize, 1..4),
            k in 1..40usize,
            seed: u64,
        ) {
            let n: usize = parts.iter().sum();
            let value = |i: usize| {
                let bits = (seed ^ i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
                bits as i32 as f32 / 1e9
            };
            let all: Vec<f32> = (0..n * k).map(value).collect();
            let part = |i: usize| {
                let first: usize = parts[..i].iter().sum();
                &all[first * k..][..parts[i] * k]
            };
            let chain = |i: usize, j: usize| {
                (0..k).fold(0.0f32, |sum, at| all[i * k + at].mul_add(all[j * k + at], sum))
            };
            let all_pairs = || (0..n).flat_map(|i| (0..n).map(move |j| (i, j)));
            let picks: Vec<u32> = all_pairs().map(|(i, j)| pair(n, i, j) as u32).collect();
            let expected: Vec<u32> = all_pairs().map(|(i, j)| chain(i, j).to_bits()).collect();
            for isa in Isa::available() {
                let mut out = vec![0.0; n * n];
                let mut memory = vec![f32::NAN; memory(n, k)];
                let pairs = Pairs { rows: &parts, k, picks: &picks };
                pairs.run(part, &mut out, isa, &mut memory);
                let out: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
                prop_assert_eq!(&out, &expected, "{:?}", isa);
            }
        }
    }
}
