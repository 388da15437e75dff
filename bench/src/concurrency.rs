//! `bench concurrency`: throughput and latency of one pipeline under a rising number of callers.
//! Each caller sends its next request as soon as it has the answer to its last one. The numbers of
//! callers take turns, so that a quiet minute of the machine favours none of them. Each turn has
//! requests of its own; a caller that has sent all of them starts over. Never draws requests while
//! it measures.

use super::bars::Bar;
use super::load::{CallTotals, all_at_once, call_for};
use super::results::{BenchReport, HostMachine};
use super::synthetic_model::ModelArgs;
use anyhow::Result;
use clap::Args;
use hatchback::clock::SystemClock;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::pipeline::{Pipeline, Stats};
use hatchback::schema::batch::Batch;
use hatchback_tools::report;
use hatchback_tools::report::Json;
use hatchback_tools::report::metrics::Percentiles;
use hatchback_tools::report::plot::{self, Axis, Panel, Series};
use hatchback_tools::serve::{self, ServeArgs};
use hatchback_tools::workload::key_distributions::{ALPHA, BagSizes, Distribution, Workload};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// Turns of every number of callers.
const TURNS: u32 = 4;
/// Request slots without a target.
const SLOTS: u32 = 64;
/// Requests that a caller draws for one turn, fewer if there are many callers.
const REQUESTS: usize = 512;
/// Least throughput with the most callers, as a share of the best step's.
const SHARE_MIN: f64 = 0.95;

/// Measures one pipeline under a rising number of callers
#[derive(Args, Debug)]
pub struct ConcurrencyArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Callers at each step
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,64",
          value_parser = clap::value_parser!(u32).range(1..=4096))]
    clients: Vec<u32>,
    /// Key distribution: uniform, powerlaw[:ALPHA], hotkey:LOOKUPS/KEYS (per cent), histogram:FILE
    /// [default: powerlaw]
    #[arg(long)]
    keys: Option<Distribution>,
    /// Samples in a request
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// Embedding cache, MiB [default: the target's]
    #[arg(long, value_parser = report::args::mib)]
    cache_mib: Option<f64>,
    /// Workers, a thread each [default: the target's, without one the machine's cores]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    workers: Option<u32>,
    /// Request slots [default: the target's, without one 64]
    #[arg(long)]
    slots: Option<u32>,
    /// How long a request waits for others to share its batch, µs [default: the target's]
    #[arg(long)]
    batch_delay_us_max: Option<u32>,
    /// Measured time of a step [default: 4; quick: 1]
    #[arg(long, value_parser = report::args::seconds)]
    seconds: Option<f64>,
    #[command(flatten)]
    json: Json,
    /// Draws throughput and latency by callers as SVG
    #[arg(long)]
    plot: Option<PathBuf>,
}

/// The figures of one number of callers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ConcurrencyStep {
    /// Concurrent callers.
    pub clients: u32,
    /// Measured time.
    pub seconds: f64,
    /// Requests answered per second.
    pub requests_per_s: f64,
    /// Latency of the answered requests, from submission to scores.
    pub latency: Percentiles,
    /// Requests refused with `Busy`: every slot was taken.
    pub busy: u64,
    /// Mean number of requests in a scored batch.
    pub requests_per_batch: f64,
    /// Share of the lookups of cached tables that hit the cache.
    pub hit_rate: f64,
}

/// The sums over the turns of a step.
#[derive(Default)]
struct TurnTotals {
    calls: CallTotals,
    /// Sum of the pipeline's counters.
    stats: Stats,
}

impl ConcurrencyArgs {
    fn budget(&self, serve: &ServeArgs) -> Result<Budget> {
        let mut budget = serve.budget()?;
        if self.model.target.is_none() {
            (budget.workers, budget.slots) = (HostMachine::this().cores as u32, SLOTS);
        }

        budget.workers = self.workers.unwrap_or(budget.workers);
        budget.slots = self.slots.unwrap_or(budget.slots);
        budget.batch_delay_us_max = self.batch_delay_us_max.unwrap_or(budget.batch_delay_us_max);
        budget.reads_max = budget.reads_max.max(budget.workers);
        budget.batch_max = budget.batch_max.max(self.batch);
        Ok(budget)
    }
}

/// Runs the measurement.
///
/// # Errors
/// The runtime refuses the model, a request fails, or a file cannot be written.
pub fn run(args: &ConcurrencyArgs) -> Result<()> {
    let seconds = args.seconds.unwrap_or(if args.model.quick { 1.0 } else { 4.0 });
    let mut prepared = args.model.prepare()?;
    let serve = &mut prepared.serve;
    serve.cache_mib = args.cache_mib;
    let flash = serve.flash()?;
    let budget = args.budget(serve)?;
    let (device, dense) = (serve.device()?, Default::default());
    let model = Arc::new(Model::on_device(&flash, budget, &device, &dense)?);

    let pipeline = Pipeline::new(Arc::clone(&model), Arc::new(SystemClock::default()))?;
    let keys = args.keys.clone().unwrap_or(Distribution::PowerLaw { alpha: ALPHA });
    let workload = Workload::new(&flash, &keys, BagSizes::Full, 0)?;
    let points = measure(args, &pipeline, &workload, Duration::from_secs_f64(seconds))?;

    let (machine, model) = (HostMachine::this(), flash.manifest().generation.to_string());
    let bars = bar(&points).into_iter().collect();
    let report = BenchReport { bench: "concurrency", machine, model, bars, points };
    publish(args, &report, &keys, &budget)
}

/// Measures all numbers of callers in turns. The first turn warms up and does not count.
fn measure(
    args: &ConcurrencyArgs,
    pipeline: &Pipeline,
    workload: &Workload,
    time: Duration,
) -> Result<Vec<ConcurrencyStep>> {
    let turns = u64::from(TURNS + 1) * args.clients.len() as u64;
    let progress = serve::progress_bar(turns, "measuring", "{pos}/{len} turns");
    let mut totals: Vec<TurnTotals> = args.clients.iter().map(|_| TurnTotals::default()).collect();

    for turn in 0..=TURNS {
        for (&clients, totals) in args.clients.iter().zip(&mut totals) {
            let seed = u64::from(turn) << 32;
            let requests = draw(pipeline, workload, clients, args.batch, seed)?;
            let one = run_turn(pipeline, &requests, time / TURNS)?;
            if turn > 0 {
                totals.add_later(&one);
            }
            progress.inc(1);
        }
    }
    progress.finish_and_clear();

    Ok(args.clients.iter().zip(&totals).map(|(&clients, totals)| totals.step(clients)).collect())
}

/// Draws the requests of a turn, `[callers][requests]`.
fn draw(
    pipeline: &Pipeline,
    workload: &Workload,
    clients: u32,
    samples: u32,
    seed: u64,
) -> Result<Vec<Vec<Batch>>> {
    let caller = |number: u32| {
        let mut workload = workload.with_seed(seed | u64::from(number));
        let one = |_| {
            let mut batch = Batch::new(pipeline.model().schema(), samples as usize);
            workload.fill(&mut batch, samples as usize).map(|()| batch)
        };
        (0..REQUESTS / (1 + clients as usize / 16)).map(one).collect()
    };
    (0..clients).map(caller).collect()
}

/// Runs all callers concurrently for `time`.
fn run_turn(pipeline: &Pipeline, requests: &[Vec<Batch>], time: Duration) -> Result<TurnTotals> {
    let (before, start) = (pipeline.stats(), Barrier::new(requests.len()));
    let callers = all_at_once(requests, |own| {
        start.wait();
        call_for(own, time, |batch| Ok(pipeline.submit(batch, None)?.wait().map(drop)?))
    })?;

    let mut sum = TurnTotals::default();
    callers.iter().for_each(|one| sum.calls.add_concurrent(one));
    let after = pipeline.stats();
    sum.stats = Stats {
        requests: after.requests - before.requests,
        batches: after.batches - before.batches,
        counters: after.counters.since(&before.counters),
        ..Stats::default()
    };
    Ok(sum)
}

impl TurnTotals {
    /// Adds a turn that ran later.
    fn add_later(&mut self, later: &Self) {
        self.calls.add_later(&later.calls);
        self.stats.requests += later.stats.requests;
        self.stats.batches += later.stats.batches;
        self.stats.counters.add(&later.stats.counters);
    }

    /// Returns the figures of the step with `clients` callers.
    fn step(&self, clients: u32) -> ConcurrencyStep {
        let CallTotals { time, latencies, busy, .. } = &self.calls;
        let (latency, seconds) = (latencies.percentiles(), time.as_secs_f64());
        ConcurrencyStep {
            clients,
            seconds,
            requests_per_s: latency.requests as f64 / seconds,
            latency,
            busy: *busy,
            requests_per_batch: self.stats.requests as f64 / self.stats.batches.max(1) as f64,
            hit_rate: self.stats.counters.hit_rate(),
        }
    }
}

/// Returns the bar on throughput: the step with the most callers reaches almost the best step's.
fn bar(steps: &[ConcurrencyStep]) -> Option<Bar> {
    let last = steps.iter().max_by_key(|s| s.clients)?;
    let best = steps.iter().map(|s| s.requests_per_s).fold(0.0, f64::max);
    let value = last.requests_per_s / best;
    let name = format!("requests/s with {} callers, share of the best step", last.clients);
    Some(Bar::at_least(name, value, SHARE_MIN))
}

fn publish(
    args: &ConcurrencyArgs,
    report: &BenchReport<ConcurrencyStep>,
    keys: &Distribution,
    budget: &Budget,
) -> Result<()> {
    let title = format!(
        "{} workers, {} slots, {} samples a request",
        budget.workers, budget.slots, args.batch
    );

    if let Some(path) = &args.plot {
        plot::panels(path, &format!("{}: {title}", report.model), &charts(&report.points))?;
    }

    let about = format!("{}: {title}, keys {keys}\n{}", report.model, report.machine);
    let heads = "callers, requests/s, p50, p99, p99.9, busy, requests/batch, hit rate";
    report.publish(&about, heads, ConcurrencyStep::cells, &args.json)
}

impl ConcurrencyStep {
    fn cells(&self) -> [String; 8] {
        [
            self.clients.to_string(),
            report::count(self.requests_per_s.round() as u64),
            report::micros(self.latency.p50_us),
            report::micros(self.latency.p99_us),
            report::micros(self.latency.p999_us),
            report::count(self.busy),
            format!("{:.2}", self.requests_per_batch),
            report::percent(self.hit_rate),
        ]
    }
}

fn charts(steps: &[ConcurrencyStep]) -> [Panel; 2] {
    let clients: Vec<f64> = steps.iter().map(|s| f64::from(s.clients)).collect();
    let line = |name: &str, color, dashed, y: fn(&ConcurrencyStep) -> f64| Series {
        name: name.to_owned(),
        color,
        dashed,
        points: steps.iter().map(|s| (f64::from(s.clients), y(s))).collect(),
    };
    let panel = |y, series| Panel { x: Axis::log("callers").at(&clients), y, series };
    [
        panel(Axis::linear("requests/s"), vec![line("requests/s", 0, false, |s| s.requests_per_s)]),
        panel(
            Axis::log("latency, µs"),
            vec![
                line("p50", 1, false, |s| s.latency.p50_us),
                line("p99", 1, true, |s| s.latency.p99_us),
            ],
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bars::BarResult;
    use crate::tests::report_of;

    #[test]
    fn the_bar_is_the_last_step_beside_the_best() {
        let step = |clients, requests_per_s| ConcurrencyStep {
            clients,
            requests_per_s,
            ..ConcurrencyStep::default()
        };
        assert!(bar(&[]).is_none());
        let found = bar(&[step(64, 940.0), step(1, 500.0), step(8, 1000.0)]).unwrap();
        assert_eq!(found.result, BarResult::Measured { value: 0.94, holds: false });
        let found = bar(&[step(1, 500.0), step(64, 480.0)]).unwrap().result;
        assert_eq!(found, BarResult::Measured { value: 0.96, holds: true });
    }

    #[test]
    fn a_short_run_answers_or_refuses_every_request() {
        let folder = tempfile::tempdir().unwrap();
        let plot = folder.path().join("a.svg");
        let report = report_of(&format!(
            "concurrency --quick --rows-max 2000 --clients 1,6 --slots 3 --workers 2 --batch 2 \
             --cache-mib 0.2 --seconds 0.2 --plot {}",
            plot.display()
        ));
        assert_eq!(report["bars"][0]["bar"], 0.95);
        let busy = |step: usize| report["points"][step]["busy"].as_u64().unwrap();
        assert_eq!(busy(0), 0);
        assert!(busy(1) > 0, "six callers share three slots");
        assert!(report["points"][1]["requests_per_batch"].as_f64().unwrap() >= 1.0);
        assert!(std::fs::read_to_string(&plot).unwrap().contains("requests/s"));
    }
}
