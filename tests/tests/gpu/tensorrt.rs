//! TensorRT without TensorRT. The shim is built against the headers of a twin (`tests/tensorrt`),
//! and the twin is loaded as the library. The tests check what is refused and why, and the plans on
//! disk. On the stand-in for a GPU they check that an engine whose scores differ from the CPU's is
//! never used. With TENSORRT_RTX set (by `tests/tensorrt/rtx`), TensorRT for RTX builds every
//! network of the repository on the CPU.

use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::{KeySpaces, RowKey};
use hatchback_kernels::cache::codec::{Codec, RowFormat};
use hatchback_kernels::cuda::Device;
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::cuda::memory::View;
use hatchback_kernels::dense::{Activation, DenseEngine, InputPart};
use hatchback_kernels::gpu::lookup::{FeatureOnDevice, Keys, LookupLimits, RequestSize};
use hatchback_kernels::gpu::step::{Step, StepInputs};
use hatchback_kernels::gpu::tables::{DeviceTables, TableStorage};
use hatchback_kernels::gpu::tensorrt::{
    BatchClass, Build, BuildInput, Plans, TensorRt, TensorRtError, Types, Version,
};
use hatchback_kernels::gpu::{
    DenseNetwork, DeviceEngine, DeviceOptions, GpuDense, InputType, Precision, RunShape,
    TensorRtOptions,
};
use hatchback_kernels::lookup::miss_list::{MissList, RowState};
use hatchback_kernels::lookup::{Bags, LookupStatus, Pooling};
use hatchback_tests::models::repository;
use hatchback_tests::standin;
use hatchback_tools::report::metrics::largest_difference;
use hatchback_tools::workload::onnx::{Graph, Type};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};

/// A shim and the twin of a TensorRT release.
#[derive(Clone)]
pub struct Twin {
    pub shim: PathBuf,
    pub library: PathBuf,
}

fn run(command: &mut Command) -> std::process::Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Compiles the twin of release `major.minor`, once: a loaded library must not be overwritten.
fn compile(major: u32, minor: u32, library_only: &[&str]) -> Twin {
    static MADE: Mutex<BTreeMap<String, Twin>> = Mutex::new(BTreeMap::new());
    let name = format!("twin-{major}.{minor}{}", library_only.concat());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(twin) = made.get(&name) {
        return twin.clone();
    }
    let twin = compile_into(&name, major, minor, library_only);
    made.insert(name, twin.clone());
    twin
}

pub fn compile_into(name: &str, major: u32, minor: u32, library_only: &[&str]) -> Twin {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    let release = format!("-DTWIN_MAJOR={major} -DTWIN_MINOR={minor}");
    if library_only.is_empty() {
        let mut make = Command::new(repository("kernels/tensorrt/make"));
        make.arg(&folder).env("TENSORRT_INCLUDE", repository("tests/tensorrt"));
        run(make.env("CXX", format!("c++ {release}")));
    }
    let library = folder.join("libtwin.so");
    let mut cc = Command::new("c++");
    // Several releases are loaded into one process, and each must use its own functions.
    cc.args(["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-shared", "-o"])
        .arg(&library)
        .args(release.split(' '));
    run(cc.args(library_only).arg(repository("tests/tensorrt/twin.cpp")).arg("-ldl"));
    Twin { shim: folder.join("libhatchback_tensorrt.so"), library }
}

pub fn twin() -> Twin {
    compile(8, 6, &[])
}

fn open(shim: &Path, library: &Path) -> Result<TensorRt, TensorRtError> {
    TensorRt::open(shim, Some((library, library)))
}

fn refusal(shim: &Path, library: &Path) -> TensorRtError {
    open(shim, library).err().unwrap()
}

/// A network that computes the same as the twin does for any network: the sum of the inputs.
fn sum_network() -> Vec<u8> {
    sum_network_of(5)
}

/// The same of inputs that are `width` wide.
fn sum_network_of(width: usize) -> Vec<u8> {
    let mut graph = Graph::default();
    graph.input("x", Type::Float, &[width]);
    graph.integers("axes", &[1], &[1]);
    graph.node("ReduceSum", &["x", "axes"], "sum", &[]);
    graph.output("sum", &[1]);
    graph.file()
}

fn input<'a>(name: &'a str, shape: &[usize]) -> BuildInput<'a> {
    BuildInput { name, shape: shape.to_vec(), of: InputType::F32 }
}

fn build<'a>(onnx: &'a [u8], output: &'a str, fp16: bool) -> Build<'a> {
    Build {
        onnx,
        inputs: vec![input("x", &[5])],
        output,
        batches: BatchClass::up_to(32),
        workspace_bytes_max: 1 << 20,
        types: if fp16 { Types::F16 } else { Types::F32 },
        compute_capability: None,
    }
}

#[test]
fn a_missing_library_or_entry_is_named() {
    let _turn = standin::shared();
    let twin = twin();
    let nowhere = Path::new("/nowhere/libhatchback_tensorrt.so");
    let said = refusal(nowhere, &twin.library).to_string();
    assert!(said.contains("No such file") && said.contains("kernels/tensorrt/make"), "{said}");

    let said = refusal(&twin.shim, Path::new("/nowhere/libnvinfer.so.8"));
    assert!(
        matches!(&said, TensorRtError::NoLibrary(text) if text.contains("/nowhere/")),
        "{said}"
    );

    let said = TensorRt::open(&twin.shim, Some((&twin.library, Path::new("/nowhere/parser.so"))))
        .err()
        .unwrap();
    assert!(
        matches!(&said, TensorRtError::NoLibrary(text) if text.contains("parser.so")),
        "{said}"
    );

    let said = refusal(&twin.library, &twin.library);
    assert!(
        matches!(&said, TensorRtError::NoEntry(name) if name == "hatchback_trt_interface"),
        "{said}"
    );

    let said = refusal(&twin.shim, &twin.shim);
    assert!(
        matches!(&said, TensorRtError::NoEntry(name) if name == "getInferLibVersion"),
        "{said}"
    );

    let lacking = compile(8, 6, &["-DTWIN_LACKS_BUILDER"]);
    let said = refusal(&twin.shim, &lacking.library);
    assert!(
        matches!(&said, TensorRtError::NoEntry(name) if name.contains("createInfer")),
        "{said}"
    );
}

#[test]
fn another_release_than_the_headers_is_refused_before_any_call() {
    let _turn = standin::shared();
    for (major, minor) in [(8, 5), (11, 4)] {
        let other = compile(major, minor, &[]);
        let said = refusal(&twin().shim, &other.library);
        let expected = format!("the library is {major}.{minor}.3, the shim was built for 8.6.3");
        assert!(
            matches!(said, TensorRtError::Version { .. }) && said.to_string().contains(&expected),
            "{said}"
        );
        assert_eq!(
            open(&other.shim, &other.library).unwrap().version().to_string(),
            format!("{major}.{minor}.3")
        );
    }
}

#[test]
fn the_shim_is_not_built_without_headers_and_says_what_to_do() {
    let _turn = standin::shared();
    let empty = tempfile::tempdir().unwrap();
    let mut make = Command::new(repository("kernels/tensorrt/make"));
    let output = make.arg(empty.path()).env("TENSORRT_INCLUDE", empty.path()).output().unwrap();
    if output.status.success() {
        return println!("SKIPPED: TensorRT's headers are installed here");
    }
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(3) && said.contains("TENSORRT_INCLUDE"), "{said}");
}

#[test]
fn networks_with_other_inputs_or_outputs_than_the_build_are_refused() {
    let _turn = standin::shared();
    let tensorrt = open(&twin().shim, &twin().library).unwrap();
    let onnx = sum_network();
    let refused = |build: &Build| tensorrt.build(build, &mut Vec::new()).unwrap_err();
    let said = refused(&build(b"", "sum", false));
    assert!(matches!(&said, TensorRtError::Refused(t) if t == "ONNX: not a network"), "{said}");
    let said = refused(&build(&onnx, "score", false));
    assert!(matches!(&said, TensorRtError::Interface(t) if t.contains("`score`")), "{said}");
    let unfed = Build { inputs: Vec::new(), ..build(&onnx, "sum", false) };
    let said = refused(&unfed);
    assert!(
        matches!(&said, TensorRtError::Interface(t) if t.contains("1 inputs, 0 are fed")),
        "{said}"
    );
    let inside = Build { inputs: vec![input("x\0y", &[5])], ..build(&onnx, "sum", false) };
    assert!(matches!(refused(&inside), TensorRtError::Interface(_)));
    let deep = Build { inputs: vec![input("x", &[1; 8])], ..build(&onnx, "sum", false) };
    assert!(matches!(refused(&deep), TensorRtError::Interface(_)));
    let newer = compile(11, 4, &[]);
    let newer = open(&newer.shim, &newer.library).unwrap();
    let said = newer.build(&build(&onnx, "sum", true), &mut Vec::new()).unwrap_err();
    assert!(matches!(said, TensorRtError::NoFp16(v) if v.to_string() == "11.4.3"), "{said}");
}

#[test]
fn plans_are_kept_for_one_file_release_gpu_and_precision_and_rebuilt_when_damaged() {
    let _turn = standin::shared();
    let tensorrt = open(&twin().shim, &twin().library).unwrap();
    let (onnx, folder) = (sum_network(), tempfile::tempdir().unwrap());
    let plans = Plans::new(&folder.path().join("plans"));
    let get_from = |plans: &Plans, gpu: &str, build: &Build| {
        let path = plans.path(&tensorrt, gpu, build);
        if let Some(plan) = plans.kept(&path).unwrap() {
            return (plan, false);
        }
        let plan = tensorrt.build(build, &mut Vec::new()).unwrap();
        plans.keep(&path, &plan);
        (plan, true)
    };

    let get = |gpu: &str, build: &Build| get_from(&plans, gpu, build);
    let asked = build(&onnx, "sum", false);
    let (plan, new) = get("Orin", &asked);
    assert!(new && plan.starts_with(b"twin 8603"));
    assert_eq!(get("Orin", &asked), (plan.clone(), false));

    let (other_onnx, other_newer) = (sum_network().repeat(2), compile(8, 5, &[]));
    let newer = open(&other_newer.shim, &other_newer.library).unwrap();
    let others = [
        plans.path(&tensorrt, "H200", &asked),
        plans.path(&newer, "Orin", &asked),
        plans.path(&tensorrt, "Orin", &build(&onnx, "sum", true)),
        plans.path(&tensorrt, "Orin", &build(&other_onnx, "sum", false)),
        plans.path(&tensorrt, "Orin", &Build { batches: BatchClass::up_to(64), ..asked.clone() }),
        plans.path(
            &tensorrt,
            "Orin",
            &Build { inputs: vec![input("x", &[1, 5])], ..asked.clone() },
        ),
    ];

    let path = plans.path(&tensorrt, "Orin", &asked);
    assert!(others.iter().all(|other| *other != path && other.parent() == path.parent()));
    let whole = std::fs::read(&path).unwrap();
    let mut altered = whole.clone();
    altered[3] ^= 1;

    for damaged in [&altered[..], &whole[..whole.len() - 1], &whole[..5], b""] {
        std::fs::write(&path, damaged).unwrap();
        assert_eq!(get("Orin", &asked), (plan.clone(), true));
        assert_eq!(std::fs::read(&path).unwrap(), whole);
    }

    // In a folder that cannot be written, the plan is built every time.
    let nowhere = Plans::new(Path::new("/dev/null/plans"));
    for _ in 0..2 {
        assert_eq!(get_from(&nowhere, "Orin", &asked), (plan.clone(), true));
    }

    plans.keep(&path, &[]);
    assert!(matches!(plans.kept(&path), Err(TensorRtError::Useless { .. })));
    std::fs::remove_file(&path).unwrap();

    // The most recently used plans are kept.
    let sized = |batch_max| Build { batches: BatchClass::up_to(batch_max), ..asked.clone() };
    for batch_max in 8..20 {
        assert!(get("Orin", &sized(batch_max)).1);
        // Files of the same time have no order.
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!get("Orin", &sized(8)).1);
        std::thread::sleep(std::time::Duration::from_millis(20));
    }

    let kept = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
    assert_eq!(kept, 8);
    assert!(
        (13..20)
            .chain([8])
            .all(|batch_max| plans.path(&tensorrt, "Orin", &sized(batch_max)).exists())
    );
}

fn options(fp16: bool, plans: &Path) -> DeviceOptions {
    options_of(twin(), fp16, plans)
}

fn options_of(Twin { shim, library }: Twin, fp16: bool, plans: &Path) -> DeviceOptions {
    let (libraries, plans) = (Some((library.clone(), library)), plans.to_owned());
    let tensorrt = TensorRtOptions { shim, libraries, plans, workspace_bytes_max: 1 << 20 };
    let precision = if fp16 { Precision::F16 } else { Precision::F32 };
    let dense = GpuDense { tensorrt: Some(tensorrt), precision };
    DeviceOptions { dense, batch_max: 40, f16_inputs: Vec::new(), fed: Vec::new() }
}

/// Builds the plan of `network`, unless a good one is kept, and loads the network with it.
fn built(gpu: &Arc<Gpu>, network: &DenseNetwork, options: &DeviceOptions) -> DeviceEngine {
    match DeviceEngine::build_plan(gpu, network, options) {
        Ok(Some(plan)) => plan.keep(),
        Ok(None) => {}
        Err(e) => println!("{e}"),
    }
    DeviceEngine::load(gpu, network, options).unwrap()
}

#[test]
fn an_engine_runs_on_the_device_once_its_scores_are_the_cpus() {
    let _turn = standin::shared();
    let gpu = standin::gpu(3);
    let (onnx, folder) = (sum_network(), tempfile::tempdir().unwrap());
    let network = DenseNetwork {
        onnx: &onnx,
        inputs: &[("x", 5)],
        parts: &[],
        output: "sum",
        activation: Activation::Sigmoid,
    };

    let cpu = DenseEngine::load(onnx.clone(), network.inputs, "sum", Activation::Sigmoid).unwrap();
    for (fp16, is_built) in [(false, true), (false, false), (true, true)] {
        let options = options(fp16, folder.path());
        // A load never builds.
        let engine = DeviceEngine::load(&gpu, &network, &options).unwrap();
        assert_eq!(engine.runs_on().contains("TensorRT"), !is_built, "{}", engine.runs_on());
        let plan = DeviceEngine::build_plan(&gpu, &network, &options).unwrap();
        assert_eq!(plan.is_some(), is_built);
        plan.into_iter().for_each(|plan| plan.keep());
        let engine = DeviceEngine::load(&gpu, &network, &options).unwrap();
        let name = engine.runs_on();
        assert!(name.starts_with("TensorRT 8.6.3") && !engine.is_exact(), "{name}");

        let (mut scratch, stream) = (engine.scratch(40).unwrap(), gpu.stream().unwrap());
        for batch in [1, 3, 40] {
            let values: Vec<f32> = (0..5 * batch).map(|i| (i as f32 * 0.37).sin()).collect();
            let (fed, scores) = ([gpu.buffer(values.len()).unwrap()], gpu.buffer(batch).unwrap());
            stream.upload(&values, &fed[0], 0).unwrap();
            engine.enqueue(&stream, batch, &fed, scores.view(), &mut scratch).unwrap();
            let (mut ours, mut theirs) = (vec![0.0; batch], vec![0.0; batch]);
            stream.download(&scores, 0, &mut ours).unwrap();
            cpu.run(batch, &[values], &mut theirs, &mut cpu.scratch(batch)).unwrap();
            let far = largest_difference(&ours, &theirs);
            assert!(if fp16 { far > 0.0 && far < 1e-3 } else { far == 0.0 }, "{far}");
            stream.upload(&vec![0.0; batch], &scores, 0).unwrap();
        }

        assert!(engine.scratch(41).is_err());
        assert!(engine.enqueue(&stream, 41, &[], View::none(), &mut scratch).is_err());
    }

    // A kept plan that the library refuses is built again, once.
    let plans = Plans::new(folder.path());
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().unwrap() == "plan" {
            plans.keep(&path, b"whole, and no plan");
        }
    }

    let options = options(false, folder.path());
    let engine = DeviceEngine::load(&gpu, &network, &options).unwrap();
    assert!(engine.rejected()[0].contains("plan"), "{:?}", engine.rejected());
    for is_built in [true, false] {
        let plan = DeviceEngine::build_plan(&gpu, &network, &options).unwrap();
        assert_eq!(plan.is_some(), is_built);
        plan.into_iter().for_each(|plan| plan.keep());
    }
}

#[test]
fn an_engine_with_other_scores_than_the_cpus_is_rejected() {
    let _turn = standin::shared();
    let gpu = standin::gpu(3);
    let onnx = std::fs::read(repository("tests/data/families/dlrm/dense.onnx")).unwrap();
    let inputs = [("dense", 3), ("emb", 48)];
    let network = DenseNetwork {
        onnx: &onnx,
        inputs: &inputs,
        parts: &[],
        output: "logit",
        activation: Activation::Sigmoid,
    };
    let folder = tempfile::tempdir().unwrap();
    let build = || DeviceEngine::build_plan(&gpu, &network, &options(false, folder.path()));
    let said = build().err().unwrap().to_string();
    assert!(said.contains("TensorRT 8.6.3") && said.contains("from the CPU's"), "{said}");
    // The engine is not built again.
    let said = build().err().unwrap().to_string();
    assert!(said.contains("other scores than the CPU"), "{said}");
    let engine = DeviceEngine::load(&gpu, &network, &options(false, folder.path())).unwrap();
    let said = &engine.rejected()[0];
    assert!(said.contains("other scores than the CPU"), "{said}");
}

/// The twin counts the builds of a cache. A damaged cache, or one of another release, is made
/// again.
#[test]
fn the_timings_of_a_build_are_kept_for_the_next() {
    let _turn = standin::shared();
    let gpu = standin::gpu(3);
    let folder = tempfile::tempdir().unwrap();
    let plans = Plans::new(folder.path());
    let tensorrt = open(&twin().shim, &twin().library).unwrap();
    let at = plans.timings(&tensorrt, gpu.name());
    let build = |width| {
        let onnx = sum_network_of(width);
        let (inputs, activation) = ([("x", width)], Activation::None);
        let network =
            DenseNetwork { onnx: &onnx, inputs: &inputs, parts: &[], output: "sum", activation };
        built(&gpu, &network, &options(false, folder.path()));
        String::from_utf8(plans.kept(&at).unwrap().unwrap()).unwrap()
    };
    assert_eq!([build(5), build(6)], ["timings 8603 1", "timings 8603 2"]);
    plans.keep(&at, b"timings 8503 7");
    assert_eq!(build(7), "timings 8603 1");
    plans.keep(&at, b"no timings");
    assert_eq!(build(8), "timings 8603 1");
    std::fs::write(&at, b"damaged").unwrap();
    assert_eq!(build(9), "timings 8603 1");
}

/// Device memory in which contexts of `twin.cpp` run.
const CONTEXT_BYTES: u64 = 4096;

/// Contexts of several workers use the profiles of an engine at the same time: of their own engines
/// in 8.5, and on request in 8.6.
#[test]
fn several_contexts_run_batches_of_every_class() {
    let _turn = standin::shared();
    let gpu = standin::gpu(4);
    for (major, minor) in [(8, 5), (8, 6), (9, 3), (10, 3), (11, 4)] {
        let (onnx, folder) = (sum_network(), tempfile::tempdir().unwrap());
        let activation = Activation::None;
        let network = DenseNetwork {
            onnx: &onnx,
            inputs: &[("x", 5)],
            parts: &[],
            output: "sum",
            activation,
        };
        let twin = compile(major, minor, &[]);
        let engine = built(&gpu, &network, &options_of(twin, false, folder.path()));
        assert!(engine.runs_on().contains("TensorRT"), "{major}.{minor}: {:?}", engine.rejected());
        // The engine keeps its plan in 8.5, and each context has its own weights.
        let own_weights = if (major, minor) == (8, 5) { engine.bytes() / 2 } else { 0 };
        assert!(engine.bytes() > 0);
        // The contexts of a worker share the memory of their runs.
        let bytes = engine.scratch_bytes([1, 8, 40].into_iter());
        assert_eq!(bytes, CONTEXT_BYTES + 3 * own_weights, "{major}.{minor}");

        let mut scratches = [(); 3].map(|()| engine.scratch(40).unwrap());
        let stream = gpu.stream().unwrap();
        for batch in [40, 1, 9, 8, 2, 3, 40] {
            let values: Vec<f32> = (0..5 * batch).map(|i| i as f32).collect();
            let (fed, scores) = ([gpu.buffer(values.len()).unwrap()], gpu.buffer(batch).unwrap());
            stream.upload(&values, &fed[0], 0).unwrap();
            for scratch in &mut scratches {
                engine.enqueue(&stream, batch, &fed, scores.view(), scratch).unwrap();
                let mut found = vec![0.0; batch];
                stream.download(&scores, 0, &mut found).unwrap();
                let sums = values.chunks(5).map(|sample| sample.iter().sum::<f32>());
                assert!(found.iter().copied().eq(sums), "{major}.{minor}, batch {batch}");
            }
        }
    }
}

/// TensorRT takes the values of a request as copies for each of its samples.
#[test]
fn an_engine_takes_shared_inputs_once_for_each_sample() {
    let _turn = standin::shared();
    let gpu = standin::gpu(5);
    let (onnx, folder) = (sum_network(), tempfile::tempdir().unwrap());
    let network = DenseNetwork {
        onnx: &onnx,
        inputs: &[("x", 5)],
        parts: &[InputPart { input: 0, width: 5, shared: true }],
        output: "sum",
        activation: Activation::None,
    };
    let engine = built(&gpu, &network, &options(false, folder.path()));
    assert!(engine.runs_on().contains("TensorRT"), "{:?}", engine.rejected());
    let (mut scratch, stream) = (engine.scratch(40).unwrap(), gpu.stream().unwrap());
    let values: Vec<f32> = (0..5 * 9).map(|i| if i < 10 { i as f32 } else { f32::NAN }).collect();
    let (fed, scores) = ([gpu.buffer(values.len()).unwrap()], gpu.buffer(9).unwrap());
    stream.upload(&values, &fed[0], 0).unwrap();
    let mut request_of = gpu.mapped(9).unwrap();
    request_of[7..].fill(1);
    let size = RequestSize { samples: 9, requests: 2 };
    let shape = RunShape { size, request_of: request_of.view() };
    engine.enqueue(&stream, shape, &fed, scores.view(), &mut scratch).unwrap();
    let mut found = [0.0; 9];
    stream.download(&scores, 0, &mut found).unwrap();
    assert_eq!(found, [10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 35.0, 35.0]);

    // Two columns of the input are the request's.
    let parts =
        [(2, true), (3, false)].map(|(width, shared)| InputPart { input: 0, width, shared });
    let network = DenseNetwork { parts: &parts, ..network };
    let engine = built(&gpu, &network, &options(false, folder.path()));
    let mut scratch = engine.scratch(40).unwrap();
    let own: Vec<f32> = (0..27).map(|i| i as f32).collect();
    let fed = [gpu.buffer(18).unwrap(), gpu.buffer(27).unwrap()];
    stream.upload(&[100.0, 200.0, 300.0, 400.0], &fed[0], 0).unwrap();
    stream.upload(&own, &fed[1], 0).unwrap();
    engine.enqueue(&stream, shape, &fed, scores.view(), &mut scratch).unwrap();
    stream.download(&scores, 0, &mut found).unwrap();
    let sums = own.chunks(3).zip([300.0; 7].into_iter().chain([700.0; 2]));
    assert_eq!(
        found.to_vec(),
        sums.map(|(own, s)| s + own.iter().sum::<f32>()).collect::<Vec<_>>()
    );
}

/// An engine that takes no inputs of f16 gets f32, and says why.
#[test]
fn refused_inputs_of_f16_stay_f32() {
    let _turn = standin::shared();
    let gpu = standin::gpu(3);
    let (onnx, folder) = (sum_network_of(8), tempfile::tempdir().unwrap());
    let activation = Activation::None;
    let network =
        DenseNetwork { onnx: &onnx, inputs: &[("x", 8)], parts: &[], output: "sum", activation };
    let (shim, refusing) = (twin().shim, compile(8, 6, &["-DTWIN_REFUSES_HALF"]).library);
    for (library, types) in [(twin().library, InputType::F16), (refusing, InputType::F32)] {
        let plans = folder.path().join(format!("{types:?}"));
        let twin = Twin { shim: shim.clone(), library };
        let options = DeviceOptions { f16_inputs: vec![0], ..options_of(twin, true, &plans) };
        let engine = built(&gpu, &network, &options);
        assert!(engine.runs_on().contains("TensorRT"), "{:?}", engine.rejected());
        assert_eq!(engine.input_types(), [types]);
        match types {
            InputType::F16 => assert!(engine.rejected().is_empty(), "{:?}", engine.rejected()),
            InputType::F32 => {
                let said = &engine.rejected()[0];
                assert!(said.starts_with("inputs of f16"), "{said}");
            }
        }
    }
}

/// Columns of the rows below.
const DIM: usize = 8;

fn value(key: u64, column: u64) -> f32 {
    (5 * key + column) as f32 / 64.0
}

fn row(key: u64) -> Vec<u8> {
    (0..DIM as u64).flat_map(|i| value(key, i).to_le_bytes()).collect()
}

/// Each batch size has a graph, and each graph its own TensorRT context; some requests have misses.
#[test]
fn recorded_requests_run_on_an_engine_for_every_size() {
    let _turn = standin::shared();
    for types in [InputType::F32, InputType::F16] {
        run_recorded_requests(types);
    }
}

fn run_recorded_requests(types: InputType) {
    let gpu = standin::gpu(5);
    let (onnx, folder) = (sum_network_of(DIM), tempfile::tempdir().unwrap());
    let activation = Activation::None;
    let network =
        DenseNetwork { onnx: &onnx, inputs: &[("x", DIM)], parts: &[], output: "sum", activation };
    let is_f16 = types == InputType::F16;
    let f16_inputs = if is_f16 { vec![0] } else { Vec::new() };
    let options = DeviceOptions { f16_inputs, ..options(is_f16, folder.path()) };
    let engine = Arc::new(built(&gpu, &network, &options));
    assert!(engine.graphs_own_scratch(), "{}", engine.runs_on());
    assert_eq!(engine.input_types(), [types]);

    let cache = Cache::new(4 * DIM, 1 << 16, &KeySpaces::new(vec![Some(100)])).unwrap();
    for key in 0..50 {
        let name = RowKey { table: 0, key };
        assert!(cache.insert(name, &row(key), cache.epoch(name)));
    }

    let tables =
        Arc::new(DeviceTables::new(&gpu, vec![TableStorage::Cached(0)], vec![cache], &[]).unwrap());
    let features = |inputs: &[u64]| {
        vec![FeatureOnDevice {
            table: 0,
            format: RowFormat::new(Codec::F32, DIM, 0).unwrap(),
            keys_end: Some(100),
            default_row: &[0.0; DIM],
            pooling: Pooling::Sum,
            weighted: false,
            shared: false,
            hotness_max: 1,
            input: inputs[0],
            input_type: types,
            stride: DIM,
            column: 0,
            width: DIM,
        }]
    };

    for keys in [Keys::InPlace, Keys::Copied] {
        let row_bytes_max = 4 * DIM;
        let limits =
            LookupLimits { batch_max: 40, misses_max: 64, row_bytes_max, keys, is_shared: false };
        let parts = InputPart::whole(&[("x", DIM)], &[false]);
        let inputs = StepInputs { parts: &parts, copies: &[] };
        let mut step = Step::new(&tables, &engine, inputs, features, limits).unwrap();
        assert!(step.refused().is_none());
        let mut misses = MissList::on(&Device::Cuda(Arc::clone(&gpu)), 64, row_bytes_max).unwrap();
        let missed = score_requests(&mut step, &mut misses, is_f16);
        // In the second round the rows of the first are cached.
        assert_eq!(missed > 0, keys == Keys::InPlace);
    }
}

/// Scores requests of many sizes on `step`, and returns how many rows were missing.
fn score_requests(step: &mut Step, misses: &mut MissList, is_f16: bool) -> usize {
    let mut missed = 0;
    for (first, batch) in [(0, 1), (7, 3), (20, 17), (10, 40), (45, 40), (30, 5), (60, 40), (0, 0)]
    {
        let keys: Vec<u64> = (first..first + batch as u64).collect();
        let (offsets, mut statuses) =
            ((0..=batch as u32).collect::<Vec<_>>(), vec![LookupStatus::default(); batch]);
        step.begin(batch, |_| Bags::new(&keys, &offsets), |_, _| {}).unwrap();

        assert!(!step.lookup().collect(misses, &mut statuses).unwrap());
        if !misses.is_empty() {
            missed += misses.list().len();
            for miss in misses.list().to_vec() {
                misses.row_mut(miss.slot).copy_from_slice(&row(miss.row.key));
                misses.set_state(miss.slot, RowState::Fresh);
            }
            step.complete(misses, &mut statuses).unwrap();
            misses.clear();
        }

        assert!(
            statuses.iter().all(|s| *s == LookupStatus { fresh: 1, ..LookupStatus::default() })
        );

        // The rows have no more bits than f16. The twin cuts the scores.
        let cut = |sum: f32| f32::from_bits(sum.to_bits() & if is_f16 { !0x1fff } else { !0 });
        let sum = |&key: &u64| cut((0..DIM as u64).map(|i| value(key, i)).sum());
        let sums: Vec<f32> = keys.iter().map(sum).collect();
        assert_eq!(step.scores(batch), sums, "{batch} from {first}");
    }
    missed
}

/// Names of the inputs, and their shapes for one sample.
type Inputs = [(&'static str, &'static [usize])];

/// Needs TENSORRT_RTX, the folder of shims and libraries, which `tests/tensorrt/rtx` sets.
#[test]
fn tensorrt_for_rtx_builds_every_network_of_the_tree_and_refuses_the_rest() {
    let _turn = standin::shared();
    let Some(folder) = std::env::var_os("TENSORRT_RTX").map(PathBuf::from) else {
        return println!(
            "SKIPPED: TENSORRT_RTX is not set; tests/tensorrt/rtx gets TensorRT for RTX and sets it"
        );
    };

    let at = |name: &str| folder.join(name);
    let libraries = (at("libtensorrt_rtx.so.1"), at("libtensorrt_onnxparser_rtx.so.1"));
    let shim = at("libhatchback_tensorrt.so");
    let tensorrt = TensorRt::open(&shim, Some((&libraries.0, &libraries.1))).unwrap();
    let networks: [(&str, &Inputs); 6] = [
        ("tests/data/families/dlrm", &[("dense", &[3]), ("emb", &[6, 8])]),
        ("tests/data/families/dcnv2", &[("dense", &[3]), ("emb", &[7, 4])]),
        ("tests/data/families/deepfm", &[("dense", &[3]), ("first", &[4]), ("second", &[4, 5])]),
        ("tests/data/families/wide_deep", &[("dense", &[3]), ("wide", &[2]), ("deep", &[35])]),
        ("tools/demo/coupon", &[("dense", &[7]), ("emb", &[18, 16])]),
        ("tools/demo/criteo", &[("dense", &[13]), ("emb", &[26, 32])]),
    ];

    for (path, inputs) in networks {
        let onnx = std::fs::read(repository(path).join("dense.onnx")).unwrap();
        let inputs = inputs.iter().map(|(name, shape)| input(name, shape)).collect();
        let (workspace_bytes_max, compute_capability) = (64 << 20, Some(86));
        let asked = Build {
            inputs,
            workspace_bytes_max,
            compute_capability,
            ..build(&onnx, "logit", false)
        };

        let build = |asked: &Build| tensorrt.build(asked, &mut Vec::new());
        let plan = build(&asked).unwrap_or_else(|e| panic!("{path}: {e}"));
        println!("TensorRT for RTX {}: {path}: a plan of {} bytes", tensorrt.version(), plan.len());
        assert!(plan.len() > onnx.len());

        let said = build(&Build { types: Types::F16, ..asked.clone() }).unwrap_err();
        assert!(matches!(said, TensorRtError::NoFp16(_)), "{said}");
        let torn = build(&Build { onnx: &onnx[..onnx.len() / 2], ..asked.clone() }).unwrap_err();
        assert!(matches!(torn, TensorRtError::Refused(_)), "{torn}");
        let unknown = build(&Build { output: "score", ..asked }).unwrap_err();

        assert!(
            matches!(&unknown, TensorRtError::Interface(t) if t.contains("`score`")),
            "{unknown}"
        );
    }

    // The shims of all other releases are refused before the first call.
    let mut refused = 0;
    for other in std::fs::read_dir(folder.join("shims")).unwrap() {
        let other = other.unwrap().path().join("libhatchback_tensorrt.so");
        match TensorRt::open(&other, Some((&libraries.0, &libraries.1))) {
            Ok(same) => assert_eq!(same.version().to_string(), tensorrt.version().to_string()),
            Err(said @ TensorRtError::Version { .. }) => {
                println!("{said}");
                refused += 1;
            }
            Err(said) => panic!("{said}"),
        }
    }
    assert!(refused > 0);

    // A missing file and a text file are not libraries.
    let said = TensorRt::open(&shim, Some((&at("missing.so"), &libraries.1))).err().unwrap();
    assert!(matches!(&said, TensorRtError::NoLibrary(t) if t.contains("missing.so")), "{said}");

    let text = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(text.path(), "not a library").unwrap();
    let said = TensorRt::open(&shim, Some((&libraries.0, text.path()))).err().unwrap();
    assert!(matches!(&said, TensorRtError::NoLibrary(_)), "{said}");

    println!("{said}");
}

#[test]
fn a_release_that_is_older_than_the_gpu_is_refused_by_name() {
    for (release, sm, is_known) in [
        (8_601, 90, true),
        (8_601, 100, false),
        (100_700, 120, false),
        (100_800, 120, true),
        (101_010, 101, true),
        (110_400, 110, true),
        (10_701, 120, true),
    ] {
        let checked = Version(release).check_gpu(sm);
        assert_eq!(checked.is_ok(), is_known, "{release}, {sm}");
        let said = checked.err().map_or(String::new(), |e| e.to_string());
        assert!(
            is_known || said.contains("10.8.0") && said.contains("2.0") == (sm == 120),
            "{said}"
        );
    }
}

/// A network that crashes TensorRT must not crash each process that serves another one.
#[test]
fn a_build_that_ended_with_the_process_too_often_is_not_tried_again() {
    let _turn = standin::shared();
    let (gpu, onnx, folder) = (standin::gpu(3), sum_network(), tempfile::tempdir().unwrap());
    let (inputs, activation) = ([("x", 5)], Activation::None);
    let network =
        DenseNetwork { onnx: &onnx, inputs: &inputs, parts: &[], output: "sum", activation };
    let build = || DeviceEngine::build_plan(&gpu, &network, &options(false, folder.path()));
    drop(build().unwrap().unwrap());
    let of_kind = |kind: &str| {
        let files = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path());
        files.filter(|file| file.extension().is_some_and(|end| end == kind)).collect::<Vec<_>>()
    };
    // A plan waits for its proof across processes, and is not built twice.
    assert_eq!((of_kind("unproven").len(), of_kind("plan").len()), (1, 0));
    assert!(build().unwrap().unwrap().engine().runs_on().contains("built before"));

    let unproven = &of_kind("unproven")[0];
    std::fs::write(unproven.with_extension("builds"), [b'.'; 8]).unwrap();
    std::fs::remove_file(unproven).unwrap();
    let said = build().err().unwrap().to_string();
    assert!(said.contains("8 builds") && said.contains(".builds"), "{said}");
    std::fs::remove_file(unproven.with_extension("builds")).unwrap();
    build().unwrap().unwrap().keep();
    assert_eq!(
        [of_kind("plan"), of_kind("unproven"), of_kind("builds")].map(|k| k.len()),
        [1, 0, 0]
    );
}
