//! sled 0.34: a log-structured tree of pages.

use super::store::{CACHE_BYTES, Store, copy_each};
use crate::bench::flash::data::Data;
use anyhow::{Context, Result, ensure};
use sled::{Batch, Db, Mode};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Rows of a batch of the load.
const BATCH_ROWS: usize = 4096;

/// What a load takes in memory for each row of 128 B, whatever the cache's size and however often
/// it is flushed: measured with 0.34.7.
const LOAD_BYTES: u64 = 2400;

/// How often, and how far apart, to ask for the lock of a database that is being closed: 1 s in
/// all.
const LOCK_WAITS: u32 = 200;
const LOCK_WAIT: Duration = Duration::from_millis(5);

/// An open database.
pub struct Sled {
    db: Db,
    folder: PathBuf,
}

impl Sled {
    /// `flush` of 0.34 ends in `sync_file_range`, which leaves the device's cache alone; so a sync
    /// follows.
    fn sync(&self) -> Result<()> {
        self.db.flush()?;
        Ok(File::open(self.folder.join("db"))?.sync_all()?)
    }
}

impl Store for Sled {
    fn load(folder: &Path, data: &Data) -> Result<()> {
        let (need, free) = (data.rows * LOAD_BYTES >> 20, free_mib()?);
        ensure!(
            need <= free,
            "it takes {need} MiB of memory to load so many rows, and {free} are free"
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
        // It gives up its lock some time after it is closed, when its threads are done.
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

/// Memory that the system can still give, in MiB.
fn free_mib() -> Result<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    let kib = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = kib.and_then(|rest| rest.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(kib.context("/proc/meminfo: no MemAvailable")? >> 10)
}
