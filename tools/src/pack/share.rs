//! Packs some tables of a snapshot, a share of it. `merge.rs` makes the bundle. A worker opens only
//! the sources of its tables. A packed table has two files: its compressed blobs, and a head, which
//! is renamed into place last. A worker that is killed leaves no head of the table that it was
//! packing, and a second run packs that table again.

use super::codec_error::CodecError;
use super::open_source;
use super::spec::{ModelSpec, TableSpec};
use super::spec_line::{at_line, line_of};
use super::table::{Destination, write_table};
use super::{Learnt, OpenedSource, Overrides, check_name, check_rows_left, learn};
use crate::limits::HEADER_BYTES_MAX;
use crate::report::temporary::Claim;
use crate::report::{self, input};
use anyhow::{Context, Result, ensure};
use hatchback::bundle::BundleWriter;
use hatchback::bundle::manifest::{Blob, Generation, TableBlobs, sha256};
use hatchback::io::atomic_write::replace;
use hatchback::io::disk::SystemDisk;
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

/// A model.toml that was read; no table's source is open.
pub(super) struct ReadModel {
    pub(super) spec: ModelSpec,
    text: String,
    pub(super) keys: Vec<KeyFunction>,
    path: PathBuf,
    pub(super) base: PathBuf,
    /// SHA-256 of the model.toml, and what the command line replaced.
    pub(super) hash: [u8; 32],
    pub(super) overrides: Overrides,
}

impl ReadModel {
    pub(super) fn read(path: &Path, overrides: Overrides) -> Result<Self> {
        let text =
            input::read_text(path, HEADER_BYTES_MAX).with_context(|| path.display().to_string())?;
        let spec = ModelSpec::parse(&text, path)?;
        let base = path.parent().unwrap_or(Path::new(".")).to_owned();
        let keys = spec.key_functions(&base)?;
        let chosen = (overrides.codec, overrides.placement, overrides.min_count);
        let hash = sha256(format!("{chosen:?}\0{text}").as_bytes());
        Ok(Self { spec, text, keys, path: path.to_owned(), base, hash, overrides })
    }

    pub(super) fn generation(&self) -> Result<Generation> {
        let (lineage, sequence) = (self.spec.name.clone(), self.spec.sequence);
        let generation = Generation { lineage, sequence };
        check_name(&generation)?;
        Ok(generation)
    }

    /// Opens the source of table `number`.
    fn open(&self, number: usize) -> Result<OpenedSource> {
        let at = |field: &str| at_line(&self.path, line_of(&self.text, field));
        let opened = open_source(&self.spec, number, &self.base, self.overrides.min_count, &at)?;
        let name = &self.spec.tables[number].name;
        check_rows_left(&opened, self.overrides.min_count, name)?;
        Ok(opened)
    }

    /// Returns the number of the table `name`.
    pub(super) fn number_of(&self, name: &str) -> Result<usize> {
        let number = self.spec.tables.iter().position(|table| table.name == *name);
        number.with_context(|| format!("{}: has no table `{name}`", self.path.display()))
    }

    /// Returns the sources of the tables of these names, each with the table's number.
    fn open_tables(&self, names: &[String]) -> Result<Vec<(usize, OpenedSource)>> {
        let open = |name: &String| {
            let number = self.number_of(name)?;
            Ok((number, self.open(number)?))
        };
        names.iter().map(open).collect()
    }

    /// Returns the tables of the schema, as far as they are known without a source. Their number of
    /// rows is the largest possible one, so that no key is refused.
    fn draft_tables(&self) -> Result<Vec<Table>> {
        let draft =
            |table: &TableSpec| Learnt::nothing(table).table(table, u64::MAX, self.overrides);
        self.spec.tables.iter().map(draft).collect()
    }
}

pub(super) fn blobs_path(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("t{number:04}.blobs"))
}

pub(super) fn head_path(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("t{number:04}.head"))
}

/// Packs the tables of these `names` of the model.toml at `path` into `folder`, which may hold
/// other tables too. Opens the sources of no other table. A table that `folder` has already is not
/// packed again.
///
/// # Errors
/// The model.toml or a source is refused, or a file cannot be written.
pub fn pack_tables(
    path: &Path,
    names: &[String],
    folder: &Path,
    overrides: Overrides,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    let model = ReadModel::read(path, overrides)?;
    let ours = model.open_tables(names)?;
    let mut tables = model.draft_tables()?;
    for (number, source) in &ours {
        let spec = &model.spec.tables[*number];
        tables[*number] = Learnt::nothing(spec).table(spec, source.rows.rows(), overrides)?;
    }
    // A fault of model.toml costs no pass over the rows.
    model.spec.schema(tables.clone(), &model.keys)?;
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;

    let total = 2 * ours.iter().map(|(_, source)| source.rows.rows()).sum::<u64>();
    let mut advance = |rows: u64| progress(rows, total);
    for (number, source) in &ours {
        let place = || format!("table `{}`", model.spec.tables[*number].name);
        if read_head(folder, *number).is_ok_and(|head| head.model == model.hash) {
            note_done(&place(), &head_path(folder, *number));
            continue;
        }
        let mut work = Work { model: &model, tables: &mut tables, folder };
        work.pack_table(*number, source, &mut advance).with_context(place)?;
    }
    Ok(())
}

/// Says that the work on a table was done before. The program cannot know whether its
/// source has changed since.
pub(super) fn note_done(what: &str, done: &Path) {
    report::note(format_args!("{what}: was done before; remove {} to repeat it", done.display()));
}

/// The work of one worker.
struct Work<'a> {
    model: &'a ReadModel,
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
        let (model, rows) = (self.model, source.rows.as_ref());
        let spec = &model.spec.tables[number];
        let workers = &model.overrides.workers()?;
        let learnt = learn(spec, rows, workers, advance)?;
        self.tables[number] = learnt.table(spec, rows.rows(), model.overrides)?;
        let schema = model.spec.schema(self.tables.clone(), &model.keys)?;

        let path = blobs_path(self.folder, number);
        let _part = Claim::part_of(&path);
        let mut bundle = BundleWriter::create_on(&path, workers)?;
        let (generation, schema) = (&model.generation()?, &schema);
        let destination = Destination { generation, schema, number, parent: None, workers };
        let written = write_table(&mut bundle, &destination, rows, advance)?;
        let head = Head {
            format: HEAD_FORMAT,
            model: model.hash,
            number: number as u32,
            table: schema.tables[number].clone(),
            left_out: source.left_out,
            error: written.error,
            tables: written.blobs,
            blobs: bundle.finish_part()?,
        };
        let path = head_path(self.folder, number);
        let bytes = postcard::to_allocvec(&head)?;
        replace(&SystemDisk, &path, &bytes).with_context(|| path.display().to_string())
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
pub(super) fn check_model(path: &Path, model: &ReadModel, found: &[u8; 32]) -> Result<()> {
    ensure!(
        *found == model.hash,
        "{}: model: is of another model.toml, or of other --codec, --placement or --min-count",
        path.display()
    );
    Ok(())
}
