//! The checks after every step of any actor. Only good, signed, listed releases are live, no good
//! release is rolled back, and memory and wear stay within their budgets.

use crate::whole_car::actors::MEMORY_BYTES_MAX;
use crate::whole_car::faults::Fault;
use crate::whole_car::model::Flaw;
use crate::whole_car::names;
use crate::whole_car::world::{Process, World};
use hatchback::bundle::manifest::Hash;
use hatchback::flash::Flash;
use hatchback::flash::live::LiveRecord;
use hatchback::update::status::{UpdateEvent, UpdateState, UpdateStatus};
use std::collections::BTreeMap;
use std::path::Path;

/// State of the checks between steps.
#[derive(Default)]
pub struct Checks {
    /// The disk's count of calls at the last check.
    calls: u64,
    /// The live record at the last check; `None` if it could not be opened then.
    live: Option<LiveRecord>,
    /// The sequence that was served at the last check.
    served: Option<u64>,
    /// The state of the repository that the sync process saw last; `None` if it saw none, or if a
    /// hostile process wrote since.
    pub known: Option<usize>,
    /// `known` at the start of the last step of the updates.
    known_before: Option<usize>,
    /// The last status.
    pub status: Option<UpdateStatus>,
    /// Answers without a default row since the last reset.
    pub fresh_answers: u64,
    /// Bytes that maintenance wrote, by the day of its clock.
    wear: BTreeMap<u64, u64>,
    metered: u64,
}

impl Checks {
    /// Remembers what the car knows before its updates take a step.
    pub fn begin_update(&mut self) {
        self.known_before = self.known;
    }

    /// Forgets what was live, after a power cut.
    pub fn forget_live(&mut self) {
        self.live = None;
    }

    /// Returns the live sequence at the last check.
    pub fn live_sequence(&self) -> Option<u64> {
        self.live.as_ref().map(|record| record.live.generation.sequence)
    }
}

impl World {
    /// Checks everything.
    pub fn check(&self) {
        self.check_memory();
        self.check_wear();
        if self.checks.borrow().calls == self.disk.calls() {
            return;
        }
        self.checks.borrow_mut().calls = self.disk.calls();
        self.check_live();
        self.check_status();
    }

    fn check_memory(&self) {
        let Some(serving) = self.serving.borrow().clone() else { return };
        let taken: u64 = serving.memory().iter().map(|(_, plan)| plan.total()).sum();
        if taken > MEMORY_BYTES_MAX {
            self.fail(format!("{taken} bytes of memory are planned"));
        }
    }

    /// Checks the wear of each day, unless a clock was wrong: then a day is not a day.
    fn check_wear(&self) {
        let disk = self.maintenance_disk.borrow().clone();
        if self.knobs.faults.contains(&Fault::Clock) {
            return;
        }
        let day = self.now(Process::Daemon) / (24 * 3600);
        let mut checks = self.checks.borrow_mut();
        let metered = disk.map_or(0, |disk| disk.metered_bytes());
        // A new process has a new meter.
        let more = metered.checked_sub(checks.metered).unwrap_or(metered);
        checks.metered = metered;
        let today = checks.wear.entry(day).or_default();
        *today += more;
        let today = *today;
        drop(checks);
        if today > self.knobs.wear_bytes {
            self.fail(format!("maintenance wrote {today} bytes on day {day}"));
        }
    }

    fn check_live(&self) {
        let served = self.served();
        let before = std::mem::replace(&mut self.checks.borrow_mut().served, served);
        let opened = Flash::open(&self.disk.shared(), Path::new(names::FLASH));
        let Ok(flash) = opened else {
            self.checks.borrow_mut().live = None;
            return;
        };
        // A model that was open before its newer release was lost is served on meanwhile.
        let begins = served.filter(|_| served != before);
        if begins.is_some_and(|served| served < flash.record().least) {
            self.fail("a generation is served that is older than one before".to_owned());
        }
        let record = flash.record().clone();
        let before = self.checks.borrow_mut().live.replace(record.clone());
        let rebuilds = before.as_ref().map_or(0, |before| before.rebuilds);
        let live = record.live;
        let Some(before) = before.map(|before| before.live).filter(|before| *before != live) else {
            self.check_signed(&live.manifest);
            return;
        };

        if before.generation == live.generation {
            self.count("merges");
            return;
        }
        self.check_signed(&live.manifest);
        let (from, to) = (before.generation.sequence, live.generation.sequence);
        self.note(format_args!("live: {from} -> {to}"));
        if to > from {
            self.count("installs");
            let is_delta = self.history().signed.get(&live.manifest).is_some_and(|s| s.is_delta);
            if self.history().contents.contains_key(&to) {
                self.count(if is_delta { "restores by delta" } else { "restores by snapshot" });
            }
            self.check_listed(&live.manifest);
            self.check_variant(&before.manifest, &live.manifest);
        } else if record.rebuilds > rebuilds {
            self.count("rebuilds");
            let status = self.updater(&self.disk).install_status().unwrap_or_default();
            let committed = status.committed.map_or(0, |newest| newest.sequence);
            if to < committed && record.least < committed {
                self.fail(format!("{to} may be served, and {committed} was committed"));
            }
        } else {
            self.count("rollbacks");
            if !self.may_roll_back(from) {
                self.fail(format!("the live sequence went from {from} to {to}"));
            }
        }
    }

    fn check_signed(&self, manifest: &Hash) {
        match self.history().signed.get(manifest) {
            None => self.fail("a release is live that nobody signed".to_owned()),
            Some(signed) if signed.flaw != Flaw::None => {
                self.fail(format!("release {} is live: {:?}", signed.sequence, signed.flaw));
            }
            Some(_) => {}
        }
    }

    /// Checks that the daemon's program reads the release that became live, and that a delta
    /// follows its own variant.
    fn check_variant(&self, before: &Hash, live: &Hash) {
        let signed = &self.history().signed;
        let (Some(before), Some(live)) = (signed.get(before), signed.get(live)) else { return };
        let (sequence, level) = (live.sequence, self.daemon_level.get());
        if live.level > level {
            self.fail(format!(
                "a program of level {level} installed {sequence}: it cannot read it"
            ));
        }
        if live.variant > 0 {
            self.count("installs of variants");
        }
        if live.is_delta && before.variant != live.variant {
            self.fail(format!("the delta to {sequence} follows another variant"));
        }
    }

    /// Checks that a release which became live is not one that the car knew to be revoked.
    fn check_listed(&self, manifest: &Hash) {
        let Some(known) = self.checks.borrow().known_before else { return };
        let is_listed =
            self.history().states[known..].iter().any(|state| state.listed.contains(manifest));
        if !is_listed {
            self.fail("a release became live that the car knew to be revoked".to_owned());
        }
    }

    /// Returns whether a release may be rolled back: it is bad, the publisher revoked it, or its
    /// files were damaged on probation.
    fn may_roll_back(&self, sequence: u64) -> bool {
        let status = self.updater(&self.disk).status().unwrap_or_default();
        let is_damaged = |event: &UpdateEvent| {
            let note = event.note.as_deref().unwrap_or_default();
            event.state == UpdateState::RollingBack && note.starts_with("its files on flash are")
        };
        if status.history.iter().any(is_damaged) {
            return true;
        }
        let history = self.history();
        let of_it = |hash: &&Hash| history.signed[*hash].sequence == sequence;
        if history.signed.values().any(|s| s.sequence == sequence && s.flaw != Flaw::None) {
            return true;
        }
        let visible = self.shown.borrow().state + 1;
        let lists = |n: usize| history.states[n].listed.iter().any(|hash| of_it(&hash));
        (1..history.states.len().min(visible + 1)).any(|n| lists(n - 1) && !lists(n))
    }

    fn check_status(&self) {
        let Ok(status) = self.updater(&self.disk).status() else { return };
        let before = self.checks.borrow_mut().status.replace(status.clone());
        if before.as_ref() == Some(&status) {
            return;
        }
        if before.as_ref().is_none_or(|b| b.state != status.state) {
            let sequence = status.release.as_ref().map_or(0, |r| r.generation.sequence);
            self.note(format_args!("state: {} of {sequence}", status.state));
            match status.state {
                UpdateState::Committed => self.count("commits"),
                UpdateState::RollingBack => self.count("rolling back"),
                _ => {}
            }
        }

        for event in status.history.iter().filter(|e| e.state == UpdateState::RollingBack) {
            let release = event.release.as_deref().unwrap_or_default();
            let sequence = release.rsplit('@').next().and_then(|s| s.parse().ok()).unwrap_or(0);
            if sequence > 0 && !self.may_roll_back(sequence) {
                let note = event.note.as_deref().unwrap_or_default();
                self.fail(format!("the good release {release} is rolled back: {note}"));
                return;
            }
        }
    }
}
