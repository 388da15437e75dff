//! Packs some tables of a snapshot, a share of it. `merge.rs` makes the bundle. A worker opens only
//! the sources of its tables. A packed table has two files: its compressed blobs, and a head, which
//! is renamed into place last. A worker that is killed leaves no head of the table that it was
//! packing, and a second run packs that table again.

use super::PackJob;
use super::codec_error::CodecError;
use super::job::OpenedSource;
use super::learn::learn;
use super::table::{Destination, write_table};
use crate::limits::HEADER_BYTES_MAX;
use crate::report::temporary::{Claim, write_file};
use crate::report::{self, input};
use anyhow::{Context, Result, ensure};
use hatchback::bundle::BundleWriter;
use hatchback::bundle::manifest::{Blob, TableBlobs};
use hatchback::schema::Table;
use hatchback::schema::key_function::KeyFunction;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The format of the head of a table in a share.
const HEAD_FORMAT: u32 = 1;

/// A packed table of a share.
#[derive(Serialize, Deserialize)]
pub(super) struct Head {
    format: u32,
    /// SHA-256 of the model.toml, and what the command line replaced.
    pub(super) model: [u8; 32],
    number: u32,
    pub(super) table: Table,
    /// Rows left out because they are rare; `None` if the table has no counts for that.
    pub(super) left_out: Option<u64>,
    pub(super) error: CodecError,
    pub(super) tables: TableBlobs,
    pub(super) blobs: Vec<Blob>,
}

pub(super) fn blobs_path(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("t{number:04}.blobs"))
}

pub(super) fn head_path(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("t{number:04}.head"))
}

impl PackJob {
    /// Packs the tables of these `names` into `folder`, which may hold other tables too. Opens the
    /// sources of no other table. A table that `folder` has already is not packed again.
    ///
    /// # Errors
    /// The model.toml or a source is refused, or a file cannot be written.
    pub fn pack_tables(
        &self,
        names: &[String],
        folder: &Path,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<()> {
        let keys = self.spec.key_functions(&self.base)?;
        let ours = self.open_tables(names)?;
        // The number of rows of another table is the largest possible one, so no key is refused.
        let draft = self.spec.tables.iter().map(|table| self.draft_table(table, u64::MAX));
        let mut tables: Vec<Table> = draft.collect::<Result<_>>()?;
        for (number, source) in &ours {
            tables[*number] = self.draft_table(&self.spec.tables[*number], source.rows.rows())?;
        }
        // A fault of model.toml costs no pass over the rows.
        self.spec.schema(tables.clone(), &keys)?;
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;

        let total = 2 * ours.iter().map(|(_, source)| source.rows.rows()).sum::<u64>();
        let mut advance = |rows: u64| progress(rows, total);
        for (number, source) in &ours {
            let place = || format!("table `{}`", self.spec.tables[*number].name);
            if read_head(folder, *number).is_ok_and(|head| head.model == self.hash()) {
                note_done(&place(), &head_path(folder, *number));
                continue;
            }
            let mut work = Work { job: self, keys: &keys, tables: &mut tables, folder };
            work.pack_table(*number, source, &mut advance).with_context(place)?;
        }
        Ok(())
    }

    /// Returns the sources of the tables of these names, each with the table's number.
    fn open_tables(&self, names: &[String]) -> Result<Vec<(usize, OpenedSource)>> {
        let open = |name: &String| {
            let number = self.number_of(name)?;
            Ok((number, self.open_source(number)?))
        };
        names.iter().map(open).collect()
    }
}

/// Says that the work on a table was done before. The program cannot know whether its
/// source has changed since.
pub(super) fn note_done(what: &str, done: &Path) {
    report::note(format_args!("{what}: was done before; remove {} to repeat it", done.display()));
}

/// The work of one worker.
struct Work<'a> {
    job: &'a PackJob,
    keys: &'a [KeyFunction],
    tables: &'a mut Vec<Table>,
    folder: &'a Path,
}

impl Work<'_> {
    /// Writes the two files of table `number`.
    fn pack_table(
        &mut self,
        number: usize,
        source: &OpenedSource,
        advance: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let (job, rows) = (self.job, source.rows.as_ref());
        let spec = &job.spec.tables[number];
        let workers = &job.overrides.workers()?;
        let learnt = learn(spec, rows, workers, advance)?;
        self.tables[number] = learnt.table(spec, rows.rows(), job.overrides)?;
        let schema = job.spec.schema(self.tables.clone(), self.keys)?;

        let path = blobs_path(self.folder, number);
        let _part = Claim::part_of(&path);
        let mut bundle = BundleWriter::create_on(&path, workers)?;
        let (generation, schema) = (&job.generation()?, &schema);
        let destination = Destination { generation, schema, number, parent: None, workers };
        let written = write_table(&mut bundle, &destination, rows, advance)?;
        let head = Head {
            format: HEAD_FORMAT,
            model: job.hash(),
            number: number as u32,
            table: schema.tables[number].clone(),
            left_out: source.left_out,
            error: written.error,
            tables: written.blobs,
            blobs: bundle.finish_part()?,
        };
        let path = head_path(self.folder, number);
        let bytes = postcard::to_allocvec(&head)?;
        write_file(&path, &bytes)
    }
}

pub(super) fn read_head(folder: &Path, number: usize) -> Result<Head> {
    let path = head_path(folder, number);
    let shown = || path.display().to_string();
    let bytes = input::read(&path, HEADER_BYTES_MAX).with_context(shown)?;
    let head: Head = postcard::from_bytes(&bytes).with_context(shown)?;
    ensure!(head.format == HEAD_FORMAT, "{}: format: is {}", shown(), head.format);
    ensure!(head.number as usize == number, "{}: number: is {}", shown(), head.number);
    Ok(head)
}

/// Returns an error unless the file at `path` is of this model. `found` is its hash of the model.
pub(super) fn check_model(path: &Path, job: &PackJob, found: &[u8; 32]) -> Result<()> {
    ensure!(
        *found == job.hash(),
        "{}: model: is of another model.toml, or of other --codec, --placement or --min-count",
        path.display()
    );
    Ok(())
}
