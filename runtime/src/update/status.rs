//! The status of an update, merged from the records of both processes. Each process has a record of
//! its own (`fetch_status.rs`, `install_status.rs`) and only reads the other's. Neither record
//! decides which generation is live: only the live record on flash does.

use crate::bundle::manifest::hex;
use crate::io::daily_bytes::DailyBytes;
use crate::limits::HISTORY_MAX;
use crate::update::fetch_status::{FetchState, FetchStatus};
use crate::update::history::last_order;
use crate::update::install_status::{InstallState, InstallStatus};
use crate::update::release::Release;
use serde::Serialize;

pub use crate::update::history::{UpdateEvent, UpdateState};

/// The state of an update, from the records of both processes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct UpdateStatus {
    /// The state of the update.
    pub state: UpdateState,
    /// Time of the last step, seconds since 1970.
    pub at: u64,
    /// The live generation; `None` also if it cannot be opened or is being rebuilt.
    pub live: Option<String>,
    /// The current release, if there is one.
    pub release: Option<Release>,
    /// The highest sequence that the repository lists for this car.
    pub newest: Option<u64>,
    /// The publisher revoked the live release and lists no newer one.
    pub withdrawn: bool,
    /// The newest release, if this version of the program cannot read it, and why.
    pub skipped: Option<String>,
    /// Why the last attempt ended or is being rolled back, or why the last fetch failed.
    pub error: Option<String>,
    /// Bytes that the last run received.
    pub bytes_received: u64,
    /// Bytes received, by day.
    pub received: DailyBytes,
    /// Trials of this release in a row that a crash of the process ended.
    pub trials: u32,
    /// Hashes of the manifests of the releases that this car rejected, in hexadecimal digits.
    pub refused: Vec<String>,
    /// The last steps, oldest first; at most `HISTORY_MAX`.
    pub history: Vec<UpdateEvent>,
}

impl UpdateStatus {
    /// Returns the status from both records. `live` is the live generation.
    pub(super) fn merge(fetch: FetchStatus, install: InstallStatus, live: Option<String>) -> Self {
        // A poll without news does not hide how the newest release ended.
        let sequence = install.release.as_ref().map(|release| release.generation.sequence);
        let is_newest = sequence.is_some() && sequence == fetch.newest;
        let has_ended = install.state == InstallState::Committed
            || install.state == InstallState::Failed && is_newest;
        // The later step counts. A fetch while the serving process has a release does not.
        let is_installers = install.state.has_release()
            || last_order(&install.history) > last_order(&fetch.history)
            || has_ended && fetch.state == FetchState::Idle;
        let state = if is_installers { install.state.shown() } else { fetch.state.shown() };
        // A failed poll is an error also while a release is applied or on probation. Otherwise
        // nobody would notice that a revocation of that release cannot arrive.
        let failed = fetch.error.clone().filter(|_| fetch.state == FetchState::Failed);
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
            skipped: fetch.skipped,
            error: error.filter(|_| is_waiting).or(failed),
            bytes_received: fetch.bytes_received,
            received: fetch.received,
            trials: install.trials,
            refused: install.refused.iter().map(|r| hex(&r.manifest)).collect(),
            history,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fetch_that_fails_is_told_beside_a_release_on_probation() {
        let fetch = FetchStatus {
            state: FetchState::Failed,
            error: Some("freeze".to_owned()),
            ..FetchStatus::default()
        };
        let install = InstallStatus {
            state: InstallState::Probation,
            release: Some(Release::default()),
            ..InstallStatus::default()
        };
        let status = UpdateStatus::merge(fetch.clone(), install.clone(), None);
        assert_eq!(
            (status.state, status.error.as_deref()),
            (UpdateState::Probation, Some("freeze"))
        );
        let fetch = FetchStatus { state: FetchState::Idle, ..fetch };
        assert_eq!(UpdateStatus::merge(fetch, install, None).error, None);
    }

    #[test]
    fn a_poll_without_news_does_not_hide_a_rejected_release() {
        let mut release = Release::default();
        release.generation.sequence = 2;
        let install = InstallStatus {
            state: InstallState::Failed,
            release: Some(release),
            error: Some("a probe score differs".to_owned()),
            ..InstallStatus::default()
        };
        // The publisher revokes the release, or lists a newer one.
        for (newest, state) in [(2, UpdateState::Failed), (1, UpdateState::Idle)] {
            let (at, note, release) = (0, None, None);
            let idle = UpdateEvent { order: 9, at, state: UpdateState::Idle, release, note };
            let history = vec![idle];
            let fetch = FetchStatus { newest: Some(newest), history, ..FetchStatus::default() };
            let status = UpdateStatus::merge(fetch, install.clone(), None);
            assert_eq!((status.state, status.error.is_some()), (state, newest == 2));
        }
    }
}
