//! Engines of TensorRT's twin on the stand-in for a GPU. An engine whose scores differ from the
//! CPU's is never used, and one whose builds crash is not built again. Contexts run batches of
//! every class, shared inputs and recorded requests.

use crate::one_key::OneKey;
use crate::tensorrt::{Twin, compile, open, sum_network, sum_network_of, twin};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::{KeySpaces, RowKey};
use hatchback_kernels::cuda::Device;
use hatchback_kernels::cuda::driver::{Gpu, Profile};
use hatchback_kernels::cuda::memory::View;
use hatchback_kernels::dense::{Activation, DenseEngine, InputPart};
use hatchback_kernels::gpu::lookup::{Keys, RequestSize};
use hatchback_kernels::gpu::step::Step;
use hatchback_kernels::gpu::tables::{DeviceTables, TableStorage};
use hatchback_kernels::gpu::tensorrt::Plans;
use hatchback_kernels::gpu::{
    DenseNetwork, DeviceEngine, DeviceOptions, GpuDense, InputType, Precision, RunShape,
    TensorRtOptions,
};
use hatchback_kernels::lookup::miss_list::{MissList, RowState};
use hatchback_kernels::lookup::{Bags, LookupStatus};
use hatchback_tests::models::repository;
use hatchback_tests::standin;
use hatchback_tools::report::metrics::largest_difference;
use std::path::Path;
use std::sync::Arc;

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

/// Boards of one name differ in their multiprocessors, and desks' GPUs in their capability.
#[test]
fn a_plan_is_not_used_on_another_gpu_of_the_same_name() {
    let _turn = standin::alone();
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: a real driver drives one GPU only");
    };
    let on = |device| {
        stand_in.device(device);
        Gpu::open(Profile::default()).unwrap()
    };
    let [gpu, fewer, later] = [c"ptx", c"sm_89", c"desk"].map(on);
    assert_eq!([gpu.name(), fewer.name()], [later.name(); 2]);
    assert_eq!((gpu.sm(), fewer.processors()), (fewer.sm(), later.processors()));
    let (onnx, folder) = (sum_network(), tempfile::tempdir().unwrap());
    let (inputs, activation) = ([("x", 5)], Activation::None);
    let network =
        DenseNetwork { onnx: &onnx, inputs: &inputs, parts: &[], output: "sum", activation };
    let options = options(false, folder.path());
    for (device, gpu) in [(c"ptx", &gpu), (c"sm_89", &fewer), (c"desk", &later)] {
        stand_in.device(device);
        let engine = DeviceEngine::load(gpu, &network, &options).unwrap();
        assert!(engine.rejected()[0].contains("no plan at"), "{:?}", engine.rejected());
        assert!(built(gpu, &network, &options).runs_on().contains("TensorRT"));
    }
    stand_in.device(c"board");
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
    let at = plans.timings(&tensorrt, &gpu.kind());
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
        parts: &[InputPart { input: 0, width: 5, shared: true, vectors: true }],
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
    let parts = [(2, true), (3, false)].map(|(width, shared)| InputPart {
        input: 0,
        width,
        shared,
        vectors: true,
    });
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
    let features = OneKey { tables: vec![0], keys_end: 100, dim: DIM };
    for keys in [Keys::InPlace, Keys::Copied] {
        let limits = features.limits(40, 64, keys);
        let (mut step, mut misses) = features.step(&tables, &engine, &[("x", DIM)], limits);
        assert!(step.refused().is_none());
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

/// What the library's runtime takes is in the driver's line of the memory plan.
#[test]
fn the_memory_of_a_runtime_counts() {
    let _turn = standin::alone();
    let gpu = Device::Cuda(standin::gpu(3));
    let (shim, folder) = (twin().shim, tempfile::tempdir().unwrap());
    let library = compile(8, 6, &["-DTWIN_RUNTIME_BYTES=67108864"]).library;
    let options = options_of(Twin { shim, library }, false, folder.path());
    let bytes = options.dense.driver_bytes(&gpu);
    // Another thread of the process may free some.
    assert!(bytes >= 60 << 20, "{bytes}");
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

    std::fs::remove_file(&of_kind("unproven")[0]).unwrap();
    let dense = options(false, folder.path()).dense;
    let begin = || dense.begin_build(&gpu, &onnx).map(Option::unwrap);
    drop(begin().unwrap());
    // A process that ends drops nothing.
    (0..8).for_each(|_| std::mem::forget(begin().unwrap()));
    let said = begin().err().unwrap().to_string();
    assert!(said.contains("8 builds") && said.contains(".builds"), "{said}");
    std::fs::remove_file(&of_kind("builds")[0]).unwrap();
    drop(begin().unwrap());
    build().unwrap().unwrap().keep();
    assert_eq!(
        [of_kind("plan"), of_kind("unproven"), of_kind("builds")].map(|k| k.len()),
        [1, 0, 0]
    );
}
