//! The steps of the actors: what each process of a car does, through the product's own steps, and
//! how a process starts, ends and dies.

use crate::random::Random;
use crate::sim_disk::SimDisk;
use crate::whole_car::link::{Server, SimLink};
use crate::whole_car::model::{Flaw, LINEAGE};
use crate::whole_car::names::FLASH;
use crate::whole_car::repository::Contents;
use crate::whole_car::world::{Process, World, preempt};
use hatchback::bundle::manifest::Generation;
use hatchback::car::maintenance_steps::MaintenanceSteps;
use hatchback::car::sync_steps::SyncSteps;
use hatchback::car::update_steps::{ModelUpdates, UpdateSteps};
use hatchback::clock::Clock;
use hatchback::flash::Flash;
use hatchback::maintenance::MaintenanceRules;
use hatchback::model::budget::Budget;
use hatchback::request::serving::Serving;
use hatchback::update::host::Policy;
use hatchback::update::install_status::InstallState;
use hatchback::update::link::LinkRules;
use hatchback::update::trust::Trust;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of memory of the daemon.
pub const MEMORY_BYTES_MAX: u64 = 8 << 20;
/// Page reads in flight: one for each worker of two generations, and of a probe.
const READS_MAX: u32 = 4;
/// Time between two polls of the repository.
const POLL_MINUTES: u32 = 60;
/// One step of the publisher in so many uploads something.
const PUBLISH_ONE_IN: u64 = 4;
/// Steps of others while an install makes no progress.
const HANG_STEPS: u32 = 12;
/// Time for which a stalled server sends nothing.
const STALL: Duration = Duration::from_secs(45);

/// The budget of the model.
pub const BUDGET: Budget = Budget {
    memory_bytes_max: MEMORY_BYTES_MAX,
    cache_bytes_max: 16 << 10,
    resident_bytes_max: 0,
    slots: 4,
    workers: 1,
    batch_delay_us_max: 0,
    batch_max: 4,
    misses_max: 32,
    reads_max: READS_MAX,
};

impl World {
    /// Uploads more of what the publisher has to publish.
    pub fn publish(&self) -> String {
        if !self.is_healing.get() && !self.one_in(PUBLISH_ONE_IN) {
            return "pauses".to_owned();
        }
        let states = &self.history().states;
        let is_last_held = self.knobs.holds_last_back && !self.is_healing.get();
        let end = states.len() - usize::from(is_last_held);
        let mut shown = self.shown.borrow_mut();
        if shown.state + 1 >= end {
            return "has published everything".to_owned();
        }

        let next = &states[shown.state + 1];
        let left = next.uploaded.len() - shown.uploaded;
        let many = if self.one_in(2) { left } else { self.below(left as u64 + 1) as usize };
        shown.uploaded += many;
        let mut view = Contents::clone(&shown.view);
        for path in &next.uploaded[..shown.uploaded] {
            view.insert(path.clone(), Arc::clone(&next.objects[path]));
        }
        shown.view = Rc::new(view);
        if shown.uploaded == next.uploaded.len() {
            (shown.state, shown.uploaded) = (shown.state + 1, 0);
            self.count("publishes");
        }
        format!("state {}, {} objects of the next", shown.state, shown.uploaded)
    }

    /// Starts the sync process, or lets it look whether a poll is due.
    pub fn step_sync(self: &Rc<Self>) -> String {
        let now = self.now(Process::Sync);
        if !self.process(Process::Sync).borrow().is_up {
            return self.start_sync();
        }
        let Some(mut steps) = self.sync.borrow_mut().take() else { return String::new() };
        let mut outcome = "waits".to_owned();

        if steps.is_due(&self.clock, now) {
            let (shown, random) = (self.shown.borrow().state, self.below(1000) as f64 / 1000.0);
            let mut link = SimLink { server: self };
            match steps.poll(&mut link, &self.clock, now, random) {
                Ok(status) => {
                    self.count("polls");
                    self.checks.borrow_mut().known = Some(shown);
                    outcome = format!("polled, {}", status.state);
                }
                Err(e) => {
                    self.count("failed polls");
                    self.say(&e.to_string());
                    outcome = "poll failed".to_owned();
                }
            }
            self.remember_files();
        }
        *self.sync.borrow_mut() = Some(steps);
        outcome
    }

    fn start_sync(&self) -> String {
        let disk = self.start(Process::Sync);
        let updater = self.updater(&disk);
        let provisioned = Trust::init(&disk, &updater.directory, &self.history().root);
        if let Err(e) = provisioned {
            self.say(&e.to_string());
            disk.kill();
            return "cannot be provisioned".to_owned();
        }
        let rules = LinkRules {
            poll_minutes: POLL_MINUTES,
            bytes_per_day_max: 1 << 30,
            bytes_per_s_max: 0,
            hours: [0, 24],
        };
        *self.sync.borrow_mut() =
            Some(SyncSteps::new(updater, Some(self.history().root.clone()), rules));
        "started".to_owned()
    }

    /// Starts a process anew and returns its handle of the disk.
    fn start(&self, process: Process) -> SimDisk {
        let disk = self.disk.process(preempt);
        let mut state = self.process(process).borrow_mut();
        (state.disk, state.is_up, state.has_answered) = (disk.clone(), true, false);
        drop(state);
        self.count(match process {
            Process::Sync => "starts of sync",
            Process::Daemon => "starts of the daemon",
        });
        disk
    }

    /// Starts the daemon, or takes one step of its updates.
    pub fn step_update(self: &Rc<Self>) -> String {
        let now = self.now(Process::Daemon);
        if !self.process(Process::Daemon).borrow().is_up {
            return self.start_daemon();
        }
        let Some(mut steps) = self.update.borrow_mut().take() else { return String::new() };
        let serving = self.serving.borrow().clone();
        let served = || serving.as_ref().and_then(|s| Some(s.model(LINEAGE)?.generation().clone()));
        let before = served();
        self.checks.borrow_mut().begin_update();

        let answers =
            serving.as_ref().and_then(|s| s.get(LINEAGE)?.stats()).map_or(0, |s| s.requests);
        let is_to_end = |flaw| matches!(flaw, Flaw::Kills | Flaw::Endless);
        let may_end = self.history().signed.values().any(|signed| is_to_end(signed.flaw));
        let yield_now = |_| {
            match self.installs_flaw().filter(|_| may_end) {
                Some(Flaw::Kills) => self.process(Process::Daemon).borrow().disk.kill(),
                Some(Flaw::Endless) => self.hang_until_ignition(),
                _ => {}
            }
            preempt();
        };
        let has_moved = steps.step(now, &yield_now);
        let after = served();
        // Unless the process was killed in it, the step recorded the release's first answers.
        let mut state = self.process(Process::Daemon).borrow_mut();
        state.has_answered |= answers > 0 && !state.disk.is_killed();
        drop(state);
        if before != after {
            self.count(if before.is_none() { "loads" } else { "swaps" });
        }
        *self.update.borrow_mut() = Some(steps);
        let serves = after.map_or(0, |g| g.sequence);
        format!("serves {serves}{}", if has_moved { ", next state" } else { "" })
    }

    /// Returns the flaw of the release that the daemon installs.
    fn installs_flaw(&self) -> Option<Flaw> {
        let install = self.updater(&self.disk).install_status().ok()?;
        let signed = self.history().signed.get(&install.release.as_ref()?.manifest)?;
        (install.state == InstallState::Applying).then_some(signed.flaw)
    }

    /// Lets the others take steps inside the step of the updates, which makes no progress. Then the
    /// ignition cuts the power.
    fn hang_until_ignition(self: &Rc<Self>) {
        self.count("installs without an end");
        for _ in 0..HANG_STEPS {
            self.pass_time(self.knobs.tick_max);
            self.take_any_step();
        }
        self.disk.cut();
    }

    /// Does what `hatchbackd serve` does before its loops.
    fn start_daemon(self: &Rc<Self>) -> String {
        let disk = self.start(Process::Daemon);
        self.daemon_level.set(self.level.get());
        self.checks.borrow_mut().begin_update();
        let update = ModelUpdates {
            name: LINEAGE.to_owned(),
            updater: self.updater(&disk),
            budget: BUDGET,
            policy: self.policy(),
            root: Some(self.history().root.clone()),
            boot: self.trace.borrow().counts.get("power cuts").copied().unwrap_or(0),
        };
        let clock: Arc<dyn Clock> = Arc::new(self.clock.clone());
        let serving = Arc::new(Serving::new(MEMORY_BYTES_MAX, READS_MAX, clock).stepped());

        update.begin(self.now(Process::Daemon));
        let mut outcome = "started, serves nothing".to_owned();
        if !update.awaits_release()
            && let Ok(flash) = Flash::open(&disk.shared(), Path::new(FLASH))
            && serving.load(LINEAGE, &flash, BUDGET).is_ok()
        {
            outcome = format!("started, serves {}", flash.manifest().generation.sequence);
        }

        update.record_loaded();
        let slow = Box::new(|_: &str, _: &Generation| 0);
        *self.update.borrow_mut() = Some(UpdateSteps::new(update, Arc::clone(&serving), slow));
        *self.serving.borrow_mut() = Some(serving);
        outcome
    }

    fn policy(&self) -> Policy {
        Policy {
            consent: false,
            probe_samples_min: 1,
            probe_difference_max: 0.02,
            requests_min: self.knobs.requests_min,
            faults_max: 0,
            latency_us_p99_max: 0,
            busy_percent_min: 5,
            busy_percent_max: 20,
        }
    }

    /// Takes one step of maintenance.
    pub fn step_maintenance(self: &Rc<Self>) -> String {
        let now = Duration::from_secs(self.now(Process::Daemon));
        let state = self.process(Process::Daemon).borrow();
        let (is_up, disk) = (state.is_up, state.disk.clone());
        drop(state);
        if !is_up || self.serving.borrow().is_none() {
            return "waits for the daemon".to_owned();
        }

        let taken = self.maintenance.borrow_mut().take();
        let mut steps = match taken {
            Some(steps) => steps,
            None => {
                let disk = disk.metered();
                let Ok(flash) = Flash::open(&disk.shared(), Path::new(FLASH)) else {
                    return "waits for a generation".to_owned();
                };
                let rules = MaintenanceRules {
                    deltas_max: 2,
                    changed_percent_max: self.knobs.changed_percent_max,
                    scrub_every: Duration::from_secs(30 * 3600),
                    wear_bytes_per_day_max: self.knobs.wear_bytes,
                    busy_percent_min: 1,
                    busy_percent_max: 10,
                };
                let updater = self.updater(&disk);
                *self.maintenance_disk.borrow_mut() = Some(disk);
                MaintenanceSteps::new(flash, Some(updater), rules, None, now)
            }
        };
        let is_due = steps.step(&self.clock, now);
        *self.maintenance.borrow_mut() = Some(steps);
        if is_due { "did work" } else { "has no work" }.to_owned()
    }

    /// Ends a process in order, if it is between two steps.
    pub fn end_in_order(self: &Rc<Self>, process: Process) {
        let is_up = self.process(process).borrow().is_up;
        if !is_up || self.is_on_stack(process) {
            return;
        }
        let now = Duration::from_secs(self.now(process));
        if process == Process::Daemon {
            let maintenance = self.maintenance.borrow_mut().take();
            let update = self.update.borrow_mut().take();
            self.atomically(|| {
                update.iter().for_each(UpdateSteps::record_end);
                maintenance.into_iter().for_each(|steps| steps.end(now));
            });
            self.process(process).borrow_mut().has_answered = true;
        }
        self.count("ends in order");
        self.process(process).borrow().disk.kill();
        self.reap_killed();
    }

    /// Drops the in-memory state of every killed process that has no step in progress.
    pub fn reap_killed(&self) {
        for process in Process::BOTH {
            let is_dead = {
                let state = self.process(process).borrow();
                state.is_up && state.disk.is_killed()
            };
            if !is_dead || self.is_on_stack(process) {
                continue;
            }
            self.atomically(|| self.drop_memory(process));
            let due = self.step_number() + if self.one_in(3) { self.below(40) } else { 0 };
            let mut state = self.process(process).borrow_mut();
            (state.is_up, state.due, state.stopped_until) = (false, due, 0);
            state.early_deaths = if state.has_answered { 0 } else { state.early_deaths + 1 };
            drop(state);
            self.note(format_args!("{process:?} has ended"));
        }
    }

    fn drop_memory(&self, process: Process) {
        match process {
            Process::Sync => drop(self.sync.borrow_mut().take()),
            Process::Daemon => {
                self.pending.borrow_mut().clear();
                self.held.borrow_mut().clear();
                drop(self.update.borrow_mut().take());
                drop(self.maintenance.borrow_mut().take());
                drop(self.maintenance_disk.borrow_mut().take());
                drop(self.serving.borrow_mut().take());
            }
        }
    }

    /// Turns the power on again after a cut.
    pub fn restore_power(&self) {
        let seed = self.random(Random::bits);
        Process::BOTH.iter().for_each(|p| self.process(*p).borrow().disk.kill());
        self.reap_killed();
        self.disk.reboot(seed);
        // A rename that was visible but not yet durable may be undone.
        self.checks.borrow_mut().forget_live();
        self.count("power cuts");
        self.note(format_args!("the power is back"));
    }

    /// Prints a message of the product; it is not part of the trace.
    pub fn say(&self, message: &str) {
        log::info!("{message}");
    }
}

impl Server for Rc<World> {
    fn contents(&self) -> Rc<Contents> {
        Rc::clone(&self.shown.borrow().view)
    }

    fn fault(&self) -> Option<Random> {
        let is_bad = self.link_bad_until.get() > self.step_number() && self.one_in(3);
        is_bad.then(|| Random::new(self.random(Random::bits)))
    }

    fn pause(&self, is_stalled: bool) {
        if is_stalled {
            self.clock.pass(STALL);
        }
        preempt();
    }

    fn count(&self, what: &'static str) {
        World::count(self, what);
    }
}
