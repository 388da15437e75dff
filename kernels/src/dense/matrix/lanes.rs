//! Vectors of f32, one type for each instruction set, and the types in which weights are stored.
//! The loops of `microkernel.rs` and `sparse_rows.rs` are written once over them. Nothing here
//! allocates.

// Vector instructions work on raw pointers, which the callers check.
#![allow(unsafe_code)]

use half::f16;

/// A vector of `N` f32. Its functions are `unsafe`: the machine must have the instructions, and
/// each pointer must be valid for `N` values.
pub(in crate::dense) trait Lanes: Copy {
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
pub(in crate::dense) trait Stored: Copy {
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

/// Eight values in plain Rust: the reference for the other vectors.
#[derive(Clone, Copy)]
pub(in crate::dense) struct Plain([f32; 8]);

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
pub(in crate::dense) mod x86 {
    use super::*;
    use std::arch::x86_64::*;

    #[derive(Clone, Copy)]
    pub(in crate::dense) struct F32x16(__m512);
    #[derive(Clone, Copy)]
    pub(in crate::dense) struct F32x8(__m256);

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
}

#[cfg(target_arch = "aarch64")]
pub(in crate::dense) mod neon {
    use super::*;
    use std::arch::aarch64::*;

    #[derive(Clone, Copy)]
    pub(in crate::dense) struct F32x4(float32x4_t);

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
            // SAFETY: see the implementation's head.
            unsafe { Self(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p.cast())))) }
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
