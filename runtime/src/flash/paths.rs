//! The names of the files in a flash directory, and the kind that a segment file must be of. Never
//! touches a disk.

use crate::bundle::manifest::Generation;
use crate::flash::error::FlashError;
use crate::flash::segment::{Part, SegmentKind};
use crate::schema::Schema;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// Returns the path of the lock file.
pub(super) fn lock_path(directory: &Path) -> PathBuf {
    directory.join("lock")
}

/// Returns the folder of the generation with `sequence` after `rebuilds` rebuilds. A rebuild has
/// folders of its own, so it never writes over a file of the generation that it replaces, unless
/// both copies of the live record were lost.
pub(super) fn folder_of(directory: &Path, rebuilds: u64, sequence: u64) -> PathBuf {
    directory.join(match rebuilds {
        0 => format!("g{sequence:012}"),
        rebuilds => format!("g{sequence:012}-{rebuilds}"),
    })
}

/// Returns true if `path` has the name of a generation's folder, as [`folder_of`] makes it.
pub(super) fn is_generation_folder(path: &Path) -> bool {
    let name = path.file_name().and_then(OsStr::to_str).and_then(|name| name.strip_prefix('g'));
    let are_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    name.is_some_and(|name| {
        let (sequence, rebuilds) = name.split_once('-').unwrap_or((name, "0"));
        sequence.len() >= 12 && are_digits(sequence) && !rebuilds.is_empty() && are_digits(rebuilds)
    })
}

/// Returns the file name of a segment of table `number`.
pub(super) fn segment_name(number: usize, serial: u32) -> String {
    format!("t{number:04}-{serial:04}.seg")
}

/// Returns the file name of the unfinished base that a merge with the input hash `hex` writes.
pub(super) fn part_name(number: usize, hex: &str) -> String {
    format!("t{number:04}-{hex}.part")
}

/// Returns the file name of the hot list of table `number`.
pub(super) fn hot_name(number: usize) -> String {
    format!("t{number:04}.hot")
}

/// Returns the kind of segment `serial` of table `number` that `generation` brought.
///
/// # Errors
/// [`FlashError::Field`] if the table's unit does not fit its codec.
pub(super) fn kind_of(
    generation: &Generation,
    serial: u32,
    schema: &Schema,
    number: usize,
    part: Part,
    path: &Path,
) -> Result<SegmentKind, FlashError> {
    SegmentKind::new(generation, serial, number, &schema.tables[number], part).ok_or_else(|| {
        FlashError::field(path, "unit_exp", format!("table {number} does not fit its codec"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_of_generations_have_such_names() {
        let directory = Path::new("flash");
        for number in [0, 7, u64::MAX] {
            assert!(is_generation_folder(&folder_of(directory, 0, number)), "{number}");
            assert!(is_generation_folder(&folder_of(directory, number, 7)), "{number}");
        }
        let others =
            ["g", "g7", "garage", "g00000000000x", "h000000000007", "g000000000007-", "lock"];
        for other in others {
            assert!(!is_generation_folder(&directory.join(other)), "{other}");
        }
    }
}
