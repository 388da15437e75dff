//! cuBLAS, fenced: single-precision products on a stream, in a workspace of our own so that they can be recorded into
//! a graph. The library is loaded if it is there; nothing is linked. Its sums are in an order of its own: within
//! rounding of ours, not to the bit.

#![allow(unsafe_code)]

use super::dense::DeviceMatrix;
use super::driver::{CudaError, Gpu, Stream};
use super::memory::{Buffer, View};
use cudarc::cublas::{result, sys};
use std::sync::Arc;

/// What NVIDIA recommends for GPUs before Hopper; larger ones only speed up the largest products.
const WORKSPACE_BYTES: usize = 4 << 20;

/// Why cuBLAS is not used.
#[derive(Debug, thiserror::Error)]
pub enum CublasError {
    /// There is no such library.
    #[error("no cuBLAS on this machine (libcublas.so cannot be loaded)")]
    NoLibrary,
    /// It refused a call.
    #[error("cuBLAS: {call}: {status}")]
    Refused {
        /// Which call.
        call: &'static str,
        /// Its status.
        status: String,
    },
    /// The driver did.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// One worker's cuBLAS.
pub struct Cublas {
    handle: sys::cublasHandle_t,
    gpu: Arc<Gpu>,
    workspace: Buffer<u8>,
}

// SAFETY: a handle may move between threads; `&mut self` keeps it to one at a time.
unsafe impl Send for Cublas {}

fn refused(call: &'static str) -> impl Fn(result::CublasError) -> CublasError {
    move |e| CublasError::Refused { call, status: e.to_string() }
}

impl Cublas {
    /// Loads it for `gpu`.
    ///
    /// # Errors
    /// It is not there, or does not start.
    pub fn open(gpu: &Arc<Gpu>) -> Result<Self, CublasError> {
        // SAFETY: loads a library by its usual name, which is what it is for.
        if !unsafe { sys::is_culib_present() } {
            return Err(CublasError::NoLibrary);
        }
        let workspace = gpu.buffer::<u8>(WORKSPACE_BYTES)?;
        gpu.context().bind_to_thread().map_err(|error| CudaError::Driver { call: "bind", error })?;
        let handle = result::create_handle().map_err(refused("create"))?;
        Ok(Self { handle, gpu: Arc::clone(gpu), workspace })
    }

    /// `out[m, n] = a[m, k] x matrix`, not finished.
    ///
    /// # Errors
    /// cuBLAS refuses.
    pub fn multiply(
        &mut self,
        stream: &Stream,
        m: usize,
        a: View<f32>,
        by: &DeviceMatrix,
        out: View<f32>,
    ) -> Result<(), CublasError> {
        let (k, n) = (by.k, by.n);
        assert!(a.len() >= m * k && out.len() >= m * n && by.weights.len() >= k * n);
        assert!(m < 1 << 31 && k < 1 << 31 && n < 1 << 31);
        let none = sys::cublasOperation_t::CUBLAS_OP_N;
        let (one, zero) = (1.0f32, 0.0f32);
        let (m, k, n) = (m as i32, k as i32, n as i32);
        self.gpu.context().bind_to_thread().map_err(|error| CudaError::Driver { call: "bind", error })?;
        // SAFETY: handle, stream and workspace live; column-major, a row-major product is that of the turned operands in the
        // other order, whose sizes were checked.
        unsafe {
            let stream = stream.raw().cu_stream();
            result::set_stream(self.handle, stream.cast()).map_err(refused("stream"))?;
            // With each stream cuBLAS goes back to a workspace of its own, for which it takes memory.
            let workspace = self.workspace.address() as *mut std::ffi::c_void;
            sys::cublasSetWorkspace_v2(self.handle, workspace, self.workspace.len())
                .result()
                .map_err(refused("workspace"))?;
            let (w, a, out) = (by.weights.address(), a.address(), out.address());
            let (w, a, out) = (w as *const f32, a as *const f32, out as *mut f32);
            result::sgemm(self.handle, none, none, n, m, k, &one, w, n, a, k, &zero, out, n)
                .map_err(refused("sgemm"))?;
        }
        stream.count_launch();
        Ok(())
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        // SAFETY: nobody has the handle any more.
        if let Err(e) = unsafe { result::destroy_handle(self.handle) } {
            log::error!("cuBLAS: destroy: {e}");
        }
    }
}
