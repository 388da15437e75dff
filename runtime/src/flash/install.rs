//! Installs a bundle: checks that it may follow the live generation, and writes it to a folder of
//! its own. Every part is checked during the write. The live record is replaced after all files are
//! durable, and only then is the new generation live.
//!
//! The pages of a restored release name the releases that first brought them. They are written as
//! pages of the new generation: segments in its folder have no row that is older, so a swap from a
//! later generation finds every row that differs (`model/generation_change.rs`).

use crate::bundle::BundleReader;
use crate::bundle::manifest::{Blob, Generation, Hash, Layer, Manifest, sha256};
use crate::flash::directory::{Flash, Found, lock, stored_record};
use crate::flash::error::{FlashError, io_error};
use crate::flash::live::{HotList, LiveRecord, LiveState, SegmentRef, TableState};
use crate::flash::paths::{folder_of, hot_name, kind_of, segment_name};
use crate::flash::room::make_room;
use crate::flash::segment::verifier::SegmentVerifier;
use crate::flash::segment::{Counts, Part, SegmentError};
use crate::io::atomic_write;
use crate::io::disk::{Disk, Lock, Output};
use crate::io::page::move_to;
use crate::io::paired_record::PairedRecord;
use crate::limits::{
    DELTA_PAGES_MAX, DELTAS_MAX, INSTALL_PIECE_BYTES, PAGE_BYTES, SYNCED_FILES_MAX,
    UNSYNCED_FILES_MAX,
};
use crate::schema::Schema;
use crate::schema::sample::Sample;
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The part of its files that a file system takes for itself, as one in so many.
const METADATA_ONE_IN: u64 = 512;

/// How a snapshot replaces a live generation that cannot be used.
#[derive(Clone, Copy, Debug)]
pub struct Rebuild {
    /// Until this sequence is live, nothing is served.
    pub least: u64,
    /// Whether a process serves the live generation, or can. Its files then stay until the snapshot
    /// is live, however little room there is.
    pub servable: bool,
}

impl Flash {
    /// Installs a bundle in `directory` and makes it live: a snapshot alone, a delta over the live
    /// generation. Changes nothing if the bundle is live already. `progress` receives the number of
    /// content bytes of each write.
    ///
    /// ```no_run
    /// use hatchback::bundle::BundleReader;
    /// use hatchback::flash::Flash;
    /// use hatchback::io::disk;
    /// use std::path::Path;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut bundle = BundleReader::open(Path::new("coupon.hatch"))?;
    /// let flash = Flash::install(&disk::system(), Path::new("flash"), &mut bundle, |_bytes| ())?;
    /// println!("{} is live", flash.manifest().generation);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The live generation stays live.
    /// * The bundle may not follow the live generation: [`FlashError::Lineage`],
    ///   [`FlashError::NotNewer`], [`FlashError::Parent`], [`FlashError::Full`],
    ///   [`FlashError::Schema`].
    /// * The bundle is not valid: [`FlashError::Bundle`], [`FlashError::Segment`],
    ///   [`FlashError::Dense`], [`FlashError::Probe`].
    /// * The directory cannot be changed now: [`FlashError::Busy`], [`FlashError::Space`],
    ///   [`FlashError::Io`].
    pub fn install(
        disk: &Arc<dyn Disk>,
        directory: &Path,
        bundle: &mut BundleReader,
        progress: impl FnMut(u64),
    ) -> Result<Self, FlashError> {
        let prepared = Self::prepare(disk, directory, bundle, progress)?;
        // A network that does not load would keep the model from being served after the commit.
        let loaded = prepared.flash.manifest.schema.load_dense(prepared.flash.dense()?);
        loaded.map_err(|source| FlashError::Dense { path: bundle.path().to_owned(), source })?;
        prepared.commit()
    }

    /// Writes a bundle to flash, checked and durable, without making it live, so that the caller
    /// can probe it first; its network is not loaded. Holds the directory's lock until the result
    /// is committed or dropped.
    ///
    /// # Errors
    /// Those of [`Flash::install`].
    pub fn prepare(
        disk: &Arc<dyn Disk>,
        directory: &Path,
        bundle: &mut BundleReader,
        progress: impl FnMut(u64),
    ) -> Result<Prepared, FlashError> {
        disk.create_dir(directory).map_err(io_error(directory))?;
        // Before the look at the live generation, which must be the same when this one is
        // committed.
        let lock = lock(disk.as_ref(), directory)?;
        let hash = sha256(bundle.manifest_bytes());
        let live = match base_of(disk, directory, bundle)? {
            Some(live) if live.record.live.manifest == hash => {
                return Ok(Prepared { flash: live, is_live: true, _lock: lock });
            }
            live => live,
        };

        check_succession(directory, bundle, live.as_ref())?;
        check_deltas(bundle, live.as_ref())?;
        let servable = match Flash::find(disk, directory)? {
            Found::Live(damaged) if live.is_none() => damaged.is_servable()?,
            _ => live.is_some(),
        };
        let next = Next { bundle, live, servable };
        write_next(disk, directory, next, progress, lock)
    }

    /// Writes a snapshot to flash like [`Flash::prepare`], in place of a live generation that
    /// cannot be used, whatever its number.
    ///
    /// # Errors
    /// Those of [`Flash::install`]. [`FlashError::Lineage`] if the live generation is of another
    /// model, [`FlashError::Parent`] if the bundle is a delta.
    pub fn prepare_rebuild(
        disk: &Arc<dyn Disk>,
        directory: &Path,
        bundle: &mut BundleReader,
        rebuild: Rebuild,
        progress: impl FnMut(u64),
    ) -> Result<Prepared, FlashError> {
        let lock = lock(disk.as_ref(), directory)?;
        let offered = bundle.manifest().generation.clone();
        if let Some(parent) = bundle.manifest().parent {
            let (path, live) = (bundle.path().to_owned(), "nothing that can be used".to_owned());
            return Err(FlashError::Parent { path, parent, live });
        }
        let before = Flash::last_record(disk.as_ref(), directory)?;
        if let Some(live) = before.as_ref().map(|record| &record.live.generation)
            && live.lineage != offered.lineage
        {
            let (path, live) = (directory.to_owned(), live.clone());
            return Err(FlashError::Lineage { path, live, offered });
        }

        let next = Next { bundle, live: None, servable: rebuild.servable };
        let mut prepared = write_next(disk, directory, next, progress, lock)?;
        let record = &mut prepared.flash.record;
        record.least = record.least.max(rebuild.least);
        Ok(prepared)
    }
}

/// A bundle to write.
struct Next<'a> {
    bundle: &'a mut BundleReader,
    /// The live generation, if the bundle may follow it.
    live: Option<Flash>,
    /// Whether a process serves the live generation, or can.
    servable: bool,
}

/// Writes a bundle, and returns it with its live record.
fn write_next(
    disk: &Arc<dyn Disk>,
    directory: &Path,
    next: Next<'_>,
    progress: impl FnMut(u64),
    lock: Lock,
) -> Result<Prepared, FlashError> {
    let Next { bundle, live, servable } = next;
    let mut before = stored_record(disk.as_ref(), directory)?;
    let blocks = |blob: &Blob| blob.raw_bytes().next_multiple_of(PAGE_BYTES as u64);
    let content: u64 = bundle.manifest().blobs.iter().map(blocks).sum();
    let needed = content + content / METADATA_ONE_IN;
    make_room(disk.as_ref(), directory, &mut before, needed, servable)?;

    // Without a usable generation before it, segments of the same name are other files.
    let rebuilt = u64::from(live.is_none());
    let rebuilds = before.as_ref().map_or(0, |before| before.value.rebuilds + rebuilt);
    let folder = folder_of(directory, rebuilds, bundle.manifest().generation.sequence);
    let base = live.as_ref().filter(|_| bundle.manifest().parent.is_some());
    let incoming = Incoming {
        disk: disk.as_ref(),
        folder: &folder,
        base,
        progress,
        is_synced_whole: bundle.manifest().blobs.len() > SYNCED_FILES_MAX,
        unsynced: Vec::new(),
    };
    let counts = incoming.write(bundle)?;
    // The new folder must survive a power cut before the live record names it.
    disk.sync_dir(directory).map_err(io_error(directory))?;

    let hash = sha256(bundle.manifest_bytes());
    let next = next_state(bundle.manifest(), hash, &counts, live.as_ref());
    let writes = before.as_ref().map_or(0, |before| before.writes);
    let record = next_record(next, rebuilds, before.map(|before| before.value));
    let (disk, directory) = (Arc::clone(disk), directory.to_owned());
    let manifest = bundle.manifest().clone();
    let flash = Flash { disk, directory, record, writes, manifest };
    Ok(Prepared { flash, is_live: false, _lock: lock })
}

/// Returns the live record in which `next`, after `rebuilds` rebuilds, follows `before`.
fn next_record(next: LiveState, rebuilds: u64, before: Option<LiveRecord>) -> LiveRecord {
    let Some(before) = before else {
        return LiveRecord { live: next, previous: None, least: 0, rebuilds };
    };
    // A step of a rebuild is never served, so it is no generation to go back to.
    let is_kept = rebuilds == before.rebuilds && before.may_serve();
    LiveRecord {
        live: next,
        previous: is_kept.then_some(before.live),
        least: before.least,
        rebuilds,
    }
}

/// A generation that is whole and durable on flash and not live yet. If it is dropped, it never
/// becomes live: the next install or [`Flash::reclaim_in`] reclaims its space.
pub struct Prepared {
    flash: Flash,
    is_live: bool,
    _lock: Lock,
}

impl Prepared {
    /// Returns the directory as it will be when this generation is live.
    pub fn flash(&self) -> &Flash {
        &self.flash
    }

    /// Makes the generation live.
    ///
    /// # Errors
    /// [`FlashError::Io`] if the live record cannot be written, and those of [`Flash::open`].
    pub fn commit(self) -> Result<Flash, FlashError> {
        let Flash { disk, directory, record, writes, .. } = &self.flash;
        if !self.is_live {
            record.store(disk.as_ref(), directory, writes + 1)?;
        }

        // Opened from the disk, not taken from memory: what the next start will read is what is
        // served.
        let flash = Flash::open(disk, directory)?;
        if !self.is_live {
            // After the open: until the new generation has opened, the older files stay.
            flash.reclaim();
        }
        Ok(flash)
    }
}

/// Returns the live generation that `bundle` follows. Returns `None` if there is none, or if a
/// snapshot replaces a damaged one. Such a snapshot may have the same number.
///
/// # Errors
/// [`FlashError::Base`] if the bundle is a delta and the live generation is damaged.
fn base_of(
    disk: &Arc<dyn Disk>,
    directory: &Path,
    bundle: &BundleReader,
) -> Result<Option<Flash>, FlashError> {
    let damage = match Flash::find(disk, directory)? {
        Found::Nothing => return Ok(None),
        Found::Damaged(damage) => damage,
        Found::Live(live) => match live.check_whole() {
            Ok(()) => return Ok(Some(*live)),
            // The device may be able to read the file later. A newer snapshot is installed without
            // it.
            Err(e) if !e.is_damage() => {
                let is_snapshot = bundle.manifest().parent.is_none();
                let is_newer =
                    bundle.manifest().generation.sequence > live.manifest.generation.sequence;
                return if is_snapshot && is_newer { Ok(Some(*live)) } else { Err(e) };
            }
            Err(damage) => {
                // Damage of the flash must not let an older release in.
                check_sequence(directory, bundle, &live)?;
                damage
            }
        },
    };
    if bundle.manifest().parent.is_some() {
        return Err(FlashError::Base(Box::new(damage)));
    }

    let generation = &bundle.manifest().generation;
    log::warn!("{generation} replaces the live generation, which is damaged: {damage}");
    Ok(None)
}

/// Checks that `bundle` is of the damaged live generation's lineage and not older.
fn check_sequence(directory: &Path, bundle: &BundleReader, live: &Flash) -> Result<(), FlashError> {
    let (live, offered) = (&live.manifest.generation, &bundle.manifest().generation);
    let (path, live, offered) = (directory.to_owned(), live.clone(), offered.clone());
    if live.lineage != offered.lineage {
        return Err(FlashError::Lineage { path, live, offered });
    }
    if live.sequence > offered.sequence {
        return Err(FlashError::NotNewer { path, live, offered });
    }
    Ok(())
}

/// Checks that the bundle may follow the live generation.
fn check_succession(
    directory: &Path,
    bundle: &BundleReader,
    live: Option<&Flash>,
) -> Result<(), FlashError> {
    let (path, offered) = (directory.to_owned(), bundle.manifest().generation.clone());
    let parent = bundle.manifest().parent;
    let not_parent =
        |parent, live| Err(FlashError::Parent { path: bundle.path().to_owned(), parent, live });
    let Some(flash) = live else {
        return parent.map_or(Ok(()), |parent| not_parent(parent, "nothing".to_owned()));
    };

    let live = flash.manifest.generation.clone();
    if live.lineage != offered.lineage {
        return Err(FlashError::Lineage { path, live, offered });
    }
    if live.sequence >= offered.sequence {
        return Err(FlashError::NotNewer { path, live, offered });
    }
    match parent {
        None => Ok(()),
        Some(parent) if parent != live.sequence => not_parent(parent, live.to_string()),
        Some(_) => check_tables(bundle, &flash.manifest.schema),
    }
}

/// Checks that each table that comes as a delta has the name, keys and row encoding of the live
/// table of its number.
fn check_tables(bundle: &BundleReader, live: &Schema) -> Result<(), FlashError> {
    let manifest = bundle.manifest();
    for (number, offered) in manifest.schema.tables.iter().enumerate() {
        let before = live.tables.get(number);
        let agrees = match before {
            _ if !manifest.is_delta(number) => Ok(()),
            Some(before) => offered.continues(before),
            None => Err("the number of tables"),
        };
        agrees.map_err(|field| {
            let table = before.unwrap_or(offered).name.clone();
            FlashError::Schema { path: bundle.path().to_owned(), table, field }
        })?;
    }
    Ok(())
}

/// Returns the live state after the install of a bundle whose segments hold `counts`. A delta that
/// changes neither the rows nor the hot list of a table leaves the table's state unchanged.
fn next_state(
    manifest: &Manifest,
    hash: Hash,
    counts: &[Counts],
    live: Option<&Flash>,
) -> LiveState {
    let sequence = manifest.generation.sequence;
    assert_eq!(counts.len(), manifest.tables.len(), "every table was written");
    assert!(
        live.is_none_or(|l| l.manifest.generation.sequence < sequence),
        "`check_succession` accepts newer generations only"
    );

    let tables = (0..manifest.tables.len())
        .map(|number| match live.filter(|_| manifest.is_delta(number)) {
            None => snapshot_state(manifest, number),
            Some(live) => {
                let state = live.record.live.tables[number].clone();
                delta_state(manifest, number, counts[number], state)
            }
        })
        .collect();
    LiveState { generation: manifest.generation.clone(), manifest: hash, tables }
}

fn snapshot_state(manifest: &Manifest, number: usize) -> TableState {
    let sequence = manifest.generation.sequence;
    let segment = |serial| SegmentRef { sequence, serial };
    TableState {
        base: segment(0),
        deltas: (1..manifest.layers(number).len() as u32).map(segment).collect(),
        hot: hot_list(manifest, number),
    }
}

fn delta_state(
    manifest: &Manifest,
    number: usize,
    counts: Counts,
    mut table: TableState,
) -> TableState {
    if counts.rows > 0 || counts.deletes > 0 {
        table.deltas.push(SegmentRef { sequence: manifest.generation.sequence, serial: 0 });
        assert!(table.deltas.len() <= DELTAS_MAX, "`check_deltas` left room for this delta");
    }

    table.hot = hot_list(manifest, number).or(table.hot);
    table
}

fn hot_list(manifest: &Manifest, number: usize) -> Option<HotList> {
    let list = &manifest.blobs[manifest.tables[number].hot? as usize];
    let sequence = manifest.generation.sequence;
    Some(HotList { sequence, bytes: list.raw_bytes(), sha256: list.sha256 })
}

/// Refuses a delta that is too long, or that comes when its table already has [`DELTAS_MAX`]
/// deltas. The caller has written nothing yet.
fn check_deltas(bundle: &BundleReader, live: Option<&Flash>) -> Result<(), FlashError> {
    let manifest = bundle.manifest();
    let Some(live) = live.filter(|_| manifest.parent.is_some()) else { return Ok(()) };

    let delivered = |(number, _): &(usize, &TableState)| {
        number < &manifest.tables.len() && manifest.is_delta(*number)
    };
    for (number, table) in live.record.live.tables.iter().enumerate().filter(delivered) {
        let path = bundle.path();
        let pages = manifest.segment_bytes(number) / PAGE_BYTES as u64;
        if pages > u64::from(DELTA_PAGES_MAX) {
            let problem = format!("a delta of {pages} pages, over {DELTA_PAGES_MAX}");
            return Err(SegmentError::field(path, "pages", problem).into());
        }
        if table.deltas.len() >= DELTAS_MAX && !manifest.leaves_alone(number) {
            let table = manifest.schema.tables[number].name.clone();
            return Err(FlashError::Full { path: path.to_owned(), table });
        }
    }
    Ok(())
}

/// A segment of a bundle.
#[derive(Clone, Copy)]
struct IncomingSegment {
    /// The number of its table.
    number: usize,
    serial: u32,
    layer: Layer,
    /// The number of rows of the table without it.
    before: u64,
}

/// Returns checked `pages` as pages of the segment `id`.
fn moved(pages: &[u8], id: u32) -> Vec<u8> {
    let mut pages = pages.to_vec();
    pages.as_chunks_mut::<PAGE_BYTES>().0.iter_mut().for_each(|page| move_to(page, id));
    pages
}

/// A bundle that is being written to the folder of its generation.
struct Incoming<'a, P> {
    disk: &'a dyn Disk,
    folder: &'a Path,
    /// The live generation that a delta starts from; `None` for a snapshot.
    base: Option<&'a Flash>,
    progress: P,
    /// Whether one sync at the end makes all files durable.
    is_synced_whole: bool,
    /// Files that are written and not durable yet.
    unsynced: Vec<(PathBuf, Box<dyn Output>)>,
}

impl<P: FnMut(u64)> Incoming<'_, P> {
    /// Writes the whole bundle and returns the counts of each table's segment.
    fn write(mut self, bundle: &mut BundleReader) -> Result<Vec<Counts>, FlashError> {
        self.disk.create_dir(self.folder).map_err(io_error(self.folder))?;
        let manifest = bundle.manifest().clone();
        let counts = (0..manifest.tables.len())
            .map(|i| self.write_table(bundle, &manifest, i))
            .collect::<Result<_, _>>()?;

        self.copy(bundle, manifest.dense, "dense.onnx", |piece| Ok(piece.into()))?;

        if let Some(probe) = manifest.probe {
            let set = bundle.blob(probe)?;
            let refused = |source| FlashError::Probe { path: bundle.path().to_owned(), source };
            Sample::decode_set(&set).map_err(refused)?;
            self.copy(bundle, probe, "probe", |piece| Ok(piece.into()))?;
        }
        self.sync_written()?;
        if self.is_synced_whole {
            self.disk.sync_files_in(self.folder).map_err(io_error(self.folder))?;
        }

        let path = self.folder.join("manifest");
        atomic_write::replace(self.disk, &path, bundle.manifest_bytes())
            .map_err(io_error(&path))?;
        Ok(counts)
    }

    /// Writes the segments and the hot list of table `number`. Returns the counts of the first.
    fn write_table(
        &mut self,
        bundle: &mut BundleReader,
        manifest: &Manifest,
        number: usize,
    ) -> Result<Counts, FlashError> {
        let base = self.base.filter(|_| manifest.is_delta(number));
        let mut before = base.map_or(0, |live| live.manifest.schema.tables[number].rows);
        let mut first = None;
        for (serial, layer) in manifest.layers(number).into_iter().enumerate() {
            let segment = IncomingSegment { number, serial: serial as u32, layer, before };
            let counts = self.write_segment(bundle, manifest, segment)?;
            first.get_or_insert(counts);
            before = layer.rows;
        }

        if let Some(hot) = manifest.tables[number].hot {
            self.copy(bundle, hot, &hot_name(number), |piece| Ok(piece.into()))?;
        }
        Ok(first.unwrap_or_default())
    }

    fn write_segment(
        &mut self,
        bundle: &mut BundleReader,
        manifest: &Manifest,
        segment: IncomingSegment,
    ) -> Result<Counts, FlashError> {
        let IncomingSegment { number, serial, layer, before } = segment;
        let is_delta = serial > 0 || manifest.is_delta(number);
        let part = if is_delta { Part::Delta } else { Part::Base };
        let name = segment_name(number, serial);
        let path = self.folder.join(&name);
        let lineage = manifest.generation.lineage.clone();
        let origin = Generation { lineage, sequence: layer.sequence };
        let arrives = kind_of(&origin, 0, &manifest.schema, number, part, &path)?;
        let stays = kind_of(&manifest.generation, serial, &manifest.schema, number, part, &path)?;
        let moves = (arrives.id != stays.id).then_some(stays.id);

        let mut verifier = SegmentVerifier::new(&path, arrives, before..layer.rows);
        self.copy(bundle, layer.segment, &name, |piece| {
            verifier.take(piece)?;
            Ok(moves.map_or(piece.into(), |id| moved(piece, id).into()))
        })?;
        let counts = verifier.finish()?;
        assert_eq!(
            counts.file_bytes(),
            manifest.blobs[layer.segment as usize].raw_bytes(),
            "the verifier counted every page of the segment"
        );
        Ok(counts)
    }

    /// Writes blob `blob` to the file `name`, as `check` returns each piece.
    fn copy(
        &mut self,
        bundle: &mut BundleReader,
        blob: u32,
        name: &str,
        mut check: impl FnMut(&[u8]) -> Result<Cow<'_, [u8]>, FlashError>,
    ) -> Result<(), FlashError> {
        let path = self.folder.join(name);
        let mut file = self.disk.create(&path).map_err(io_error(&path))?;
        bundle.read_blob(blob, |chunk| {
            for piece in chunk.chunks(INSTALL_PIECE_BYTES) {
                let checked = check(piece)?;
                // The caller may pause here, so that requests run between two pieces.
                (self.progress)(piece.len() as u64);
                file.write_all(&checked).map_err(io_error(&path))?;
            }
            Ok::<_, FlashError>(())
        })?;
        file.flush().map_err(io_error(&path))?;

        self.unsynced.push((path, file));
        if self.unsynced.len() < UNSYNCED_FILES_MAX { Ok(()) } else { self.sync_written() }
    }

    /// Makes the written files durable. The first sync writes the file system's journal for all of
    /// them. The device then pauses the reads of requests less often.
    fn sync_written(&mut self) -> Result<(), FlashError> {
        // The sync of the whole makes closed files durable too.
        let each = self.unsynced.drain(..).filter(|_| !self.is_synced_whole);
        for (path, mut file) in each {
            // No content, only a pause: each sync may delay the reads of requests.
            (self.progress)(0);
            file.sync().map_err(io_error(&path))?;
        }
        Ok(())
    }
}
