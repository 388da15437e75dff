//! The few steps of a lookup that plain Rust cannot express. These are reads of memory, a vector at
//! a time, while a writer may change it, and conversions of f16 to f32. `Simd` has one
//! implementation for each family of vector instructions, and all give the same bits. Everything
//! else is plain Rust that the compiler vectorises. This folder knows no cache and no table.
//!
//! A racing read is inline assembly. To the compiler it is like a sequence of relaxed atomic loads,
//! which the plain family makes word by word. The caller checks with the set's sequence number
//! whether the bytes are one complete row.

#![allow(unsafe_code)]

pub(crate) mod atomics;
#[cfg_attr(loom, path = "../../../tests/loom/src/zeroed.rs")]
pub mod huge_pages;
pub mod isa;
pub(crate) mod prefetch;
pub(crate) mod vector;

pub use prefetch::{prefetch, prefetch_l2};

use crate::simd::atomics::{AtomicU32, Ordering};
use crate::simd::isa::{Family, Isa};
use crate::simd::vector::VectorJob;
use half::f16;

/// Bytes of one racing read: a read of memory that a writer may change. A racing copy is rounded up
/// to a multiple.
pub const READ_BYTES: usize = if cfg!(loom) { 8 } else { 32 };
/// Bytes after the last row of an array that must be readable, because rows are read in whole
/// vectors.
pub const OVERREAD_BYTES: usize = 64;
/// Words of 4 bytes in a cache line.
pub const LINE_WORDS: usize = if cfg!(loom) { 4 } else { 16 };

/// One family of vector instructions. Only code inside [`dispatch`] calls its functions.
pub(crate) trait Simd {
    /// Returns a mask of the words that equal `word`, the first in the lowest bit.
    #[inline(always)]
    fn find(words: &[AtomicU32; LINE_WORDS], word: u32) -> u32 {
        let hit =
            |(way, w): (usize, &AtomicU32)| u32::from(w.load(Ordering::Relaxed) == word) << way;
        words.iter().enumerate().map(hit).sum()
    }

    /// Copies `from` `[8 n]`, which a writer may change during the copy, to `to` `[32 n]`.
    #[inline(always)]
    fn copy_racing(from: &[AtomicU32], to: &mut [u8]) {
        for (word, bytes) in from.iter().zip(to.chunks_exact_mut(4)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
    }

    /// Converts eight f16 to f32, exactly.
    #[inline(always)]
    fn widen(halves: &[u8; 16]) -> [f32; 8] {
        std::array::from_fn(|i| f16::from_le_bytes([halves[2 * i], halves[2 * i + 1]]).to_f32())
    }

    /// Runs `job` in a separate function, so that its loops can use all registers. Returns false
    /// and does nothing if the family has no vectors.
    #[inline(always)]
    fn run_vectors<J: VectorJob>(_job: J) -> bool {
        false
    }
}

/// The family without vector instructions, which every machine has. It defines the results of the
/// others.
pub(crate) struct Plain;
impl Simd for Plain {}

/// Work that is compiled once for each family. `run` and all functions that it calls must be
/// `#[inline(always)]`: a function that is not inlined is compiled without the family's
/// instructions.
pub(crate) trait Job {
    type Out;
    fn run<S: Simd>(self) -> Self::Out;
}

/// Runs the version of `job` that is compiled for `isa`.
#[inline(always)]
pub(crate) fn dispatch<J: Job>(isa: Isa, job: J) -> J::Out {
    match isa.family() {
        // SAFETY: an `Isa` proves that the machine has the family's instructions.
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        Family::Avx2 => unsafe { x86::run_avx2(job) },
        // SAFETY: as for AVX2.
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        Family::Avx512 => unsafe { x86::run_avx512(job) },
        #[cfg(all(target_arch = "aarch64", not(loom)))]
        Family::Neon => arm::run_neon(job),
        _ => run_plain(job),
    }
}

/// Never inlined. If one function contains the jobs of all codecs and poolings, the compiler takes
/// minutes for it.
#[inline(never)]
fn run_plain<J: Job>(job: J) -> J::Out {
    job.run::<Plain>()
}

/// Orders all earlier stores past the caches before all later stores.
#[inline(always)]
pub(crate) fn stream_fence() {
    // SAFETY: every x86-64 has the instruction, and it accesses no memory.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(all(target_arch = "x86_64", not(loom)))]
mod x86 {
    use super::*;
    use std::arch::asm;
    use std::arch::x86_64::*;

    pub(super) struct Avx2;
    pub(super) struct Avx512;

    #[target_feature(enable = "avx2,bmi2,fma,f16c")]
    pub(super) fn run_avx2<J: Job>(job: J) -> J::Out {
        job.run::<Avx2>()
    }

    #[target_feature(enable = "avx2,bmi2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn run_avx512<J: Job>(job: J) -> J::Out {
        job.run::<Avx512>()
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn read_256<T>(from: &[T]) -> __m256i {
        assert!(size_of_val(from) >= 32);
        let value;
        // SAFETY: 32 bytes of the slice are read. The head of the file explains the race.
        unsafe {
            asm!(
                "vmovdqu {v}, ymmword ptr [{p}]",
                v = lateout(ymm_reg) value,
                p = in(reg) from.as_ptr(),
                options(nostack, preserves_flags, readonly)
            );
        }
        value
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn read_512<T>(from: &[T]) -> __m512i {
        assert!(size_of_val(from) >= 64);
        let value;
        // SAFETY: 64 bytes of the slice are read. The head of the file explains the race.
        unsafe {
            asm!(
                "vmovdqu64 {v}, zmmword ptr [{p}]",
                v = lateout(zmm_reg) value,
                p = in(reg) from.as_ptr(),
                options(nostack, preserves_flags, readonly)
            );
        }
        value
    }

    /// Copies in pieces as wide as the later loads of the bytes. A load that spans two stores would
    /// wait until both are in the cache.
    #[inline]
    #[target_feature(enable = "avx2,avx512f")]
    fn copy_avx512(from: &[AtomicU32], to: &mut [u8]) {
        let to = &mut to[..size_of_val(from)];
        let (mut from, mut to) = (from.chunks_exact(16), to.chunks_exact_mut(2 * READ_BYTES));
        for (from, to) in from.by_ref().zip(to.by_ref()) {
            // SAFETY: `to` has 64 bytes; the store needs no alignment.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), read_512(from)) };
        }
        copy_avx2(from.remainder(), to.into_remainder());
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn copy_avx2(from: &[AtomicU32], to: &mut [u8]) {
        for (from, to) in from.chunks_exact(8).zip(to.chunks_exact_mut(READ_BYTES)) {
            // SAFETY: `to` has 32 bytes; the store needs no alignment.
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), read_256(from)) };
        }
    }

    #[inline]
    #[target_feature(enable = "avx,f16c")]
    fn widen(halves: &[u8; 16]) -> [f32; 8] {
        let mut out = [0.0; 8];
        // SAFETY: 16 bytes are loaded and 32 stored, neither needs alignment.
        unsafe {
            let halves = _mm_loadu_si128(halves.as_ptr().cast());
            _mm256_storeu_ps(out.as_mut_ptr(), _mm256_cvtph_ps(halves));
        }
        out
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn find_avx2(words: &[AtomicU32; LINE_WORDS], word: u32) -> u32 {
        let word = _mm256_set1_epi32(word as i32);
        let half = |words| {
            let equal = _mm256_cmpeq_epi32(read_256(words), word);
            _mm256_movemask_ps(_mm256_castsi256_ps(equal)) as u32
        };
        half(&words[..8]) | half(&words[8..]) << 8
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn find_avx512(words: &[AtomicU32; LINE_WORDS], word: u32) -> u32 {
        u32::from(_mm512_cmpeq_epi32_mask(read_512(words), _mm512_set1_epi32(word as i32)))
    }

    #[inline(never)]
    #[target_feature(enable = "avx2,bmi2,fma,f16c")]
    fn run_vectors_avx2<J: VectorJob>(job: J) {
        // SAFETY: the function's features include the instructions.
        unsafe { job.run::<vector::x86::TwoRegisters>() };
    }

    #[inline(never)]
    #[target_feature(enable = "avx2,bmi2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    fn run_vectors_avx512<J: VectorJob>(job: J) {
        // SAFETY: the function's features include the instructions.
        unsafe { job.run::<vector::x86::OneRegister>() };
    }

    impl Simd for Avx2 {
        #[inline(always)]
        fn find(words: &[AtomicU32; LINE_WORDS], word: u32) -> u32 {
            // SAFETY: `dispatch` alone runs a `Simd`, with an `Isa` that proves the instructions.
            unsafe { find_avx2(words, word) }
        }

        #[inline(always)]
        fn copy_racing(from: &[AtomicU32], to: &mut [u8]) {
            // SAFETY: `dispatch` alone runs a `Simd`, with an `Isa` that proves the instructions.
            unsafe { copy_avx2(from, to) }
        }

        #[inline(always)]
        fn widen(halves: &[u8; 16]) -> [f32; 8] {
            // SAFETY: `dispatch` alone runs a `Simd`, with an `Isa` that proves the instructions.
            unsafe { widen(halves) }
        }

        #[inline(always)]
        fn run_vectors<J: VectorJob>(job: J) -> bool {
            // SAFETY: `dispatch` alone runs a `Simd`, with an `Isa` that proves the instructions.
            unsafe { run_vectors_avx2(job) };
            true
        }
    }

    impl Simd for Avx512 {
        #[inline(always)]
        fn find(words: &[AtomicU32; LINE_WORDS], word: u32) -> u32 {
            // SAFETY: `dispatch` alone runs a `Simd`, with an `Isa` that proves the instructions.
            unsafe { find_avx512(words, word) }
        }

        #[inline(always)]
        fn copy_racing(from: &[AtomicU32], to: &mut [u8]) {
            // SAFETY: `dispatch` alone runs a `Simd`, with an `Isa` that proves the instructions.
            unsafe { copy_avx512(from, to) }
        }

        #[inline(always)]
        fn widen(halves: &[u8; 16]) -> [f32; 8] {
            // SAFETY: `dispatch` alone runs a `Simd`, with an `Isa` that proves the instructions.
            unsafe { widen(halves) }
        }

        #[inline(always)]
        fn run_vectors<J: VectorJob>(job: J) -> bool {
            // SAFETY: `dispatch` alone runs a `Simd`, with an `Isa` that proves the instructions.
            unsafe { run_vectors_avx512(job) };
            true
        }
    }
}

#[cfg(all(target_arch = "aarch64", not(loom)))]
mod arm {
    use super::*;
    use std::arch::aarch64::*;
    use std::arch::asm;

    pub(super) struct Neon;

    /// Never inlined, for the reason of [`run_plain`].
    #[inline(never)]
    pub(super) fn run_neon<J: Job>(job: J) -> J::Out {
        job.run::<Neon>()
    }

    #[inline(always)]
    fn read_128<T>(from: &[T]) -> uint32x4_t {
        assert!(size_of_val(from) >= 16);
        let value;
        // SAFETY: 16 bytes of the slice are read. The head of the file explains the race.
        unsafe {
            asm!(
                "ldr {v:q}, [{p}]",
                v = lateout(vreg) value,
                p = in(reg) from.as_ptr(),
                options(nostack, preserves_flags, readonly)
            );
        }
        value
    }

    #[inline(never)]
    fn run_vectors_neon<J: VectorJob>(job: J) {
        // SAFETY: every AArch64 machine has Advanced SIMD.
        unsafe { job.run::<vector::arm::FourRegisters>() };
    }

    impl Simd for Neon {
        #[inline(always)]
        fn find(words: &[AtomicU32; LINE_WORDS], word: u32) -> u32 {
            // SAFETY: every AArch64 machine has Advanced SIMD; four values are loaded from an array
            // of four.
            unsafe {
                let (word, bits) = (vdupq_n_u32(word), vld1q_u32([1, 2, 4, 8].as_ptr()));
                let quarter = |at: usize| {
                    vaddvq_u32(vandq_u32(vceqq_u32(read_128(&words[at..at + 4]), word), bits)) << at
                };
                quarter(0) | quarter(4) | quarter(8) | quarter(12)
            }
        }

        #[inline(always)]
        fn copy_racing(from: &[AtomicU32], to: &mut [u8]) {
            for (from, to) in from.chunks_exact(4).zip(to.chunks_exact_mut(16)) {
                // SAFETY: `to` has 16 bytes; the store needs no alignment.
                unsafe { vst1q_u32(to.as_mut_ptr().cast(), read_128(from)) };
            }
        }

        #[inline(always)]
        fn widen(halves: &[u8; 16]) -> [f32; 8] {
            let mut out = [0.0; 8];
            // SAFETY: 16 bytes are read and 32 stored. The conversion is part of Advanced SIMD.
            unsafe {
                let halves = vreinterpretq_f16_u8(vld1q_u8(halves.as_ptr()));
                vst1q_f32(out.as_mut_ptr(), vcvt_f32_f16(vget_low_f16(halves)));
                vst1q_f32(out.as_mut_ptr().add(4), vcvt_high_f32_f16(halves));
            }
            out
        }

        #[inline(always)]
        fn run_vectors<J: VectorJob>(job: J) -> bool {
            run_vectors_neon(job);
            true
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// All functions of a family. A test through the cache would take a wrong `find` for a miss.
    struct All<'a>(&'a [AtomicU32; LINE_WORDS], &'a [u8; 16]);

    impl Job for All<'_> {
        type Out = ([u32; 5], [u8; 4 * LINE_WORDS], [u32; 8]);
        #[inline(always)]
        fn run<S: Simd>(self) -> Self::Out {
            let mut copy = [0; 4 * LINE_WORDS];
            S::copy_racing(self.0, &mut copy);
            (
                std::array::from_fn(|word| S::find(self.0, word as u32)),
                copy,
                S::widen(self.1).map(f32::to_bits),
            )
        }
    }

    #[test]
    fn every_family_gives_the_results_of_the_plain_family() {
        for first in (0..=u16::MAX - 7).step_by(8) {
            let halves = std::array::from_fn(|i| (first + i as u16 / 2).to_le_bytes()[i % 2]);
            let words = std::array::from_fn(|i| {
                AtomicU32::new(u32::from(first).wrapping_mul(0x9e37_79b9) >> (2 * i) & 3)
            });
            let plain = dispatch(Isa::available()[0], All(&words, &halves));
            for isa in Isa::available() {
                assert_eq!(dispatch(isa, All(&words, &halves)), plain, "{isa:?}, {first}");
            }
        }
    }
}
