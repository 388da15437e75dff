//! The throttle of maintenance. It limits the work of one step and sets the pause after it. So the
//! work stays below a share of the time on any device. The throttle never reads a clock and never
//! sleeps: the caller does both.

use crate::limits::{THROTTLE_PAGES_MAX, THROTTLE_STEP_MAX};
use std::time::Duration;

/// The size of the next step of background work, and its share of the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Throttle {
    busy_percent_max: u64,
    pages: u64,
}

impl Throttle {
    /// Returns a throttle for work of up to `busy_percent_max` (1 to 100) of the time.
    pub fn new(busy_percent_max: u64) -> Self {
        Self { busy_percent_max: busy_percent_max.clamp(1, 100), pages: 1 }
    }

    /// Returns the number of pages of the next step.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Returns the pause after a step that took `busy`. Doubles the next step after a short step
    /// and halves it after a long one.
    pub fn pause_after(&mut self, busy: Duration) -> Duration {
        let pages = if busy > THROTTLE_STEP_MAX { self.pages / 2 } else { self.pages * 2 };
        self.pages = pages.clamp(1, THROTTLE_PAGES_MAX);

        let pause = busy.as_nanos() * u128::from(100 - self.busy_percent_max)
            / u128::from(self.busy_percent_max);
        Duration::from_nanos(u64::try_from(pause).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_keeps_the_work_at_its_share() {
        for percent in [1, 10, 50, 100] {
            let mut throttle = Throttle::new(percent);
            for busy in [1, 40, 900, 30_000].map(Duration::from_micros) {
                let time = busy + throttle.pause_after(busy);
                let share = 100.0 * busy.as_secs_f64() / time.as_secs_f64();
                assert!((share - percent as f64).abs() < 0.1, "{share} % instead of {percent}");
            }
        }
    }

    #[test]
    fn a_step_grows_while_it_is_short_and_shrinks_when_it_is_long() {
        let mut throttle = Throttle::new(10);
        for _ in 0..20 {
            throttle.pause_after(THROTTLE_STEP_MAX);
        }
        assert_eq!(throttle.pages(), THROTTLE_PAGES_MAX);
        throttle.pause_after(THROTTLE_STEP_MAX * 2);
        assert_eq!(throttle.pages(), THROTTLE_PAGES_MAX / 2);
    }
}
