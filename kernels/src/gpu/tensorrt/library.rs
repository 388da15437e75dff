//! The safe interface to a loaded TensorRT: it builds plans and loads them. Never chooses between
//! backends.

use crate::cuda::driver::Gpu;
use crate::cuda::memory::Buffer;
use crate::gpu::tensorrt::build::Build;
use crate::gpu::tensorrt::error::{TensorRtError, Version};
use crate::gpu::tensorrt::shim;
use std::path::Path;
use std::sync::Arc;

/// A loaded TensorRT. Holding one proves that its release is that of the shim's headers.
#[derive(Clone)]
pub struct TensorRt {
    shim: Arc<shim::Shim>,
}

/// A network that is ready to run on this GPU. Holding one proves that it has the inputs and the
/// output of its build.
pub struct Engine {
    engine: Arc<shim::Engine>,
}

impl TensorRt {
    /// Loads the shim from `shim`, and TensorRT from the first of `libraries`, or by its usual
    /// name. A build loads the ONNX parser, the second of them: a start with kept plans needs none.
    ///
    /// # Errors
    /// [`TensorRtError::NotBuilt`], [`TensorRtError::OtherShim`], [`TensorRtError::NoLibrary`],
    /// [`TensorRtError::NoEntry`] or [`TensorRtError::Version`].
    pub fn open(shim: &Path, libraries: Option<(&Path, &Path)>) -> Result<Self, TensorRtError> {
        Ok(Self { shim: Arc::new(shim::Shim::open(shim, libraries)?) })
    }

    /// Returns the library's release.
    pub fn version(&self) -> Version {
        self.shim.version
    }

    /// Builds a plan, which takes seconds to minutes. The plan only runs with this release on this
    /// GPU. `timings` are those of earlier builds here, or empty. The build adds its own.
    ///
    /// # Errors
    /// [`TensorRtError::Refused`], [`TensorRtError::Interface`] or [`TensorRtError::NoFp16`], or of
    /// the parser [`TensorRtError::NoLibrary`] or [`TensorRtError::NoEntry`].
    pub fn build(&self, build: &Build, timings: &mut Vec<u8>) -> Result<Vec<u8>, TensorRtError> {
        self.shim.build(build, timings)
    }

    /// Loads a plan of `build`. The GPU must be open: without a driver some releases crash instead
    /// of failing.
    ///
    /// # Errors
    /// [`TensorRtError::Refused`] if the plan is of another release or GPU,
    /// [`TensorRtError::Interface`] if its tensors are not those of `build`.
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
    /// Returns the bytes that the engine takes, without contexts: its weights, counted as the bytes
    /// of its plan, which contains them. TensorRT does not report them. TensorRT 8.5 needs the plan
    /// for each context, so there the plan itself counts too.
    pub fn bytes(&self) -> u64 {
        self.engine.bytes()
    }

    /// Returns the bytes of device memory in which contexts run, one at a time.
    pub fn run_bytes(&self) -> u64 {
        self.engine.run_bytes()
    }

    /// Returns the bytes that one context takes beside [`Engine::run_bytes`]: with TensorRT 8.5 a
    /// copy of the weights, counted as the bytes of the plan.
    pub fn context_bytes(&self) -> u64 {
        self.engine.context_bytes()
    }

    /// Creates a context whose runs use `memory`, which has [`Engine::run_bytes`] bytes at least.
    /// No two contexts with the same memory may run at the same time.
    ///
    /// # Errors
    /// [`TensorRtError::Refused`] if there is not enough device memory.
    pub fn context(&self, memory: &Arc<Buffer<f32>>) -> Result<shim::Context, TensorRtError> {
        self.engine.context(memory)
    }
}
