//! What a publish offers to cars: bundles and restored releases, each with the target that lists
//! it, and their uploads. Never signs, and never removes an object of the store.

use crate::repository::restore::Restoration;
use crate::repository::store::Store;
use crate::repository::variants::Named;
use crate::serve;
use anyhow::{Context, Result, ensure};
use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::{Blob, Chunk, Manifest, sha256};
use hatchback::update::release::{BYTES, SHARE, chunk_path, manifest_path};
use serde_json::Value;
use std::collections::HashMap;
use tough::TargetName;
use tough::schema::{Hashes, Target};

/// What a target brings.
pub enum Content {
    Bundle(BundleReader),
    Restored(Restoration),
}

/// A content and the target that lists it.
pub struct Offer {
    pub content: Content,
    pub name: TargetName,
    pub target: Target,
}

impl Offer {
    pub fn restored(mut restoration: Restoration, share: u8) -> Self {
        let custom = std::mem::take(&mut restoration.named.custom);
        let named = Named { name: restoration.named.name.clone(), custom };
        Self::new(Content::Restored(restoration), named, share)
    }

    pub fn new(content: Content, named: Named, share: u8) -> Self {
        let (manifest, encoded) = (content.manifest(), content.manifest_bytes());
        let bytes: u64 = manifest.blobs.iter().map(Blob::stored_bytes).sum();
        let mut custom = named.custom;
        custom.extend([
            (BYTES.to_owned(), Value::from(bytes)),
            (SHARE.to_owned(), Value::from(share)),
        ]);
        let target = Target {
            length: encoded.len() as u64,
            hashes: Hashes { sha256: sha256(encoded).to_vec().into(), _extra: HashMap::new() },
            custom,
            _extra: HashMap::new(),
        };
        Self { name: named.name, target, content }
    }

    /// Uploads the chunks that the store lacks, then the manifest.
    pub fn upload(&mut self, uploads: &mut Uploads<'_>) -> Result<()> {
        let total = self.content.manifest().blobs.iter().map(Blob::stored_bytes).sum();
        let bar = serve::progress_bar(total, "uploading", "{bytes}/{total_bytes}");
        let mut take = |chunk: &Chunk, stored: Option<&[u8]>| {
            bar.inc(u64::from(chunk.stored));
            uploads.take(chunk, stored)
        };
        let uploaded = match &mut self.content {
            Content::Bundle(bundle) => {
                bundle.each_stored(|chunk, stored| take(chunk, Some(stored)))
            }
            Content::Restored(Restoration { manifest, chunks, .. }) => {
                let mut listed = manifest.blobs.iter().flat_map(|blob| &blob.chunks);
                listed.try_for_each(|chunk| {
                    let own = chunks.iter().find(|own| own.chunk.sha256 == chunk.sha256);
                    take(chunk, own.map(|own| own.stored.as_slice()))
                })
            }
        };
        bar.finish_and_clear();
        uploaded?;

        let content = self.content.manifest_bytes();
        let path = manifest_path(self.name.raw(), &sha256(content));
        uploads.store.put(&path, content.to_vec())
    }
}

impl Content {
    pub fn manifest(&self) -> &Manifest {
        match self {
            Self::Bundle(bundle) => bundle.manifest(),
            Self::Restored(restoration) => &restoration.manifest,
        }
    }

    fn manifest_bytes(&self) -> &[u8] {
        match self {
            Self::Bundle(bundle) => bundle.manifest_bytes(),
            Self::Restored(restoration) => &restoration.bytes,
        }
    }

    /// Returns what a refusal names, and what its reader can do.
    pub fn words(&self) -> (String, &'static str) {
        match self {
            Self::Bundle(bundle) => (
                bundle.path().display().to_string(),
                "give it another `name` in model.toml, and the cars a directory for it",
            ),
            Self::Restored(_) => (
                "--restore".to_owned(),
                "pack its files again with this change undone, and publish that",
            ),
        }
    }
}

/// The uploads of a publish.
pub struct Uploads<'a> {
    store: &'a dyn Store,
    known: Vec<KnownChunk>,
    /// Chunks that were uploaded.
    pub chunks: u64,
    /// Bytes of the uploaded chunks.
    pub chunk_bytes: u64,
}

impl<'a> Uploads<'a> {
    pub fn new(store: &'a dyn Store) -> Self {
        Self { store, known: Vec::new(), chunks: 0, chunk_bytes: 0 }
    }

    /// Returns the number of chunks that the store had before this publish.
    pub fn chunks_known(&self) -> u64 {
        self.known.len() as u64
    }

    /// Uploads a chunk unless the store has it. A chunk that the store must have is without
    /// `stored` bytes.
    fn take(&mut self, chunk: &Chunk, stored: Option<&[u8]>) -> Result<()> {
        let (path, bytes) = (chunk_path(&chunk.sha256), u64::from(chunk.stored));
        // A power cut may have left a chunk of another size, and a chunk may be damaged later.
        let is_there = match stored {
            Some(stored) => self.store.holds(&path, stored)?,
            None => self.store.bytes(&path)? == Some(bytes),
        };
        if is_there {
            self.known.push(KnownChunk { path, bytes });
            return Ok(());
        }
        let stored = stored.with_context(|| {
            format!("{path}: is missing in the repository; publish the release's bundle again")
        })?;
        self.chunks += 1;
        self.chunk_bytes += bytes;
        self.store.put(&path, stored.to_vec())
    }

    /// Checks that the store still has the known chunks: a prune may have removed some.
    pub fn check_known(&self) -> Result<()> {
        for chunk in &self.known {
            ensure!(
                self.store.bytes(&chunk.path)? == Some(chunk.bytes),
                "nothing was published: {} was removed during the publish, perhaps by a prune; \
                 publish again",
                chunk.path
            );
        }
        Ok(())
    }
}

/// A chunk that the store had before this publish.
struct KnownChunk {
    path: String,
    bytes: u64,
}
