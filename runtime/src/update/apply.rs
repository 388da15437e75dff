//! The serving process's side of an update: it installs a staged release on flash, probes it, makes
//! it live, observes it on probation, and commits it or rolls it back. Each call of `advance` takes
//! one step, and a step that was interrupted is taken again from its start. This side never opens a
//! link, and it verifies the release's signature itself.

use crate::bundle::manifest::sha256;
use crate::bundle::{BundleError, BundleReader};
use crate::flash::segment::SegmentError;
use crate::flash::{Flash, FlashError};
use crate::limits::STARTS_MAX;
use crate::maintenance::share::BusyBounds;
use crate::model::budget::Budget;
use crate::update::error::UpdateError;
use crate::update::probe::{ProbeFault, Probed, probe};
use crate::update::release::{Release, releases};
use crate::update::staging::Staging;
use crate::update::state::{UpdateState, UpdateStatus};
use crate::update::trust::Trust;
use crate::update::updater::Updater;
use serde::Deserialize;
use std::io::ErrorKind::NotFound;

/// What a release must show before it is committed.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// The owner must consent before a release becomes live.
    pub consent: bool,
    /// Probe samples with recorded scores that a release must have.
    pub probe_samples_min: u32,
    /// Largest allowed difference between a probe score and its recorded score.
    pub probe_difference_max: f32,
    /// Requests that a new generation serves on probation.
    pub requests_min: u64,
    /// Failed requests and damaged pages that are allowed on probation.
    pub faults_max: u64,
    /// 99th percentile of the latency that is allowed on probation, µs; 0 for no limit.
    pub latency_us_p99_max: u64,
    /// Share of the time that applying a release gets while requests are served, per cent.
    pub busy_percent_min: u64,
    /// Share of the time that applying a release may take while requests are served, per cent.
    pub busy_percent_max: u64,
}

impl Policy {
    /// Returns the share of the time that applying a release works.
    pub fn busy(&self) -> BusyBounds {
        BusyBounds { percent_min: self.busy_percent_min, percent_max: self.busy_percent_max }
    }
}

impl Default for Policy {
    /// Returns the policy of a desk: the probe scores that a release has must be right.
    fn default() -> Self {
        Self {
            consent: false,
            probe_samples_min: 0,
            probe_difference_max: 0.05,
            requests_min: 0,
            faults_max: 0,
            latency_us_p99_max: 0,
            busy_percent_min: 5,
            busy_percent_max: 100,
        }
    }
}

/// What the serving process observed of the live generation since it serves it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watched {
    /// Requests served.
    pub requests: u64,
    /// Failed requests and damaged pages.
    pub faults: u64,
    /// 99th percentile of the latency, µs.
    pub latency_us_p99: u64,
}

/// What the process that applies updates supplies.
#[derive(Clone, Copy)]
pub struct Host<'a> {
    /// What a release must show.
    pub policy: Policy,
    /// What a probe may use.
    pub budget: Budget,
    /// What was observed of the live generation; `None` if this process serves no requests. The
    /// probe alone then decides.
    pub watched: Option<Watched>,
    /// The fleet's first root, from a place that the sync process cannot write; `None` for the root
    /// in the sync directory.
    pub root: Option<&'a [u8]>,
    /// Called between small pieces of work, so that requests can run (`maintenance::background`).
    pub yield_now: &'a dyn Fn(),
}

/// How a step ended.
enum Verdict {
    /// The update enters this state.
    Advance(UpdateState),
    /// The state stays: it needs consent or more requests.
    Wait,
    /// The release is wrong, and why. It is rolled back, marked and never installed again.
    Reject(String),
    /// This attempt ended, and why. The release may be tried again.
    Abandon(String),
}

impl Updater {
    /// Counts a start of the serving process. The process calls this once, before it opens the live
    /// generation. A release whose starts ended abnormally too often is rolled back.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the status record cannot be read or written.
    pub fn record_start(&self, now: u64) -> Result<(), UpdateError> {
        let is_tried = |status: &UpdateStatus| {
            matches!(status.state, UpdateState::Applying | UpdateState::Probation)
        };
        if !is_tried(&self.status()?) {
            return Ok(());
        }

        self.change(|status| {
            if !is_tried(status) {
                return Ok(());
            }
            status.starts = status.starts.saturating_add(1);
            if status.starts > STARTS_MAX {
                let ended = status.starts - 1;
                let reason = format!("{ended} process starts with this release ended abnormally");
                status.enter(UpdateState::RollingBack, now, Some(reason));
            }
            Ok(())
        })
    }

    /// Resets the count of starts. The serving process calls this when it ends cleanly.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the status record cannot be read or written.
    pub fn record_clean_exit(&self) -> Result<(), UpdateError> {
        if self.status()?.starts == 0 {
            return Ok(());
        }
        self.change(|status| {
            status.starts = 0;
            Ok(())
        })
    }

    /// Records the owner's consent. Returns whether a release waited for it.
    ///
    /// # Errors
    /// `UpdateError::{Io, Busy}` if the status record cannot be read or written.
    pub fn consent(&self, now: u64) -> Result<bool, UpdateError> {
        self.change(|status| {
            let waits = status.state == UpdateState::AwaitConsent;
            if waits {
                let note = "the owner consented".to_owned();
                status.enter(UpdateState::Applying, now, Some(note));
            }
            Ok(waits)
        })
    }

    /// Takes one step if the serving process has the update in hand. Returns whether the update
    /// entered another state.
    ///
    /// # Errors
    /// Why the step could not be taken now. The release is not to blame, and the caller may retry.
    pub fn advance(&self, host: &Host<'_>, now: u64) -> Result<bool, UpdateError> {
        if self.status()?.state.is_fetching() {
            return Ok(false);
        }

        let _lock = self.lock_status()?;
        let mut status = self.status()?;
        let Some(release) = status.release.clone() else { return Ok(false) };
        let directory = self.directory.join("staged");
        let staging = Staging::open(self.disk.as_ref(), &directory)?;
        let before = status.state;

        let verdict = self.step(&status, &staging, &release, host)?;
        let (state, note) = match verdict {
            Verdict::Wait => return Ok(false),
            Verdict::Advance(state) => {
                if state == UpdateState::Committed {
                    (status.starts, status.withdrawn) = (0, false);
                    staging.drop_bundle(&release)?;
                }
                (state, None)
            }
            Verdict::Abandon(reason) => {
                // The next attempt, also of another release, gets this one's space.
                Flash::reclaim_in(&self.disk, &self.flash)?;
                (UpdateState::Failed, Some(reason))
            }
            Verdict::Reject(reason) => (UpdateState::RollingBack, Some(reason)),
        };

        self.record_state(&mut status, state, now, note)?;
        log::info!("{}: {before} -> {state}", release.generation);
        Ok(true)
    }

    /// Does the work of the state that `status` is in.
    fn step(
        &self,
        status: &UpdateStatus,
        staging: &Staging<'_>,
        release: &Release,
        host: &Host<'_>,
    ) -> Result<Verdict, UpdateError> {
        match status.state {
            UpdateState::Staged if host.policy.consent => {
                Ok(Verdict::Advance(UpdateState::AwaitConsent))
            }
            UpdateState::Staged => Ok(Verdict::Advance(UpdateState::Applying)),
            UpdateState::Applying => self.apply(staging, release, host),
            UpdateState::Probation => self.watch(release, host),
            UpdateState::RollingBack => {
                self.roll_back(staging, release, status.error.as_deref().unwrap_or_default())
            }
            // `AwaitConsent`, and the states of the fetching process.
            _ => Ok(Verdict::Wait),
        }
    }

    /// Enters `state` in `status` and writes it, with the generation that is live now.
    fn record_state(
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

    /// Installs the staged bundle, probes the new generation and makes it live.
    fn apply(
        &self,
        staging: &Staging<'_>,
        release: &Release,
        host: &Host<'_>,
    ) -> Result<Verdict, UpdateError> {
        if self.is_live(release)? {
            return Ok(Verdict::Advance(UpdateState::Probation));
        }

        let targets = Trust::verify_cached_targets(&self.disk, &self.directory, host.root)?;
        let is_signed = releases(&targets)?
            .iter()
            .any(|r| (r.manifest, &r.generation) == (release.manifest, &release.generation));
        if !is_signed {
            let reason = "the release is not listed in the signed targets";
            return Ok(Verdict::Abandon(reason.to_owned()));
        }

        let bundle = staging.bundle(release);
        let opened = BundleReader::open_on(self.disk.as_ref(), &bundle).map_err(FlashError::from);
        let prepared = opened.and_then(|mut bundle| {
            if sha256(bundle.manifest_bytes()) != release.manifest {
                return Ok(None);
            }
            Flash::prepare(&self.disk, &self.flash, &mut bundle, |_| (host.yield_now)()).map(Some)
        });
        let prepared = match prepared {
            Ok(Some(prepared)) => prepared,
            Ok(None) => {
                return drop_damaged(staging, release, "its manifest is not the signed one");
            }
            Err(e) => return refuse_bundle(staging, release, e),
        };

        let probed = probe(prepared.flash(), host.budget, host.yield_now);
        if let Some(reason) = judge_probe(probed, &host.policy)? {
            return Ok(Verdict::Reject(reason));
        }
        prepared.commit()?;
        Ok(Verdict::Advance(UpdateState::Probation))
    }

    /// Judges the live release by its requests, and at the end by its probe set.
    fn watch(&self, release: &Release, host: &Host<'_>) -> Result<Verdict, UpdateError> {
        if !self.is_live(release)? {
            let reason = "another generation became live during probation";
            return Ok(Verdict::Abandon(reason.to_owned()));
        }
        if let Some(watched) = host.watched
            && let Some(verdict) = judge_requests(watched, &host.policy)
        {
            return Ok(verdict);
        }

        let flash = Flash::open(&self.disk, &self.flash)?;
        let probed = probe(&flash, host.budget, host.yield_now);
        Ok(match judge_probe(probed, &host.policy)? {
            Some(reason) => Verdict::Reject(reason),
            None => Verdict::Advance(UpdateState::Committed),
        })
    }

    /// Makes the previous generation live again. Marks the release first: wherever this stops, the
    /// release is not fetched again.
    fn roll_back(
        &self,
        staging: &Staging<'_>,
        release: &Release,
        reason: &str,
    ) -> Result<Verdict, UpdateError> {
        staging.refuse(release, reason)?;
        staging.drop_bundle(release)?;
        if !self.is_live(release)? {
            return Ok(Verdict::Abandon(reason.to_owned()));
        }

        let flash = Flash::open(&self.disk, &self.flash)?;
        if flash.record().previous.is_none() {
            let reason = format!("{reason}; no previous generation exists, so it stays live");
            return Ok(Verdict::Abandon(reason));
        }
        flash.rollback()?;
        Ok(Verdict::Abandon(reason.to_owned()))
    }
}

/// Decides what becomes of `release`, whose bundle could not be installed.
fn refuse_bundle(
    staging: &Staging<'_>,
    release: &Release,
    error: FlashError,
) -> Result<Verdict, UpdateError> {
    match error {
        FlashError::Bundle(BundleError::Io { source, .. }) if source.kind() == NotFound => {
            let bundle = staging.bundle(release);
            let bundle = bundle.display();
            Ok(Verdict::Abandon(format!(
                "staged bundle {bundle} is missing; the next fetch downloads it again"
            )))
        }
        e @ (FlashError::NotNewer { .. } | FlashError::Parent { .. } | FlashError::Full { .. }) => {
            Ok(Verdict::Abandon(e.to_string()))
        }
        e if !blames_bundle(&e) => Err(e.into()),
        e if staging.is_sound(release) => Ok(Verdict::Reject(e.to_string())),
        e => drop_damaged(staging, release, &e.to_string()),
    }
}

/// Removes a staged bundle that is not what was fetched. The next fetch downloads it again.
fn drop_damaged(
    staging: &Staging<'_>,
    release: &Release,
    problem: &str,
) -> Result<Verdict, UpdateError> {
    staging.drop_bundle(release)?;
    let bundle = staging.bundle(release);
    Ok(Verdict::Abandon(format!(
        "staged bundle {} is damaged ({problem}); the next fetch downloads it again",
        bundle.display()
    )))
}

/// Returns the verdict on the requests of a probation, or `None` if the probe set decides.
fn judge_requests(watched: Watched, policy: &Policy) -> Option<Verdict> {
    let Watched { requests, faults, latency_us_p99 } = watched;
    let Policy { faults_max, latency_us_p99_max, .. } = *policy;
    if faults > faults_max {
        return Some(Verdict::Reject(format!(
            "{faults} faults in {requests} requests on probation; the policy allows {faults_max}"
        )));
    }
    if requests < policy.requests_min {
        return Some(Verdict::Wait);
    }
    if latency_us_p99_max > 0 && latency_us_p99 > latency_us_p99_max {
        return Some(Verdict::Reject(format!(
            "p99 latency of {latency_us_p99} µs on probation; the policy allows \
             {latency_us_p99_max} µs"
        )));
    }
    None
}

/// Returns why the policy rejects the result of a probe, or `None` if the policy accepts it.
fn judge_probe(
    probed: Result<Probed, ProbeFault>,
    policy: &Policy,
) -> Result<Option<String>, UpdateError> {
    let Probed { samples, difference } = match probed {
        Ok(probed) => probed,
        Err(ProbeFault::Generation(problem)) => return Ok(Some(problem)),
        Err(ProbeFault::Device(e)) => return Err(e.into()),
    };
    let Policy { probe_samples_min, probe_difference_max, .. } = *policy;
    if samples < probe_samples_min {
        return Ok(Some(format!(
            "the bundle has {samples} probe samples with a score; the policy requires \
             {probe_samples_min}"
        )));
    }
    Ok((difference > probe_difference_max).then(|| {
        format!(
            "a probe score differs by {difference} from the recorded one; the policy allows \
             {probe_difference_max}"
        )
    }))
}

/// Returns whether `error` is the fault of the bundle and not of the car's device or state.
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
