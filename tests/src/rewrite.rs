//! Takes bundles and segments apart and assembles them with valid hashes and checksums, so that an
//! attack reaches the code after those checks. Shares the manifest's types with the product and
//! states the rest of both formats itself.

use hatchback::bundle::manifest::{Blob, Chunk, Manifest, sha256};
use hatchback::io::page::PageBytes;
use hatchback::limits::{CHUNK_BYTES, PAGE_BYTES};
use hatchback::unmix;
use std::path::Path;

/// Bytes of a bundle before its first chunk.
pub const HEADER_BYTES: usize = 16;
/// Bytes of a bundle after its manifest: the manifest's place, length and hash, and a magic.
pub const TRAILER_BYTES: usize = 56;

/// A bundle in pieces.
#[derive(Clone, Debug)]
pub struct Parts {
    /// The first bytes.
    pub header: Vec<u8>,
    /// The stored bytes of every chunk, blob by blob.
    pub stored: Vec<Vec<Vec<u8>>>,
    /// The manifest.
    pub manifest: Manifest,
}

fn number(bytes: &[u8]) -> Option<usize> {
    bytes.first_chunk().map(|b| u64::from_le_bytes(*b) as usize)
}

impl Parts {
    /// Takes the bundle at `path` apart.
    pub fn read(path: &Path) -> Self {
        Self::parse(&std::fs::read(path).unwrap()).expect("a whole bundle")
    }

    /// Takes a bundle apart if its manifest is valid. Checks no hash.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let trailer = bytes.len().checked_sub(TRAILER_BYTES)?;
        let at = number(&bytes[trailer..])?;
        let encoded = bytes.get(at..trailer)?;
        let manifest = Manifest::decode(encoded).ok()?;
        let (mut next, mut stored) = (HEADER_BYTES, Vec::new());
        for blob in &manifest.blobs {
            let mut chunks = Vec::new();
            for chunk in &blob.chunks {
                let end = next.checked_add(chunk.stored as usize)?;
                chunks.push(bytes.get(next..end)?.to_vec());
                next = end;
            }
            stored.push(chunks);
        }
        Some(Self { header: bytes.get(..HEADER_BYTES)?.to_vec(), stored, manifest })
    }

    /// Returns the content of blob `b`.
    pub fn content(&self, b: u32) -> Vec<u8> {
        let (blob, stored) = (&self.manifest.blobs[b as usize], &self.stored[b as usize]);
        let raw = |(chunk, stored): (&Chunk, &Vec<u8>)| match chunk.stored == chunk.raw {
            true => stored.clone(),
            false => zstd::bulk::decompress(stored, chunk.raw as usize).unwrap(),
        };
        blob.chunks.iter().zip(stored).flat_map(raw).collect()
    }

    /// Replaces the content of blob `b`, without compression.
    pub fn set_content(&mut self, b: u32, content: &[u8]) {
        let pieces: Vec<Vec<u8>> = content.chunks(CHUNK_BYTES).map(<[u8]>::to_vec).collect();
        let chunk =
            |p: &Vec<u8>| Chunk { stored: p.len() as u32, raw: p.len() as u32, sha256: [0; 32] };
        self.manifest.blobs[b as usize] =
            Blob { sha256: sha256(content), chunks: pieces.iter().map(chunk).collect() };
        self.stored[b as usize] = pieces;
    }

    /// Rewrites the segment of table `t`.
    pub fn edit_segment(&mut self, t: usize, edit: impl FnOnce(&mut Vec<PageBytes>)) {
        let blob = self.manifest.tables[t].segment;
        let mut pages = pages_of(&self.content(blob));
        edit(&mut pages);
        self.set_content(blob, &pages.concat());
    }

    /// Corrects every chunk's hash and stored length.
    pub fn rehash(&mut self) {
        for (blob, stored) in self.manifest.blobs.iter_mut().zip(&self.stored) {
            for (chunk, stored) in blob.chunks.iter_mut().zip(stored) {
                (chunk.stored, chunk.sha256) = (stored.len() as u32, sha256(stored));
            }
        }
    }

    /// Returns the bundle with every hash valid.
    pub fn bytes(mut self) -> Vec<u8> {
        self.rehash();
        let manifest = self.manifest.encode().unwrap();
        self.bytes_with(&manifest)
    }

    /// Returns a bundle of the unchanged chunks, `manifest`, and the trailer of `manifest`.
    pub fn bytes_with(&self, manifest: &[u8]) -> Vec<u8> {
        let mut out = self.header.clone();
        self.stored.iter().flatten().for_each(|chunk| out.extend_from_slice(chunk));
        let at = out.len() as u64;
        out.extend_from_slice(manifest);
        out.extend(at.to_le_bytes());
        out.extend((manifest.len() as u64).to_le_bytes());
        out.extend(sha256(manifest));
        out.extend(b"HATCHEND");
        out
    }
}

/// Returns the whole pages of a segment.
pub fn pages_of(segment: &[u8]) -> Vec<PageBytes> {
    segment.as_chunks::<PAGE_BYTES>().0.to_vec()
}

/// Returns the kind that a page claims: 1 index rows, 2 hashed rows, 3 fences, 4 trailer.
pub fn kind(page: &PageBytes) -> u16 {
    u16::from_le_bytes([page[14], page[15]])
}

/// Returns the number of entries that a page claims.
pub fn count(page: &PageBytes) -> usize {
    usize::from(u16::from_le_bytes([page[12], page[13]]))
}

/// Makes a page's checksum valid.
pub fn reseal(page: &mut PageBytes) {
    let checksum = crc32c::crc32c(&page[4..]);
    page[..4].copy_from_slice(&checksum.to_le_bytes());
}

/// Numbers every page by its place, writes these counts to the trailer and makes the checksums
/// valid.
pub fn renumber(pages: &mut [PageBytes], data_pages: u32, fence_pages: u32) {
    for (number, page) in pages.iter_mut().enumerate() {
        page[8..12].copy_from_slice(&(number as u32).to_le_bytes());
        if kind(page) == 4 {
            page[48..52].copy_from_slice(&data_pages.to_le_bytes());
            page[52..56].copy_from_slice(&fence_pages.to_le_bytes());
        }
        reseal(page);
    }
}

/// Returns the keys with rows on data page `number` of a segment.
pub fn keys_on(pages: &[PageBytes], number: usize) -> Vec<u64> {
    let page = &pages[number];
    let word = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().unwrap());
    if kind(page) == 2 {
        return (0..count(page)).map(|i| unmix(word(16 + 8 * i))).collect();
    }
    // All pages of rows but the last are full.
    let per_page = count(&pages[0]) as u64;
    (0..count(page) as u64).map(|i| number as u64 * per_page + i).collect()
}
