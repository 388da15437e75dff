//! Where an update is: one record, replaced whole at every step, that both sides of a sync read and
//! write under the lock of the sync directory. Every state is entered again after a stop as if for
//! the first time. Never says what is live: that is the live record's alone.

use crate::io::atomic_write;
use crate::io::disk::Disk;
use crate::io::record;
use crate::maintenance::wear::Wear;
use crate::update::error::{UpdateError, io_error};
use crate::update::release::Release;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::ErrorKind::NotFound;
use std::path::Path;

const MAGIC: &[u8; 8] = b"HATCHUPD";
/// The format of the record.
pub const STATUS_FORMAT: u32 = 1;
/// Steps that are remembered.
pub const HISTORY_MAX: usize = 64;

/// The states of an update.
///
/// ```text
/// Idle -> Notified -> Fetching -> Staged -> [AwaitConsent] -> Applying -> Probation -> Committed
///             ^           |          |                           |           |
///             +--- Failed <----------+------- Failed <-----------+--- RollingBack
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UpdateState {
    /// Nothing is to be done: what is live is the newest that can be reached.
    #[default]
    Idle,
    /// A release was found that leads forward.
    Notified,
    /// It is being fetched.
    Fetching,
    /// Its bundle lies beside the live generation, proved.
    Staged,
    /// The owner is to agree.
    AwaitConsent,
    /// It is being laid on flash, probed and made live.
    Applying,
    /// It is live and watched.
    Probation,
    /// It has proved itself.
    Committed,
    /// It has not: the generation before becomes live again.
    RollingBack,
    /// The last attempt ended; `error` says why. The next one begins anew with what was fetched.
    Failed,
}

impl UpdateState {
    /// Whether the side that fetches has the update in hand; else it is the side that serves.
    pub fn is_fetching(self) -> bool {
        matches!(
            self,
            Self::Idle | Self::Notified | Self::Fetching | Self::Committed | Self::Failed
        )
    }
}

impl fmt::Display for UpdateState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "idle",
            Self::Notified => "notified",
            Self::Fetching => "fetching",
            Self::Staged => "staged",
            Self::AwaitConsent => "await-consent",
            Self::Applying => "applying",
            Self::Probation => "probation",
            Self::Committed => "committed",
            Self::RollingBack => "rolling-back",
            Self::Failed => "failed",
        })
    }
}

/// A step that was taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateEvent {
    /// When, seconds since 1970.
    pub at: u64,
    /// The state that was entered.
    pub state: UpdateState,
    /// The release in hand.
    pub release: Option<String>,
    /// Why, where there is something to say.
    pub note: Option<String>,
}

/// The record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpdateStatus {
    /// Where the update is.
    pub state: UpdateState,
    /// When this was written, seconds since 1970.
    pub at: u64,
    /// What was live then.
    pub live: Option<String>,
    /// The release in hand.
    pub release: Option<Release>,
    /// The highest sequence that the repository lists.
    pub newest: Option<u64>,
    /// The live release was taken back: it is listed no more, and nothing newer is there yet.
    pub withdrawn: bool,
    /// Why the last attempt ended, or what it waits for.
    pub error: Option<String>,
    /// Bytes that the last run received.
    pub bytes_received: u64,
    /// Bytes received, by day.
    pub received: Wear,
    /// Processes that began while this release was being applied or on probation and did not end
    /// cleanly.
    pub starts: u32,
    /// The last steps, oldest first.
    pub history: Vec<UpdateEvent>,
}

impl UpdateStatus {
    /// The record in `directory`: the default where there is none, and where it is damaged, which
    /// it then says; the bytes of that day then count as received.
    ///
    /// # Errors
    /// It may be there and whole, and cannot be read now.
    pub fn read(disk: &dyn Disk, directory: &Path) -> Result<Self, UpdateError> {
        let path = directory.join("status");
        let bytes = match disk.read(&path) {
            Err(e) if e.kind() == NotFound => return Ok(Self::default()),
            read => read.map_err(io_error(&path))?,
        };
        Ok(Self::decode(&bytes).unwrap_or_else(|problem| {
            let error = Some(format!("{}: {problem}", path.display()));
            Self { error, received: Wear::unknown(), ..Self::default() }
        }))
    }

    /// Makes this the record.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, disk: &dyn Disk, directory: &Path) -> Result<(), UpdateError> {
        let path = directory.join("status");
        atomic_write::replace(disk, &path, &self.encode()).map_err(io_error(&path))
    }

    /// Enters `state`; to be written then.
    pub fn enter(&mut self, state: UpdateState, now: u64, note: Option<String>) {
        let release = self.release.as_ref().map(|r| r.generation.to_string());
        (self.state, self.at) = (state, now);
        self.error = note
            .clone()
            .filter(|_| matches!(state, UpdateState::Failed | UpdateState::RollingBack));
        // A link that fails every hour is one step with the last time.
        let again = |e: &UpdateEvent| e.state == state && e.release == release && e.note == note;
        match self.history.last_mut() {
            Some(last) if again(last) => last.at = now,
            _ => self.history.push(UpdateEvent { at: now, state, release, note }),
        }
        let over = self.history.len().saturating_sub(HISTORY_MAX);
        self.history.drain(..over);
    }

    /// The bytes of the record.
    pub fn encode(&self) -> Vec<u8> {
        record::encode(MAGIC, STATUS_FORMAT, self)
    }

    /// Reads a record back.
    ///
    /// # Errors
    /// What is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        record::decode(MAGIC, STATUS_FORMAT, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_changed_bit_is_refused() {
        let event = UpdateEvent {
            at: 5,
            state: UpdateState::Staged,
            release: Some("m 7".to_owned()),
            note: None,
        };
        let status = UpdateStatus {
            state: UpdateState::Probation,
            starts: 3,
            history: vec![event],
            ..UpdateStatus::default()
        };
        let bytes = status.encode();
        assert_eq!(UpdateStatus::decode(&bytes).unwrap(), status);
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(UpdateStatus::decode(&bad).is_err(), "bit {bit}");
        }
    }
}
