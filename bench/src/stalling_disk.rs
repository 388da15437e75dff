//! A disk whose page reads stall, as those of a flash device do while it collects garbage. Every
//! other call goes straight to the system's disk. Never changes what is read.

use anyhow::Result;
use hatchback::bundle::BundleReader;
use hatchback::flash::Flash;
use hatchback::io::disk::{Disk, Input, Lock, Output, SystemDisk};
use hatchback::io::page::{AlignedPage, PageBytes};
use hatchback::io::reader::{PageFile, ReadMethod};
use hatchback::model::budget::Budget;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of the caches, per cent of the bytes of all rows: most requests read pages.
const CACHE_PERCENT: u64 = 10;

/// The system's disk with stalls.
#[derive(Clone, Default)]
pub struct StallingDisk {
    stalled_until: Arc<Mutex<Option<Instant>>>,
}

impl StallingDisk {
    /// Installs `bundle` into `directory` on this disk. Returns the disk, the flash directory and a
    /// budget whose caches hold `CACHE_PERCENT` of the bytes of all rows.
    ///
    /// # Errors
    /// The bundle cannot be read or installed.
    pub fn install(
        &self,
        bundle: &Path,
        directory: &Path,
    ) -> Result<(Arc<dyn Disk>, Flash, Budget)> {
        let disk: Arc<dyn Disk> = Arc::new(self.clone());
        let flash = Flash::install(&disk, directory, &mut BundleReader::open(bundle)?, |_| ())?;
        let tables = &flash.manifest().schema.tables;
        let rows_bytes: u64 = tables.iter().map(|table| table.row_bytes_total()).sum();
        let budget = Budget {
            memory_bytes_max: 4 << 30,
            cache_bytes_max: rows_bytes * CACHE_PERCENT / 100,
            ..Budget::default()
        };
        Ok((disk, flash, budget))
    }

    /// Stalls every page read until `until`.
    pub fn stall_until(&self, until: Instant) {
        *self.stalled_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(until);
    }

    /// Waits for the end of the stall.
    fn wait(&self) {
        let left = || {
            let until = *self.stalled_until.lock().unwrap_or_else(PoisonError::into_inner);
            until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
        };
        loop {
            match left() {
                Duration::ZERO => return,
                left => thread::sleep(left),
            }
        }
    }
}

/// A file of pages that waits for the end of a stall.
struct StallingPages {
    file: Arc<dyn PageFile>,
    disk: StallingDisk,
}

impl PageFile for StallingPages {
    fn bytes(&self) -> io::Result<u64> {
        self.file.bytes()
    }

    fn read_page(&self, number: u32, page: &mut AlignedPage) -> io::Result<()> {
        self.disk.wait();
        self.file.read_page(number, page)
    }

    fn system_file(&self) -> Option<&Arc<File>> {
        None
    }
}

impl Disk for StallingDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn Output>> {
        SystemDisk.create(path)
    }

    fn append(&self, path: &Path, bytes: u64) -> io::Result<Box<dyn Output>> {
        SystemDisk.append(path, bytes)
    }

    fn lock(&self, path: &Path, wait: Duration) -> io::Result<Option<Lock>> {
        SystemDisk.lock(path, wait)
    }

    fn open_pages(&self, path: &Path) -> io::Result<Arc<dyn PageFile>> {
        let file = SystemDisk.open_pages(path)?;
        Ok(Arc::new(StallingPages { file, disk: self.clone() }))
    }

    fn read_method(&self) -> ReadMethod {
        ReadMethod::Threads
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn Input>> {
        SystemDisk.open(path)
    }

    fn read(&self, path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
        SystemDisk.read(path, bytes_max)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        SystemDisk.rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        SystemDisk.remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        SystemDisk.remove_dir(path)
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        SystemDisk.create_dir(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        SystemDisk.list(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        SystemDisk.sync_dir(path)
    }

    fn sync_files_in(&self, directory: &Path) -> io::Result<()> {
        SystemDisk.sync_files_in(directory)
    }

    fn write_page(&self, path: &Path, number: u32, page: &PageBytes) -> io::Result<()> {
        SystemDisk.write_page(path, number, page)
    }

    fn free_bytes(&self, path: &Path) -> io::Result<u64> {
        SystemDisk.free_bytes(path)
    }
}
