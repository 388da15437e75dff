//! Reads pages with many reads in flight, into aligned memory that is allocated once. Results
//! arrive in the order of completion. The disk chooses how its files are read: through io_uring
//! where the system allows it, by a pool of threads, or in place. Never checks the bytes of a page.

use crate::io::page::{AlignedPage, PageBytes};
use crate::io::uring::Ring;
use crate::limits::{PAGE_BYTES, READ_THREADS_MAX};
use crate::locks::lock;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::iter;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

/// A file of pages.
pub trait PageFile: Send + Sync {
    /// Returns the length of the file in bytes.
    ///
    /// # Errors
    /// The system refused.
    fn bytes(&self) -> io::Result<u64>;

    /// Reads page `number` and waits for the device.
    ///
    /// # Errors
    /// The device refused, or the file ends within the page.
    fn read_page(&self, number: u32, page: &mut AlignedPage) -> io::Result<()>;

    /// Reads the pages from `first` on into `pages` and waits for the device. Reads many pages with
    /// one call where the file supports it.
    ///
    /// # Errors
    /// The device refused, or the file ends within a page. The content of `pages` is then
    /// unspecified.
    fn read_pages(&self, first: u32, pages: &mut [AlignedPage]) -> io::Result<()> {
        pages.iter_mut().zip(first..).try_for_each(|(page, number)| self.read_page(number, page))
    }

    /// Returns the system's file, which io_uring reads. `None` if only `read_page` can read.
    fn system_file(&self) -> Option<&Arc<File>>;
}

/// Reads one page of a system file.
pub(crate) fn read_at(file: &File, number: u32, page: &mut AlignedPage) -> io::Result<()> {
    file.read_exact_at(&mut page.0, u64::from(number) * PAGE_BYTES as u64)
}

/// How a reader reads pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadMethod {
    /// io_uring where the system allows it, else threads. Only for files of the system.
    Auto,
    /// A pool of threads.
    Threads,
    /// [`PageReader::next`] reads the pages, in the order in which the reads started.
    InPlace,
}

/// The number of reads that a device may have in flight, its depth, which all its readers share.
/// Each reader may always have one read in flight. Readers take the remaining depth first come,
/// first served. Never waits.
#[derive(Debug)]
pub struct DeviceDepth {
    max: usize,
    /// Depth that no reader holds. Negative if there are more readers than `max`.
    spare: AtomicIsize,
}

impl DeviceDepth {
    /// Returns a device that accepts `max` reads in flight, at least one.
    pub fn new(max: usize) -> Arc<Self> {
        let max = max.max(1);
        Arc::new(Self { max, spare: AtomicIsize::new(max as isize) })
    }

    /// Returns the number of reads that may be in flight.
    pub fn max(&self) -> usize {
        self.max
    }

    fn take(&self) -> bool {
        let one_less = |spare: isize| (spare > 0).then(|| spare - 1);
        self.spare.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
    }

    fn give(&self, n: usize) {
        self.spare.fetch_add(n as isize, Ordering::Relaxed);
    }
}

/// A read of one page and the caller's token for the result.
struct Job {
    file: Arc<dyn PageFile>,
    number: u32,
    token: u64,
}

/// Reads pages, up to a fixed number in flight.
pub struct PageReader {
    backend: Backend,
    device: Arc<DeviceDepth>,
    /// Maximum number of this reader's reads in flight.
    depth: usize,
    /// Depth taken from the device: one for each read in flight except the first.
    taken: usize,
}

enum Backend {
    Ring(Box<Ring>),
    Threads(Pool),
    InPlace { started: VecDeque<Job>, page: Box<AlignedPage> },
}

impl Backend {
    fn new(depth: usize, method: ReadMethod) -> Self {
        match method {
            ReadMethod::Auto => match Ring::new(depth) {
                Ok(ring) => Self::Ring(Box::new(ring)),
                Err(e) => {
                    log::info!("io_uring is not in use, a pool of threads reads pages: {e}");
                    Self::with_threads(depth)
                }
            },
            ReadMethod::Threads => Self::with_threads(depth),
            ReadMethod::InPlace => Self::in_place(depth),
        }
    }

    /// Reads on the caller's thread if the system gives no other one.
    fn with_threads(depth: usize) -> Self {
        Pool::new(depth).map_or_else(
            |e| {
                log::warn!("pages are read one after the other, for want of a thread: {e}");
                Self::in_place(depth)
            },
            Self::Threads,
        )
    }

    fn in_place(depth: usize) -> Self {
        let (started, page) = (VecDeque::with_capacity(depth), AlignedPage::zeroed());
        Self::InPlace { started, page: Box::new(page) }
    }
}

impl PageReader {
    /// Returns a reader on a device of its own with up to `depth` reads in flight.
    pub fn new(depth: usize, method: ReadMethod) -> Self {
        Self::on(&DeviceDepth::new(depth), method)
    }

    /// Returns a reader that shares the depth of `device` with the device's other readers.
    pub fn on(device: &Arc<DeviceDepth>, method: ReadMethod) -> Self {
        Self::with_depth(device, device.max(), method)
    }

    /// Returns a reader with up to `depth` reads in flight, which shares the depth of `device` with
    /// the device's other readers.
    pub fn with_depth(device: &Arc<DeviceDepth>, depth: usize, method: ReadMethod) -> Self {
        let depth = depth.clamp(1, device.max());
        device.spare.fetch_sub(1, Ordering::Relaxed);
        let (backend, device) = (Backend::new(depth, method), Arc::clone(device));
        Self { backend, device, depth, taken: 0 }
    }

    /// Returns the bytes of memory of a reader with `depth` reads in flight.
    pub fn bytes(depth: usize) -> usize {
        (depth + 1) * size_of::<AlignedPage>() + depth * size_of::<Job>()
    }

    /// Returns `io_uring`, `threads` or `in place`.
    pub fn method(&self) -> &'static str {
        match self.backend {
            Backend::Ring(_) => "io_uring",
            Backend::Threads(_) => "threads",
            Backend::InPlace { .. } => "in place",
        }
    }

    /// Returns the number of reads started whose results `next` did not return yet.
    pub fn in_flight(&self) -> usize {
        match &self.backend {
            Backend::Ring(ring) => ring.in_flight(),
            Backend::Threads(pool) => pool.in_flight,
            Backend::InPlace { started, .. } => started.len(),
        }
    }

    /// Takes the depth for another read, and keeps it until the next read completes. Returns false
    /// if no more reads can start.
    pub fn reserve(&mut self) -> bool {
        let in_flight = self.in_flight();
        if in_flight > self.taken && in_flight < self.depth && self.device.take() {
            self.taken += 1;
        }
        in_flight <= self.taken && in_flight < self.depth
    }

    /// Gives depth that this reader no longer needs back to the device.
    fn give_back(&mut self) {
        let unneeded = self.taken.saturating_sub(self.in_flight().saturating_sub(1));
        self.taken -= unneeded;
        self.device.give(unneeded);
    }

    /// Starts to read page `number` of `file`.
    ///
    /// # Panics
    /// If there is no room for another read: `reserve` must return true first. Also if io_uring
    /// would read a file that is not the system's.
    pub fn begin(&mut self, file: &Arc<dyn PageFile>, number: u32, token: u64) {
        let has_room = self.reserve();
        assert!(has_room, "more reads than the device's depth");
        let job = || Job { file: Arc::clone(file), number, token };
        match &mut self.backend {
            Backend::Ring(ring) => {
                let Some(file) = file.system_file() else {
                    unreachable!("a disk without files of the system chooses another method")
                };
                ring.begin(Arc::clone(file), number, token);
            }
            Backend::Threads(pool) => pool.begin(job()),
            Backend::InPlace { started, .. } => started.push_back(job()),
        }
    }

    /// Passes the token and the result of one completed read to `take`. Waits for a completion for
    /// at most `wait`; `None` waits without a limit. Returns false if no read completed.
    pub fn next(
        &mut self,
        wait: Option<Duration>,
        take: impl FnOnce(u64, io::Result<&PageBytes>),
    ) -> bool {
        let done = match &mut self.backend {
            Backend::Ring(ring) => ring.next(wait, take),
            Backend::Threads(pool) => pool.next(wait, take),
            Backend::InPlace { started, page } => {
                let job = started.pop_front();
                if let Some(Job { file, number, token }) = &job {
                    let read = file.read_page(*number, page);
                    take(*token, read.map(|()| &page.0));
                }
                job.is_some()
            }
        };
        self.give_back();
        done
    }
}

impl Drop for PageReader {
    fn drop(&mut self) {
        self.device.give(self.taken + 1);
    }
}

/// Threads that read one page at a time.
struct Pool {
    /// `None` only while the pool is being dropped.
    jobs: Option<SyncSender<(Job, Box<AlignedPage>)>>,
    done: Receiver<Done>,
    free: Vec<Box<AlignedPage>>,
    in_flight: usize,
    threads: Vec<std::thread::JoinHandle<()>>,
}

struct Done {
    token: u64,
    read: io::Result<()>,
    page: Box<AlignedPage>,
}

impl Pool {
    fn new(depth: usize) -> io::Result<Self> {
        // Both channels have room for every page of the pool: a send neither waits nor allocates.
        let (jobs, todo) = sync_channel::<(Job, Box<AlignedPage>)>(depth);
        let (answer, done) = sync_channel(depth);
        let todo = Arc::new(Mutex::new(todo));
        let thread = |_| {
            let (todo, answer) = (Arc::clone(&todo), answer.clone());
            std::thread::Builder::new().spawn(move || read_all(&todo, &answer))
        };
        let first = thread(0)?;
        // Fewer threads only read fewer pages at a time.
        let more = (1..depth.min(READ_THREADS_MAX)).map_while(|number| thread(number).ok());
        let threads = iter::once(first).chain(more).collect();
        let free = (0..depth).map(|_| Box::new(AlignedPage::zeroed())).collect();
        Ok(Self { jobs: Some(jobs), done, free, in_flight: 0, threads })
    }

    fn begin(&mut self, job: Job) {
        let (Some(page), Some(jobs)) = (self.free.pop(), &self.jobs) else {
            unreachable!("`reserve` returned true and the pool is not being dropped")
        };
        // The threads keep the receiver as long as the pool exists.
        let sent = jobs.send((job, page));
        assert!(sent.is_ok(), "the reading threads ended");
        self.in_flight += 1;
    }

    fn next(
        &mut self,
        wait: Option<Duration>,
        take: impl FnOnce(u64, io::Result<&PageBytes>),
    ) -> bool {
        if self.in_flight == 0 {
            return false;
        }
        let done = match wait {
            None => self.done.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(wait) => self.done.recv_timeout(wait),
        };
        let Ok(Done { token, read, page }) = done else { return false };
        self.in_flight -= 1;
        take(token, read.map(|()| &page.0));
        self.free.push(page);
        true
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // A thread that panicked has no read left to finish.
            let _ = thread.join();
        }
    }
}

fn read_all(todo: &Mutex<Receiver<(Job, Box<AlignedPage>)>>, answer: &SyncSender<Done>) {
    loop {
        let next = lock(todo).recv();
        let Ok((job, mut page)) = next else { return };
        let read = job.file.read_page(job.number, &mut page);
        if answer.send(Done { token: job.token, read, page }).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::io::Write;

    struct Plain(Arc<File>, bool);

    impl PageFile for Plain {
        fn bytes(&self) -> io::Result<u64> {
            Ok(self.0.metadata()?.len())
        }
        fn read_page(&self, number: u32, page: &mut AlignedPage) -> io::Result<()> {
            read_at(&self.0, number, page)
        }
        fn system_file(&self) -> Option<&Arc<File>> {
            self.1.then_some(&self.0)
        }
    }

    fn file_of(pages: u8, system: bool) -> Arc<dyn PageFile> {
        let mut file = tempfile::tempfile().unwrap();
        (0..pages).for_each(|n| file.write_all(&[n; PAGE_BYTES]).unwrap());
        Arc::new(Plain(Arc::new(file), system))
    }

    fn read_everything(
        mut reader: PageReader,
        file: &Arc<dyn PageFile>,
        pages: u32,
    ) -> BTreeMap<u64, Result<u8, io::ErrorKind>> {
        let (mut started, mut found) = (0, BTreeMap::new());
        while started < pages || reader.in_flight() > 0 {
            while started < pages && reader.reserve() {
                reader.begin(file, started, u64::from(started) * 3);
                started += 1;
            }
            let got = reader.next(None, |token, page| {
                found.insert(token, page.map(|p| p[4095]).map_err(|e| e.kind()));
            });
            assert!(got);
        }
        assert!(!reader.next(None, |_, _| ()));
        found
    }

    #[test]
    fn every_method_reads_every_page_once_and_reports_the_end() {
        for (method, system) in
            [(ReadMethod::Auto, true), (ReadMethod::Threads, false), (ReadMethod::InPlace, false)]
        {
            let file = file_of(200, system);
            let found = read_everything(PageReader::new(7, method), &file, 202);
            for n in 0..200u64 {
                assert_eq!(found[&(n * 3)], Ok(n as u8));
            }
            assert_eq!(found[&600], Err(io::ErrorKind::UnexpectedEof));
            assert_eq!(found.len(), 202);
        }
    }

    #[test]
    fn readers_on_one_device_share_its_depth() {
        let (file, device) = (file_of(9, false), DeviceDepth::new(6));
        let mut readers: Vec<_> =
            (0..3).map(|_| PageReader::on(&device, ReadMethod::InPlace)).collect();
        let fill = |reader: &mut PageReader| {
            while reader.reserve() {
                reader.begin(&file, 0, 0);
            }
            reader.in_flight()
        };
        // The first reader takes the whole spare depth; the others still have one read each.
        assert_eq!(readers.iter_mut().map(fill).collect::<Vec<_>>(), [4, 1, 1]);
        // A completed read of one reader lets another reader start one.
        assert!(readers[0].next(None, |_, _| ()) && readers[0].next(None, |_, _| ()));
        assert_eq!(readers.iter_mut().rev().map(fill).collect::<Vec<_>>(), [3, 1, 2]);
        drop(readers);
        assert_eq!(device.spare.load(Ordering::Relaxed), 6, "depth of the device was lost");
        // A reader of a smaller depth leaves the rest of the device's depth to others.
        let mut few = PageReader::with_depth(&device, 2, ReadMethod::InPlace);
        let mut rest = PageReader::on(&device, ReadMethod::InPlace);
        assert_eq!([fill(&mut few), fill(&mut rest)], [2, 4]);
        drop((few, rest));
        assert_eq!(device.spare.load(Ordering::Relaxed), 6, "depth of the device was lost");
        // More readers than depth: each reader still has one read.
        let mut readers: Vec<_> =
            (0..8).map(|_| PageReader::on(&device, ReadMethod::InPlace)).collect();
        assert!(readers.iter_mut().all(|r| fill(r) == 1));
    }

    #[test]
    fn a_reader_can_be_dropped_while_it_reads() {
        for method in [ReadMethod::Auto, ReadMethod::Threads] {
            let file = file_of(64, true);
            let mut reader = PageReader::new(64, method);
            (0..64).for_each(|n| reader.begin(&file, n, 0));
            assert!(reader.next(None, |_, page| assert!(page.is_ok())));
        }
    }

    #[test]
    fn a_wait_may_be_longer_than_any_clock() {
        for method in [ReadMethod::Auto, ReadMethod::Threads] {
            let (file, mut reader) = (file_of(1, true), PageReader::new(1, method));
            reader.begin(&file, 0, 7);
            assert!(
                reader.next(Some(Duration::MAX), |token, page| assert!(token == 7 && page.is_ok()))
            );
        }
    }

    #[test]
    fn waiting_for_nothing_ends() {
        let mut reader = PageReader::new(4, ReadMethod::Auto);
        assert!(!reader.next(Some(Duration::from_millis(1)), |_, _| ()));
        assert!(!reader.next(None, |_, _| ()));
    }
}
