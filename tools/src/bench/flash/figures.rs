//! What `bench flash` found: named figures of engines, the bars that follow from them, and the tables that
//! show them. Never measures.

use super::data::Data;
use crate::bench::Bar;
use crate::report;
use serde::Serialize;
use std::time::Duration;

/// The engine that the others are measured against.
pub const RAW: &str = "raw device";
/// Ours.
pub const OURS: &str = "Hatchback";
/// The peer with a bar.
pub const ROCKSDB: &str = "RocksDB";

/// A table of fewer bytes of rows does not stay cold while it is read: page cache and block caches fill.
const COLD_BYTES_MIN: u64 = 1 << 30;

/// What a figure is of. The names stand in tables and JSON.
pub mod measure {
    /// Pages in a second, in random order.
    pub const RAW_PAGES: &str = "random pages, pages/s";
    /// Batches of uniform keys, nothing of them in memory.
    pub const COLD: &str = "cold batch, uniform, rows/s";
    /// The same in pages, as a share of the raw device in the same round.
    pub const OF_RAW: &str = "cold batch, pages/s of raw device";
    /// Batches of Zipf keys.
    pub const ZIPF: &str = "cold batch, Zipf, rows/s";
    /// Batches of uniform keys with the update over the base.
    pub const COLD_UPDATED: &str = "cold batch over a delta, rows/s";
    /// Batches of keys that were just read.
    pub const WARM: &str = "warm batch, rows/s";
    /// One key, half are faster.
    pub const POINT_P50: &str = "point read p50, µs";
    /// One key, 99 % are faster.
    pub const POINT_P99: &str = "point read p99, µs";
    /// The misses of a request, half are faster.
    pub const MISSES_P50: &str = "155 misses p50, µs";
    /// The misses of a request, 99 % are faster.
    pub const MISSES_P99: &str = "155 misses p99, µs";
    /// The same while a compaction runs, half are faster.
    pub const COMPACTING_P50: &str = "155 misses during compaction p50, µs";
    /// The same while a compaction runs.
    pub const COMPACTING_P99: &str = "155 misses during compaction p99, µs";
    /// What the compaction wrote in a second meanwhile.
    pub const COMPACTION_RATE: &str = "compaction beside it, MB/s";
    /// Writing the table, durably.
    pub const LOAD: &str = "load, s";
    /// From files to the first possible read.
    pub const REOPEN: &str = "reopen, ms";
    /// The same with the update over the base.
    pub const REOPEN_UPDATED: &str = "reopen with a delta, ms";
    /// Changing one row in a hundred, durably.
    pub const UPDATE: &str = "1 % update, durable, s";
    /// Bytes that the update wrote, as a share of its rows' bytes.
    pub const UPDATE_AMP: &str = "1 % update, bytes written / row bytes";
    /// Bytes on flash after the load, as a share of the rows' bytes.
    pub const SPACE: &str = "bytes on flash / row bytes";
    /// Memory of the index.
    pub const INDEX_BITS: &str = "index in memory, bits a key";
}

/// A figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// Whose.
    pub engine: &'static str,
    /// What, with its unit.
    pub measure: &'static str,
    /// Reads in flight, where that is chosen.
    pub depth: Option<usize>,
    /// How much.
    pub value: f64,
}

/// An entry of the report.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Point {
    /// Something that was measured.
    Figure(Figure),
    /// A peer that was not.
    NotRun {
        /// Which.
        engine: &'static str,
        /// Why.
        #[serde(rename = "not run")]
        reason: String,
        /// What would include it.
        command: &'static str,
    },
}

/// All that was found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures(pub Vec<Point>);

impl Figures {
    /// Adds a figure without a depth.
    pub fn put(&mut self, engine: &'static str, measure: &'static str, value: f64) {
        self.0.push(Point::Figure(Figure { engine, measure, depth: None, value }));
    }

    /// Adds a figure at a depth.
    pub fn put_at(&mut self, engine: &'static str, measure: &'static str, depth: usize, value: f64) {
        self.0.push(Point::Figure(Figure { engine, measure, depth: Some(depth), value }));
    }

    /// A figure at a depth, or without one.
    pub fn at(&self, engine: &str, measure: &str, depth: Option<usize>) -> Option<f64> {
        self.0.iter().find_map(|point| match point {
            Point::Figure(f) if (f.engine, f.measure, f.depth) == (engine, measure, depth) => Some(f.value),
            _ => None,
        })
    }

    /// The engines with a figure, in their order.
    pub fn engines(&self) -> Vec<&'static str> {
        let mut engines = Vec::new();
        for point in &self.0 {
            if let Point::Figure(Figure { engine, .. }) = point
                && !engines.contains(engine)
            {
                engines.push(*engine);
            }
        }
        engines
    }

    /// The demanded figures, as far as they could be measured.
    pub fn bars(&self) -> Vec<Bar> {
        let ours = |measure, depth| self.at(OURS, measure, depth);
        let rocks = self.at(ROCKSDB, measure::COLD, None);
        let idle = ours(measure::MISSES_P99, Some(16));
        let ratio = |a: Option<f64>, b: Option<f64>| Some(a? / b?);
        let least = |name: &str, value, bar| bar_of(name, value, bar, |v, b| v >= b);
        let most = |name: &str, value, bar| bar_of(name, value, bar, |v, b| v <= b);
        [
            least("cold batch / raw device, depth 16", ours(measure::OF_RAW, Some(16)), 0.9),
            least("cold batch / raw device, depth 64", ours(measure::OF_RAW, Some(64)), 0.9),
            bar_of("index, bits a key", ours(measure::INDEX_BITS, None), 4.0, |v, b| v < b),
            bar_of("reopen, s", ours(measure::REOPEN, None).map(|ms| ms / 1e3), 0.2, |v, b| v < b),
            most("1 % delta, write amplification", ours(measure::UPDATE_AMP, None), 1.2),
            bar_of("155 misses, depth 16, p99, ms", idle.map(|us| us / 1e3), 5.0, |v, b| v < b),
            most("p99 during compaction / idle", ratio(ours(measure::COMPACTING_P99, Some(16)), idle), 1.5),
            least("cold batch, depth 16 / RocksDB", ratio(ours(measure::COLD, Some(16)), rocks), 5.0),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

fn bar_of(name: &str, value: Option<f64>, bar: f64, holds: fn(f64, f64) -> bool) -> Option<Bar> {
    value.map(|value| Bar { name: name.to_owned(), value, bar, holds: holds(value, bar) })
}

/// A figure for people: thousands grouped, otherwise three digits that count.
fn shown(measure: &str, value: f64) -> String {
    match value {
        _ if measure.ends_with("µs") => report::micros(Duration::from_secs_f64(value / 1e6)),
        v if v >= 1000.0 => report::count(v.round() as u64),
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 1.0 => format!("{v:.2}"),
        v => format!("{v:.3}"),
    }
}

/// Prints the tables.
pub fn print(figures: &Figures, data: &Data, bars: &[Bar]) {
    println!("{}", own_table(figures));
    println!("{}", peer_table(figures));
    for point in &figures.0 {
        if let Point::NotRun { engine, reason, command } = point {
            println!("{engine}: not run: {reason}; `{command}`");
        }
    }
    println!("One thread each. Peers: 256 MB block cache if there is one, reopened with their files out of");
    println!("the page cache before cold batches. Ours reads past the page cache, so it is never warm.");
    println!("{} rows of {} B; a batch is 1,024 keys.", report::count(data.rows), data.row_bytes);
    if data.rows * (data.row_bytes as u64) < COLD_BYTES_MIN {
        println!("So small a table soon lies in the peers' caches: compare engines with 10,000,000 rows.");
    }
    let mut table = report::table(&["bar", "found", "demanded", ""]);
    for bar in bars {
        let holds = if bar.holds { "holds" } else { "MISSED" };
        table.add_row([bar.name.clone(), shown("", bar.value), shown("", bar.bar), holds.to_owned()]);
    }
    if figures.at(ROCKSDB, measure::COLD, None).is_none() {
        table.add_row(["cold batch, depth 16 / RocksDB", "not run", "5.00", ""]);
    }
    println!("{table}");
}

/// The device and ours, a column for each depth.
fn own_table(figures: &Figures) -> String {
    const DEPTHS: [Option<usize>; 5] = [None, Some(1), Some(4), Some(16), Some(64)];
    let mut table = report::table(&["", "", "depth 1", "4", "16", "64"]);
    let mut seen = Vec::new();
    for point in &figures.0 {
        let Point::Figure(Figure { engine, measure, .. }) = point else { continue };
        if (*engine != RAW && *engine != OURS) || seen.contains(&(engine, measure)) {
            continue;
        }
        seen.push((engine, measure));
        let cell = |depth| figures.at(engine, measure, depth).map_or(String::new(), |v| shown(measure, v));
        let name = format!("{engine}: {measure}");
        table.add_row(std::iter::once(name).chain(DEPTHS.map(cell)));
    }
    table.to_string()
}

/// Every engine beside the others.
fn peer_table(figures: &Figures) -> String {
    const COLUMNS: [&str; 6] =
        [measure::COLD, measure::WARM, measure::LOAD, measure::REOPEN, measure::UPDATE, measure::SPACE];
    let heads = ["engine", "cold rows/s", "warm rows/s", "load s", "reopen ms", "1 % update s", "space"];
    let mut table = report::table(&heads);
    for engine in figures.engines().into_iter().filter(|e| *e != RAW) {
        let depths: &[Option<usize>] = if engine == OURS { &[Some(64), Some(16)] } else { &[None] };
        for depth in depths {
            let name = depth.map_or(engine.to_owned(), |d| format!("{engine}, depth {d}"));
            let cell = |measure| {
                let value = figures.at(engine, measure, *depth).or_else(|| figures.at(engine, measure, None));
                value.map_or("-".to_owned(), |v| shown(measure, v))
            };
            table.add_row(std::iter::once(name).chain(COLUMNS.map(cell)));
        }
    }
    for point in &figures.0 {
        if let Point::NotRun { engine, .. } = point {
            table.add_row([*engine, "not run", "", "", "", "", ""]);
        }
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(of_raw: f64, compacting: f64) -> Figures {
        let mut figures = Figures::default();
        figures.put_at(OURS, measure::OF_RAW, 16, of_raw);
        figures.put_at(OURS, measure::COLD, 16, 60_000.0);
        figures.put_at(OURS, measure::MISSES_P99, 16, 2000.0);
        figures.put_at(OURS, measure::COMPACTING_P99, 16, compacting);
        figures.put(OURS, measure::REOPEN, 20.0);
        figures
    }

    #[test]
    fn bars_follow_from_figures() {
        let holds = |figures: &Figures| figures.bars().iter().map(|b| b.holds).collect::<Vec<_>>();
        assert_eq!(holds(&found(0.9, 3000.0)), [true; 4]);
        assert_eq!(holds(&found(0.89, 3001.0)), [false, true, true, false]);
        assert!(Figures::default().bars().is_empty());
        let mut figures = found(1.0, 1.0);
        figures.put(ROCKSDB, measure::COLD, 10_000.0);
        let bars = figures.bars();
        let last = bars.last().unwrap();
        assert_eq!((last.value, last.bar, last.holds), (6.0, 5.0, true));
    }

    #[test]
    fn what_did_not_run_is_listed() {
        let mut figures = found(1.0, 1.0);
        let (engine, reason, command) = ("sled", "not compiled in".to_owned(), "cargo run");
        figures.0.push(Point::NotRun { engine, reason, command });
        let json = serde_json::to_value(&figures.0).unwrap();
        assert_eq!(json[5]["not run"], "not compiled in");
        assert_eq!((&json[0]["engine"], &json[0]["depth"]), (&OURS.into(), &16.into()));
        assert!(peer_table(&figures).contains("not run"));
        assert!(own_table(&figures).contains("60,000"));
        assert_eq!(figures.engines(), [OURS]);
    }

    #[test]
    fn figures_are_readable() {
        let of = |v| shown(measure::COLD, v);
        assert_eq!([of(123_456.7), of(12.34), of(0.0567)], ["123,457", "12.3", "0.057"]);
        assert_eq!(shown(measure::POINT_P50, 90.0), "90.0 µs");
    }
}
