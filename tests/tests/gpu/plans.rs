//! Plans of TensorRT that take ten minutes to build, on its twin: a build lasts until the test ends
//! it. A start, a swap and every answer come before that. A GPU that TensorRT does not know, a plan
//! that it refuses and wrong scores leave what served before. The plan of the next release is built
//! while the old one serves, and the swap proves it.

use crate::tensorrt::{Twin, compile_into, twin};
use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::sha256;
use hatchback::car::plan_steps::PlanSteps;
use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::model::OpenError;
use hatchback::model::budget::Budget;
use hatchback::request::open::NextNetwork;
use hatchback::request::served::Served;
use hatchback::request::serving::Serving;
use hatchback::request::worker::Worker;
use hatchback::schema::KeySpace;
use hatchback::schema::sample::Sample;
use hatchback_kernels::cuda::Device;
use hatchback_kernels::cuda::driver::{CudaError, Stream};
use hatchback_kernels::cuda::graph::Graphs;
use hatchback_kernels::dense::Activation;
use hatchback_kernels::gpu::{
    DenseNetwork, DeviceEngine, DeviceOptions, GpuDense, Precision, TensorRtOptions,
};
use hatchback_tests::models::{FeaturePlan, ModelPlan, Packed, TablePlan, batch_for, install};
use hatchback_tests::standin;
use hatchback_tools::pack::spec::{CodecChoice, ProbeSpec};
use hatchback_tools::report::metrics::largest_difference;
use hatchback_tools::workload::onnx::{Graph, Type, int};
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread::ScopedJoinHandle;
use tempfile::TempDir;

const MEMORY_BYTES_MAX: u64 = 1 << 30;

/// Bound of [`Precision::F32`].
const BOUND: f64 = 1e-4;

/// A twin whose builds last until the test ends them.
struct SlowTwin {
    twin: Twin,
    fifo: PathBuf,
}

impl SlowTwin {
    fn new() -> Self {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let fifo = folder.join(format!("builds-{}", std::process::id()));
        let _ = std::fs::remove_file(&fifo);
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let awaits = format!("-DTWIN_AWAITS=\"{}\"", fifo.display());
        let library = compile_into("twin-slow", 8, 6, &[&awaits]).library;
        Self { twin: Twin { shim: twin().shim, library }, fifo }
    }

    /// Waits until a build has begun. The build ends when the returned file gets a letter.
    fn begun(&self) -> File {
        OpenOptions::new().write(true).open(&self.fifo).unwrap()
    }

    /// Ends the build that has begun, and waits until it has read that.
    fn end(&self, mut build: File, letter: &[u8]) {
        // Between two reads nobody reads.
        while build.write_all(letter).is_err() {
            std::thread::yield_now();
        }
        while rustix::io::ioctl_fionread(&build).unwrap() > 0 {
            std::thread::yield_now();
        }
    }

    /// Ends everything that begins before `thread` ends, with a good plan.
    fn end_all<T>(&self, thread: &ScopedJoinHandle<'_, T>) {
        let nonblocking = OFlags::NONBLOCK.bits() as i32;
        while !thread.is_finished() {
            let next = OpenOptions::new().write(true).custom_flags(nonblocking).open(&self.fifo);
            let _ = next.and_then(|mut next| next.write_all(b"g"));
            std::thread::yield_now();
        }
    }

    /// Returns options with which networks may run on this twin, with plans in `plans`.
    fn dense(&self, plans: &Path) -> GpuDense {
        let Twin { shim, library } = self.twin.clone();
        let libraries = Some((library.clone(), library));
        let (plans, workspace_bytes_max) = (plans.to_owned(), 1 << 20);
        let tensorrt = Some(TensorRtOptions { shim, libraries, plans, workspace_bytes_max });
        GpuDense { tensorrt, precision: Precision::F32 }
    }

    /// Returns a server with these options.
    fn serving(&self, plans: &Path) -> Serving {
        let serving = Serving::new(MEMORY_BYTES_MAX, 64, Arc::new(SystemClock::default()));
        serving.on(Device::Cuda(standin::gpu(31)), self.dense(plans))
    }
}

/// A release that is served as `m`, whose plans are in a folder of their own.
struct Car {
    plans: TempDir,
    folder: PathBuf,
    flash: Flash,
    serving: Serving,
    served: Arc<Served>,
}

impl Car {
    fn new(slow: &SlowTwin, release: &Release) -> Self {
        let (plans, folder) = (tempfile::tempdir().unwrap(), release.packed.install());
        let (serving, flash) =
            (slow.serving(plans.path()), Flash::open(&disk::system(), &folder).unwrap());
        let served = serving.load("m", &flash, budget()).unwrap();
        Self { plans, folder, flash, serving, served }
    }

    /// Installs `release` and swaps to it. Returns its scores on the CPU.
    fn update(&self, release: &Release) -> Vec<f32> {
        install(&self.folder, &release.packed.bundle);
        let flash = Flash::open(&disk::system(), &self.folder).unwrap();
        self.serving.swap("m", &flash, budget(), &|_| ()).unwrap();
        on_cpu(&flash, release, budget())
    }

    fn runs_on(&self) -> String {
        self.served.dense_runs_on().unwrap()
    }
}

/// A network that computes what the twin does: the sum of all inputs. `is_ours` says whether our
/// kernels have its operators.
fn sum_network(widths: &[(String, usize)], is_ours: bool) -> Vec<u8> {
    let mut graph = Graph::default();
    let names: Vec<&str> = widths.iter().map(|(name, _)| name.as_str()).collect();
    widths.iter().for_each(|(name, width)| graph.input(name, Type::Float, &[*width]));
    graph.node("Concat", &names, "all", &[int("axis", 1)]);
    graph.integers("axes", &[1], &[1]);
    graph.node("ReduceSum", &["all", "axes"], "sum", &[]);
    let last = if is_ours { "Add" } else { "Max" };
    graph.floats("zero", &[1], &[0.0]);
    graph.node(last, &["sum", if is_ours { "zero" } else { "sum" }], "out", &[]);
    graph.output("out", &[1]);
    graph.file()
}

/// A packed generation, and samples of it.
struct Release {
    packed: Packed,
    samples: Vec<Sample>,
    _probe: tempfile::NamedTempFile,
}

fn release(sequence: u64, is_ours: bool) -> Release {
    let table = |dim| TablePlan::cached(KeySpace::Index, 50, dim, CodecChoice::F32);
    let plan = ModelPlan {
        name: "m".to_owned(),
        sequence,
        seed: 11,
        dense: 2,
        tables: vec![table(4), table(8)],
        features: vec![FeaturePlan::one_hot(0), FeaturePlan::one_hot(1)],
    };
    let mut probe = tempfile::NamedTempFile::new().unwrap();
    for key in 0..20 {
        let line =
            format!(r#"{{"dense":[{key}.5,-3.0],"sparse":{{"f0":[{key}],"f1":[7]}},"label":1}}"#);
        writeln!(probe, "{line}").unwrap();
    }
    let mut spec = plan.spec();
    spec.probe = Some(ProbeSpec { samples: probe.path().to_owned() });
    let packed = plan.pack_spec(&spec, |widths, _| {
        let mut network = sum_network(widths, is_ours);
        // Another sequence has another file, and so another plan: a field that no reader knows.
        network.extend([0xf8, 0x3f, sequence as u8]);
        network
    });
    let samples = (0..20).map(|id| plan.sample(id)).collect();
    Release { packed, samples, _probe: probe }
}

/// Returns the scores of `serving` for the samples of `release`.
fn answers(serving: &Serving, release: &Release) -> Vec<f32> {
    let batch = batch_for(&release.packed.schema, 32, &release.samples);
    serving.get("m").unwrap().submit(&batch, None).unwrap().wait().unwrap().scores().values.to_vec()
}

/// Returns the CPU's scores for the samples of `release`, which is live in `flash`.
fn on_cpu(flash: &Flash, release: &Release, budget: Budget) -> Vec<f32> {
    let model = Arc::new(hatchback::model::Model::from_flash(flash, budget).unwrap());
    let batch = batch_for(&release.packed.schema, 32, &release.samples);
    let mut worker = Worker::new(model, Arc::new(SystemClock::default()));
    worker.score(&batch, None).unwrap().values.to_vec()
}

fn budget() -> Budget {
    Budget { cache_bytes_max: 1 << 20, batch_max: 32, workers: 2, ..Budget::default() }
}

/// Takes steps until no plan is missing.
fn take_steps(serving: &Serving) {
    let mut steps = PlanSteps::default();
    while steps.step(serving, &|_| ()) {}
}

#[test]
fn no_answer_waits_for_a_build_and_a_refusal_leaves_what_served_before() {
    let _turn = standin::alone();
    let slow = SlowTwin::new();
    for is_ours in [true, false] {
        let release = release(1, is_ours);
        let flash = Flash::open(&disk::system(), &release.packed.install()).unwrap();
        let expected = on_cpu(&flash, &release, budget());
        let ends = [
            ("u", "not supported by this TensorRT"),
            ("d", "of another release"),
            ("w", "beyond the bound"),
            ("g", ""),
        ];
        for (letter, reason) in ends {
            let plans = tempfile::tempdir().unwrap();
            let serving = slow.serving(plans.path());
            serving.load("m", &flash, budget()).unwrap();
            let before = serving.get("m").unwrap().dense_runs_on().unwrap();
            assert_eq!(before.starts_with("the CPU"), !is_ours, "{before}");
            assert!(!before.contains("TensorRT"), "{before}");
            assert_eq!(answers(&serving, &release), expected, "{before}");

            std::thread::scope(|scope| {
                scope.spawn(|| take_steps(&serving));
                let mut build = slow.begun();
                let during = serving.get("m").unwrap().dense_runs_on().unwrap();
                assert!(during.contains("TensorRT builds a plan"), "{during}");
                assert_eq!(answers(&serving, &release), expected, "{during}");
                build.write_all(letter.as_bytes()).unwrap();
            });

            let after = serving.get("m").unwrap().dense_runs_on().unwrap();
            println!("{letter}: {before} -> {after}");
            assert_eq!(after.starts_with("TensorRT 8.6.3"), reason.is_empty(), "{after}");
            assert!(after.contains(reason), "{after}");
            let far = largest_difference(&answers(&serving, &release), &expected);
            assert!(far <= if reason.is_empty() { BOUND } else { 0.0 }, "{after}: {far}");

            // The next start has the plan from its first answer on, and builds nothing.
            if reason.is_empty() {
                let next = slow.serving(plans.path());
                next.load("m", &flash, budget()).unwrap();
                assert!(next.get("m").unwrap().dense_runs_on().unwrap().starts_with("TensorRT"));
                take_steps(&next);
            }
        }
    }
}

#[test]
fn a_swap_does_not_wait_for_the_build_of_the_old_plan_or_of_the_new_one() {
    let _turn = standin::alone();
    let (slow, old, new) = (SlowTwin::new(), release(1, true), release(2, true));
    let car = Car::new(&slow, &old);
    std::thread::scope(|scope| {
        scope.spawn(|| take_steps(&car.serving));
        let mut build = slow.begun();
        let expected = car.update(&new);
        assert_eq!(answers(&car.serving, &new), expected);
        build.write_all(b"g").unwrap();
        // The first build must not take the letter of the next one, too.
        while rustix::io::ioctl_fionread(&build).unwrap() > 0 {
            std::thread::yield_now();
        }
        // The old plan is of no use; that of the new generation is next.
        assert_eq!(answers(&car.serving, &new), expected);
        // Between the two builds nobody reads.
        while build.write_all(b"g").is_err() {
            std::thread::yield_now();
        }
    });
    assert!(car.runs_on().starts_with("TensorRT"));
}

/// Returns the network of `release`, as an update offers it before the release is live.
fn next_network(release: &Release) -> NextNetwork {
    let mut bundle = BundleReader::open(&release.packed.bundle).unwrap();
    let manifest = sha256(bundle.manifest_bytes());
    let (schema, dense) = (bundle.manifest().schema.clone(), bundle.manifest().dense);
    NextNetwork { manifest, schema, onnx: bundle.blob(dense).unwrap() }
}

#[test]
fn the_plan_of_the_next_release_is_built_before_its_swap_which_proves_it() {
    let _turn = standin::alone();
    let slow = SlowTwin::new();
    for (letter, serves) in [(b"g", "TensorRT 8.6.3"), (b"w", "Hatchback's kernels")] {
        let (old, new) = (release(1, true), release(2, true));
        let car = Car::new(&slow, &old);
        let Car { serving, served, .. } = &car;
        let expected = on_cpu(&car.flash, &old, budget());
        std::thread::scope(|scope| {
            scope.spawn(|| take_steps(serving));
            slow.end(slow.begun(), b"g");
        });
        assert!(car.runs_on().starts_with("TensorRT"));

        // The old release serves during the build, and after it.
        let network = next_network(&new);
        let bytes = 3 * network.onnx.len() as u64;
        let taken = serving.memory_taken();
        served.offer_next(network);
        assert_eq!(serving.memory_taken(), taken + bytes);
        std::thread::scope(|scope| {
            scope.spawn(|| take_steps(serving));
            let build = slow.begun();
            assert_eq!(serving.memory_taken(), taken + bytes);
            assert!(largest_difference(&answers(serving, &old), &expected) <= BOUND);
            slow.end(build, letter);
        });
        assert_eq!(serving.memory_taken(), taken, "the network is gone with its build");
        assert_eq!(served.model().unwrap().generation().sequence, 1);

        // The swap has the plan at once, if its scores are right. No other build begins.
        let expected = car.update(&new);
        let runs_on = car.runs_on();
        assert!(runs_on.starts_with(serves), "{runs_on}");
        let far = largest_difference(&answers(serving, &new), &expected);
        assert!(far <= BOUND, "{runs_on}: {far}");
        take_steps(serving);
        assert!(car.runs_on().starts_with(serves));
    }
}

#[test]
fn a_swap_does_not_wait_for_the_plan_of_its_release_which_is_built_once() {
    let _turn = standin::alone();
    let (slow, old, new) = (SlowTwin::new(), release(1, true), release(2, true));
    let car = Car::new(&slow, &old);
    let mut steps = PlanSteps::default();
    let mut take_steps = || while steps.step(&car.serving, &|_| ()) {};
    std::thread::scope(|scope| {
        scope.spawn(&mut take_steps);
        // The GPU is refused for the old release, so that the next one is built.
        slow.end(slow.begun(), b"u");
    });
    car.served.offer_next(next_network(&new));
    std::thread::scope(|scope| {
        scope.spawn(&mut take_steps);
        let build = slow.begun();
        let expected = car.update(&new);
        assert_eq!(answers(&car.serving, &new), expected);
        slow.end(build, b"g");
    });
    assert!(car.runs_on().starts_with("TensorRT"));
}

/// A thread of TensorRT waits for the whole GPU while a worker records. The driver fails both.
#[test]
fn a_build_and_a_recording_that_disturb_each_other_are_both_repeated() {
    let _turn = standin::alone();
    if standin::load().is_none() {
        return println!("SKIPPED: a recording at the moment of a wait: only the twin waits then");
    }
    let (slow, release) = (SlowTwin::new(), release(1, true));
    let car = Car::new(&slow, &release);
    let mut graphs = Graphs::new(standin::gpu(31).stream().unwrap());
    std::thread::scope(|scope| {
        let steps = scope.spawn(|| take_steps(&car.serving));
        let (mut build, mut attempts) = (Some(slow.begun()), 0);
        let record = |_: &mut Stream| {
            attempts += 1;
            if let Some(build) = build.take() {
                slow.end(build, b"s");
                // The driver has refused the wait before the twin reads the next letter.
                slow.end(slow.begun(), b"u");
            }
            Ok::<_, CudaError>(())
        };
        graphs.record(|stream| stream, record).unwrap();
        assert_eq!(attempts, 2);

        // Whatever is built after this is good.
        slow.end_all(&steps);
    });
    assert!(car.runs_on().starts_with("TensorRT"), "{}", car.runs_on());
}

/// The load of a kept plan, which took minutes to build, has the attempts of a build.
#[test]
fn a_load_that_a_recording_disturbed_is_repeated() {
    let _turn = standin::alone();
    if standin::load().is_none() {
        return println!("SKIPPED: a recording at the moment of a wait: only the twin waits then");
    }
    let (slow, plans, gpu) = (SlowTwin::new(), tempfile::tempdir().unwrap(), standin::gpu(31));
    let onnx = sum_network(&[("x".to_owned(), 5)], true);
    let (inputs, activation) = ([("x", 5)], Activation::None);
    let network =
        DenseNetwork { onnx: &onnx, inputs: &inputs, parts: &[], output: "out", activation };
    let dense = slow.dense(plans.path());
    let options = DeviceOptions { dense, batch_max: 8, f16_inputs: Vec::new(), fed: Vec::new() };
    let mut graphs = Graphs::new(gpu.stream().unwrap());
    std::thread::scope(|scope| {
        let build =
            scope.spawn(|| DeviceEngine::build_plan(&gpu, &network, &options).unwrap().unwrap());
        // Each load of this plan awaits a letter.
        slow.end(slow.begun(), b"l");
        slow.end_all(&build);
        build.join().unwrap().keep();

        let load = scope.spawn(|| DeviceEngine::load(&gpu, &network, &options).unwrap());
        let mut begun = Some(slow.begun());
        let record = |_: &mut Stream| {
            if let Some(begun) = begun.take() {
                slow.end(begun, b"s");
                slow.end(slow.begun(), b"u");
            }
            Ok::<_, CudaError>(())
        };
        graphs.record(|stream| stream, record).unwrap();
        slow.end_all(&load);
        let runs_on = load.join().unwrap().runs_on();
        assert!(runs_on.starts_with("TensorRT"), "{runs_on}");
    });
}

/// A plan is optional, so its network waits while something else has the memory.
#[test]
fn a_plan_waits_until_the_budget_has_room_for_its_network() {
    let _turn = standin::alone();
    let release = release(1, true);
    let car = Car::new(&SlowTwin::new(), &release);
    // The network of a next release counts three times.
    let left = MEMORY_BYTES_MAX - car.serving.memory_taken();
    let onnx = vec![0; left as usize / 3];
    car.served.offer_next(NextNetwork { onnx, ..next_network(&release) });
    let plan = car.serving.plan_job("m").map(drop);
    let Err(OpenError::Budget { field, value, problem }) = plan else { panic!("no plan waits") };
    assert_eq!((field, value), ("memory_bytes_max", MEMORY_BYTES_MAX));
    assert!(problem.starts_with("a plan waits: "), "{problem}");

    drop(car.serving.next_plan_job("m").unwrap());
    assert!(car.serving.plan_job("m").unwrap().is_some());
}

/// A network that ends the process while it is parsed counts as one that ends it in TensorRT.
#[test]
fn a_build_counts_before_its_network_is_parsed() {
    let _turn = standin::alone();
    let (slow, release) = (SlowTwin::new(), release(1, true));
    let car = Car::new(&slow, &release);
    let build = || {
        let onnx = b"no network".to_vec();
        car.served.offer_next(NextNetwork { onnx, ..next_network(&release) });
        car.serving.next_plan_job("m").unwrap().build().unwrap_err().to_string()
    };
    let unread = build();
    assert!(!unread.contains("builds"), "{unread}");
    // Processes that ended while they parsed it.
    let dense = slow.dense(car.plans.path());
    let begin = || dense.begin_build(&standin::gpu(31), b"no network").unwrap();
    (0..8).for_each(|_| std::mem::forget(begin()));
    let refused = build();
    assert!(refused.contains("8 builds"), "{refused}");
}
