//! The bundle file: chunks, then the manifest, then a trailer with the manifest's position and
//! hash. [`BundleWriter`] writes a bundle in one pass and renames it into place. [`BundleReader`]
//! reads chunk by chunk and checks each chunk's hash before it decompresses the chunk. Never holds
//! more than one chunk and the manifest in memory.

pub mod manifest;

use crate::bundle::manifest::{Blob, Chunk, Manifest, ManifestError, sha256};
use crate::io::atomic_write;
use crate::io::disk::{Disk, Input, Output, SystemDisk};
use crate::io::field_error::FieldError;
use crate::io::in_order::{InOrder, WorkPool};
use crate::io::page::u64_at;
use crate::limits::{CHUNK_BYTES, MANIFEST_BYTES_MAX};
use sha2::{Digest, Sha256};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// The format of the bundle file.
pub const BUNDLE_FORMAT: u32 = 1;
const MAGIC: &[u8; 8] = b"HATCHBDL";
const END_MAGIC: &[u8; 8] = b"HATCHEND";
pub(crate) const HEADER_BYTES: u64 = 16;
const TRAILER_BYTES: u64 = 56;
/// The default level of zstd: most of the gain at several hundred MB/s.
const ZSTD_LEVEL: i32 = 3;

/// Why a bundle is not valid. No part of such a bundle is used.
#[derive(thiserror::Error)]
#[allow(missing_docs)]
pub enum BundleError {
    /// The system refused to read or write the file.
    #[error("{path}: {source}", path = path.display())]
    Io { path: PathBuf, source: io::Error },
    /// A part of the file does not match its hash: the file is damaged.
    #[error("{path}: {field}: content does not match its hash", path = path.display())]
    Hash { path: PathBuf, field: String },
    /// A field of the file has a value that is not allowed.
    #[error(transparent)]
    Field(FieldError),
    /// The manifest is not valid.
    #[error("{path}: manifest: {source}", path = path.display())]
    Manifest { path: PathBuf, source: ManifestError },
}

debug_as_display!(BundleError);

pub(crate) fn io_error(path: &Path) -> impl FnOnce(io::Error) -> BundleError + '_ {
    move |source| BundleError::Io { path: path.to_owned(), source }
}

pub(crate) fn field_error(
    path: &Path,
    field: impl Into<String>,
    problem: impl Into<String>,
) -> BundleError {
    BundleError::Field(FieldError::new(path, field, problem))
}

/// Returns the first bytes of a bundle.
pub(crate) fn header() -> [u8; HEADER_BYTES as usize] {
    let mut header = [0; HEADER_BYTES as usize];
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&BUNDLE_FORMAT.to_le_bytes());
    header
}

/// Returns the bytes after a manifest that starts at byte `at`.
pub(crate) fn trailer(at: u64, manifest: &[u8]) -> [u8; TRAILER_BYTES as usize] {
    let mut trailer = [0; TRAILER_BYTES as usize];
    trailer[..8].copy_from_slice(&at.to_le_bytes());
    trailer[8..16].copy_from_slice(&(manifest.len() as u64).to_le_bytes());
    trailer[16..48].copy_from_slice(&sha256(manifest));
    trailer[48..].copy_from_slice(END_MAGIC);
    trailer
}

/// Writes a bundle. The file gets its final name in `finish`.
pub struct BundleWriter {
    path: PathBuf,
    /// `None` after the rename.
    file: Option<Box<dyn Output>>,
    written: u64,
    blobs: Vec<Blob>,
    /// The hash of the current blob's content so far.
    content: Sha256,
    chunk: Vec<u8>,
    /// The chunks of the current blob that are not written yet.
    compressed: InOrder<io::Result<StoredChunk>>,
}

/// A chunk and its bytes, as a bundle or a repository stores them.
pub struct StoredChunk {
    /// Its entry in a manifest.
    pub chunk: Chunk,
    /// Its bytes, compressed if that shortens them.
    pub stored: Vec<u8>,
}

impl StoredChunk {
    /// Returns the chunk with the content `raw`. Equal content gives equal bytes.
    ///
    /// # Errors
    /// The compressor has no memory.
    pub fn new(raw: Vec<u8>) -> io::Result<Self> {
        let compressed = zstd::bulk::compress(&raw, ZSTD_LEVEL)?;
        // A chunk that compression shortens by less than a sixteenth is stored uncompressed. The
        // car then reads it without decompression.
        let raw_bytes = raw.len() as u32;
        let stored = if compressed.len() < raw.len() / 16 * 15 { compressed } else { raw };
        let sha256 = sha256(&stored);
        Ok(Self { chunk: Chunk { stored: stored.len() as u32, raw: raw_bytes, sha256 }, stored })
    }
}

impl BundleWriter {
    /// Starts a bundle that `finish` will rename to `path`. The caller's thread compresses.
    ///
    /// # Errors
    /// [`BundleError::Io`] if the file cannot be created.
    pub fn create(path: &Path) -> Result<Self, BundleError> {
        Self::create_on(path, &WorkPool::default())
    }

    /// Starts a bundle that `finish` will rename to `path`. The threads of `workers` compress.
    ///
    /// # Errors
    /// [`BundleError::Io`] if the file cannot be created or `path` is a directory.
    pub fn create_on(path: &Path, workers: &WorkPool) -> Result<Self, BundleError> {
        // The disk replaces a directory that stands where it renames a file to. In a car that mends
        // damage. Here the path is a user's, and the directory may be work of hours.
        if path.is_dir() {
            return Err(io_error(path)(io::ErrorKind::IsADirectory.into()));
        }
        let file = SystemDisk.create(&atomic_write::part_of(path)).map_err(io_error(path))?;
        let chunk = Vec::with_capacity(CHUNK_BYTES);
        let mut writer = Self {
            path: path.to_owned(),
            file: Some(file),
            written: 0,
            blobs: Vec::new(),
            content: Sha256::new(),
            chunk,
            compressed: InOrder::new(workers),
        };
        writer.put(&header()).map_err(io_error(path))?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.file.as_mut().map_or(Ok(()), |file| file.write_all(bytes))
    }

    /// Starts the next blob. Returns its number and the writer of its content.
    pub fn blob(&mut self) -> (u32, BlobWriter<'_>) {
        self.blobs.push(Blob::default());
        ((self.blobs.len() - 1) as u32, BlobWriter { bundle: self })
    }

    fn end_chunk(&mut self) -> io::Result<()> {
        if self.chunk.is_empty() {
            return Ok(());
        }
        let raw = std::mem::replace(&mut self.chunk, Vec::with_capacity(CHUNK_BYTES));
        self.content.update(&raw);
        match self.compressed.start(move || StoredChunk::new(raw)) {
            Some(compressed) => self.put_chunk(compressed?),
            None => Ok(()),
        }
    }

    fn put_chunk(&mut self, compressed: StoredChunk) -> io::Result<()> {
        self.put(&compressed.stored)?;
        if let Some(blob) = self.blobs.last_mut() {
            blob.chunks.push(compressed.chunk);
        }
        Ok(())
    }

    fn end_blob(&mut self) -> io::Result<()> {
        self.end_chunk()?;
        while let Some(compressed) = self.compressed.wait() {
            self.put_chunk(compressed?)?;
        }
        if let Some(blob) = self.blobs.last_mut() {
            blob.sha256 = self.content.finalize_reset().into();
        }
        Ok(())
    }

    /// Returns the blobs written so far.
    pub fn blobs(&self) -> &[Blob] {
        &self.blobs
    }

    /// Writes the manifest with this writer's blobs and renames the file into place. Returns the
    /// bytes of the file.
    ///
    /// # Errors
    /// [`BundleError::Manifest`] if the manifest is not valid, [`BundleError::Io`] if the file
    /// cannot be written.
    pub fn finish(mut self, mut manifest: Manifest) -> Result<u64, BundleError> {
        manifest.blobs = std::mem::take(&mut self.blobs);
        let refused = |source| BundleError::Manifest { path: self.path.clone(), source };
        let bytes = manifest.encode().map_err(refused)?;
        Manifest::decode(&bytes).map_err(refused)?;

        self.write_end(&bytes).map_err(io_error(&self.path))?;
        self.rename_into_place()?;
        Ok(self.written)
    }

    /// Completes the file under its temporary name and returns that name. The file is then a whole
    /// bundle, which a [`BundleReader`] can read, and [`BundleWriter::keep`] can change its end.
    ///
    /// # Errors
    /// As [`BundleWriter::finish`].
    pub fn draft(&mut self, mut manifest: Manifest) -> Result<PathBuf, BundleError> {
        manifest.blobs = self.blobs.clone();
        let refused = |source| BundleError::Manifest { path: self.path.clone(), source };
        let bytes = manifest.encode().map_err(refused)?;
        self.write_end(&bytes).map_err(io_error(&self.path))?;
        self.file.as_mut().map_or(Ok(()), |file| file.flush()).map_err(io_error(&self.path))?;
        Ok(atomic_write::part_of(&self.path))
    }

    /// Removes what follows the first `blobs` blobs from the file.
    ///
    /// # Errors
    /// [`BundleError::Io`] if the file cannot be shortened.
    pub fn keep(&mut self, blobs: usize) -> Result<(), BundleError> {
        self.blobs.truncate(blobs);
        self.written = HEADER_BYTES + self.blobs.iter().map(Blob::stored_bytes).sum::<u64>();
        let part = atomic_write::part_of(&self.path);
        self.file = Some(SystemDisk.append(&part, self.written).map_err(io_error(&self.path))?);
        Ok(())
    }

    /// Renames the file into place without a manifest: it is a part of a bundle, not a bundle.
    /// Returns its blobs.
    ///
    /// # Errors
    /// [`BundleError::Io`] if the file cannot be written.
    pub fn finish_part(mut self) -> Result<Vec<Blob>, BundleError> {
        self.rename_into_place()?;
        Ok(std::mem::take(&mut self.blobs))
    }

    fn rename_into_place(&mut self) -> Result<(), BundleError> {
        let Some(part) = self.file.take() else { return Ok(()) };
        atomic_write::rename_into_place(&SystemDisk, &self.path, part)
            .inspect_err(|_| self.remove_part())
            .map_err(io_error(&self.path))
    }

    /// Removes the partial file of a bundle that will not be finished.
    fn remove_part(&self) {
        let _ = SystemDisk.remove_file(&atomic_write::part_of(&self.path));
    }

    /// Adds the `blobs` of `part`, a file of [`BundleWriter::finish_part`] at `path`. Copies the
    /// chunks as they are stored, after the check of each.
    ///
    /// # Errors
    /// [`BundleError::Hash`] if a chunk does not match its hash in `blobs`, [`BundleError::Io`] if
    /// a file cannot be read or written.
    pub fn copy_part(
        &mut self,
        blobs: &[Blob],
        path: &Path,
        part: &mut dyn Read,
    ) -> Result<(), BundleError> {
        let mut head = [0; HEADER_BYTES as usize];
        part.read_exact(&mut head).map_err(io_error(path))?;
        if head != header() {
            return Err(field_error(path, "header", "is not that of a part of a bundle"));
        }

        let mut stored = Vec::with_capacity(CHUNK_BYTES);
        for (number, blob) in blobs.iter().enumerate() {
            for (c, chunk) in blob.chunks.iter().enumerate() {
                let field = || format!("blobs[{number}].chunks[{c}]");
                if chunk.stored as usize > CHUNK_BYTES {
                    return Err(field_error(path, field(), "is longer than a chunk"));
                }
                stored.resize(chunk.stored as usize, 0);
                part.read_exact(&mut stored).map_err(io_error(path))?;
                check_hash(path, chunk, &stored, field)?;
                self.put(&stored).map_err(io_error(&self.path))?;
            }
            self.blobs.push(blob.clone());
        }
        Ok(())
    }

    fn write_end(&mut self, manifest: &[u8]) -> io::Result<()> {
        let trailer = trailer(self.written, manifest);
        self.put(manifest)?;
        self.put(&trailer)
    }
}

impl Drop for BundleWriter {
    fn drop(&mut self) {
        if self.file.is_some() {
            self.remove_part();
        }
    }
}

/// Writes the content of one blob. The caller calls `end` after the last byte.
pub struct BlobWriter<'a> {
    bundle: &'a mut BundleWriter,
}

impl BlobWriter<'_> {
    /// Completes the blob.
    ///
    /// # Errors
    /// The system refused to write the file.
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

/// An open bundle. Holding one proves that the manifest is whole and consistent and that the chunks
/// fill the file exactly. Each chunk is checked when it is read.
pub struct BundleReader {
    path: PathBuf,
    file: Box<dyn Input>,
    manifest: Manifest,
    manifest_bytes: Vec<u8>,
    /// The position of each blob's first byte in the file.
    offsets: Vec<u64>,
}

impl BundleReader {
    /// Opens the bundle at `path`.
    ///
    /// # Errors
    /// [`BundleError`] if the file is not a whole bundle of this format.
    pub fn open(path: &Path) -> Result<Self, BundleError> {
        Self::open_on(&SystemDisk, path)
    }

    /// Opens the bundle at `path` on `disk`.
    ///
    /// # Errors
    /// [`BundleError`] if the file is not a whole bundle of this format.
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
            end = end.saturating_add(blob.stored_bytes());
        }
        // `read_manifest` checked that the manifest ends at the trailer.
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

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the encoded manifest.
    pub fn manifest_bytes(&self) -> &[u8] {
        &self.manifest_bytes
    }

    /// Passes the content of blob `index` to `take`, chunk by chunk, after the check of each chunk.
    ///
    /// # Errors
    /// [`BundleError`] if a chunk cannot be read or does not match its hash or length, and the
    /// errors of `take`.
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
            check_hash(path, chunk, &stored, field)?;
            take(
                &open_chunk(chunk, &stored)
                    .map_err(|problem| field_error(path, field(), problem))?,
            )?;
        }
        Ok(())
    }

    /// Passes the stored bytes of every chunk to `take`, in file order, after the check of each
    /// chunk.
    ///
    /// # Errors
    /// [`BundleError`] if a chunk cannot be read or does not match its hash, and the errors of
    /// `take`.
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
                check_hash(path, chunk, &stored, || format!("blobs[{i}].chunks[{c}]"))?;
                take(chunk, &stored)?;
            }
        }
        Ok(())
    }

    /// Returns the whole content of a small blob.
    ///
    /// # Errors
    /// [`BundleError`] if a chunk cannot be read or the content does not match its hashes.
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

/// Checks the hash of the stored bytes of `chunk`, which is `field` of the bundle.
fn check_hash(
    path: &Path,
    chunk: &Chunk,
    stored: &[u8],
    field: impl FnOnce() -> String,
) -> Result<(), BundleError> {
    if sha256(stored) == chunk.sha256 {
        return Ok(());
    }
    Err(BundleError::Hash { path: path.to_owned(), field: field() })
}

/// Returns the content of a chunk from its `stored` bytes, whose hash was checked. Decompresses at
/// most `chunk.raw` bytes.
///
/// # Errors
/// The bytes do not decompress to the chunk's length.
pub fn open_chunk<'a>(
    chunk: &Chunk,
    stored: &'a [u8],
) -> Result<std::borrow::Cow<'a, [u8]>, String> {
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
