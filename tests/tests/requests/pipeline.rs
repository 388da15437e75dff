//! Many callers on one model: scores and statuses are the reference's, bit for bit, however
//! requests are batched. A full pipeline refuses immediately, the order of arrival is kept, and
//! neither a panic nor a caller that drops its ticket loses a slot.

use hatchback::clock::{Clock, SystemClock};
use hatchback::limits::PREFETCH_MAX;
use hatchback::model::budget::Budget;
use hatchback::request::pipeline::{Pipeline, RequestError, Ticket};
use hatchback::request::worker::ScoreError;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, MissPolicy, Placement};
use hatchback::{LookupStatus, Pooling};
use hatchback_tests::models::{
    FeaturePlan, ModelPlan, Packed, TablePlan, batch_of, open_model, open_with_least_cache,
    tiny_budget,
};
use hatchback_tests::random::Random;
use hatchback_tests::reference::{Reference, same_bits};
use hatchback_tests::rewrite::{keys_on, pages_of};
use hatchback_tools::pack::spec::CodecChoice;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::thread::ThreadId;
use std::time::Duration;

/// A clock that blocks workers while it is closed, and can panic in a worker.
#[derive(Default)]
struct Gate {
    closed: Mutex<bool>,
    opened: Condvar,
    /// If set, only this worker is blocked.
    only: Option<OnceLock<ThreadId>>,
    panics: AtomicBool,
}

impl Gate {
    fn set_closed(&self, closed: bool) {
        *self.closed.lock().unwrap() = closed;
        self.opened.notify_all();
    }
}

impl Clock for Gate {
    fn now(&self) -> Duration {
        if std::thread::current().name().is_some_and(|n| n.starts_with("worker")) {
            let closed = self.closed.lock().unwrap();
            let this = std::thread::current().id();
            let is_held = self.only.as_ref().is_none_or(|one| *one.get_or_init(|| this) == this);
            drop(self.opened.wait_while(closed, |closed| *closed && is_held).unwrap());
            assert!(!self.panics.load(Ordering::Acquire), "the clock broke");
        }
        Duration::ZERO
    }
}

const FOREVER: Option<Duration> = Some(Duration::MAX);

/// A model with one table under `miss` and one feature of up to four keys.
struct Fixture {
    plan: ModelPlan,
    packed: Packed,
    reference: Reference,
}

impl Fixture {
    fn new(miss: MissPolicy) -> Self {
        let table =
            TablePlan { miss, ..TablePlan::cached(KeySpace::Sparse, 900, 20, CodecChoice::U8) };
        let feature = FeaturePlan { hotness_max: 4, ..FeaturePlan::one_hot(0) };
        let (tables, features) = (vec![table], vec![feature]);
        let plan = ModelPlan {
            name: "queue".to_owned(),
            sequence: 1,
            seed: 11,
            dense: 1,
            tables,
            features,
        };
        let packed = plan.pack();
        let reference = Reference::new(&packed.schema, &packed.rows);
        Self { plan, packed, reference }
    }

    fn open(&self, budget: Budget, clock: Arc<dyn Clock>) -> Pipeline {
        let model = open_model(&self.packed.install(), budget).unwrap();
        Pipeline::new(Arc::new(model), clock).unwrap()
    }

    fn samples(&self, ids: std::ops::Range<u64>) -> Vec<Sample> {
        ids.map(|id| self.plan.sample(id)).collect()
    }

    /// Returns samples of one key each, all of which the table has.
    fn known(&self, from: usize, n: usize) -> Vec<Sample> {
        let keys = &self.packed.rows[0].all_keys()[from..from + n];
        keys.iter().map(|&key| self.looking_up(&[key])).collect()
    }

    fn looking_up(&self, keys: &[u64]) -> Sample {
        Sample { dense: vec![0.5], sparse: vec![keys.to_vec()], ..Sample::default() }
    }
}

fn submit(
    pipeline: &Pipeline,
    samples: &[Sample],
    deadline: Option<Duration>,
) -> Result<Ticket, RequestError> {
    pipeline.submit(&batch_of(&pipeline.model(), samples), deadline)
}

fn check(ticket: &Ticket, reference: &Reference, samples: &[Sample]) {
    let answer = ticket.wait().unwrap();
    let scores = answer.scores();
    assert_eq!(scores.statuses.len(), samples.len());
    let outputs = scores.values.len() / samples.len().max(1);
    for (i, sample) in samples.iter().enumerate() {
        let (score, expected) =
            (&scores.values[i * outputs..][..outputs], reference.output(sample));
        assert!(same_bits(score, &expected), "sample {i}: {score:?} instead of {expected:?}");
        assert_eq!(scores.statuses[i], reference.status(sample), "sample {i}");
    }
}

fn random_model(seed: u64) -> ModelPlan {
    let mut random = Random::new(seed);
    let codecs = [CodecChoice::U8, CodecChoice::F32, CodecChoice::F16, CodecChoice::U4];
    let table = |random: &mut Random| {
        let keys = *random.pick(&[KeySpace::Index, KeySpace::Sparse]);
        let (rows, dim) = (1 + random.below(500), 1 + random.below(40) as usize);
        let placement = *random.pick(&[Placement::Cached, Placement::Auto]);
        TablePlan { placement, ..TablePlan::cached(keys, rows, dim, *random.pick(&codecs)) }
    };
    let tables: Vec<TablePlan> = (0..1 + random.below(4)).map(|_| table(&mut random)).collect();
    let feature = |random: &mut Random| FeaturePlan {
        table: random.below(tables.len() as u64) as usize,
        pooling: *random.pick(&[Pooling::Sum, Pooling::Mean, Pooling::None]),
        hotness_max: 1 + random.below(6) as u32,
        second_input: random.one_in(3),
        ..FeaturePlan::one_hot(0)
    };
    let features = (0..1 + random.below(6)).map(|_| feature(&mut random)).collect();
    let dense = random.below(3) as usize;
    ModelPlan { name: "random".to_owned(), sequence: 1, seed, dense, tables, features }
}

/// Random models. Several callers have several requests of any size in flight. Workers batch the
/// requests that are waiting.
#[test]
fn scores_are_the_references_however_requests_meet() {
    for seed in 0..40 {
        let plan = random_model(seed);
        let packed = plan.pack();
        let reference = Reference::new(&packed.schema, &packed.rows);
        let workers = 1 + seed as u32 % 3;
        let mut budget = Budget { workers, slots: 12, ..tiny_budget(&packed.schema, 8) };
        budget.batch_delay_us_max = if seed % 2 == 0 { 0 } else { 200 };
        let model = open_with_least_cache(&packed.install(), budget);
        let pipeline = Pipeline::new(model, Arc::new(SystemClock::default())).unwrap();

        std::thread::scope(|scope| {
            for caller in 0..3 {
                let (plan, reference, pipeline) = (&plan, &reference, &pipeline);
                scope.spawn(move || {
                    let mut random = Random::of(seed, caller);
                    for _ in 0..8 {
                        // Sizes from none to all that fit, up to four requests in flight.
                        let sizes = [0, 1, 1, 2, 8].map(|n| if random.one_in(2) { n } else { 1 });
                        let requests: Vec<Vec<Sample>> = sizes[..4]
                            .iter()
                            .map(|&n| (0..n).map(|_| plan.sample(random.below(30))).collect())
                            .collect();
                        let tickets: Vec<Ticket> =
                            requests.iter().map(|r| submit(pipeline, r, None).unwrap()).collect();
                        tickets.iter().zip(&requests).for_each(|(t, r)| check(t, reference, r));
                    }
                });
            }
        });

        let stats = pipeline.stats();
        assert_eq!((stats.requests, stats.busy, stats.waiting), (96, 0, 0));
        assert!(stats.batches <= 96);
    }
}

#[test]
fn waiting_requests_are_scored_in_one_batch() {
    let fixture = Fixture::new(MissPolicy::Deadline);
    let gate = Arc::new(Gate::default());
    let pipeline = fixture.open(Budget { batch_max: 6, ..Budget::default() }, gate.clone());
    gate.set_closed(true);
    // The first request occupies the only worker. No other request has the same deadline.
    let first = submit(&pipeline, &fixture.known(0, 1), FOREVER).unwrap();
    while pipeline.stats().requests == 0 {
        std::thread::yield_now();
    }
    let requests: Vec<Vec<Sample>> = (0..5).map(|i| fixture.known(10 + 2 * i, 2)).collect();
    let tickets: Vec<Ticket> =
        requests.iter().map(|r| submit(&pipeline, r, None).unwrap()).collect();
    assert!(!first.is_done() && tickets.iter().all(|t| !t.is_done()));
    gate.set_closed(false);
    tickets.iter().zip(&requests).for_each(|(t, r)| check(t, &fixture.reference, r));
    check(&first, &fixture.reference, &fixture.known(0, 1));
    // Three requests of two samples fill a batch of six; the first had a batch of its own.
    let stats = pipeline.stats();
    assert_eq!((stats.requests, stats.batches), (6, 3));
}

/// A deadline of one request must not cut the rows of another, and a request with a late deadline
/// must not delay one with an early deadline.
#[test]
fn only_requests_with_close_deadlines_are_batched() {
    let ms = |n| Some(Duration::from_millis(n));
    let batches = |batch_delay_us_max: u32, deadlines: &[Option<Duration>]| {
        let fixture = Fixture::new(MissPolicy::Deadline);
        let gate = Arc::new(Gate::default());
        let pipeline =
            fixture.open(Budget { batch_delay_us_max, ..Budget::default() }, gate.clone());
        gate.set_closed(true);
        let first = submit(&pipeline, &fixture.known(0, 1), FOREVER).unwrap();
        while pipeline.stats().requests == 0 {
            std::thread::yield_now();
        }

        // With a batch delay, submitting a request without a deadline reads the clock.
        let sample = fixture.known(1, 1);
        std::thread::scope(|scope| {
            let opener = scope.spawn(|| {
                let submit_one = |d: &Option<Duration>| submit(&pipeline, &sample, *d).unwrap();
                deadlines.iter().map(submit_one).collect::<Vec<Ticket>>()
            });
            let reads_clock = batch_delay_us_max > 0 && deadlines.contains(&None);
            while !reads_clock && pipeline.stats().waiting < deadlines.len() {
                std::thread::yield_now();
            }
            gate.set_closed(false);
            opener.join().unwrap().iter().for_each(|t| drop(t.wait().unwrap()));
        });

        drop(first.wait().unwrap());
        pipeline.stats().batches - 1
    };

    assert_eq!(batches(0, &[ms(5), ms(5), ms(5)]), 1);
    assert_eq!(batches(0, &[ms(5), ms(6), ms(6)]), 2);
    assert_eq!(batches(0, &[None, ms(6), None]), 3);
    assert_eq!(batches(2000, &[ms(7), ms(5), ms(6)]), 1);
    assert_eq!(batches(2000, &[ms(5), ms(6), ms(7), ms(8)]), 2);
}

#[test]
fn a_batch_delay_lets_requests_meet_and_a_full_batch_does_not_wait() {
    let fixture = Fixture::new(MissPolicy::Wait);
    // The delay is far longer than any test: only a full batch ends the wait.
    let budget =
        Budget { batch_delay_us_max: u32::MAX, batch_max: 4, workers: 2, ..Budget::default() };
    let pipeline = fixture.open(budget, Arc::new(SystemClock::default()));
    let requests: Vec<Vec<Sample>> = (0..4).map(|i| fixture.known(i, 1)).collect();
    let tickets: Vec<Ticket> =
        requests.iter().map(|r| submit(&pipeline, r, None).unwrap()).collect();
    tickets.iter().zip(&requests).for_each(|(t, r)| check(t, &fixture.reference, r));
    assert_eq!(pipeline.stats().batches, 1);
    // A request with a deadline waits neither for others nor behind one that does.
    let patient = submit(&pipeline, &fixture.known(7, 1), None).unwrap();
    let hurried = submit(&pipeline, &fixture.known(8, 1), FOREVER).unwrap();
    check(&hurried, &fixture.reference, &fixture.known(8, 1));
    check(&patient, &fixture.reference, &fixture.known(7, 1));
    // No request waits when the pipeline closes.
    let last = submit(&pipeline, &fixture.known(9, 1), None).unwrap();
    drop(pipeline);
    check(&last, &fixture.reference, &fixture.known(9, 1));
    // A short delay ends without a full batch.
    let pipeline = fixture.open(
        Budget { batch_delay_us_max: 500, ..Budget::default() },
        Arc::new(SystemClock::default()),
    );
    check(&submit(&pipeline, &requests[0], None).unwrap(), &fixture.reference, &requests[0]);
}

#[test]
fn a_full_pipeline_is_busy_immediately_and_keeps_the_order() {
    let fixture = Fixture::new(MissPolicy::Deadline);
    let gate = Arc::new(Gate::default());
    let pipeline =
        fixture.open(Budget { slots: 9, batch_max: 1, ..Budget::default() }, gate.clone());
    gate.set_closed(true);
    let samples = fixture.known(0, 9);
    let tickets: Vec<Ticket> = samples
        .iter()
        .map(|s| submit(&pipeline, std::slice::from_ref(s), FOREVER).unwrap())
        .collect();
    for _ in 0..3 {
        let refused = submit(&pipeline, &samples[..1], FOREVER).err().unwrap();
        assert!(matches!(refused, RequestError::Busy(9)), "{refused}");
    }

    assert_eq!(pipeline.stats().busy, 3);
    gate.set_closed(false);

    // One worker scores one request at a time: if one is done, all requests before it are done too.
    for _ in 0.. {
        let done: Vec<bool> = tickets.iter().rev().map(Ticket::is_done).collect();
        let newest = done.iter().position(|d| *d).unwrap_or(done.len());
        assert!(done[newest..].iter().all(|d| *d), "{done:?}");
        if newest == 0 {
            break;
        }
    }

    tickets
        .iter()
        .zip(&samples)
        .for_each(|(t, s)| check(t, &fixture.reference, std::slice::from_ref(s)));
    drop(tickets);

    assert!(submit(&pipeline, &samples[..1], FOREVER).is_ok());
}

/// A worker that waits, for flash or for anything else, leaves the CPU to other workers.
#[test]
fn a_request_that_waits_delays_no_other() {
    let fixture = Fixture::new(MissPolicy::Deadline);
    let gate = Arc::new(Gate { only: Some(OnceLock::new()), ..Gate::default() });
    let pipeline = fixture.open(Budget { workers: 2, ..Budget::default() }, gate.clone());
    gate.set_closed(true);
    let waits = submit(&pipeline, &fixture.known(0, 1), FOREVER).unwrap();
    while pipeline.stats().requests == 0 {
        std::thread::yield_now();
    }
    for from in 1..50 {
        let samples = fixture.known(from, 1);
        check(&submit(&pipeline, &samples, None).unwrap(), &fixture.reference, &samples);
    }
    assert!(!waits.is_done());
    gate.set_closed(false);
    check(&waits, &fixture.reference, &fixture.known(0, 1));
}

/// One caller keeps all slots but one taken. The requests of the other caller are still answered.
#[test]
fn a_greedy_caller_starves_no_other() {
    let fixture = Fixture::new(MissPolicy::Wait);
    let budget = Budget { slots: 8, batch_max: 2, workers: 2, ..Budget::default() };
    let pipeline = fixture.open(budget, Arc::new(SystemClock::default()));
    let stop = AtomicBool::new(false);

    std::thread::scope(|scope| {
        let greedy = scope.spawn(|| {
            let (samples, mut held) = (fixture.known(0, 2), std::collections::VecDeque::new());
            while !stop.load(Ordering::Relaxed) {
                held.push_back(
                    submit(&pipeline, &samples, None).expect("no more than seven of eight"),
                );
                if held.len() == 7 {
                    check(&held.pop_front().unwrap(), &fixture.reference, &samples);
                }
            }
        });

        for id in 0..300 {
            let sample = fixture.samples(id..id + 1);
            check(
                &submit(&pipeline, &sample, None).expect("one slot is left"),
                &fixture.reference,
                &sample,
            );
        }

        stop.store(true, Ordering::Relaxed);
        greedy.join().unwrap();
    });

    assert_eq!(pipeline.stats().busy, 0);
}

/// The watchdog looks at turns. They need no request, stop while every worker hangs, and count
/// neither as requests nor as faults.
#[test]
fn workers_take_turns_until_all_of_them_hang() {
    let (fixture, gate) = (Fixture::new(MissPolicy::Wait), Arc::new(Gate::default()));
    let budget = Budget { workers: 2, ..Budget::default() };
    let pipeline = fixture.open(budget, gate.clone());
    let wait_for_a_turn = || {
        let before = pipeline.turns();
        while pipeline.turns() == before {
            std::thread::yield_now();
        }
    };
    wait_for_a_turn();
    assert_eq!((pipeline.stats().requests, pipeline.stats().failed), (0, 0));

    gate.set_closed(true);
    let samples = fixture.known(0, 1);
    let tickets = [1, 2].map(|taken| {
        let ticket = submit(&pipeline, &samples, None).unwrap();
        while pipeline.stats().requests < taken {
            std::thread::yield_now();
        }
        ticket
    });
    let hanging = pipeline.turns();
    assert_eq!(pipeline.turns(), hanging);
    gate.set_closed(false);
    wait_for_a_turn();
    tickets.iter().for_each(|ticket| check(ticket, &fixture.reference, &samples));
}

#[test]
fn a_dropped_ticket_frees_its_slot() {
    let fixture = Fixture::new(MissPolicy::Deadline);
    let gate = Arc::new(Gate::default());
    let pipeline = fixture.open(Budget { slots: 4, ..Budget::default() }, gate.clone());
    for _ in 0..20 {
        gate.set_closed(true);
        // All tickets are dropped while some requests are served and some wait.
        for i in 0..4 {
            drop(submit(&pipeline, &fixture.known(i, 1), FOREVER));
        }
        // The requests that no worker took have left the queue. A worker may still have one.
        let waiting: Vec<Ticket> =
            (0..3).map(|_| submit(&pipeline, &fixture.known(9, 1), FOREVER).unwrap()).collect();
        gate.set_closed(false);
        waiting.iter().for_each(|t| check(t, &fixture.reference, &fixture.known(9, 1)));
        drop(waiting);
        let tickets: Vec<Ticket> =
            std::iter::repeat_with(|| submit(&pipeline, &fixture.known(9, 1), FOREVER))
                .filter_map(Result::ok)
                .take(4)
                .collect();
        tickets.iter().for_each(|t| check(t, &fixture.reference, &fixture.known(9, 1)));
    }
}

#[test]
fn a_panic_is_an_error_of_the_requests_in_flight_and_of_no_other() {
    let fixture = Fixture::new(MissPolicy::Deadline);
    let gate = Arc::new(Gate::default());
    let pipeline = fixture.open(Budget { slots: 3, ..Budget::default() }, gate.clone());

    for round in 0..5 {
        let samples = fixture.known(10 * round, 3);
        gate.set_closed(true);
        gate.panics.store(true, Ordering::Release);
        let first = submit(&pipeline, &samples[..1], FOREVER).unwrap();
        while pipeline.stats().waiting > 0 {
            std::thread::yield_now();
        }

        // These wait together, and one ticket is dropped.
        let second = submit(&pipeline, &samples[1..2], FOREVER).unwrap();
        drop(submit(&pipeline, &samples[2..], FOREVER).unwrap());
        gate.set_closed(false);
        assert!(matches!(first.wait().err().unwrap(), RequestError::Panicked));
        assert!(matches!(second.wait().err().unwrap(), RequestError::Panicked));
        let stats = pipeline.stats();
        assert!(stats.failed > 2 * round as u64, "{stats:?}");
        assert_eq!(stats.failed_by_car, 0, "a panic counts against the release");

        gate.panics.store(false, Ordering::Release);
        drop((first, second));
        let tickets: Vec<Ticket> = std::iter::repeat_with(|| submit(&pipeline, &samples, FOREVER))
            .filter_map(Result::ok)
            .take(3)
            .collect();
        tickets.iter().for_each(|t| check(t, &fixture.reference, &samples));
    }
}

#[test]
fn a_caller_that_panics_while_it_fills_its_request_frees_the_slot() {
    let fixture = Fixture::new(MissPolicy::Deadline);
    let budget = Budget { slots: 2, ..Budget::default() };
    let pipeline = fixture.open(budget, Arc::new(Gate::default()));
    for _ in 0..5 {
        let fill = AssertUnwindSafe(|| {
            pipeline.submit_with(FOREVER, |_, _| -> Result<(), RequestError> { panic!("a fault") })
        });
        assert!(catch_unwind(fill).is_err());
    }
    let tickets = [1, 2].map(|at| submit(&pipeline, &fixture.known(at, 1), FOREVER).unwrap());
    for (at, ticket) in [1, 2].into_iter().zip(&tickets) {
        check(ticket, &fixture.reference, &fixture.known(at, 1));
    }
}

#[test]
fn edges_are_answered_or_refused_by_name() {
    let fixture = Fixture::new(MissPolicy::Deadline);
    let pipeline = fixture
        .open(Budget { batch_max: 3, ..Budget::default() }, Arc::new(SystemClock::default()));
    let reference = &fixture.reference;
    let whole =
        |samples: &[Sample]| check(&submit(&pipeline, samples, None).unwrap(), reference, samples);
    let keys = fixture.packed.rows[0].all_keys();
    whole(&[]);
    whole(&[fixture.looking_up(&[])]);
    whole(&[
        fixture.looking_up(&[keys[0]; 4]),
        fixture.looking_up(&[keys[0], keys[1], keys[0], keys[1]]),
    ]);
    whole(&[fixture.looking_up(&[1, 2, 3, 4])]);
    whole(&[fixture.looking_up(&[5, keys[7], 5, keys[8]]), fixture.looking_up(&keys[20..24])]);

    // The deadline is before the clock's start.
    let past = submit(&pipeline, &[fixture.looking_up(&[keys[7]])], Some(Duration::ZERO)).unwrap();
    assert!(matches!(past.wait().err(), Some(RequestError::DeadlineExceeded)));
    drop(past);
    whole(&[]);
    let stats = pipeline.stats();
    assert_eq!((stats.expired, stats.failed), (1, 0), "a deadline is no fault of the model");

    // Too many samples, and bags that are too long.
    let schema = Arc::clone(pipeline.model().schema());
    let mut large = Batch::new(&schema, 4);
    fixture.samples(0..4).iter().for_each(|s| large.push(&schema, s).unwrap());
    let error = pipeline.submit(&large, None).err().unwrap();
    let is_batch = |e: &ScoreError| matches!(e, ScoreError::Request { field: "batch", .. });

    assert!(matches!(&error, RequestError::Score(e) if is_batch(e)));
    let mut hotter = (*schema).clone();
    hotter.features[0].hotness_max = 5;
    let mut batch = Batch::new(&hotter, 1);
    batch.push(&hotter, &fixture.looking_up(&[1; 5])).unwrap();
    let error = pipeline.submit(&batch, None).err().unwrap().to_string();

    assert_eq!(error, "request: hotness: feature 0 has a bag of 5 keys");
    assert_eq!(pipeline.stats().busy, 0);
}

fn prefetched(pipeline: &Pipeline, keys: &[u64]) {
    assert_eq!(pipeline.prefetch(0, keys), keys.len());
    while pipeline.stats().prefetch_waiting > 0 {
        std::thread::yield_now();
    }
}

#[test]
fn a_request_for_prefetched_keys_misses_nothing() {
    let fixture = Fixture::new(MissPolicy::Wait);
    let pipeline =
        fixture.open(Budget { workers: 2, ..Budget::default() }, Arc::new(SystemClock::default()));
    let keys = &fixture.packed.rows[0].all_keys()[..200];
    prefetched(&pipeline, keys);
    let before = pipeline.stats().counters;
    assert!(before.pages > 0 && before.lookups == 0);
    for keys in keys.chunks(4) {
        let sample = [fixture.looking_up(keys)];
        check(&submit(&pipeline, &sample, None).unwrap(), &fixture.reference, &sample);
    }
    // Cached rows are not read again.
    prefetched(&pipeline, keys);
    drop(submit(&pipeline, &[], None).unwrap().wait().unwrap());
    let counted = pipeline.stats().counters.since(&before);
    assert_eq!((counted.misses, counted.pages), (0, 0));
}

/// Neither a key that the table does not have nor a key on a damaged page becomes a hit.
#[test]
fn prefetched_keys_are_cached_for_every_table_of_their_feature() {
    let tables =
        [4, 6].map(|dim| TablePlan::cached(KeySpace::Sparse, 300, dim, CodecChoice::F32)).to_vec();
    let features = vec![FeaturePlan { more_tables: vec![1], ..FeaturePlan::one_hot(0) }];
    let (name, sequence, seed, dense) = ("shared".to_owned(), 1, 4, 0);
    let plan = ModelPlan { name, sequence, seed, dense, tables, features };
    let packed = plan.pack();
    let reference = Reference::new(&packed.schema, &packed.rows);
    let fixture = Fixture { plan, packed, reference };
    let pipeline = fixture.open(Budget::default(), Arc::new(SystemClock::default()));
    let all: Vec<u64> = fixture.packed.rows.iter().flat_map(|rows| rows.all_keys()).collect();
    prefetched(&pipeline, &all);
    // Each key is absent in one of the tables, or in neither.
    let known = |key: &&u64| (0..2).all(|t| fixture.reference.row(t, **key).is_some());
    let samples: Vec<Sample> = all
        .iter()
        .filter(known)
        .map(|&key| Sample { sparse: vec![vec![key]], ..Sample::default() })
        .collect();
    assert!(!samples.is_empty());
    check(&submit(&pipeline, &samples, None).unwrap(), &fixture.reference, &samples);
    assert_eq!(pipeline.stats().counters.misses, 0);
}

#[test]
fn prefetch_caches_sound_rows_only() {
    let fixture = Fixture::new(MissPolicy::Wait);
    let flash = fixture.packed.install();
    let segment = flash.join("g000000000001").join("t0000-0000.seg");
    let mut pages = pages_of(&std::fs::read(&segment).unwrap());
    let keys_lost = keys_on(&pages, 1);
    pages[1][2000] ^= 1;
    std::fs::write(&segment, pages.concat()).unwrap();
    let model = open_model(&flash, Budget::default()).unwrap();
    let pipeline = Pipeline::new(Arc::new(model), Arc::new(SystemClock::default())).unwrap();
    let unknown = [17, 1 << 41, 5];
    prefetched(&pipeline, &[&keys_lost[..2], &unknown[..]].concat());
    let sample = |key| fixture.looking_up(&[key]);
    let samples: Vec<Sample> =
        keys_lost[..2].iter().chain(&unknown).map(|&key| sample(key)).collect();
    let ticket = submit(&pipeline, &samples, None).unwrap();
    let lost = |_: usize, key: u64| keys_lost.contains(&key);
    let answer = ticket.wait().unwrap();
    for (i, sample) in samples.iter().enumerate() {
        assert_eq!(answer.scores().statuses[i], fixture.reference.status_without(sample, &lost));
    }

    assert_eq!(
        answer.scores().status(),
        LookupStatus { damaged: 2, absent: 3, ..LookupStatus::default() }
    );
}

#[test]
fn prefetch_is_bounded_and_never_before_a_request() {
    let fixture = Fixture::new(MissPolicy::Deadline);
    let gate = Arc::new(Gate::default());
    let pipeline = fixture.open(Budget::default(), gate.clone());
    gate.set_closed(true);
    let first = submit(&pipeline, &fixture.known(0, 1), FOREVER).unwrap();
    while pipeline.stats().requests == 0 {
        std::thread::yield_now();
    }

    let keys = fixture.packed.rows[0].all_keys();
    let many: Vec<u64> = keys.iter().copied().cycle().take(PREFETCH_MAX + 50).collect();
    assert_eq!(pipeline.prefetch(0, &many), PREFETCH_MAX);
    assert_eq!(pipeline.prefetch(0, &many), 0);
    assert_eq!(pipeline.prefetch(1, &many), 0, "there is no such feature");

    let stats = pipeline.stats();
    assert_eq!(stats.prefetch_dropped, 50 + many.len() as u64);
    let second = submit(&pipeline, &fixture.known(1, 1), FOREVER).unwrap();
    gate.set_closed(false);
    drop(second.wait().unwrap());
    drop(first);
    while pipeline.stats().prefetch_waiting > 0 {
        std::thread::yield_now();
    }

    // The second request's row was in the prefetch queue too, and was not yet cached when the
    // request was served.
    assert_eq!(pipeline.stats().counters.misses, 2);
}
