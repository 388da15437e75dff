//! An open flash directory: reads the live generation, replaces the live record and reclaims the
//! files that no generation uses. Never writes a segment.

use crate::bundle::manifest::{Generation, Hash, Manifest, sha256};
use crate::flash::error::{FlashError, io_error};
use crate::flash::live::{LiveRecord, LiveState, SegmentRef, TableState};
use crate::flash::paths::{folder_of, hot_name, kind_of, lock_path, segment_name};
use crate::flash::room::{check_space, compaction_part, reclaim};
use crate::flash::segment::{Part, Segment, SegmentError, SegmentKind};
use crate::flash::table::TableRows;
use crate::io::disk::{Disk, Input, Lock};
use crate::io::paired_record::{PairedRecord, Stored, Unreadable};
use crate::limits::{
    DELTAS_MAX, DENSE_BYTES_MAX, HOT_BYTES_MAX, MANIFEST_BYTES_MAX, PAGE_BYTES, PROBE_BYTES_MAX,
};
use crate::schema::sample::Sample;
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// An open flash directory and its live generation.
pub struct Flash {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) directory: PathBuf,
    pub(super) record: LiveRecord,
    /// Number of writes of the live record.
    pub(super) writes: u64,
    pub(super) manifest: Manifest,
}

/// The keys of a hot list that are left to read.
pub(crate) struct FirstHotKeys {
    file: io::Take<Box<dyn Input>>,
    path: PathBuf,
}

impl FirstHotKeys {
    /// Reads the next `keys_max` keys, most used first; fewer at the end of the list.
    ///
    /// # Errors
    /// [`FlashError::Io`] if the file cannot be read.
    pub fn read(&mut self, keys_max: usize) -> Result<Vec<u64>, FlashError> {
        let mut bytes = Vec::new();
        let mut file = self.file.by_ref().take(8 * keys_max as u64);
        file.read_to_end(&mut bytes).map_err(io_error(&self.path))?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect())
    }
}

/// The live generation in a flash directory, if there is one.
pub(crate) enum Found {
    /// No generation was ever live, or both copies of the live record are missing.
    Nothing,
    /// The live generation cannot be opened, for this reason.
    Damaged(FlashError),
    Live(Box<Flash>),
}

impl Flash {
    /// Opens the live generation of `directory`.
    ///
    /// # Errors
    /// [`FlashError::Field`] if no generation is live or the manifest does not match its hash.
    /// [`FlashError::Live`] or [`FlashError::Manifest`] if one of them does not decode.
    /// [`FlashError::Io`] if the disk refused.
    pub fn open(disk: &Arc<dyn Disk>, directory: &Path) -> Result<Self, FlashError> {
        let read = read_live(disk.as_ref(), directory);
        let Some(stored) = read.map_err(|e| not_flash(disk.as_ref(), directory).unwrap_or(e))?
        else {
            let nothing = || FlashError::field(directory, "live", "no generation is live here");
            return Err(not_flash(disk.as_ref(), directory).unwrap_or_else(nothing));
        };
        Self::of_record(disk, directory, stored)
    }

    /// Opens the generation that `stored`, a live record of `directory`, names as live.
    fn of_record(
        disk: &Arc<dyn Disk>,
        directory: &Path,
        stored: Stored<LiveRecord>,
    ) -> Result<Self, FlashError> {
        let Stored { value: record, writes, .. } = stored;
        let folder = folder_of(directory, record.rebuilds, record.live.generation.sequence);
        let path = folder.join("manifest");
        let bytes = disk.read(&path, MANIFEST_BYTES_MAX as u64).map_err(io_error(&path))?;
        if sha256(&bytes) != record.live.manifest {
            let problem = "does not match its hash in the live record";
            return Err(FlashError::field(&path, "manifest", problem));
        }
        let manifest =
            Manifest::decode(&bytes).map_err(|source| FlashError::Manifest { path, source })?;

        let (listed, declared) = (record.live.tables.len(), manifest.schema.tables.len());
        if listed != declared {
            let problem = format!("{listed} for {declared} tables");
            return Err(FlashError::field(
                &directory.join(LiveRecord::NAMES[0]),
                "tables",
                problem,
            ));
        }
        let (disk, directory) = (Arc::clone(disk), directory.to_owned());
        Ok(Self { disk, directory, record, writes, manifest })
    }

    /// Looks for the live generation in `directory`.
    ///
    /// # Errors
    /// [`FlashError`] if the device refused; another attempt may succeed.
    pub(crate) fn find(disk: &Arc<dyn Disk>, directory: &Path) -> Result<Found, FlashError> {
        let opened = match read_live(disk.as_ref(), directory) {
            Ok(None) => return Ok(Found::Nothing),
            Ok(Some(_)) => Self::open(disk, directory),
            Err(e) => Err(e),
        };
        match opened {
            Ok(flash) => Ok(Found::Live(Box::new(flash))),
            Err(e) if e.is_damage() => Ok(Found::Damaged(e)),
            Err(e) => Err(e),
        }
    }

    /// Returns whether `directory` has a live record, also one that cannot be read or whose
    /// generation cannot be opened.
    pub fn has_live_record(disk: &dyn Disk, directory: &Path) -> bool {
        !matches!(read_live(disk, directory), Ok(None))
    }

    /// Returns the live record, even if its generation is damaged.
    ///
    /// # Errors
    /// [`FlashError::Io`] if the device refuses.
    pub(crate) fn last_record(
        disk: &dyn Disk,
        directory: &Path,
    ) -> Result<Option<LiveRecord>, FlashError> {
        Ok(stored_record(disk, directory)?.map(|stored| stored.value))
    }

    /// Restores a lost or damaged copy of the live record from the other copy.
    ///
    /// # Errors
    /// [`FlashError::Live`] if no copy can be read, [`FlashError::Io`] if the copy cannot be
    /// written.
    pub(crate) fn restore_live_record(disk: &dyn Disk, directory: &Path) -> Result<(), FlashError> {
        match read_live(disk, directory)? {
            // This first look needs no lock. Nearly every start finds both copies, perhaps while
            // another process has the lock.
            Some(Stored { is_in_both: false, .. }) => {}
            _ => return Ok(()),
        }
        let _lock = lock(disk, directory)?;
        match read_live(disk, directory)? {
            // Read again under the lock: another process may have replaced the record meanwhile.
            Some(Stored { value, writes, is_in_both: false }) => {
                log::warn!("{}: a copy of the live record is restored", directory.display());
                Ok(value.store(disk, directory, writes + 1)?)
            }
            _ => Ok(()),
        }
    }

    /// Checks the files of the live generation. The dense network and the probe set must match
    /// their hashes. Each segment must exist and have whole pages; a page's content is checked when
    /// it is read.
    ///
    /// # Errors
    /// [`FlashError`] for the first file that is missing or damaged, or that the device cannot
    /// read.
    pub(crate) fn check_whole(&self) -> Result<(), FlashError> {
        self.dense()?;
        self.probe()?;
        for (number, table) in self.record.live.tables.iter().enumerate() {
            for (of, part) in table.segments() {
                let (path, _) = self.segment_file(number, of, part)?;
                let file = self.disk.open_pages(&path).map_err(io_error(&path))?;
                let bytes = file.bytes().map_err(io_error(&path))?;
                if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES as u64) {
                    let problem = format!("{bytes} bytes are not whole pages");
                    return Err(SegmentError::field(&path, "length", problem).into());
                }
            }
        }
        Ok(())
    }

    /// Returns whether a process can open the live generation to serve it, so far as its network
    /// and the indexes of its segments tell.
    ///
    /// # Errors
    /// [`FlashError`] if the device refuses a file.
    pub(crate) fn is_servable(&self) -> Result<bool, FlashError> {
        let mut numbers = 0..self.record.live.tables.len();
        let opened = self.dense().map(drop);
        match opened.and_then(|()| numbers.try_for_each(|n| self.table(n).map(drop))) {
            Ok(()) => Ok(self.record.may_serve()),
            Err(e) if e.is_damage() => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Makes the previous generation live again and reclaims the live one.
    ///
    /// # Errors
    /// [`FlashError::Field`] if there is no previous generation, [`FlashError::Busy`] if another
    /// process changes the directory, [`FlashError::Io`] if the record cannot be written.
    pub fn rollback(self) -> Result<Self, FlashError> {
        Self::rollback_in(&self.disk, &self.directory)
    }

    /// Rolls `directory` back as [`Flash::rollback`] does. The live generation may be damaged.
    ///
    /// # Errors
    /// Those of [`Flash::rollback`].
    pub(crate) fn rollback_in(disk: &Arc<dyn Disk>, directory: &Path) -> Result<Self, FlashError> {
        let _lock = lock(disk.as_ref(), directory)?;
        let Some(Stored { value, writes, .. }) = before_live(disk.as_ref(), directory)? else {
            let problem = "no previous generation is kept for a rollback";
            return Err(FlashError::field(directory, "previous", problem));
        };
        // The generation that failed is not kept: the next `reclaim` frees its files.
        value.store(disk.as_ref(), directory, writes + 1)?;

        let flash = Self::open(disk, directory)?;
        // Only after the open: if the previous generation does not open, no file has been removed.
        flash.reclaim();
        Ok(flash)
    }

    /// Returns whether a rollback of `directory` leads to a generation that can be served, so far
    /// as [`Flash::is_servable`] tells.
    ///
    /// # Errors
    /// [`FlashError`] if the device refuses a file.
    pub(crate) fn has_servable_previous(
        disk: &Arc<dyn Disk>,
        directory: &Path,
    ) -> Result<bool, FlashError> {
        let Some(previous) = before_live(disk.as_ref(), directory)? else { return Ok(false) };
        match Self::of_record(disk, directory, previous) {
            Ok(previous) => previous.is_servable(),
            Err(e) if e.is_damage() => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Returns the path of the flash directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the live record: the live and the previous generation.
    pub fn record(&self) -> &LiveRecord {
        &self.record
    }

    /// Checks that the live generation may be served.
    ///
    /// # Errors
    /// [`FlashError::Rebuilding`] if it is a step on the way to a newer one that was damaged.
    pub(crate) fn check_servable(&self) -> Result<(), FlashError> {
        if self.record.may_serve() {
            return Ok(());
        }
        let (path, live) = (self.directory.clone(), self.record.live.generation.clone());
        Err(FlashError::Rebuilding { path, live, least: self.record.least })
    }

    /// Returns the live generation's manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns whether a table has [`DELTAS_MAX`] deltas, so that the next delta needs a merge
    /// first.
    pub fn is_full(&self) -> bool {
        self.record.live.tables.iter().any(|table| table.deltas.len() >= DELTAS_MAX)
    }

    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    /// Returns the folder of the generation with `sequence`.
    fn folder(&self, sequence: u64) -> PathBuf {
        folder_of(&self.directory, self.record.rebuilds, sequence)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder(self.manifest.generation.sequence).join(name)
    }

    /// Returns the path of segment `of` of table `number` and the kind that it must be of.
    pub(crate) fn segment_file(
        &self,
        number: usize,
        of: SegmentRef,
        part: Part,
    ) -> Result<(PathBuf, SegmentKind), FlashError> {
        let path = self.folder(of.sequence).join(segment_name(number, of.serial));
        let generation =
            Generation { lineage: self.manifest.generation.lineage.clone(), sequence: of.sequence };
        let kind = kind_of(&generation, of.serial, &self.manifest.schema, number, part, &path)?;
        Ok((path, kind))
    }

    /// Returns the path of the segment of table `number` that the release `sequence` brought, if
    /// the live or the previous generation uses it.
    pub(crate) fn segment_of(&self, number: usize, sequence: u64) -> Option<PathBuf> {
        let wanted = SegmentRef { sequence, serial: 0 };
        let states = std::iter::once(&self.record.live).chain(&self.record.previous);
        let mut tables = states.filter_map(|state| state.tables.get(number));
        let is_used = tables.any(|table| table.segments().any(|(of, _)| of == wanted));
        is_used.then(|| self.folder(sequence).join(segment_name(number, 0)))
    }

    /// Opens a segment for lookups.
    pub(crate) fn segment(
        &self,
        number: usize,
        of: SegmentRef,
        part: Part,
    ) -> Result<Segment, FlashError> {
        let (path, kind) = self.segment_file(number, of, part)?;
        let file = self.disk.open_pages(&path).map_err(io_error(&path))?;
        Ok(Segment::open(&path, file, kind)?)
    }

    /// Opens a segment to read its pages, without its index in memory.
    pub(crate) fn segment_pages(
        &self,
        number: usize,
        of: SegmentRef,
        part: Part,
    ) -> Result<Segment, FlashError> {
        let (path, kind) = self.segment_file(number, of, part)?;
        let file = self.disk.open_pages(&path).map_err(io_error(&path))?;
        Ok(Segment::open_pages(&path, file, kind)?)
    }

    /// Opens the rows of table `number`.
    ///
    /// # Errors
    /// [`FlashError::Io`] if a segment is missing, [`FlashError::Segment`] if its index is damaged
    /// or it is not a segment of the table.
    pub fn table(&self, number: usize) -> Result<TableRows, FlashError> {
        self.table_of(&self.record.live, number)
    }

    /// Opens the rows of table `number` in `state`, which has the live generation's tables.
    pub(crate) fn table_of(
        &self,
        state: &LiveState,
        number: usize,
    ) -> Result<TableRows, FlashError> {
        let state = &state.tables[number];
        let open = |of, part| self.segment(number, of, part).map(Arc::new);
        let deltas =
            state.deltas.iter().map(|d| open(*d, Part::Delta)).collect::<Result<_, _>>()?;
        Ok(TableRows::new(open(state.base, Part::Base)?, deltas)?)
    }

    /// Opens the rows of table `number`. `before` has the same table's rows in an earlier
    /// generation, with the segments `state`. If only deltas followed, the result shares the open
    /// segments and overlays of `before`.
    ///
    /// # Errors
    /// Those of [`Flash::table`].
    pub(crate) fn table_after(
        &self,
        number: usize,
        before: &TableRows,
        state: &TableState,
    ) -> Result<TableRows, FlashError> {
        let live = &self.record.live.tables[number];
        let is_same = live.base == state.base;
        let Some(newer) = live.deltas.strip_prefix(&*state.deltas).filter(|_| is_same) else {
            return self.table(number);
        };
        let open = |of: &SegmentRef| self.segment(number, *of, Part::Delta).map(Arc::new);
        Ok(before.after(newer.iter().map(open).collect::<Result<_, _>>()?)?)
    }

    /// Reads the hot list of table `number`: its most used keys, most used first. Returns no key if
    /// the trainer counted no lookups.
    ///
    /// # Errors
    /// [`FlashError::Io`] if the file cannot be read, [`FlashError::Field`] if it changed.
    pub fn hot_keys(&self, number: usize) -> Result<Vec<u64>, FlashError> {
        let Some(hot) = self.record.live.tables[number].hot else { return Ok(Vec::new()) };
        let path = self.folder(hot.sequence).join(hot_name(number));
        let bytes = self.read(path, hot.sha256, HOT_BYTES_MAX)?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect())
    }

    /// Opens the hot list of table `number` to read its first keys, without a check of the file's
    /// hash, which covers the whole list. A caller must therefore expect keys that the trainer
    /// never listed. Returns `None` if the trainer counted no lookups.
    ///
    /// # Errors
    /// [`FlashError::Io`] if the file cannot be opened.
    pub(crate) fn first_hot_keys(&self, number: usize) -> Result<Option<FirstHotKeys>, FlashError> {
        let Some(hot) = self.record.live.tables[number].hot else { return Ok(None) };
        let path = self.folder(hot.sequence).join(hot_name(number));
        let file = self.disk.open(&path).map_err(io_error(&path))?;
        Ok(Some(FirstHotKeys { file: file.take(HOT_BYTES_MAX), path }))
    }

    /// Reads the ONNX file of the dense network.
    ///
    /// # Errors
    /// [`FlashError::Io`] if the file cannot be read, [`FlashError::Field`] if it changed.
    pub fn dense(&self) -> Result<Vec<u8>, FlashError> {
        let hash = self.manifest.blobs[self.manifest.dense as usize].sha256;
        self.read(self.file("dense.onnx"), hash, DENSE_BYTES_MAX)
    }

    /// Reads the probe set. Returns no sample if the bundle had no probe set.
    ///
    /// # Errors
    /// [`FlashError::Io`] if the file cannot be read, [`FlashError::Field`] if it changed,
    /// [`FlashError::Probe`] if it does not decode.
    pub fn probe(&self) -> Result<Vec<Sample>, FlashError> {
        let Some(probe) = self.manifest.probe else { return Ok(Vec::new()) };
        let hash = self.manifest.blobs[probe as usize].sha256;
        let bytes = self.read(self.file("probe"), hash, PROBE_BYTES_MAX)?;
        Sample::decode_set(&bytes)
            .map_err(|source| FlashError::Probe { path: self.file("probe"), source })
    }

    /// Reads the whole file at `path`, which must match the hash in its bundle.
    fn read(&self, path: PathBuf, hash: Hash, bytes_max: u64) -> Result<Vec<u8>, FlashError> {
        let bytes = self.disk.read(&path, bytes_max).map_err(io_error(&path))?;
        if sha256(&bytes) == hash {
            return Ok(bytes);
        }
        Err(FlashError::field(&path, "content", "does not match its hash"))
    }

    /// Takes the directory's lock, which a process holds while it changes the directory. Does not
    /// wait.
    pub fn lock(&self) -> Result<Lock, FlashError> {
        lock(self.disk.as_ref(), &self.directory)
    }

    /// Reopens the directory if the live record was replaced. Returns whether it was.
    ///
    /// # Errors
    /// Those of [`Flash::open`].
    pub fn refresh(&mut self) -> Result<bool, FlashError> {
        let stored = read_live(self.disk.as_ref(), &self.directory)?;
        if let Some(stored) = stored.filter(|stored| stored.value == self.record) {
            // A restored copy counts as a write and leaves the value as it was.
            self.writes = stored.writes;
            return Ok(false);
        }
        *self = Self::open(&self.disk, &self.directory)?;
        Ok(true)
    }

    /// Returns the path at which a compaction of table `number` writes the unfinished base. The
    /// name contains a hash of everything that the compaction merges.
    pub(crate) fn compaction_part(&self, number: usize) -> PathBuf {
        compaction_part(&self.directory, &self.record, number)
    }

    /// Replaces the segments of the live generation and reclaims those no longer used. The caller
    /// holds the lock.
    pub(crate) fn replace_state(&mut self, live: LiveState) -> Result<(), FlashError> {
        assert_eq!(live.generation, self.record.live.generation, "a merge changes no generation");
        assert_eq!(live.tables.len(), self.manifest.schema.tables.len(), "one state a table");

        let record = LiveRecord { live, ..self.record.clone() };
        // After a failed write `self` has the old record, and `refresh` finds what the disk has.
        record.store(self.disk.as_ref(), &self.directory, self.writes + 1)?;
        (self.record, self.writes) = (record, self.writes + 1);
        self.reclaim();
        Ok(())
    }

    /// Checks that the file system has room for `bytes` more.
    pub(crate) fn check_space(&self, bytes: u64) -> Result<(), FlashError> {
        check_space(self.disk.as_ref(), &self.directory, bytes)
    }

    /// Removes the files that neither the live nor the previous generation uses. These are old
    /// generations, merged segments, interrupted installs, and compactions whose inputs are no
    /// longer live. Logs a file that cannot be removed; it costs space only.
    pub fn reclaim(&self) {
        reclaim(self.disk.as_ref(), &self.directory, Some(&self.record));
    }

    /// Reclaims `directory`. If no generation is live, it removes every generation's files. If no
    /// copy of the live record can be read, it removes nothing. For a caller that abandons an
    /// install.
    ///
    /// # Errors
    /// [`FlashError::Busy`] if another process changes the directory, [`FlashError::Io`] if the
    /// device refuses.
    pub fn reclaim_in(disk: &Arc<dyn Disk>, directory: &Path) -> Result<(), FlashError> {
        let _lock = match lock(disk.as_ref(), directory) {
            Err(FlashError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(());
            }
            lock => lock?,
        };
        match read_live(disk.as_ref(), directory) {
            Ok(stored) => {
                reclaim(disk.as_ref(), directory, stored.map(|stored| stored.value).as_ref());
                Ok(())
            }
            Err(e) if e.is_damage() => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Returns the bytes of the live generation on flash, from the lengths of its files.
    ///
    /// # Errors
    /// [`FlashError::Io`] if a segment cannot be opened.
    pub fn bytes(&self) -> Result<u64, FlashError> {
        let blob = |b: u32| self.manifest.blobs[b as usize].raw_bytes();
        let mut sum = blob(self.manifest.dense) + self.manifest.probe.map_or(0, blob);
        for (number, table) in self.record.live.tables.iter().enumerate() {
            sum += table.hot.map_or(0, |hot| hot.bytes);
            for (of, part) in table.segments() {
                let (path, _) = self.segment_file(number, of, part)?;
                let bytes = self.disk.open_pages(&path).and_then(|file| file.bytes());
                sum += bytes.map_err(io_error(&path))?;
            }
        }
        Ok(sum)
    }
}

pub(super) fn lock(disk: &dyn Disk, directory: &Path) -> Result<Lock, FlashError> {
    let path = lock_path(directory);
    disk.lock(&path, Duration::ZERO).map_err(io_error(&path))?.ok_or(FlashError::Busy { path })
}

fn read_live(disk: &dyn Disk, directory: &Path) -> Result<Option<Stored<LiveRecord>>, FlashError> {
    LiveRecord::load(disk, directory).map_err(|unreadable| match unreadable {
        Unreadable::Device(error) => error.into(),
        Unreadable::Damaged { path, problem } => FlashError::Live { path, problem },
    })
}

/// Returns the error for a path that is no flash directory, by what a user may have taken for one.
fn not_flash(disk: &dyn Disk, directory: &Path) -> Option<FlashError> {
    let content = disk.list(directory);
    let holds = |name: &str| content.iter().flatten().any(|path| path.ends_with(name));
    let problem = match &content {
        Err(e) if e.kind() == ErrorKind::NotFound => "no such folder",
        Err(e) if e.kind() == ErrorKind::NotADirectory => {
            "is a file; `hatchback install BUNDLE --flash DIR` makes a flash directory of a bundle"
        }
        _ if holds("metadata") && holds("targets") => {
            "is a repository of releases; `hatchback sync` makes a flash directory of it"
        }
        _ if holds("root.factory") => "is a sync directory; the flash directory is another",
        _ => return None,
    };
    Some(FlashError::Live { path: directory.to_owned(), problem: problem.to_owned() })
}

/// Returns the live record, even if its generation is damaged; `None` if every copy is damaged or
/// missing.
///
/// # Errors
/// [`FlashError::Io`] if the device refuses a copy, which may return later.
pub(super) fn stored_record(
    disk: &dyn Disk,
    directory: &Path,
) -> Result<Option<Stored<LiveRecord>>, FlashError> {
    match read_live(disk, directory) {
        Err(e) if e.is_damage() => Ok(None),
        stored => stored,
    }
}

/// Returns the live record with the previous generation as the live one; `None` if there is none.
fn before_live(
    disk: &dyn Disk,
    directory: &Path,
) -> Result<Option<Stored<LiveRecord>>, FlashError> {
    let Some(stored) = stored_record(disk, directory)? else { return Ok(None) };
    let previous = stored.value.previous.clone();
    Ok(previous.map(|live| {
        let value = LiveRecord { live, previous: None, ..stored.value };
        Stored { value, ..stored }
    }))
}
