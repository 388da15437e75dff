//! What is shown of an update: the records of both processes as one. Each process has a record of
//! its own (`fetch_status.rs`, `install_status.rs`) and only reads the other's. Neither record
//! decides what is live: only the live record on flash does.

use crate::limits::HISTORY_MAX;
use crate::maintenance::wear::Wear;
use crate::update::fetch_status::{FetchState, FetchStatus};
use crate::update::install_status::{InstallState, InstallStatus};
use crate::update::release::Release;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The states of an update, as both processes' records give them.
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
    /// The last attempt ended; `error` has the reason. The next attempt reuses what was fetched.
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
    /// Place in the order of the steps of both processes. A process numbers its next step above
    /// every step that it knows of either process.
    pub order: u64,
    /// Time of the step, seconds since 1970.
    pub at: u64,
    /// The state that was entered.
    pub state: UpdateState,
    /// The generation of the release in hand.
    pub release: Option<String>,
    /// The reason, if there is one.
    pub note: Option<String>,
}

/// Appends `event` to a history of at most `HISTORY_MAX` events. An event like the last one takes its
/// place: a link that fails every hour is one step.
pub(super) fn append(history: &mut Vec<UpdateEvent>, event: UpdateEvent) {
    let is_like = |e: &UpdateEvent| {
        (e.state, &e.release, &e.note) == (event.state, &event.release, &event.note)
    };
    match history.last_mut() {
        Some(last) if is_like(last) => (last.order, last.at) = (event.order, event.at),
        _ => history.push(event),
    }
    let excess = history.len().saturating_sub(HISTORY_MAX);
    history.drain(..excess);
}

/// Returns the order of the last event of `history`.
pub(super) fn last_order(history: &[UpdateEvent]) -> u64 {
    history.last().map_or(0, |event| event.order)
}

/// The state of an update, from the records of both processes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UpdateStatus {
    /// The state of the update.
    pub state: UpdateState,
    /// Time of the last step, seconds since 1970.
    pub at: u64,
    /// The live generation; `None` also if it cannot be opened.
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
    /// Trials of this release in a row that ended with the process.
    pub trials: u32,
    /// Hashes of the manifests of the releases that this car rejected, in hexadecimal digits.
    pub refused: Vec<String>,
    /// The last steps, oldest first; at most `HISTORY_MAX`.
    pub history: Vec<UpdateEvent>,
}

impl UpdateStatus {
    /// Returns what `fetch` and `install` together say. `live` is the live generation.
    pub(super) fn merge(fetch: FetchStatus, install: InstallStatus, live: Option<String>) -> Self {
        // The later step counts, except that a fetch beside a release in hand changes nothing.
        let is_installers = install.state.has_release()
            || last_order(&install.history) > last_order(&fetch.history)
            || install.state == InstallState::Committed && fetch.state == FetchState::Idle;
        let state = if is_installers { install.state.shown() } else { fetch.state.shown() };
        let (release, error) = if is_installers {
            (install.release, install.error)
        } else {
            let offered = fetch.offer.map(|offer| offer.release);
            (fetch.release.or(offered), fetch.error.or(install.error))
        };

        let mut history = fetch.history;
        history.extend(install.history);
        history.sort_by_key(|event| event.order);
        let excess = history.len().saturating_sub(HISTORY_MAX);
        history.drain(..excess);

        let is_waiting =
            matches!(state, UpdateState::Failed | UpdateState::RollingBack | UpdateState::Staged);
        Self {
            state,
            at: history.last().map_or(0, |event| event.at),
            live,
            release,
            newest: fetch.newest,
            withdrawn: fetch.withdrawn,
            error: error.filter(|_| is_waiting),
            bytes_received: fetch.bytes_received,
            received: fetch.received,
            trials: install.trials,
            refused: install.refused.iter().map(|r| crate::update::release::hex(r)).collect(),
            history,
        }
    }
}
