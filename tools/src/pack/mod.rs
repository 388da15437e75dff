//! `pack`: a trainer's files become a bundle. Two passes over each table's source, in memory
//! bounded by one block and one sort partition: the first learns ranges and refuses bad rows before
//! anything is written, the second encodes. Only the most used rows, which are placed together, are
//! kept until their table is written: one in a hundred.

pub mod clustering;
mod hot;
pub mod sort;
pub mod spec;
mod table;

use crate::import::{RowBlock, Rows};
use crate::pack::spec::{CodecChoice, DefaultRow, ModelSpec, NamedRow, TableSpec};
use crate::pack::table::{Destination, write_blob, write_table};
use anyhow::{Context, Result, bail, ensure};
use hatchback::bundle::BundleWriter;
use hatchback::bundle::manifest::{Generation, Manifest};
use hatchback::flash::Flash;
use hatchback::limits::DENSE_BYTES_MAX;
use hatchback::schema::sample::Sample;
use hatchback::schema::{Placement, Schema, Table};
use hatchback::{Weights, choose_unit_exp};
use std::io::{BufRead, BufReader};
use std::path::Path;

/// Takes some rows: keys and values `[keys, dim]`.
pub type TakeBlock<'a> = &'a mut dyn FnMut(&[u64], &[f32]) -> Result<()>;

/// Where the rows of a table come from. It is read twice.
pub trait RowSource {
    /// Rows in the table.
    fn rows(&self) -> u64;
    /// Whether rows carry keys of their own; otherwise a row's key is its position.
    fn has_keys(&self) -> bool;
    /// How often each row was used in training, in row order, if that is known.
    fn counts(&self) -> Result<Option<Vec<u64>>>;
    /// Hands all rows over, some at a time.
    fn each_block(&self, take: TakeBlock<'_>) -> Result<()>;
}

impl RowSource for Rows {
    fn rows(&self) -> u64 {
        self.rows()
    }

    fn has_keys(&self) -> bool {
        self.has_keys()
    }

    fn counts(&self) -> Result<Option<Vec<u64>>> {
        Ok(self.counts()?)
    }

    fn each_block(&self, take: TakeBlock<'_>) -> Result<()> {
        let (mut blocks, mut block) = (self.blocks()?, RowBlock::default());
        while blocks.next(&mut block)? {
            take(&block.keys, &block.rows)?;
        }
        Ok(())
    }
}

/// Choices that the command line makes for all tables.
#[derive(Clone, Copy, Debug, Default)]
pub struct Overrides {
    /// In place of each table's codec.
    pub codec: Option<CodecChoice>,
    /// In place of each table's placement.
    pub placement: Option<Placement>,
}

/// What was packed.
#[derive(Debug)]
pub struct Packed {
    /// What the bundle holds.
    pub generation: Generation,
    /// How it is put together.
    pub schema: Schema,
    /// Bytes of the bundle file.
    pub bytes: u64,
}

/// Packs the model that `spec_path` describes into the bundle `out`. `progress` is told the rows
/// read, of twice `rows` in total.
///
/// # Errors
/// A file is missing or wrong; nothing stands at `out` then.
pub fn pack_file(
    spec_path: &Path,
    out: &Path,
    overrides: Overrides,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Packed> {
    pack_file_onto(spec_path, None, out, overrides, progress)
}

/// As `pack_file`; with a `parent` the bundle is the delta that leads from its live generation to
/// this model: the rows that differ, the keys that are new and those that are gone. Tables are
/// encoded as the parent's.
///
/// # Errors
/// As `pack_file`, or the parent cannot be read or has other tables.
pub fn pack_file_onto(
    spec_path: &Path,
    parent: Option<&Flash>,
    out: &Path,
    overrides: Overrides,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Packed> {
    let spec = ModelSpec::load(spec_path)?;
    let base = spec_path.parent().unwrap_or(Path::new("."));
    let mut sources: Vec<Box<dyn RowSource>> = Vec::new();
    for table in &spec.tables {
        let rows = table
            .source
            .open(base, table.dim)
            .with_context(|| format!("table `{}`", table.name))?;
        sources.push(Box::new(rows));
    }
    pack_onto(&spec, &sources, parent, base, out, overrides, progress)
}

/// Packs `spec` with the rows of `sources`, one for each table.
///
/// # Errors
/// As `pack_file`.
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

/// As `pack`, onto `parent` as in `pack_file_onto`.
///
/// # Errors
/// As `pack_file_onto`.
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
        let parent = &parent.manifest().generation;
        ensure!(
            spec.name == parent.lineage,
            "name: `{}`, the parent's is `{}`",
            spec.name,
            parent.lineage
        );
        let (ours, theirs) = (spec.sequence, parent.sequence);
        ensure!(ours > theirs, "sequence: {ours} is not above the parent's, {theirs}");
    }
    let total = 2 * sources.iter().map(|s| s.rows()).sum::<u64>();
    let mut advance = |rows: u64| progress(rows, total);
    let mut tables = Vec::new();
    for (table, source) in spec.tables.iter().zip(sources) {
        let learnt = learn(table, source.as_ref(), &mut advance)
            .with_context(|| format!("table `{}`", table.name))?;
        tables.push(learnt.table(table, source.rows(), overrides)?);
        if let Some(parent) = parent {
            encode_as(&mut tables, parent)?;
        }
    }
    let schema = spec.schema(tables)?;
    let onnx = read_network(spec, &schema, base)?;
    let probe = read_probe(spec, &schema, base)?;
    let requests = read_requests(spec, &schema, base)?;
    let generation = Generation { lineage: spec.name.clone(), sequence: spec.sequence };

    let mut bundle = BundleWriter::create(out)?;
    let mut blobs = Vec::new();
    for (number, source) in sources.iter().enumerate() {
        let name = &schema.tables[number].name;
        let of = Destination {
            generation: &generation,
            schema: &schema,
            number,
            parent,
            requests: &requests,
        };
        let table = write_table(&mut bundle, &of, source.as_ref(), &mut advance);
        blobs.push(table.with_context(|| format!("table `{name}`"))?);
    }
    let dense = write_blob(&mut bundle, &onnx)?;
    let probe = probe.map(|bytes| write_blob(&mut bundle, &bytes)).transpose()?;
    let manifest = Manifest {
        generation: generation.clone(),
        parent: parent.map(|p| p.manifest().generation.sequence),
        schema: schema.clone(),
        blobs: Vec::new(),
        tables: blobs,
        dense,
        probe,
    };
    let bytes = bundle.finish(manifest)?;
    Ok(Packed { generation, schema, bytes })
}

/// What the first pass over a table finds.
#[derive(Debug, Default)]
struct Learnt {
    magnitude_max: f32,
    range_min: f32,
    sums: Vec<f64>,
}

fn learn(
    table: &TableSpec,
    source: &dyn RowSource,
    advance: &mut dyn FnMut(u64),
) -> Result<Learnt> {
    let mut learnt =
        Learnt { range_min: f32::INFINITY, sums: vec![0.0; table.dim], ..Learnt::default() };
    source.each_block(&mut |keys, values| {
        for row in values.chunks_exact(table.dim) {
            let (low, high) = row
                .iter()
                .fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), &v| (l.min(v), h.max(v)));
            learnt.magnitude_max = learnt.magnitude_max.max(low.abs()).max(high.abs());
            if high > low {
                learnt.range_min = learnt.range_min.min(high - low);
            }
            learnt.sums.iter_mut().zip(row).for_each(|(s, v)| *s += f64::from(*v));
        }
        advance(keys.len() as u64);
        Ok(())
    })?;
    if learnt.range_min == f32::INFINITY {
        learnt.range_min = 0.0;
    }
    Ok(learnt)
}

impl Learnt {
    fn table(&self, spec: &TableSpec, rows: u64, overrides: Overrides) -> Result<Table> {
        let codec = overrides.codec.unwrap_or(spec.codec).resolve(rows, spec.dim);
        let default_row = match &spec.default {
            DefaultRow::Zeros | DefaultRow::Named(NamedRow::Zeros) => vec![0.0; spec.dim],
            DefaultRow::Named(NamedRow::Mean) => {
                self.sums.iter().map(|s| (s / rows.max(1) as f64) as f32).collect()
            }
            DefaultRow::Values(values) => values.clone(),
        };
        Ok(Table {
            name: spec.name.clone(),
            dim: u32::try_from(spec.dim)?,
            keys: spec.keys,
            rows,
            codec,
            unit_exp: choose_unit_exp(codec, self.magnitude_max, self.range_min),
            placement: overrides.placement.unwrap_or(spec.placement),
            miss: spec.miss,
            default_row,
        })
    }
}

/// Reads the ONNX file and proves that the schema fits it.
fn read_network(spec: &ModelSpec, schema: &Schema, base: &Path) -> Result<Vec<u8>> {
    let path = base.join(&spec.network.onnx);
    let bytes = std::fs::metadata(&path).with_context(|| path.display().to_string())?.len();
    ensure!(bytes <= DENSE_BYTES_MAX, "{}: {bytes} bytes, over {DENSE_BYTES_MAX}", path.display());
    let onnx = std::fs::read(&path).with_context(|| path.display().to_string())?;
    schema.load_dense(onnx.clone(), Weights::F32).with_context(|| path.display().to_string())?;
    Ok(onnx)
}

fn read_probe(spec: &ModelSpec, schema: &Schema, base: &Path) -> Result<Option<Vec<u8>>> {
    let Some(probe) = &spec.probe else { return Ok(None) };
    let samples = read_samples(&base.join(&probe.samples), schema)?;
    Ok(Some(Sample::encode_set(&samples)?))
}

fn read_requests(spec: &ModelSpec, schema: &Schema, base: &Path) -> Result<Vec<Sample>> {
    spec.requests.as_ref().map_or(Ok(Vec::new()), |r| read_samples(&base.join(&r.samples), schema))
}

/// Reads a file of samples, one line of JSON each.
///
/// # Errors
/// The file cannot be read, or a line is not a sample of the schema; the error names the line.
pub fn read_samples(path: &Path, schema: &Schema) -> Result<Vec<Sample>> {
    let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
    let mut samples = Vec::new();
    for (number, line) in BufReader::new(file).lines().enumerate() {
        let at = || format!("{}: line {}", path.display(), number + 1);
        let line = line.with_context(at)?;
        if !line.trim().is_empty() {
            samples.push(Sample::from_json(&line, schema).with_context(at)?);
        }
    }
    Ok(samples)
}

/// A delta's rows must be comparable, byte for byte, with those they replace.
fn encode_as(tables: &mut [Table], parent: &Flash) -> Result<()> {
    let number = tables.len() - 1;
    let (Some(table), Some(old)) = (tables.last_mut(), parent.manifest().schema.tables.get(number))
    else {
        bail!("the parent has no table {number}");
    };
    let same = (&table.name, table.dim, table.keys) == (&old.name, old.dim, old.keys);
    ensure!(
        same,
        "table `{}`: the parent's is `{}`, with another dim or keys",
        table.name,
        old.name
    );
    (table.codec, table.unit_exp) = (old.codec, old.unit_exp);
    Ok(())
}
