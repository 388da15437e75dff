//! Which vector instructions this machine has. The plain family runs on every machine. It is the
//! reference whose bits the other families must give.

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

/// A family of vector instructions that the kernels are compiled for. Holding one proves that this
/// machine has the instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Family);

impl Isa {
    /// Returns the best family that this machine has.
    pub fn detect() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::available().pop().unwrap_or(Self(Family::Plain)))
    }

    /// Returns all families that this machine has, the plain family first and the best last.
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

    /// Returns the family.
    pub(crate) fn family(self) -> Family {
        self.0
    }

    /// Returns the name that reports use.
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
