//! Transposition of small matrices, four rows by four columns at a time in registers. The vector
//! instructions are those that every machine of the architecture has. This file never allocates.

// Vector instructions work on raw pointers. The safe function checks its slices first.
#![allow(unsafe_code)]

/// Rows and columns that are transposed together.
const SIDE: usize = 4;

/// Writes the transpose of `from` `[n, k]` to the first `n` columns of `to`, whose `k` rows are
/// `width` apart.
pub(in crate::dense) fn transpose(from: &[f32], k: usize, to: &mut [f32], width: usize) {
    let n = from.len() / k;
    assert!(from.len() == n * k && n <= width && to.len() >= (k - 1) * width + n);
    if n < SIDE || k < SIDE {
        for (column, from) in from.chunks_exact(k).enumerate() {
            from.iter().zip(to.chunks_mut(width)).for_each(|(x, row)| row[column] = *x);
        }
        return;
    }
    // If a side is no multiple of a block, its last block overlaps the one before.
    let starts = |len: usize| (0..len.div_ceil(SIDE)).map(move |i| (i * SIDE).min(len - SIDE));
    for column in starts(n) {
        for row in starts(k) {
            // SAFETY: the block starts at least `SIDE` rows and columns before the end of `from`
            // and of `to`, whose sizes were checked.
            unsafe {
                let (from, to) = (from.as_ptr(), to.as_mut_ptr());
                block(from.add(column * k + row), k, to.add(row * width + column), width);
            }
        }
    }
}

/// Transposes a block.
///
/// # Safety
/// Four values are valid at `from` and at `to`, and at each of the three strides after these.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn block(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
    use std::arch::x86_64::*;
    // SAFETY: every x86-64 has SSE; the caller proves the pointers.
    unsafe {
        let [a, b, c, d] = [0, 1, 2, 3].map(|row| _mm_loadu_ps(from.add(row * from_stride)));
        let (ab, ab_high) = (_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
        let (cd, cd_high) = (_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
        _mm_storeu_ps(to, _mm_movelh_ps(ab, cd));
        _mm_storeu_ps(to.add(to_stride), _mm_movehl_ps(cd, ab));
        _mm_storeu_ps(to.add(2 * to_stride), _mm_movelh_ps(ab_high, cd_high));
        _mm_storeu_ps(to.add(3 * to_stride), _mm_movehl_ps(cd_high, ab_high));
    }
}

/// Transposes a block.
///
/// # Safety
/// Four values are valid at `from` and at `to`, and at each of the three strides after these.
#[cfg(target_arch = "aarch64")]
#[inline(always)]
unsafe fn block(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
    use std::arch::aarch64::*;
    // SAFETY: every AArch64 machine has Advanced SIMD; the caller proves the pointers.
    unsafe {
        let [a, b, c, d] = [0, 1, 2, 3].map(|row| vld1q_f32(from.add(row * from_stride)));
        let pairs = |x| vreinterpretq_f64_f32(x);
        let (ab, ab_high) = (pairs(vzip1q_f32(a, b)), pairs(vzip2q_f32(a, b)));
        let (cd, cd_high) = (pairs(vzip1q_f32(c, d)), pairs(vzip2q_f32(c, d)));
        let put = |row: usize, x| vst1q_f32(to.add(row * to_stride), vreinterpretq_f32_f64(x));
        put(0, vzip1q_f64(ab, cd));
        put(1, vzip2q_f64(ab, cd));
        put(2, vzip1q_f64(ab_high, cd_high));
        put(3, vzip2q_f64(ab_high, cd_high));
    }
}

/// Transposes a block.
///
/// # Safety
/// Four values are valid at `from` and at `to`, and at each of the three strides after these.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[inline(always)]
unsafe fn block(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
    for row in 0..SIDE {
        for column in 0..SIDE {
            // SAFETY: the caller proves the pointers.
            unsafe { *to.add(column * to_stride + row) = *from.add(row * from_stride + column) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transpose_has_rows_for_columns() {
        for (n, k, width) in [(1, 9, 16), (3, 2, 3), (4, 4, 4), (5, 7, 16), (27, 33, 32)] {
            let from: Vec<f32> = (0..n * k).map(|i| i as f32).collect();
            let mut to = vec![-1.0; k * width];
            transpose(&from, k, &mut to, width);
            for (row, values) in to.chunks(width).enumerate() {
                for (column, x) in values.iter().enumerate() {
                    let expected = if column < n { from[column * k + row] } else { -1.0 };
                    assert_eq!(*x, expected, "{n} x {k}: {row}, {column}");
                }
            }
        }
    }
}
