//! The sync process's record of an update, in the sync directory. Only the process that holds the
//! lock `fetching` writes it. The serving process reads it and trusts nothing in it: the record may
//! come from an attacker.

use crate::bundle::manifest::Hash;
use crate::io::daily_bytes::DailyBytes;
use crate::io::disk::Disk;
use crate::io::paired_record::{PairedRecord, Stored};
use crate::limits::{FETCH_FAILURES_MAX, SET_ASIDE_MAX, SET_ASIDE_POLLS_MAX, STATUS_BYTES_MAX};
use crate::update::error::UpdateError;
use crate::update::history::{UpdateEvent, UpdateState, append, cut, last_order};
use crate::update::release::Release;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The state of the sync process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FetchState {
    /// The repository lists no release that leads forward.
    #[default]
    Idle,
    /// The repository lists a release that leads forward.
    Notified,
    /// The process is downloading its bundle.
    Fetching,
    /// The bundle is complete and offered to the serving process.
    Staged,
    /// The last fetch ended; `error` has the reason.
    Failed,
}

impl FetchState {
    /// Returns the state of the update for this state.
    pub(super) fn shown(self) -> UpdateState {
        match self {
            Self::Idle => UpdateState::Idle,
            Self::Notified => UpdateState::Notified,
            Self::Fetching => UpdateState::Fetching,
            Self::Staged => UpdateState::Staged,
            Self::Failed => UpdateState::Failed,
        }
    }

    /// Returns the states that may follow `self`. A killed fetch starts again from `Notified`.
    fn successors(self) -> &'static [Self] {
        use FetchState::*;
        match self {
            // A release that is already offered becomes `Staged` again without a fetch.
            Idle => &[Notified, Staged, Idle, Failed],
            Notified => &[Notified, Fetching, Staged, Idle, Failed],
            Fetching | Staged | Failed => &[Notified, Staged, Idle, Failed],
        }
    }
}

/// A staged release that the serving process may install.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// Number of the offer. The serving process takes an offer whose number differs from the last
    /// one.
    pub number: u64,
    /// The release.
    pub release: Release,
}

/// A release whose bundle could not be fetched, for a reason of its own: an object that is lost, or
/// that this version cannot read. Other releases may lead to the same generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetAside {
    /// SHA-256 of its manifest.
    pub manifest: Hash,
    /// Failures since it was last set aside.
    pub failures: u32,
    /// Times that it was set aside.
    pub times: u32,
    /// Polls for which other releases are preferred.
    pub polls: u32,
}

/// The record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FetchStatus {
    /// The state of the process.
    pub state: FetchState,
    /// The release that the process fetches.
    pub release: Option<Release>,
    /// The release whose bundle is complete. It stays on offer while a newer one is fetched.
    pub offer: Option<Offer>,
    /// This car's position in a gradual rollout.
    pub cohort: u8,
    /// The manifest of the release that the serving process applies, if the publisher revoked it.
    pub revoked: Option<Hash>,
    /// The highest sequence that the repository lists for this car.
    pub newest: Option<u64>,
    /// The publisher revoked the live release and lists no newer one.
    pub withdrawn: bool,
    /// The releases whose fetch failed; at most `SET_ASIDE_MAX`.
    pub set_aside: Vec<SetAside>,
    /// Why the last fetch ended.
    pub error: Option<String>,
    /// Bytes that the last run received.
    pub bytes_received: u64,
    /// Bytes received, by day.
    pub received: DailyBytes,
    /// The last steps, oldest first.
    pub history: Vec<UpdateEvent>,
    /// The newest release, if this version of the program cannot read it, and why.
    pub skipped: Option<String>,
    /// Number of writes of the record.
    #[serde(skip)]
    pub writes: u64,
}

impl PairedRecord for FetchStatus {
    const MAGIC: &'static [u8; 8] = b"HATCHFET";
    const FORMAT: u32 = 1;
    const NAMES: [&'static str; 2] = ["status.a", "status.b"];
    const BYTES_MAX: u64 = STATUS_BYTES_MAX;
}

impl FetchStatus {
    /// Reads the record in `directory`. If both copies are missing or damaged, returns the default
    /// and calls `lost` with the reason: the next poll makes a new record.
    pub fn read(disk: &dyn Disk, directory: &Path, lost: impl FnOnce(String)) -> Self {
        match Self::load(disk, directory) {
            Ok(Some(Stored { value, writes, .. })) => Self { writes, ..value },
            Ok(None) => Self::default(),
            Err(e) => {
                lost(e.to_string());
                Self::default()
            }
        }
    }

    /// Replaces the record in `directory`.
    ///
    /// # Errors
    /// `UpdateError::Io` if the record cannot be written.
    pub fn write(&mut self, disk: &dyn Disk, directory: &Path) -> Result<(), UpdateError> {
        self.writes = self.writes.saturating_add(1);
        Ok(self.store(disk, directory, self.writes)?)
    }

    /// Returns whether other releases are preferred to `release`.
    pub(super) fn is_set_aside(&self, release: &Release) -> bool {
        self.set_aside.iter().any(|s| s.manifest == release.manifest && s.polls > 0)
    }

    /// Begins a poll at which `listed` are the releases of the car.
    pub(super) fn begin_poll(&mut self, listed: &[Release]) {
        self.set_aside.retain(|s| listed.iter().any(|r| r.manifest == s.manifest));
        self.set_aside.iter_mut().for_each(|s| s.polls = s.polls.saturating_sub(1));
    }

    /// Counts a failed fetch of `release` with the weight `failures`. After enough of them it is
    /// set aside for some polls, each time for longer.
    pub(super) fn count_failure(&mut self, release: &Release, failures: u32) {
        let known = self.set_aside.iter().position(|s| s.manifest == release.manifest);
        let known = known.unwrap_or_else(|| {
            let excess = (self.set_aside.len() + 1).saturating_sub(SET_ASIDE_MAX);
            self.set_aside.drain(..excess);
            let manifest = release.manifest;
            self.set_aside.push(SetAside { manifest, failures: 0, times: 0, polls: 0 });
            self.set_aside.len() - 1
        });
        let known = &mut self.set_aside[known];
        known.failures = known.failures.saturating_add(failures);
        if known.failures >= FETCH_FAILURES_MAX {
            known.failures = 0;
            known.times = known.times.saturating_add(1);
            known.polls = 2u32.saturating_pow(known.times).min(SET_ASIDE_POLLS_MAX);
        }
    }

    /// Enters `state` and records the step, with a number above `known` and all earlier steps. The
    /// caller writes the record.
    ///
    /// # Panics
    /// If the state machine has no such transition, which is a defect of the caller.
    pub(super) fn enter(&mut self, state: FetchState, at: u64, known: u64, note: Option<String>) {
        let is_legal = self.state.successors().contains(&state);
        assert!(is_legal, "a fetch goes from {:?} to {state:?}", self.state);

        self.state = state;
        self.error = note.clone().filter(|_| state == FetchState::Failed).map(cut);
        let release = match state {
            FetchState::Staged => self.offer.as_ref().map(|offer| &offer.release),
            _ => self.release.as_ref(),
        };
        let release = release.map(|r| r.generation.to_string());
        let order = known.max(last_order(&self.history)) + 1;
        append(&mut self.history, UpdateEvent { order, at, state: state.shown(), release, note });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundle::manifest::Generation;

    use FetchState::*;

    /// Rows: from; columns: to, in the order of the states. `x` marks a legal transition.
    #[test]
    fn a_fetch_takes_the_drawn_transitions_and_no_other() {
        let all = [Idle, Notified, Fetching, Staged, Failed];
        let drawn = [
            "x x - x x", // idle
            "x x x x x", // notified
            "x x - x x", // fetching
            "x x - x x", // staged
            "x x - x x", // failed
        ];
        for (from, row) in all.into_iter().zip(drawn) {
            for (to, mark) in all.into_iter().zip(row.split(' ')) {
                let mut status = FetchStatus { state: from, ..FetchStatus::default() };
                let entered = std::panic::catch_unwind(move || status.enter(to, 1, 0, None));
                assert_eq!(entered.is_ok(), mark == "x", "{from:?} -> {to:?}");
            }
        }
    }

    #[test]
    fn a_release_that_was_set_aside_returns_after_some_polls() {
        let generation = Generation { lineage: "m".to_owned(), sequence: 7 };
        let release = Release { generation, share: 100, manifest: [7; 32], ..Release::default() };
        let mut status = FetchStatus::default();
        status.count_failure(&release, FETCH_FAILURES_MAX);
        let polls = (0..100).take_while(|_| {
            let is_set_aside = status.is_set_aside(&release);
            status.begin_poll(std::slice::from_ref(&release));
            is_set_aside
        });
        assert_eq!(polls.count(), 2);
    }

    #[test]
    fn any_changed_bit_is_refused() {
        let status = FetchStatus { state: Staged, cohort: 7, ..FetchStatus::default() };
        let bytes = status.encode(3);
        assert_eq!(FetchStatus::decode(&bytes).unwrap(), (3, status));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(FetchStatus::decode(&bad).is_err(), "bit {bit}");
        }
    }
}
