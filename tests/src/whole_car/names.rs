//! The paths of a car's files, for the whole simulator: where the simulated directories are, and
//! which files a fault or a hostile process may choose.

use std::path::{Path, PathBuf};

/// The sync directory.
pub const SYNC: &str = "/sync";
/// The flash directory.
pub const FLASH: &str = "/flash";

/// Returns whether `path` is the second copy of a record. Disk faults spare second copies, because
/// the product promises recovery from the loss of one copy only.
pub fn is_second_copy(path: &Path) -> bool {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    name.ends_with(".b") || name.ends_with(".b.part")
}

/// Returns the path of the second copy of the record whose first copy is `path`.
pub fn second_copy_of(path: &Path) -> Option<PathBuf> {
    path.extension().is_some_and(|ending| ending == "a").then(|| path.with_extension("b"))
}

/// Returns whether the hostile process must spare `path`: the sync process's own record of what it
/// accepted. Without it no car recovers without service.
pub fn is_memory_of_sync(path: &Path) -> bool {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    name.starts_with("floor") || name == "root.factory"
}

/// Returns whether `path` holds text, in which one flipped bit may have no effect.
pub fn is_text(path: &Path) -> bool {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    name.ends_with(".json") || name.starts_with("root.")
}

/// Returns whether `path` is in the flash directory.
pub fn is_on_flash(path: &Path) -> bool {
    path.starts_with(FLASH)
}
