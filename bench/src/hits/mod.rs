//! `bench hits`: the hit rate of the embedding cache beside other policies with the same number of
//! slots, over streams of lookups, and the rows per MiB of its memory. Never measures times: the
//! synthetic streams give the same figures on every machine, and `figures.txt` records them.

pub mod policies;
mod traces;

use self::policies::PeerCache;
use super::bars::{Bar, bars_table};
use super::results::{BenchReport, HostMachine, PeerNotRun};
use anyhow::{Context, Result};
use clap::Args;
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::KeySpaces;
use hatchback_tools::report::Json;
use hatchback_tools::report::plot::{self, Axis, Panel, Series};
use hatchback_tools::{report, say, serve};
use serde::Serialize;
use std::path::PathBuf;
use traces::Trace;

/// Measures hit rates of the cache beside other policies, and its rows a MiB
#[derive(Args, Debug)]
pub struct HitsArgs {
    /// A CSV file with a head line as another stream: each row looks its fields up, in order
    #[arg(long, requires = "columns")]
    csv: Option<PathBuf>,
    /// The columns of the CSV file that are looked up
    #[arg(long, value_delimiter = ',')]
    columns: Vec<String>,
    /// Two synthetic streams only
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    json: Json,
    /// Draws the hit rates as SVG
    #[arg(long)]
    plot: Option<PathBuf>,
}

/// Slots of the caches, in per cent of a stream's rows.
const SIZES: [f64; 4] = [0.1, 1.0, 5.0, 10.0];
/// Ways of a set of our cache. The number of slots is a multiple of it.
const SET: usize = 14;
/// Largest difference of equal hit rates, in points: two caches divide a stream into different
/// sets.
const RATE_TOLERANCE: f64 = 0.02;

/// Hit rates at one size of the caches.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HitRates {
    /// Name of the stream.
    pub trace: String,
    /// Requested slots, in per cent of the stream's rows.
    pub size_percent: f64,
    /// Slots of each cache: whole sets, at least one.
    pub slots: usize,
    /// Per cent of the lookups that hit, by policy.
    pub hit_percent: Vec<(&'static str, f64)>,
}

/// The memory that rows take.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RowDensity {
    /// Values in a row.
    pub dim: usize,
    /// Encoding of the row.
    pub codec: &'static str,
    /// Bytes of a slot with its share of the set header.
    pub slot_bytes: f64,
    /// Rows per MiB.
    pub rows_per_mib: f64,
    /// Rows per MiB over those of f32 rows with 16 bytes of metadata each (HugeCTR's HPS).
    pub over_hps: f64,
}

/// An entry of the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum HitsEntry {
    /// Hit rates.
    Rates(HitRates),
    /// Rows per MiB.
    Density(RowDensity),
    /// A peer that did not run.
    NotRun(PeerNotRun),
}

/// Runs the measurement.
///
/// # Errors
/// A file cannot be read or written.
pub fn run(args: &HitsArgs, peers: &[PeerCache]) -> Result<()> {
    let mut points = rates(&synthetic(args.quick), peers)?;
    if let Some(path) = &args.csv {
        points.extend(rates(&[|| traces::csv(path, &args.columns)], peers)?);
    }
    let mut points: Vec<HitsEntry> = points.into_iter().map(HitsEntry::Rates).collect();
    points.extend(densities()?.into_iter().map(HitsEntry::Density));
    if peers.is_empty() {
        let (reason, command) = ("not linked".to_owned(), STORES);
        points.push(HitsEntry::NotRun(PeerNotRun::new(policies::CRATE, reason, command)));
    }

    let (machine, model) = (HostMachine::this(), "counts".to_owned());
    let bars = bars(&points);
    let report = BenchReport { bench: "hits", machine, model, bars, points };
    if let Some(path) = &args.plot {
        plot::panels(path, "Hit rate by cache size", &charts(&report.points))?;
    }
    args.json.write(&report, || print_tables(&report))
}

/// Command that links the crate.
const STORES: &str = "cargo run --release --manifest-path bench/stores/Cargo.toml -- hits";

/// Builds a stream.
type MakeTrace = fn() -> Result<Trace>;

/// Returns the synthetic streams.
fn synthetic(quick: bool) -> Vec<MakeTrace> {
    let all: [MakeTrace; 7] = [
        || Ok(traces::zipf(0.8)),
        || Ok(traces::zipf(1.05)),
        || Ok(traces::zipf(1.393)),
        || Ok(traces::drifting()),
        || Ok(traces::scanning()),
        || Ok(traces::sessions()),
        || Ok(traces::criteo_tables()),
    ];
    if quick { vec![all[1], all[5]] } else { all.into() }
}

/// Returns the hit rates over `streams` at all sizes.
fn rates(streams: &[impl Fn() -> Result<Trace>], peers: &[PeerCache]) -> Result<Vec<HitRates>> {
    let bar =
        serve::progress_bar((streams.len() * SIZES.len()) as u64, "counting", "{pos}/{len} sizes");
    let mut rates = Vec::new();
    for stream in streams {
        let trace = stream()?;
        for size in SIZES {
            rates.push(rates_at(&trace, size, peers)?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(rates)
}

fn rates_at(trace: &Trace, size_percent: f64, peers: &[PeerCache]) -> Result<HitRates> {
    let slots = (trace.rows() as f64 * size_percent / 100.0) as usize;
    let slots = slots.div_ceil(SET).max(1) * SET;
    let mut hit_percent = Vec::new();

    for (name, mut policy) in policies::all(trace, slots, peers)? {
        let (warm_up, counted) = trace.lookups.split_at(trace.warm_up);
        warm_up.iter().for_each(|&row| {
            policy.look_up(row);
        });
        let hits = counted.iter().filter(|&&row| policy.look_up(row)).count();
        hit_percent.push((name, 100.0 * hits as f64 / counted.len().max(1) as f64));
    }
    Ok(HitRates { trace: trace.name.clone(), size_percent, slots, hit_percent })
}

impl HitRates {
    fn of(&self, policy: &str) -> Option<f64> {
        self.hit_percent.iter().find_map(|(name, rate)| (*name == policy).then_some(*rate))
    }

    fn cells(&self) -> Vec<String> {
        let head = [
            self.trace.clone(),
            format!("{} %", self.size_percent),
            report::count(self.slots as u64),
        ];
        head.into_iter()
            .chain(self.hit_percent.iter().map(|(_, rate)| format!("{rate:.2}")))
            .collect()
    }
}

/// Returns the bytes of our slots beside those of f32 rows with 16 bytes of metadata.
fn densities() -> Result<Vec<RowDensity>> {
    let mut densities = Vec::new();
    for dim in [16, 32, 64, 128] {
        for (codec, row_bytes) in [("f32", 4 * dim), ("f16", 2 * dim), ("u8", dim + 4)] {
            let cache = Cache::new(row_bytes, 16 << 20, &KeySpaces::new(vec![Some(1 << 24)]));
            let cache = cache.context("16 MiB are too few for a cache")?;
            let slot_bytes = cache.bytes() as f64 / cache.slots() as f64;
            let over_hps = (4 * dim + 16) as f64 / slot_bytes;
            densities.push(RowDensity {
                dim,
                codec,
                slot_bytes,
                rows_per_mib: (1 << 20) as f64 / slot_bytes,
                over_hps,
            });
        }
    }
    Ok(densities)
}

fn all_rates(points: &[HitsEntry]) -> impl Iterator<Item = &HitRates> {
    points.iter().filter_map(|p| if let HitsEntry::Rates(rates) = p { Some(rates) } else { None })
}

fn bars(points: &[HitsEntry]) -> Vec<Bar> {
    let ours = policies::NAMES[0];
    let lead = |other: &str| {
        let leads = all_rates(points).filter_map(|r| Some(r.of(ours)? - r.of(other)?));
        leads.reduce(f64::min)
    };
    let density = points.iter().find_map(|p| match p {
        HitsEntry::Density(d) if (d.dim, d.codec) == (16, "u8") => Some(d.over_hps),
        _ => None,
    });

    vec![
        Bar::at_least("least lead over LRU, points", lead("LRU"), -RATE_TOLERANCE),
        Bar::at_least("least lead over 64-way LRU, points", lead("64-way LRU"), -RATE_TOLERANCE),
        Bar::at_least("rows a MiB, u8 of 16 / f32 with 16 bytes beside", density, 3.0),
    ]
}

/// Prints the tables.
fn print_tables(report: &BenchReport<HitsEntry>) -> Result<()> {
    let first = all_rates(&report.points).next();
    let names = first.map_or(Vec::new(), |r| r.hit_percent.iter().map(|(name, _)| *name).collect());
    let heads: Vec<&str> = ["stream", "size", "slots"].into_iter().chain(names).collect();
    let mut table = report::table(&heads);
    table.add_rows(all_rates(&report.points).map(HitRates::cells));
    say!("{table}")?;
    say!(
        "Per cent of lookups that hit. The size is in per cent of the rows; slots come in whole \
         sets of {SET}."
    )?;

    let mut table = report::table(&["dim", "codec", "bytes a slot", "rows a MiB", "over HPS"]);
    for point in &report.points {
        match point {
            HitsEntry::Density(density) => {
                table.add_row(density.cells());
            }
            HitsEntry::NotRun(peer) => say!("{}", peer.cells().join(": "))?,
            HitsEntry::Rates(_) => {}
        }
    }
    say!("{table}")?;
    say!("HPS: rows of f32, and 16 bytes beside each.")?;
    say!("{}", bars_table(&report.bars))
}

impl RowDensity {
    fn cells(&self) -> [String; 5] {
        [
            self.dim.to_string(),
            self.codec.to_owned(),
            format!("{:.0}", self.slot_bytes),
            report::count(self.rows_per_mib as u64),
            format!("{:.2}", self.over_hps),
        ]
    }
}

/// Returns the panels of two synthetic streams and the last stream: hit rate by size, one line per
/// policy.
fn charts(points: &[HitsEntry]) -> Vec<Panel> {
    let mut traces: Vec<&str> = all_rates(points).map(|r| r.trace.as_str()).collect();
    traces.dedup();
    let shown = ["Zipf 1.05", "sessions"].into_iter().chain(traces.last().copied());
    let mut shown: Vec<&str> = shown.filter(|t| traces.contains(t)).collect();
    shown.dedup();

    let panel = |trace: &str| {
        let rates: Vec<&HitRates> = all_rates(points).filter(|r| r.trace == trace).collect();
        let names = rates
            .first()
            .map_or(Vec::new(), |r| r.hit_percent.iter().map(|(name, _)| *name).collect());
        let line = |(color, name): (usize, &&str)| Series {
            name: (*name).to_owned(),
            color,
            dashed: color > 0,
            points: rates.iter().filter_map(|r| Some((r.size_percent, r.of(name)?))).collect(),
        };

        Panel {
            x: Axis::log("slots, % of the rows").at(&SIZES),
            y: Axis::linear(&format!("{trace}, hits %")),
            series: names.iter().enumerate().map(line).collect(),
        }
    };

    shown.into_iter().map(panel).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bars::BarResult;

    /// Returns the last six numbers of the line of `figures.txt` for a stream and a size.
    fn documented(trace: &str, size: &str) -> Vec<String> {
        let text = include_str!("figures.txt");
        let line = text
            .lines()
            .find(|l| l.trim_start().starts_with(trace) && l.contains(&format!(" {size} ")));
        let line = line.unwrap_or_else(|| panic!("no {trace} {size}"));
        line.split_whitespace().rev().take(6).map(str::to_owned).collect()
    }

    #[test]
    fn figures_are_those_of_the_documentation() {
        for (make, size) in
            [(traces::zipf(1.05), 1.0), (traces::sessions(), 0.1), (traces::drifting(), 10.0)]
        {
            let rates = rates_at(&make, size, &[]).unwrap();
            let mut cells: Vec<String> = rates.cells().into_iter().skip(3).take(5).collect();
            cells.reverse();
            assert_eq!(
                documented(&make.name, &format!("{size} %"))[1..],
                cells,
                "{} {size}",
                make.name
            );
        }
    }

    #[test]
    fn bars_take_the_worst_size() {
        let rates = |ours: f64, lru: f64| {
            let hit_percent = vec![("Hatchback", ours), ("LRU", lru), ("64-way LRU", lru - 1.0)];
            HitsEntry::Rates(HitRates {
                trace: "t".to_owned(),
                size_percent: 1.0,
                slots: 16,
                hit_percent,
            })
        };
        let bars = bars(&[rates(50.0, 40.0), rates(60.0, 60.5)]);
        assert_eq!(bars[0], Bar::at_least("least lead over LRU, points", -0.5, -RATE_TOLERANCE));
        assert_eq!(
            bars[1],
            Bar::at_least("least lead over 64-way LRU, points", 0.5, -RATE_TOLERANCE)
        );
        assert!(matches!(bars[0].result, BarResult::Measured { holds: false, .. }));
    }

    #[test]
    fn slots_take_few_bytes() {
        let densities = densities().unwrap();
        let u8_of_16 = densities.iter().find(|d| (d.dim, d.codec) == (16, "u8")).unwrap();
        assert!((u8_of_16.slot_bytes - 26.3).abs() < 0.1 && u8_of_16.over_hps > 3.0);
    }
}
