//! Staging: fetches a release's chunks one by one and builds the release's bundle beside the live
//! generation. After a restart it verifies the stored chunks again; a power cut loses at most one
//! chunk's bytes. It never parses or decompresses content before a signed hash verifies it.

use crate::bundle::manifest::{Chunk, Manifest, hex, sha256};
use crate::bundle::{BundleError, BundleReader, HEADER_BYTES, header, trailer};
use crate::flash::{Flash, check_space};
use crate::io::atomic_write::{self, part_of};
use crate::io::disk::{Disk, Output};
use crate::limits::{CHUNK_BYTES, MANIFEST_BYTES_MAX};
use crate::update::error::{UpdateError, io_error};
use crate::update::link::Fetcher;
use crate::update::on_flash::OnFlash;
use crate::update::release::{Release, chunk_path, manifest_path};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The folder in which bundles are staged.
pub struct Staging<'a> {
    disk: &'a dyn Disk,
    directory: &'a Path,
    /// The live generation, which may have chunks of a restored release.
    live: Option<Flash>,
}

/// The part of a bundle that an earlier attempt left: whole chunks, and the bytes of these chunks
/// and the header. Without a whole chunk it has 0 bytes.
#[derive(Clone, Copy, Default)]
struct Stored {
    chunks: usize,
    bytes: u64,
}

impl<'a> Staging<'a> {
    /// Opens the folder `directory` and creates it if it is missing.
    ///
    /// # Errors
    /// `UpdateError::Io` if the folder cannot be created.
    pub fn open(disk: &'a dyn Disk, directory: &'a Path) -> Result<Self, UpdateError> {
        disk.create_dir(directory).map_err(io_error(directory))?;
        Ok(Self { disk, directory, live: None })
    }

    /// Takes chunks of a restored release from the generation `live` if it has them.
    pub(super) fn beside(self, live: Option<Flash>) -> Self {
        Self { live, ..self }
    }

    fn file(&self, release: &Release, kind: &str) -> PathBuf {
        self.directory.join(format!("{}.{kind}", hex(&release.manifest)))
    }

    /// Returns the path of the complete bundle of `release`.
    pub fn bundle(&self, release: &Release) -> PathBuf {
        Self::bundle_in(self.directory, release)
    }

    /// Returns the path of the complete bundle of `release` in the folder `directory`.
    pub(super) fn bundle_in(directory: &Path, release: &Release) -> PathBuf {
        directory.join(format!("{}.hatch", hex(&release.manifest)))
    }

    /// Returns whether a part of the bundle of `release` is there.
    pub(super) fn has_part(&self, release: &Release) -> bool {
        self.disk.open(&part_of(&self.bundle(release))).is_ok()
    }

    /// Returns whether the complete bundle of `release` has the signed manifest and its chunks.
    pub fn is_sound(&self, release: &Release) -> bool {
        let verified =
            BundleReader::open_on(self.disk, &self.bundle(release)).and_then(|mut bundle| {
                let is_signed = sha256(bundle.manifest_bytes()) == release.manifest;
                bundle.each_stored(|_, _| Ok::<(), BundleError>(()))?;
                Ok(is_signed)
            });
        verified.unwrap_or(false)
    }

    /// Removes the complete bundle of `release` if it exists.
    ///
    /// # Errors
    /// `UpdateError::Io` if the file cannot be removed.
    pub fn drop_bundle(&self, release: &Release) -> Result<(), UpdateError> {
        let path = self.bundle(release);
        match self.disk.remove_file(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(io_error(&path)),
        }
    }

    /// Removes every file except those of the releases `in_hand`, which are still needed. Logs a
    /// file that cannot be removed and leaves it.
    pub fn reclaim<'r>(&self, in_hand: impl Iterator<Item = &'r Release>) {
        let in_hand: Vec<String> = in_hand.map(|r| hex(&r.manifest)).collect();

        for file in self.disk.list(self.directory).unwrap_or_default() {
            let name =
                file.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            if in_hand.iter().any(|hash| name.starts_with(hash.as_str())) {
                continue;
            }
            if let Err(e) = self.disk.remove_file(&file) {
                log::warn!(
                    "{}: this staged file is no longer needed and cannot be removed: {e}",
                    file.display()
                );
            }
        }
    }

    /// Fetches the missing part of the bundle of `release` and returns the path of the complete
    /// bundle. Before each chunk, `progress` receives the staged bytes and the bytes that `fetcher`
    /// will have received after that chunk. An error of `progress` ends the run.
    ///
    /// # Errors
    /// [`UpdateError`] if a chunk does not arrive or does not match its hash, the space is too
    /// small, or `progress` failed. Chunks that arrived stay on disk.
    pub fn stage(
        &self,
        release: &Release,
        fetcher: &mut Fetcher<'_>,
        mut progress: impl FnMut(u64, u64) -> Result<(), UpdateError>,
    ) -> Result<PathBuf, UpdateError> {
        let path = self.bundle(release);
        if self.is_sound(release) {
            return Ok(path);
        }
        // A bundle that is not sound was damaged after it was complete. Its space is needed for the
        // new one.
        self.drop_bundle(release)?;

        let (manifest_bytes, manifest) = self.manifest(release, fetcher)?;
        let live = self.live.as_ref();
        let on_flash = live.map(|live| OnFlash::find(live, &manifest)).unwrap_or_default();
        let chunks: Vec<&Chunk> = manifest.blobs.iter().flat_map(|b| &b.chunks).collect();
        let stored = self.stored(&path, &chunks);
        let missing: u64 = chunks[stored.chunks..].iter().map(|c| u64::from(c.stored)).sum();
        let needed = missing.saturating_add(manifest_bytes.len() as u64);
        check_space(self.disk, self.directory, needed)?;

        let part = part_of(&path);
        let mut out = self.open_part(&part, stored).map_err(io_error(&part))?;
        let mut at = stored.bytes.max(HEADER_BYTES);
        let end = at + missing;
        let mut unsynced = 0;

        for (n, chunk) in chunks[stored.chunks..].iter().enumerate() {
            let fetched = match on_flash.chunk(chunk) {
                Some(content) => progress(at, fetcher.bytes()).map(|()| content),
                None => {
                    // Every run fetches at least one chunk, even with a small budget or late in the
                    // hours.
                    let allowed = if n == 0 { Ok(()) } else { fetcher.check_limits() };
                    let received = fetcher.bytes() + u64::from(chunk.stored);
                    allowed
                        .and_then(|()| progress(at, received))
                        .and_then(|()| fetch_chunk(chunk, fetcher))
                }
            };
            let Ok(content) = fetched else {
                // The chunks that arrived must survive: the next run continues after them.
                out.sync().map_err(io_error(&part))?;
                return fetched.map(|_| path);
            };

            out.write_all(&content).map_err(io_error(&part))?;
            (at, unsynced) = (at + content.len() as u64, unsynced + content.len());
            if unsynced >= CHUNK_BYTES {
                out.sync().map_err(io_error(&part))?;
                unsynced = 0;
            }
        }

        assert_eq!(at, end, "a staged bundle holds every chunk of its manifest once");
        progress(at, fetcher.bytes())?;
        self.finish(&path, out, at, &manifest_bytes)
    }

    /// Opens the part file to append after the `stored` chunks, or creates it with its header.
    fn open_part(&self, part: &Path, stored: Stored) -> io::Result<Box<dyn Output>> {
        if stored.chunks > 0 {
            // This cuts off the rest of a chunk that arrived in part: only a whole chunk has a
            // hash.
            return self.disk.append(part, stored.bytes);
        }
        let mut out = self.disk.create(part)?;
        out.write_all(&header())?;
        // Syncs of the chunks would be lost with the name of the file.
        self.disk.sync_dir(self.directory)?;
        Ok(out)
    }

    fn finish(
        &self,
        path: &Path,
        mut out: Box<dyn Output>,
        at: u64,
        manifest: &[u8],
    ) -> Result<PathBuf, UpdateError> {
        let ended = out.write_all(manifest).and_then(|()| out.write_all(&trailer(at, manifest)));
        ended
            .and_then(|()| atomic_write::rename_into_place(self.disk, path, out))
            .map_err(io_error(path))?;
        Ok(path.to_owned())
    }

    /// Returns the manifest of `release`, encoded and decoded. Fetches it if it is not staged.
    ///
    /// # Errors
    /// [`UpdateError`] if it does not arrive or is not that of the release.
    pub(super) fn manifest(
        &self,
        release: &Release,
        fetcher: &mut Fetcher<'_>,
    ) -> Result<(Vec<u8>, Manifest), UpdateError> {
        let name = release.name();
        let bytes = self.manifest_bytes(release, &name, fetcher)?;
        let manifest = Manifest::decode(&bytes)
            .map_err(|source| UpdateError::Manifest { name: name.clone(), source })?;

        let differs =
            |field, problem| Err(UpdateError::ReleaseField { name: name.clone(), field, problem });
        if manifest.generation != release.generation {
            return differs("generation", format!("the manifest has {}", manifest.generation));
        }
        if manifest.parent != release.parent {
            return differs("parent", format!("the manifest has {:?}", manifest.parent));
        }
        Ok((bytes, manifest))
    }

    /// Returns the encoded manifest of `release`: from an earlier attempt, or fetched and stored.
    fn manifest_bytes(
        &self,
        release: &Release,
        name: &str,
        fetcher: &mut Fetcher<'_>,
    ) -> Result<Vec<u8>, UpdateError> {
        let path = self.file(release, "manifest");
        let stored = self.disk.read(&path, MANIFEST_BYTES_MAX as u64).ok();
        let stored = stored.filter(|bytes| sha256(bytes) == release.manifest);
        if let Some(bytes) = stored {
            return Ok(bytes);
        }

        let from = manifest_path(name, &release.manifest);
        // The signed length may be larger than what this car can decode.
        let bytes = fetcher.get(&from, release.manifest_bytes.min(MANIFEST_BYTES_MAX as u64))?;
        if sha256(&bytes) != release.manifest {
            return Err(fetcher.not_signed(&from, &bytes));
        }
        atomic_write::replace(self.disk, &path, &bytes).map_err(io_error(&path))?;
        Ok(bytes)
    }

    /// Returns the whole chunks that an earlier attempt left in the part file of `path`.
    fn stored(&self, path: &Path, chunks: &[&Chunk]) -> Stored {
        let Ok(mut part) = self.disk.open(&part_of(path)) else { return Stored::default() };
        let mut start = [0; HEADER_BYTES as usize];
        if part.read_exact(&mut start).is_err() || start != header() {
            return Stored::default();
        }

        let mut stored = Stored::default();
        let mut content = Vec::with_capacity(CHUNK_BYTES);
        for chunk in chunks {
            content.resize(chunk.stored as usize, 0);
            // The file is continued at its end only, so the chunks after a damaged one are fetched
            // again.
            if part.read_exact(&mut content).is_err() || sha256(&content) != chunk.sha256 {
                break;
            }
            stored.chunks += 1;
            stored.bytes = stored.bytes.max(HEADER_BYTES) + u64::from(chunk.stored);
        }
        stored
    }
}

fn fetch_chunk(chunk: &Chunk, fetcher: &mut Fetcher<'_>) -> Result<Vec<u8>, UpdateError> {
    let path = chunk_path(&chunk.sha256);
    let stored = fetcher.get_whole(&path, u64::from(chunk.stored))?;
    // The length is not redundant: a manifest may list a wrong one beside a right hash, and offsets
    // follow the length.
    if stored.len() != chunk.stored as usize || sha256(&stored) != chunk.sha256 {
        return Err(fetcher.not_signed(&path, &stored));
    }
    Ok(stored)
}
