//! Reads the content of releases from a repository, chunk by chunk: manifests, small blobs, and
//! pages of segments. Uses no byte that does not match its hash, and verifies no signature.

use crate::repository::store::Store;
use anyhow::{Context, Result};
use hatchback::bundle::manifest::{Blob, Chunk, Hash, Manifest, sha256};
use hatchback::bundle::open_chunk;
use hatchback::io::page::AlignedPage;
use hatchback::io::reader::PageFile;
use hatchback::limits::{CHUNK_BYTES, PAGE_BYTES};
use hatchback::update::release::{chunk_path, manifest_path};
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

/// Returns the manifest of the target `name` with this hash; `None` if it is missing or damaged.
///
/// # Errors
/// The store fails.
pub fn find_manifest(store: &dyn Store, name: &str, hash: &[u8]) -> Result<Option<Manifest>> {
    let Ok(hash) = Hash::try_from(hash) else { return Ok(None) };
    let bytes = store.get(&manifest_path(name, &hash))?.filter(|bytes| sha256(bytes) == hash);
    Ok(bytes.and_then(|bytes| Manifest::decode(&bytes).ok()))
}

/// Returns the whole content of a small blob.
///
/// # Errors
/// The store fails, or a chunk is missing or damaged.
pub fn read_blob(store: &dyn Store, blob: &Blob) -> Result<Vec<u8>> {
    let mut content = Vec::new();
    for chunk in &blob.chunks {
        content.extend(read_chunk(store, chunk)?);
    }
    Ok(content)
}

fn read_chunk(store: &dyn Store, chunk: &Chunk) -> Result<Vec<u8>> {
    let path = chunk_path(&chunk.sha256);
    let stored = store.get(&path)?.filter(|stored| sha256(stored) == chunk.sha256);
    let content = stored.and_then(|stored| Some(open_chunk(chunk, &stored).ok()?.into_owned()));
    content.with_context(|| {
        format!("{path}: is missing or damaged; publish the bundle of its release again")
    })
}

/// A segment in a repository. Each page is read from its chunk, so one row costs a few chunks.
pub struct StoredPages {
    store: Arc<dyn Store + Send + Sync>,
    blob: Blob,
    /// The number and the content of the last chunk: the pages of an index follow each other.
    last: Mutex<Option<(usize, Vec<u8>)>>,
}

impl StoredPages {
    /// Returns the pages of `blob`.
    pub fn new(store: Arc<dyn Store + Send + Sync>, blob: Blob) -> Arc<Self> {
        Arc::new(Self { store, blob, last: Mutex::default() })
    }
}

impl PageFile for StoredPages {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.blob.raw_bytes())
    }

    fn read_page(&self, number: u32, page: &mut AlignedPage) -> io::Result<()> {
        let at = number as usize * PAGE_BYTES;
        let (wanted, start) = (at / CHUNK_BYTES, at % CHUNK_BYTES);
        let end = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let content = match last.take() {
            Some((known, content)) if known == wanted => content,
            _ => {
                let chunk = self.blob.chunks.get(wanted).ok_or_else(end)?;
                read_chunk(&*self.store, chunk).map_err(io::Error::other)?
            }
        };
        let bytes = content.get(start..start + PAGE_BYTES).ok_or_else(end)?;
        page.0.copy_from_slice(bytes);
        *last = Some((wanted, content));
        Ok(())
    }

    fn system_file(&self) -> Option<&Arc<File>> {
        None
    }
}
