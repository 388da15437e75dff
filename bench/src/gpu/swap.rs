//! `bench gpu swap`: the runtime itself, with lookups and network on the GPU. Measures the time to
//! open a model, and swaps to deltas while workers score requests: the pause that the runtime
//! reports, and the longest request that a caller sees. Never measures the link or the install.

use super::generations::{ChangedRows, Generations, TABLES_EACH};
use super::model::MeasuredNetwork;
use super::opening::OpeningTimes;
use crate::bars::{Bar, bars_table, largest};
use crate::delta::callers::{PacedCaller, send_during};
use crate::filled_cache::TABLES;
use crate::load::serving;
use crate::results::{BenchReport, HostMachine, table};
use anyhow::{Context, Result, ensure};
use hatchback::bundle::BundleReader;
use hatchback::car::plan_steps::PlanSteps;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::model::budget::Budget;
use hatchback::request::serving::{Serving, Swapped};
use hatchback::schema::Placement;
use hatchback_kernels::cuda::Device;
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::gpu::GpuDense;
use hatchback_tools::report::Json;
use hatchback_tools::report::metrics::{Latencies, Percentiles};
use hatchback_tools::{report, say};
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Name of the served model.
const NAME: &str = "model";
/// Workers, and callers that send requests to them.
const WORKERS: u32 = 4;
/// Swaps between the same two generations: there, back, and there again.
const SWAPS: usize = 3;
/// Share of the rows of cached tables that have room in the caches.
const CACHED_PERCENT: u64 = 50;

/// What to measure.
pub struct SwapOptions {
    /// Rows of each table.
    pub rows: usize,
    /// Samples of a request.
    pub batch: usize,
    /// Small sizes.
    pub quick: bool,
    /// What runs the dense network.
    pub dense: GpuDense,
    /// Where the report goes as JSON.
    pub json: Json,
}

impl SwapOptions {
    /// Returns the changes from each generation to the next.
    fn changes(&self) -> [ChangedRows; 5] {
        let [few, many] = if self.quick { [130, 1300] } else { [5_000, 50_000] };
        let (resident, cached) = (Placement::Resident, Placement::Cached);
        [(resident, 0), (resident, few), (resident, many), (cached, few), (cached, many)]
            .map(|(placement, rows)| ChangedRows { placement, rows })
    }

    /// Returns the time of the requests before a swap and after it. After a swap the workers free
    /// what they had for the old generation.
    fn window(&self) -> Duration {
        Duration::from_millis(if self.quick { 20 } else { 300 })
    }
}

/// The swaps between two generations while requests run.
#[derive(Clone, Debug, Serialize)]
pub struct SwapFigures {
    /// The rows that differ.
    pub changed: ChangedRows,
    /// What the last of the swaps did with the rows in memory.
    pub swapped: Swapped,
    /// Longest time of a swap, from its call to the last request of the old generation, ms.
    pub swap_ms: f64,
    /// Longest time for which a swap let no lookup start, µs, as the runtime reports it.
    pub pause_us: f64,
    /// Requests without a swap.
    pub idle: Percentiles,
    /// Requests around all swaps.
    pub swapping: Percentiles,
}

/// A part of the report.
#[derive(Serialize)]
#[serde(untagged)]
enum Point {
    Opening(OpeningTimes),
    Swap(SwapFigures),
}

/// Measures on `gpu`, which took `gpu_opened` to open.
///
/// # Errors
/// The runtime refuses the model, a request fails, or a file cannot be written.
pub fn run(gpu: &Arc<Gpu>, gpu_opened: Duration, options: &SwapOptions) -> Result<()> {
    let folder = tempfile::tempdir().context("a temporary folder")?;
    let changes = options.changes();
    let network = MeasuredNetwork::new(options.quick);
    let generations = Generations::new(network, options.rows, &changes);
    let car = Car { generations, folder: folder.path() };
    let first = car.install(1, None)?;

    let device = Device::Cuda(Arc::clone(gpu));
    let (dense, budget) = (options.dense.clone(), car.budget(options.batch));
    let opening = OpeningTimes::measure(&first, budget, &device, &dense, gpu_opened)?;
    let serving = serving(&budget).on(device, dense);
    let served = serving.load(NAME, &first, budget)?;
    // Every generation has the same network, so the swaps find the plan of TensorRT.
    let mut plans = PlanSteps::default();
    while plans.step(&serving, &|_| ()) {}
    let runs_on = served.dense_runs_on().unwrap_or_default();
    let swaps = measure(options, &car, &serving, first)?;

    let bars = bars(&swaps);
    if !options.json.is_standard_output() {
        say!("the dense network runs on {runs_on}")?;
        say!("{}", opening.table())?;
        print_table(&swaps)?;
        say!("{}", bars_table(&bars))?;
    }
    let rows = options.rows;
    let model =
        format!("{TABLES} tables of {rows} rows, f16 or u8, 1 key; {}; {runs_on}", gpu.name());
    let points = std::iter::once(Point::Opening(opening)).chain(swaps.into_iter().map(Point::Swap));
    let (machine, points) = (HostMachine::this(), points.collect());
    let report = BenchReport { bench: "gpu swap", machine, model, bars, points };
    options.json.write(&report, || Ok(()))
}

/// The generations and the folder into which they are installed.
struct Car<'a> {
    generations: Generations,
    folder: &'a Path,
}

impl Car<'_> {
    /// Packs generation `sequence` on `parent` and makes it live on flash.
    fn install(&self, sequence: u64, parent: Option<&Flash>) -> Result<Flash> {
        let bundle = self.folder.join("next.hatch");
        self.generations.pack(sequence, parent, &bundle)?;
        let mut bundle = BundleReader::open(&bundle)?;
        let place = self.folder.join("flash");
        Ok(Flash::install(&disk::system(), &place, &mut bundle, |_| ())?)
    }

    /// Returns the budget of requests of `batch` samples.
    fn budget(&self, batch: usize) -> Budget {
        let row_bytes = |placement| self.generations.row_bytes(placement);
        Budget {
            memory_bytes_max: 16 << 30,
            cache_bytes_max: row_bytes(Placement::Cached) * CACHED_PERCENT / 100,
            // With room for what the runtime keeps beside the rows.
            resident_bytes_max: 2 * row_bytes(Placement::Resident),
            workers: WORKERS,
            batch_max: batch as u32,
            ..Budget::default()
        }
    }
}

/// Installs each later generation and swaps to it, back, and to it again.
fn measure(
    options: &SwapOptions,
    car: &Car<'_>,
    serving: &Serving,
    first: Flash,
) -> Result<Vec<SwapFigures>> {
    let served = serving.get(NAME).context("the model is not served")?;
    let mut callers = PacedCaller::several(&served, &first, WORKERS, options.batch)?;
    let (mut points, mut live) = (Vec::new(), first);
    for (number, changed) in options.changes().into_iter().enumerate() {
        let next = car.install(number as u64 + 2, Some(&live))?;
        let pair = SwappedPair { serving, generations: [&next, &live] };
        points.push(pair.measure(changed, &mut callers, options)?);
        live = next;
    }
    Ok(points)
}

/// Two generations that are swapped: first to the former, then back.
struct SwappedPair<'a> {
    serving: &'a Serving,
    generations: [&'a Flash; 2],
}

impl SwappedPair<'_> {
    fn measure(
        &self,
        changed: ChangedRows,
        callers: &mut [PacedCaller],
        options: &SwapOptions,
    ) -> Result<SwapFigures> {
        let Self { serving, generations } = self;
        let budget = *serving.model(NAME).context("the model is not served")?.budget();
        let window = options.window();
        let (idle, ()) = send_during(callers, |_| {
            thread::sleep(2 * window);
            Ok(())
        })?;

        let mut swapping = Latencies::default();
        let (mut swap_ms, mut pause_us, mut last) = (0.0f64, 0.0f64, Swapped::default());
        for number in 0..SWAPS {
            let (sent, (swapped, time)) = send_during(callers, |_| {
                thread::sleep(window);
                let start = Instant::now();
                let swapped = serving.swap(NAME, generations[number % 2], budget, &|_| ())?;
                let time = start.elapsed();
                thread::sleep(window);
                Ok((swapped, time))
            })?;
            swapping.add(&sent.latencies);
            swap_ms = swap_ms.max(time.as_secs_f64() * 1e3);
            pause_us = pause_us.max(swapped.pause.as_secs_f64() * 1e6);
            last = swapped;
        }

        let is_resident = changed.placement == Placement::Resident;
        let in_tables = changed.rows / TABLES_EACH * TABLES_EACH;
        ensure!(!is_resident || last.patched == in_tables, "{last:?} for {changed:?}");
        Ok(SwapFigures {
            changed,
            swapped: last,
            swap_ms,
            pause_us,
            idle: idle.latencies.percentiles(),
            swapping: swapping.percentiles(),
        })
    }
}

/// Returns the demanded figures.
fn bars(points: &[SwapFigures]) -> Vec<Bar> {
    let batches = points.iter().map(|p| p.pause_us / p.idle.p50_us);
    vec![Bar::at_most("longest pause of a swap, batches", largest(batches), 1.0)]
}

fn print_table(points: &[SwapFigures]) -> Result<()> {
    let cells = |p: &SwapFigures| {
        let tables = format!("{:?}", p.changed.placement).to_lowercase();
        [
            report::count(p.changed.rows as u64),
            tables,
            report::count(p.swapped.patched as u64),
            report::count(p.swapped.read as u64),
            format!("{:.1} ms", p.swap_ms),
            report::micros(p.pause_us),
            report::micros(p.idle.p50_us),
            report::micros(p.idle.p99_us),
            report::micros(p.idle.max_us),
            report::micros(p.swapping.p99_us),
            report::micros(p.swapping.max_us),
        ]
    };
    let heads = "changed rows, tables, patched, read anew, swap, pause, idle p50, idle p99, \
                 idle most, swapping p99, longest request";
    say!("{}", table(heads, points.iter().map(cells)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_takes_the_longest_pause() {
        let point = |pause_us, p50_us| SwapFigures {
            changed: ChangedRows { placement: Placement::Resident, rows: 1 },
            swapped: Swapped::default(),
            swap_ms: 1.0,
            pause_us,
            idle: Percentiles { p50_us, ..Percentiles::default() },
            swapping: Percentiles::default(),
        };
        let said = bars(&[point(50.0, 100.0), point(150.0, 100.0)])[0].to_string();
        assert!(said.contains("1.500") && said.ends_with("MISSED"), "{said}");
    }
}
