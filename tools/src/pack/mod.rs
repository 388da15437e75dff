//! `pack`: turns a trainer's files into a bundle. It reads the rows of each table in two passes:
//! the first learns the value ranges and refuses bad rows before anything is written, the second
//! encodes. Memory is bounded by one block and one sort partition. Never holds a whole table.

pub mod codec_error;
pub(crate) mod ending;
pub(crate) mod hot;
pub mod hugectr_network;
pub mod key_spec;
mod learn;
pub mod merge;
pub mod network;
pub mod overrides;
pub mod share;
pub mod sort;
pub mod spec;
mod spec_line;
pub(crate) mod table;
mod table_major;
pub(crate) mod weights;

use crate::import::{FrequentRows, RowSource};
use crate::limits::HEADER_BYTES_MAX;
use crate::pack::codec_error::CodecError;
use crate::pack::ending::{Ended, Ending};
use crate::pack::learn::{Learnt, learn};
use crate::pack::spec::ModelSpec;
use crate::pack::spec_line::{at_line, line_of};
use crate::pack::table::{Destination, write_table};
use crate::report::input;
use crate::report::temporary::Claim;
use anyhow::{Context, Result, bail, ensure};
use hatchback::bundle::BundleWriter;
use hatchback::bundle::manifest::Generation;
use hatchback::flash::Flash;
use hatchback::io::in_order::WorkPool;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, Schema, SchemaError, Table};
use std::io::{BufRead, BufReader};
use std::path::Path;

pub use ending::Proof;
pub use overrides::Overrides;

/// The bundle that `pack` wrote.
#[derive(Debug)]
pub struct Packed {
    /// The generation of the bundle.
    pub generation: Generation,
    /// The schema of the model.
    pub schema: Schema,
    /// Bytes of the bundle file.
    pub bytes: u64,
    /// The engine of the dense network on this machine's CPU.
    pub dense_engine: String,
    /// Rows of the trainer's files that were left out because they are rare.
    pub rows_left_out: u64,
    /// The error of each table's codec.
    pub codec_errors: Vec<CodecError>,
    /// What the probe set scored.
    pub proof: Proof,
}

/// Packs the model of `spec_path`, a model.toml, as a snapshot into the bundle `out`. Calls
/// `progress` with the rows of each block that it has read and with the total, twice the number of
/// rows.
///
/// # Errors
/// A file is missing or wrong. No file is left at `out` then.
pub fn pack_file(
    spec_path: &Path,
    out: &Path,
    overrides: Overrides,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Packed> {
    pack_file_onto(spec_path, None, out, overrides, progress)
}

/// Packs the model of `spec_path` as [`pack_file`] does. With a `parent` the bundle is a delta from
/// its live generation to this model: changed rows, new keys and deleted keys. The delta encodes
/// each table as the parent does.
///
/// # Errors
/// As [`pack_file`], or the parent cannot be read or has other tables. An error in model.toml names
/// the line.
pub fn pack_file_onto(
    spec_path: &Path,
    parent: Option<&Flash>,
    out: &Path,
    overrides: Overrides,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Packed> {
    let text = input::read_text(spec_path, HEADER_BYTES_MAX)
        .with_context(|| spec_path.display().to_string())?;
    let spec = ModelSpec::parse(&text, spec_path)?;
    let base = spec_path.parent().unwrap_or(Path::new("."));

    let at = |field: &str| at_line(spec_path, line_of(&text, field));
    let opened = open_sources(&spec, base, overrides.min_count, &at)?;
    let OpenedSources { sources, rows_left_out } = opened;
    let packed = pack_onto(&spec, &sources, parent, base, out, overrides, progress);
    let packed = packed.map_err(|error| match error.downcast_ref::<SchemaError>() {
        Some(SchemaError { field, .. }) => {
            let place = at(field);
            error.context(place)
        }
        None => error,
    })?;
    Ok(Packed { rows_left_out, ..packed })
}

/// The rows of all tables, and the number of rows that were left out.
struct OpenedSources {
    sources: Vec<Box<dyn RowSource>>,
    rows_left_out: u64,
}

/// The rows of one table.
struct OpenedSource {
    rows: Box<dyn RowSource>,
    /// Rows that were left out because they are rare; `None` if the table has no counts for that.
    left_out: Option<u64>,
}

/// Opens the files of table `number`. With `min_count` leaves out the rare rows of a sparse table
/// that has counts. `at` returns the place of a field, for an error.
fn open_source(
    spec: &ModelSpec,
    number: usize,
    base: &Path,
    min_count: Option<u64>,
    at: &dyn Fn(&str) -> String,
) -> Result<OpenedSource> {
    let table = &spec.tables[number];
    let place = || format!("{}: table `{}`", at(&format!("table[{number}].source")), table.name);
    let rows = table.source.open(base, table.dim).with_context(place)?;
    match min_count {
        Some(least) if table.keys == KeySpace::Sparse && rows.has_counts() => {
            let rows = FrequentRows::new(rows, least).with_context(place)?;
            let left_out = Some(rows.left_out());
            Ok(OpenedSource { rows: Box::new(rows), left_out })
        }
        _ => Ok(OpenedSource { rows: Box::new(rows), left_out: None }),
    }
}

/// Opens the files of all tables, as [`open_source`] does.
fn open_sources(
    spec: &ModelSpec,
    base: &Path,
    min_count: Option<u64>,
    at: &dyn Fn(&str) -> String,
) -> Result<OpenedSources> {
    let (mut sources, mut left_out) = (Vec::new(), Vec::new());
    for number in 0..spec.tables.len() {
        let opened = open_source(spec, number, base, min_count, at)?;
        check_rows_left(&opened, min_count, &spec.tables[number].name)?;
        sources.push(opened.rows);
        left_out.push(opened.left_out);
    }
    Ok(OpenedSources { sources, rows_left_out: sum_left_out(min_count, &left_out)? })
}

/// Returns an error if all rows of the table `name` are rare. A table without rows grows by deltas.
fn check_rows_left(source: &OpenedSource, min_count: Option<u64>, name: &str) -> Result<()> {
    let (least, left_out) = (min_count.unwrap_or_default(), source.left_out.unwrap_or_default());
    let is_left = source.rows.rows() > 0 || left_out == 0;
    ensure!(is_left, "table `{name}`: --min-count {least}: no row was used so often");
    Ok(())
}

/// Returns the sum of the rows that were left out of all tables. `left_out` has one element for
/// each table.
fn sum_left_out(min_count: Option<u64>, left_out: &[Option<u64>]) -> Result<u64> {
    if let (Some(least), true) = (min_count, left_out.iter().all(Option::is_none)) {
        bail!("--min-count {least}: no sparse table has `counts` in its source");
    }
    Ok(left_out.iter().flatten().sum())
}

/// Packs `spec` as a snapshot with the rows of `sources`, one for each table. `base` is the folder
/// of the files of `spec`.
///
/// # Errors
/// As [`pack_file`].
pub fn pack(
    spec: &ModelSpec,
    sources: &[Box<dyn RowSource>],
    base: &Path,
    out: &Path,
    overrides: Overrides,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Packed> {
    pack_onto(spec, sources, None, base, out, overrides, progress)
}

/// Packs `spec` with the rows of `sources`, one for each table; with a `parent` as a delta.
///
/// # Errors
/// As [`pack_file_onto`].
pub fn pack_onto(
    spec: &ModelSpec,
    sources: &[Box<dyn RowSource>],
    parent: Option<&Flash>,
    base: &Path,
    out: &Path,
    overrides: Overrides,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Packed> {
    if let Some(parent) = parent {
        check_succession(spec, &parent.manifest().generation)?;
    }

    // Everything that needs no rows is read first, so that an error in it costs no pass over the
    // tables.
    let generation = Generation { lineage: spec.name.clone(), sequence: spec.sequence };
    check_name(&generation)?;
    let keys = spec.key_functions(base)?;
    let draft = spec.schema(draft_tables(spec, sources, overrides)?, &keys)?;
    let onnx = read_network(spec, &draft, base)?;
    let probe = read_probe(spec, &draft, base)?;

    let total = 2 * sources.iter().map(|s| s.rows()).sum::<u64>();
    let mut advance = |rows: u64| progress(rows, total);
    let workers = &overrides.workers()?;
    let tables = learn_tables(spec, sources, parent, overrides, workers, &mut advance)?;
    let schema = spec.schema(tables, &keys)?;
    let _part = Claim::part_of(out);
    let mut bundle = BundleWriter::create_on(out, workers)?;
    let (mut tables, mut errors) = (Vec::new(), Vec::new());
    for (number, source) in sources.iter().enumerate() {
        let (generation, schema) = (&generation, &schema);
        let destination = Destination { generation, schema, number, parent, workers };
        let written = write_table(&mut bundle, &destination, source.as_ref(), &mut advance);
        let written = written.with_context(|| format!("table `{}`", schema.tables[number].name))?;
        tables.push(written.blobs);
        errors.push(written.error);
    }

    let sequence = parent.map(|p| p.manifest().generation.sequence);
    let (generation, schema) = (&generation, &schema);
    let ending = Ending { generation, parent: sequence, schema, tables, probe, deferral: None };
    let ended = match parent {
        // The rows of a delta alone do not score the probe set.
        Some(parent) => {
            let samples = ending.samples()?;
            let onnx = weights::as_parent(&onnx, schema, parent, &samples)?;
            ending.finish_delta(bundle, onnx)
        }
        None => ending.finish_snapshot(bundle, onnx, overrides.probe_difference_max),
    }?;
    Packed::new(generation, schema, ended, errors)
}

impl Packed {
    fn new(
        generation: &Generation,
        schema: &Schema,
        ended: Ended,
        codec_errors: Vec<CodecError>,
    ) -> Result<Self> {
        let Ended { bytes, onnx, proof } = ended;
        let (generation, schema) = (generation.clone(), schema.clone());
        let dense_engine = schema.load_dense(onnx)?.runs_on();
        let rows_left_out = 0;
        Ok(Self { generation, schema, bytes, dense_engine, rows_left_out, codec_errors, proof })
    }
}

/// Returns an error unless `spec` may follow the generation `parent`.
fn check_succession(spec: &ModelSpec, parent: &Generation) -> Result<(), SchemaError> {
    let fault = |field: &str, problem| Err(SchemaError { field: field.to_owned(), problem });
    if spec.name != parent.lineage {
        return fault("name", format!("`{}`, the parent's is `{}`", spec.name, parent.lineage));
    }
    if spec.sequence <= parent.sequence {
        let (ours, theirs) = (spec.sequence, parent.sequence);
        return fault("sequence", format!("{ours} is not above the parent's, {theirs}"));
    }
    Ok(())
}

/// Returns an error unless a generation may have this name.
fn check_name(generation: &Generation) -> Result<(), SchemaError> {
    generation.check().map_err(|problem| SchemaError { field: "name".to_owned(), problem })
}

/// Returns the tables of the schema, as far as they are known before a row is read.
fn draft_tables(
    spec: &ModelSpec,
    sources: &[Box<dyn RowSource>],
    overrides: Overrides,
) -> Result<Vec<Table>> {
    let mut tables = Vec::new();
    for (table, source) in spec.tables.iter().zip(sources) {
        tables.push(Learnt::nothing(table).table(table, source.rows(), overrides)?);
    }
    Ok(tables)
}

/// Reads the rows of all tables once; returns the tables of the schema.
fn learn_tables(
    spec: &ModelSpec,
    sources: &[Box<dyn RowSource>],
    parent: Option<&Flash>,
    overrides: Overrides,
    workers: &WorkPool,
    advance: &mut dyn FnMut(u64),
) -> Result<Vec<Table>> {
    let mut tables = Vec::new();
    for (number, (table, source)) in spec.tables.iter().zip(sources).enumerate() {
        let learnt = learn(table, source.as_ref(), workers, advance)
            .with_context(|| format!("table `{}`", table.name))?;
        let mut table = learnt.table(table, source.rows(), overrides)?;
        if let Some(parent) = parent {
            encode_as_parent(&mut table, number, parent)?;
        }
        tables.push(table);
    }

    Ok(tables)
}

/// Reads the ONNX file and checks that it fits the schema.
fn read_network(spec: &ModelSpec, schema: &Schema, base: &Path) -> Result<Vec<u8>> {
    let (path, onnx) = match (&spec.network.onnx, &spec.network.hugectr) {
        (Some(onnx), None) => {
            let path = base.join(onnx);
            let read = network::read(&path)?;
            let onnx = match spec.network.table_major {
                true => table_major::to_batch_major(&read, schema)
                    .with_context(|| path.display().to_string())?,
                false => read,
            };
            (path, onnx)
        }
        (None, Some(hugectr)) if !spec.network.table_major => {
            (base.join(&hugectr.dense), hugectr.read(base)?)
        }
        _ => {
            let problem =
                "takes one of `onnx` and `hugectr`; `table_major` belongs to `onnx`".to_owned();
            return Err(SchemaError { field: "network".to_owned(), problem }.into());
        }
    };
    schema.load_dense(onnx.clone()).with_context(|| path.display().to_string())?;
    Ok(onnx)
}

fn read_probe(spec: &ModelSpec, schema: &Schema, base: &Path) -> Result<Option<Vec<u8>>> {
    let Some(probe) = &spec.probe else { return Ok(None) };
    let samples = read_samples(&base.join(&probe.samples), schema)?;
    Ok(Some(Sample::encode_set(&samples)?))
}

/// Reads a file of samples, one line of JSON each.
///
/// # Errors
/// The file cannot be read, or a line is not a sample of the schema; the error names the line.
pub fn read_samples(path: &Path, schema: &Schema) -> Result<Vec<Sample>> {
    let file = input::open(path).with_context(|| path.display().to_string())?;
    let mut samples = Vec::new();
    for (number, line) in BufReader::new(file).lines().enumerate() {
        let at = || at_line(path, Some(number + 1));
        let line = line.with_context(at)?;
        if !line.trim().is_empty() {
            samples.push(Sample::from_json(&line, schema).with_context(at)?);
        }
    }

    Ok(samples)
}

/// Gives `table` the codec of the parent's table `number`: a delta compares encoded rows byte for
/// byte with the rows that they replace.
fn encode_as_parent(table: &mut Table, number: usize, parent: &Flash) -> Result<()> {
    let old = parent.manifest().schema.tables.get(number);
    let old = old.with_context(|| format!("the parent has no table {number}"))?;

    ensure!(
        (&table.name, table.dim, table.keys) == (&old.name, old.dim, old.keys),
        "table `{}`: the parent's table {number} is `{}`, with another name, dim or key space",
        table.name,
        old.name
    );
    (table.codec, table.unit_exp) = (old.codec, old.unit_exp);
    Ok(())
}
