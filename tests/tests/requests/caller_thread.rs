//! Requests that are scored on a caller's own thread have the same bits as on a worker's thread.
//! They share a batch with waiting requests and never read flash.

use hatchback::clock::Clock;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::pipeline::{Pipeline, Queued, RequestError};
use hatchback::schema::KeySpace;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use hatchback_tests::models::{FeaturePlan, ModelPlan, TablePlan, install_on};
use hatchback_tests::random::Random;
use hatchback_tests::reference::{Reference, same_bits};
use hatchback_tests::sim_disk::SimDisk;
use hatchback_tests::stall::Stall;
use hatchback_tools::pack::spec::CodecChoice;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// A clock that never advances, so that every request counts as short. Counts the calls of the
/// workers' threads, and can panic in every other thread.
#[derive(Default)]
struct Still {
    workers_calls: AtomicU64,
    panics: AtomicBool,
}

impl Clock for Still {
    fn now(&self) -> Duration {
        if std::thread::current().name().is_some_and(|name| name.starts_with("worker")) {
            self.workers_calls.fetch_add(1, Ordering::Relaxed);
        } else {
            assert!(!self.panics.swap(false, Ordering::Relaxed), "the clock broke");
        }
        Duration::ZERO
    }
}

/// A model on a disk that can stall, with room for some of its rows.
struct Fixture {
    reference: Reference,
    keys: Vec<u64>,
    stall: Arc<Stall>,
    clock: Arc<Still>,
    pipeline: Pipeline,
}

impl Fixture {
    fn new(workers: u32, cache_bytes_max: u64) -> Self {
        let plan = ModelPlan {
            name: "callers".to_owned(),
            sequence: 1,
            seed: 5,
            dense: 1,
            tables: vec![TablePlan::cached(KeySpace::Sparse, 3000, 40, CodecChoice::F32)],
            features: vec![FeaturePlan { hotness_max: 4, ..FeaturePlan::one_hot(0) }],
        };
        let packed = plan.pack();
        let (stall, directory) = (Arc::new(Stall::default()), Path::new("/flash"));
        let disk = SimDisk::default().stalling(&stall).shared();
        let flash = install_on(&disk, directory, &packed.bundle);
        let budget = Budget { cache_bytes_max, workers, slots: 8, ..Budget::default() };
        let model = Arc::new(Model::from_flash(&flash, budget).unwrap());
        let clock = Arc::new(Still::default());
        Self {
            reference: Reference::new(&packed.schema, &packed.rows),
            keys: packed.rows[0].all_keys().to_vec(),
            stall,
            pipeline: Pipeline::new(model, Arc::clone(&clock) as Arc<dyn Clock>).unwrap(),
            clock,
        }
    }

    fn queue(&self, keys: &[u64]) -> Queued {
        self.try_queue(keys).unwrap()
    }

    fn try_queue(&self, keys: &[u64]) -> Result<Queued, RequestError> {
        let fill = |model: &Model, slot: &mut Batch| {
            slot.push(model.schema(), &sample(keys)).unwrap();
            Ok::<(), RequestError>(())
        };
        self.pipeline.queue_with(None, fill)
    }

    /// Queues a request as soon as a slot is free. A worker that scores the request of a dropped
    /// ticket frees its slot only afterwards.
    fn queue_when_free(&self, keys: &[u64]) -> Queued {
        self.on_this_thread(|| match self.try_queue(keys) {
            Err(RequestError::Busy(_)) => None,
            queued => Some(queued.unwrap()),
        })
    }

    fn check(&self, ticket: &hatchback::Ticket, keys: &[u64]) {
        let answer = ticket.wait().unwrap();
        let scores = answer.scores();
        assert!(same_bits(scores.values, &self.reference.output(&sample(keys))), "{keys:?}");
        assert_eq!(scores.statuses, [self.reference.status(&sample(keys))], "{keys:?}");
    }

    /// Scores `keys` until a request finds them in memory, so that the time of a sample is known.
    fn warm_up(&self, keys: &[u64]) {
        for _ in 0..3 {
            self.check(&self.queue(keys).start(), keys);
        }
    }

    /// Tries `score` until it succeeds: a worker that has just answered holds its memory a moment
    /// longer.
    fn on_this_thread<T>(&self, mut score: impl FnMut() -> Option<T>) -> T {
        loop {
            if let Some(scored) = score() {
                return scored;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn sample(keys: &[u64]) -> Sample {
    Sample { dense: vec![0.5], sparse: vec![keys.to_vec()], ..Sample::default() }
}

#[test]
fn requests_in_memory_are_scored_on_the_callers_thread_in_one_batch() {
    let fixture = Fixture::new(1, 8 << 20);
    let keys = &fixture.keys[..4];
    fixture.warm_up(keys);
    fixture.on_this_thread(|| {
        let before =
            (fixture.pipeline.stats(), fixture.clock.workers_calls.load(Ordering::Relaxed));
        let queued: Vec<Queued> = keys.iter().map(|&key| fixture.queue(&[key])).collect();
        let mut queued = queued.into_iter();
        let first = queued.next().unwrap().start();
        let is_here = first.is_done();
        let after = (fixture.pipeline.stats(), fixture.clock.workers_calls.load(Ordering::Relaxed));
        let rest: Vec<_> = queued.map(Queued::start).collect();
        for (ticket, &key) in std::iter::once(&first).chain(&rest).zip(keys) {
            fixture.check(ticket, &[key]);
        }
        if is_here && before.1 == after.1 {
            assert_eq!(after.0.requests - before.0.requests, 4);
            assert_eq!(after.0.batches - before.0.batches, 1);
            let lookups = after.0.counters.lookups - before.0.counters.lookups;
            assert_eq!(lookups, 4, "each lookup is counted once");
            return Some(());
        }
        None
    });
}

#[test]
fn a_request_that_needs_flash_is_left_to_a_worker_and_delays_no_other() {
    let fixture = Fixture::new(2, 8 << 20);
    let (known, unknown) = (&fixture.keys[..2], &fixture.keys[100..102]);
    fixture.warm_up(known);

    fixture.stall.begin();
    // These calls return although no read does.
    let stalled = fixture.queue(unknown).start();
    // Until a worker has taken it, it would be batched with the next request.
    fixture.on_this_thread(|| (fixture.pipeline.stats().waiting == 0).then_some(()));
    let answered = fixture.queue(known).start();
    fixture.check(&answered, known);
    assert!(!stalled.is_done());
    fixture.stall.end();
    fixture.check(&stalled, unknown);
    // A worker updates the counters when it looks for new work: ten lookups in five requests.
    let counters = fixture.on_this_thread(|| {
        let counters = fixture.pipeline.stats().counters;
        (counters.lookups == 10).then_some(counters)
    });
    assert_eq!(counters.missed_lookups, 4, "{counters:?}");
}

#[test]
fn callers_on_many_threads_get_the_references_scores_and_lose_no_slot() {
    let fixture = Fixture::new(2, 64 << 10);
    fixture.warm_up(&fixture.keys[..1]);
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let fixture = &fixture;
            scope.spawn(move || {
                let mut random = Random::new(seed);
                for _ in 0..400 {
                    let range = 3 * fixture.keys.len() as u64 / 2;
                    let key = |random: &mut Random| {
                        let at = (random.below(range) * random.below(range) / range) as usize;
                        // Some keys are not in the table.
                        fixture.keys.get(at).copied().unwrap_or(u64::MAX - at as u64)
                    };
                    let keys: Vec<u64> = (0..random.below(5)).map(|_| key(&mut random)).collect();
                    let queued = fixture.queue_when_free(&keys);
                    match random.below(8) {
                        0 => drop(queued),
                        1 => drop(queued.start()),
                        _ => fixture.check(&queued.start(), &keys),
                    }
                }
            });
        }
    });
    // With a lost slot this never ends.
    let every_slot: Vec<Queued> =
        (0..8).map(|_| fixture.queue_when_free(&fixture.keys[..1])).collect();
    for queued in every_slot {
        fixture.check(&queued.start(), &fixture.keys[..1]);
    }
}

#[test]
fn a_panic_on_the_callers_thread_is_an_error_of_its_requests_and_of_no_other() {
    let fixture = Fixture::new(1, 8 << 20);
    let keys = &fixture.keys[..2];
    fixture.warm_up(keys);
    fixture.on_this_thread(|| {
        let queued = fixture.queue(keys);
        fixture.clock.panics.store(true, Ordering::Relaxed);
        let ticket = queued.start();
        let is_here = !fixture.clock.panics.swap(false, Ordering::Relaxed);
        if is_here {
            assert!(matches!(ticket.wait(), Err(RequestError::Panicked)));
        }
        is_here.then_some(())
    });
    fixture.check(&fixture.queue(keys).start(), keys);
}
