//! What `bench flash` found: named figures of engines, the bars that follow from them, and the
//! tables that show them. Never measures.

use super::data::Data;
use crate::bench::{Bar, Found, NotRun, bars_table};
use crate::report;
use serde::Serialize;
use std::time::Duration;

/// The engine that the others are measured against.
pub const RAW: &str = "raw device";
/// Ours.
pub const OURS: &str = "Hatchback";
/// The peer with a bar.
pub const ROCKSDB: &str = "RocksDB";

/// A table of fewer bytes of rows does not stay cold while it is read: page cache and block caches
/// fill.
const COLD_BYTES_MIN: u64 = 1 << 30;

/// What a figure is of. The names stand in tables and JSON.
pub mod measure {
    /// Pages in a second, in random order.
    pub const RAW_PAGES: &str = "random pages, pages/s";
    /// Batches of uniform keys, nothing of them in memory.
    pub const COLD: &str = "cold batch, uniform, rows/s";
    /// The same, a batch read by two threads in halves.
    pub const COLD_TWO: &str = "cold batch, 2 threads, rows/s";
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
    /// The same where the most used rows are placed.
    pub const PLACED_INDEX_BITS: &str = "index with placed rows, bits a key";
    /// Pages that a request reads with all rows in key order, by the cache in front.
    pub const KEY_ORDER: [&str; 3] = [
        "pages a request, key order, no cache",
        "pages a request, key order, 1 % cached",
        "pages a request, key order, 5 % cached",
    ];
    /// The same where the most used rows are placed by popularity.
    pub const BY_POPULARITY: [&str; 3] = [
        "pages a request, by popularity, no cache",
        "pages a request, by popularity, 1 % cached",
        "pages a request, by popularity, 5 % cached",
    ];
    /// The same where they are placed by co-access.
    pub const BY_CO_ACCESS: [&str; 3] = [
        "pages a request, by co-access, no cache",
        "pages a request, by co-access, 1 % cached",
        "pages a request, by co-access, 5 % cached",
    ];
    /// Pages that hold the hottest one row in a hundred, in key order and placed.
    pub const PRELOAD_KEY_ORDER: &str = "pages to preload the hottest 1 %, key order";
    /// The same, placed.
    pub const PRELOAD_PLACED: &str = "pages to preload the hottest 1 %, placed";
    /// Bytes written over 48 deltas and the compactions between, as a share of the changed rows'
    /// bytes.
    pub const STEADY_AMP: &str = "48 deltas, bytes written / row bytes";
    /// Compactions over them.
    pub const COMPACTIONS: &str = "48 deltas, compactions";
    /// Bytes on flash after them, as a share of the rows' bytes.
    pub const STEADY_SPACE: &str = "48 deltas, bytes on flash / row bytes";
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
    NotRun(NotRun),
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
    pub fn put_at(
        &mut self,
        engine: &'static str,
        measure: &'static str,
        depth: usize,
        value: f64,
    ) {
        self.0.push(Point::Figure(Figure { engine, measure, depth: Some(depth), value }));
    }

    /// A figure at a depth, or without one.
    pub fn at(&self, engine: &str, measure: &str, depth: Option<usize>) -> Option<f64> {
        self.0.iter().find_map(|point| match point {
            Point::Figure(f) if (f.engine, f.measure, f.depth) == (engine, measure, depth) => {
                Some(f.value)
            }
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

    /// Why an engine did not run.
    fn not_run(&self, wanted: &str) -> Option<&str> {
        self.0.iter().find_map(|point| match point {
            Point::NotRun(peer) if peer.engine == wanted => Some(peer.reason.as_str()),
            _ => None,
        })
    }

    /// The demanded figures; those that could not be measured are listed as not run.
    pub fn bars(&self) -> Vec<Bar> {
        let ours = |measure, depth| self.at(OURS, measure, depth);
        let rocks = self.at(ROCKSDB, measure::COLD, None);
        let idle = ours(measure::MISSES_P99, Some(16));
        let [key_order, warm_key_order, _] = measure::KEY_ORDER.map(|m| ours(m, None));
        let [co_access, warm_co_access, _] = measure::BY_CO_ACCESS.map(|m| ours(m, None));
        let ratio = |a: Option<f64>, b: Option<f64>| Some(a? / b?);
        let least = |name: &str, value, bar| bar_of(name, value, bar, |v, b| v >= b);
        let most = |name: &str, value, bar| bar_of(name, value, bar, |v, b| v <= b);
        let mut bars = [
            least("cold batch / raw device, depth 16", ours(measure::OF_RAW, Some(16)), 0.9),
            least("cold batch / raw device, depth 64", ours(measure::OF_RAW, Some(64)), 0.9),
            bar_of("index, bits a key", ours(measure::INDEX_BITS, None), 4.0, |v, b| v < b),
            bar_of("reopen, s", ours(measure::REOPEN, None).map(|ms| ms / 1e3), 0.2, |v, b| v < b),
            most("1 % delta, write amplification", ours(measure::UPDATE_AMP, None), 1.2),
            bar_of("155 misses, depth 16, p99, ms", idle.map(|us| us / 1e3), 5.0, |v, b| v < b),
            most(
                "p99 during compaction / idle",
                ratio(ours(measure::COMPACTING_P99, Some(16)), idle),
                1.5,
            ),
            bar_of(
                "index with placed rows, bits a key",
                ours(measure::PLACED_INDEX_BITS, None),
                4.0,
                |v, b| v < b,
            ),
            most("pages a request, placed / key order", ratio(co_access, key_order), 0.85),
            most(
                "pages a request behind a 1 % cache, placed / key order",
                ratio(warm_co_access, warm_key_order),
                1.0,
            ),
            most("48 deltas of 1 %, write amplification", ours(measure::STEADY_AMP, None), 8.0),
            least(
                "cold batch, depth 16 / RocksDB",
                ratio(ours(measure::COLD, Some(16)), rocks),
                5.0,
            ),
        ];
        // Only the last one depends on another engine.
        if let (Some(Bar { found: Found::NotRun { reason }, .. }), Some(why)) =
            (bars.last_mut(), self.not_run(ROCKSDB))
        {
            *reason = format!("{ROCKSDB}: {why}");
        }
        bars.into()
    }
}

fn bar_of(name: &str, value: Option<f64>, bar: f64, holds: fn(f64, f64) -> bool) -> Bar {
    let found = match value {
        Some(value) => Found::Measured { value, holds: holds(value, bar) },
        None => Found::NotRun { reason: "not measured".to_owned() },
    };
    Bar { name: name.to_owned(), bar, found }
}

/// A figure for people.
fn shown(measure: &str, value: f64) -> String {
    match value {
        _ if measure.ends_with("µs") => report::micros(Duration::from_secs_f64(value / 1e6)),
        value => report::digits(value),
    }
}

/// Prints the tables.
pub fn print(figures: &Figures, data: &Data, bars: &[Bar]) {
    println!("{}", own_table(figures));
    println!("{}", peer_table(figures, READS, &[Some(64), Some(16)]));
    println!("{}", peer_table(figures, WRITES, &[None]));
    for point in &figures.0 {
        if let Point::NotRun(peer) = point {
            println!("{}", peer.cells().join(": "));
        }
    }
    println!(
        "One thread each but where two are named. Peers: 256 MB block cache if there is one, reopened with"
    );
    println!(
        "their files out of the page cache before cold reads. Ours reads past the page cache, so it is never"
    );
    println!("warm. Bytes of a peer's update: what the system wrote for it until it was closed.");
    println!("{} rows of {} B; a batch is 1,024 keys.", report::count(data.rows), data.row_bytes);
    if data.rows * (data.row_bytes as u64) < COLD_BYTES_MIN {
        println!(
            "So small a table soon lies in the peers' caches: compare engines with 10,000,000 rows."
        );
    }
    println!("{}", bars_table(bars));
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
        let cell =
            |depth| figures.at(engine, measure, depth).map_or(String::new(), |v| shown(measure, v));
        let name = format!("{engine}: {measure}");
        table.add_row(std::iter::once(name).chain(DEPTHS.map(cell)));
    }
    table.to_string()
}

/// A column of a table of engines: its head and what it shows.
type Column = (&'static str, &'static str);

/// How engines read.
const READS: [Column; 5] = [
    ("cold rows/s", measure::COLD),
    ("2 threads", measure::COLD_TWO),
    ("warm rows/s", measure::WARM),
    ("155 misses p50", measure::MISSES_P50),
    ("p99", measure::MISSES_P99),
];
/// How engines write and open.
const WRITES: [Column; 5] = [
    ("load s", measure::LOAD),
    ("reopen ms", measure::REOPEN),
    ("1 % update s", measure::UPDATE),
    ("update bytes / row bytes", measure::UPDATE_AMP),
    ("space / row bytes", measure::SPACE),
];

/// Every engine beside the others; ours once for each of `depths`.
fn peer_table(figures: &Figures, columns: [Column; 5], depths: &[Option<usize>]) -> String {
    let mut table = report::table(&[&["engine"][..], &columns.map(|(head, _)| head)[..]].concat());
    for engine in figures.engines().into_iter().filter(|e| *e != RAW) {
        for depth in if engine == OURS { depths } else { &[None] } {
            let name = depth.map_or(engine.to_owned(), |d| format!("{engine}, depth {d}"));
            let cell = |(_, measure): Column| {
                let value = figures
                    .at(engine, measure, *depth)
                    .or_else(|| figures.at(engine, measure, None));
                value.map_or("-".to_owned(), |v| shown(measure, v))
            };
            table.add_row(std::iter::once(name).chain(columns.map(cell)));
        }
    }
    for point in &figures.0 {
        if let Point::NotRun(peer) = point {
            table.add_row([peer.engine, "not run", "", "", "", ""]);
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
        let holds = |figures: &Figures| -> Vec<bool> {
            let holds = |bar: Bar| match bar.found {
                Found::Measured { holds, .. } => Some(holds),
                Found::NotRun { .. } => None,
            };
            figures.bars().into_iter().filter_map(holds).collect()
        };
        assert_eq!(holds(&found(0.9, 3000.0)), [true; 4]);
        assert_eq!(holds(&found(0.89, 3001.0)), [false, true, true, false]);
        assert!(holds(&Figures::default()).is_empty() && !Figures::default().bars().is_empty());
        let mut figures = found(1.0, 1.0);
        figures.put(ROCKSDB, measure::COLD, 10_000.0);
        let last = figures.bars().pop().unwrap();
        assert_eq!((last.found, last.bar), (Found::Measured { value: 6.0, holds: true }, 5.0));
    }

    #[test]
    fn what_did_not_run_is_listed() {
        let mut figures = found(1.0, 1.0);
        figures.0.push(Point::NotRun(NotRun::new(ROCKSDB, "no C++".to_owned(), "")));
        let bar = serde_json::to_value(figures.bars().pop().unwrap()).unwrap();
        assert_eq!((&bar["not run"], &bar["bar"]), (&"RocksDB: no C++".into(), &5.0.into()));
        figures.0.pop();
        figures.0.push(Point::NotRun(NotRun::new(
            "sled",
            "not compiled in".to_owned(),
            "cargo run",
        )));
        let json = serde_json::to_value(&figures.0).unwrap();
        assert_eq!(json[5]["not run"], "not compiled in");
        assert_eq!((&json[0]["engine"], &json[0]["depth"]), (&OURS.into(), &16.into()));
        assert!(peer_table(&figures, READS, &[None]).contains("not run"));
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
