//! The seam through which the flash tier reads and writes files. [`SystemDisk`] is the system's own
//! implementation. A simulation implements [`Disk`] to cut the power at every write and every sync.
//! Never interprets what it reads or writes.

use crate::io::page::{AlignedPage, PageBytes};
use crate::io::reader::{PageFile, read_at};
use crate::limits::PAGE_BYTES;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Pause between two attempts to take a lock.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// Files and directories. Every method returns the system's error if the system refuses.
pub trait Disk: Send + Sync {
    /// Creates an empty file, or empties an existing one.
    ///
    /// # Errors
    /// The system refused.
    fn create(&self, path: &Path) -> io::Result<Box<dyn Output>>;

    /// Cuts a file to its first `bytes` bytes and opens it to write after them.
    ///
    /// # Errors
    /// The system refused.
    fn append(&self, path: &Path, bytes: u64) -> io::Result<Box<dyn Output>>;

    /// Takes the lock at `path` and holds it until the result is dropped. Returns `None` if another
    /// holder has the lock.
    ///
    /// # Errors
    /// The system refused.
    fn lock(&self, path: &Path) -> io::Result<Option<Lock>>;

    /// Takes the lock at `path` as [`Disk::lock`] does, and waits up to `time` for its holder.
    ///
    /// # Errors
    /// The system refused.
    fn lock_within(&self, path: &Path, time: Duration) -> io::Result<Option<Lock>> {
        let mut waited = Duration::ZERO;
        loop {
            let lock = self.lock(path)?;
            if lock.is_some() || waited >= time {
                return Ok(lock);
            }
            std::thread::sleep(LOCK_PAUSE);
            waited += LOCK_PAUSE;
        }
    }

    /// Opens a file of pages.
    ///
    /// # Errors
    /// The system refused.
    fn open_pages(&self, path: &Path) -> io::Result<Arc<dyn PageFile>>;

    /// Opens a file for long sequential reads.
    ///
    /// # Errors
    /// The system refused.
    fn open(&self, path: &Path) -> io::Result<Box<dyn Input>>;

    /// Returns the whole content of a small file.
    ///
    /// # Errors
    /// The system refused.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;

    /// Renames `from` to `to` and replaces an existing file. The rename is durable after
    /// `sync_dir`.
    ///
    /// # Errors
    /// The system refused.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// The system refused.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty directory.
    ///
    /// # Errors
    /// The system refused.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;

    /// Creates a directory and its missing parents.
    ///
    /// # Errors
    /// The system refused.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// Returns the paths of the entries of a directory, sorted.
    ///
    /// # Errors
    /// The system refused.
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>>;

    /// Makes all creations, renames and removals in a directory durable.
    ///
    /// # Errors
    /// The system refused.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Replaces page `number` of a file and makes it durable.
    ///
    /// # Errors
    /// The system refused.
    fn write_page(&self, path: &Path, number: u32, page: &PageBytes) -> io::Result<()>;

    /// Returns the free bytes of the file system at `path`.
    ///
    /// # Errors
    /// The system refused.
    fn free_bytes(&self, path: &Path) -> io::Result<u64>;
}

/// A held lock. The system releases the lock when the process ends, even after a crash.
pub type Lock = Box<dyn Send>;

/// A file open for reading.
pub trait Input: Read + Seek + Send {}

impl<T: Read + Seek + Send> Input for T {}

/// A file open for writing.
pub trait Output: Write + Send {
    /// Makes everything written durable.
    ///
    /// # Errors
    /// The system refused. Bytes written since the last successful sync may be lost.
    fn sync(&mut self) -> io::Result<()>;
}

/// The system's file systems.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemDisk;

/// Returns the system's disk as a shared trait object.
pub fn system() -> Arc<dyn Disk> {
    Arc::new(SystemDisk)
}

/// Bytes of a write buffer. Flash devices are faster with long writes.
const WRITE_BYTES: usize = 1 << 20;

impl Output for BufWriter<File> {
    fn sync(&mut self) -> io::Result<()> {
        self.flush()?;
        self.get_ref().sync_all()
    }
}

/// A file opened with O_DIRECT where the file system allows it. The embedding cache already keeps
/// the hot rows; pages of cold rows would only evict useful pages from the system's page cache.
struct SystemPages(Arc<File>);

impl PageFile for SystemPages {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read_page(&self, number: u32, page: &mut AlignedPage) -> io::Result<()> {
        read_at(&self.0, number, page)
    }

    fn system_file(&self) -> Option<&Arc<File>> {
        Some(&self.0)
    }
}

impl Disk for SystemDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Output>> {
        Ok(Box::new(BufWriter::with_capacity(WRITE_BYTES, File::create(path)?)))
    }

    fn append(&self, path: &Path, bytes: u64) -> io::Result<Box<dyn Output>> {
        let mut file = OpenOptions::new().write(true).open(path)?;
        file.set_len(bytes)?;
        file.seek(SeekFrom::Start(bytes))?;
        Ok(Box::new(BufWriter::with_capacity(WRITE_BYTES, file)))
    }

    fn lock(&self, path: &Path) -> io::Result<Option<Lock>> {
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Box::new(file))),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn open_pages(&self, path: &Path) -> io::Result<Arc<dyn PageFile>> {
        let direct = rustix::fs::OFlags::DIRECT.bits() as i32;
        let file = match OpenOptions::new().read(true).custom_flags(direct).open(path) {
            // Some file systems (tmpfs) refuse O_DIRECT.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => File::open(path)?,
            opened => opened?,
        };
        Ok(Arc::new(SystemPages(Arc::new(file))))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Input>> {
        Ok(Box::new(File::open(path)?))
    }

    fn read(&self, path: &Path) -> io::Result<Vec<u8>> {
        fs::read(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        let mut paths =
            fs::read_dir(path)?.map(|e| Ok(e?.path())).collect::<io::Result<Vec<_>>>()?;
        paths.sort();
        Ok(paths)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn write_page(&self, path: &Path, number: u32, page: &PageBytes) -> io::Result<()> {
        let file = OpenOptions::new().write(true).open(path)?;
        file.write_all_at(page, u64::from(number) * PAGE_BYTES as u64)?;
        file.sync_all()
    }

    fn free_bytes(&self, path: &Path) -> io::Result<u64> {
        let space = rustix::fs::statvfs(path)?;
        Ok(space.f_bavail.saturating_mul(space.f_frsize))
    }
}
