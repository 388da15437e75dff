//! The only way state reaches flash: write beside, fsync, rename, fsync the directory. After a power cut a
//! file is wholly the old one or wholly the new one.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Where the next content of `path` is written before it is published.
pub fn part_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    PathBuf::from(name)
}

/// Makes `part`, already fsynced, stand at `path`.
///
/// # Errors
/// The rename or the fsync of the directory failed.
pub fn publish(part: &Path, path: &Path) -> io::Result<()> {
    fs::rename(part, path)?;
    sync_directory(path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")))
}

/// Makes names created or removed in `directory` durable.
///
/// # Errors
/// The directory cannot be synced.
pub fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// Replaces the content of `path`.
///
/// # Errors
/// The content could not be made durable; `path` is then as it was.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let part = part_of(path);
    let mut file = File::create(&part)?;
    file.write_all(content)?;
    file.sync_all()?;
    publish(&part, path)
}
