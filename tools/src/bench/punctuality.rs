//! How late things happen, over time: answers beside threads that only sleep. Never decides what is
//! measured.

use hatchback::limits::DEADLINE_GRACE_US;
use serde::Serialize;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time of a window. Answers are compared with the sleepers of the windows around them.
const WINDOW: Duration = Duration::from_millis(100);

/// Events, each with the time at which it was due.
pub struct Timeline {
    start: Instant,
    seen: Mutex<Events>,
}

#[derive(Default)]
struct Events {
    count: u64,
    latest: Duration,
    /// The latest event of each window.
    windows: Vec<Duration>,
    /// Events that were later than the bound.
    over: Vec<Event>,
}

#[derive(Clone, Copy)]
struct Event {
    /// Windows of the time at which it was due and at which it happened.
    due: usize,
    happened: usize,
    late: Duration,
}

/// How late the events of a timeline were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Lateness {
    /// Number of events.
    pub count: u64,
    /// Events that were later than [`Lateness::BOUND`].
    pub over: u64,
    /// The latest event, µs.
    pub latest_us: f64,
}

impl Lateness {
    /// Time after its deadline by which a request is answered.
    pub const BOUND: Duration = Duration::from_micros(DEADLINE_GRACE_US);
}

impl Timeline {
    /// Returns a timeline that starts now.
    pub fn start() -> Self {
        Self { start: Instant::now(), seen: Mutex::default() }
    }

    /// Records that something happened now that was due at `due`.
    pub fn record(&self, due: Instant) {
        self.record_at(due, Instant::now());
    }

    fn record_at(&self, due: Instant, now: Instant) {
        let late = now.saturating_duration_since(due);
        let window = |at: Instant| {
            (at.saturating_duration_since(self.start).as_nanos() / WINDOW.as_nanos()) as usize
        };
        let happened = window(now);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.count += 1;
        seen.latest = seen.latest.max(late);
        if seen.windows.len() <= happened {
            seen.windows.resize(happened + 1, Duration::ZERO);
        }
        seen.windows[happened] = seen.windows[happened].max(late);
        if late > Lateness::BOUND {
            seen.over.push(Event { due: window(due), happened, late });
        }
    }

    /// Returns how late the events were.
    pub fn lateness(&self) -> Lateness {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        Lateness {
            count: seen.count,
            over: seen.over.len() as u64,
            latest_us: seen.latest.as_secs_f64() * 1e6,
        }
    }

    /// Returns the number of events that were later than the bound and the latest of `sleepers` in
    /// the same windows and those beside them.
    pub fn overruns_beside(&self, sleepers: &Self) -> u64 {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let beside = sleepers.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let noise = |event: &Event| {
            let windows = beside.windows.iter().take(event.happened + 2);
            windows.skip(event.due.saturating_sub(1)).max().copied().unwrap_or_default()
        };
        seen.over.iter().filter(|event| event.late > Lateness::BOUND + noise(event)).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overrun_is_later_than_the_bound_and_the_sleepers_beside_it() {
        let (answers, sleepers) = (Timeline::start(), Timeline::start());
        let at = |ms: u64| answers.start + Duration::from_millis(ms);
        sleepers.record_at(at(1000), at(1010));
        // In time, within the bound, hidden by the sleeper, beyond it, and far from it.
        for (due, now) in [(990, 980), (990, 991), (1020, 1030), (1020, 1032), (2000, 2003)] {
            answers.record_at(at(due), at(now));
        }
        assert_eq!(answers.overruns_beside(&sleepers), 2);
        let expected = Lateness { count: 5, over: 3, latest_us: 12_000.0 };
        assert_eq!(answers.lateness(), expected);
        assert_eq!(sleepers.overruns_beside(&Timeline::start()), 1);
    }
}
