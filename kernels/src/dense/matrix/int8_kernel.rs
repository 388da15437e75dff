//! The innermost loops of an int8 product: a few quantized rows by a few columns of weights. One
//! body is instantiated for each instruction set. The sums are integers that never saturate, so all
//! give the same bits in any order. This file never allocates.

// Vector instructions work on raw pointers. Every safe function here checks its slices first.
#![allow(unsafe_code)]
// The rows and columns of a tile are numbers, not elements.
#![allow(clippy::needless_range_loop)]

use crate::dense::matrix::math;
use crate::dense::matrix::microkernel::{Finish, ROWS_MAX, WIDTH_MAX};
use crate::dense::matrix::quantize::{Bytes, GROUP, RowScale};
use crate::simd::isa::{Family, Isa};
use crate::simd::prefetch::{prefetch, prefetch_l2};

/// Prefetch distance of a panel, in groups.
const PREFETCH_GROUPS: usize = 12;

/// Part of a product: some quantized rows by one panel.
pub(in crate::dense) struct Int8Tile<'a> {
    /// `[rows, groups, 4]`.
    pub a: &'a [u8],
    /// One for each row.
    pub scales: &'a [RowScale],
    pub groups: usize,
    /// `[groups, width, 4]`. No weight is -128.
    pub panel: &'a [i8],
    pub width: usize,
    /// The sum of each column's weights, as wide as the panel.
    pub column_sums: &'a [i32],
    /// `[rows, columns]`, rows `stride` apart; `columns` is at most `width`.
    pub out: &'a mut [f32],
    pub stride: usize,
    pub columns: usize,
    pub finish: Finish<'a>,
    /// Prefetched during the tile, a cache line for each group; never read.
    pub ahead: *const i8,
}

/// Returns how the kernel of `isa` reads the bytes of a row.
pub(in crate::dense) fn bytes_for(isa: Isa) -> Bytes {
    match isa.family() {
        // VPDPBUSD multiplies unsigned bytes by signed ones.
        #[cfg(target_arch = "x86_64")]
        Family::Avx2 | Family::Avx512 if isa.has_dot() => Bytes::Unsigned,
        _ => Bytes::Signed,
    }
}

impl Int8Tile<'_> {
    /// Computes the tile.
    pub fn run(&mut self, isa: Isa) {
        let rows = self.scales.len();
        assert!((1..=ROWS_MAX).contains(&rows) && (1..=self.width).contains(&self.columns));
        assert!(matches!(self.width, 16 | 32 | 64));
        assert!(self.panel.len() == self.groups * self.width * GROUP);
        assert!(self.a.len() >= rows * self.groups * GROUP);
        assert!(self.column_sums.len() >= self.width);
        assert!(self.out.len() >= (rows - 1) * self.stride + self.columns);
        assert!(self.finish.scale.len() >= self.width && self.finish.bias.len() >= self.width);
        match (isa.family(), isa.has_dot()) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Isa` proves the instructions; the slices were checked.
            (Family::Avx512, true) => unsafe { x86::tile_avx512_vnni(self) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as for AVX-512.
            (Family::Avx2, true) => unsafe { x86::tile_avx_vnni(self) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as for AVX-512, whose family has all of AVX2.
            (Family::Avx2 | Family::Avx512, false) => unsafe { x86::tile_avx2(self) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as for AVX-512.
            (Family::Neon, true) => unsafe { neon::tile_dot(self) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as for AVX-512.
            (Family::Neon, false) => unsafe { narrow_tile::<neon::Widened, 4, 8, 16>(self) },
            // SAFETY: plain lanes need no instructions; the slices were checked.
            (Family::Plain, _) => unsafe { narrow_tile::<Plain, 4, 8, 16>(self) },
        }
    }
}

/// A vector of `N` sums. Its functions are `unsafe`: the machine must have the instructions, and
/// each pointer must be valid for what is read or written.
trait Sums: Copy {
    const N: usize;
    /// `4 N` bytes.
    type Vector: Copy;
    unsafe fn zero() -> Self;
    /// Loads four weights of each of `N` columns.
    unsafe fn weights(p: *const i8) -> Self::Vector;
    /// Loads one group of a row, `N` times.
    unsafe fn group(p: *const u8) -> Self::Vector;
    /// Adds to each sum the four products of its weights and the group.
    unsafe fn add_products(self, weights: Self::Vector, group: Self::Vector) -> Self;
    unsafe fn store(self, p: *mut i32);
}

/// Computes `R` rows by the `C` vectors of columns from `first` on.
#[inline(always)]
unsafe fn tile<V: Sums, const R: usize, const C: usize>(t: &mut Int8Tile, first: usize) {
    if first >= t.columns {
        return;
    }
    let k = t.groups * GROUP;
    let mut raw = [0i32; WIDTH_MAX];
    // SAFETY: `Int8Tile::run` checked that the slices hold what is read and written here.
    unsafe {
        let a = t.a.as_ptr();
        let mut sums = [[V::zero(); C]; R];
        let mut panel = t.panel.as_ptr().add(first * GROUP);
        for group in 0..t.groups {
            let mut w = [V::weights(panel); C];
            for c in 0..C {
                w[c] = V::weights(panel.add(c * V::N * GROUP));
                if (c * V::N * GROUP).is_multiple_of(64) {
                    let ahead = PREFETCH_GROUPS * t.width + c * V::N;
                    prefetch(panel.wrapping_add(ahead * GROUP));
                }
            }

            for r in 0..R {
                let x = V::group(a.add(r * k + group * GROUP));
                for c in 0..C {
                    sums[r][c] = sums[r][c].add_products(w[c], x);
                }
            }
            panel = panel.wrapping_add(t.width * GROUP);
            prefetch_l2(t.ahead.wrapping_add(group * 64));
        }

        for r in 0..R {
            for c in 0..C {
                sums[r][c].store(raw.as_mut_ptr().add(c * V::N));
            }
            put(t, r, first, &raw[..(C * V::N).min(t.columns - first)]);
        }
    }
}

/// Turns the sums of one row, for the columns from `first` on, into results.
#[inline(always)]
fn put(t: &mut Int8Tile, row: usize, first: usize, sums: &[i32]) {
    let RowScale { scale, zero } = t.scales[row];
    let columns = first..first + sums.len();
    let from = sums.iter().zip(&t.column_sums[columns.clone()]);
    let from = from.zip(&t.finish.scale[columns.clone()]).zip(&t.finish.bias[columns]);
    let out = &mut t.out[row * t.stride + first..][..sums.len()];
    let relu = t.finish.relu;
    for (out, (((sum, column_sum), column_scale), bias)) in out.iter_mut().zip(from) {
        let sum = sum.wrapping_sub(zero.wrapping_mul(*column_sum)) as f32;
        let value = sum.mul_add(scale * column_scale, *bias);
        *out = if relu { math::relu(value) } else { value };
    }
}

/// Computes a tile on narrow vectors, of which `C16` make 16 columns, `C32` make 32 and `C64` make
/// 64.
#[inline(always)]
unsafe fn narrow_tile<V: Sums, const C16: usize, const C32: usize, const C64: usize>(
    t: &mut Int8Tile,
) {
    // SAFETY: the caller keeps the contract of this function.
    unsafe {
        let wide = match (t.scales.len(), t.width) {
            (1, 64) => return tile::<V, 1, C64>(t, 0),
            (1 | 2, 32 | 64) => 32,
            _ => 16,
        };

        for first in (0..t.width).step_by(wide) {
            match (t.scales.len(), wide) {
                (1, 32) => tile::<V, 1, C32>(t, first),
                (1, _) => tile::<V, 1, C16>(t, first),
                (2, 32) => tile::<V, 2, C32>(t, first),
                (2, _) => tile::<V, 2, C16>(t, first),
                (3, _) => tile::<V, 3, C16>(t, first),
                (4, _) => tile::<V, 4, C16>(t, first),
                (5, _) => tile::<V, 5, C16>(t, first),
                (_, _) => tile::<V, 6, C16>(t, first),
            }
        }
    }
}

/// Four sums without vector instructions. They define what the others compute.
#[derive(Clone, Copy)]
struct Plain([i32; 4]);

impl Sums for Plain {
    const N: usize = 4;
    type Vector = [i8; 16];

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0; 4])
    }
    #[inline(always)]
    unsafe fn weights(p: *const i8) -> [i8; 16] {
        // SAFETY: `Sums` asks for `4 N` weights at `p`; the load needs no alignment.
        unsafe { p.cast::<[i8; 16]>().read() }
    }
    #[inline(always)]
    unsafe fn group(p: *const u8) -> [i8; 16] {
        // SAFETY: `Sums` asks for a group of 4 bytes at `p`; the read needs no alignment.
        let group = unsafe { p.cast::<[i8; GROUP]>().read() };
        std::array::from_fn(|i| group[i % GROUP])
    }
    #[inline(always)]
    unsafe fn add_products(self, weights: [i8; 16], group: [i8; 16]) -> Self {
        let product = |i: usize| i32::from(weights[i]) * i32::from(group[i]);
        let four = |lane: usize| (GROUP * lane..GROUP * (lane + 1)).map(product).sum::<i32>();
        Self(std::array::from_fn(|lane| self.0[lane].wrapping_add(four(lane))))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut i32) {
        // SAFETY: `Sums` asks for room for `N` sums at `p`.
        unsafe { p.cast::<[i32; 4]>().write(self.0) }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use std::arch::x86_64::*;

    /// 16 sums by AVX-512 VNNI.
    #[derive(Clone, Copy)]
    struct Avx512Vnni(__m512i);
    /// 8 sums by AVX-VNNI.
    #[derive(Clone, Copy)]
    struct AvxVnni(__m256i);
    /// 8 sums by AVX2, whose bytes are signed.
    #[derive(Clone, Copy)]
    struct Avx2(__m256i);

    impl Sums for Avx512Vnni {
        const N: usize = 16;
        type Vector = __m512i;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: no memory is accessed, and `Sums` asks for the instruction.
            unsafe { Self(_mm512_setzero_si512()) }
        }
        #[inline(always)]
        unsafe fn weights(p: *const i8) -> __m512i {
            // SAFETY: `Sums` asks for `4 N` weights at `p`; the load needs no alignment.
            unsafe { _mm512_loadu_si512(p.cast()) }
        }
        #[inline(always)]
        unsafe fn group(p: *const u8) -> __m512i {
            // SAFETY: `Sums` asks for a group of 4 bytes at `p`; the read needs no alignment.
            unsafe { _mm512_set1_epi32(p.cast::<i32>().read_unaligned()) }
        }
        #[inline(always)]
        unsafe fn add_products(self, weights: __m512i, group: __m512i) -> Self {
            // SAFETY: registers alone, and `Sums` asks for the instructions.
            unsafe { Self(_mm512_dpbusd_epi32(self.0, group, weights)) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut i32) {
            // SAFETY: `Sums` asks for room for `N` sums at `p`.
            unsafe { _mm512_storeu_si512(p.cast(), self.0) }
        }
    }

    impl Sums for AvxVnni {
        const N: usize = 8;
        type Vector = __m256i;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: no memory is accessed, and `Sums` asks for the instruction.
            unsafe { Self(_mm256_setzero_si256()) }
        }
        #[inline(always)]
        unsafe fn weights(p: *const i8) -> __m256i {
            // SAFETY: `Sums` asks for `4 N` weights at `p`; the load needs no alignment.
            unsafe { _mm256_loadu_si256(p.cast()) }
        }
        #[inline(always)]
        unsafe fn group(p: *const u8) -> __m256i {
            // SAFETY: `Sums` asks for a group of 4 bytes at `p`; the read needs no alignment.
            unsafe { _mm256_set1_epi32(p.cast::<i32>().read_unaligned()) }
        }
        #[inline(always)]
        unsafe fn add_products(self, weights: __m256i, group: __m256i) -> Self {
            // SAFETY: registers alone, and `Sums` asks for the instructions.
            unsafe { Self(_mm256_dpbusd_avx_epi32(self.0, group, weights)) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut i32) {
            // SAFETY: `Sums` asks for room for `N` sums at `p`.
            unsafe { _mm256_storeu_si256(p.cast(), self.0) }
        }
    }

    impl Sums for Avx2 {
        const N: usize = 8;
        type Vector = __m256i;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: no memory is accessed, and `Sums` asks for the instruction.
            unsafe { Self(_mm256_setzero_si256()) }
        }
        #[inline(always)]
        unsafe fn weights(p: *const i8) -> __m256i {
            // SAFETY: `Sums` asks for `4 N` weights at `p`; the load needs no alignment.
            unsafe { _mm256_loadu_si256(p.cast()) }
        }
        #[inline(always)]
        unsafe fn group(p: *const u8) -> __m256i {
            // SAFETY: `Sums` asks for a group of 4 bytes at `p`; the read needs no alignment.
            unsafe { _mm256_set1_epi32(p.cast::<i32>().read_unaligned()) }
        }
        /// Moves the group's signs to the weights, because VPMADDUBSW wants one operand unsigned.
        /// It saturates at 32,767. A sum of two products is at most 2 x 128 x 127 = 32,512.
        #[inline(always)]
        unsafe fn add_products(self, weights: __m256i, group: __m256i) -> Self {
            // SAFETY: registers alone, and `Sums` asks for the instructions.
            unsafe {
                let weights = _mm256_sign_epi8(weights, group);
                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(group), weights);
                let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
                Self(_mm256_add_epi32(self.0, fours))
            }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut i32) {
            // SAFETY: `Sums` asks for room for `N` sums at `p`.
            unsafe { _mm256_storeu_si256(p.cast(), self.0) }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
    pub(in crate::dense) unsafe fn tile_avx512_vnni(t: &mut Int8Tile) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe {
            match (t.scales.len(), t.width) {
                (1, 16) => tile::<Avx512Vnni, 1, 1>(t, 0),
                (2, 16) => tile::<Avx512Vnni, 2, 1>(t, 0),
                (3, 16) => tile::<Avx512Vnni, 3, 1>(t, 0),
                (4, 16) => tile::<Avx512Vnni, 4, 1>(t, 0),
                (5, 16) => tile::<Avx512Vnni, 5, 1>(t, 0),
                (_, 16) => tile::<Avx512Vnni, 6, 1>(t, 0),
                (1, 32) => tile::<Avx512Vnni, 1, 2>(t, 0),
                (2, 32) => tile::<Avx512Vnni, 2, 2>(t, 0),
                (3, 32) => tile::<Avx512Vnni, 3, 2>(t, 0),
                (4, 32) => tile::<Avx512Vnni, 4, 2>(t, 0),
                (5, 32) => tile::<Avx512Vnni, 5, 2>(t, 0),
                (_, 32) => tile::<Avx512Vnni, 6, 2>(t, 0),
                (1, _) => tile::<Avx512Vnni, 1, 4>(t, 0),
                (2, _) => tile::<Avx512Vnni, 2, 4>(t, 0),
                (3, _) => tile::<Avx512Vnni, 3, 4>(t, 0),
                (4, _) => tile::<Avx512Vnni, 4, 4>(t, 0),
                (5, _) => tile::<Avx512Vnni, 5, 4>(t, 0),
                (_, _) => tile::<Avx512Vnni, 6, 4>(t, 0),
            }
        }
    }

    #[target_feature(enable = "avx2,fma,avxvnni")]
    pub(in crate::dense) unsafe fn tile_avx_vnni(t: &mut Int8Tile) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { narrow_tile::<AvxVnni, 2, 4, 8>(t) }
    }

    #[target_feature(enable = "avx2,fma")]
    pub(in crate::dense) unsafe fn tile_avx2(t: &mut Int8Tile) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { narrow_tile::<Avx2, 2, 4, 8>(t) }
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::*;
    use std::arch::aarch64::*;

    /// 4 sums by SDOT.
    #[derive(Clone, Copy)]
    struct Dot(int32x4_t);
    /// 4 sums without SDOT, by 16-bit products.
    #[derive(Clone, Copy)]
    pub(in crate::dense) struct Widened(int32x4_t);

    impl Sums for Dot {
        const N: usize = 4;
        type Vector = int8x16_t;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: no memory is accessed, and `Sums` asks for the instruction.
            unsafe { Self(vdupq_n_s32(0)) }
        }
        #[inline(always)]
        unsafe fn weights(p: *const i8) -> int8x16_t {
            // SAFETY: `Sums` asks for `4 N` weights at `p`; the load needs no alignment.
            unsafe { vld1q_s8(p) }
        }
        #[inline(always)]
        unsafe fn group(p: *const u8) -> int8x16_t {
            // SAFETY: `Sums` asks for a group of 4 bytes at `p`; the read needs no alignment.
            unsafe { vreinterpretq_s8_s32(vdupq_n_s32(p.cast::<i32>().read_unaligned())) }
        }
        /// In assembly because the intrinsic is not stable in this compiler.
        #[inline(always)]
        unsafe fn add_products(self, weights: int8x16_t, group: int8x16_t) -> Self {
            let mut sums = self.0;
            // SAFETY: registers alone, and `Sums` asks for the instructions.
            unsafe {
                std::arch::asm!(
                    ".arch_extension dotprod",
                    "sdot {s:v}.4s, {w:v}.16b, {g:v}.16b",
                    s = inout(vreg) sums,
                    w = in(vreg) weights,
                    g = in(vreg) group,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            Self(sums)
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut i32) {
            // SAFETY: `Sums` asks for room for `N` sums at `p`.
            unsafe { vst1q_s32(p, self.0) }
        }
    }

    impl Sums for Widened {
        const N: usize = 4;
        type Vector = int8x16_t;

        #[inline(always)]
        unsafe fn zero() -> Self {
            // SAFETY: no memory is accessed, and `Sums` asks for the instruction.
            unsafe { Self(vdupq_n_s32(0)) }
        }
        #[inline(always)]
        unsafe fn weights(p: *const i8) -> int8x16_t {
            // SAFETY: `Sums` asks for `4 N` weights at `p`; the load needs no alignment.
            unsafe { vld1q_s8(p) }
        }
        #[inline(always)]
        unsafe fn group(p: *const u8) -> int8x16_t {
            // SAFETY: `Sums` asks for a group of 4 bytes at `p`; the read needs no alignment.
            unsafe { vreinterpretq_s8_s32(vdupq_n_s32(p.cast::<i32>().read_unaligned())) }
        }
        /// A sum of two products is at most 2 x 128 x 127 = 32,512, so that 16 bits hold it.
        #[inline(always)]
        unsafe fn add_products(self, weights: int8x16_t, group: int8x16_t) -> Self {
            // SAFETY: registers alone, and `Sums` asks for the instructions.
            unsafe {
                let low = vmull_s8(vget_low_s8(weights), vget_low_s8(group));
                let high = vmull_high_s8(weights, group);
                Self(vpadalq_s16(self.0, vpaddq_s16(low, high)))
            }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut i32) {
            // SAFETY: `Sums` asks for room for `N` sums at `p`.
            unsafe { vst1q_s32(p, self.0) }
        }
    }

    #[target_feature(enable = "neon,dotprod")]
    pub(in crate::dense) unsafe fn tile_dot(t: &mut Int8Tile) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { narrow_tile::<Dot, 4, 8, 16>(t) }
    }
}
