//! The figures of `bench delta`: each update's, and those of all requests at one load. The p99 is
//! that of all requests beside updates over that of all requests in the windows around them, so
//! that no single window decides it. Never sends a request.

use super::args::DeltaArgs;
use super::callers::Sent;
use crate::bars::{Bar, largest};
use crate::results::{BenchReport, table};
use anyhow::Result;
use hatchback::request::serving::Swapped;
use hatchback_tools::report::metrics::{Latencies, Percentiles};
use hatchback_tools::{report, say};
use serde::Serialize;
use std::fmt;

/// One row in this many changes from each generation to the next.
pub const CHANGED_ONE_IN: u64 = 100;

/// Largest p99 while an update is applied, in multiples of the idle p99.
const P99_RATIO_BAR: f64 = 1.2;
/// Most bytes written per changed byte.
const AMPLIFICATION_BAR: f64 = 1.2;
/// Longest time from the staged bundle to the first answer of its generation, in seconds.
const SERVED_S_BAR: f64 = 1.0;
/// Most memory during an update, in multiples of the memory before.
const MEMORY_BAR: f64 = 1.1;
/// Largest loss of hit rate by a swap, in points.
const HIT_POINTS_BAR: f64 = 1.0;
/// Requests beside updates below which their p99 says nothing: 20 are beyond it.
const REQUESTS_MIN: u64 = 2000;

/// The figures of one update.
#[derive(Clone, Debug, Serialize)]
pub struct UpdateFigures {
    /// Sequence of the new generation.
    pub sequence: u64,
    /// Rate of the callers, per cent of the rate without pauses.
    pub load_percent: u32,
    /// Rows that changed.
    pub rows: u64,
    /// Bytes of the bundle.
    pub bundle_bytes: u64,
    /// Bytes that the install wrote to flash.
    pub written_bytes: u64,
    /// Bytes of the changed keys and rows, and of the network.
    pub changed_bytes: u64,
    /// Time from the bundle to a durable live record.
    pub install_s: f64,
    /// Time from the live record to the last request on the old generation, with warm caches.
    pub swap_s: f64,
    /// Time from the bundle to the first answer of the new generation.
    pub served_s: f64,
    /// Resident memory before the update, in bytes.
    pub memory_before: u64,
    /// The most resident memory during the update, in bytes.
    pub memory_peak: u64,
    /// CPU time of the update, per cent of the time that it took.
    pub cpu_percent: f64,
    /// Time for which the swap let no lookup start, µs.
    pub pause_us: f64,
    /// What the swap did with the rows in memory.
    pub swapped: Swapped,
    /// Latency of requests before the update.
    pub idle: Percentiles,
    /// Latency of requests during the update.
    pub applying: Percentiles,
    /// Latency of requests after the update, for as long as the update took.
    pub idle_after: Percentiles,
    /// Share of lookups that hit the cache before the update.
    pub hit_rate_before: f64,
    /// Share of lookups of the new generation that hit the cache.
    pub hit_rate_after: f64,
}

/// The requests at one load: of all updates, and of the windows before and after them.
pub struct AtLoad {
    /// Rate of the callers, per cent of the rate without pauses.
    percent: u32,
    pub updates: usize,
    before: Sent,
    applying: Sent,
    after: Sent,
    /// p99 of each window without an update, µs.
    idle_p99_us: Vec<f64>,
    /// p99 of each update over that of the windows around it.
    ratios: Vec<f64>,
}

/// What the callers sent around one update.
pub struct Windows {
    pub before: Sent,
    pub applying: Sent,
    pub after: Sent,
}

impl AtLoad {
    /// Returns the load of `percent` without requests.
    pub fn of(percent: u32) -> Self {
        Self {
            percent,
            updates: 0,
            before: Sent::default(),
            applying: Sent::default(),
            after: Sent::default(),
            idle_p99_us: Vec::new(),
            ratios: Vec::new(),
        }
    }

    /// Adds the requests around one update, and sets their figures.
    pub fn add(&mut self, figures: &mut UpdateFigures, windows: Windows) {
        let Windows { before, applying, after } = windows;
        figures.load_percent = self.percent;
        figures.idle = before.latencies.percentiles();
        figures.applying = applying.latencies.percentiles();
        figures.idle_after = after.latencies.percentiles();

        let idle = [figures.idle.p99_us, figures.idle_after.p99_us];
        self.idle_p99_us.extend(idle);
        self.ratios.push(2.0 * figures.applying.p99_us / (idle[0] + idle[1]).max(1e-9));
        self.updates += 1;
        self.before.add(&before);
        self.applying.add(&applying);
        self.after.add(&after);
    }

    /// Returns the latencies of all windows without an update.
    fn idle(&self) -> Percentiles {
        let mut idle = Latencies::default();
        idle.add(&self.before.latencies);
        idle.add(&self.after.latencies);
        idle.percentiles()
    }

    /// Returns the p99 beside all updates over the p99 of all windows around them.
    fn bar(&self) -> Bar {
        let (applying, idle) = (self.applying.latencies.percentiles(), self.idle());
        let is_measured = applying.requests > 0 && idle.requests > 0;
        let ratio = is_measured.then_some(applying.p99_us / idle.p99_us);
        let name = format!("p99 while applying at {} % load, times idle", self.percent);
        Bar::at_most(name, ratio, P99_RATIO_BAR).because("no request was answered in one of them")
    }

    /// Returns the rows of the table of latencies.
    fn rows(&self) -> Vec<[String; 8]> {
        let of = |latencies: &Latencies| latencies.percentiles();
        let [write, open, read] = self.applying.steps.each_ref().map(of);
        [
            ("windows before", of(&self.before.latencies)),
            ("windows after", of(&self.after.latencies)),
            ("updates", of(&self.applying.latencies)),
            ("updates: check and write", write),
            ("updates: make live and open", open),
            ("updates: read changed rows", read),
        ]
        .map(|(name, p)| {
            let [p50, p90, p99, p999, most] =
                [p.p50_us, p.p90_us, p.p99_us, p.p999_us, p.max_us].map(report::micros);
            let requests = report::count(p.requests);
            [format!("{} %", self.percent), name.to_owned(), requests, p50, p90, p99, p999, most]
        })
        .into()
    }
}

/// How far the figures can be trusted.
impl fmt::Display for AtLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { percent, updates, idle_p99_us, .. } = self;
        let (applying, idle) = (self.applying.latencies.percentiles(), self.idle());
        let least = idle_p99_us.iter().copied().fold(f64::INFINITY, f64::min);
        let most = idle_p99_us.iter().copied().fold(0.0, f64::max);
        let [before, after] =
            [&self.before, &self.after].map(|sent| sent.latencies.percentiles().p99_us);
        let mut ratios = self.ratios.clone();
        ratios.sort_unstable_by(f64::total_cmp);
        write!(
            f,
            "{percent} % load: p99 of {} requests beside {updates} updates and of {} without one. \
             Without: {} in one window to {} in another; after over before {:.2}. Median of the \
             updates' own ratios {:.2}.",
            report::count(applying.requests),
            report::count(idle.requests),
            report::micros(least),
            report::micros(most),
            after / before.max(1e-9),
            ratios.get(ratios.len() / 2).copied().unwrap_or_default(),
        )?;
        if applying.requests < REQUESTS_MIN {
            write!(f, " Under {REQUESTS_MIN} requests the p99 is noise.")?;
        }
        Ok(())
    }
}

/// Returns the bars of all updates.
pub fn bars(points: &[UpdateFigures], loads: &[AtLoad]) -> Vec<Bar> {
    let worst = |of: fn(&UpdateFigures) -> f64| largest(points.iter().map(of));
    let mut bars = vec![
        Bar::at_most(
            "longest time from the staged delta to its first answer, seconds",
            worst(|p| p.served_s),
            SERVED_S_BAR,
        ),
        Bar::at_most(
            "longest pause of a swap, batches",
            worst(|p| p.pause_us / p.idle.p50_us),
            1.0,
        ),
        Bar::at_most(
            "most memory during an update, times that before",
            worst(|p| p.memory_peak as f64 / p.memory_before as f64),
            MEMORY_BAR,
        ),
        Bar::at_most(
            "bytes written for each byte that changed",
            worst(|p| p.written_bytes as f64 / p.changed_bytes.max(1) as f64),
            AMPLIFICATION_BAR,
        ),
        Bar::at_most(
            "largest loss of hit rate by a swap, points",
            worst(|p| 100.0 * (p.hit_rate_before - p.hit_rate_after)),
            HIT_POINTS_BAR,
        ),
    ];
    bars.extend(loads.iter().filter(|load| load.updates > 0).map(AtLoad::bar));
    bars
}

/// Prints the report, and writes it as JSON.
///
/// # Errors
/// An output cannot be written.
pub fn publish(
    args: &DeltaArgs,
    report: &BenchReport<UpdateFigures>,
    loads: &[AtLoad],
) -> Result<()> {
    args.json.write(report, || {
        say!(
            "{}: deltas of one row in {CHANGED_ONE_IN}, {} samples a request",
            report.model,
            args.batch
        )?;

        let heads = "to, load, rows, written, install, swap, served after, memory, CPU, pause, \
                     idle p99, applying p99, idle p99 after, read anew, hits before, after";
        say!("{}", table(heads, report.points.iter().map(UpdateFigures::cells)))?;
        let rows = loads.iter().filter(|load| load.updates > 0).flat_map(AtLoad::rows);
        say!("{}", table("load, requests of, number, p50, p90, p99, p99.9, most", rows))?;
        loads.iter().filter(|load| load.updates > 0).try_for_each(|load| say!("{load}"))?;
        report.bars.iter().try_for_each(|bar| say!("{bar}"))
    })
}

impl UpdateFigures {
    fn cells(&self) -> [String; 16] {
        [
            self.sequence.to_string(),
            format!("{} %", self.load_percent),
            report::count(self.rows),
            report::bytes(self.written_bytes),
            format!("{:.2} s", self.install_s),
            format!("{:.2} s", self.swap_s),
            format!("{:.2} s", self.served_s),
            format!("x {:.3}", self.memory_peak as f64 / self.memory_before as f64),
            format!("{:.1} %", self.cpu_percent),
            report::micros(self.pause_us),
            report::micros(self.idle.p99_us),
            report::micros(self.applying.p99_us),
            report::micros(self.idle_after.p99_us),
            report::count(self.swapped.read as u64),
            report::percent(self.hit_rate_before),
            report::percent(self.hit_rate_after),
        ]
    }
}
