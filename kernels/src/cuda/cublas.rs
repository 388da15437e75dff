//! A safe wrapper of cuBLAS: products of f32 on a stream, in the precision that the caller chooses.
//! If cuBLASLt accepts a product, its bias and Relu are in the same launch. The products use a
//! workspace that this crate allocates, so that a graph can record them. The library is loaded if
//! the machine has it, in any release from 11 on; Hatchback is not linked with it. The library adds
//! in another order than the kernels, so its results are within rounding of theirs, but not equal
//! to the bit.

#![allow(unsafe_code)]

use crate::cuda::cublas_library::{CublasError, Factors, check, load_any};
use crate::cuda::cublas_lt::{CublasLt, functions};
use crate::cuda::driver::{Gpu, Stream};
use crate::cuda::matrix::{DeviceMatrix, Start};
use crate::cuda::memory::{Buffer, View};
use libloading::Library;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

/// Returns the bytes of the workspace that NVIDIA recommends for compute capability `sm`: 32 MiB
/// from Hopper on.
pub(crate) fn workspace_bytes(sm: u32) -> usize {
    if sm >= 90 { 32 << 20 } else { 4 << 20 }
}

/// File names of the library: the development link, and those of CUDA 13 to 11.
const LIBRARY_NAMES: [&str; 4] =
    ["libcublas.so", "libcublas.so.13", "libcublas.so.12", "libcublas.so.11"];

type Handle = *mut c_void;
type Floats = *const f32;

functions! { "cuBLAS" LIBRARY_NAMES {
    create = "cublasCreate_v2" (*mut Handle);
    destroy = "cublasDestroy_v2" (Handle);
    set_stream = "cublasSetStream_v2" (Handle, *mut c_void);
    set_workspace = "cublasSetWorkspace_v2" (Handle, *mut c_void, usize);
    gemm = "cublasGemmEx" (
        Handle, i32, i32, i32, i32, i32, Floats, Floats, i32, i32, Floats, i32, i32, Floats,
        *mut f32, i32, i32, i32, i32
    );
}}

/// One worker's handle of cuBLAS, with its workspace.
pub struct Cublas {
    calls: Calls,
    handle: Handle,
    gpu: Arc<Gpu>,
    workspace: Buffer<u8>,
    factors: Factors,
    /// The handle of cuBLASLt, or the reason why bias and Relu are not in the launch of a product.
    lt: Result<Box<CublasLt>, CublasError>,
}

/// Whether a product includes scale, bias and Relu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Product {
    /// The results, with scale, bias and Relu.
    Finished,
    /// The sums alone.
    Unfinished,
}

// SAFETY: a handle may move between threads; `&mut self` admits one thread at a time.
unsafe impl Send for Cublas {}

impl Cublas {
    /// Loads the library and creates a handle for `gpu`, for products with `factors`.
    ///
    /// # Errors
    /// [`CublasError::NoLibrary`], or another if cuBLAS does not start.
    pub fn open(gpu: &Arc<Gpu>, factors: Factors) -> Result<Self, CublasError> {
        let calls = Calls::load()?;
        let workspace = gpu.buffer::<u8>(workspace_bytes(gpu.sm()))?;
        gpu.bind()?;
        let mut handle = null_mut();
        // SAFETY: the call writes one handle, for the context that was bound.
        check("create", unsafe { (calls.create)(&mut handle) })?;
        let lt = CublasLt::open(gpu, factors).map(Box::new);
        Ok(Self { calls, handle, gpu: Arc::clone(gpu), workspace, factors, lt })
    }

    /// Returns the reason why bias and Relu are separate launches; `None` if they are not.
    pub fn refused_epilogues(&self) -> Option<&CublasError> {
        self.lt.as_ref().err()
    }

    /// Puts `out[m, n] = a[m, k] x by[k, n]` onto `stream`. With `start` it adds to what `out` has.
    /// Returns whether it includes scale, bias and Relu.
    ///
    /// # Errors
    /// [`CublasError::Refused`] or [`CublasError::Cuda`].
    pub fn multiply(
        &mut self,
        stream: &Stream,
        m: usize,
        a: View<f32>,
        by: &DeviceMatrix,
        out: View<f32>,
        start: Start,
    ) -> Result<Product, CublasError> {
        let is_plain = !by.is_scaled && start == Start::Zero;
        if let (Ok(lt), true) = (&mut self.lt, is_plain) {
            match lt.multiply(stream, m, a, by, out, &self.workspace) {
                Ok(()) => return Ok(Product::Finished),
                Err(e @ CublasError::Cuda(_)) => return Err(e),
                Err(e) => {
                    log::warn!("bias and Relu are launches of their own: {e}");
                    self.lt = Err(e);
                }
            }
        }
        self.multiply_alone(stream, m, a, by, out, start)?;
        Ok(Product::Unfinished)
    }

    /// Puts a product onto `stream`, without scale, bias and Relu.
    fn multiply_alone(
        &mut self,
        stream: &Stream,
        m: usize,
        a: View<f32>,
        by: &DeviceMatrix,
        out: View<f32>,
        start: Start,
    ) -> Result<(), CublasError> {
        let (k, n) = (by.k, by.n);
        assert!(a.len() >= m * k && out.len() >= m * n && by.weights.len() >= k * n);
        assert!(m < 1 << 31 && k < 1 << 31 && n < 1 << 31);
        const NOT_TRANSPOSED: i32 = 0;
        /// `CUDA_R_32F`
        const F32: i32 = 0;
        /// `CUBLAS_GEMM_DEFAULT`
        const DEFAULT: i32 = -1;
        let (one, before) = (1.0f32, if start == Start::Sums { 1.0f32 } else { 0.0f32 });
        let (m, k, n) = (m as i32, k as i32, n as i32);
        let Self { calls, handle, gpu, workspace, factors, .. } = self;
        gpu.bind()?;

        // SAFETY: handle, stream and workspace are alive, and the sizes were checked. cuBLAS is
        // column-major: there a row-major product is the product of the operands in swapped order.
        unsafe {
            check("stream", (calls.set_stream)(*handle, stream.raw().cast()))?;
            // A new stream resets cuBLAS to its own workspace, for which it would allocate memory.
            let place = workspace.address() as *mut c_void;
            check("workspace", (calls.set_workspace)(*handle, place, workspace.len()))?;
            let (w, a, out) = (by.weights.address(), a.address(), out.address());
            let (w, a, out) = (w as Floats, a as Floats, out as *mut f32);
            let status = (calls.gemm)(
                *handle,
                NOT_TRANSPOSED,
                NOT_TRANSPOSED,
                n,
                m,
                k,
                &one,
                w,
                F32,
                n,
                a,
                F32,
                k,
                &before,
                out,
                F32,
                n,
                factors.compute_type(),
                DEFAULT,
            );
            check("product", status)?;
        }
        stream.count_launch();
        Ok(())
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        // cuBLAS waits for the whole device.
        let _no_recording = self.gpu.recording();
        // SAFETY: the only owner of the handle is being dropped.
        let destroyed = self
            .gpu
            .bind()
            .map_err(CublasError::from)
            .and_then(|()| check("destroy", unsafe { (self.calls.destroy)(self.handle) }));
        if let Err(e) = destroyed {
            log::error!("failed to destroy a cuBLAS handle: {e}");
        }
    }
}
