//! Records with two copies, NAME.a and NAME.b. A writer replaces one copy after the other, so at
//! least one copy is whole at any time. Each copy counts the writes; the copy with the higher count
//! is newer. A lost or damaged copy is restored by the next write.

use crate::io::atomic_write;
use crate::io::disk::{Disk, is_damage};
use crate::io::record;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::{Path, PathBuf};

/// The newest readable copy; the default stands for none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stored<T> {
    /// The record.
    pub value: T,
    /// Number of writes so far.
    pub writes: u64,
    /// Both copies hold this value.
    pub is_in_both: bool,
}

/// The system refused to read or write a copy.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}", path = path.display())]
#[allow(missing_docs)]
pub struct CopyError {
    pub path: PathBuf,
    pub source: io::Error,
}

/// Copies exist, and none of them can be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Unreadable {
    /// The device refused to read a copy; another attempt may succeed.
    #[error(transparent)]
    Device(CopyError),
    #[error("{path}: {problem}", path = path.display())]
    Damaged { path: PathBuf, problem: String },
}

/// A record with two copies.
pub trait PairedRecord: Serialize + DeserializeOwned {
    /// The first bytes of a copy.
    const MAGIC: &'static [u8; 8];
    /// The number of the format.
    const FORMAT: u32;
    /// The names of both copies.
    const NAMES: [&'static str; 2];
    /// Maximum length of a copy, bytes.
    const BYTES_MAX: u64;

    /// Returns the record as the bytes of a copy, as write number `writes`.
    fn encode(&self, writes: u64) -> Vec<u8> {
        record::encode(Self::MAGIC, Self::FORMAT, &(writes, self))
    }

    /// Decodes a copy to its count of writes and the record.
    ///
    /// # Errors
    /// Describes what is wrong with the bytes.
    fn decode(bytes: &[u8]) -> Result<(u64, Self), String> {
        record::decode(Self::MAGIC, Self::FORMAT, bytes)
    }

    /// Reads the newest readable copy in `directory`. Returns `None` if no copy exists.
    ///
    /// # Errors
    /// [`Unreadable`] if copies exist and none can be read.
    fn load(disk: &dyn Disk, directory: &Path) -> Result<Option<Stored<Self>>, Unreadable> {
        let (mut copies, mut unreadable) = (Vec::new(), None);
        for name in Self::NAMES {
            let path = directory.join(name);
            let problem = match disk.read(&path, Self::BYTES_MAX) {
                Ok(bytes) => match Self::decode(&bytes) {
                    Ok(copy) => {
                        copies.push(copy);
                        continue;
                    }
                    Err(problem) => problem,
                },
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) if is_damage(&e) => e.to_string(),
                Err(source) => {
                    unreadable = Some(Unreadable::Device(CopyError { path, source }));
                    continue;
                }
            };
            // A copy that the device refuses may be whole, whatever the other one is.
            if !matches!(unreadable, Some(Unreadable::Device(_))) {
                unreadable = Some(Unreadable::Damaged { path, problem });
            }
        }

        let is_in_both = copies.len() == 2 && copies[0].0 == copies[1].0;
        match (copies.into_iter().max_by_key(|(writes, _)| *writes), unreadable) {
            (Some((writes, value)), _) => Ok(Some(Stored { value, writes, is_in_both })),
            (None, None) => Ok(None),
            (None, Some(unreadable)) => Err(unreadable),
        }
    }

    /// Reads the newest readable copy like [`Self::load`]. Returns `None` also if the copies are
    /// damaged, and logs `effect`.
    ///
    /// # Errors
    /// [`CopyError`] if the device refused to read a copy.
    fn load_undamaged(
        disk: &dyn Disk,
        directory: &Path,
        effect: &str,
    ) -> Result<Option<Stored<Self>>, CopyError> {
        match Self::load(disk, directory) {
            Ok(stored) => Ok(stored),
            Err(Unreadable::Device(error)) => Err(error),
            Err(damaged) => {
                log::warn!("{damaged}; {effect}");
                Ok(None)
            }
        }
    }

    /// Writes the record to one copy after the other, as write number `writes`. A number is used
    /// once, even if the write fails: two copies of one number would count as equal.
    ///
    /// # Errors
    /// [`CopyError`] if a copy cannot be written. The other copy is whole.
    fn store(&self, disk: &dyn Disk, directory: &Path, writes: u64) -> Result<(), CopyError> {
        let bytes = self.encode(writes);
        if bytes.len() as u64 > Self::BYTES_MAX {
            // No read would take it, and the copy that can be read would be gone.
            let problem = format!("{} bytes, over {}", bytes.len(), Self::BYTES_MAX);
            let path = directory.join(Self::NAMES[0]);
            return Err(CopyError { path, source: io::Error::other(problem) });
        }
        for name in Self::NAMES {
            let path = directory.join(name);
            atomic_write::replace(disk, &path, &bytes)
                .map_err(|source| CopyError { path, source })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::disk::SystemDisk;
    use serde::Deserialize;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Number(u64);

    impl PairedRecord for Number {
        const MAGIC: &'static [u8; 8] = b"HATCHTST";
        const FORMAT: u32 = 1;
        const NAMES: [&'static str; 2] = ["record.a", "record.b"];
        const BYTES_MAX: u64 = 100;
    }

    #[test]
    fn the_newer_copy_is_read_whichever_it_is() {
        for newer in Number::NAMES {
            let folder = tempfile::tempdir().unwrap();
            Number(7).store(&SystemDisk, folder.path(), 1).unwrap();
            std::fs::write(folder.path().join(newer), Number(8).encode(2)).unwrap();
            let read = Number::load(&SystemDisk, folder.path()).unwrap();
            assert_eq!(read, Some(Stored { value: Number(8), writes: 2, is_in_both: false }));
        }
    }
}
