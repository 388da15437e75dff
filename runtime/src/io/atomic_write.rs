//! The only way state reaches flash: write beside, sync, rename, sync the directory. After a power
//! cut a file is wholly the old one or wholly the new one.

use crate::io::disk::{Disk, Output};
use std::io;
use std::path::{Path, PathBuf};

/// Where the next content of `path` is written before it is published.
pub fn part_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    PathBuf::from(name)
}

/// The directory that `path` is in.
fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Makes what was written to `part_of(path)` durable and then stand at `path`.
///
/// # Errors
/// The content could not be made durable; `path` is then as it was or, if only the last sync
/// failed, may be either after a power cut.
pub fn publish(disk: &dyn Disk, path: &Path, mut part: Box<dyn Output>) -> io::Result<()> {
    part.sync()?;
    drop(part);
    disk.rename(&part_of(path), path)?;
    disk.sync_dir(directory_of(path))
}

/// Replaces the content of `path`.
///
/// # Errors
/// As `publish`.
pub fn replace(disk: &dyn Disk, path: &Path, content: &[u8]) -> io::Result<()> {
    let mut part = disk.create(&part_of(path))?;
    part.write_all(content)?;
    publish(disk, path, part)
}
