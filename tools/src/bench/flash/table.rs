//! The made-up table as segments on flash, the way `pack` and an install leave them. Never
//! measures.

use super::data::Data;
use anyhow::{Context, Result};
use hatchback::Codec;
use hatchback::bundle::manifest::Generation;
use hatchback::flash::PLACED_SERIAL;
use hatchback::flash::segment::writer::SegmentWriter;
use hatchback::flash::segment::{Counts, Part, Segment, SegmentKind};
use hatchback::flash::table::TableRows;
use hatchback::io::disk::Disk;
use hatchback::schema::{KeySpace, MissPolicy, Placement, Table};
use std::path::Path;

/// Takes a row with its order.
pub type Put<'a> = &'a mut dyn FnMut(u64, &[u8]) -> Result<()>;

fn name(path: &Path) -> String {
    path.display().to_string()
}

/// What a segment of the table is. A compacted one may bear the base's name: it is never opened.
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
    let (sequence, serial) = match part {
        Part::Base => (1, 0),
        Part::Placed => (1, PLACED_SERIAL),
        Part::Delta => (2, 0),
    };
    let generation = Generation { lineage: "bench".to_owned(), sequence };
    SegmentKind::new(&generation, serial, 0, &table, part).context("the row does not fit its codec")
}

/// Writes the rows that `each` puts as a segment, durably but for its name.
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

/// Opens the table.
///
/// # Errors
/// A file is missing or damaged.
pub fn open(
    disk: &dyn Disk,
    data: &Data,
    base: &Path,
    placed: Option<&Path>,
    delta: Option<&Path>,
) -> Result<TableRows> {
    let segment = |path: &Path, part| -> Result<Segment> {
        let file = disk.open_pages(path).context(name(path))?;
        Ok(Segment::open(path, file, kind(data, part)?)?)
    };
    let placed = placed.map(|path| segment(path, Part::Placed)).transpose()?;
    let deltas = delta.into_iter().map(|path| segment(path, Part::Delta)).collect::<Result<_>>()?;
    Ok(TableRows::new(segment(base, Part::Base)?, placed, deltas)?)
}
