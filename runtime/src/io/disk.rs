//! The trait through which the flash tier and the updates read and write files. [`SystemDisk`]
//! implements it with the system's files. A simulation implements [`Disk`] to cut the power at
//! every write and every sync. `SystemDisk` opens regular files only and follows no link in the
//! last component of a path. A FIFO can therefore not block it, and a link cannot redirect it.

use crate::io::page::{AlignedPage, PageBytes};
use crate::io::reader::{PageFile, ReadMethod, read_at};
use crate::limits::PAGE_BYTES;
use rustix::fs::{Advice, FlockOperation, OFlags, fadvise, flock};
use rustix::io::{Errno, preadv};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, BufWriter, IoSliceMut, Read, Seek, SeekFrom, Write};
use std::num::NonZeroU64;
use std::os::unix::fs::{
    DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown,
};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pause between two attempts to take a lock.
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// The rights of group and others to read a file.
const OTHERS_READ: u32 = 0o044;

/// Files and directories. Every method returns the system's error if the system refuses.
pub trait Disk: Send + Sync {
    /// Creates an empty file in place of whatever is at `path`. A reader of the old file keeps its
    /// content.
    ///
    /// # Errors
    /// The system refused.
    fn create(&self, path: &Path) -> io::Result<Box<dyn Output>>;

    /// Truncates a file to its first `bytes` bytes and opens it to write after them.
    ///
    /// # Errors
    /// The system refused.
    fn append(&self, path: &Path, bytes: u64) -> io::Result<Box<dyn Output>>;

    /// Takes the lock at `path` and holds it until the result is dropped. If another process holds
    /// the lock for longer than `wait`, returns `None`.
    ///
    /// # Errors
    /// The system refused.
    fn lock(&self, path: &Path, wait: Duration) -> io::Result<Option<Lock>>;

    /// Opens a file of pages.
    ///
    /// # Errors
    /// The system refused.
    fn open_pages(&self, path: &Path) -> io::Result<Arc<dyn PageFile>>;

    /// Returns how requests read the files of `open_pages`.
    fn read_method(&self) -> ReadMethod;

    /// Opens a file for long sequential reads.
    ///
    /// # Errors
    /// The system refused.
    fn open(&self, path: &Path) -> io::Result<Box<dyn Input>>;

    /// Returns the whole content of a file of at most `bytes_max` bytes.
    ///
    /// # Errors
    /// The system refused, or the file is longer.
    fn read(&self, path: &Path, bytes_max: u64) -> io::Result<Vec<u8>>;

    /// Renames the file `from` to `to` and replaces whatever is there. The rename is durable after
    /// `sync_dir`.
    ///
    /// # Errors
    /// The system refused.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes whatever is at `path`: a file, a link, or a directory with its content.
    ///
    /// # Errors
    /// The system refused.
    fn remove_file(&self, path: &Path) -> io::Result<()>;

    /// Removes an empty directory.
    ///
    /// # Errors
    /// The system refused.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;

    /// Creates a directory and its missing parents durably. Replaces a file at `path`.
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

    /// Makes the content of all files in a directory durable, at one time. It may do the same for
    /// every file of the file system.
    ///
    /// # Errors
    /// The system refused. Bytes written since the last successful sync may be lost.
    fn sync_files_in(&self, directory: &Path) -> io::Result<()>;

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

/// Raises the limit of open files to the most that the system allows, and returns that; `None` if
/// it allows any number. Each segment of a cached table is an open file, and during an update those
/// of two generations are. For a program: it changes the whole process.
///
/// # Errors
/// The system refused.
pub fn raise_open_files() -> io::Result<Option<u64>> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    Ok(limit.maximum)
}

/// Returns whether `error` shows that a file is missing, of another kind, too short, too long, or
/// not permitted. Other errors may come from the device and be temporary.
pub fn is_damage(error: &io::Error) -> bool {
    use io::ErrorKind::{
        InvalidData, IsADirectory, NotADirectory, NotFound, PermissionDenied, UnexpectedEof,
    };
    matches!(
        error.kind(),
        NotFound | PermissionDenied | IsADirectory | NotADirectory | InvalidData | UnexpectedEof
    )
}

/// Returns whether `error` shows that the file system or a quota is full.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// A held lock. The system releases the lock when the process ends, even after a crash.
pub type Lock = Box<dyn Send>;

/// A lock on a file, held by this process. A child process between `fork` and `exec` has a copy of
/// the open file, so closing the file here would not release the lock before the `exec`.
struct FileLock {
    file: File,
    holder: u32,
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // A child made by `fork` can drop its copy. The lock stays with the parent.
        if process::id() == self.holder {
            let _ = flock(&self.file, FlockOperation::Unlock);
        }
    }
}

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

/// Bytes of a write. Each write starts on the device when it is made, so at the sync few are left.
/// A read of a request then waits for one write at most.
const WRITE_BYTES: usize = 1 << 17;

/// A file of the system whose writes start on the device without delay.
struct SteadyFile {
    file: File,
    /// The offset of the next write, in bytes.
    at: u64,
}

impl SteadyFile {
    fn buffered(file: File, at: u64) -> BufWriter<Self> {
        BufWriter::with_capacity(WRITE_BYTES, Self { file, at })
    }
}

impl Write for SteadyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(&bytes[..bytes.len().min(WRITE_BYTES)])?;
        // With this advice the kernel starts to write the pages now. A kernel that refuses the
        // advice writes them at the sync.
        let _ = fadvise(&self.file, self.at, NonZeroU64::new(written as u64), Advice::DontNeed);
        self.at += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Output for BufWriter<SteadyFile> {
    fn sync(&mut self) -> io::Result<()> {
        self.flush()?;
        self.get_ref().file.sync_all()
    }
}

/// A file opened with O_DIRECT where the file system allows it. The embedding cache already keeps
/// the hot rows. Pages of cold rows would only evict useful pages from the system's page cache.
struct SystemPages(Arc<File>);

impl PageFile for SystemPages {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read_page(&self, number: u32, page: &mut AlignedPage) -> io::Result<()> {
        read_at(&self.0, number, page)
    }

    fn read_pages(&self, first: u32, mut pages: &mut [AlignedPage]) -> io::Result<()> {
        let mut at = u64::from(first) * PAGE_BYTES as u64;
        while !pages.is_empty() {
            let mut parts: Vec<_> =
                pages.iter_mut().map(|page| IoSliceMut::new(&mut page.0)).collect();
            let read = match preadv(&self.0, &mut parts, at) {
                Err(Errno::INTR) => continue,
                read => read? / PAGE_BYTES,
            };
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            // A page that was read in part is read again.
            at += (read * PAGE_BYTES) as u64;
            pages = &mut pages[read..];
        }
        Ok(())
    }

    fn system_file(&self) -> Option<&Arc<File>> {
        Some(&self.0)
    }
}

/// Opens a regular file with `options`. Never follows a link and never waits for a FIFO's other
/// end.
///
/// # Errors
/// `InvalidData` if the path is not a regular file, and the errors of the system.
pub fn open_regular(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    open_regular_with(path, options, OFlags::empty())
}

fn open_regular_with(path: &Path, options: &mut OpenOptions, extra: OFlags) -> io::Result<File> {
    let not_regular = || io::Error::new(io::ErrorKind::InvalidData, "is not a regular file");
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | extra;
    let opened = options.custom_flags(flags.bits() as i32).open(path);
    let file = opened.map_err(|e| match Errno::from_io_error(&e) {
        Some(Errno::LOOP | Errno::NXIO | Errno::ISDIR) => not_regular(),
        _ => e,
    })?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(not_regular()) }
}

/// Returns the directory of `path`; `.` if `path` has none.
pub fn directory_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Creates a directory durably with `mode` less the umask, and its missing parents, which others
/// may open and not write.
///
/// # Errors
/// The system refused.
pub fn create_directories(path: &Path, mode: u32) -> io::Result<()> {
    let is_new = |directory: &&Path| !directory.as_os_str().is_empty() && !directory.is_dir();
    let new: Vec<&Path> = path.ancestors().take_while(is_new).collect();
    DirBuilder::new().recursive(true).mode(0o755).create(directory_of(path))?;
    DirBuilder::new().recursive(true).mode(mode).create(path)?;
    // A directory's name is in its parent. Without these syncs a power cut could remove the new
    // directories, and with them every file that was synced into them.
    let mut parents = new.iter().rev().filter_map(|directory| directory.parent());
    parents.try_for_each(|parent| File::open(Path::new(".").join(parent))?.sync_all())
}

/// Removes whatever is at `path`, but follows no link.
fn clear(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    }
}

/// Opens the lock file at `path` and replaces anything else that is there. `flock` asks for no
/// right to write, so only those who may write the file may open it.
fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).truncate(false).write(true).mode(0o666 & !OTHERS_READ);
    let open = || {
        let file = open_regular(path, &mut options.clone())?;
        let (found, owner) = (file.metadata()?, fs::metadata(directory_of(path))?.uid());
        if found.uid() != owner {
            // Root may lock the directory of another user, who must find this lock held.
            let _ = fchown(&file, Some(owner), None);
        }
        let mode = found.permissions().mode();
        if mode & OTHERS_READ != 0 {
            // Fails for a file of another user, who narrows it at the next lock.
            let _ = file.set_permissions(Permissions::from_mode(mode & !OTHERS_READ));
        }
        Ok(file)
    };
    match open() {
        Err(e) if is_damage(&e) && clear(path).is_ok() => open(),
        opened => opened,
    }
}

/// Takes the lock at `path` if nobody holds it. Returns `None` if another process replaced the file
/// in the meantime: the lock on the old file protects nothing.
fn try_lock(path: &Path) -> io::Result<Option<FileLock>> {
    let file = open_lock(path)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(None),
        Err(e) => return Err(e.into()),
    }
    let lock = FileLock { file, holder: process::id() };
    let (held, named) = (lock.file.metadata()?, fs::symlink_metadata(path));
    let is_current =
        named.is_ok_and(|named| named.ino() == held.ino() && named.dev() == held.dev());
    Ok(is_current.then_some(lock))
}

impl Disk for SystemDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Output>> {
        let create = || open_regular(path, OpenOptions::new().create_new(true).write(true));
        let file = match create() {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                clear(path)?;
                create()?
            }
            created => created?,
        };
        Ok(Box::new(SteadyFile::buffered(file, 0)))
    }

    fn append(&self, path: &Path, bytes: u64) -> io::Result<Box<dyn Output>> {
        let mut file = open_regular(path, OpenOptions::new().write(true))?;
        file.set_len(bytes)?;
        file.seek(SeekFrom::Start(bytes))?;
        Ok(Box::new(SteadyFile::buffered(file, bytes)))
    }

    fn lock(&self, path: &Path, wait: Duration) -> io::Result<Option<Lock>> {
        let start = Instant::now();
        loop {
            if let Some(lock) = try_lock(path)? {
                return Ok(Some(Box::new(lock)));
            }
            if start.elapsed() >= wait {
                return Ok(None);
            }
            std::thread::sleep(LOCK_PAUSE);
        }
    }

    fn open_pages(&self, path: &Path) -> io::Result<Arc<dyn PageFile>> {
        let open = |extra| open_regular_with(path, OpenOptions::new().read(true), extra);
        let file = match open(OFlags::DIRECT) {
            // Some file systems (tmpfs) refuse O_DIRECT.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => open(OFlags::empty())?,
            opened => opened?,
        };
        Ok(Arc::new(SystemPages(Arc::new(file))))
    }

    fn read_method(&self) -> ReadMethod {
        ReadMethod::Auto
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Input>> {
        Ok(Box::new(open_regular(path, OpenOptions::new().read(true))?))
    }

    fn read(&self, path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
        let file = open_regular(path, OpenOptions::new().read(true))?;
        // Without a size the first read takes 32 bytes, and a record takes five reads.
        let bytes = file.metadata()?.len().min(bytes_max);
        let mut content = Vec::with_capacity(bytes as usize + 1);
        file.take(bytes_max.saturating_add(1)).read_to_end(&mut content)?;
        if content.len() as u64 <= bytes_max {
            return Ok(content);
        }
        let problem = format!("has more than {bytes_max} bytes");
        Err(io::Error::new(io::ErrorKind::InvalidData, problem))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        match fs::rename(from, to) {
            Err(e) if e.kind() == io::ErrorKind::IsADirectory => {
                clear(to)?;
                fs::rename(from, to)
            }
            renamed => renamed,
        }
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        clear(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        match create_directories(path, 0o777) {
            // A link may lead to what is mounted later.
            Err(e) if fs::symlink_metadata(path).is_ok_and(|f| !f.is_dir() && !f.is_symlink()) => {
                log::warn!("{}: is not a directory and is replaced by one: {e}", path.display());
                clear(path)?;
                create_directories(path, 0o777)
            }
            created => created,
        }
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

    fn sync_files_in(&self, directory: &Path) -> io::Result<()> {
        // From Linux 5.8 on, this call also returns an error of an earlier write.
        Ok(rustix::fs::syncfs(File::open(directory)?)?)
    }

    fn write_page(&self, path: &Path, number: u32, page: &PageBytes) -> io::Result<()> {
        let file = open_regular(path, OpenOptions::new().write(true))?;
        file.write_all_at(page, u64::from(number) * PAGE_BYTES as u64)?;
        file.sync_all()
    }

    fn free_bytes(&self, path: &Path) -> io::Result<u64> {
        let space = rustix::fs::statvfs(path)?;
        Ok(space.f_bavail.saturating_mul(space.f_frsize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_pages_are_those_that_single_reads_return() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pages");
        let content: Vec<u8> = (0..300 * PAGE_BYTES).map(|at| (at / 7 % 251) as u8).collect();
        fs::write(&path, &content).unwrap();
        let file = system().open_pages(&path).unwrap();

        for (first, count) in [(0, 1), (0, 300), (17, 256), (299, 1), (5, 0)] {
            let mut pages: Vec<_> = (0..count).map(|_| AlignedPage::zeroed()).collect();
            file.read_pages(first, &mut pages).unwrap();
            let start = first as usize * PAGE_BYTES;
            let expected = content[start..start + count * PAGE_BYTES].chunks_exact(PAGE_BYTES);
            assert!(pages.iter().map(|page| &page.0[..]).eq(expected), "{count} from {first}");
        }

        let mut pages: Vec<_> = (0..2).map(|_| AlignedPage::zeroed()).collect();
        let end = file.read_pages(299, &mut pages).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn only_regular_files_of_bounded_length_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&path, [7; 10]).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let read = |path: &Path, bytes_max| SystemDisk.read(path, bytes_max).map_err(|e| e.kind());
        assert_eq!(read(&path, 10), Ok(vec![7; 10]));
        assert_eq!(read(&path, 9), Err(io::ErrorKind::InvalidData));
        assert_eq!(read(&link, 10), Err(io::ErrorKind::InvalidData));
        assert_eq!(read(Path::new("/dev/null"), 10), Err(io::ErrorKind::InvalidData));
    }

    #[test]
    fn a_lock_ends_although_a_copy_of_its_file_is_open() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = try_lock(&path).unwrap().unwrap();
        assert!(try_lock(&path).unwrap().is_none());
        let copy = lock.file.try_clone().unwrap();
        drop(lock);
        assert!(try_lock(&path).unwrap().is_some());
        drop(copy);
    }

    #[test]
    fn only_who_may_write_a_lock_may_read_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let mode = || fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        drop(try_lock(&path).unwrap().unwrap());
        assert_eq!(mode() & OTHERS_READ, 0);

        for (earlier, now) in [(0o640, 0o600), (0o644, 0o600), (0o664, 0o620), (0o600, 0o600)] {
            fs::set_permissions(&path, Permissions::from_mode(earlier)).unwrap();
            drop(try_lock(&path).unwrap().unwrap());
            assert_eq!(mode(), now, "{earlier:o}");
        }
    }

    #[test]
    fn a_copy_in_another_process_does_not_end_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let lock = try_lock(&path).unwrap().unwrap();
        drop(FileLock { file: lock.file.try_clone().unwrap(), holder: lock.holder + 1 });
        assert!(try_lock(&path).unwrap().is_none());
    }
}
