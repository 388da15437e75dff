//! `bench flash`: cold rows from flash. The raw device, Hatchback's segments and other row stores
//! hold the same rows on the same file system in one run. Never reads a row that it calls cold
//! through the page cache.

pub mod data;
mod fetch;
pub mod figures;
mod ours;
pub mod peers;
pub mod plan;
mod steady;
pub mod store;
mod table;

use self::peers::Store;
use super::bars::Bar;
use super::results::{BenchReport, HostMachine};
use anyhow::{Context, Result, ensure};
use clap::Args;
use data::Data;
use figures::{Figures, OURS, RAW, measure};
use hatchback_tools::report::Json;
use hatchback_tools::report::plot::{self, Axis, Series};
use hatchback_tools::{report, say, serve};
use std::path::{Path, PathBuf};
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
    /// Where the tables are written, on the device to be measured [default: a temporary folder]
    #[arg(long)]
    dir: Option<PathBuf>,
    #[command(flatten)]
    json: Json,
    /// Writes a chart of cold batches
    #[arg(long)]
    plot: Option<PathBuf>,
}

/// Runs the measurement.
///
/// # Errors
/// A file cannot be written or read, or Hatchback returns a wrong row.
pub fn run(args: &FlashArgs, stores: &[Store]) -> Result<()> {
    ensure!(args.row_bytes.is_multiple_of(2), "--row-bytes: {} is odd", args.row_bytes);
    let rows = args.rows.unwrap_or(if args.quick { 300_000 } else { 10_000_000 });
    let data = Data { rows, row_bytes: args.row_bytes as usize };
    let plan = if args.quick { plan::QUICK } else { plan::FULL };
    let folder = scratch(args.dir.as_deref())?;
    let mut figures = Figures::default();

    let bar = serve::progress_bar(2 + peers::NAMES.len() as u64, "measuring", "{pos}/{len} parts");
    let own = folder.path().join("hatchback");
    std::fs::create_dir(&own)?;
    ours::OurTable::new(&data, &plan, &own)?.measure(&mut figures)?;
    std::fs::remove_dir_all(&own)?;
    bar.inc(1);

    let steady = folder.path().join("steady");
    std::fs::create_dir(&steady)?;
    steady::measure(&data, &steady, &mut figures)?;
    std::fs::remove_dir_all(&steady)?;
    bar.inc(1);
    peers::measure(stores, &data, &plan, folder.path(), &mut figures, || bar.inc(1));
    bar.finish_and_clear();

    args.publish(&data, figures)
}

/// Creates a folder of its own on a device, never in memory.
fn scratch(dir: Option<&Path>) -> Result<TempDir> {
    /// File system types of tmpfs and ramfs.
    const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];
    let made = match dir {
        None => tempfile::tempdir(),
        Some(dir) => {
            std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
            tempfile::tempdir_in(dir)
        }
    };
    let made = made.context("a temporary folder")?;

    let statfs = rustix::fs::statfs(made.path()).context("file system of the temporary folder")?;
    let kind = statfs.f_type as u64;
    let place = made.path().parent().unwrap_or(made.path()).display();
    ensure!(
        !IN_MEMORY.contains(&kind),
        "{place} is in memory; give a folder on the device with --dir"
    );
    Ok(made)
}

impl FlashArgs {
    fn publish(&self, data: &Data, figures: Figures) -> Result<()> {
        let bars = figures.bars();
        if let Some(path) = &self.plot {
            chart(path, &figures, data)?;
        }
        let model = format!("{} rows of {} B", report::count(data.rows), data.row_bytes);
        let (machine, points) = (HostMachine::this(), figures.0.clone());
        let report = BenchReport { bench: "flash", machine, model, bars, points };
        self.json.write(&report, || print_tables(&figures, data, &report.bars))
    }
}

/// Prints the tables.
fn print_tables(figures: &Figures, data: &Data, bars: &[Bar]) -> Result<()> {
    say!("{}", HostMachine::this())?;
    say!("Pages are read through {}.", fetch::Fetcher::new(1).method())?;
    figures::print_tables(figures, data, bars)
}

/// Draws cold rows per second: the device and Hatchback by depth, a peer as a level line, because
/// its caller cannot choose a depth.
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

    let rows = report::count(data.rows);
    let title = format!("Cold batches of 1,024 of {rows} rows of {} B", data.row_bytes);
    let x = Axis::log("reads in flight").at(&DEPTHS.map(|d| d as f64));
    plot::lines(path, &title, x, Axis::log("rows/s (raw device: pages/s)"), series.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::reported;

    fn parse(line: &str) -> Result<FlashArgs, clap::Error> {
        crate::tests::parse(line)
    }

    #[test]
    fn arguments_are_checked() {
        assert!(parse("flash --rows 10").is_err() && parse("flash --row-bytes 4").is_err());
        let odd = run(&parse("flash --row-bytes 33").unwrap(), &[]).unwrap_err().to_string();
        assert!(odd.contains("--row-bytes"), "{odd}");
    }

    #[test]
    fn memory_is_no_device() {
        if !std::fs::read_to_string("/proc/mounts").unwrap().contains(" /dev/shm tmpfs ") {
            return println!("SKIPPED: a folder in memory: no tmpfs is at /dev/shm");
        }
        let refused = scratch(Some(Path::new("/dev/shm"))).unwrap_err().to_string();
        assert!(refused.contains("/dev/shm is in memory"), "{refused}");
    }

    #[test]
    fn ours_measures_and_reports() {
        let folder = tempfile::tempdir().unwrap();
        let data = Data { rows: 4000, row_bytes: 16 };
        let plan = plan::FlashPlan { batch: 64, rounds: 2, point_reads: 3, requests: 4 };
        let mut figures = Figures::default();
        ours::OurTable::new(&data, &plan, folder.path()).unwrap().measure(&mut figures).unwrap();
        steady::measure(&data, folder.path(), &mut figures).unwrap();
        let plot = folder.path().join("a.svg");
        let args = parse(&format!("flash --plot {}", plot.display())).unwrap();
        let report =
            reported(|json| FlashArgs { json: json.clone(), ..args }.publish(&data, figures));
        let bars = report["bars"].as_array().unwrap();
        let not_run: Vec<&str> = bars
            .iter()
            .filter(|b| b["not run"].is_string())
            .filter_map(|b| b["name"].as_str())
            .collect();
        assert_eq!(
            (bars.len(), &not_run[..]),
            (9, &["cold batch, depth 16 / RocksDB, of what the device allows"][..])
        );
        assert!(std::fs::read_to_string(&plot).unwrap().contains(OURS));
    }
}
