//! The committed kernel images belong to their sources, within the register budget and without
//! spills. `kernels/cuda/make --check` compares them with a new build. Also: the errors on a
//! machine without a GPU.

use hatchback::clock::SystemClock;
use hatchback::request::serving::Serving;
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::KeySpaces;
use hatchback_kernels::cuda::Device;
use hatchback_kernels::cuda::driver::{CudaError, Gpu, Images, Profile};
use hatchback_kernels::gpu::GpuDense;
use hatchback_kernels::gpu::gather::PlainGather;
use hatchback_kernels::gpu::tables::{DeviceTables, TableStorage};
use hatchback_tests::models::repository;
use hatchback_tests::standin;
use std::ffi::CString;
use std::process::Command;
use std::sync::Arc;

/// The report of the machine code lists sources and images by their hashes, so this test needs no
/// compiler.
#[test]
fn every_kernel_is_within_its_budget() {
    let done = Command::new("python3")
        .arg(repository("kernels/cuda/make"))
        .arg("--budget")
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// The machine's own driver can only be tested before the stand-in is loaded, so the test runs in a
/// process of its own.
#[test]
fn without_a_gpu_the_reason_is_typed() {
    const CHILD: &str = "HATCHBACK_WITHOUT_STANDIN";
    if std::env::var_os(CHILD).is_some() {
        match Gpu::open(Profile::default()) {
            Err(e @ (CudaError::NoDriver | CudaError::NoGpu | CudaError::TooOld { .. })) => {
                println!("refused: {e}")
            }
            Err(e) => panic!("{e}"),
            Ok(gpu) => println!("SKIPPED: this machine has a GPU: {}", gpu.name()),
        }
        return;
    }
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cuda_build::without_a_gpu_the_reason_is_typed", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(
        run.status.success() && (said.contains("refused: ") || said.contains("SKIPPED")),
        "{said}"
    );
}

const CAR: &[u8] = include_bytes!("../../../kernels/cuda/built/changes.sm_87.cubin.zst");
const DESK: &[u8] = include_bytes!("../../../kernels/cuda/built/changes.sm_90.cubin.zst");

const PTX: &[u8] = include_bytes!("../../../kernels/cuda/built/changes.ptx.zst");

/// The board refuses kernels without machine code for its GPU, and damaged ones. A desk's GPU
/// without machine code of its own uses the PTX, if its driver knows that version of PTX.
#[test]
fn every_gpu_gets_the_kernels_that_fit_or_a_reason() {
    let _turn = standin::alone();
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: a real driver drives one GPU only");
    };
    let [board, desk] = [true, false].map(|tegra| Gpu::open(Profile { tegra }).unwrap());
    assert!(board.integrated() && board.sm() == 87);

    let refused = |gpu: &Arc<Gpu>, cubins| {
        let e = gpu.module(&Images { name: "x", cubins, ptx: b".version 7.4" }).err().unwrap();
        assert!(matches!(&e, CudaError::NoKernels { .. }), "{e}");
        e.to_string()
    };

    assert!(
        refused(&board, &[(90, DESK)])
            .contains("`x` has no machine code for compute capability 87")
    );
    assert!(refused(&board, &[(90, DESK)]).contains("Tegra profile"));
    assert!(refused(&board, &[(87, DESK)]).contains("refused"));
    assert!(refused(&board, &[(87, b"\x7fELF, and then something else")]).contains("refused"));
    assert!(refused(&desk, &[(90, DESK)]).contains("refused its PTX"));

    let module = board.module(&Images { name: "x", cubins: &[(87, CAR)], ptx: b"" }).unwrap();
    assert!(module.kernel("insert_rows").is_ok());
    let missing = module.kernel("no_such_kernel").err().unwrap();
    assert!(matches!(&missing, CudaError::Driver { call: "no_such_kernel", .. }), "{missing}");

    let cubins = &[(87, CAR), (90, DESK)];
    for (device, sm, integrated) in
        [(c"desk", 90, false), (c"ptx", 89, false), (c"board", 87, true)]
    {
        stand_in.device(device);
        let gpu = Gpu::open(Profile::default()).unwrap();
        assert_eq!((gpu.sm(), gpu.integrated()), (sm, integrated));
        let module = gpu.module(&Images { name: "x", cubins, ptx: PTX }).unwrap();
        assert!(
            module.kernel("update_rows").is_ok() && module.kernel("update_row").is_err(),
            "{device:?}"
        );
    }

    // Kernels of a folder, for development: never on a Tegra.
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("x.sm_87.cubin.zst"), CAR).unwrap();
    stand_in.device(c"board");
    let tried = Gpu::with_kernels(Profile::default(), folder.path()).unwrap();
    let (other, none) =
        (Images { name: "y", cubins, ptx: PTX }, Images { name: "x", cubins: &[], ptx: b"" });
    assert!(tried.module(&none).unwrap().kernel("insert_rows").is_ok());
    let e = tried.module(&other).err().unwrap().to_string();
    assert!(e.contains("y.ptx"), "{e}");
    let e = Gpu::with_kernels(Profile { tegra: true }, folder.path()).err().unwrap().to_string();
    assert!(e.contains("a Tegra runs built-in kernels only"), "{e}");

    // Without the Tegra profile the board's driver would compile the PTX, whose version it knows,
    // but no newer version.
    assert!(board.module(&Images { name: "x", cubins: &[], ptx: PTX }).is_err());
    assert!(desk.module(&Images { name: "x", cubins: &[], ptx: PTX }).is_ok());

    let ptx = String::from_utf8(zstd::decode_all(PTX).unwrap()).unwrap();
    let newer = ptx.replace(".version 7.4", ".version 7.8").leak().as_bytes();
    let e = desk.module(&Images { name: "x", cubins: &[], ptx: newer }).err().unwrap().to_string();
    assert!(e.contains("refused its PTX"), "{e}");

    for (device, what) in
        [(c"old driver", "the CUDA driver is 11.2"), (c"old GPU", "compute capability is 7.5")]
    {
        stand_in.device(device);
        let e = Gpu::open(Profile::default()).err().unwrap();
        assert!(matches!(&e, CudaError::TooOld { .. }) && e.to_string().contains(what), "{e}");
    }

    stand_in.device(c"board");
}

/// Machine code runs on later minor revisions of its capability, but a Tegra's is a Tegra's alone.
/// Thor is 10.1 with CUDA 12 and 11.0 with CUDA 13.
#[test]
fn each_capability_gets_its_machine_code_and_an_unknown_one_the_ptx() {
    let _turn = standin::alone();
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: a real driver drives one GPU only");
    };
    let load = |sm: u32, tegra: bool| {
        stand_in.device(&CString::new(format!("sm_{sm}")).unwrap());
        let gpu = Gpu::open(Profile { tegra }).unwrap();
        assert_eq!(gpu.sm(), sm);
        PlainGather::load(&gpu).map(|_| stand_in.counts().image)
    };

    const PTX_IMAGE: u64 = 0;
    let own = [80, 86, 87, 89, 90, 100, 101, 110, 120].map(|sm| (sm, u64::from(sm)));
    let earlier = [(103, 100), (121, 120), (88, 86)];
    let unknown = [(130, PTX_IMAGE), (111, PTX_IMAGE)];
    for (sm, image) in own.into_iter().chain(earlier).chain(unknown) {
        assert_eq!(load(sm, false).unwrap(), image, "{sm}");
    }
    for sm in [87, 101, 110] {
        assert_eq!(load(sm, true).unwrap(), u64::from(sm));
    }
    for sm in [88, 103, 111, 130] {
        let e = load(sm, true).err().unwrap();
        assert!(matches!(&e, CudaError::NoKernels { .. }), "{sm}: {e}");
    }
    stand_in.device(c"board");
}

/// The stand-in takes 64 MiB of a GPU's memory for each module. That of the board is the host's,
/// whose free bytes say nothing of this process.
#[test]
fn what_the_driver_takes_is_measured_at_the_start_and_a_line_of_the_memory() {
    const MODULES_BYTES: u64 = 3 * (64 << 20);
    let _turn = standin::alone();
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: a real driver does not say what it takes");
    };
    for (name, is_board) in [(c"desk", false), (c"board", true)] {
        stand_in.device(name);
        let device = Device::cuda(Profile { tegra: is_board }).unwrap();
        let serving = Serving::new(1 << 30, 8, Arc::new(SystemClock::default()));
        let serving = serving.on(device, GpuDense::default());
        let lines = serving.memory_beside().lines();
        let [(line, bytes)] = lines[..] else { panic!("{lines:?}") };
        assert!(line.starts_with("driver of the GPU"), "{line}");
        assert_eq!(bytes >= MODULES_BYTES, !is_board, "{name:?}: {bytes}");
        assert_eq!(serving.memory_taken(), bytes, "no module is left to be counted again");
    }
}

/// What is in use before the models is measured, and tables beyond the rest are refused before the
/// first copy. The error has the bytes of all tables and those that are free.
#[test]
fn tables_beyond_the_free_memory_of_a_gpu_are_refused_with_both_numbers() {
    const ALL: u64 = 512 << 20;
    let _turn = standin::alone();
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: other programs change the free memory of a real GPU");
    };
    stand_in.device(c"small");
    // The context, and another program.
    let _module = PlainGather::load(&Gpu::open(Profile::default()).unwrap()).unwrap();
    let gpu = Gpu::open(Profile::default()).unwrap();
    let used = gpu.used_bytes();
    assert!(((32 + 64) << 20..ALL).contains(&used), "{used}");

    let tables = |rows| {
        let spaces = KeySpaces::new(vec![Some(rows)]);
        let cache = Cache::whole(1024, usize::MAX, &spaces).unwrap();
        let bytes = cache.bytes() as u64;
        (bytes, DeviceTables::new(&gpu, vec![TableStorage::Cached(0)], vec![cache], &[]))
    };
    assert!(tables(1000).1.is_ok());
    // Half of the cache would fit, and its first copy too.
    let (bytes, refused) = tables((ALL - used) >> 10);
    let Err(CudaError::NoRoom { needed, free }) = refused else { panic!("{:?}", refused.err()) };
    assert!(needed == bytes && free < ALL - used, "{needed} of {bytes}, {free} free");

    let refused = gpu.buffer::<u8>(ALL as usize).err().unwrap().to_string();
    assert!(refused.contains(&ALL.to_string()) && refused.contains(" bytes are free"), "{refused}");
    stand_in.device(c"board");
    assert_eq!(Gpu::open(Profile { tegra: true }).unwrap().used_bytes(), 0);
}
