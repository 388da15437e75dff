//! The status record of an update. Both processes of an update read and write it, under the lock of
//! the sync directory, and replace it whole at every step. Each state can be entered again after a
//! stop. The record never decides what is live: only the live record on flash does.

use crate::io::atomic_write;
use crate::io::disk::Disk;
use crate::io::record;
use crate::limits::HISTORY_MAX;
use crate::maintenance::wear::Wear;
use crate::update::error::{UpdateError, io_error};
use crate::update::release::Release;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::ErrorKind::NotFound;
use std::path::Path;

const MAGIC: &[u8; 8] = b"HATCHUPD";
/// The format of the record.
pub const STATUS_FORMAT: u32 = 1;

/// The states of an update.
///
/// ```text
/// Idle -> Notified -> Fetching -> Staged -> [AwaitConsent] -> Applying -> Probation -> Committed
///             ^           |          |                           |           |
///             +--- Failed <----------+------- Failed <-----------+--- RollingBack
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UpdateState {
    /// The live generation is the newest that this car can reach.
    #[default]
    Idle,
    /// The repository lists a release that leads forward.
    Notified,
    /// The fetching process is downloading its bundle.
    Fetching,
    /// Its verified bundle is on disk beside the live generation.
    Staged,
    /// The owner must consent.
    AwaitConsent,
    /// The serving process is installing and probing it.
    Applying,
    /// It is live, and its requests are observed.
    Probation,
    /// It passed probation.
    Committed,
    /// It failed, or the publisher revoked it: the previous generation becomes live again.
    RollingBack,
    /// The last attempt ended; `error` has the reason. The next attempt reuses what was fetched.
    Failed,
}

impl UpdateState {
    /// Returns whether the fetching process has the update in hand. Otherwise the serving process
    /// has.
    pub fn is_fetching(self) -> bool {
        matches!(
            self,
            Self::Idle | Self::Notified | Self::Fetching | Self::Committed | Self::Failed
        )
    }

    /// Returns whether an update may go from `self` to `next`.
    pub fn can_enter(self, next: Self) -> bool {
        self.successors().contains(&next)
    }

    /// Returns the states that may follow `self`. A fetch that fails enters `Failed` from every
    /// state of the fetching process, and a fetch that was killed starts again from `Notified`.
    fn successors(self) -> &'static [Self] {
        use UpdateState::*;
        match self {
            Idle | Committed => &[Notified, Failed],
            Notified => &[Notified, Fetching, Idle, Failed],
            Fetching => &[Notified, Staged, Idle, Failed],
            // A newer release replaces one that waits; a revoked one is dropped.
            Staged => &[Notified, Staged, AwaitConsent, Applying, Idle],
            AwaitConsent => &[Notified, Staged, Applying, Idle],
            Applying => &[Probation, RollingBack, Failed],
            Probation => &[Committed, RollingBack, Failed],
            // The publisher can revoke a release whose rollback is still under way.
            RollingBack => &[RollingBack, Failed],
            Failed => &[Notified, Idle, Failed],
        }
    }
}

impl fmt::Display for UpdateState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "idle",
            Self::Notified => "notified",
            Self::Fetching => "fetching",
            Self::Staged => "staged",
            Self::AwaitConsent => "await-consent",
            Self::Applying => "applying",
            Self::Probation => "probation",
            Self::Committed => "committed",
            Self::RollingBack => "rolling-back",
            Self::Failed => "failed",
        })
    }
}

/// One step of an update.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateEvent {
    /// Time of the step, seconds since 1970.
    pub at: u64,
    /// The state that was entered.
    pub state: UpdateState,
    /// The generation of the release in hand.
    pub release: Option<String>,
    /// The reason, if there is one.
    pub note: Option<String>,
}

/// The status record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateStatus {
    /// The state of the update.
    pub state: UpdateState,
    /// Time of the last step, seconds since 1970.
    pub at: u64,
    /// The generation that was live at that time.
    pub live: Option<String>,
    /// The release in hand.
    pub release: Option<Release>,
    /// The highest sequence that the repository lists for this car.
    pub newest: Option<u64>,
    /// The publisher revoked the live release and lists no newer one.
    pub withdrawn: bool,
    /// Why the last attempt ended or is being rolled back.
    pub error: Option<String>,
    /// Bytes that the last run received.
    pub bytes_received: u64,
    /// Bytes received, by day.
    pub received: Wear,
    /// Process starts during `Applying` and `Probation` of this release that did not end cleanly.
    pub starts: u32,
    /// The last steps, oldest first; at most `HISTORY_MAX`.
    pub history: Vec<UpdateEvent>,
}

impl UpdateStatus {
    /// Reads the record in `directory`. Returns the default if it is missing. Returns the default
    /// with `error` set if it is damaged; the daily byte budget then counts as spent.
    ///
    /// # Errors
    /// `UpdateError::Io` if the record exists and the disk does not give its bytes.
    pub fn read(disk: &dyn Disk, directory: &Path) -> Result<Self, UpdateError> {
        let path = directory.join("status");
        let bytes = match disk.read(&path) {
            Err(e) if e.kind() == NotFound => return Ok(Self::default()),
            read => read.map_err(io_error(&path))?,
        };

        Ok(Self::decode(&bytes).unwrap_or_else(|problem| {
            let error = Some(format!("{}: {problem}", path.display()));
            Self { error, received: Wear::unknown(), ..Self::default() }
        }))
    }

    /// Replaces the record in `directory`.
    ///
    /// # Errors
    /// `UpdateError::Io` if the record cannot be written.
    pub fn write(&self, disk: &dyn Disk, directory: &Path) -> Result<(), UpdateError> {
        let path = directory.join("status");
        atomic_write::replace(disk, &path, &self.encode()).map_err(io_error(&path))
    }

    /// Enters `state` and records the step. The caller writes the record.
    ///
    /// # Panics
    /// If the state machine has no such transition: that is a defect of the caller.
    pub fn enter(&mut self, state: UpdateState, now: u64, note: Option<String>) {
        assert!(self.state.can_enter(state), "an update goes from {} to {state}", self.state);
        self.record(state, now, note);
    }

    /// Makes `release` the release in hand and enters `Notified`. A record of any state that names
    /// no release has nothing in hand, so a release may always follow it.
    ///
    /// # Panics
    /// If the serving process has a release in hand: that is a defect of the caller.
    pub(super) fn take_up(&mut self, release: Release, now: u64) {
        self.assert_nothing_applied(UpdateState::Notified);
        self.release = Some(release);
        self.starts = 0;
        self.record(UpdateState::Notified, now, None);
    }

    /// Drops the release in hand and enters `Idle`, unless the state is `Idle` or `Committed`.
    ///
    /// # Panics
    /// As [`Self::take_up`].
    pub(super) fn clear_release(&mut self, now: u64) {
        let is_done = matches!(self.state, UpdateState::Idle | UpdateState::Committed);
        if !is_done {
            self.assert_nothing_applied(UpdateState::Idle);
        }

        self.release = None;
        if !is_done {
            self.record(UpdateState::Idle, now, None);
        }
    }

    /// Returns the release that the serving process applies, observes or rolls back.
    pub(super) fn applied_release(&self) -> Option<&Release> {
        let is_applied = matches!(
            self.state,
            UpdateState::Applying | UpdateState::Probation | UpdateState::RollingBack
        );
        self.release.as_ref().filter(|_| is_applied)
    }

    /// Returns the staged release that waits for the serving process or for consent.
    pub(super) fn waiting_release(&self) -> Option<&Release> {
        let waits = matches!(self.state, UpdateState::Staged | UpdateState::AwaitConsent);
        self.release.as_ref().filter(|_| waits)
    }

    fn assert_nothing_applied(&self, next: UpdateState) {
        // A record from disk may name no release in a state that needs one; `advance` ignores it.
        let is_legal = self.release.is_none() || self.state.can_enter(next);
        assert!(is_legal, "an update goes from {} to {next}", self.state);
    }

    fn record(&mut self, state: UpdateState, now: u64, note: Option<String>) {
        let release = self.release.as_ref().map(|r| r.generation.to_string());
        (self.state, self.at) = (state, now);
        self.error = note
            .clone()
            .filter(|_| matches!(state, UpdateState::Failed | UpdateState::RollingBack));

        // A link that fails every hour is one step, with the time of its last failure.
        let repeats = |e: &UpdateEvent| e.state == state && e.release == release && e.note == note;
        match self.history.last_mut() {
            Some(last) if repeats(last) => last.at = now,
            _ => self.history.push(UpdateEvent { at: now, state, release, note }),
        }
        let excess = self.history.len().saturating_sub(HISTORY_MAX);
        self.history.drain(..excess);
    }

    /// Encodes the record.
    pub fn encode(&self) -> Vec<u8> {
        record::encode(MAGIC, STATUS_FORMAT, self)
    }

    /// Decodes a record.
    ///
    /// # Errors
    /// What is wrong with `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        record::decode(MAGIC, STATUS_FORMAT, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::bundle::manifest::Generation;
    use UpdateState::*;

    const ALL: [UpdateState; 10] = [
        Idle,
        Notified,
        Fetching,
        Staged,
        AwaitConsent,
        Applying,
        Probation,
        Committed,
        RollingBack,
        Failed,
    ];

    fn in_state(state: UpdateState, release: bool) -> UpdateStatus {
        let generation = Generation { lineage: "m".to_owned(), sequence: 7 };
        let release = release.then_some(Release {
            generation,
            parent: None,
            bytes: 0,
            share: 100,
            manifest_bytes: 0,
            manifest: [0; 32],
        });
        UpdateStatus { state, release, ..UpdateStatus::default() }
    }

    /// Rows: from; columns: to, in the order of `ALL`. `x` marks a legal transition.
    #[test]
    fn an_update_takes_the_drawn_transitions_and_no_other() {
        let drawn = [
            "- x - - - - - - - x", // idle
            "x x x - - - - - - x", // notified
            "x x - x - - - - - x", // fetching
            "x x - x x x - - - -", // staged
            "x x - x - x - - - -", // await-consent
            "- - - - - - x - x x", // applying
            "- - - - - - - x x x", // probation
            "- x - - - - - - - x", // committed
            "- - - - - - - - x x", // rolling-back
            "x x - - - - - - - x", // failed
        ];
        for (from, row) in ALL.into_iter().zip(drawn) {
            for (to, mark) in ALL.into_iter().zip(row.split(' ')) {
                let entered = std::panic::catch_unwind(|| in_state(from, true).enter(to, 1, None));
                assert_eq!(entered.is_ok(), mark == "x", "{from} -> {to}");
            }
        }
    }

    #[test]
    fn a_record_without_a_release_takes_one_up_in_every_state() {
        for state in ALL {
            let mut status = in_state(state, false);
            status.clear_release(1);
            assert_eq!(status.state, if state == Committed { Committed } else { Idle });
            let mut status = in_state(state, false);
            status.take_up(in_state(Idle, true).release.unwrap(), 1);
            assert_eq!((status.state, status.release.is_some()), (Notified, true));
        }
    }

    #[test]
    fn any_changed_bit_is_refused() {
        let event = UpdateEvent {
            at: 5,
            state: UpdateState::Staged,
            release: Some("m 7".to_owned()),
            note: None,
        };
        let status = UpdateStatus {
            state: UpdateState::Probation,
            starts: 3,
            history: vec![event],
            ..UpdateStatus::default()
        };
        let bytes = status.encode();
        assert_eq!(UpdateStatus::decode(&bytes).unwrap(), status);
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(UpdateStatus::decode(&bad).is_err(), "bit {bit}");
        }
    }
}
