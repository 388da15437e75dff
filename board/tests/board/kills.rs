//! kill -9 of the daemon and of the sync process at random moments, from an empty car to the sixth
//! generation. Every car ends at the newest release, no good release is marked as bad, and every
//! answer is exactly one generation's. `HATCHBACK_KILLS=1000` sets the number of kills.

use crate::car::{Car, Fleet, GENERATIONS, Process, RELEASES};
use hatchback::UpdateState;
use hatchback_tests::random::Random;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Requests that a release serves on probation.
const REQUESTS_MIN: u64 = 40;
/// Cars that run at the same time.
const CARS: usize = 3;
/// Time between the end of a poll and the next.
const POLL: Duration = Duration::from_millis(200);
/// Time after the last kill within which a car must be at the newest release. Normally it takes
/// seconds.
const STUCK: Duration = Duration::from_secs(180);

/// The number of processes to kill; the long run sets a thousand.
fn kills() -> i64 {
    std::env::var("HATCHBACK_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(16)
}

/// Returns a fleet with all generations: a snapshot, and the deltas after it.
fn fleet() -> &'static Fleet {
    static FLEET: OnceLock<(tempfile::TempDir, Fleet)> = OnceLock::new();
    let (_, fleet) = FLEET.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let fleet = Fleet::new(folder.path());
        fleet.publish(vec![RELEASES.snapshot(1)]);
        (2..=GENERATIONS).for_each(|n| fleet.publish(vec![RELEASES.delta(n)]));
        (folder, fleet)
    });
    fleet
}

/// The sums over all cars.
#[derive(Default)]
struct Tally {
    left: AtomicI64,
    cars: AtomicU64,
    answers: AtomicU64,
    /// Kills by process and state of the update.
    kills: Mutex<BTreeMap<String, u64>>,
    failures: Mutex<Vec<String>>,
}

/// The two processes of a car that is being killed.
struct Journey {
    car: Car,
    daemon: Process,
    sync: Option<Process>,
    polled: Instant,
}

impl Journey {
    fn new(folder: &Path) -> Self {
        let mut car = Car::new(folder, REQUESTS_MIN);
        car.trust(fleet());
        let daemon = car.serve();
        Self { car, daemon, sync: None, polled: Instant::now() }
    }

    /// Asks once, and starts the next poll when the last one has ended.
    fn step(&mut self) {
        if self.car.ask().is_none() {
            assert!(
                self.daemon.is_running(),
                "the daemon ended although no test killed it\n{}",
                self.car.logs()
            );
        }
        if let Some(sync) = &mut self.sync
            && !sync.is_running()
        {
            (self.sync, self.polled) = (None, Instant::now());
        }
        if self.sync.is_none() && self.polled.elapsed() > POLL {
            self.sync = Some(self.car.sync_from(&fleet().repository()));
        }
        std::thread::sleep(Duration::from_millis(1));
    }

    /// Takes steps for `time`. Returns whether the car reached the newest release.
    fn run(&mut self, time: Duration) -> bool {
        let start = Instant::now();
        while start.elapsed() < time {
            (0..20).for_each(|_| self.step());
            if self.car.is_at(GENERATIONS) && self.car.ask() == Some(GENERATIONS as u64) {
                return true;
            }
        }
        false
    }

    fn kill(&mut self, is_daemon: bool) {
        if is_daemon {
            self.daemon.kill();
            self.daemon = self.car.serve();
        } else if let Some(mut sync) = self.sync.take() {
            sync.kill();
        }
    }
}

/// Takes one car from nothing to the newest release, and kills its processes on the way.
fn journey(seed: u64, tally: &Tally) {
    let folder = tempfile::tempdir().unwrap();
    let (mut random, mut journey) = (Random::new(seed), Journey::new(folder.path()));
    let mut is_there = false;
    while !is_there && tally.left.load(Ordering::Relaxed) > 0 {
        let longest_ms = *random.pick(&[60, 300, 1_200]);
        let is_daemon = random.one_in(2);
        is_there = journey.run(Duration::from_millis(random.below(longest_ms)));
        // To kill the sync process, one must be running.
        while !is_daemon && !is_there && journey.sync.is_none() {
            journey.step();
        }
        if !is_there && tally.left.fetch_sub(1, Ordering::Relaxed) > 0 {
            let process = if is_daemon { "daemon" } else { "sync" };
            let line = format!("{process} in {}", journey.car.status().state);
            *tally.kills.lock().unwrap().entry(line).or_default() += 1;
            journey.kill(is_daemon);
        }
    }

    let is_there = is_there || journey.run(STUCK);
    let (car, marks) = (&journey.car, journey.car.marks());
    if !is_there || !marks.is_empty() {
        let status = car.status();
        let text = format!(
            "seed {seed}: live {:?}, {}, error {:?}, marks {marks:?}\n{}",
            status.live,
            status.state,
            status.error,
            car.logs()
        );
        tally.failures.lock().unwrap().push(text);
    }
    tally.cars.fetch_add(1, Ordering::Relaxed);
    tally.answers.fetch_add(journey.car.answers, Ordering::Relaxed);
    assert!(journey.daemon.stop(), "seed {seed}: no normal end\n{}", journey.car.logs());
}

#[test]
fn a_car_whose_processes_are_killed_ends_at_the_newest_release() {
    fleet();
    let tally = Tally { left: AtomicI64::new(kills()), ..Tally::default() };
    let (start, seeds) = (Instant::now(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..CARS {
            scope.spawn(|| {
                while tally.left.load(Ordering::Relaxed) > 0 {
                    journey(seeds.fetch_add(1, Ordering::Relaxed), &tally);
                }
            });
        }
    });

    let (kills, failures) =
        (tally.kills.into_inner().unwrap(), tally.failures.into_inner().unwrap());
    failures.iter().for_each(|failure| println!("{failure}"));
    println!(
        "{} kills, {kills:?}; {} cars, {} right answers, {} cars not at the newest release or with \
         a mark, {:.0} s",
        kills.values().sum::<u64>(),
        tally.cars.into_inner(),
        tally.answers.into_inner(),
        failures.len(),
        start.elapsed().as_secs_f64()
    );
    assert!(failures.is_empty(), "{} cars failed", failures.len());
}

/// Short trips: the ignition cuts the power during the probation each time.
#[test]
fn six_ignitions_that_cut_the_power_mark_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let own = Fleet::new(&folder.path().join("fleet"));
    own.publish(vec![RELEASES.snapshot(1)]);
    let mut car = Car::new(&folder.path().join("car"), 1);
    car.trust(&own);
    let mut daemon = car.serve();
    reach(&mut car, &own, |car| car.is_at(1));

    own.publish(vec![RELEASES.delta(2)]);
    assert!(daemon.stop());
    car.set_requests_min(1_000_000);
    daemon = car.serve();
    reach(&mut car, &own, |car| car.status().state == UpdateState::Probation);
    for ignition in 1..=6 {
        daemon.kill();
        daemon = car.serve();
        let mut sync = car.sync_from(&own.repository());
        assert_eq!(car.first_answer(&mut daemon), Some(2), "ignition {ignition}\n{}", car.logs());
        // A start counts until the daemon has recorded an answer.
        while car.status().trials > 0 {
            assert_eq!(car.ask(), Some(2), "ignition {ignition}\n{}", car.logs());
        }
        sync.kill();
    }
    daemon.kill();

    car.set_requests_min(1);
    let mut daemon = car.serve();
    reach(&mut car, &own, |car| car.is_at(2));
    assert_eq!(car.marks(), Vec::<String>::new());
    assert!(daemon.stop());
}

/// Polls and asks until `is_reached`.
fn reach(car: &mut Car, fleet: &Fleet, is_reached: impl Fn(&Car) -> bool) {
    let start = Instant::now();
    while !is_reached(car) {
        let mut sync = car.sync_from(&fleet.repository());
        while sync.is_running() {
            car.ask();
        }
        car.ask_for(Duration::from_millis(50));
        let status = car.status();
        assert!(
            start.elapsed() < STUCK,
            "live {:?}, {}, {:?}, marks {:?}\n{}",
            status.live,
            status.state,
            status.error,
            car.marks(),
            car.logs()
        );
    }
}
