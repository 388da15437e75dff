//! One simulated car: its processes, its disk, its clocks, and the scheduler, which decides which
//! actor takes the next step. Inside a step, every call of the disk and of the link is a point at
//! which other actors may run. All of it runs on one thread and follows from one seed.

use crate::random::Random;
use crate::sim_disk::{SimClock, SimDisk};
use crate::whole_car::checks::Checks;
use crate::whole_car::faults::Knobs;
use crate::whole_car::inject::Lasting;
use crate::whole_car::model::LEVELS;
use crate::whole_car::names::{FLASH, SYNC};
use crate::whole_car::repository::{Contents, History, Prepared, T0};
use crate::whole_car::requests::Pending;
use hatchback::car::maintenance_steps::MaintenanceSteps;
use hatchback::car::sync_steps::SyncSteps;
use hatchback::car::update_steps::UpdateSteps;
use hatchback::clock::Clock;
use hatchback::request::serving::Serving;
use hatchback::update::Updater;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const DAY_S: u64 = 24 * 3600;
/// Actors that may be suspended inside each other.
const DEPTH_MAX: usize = 3;
/// Longest time between two steps inside another step.
const NESTED_TIME_MAX: Duration = Duration::from_millis(500);
/// Steps of others that a stopped process waits for inside its step.
const STOPPED_STEPS_MAX: u64 = 80;
/// Lines of the trace that a failure shows.
const TRACE_LINES: usize = 60;
/// Place of the car in a rollout, per cent.
const COHORT: u8 = 50;
/// Seconds from 1970 to 2090.
const YEAR_2090_S: u64 = 3_786_912_000;

/// An actor: a part of the simulation that takes steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Actor {
    /// The publisher and its repository.
    Publisher,
    /// The sync process.
    Sync,
    /// The updates of the daemon, and its start.
    Update,
    /// The maintenance of the daemon.
    Maintenance,
    /// The callers and the worker of the daemon.
    Requests,
}

/// A process of the car.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Process {
    /// `hatchback-sync`.
    Sync,
    /// `hatchbackd`.
    Daemon,
}

impl Process {
    /// Both processes.
    pub const BOTH: [Self; 2] = [Self::Sync, Self::Daemon];
}

impl Actor {
    /// All actors.
    pub const ALL: [Self; 5] =
        [Self::Publisher, Self::Sync, Self::Update, Self::Maintenance, Self::Requests];
    /// Actors by how often they take a step.
    const WEIGHTED: [Self; 16] = {
        use Actor::*;
        [
            Publisher,
            Sync,
            Sync,
            Sync,
            Update,
            Update,
            Update,
            Update,
            Update,
            Maintenance,
            Maintenance,
            Maintenance,
            Maintenance,
            Requests,
            Requests,
            Requests,
        ]
    };

    /// Returns the process that the actor belongs to.
    pub fn process(self) -> Option<Process> {
        match self {
            Self::Publisher => None,
            Self::Sync => Some(Process::Sync),
            Self::Update | Self::Maintenance | Self::Requests => Some(Process::Daemon),
        }
    }
}

/// The time that a process's clock shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wall {
    /// The time.
    Right,
    /// A time in 1970.
    Year1970,
    /// A time in 2090.
    Year2090,
}

/// The state of a process between its steps.
pub struct ProcessState {
    /// Its handle of the disk.
    pub disk: SimDisk,
    /// Whether it was started and did not end.
    pub is_up: bool,
    /// The step at which it starts if it is down.
    pub due: u64,
    /// The step until which it is stopped.
    pub stopped_until: u64,
    /// What its clock shows.
    pub wall: Wall,
    /// Starts in a row of the daemon that ended before the first answer.
    pub early_deaths: u32,
    /// Whether the daemon answered a request since its start.
    pub has_answered: bool,
}

/// The visible part of the repository.
pub struct Shown {
    /// The number of the last whole state.
    pub state: usize,
    /// Objects of the next state that are uploaded.
    pub uploaded: usize,
    /// All visible objects.
    pub view: Rc<Contents>,
}

/// Why a simulation failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The step.
    pub step: u64,
    /// The failed check.
    pub what: String,
}

/// The record of a simulation so far.
#[derive(Default)]
pub struct Trace {
    lines: VecDeque<String>,
    hash: u64,
    /// How often each kind of event came.
    pub counts: BTreeMap<&'static str, u64>,
}

/// One simulated car and its world.
pub struct World {
    /// Data that all simulations share.
    pub prepared: Arc<Prepared>,
    history: usize,
    /// The knobs of this simulation.
    pub knobs: Knobs,
    random: RefCell<Random>,
    /// The disk, through a handle of no process.
    pub disk: SimDisk,
    /// The monotonic clock.
    pub clock: SimClock,
    /// The state of each process.
    pub processes: BTreeMap<Process, RefCell<ProcessState>>,
    /// The sync process's state in memory, while it runs.
    pub sync: RefCell<Option<SyncSteps>>,
    /// The daemon's update loop, while it runs.
    pub update: RefCell<Option<UpdateSteps>>,
    /// The daemon's maintenance loop, while it runs.
    pub maintenance: RefCell<Option<MaintenanceSteps>>,
    /// The disk handle of maintenance, which counts its writes.
    pub maintenance_disk: RefCell<Option<SimDisk>>,
    /// The daemon's served models, while it runs.
    pub serving: RefCell<Option<Arc<Serving>>>,
    /// The requests that wait for an answer.
    pub pending: RefCell<Vec<Pending>>,
    /// The answers that hostile callers hold.
    pub held: RefCell<Vec<Pending>>,
    /// The repository.
    pub shown: RefCell<Shown>,
    stack: RefCell<Vec<Actor>>,
    atomic: Cell<u32>,
    step: Cell<u64>,
    /// The step until which the link is bad.
    pub link_bad_until: Cell<u64>,
    /// The step until which a hostile process writes into the sync directory.
    pub hostile_until: Cell<u64>,
    /// The step until which hostile callers ask.
    pub callers_until: Cell<u64>,
    /// The faults that last.
    pub lasting: RefCell<Lasting>,
    /// Whether the faults have ended.
    pub is_healing: Cell<bool>,
    /// The level of the programs of the processes that start next.
    pub level: Cell<u8>,
    /// The level of the daemon's program.
    pub daemon_level: Cell<u8>,
    /// State of the checks.
    pub checks: RefCell<Checks>,
    /// The record so far.
    pub trace: RefCell<Trace>,
    failure: RefCell<Option<Failure>>,
    is_verbose: bool,
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<World>>> = const { RefCell::new(None) };
}

/// Lets other actors of the world of this thread run, if the scheduler wants.
pub fn preempt() {
    let world = CURRENT.with(|current| current.borrow().clone());
    if let Some(world) = world {
        world.preempt();
    }
}

/// Makes `world` the world of this thread, or none.
pub fn set_current(world: Option<Rc<World>>) {
    CURRENT.with(|current| *current.borrow_mut() = world);
}

/// Parameters of a simulation.
pub struct Start {
    /// The seed of all random numbers.
    pub seed: u64,
    /// The knobs; `None` draws them from the seed.
    pub knobs: Knobs,
    /// Prints every line of the trace.
    pub is_verbose: bool,
}

impl World {
    /// Returns a car that was never started, and its repository at the first release.
    pub fn new(prepared: &Arc<Prepared>, start: Start) -> Rc<Self> {
        let Start { seed, knobs, is_verbose } = start;
        let mut random = Random::of(seed, 1);
        let drawn = random.below(prepared.histories.len() as u64) as usize;
        let history = knobs.history.unwrap_or(drawn);
        let level = 1 + random.below(u64::from(LEVELS)) as u8;
        let disk = SimDisk::default();
        let process = |_| {
            RefCell::new(ProcessState {
                disk: disk.process(preempt),
                is_up: false,
                due: 0,
                stopped_until: 0,
                wall: Wall::Right,
                early_deaths: 0,
                has_answered: false,
            })
        };
        let view = Rc::new(prepared.histories[history].states[0].objects.clone());
        Rc::new(Self {
            prepared: Arc::clone(prepared),
            history,
            knobs,
            random: RefCell::new(random),
            clock: disk.clock(),
            processes: Process::BOTH.into_iter().map(|p| (p, process(p))).collect(),
            disk,
            sync: RefCell::default(),
            update: RefCell::default(),
            maintenance: RefCell::default(),
            maintenance_disk: RefCell::default(),
            serving: RefCell::default(),
            pending: RefCell::default(),
            held: RefCell::default(),
            callers_until: Cell::new(0),
            shown: RefCell::new(Shown { state: 0, uploaded: 0, view }),
            stack: RefCell::default(),
            atomic: Cell::new(0),
            step: Cell::new(0),
            link_bad_until: Cell::new(0),
            hostile_until: Cell::new(0),
            lasting: RefCell::default(),
            is_healing: Cell::new(false),
            level: Cell::new(level),
            daemon_level: Cell::new(level),
            checks: RefCell::default(),
            trace: RefCell::default(),
            failure: RefCell::default(),
            is_verbose,
        })
    }

    /// Returns the history of the fleet.
    pub fn history(&self) -> &History {
        &self.prepared.histories[self.history]
    }

    /// Returns what `draw` makes of the random numbers.
    pub fn random<T>(&self, draw: impl FnOnce(&mut Random) -> T) -> T {
        draw(&mut self.random.borrow_mut())
    }

    /// Returns true with a probability of 1 in `n`.
    pub fn one_in(&self, n: u64) -> bool {
        self.random(|random| random.one_in(n))
    }

    /// Returns a number in `0..end`.
    pub fn below(&self, end: u64) -> u64 {
        self.random(|random| random.below(end))
    }

    /// Returns the number of the step.
    pub fn step_number(&self) -> u64 {
        self.step.get()
    }

    /// Returns the state of a process.
    pub fn process(&self, process: Process) -> &RefCell<ProcessState> {
        &self.processes[&process]
    }

    /// Returns the time that a process's clock shows, seconds since 1970.
    pub fn now(&self, process: Process) -> u64 {
        let passed = self.clock.now().as_secs();
        match self.process(process).borrow().wall {
            Wall::Right => T0 + DAY_S + passed,
            Wall::Year1970 => passed,
            Wall::Year2090 => YEAR_2090_S + passed,
        }
    }

    /// Returns the car's update as the holder of `disk` sees it.
    pub fn updater(&self, disk: &SimDisk) -> Updater {
        Updater {
            disk: disk.shared(),
            directory: SYNC.into(),
            flash: FLASH.into(),
            lineage: None,
            cohort: COHORT,
            program: Arc::clone(&self.prepared.programs[usize::from(self.level.get()) - 1]),
        }
    }

    /// Records an event.
    pub fn count(&self, what: &'static str) {
        *self.trace.borrow_mut().counts.entry(what).or_default() += 1;
    }

    /// Records a line of the trace.
    pub fn note(&self, line: std::fmt::Arguments<'_>) {
        let mut text = format!("{:5} {:7} s ", self.step.get(), self.clock.now().as_secs());
        let depth = self.stack.borrow().len();
        (0..depth).for_each(|_| text.push_str("  "));
        let _ = text.write_fmt(line);
        if self.is_verbose {
            eprintln!("{text}");
        }

        let mut trace = self.trace.borrow_mut();
        for byte in text.bytes() {
            trace.hash = (trace.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        trace.lines.push_back(text);
        if trace.lines.len() > TRACE_LINES {
            trace.lines.pop_front();
        }
    }

    /// Returns the hash of all lines of the trace, and the last ones.
    pub fn trace(&self) -> (u64, Vec<String>) {
        let trace = self.trace.borrow();
        (trace.hash, trace.lines.iter().cloned().collect())
    }

    /// Records that the simulation failed. The first failure counts.
    pub fn fail(&self, what: String) {
        self.note(format_args!("FAILED: {what}"));
        let failure = Failure { step: self.step.get(), what };
        self.failure.borrow_mut().get_or_insert(failure);
    }

    /// Returns why the simulation failed.
    pub fn failure(&self) -> Option<Failure> {
        self.failure.borrow().clone()
    }

    /// Runs `work` without a preemption.
    pub fn atomically<T>(&self, work: impl FnOnce() -> T) -> T {
        self.atomic.set(self.atomic.get() + 1);
        let done = work();
        self.atomic.set(self.atomic.get() - 1);
        done
    }

    /// Returns whether an actor of `process` is suspended or runs.
    pub fn is_on_stack(&self, process: Process) -> bool {
        self.stack.borrow().iter().any(|actor| actor.process() == Some(process))
    }

    /// Returns whether no step makes sense now.
    pub fn is_halted(&self) -> bool {
        self.failure.borrow().is_some() || self.disk.is_off()
    }

    /// Returns whether `process` may take a step.
    fn may_run(&self, process: Process) -> bool {
        let state = self.process(process).borrow();
        let is_dying = state.is_up && state.disk.is_killed();
        let is_due = state.is_up || state.due <= self.step.get();
        !is_dying && is_due && state.stopped_until <= self.step.get()
    }

    /// Lets `actor` take a step, if it can.
    pub fn take_step(self: &Rc<Self>, actor: Actor) {
        self.reap_killed();
        let is_suspended = self.stack.borrow().contains(&actor);
        let may_run = actor.process().is_none_or(|process| self.may_run(process));
        if is_suspended || !may_run || self.is_halted() {
            return;
        }

        self.step.set(self.step.get() + 1);
        self.stack.borrow_mut().push(actor);
        let outcome = self.act(actor);
        self.stack.borrow_mut().pop();
        self.note(format_args!("{actor:?}: {outcome} ({} disk calls)", self.disk.calls()));
        self.check();
        self.reap_killed();
    }

    fn act(self: &Rc<Self>, actor: Actor) -> String {
        match actor {
            Actor::Publisher => self.publish(),
            Actor::Sync => self.step_sync(),
            Actor::Update => self.step_update(),
            Actor::Maintenance => self.step_maintenance(),
            Actor::Requests => self.step_requests(),
        }
    }

    /// Lets a random actor take a step.
    pub fn take_any_step(self: &Rc<Self>) {
        let actor = self.random(|random| *random.pick(&Actor::WEIGHTED));
        self.take_step(actor);
    }

    /// Lets up to `time_max` pass.
    pub fn pass_time(&self, time_max: Duration) {
        self.clock.pass(Duration::from_millis(self.below(time_max.as_millis() as u64)));
    }

    /// Lets other actors run inside the step of the actor that called the disk or the link.
    pub fn preempt(self: &Rc<Self>) {
        let depth = self.stack.borrow().len();
        let can = self.atomic.get() == 0 && depth > 0 && depth < DEPTH_MAX && !self.is_halted();
        if !can || self.knobs.preempt_one_in == 0 || !self.one_in(self.knobs.preempt_one_in) {
            return;
        }

        self.count("preemptions");
        let steps = if self.one_in(8) { self.below(24) } else { 1 + self.below(3) };
        for _ in 0..steps {
            self.pass_time(NESTED_TIME_MAX);
            self.take_any_step();
        }
        if !self.is_healing.get() && self.one_in(self.knobs.fault_one_in) {
            self.inject();
        }

        // A stopped process takes no step, not even the rest of the one that it is in.
        let Some(process) = self.stack.borrow().last().and_then(|a| a.process()) else { return };
        let mut patience = STOPPED_STEPS_MAX;
        while self.process(process).borrow().stopped_until > self.step.get()
            && patience > 0
            && !self.is_halted()
        {
            patience -= 1;
            self.pass_time(self.knobs.tick_max);
            self.take_any_step();
        }
    }
}
