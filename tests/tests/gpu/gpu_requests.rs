//! Compares requests of the model families with lookups and dense network on a GPU with the same
//! model on the CPU: scores and statuses are equal to the bit, whatever is cached. Also counts the
//! driver calls of requests with and without misses. Runs on the stand-in for the driver, or with
//! HATCHBACK_GPU=real on the machine's GPU.

use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Worker;
use hatchback::schema::Placement;
use hatchback::schema::sample::Sample;
use hatchback_kernels::cuda::Device;
use hatchback_tests::models::{batch_of, install_unprobed, repository, score_all, tiny_budget};
use hatchback_tests::reference::same_bits;
use hatchback_tests::standin;
use hatchback_tools::pack::read_samples;
use hatchback_tools::pack::spec::CodecChoice;
use std::sync::Arc;

/// The families, and the nodes of the longest chain of their requests on the board: the query, its
/// event, and the nodes of the network that follow one another.
const FAMILIES: [(&str, u64); 4] = [("dlrm", 6), ("dcnv2", 9), ("deepfm", 5), ("wide_deep", 5)];
/// The families with operators that only the CPU's engine and TensorRT have.
const CPU_FAMILIES: [&str; 5] = ["bst", "dien", "din", "hstu", "mmoe"];

/// Creates a worker with room for every row, on the CPU or, with the dense network, on `device`.
fn worker(flash: &Flash, budget: Budget, device: &Device) -> Worker {
    let model = Model::on_device(flash, budget, device, &Default::default()).unwrap();
    // A network that runs on the GPU has no copy on the CPU.
    let kept =
        |line: &str| model.memory().lines().iter().any(|(what, bytes)| *what == line && *bytes > 0);
    assert_eq!(kept("dense network weights"), matches!(device, Device::Cpu));
    assert_eq!(kept("dense network on the GPU, weights"), matches!(device, Device::Cuda(_)));
    let name = model.dense_runs_on();
    assert_eq!(
        name.starts_with("Hatchback's kernels"),
        matches!(device, Device::Cuda(_)),
        "{name}"
    );
    Worker::new(Arc::new(model), Arc::new(SystemClock::default()))
}

// One test, because the stand-in counts calls of the whole process.
#[test]
fn scores_are_the_cpus_and_a_request_of_cached_rows_is_one_launch_and_one_wait() {
    let _turn = standin::alone();
    let mut seed = 0;
    for (family, chain_max) in FAMILIES {
        for placement in [Placement::Cached, Placement::Resident, Placement::Auto] {
            seed += 1;
            let installed = install_unprobed(family, CodecChoice::F16, Some(placement));
            let flash = Flash::open(&disk::system(), &installed.flash).unwrap();
            let samples = read_samples(
                &repository(&format!("tests/data/families/{family}/probe.jsonl")),
                &installed.schema,
            );
            let samples = samples.unwrap();
            let mut budget = tiny_budget(&installed.schema, 32);
            (budget.resident_bytes_max, budget.cache_bytes_max) = (1 << 20, 1 << 22);
            budget.memory_bytes_max = 1 << 28;
            let device = Device::Cuda(standin::gpu(seed));
            let (mut cpu, mut gpu) =
                (worker(&flash, budget, &Device::Cpu), worker(&flash, budget, &device));

            // The first round misses, the second does not.
            for size in [5, 1, 32, 7] {
                let (expected, got) =
                    (score_all(&mut cpu, &samples, size), score_all(&mut gpu, &samples, size));
                assert!(same_bits(&got.0, &expected.0), "{family}, {placement:?}, batch {size}");
                assert_eq!(got.1, expected.1, "{family}, {placement:?}, batch {size}");
            }

            // A key that no table has is never cached, so it misses again.
            let mut known = samples.clone();
            known.retain(|s| {
                let batch = batch_of(&Arc::clone(cpu.model()), std::slice::from_ref(s));
                cpu.score(&batch, None).unwrap().status().absent == 0
            });

            assert!(known.len() > 6);
            let batches: Vec<_> = known.chunks(6).map(|s| batch_of(gpu.model(), s)).collect();
            for batch in &batches {
                let asked = asked(|| gpu.score(batch, None).map(drop).unwrap());
                assert!(
                    asked.is_none_or(|a| a == [1, 1, keys_brought()]),
                    "{family}, {placement:?}: {asked:?}"
                );
            }
            let nodes = standin::load().map(|stand_in| stand_in.counts().chain);
            let most = chain_max + keys_brought();
            assert!(nodes.is_none_or(|nodes| nodes <= most), "{family}, {placement:?}: {nodes:?}");
        }
    }

    misses_cost_one_launch_more_and_one_for_each_cache();
    only_samples_with_misses_are_scored_again();
    without_graphs_the_scores_are_the_same();
}

/// Attention, gates and recurrent layers run on the CPU, behind lookups on the GPU.
#[test]
fn families_beyond_the_kernels_are_served_with_lookups_on_the_gpu() {
    let _turn = standin::shared();
    for (seed, family) in CPU_FAMILIES.into_iter().enumerate() {
        let installed = install_unprobed(family, CodecChoice::F16, Some(Placement::Cached));
        let flash = Flash::open(&disk::system(), &installed.flash).unwrap();
        let path = repository(&format!("tests/data/families/{family}/probe.jsonl"));
        let samples = read_samples(&path, &installed.schema).unwrap();
        let budget = Budget {
            cache_bytes_max: 1 << 22,
            memory_bytes_max: 1 << 28,
            ..tiny_budget(&installed.schema, 32)
        };
        let mut workers = [Device::Cpu, Device::Cuda(standin::gpu(seed as u64))].map(|device| {
            let model = Model::on_device(&flash, budget, &device, &Default::default()).unwrap();
            assert!(model.dense_runs_on().starts_with("the CPU"), "{}", model.dense_runs_on());
            Worker::new(Arc::new(model), Arc::new(SystemClock::default()))
        });
        // The first round misses, the second does not.
        for size in [32, 5] {
            let [expected, got] = workers.each_mut().map(|w| score_all(w, &samples, size));
            assert!(same_bits(&got.0, &expected.0), "{family}, batch {size}");
            assert_eq!(got.1, expected.1, "{family}, batch {size}");
        }
    }
}

/// Returns the copies of a request: one of its keys, on a GPU with memory of its own.
fn keys_brought() -> u64 {
    u64::from(!standin::is_board())
}

/// Returns the launches, waits and copies of `work`.
fn asked(work: impl FnOnce()) -> Option<[u64; 3]> {
    let counts = || standin::load().map(|s| s.counts());
    let before = counts();
    work();
    let (before, after) = (before?, counts()?);
    Some([
        after.launches - before.launches,
        after.waits - before.waits,
        after.copies - before.copies,
    ])
}

/// A request with misses: one launch for query and network, one for the insert of the rows, one for
/// bags and network.
fn misses_cost_one_launch_more_and_one_for_each_cache() {
    let installed = install_unprobed("dlrm", CodecChoice::F16, Some(Placement::Cached));

    let flash = Flash::open(&disk::system(), &installed.flash).unwrap();
    let samples =
        read_samples(&repository("tests/data/families/dlrm/probe.jsonl"), &installed.schema);
    let samples = samples.unwrap();

    // The smallest possible cache.
    let mut budget = Budget { memory_bytes_max: 1 << 28, ..tiny_budget(&installed.schema, 32) };
    while Model::from_flash(&flash, budget).is_err() {
        budget.cache_bytes_max *= 2;
        assert!(budget.cache_bytes_max < 1 << 20);
    }

    // The miss list is too short for the request, or long enough.
    for misses_max in [budget.misses_max, 1 << 12] {
        let budget = Budget { misses_max, ..budget };
        let device = Device::Cuda(standin::gpu(99));
        let (mut cpu, mut gpu) =
            (worker(&flash, budget, &Device::Cpu), worker(&flash, budget, &device));
        let mut missed = 0;

        // A row that does not exist is inserted into no cache.
        let mut known = samples.clone();
        known.retain(|s| {
            let batch = batch_of(&Arc::clone(cpu.model()), std::slice::from_ref(s));
            cpu.score(&batch, None).unwrap().status().absent == 0
        });

        for samples in known.chunks(7) {
            let batch = batch_of(gpu.model(), samples);
            let expected = cpu.score(&batch, None).unwrap().values.to_vec();
            let before = gpu.counters().misses;
            let asked =
                asked(|| assert!(same_bits(gpu.score(&batch, None).unwrap().values, &expected)));
            let misses = gpu.counters().misses - before;
            missed += misses;
            // Only the stand-in counts calls.
            let Some([launches, waits, copies]) = asked else { continue };

            assert_eq!(copies, keys_brought());
            match misses {
                0 => assert_eq!((launches, waits), (1, 1)),
                _ if misses_max == 1 << 12 => {
                    assert_eq!((launches, waits), (3, 2), "{misses} misses")
                }
                // Each further round inserts rows, finishes bags, and queries the bags for which
                // the ring had no room.
                _ => assert!(launches <= 3 * waits / 2 && waits % 2 == 0, "{launches}, {waits}"),
            }
        }

        assert!(missed > 20, "{missed} rows missed");
    }
}

/// A model of which every row fits into the cache: on the CPU and on the GPU, with its samples.
fn roomy(seed: u64) -> (Worker, Worker, Vec<Sample>) {
    let installed = install_unprobed("dlrm", CodecChoice::F16, Some(Placement::Cached));
    let flash = Flash::open(&disk::system(), &installed.flash).unwrap();
    let path = repository("tests/data/families/dlrm/probe.jsonl");
    let samples = read_samples(&path, &installed.schema).unwrap();
    let budget = Budget {
        cache_bytes_max: 1 << 22,
        memory_bytes_max: 1 << 28,
        ..tiny_budget(&installed.schema, 32)
    };
    let device = Device::Cuda(standin::gpu(seed));
    (worker(&flash, budget, &Device::Cpu), worker(&flash, budget, &device), samples)
}

/// One sample has a key that misses every time. Completing it takes as many blocks of threads in a
/// batch of 32 samples as in a batch of its own.
fn only_samples_with_misses_are_scored_again() {
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: counting blocks: only the stand-in counts");
    };
    let (mut cpu, mut gpu, samples) = roomy(5);
    let (expected, got) = (score_all(&mut cpu, &samples, 32), score_all(&mut gpu, &samples, 32));
    assert!(same_bits(&got.0, &expected.0));

    let mut misses = |sample: &Sample| {
        let batch = batch_of(gpu.model(), std::slice::from_ref(sample));
        let before = gpu.counters().misses;
        gpu.score(&batch, None).unwrap();
        gpu.counters().misses > before
    };
    let (late, known): (Vec<Sample>, Vec<Sample>) = samples.into_iter().partition(&mut misses);
    assert!(!late.is_empty() && known.len() >= 4, "{} and {} samples", late.len(), known.len());

    let mut blocks_of = |samples: &[Sample]| {
        let batch = batch_of(gpu.model(), samples);
        let before = stand_in.counts().blocks;
        let scores = gpu.score(&batch, None).unwrap().values.to_vec();
        assert!(same_bits(&scores, cpu.score(&batch, None).unwrap().values));
        stand_in.counts().blocks - before
    };
    let many: Vec<Sample> = known.iter().cycle().take(32).cloned().collect();
    let mut many_with_one = many.clone();
    many_with_one[20] = late[0].clone();
    let alone = blocks_of(&late[..1]) - blocks_of(&known[..1]);
    let in_many = blocks_of(&many_with_one) - blocks_of(&many);
    assert_eq!(in_many, alone);
}

/// A driver that refuses to record graphs costs launches, and no score.
fn without_graphs_the_scores_are_the_same() {
    let Some(stand_in) = standin::load() else {
        return println!(
            "SKIPPED: a driver that records no graph: only the stand-in can inject a fault"
        );
    };
    stand_in.fault(c"recording", 0, 1);
    let (mut cpu, mut gpu, samples) = roomy(6);
    for size in [5, 32] {
        let (expected, got) =
            (score_all(&mut cpu, &samples, size), score_all(&mut gpu, &samples, size));
        assert!(same_bits(&got.0, &expected.0) && got.1 == expected.1, "batch {size}");
    }
    let batch = batch_of(gpu.model(), &samples[..1]);
    let asked = asked(|| gpu.score(&batch, None).map(drop).unwrap());
    assert!(asked.is_some_and(|[launches, ..]| launches > 3), "{asked:?}");
}
