//! The sync process of one model: decides when to poll the repository, and polls it. Never opens a
//! model and never makes a release live.

use crate::clock::Clock;
use crate::limits::POLL_RETRY_MAX;
use crate::update::Updater;
use crate::update::error::UpdateError;
use crate::update::link::{Fetcher, Link, LinkLimits, LinkRules};
use crate::update::status::UpdateStatus;
use crate::update::trust::Trust;
use std::time::Duration;

/// When the next poll is due.
pub struct SyncSteps {
    updater: Updater,
    /// The fleet's first root, to provision the sync directory; `None` if it is provisioned.
    root: Option<Vec<u8>>,
    rules: LinkRules,
    /// Time of the next poll on the caller's clock.
    due: Duration,
    /// Number of the last offer that the serving process had finished at a poll.
    finished: u64,
}

impl SyncSteps {
    /// Returns the steps of `updater`. With `root`, the fleet's first root, each poll first
    /// provisions the sync directory. The first poll is due now.
    pub fn new(updater: Updater, root: Option<Vec<u8>>, rules: LinkRules) -> Self {
        Self { updater, root, rules, due: Duration::ZERO, finished: 0 }
    }

    /// Returns the updater.
    pub fn updater(&self) -> &Updater {
        &self.updater
    }

    /// Returns whether a poll is due. `now` is in seconds since 1970. When the serving process has
    /// finished a release, the next one on the path may be fetched, so a poll is due now.
    pub fn is_due(&mut self, clock: &dyn Clock, now: u64) -> bool {
        if self.finished_offer().is_some_and(|offer| offer != self.finished) {
            self.due = self.due.min(clock.now());
        }
        self.due <= clock.now() && self.rules.is_open(now)
    }

    /// Returns the number of the last offer that the serving process took, if the process has
    /// finished that offer.
    fn finished_offer(&self) -> Option<u64> {
        let install = self.updater.install_status().ok()?;
        (!install.state.has_release()).then_some(install.offer)
    }

    /// Polls over `link` and plans the next poll. `random`, from 0 to 1, spreads the polls of cars
    /// that start together. `now` is in seconds since 1970.
    ///
    /// # Errors
    /// Why the poll failed; the next one comes sooner.
    pub fn poll(
        &mut self,
        link: &mut dyn Link,
        clock: &dyn Clock,
        now: u64,
        random: f64,
    ) -> Result<UpdateStatus, UpdateError> {
        self.finished = self.finished_offer().unwrap_or(self.finished);
        let polled = self.fetch(link, clock, now);
        self.due = clock.now() + interval(self.rules, random, polled.is_ok());
        polled
    }

    fn fetch(
        &self,
        link: &mut dyn Link,
        clock: &dyn Clock,
        now: u64,
    ) -> Result<UpdateStatus, UpdateError> {
        if let Some(root) = &self.root {
            Trust::init(self.updater.disk.as_ref(), &self.updater.directory, root)?;
        }
        let bytes_max = self.rules.bytes_per_day_max;
        let left = self.updater.bytes_left(bytes_max, now)?;
        if left == 0 {
            return Err(UpdateError::ByteBudget { bytes_max });
        }

        let time_max = self.rules.open_for(now);
        let limits = LinkLimits { bytes_max: left, time_max, ..LinkLimits::default() };
        self.updater.fetch(&mut Fetcher::new(link, clock, limits), now, |_, _| {})
    }
}

/// Returns the time until the next poll: the target's interval, made longer or shorter by up to a
/// quarter. After an error the time is a sixteenth of that, up to `POLL_RETRY_MAX`: at the start of
/// a drive the link is rarely there yet.
fn interval(rules: LinkRules, random: f64, is_ok: bool) -> Duration {
    let minutes = Duration::from_secs(60 * u64::from(rules.poll_minutes));
    let interval = minutes.mul_f64(0.75 + random / 2.0);
    if is_ok { interval } else { (interval / 16).min(POLL_RETRY_MAX) }
}
