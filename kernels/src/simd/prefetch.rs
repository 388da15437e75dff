//! Prefetch hints. A prefetch starts to load a cache line and never faults, so any address may be
//! given.

// Each hint is an intrinsic or inline assembly.
#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;

macro_rules! prefetch {
    ($(#[$doc:meta])* $name:ident, $hint:ident, $operation:literal) => {
        $(#[$doc])*
        #[inline(always)]
        pub fn $name<T>(at: *const T) {
            // SAFETY: a prefetch has no effect that the program can see and faults on no address.
            #[cfg(target_arch = "x86_64")]
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::$hint }>(at.cast());
            }
            // SAFETY: as for x86-64.
            #[cfg(target_arch = "aarch64")]
            unsafe {
                std::arch::asm!(
                    $operation,
                    p = in(reg) at,
                    options(nostack, preserves_flags, readonly)
                );
            }
            let _ = at;
        }
    };
}
prefetch! {
    /// Prefetches the cache line at `at` into all levels of the cache.
    prefetch, _MM_HINT_T0, "prfm pldl1keep, [{p}]"
}
prefetch! {
    /// Prefetches the cache line at `at` into the second level only. A core can have few misses of
    /// its first level in flight (24 on a Zen 4), and this hint takes none of these entries.
    prefetch_l2, _MM_HINT_T1, "prfm pldl2keep, [{p}]"
}

/// Returns whether this processor is taken to drop prefetches while too many lines are outstanding.
/// A Zen 4 does: a second prefetch of a line makes lookups faster. It makes them slower on a
/// processor of Intel (`hatchback-bench lookup`). On other processors nobody has measured it.
#[inline]
pub(crate) fn drops_prefetches() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        static DROPS: LazyLock<bool> = LazyLock::new(|| {
            let leaf = std::arch::x86_64::__cpuid(0);
            let vendor = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
            vendor.as_flattened() != b"GenuineIntel"
        });
        *DROPS
    }
    #[cfg(not(target_arch = "x86_64"))]
    true
}

/// Prefetches the first `LINES_MAX` lines of a row and its last line. The hardware prefetcher loads
/// the lines between them.
#[inline(always)]
pub(crate) fn prefetch_lines<T>(row: &[T]) {
    const LINES_MAX: usize = 8;
    let line = 64 / size_of::<T>();
    row.chunks_exact(line).take(LINES_MAX).for_each(|line| prefetch_l2(&line[0]));
    // A row need not start on a cache line, so its end may be on one line more.
    row.last().inspect(|last| prefetch_l2(*last));
}
