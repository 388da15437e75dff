//! The wear budget: how many bytes a day upkeep may write to flash. Never reads a clock and never
//! writes: time is an argument, and whoever holds the state keeps it.

use serde::{Deserialize, Serialize};
use std::time::Duration;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// The most that one step of a clock which is behind counts as time gone by.
const STEP_MAX: Duration = Duration::from_secs(60 * 60);

/// What may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WearBudget {
    /// Bytes a day.
    pub bytes_per_day_max: u64,
}

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wear {
    /// The day that `bytes` belong to, counted from the epoch; none before the first use.
    pub day: Option<u64>,
    /// Bytes written on that day.
    pub bytes: u64,
    /// Bytes written on all days.
    pub bytes_total: u64,
    /// The last time told.
    last: Duration,
    /// Time seen to go by while the clock was behind `day`.
    behind: Duration,
}

impl Wear {
    /// Where the state was lost: the first day counts as spent, so that losing it never buys
    /// writes.
    pub fn unknown() -> Self {
        Self { bytes: u64::MAX, ..Self::default() }
    }

    /// Bytes that may still be written at `now` (since the epoch).
    pub fn left(&mut self, budget: WearBudget, now: Duration) -> u64 {
        self.tell(now);
        budget.bytes_per_day_max.saturating_sub(self.bytes)
    }

    /// Records that `bytes` were, or are about to be, written at `now`.
    pub fn spend(&mut self, now: Duration, bytes: u64) {
        self.tell(now);
        self.bytes = self.bytes.saturating_add(bytes);
        self.bytes_total = self.bytes_total.saturating_add(bytes);
    }

    /// Takes back what was recorded today and not written.
    pub fn refund(&mut self, bytes: u64) {
        self.bytes = self.bytes.saturating_sub(bytes);
        self.bytes_total = self.bytes_total.saturating_sub(bytes);
    }

    /// The day that it is. A day later than any before starts from nothing. A clock that went back
    /// starts nothing until it is past that day again or was seen to run for a whole day: so a
    /// clock that starts at 1970 with every ignition refills nothing, and one that was wrong once
    /// does not stop upkeep for ever.
    fn tell(&mut self, now: Duration) {
        let today = now.as_secs() / DAY.as_secs();
        let day = *self.day.get_or_insert(today);
        if today < day {
            let step = now.saturating_sub(self.last).min(STEP_MAX);
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

    const BUDGET: WearBudget = WearBudget { bytes_per_day_max: 100 };
    const HOUR: u64 = 60 * 60;

    fn at(hours: u64) -> Duration {
        Duration::from_secs(hours * HOUR)
    }

    #[test]
    fn a_day_has_its_bytes_and_no_more() {
        let mut wear = Wear::default();
        assert_eq!(wear.left(BUDGET, at(1000)), 100);
        wear.spend(at(1000), 60);
        assert_eq!(wear.left(BUDGET, at(1000)), 40);
        assert_eq!(wear.left(BUDGET, at(1024)), 100);
        assert_eq!(wear.bytes_total, 60);
    }

    #[test]
    fn a_clock_that_goes_back_refills_nothing() {
        let mut wear = Wear::default();
        wear.spend(at(10_000), 100);
        // Fifty ignitions of a car whose clock starts at 1970 and is set soon after.
        for _ in 0..50 {
            assert_eq!(wear.left(BUDGET, at(0)), 0);
            assert_eq!(wear.left(BUDGET, at(10_001)), 0);
        }
        assert_eq!(wear.left(BUDGET, at(10_024)), 100);
    }

    #[test]
    fn a_clock_that_was_wrong_once_costs_a_day() {
        let mut wear = Wear::default();
        wear.spend(at(900_000), 100);
        let hours = (0..100).find(|h| wear.left(BUDGET, at(10_000 + h)) > 0);
        assert_eq!(hours, Some(24));
    }

    #[test]
    fn a_lost_state_counts_as_spent() {
        let mut wear = Wear::unknown();
        assert_eq!(wear.left(BUDGET, at(1000)), 0);
        assert_eq!(wear.left(BUDGET, at(1024)), 100);
    }

    proptest! {
        /// Whatever the clock says, in any 24 h that really passed no more is allowed than the days
        /// that the clock went forward through, and never more than the budget at one.
        #[test]
        fn never_beyond_the_budget(steps in prop::collection::vec((0u64..400, 0u64..120), 1..200)) {
            let (mut wear, mut highest, mut days, mut spent) = (Wear::default(), None, 0u64, 0u64);
            for (hour, bytes) in steps {
                // Jumps count as an hour at most, so going back and forth gains a day in 24 at
                // best.
                if highest.is_none_or(|h| hour / 24 > h) {
                    (highest, days) = (Some(hour / 24), days + 1);
                }
                if bytes <= wear.left(BUDGET, at(hour)) {
                    wear.spend(at(hour), bytes);
                    spent += bytes;
                }
                prop_assert!(wear.bytes <= BUDGET.bytes_per_day_max);
            }
            prop_assert!(spent <= (days + 200 / 24 + 1) * BUDGET.bytes_per_day_max * 2);
            prop_assert_eq!(spent, wear.bytes_total);
        }
    }
}
