//! Staging: a release's chunks, fetched one by one, become its bundle beside the live generation.
//! What has arrived is proved again after every start and never fetched twice; a power cut costs no
//! more than one chunk's bytes. Nothing is parsed or decompressed before its hash was signed for.

use crate::bundle::manifest::{Chunk, Manifest, sha256};
use crate::bundle::{BundleError, BundleReader, HEADER_BYTES, header, trailer};
use crate::io::atomic_write::{self, part_of};
use crate::io::disk::{Disk, Output};
use crate::limits::{CHUNK_BYTES, MANIFEST_BYTES_MAX};
use crate::update::error::{UpdateError, io_error};
use crate::update::link::Fetcher;
use crate::update::release::{Release, chunk_path, hex, manifest_path, target_name};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Space left alone: for records and the file system's own needs.
const SPARE_BYTES: u64 = 1 << 20;

/// The folder in which releases are put together.
pub struct Staging<'a> {
    disk: &'a dyn Disk,
    directory: &'a Path,
}

impl<'a> Staging<'a> {
    /// The folder `directory`, made if it is missing.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn open(disk: &'a dyn Disk, directory: &'a Path) -> Result<Self, UpdateError> {
        disk.create_dir(directory).map_err(io_error(directory))?;
        Ok(Self { disk, directory })
    }

    fn file(&self, release: &Release, kind: &str) -> PathBuf {
        self.directory.join(format!("{}.{kind}", hex(&release.manifest)))
    }

    /// Where the finished bundle of `release` stands.
    pub fn bundle(&self, release: &Release) -> PathBuf {
        self.file(release, "hatch")
    }

    /// Whether `release` was found to be wrong itself: it is not fetched again.
    pub fn is_refused(&self, release: &Release) -> bool {
        self.disk.read(&self.file(release, "refused")).is_ok()
    }

    /// Remembers that `release` is wrong and why, and drops its bundle.
    ///
    /// # Errors
    /// The mark cannot be written.
    pub fn refuse(&self, release: &Release, why: &str) -> Result<(), UpdateError> {
        let path = self.file(release, "refused");
        atomic_write::replace(self.disk, &path, why.as_bytes()).map_err(io_error(&path))
    }

    /// Whether the finished bundle is what was signed, chunk by chunk.
    pub fn is_sound(&self, release: &Release) -> bool {
        let proved =
            BundleReader::open_on(self.disk, &self.bundle(release)).and_then(|mut bundle| {
                let ours = sha256(bundle.manifest_bytes()) == release.manifest;
                bundle.each_stored(|_, _| Ok::<(), BundleError>(()))?;
                Ok(ours)
            });
        proved.unwrap_or(false)
    }

    /// Drops the finished bundle of `release`, if it is there.
    ///
    /// # Errors
    /// It cannot be removed.
    pub fn drop_bundle(&self, release: &Release) -> Result<(), UpdateError> {
        let path = self.bundle(release);
        match self.disk.remove_file(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(io_error(&path)),
        }
    }

    /// Removes all but what belongs to the releases `in_hand`, and the marks against those
    /// `listed`. What cannot be removed costs space: it is reported and left.
    pub fn reclaim<'r>(&self, listed: &[Release], in_hand: impl Iterator<Item = &'r Release>) {
        let in_hand: Vec<String> = in_hand.map(|r| hex(&r.manifest)).collect();
        let marks: Vec<PathBuf> = listed.iter().map(|r| self.file(r, "refused")).collect();
        for file in self.disk.list(self.directory).unwrap_or_default() {
            let name =
                file.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            if marks.contains(&file) || in_hand.iter().any(|hash| name.starts_with(hash.as_str())) {
                continue;
            }
            if let Err(e) = self.disk.remove_file(&file) {
                log::warn!("{}: not reclaimed: {e}", file.display());
            }
        }
    }

    /// Makes the bundle of `release` stand in the folder. Before each chunk, `progress` is told the
    /// bytes of chunks that are there and the bytes that `fetcher` will have received behind it,
    /// and may end the run.
    ///
    /// # Errors
    /// Something does not arrive, is not what was signed, or there is no room; or `progress`'s.
    /// What arrived is kept.
    pub fn stage(
        &self,
        release: &Release,
        fetcher: &mut Fetcher<'_>,
        mut progress: impl FnMut(u64, u64) -> Result<(), UpdateError>,
    ) -> Result<PathBuf, UpdateError> {
        let path = self.bundle(release);
        if self.disk.open(&path).is_ok() {
            return Ok(path);
        }
        let (manifest_bytes, manifest) = self.manifest(release, fetcher)?;
        let chunks: Vec<&Chunk> = manifest.blobs.iter().flat_map(|b| &b.chunks).collect();
        let (taken, mut at) = self.resume(&path, &chunks);
        let missing: u64 = chunks[taken..].iter().map(|c| u64::from(c.stored)).sum();
        self.check_space(missing.saturating_add(manifest_bytes.len() as u64))?;
        let part = part_of(&path);
        let mut out = match taken {
            0 => self.disk.create(&part).and_then(|mut out| out.write_all(&header()).map(|()| out)),
            _ => self.disk.append(&part, at),
        }
        .map_err(io_error(&part))?;
        at = at.max(header().len() as u64);
        let mut unsynced = 0;
        for (n, chunk) in chunks[taken..].iter().enumerate() {
            // However small the budget, and late the hour, a run that can fetch at all brings one
            // chunk.
            let within = if n == 0 { Ok(()) } else { fetcher.check_limits() };
            let begun =
                within.and_then(|()| progress(at, fetcher.bytes() + u64::from(chunk.stored)));
            let fetched = begun.and_then(|()| fetch_chunk(chunk, fetcher));
            let Ok(stored) = fetched else {
                out.sync().map_err(io_error(&part))?;
                return fetched.map(|_| path);
            };
            out.write_all(&stored).map_err(io_error(&part))?;
            (at, unsynced) = (at + stored.len() as u64, unsynced + stored.len());
            if unsynced >= CHUNK_BYTES {
                out.sync().map_err(io_error(&part))?;
                unsynced = 0;
            }
        }
        progress(at, fetcher.bytes())?;
        self.finish(&path, out, at, &manifest_bytes)
    }

    fn finish(
        &self,
        path: &Path,
        mut out: Box<dyn Output>,
        at: u64,
        manifest: &[u8],
    ) -> Result<PathBuf, UpdateError> {
        let ended = out.write_all(manifest).and_then(|()| out.write_all(&trailer(at, manifest)));
        ended.and_then(|()| atomic_write::publish(self.disk, path, out)).map_err(io_error(path))?;
        Ok(path.to_owned())
    }

    /// The manifest of `release`, from an earlier attempt or fetched.
    fn manifest(
        &self,
        release: &Release,
        fetcher: &mut Fetcher<'_>,
    ) -> Result<(Vec<u8>, Manifest), UpdateError> {
        let name = target_name(&release.generation, release.parent);
        let path = self.file(release, "manifest");
        let kept = self.disk.read(&path).ok().filter(|bytes| sha256(bytes) == release.manifest);
        let bytes = match kept {
            Some(bytes) => bytes,
            None => {
                let from = manifest_path(&name, &release.manifest);
                let bytes =
                    fetcher.get(&from, release.manifest_bytes.min(MANIFEST_BYTES_MAX as u64))?;
                if sha256(&bytes) != release.manifest {
                    return Err(UpdateError::ArbitrarySoftware { path: from });
                }
                atomic_write::replace(self.disk, &path, &bytes).map_err(io_error(&path))?;
                bytes
            }
        };
        let manifest = Manifest::decode(&bytes)
            .map_err(|source| UpdateError::Manifest { name: name.clone(), source })?;
        let wrong =
            |field, problem| Err(UpdateError::Release { name: name.clone(), field, problem });
        if manifest.generation != release.generation {
            return wrong("generation", format!("the manifest says {}", manifest.generation));
        }
        if manifest.parent != release.parent {
            return wrong("parent", format!("the manifest says {:?}", manifest.parent));
        }
        Ok((bytes, manifest))
    }

    /// How many chunks of an earlier attempt are whole, and how many bytes they take with the
    /// header.
    fn resume(&self, path: &Path, chunks: &[&Chunk]) -> (usize, u64) {
        let Ok(mut part) = self.disk.open(&part_of(path)) else { return (0, 0) };
        let mut start = [0; HEADER_BYTES as usize];
        if part.read_exact(&mut start).is_err() || start != header() {
            return (0, 0);
        }
        let (mut at, mut stored) = (start.len() as u64, Vec::with_capacity(CHUNK_BYTES));
        for (taken, chunk) in chunks.iter().enumerate() {
            stored.resize(chunk.stored as usize, 0);
            if part.read_exact(&mut stored).is_err() || sha256(&stored) != chunk.sha256 {
                return (taken, if taken == 0 { 0 } else { at });
            }
            at += u64::from(chunk.stored);
        }
        (chunks.len(), at)
    }

    fn check_space(&self, bytes: u64) -> Result<(), UpdateError> {
        let needed = bytes.saturating_add(SPARE_BYTES);
        let free = self.disk.free_bytes(self.directory).map_err(io_error(self.directory))?;
        if needed <= free {
            return Ok(());
        }
        Err(UpdateError::Space { path: self.directory.to_owned(), needed, free })
    }
}

fn fetch_chunk(chunk: &Chunk, fetcher: &mut Fetcher<'_>) -> Result<Vec<u8>, UpdateError> {
    let path = chunk_path(&chunk.sha256);
    let stored = fetcher.get(&path, u64::from(chunk.stored))?;
    if stored.len() != chunk.stored as usize || sha256(&stored) != chunk.sha256 {
        return Err(UpdateError::ArbitrarySoftware { path });
    }
    Ok(stored)
}
