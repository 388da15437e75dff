//! The clock: the trait through which the runtime reads the time, so that a simulation can set it.
//! It never reads the time of day.

use std::time::{Duration, Instant};

/// A monotonic clock with an arbitrary start.
pub trait Clock: Send + Sync {
    /// Returns the time since the clock's start.
    fn now(&self) -> Duration;
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
