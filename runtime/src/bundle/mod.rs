//! The bundle file: chunks, then the manifest, then a trailer that finds and proves the manifest.
//! Written in one streaming pass and published by rename; read chunk by chunk, each proved by its
//! hash before it is decompressed. Never holds more than one chunk and the manifest in memory.

pub mod manifest;

use crate::bundle::manifest::{Blob, Chunk, Manifest, ManifestError, sha256};
use crate::io::atomic_write;
use crate::io::disk::{Disk, Input, Output, SystemDisk};
use crate::io::page::u64_at;
use crate::limits::{CHUNK_BYTES, MANIFEST_BYTES_MAX};
use sha2::{Digest, Sha256};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The format of the file around the chunks.
pub const BUNDLE_FORMAT: u32 = 1;
const MAGIC: &[u8; 8] = b"HATCHBDL";
const END_MAGIC: &[u8; 8] = b"HATCHEND";
pub(crate) const HEADER_BYTES: u64 = 16;
const TRAILER_BYTES: u64 = 56;
/// zstd's own default: most of the gain at several hundred MB/s.
const ZSTD_LEVEL: i32 = 3;

/// Why a bundle is refused. Nothing of a refused bundle is used.
#[derive(Debug, thiserror::Error)]
pub enum BundleError {
    /// The file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A field of the file is wrong.
    #[error("{path}: {field}: {problem}", path = path.display())]
    Field {
        /// The file.
        path: PathBuf,
        /// Which field.
        field: String,
        /// Its value and what is wrong.
        problem: String,
    },
    /// The manifest is wrong.
    #[error("{path}: manifest: {source}", path = path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: ManifestError,
    },
}

pub(crate) fn io_error(path: &Path) -> impl FnOnce(io::Error) -> BundleError + '_ {
    move |source| BundleError::Io { path: path.to_owned(), source }
}

pub(crate) fn field_error(
    path: &Path,
    field: impl Into<String>,
    problem: impl Into<String>,
) -> BundleError {
    BundleError::Field { path: path.to_owned(), field: field.into(), problem: problem.into() }
}

/// What a bundle begins with.
pub(crate) fn header() -> [u8; HEADER_BYTES as usize] {
    let mut header = [0; HEADER_BYTES as usize];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&BUNDLE_FORMAT.to_le_bytes());
    header
}

/// What follows a manifest that begins at byte `at`.
pub(crate) fn trailer(at: u64, manifest: &[u8]) -> [u8; TRAILER_BYTES as usize] {
    let mut trailer = [0; TRAILER_BYTES as usize];
    trailer[..8].copy_from_slice(&at.to_le_bytes());
    trailer[8..16].copy_from_slice(&(manifest.len() as u64).to_le_bytes());
    trailer[16..48].copy_from_slice(&sha256(manifest));
    trailer[48..].copy_from_slice(END_MAGIC);
    trailer
}

/// Writes a bundle. Until `finish` nothing stands under its name.
pub struct BundleWriter {
    path: PathBuf,
    /// `None` once the file is published.
    file: Option<Box<dyn Output>>,
    written: u64,
    blobs: Vec<Blob>,
    /// The content of the blob being written, so far.
    content: Sha256,
    chunk: Vec<u8>,
}

impl BundleWriter {
    /// Begins the bundle that will stand at `path`.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(path: &Path) -> Result<Self, BundleError> {
        let file = SystemDisk.create(&atomic_write::part_of(path)).map_err(io_error(path))?;
        let chunk = Vec::with_capacity(CHUNK_BYTES);
        let mut writer = Self {
            path: path.to_owned(),
            file: Some(file),
            written: 0,
            blobs: Vec::new(),
            content: Sha256::new(),
            chunk,
        };
        writer.put(&header()).map_err(io_error(path))?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.file.as_mut().map_or(Ok(()), |file| file.write_all(bytes))
    }

    /// Begins the next blob; its content is what is written to the result. Returns its number with
    /// it.
    pub fn blob(&mut self) -> (u32, BlobWriter<'_>) {
        self.blobs.push(Blob::default());
        ((self.blobs.len() - 1) as u32, BlobWriter { bundle: self })
    }

    fn end_chunk(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        let compressed = zstd::bulk::compress(&self.chunk, ZSTD_LEVEL)?;
        // Where it saves under a sixteenth the car had better not decompress.
        let stored =
            if compressed.len() < self.chunk.len() / 16 * 15 { &compressed } else { &self.chunk };
        self.written += stored.len() as u64;
        self.file.as_mut().map_or(Ok(()), |file| file.write_all(stored))?;
        let chunk = Chunk {
            stored: stored.len() as u32,
            raw: self.chunk.len() as u32,
            sha256: sha256(stored),
        };
        if let Some(blob) = self.blobs.last_mut() {
            blob.chunks.push(chunk);
        }
        self.content.update(&self.chunk);
        self.chunk.clear();
        Ok(())
    }

    fn end_blob(&mut self) -> io::Result<()> {
        self.end_chunk()?;
        if let Some(blob) = self.blobs.last_mut() {
            blob.sha256 = self.content.finalize_reset().into();
        }
        Ok(())
    }

    /// The blobs written so far.
    pub fn blobs(&self) -> &[Blob] {
        &self.blobs
    }

    /// Writes the manifest, with this writer's blobs in it, and publishes the file. Returns its
    /// bytes.
    ///
    /// # Errors
    /// The manifest contradicts itself, or the file cannot be written.
    pub fn finish(mut self, mut manifest: Manifest) -> Result<u64, BundleError> {
        manifest.blobs = std::mem::take(&mut self.blobs);
        let refused = |source| BundleError::Manifest { path: self.path.clone(), source };
        let bytes = manifest.encode().map_err(refused)?;
        Manifest::decode(&bytes).map_err(refused)?;
        self.write_end(&bytes).map_err(io_error(&self.path))?;
        if let Some(part) = self.file.take() {
            atomic_write::publish(&SystemDisk, &self.path, part).map_err(io_error(&self.path))?;
        }
        Ok(self.written)
    }

    fn write_end(&mut self, manifest: &[u8]) -> io::Result<()> {
        let trailer = trailer(self.written, manifest);
        self.put(manifest)?;
        self.put(&trailer)
    }
}

impl Drop for BundleWriter {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            // A bundle that was not finished; what is left of it is of no use.
            let _ = SystemDisk.remove_file(&atomic_write::part_of(&self.path));
        }
    }
}

/// Takes the content of one blob. Call `end` when it is complete.
pub struct BlobWriter<'a> {
    bundle: &'a mut BundleWriter,
}

impl BlobWriter<'_> {
    /// Completes the blob.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn end(self) -> io::Result<()> {
        self.bundle.end_blob()
    }
}

impl Write for BlobWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = CHUNK_BYTES - self.bundle.chunk.len();
        let n = bytes.len().min(room);
        self.bundle.chunk.extend_from_slice(&bytes[..n]);
        if n == room {
            self.bundle.end_chunk()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An open bundle. Holding one proves that its manifest is whole and consistent and that its chunks
/// fill the file exactly; the chunks themselves are proved as they are read.
pub struct BundleReader {
    path: PathBuf,
    file: Box<dyn Input>,
    manifest: Manifest,
    manifest_bytes: Vec<u8>,
    /// Where each blob begins in the file.
    offsets: Vec<u64>,
}

impl BundleReader {
    /// Opens the bundle at `path`.
    ///
    /// # Errors
    /// The file is not a whole bundle of this format.
    pub fn open(path: &Path) -> Result<Self, BundleError> {
        Self::open_on(&SystemDisk, path)
    }

    /// As `open`, on any disk.
    ///
    /// # Errors
    /// As `open`.
    pub fn open_on(disk: &dyn Disk, path: &Path) -> Result<Self, BundleError> {
        let mut file = disk.open(path).map_err(io_error(path))?;
        let bytes = file.seek(SeekFrom::End(0)).map_err(io_error(path))?;
        file.seek(SeekFrom::Start(0)).map_err(io_error(path))?;
        if bytes < HEADER_BYTES + TRAILER_BYTES {
            return Err(field_error(
                path,
                "length",
                format!("{bytes} bytes are too few for a bundle"),
            ));
        }
        check_header(path, file.as_mut())?;
        let manifest_bytes = read_manifest(path, file.as_mut(), bytes)?;
        let manifest = Manifest::decode(&manifest_bytes)
            .map_err(|source| BundleError::Manifest { path: path.to_owned(), source })?;
        let mut offsets = Vec::with_capacity(manifest.blobs.len());
        let mut end = HEADER_BYTES;
        for blob in &manifest.blobs {
            offsets.push(end);
            end += blob.stored_bytes();
        }
        let chunks_end = bytes - TRAILER_BYTES - manifest_bytes.len() as u64;
        if end != chunks_end {
            return Err(field_error(
                path,
                "blobs",
                format!("chunks end at {end}, the manifest begins at {chunks_end}"),
            ));
        }
        Ok(Self { path: path.to_owned(), file, manifest, manifest_bytes, offsets })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The manifest as it stands in the file.
    pub fn manifest_bytes(&self) -> &[u8] {
        &self.manifest_bytes
    }

    /// Hands the content of blob `index` to `take`, chunk by chunk, each proved first.
    ///
    /// # Errors
    /// A chunk does not match its hash or its length, or `take` refuses it.
    pub fn read_blob<E: From<BundleError>>(
        &mut self,
        index: u32,
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let path = &self.path;
        self.file.seek(SeekFrom::Start(self.offsets[index as usize])).map_err(io_error(path))?;
        let mut stored = Vec::with_capacity(CHUNK_BYTES);
        for (c, chunk) in self.manifest.blobs[index as usize].chunks.iter().enumerate() {
            stored.resize(chunk.stored as usize, 0);
            self.file.read_exact(&mut stored).map_err(io_error(path))?;
            let field = || format!("blobs[{index}].chunks[{c}]");
            take(
                &open_chunk(chunk, &stored)
                    .map_err(|problem| field_error(path, field(), problem))?,
            )?;
        }
        Ok(())
    }

    /// Hands every chunk as it is stored to `take`, in file order, each proved first.
    ///
    /// # Errors
    /// A chunk does not match its hash, or `take` refuses it.
    pub fn each_stored<E: From<BundleError>>(
        &mut self,
        mut take: impl FnMut(&Chunk, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let path = &self.path;
        self.file.seek(SeekFrom::Start(HEADER_BYTES)).map_err(io_error(path))?;
        let mut stored = Vec::with_capacity(CHUNK_BYTES);
        for (i, blob) in self.manifest.blobs.iter().enumerate() {
            for (c, chunk) in blob.chunks.iter().enumerate() {
                stored.resize(chunk.stored as usize, 0);
                self.file.read_exact(&mut stored).map_err(io_error(path))?;
                if sha256(&stored) != chunk.sha256 {
                    let field = format!("blobs[{i}].chunks[{c}]");
                    return Err(field_error(path, field, "content does not match its hash").into());
                }
                take(chunk, &stored)?;
            }
        }
        Ok(())
    }

    /// The whole content of a small blob.
    ///
    /// # Errors
    /// As `read_blob`.
    pub fn blob(&mut self, index: u32) -> Result<Vec<u8>, BundleError> {
        let mut content =
            Vec::with_capacity(self.manifest.blobs[index as usize].raw_bytes() as usize);
        self.read_blob(index, |chunk| {
            content.extend_from_slice(chunk);
            Ok::<(), BundleError>(())
        })?;
        if sha256(&content) != self.manifest.blobs[index as usize].sha256 {
            return Err(field_error(
                &self.path,
                format!("blobs[{index}].sha256"),
                "content does not match its hash",
            ));
        }
        Ok(content)
    }
}

/// Proves `stored`, then decompresses it if it is compressed; it can grow to no more than
/// `chunk.raw`.
fn open_chunk<'a>(chunk: &Chunk, stored: &'a [u8]) -> Result<std::borrow::Cow<'a, [u8]>, String> {
    if sha256(stored) != chunk.sha256 {
        return Err("content does not match its hash".to_owned());
    }
    if chunk.stored == chunk.raw {
        return Ok(stored.into());
    }
    let raw = zstd::bulk::decompress(stored, chunk.raw as usize)
        .map_err(|e| format!("does not decompress ({e})"))?;
    if raw.len() != chunk.raw as usize {
        return Err(format!("decompresses to {} bytes instead of {}", raw.len(), chunk.raw));
    }
    Ok(raw.into())
}

fn check_header(path: &Path, file: &mut dyn Input) -> Result<(), BundleError> {
    let mut header = [0; HEADER_BYTES as usize];
    file.read_exact(&mut header).map_err(io_error(path))?;
    if &header[..8] != MAGIC {
        return Err(field_error(path, "magic", "is not a Hatchback bundle"));
    }
    let format = u64_at(&header, 8);
    if format != u64::from(BUNDLE_FORMAT) {
        return Err(field_error(
            path,
            "format",
            format!("{format} is not {BUNDLE_FORMAT}, the one this version reads"),
        ));
    }
    Ok(())
}

fn read_manifest(path: &Path, file: &mut dyn Input, bytes: u64) -> Result<Vec<u8>, BundleError> {
    let mut trailer = [0; TRAILER_BYTES as usize];
    file.seek(SeekFrom::Start(bytes - TRAILER_BYTES)).map_err(io_error(path))?;
    file.read_exact(&mut trailer).map_err(io_error(path))?;
    if &trailer[48..] != END_MAGIC {
        return Err(field_error(
            path,
            "trailer",
            "is missing: the file is cut short or something follows it",
        ));
    }
    let (at, length) = (u64_at(&trailer, 0), u64_at(&trailer, 8));
    if length > MANIFEST_BYTES_MAX as u64 {
        return Err(field_error(
            path,
            "trailer.manifest_bytes",
            format!("{length}, over {MANIFEST_BYTES_MAX}"),
        ));
    }
    if at < HEADER_BYTES || at.checked_add(length) != Some(bytes - TRAILER_BYTES) {
        return Err(field_error(
            path,
            "trailer.manifest_at",
            format!("{at} + {length} does not meet the trailer"),
        ));
    }
    let mut manifest = vec![0; length as usize];
    file.seek(SeekFrom::Start(at)).map_err(io_error(path))?;
    file.read_exact(&mut manifest).map_err(io_error(path))?;
    if sha256(&manifest) != trailer[16..48] {
        return Err(field_error(path, "manifest", "does not match its hash"));
    }
    Ok(manifest)
}
