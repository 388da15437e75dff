//! The driver's context on one GPU, and the streams in it. All threads of the process share the
//! primary context. Knows no kernels and no memory.

#![allow(unsafe_code)]

use crate::cuda::calls::Calls;
use crate::cuda::error::{CudaError, DriverError, Result, check, report};
use cudarc::driver::sys::{CUcontext, CUctx_flags, CUdevice_attribute, CUstream, CUstream_flags};
use std::ffi::{CStr, c_char};
use std::ptr::null_mut;

/// The driver's limit on the bytes of a GPU's name.
const NAME_BYTES: usize = 256;

/// The primary context of a GPU. It is released when the value is dropped.
pub(crate) struct Context {
    pub calls: &'static Calls,
    device: i32,
    context: CUcontext,
}

// SAFETY: a driver handle, which any thread may use.
unsafe impl Send for Context {}
// SAFETY: as for `Send`.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of the first GPU and binds it to the thread. Threads that wait
    /// for the GPU spin.
    ///
    /// # Errors
    /// [`CudaError::NoGpu`], or [`CudaError::Driver`].
    pub fn first(calls: &'static Calls) -> Result<Self> {
        let (mut device, mut context) = (0, null_mut());
        // SAFETY: the calls write one value each.
        unsafe {
            check("start", (calls.init)(0)).map_err(no_gpu)?;
            check("find a GPU", (calls.device)(&mut device, 0)).map_err(no_gpu)?;
            wait_by_spinning(calls, device);
            check("open", (calls.retain_context)(&mut context, device))?;
        }
        let context = Self { calls, device, context };
        context.bind()?;
        Ok(context)
    }

    /// Binds the context to the calling thread. Nearly all calls need this.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn bind(&self) -> Result<()> {
        // SAFETY: the context is retained.
        check("bind", unsafe { (self.calls.bind_context)(self.context) })
    }

    /// Returns an attribute of the GPU.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn attribute(&self, attribute: CUdevice_attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: the call writes one value.
        let result =
            unsafe { (self.calls.device_attribute)(&mut value, attribute as u32, self.device) };
        check("read an attribute", result).map(|()| value)
    }

    /// Returns the GPU's name.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn name(&self) -> Result<String> {
        let mut name = [0u8; NAME_BYTES];
        // SAFETY: the driver writes a text of at most that many bytes.
        let result = unsafe {
            let to = name.as_mut_ptr().cast::<c_char>();
            (self.calls.device_name)(to, NAME_BYTES as i32, self.device)
        };
        check("name", result)?;
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        Ok(name.to_string_lossy().into_owned())
    }

    /// Returns the bytes of the GPU's memory.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn memory(&self) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: the call writes one value.
        check("total memory", unsafe { (self.calls.device_memory)(&mut bytes, self.device) })?;
        Ok(bytes)
    }

    /// Returns the bytes of the GPU's memory that no program has. The context is bound.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn free_memory(&self) -> Result<usize> {
        let (mut free, mut all) = (0, 0);
        // SAFETY: the call writes two values.
        check("free memory", unsafe { (self.calls.free_memory)(&mut free, &mut all) })?;
        Ok(free)
    }

    /// Returns the highest priority of a stream.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn highest_priority(&self) -> Result<i32> {
        let (mut least, mut highest) = (0, 0);
        // SAFETY: the call writes two values.
        check("priorities", unsafe { (self.calls.priorities)(&mut least, &mut highest) })?;
        Ok(highest)
    }

    /// Creates a stream that is not ordered with the legacy stream.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn stream(&self, priority: i32) -> Result<RawStream> {
        self.bind()?;
        let (flags, mut stream) = (CUstream_flags::CU_STREAM_NON_BLOCKING as u32, null_mut());
        // SAFETY: the call writes one handle.
        let result = unsafe { (self.calls.new_stream)(&mut stream, flags, priority) };
        check("new stream", result)?;
        Ok(RawStream { stream, calls: self.calls, context: self.context })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context was retained once by this value.
        report(check("release", unsafe { (self.calls.release_context)(self.device) }));
    }
}

/// A stream of a context that outlives it. Its drop waits for its work.
pub(crate) struct RawStream {
    stream: CUstream,
    calls: &'static Calls,
    context: CUcontext,
}

// SAFETY: a driver handle, which any thread may use.
unsafe impl Send for RawStream {}
// SAFETY: as for `Send`.
unsafe impl Sync for RawStream {}

impl RawStream {
    /// Returns the driver's handle.
    pub fn handle(&self) -> CUstream {
        self.stream
    }

    /// Waits until all work on the stream is done.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if some of the work failed.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the context and the stream are alive.
        unsafe {
            check("bind", (self.calls.bind_context)(self.context))?;
            check("wait for the stream", (self.calls.wait_stream)(self.stream))
        }
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        // The owner then frees what the work used. If this wait fails, the GPU runs no kernel.
        report(self.wait());
        // SAFETY: the wait bound the context, and the stream's only owner is being dropped.
        report(check("destroy a stream", unsafe { (self.calls.free_stream)(self.stream) }));
    }
}

fn no_gpu(e: CudaError) -> CudaError {
    match e {
        CudaError::Driver { error: DriverError::NO_DEVICE, .. } => CudaError::NoGpu,
        e => e,
    }
}

/// Lets threads spin while they wait for the GPU. A request waits once, for far less than a
/// millisecond. By default a driver may put the thread to sleep, as on a Tegra, and the wake-up
/// takes longer than the request. If the driver refuses the setting, its default stays.
fn wait_by_spinning(calls: &Calls, device: i32) {
    let flags = CUctx_flags::CU_CTX_SCHED_SPIN as u32;
    // SAFETY: the device exists; the call changes no memory of this process.
    if let Err(e) = check("spin", unsafe { (calls.context_flags)(device, flags) }) {
        log::debug!("the CUDA driver chooses how to wait: {e}");
    }
}
