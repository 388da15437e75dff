//! Merges the shares of a snapshot into the bundle that a single `pack` makes, byte for byte. Opens
//! no source, and copies each packed table as it is stored.

use super::share::{Head, blobs_path, check_model, head_path, read_head};
use super::{PackJob, Packed};
use crate::report::input;
use crate::report::temporary::Claim;
use anyhow::{Context, Result};
use hatchback::bundle::BundleWriter;
use hatchback::bundle::manifest::TableBlobs;
use std::path::{Path, PathBuf};

/// A packed table: the folder of its share, and its head.
struct PackedTable {
    folder: PathBuf,
    head: Head,
}

impl PackedTable {
    /// Finds table `number` in `folders`.
    fn find(job: &PackJob, number: usize, folders: &[PathBuf]) -> Result<Self> {
        let found = folders.iter().find(|folder| head_path(folder, number).is_file());
        let name = &job.spec.tables[number].name;
        let folder = found.with_context(|| format!("table `{name}` is in none of the shares"))?;
        let head = read_head(folder, number)?;
        check_model(&head_path(folder, number), job, &head.model)?;
        Ok(Self { folder: folder.clone(), head })
    }

    /// Copies the table, which is number `number`, into `bundle`.
    fn copy(&self, bundle: &mut BundleWriter, number: usize) -> Result<TableBlobs> {
        let path = blobs_path(&self.folder, number);
        let mut file = input::open(&path).with_context(|| path.display().to_string())?;
        let first = bundle.blobs().len() as u32;
        bundle.copy_part(&self.head.blobs, &path, &mut file)?;
        let TableBlobs { segment, hot, whole } = self.head.tables;
        Ok(TableBlobs { segment: first + segment, hot: hot.map(|blob| first + blob), whole })
    }
}

impl PackJob {
    /// Makes the bundle `out` from the shares in `folders`, without the sources.
    ///
    /// # Errors
    /// A table is in no folder, a share is of another model.toml or damaged, or a file cannot be
    /// written.
    pub fn merge(&self, folders: &[PathBuf], out: &Path) -> Result<Packed> {
        let found =
            (0..self.spec.tables.len()).map(|number| PackedTable::find(self, number, folders));
        let found: Vec<PackedTable> = found.collect::<Result<_>>()?;
        let left_out: Vec<Option<u64>> = found.iter().map(|found| found.head.left_out).collect();
        let rows_left_out = self.sum_left_out(&left_out)?;

        let tables = found.iter().map(|found| found.head.table.clone()).collect();
        let schema = self.spec.schema(tables, &self.spec.key_functions(&self.base)?)?;
        let files = self.network_files(&schema)?;
        let _part = Claim::part_of(out);
        let mut bundle = BundleWriter::create_on(out, &self.overrides.workers()?)?;
        let mut tables = Vec::new();
        for (number, table) in found.iter().enumerate() {
            let blobs = table.copy(&mut bundle, number);
            let blobs = blobs.with_context(|| format!("table `{}`", table.head.table.name))?;
            tables.push((blobs, table.head.error));
        }
        Ok(Packed { rows_left_out, ..self.finish(bundle, &schema, tables, files, None)? })
    }
}
