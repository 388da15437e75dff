//! The synthetic table as segments on flash, in the form that `pack` and an install write. Never
//! measures.

use super::data::Data;
use anyhow::{Context, Result};
use hatchback::Codec;
use hatchback::bundle::manifest::Generation;
use hatchback::flash::segment::writer::SegmentWriter;
use hatchback::flash::segment::{Counts, Part, Segment, SegmentKind};
use hatchback::flash::table::TableRows;
use hatchback::io::disk::Disk;
use hatchback::schema::{KeySpace, MissPolicy, Placement, Table};
use std::path::Path;
use std::sync::Arc;

/// Appends a row under its order.
pub type Put<'a> = &'a mut dyn FnMut(u64, &[u8]) -> Result<()>;

fn name(path: &Path) -> String {
    path.display().to_string()
}

/// Returns the kind of a segment of the table. The compacted segment reuses the base's kind,
/// because the bench never opens it.
///
/// # Errors
/// The row does not fit its codec.
pub fn kind(data: &Data, part: Part) -> Result<SegmentKind> {
    let dim = data.row_bytes as u32 / 2;
    let table = Table {
        name: "rows".to_owned(),
        dim,
        keys: KeySpace::Sparse,
        rows: data.rows,
        codec: Codec::F16,
        unit_exp: 0,
        placement: Placement::Cached,
        miss: MissPolicy::Wait,
        default_row: vec![0.0; dim as usize],
    };
    let sequence = match part {
        Part::Base => 1,
        Part::Delta => 2,
    };
    let generation = Generation { lineage: "bench".to_owned(), sequence };
    SegmentKind::new(&generation, 0, 0, &table, part).context("the row does not fit its codec")
}

/// Writes the rows that `each` puts to a segment and syncs the file. The caller syncs the
/// directory.
///
/// # Errors
/// The file cannot be written.
pub fn write(
    disk: &dyn Disk,
    path: &Path,
    data: &Data,
    part: Part,
    each: impl FnOnce(Put<'_>) -> Result<()>,
) -> Result<Counts> {
    let mut writer = SegmentWriter::new(disk.create(path).context(name(path))?, kind(data, part)?);
    each(&mut |order, row| Ok(writer.push(order, row)?))?;
    let (mut out, counts) = writer.finish()?;
    out.sync()?;
    Ok(counts)
}

/// The files of a table.
pub struct TableFiles<'a> {
    /// Segment with all rows.
    pub base: &'a Path,
    /// Segment with the rows of an update.
    pub delta: Option<&'a Path>,
}

/// Opens the table.
///
/// # Errors
/// A file is missing or damaged.
pub fn open(disk: &dyn Disk, data: &Data, files: &TableFiles<'_>) -> Result<TableRows> {
    let segment = |path: &Path, part| -> Result<Arc<Segment>> {
        let file = disk.open_pages(path).context(name(path))?;
        Ok(Arc::new(Segment::open(path, file, kind(data, part)?)?))
    };
    let deltas =
        files.delta.into_iter().map(|path| segment(path, Part::Delta)).collect::<Result<_>>()?;
    Ok(TableRows::new(segment(files.base, Part::Base)?, deltas)?)
}
