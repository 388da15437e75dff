//! Records with two copies, NAME.a and NAME.b. A writer replaces one copy after the other, so at
//! least one copy is whole at any time. Each copy counts the writes; the copy with the higher count
//! is newer. A lost or damaged copy is restored by the next write.

use crate::io::atomic_write;
use crate::io::disk::Disk;
use crate::io::record;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;
use std::path::{Path, PathBuf};

/// A kind of record with two copies.
pub(crate) struct PairedRecord {
    pub magic: &'static [u8; 8],
    pub format: u32,
    /// The names of both copies.
    pub names: [&'static str; 2],
    /// Maximum length of a copy, bytes.
    pub bytes_max: u64,
}

/// The newest readable copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stored<T> {
    pub value: T,
    /// Number of writes so far.
    pub writes: u64,
    /// Both copies hold this value.
    pub is_in_both: bool,
}

/// Copies exist, and none of them can be read.
#[derive(Debug)]
pub(crate) struct Unreadable {
    pub path: PathBuf,
    pub problem: String,
    /// The device refused to read a copy; another attempt may succeed.
    pub is_device: bool,
}

impl PairedRecord {
    /// Returns `value` as the bytes of a copy.
    pub fn encode(&self, writes: u64, value: &impl Serialize) -> Vec<u8> {
        record::encode(self.magic, self.format, &(writes, value))
    }

    /// Decodes a copy to its count of writes and its value.
    ///
    /// # Errors
    /// Describes what is wrong with the bytes.
    pub fn decode<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<(u64, T), String> {
        record::decode(self.magic, self.format, bytes)
    }

    /// Reads the newest readable copy in `directory`. Returns `None` if no copy exists.
    ///
    /// # Errors
    /// [`Unreadable`] if copies exist and none can be read.
    pub fn read<T: DeserializeOwned>(
        &self,
        disk: &dyn Disk,
        directory: &Path,
    ) -> Result<Option<Stored<T>>, Unreadable> {
        let (mut copies, mut unreadable) = (Vec::new(), None);
        for name in self.names {
            let path = directory.join(name);
            let wrong = |problem| Unreadable { path: path.clone(), problem, is_device: false };
            match disk.read(&path, self.bytes_max) {
                Ok(bytes) => match self.decode::<T>(&bytes) {
                    Ok(copy) => copies.push(copy),
                    Err(problem) => unreadable = Some(wrong(problem)),
                },
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => {
                    let is_device = !crate::io::disk::is_damage(&e);
                    unreadable = Some(Unreadable { is_device, ..wrong(e.to_string()) });
                }
            }
        }

        let is_in_both = copies.len() == 2 && copies[0].0 == copies[1].0;
        match (copies.into_iter().max_by_key(|(writes, _)| *writes), unreadable) {
            (Some((writes, value)), _) => Ok(Some(Stored { value, writes, is_in_both })),
            (None, None) => Ok(None),
            (None, Some(unreadable)) => Err(unreadable),
        }
    }

    /// Writes `value` as write number `writes` to one copy after the other.
    ///
    /// # Errors
    /// The path that could not be written, and why. The other copy is whole.
    pub fn write(
        &self,
        disk: &dyn Disk,
        directory: &Path,
        writes: u64,
        value: &impl Serialize,
    ) -> Result<(), (PathBuf, io::Error)> {
        let bytes = self.encode(writes, value);
        if bytes.len() as u64 > self.bytes_max {
            // No read would take it, and the copy that can be read would be gone.
            let problem = format!("{} bytes, over {}", bytes.len(), self.bytes_max);
            return Err((directory.join(self.names[0]), io::Error::other(problem)));
        }
        self.names.iter().try_for_each(|name| {
            let path = directory.join(name);
            atomic_write::replace(disk, &path, &bytes).map_err(|e| (path, e))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::disk::SystemDisk;

    #[test]
    fn the_newer_copy_is_read_whichever_it_is() {
        let names = ["record.a", "record.b"];
        let record = PairedRecord { magic: b"HATCHTST", format: 1, names, bytes_max: 100 };
        for newer in names {
            let folder = tempfile::tempdir().unwrap();
            record.write(&SystemDisk, folder.path(), 1, &7u64).unwrap();
            std::fs::write(folder.path().join(newer), record.encode(2, &8u64)).unwrap();
            let read = record.read::<u64>(&SystemDisk, folder.path()).unwrap();
            assert_eq!(read, Some(Stored { value: 8, writes: 2, is_in_both: false }));
        }
    }
}
