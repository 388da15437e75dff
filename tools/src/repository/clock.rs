//! Times in signed metadata, and why a publisher's clock is refused. Never waits.

use anyhow::{Context, Result};
use hatchback::clock::utc;
use hatchback::limits::CLOCK_SLACK_S;
use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds of a day.
pub(super) const DAY_S: u64 = 24 * 3600;

/// Why the publisher's clock is refused. Times are in seconds since 1970.
#[allow(missing_docs)]
#[derive(Debug, thiserror::Error)]
pub enum ClockError {
    #[error(
        "nothing was signed: this clock ({}) is behind the time of {file} ({}); set the clock. If \
         it is right, see \"The publisher's clock\" in docs/fleet.md",
        utc(*now), utc(*signed)
    )]
    Behind { now: u64, file: String, signed: u64 },
    #[error(
        "nothing was published: this clock ({}) is over a day from the repository's ({}); set it",
        utc(*now), utc(*store)
    )]
    NotThatOfTheStore { now: u64, store: u64 },
}

/// Returns the time to sign at the time `now`: `now`, or the newest signed time, that of `file`, if
/// it is up to [`CLOCK_SLACK_S`] later. The signed time never goes down.
///
/// # Errors
/// [`ClockError::Behind`]: cars would refuse the metadata.
pub(super) fn signing_time(now: u64, file: &str, signed: u64) -> Result<u64, ClockError> {
    match now.saturating_add(CLOCK_SLACK_S) < signed {
        true => Err(ClockError::Behind { now, file: file.to_owned(), signed }),
        false => Ok(now.max(signed)),
    }
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
