//! A disk in memory with the worst behaviour of a real one. A power cut loses, keeps or tears
//! unsynced writes block by block, and keeps or undoes unsynced renames. Any call can fail, or take
//! long in simulated time. Each simulated process has a handle of its own: after a kill, all calls
//! of its handle fail, and its locks are free. Deterministic: equal seeds and equal calls give
//! equal disks.

mod files;

use crate::random::Random;
use crate::stall::Stall;
use hatchback::bundle::BundleReader;
use hatchback::clock::Clock;
use hatchback::flash::{Flash, FlashError};
use hatchback::io::disk::Disk;
use hatchback::locks::lock;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// The unit that a power cut keeps or loses.
const BLOCK_BYTES: usize = 4096;

/// A shared simulated disk, or the handle that one simulated process has of it.
#[derive(Clone, Default)]
pub struct SimDisk {
    state: Arc<Mutex<State>>,
    process: Option<Arc<SimProcess>>,
    /// Bytes written through this handle and its clones.
    meter: Arc<AtomicU64>,
    /// Blocks the page reads of this handle while it is on. Such a handle reads on threads.
    stall: Option<Arc<Stall>>,
}

/// One simulated process, as its disk sees it.
struct SimProcess {
    number: u64,
    /// Called at the start of every call, before the disk is locked.
    on_call: fn(),
    is_killed: AtomicBool,
    /// Calls before the process is killed.
    calls_left: AtomicU64,
}

/// A part of the disk with faults of its own.
struct Mount {
    root: PathBuf,
    is_read_only: bool,
    /// Bytes that can still be written; removals give none back.
    room: Option<u64>,
}

/// The holder of a lock.
struct Holder {
    number: u64,
    process: Option<u64>,
}

#[derive(Default)]
struct State {
    files: Vec<SimFile>,
    names: BTreeMap<PathBuf, usize>,
    /// The durable names, and the changes since, oldest first.
    durable_names: BTreeMap<PathBuf, usize>,
    pending: Vec<Change>,
    directories: BTreeSet<PathBuf>,
    calls: u64,
    written: u64,
    cut_at: Option<u64>,
    fail_at: Option<u64>,
    capacity: Option<u64>,
    /// Microseconds that a call takes, and that every fiftieth call takes.
    call_us: [u64; 2],
    all_calls: u64,
    clock: SimClock,
    mounts: Vec<Mount>,
    locks: BTreeMap<PathBuf, Holder>,
    /// Reads before one fails.
    reads_left: Option<u64>,
    processes: u64,
    locks_taken: u64,
}

/// The clock of a simulated disk. Only calls of the disk and `pass` advance it.
#[derive(Clone, Default)]
pub struct SimClock(Arc<AtomicU64>);

impl SimClock {
    /// Advances the clock.
    pub fn pass(&self, time: Duration) {
        self.0.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }
}

impl Clock for SimClock {
    fn now(&self) -> Duration {
        Duration::from_micros(self.0.load(Ordering::Relaxed))
    }
}

#[derive(Default)]
struct SimFile {
    content: Vec<u8>,
    durable: Vec<u8>,
    unreadable: bool,
}

/// A change of names that is not durable yet.
#[derive(Clone)]
enum Change {
    Create(PathBuf, usize),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
}

impl Change {
    fn directory(&self) -> Option<&Path> {
        match self {
            Self::Create(path, _) | Self::Remove(path) | Self::Rename(_, path) => path.parent(),
        }
    }

    fn apply(&self, names: &mut BTreeMap<PathBuf, usize>) {
        match self {
            Self::Create(path, file) => {
                names.insert(path.clone(), *file);
            }
            Self::Remove(path) => {
                names.remove(path);
            }
            Self::Rename(from, to) => {
                if let Some(file) = names.remove(from) {
                    names.insert(to.clone(), file);
                }
            }
        }
    }
}

fn not_found(path: &Path) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, path.display().to_string())
}

impl State {
    /// Advances the clock by the duration of a call.
    fn take_time(&mut self) {
        self.all_calls += 1;
        let us = self.call_us[usize::from(self.all_calls.is_multiple_of(50))];
        self.clock.pass(Duration::from_micros(us));
    }

    /// Counts a call that changes the disk. Fails the call if the test requested that.
    fn change(&mut self) -> io::Result<()> {
        self.take_time();
        self.calls += 1;
        if self.cut_at.is_some_and(|at| self.calls > at) {
            return Err(io::Error::other("the power is off"));
        }
        if self.fail_at == Some(self.calls) {
            return Err(io::Error::other("the device reports an error"));
        }
        Ok(())
    }

    /// Counts a call that changes the disk at `path`.
    fn change_at(&mut self, path: &Path) -> io::Result<()> {
        self.change()?;
        if self.mounts.iter().any(|m| m.is_read_only && path.starts_with(&m.root)) {
            return Err(io::Error::from(io::ErrorKind::ReadOnlyFilesystem));
        }
        Ok(())
    }

    /// Counts a read. Fails it if the test requested that.
    fn read_call(&mut self) -> io::Result<()> {
        match &mut self.reads_left {
            Some(0) => self.reads_left = None,
            Some(left) => {
                *left -= 1;
                return Ok(());
            }
            None => return Ok(()),
        }
        Err(io::Error::other("the device reports an error"))
    }

    /// Takes `bytes` of the room at `path`.
    fn take_room(&mut self, path: &Path, bytes: u64) -> io::Result<()> {
        for mount in self.mounts.iter_mut().filter(|m| path.starts_with(&m.root)) {
            if let Some(room) = &mut mount.room {
                *room = room
                    .checked_sub(bytes)
                    .ok_or_else(|| io::Error::from(io::ErrorKind::StorageFull))?;
            }
        }
        Ok(())
    }

    fn mount(&mut self, root: &Path) -> &mut Mount {
        let at = self.mounts.iter().position(|m| m.root == root).unwrap_or_else(|| {
            let root = root.to_owned();
            self.mounts.push(Mount { root, is_read_only: false, room: None });
            self.mounts.len() - 1
        });
        &mut self.mounts[at]
    }

    fn file(&mut self, path: &Path) -> io::Result<&mut SimFile> {
        let file = *self.names.get(path).ok_or_else(|| not_found(path))?;
        Ok(&mut self.files[file])
    }

    /// Drops the changes of `path` that are not durable yet.
    fn forget(&mut self, path: &Path) {
        self.pending.retain(|change| match change {
            Change::Create(at, _) | Change::Remove(at) => at != path,
            Change::Rename(from, to) => from != path && to != path,
        });
    }

    fn rename_now(&mut self, change: Change) {
        change.apply(&mut self.names);
        self.pending.push(change);
    }

    fn used(&self) -> u64 {
        self.names.values().map(|f| self.files[*f].content.len() as u64).sum()
    }
}

impl SimDisk {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Returns a handle for a new process. Each call of the handle first calls `on_call`.
    pub fn process(&self, on_call: fn()) -> Self {
        let number = {
            let mut state = self.state();
            state.processes += 1;
            state.processes
        };
        let (is_killed, calls_left) = (AtomicBool::new(false), AtomicU64::new(u64::MAX));
        let process = SimProcess { number, on_call, is_killed, calls_left };
        Self {
            state: Arc::clone(&self.state),
            process: Some(Arc::new(process)),
            meter: Arc::default(),
            stall: None,
        }
    }

    /// Returns a handle whose pages are read on threads, and only while `stall` is off.
    pub fn stalling(&self, stall: &Arc<Stall>) -> Self {
        Self { stall: Some(Arc::clone(stall)), ..self.clone() }
    }

    /// Returns a handle of the same process that counts its writes separately.
    pub fn metered(&self) -> Self {
        Self { meter: Arc::default(), ..self.clone() }
    }

    /// Returns the bytes written through this handle and its clones.
    pub fn metered_bytes(&self) -> u64 {
        self.meter.load(Ordering::Relaxed)
    }

    /// Kills the process of this handle: every later call fails, and its locks are free.
    pub fn kill(&self) {
        let Some(process) = &self.process else { return };
        process.is_killed.store(true, Ordering::Relaxed);
        self.state().locks.retain(|_, holder| holder.process != Some(process.number));
    }

    /// Kills the process of this handle after `calls` more calls.
    pub fn kill_after(&self, calls: u64) {
        if let Some(process) = &self.process {
            process.calls_left.store(calls, Ordering::Relaxed);
        }
    }

    /// Returns whether the process of this handle was killed.
    pub fn is_killed(&self) -> bool {
        self.process.as_ref().is_some_and(|p| p.is_killed.load(Ordering::Relaxed))
    }

    /// Starts a read. Only processes see the read errors that a test requested.
    fn enter_read(&self) -> io::Result<MutexGuard<'_, State>> {
        let mut state = self.enter()?;
        if self.process.is_some() {
            state.read_call()?;
        }
        Ok(state)
    }

    /// Starts a call: fails if the process was killed.
    fn enter(&self) -> io::Result<MutexGuard<'_, State>> {
        if let Some(process) = &self.process {
            (process.on_call)();
            let left = process.calls_left.load(Ordering::Relaxed);
            if left == 0 && !self.is_killed() {
                self.kill();
            }
            process.calls_left.store(left.saturating_sub(1), Ordering::Relaxed);
            if self.is_killed() {
                return Err(io::Error::other("the process was killed"));
            }
        }
        Ok(self.state())
    }

    /// The flash directory of [`Self::install`].
    pub const FLASH: &str = "/flash";

    /// Installs the bundle at `bundle`.
    pub fn install(&self, bundle: &Path) -> Result<Flash, FlashError> {
        let mut bundle = BundleReader::open(bundle)?;
        Flash::install(&self.shared(), Path::new(Self::FLASH), &mut bundle, |_| ())
    }

    /// Returns the disk as the trait object of the runtime.
    pub fn shared(&self) -> Arc<dyn Disk> {
        Arc::new(self.clone())
    }

    /// Returns the number of calls that changed the disk.
    pub fn calls(&self) -> u64 {
        self.state().calls
    }

    /// Returns the bytes written so far.
    pub fn written(&self) -> u64 {
        self.state().written
    }

    /// Cuts the power after `calls` more changing calls: every later one fails.
    pub fn cut_after(&self, calls: u64) {
        let mut state = self.state();
        state.cut_at = Some(state.calls + calls);
    }

    /// Lets one changing call fail, after `calls` more of them.
    pub fn fail_after(&self, calls: u64) {
        let mut state = self.state();
        state.fail_at = Some(state.calls + calls + 1);
    }

    /// Lets every later call take `call_us`, and every fiftieth one `stall_us`.
    pub fn slow(&self, call_us: u64, stall_us: u64) {
        self.state().call_us = [call_us, stall_us];
    }

    /// Returns the disk's clock.
    pub fn clock(&self) -> SimClock {
        self.state().clock.clone()
    }

    /// Limits the disk to `bytes`.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        self.state().capacity = bytes;
    }

    /// Makes the files below `root` read-only, or writable again.
    pub fn set_read_only(&self, root: &Path, is_read_only: bool) {
        self.state().mount(root).is_read_only = is_read_only;
    }

    /// Limits the bytes that can still be written below `root`; `None` for no limit.
    pub fn set_room(&self, root: &Path, room: Option<u64>) {
        self.state().mount(root).room = room;
    }

    /// Lets one read fail, after `reads` more of them.
    pub fn fail_read_after(&self, reads: u64) {
        self.state().reads_left = Some(reads);
    }

    /// Cancels all requested faults that have not happened yet.
    pub fn end_faults(&self) {
        let mut state = self.state();
        (state.cut_at, state.fail_at, state.reads_left) = (None, None, None);
        state.call_us = [0, 0];
        state.mounts.clear();
        state.files.iter_mut().for_each(|file| file.unreadable = false);
    }

    /// Returns whether the power is off.
    pub fn is_off(&self) -> bool {
        let state = self.state();
        state.cut_at.is_some_and(|at| state.calls > at)
    }

    /// Cuts the power now.
    pub fn cut(&self) {
        let mut state = self.state();
        (state.cut_at, state.calls) = (Some(state.calls), state.calls + 1);
    }

    /// Returns the content of a file; `None` if it is missing.
    pub fn content(&self, path: &Path) -> Option<Vec<u8>> {
        self.state().file(path).ok().map(|file| file.content.clone())
    }

    /// Replaces or creates a file durably.
    pub fn put(&self, path: &Path, content: Vec<u8>) {
        let mut state = self.state();
        let durable = content.clone();
        state.files.push(SimFile { content, durable, unreadable: false });
        let change = Change::Create(path.to_owned(), state.files.len() - 1);
        state.forget(path);
        change.apply(&mut state.names);
        change.apply(&mut state.durable_names);
    }

    /// Removes a file durably.
    pub fn lose(&self, path: &Path) {
        let mut state = self.state();
        state.forget(path);
        state.names.remove(path);
        state.durable_names.remove(path);
    }

    /// Returns the bytes of all files.
    pub fn used(&self) -> u64 {
        self.state().used()
    }

    /// Flips one bit of a file durably.
    pub fn flip(&self, path: &Path, bit: usize) {
        let mut state = self.state();
        let file = state.file(path).unwrap();
        file.content[bit / 8] ^= 1 << (bit % 8);
        file.durable.clone_from(&file.content);
    }

    /// Lets every later read of the file fail, until another file replaces it.
    pub fn spoil(&self, path: &Path) {
        self.state().file(path).unwrap().unreadable = true;
    }

    /// Returns the paths of all files.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.state().names.keys().cloned().collect()
    }

    /// Cuts the power and starts again. The seed decides which unsynced bytes are lost, kept or
    /// torn.
    pub fn reboot(&self, seed: u64) {
        let mut random = Random::new(seed);
        let mut state = self.state();
        for file in &mut state.files {
            file.content = torn(&file.durable, &file.content, &mut random);
            file.durable.clone_from(&file.content);
        }
        // The file system makes the names of each directory durable in order, so the first changes
        // of each directory are kept.
        let pending = std::mem::take(&mut state.pending);
        let mut reached: BTreeMap<PathBuf, u64> = BTreeMap::new();
        for change in &pending {
            let directory = change.directory().unwrap_or(Path::new("")).to_owned();
            let of_it = pending.iter().filter(|c| c.directory() == Some(&directory)).count() as u64;
            let left = reached.entry(directory).or_insert_with(|| random.below(of_it + 1));
            if *left > 0 {
                *left -= 1;
                change.apply(&mut state.durable_names);
            }
        }
        state.names = state.durable_names.clone();
        (state.cut_at, state.fail_at) = (None, None);
        state.locks.clear();
    }
}

/// Returns a file between its durable and its last content: every block is one of the two, and the
/// length is between both.
fn torn(durable: &[u8], content: &[u8], random: &mut Random) -> Vec<u8> {
    if durable == content {
        return content.to_vec();
    }
    let (short, long) = (durable.len().min(content.len()), durable.len().max(content.len()));
    let end = match random.below(4) {
        0 => content.len(),
        1 => durable.len(),
        _ => short + random.below((long - short) as u64 + 1) as usize,
    };
    let mut torn = vec![0; end];
    for (number, block) in torn.chunks_mut(BLOCK_BYTES).enumerate() {
        let at = number * BLOCK_BYTES;
        // Blocks past the durable end that were never written hold zeros.
        let from = if random.one_in(2) { durable } else { content };
        let part = from.get(at..).unwrap_or_default();
        let n = part.len().min(block.len());
        block[..n].copy_from_slice(&part[..n]);
    }
    torn
}
