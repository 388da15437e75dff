//! The floor: the versions and the time below which nothing is accepted again, whatever becomes of
//! the metadata files. Two copies, each replaced whole; with both gone nothing is accepted. Never
//! goes down, but where a new root takes away the keys that signed it.

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
    /// Counts up with every write: of two copies the higher one is newer.
    pub writes: u64,
    /// Version of the root role's metadata.
    pub root: u64,
    /// Of the timestamp's.
    pub timestamp: u64,
    /// Of the snapshot's.
    pub snapshot: u64,
    /// Of the targets'.
    pub targets: u64,
    /// The newest time that the repository signed, seconds since 1970.
    pub time: u64,
}

impl RollbackFloor {
    /// The bytes of the record.
    pub fn encode(&self) -> Vec<u8> {
        record::encode(MAGIC, FLOOR_FORMAT, self)
    }

    /// Reads a record back.
    ///
    /// # Errors
    /// What is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        record::decode(MAGIC, FLOOR_FORMAT, bytes)
    }

    /// The newest whole copy in `directory` and whether both are it; `None` where there never was
    /// one.
    ///
    /// # Errors
    /// There are copies, and none is whole and can be read.
    pub fn read(disk: &dyn Disk, directory: &Path) -> Result<Option<(Self, bool)>, UpdateError> {
        let (mut whole, mut problem) = (Vec::new(), None);
        for name in COPIES {
            let path = directory.join(name);
            match disk.read(&path).map(|bytes| Self::decode(&bytes)) {
                Ok(Ok(floor)) => whole.push(floor),
                Ok(Err(wrong)) => problem = Some(format!("{name}: {wrong}")),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => problem = Some(format!("{name}: {e}")),
            }
        }
        let alike = whole.len() == COPIES.len() && whole.iter().all(|f| *f == whole[0]);
        match (whole.into_iter().max_by_key(|f| f.writes), problem) {
            (Some(floor), _) => Ok(Some((floor, alike))),
            (None, None) => Ok(None),
            (None, Some(problem)) => {
                Err(UpdateError::Floor { path: directory.to_owned(), problem })
            }
        }
    }

    /// Makes this the record, one copy after the other.
    ///
    /// # Errors
    /// A copy cannot be written; the other one is whole.
    pub fn write(&mut self, disk: &dyn Disk, directory: &Path) -> Result<(), UpdateError> {
        self.writes += 1;
        let bytes = self.encode();
        COPIES.iter().try_for_each(|name| {
            let path = directory.join(name);
            atomic_write::replace(disk, &path, &bytes).map_err(io_error(&path))
        })
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
