//! `pack`: a trainer's files become a bundle. Two passes over each table's source, in memory bounded by one
//! block and one sort partition: the first learns ranges and refuses bad rows before anything is written,
//! the second encodes. Only the most used rows, which are placed together, are kept until their table is
//! written: one in a hundred.

use crate::import::{RowBlock, Rows};
use crate::place::by_co_access;
use crate::sort::RowSorter;
use crate::spec::{CodecChoice, DefaultRow, ModelSpec, NamedRow, TableSpec};
use anyhow::{Context, Result, bail, ensure};
use hatchback::bundle::{BlobWriter, BundleWriter};
use hatchback::flash::{Flash, PLACED_SERIAL, placed_rows_max};
use hatchback::limits::{DENSE_BYTES_MAX, HOT_KEYS_MAX};
use hatchback::manifest::{Generation, Manifest, TableBlobs};
use hatchback::merge::Merge;
use hatchback::sample::Sample;
use hatchback::schema::{KeySpace, Placement, Schema, Table};
use hatchback::segment::{Part, SegmentKind};
use hatchback::segment_write::SegmentWriter;
use hatchback::{RowFormat, Weights, choose_unit_exp};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;

/// A delta brings its own hot list where, of some number of the hottest keys from this on...
const HOT_COMPARED_MIN: usize = 256;
/// ...more than one in so many is not among as many of its parent's.
const HOT_CHANGED_ONE_IN: usize = 10;

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

/// Packs the model that `spec_path` describes into the bundle `out`. `progress` is told the rows read, of
/// twice `rows` in total.
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

/// As `pack_file`; with a `parent` the bundle is the delta that leads from its live generation to this model:
/// the rows that differ, the keys that are new and those that are gone. Tables are encoded as the parent's.
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
        let rows = table.source.open(base, table.dim).with_context(|| format!("table `{}`", table.name))?;
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
    let total = 2 * sources.iter().map(|s| s.rows()).sum::<u64>();
    let mut advance = |rows: u64| progress(rows, total);
    let mut tables = Vec::new();
    for (table, source) in spec.tables.iter().zip(sources) {
        let learnt =
            learn(table, source.as_ref(), &mut advance).with_context(|| format!("table `{}`", table.name))?;
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
        let of =
            Destination { generation: &generation, schema: &schema, number, parent, requests: &requests };
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

fn learn(table: &TableSpec, source: &dyn RowSource, advance: &mut dyn FnMut(u64)) -> Result<Learnt> {
    let mut learnt = Learnt { range_min: f32::INFINITY, sums: vec![0.0; table.dim], ..Learnt::default() };
    source.each_block(&mut |keys, values| {
        for row in values.chunks_exact(table.dim) {
            let (low, high) =
                row.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), &v| (l.min(v), h.max(v)));
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

fn write_blob(bundle: &mut BundleWriter, content: &[u8]) -> Result<u32> {
    let (number, mut blob) = bundle.blob();
    blob.write_all(content)?;
    blob.end()?;
    Ok(number)
}

/// A delta's rows must be comparable, byte for byte, with those they replace.
fn encode_as(tables: &mut [Table], parent: &Flash) -> Result<()> {
    let number = tables.len() - 1;
    let (Some(table), Some(old)) = (tables.last_mut(), parent.manifest().schema.tables.get(number)) else {
        bail!("the parent has no table {number}");
    };
    let same = (&table.name, table.dim, table.keys) == (&old.name, old.dim, old.keys);
    ensure!(same, "table `{}`: the parent's is `{}`, with another dim or keys", table.name, old.name);
    (table.codec, table.unit_exp) = (old.codec, old.unit_exp);
    Ok(())
}

/// Which table is being written, and over what.
struct Destination<'a> {
    generation: &'a Generation,
    schema: &'a Schema,
    number: usize,
    parent: Option<&'a Flash>,
    requests: &'a [Sample],
}

fn write_table(
    bundle: &mut BundleWriter,
    of: &Destination<'_>,
    source: &dyn RowSource,
    advance: &mut dyn FnMut(u64),
) -> Result<TableBlobs> {
    let table = &of.schema.tables[of.number];
    let part = if of.parent.is_some() { Part::Delta } else { Part::Base };
    let kind = of.kind(0, part)?;
    let format = kind.format();
    let hot = hot_keys(source)?;
    let mut kept = KeptRows::new(of.keys_to_place(&hot), format.row_bytes());
    let (segment, blob) = bundle.blob();
    let old = of.parent.map(|p| anyhow::Ok(Merge::new(p.table(of.number)?))).transpose()?;
    let mut rows = NewRows { writer: SegmentWriter::new(blob, kind), keys: table.keys, old, count: 0 };
    if table.keys == KeySpace::Index && !source.has_keys() {
        each_row(format, source, advance, |key, row| {
            kept.offer(key, row);
            rows.put(key, row)
        })?;
    } else {
        let mut sorter = RowSorter::new(table.keys, table.rows, format.row_bytes())?;
        each_row(format, source, advance, |key, row| sorter.push(key, row))?;
        sorter.finish(|key, row| {
            kept.offer(key, row);
            rows.put(key, row)
        })?;
    }
    let count = rows.count;
    ensure!(count == table.rows, "{count} rows instead of {}", table.rows);
    rows.finish()?.end()?;
    let placed = if kept.keys.is_empty() { None } else { Some(of.write_placed(bundle, &kept)?) };
    let known = of.parent.map_or(Ok(Vec::new()), |parent| parent.hot_keys(of.number))?;
    let hot = if is_news(&known, &hot) { hot } else { Vec::new() };
    let hot: Vec<u8> = hot.into_iter().flat_map(u64::to_le_bytes).collect();
    let hot = if hot.is_empty() { None } else { Some(write_blob(bundle, &hot)?) };
    Ok(TableBlobs { segment, hot, placed })
}

impl Destination<'_> {
    fn table(&self) -> &Table {
        &self.schema.tables[self.number]
    }

    fn kind(&self, serial: u32, part: Part) -> Result<SegmentKind> {
        let kind = SegmentKind::new(self.generation, serial, self.number, self.table(), part);
        kind.context("the unit does not fit the codec")
    }

    /// The most used of the `hot` keys, those that are asked for together side by side. None in a delta, whose
    /// rows would be read from it instead, and none of a table that is never read page by page.
    fn keys_to_place(&self, hot: &[u64]) -> Vec<u64> {
        let table = self.table();
        if self.parent.is_some() || table.placement == Placement::Resident {
            return Vec::new();
        }
        let hot = &hot[..hot.len().min(placed_rows_max(table.rows) as usize)];
        let features: Vec<usize> = (0..self.schema.features.len())
            .filter(|f| usize::from(self.schema.features[*f].table) == self.number)
            .collect();
        let keys_of = |sample: &Sample| features.iter().flat_map(|f| &sample.sparse[*f]).copied().collect();
        let requests: Vec<Vec<u64>> = self.requests.iter().map(keys_of).collect();
        let per_page = self.kind(PLACED_SERIAL, Part::Placed).map_or(1, |kind| kind.rows_per_page());
        by_co_access(hot, requests.iter().map(Vec::as_slice), per_page)
    }

    fn write_placed(&self, bundle: &mut BundleWriter, kept: &KeptRows) -> Result<u32> {
        let (number, blob) = bundle.blob();
        let mut writer = SegmentWriter::new(blob, self.kind(PLACED_SERIAL, Part::Placed)?);
        for (key, row) in kept.keys.iter().zip(kept.rows.chunks_exact(kept.row_bytes)) {
            writer.push(self.table().keys.order(*key), row)?;
        }
        writer.finish()?.0.end()?;
        Ok(number)
    }
}

/// The encoded rows of some keys, in the order of those keys.
struct KeptRows {
    keys: Vec<u64>,
    at: HashMap<u64, usize>,
    rows: Vec<u8>,
    row_bytes: usize,
}

impl KeptRows {
    fn new(keys: Vec<u64>, row_bytes: usize) -> Self {
        let at = keys.iter().enumerate().map(|(i, key)| (*key, i)).collect();
        Self { at, rows: vec![0; keys.len() * row_bytes], keys, row_bytes }
    }

    /// Keeps the row if it is one of those.
    fn offer(&mut self, key: u64, row: &[u8]) {
        if let Some(i) = self.at.get(&key) {
            self.rows[i * self.row_bytes..][..self.row_bytes].copy_from_slice(row);
        }
    }
}

/// Takes a table's rows in order: all of them into a base, or into a delta what differs from the old ones.
struct NewRows<'a> {
    writer: SegmentWriter<BlobWriter<'a>>,
    keys: KeySpace,
    old: Option<Merge>,
    count: u64,
}

impl<'a> NewRows<'a> {
    fn put(&mut self, key: u64, row: &[u8]) -> Result<()> {
        self.count += 1;
        let order = self.keys.order(key);
        let Some(old) = &mut self.old else { return Ok(self.writer.push(order, row)?) };
        while let Some((gone, _)) = old.current()?.filter(|(old, _)| *old < order) {
            self.writer.delete(gone)?;
            old.advance()?;
        }
        let same = match old.current()?.filter(|(old, _)| *old == order) {
            None => false,
            Some((_, old_row)) => {
                let same = old_row == row;
                old.advance()?;
                same
            }
        };
        if same { Ok(()) } else { Ok(self.writer.push(order, row)?) }
    }

    fn finish(mut self) -> Result<BlobWriter<'a>> {
        if let Some(old) = &mut self.old {
            while let Some((gone, _)) = old.current()? {
                self.writer.delete(gone)?;
                old.advance()?;
            }
        }
        Ok(self.writer.finish()?.0)
    }
}

/// Encodes every row of `source` and hands it to `take`.
fn each_row(
    format: RowFormat,
    source: &dyn RowSource,
    advance: &mut dyn FnMut(u64),
    mut take: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut bytes = vec![0; format.row_bytes()];
    source.each_block(&mut |keys, values| {
        for (&key, row) in keys.iter().zip(values.chunks_exact(format.dim())) {
            format.encode(row, &mut bytes).with_context(|| format!("key {key}"))?;
            take(key, &bytes)?;
        }
        advance(keys.len() as u64);
        Ok(())
    })
}

/// Whether a cache of some size that is warmed from the list `old` would hold too little of what one of `new` would: a list is whole,
/// and can be far larger than the delta that brings it.
fn is_news(old: &[u64], new: &[u64]) -> bool {
    let rank: HashMap<u64, usize> = old.iter().enumerate().map(|(rank, key)| (*key, rank)).collect();
    let sizes = (HOT_COMPARED_MIN.ilog2()..usize::BITS).map(|bits| 1 << bits);
    sizes.take_while(|size| *size < new.len()).chain([new.len()]).any(|size| {
        let missing = |key: &&u64| rank.get(key).is_none_or(|rank| *rank >= size);
        new[..size].iter().filter(missing).count() > size / HOT_CHANGED_ONE_IN
    })
}

/// The most used keys, most used first; empty if the trainer gave no counts.
fn hot_keys(source: &dyn RowSource) -> Result<Vec<u64>> {
    let Some(counts) = source.counts()? else { return Ok(Vec::new()) };
    let (mut heap, mut at) = (BinaryHeap::new(), 0);
    source.each_block(&mut |keys, _| {
        for (&key, &count) in keys.iter().zip(&counts[at..]) {
            if count > 0 {
                heap.push(Reverse((count, Reverse(key))));
            }
            if heap.len() > HOT_KEYS_MAX {
                heap.pop();
            }
        }
        at += keys.len();
        Ok(())
    })?;
    // `Reverse` sorts the most used to the front.
    Ok(heap.into_sorted_vec().iter().map(|Reverse((_, Reverse(key)))| *key).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hot_list_is_news_where_a_cache_of_some_size_would_miss_a_tenth_of_it() {
        let old: Vec<u64> = (0..10_000).collect();
        let with = |changed: std::ops::Range<usize>| {
            let mut new = old.clone();
            changed.for_each(|at| new[at] += 1_000_000);
            new
        };
        assert!(!is_news(&old, &old) && !is_news(&old, &[]) && !is_news(&[], &[]));
        assert!(is_news(&[], &old));
        assert!(is_news(&old, &with(0..26)) && !is_news(&old, &with(0..25)), "of the hottest 256");
        assert!(is_news(&old, &with(8_000..9_001)) && !is_news(&old, &with(9_000..10_000)), "of all");
        let mut turned = old.clone();
        turned.rotate_left(20);
        assert!(!is_news(&old, &turned), "nearly the same order");
        turned.reverse();
        assert!(is_news(&old, &turned), "the coldest first");
    }
}
