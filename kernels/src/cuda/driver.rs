//! The CUDA driver, fenced: one GPU with its streams, events and kernels; `memory.rs` has its
//! memory. The first call checks that the driver library is present. Only the driver's own JIT ever
//! compiles a kernel, and only where the profile allows that. No work is ever put onto the legacy
//! stream, which is not ordered with other streams. Knows nothing of embeddings.
//!
//! Work on a stream is asynchronous. Memory that a launch uses must stay alive, and the host must
//! not touch it, until the host has waited for the stream or for an event after the launch. Freeing
//! memory waits for the whole device.

#![allow(unsafe_code)]

use crate::cuda::error::{Call, report};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use std::ffi::CString;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use crate::cuda::error::CudaError;
pub(crate) use crate::cuda::error::Result;

/// How the target lets a GPU be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    /// As on the board: kernels must be present as machine code; the driver may not compile PTX.
    pub tegra: bool,
}

/// The compiled images of one kernel source.
#[derive(Clone, Copy)]
pub struct Images {
    /// Name of the source, without `.cu`.
    pub name: &'static str,
    /// Machine code by compute capability.
    pub cubins: &'static [(u32, &'static [u8])],
    /// PTX, which the driver compiles for every later GPU.
    pub ptx: &'static str,
}

/// Counts of driver calls that were made through one [`Gpu`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Kernels and graphs launched.
    pub launches: u64,
    /// Times that the host waited for the device.
    pub waits: u64,
}

/// Held while work is recorded: a wait for the whole device would invalidate the recording. The
/// lock is global, as the context is, however often the GPU is opened.
static RECORDING: Mutex<()> = Mutex::new(());

/// A GPU that the kernels can run on. Holding one proves that the driver is present and new enough.
pub struct Gpu {
    context: Arc<CudaContext>,
    profile: Profile,
    name: String,
    sm: u32,
    processors: u32,
    integrated: bool,
    /// The highest priority of a stream.
    priority: i32,
    /// For work that is waited for immediately and belongs to no caller's stream.
    own: Arc<CudaStream>,
    launches: AtomicU64,
    waits: AtomicU64,
}

impl Gpu {
    /// Opens the first GPU.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::NoGpu`], [`CudaError::TooOld`], or
    /// [`CudaError::Driver`] if the driver fails.
    pub fn open(profile: Profile) -> Result<Arc<Self>> {
        // SAFETY: loads the driver library by its usual name; its initializers are meant to run.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }

        let mut driver = 0;
        // SAFETY: the driver writes one integer.
        unsafe { sys::cuDriverGetVersion(&mut driver) }.result().call("version")?;
        let too_old = |what, found, needed| Err(CudaError::TooOld { what, found, needed });
        if driver < 11_040 {
            return too_old(
                "the CUDA driver",
                format!("{}.{}", driver / 1000, driver % 1000 / 10),
                "11.4",
            );
        }

        wait_by_spinning();
        let context = CudaContext::new(0).map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_NO_DEVICE => CudaError::NoGpu,
            _ => CudaError::Driver { call: "open", error },
        })?;
        // SAFETY: this crate orders its streams by its own events and never makes a `CudaSlice`.
        unsafe { context.disable_event_tracking() };

        let (major, minor) = context.compute_capability().call("compute capability")?;
        let sm = (10 * major + minor) as u32;
        if sm < 80 {
            return too_old("the GPU's compute capability", format!("{major}.{minor}"), "8.0");
        }

        let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let processors = context.attribute(count).call("multiprocessors")? as u32;
        let integrated = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED;
        let integrated = context.attribute(integrated).call("integrated")? != 0;
        let name = context.name().call("name")?;
        let (_, priority) = result::stream::get_priority_range().call("priorities")?;
        log::info!("GPU: {name}, compute capability {major}.{minor}, driver {driver}");
        Ok(Arc::new(Self {
            own: context.new_stream().call("new stream")?,
            context,
            profile,
            name,
            sm,
            processors,
            integrated,
            priority,
            launches: AtomicU64::new(0),
            waits: AtomicU64::new(0),
        }))
    }

    /// Returns the GPU's name, as the driver has it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the compute capability, such as 87 for 8.7.
    pub fn sm(&self) -> u32 {
        self.sm
    }

    /// Returns the number of multiprocessors.
    pub fn processors(&self) -> u32 {
        self.processors
    }

    /// Returns whether the GPU shares the host's memory, as on the board.
    pub fn integrated(&self) -> bool {
        self.integrated
    }

    /// Returns the bytes of the GPU's memory.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn memory(&self) -> Result<usize> {
        self.context.total_mem().call("total memory")
    }

    /// Returns the counts of driver calls so far.
    pub fn calls(&self) -> Calls {
        Calls {
            launches: self.launches.load(Ordering::Relaxed),
            waits: self.waits.load(Ordering::Relaxed),
        }
    }

    /// Returns the context, for libraries that run beside these kernels.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    fn count_wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn own_stream(&self) -> &Arc<CudaStream> {
        &self.own
    }

    /// Keeps all threads from waiting for the whole device until the guard is dropped.
    pub(super) fn recording(&self) -> MutexGuard<'static, ()> {
        RECORDING.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for all streams.
    pub(super) fn wait_for_all(&self) -> std::result::Result<(), DriverError> {
        let _no_recording = self.recording();
        self.context.synchronize()
    }

    /// Creates a stream of the highest priority: its work runs before that of other programs'
    /// streams on the GPU.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn stream(self: &Arc<Self>) -> Result<Stream> {
        let stream = self.context.new_stream_with_priority(self.priority).call("new stream")?;
        Ok(Stream { stream, gpu: Arc::clone(self) })
    }

    /// Creates an event. An event that was never recorded counts as reached.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn event(self: &Arc<Self>) -> Result<Event> {
        self.context.bind_to_thread().call("bind")?;
        let event =
            result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).call("new event")?;
        Ok(Event { event, gpu: Arc::clone(self) })
    }

    /// Loads the image for this GPU: its machine code, or the PTX where there is none and the
    /// profile allows the driver to compile it.
    ///
    /// # Errors
    /// [`CudaError::NoKernels`] if no image fits.
    pub fn module(self: &Arc<Self>, images: &Images) -> Result<Arc<Module>> {
        self.context.bind_to_thread().call("bind")?;
        let none = |problem| CudaError::NoKernels { gpu: self.name.clone(), problem };
        let mut tried =
            format!("`{}` has no machine code for compute capability {}", images.name, self.sm);

        if let Some((_, cubin)) = images.cubins.iter().find(|(sm, _)| *sm == self.sm) {
            // The driver reads 8-byte words, so the copy is aligned to them.
            let mut image = vec![0u64; cubin.len().div_ceil(8)];
            for (word, bytes) in image.iter_mut().zip(cubin.chunks(8)) {
                let mut eight = [0; 8];
                eight[..bytes.len()].copy_from_slice(bytes);
                *word = u64::from_ne_bytes(eight);
            }
            // SAFETY: `image` holds a whole image, which the driver copies.
            match unsafe { result::module::load_data(image.as_ptr().cast()) } {
                Ok(module) => return Ok(Arc::new(Module { module, gpu: Arc::clone(self) })),
                Err(e) => {
                    tried =
                        format!("the driver refused the machine code of `{}`: {e}", images.name);
                }
            }
        }

        if self.profile.tegra {
            return Err(none(format!(
                "{tried}; the Tegra profile does not let the driver compile PTX"
            )));
        }

        let ptx = CString::new(images.ptx)
            .map_err(|_| none(format!("{tried}; its PTX contains a zero byte")))?;
        // SAFETY: `ptx` ends in a zero byte; the driver compiles and copies it.
        let module = unsafe { result::module::load_data(ptx.as_ptr().cast()) }
            .map_err(|e| none(format!("{tried}; the driver refused its PTX: {e}")))?;

        log::warn!("{tried}; the driver compiled its PTX instead");
        Ok(Arc::new(Module { module, gpu: Arc::clone(self) }))
    }
}

/// Makes a thread that waits for the GPU spin. A request waits once, for far less than a
/// millisecond. A driver that chooses for itself may put the thread to sleep, as on a Tegra, and
/// its wake-up takes longer than the request. A driver that refuses keeps its choice.
fn wait_by_spinning() {
    let flags = sys::CUctx_flags::CU_CTX_SCHED_SPIN as u32;
    let set = result::init().and_then(|()| result::device::get(0)).and_then(|device| {
        // SAFETY: the device exists; the call changes no memory of this process.
        unsafe { sys::cuDevicePrimaryCtxSetFlags_v2(device, flags) }.result()
    });
    if let Err(e) = set {
        log::debug!("the CUDA driver chooses how to wait: {e}");
    }
}

/// The kernels of one source, loaded onto a GPU.
pub struct Module {
    module: sys::CUmodule,
    gpu: Arc<Gpu>,
}

// SAFETY: a driver handle, which any thread may use.
unsafe impl Send for Module {}
// SAFETY: as for `Send`.
unsafe impl Sync for Module {}

impl Module {
    /// Returns the kernel with this name.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if the module has no such kernel.
    pub fn kernel(self: &Arc<Self>, name: &'static str) -> Result<Kernel> {
        let c_name = CString::new(name).unwrap_or_default();
        // SAFETY: the module is loaded for as long as `self` lives, and the kernel keeps it.
        let function = unsafe { result::module::get_function(self.module, c_name) }.call(name)?;
        Ok(Kernel { function, name, _module: Arc::clone(self) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let unload = || {
            self.gpu.context.bind_to_thread()?;
            // SAFETY: every kernel holds its module, so no kernel of the module is left.
            unsafe { result::module::unload(self.module) }
        };
        report("unload kernels", unload());
    }
}

/// One kernel; it keeps its module loaded.
pub struct Kernel {
    function: sys::CUfunction,
    name: &'static str,
    _module: Arc<Module>,
}

// SAFETY: a driver handle, which any thread may use.
unsafe impl Send for Kernel {}
// SAFETY: as for `Send`.
unsafe impl Sync for Kernel {}

/// A queue of work for the device, run in order.
pub struct Stream {
    stream: Arc<CudaStream>,
    gpu: Arc<Gpu>,
}

impl Stream {
    /// Returns the GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Returns the driver's stream, for libraries and graphs.
    pub fn raw(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    pub(super) fn bind(&self) -> Result<()> {
        self.gpu.context.bind_to_thread().call("bind")
    }

    /// Launches `kernel` on `blocks` blocks of `threads` threads, and does not wait. No block
    /// launches nothing. Every kernel takes one argument.
    ///
    /// # Safety
    /// `A` has the layout of the kernel's parameter. The memory that `argument` points to is as
    /// large as the kernel expects, and stays alive until the host has waited for the launch.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub unsafe fn launch<A: Copy>(
        &self,
        kernel: &Kernel,
        blocks: u32,
        threads: u32,
        mut argument: A,
    ) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        self.bind()?;
        let (function, stream) = (kernel.function, self.stream.cu_stream());
        let (grid, block) = ((blocks, 1, 1), (threads, 1, 1));
        let parameters = &mut [std::ptr::from_mut(&mut argument).cast()];
        // SAFETY: the caller vouches for the argument; the driver copies it before it returns.
        unsafe { result::launch_kernel(function, grid, block, 0, stream, parameters) }
            .call(kernel.name)?;
        self.count_launch();
        Ok(())
    }

    /// Counts a launch that did not go through [`Stream::launch`]: of a graph, or by a library.
    pub fn count_launch(&self) {
        self.gpu.launches.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits until all work that was put onto the stream is done.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if some of the work failed.
    pub fn wait(&self) -> Result<()> {
        self.gpu.count_wait();
        self.stream.synchronize().call("wait for the stream")
    }

    /// Records `event` after all work that was put onto the stream.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn record(&self, event: &Event) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream and the event are alive.
        unsafe { result::event::record(event.event, self.stream.cu_stream()) }
            .call("record an event")
    }

    /// Records `event` as [`Stream::record`] does. While the stream's work is recorded into a
    /// graph, the recording becomes part of it: each launch of the graph records the event anew.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn record_each_launch(&self, event: &Event) -> Result<()> {
        self.bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive; the driver writes one status.
        unsafe { sys::cuStreamIsCapturing(self.stream.cu_stream(), &mut status) }
            .result()
            .call("ask whether work is recorded")?;

        // The driver refuses the flag outside of a recording.
        let recorded = status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
        let flags = if recorded {
            sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL
        } else {
            sys::CUevent_record_flags::CU_EVENT_RECORD_DEFAULT
        };
        // SAFETY: the stream and the event are alive; a graph's owner keeps the event.
        unsafe { sys::cuEventRecordWithFlags(event.event, self.stream.cu_stream(), flags as u32) }
            .result()
            .call("record an event")
    }

    /// Makes all later work on the stream start after `event`; the host does not wait.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn after(&self, event: &Event) -> Result<()> {
        self.bind()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the stream and the event are alive.
        unsafe { result::stream::wait_event(self.stream.cu_stream(), event.event, flags) }
            .call("wait for an event")
    }
}

/// A point in the work of a stream.
pub struct Event {
    event: sys::CUevent,
    gpu: Arc<Gpu>,
}

// SAFETY: a driver handle, which any thread may use.
unsafe impl Send for Event {}
// SAFETY: as for `Send`.
unsafe impl Sync for Event {}

impl Event {
    /// Waits for the work before the last recording of the event.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if some of the work failed.
    pub fn wait(&self) -> Result<()> {
        self.gpu.count_wait();
        self.gpu.context.bind_to_thread().call("bind")?;
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.event) }.call("wait for an event")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let destroy = || {
            self.gpu.context.bind_to_thread()?;
            // SAFETY: the only owner is being dropped; the driver keeps the event until it is
            // reached.
            unsafe { result::event::destroy(self.event) }
        };
        report("destroy an event", destroy());
    }
}
