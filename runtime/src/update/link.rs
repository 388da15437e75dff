//! The link to the repository: the one seam that everything fetched passes, and the limits on it. A
//! broken object is asked for again from where it broke; more than was announced or too slow ends
//! the run. Opens no socket: whoever runs the sync brings the link.

use crate::limits::{BREAKS_MAX, STALLS_MAX};
use crate::request::worker::Clock;
use crate::update::error::UpdateError;
use serde::Deserialize;
use std::ops::ControlFlow;
use std::time::Duration;

const DAY_S: u64 = 24 * 3600;

/// Takes the next bytes of an object; `Break` means: no more of it.
pub type Take<'a> = &'a mut dyn FnMut(&[u8]) -> ControlFlow<()>;

/// A way to the repository's files.
pub trait Link {
    /// Hands the object at `path` (relative to the repository) to `take`, from byte `from` on,
    /// until it ends or `take` breaks off.
    ///
    /// # Errors
    /// There is no such object, or the link broke; what was taken until then counts. Or it can only
    /// begin anew.
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError>;
}

/// Why a link gave no more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// There is no such object.
    #[error("not found")]
    NotFound,
    /// It gives whole objects only; nothing was taken.
    #[error("begins at the first byte only")]
    NoRanges,
    /// Anything else; asking again later may help.
    #[error("{0}")]
    Broken(String),
}

/// When a car looks for releases, and what that may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkRules {
    /// Minutes from one look to the next; each is up to a quarter earlier or later, so that a fleet
    /// spreads.
    pub poll_minutes: u32,
    /// Bytes received on a day. What is under way when they are used up goes on the next day.
    pub bytes_per_day_max: u64,
    /// Bytes a second; 0 for no limit.
    pub bytes_per_s_max: u64,
    /// The hours of the day (UTC) in which it may fetch, from the first to before the second; equal
    /// for always.
    pub hours: [u8; 2],
}

impl LinkRules {
    /// Whether it may fetch at `now` (seconds since 1970).
    pub fn is_open(&self, now: u64) -> bool {
        !self.open_for(now).is_zero()
    }

    /// How long it may fetch from `now` on.
    pub fn open_for(&self, now: u64) -> Duration {
        let [from, to] = self.hours.map(|hour| u64::from(hour) * 3600);
        let since = (now + DAY_S - from) % DAY_S;
        match (to + DAY_S - from) % DAY_S {
            0 => Duration::MAX,
            length => Duration::from_secs(length.saturating_sub(since)),
        }
    }
}

/// What a run may take from its link.
#[derive(Clone, Copy, Debug)]
pub struct LinkLimits {
    /// Bytes in all: from then on no further chunk is begun.
    pub bytes_max: u64,
    /// For how long it may be used: as above.
    pub open: Duration,
    /// Bytes a second, over each object...
    pub rate_min: u64,
    /// ...once it has taken this long.
    pub patience: Duration,
}

impl Default for LinkLimits {
    fn default() -> Self {
        Self {
            bytes_max: u64::MAX,
            open: Duration::MAX,
            rate_min: 1024,
            patience: Duration::from_secs(30),
        }
    }
}

/// Fetches whole objects within the limits.
pub struct Fetcher<'a> {
    link: &'a mut dyn Link,
    clock: &'a dyn Clock,
    limits: LinkLimits,
    began: Duration,
    bytes: u64,
}

impl<'a> Fetcher<'a> {
    /// A fetcher over `link`; `clock` times it.
    pub fn new(link: &'a mut dyn Link, clock: &'a dyn Clock, limits: LinkLimits) -> Self {
        Self { link, clock, limits, began: clock.now(), bytes: 0 }
    }

    /// Bytes received so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether another chunk may be begun.
    ///
    /// # Errors
    /// The budget is used up, or the time in which it may be.
    pub fn check_limits(&self) -> Result<(), UpdateError> {
        let LinkLimits { bytes_max, open, .. } = self.limits;
        if self.bytes >= bytes_max {
            return Err(UpdateError::Budget { bytes_max });
        }
        if self.clock.now().saturating_sub(self.began) < open {
            Ok(())
        } else {
            Err(UpdateError::Closed)
        }
    }

    /// The whole object at `path`, of at most `bytes_max` bytes.
    ///
    /// # Errors
    /// It is not there, is longer, comes too slowly or not at all.
    pub fn get(&mut self, path: &str, bytes_max: u64) -> Result<Vec<u8>, UpdateError> {
        let since = (self.clock.now(), self.bytes);
        let (mut content, mut most, mut stalls) = (Vec::new(), 0, 0);
        for _ in 0..BREAKS_MAX {
            match self.go_on(path, bytes_max, since, &mut content)? {
                Ok(()) => return Ok(content),
                Err(LinkError::NotFound) => {
                    return Err(UpdateError::NotFound { path: path.to_owned() });
                }
                Err(LinkError::NoRanges) => content.clear(),
                Err(LinkError::Broken(_)) if content.len() > most => {
                    (most, stalls) = (content.len(), 0)
                }
                Err(LinkError::Broken(_)) if stalls < STALLS_MAX => stalls += 1,
                Err(LinkError::Broken(problem)) => {
                    return Err(UpdateError::Link { path: path.to_owned(), problem });
                }
            }
        }
        let problem = format!("broke off {BREAKS_MAX} times");
        Err(UpdateError::Link { path: path.to_owned(), problem })
    }

    /// Asks once, for what is missing. The outer error ends the run, the inner one is the link's.
    fn go_on(
        &mut self,
        path: &str,
        bytes_max: u64,
        (began, before): (Duration, u64),
        content: &mut Vec<u8>,
    ) -> Result<Result<(), LinkError>, UpdateError> {
        let (limits, clock, bytes) = (self.limits, self.clock, &mut self.bytes);
        let from = content.len() as u64;
        let mut stop = None;
        let mut take = |piece: &[u8]| {
            *bytes += piece.len() as u64;
            // What came twice came too.
            let (came, time) = (*bytes - before, clock.now().saturating_sub(began));
            let path = path.to_owned();
            stop = if (content.len() + piece.len()) as u64 > bytes_max {
                Some(UpdateError::EndlessData { path, bytes_max })
            } else if time > limits.patience
                && came < limits.rate_min.saturating_mul(time.as_secs())
            {
                Some(UpdateError::SlowRetrieval { path, bytes: came, seconds: time.as_secs() })
            } else {
                content.extend_from_slice(piece);
                return ControlFlow::Continue(());
            };
            ControlFlow::Break(())
        };
        let done = self.link.get(path, from, &mut take);
        stop.map_or(Ok(done), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hours_end_at_their_second_also_over_midnight() {
        let rules =
            |hours| LinkRules { poll_minutes: 1, bytes_per_day_max: 1, bytes_per_s_max: 0, hours };
        let open_for =
            |hours, hour: u64| rules(hours).open_for(400 * DAY_S + hour * 3600 + 60).as_secs();
        for always in [[0, 24], [5, 5], [24, 0]] {
            assert_eq!(
                (0..24).map(|hour| open_for(always, hour)).min(),
                Some(u64::MAX),
                "{always:?}"
            );
        }
        for (hours, opens) in [([2, 5], 2..5), ([22, 4], 22..28), ([20, 24], 20..24)] {
            for hour in 0..24 {
                // The hour as counted from the day on which they began.
                let at = if hour < opens.start { hour + 24 } else { hour };
                let left = if opens.contains(&at) { (opens.end - at) * 3600 - 60 } else { 0 };
                assert_eq!(open_for(hours, hour), left, "{hours:?} at {hour}");
                assert_eq!(rules(hours).is_open(hour * 3600), left > 0);
            }
        }
    }
}
