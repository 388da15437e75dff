//! Hatchback beside the raw device: reads, updates and compacts a table that is a segment on flash.
//! Device and table take turns batch by batch, so that noise of the machine affects both alike.
//! Never measures a peer.

use super::data::{Data, Draw};
use super::fetch::{Fetcher, PageContent};
use super::figures::{Figures, OURS, RAW, measure};
use super::plan::{FlashPlan, MISSES, median, per_second};
use super::table::{self, TableFiles};
use anyhow::{Context, Result, anyhow};
use hatchback::flash::merge::Merge;
use hatchback::flash::segment::writer::SegmentWriter;
use hatchback::flash::segment::{Counts, Part};
use hatchback::flash::table::TableRows;
use hatchback::io::atomic_write;
use hatchback::io::disk::{self, Disk, Output};
use hatchback::limits::PAGE_BYTES;
use hatchback_tools::report::metrics::{Latencies, Percentiles};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

/// Reads in flight on the raw device.
const RAW_DEPTHS: [usize; 4] = [1, 4, 16, 64];
/// Reads in flight on the table.
const DEPTHS: [usize; 2] = [16, 64];
/// Bytes per second that a compaction may read, and so write.
const COMPACTION_BYTES_PER_S: f64 = 20e6;
/// Pages that a compaction reads in one step.
const STEP_PAGES: u64 = 64;
/// Turns of idle reads and of reads during a compaction.
const TURNS: usize = 20;
/// Rounds of the comparison with the raw device, in multiples of the plan's rounds. Shared devices
/// have slow seconds.
const BESIDE_RAW: usize = 12;

/// The files of one table.
pub struct OurTable<'a> {
    data: &'a Data,
    plan: &'a FlashPlan,
    folder: &'a Path,
    disk: Arc<dyn Disk>,
    draw: Draw,
    out: Vec<u8>,
}

impl<'a> OurTable<'a> {
    /// Returns the table of `data` in `folder`. Nothing is written yet.
    ///
    /// # Errors
    /// The table has no rows.
    pub fn new(data: &'a Data, plan: &'a FlashPlan, folder: &'a Path) -> Result<Self> {
        Ok(Self {
            data,
            plan,
            folder,
            disk: disk::system(),
            draw: Draw::new(*data, 1)?,
            out: Vec::new(),
        })
    }

    /// Measures everything.
    ///
    /// # Errors
    /// A file cannot be written or read, or contains a wrong row.
    pub fn measure(&mut self, figures: &mut Figures) -> Result<()> {
        let row_bytes = (self.data.rows * self.data.row_bytes as u64) as f64;
        let (seconds, counts) = self.write(Part::Base)?;
        figures.put(OURS, measure::LOAD, seconds);
        figures.put(OURS, measure::SPACE, counts.file_bytes() as f64 / row_bytes);
        figures.put(OURS, measure::REOPEN, self.reopen(Version::Loaded)?);

        let rows = self.open(Version::Loaded)?;
        let index_bits = 8.0 * rows.index_bytes() as f64 / self.data.rows as f64;
        figures.put(OURS, measure::INDEX_BITS, index_bits);
        self.batches(&rows, figures)?;
        self.points(&rows, figures)?;
        drop(rows);

        self.update(figures)?;
        self.compaction(figures)
    }

    fn path(&self, part: Part) -> PathBuf {
        self.folder.join(if part == Part::Base { "base.seg" } else { "delta.seg" })
    }

    /// Writes a segment durably. Returns the seconds that the write took, and its counts.
    fn write(&self, part: Part) -> Result<(f64, Counts)> {
        let (path, start) = (self.path(part), Instant::now());
        let each = |put: table::Put<'_>| match part {
            Part::Base => self.data.each_row(put),
            _ => self.data.each_changed(put),
        };
        let counts = table::write(self.disk.as_ref(), &path, self.data, part, each)?;
        self.disk.sync_dir(self.folder)?;
        Ok((start.elapsed().as_secs_f64(), counts))
    }

    fn open(&self, version: Version) -> Result<TableRows> {
        let base = self.path(Part::Base);
        let delta = (version == Version::Updated).then(|| self.path(Part::Delta));
        let files = TableFiles { base: &base, delta: delta.as_deref() };
        table::open(self.disk.as_ref(), self.data, &files)
    }

    /// Returns the median time of an open, ms.
    fn reopen(&self, version: Version) -> Result<f64> {
        let one = || {
            let start = Instant::now();
            self.open(version).map(|_| 1e3 * start.elapsed().as_secs_f64())
        };
        Ok(median((0..5).map(|_| one()).collect::<Result<_>>()?))
    }

    /// Reads one batch and checks its rows. Returns the time of the read and the pages read.
    fn batch(
        &mut self,
        rows: &TableRows,
        fetcher: &mut Fetcher,
        keys: &[u64],
        version: Version,
    ) -> Result<(Duration, u64)> {
        self.out.clear();
        self.out.resize(keys.len() * self.data.row_bytes, 0);
        let start = Instant::now();
        let pages = fetcher.fetch(rows, keys, &mut self.out)?;
        let time = start.elapsed();
        self.data.check(keys, version as u64, &self.out)?;
        Ok((time, pages))
    }

    /// Measures the device at each of its depths, and uniform and Zipf keys at the table's depths.
    fn batches(&mut self, rows: &TableRows, figures: &mut Figures) -> Result<()> {
        for depth in RAW_DEPTHS {
            let mut fetcher = Fetcher::new(depth);
            if DEPTHS.contains(&depth) {
                self.beside_raw(rows, &mut fetcher, depth, figures)?;
                let zipf = (0..self.plan.rounds).map(|_| {
                    let keys = self.draw.zipf(self.plan.batch);
                    let (time, _) = self.batch(rows, &mut fetcher, &keys, Version::Loaded)?;
                    Ok(per_second(keys.len() as u64, time))
                });
                let zipf = zipf.collect::<Result<_>>()?;
                figures.put_at(OURS, measure::ZIPF, depth, median(zipf));
            } else {
                let rounds = 0..self.plan.rounds;
                let rates = rounds.map(|_| self.raw(rows, &mut fetcher, PageContent::Ignored));
                let rates = rates.collect::<Result<_>>()?;
                figures.put_at(RAW, measure::RAW_PAGES, depth, median(rates));
            }
        }
        Ok(())
    }

    /// Reads one batch of pages from the device. Returns pages per second.
    fn raw(
        &mut self,
        rows: &TableRows,
        fetcher: &mut Fetcher,
        content: PageContent,
    ) -> Result<f64> {
        let segment = &rows.segments()[0];
        let pages = self.draw.pages(self.plan.batch, segment.counts().data_pages);
        let start = Instant::now();
        fetcher.raw(segment.file(), &pages, content)?;
        Ok(per_second(pages.len() as u64, start.elapsed()))
    }

    /// Reads the pages of one request's misses from the device. Returns the time.
    fn raw_misses(&mut self, rows: &TableRows, fetcher: &mut Fetcher) -> Result<Duration> {
        let segment = &rows.segments()[0];
        let pages = self.draw.pages(MISSES, segment.counts().data_pages);
        let start = Instant::now();
        fetcher.raw(segment.file(), &pages, PageContent::Ignored)?;
        Ok(start.elapsed())
    }

    /// Reads the rows of one batch of uniform keys. Returns keys and pages per second.
    fn cold(&mut self, rows: &TableRows, fetcher: &mut Fetcher) -> Result<(f64, f64)> {
        let keys = self.draw.uniform(self.plan.batch);
        let (time, pages) = self.batch(rows, fetcher, &keys, Version::Loaded)?;
        Ok((per_second(keys.len() as u64, time), per_second(pages, time)))
    }

    /// Measures the device, with bytes ignored and loaded, and uniform keys in turns. The order of
    /// the turns rotates from round to round.
    fn beside_raw(
        &mut self,
        rows: &TableRows,
        fetcher: &mut Fetcher,
        depth: usize,
        figures: &mut Figures,
    ) -> Result<()> {
        const WARM_UP: usize = 2;
        let (mut ignored, mut loaded, mut uniform) = (vec![], vec![], vec![]);
        for round in 0..BESIDE_RAW * self.plan.rounds + WARM_UP {
            for turn in 0..3 {
                match (round + turn) % 3 {
                    0 => ignored.push(self.raw(rows, fetcher, PageContent::Ignored)?),
                    1 => loaded.push(self.raw(rows, fetcher, PageContent::Loaded)?),
                    _ => uniform.push(self.cold(rows, fetcher)?),
                }
            }
        }
        ignored.drain(..WARM_UP);
        loaded.drain(..WARM_UP);
        uniform.drain(..WARM_UP);

        let share = |of: &[f64]| median(uniform.iter().zip(of).map(|(u, raw)| u.1 / raw).collect());
        figures.put_at(OURS, measure::OF_RAW, depth, share(&loaded));
        figures.put_at(OURS, measure::OF_IGNORED, depth, share(&ignored));
        figures.put_at(RAW, measure::RAW_PAGES, depth, median(ignored));
        figures.put_at(RAW, measure::RAW_LOADED, depth, median(loaded));
        figures.put_at(OURS, measure::COLD, depth, median(uniform.iter().map(|u| u.0).collect()));
        Ok(())
    }

    /// Times the reads of `reads` and adds their latencies to `latencies`.
    fn latencies(
        &mut self,
        rows: &TableRows,
        fetcher: &mut Fetcher,
        reads: Reads,
        latencies: &mut Latencies,
    ) -> Result<()> {
        for _ in 0..reads.count {
            let keys = self.draw.uniform(reads.keys);
            latencies.record(self.batch(rows, fetcher, &keys, reads.version)?.0);
        }
        Ok(())
    }

    /// Measures reads of one key.
    fn points(&mut self, rows: &TableRows, figures: &mut Figures) -> Result<()> {
        let mut found = Latencies::default();
        let reads = Reads { keys: 1, count: self.plan.point_reads, version: Version::Loaded };
        self.latencies(rows, &mut Fetcher::new(1), reads, &mut found)?;

        let Percentiles { p50_us, p99_us, .. } = found.percentiles();
        figures.put_at(OURS, measure::POINT_P50, 1, p50_us);
        figures.put_at(OURS, measure::POINT_P99, 1, p99_us);
        Ok(())
    }

    /// Measures a delta of one row in a hundred. The bench commits the delta as an install does: it
    /// replaces one record atomically.
    fn update(&mut self, figures: &mut Figures) -> Result<()> {
        let start = Instant::now();
        let (_, counts) = self.write(Part::Delta)?;
        atomic_write::replace(self.disk.as_ref(), &self.folder.join("live"), &[0; PAGE_BYTES])?;
        figures.put(OURS, measure::UPDATE, start.elapsed().as_secs_f64());

        let written = counts.file_bytes() + PAGE_BYTES as u64;
        let changed = counts.rows * self.data.row_bytes as u64;
        figures.put(OURS, measure::UPDATE_AMP, written as f64 / changed.max(1) as f64);
        figures.put(OURS, measure::REOPEN_UPDATED, self.reopen(Version::Updated)?);

        let rows = self.open(Version::Updated)?;
        for depth in DEPTHS {
            let mut fetcher = Fetcher::new(depth);
            let mut rates = Vec::new();
            for _ in 0..self.plan.rounds {
                let keys = self.draw.uniform(self.plan.batch);
                let (time, _) = self.batch(&rows, &mut fetcher, &keys, Version::Updated)?;
                rates.push(per_second(keys.len() as u64, time));
            }
            figures.put_at(OURS, measure::COLD_UPDATED, depth, median(rates));
        }
        Ok(())
    }

    /// Measures the misses of requests in turns: alone, beside as many raw pages, and while another
    /// thread compacts.
    fn compaction(&mut self, figures: &mut Figures) -> Result<()> {
        let rows = self.open(Version::Updated)?;
        let [mut idle, mut busy, mut raw] = [(); 3].map(|()| Latencies::default());
        let mut fetcher = Fetcher::new(16);
        let count = self.plan.requests.div_ceil(TURNS);
        let reads = Reads { keys: MISSES, count, version: Version::Updated };

        let job = Compactor {
            data: *self.data,
            base: self.path(Part::Base),
            delta: self.path(Part::Delta),
            out: self.folder.join("compacted.seg"),
            state: AtomicU8::new(PAUSED),
        };

        let rate = std::thread::scope(|scope| {
            let thread = scope.spawn(|| job.run());
            let read = (0..TURNS).try_for_each(|_| {
                for _ in 0..count {
                    self.latencies(&rows, &mut fetcher, Reads { count: 1, ..reads }, &mut idle)?;
                    raw.record(self.raw_misses(&rows, &mut fetcher)?);
                }
                job.state.store(RUNNING, Ordering::Relaxed);
                let read = self.latencies(&rows, &mut fetcher, reads, &mut busy);
                job.state.store(PAUSED, Ordering::Relaxed);
                read
            });
            job.state.store(ENDING, Ordering::Relaxed);
            let rate = thread.join().map_err(|_| anyhow!("the compaction panicked"))?;
            read.and(rate)
        })?;

        let (idle, busy) = (idle.percentiles(), busy.percentiles());
        figures.put_at(RAW, measure::RAW_MISSES_P99, 16, raw.percentiles().p99_us);
        figures.put_at(OURS, measure::MISSES_P50, 16, idle.p50_us);
        figures.put_at(OURS, measure::MISSES_P99, 16, idle.p99_us);
        figures.put_at(OURS, measure::COMPACTING_P50, 16, busy.p50_us);
        figures.put_at(OURS, measure::COMPACTING_P99, 16, busy.p99_us);
        figures.put_at(OURS, measure::COMPACTION_RATE, 16, rate);
        Ok(())
    }
}

/// The state of the table that a read must see; also the number of its updates.
#[derive(Clone, Copy, PartialEq)]
enum Version {
    Loaded = 0,
    Updated = 1,
}

/// Some reads of uniform keys.
#[derive(Clone, Copy)]
struct Reads {
    /// Keys per read.
    keys: usize,
    /// Number of reads.
    count: usize,
    version: Version,
}

/// States of [`Compactor`].
const PAUSED: u8 = 0;
const RUNNING: u8 = 1;
const ENDING: u8 = 2;

/// Compacts base and delta at a fixed rate, again and again until the state is `ENDING`.
struct Compactor {
    data: Data,
    base: PathBuf,
    delta: PathBuf,
    out: PathBuf,
    state: AtomicU8,
}

/// The work of a compaction, and the time in which it ran.
#[derive(Default)]
struct CompactionWork {
    bytes: u64,
    time: Duration,
}

impl Compactor {
    /// Returns the megabytes written per second of running.
    fn run(&self) -> Result<f64> {
        let mut done = CompactionWork::default();
        // At least one pass runs, so the file below exists.
        loop {
            self.pass(&mut done)?;
            if self.state.load(Ordering::Relaxed) == ENDING {
                break;
            }
        }
        disk::system().remove_file(&self.out)?;
        Ok(done.bytes as f64 / 1e6 / done.time.as_secs_f64())
    }

    /// Compacts once, in the steps of `hatchback::maintenance::compact`.
    fn pass(&self, done: &mut CompactionWork) -> Result<()> {
        let disk = disk::system();
        let files = TableFiles { base: &self.base, delta: Some(&self.delta) };
        let rows = table::open(disk.as_ref(), &self.data, &files)?;
        let mut merge = Merge::new(rows);
        let out: Box<dyn Output> =
            disk.create(&self.out).context(self.out.display().to_string())?;
        let mut writer = SegmentWriter::new(out, table::kind(&self.data, Part::Base)?);

        loop {
            match self.state.load(Ordering::Relaxed) {
                PAUSED => std::thread::sleep(Duration::from_micros(100)),
                RUNNING => {
                    let start = Instant::now();
                    let before = merge.pages_read();
                    while merge.pages_read() < before + STEP_PAGES {
                        let Some((order, row)) = merge.current()? else {
                            writer.finish()?.0.sync()?;
                            return Ok(());
                        };
                        writer.push(order, row)?;
                        merge.advance()?;
                    }
                    done.bytes += (merge.pages_read() - before) * PAGE_BYTES as u64;
                    let due = Duration::from_secs_f64(done.bytes as f64 / COMPACTION_BYTES_PER_S);
                    std::thread::sleep(due.saturating_sub(done.time + start.elapsed()));
                    done.time += start.elapsed();
                }
                _ => return Ok(()),
            }
        }
    }
}
