//! The size and the first bytes of a file. Reads at most `HEADER_BYTES_MAX` bytes, and never
//! allocates more than the file has. Never interprets what it reads.

use std::io::Read;
use std::path::{Path, PathBuf};

use super::error::ImportError;
use crate::limits::HEADER_BYTES_MAX;
use crate::report::input;

/// Returns the size of a regular file.
pub(super) fn file_size(file: &Path) -> Result<u64, ImportError> {
    let size = input::open(file).and_then(|opened| Ok(opened.metadata()?.len()));
    size.map_err(|error| ImportError::io(file, "size", error))
}

/// The first bytes of a file, held in memory.
pub(super) struct Head {
    pub(super) file: PathBuf,
    pub(super) bytes: Vec<u8>,
}

impl Head {
    /// Reads the first `length` bytes. Fails before it allocates memory if the file is shorter.
    pub(super) fn read(file: &Path, length: u64) -> Result<Self, ImportError> {
        let size = file_size(file)?;
        if size == 0 {
            return Err(ImportError::size(file, size, "means that the file is empty"));
        }
        if length > size || length > HEADER_BYTES_MAX {
            let why =
                format!("does not fit a header of {length} bytes (at most {HEADER_BYTES_MAX})");
            return Err(ImportError::size(file, size, why));
        }
        let opened = input::open(file).map_err(|error| ImportError::io(file, "header", error))?;
        let mut bytes = Vec::new();
        opened
            .take(length)
            .read_to_end(&mut bytes)
            .map_err(|error| ImportError::io(file, "header", error))?;
        Ok(Self { file: file.into(), bytes })
    }

    /// Returns `N` bytes from offset `at`.
    pub(super) fn field<const N: usize>(&self, at: usize) -> Result<[u8; N], ImportError> {
        let found = self.bytes.get(at..).and_then(|rest| rest.first_chunk::<N>());
        let why = || format!("ends before the {N}-byte field at {at}");
        found.copied().ok_or_else(|| ImportError::size(&self.file, self.bytes.len() as u64, why()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_header_longer_than_the_file_is_refused_unread() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), [1, 2, 3]).unwrap();
        assert_eq!(Head::read(file.path(), 3).unwrap().bytes, [1, 2, 3]);
        assert!(matches!(Head::read(file.path(), 4), Err(ImportError::Size { size: 3, .. })));
        assert!(matches!(
            Head::read(file.path(), u64::MAX),
            Err(ImportError::Size { size: 3, .. })
        ));
    }

    #[test]
    fn an_absurd_header_is_refused_even_if_the_file_has_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(HEADER_BYTES_MAX + 1).unwrap();
        assert!(matches!(
            Head::read(file.path(), HEADER_BYTES_MAX + 1),
            Err(ImportError::Size { .. })
        ));
    }

    #[test]
    fn fields_outside_the_header_are_refused() {
        let head = Head { file: "x".into(), bytes: vec![1, 0, 0, 0, 9] };
        assert_eq!(head.field::<4>(0).unwrap(), [1, 0, 0, 0]);
        assert!(
            head.field::<4>(2).is_err()
                && head.field::<1>(5).is_err()
                && head.field::<1>(usize::MAX).is_err()
        );
    }

    #[test]
    fn folders_and_missing_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        assert!(file_size(folder.path()).unwrap_err().to_string().contains("not a regular file"));
        assert!(matches!(
            file_size(&folder.path().join("key")),
            Err(ImportError::Io { field: "size", .. })
        ));
    }
}
