//! Times in signed metadata, and why a publisher's clock is refused. A time that is ahead would keep
//! cars from every later release. Never waits.

use anyhow::{Context, Result};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds of a day.
pub(super) const DAY_S: u64 = 24 * 3600;

/// Why the publisher's clock is refused. Times are in seconds since 1970.
#[allow(missing_docs)]
#[derive(Debug, thiserror::Error)]
pub enum ClockError {
    #[error(
        "nothing was signed: this clock ({now}) is behind the newest signed time ({published}); \
         set the clock. If a clock that was ahead signed that time, run `hatchback keys rotate KEYS \
         timestamp` and publish again",
        now = shown(*now), published = shown(*published)
    )]
    BehindPublished { now: u64, published: u64 },
    #[error(
        "nothing was signed: this clock ({now}) is behind the time of {path} ({written}); set the \
         clock, or run `touch` if the time of the file is wrong",
        now = shown(*now), path = root.display(), written = shown(*written)
    )]
    BehindRoot { now: u64, root: PathBuf, written: u64 },
    #[error(
        "nothing was published: this clock ({now}) and that of the repository ({store}) differ by \
         more than a day, and the newest signed time is {published}; set the clock",
        now = shown(*now), store = shown(*store), published = shown(*published)
    )]
    NotThatOfTheStore { now: u64, store: u64, published: u64 },
}

/// Returns the time `seconds` after 1970 for messages.
pub(super) fn shown(seconds: u64) -> String {
    timestamp(seconds).map_or_else(|_| format!("{seconds} s after 1970"), |time| time.to_string())
}

/// Returns `time` in seconds since 1970; 0 for an earlier one.
pub(super) fn unix_s(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Returns the system's time in seconds since 1970.
///
/// # Errors
/// The system's clock is before 1970.
pub fn now() -> Result<u64> {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
    Ok(since_1970.context("the system's clock is before 1970")?.as_secs())
}

/// Returns the time `seconds` after 1970 in the form of signed metadata.
///
/// # Errors
/// The time is beyond the calendar.
pub fn timestamp(seconds: u64) -> Result<jiff::Timestamp> {
    Ok(jiff::Timestamp::from_second(i64::try_from(seconds)?)?)
}
