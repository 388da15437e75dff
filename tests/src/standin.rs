//! The GPU that the tests run on: a stand-in for the CUDA driver (`tests/standin`), which runs the
//! product's kernels on the host. The first test builds it. With `HATCHBACK_GPU=real` in the
//! environment the tests run on the machine's own GPU. The stand-in plays the board's GPU, or with
//! `STANDIN_DEVICE=desk` a GPU with memory of its own.

#![allow(unsafe_code)]

use hatchback_kernels::cuda::driver::{Gpu, Profile};
use libloading::Library;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Counts of driver calls since the process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Kernels and graphs launched.
    pub launches: u64,
    /// Times that the host waited for the device.
    pub waits: u64,
    /// Copies between host and device.
    pub copies: u64,
    /// Bytes that are allocated.
    pub bytes: u64,
    /// Whether some work is not finished.
    pub busy: bool,
    /// Kernels launched for the first time: a driver allocates memory for each.
    pub loaded: u64,
    /// Blocks of threads that kernels have begun.
    pub blocks: u64,
    /// Nodes of the graph that was launched last.
    pub nodes: u64,
    /// Nodes of its longest chain, each of which starts after the one before.
    pub chain: u64,
    /// Compute capability of the machine code that was loaded last; 0 if it was PTX.
    pub image: u64,
}

/// The stand-in, loaded.
pub struct StandIn(Library);

/// Builds the stand-in with additional compiler `flags`; returns the library.
pub fn build(name: &str, flags: &[&str]) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = here.join("../target").join(name);
    let made = Command::new(here.join("standin/make")).arg(&out).args(flags).status();
    assert!(made.is_ok_and(|status| status.success()), "tests/standin/make needs g++");
    out.join("libcuda.so")
}

/// Loads the stand-in so that the product finds it as the driver; returns `None` if the tests run
/// on the machine's own GPU.
pub fn load() -> Option<&'static StandIn> {
    static LOADED: OnceLock<Option<StandIn>> = OnceLock::new();
    LOADED
        .get_or_init(|| {
            if std::env::var("HATCHBACK_GPU").is_ok_and(|gpu| gpu == "real") {
                return None;
            }
            let path = std::env::var_os("HATCHBACK_STANDIN")
                .map_or_else(|| build("standin", &[]), PathBuf::from);
            // SAFETY: the stand-in's initialization only fills a table. Its SONAME is the driver's,
            // so code that loads the driver by name gets the stand-in.
            Some(StandIn(unsafe { Library::new(path) }.unwrap()))
        })
        .as_ref()
}

/// Loads the stand-ins for cuBLAS and cuBLASLt, so that the product finds them; returns `false` if
/// the tests run on the machine's own GPU. The libraries have the names that they have in CUDA 13.
pub fn load_cublas() -> bool {
    cublas_lt().is_some()
}

/// Makes the stand-in for cuBLASLt refuse every product, or none.
pub fn refuse_epilogues(refuse: bool) {
    let Some([_, lt]) = cublas_lt() else { return };
    // SAFETY: the function has this type in tests/standin/libcublas.cpp.
    unsafe { lt.get::<extern "C" fn(i32)>(b"standin_lt_refuse\0").unwrap()(refuse.into()) };
}

/// Returns the objects of the stand-in for cuBLASLt that are not destroyed.
pub fn epilogue_objects() -> i32 {
    let Some([_, lt]) = cublas_lt() else { return 0 };
    // SAFETY: the function has this type in tests/standin/libcublas.cpp.
    unsafe { lt.get::<extern "C" fn() -> i32>(b"standin_lt_objects\0").unwrap()() }
}

fn cublas_lt() -> Option<&'static [Library; 2]> {
    static LOADED: OnceLock<Option<[Library; 2]>> = OnceLock::new();
    let of_driver = || {
        std::env::var_os("HATCHBACK_STANDIN").map_or_else(|| build("standin", &[]), PathBuf::from)
    };
    // SAFETY: the stand-ins run no code when they are loaded; their SONAMEs are the product's.
    let library = |name| unsafe { Library::new(of_driver().with_file_name(name)) }.unwrap();
    let both = || ["libcublas.so.13", "libcublasLt.so.13"].map(library);
    LOADED.get_or_init(|| load().map(|_| both())).as_ref()
}

/// Returns whether the GPU shares the host's memory, as the stand-in does by default.
pub fn is_board() -> bool {
    load().is_some() && std::env::var_os("STANDIN_DEVICE").is_none()
}

impl StandIn {
    /// Makes later openings of the GPU find the device with this name in tests/standin/libcuda.cpp,
    /// or for `sm_NNN` a desk's GPU of that compute capability.
    pub fn device(&self, name: &std::ffi::CStr) {
        // SAFETY: the function has this type in tests/standin/libcuda.cpp and keeps nothing of its
        // argument.
        unsafe {
            let device = self.0.get::<extern "C" fn(*const std::ffi::c_char)>(b"standin_device\0");
            device.unwrap()(name.as_ptr());
        }
    }

    /// Sets the seed that decides the order of all later work.
    pub fn seed(&self, seed: u64) {
        // SAFETY: the function has this type in tests/standin/libcuda.cpp.
        unsafe { self.0.get::<extern "C" fn(u64)>(b"standin_seed\0").unwrap()(seed) };
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> Counts {
        let mut out = [0u64; 10];
        // SAFETY: the function has this type in tests/standin/libcuda.cpp and writes ten numbers.
        unsafe {
            self.0.get::<extern "C" fn(*mut u64)>(b"standin_counts\0").unwrap()(out.as_mut_ptr())
        };
        let [launches, waits, copies, bytes, busy, loaded, blocks, nodes, chain, image] = out;
        let busy = busy != 0;
        Counts { launches, waits, copies, bytes, busy, loaded, blocks, nodes, chain, image }
    }

    /// Counts bytes over the bus from now on. Returns those that the GPU read from host memory, and
    /// wrote there, since the last call.
    pub fn bus_bytes(&self) -> [u64; 2] {
        let mut out = [0; 2];
        // SAFETY: the function has this type in tests/standin/libcuda.cpp and writes two numbers.
        unsafe {
            self.0.get::<extern "C" fn(*mut u64)>(b"standin_bus\0").unwrap()(out.as_mut_ptr())
        };
        out
    }

    /// Holds every call that frees memory, or lets all go.
    pub fn hold_frees(&self, hold: bool) {
        // SAFETY: the function has this type in tests/standin/libcuda.cpp.
        unsafe { self.0.get::<extern "C" fn(i32)>(b"standin_hold_frees\0").unwrap()(hold.into()) };
    }

    /// Lets the oldest call go that is held.
    pub fn let_free(&self) {
        // SAFETY: the function has this type in tests/standin/libcuda.cpp.
        unsafe { self.0.get::<extern "C" fn()>(b"standin_let_free\0").unwrap()() }
    }

    /// Returns the calls that are held.
    pub fn frees_held(&self) -> i32 {
        // SAFETY: the function has this type in tests/standin/libcuda.cpp.
        unsafe { self.0.get::<extern "C" fn() -> i32>(b"standin_frees_held\0").unwrap()() }
    }

    /// Makes the calls that [`StandIn::fault`] lets fail return `code`; at first it is
    /// `CUDA_ERROR_OUT_OF_MEMORY`, which is 2.
    pub fn fault_code(&self, code: i32) {
        // SAFETY: the function has this type in tests/standin/libcuda.cpp.
        unsafe { self.0.get::<extern "C" fn(i32)>(b"standin_fault_code\0").unwrap()(code) };
    }

    /// Makes `times` calls fail after `after` more calls of their kind; the GPU keeps running.
    /// `what` is the name of a kernel that is launched, `graph` for the launch of a graph, `wait`
    /// for a wait for a stream, or `pinned memory` for its allocation.
    pub fn fault(&self, what: &std::ffi::CStr, after: u32, times: u32) {
        // SAFETY: the function has this type in tests/standin/libcuda.cpp and keeps nothing of its
        // argument.
        unsafe {
            let fault =
                self.0.get::<extern "C" fn(*const std::ffi::c_char, u32, u32)>(b"standin_fault\0");
            fault.unwrap()(what.as_ptr(), after, times);
        }
    }
}

/// Opens the GPU of the tests and prints its name. `seed` decides the stand-in's order of steps.
pub fn gpu(seed: u64) -> Arc<Gpu> {
    if let Some(stand_in) = load() {
        stand_in.seed(seed);
    }
    static OPEN: OnceLock<Arc<Gpu>> = OnceLock::new();
    Arc::clone(OPEN.get_or_init(|| {
        let gpu = Gpu::open(Profile { tegra: is_board() }).unwrap();
        println!("running on {}", gpu.name());
        gpu
    }))
}

/// Waits until no test of this process is [`alone`]. The caller holds the result while it runs.
pub fn shared() -> RwLockReadGuard<'static, ()> {
    TURNS.read().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until no other test of this process uses the GPU. For a test that counts calls of the
/// driver, or lets some fail: both are the whole process's.
pub fn alone() -> RwLockWriteGuard<'static, ()> {
    TURNS.write().unwrap_or_else(PoisonError::into_inner)
}

static TURNS: RwLock<()> = RwLock::new(());

/// Runs the tests of this program whose names have one of `parts` again on a GPU with memory of its
/// own. AddressSanitizer watches that memory, and the alignment of every access is checked, as a
/// GPU requires.
pub fn again_under_address_sanitizer(parts: &[&str]) {
    if std::env::var_os("HATCHBACK_STANDIN").is_some() {
        return;
    }
    if load().is_none() {
        return println!(
            "SKIPPED: AddressSanitizer: only the stand-in has memory that it can watch"
        );
    }
    let watched = [
        "-fsanitize=address,alignment",
        "-fno-sanitize-recover=alignment",
        "-fno-omit-frame-pointer",
    ];
    let library = build("standin-asan", &watched);
    let runtime = Command::new("g++").arg("-print-file-name=libasan.so").output().unwrap();
    let run = Command::new(std::env::current_exe().unwrap())
        .args(parts)
        .env("HATCHBACK_STANDIN", &library)
        .env("STANDIN_DEVICE", "desk")
        .env("LD_PRELOAD", String::from_utf8(runtime.stdout).unwrap().trim())
        // The test program is not instrumented itself, and keeps the driver until it exits.
        .env("ASAN_OPTIONS", "detect_leaks=0")
        .output()
        .unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{said}");
}
