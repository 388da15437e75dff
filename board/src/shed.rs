//! What is shed when the machine is too hot or draws too much power, in this order: first upkeep
//! (merges and scrubs wait), then requests (one at a time is served, the others are told `busy` at
//! once and fall back). A reading that is missing sheds nothing; the system's own throttling stays
//! below all this.

use crate::machine::{self, Root};
use hatchback::target::Shed as Limits;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// From one look at the machine to the next.
const LOOK: Duration = Duration::from_secs(1);
/// How far a temperature or a power must fall, of each 100, before what it shed comes back.
const BACK_PERCENT: f64 = 95.0;

const NOTHING: u8 = 0;
const UPKEEP: u8 = 1;
const REQUESTS: u8 = 2;

/// How much is shed now.
#[derive(Debug, Default)]
pub struct Shed {
    level: AtomicU8,
    /// Whether a request is being served while they are shed.
    serving: AtomicBool,
}

/// The right to serve a request.
#[derive(Debug)]
pub struct Turn<'a>(Option<&'a AtomicBool>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(serving) = self.0 {
            serving.store(false, Ordering::Release);
        }
    }
}

impl Shed {
    /// Whether upkeep is to wait.
    pub fn upkeep(&self) -> bool {
        self.level.load(Ordering::Relaxed) >= UPKEEP
    }

    /// The right to serve a request now; none while requests are shed and another has it.
    pub fn turn(&self) -> Option<Turn<'_>> {
        if self.level.load(Ordering::Relaxed) < REQUESTS {
            return Some(Turn(None));
        }
        (!self.serving.swap(true, Ordering::AcqRel)).then_some(Turn(Some(&self.serving)))
    }

    /// Looks at the machine at `root`, and says what changes.
    fn look(&self, root: &Root, limits: &Limits) {
        let (hottest, watts) = (machine::hottest(root), machine::watts(root));
        let before = self.level.load(Ordering::Relaxed);
        let after = level(limits, before, hottest.as_ref().map(|(_, degrees)| *degrees), watts);
        if after == before {
            return;
        }
        self.level.store(after, Ordering::Relaxed);
        let zone = hottest
            .map_or("no temperature".to_owned(), |(zone, degrees)| format!("{zone} {degrees} °C"));
        let power = watts.map_or("no power".to_owned(), |watts| format!("{watts:.1} W"));
        let what = ["nothing", "upkeep", "upkeep and all requests but one at a time"];
        log::warn!("{zone}, {power}: shedding {}", what[usize::from(after)]);
    }

    /// Looks every second until `work` is done.
    pub fn watch<T>(&self, root: &Root, limits: &Limits, work: impl FnOnce() -> T) -> T {
        let (done, stopped) = channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                self.look(root, limits);
                while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                    self.look(root, limits);
                }
            });
            let _done = done;
            work()
        })
    }
}

/// What is to be shed, where `before` was until now.
fn level(limits: &Limits, before: u8, celsius: Option<f64>, watts: Option<f64>) -> u8 {
    let over = |value: Option<f64>, max: Option<u32>, shed: bool| {
        let percent = if shed { BACK_PERCENT } else { 100.0 };
        value.zip(max).is_some_and(|(value, max)| value * 100.0 > f64::from(max) * percent)
    };
    let over_any = |celsius_max, watts_max, level| {
        over(celsius, Some(celsius_max), before >= level) || over(watts, watts_max, before >= level)
    };
    if over_any(limits.requests_celsius, limits.requests_watts, REQUESTS) {
        REQUESTS
    } else if over_any(limits.upkeep_celsius, limits.upkeep_watts, UPKEEP) {
        UPKEEP
    } else {
        NOTHING
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        upkeep_celsius: 80,
        requests_celsius: 100,
        upkeep_watts: Some(40),
        requests_watts: None,
    };

    #[test]
    fn upkeep_goes_first_and_comes_back_last() {
        let mut now = NOTHING;
        for (celsius, watts, expected) in [
            (70.0, 10.0, NOTHING),
            (80.0, 40.0, NOTHING),
            (81.0, 10.0, UPKEEP),
            (77.0, 10.0, UPKEEP), // not yet 5 % below
            (101.0, 10.0, REQUESTS),
            (96.0, 10.0, REQUESTS),
            (94.0, 10.0, UPKEEP),
            (75.0, 10.0, NOTHING),
            (60.0, 41.0, UPKEEP),  // power alone
            (60.0, 500.0, UPKEEP), // no limit for requests
            (60.0, 37.0, NOTHING),
        ] {
            now = level(&LIMITS, now, Some(celsius), Some(watts));
            assert_eq!(now, expected, "{celsius} °C, {watts} W");
        }
        assert_eq!(
            level(&LIMITS, REQUESTS, None, None),
            NOTHING,
            "what cannot be read sheds nothing"
        );
    }

    #[test]
    fn one_request_at_a_time_is_served_while_they_are_shed() {
        let shed = Shed::default();
        let (a, b) = (shed.turn(), shed.turn());
        assert!(a.is_some() && b.is_some() && !shed.upkeep());
        shed.level.store(REQUESTS, Ordering::Relaxed);
        drop((a, b));
        let first = shed.turn();
        assert!(first.is_some() && shed.turn().is_none() && shed.upkeep());
        drop(first);
        assert!(shed.turn().is_some());
    }
}
