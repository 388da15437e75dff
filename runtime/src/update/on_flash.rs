//! Chunks of a restored release that the car has on flash already: those of the segments that its
//! live or previous generation got from the same release. The sync process takes them from there
//! instead of the repository. Never trusts flash: a chunk counts only if it matches its signed
//! hash.

use crate::bundle::StoredChunk;
use crate::bundle::manifest::{Chunk, Hash, Manifest};
use crate::flash::Flash;
use crate::io::disk::Disk;
use crate::limits::CHUNK_BYTES;
use std::collections::HashMap;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::Arc;

/// Where the content of a chunk may be.
struct Place {
    file: PathBuf,
    at: u64,
}

/// The chunks that may be on flash, by the hash of their stored bytes.
#[derive(Default)]
pub(super) struct OnFlash {
    disk: Option<Arc<dyn Disk>>,
    places: HashMap<Hash, Place>,
}

impl OnFlash {
    /// Finds the segments of `manifest` in the flash directory.
    pub fn find(flash: &Flash, manifest: &Manifest) -> Self {
        let mut places = HashMap::new();
        let restored = manifest.restored.iter().flat_map(|restored| &restored.tables);
        for (number, layers) in restored.enumerate() {
            for layer in layers {
                let Some(file) = flash.segment_of(number, layer.sequence) else { continue };
                let chunks = &manifest.blobs[layer.segment as usize].chunks;
                places.extend(chunks.iter().enumerate().map(|(n, chunk)| {
                    let at = n as u64 * CHUNK_BYTES as u64;
                    (chunk.sha256, Place { file: file.clone(), at })
                }));
            }
        }
        Self { disk: Some(Arc::clone(flash.disk())), places }
    }

    /// Returns the stored bytes of `chunk` if its content is on flash. The publisher may have
    /// compressed it in another way: then the repository has to deliver it.
    pub fn chunk(&self, chunk: &Chunk) -> Option<Vec<u8>> {
        let place = self.places.get(&chunk.sha256)?;
        let mut file = self.disk.as_ref()?.open(&place.file).ok()?;
        file.seek(SeekFrom::Start(place.at)).ok()?;
        let mut raw = vec![0; chunk.raw as usize];
        file.read_exact(&mut raw).ok()?;
        let stored = StoredChunk::new(raw).ok()?;
        (stored.chunk == *chunk).then_some(stored.stored)
    }
}
