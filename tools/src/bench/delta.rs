//! `bench delta`: deltas of one row in a hundred are laid on flash, made live and swapped in while
//! requests are served. Windows without and with an update take turns, so that none owns a quiet
//! minute. Every request is drawn anew before its clock starts, so that some of its rows are read
//! from flash. One process does what the daemon does; never measures the link.

use super::{Bar, Machine, Report, written_bytes};
use crate::report;
use crate::report::metrics::{Latencies, Percentiles};
use crate::serve::{lay_on_flash, progress_bar};
use crate::workload::key_distributions::{ALPHA, BagSizes, Distribution, Workload};
use crate::workload::synthetic::pack_criteo_at;
use anyhow::{Context, Result, anyhow};
use clap::Args;
use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::Manifest;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::maintenance::throttle::rests;
use hatchback::model::budget::Budget;
use hatchback::model::cache_transfer::Transferred;
use hatchback::request::pipeline::RequestError;
use hatchback::request::serving::Serving;
use hatchback::request::worker::SystemClock;
use hatchback::schema::batch::Batch;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};

/// One row in so many changes from each generation to the next.
const CHANGED_ONE_IN: u64 = 100;
/// How far p99 may rise while an update is applied.
const P99_RATIO_MAX: f64 = 1.2;
/// Bytes written for each byte of what changed.
const AMPLIFICATION_MAX: f64 = 1.2;
const NAME: &str = "model";

/// Measures updates applied while requests are served
#[derive(Args, Debug)]
pub struct DeltaArgs {
    /// Rows of the largest tables of the synthetic model [default: 1900000, 10 million in all;
    /// quick: 100000]
    #[arg(long)]
    rows_max: Option<u64>,
    /// Deltas to apply one after the other [default: 5; quick: 2]
    #[arg(long)]
    deltas: Option<u64>,
    /// Samples in a request
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Embedding cache, MiB: smaller than the model, so that requests have misses [default: 64;
    /// quick: 8]
    #[arg(long)]
    cache_mib: Option<u64>,
    /// Least time of a window without an update
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Share of the time that applying may take, as `busy_percent_max` of a target
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=100))]
    busy_percent: u64,
    /// A smaller model, fewer deltas
    #[arg(long)]
    quick: bool,
    /// Where the model is laid on flash [default: a temporary folder]
    #[arg(long)]
    flash: Option<PathBuf>,
    /// Writes all figures as JSON (`-`: standard output, without the tables)
    #[arg(long)]
    json: Option<PathBuf>,
}

/// The figures of one update.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    /// The generation it leads to.
    pub sequence: u64,
    /// Rows that changed.
    pub rows: u64,
    /// Bytes of its bundle.
    pub bundle_bytes: u64,
    /// Bytes that were written to flash.
    pub written_bytes: u64,
    /// Bytes of what changed: keys and rows, and the network.
    pub changed_bytes: u64,
    /// From the bundle to live on flash, durable.
    pub install_s: f64,
    /// From live on flash to served, with warm caches.
    pub swap_s: f64,
    /// How long the swap kept requests from being submitted, µs.
    pub pause_us: f64,
    /// Rows of the warm caches.
    pub carried: Transferred,
    /// Latency of requests before.
    pub idle: Percentiles,
    /// Latency of requests meanwhile.
    pub applying: Percentiles,
    /// Share of lookups that the cache answered before.
    pub hit_rate_before: f64,
    /// The same of the new generation.
    pub hit_rate_after: f64,
}

/// Runs the command.
///
/// # Errors
/// A bundle is refused, a request failed, or a file cannot be written.
pub fn run(args: &DeltaArgs) -> Result<()> {
    let rows_max = args.rows_max.unwrap_or(if args.quick { 100_000 } else { 1_900_000 });
    let deltas = args.deltas.unwrap_or(if args.quick { 2 } else { 5 });
    let folder = tempfile::tempdir().context("a temporary folder")?;
    let place = args.flash.clone().unwrap_or_else(|| folder.path().join("flash"));
    let bundles = make(rows_max, deltas, folder.path())?;
    let flash = lay_on_flash(&bundles[0], &place)?;
    let budget = Budget {
        memory_bytes_max: 16 << 30,
        cache_bytes_max: args.cache_mib.unwrap_or(if args.quick { 8 } else { 64 }) << 20,
        batch_max: args.batch,
        ..Budget::default()
    };
    let serving =
        Serving::new(budget.memory_bytes_max, budget.reads_max, Arc::new(SystemClock::default()));
    serving.load(NAME, &flash, budget)?;
    let points = measure(args, &serving, &flash, &bundles[1..], budget)?;
    let name = flash.manifest().generation.to_string();
    let bars = bars(&points);
    publish(args, &Report { bench: "delta", machine: Machine::this(), model: name, bars, points })
}

/// A snapshot and so many deltas after it.
fn make(rows_max: u64, deltas: u64, folder: &Path) -> Result<Vec<PathBuf>> {
    let bar = progress_bar(0, "packing", "{human_pos}/{human_len} rows");
    let mut bundles: Vec<PathBuf> = Vec::new();
    for sequence in 1..=deltas + 1 {
        let out = folder.join(format!("{sequence}.hatch"));
        let parent = bundles.last().map(|bundle| -> Result<Flash> {
            let mut bundle = BundleReader::open(bundle)?;
            Ok(Flash::install(&disk::system(), &folder.join("parent"), &mut bundle, |_| ())?)
        });
        bar.set_position(0);
        pack_criteo_at(
            rows_max,
            (sequence, CHANGED_ONE_IN),
            parent.transpose()?.as_ref(),
            &out,
            &mut |n, all| {
                bar.set_length(all);
                bar.inc(n);
            },
        )?;
        bundles.push(out);
    }
    bar.finish_and_clear();
    let _ = std::fs::remove_dir_all(folder.join("parent"));
    Ok(bundles)
}

fn measure(
    args: &DeltaArgs,
    serving: &Serving,
    flash: &Flash,
    deltas: &[PathBuf],
    budget: Budget,
) -> Result<Vec<Point>> {
    let workload =
        Workload::new(flash, &Distribution::PowerLaw { alpha: ALPHA }, BagSizes::Full, 0)?;
    let samples = args.batch as usize;
    let mut caller =
        Caller { workload, batch: Batch::new(&flash.manifest().schema, samples), samples };
    let progress = progress_bar(deltas.len() as u64, "applying", "{pos}/{len} deltas");
    let least = Duration::try_from_secs_f64(args.seconds).context("--seconds")?;
    let rest = |caller: &mut Caller, time: Duration| {
        caller.beside(serving, move || {
            thread::sleep(time);
            Ok(())
        })
    };
    rest(&mut caller, least)?;
    let (mut points, mut window) = (Vec::new(), least);
    for delta in deltas {
        let before = serving.stats(NAME).unwrap_or_default().counters;
        let (idle, ()) = rest(&mut caller, window)?;
        let hit_rate_before =
            serving.stats(NAME).unwrap_or_default().counters.since(&before).hit_rate();
        let began = Instant::now();
        let (applying, mut point) =
            caller.beside(serving, || apply(serving, flash, delta, (budget, args.busy_percent)))?;
        window = began.elapsed().max(least);
        rest(&mut caller, least)?;
        (point.idle, point.applying) = (idle.percentiles(), applying.percentiles());
        point.hit_rate_before = hit_rate_before;
        point.hit_rate_after = serving.stats(NAME).unwrap_or_default().counters.hit_rate();
        points.push(point);
        progress.inc(1);
    }
    progress.finish_and_clear();
    Ok(points)
}

/// Who sends requests, one after the other.
struct Caller {
    workload: Workload,
    batch: Batch,
    samples: usize,
}

impl Caller {
    /// Sends requests for as long as `work` takes, and times them.
    fn beside<T: Send>(
        &mut self,
        serving: &Serving,
        work: impl FnOnce() -> Result<T> + Send,
    ) -> Result<(Latencies, T)> {
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            let worker = scope.spawn(|| {
                // As the daemon's update thread has it: behind every request.
                let idle = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);
                let _ =
                    set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, idle);
                let done = work();
                stop.store(true, Ordering::Release);
                done
            });
            let mut latencies = Latencies::default();
            while !stop.load(Ordering::Acquire) {
                self.workload.fill(&mut self.batch, self.samples)?;
                let sent = Instant::now();
                match serving.submit(NAME, &self.batch, None) {
                    Ok(ticket) => drop(ticket.wait()?),
                    Err(RequestError::Busy(_)) => thread::yield_now(),
                    Err(e) => return Err(e.into()),
                }
                latencies.record(sent.elapsed());
            }
            let done = worker.join().map_err(|_| anyhow!("the update panicked"))??;
            Ok((latencies, done))
        })
    }
}

fn apply(
    serving: &Serving,
    flash: &Flash,
    delta: &Path,
    (budget, busy_percent): (Budget, u64),
) -> Result<Point> {
    let (before, began) = (written_bytes()?, Instant::now());
    let mut bundle = BundleReader::open(delta)?;
    let clock = SystemClock::default();
    let rest = rests(busy_percent, &clock, thread::sleep);
    let installed = Flash::install(&disk::system(), flash.directory(), &mut bundle, |_| rest())?;
    let (install_s, written_bytes) = (began.elapsed().as_secs_f64(), written_bytes()? - before);
    let swapping = Instant::now();
    let swapped = serving.swap(NAME, &installed, budget, &rest)?;
    let (rows, changed_bytes) = changed(&installed)?;
    let none = Percentiles::default();
    Ok(Point {
        sequence: installed.manifest().generation.sequence,
        rows,
        bundle_bytes: std::fs::metadata(delta)?.len(),
        written_bytes,
        changed_bytes,
        install_s,
        swap_s: swapping.elapsed().as_secs_f64(),
        pause_us: swapped.pause.as_secs_f64() * 1e6,
        carried: swapped.carried,
        idle: none,
        applying: none,
        hit_rate_before: 0.0,
        hit_rate_after: 0.0,
    })
}

/// Rows of the newest deltas, and the bytes of their keys and rows and of the network.
fn changed(flash: &Flash) -> Result<(u64, u64)> {
    let manifest: &Manifest = flash.manifest();
    let (mut rows, mut bytes) = (0, manifest.blobs[manifest.dense as usize].raw_bytes());
    for (number, table) in manifest.schema.tables.iter().enumerate() {
        // A table of which nothing changed has an older delta last, or none.
        let deltas = &flash.record().live.tables[number].deltas;
        if deltas.last().is_none_or(|delta| delta.sequence != manifest.generation.sequence) {
            continue;
        }
        let of = flash.table(number)?;
        let newest = of.segments().last().map(|s| s.counts()).unwrap_or_default();
        rows += newest.rows;
        bytes += newest.rows * (8 + table.codec.row_bytes(table.dim as usize) as u64)
            + 8 * newest.deletes;
    }
    Ok((rows, bytes))
}

fn bars(points: &[Point]) -> Vec<Bar> {
    let worst = |of: fn(&Point) -> f64| points.iter().map(of).fold(0.0, f64::max);
    let mean =
        |of: fn(&Point) -> f64| points.iter().map(of).sum::<f64>() / points.len().max(1) as f64;
    let ratio = mean(|p| p.applying.p99_us) / mean(|p| p.idle.p99_us).max(1e-9);
    vec![
        Bar::at_most("p99 while applying, times that of idle", ratio, P99_RATIO_MAX),
        Bar::at_most(
            "longest pause of a swap, batches",
            worst(|p| p.pause_us / p.idle.p50_us),
            1.0,
        ),
        Bar::at_most(
            "bytes written for each byte that changed",
            worst(|p| p.written_bytes as f64 / p.changed_bytes.max(1) as f64),
            AMPLIFICATION_MAX,
        ),
    ]
}

fn publish(args: &DeltaArgs, report: &Report<Point>) -> Result<()> {
    if args.json.as_deref() != Some(Path::new("-")) {
        println!(
            "{}: deltas of one row in {CHANGED_ONE_IN}, {} samples a request",
            report.model, args.batch
        );
        let heads = [
            "to",
            "rows",
            "written",
            "install",
            "swap",
            "pause",
            "idle p99",
            "applying p99",
            "carried",
            "hits before",
            "after",
        ];
        let mut table = report::table(&heads);
        table.add_rows(report.points.iter().map(Point::cells));
        println!("{table}");
        report.bars.iter().for_each(|bar| println!("{bar}"));
    }
    args.json.as_ref().map_or(Ok(()), |path| report::write_json(path, report))
}

impl Point {
    fn cells(&self) -> [String; 11] {
        let us = |us: f64| report::micros(Duration::from_secs_f64(us / 1e6));
        [
            self.sequence.to_string(),
            report::count(self.rows),
            report::bytes(self.written_bytes),
            format!("{:.2} s", self.install_s),
            format!("{:.2} s", self.swap_s),
            us(self.pause_us),
            us(self.idle.p99_us),
            us(self.applying.p99_us),
            format!(
                "{} + {} read",
                report::count(self.carried.copied as u64),
                report::count(self.carried.read as u64)
            ),
            report::percent(self.hit_rate_before),
            report::percent(self.hit_rate_after),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hatchback::mix;

    #[test]
    fn what_changed_is_of_the_newest_generation() {
        let folder = tempfile::tempdir().unwrap();
        let (mut flash, place) = (None, folder.path().join("car"));
        for bundle in make(1000, 2, folder.path()).unwrap() {
            let mut bundle = BundleReader::open(&bundle).unwrap();
            flash = Some(Flash::install(&disk::system(), &place, &mut bundle, |_| ()).unwrap());
        }
        let flash = flash.unwrap();
        // As the synthetic model has it.
        let is_new = |number: u64, row: u64| {
            mix(row << 20 ^ number << 52 ^ 3).is_multiple_of(CHANGED_ONE_IN)
        };
        let tables = flash.manifest().schema.tables.iter().enumerate();
        let of = |(n, table): (usize, &hatchback::schema::Table)| {
            (0..table.rows).filter(|&row| is_new(n as u64, row)).count()
        };
        let rows: Vec<usize> = tables.map(of).collect();
        assert!(rows.contains(&0), "some tables are small");
        assert_eq!(changed(&flash).unwrap().0, rows.iter().sum::<usize>() as u64);
    }

    #[test]
    fn updates_are_applied_beside_requests() {
        let folder = tempfile::tempdir().unwrap();
        let json = folder.path().join("delta.json");
        let args = DeltaArgs {
            rows_max: Some(3_000),
            deltas: Some(1),
            batch: 2,
            cache_mib: Some(1),
            seconds: 0.2,
            busy_percent: 100,
            quick: true,
            flash: None,
            json: Some(json.clone()),
        };
        run(&args).unwrap();
        let report: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        let point = &report["points"][0];
        let carried = point["carried"]["copied"].as_u64().unwrap();
        assert!(
            carried > 100 && point["carried"]["read"].as_u64().unwrap() < carried / 20,
            "{point}"
        );
        assert!(point["rows"].as_u64().unwrap() > 100, "{point}");
        let hits = |when: &str| point[when].as_f64().unwrap();
        assert!(hits("hit_rate_before") < 1.0 && hits("hit_rate_after") < 1.0, "{point}");
        assert_eq!(report["bars"].as_array().unwrap().len(), 3);
    }
}
