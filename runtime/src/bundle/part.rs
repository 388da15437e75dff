//! Reads a blob of a part of a bundle ([`super::BundleWriter::finish_part`]) as a stream. Checks
//! the hash of each chunk before it decompresses the chunk. Holds one chunk.

use crate::bundle::manifest::{Blob, Chunk};
use crate::bundle::{BundleError, CHUNK_BYTES};
use crate::bundle::{HEADER_BYTES, check_hash, check_header, field_error, io_error, open_chunk};
use crate::io::disk::{Disk, Input, SystemDisk};
use std::io::{self, Read, SeekFrom};
use std::path::{Path, PathBuf};

/// The content of a blob, from its first byte on.
pub struct PartReader {
    path: PathBuf,
    file: Box<dyn Input>,
    chunks: std::vec::IntoIter<Chunk>,
    /// The content of the current chunk, of which the first `read` bytes were read.
    content: Vec<u8>,
    read: usize,
}

impl PartReader {
    /// Opens blob `index` of the part at `path`, which holds `blobs`.
    ///
    /// # Errors
    /// [`BundleError`] if the file cannot be read, is not a part of a bundle, or has no such blob.
    pub fn open(path: &Path, blobs: &[Blob], index: usize) -> Result<Self, BundleError> {
        let mut file = SystemDisk.open(path).map_err(io_error(path))?;
        check_header(path, file.as_mut())?;
        let Some(blob) = blobs.get(index) else {
            return Err(field_error(path, "blobs", format!("has {}, not {index}", blobs.len())));
        };
        let before = blobs[..index].iter().map(Blob::stored_bytes).fold(0, u64::saturating_add);
        file.seek(SeekFrom::Start(HEADER_BYTES.saturating_add(before))).map_err(io_error(path))?;
        let chunks = blob.chunks.clone().into_iter();
        Ok(Self { path: path.to_owned(), file, chunks, content: Vec::new(), read: 0 })
    }

    fn next_chunk(&mut self, chunk: &Chunk) -> Result<(), BundleError> {
        let field = || "chunks".to_owned();
        if chunk.stored as usize > CHUNK_BYTES || chunk.raw as usize > CHUNK_BYTES {
            return Err(field_error(&self.path, field(), "one is longer than a chunk"));
        }
        let mut stored = vec![0; chunk.stored as usize];
        self.file.read_exact(&mut stored).map_err(io_error(&self.path))?;
        check_hash(&self.path, chunk, &stored, field)?;
        let content = open_chunk(chunk, &stored);
        let refused = |problem| field_error(&self.path, field(), problem);
        self.content = content.map_err(refused)?.into_owned();
        self.read = 0;
        Ok(())
    }
}

impl Read for PartReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.read == self.content.len() {
            let Some(chunk) = self.chunks.next() else { return Ok(0) };
            self.next_chunk(&chunk).map_err(io::Error::other)?;
        }
        let bytes = out.len().min(self.content.len() - self.read);
        out[..bytes].copy_from_slice(&self.content[self.read..][..bytes]);
        self.read += bytes;
        Ok(bytes)
    }
}
