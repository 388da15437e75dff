//! `bench request --peers`: whole requests of a DLRM beside ONNX Runtime and PyTorch, on one core,
//! with every row in the cache. The engines take the same requests in turn, and their scores are
//! compared; times are CPU times, so that a neighbour's work is not counted. Never reads flash
//! inside a measurement.

use crate::bench::dlrm::{Dlrm, TABLES};
use crate::bench::peer::{self, Peer, cpu_us, percentile};
use crate::bench::{Bar, Machine, NotRun, Report, bars_table};
use crate::report::metrics::largest_difference;
use crate::report::plot::{self, Axis, Series};
use crate::{report, serve};
use anyhow::{Context, Result, ensure};
use hatchback::Weights;
use hatchback::flash::Flash;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Worker;
use hatchback::schema::batch::Batch;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Samples in a request.
const BATCHES: [u32; 5] = [1, 8, 32, 64, 256];
/// The engine with a bar.
const ORT: &str = "ONNX Runtime";
/// Ours, by how the weights of the dense network are kept.
const OURS: [(&str, Weights); 3] = [
    ("Hatchback, f32", Weights::F32),
    ("Hatchback, f16", Weights::F16),
    ("Hatchback, int8", Weights::Int8),
];
/// Scores may differ from ONNX Runtime's by this much where weights are not f32.
const DIFFERENCE_MAX: f64 = 1e-3;

/// How much is measured.
pub struct Plan {
    /// Rows of each of the 26 tables.
    pub rows: usize,
    /// Turns of each engine at each batch size.
    pub rounds: usize,
    /// Samples in one turn; no fewer than `calls_min` requests.
    pub samples: usize,
    /// Requests in one turn, at least.
    pub calls_min: usize,
}

/// A minute and a half.
pub const FULL: Plan = Plan { rows: 20_000, rounds: 7, samples: 1024, calls_min: 100 };
/// Half a minute, most of it the setup of the peers.
pub const QUICK: Plan = Plan { rows: 5000, rounds: 3, samples: 128, calls_min: 16 };

/// The figures of one engine and batch size, or why there are none.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Point {
    /// What was measured.
    Measured(Measured),
    /// A peer that did not run.
    NotRun(NotRun),
}

/// The figures of one engine and batch size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// Whose.
    pub engine: String,
    /// Samples in a request.
    pub batch: u32,
    /// CPU time of a request, half take less, in the best turn, µs.
    pub p50_us: f64,
    /// 99 % take less, in the turn that is best by this, µs.
    pub p99_us: f64,
    /// The largest difference of a score from ONNX Runtime's, where that ran.
    pub score_difference: Option<f64>,
}

/// What a program says of itself.
#[derive(Deserialize)]
struct About {
    engines: Vec<String>,
    about: String,
}

#[derive(Deserialize)]
struct Times {
    times_us: Vec<f64>,
}

#[derive(Deserialize)]
struct PeerScores {
    scores: Vec<f32>,
}

/// The peers that run, and those that do not.
struct Peers {
    running: Option<(Peer, About)>,
    missing: Vec<NotRun>,
}

impl Peers {
    fn start(venv: &Path, folder: &Path, model: &Dlrm, samples: usize) -> Result<Self> {
        let started = Peer::start(venv, peer::DLRM).and_then(|mut peer| {
            model.write(folder, samples)?;
            let about = peer.ask("setup", &model.shape(folder))?;
            Ok((peer, about))
        });
        Ok(match started {
            Ok(running) => Self { running: Some(running), missing: Vec::new() },
            Err(e) => {
                let missing = |engine| NotRun::new(engine, report::explain(&e), peer::SETUP);
                Self { running: None, missing: [ORT, "torch, eager"].map(missing).into() }
            }
        })
    }

    fn engines(&self) -> Vec<String> {
        self.running.as_ref().map_or(Vec::new(), |(_, about)| about.engines.clone())
    }

    fn times(&mut self, engine: &str, batch: u32, calls: usize, first: usize) -> Result<Vec<f64>> {
        let (peer, _) = self.running.as_mut().context("no peer runs")?;
        let options = json!({ "engine": engine, "batch": batch, "calls": calls, "first": first });
        Ok(peer.ask::<Times>("round", &options)?.times_us)
    }

    fn scores(&mut self, engine: &str, samples: usize) -> Result<Vec<f32>> {
        let (peer, _) = self.running.as_mut().context("no peer runs")?;
        Ok(peer
            .ask::<PeerScores>("scores", &json!({ "engine": engine, "samples": samples }))?
            .scores)
    }
}

/// Ours: a worker with every row cached.
struct Ours {
    name: &'static str,
    worker: Worker,
}

impl Ours {
    fn open(
        flash: &Flash,
        name: &'static str,
        dense_weights: Weights,
        rows: usize,
    ) -> Result<Self> {
        // Sets of 14 that are a third full on average overflow almost never.
        let slot_bytes = (4 * super::dlrm::DIM + 6) as u64;
        let budget = Budget {
            memory_bytes_max: u64::MAX,
            cache_bytes_max: (TABLES * rows) as u64 * slot_bytes * 3,
            dense_weights,
            ..Budget::default()
        };
        let model = Arc::new(Model::from_flash(flash, budget)?);
        let mut ours = Self { name, worker: serve::worker(&model) };
        ours.read_every_row(rows)?;
        Ok(ours)
    }

    /// Requests for every key of every table, twice: the second time all of them hit.
    fn read_every_row(&mut self, rows: usize) -> Result<()> {
        let mut batch = self.worker.model().batch();
        let size = self.worker.model().budget().batch_max as usize;
        for _ in 0..2 {
            let before = self.worker.counters();
            for first in (0..rows).step_by(size) {
                batch.clear();
                for key in first..rows.min(first + size) {
                    let sample = hatchback::schema::sample::Sample {
                        sparse: vec![vec![key as u64]; TABLES],
                        ..Dlrm { rows }.sample(0)
                    };
                    batch.push(self.worker.model().schema(), &sample)?;
                }
                self.worker.score(&batch, None)?;
            }
            if self.worker.counters().since(&before).misses == 0 {
                return Ok(());
            }
        }
        let (misses, rows) = (self.worker.counters().misses as usize, TABLES * rows);
        ensure!(misses < rows + rows / 1000, "{} rows do not stay in the cache", misses - rows);
        Ok(())
    }

    fn times(&mut self, batches: &[Batch]) -> Result<Vec<f64>> {
        let mut times = Vec::with_capacity(batches.len());
        batches.first().map_or(Ok(()), |first| self.worker.score(first, None).map(drop))?;
        for batch in batches {
            let start = cpu_us();
            self.worker.score(batch, None)?;
            times.push(cpu_us() - start);
        }
        Ok(times)
    }
}

/// Samples that the peers read and ours are given.
fn samples_of(plan: &Plan) -> usize {
    let largest = BATCHES.iter().map(|&b| plan.calls(b) * b as usize).max().unwrap_or(0);
    2 * largest
}

impl Plan {
    fn calls(&self, batch: u32) -> usize {
        (self.samples / batch as usize).max(self.calls_min)
    }
}

/// Runs the comparison.
///
/// # Errors
/// A file cannot be written, our model is refused, or a peer fails in the middle.
pub fn run(plan: &Plan, venv: &Path, json: Option<&PathBuf>, plot: Option<&PathBuf>) -> Result<()> {
    let machine = Machine::this();
    peer::stay_on_one_core()?;
    let folder = tempfile::tempdir().context("a temporary folder")?;
    let model = Dlrm { rows: plan.rows };
    let mut peers = Peers::start(venv, folder.path(), &model, samples_of(plan))?;
    let bundle = folder.path().join("dlrm.hatch");
    model.pack(&bundle, &mut |_, _| ())?;
    let flash = serve::lay_on_flash(&bundle, &folder.path().join("flash"))?;
    let open = |(name, weights)| Ours::open(&flash, name, weights, plan.rows);
    let mut ours = OURS.into_iter().map(open).collect::<Result<Vec<_>>>()?;
    let mut points = measure(plan, &model, &mut ours, &mut peers)?;
    points.extend(peers.missing.iter().cloned().map(Point::NotRun));
    let report = Report {
        bench: "request --peers",
        machine,
        model: format!(
            "MLPerf DLRM, {TABLES} tables of {} rows of {}",
            plan.rows,
            super::dlrm::DIM
        ),
        bars: bars(&points),
        points,
    };
    if let Some(path) = plot {
        chart(path, &report)?;
    }
    if json.map(PathBuf::as_path) != Some(Path::new("-")) {
        show(&report, peers.running.as_ref().map(|(_, about)| about.about.as_str()));
    }
    json.map_or(Ok(()), |path| report::write_json(path, &report))
}

fn measure(plan: &Plan, model: &Dlrm, ours: &mut [Ours], peers: &mut Peers) -> Result<Vec<Point>> {
    let names: Vec<String> =
        ours.iter().map(|o| o.name.to_owned()).chain(peers.engines()).collect();
    let differences = differences(plan, model, ours, peers)?;
    let mut points = Vec::new();
    let bar = serve::progress_bar(
        (BATCHES.len() * plan.rounds) as u64,
        "measuring",
        "{pos}/{len} rounds",
    );
    for batch in BATCHES {
        let calls = plan.calls(batch);
        let mut batches = Vec::new();
        for first in (0..2 * calls * batch as usize).step_by(batch as usize) {
            let mut one = Batch::new(ours[0].worker.model().schema(), batch as usize);
            (first..first + batch as usize)
                .try_for_each(|n| one.push(ours[0].worker.model().schema(), &model.sample(n)))?;
            batches.push(one);
        }
        let mut best = vec![(f64::INFINITY, f64::INFINITY); names.len()];
        for round in 0..plan.rounds {
            for (number, name) in names.iter().enumerate() {
                // The same requests for all: the samples last for two turns.
                let first = round * calls % batches.len();
                let mut times = match ours.get_mut(number) {
                    Some(ours) => ours.times(&batches[first..first + calls])?,
                    None => peers.times(name, batch, calls, first)?,
                };
                let (p50, p99) = &mut best[number];
                *p50 = p50.min(percentile(&mut times, 0.5));
                *p99 = p99.min(percentile(&mut times, 0.99));
            }
            bar.inc(1);
        }
        for ((engine, score_difference), (p50_us, p99_us)) in
            names.iter().cloned().zip(differences.iter().copied()).zip(best)
        {
            points.push(Point::Measured(Measured {
                engine,
                batch,
                p50_us,
                p99_us,
                score_difference,
            }));
        }
    }
    bar.finish_and_clear();
    Ok(points)
}

/// For each engine the largest difference of a score from ONNX Runtime's.
fn differences(
    plan: &Plan,
    model: &Dlrm,
    ours: &mut [Ours],
    peers: &mut Peers,
) -> Result<Vec<Option<f64>>> {
    let n = 256.min(samples_of(plan));
    let mut scores = Vec::new();
    for ours in ours {
        let mut batch = ours.worker.model().batch();
        (0..n).try_for_each(|at| batch.push(ours.worker.model().schema(), &model.sample(at)))?;
        scores.push(ours.worker.score(&batch, None)?.values.to_vec());
    }
    let mut reference = None;
    for engine in peers.engines() {
        scores.push(peers.scores(&engine, n)?);
        if engine == ORT {
            reference = scores.last().cloned();
        }
    }
    Ok(scores.iter().map(|s| reference.as_ref().map(|r| largest_difference(s, r))).collect())
}

/// The figures of `engine` at `batch`.
fn at<'a>(points: &'a [Point], engine: &str, batch: u32) -> Option<&'a Measured> {
    points.iter().find_map(|p| match p {
        Point::Measured(m) if m.engine == engine && m.batch == batch => Some(m),
        _ => None,
    })
}

/// Ahead of ONNX Runtime: its time over ours.
fn bars(points: &[Point]) -> Vec<Bar> {
    let ratio = |engine: &str, batch, of: fn(&Measured) -> f64| {
        Some(of(at(points, ORT, batch)?) / of(at(points, engine, batch)?))
    };
    let mut bars = Vec::new();
    let mut least = |name: String, value, bar| bars.push(Bar::at_least_if(name, value, bar));
    for batch in [1, 8] {
        least(
            format!("p50 of {ORT} / f32, batch {batch}"),
            ratio(OURS[0].0, batch, |m| m.p50_us),
            1.0,
        );
        least(
            format!("p99 of {ORT} / f32, batch {batch}"),
            ratio(OURS[0].0, batch, |m| m.p99_us),
            1.0,
        );
    }
    for batch in [32, 64] {
        let value = ratio(OURS[0].0, batch, |m| m.p50_us);
        least(format!("p50 of {ORT} / f32, batch {batch}"), value, 1.0 / 1.2);
    }
    let lighter = || OURS[1..].iter().map(|o| o.0);
    let exact = |engine: &&str| {
        at(points, engine, 1).and_then(|m| m.score_difference).is_some_and(|d| d <= DIFFERENCE_MAX)
    };
    for batch in BATCHES {
        let best = lighter().filter(exact).filter_map(|engine| ratio(engine, batch, |m| m.p50_us));
        let best = best.fold(None, |a: Option<f64>, b| Some(a.map_or(b, |a| a.max(b))));
        least(format!("p50 of {ORT} / f16 or int8, batch {batch}"), best, 1.0);
    }
    bars
}

fn show(report: &Report<Point>, about: Option<&str>) {
    let machine = &report.machine;
    println!("{}", report.model);
    println!(
        "{}, {} cores, {}, version {}",
        machine.cpu, machine.cores, machine.platform, machine.version
    );
    if let Some(about) = about {
        println!("Peers: {about}.");
    }
    let heads = BATCHES.map(|b| format!("batch {b}"));
    let heads: Vec<&str> =
        ["engine"].into_iter().chain(heads.iter().map(String::as_str)).chain(["score"]).collect();
    let mut table = report::table(&heads);
    let mut seen: Vec<&str> = Vec::new();
    for point in &report.points {
        match point {
            Point::Measured(m) if !seen.contains(&m.engine.as_str()) => {
                seen.push(&m.engine);
                let us = |us: f64| report::micros(Duration::from_secs_f64(us / 1e6));
                let cell = |batch| {
                    at(&report.points, &m.engine, batch)
                        .map_or(String::new(), |m| format!("{} / {}", us(m.p50_us), us(m.p99_us)))
                };
                let difference = m.score_difference.map_or(String::new(), |d| format!("{d:.0e}"));
                table.add_row(
                    [m.engine.clone()].into_iter().chain(BATCHES.map(cell)).chain([difference]),
                );
            }
            Point::Measured(_) => {}
            Point::NotRun(peer) => {
                table.add_row(peer.cells());
            }
        }
    }
    println!("{table}");
    println!(
        "CPU time of a request, p50 / p99, each of the best of several turns on one core; all rows cached."
    );
    println!("score: largest difference from {ORT}'s.");
    println!("{}", bars_table(&report.bars));
}

fn chart(path: &Path, report: &Report<Point>) -> Result<()> {
    let mut names: Vec<&str> = Vec::new();
    for point in &report.points {
        if let Point::Measured(m) = point
            && !names.contains(&m.engine.as_str())
        {
            names.push(&m.engine);
        }
    }
    let line = |(color, name): (usize, &&str)| {
        let of = |batch| {
            at(&report.points, name, batch).map(|m| (f64::from(batch), m.p50_us / f64::from(batch)))
        };
        let points = BATCHES.into_iter().filter_map(of).collect();
        Series { name: (*name).to_owned(), color, dashed: !name.starts_with("Hatchback"), points }
    };
    let series = names.iter().enumerate().map(line).collect();
    let x = Axis::log("samples in a request").at(&BATCHES.map(f64::from));
    plot::lines(path, &report.model, x, Axis::log("CPU time a sample, p50, µs"), series)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Found;

    /// The network is one that our engine takes, every row stays in the cache, and what has no peer
    /// says so.
    #[test]
    fn without_peers_ours_is_measured_and_they_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        let (json, plot) = (folder.path().join("a.json"), folder.path().join("a.svg"));
        let plan = Plan { rows: 64, rounds: 1, samples: 8, calls_min: 2 };
        run(&plan, folder.path(), Some(&json), Some(&plot)).unwrap();
        let report: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
        let points = report["points"].as_array().unwrap();
        assert_eq!(points.len(), BATCHES.len() * OURS.len() + 2);
        assert!(points[0]["p50_us"].as_f64().unwrap() > 0.0);
        assert_eq!(
            (&points[15]["engine"], &points[15]["command"]),
            (&ORT.into(), &peer::SETUP.into())
        );
        assert!(report["bars"].as_array().unwrap().iter().all(|bar| bar["not run"].is_string()));
        assert!(std::fs::read_to_string(&plot).unwrap().contains("Hatchback, f16"));
    }

    #[test]
    fn lighter_weights_count_only_if_their_scores_are_near() {
        let point = |engine: &str, p50_us, difference| {
            let (engine, score_difference) = (engine.to_owned(), Some(difference));
            Point::Measured(Measured { engine, batch: 1, p50_us, p99_us: p50_us, score_difference })
        };
        let points = [
            point(ORT, 100.0, 0.0),
            point(OURS[0].0, 80.0, 0.0),
            point(OURS[1].0, 50.0, 1e-3),
            point(OURS[2].0, 10.0, 2e-3),
        ];
        let of = |name: &str| {
            bars(&points).into_iter().find(|b| b.name.starts_with(name)).unwrap().found
        };
        assert_eq!(
            of("p99 of ONNX Runtime / f32, batch 1"),
            Found::Measured { value: 1.25, holds: true }
        );
        assert_eq!(
            of("p50 of ONNX Runtime / f16 or int8, batch 1"),
            Found::Measured { value: 2.0, holds: true }
        );
    }
}
