//! The serving process's side of an update. It takes an offered release, installs it on flash,
//! probes it, makes it live, and observes it on probation. Then it commits the release or rolls it
//! back. Each call of `advance` takes one step, and an interrupted step is repeated from its start.
//! This side never opens a link, writes nothing in the sync directory, and verifies the release's
//! signature itself. A fault of the car never counts against a release.

use crate::bundle::manifest::Generation;
use crate::flash::Flash;
use crate::update::apply::Ended;
use crate::update::error::UpdateError;
use crate::update::fetch_status::FetchStatus;
use crate::update::history::last_order;
use crate::update::host::Host;
use crate::update::install_status::{Blame, InstallState, InstallStatus, Repair, Retry};
use crate::update::release::{Release, releases};
use crate::update::updater::Updater;
use crate::update::verdict::{Verdict, abandon};

impl Updater {
    /// Records the owner's consent. Returns whether a release waited for it.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be read or written.
    pub fn consent(&self, now: u64) -> Result<bool, UpdateError> {
        let _lock = self.lock_consent()?;
        let mut status = self.install_status()?;
        if status.state != InstallState::AwaitConsent {
            return Ok(false);
        }
        let (known, note) =
            (last_order(&self.fetch_status().history), "the owner consented".to_owned());
        status.enter(InstallState::Applying, now, known, Some(note));
        self.write_install(&mut status)?;
        Ok(true)
    }

    /// Takes one step. Returns whether the install entered another state.
    ///
    /// # Errors
    /// [`UpdateError`] if the step cannot be taken now. The release is not to blame, and the caller
    /// may retry.
    pub fn advance(&self, host: &Host<'_>, now: u64) -> Result<bool, UpdateError> {
        let _lock = self.lock_install()?;
        let (mut status, fetch) = (self.known_status()?, self.fetch_status());
        if status.version != self.program.version {
            status.begin_process(&self.program.version);
        }

        let verdict = self.step(&mut status, &fetch, host)?;
        if matches!(verdict, Verdict::Wait) {
            return Ok(false);
        }
        self.conclude(&mut status, &fetch, verdict, now)?;
        Ok(true)
    }

    /// Ends the current attempt because of a persistent fault of the car.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the record cannot be written.
    pub fn abandon(&self, reason: &str, now: u64) -> Result<(), UpdateError> {
        let _lock = self.lock_install()?;
        let (mut status, fetch) = (self.install_status()?, self.fetch_status());
        let verdict = match status.state {
            InstallState::Applying => abandon(reason),
            // It would stay live without a verdict, and its revocation would do nothing.
            InstallState::Probation => Verdict::Withdraw(reason.to_owned()),
            // A rollback is tried until it succeeds: nothing else takes a rejected release away.
            // Its record may lack room.
            InstallState::RollingBack => {
                return Flash::reclaim_in(&self.disk, &self.flash).map_err(UpdateError::from);
            }
            _ => return Ok(()),
        };
        self.conclude(&mut status, &fetch, verdict, now)
    }

    /// Does the work of the state that `status` is in.
    fn step(
        &self,
        status: &mut InstallStatus,
        fetch: &FetchStatus,
        host: &Host<'_>,
    ) -> Result<Verdict, UpdateError> {
        let in_hand = status.release.clone().filter(|_| status.state.is_active());
        let Some(release) = in_hand else { return Ok(take_offer(status, fetch, host)) };

        match status.state {
            InstallState::RollingBack => self.roll_back(status, &release),
            _ if self.is_revoked(&release, fetch, host) => {
                Ok(Verdict::Withdraw("the publisher revoked the release".to_owned()))
            }
            InstallState::Applying => match self.apply(status, &release, host) {
                Ok(verdict) | Err(Ended::Verdict(verdict)) => Ok(verdict),
                Err(Ended::Run(e)) => Err(e),
            },
            _ => self.watch(status, &release, host),
        }
    }

    /// Records `verdict`, and makes the changes that it implies.
    fn conclude(
        &self,
        status: &mut InstallStatus,
        fetch: &FetchStatus,
        verdict: Verdict,
        now: u64,
    ) -> Result<(), UpdateError> {
        let before = status.state;
        let (state, note) = match verdict {
            Verdict::Wait => return Ok(()),
            Verdict::Advance(state) => {
                if state == InstallState::Committed {
                    commit(status);
                }
                (state, None)
            }
            Verdict::Reject(reason) => {
                status.blame = Blame::Release;
                (InstallState::RollingBack, Some(reason))
            }
            Verdict::Unreadable(reason) => {
                status.blame = Blame::Version;
                let version = &status.version;
                let reason = format!("{reason}; version {version} does not try it again");
                (InstallState::RollingBack, Some(reason))
            }
            Verdict::Withdraw(reason) => {
                status.blame = Blame::Other;
                (InstallState::RollingBack, Some(reason))
            }
            Verdict::Abandon { reason, repair, retry } => {
                status.repair = status.repair.max(repair);
                // The next attempt, perhaps of another release, needs this one's space.
                if let Err(e) = Flash::reclaim_in(&self.disk, &self.flash) {
                    log::warn!("the space of the attempt is not free yet: {e}");
                }
                let retry = match retry {
                    Retry::WithRoom(missing) => {
                        Retry::WithRoom(self.free_bytes().saturating_add(missing))
                    }
                    retry => retry,
                };
                status.count_attempt(retry, now);
                (InstallState::Failed, Some(reason))
            }
        };

        let release = status.release.as_ref().map(|r| r.generation.to_string());
        let reason = note.as_deref().map_or(String::new(), |note| format!(": {note}"));
        status.enter(state, now, last_order(&fetch.history), note);
        self.write_install(status)?;
        let (before, state) = (before.shown(), state.shown());
        log::info!("{}: {before} -> {state}{reason}", release.unwrap_or_default());
        Ok(())
    }

    /// Returns whether the signed targets no longer list `release` for this car. The sync process's
    /// record only decides whether this function reads the targets.
    fn is_revoked(&self, release: &Release, fetch: &FetchStatus, host: &Host<'_>) -> bool {
        if fetch.revoked != Some(release.manifest) {
            return false;
        }
        match self.verify_targets(host.root) {
            Ok(targets) => !is_listed(&releases(&targets, &self.program), release, fetch.cohort),
            Err(e) => {
                log::warn!("{}: its revocation is not verified: {e}", release.generation);
                false
            }
        }
    }
}

/// Takes the offer in `fetch` if it is new, or drops a release that waits for consent and is no
/// longer offered.
fn take_offer(status: &mut InstallStatus, fetch: &FetchStatus, host: &Host<'_>) -> Verdict {
    let is_waiting = status.state == InstallState::AwaitConsent;
    match &fetch.offer {
        // A lineage of any length would make the record too long.
        Some(offer) if offer.number != status.offer && offer.release.generation.check().is_ok() => {
            status.take_up(offer);
            if status.is_refused(&offer.release) {
                return abandon("the release was rejected before");
            }
            // The owner has consented to what this car rebuilds.
            let (committed, offered) = (&status.committed, &offer.release.generation);
            let is_known = |newest: &Generation| {
                newest.lineage == offered.lineage && newest.sequence >= offered.sequence
            };
            let consent = host.policy.consent && !committed.as_ref().is_some_and(is_known);
            Verdict::Advance(if consent {
                InstallState::AwaitConsent
            } else {
                InstallState::Applying
            })
        }
        // With `writes` 0 the record is lost or new, and does not show that the offer ended.
        None if is_waiting && fetch.writes > 0 => Verdict::Advance(InstallState::Idle),
        _ => Verdict::Wait,
    }
}

/// Records that the current release passed its probation.
fn commit(status: &mut InstallStatus) {
    status.end_trial();
    status.attempted.clear();
    let Some(release) = &status.release else { return };
    if release.parent.is_none() {
        status.repair = Repair::None;
    }
    // A step of a rebuild is older than what this car has committed.
    let is_older = |newest: &Generation| {
        newest.lineage == release.generation.lineage
            && newest.sequence > release.generation.sequence
    };
    if !status.committed.as_ref().is_some_and(is_older) {
        status.committed = Some(release.generation.clone());
    }
}

/// Returns whether `listed` has `release` for cars with `cohort`.
fn is_listed(listed: &[Release], release: &Release, cohort: u8) -> bool {
    listed.iter().any(|r| r.manifest == release.manifest && cohort < r.share)
}
