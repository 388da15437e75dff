//! The operations of a row store, and the measurement of one: load it, reopen it with its files out
//! of the page cache, read it in batches, update it durably. The bench checks every row. Never
//! tunes a store against its documentation.

use crate::flash::data::{Data, Draw};
use crate::flash::figures::{Figures, measure};
use crate::flash::plan::{FlashPlan, MISSES, median, per_second};
use crate::results::written_bytes;
use anyhow::{Context, Result, anyhow};
use hatchback::limits::PAGE_BYTES;
use hatchback::mix;
use hatchback_tools::report::metrics::{Latencies, Percentiles};
use rustix::fs::{Advice, fadvise};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Bytes of the block cache of every peer that has one.
pub const CACHE_BYTES: usize = 256 << 20;

/// A row store. Its keys are the orders (key hashes) of the rows, so that a load ascends: the
/// fastest load of every store.
pub trait PeerStore: Sized + Sync {
    /// Writes all rows durably into an empty folder, by the documented bulk load.
    ///
    /// # Errors
    /// The store refuses.
    fn load(folder: &Path, data: &Data) -> Result<()>;

    /// Opens the files of `load`.
    ///
    /// # Errors
    /// The store refuses.
    fn open(folder: &Path, data: &Data) -> Result<Self>;

    /// Copies the rows of ascending `orders` to `out`, `[orders, row_bytes]`.
    ///
    /// # Errors
    /// The store refuses, or a row is missing.
    fn read(&self, orders: &[u64], out: &mut [u8]) -> Result<()>;

    /// Writes the first update durably.
    ///
    /// # Errors
    /// The store refuses.
    fn update(&self, data: &Data) -> Result<()>;
}

/// Measures one store.
///
/// # Errors
/// The store refuses or returns a wrong row.
pub fn measure<S: PeerStore>(
    data: &Data,
    plan: &FlashPlan,
    folder: &Path,
    name: &'static str,
) -> Result<Figures> {
    let mut figures = Figures::default();
    fs::create_dir_all(folder)?;

    let start = Instant::now();
    S::load(folder, data).context("load")?;
    figures.put(name, measure::LOAD, start.elapsed().as_secs_f64());
    let row_bytes = (data.rows * data.row_bytes as u64) as f64;
    figures.put(name, measure::SPACE, bytes_of(folder)? as f64 / row_bytes);

    let mut batches =
        Batches { data, draw: Draw::new(*data, 1)?, out: Vec::new(), batch: plan.batch };
    batches.cold::<S>(folder, plan, &mut figures, name)?;
    let store = S::open(folder, data)?;
    let keys = batches.draw.uniform(plan.batch);
    batches.read(&store, &keys, false)?;
    let rates =
        (0..plan.rounds).map(|_| batches.read(&store, &keys, false)).collect::<Result<_>>()?;
    figures.put(name, measure::WARM, median(rates));

    let (start, before) = (Instant::now(), written_bytes()?);
    store.update(data).context("update")?;
    figures.put(name, measure::UPDATE, start.elapsed().as_secs_f64());
    let keys = batches.draw.uniform(4 * plan.batch);
    batches.read(&store, &keys, true).context("after the update")?;

    // The store's background writes count too, as far as they end before it is closed.
    drop(store);
    let changed = data.changed() * data.row_bytes as u64;
    figures.put(
        name,
        measure::UPDATE_AMP,
        (written_bytes()? - before) as f64 / changed.max(1) as f64,
    );
    Ok(figures)
}

/// Some cold reads of uniform keys.
#[derive(Clone, Copy)]
struct ColdReads {
    /// Keys per read.
    keys: usize,
    /// Number of reads.
    count: usize,
    threads: usize,
}

/// Batch reads from a store.
struct Batches<'a> {
    data: &'a Data,
    draw: Draw,
    out: Vec<u8>,
    batch: usize,
}

impl Batches<'_> {
    /// Measures all cold reads.
    fn cold<S: PeerStore>(
        &mut self,
        folder: &Path,
        plan: &FlashPlan,
        figures: &mut Figures,
        name: &'static str,
    ) -> Result<()> {
        let (mut opens, mut latencies) = (Vec::new(), Latencies::default());
        for (threads, measure) in [(1, measure::COLD), (2, measure::COLD_TWO)] {
            let reads = ColdReads { keys: self.batch, count: plan.rounds, threads };
            let times = self.cold_reads::<S>(folder, reads, &mut opens)?;
            let rates = times.into_iter().map(|time| per_second(self.batch as u64, time)).collect();
            figures.put(name, measure, median(rates));
        }

        let reads = ColdReads { keys: MISSES, count: plan.requests / 4, threads: 1 };
        let requests = self.cold_reads::<S>(folder, reads, &mut opens)?;
        requests.into_iter().for_each(|time| latencies.record(time));
        let Percentiles { p50_us, p99_us, .. } = latencies.percentiles();
        figures.put(name, measure::MISSES_P50, p50_us);
        figures.put(name, measure::MISSES_P99, p99_us);
        figures.put(name, measure::REOPEN, median(opens));
        Ok(())
    }

    /// Returns the times of `reads`, whose rows are not in memory: before the reads have loaded an
    /// eighth of the table, the bench closes the store and drops its files from the page cache. The
    /// first batch after a reopen does not count. Adds the times of the reopens, in ms, to `opens`.
    fn cold_reads<S: PeerStore>(
        &mut self,
        folder: &Path,
        reads: ColdReads,
        opens: &mut Vec<f64>,
    ) -> Result<Vec<Duration>> {
        let pages = self.data.rows * self.data.row_bytes as u64 / PAGE_BYTES as u64;
        let in_a_row = (pages / 8 / reads.keys as u64).max(1) as usize;
        let mut times = Vec::new();
        while times.len() < reads.count {
            drop_cached(folder)?;
            let start = Instant::now();
            let store = S::open(folder, self.data).context("reopen")?;
            opens.push(1e3 * start.elapsed().as_secs_f64());
            for round in 0..=in_a_row.min(reads.count - times.len()) {
                let keys = self.draw.uniform(reads.keys);
                let time = self.read_by(reads.threads, &store, &keys, false)?;
                times.extend((round > 0).then_some(time));
            }
        }
        Ok(times)
    }

    /// Reads one batch and checks its rows. Returns rows per second.
    fn read<S: PeerStore>(&mut self, store: &S, keys: &[u64], updated: bool) -> Result<f64> {
        Ok(per_second(keys.len() as u64, self.read_by(1, store, keys, updated)?))
    }

    /// Reads one batch in one part per thread and checks its rows. Returns the time of the reads.
    fn read_by<S: PeerStore>(
        &mut self,
        threads: usize,
        store: &S,
        keys: &[u64],
        updated: bool,
    ) -> Result<Duration> {
        let mut keys = keys.to_vec();
        self.out.clear();
        self.out.resize(keys.len() * self.data.row_bytes, 0);

        let start = Instant::now();
        keys.sort_unstable_by_key(|k| mix(*k));
        let orders: Vec<u64> = keys.iter().map(|k| mix(*k)).collect();
        let part = orders.len().div_ceil(threads);
        let mut parts = orders.chunks(part).zip(self.out.chunks_mut(part * self.data.row_bytes));
        let first = parts.next();
        std::thread::scope(|scope| -> Result<()> {
            let others: Vec<_> =
                parts.map(|(orders, out)| scope.spawn(move || store.read(orders, out))).collect();
            first.map_or(Ok(()), |(orders, out)| store.read(orders, out))?;
            let panicked = || anyhow!("a reading thread panicked");
            others.into_iter().try_for_each(|t| t.join().map_err(|_| panicked())?)
        })?;
        let time = start.elapsed();
        self.data.check(&keys, u64::from(updated), &self.out)?;
        Ok(time)
    }
}

/// Copies the row that `get` returns for each order to `out`.
///
/// # Errors
/// A row is missing or has another length.
pub fn copy_each<R: AsRef<[u8]>>(
    orders: &[u64],
    out: &mut [u8],
    mut get: impl FnMut(u64) -> Result<Option<R>>,
) -> Result<()> {
    let row_bytes = out.len() / orders.len().max(1);
    for (order, row) in orders.iter().zip(out.chunks_exact_mut(row_bytes.max(1))) {
        let found = get(*order)?.with_context(|| format!("no row for order {order:#018x}"))?;
        put(row, found.as_ref())?;
    }
    Ok(())
}

/// Copies `row` to `to`.
///
/// # Errors
/// The lengths differ.
pub fn put(to: &mut [u8], row: &[u8]) -> Result<()> {
    anyhow::ensure!(row.len() == to.len(), "a row of {} bytes instead of {}", row.len(), to.len());
    to.copy_from_slice(row);
    Ok(())
}

/// Returns every file in a folder and its subfolders.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(files(&path)?);
        } else {
            found.push(path);
        }
    }
    Ok(found)
}

/// Returns the bytes that the files occupy, without holes.
fn bytes_of(folder: &Path) -> Result<u64> {
    files(folder)?.iter().map(|path| Ok(512 * fs::metadata(path)?.blocks())).sum()
}

/// Syncs the files and drops them from the page cache.
fn drop_cached(folder: &Path) -> Result<()> {
    for path in files(folder)? {
        let file = File::open(&path).with_context(|| path.display().to_string())?;
        file.sync_all()?;
        fadvise(&file, 0, None, Advice::DontNeed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_and_dropped() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("a")).unwrap();
        fs::write(folder.path().join("a/b"), [1; 5000]).unwrap();
        fs::write(folder.path().join("c"), [1; 5000]).unwrap();
        assert_eq!(files(folder.path()).unwrap().len(), 2);
        drop_cached(folder.path()).unwrap();
        assert!(bytes_of(folder.path()).unwrap() >= 2 * 5000);
    }

    #[test]
    fn rows_are_copied_or_missed() {
        let mut out = [0; 4];
        let get = |order: u64| Ok((order < 3).then_some([order as u8; 2]));
        copy_each(&[1, 2], &mut out, get).unwrap();
        assert_eq!(out, [1, 1, 2, 2]);
        assert!(copy_each(&[1, 3], &mut out, get).is_err());
        assert!(put(&mut out, &[1]).is_err());
    }
}
