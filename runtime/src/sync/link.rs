//! The link to the repository: the one seam that everything fetched passes, and the limits on it. A broken
//! object is asked for again from where it broke; more than was announced or too slow ends the run. Opens no socket: whoever runs the sync brings the link.

use super::error::SyncError;
use crate::limits::{BREAKS_MAX, STALLS_MAX};
use crate::score::Clock;
use serde::Deserialize;
use std::ops::ControlFlow;
use std::time::Duration;

/// Takes the next bytes of an object; `Break` means: no more of it.
pub type Take<'a> = &'a mut dyn FnMut(&[u8]) -> ControlFlow<()>;

/// A way to the repository's files.
pub trait Link {
    /// Hands the object at `path` (relative to the repository) to `take`, from byte `from` on, until it ends or
    /// `take` breaks off.
    ///
    /// # Errors
    /// There is no such object, or the link broke; what was taken until then counts.
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError>;
}

/// Why a link gave no more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// There is no such object.
    #[error("not found")]
    NotFound,
    /// Anything else; asking again later may help.
    #[error("{0}")]
    Broken(String),
}

/// When a car looks for releases, and what that may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkRules {
    /// Minutes from one look to the next; each is up to a quarter earlier or later, so that a fleet spreads.
    pub poll_minutes: u32,
    /// Bytes received on a day. What is under way when they are used up goes on the next day.
    pub bytes_per_day_max: u64,
    /// Bytes a second; 0 for no limit.
    pub bytes_per_s_max: u64,
    /// The hours of the day (UTC) in which it may fetch, from the first to before the second; equal for always.
    pub hours: [u8; 2],
}

impl LinkRules {
    /// Whether it may fetch at `now` (seconds since 1970).
    pub fn is_open(&self, now: u64) -> bool {
        let hour = (now / 3600 % 24) as u8;
        match self.hours {
            [from, to] if from == to => true,
            [from, to] if from < to => (from..to).contains(&hour),
            // Over midnight.
            [from, to] => hour >= from || hour < to,
        }
    }
}

/// What a run may take from its link.
#[derive(Clone, Copy, Debug)]
pub struct LinkLimits {
    /// Bytes in all: from then on no further chunk is begun.
    pub bytes_max: u64,
    /// Bytes a second, over each object...
    pub rate_min: u64,
    /// ...once it has taken this long.
    pub patience: Duration,
}

impl Default for LinkLimits {
    fn default() -> Self {
        Self { bytes_max: u64::MAX, rate_min: 1024, patience: Duration::from_secs(30) }
    }
}

/// Fetches whole objects within the limits.
pub struct Fetcher<'a> {
    link: &'a mut dyn Link,
    clock: &'a dyn Clock,
    limits: LinkLimits,
    bytes: u64,
}

impl<'a> Fetcher<'a> {
    /// A fetcher over `link`; `clock` times it.
    pub fn new(link: &'a mut dyn Link, clock: &'a dyn Clock, limits: LinkLimits) -> Self {
        Self { link, clock, limits, bytes: 0 }
    }

    /// Bytes received so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether another chunk may be begun.
    ///
    /// # Errors
    /// The budget is used up.
    pub fn check_budget(&self) -> Result<(), SyncError> {
        let bytes_max = self.limits.bytes_max;
        if self.bytes < bytes_max { Ok(()) } else { Err(SyncError::Budget { bytes_max }) }
    }

    /// The whole object at `path`, of at most `bytes_max` bytes.
    ///
    /// # Errors
    /// It is not there, is longer, comes too slowly or not at all.
    pub fn get(&mut self, path: &str, bytes_max: u64) -> Result<Vec<u8>, SyncError> {
        let (began, mut content, mut stalls) = (self.clock.now(), Vec::new(), 0);
        for _ in 0..BREAKS_MAX {
            let had = content.len();
            match self.go_on(path, bytes_max, began, &mut content)? {
                Ok(()) => return Ok(content),
                Err(LinkError::NotFound) => return Err(SyncError::NotFound { path: path.to_owned() }),
                Err(LinkError::Broken(_)) if content.len() > had => stalls = 0,
                Err(LinkError::Broken(_)) if stalls < STALLS_MAX => stalls += 1,
                Err(LinkError::Broken(problem)) => {
                    return Err(SyncError::Link { path: path.to_owned(), problem });
                }
            }
        }
        let problem = format!("broke off {BREAKS_MAX} times");
        Err(SyncError::Link { path: path.to_owned(), problem })
    }

    /// Asks once, for what is missing. The outer error ends the run, the inner one is the link's.
    fn go_on(
        &mut self,
        path: &str,
        bytes_max: u64,
        began: Duration,
        content: &mut Vec<u8>,
    ) -> Result<Result<(), LinkError>, SyncError> {
        let (limits, clock, bytes) = (self.limits, self.clock, &mut self.bytes);
        let from = content.len() as u64;
        let mut stop = None;
        let mut take = |piece: &[u8]| {
            *bytes += piece.len() as u64;
            let (got, time) = ((content.len() + piece.len()) as u64, clock.now().saturating_sub(began));
            let path = path.to_owned();
            stop = if got > bytes_max {
                Some(SyncError::EndlessData { path, bytes_max })
            } else if time > limits.patience && got < limits.rate_min.saturating_mul(time.as_secs()) {
                Some(SyncError::SlowRetrieval { path, bytes: got, seconds: time.as_secs() })
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
