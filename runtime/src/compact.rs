//! Compaction: merging a table's deltas into a new base, a few pages at a time, so that whoever drives it can
//! keep an I/O share and a wear budget, pause, and stop. Never runs on a request's path, never changes the
//! segments it reads, and becomes visible only through the live record. After a crash it starts over.

use crate::disk::Output;
use crate::flash::{Flash, FlashError, io_error};
use crate::live::{SegmentRef, State, TableState};
use crate::merge::Merge;
use crate::schema::KeySpace;
use crate::segment::{Counts, Part, SegmentKind};
use crate::segment_write::{SegmentWriter, WriteError};
use std::path::{Path, PathBuf};

/// A merge under way.
pub struct Compaction {
    number: usize,
    /// What was live when it began; nothing else may be replaced by it.
    over: State,
    merge: Merge,
    base: Target,
    writer: SegmentWriter<Box<dyn Output>>,
    /// The next key of an index table's base.
    next_key: u64,
    /// Keys of an index table that stay deleted: its base has no holes, so a delta must go on saying so.
    deleted: Vec<u64>,
}

/// Where a segment is being written, and what it is.
struct Target {
    of: SegmentRef,
    path: PathBuf,
    kind: SegmentKind,
}

/// What a compaction did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compacted {
    /// Rows of the new base.
    pub rows: u64,
    /// Bytes written.
    pub bytes: u64,
}

fn write_error(path: &Path) -> impl FnOnce(WriteError) -> FlashError + '_ {
    move |e| match e {
        WriteError::Io(source) => io_error(path)(source),
        other => FlashError::Field { path: path.to_owned(), field: "compaction", problem: other.to_string() },
    }
}

impl Compaction {
    /// Begins merging the deltas of table `number`; `None` if it has none. There must be room for the whole
    /// table once more: the old base stays until the new one is live, and longer where it is retained.
    ///
    /// # Errors
    /// A segment cannot be opened, there is no room, or the new one cannot be created.
    pub fn begin(flash: &Flash, number: usize) -> Result<Option<Self>, FlashError> {
        if flash.record().live.tables[number].deltas.is_empty() {
            return Ok(None);
        }
        let rows = flash.table(number)?;
        flash.check_space(rows.file_bytes())?;
        let base = target(flash, number, 0, Part::Base)?;
        let out = flash.disk().create(&base.path).map_err(io_error(&base.path))?;
        let writer = SegmentWriter::new(out, base.kind.clone());
        let (over, merge) = (flash.record().live.clone(), Merge::new(rows));
        Ok(Some(Self { number, over, merge, base, writer, next_key: 0, deleted: Vec::new() }))
    }

    /// The table that is merged.
    pub fn table(&self) -> usize {
        self.number
    }

    /// Whether what it merges is still what is live in `flash`; if not, it can only be dropped.
    pub fn fits(&self, flash: &Flash) -> bool {
        self.over == flash.record().live
    }

    /// Reads up to about `pages` pages and writes what they give. Returns whether more is left.
    ///
    /// # Errors
    /// A page is damaged (it must be repaired first) or the new segment cannot be written.
    pub fn step(&mut self, pages: u64) -> Result<bool, FlashError> {
        let until = self.merge.pages_read() + pages;
        let zeros = vec![0; self.base.kind.format().row_bytes()];
        while self.merge.pages_read() < until {
            let Some((order, row)) = self.merge.current()? else { return Ok(false) };
            // An index table's base has a row for every key below its last; deleted ones hold zeros that
            // the carried deletes hide.
            while self.base.kind.keys() == KeySpace::Index && self.next_key < order {
                self.writer.push(self.next_key, &zeros).map_err(write_error(&self.base.path))?;
                self.deleted.push(self.next_key);
                self.next_key += 1;
            }
            self.writer.push(order, row).map_err(write_error(&self.base.path))?;
            self.next_key = order.saturating_add(1);
            self.merge.advance()?;
        }
        Ok(true)
    }

    /// Makes the merged table live in place of its deltas, and reclaims them unless they are retained.
    ///
    /// # Errors
    /// Steps are left, something else became live since it began, or the new segments cannot be made durable;
    /// the table is then as it was.
    pub fn finish(mut self, flash: &mut Flash) -> Result<Compacted, FlashError> {
        let path = || self.base.path.clone();
        let refuse = |problem: &str| {
            Err(FlashError::Field { path: path(), field: "compaction", problem: problem.to_owned() })
        };
        if !self.fits(flash) {
            return refuse("something else became live since it began");
        }
        if self.merge.current()?.is_some() {
            return refuse("rows are left to merge");
        }
        let (mut out, counts) = self.writer.finish().map_err(write_error(&self.base.path))?;
        out.sync().map_err(io_error(&self.base.path))?;
        let mut bytes = counts.file_bytes();
        let mut deltas = Vec::new();
        if !self.deleted.is_empty() {
            let (of, carried) = write_deletes(flash, self.number, &self.deleted)?;
            deltas.push(of);
            bytes += carried.file_bytes();
        }
        let folder = self.base.path.parent().unwrap_or(flash.directory());
        flash.disk().sync_dir(folder).map_err(io_error(folder))?;
        // Read back before it counts: it may have been reclaimed, or not have become what was written.
        flash.segment(self.number, self.base.of, Part::Base)?;
        let mut live = self.over;
        live.tables[self.number] = TableState { base: self.base.of, deltas };
        flash.replace_state(live)?;
        Ok(Compacted { rows: counts.rows, bytes })
    }
}

/// The next segment of table `number` in the live generation's folder, `skip` serials on.
fn target(flash: &Flash, number: usize, skip: u32, part: Part) -> Result<Target, FlashError> {
    let live = &flash.record().live;
    let sequence = live.generation.sequence;
    let table = &live.tables[number];
    let here = std::iter::once(&table.base).chain(&table.deltas).filter(|s| s.sequence == sequence);
    let serial = here.map(|s| s.serial).max().unwrap_or(0) + 1 + skip;
    let of = SegmentRef { sequence, serial };
    let (path, kind) = flash.segment_place(number, of, part)?;
    Ok(Target { of, path, kind })
}

fn write_deletes(flash: &Flash, number: usize, deleted: &[u64]) -> Result<(SegmentRef, Counts), FlashError> {
    let Target { of, path, kind } = target(flash, number, 1, Part::Delta)?;
    let out = flash.disk().create(&path).map_err(io_error(&path))?;
    let mut writer = SegmentWriter::new(out, kind);
    for &order in deleted {
        writer.delete(order).map_err(write_error(&path))?;
    }
    let (mut out, counts) = writer.finish().map_err(write_error(&path))?;
    out.sync().map_err(io_error(&path))?;
    Ok((of, counts))
}
