//! 16 f32 in vector registers, loaded from encoded rows that a writer may change during the load.
//! Each load of a row is inline assembly, which the compiler treats like a sequence of relaxed
//! atomic loads (see `mod.rs`). There is one implementation for each family of vector instructions,
//! and all give the same bits. This file never stores to rows.

#![allow(unsafe_code)]

/// 16 f32 in registers. All functions are `unsafe`: the machine must have the instructions, and
/// each pointer must be valid for the bytes that are read or written. A writer may change a row
/// during a load.
pub(crate) trait Vector: Copy {
    /// Vectors of sums that fit into the registers beside the other values of a pooling loop.
    const VECTORS_MAX: usize;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Stores the first `count` values, at most 16.
    unsafe fn store_first(self, to: *mut f32, count: usize);
    /// Stores past the caches if the machine can. `to` must start a cache line. The store has no
    /// order with other stores until `simd::stream_fence`.
    unsafe fn stream(self, to: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// Returns for each lane the value of `other` if it is larger, else that of `self`.
    unsafe fn max(self, other: Self) -> Self;
    /// Returns `self * x + y`, rounded once.
    unsafe fn mul_add(self, x: Self, y: Self) -> Self;
    /// Loads 16 f32 of a row.
    unsafe fn f32s(at: *const u8) -> Self;
    /// Loads 16 f16 of a row.
    unsafe fn f16s(at: *const u8) -> Self;
    /// Loads 16 codes of a row, each of one byte.
    unsafe fn u8s(at: *const u8) -> Self;
    /// Loads 16 codes of a row, each of half a byte, the low half first.
    unsafe fn u4s(at: *const u8) -> Self;
    /// Loads two f16 of a row.
    unsafe fn halves(at: *const u8) -> (f32, f32);
}

/// Work on vectors that is compiled once for each family. `run` and all functions that it calls
/// must be `#[inline(always)]`.
pub(crate) trait VectorJob {
    /// Does the work.
    ///
    /// # Safety
    /// The machine has the instructions of `V`.
    unsafe fn run<V: Vector>(self);
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod x86 {
    use crate::simd::vector::Vector;
    use std::arch::asm;
    use std::arch::x86_64::*;

    macro_rules! read {
        ($name:ident, $features:literal, $vector:ty, $class:ident, $load:literal) => {
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn $name(at: *const u8) -> $vector {
                let value;
                // SAFETY: as `Vector` requires.
                unsafe {
                    asm!(
                        $load,
                        v = lateout($class) value,
                        p = in(reg) at,
                        options(nostack, preserves_flags, readonly)
                    );
                }
                value
            }
        };
    }
    read!(read_512, "avx512f", __m512i, zmm_reg, "vmovdqu64 {v}, zmmword ptr [{p}]");
    read!(read_256, "avx2", __m256i, ymm_reg, "vmovdqu {v}, ymmword ptr [{p}]");
    read!(read_128, "avx2", __m128i, xmm_reg, "vmovdqu {v}, xmmword ptr [{p}]");
    read!(read_64, "avx2", __m128i, xmm_reg, "vmovq {v}, qword ptr [{p}]");
    read!(read_32, "avx2", __m128i, xmm_reg, "vmovd {v}, dword ptr [{p}]");

    // Each loads two registers and converts if the instruction can. With one block of assembly the
    // compiler computes one address, not two.
    macro_rules! read_two {
        ($name:ident, $features:literal, $load:literal, $size:literal, $step:literal $flags:tt) => {
            #[inline]
            #[target_feature(enable = $features)]
            unsafe fn $name(at: *const u8) -> [__m256i; 2] {
                let (low, high);
                // SAFETY: as `Vector` requires.
                unsafe {
                    asm!(
                        concat!($load, " {l}, ", $size, " ptr [{p}]"),
                        concat!($load, " {h}, ", $size, " ptr [{p} + ", $step, "]"),
                        l = out(ymm_reg) low,
                        h = lateout(ymm_reg) high,
                        p = in(reg) at,
                        options $flags
                    );
                }
                [low, high]
            }
        };
    }
    read_two!(read_f32s, "avx2", "vmovdqu", "ymmword", "32"(nostack, preserves_flags, readonly));
    // The conversion of a signalling NaN, which a torn row may have, changes the flags of MXCSR.
    read_two!(read_f16s, "avx2,f16c", "vcvtph2ps", "xmmword", "16"(nostack, readonly));
    read_two!(read_u8s, "avx2", "vpmovzxbd", "qword", "8"(nostack, preserves_flags, readonly));

    /// Unpacks 16 codes of half a byte into bytes.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn unpack(pairs: __m128i) -> __m128i {
        let wide = _mm_cvtepu8_epi16(pairs);
        _mm_and_si128(_mm_or_si128(wide, _mm_slli_epi16::<4>(wide)), _mm_set1_epi16(0x0f0f))
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn halves(at: *const u8) -> (f32, f32) {
        // SAFETY: as `Vector` requires.
        let values = _mm_cvtph_ps(unsafe { read_32(at) });
        (_mm_cvtss_f32(values), _mm_cvtss_f32(_mm_movehdup_ps(values)))
    }

    /// The vectors of AVX-512.
    #[derive(Clone, Copy)]
    pub(crate) struct OneRegister(__m512);

    impl Vector for OneRegister {
        const VECTORS_MAX: usize = 8;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(_mm512_set1_ps(x)) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(_mm512_loadu_ps(from)) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as `Vector` requires.
            unsafe { _mm512_storeu_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn store_first(self, to: *mut f32, count: usize) {
            let mask = ((1u32 << count) - 1) as u16;
            // SAFETY: as `Vector` requires.
            unsafe { _mm512_mask_storeu_ps(to, mask, self.0) }
        }
        #[inline(always)]
        unsafe fn stream(self, to: *mut f32) {
            // SAFETY: as `Vector` requires.
            unsafe { _mm512_stream_ps(to, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(_mm512_add_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(_mm512_mul_ps(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            // SAFETY: as `Vector` requires. The instruction returns its second operand if equal.
            unsafe { Self(_mm512_max_ps(other.0, self.0)) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, x: Self, y: Self) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(_mm512_fmadd_ps(self.0, x.0, y.0)) }
        }
        #[inline(always)]
        unsafe fn f32s(at: *const u8) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(_mm512_castsi512_ps(read_512(at))) }
        }
        #[inline(always)]
        unsafe fn f16s(at: *const u8) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(_mm512_cvtph_ps(read_256(at))) }
        }
        #[inline(always)]
        unsafe fn u8s(at: *const u8) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(read_128(at)))) }
        }
        #[inline(always)]
        unsafe fn u4s(at: *const u8) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(unpack(read_64(at))))) }
        }
        #[inline(always)]
        unsafe fn halves(at: *const u8) -> (f32, f32) {
            // SAFETY: as `Vector` requires.
            unsafe { halves(at) }
        }
    }

    /// The vectors of AVX2.
    #[derive(Clone, Copy)]
    pub(crate) struct TwoRegisters([__m256; 2]);

    #[inline]
    #[target_feature(enable = "avx2")]
    fn codes(bytes: __m128i) -> TwoRegisters {
        let eight = |bytes| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
        TwoRegisters([eight(bytes), eight(_mm_bsrli_si128::<8>(bytes))])
    }

    impl Vector for TwoRegisters {
        const VECTORS_MAX: usize = 4;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self([_mm256_set1_ps(x); 2]) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self([_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))]) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            // SAFETY: as `Vector` requires.
            unsafe {
                _mm256_storeu_ps(to, self.0[0]);
                _mm256_storeu_ps(to.add(8), self.0[1]);
            }
        }
        #[inline(always)]
        unsafe fn store_first(self, to: *mut f32, count: usize) {
            // SAFETY: as `Vector` requires. A lane below `count` has its sign bit set.
            unsafe {
                let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let below = |n| _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes);
                _mm256_maskstore_ps(to, below(count as i32), self.0[0]);
                _mm256_maskstore_ps(to.wrapping_add(8), below(count as i32 - 8), self.0[1]);
            }
        }
        #[inline(always)]
        unsafe fn stream(self, to: *mut f32) {
            // SAFETY: as `Vector` requires.
            unsafe {
                _mm256_stream_ps(to, self.0[0]);
                _mm256_stream_ps(to.add(8), self.0[1]);
            }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            let ([a, b], [c, d]) = (self.0, other.0);
            // SAFETY: as `Vector` requires.
            unsafe { Self([_mm256_add_ps(a, c), _mm256_add_ps(b, d)]) }
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            let ([a, b], [c, d]) = (self.0, other.0);
            // SAFETY: as `Vector` requires.
            unsafe { Self([_mm256_mul_ps(a, c), _mm256_mul_ps(b, d)]) }
        }
        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            let ([a, b], [c, d]) = (self.0, other.0);
            // SAFETY: as `Vector` requires. The instruction returns its second operand if equal.
            unsafe { Self([_mm256_max_ps(c, a), _mm256_max_ps(d, b)]) }
        }
        #[inline(always)]
        unsafe fn mul_add(self, x: Self, y: Self) -> Self {
            let ([a, b], x, y) = (self.0, x.0, y.0);
            // SAFETY: as `Vector` requires.
            unsafe { Self([_mm256_fmadd_ps(a, x[0], y[0]), _mm256_fmadd_ps(b, x[1], y[1])]) }
        }
        #[inline(always)]
        unsafe fn f32s(at: *const u8) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(read_f32s(at).map(|eight| _mm256_castsi256_ps(eight))) }
        }
        #[inline(always)]
        unsafe fn f16s(at: *const u8) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(read_f16s(at).map(|eight| _mm256_castsi256_ps(eight))) }
        }
        #[inline(always)]
        unsafe fn u8s(at: *const u8) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(read_u8s(at).map(|eight| _mm256_cvtepi32_ps(eight))) }
        }
        #[inline(always)]
        unsafe fn u4s(at: *const u8) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { codes(unpack(read_64(at))) }
        }
        #[inline(always)]
        unsafe fn halves(at: *const u8) -> (f32, f32) {
            // SAFETY: as `Vector` requires.
            unsafe { halves(at) }
        }
    }
}

#[cfg(target_arch = "aarch64")]
pub(crate) mod arm {
    use crate::simd::vector::Vector;
    use std::arch::aarch64::*;
    use std::arch::asm;

    #[inline(always)]
    unsafe fn read_128(at: *const u8) -> uint8x16_t {
        let value;
        // SAFETY: as `Vector` requires.
        unsafe {
            asm!(
                "ldr {v:q}, [{p}]",
                v = lateout(vreg) value,
                p = in(reg) at,
                options(nostack, preserves_flags, readonly)
            );
        }
        value
    }

    #[inline(always)]
    unsafe fn read_64(at: *const u8) -> uint8x8_t {
        let value;
        // SAFETY: as `Vector` requires.
        unsafe {
            asm!(
                "ldr {v:d}, [{p}]",
                v = lateout(vreg) value,
                p = in(reg) at,
                options(nostack, preserves_flags, readonly)
            );
        }
        value
    }

    #[inline(always)]
    unsafe fn read_32(at: *const u8) -> uint8x16_t {
        let value;
        // SAFETY: as `Vector` requires.
        unsafe {
            asm!(
                "ldr {v:s}, [{p}]",
                v = lateout(vreg) value,
                p = in(reg) at,
                options(nostack, preserves_flags, readonly)
            );
        }
        value
    }

    /// Converts eight f16 to f32.
    #[inline(always)]
    unsafe fn widen(halves: uint8x16_t) -> [float32x4_t; 2] {
        // SAFETY: every AArch64 machine has Advanced SIMD.
        unsafe {
            let halves = vreinterpretq_f16_u8(halves);
            [vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)]
        }
    }

    /// The vectors of Advanced SIMD.
    #[derive(Clone, Copy)]
    pub(crate) struct FourRegisters([float32x4_t; 4]);

    #[inline(always)]
    unsafe fn codes(bytes: uint8x16_t) -> FourRegisters {
        // SAFETY: every AArch64 machine has Advanced SIMD.
        unsafe {
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
            let low = [vmovl_u16(vget_low_u16(low)), vmovl_high_u16(low)];
            let high = [vmovl_u16(vget_low_u16(high)), vmovl_high_u16(high)];
            FourRegisters([low[0], low[1], high[0], high[1]].map(|v| vcvtq_f32_u32(v)))
        }
    }

    impl Vector for FourRegisters {
        const VECTORS_MAX: usize = 4;
        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self([vdupq_n_f32(x); 4]) }
        }
        #[inline(always)]
        unsafe fn load(from: *const f32) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(std::array::from_fn(|i| vld1q_f32(from.add(4 * i)))) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32) {
            for (i, four) in self.0.into_iter().enumerate() {
                // SAFETY: as `Vector` requires.
                unsafe { vst1q_f32(to.add(4 * i), four) };
            }
        }
        #[inline(always)]
        unsafe fn store_first(self, to: *mut f32, count: usize) {
            let mut values = [0.0f32; 16];
            // SAFETY: as `Vector` requires.
            unsafe {
                self.store(values.as_mut_ptr());
                values.iter().take(count).enumerate().for_each(|(i, x)| to.add(i).write(*x));
            }
        }
        #[inline(always)]
        unsafe fn stream(self, to: *mut f32) {
            // SAFETY: as `Vector` requires.
            unsafe { self.store(to) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(std::array::from_fn(|i| vaddq_f32(self.0[i], other.0[i]))) }
        }
        #[inline(always)]
        unsafe fn mul(self, other: Self) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(std::array::from_fn(|i| vmulq_f32(self.0[i], other.0[i]))) }
        }
        #[inline(always)]
        unsafe fn max(self, other: Self) -> Self {
            let larger = |own, other| {
                // SAFETY: as `Vector` requires.
                unsafe { vbslq_f32(vcgtq_f32(other, own), other, own) }
            };
            Self(std::array::from_fn(|i| larger(self.0[i], other.0[i])))
        }
        #[inline(always)]
        unsafe fn mul_add(self, x: Self, y: Self) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(std::array::from_fn(|i| vfmaq_f32(y.0[i], self.0[i], x.0[i]))) }
        }
        #[inline(always)]
        unsafe fn f32s(at: *const u8) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { Self(std::array::from_fn(|i| vreinterpretq_f32_u8(read_128(at.add(16 * i))))) }
        }
        #[inline(always)]
        unsafe fn f16s(at: *const u8) -> Self {
            // SAFETY: as `Vector` requires.
            let ([a, b], [c, d]) = unsafe { (widen(read_128(at)), widen(read_128(at.add(16)))) };
            Self([a, b, c, d])
        }
        #[inline(always)]
        unsafe fn u8s(at: *const u8) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe { codes(read_128(at)) }
        }
        #[inline(always)]
        unsafe fn u4s(at: *const u8) -> Self {
            // SAFETY: as `Vector` requires.
            unsafe {
                let pairs = read_64(at);
                let (low, high) = (vand_u8(pairs, vdup_n_u8(15)), vshr_n_u8::<4>(pairs));
                codes(vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high)))
            }
        }
        #[inline(always)]
        unsafe fn halves(at: *const u8) -> (f32, f32) {
            // SAFETY: as `Vector` requires.
            unsafe {
                let [values, _] = widen(read_32(at));
                (vgetq_lane_f32::<0>(values), vgetq_lane_f32::<1>(values))
            }
        }
    }
}
