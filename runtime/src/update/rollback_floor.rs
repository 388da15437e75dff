//! The rollback floor: the lowest metadata versions and the earliest time that this car accepts. It
//! applies even if the metadata files are lost. The record has two copies, each replaced whole. If
//! both copies are lost, the car accepts no release. A version never goes down, except when a new
//! root revokes the keys that signed it.

use crate::io::disk::Disk;
use crate::io::paired_record::{PairedRecord, Stored};
use crate::limits::FLOOR_BYTES_MAX;
use crate::update::error::UpdateError;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The format of the record.
pub const FLOOR_FORMAT: u32 = 1;
const RECORD: PairedRecord = PairedRecord {
    magic: b"HATCHFLR",
    format: FLOOR_FORMAT,
    names: ["floor.a", "floor.b"],
    bytes_max: FLOOR_BYTES_MAX,
};

/// The record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RollbackFloor {
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

impl RollbackFloor {
    /// Encodes a copy of the record, as write number `writes`.
    pub fn encode(&self, writes: u64) -> Vec<u8> {
        RECORD.encode(writes, self)
    }

    /// Decodes a copy of the record. Returns its number of writes and the record.
    ///
    /// # Errors
    /// A text that describes the problem with `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<(u64, Self), String> {
        RECORD.decode(bytes)
    }

    /// Reads the newest readable copy in `directory`. Returns `None` if no copy exists.
    ///
    /// # Errors
    /// `UpdateError::RollbackFloor` if copies exist and none can be read.
    pub(super) fn read(
        disk: &dyn Disk,
        directory: &Path,
    ) -> Result<Option<Stored<Self>>, UpdateError> {
        RECORD
            .read(disk, directory)
            .map_err(|lost| UpdateError::RollbackFloor { path: lost.path, problem: lost.problem })
    }

    /// Writes one copy after the other, as write number `writes`.
    ///
    /// # Errors
    /// `UpdateError::Io` if a copy cannot be written. The other copy is whole.
    pub fn write(&self, disk: &dyn Disk, directory: &Path, writes: u64) -> Result<(), UpdateError> {
        RECORD
            .write(disk, directory, writes, self)
            .map_err(|(path, source)| UpdateError::Io { path, source })
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
        let floor =
            RollbackFloor { root: 1, timestamp: 700, snapshot: 9, targets: 8, time: 1 << 33 };
        let bytes = floor.encode(3);
        assert_eq!(RollbackFloor::decode(&bytes).unwrap(), (3, floor));
        for bit in 0..bytes.len() * 8 {
            let mut bad = bytes.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(RollbackFloor::decode(&bad).is_err(), "bit {bit}");
        }
        (0..bytes.len()).for_each(|n| assert!(RollbackFloor::decode(&bytes[..n]).is_err()));
    }
}
