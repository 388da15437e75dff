//! Several models in one process share one memory budget. No caller notices loads, swaps and
//! unloads, of the same model or of another.

use hatchback::car::follower::Follower;
use hatchback::clock::{Clock, SystemClock};
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::maintenance::compact::Compaction;
use hatchback::maintenance::share::Urgency;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::explain::{ExplainError, explain_served};
use hatchback::request::open::NextNetwork;
use hatchback::request::pipeline::RequestError;
use hatchback::request::serving::{Serving, ServingError};
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, Placement, Schema};
use hatchback_tests::models::{
    FeaturePlan, ModelPlan, Packed, TablePlan, batch_for, install, install_on,
};
use hatchback_tests::onnx;
use hatchback_tests::reference::{Reference, same_bits};
use hatchback_tests::sim_disk::SimDisk;
use hatchback_tests::versions::Versions;
use hatchback_tools::pack::spec::{CodecChoice, DenseSpec};
use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const BATCH_MAX: u32 = 8;

/// A generation of a model. All generations have the same keys and different rows.
struct Made {
    packed: Packed,
    reference: Reference,
    flash: Flash,
}

fn plan(sequence: u64) -> ModelPlan {
    let table = |rows, dim, codec| TablePlan::cached(KeySpace::Index, rows, dim, codec);
    let tables = vec![table(700, 12, CodecChoice::U8), table(300, 8, CodecChoice::F32)];
    let feature = |table| FeaturePlan { hotness_max: 3, ..FeaturePlan::one_hot(table) };
    let features = vec![feature(0), feature(1), feature(0)];
    ModelPlan {
        name: "swapped".to_owned(),
        sequence,
        seed: 100 + sequence,
        dense: 2,
        tables,
        features,
    }
}

fn make(plan: &ModelPlan) -> Made {
    let packed = plan.pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let flash = Flash::open(&disk::system(), &packed.install()).unwrap();
    Made { packed, reference, flash }
}

fn budget() -> Budget {
    Budget {
        cache_bytes_max: 16 << 10,
        batch_max: BATCH_MAX,
        workers: 2,
        slots: 16,
        ..Budget::default()
    }
}

fn serving(memory_bytes_max: u64) -> Serving {
    Serving::new(memory_bytes_max, 16, Arc::new(SystemClock::default()))
}

/// Submits a request and checks that a single generation answered. Returns its sequence.
fn score(
    serving: &Serving,
    name: &str,
    schema: &Schema,
    samples: &[Sample],
    made: &[&Made],
) -> u64 {
    let batch = batch_for(schema, BATCH_MAX as usize, samples);
    let ticket = loop {
        match serving.get(name).unwrap().submit(&batch, None) {
            Ok(ticket) => break ticket,
            Err(RequestError::Busy(_)) => std::thread::yield_now(),
            Err(e) => panic!("{e}"),
        }
    };

    let answer = ticket.wait().unwrap();
    let sequence = answer.generation().sequence;
    let reference = &made[sequence as usize - 1].reference;
    let scores = answer.scores();

    for (sample, (score, status)) in samples
        .iter()
        .zip(scores.values.chunks(scores.values.len() / samples.len()).zip(scores.statuses))
    {
        assert!(same_bits(score, &reference.output(sample)), "not generation {sequence}'s score");
        assert_eq!(*status, reference.status(sample));
    }

    sequence
}

/// A clock that never advances, so that every request counts as short.
struct Still;

impl Clock for Still {
    fn now(&self) -> Duration {
        Duration::ZERO
    }
}

/// Callers score short requests on their own threads, but never on a model that was replaced.
#[test]
fn the_first_request_after_a_swap_is_scored_by_the_new_generation() {
    let (one, two) = (make(&plan(1)), make(&plan(2)));
    let made = [&one, &two];
    let serving = Serving::new(1 << 30, 16, Arc::new(Still));
    serving.load("m", &one.flash, budget()).unwrap();
    let (sample, schema) = (plan(1).sample(7), serving.model("m").unwrap().schema().clone());
    let ask = || score(&serving, "m", &schema, std::slice::from_ref(&sample), &made);
    for swap in 0..40 {
        // Afterwards the rows are in memory and the time of a request is known.
        for _ in 0..3 {
            ask();
        }
        serving.swap("m", &made[1 - swap % 2].flash, budget(), &|_| {}).unwrap();
        assert_eq!(ask(), 2 - swap as u64 % 2);
    }
}

#[test]
fn a_hundred_swaps_under_load_mix_nothing_and_fail_no_request() {
    let (one, two) = (make(&plan(1)), make(&plan(2)));
    let made = [&one, &two];
    let serving = serving(1 << 30);
    serving.load("m", &one.flash, budget()).unwrap();
    let (stop, served) = (AtomicBool::new(false), [AtomicU64::new(0), AtomicU64::new(0)]);

    std::thread::scope(|scope| {
        for caller in 0..3u64 {
            let (serving, stop, served) = (&serving, &stop, &served);
            scope.spawn(move || {
                let (plan, schema) = (plan(1), serving.model("m").unwrap().schema().clone());
                for turn in 0.. {
                    let first = (caller * 31 + turn) % 200;
                    let samples: Vec<Sample> =
                        (first..first + 1 + turn % 4).map(|id| plan.sample(id)).collect();
                    let sequence = score(serving, "m", &schema, &samples, &made);
                    served[sequence as usize - 1].fetch_add(1, Ordering::Relaxed);
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
        }

        let schema = serving.model("m").unwrap().schema().clone();
        for swap in 0..100 {
            let next = made[1 - swap % 2];
            serving.swap("m", &next.flash, budget(), &|_| {}).unwrap();
            // A request after the swap is scored by the new generation.
            let sequence = score(&serving, "m", &schema, &[plan(1).sample(7)], &made);
            assert_eq!(sequence, 2 - swap as u64 % 2);
        }

        stop.store(true, Ordering::Relaxed);
    });

    assert!(
        served.iter().all(|n| n.load(Ordering::Relaxed) > 0),
        "{served:?}: a generation was never seen"
    );
    assert_eq!(serving.model("m").unwrap().generation().sequence, 1);
}

#[test]
fn other_models_come_and_go_unnoticed() {
    let (one, other) = (make(&plan(1)), make(&ModelPlan { dense: 0, ..plan(2) }));
    let serving = serving(1 << 30);
    serving.load("stays", &one.flash, budget()).unwrap();
    let stop = AtomicBool::new(false);

    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (plan, schema) = (plan(1), serving.model("stays").unwrap().schema().clone());
            for id in 0.. {
                score(&serving, "stays", &schema, &[plan.sample(id % 100)], &[&one]);
                if stop.load(Ordering::Relaxed) {
                    return;
                }
            }
        });

        let sample = ModelPlan { dense: 0, ..plan(2) }.sample(3);
        for _ in 0..20 {
            let comes = serving.load("comes", &other.flash, budget()).unwrap();
            assert_eq!(serving.names(), ["stays", "comes"]);
            let made = [&one, &other];
            score(&serving, "comes", &other.packed.schema, std::slice::from_ref(&sample), &made);
            serving.unload("comes").unwrap();
            let batch = batch_for(&other.packed.schema, 1, std::slice::from_ref(&sample));
            assert!(serving.get("comes").is_none() && comes.model().is_none());
            assert!(matches!(comes.submit(&batch, None), Err(RequestError::NotServed)));
        }

        stop.store(true, Ordering::Relaxed);
    });
}

fn total(serving: &Serving) -> u64 {
    serving.memory().iter().map(|(_, plan)| plan.total()).sum()
}

/// Returns the bytes of one model alone.
fn alone(made: &Made) -> u64 {
    let serving = serving(1 << 30);
    serving.load("a", &made.flash, budget()).unwrap();
    total(&serving)
}

#[test]
fn one_budget_holds_all_models_and_both_sides_of_a_swap() {
    let (one, two) = (make(&plan(1)), make(&plan(2)));
    let each = alone(&one);

    // The budget has room for two models, or for the old and the new generation of one.
    let serving = serving(2 * each);
    serving.load("a", &one.flash, budget()).unwrap();
    serving.swap("a", &two.flash, budget(), &|_| {}).unwrap();
    serving.load("b", &one.flash, budget()).unwrap();

    assert_eq!(total(&serving), 2 * each);
    let refused = serving.swap("a", &one.flash, budget(), &|_| {}).unwrap_err();
    assert!(matches!(&refused, ServingError::Memory { taken, .. } if *taken == 2 * each));

    let text = refused.to_string();
    let start =
        format!("model `a`: memory_bytes_max = {}, and {} bytes are taken: ", 2 * each, 2 * each);
    assert!(
        text.starts_with(&start) && text.contains("lower") && text.contains("embedding caches"),
        "{text}"
    );
    assert_eq!(
        serving.model("a").unwrap().generation().sequence,
        2,
        "a refused swap changes nothing"
    );

    // Lowering the field that the error names, to the value that it names, makes the model fit.
    serving.unload("b").unwrap();
    let larger = Budget { cache_bytes_max: 64 << 10, ..budget() };
    let text = serving.swap("a", &one.flash, larger, &|_| {}).unwrap_err().to_string();
    let fits = text.split("lower cache_bytes_max to ").nth(1).unwrap().split(':').next().unwrap();
    serving
        .swap(
            "a",
            &one.flash,
            Budget { cache_bytes_max: fits.parse().unwrap(), ..budget() },
            &|_| {},
        )
        .unwrap();
    assert_eq!(serving.model("a").unwrap().generation().sequence, 1);
}

/// An update may look a feature up in other tables: requests stay the same. As with another
/// pooling, the new generation has caches of its own.
#[test]
fn an_update_may_change_the_tables_of_a_feature() {
    let with = |sequence, tables: [&[usize]; 2]| {
        let feature = |tables: &[usize]| FeaturePlan {
            more_tables: tables[1..].to_vec(),
            hotness_max: 3,
            ..FeaturePlan::one_hot(tables[0])
        };
        ModelPlan { features: tables.into_iter().map(feature).collect(), ..plan(sequence) }
    };
    // All have an output of the same columns.
    let plans = [with(1, [&[0, 1], &[0]]), with(2, [&[0, 1], &[0]]), with(3, [&[0], &[1, 0]])];
    let made = plans.each_ref().map(make);
    let made = made.each_ref();
    let serving = serving(1 << 30);
    serving.load("m", &made[0].flash, budget()).unwrap();
    let schema = serving.model("m").unwrap().schema().clone();
    let samples: Vec<Sample> = (0..8).map(|id| plans[0].sample(id)).collect();
    let directory = made[0].flash.directory();

    for next in 1..3 {
        let slots = serving.model("m").unwrap().cache_slots();
        let flash = install(directory, &made[next].packed.bundle);
        let dropped = serving.swap("m", &flash, budget(), &|_| {}).unwrap().dropped;
        assert_eq!(dropped == slots, next == 2, "{dropped} of {slots}");
        assert_eq!(score(&serving, "m", &schema, &samples, &made), next as u64 + 1);
    }
}

/// A resident table has no key in the cache of its row width, and needs none there.
#[test]
fn a_cached_table_beside_a_resident_one_of_its_width_keeps_its_cache() {
    let with = |sequence| {
        let table = |rows, placement| TablePlan {
            placement,
            ..TablePlan::cached(KeySpace::Index, rows, 8, CodecChoice::F32)
        };
        let tables = vec![table(300, Placement::Cached), table(40, Placement::Resident)];
        let features = vec![FeaturePlan::one_hot(0), FeaturePlan::one_hot(1)];
        ModelPlan { tables, features, ..plan(sequence) }
    };
    let plans = [1, 2].map(with);
    let made = plans.each_ref().map(make);
    let made = made.each_ref();
    let serving = serving(1 << 30);
    serving.load("m", &made[0].flash, budget()).unwrap();
    let schema = serving.model("m").unwrap().schema().clone();
    let samples: Vec<Sample> = (0..8).map(|id| plans[0].sample(id)).collect();
    assert_eq!(score(&serving, "m", &schema, &samples, &made), 1);
    let flash = install(made[0].flash.directory(), &made[1].packed.bundle);
    let swapped = serving.swap("m", &flash, budget(), &|_| {}).unwrap();
    assert_eq!(swapped.dropped, 0, "{swapped}");
    assert_eq!(score(&serving, "m", &schema, &samples, &made), 2);
}

/// A request that a swap overtakes has the values of the old schema. The new generation answers it
/// only if it fills a missing value alike.
#[test]
fn no_answer_mixes_the_values_of_one_generation_with_the_scores_of_another() {
    for fills in [[1.5, 1.5], [1.5, -2.5]] {
        let make = |sequence: u64| {
            let (plan, fill) = (plan(sequence), fills[sequence as usize - 1]);
            let mut spec = plan.spec();
            let (name, missing) = ("d0".to_owned(), Some(fill));
            let dense = DenseSpec::Table { name, missing, shared: false, retired: false };
            spec.dense_features[0] = dense;
            plan.pack_spec(&spec, onnx::concat)
        };
        let packed = [make(1), make(2)];
        let two = Reference::new(&packed[1].schema, &packed[1].rows);
        let folder = tempfile::tempdir().unwrap();
        let serving = serving(1 << 30).stepped();
        let flash = install(folder.path(), &packed[0].bundle);
        let served = serving.load("m", &flash, budget()).unwrap();

        let sample = Sample { dense: vec![f32::NAN, 0.5], ..plan(1).sample(3) };
        let submit = || {
            let push = |model: &Model, batch: &mut Batch| {
                batch.push(model.schema(), &sample).map_err(|e| panic!("{e}"))
            };
            served.submit_with::<RequestError>(None, push).unwrap()
        };
        let waiting = RefCell::new(submit());
        while served.step() {}
        let submit_again = |urgency| {
            if urgency == Urgency::Awaited {
                waiting.replace(submit());
            }
        };
        serving
            .swap("m", &install(folder.path(), &packed[1].bundle), budget(), &submit_again)
            .unwrap();
        while served.step() {}

        match waiting.into_inner().wait() {
            Ok(answer) => {
                assert_eq!(answer.generation().sequence, 2);
                assert_eq!(fills[0], fills[1], "the fill is that of generation 1");
                let filled = Sample { dense: vec![fills[1], 0.5], ..sample.clone() };
                assert!(same_bits(answer.scores().values, &two.output(&filled)));
            }
            Err(e) => {
                assert!(matches!(e, RequestError::Replaced), "{e}");
                assert_ne!(fills[0], fills[1]);
            }
        }
        assert_eq!(served.stats().unwrap().failed, 0);
    }
}

#[test]
fn what_callers_would_notice_is_refused() {
    let (one, two) = (make(&plan(1)), make(&plan(2)));
    let serving = serving(1 << 30);
    serving.load("m", &one.flash, budget()).unwrap();
    assert!(matches!(serving.load("m", &two.flash, budget()), Err(ServingError::Loaded(_))));
    assert!(matches!(
        serving.swap("n", &two.flash, budget(), &|_| {}),
        Err(ServingError::NotLoaded(_))
    ));
    assert!(matches!(serving.unload("n"), Err(ServingError::NotLoaded(_))));

    let many = Budget { workers: 15, ..budget() };
    let error = serving.load("n", &two.flash, many).err().unwrap().to_string();
    assert_eq!(error, "model `n`: reads_max = 16: 17 workers of all models need a read each");

    let field = |plan: &ModelPlan, budget: Budget| match serving.swap(
        "m",
        &make(plan).flash,
        budget,
        &|_| {},
    ) {
        Err(ServingError::Shape { field, .. }) => field,
        other => panic!("{other:?}"),
    };

    let mut fewer = plan(2);
    fewer.features.pop();
    assert_eq!(field(&fewer, budget()), "feature");

    let mut shorter = plan(2);
    shorter.features[1].hotness_max = 2;
    assert_eq!(field(&shorter, budget()), "feature");

    let mut weighted = plan(2);
    weighted.features[0].weighted = true;
    assert_eq!(field(&weighted, budget()), "feature");

    let mut wider = plan(2);
    wider.tables[1].dim = 9;
    assert_eq!(field(&wider, budget()), "outputs");
    assert_eq!(field(&ModelPlan { dense: 3, ..plan(2) }, budget()), "dense feature");
    assert_eq!(field(&plan(2), Budget { batch_max: BATCH_MAX - 1, ..budget() }), "batch_max");
    assert_eq!(serving.model("m").unwrap().generation().sequence, 1);
}

#[test]
fn requests_are_scored_in_order_of_arrival() {
    let made = make(&plan(1));
    let serving = serving(1 << 30).stepped();
    serving.load("a", &made.flash, Budget { batch_max: 1, ..budget() }).unwrap();
    let sample = Sample {
        dense: vec![1.0; 2],
        sparse: vec![vec![1], vec![2], vec![3]],
        ..Sample::default()
    };
    let batch = batch_for(&made.packed.schema, 1, &[sample]);
    let tickets: Vec<_> =
        (0..4).map(|_| serving.get("a").unwrap().submit(&batch, None).unwrap()).collect();
    for (number, ticket) in tickets.iter().enumerate() {
        while !ticket.is_done() {
            assert!(!tickets[number..].iter().any(|later| later.is_done()), "{number}");
            serving.get("a").unwrap().step();
        }
    }
}

#[test]
fn what_a_process_takes_beside_its_models_counts() {
    let made = make(&plan(1));
    let each = alone(&made);
    serving(each).load("a", &made.flash, budget()).unwrap();
    let refused =
        serving(each).beside("the front door", 1).load("a", &made.flash, budget()).map(drop);
    assert!(matches!(refused, Err(ServingError::Memory { .. })), "{refused:?}");
}

/// An explanation opens a second network, which needs room beside everything that is served.
#[test]
fn an_explanation_keeps_to_the_budget() {
    let made = make(&plan(1));
    let explain_within = |bytes: u64| {
        let serving = serving(bytes);
        serving.load("a", &made.flash, budget()).unwrap();
        explain_served(&serving, "a", made.flash.directory(), r#"{"dense": [1, 2]}"#)
    };
    let least = alone(&made);
    let refused = explain_within(least).map(drop).unwrap_err().to_string();
    let (_, after) =
        refused.split_once("an explanation takes ").unwrap_or_else(|| panic!("{refused}"));
    let bytes: u64 = after.split(' ').next().unwrap().parse().unwrap();
    assert!(explain_within(least + bytes - 1).is_err());
    assert!(explain_within(least + bytes).unwrap().score.is_some());
}

/// The live generation is not the one that gave the score.
#[test]
fn an_explanation_is_refused_until_an_update_is_swapped() {
    let (made, next) = (make(&plan(1)), plan(2).pack());
    let serving = serving(1 << 30);
    serving.load("a", &made.flash, budget()).unwrap();
    let directory = made.flash.directory();
    let explain = || explain_served(&serving, "a", directory, r#"{"dense": [1, 2]}"#);
    let before = explain().unwrap().generation;
    let flash = install(directory, &next.bundle);
    let refused = explain().map(drop).unwrap_err();
    assert!(matches!(refused, ExplainError::Swap), "{refused}");
    serving.swap("a", &flash, budget(), &|_| {}).unwrap();
    assert_ne!(explain().unwrap().generation, before);
}

/// A plan of TensorRT is optional, so its network refuses no update.
#[test]
fn an_awaited_plan_refuses_no_swap() {
    let (one, two) = (make(&plan(1)), make(&plan(2)));
    let each = alone(&one);
    let serving = serving(2 * each);
    serving.load("a", &one.flash, budget()).unwrap();
    let (schema, onnx) = (one.packed.schema.clone(), vec![0; each as usize]);
    let network = NextNetwork { manifest: [7; 32], schema, onnx };
    serving.get("a").unwrap().offer_next(network);
    assert_eq!((total(&serving), serving.memory_kept()), (4 * each, each));
    serving.swap("a", &two.flash, budget(), &|_| {}).unwrap();
}

type Merge = Box<dyn FnOnce()>;

thread_local! {
    /// Calls of the follower's disk before the merge, and the merge.
    static MERGE: RefCell<(usize, Option<Merge>)> = RefCell::default();
}

/// Counts a call of the follower's disk, and merges if it is the chosen one.
fn merge_at_call() {
    let due = MERGE.with_borrow_mut(|(left, merge)| match left.checked_sub(1) {
        None => merge.take(),
        Some(fewer) => {
            *left = fewer;
            None
        }
    });
    if let Some(merge) = due {
        merge();
    }
}

/// The follower has no lock, so the merge removes the delta that it has read of.
#[test]
fn a_follower_loads_beside_a_merge_whenever_it_comes() {
    let (versions, directory) = (Versions::new(2, 200, 47), Path::new("/flash"));
    for calls in 0.. {
        let disk = SimDisk::default();
        for bundle in &versions.deltas {
            install_on(&disk.shared(), directory, bundle);
        }
        let daemon = disk.clone();
        let merge = move || {
            let mut flash = Flash::open(&daemon.shared(), directory).unwrap();
            let mut merge = Compaction::begin(&flash, 0).unwrap().unwrap();
            while merge.step(&flash, 100, u64::MAX).unwrap() {}
            merge.finish(&mut flash).unwrap();
        };
        MERGE.set((calls, Some(Box::new(merge))));
        let (serving, process) = (serving(1 << 30).stepped(), disk.process(merge_at_call));
        let loaded = Follower::load(&process.shared(), directory, None, &serving, budget());
        assert!(loaded.is_ok(), "a merge after {calls} calls: {:?}", loaded.err());
        if MERGE.take().1.is_some() {
            assert!(calls > 10);
            return;
        }
    }
}
