//! Both sides of an update in one process, for a desk and for tests. In the car two processes call
//! `fetch` and `advance` themselves.

use crate::update::apply::Host;
use crate::update::error::UpdateError;
use crate::update::link::Fetcher;
use crate::update::state::{UpdateState, UpdateStatus};
use crate::update::updater::Updater;

impl Updater {
    /// Fetches and applies releases in turn until the newest is live or the owner must consent.
    /// `now` is in seconds since 1970. `progress` receives the bytes fetched of the current release
    /// and its size.
    ///
    /// # Errors
    /// Why the run stopped. The live generation is the one before the run, or a release on the path
    /// to the newest. `UpdateError::ReleaseFailed` if a release was not installed or rolled back.
    pub fn run(
        &self,
        fetcher: &mut Fetcher<'_>,
        host: &Host<'_>,
        now: u64,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<UpdateStatus, UpdateError> {
        loop {
            while self.advance(host, now)? {}

            let status = self.fetch(fetcher, now, &mut progress)?;
            if status.state != UpdateState::Staged && status.state != UpdateState::RollingBack {
                return Ok(status);
            }

            while self.advance(host, now)? {}

            let status = self.status()?;
            match status.state {
                UpdateState::Committed => {}
                UpdateState::Failed => {
                    let release = status.release.map(|r| r.generation.to_string());
                    return Err(UpdateError::ReleaseFailed {
                        release: release.unwrap_or_default(),
                        reason: status.error.unwrap_or_default(),
                    });
                }
                _ => return Ok(status),
            }
        }
    }
}
