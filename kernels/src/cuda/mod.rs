//! The GPU: [`driver`] and [`memory`] are the fence around CUDA, `launch` has a typed function for
//! each kernel, [`tables`] the caches and resident tables in device memory, [`lookup`] the query of
//! a batch and what follows from it, [`dense`] the operators of a network and [`cublas`] its
//! products by a library, [`step`] all of a request as one [`graph`]. Kernels are CUDA C++ under
//! `kernels/cuda`, built by its `make` and embedded here. The bytes and, but for cuBLAS, the
//! results are the CPU's.

pub mod cublas;
pub mod driver;
pub mod graph;
pub mod memory;

use crate::simd::huge_pages::{Zeroable, Zeroed};
use driver::{CudaError, Gpu, Profile};
use memory::{DeviceValue, Mapped};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

/// Where embeddings are looked up. Chosen once, at start.
#[derive(Clone, Default)]
pub enum Device {
    /// The CPU.
    #[default]
    Cpu,
    /// A CUDA GPU.
    Cuda(Arc<Gpu>),
}

impl Device {
    /// The first GPU.
    ///
    /// # Errors
    /// There is none that the kernels can run on.
    pub fn cuda(profile: Profile) -> Result<Self, CudaError> {
        Gpu::open(profile).map(Self::Cuda)
    }

    /// What to call it in reports.
    pub fn name(&self) -> &str {
        match self {
            Self::Cpu => "CPU",
            Self::Cuda(gpu) => gpu.name(),
        }
    }

    /// The compute capability of a GPU, such as 87.
    pub fn sm(&self) -> Option<u32> {
        match self {
            Self::Cpu => None,
            Self::Cuda(gpu) => Some(gpu.sm()),
        }
    }

    /// `len` zeros in host memory, where the device reaches them too if it is a GPU.
    ///
    /// # Errors
    /// There is not enough memory that a GPU reaches.
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

/// Values in host memory.
pub enum HostMemory<T> {
    /// For the host alone.
    Plain(Zeroed<T>),
    /// For a GPU too.
    Mapped(Mapped<T>),
}

impl<T> HostMemory<T> {
    /// The mapped values, if they are.
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
