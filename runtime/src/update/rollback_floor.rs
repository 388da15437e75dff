//! The rollback floor: the lowest metadata versions and the earliest time that this car accepts. It
//! applies even if the metadata files are lost. The record has two copies, each replaced whole. If
//! both copies are lost, the car accepts no release. A version never goes down, except when a new
//! root revokes the keys that signed it.

use crate::io::disk::Disk;
use crate::io::paired_record::{CopyError, PairedRecord, Stored, Unreadable};
use crate::limits::FLOOR_BYTES_MAX;
use crate::update::error::UpdateError;
use serde::{Deserialize, Serialize};
use std::path::Path;

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

impl PairedRecord for RollbackFloor {
    const MAGIC: &'static [u8; 8] = b"HATCHFLR";
    const FORMAT: u32 = 1;
    const NAMES: [&'static str; 2] = ["floor.a", "floor.b"];
    const BYTES_MAX: u64 = FLOOR_BYTES_MAX;
}

impl RollbackFloor {
    /// Reads the newest readable copy in `directory`. Returns `None` if no copy exists.
    ///
    /// # Errors
    /// `UpdateError::RollbackFloor` if copies exist and none can be read.
    pub(super) fn read(
        disk: &dyn Disk,
        directory: &Path,
    ) -> Result<Option<Stored<Self>>, UpdateError> {
        Self::load(disk, directory).map_err(|unreadable| {
            let (path, problem) = match unreadable {
                Unreadable::Damaged { path, problem } => (path, problem),
                Unreadable::Device(CopyError { path, source }) => (path, source.to_string()),
            };
            UpdateError::RollbackFloor { path, problem }
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
