//! The figures of `bench flash`: values by engine and measure, their bars, and their tables. Never
//! measures.

use super::data::Data;
use crate::bars::{Bar, bars_table};
use crate::results::{Measurement, distinct};
use anyhow::Result;
use hatchback_tools::{report, say};
use serde::Serialize;

/// The device without an engine, the reference of all engines.
pub const RAW: &str = "raw device";
/// The product.
pub const OURS: &str = "Hatchback";
/// The peer of the last bar.
pub const ROCKSDB: &str = "RocksDB";

/// Wished rate of cold batches, in multiples of RocksDB's.
const LEAD_WISHED: f64 = 5.0;

/// Least bytes of rows in a table that stays cold during the measurement. A smaller one soon fits
/// the page cache and the block caches.
const COLD_BYTES_MIN: u64 = 1 << 30;

/// Names of the measured quantities, as in tables and JSON.
pub mod measure {
    /// Pages per second in random order, of which the processor loads no byte.
    pub const RAW_PAGES: &str = "random pages, bytes ignored, pages/s";
    /// Pages per second in random order, of which the processor loads each cache line.
    pub const RAW_LOADED: &str = "random pages, bytes loaded, pages/s";
    /// Batches of uniform keys, none of whose rows is in memory.
    pub const COLD: &str = "cold batch, uniform, rows/s";
    /// [`COLD`] with two threads that read one half of a batch each.
    pub const COLD_TWO: &str = "cold batch, 2 threads, rows/s";
    /// Pages per second of [`COLD`], as a share of [`RAW_LOADED`] in the same round.
    pub const OF_RAW: &str = "cold batch / raw device, bytes loaded";
    /// Pages per second of [`COLD`], as a share of [`RAW_PAGES`] in the same round.
    pub const OF_IGNORED: &str = "cold batch / raw device, bytes ignored";
    /// Batches of Zipf keys.
    pub const ZIPF: &str = "cold batch, Zipf, rows/s";
    /// Batches of uniform keys after the update.
    pub const COLD_UPDATED: &str = "cold batch over a delta, rows/s";
    /// Batches of keys whose rows an earlier batch has read.
    pub const WARM: &str = "warm batch, rows/s";
    /// Latency of one key, median.
    pub const POINT_P50: &str = "point read p50, µs";
    /// Latency of one key, 99th percentile.
    pub const POINT_P99: &str = "point read p99, µs";
    /// Latency of the misses of a request, median.
    pub const MISSES_P50: &str = "155 misses p50, µs";
    /// Latency of the misses of a request, 99th percentile.
    pub const MISSES_P99: &str = "155 misses p99, µs";
    /// The same for as many random pages, without an engine.
    pub const RAW_MISSES_P99: &str = "155 random pages p99, µs";
    /// [`MISSES_P50`] while a compaction runs.
    pub const COMPACTING_P50: &str = "155 misses during compaction p50, µs";
    /// [`MISSES_P99`] while a compaction runs.
    pub const COMPACTING_P99: &str = "155 misses during compaction p99, µs";
    /// Bytes per second that the compaction wrote.
    pub const COMPACTION_RATE: &str = "compaction rate, MB/s";
    /// Time to write the table durably.
    pub const LOAD: &str = "load, s";
    /// Time to open the files.
    pub const REOPEN: &str = "reopen, ms";
    /// [`REOPEN`] after the update.
    pub const REOPEN_UPDATED: &str = "reopen with a delta, ms";
    /// Time to change one row in a hundred durably.
    pub const UPDATE: &str = "1 % update, durable, s";
    /// Bytes that the update wrote, divided by the bytes of its rows.
    pub const UPDATE_AMP: &str = "1 % update, bytes written / row bytes";
    /// Bytes on flash after the load, divided by the bytes of the rows.
    pub const SPACE: &str = "bytes on flash / row bytes";
    /// Memory of the index.
    pub const INDEX_BITS: &str = "index in memory, bits a key";
    /// Bytes written by 48 deltas and the compactions between them, divided by the bytes of the
    /// changed rows.
    pub const STEADY_AMP: &str = "48 deltas, bytes written / row bytes";
    /// Compactions during the 48 deltas.
    pub const COMPACTIONS: &str = "48 deltas, compactions";
    /// Bytes on flash after the 48 deltas, divided by the bytes of the rows.
    pub const STEADY_SPACE: &str = "48 deltas, bytes on flash / row bytes";
}

/// One value.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FlashFigure {
    /// Name of the engine.
    pub engine: &'static str,
    /// Name of the measured quantity, with its unit.
    pub measure: &'static str,
    /// Reads in flight, if the engine's caller chooses them.
    pub depth: Option<usize>,
    #[allow(missing_docs)]
    pub value: f64,
}

/// An entry of the report.
pub type FlashMeasurement = Measurement<FlashFigure>;

/// All figures, in the order of measuring.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures(pub Vec<FlashMeasurement>);

impl Figures {
    /// Adds a figure without a depth.
    pub fn put(&mut self, engine: &'static str, measure: &'static str, value: f64) {
        let figure = FlashFigure { engine, measure, depth: None, value };
        self.0.push(FlashMeasurement::Measured(figure));
    }

    /// Adds a figure at a depth.
    pub fn put_at(
        &mut self,
        engine: &'static str,
        measure: &'static str,
        depth: usize,
        value: f64,
    ) {
        let figure = FlashFigure { engine, measure, depth: Some(depth), value };
        self.0.push(FlashMeasurement::Measured(figure));
    }

    /// Returns a figure at a depth, or without one.
    pub fn at(&self, engine: &str, measure: &str, depth: Option<usize>) -> Option<f64> {
        let wanted = (engine, measure, depth);
        let mut figures = self.0.iter().filter_map(Measurement::figures);
        figures.find(|f| (f.engine, f.measure, f.depth) == wanted).map(|f| f.value)
    }

    /// Returns the engines that have a figure, in the order of measuring.
    pub fn engines(&self) -> Vec<&'static str> {
        distinct(self.0.iter().filter_map(Measurement::figures).map(|figure| figure.engine))
    }

    /// Returns the demanded figures. A figure that the run did not measure is listed as not run.
    pub fn bars(&self) -> Vec<Bar> {
        let ours = |measure, depth| self.at(OURS, measure, depth);
        let rocks = self.at(ROCKSDB, measure::COLD, None);
        let raw = |measure| self.at(RAW, measure, Some(16));
        let idle = ours(measure::MISSES_P99, Some(16));

        let missing = self.0.iter().filter_map(Measurement::not_run).find(|p| p.engine == ROCKSDB);
        let why = missing.map_or("not measured", |peer| peer.reason.as_str());

        let ratio = |a: Option<f64>, b: Option<f64>| Some(a? / b?);
        vec![
            Bar::at_least(
                "cold batch / raw device, bytes loaded, depth 16",
                ours(measure::OF_RAW, Some(16)),
                0.95,
            ),
            Bar::at_least(
                "cold batch / raw device, bytes loaded, depth 64",
                ours(measure::OF_RAW, Some(64)),
                0.95,
            ),
            Bar::below("index, bits a key", ours(measure::INDEX_BITS, None), 4.0),
            Bar::below("reopen, s", ours(measure::REOPEN, None).map(|ms| ms / 1e3), 0.2),
            Bar::at_most("1 % delta, write amplification", ours(measure::UPDATE_AMP, None), 1.2),
            Bar::at_most(
                "155 misses, depth 16, p99 / raw device",
                ratio(idle, raw(measure::RAW_MISSES_P99)),
                1.2,
            ),
            Bar::at_most(
                "p99 during compaction / idle",
                ratio(ours(measure::COMPACTING_P99, Some(16)), idle),
                1.5,
            ),
            Bar::at_most(
                "48 deltas of 1 %, write amplification",
                ours(measure::STEADY_AMP, None),
                8.0,
            ),
            Bar::at_least(
                "cold batch, depth 16 / RocksDB, of what the device allows",
                lead_of_allowed(
                    ratio(ours(measure::COLD, Some(16)), rocks),
                    ratio(raw(measure::RAW_PAGES), rocks),
                ),
                0.95,
            )
            .because(&format!("{ROCKSDB}: {why}")),
        ]
    }
}

/// Returns the lead over a peer as a share of the wished lead: `LEAD_WISHED`, or what the device
/// allows at most.
fn lead_of_allowed(lead: Option<f64>, of_raw: Option<f64>) -> Option<f64> {
    Some(lead? / of_raw?.min(LEAD_WISHED))
}

/// Formats a figure for a table.
fn shown(measure: &str, value: f64) -> String {
    match value {
        _ if measure.ends_with("µs") => report::micros(value),
        value => report::digits(value),
    }
}

/// Prints the tables.
///
/// # Errors
/// Standard output is closed.
pub fn print_tables(figures: &Figures, data: &Data, bars: &[Bar]) -> Result<()> {
    say!("{}", own_table(figures))?;
    say!("{}", peer_table(figures, READS, &[Some(64), Some(16)]))?;
    say!("{}", peer_table(figures, WRITES, &[None]))?;
    for peer in figures.0.iter().filter_map(FlashMeasurement::not_run) {
        say!("{}", peer.cells().join(": "))?;
    }

    say!("{NOTES}")?;
    say!("{} rows of {} B; a batch is 1,024 keys.", report::count(data.rows), data.row_bytes)?;
    if data.rows * (data.row_bytes as u64) < COLD_BYTES_MIN {
        say!(
            "So small a table soon fits the peers' caches: compare engines with 10,000,000 rows."
        )?;
    }
    say!("{}", bars_table(bars))
}

/// What the tables' reader must know.
const NOTES: &str = "\
Each engine reads with one thread, except under \"2 threads\". A peer has a block cache of 256 MB if
it has one at all. Before cold reads the bench reopens the peer and drops its files from the page
cache. Hatchback reads past the page cache, so it is never warm. The bytes of a peer's update are
all that the system wrote for it until the peer was closed.";

/// Returns the table of the device and Hatchback, a column per depth.
fn own_table(figures: &Figures) -> String {
    const DEPTHS: [Option<usize>; 5] = [None, Some(1), Some(4), Some(16), Some(64)];
    let mut table = report::table(&["", "", "depth 1", "4", "16", "64"]);
    let mut seen = Vec::new();
    for FlashFigure { engine, measure, .. } in figures.0.iter().filter_map(Measurement::figures) {
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

/// A column of a table of engines: its head and its measure.
type Column = (&'static str, &'static str);

/// Columns of reads.
const READS: [Column; 5] = [
    ("cold rows/s", measure::COLD),
    ("2 threads", measure::COLD_TWO),
    ("warm rows/s", measure::WARM),
    ("155 misses p50", measure::MISSES_P50),
    ("p99", measure::MISSES_P99),
];
/// Columns of writes and opening.
const WRITES: [Column; 5] = [
    ("load s", measure::LOAD),
    ("reopen ms", measure::REOPEN),
    ("1 % update s", measure::UPDATE),
    ("update bytes / row bytes", measure::UPDATE_AMP),
    ("space / row bytes", measure::SPACE),
];

/// Returns the table of all engines. Hatchback has a row for each of `depths`.
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
    for peer in figures.0.iter().filter_map(FlashMeasurement::not_run) {
        table.add_row([peer.engine, "not run", "", "", "", ""]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bars::BarResult;
    use crate::results::PeerNotRun;

    fn found(of_raw: f64, compacting: f64) -> Figures {
        let mut figures = Figures::default();
        figures.put_at(OURS, measure::OF_RAW, 16, of_raw);
        figures.put_at(OURS, measure::COLD, 16, 60_000.0);
        figures.put_at(OURS, measure::MISSES_P99, 16, 2000.0);
        figures.put_at(RAW, measure::RAW_MISSES_P99, 16, 1800.0);
        figures.put_at(RAW, measure::RAW_PAGES, 16, 64_000.0);
        figures.put_at(OURS, measure::COMPACTING_P99, 16, compacting);
        figures.put(OURS, measure::REOPEN, 20.0);
        figures
    }

    #[test]
    fn bars_follow_from_figures() {
        let holds = |figures: &Figures| -> Vec<bool> {
            let holds = |bar: Bar| match bar.result {
                BarResult::Measured { holds, .. } => Some(holds),
                BarResult::NotRun { .. } => None,
            };
            figures.bars().into_iter().filter_map(holds).collect()
        };
        assert_eq!(holds(&found(0.95, 3000.0)), [true; 4]);
        assert_eq!(holds(&found(0.94, 3001.0)), [false, true, true, false]);
        assert!(holds(&Figures::default()).is_empty() && !Figures::default().bars().is_empty());
        // The device allows more than the wished lead of 5; then 3.2, of which 3 are 0.94.
        for (rocks, value, holds) in [(10_000.0, 6.0 / 5.0, true), (20_000.0, 3.0 / 3.2, false)] {
            let mut figures = found(1.0, 1.0);
            figures.put(ROCKSDB, measure::COLD, rocks);
            let last = figures.bars().pop().unwrap();
            assert_eq!((last.result, last.bar), (BarResult::Measured { value, holds }, 0.95));
        }
    }

    #[test]
    fn engines_that_did_not_run_are_listed() {
        let mut figures = found(1.0, 1.0);
        figures.0.push(FlashMeasurement::NotRun(PeerNotRun::new(ROCKSDB, "no C++".to_owned(), "")));
        let bar = serde_json::to_value(figures.bars().pop().unwrap()).unwrap();
        assert_eq!((&bar["not run"], &bar["bar"]), (&"RocksDB: no C++".into(), &0.95.into()));
        figures.0.pop();
        figures.0.push(FlashMeasurement::NotRun(PeerNotRun::new(
            "sled",
            "not compiled in".to_owned(),
            "cargo run",
        )));
        let json = serde_json::to_value(&figures.0).unwrap();
        assert_eq!(json[7]["not run"], "not compiled in");
        assert_eq!((&json[0]["engine"], &json[0]["depth"]), (&OURS.into(), &16.into()));
        assert!(peer_table(&figures, READS, &[None]).contains("not run"));
        assert!(own_table(&figures).contains("60,000"));
        assert_eq!(figures.engines(), [OURS, RAW]);
    }

    #[test]
    fn figures_are_readable() {
        let of = |v| shown(measure::COLD, v);
        assert_eq!([of(123_456.7), of(12.34), of(0.0567)], ["123,457", "12.3", "0.057"]);
        assert_eq!(shown(measure::POINT_P50, 90.0), "90.0 µs");
    }
}
