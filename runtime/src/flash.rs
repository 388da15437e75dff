//! The flash directory: the generations that lie on flash and the one record that says which is live.
//! Nothing becomes live before all of it is written, checked and durable. Never deletes the live generation.
//!
//! ```text
//! DIR/live                     the live generation record
//! DIR/g000000000001/manifest   one folder a generation
//! DIR/g000000000001/t0000.seg  the rows of table 0
//! DIR/g000000000001/t0000.hot  its most used keys
//! DIR/g000000000001/dense.onnx
//! DIR/g000000000001/probe
//! ```

use crate::bundle::{BundleError, BundleReader};
use crate::commit;
use crate::manifest::{Generation, Hash, Manifest, ManifestError, sha256};
use crate::sample::{ProbeError, Sample};
use crate::schema::Schema;
use crate::segment::{Segment, SegmentCheck, SegmentError, SegmentKind};
use hatchback_kernels::dense::{DenseEngine, DenseError};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

const LIVE_MAGIC: &[u8; 8] = b"HATCHLIV";
/// The format of the live record.
pub const LIVE_FORMAT: u32 = 1;

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
    /// The bundle is not newer than what is live. A downgrade is a new release with a higher sequence.
    #[error("{path}: {held} is live with other content; {offered} needs a higher sequence", path = path.display())]
    NotNewer {
        /// The flash directory.
        path: PathBuf,
        /// What is live.
        held: Generation,
        /// What the bundle holds.
        offered: Generation,
    },
    /// The bundle is a delta, which only sync applies.
    #[error("{path}: is a delta from sequence {parent}; only a snapshot can be laid on flash", path = path.display())]
    Delta {
        /// The bundle.
        path: PathBuf,
        /// The sequence it starts from.
        parent: u64,
    },
}

fn io_error(path: &Path) -> impl FnOnce(io::Error) -> FlashError + '_ {
    move |source| FlashError::Io { path: path.to_owned(), source }
}

/// The live generation record: a magic, a format number, a CRC-32C, then postcard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveRecord {
    /// What is live.
    pub generation: Generation,
    /// SHA-256 of its manifest file.
    pub manifest: Hash,
}

impl LiveRecord {
    /// The bytes of the record.
    pub fn encode(&self) -> Vec<u8> {
        // Two strings and an integer always encode; an empty body would be refused by `decode`.
        let body = postcard::to_allocvec(self).unwrap_or_default();
        let mut bytes = LIVE_MAGIC.to_vec();
        bytes.extend(LIVE_FORMAT.to_le_bytes());
        bytes.extend(crc32c::crc32c(&body).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    /// Reads a record back.
    ///
    /// # Errors
    /// Which field is wrong and how.
    pub fn decode(bytes: &[u8]) -> Result<Self, (&'static str, String)> {
        let (Some(header), Some(body)) = (bytes.get(..16), bytes.get(16..)) else {
            return Err(("length", format!("{} bytes are too few", bytes.len())));
        };
        let word =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        if &header[..8] != LIVE_MAGIC {
            Err(("magic", "is not a live record".to_owned()))
        } else if word(8) != LIVE_FORMAT {
            Err(("format", format!("{} is not {LIVE_FORMAT}, the one this version reads", word(8))))
        } else if word(12) != crc32c::crc32c(body) {
            Err(("checksum", "does not match".to_owned()))
        } else {
            postcard::from_bytes(body).map_err(|e| ("record", format!("does not decode ({e})")))
        }
    }
}

/// An open flash directory and its live generation.
pub struct Flash {
    directory: PathBuf,
    manifest: Manifest,
    manifest_bytes: u64,
}

fn generation_directory(directory: &Path, generation: &Generation) -> PathBuf {
    directory.join(format!("g{:012}", generation.sequence))
}

fn read_live(directory: &Path) -> Result<Option<LiveRecord>, FlashError> {
    let path = directory.join("live");
    match fs::read(&path) {
        Ok(bytes) => match LiveRecord::decode(&bytes) {
            Ok(live) => Ok(Some(live)),
            Err((field, problem)) => Err(FlashError::Field { path, field, problem }),
        },
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(io_error(&path)(e)),
    }
}

impl Flash {
    /// Opens the live generation of `directory`.
    ///
    /// # Errors
    /// Nothing is live there, or the record or the manifest is damaged.
    pub fn open(directory: &Path) -> Result<Self, FlashError> {
        let Some(live) = read_live(directory)? else {
            let problem = "no generation is live here".to_owned();
            return Err(FlashError::Field { path: directory.to_owned(), field: "live", problem });
        };
        let path = generation_directory(directory, &live.generation).join("manifest");
        let bytes = fs::read(&path).map_err(io_error(&path))?;
        if sha256(&bytes) != live.manifest {
            let problem = "does not match its hash in the live record".to_owned();
            return Err(FlashError::Field { path, field: "manifest", problem });
        }
        let manifest = Manifest::decode(&bytes).map_err(|source| FlashError::Manifest { path, source })?;
        Ok(Self { directory: directory.to_owned(), manifest, manifest_bytes: bytes.len() as u64 })
    }

    /// Lays a snapshot bundle on flash and makes it live; does nothing if it is live already. `progress` is
    /// told the bytes of content written.
    ///
    /// # Errors
    /// The bundle is refused or cannot be written; what was live stays live.
    pub fn install(
        directory: &Path,
        bundle: &mut BundleReader,
        progress: impl FnMut(u64),
    ) -> Result<Self, FlashError> {
        let record = LiveRecord {
            generation: bundle.manifest().generation.clone(),
            manifest: sha256(bundle.manifest_bytes()),
        };
        fs::create_dir_all(directory).map_err(io_error(directory))?;
        let held = read_live(directory)?;
        if held.as_ref() == Some(&record) {
            return Self::open(directory);
        }
        refuse(directory, bundle, held.as_ref())?;
        let target = generation_directory(directory, &record.generation);
        write_generation(&target, bundle, progress)?;
        commit::sync_directory(directory).map_err(io_error(directory))?;
        let live = directory.join("live");
        commit::replace(&live, &record.encode()).map_err(io_error(&live))?;
        remove_others(directory, &target, held.map(|h| generation_directory(directory, &h.generation)));
        Self::open(directory)
    }

    /// The flash directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The live generation's manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    fn file(&self, name: &str) -> PathBuf {
        generation_directory(&self.directory, &self.manifest.generation).join(name)
    }

    /// Opens the rows of table `number`.
    ///
    /// # Errors
    /// The segment is missing, damaged in its index, or not the table's.
    pub fn segment(&self, number: usize) -> Result<Segment, FlashError> {
        let path = self.file(&segment_name(number));
        let kind = kind_of(&self.manifest, number, &path)?;
        Ok(Segment::open(&path, kind, self.manifest.schema.tables[number].rows)?)
    }

    /// The most used keys of table `number`, most used first; empty if the trainer gave none.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn hot_keys(&self, number: usize) -> Result<Vec<u64>, FlashError> {
        if self.manifest.tables[number].hot.is_none() {
            return Ok(Vec::new());
        }
        let bytes = self.read(&hot_name(number))?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect())
    }

    /// The ONNX file of the dense network.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn dense(&self) -> Result<Vec<u8>, FlashError> {
        self.read("dense.onnx")
    }

    /// The probe set; empty if the bundle had none.
    ///
    /// # Errors
    /// The file cannot be read or does not decode.
    pub fn probe(&self) -> Result<Vec<Sample>, FlashError> {
        if self.manifest.probe.is_none() {
            return Ok(Vec::new());
        }
        let bytes = self.read("probe")?;
        Sample::decode_set(&bytes).map_err(|source| FlashError::Probe { path: self.file("probe"), source })
    }

    fn read(&self, name: &str) -> Result<Vec<u8>, FlashError> {
        let path = self.file(name);
        fs::read(&path).map_err(io_error(&path))
    }

    /// Bytes of the live generation on flash.
    pub fn bytes(&self) -> u64 {
        self.manifest_bytes + self.manifest.blobs.iter().map(|b| b.raw_bytes()).sum::<u64>()
    }
}

fn segment_name(number: usize) -> String {
    format!("t{number:04}.seg")
}

fn hot_name(number: usize) -> String {
    format!("t{number:04}.hot")
}

fn kind_of(manifest: &Manifest, number: usize, path: &Path) -> Result<SegmentKind, FlashError> {
    SegmentKind::new(&manifest.generation, number, &manifest.schema.tables[number]).ok_or_else(|| {
        let problem = format!("table {number} does not fit its codec");
        FlashError::Field { path: path.to_owned(), field: "unit_exp", problem }
    })
}

fn refuse(directory: &Path, bundle: &BundleReader, held: Option<&LiveRecord>) -> Result<(), FlashError> {
    if let Some(parent) = bundle.manifest().parent {
        return Err(FlashError::Delta { path: bundle.path().to_owned(), parent });
    }
    let Some(held) = held.map(|h| h.generation.clone()) else { return Ok(()) };
    let (path, offered) = (directory.to_owned(), bundle.manifest().generation.clone());
    if held.lineage != offered.lineage {
        Err(FlashError::Lineage { path, held, offered })
    } else if held.sequence >= offered.sequence {
        Err(FlashError::NotNewer { path, held, offered })
    } else {
        Ok(())
    }
}

/// Loads the dense network and proves that the schema fits it.
pub(crate) fn load_dense(schema: &Schema, onnx: Vec<u8>, threads: usize) -> Result<DenseEngine, DenseError> {
    let network = &schema.network;
    let widths: Vec<(&str, usize)> =
        network.inputs.iter().map(|i| (i.name.as_str(), schema.input_width(i))).collect();
    DenseEngine::load(onnx, &widths, &network.output, network.activation, threads)
}

/// Writes all files of a generation, each checked on the way and durable at the end.
fn write_generation(
    target: &Path,
    bundle: &mut BundleReader,
    mut progress: impl FnMut(u64),
) -> Result<(), FlashError> {
    fs::create_dir_all(target).map_err(io_error(target))?;
    let manifest = bundle.manifest().clone();
    for (number, table) in manifest.tables.iter().enumerate() {
        let path = target.join(segment_name(number));
        let kind = kind_of(&manifest, number, &path)?;
        let mut check = SegmentCheck::new(&path, kind, manifest.schema.tables[number].rows);
        copy_blob(bundle, table.segment, &path, |chunk| {
            progress(chunk.len() as u64);
            Ok(check.take(chunk)?)
        })?;
        check.finish()?;
        if let Some(hot) = table.hot {
            copy_blob(bundle, hot, &target.join(hot_name(number)), |_| Ok(()))?;
        }
    }
    let path = target.join("dense.onnx");
    copy_blob(bundle, manifest.dense, &path, |_| Ok(()))?;
    load_dense(&manifest.schema, bundle.blob(manifest.dense)?, 1)
        .map_err(|source| FlashError::Dense { path, source })?;
    if let Some(probe) = manifest.probe {
        let path = target.join("probe");
        let set = bundle.blob(probe)?;
        Sample::decode_set(&set)
            .map_err(|source| FlashError::Probe { path: bundle.path().to_owned(), source })?;
        copy_blob(bundle, probe, &path, |_| Ok(()))?;
    }
    let path = target.join("manifest");
    commit::replace(&path, bundle.manifest_bytes()).map_err(io_error(&path))
}

fn copy_blob(
    bundle: &mut BundleReader,
    blob: u32,
    path: &Path,
    mut check: impl FnMut(&[u8]) -> Result<(), FlashError>,
) -> Result<(), FlashError> {
    let mut file = BufWriter::new(File::create(path).map_err(io_error(path))?);
    bundle.read_blob(blob, |chunk| {
        check(chunk)?;
        file.write_all(chunk).map_err(io_error(path))
    })?;
    let file = file.into_inner().map_err(|e| io_error(path)(e.into_error()))?;
    file.sync_all().map_err(io_error(path))
}

/// Reclaims generations that are neither live nor the one before. A folder that cannot be removed costs
/// space, not correctness: it is reported and left.
fn remove_others(directory: &Path, live: &Path, previous: Option<PathBuf>) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for path in entries.flatten().map(|e| e.path()) {
        let is_generation =
            path.is_dir() && path.file_name().is_some_and(|n| n.to_string_lossy().starts_with('g'));
        let is_old = is_generation && path != live && Some(&path) != previous.as_ref();
        if is_old && let Err(e) = fs::remove_dir_all(&path) {
            log::warn!("{}: not removed: {e}", path.display());
        }
    }
}
