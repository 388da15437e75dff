//! Which vector instructions this machine has. The plain form runs everywhere and is the reference
//! that the others must equal to the bit.

use std::sync::OnceLock;

/// A family of vector instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Plain,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL, and all of `Avx2`.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Advanced SIMD, which every AArch64 machine has.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

/// A family of vector instructions that kernels are built for. Holding one proves that this machine
/// has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Family);

impl Isa {
    /// The best that this machine has.
    pub fn detect() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::available().pop().unwrap_or(Self(Family::Plain)))
    }

    /// All that this machine has, the plain form first and the best last.
    pub fn available() -> Vec<Self> {
        let mut all = vec![Family::Plain];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("fma") && has!("f16c");
            let avx512 =
                has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
            all.extend(avx2.then_some(Family::Avx2));
            all.extend((avx2 && avx512).then_some(Family::Avx512));
        }
        #[cfg(target_arch = "aarch64")]
        all.push(Family::Neon);
        all.into_iter().map(Self).collect()
    }

    /// The family.
    pub(crate) fn family(self) -> Family {
        self.0
    }

    /// The name used in reports.
    pub fn name(self) -> &'static str {
        match self.0 {
            Family::Plain => "plain",
            #[cfg(target_arch = "x86_64")]
            Family::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Family::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Family::Neon => "neon",
        }
    }
}
