//! A bundle becomes a generation: refused where it does not follow what is live, laid in a folder
//! of its own with each part checked on the way, durable, and only then named by the live record.
//! Never changes what is live otherwise.

use super::{
    Flash, FlashError, PLACED_SERIAL, check_space, folder_of, hot_name, io_error, kind_of, lock,
    placed_rows_max, reclaim, segment_name, write_live,
};
use crate::bundle::BundleReader;
use crate::bundle::manifest::{Hash, Manifest, sha256};
use crate::flash::live::{HotList, LiveRecord, LiveState, SegmentRef, TableState};
use crate::flash::overlay::{DELTA_PAGES_MAX, DELTAS_MAX};
use crate::flash::segment::verifier::{Copies, SegmentVerifier};
use crate::flash::segment::{Counts, Part, SegmentError};
use crate::io::atomic_write;
use crate::io::disk::{Disk, Lock};
use crate::limits::PAGE_BYTES;
use crate::schema::sample::Sample;
use crate::schema::{Schema, Table};
use hatchback_kernels::dense::Weights;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

impl Flash {
    /// Lays a bundle on flash and makes it live: a snapshot as it is, a delta over the live
    /// generation it starts from. Does nothing if it is live already. `progress` is told the bytes
    /// of content written.
    ///
    /// # Errors
    /// The bundle is refused, there is no room, or it cannot be written; what was live stays live.
    pub fn install(
        disk: &Arc<dyn Disk>,
        directory: &Path,
        bundle: &mut BundleReader,
        progress: impl FnMut(u64),
    ) -> Result<Self, FlashError> {
        Self::prepare(disk, directory, bundle, progress)?.commit()
    }

    /// Lays a bundle on flash beside what is live, checked and durable, so that it can be tried
    /// before it is live. Nobody else changes the directory until what is returned is committed or
    /// dropped.
    ///
    /// # Errors
    /// As `install`.
    pub fn prepare(
        disk: &Arc<dyn Disk>,
        directory: &Path,
        bundle: &mut BundleReader,
        progress: impl FnMut(u64),
    ) -> Result<Prepared, FlashError> {
        disk.create_dir(directory).map_err(io_error(directory))?;
        let lock = lock(disk.as_ref(), directory)?;
        let held = Self::held(disk, directory)?;
        let hash = sha256(bundle.manifest_bytes());
        if held.as_ref().is_some_and(|h| h.record.live.manifest == hash) {
            return Ok(Prepared {
                flash: Self::open(disk, directory)?,
                is_live: true,
                _lock: lock,
            });
        }
        refuse(directory, bundle, held.as_ref())?;
        check_deltas(bundle, held.as_ref())?;
        // What an attempt left that was stopped is not to be in this one's way.
        reclaim(disk.as_ref(), directory, held.as_ref());
        let needed = bundle.manifest().blobs.iter().map(|b| b.raw_bytes()).sum();
        check_space(disk.as_ref(), directory, needed)?;
        let folder = folder_of(directory, bundle.manifest().generation.sequence);
        let over = held.as_ref().filter(|_| bundle.manifest().parent.is_some());
        let counts =
            Incoming { disk: disk.as_ref(), folder: &folder, over, progress }.write(bundle)?;
        disk.sync_dir(directory).map_err(io_error(directory))?;
        let live = next_state(bundle.manifest(), hash, &counts, held.as_ref());
        let record = LiveRecord { live, previous: held.map(|h| h.record.live) };
        let (disk, directory, manifest) =
            (Arc::clone(disk), directory.to_owned(), bundle.manifest().clone());
        Ok(Prepared {
            flash: Self { disk, directory, record, manifest },
            is_live: false,
            _lock: lock,
        })
    }
}

/// A generation that lies on flash whole and is not live yet. Dropped, it becomes live never, and
/// its space returns with the next bundle, or by `Flash::reclaim_in`.
pub struct Prepared {
    flash: Flash,
    is_live: bool,
    _lock: Lock,
}

impl Prepared {
    /// The directory as it would be with this generation live.
    pub fn flash(&self) -> &Flash {
        &self.flash
    }

    /// Makes it live.
    ///
    /// # Errors
    /// The live record cannot be written.
    pub fn commit(self) -> Result<Flash, FlashError> {
        let Flash { disk, directory, record, .. } = &self.flash;
        if !self.is_live {
            write_live(disk.as_ref(), directory, record)?;
        }
        let flash = Flash::open(disk, directory)?;
        if !self.is_live {
            flash.reclaim();
        }
        Ok(flash)
    }
}

fn refuse(directory: &Path, bundle: &BundleReader, held: Option<&Flash>) -> Result<(), FlashError> {
    let (path, offered) = (directory.to_owned(), bundle.manifest().generation.clone());
    let parent = bundle.manifest().parent;
    let Some(live) = held else {
        return match parent {
            None => Ok(()),
            Some(parent) => Err(FlashError::Parent {
                path: bundle.path().to_owned(),
                parent,
                live: "nothing".to_owned(),
            }),
        };
    };
    let held = live.manifest.generation.clone();
    if held.lineage != offered.lineage {
        return Err(FlashError::Lineage { path, held, offered });
    }
    if held.sequence >= offered.sequence {
        return Err(FlashError::NotNewer { path, held, offered });
    }
    match parent {
        None => Ok(()),
        Some(parent) if parent != held.sequence => Err(FlashError::Parent {
            path: bundle.path().to_owned(),
            parent,
            live: held.to_string(),
        }),
        Some(_) => same_tables(bundle, &live.manifest.schema),
    }
}

type Same = fn(&Table, &Table) -> bool;

/// A delta's rows must mean what the live rows mean.
fn same_tables(bundle: &BundleReader, live: &Schema) -> Result<(), FlashError> {
    let offered = &bundle.manifest().schema;
    let differ = |table: &str, field| {
        Err(FlashError::Schema { path: bundle.path().to_owned(), table: table.to_owned(), field })
    };
    if offered.tables.len() != live.tables.len() {
        return differ("", "the number of tables");
    }
    for (ours, theirs) in live.tables.iter().zip(&offered.tables) {
        let checks: [(&str, Same); 5] = [
            ("name", |a, b| a.name == b.name),
            ("dim", |a, b| a.dim == b.dim),
            ("keys", |a, b| a.keys == b.keys),
            ("codec", |a, b| a.codec == b.codec),
            ("unit_exp", |a, b| a.unit_exp == b.unit_exp),
        ];
        if let Some((field, _)) = checks.iter().find(|(_, same)| !same(ours, theirs)) {
            return differ(&ours.name, field);
        }
    }
    Ok(())
}

/// The state after a bundle whose segments hold `counts`. A delta that leaves a table or its hot
/// list alone adds nothing to it.
fn next_state(
    manifest: &Manifest,
    hash: Hash,
    counts: &[Counts],
    held: Option<&Flash>,
) -> LiveState {
    let sequence = manifest.generation.sequence;
    let arrived = SegmentRef { sequence, serial: 0 };
    let over = held.filter(|_| manifest.parent.is_some()).map(|h| &h.record.live.tables);
    let hot = |number: usize| {
        let list = &manifest.blobs[manifest.tables[number].hot? as usize];
        Some(HotList { sequence, bytes: list.raw_bytes(), sha256: list.sha256 })
    };
    let table = |number: usize| match over {
        None => TableState {
            base: arrived,
            placed: manifest.tables[number]
                .placed
                .map(|_| SegmentRef { sequence, serial: PLACED_SERIAL }),
            deltas: Vec::new(),
            hot: hot(number),
        },
        Some(tables) => {
            let mut table = tables[number].clone();
            if counts[number].rows + counts[number].deletes > 0 {
                table.deltas.push(arrived);
            }
            table.hot = hot(number).or(table.hot);
            table
        }
    };
    let tables = (0..manifest.tables.len()).map(table).collect();
    LiveState { generation: manifest.generation.clone(), manifest: hash, tables }
}

/// More deltas, or longer ones, than a table can be opened with are not even written.
fn check_deltas(bundle: &BundleReader, held: Option<&Flash>) -> Result<(), FlashError> {
    let manifest = bundle.manifest();
    let Some(live) = held.filter(|_| manifest.parent.is_some()) else { return Ok(()) };
    for (number, table) in live.record.live.tables.iter().enumerate() {
        let path = bundle.path().to_owned();
        let pages = manifest.segment_bytes(number) / PAGE_BYTES as u64;
        if pages > u64::from(DELTA_PAGES_MAX) {
            let problem = format!("a delta of {pages} pages, over {DELTA_PAGES_MAX}");
            return Err(SegmentError::Field { path, field: "pages", problem }.into());
        }
        if table.deltas.len() >= DELTAS_MAX && !manifest.leaves_alone(number) {
            let table = manifest.schema.tables[number].name.clone();
            return Err(FlashError::Full { path, table });
        }
    }
    Ok(())
}

/// A generation being written to its folder, each part checked on the way and durable at the end.
struct Incoming<'a, P> {
    disk: &'a dyn Disk,
    folder: &'a Path,
    /// What it is a delta of.
    over: Option<&'a Flash>,
    progress: P,
}

impl<P: FnMut(u64)> Incoming<'_, P> {
    /// Writes everything; returns what each table's segment holds.
    fn write(mut self, bundle: &mut BundleReader) -> Result<Vec<Counts>, FlashError> {
        self.disk.create_dir(self.folder).map_err(io_error(self.folder))?;
        let manifest = bundle.manifest().clone();
        let counts = (0..manifest.tables.len())
            .map(|i| self.table(bundle, &manifest, i))
            .collect::<Result<_, _>>()?;
        let onnx = bundle.blob(manifest.dense)?;
        let refused = |source| FlashError::Dense { path: bundle.path().to_owned(), source };
        manifest.schema.load_dense(onnx, Weights::F32).map_err(refused)?;
        self.copy(bundle, manifest.dense, "dense.onnx", |_| Ok(()))?;
        if let Some(probe) = manifest.probe {
            let set = bundle.blob(probe)?;
            let path = || bundle.path().to_owned();
            Sample::decode_set(&set)
                .map_err(|source| FlashError::Probe { path: path(), source })?;
            self.copy(bundle, probe, "probe", |_| Ok(()))?;
        }
        let path = self.folder.join("manifest");
        atomic_write::replace(self.disk, &path, bundle.manifest_bytes())
            .map_err(io_error(&path))?;
        Ok(counts)
    }

    fn table(
        &mut self,
        bundle: &mut BundleReader,
        manifest: &Manifest,
        number: usize,
    ) -> Result<Counts, FlashError> {
        let blobs = &manifest.tables[number];
        let part = if manifest.parent.is_some() { Part::Delta } else { Part::Base };
        let name = segment_name(number, 0);
        let path = self.folder.join(&name);
        let kind = kind_of(&manifest.generation, 0, &manifest.schema, number, part, &path)?;
        let copies = match blobs.placed {
            Some(blob) => self.placed(bundle, manifest, number, blob)?,
            None => Copies::default(),
        };
        let mut check =
            SegmentVerifier::of_copied(&path, kind, self.rows(manifest, number), copies);
        self.copy(bundle, blobs.segment, &name, |chunk| Ok(check.take(chunk)?))?;
        let counts = check.finish()?;
        if let Some(hot) = blobs.hot {
            self.copy(bundle, hot, &hot_name(number), |_| Ok(()))?;
        }
        Ok(counts)
    }

    /// Rows of a table before this generation, and with it.
    fn rows(&self, manifest: &Manifest, number: usize) -> Range<u64> {
        let before = self.over.map_or(0, |live| live.manifest.schema.tables[number].rows);
        before..manifest.schema.tables[number].rows
    }

    /// Writes a placed segment; returns what the base must be found to hold.
    fn placed(
        &mut self,
        bundle: &mut BundleReader,
        manifest: &Manifest,
        number: usize,
        blob: u32,
    ) -> Result<Copies, FlashError> {
        let name = segment_name(number, PLACED_SERIAL);
        let path = self.folder.join(&name);
        let kind = kind_of(
            &manifest.generation,
            PLACED_SERIAL,
            &manifest.schema,
            number,
            Part::Placed,
            &path,
        )?;
        let most = placed_rows_max(manifest.schema.tables[number].rows);
        let few = |rows: u64| {
            let problem = format!("{rows} placed, over {most}");
            if rows <= most {
                Ok(())
            } else {
                Err(SegmentError::Field { path: path.clone(), field: "rows", problem }.into())
            }
        };
        let mut check = SegmentVerifier::new(&path, kind, self.rows(manifest, number));
        self.copy(bundle, blob, &name, |chunk| {
            check.take(chunk)?;
            few(check.counts().rows)
        })?;
        Ok(check.finish_placed()?.1)
    }

    fn copy(
        &mut self,
        bundle: &mut BundleReader,
        blob: u32,
        name: &str,
        mut check: impl FnMut(&[u8]) -> Result<(), FlashError>,
    ) -> Result<(), FlashError> {
        let path = self.folder.join(name);
        let mut file = self.disk.create(&path).map_err(io_error(&path))?;
        bundle.read_blob(blob, |chunk| {
            check(chunk)?;
            (self.progress)(chunk.len() as u64);
            file.write_all(chunk).map_err(io_error(&path))
        })?;
        file.sync().map_err(io_error(&path))
    }
}
