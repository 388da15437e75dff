//! sled 0.34: a log-structured tree of pages.

use hatchback_bench::flash::store::{CACHE_BYTES, PeerStore, copy_each};
use hatchback_bench::flash::data::Data;
use anyhow::{Context, Result, ensure};
use sled::{Batch, Db, Mode};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Rows of a batch of the load.
const BATCH_ROWS: usize = 4096;

/// Memory of a load per row of 128 B, measured with 0.34.7. Cache size and flushes do not change
/// it.
const LOAD_BYTES: u64 = 2400;

/// Tries to lock a database that is still closing, and the time between them: 1 s in all.
const LOCK_WAITS: u32 = 200;
const LOCK_WAIT: Duration = Duration::from_millis(5);

/// An open database.
pub struct Sled {
    db: Db,
    folder: PathBuf,
}

impl Sled {
    /// Flushes and syncs. `flush` of 0.34 ends in `sync_file_range`, which does not flush the
    /// device's cache, so a sync follows.
    fn sync(&self) -> Result<()> {
        self.db.flush()?;
        Ok(File::open(self.folder.join("db"))?.sync_all()?)
    }
}

impl PeerStore for Sled {
    fn load(folder: &Path, data: &Data) -> Result<()> {
        let (need, free) = (data.rows * LOAD_BYTES >> 20, free_mib()?);
        ensure!(
            need <= free,
            "loading so many rows takes {need} MiB of memory, and {free} MiB are free"
        );
        let store = Self::open(folder, data)?;
        let (mut batch, mut rows) = (Batch::default(), 0);
        data.each_row(|order, row| {
            batch.insert(&order.to_be_bytes(), row);
            rows += 1;
            if rows == BATCH_ROWS {
                rows = 0;
                store.db.apply_batch(std::mem::take(&mut batch))?;
            }
            Ok(())
        })?;
        store.db.apply_batch(batch)?;
        store.sync()
    }

    fn open(folder: &Path, _: &Data) -> Result<Self> {
        let config = sled::Config::new()
            .path(folder)
            .cache_capacity(CACHE_BYTES as u64)
            .mode(Mode::HighThroughput);
        let mut opened = config.open();
        // sled releases its lock some time after the close, when its threads have ended.
        for _ in 0..LOCK_WAITS {
            match &opened {
                Err(e) if e.to_string().contains("could not acquire lock") => {
                    std::thread::sleep(LOCK_WAIT)
                }
                _ => break,
            }
            opened = config.open();
        }
        Ok(Self { db: opened?, folder: folder.to_owned() })
    }

    fn read(&self, orders: &[u64], out: &mut [u8]) -> Result<()> {
        copy_each(orders, out, |order| Ok(self.db.get(order.to_be_bytes())?))
    }

    fn update(&self, data: &Data) -> Result<()> {
        let mut batch = Batch::default();
        data.each_changed(|order, row| {
            batch.insert(&order.to_be_bytes(), row);
            Ok(())
        })?;
        self.db.apply_batch(batch)?;
        self.sync()
    }
}

/// Returns the available memory of the system, MiB.
fn free_mib() -> Result<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    let kib = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = kib.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(kib.context("/proc/meminfo: no MemAvailable")? >> 10)
}
