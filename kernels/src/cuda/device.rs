//! The device on which a process looks up embeddings, and host memory that this device can access.
//! Never allocates device memory.

use crate::cuda::driver::{Gpu, Profile};
use crate::cuda::error::CudaError;
use crate::cuda::memory::{DeviceValue, Mapped};
use crate::simd::huge_pages::{Zeroable, Zeroed};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// The device that looks up embeddings. A process chooses its device once, at start.
#[derive(Clone, Default)]
pub enum Device {
    /// The CPU.
    #[default]
    Cpu,
    /// A CUDA GPU.
    Cuda(Arc<Gpu>),
}

impl Device {
    /// Opens the first GPU.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub fn cuda(profile: Profile) -> Result<Self, CudaError> {
        Gpu::open(profile).map(Self::Cuda)
    }

    /// Returns the device's name for reports.
    pub fn name(&self) -> &str {
        match self {
            Self::Cpu => "CPU",
            Self::Cuda(gpu) => gpu.name(),
        }
    }

    /// Returns the compute capability of a GPU, such as 87 for 8.7.
    pub fn sm(&self) -> Option<u32> {
        match self {
            Self::Cpu => None,
            Self::Cuda(gpu) => Some(gpu.sm()),
        }
    }

    /// Returns the bytes of the device's own memory in use when it was opened, as
    /// [`Gpu::used_bytes`] does.
    pub fn used_bytes(&self) -> u64 {
        if let Self::Cuda(gpu) = self { gpu.used_bytes() } else { 0 }
    }

    /// Allocates `len` zeros in host memory. On a GPU the device can access them too.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if the GPU cannot map that much memory.
    pub fn host_memory<T: DeviceValue + Zeroable>(
        &self,
        len: usize,
    ) -> Result<HostMemory<T>, CudaError> {
        Ok(match self {
            Self::Cpu => HostMemory::Plain(Zeroed::new(len)),
            Self::Cuda(gpu) => HostMemory::Mapped(gpu.mapped(len)?),
        })
    }
}

/// Values in host memory, `[len]`.
pub enum HostMemory<T> {
    /// Only the host accesses them.
    Plain(Zeroed<T>),
    /// A GPU accesses them too.
    Mapped(Mapped<T>),
}

impl<T> HostMemory<T> {
    /// Returns the mapped values, or `None` if only the host accesses them.
    pub fn mapped(&self) -> Option<&Mapped<T>> {
        match self {
            Self::Plain(_) => None,
            Self::Mapped(mapped) => Some(mapped),
        }
    }
}

impl<T: DeviceValue + Zeroable> Deref for HostMemory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Plain(values) => values,
            Self::Mapped(values) => values,
        }
    }
}

impl<T: DeviceValue + Zeroable> DerefMut for HostMemory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Plain(values) => values,
            Self::Mapped(values) => values,
        }
    }
}

impl<T: DeviceValue + Zeroable> AsRef<[T]> for HostMemory<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}
