//! The states and the history of an update. The sync process's record and the serving process's
//! record hold one history each.

use crate::limits::{HISTORY_MAX, NOTE_BYTES_MAX};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The states of an update, from the records of both processes.
///
/// ```text
/// Idle -> Notified -> Fetching -> Staged -> [AwaitConsent] -> Applying -> Probation -> Committed
///             ^           |          |                           |           |
///             +--- Failed <----------+------- Failed <-----------+--- RollingBack
/// ```
///
/// A step of a rebuild goes from `Applying` to `Committed`, because nothing serves it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UpdateState {
    /// The live generation is the newest that this car can reach.
    #[default]
    Idle,
    /// The repository lists a release that leads forward.
    Notified,
    /// The sync process is downloading its bundle.
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
    /// The last attempt ended; `error` has the reason. The next attempt reuses the fetched bytes.
    Failed,
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
    /// Position in the order of the steps of both processes. A process gives its next step a higher
    /// number than every step in both records.
    pub order: u64,
    /// Time of the step, seconds since 1970.
    pub at: u64,
    /// The state that was entered.
    pub state: UpdateState,
    /// The generation of the release, if there is one.
    pub release: Option<String>,
    /// The reason, if there is one.
    pub note: Option<String>,
}

/// Appends `event` to a history of at most `HISTORY_MAX` events. An event that equals the last one,
/// except for its time and the numbers of its note, replaces it. A link that fails every hour is
/// one step, although each note may have another time or another number of free bytes.
pub(super) fn append(history: &mut Vec<UpdateEvent>, mut event: UpdateEvent) {
    event.note = event.note.map(cut);
    let words = |note: &Option<String>| {
        note.as_ref().map(|note| note.replace(|c: char| c.is_ascii_digit(), ""))
    };
    let is_like = |e: &UpdateEvent| {
        (e.state, &e.release, words(&e.note)) == (event.state, &event.release, words(&event.note))
    };
    match history.last_mut() {
        Some(last) if is_like(last) => *last = event,
        _ => history.push(event),
    }
    let excess = history.len().saturating_sub(HISTORY_MAX);
    history.drain(..excess);
}

/// Returns `note` with at most `NOTE_BYTES_MAX` bytes: a reason may quote names of a bundle.
pub(super) fn cut(mut note: String) -> String {
    note.truncate(note.floor_char_boundary(NOTE_BYTES_MAX));
    note
}

/// Returns the order of the last event of `history`.
pub(super) fn last_order(history: &[UpdateEvent]) -> u64 {
    history.last().map_or(0, |event| event.order)
}
