//! Compares the request path on a GPU with the same model on the CPU: scores and statuses are equal
//! to the bit, whatever is cached. A request whose rows are all cached is one launch and one wait.
//! Runs on the stand-in for the driver, or with `HATCHBACK_GPU=real` on the machine's GPU.

use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::model::budget::Budget;
use hatchback::model::{Model, OpenError};
use hatchback::request::pipeline::Pipeline;
use hatchback::request::worker::Worker;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, MissPolicy, Placement};
use hatchback::{LookupStatus, Pooling};
use hatchback_kernels::cuda::Device;
use hatchback_tests::models::{
    FeaturePlan, ModelPlan, Packed, TablePlan, batch_of, open_model, open_with_least_cache,
    tiny_budget,
};
use hatchback_tests::onnx;
use hatchback_tests::random::Random;
use hatchback_tests::reference::{Reference, same_bits};
use hatchback_tests::standin;
use hatchback_tools::pack::spec::CodecChoice;
use hatchback_tools::pack::spec::DenseSpec;
use hatchback_tools::serve::worker;
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

const BATCH_MAX: u32 = 12;

/// The tests share one driver: a test that counts calls locks it for writing, the others for
/// reading.
static COUNTING: RwLock<()> = RwLock::new(());

fn not_counting() -> RwLockReadGuard<'static, ()> {
    COUNTING.read().unwrap_or_else(PoisonError::into_inner)
}

fn plan(seed: u64) -> ModelPlan {
    use CodecChoice::{Auto, F16, F32, U4, U8};
    let mut random = Random::new(seed);
    let table = |random: &mut Random| TablePlan {
        placement: *random.pick(&[
            Placement::Cached,
            Placement::Cached,
            Placement::Resident,
            Placement::Auto,
        ]),
        counts: random.one_in(2),
        default_zeros: random.one_in(2),
        ..TablePlan::cached(
            *random.pick(&[KeySpace::Index, KeySpace::Sparse]),
            1 + random.below(500),
            *random.pick(&[1, 5, 16, 17, 32, 130]),
            *random.pick(&[Auto, F32, F16, U8, U4]),
        )
    };

    let tables: Vec<TablePlan> = (0..1 + random.below(5)).map(|_| table(&mut random)).collect();
    let feature = |random: &mut Random| FeaturePlan {
        pooling: *random.pick(&[
            Pooling::Sum,
            Pooling::Mean,
            Pooling::None,
            Pooling::Sqrtn,
            Pooling::Max,
        ]),
        hotness_max: 1 + random.below(6) as u32,
        second_input: random.one_in(2),
        ..FeaturePlan::one_hot(random.below(tables.len() as u64) as usize)
    };
    let feature = |random: &mut Random| {
        let feature = feature(random);
        let weighted = !matches!(feature.pooling, Pooling::None | Pooling::Max) && random.one_in(3);
        let mut others = (0..tables.len()).filter(|t| *t != feature.table);
        let more_tables = others.by_ref().filter(|_| random.one_in(4)).collect();
        FeaturePlan { weighted, more_tables, ..feature }
    };

    let features = (0..1 + random.below(7)).map(|_| feature(&mut random)).collect();
    ModelPlan {
        name: "random".to_owned(),
        sequence: 1,
        seed,
        dense: random.below(4) as usize,
        tables,
        features,
    }
}

/// Opens the model on the GPU with the smallest cache from `budget` up.
fn open(flash: &Path, mut budget: Budget, seed: u64) -> Arc<Model> {
    loop {
        match open_model(flash, budget) {
            Ok(model) => {
                return Arc::new(model.move_to_device(&Device::Cuda(standin::gpu(seed))).unwrap());
            }
            Err(OpenError::Budget { field: "cache_bytes_max", .. }) => budget.cache_bytes_max *= 2,
            Err(OpenError::Budget { field: "resident_bytes_max", .. }) => {
                budget.resident_bytes_max = 1 << 26
            }
            Err(e) => panic!("{e}"),
        }
    }
}

/// Scores `samples` and compares with the reference; returns the summed status.
fn check(worker: &mut Worker, reference: &Reference, samples: &[Sample]) -> LookupStatus {
    let batch = batch_of(&Arc::clone(worker.model()), samples);
    let before = worker.counters();
    let scores = worker.score(&batch, None).unwrap();
    let outputs = scores.values.len() / samples.len().max(1);
    for (i, sample) in samples.iter().enumerate() {
        let (score, expected) =
            (&scores.values[i * outputs..][..outputs], reference.output(sample));
        assert!(same_bits(score, &expected), "sample {i}: {score:?} instead of {expected:?}");
        assert_eq!(scores.statuses[i], reference.status(sample), "sample {i}");
    }
    let status = scores.status();
    let counted = worker.counters().since(&before);
    assert_eq!(counted.lookups, status.lookups());
    assert!(
        counted.misses <= counted.missed_lookups
            && counted.missed_lookups <= counted.cached_lookups
    );
    assert_eq!(counted.pages_damaged, 0);
    status
}

#[test]
fn scores_are_the_references() {
    let _turn = standin::shared();
    let _shared = not_counting();
    for seed in 0..40 {
        let plan = plan(seed);
        let packed = plan.pack();
        let reference = Reference::new(&packed.schema, &packed.rows);
        let tiny = Budget { resident_bytes_max: 0, ..tiny_budget(&packed.schema, BATCH_MAX) };
        let budget = if seed % 3 == 0 {
            tiny
        } else {
            Budget { batch_max: BATCH_MAX, cache_bytes_max: 64 << 10, ..tiny }
        };

        let budget = if seed % 2 == 0 { Budget { misses_max: 200, ..budget } } else { budget };
        let model = open(&packed.install(), budget, seed);
        let mut worker = worker(&model);
        let mut random = Random::new(seed);

        for _ in 0..6 {
            let count = if random.one_in(3) {
                u64::from(BATCH_MAX)
            } else {
                random.below(u64::from(BATCH_MAX) + 1)
            };
            let samples: Vec<Sample> = (0..count).map(|_| plan.sample(random.below(30))).collect();
            check(&mut worker, &reference, &samples);
        }
    }
}

/// Opens the model on the CPU, and on the GPU with or without its network.
fn on_both(flash: &Path, budget: Budget, with_dense: bool, seed: u64) -> [Worker; 2] {
    let mut model = open(flash, budget, seed);
    if with_dense {
        let (alone, flash) = (Arc::into_inner(model).unwrap(), Flash::open(&disk::system(), flash));
        let alone = alone.move_dense_to_gpu(&flash.unwrap(), &Default::default()).unwrap();
        assert!(alone.dense_runs_on().starts_with("Hatchback's kernels"));
        model = Arc::new(alone);
    }
    [worker(&open_with_least_cache(flash, *model.budget())), worker(&model)]
}

/// Requests share bags, and the network takes lengths, masks and vectors twice. However the rows
/// are cached, scores, statuses and counts are the CPU's.
#[test]
fn requests_that_share_bags_are_the_cpus() {
    let _turn = standin::shared();
    let _shared = not_counting();
    for seed in 0..32 {
        let (mut plan, mut random) = (plan(3000 + seed), Random::new(seed));
        plan.features.iter_mut().for_each(|feature| feature.shared = random.one_in(2));
        let mut spec = if seed % 4 == 0 { plan.spec() } else { plan.spec_with_bag_inputs() };
        let is_dense_shared = |d: usize| (seed / 4) >> d & 1 == 1;
        for (d, dense) in spec.dense_features.iter_mut().enumerate() {
            let (name, shared) = (dense.feature().name, is_dense_shared(d));
            *dense = DenseSpec::Table { name, missing: None, shared, retired: false };
        }
        let packed = plan.pack_spec(&spec, onnx::concat);
        let tiny = Budget { resident_bytes_max: 0, ..tiny_budget(&packed.schema, BATCH_MAX) };
        let roomy = Budget { misses_max: 500, cache_bytes_max: 64 << 10, ..tiny };
        let budget = if seed % 3 == 0 { tiny } else { roomy };
        let [mut cpu, mut gpu] = on_both(&packed.install(), budget, seed % 2 == 0, seed);
        for round in 0..6 {
            let mut batch = gpu.model().batch();
            for _ in 0..1 + random.below(3) {
                let driver = plan.sample(random.below(6));
                let candidates: Vec<Sample> = (0..random.below(u64::from(BATCH_MAX) / 3 + 1))
                    .map(|_| {
                        let mut sample = candidate(&plan, &driver, random.below(30));
                        let dense = sample.dense.iter_mut().zip(&driver.dense).enumerate();
                        let shared = dense.filter(|(d, _)| is_dense_shared(*d));
                        shared.for_each(|(_, (own, drivers))| *own = *drivers);
                        sample
                    })
                    .collect();
                batch.push_request(&packed.schema, &candidates).unwrap();
            }
            let said = format!("seed {seed}, round {round}, ends {:?}", batch.ends());
            let before = [cpu.counters(), gpu.counters()];
            let expected = cpu.score(&batch, None).unwrap();
            let got = gpu.score(&batch, None).unwrap();
            assert!(same_bits(got.values, expected.values), "{said}");
            assert_eq!(got.statuses, expected.statuses, "{said}");
            let [expected, got] =
                [&cpu, &gpu].map(|w| w.counters()).map(|c| [c.lookups, c.cached_lookups]);
            let before = before.map(|c| [c.lookups, c.cached_lookups]);
            let since = |now: [u64; 2], then: [u64; 2]| [now[0] - then[0], now[1] - then[1]];
            assert_eq!(since(got, before[1]), since(expected, before[0]), "{said}");
        }
    }
}

/// A request of cached rows with shared bags is one launch and one wait. It queries the shared bags
/// in fewer blocks of threads than as many requests of one sample.
#[test]
fn a_request_that_shares_bags_is_one_launch_and_looks_them_up_once() {
    let _turn = standin::alone();
    let _alone = COUNTING.write().unwrap_or_else(PoisonError::into_inner);
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: counting launches: only the stand-in counts");
    };
    let (mut plan, sample) = two_caches(8, [MissPolicy::Wait; 2]);
    plan.features[0].shared = true;
    let packed = plan.pack();
    for with_dense in [false, true] {
        let model = open_for(&packed, with_dense, 8);
        let mut worker = worker(&model);
        let driver = sample(0);
        let candidates: Vec<Sample> = (0..u64::from(BATCH_MAX))
            .map(|i| Sample {
                sparse: vec![driver.sparse[0].clone(), sample(i).sparse[1].clone()],
                ..driver.clone()
            })
            .collect();
        let mut together = model.batch();
        together.push_request(&packed.schema, &candidates).unwrap();
        let apart = batch_of(&model, &candidates);
        let mut blocks = |batch| {
            let scores = worker.score(batch, None).unwrap().values.to_vec();
            let (counted, before) = (worker.counters(), stand_in.counts());
            assert!(same_bits(worker.score(batch, None).unwrap().values, &scores));
            let (counted, after) = (worker.counters().since(&counted), stand_in.counts());
            assert_eq!((after.launches - before.launches, after.waits - before.waits), (1, 1));
            assert_eq!(counted.misses, 0);
            (after.blocks - before.blocks, counted.lookups)
        };
        let (together, apart) = (blocks(&together), blocks(&apart));
        let samples = u64::from(BATCH_MAX);
        assert_eq!((together.1, apart.1), (3 + 3 * samples, 6 * samples));
        assert!(together.0 < apart.0, "{together:?}, {apart:?}");
    }
}

/// Returns sample `id` with the shared bags of `driver`.
fn candidate(plan: &ModelPlan, driver: &Sample, id: u64) -> Sample {
    let mut sample = plan.sample(id);
    for (f, _) in plan.features.iter().enumerate().filter(|(_, feature)| feature.shared) {
        sample.sparse[f].clone_from(&driver.sparse[f]);
        if let Some(weights) = driver.weights.get(f) {
            sample.weights[f].clone_from(weights);
        }
    }
    sample
}

/// The workers run on threads, each with its own stream, on a cache that always evicts.
#[test]
fn many_workers_on_one_model_score_as_one() {
    let _turn = standin::shared();
    let _shared = not_counting();
    let tables = vec![
        TablePlan::cached(KeySpace::Sparse, 900, 12, CodecChoice::U8),
        TablePlan::cached(KeySpace::Index, 900, 12, CodecChoice::U8),
        // Rows that are added while they are read.
        TablePlan::cached(KeySpace::Index, 300, 260, CodecChoice::F32),
    ];

    let pooling = |i: usize| [Pooling::Sum, Pooling::Mean, Pooling::None][i % 3];
    let feature = |i: usize| FeaturePlan {
        table: i % 3,
        pooling: pooling(i),
        hotness_max: 1 + (i as u32 * 5) % 6,
        second_input: i.is_multiple_of(3),
        more_tables: if i == 0 { vec![2, 1] } else { Vec::new() },
        weighted: false,
        shared: false,
    };

    let plan = ModelPlan {
        name: "busy".to_owned(),
        sequence: 1,
        seed: 5,
        dense: 2,
        tables,
        features: (0..6).map(feature).collect(),
    };

    let packed = plan.pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let model = open(&packed.install(), tiny_budget(&packed.schema, BATCH_MAX), 7);
    let samples: Vec<Sample> = (0..60).map(|id| plan.sample(id)).collect();

    std::thread::scope(|scope| {
        for thread in 0..3usize {
            let (model, samples, reference) = (&model, &samples, &reference);
            scope.spawn(move || {
                let mut worker = worker(model);
                for turn in 0..25 {
                    let start = (turn * 7 + thread * 11) % (samples.len() - 10);
                    check(&mut worker, reference, &samples[start..start + 1 + turn % 10]);
                }
                assert!(worker.counters().hit_rate() < 1.0, "the cache is not tiny");
            });
        }
    });
}

/// With room for every row, the second round takes one launch and one wait a request, and copies
/// and reads nothing.
#[test]
fn a_request_without_misses_is_one_launch() {
    let _turn = standin::alone();
    let _alone = COUNTING.write().unwrap_or_else(PoisonError::into_inner);
    let plan = plan(1001);
    let packed = plan.pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let model = open(&packed.install(), Budget { batch_max: 64, ..Budget::default() }, 3);
    let mut worker = worker(&model);

    // A key that its table does not have misses every time; the samples have no such key.
    let known = |mut sample: Sample| {
        for (f, bag) in sample.sparse.iter_mut().enumerate() {
            bag.retain(|&key| {
                let mut tables = packed.schema.lookups_of(f).map(|l| usize::from(l.table));
                tables.all(|t| reference.row(t, key).is_some())
            });
        }
        sample
    };

    let samples: Vec<Sample> = (0..64).map(|id| known(plan.sample(id))).collect();
    let loaded = || standin::load().map(|s| s.counts().loaded);
    let before = loaded();
    check(&mut worker, &reference, &samples);
    assert_eq!(loaded(), before, "kernels that were first launched by a request");

    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: counting launches: only the stand-in counts");
    };
    let (counted, before) = (worker.counters(), stand_in.counts());
    check(&mut worker, &reference, &samples);

    let (counted, after) = (worker.counters().since(&counted), stand_in.counts());
    assert_eq!((counted.misses, counted.pages), (0, 0));
    assert_eq!(
        (
            after.launches - before.launches,
            after.waits - before.waits,
            after.copies - before.copies
        ),
        // A GPU with memory of its own receives the keys by one copy.
        (1, 1, u64::from(!standin::is_board()))
    );
    assert_eq!(after.bytes, before.bytes);
}

/// Rows that policy `default` answered without are cached for the next request, as prefetched rows
/// are.
#[test]
fn deferred_and_prefetched_rows_are_cached_for_the_next_request() {
    let _turn = standin::alone();
    let _shared = not_counting();
    // Each table has its own cache, because the row widths differ.
    let table = |keys, dim| TablePlan {
        miss: MissPolicy::Default,
        ..TablePlan::cached(keys, 400, dim, CodecChoice::U8)
    };

    let tables = vec![table(KeySpace::Index, 20), table(KeySpace::Sparse, 24)];
    let features = (0..2).map(FeaturePlan::one_hot).collect();
    let plan =
        ModelPlan { name: "deferred".to_owned(), sequence: 1, seed: 9, dense: 0, tables, features };
    let packed = plan.pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let model = open(&packed.install(), Budget::default(), 11);
    let mut worker = worker(&model);
    let keys = [packed.rows[0].all_keys(), packed.rows[1].all_keys()];
    let sample = |i: usize| Sample {
        sparse: keys.iter().map(|k| vec![k[i]]).collect(),
        ..Sample::default()
    };
    let batch = batch_of(&model, &(0..40).map(sample).collect::<Vec<_>>());

    assert_eq!(
        worker.score(&batch, None).unwrap().status(),
        LookupStatus { defaulted: 80, ..LookupStatus::default() }
    );

    // Keys that are cached, keys that are not, and one key twice.
    for (table, keys) in keys.iter().enumerate() {
        for &key in keys[20..70].iter().chain(&keys[..5]) {
            assert!(worker.enqueue_prefetch(hatchback::RowKey { table: table as u16, key }));
        }
    }

    let (mut inserted, mut steps) = (0, 0);
    while worker.deferred_len() > 0 {
        inserted += worker.fetch_deferred(2);
        steps += 1;
    }

    assert!(inserted >= 140 && steps > 1, "{inserted} rows in {steps} steps");
    let samples: Vec<Sample> = (0..70).map(sample).collect();
    let misses = worker.counters().misses;
    check(&mut worker, &reference, &samples);
    assert_eq!(worker.counters().misses, misses);

    // Cached rows are not read again.
    let pages = worker.counters().pages;
    for (table, keys) in keys.iter().enumerate() {
        assert!(worker.enqueue_prefetch(hatchback::RowKey { table: table as u16, key: keys[3] }));
    }

    assert_eq!(
        (worker.fetch_deferred(8), worker.counters().pages, worker.deferred_len()),
        (0, pages, 0)
    );
}

#[test]
fn a_pipeline_serves_from_the_gpu() {
    let _turn = standin::alone();
    let _shared = not_counting();
    let plan = plan(77);
    let packed = plan.pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let budget = Budget { batch_max: BATCH_MAX, workers: 2, ..Budget::default() };
    let model = open(&packed.install(), budget, 13);
    let pipeline = Pipeline::new(Arc::clone(&model), Arc::new(SystemClock::default())).unwrap();
    for turn in 0..20 {
        let samples: Vec<Sample> = (turn..turn + 5).map(|id| plan.sample(id)).collect();
        let tickets = [(); 3].map(|()| pipeline.submit(&batch_of(&model, &samples), None).unwrap());
        for ticket in &tickets {
            let answer = ticket.wait().unwrap();
            let scores = answer.scores();
            let outputs = scores.values.len() / samples.len();
            for (score, sample) in scores.values.chunks(outputs).zip(&samples) {
                assert!(same_bits(score, &reference.output(sample)));
            }
        }
    }
}

/// The budget counts the memory that the GPU shares with the host.
#[test]
fn a_budget_that_does_not_hold_is_refused() {
    let _turn = standin::alone();
    let _shared = not_counting();
    let mut plan = plan(3);
    plan.tables.iter_mut().for_each(|table| table.counts = false);
    let packed = plan.pack();
    let flash = packed.install();
    let open = |memory_bytes_max| {
        let budget = Budget {
            memory_bytes_max,
            batch_max: BATCH_MAX,
            misses_max: 64,
            cache_bytes_max: 1 << 16,
            ..Budget::default()
        };
        open_model(&flash, budget)
    };

    let total = open(1 << 30).unwrap().memory().total();
    let gpu = Device::Cuda(standin::gpu(1));
    let error = open(total).unwrap().move_to_device(&gpu).err().unwrap();
    assert!(matches!(&error, OpenError::Budget { field: "memory_bytes_max", .. }), "{error}");
    assert!(error.to_string().contains("that the GPU shares"), "{error}");

    let model = open(1 << 30).unwrap();
    let held: u64 = model.memory().lines()[..2].iter().map(|(_, bytes)| bytes).sum();
    let held = held.max(model.memory().opening_bytes());
    let onto = model.move_to_device(&gpu).unwrap();

    // The peak while the model was opened is reported, and is within the total.
    let opening = onto.memory().opening_bytes();
    assert!(
        opening > 0 && opening <= held && onto.memory().to_string().contains("more for a while")
    );

    let more = onto.memory().total();
    assert_eq!(open(more).unwrap().move_to_device(&gpu).unwrap().memory().total(), more);
}

/// A model with two caches, for two row widths, and its sample `i`, with three rows of each.
fn two_caches(seed: u64, misses: [MissPolicy; 2]) -> (ModelPlan, impl Fn(u64) -> Sample) {
    let table = |miss, dim| TablePlan {
        miss,
        ..TablePlan::cached(KeySpace::Index, 400, dim, CodecChoice::U8)
    };
    let tables = vec![table(misses[0], 20), table(misses[1], 24)];
    let feature = |table| FeaturePlan { hotness_max: 3, ..FeaturePlan::one_hot(table) };
    let features = (0..2).map(feature).collect();
    let plan = ModelPlan { name: "two".to_owned(), sequence: 1, seed, dense: 0, tables, features };
    let keys = |i: u64| (0..3).map(|n| (7 * i + 31 * n) % 400).collect::<Vec<u64>>();
    (plan, move |i| Sample { sparse: vec![keys(i), keys(i + 200)], ..Sample::default() })
}

/// Opens the model on the GPU with room for every row, with or without its network.
fn open_for(packed: &Packed, with_dense: bool, seed: u64) -> Arc<Model> {
    let flash = packed.install();
    let model = open(&flash, Budget { batch_max: BATCH_MAX, ..Budget::default() }, seed);
    let flash = Flash::open(&hatchback::io::disk::system(), &flash).unwrap();
    match with_dense {
        true => Arc::new(
            Arc::into_inner(model).unwrap().move_dense_to_gpu(&flash, &Default::default()).unwrap(),
        ),
        false => model,
    }
}

/// A launch fails while rows are being inserted into a cache, and rows of deferred fetches are
/// staged next.
#[test]
fn an_insert_ends_before_its_staging_rows_are_reused() {
    let _turn = standin::alone();
    let _alone = COUNTING.write().unwrap_or_else(PoisonError::into_inner);
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: a call that fails: only the stand-in can inject a fault");
    };

    for seed in 0..4 {
        let (plan, sample) = two_caches(seed, [MissPolicy::Wait, MissPolicy::Default]);
        let packed = plan.pack();
        let reference = Reference::new(&packed.schema, &packed.rows);
        let with_dense = seed % 2 == 1;
        let model = open_for(&packed, with_dense, seed);
        let mut worker = worker(&model);

        for first in [0, 12, 24] {
            let samples: Vec<Sample> = (first..first + 12).map(&sample).collect();
            let (what, after) = if with_dense { (c"graph", 1) } else { (c"finish_bags", 0) };
            stand_in.fault(what, after, 1);
            assert!(
                worker.score(&batch_of(&model, &samples), None).is_err()
                    && worker.deferred_len() > 0
            );
            while worker.deferred_len() > 0 {
                worker.fetch_deferred(8);
            }
            check(&mut worker, &reference, &samples);
        }
    }
}

/// A driver call that fails once fails its request, or drops the rows that were being prefetched,
/// and has no other effect: every row that is cached afterwards belongs to its key.
#[test]
fn a_call_that_fails_once_leaves_no_row_under_another_key() {
    let _turn = standin::alone();
    let _alone = COUNTING.write().unwrap_or_else(PoisonError::into_inner);
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: a call that fails: only the stand-in can inject a fault");
    };

    // The network on the GPU, or on the CPU.
    for seed in 0..12 {
        let (plan, sample) = two_caches(seed, [MissPolicy::Wait; 2]);
        let packed = plan.pack();
        let reference = Reference::new(&packed.schema, &packed.rows);
        let with_dense = seed % 2 == 1;
        let model = open_for(&packed, with_dense, seed);
        let mut worker = worker(&model);
        let samples = |from: u64, count: u64| (from..from + count).map(&sample).collect::<Vec<_>>();
        let mut faults = vec![(c"insert_rows", 0), (c"insert_rows", 1), (c"wait", 0), (c"wait", 1)];
        faults.push(if with_dense { (c"graph", 1) } else { (c"finish_bags", 0) });

        for (number, (what, after)) in faults.into_iter().enumerate() {
            let first = 24 * number as u64;
            let batch = batch_of(&model, &samples(first, 12));
            stand_in.fault(what, after, 1);
            let failed = worker.score(&batch, None).map(drop).unwrap_err().to_string();
            assert!(failed.starts_with("CUDA: "), "{failed}");
            // Other rows are staged in the same place, and then all of them are requested.
            check(&mut worker, &reference, &samples(first + 12, 12));
            check(&mut worker, &reference, &samples(first, 12));
        }

        for (number, (what, after)) in
            [(c"probe_rows", 0), (c"probe_rows", 1), (c"insert_rows", 1)].into_iter().enumerate()
        {
            let keys = 130 + 90 * number as u64..170 + 90 * number as u64;

            for key in keys.clone() {
                assert!(
                    (0..2).all(|table| worker.enqueue_prefetch(hatchback::RowKey { table, key }))
                );
            }

            stand_in.fault(what, after, 1);
            while worker.deferred_len() > 0 {
                worker.fetch_deferred(8);
            }

            let asked = |key| Sample {
                sparse: vec![vec![key % 400], vec![key % 400]],
                ..Sample::default()
            };
            check(&mut worker, &reference, &(380..392).map(asked).collect::<Vec<_>>());

            for keys in keys.collect::<Vec<u64>>().chunks(12) {
                check(
                    &mut worker,
                    &reference,
                    &keys.iter().map(|&key| asked(key)).collect::<Vec<_>>(),
                );
            }
        }
    }
}

/// A worker for which the GPU has no memory returns that error to every request and prefetches
/// nothing. So does a worker whose GPU has failed.
#[test]
fn a_worker_without_a_gpu_prefetches_nothing() {
    let _turn = standin::alone();
    let _alone = COUNTING.write().unwrap_or_else(PoisonError::into_inner);
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: a call that fails: only the stand-in can inject a fault");
    };
    let (plan, sample) = two_caches(5, [MissPolicy::Default; 2]);
    let packed = plan.pack();
    let model = open(&packed.install(), Budget { batch_max: BATCH_MAX, ..Budget::default() }, 5);
    let batch = batch_of(&model, &[sample(1)]);
    let row = |key| hatchback::RowKey { table: 0, key };
    stand_in.fault(c"pinned memory", 0, 1);
    let (mut broken, mut gone) = (worker(&model), worker(&model));
    assert!(broken.score(&batch, None).unwrap_err().to_string().contains("pinned memory"));
    assert_eq!(gone.score(&batch, None).unwrap().status().defaulted, 6);
    assert!(gone.enqueue_prefetch(row(50)) && gone.deferred_len() == 7);
    // The wait for the started work fails too.
    stand_in.fault(c"wait", 0, 2);
    for worker in [&mut broken, &mut gone] {
        assert!(worker.score(&batch, None).is_err() && worker.score(&batch, None).is_err());
        assert!(!worker.enqueue_prefetch(row(60)));
        assert_eq!((worker.fetch_deferred(8), worker.deferred_len()), (0, 0));
    }
}

/// Between requests through a pipeline no driver call is made.
#[test]
fn a_request_through_a_pipeline_is_one_launch_and_one_wait() {
    let _turn = standin::alone();
    let _alone = COUNTING.write().unwrap_or_else(PoisonError::into_inner);
    let (plan, sample) = two_caches(6, [MissPolicy::Wait; 2]);
    let packed = plan.pack();
    let model = open(&packed.install(), Budget { batch_max: BATCH_MAX, ..Budget::default() }, 6);
    let Device::Cuda(gpu) = model.lookup_device() else { unreachable!() };
    let pipeline = Pipeline::new(Arc::clone(&model), Arc::new(SystemClock::default())).unwrap();
    let ask = || {
        let batch = batch_of(&model, &(0..10).map(&sample).collect::<Vec<_>>());
        pipeline.submit(&batch, None).unwrap().wait().map(drop).unwrap();
    };
    // One round with misses, and one for the deferred fetches after the first answer.
    (0..2).for_each(|_| ask());
    let before = gpu.calls();
    (0..20).for_each(|_| ask());
    // Dropping the pipeline ends the worker, whatever it is doing. Before it frees its memory, it
    // waits for the changes so far.
    drop(pipeline);
    let after = gpu.calls();
    assert_eq!((after.launches - before.launches, after.waits - before.waits), (20, 21));
}
