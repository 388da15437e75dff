//! How late things happen, over time: answers beside threads that send nothing. Never decides what
//! is measured.

use anyhow::Result;
use hatchback::limits::DEADLINE_GRACE_US;
use serde::Serialize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time of a window. Answers are compared with the sleepers of the windows around them.
const WINDOW: Duration = Duration::from_millis(100);

/// Standard deviations by which chance may exceed the overruns of the controls.
const DEVIATIONS: f64 = 3.0;

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

    /// Returns what stands above the table of a run: `of`, and how to read the table.
    pub fn about(of: &str) -> String {
        let bound = Self::BOUND.as_micros();
        format!(
            "{of} deadlines of 1 to 50 ms, stalls of 10 ms to 2 s\n\
             An answer may be {bound} us late. Sleepers and controls send nothing."
        )
    }
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

/// Answers and controls that were later than the bound and the sleepers beside them. The scheduler
/// alone makes some, by chance; those of the controls say how many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Overruns {
    /// Answers that were.
    pub answers: u64,
    /// Controls that were.
    pub controls: u64,
    /// Requests for each control.
    pub requests_a_control: f64,
}

impl Overruns {
    /// Judges the answers to `requests` requests, and the controls, by the same sleepers.
    pub fn of(requests: u64, answers: &Timeline, controls: &Timeline, sleepers: &Timeline) -> Self {
        Self {
            answers: answers.overruns_beside(sleepers),
            controls: controls.overruns_beside(sleepers),
            requests_a_control: requests as f64 / controls.lateness().count.max(1) as f64,
        }
    }

    /// Returns the overruns of answers that neither those of the controls nor chance explains.
    pub fn beyond_chance(&self) -> f64 {
        let expected = self.requests_a_control * self.controls as f64;
        let variance = expected + self.requests_a_control * expected + 1.0;
        (self.answers as f64 - expected - DEVIATIONS * variance.sqrt()).max(0.0).floor()
    }
}

/// A thread that does what a caller does, but sends nothing. A sleeper sleeps until a deadline, a
/// control until a caller without an answer would return.
pub struct Sleeper<'a> {
    /// Time after the deadline until which it sleeps.
    pub oversleep: Duration,
    /// How late each sleep ended, relative to its deadline.
    pub timeline: &'a Timeline,
}

impl Sleeper<'_> {
    /// Sleeps until after one deadline after the other, on a condition variable that nobody
    /// notifies, until `stop`. `next` returns the time to the next deadline.
    ///
    /// # Errors
    /// Those of `next`.
    pub fn sleep_until(
        &self,
        stop: &AtomicBool,
        next: &mut dyn FnMut() -> Result<Duration>,
    ) -> Result<()> {
        let (lock, never) = (Mutex::new(()), Condvar::new());
        while !stop.load(Ordering::Relaxed) {
            let deadline = Instant::now() + next()?;
            let end = deadline + self.oversleep;
            let guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
            let left = end.saturating_duration_since(Instant::now());
            let is_early = |(): &mut ()| Instant::now() < end;
            let woken = never.wait_timeout_while(guard, left, is_early);
            drop(woken.unwrap_or_else(PoisonError::into_inner));
            self.timeline.record(deadline);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overruns_count_beyond_those_of_the_controls_and_chance() {
        let of = |answers, controls| Overruns { answers, controls, requests_a_control: 1.0 };
        for (answers, controls, beyond) in [(3, 0, 0.0), (5, 0, 2.0), (12, 4, 0.0), (100, 4, 87.0)]
        {
            assert_eq!(of(answers, controls).beyond_chance(), beyond, "{answers}, {controls}");
        }
    }

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
