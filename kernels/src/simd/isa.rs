//! The vector instructions of this machine. The plain family runs on every machine. It is the
//! reference: the other families must give the same bits.

use std::sync::OnceLock;

/// A family of vector instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Plain,
    /// AVX2, BMI2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, DQ and VL, and all of `Avx2`.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Advanced SIMD, which every AArch64 machine has.
    #[cfg(target_arch = "aarch64")]
    Neon,
}

/// A family of vector instructions for which the kernels are compiled, with or without its newer
/// dot products of bytes. Holding one proves that this machine has the instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa {
    family: Family,
    has_dot: bool,
}

impl Isa {
    /// Returns the best instructions that this machine has.
    pub fn detect() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        let plain = Self { family: Family::Plain, has_dot: false };
        *BEST.get_or_init(|| Self::available().pop().unwrap_or(plain))
    }

    /// Returns all families that this machine has, the plain family first and the best last. If the
    /// machine has a family's dot products, the list has the family twice: without them, then with
    /// them.
    pub fn available() -> Vec<Self> {
        let mut all = vec![Self { family: Family::Plain, has_dot: false }];
        let mut add = |family, has_dot: bool| {
            all.push(Self { family, has_dot: false });
            all.extend(has_dot.then_some(Self { family, has_dot }));
        };

        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("bmi2") && has!("fma") && has!("f16c");
            let avx512 =
                has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
            if avx2 {
                add(Family::Avx2, has!("avxvnni"));
            }
            if avx2 && avx512 {
                add(Family::Avx512, has!("avx512vnni"));
            }
        }
        #[cfg(target_arch = "aarch64")]
        add(Family::Neon, std::arch::is_aarch64_feature_detected!("dotprod"));
        all
    }

    /// Returns the family.
    pub(crate) fn family(self) -> Family {
        self.family
    }

    /// Returns whether the machine has the family's dot products of bytes: AVX-VNNI, AVX-512 VNNI,
    /// or NEON's SDOT.
    pub(crate) fn has_dot(self) -> bool {
        self.has_dot
    }

    /// Returns the name that reports use.
    pub fn name(self) -> &'static str {
        match (self.family, self.has_dot) {
            (Family::Plain, _) => "plain",
            #[cfg(target_arch = "x86_64")]
            (Family::Avx2, false) => "avx2",
            #[cfg(target_arch = "x86_64")]
            (Family::Avx2, true) => "avx2+vnni",
            #[cfg(target_arch = "x86_64")]
            (Family::Avx512, false) => "avx512",
            #[cfg(target_arch = "x86_64")]
            (Family::Avx512, true) => "avx512+vnni",
            #[cfg(target_arch = "aarch64")]
            (Family::Neon, false) => "neon",
            #[cfg(target_arch = "aarch64")]
            (Family::Neon, true) => "neon+dot",
        }
    }
}
