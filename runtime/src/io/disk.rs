//! Files as the runtime sees them: the one seam that all of the flash tier's input and output
//! passes, so that a power cut can be simulated at every write and every sync. [`SystemDisk`] is
//! the system's own.

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

/// A disk.
pub trait Disk: Send + Sync {
    /// Creates an empty file, in place of one that is there.
    ///
    /// # Errors
    /// The system refused; the same holds for every method below.
    fn create(&self, path: &Path) -> io::Result<Box<dyn Output>>;

    /// Cuts a file to its first `bytes` bytes and goes on writing behind them.
    ///
    /// # Errors
    /// As `create`.
    fn append(&self, path: &Path, bytes: u64) -> io::Result<Box<dyn Output>>;

    /// Takes the lock at `path`, held until what is returned is dropped; `None` where another one
    /// has it.
    ///
    /// # Errors
    /// As `create`.
    fn lock(&self, path: &Path) -> io::Result<Option<Lock>>;

    /// Opens a file of pages.
    ///
    /// # Errors
    /// As `create`.
    fn open_pages(&self, path: &Path) -> io::Result<Arc<dyn PageFile>>;

    /// Opens a file to be read in long pieces.
    ///
    /// # Errors
    /// As `create`.
    fn open(&self, path: &Path) -> io::Result<Box<dyn Input>>;

    /// The whole content of a small file.
    ///
    /// # Errors
    /// As `create`.
    fn read(&self, path: &Path) -> io::Result<Vec<u8>>;

    /// Makes `from` stand at `to`, in place of what is there. Durable after `sync_dir`.
    ///
    /// # Errors
    /// As `create`.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// As `create`.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty directory.
    ///
    /// # Errors
    /// As `create`.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;

    /// Creates a directory and those above it, where they are missing.
    ///
    /// # Errors
    /// As `create`.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// The paths of what is in a directory, sorted.
    ///
    /// # Errors
    /// As `create`.
    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>>;

    /// Makes the names created, renamed or removed in a directory durable.
    ///
    /// # Errors
    /// As `create`.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Replaces page `number` of a file and makes it durable.
    ///
    /// # Errors
    /// As `create`.
    fn write_page(&self, path: &Path, number: u32, page: &PageBytes) -> io::Result<()>;

    /// Bytes that can still be written under `path`.
    ///
    /// # Errors
    /// As `create`.
    fn free_bytes(&self, path: &Path) -> io::Result<u64>;
}

/// A lock that is held. A process that ends gives it up, however it ends.
pub type Lock = Box<dyn Send>;

/// A file being read.
pub trait Input: Read + Seek + Send {}

impl<T: Read + Seek + Send> Input for T {}

/// A file being written.
pub trait Output: Write + Send {
    /// Makes everything written durable.
    ///
    /// # Errors
    /// The system refused; nothing written since the last success is sure to be there.
    fn sync(&mut self) -> io::Result<()>;
}

/// The system's files.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemDisk;

/// The system's disk, ready to be shared.
pub fn system() -> Arc<dyn Disk> {
    Arc::new(SystemDisk)
}

/// Flash likes its writes long.
const WRITE_BYTES: usize = 1 << 20;

impl Output for BufWriter<File> {
    fn sync(&mut self) -> io::Result<()> {
        self.flush()?;
        self.get_ref().sync_all()
    }
}

/// A file opened past the page cache where the file system allows it: the embedding cache is the
/// row cache, and a page of cold rows would only push out something useful.
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
            // Some file systems (tmpfs) have no direct reads.
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
