//! The figures of `bench lookup`: the engines' names, the bars, the tables and the chart. Never
//! measures.

use super::calls::{BATCHES, HOTNESS, KEYS, POPULAR, Shape};
use super::page_walks::PageWalks;
use crate::bars::{Bar, bars_table};
use crate::filled_cache::TABLES;
use crate::peer::BestTimes;
use crate::results::{BenchReport, Measurement, distinct};
use anyhow::Result;
use hatchback::Codec;
use hatchback_tools::report::plot::{Axis, Panel, Series};
use hatchback_tools::{report, say};
use serde::Serialize;

/// Peers with rows of fp32.
pub const FP32: &[&str] = &["FBGEMM, fp32", "torch EmbeddingBag, fp32"];
/// Peers with rows of fp16.
pub const FP16: &[&str] = &["FBGEMM, fp16"];
/// Peers with rows of one byte per value.
pub const BYTES: &[&str] = &["FBGEMM, int8", "torch quantized, byte"];

/// Where an engine of ours keeps its rows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum RowPlace {
    /// All tables in one whole cache: the cache of a model whose budget has room for every row.
    Cached,
    /// All tables in one cache that finds a row by its hash, as under a smaller budget. The cache
    /// holds half of the rows.
    Hashed,
    /// Each table whole in memory.
    Resident,
}

/// One of our engines.
pub struct OurEngine {
    /// Name in tables and JSON.
    pub name: &'static str,
    /// Encoding of the rows.
    pub codec: Codec,
    /// Where the rows are.
    pub place: RowPlace,
    /// The peers whose rows have as many bytes.
    peers: &'static [&'static str],
}

impl OurEngine {
    /// Returns whether the engine holds every row that `shape` requests.
    pub fn has_keys_of(&self, shape: Shape) -> bool {
        self.place != RowPlace::Hashed || shape.keys == POPULAR
    }
}

/// Returns one of our engines.
const fn ours(
    name: &'static str,
    codec: Codec,
    place: RowPlace,
    peers: &'static [&'static str],
) -> OurEngine {
    OurEngine { name, codec, place, peers }
}

/// Our engines.
pub const OURS: [OurEngine; 9] = [
    ours("Hatchback, f32, cached", Codec::F32, RowPlace::Cached, FP32),
    ours("Hatchback, f32, hashed", Codec::F32, RowPlace::Hashed, FP32),
    ours("Hatchback, f32, resident", Codec::F32, RowPlace::Resident, FP32),
    ours("Hatchback, f16, cached", Codec::F16, RowPlace::Cached, FP16),
    ours("Hatchback, f16, hashed", Codec::F16, RowPlace::Hashed, FP16),
    ours("Hatchback, f16, resident", Codec::F16, RowPlace::Resident, FP16),
    ours("Hatchback, u8, cached", Codec::U8, RowPlace::Cached, BYTES),
    ours("Hatchback, u8, hashed", Codec::U8, RowPlace::Hashed, BYTES),
    ours("Hatchback, u8, resident", Codec::U8, RowPlace::Resident, BYTES),
];

/// Reads of the requested rows without a lookup: name, and encoding of the rows.
pub const READS: [(&str, Codec); 3] = [
    ("only reads, f32 rows", Codec::F32),
    ("only reads, f16 rows", Codec::F16),
    ("only reads, u8 rows", Codec::U8),
];

/// Batches of at most so many samples have the larger of the two bars for cached rows.
const SMALL_BATCH: usize = 256;

/// The figures of one engine at one shape, or a peer that did not run.
pub type LookupMeasurement = Measurement<LookupFigures>;

/// The figures of one engine at one shape.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LookupFigures {
    /// Name of the engine.
    pub engine: String,
    /// Columns of a row.
    pub dim: usize,
    /// Key distribution.
    pub keys: &'static str,
    /// Keys per bag.
    pub hotness: usize,
    /// Samples per call.
    pub batch: usize,
    /// CPU time of a call, median of the best round, µs.
    pub p50_us: f64,
    /// CPU time of a call, 99th percentile of the round that is best in it, µs.
    pub p99_us: f64,
    /// Rows per second at p50, millions.
    pub mrows_per_s: f64,
}

impl LookupFigures {
    /// Returns the figures of `engine` at `shape`.
    pub fn new(engine: String, dim: usize, shape: Shape, best: BestTimes) -> Self {
        let (Shape { keys, hotness, batch }, BestTimes { p50_us, p99_us }) = (shape, best);
        let mrows_per_s = (TABLES * batch * hotness) as f64 / p50_us;
        Self { engine, dim, keys, hotness, batch, p50_us, p99_us, mrows_per_s }
    }

    /// Returns whether both figures are of the same shape.
    fn has_shape_of(&self, other: &Self) -> bool {
        let shape = |m: &Self| (m.dim, m.keys, m.hotness, m.batch);
        shape(self) == shape(other)
    }
}

fn measured(points: &[LookupMeasurement]) -> impl Iterator<Item = &LookupFigures> + Clone {
    points.iter().filter_map(Measurement::figures)
}

/// Returns the engines in the order of the tables: ours, the peers, then the reads.
fn engine_names(points: &[LookupMeasurement]) -> Vec<&str> {
    let ours = OURS.iter().map(|engine| engine.name);
    distinct(ours.chain(measured(points).map(|m| m.engine.as_str())))
}

/// Returns the best time of `others` over the time of `ours`, at the worst of the shapes that
/// `wanted` accepts. Returns `None` if `ours` or all of `others` are missing at one of them.
pub fn least_speedup(
    points: &[LookupMeasurement],
    ours: &str,
    others: &[&str],
    wanted: impl Fn(&LookupFigures) -> bool,
) -> Option<f64> {
    let speedup = |own: &LookupFigures| {
        let same =
            measured(points).filter(|m| m.has_shape_of(own) && others.contains(&m.engine.as_str()));
        Some(same.map(|m| m.p50_us).reduce(f64::min)? / own.p50_us)
    };
    let own = measured(points).filter(|m| m.engine == ours && wanted(m));
    own.map(speedup).collect::<Option<Vec<f64>>>()?.into_iter().reduce(f64::min)
}

/// Returns the demanded figures.
pub fn bars(points: &[LookupMeasurement]) -> Vec<Bar> {
    let mut bars = Vec::new();
    let f32_rows = &OURS[0];
    let one_key = |m: &LookupFigures| (m.batch, m.hotness) == (1, 1);
    let first = least_speedup(points, f32_rows.name, f32_rows.peers, one_key);
    let first = Bar::at_least("batch 1, one key: best fp32 peer / f32, cached", first, 20.0);
    bars.push(first.because("a peer did not run"));

    for batch in BATCHES {
        for OurEngine { name, place, peers, .. } in &OURS {
            let speedup = least_speedup(points, name, peers, |m| m.batch == batch);
            let bar = format!("batch {batch}: best peer / {name}, worst shape");
            let small = *place == RowPlace::Cached && batch <= SMALL_BATCH;
            let bar = Bar::at_least(bar, speedup, if small { 1.2 } else { 1.0 });
            bars.push(bar.because("a peer did not run"));
        }
    }
    bars
}

/// Prints the tables.
///
/// # Errors
/// Standard output is closed.
pub fn print_tables(
    report: &BenchReport<LookupMeasurement>,
    about: Option<&str>,
    walks: &PageWalks,
) -> Result<()> {
    say!("{}", report.machine)?;
    if let Some(about) = about {
        say!("Peers: {about}.")?;
    }

    let mut dims: Vec<usize> = measured(&report.points).map(|m| m.dim).collect();
    dims.dedup();
    for dim in dims {
        for keys in KEYS {
            for hotness in HOTNESS {
                say!("dim {dim}, {keys} keys, {hotness} a bag: µs a call (million rows a second)")?;
                say!("{}", shape_table(&report.points, dim, keys, hotness))?;
            }
        }
    }

    say!(
        "CPU time on one core, p50 of the best of several turns; all rows in memory, fresh keys in \
         every call."
    )?;
    say!(
        "`only reads` loads one word of each cache line of the requested rows. It adds no rows and \
         writes no result."
    )?;
    say!(
        "A load of a cached line takes {:.1} ns if the lines are neighbours, and {:.1} ns if each \
         is on its own 4 KiB. The difference is the walk of page tables, where the machine has \
         small pages.",
        walks.packed_ns,
        walks.spread_ns
    )?;
    say!("{}", bars_table(&report.bars))
}

/// Returns the table of one width, distribution and hotness: a row per engine, a column per batch
/// size.
fn shape_table(
    points: &[LookupMeasurement],
    dim: usize,
    keys: &str,
    hotness: usize,
) -> comfy_table::Table {
    let heads = BATCHES.map(|b| format!("batch {b}"));
    let heads: Vec<&str> = ["engine"].into_iter().chain(heads.iter().map(String::as_str)).collect();
    let mut table = report::table(&heads);

    for name in engine_names(points) {
        let own = measured(points).filter(|m| m.engine == name && m.dim == dim);
        let own = own.filter(|m| (m.keys, m.hotness) == (keys, hotness));
        let cells = own.map(|m| format!("{:.1} ({:.1})", m.p50_us, m.mrows_per_s));
        let cells: Vec<String> = cells.collect();
        if !cells.is_empty() {
            table.add_row([name.to_owned()].into_iter().chain(cells));
        }
    }
    for peer in points.iter().filter_map(Measurement::not_run) {
        table.add_row(peer.cells());
    }
    table
}

/// Returns the chart: rows per second by batch size, with the most keys per bag, of the first row
/// width. One panel has uniform keys of all rows. The other has the hashed caches beside the peers,
/// with Zipf keys of the popular rows.
pub fn charts(points: &[LookupMeasurement]) -> Vec<Panel> {
    let dim = measured(points).next().map_or(0, |m| m.dim);
    let hotness = HOTNESS[HOTNESS.len() - 1];
    // A peer has no place.
    let place = |name: &str| OURS.iter().find(|e| e.name == name).map(|e| e.place);
    let panel = |keys: &str| {
        let line = |(color, name): (usize, &str)| {
            let own = measured(points).filter(|m| m.engine == name && m.dim == dim);
            let own = own.filter(|m| (m.keys, m.hotness) == (keys, hotness));
            let dashed = place(name).is_none();
            let points = own.map(|m| (m.batch as f64, m.mrows_per_s)).collect();
            Series { name: name.to_owned(), color, dashed, points }
        };
        let shown = |name: &str| {
            let here = |place| (place == RowPlace::Hashed) == (keys == POPULAR);
            place(name).is_none_or(here) && READS.iter().all(|(reads, _)| *reads != name)
        };
        let lines = engine_names(points).into_iter().enumerate().map(line);
        Panel {
            x: Axis::log("samples of a call").at(&BATCHES.map(|b| b as f64)),
            y: Axis::log(&format!("Mrows/s, {keys} keys")),
            series: lines.filter(|line| shown(&line.name)).collect(),
        }
    };
    ["uniform", POPULAR].map(panel).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(engine: &str, batch: usize, keys: &'static str, p50_us: f64) -> LookupMeasurement {
        let best = BestTimes { p50_us, p99_us: p50_us };
        let shape = Shape { keys, hotness: 1, batch };
        Measurement::Measured(LookupFigures::new(engine.to_owned(), 64, shape, best))
    }

    #[test]
    fn the_worst_shape_beside_the_best_peer_counts() {
        let ours = OURS[0].name;
        let mut points = vec![point(ours, 1, "uniform", 2.0), point(ours, 1, "zipf", 1.0)];
        assert!(least_speedup(&points, ours, FP32, |_| true).is_none());
        for (keys, us) in [("uniform", 30.0), ("zipf", 25.0)] {
            points.push(point("FBGEMM, fp32", 1, keys, us));
            points.push(point("torch EmbeddingBag, fp32", 1, keys, us + 100.0));
            points.push(point("FBGEMM, fp16", 1, keys, 1.0));
        }
        assert_eq!(least_speedup(&points, ours, FP32, |_| true), Some(15.0));
        assert_eq!(least_speedup(&points, ours, FP32, |m| m.keys == "zipf"), Some(25.0));
        let bars = bars(&points);
        let first = Bar::at_least("batch 1, one key: best fp32 peer / f32, cached", 15.0, 20.0);
        assert_eq!((&bars[0], bars.len()), (&first, 37));
    }
}
