//! The functions of the CUDA driver that this crate calls. Their results are plain numbers, because
//! a newer driver may return codes that are in no list. If the driver lacks a function that a
//! request needs, opening the driver returns a typed error. Checks no argument.

#![allow(unsafe_code)]

use cudarc::driver::sys::{
    CUcontext, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphExec, CUgraphNode, CUmodule,
    CUstream,
};
use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;

/// Why the driver's functions cannot be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MissingDriver {
    /// The machine has no driver library.
    Library,
    /// The library lacks this function.
    Function(&'static str),
}

/// Declares the table of functions: a name here, the driver's symbol, and the arguments' types. An
/// `optional` function has several symbols, of which the first that the driver has is called.
macro_rules! calls {
    (needed {$($name:ident = $symbol:literal ($($argument:ty),*);)*}
     optional {$($option:ident = $($either:literal)|+ ($($of_option:ty),*);)*}) => {
        /// The driver's functions.
        pub(crate) struct Calls {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> u32,)*
            $(pub $option: Option<unsafe extern "C" fn($($of_option),*) -> u32>,)*
        }

        impl Calls {
            /// Returns the table of the functions that `find` finds by their symbols.
            ///
            /// # Safety
            /// `find` returns functions of the CUDA driver, which stay valid.
            unsafe fn load(
                find: impl Fn(&'static str) -> Option<NonNull<c_void>>,
            ) -> Result<Self, MissingDriver> {
                let needed = |symbol| find(symbol).ok_or(MissingDriver::Function(symbol));
                // SAFETY: the functions have these types in cuda.h of CUDA 11.4 to 13. They return
                // an enum, whose values are numbers of 32 bits. The optional ones have the same
                // type under each of their symbols.
                unsafe {
                    Ok(Self {
                        $($name: std::mem::transmute::<
                            NonNull<c_void>,
                            unsafe extern "C" fn($($argument),*) -> u32,
                        >(needed($symbol)?),)*
                        $($option: [$($either),+].into_iter().find_map(&find).map(|function| {
                            std::mem::transmute::<
                                NonNull<c_void>,
                                unsafe extern "C" fn($($of_option),*) -> u32,
                            >(function)
                        }),)*
                    })
                }
            }
        }
    };
}

calls! { needed {
    init = "cuInit" (u32);
    driver_version = "cuDriverGetVersion" (*mut i32);
    error_name = "cuGetErrorName" (u32, *mut *const c_char);
    device = "cuDeviceGet" (*mut i32, i32);
    device_name = "cuDeviceGetName" (*mut c_char, i32, i32);
    device_attribute = "cuDeviceGetAttribute" (*mut i32, u32, i32);
    device_memory = "cuDeviceTotalMem_v2" (*mut usize, i32);
    free_memory = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    context_flags = "cuDevicePrimaryCtxSetFlags_v2" (i32, u32);
    retain_context = "cuDevicePrimaryCtxRetain" (*mut CUcontext, i32);
    release_context = "cuDevicePrimaryCtxRelease_v2" (i32);
    bind_context = "cuCtxSetCurrent" (CUcontext);
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
} optional {
    // Only measurements call it. Drivers from 12.8 on have `_v2`, and may drop the old symbol.
    elapsed = "cuEventElapsedTime_v2" | "cuEventElapsedTime" (*mut f32, CUevent, CUevent);
    // Only measurements need it.
    edges = "cuGraphGetEdges" (CUgraph, *mut CUgraphNode, *mut CUgraphNode, *mut usize);
}}

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
        // The library is never unloaded.
        let calls = unsafe {
            if !cudarc::driver::sys::is_culib_present() {
                return Err(MissingDriver::Library);
            }
            let driver = cudarc::driver::sys::culib();
            Self::load(|symbol| {
                let found = driver.get::<*mut c_void>(symbol.as_bytes()).ok()?;
                NonNull::new(*found)
            })?
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Loads the table from a driver that lacks the symbols `lacking`. Its functions cannot be
    /// called.
    fn load_without(lacking: &'static [&'static str]) -> Result<Calls, MissingDriver> {
        let address = |symbol: &'static str| NonNull::new(symbol.as_ptr().cast_mut().cast());
        // SAFETY: the tests compare the addresses and call nothing.
        unsafe { Calls::load(|symbol| address(symbol).filter(|_| !lacking.contains(&symbol))) }
    }

    #[test]
    fn a_driver_without_the_time_between_events_is_loaded() {
        let both = &["cuEventElapsedTime_v2", "cuEventElapsedTime"];
        assert!(load_without(both).is_ok_and(|calls| calls.elapsed.is_none()));
        assert!(load_without(&both[..1]).is_ok_and(|calls| calls.elapsed.is_some()));
        let addresses = [&[], &both[..1], &both[1..]].map(|lacking| {
            load_without(lacking).ok().and_then(|calls| calls.elapsed).map(|f| f as usize)
        });
        assert_eq!(addresses[0], addresses[2], "`_v2` comes first");
        assert_ne!(addresses[0], addresses[1]);
    }

    #[test]
    fn a_driver_without_a_function_that_requests_need_is_refused() {
        let refused = load_without(&["cuGraphLaunch"]).err();
        assert_eq!(refused, Some(MissingDriver::Function("cuGraphLaunch")));
    }
}
