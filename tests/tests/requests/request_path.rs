//! The request flow against the plain reference: every score is equal bit for bit, and the status
//! counts every lookup correctly, whichever rows are cached, evicted or missing.

use hatchback::clock::SystemClock;
use hatchback::model::OpenError;
use hatchback::model::budget::Budget;
use hatchback::request::worker::{ScoreError, Worker};
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, MissPolicy, Placement};
use hatchback::{LookupStatus, Pooling};
use hatchback_tests::models::{
    FeaturePlan, ModelPlan, Packed, TablePlan, batch_of, open_model, open_with_least_cache,
    tiny_budget,
};
use hatchback_tests::onnx;
use hatchback_tests::reference::{Reference, same_bits};
use hatchback_tools::pack::key_spec::KeySpec;
use hatchback_tools::pack::spec::{CodecChoice, ModelSpec};
use proptest::prelude::*;
use serde_json::json;
use std::collections::HashSet;
use std::sync::Arc;

pub const BATCH_MAX: u32 = 12;

fn table() -> impl Strategy<Value = TablePlan> {
    use CodecChoice::{Auto, F16, F32, U4, U8};
    let keys = prop::sample::select(vec![KeySpace::Index, KeySpace::Sparse]);
    let rows = prop_oneof![1..4u64, 1..600u64];
    let dim = prop_oneof![1..41usize, Just(1), Just(16), Just(17), Just(32)];
    let codec = prop::sample::select(vec![Auto, F32, F16, U8, U4]);
    let placement = prop::sample::select(vec![
        Placement::Resident,
        Placement::Cached,
        Placement::Cached,
        Placement::Auto,
    ]);
    (keys, rows, dim, codec, placement, any::<[bool; 2]>()).prop_map(
        |(keys, rows, dim, codec, placement, [default_zeros, counts])| TablePlan {
            keys,
            rows,
            dim,
            codec,
            placement,
            miss: MissPolicy::Wait,
            default_zeros,
            counts,
        },
    )
}

fn feature(tables: usize) -> impl Strategy<Value = FeaturePlan> {
    let pooling = prop::sample::select(vec![
        Pooling::Sum,
        Pooling::Mean,
        Pooling::None,
        Pooling::Sqrtn,
        Pooling::Max,
    ]);
    let all = prop::sample::subsequence((0..tables).collect::<Vec<_>>(), 1..=tables.min(3));
    (all.prop_shuffle(), pooling, 1..7u32, any::<bool>(), any::<bool>()).prop_map(
        |(tables, pooling, hotness_max, second_input, weighted)| FeaturePlan {
            table: tables[0],
            more_tables: tables[1..].to_vec(),
            pooling,
            hotness_max,
            second_input,
            weighted: weighted && !matches!(pooling, Pooling::None | Pooling::Max),
            shared: false,
        },
    )
}

pub fn model() -> impl Strategy<Value = ModelPlan> {
    let tables = prop::collection::vec(table(), 1..6);
    let with_features = tables.prop_flat_map(|tables| {
        let features = prop::collection::vec(feature(tables.len()), 1..8);
        (Just(tables), features)
    });
    (with_features, any::<u64>(), 0..4usize).prop_map(|((tables, features), seed, dense)| {
        ModelPlan { name: "random".to_owned(), sequence: 1, seed, dense, tables, features }
    })
}

/// Batches of sample numbers. One number is one sample, so that batches repeat and shrink.
fn batches() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let size = prop_oneof![Just(0), Just(BATCH_MAX as usize), 0..=BATCH_MAX as usize];
    prop::collection::vec(size.prop_flat_map(|n| prop::collection::vec(0..40u8, n)), 1..8)
}

/// Scores `samples` and compares scores, statuses and counters with the reference.
fn check(
    worker: &mut Worker,
    reference: &Reference,
    samples: &[Sample],
) -> Result<(), TestCaseError> {
    let batch = batch_of(&Arc::clone(worker.model()), samples);
    let before = worker.counters();
    let scores = worker.score(&batch, None).unwrap();
    let outputs = scores.values.len() / samples.len().max(1);
    prop_assert_eq!(scores.statuses.len(), samples.len());

    for (i, sample) in samples.iter().enumerate() {
        let (score, expected) =
            (&scores.values[i * outputs..][..outputs], reference.output(sample));
        prop_assert!(same_bits(score, &expected), "sample {i}: {score:?} instead of {expected:?}");
        prop_assert_eq!(scores.statuses[i], reference.status(sample), "sample {}", i);
    }

    let lookups: u64 = samples.iter().map(|sample| reference.status(sample).lookups()).sum();
    prop_assert_eq!(scores.status().lookups(), lookups);
    let counted = worker.counters().since(&before);
    prop_assert_eq!(counted.lookups, lookups);
    prop_assert!(
        counted.cached_lookups <= lookups && counted.missed_lookups <= counted.cached_lookups
    );
    prop_assert!(counted.misses <= counted.missed_lookups && counted.pages <= counted.misses);
    prop_assert_eq!(counted.pages_damaged, 0);

    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 100,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// One feature of several tables is as good as one feature for each table, with the same keys.
    #[test]
    fn a_feature_of_several_tables_scores_as_its_copies(plan in model(), batches in batches()) {
        let copies = apart(&plan);
        let own: Vec<usize> = (0..plan.features.len()).collect();
        let origins: Vec<usize> =
            own.iter().flat_map(|&f| plan.features[f].tables().map(move |_| f)).collect();
        let mut sides = [(&plan, &own), (&copies, &origins)].map(|(side, origins)| {
            let packed = side.pack_spec(&spec_with_keys(side, &plan, origins), onnx::concat);
            let budget = tiny_budget(&packed.schema, BATCH_MAX);
            let model = open_with_least_cache(&packed.install(), budget);
            (Worker::new(model, Arc::new(SystemClock::default())), origins)
        });
        for batch in batches {
            let drawn: Vec<Sample> = batch.iter().map(|id| plan.sample(u64::from(*id))).collect();
            let [shared, copied] = sides.each_mut().map(|(worker, origins)| {
                let schema = Arc::clone(worker.model().schema());
                let sample =
                    |s: &Sample| Sample::from_json(&line_for(s, origins), &schema).unwrap();
                let samples: Vec<Sample> = drawn.iter().map(sample).collect();
                let batch = batch_of(&Arc::clone(worker.model()), &samples);
                let scores = worker.score(&batch, None).unwrap();
                (scores.values.to_vec(), scores.statuses.to_vec())
            });
            prop_assert!(same_bits(&shared.0, &copied.0));
            prop_assert_eq!(shared.1, copied.1);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// On one worker, request after request, with the smallest cache and the shortest miss list.
    #[test]
    fn scores_are_the_references(
        plan in model(),
        batches in batches(),
        resident in any::<bool>(),
        more_inputs in any::<bool>(),
    ) {
        let spec = if more_inputs { plan.spec_with_bag_inputs() } else { plan.spec() };
        let packed = plan.pack_spec(&spec, onnx::concat);
        let reference = Reference::new(&packed.schema, &packed.rows);
        let mut budget = tiny_budget(&packed.schema, BATCH_MAX);
        // With no bytes for resident tables the automatic tables are cached too.
        if !resident && plan.tables.iter().all(|t| t.placement != Placement::Resident) {
            budget.resident_bytes_max = 0;
        }
        let model = open_with_least_cache(&packed.install(), budget);
        prop_assert!(model.memory().total() <= budget.memory_bytes_max);
        let mut worker = Worker::new(Arc::clone(&model), Arc::new(SystemClock::default()));
        for batch in &batches {
            let samples: Vec<Sample> = batch.iter().map(|id| plan.sample(u64::from(*id))).collect();
            check(&mut worker, &reference, &samples)?;
        }
    }
}

/// Plans tables of every codec, some of one row width, with so many rows that the smallest cache
/// always evicts.
fn busy_plan(seed: u64) -> ModelPlan {
    use CodecChoice::{F16, F32, U4, U8};
    let tables = vec![
        TablePlan::cached(KeySpace::Sparse, 3000, 12, U8),
        TablePlan::cached(KeySpace::Index, 3000, 12, U8),
        TablePlan::cached(KeySpace::Sparse, 900, 24, F32),
        TablePlan::cached(KeySpace::Index, 900, 8, F16),
        TablePlan::cached(KeySpace::Sparse, 900, 9, U4),
    ];
    let feature = |(i, pooling)| FeaturePlan {
        table: i % tables.len(),
        pooling,
        hotness_max: 1 + (i as u32 * 5) % 6,
        second_input: i % 3 == 0,
        weighted: matches!(i, 3 | 5 | 6),
        ..FeaturePlan::one_hot(0)
    };
    let poolings =
        [Pooling::Sum, Pooling::Mean, Pooling::None, Pooling::Sqrtn, Pooling::Max].into_iter();
    let poolings = poolings.cycle().take(8);
    let features = poolings.enumerate().map(feature).collect();
    ModelPlan { name: "busy".to_owned(), sequence: 1, seed, dense: 2, tables, features }
}

/// Several threads read and write one cache. No torn, stale or foreign row reaches a score.
#[test]
fn many_workers_on_one_model_score_as_one() {
    let plan = busy_plan(5);
    let packed = plan.pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let model = open_with_least_cache(&packed.install(), tiny_budget(&packed.schema, BATCH_MAX));
    // Few distinct samples, so that the threads use the same sets.
    let samples: Vec<Sample> = (0..60).map(|id| plan.sample(id)).collect();
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            let (model, samples, reference) = (Arc::clone(&model), &samples, &reference);
            scope.spawn(move || {
                let mut worker = Worker::new(model, Arc::new(SystemClock::default()));
                for turn in 0..150 {
                    let start = (turn * 7 + thread * 11) % (samples.len() - 10);
                    check(&mut worker, reference, &samples[start..start + 1 + turn % 10]).unwrap();
                }
                assert!(worker.counters().hit_rate() < 1.0, "the cache is not tiny");
            });
        }
    });
}

/// A cache of one set, and the same keys in tables of one row width: every row evicts another, and
/// none is served for another key or another table.
#[test]
fn no_row_is_served_for_another() {
    let tables = vec![TablePlan::cached(KeySpace::Index, 1500, 8, CodecChoice::F32); 4];
    let features = (0..4).map(FeaturePlan::one_hot).collect();
    let plan =
        ModelPlan { name: "alike".to_owned(), sequence: 1, seed: 8, dense: 0, tables, features };
    let packed = plan.pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let budget = Budget { misses_max: 64, ..tiny_budget(&packed.schema, BATCH_MAX) };
    let model = open_with_least_cache(&packed.install(), budget);
    assert_eq!(model.cache_slots(), 14);
    let mut worker = Worker::new(model, Arc::new(SystemClock::default()));
    // Each table is looked up while another table's row of the same key is cached.
    for key in 0..1500 {
        for table in [0, 1, 1, 2, 3, 3, 0] {
            let mut sparse = vec![Vec::new(); 4];
            sparse[table] = vec![key];
            check(&mut worker, &reference, &[Sample { sparse, ..Sample::default() }]).unwrap();
        }
    }
    let hit_rate = worker.counters().hit_rate();
    assert!(hit_rate > 0.2, "{hit_rate}");
}

/// Returns `plan` with a feature of its own for each table of each feature.
fn apart(plan: &ModelPlan) -> ModelPlan {
    let alone = |f: &FeaturePlan| {
        let f = f.clone();
        let tables: Vec<usize> = f.tables().collect();
        let alone = move |table| FeaturePlan { table, more_tables: Vec::new(), ..f.clone() };
        tables.into_iter().map(alone)
    };
    ModelPlan { features: plan.features.iter().flat_map(alone).collect(), ..plan.clone() }
}

/// Returns the spec of `plan`. Every second feature has a key function, which makes keys that are
/// in all tables of that feature in `shared`. `origins` has the feature of `shared` for each.
fn spec_with_keys(plan: &ModelPlan, shared: &ModelPlan, origins: &[usize]) -> ModelSpec {
    let mut spec = plan.spec_with_bag_inputs();
    // Lengths and masks are of features, and so differ in number.
    spec.network.inputs.retain(|i| i.lengths.is_empty() && i.masks.is_empty());
    for (feature, &origin) in spec.features.iter_mut().zip(origins).filter(|(_, f)| *f % 2 == 0) {
        let rows = shared.features[origin].tables().map(|t| shared.tables[t].rows);
        feature.key = Some(KeySpec::Modulo { divisor: rows.min().unwrap(), first: 0 });
    }
    spec
}

/// Returns the JSON of a sample of `shared` in which each feature of `origins` has the bag of its
/// origin.
fn line_for(shared: &Sample, origins: &[usize]) -> String {
    let named = |(f, &origin): (usize, &usize)| (format!("f{f}"), origin);
    let bags = || origins.iter().enumerate().map(named);
    let sparse: serde_json::Map<_, _> =
        bags().map(|(name, f)| (name, json!(shared.sparse[f]))).collect();
    let weights = bags().filter(|(_, f)| shared.weights.get(*f).is_some_and(|w| !w.is_empty()));
    let weights: serde_json::Map<_, _> =
        weights.map(|(name, f)| (name, json!(shared.weights[f]))).collect();
    json!({ "dense": shared.dense, "sparse": sparse, "weights": weights }).to_string()
}

/// With room for every row, the second round reads nothing.
#[test]
fn rows_that_fit_the_cache_are_read_once() {
    let plan = busy_plan(6);
    let packed = plan.pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let model = Arc::new(open_model(&packed.install(), Budget::default()).unwrap());
    let mut worker = Worker::new(model, Arc::new(SystemClock::default()));

    // A key that its table does not have never enters the cache, so the samples have no such key.
    let mut samples: Vec<Sample> = (0..200).map(|id| plan.sample(id)).collect();
    for sample in &mut samples {
        for (f, bag) in sample.sparse.iter_mut().enumerate() {
            bag.retain(|&key| {
                reference.row(usize::from(packed.schema.lookups[f].table), key).is_some()
            });
            sample.weights[f].truncate(bag.len());
        }
    }

    samples.chunks(50).for_each(|s| check(&mut worker, &reference, s).unwrap());
    let first = worker.counters();
    let distinct: HashSet<(u16, u64)> = samples
        .iter()
        .flat_map(|s| s.sparse.iter().zip(&packed.schema.lookups))
        .flat_map(|(bag, lookup)| bag.iter().map(|&key| (lookup.table, key)))
        .collect();
    assert_eq!(first.misses, distinct.len() as u64, "a row was fetched twice");

    assert!(first.pages > 0);
    samples.chunks(50).for_each(|s| check(&mut worker, &reference, s).unwrap());
    assert_eq!(worker.counters().since(&first).pages, 0);
}

/// With room for every row of indexed tables, the cache has a slot for each row and for its growth,
/// and no more. Each row is read once.
#[test]
fn a_cache_with_room_for_every_row_has_a_slot_for_each() {
    let tables = vec![TablePlan::cached(KeySpace::Index, 1500, 8, CodecChoice::F32); 2];
    let features = (0..2).map(FeaturePlan::one_hot).collect();
    let plan =
        ModelPlan { name: "whole".to_owned(), sequence: 1, seed: 8, dense: 0, tables, features };
    let packed = plan.pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let budget = Budget { resident_bytes_max: 0, ..Budget::default() };
    let model = Arc::new(open_model(&packed.install(), budget).unwrap());
    let growth = 1500 / 8 + 4096;
    assert_eq!(model.cache_slots(), (2 * (1500 + growth) as usize).next_multiple_of(14));

    let mut worker = Worker::new(model, Arc::new(SystemClock::default()));
    let samples: Vec<Sample> = (0..1500)
        .map(|key| Sample { sparse: vec![vec![key], vec![1499 - key]], ..Sample::default() })
        .collect();
    samples.chunks(50).for_each(|s| check(&mut worker, &reference, s).unwrap());
    let first = worker.counters();
    assert_eq!(first.misses, 3000);
    samples.chunks(50).for_each(|s| check(&mut worker, &reference, s).unwrap());
    assert_eq!(worker.counters().since(&first).misses, 0);
}

/// The plan has the bytes of every row, whether its table is cached or resident, and of what a
/// request needs.
#[test]
fn the_memory_plan_has_every_row() {
    let lines = [(Placement::Cached, "embedding caches"), (Placement::Resident, "resident tables")];
    for (placement, line) in lines {
        let cached = TablePlan::cached(KeySpace::Sparse, 1500, 8, CodecChoice::F32);
        let plan = ModelPlan {
            name: "planned".to_owned(),
            sequence: 1,
            seed: 8,
            dense: 0,
            tables: vec![TablePlan { placement, ..cached }],
            features: vec![FeaturePlan::one_hot(0)],
        };
        let budget = Budget::default();
        let model = open_model(&plan.pack().install(), budget).unwrap();
        let lines = model.memory().lines();
        let bytes = |line: &str| lines.iter().find(|(name, _)| *name == line).unwrap().1;
        assert!(bytes(line) >= 1500 * 32, "{line}: {lines:?}");
        // A fence of 4 bytes for each page but the first.
        let index = "indexes of the segments and overlays of their deltas";
        assert!(placement == Placement::Resident || bytes(index) > 8, "{lines:?}");
        let (batch, workers) = (u64::from(budget.batch_max), u64::from(budget.workers));
        assert!(bytes("dense network inputs, all workers") >= workers * batch * 32, "{lines:?}");
        assert!(bytes("page buffers, all workers") >= workers * 4096, "{lines:?}");
        assert!(bytes("scores and statuses, all workers") >= workers * batch * 20, "{lines:?}");
        assert!(bytes("batches, all workers") >= workers * batch * 8, "{lines:?}");
        assert!(bytes("queues of requests and of keys to prefetch") > 8 << 10, "{lines:?}");
    }
}

/// A table with few rows of a width that no other table has still gets a cache of one set beside a
/// large table.
#[test]
fn a_small_table_beside_a_large_one_has_its_cache() {
    let mut plan = small_plan(1, &[2]);
    plan.tables.push(TablePlan::cached(KeySpace::Sparse, 20_000, 64, CodecChoice::F32));
    plan.tables.push(TablePlan::cached(KeySpace::Index, 3, 1, CodecChoice::F16));
    plan.features.extend([FeaturePlan::one_hot(1), FeaturePlan::one_hot(2)]);
    let packed = plan.pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let (flash, batch_max) = (packed.install(), 8);
    let budget = Budget { cache_bytes_max: 64 << 10, ..tiny_budget(&packed.schema, batch_max) };
    let model = Arc::new(open_model(&flash, budget).unwrap());

    assert!(model.memory().lines()[0].1 <= budget.cache_bytes_max);
    let mut worker = Worker::new(model, Arc::new(SystemClock::default()));
    let samples: Vec<Sample> = (0..8).map(|id| plan.sample(id)).collect();
    check(&mut worker, &reference, &samples).unwrap();

    // Less than one set for each width is refused. The tags of sparse keys need four sets.
    let bytes = |(sets, row_bytes, head): (u64, u64, u64)| sets * (head + 24 + 14 * row_bytes) + 64;
    let least = [(1, 16, 64), (4, 256, 128), (1, 4, 64)].map(bytes).iter().sum::<u64>();
    let open = |cache_bytes_max| open_model(&flash, Budget { cache_bytes_max, ..budget }).err();

    assert_eq!(open(least).map(|e| e.to_string()), None);
    let error = open(least - 1).unwrap().to_string();
    assert_eq!(
        error,
        "budget.cache_bytes_max = 15591: the smallest caches for 3 row widths take 15592 bytes"
    );
}

fn request_error(
    worker: &mut Worker,
    batch: &hatchback::schema::batch::Batch,
) -> (&'static str, String) {
    match worker.score(batch, None) {
        Err(ScoreError::Request { field, problem }) => (field, problem),
        other => panic!("{other:?}"),
    }
}

fn small_plan(dense: usize, hotness: &[u32]) -> ModelPlan {
    let tables = vec![TablePlan::cached(KeySpace::Index, 300, 4, CodecChoice::F32)];
    let feature = |h: &u32| FeaturePlan {
        pooling: Pooling::None,
        hotness_max: *h,
        ..FeaturePlan::one_hot(0)
    };
    let features = hotness.iter().map(feature).collect();
    ModelPlan { name: "small".to_owned(), sequence: 1, seed: 1, dense, tables, features }
}

fn open(packed: &Packed) -> Worker {
    let model = open_with_least_cache(&packed.install(), tiny_budget(&packed.schema, 4));
    Worker::new(model, Arc::new(SystemClock::default()))
}

#[test]
fn a_batch_over_the_limit_is_refused() {
    let plan = small_plan(1, &[2]);
    let packed = plan.pack();
    let mut worker = open(&packed);
    let schema = worker.model().schema().clone();
    let mut batch = hatchback::schema::batch::Batch::new(&schema, 5);
    (0..5).for_each(|id| batch.push(&schema, &plan.sample(id)).unwrap());
    assert_eq!(
        request_error(&mut worker, &batch),
        ("batch", "5 samples, the budget allows 4".to_owned())
    );
    assert_eq!(
        batch.push(&schema, &plan.sample(9)).unwrap_err().to_string(),
        "the batch holds its maximum of 5 samples"
    );
}

/// A batch that was made for another model: fewer or more features, other dense features, longer
/// bags. A longer bag would overrun the feature's columns, or never fit a shorter miss list.
#[test]
fn a_batch_of_another_schema_is_refused() {
    let packed = small_plan(1, &[2, 2]).pack();
    let mut worker = open(&packed);
    let others = [
        (small_plan(1, &[2]), "features"),
        (small_plan(1, &[2, 2, 2]), "features"),
        (small_plan(2, &[2, 2]), "dense"),
        (small_plan(0, &[2, 2]), "dense"),
        (small_plan(1, &[2, 3]), "hotness"),
    ];

    for (plan, field) in others {
        let other = plan.pack();
        let mut batch = hatchback::schema::batch::Batch::new(&other.schema, 4);
        let longest =
            other.schema.features.iter().map(|f| vec![7; f.hotness_max as usize]).collect();
        let sample = Sample { dense: vec![1.0; plan.dense], sparse: longest, ..Sample::default() };
        batch.push(&other.schema, &sample).unwrap();
        assert_eq!(request_error(&mut worker, &batch).0, field);
    }

    // A batch that fits is served, whichever schema it was made with.
    let roomy = small_plan(1, &[4, 6]).pack();
    let mut batch = hatchback::schema::batch::Batch::new(&roomy.schema, 4);
    let sample =
        Sample { dense: vec![1.0], sparse: vec![vec![1, 2], vec![3]], ..Sample::default() };
    batch.push(&roomy.schema, &sample).unwrap();

    assert_eq!(
        worker.score(&batch, None).unwrap().status(),
        LookupStatus { fresh: 3, ..LookupStatus::default() }
    );
}

/// A batch takes samples of one shape only, even if each fits the schema that is passed with it.
#[test]
fn a_batch_takes_no_sample_of_another_schema() {
    let (one, two) = (small_plan(3, &[2]).pack(), small_plan(1, &[2, 2]).pack());
    let mut batch = hatchback::schema::batch::Batch::new(&one.schema, 4);
    let sample = Sample { dense: vec![1.0], sparse: vec![vec![1], vec![2]], ..Sample::default() };
    assert!(batch.push(&two.schema, &sample).is_err());
    assert!(batch.is_empty() && batch.dense().is_empty());
}

#[test]
fn samples_that_do_not_fit_are_refused_by_name() {
    let plan = small_plan(2, &[2, 3]);
    let schema = plan.pack().schema;
    let mut batch = hatchback::schema::batch::Batch::new(&schema, 4);
    let good = Sample { dense: vec![0.0; 2], sparse: vec![vec![1], vec![]], ..Sample::default() };
    let mut refused = |change: &dyn Fn(&mut Sample), text: &str| {
        let mut sample = good.clone();
        change(&mut sample);
        let error = batch.push(&schema, &sample).unwrap_err().to_string();
        assert_eq!(error, text);
        assert!(batch.is_empty());
    };
    refused(&|s| s.dense = vec![0.0], "dense: 1 values, the model takes 2");
    refused(&|s| s.dense[1] = f32::NAN, "dense[1]: `d1` is NaN, and has no value for `missing`");
    refused(&|s| s.dense[0] = f32::INFINITY, "dense[0]: `d0` is inf");
    refused(&|s| s.sparse.truncate(1), "sparse: 1 features, the model takes 2");
    refused(&|s| s.sparse[1] = vec![1; 4], "sparse.f1: 4 keys, at most 3 fit");
}

#[test]
fn budgets_that_cannot_hold_the_model_are_refused_by_name() {
    let mut plan = small_plan(1, &[5]);
    plan.tables[0].placement = Placement::Resident;
    let packed = plan.pack();
    let flash = packed.install();
    let refused = |change: &dyn Fn(&mut Budget)| {
        let mut budget = Budget::default();
        change(&mut budget);
        match open_model(&flash, budget) {
            Err(OpenError::Budget { field, .. }) => field,
            Err(e) => panic!("{e}"),
            Ok(_) => panic!("opened"),
        }
    };
    assert_eq!(refused(&|b| b.misses_max = 4), "misses_max");
    assert_eq!(refused(&|b| b.batch_max = 0), "batch_max");
    assert_eq!(refused(&|b| b.batch_max = 1 << 20), "batch_max");
    assert_eq!(refused(&|b| b.workers = 0), "workers");
    assert_eq!(refused(&|b| b.resident_bytes_max = 300 * 16 - 1), "resident_bytes_max");
    assert_eq!(refused(&|b| b.memory_bytes_max = 1 << 12), "memory_bytes_max");
    // The memory is planned before it is taken: no row of a table that is too large is read.
    let segment = flash.join("g000000000001").join("t0000-0000.seg");
    let mut bytes = std::fs::read(&segment).unwrap();
    bytes[40] ^= 1;
    std::fs::write(&segment, bytes).unwrap();
    assert_eq!(refused(&|b| b.memory_bytes_max = 1 << 12), "memory_bytes_max");
    let opened = open_model(&flash, Budget::default());
    assert!(matches!(opened, Err(OpenError::Segment(_))), "a damaged resident table is served");

    let packed = small_plan(1, &[5]).pack();
    let budget = Budget { cache_bytes_max: 100, resident_bytes_max: 0, ..Budget::default() };
    let refused = open_model(&packed.install(), budget);
    let refused = refused.err().unwrap();
    assert!(matches!(refused, OpenError::Budget { field: "cache_bytes_max", .. }), "{refused}");
}
