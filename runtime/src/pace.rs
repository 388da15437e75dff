//! The pace of background work: how much at once, and how long to rest after it, so that its share of the time stays
//! below a limit however slow the device is. Never reads a clock and never waits: time is an argument.

use std::time::Duration;

/// What one step should take at most: whoever wants the worker to stop waits no longer for it.
const STEP_MAX: Duration = Duration::from_millis(20);
/// Pages of a step at most.
const PAGES_MAX: u64 = 256;

/// A pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    busy_percent_max: u64,
    pages: u64,
}

impl Pace {
    /// Work for up to `busy_percent_max` (1 to 100) of the time.
    pub fn new(busy_percent_max: u64) -> Self {
        Self { busy_percent_max: busy_percent_max.clamp(1, 100), pages: 1 }
    }

    /// Pages that the next step should handle.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// After a step that took `busy`: how long to rest. The next step is larger if this one was short, and smaller if
    /// it was long.
    pub fn rest(&mut self, busy: Duration) -> Duration {
        self.pages = if busy > STEP_MAX { self.pages / 2 } else { self.pages * 2 }.clamp(1, PAGES_MAX);
        let rest =
            busy.as_nanos() * u128::from(100 - self.busy_percent_max) / u128::from(self.busy_percent_max);
        Duration::from_nanos(u64::try_from(rest).unwrap_or(u64::MAX))
    }
}
