//! The rollback floor: the lowest metadata versions and the earliest time that this car accepts.
//! It holds even if the metadata files are lost. The record has two copies, each replaced whole;
//! without either copy the car accepts nothing. A version never goes down, except when a new root
//! revokes the keys that signed it.

use crate::io::atomic_write;
use crate::io::disk::Disk;
use crate::io::record;
use crate::update::error::{UpdateError, io_error};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::Path;

const MAGIC: &[u8; 8] = b"HATCHFLR";
/// The format of the record.
pub const FLOOR_FORMAT: u32 = 1;
const COPIES: [&str; 2] = ["floor.a", "floor.b"];

/// The record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RollbackFloor {
    /// Number of writes. The copy with the higher number is newer.
    pub writes: u64,
    /// Version of the root metadata.
    pub root: u64,
    /// Version of the timestamp metadata.
    pub timestamp: u64,
    /// Version of the snapshot metadata.
    pub snapshot: u64,
    /// Version of the targets metadata.
    pub targets: u64,
    /// Time floor: the newest time that the repository signed, seconds since 1970.
    pub time: u64,
}

/// The newest copy on disk.
pub(super) struct StoredFloor {
    /// The record.
    pub floor: RollbackFloor,
    /// Both copies hold this record.
    pub is_in_both: bool,
}

impl RollbackFloor {
    /// Encodes the record.
    pub fn encode(&self) -> Vec<u8> {
        record::encode(MAGIC, FLOOR_FORMAT, self)
    }

    /// Decodes a record.
    ///
    /// # Errors
    /// What is wrong with `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        record::decode(MAGIC, FLOOR_FORMAT, bytes)
    }

    /// Reads the newest readable copy in `directory`. Returns `None` if no copy exists.
    ///
    /// # Errors
    /// `UpdateError::RollbackFloor` if copies exist and none can be read.
    pub(super) fn read(
        disk: &dyn Disk,
        directory: &Path,
    ) -> Result<Option<StoredFloor>, UpdateError> {
        let (mut readable, mut problem) = (Vec::new(), None);
        for name in COPIES {
            let path = directory.join(name);
            match disk.read(&path).map(|bytes| Self::decode(&bytes)) {
                Ok(Ok(floor)) => readable.push(floor),
                Ok(Err(wrong)) => problem = Some(format!("{name}: {wrong}")),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => problem = Some(format!("{name}: {e}")),
            }
        }

        let is_in_both = readable.len() == COPIES.len() && readable[0] == readable[1];
        match (readable.into_iter().max_by_key(|f| f.writes), problem) {
            (Some(floor), _) => Ok(Some(StoredFloor { floor, is_in_both })),
            (None, None) => Ok(None),
            (None, Some(problem)) => {
                Err(UpdateError::RollbackFloor { path: directory.to_owned(), problem })
            }
        }
    }

    /// Writes one copy after the other.
    ///
    /// # Errors
    /// `UpdateError::Io` if a copy cannot be written. The other copy is whole.
    pub fn write(&mut self, disk: &dyn Disk, directory: &Path) -> Result<(), UpdateError> {
        self.writes = self.writes.saturating_add(1);
        let bytes = self.encode();
        COPIES.iter().try_for_each(|name| {
            let path = directory.join(name);
            atomic_write::replace(disk, &path, &bytes).map_err(io_error(&path))
        })
    }

    /// Returns whether no version and no time of `self` is below that of `other`.
    pub(super) fn is_at_least(&self, other: &Self) -> bool {
        let values = |f: &Self| [f.root, f.timestamp, f.snapshot, f.targets, f.time];
        values(self).into_iter().zip(values(other)).all(|(mine, theirs)| mine >= theirs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_changed_bit_is_refused() {
        let floor = RollbackFloor {
            writes: 3,
            root: 1,
            timestamp: 700,
            snapshot: 9,
            targets: 8,
            time: 1 << 33,
        };
        let bytes = floor.encode();
        assert_eq!(RollbackFloor::decode(&bytes).unwrap(), floor);
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(RollbackFloor::decode(&bad).is_err(), "bit {bit}");
        }
        (0..bytes.len()).for_each(|n| assert!(RollbackFloor::decode(&bytes[..n]).is_err()));
    }
}
