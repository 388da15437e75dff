//! Both sides of an update in one process, for a desk and for tests. In the car one process calls
//! `fetch` and another calls `advance`.

use crate::update::error::UpdateError;
use crate::update::history::UpdateState;
use crate::update::host::Host;
use crate::update::link::Fetcher;
use crate::update::release::Release;
use crate::update::status::UpdateStatus;
use crate::update::updater::Updater;

impl Updater {
    /// Fetches and applies releases in turn until the newest is live or the owner must consent.
    /// `now` is in seconds since 1970. `progress` receives the bytes fetched of the current release
    /// and its size.
    ///
    /// # Errors
    /// [`UpdateError`](crate::update::error::UpdateError) for the reason why the run stopped. The
    /// live generation is then the one before the run, or a release on the path to the newest.
    /// `ReleaseFailed` if a release was rejected or rolled back, and `NotInstalled` after a fault
    /// of this car.
    pub fn run(
        &self,
        fetcher: &mut Fetcher<'_>,
        host: &Host<'_>,
        now: u64,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<UpdateStatus, UpdateError> {
        let named = |r: Option<Release>| r.map_or(String::new(), |r| r.generation.to_string());
        loop {
            while self.advance(host, now)? {}
            let before = self.install_status()?;

            self.fetch(fetcher, now, &mut progress)?;
            while self.advance(host, now)? {}

            let (status, install) = (self.status()?, self.install_status()?);
            match (status.state, install.error.clone()) {
                (UpdateState::Committed, _) if install.offer != before.offer => {}
                // What an earlier run reported is in the status.
                (UpdateState::Failed, _) if install.history != before.history => {
                    let is_refused = status.release.as_ref().is_none_or(|r| install.is_refused(r));
                    let release = named(status.release);
                    let reason = status.error.unwrap_or_default();
                    return Err(match is_refused {
                        true => UpdateError::ReleaseFailed { release, reason },
                        false => UpdateError::NotInstalled { release, reason },
                    });
                }
                // The release that was being applied was revoked and rolled back.
                (_, Some(reason)) if before.state.is_active() && !install.state.is_active() => {
                    let release = named(before.release);
                    return Err(UpdateError::ReleaseFailed { release, reason });
                }
                _ => return Ok(status),
            }
        }
    }
}
