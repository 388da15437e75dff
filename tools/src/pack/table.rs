//! One table of a bundle: its rows encoded and in order, in a delta those that differ from the
//! parent's, beside them the most used rows once more, placed together. Only those are kept until
//! the table is written: one in a hundred.

use crate::pack::RowSource;
use crate::pack::clustering::by_co_access;
use crate::pack::hot::{hot_keys, is_news};
use crate::pack::sort::RowSorter;
use anyhow::{Context, Result, ensure};
use hatchback::RowFormat;
use hatchback::bundle::manifest::{Generation, TableBlobs};
use hatchback::bundle::{BlobWriter, BundleWriter};
use hatchback::flash::merge::Merge;
use hatchback::flash::segment::writer::SegmentWriter;
use hatchback::flash::segment::{Part, SegmentKind};
use hatchback::flash::{Flash, PLACED_SERIAL, placed_rows_max};
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, Placement, Schema, Table};
use std::collections::HashMap;
use std::io::Write;

/// Which table is being written, and over what.
pub(crate) struct Destination<'a> {
    pub generation: &'a Generation,
    pub schema: &'a Schema,
    pub number: usize,
    pub parent: Option<&'a Flash>,
    pub requests: &'a [Sample],
}

/// Writes all rows of `source`, read twice where their use was counted.
pub(crate) fn write_table(
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
    let mut rows =
        NewRows { writer: SegmentWriter::new(blob, kind), keys: table.keys, old, count: 0 };
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

/// Writes a blob that is in memory.
pub(crate) fn write_blob(bundle: &mut BundleWriter, content: &[u8]) -> Result<u32> {
    let (number, mut blob) = bundle.blob();
    blob.write_all(content)?;
    blob.end()?;
    Ok(number)
}

impl Destination<'_> {
    fn table(&self) -> &Table {
        &self.schema.tables[self.number]
    }

    fn kind(&self, serial: u32, part: Part) -> Result<SegmentKind> {
        let kind = SegmentKind::new(self.generation, serial, self.number, self.table(), part);
        kind.context("the unit does not fit the codec")
    }

    /// The most used of the `hot` keys, those that are asked for together side by side. None in a
    /// delta, whose rows would be read from it instead, and none of a table that is never read page
    /// by page.
    fn keys_to_place(&self, hot: &[u64]) -> Vec<u64> {
        let table = self.table();
        if self.parent.is_some() || table.placement == Placement::Resident {
            return Vec::new();
        }
        let hot = &hot[..hot.len().min(placed_rows_max(table.rows) as usize)];
        let features: Vec<usize> = (0..self.schema.features.len())
            .filter(|f| usize::from(self.schema.features[*f].table) == self.number)
            .collect();
        let keys_of =
            |sample: &Sample| features.iter().flat_map(|f| &sample.sparse[*f]).copied().collect();
        let requests: Vec<Vec<u64>> = self.requests.iter().map(keys_of).collect();
        let per_page =
            self.kind(PLACED_SERIAL, Part::Placed).map_or(1, |kind| kind.rows_per_page());
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

/// Takes a table's rows in order: all of them into a base, or into a delta what differs from the
/// old ones.
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
