//! A second front door in the same process, whose model never changes. Callers take turns between
//! it and the front door that is measured, so that a machine that becomes slower or faster changes
//! both. Never swaps.

use super::front_door::{Daemon, RULES, call_grpc};
use crate::load::CallTotals;
use crate::results::open_files;
use anyhow::Result;
use hatchback::Flash;
use hatchback::model::budget::Budget;
use hyper::body::Bytes;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time of one turn at the front door that is measured, and at the control.
const TURN: Duration = Duration::from_millis(250);

/// The second front door.
pub struct Control {
    daemon: Daemon,
    budget: Budget,
}

/// What callers measured at both front doors.
pub struct Turns {
    pub measured: CallTotals,
    pub control: CallTotals,
    /// Least number of open files after a turn. During a swap two generations have files open.
    pub open_files: u64,
}

impl Default for Turns {
    fn default() -> Self {
        let (measured, control) = (CallTotals::default(), CallTotals::default());
        Self { measured, control, open_files: u64::MAX }
    }
}

impl Control {
    /// Serves the model on `flash`.
    ///
    /// # Errors
    /// The model is refused.
    pub fn new(flash: &Flash, budget: Budget) -> Result<Self> {
        Ok(Self { daemon: Daemon::new(flash, budget)?, budget })
    }

    /// Returns the bytes of memory that its model takes.
    pub fn bytes(&self) -> u64 {
        self.daemon.serving.memory_taken()
    }

    /// Runs `work` beside the second front door.
    ///
    /// # Errors
    /// The socket cannot be bound, or the work fails.
    pub fn serve<T>(&self, work: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
        self.daemon.serve(RULES, Vec::new(), self.budget, work)
    }
}

/// The sockets of the front door that is measured and of the control.
#[derive(Clone, Copy)]
pub struct Sockets<'a> {
    pub measured: &'a Path,
    pub control: &'a Path,
}

impl Sockets<'_> {
    /// Calls both front doors in turns for `time`, as `clients` callers. Calls each at least once.
    ///
    /// # Errors
    /// A connection ends, or the system does not tell how many files are open.
    pub fn call(&self, messages: &[Bytes], clients: u32, time: Duration) -> Result<Turns> {
        let (mut turns, start) = (Turns::default(), Instant::now());
        loop {
            let ways = [(self.measured, &mut turns.measured), (self.control, &mut turns.control)];
            for (socket, totals) in ways {
                let called = call_grpc(socket, messages, clients, TURN.min(time / 2))?;
                totals.add_later(&called);
            }
            turns.open_files = turns.open_files.min(open_files()?);
            if start.elapsed() >= time {
                return Ok(turns);
            }
        }
    }
}

impl Turns {
    /// Adds later turns.
    pub fn add(&mut self, later: &Self) {
        self.measured.add_later(&later.measured);
        self.control.add_later(&later.control);
        self.open_files = self.open_files.min(later.open_files);
    }

    /// Returns the p50 of the front door that is measured, as a multiple of the control's; NaN
    /// without an answer of both.
    pub fn p50_share(&self) -> f64 {
        self.measured.p50_us() / self.control.p50_us()
    }
}
