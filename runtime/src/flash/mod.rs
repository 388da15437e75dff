//! The flash directory: the generations that lie on flash and the one record that says which is
//! live. Nothing becomes live before all of it is written, checked and durable. Never changes a
//! segment that a live or retained generation uses.
//!
//! ```text
//! DIR/live                          the live record
//! DIR/lock                          held by the one process that changes the directory
//! DIR/g000000000001/manifest        one folder a generation that arrived
//! DIR/g000000000001/t0000-0000.seg  the rows of table 0 (a base, or in a delta what changed)
//! DIR/g000000000001/t0000-0001.seg  its most used rows once more, if it is a snapshot with counts
//! DIR/g000000000001/t0000-0002.seg  the base after a compaction
//! DIR/g000000000001/t0000-*.part    a compaction under way; the name is a hash of what is merged
//! DIR/g000000000001/t0000.hot       its most used keys
//! DIR/g000000000001/dense.onnx
//! DIR/g000000000001/probe
//! ```

mod install;
pub mod live;
pub mod merge;
pub mod overlay;
pub mod segment;
pub mod table;

pub use install::Prepared;

use crate::bundle::BundleError;
use crate::bundle::manifest::{Generation, Hash, Manifest, ManifestError, sha256};
use crate::flash::live::{LiveRecord, LiveState, SegmentRef};
use crate::flash::overlay::DELTAS_MAX;
use crate::flash::segment::{Part, SEGMENT_FORMAT, Segment, SegmentError, SegmentKind};
use crate::flash::table::TableRows;
use crate::io::atomic_write;
use crate::io::disk::{Disk, Lock};
use crate::limits::{HOT_KEYS_MAX, PLACED_ONE_IN, PLACED_ROWS_MIN};
use crate::schema::Schema;
use crate::schema::sample::{ProbeError, Sample};
use hatchback_kernels::dense::DenseError;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why a flash directory cannot be used or a bundle cannot be laid on it.
#[derive(Debug, thiserror::Error)]
pub enum FlashError {
    /// A file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The bundle is refused.
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// A segment is refused.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The live record is refused.
    #[error("{path}: {problem}", path = path.display())]
    Live {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A manifest on flash is refused.
    #[error("{path}: {source}", path = path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: ManifestError,
    },
    /// The probe set does not decode.
    #[error("{path}: {source}", path = path.display())]
    Probe {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: ProbeError,
    },
    /// The dense network does not load or does not fit the schema.
    #[error("{path}: {source}", path = path.display())]
    Dense {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: DenseError,
    },
    /// A field of a file on flash is wrong.
    #[error("{path}: {field}: {problem}", path = path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// Which field.
        field: &'static str,
        /// Its value and what is wrong.
        problem: String,
    },
    /// The bundle is of another model.
    #[error("{path}: holds {held}, the bundle is {offered}", path = path.display())]
    Lineage {
        /// The flash directory.
        path: PathBuf,
        /// What is live.
        held: Generation,
        /// What the bundle holds.
        offered: Generation,
    },
    /// The bundle is not newer than what is live. A downgrade is a new release with a higher
    /// sequence.
    #[error("{path}: {held} is live with other content; {offered} needs a higher sequence", path = path.display())]
    NotNewer {
        /// The flash directory.
        path: PathBuf,
        /// What is live.
        held: Generation,
        /// What the bundle holds.
        offered: Generation,
    },
    /// The bundle is a delta from a generation that is not live.
    #[error("{path}: is a delta from sequence {parent}, {live} is live", path = path.display())]
    Parent {
        /// The bundle.
        path: PathBuf,
        /// The sequence it starts from.
        parent: u64,
        /// What is live.
        live: String,
    },
    /// The bundle is a delta, and a table that it changes has as many deltas as can be opened.
    /// Nothing was written; a merge of those makes room, and a snapshot needs none.
    #[error("{path}: table `{table}` takes no further delta before those that it has are merged", path = path.display())]
    Full {
        /// The bundle.
        path: PathBuf,
        /// Which table.
        table: String,
    },
    /// A delta's table is not put together as the live one is.
    #[error("{path}: table `{table}`: {field} differs from the live generation's", path = path.display())]
    Schema {
        /// The bundle.
        path: PathBuf,
        /// Which table.
        table: String,
        /// What differs.
        field: &'static str,
    },
    /// Another process is changing the directory. Nothing was changed.
    #[error("{path}: another process is changing the directory", path = path.display())]
    Busy {
        /// Its lock.
        path: PathBuf,
    },
    /// There is no room. Nothing was written.
    #[error("{path}: {needed} bytes are needed, {free} are free", path = path.display())]
    Space {
        /// The flash directory.
        path: PathBuf,
        /// Bytes to be written.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
}

pub(crate) fn io_error(path: &Path) -> impl FnOnce(io::Error) -> FlashError + '_ {
    move |source| FlashError::Io { path: path.to_owned(), source }
}

/// The serial of a placed segment as it arrives, beside its base of serial 0.
pub const PLACED_SERIAL: u32 = 1;
/// Space left alone when a bundle is laid on flash: for records, folders and the file system's own
/// needs.
const SPARE_BYTES: u64 = 1 << 20;

/// An open flash directory and its live generation.
pub struct Flash {
    disk: Arc<dyn Disk>,
    directory: PathBuf,
    record: LiveRecord,
    manifest: Manifest,
}

impl Flash {
    /// Opens the live generation of `directory`.
    ///
    /// # Errors
    /// Nothing is live there, or the record or the manifest is damaged.
    pub fn open(disk: &Arc<dyn Disk>, directory: &Path) -> Result<Self, FlashError> {
        let Some(record) = read_live(disk.as_ref(), directory)? else {
            let problem = "no generation is live here".to_owned();
            return Err(FlashError::Field { path: directory.to_owned(), field: "live", problem });
        };
        let path = folder_of(directory, record.live.generation.sequence).join("manifest");
        let bytes = disk.read(&path).map_err(io_error(&path))?;
        if sha256(&bytes) != record.live.manifest {
            let problem = "does not match its hash in the live record".to_owned();
            return Err(FlashError::Field { path, field: "manifest", problem });
        }
        let manifest =
            Manifest::decode(&bytes).map_err(|source| FlashError::Manifest { path, source })?;
        if manifest.schema.tables.len() != record.live.tables.len() {
            let problem =
                format!("{} for {} tables", record.live.tables.len(), manifest.schema.tables.len());
            return Err(FlashError::Field {
                path: directory.join("live"),
                field: "tables",
                problem,
            });
        }
        Ok(Self { disk: Arc::clone(disk), directory: directory.to_owned(), record, manifest })
    }

    /// The live generation of `directory`, if there is one.
    fn held(disk: &Arc<dyn Disk>, directory: &Path) -> Result<Option<Self>, FlashError> {
        match read_live(disk.as_ref(), directory)? {
            None => Ok(None),
            Some(_) => Self::open(disk, directory).map(Some),
        }
    }

    /// Makes the generation before the live one live again.
    ///
    /// # Errors
    /// There is none, or the record cannot be written.
    pub fn rollback(mut self) -> Result<Self, FlashError> {
        let _lock = self.lock()?;
        self.refresh()?;
        let Some(previous) = self.record.previous.clone() else {
            let problem = "there is no generation to go back to".to_owned();
            return Err(FlashError::Field { path: self.directory, field: "previous", problem });
        };
        write_live(
            self.disk.as_ref(),
            &self.directory,
            &LiveRecord { live: previous, previous: None },
        )?;
        let flash = Self::open(&self.disk, &self.directory)?;
        flash.reclaim();
        Ok(flash)
    }

    /// The flash directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// What is live, and what was before.
    pub fn record(&self) -> &LiveRecord {
        &self.record
    }

    /// The live generation's manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Whether a table has as many deltas as can be opened, so that none may come before they are
    /// merged.
    pub fn is_full(&self) -> bool {
        self.record.live.tables.iter().any(|table| table.deltas.len() >= DELTAS_MAX)
    }

    pub(crate) fn disk(&self) -> &Arc<dyn Disk> {
        &self.disk
    }

    fn file(&self, name: &str) -> PathBuf {
        folder_of(&self.directory, self.manifest.generation.sequence).join(name)
    }

    /// What the segment `of` of table `number` must be, and where it lies.
    pub(crate) fn segment_place(
        &self,
        number: usize,
        of: SegmentRef,
        part: Part,
    ) -> Result<(PathBuf, SegmentKind), FlashError> {
        let path = folder_of(&self.directory, of.sequence).join(segment_name(number, of.serial));
        let generation =
            Generation { lineage: self.manifest.generation.lineage.clone(), sequence: of.sequence };
        let kind = kind_of(&generation, of.serial, &self.manifest.schema, number, part, &path)?;
        Ok((path, kind))
    }

    pub(crate) fn segment(
        &self,
        number: usize,
        of: SegmentRef,
        part: Part,
    ) -> Result<Segment, FlashError> {
        let (path, kind) = self.segment_place(number, of, part)?;
        let file = self.disk.open_pages(&path).map_err(io_error(&path))?;
        Ok(Segment::open(&path, file, kind)?)
    }

    /// The same without the index of its keys: to read it page by page.
    pub(crate) fn segment_pages(
        &self,
        number: usize,
        of: SegmentRef,
        part: Part,
    ) -> Result<Segment, FlashError> {
        let (path, kind) = self.segment_place(number, of, part)?;
        let file = self.disk.open_pages(&path).map_err(io_error(&path))?;
        Ok(Segment::open_pages(&path, file, kind)?)
    }

    /// Opens the rows of table `number`.
    ///
    /// # Errors
    /// A segment is missing, damaged in its index, or not the table's.
    pub fn table(&self, number: usize) -> Result<TableRows, FlashError> {
        self.table_of(&self.record.live, number)
    }

    /// The rows of table `number` in `state`, which has the live generation's tables.
    pub(crate) fn table_of(
        &self,
        state: &LiveState,
        number: usize,
    ) -> Result<TableRows, FlashError> {
        let state = &state.tables[number];
        let base = self.segment(number, state.base, Part::Base)?;
        let placed = state.placed.map(|p| self.segment(number, p, Part::Placed)).transpose()?;
        let deltas = state
            .deltas
            .iter()
            .map(|d| self.segment(number, *d, Part::Delta))
            .collect::<Result<_, _>>()?;
        Ok(TableRows::new(base, placed, deltas)?)
    }

    /// The most used keys of table `number`, most used first; empty if the trainer gave none.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn hot_keys(&self, number: usize) -> Result<Vec<u64>, FlashError> {
        let Some(hot) = self.record.live.tables[number].hot else { return Ok(Vec::new()) };
        let path = folder_of(&self.directory, hot.sequence).join(hot_name(number));
        let bytes = self.read(path, hot.sha256)?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect())
    }

    /// The ONNX file of the dense network.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn dense(&self) -> Result<Vec<u8>, FlashError> {
        self.read(self.file("dense.onnx"), self.manifest.blobs[self.manifest.dense as usize].sha256)
    }

    /// The probe set; empty if the bundle had none.
    ///
    /// # Errors
    /// The file cannot be read or does not decode.
    pub fn probe(&self) -> Result<Vec<Sample>, FlashError> {
        let Some(probe) = self.manifest.probe else { return Ok(Vec::new()) };
        let bytes = self.read(self.file("probe"), self.manifest.blobs[probe as usize].sha256)?;
        Sample::decode_set(&bytes)
            .map_err(|source| FlashError::Probe { path: self.file("probe"), source })
    }

    /// The file at `path`, whole and with the hash that it had when it arrived.
    fn read(&self, path: PathBuf, hash: Hash) -> Result<Vec<u8>, FlashError> {
        let bytes = self.disk.read(&path).map_err(io_error(&path))?;
        if sha256(&bytes) == hash {
            return Ok(bytes);
        }
        let problem = "does not match its hash".to_owned();
        Err(FlashError::Field { path, field: "content", problem })
    }

    /// Waits for nothing: takes the lock that whoever changes the directory holds.
    pub(crate) fn lock(&self) -> Result<Lock, FlashError> {
        lock(self.disk.as_ref(), &self.directory)
    }

    /// Follows what another process made live. Returns whether that is another state than before.
    ///
    /// # Errors
    /// As `open`.
    pub fn refresh(&mut self) -> Result<bool, FlashError> {
        if read_live(self.disk.as_ref(), &self.directory)?.as_ref() == Some(&self.record) {
            return Ok(false);
        }
        *self = Self::open(&self.disk, &self.directory)?;
        Ok(true)
    }

    /// Where a compaction of table `number` writes: the name binds it to all that it merges.
    pub(crate) fn part_place(&self, number: usize) -> PathBuf {
        let live = &self.record.live;
        let merged = (SEGMENT_FORMAT, &live.generation, &live.manifest, &live.tables[number]);
        // Strings and integers in memory always encode.
        let hash = sha256(&postcard::to_allocvec(&merged).unwrap_or_default());
        let hex: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        folder_of(&self.directory, live.generation.sequence)
            .join(format!("t{number:04}-{hex}.part"))
    }

    /// Replaces the live record by one with the same generation, and reclaims what no longer
    /// counts. The lock must be held.
    pub(crate) fn replace_state(&mut self, live: LiveState) -> Result<(), FlashError> {
        let record = LiveRecord { live, previous: self.record.previous.clone() };
        write_live(self.disk.as_ref(), &self.directory, &record)?;
        self.record = record;
        self.reclaim();
        Ok(())
    }

    /// Refuses where there is no room for `bytes` more.
    pub(crate) fn check_space(&self, bytes: u64) -> Result<(), FlashError> {
        check_space(self.disk.as_ref(), &self.directory, bytes)
    }

    /// Removes what neither the live generation nor the one before uses: old generations, merged
    /// segments, and what an interrupted install left, or a compaction of what is no longer live.
    /// What cannot be removed costs space, not correctness: it is reported and left.
    pub fn reclaim(&self) {
        reclaim(self.disk.as_ref(), &self.directory, Some(self));
    }

    /// The same in a directory where perhaps nothing is live, so that every generation goes: for
    /// who gives up a bundle that was, or was being, laid there.
    ///
    /// # Errors
    /// Another process is changing the directory, or the live record is damaged.
    pub fn reclaim_in(disk: &Arc<dyn Disk>, directory: &Path) -> Result<(), FlashError> {
        let _lock = match lock(disk.as_ref(), directory) {
            Err(FlashError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok(());
            }
            lock => lock?,
        };
        reclaim(disk.as_ref(), directory, Self::held(disk, directory)?.as_ref());
        Ok(())
    }

    fn used_files(&self) -> BTreeSet<PathBuf> {
        let mut used: BTreeSet<PathBuf> =
            (0..self.record.live.tables.len()).map(|number| self.part_place(number)).collect();
        for state in std::iter::once(&self.record.live).chain(&self.record.previous) {
            let folder = folder_of(&self.directory, state.generation.sequence);
            used.extend(["manifest", "dense.onnx", "probe"].map(|name| folder.join(name)));
            for (number, table) in state.tables.iter().enumerate() {
                used.extend(
                    table
                        .hot
                        .map(|hot| folder_of(&self.directory, hot.sequence).join(hot_name(number))),
                );
                for (of, _) in table.segments() {
                    used.insert(
                        folder_of(&self.directory, of.sequence)
                            .join(segment_name(number, of.serial)),
                    );
                }
            }
        }
        used
    }

    /// Bytes of the live generation on flash.
    ///
    /// # Errors
    /// A segment cannot be opened.
    pub fn bytes(&self) -> Result<u64, FlashError> {
        let blob = |b: u32| self.manifest.blobs[b as usize].raw_bytes();
        let hot: u64 =
            self.record.live.tables.iter().filter_map(|t| t.hot).map(|hot| hot.bytes).sum();
        let rest = blob(self.manifest.dense) + self.manifest.probe.map_or(0, blob) + hot;
        (0..self.manifest.tables.len())
            .try_fold(rest, |sum, i| Ok(sum + self.table(i)?.file_bytes()))
    }
}

/// Rows of a table of `rows` that may be placed.
pub fn placed_rows_max(rows: u64) -> u64 {
    (rows / PLACED_ONE_IN).max(PLACED_ROWS_MIN).min(rows).min(HOT_KEYS_MAX as u64)
}

/// Removes from `directory` what `held`, all that is live there, does not use.
fn reclaim(disk: &dyn Disk, directory: &Path, held: Option<&Flash>) {
    let used = held.map(Flash::used_files).unwrap_or_default();
    let folders = disk.list(directory).unwrap_or_default();
    let is_generation =
        |p: &&PathBuf| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with('g'));
    for folder in folders.iter().filter(is_generation) {
        let files = disk.list(folder).unwrap_or_default();
        let (keep, drop): (Vec<_>, Vec<_>) = files.into_iter().partition(|f| used.contains(f));
        let removed = drop.iter().try_for_each(|f| disk.remove_file(f));
        let removed =
            removed.and_then(|()| if keep.is_empty() { disk.remove_dir(folder) } else { Ok(()) });
        if let Err(e) = removed {
            log::warn!("{}: not reclaimed: {e}", folder.display());
        }
    }
}

fn folder_of(directory: &Path, sequence: u64) -> PathBuf {
    directory.join(format!("g{sequence:012}"))
}

fn segment_name(number: usize, serial: u32) -> String {
    format!("t{number:04}-{serial:04}.seg")
}

fn hot_name(number: usize) -> String {
    format!("t{number:04}.hot")
}

fn lock(disk: &dyn Disk, directory: &Path) -> Result<Lock, FlashError> {
    let path = directory.join("lock");
    disk.lock(&path).map_err(io_error(&path))?.ok_or(FlashError::Busy { path })
}

fn read_live(disk: &dyn Disk, directory: &Path) -> Result<Option<LiveRecord>, FlashError> {
    let path = directory.join("live");
    match disk.read(&path) {
        Ok(bytes) => LiveRecord::decode(&bytes)
            .map(Some)
            .map_err(|problem| FlashError::Live { path, problem }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io_error(&path)(e)),
    }
}

fn write_live(disk: &dyn Disk, directory: &Path, record: &LiveRecord) -> Result<(), FlashError> {
    let path = directory.join("live");
    atomic_write::replace(disk, &path, &record.encode()).map_err(io_error(&path))
}

fn kind_of(
    generation: &Generation,
    serial: u32,
    schema: &Schema,
    number: usize,
    part: Part,
    path: &Path,
) -> Result<SegmentKind, FlashError> {
    SegmentKind::new(generation, serial, number, &schema.tables[number], part).ok_or_else(|| {
        let problem = format!("table {number} does not fit its codec");
        FlashError::Field { path: path.to_owned(), field: "unit_exp", problem }
    })
}

fn check_space(disk: &dyn Disk, directory: &Path, bytes: u64) -> Result<(), FlashError> {
    let needed = bytes.saturating_add(SPARE_BYTES);
    let free = disk.free_bytes(directory).map_err(io_error(directory))?;
    if needed <= free {
        Ok(())
    } else {
        Err(FlashError::Space { path: directory.to_owned(), needed, free })
    }
}
