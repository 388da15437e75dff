//! Replaces a file atomically: write `PATH.part`, sync it, rename it to `PATH`, sync the directory.
//! After a power cut the file is the old one or the new one, never a mixture.

use crate::io::disk::{Disk, Output, directory_of};
use std::io;
use std::path::{Path, PathBuf};

/// Returns the path under which the next content of `path` is written before the rename.
pub fn part_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    PathBuf::from(name)
}

/// Makes `part`, the file at `part_of(path)`, durable and renames it to `path`.
///
/// # Errors
/// The disk refused. `path` is then unchanged. If only the last sync failed, `path` may be the old
/// or the new file after a power cut.
pub fn rename_into_place(
    disk: &dyn Disk,
    path: &Path,
    mut part: Box<dyn Output>,
) -> io::Result<()> {
    part.sync()?;
    drop(part);
    disk.rename(&part_of(path), path)?;
    disk.sync_dir(directory_of(path))
}

/// Replaces the content of the file at `path`, or creates the file.
///
/// # Errors
/// The disk refused, with the effects that [`rename_into_place`] describes.
pub fn replace(disk: &dyn Disk, path: &Path, content: &[u8]) -> io::Result<()> {
    let mut part = disk.create(&part_of(path))?;
    part.write_all(content)?;
    rename_into_place(disk, path, part)
}
