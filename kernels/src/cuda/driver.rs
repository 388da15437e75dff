//! A safe wrapper of the CUDA driver: one GPU with its streams, events and kernels; `memory.rs` has
//! its memory. The first call checks that the driver library is present. Only the driver's own JIT
//! ever compiles a kernel, and only if the profile allows that. No work is ever put onto the legacy
//! stream, which is not ordered with other streams. Knows no embeddings.
//!
//! Work on a stream is asynchronous. Memory that a launch uses must stay alive, and the host must
//! not touch it. Both hold until the host has waited for the stream or for an event after the
//! launch. Dropping a [`Stream`] waits for its work, and freeing memory waits for nothing. So an
//! owner of both declares its streams first.

#![allow(unsafe_code)]

use crate::cuda::calls::Calls as DriverCalls;
use crate::cuda::context::{Context, RawStream};
use crate::cuda::error::check;
use crate::cuda::footprint::host_bytes;
use cudarc::driver::sys;
use std::borrow::Cow;
use std::ffi::{CString, c_void};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use crate::cuda::error::{CudaError, DriverError};
pub(crate) use crate::cuda::error::{Result, report};

/// The first bytes of what zstd compressed.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Bytes of an image, at most.
const IMAGE_BYTES_MAX: usize = 4 << 20;

/// Compute capabilities of Tegras: Orin, and Thor before and after CUDA 13.
const TEGRAS: [u32; 3] = [87, 101, 110];

/// The target's restriction on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    /// Whether the GPU is used as on the board: kernels must be present as machine code, and the
    /// driver may not compile PTX.
    pub tegra: bool,
}

/// The compiled images of one kernel source. Each is as it is, or compressed by zstd.
#[derive(Clone, Copy)]
pub struct Images {
    /// Name of the source, without `.cu`.
    pub name: &'static str,
    /// Machine code by compute capability.
    pub cubins: &'static [(u32, &'static [u8])],
    /// PTX, which the driver can compile for any later GPU.
    pub ptx: &'static [u8],
}

/// Returns the committed images of the source `$name`, for a `static`: each use of a `const` may
/// add the images to the program once more.
macro_rules! images {
    ($name:literal) => {
        $crate::cuda::driver::Images {
            name: $name,
            cubins: &[
                (80, $crate::cuda::driver::image!($name, ".sm_80.cubin.zst")),
                (86, $crate::cuda::driver::image!($name, ".sm_86.cubin.zst")),
                (87, $crate::cuda::driver::image!($name, ".sm_87.cubin.zst")),
                (89, $crate::cuda::driver::image!($name, ".sm_89.cubin.zst")),
                (90, $crate::cuda::driver::image!($name, ".sm_90.cubin.zst")),
                (100, $crate::cuda::driver::image!($name, ".sm_100.cubin.zst")),
                // Thor is 10.1 in CUDA 12, and 11.0 from CUDA 13 on.
                (101, $crate::cuda::driver::image!($name, ".sm_101.cubin.zst")),
                (110, $crate::cuda::driver::image!($name, ".sm_110.cubin.zst")),
                (120, $crate::cuda::driver::image!($name, ".sm_120.cubin.zst")),
            ],
            ptx: $crate::cuda::driver::image!($name, ".ptx.zst"),
        }
    };
}

macro_rules! image {
    ($name:literal, $kind:literal) => {
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/cuda/built/", $name, $kind))
    };
}

pub(crate) use {image, images};

/// Counts of driver calls that were made through one [`Gpu`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Kernels and graphs launched.
    pub launches: u64,
    /// Times that the host waited for the device.
    pub waits: u64,
}

/// The number of recordings that have begun. Locked during each of them, and while cuBLAS gives
/// back a handle: for that it waits for the whole device, which would invalidate a recording. The
/// lock is global like the context, even if the GPU is opened several times. Threads of NVIDIA's
/// libraries do not know it.
static RECORDINGS: Mutex<u64> = Mutex::new(0);

/// A GPU that the kernels can run on. Holding one proves that the driver is present and new enough.
pub struct Gpu {
    /// A stream for work of no caller, for which the host waits immediately. Dropped before the
    /// context.
    own: RawStream,
    context: Context,
    profile: Profile,
    /// A folder whose images are loaded instead of the built-in ones.
    images: Option<PathBuf>,
    name: String,
    sm: u32,
    processors: u32,
    integrated: bool,
    /// Bytes that the driver and its context took of the host's memory.
    pub(crate) opened_bytes: u64,
    /// Bytes of the GPU's own memory in use when this value was made.
    used_bytes: u64,
    /// The highest priority of a stream.
    priority: i32,
    launches: AtomicU64,
    waits: AtomicU64,
}

impl Gpu {
    /// Opens the first GPU.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::NoGpu`], [`CudaError::TooOld`],
    /// [`CudaError::Lacks`], or [`CudaError::Driver`] if the driver fails.
    pub fn open(profile: Profile) -> Result<Arc<Self>> {
        Self::open_with(profile, None)
    }

    /// Opens the first GPU with kernels of `folder` instead of the built-in ones: for the
    /// development of kernels. The folder has NAME.sm_87.cubin or NAME.ptx, as
    /// `kernels/cuda/built` has.
    ///
    /// # Errors
    /// As [`Gpu::open`], and [`CudaError::NoKernels`] on a Tegra: a car runs built-in kernels only.
    pub fn with_kernels(profile: Profile, folder: &Path) -> Result<Arc<Self>> {
        if profile.tegra {
            let problem = format!("a Tegra runs built-in kernels only, not {}", folder.display());
            return Err(CudaError::NoKernels { gpu: "a Tegra".to_owned(), problem });
        }
        Self::open_with(profile, Some(folder.to_owned()))
    }

    fn open_with(profile: Profile, images: Option<PathBuf>) -> Result<Arc<Self>> {
        let bytes_before = host_bytes();
        let calls = DriverCalls::get()?;
        let mut driver = 0;
        // SAFETY: the driver writes one integer.
        check("version", unsafe { (calls.driver_version)(&mut driver) })?;
        let too_old = |what, found, needed| Err(CudaError::TooOld { what, found, needed });
        if driver < 11_040 {
            return too_old(
                "the CUDA driver",
                format!("{}.{}", driver / 1000, driver % 1000 / 10),
                "11.4",
            );
        }

        let context = Context::first(calls)?;
        use sys::CUdevice_attribute as Attribute;
        let major = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let sm = (10 * major + minor) as u32;
        if sm < 80 {
            return too_old("the GPU's compute capability", format!("{major}.{minor}"), "8.0");
        }

        let count = Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let processors = context.attribute(count)? as u32;
        let integrated = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_INTEGRATED)? != 0;
        let (name, priority) = (context.name()?, context.highest_priority()?);
        log::info!("GPU: {name}, compute capability {major}.{minor}, driver {driver}");
        let own = context.stream(priority)?;
        let used =
            if integrated { 0 } else { context.memory()?.saturating_sub(context.free_memory()?) };
        Ok(Arc::new(Self {
            opened_bytes: host_bytes().saturating_sub(bytes_before),
            used_bytes: used as u64,
            own,
            context,
            profile,
            images,
            name,
            sm,
            processors,
            integrated,
            priority,
            launches: AtomicU64::new(0),
            waits: AtomicU64::new(0),
        }))
    }

    /// Returns the GPU's name from the driver.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns what code that was built for one GPU depends on. The modules of a board share a name
    /// and differ in their multiprocessors.
    pub fn kind(&self) -> String {
        let Self { name, sm, processors, .. } = self;
        format!("{name}, compute capability {sm}, {processors} multiprocessors")
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
        self.context.memory()
    }

    /// Returns the bytes of the GPU's own memory in use when it was opened: by the context, and by
    /// other programs. A driver tells the free memory only inside a context. 0 if the GPU shares
    /// the host's memory.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Returns the bytes of the GPU's memory that no program has.
    pub(crate) fn free_bytes(&self) -> Result<u64> {
        self.bind()?;
        Ok(self.context.free_memory()? as u64)
    }

    /// Returns the result of `load` and the bytes that it took. Others' use of a GPU with memory of
    /// its own changes the count.
    pub(crate) fn footprint_of<T>(&self, load: impl FnOnce() -> T) -> (T, u64) {
        let free = || self.free_bytes().unwrap_or(0);
        let (host, device) = (host_bytes(), free());
        let loaded = load();
        let on_host = host_bytes().saturating_sub(host);
        // Free memory that the GPU shares with the host changes with every file that is read.
        let on_device = if self.integrated { 0 } else { device.saturating_sub(free()) };
        (loaded, on_host + on_device)
    }

    /// Returns the bytes of the GPU's second-level cache.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn l2_bytes(&self) -> Result<usize> {
        let bytes = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE;
        Ok(self.context.attribute(bytes)?.max(0) as usize)
    }

    /// Returns the counts of driver calls so far.
    pub fn calls(&self) -> Calls {
        Calls {
            launches: self.launches.load(Ordering::Relaxed),
            waits: self.waits.load(Ordering::Relaxed),
        }
    }

    /// Returns an attribute of the GPU.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32> {
        self.context.attribute(attribute)
    }

    /// Binds the GPU's context to the calling thread.
    pub(super) fn bind(&self) -> Result<()> {
        self.context.bind()
    }

    /// Returns the driver's functions.
    pub(super) fn driver(&self) -> &'static DriverCalls {
        self.context.calls
    }

    fn count_wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn own_stream(&self) -> &RawStream {
        &self.own
    }

    /// Keeps recordings, and waits for the whole device, of other threads away until the guard is
    /// dropped. A caller that records counts that.
    pub(super) fn recording(&self) -> MutexGuard<'static, u64> {
        RECORDINGS.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how many recordings have begun in this process, after the last of them has ended.
    pub(crate) fn recordings(&self) -> u64 {
        *self.recording()
    }

    /// Creates a stream of the highest priority. Its work runs before work of streams with a lower
    /// priority on the GPU.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn stream(self: &Arc<Self>) -> Result<Stream> {
        Ok(Stream { stream: self.context.stream(self.priority)?, gpu: Arc::clone(self) })
    }

    /// Creates an event. An event that was never recorded counts as reached.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn event(self: &Arc<Self>) -> Result<Event> {
        self.new_event(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
    }

    /// Creates an event that keeps the time of its recordings, for [`Event::us_since`].
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn timed_event(self: &Arc<Self>) -> Result<Event> {
        self.new_event(sys::CUevent_flags::CU_EVENT_DEFAULT)
    }

    fn new_event(self: &Arc<Self>, flags: sys::CUevent_flags) -> Result<Event> {
        self.bind()?;
        let mut event = null_mut();
        // SAFETY: the call writes one handle.
        check("new event", unsafe { (self.driver().new_event)(&mut event, flags as u32) })?;
        Ok(Event { event, gpu: Arc::clone(self) })
    }

    /// Loads the image for this GPU: its machine code. If there is none, loads the PTX, if the
    /// profile allows the driver to compile it.
    ///
    /// # Errors
    /// [`CudaError::NoKernels`] if no image fits.
    pub fn module(self: &Arc<Self>, images: &Images) -> Result<Arc<Module>> {
        self.bind()?;
        if let Some(folder) = &self.images {
            return self.module_of(folder, images.name);
        }
        let none = |problem| CudaError::NoKernels { gpu: self.name.clone(), problem };
        let mut tried =
            format!("`{}` has no machine code for compute capability {}", images.name, self.sm);

        if let Some(cubin) = self.cubin_of(images) {
            match self.load_image(cubin) {
                Ok(module) => return Ok(module),
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

        let module = self
            .load_image(images.ptx)
            .map_err(|e| none(format!("{tried}; the driver refused its PTX: {e}")))?;
        log::warn!("{tried}; the driver compiled its PTX instead");
        Ok(module)
    }

    /// Returns the machine code for this GPU, or for an earlier minor revision of its capability.
    /// The latter neither for nor from a Tegra, whose code is its own.
    fn cubin_of<'a>(&self, images: &'a Images) -> Option<&'a [u8]> {
        let is_earlier = |sm: u32| sm / 10 == self.sm / 10 && sm < self.sm && !TEGRAS.contains(&sm);
        let fits = |sm: u32| sm == self.sm || !self.profile.tegra && is_earlier(sm);
        let fitting = images.cubins.iter().filter(|(sm, _)| fits(*sm));
        fitting.max_by_key(|(sm, _)| *sm).map(|(_, cubin)| *cubin)
    }

    /// Loads `image`, a whole file of machine code or of PTX, perhaps compressed.
    fn load_image(self: &Arc<Self>, image: &[u8]) -> Result<Arc<Module>> {
        let none =
            |e| CudaError::NoKernels { gpu: self.name.clone(), problem: format!("zstd: {e}") };
        let image = match image.starts_with(&ZSTD_MAGIC) {
            true => Cow::Owned(zstd::bulk::decompress(image, IMAGE_BYTES_MAX).map_err(none)?),
            false => Cow::Borrowed(image),
        };
        // The driver reads 8-byte words, so the copy is aligned to them.
        let mut aligned = vec![0u64; image.len().div_ceil(8) + 1];
        for (word, bytes) in aligned.iter_mut().zip(image.chunks(8)) {
            let mut eight = [0; 8];
            eight[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(eight);
        }
        // SAFETY: `aligned` ends in a zero byte, and the driver copies it. The image is whole: it
        // is part of this program, or of a folder for development, whose user vouches for it.
        let module = unsafe { self.load(aligned.as_ptr().cast()) }?;
        Ok(Arc::new(Module { module, gpu: Arc::clone(self) }))
    }

    /// Loads the image `name` of `folder`: its machine code, or else its PTX.
    fn module_of(self: &Arc<Self>, folder: &Path, name: &str) -> Result<Arc<Module>> {
        let ptx = folder.join(format!("{name}.ptx"));
        let kinds = [format!("sm_{}.cubin.zst", self.sm), format!("sm_{}.cubin", self.sm)];
        let files = kinds.into_iter().chain(["ptx.zst".to_owned()]);
        let mut paths = files.map(|file| folder.join(format!("{name}.{file}")));
        let path = paths.find(|path| path.exists()).unwrap_or(ptx);
        let none = |problem| CudaError::NoKernels { gpu: self.name.clone(), problem };
        let image = std::fs::read(&path).map_err(|e| none(format!("{}: {e}", path.display())))?;
        log::warn!("kernels for development: {}", path.display());
        self.load_image(&image).map_err(|e| none(format!("{}: {e}", path.display())))
    }

    /// # Safety
    /// `image` is machine code, or PTX that ends in a zero byte.
    unsafe fn load(&self, image: *const c_void) -> Result<sys::CUmodule> {
        let mut module = null_mut();
        // SAFETY: the caller vouches for the image, which the driver copies; the call writes one
        // handle.
        check("load kernels", unsafe { (self.driver().load_module)(&mut module, image) })?;
        Ok(module)
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
        let mut function = null_mut();
        // SAFETY: the module is loaded for as long as `self` lives, and the kernel keeps it. The
        // call writes one handle.
        let result =
            unsafe { (self.gpu.driver().function)(&mut function, self.module, c_name.as_ptr()) };
        check(name, result)?;
        Ok(Kernel { function, name, _module: Arc::clone(self) })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let unload = || {
            self.gpu.bind()?;
            // SAFETY: every kernel holds its module, so no kernel of the module is left.
            check("unload kernels", unsafe { (self.gpu.driver().free_module)(self.module) })
        };
        report(unload());
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

/// A queue of work for the device, run in order. Its drop waits for the work.
pub struct Stream {
    stream: RawStream,
    gpu: Arc<Gpu>,
}

impl Stream {
    /// Returns the GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Returns the driver's stream, for libraries and graphs.
    pub fn raw(&self) -> sys::CUstream {
        self.stream.handle()
    }

    pub(super) fn bind(&self) -> Result<()> {
        self.gpu.bind()
    }

    /// Launches `kernel` on `blocks` blocks of `threads` threads, and does not wait. With 0 blocks
    /// nothing is launched. Every kernel takes one argument.
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
        let parameters = &mut [std::ptr::from_mut(&mut argument).cast()];
        // SAFETY: the caller vouches for the argument; the driver copies it before it returns.
        let result = unsafe {
            let (to, extra) = (parameters.as_mut_ptr(), null_mut());
            let launch = self.gpu.driver().launch;
            launch(kernel.function, blocks, 1, 1, threads, 1, 1, 0, self.raw(), to, extra)
        };
        check(kernel.name, result)?;
        self.count_launch();
        Ok(())
    }

    /// Counts a launch that did not go through [`Stream::launch`]: of a graph, or by a library.
    pub fn count_launch(&self) {
        self.gpu.launches.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits until all work on the stream is done.
    ///
    /// # Errors
    /// [`CudaError::Driver`] if some of the work failed.
    pub fn wait(&self) -> Result<()> {
        self.gpu.count_wait();
        self.stream.wait()
    }

    /// Records `event` after all work on the stream.
    ///
    /// # Errors
    /// [`CudaError::Driver`], after a wait for the stream: no event tells when its work is done.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream and the event are alive.
        let result = unsafe { (self.gpu.driver().record_event)(event.event, self.raw()) };
        check("record an event", result).inspect_err(|_| report(self.wait()))
    }

    /// Records `event` as [`Stream::record`] does. While the stream's work is recorded into a
    /// graph, the recording becomes part of it: each launch of the graph records the event anew.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn record_each_launch(&self, event: &Event) -> Result<()> {
        self.bind()?;
        let (driver, mut status) = (self.gpu.driver(), 0);
        // SAFETY: the stream is alive; the driver writes one status.
        let result = unsafe { (driver.is_recorded)(self.raw(), &mut status) };
        check("ask whether work is recorded", result)?;

        // The driver refuses the flag outside of a recording.
        let active = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE as u32;
        let flags = if status == active {
            sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL
        } else {
            sys::CUevent_record_flags::CU_EVENT_RECORD_DEFAULT
        };
        // SAFETY: the stream and the event are alive; a graph's owner keeps the event.
        let result = unsafe { (driver.record_event_with)(event.event, self.raw(), flags as u32) };
        check("record an event", result)
    }

    /// Makes all later work on the stream start after `event`; the host does not wait.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn after(&self, event: &Event) -> Result<()> {
        self.bind()?;
        // SAFETY: the stream and the event are alive.
        let result = unsafe { (self.gpu.driver().stream_after)(self.raw(), event.event, 0) };
        check("wait for an event", result)
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
        self.gpu.bind()?;
        // SAFETY: the event is alive.
        check("wait for an event", unsafe { (self.gpu.driver().wait_event)(self.event) })
    }

    /// Returns the µs on the GPU between the last recordings of `start` and of this event. Both
    /// must be of [`Gpu::timed_event`], and the host must have waited for both.
    ///
    /// # Errors
    /// [`CudaError::Lacks`] if the driver cannot tell, or [`CudaError::Driver`].
    pub fn us_since(&self, start: &Event) -> Result<f64> {
        let elapsed = self.gpu.driver().elapsed;
        let elapsed = elapsed.ok_or(CudaError::Lacks { function: "cuEventElapsedTime" })?;
        self.gpu.bind()?;
        let mut ms = 0.0f32;
        // SAFETY: the events are alive; the call writes one number.
        let result = unsafe { elapsed(&mut ms, start.event, self.event) };
        check("time between events", result)?;
        Ok(f64::from(ms) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let destroy = || {
            self.gpu.bind()?;
            // SAFETY: the only owner is being dropped; the driver keeps the event until it is
            // reached.
            check("destroy an event", unsafe { (self.gpu.driver().free_event)(self.event) })
        };
        report(destroy());
    }
}
