//! The whole car in one deterministic simulation: publisher, repository, link, sync process, daemon
//! with its requests, updates and maintenance, one disk, clocks, and every fault of a car's life.
//! One seed, one thread, simulated time. Everything that a car runs is the product's own code.
//!
//! A simulation has two phases. In the first, faults occur, and the [`checks`] must hold after
//! every step. Then the faults end. Within a bounded number of steps, and without help, the newest
//! good release must be live and serve fresh answers.

pub mod actors;
pub mod checks;
pub mod faults;
pub mod inject;
pub mod link;
pub mod model;
pub mod names;
pub mod repository;
pub mod requests;
pub mod scenarios;
pub mod world;

use crate::random::Random;
use faults::{Fault, Knobs};
use hatchback::update::status::UpdateState;
use repository::Prepared;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use world::{Actor, Failure, Process, Start, World, set_current};

/// Rounds after the faults within which the car must be at the newest release.
const HEAL_ROUNDS: u64 = 1_200;
/// Time between two rounds after the faults.
const HEAL_TICK: Duration = Duration::from_secs(600);
/// One round in so many is a night: the car is parked, and its processes keep running.
const NIGHT_ONE_IN: u64 = 60;
const NIGHT: Duration = Duration::from_secs(14 * 3600);
/// Steps with faults, those inside other steps included.
const STEPS_MAX: u64 = 2_000;
/// Fresh answers that show that the car serves.
const FRESH_ANSWERS: u64 = 10;
/// Rounds for which a car is watched after it is at the newest release.
const CALM_ROUNDS: u64 = 30;

/// The end of one simulation.
pub struct Outcome {
    /// Its seed.
    pub seed: u64,
    /// The first failed check, if any.
    pub failure: Option<Failure>,
    /// The hash of its trace.
    pub hash: u64,
    /// The last lines of its trace.
    pub lines: Vec<String>,
    /// How often each kind of event came.
    pub counts: BTreeMap<&'static str, u64>,
    /// Its knobs.
    pub knobs: Knobs,
}

/// Simulates the life of one car.
pub fn simulate(
    prepared: &Arc<Prepared>,
    seed: u64,
    allowed: &BTreeSet<Fault>,
    is_verbose: bool,
) -> Outcome {
    let knobs = Knobs::draw(&mut Random::of(seed, 2), allowed);
    simulate_with(prepared, Start { seed, knobs, is_verbose })
}

/// Simulates the life of one car with these knobs.
pub fn simulate_with(prepared: &Arc<Prepared>, start: Start) -> Outcome {
    let (seed, knobs) = (start.seed, start.knobs.clone());
    let world = World::new(prepared, start);
    set_current(Some(Rc::clone(&world)));
    let ran = catch_unwind(AssertUnwindSafe(|| world.live()));
    set_current(None);
    if let Err(panic) = ran {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        world.fail(format!("panic: {}", text.unwrap_or_default()));
    }

    let (hash, lines) = world.trace();
    let counts = world.trace.borrow().counts.clone();
    Outcome { seed, failure: world.failure(), hash, lines, counts, knobs }
}

impl World {
    /// Runs both phases.
    fn live(self: &Rc<Self>) {
        self.note(format_args!("history `{}`, {:?}", self.history().name, self.knobs));
        for _ in 0..self.knobs.rounds {
            if self.failure().is_some() || self.step_number() > STEPS_MAX {
                break;
            }
            self.pass_time(self.knobs.tick_max);
            if self.one_in(NIGHT_ONE_IN) {
                self.clock.pass(NIGHT);
            }
            self.pass_faults();
            if self.one_in(self.knobs.fault_one_in) {
                self.inject();
            }
            if self.disk.is_off() {
                self.restore_power();
            }
            self.take_any_step();
        }
        if self.disk.is_off() {
            self.restore_power();
        }
        self.end_faults();
        self.heal();
    }

    /// Lets every actor take steps until the car is at the newest release.
    fn heal(self: &Rc<Self>) {
        self.checks.borrow_mut().fresh_answers = 0;
        let mut calm = 0;
        for round in 0..HEAL_ROUNDS {
            if self.failure().is_some() {
                return;
            }
            // The ignition still ends an install that would never end.
            if self.disk.is_off() {
                self.restore_power();
            }
            self.clock.pass(HEAL_TICK);
            let first = self.below(Actor::ALL.len() as u64) as usize;
            for n in 0..Actor::ALL.len() {
                self.take_step(Actor::ALL[(first + n) % Actor::ALL.len()]);
            }
            (0..3).for_each(|_| self.take_step(Actor::Requests));

            let is_calm = self.is_at_newest();
            if calm == 0 && is_calm {
                self.note(format_args!("at the newest release after {round} rounds"));
            }
            calm = if is_calm { calm + 1 } else { 0 };
            if calm > CALM_ROUNDS {
                return;
            }
        }
        self.fail_to_heal();
    }

    /// Returns whether the newest release that the program reads is live, has passed its probation,
    /// and serves fresh answers. After a downgrade one that only a later program reads may be live,
    /// also on probation. If it is damaged, nothing that this program reads may take its place.
    fn is_at_newest(&self) -> bool {
        let (level, history) = (self.level.get(), self.history());
        let best = history.best(level);
        let updater = self.updater(&self.disk);
        let install = updater.install_status().unwrap_or_default();
        // A car that lost what was live takes nothing older, also after a downgrade.
        let is_ahead = updater.least(&install).is_ok_and(|least| least > best);
        let checks = self.checks.borrow();
        let live = checks.live_sequence();
        let is_later = |live: u64| {
            live > best && history.signed.values().any(|s| s.sequence == live && s.level > level)
        };
        let is_damaged = [Fault::FlashDamage, Fault::FlashLoss]
            .iter()
            .any(|fault| self.knobs.faults.contains(fault));
        let is_later = live.is_some_and(is_later);
        let is_served = (live == Some(best) || is_later) && self.served() == live;
        let status = checks.status.as_ref();
        // The newest release may have been rejected.
        let is_judged = status.is_some_and(|s| {
            matches!(s.state, UpdateState::Committed | UpdateState::Idle | UpdateState::Failed)
        });
        is_judged
            && (is_served || (is_ahead || is_later) && is_damaged)
            && (is_damaged || checks.fresh_answers >= FRESH_ANSWERS)
    }

    fn fail_to_heal(&self) {
        let checks = self.checks.borrow();
        let status = checks.status.clone().unwrap_or_default();
        let (live, served) = (checks.live_sequence(), self.served());
        let (last, fresh) = (self.history().best(self.level.get()), checks.fresh_answers);
        drop(checks);
        let error = status.error.unwrap_or_default();
        let up = self.process(Process::Daemon).borrow().is_up;
        self.fail(format!(
            "the car does not heal: live {live:?}, served {served:?}, newest {last}, state {}, \
             error `{error}`, {fresh} fresh answers, the daemon is up: {up}",
            status.state
        ));
    }
}
