//! `bench gpu requests`: whole requests on a GPU, with all rows cached, with some missing, and
//! while another thread updates rows. Also the lookups alone. Never reads flash: a random row
//! stands for the row that the runtime would read, and is inserted as the runtime inserts one.

use super::figures::{self, EMPTY, GRAPH, GpuFigures, KERNELS, MISSES, UPDATES};
use super::keys::{KeyDraw, KeySet};
use super::lookups::time_lookups;
use super::model::{GpuModel, ModelOptions};
use super::updater::under_updates;
use crate::filled_cache::TABLES;
use crate::peer::percentile;
use crate::results::{BenchReport, HostMachine};
use anyhow::{Result, ensure};
use hatchback::LookupStatus;
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::gpu::gather::EmptyGraph;
use hatchback_kernels::gpu::step::Step;
use hatchback_kernels::lookup::Bags;
use hatchback_kernels::lookup::miss_list::{MissList, RowState};
use hatchback_tools::report::Json;
use hatchback_tools::workload::synthetic::DENSE;
use hatchback_tools::{report, say};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The largest batch with misses or updates.
const MISSES_BATCH: usize = 64;
/// Shares of the lookups whose rows are missing. The first stands for a single lookup.
const MISSING: [f64; 6] = [0.0, 0.01, 0.05, 0.1, 0.3, 0.5];
/// A measurement ends early after this time, because large batches take long.
const TIME_LIMIT: Duration = Duration::from_secs(2);
/// Rounds that every measurement has, however slow.
const ROUNDS_LEAST: usize = 5;

/// How a request's kernels are launched.
#[derive(Clone, Copy, PartialEq)]
enum LaunchMode {
    /// As one recorded graph.
    Graph,
    /// One by one.
    Kernels,
}

/// The shape of a request.
#[derive(Clone, Copy)]
struct RequestShape {
    batch: usize,
    /// Lookups whose rows are in no cache.
    missing: usize,
}

/// Measures on `gpu`, and reports to `json`.
///
/// # Errors
/// The GPU fails or has too little memory, or the report cannot be written.
pub fn run(gpu: &Arc<Gpu>, options: &ModelOptions, batches: &[usize], json: &Json) -> Result<()> {
    let model = GpuModel::new(gpu, options)?;
    let copied = copied_gb_per_s(gpu, options.quick)?;
    let [memory, l2] = [gpu.memory()?, gpu.l2_bytes()?].map(|n| report::bytes(n as u64));
    let (name, major, minor) = (gpu.name(), gpu.sm() / 10, gpu.sm() % 10);
    let (engine, rejected) = (model.engine.runs_on(), model.engine.rejected().join("; "));
    // Before the measurements, which may be stopped.
    if !json.is_standard_output() {
        say!("{name}, compute capability {major}.{minor}, {memory} of memory, {l2} of L2 cache")?;
        say!("the dense network runs on {engine}; passed over: [{rejected}]")?;
        say!("the memory copies at {copied:.0} GB/s (read and written)")?;
    }

    let (points, updated) = measure(&model, options, batches)?;
    let updated = report::count(updated);
    let about = format!("{updated} rows were overwritten during the requests with updates");
    let bars = figures::bars(&points, copied);
    let model = format!("{TABLES} tables of {} rows, f16, 1 key; {name}; {engine}", options.rows);
    let machine = HostMachine::this();
    let report = BenchReport { bench: "gpu requests", machine, model, bars, points };
    report.publish(&about, figures::HEADS, figures::cells, json)
}

/// Measures all batch sizes with all rows cached. Then measures updates and misses. Misses come
/// last, because their rows replace cached ones. Also returns the number of updated rows.
fn measure(
    model: &GpuModel,
    options: &ModelOptions,
    batches: &[usize],
) -> Result<(Vec<GpuFigures>, u64)> {
    let mut requests = RequestLoop::new(model, options)?;
    let mut points = Vec::new();
    for &batch in batches {
        points.extend(time_lookups(model, batch, options.quick)?);
        let hits = RequestShape { batch, missing: 0 };
        points.push(requests.time(GRAPH, hits, LaunchMode::Graph)?);
        points.extend(requests.time_empty(batch)?);
        points.push(requests.time(KERNELS, hits, LaunchMode::Kernels)?);
    }

    let batch = options.batch_max.min(MISSES_BATCH);
    let hits = RequestShape { batch, missing: 0 };
    let (figures, updated) =
        under_updates(model, || requests.time(UPDATES, hits, LaunchMode::Graph))?;
    points.push(figures);

    for share in MISSING {
        let missing = ((share * (batch * TABLES) as f64) as usize).max(1);
        points.push(requests.time(MISSES, RequestShape { batch, missing }, LaunchMode::Graph)?);
    }
    Ok((points, updated))
}

/// The memory that all requests reuse.
struct RequestLoop<'a> {
    model: &'a GpuModel,
    draw: KeyDraw,
    step: Step,
    misses: MissList,
    statuses: Vec<LookupStatus>,
    offsets: Vec<u32>,
    rounds: usize,
}

impl<'a> RequestLoop<'a> {
    fn new(model: &'a GpuModel, options: &ModelOptions) -> Result<Self> {
        let batch_max = options.batch_max;
        let limits = model.limits(batch_max, batch_max.min(4 * MISSES_BATCH));
        Ok(Self {
            model,
            draw: model.tables.draw.with_seed(1),
            step: model.step(limits)?,
            misses: model.miss_list(limits)?,
            statuses: vec![LookupStatus::default(); batch_max],
            offsets: (0..=batch_max as u32).collect(),
            rounds: if options.quick { 5 } else { 300 },
        })
    }

    /// Times whole requests, each with keys of its own.
    fn time(&mut self, what: &str, shape: RequestShape, mode: LaunchMode) -> Result<GpuFigures> {
        let RequestShape { batch, missing } = shape;
        let dense = self.draw.draw_dense(batch, DENSE);
        let mut times = Vec::with_capacity(self.rounds);
        let (mut launches, mut waits, mut missed) = (0, 0, 0);

        // The first request warms the machine up and does not count.
        let keys = self.draw.draw_with_misses(batch, missing)?;
        self.request(&keys, &dense, mode)?;
        let start = Instant::now();
        while times.len() < self.rounds {
            if times.len() >= ROUNDS_LEAST && start.elapsed() > TIME_LIMIT {
                break;
            }
            let keys = self.draw.draw_with_misses(batch, missing)?;
            let (calls, start) = (self.model.gpu.calls(), Instant::now());
            let missed_now = self.request(&keys, &dense, mode)?;
            times.push(start.elapsed().as_secs_f64() * 1e6);

            // Some lookups more may miss: inserted rows take the place of cached ones.
            ensure!(missed_now >= missing, "{missed_now} of {missing} missing rows were missed");
            missed += missed_now;
            let now = self.model.gpu.calls();
            launches += now.launches - calls.launches;
            waits += now.waits - calls.waits;
        }

        let rounds = times.len() as f64;
        Ok(GpuFigures {
            what: what.to_owned(),
            batch,
            rounds: times.len(),
            hit_rate: 1.0 - missed as f64 / (rounds * (batch * TABLES) as f64),
            p50_us: percentile(&mut times, 0.5),
            p99_us: percentile(&mut times, 0.99),
            graph: self.step.shape(batch).filter(|_| mode == LaunchMode::Graph),
            launches: launches as f64 / rounds,
            waits: waits as f64 / rounds,
            ..GpuFigures::default()
        })
    }

    /// Times empty graphs with the nodes of a request's; `None` if its graph is not known.
    fn time_empty(&self, batch: usize) -> Result<Option<GpuFigures>> {
        let Some(shape) = self.step.shape(batch) else { return Ok(None) };
        let mut empty = EmptyGraph::new(&self.model.gpu, shape)?;
        empty.run()?;
        let mut times = Vec::with_capacity(self.rounds);
        for _ in 0..self.rounds {
            let start = Instant::now();
            empty.run()?;
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(Some(GpuFigures {
            what: EMPTY.to_owned(),
            batch,
            rounds: self.rounds,
            p50_us: percentile(&mut times, 0.5),
            p99_us: percentile(&mut times, 0.99),
            graph: empty.shape(),
            launches: 1.0,
            waits: 1.0,
            ..GpuFigures::default()
        }))
    }

    /// Scores one request. Missing rows are staged and inserted. Returns the lookups that missed.
    fn request(&mut self, keys: &KeySet, dense: &[f32], mode: LaunchMode) -> Result<usize> {
        let Self { model, step, misses, statuses, offsets, .. } = self;
        let batch = keys[0].len();
        let (samples, statuses) = (&model.tables.samples, &mut statuses[..batch]);
        statuses.fill(LookupStatus::default());
        let bags = |f: usize| Bags::new(&keys[f], &offsets[..=batch]);
        let fill = |_: usize, values: &mut [f32]| values.copy_from_slice(dense);
        match mode {
            LaunchMode::Graph => step.begin(batch, bags, fill)?,
            LaunchMode::Kernels => step.begin_unrecorded(batch, bags, fill)?,
        }

        misses.clear();
        let mut more = step.lookup().collect(misses, statuses)?;
        let (mut open, mut missed) = (more || !misses.is_empty(), 0);
        while open {
            missed += misses.bags().len();
            for number in 0..misses.list().len() {
                let miss = misses.list()[number];
                let row = samples.row(miss.row.key as usize);
                misses.row_mut(miss.slot)[..row.len()].copy_from_slice(row);
                misses.set_state(miss.slot, RowState::Fresh);
            }
            match more {
                true => step.lookup().finish_bags(misses, statuses)?,
                false => step.complete(misses, statuses)?,
            }
            misses.clear();
            open = more;
            more = more && step.lookup().requery(misses, statuses)?;
        }

        ensure!(step.scores(batch).iter().all(|s| s.is_finite()), "a score is not finite");
        let fresh: u32 = statuses.iter().map(|status| status.fresh).sum();
        ensure!(fresh as usize == batch * TABLES, "{fresh} rows of {} are fresh", batch * TABLES);
        Ok(missed)
    }
}

/// Returns the speed at which the device copies its memory: bytes read and bytes written, GB/s.
fn copied_gb_per_s(gpu: &Arc<Gpu>, quick: bool) -> Result<f64> {
    let (bytes, repeats) = if quick { (1 << 20, 2) } else { (1 << 29, 20) };
    let from = gpu.buffer::<u8>(bytes)?;
    let (mut to, stream) = (gpu.buffer::<u8>(bytes)?, gpu.stream()?);
    let mut best = f64::INFINITY;

    for _ in 0..4 {
        let start = Instant::now();
        (0..repeats).try_for_each(|_| stream.copy(&from, &mut to))?;
        stream.wait()?;
        best = best.min(start.elapsed().as_secs_f64() / f64::from(repeats));
    }
    Ok(2.0 * bytes as f64 / best / 1e9)
}
