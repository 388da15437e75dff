//! TensorRT: a dense network built on this GPU from its ONNX file, kept, and put onto a stream.
//! Everything passes `tensorrt/shim.cpp`, a library of its own that is built where TensorRT's
//! headers are: this crate needs none of it to be built or started. Never takes a plan that another
//! machine built, never runs code that lies in a plan.

mod plans;
mod shim;

use crate::cuda::driver::Gpu;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use plans::Plans;
pub use shim::Context;

/// Why TensorRT is not used. The caller takes the kernels of `dense` instead.
#[derive(Debug, thiserror::Error)]
pub enum TensorRtError {
    /// The shim is not there.
    #[error(
        "TensorRT: {path} is not loaded ({problem}); where TensorRT's headers are, kernels/tensorrt/make builds it",
        path = path.display()
    )]
    NotBuilt {
        /// Where it was looked for.
        path: PathBuf,
        /// The loader's words.
        problem: String,
    },
    /// The shim belongs to another release of Hatchback.
    #[error(
        "TensorRT: the shim has interface {shim}, this release speaks {expected}: build it anew"
    )]
    OtherShim {
        /// The shim's number.
        shim: i32,
        /// Ours.
        expected: i32,
    },
    /// TensorRT or its ONNX parser is not there.
    #[error("TensorRT: {0}")]
    NoLibrary(String),
    /// A library lacks an entry point.
    #[error("TensorRT: the library has no `{0}`")]
    NoEntry(String),
    /// The library is of another release than the shim's headers.
    #[error(
        "TensorRT: the library is {library}, the shim was built for {headers}: build it for this one"
    )]
    Version {
        /// The headers'.
        headers: Version,
        /// The library's.
        library: Version,
    },
    /// FP16 was asked of a release that takes its types from the ONNX file.
    #[error("TensorRT {0} computes in the types of the ONNX file and cannot be asked for FP16")]
    NoFp16(Version),
    /// The network's inputs or outputs are not those that were asked for.
    #[error("TensorRT: {0}")]
    Interface(String),
    /// An earlier start built it and could not use it.
    #[error("TensorRT: {path} says that the engine built here was of no use; remove it to try again", path = path.display())]
    OfNoUse {
        /// What says so.
        path: PathBuf,
    },
    /// TensorRT refused; its own words.
    #[error("TensorRT: {0}")]
    Refused(String),
}

/// A release of TensorRT as its library states it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Version(pub i32);

impl fmt::Display for Version {
    /// 8601 is 8.6.1, from 10 on 101000 is 10.10.0.
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

/// What an engine is built from.
#[derive(Clone, Debug)]
pub struct Build<'a> {
    /// The file.
    pub onnx: &'a [u8],
    /// Names and shapes of one sample.
    pub inputs: Vec<(&'a str, Vec<usize>)>,
    /// The output's name.
    pub output: &'a str,
    /// The batch that it is made fast for.
    pub batch_typical: usize,
    /// Samples at most.
    pub batch_max: usize,
    /// Device memory that a layer may take while it runs.
    pub workspace_bytes_max: u64,
    /// Whether layers may compute in FP16.
    pub fp16: bool,
    /// TensorRT for RTX alone: the compute capability to build for, 86 for 8.6, where there is no
    /// such GPU.
    pub compute_capability: Option<i32>,
}

/// A TensorRT that is there and of its headers' release.
#[derive(Clone)]
pub struct TensorRt {
    shim: Arc<shim::Shim>,
}

/// A network that is ready on this GPU. Holding one proves that it has the inputs and the output
/// asked for, in f32.
pub struct Engine {
    engine: Arc<shim::Engine>,
}

impl TensorRt {
    /// Loads the shim at `shim` and TensorRT under its usual names, or `libraries`: it and its ONNX
    /// parser.
    ///
    /// # Errors
    /// One of them is missing, or they are of different releases.
    pub fn open(shim: &Path, libraries: Option<(&Path, &Path)>) -> Result<Self, TensorRtError> {
        Ok(Self { shim: Arc::new(shim::Shim::open(shim, libraries)?) })
    }

    /// The library's release.
    pub fn version(&self) -> Version {
        self.shim.version
    }

    /// Builds a plan, which takes seconds to minutes. It runs on this release and this GPU alone.
    ///
    /// # Errors
    /// TensorRT cannot read or build the network.
    pub fn build(&self, build: &Build) -> Result<Vec<u8>, TensorRtError> {
        self.shim.build(build)
    }

    /// Makes a plan of `build` ready. That `gpu` is up is what some releases need to fail cleanly.
    ///
    /// # Errors
    /// The plan is not for this release or GPU, or its tensors are not those of `build`.
    pub fn load(
        &self,
        _gpu: &Arc<Gpu>,
        plan: &[u8],
        build: &Build,
    ) -> Result<Engine, TensorRtError> {
        Ok(Engine { engine: Arc::new(self.shim.load(plan, build)?) })
    }
}

impl Engine {
    /// Device memory that one context takes.
    pub fn context_bytes(&self) -> u64 {
        self.engine.context_bytes()
    }

    /// A state for one worker.
    ///
    /// # Errors
    /// There is not enough device memory.
    pub fn context(&self) -> Result<Context, TensorRtError> {
        self.engine.context()
    }
}
