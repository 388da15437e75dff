//! A budget of bytes a day: those that maintenance may write to flash, and those that the sync
//! process may receive. Never reads a clock and never writes: the caller passes the time and stores
//! the state.

use crate::limits::CLOCK_STEP_MAX;
use serde::{Deserialize, Serialize};
use std::time::Duration;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// The bytes spent, today and in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DailyBytes {
    /// The day of `bytes`, in days since 1970; `None` before the first use.
    pub day: Option<u64>,
    /// Bytes spent on that day.
    pub bytes: u64,
    /// Bytes spent on all days.
    pub bytes_total: u64,
    /// The time of the last call.
    last: Duration,
    /// Time that passed while the clock was before `day`.
    behind: Duration,
}

impl DailyBytes {
    /// Returns the state after a loss. The budget of the first day counts as spent, so that a loss
    /// never allows more bytes.
    pub fn unknown() -> Self {
        Self { bytes: u64::MAX, ..Self::default() }
    }

    /// Returns the bytes of `bytes_per_day_max` that may still be spent at `now`, the time since
    /// 1970.
    pub fn left(&mut self, bytes_per_day_max: u64, now: Duration) -> u64 {
        self.advance_to(now);
        bytes_per_day_max.saturating_sub(self.bytes)
    }

    /// Charges `bytes` that were or will be spent at `now`.
    pub fn spend(&mut self, now: Duration, bytes: u64) {
        self.advance_to(now);
        self.bytes = self.bytes.saturating_add(bytes);
        self.bytes_total = self.bytes_total.saturating_add(bytes);
    }

    /// Returns `bytes` to the budget that were charged today and not spent.
    pub fn refund(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.bytes_total = self.bytes_total.saturating_sub(bytes);
    }

    /// Starts a new budget on a day later than any before. A clock that went back starts a new
    /// budget only after that day, or after it ran for a whole day. So a clock that starts at 1970
    /// with every ignition refills nothing, and a clock that was wrong once stops maintenance for
    /// one day only.
    fn advance_to(&mut self, now: Duration) {
        let today = now.as_secs() / DAY.as_secs();
        let day = *self.day.get_or_insert(today);
        if today < day {
            let step = now.saturating_sub(self.last).min(CLOCK_STEP_MAX);
            self.behind = self.behind.saturating_add(step);
        }
        self.last = now;
        if today > day || self.behind >= DAY {
            (self.day, self.bytes, self.behind) = (Some(today), 0, Duration::ZERO);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BUDGET: u64 = 100;
    const HOUR: u64 = 60 * 60;

    fn at(hours: u64) -> Duration {
        Duration::from_secs(hours * HOUR)
    }

    #[test]
    fn a_day_has_its_bytes_and_no_more() {
        let mut wear = DailyBytes::default();
        assert_eq!(wear.left(BUDGET, at(1000)), 100);
        wear.spend(at(1000), 60);
        assert_eq!(wear.left(BUDGET, at(1000)), 40);
        assert_eq!(wear.left(BUDGET, at(1024)), 100);
        assert_eq!(wear.bytes_total, 60);
    }

    #[test]
    fn a_clock_that_goes_back_refills_nothing() {
        let mut wear = DailyBytes::default();
        wear.spend(at(10_000), 100);
        // Fifty ignitions of a car whose clock starts at 1970 and is set soon afterwards.
        for _ in 0..50 {
            assert_eq!(wear.left(BUDGET, at(0)), 0);
            assert_eq!(wear.left(BUDGET, at(10_001)), 0);
        }
        assert_eq!(wear.left(BUDGET, at(10_024)), 100);
    }

    #[test]
    fn a_clock_that_was_wrong_once_costs_a_day() {
        let mut wear = DailyBytes::default();
        wear.spend(at(900_000), 100);
        let hours = (0..100).find(|h| wear.left(BUDGET, at(10_000 + h)) > 0);
        assert_eq!(hours, Some(24));
    }

    #[test]
    fn a_lost_state_counts_as_spent() {
        let mut wear = DailyBytes::unknown();
        assert_eq!(wear.left(BUDGET, at(1000)), 0);
        assert_eq!(wear.left(BUDGET, at(1024)), 100);
    }

    proptest! {
        /// With any clock, the days that the clock passed bound the allowed bytes, and one day
        /// never exceeds the budget.
        #[test]
        fn never_beyond_the_budget(steps in prop::collection::vec((0u64..400, 0u64..120), 1..200)) {
            let mut wear = DailyBytes::default();
            let (mut highest, mut days, mut spent) = (None, 0u64, 0u64);
            for (hour, bytes) in steps {
                // A jump counts as an hour at most, so 24 jumps gain at most a day.
                if highest.is_none_or(|h| hour / 24 > h) {
                    (highest, days) = (Some(hour / 24), days + 1);
                }
                if bytes <= wear.left(BUDGET, at(hour)) {
                    wear.spend(at(hour), bytes);
                    spent += bytes;
                }
                prop_assert!(wear.bytes <= BUDGET);
            }
            prop_assert!(spent <= (days + 200 / 24 + 1) * BUDGET * 2);
            prop_assert_eq!(spent, wear.bytes_total);
        }
    }
}
