//! The side of a sync that serves: a staged release is laid on flash, probed, made live, watched,
//! and committed or taken back. One step a call, each entered again after a stop as if for the
//! first time. Opens no link, and proves for itself that a release was signed.

use crate::bundle::{BundleError, BundleReader};
use crate::flash::segment::SegmentError;
use crate::flash::{Flash, FlashError};
use crate::limits::STARTS_MAX;
use crate::model::budget::Budget;
use crate::update::Updater;
use crate::update::error::UpdateError;
use crate::update::probe::{ProbeFault, Probed, probe};
use crate::update::release::{Release, releases};
use crate::update::staging::Staging;
use crate::update::state::{UpdateState, UpdateStatus};
use crate::update::trust::Trust;
use serde::Deserialize;
use std::io::ErrorKind::NotFound;

/// What a release must show before it counts as good.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// The owner is asked before a release is made live.
    pub consent: bool,
    /// Probe samples with recorded scores that a release must bring.
    pub probe_samples_min: u32,
    /// By how much a probe score may differ from the recorded one.
    pub probe_difference_max: f32,
    /// Requests that a new generation serves on probation.
    pub requests_min: u64,
    /// Of these, requests that may fail and pages that may be found damaged.
    pub faults_max: u64,
    /// The 99th percentile of their latency, µs; 0 for no limit.
    pub latency_us_p99_max: u64,
    /// Share of the time that applying it may take while requests are served, per cent.
    pub busy_percent_max: u64,
}

impl Default for Policy {
    /// A desk: nothing is asked for but that what there is to probe is right.
    fn default() -> Self {
        Self {
            consent: false,
            probe_samples_min: 0,
            probe_difference_max: 0.05,
            requests_min: 0,
            faults_max: 0,
            latency_us_p99_max: 0,
            busy_percent_max: 100,
        }
    }
}

/// What was seen of the live generation since it is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watched {
    /// Requests served.
    pub requests: u64,
    /// Requests that failed, and pages that were found damaged.
    pub faults: u64,
    /// The 99th percentile of their latency, µs.
    pub latency_us_p99: u64,
}

/// What the process around an update brings to it.
#[derive(Clone, Copy)]
pub struct Host<'a> {
    /// What a release must show.
    pub policy: Policy,
    /// What a probe may take.
    pub budget: Budget,
    /// What was seen of the live generation; `None` where this process serves nobody: the probe
    /// then decides alone.
    pub watched: Option<Watched>,
    /// The fleet's first root, from elsewhere than the sync directory, which another process
    /// writes; `None` to take the one there.
    pub root: Option<&'a [u8]>,
    /// Called between small pieces of work: requests are served beside it (`pace::rests`).
    pub rest: &'a dyn Fn(),
}

/// How a step ended.
enum Verdict {
    /// On to this state.
    Next(UpdateState),
    /// It goes on waiting.
    Wait,
    /// The release is not to be used, and why.
    Bad(String),
    /// This attempt is over, and why; the release may be tried again.
    Over(String),
}

impl Updater {
    /// To be called once when a process begins, before it opens what is live: a release with which
    /// it has begun too often without an end is taken back.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn begin(&self, now: u64) -> Result<(), UpdateError> {
        let is_tried = |status: &UpdateStatus| {
            matches!(status.state, UpdateState::Applying | UpdateState::Probation)
        };
        if !is_tried(&self.status()?) {
            return Ok(());
        }
        self.change(|status| {
            status.starts += u32::from(is_tried(status));
            if is_tried(status) && status.starts > STARTS_MAX {
                let why = format!("{} starts with it did not end", status.starts - 1);
                status.enter(UpdateState::RollingBack, now, Some(why));
            }
            Ok(())
        })
    }

    /// To be called when a process ends in good order: that was no sign against the release.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn end(&self) -> Result<(), UpdateError> {
        if self.status()?.starts == 0 {
            return Ok(());
        }
        self.change(|status| {
            status.starts = 0;
            Ok(())
        })
    }

    /// The owner agrees. Returns whether there was something to agree to.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn consent(&self, now: u64) -> Result<bool, UpdateError> {
        self.change(|status| {
            let asked = status.state == UpdateState::AwaitConsent;
            if asked {
                status.enter(UpdateState::Applying, now, Some("the owner agreed".to_owned()));
            }
            Ok(asked)
        })
    }

    /// Takes one step, if this side has the update in hand. Returns whether another state was
    /// entered.
    ///
    /// # Errors
    /// The step could not be taken now, through no fault of the release; it can be tried again.
    pub fn advance(&self, host: &Host<'_>, now: u64) -> Result<bool, UpdateError> {
        if self.status()?.state.is_fetching() {
            return Ok(false);
        }
        let _lock = self.lock()?;
        let mut status = self.status()?;
        let Some(release) = status.release.clone() else { return Ok(false) };
        let place = self.directory.join("staged");
        let staging = Staging::open(self.disk.as_ref(), &place)?;
        let verdict = match status.state {
            UpdateState::Staged if host.policy.consent => Verdict::Next(UpdateState::AwaitConsent),
            UpdateState::Staged => Verdict::Next(UpdateState::Applying),
            UpdateState::AwaitConsent => Verdict::Wait,
            UpdateState::Applying => self.apply(&staging, &release, host)?,
            UpdateState::Probation => self.watch(&release, host)?,
            UpdateState::RollingBack => {
                let why = status.error.clone().unwrap_or_default();
                self.go_back(&staging, &release, &why)?
            }
            _ => return Ok(false),
        };
        let before = status.state;
        match verdict {
            Verdict::Wait => return Ok(false),
            Verdict::Next(state) => {
                if state == UpdateState::Committed {
                    (status.starts, status.withdrawn) = (0, false);
                    staging.drop_bundle(&release)?;
                }
                self.settle(&mut status, state, now, None)?;
            }
            Verdict::Over(why) => {
                // The next attempt, of another release too, finds the room that this one took.
                Flash::reclaim_in(&self.disk, &self.flash)?;
                self.settle(&mut status, UpdateState::Failed, now, Some(why))?;
            }
            Verdict::Bad(why) => {
                self.settle(&mut status, UpdateState::RollingBack, now, Some(why))?
            }
        }
        log::info!("{}: {before} -> {}", release.generation, status.state);
        Ok(true)
    }

    fn settle(
        &self,
        status: &mut UpdateStatus,
        state: UpdateState,
        now: u64,
        note: Option<String>,
    ) -> Result<(), UpdateError> {
        status.live = self.live()?.map(|g| g.to_string());
        status.enter(state, now, note);
        self.write(status)
    }

    fn apply(
        &self,
        staging: &Staging<'_>,
        release: &Release,
        host: &Host<'_>,
    ) -> Result<Verdict, UpdateError> {
        if self.is_live(release)? {
            return Ok(Verdict::Next(UpdateState::Probation));
        }
        let signed = releases(&Trust::kept(&self.disk, &self.directory, host.root)?)?;
        if !signed
            .iter()
            .any(|r| (r.manifest, &r.generation) == (release.manifest, &release.generation))
        {
            return Ok(Verdict::Over("it is not among what was signed".to_owned()));
        }
        let opened = BundleReader::open_on(self.disk.as_ref(), &staging.bundle(release))
            .map_err(FlashError::from);
        let prepared = opened.and_then(|mut bundle| {
            if crate::bundle::manifest::sha256(bundle.manifest_bytes()) != release.manifest {
                return Ok(None);
            }
            Flash::prepare(&self.disk, &self.flash, &mut bundle, |_| (host.rest)()).map(Some)
        });
        let prepared = match prepared {
            Ok(Some(prepared)) => prepared,
            Ok(None) => {
                return self.damaged(staging, release, "its manifest is not the signed one");
            }
            Err(FlashError::Bundle(BundleError::Io { source, .. }))
                if source.kind() == NotFound =>
            {
                return Ok(Verdict::Over("its bundle is gone".to_owned()));
            }
            Err(
                e @ (FlashError::NotNewer { .. }
                | FlashError::Parent { .. }
                | FlashError::Full { .. }),
            ) => {
                return Ok(Verdict::Over(e.to_string()));
            }
            Err(e) if !blames_bundle(&e) => return Err(e.into()),
            Err(e) if staging.is_sound(release) => return Ok(Verdict::Bad(e.to_string())),
            Err(e) => return self.damaged(staging, release, &e.to_string()),
        };
        match judge(probe(prepared.flash(), host.budget, host.rest), &host.policy)? {
            Some(why) => Ok(Verdict::Bad(why)),
            None => {
                prepared.commit()?;
                Ok(Verdict::Next(UpdateState::Probation))
            }
        }
    }

    /// What lies here is not what was fetched: it is fetched again.
    fn damaged(
        &self,
        staging: &Staging<'_>,
        release: &Release,
        why: &str,
    ) -> Result<Verdict, UpdateError> {
        staging.drop_bundle(release)?;
        Ok(Verdict::Over(why.to_owned()))
    }

    fn watch(&self, release: &Release, host: &Host<'_>) -> Result<Verdict, UpdateError> {
        if !self.is_live(release)? {
            return Ok(Verdict::Over("another generation was made live meanwhile".to_owned()));
        }
        let policy = &host.policy;
        if let Some(seen) = host.watched {
            if seen.faults > policy.faults_max {
                let (faults, requests) = (seen.faults, seen.requests);
                return Ok(Verdict::Bad(format!("{faults} faults in {requests} requests")));
            }
            if seen.requests < policy.requests_min {
                return Ok(Verdict::Wait);
            }
            let max = policy.latency_us_p99_max;
            if max > 0 && seen.latency_us_p99 > max {
                let p99 = seen.latency_us_p99;
                return Ok(Verdict::Bad(format!("p99 of {p99} µs, over {max} µs")));
            }
        }
        let flash = Flash::open(&self.disk, &self.flash)?;
        Ok(match judge(probe(&flash, host.budget, host.rest), policy)? {
            Some(why) => Verdict::Bad(why),
            None => Verdict::Next(UpdateState::Committed),
        })
    }

    /// The mark first: what is rolled back must not come again, wherever this stops.
    fn go_back(
        &self,
        staging: &Staging<'_>,
        release: &Release,
        why: &str,
    ) -> Result<Verdict, UpdateError> {
        staging.refuse(release, why)?;
        staging.drop_bundle(release)?;
        if !self.is_live(release)? {
            return Ok(Verdict::Over(why.to_owned()));
        }
        let flash = Flash::open(&self.disk, &self.flash)?;
        if flash.record().previous.is_none() {
            return Ok(Verdict::Over(format!("{why}; there is no generation to go back to")));
        }
        flash.rollback()?;
        Ok(Verdict::Over(why.to_owned()))
    }
}

/// Why the policy refuses what the probe found; `None` if it does not.
fn judge(
    probed: Result<Probed, ProbeFault>,
    policy: &Policy,
) -> Result<Option<String>, UpdateError> {
    let probed = match probed {
        Ok(probed) => probed,
        Err(ProbeFault::Generation(why)) => return Ok(Some(why)),
        Err(ProbeFault::Device(e)) => return Err(e.into()),
    };
    if probed.samples < policy.probe_samples_min {
        let (found, wanted) = (probed.samples, policy.probe_samples_min);
        return Ok(Some(format!("it brings {found} probe scores, {wanted} are asked for")));
    }
    let (difference, max) = (probed.difference, policy.probe_difference_max);
    Ok((difference > max).then(|| format!("a probe score differs by {difference}, over {max}")))
}

fn blames_bundle(error: &FlashError) -> bool {
    match error {
        FlashError::Bundle(e) => !matches!(e, BundleError::Io { .. }),
        FlashError::Segment(e) => !matches!(e, SegmentError::Io { .. }),
        e => matches!(
            e,
            FlashError::Dense { .. }
                | FlashError::Probe { .. }
                | FlashError::Schema { .. }
                | FlashError::Lineage { .. }
        ),
    }
}
