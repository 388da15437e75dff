//! The serving process's record of an update, in the flash directory. Only the holder of the lock
//! `updating` writes it. The sync process reads it. Each state can be entered again after a stop.

use crate::bundle::manifest::{Generation, Hash};
use crate::io::disk::Disk;
use crate::io::paired_record::PairedRecord;
use crate::limits::{
    ATTEMPTED_MAX, ATTEMPTS_MAX, REFUSED_MAX, RETRY_S_MAX, STATUS_BYTES_MAX, TRIAL_CUTS_MAX,
    TRIALS_MAX,
};
use crate::update::error::UpdateError;
use crate::update::fetch_status::Offer;
use crate::update::history::{UpdateEvent, UpdateState, append, cut, last_order};
use crate::update::release::Release;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The state of the serving process's work on a release.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum InstallState {
    /// No release was taken yet, or the last one was dropped before it was installed.
    #[default]
    Idle,
    /// The owner must consent.
    AwaitConsent,
    /// The process is installing and probing it.
    Applying,
    /// It is live, and its requests are observed.
    Probation,
    /// It passed probation.
    Committed,
    /// The previous generation becomes live again.
    RollingBack,
    /// The attempt ended; `error` has the reason.
    Failed,
}

impl InstallState {
    /// Returns the state of the update for this state.
    pub(super) fn shown(self) -> UpdateState {
        match self {
            Self::Idle => UpdateState::Idle,
            Self::AwaitConsent => UpdateState::AwaitConsent,
            Self::Applying => UpdateState::Applying,
            Self::Probation => UpdateState::Probation,
            Self::Committed => UpdateState::Committed,
            Self::RollingBack => UpdateState::RollingBack,
            Self::Failed => UpdateState::Failed,
        }
    }

    /// Returns whether the process changes or observes the live generation for a release.
    pub fn is_active(self) -> bool {
        matches!(self, Self::Applying | Self::Probation | Self::RollingBack)
    }

    /// Returns whether the process works on a release, or waits for consent to it.
    pub fn has_release(self) -> bool {
        self.is_active() || self == Self::AwaitConsent
    }

    fn successors(self) -> &'static [Self] {
        use InstallState::*;
        match self {
            Idle | Committed | Failed => &[AwaitConsent, Applying, Failed],
            // A newer release replaces one that waits; a revoked one is dropped.
            AwaitConsent => &[AwaitConsent, Applying, Failed, Idle],
            // A step of a rebuild is not observed.
            Applying => &[Probation, Committed, RollingBack, Failed],
            Probation => &[Committed, RollingBack, Failed],
            RollingBack => &[Failed],
        }
    }
}

/// The cause of a rollback.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Blame {
    /// The release: it is never installed again.
    #[default]
    Release,
    /// The release or this version of the program, which cannot read it. Another version tries it.
    Version,
    /// The car, or a revocation by the publisher: the release may be installed later.
    Other,
}

/// A release that this car rejected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// SHA-256 of its manifest.
    pub manifest: Hash,
    /// The version of the program that could not read it; `None` if no version may install it.
    pub by: Option<String>,
}

/// When a release is tried again after a fault of the car, beside the growing pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Retry {
    /// At the next start of the process.
    #[default]
    AtStart,
    /// Also as soon as the flash directory has this many free bytes.
    WithRoom(u64),
    /// After the pause only: the process ended during the attempts.
    AfterPause,
}

/// The attempts of a release that faults of the car ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempted {
    /// SHA-256 of its manifest.
    pub manifest: Hash,
    /// Attempts in a row; 0 once it may be tried again as if for the first time.
    pub attempts: u32,
    /// Time of the last one, seconds since 1970.
    pub at: u64,
    /// When the next attempt may come sooner.
    pub retry: Retry,
}

/// The snapshot that would repair the live generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Repair {
    /// None is needed.
    #[default]
    None,
    /// Some rows are damaged: the next release is taken as a snapshot if there is one.
    NewerSnapshot,
    /// It cannot be opened: any snapshot replaces it, even one of the same generation.
    AnySnapshot,
    /// No delta on its damaged rows can be proven: any snapshot replaces it, although it opens.
    Replacement,
}

/// Observations of the release on probation, by one process or by several.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watched {
    /// Requests served.
    pub requests: u64,
    /// Requests that failed, by no fault of the car.
    pub faults: u64,
    /// Requests that took longer than the policy's `latency_us_p99_max`.
    pub slow: u64,
    /// Requests that failed because the GPU failed.
    pub car_faults: u64,
}

impl Watched {
    /// Applies `of` to each count of this and of `other`.
    fn combine(self, other: Self, of: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            requests: of(self.requests, other.requests),
            faults: of(self.faults, other.faults),
            slow: of(self.slow, other.slow),
            car_faults: of(self.car_faults, other.car_faults),
        }
    }
}

/// The record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstallStatus {
    /// The state of the process.
    pub state: InstallState,
    /// Time of the last step, seconds since 1970.
    pub at: u64,
    /// Number of the last offer that was taken.
    pub offer: u64,
    /// The release of that offer.
    pub release: Option<Release>,
    /// Why the last attempt ended or is being rolled back.
    pub error: Option<String>,
    /// The cause of the current rollback.
    pub blame: Blame,
    /// Trials of the release in a row that a crash of the process ended, and the open one.
    pub trials: u32,
    /// Trials of the release in a row that a restart of the machine ended.
    pub cuts: u32,
    /// The boot of the machine in which the last trial began.
    pub boot: u64,
    /// Installs of the release in a row, in one boot, that a crash of the process ended, and the
    /// open one.
    pub installs: u32,
    /// Installs of the release in a row that a restart of the machine ended.
    pub install_cuts: u32,
    /// The boot of the machine in which the last install began.
    pub install_boot: u64,
    /// Starts in a row, in one boot, that ended before the model was loaded, and the open one.
    pub loads: u32,
    /// The boot of the machine in which the last start began.
    pub load_boot: u64,
    /// SHA-256 of the manifest that was live then.
    pub load_of: Option<Hash>,
    /// Observations of the release on probation by earlier processes.
    pub watched_before: Watched,
    /// Observations by the current process, as far as they are stored.
    pub watched: Watched,
    /// The releases that faults of the car stopped since the last commit, oldest first; at most
    /// `ATTEMPTED_MAX`.
    pub attempted: Vec<Attempted>,
    /// The snapshot that the live generation needs.
    pub repair: Repair,
    /// The newest generation that passed probation.
    pub committed: Option<Generation>,
    /// The rejected releases, oldest first; at most `REFUSED_MAX`.
    pub refused: Vec<Refused>,
    /// The version of the program that last began to work on updates.
    pub version: String,
    /// The last steps, oldest first.
    pub history: Vec<UpdateEvent>,
    /// Number of writes of the record.
    #[serde(skip)]
    pub writes: u64,
}

impl PairedRecord for InstallStatus {
    const MAGIC: &'static [u8; 8] = b"HATCHINS";
    const FORMAT: u32 = 1;
    const NAMES: [&'static str; 2] = ["update.a", "update.b"];
    const BYTES_MAX: u64 = STATUS_BYTES_MAX;
}

impl InstallStatus {
    /// Reads the record in `directory`. If both copies are missing or damaged, returns the default.
    /// The caller then decides by the live generation.
    ///
    /// # Errors
    /// `UpdateError::Io` if the device refuses both copies; another attempt may succeed.
    pub fn read(disk: &dyn Disk, directory: &Path) -> Result<Self, UpdateError> {
        let effect = "the record of the update starts anew";
        let Some(stored) = Self::load_undamaged(disk, directory, effect)? else {
            return Ok(Self::default());
        };
        let mut status = Self { writes: stored.writes, ..stored.value };
        // A state that needs a release becomes idle if the record names none.
        if status.release.is_none() && status.state.has_release() {
            status.state = InstallState::Idle;
        }
        Ok(status)
    }

    /// Replaces the record in `directory`.
    ///
    /// # Errors
    /// `UpdateError::Io` if the record cannot be written.
    pub fn write(&mut self, disk: &dyn Disk, directory: &Path) -> Result<(), UpdateError> {
        self.writes = self.writes.saturating_add(1);
        Ok(self.store(disk, directory, self.writes)?)
    }

    /// Returns whether `release` was rejected, for good or by this version of the program.
    pub fn is_refused(&self, release: &Release) -> bool {
        let is_by = |by: &Option<String>| by.as_ref().is_none_or(|by| *by == self.version);
        self.refused.iter().any(|r| r.manifest == release.manifest && is_by(&r.by))
    }

    /// Records that `release` must not be installed again, or if `by_version`, not by this version
    /// of the program.
    pub(super) fn refuse(&mut self, release: &Release, by_version: bool) {
        let by = by_version.then(|| self.version.clone());
        self.refused.retain(|r| r.manifest != release.manifest);
        self.refused.push(Refused { manifest: release.manifest, by });
        let excess = self.refused.len().saturating_sub(REFUSED_MAX);
        self.refused.drain(..excess);
    }

    /// Counts the start of an install in the boot `boot`. If crashes or restarts of the machine
    /// ended too many in a row, returns the reason to give up this attempt.
    pub(super) fn count_install(&mut self, boot: u64) -> Option<String> {
        let is_first = self.installs == 0 && self.install_cuts == 0;
        if is_first || self.install_boot == boot {
            self.installs = self.installs.saturating_add(1);
        } else {
            (self.installs, self.install_cuts) = (1, self.install_cuts.saturating_add(1));
        }
        self.install_boot = boot;

        if self.installs > TRIALS_MAX {
            return Some(format!("the process ended {TRIALS_MAX} times during the install"));
        }
        (self.install_cuts > TRIAL_CUTS_MAX)
            .then(|| format!("the machine was reset {TRIAL_CUTS_MAX} times during the install"))
    }

    /// Takes back the last count of an install, which ended without a verdict and without a crash.
    pub(super) fn uncount_install(&mut self) {
        self.installs = self.installs.saturating_sub(1);
    }

    /// Returns the attempts of `release` that faults of the car ended, if there were any since the
    /// last commit.
    pub(super) fn attempted(&self, release: &Release) -> Option<&Attempted> {
        self.attempted.iter().find(|a| a.manifest == release.manifest)
    }

    /// Counts an attempt of the current release that a fault of the car ended at `at`.
    pub(super) fn count_attempt(&mut self, retry: Retry, at: u64) {
        let Some(manifest) = self.release.as_ref().map(|release| release.manifest) else { return };
        let before = self.attempted.iter().position(|a| a.manifest == manifest);
        let before = before.map_or(0, |at| self.attempted.remove(at).attempts);
        let attempts = before.saturating_add(1);
        self.attempted.push(Attempted { manifest, attempts, at, retry });
        let excess = self.attempted.len().saturating_sub(ATTEMPTED_MAX);
        self.attempted.drain(..excess);
    }

    /// Returns whether another path is preferred to one over `release`: the car's attempts to
    /// install it keep failing.
    pub(super) fn gives_way(&self, release: &Release) -> bool {
        self.attempted(release).is_some_and(|Attempted { attempts, retry, .. }| {
            *attempts >= ATTEMPTS_MAX || *attempts > 0 && *retry == Retry::AfterPause
        })
    }

    /// Counts the start of a trial in the boot `boot`. If crashes or restarts of the machine ended
    /// too many trials, returns the reason to reject the release.
    pub(super) fn count_trial(&mut self, boot: u64) -> Option<String> {
        let is_first = self.trials == 0 && self.cuts == 0;
        let counter = if is_first || self.boot == boot { &mut self.trials } else { &mut self.cuts };
        *counter = counter.saturating_add(1);
        self.boot = boot;
        (self.installs, self.install_cuts) = (0, 0);

        let trial = "between opening the release and its first answers";
        if self.trials > TRIALS_MAX {
            return Some(format!("the process ended {TRIALS_MAX} times {trial}"));
        }
        (self.cuts > TRIAL_CUTS_MAX)
            .then(|| format!("the machine was reset {TRIAL_CUTS_MAX} times {trial}"))
    }

    /// Counts a start in the boot `boot`, at which the manifest `live` is live.
    pub(super) fn count_load(&mut self, boot: u64, live: Option<Hash>) {
        let is_same = (self.load_boot, self.load_of) == (boot, live);
        self.loads = if is_same { self.loads.saturating_add(1) } else { 1 };
        (self.load_boot, self.load_of) = (boot, live);
    }

    /// Ends the open start as one that loaded the model. Returns whether it was open.
    pub(super) fn end_load(&mut self) -> bool {
        let is_open = (1..=TRIALS_MAX).contains(&self.loads);
        if is_open {
            self.loads = 0;
        }
        is_open
    }

    /// Ends the open install and trial as passed.
    pub(super) fn end_trial(&mut self) {
        (self.trials, self.cuts) = (0, 0);
        (self.installs, self.install_cuts) = (0, 0);
    }

    /// Takes up what the current process observed on probation. Returns the sum over all processes.
    pub(super) fn observe(&mut self, watched: Watched) -> Watched {
        // The counts of a model that was unloaded and loaded again start anew. The higher ones are
        // kept, so that no request counts twice.
        self.watched = self.watched.combine(watched, u64::max);
        self.watched_before.combine(self.watched, u64::saturating_add)
    }

    /// Returns whether the release is live and its requests are observed.
    pub(super) fn is_on_probation(&self) -> bool {
        self.state == InstallState::Probation
    }

    /// Returns whether a trial of the live release is open. The answers and the end of a process
    /// say nothing of a release that is not live yet.
    pub(crate) fn has_open_trial(&self) -> bool {
        (self.trials > 0 || self.cuts > 0) && self.is_on_probation()
    }

    /// Begins a run of the program's `version`. A new process has its memory, its target and its
    /// version, so what they prevented is tried again.
    pub(super) fn begin_process(&mut self, version: &str) {
        let is_other = self.version != version;
        for failed in &mut self.attempted {
            if failed.retry != Retry::AfterPause || is_other {
                failed.attempts = 0;
            }
        }
        if is_other {
            version.clone_into(&mut self.version);
        }
        self.watched_before = self.watched_before.combine(self.watched, u64::saturating_add);
        self.watched = Watched::default();
    }

    /// Makes `offer` the current one. The caller enters a state.
    pub(super) fn take_up(&mut self, offer: &Offer) {
        self.offer = offer.number;
        (self.watched_before, self.watched) = Default::default();
        self.end_trial();
        self.release = Some(offer.release.clone());
    }

    /// Returns the time before which `offer` is not tried again, if a fault of the car ended its
    /// last attempts. If the clock went back, the pause ends.
    pub fn retry_at(&self, offer: &Offer, now: u64) -> Option<u64> {
        let Attempted { attempts, at, .. } = self.attempted(&offer.release)?;
        if *attempts == 0 || now < *at {
            return None;
        }
        let pause = 60u64.checked_shl(attempts - 1).unwrap_or(RETRY_S_MAX).min(RETRY_S_MAX);
        Some(at.saturating_add(pause)).filter(|at| now < *at)
    }

    /// Enters `state` and records the step, with a number above `known` and all earlier steps. The
    /// caller writes the record.
    ///
    /// # Panics
    /// If the state machine has no such transition, which is a defect of the caller.
    pub(super) fn enter(&mut self, state: InstallState, at: u64, known: u64, note: Option<String>) {
        let is_legal = self.state.successors().contains(&state);
        assert!(is_legal, "an install goes from {:?} to {state:?}", self.state);

        (self.state, self.at) = (state, at);
        let has_error = matches!(state, InstallState::Failed | InstallState::RollingBack);
        self.error = note.clone().filter(|_| has_error).map(cut);
        let release = self.release.as_ref().map(|r| r.generation.to_string());
        let order = known.max(last_order(&self.history)) + 1;
        append(&mut self.history, UpdateEvent { order, at, state: state.shown(), release, note });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use InstallState::*;

    /// Rows: from; columns: to, in the order of the states. `x` marks a legal transition.
    #[test]
    fn an_install_takes_the_drawn_transitions_and_no_other() {
        let all = [Idle, AwaitConsent, Applying, Probation, Committed, RollingBack, Failed];
        let drawn = [
            "- x x - - - x", // idle
            "x x x - - - x", // await-consent
            "- - - x x x x", // applying
            "- - - - x x x", // probation
            "- x x - - - x", // committed
            "- - - - - - x", // rolling-back
            "- x x - - - x", // failed
        ];
        for (from, row) in all.into_iter().zip(drawn) {
            for (to, mark) in all.into_iter().zip(row.split(' ')) {
                let mut status = InstallStatus { state: from, ..InstallStatus::default() };
                let entered = std::panic::catch_unwind(move || status.enter(to, 1, 0, None));
                assert_eq!(entered.is_ok(), mark == "x", "{from:?} -> {to:?}");
            }
        }
    }

    #[test]
    fn a_fault_of_the_car_is_tried_again_after_growing_pauses() {
        let generation = Generation { lineage: "m".to_owned(), sequence: 7 };
        let release = Release { generation, share: 100, ..Release::default() };
        let offer = Offer { number: 2, release: release.clone() };
        let (manifest, at, retry) = (release.manifest, 1000, Retry::AtStart);
        let after = |attempts| InstallStatus {
            attempted: vec![Attempted { manifest, attempts, at, retry }],
            ..InstallStatus::default()
        };
        assert_eq!(after(0).retry_at(&offer, 1000), None);
        for (attempts, pause) in
            [(1, 60), (2, 120), (3, 240), (40, RETRY_S_MAX), (200, RETRY_S_MAX)]
        {
            let status = after(attempts);
            assert_eq!(status.retry_at(&offer, 1000), Some(1000 + pause));
            assert_eq!(status.retry_at(&offer, 1000 + pause), None);
            assert_eq!(status.retry_at(&offer, 999), None, "the clock went back");
        }
    }

    /// A process that dies within one start of the machine counts at once, a reset of the machine
    /// much later: nearly all of these are ends of drives.
    #[test]
    fn ends_of_the_process_and_resets_of_the_machine_have_counts_of_their_own() {
        type Count = fn(&mut InstallStatus, u64) -> Option<String>;
        for count in [InstallStatus::count_trial as Count, InstallStatus::count_install] {
            let starts = |boot: fn(u64) -> u64| {
                let mut status = InstallStatus::default();
                (1..1000).find(|start| count(&mut status, boot(*start)).is_some())
            };
            assert_eq!(starts(|_| 7), Some(u64::from(TRIALS_MAX) + 1));
            assert_eq!(starts(|start| start), Some(u64::from(TRIAL_CUTS_MAX) + 2));
        }
    }

    #[test]
    fn any_changed_bit_is_refused() {
        let status = InstallStatus {
            state: Probation,
            trials: 3,
            refused: vec![Refused { manifest: [7; 32], by: Some("1.2.3".to_owned()) }],
            ..InstallStatus::default()
        };
        let bytes = status.encode(3);
        assert_eq!(InstallStatus::decode(&bytes).unwrap(), (3, status));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(InstallStatus::decode(&bad).is_err(), "bit {bit}");
        }
    }
}
