//! `bench request`: latency, throughput and hit rate of whole requests, swept over key
//! distributions, cache sizes and batch sizes. The bench opens the model again for every cache
//! size. `--peers` compares with other runtimes (`request_peers`). So does `--shared`, for dense
//! networks alone (`request_shared`).

use super::load::{ClosedLoop, LoadTotals};
use super::peer_figures::PeersPlan;
use super::request_peers;
use super::request_shared;
use super::results::{BenchReport, HostMachine, table};
use super::synthetic_model::ModelArgs;
use anyhow::Result;
use clap::Args;
use hatchback::flash::Flash;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback_tools::report::Json;
use hatchback_tools::report::metrics::{Lookups, Percentiles};
use hatchback_tools::report::plot::{self, Axis, Panel, Series};
use hatchback_tools::serve::{self, ServeArgs};
use hatchback_tools::workload::key_distributions::{ALPHA, BagSizes, Distribution, Workload};
use hatchback_tools::{report, say};
use indicatif::ProgressBar;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Measures whole requests over key distributions, cache sizes and batch sizes
#[derive(Args, Debug)]
pub struct RequestArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Key distributions: uniform, powerlaw[:ALPHA], hotkey:LOOKUPS/KEYS (per cent), histogram:FILE
    /// (samples)
    #[arg(long, value_delimiter = ',')]
    keys: Vec<Distribution>,
    /// Samples in a request [default: 1,8,64]
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    batch: Vec<u32>,
    /// Embedding cache, MiB [default: 1,16,64; quick: 1,4]
    #[arg(long, value_delimiter = ',', value_parser = report::args::mib_above_zero)]
    cache_mib: Vec<f64>,
    /// Measured time of a point [default: 5; quick: 1]
    #[arg(long, value_parser = report::args::seconds)]
    seconds: Option<f64>,
    /// Workers, a thread each
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Keys in a bag
    #[arg(long, value_enum, default_value_t)]
    bags: BagSizes,
    /// Measures a DLRM beside ONNX Runtime and PyTorch instead: one core, all rows cached, batches
    /// 1 to 256
    #[arg(long, conflicts_with_all = ["model", "keys", "batch", "cache_mib", "seconds", "threads",
                                      "bags", "target", "flash", "resident_mib"])]
    peers: bool,
    /// Measures the dense networks of requests whose candidates share the driver's inputs instead
    #[arg(long, conflicts_with_all = ["model", "keys", "batch", "cache_mib", "seconds", "threads",
                                      "bags", "target", "flash", "resident_mib", "peers", "plot"])]
    shared: bool,
    /// The Python environment of the peers, as `bench/peers/setup` makes it
    #[arg(long, default_value = super::peer::VENV)]
    venv: PathBuf,
    #[command(flatten)]
    json: Json,
    /// Draws latency by batch size and hit rate by cache size as SVG
    #[arg(long)]
    plot: Option<PathBuf>,
}

/// The figures of one distribution, cache size and batch size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RequestFigures {
    /// Key distribution.
    pub keys: String,
    /// Size of the embedding cache, MiB.
    pub cache_mib: f64,
    /// Slots of the embedding cache.
    pub cache_rows: usize,
    /// Samples in a request.
    pub batch: u32,
    /// Workers.
    pub threads: u32,
    /// Measured time.
    pub seconds: f64,
    /// Requests per second, all workers.
    pub requests_per_s: f64,
    /// Samples per second, all workers.
    pub samples_per_s: f64,
    /// Lookups per second, all workers.
    pub lookups_per_s: f64,
    /// Latency of a request.
    pub latency: Percentiles,
    /// Share of the lookups of cached tables that hit the cache.
    pub hit_rate: f64,
    /// Whether the hit rate was steady before the measurement.
    pub steady: bool,
    /// Flash pages read per request.
    pub pages_per_request: f64,
    /// Statuses of the rows.
    pub lookups: Lookups,
}

/// The points to measure, with defaults in place of what the user left out.
struct Sweep {
    keys: Vec<Distribution>,
    batches: Vec<u32>,
    caches_mib: Vec<f64>,
    time: Duration,
    window: Duration,
    warm_up_windows_max: usize,
}

/// Returns `given`, or `default` if it is empty: ascending, each value once.
fn ascending<T: PartialOrd + Copy>(given: &[T], default: &[T]) -> Vec<T> {
    let mut values = if given.is_empty() { default } else { given }.to_vec();
    values.sort_by(|a, b| a.partial_cmp(b).unwrap_or(std::cmp::Ordering::Equal));
    values.dedup();
    values
}

impl RequestArgs {
    fn sweep(&self) -> Sweep {
        let skewed = Distribution::PowerLaw { alpha: ALPHA };
        let hot = Distribution::HotKey { lookups: 0.9, keys: 0.01 };
        let keys = match (self.keys.is_empty(), self.model.quick) {
            (false, _) => self.keys.clone(),
            (true, true) => vec![skewed, Distribution::Uniform],
            (true, false) => vec![skewed, hot, Distribution::Uniform],
        };

        let (caches, window_ms): (&[f64], _) =
            if self.model.quick { (&[1.0, 4.0], 100) } else { (&[1.0, 16.0, 64.0], 250) };
        let seconds = self.seconds.unwrap_or(if self.model.quick { 1.0 } else { 5.0 });
        let time = Duration::from_secs_f64(seconds);
        Sweep {
            keys,
            batches: ascending(&self.batch, &[1, 8, 64]),
            caches_mib: ascending(&self.cache_mib, caches),
            time,
            window: Duration::from_millis(window_ms).min(time),
            warm_up_windows_max: if self.model.quick { 24 } else { 80 },
        }
    }

    fn budget(&self, serve: &ServeArgs) -> Result<Budget> {
        let mut budget = serve.budget()?;
        budget.workers = self.threads;
        if self.model.target.is_none() {
            budget.memory_bytes_max = u64::MAX;
        }
        Ok(budget)
    }
}

/// Runs the measurement.
///
/// # Errors
/// The runtime refuses the model, or a file cannot be read or written.
pub fn run(args: &RequestArgs) -> Result<()> {
    if args.peers {
        return run_peers(args);
    }
    if args.shared {
        return request_shared::run(args.model.quick, &args.venv, &args.json);
    }

    let sweep = args.sweep();
    let mut prepared = args.model.prepare()?;
    let serve = &mut prepared.serve;
    serve.batch_max = Some(sweep.batches.last().copied().unwrap_or(1));
    let flash = serve.flash()?;
    let (machine, model) = (HostMachine::this(), flash.manifest().generation.to_string());
    let device = serve.device()?;

    let bar = serve::progress_bar(sweep.points(), "measuring", "{pos}/{len} points");
    let mut points = Vec::new();
    for keys in &sweep.keys {
        let workload = Workload::new(&flash, keys, args.bags, 0)?;
        for &cache_mib in &sweep.caches_mib {
            serve.cache_mib = Some(cache_mib);
            let budget = args.budget(serve)?;
            let model = Model::on_device(&flash, budget, &device, &Default::default())?;
            points.extend(sweep.measure(&Arc::new(model), &workload, &bar)?);
        }
    }
    bar.finish_and_clear();

    let report = BenchReport { bench: "request", machine, model, bars: Vec::new(), points };
    args.publish(&report, &flash)
}

/// Runs `--peers`.
fn run_peers(args: &RequestArgs) -> Result<()> {
    let plan = if args.model.quick { request_peers::QUICK } else { request_peers::FULL };
    let rows = args.model.rows_max.map_or(Ok(plan.rows), usize::try_from)?;
    let plan = PeersPlan { rows, ..plan };
    request_peers::run(&plan, &args.venv, &args.json, args.plot.as_ref())
}

impl RequestArgs {
    fn publish(&self, report: &BenchReport<RequestFigures>, flash: &Flash) -> Result<()> {
        if let Some(path) = &self.plot {
            let threads = if self.threads == 1 {
                "1 thread".to_owned()
            } else {
                format!("{} threads", self.threads)
            };
            let title = format!("Requests to {}, {threads}", report.model);
            plot::panels(path, &title, &charts(&report.points))?;
        }
        self.json.write(report, || print_report(report, flash))
    }
}

impl Sweep {
    fn points(&self) -> u64 {
        (self.keys.len() * self.caches_mib.len() * self.batches.len()) as u64
    }

    /// Measures one distribution and cache size: warms the model up with the largest batches, then
    /// measures each batch size after one window of that size.
    fn measure(
        &self,
        model: &Arc<Model>,
        workload: &Workload,
        bar: &ProgressBar,
    ) -> Result<Vec<RequestFigures>> {
        let budget = model.budget();
        let mut load = ClosedLoop::new(model, workload, budget.workers as usize, self.window);
        let steady = load.warm_up(budget.batch_max as usize, self.warm_up_windows_max)?;

        let mut points = Vec::new();
        for &batch in &self.batches {
            load.window(batch as usize)?;
            let totals = load.measure(batch as usize, self.time)?;
            let keys = workload.distribution().to_string();
            let figures = RequestFigures::new(&totals, model, keys, batch);
            points.push(RequestFigures { steady, ..figures });
            bar.inc(1);
        }
        Ok(points)
    }
}

impl RequestFigures {
    /// Returns the figures of `totals`, of which the hit rate was steady.
    fn new(totals: &LoadTotals, model: &Model, keys: String, batch: u32) -> Self {
        let (latency, seconds) = (totals.latencies.percentiles(), totals.time.as_secs_f64());
        Self {
            keys,
            cache_mib: model.budget().cache_bytes_max as f64 / f64::from(1 << 20),
            cache_rows: model.cache_slots(),
            batch,
            threads: model.budget().workers,
            seconds,
            requests_per_s: latency.requests as f64 / seconds,
            samples_per_s: totals.samples as f64 / seconds,
            lookups_per_s: totals.counters.lookups as f64 / seconds,
            latency,
            hit_rate: totals.counters.hit_rate(),
            steady: true,
            pages_per_request: totals.counters.pages as f64 / latency.requests.max(1) as f64,
            lookups: totals.lookups,
        }
    }

    /// Returns the lookups that got a default row.
    fn not_fresh(&self) -> u64 {
        self.lookups.defaulted + self.lookups.absent + self.lookups.damaged
    }

    fn cells(&self) -> [String; 13] {
        let per_s = |n: f64| report::count(n.round() as u64);
        [
            self.keys.clone(),
            format!("{:.1} MiB", self.cache_mib),
            self.batch.to_string(),
            per_s(self.requests_per_s),
            per_s(self.samples_per_s),
            per_s(self.lookups_per_s),
            report::micros(self.latency.p50_us),
            report::micros(self.latency.p90_us),
            report::micros(self.latency.p99_us),
            report::micros(self.latency.p999_us),
            format!("{}{}", if self.steady { "" } else { "~" }, report::percent(self.hit_rate)),
            format!("{:.2}", self.pages_per_request),
            report::count(self.not_fresh()),
        ]
    }
}

const HEADS: &str = "keys, cache, batch, requests/s, samples/s, lookups/s, p50, p90, p99, p99.9, \
                     hit rate, pages/request, not fresh";

fn print_report(report: &BenchReport<RequestFigures>, flash: &Flash) -> Result<()> {
    let tables = &flash.manifest().schema.tables;
    let rows = report::count(tables.iter().map(|t| t.rows).sum());
    let (bytes, n) = (report::bytes(flash.bytes()?), tables.len());
    say!("{}: {n} tables, {rows} rows, {bytes} on flash", report.model)?;
    say!("{}", report.machine)?;

    say!("{}", table(HEADS, report.points.iter().map(RequestFigures::cells)))?;
    say!("Closed loop; the hit rate is that of lookups of cached tables.")?;
    if report.points.iter().any(|p| !p.steady) {
        say!("~ The hit rate was still changing when the measurement began.")?;
    }
    Ok(())
}

/// Returns the name of a distribution in the legend: for a histogram, the file's name alone.
fn short(keys: &str) -> &str {
    let file = keys.strip_prefix("histogram:").map(Path::new).and_then(Path::file_name);
    file.and_then(|name| name.to_str()).unwrap_or(keys)
}

/// Returns the panel of latency by batch size with the largest cache, and the panel of hit rate by
/// cache size with the largest batches. A panel needs more than one size; if neither has that, the
/// first is returned alone.
fn charts(points: &[RequestFigures]) -> Vec<Panel> {
    let batches = ascending(&points.iter().map(|p| f64::from(p.batch)).collect::<Vec<_>>(), &[]);
    let caches = ascending(&points.iter().map(|p| p.cache_mib).collect::<Vec<_>>(), &[]);
    let (Some(&batch), Some(&cache)) = (batches.last(), caches.last()) else { return Vec::new() };
    let mut keys: Vec<&str> = points.iter().map(|p| p.keys.as_str()).collect();
    keys.dedup();
    let line =
        |color: usize, name: &str, dashed, of: &dyn Fn(&RequestFigures) -> Option<(f64, f64)>| {
            let own = points.iter().filter(|p| p.keys == keys[color]);
            let keys = short(keys[color]);
            Series {
                name: format!("{keys} {name}").trim_end().to_owned(),
                color,
                dashed,
                points: own.filter_map(of).collect(),
            }
        };

    let by_batch =
        |p: &RequestFigures, us| (p.cache_mib == cache).then_some((f64::from(p.batch), us));
    let by_cache = |p: &RequestFigures| {
        (f64::from(p.batch) == batch).then_some((p.cache_mib, 100.0 * p.hit_rate))
    };
    let latency = (0..keys.len()).flat_map(|c| {
        [
            line(c, "p50", false, &|p| by_batch(p, p.latency.p50_us)),
            line(c, "p99", true, &|p| by_batch(p, p.latency.p99_us)),
        ]
    });

    let latency = Panel {
        x: Axis::log("samples in a request").at(&batches),
        y: Axis::log(&format!("latency, µs ({cache} MiB)")),
        series: latency.collect(),
    };
    let hits = Panel {
        x: Axis::log("embedding cache, MiB").at(&caches),
        y: Axis::linear(&format!("hit rate, % (batch {batch})")),
        series: (0..keys.len()).map(|c| line(c, "", false, &by_cache)).collect(),
    };

    match (batches.len(), caches.len()) {
        (2.., 2..) => vec![latency, hits],
        (_, 2..) => vec![hits],
        _ => vec![latency],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::report_of;

    fn parse(line: &str) -> Result<RequestArgs, clap::Error> {
        crate::tests::parse(line)
    }

    #[test]
    fn lists_parse_and_sort() {
        let args = parse(
            "request --keys uniform,hotkey:90/1 --batch 64,1,64 --cache-mib 4,0.5 --seconds 2",
        )
        .unwrap();
        let sweep = args.sweep();
        assert_eq!(
            (sweep.keys.len(), sweep.batches, sweep.caches_mib),
            (2, vec![1, 64], vec![0.5, 4.0])
        );
        assert!(parse("request --keys zipf").unwrap_err().to_string().contains("powerlaw[:ALPHA]"));
        assert!(parse("request --batch 0").is_err() && parse("request --threads 0").is_err());
        for wrong in ["--seconds=0", "--seconds=nan", "--cache-mib=-1", "--cache-mib=nan"] {
            let flag = wrong.split('=').next().unwrap_or_default();
            let error = parse(&format!("request {wrong}")).unwrap_err().to_string();
            assert!(error.contains(flag), "{error}");
        }
    }

    #[test]
    fn a_short_run_gives_every_point() {
        let folder = tempfile::tempdir().unwrap();
        let plot = folder.path().join("a.svg");
        let report = report_of(&format!(
            "request --quick --rows-max 2000 --keys uniform,powerlaw --batch 8,32 --cache-mib 0.2 \
             --seconds 0.01 --threads 2 --plot {}",
            plot.display()
        ));
        assert!(report["bars"].as_array().unwrap().is_empty());
        let points = report["points"].as_array().unwrap();
        assert_eq!(points.len(), 4);
        for point in points {
            let requests = point["latency"]["requests"].as_u64().unwrap();
            let per_request = 35 * point["batch"].as_u64().unwrap();
            assert_eq!(point["lookups"]["fresh"].as_u64(), Some(per_request * requests));
            assert!(
                point["hit_rate"].as_f64().unwrap() > 0.0
                    && point["seconds"].as_f64().unwrap() >= 0.01
            );
        }
        let chart = std::fs::read_to_string(&plot).unwrap();
        assert!(chart.contains("uniform p50") && chart.contains("powerlaw:1.05 p99"));
    }

    #[test]
    fn charts_show_what_varies() {
        let point = |keys: &str, cache_mib, batch| {
            let lookups = Lookups::default();
            let latency =
                Percentiles { p50_us: f64::from(batch), p99_us: 1000.0, ..Percentiles::default() };
            let (keys, hit_rate, steady) = (keys.to_owned(), cache_mib / 10.0, true);
            let (seconds, requests_per_s, samples_per_s, lookups_per_s) = (1.0, 1.0, 1.0, 1.0);
            let (cache_rows, threads, pages_per_request) = (1, 1, 0.0);
            RequestFigures {
                keys,
                cache_mib,
                cache_rows,
                batch,
                threads,
                seconds,
                requests_per_s,
                samples_per_s,
                lookups_per_s,
                latency,
                hit_rate,
                steady,
                pages_per_request,
                lookups,
            }
        };
        let all = |caches: &[f64], batches: &[u32]| -> Vec<RequestFigures> {
            let sizes = caches.iter().flat_map(|c| batches.iter().map(move |b| (*c, *b)));
            let sizes: Vec<_> = sizes.collect();
            ["uniform", "histogram:/a/b.jsonl"]
                .iter()
                .flat_map(|k| sizes.iter().map(|s| point(k, s.0, s.1)))
                .collect()
        };
        let both = charts(&all(&[1.0, 4.0], &[1, 8]));
        assert_eq!((both.len(), both[0].series.len(), both[1].series.len()), (2, 4, 2));
        assert_eq!(both[0].series[0].points, [(1.0, 1.0), (8.0, 8.0)]);
        assert_eq!(both[1].series[1].points, [(1.0, 10.0), (4.0, 40.0)]);
        assert_eq!(
            (both[0].series[3].name.as_str(), both[1].series[0].name.as_str()),
            ("b.jsonl p99", "uniform")
        );
        assert!(charts(&all(&[1.0, 4.0], &[8]))[0].y.label.contains("hit rate"));
        assert!(charts(&all(&[4.0], &[8]))[0].y.label.contains("latency"));
        assert!(charts(&[]).is_empty());
    }
}
