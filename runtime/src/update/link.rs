//! The link to a repository: the trait through which every fetched byte passes, and the limits on
//! it. After a break, an object is requested again from the byte at which it broke. An object that
//! is longer or slower than allowed ends the run. This file opens no socket: the caller supplies
//! the link.

use crate::clock::Clock;
use crate::limits::{BREAKS_MAX, STALLS_MAX};
use crate::update::error::UpdateError;
use serde::Deserialize;
use std::ops::ControlFlow;
use std::time::Duration;

const DAY_S: u64 = 24 * 3600;

/// A function that takes the next bytes of an object. `Break` ends the transfer.
pub type Take<'a> = &'a mut dyn FnMut(&[u8]) -> ControlFlow<()>;

/// A source of the objects of a repository.
pub trait Link {
    /// Passes the object at `path` (relative to the repository) to `take`, from byte `from` to its
    /// end, or until `take` returns `Break`.
    ///
    /// # Errors
    /// `NotFound`, `NoRanges` if `from` is not 0 and the server sends whole objects only, or
    /// `Broken`. Bytes that were taken before an error are valid.
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError>;

    /// Returns the full address of the object at `path`, for error messages.
    fn address(&self, path: &str) -> String {
        path.to_owned()
    }
}

/// Why a link stopped a transfer.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The repository has no such object.
    #[error("not found")]
    NotFound,
    /// The server sends whole objects only. Nothing was taken.
    #[error("the server sends whole objects only")]
    NoRanges,
    /// Any other error; another attempt may succeed.
    #[error("{0}")]
    Broken(String),
}

debug_as_display!(LinkError);

/// When a car polls for releases, and how many bytes it may receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkRules {
    /// Minutes between two polls. Each interval varies by up to a quarter, to spread the fleet.
    pub poll_minutes: u32,
    /// Bytes to receive in a day. An interrupted transfer continues on the next day.
    pub bytes_per_day_max: u64,
    /// Bytes a second; 0 for no limit.
    pub bytes_per_s_max: u64,
    /// First hour and end hour (UTC) of the daily window for fetching; equal for always.
    pub hours: [u8; 2],
}

impl LinkRules {
    /// Returns whether `now` (seconds since 1970) is within the hours.
    pub fn is_open(&self, now: u64) -> bool {
        !self.open_for(now).is_zero()
    }

    /// Returns the time from `now` to the end of the hours.
    pub fn open_for(&self, now: u64) -> Duration {
        let [start, end] = self.hours.map(|hour| u64::from(hour) * 3600);
        let elapsed = (now + DAY_S - start) % DAY_S;
        match (end + DAY_S - start) % DAY_S {
            0 => Duration::MAX,
            length => Duration::from_secs(length.saturating_sub(elapsed)),
        }
    }
}

/// Limits of one run on its link.
#[derive(Clone, Copy, Debug)]
pub struct LinkLimits {
    /// Bytes to receive in all. A run at this limit starts no further chunk.
    pub bytes_max: u64,
    /// Time in which the run may start a further chunk.
    pub time_max: Duration,
    /// Bytes a second that the transfer of each object must reach...
    pub rate_min: u64,
    /// ...after this time.
    pub rate_grace: Duration,
}

impl Default for LinkLimits {
    fn default() -> Self {
        Self {
            bytes_max: u64::MAX,
            time_max: Duration::MAX,
            rate_min: 1024,
            rate_grace: Duration::from_secs(30),
        }
    }
}

/// The start of an object's transfer: the time, and the bytes that the run had received.
#[derive(Clone, Copy)]
struct Start {
    time: Duration,
    bytes: u64,
}

/// Fetches whole objects within limits.
pub struct Fetcher<'a> {
    link: &'a mut dyn Link,
    clock: &'a dyn Clock,
    limits: LinkLimits,
    started: Duration,
    bytes: u64,
}

impl<'a> Fetcher<'a> {
    /// Returns a fetcher over `link`, timed by `clock`.
    pub fn new(link: &'a mut dyn Link, clock: &'a dyn Clock, limits: LinkLimits) -> Self {
        Self { link, clock, limits, started: clock.now(), bytes: 0 }
    }

    /// Returns the bytes received so far. Bytes that arrived twice count twice.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the full address of the object at `path`.
    pub fn address(&self, path: &str) -> String {
        self.link.address(path)
    }

    /// Returns `Ok` if the run may start another chunk.
    ///
    /// # Errors
    /// `UpdateError::ByteBudget` or `UpdateError::OutsideHours`.
    pub fn check_limits(&self) -> Result<(), UpdateError> {
        let LinkLimits { bytes_max, time_max, .. } = self.limits;
        if self.bytes >= bytes_max {
            return Err(UpdateError::ByteBudget { bytes_max });
        }
        if self.clock.now().saturating_sub(self.started) < time_max {
            Ok(())
        } else {
            Err(UpdateError::OutsideHours)
        }
    }

    /// Returns the object at `path`, of at most `bytes_max` bytes.
    ///
    /// # Errors
    /// `UpdateError::{NotFound, EndlessData, SlowRetrieval, LinkBroken}`, with the address. Those
    /// of [`Self::check_limits`] if the object must be sent again from its start.
    pub fn get(&mut self, path: &str, bytes_max: u64) -> Result<Vec<u8>, UpdateError> {
        self.get_from(path, 0, bytes_max)
    }

    /// Returns the object at `path`, of `bytes` bytes, as [`Self::get`] does. A body without a
    /// length that ends early is continued; if no more bytes come, it is returned as it is.
    ///
    /// # Errors
    /// Those of [`Self::get`].
    pub fn get_whole(&mut self, path: &str, bytes: u64) -> Result<Vec<u8>, UpdateError> {
        self.get_from(path, bytes, bytes)
    }

    fn get_from(
        &mut self,
        path: &str,
        bytes_min: u64,
        bytes_max: u64,
    ) -> Result<Vec<u8>, UpdateError> {
        let start = Start { time: self.clock.now(), bytes: self.bytes };
        let (mut content, mut longest, mut stalls) = (Vec::new(), 0, 0);

        for _ in 0..BREAKS_MAX {
            let link_error = match self.get_rest(path, bytes_max, start, &mut content) {
                Ok(()) => {
                    let is_whole = content.len() as u64 >= bytes_min;
                    if is_whole || content.len() <= longest || foreign(&content).is_some() {
                        return Ok(content);
                    }
                    LinkError::Broken(format!("the body ended after {} bytes", content.len()))
                }
                Err(Interrupted::Run(error)) => return Err(error),
                Err(Interrupted::Link(error)) => error,
            };
            match link_error {
                LinkError::NotFound => {
                    return Err(UpdateError::NotFound { path: self.address(path) });
                }
                LinkError::NoRanges => {
                    // All bytes come again, so the budget may end here.
                    self.check_limits()?;
                    content.clear();
                }
                // A transfer that gets further than any before is not stalled.
                LinkError::Broken(_) if content.len() > longest => {
                    (longest, stalls) = (content.len(), 0)
                }
                LinkError::Broken(_) if stalls < STALLS_MAX => stalls += 1,
                LinkError::Broken(problem) => {
                    return Err(UpdateError::LinkBroken { path: self.address(path), problem });
                }
            }
        }

        let problem = format!("the transfer broke off {BREAKS_MAX} times; try again later");
        Err(UpdateError::LinkBroken { path: self.address(path), problem })
    }

    /// Returns the metadata at `path`, as [`Self::get`] does.
    ///
    /// # Errors
    /// Those of [`Self::get`], and `UpdateError::LinkBroken` if the answer is HTML, gzip or empty.
    pub fn metadata(&mut self, path: &str, bytes_max: u64) -> Result<Vec<u8>, UpdateError> {
        let content = self.get(path, bytes_max)?;
        match foreign(&content) {
            None => Ok(content),
            Some(problem) => Err(UpdateError::LinkBroken { path: self.address(path), problem }),
        }
    }

    /// Returns the error of an object at `path` whose `content` is not the signed one: what a
    /// portal or a server put in its place is no fault of the release.
    pub fn not_signed(&self, path: &str, content: &[u8]) -> UpdateError {
        let path = self.address(path);
        match foreign(content) {
            None => UpdateError::ArbitrarySoftware { path },
            Some(problem) => UpdateError::LinkBroken { path, problem },
        }
    }

    /// Requests the part of the object after `content`, once.
    fn get_rest(
        &mut self,
        path: &str,
        bytes_max: u64,
        start: Start,
        content: &mut Vec<u8>,
    ) -> Result<(), Interrupted> {
        let (limits, clock, bytes) = (self.limits, self.clock, &mut self.bytes);
        let from = content.len() as u64;
        let mut stop = None;

        let mut take = |piece: &[u8]| {
            *bytes += piece.len() as u64;
            // Bytes that arrive twice count for the rate and for the budget.
            let (received, time) = (*bytes - start.bytes, clock.now().saturating_sub(start.time));
            let is_slow = time > limits.rate_grace
                && received < limits.rate_min.saturating_mul(time.as_secs());

            if (content.len() + piece.len()) as u64 > bytes_max {
                let start = if content.is_empty() { piece } else { &*content };
                // Endless blanks are no page.
                let is_page = !start.trim_ascii().is_empty();
                let foreign = is_page.then(|| foreign(start)).flatten();
                stop = Some(Stop::Endless { foreign });
            } else if is_slow {
                stop = Some(Stop::Slow { bytes: received, seconds: time.as_secs() });
            } else {
                content.extend_from_slice(piece);
                return ControlFlow::Continue(());
            }
            ControlFlow::Break(())
        };
        let done = self.link.get(path, from, &mut take);

        match stop {
            None => done.map_err(Interrupted::Link),
            Some(Stop::Endless { foreign }) => {
                let path = self.address(path);
                Err(Interrupted::Run(match foreign {
                    None => UpdateError::EndlessData { path, bytes_max },
                    Some(problem) => UpdateError::LinkBroken { path, problem },
                }))
            }
            Some(Stop::Slow { bytes, seconds }) => {
                let path = self.address(path);
                Err(Interrupted::Run(UpdateError::SlowRetrieval { path, bytes, seconds }))
            }
        }
    }
}

/// Returns the problem of an answer that begins with `start`, if no repository has an object of
/// such a form: a page of HTML, gzip, or nothing.
fn foreign(start: &[u8]) -> Option<String> {
    let text = start.strip_prefix("\u{feff}".as_bytes()).unwrap_or(start);
    let found = match text.trim_ascii_start() {
        [] => "an empty body",
        [b'<', ..] => "HTML",
        [0x1f, 0x8b, ..] => "gzip",
        _ => return None,
    };
    let advice = "log in at its portal, or correct the server";
    Some(format!("the server answered with {found}, not with the object; {advice}"))
}

/// Why a fetcher ends a transfer.
enum Stop {
    /// The object is too long. `foreign` is the problem if it is the page of a portal.
    Endless {
        foreign: Option<String>,
    },
    Slow {
        bytes: u64,
        seconds: u64,
    },
}

/// Why a transfer is not whole: the link broke it off, or the run ends.
enum Interrupted {
    Link(LinkError),
    Run(UpdateError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hours_end_on_the_second_and_may_span_midnight() {
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
                // The hour, counted from the day on which the window opened.
                let at = if hour < opens.start { hour + 24 } else { hour };
                let left = if opens.contains(&at) { (opens.end - at) * 3600 - 60 } else { 0 };
                assert_eq!(open_for(hours, hour), left, "{hours:?} at {hour}");
                assert_eq!(rules(hours).is_open(hour * 3600), left > 0);
            }
        }
    }
}
