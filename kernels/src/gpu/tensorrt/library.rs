//! The safe interface to a loaded TensorRT: it builds plans and loads them. Never chooses between
//! backends.

use crate::cuda::driver::Gpu;
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
    ) -> Result<Arc<shim::Engine>, TensorRtError> {
        Ok(Arc::new(self.shim.load(plan, build)?))
    }
}
