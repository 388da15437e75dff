//! The CUDA driver, fenced: one GPU with its streams, events and kernels; its memory is `memory`.
//! Asks whether the driver library is there before the first call into it. Never compiles a kernel
//! but by the driver's own JIT, where the profile allows that; never touches the legacy stream,
//! which is in no order with ours. Knows nothing of embeddings.
//!
//! Work on a stream is asynchronous: what a launch names must stay alive and untouched by the host
//! until the stream or an event behind the launch was waited for. Freeing memory waits for the
//! whole device.

#![allow(unsafe_code)]

use super::memory::report;
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Why the GPU cannot be used. The first four mean that this machine has none for us: the caller
/// takes the CPU or refuses to start.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// There is no driver library.
    #[error("no CUDA driver on this machine (neither libcuda.so nor libcuda.so.1 can be loaded)")]
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

pub(crate) type Result<T> = std::result::Result<T, CudaError>;

/// Names the call that failed.
pub(super) trait Call<T> {
    fn call(self, call: &'static str) -> Result<T>;
}

impl<T> Call<T> for std::result::Result<T, DriverError> {
    fn call(self, call: &'static str) -> Result<T> {
        self.map_err(|error| CudaError::Driver { call, error })
    }
}

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

/// Held while work is recorded: who waits for the whole device meanwhile spoils the recording. One
/// for all, as the context is, however often the GPU is opened.
static RECORDING: Mutex<()> = Mutex::new(());

/// A GPU that the kernels can run on. Holding one proves that the driver is there and young enough.
pub struct Gpu {
    context: Arc<CudaContext>,
    profile: Profile,
    name: String,
    sm: u32,
    processors: u32,
    integrated: bool,
    /// For what is done at once, on behalf of nobody's stream.
    own: Arc<CudaStream>,
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
        let context = CudaContext::new(0).map_err(|error| match error.0 {
            sys::CUresult::CUDA_ERROR_NO_DEVICE => CudaError::NoGpu,
            _ => CudaError::Driver { call: "open", error },
        })?;
        // SAFETY: every stream here is ordered by our own events, and no `CudaSlice` is ever made.
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
        log::info!("GPU: {name}, compute capability {major}.{minor}, driver {driver}");
        Ok(Arc::new(Self {
            own: context.new_stream().call("new stream")?,
            context,
            profile,
            name,
            sm,
            processors,
            integrated,
            launches: AtomicU64::new(0),
            waits: AtomicU64::new(0),
        }))
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

    /// Whether its memory is the host's, as on the board.
    pub fn integrated(&self) -> bool {
        self.integrated
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
        Calls {
            launches: self.launches.load(Ordering::Relaxed),
            waits: self.waits.load(Ordering::Relaxed),
        }
    }

    /// The context, for libraries that run beside these kernels.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    fn count_wait(&self) {
        self.waits.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn own_stream(&self) -> &Arc<CudaStream> {
        &self.own
    }

    /// Keeps others from waiting for the whole device.
    pub(super) fn recording(&self) -> MutexGuard<'static, ()> {
        RECORDING.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for all streams.
    pub(super) fn wait_for_all(&self) -> std::result::Result<(), DriverError> {
        let _nobody_records = self.recording();
        self.context.synchronize()
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
        let event =
            result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).call("new event")?;
        Ok(Event { event, gpu: Arc::clone(self) })
    }

    /// Loads the image that fits this GPU: its machine code, or else the PTX where the profile
    /// allows that.
    ///
    /// # Errors
    /// None fits.
    pub fn module(self: &Arc<Self>, images: &Images) -> Result<Arc<Module>> {
        self.context.bind_to_thread().call("bind")?;
        let none = |problem| CudaError::NoKernels { gpu: self.name.clone(), problem };
        let mut tried =
            format!("`{}` has no machine code for compute capability {}", images.name, self.sm);
        if let Some((_, cubin)) = images.cubins.iter().find(|(sm, _)| *sm == self.sm) {
            // Where the driver reads words, they begin on words.
            let mut image = vec![0u64; cubin.len().div_ceil(8)];
            for (word, bytes) in image.iter_mut().zip(cubin.chunks(8)) {
                let mut eight = [0; 8];
                eight[..bytes.len()].copy_from_slice(bytes);
                *word = u64::from_ne_bytes(eight);
            }
            // SAFETY: a whole image, which the driver copies.
            match unsafe { result::module::load_data(image.as_ptr().cast()) } {
                Ok(module) => return Ok(Arc::new(Module { module, gpu: Arc::clone(self) })),
                Err(e) => tried = format!("the machine code of `{}` is refused: {e}", images.name),
            }
        }
        if self.profile.tegra {
            return Err(none(format!(
                "{tried}; the Tegra profile lets the driver compile nothing"
            )));
        }
        let ptx =
            CString::new(images.ptx).map_err(|_| none(format!("{tried}; its PTX is damaged")))?;
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

/// The arguments of a launch: a tuple of plain values.
pub trait Arguments {
    /// Calls `launch` with a pointer to each.
    fn with<T>(&mut self, launch: impl FnOnce(&mut [*mut c_void]) -> T) -> T;
}

macro_rules! arguments {
    ($($name:ident)*) => {
        impl<$($name: Copy),*> Arguments for ($($name,)*) {
            #[allow(non_snake_case)]
            fn with<T>(&mut self, launch: impl FnOnce(&mut [*mut c_void]) -> T) -> T {
                let ($($name,)*) = self;
                launch(&mut [$(std::ptr::from_mut($name).cast()),*])
            }
        }
    };
}

arguments!(A);
arguments!(A B C D);
arguments!(A B C D E);
arguments!(A B C D E F);
arguments!(A B C D E F G H);
arguments!(A B C D E F G H I);
arguments!(A B C D E F G H I J);

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

    pub(super) fn bind(&self) -> Result<()> {
        self.gpu.context.bind_to_thread().call("bind")
    }

    /// Launches `kernel` on `blocks` of `threads`.
    ///
    /// # Safety
    /// `arguments` are the kernel's parameters, in order and as it has them; the memory they name
    /// is as large as the kernel takes it to be and stays alive until the launch was waited for.
    ///
    /// # Errors
    /// The driver refuses.
    pub unsafe fn launch(
        &self,
        kernel: &Kernel,
        blocks: u32,
        threads: u32,
        mut arguments: impl Arguments,
    ) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        self.bind()?;
        let (function, stream) = (kernel.function, self.stream.cu_stream());
        // SAFETY: the caller's promise.
        arguments.with(|arguments| unsafe {
            result::launch_kernel(function, (blocks, 1, 1), (threads, 1, 1), 0, stream, arguments)
                .call(kernel.name)
        })?;
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
        self.bind()?;
        // SAFETY: both live.
        unsafe { result::event::record(event.event, self.stream.cu_stream()) }
            .call("record an event")
    }

    /// Lets work given from now on begin after what `event` marks; the host does not wait.
    ///
    /// # Errors
    /// The driver failed.
    pub fn after(&self, event: &Event) -> Result<()> {
        self.bind()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both live.
        unsafe { result::stream::wait_event(self.stream.cu_stream(), event.event, flags) }
            .call("wait for an event")
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
