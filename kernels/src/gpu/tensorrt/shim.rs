//! The C interface of `tensorrt/shim.cpp`: loads the shim and TensorRT, builds plans, loads them,
//! and owns the objects that the shim returns. All unsafe code for TensorRT is here. Never chooses
//! between backends.

#![allow(unsafe_code)]

use crate::cuda::driver::{Gpu, Stream};
use crate::cuda::error::load_problem;
use crate::cuda::memory::{Buffer, View};
use crate::gpu::input_type::InputType;
use crate::gpu::tensorrt::build::{BatchClass, Build, BuildInput};
use crate::gpu::tensorrt::error::{TensorRtError, Version};
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::ptr::{NonNull, null, null_mut};
use std::sync::{Arc, Mutex, PoisonError};

/// Version of the interface between the shim and this file.
const INTERFACE: i32 = 8;
/// Room for TensorRT's error text.
const PROBLEM_BYTES: usize = 512;

/// Return codes of `shim.cpp`.
mod outcome {
    pub const DONE: i32 = 0;
    pub const NO_LIBRARY: i32 = 1;
    pub const NO_ENTRY: i32 = 2;
    pub const VERSION: i32 = 3;
    pub const NO_FP16: i32 = 5;
    pub const INTERFACE: i32 = 6;
}

#[repr(C)]
struct InputShape {
    name: *const c_char,
    shape: *const i64,
    rank: i32,
    is_f16: i32,
}

#[repr(C)]
struct Batches {
    least: i64,
    most: i64,
}

#[repr(C)]
struct BuildArguments {
    onnx: *const c_void,
    onnx_bytes: usize,
    inputs: *const InputShape,
    input_count: i32,
    output: *const c_char,
    batches: *const Batches,
    batch_count: i32,
    workspace_bytes_max: u64,
    types: i32,
    compute_capability: i32,
    timings: *const c_void,
    timing_bytes: usize,
}

#[repr(C)]
struct RunMemory {
    address: *mut c_void,
    bytes: u64,
}

type Opaque = *mut c_void;
type Drop1 = unsafe extern "C" fn(Opaque);

/// The shim's functions. They stay valid because the library is never unloaded.
#[derive(Clone, Copy)]
struct Calls {
    header_version: unsafe extern "C" fn() -> i32,
    open: unsafe extern "C" fn(
        *const c_char,
        *const c_char,
        *mut Opaque,
        *mut i32,
        *mut c_char,
        usize,
    ) -> i32,
    close: Drop1,
    build: unsafe extern "C" fn(
        Opaque,
        *const BuildArguments,
        *mut Opaque,
        *mut Opaque,
        *mut c_char,
        usize,
    ) -> i32,
    plan_data: unsafe extern "C" fn(Opaque) -> *const u8,
    plan_bytes: unsafe extern "C" fn(Opaque) -> usize,
    drop_plan: Drop1,
    start: unsafe extern "C" fn(Opaque, *mut c_char, usize) -> i32,
    load:
        unsafe extern "C" fn(Opaque, *const c_void, usize, *mut Opaque, *mut c_char, usize) -> i32,
    drop_engine: Drop1,
    check: unsafe extern "C" fn(
        Opaque,
        *const InputShape,
        i32,
        *const c_char,
        *mut c_char,
        usize,
    ) -> i32,
    engine_bytes: unsafe extern "C" fn(Opaque) -> u64,
    run_bytes: unsafe extern "C" fn(Opaque) -> u64,
    context_bytes: unsafe extern "C" fn(Opaque) -> u64,
    context: unsafe extern "C" fn(
        Opaque,
        Opaque,
        *const RunMemory,
        *mut Opaque,
        *mut c_char,
        usize,
    ) -> i32,
    drop_context: Drop1,
    choose: unsafe extern "C" fn(Opaque, i32, *mut c_void) -> i32,
    bind: unsafe extern "C" fn(Opaque, *const InputShape, i64, *mut c_void) -> i32,
    enqueue: unsafe extern "C" fn(Opaque, *mut c_void) -> i32,
}

/// An object of the shim; dropping it returns the object to the shim.
struct Owned {
    object: NonNull<c_void>,
    give_back: Drop1,
}

impl Owned {
    fn new(object: Opaque, give_back: Drop1) -> Result<Self, TensorRtError> {
        let object =
            NonNull::new(object).ok_or_else(|| TensorRtError::Refused("no object".to_owned()))?;
        Ok(Self { object, give_back })
    }

    fn get(&self) -> Opaque {
        self.object.as_ptr()
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the shim documents this function for such an object, and the only owner is being
        // dropped.
        unsafe { (self.give_back)(self.object.as_ptr()) }
    }
}

// SAFETY: the shim's objects are not bound to a thread. Their users below keep two threads from
// using one at the same time.
unsafe impl Send for Owned {}

/// A loaded TensorRT. Holding one proves that its release is that of the shim's headers.
pub struct TensorRt {
    calls: Calls,
    /// Locked because its runtime admits one thread at a time.
    library: Mutex<Owned>,
    version: Version,
}

/// A network that is ready to run on this GPU. Holding one proves that it has the inputs and the
/// output of its build. It is read-only; workers share it.
pub struct Engine {
    engine: Owned,
    inputs: Vec<Input>,
    output: CString,
    batches: Vec<BatchClass>,
    tensorrt: Arc<TensorRt>,
}

// SAFETY: TensorRT documents an engine as usable from several threads. Of a shared engine this file
// only reads sizes and, under the shim's lock, creates contexts.
unsafe impl Sync for Engine {}

/// An input, as the shim takes it.
struct Input {
    name: CString,
    shape: Vec<i64>,
    of: InputType,
}

impl Input {
    fn shape(&self) -> InputShape {
        InputShape {
            name: self.name.as_ptr(),
            shape: self.shape.as_ptr(),
            rank: self.shape.len() as i32,
            is_f16: i32::from(self.of == InputType::F16),
        }
    }

    /// Returns the words of one sample.
    fn words(&self) -> usize {
        self.of.words(self.shape.iter().product::<i64>() as usize)
    }
}

/// One worker's execution context of an engine. Its device memory is the worker's.
pub struct Context {
    // Dropped before its engine and its memory.
    context: Owned,
    engine: Arc<Engine>,
    _memory: Arc<Buffer<f32>>,
    /// The batch of the shapes that it has.
    batch: Option<usize>,
}

/// The releases of the shim's headers and of the library.
#[derive(Clone, Copy)]
struct Versions {
    headers: Version,
    library: Version,
}

/// Room for an error text of the shim.
struct Problem([c_char; PROBLEM_BYTES]);

impl Problem {
    fn new() -> Self {
        Self([0; PROBLEM_BYTES])
    }

    fn text(&self) -> String {
        let bytes: Vec<u8> = self.0.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Converts a return code to its error. `versions` are those of the shim's headers and of the
    /// library.
    fn check(&self, code: i32, versions: Versions) -> Result<(), TensorRtError> {
        match code {
            outcome::DONE => Ok(()),
            outcome::NO_LIBRARY => Err(TensorRtError::NoLibrary(self.text())),
            outcome::NO_ENTRY => Err(TensorRtError::NoEntry(self.text())),
            outcome::VERSION => {
                let Versions { headers, library } = versions;
                Err(TensorRtError::Version { headers, library })
            }
            outcome::NO_FP16 => Err(TensorRtError::NoFp16(versions.library)),
            outcome::INTERFACE => Err(TensorRtError::Interface(self.text())),
            _ => Err(TensorRtError::Refused(self.text())),
        }
    }
}

fn c_string(text: &str) -> Result<CString, TensorRtError> {
    CString::new(text).map_err(|_| TensorRtError::Interface(format!("`{}`", text.escape_debug())))
}

impl Calls {
    fn find(library: &'static Library) -> Result<Self, TensorRtError> {
        /// Looks up a function. `T` must be its type in `shim.cpp`.
        unsafe fn call<T: Copy>(library: &'static Library, name: &str) -> Result<T, TensorRtError> {
            // SAFETY: the caller vouches for the type.
            let found = unsafe { library.get::<T>(name) };
            found.map(|f| *f).map_err(|_| TensorRtError::NoEntry(name.to_owned()))
        }

        // SAFETY: each type is that of the function in `shim.cpp`. The first call compares the
        // interface version, and the type of that function never changes.
        unsafe {
            let interface: unsafe extern "C" fn() -> i32 =
                call(library, "hatchback_trt_interface")?;
            match interface() {
                INTERFACE => {}
                other => return Err(TensorRtError::OtherShim { shim: other, expected: INTERFACE }),
            }

            Ok(Self {
                header_version: call(library, "hatchback_trt_header_version")?,
                open: call(library, "hatchback_trt_open")?,
                close: call(library, "hatchback_trt_close")?,
                build: call(library, "hatchback_trt_build")?,
                plan_data: call(library, "hatchback_trt_plan_data")?,
                plan_bytes: call(library, "hatchback_trt_plan_bytes")?,
                drop_plan: call(library, "hatchback_trt_drop_plan")?,
                start: call(library, "hatchback_trt_start")?,
                load: call(library, "hatchback_trt_load")?,
                drop_engine: call(library, "hatchback_trt_drop_engine")?,
                check: call(library, "hatchback_trt_check")?,
                engine_bytes: call(library, "hatchback_trt_engine_bytes")?,
                run_bytes: call(library, "hatchback_trt_run_bytes")?,
                context_bytes: call(library, "hatchback_trt_context_bytes")?,
                context: call(library, "hatchback_trt_context")?,
                drop_context: call(library, "hatchback_trt_drop_context")?,
                choose: call(library, "hatchback_trt_choose")?,
                bind: call(library, "hatchback_trt_bind")?,
                enqueue: call(library, "hatchback_trt_enqueue")?,
            })
        }
    }
}

impl TensorRt {
    fn versions(&self) -> Versions {
        // Both are the same: a shim for another release is not loaded.
        Versions { headers: self.version, library: self.version }
    }

    /// Loads the shim from `shim`, and TensorRT from the first of `libraries`, or by its usual
    /// name. A build loads the ONNX parser, the second of them: a start with kept plans needs none.
    ///
    /// # Errors
    /// [`TensorRtError::NotBuilt`], [`TensorRtError::OtherShim`], [`TensorRtError::NoLibrary`],
    /// [`TensorRtError::NoEntry`] or [`TensorRtError::Version`].
    pub fn open(
        shim: &Path,
        libraries: Option<(&Path, &Path)>,
    ) -> Result<Arc<Self>, TensorRtError> {
        // SAFETY: the shim's initializers are harmless; the operator who configures the path
        // vouches for the file.
        let library = unsafe { Library::new(shim) };
        let library = library.map_err(|e| TensorRtError::NotBuilt {
            path: shim.to_owned(),
            problem: load_problem(&e),
        })?;
        // Never unloaded: TensorRT registers state that it cannot remove.
        let calls = Calls::find(Box::leak(Box::new(library)))?;
        let path = |p: &Path| c_string(&p.to_string_lossy());
        let names =
            libraries.map(|(a, b)| Ok::<_, TensorRtError>((path(a)?, path(b)?))).transpose()?;
        let (core, parser) =
            names.as_ref().map_or((null(), null()), |(a, b)| (a.as_ptr(), b.as_ptr()));
        let (mut out, mut version, mut problem) = (null_mut(), 0, Problem::new());

        // SAFETY: the paths are null or end in a zero byte. They and the places for the results
        // outlive the call.
        let (code, headers) = unsafe {
            let code = (calls.open)(
                core,
                parser,
                &mut out,
                &mut version,
                problem.0.as_mut_ptr(),
                PROBLEM_BYTES,
            );
            (code, (calls.header_version)())
        };
        let versions = Versions { headers: Version(headers), library: Version(version) };
        problem.check(code, versions)?;
        let library = Mutex::new(Owned::new(out, calls.close)?);
        Ok(Arc::new(Self { calls, library, version: Version(version) }))
    }

    /// Returns the library's release.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Creates the runtime, which a load needs. The GPU must be open: without a driver some
    /// releases crash instead of failing.
    ///
    /// # Errors
    /// [`TensorRtError::Refused`].
    pub fn start(&self, _gpu: &Arc<Gpu>) -> Result<(), TensorRtError> {
        let mut problem = Problem::new();
        let library = self.library.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the text outlives the call; the lock admits one thread to the library.
        let code =
            unsafe { (self.calls.start)(library.get(), problem.0.as_mut_ptr(), PROBLEM_BYTES) };
        problem.check(code, self.versions())
    }

    /// Builds a plan, which takes seconds to minutes. The plan only runs with this release on this
    /// GPU. `timings` are those of earlier builds here, or empty. The build adds its own.
    ///
    /// # Errors
    /// [`TensorRtError::Refused`], [`TensorRtError::Interface`] or [`TensorRtError::NoFp16`], or of
    /// the parser [`TensorRtError::NoLibrary`] or [`TensorRtError::NoEntry`].
    pub fn build(&self, build: &Build, timings: &mut Vec<u8>) -> Result<Vec<u8>, TensorRtError> {
        let inputs = c_inputs(build)?;
        let shapes: Vec<_> = inputs.iter().map(Input::shape).collect();
        let output = c_string(build.output)?;
        let class = |c: &BatchClass| Batches { least: c.least as i64, most: c.most as i64 };
        let batches: Vec<_> = build.batches.iter().map(class).collect();
        let arguments = BuildArguments {
            onnx: build.onnx.as_ptr().cast(),
            onnx_bytes: build.onnx.len(),
            inputs: shapes.as_ptr(),
            input_count: shapes.len() as i32,
            output: output.as_ptr(),
            batches: batches.as_ptr(),
            batch_count: batches.len() as i32,
            workspace_bytes_max: build.workspace_bytes_max,
            types: build.types as i32,
            compute_capability: build.compute_capability.unwrap_or(0),
            timings: timings.as_ptr().cast(),
            timing_bytes: timings.len(),
        };

        let (mut plan, mut timed, mut problem) = (null_mut(), null_mut(), Problem::new());
        let library = self.library.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: everything that `arguments` points to outlives the call; the lock admits one
        // thread to the library.
        let code = unsafe {
            (self.calls.build)(
                library.get(),
                &arguments,
                &mut plan,
                &mut timed,
                problem.0.as_mut_ptr(),
                PROBLEM_BYTES,
            )
        };
        problem.check(code, self.versions())?;
        let copied = |memory: Opaque| {
            let owned = Owned::new(memory, self.calls.drop_plan)?;
            // SAFETY: the memory holds `plan_bytes` bytes at `plan_data` until it is dropped, which
            // is after the copy.
            let bytes = unsafe {
                let data = (self.calls.plan_data)(owned.get());
                std::slice::from_raw_parts(data, (self.calls.plan_bytes)(owned.get()))
            };
            Ok(bytes.to_vec())
        };
        if !timed.is_null() {
            *timings = copied(timed)?;
        }
        copied(plan)
    }

    /// Loads `plan`, which this machine built from `build`, into the runtime, as
    /// [`TensorRt::start`] creates it.
    ///
    /// # Errors
    /// [`TensorRtError::Refused`] if the plan is of another release or GPU,
    /// [`TensorRtError::Interface`] if its tensors are not those of `build`.
    pub fn load(
        self: &Arc<Self>,
        gpu: &Arc<Gpu>,
        plan: &[u8],
        build: &Build,
    ) -> Result<Arc<Engine>, TensorRtError> {
        self.start(gpu)?;
        let (inputs, output) = (c_inputs(build)?, c_string(build.output)?);
        let (mut engine, mut problem) = (null_mut(), Problem::new());
        let shapes: Vec<_> = inputs.iter().map(Input::shape).collect();
        let library = self.library.lock().unwrap_or_else(PoisonError::into_inner);

        // SAFETY: the plan outlives the call, which copies what it needs; the lock admits one
        // thread to the library.
        let code = unsafe {
            let (data, text) = (plan.as_ptr().cast(), problem.0.as_mut_ptr());
            (self.calls.load)(library.get(), data, plan.len(), &mut engine, text, PROBLEM_BYTES)
        };
        problem.check(code, self.versions())?;
        let engine = Owned::new(engine, self.calls.drop_engine)?;

        // SAFETY: `count` inputs, whose names end in a zero byte and outlive the call.
        let code = unsafe {
            let (count, text) = (shapes.len() as i32, problem.0.as_mut_ptr());
            (self.calls.check)(
                engine.get(),
                shapes.as_ptr(),
                count,
                output.as_ptr(),
                text,
                PROBLEM_BYTES,
            )
        };
        problem.check(code, self.versions())?;
        drop(library);
        let batches = build.batches.clone();
        Ok(Arc::new(Engine { engine, inputs, output, batches, tensorrt: Arc::clone(self) }))
    }
}

impl Engine {
    /// Returns the bytes that the engine takes, without contexts: its weights, counted as the bytes
    /// of its plan, which contains them. TensorRT does not report them. TensorRT 8.5 needs the plan
    /// for each context, so there the plan itself counts too.
    pub fn bytes(&self) -> u64 {
        // SAFETY: the call reads numbers that never change.
        unsafe { (self.tensorrt.calls.engine_bytes)(self.engine.get()) }
    }

    /// Returns the bytes of device memory in which contexts run, one at a time.
    pub fn run_bytes(&self) -> u64 {
        // SAFETY: the call reads a number that never changes.
        unsafe { (self.tensorrt.calls.run_bytes)(self.engine.get()) }
    }

    /// Returns the bytes that one context takes beside [`Engine::run_bytes`]: with TensorRT 8.5 a
    /// copy of the weights, counted as the bytes of the plan.
    pub fn context_bytes(&self) -> u64 {
        // SAFETY: the call reads a number that never changes.
        unsafe { (self.tensorrt.calls.context_bytes)(self.engine.get()) }
    }

    /// Creates a context whose runs use `memory`, which has [`Engine::run_bytes`] bytes at least.
    /// No two contexts with the same memory may run at the same time.
    ///
    /// # Errors
    /// [`TensorRtError::Refused`] if there is not enough device memory.
    pub fn context(self: &Arc<Self>, memory: &Arc<Buffer<f32>>) -> Result<Context, TensorRtError> {
        let (mut context, mut problem) = (null_mut(), Problem::new());
        let bytes = 4 * memory.len() as u64;
        assert!(bytes >= self.run_bytes(), "the contexts' memory is too small");
        let own = RunMemory { address: memory.address() as *mut c_void, bytes };
        let library = self.tensorrt.library.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the engine belongs to this library; the lock admits one thread to its runtime.
        // The memory is as large as the engine's runs demand, and the context keeps it.
        let code = unsafe {
            let (engine, text) = (self.engine.get(), problem.0.as_mut_ptr());
            let out = &mut context;
            (self.tensorrt.calls.context)(library.get(), engine, &own, out, text, PROBLEM_BYTES)
        };
        problem.check(code, self.tensorrt.versions())?;
        let context = Owned::new(context, self.tensorrt.calls.drop_context)?;
        Ok(Context { context, engine: Arc::clone(self), _memory: Arc::clone(memory), batch: None })
    }
}

impl Context {
    /// Puts a run of `batch` samples onto `stream`: `inputs`, in the order of the build, to
    /// `output`. The buffers must stay alive until the stream has run the work. A recorded run
    /// needs a context of its own, which has run the same batch before without being recorded.
    ///
    /// # Errors
    /// [`TensorRtError::Interface`] if an input is too short, [`TensorRtError::Refused`] if
    /// TensorRT refuses, as it does for a batch larger than the build's.
    pub fn enqueue(
        &mut self,
        stream: &Stream,
        batch: usize,
        inputs: &[View<f32>],
        output: View<f32>,
    ) -> Result<(), TensorRtError> {
        let calls = &self.engine.tensorrt.calls;
        let short = |(words, input): (&View<f32>, &Input)| words.len() < batch * input.words();
        if inputs.len() != self.engine.inputs.len()
            || inputs.iter().zip(&self.engine.inputs).any(short)
        {
            return Err(TensorRtError::Interface(format!(
                "the inputs do not hold {batch} samples"
            )));
        }

        // A batch that is larger than the last class is refused when it is bound.
        let classes = &self.engine.batches;
        let class = classes.partition_point(|c| c.most < batch).min(classes.len() - 1);
        let context = self.context.get();
        // SAFETY: the context is one of the shim's, and the stream is alive.
        let code = unsafe { (calls.choose)(context, class as i32, stream.raw().cast()) };
        if code != outcome::DONE {
            let problem = format!("the profile of batch {batch} cannot be chosen");
            return Err(TensorRtError::Refused(problem));
        }

        let refused = |name: &CStr| TensorRtError::Refused(format!("{name:?}, batch {batch}"));
        let bind = |name: &CStr, tensor: InputShape, address: u64| {
            // SAFETY: the name and the shape outlive the call; the address is of memory of the
            // tensor's size.
            let code =
                unsafe { (calls.bind)(context, &tensor, batch as i64, address as *mut c_void) };
            if code == outcome::DONE { Ok(()) } else { Err(refused(name)) }
        };
        // TensorRT demands a run after a shape is set, before one is recorded.
        let has_shapes = self.batch.take() == Some(batch);
        for (input, words) in self.engine.inputs.iter().zip(inputs) {
            let shape = if has_shapes { without_shape(&input.name) } else { input.shape() };
            bind(&input.name, shape, words.address())?;
        }
        let name = self.engine.output.as_c_str();
        bind(name, without_shape(name), output.address())?;
        self.batch = Some(batch);

        // SAFETY: every tensor is bound; the stream is alive.
        let code = unsafe { (calls.enqueue)(context, stream.raw().cast()) };
        if code != outcome::DONE {
            return Err(refused(name));
        }
        stream.count_launch();
        Ok(())
    }
}

/// Returns a tensor whose address alone is set.
fn without_shape(name: &CStr) -> InputShape {
    InputShape { name: name.as_ptr(), shape: null(), rank: 0, is_f16: 0 }
}

/// Returns the inputs for the shim.
fn c_inputs(build: &Build) -> Result<Vec<Input>, TensorRtError> {
    let input = |input: &BuildInput| {
        let shape = input.shape.iter().map(|&s| s as i64).collect();
        Ok(Input { name: c_string(input.name)?, shape, of: input.of })
    };
    build.inputs.iter().map(input).collect()
}
