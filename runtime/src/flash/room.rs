//! The room of a flash directory: which files a generation uses, and which go first if a release
//! needs their room.

use crate::bundle::manifest::{hex, sha256};
use crate::flash::error::{FlashError, SPARE_BYTES, io_error};
use crate::flash::live::{LiveRecord, SegmentRef};
use crate::flash::paths::{folder_of, hot_name, is_generation_folder, part_name, segment_name};
use crate::flash::segment::SEGMENT_FORMAT;
use crate::io::disk::Disk;
use crate::io::paired_record::{PairedRecord, Stored};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Makes room for `bytes` more. Removes first what no generation uses, then unfinished merges, the
/// generation before the live one, and at last the live one unless it is `servable`. Removes no
/// merge and no generation if there would be too little room all the same.
///
/// # Errors
/// [`FlashError::Space`] if that is not enough, [`FlashError::Io`] if the device refuses.
pub(super) fn make_room(
    disk: &dyn Disk,
    directory: &Path,
    before: &mut Option<Stored<LiveRecord>>,
    bytes: u64,
    servable: bool,
) -> Result<(), FlashError> {
    reclaim(disk, directory, before.as_ref().map(|before| &before.value));
    let (Some(Stored { value, writes, .. }), Err(FlashError::Space { needed, free, .. })) =
        (before, check_space(disk, directory, bytes))
    else {
        return check_space(disk, directory, bytes);
    };

    let alone = LiveRecord { previous: None, ..value.clone() };
    let (used, kept) = (used_files(directory, value), used_files(directory, &alone));
    let previous_bytes = bytes_of(disk, used.difference(&kept));
    // To remove a served generation would make no room: open files keep their space until they
    // close. And after a power cut, or if the new one is refused, the car would have nothing to
    // serve.
    let live_bytes = if servable { 0 } else { bytes_of(disk, kept.iter()) };
    let generation_bytes = previous_bytes + live_bytes;
    let merges: Vec<PathBuf> = compaction_parts(directory, value).collect();
    if free + bytes_of(disk, merges.iter()) + generation_bytes < needed {
        return check_space(disk, directory, bytes);
    }

    // A merge costs only time. One in progress keeps its room until it finds its file gone.
    merges.iter().for_each(|part| drop(disk.remove_file(part)));
    let free = disk.free_bytes(directory).map_err(io_error(directory))?;
    if free + generation_bytes < needed {
        return check_space(disk, directory, bytes);
    }

    if free < needed && value.previous.is_some() {
        // The record lets go first, because a rollback to missing files would leave nothing to
        // serve.
        *writes += 1;
        alone.store(disk, directory, *writes)?;
        *value = alone;
        reclaim(disk, directory, Some(value));
    }
    if free + previous_bytes < needed {
        reclaim(disk, directory, None);
    }
    check_space(disk, directory, bytes)
}

/// Returns the sum of the lengths of the files `paths`. A file that does not open counts as empty.
fn bytes_of<'a>(disk: &dyn Disk, paths: impl Iterator<Item = &'a PathBuf>) -> u64 {
    let bytes = |path: &PathBuf| disk.open_pages(path).and_then(|file| file.bytes()).unwrap_or(0);
    paths.map(bytes).sum()
}

/// Checks that the file system of `directory` has room for `bytes` more.
///
/// # Errors
/// [`FlashError::Space`] if it has not, [`FlashError::Io`] if the device refuses.
pub(crate) fn check_space(disk: &dyn Disk, directory: &Path, bytes: u64) -> Result<(), FlashError> {
    let needed = bytes.saturating_add(SPARE_BYTES);
    let free = disk.free_bytes(directory).map_err(io_error(directory))?;
    if needed <= free {
        Ok(())
    } else {
        Err(FlashError::Space { path: directory.to_owned(), needed, free })
    }
}

/// Returns the path at which a compaction of the live table `number` writes the unfinished base.
pub(super) fn compaction_part(directory: &Path, record: &LiveRecord, number: usize) -> PathBuf {
    let LiveRecord { live, rebuilds, .. } = record;
    let inputs = (SEGMENT_FORMAT, &live.generation, &live.manifest, &live.tables[number]);
    let Ok(encoded) = postcard::to_allocvec(&inputs) else {
        unreachable!("strings and integers in memory always encode")
    };

    let hash = hex(&sha256(&encoded)[..8]);
    let folder = folder_of(directory, *rebuilds, live.generation.sequence);
    folder.join(part_name(number, &hash))
}

/// Returns the paths of the unfinished bases of compactions of the live generation.
fn compaction_parts(directory: &Path, record: &LiveRecord) -> impl Iterator<Item = PathBuf> {
    let tables = 0..record.live.tables.len();
    tables.map(|number| compaction_part(directory, record, number))
}

/// Returns the paths of all files that the live or the previous generation uses.
fn used_files(directory: &Path, record: &LiveRecord) -> BTreeSet<PathBuf> {
    let folder = |sequence| folder_of(directory, record.rebuilds, sequence);
    let mut used = BTreeSet::new();

    for state in std::iter::once(&record.live).chain(&record.previous) {
        let own = folder(state.generation.sequence);
        used.extend(["manifest", "dense.onnx", "probe"].map(|name| own.join(name)));
        for (number, table) in state.tables.iter().enumerate() {
            used.extend(table.hot.map(|hot| folder(hot.sequence).join(hot_name(number))));
            let path = |of: SegmentRef| folder(of.sequence).join(segment_name(number, of.serial));
            used.extend(table.segments().map(|(of, _)| path(of)));
        }
    }
    used
}

/// Removes the files of `directory` that no generation in `record` uses, and no compaction of the
/// live one. Without a record it removes the files of all generations.
pub(super) fn reclaim(disk: &dyn Disk, directory: &Path, record: Option<&LiveRecord>) {
    let mut used = record.map(|record| used_files(directory, record)).unwrap_or_default();
    used.extend(record.into_iter().flat_map(|record| compaction_parts(directory, record)));
    let folders = disk.list(directory).unwrap_or_default();

    for folder in folders.iter().filter(|path| is_generation_folder(path)) {
        // A folder that cannot be listed now is listed by the next `reclaim`.
        let files = disk.list(folder).unwrap_or_default();
        let (keep, drop): (Vec<_>, Vec<_>) = files.into_iter().partition(|f| used.contains(f));
        let removed = drop.iter().try_for_each(|f| disk.remove_file(f));
        let removed =
            removed.and_then(|()| if keep.is_empty() { disk.remove_dir(folder) } else { Ok(()) });
        if let Err(e) = removed {
            let folder = folder.display();
            log::warn!("{folder}: unused files were not removed and still take space: {e}");
        }
    }
}
