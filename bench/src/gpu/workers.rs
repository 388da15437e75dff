//! `bench gpu workers`: several workers on one GPU, each with a step of its own over the same
//! tables and network. They send requests without a pause, with and without a thread that
//! overwrites rows. Never misses a row.

use super::keys::{KeyDraw, KeySet, Skew};
use super::model::{GpuModel, ModelOptions};
use super::updater::under_updates;
use crate::filled_cache::TABLES;
use crate::load::all_at_once;
use crate::results::{BenchReport, HostMachine};
use anyhow::{Result, ensure};
use hatchback::LookupStatus;
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::gpu::step::Step;
use hatchback_kernels::lookup::Bags;
use hatchback_kernels::lookup::miss_list::MissList;
use hatchback_tools::report;
use hatchback_tools::report::Json;
use hatchback_tools::report::metrics::{Latencies, Percentiles};
use hatchback_tools::workload::synthetic::DENSE;
use serde::Serialize;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

/// Workers of a car's target; beside them one alone.
const WORKERS: [usize; 2] = [1, 4];
/// Lookups of the requests that one worker draws before it starts: their rows exceed the
/// second-level cache of the largest GPUs.
const LOOKUPS_DRAWN: usize = 600_000;
/// Requests of a worker, however slow the GPU is.
const REQUESTS_LEAST: usize = 3;

/// The requests of some workers at one batch size.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerFigures {
    /// Workers that send requests at the same time.
    pub workers: usize,
    /// Samples of a request.
    pub batch: usize,
    /// Rows that another thread overwrote a second.
    pub updated_rows_per_s: f64,
    /// Requests of all workers a second.
    pub requests_per_s: f64,
    /// Latency of the requests of all workers.
    #[serde(flatten)]
    pub latency: Percentiles,
}

/// Measures on `gpu`, and reports to `json`.
///
/// # Errors
/// The GPU fails or has too little memory, or the report cannot be written.
pub fn run(gpu: &Arc<Gpu>, options: &ModelOptions, batches: &[usize], json: &Json) -> Result<()> {
    let model = GpuModel::new(gpu, options)?;
    let mut workers = (0..WORKERS[1])
        .map(|number| Worker::new(&model, options.batch_max, number))
        .collect::<Result<Vec<_>>>()?;
    let time = Duration::from_millis(if options.quick { 100 } else { 3000 });

    let mut points = Vec::new();
    for &batch in batches {
        workers.iter_mut().for_each(|worker| worker.draw(batch, options.quick));
        for count in WORKERS {
            let some = &mut workers[..count];
            points.push(measure(some, batch, time)?);
            let start = Instant::now();
            let (mut figures, updated) = under_updates(&model, || measure(some, batch, time))?;
            figures.updated_rows_per_s = updated as f64 / start.elapsed().as_secs_f64();
            points.push(figures);
        }
    }

    let (rows, engine, name) = (options.rows, model.engine.runs_on(), gpu.name());
    let about = format!("{name}: the dense network runs on {engine}");
    let model = format!("{TABLES} tables of {rows} rows, f16, 1 key; {name}; {engine}");
    // No figure is demanded before a GPU has run this.
    let (machine, bars) = (HostMachine::this(), Vec::new());
    let heads = "workers, batch, rows updated a second, requests, p50, p99, most, \
                 requests a second, samples a second";
    let report = BenchReport { bench: "gpu workers", machine, model, bars, points };
    report.publish(&about, heads, cells, json)
}

/// One worker and the memory of its requests.
struct Worker {
    step: Step,
    misses: MissList,
    statuses: Vec<LookupStatus>,
    offsets: Vec<u32>,
    draw: KeyDraw,
    /// The keys of its requests, which it sends in turn.
    sets: Vec<KeySet>,
    dense: Vec<f32>,
}

impl Worker {
    fn new(model: &GpuModel, batch_max: usize, number: usize) -> Result<Self> {
        let limits = model.limits(batch_max, batch_max);
        Ok(Self {
            step: model.step(limits)?,
            misses: model.miss_list(limits)?,
            statuses: vec![LookupStatus::default(); batch_max],
            offsets: (0..=batch_max as u32).collect(),
            draw: model.tables.draw.with_seed(number as u64),
            sets: Vec::new(),
            dense: Vec::new(),
        })
    }

    /// Draws the requests of `batch` samples.
    fn draw(&mut self, batch: usize, quick: bool) {
        let lookups = if quick { 1000 } else { LOOKUPS_DRAWN };
        let count = lookups.div_ceil(batch * TABLES);
        self.sets = (0..count).map(|_| self.draw.draw(batch, Skew::Uniform)).collect();
        self.dense = self.draw.draw_dense(batch, DENSE);
    }

    /// Sends requests for `time`. Returns their latencies.
    fn send_for(&mut self, batch: usize, time: Duration) -> Result<Latencies> {
        let (mut latencies, start) = (Latencies::default(), Instant::now());
        for number in 0.. {
            if number >= REQUESTS_LEAST && start.elapsed() >= time {
                break;
            }
            let sent = Instant::now();
            self.request(batch, number)?;
            latencies.record(sent.elapsed());
        }
        Ok(latencies)
    }

    fn request(&mut self, batch: usize, number: usize) -> Result<()> {
        let Self { step, misses, statuses, offsets, sets, dense, .. } = self;
        let (keys, statuses) = (&sets[number % sets.len()], &mut statuses[..batch]);
        statuses.fill(LookupStatus::default());
        misses.clear();
        let bags = |f: usize| Bags::new(&keys[f], &offsets[..=batch]);
        step.begin(batch, bags, |_, values| values.copy_from_slice(dense))?;
        let more = step.lookup().collect(misses, statuses)?;
        ensure!(!more && misses.is_empty(), "a cached row is missing");
        ensure!(step.scores(batch).iter().all(|s| s.is_finite()), "a score is not finite");
        Ok(())
    }
}

/// Lets all `workers` send requests of `batch` samples for `time`.
fn measure(workers: &mut [Worker], batch: usize, time: Duration) -> Result<WorkerFigures> {
    let (count, all_ready) = (workers.len(), Barrier::new(workers.len()));
    let send = |worker: &mut Worker| {
        // The first request warms the machine up and does not count.
        let warm = worker.request(batch, 0);
        all_ready.wait();
        warm?;
        worker.send_for(batch, time)
    };

    let (mut latencies, start) = (Latencies::default(), Instant::now());
    all_at_once(workers, send)?.iter().for_each(|sent| latencies.add(sent));

    let latency = latencies.percentiles();
    let requests_per_s = latency.requests as f64 / start.elapsed().as_secs_f64();
    Ok(WorkerFigures { workers: count, batch, updated_rows_per_s: 0.0, requests_per_s, latency })
}

/// Returns a row of the table.
fn cells(p: &WorkerFigures) -> [String; 9] {
    let latency = &p.latency;
    [
        p.workers.to_string(),
        p.batch.to_string(),
        report::count(p.updated_rows_per_s as u64),
        report::count(latency.requests),
        report::micros(latency.p50_us),
        report::micros(latency.p99_us),
        report::micros(latency.max_us),
        report::digits(p.requests_per_s),
        report::digits(p.requests_per_s * p.batch as f64),
    ]
}
