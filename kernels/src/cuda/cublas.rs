//! cuBLAS, fenced: single-precision products on a stream, in a workspace of our own so that they
//! can be recorded into a graph. The library is loaded if it is there, of whatever release; nothing
//! is linked. Its sums are in an order of its own: within rounding of ours, not to the bit.

#![allow(unsafe_code)]

use super::driver::{CudaError, Gpu, Stream};
use super::memory::{Buffer, View};
use crate::gpu::dense_kernels::DeviceMatrix;
use libloading::Library;
use std::error::Error;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

/// What NVIDIA recommends for GPUs before Hopper; larger ones only speed up the largest products.
const WORKSPACE_BYTES: usize = 4 << 20;

/// The library as developers have it, and as CUDA 11 to 13 install it.
const NAMES: [&str; 4] = ["libcublas.so", "libcublas.so.13", "libcublas.so.12", "libcublas.so.11"];

/// Why cuBLAS is not used.
#[derive(Debug, thiserror::Error)]
pub enum CublasError {
    /// There is no such library.
    #[error("no cuBLAS on this machine: {tried}")]
    NoLibrary {
        /// What each of its names led to.
        tried: String,
    },
    /// It refused a call.
    #[error("cuBLAS: {call}: status {status}")]
    Refused {
        /// Which call.
        call: &'static str,
        /// Its `cublasStatus_t`.
        status: i32,
    },
    /// The driver did.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// What the system says of a library that cannot be loaded; the error by itself says only that.
pub(crate) fn why(e: &libloading::Error) -> String {
    e.source().unwrap_or(e).to_string()
}

type Handle = *mut c_void;
type Floats = *const f32;
type Sgemm = unsafe extern "C" fn(
    Handle,
    i32,
    i32,
    i32,
    i32,
    i32,
    Floats,
    Floats,
    i32,
    Floats,
    i32,
    Floats,
    *mut f32,
    i32,
) -> i32;

/// What is called of it; the same in all those releases.
#[derive(Clone, Copy)]
struct Calls {
    create: unsafe extern "C" fn(*mut Handle) -> i32,
    destroy: unsafe extern "C" fn(Handle) -> i32,
    set_stream: unsafe extern "C" fn(Handle, *mut c_void) -> i32,
    set_workspace: unsafe extern "C" fn(Handle, *mut c_void, usize) -> i32,
    sgemm: Sgemm,
}

impl Calls {
    /// Loads the library for as long as the process lives.
    fn load() -> Result<Self, CublasError> {
        static LOADED: OnceLock<Calls> = OnceLock::new();
        if let Some(calls) = LOADED.get() {
            return Ok(*calls);
        }
        let mut tried = Vec::new();
        for name in NAMES {
            match Self::load_as(name) {
                Ok(calls) => return Ok(*LOADED.get_or_init(|| calls)),
                Err(e) => tried.push(why(&e)),
            }
        }
        Err(CublasError::NoLibrary { tried: tried.join("; ") })
    }

    fn load_as(name: &str) -> Result<Self, libloading::Error> {
        // SAFETY: loads a library by its usual name, which is what it is for; its functions have
        // these types in cublas_v2.h, and are there for as long as it is loaded, which is for ever.
        unsafe {
            let library = Library::new(name)?;
            let calls = Self {
                create: *library.get(b"cublasCreate_v2\0")?,
                destroy: *library.get(b"cublasDestroy_v2\0")?,
                set_stream: *library.get(b"cublasSetStream_v2\0")?,
                set_workspace: *library.get(b"cublasSetWorkspace_v2\0")?,
                sgemm: *library.get(b"cublasSgemm_v2\0")?,
            };
            std::mem::forget(library);
            Ok(calls)
        }
    }
}

/// One worker's cuBLAS.
pub struct Cublas {
    calls: Calls,
    handle: Handle,
    gpu: Arc<Gpu>,
    workspace: Buffer<u8>,
}

// SAFETY: a handle may move between threads; `&mut self` keeps it to one at a time.
unsafe impl Send for Cublas {}

fn check(call: &'static str, status: i32) -> Result<(), CublasError> {
    if status == 0 { Ok(()) } else { Err(CublasError::Refused { call, status }) }
}

fn bind(gpu: &Gpu) -> Result<(), CublasError> {
    Ok(gpu.context().bind_to_thread().map_err(|error| CudaError::Driver { call: "bind", error })?)
}

impl Cublas {
    /// Loads it for `gpu`.
    ///
    /// # Errors
    /// It is not there, or does not start.
    pub fn open(gpu: &Arc<Gpu>) -> Result<Self, CublasError> {
        let calls = Calls::load()?;
        let workspace = gpu.buffer::<u8>(WORKSPACE_BYTES)?;
        bind(gpu)?;
        let mut handle = null_mut();
        // SAFETY: it writes one handle, for the context that was bound.
        check("create", unsafe { (calls.create)(&mut handle) })?;
        Ok(Self { calls, handle, gpu: Arc::clone(gpu), workspace })
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
        const AS_IT_IS: i32 = 0;
        let (one, zero) = (1.0f32, 0.0f32);
        let (m, k, n) = (m as i32, k as i32, n as i32);
        let Self { calls, handle, gpu, workspace } = self;
        bind(gpu)?;
        // SAFETY: handle, stream and workspace live; column-major, a row-major product is that of
        // the turned operands in the other order, whose sizes were checked.
        unsafe {
            check("stream", (calls.set_stream)(*handle, stream.raw().cu_stream().cast()))?;
            // With each stream cuBLAS goes back to a workspace of its own, for which it takes
            // memory.
            let place = workspace.address() as *mut c_void;
            check("workspace", (calls.set_workspace)(*handle, place, workspace.len()))?;
            let (w, a, out) = (by.weights.address(), a.address(), out.address());
            let (w, a, out) = (w as Floats, a as Floats, out as *mut f32);
            let status = (calls.sgemm)(
                *handle, AS_IT_IS, AS_IT_IS, n, m, k, &one, w, n, a, k, &zero, out, n,
            );
            check("sgemm", status)?;
        }
        stream.count_launch();
        Ok(())
    }
}

impl Drop for Cublas {
    fn drop(&mut self) {
        // SAFETY: nobody has the handle any more.
        let destroyed = bind(&self.gpu)
            .and_then(|()| check("destroy", unsafe { (self.calls.destroy)(self.handle) }));
        if let Err(e) = destroyed {
            log::error!("{e}");
        }
    }
}
