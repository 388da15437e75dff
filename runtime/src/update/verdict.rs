//! The verdicts on a release: whose fault ended a step, and what the policy says of a probe and of
//! the requests on probation. Changes nothing on flash.

use crate::bundle::BundleError;
use crate::flash::FlashError;
use crate::flash::segment::SegmentError;
use crate::maintenance::share::BusyBounds;
use crate::update::install_status::{InstallState, Repair, Retry, Watched};
use crate::update::probe::{ProbeFault, Probed};
use crate::update::release::Release;
use serde::Deserialize;

/// The conditions that a release must meet before it is committed.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// The owner must consent before a release becomes live.
    pub consent: bool,
    /// Probe samples with recorded scores that a release must have.
    pub probe_samples_min: u32,
    /// Largest allowed difference between a probe score and its recorded score.
    pub probe_difference_max: f32,
    /// Requests that a new generation serves on probation, over all runs of the process.
    pub requests_min: u64,
    /// Failed requests that are allowed on probation.
    pub faults_max: u64,
    /// 99th percentile of the latency that is allowed on probation, µs; 0 for no limit.
    pub latency_us_p99_max: u64,
    /// Share of the time that applying a release gets while requests are served, per cent.
    pub busy_percent_min: u64,
    /// Share of the time that applying a release may take while requests are served, per cent.
    pub busy_percent_max: u64,
}

impl Policy {
    /// Returns the least and the most share of the time that applying a release takes.
    pub fn busy(&self) -> BusyBounds {
        BusyBounds { percent_min: self.busy_percent_min, percent_max: self.busy_percent_max }
    }
}

impl Default for Policy {
    /// Returns the policy of a desk: a release needs no probe set, but the recorded scores that it
    /// has must be reproduced.
    fn default() -> Self {
        Self {
            consent: false,
            probe_samples_min: 0,
            probe_difference_max: 0.05,
            requests_min: 0,
            faults_max: 0,
            latency_us_p99_max: 0,
            busy_percent_min: 25,
            busy_percent_max: 100,
        }
    }
}

/// How a step ended.
pub(super) enum Verdict {
    /// The install enters this state.
    Advance(InstallState),
    /// The state stays: it needs an offer, consent or more requests.
    Wait,
    /// The release is wrong, for this reason. It is rolled back and never installed again.
    Reject(String),
    /// This version of the program cannot read the release. It is rolled back, and another version
    /// of the program may install it.
    Unreadable(String),
    /// The publisher revoked the release, or the car failed: its memory, its GPU, its flash or its
    /// steps. The release is rolled back and may be installed later.
    Withdraw(String),
    /// This attempt ended through a fault that is not the release's. The release may be tried
    /// again.
    Abandon { reason: String, repair: Repair, retry: Retry },
}

pub(super) fn abandon(reason: impl Into<String>) -> Verdict {
    abandon_for(reason, Repair::None)
}

pub(super) fn abandon_for(reason: impl Into<String>, repair: Repair) -> Verdict {
    Verdict::Abandon { reason: reason.into(), repair, retry: Retry::AtStart }
}

/// Judges the probe of a release that is not live yet; `repair` is what the car needs already.
pub(super) fn judge_trial(
    probed: Result<Probed, ProbeFault>,
    release: &Release,
    repair: Repair,
    policy: &Policy,
) -> Result<(), Verdict> {
    let is_delta = release.parent.is_some();
    let probed = probed.map_err(|fault| match fault {
        ProbeFault::Release(problem) => Verdict::Reject(problem),
        ProbeFault::Version(problem) => Verdict::Unreadable(problem),
        ProbeFault::Car { problem, is_damage } => {
            // The files of its base do not open. A snapshot replaces them if that is true of the
            // live generation too.
            let is_base = is_damage && is_delta;
            abandon_for(problem, if is_base { Repair::AnySnapshot } else { Repair::None })
        }
    })?;

    // A delta keeps the damaged rows of its base, and a snapshot replaces them. So a delta gives
    // way to a snapshot, but only once: without a newer snapshot the car would never update again.
    if probed.damaged > 0 && is_delta && (repair == Repair::None || probed.is_unproven()) {
        let damaged = probed.damaged;
        let reason = format!(
            "{damaged} probe samples use damaged rows of the generation before; a snapshot is \
             taken instead if there is one"
        );
        // An unproven release must not pass, and no delta on these rows can ever be proven. An
        // older snapshot and the deltas after it lead past them.
        let is_stuck = probed.is_unproven();
        let repair = if is_stuck { Repair::Replacement } else { Repair::NewerSnapshot };
        return Err(abandon_for(reason, repair));
    }
    judge_probe(probed, policy).map_or(Ok(()), |reason| Err(Verdict::Reject(reason)))
}

/// Returns the verdict on the requests of a probation, or `None` if the probe set decides.
pub(super) fn judge_requests(watched: Watched, policy: &Policy) -> Option<Verdict> {
    let Watched { requests, faults, slow, car_faults } = watched;
    let Policy { faults_max, latency_us_p99_max, .. } = *policy;
    if faults > faults_max {
        return Some(Verdict::Reject(format!(
            "{faults} faults in {requests} requests on probation; the policy allows {faults_max}"
        )));
    }
    if car_faults > faults_max {
        return Some(Verdict::Withdraw(format!(
            "{car_faults} faults of the car in {requests} requests on probation; the policy allows \
             {faults_max}"
        )));
    }
    if requests < policy.requests_min {
        return Some(Verdict::Wait);
    }
    // The 99th percentile is above the limit exactly if more than one request in 100 is.
    if latency_us_p99_max > 0 && slow > requests / 100 {
        return Some(Verdict::Reject(format!(
            "{slow} of {requests} requests on probation took more than {latency_us_p99_max} µs; \
             the policy allows 1 in 100"
        )));
    }
    None
}

/// Returns why the policy rejects the result of a probe, or `None` if the policy accepts it.
pub(super) fn judge_probe(probed: Probed, policy: &Policy) -> Option<String> {
    let Probed { samples, damaged, difference } = probed;
    let Policy { probe_samples_min, probe_difference_max, .. } = *policy;
    // Damage is the car's fault, so samples that use damaged rows count as present.
    if samples.saturating_add(damaged) < probe_samples_min {
        return Some(format!(
            "the bundle has {samples} probe samples with a score; the policy requires \
             {probe_samples_min}"
        ));
    }
    (difference > probe_difference_max).then(|| {
        format!(
            "a probe score differs by {difference} from the recorded one; the policy allows \
             {probe_difference_max}"
        )
    })
}

/// Returns whether the bundle caused `error`, and not the car's device or state. The bundle's
/// manifest and chunks match the signed hashes.
pub(super) fn blames_bundle(error: &FlashError) -> bool {
    match error {
        FlashError::Bundle(e) => !matches!(e, BundleError::Io { .. } | BundleError::Hash { .. }),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::page::PageFault;

    #[test]
    fn errors_of_the_device_do_not_blame_the_bundle() {
        let path = std::path::PathBuf::from("t0000-0000.seg");
        let source = std::io::Error::other("the device");
        let of_device = SegmentError::Io { path: path.clone(), source };
        assert!(!blames_bundle(&FlashError::Segment(of_device)));
        let of_bundle = SegmentError::Page { path, page: 0, source: PageFault::Count(0) };
        assert!(blames_bundle(&FlashError::Segment(of_bundle)));
    }
}
