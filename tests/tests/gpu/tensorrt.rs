//! TensorRT without TensorRT. The shim is built against the headers of a twin (`tests/tensorrt`),
//! and the twin is loaded as the library. The tests check what is refused and why, and the plans on
//! disk. With TENSORRT_RTX set (by `tests/tensorrt/rtx`), TensorRT for RTX builds every network of
//! the repository on the CPU.

use hatchback_kernels::gpu::InputType;
use hatchback_kernels::gpu::tensorrt::{
    BatchClass, Build, BuildInput, Plans, TensorRt, TensorRtError, Types, Version,
};
use hatchback_tests::models::repository;
use hatchback_tests::standin;
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
pub fn compile(major: u32, minor: u32, library_only: &[&str]) -> Twin {
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

pub fn open(shim: &Path, library: &Path) -> Result<Arc<TensorRt>, TensorRtError> {
    TensorRt::open(shim, Some((library, library)))
}

fn refusal(shim: &Path, library: &Path) -> TensorRtError {
    open(shim, library).err().unwrap()
}

/// A network that computes the same as the twin does for any network: the sum of the inputs.
pub fn sum_network() -> Vec<u8> {
    sum_network_of(5)
}

/// The same of inputs that are `width` wide.
pub fn sum_network_of(width: usize) -> Vec<u8> {
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

    // Only a build needs the parser.
    let onnx = sum_network();
    let without = |parser: &Path| {
        let tensorrt = TensorRt::open(&twin.shim, Some((&twin.library, parser))).unwrap();
        tensorrt.build(&build(&onnx, "sum", false), &mut Vec::new()).unwrap_err()
    };
    let said = without(Path::new("/nowhere/parser.so"));
    assert!(
        matches!(&said, TensorRtError::NoLibrary(text) if text.contains("parser.so")),
        "{said}"
    );
    let said = without(&twin.shim);
    assert!(matches!(&said, TensorRtError::NoEntry(name) if name.contains("Parser")), "{said}");

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

/// TensorRT keeps the first logger of the process. The twin ends the process if it gets another.
#[test]
fn the_logger_outlives_the_library_that_came_first() {
    let _turn = standin::shared();
    let [first, second] = [(); 2].map(|()| open(&twin().shim, &twin().library).unwrap());
    let (gpu, onnx) = (standin::gpu(3), sum_network());
    let asked = build(&onnx, "sum", false);
    let plan = first.build(&asked, &mut Vec::new()).unwrap();
    drop(first.load(&gpu, &plan, &asked).unwrap());
    let engine = second.load(&gpu, &plan, &asked).unwrap();
    drop(first);
    let said = second.load(&gpu, b"no plan", &asked).err().unwrap().to_string();
    assert_eq!(said, "TensorRT: plan: the plan is of another release");
    drop(engine);
}

/// A thread of TensorRT has no caller, and its error is the reason of the build that it belongs to.
#[test]
fn a_refused_build_has_the_error_of_a_thread_of_its_own() {
    let _turn = standin::shared();
    let refusing = compile(8, 6, &["-DTWIN_REFUSES_HALF"]).library;
    let tensorrt = open(&twin().shim, &refusing).unwrap();
    let onnx = sum_network();
    let half = BuildInput { of: InputType::F16, ..input("x", &[5]) };
    let asked = Build { inputs: vec![half], ..build(&onnx, "sum", true) };
    let said = tensorrt.build(&asked, &mut Vec::new()).unwrap_err().to_string();
    assert_eq!(said, "TensorRT: build: no kernel takes this input");
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
