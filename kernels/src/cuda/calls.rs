//! The functions of the CUDA driver that this crate calls. Their results are plain numbers, because
//! a newer driver may return codes that are in no list. If the driver lacks a function, opening the
//! driver returns a typed error. Checks no argument.

#![allow(unsafe_code)]

use cudarc::driver::sys::{
    CUcontext, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUmodule, CUstream,
};
use std::ffi::{CStr, c_char, c_void};
use std::sync::OnceLock;

/// Why the driver's functions cannot be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MissingDriver {
    /// The machine has no driver library.
    Library,
    /// The library lacks this function.
    Function(&'static str),
}

/// Declares the table of functions: a name here, the driver's symbol, and the arguments' types.
macro_rules! calls {
    ($($name:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// The driver's functions.
        pub(crate) struct Calls {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl Calls {
            /// # Safety
            /// `library` is the CUDA driver.
            unsafe fn load(library: &libloading::Library) -> Result<Self, MissingDriver> {
                // SAFETY: the functions have these types in cuda.h of CUDA 11.4 to 13. They return
                // an enum, whose values are numbers of 32 bits. They stay valid because the library
                // is never unloaded.
                unsafe {
                    Ok(Self {
                        $($name: *library
                            .get(concat!($symbol, "\0").as_bytes())
                            .map_err(|_| MissingDriver::Function($symbol))?,)*
                    })
                }
            }
        }
    };
}

calls! {
    init = "cuInit" (u32);
    driver_version = "cuDriverGetVersion" (*mut i32);
    error_name = "cuGetErrorName" (u32, *mut *const c_char);
    device = "cuDeviceGet" (*mut i32, i32);
    device_name = "cuDeviceGetName" (*mut c_char, i32, i32);
    device_attribute = "cuDeviceGetAttribute" (*mut i32, u32, i32);
    device_memory = "cuDeviceTotalMem_v2" (*mut usize, i32);
    context_flags = "cuDevicePrimaryCtxSetFlags_v2" (i32, u32);
    retain_context = "cuDevicePrimaryCtxRetain" (*mut CUcontext, i32);
    release_context = "cuDevicePrimaryCtxRelease_v2" (i32);
    bind_context = "cuCtxSetCurrent" (CUcontext);
    wait_for_all = "cuCtxSynchronize" ();
    priorities = "cuCtxGetStreamPriorityRange" (*mut i32, *mut i32);
    new_stream = "cuStreamCreateWithPriority" (*mut CUstream, u32, i32);
    free_stream = "cuStreamDestroy_v2" (CUstream);
    wait_stream = "cuStreamSynchronize" (CUstream);
    stream_after = "cuStreamWaitEvent" (CUstream, CUevent, u32);
    is_recorded = "cuStreamIsCapturing" (CUstream, *mut u32);
    begin_recording = "cuStreamBeginCapture_v2" (CUstream, u32);
    end_recording = "cuStreamEndCapture" (CUstream, *mut CUgraph);
    new_event = "cuEventCreate" (*mut CUevent, u32);
    free_event = "cuEventDestroy_v2" (CUevent);
    record_event = "cuEventRecord" (CUevent, CUstream);
    record_event_with = "cuEventRecordWithFlags" (CUevent, CUstream, u32);
    wait_event = "cuEventSynchronize" (CUevent);
    elapsed = "cuEventElapsedTime" (*mut f32, CUevent, CUevent);
    new_graph = "cuGraphInstantiateWithFlags" (*mut CUgraphExec, CUgraph, u64);
    upload_graph = "cuGraphUpload" (CUgraphExec, CUstream);
    launch_graph = "cuGraphLaunch" (CUgraphExec, CUstream);
    free_recording = "cuGraphDestroy" (CUgraph);
    free_graph = "cuGraphExecDestroy" (CUgraphExec);
    load_module = "cuModuleLoadData" (*mut CUmodule, *const c_void);
    free_module = "cuModuleUnload" (CUmodule);
    function = "cuModuleGetFunction" (*mut CUfunction, CUmodule, *const c_char);
    launch = "cuLaunchKernel" (
        CUfunction, u32, u32, u32, u32, u32, u32, u32, CUstream, *mut *mut c_void, *mut *mut c_void
    );
    allocate = "cuMemAlloc_v2" (*mut CUdeviceptr, usize);
    free = "cuMemFree_v2" (CUdeviceptr);
    allocate_pinned = "cuMemHostAlloc" (*mut *mut c_void, usize, u32);
    free_pinned = "cuMemFreeHost" (*mut c_void);
    address_of_pinned = "cuMemHostGetDevicePointer_v2" (*mut CUdeviceptr, *mut c_void, u32);
    set_bytes = "cuMemsetD8Async" (CUdeviceptr, u8, usize, CUstream);
    copy_to_device = "cuMemcpyHtoDAsync_v2" (CUdeviceptr, *const c_void, usize, CUstream);
    copy_from_device = "cuMemcpyDtoHAsync_v2" (*mut c_void, CUdeviceptr, usize, CUstream);
    copy_on_device = "cuMemcpyDtoDAsync_v2" (CUdeviceptr, CUdeviceptr, usize, CUstream);
}

impl Calls {
    /// Returns the functions of the machine's driver, which is loaded once.
    ///
    /// # Errors
    /// [`MissingDriver`].
    pub fn get() -> Result<&'static Self, MissingDriver> {
        static LOADED: OnceLock<Calls> = OnceLock::new();
        if let Some(calls) = LOADED.get() {
            return Ok(calls);
        }
        // SAFETY: loads the driver library by its usual names; its initializers are meant to run.
        let calls = unsafe {
            if !cudarc::driver::sys::is_culib_present() {
                return Err(MissingDriver::Library);
            }
            Self::load(cudarc::driver::sys::culib())?
        };
        Ok(LOADED.get_or_init(|| calls))
    }

    /// Returns the driver's name of an error; `None` if the driver does not know it.
    pub fn name_of(&self, error: u32) -> Option<&'static str> {
        let mut name = std::ptr::null();
        // SAFETY: the driver writes the address of a text that it never frees, or null.
        unsafe {
            let known = (self.error_name)(error, &mut name) == 0 && !name.is_null();
            known.then(|| CStr::from_ptr(name).to_str().ok()).flatten()
        }
    }
}
