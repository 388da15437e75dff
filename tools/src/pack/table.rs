//! Writes one table of a bundle: a segment of all rows in order (in a delta, of the rows that
//! differ from the parent's), and the hot list. Never holds a whole table in memory.

use crate::import::RowSource;
use crate::pack::codec_error::CodecError;
use crate::pack::hot::{HotKeys, is_outdated};
use crate::pack::sort::RowSorter;
use anyhow::{Context, Result, ensure};
use hatchback::RowFormat;
use hatchback::bundle::manifest::{Generation, TableBlobs};
use hatchback::bundle::{BlobWriter, BundleWriter};
use hatchback::flash::Flash;
use hatchback::flash::merge::Merge;
use hatchback::flash::segment::writer::SegmentWriter;
use hatchback::flash::segment::{Part, SegmentKind};
use hatchback::io::in_order::{InOrder, WorkPool};
use hatchback::schema::{KeySpace, Schema, Table};
use std::io::Write;

/// The table that is being written.
pub(crate) struct Destination<'a> {
    pub generation: &'a Generation,
    pub schema: &'a Schema,
    pub number: usize,
    /// The parent of a delta.
    pub parent: Option<&'a Flash>,
    pub workers: &'a WorkPool,
}

/// A table that was written.
pub(crate) struct WrittenTable {
    pub blobs: TableBlobs,
    /// The error of its codec, over all rows of the source.
    pub error: CodecError,
}

/// Receives a row: its key and its encoded values.
type TakeRow<'a> = &'a mut dyn FnMut(u64, &[u8]) -> Result<()>;

/// Writes the table with the rows of `source`. Reads `source` once more if it has counts.
pub(crate) fn write_table(
    bundle: &mut BundleWriter,
    destination: &Destination<'_>,
    source: &dyn RowSource,
    advance: &mut dyn FnMut(u64),
) -> Result<WrittenTable> {
    let hot = HotKeys::of(source)?.into_keys();
    let table = destination.table();
    let before = destination.before();
    let part = if before.is_some() { Part::Delta } else { Part::Base };
    let kind = destination.kind(part)?;
    let (segment, blob) = bundle.blob();
    let old = before.map(|p| p.table(destination.number)).transpose()?.map(Merge::new);
    let mut rows =
        NewRows { writer: SegmentWriter::new(blob, kind), keys: table.keys, old, count: 0 };

    let put = &mut |key, row: &[u8]| rows.put(key, row);
    let error = each_sorted(table, source, destination.workers, advance, put)?;
    let count = rows.count;
    ensure!(count == table.rows, "the source has {count} rows, not {}", table.rows);
    rows.finish()?.end()?;

    let known = before.map_or(Ok(Vec::new()), |p| p.hot_keys(destination.number))?;
    let hot = if is_outdated(&known, &hot) { hot } else { Vec::new() };
    let hot: Vec<u8> = hot.into_iter().flat_map(u64::to_le_bytes).collect();
    let hot = if hot.is_empty() { None } else { Some(write_blob(bundle, &hot)?) };
    let whole = destination.parent.is_some() && before.is_none();
    Ok(WrittenTable { blobs: TableBlobs { segment, hot, whole }, error })
}

/// Encodes the rows of `source`, which are those of `table`, and passes them to `take`
/// in segment order. Returns the error of the codec.
fn each_sorted(
    table: &Table,
    source: &dyn RowSource,
    workers: &WorkPool,
    advance: &mut dyn FnMut(u64),
    take: TakeRow<'_>,
) -> Result<CodecError> {
    let format = table.format().context("the unit does not fit the codec")?;
    if table.keys == KeySpace::Index && !source.has_keys() {
        return each_row(format, source, workers, advance, take);
    }
    let mut sorter = RowSorter::new(table.keys, table.rows, source.rows(), format.row_bytes())?;
    let error = each_row(format, source, workers, advance, |key, row| sorter.push(key, row))?;
    sorter.finish(take)?;
    Ok(error)
}

/// Writes `content` as a blob; returns its number.
pub(crate) fn write_blob(bundle: &mut BundleWriter, content: &[u8]) -> Result<u32> {
    let (number, mut blob) = bundle.blob();
    blob.write_all(content)?;
    blob.end()?;
    Ok(number)
}

impl<'a> Destination<'a> {
    fn table(&self) -> &Table {
        &self.schema.tables[self.number]
    }

    /// Returns the parent if it has the rows that the table's rows follow. Otherwise the table
    /// travels whole.
    fn before(&self) -> Option<&'a Flash> {
        let continues = |parent: &&Flash| {
            let before = parent.manifest().schema.tables.get(self.number);
            before.is_some_and(|before| self.table().continues(before).is_ok())
        };
        self.parent.filter(continues)
    }

    fn kind(&self, part: Part) -> Result<SegmentKind> {
        let kind = SegmentKind::new(self.generation, 0, self.number, self.table(), part);
        kind.context("the unit does not fit the codec")
    }
}

/// Writes the rows of a table, in order, to a segment: to a base all rows, to a delta only those
/// that differ from the `old` rows.
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

/// The encoded rows of a block.
struct EncodedBlock {
    keys: Vec<u64>,
    rows: Vec<u8>,
    error: CodecError,
}

impl EncodedBlock {
    fn new(format: RowFormat, keys: Vec<u64>, values: &[f32]) -> Result<Self> {
        let mut rows = vec![0; keys.len() * format.row_bytes()];
        let places = rows.chunks_exact_mut(format.row_bytes());
        let (mut error, mut decoded) = (CodecError::default(), vec![0.0; format.dim()]);
        for ((key, row), place) in keys.iter().zip(values.chunks_exact(format.dim())).zip(places) {
            format.encode(row, place).with_context(|| format!("key {key}"))?;
            error.count(format, row, place, &mut decoded);
        }
        Ok(Self { keys, rows, error })
    }
}

/// Encodes every row of `source` on the threads of `workers`, and passes it to `take` in the order
/// of the source. Returns the error of the codec.
fn each_row(
    format: RowFormat,
    source: &dyn RowSource,
    workers: &WorkPool,
    advance: &mut dyn FnMut(u64),
    mut take: impl FnMut(u64, &[u8]) -> Result<()>,
) -> Result<CodecError> {
    let mut error = CodecError::default();
    let mut put = |block: EncodedBlock| {
        error.add(&block.error);
        let rows = block.rows.chunks_exact(format.row_bytes());
        block.keys.iter().zip(rows).try_for_each(|(key, row)| take(*key, row))
    };
    let mut under_way = InOrder::new(workers);

    source.each_block(&mut |keys, values| {
        advance(keys.len() as u64);
        let (keys, values) = (keys.to_vec(), values.to_vec());
        match under_way.start(move || EncodedBlock::new(format, keys, &values)) {
            Some(block) => put(block?),
            None => Ok(()),
        }
    })?;
    while let Some(block) = under_way.wait() {
        put(block?)?;
    }
    Ok(error)
}
