//! Merges the shares of a snapshot into the bundle that a single `pack` makes, byte for byte. Opens
//! no source. Copies a whole packed table as it is stored, and joins the ranges of a divided one.

use super::ending::Ending;
use super::range::PackedRanges;
use super::share::{Head, ReadModel, blobs_path, check_model, head_path, read_head};
use super::table::Destination;
use super::{Overrides, Packed};
use super::{read_network, read_probe, sum_left_out};
use anyhow::{Context, Result};
use hatchback::bundle::BundleWriter;
use hatchback::bundle::manifest::TableBlobs;
use hatchback::schema::Table;
use std::fs::File;
use std::path::{Path, PathBuf};

/// A packed table in the folders of shares.
enum PackedTable {
    /// The folder, and the head of the table.
    Whole(PathBuf, Box<Head>),
    Ranges(PackedRanges),
}

impl PackedTable {
    /// Finds table `number` in `folders`, whole or in ranges.
    fn find(model: &ReadModel, number: usize, folders: &[PathBuf]) -> Result<Self> {
        let Some(folder) = folders.iter().find(|folder| head_path(folder, number).is_file()) else {
            return Ok(Self::Ranges(PackedRanges::find(model, number, folders)?));
        };
        let head = read_head(folder, number)?;
        check_model(&head_path(folder, number), model, &head.model)?;
        Ok(Self::Whole(folder.clone(), Box::new(head)))
    }

    fn table(&self) -> &Table {
        match self {
            Self::Whole(_, head) => &head.table,
            Self::Ranges(ranges) => ranges.table(),
        }
    }

    fn left_out(&self) -> Option<u64> {
        match self {
            Self::Whole(_, head) => head.left_out,
            Self::Ranges(ranges) => ranges.left_out(),
        }
    }

    /// Copies the table into `bundle`, or makes it of its ranges.
    fn write(
        &self,
        bundle: &mut BundleWriter,
        destination: &Destination<'_>,
    ) -> Result<TableBlobs> {
        let (folder, head) = match self {
            Self::Whole(folder, head) => (folder, head),
            Self::Ranges(ranges) => return ranges.write(bundle, destination),
        };
        let path = blobs_path(folder, destination.number);
        let mut file = File::open(&path).with_context(|| path.display().to_string())?;
        let first = bundle.blobs().len() as u32;
        bundle.copy_part(&head.blobs, &path, &mut file)?;
        let TableBlobs { segment, hot } = head.tables;
        Ok(TableBlobs { segment: first + segment, hot: hot.map(|blob| first + blob) })
    }
}

/// Makes the bundle `out` of the model.toml at `path` from the shares in `folders`, without the
/// sources.
///
/// # Errors
/// A table is in no folder, a share is of another model.toml or damaged, or a file cannot be
/// written.
pub fn merge_shares(
    path: &Path,
    folders: &[PathBuf],
    out: &Path,
    overrides: Overrides,
) -> Result<Packed> {
    let model = ReadModel::read(path, overrides)?;
    let generation = model.generation()?;
    let found =
        (0..model.spec.tables.len()).map(|number| PackedTable::find(&model, number, folders));
    let found: Vec<PackedTable> = found.collect::<Result<_>>()?;

    let left_out: Vec<Option<u64>> = found.iter().map(PackedTable::left_out).collect();
    let rows_left_out = sum_left_out(overrides.min_count, &left_out)?;
    let tables = found.iter().map(|table| table.table().clone()).collect();
    let schema = model.spec.schema(tables, &model.keys)?;
    let onnx = read_network(&model.spec, &schema, &model.base)?;
    let probe = read_probe(&model.spec, &schema, &model.base)?;
    let workers = &overrides.workers()?;
    let mut bundle = BundleWriter::create_on(out, workers)?;
    let mut tables = Vec::new();
    for (number, table) in found.iter().enumerate() {
        let (generation, schema) = (&generation, &schema);
        let destination = Destination { generation, schema, number, parent: None, workers };
        let blobs = table.write(&mut bundle, &destination);
        tables.push(blobs.with_context(|| format!("table `{}`", table.table().name))?);
    }

    let (generation, schema) = (&generation, &schema);
    let ending = Ending { generation, parent: None, schema, tables, probe, deferral: None };
    let ended = ending.finish_snapshot(bundle, onnx, overrides.probe_difference_max)?;
    Ok(Packed { rows_left_out, ..Packed::new(generation, schema, ended)? })
}
