//! The innermost loops of the dense network: a few rows by a few columns of a matrix product. One
//! body is instantiated for each instruction set. All give the same bits, because every sum is one
//! chain of fused multiply-adds over `k` in ascending order, and the lanes of a vector are columns.
//! This file never allocates.

// Vector instructions work on raw pointers. Every safe function here checks its slices first.
#![allow(unsafe_code)]
// The rows and columns of a tile are numbers, not elements.
#![allow(clippy::needless_range_loop)]

#[cfg(target_arch = "aarch64")]
use crate::dense::matrix::lanes::neon;
use crate::dense::matrix::lanes::{Lanes, Plain, Stored};
use crate::simd::isa::{Family, Isa};
use crate::simd::prefetch::{prefetch, prefetch_l2};

/// Rows of a tile that reads the panel once, at most.
pub(in crate::dense) const ROWS_MAX: usize = 6;
/// Rows of a tile of AVX-512, at most.
#[cfg(target_arch = "x86_64")]
const ROWS_MAX_AVX512: usize = 8;
/// Columns of a panel, at most. A panel is 16, 32 or 64 wide.
pub(in crate::dense) const WIDTH_MAX: usize = 64;
/// Columns of a row of unfinished sums: two panels.
pub(in crate::dense) const SUMS_WIDTH: usize = 2 * WIDTH_MAX;

/// The operations on a complete sum: `sum * scale + bias`, then perhaps Relu. `scale` and `bias`
/// are as wide as the panel.
#[derive(Clone, Copy)]
pub(in crate::dense) struct Finish<'a> {
    pub scale: &'a [f32],
    pub bias: &'a [f32],
    pub relu: bool,
}

impl Finish<'_> {
    /// Returns the operations from column `first` on.
    pub fn from(self, first: usize) -> Self {
        Self { scale: &self.scale[first..], bias: &self.bias[first..], relu: self.relu }
    }
}

/// The sums of a block of `k`, which continue those of the blocks before.
pub(in crate::dense) struct Sums<'a> {
    /// The sums of earlier blocks, `[rows, SUMS_WIDTH]`. Unused if the first block is the last.
    pub partial: &'a mut [f32],
    /// The sums start at zero.
    pub is_first: bool,
    /// Columns of the product here, without padding.
    pub columns: usize,
    /// Where the last block stores its sums; `None` stores them in `partial`.
    pub result: Option<Output<'a>>,
}

/// Where complete sums go: `[rows, columns]`, rows `stride` apart.
pub(in crate::dense) struct Output<'a> {
    pub out: &'a mut [f32],
    pub stride: usize,
    /// `None` stores the sums as they are.
    pub finish: Option<Finish<'a>>,
}

impl Sums<'_> {
    /// Checks that the slices hold `rows` rows of `width` columns, the padded ones included.
    pub fn check(&self, rows: usize, width: usize) {
        assert!((1..=width).contains(&self.columns) && width <= SUMS_WIDTH && rows > 0);
        if !self.is_first || self.result.is_none() {
            assert!(self.partial.len() >= (rows - 1) * SUMS_WIDTH + width);
        }
        if let Some(result) = &self.result {
            assert!(result.out.len() >= (rows - 1) * result.stride + self.columns);
            if let Some(finish) = &result.finish {
                assert!(finish.scale.len() >= width && finish.bias.len() >= width);
            }
        }
    }

    /// Returns the sums of a row so far, in `C` vectors of columns from `first` on.
    ///
    /// # Safety
    /// `check` passed for more rows than `row` and for these columns.
    #[inline(always)]
    pub unsafe fn start<V: Lanes, const C: usize>(&self, row: usize, first: usize) -> [V; C] {
        // SAFETY: the caller keeps the contract of this function.
        unsafe {
            let mut sums = [V::splat(0.0); C];
            if !self.is_first {
                let partial = self.partial.as_ptr().add(row * SUMS_WIDTH + first);
                for c in 0..C {
                    sums[c] = V::load(partial.add(c * V::N));
                }
            }
            sums
        }
    }

    /// Stores the sums of a row, in `C` vectors of columns from `first` on.
    ///
    /// # Safety
    /// As for `start`; `first` is a column of the product.
    #[inline(always)]
    pub unsafe fn end<V: Lanes, const C: usize>(&mut self, row: usize, first: usize, sums: [V; C]) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe {
            match &mut self.result {
                None => {
                    let partial = self.partial.as_mut_ptr().add(row * SUMS_WIDTH + first);
                    for c in 0..C {
                        sums[c].store(partial.add(c * V::N));
                    }
                }
                Some(result) => {
                    let out = result.out.as_mut_ptr().add(row * result.stride + first);
                    put(sums, result.finish, first, self.columns - first, out);
                }
            }
        }
    }
}

/// Part of a product: some rows of `a` by a block of one panel.
pub(in crate::dense) struct Tile<'a, W> {
    /// `[rows, k]`, rows `a_stride` apart.
    pub a: &'a [f32],
    pub a_stride: usize,
    pub k: usize,
    pub rows: usize,
    /// `[k, width]`.
    pub panel: &'a [W],
    pub width: usize,
    pub sums: Sums<'a>,
    /// Prefetched during the tile, a cache line for each `k`; never read. `None` if the panel comes
    /// from memory: the tile then prefetches the panel itself, far ahead.
    pub ahead: Option<*const u8>,
}

/// Returns the rows of a tile, at most.
pub(in crate::dense) fn rows_max(isa: Isa) -> usize {
    match isa.family() {
        #[cfg(target_arch = "x86_64")]
        Family::Avx512 => ROWS_MAX_AVX512,
        _ => ROWS_MAX,
    }
}

impl<W: Stored> Tile<'_, W> {
    /// Computes the tile.
    pub fn run(&mut self, isa: Isa) {
        assert!((1..=rows_max(isa)).contains(&self.rows));
        assert!(matches!(self.width, 16 | 32 | 64) && self.panel.len() == self.k * self.width);
        assert!(self.a.len() >= (self.rows - 1) * self.a_stride + self.k);
        self.sums.check(self.rows, self.width);
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

/// The values of a row that are not zero, each with its position, ascending.
#[derive(Clone, Copy)]
pub(in crate::dense) struct NonzeroRow<'a> {
    values: &'a [(u32, f32)],
    /// Every position is below this length of the row.
    len: usize,
}

impl<'a> NonzeroRow<'a> {
    /// Lists the values of `a` that are not zero in `list`, which has room for all. NaN is not
    /// zero.
    pub fn list(a: &[f32], list: &'a mut [(u32, f32)]) -> Self {
        let mut count = 0;
        for (k, &x) in a.iter().enumerate() {
            list[count] = (k as u32, x);
            count += usize::from(x != 0.0);
        }
        Self { values: &list[..count], len: a.len() }
    }
}

/// A product of one row by one panel. Unlike a `Tile` of one row, it skips each `k` whose `a` is
/// zero. That gives the same bits as long as no weight is infinite and no bias is `-0`.
pub(in crate::dense) struct Row<'a, W> {
    /// `[k]`.
    pub a: NonzeroRow<'a>,
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
        assert!(self.a.len * self.width <= self.panel.len());
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
pub(in crate::dense) fn decode<W: Stored>(isa: Isa, from: &[W], to: &mut [f32]) {
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
pub(in crate::dense) fn each(isa: Isa, values: &mut [f32], f: impl Fn(f32) -> f32) {
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
    if first >= t.sums.columns {
        return;
    }
    // SAFETY: `Tile::run` checked that the slices hold what is read and written here.
    unsafe {
        let a = t.a.as_ptr();
        let mut sums = [[V::splat(0.0); C]; R];
        for r in 0..R {
            sums[r] = t.sums.start(r, first);
        }
        let mut panel = t.panel.as_ptr().add(first);
        for i in 0..t.k {
            let mut w = [V::splat(0.0); C];
            for c in 0..C {
                w[c] = W::lanes(panel.add(c * V::N));
                if (c * V::N * size_of::<W>()).is_multiple_of(64) {
                    let later = panel.wrapping_add(c * V::N);
                    match t.ahead {
                        Some(_) => prefetch(later.wrapping_add(PREFETCH_ROWS * t.width)),
                        None => prefetch_l2(later.wrapping_add(PREFETCH_ROWS_FAR * t.width)),
                    }
                }
            }

            for r in 0..R {
                let x = V::splat(*a.add(r * t.a_stride + i));
                for c in 0..C {
                    sums[r][c] = w[c].mul_add(x, sums[r][c]);
                }
            }
            panel = panel.wrapping_add(t.width);
            if let Some(ahead) = t.ahead {
                prefetch_l2(ahead.wrapping_add(i * 64));
            }
        }

        for r in 0..R {
            t.sums.end(r, first, sums[r]);
        }
    }
}

/// Prefetch distance of a panel in a tile, in rows of the panel. The second level of the cache has
/// the panel.
const PREFETCH_ROWS: usize = 8;
/// Prefetch distance of a panel that comes from memory, in rows of the panel. A longer one is no
/// faster, and with 24 a product of eight rows took a fifth longer on an AMD EPYC.
const PREFETCH_ROWS_FAR: usize = 56;
/// Prefetch distance of a panel in a single row, which is bound by memory, in entries of `a`. With
/// 32, a network of 64 MB of f32 weights took a quarter longer on an AMD EPYC.
const PREFETCH_ENTRIES: usize = 12;

/// Computes one row by the `C` vectors of a panel.
#[inline(always)]
unsafe fn row<V: Lanes, W: Stored, const C: usize>(t: Row<W>) {
    // SAFETY: `Row::run` checked that the slices hold what is read and written here.
    unsafe {
        let (panel, a) = (t.panel.as_ptr(), t.a.values);
        let mut sums = [V::splat(0.0); C];
        for i in 0..a.len() {
            let (k, x) = *a.get_unchecked(i);
            let ahead = a.get_unchecked((i + PREFETCH_ENTRIES).min(a.len() - 1)).0 as usize;
            let (w, x) = (panel.add(k as usize * t.width), V::splat(x));
            for c in 0..C {
                if (c * V::N * size_of::<W>()).is_multiple_of(64) {
                    prefetch_l2(panel.wrapping_add(ahead * t.width + c * V::N));
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

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::*;
    use crate::dense::matrix::lanes::x86::{F32x8, F32x16};

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(in crate::dense) unsafe fn tile_avx512<W: Stored>(t: &mut Tile<W>) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe {
            match (t.rows, t.width) {
                (7, _) => tall_tile::<W, 7>(t),
                (8, _) => tall_tile::<W, 8>(t),
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

    /// Computes `R` rows by 32 columns at a time, because the registers do not hold the sums of 64.
    #[inline(always)]
    unsafe fn tall_tile<W: Stored, const R: usize>(t: &mut Tile<W>) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe {
            if t.width == 16 {
                return tile::<F32x16, W, R, 1>(t, 0);
            }
            for first in (0..t.width).step_by(32) {
                tile::<F32x16, W, R, 2>(t, first);
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(in crate::dense) unsafe fn row_avx512<W: Stored>(t: Row<W>) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { any_row::<F32x16, W, 1, 2, 4>(t) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(in crate::dense) unsafe fn decode_avx512<W: Stored>(from: &[W], to: &mut [f32]) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { any_decode::<F32x16, W>(from, to) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    pub(in crate::dense) fn each_avx512(values: &mut [f32], f: impl Fn(f32) -> f32) {
        any_each(values, f);
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(in crate::dense) fn each_avx2(values: &mut [f32], f: impl Fn(f32) -> f32) {
        any_each(values, f);
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(in crate::dense) unsafe fn tile_avx2<W: Stored>(t: &mut Tile<W>) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { narrow_tile::<F32x8, W, 2, 4, 8>(t) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(in crate::dense) unsafe fn row_avx2<W: Stored>(t: Row<W>) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { any_row::<F32x8, W, 2, 4, 8>(t) }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(in crate::dense) unsafe fn decode_avx2<W: Stored>(from: &[W], to: &mut [f32]) {
        // SAFETY: the caller keeps the contract of this function.
        unsafe { any_decode::<F32x8, W>(from, to) }
    }
}
