//! Load shedding: what the daemon stops doing when the machine is too hot or draws too much power.
//! First maintenance waits (merges and scrubs). Then one request at a time is served, and the
//! others receive `busy` immediately, so that their callers can fall back. A sensor that cannot be
//! read sheds nothing. The machine throttles its clocks independently of this.

use crate::machine::{self, Root};
use hatchback::targets::Shed as Limits;
use hatchback_server::Gate;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Time between two readings of the sensors.
const SENSOR_INTERVAL: Duration = Duration::from_secs(1);
/// Share of a limit, in per cent, below which a value must fall before the load returns.
const RETURN_PERCENT: f64 = 95.0;

/// How much is shed; each level includes those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
enum Level {
    #[default]
    Nothing,
    Maintenance,
    Requests,
}

impl Level {
    fn from_u8(level: u8) -> Self {
        match level {
            0 => Self::Nothing,
            1 => Self::Maintenance,
            _ => Self::Requests,
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Maintenance => "maintenance",
            Self::Requests => "maintenance and all requests but one at a time",
        }
    }
}

/// How much is shed now.
#[derive(Debug, Default)]
pub struct Shed {
    level: AtomicU8,
    /// Lets one request at a time pass at [`Level::Requests`].
    gate: Arc<Gate>,
    sensors: Mutex<Sensors>,
}

/// The readings of the sensors; `None` where there is no sensor.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sensors {
    /// The temperature of the hottest thermal zone.
    pub celsius: Option<f64>,
    /// The sum of the power rails.
    pub watts: Option<f64>,
}

impl Shed {
    fn set_level(&self, level: Level) {
        self.level.store(level as u8, Ordering::Relaxed);
        self.gate.limit(level >= Level::Requests);
    }

    fn level(&self) -> Level {
        Level::from_u8(self.level.load(Ordering::Relaxed))
    }

    /// Returns whether maintenance must wait.
    pub fn holds_maintenance(&self) -> bool {
        self.level() >= Level::Maintenance
    }

    /// Returns the gate of the requests.
    pub fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Returns what is shed as a number: 0 nothing, 1 maintenance, 2 requests too.
    pub fn level_number(&self) -> u8 {
        self.level() as u8
    }

    /// Returns the newest readings.
    pub fn sensors(&self) -> Sensors {
        *self.sensors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the sensors of the machine at `root`, and logs a change of the level.
    fn read_sensors(&self, root: &Root, limits: &Limits) {
        let (hottest, watts) = (machine::hottest(root), machine::watts(root));
        let (before, celsius) = (self.level(), hottest.as_ref().map(|(_, degrees)| *degrees));
        *self.sensors.lock().unwrap_or_else(PoisonError::into_inner) = Sensors { celsius, watts };
        let after = next_level(limits, before, celsius, watts);
        if after == before {
            return;
        }

        self.set_level(after);
        let zone = hottest
            .map_or("no temperature".to_owned(), |(zone, degrees)| format!("{zone} {degrees} °C"));
        let power = watts.map_or("no power".to_owned(), |watts| format!("{watts:.1} W"));
        log::warn!("{zone}, {power}: shedding {}", after.text());
    }

    /// Runs `work`, and reads the sensors every second until it returns.
    ///
    /// # Errors
    /// `work` fails, or the system gives no thread for the sensors.
    pub fn watch<T>(
        &self,
        root: &Root,
        limits: &Limits,
        work: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<T> {
        let (done, stopped) = channel::<()>();
        std::thread::scope(|scope| {
            let read = move || {
                self.read_sensors(root, limits);
                while stopped.recv_timeout(SENSOR_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    self.read_sensors(root, limits);
                }
            };
            std::thread::Builder::new().name("sensors".to_owned()).spawn_scoped(scope, read)?;
            // Dropped when `work` ends, also by a panic. Otherwise the scope would wait for the
            // thread for ever.
            let _done = done;
            work()
        })
    }
}

/// Returns the level for these readings, where the level was `before`.
fn next_level(limits: &Limits, before: Level, celsius: Option<f64>, watts: Option<f64>) -> Level {
    let is_above = |value: Option<f64>, max: Option<u32>, level: Level| {
        // Without this gap the level would change with every reading near a limit.
        let percent = if before >= level { RETURN_PERCENT } else { 100.0 };
        value.zip(max).is_some_and(|(value, max)| value * 100.0 > f64::from(max) * percent)
    };
    let sheds = |celsius_max, watts_max, level| {
        is_above(celsius, Some(celsius_max), level) || is_above(watts, watts_max, level)
    };

    if sheds(limits.requests_celsius, limits.requests_watts, Level::Requests) {
        Level::Requests
    } else if sheds(limits.maintenance_celsius, limits.maintenance_watts, Level::Maintenance) {
        Level::Maintenance
    } else {
        Level::Nothing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        maintenance_celsius: 80,
        requests_celsius: 100,
        maintenance_watts: Some(40),
        requests_watts: None,
    };

    #[test]
    fn maintenance_is_shed_first_and_returns_last() {
        let mut now = Level::Nothing;
        for (celsius, watts, expected) in [
            (70.0, 10.0, Level::Nothing),
            (80.0, 40.0, Level::Nothing),
            (81.0, 10.0, Level::Maintenance),
            (77.0, 10.0, Level::Maintenance), // not yet 5 % below
            (101.0, 10.0, Level::Requests),
            (96.0, 10.0, Level::Requests),
            (94.0, 10.0, Level::Maintenance),
            (75.0, 10.0, Level::Nothing),
            (60.0, 41.0, Level::Maintenance),  // power alone
            (60.0, 500.0, Level::Maintenance), // no limit for requests
            (60.0, 37.0, Level::Nothing),
        ] {
            now = next_level(&LIMITS, now, Some(celsius), Some(watts));
            assert_eq!(now, expected, "{celsius} °C, {watts} W");
        }
        assert_eq!(
            next_level(&LIMITS, Level::Requests, None, None),
            Level::Nothing,
            "a sensor that cannot be read sheds nothing"
        );
    }

    #[test]
    fn one_request_at_a_time_is_served_while_they_are_shed() {
        let shed = Shed::default();
        shed.set_level(Level::Maintenance);
        assert!(shed.holds_maintenance());
        let (a, b) = (shed.gate().turn(), shed.gate().turn());
        assert!(a.is_some() && b.is_some());
        shed.set_level(Level::Requests);
        let first = shed.gate().turn();
        assert!(first.is_some() && shed.gate().turn().is_none() && shed.holds_maintenance());
    }
}
