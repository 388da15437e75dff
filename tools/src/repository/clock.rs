//! Times in signed metadata. Never waits.

use anyhow::{Context, Result};
use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds of a day.
pub(super) const DAY_S: u64 = 24 * 3600;

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
