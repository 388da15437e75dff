//! A limit for log lines that callers can cause: one line in ten seconds for each kind of event,
//! with the number of events that had no line. A caller that fails in a loop cannot fill the log.

use hatchback::locks::lock;
use std::fmt::Display;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Time from a line to the next one of the same kind.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// The limit for one kind of event.
#[derive(Debug)]
pub struct LogLimit {
    /// The kind of event, as the log line names it.
    event: &'static str,
    lines: Mutex<Lines>,
}

#[derive(Debug, Default)]
struct Lines {
    last: Option<Instant>,
    /// Events since the last line.
    withheld: u64,
}

impl LogLimit {
    /// Returns a limit that has logged nothing yet.
    pub fn new(event: &'static str) -> Self {
        Self { event, lines: Mutex::default() }
    }

    /// Logs an event, or counts it if the last line is too recent.
    pub fn warn(&self, detail: &dyn Display) {
        let withheld = lock(&self.lines).count(Instant::now());
        match withheld {
            None => {}
            Some(0) => log::warn!("{}: {detail}", self.event),
            Some(n) => log::warn!("{}: {detail}; {n} more since the last such line", self.event),
        }
    }

    /// Logs how many events had no line.
    pub fn end(&self) {
        let withheld = std::mem::take(&mut lock(&self.lines).withheld);
        if withheld > 0 {
            log::warn!("{}: {withheld} more since the last such line", self.event);
        }
    }
}

impl Lines {
    /// Counts an event at `now`. If the event gets a line, returns how many events before it had
    /// none.
    fn count(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.duration_since(last) < LINE_INTERVAL) {
            self.withheld += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.withheld))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_in_ten_seconds_says_how_many_events_had_none() {
        let (mut lines, start) = (Lines::default(), Instant::now());
        let lines_of_40_s: Vec<u64> =
            (0..40_000).filter_map(|ms| lines.count(start + Duration::from_millis(ms))).collect();
        assert_eq!(lines_of_40_s, [0, 9999, 9999, 9999]);
        assert_eq!(lines.withheld, 9999);
    }
}
