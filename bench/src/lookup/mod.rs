//! `bench lookup`: pooled embedding lookups on one core, with all rows in the cache or in resident
//! tables, beside PyTorch and FBGEMM. Never reads flash and never runs a dense network.

mod calls;
mod engines;
mod figures;
mod page_walks;
mod row_reads;

use crate::filled_cache::TABLES;
use crate::peer;
use crate::results::{BenchReport, HostMachine, Measurement, PeerNotRun};
use anyhow::{Result, ensure};
use clap::Args;
use engines::{Engines, LookupPeers};
use figures::{BYTES, FP16, FP32, LookupMeasurement};
use hatchback_tools::report::Json;
use hatchback_tools::report::plot;
use hatchback_tools::{report, serve};
use page_walks::PageWalks;
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::path::PathBuf;

/// Measures pooled lookups on one core beside PyTorch and FBGEMM
#[derive(Args, Debug)]
pub struct LookupArgs {
    /// Columns of a row
    #[arg(long, value_delimiter = ',', default_values_t = [64, 128])]
    dim: Vec<usize>,
    /// Rows of each of the 26 tables [default: 6,400,000 / dim; quick: a tenth]
    #[arg(long)]
    rows: Option<usize>,
    /// Fewer rows and rounds, the first dim only
    #[arg(long)]
    quick: bool,
    /// The Python environment of the peers, as `bench/peers/setup` makes it
    #[arg(long, default_value = peer::VENV)]
    venv: PathBuf,
    #[command(flatten)]
    json: Json,
    /// Draws lookups a second by batch size as SVG
    #[arg(long)]
    plot: Option<PathBuf>,
}

/// Runs the measurement.
///
/// # Errors
/// The rows do not fit in memory, a peer fails after its start, or a file cannot be written.
pub fn run(args: &LookupArgs) -> Result<()> {
    let machine = HostMachine::this();
    peer::stay_on_one_core()?;
    let dims = if args.quick { &args.dim[..args.dim.len().min(1)] } else { &args.dim };
    let rounds = if args.quick { 2 } else { 12 };
    let steps = dims.len() * calls::shapes().count();
    let bar = serve::progress_bar(steps as u64, "measuring", "{pos}/{len} shapes");
    let (mut points, mut about, mut missing) = (Vec::new(), None, Vec::new());

    for &dim in dims {
        ensure!(dim > 0, "--dim: 0");
        let rows = args.rows.unwrap_or(if args.quick { 640_000 } else { 6_400_000 } / dim).max(1);
        let peers =
            LookupPeers::start(&args.venv, dim, rows).map_err(|e| missing = not_run(&e)).ok();
        about = about.or_else(|| peers.as_ref().map(|p| p.about.about.clone()));

        let mut engines = Engines::new(dim, rows, peers)?;
        let mut rng = StdRng::seed_from_u64(1);
        for shape in calls::shapes() {
            points.extend(engines.measure(shape, rounds, &mut rng)?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();

    let bars = figures::bars(&points);
    points.extend(missing);
    let model = format!("{TABLES} tables");
    let report = BenchReport { bench: "lookup", machine, model, bars, points };
    args.publish(&report, about.as_deref(), &PageWalks::measure(&mut StdRng::seed_from_u64(1)))
}

/// Returns every peer as not run, because of `e`.
fn not_run(e: &anyhow::Error) -> Vec<LookupMeasurement> {
    let entry = |peer| PeerNotRun::new(peer, report::explain(e), peer::SETUP);
    [FP32, FP16, BYTES].concat().into_iter().map(entry).map(Measurement::NotRun).collect()
}

impl LookupArgs {
    fn publish(
        &self,
        report: &BenchReport<LookupMeasurement>,
        about: Option<&str>,
        walks: &PageWalks,
    ) -> Result<()> {
        if let Some(path) = &self.plot {
            let title = "Pooled lookups on one core, 26 tables";
            plot::panels(path, title, &figures::charts(&report.points))?;
        }
        self.json.write(report, || figures::print_tables(report, about, walks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::report_of;

    #[test]
    fn too_few_rows_are_an_error() {
        let args = LookupArgs {
            dim: vec![8],
            rows: Some(1),
            quick: true,
            venv: PathBuf::from("none"),
            json: Json::default(),
            plot: None,
        };
        let error = run(&args).unwrap_err().to_string();
        assert!(error.contains("--rows 1: too few"), "{error}");
    }

    #[test]
    fn without_peers_ours_is_measured_and_they_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        let (venv, plot) = (folder.path().display(), folder.path().join("a.svg"));
        let report = report_of(&format!(
            "lookup --quick --dim 8 --rows 50 --venv {venv} --plot {}",
            plot.display()
        ));
        assert_eq!(report["bars"][0]["not run"], "a peer did not run");
        let points = report["points"].as_array().unwrap();
        // Of our 9 engines the 3 hashed caches miss 16 of 24 shapes. The 3 reads have all.
        assert_eq!(points.len(), 16 * (6 + 3) + 8 * (9 + 3) + 5);
        assert_eq!(points[239]["engine"], "only reads, u8 rows");
        assert_eq!(points[240]["engine"], "FBGEMM, fp32");
        assert!(std::fs::read_to_string(&plot).unwrap().contains("Hatchback, u8, cached"));
    }
}
