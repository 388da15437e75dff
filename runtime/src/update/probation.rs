//! The second half of an update: the probation of the live release, and the way back to the
//! generation before it.

use crate::flash::Flash;
use crate::update::error::UpdateError;
use crate::update::host::{Cause, Host, Unservable};
use crate::update::install_status::{Blame, InstallState, InstallStatus, Repair};
use crate::update::probe::{ProbeFault, probe};
use crate::update::release::Release;
use crate::update::updater::Updater;
use crate::update::verdict::{Verdict, abandon, abandon_for, judge_probe, judge_requests};

/// Writes of the record, at most, for the requests of a probation.
const WATCHED_WRITES: u64 = 16;

impl Updater {
    /// Judges the live release by its requests, and at the end by its probe set.
    pub(super) fn watch(
        &self,
        status: &mut InstallStatus,
        release: &Release,
        host: &Host<'_>,
    ) -> Result<Verdict, UpdateError> {
        let Some(flash) = self.live()? else {
            return self.give_up_damaged("it cannot be opened");
        };
        if flash.record().live.manifest != release.manifest {
            return Ok(abandon("another generation became live during probation"));
        }
        if !flash.record().may_serve() {
            // Nothing serves a step of a rebuild, so no request can end its probation.
            return Ok(Verdict::Advance(InstallState::Committed));
        }
        let unservable = host.unservable.filter(|u| u.id == flash.record().id());
        if let Some(Unservable { reason, cause, .. }) = unservable {
            let reason = format!("it could not be served: {reason}");
            return match cause {
                Cause::Release => Ok(Verdict::Unreadable(reason)),
                Cause::Flash => self.give_up_damaged(&reason),
                Cause::Car => Ok(Verdict::Withdraw(reason)),
            };
        }
        let stored = status.watched;
        if let Some(watched) = host.watched
            && let Some(verdict) = judge_requests(status.observe(watched), &host.policy)
        {
            // A car with short drives may never serve so many requests in one of them. The flash
            // takes few writes of this.
            let new = status.watched.requests.saturating_sub(stored.requests);
            if matches!(verdict, Verdict::Wait) && new > host.policy.requests_min / WATCHED_WRITES {
                self.write_install(status)?;
            }
            return Ok(verdict);
        }

        // A merge must not remove segments while the probe opens them.
        let _lock = flash.lock()?;
        match probe(&Flash::open(&self.disk, &self.flash)?, host.budget, host.yield_now) {
            Err(ProbeFault::Release(problem)) => Ok(Verdict::Reject(problem)),
            Err(ProbeFault::Version(problem)) => Ok(Verdict::Unreadable(problem)),
            Err(ProbeFault::Car { problem, is_damage: true }) => self.give_up_damaged(&problem),
            Err(ProbeFault::Car { problem, .. }) => Err(UpdateError::Car { problem }),
            Ok(probed) => {
                if probed.damaged > 0 {
                    status.repair = status.repair.max(Repair::NewerSnapshot);
                }
                Ok(match judge_probe(probed, &host.policy) {
                    Some(reason) => Verdict::Reject(reason),
                    None => Verdict::Advance(InstallState::Committed),
                })
            }
        }
    }

    /// Returns the verdict on a release whose files on flash are damaged, as `problem` says. If the
    /// next start could not serve it, but the generation before, the car waits for no snapshot.
    fn give_up_damaged(&self, problem: &str) -> Result<Verdict, UpdateError> {
        let is_servable = self.live()?.map_or(Ok(false), |live| live.is_servable())?;
        let leads_back = !is_servable && Flash::has_servable_previous(&self.disk, &self.flash)?;
        let reason = format!("its files on flash are damaged: {problem}");
        Ok(if leads_back {
            Verdict::Withdraw(reason)
        } else {
            abandon_for(reason, Repair::AnySnapshot)
        })
    }

    /// Makes the previous generation live again. If the release is to blame, that is recorded
    /// first. Even if the rollback is then interrupted, the release is not installed again.
    pub(super) fn roll_back(
        &self,
        status: &mut InstallStatus,
        release: &Release,
    ) -> Result<Verdict, UpdateError> {
        let reason = status.error.clone().unwrap_or_default();
        if status.blame != Blame::Other && !status.is_refused(release) {
            status.refuse(release, status.blame == Blame::Version);
            self.write_install(status)?;
        }

        // The record alone: the manifest of the live generation may be damaged.
        let record = Flash::last_record(self.disk.as_ref(), &self.flash)?;
        let Some(record) = record.filter(|record| record.live.manifest == release.manifest) else {
            return Ok(abandon(reason));
        };
        if record.previous.is_none() {
            let reason = format!("{reason}; no previous generation exists, so it stays live");
            return Ok(abandon(reason));
        }
        Flash::rollback_in(&self.disk, &self.flash)?;
        if status.repair == Repair::AnySnapshot {
            // It was the release that could not be opened.
            status.repair = Repair::NewerSnapshot;
        }
        Ok(abandon(reason))
    }
}
