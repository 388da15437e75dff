//! Why an update stopped. The error for an attack has the name of that attack in The Update
//! Framework. Every error leaves the live generation unchanged, and the next run continues.

use crate::bundle::BundleError;
use crate::bundle::manifest::ManifestError;
use crate::clock::utc;
use crate::flash::FlashError;
use crate::io::paired_record::CopyError;
use crate::schema::change::ChangeError;
use std::io;
use std::path::PathBuf;

/// Why an update stopped. `path` is a local path, or the address of an object of the repository.
#[allow(missing_docs)]
#[derive(thiserror::Error)]
pub enum UpdateError {
    #[error(
        "{path}: the sync directory has no root of trust; provision it with the fleet's root",
        path = path.display()
    )]
    NotProvisioned { path: PathBuf },
    /// Both copies of the rollback floor are lost or damaged, so a replay cannot be detected.
    #[error(
        "{path}: rollback floor: {problem}; this car accepts no release until it is serviced",
        path = path.display()
    )]
    RollbackFloor { path: PathBuf, problem: String },
    /// Times in seconds since 1970.
    #[error(
        "the clock ({}) is behind the newest signed time ({}), so expired metadata cannot be \
         detected; set the clock, or if the publisher's clock was ahead, rotate the timestamp key",
        utc(*now), utc(*floor)
    )]
    ClockBehind { now: u64, floor: u64 },
    /// Rollback: signed metadata older than the trusted version.
    #[error("rollback: {role} version {offered} is older than the trusted version {trusted}")]
    Rollback { role: String, trusted: u64, offered: u64 },
    /// Replay: signed metadata older than the rollback floor.
    #[error(
        "replay: {role} version {offered} is older than version {floor}, which this car accepted \
         before"
    )]
    Replay { role: &'static str, floor: u64, offered: u64 },
    /// Freeze: signed metadata that has expired. `now` is in seconds since 1970.
    #[error("freeze: {role} metadata expired at {expires}; the clock is {}", utc(*now))]
    Freeze { role: String, expires: String, now: u64 },
    /// Mix-and-match: metadata that were not signed for each other.
    #[error("mix-and-match: {path}: {problem}")]
    MixAndMatch { path: String, problem: String },
    /// Endless data: more bytes than announced or allowed.
    #[error("endless data: {path} has more than {bytes_max} bytes")]
    EndlessData { path: String, bytes_max: u64 },
    /// Slow retrieval: the link stays below its minimum rate.
    #[error("slow retrieval: {path}: {bytes} bytes in {seconds} s")]
    SlowRetrieval { path: String, bytes: u64, seconds: u64 },
    /// Wrong key: no signature is by a key of the role.
    #[error("wrong key: {path} has no valid signature of role {role}")]
    WrongKey { path: String, role: String },
    /// Fewer valid signatures than the role needs.
    #[error("threshold: {path} has {found} of {threshold} signatures of role {role}")]
    Threshold { path: String, role: String, found: usize, threshold: usize },
    /// Arbitrary software: the content is not the signed content.
    #[error("arbitrary software: {path} does not match its signed hash or length")]
    ArbitrarySoftware { path: String },
    /// The object does not have the expected format: it may be a captive portal's page.
    #[error("{path}: {problem}")]
    Malformed { path: String, problem: String },
    #[error("{path}: not found in the repository")]
    NotFound { path: String },
    /// The link broke. The next run reuses the bytes that arrived.
    #[error("{path}: {problem}")]
    LinkBroken { path: String, problem: String },
    /// The run has received all the bytes that it may. The next run continues.
    #[error("the byte budget of {bytes_max} bytes is used up; the next run continues")]
    ByteBudget { bytes_max: u64 },
    /// The hours of the target's `[link]` are over. The next run in those hours continues.
    #[error("the hours in which the link may be used are over; the next run in them continues")]
    OutsideHours,
    /// A field of a release contradicts its signed target.
    #[error("release {name}: {field}: {problem}")]
    ReleaseField { name: String, field: &'static str, problem: String },
    /// A fault of this car, such as a full disk, kept it from installing a release.
    #[error("release {release} was not installed: {reason}")]
    NotInstalled { release: String, reason: String },
    /// A release was not made live, or was rolled back.
    #[error("release {release} failed: {reason}")]
    ReleaseFailed { release: String, reason: String },
    #[error("release {name}: manifest: {source}")]
    Manifest { name: String, source: ManifestError },
    /// Callers of the live generation could not use the release.
    #[error("release {name} cannot follow {live}, whose callers could not use it: {source}")]
    Callers { name: String, live: String, source: ChangeError },
    /// The repository lists a newer release, but no listed bundles lead from the live generation to
    /// it.
    #[error(
        "no listed release leads from {live} to sequence {newest} of `{lineage}`; publish a \
         snapshot, or a delta for {live}"
    )]
    NoPath { live: String, newest: u64, lineage: String },
    #[error("the repository has the models {found}: choose one with --lineage")]
    AmbiguousLineage { found: String },
    #[error("--lineage {chosen}: the repository has the models {found}")]
    UnknownLineage { chosen: String, found: String },
    #[error(
        "{path}: another process is syncing; try again when it has finished",
        path = path.display()
    )]
    Busy { path: PathBuf },
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The car's memory or GPU failed.
    #[error("{problem}")]
    Car { problem: String },
    /// The staged bundle is damaged.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The flash directory or the bundle is refused, or the sync directory has too little space.
    #[error(transparent)]
    Flash(#[from] FlashError),
}

debug_as_display!(UpdateError);

impl From<CopyError> for UpdateError {
    fn from(CopyError { path, source }: CopyError) -> Self {
        Self::Io { path, source }
    }
}

impl UpdateError {
    /// Returns whether the car or its link is the cause, so that another try may succeed.
    pub fn is_fault_of_car(&self) -> bool {
        matches!(
            self,
            Self::NotInstalled { .. }
                | Self::Flash(FlashError::Space { .. } | FlashError::Busy { .. })
                | Self::Busy { .. }
                | Self::Car { .. }
                | Self::LinkBroken { .. }
                | Self::SlowRetrieval { .. }
                | Self::ByteBudget { .. }
                | Self::OutsideHours
        )
    }

    /// Returns whether another process holds a lock.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self, Self::Busy { .. } | Self::Flash(FlashError::Busy { .. }))
    }

    /// Returns how much the failed fetch of a release counts against that release: the failure is
    /// its own, perhaps its own, or not.
    pub(super) fn weight(&self) -> u32 {
        match self {
            Self::NotFound { .. }
            | Self::ArbitrarySoftware { .. }
            | Self::EndlessData { .. }
            | Self::Malformed { .. }
            | Self::Manifest { .. }
            | Self::ReleaseField { .. }
            | Self::Callers { .. }
            | Self::Flash(FlashError::Space { .. }) => 2,
            Self::LinkBroken { .. } | Self::SlowRetrieval { .. } => 1,
            _ => 0,
        }
    }
}

pub(crate) fn io_error(path: &std::path::Path) -> impl FnOnce(io::Error) -> UpdateError + '_ {
    move |source| UpdateError::Io { path: path.to_owned(), source }
}

/// Converts `error` of the TUF crate about `path` to the error of the attack that it found.
pub(crate) fn from_tuf(error: sigstore_tuf::Error, path: &str, now: u64) -> UpdateError {
    use sigstore_tuf::Error as Tuf;
    let path = path.to_owned();
    match error {
        Tuf::Rollback { role, trusted, new } => {
            UpdateError::Rollback { role, trusted, offered: new }
        }
        Tuf::BadRootVersion { trusted, new } if new <= trusted => {
            UpdateError::Rollback { role: "root".to_owned(), trusted, offered: new }
        }
        Tuf::Expired { role, expires } => {
            UpdateError::Freeze { role, expires: expires.to_string(), now }
        }
        Tuf::ThresholdNotMet { role, found: 0, .. } => UpdateError::WrongKey { path, role },
        Tuf::ThresholdNotMet { role, found, threshold } => {
            UpdateError::Threshold { path, role, found, threshold }
        }
        Tuf::IntegrityMismatch(problem) => UpdateError::MixAndMatch { path, problem },
        other => {
            // The crate's own text lacks the place in the JSON, which its source has.
            let source = std::error::Error::source(&other);
            let reason = source.map_or_else(String::new, |source| format!(": {source}"));
            UpdateError::Malformed { path, problem: format!("{other}{reason}") }
        }
    }
}
