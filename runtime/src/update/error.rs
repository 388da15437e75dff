//! Why a sync stopped, named after what an attacker would have had to do. Whatever it is, the live
//! generation is as it was and the next run goes on where this one stopped.

use crate::bundle::BundleError;
use crate::bundle::manifest::ManifestError;
use crate::flash::FlashError;
use std::io;
use std::path::PathBuf;

/// Why a sync stopped.
#[derive(Debug, thiserror::Error)]
pub enum UpdateError {
    /// No root of trust was ever put here.
    #[error("{path}: holds no root of trust: begin with the fleet's root", path = path.display())]
    NotProvisioned {
        /// The sync directory.
        path: PathBuf,
    },
    /// The floor record is lost or damaged in both copies: a replay could not be told from news.
    /// Needs service.
    #[error("{path}: floor record: {problem}; nothing is accepted until it is put right", path = path.display())]
    Floor {
        /// The sync directory.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// The car's clock is before the newest time that the repository signed.
    #[error(
        "the clock ({now} s) is behind the newest signed time ({floor} s): freeze could not be detected"
    )]
    Clock {
        /// The clock, seconds since 1970.
        now: u64,
        /// The newest signed time.
        floor: u64,
    },
    /// Rollback: signed metadata older than the one trusted.
    #[error("rollback: {role} version {offered} is older than the trusted {trusted}")]
    Rollback {
        /// Which role.
        role: String,
        /// The trusted version.
        trusted: u64,
        /// What came.
        offered: u64,
    },
    /// Replay: signed metadata older than what this car once accepted, as the floor record has it.
    #[error("replay: {role} version {offered} is older than {floor}, which was accepted before")]
    Replay {
        /// Which role.
        role: &'static str,
        /// The version accepted before.
        floor: u64,
        /// What came.
        offered: u64,
    },
    /// Freeze: signed metadata that has expired.
    #[error("freeze: {role} expired at {expires}; the clock is {now} s")]
    Freeze {
        /// Which role.
        role: String,
        /// When it expired.
        expires: String,
        /// The clock, seconds since 1970.
        now: u64,
    },
    /// Mix-and-match: metadata that do not belong together.
    #[error("mix-and-match: {path}: {problem}")]
    MixAndMatch {
        /// What was fetched.
        path: String,
        /// What does not fit.
        problem: String,
    },
    /// Endless data: more than was announced or is allowed.
    #[error("endless data: {path} has more than {bytes_max} bytes")]
    EndlessData {
        /// What was fetched.
        path: String,
        /// The limit.
        bytes_max: u64,
    },
    /// Slow retrieval: the link stays under the least rate.
    #[error("slow retrieval: {path}: {bytes} bytes in {seconds} s")]
    SlowRetrieval {
        /// What was fetched.
        path: String,
        /// Bytes that came.
        bytes: u64,
        /// In which time.
        seconds: u64,
    },
    /// Wrong key: none of the signatures is by a key of the role.
    #[error("wrong key: {path}: no valid signature of role {role}")]
    WrongKey {
        /// What was fetched.
        path: String,
        /// Which role.
        role: String,
    },
    /// Fewer valid signatures than the role asks for.
    #[error("threshold: {path}: {found} of {threshold} signatures of role {role}")]
    Threshold {
        /// What was fetched.
        path: String,
        /// Which role.
        role: String,
        /// Valid signatures.
        found: usize,
        /// Needed.
        threshold: usize,
    },
    /// Arbitrary software: content other than what was signed.
    #[error("arbitrary software: {path} does not match its signed hash or length")]
    ArbitrarySoftware {
        /// What was fetched.
        path: String,
    },
    /// What was fetched is not what it should be: a captive portal's page, another format.
    #[error("{path}: {problem}")]
    Malformed {
        /// What was fetched.
        path: String,
        /// What is wrong.
        problem: String,
    },
    /// The repository does not have it.
    #[error("{path}: not found")]
    NotFound {
        /// What was asked for.
        path: String,
    },
    /// The link broke. What arrived is kept.
    #[error("{path}: {problem}")]
    Link {
        /// What was being fetched.
        path: String,
        /// What the link said.
        problem: String,
    },
    /// The bytes that this run may fetch are used up. The next one goes on.
    #[error("the byte budget of {bytes_max} is used up")]
    Budget {
        /// The budget.
        bytes_max: u64,
    },
    /// The hours in which it may fetch are over. The next run in them goes on.
    #[error("the link's hours are over")]
    Closed,
    /// A release is not what its signed name says.
    #[error("release {name}: {field}: {problem}")]
    Release {
        /// Its target name.
        name: String,
        /// Which field.
        field: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// It is not used, or no longer: what was live before is live.
    #[error("release {release} is not used: {why}")]
    NotUsed {
        /// Which generation it leads to.
        release: String,
        /// Why.
        why: String,
    },
    /// Its manifest is refused.
    #[error("release {name}: manifest: {source}")]
    Manifest {
        /// Its target name.
        name: String,
        /// What is wrong.
        source: ManifestError,
    },
    /// No release leads forward from what is live, or it is not clear which model is wanted.
    #[error("no way from {live} to sequence {newest} of `{lineage}`")]
    NoWay {
        /// What is live.
        live: String,
        /// The newest release.
        newest: u64,
        /// Of which model.
        lineage: String,
    },
    /// Several models are published and none is live: say which.
    #[error("the repository has the models {found}: name one")]
    Lineage {
        /// Their lineages.
        found: String,
    },
    /// There is no room. Nothing was fetched.
    #[error("{path}: {needed} bytes are needed, {free} are free", path = path.display())]
    Space {
        /// The sync directory.
        path: PathBuf,
        /// Bytes to be written.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// Another process is syncing.
    #[error("{path}: another process is syncing", path = path.display())]
    Busy {
        /// Its lock.
        path: PathBuf,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The staged bundle is damaged.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// The flash directory or the bundle is refused.
    #[error(transparent)]
    Flash(#[from] FlashError),
}

pub(crate) fn io_error(path: &std::path::Path) -> impl FnOnce(io::Error) -> UpdateError + '_ {
    move |source| UpdateError::Io { path: path.to_owned(), source }
}

/// Gives an error of the TUF crate its name. `path` is what was fetched.
pub(crate) fn named(error: sigstore_tuf::Error, path: &str, now: u64) -> UpdateError {
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
        other => UpdateError::Malformed { path, problem: other.to_string() },
    }
}
