//! The CUDA driver, fenced: one GPU with its streams, events, memory and kernels. Asks whether the driver library is there
//! before the first call into it. All memory is plain device memory or pinned, mapped host memory: what a Tegra lacks
//! (managed memory, memory pools, IPC) is used on no GPU. Never compiles a kernel but by the driver's own JIT, where the
//! profile allows that. Knows nothing of embeddings.
//!
//! Work on a stream is asynchronous: what a launch names must stay alive and untouched by the host until the stream or an
//! event behind the launch was waited for. Freeing memory waits for the whole device.

#![allow(unsafe_code)]

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Why the GPU cannot be used. The first four mean that this machine has none for us: the caller takes the CPU or refuses to start.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// There is no driver library.
    #[error("no CUDA driver on this machine (libcuda.so cannot be loaded)")]
    NoDriver,
    /// There is a driver, but no GPU.
    #[error("the CUDA driver finds no GPU")]
    NoGpu,
    /// The driver or the GPU is older than the kernels.
    #[error("{what} is {found}, the kernels need {needed}")]
    TooOld {
        /// What is too old.
        what: &'static str,
        /// What it is.
        found: String,
        /// What it must be at least.
        needed: &'static str,
    },
    /// No image of the kernels runs here.
    #[error("no kernels for {gpu}: {problem}")]
    NoKernels {
        /// The GPU's name.
        gpu: String,
        /// What was tried.
        problem: String,
    },
    /// A call into the driver failed.
    #[error("CUDA: {call}: {error}")]
    Driver {
        /// What was asked for.
        call: &'static str,
        /// What the driver said.
        error: DriverError,
    },
}

type Result<T> = std::result::Result<T, CudaError>;

/// Names the call that failed.
trait Call<T> {
    fn call(self, call: &'static str) -> Result<T>;
}

impl<T> Call<T> for std::result::Result<T, DriverError> {
    fn call(self, call: &'static str) -> Result<T> {
        self.map_err(|error| CudaError::Driver { call, error })
    }
}

/// Plain values that lie in device memory as they do here; all-zero bytes are a value.
///
/// # Safety
/// `repr(C)` or a primitive, without padding, references or destructor, and valid as zeros.
pub unsafe trait DeviceValue: Copy {}
// SAFETY: primitives.
unsafe impl DeviceValue for u8 {}
// SAFETY: as above.
unsafe impl DeviceValue for u16 {}
// SAFETY: as above.
unsafe impl DeviceValue for u32 {}
// SAFETY: as above.
unsafe impl DeviceValue for u64 {}
// SAFETY: as above.
unsafe impl DeviceValue for i32 {}
// SAFETY: as above.
unsafe impl DeviceValue for f32 {}

/// How a GPU may be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    /// As on the board: kernels must be there as machine code, the driver may compile nothing.
    pub tegra: bool,
}

/// One kernel source as it was compiled.
#[derive(Clone, Copy)]
pub struct Images {
    /// The name of the source.
    pub name: &'static str,
    /// Machine code by compute capability.
    pub cubins: &'static [(u32, &'static [u8])],
    /// PTX for every later GPU, compiled by the driver.
    pub ptx: &'static str,
}

/// What was asked of the driver on behalf of a [`Gpu`] so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Kernels and graphs launched.
    pub launches: u64,
    /// Times that the host waited for the device.
    pub waits: u64,
}

/// A GPU that the kernels can run on. Holding one proves that the driver is there and young enough.
pub struct Gpu {
    context: Arc<CudaContext>,
    profile: Profile,
    name: String,
    sm: u32,
    processors: u32,
    launches: AtomicU64,
    waits: AtomicU64,
}

impl Gpu {
    /// Opens the first GPU.
    ///
    /// # Errors
    /// There is none, or it or its driver is too old.
    pub fn open(profile: Profile) -> Result<Arc<Self>> {
        // SAFETY: loads a library by its usual name, which is what it is for.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        let context = CudaContext::new(0).map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_NO_DEVICE => CudaError::NoGpu,
            _ => CudaError::Driver { call: "open", error },
        })?;
        // SAFETY: every stream here is ordered by our own events, and no `CudaSlice` is ever made.
        unsafe { context.disable_event_tracking() };
        let mut driver = 0;
        // SAFETY: the driver writes one integer.
        unsafe { sys::cuDriverGetVersion(&mut driver) }.result().call("version")?;
        let too_old = |what, found, needed| Err(CudaError::TooOld { what, found, needed });
        if driver < 11_040 {
            return too_old("the CUDA driver", format!("{}.{}", driver / 1000, driver % 1000 / 10), "11.4");
        }
        let (major, minor) = context.compute_capability().call("compute capability")?;
        let sm = (10 * major + minor) as u32;
        if sm < 80 {
            return too_old("the GPU's compute capability", format!("{major}.{minor}"), "8.0");
        }
        let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let processors = context.attribute(count).call("multiprocessors")? as u32;
        let name = context.name().call("name")?;
        log::info!("GPU: {name}, compute capability {major}.{minor}, driver {driver}");
        let (launches, waits) = (AtomicU64::new(0), AtomicU64::new(0));
        Ok(Arc::new(Self { context, profile, name, sm, processors, launches, waits }))
    }

    /// The name that the driver gives it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its compute capability, such as 87.
    pub fn sm(&self) -> u32 {
        self.sm
    }

    /// Its multiprocessors.
    pub fn processors(&self) -> u32 {
        self.processors
    }

    /// Bytes of its memory.
    ///
    /// # Errors
    /// The driver failed.
    pub fn memory(&self) -> Result<usize> {
        self.context.total_mem().call("total memory")
    }

    /// What was asked of the driver so far.
    pub fn calls(&self) -> Calls {
        Calls { launches: self.launches.load(Ordering::Relaxed), waits: self.waits.load(Ordering::Relaxed) }
    }

    /// The context, for libraries that run beside these kernels.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    fn count_wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    /// A stream of its own.
    ///
    /// # Errors
    /// The driver failed.
    pub fn stream(self: &Arc<Self>) -> Result<Stream> {
        Ok(Stream { stream: self.context.new_stream().call("new stream")?, gpu: Arc::clone(self) })
    }

    /// An event, not recorded yet; such an event counts as done.
    ///
    /// # Errors
    /// The driver failed.
    pub fn event(self: &Arc<Self>) -> Result<Event> {
        self.context.bind_to_thread().call("bind")?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).call("new event")?;
        Ok(Event { event, gpu: Arc::clone(self) })
    }

    /// `len` zeros in device memory.
    ///
    /// # Errors
    /// There is not enough.
    pub fn buffer<T: DeviceValue>(self: &Arc<Self>, len: usize) -> Result<Buffer<T>> {
        self.context.bind_to_thread().call("bind")?;
        // The driver refuses an allocation of nothing.
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: the memory is zeroed before anyone has its address.
        let address = unsafe {
            let address = result::malloc_sync(bytes).call("allocate device memory")?;
            result::memset_d8_sync(address, 0, bytes).call("zero device memory")?;
            address
        };
        Ok(Buffer { address, len, gpu: Arc::clone(self), of: PhantomData })
    }

    /// `len` zeros in host memory that the device reaches too. Every access of the device crosses the bus: for what is
    /// small or read once.
    ///
    /// # Errors
    /// There is not enough.
    pub fn mapped<T: DeviceValue>(self: &Arc<Self>, len: usize) -> Result<Mapped<T>> {
        self.context.bind_to_thread().call("bind")?;
        let bytes = (len * size_of::<T>()).max(1);
        // SAFETY: the memory is zeroed before anyone has its address.
        let (host, address) = unsafe {
            let host =
                result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_DEVICEMAP).call("allocate pinned memory")?;
            host.cast::<u8>().write_bytes(0, bytes);
            let mut address = 0;
            sys::cuMemHostGetDevicePointer_v2(&mut address, host, 0).result().call("map pinned memory")?;
            (host, address)
        };
        let none = CudaError::Driver {
            call: "allocate pinned memory",
            error: DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY),
        };
        let host = NonNull::new(host.cast()).ok_or(none)?;
        Ok(Mapped { host, address, len, gpu: Arc::clone(self) })
    }

    /// Loads the image that fits this GPU: its machine code, or else the PTX where the profile allows that.
    ///
    /// # Errors
    /// None fits.
    pub fn module(self: &Arc<Self>, images: &Images) -> Result<Arc<Module>> {
        self.context.bind_to_thread().call("bind")?;
        let none = |problem| CudaError::NoKernels { gpu: self.name.clone(), problem };
        let mut tried = format!("`{}` has no machine code for compute capability {}", images.name, self.sm);
        if let Some((_, cubin)) = images.cubins.iter().find(|(sm, _)| *sm == self.sm) {
            // SAFETY: a whole image, which the driver copies.
            match unsafe { result::module::load_data(cubin.as_ptr().cast()) } {
                Ok(module) => return Ok(Arc::new(Module { module, gpu: Arc::clone(self) })),
                Err(e) => tried = format!("the machine code of `{}` is refused: {e}", images.name),
            }
        }
        if self.profile.tegra {
            return Err(none(format!("{tried}; the Tegra profile lets the driver compile nothing")));
        }
        let ptx = CString::new(images.ptx).map_err(|_| none(format!("{tried}; its PTX is damaged")))?;
        // SAFETY: a text that ends in 0, which the driver compiles and copies.
        let module = unsafe { result::module::load_data(ptx.as_ptr().cast()) }
            .map_err(|e| none(format!("{tried}; its PTX is refused: {e}")))?;
        log::warn!("{tried}: the driver compiled its PTX");
        Ok(Arc::new(Module { module, gpu: Arc::clone(self) }))
    }
}

/// Kernels as they are loaded.
pub struct Module {
    module: sys::CUmodule,
    gpu: Arc<Gpu>,
}

// SAFETY: a handle that the driver lets every thread use.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    /// The kernel of that name.
    ///
    /// # Errors
    /// The module does not have it.
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
            // SAFETY: nothing can launch its kernels any more.
            unsafe { result::module::unload(self.module) }
        };
        report("unload kernels", unload());
    }
}

/// One kernel.
pub struct Kernel {
    function: sys::CUfunction,
    name: &'static str,
    _module: Arc<Module>,
}

// SAFETY: a handle that the driver lets every thread use.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Work for the device, in order.
pub struct Stream {
    stream: Arc<CudaStream>,
    gpu: Arc<Gpu>,
}

impl Stream {
    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// The stream itself, for libraries and graphs.
    pub fn raw(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Launches `kernel` on `blocks` of `threads`.
    ///
    /// # Safety
    /// `arguments` point to one value for each of the kernel's parameters, in order and of its type; the memory they name is
    /// as large as the kernel takes it to be and stays alive until the launch was waited for.
    ///
    /// # Errors
    /// The driver refuses.
    pub unsafe fn launch(
        &self,
        kernel: &Kernel,
        blocks: u32,
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        self.gpu.context.bind_to_thread().call("bind")?;
        let (function, stream) = (kernel.function, self.stream.cu_stream());
        // SAFETY: the caller's promise.
        unsafe { result::launch_kernel(function, (blocks, 1, 1), (threads, 1, 1), 0, stream, arguments) }
            .call(kernel.name)?;
        self.count_launch();
        Ok(())
    }

    /// Counts a launch that was made past [`Stream::launch`], of a graph or by a library.
    pub fn count_launch(&self) {
        self.gpu.launches.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits until all work given so far is done.
    ///
    /// # Errors
    /// Some of it failed.
    pub fn wait(&self) -> Result<()> {
        self.gpu.count_wait();
        self.stream.synchronize().call("wait for the stream")
    }

    /// Lets `event` mark all work given so far.
    ///
    /// # Errors
    /// The driver failed.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.gpu.context.bind_to_thread().call("bind")?;
        // SAFETY: both live.
        unsafe { result::event::record(event.event, self.stream.cu_stream()) }.call("record an event")
    }

    /// Lets work given from now on begin after what `event` marks; the host does not wait.
    ///
    /// # Errors
    /// The driver failed.
    pub fn after(&self, event: &Event) -> Result<()> {
        self.gpu.context.bind_to_thread().call("bind")?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live.
        unsafe { result::stream::wait_event(self.stream.cu_stream(), event.event, flags) }
            .call("wait for an event")
    }

    /// Copies `from` to `to[at..]` and waits for it.
    ///
    /// # Errors
    /// The driver failed.
    pub fn upload<T: DeviceValue>(&self, from: &[T], to: &mut Buffer<T>, at: usize) -> Result<()> {
        assert!(at + from.len() <= to.len);
        if from.is_empty() {
            return Ok(());
        }
        self.gpu.context.bind_to_thread().call("bind")?;
        // SAFETY: it fits, and the host waits before it lets go of `from`.
        unsafe {
            result::memcpy_htod_async(
                to.address + (at * size_of::<T>()) as u64,
                from,
                self.stream.cu_stream(),
            )
        }
        .call("copy to the device")?;
        self.wait()
    }

    /// Puts a copy of `from` to `to` onto the stream.
    ///
    /// # Errors
    /// The driver failed.
    pub fn copy<T: DeviceValue>(&self, from: &Buffer<T>, to: &mut Buffer<T>) -> Result<()> {
        assert!(from.len <= to.len);
        self.gpu.context.bind_to_thread().call("bind")?;
        let (bytes, stream) = (from.len * size_of::<T>(), self.stream.cu_stream());
        // SAFETY: it fits; both stay until the device has passed, since freeing waits for it.
        unsafe { result::memcpy_dtod_async(to.address, from.address, bytes, stream) }
            .call("copy on the device")
    }

    /// Copies `from[at..]` to `to` and waits for it.
    ///
    /// # Errors
    /// The driver failed.
    pub fn download<T: DeviceValue>(&self, from: &Buffer<T>, at: usize, to: &mut [T]) -> Result<()> {
        assert!(at + to.len() <= from.len);
        if to.is_empty() {
            return Ok(());
        }
        self.gpu.context.bind_to_thread().call("bind")?;
        // SAFETY: it fits, any bytes are a value, and the host waits before it lets go of `to`.
        unsafe {
            result::memcpy_dtoh_async(
                to,
                from.address + (at * size_of::<T>()) as u64,
                self.stream.cu_stream(),
            )
        }
        .call("copy from the device")?;
        self.wait()
    }
}

/// A point in a stream's work.
pub struct Event {
    event: sys::CUevent,
    gpu: Arc<Gpu>,
}

// SAFETY: a handle that the driver lets every thread use.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Waits for the work that was last marked.
    ///
    /// # Errors
    /// Some of it failed.
    pub fn wait(&self) -> Result<()> {
        self.gpu.count_wait();
        self.gpu.context.bind_to_thread().call("bind")?;
        // SAFETY: it lives.
        unsafe { result::event::synchronize(self.event) }.call("wait for an event")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let destroy = || {
            self.gpu.context.bind_to_thread()?;
            // SAFETY: nobody has it any more; the driver keeps it until it has happened.
            unsafe { result::event::destroy(self.event) }
        };
        report("destroy an event", destroy());
    }
}

/// Values in device memory.
pub struct Buffer<T> {
    address: sys::CUdeviceptr,
    len: usize,
    gpu: Arc<Gpu>,
    of: PhantomData<T>,
}

impl<T> Buffer<T> {
    /// Where they lie on the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        let free = || {
            self.gpu.context.bind_to_thread()?;
            // SAFETY: nobody has it any more; the driver waits for the device first.
            unsafe { result::free_sync(self.address) }
        };
        report("free device memory", free());
    }
}

/// Values in pinned host memory that the device reaches too. The host reads what the device wrote only after it waited.
pub struct Mapped<T> {
    host: NonNull<T>,
    address: sys::CUdeviceptr,
    len: usize,
    gpu: Arc<Gpu>,
}

// SAFETY: it owns its memory as a `Box` does.
unsafe impl<T: Send> Send for Mapped<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Mapped<T> {}

impl<T> Mapped<T> {
    /// Where they lie for the device.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl<T: DeviceValue> Deref for Mapped<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` values were zeroed here; the device writes only between a launch and the wait for it.
        unsafe { std::slice::from_raw_parts(self.host.as_ptr(), self.len) }
    }
}

impl<T: DeviceValue> DerefMut for Mapped<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed for as long.
        unsafe { std::slice::from_raw_parts_mut(self.host.as_ptr(), self.len) }
    }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        let free = || {
            self.gpu.context.bind_to_thread()?;
            // A kernel may still write here.
            self.gpu.context.synchronize()?;
            // SAFETY: nobody has it any more.
            unsafe { result::free_host(self.host.as_ptr().cast()) }
        };
        report("free pinned memory", free());
    }
}

fn report(what: &str, done: std::result::Result<(), DriverError>) {
    if let Err(e) = done {
        log::error!("CUDA: {what}: {e}");
    }
}
