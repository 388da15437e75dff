//! Packs a table that is too large for one worker by ranges of its rows, in the order of its
//! source. Each worker first learns the values of its range. Once all ranges are learnt, each
//! worker encodes its range and sorts it into segment order. The merge of the shares joins the
//! sorted ranges into the table that a single `pack` makes, byte for byte. It holds one chunk of
//! each range.

use super::hot::HotKeys;
use super::learn::{Learnt, learn};
use super::share::{ReadModel, Share, check_model, note_done};
use super::table::{Destination, TakeRow, each_sorted, write_sorted};
use super::{Overrides, check_rows_left};
use crate::limits::RANGES_MAX;
use anyhow::{Context, Result, bail, ensure};
use hatchback::bundle::BundleWriter;
use hatchback::bundle::manifest::{Blob, TableBlobs};
use hatchback::bundle::part::PartReader;
use hatchback::io::atomic_write::replace;
use hatchback::io::disk::SystemDisk;
use hatchback::schema::{KeySpace, Table};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// The format of the files of a range.
const RANGE_FORMAT: u32 = 1;
/// The blobs of a range: its rows, each with its key before it, and its most used keys.
const ROWS: usize = 0;
const HOT: usize = 1;
/// Bytes of a key, and of a hot key with its count.
const KEY_BYTES: usize = 8;
const HOT_BYTES: u64 = 16;

/// A range of the rows of a table.
#[derive(Clone, Copy, Debug)]
pub struct TableRange<'a> {
    /// The name of the table.
    pub table: &'a str,
    /// Which of several ranges of about the same size.
    pub range: Share,
}

/// Where a file of a range belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct RangeId {
    format: u32,
    /// SHA-256 of the model.toml, and what the command line replaced.
    model: [u8; 32],
    number: u32,
    range: Share,
}

/// What was learnt of a range.
#[derive(Serialize, Deserialize)]
struct LearntRange {
    id: RangeId,
    rows: u64,
    /// Rows left out because they are rare; `None` if the table has no counts for that.
    left_out: Option<u64>,
    learnt: Learnt,
}

/// The head of an encoded range.
#[derive(Serialize, Deserialize)]
struct RangeHead {
    id: RangeId,
    table: Table,
    rows: u64,
    /// Rows left out of the whole table.
    left_out: Option<u64>,
    blobs: Vec<Blob>,
}

fn path_of(folder: &Path, number: usize, range: Share, ending: &str) -> PathBuf {
    folder.join(format!("t{number:04}-{}of{}.{ending}", range.number, range.of))
}

impl RangeId {
    fn new(model: &ReadModel, number: usize, range: Share) -> Self {
        Self { format: RANGE_FORMAT, model: model.hash, number: number as u32, range }
    }

    /// Checks that the file at `path`, which has this id, belongs there.
    fn check(&self, path: &Path, model: &ReadModel, number: usize, range: Share) -> Result<()> {
        let shown = path.display();
        ensure!(self.format == RANGE_FORMAT, "{shown}: format: is {}", self.format);
        check_model(path, model, &self.model)?;
        ensure!(self.number as usize == number, "{shown}: number: is {}", self.number);
        ensure!(self.range == range, "{shown}: range: is {}", self.range);
        Ok(())
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let shown = || path.display().to_string();
    let bytes = std::fs::read(path).with_context(shown)?;
    postcard::from_bytes(&bytes).with_context(shown)
}

fn write(path: &Path, content: &impl Serialize) -> Result<()> {
    let bytes = postcard::to_allocvec(content)?;
    replace(&SystemDisk, path, &bytes).with_context(|| path.display().to_string())
}

/// Learns the values of `part`, a range of a table of the model.toml at `path`, and writes what it
/// learnt into `folder`. Does nothing if the file is there already.
///
/// # Errors
/// The model.toml or a row is refused, or the file cannot be written.
pub fn learn_range(
    path: &Path,
    part: TableRange<'_>,
    folder: &Path,
    overrides: Overrides,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    let model = ReadModel::read(path, overrides)?;
    model.check()?;
    let (number, range) = (model.number_of(part.table)?, part.range);
    ensure!(range.of <= RANGES_MAX, "range {range}: a table has at most {RANGES_MAX} ranges");
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let file = path_of(folder, number, range, "learnt");
    if read_learnt(&file, &model, number, range).is_ok() {
        note_done(&format!("range {range} of table `{}`", part.table), &file);
        return Ok(());
    }

    let source = model.open(number, Some(range))?;
    let (rows, spec) = (source.rows.rows(), &model.spec.tables[number]);
    let mut advance = |read| progress(read, rows);
    let learnt = learn(spec, source.rows.as_ref(), &overrides.workers()?, &mut advance);
    let learnt = learnt.with_context(|| format!("table `{}`", spec.name))?;
    let id = RangeId::new(&model, number, range);
    write(&file, &LearntRange { id, rows, left_out: source.left_out, learnt })
}

fn read_learnt(path: &Path, model: &ReadModel, number: usize, range: Share) -> Result<LearntRange> {
    let learnt: LearntRange = read(path)?;
    learnt.id.check(path, model, number, range)?;
    Ok(learnt)
}

fn read_head(path: &Path, model: &ReadModel, number: usize, range: Share) -> Result<RangeHead> {
    let head: RangeHead = read(path)?;
    head.id.check(path, model, number, range)?;
    Ok(head)
}

/// Encodes and sorts `part`, a range of a table of the model.toml at `path`, into `folder`, which
/// holds what was learnt of all ranges of the table. Does nothing if the range is there already.
///
/// # Errors
/// The model.toml or a row is refused, a range is not learnt, or a file cannot be written.
pub fn pack_range(
    path: &Path,
    part: TableRange<'_>,
    folder: &Path,
    overrides: Overrides,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    let model = ReadModel::read(path, overrides)?;
    let (number, range) = (model.number_of(part.table)?, part.range);
    let head_path = path_of(folder, number, range, "head");
    if read_head(&head_path, &model, number, range).is_ok() {
        note_done(&format!("range {range} of table `{}`", part.table), &head_path);
        return Ok(());
    }
    let (table, left_out) = table_of_all(&model, number, range.of, folder)?;

    let source = model.open(number, Some(range))?;
    let (source, workers) = (source.rows.as_ref(), &overrides.workers()?);
    let total = source.rows();
    let blobs = path_of(folder, number, range, "blobs");
    let mut bundle = BundleWriter::create_on(&blobs, workers)?;
    let (_, mut blob) = bundle.blob();
    let mut advance = |read| progress(read, total);
    let mut rows = 0;
    each_sorted(&table, source, workers, &mut advance, &mut |key, row| {
        rows += 1;
        blob.write_all(&key.to_le_bytes())?;
        Ok(blob.write_all(row)?)
    })
    .with_context(|| format!("table `{}`", table.name))?;
    blob.end()?;

    let (_, mut blob) = bundle.blob();
    blob.write_all(&HotKeys::of(source)?.encode())?;
    blob.end()?;
    let id = RangeId::new(&model, number, range);
    let blobs = bundle.finish_part()?;
    write(&head_path, &RangeHead { id, table, rows, left_out, blobs })
}

/// Returns the table of the schema from what was learnt of all `of` ranges, and the rows that were
/// left out.
fn table_of_all(
    model: &ReadModel,
    number: usize,
    of: usize,
    folder: &Path,
) -> Result<(Table, Option<u64>)> {
    let spec = &model.spec.tables[number];
    let (mut all, mut rows, mut left_out) = (Learnt::nothing(spec), 0u64, None);
    for range in Share::all(of) {
        let path = path_of(folder, number, range, "learnt");
        let one = read_learnt(&path, model, number, range)?;
        all.join(&one.learnt);
        rows = rows.saturating_add(one.rows);
        left_out = one.left_out.map(|more| left_out.unwrap_or(0) + more);
    }
    check_rows_left(rows, model.overrides.min_count, &spec.name)?;
    Ok((all.table(spec, rows, model.overrides)?, left_out))
}

/// The encoded ranges of a table, in the folders of shares.
pub(super) struct PackedRanges {
    /// The blobs of each range, with its head.
    ranges: Vec<(PathBuf, RangeHead)>,
}

impl PackedRanges {
    /// Finds all ranges of table `number` in `folders`.
    pub(super) fn find(model: &ReadModel, number: usize, folders: &[PathBuf]) -> Result<Self> {
        let name = &model.spec.tables[number].name;
        let head_of = |range| {
            let mut heads = folders.iter().map(|folder| path_of(folder, number, range, "head"));
            heads.find(|path| path.is_file())
        };
        // A folder may hold some ranges of an earlier division.
        let divisions = divisions(number, folders)?;
        let is_whole = |of: &&usize| Share::all(**of).all(|range| head_of(range).is_some());
        let of = divisions.iter().rev().find(is_whole).or(divisions.last());
        let Some(&of) = of else { bail!("table `{name}` is in none of the shares") };
        let mut ranges = Vec::<(PathBuf, RangeHead)>::new();
        for range in Share::all(of) {
            let Some(path) = head_of(range) else {
                bail!("range {range} of table `{name}` is in none of the shares");
            };
            let head = read_head(&path, model, number, range)?;
            if let Some((_, first)) = ranges.first() {
                let shown = path.display();
                ensure!(first.table == head.table, "{shown}: table: is not that of range 1/{of}");
            }
            ranges.push((path.with_extension("blobs"), head));
        }
        Ok(Self { ranges })
    }

    /// Returns the table of the schema.
    pub(super) fn table(&self) -> &Table {
        &self.ranges[0].1.table
    }

    /// Returns the rows left out because they are rare; `None` if the table has no counts for that.
    pub(super) fn left_out(&self) -> Option<u64> {
        self.ranges[0].1.left_out
    }

    /// Writes the table of all ranges.
    pub(super) fn write(
        &self,
        bundle: &mut BundleWriter,
        destination: &Destination<'_>,
    ) -> Result<TableBlobs> {
        let mut hot = HotKeys::default();
        for (path, head) in &self.ranges {
            let keys = head.blobs.get(HOT).map_or(0, Blob::raw_bytes) / HOT_BYTES;
            let mut encoded = PartReader::open(path, &head.blobs, HOT)?;
            hot.offer_encoded(&mut encoded, keys).with_context(|| path.display().to_string())?;
        }
        write_sorted(bundle, destination, hot.into_keys(), |take| self.each_row(take))
    }

    /// Passes the rows of all ranges to `take`, in segment order.
    fn each_row(&self, take: TakeRow<'_>) -> Result<()> {
        let table = self.table();
        let format = table.format().context("the unit does not fit the codec")?;
        let mut runs = Vec::new();
        for (path, head) in &self.ranges {
            runs.push(Run {
                path,
                keys: table.keys,
                rows_left: head.rows,
                rows: PartReader::open(path, &head.blobs, ROWS)?,
                record: vec![0; KEY_BYTES + format.row_bytes()],
            });
        }
        let mut heap = BinaryHeap::new();
        for (number, run) in runs.iter_mut().enumerate() {
            heap.extend(run.advance()?.map(|order| Reverse((order, number))));
        }

        let mut last = None;
        while let Some(Reverse((order, number))) = heap.pop() {
            let run = &mut runs[number];
            ensure!(last != Some(order), "key {} occurs twice", run.key());
            last = Some(order);
            take(run.key(), &run.record[KEY_BYTES..])?;
            heap.extend(run.advance()?.map(|order| Reverse((order, number))));
        }
        Ok(())
    }
}

/// Returns each number of ranges into which table `number` is divided in `folders`.
fn divisions(number: usize, folders: &[PathBuf]) -> Result<BTreeSet<usize>> {
    let prefix = format!("t{number:04}-");
    let mut found = BTreeSet::new();
    for folder in folders {
        for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let name = entry?.file_name();
            let range = name.to_str().and_then(|name| name.strip_prefix(&prefix));
            let range = range.and_then(|range| range.strip_suffix(".head"));
            found.extend(range.and_then(|range| range.split_once("of")?.1.parse::<usize>().ok()));
        }
    }
    Ok(found)
}

/// The sorted rows of a range.
struct Run<'a> {
    path: &'a Path,
    keys: KeySpace,
    /// Rows after the one in `record`.
    rows_left: u64,
    rows: PartReader,
    /// The key and the encoded values of the current row.
    record: Vec<u8>,
}

impl Run<'_> {
    fn key(&self) -> u64 {
        let key = self.record.first_chunk::<KEY_BYTES>().copied();
        u64::from_le_bytes(key.unwrap_or_default())
    }

    /// Reads the next row; returns its order.
    fn advance(&mut self) -> Result<Option<u64>> {
        let Some(left) = self.rows_left.checked_sub(1) else { return Ok(None) };
        self.rows_left = left;
        let read = self.rows.read_exact(&mut self.record);
        read.with_context(|| self.path.display().to_string())?;
        Ok(Some(self.keys.order(self.key())))
    }
}
