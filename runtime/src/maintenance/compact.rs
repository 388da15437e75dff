//! Compaction: merges a table's deltas into a new base, a few pages at a time. The caller can
//! therefore limit the share of I/O and the wear, pause and stop. Never runs on the request path
//! and never changes the segments that it reads. The new base is used only after the live record
//! names it.
//!
//! The same segments always merge to the same pages. An interrupted attempt, even after a crash,
//! has therefore written the first pages of the next attempt. The file's name contains a hash of
//! the inputs. The next attempt keeps the leading valid pages and continues after them.

use crate::flash::live::{LiveState, SegmentRef, TableState};
use crate::flash::merge::Merge;
use crate::flash::overlay::Newest;
use crate::flash::segment::writer::{SegmentWriter, WriteError, WrittenPages};
use crate::flash::segment::{Counts, KEYS_PER_PAGE, Part, SegmentKind};
use crate::flash::{Flash, FlashError, io_error};
use crate::io::disk::{Lock, Output};
use crate::io::page::AlignedPage;
use crate::io::reader::PageFile;
use crate::limits::PAGE_BYTES;
use crate::schema::KeySpace;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

type Writer = SegmentWriter<Box<dyn Output>>;

/// The merge of one table.
pub struct Compaction {
    number: usize,
    /// The live state at the start. The compaction can replace only this state.
    start_state: LiveState,
    merge: Merge,
    base: NewSegment,
    /// The path of the base until it is whole.
    part: PathBuf,
    /// The file of an earlier attempt and its number of pages.
    earlier: Option<(Arc<dyn PageFile>, u32)>,
    /// The valid pages of the earlier attempt. The writer takes them when it starts.
    written: WrittenPages,
    resumed_pages: u32,
    writer: Option<Writer>,
    /// The next key of an index table's base.
    next_key: u64,
    /// Deleted keys of an index table. Its base has a row for every key, so a delta of the new
    /// state must still delete these keys.
    deleted: Vec<u64>,
}

/// A segment that the compaction writes.
struct NewSegment {
    of: SegmentRef,
    path: PathBuf,
    kind: SegmentKind,
}

/// The result of a compaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compacted {
    /// Rows of the new base.
    pub rows: u64,
    /// Bytes of the segments that became live.
    pub bytes: u64,
}

fn refused(path: &Path, problem: impl Into<String>) -> FlashError {
    FlashError::field(path, "compaction", problem)
}

fn write_error(path: &Path) -> impl FnOnce(WriteError) -> FlashError + '_ {
    move |e| match e {
        WriteError::Io(source) => io_error(path)(source),
        other => refused(path, other.to_string()),
    }
}

impl Compaction {
    /// Starts to merge the deltas of table `number`, or continues an earlier attempt. Returns
    /// `None` if the table has no deltas. The merge needs room for the whole table once more. The
    /// old base stays until the new one is live, and longer if the previous generation uses it.
    ///
    /// # Errors
    /// [`FlashError::Space`] without that room, and [`FlashError`] if a segment does not open.
    pub fn begin(flash: &Flash, number: usize) -> Result<Option<Self>, FlashError> {
        let start_state = flash.record().live.clone();
        if start_state.tables[number].deltas.is_empty() {
            return Ok(None);
        }

        let rows = flash.table(number)?;
        let part = flash.compaction_part(number);
        let earlier = flash.disk().open_pages(&part).ok();
        let earlier_bytes = earlier.as_ref().and_then(|file| file.bytes().ok()).unwrap_or(0);
        flash.check_space(rows.file_bytes().saturating_sub(earlier_bytes))?;

        let pages = u32::try_from(earlier_bytes / PAGE_BYTES as u64).unwrap_or(0);
        Ok(Some(Self {
            number,
            start_state,
            merge: Merge::new(rows),
            base: new_segment(flash, number, 0, Part::Base)?,
            part,
            earlier: earlier.map(|file| (file, pages)),
            written: WrittenPages::default(),
            resumed_pages: 0,
            writer: None,
            next_key: 0,
            deleted: Vec::new(),
        }))
    }

    /// Returns the number of the table.
    pub fn table(&self) -> usize {
        self.number
    }

    /// Returns whether an install removed the unfinished base to make room.
    pub(super) fn is_removed(&self, flash: &Flash) -> bool {
        let is_missing = |e: io::Error| e.kind() == io::ErrorKind::NotFound;
        self.writer.is_some() && flash.disk().open_pages(&self.part).err().is_some_and(is_missing)
    }

    /// Returns the number of pages that an earlier attempt had written.
    pub fn resumed_pages(&self) -> u32 {
        self.resumed_pages
    }

    /// Returns the bytes that this attempt wrote so far.
    pub fn bytes(&self) -> u64 {
        let resumed = u64::from(self.resumed_pages) * PAGE_BYTES as u64;
        self.writer.as_ref().map_or(0, |writer| {
            assert!(writer.bytes() >= resumed, "the writer counts the resumed pages");
            writer.bytes() - resumed
        })
    }

    /// Returns the bytes that the wear budget must allow before the next step, or before `finish`.
    ///
    /// # Errors
    /// [`FlashError::Segment`] if a page is damaged or cannot be read.
    pub fn next_bytes(&mut self) -> Result<u64, FlashError> {
        // Until the writer is open, a step only checks the pages of an earlier attempt.
        let Some(writer) = &self.writer else { return Ok(0) };
        if self.merge.current()?.is_some() {
            return Ok(PAGE_BYTES as u64);
        }

        let deletes = self.deleted.len().div_ceil(KEYS_PER_PAGE) as u64 + 1;
        let deletes = if self.deleted.is_empty() { 0 } else { deletes };
        Ok(writer.finish_bytes() + deletes * PAGE_BYTES as u64)
    }

    /// Returns whether the inputs of the merge are still live. If not, the compaction can only be
    /// dropped.
    pub fn fits(&self, flash: &Flash) -> bool {
        self.start_state == flash.record().live
    }

    /// Reads up to about `pages` pages, and writes up to about as many, in at most `bytes_max`
    /// bytes. Returns whether rows are left.
    ///
    /// # Errors
    /// [`FlashError::Segment`] if a page is damaged, which a repair must replace first;
    /// [`FlashError::Io`] if the new segment cannot be written.
    pub fn step(&mut self, flash: &Flash, pages: u64, bytes_max: u64) -> Result<bool, FlashError> {
        let writer = match self.writer.take() {
            Some(writer) => Some(writer),
            None => self.resume(flash, pages)?,
        };
        let Some(mut writer) = writer else { return Ok(true) };

        let merged = self.merge_into(&mut writer, pages, bytes_max);
        self.writer = Some(writer);
        merged
    }

    /// Checks up to `pages` pages of an earlier attempt. After the last valid page, returns a
    /// writer that continues after it.
    fn resume(&mut self, flash: &Flash, pages: u64) -> Result<Option<Writer>, FlashError> {
        let mut page = AlignedPage::zeroed();
        for _ in 0..pages {
            let number = self.written.pages();
            let read = self
                .earlier
                .as_ref()
                .filter(|(_, n)| number < *n)
                .map(|(file, _)| file.read_page(number, &mut page));
            let is_valid =
                // A page that cannot be read counts as not written. It and those after it are
                // merged again.
                matches!(read, Some(Ok(()))) && self.written.take(&self.base.kind, &page.0).is_ok();
            if !is_valid {
                return self.open_writer(flash).map(Some);
            }
            self.collect_deleted();
        }
        Ok(None)
    }

    /// Collects the deleted keys of the resumed pages, whose rows hold zeros.
    fn collect_deleted(&mut self) {
        let Some(last) = self.written.last() else { return };
        if self.base.kind.keys() == KeySpace::Index {
            let rows = self.merge.rows();
            let is_present = |order: &u64| match rows.newest(*order) {
                None => *order < rows.base_rows(),
                newest => newest != Some(Newest::Deleted),
            };
            self.deleted.extend((self.next_key..=last).filter(|order| !is_present(order)));
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
        // Syncs of the content would be lost with the name of the file.
        flash.disk().sync_dir(folder).map_err(io_error(folder))?;
        self.earlier = None;
        Ok(SegmentWriter::resume(out, self.base.kind.clone(), std::mem::take(&mut self.written)))
    }

    fn merge_into(
        &mut self,
        writer: &mut Writer,
        pages: u64,
        bytes_max: u64,
    ) -> Result<bool, FlashError> {
        let page = PAGE_BYTES as u64;
        let pages_end = self.merge.pages_read().saturating_add(pages);
        let bytes_end = writer.bytes().saturating_add(bytes_max.min(pages.saturating_mul(page)));
        let zeros = vec![0; self.base.kind.format().row_bytes()];

        while self.merge.pages_read() < pages_end && writer.bytes() + page <= bytes_end {
            let Some((order, row)) = self.merge.current()? else { return Ok(false) };
            // An index table's base has a row for every key below its last. The row of a deleted
            // key holds zeros, and the delta of deletes hides it.
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

    /// Makes the pages written so far durable. A crash then loses only later pages.
    ///
    /// # Errors
    /// [`FlashError::Io`] if the device refused.
    pub fn sync(&mut self) -> Result<(), FlashError> {
        let Some(writer) = &mut self.writer else { return Ok(()) };
        writer.out().sync().map_err(io_error(&self.part))
    }

    /// Makes the merged table live in place of its deltas. Reclaims the deltas unless the previous
    /// generation uses them.
    ///
    /// # Errors
    /// [`FlashError::Field`] if rows are left or another state became live since the start.
    /// [`FlashError::Busy`] if another process changes the directory. [`FlashError::Io`] if the new
    /// segments cannot be made durable. The table is then unchanged.
    pub fn finish(self, flash: &mut Flash) -> Result<Compacted, FlashError> {
        let lock = flash.lock()?;
        self.finish_under(flash, lock)
    }

    /// Makes the merged table live as [`Compaction::finish`] does. `_lock` is the directory's lock.
    pub(super) fn finish_under(
        mut self,
        flash: &mut Flash,
        _lock: Lock,
    ) -> Result<Compacted, FlashError> {
        // Under the lock, which no install or rollback can take until the record is replaced.
        flash.refresh()?;
        if !self.fits(flash) {
            return Err(refused(&self.base.path, "another state became live since the start"));
        }
        let Some(writer) = self.writer.take() else {
            return Err(refused(&self.base.path, "no step was made"));
        };
        if self.merge.current()?.is_some() {
            return Err(refused(&self.base.path, "rows are left to merge"));
        }

        let (mut out, counts) = writer.finish().map_err(write_error(&self.part))?;
        // The content before the rename: a power cut must not leave the final name with missing
        // pages.
        out.sync().map_err(io_error(&self.part))?;
        drop(out);

        let mut bytes = counts.file_bytes();
        let mut deltas = Vec::new();
        if !self.deleted.is_empty() {
            let (of, deletes) = write_deletes(flash, self.number, &self.deleted)?;
            deltas.push(of);
            bytes += deletes.file_bytes();
        }

        flash.disk().rename(&self.part, &self.base.path).map_err(io_error(&self.part))?;
        let folder = self.base.path.parent().unwrap_or(flash.directory());
        flash.disk().sync_dir(folder).map_err(io_error(folder))?;

        // Another process may have reclaimed the file, or the device may have lost the writes.
        let written = flash.segment(self.number, self.base.of, Part::Base)?;
        if written.counts() != counts {
            return Err(refused(&self.base.path, "holds other pages than the merge wrote"));
        }

        let mut live = self.start_state;
        let hot = live.tables[self.number].hot;
        live.tables[self.number] = TableState { base: self.base.of, deltas, hot };
        flash.replace_state(live)?;
        Ok(Compacted { rows: counts.rows, bytes })
    }
}

/// Returns a new segment of table `number` in the live generation's folder. Its serial is `skip`
/// above the next free one.
fn new_segment(
    flash: &Flash,
    number: usize,
    skip: u32,
    part: Part,
) -> Result<NewSegment, FlashError> {
    let live = &flash.record().live;
    let sequence = live.generation.sequence;
    let used = live.tables[number].segments().map(|(of, _)| of).filter(|s| s.sequence == sequence);
    let Some(serial) = used.map(|s| s.serial).max().unwrap_or(0).checked_add(1 + skip) else {
        return Err(refused(flash.directory(), format!("table {number} has no serial left")));
    };

    let of = SegmentRef { sequence, serial };
    let (path, kind) = flash.segment_file(number, of, part)?;
    Ok(NewSegment { of, path, kind })
}

/// Writes a delta that deletes the keys `deleted`.
fn write_deletes(
    flash: &Flash,
    number: usize,
    deleted: &[u64],
) -> Result<(SegmentRef, Counts), FlashError> {
    let NewSegment { of, path, kind } = new_segment(flash, number, 1, Part::Delta)?;
    let out = flash.disk().create(&path).map_err(io_error(&path))?;
    let mut writer = SegmentWriter::new(out, kind);
    for &order in deleted {
        writer.delete(order).map_err(write_error(&path))?;
    }

    let (mut out, counts) = writer.finish().map_err(write_error(&path))?;
    out.sync().map_err(io_error(&path))?;
    Ok((of, counts))
}
