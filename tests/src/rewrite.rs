//! Takes bundles and segments apart and puts them together again with valid hashes and checksums,
//! so that an attack reaches what lies behind them. Shares the manifest's types with the product,
//! states the rest of both formats itself.

use hatchback::bundle::manifest::{Blob, Chunk, Manifest, sha256};
use hatchback::io::page::PageBytes;
use hatchback::limits::{CHUNK_BYTES, PAGE_BYTES};
use hatchback::unmix;
use std::path::Path;

/// Bytes of a bundle before its first chunk.
pub const HEADER_BYTES: usize = 16;
/// Bytes of a bundle after its manifest: where it is, its length, its hash, a magic.
pub const TRAILER_BYTES: usize = 56;

/// A bundle in pieces.
#[derive(Clone, Debug)]
pub struct Parts {
    /// The first bytes.
    pub header: Vec<u8>,
    /// Every chunk as it is stored, blob by blob.
    pub stored: Vec<Vec<Vec<u8>>>,
    /// The manifest, not checked.
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

    /// Takes a bundle apart as far as its trailer and its manifest can be read; no hash is looked
    /// at.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let trailer = bytes.len().checked_sub(TRAILER_BYTES)?;
        let at = number(&bytes[trailer..])?;
        let encoded = bytes.get(at..trailer)?;
        let (manifest, _) = postcard::take_from_bytes::<Manifest>(encoded.get(4..)?).ok()?;
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

    /// The content of blob `b`.
    pub fn content(&self, b: u32) -> Vec<u8> {
        let (blob, stored) = (&self.manifest.blobs[b as usize], &self.stored[b as usize]);
        let raw = |(chunk, stored): (&Chunk, &Vec<u8>)| match chunk.stored == chunk.raw {
            true => stored.clone(),
            false => zstd::bulk::decompress(stored, chunk.raw as usize).unwrap(),
        };
        blob.chunks.iter().zip(stored).flat_map(raw).collect()
    }

    /// Replaces the content of blob `b`; it is stored as it is.
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

    /// Makes every chunk's hash and stored length what they are.
    pub fn rehash(&mut self) {
        for (blob, stored) in self.manifest.blobs.iter_mut().zip(&self.stored) {
            for (chunk, stored) in blob.chunks.iter_mut().zip(stored) {
                (chunk.stored, chunk.sha256) = (stored.len() as u32, sha256(stored));
            }
        }
    }

    /// The bundle with every hash valid.
    pub fn bytes(mut self) -> Vec<u8> {
        self.rehash();
        let manifest = self.manifest.encode().unwrap();
        self.bytes_with(&manifest)
    }

    /// The chunks as they are, this manifest, and a trailer that fits it.
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

/// The whole pages of a segment.
pub fn pages_of(segment: &[u8]) -> Vec<PageBytes> {
    segment.as_chunks::<PAGE_BYTES>().0.to_vec()
}

/// What a page says it holds: 1 rows by position, 2 rows by hash, 3 fences, 4 the trailer.
pub fn kind(page: &PageBytes) -> u16 {
    u16::from_le_bytes([page[14], page[15]])
}

/// Entries that a page says it has.
pub fn count(page: &PageBytes) -> usize {
    usize::from(u16::from_le_bytes([page[12], page[13]]))
}

/// Makes a page's checksum valid.
pub fn reseal(page: &mut PageBytes) {
    let checksum = crc32c::crc32c(&page[4..]);
    page[..4].copy_from_slice(&checksum.to_le_bytes());
}

/// Gives every page the number of its place and a valid checksum, and the trailer these counts.
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

/// The keys whose rows lie on data page `number` of a segment.
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
