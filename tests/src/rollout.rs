//! A fleet in one process, simulated hour by hour. Cars poll a real repository at scattered times,
//! and some are away for days. A bad release meets its canaries and is revoked; a good one follows.
//! Time is an argument and nothing waits. The simulation counts bytes and requests; the link has no
//! speed.

use crate::fleet::{Car, Fleet, T0, VERSIONS};
use crate::random::Random;
use hatchback::update::host::{Policy, Watched};
use hatchback::update::link::{Link, LinkError, Take};
use hatchback::update::status::UpdateState;
use hatchback_link::DirectoryLink;
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::Objects;
use std::collections::BTreeMap;
use std::path::PathBuf;

const HOUR_S: u64 = 3600;
/// Mean interval between two polls; each varies by up to a quarter.
const POLL_S: u64 = HOUR_S;
/// Simulated hours.
const HOURS: u64 = 72;
/// Hours at which the good releases and the bad one are published.
const GOOD_AT: u64 = 2;
const BAD_AT: u64 = 20;
const NEXT_AT: u64 = 30;
/// Share of the fleet that installs a release first, per cent.
const CANARIES: u8 = 5;
/// One car in so many is away.
const AWAY_ONE_IN: u64 = 10;
/// The first and the last hour in which such a car is away.
const AWAY: [u64; 2] = [1, 50];
/// Share of the canaries that report a failure before the publisher revokes the release, per cent.
const FAILED_MAX: u64 = 20;

/// One hour of the fleet.
#[derive(Clone, Debug, Default)]
pub struct Hour {
    /// Number of cars by live generation.
    pub live: BTreeMap<u64, u64>,
    /// Bytes that all cars received.
    pub bytes: u64,
    /// Requests that all cars made.
    pub requests: u64,
    /// Polls that all cars made.
    pub polls: u64,
}

/// The result of a simulation.
#[derive(Clone, Debug, Default)]
pub struct Rollout {
    /// Number of cars.
    pub cars: u64,
    /// Every hour, in order.
    pub hours: Vec<Hour>,
    /// Number of cars on which the bad release was ever live.
    pub met_bad: u64,
    /// The hour at which the publisher revoked the bad release.
    pub revoked_at: u64,
    /// Mean bytes and requests of a poll without news.
    pub idle_poll: (f64, f64),
    /// Mean bytes that a car received for each release, metadata included.
    pub release_bytes: BTreeMap<u64, f64>,
}

/// Polls of one kind and what they cost.
#[derive(Default)]
struct Tally {
    polls: u64,
    bytes: u64,
    requests: u64,
}

impl Tally {
    fn add(&mut self, link: &Counted) {
        self.polls += 1;
        self.bytes += link.bytes;
        self.requests += link.requests;
    }

    fn mean(&self, sum: u64) -> f64 {
        sum as f64 / self.polls.max(1) as f64
    }
}

impl Rollout {
    /// Returns the hours from `published` until `percent` of the fleet had `generation` or a later
    /// one.
    pub fn hours_to(&self, generation: u64, published: u64, percent: u64) -> Option<u64> {
        let has = |h: &Hour| {
            h.live.range(generation..).map(|(_, n)| n).sum::<u64>() * 100 >= percent * self.cars
        };
        self.hours.iter().position(has).map(|at| (at as u64 + 1).saturating_sub(published))
    }

    /// Returns the good releases and the hours at which they were published.
    pub fn good() -> [(u64, u64); 2] {
        [(2, GOOD_AT), (4, NEXT_AT)]
    }
}

/// A link that counts bytes and requests.
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

/// Simulates a fleet of `cars` cars.
pub fn simulate(cars: u64, seed: u64) -> Rollout {
    let fleet = Fleet::new();
    let lasting = Change { expires_s: 7 * 24 * HOUR_S, ..Change::default() };
    publish(&Objects::directory(&fleet.repository()).unwrap(), &fleet.keys(), &lasting, T0)
        .unwrap();

    let mut random = Random::new(seed);
    let mut drivers = drivers(&fleet, cars, &mut random);
    let mut rollout = Rollout { cars, ..Rollout::default() };
    let mut failed = 0;
    let mut idle = Tally::default();
    let mut releases: BTreeMap<u64, Tally> = BTreeMap::new();

    for hour in 0..HOURS {
        let canaries = (cars * u64::from(CANARIES) / 100).max(1);
        direct(&fleet, hour, failed * 100 >= FAILED_MAX * canaries, &mut rollout);

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
                    idle.add(&link);
                } else if before != after {
                    releases.entry(after).or_default().add(&link);
                }
            }
            *now.live.entry(live(&driver.car)).or_default() += 1;
        }
        rollout.hours.push(now);
    }

    rollout.met_bad = drivers.iter().filter(|d| d.met_bad).count() as u64;
    rollout.idle_poll = (idle.mean(idle.bytes), idle.mean(idle.requests));
    rollout.release_bytes = releases.into_iter().map(|(g, t)| (g, t.mean(t.bytes))).collect();
    rollout
}

/// Returns cars at the first release, each with its first poll at a random time.
fn drivers(fleet: &Fleet, cars: u64, random: &mut Random) -> Vec<Driver> {
    let driver = |n: u64| {
        let mut car = Car::at_first_release(fleet);
        car.sync.cohort = (n % 100) as u8;
        car.policy = Policy { requests_min: 1, ..Policy::default() };
        let next = T0 + 60 + random.below(POLL_S);
        Driver { car, next, is_away: random.one_in(AWAY_ONE_IN), met_bad: false }
    };
    (0..cars).map(driver).collect()
}

fn live(car: &Car) -> u64 {
    let live = car.sync.status().unwrap().live.unwrap_or_default();
    live.rsplit('@').next().and_then(|s| s.parse().ok()).unwrap_or(0)
}

impl Driver {
    /// Polls, and serves a hundred requests of a release that was installed. Returns whether the
    /// release failed.
    fn poll(&mut self, link: &mut Counted, now: u64) -> bool {
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
            Some(Watched { requests: 100, faults: u64::from(bad), ..Watched::default() });
        self.car.apply(now);
        // The status names the live generation after the next poll, which follows immediately.
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
        // One delta for the cars at the second release, one for the cars that were away.
        NEXT_AT => change(vec![VERSIONS.merged(2, 4), VERSIONS.merged(1, 4)], 100, &[]),
        _ if is_bad && rollout.revoked_at == 0 && hour > BAD_AT => {
            rollout.revoked_at = hour;
            change(Vec::new(), 100, &["3"]);
        }
        _ => {}
    }
}
