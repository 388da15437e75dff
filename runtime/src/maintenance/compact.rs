//! Compaction: merging a table's deltas into a new base, a few pages at a time, so that whoever
//! drives it can keep an I/O share and a wear budget, pause, and stop. Never runs on a request's
//! path, never changes the segments it reads, and becomes visible only through the live record.
//!
//! A merge always gives the same pages from the same segments. So what an attempt leaves when it is
//! stopped, by a crash too, is the beginning of what the next one would write: a file whose name is
//! a hash of what it is merged from. It goes on behind the last page that proves, with all pages
//! before it, to be sound.

use crate::flash::live::{LiveState, SegmentRef, TableState};
use crate::flash::merge::Merge;
use crate::flash::overlay::Newest;
use crate::flash::segment::writer::{SegmentWriter, WriteError, Written};
use crate::flash::segment::{Counts, KEYS_PER_PAGE, Part, SegmentKind};
use crate::flash::{Flash, FlashError, io_error};
use crate::io::disk::Output;
use crate::io::page::AlignedPage;
use crate::io::reader::PageFile;
use crate::limits::PAGE_BYTES;
use crate::schema::KeySpace;
use std::path::{Path, PathBuf};
use std::sync::Arc;

type Writer = SegmentWriter<Box<dyn Output>>;

/// A merge under way.
pub struct Compaction {
    number: usize,
    /// What was live when it began; nothing else may be replaced by it.
    over: LiveState,
    merge: Merge,
    base: Target,
    /// Where the base is written until it is whole.
    part: PathBuf,
    /// What an earlier attempt left, and its pages.
    left: Option<(Arc<dyn PageFile>, u32)>,
    /// Those of its pages that proved to be sound; all that is taken over once there is a writer.
    written: Written,
    resumed_pages: u32,
    writer: Option<Writer>,
    /// The next key of an index table's base.
    next_key: u64,
    /// Keys of an index table that stay deleted: its base has no holes, so a delta must go on
    /// saying so.
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
    /// Bytes of what became live.
    pub bytes: u64,
}

fn write_error(path: &Path) -> impl FnOnce(WriteError) -> FlashError + '_ {
    move |e| match e {
        WriteError::Io(source) => io_error(path)(source),
        other => FlashError::Field {
            path: path.to_owned(),
            field: "compaction",
            problem: other.to_string(),
        },
    }
}

impl Compaction {
    /// Begins merging the deltas of table `number`, or goes on where an earlier attempt stopped;
    /// `None` if it has none. There must be room for the whole table once more: the old base stays
    /// until the new one is live, and longer where it is retained.
    ///
    /// # Errors
    /// A segment cannot be opened, or there is no room.
    pub fn begin(flash: &Flash, number: usize) -> Result<Option<Self>, FlashError> {
        if flash.record().live.tables[number].deltas.is_empty() {
            return Ok(None);
        }
        let rows = flash.table(number)?;
        let part = flash.part_place(number);
        let left = flash.disk().open_pages(&part).ok();
        let left_bytes = left.as_ref().and_then(|l| l.bytes().ok()).unwrap_or(0);
        flash.check_space(rows.file_bytes().saturating_sub(left_bytes))?;
        let left = left.map(|l| (l, u32::try_from(left_bytes / PAGE_BYTES as u64).unwrap_or(0)));
        let base = target(flash, number, 0, Part::Base)?;
        let (over, merge, written) =
            (flash.record().live.clone(), Merge::new(rows), Written::default());
        let (resumed_pages, writer, next_key, deleted) = (0, None, 0, Vec::new());
        Ok(Some(Self {
            number,
            over,
            merge,
            base,
            part,
            left,
            written,
            resumed_pages,
            writer,
            next_key,
            deleted,
        }))
    }

    /// The table that is merged.
    pub fn table(&self) -> usize {
        self.number
    }

    /// Pages that an earlier attempt had written.
    pub fn resumed_pages(&self) -> u32 {
        self.resumed_pages
    }

    /// Bytes that this attempt wrote so far.
    pub fn bytes(&self) -> u64 {
        self.writer
            .as_ref()
            .map_or(0, |w| w.bytes() - u64::from(self.resumed_pages) * PAGE_BYTES as u64)
    }

    /// Bytes that it must be allowed to write so that the next step, or `finish`, gets on.
    ///
    /// # Errors
    /// A page is damaged or cannot be read.
    pub fn next_bytes(&mut self) -> Result<u64, FlashError> {
        let Some(writer) = &self.writer else { return Ok(0) };
        if self.merge.current()?.is_some() {
            return Ok(PAGE_BYTES as u64);
        }
        let deletes = self.deleted.len().div_ceil(KEYS_PER_PAGE) as u64 + 1;
        let deletes = if self.deleted.is_empty() { 0 } else { deletes };
        Ok(writer.finish_bytes() + deletes * PAGE_BYTES as u64)
    }

    /// Whether what it merges is still what is live in `flash`; if not, it can only be dropped.
    pub fn fits(&self, flash: &Flash) -> bool {
        self.over == flash.record().live
    }

    /// Reads and writes up to about `pages` pages each, and writes no more than `bytes_max`.
    /// Returns whether more is left.
    ///
    /// # Errors
    /// A page is damaged (it must be repaired first) or the new segment cannot be written.
    pub fn step(&mut self, flash: &Flash, pages: u64, bytes_max: u64) -> Result<bool, FlashError> {
        let writer = self.writer.take();
        let Some(mut writer) =
            writer.map_or_else(|| self.take_over(flash, pages), |w| Ok(Some(w)))?
        else {
            return Ok(true);
        };
        let merged = self.merge_into(&mut writer, pages, bytes_max);
        self.writer = Some(writer);
        merged
    }

    /// Proves what an earlier attempt left, up to `pages` pages of it; then gives a writer that
    /// goes on behind.
    fn take_over(&mut self, flash: &Flash, pages: u64) -> Result<Option<Writer>, FlashError> {
        let mut page = AlignedPage::zeroed();
        for _ in 0..pages {
            let number = self.written.pages();
            let read = self
                .left
                .as_ref()
                .filter(|(_, n)| number < *n)
                .map(|(l, _)| l.read_page(number, &mut page));
            let is_sound =
                matches!(read, Some(Ok(()))) && self.written.take(&self.base.kind, &page.0).is_ok();
            if !is_sound {
                return self.open_writer(flash).map(Some);
            }
            self.note_deleted();
        }
        Ok(None)
    }

    /// Finds the deleted keys again that the pages taken over hold zeros for.
    fn note_deleted(&mut self) {
        let Some(last) = self.written.last() else { return };
        if self.base.kind.keys() == KeySpace::Index {
            let rows = self.merge.rows();
            let is_there = |order: &u64| match rows.newest(*order) {
                None => *order < rows.base_rows(),
                newest => newest != Some(Newest::Deleted),
            };
            self.deleted.extend((self.next_key..=last).filter(|order| !is_there(order)));
        }
        self.next_key = last.saturating_add(1);
    }

    fn open_writer(&mut self, flash: &Flash) -> Result<Writer, FlashError> {
        self.resumed_pages = self.written.pages();
        let out = match self.written.last() {
            None => flash.disk().create(&self.part),
            Some(last) => {
                self.merge.seek_past(last)?;
                flash.disk().append(&self.part, u64::from(self.resumed_pages) * PAGE_BYTES as u64)
            }
        };
        let out = out.map_err(io_error(&self.part))?;
        let folder = self.part.parent().unwrap_or(flash.directory());
        flash.disk().sync_dir(folder).map_err(io_error(folder))?;
        self.left = None;
        Ok(SegmentWriter::resume(out, self.base.kind.clone(), std::mem::take(&mut self.written)))
    }

    fn merge_into(
        &mut self,
        writer: &mut Writer,
        pages: u64,
        bytes_max: u64,
    ) -> Result<bool, FlashError> {
        let page = PAGE_BYTES as u64;
        let until = self.merge.pages_read().saturating_add(pages);
        let most = writer.bytes().saturating_add(bytes_max.min(pages.saturating_mul(page)));
        let zeros = vec![0; self.base.kind.format().row_bytes()];
        while self.merge.pages_read() < until && writer.bytes() + page <= most {
            let Some((order, row)) = self.merge.current()? else { return Ok(false) };
            // An index table's base has a row for every key below its last; deleted ones hold zeros
            // that the carried deletes hide.
            if self.base.kind.keys() == KeySpace::Index && self.next_key < order {
                writer.push(self.next_key, &zeros).map_err(write_error(&self.part))?;
                self.deleted.push(self.next_key);
                self.next_key += 1;
                continue;
            }
            writer.push(order, row).map_err(write_error(&self.part))?;
            self.next_key = order.saturating_add(1);
            self.merge.advance()?;
        }
        Ok(true)
    }

    /// Makes what was written so far durable: a crash costs no more than what is written after.
    ///
    /// # Errors
    /// The device refused.
    pub fn sync(&mut self) -> Result<(), FlashError> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        writer.out().sync().map_err(io_error(&self.part))
    }

    /// Makes the merged table live in place of its deltas, and reclaims them unless they are
    /// retained.
    ///
    /// # Errors
    /// Steps are left, something else became live since it began, or the new segments cannot be
    /// made durable; the table is then as it was.
    pub fn finish(mut self, flash: &mut Flash) -> Result<Compacted, FlashError> {
        let refuse = |path: &Path, problem: &str| {
            Err(FlashError::Field {
                path: path.to_owned(),
                field: "compaction",
                problem: problem.to_owned(),
            })
        };
        let _lock = flash.lock()?;
        flash.refresh()?;
        if !self.fits(flash) {
            return refuse(&self.base.path, "something else became live since it began");
        }
        let Some(writer) = self.writer.take() else {
            return refuse(&self.base.path, "no step was made");
        };
        if self.merge.current()?.is_some() {
            return refuse(&self.base.path, "rows are left to merge");
        }
        let (mut out, counts) = writer.finish().map_err(write_error(&self.part))?;
        out.sync().map_err(io_error(&self.part))?;
        drop(out);
        let mut bytes = counts.file_bytes();
        let mut deltas = Vec::new();
        if !self.deleted.is_empty() {
            let (of, carried) = write_deletes(flash, self.number, &self.deleted)?;
            deltas.push(of);
            bytes += carried.file_bytes();
        }
        flash.disk().rename(&self.part, &self.base.path).map_err(io_error(&self.part))?;
        let folder = self.base.path.parent().unwrap_or(flash.directory());
        flash.disk().sync_dir(folder).map_err(io_error(folder))?;
        // Read back before it counts: it may have been reclaimed, or not have become what was
        // written.
        flash.segment(self.number, self.base.of, Part::Base)?;
        let mut live = self.over;
        let hot = live.tables[self.number].hot;
        live.tables[self.number] = TableState { base: self.base.of, placed: None, deltas, hot };
        flash.replace_state(live)?;
        Ok(Compacted { rows: counts.rows, bytes })
    }
}

/// The next segment of table `number` in the live generation's folder, `skip` serials on.
fn target(flash: &Flash, number: usize, skip: u32, part: Part) -> Result<Target, FlashError> {
    let live = &flash.record().live;
    let sequence = live.generation.sequence;
    let table = &live.tables[number];
    let here = table.segments().map(|(of, _)| of).filter(|s| s.sequence == sequence);
    let serial = here.map(|s| s.serial).max().unwrap_or(0) + 1 + skip;
    let of = SegmentRef { sequence, serial };
    let (path, kind) = flash.segment_place(number, of, part)?;
    Ok(Target { of, path, kind })
}

fn write_deletes(
    flash: &Flash,
    number: usize,
    deleted: &[u64],
) -> Result<(SegmentRef, Counts), FlashError> {
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
