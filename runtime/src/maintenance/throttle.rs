//! The pace of background work: how much at once, and how long to rest after it, so that its share
//! of the time stays below a limit however slow the device is. Never reads a clock of its own and
//! never waits by itself: both are arguments.

use crate::request::worker::Clock;
use std::cell::Cell;
use std::time::Duration;

/// Work goes on for this long before it rests: a request that comes meanwhile may have to wait for
/// it.
const WORK_MIN: Duration = Duration::from_micros(200);

/// A rest, to be called between small pieces of work: once they have taken a while it has `sleep`
/// rest for so long that the work stays below `busy_percent_max` (1 to 100) of the time.
pub fn rests<'a>(
    busy_percent_max: u64,
    clock: &'a dyn Clock,
    sleep: impl Fn(Duration) + 'a,
) -> impl Fn() + 'a {
    let (pace, since) = (Cell::new(Throttle::new(busy_percent_max)), Cell::new(clock.now()));
    move || {
        let busy = clock.now().saturating_sub(since.get());
        if busy >= WORK_MIN {
            let mut at = pace.get();
            sleep(at.rest(busy));
            pace.set(at);
            since.set(clock.now());
        }
    }
}

/// What one step should take at most: whoever wants the worker to stop waits no longer for it.
const STEP_MAX: Duration = Duration::from_millis(20);
/// Pages of a step at most.
const PAGES_MAX: u64 = 256;

/// A pace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Throttle {
    busy_percent_max: u64,
    pages: u64,
}

impl Throttle {
    /// Work for up to `busy_percent_max` (1 to 100) of the time.
    pub fn new(busy_percent_max: u64) -> Self {
        Self { busy_percent_max: busy_percent_max.clamp(1, 100), pages: 1 }
    }

    /// Pages that the next step should handle.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// After a step that took `busy`: how long to rest. The next step is larger if this one was
    /// short, and smaller if it was long.
    pub fn rest(&mut self, busy: Duration) -> Duration {
        self.pages =
            if busy > STEP_MAX { self.pages / 2 } else { self.pages * 2 }.clamp(1, PAGES_MAX);
        let rest = busy.as_nanos() * u128::from(100 - self.busy_percent_max)
            / u128::from(self.busy_percent_max);
        Duration::from_nanos(u64::try_from(rest).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A clock that work and rests move.
    #[derive(Default)]
    struct Moved(AtomicU64);

    impl Clock for Moved {
        fn now(&self) -> Duration {
            Duration::from_micros(self.0.load(Ordering::Relaxed))
        }
    }

    #[test]
    fn work_stays_below_its_share() {
        for percent in [1, 10, 50, 100] {
            let (clock, slept) = (Moved::default(), Cell::new(0));
            let rest = rests(percent, &clock, |time| {
                slept.set(slept.get() + time.as_micros() as u64);
                clock.0.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
            });
            let mut worked = 0;
            for step in 0..10_000 {
                let busy = [1, 40, 900, 30_000][step % 4];
                (worked, _) = (worked + busy, clock.0.fetch_add(busy, Ordering::Relaxed));
                rest();
            }
            let share = 100.0 * worked as f64 / (worked + slept.get()) as f64;
            assert!((share - percent as f64).abs() < 0.1, "{share} % instead of {percent}");
        }
    }
}
