//! `bench publish`: from the trainer's step to the car's score. First it selects and encodes a
//! million changed rows on one core. Then it plays the loop: a window of changed rows, `select`,
//! `publish`, `sync` of a car, and the first score on the new generation. One process plays all
//! parts, one after the other. Never trains a model.

use super::bars::{Bar, WORST, largest};
use super::load::{serving, skewed_load};
use super::peer::stay_on_one_core;
use super::results::{BenchReport, HostMachine, resident_memory, restart_peak};
use super::synthetic_model::SyntheticModel;
use anyhow::{Context, Result};
use clap::{Args, Parser};
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::mix;
use hatchback::model::budget::Budget;
use hatchback::request::serving::{Served, Serving};
use hatchback::schema::KeySpace;
use hatchback::schema::batch::Batch;
use hatchback::unmix;
use hatchback_tools::report;
use hatchback_tools::report::Json;
use hatchback_tools::repository::keys::{RoleCounts, new_fleet};
use hatchback_tools::repository::now;
use hatchback_tools::repository::publish::{Change, publish};
use hatchback_tools::repository::store::Objects;
use hatchback_tools::select::{SelectArgs, Selection, select};
use hatchback_tools::serve::{install, progress_bar};
use hatchback_tools::sync::{SyncArgs, update_car};
use hatchback_tools::window::writer::{TableChanges, WindowContent, write_window};
use hatchback_tools::workload::key_distributions::Workload;
use rustix::thread::{sched_getaffinity, sched_setaffinity};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Most time to select and encode a million rows, seconds.
const SELECT_S_BAR: f64 = 10.0;
/// Most memory of that, MiB.
const SELECT_MIB_BAR: f64 = 1000.0;
/// Most time from a step to its first score, seconds.
const SCORE_S_BAR: f64 = 60.0;
/// Days until the keys of the bench expire.
const KEY_DAYS_S: u64 = 24 * 3600;

/// Measures the way of changed rows from the trainer to the car
#[derive(Args, Debug)]
pub struct PublishBenchArgs {
    /// Rows of the largest tables of the synthetic model [default: 300000, 1.7 million in all;
    /// quick: 20000]
    #[arg(long)]
    rows_max: Option<u64>,
    /// Changed rows to select at once [default: 1000000; quick: 50000]
    #[arg(long)]
    candidates: Option<u64>,
    /// Windows of the loop [default: 20; quick: 2]
    #[arg(long)]
    windows: Option<u64>,
    /// Changed rows of one of these
    #[arg(long, default_value_t = 10_000)]
    changed: u64,
    /// A smaller model, fewer windows
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    json: Json,
}

/// The figures of one window.
#[derive(Clone, Debug, Default, Serialize)]
pub struct WindowFigures {
    /// Changed rows.
    pub candidates: u64,
    /// Bytes of the delta.
    pub bytes: u64,
    /// Time of `select`.
    pub select_s: f64,
    /// Largest memory of the process during `select`; 0 where it was not measured.
    pub memory_mib: f64,
    /// Time of `publish`; 0 where nothing was published.
    pub publish_s: f64,
    /// Time in which the car fetches, checks and installs the delta.
    pub sync_s: f64,
    /// Time from the trainer's step to the first score on the new generation.
    pub score_s: f64,
}

/// Runs the measurement.
///
/// # Errors
/// A step of the loop fails, or a file cannot be written.
pub fn run(args: &PublishBenchArgs) -> Result<()> {
    let rows_max = args.rows_max.unwrap_or(if args.quick { 20_000 } else { 300_000 });
    let candidates = args.candidates.unwrap_or(if args.quick { 50_000 } else { 1_000_000 });
    let windows = args.windows.unwrap_or(if args.quick { 2 } else { 20 });
    let model = SyntheticModel::pack(rows_max)?;
    let progress = progress_bar(windows + 2, "publishing", "{pos}/{len} windows");

    let mut points = Vec::new();
    for budget_mib in [None, Some(8.0)] {
        points.push(select_once(&model, candidates, budget_mib)?);
        progress.inc(1);
    }
    let mut closed = ClosedLoop::new(&model)?;
    for number in 1..=windows {
        points.push(closed.turn(number, args.changed)?);
        progress.inc(1);
    }
    progress.finish_and_clear();

    let (machine, bars) = (HostMachine::this(), bars(&points));
    let model = format!("Criteo-shaped, {} rows", report::count(closed.rows()));
    print(args, &BenchReport { bench: "publish", machine, model, bars, points })
}

/// The folders of a trainer and of `select`.
struct Desk {
    folder: tempfile::TempDir,
    base: PathBuf,
    /// What the trainer's rows are near to.
    flash: Flash,
}

impl Desk {
    fn new(model: &SyntheticModel) -> Result<Self> {
        let folder = tempfile::tempdir().context("a temporary folder")?;
        std::fs::create_dir(folder.path().join("windows"))?;
        let flash = install(&model.bundle(), &model.flash())?;
        Ok(Self { folder, base: model.bundle(), flash })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn select(&self, budget_mib: Option<f64>, published: Vec<PathBuf>) -> Result<Selection> {
        select(&SelectArgs {
            windows: self.path("windows"),
            state: self.path("state"),
            out: self.path("next.hatch"),
            base: Some(self.base.clone()),
            published,
            budget_mib,
            floor: 0.0,
            ageing_percent: 5,
            refresh_every: 16,
            json: Default::default(),
        })
    }

    /// Closes window `number` with about `count` changed rows, spread over all tables.
    fn close_window(&self, number: u64, count: u64) -> Result<()> {
        let schema = &self.flash.manifest().schema;
        let all: u64 = schema.tables.iter().map(|table| table.rows).sum();
        let one_in = (all / count.max(1)).max(1);
        let (mut tables, mut rows) = (Vec::new(), Vec::new());
        for (at, table) in schema.tables.iter().enumerate() {
            let format = table.format().context("the unit does not fit the codec")?;
            let (mut keys, mut values) = (Vec::new(), Vec::new());
            let mut row = vec![0.0; table.dim as usize];
            let take = |order: u64, encoded: &[u8]| {
                if !mix(order ^ number << 40).is_multiple_of(one_in) {
                    return;
                }
                keys.push(if table.keys == KeySpace::Index { order } else { unmix(order) });
                format.decode(encoded, &mut row);
                let by = 1.0 + (mix(order + number) >> 40) as f32 / (1 << 24) as f32;
                values.extend(row.iter().map(|value| value * by + 1e-3));
            };
            let mut damage = None;
            self.flash.table(at)?.scan(take, |e| damage = Some(e))?;
            damage.map_or(Ok(()), Err)?;
            let (name, dim) = (table.name.clone(), table.dim as usize);
            tables.push(TableChanges { name, dim, keys, ..TableChanges::default() });
            rows.push(values);
        }

        let lineage = self.flash.manifest().generation.lineage.clone();
        let content =
            WindowContent { lineage, window: number, step: number, ..WindowContent::default() };
        let folder = self.path("windows").join(format!("{number:012}"));
        write_window(&folder, &content, &tables, &mut |table, row, values| {
            let dim = tables[table].dim;
            values.extend_from_slice(&rows[table][row * dim..][..dim]);
            Ok(())
        })?;
        Ok(())
    }
}

/// Selects and encodes `candidates` changed rows on one core.
fn select_once(
    model: &SyntheticModel,
    candidates: u64,
    budget_mib: Option<f64>,
) -> Result<WindowFigures> {
    let desk = Desk::new(model)?;
    desk.select(None, Vec::new())?;
    desk.close_window(1, candidates)?;

    let all_cores = sched_getaffinity(None)?;
    stay_on_one_core()?;
    restart_peak()?;
    let start = Instant::now();
    let done = desk.select(budget_mib, Vec::new());
    let select_s = start.elapsed().as_secs_f64();
    sched_setaffinity(None, &all_cores)?;

    let (done, memory_mib) = (done?, resident_memory()?.peak as f64 / f64::from(1 << 20));
    let (candidates, bytes) = (done.candidates, done.bytes);
    Ok(WindowFigures { candidates, bytes, select_s, memory_mib, ..WindowFigures::default() })
}

/// A trainer, a repository, a car and its server.
struct ClosedLoop {
    desk: Desk,
    serving: Serving,
    served: Arc<Served>,
    workload: Workload,
    budget: Budget,
    published: Vec<PathBuf>,
}

const NAME: &str = "model";

#[derive(Parser)]
struct SyncCommand {
    #[command(flatten)]
    args: SyncArgs,
}

impl ClosedLoop {
    fn new(model: &SyntheticModel) -> Result<Self> {
        let desk = Desk::new(model)?;
        let one = RoleCounts { keys: 1, threshold: 1 };
        new_fleet(&desk.path("keys"), [one; 4], now()? + KEY_DAYS_S)?;
        std::fs::create_dir(desk.path("repository"))?;
        publish_bundle(&desk, &desk.base)?;
        sync_car(&desk)?;

        let budget = Budget { memory_bytes_max: 16 << 30, ..Budget::default() };
        let serving = serving(&budget);
        let served =
            serving.load(NAME, &Flash::open(&disk::system(), &desk.path("car"))?, budget)?;
        let workload = skewed_load(&desk.flash, 0)?;
        desk.select(None, Vec::new())?;
        Ok(Self { desk, serving, served, workload, budget, published: Vec::new() })
    }

    fn rows(&self) -> u64 {
        self.desk.flash.manifest().schema.tables.iter().map(|table| table.rows).sum()
    }

    /// Takes one window from the trainer's step to the first score.
    fn turn(&mut self, number: u64, changed: u64) -> Result<WindowFigures> {
        let step = Instant::now();
        self.desk.close_window(number, changed)?;

        let start = Instant::now();
        let done = self.desk.select(None, self.published.clone())?;
        let select_s = start.elapsed().as_secs_f64();

        let start = Instant::now();
        let bundle = self.desk.path(&format!("{number}.hatch"));
        std::fs::rename(self.desk.path("next.hatch"), &bundle)?;
        publish_bundle(&self.desk, &bundle)?;
        self.published = vec![bundle];
        let publish_s = start.elapsed().as_secs_f64();

        let start = Instant::now();
        sync_car(&self.desk)?;
        let sync_s = start.elapsed().as_secs_f64();

        let live = Flash::open(&disk::system(), &self.desk.path("car"))?;
        self.serving.swap(NAME, &live, self.budget, &|_| ())?;
        let mut batch = Batch::new(&live.manifest().schema, 1);
        self.workload.fill(&mut batch, 1)?;
        self.served.submit(&batch, None)?.wait()?;
        Ok(WindowFigures {
            candidates: done.candidates,
            bytes: done.bytes,
            select_s,
            publish_s,
            sync_s,
            score_s: step.elapsed().as_secs_f64(),
            ..WindowFigures::default()
        })
    }
}

fn publish_bundle(desk: &Desk, bundle: &Path) -> Result<()> {
    let store = Objects::open(&desk.path("repository").display().to_string())?;
    let change = Change { bundles: vec![bundle.to_owned()], ..Change::default() };
    publish(&store, &desk.path("keys"), &change, now()?)?;
    Ok(())
}

fn sync_car(desk: &Desk) -> Result<()> {
    let path = |name: &str| desk.path(name).display().to_string();
    let command = SyncCommand::try_parse_from([
        "sync",
        "--from",
        &path("repository"),
        "--root",
        &path("keys/1.root.json"),
        "--state",
        &path("car.sync"),
        "--flash",
        &path("car"),
    ])?;
    update_car(&command.args)
}

fn bars(points: &[WindowFigures]) -> Vec<Bar> {
    let worst = |of: fn(&WindowFigures) -> f64| largest(points.iter().map(of));
    let mut scores: Vec<f64> =
        points.iter().filter(|p| p.score_s > 0.0).map(|p| p.score_s).collect();
    scores.sort_unstable_by(f64::total_cmp);
    let p95 = scores.get((scores.len() * 95).div_ceil(100).saturating_sub(1)).copied();
    vec![
        Bar::at_most("select and encode on one core, s", worst(|p| p.select_s), SELECT_S_BAR),
        Bar::at_most("memory of that, MiB", worst(|p| p.memory_mib), SELECT_MIB_BAR),
        Bar::at_most("step to first score, p95, s", p95.unwrap_or(WORST), SCORE_S_BAR),
    ]
}

fn print(args: &PublishBenchArgs, report: &BenchReport<WindowFigures>) -> Result<()> {
    let cells = |point: &WindowFigures| {
        let s = |s: f64| if s > 0.0 { format!("{s:.2} s") } else { "-".to_owned() };
        let memory = format!("{:.0} MiB", point.memory_mib);
        [
            report::count(point.candidates),
            report::bytes(point.bytes),
            s(point.select_s),
            if point.memory_mib > 0.0 { memory } else { "-".to_owned() },
            s(point.publish_s),
            s(point.sync_s),
            s(point.score_s),
        ]
    };
    let heads = "changed, delta, select, memory, publish, sync, step to score";
    report.publish(&report.model, heads, cells, &args.json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bars::BarResult;
    use crate::tests::report_of;

    #[test]
    fn windows_that_reach_no_score_miss_the_bar() {
        let found = bars(&[WindowFigures::default()]).pop().unwrap();
        assert_eq!(found.result, BarResult::Measured { value: WORST, holds: false });
    }

    #[test]
    fn changed_rows_reach_a_score() {
        let report = report_of(
            "publish --quick --rows-max 2000 --candidates 5000 --windows 2 --changed 300",
        );
        assert_eq!(report["bars"].as_array().unwrap().len(), 3);
        let points = report["points"].as_array().unwrap();
        assert_eq!(points.len(), 4);
        for point in points {
            assert!(point["candidates"].as_u64().unwrap() > 100, "{point}");
            assert!(point["bytes"].as_u64().unwrap() > 1000, "{point}");
        }
        assert!(points[3]["score_s"].as_f64().unwrap() > 0.0);
    }
}
