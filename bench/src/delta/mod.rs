//! `bench delta`: installs deltas of one row in a hundred and swaps them in while callers send
//! requests. Half of the updates meet callers that never pause, the other half callers that send at
//! a stated part of the full rate. A window without an update goes before each update, and one
//! after it, so that a quiet minute of the machine favours neither. The callers draw every request
//! before its clock starts, so some rows come from flash. One process plays the daemon. Never
//! measures the link.

mod args;
pub mod callers;
mod figures;

pub use self::args::DeltaArgs;
use self::callers::{CurrentStep, PacedCaller, Step, send_during};
use self::figures::{AtLoad, CHANGED_ONE_IN, UpdateFigures, Windows, bars, publish};
use super::bars::Bar;
use super::load::serving;
use super::results::{
    BenchReport, HostMachine, open_files, resident_memory, restart_peak, written_bytes,
};
use anyhow::{Context, Result, bail};
use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::Manifest;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::maintenance::background::{Background, outside_idle_class};
use hatchback::maintenance::share::{BusyBounds, Urgency};
use hatchback::model::budget::Budget;
use hatchback::request::serving::{Served, Serving};
use hatchback::schema::MissPolicy;
use hatchback_tools::report::metrics::Percentiles;
use hatchback_tools::serve::{install, progress_bar};
use hatchback_tools::workload::synthetic::{SyntheticGeneration, pack_criteo_at};
use rustix::time::{ClockId, clock_gettime};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Largest drift of memory and latency over many swaps, in multiples of the first.
const FLAT_BAR: f64 = 1.02;
/// Swaps at each end of many swaps that are compared.
const SWAPS_COMPARED: usize = 100;
/// Windows that fill the cache before the first update.
const WARM_WINDOWS: u32 = 5;
/// Name of the served model.
const NAME: &str = "model";

/// Runs the measurement.
///
/// # Errors
/// The runtime refuses a bundle, a request fails, or a file cannot be written.
pub fn run(args: &DeltaArgs) -> Result<()> {
    let rows_max = args.rows_max.unwrap_or(if args.quick { 100_000 } else { 1_900_000 });
    let deltas = args.deltas.unwrap_or(if args.quick { 4 } else { 20 });
    let folder = tempfile::tempdir().context("a temporary folder")?;
    let place = args.flash.clone().unwrap_or_else(|| folder.path().join("flash"));
    let kept = args.bundles.as_deref().unwrap_or(folder.path());
    std::fs::create_dir_all(kept).with_context(|| kept.display().to_string())?;
    let bundles = pack_generations(rows_max, deltas, [MissPolicy::Wait; 2], kept)?;
    let flash = install(&bundles[0], &place)?;

    let budget = Budget {
        memory_bytes_max: 16 << 30,
        cache_bytes_max: all_rows_bytes(&flash) * args.cache_percent / 100,
        batch_max: args.batch,
        ..Budget::default()
    };
    let serving = serving(&budget);
    let served = serving.load(NAME, &flash, budget)?;
    let busy = BusyBounds { percent_min: args.busy_percent_min, percent_max: args.busy_percent };
    let updates = Updates { serving: &serving, served, flash: &flash, budget, busy };
    let Measured { points, loads, last } = measure(args, &updates, &bundles[1..])?;
    let mut bars = bars(&points, &loads);
    if args.swaps > 0 {
        bars.extend(swap_often(args, &updates, &last)?);
    }

    let (machine, model) = (HostMachine::this(), flash.manifest().generation.to_string());
    publish(args, &BenchReport { bench: "delta", machine, model, bars, points }, &loads)
}

/// Returns the bytes of all rows of the model.
fn all_rows_bytes(flash: &Flash) -> u64 {
    flash.manifest().schema.tables.iter().map(|table| table.row_bytes_total()).sum()
}

/// Packs a snapshot and `deltas` deltas that follow it. `misses` are the miss policies of the
/// tables with even and with odd numbers. Packs nothing if `folder` has the last one already.
///
/// # Errors
/// A bundle cannot be written.
pub fn pack_generations(
    rows_max: u64,
    deltas: u64,
    misses: [MissPolicy; 2],
    folder: &Path,
) -> Result<Vec<PathBuf>> {
    let bundle_path = |sequence: u64| folder.join(format!("{sequence}.hatch"));
    if bundle_path(deltas + 1).exists() {
        return Ok((1..=deltas + 1).map(bundle_path).collect());
    }

    let bar = progress_bar(0, "packing", "{human_pos}/{human_len} rows");
    let mut bundles: Vec<PathBuf> = Vec::new();

    for sequence in 1..=deltas + 1 {
        let out = bundle_path(sequence);
        let parent = bundles.last().map(|bundle| -> Result<Flash> {
            let mut bundle = BundleReader::open(bundle)?;
            Ok(Flash::install(&disk::system(), &folder.join("parent"), &mut bundle, |_| ())?)
        });
        bar.set_position(0);

        pack_criteo_at(
            rows_max,
            SyntheticGeneration { sequence, changed_one_in: CHANGED_ONE_IN, misses },
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

/// The served model and the terms of its updates.
struct Updates<'a> {
    serving: &'a Serving,
    served: Arc<Served>,
    flash: &'a Flash,
    budget: Budget,
    /// Share of the time that an update works.
    busy: BusyBounds,
}

impl Updates<'_> {
    /// Returns the callers of `args`, which send without pauses.
    fn callers(&self, args: &DeltaArgs) -> Result<Vec<PacedCaller>> {
        PacedCaller::several(&self.served, self.flash, args.callers, args.batch as usize)
    }
}

/// Applies all deltas, each between two windows without an update. The window after an update takes
/// as long as the update, the window before it as long as the update before. Callers never pause at
/// the first update, at the second they do, and so on.
fn measure(args: &DeltaArgs, updates: &Updates<'_>, deltas: &[PathBuf]) -> Result<Measured> {
    let mut callers = updates.callers(args)?;
    let progress = progress_bar(deltas.len() as u64, "applying", "{pos}/{len} deltas");
    let window_min = Duration::try_from_secs_f64(args.seconds).context("--seconds")?;
    let idle_for = |callers: &mut [PacedCaller], time: Duration| {
        let (sent, ()) = send_during(callers, move |_| {
            thread::sleep(time);
            Ok(())
        })?;
        anyhow::Ok(sent)
    };
    let counters = || updates.served.stats().unwrap_or_default().counters;

    // The cache fills before the first window.
    idle_for(&mut callers, WARM_WINDOWS * window_min)?;
    let requests = idle_for(&mut callers, window_min)?.latencies.percentiles().requests.max(1);
    let at_full_load = args.seconds * f64::from(args.callers) / requests as f64;
    let paced = Duration::from_secs_f64(at_full_load * 100.0 / f64::from(args.load_percent));

    let mut loads = [AtLoad::of(100), AtLoad::of(args.load_percent)];
    let (mut points, mut window, mut last) = (Vec::new(), window_min, Vec::new());
    for (number, delta) in deltas.iter().enumerate() {
        let load = &mut loads[number % 2];
        let interval = if number % 2 == 0 { Duration::ZERO } else { paced };
        callers.iter_mut().for_each(|caller| caller.interval = interval);

        let start = counters();
        let before = idle_for(&mut callers, window)?;
        let hit_rate_before = counters().since(&start).hit_rate();

        let start = Instant::now();
        let (applying, applied) = send_during(&mut callers, |step| updates.apply(delta, step))?;
        let Applied { mut figures, installed } = applied;
        last.truncate(1);
        last.insert(0, installed);
        window = start.elapsed();
        let after = idle_for(&mut callers, window)?;

        let served = applying.changed.context("no request was answered after the swap")?;
        figures.served_s = served.duration_since(start).as_secs_f64();
        figures.hit_rate_before = hit_rate_before;
        figures.hit_rate_after = counters().hit_rate();
        load.add(&mut figures, Windows { before, applying, after });
        points.push(figures);
        progress.inc(1);
    }
    progress.finish_and_clear();
    Ok(Measured { points, loads, last })
}

/// What the updates gave.
struct Measured {
    points: Vec<UpdateFigures>,
    /// The requests at full load, and those of the callers that pause.
    loads: [AtLoad; 2],
    /// The live generation, then the one before, as far as deltas brought them.
    last: Vec<Flash>,
}

/// An update that was applied.
struct Applied {
    figures: UpdateFigures,
    installed: Flash,
}

/// What the swaps at one end of many did.
#[derive(Clone, Copy)]
struct SwapWindow {
    p99_us: f64,
    memory: u64,
    files: u64,
}

/// Swaps back and forth between `last`, the live generation and the one before, while callers never
/// pause.
fn swap_often(args: &DeltaArgs, updates: &Updates<'_>, last: &[Flash]) -> Result<Vec<Bar>> {
    let [live, previous] = last else { bail!("--swaps needs two deltas") };
    let mut callers = updates.callers(args)?;
    let progress = progress_bar(args.swaps, "swapping", "{pos}/{len} swaps");

    let some = SWAPS_COMPARED.min(args.swaps as usize / 2).max(1);
    let mut done = 0;
    let mut swap = |count: usize| {
        let (sent, ()) = send_during(&mut callers, |_| {
            for _ in 0..count {
                let to = if done % 2 == 0 { previous } else { live };
                updates.serving.swap(NAME, to, updates.budget, &|_| {})?;
                done += 1;
                progress.inc(1);
            }
            Ok(())
        })?;
        let (memory, files) = (resident_memory()?.now, open_files()?);
        Ok::<_, anyhow::Error>(SwapWindow {
            p99_us: sent.latencies.percentiles().p99_us,
            memory,
            files,
        })
    };
    swap(some)?;
    let first = swap(some)?;
    swap((args.swaps as usize).saturating_sub(3 * some))?;
    let last = swap(some)?;
    progress.finish_and_clear();

    let ratio = |of: fn(&SwapWindow) -> f64| of(&last) / of(&first);
    let bar = |what: &str, value| {
        let name = format!("{what} after {} swaps, times that at the start", args.swaps);
        Bar::at_most(name, value, FLAT_BAR)
    };
    Ok(vec![
        bar("p99", ratio(|w| w.p99_us)),
        bar("memory", ratio(|w| w.memory as f64)),
        bar("open files", ratio(|w| w.files as f64)),
    ])
}

impl Updates<'_> {
    /// Installs `delta` and swaps it in, in the steps that `step` shows. The caller fills in the
    /// latencies and hit rates.
    fn apply(&self, delta: &Path, step: &CurrentStep) -> Result<Applied> {
        let background = Background::enter(self.busy);
        let rest = |urgency| background.yield_now(urgency, thread::sleep);
        restart_peak()?;
        let memory_before = resident_memory()?.now;
        let (before, start, cpu) = (written_bytes()?, Instant::now(), thread_cpu_time());
        let mut bundle = BundleReader::open(delta)?;
        let directory = self.flash.directory();
        let prepared =
            Flash::prepare(&disk::system(), directory, &mut bundle, |_| rest(Urgency::Awaited))?;
        step.enter(Step::Open);
        let installed = outside_idle_class(|| prepared.commit())?;
        let (install_s, written_bytes) = (start.elapsed().as_secs_f64(), written_bytes()? - before);

        let swap_start = Instant::now();
        let swapped = self.serving.swap(NAME, &installed, self.budget, &rest)?;
        let swap_s = swap_start.elapsed().as_secs_f64();
        let (cpu_s, apply_s) =
            ((thread_cpu_time() - cpu).as_secs_f64(), start.elapsed().as_secs_f64());

        let changed = changed(&installed)?;
        let none = Percentiles::default();
        let figures = UpdateFigures {
            sequence: installed.manifest().generation.sequence,
            rows: changed.rows,
            bundle_bytes: std::fs::metadata(delta)?.len(),
            written_bytes,
            changed_bytes: changed.bytes,
            install_s,
            swap_s,
            served_s: 0.0,
            load_percent: 0,
            memory_before,
            memory_peak: resident_memory()?.peak,
            cpu_percent: 100.0 * cpu_s / apply_s,
            pause_us: swapped.pause.as_secs_f64() * 1e6,
            swapped,
            idle: none,
            applying: none,
            idle_after: none,
            hit_rate_before: 0.0,
            hit_rate_after: 0.0,
        };
        Ok(Applied { figures, installed })
    }
}

/// Returns the CPU time of the calling thread.
fn thread_cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}

/// The content of the newest delta.
struct Changed {
    rows: u64,
    /// Bytes of the keys and rows and of the network.
    bytes: u64,
}

/// Returns the content of the newest delta.
fn changed(flash: &Flash) -> Result<Changed> {
    let manifest: &Manifest = flash.manifest();
    let (mut rows, mut bytes) = (0, manifest.blobs[manifest.dense as usize].raw_bytes());
    for (number, table) in manifest.schema.tables.iter().enumerate() {
        // In a table without changes the last delta is older, or there is none.
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
    Ok(Changed { rows, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::report_of;
    use hatchback::mix;

    #[test]
    fn changed_rows_are_those_of_the_newest_generation() {
        let folder = tempfile::tempdir().unwrap();
        let (mut flash, place) = (None, folder.path().join("car"));
        for bundle in pack_generations(1000, 2, [MissPolicy::Wait; 2], folder.path()).unwrap() {
            let mut bundle = BundleReader::open(&bundle).unwrap();
            flash = Some(Flash::install(&disk::system(), &place, &mut bundle, |_| ()).unwrap());
        }
        let flash = flash.unwrap();
        // The rule of the synthetic model.
        let is_new = |number: u64, row: u64| {
            mix(row << 20 ^ number << 52 ^ 3).is_multiple_of(CHANGED_ONE_IN)
        };
        let tables = flash.manifest().schema.tables.iter().enumerate();
        let of = |(n, table): (usize, &hatchback::schema::Table)| {
            (0..table.rows).filter(|&row| is_new(n as u64, row)).count()
        };
        let rows: Vec<usize> = tables.map(of).collect();
        assert!(rows.contains(&0), "some tables are small");
        assert_eq!(changed(&flash).unwrap().rows, rows.iter().sum::<usize>() as u64);
    }

    #[test]
    fn an_update_that_panics_ends_its_callers() {
        let folder = tempfile::tempdir().unwrap();
        let bundles = pack_generations(1000, 0, [MissPolicy::Wait; 2], folder.path()).unwrap();
        let flash = install(&bundles[0], &folder.path().join("car")).unwrap();
        let (budget, update) = (Budget::default(), |_: &CurrentStep| -> Result<()> { panic!() });
        let served = serving(&budget).load(NAME, &flash, budget).unwrap();
        let mut callers = PacedCaller::several(&served, &flash, 2, 1).unwrap();
        let failed = send_during(&mut callers, update).err().unwrap().to_string();
        assert!(failed.contains("the update panicked"), "{failed}");
    }

    #[test]
    fn updates_are_applied_while_requests_are_served() {
        let folder = tempfile::tempdir().unwrap();
        let kept = folder.path().join("bundles");
        let report = report_of(&format!(
            "delta --quick --rows-max 3000 --deltas 2 --swaps 6 --batch 2 --callers 2 \
             --cache-percent 50 --seconds 0.2 --busy-percent-min 5 --busy-percent 100 --bundles {}",
            kept.display()
        ));
        assert_eq!(std::fs::read_dir(&kept).unwrap().count(), 3);
        let point = &report["points"][0];
        let read = point["swapped"]["read"].as_u64().unwrap();
        assert!(read > 0 && read < point["rows"].as_u64().unwrap(), "{point}");
        assert!(point["rows"].as_u64().unwrap() > 100, "{point}");
        let hits = |when: &str| point[when].as_f64().unwrap();
        assert!(hits("hit_rate_before") < 1.0 && hits("hit_rate_after") < 1.0, "{point}");
        assert_eq!(report["bars"].as_array().unwrap().len(), 10);
    }
}
