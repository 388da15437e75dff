//! The few steps of a lookup that plain Rust cannot say: reading memory that a writer may change at
//! the same moment, a vector at a time, and turning f16 into f32. One trait, one form for each
//! family of vector instructions; all give the same bits. Everything else is plain Rust that the
//! compiler vectorises.
//!
//! A racing read goes through inline assembly: to the compiler it is a run of relaxed atomic loads,
//! which is what the plain form does word by word. The caller finds out from the set's sequence
//! number whether the bytes are of one row.

#![allow(unsafe_code)]

pub(crate) mod atomics;
pub mod huge_pages;
pub mod isa;
pub(crate) mod vector;

#[cfg(not(loom))]
use crate::lookup::pooling::PoolJob;
use crate::simd::atomics::{AtomicU32, Ordering};
use crate::simd::isa::{Family, Isa};
use half::f16;

/// Bytes of one racing read; what is copied is rounded up to it.
pub const READ_BYTES: usize = if cfg!(loom) { 8 } else { 32 };
/// Bytes behind the last of some rows that may be read: rows are read by whole vectors.
pub const BEYOND: usize = 64;
/// Units of 4 bytes that `find` compares: a cache line.
pub const LANES: usize = if cfg!(loom) { 4 } else { 16 };

/// One family of vector instructions. Its functions only run inside [`dispatch`].
pub(crate) trait Simd {
    /// A mask of the words that equal `word`, the first in the lowest bit.
    #[inline(always)]
    fn find(words: &[AtomicU32; LANES], word: u32) -> u32 {
        let hit =
            |(way, w): (usize, &AtomicU32)| u32::from(w.load(Ordering::Relaxed) == word) << way;
        words.iter().enumerate().map(hit).sum()
    }

    /// Copies `from` `[8 n]`, which may change meanwhile, to `to` `[32 n]`.
    #[inline(always)]
    fn copy_racing(from: &[AtomicU32], to: &mut [u8]) {
        for (word, bytes) in from.iter().zip(to.chunks_exact_mut(4)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
    }

    /// Eight f16 as f32; exact.
    #[inline(always)]
    fn widen(halves: &[u8; 16]) -> [f32; 8] {
        std::array::from_fn(|i| f16::from_le_bytes([halves[2 * i], halves[2 * i + 1]]).to_f32())
    }

    /// Adds rows up in registers; `false` if the family has no such form.
    #[cfg(not(loom))]
    #[inline(always)]
    fn sum(_: PoolJob<'_>) -> bool {
        false
    }
}

/// What every machine can do, and the meaning of the others.
pub(crate) struct Plain;
impl Simd for Plain {}

/// Work that is built once for each family. `run` and all that it calls must be
/// `#[inline(always)]`: what is not inlined is built without the family's instructions.
pub(crate) trait Job {
    type Out;
    fn run<S: Simd>(self) -> Self::Out;
}

/// Runs `job` as it was built for `isa`.
#[inline(always)]
pub(crate) fn dispatch<J: Job>(isa: Isa, job: J) -> J::Out {
    match isa.family() {
        // SAFETY: an `Isa` proves that the machine has the family's instructions.
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        Family::Avx2 => unsafe { x86::run_avx2(job) },
        // SAFETY: as above.
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        Family::Avx512 => unsafe { x86::run_avx512(job) },
        #[cfg(all(target_arch = "aarch64", not(loom)))]
        Family::Neon => job.run::<arm::Neon>(),
        _ => job.run::<Plain>(),
    }
}

macro_rules! prefetch {
    ($(#[$doc:meta])* $name:ident, $hint:ident, $operation:literal) => {
        $(#[$doc])*
        #[inline(always)]
        pub fn $name<T>(at: *const T) {
            // SAFETY: a prefetch reads nothing that the program can see and faults on no address.
            #[cfg(target_arch = "x86_64")]
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::$hint }>(at.cast());
            }
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            unsafe {
                std::arch::asm!($operation, p = in(reg) at, options(nostack, preserves_flags, readonly));
            }
            let _ = at;
        }
    };
}
prefetch! {
    /// Asks for the cache line at `at`, which may lie anywhere, ahead of its use.
    prefetch, _MM_HINT_T0, "prfm pldl1keep, [{p}]"
}
prefetch! {
    /// Asks for the cache line at `at`, which may lie anywhere, well ahead of its use: it comes to
    /// the second level only, and takes none of the few places in which the first waits for what is
    /// missing there (24 lines on a Zen 4, fewer on others).
    prefetch_l2, _MM_HINT_T1, "prfm pldl2keep, [{p}]"
}

/// Puts stores past the caches in order with all that follows.
#[inline(always)]
pub(crate) fn drain() {
    // SAFETY: every x86-64 has it, and it touches nothing.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

#[cfg(all(target_arch = "x86_64", not(loom)))]
pub(crate) mod x86 {
    use super::*;
    use std::arch::asm;
    use std::arch::x86_64::*;

    pub(crate) struct Avx2;
    pub(crate) struct Avx512;

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn run_avx2<J: Job>(job: J) -> J::Out {
        job.run::<Avx2>()
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    pub(crate) fn run_avx512<J: Job>(job: J) -> J::Out {
        job.run::<Avx512>()
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn read_256<T>(from: &[T]) -> __m256i {
        assert!(size_of_val(from) >= 32);
        let value;
        // SAFETY: 32 bytes of the slice are read; see the head of the file for the race.
        unsafe {
            asm!("vmovdqu {v}, ymmword ptr [{p}]", v = lateout(ymm_reg) value, p = in(reg) from.as_ptr(),
                 options(nostack, preserves_flags, readonly));
        }
        value
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn read_512<T>(from: &[T]) -> __m512i {
        assert!(size_of_val(from) >= 64);
        let value;
        // SAFETY: 64 bytes of the slice are read; see the head of the file for the race.
        unsafe {
            asm!("vmovdqu64 {v}, zmmword ptr [{p}]", v = lateout(zmm_reg) value, p = in(reg) from.as_ptr(),
                 options(nostack, preserves_flags, readonly));
        }
        value
    }

    /// In pieces as wide as those in which the bytes will be loaded again: a load that spans two
    /// stores waits until both are in the cache.
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
    fn find_avx2(words: &[AtomicU32; LANES], word: u32) -> u32 {
        let word = _mm256_set1_epi32(word as i32);
        let half = |words| {
            let equal = _mm256_cmpeq_epi32(read_256(words), word);
            _mm256_movemask_ps(_mm256_castsi256_ps(equal)) as u32
        };
        half(&words[..8]) | half(&words[8..]) << 8
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn find_avx512(words: &[AtomicU32; LANES], word: u32) -> u32 {
        u32::from(_mm512_cmpeq_epi32_mask(read_512(words), _mm512_set1_epi32(word as i32)))
    }

    /// A function by itself: the loops of a sum want all registers.
    #[target_feature(enable = "avx2,fma,f16c")]
    fn sum_avx2(sum: PoolJob<'_>) {
        // SAFETY: the instructions are there.
        unsafe { sum.run::<vector::x86::Two>() };
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    fn sum_avx512(sum: PoolJob<'_>) {
        // SAFETY: the instructions are there.
        unsafe { sum.run::<vector::x86::One>() };
    }

    // SAFETY of all below: `Simd` says that the machine has the instructions.
    impl Simd for Avx2 {
        #[inline(always)]
        fn find(words: &[AtomicU32; LANES], word: u32) -> u32 {
            // SAFETY: above.
            unsafe { find_avx2(words, word) }
        }

        #[inline(always)]
        fn copy_racing(from: &[AtomicU32], to: &mut [u8]) {
            // SAFETY: above.
            unsafe { copy_avx2(from, to) }
        }

        #[inline(always)]
        fn widen(halves: &[u8; 16]) -> [f32; 8] {
            // SAFETY: above.
            unsafe { widen(halves) }
        }

        #[inline(always)]
        fn sum(sum: PoolJob<'_>) -> bool {
            // SAFETY: above.
            unsafe { sum_avx2(sum) };
            true
        }
    }

    impl Simd for Avx512 {
        #[inline(always)]
        fn find(words: &[AtomicU32; LANES], word: u32) -> u32 {
            // SAFETY: above.
            unsafe { find_avx512(words, word) }
        }

        #[inline(always)]
        fn copy_racing(from: &[AtomicU32], to: &mut [u8]) {
            // SAFETY: above.
            unsafe { copy_avx512(from, to) }
        }

        #[inline(always)]
        fn widen(halves: &[u8; 16]) -> [f32; 8] {
            // SAFETY: above.
            unsafe { widen(halves) }
        }

        #[inline(always)]
        fn sum(sum: PoolJob<'_>) -> bool {
            // SAFETY: above.
            unsafe { sum_avx512(sum) };
            true
        }
    }
}

#[cfg(all(target_arch = "aarch64", not(loom)))]
pub(crate) mod arm {
    use super::*;
    use std::arch::aarch64::*;
    use std::arch::asm;

    pub(crate) struct Neon;

    #[inline(always)]
    fn read_128<T>(from: &[T]) -> uint32x4_t {
        assert!(size_of_val(from) >= 16);
        let value;
        // SAFETY: 16 bytes of the slice are read; see the head of the file for the race.
        unsafe {
            asm!("ldr {v:q}, [{p}]", v = lateout(vreg) value, p = in(reg) from.as_ptr(),
                 options(nostack, preserves_flags, readonly));
        }
        value
    }

    impl Simd for Neon {
        #[inline(always)]
        fn find(words: &[AtomicU32; LANES], word: u32) -> u32 {
            // SAFETY: Advanced SIMD is always there; four values are loaded from an array of four.
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
            let (low, high): (float32x4_t, float32x4_t);
            let mut out = [0.0; 8];
            // SAFETY: 16 bytes are read and 32 stored. The conversion is written in assembly
            // because its f16 vector type is not stable in this compiler; it is part of Advanced
            // SIMD.
            unsafe {
                let halves = vld1q_u8(halves.as_ptr());
                asm!("fcvtl {l:v}.4s, {h:v}.4h", "fcvtl2 {u:v}.4s, {h:v}.8h",
                     l = out(vreg) low, u = out(vreg) high, h = in(vreg) halves,
                     options(pure, nomem, nostack, preserves_flags));
                vst1q_f32(out.as_mut_ptr(), low);
                vst1q_f32(out.as_mut_ptr().add(4), high);
            }
            out
        }

        #[inline(always)]
        fn sum(sum: PoolJob<'_>) -> bool {
            // SAFETY: Advanced SIMD is always there.
            unsafe { sum.run::<vector::arm::Four>() };
            true
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// What a family makes of words and halves; through the cache a way that is not found is only a
    /// miss.
    struct All<'a>(&'a [AtomicU32; LANES], &'a [u8; 16]);

    impl Job for All<'_> {
        type Out = ([u32; 5], [u8; 4 * LANES], [u32; 8]);
        #[inline(always)]
        fn run<S: Simd>(self) -> Self::Out {
            let mut copy = [0; 4 * LANES];
            S::copy_racing(self.0, &mut copy);
            (
                std::array::from_fn(|word| S::find(self.0, word as u32)),
                copy,
                S::widen(self.1).map(f32::to_bits),
            )
        }
    }

    #[test]
    fn every_family_does_what_the_plain_form_does() {
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
