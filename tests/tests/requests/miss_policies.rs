//! What a request does about rows that are not in memory, under the miss policies `wait`,
//! `deadline` and `default`. Every lookup uses its own row and is counted as fresh, or uses the
//! default row and is counted as defaulted, absent or damaged.

use hatchback::LookupStatus;
use hatchback::clock::{Clock, SystemClock};
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::worker::{ScoreError, Worker};
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, MissPolicy, Placement};
use hatchback_tests::models::{
    FeaturePlan, ModelPlan, Packed, TablePlan, batch_of, install_on, open_model,
};
use hatchback_tests::random::Random;
use hatchback_tests::reference::{Reference, same_bits};
use hatchback_tests::sim_disk::SimDisk;
use hatchback_tools::pack::spec::CodecChoice;
use proptest::prelude::*;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A clock that advances by one microsecond with each reading.
#[derive(Default)]
struct SteppingClock(AtomicU64);

impl Clock for SteppingClock {
    fn now(&self) -> Duration {
        Duration::from_micros(self.0.fetch_add(1, Ordering::Relaxed))
    }
}

fn worker_on(flash: &Path) -> Worker {
    worker_of(open_model(flash, Budget::default()).unwrap())
}

fn worker_of(model: Model) -> Worker {
    Worker::new(Arc::new(model), Arc::new(SteppingClock::default()))
}

/// Plans a table for each policy, with two one-hot features on each.
fn plan(policies: &[(MissPolicy, KeySpace)], seed: u64) -> ModelPlan {
    let codecs = [CodecChoice::U8, CodecChoice::F32, CodecChoice::F16, CodecChoice::U4];
    let table = |(i, &(miss, keys)): (usize, &(MissPolicy, KeySpace))| TablePlan {
        miss,
        ..TablePlan::cached(keys, 700, 20 + i, codecs[i % 4])
    };
    let tables: Vec<TablePlan> = policies.iter().enumerate().map(table).collect();
    let features =
        (0..2 * tables.len()).map(|f| FeaturePlan::one_hot(f % policies.len())).collect();
    ModelPlan { name: "policies".to_owned(), sequence: 1, seed, dense: 1, tables, features }
}

/// How one sample's lookups were answered, read from its scores.
#[derive(Debug, Default, PartialEq)]
struct Answers {
    /// With the key's own row.
    fresh: u32,
    /// With the default row though the table has the key, under `default` and under `deadline`.
    defaulted: u32,
    late: u32,
    /// Keys that no table has, by what the worker may know of them: certainly absent, under
    /// `default`, under `deadline`.
    absent: u32,
    absent_under_default: u32,
    absent_under_deadline: u32,
}

/// Reads the answers from the scores: the columns of each lookup hold its row or the default row,
/// bit for bit.
fn answers(worker: &Worker, reference: &Reference, sample: &Sample, scores: &[f32]) -> Answers {
    let (schema, mut answers) = (worker.model().schema(), Answers::default());
    for (f, bag) in sample.sparse.iter().enumerate() {
        let t = usize::from(schema.lookups[f].table);
        let (table, columns) =
            (&schema.tables[t], &scores[reference.column(f)..][..reference.width(f)]);
        let Some(&key) = bag.first() else {
            assert!(columns.iter().all(|v| *v == 0.0), "an empty bag is zeros");
            continue;
        };

        // Pooling starts from zero, which turns a negative zero into a positive one.
        let row: Option<Vec<f32>> =
            reference.row(t, key).map(|row| row.iter().map(|v| 0.0 + v).collect());
        let is_default = same_bits(columns, &table.default_row);
        assert!(
            is_default || row.as_ref().is_some_and(|row| same_bits(columns, row)),
            "feature {f}, key {key}: {columns:?} is neither {row:?} nor {:?}",
            table.default_row
        );

        let count = match (row, table.miss, table.keys) {
            (Some(_), _, _) if !is_default => &mut answers.fresh,
            (Some(_), MissPolicy::Wait, _) => panic!("feature {f}, key {key} did not wait"),
            (Some(_), MissPolicy::Default, _) => &mut answers.defaulted,
            (Some(_), MissPolicy::Deadline, _) => &mut answers.late,
            (None, MissPolicy::Wait, _) | (None, _, KeySpace::Index) => &mut answers.absent,
            (None, MissPolicy::Default, _) => &mut answers.absent_under_default,
            (None, MissPolicy::Deadline, _) => &mut answers.absent_under_deadline,
        };

        *count += 1;
    }

    answers
}

/// Checks that the status agrees with the scores. A worker knows that a key is absent only after it
/// read the key's page.
fn check_status(status: &LookupStatus, answers: &Answers) {
    let Answers { fresh, defaulted, late, absent, absent_under_default, absent_under_deadline } =
        *answers;
    assert_eq!(status.fresh, fresh, "{answers:?}");
    assert_eq!(status.damaged, 0);
    // A key under `default` is defaulted until its page is read, and absent from then on.
    let unknown = absent_under_default + absent_under_deadline;
    let given_up = status.defaulted - defaulted;
    assert!((late..=late + unknown).contains(&given_up), "{status:?} {answers:?}");
    assert_eq!(status.absent + given_up, absent + unknown + late, "{status:?} {answers:?}");
    assert!(!status.late || given_up > 0, "{status:?} {answers:?}");
    assert!(status.late || given_up <= absent_under_default, "{status:?} {answers:?}");
}

/// Scores `samples` and checks each. Returns the sum of their statuses.
fn try_score(
    worker: &mut Worker,
    reference: &Reference,
    samples: &[Sample],
    deadline: Option<u64>,
) -> Option<LookupStatus> {
    let batch = batch_of(&Arc::clone(worker.model()), samples);
    let scores = match worker.score(&batch, deadline.map(Duration::from_micros)) {
        Err(ScoreError::DeadlineExceeded) => return None,
        scores => scores.unwrap(),
    };
    let (values, statuses) = (scores.values.to_vec(), scores.statuses.to_vec());
    let outputs = values.len() / samples.len();
    for ((sample, status), scores) in samples.iter().zip(&statuses).zip(values.chunks(outputs)) {
        check_status(status, &answers(worker, reference, sample, scores));
    }
    Some(statuses.iter().fold(LookupStatus::default(), |mut sum, s| {
        sum.add(s);
        sum
    }))
}

fn score(
    worker: &mut Worker,
    reference: &Reference,
    samples: &[Sample],
    deadline: Option<u64>,
) -> LookupStatus {
    try_score(worker, reference, samples, deadline).expect("the deadline is not exceeded")
}

/// Returns samples of one key per feature, all of which are in their tables.
fn known_samples(packed: &Packed, n: u64, seed: u64) -> Vec<Sample> {
    let mut random = Random::new(seed);
    let keys: Vec<Vec<u64>> = packed.rows.iter().map(|r| r.all_keys()).collect();
    let bag = |l: &hatchback::schema::lookup::Lookup, random: &mut Random| {
        vec![*random.pick(&keys[usize::from(l.table)])]
    };
    let sample = |_| Sample {
        dense: vec![0.5],
        sparse: packed.schema.lookups.iter().map(|l| bag(l, &mut random)).collect(),
        ..Sample::default()
    };
    (0..n).map(sample).collect()
}

fn policies() -> impl Strategy<Value = Vec<(MissPolicy, KeySpace)>> {
    let policy =
        prop::sample::select(vec![MissPolicy::Wait, MissPolicy::Deadline, MissPolicy::Default]);
    let keys = prop::sample::select(vec![KeySpace::Index, KeySpace::Sparse]);
    prop::collection::vec((policy, keys), 1..5)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 150,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// With any mix of policies, a deadline at any page, and absent keys among the others.
    #[test]
    fn every_answer_is_counted_as_what_it_is(
        policies in policies(),
        seed in any::<u64>(),
        requests in prop::collection::vec(
            (0..30u64, prop::option::of(0..60u64), any::<bool>()),
            1..6,
        ),
    ) {
        let plan = plan(&policies, seed);
        let packed = plan.pack();
        let reference = Reference::new(&packed.schema, &packed.rows);
        let mut worker = worker_on(&packed.install());
        for (first, deadline, fetches_deferred) in requests {
            let samples: Vec<Sample> = (first..first + 8).map(|id| plan.sample(id)).collect();
            let scored = try_score(&mut worker, &reference, &samples, deadline);
            let may_fail = deadline.is_some() && policies.iter().any(|p| p.0 == MissPolicy::Wait);
            prop_assert!(scored.is_some() || may_fail);
            if fetches_deferred {
                worker.fetch_deferred(usize::MAX);
            }
        }
    }
}

const MIXED: [(MissPolicy, KeySpace); 5] = [
    (MissPolicy::Wait, KeySpace::Sparse),
    (MissPolicy::Deadline, KeySpace::Index),
    (MissPolicy::Default, KeySpace::Sparse),
    (MissPolicy::Deadline, KeySpace::Sparse),
    (MissPolicy::Wait, KeySpace::Index),
];

#[test]
fn without_a_deadline_wait_takes_as_long_as_it_takes() {
    let packed = plan(&[MIXED[0], MIXED[4]], 1).pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let mut worker = worker_on(&packed.install());
    let samples = known_samples(&packed, 40, 1);
    // The deadline is over before the request starts.
    assert_eq!(try_score(&mut worker, &reference, &samples, Some(0)), None);
    let status = score(&mut worker, &reference, &samples, None);
    assert_eq!(status, LookupStatus { fresh: 160, ..LookupStatus::default() });
}

#[test]
fn default_answers_without_waiting_and_the_next_request_is_fresh() {
    let packed =
        plan(&[(MissPolicy::Default, KeySpace::Sparse), (MissPolicy::Default, KeySpace::Index)], 2);
    let packed = packed.pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let mut worker = worker_on(&packed.install());
    let samples = known_samples(&packed, 40, 2);
    let status = score(&mut worker, &reference, &samples, None);
    assert_eq!(status, LookupStatus { defaulted: 160, ..LookupStatus::default() });
    assert_eq!(worker.counters().pages, 0, "the answer waited for flash");
    let distinct = worker.counters().misses;
    assert_eq!(worker.fetch_deferred(usize::MAX) as u64, distinct);
    let fetched = worker.counters();
    let status = score(&mut worker, &reference, &samples, None);
    assert_eq!(status, LookupStatus { fresh: 160, ..LookupStatus::default() });
    assert_eq!(worker.counters().since(&fetched).pages, 0);
    assert_eq!(worker.fetch_deferred(usize::MAX), 0);
}

/// The page of a key that no table has is read once, whatever the policy. The key stays out of the
/// cache.
#[test]
fn absent_keys_are_read_once() {
    for policy in [MissPolicy::Wait, MissPolicy::Deadline, MissPolicy::Default] {
        let packed = plan(&[(policy, KeySpace::Sparse)], 8).pack();
        let reference = Reference::new(&packed.schema, &packed.rows);
        let mut worker = worker_on(&packed.install());
        let unknown = [3, 1 << 50].map(|key| vec![key]).to_vec();
        assert!(unknown.iter().all(|bag| reference.row(0, bag[0]).is_none()));
        let sample = Sample { dense: vec![0.0], sparse: unknown, ..Sample::default() };
        score(&mut worker, &reference, std::slice::from_ref(&sample), None);
        assert_eq!(worker.fetch_deferred(usize::MAX), 0);
        let (read, model) = (worker.counters().pages, Arc::clone(worker.model()));
        assert!(read > 0);
        for _ in 0..3 {
            let status = score(&mut worker, &reference, std::slice::from_ref(&sample), Some(0));
            assert_eq!(status, LookupStatus { absent: 2, ..LookupStatus::default() });
            assert_eq!((worker.fetch_deferred(usize::MAX), worker.counters().pages), (0, read));
        }
        // No cache holds them: another worker, with an empty negative cache, reads their pages.
        let mut other = Worker::new(model, Arc::new(SystemClock::default()));
        score(&mut other, &reference, &[sample], None);
        other.fetch_deferred(usize::MAX);
        assert_eq!(other.counters().pages, read);
    }
}

/// The deferred rows have room for one miss list. A row beyond it is fetched after a later request.
#[test]
fn a_short_miss_list_defers_rows_in_several_rounds() {
    let packed = plan(&[(MissPolicy::Default, KeySpace::Sparse)], 3).pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let budget = Budget { misses_max: 16, ..Budget::default() };
    let model = Arc::new(open_model(&packed.install(), budget).unwrap());
    let mut worker = Worker::new(model, Arc::new(SystemClock::default()));
    let samples = known_samples(&packed, 40, 3);
    let mut fresh = vec![score(&mut worker, &reference, &samples, None).fresh];
    while fresh.last() != Some(&80) {
        assert!((1..=16).contains(&worker.fetch_deferred(usize::MAX)));
        fresh.push(score(&mut worker, &reference, &samples, None).fresh);
    }
    assert!(fresh.is_sorted_by(|a, b| a < b) && fresh.len() > 4, "{fresh:?}");
}

/// A row that the request must wait for is read, or the request has no scores. Any other row is
/// read, or its bag has the default row and the status counts it.
#[test]
fn every_deadline_gives_an_exact_status_or_no_scores() {
    let packed = plan(&MIXED, 4).pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let samples = known_samples(&packed, 12, 4);

    // Reads of the simulated disk complete one after the other on every machine.
    let flash = install_on(&SimDisk::default().shared(), Path::new("/flash"), &packed.bundle);

    // Two features on each table.
    let (waiting, on_time, defaulting) = (2 * 2 * 12, 2 * 2 * 12, 2 * 12);
    let at = |deadline: Option<u64>| {
        let model = Model::from_flash(&flash, Budget::default()).unwrap();
        try_score(&mut worker_of(model), &reference, &samples, deadline)
    };

    assert_eq!(at(Some(0)), None, "no row can be read in time");
    let all =
        LookupStatus { fresh: waiting + on_time, defaulted: defaulting, ..LookupStatus::default() };
    assert_eq!(at(None), Some(all));

    // The clock advances with each reading: before each page that starts, and once for each wait.
    let (mut none, mut cut, mut whole) = (0, 0, 0);
    for deadline in 0..400 {
        let Some(status) = at(Some(deadline)) else {
            none += 1;
            continue;
        };
        assert_eq!(status.fresh + status.defaulted, waiting + on_time + defaulting);
        assert!(status.fresh >= waiting && status.defaulted >= defaulting);
        assert_eq!(status.late, status.fresh < waiting + on_time, "deadline {deadline}");
        cut += u32::from(status.late);
        whole += u32::from(status == all);
    }
    assert!(none > 5 && cut > 0 && whole > 0, "{none} without scores, {cut} cut, {whole} whole");
}

/// Rows of the next request are missing as well, and it may wait for them.
#[test]
fn a_late_request_does_not_make_the_next_one_late() {
    let packed = plan(&MIXED, 8).pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let mut worker = worker_on(&packed.install());
    let samples = known_samples(&packed, 30, 8);
    let (first, next) = samples.split_at(15);
    assert_eq!(try_score(&mut worker, &reference, first, Some(0)), None);
    let status = score(&mut worker, &reference, next, None);
    assert!(status.fresh > 0 && !status.late, "{status:?}");
    assert!(worker.counters().pages > 0, "the second request read nothing: this proves nothing");
}

/// A read that one request stopped waiting for keeps its place in the reader. The next request must
/// still get its own rows although the reader is full.
#[test]
fn a_read_that_was_given_up_does_not_cost_the_next_request() {
    let packed =
        plan(&[(MissPolicy::Wait, KeySpace::Sparse), (MissPolicy::Deadline, KeySpace::Sparse)], 7)
            .pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let budget = Budget { reads_max: 1, ..Budget::default() };
    let flash = packed.install();
    let samples = known_samples(&packed, 2, 7);
    let only = |table: u16| {
        let mut sample = samples[usize::from(table)].clone();
        let other = |f: usize| packed.schema.lookups[f].table != table;
        (0..sample.sparse.len()).filter(|f| other(*f)).for_each(|f| sample.sparse[f].clear());
        vec![sample]
    };

    let mut given_up = 0;
    for _ in 0..40 {
        let model = Arc::new(open_model(&flash, budget).unwrap());
        let mut worker = Worker::new(model, Arc::new(SteppingClock::default()));
        // The read starts one tick before the deadline, so the request waits almost no time for it.
        // A device may still be faster.
        given_up += u32::from(score(&mut worker, &reference, &only(1), Some(1)).fresh == 0);
        let status = score(&mut worker, &reference, &only(0), None);
        assert_eq!(status, LookupStatus { fresh: 2, ..LookupStatus::default() });
    }

    assert!(given_up > 0, "no read of 40 was given up: the test proves nothing");
}

#[test]
fn late_rows_are_fetched_after_the_answer() {
    let packed = plan(&MIXED, 5).pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let mut worker = worker_on(&packed.install());
    let samples = known_samples(&packed, 30, 5);
    assert_eq!(try_score(&mut worker, &reference, &samples, Some(0)), None);
    assert!(worker.fetch_deferred(usize::MAX) > 0);
    let fetched = worker.counters();
    // The deadline is over again, and the request waits for nothing.
    let status = score(&mut worker, &reference, &samples, Some(0));
    assert_eq!(status, LookupStatus { fresh: 300, ..LookupStatus::default() });
    assert_eq!(worker.counters().since(&fetched).pages, 0);
}

/// A request never waits for a resident table, whatever its miss policy.
#[test]
fn resident_tables_never_default() {
    let mut plan = plan(&MIXED, 6);
    plan.tables.iter_mut().for_each(|t| t.placement = Placement::Resident);
    let packed = plan.pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let mut worker = worker_on(&packed.install());
    let status = score(&mut worker, &reference, &known_samples(&packed, 30, 6), Some(0));
    assert_eq!(status, LookupStatus { fresh: 300, ..LookupStatus::default() });
    assert_eq!(worker.counters().cached_lookups, 0);
}
