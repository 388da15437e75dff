//! Why TensorRT is not used, and the release numbers in these errors. Never loads a library.

use std::fmt;
use std::path::PathBuf;

/// Why TensorRT is not used. The caller uses Hatchback's kernels instead.
#[allow(missing_docs)]
#[derive(Debug, thiserror::Error)]
pub enum TensorRtError {
    /// The shim cannot be loaded; `problem` is the loader's reason.
    #[error(
        "TensorRT: {path} cannot be loaded ({problem}); build it with kernels/tensorrt/make where \
         TensorRT's headers are installed",
        path = path.display()
    )]
    NotBuilt { path: PathBuf, problem: String },
    /// The shim belongs to another release of Hatchback.
    #[error(
        "TensorRT: the shim has interface {shim}, this release of Hatchback needs {expected}; \
         build the shim again with kernels/tensorrt/make"
    )]
    OtherShim { shim: i32, expected: i32 },
    /// TensorRT or its ONNX parser cannot be loaded, for this reason of the loader.
    #[error("TensorRT: {0}")]
    NoLibrary(String),
    #[error("TensorRT: the library has no `{0}`")]
    NoEntry(String),
    /// The library is of another release than the headers that the shim was built with.
    #[error(
        "TensorRT: the library is {library}, the shim was built for {headers}; build the shim for \
         {library}"
    )]
    Version { headers: Version, library: Version },
    /// This release computes in the types of the ONNX file and has no FP16 option.
    #[error(
        "TensorRT {0} computes in the types of the ONNX file; choose another precision than f16"
    )]
    NoFp16(Version),
    /// The network's inputs or outputs are not those of the build.
    #[error("TensorRT: {0}")]
    Interface(String),
    #[error("TensorRT: no plan at {path} yet", path = path.display())]
    NoPlan { path: PathBuf },
    /// An engine was built here whose scores were not the CPU's.
    #[error(
        "TensorRT: an engine built on this machine gave other scores than the CPU, as {path} \
         records; remove the file to try again",
        path = path.display()
    )]
    Useless { path: PathBuf },
    /// Builds of a plan ended with the process, which the file counts.
    #[error(
        "TensorRT: {builds} builds of a plan ended with the process, as {path} counts; remove the \
         file to try again",
        path = path.display()
    )]
    Crashes { path: PathBuf, builds: usize },
    /// This release is older than the GPU.
    #[error(
        "TensorRT {version} does not know the GPU's compute capability {major}.{minor}; \
         {first} is the first that knows 10.0 and later",
        major = sm / 10,
        minor = sm % 10,
        first = FIRST_OF_BLACKWELL
    )]
    UnknownGpu { version: Version, sm: u32 },
    /// TensorRT refused, with this text.
    #[error("TensorRT: {0}")]
    Refused(String),
}

/// The first release that knows a compute capability of 10.0 or more, as its release notes say.
/// Which of the later GPUs a build knows does not follow from its number: those for DRIVE OS know
/// one board, and 10.13 for servers knew no Orin.
const FIRST_OF_BLACKWELL: Version = Version(100_800);

/// A release of TensorRT, as the number that its library returns: 8601 is 8.6.1; from release 10 on
/// 101000 is 10.10.0.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Version(pub i32);

impl Version {
    /// Checks that this release is not older than GPUs of compute capability `sm`, 87 for 8.7.
    ///
    /// # Errors
    /// [`TensorRtError::UnknownGpu`].
    pub fn check_gpu(self, sm: u32) -> Result<(), TensorRtError> {
        // TensorRT for RTX, 1.x, knows 12.0 from its first release on.
        let is_older = (8_000..FIRST_OF_BLACKWELL.0).contains(&self.0) && !self.is_rtx();
        if is_older && sm >= 100 {
            return Err(TensorRtError::UnknownGpu { version: self, sm });
        }
        Ok(())
    }

    fn is_rtx(self) -> bool {
        (10_000..20_000).contains(&self.0)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let major = if self.0 < 10_000 { 1_000 } else { 10_000 };
        write!(f, "{}.{}.{}", self.0 / major, self.0 % major / 100, self.0 % 100)
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{self}")
    }
}
