//! The simulated disk as the runtime sees it: files that are written, read by pages and locked.
//! Every call may fail or take long, as the faults of the disk say.

use super::{Change, Holder, SimDisk, SimFile, not_found};
use hatchback::io::disk::{Disk, Input, Lock, Output};
use hatchback::io::page::{AlignedPage, PageBytes};
use hatchback::io::reader::{PageFile, ReadMethod};
use hatchback::limits::PAGE_BYTES;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

struct SimOutput {
    disk: SimDisk,
    path: PathBuf,
    file: usize,
}

impl Write for SimOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.disk.enter()?;
        state.change_at(&self.path)?;
        state.take_room(&self.path, bytes.len() as u64)?;
        if state.capacity.is_some_and(|c| state.used() + bytes.len() as u64 > c) {
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        state.written += bytes.len() as u64;
        self.disk.meter.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        state.files[self.file].content.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Output for SimOutput {
    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.disk.enter()?;
        state.change_at(&self.path)?;
        let file = &mut state.files[self.file];
        file.durable.clone_from(&file.content);
        Ok(())
    }
}

struct SimPages {
    disk: SimDisk,
    file: usize,
}

impl PageFile for SimPages {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.disk.state().files[self.file].content.len() as u64)
    }

    fn read_page(&self, number: u32, page: &mut AlignedPage) -> io::Result<()> {
        if let Some(stall) = &self.disk.stall {
            stall.wait();
        }
        let mut state = self.disk.enter_read()?;
        state.take_time();
        if state.files[self.file].unreadable {
            return Err(io::Error::other("the device reports an error"));
        }
        let start = number as usize * PAGE_BYTES;
        let bytes = state.files[self.file].content.get(start..start + PAGE_BYTES);
        page.0.copy_from_slice(bytes.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?);
        Ok(())
    }

    fn system_file(&self) -> Option<&Arc<File>> {
        None
    }
}

/// A held lock. If its process was killed, another process may have taken the lock since.
struct SimLock {
    disk: SimDisk,
    path: PathBuf,
    number: u64,
}

impl Drop for SimLock {
    fn drop(&mut self) {
        let mut state = self.disk.state();
        if state.locks.get(&self.path).is_some_and(|holder| holder.number == self.number) {
            state.locks.remove(&self.path);
        }
    }
}

impl Disk for SimDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Output>> {
        let mut state = self.enter()?;
        state.change_at(path)?;
        // Truncation creates a new file under the old name; it is as durable as a rename.
        state.files.push(SimFile::default());
        let file = state.files.len() - 1;
        state.rename_now(Change::Create(path.to_owned(), file));
        Ok(Box::new(SimOutput { disk: self.clone(), path: path.to_owned(), file }))
    }

    fn append(&self, path: &Path, bytes: u64) -> io::Result<Box<dyn Output>> {
        let mut state = self.enter()?;
        state.change_at(path)?;
        let file = *state.names.get(path).ok_or_else(|| not_found(path))?;
        state.files[file].content.resize(bytes as usize, 0);
        Ok(Box::new(SimOutput { disk: self.clone(), path: path.to_owned(), file }))
    }

    /// Waits in simulated time only.
    fn lock(&self, path: &Path, wait: Duration) -> io::Result<Option<Lock>> {
        let mut state = self.enter()?;
        if state.locks.contains_key(path) {
            if wait.is_zero() {
                return Ok(None);
            }
            drop(state);
            self.clock().pass(wait);
            return self.lock(path, Duration::ZERO);
        }
        state.locks_taken += 1;
        let number = state.locks_taken;
        let process = self.process.as_ref().map(|p| p.number);
        state.locks.insert(path.to_owned(), Holder { number, process });
        Ok(Some(Box::new(SimLock { disk: self.clone(), path: path.to_owned(), number })))
    }

    fn open_pages(&self, path: &Path) -> io::Result<Arc<dyn PageFile>> {
        let state = self.enter_read()?;
        let file = *state.names.get(path).ok_or_else(|| not_found(path))?;
        Ok(Arc::new(SimPages { disk: self.clone(), file }))
    }

    fn read_method(&self) -> ReadMethod {
        if self.stall.is_some() { ReadMethod::Threads } else { ReadMethod::InPlace }
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Input>> {
        Ok(Box::new(io::Cursor::new(self.read(path, u64::MAX)?)))
    }

    fn read(&self, path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
        let mut state = self.enter_read()?;
        match state.file(path)? {
            file if file.unreadable => Err(io::Error::other("the device reports an error")),
            file if file.content.len() as u64 > bytes_max => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "is too long"))
            }
            file => Ok(file.content.clone()),
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.enter()?;
        state.change_at(from)?;
        state.file(from)?;
        state.rename_now(Change::Rename(from.to_owned(), to.to_owned()));
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let mut state = self.enter()?;
        state.change_at(path)?;
        state.file(path)?;
        state.rename_now(Change::Remove(path.to_owned()));
        Ok(())
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.enter()?;
        state.change_at(path)?;
        state.directories.remove(path);
        Ok(())
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.enter()?;
        if state.directories.contains(path) {
            return state.change();
        }
        state.change_at(path)?;
        state.directories.insert(path.to_owned());
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        let state = self.enter()?;
        let named = state.names.keys().chain(&state.directories).map(PathBuf::as_path);
        let all = named.chain(state.names.keys().filter_map(|name| name.parent()));
        let below: BTreeSet<&Path> = all.filter(|p| p.parent() == Some(path)).collect();
        Ok(below.into_iter().map(Path::to_owned).collect())
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let mut state = self.enter()?;
        state.change_at(path)?;
        let (now, later) = std::mem::take(&mut state.pending)
            .into_iter()
            .partition(|c| c.directory() == Some(path));
        state.pending = later;
        let now: Vec<Change> = now;
        now.iter().for_each(|change| change.apply(&mut state.durable_names));
        Ok(())
    }

    fn sync_files_in(&self, directory: &Path) -> io::Result<()> {
        let mut state = self.enter()?;
        state.change_at(directory)?;
        let state = &mut *state;
        for (_, file) in state.names.iter().filter(|(path, _)| path.parent() == Some(directory)) {
            let file = &mut state.files[*file];
            file.durable.clone_from(&file.content);
        }
        Ok(())
    }

    fn write_page(&self, path: &Path, number: u32, page: &PageBytes) -> io::Result<()> {
        let mut state = self.enter()?;
        state.change_at(path)?;
        self.meter.fetch_add(PAGE_BYTES as u64, Ordering::Relaxed);
        let file = state.file(path)?;
        let start = number as usize * PAGE_BYTES;
        let bytes = file.content.len().max(start + PAGE_BYTES);
        file.content.resize(bytes, 0);
        file.content[start..start + PAGE_BYTES].copy_from_slice(page);
        file.durable.clone_from(&file.content);
        Ok(())
    }

    fn free_bytes(&self, path: &Path) -> io::Result<u64> {
        let state = self.enter()?;
        let free = state.capacity.map_or(u64::MAX, |c| c.saturating_sub(state.used()));
        let rooms =
            state.mounts.iter().filter(|m| path.starts_with(&m.root)).filter_map(|m| m.room);
        Ok(rooms.fold(free, u64::min))
    }
}
