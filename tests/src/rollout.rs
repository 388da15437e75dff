//! A fleet in one process, hour by hour: cars poll a real repository at scattered times, some are
//! away for days, a bad release meets its canaries and is taken back, a good one follows. Time is
//! an argument; nothing waits. Only the link's speed is left out: what is counted is bytes and
//! requests.

use crate::fleet::{Car, Fleet, T0, VERSIONS};
use crate::random::Random;
use hatchback::update::apply::{Policy, Watched};
use hatchback::update::link::{Link, LinkError, Take};
use hatchback::update::state::UpdateState;
use hatchback_link::DirectoryLink;
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::Objects;
use std::collections::BTreeMap;
use std::path::PathBuf;

const HOUR_S: u64 = 3600;
/// A car polls every so often, up to a quarter earlier or later.
const POLL_S: u64 = HOUR_S;
/// Hours of the story.
const HOURS: u64 = 72;
/// Hours at which releases are published, and the bad one is.
const GOOD_AT: u64 = 2;
const BAD_AT: u64 = 20;
const NEXT_AT: u64 = 30;
/// The share of the fleet that gets a release first, per cent.
const CANARIES: u8 = 5;
/// One car in so many is away from the first to the second of these hours.
const AWAY_ONE_IN: u64 = 10;
const AWAY: [u64; 2] = [1, 50];
/// Canaries that report a failure before the release is taken back, of a hundred that have tried
/// it.
const FAILED_MAX: u64 = 20;

/// What the fleet did in an hour.
#[derive(Clone, Debug, Default)]
pub struct Hour {
    /// Cars by the generation that is live on them.
    pub live: BTreeMap<u64, u64>,
    /// Bytes that all cars received.
    pub bytes: u64,
    /// Requests that all cars made.
    pub requests: u64,
    /// Polls that all cars made.
    pub polls: u64,
}

/// What came of it.
#[derive(Clone, Debug, Default)]
pub struct Rollout {
    /// Cars.
    pub cars: u64,
    /// Each hour.
    pub hours: Vec<Hour>,
    /// Cars that the bad release was live on at some time.
    pub met_bad: u64,
    /// The hour at which it was taken back.
    pub taken_back_at: u64,
    /// Bytes and requests of a poll that brings nothing, in the mean.
    pub idle_poll: (f64, f64),
    /// Bytes that a car received for each release, metadata with it, in the mean.
    pub release_bytes: BTreeMap<u64, f64>,
}

impl Rollout {
    /// Hours from `published` until so many per cent of the fleet had `generation` or a later one.
    pub fn hours_to(&self, generation: u64, published: u64, percent: u64) -> Option<u64> {
        let has = |h: &Hour| {
            h.live.range(generation..).map(|(_, n)| n).sum::<u64>() * 100 >= percent * self.cars
        };
        self.hours.iter().position(has).map(|at| (at as u64 + 1).saturating_sub(published))
    }

    /// The good releases and the hours at which they were published.
    pub fn good() -> [(u64, u64); 2] {
        [(2, GOOD_AT), (4, NEXT_AT)]
    }
}

/// Counts what passes.
struct Counted {
    link: DirectoryLink,
    bytes: u64,
    requests: u64,
}

impl Link for Counted {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        self.requests += 1;
        let bytes = &mut self.bytes;
        self.link.get(path, from, &mut |piece| {
            *bytes += piece.len() as u64;
            take(piece)
        })
    }
}

struct Driver {
    car: Car,
    next: u64,
    is_away: bool,
    met_bad: bool,
}

/// Runs the story with so many cars.
pub fn simulate(cars: u64, seed: u64) -> Rollout {
    let fleet = Fleet::new();
    let lasting = Change { expires_s: 7 * 24 * HOUR_S, ..Change::default() };
    publish(&Objects::directory(&fleet.repository()).unwrap(), &fleet.keys(), &lasting, T0)
        .unwrap();
    let mut random = Random::new(seed);
    let mut drivers: Vec<Driver> = (0..cars)
        .map(|n| {
            let mut car = Car::at_first_release(&fleet);
            car.sync.cohort = (n % 100) as u8;
            car.policy = Policy { requests_min: 1, ..Policy::default() };
            let next = T0 + 60 + random.below(POLL_S);
            Driver { car, next, is_away: random.one_in(AWAY_ONE_IN), met_bad: false }
        })
        .collect();
    let mut rollout = Rollout { cars, ..Rollout::default() };
    let (mut failed, mut idle) = (0, (0, 0, 0));
    let mut releases: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for hour in 0..HOURS {
        direct(
            &fleet,
            hour,
            failed * 100 >= FAILED_MAX * (cars * u64::from(CANARIES) / 100).max(1),
            &mut rollout,
        );
        let (from, to) = (T0 + 60 + hour * HOUR_S, T0 + 60 + (hour + 1) * HOUR_S);
        let mut now = Hour::default();
        for driver in &mut drivers {
            while driver.next < to {
                let at = driver.next.max(from);
                driver.next = at + POLL_S * 3 / 4 + random.below(POLL_S / 2);
                if driver.is_away && (AWAY[0]..AWAY[1]).contains(&hour) {
                    continue;
                }
                let mut link = Counted { link: fleet.link(), bytes: 0, requests: 0 };
                let before = live(&driver.car);
                failed += u64::from(driver.poll(&mut link, at));
                let after = live(&driver.car);
                now.polls += 1;
                now.bytes += link.bytes;
                now.requests += link.requests;
                if before == after && link.requests == 2 {
                    idle = (idle.0 + 1, idle.1 + link.bytes, idle.2 + link.requests);
                } else if before != after {
                    let entry = releases.entry(after).or_default();
                    *entry = (entry.0 + 1, entry.1 + link.bytes);
                }
            }
            *now.live.entry(live(&driver.car)).or_default() += 1;
        }
        rollout.hours.push(now);
    }
    rollout.met_bad = drivers.iter().filter(|d| d.met_bad).count() as u64;
    let mean = |sum: u64, n: u64| sum as f64 / n.max(1) as f64;
    rollout.idle_poll = (mean(idle.1, idle.0), mean(idle.2, idle.0));
    rollout.release_bytes =
        releases.into_iter().map(|(g, (n, bytes))| (g, mean(bytes, n))).collect();
    rollout
}

fn live(car: &Car) -> u64 {
    let live = car.sync.status().unwrap().live.unwrap_or_default();
    live.rsplit('@').next().and_then(|s| s.parse().ok()).unwrap_or(0)
}

impl Driver {
    /// Polls until nothing is left to do, serving a hundred requests of what it installs. Returns
    /// whether a release failed.
    fn poll(&mut self, link: &mut Counted, now: u64) -> bool {
        // Two steps: until a release is on probation, then what is seen there.
        self.car.watched = Some(Watched::default());
        let ran = self.car.run(link, now);
        let on_probation = self.car.sync.status().unwrap().state == UpdateState::Probation;
        assert!(on_probation || ran.is_ok(), "{ran:?}");
        if !on_probation {
            return false;
        }
        let bad = live(&self.car) == 3;
        self.met_bad |= bad;
        self.car.watched =
            Some(Watched { requests: 100, faults: u64::from(bad), latency_us_p99: 100 });
        while self.car.sync.advance(&self.car.host(), now).unwrap() {}
        // What is live now is said by the next look, which the car takes at once.
        let _ = self.car.run(link, now);
        bad
    }
}

/// The publisher's side of an hour.
fn direct(fleet: &Fleet, hour: u64, is_bad: bool, rollout: &mut Rollout) {
    let now = T0 + 30 + hour * HOUR_S;
    let change = |bundles: Vec<PathBuf>, share, revoke: &[&str]| {
        let revoke = revoke.iter().map(|r| (*r).to_owned()).collect();
        let change =
            Change { bundles, share, revoke, expires_s: 7 * 24 * HOUR_S, ..Change::default() };
        publish(&Objects::directory(&fleet.repository()).unwrap(), &fleet.keys(), &change, now)
            .unwrap();
    };
    match hour {
        GOOD_AT => change(vec![VERSIONS.deltas[1].clone()], 100, &[]),
        BAD_AT => change(vec![VERSIONS.deltas[2].clone()], CANARIES, &[]),
        // From what the fleet has, and from what those have that were away.
        NEXT_AT => change(vec![VERSIONS.merged(2, 4), VERSIONS.merged(1, 4)], 100, &[]),
        _ if is_bad && rollout.taken_back_at == 0 && hour > BAD_AT => {
            rollout.taken_back_at = hour;
            change(Vec::new(), 100, &["3"]);
        }
        _ => {}
    }
}
