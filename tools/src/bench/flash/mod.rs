//! `bench flash`: cold rows from flash. The raw device, Hatchback's segments and other row stores
//! hold the same rows on the same file system in one run. Never reads through the page cache what
//! it calls cold.

mod data;
mod fetch;
mod figures;
mod ours;
mod peers;
mod placement;
mod steady;
mod table;

use super::{Bar, Machine, Report};
use crate::report::plot::{self, Axis, Series};
use crate::{report, serve};
use anyhow::{Context, Result, ensure};
use clap::Args;
use data::Data;
use figures::{Figures, OURS, Point, RAW, measure};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// Measures cold rows from flash beside the raw device and other row stores
#[derive(Args, Debug)]
pub struct FlashArgs {
    /// 300,000 rows and fewer reads, under a minute
    #[arg(long)]
    quick: bool,
    /// Rows of the table
    #[arg(long, value_parser = clap::value_parser!(u64).range(1000..=1 << 32))]
    rows: Option<u64>,
    /// Bytes of a row, an even number (f16 values)
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(8..=2048))]
    row_bytes: u64,
    /// Where the tables are written, on the device to be measured; temporary folder if left out
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Writes all figures as JSON; `-` is standard output
    #[arg(long)]
    json: Option<PathBuf>,
    /// Writes a chart of cold batches
    #[arg(long)]
    plot: Option<PathBuf>,
}

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Keys of a batch.
    pub batch: usize,
    /// Batches that a rate is the median of.
    pub rounds: usize,
    /// Reads of one key.
    pub point_reads: usize,
    /// Reads of the misses of a request, idle and again during a compaction.
    pub requests: usize,
}

const FULL: Plan = Plan { batch: 1024, rounds: 24, point_reads: 4000, requests: 2000 };
const QUICK: Plan = Plan { batch: 1024, rounds: 16, point_reads: 1000, requests: 1000 };

/// Misses of one request: 26 tables, 64 candidates, 9.3 % missed.
const MISSES: usize = 155;

/// The middle value; 0 for none.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}

fn per_second(n: u64, time: Duration) -> f64 {
    n as f64 / time.as_secs_f64().max(1e-9)
}

/// Runs the command.
///
/// # Errors
/// A file cannot be written or read, or an engine gives a wrong row.
pub fn run(args: &FlashArgs) -> Result<()> {
    ensure!(args.row_bytes.is_multiple_of(2), "--row-bytes: {} is odd", args.row_bytes);
    let rows = args.rows.unwrap_or(if args.quick { 300_000 } else { 10_000_000 });
    let data = Data { rows, row_bytes: args.row_bytes as usize };
    let plan = if args.quick { QUICK } else { FULL };
    let folder = scratch(args.dir.as_deref())?;
    let mut figures = Figures::default();
    let bar = serve::progress_bar(2 + peers::NAMES.len() as u64, "measuring", "{pos}/{len} parts");
    let own = folder.path().join("hatchback");
    std::fs::create_dir(&own)?;
    ours::Ours::new(&data, &plan, &own)?.measure(&mut figures)?;
    std::fs::remove_dir_all(&own)?;
    bar.inc(1);
    count(&data, folder.path(), &mut figures)?;
    bar.inc(1);
    peers::measure(&data, &plan, folder.path(), &mut figures, || bar.inc(1));
    bar.finish_and_clear();
    args.publish(&data, figures)
}

/// What is counted and not timed.
fn count(data: &Data, folder: &Path, figures: &mut Figures) -> Result<()> {
    for (name, counted) in
        [("placement", placement::measure as Counted), ("steady", steady::measure)]
    {
        let own = folder.join(name);
        std::fs::create_dir(&own)?;
        counted(data, &own, figures)?;
        std::fs::remove_dir_all(&own)?;
    }
    Ok(())
}

type Counted = fn(&Data, &Path, &mut Figures) -> Result<()>;

/// A folder of its own, on a device.
fn scratch(dir: Option<&Path>) -> Result<TempDir> {
    /// Of tmpfs and of ramfs.
    const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];
    let made = match dir {
        None => tempfile::tempdir(),
        Some(dir) => {
            std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
            tempfile::tempdir_in(dir)
        }
    };
    let made = made.context("a temporary folder")?;
    let kind =
        rustix::fs::statfs(made.path()).context("what the temporary folder lies on")?.f_type as u64;
    let place = made.path().parent().unwrap_or(made.path()).display();
    ensure!(
        !IN_MEMORY.contains(&kind),
        "{place} lies in memory: name a folder on the device with --dir"
    );
    Ok(made)
}

impl FlashArgs {
    fn publish(&self, data: &Data, figures: Figures) -> Result<()> {
        let bars = figures.bars();
        if let Some(path) = &self.plot {
            chart(path, &figures, data)?;
        }
        if self.json.as_deref() != Some(Path::new("-")) {
            show(&figures, data, &bars);
        }
        let model = format!("{} rows of {} B", report::count(data.rows), data.row_bytes);
        let report: Report<Point> =
            Report { bench: "flash", machine: Machine::this(), model, bars, points: figures.0 };
        self.json.as_ref().map_or(Ok(()), |path| report::write_json(path, &report))
    }
}

fn show(figures: &Figures, data: &Data, bars: &[Bar]) {
    let machine = Machine::this();
    println!(
        "{}, {} cores, {}, version {}",
        machine.cpu, machine.cores, machine.platform, machine.version
    );
    println!("Pages are read through {}.", fetch::Fetcher::new(1).method());
    figures::print(figures, data, bars);
}

/// Cold rows a second: the device and ours by depth, a peer as one level, since its caller chooses
/// no depth.
fn chart(path: &Path, figures: &Figures, data: &Data) -> Result<()> {
    const DEPTHS: [usize; 4] = [1, 4, 16, 64];
    let by_depth = |engine: &'static str, measure| -> Vec<(f64, f64)> {
        let at = |d: usize| figures.at(engine, measure, Some(d)).map(|v| (d as f64, v));
        DEPTHS.into_iter().filter_map(at).collect()
    };
    let series = figures.engines().into_iter().enumerate().map(|(color, engine)| {
        let points = match engine {
            RAW => by_depth(engine, measure::RAW_PAGES),
            OURS => by_depth(engine, measure::COLD),
            _ => figures
                .at(engine, measure::COLD, None)
                .map_or(Vec::new(), |v| [1.0, 64.0].map(|d| (d, v)).to_vec()),
        };
        Series { name: engine.to_owned(), color, dashed: engine == RAW, points }
    });
    let title = format!(
        "Cold batches of 1,024 of {} rows of {} B",
        report::count(data.rows),
        data.row_bytes
    );
    let x = Axis::log("reads in flight").at(&DEPTHS.map(|d| d as f64));
    plot::lines(path, &title, x, Axis::log("rows/s (raw device: pages/s)"), series.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, FromArgMatches, Parser};

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: FlashArgs,
    }

    fn parse(line: &str) -> Result<FlashArgs> {
        let matches = Line::command().try_get_matches_from(line.split_whitespace())?;
        Ok(Line::from_arg_matches(&matches)?.args)
    }

    #[test]
    fn medians_and_rates() {
        assert_eq!((median(vec![3.0, 1.0, 2.0]), median(vec![])), (2.0, 0.0));
        assert_eq!(per_second(10, Duration::from_millis(500)), 20.0);
    }

    #[test]
    fn arguments_are_checked() {
        Line::command().debug_assert();
        assert!(parse("flash --rows 10").is_err() && parse("flash --row-bytes 4").is_err());
        let odd = run(&parse("flash --row-bytes 33").unwrap()).unwrap_err().to_string();
        assert!(odd.contains("--row-bytes"), "{odd}");
    }

    #[test]
    fn memory_is_no_device() {
        if !std::fs::read_to_string("/proc/mounts").unwrap().contains(" /dev/shm tmpfs ") {
            return println!("SKIPPED: a folder in memory: no tmpfs is at /dev/shm");
        }
        let refused = scratch(Some(Path::new("/dev/shm"))).unwrap_err().to_string();
        assert!(refused.contains("/dev/shm lies in memory"), "{refused}");
    }

    #[test]
    fn ours_measures_and_reports() {
        let folder = tempfile::tempdir().unwrap();
        let data = Data { rows: 4000, row_bytes: 16 };
        let plan = Plan { batch: 64, rounds: 2, point_reads: 3, requests: 4 };
        let mut figures = Figures::default();
        ours::Ours::new(&data, &plan, folder.path()).unwrap().measure(&mut figures).unwrap();
        count(&data, folder.path(), &mut figures).unwrap();
        let (json, plot) = (folder.path().join("a.json"), folder.path().join("a.svg"));
        let line = format!("flash --json {} --plot {}", json.display(), plot.display());
        parse(&line).unwrap().publish(&data, figures).unwrap();
        let report: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        let bars = report["bars"].as_array().unwrap();
        let not_run: Vec<&str> = bars
            .iter()
            .filter(|b| b["not run"].is_string())
            .filter_map(|b| b["name"].as_str())
            .collect();
        assert_eq!((bars.len(), &not_run[..]), (12, &["cold batch, depth 16 / RocksDB"][..]));
        assert!(std::fs::read_to_string(&plot).unwrap().contains(OURS));
    }
}
