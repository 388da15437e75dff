//! The clock: the trait through which the runtime reads the time, so that a simulation can set it.
//! It never reads the time of day.

use std::time::{Duration, Instant};

/// A monotonic clock with an arbitrary start.
pub trait Clock: Send + Sync {
    /// Returns the time since the clock's start.
    fn now(&self) -> Duration;
}

/// Formats a time in seconds since 1970 for messages, as `2026-11-27T14:00:00Z`.
pub fn utc(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|s| jiff::Timestamp::from_second(s).ok());
    time.map_or_else(|| format!("{seconds} s after 1970"), |time| time.to_string())
}

/// The system's monotonic clock, started when it is made.
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}
