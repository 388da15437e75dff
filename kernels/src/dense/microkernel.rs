//! The innermost loops of the dense network: a few rows by a few columns of a matrix product. One
//! body is instantiated for each instruction set. All give the same bits, because every sum is one
//! chain of fused multiply-adds over `k` in ascending order, and the lanes of a vector are columns.
//! This file never allocates.

// Vector instructions work on raw pointers. Every safe function here checks its slices first.
#![allow(unsafe_code)]
// The rows and columns of a tile are numbers, not elements.
#![allow(clippy::needless_range_loop)]

use crate::simd::isa::{Family, Isa};
use crate::simd::prefetch::{prefetch, prefetch_l2};
use half::f16;

/// Rows of a tile, at most.
pub(super) const ROWS_MAX: usize = 6;
/// Columns of a panel, at most. A panel is 16, 32 or 64 wide.
pub(super) const WIDTH_MAX: usize = 64;

/// The operations on a complete sum: `sum * scale + bias`, then perhaps Relu. `scale` and `bias`
/// are as wide as the panel.
#[derive(Clone, Copy)]
pub(super) struct Finish<'a> {
    pub scale: &'a [f32],
    pub bias: &'a [f32],
    pub relu: bool,
}

/// Part of a product: some rows of `a` by one panel.
pub(super) struct Tile<'a, W> {
    /// `[rows, k]`.
    pub a: &'a [f32],
    pub k: usize,
    pub rows: usize,
    /// `[k, width]`.
    pub panel: &'a [W],
    pub width: usize,
    /// `[rows, columns]`, rows `stride` apart; `columns` is at most `width`.
    pub out: &'a mut [f32],
    pub stride: usize,
    pub columns: usize,
    /// `None` stores the sums as they are.
    pub finish: Option<Finish<'a>>,
    /// Prefetched during the tile, a cache line for each `k`; never read.
    pub ahead: *const W,
}

impl<W: Stored> Tile<'_, W> {
    /// Computes the tile.
    pub fn run(&mut self, isa: Isa) {
        assert!((1..=ROWS_MAX).contains(&self.rows) && (1..=self.width).contains(&self.columns));
        assert!(matches!(self.width, 16 | 32 | 64) && self.panel.len() == self.k * self.width);
        assert!(self.a.len() >= self.rows * self.k);
        assert!(self.out.len() >= (self.rows - 1) * self.stride + self.columns);
        if let Some(finish) = &self.finish {
            assert!(finish.scale.len() >= self.width && finish.bias.len() >= self.width);
        }
        match isa.family() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Isa` proves the instructions; the slices were checked.
            Family::Avx512 => unsafe { x86::tile_avx512(self) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as for AVX-512.
            Family::Avx2 => unsafe { x86::tile_avx2(self) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as for AVX-512.
            Family::Neon => unsafe { narrow_tile::<neon::F32x4, W, 4, 8, 16>(self) },
            // SAFETY: plain lanes need no instructions; the slices were checked.
            _ => unsafe { narrow_tile::<Plain, W, 2, 4, 8>(self) },
        }
    }
}

/// A product of one row by one panel. Unlike a `Tile` of one row, it skips each `k` whose `a` is
/// zero. That gives the same bits as long as no weight is infinite and no bias is `-0`.
pub(super) struct Row<'a, W> {
    /// The values of `a` that are not zero, each with its `k`, ascending.
    pub a: &'a [(u32, f32)],
    /// `[k, width]`.
    pub panel: &'a [W],
    pub width: usize,
    /// One value for each column.
    pub out: &'a mut [f32],
    pub finish: Finish<'a>,
}

impl<W: Stored> Row<'_, W> {
    /// Computes the row.
    pub fn run(self, isa: Isa) {
        assert!(matches!(self.width, 16 | 32 | 64) && (1..=self.width).contains(&self.out.len()));
        assert!(self.finish.scale.len() >= self.width && self.finish.bias.len() >= self.width);
        // The list ascends, so its last entry bounds all entries.
        debug_assert!(self.a.is_sorted_by_key(|(k, _)| *k));
        assert!(
            self.a.last().is_none_or(|(k, _)| (*k as usize + 1) * self.width <= self.panel.len())
        );
        match isa.family() {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: an `Isa` proves the instructions; the slices were checked.
            Family::Avx512 => unsafe { x86::row_avx512(self) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as for AVX-512.
            Family::Avx2 => unsafe { x86::row_avx2(self) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as for AVX-512.
            Family::Neon => unsafe { any_row::<neon::F32x4, W, 4, 8, 16>(self) },
            // SAFETY: plain lanes need no instructions; the slices were checked.
            _ => unsafe { any_row::<Plain, W, 2, 4, 8>(self) },
        }
    }
}

/// Decodes `from` into `to`. Both have the same length, a multiple of 16.
pub(super) fn decode<W: Stored>(isa: Isa, from: &[W], to: &mut [f32]) {
    assert!(from.len() == to.len() && from.len().is_multiple_of(16));
    match isa.family() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` proves the instructions; the slices were checked.
        Family::Avx512 => unsafe { x86::decode_avx512(from, to) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as for AVX-512.
        Family::Avx2 => unsafe { x86::decode_avx2(from, to) },
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as for AVX-512.
        Family::Neon => unsafe { any_decode::<neon::F32x4, W>(from, to) },
        // SAFETY: plain lanes need no instructions; the slices were checked.
        _ => unsafe { any_decode::<Plain, W>(from, to) },
    }
}

/// Replaces each value `x` by `f(x)`. `f` must be `#[inline(always)]`, so that it is compiled for
/// the instruction set.
pub(super) fn each(isa: Isa, values: &mut [f32], f: impl Fn(f32) -> f32) {
    match isa.family() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: an `Isa` proves the instructions.
        Family::Avx512 => unsafe { x86::each_avx512(values, f) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as for AVX-512.
        Family::Avx2 => unsafe { x86::each_avx2(values, f) },
        _ => any_each(values, f),
    }
}

#[inline(always)]
fn any_each(values: &mut [f32], f: impl Fn(f32) -> f32) {
    values.iter_mut().for_each(|x| *x = f(*x));
}

/// A vector of `N` f32. Its functions are `unsafe`: the machine must have the instructions, and
/// each pointer must be valid for `N` values.
pub(super) trait Lanes: Copy {
    const N: usize;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn load_f16(p: *const f16) -> Self;
    unsafe fn store(self, p: *mut f32);
    /// Returns `self * x + sum`, rounded once.
    unsafe fn mul_add(self, x: Self, sum: Self) -> Self;
    /// Returns 0 for a negative lane, else the lane. NaN stays NaN.
    unsafe fn relu(self) -> Self;
}

/// A type in which weights are stored.
pub(super) trait Stored: Copy {
    /// Loads `V::N` weights.
    ///
    /// # Safety
    /// `p` is valid for `V::N` values and the machine has the instructions of `V`.
    unsafe fn lanes<V: Lanes>(p: *const Self) -> V;
}

impl Stored for f32 {
    #[inline(always)]
    unsafe fn lanes<V: Lanes>(p: *const Self) -> V {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { V::load(p) }
    }
}

impl Stored for f16 {
    #[inline(always)]
    unsafe fn lanes<V: Lanes>(p: *const Self) -> V {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { V::load_f16(p) }
    }
}

/// Applies `finish` to `C` vectors of sums from column `first` on, and stores `columns` columns.
#[inline(always)]
unsafe fn put<V: Lanes, const C: usize>(
    sums: [V; C],
    finish: Option<Finish>,
    first: usize,
    columns: usize,
    out: *mut f32,
) {
    let mut sums = sums;
    // SAFETY: `finish` is as wide as the panel, `out` is valid for `columns` values.
    unsafe {
        if let Some(finish) = finish {
            for c in 0..C {
                let at = first + c * V::N;
                let scale = V::load(finish.scale.as_ptr().add(at));
                let sum = sums[c].mul_add(scale, V::load(finish.bias.as_ptr().add(at)));
                sums[c] = if finish.relu { sum.relu() } else { sum };
            }
        }

        if columns >= C * V::N {
            for c in 0..C {
                sums[c].store(out.add(c * V::N));
            }
        } else {
            let mut edge = [0.0f32; WIDTH_MAX];
            for c in 0..C {
                sums[c].store(edge.as_mut_ptr().add(c * V::N));
            }
            std::ptr::copy_nonoverlapping(edge.as_ptr(), out, columns);
        }
    }
}

/// Computes `R` rows by the `C` vectors of columns from `first` on.
#[inline(always)]
unsafe fn tile<V: Lanes, W: Stored, const R: usize, const C: usize>(t: &mut Tile<W>, first: usize) {
    if first >= t.columns {
        return;
    }
    let columns = t.columns - first;
    // SAFETY: `Tile::run` checked that the slices hold what is read and written here.
    unsafe {
        let (a, out) = (t.a.as_ptr(), t.out.as_mut_ptr().add(first));
        let mut sums = [[V::splat(0.0); C]; R];
        let mut panel = t.panel.as_ptr().add(first);
        for i in 0..t.k {
            let mut w = [V::splat(0.0); C];
            for c in 0..C {
                w[c] = W::lanes(panel.add(c * V::N));
                if (c * V::N * size_of::<W>()).is_multiple_of(64) {
                    prefetch(panel.wrapping_add(PREFETCH_ROWS * t.width + c * V::N));
                }
            }

            for r in 0..R {
                let x = V::splat(*a.add(r * t.k + i));
                for c in 0..C {
                    sums[r][c] = w[c].mul_add(x, sums[r][c]);
                }
            }
            panel = panel.wrapping_add(t.width);
            prefetch_l2(t.ahead.wrapping_add(i * (64 / size_of::<W>())));
        }

        for r in 0..R {
            put(sums[r], t.finish, first, columns, out.add(r * t.stride));
        }
    }
}

/// Prefetch distance of a panel in a tile, in rows of the panel.
const PREFETCH_ROWS: usize = 8;
/// Prefetch distance of a panel in a single row, which is bound by memory, in entries of `a`.
const PREFETCH_ENTRIES: usize = 16;

/// Computes one row by the `C` vectors of a panel.
#[inline(always)]
unsafe fn row<V: Lanes, W: Stored, const C: usize>(t: Row<W>) {
    // SAFETY: `Row::run` checked that the slices hold what is read and written here.
    unsafe {
        let panel = t.panel.as_ptr();
        let mut sums = [V::splat(0.0); C];
        for i in 0..t.a.len() {
            let (k, x) = *t.a.get_unchecked(i);
            let ahead = t.a.get_unchecked((i + PREFETCH_ENTRIES).min(t.a.len() - 1)).0 as usize;
            let (w, x) = (panel.add(k as usize * t.width), V::splat(x));
            for c in 0..C {
                if (c * V::N * size_of::<W>()).is_multiple_of(64) {
                    prefetch(panel.wrapping_add(ahead * t.width + c * V::N));
                }
                sums[c] = W::lanes::<V>(w.add(c * V::N)).mul_add(x, sums[c]);
            }
        }
        put(sums, Some(t.finish), 0, t.out.len(), t.out.as_mut_ptr());
    }
}

/// Computes a tile on narrow vectors, of which `C16` make 16 columns, `C32` make 32 and `C64` make
/// 64.
#[inline(always)]
unsafe fn narrow_tile<V: Lanes, W: Stored, const C16: usize, const C32: usize, const C64: usize>(
    t: &mut Tile<W>,
) {
    // SAFETY: the caller keeps the contract of this function.
    unsafe {
        let wide = match (t.rows, t.width) {
            (1, 64) => return tile::<V, W, 1, C64>(t, 0),
            (2, 32 | 64) => 32,
            _ => 16,
        };

        for first in (0..t.width).step_by(wide) {
            match t.rows {
                1 => tile::<V, W, 1, C16>(t, first),
                2 if wide == 32 => tile::<V, W, 2, C32>(t, first),
                2 => tile::<V, W, 2, C16>(t, first),
                3 => tile::<V, W, 3, C16>(t, first),
                4 => tile::<V, W, 4, C16>(t, first),
                5 => tile::<V, W, 5, C16>(t, first),
                _ => tile::<V, W, 6, C16>(t, first),
            }
        }
    }
}

#[inline(always)]
unsafe fn any_row<V: Lanes, W: Stored, const C16: usize, const C32: usize, const C64: usize>(
    t: Row<W>,
) {
    // SAFETY: the caller keeps the contract of this function.
    unsafe {
        match t.width {
            16 => row::<V, W, C16>(t),
            32 => row::<V, W, C32>(t),
            _ => row::<V, W, C64>(t),
        }
    }
}

#[inline(always)]
unsafe fn any_decode<V: Lanes, W: Stored>(from: &[W], to: &mut [f32]) {
    for i in (0..to.len()).step_by(V::N) {
        // SAFETY: both slices have this many values, a multiple of 16, and `N` divides 16.
        unsafe { W::lanes::<V>(from.as_ptr().add(i)).store(to.as_mut_ptr().add(i)) }
    }
}

/// Eight values in plain Rust: the reference for the other vectors.
#[derive(Clone, Copy)]
struct Plain([f32; 8]);

impl Lanes for Plain {
    const N: usize = 8;
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; 8])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: as `Lanes` requires; an array of `f32` has the alignment of one.
        unsafe { Self(*p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        // SAFETY: as `Lanes` requires.
        unsafe { Self((*p.cast::<[f16; 8]>()).map(f16::to_f32)) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: as `Lanes` requires.
        unsafe { *p.cast() = self.0 }
    }
    #[inline(always)]
    unsafe fn mul_add(self, x: Self, sum: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(x.0[i], sum.0[i])))
    }
    #[inline(always)]
    unsafe fn relu(self) -> Self {
        Self(self.0.map(|x| if 0.0 > x { 0.0 } else { x }))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use std::arch::x86_64::*;

    #[derive(Clone, Copy)]
    struct F32x16(__m512);
    #[derive(Clone, Copy)]
    struct F32x8(__m256);

    // SAFETY of both: `Lanes` requires exactly what the instructions need.
    impl Lanes for F32x16 {
        const N: usize = 16;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: see the implementation's head.
            unsafe { Self(_mm512_set1_ps(x)) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            // SAFETY: see the implementation's head.
            unsafe { Self(_mm512_loadu_ps(p)) }
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const f16) -> Self {
            // SAFETY: see the implementation's head.
            unsafe { Self(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: see the implementation's head.
            unsafe { _mm512_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, x: Self, sum: Self) -> Self {
            // SAFETY: see the implementation's head.
            unsafe { Self(_mm512_fmadd_ps(self.0, x.0, sum.0)) }
        }
        #[inline(always)]
        unsafe fn relu(self) -> Self {
            // SAFETY: see the implementation's head. MAXPS gives its second operand unless the
            // first is greater.
            unsafe { Self(_mm512_max_ps(_mm512_setzero_ps(), self.0)) }
        }
    }

    impl Lanes for F32x8 {
        const N: usize = 8;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: see the implementation's head.
            unsafe { Self(_mm256_set1_ps(x)) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            // SAFETY: see the implementation's head.
            unsafe { Self(_mm256_loadu_ps(p)) }
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const f16) -> Self {
            // SAFETY: see the implementation's head.
            unsafe { Self(_mm256_cvtph_ps(_mm_loadu_si128(p.cast()))) }
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: see the implementation's head.
            unsafe { _mm256_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, x: Self, sum: Self) -> Self {
            // SAFETY: see the implementation's head.
            unsafe { Self(_mm256_fmadd_ps(self.0, x.0, sum.0)) }
        }
        #[inline(always)]
        unsafe fn relu(self) -> Self {
            // SAFETY: see the implementation's head. MAXPS gives its second operand unless the
            // first is greater.
            unsafe { Self(_mm256_max_ps(_mm256_setzero_ps(), self.0)) }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) unsafe fn tile_avx512<W: Stored>(t: &mut Tile<W>) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe {
            match (t.rows, t.width) {
                (1, 16) => tile::<F32x16, W, 1, 1>(t, 0),
                (2, 16) => tile::<F32x16, W, 2, 1>(t, 0),
                (3, 16) => tile::<F32x16, W, 3, 1>(t, 0),
                (4, 16) => tile::<F32x16, W, 4, 1>(t, 0),
                (5, 16) => tile::<F32x16, W, 5, 1>(t, 0),
                (_, 16) => tile::<F32x16, W, 6, 1>(t, 0),
                (1, 32) => tile::<F32x16, W, 1, 2>(t, 0),
                (2, 32) => tile::<F32x16, W, 2, 2>(t, 0),
                (3, 32) => tile::<F32x16, W, 3, 2>(t, 0),
                (4, 32) => tile::<F32x16, W, 4, 2>(t, 0),
                (5, 32) => tile::<F32x16, W, 5, 2>(t, 0),
                (_, 32) => tile::<F32x16, W, 6, 2>(t, 0),
                (1, _) => tile::<F32x16, W, 1, 4>(t, 0),
                (2, _) => tile::<F32x16, W, 2, 4>(t, 0),
                (3, _) => tile::<F32x16, W, 3, 4>(t, 0),
                (4, _) => tile::<F32x16, W, 4, 4>(t, 0),
                (5, _) => tile::<F32x16, W, 5, 4>(t, 0),
                (_, _) => tile::<F32x16, W, 6, 4>(t, 0),
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) unsafe fn row_avx512<W: Stored>(t: Row<W>) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { any_row::<F32x16, W, 1, 2, 4>(t) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) unsafe fn decode_avx512<W: Stored>(from: &[W], to: &mut [f32]) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { any_decode::<F32x16, W>(from, to) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(super) fn each_avx512(values: &mut [f32], f: impl Fn(f32) -> f32) {
        any_each(values, f);
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn each_avx2(values: &mut [f32], f: impl Fn(f32) -> f32) {
        any_each(values, f);
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn tile_avx2<W: Stored>(t: &mut Tile<W>) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { narrow_tile::<F32x8, W, 2, 4, 8>(t) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn row_avx2<W: Stored>(t: Row<W>) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { any_row::<F32x8, W, 2, 4, 8>(t) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) unsafe fn decode_avx2<W: Stored>(from: &[W], to: &mut [f32]) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { any_decode::<F32x8, W>(from, to) }
    }
}

#[cfg(target_arch = "aarch64")]
mod neon {
    use super::*;
    use std::arch::aarch64::*;

    #[derive(Clone, Copy)]
    pub(super) struct F32x4(float32x4_t);

    // SAFETY: `Lanes` requires exactly what the instructions need, and every AArch64 machine has
    // them.
    impl Lanes for F32x4 {
        const N: usize = 4;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: see the implementation's head.
            unsafe { Self(vdupq_n_f32(x)) }
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            // SAFETY: see the implementation's head.
            unsafe { Self(vld1q_f32(p)) }
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const f16) -> Self {
            let wide;
            // SAFETY: see the implementation's head. The conversion is in assembly because the f16
            // vector type is not stable in this compiler.
            unsafe {
                std::arch::asm!(
                    "fcvtl {w:v}.4s, {h:v}.4h",
                    w = lateout(vreg) wide,
                    h = in(vreg) vld1_u16(p.cast()),
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            Self(wide)
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            // SAFETY: see the implementation's head.
            unsafe { vst1q_f32(p, self.0) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, x: Self, sum: Self) -> Self {
            // SAFETY: see the implementation's head.
            unsafe { Self(vfmaq_f32(sum.0, self.0, x.0)) }
        }
        #[inline(always)]
        unsafe fn relu(self) -> Self {
            // SAFETY: see the implementation's head.
            unsafe {
                let zero = vdupq_n_f32(0.0);
                Self(vbslq_f32(vcgtq_f32(zero, self.0), zero, self.0))
            }
        }
    }
}
