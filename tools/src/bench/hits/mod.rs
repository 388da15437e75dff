//! `bench hits`: the hit rate of the embedding cache beside other policies of the same number of
//! slots, over streams of lookups, and the rows that fit in its memory. Counts, never clocks: the
//! made-up streams give the same figures everywhere, and `docs/hits.md` holds them.

mod policies;
mod traces;

use super::{Bar, Machine, NotRun, Report, bars_table};
use crate::report::plot::{self, Axis, Panel, Series};
use crate::{report, serve};
use anyhow::{Context, Result};
use clap::Args;
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::KeySpaces;
use serde::Serialize;
use std::path::{Path, PathBuf};
use traces::Trace;

pub use crate::workload::synthetic::CARDINALITIES as TABLES;

/// Measures hit rates of the cache beside other policies, and its rows a MiB
#[derive(Args, Debug)]
pub struct HitsArgs {
    /// A CSV file with a head line, taken as a stream too: each row looks its fields up, in order
    #[arg(long, requires = "columns")]
    csv: Option<PathBuf>,
    /// The columns of it that are looked up
    #[arg(long, value_delimiter = ',')]
    columns: Vec<String>,
    /// Two made-up streams only
    #[arg(long)]
    quick: bool,
    /// Writes all figures as JSON (`-`: standard output, without the tables)
    #[arg(long)]
    json: Option<PathBuf>,
    /// Draws the hit rates as SVG
    #[arg(long)]
    plot: Option<PathBuf>,
}

/// Slots in per cent of a stream's rows.
const SIZES: [f64; 4] = [0.1, 1.0, 5.0, 10.0];
/// Ways of our sets: slots come in whole sets.
const SET: usize = 14;
/// Hit rates this close in points are the same: the sets of two caches divide a stream in different
/// ways.
const SAME: f64 = 0.02;

/// Hit rates at one size of the cache.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rates {
    /// The stream.
    pub trace: String,
    /// Slots in per cent of its rows, as asked for.
    pub size_percent: f64,
    /// Slots: whole sets, one at least.
    pub slots: usize,
    /// Per cent of the lookups that were hits, by policy.
    pub hit_percent: Vec<(&'static str, f64)>,
}

/// Rows in memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Density {
    /// Values in a row.
    pub dim: usize,
    /// How they are kept.
    pub codec: &'static str,
    /// Bytes of a slot, all included.
    pub slot_bytes: f64,
    /// Rows in a MiB.
    pub rows_per_mib: f64,
    /// The same over what a cache of f32 rows with 16 bytes beside each takes (HugeCTR's HPS).
    pub over_hps: f64,
}

/// A figure of the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Point {
    /// Hit rates.
    Rates(Rates),
    /// Rows in memory.
    Density(Density),
    /// A peer that did not run.
    NotRun(NotRun),
}

/// Runs the command.
///
/// # Errors
/// A file cannot be read or written.
pub fn run(args: &HitsArgs) -> Result<()> {
    let mut points = rates(&made_up(args.quick))?;
    if let Some(path) = &args.csv {
        points.extend(rates(&[|| traces::csv(path, &args.columns)])?);
    }
    let mut points: Vec<Point> = points.into_iter().map(Point::Rates).collect();
    points.extend(densities()?.into_iter().map(Point::Density));
    if cfg!(not(feature = "peers")) {
        let reason = "not compiled in".to_owned();
        points.push(Point::NotRun(NotRun::new(
            policies::CRATE,
            reason,
            "cargo build --features peers",
        )));
    }
    let report = Report {
        bench: "hits",
        machine: Machine::this(),
        model: "counts".to_owned(),
        bars: bars(&points),
        points,
    };
    if let Some(path) = &args.plot {
        plot::panels(path, "Hit rate by cache size", &charts(&report.points))?;
    }
    if args.json.as_deref() != Some(Path::new("-")) {
        show(&report);
    }
    args.json.as_ref().map_or(Ok(()), |path| report::write_json(path, &report))
}

type Make = fn() -> Result<Trace>;

/// The made-up streams.
fn made_up(quick: bool) -> Vec<Make> {
    let all: [Make; 7] = [
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

/// The hit rates over these streams at all sizes.
fn rates(streams: &[impl Fn() -> Result<Trace>]) -> Result<Vec<Rates>> {
    let bar =
        serve::progress_bar((streams.len() * SIZES.len()) as u64, "counting", "{pos}/{len} sizes");
    let mut rates = Vec::new();
    for stream in streams {
        let trace = stream()?;
        for size in SIZES {
            rates.push(rates_at(&trace, size)?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(rates)
}

fn rates_at(trace: &Trace, size_percent: f64) -> Result<Rates> {
    let slots = (trace.rows() as f64 * size_percent / 100.0) as usize;
    let slots = slots.div_ceil(SET).max(1) * SET;
    let mut hit_percent = Vec::new();
    for (name, mut policy) in policies::all(trace, slots)? {
        let (warm_up, counted) = trace.lookups.split_at(trace.warm_up);
        warm_up.iter().for_each(|&row| {
            policy.look_up(row);
        });
        let hits = counted.iter().filter(|&&row| policy.look_up(row)).count();
        hit_percent.push((name, 100.0 * hits as f64 / counted.len().max(1) as f64));
    }
    Ok(Rates { trace: trace.name.clone(), size_percent, slots, hit_percent })
}

impl Rates {
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

/// Our slot beside one of f32 with 16 bytes of metadata, over dims and codecs.
fn densities() -> Result<Vec<Density>> {
    let mut densities = Vec::new();
    for dim in [16, 32, 64, 128] {
        for (codec, row_bytes) in [("f32", 4 * dim), ("f16", 2 * dim), ("u8", dim + 4)] {
            let cache = Cache::new(row_bytes, 16 << 20, &KeySpaces::new(vec![Some(1 << 24)]));
            let cache = cache.context("16 MiB are no cache")?;
            let slot_bytes = cache.bytes() as f64 / cache.slots() as f64;
            let over_hps = (4 * dim + 16) as f64 / slot_bytes;
            densities.push(Density {
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

fn all_rates(points: &[Point]) -> impl Iterator<Item = &Rates> {
    points.iter().filter_map(|p| if let Point::Rates(rates) = p { Some(rates) } else { None })
}

fn bars(points: &[Point]) -> Vec<Bar> {
    let ours = policies::NAMES[0];
    let lead = |other: &str| {
        let leads = all_rates(points).filter_map(|r| Some(r.of(ours)? - r.of(other)?));
        leads.reduce(f64::min)
    };
    let density = points.iter().find_map(|p| match p {
        Point::Density(d) if (d.dim, d.codec) == (16, "u8") => Some(d.over_hps),
        _ => None,
    });
    vec![
        Bar::at_least_if("least lead over LRU, points", lead("LRU"), -SAME),
        Bar::at_least_if("least lead over 64-way LRU, points", lead("64-way LRU"), -SAME),
        Bar::at_least_if("rows a MiB, u8 of 16 / f32 with 16 bytes beside", density, 3.0),
    ]
}

fn show(report: &Report<Point>) {
    let named = all_rates(&report.points).next();
    let names = named.map_or(Vec::new(), |r| r.hit_percent.iter().map(|(name, _)| *name).collect());
    let heads: Vec<&str> = ["stream", "size", "slots"].into_iter().chain(names).collect();
    let mut table = report::table(&heads);
    table.add_rows(all_rates(&report.points).map(Rates::cells));
    println!("{table}");
    println!(
        "Per cent of lookups that hit. The size is in per cent of the rows; slots come in whole sets of {SET}."
    );
    let mut table = report::table(&["dim", "codec", "bytes a slot", "rows a MiB", "over HPS"]);
    for point in &report.points {
        match point {
            Point::Density(d) => {
                table.add_row([
                    d.dim.to_string(),
                    d.codec.to_owned(),
                    format!("{:.0}", d.slot_bytes),
                    report::count(d.rows_per_mib as u64),
                    format!("{:.2}", d.over_hps),
                ]);
            }
            Point::NotRun(peer) => println!("{}", peer.cells().join(": ")),
            Point::Rates(_) => {}
        }
    }
    println!("{table}");
    println!("HPS: rows of f32, and 16 bytes beside each.");
    println!("{}", bars_table(&report.bars));
}

/// A panel for each of the first streams: hit rate by size, a line a policy.
fn charts(points: &[Point]) -> Vec<Panel> {
    let mut traces: Vec<&str> = all_rates(points).map(|r| r.trace.as_str()).collect();
    traces.dedup();
    let shown = ["Zipf 1.05", "sessions"].into_iter().chain(traces.last().copied());
    let mut shown: Vec<&str> = shown.filter(|t| traces.contains(t)).collect();
    shown.dedup();
    let panel = |trace: &str| {
        let rates: Vec<&Rates> = all_rates(points).filter(|r| r.trace == trace).collect();
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
    use crate::bench::Found;

    /// The line of `docs/hits.md` for a stream and a size, as numbers.
    fn documented(trace: &str, size: &str) -> Vec<String> {
        let text = include_str!("../../../../docs/hits.md");
        let line = text
            .lines()
            .find(|l| l.trim_start().starts_with(trace) && l.contains(&format!(" {size} ")));
        let line = line.unwrap_or_else(|| panic!("no {trace} {size}"));
        line.split_whitespace().rev().take(6).map(str::to_owned).collect()
    }

    /// What the cache does is what the documentation says, to the last digit.
    #[test]
    fn figures_are_those_of_the_documentation() {
        for (make, size) in
            [(traces::zipf(1.05), 1.0), (traces::sessions(), 0.1), (traces::drifting(), 10.0)]
        {
            let rates = rates_at(&make, size).unwrap();
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
            Point::Rates(Rates { trace: "t".to_owned(), size_percent: 1.0, slots: 16, hit_percent })
        };
        let bars = bars(&[rates(50.0, 40.0), rates(60.0, 60.5)]);
        assert_eq!(bars[0], Bar::at_least("least lead over LRU, points", -0.5, -SAME));
        assert_eq!(bars[1], Bar::at_least("least lead over 64-way LRU, points", 0.5, -SAME));
        assert!(matches!(bars[0].found, Found::Measured { holds: false, .. }));
    }

    #[test]
    fn slots_take_few_bytes() {
        let densities = densities().unwrap();
        let u8_of_16 = densities.iter().find(|d| (d.dim, d.codec) == (16, "u8")).unwrap();
        assert!((u8_of_16.slot_bytes - 26.3).abs() < 0.1 && u8_of_16.over_hps > 3.0);
    }
}
