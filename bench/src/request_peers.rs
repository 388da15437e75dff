//! `bench request --peers`: whole requests of a DLRM on one core, with every row in the cache,
//! beside ONNX Runtime and PyTorch. Eight more families follow (`request_families`). The engines
//! score the same requests in turn, and the bench compares their scores. Never reads flash inside a
//! measurement.

use super::bars::{Bar, bars_table};
use super::dlrm::{self, Dlrm, TABLES};
use super::peer::{self, BestTimes, Peer, PeerAbout, PeerScores, RoundTimes};
use super::peer_figures::{self, DLRM, ORT, PeersFigures, PeersMeasurement, PeersPlan, figures_at};
use super::request_families;
use super::results::{BenchReport, HostMachine, Measurement, PeerNotRun, distinct};
use anyhow::{Context, Result, ensure};
use hatchback::Weights;
use hatchback::flash::Flash;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Worker;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use hatchback_tools::report::Json;
use hatchback_tools::report::metrics::largest_difference;
use hatchback_tools::report::plot::{self, Axis, Series};
use hatchback_tools::{report, say, serve};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Samples in a request.
const BATCHES: [u32; 5] = [1, 8, 32, 64, 256];
/// The same with the weights of the layers quantized to int8 by its own tool.
const ORT_INT8: &str = "ONNX Runtime, int8";
/// How much faster than its peer an engine must be from batch 8 on, and int8 at any batch.
const SPEEDUP: f64 = 1.2;
/// Our engines: one for each encoding of the dense network's weights.
const OURS: [(&str, Weights); 3] = [
    ("Hatchback, f32", Weights::F32),
    ("Hatchback, f16", Weights::F16),
    ("Hatchback, int8", Weights::Int8),
];
/// Largest difference from ONNX Runtime's scores at which f16 and int8 weights count for the bars.
const SCORE_TOLERANCE: f64 = 1e-3;
/// Samples whose scores the bench compares.
const SCORES_COMPARED: usize = 256;

/// Takes four minutes.
pub const FULL: PeersPlan = PeersPlan { rows: 20_000, rounds: 7, samples: 1024, calls_min: 100 };
/// Takes two minutes, most of them for the setup of the peers.
pub const QUICK: PeersPlan = PeersPlan { rows: 5000, rounds: 3, samples: 128, calls_min: 16 };

/// ONNX Runtime and PyTorch, or the reasons why they do not run.
struct RequestPeers {
    running: Option<(Peer, PeerAbout)>,
    missing: Vec<PeerNotRun>,
}

impl RequestPeers {
    fn start(venv: &Path, folder: &Path, model: &Dlrm, samples: usize) -> Result<Self> {
        let started = Peer::start(venv, peer::DLRM).and_then(|mut peer| {
            model.write(folder, samples)?;
            let about = peer.request("setup", &model.shape(folder))?;
            Ok((peer, about))
        });
        Ok(match started {
            Ok(running) => Self { running: Some(running), missing: Vec::new() },
            Err(e) => {
                let missing = |engine| PeerNotRun::new(engine, report::explain(&e), peer::SETUP);
                Self { running: None, missing: [ORT, ORT_INT8, "torch, eager"].map(missing).into() }
            }
        })
    }

    fn engines(&self) -> Vec<String> {
        self.running.as_ref().map_or(Vec::new(), |(_, about)| about.engines.clone())
    }

    fn times(&mut self, engine: &str, batch: u32, calls: usize, first: usize) -> Result<Vec<f64>> {
        let (peer, _) = self.running.as_mut().context("no peer runs")?;
        let options = json!({ "engine": engine, "batch": batch, "calls": calls, "first": first });
        Ok(peer.request::<RoundTimes>("round", &options)?.times_us)
    }

    fn scores(&mut self, engine: &str, samples: usize) -> Result<Vec<f32>> {
        let (peer, _) = self.running.as_mut().context("no peer runs")?;
        let options = json!({ "engine": engine, "samples": samples });
        Ok(peer.request::<PeerScores>("scores", &options)?.scores)
    }
}

/// One of our engines: a worker with every row cached.
struct OurWorker {
    name: &'static str,
    worker: Worker,
}

impl OurWorker {
    fn open(flash: &Flash, name: &'static str, rows: usize) -> Result<Self> {
        // Sets of 14 ways that are a third full on average almost never overflow.
        let slot_bytes = (4 * dlrm::DIM + 6) as u64;
        let budget = Budget {
            memory_bytes_max: u64::MAX,
            cache_bytes_max: (TABLES * rows) as u64 * slot_bytes * 3,
            ..Budget::default()
        };
        let model = Arc::new(Model::from_flash(flash, budget)?);
        let mut ours = Self { name, worker: serve::worker(&model) };
        ours.read_every_row(rows)?;
        Ok(ours)
    }

    /// Requests every key of every table twice. All requests of the second pass must hit.
    fn read_every_row(&mut self, rows: usize) -> Result<()> {
        let mut batch = self.worker.model().batch();
        let size = self.worker.model().budget().batch_max as usize;

        for _ in 0..2 {
            let before = self.worker.counters();
            for first in (0..rows).step_by(size) {
                batch.clear();
                for key in first..rows.min(first + size) {
                    let sample = Sample {
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
}

/// Returns the number of samples that all engines share: two turns of the largest batch size.
fn samples_of(plan: &PeersPlan) -> usize {
    let largest = BATCHES.iter().map(|&b| plan.calls(b) * b as usize).max().unwrap_or(0);
    2 * largest
}

/// Runs the comparison.
///
/// # Errors
/// A file cannot be written, the runtime refuses the model, or a peer fails after its start.
pub fn run(plan: &PeersPlan, venv: &Path, json: &Json, plot: Option<&PathBuf>) -> Result<()> {
    let machine = HostMachine::this();
    peer::stay_on_one_core()?;
    let folder = tempfile::tempdir().context("a temporary folder")?;
    let model = Dlrm { rows: plan.rows };
    let mut peers = RequestPeers::start(venv, folder.path(), &model, samples_of(plan))?;

    let open = |(name, weights): (&'static str, Weights)| {
        let bundle = folder.path().join(format!("{weights}.hatch"));
        model.pack(weights, &bundle, &mut |_, _| ())?;
        let flash = serve::install(&bundle, &folder.path().join(format!("flash-{weights}")))?;
        OurWorker::open(&flash, name, plan.rows)
    };
    let mut ours = OURS.into_iter().map(open).collect::<Result<Vec<_>>>()?;
    let mut points = measure(plan, &model, &mut ours, &mut peers)?;
    points.extend(peers.missing.iter().cloned().map(Measurement::NotRun));
    let families = request_families::measure(plan, venv, &folder.path().join("families"))?;
    points.extend(families);

    let model = format!("MLPerf DLRM, {TABLES} tables of {} rows of {}", plan.rows, dlrm::DIM);
    let mut bars = bars(&points);
    bars.extend(request_families::bars(&points));
    let report = BenchReport { bench: "request --peers", machine, model, bars, points };
    if let Some(path) = plot {
        chart(path, &report)?;
    }
    let about = peers.running.as_ref().map(|(_, about)| about.about.as_str());
    json.write(&report, || print_tables(&report, about))
}

/// Returns the requests of two turns, each of `batch` samples.
fn requests(plan: &PeersPlan, model: &Dlrm, worker: &Worker, batch: u32) -> Result<Vec<Batch>> {
    let (schema, size) = (worker.model().schema(), batch as usize);
    let request = |first: usize| {
        let mut request = Batch::new(schema, size);
        let mut samples = first..first + size;
        samples.try_for_each(|n| request.push(schema, &model.sample(n)))?;
        Ok(request)
    };
    (0..2 * plan.calls(batch) * size).step_by(size).map(request).collect()
}

/// Measures all engines at all batch sizes.
fn measure(
    plan: &PeersPlan,
    model: &Dlrm,
    ours: &mut [OurWorker],
    peers: &mut RequestPeers,
) -> Result<Vec<PeersMeasurement>> {
    let own = ours.iter().map(|o| o.name.to_owned());
    let names: Vec<String> = own.chain(peers.engines()).collect();
    let differences = differences(plan, model, ours, peers)?;
    let steps = (BATCHES.len() * plan.rounds) as u64;
    let bar = serve::progress_bar(steps, "measuring", "{pos}/{len} rounds");
    let mut points = Vec::new();

    for batch in BATCHES {
        let calls = plan.calls(batch);
        let batches = requests(plan, model, &ours[0].worker, batch)?;
        let mut best = vec![BestTimes::default(); names.len()];

        for round in 0..plan.rounds {
            // All engines score the same requests; the requests last for two turns.
            let first = round * calls % batches.len();
            for (number, (name, best)) in names.iter().zip(&mut best).enumerate() {
                best.add_round(match ours.get_mut(number) {
                    Some(ours) => {
                        peer_figures::times(&mut ours.worker, &batches[first..first + calls])?
                    }
                    None => peers.times(name, batch, calls, first)?,
                });
            }
            bar.inc(1);
        }

        for ((engine, difference), best) in names.iter().zip(&differences).zip(best) {
            points.push(Measurement::Measured(PeersFigures {
                family: DLRM.to_owned(),
                engine: engine.clone(),
                batch,
                p50_us: best.p50_us,
                p99_us: best.p99_us,
                score_difference: *difference,
            }));
        }
    }
    bar.finish_and_clear();
    Ok(points)
}

/// Returns for each engine the largest difference of a score from ONNX Runtime's.
fn differences(
    plan: &PeersPlan,
    model: &Dlrm,
    ours: &mut [OurWorker],
    peers: &mut RequestPeers,
) -> Result<Vec<Option<f64>>> {
    let n = SCORES_COMPARED.min(samples_of(plan));
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

/// Returns the figures of the DLRM on `engine` at `batch`.
fn at<'a>(points: &'a [PeersMeasurement], engine: &str, batch: u32) -> Option<&'a PeersFigures> {
    figures_at(points, DLRM, engine, batch)
}

/// Returns the demanded figures: ONNX Runtime's time over ours, for f32 and for int8, and our error
/// with int8 over ONNX Runtime's.
fn bars(points: &[PeersMeasurement]) -> Vec<Bar> {
    let [(f32_weights, _), _, (int8_weights, _)] = OURS;
    let ratio = |peer: &str, engine: &str, batch, of: fn(&PeersFigures) -> f64| {
        Some(of(at(points, peer, batch)?) / of(at(points, engine, batch)?))
    };
    let mut bars = Vec::new();
    let mut least = |name: String, value: Option<f64>, bar| {
        bars.push(Bar::at_least(name, value, bar).because("a peer did not run"));
    };

    for batch in BATCHES {
        let p50 = ratio(ORT, f32_weights, batch, |m| m.p50_us);
        let bar = if batch < 8 { 1.0 } else { SPEEDUP };
        least(format!("p50 of {ORT} / f32, batch {batch}"), p50, bar);
        if batch <= 8 {
            let p99 = ratio(ORT, f32_weights, batch, |m| m.p99_us);
            least(format!("p99 of {ORT} / f32, batch {batch}"), p99, 1.0);
        }
    }
    for batch in BATCHES {
        let p50 = ratio(ORT_INT8, int8_weights, batch, |m| m.p50_us);
        least(format!("p50 of {ORT_INT8} / int8, batch {batch}"), p50, SPEEDUP);
    }
    let error = |engine| at(points, engine, BATCHES[0]).and_then(|m| m.score_difference);
    // An error of ours that is no number, or endless, is larger than any of theirs.
    let share = |(theirs, ours): (f64, f64)| if ours.is_finite() { theirs / ours } else { 0.0 };
    let errors = error(ORT_INT8).zip(error(int8_weights)).map(share);
    least(format!("score error of {ORT_INT8} / int8"), errors, 1.0);

    let lighter = || OURS[1..].iter().map(|o| o.0);
    let exact = |engine: &&str| {
        at(points, engine, 1).and_then(|m| m.score_difference).is_some_and(|d| d <= SCORE_TOLERANCE)
    };
    for batch in BATCHES {
        let best =
            lighter().filter(exact).filter_map(|engine| ratio(ORT, engine, batch, |m| m.p50_us));
        let best = best.fold(None, |a: Option<f64>, b| Some(a.map_or(b, |a| a.max(b))));
        least(format!("p50 of {ORT} / f16 or int8, batch {batch}"), best, 1.0);
    }
    bars
}

fn engine_names(points: &[PeersMeasurement]) -> Vec<&str> {
    let of_dlrm = points.iter().filter_map(Measurement::figures).filter(|m| m.family == DLRM);
    distinct(of_dlrm.map(|m| m.engine.as_str()))
}

/// Prints the tables.
fn print_tables(report: &BenchReport<PeersMeasurement>, about: Option<&str>) -> Result<()> {
    say!("{}", report.model)?;
    say!("{}", report.machine)?;
    if let Some(about) = about {
        say!("Peers: {about}.")?;
    }

    say!("{}", engine_table(&report.points))?;
    say!(
        "CPU time of a request, p50 / p99, each of the best of several turns on one core; all rows \
         cached."
    )?;
    say!("score: largest difference from {ORT}'s.")?;
    say!("{}", request_families::table(&report.points))?;
    say!("CPU time of a request, p50 of Hatchback with f32 / p50 of {ORT}; the DLRM is above.")?;
    say!("{}", bars_table(&report.bars))
}

/// Returns the table of times: a row per engine, a column per batch size.
fn engine_table(points: &[PeersMeasurement]) -> comfy_table::Table {
    let heads = BATCHES.map(|b| format!("batch {b}"));
    let heads: Vec<&str> =
        ["engine"].into_iter().chain(heads.iter().map(String::as_str)).chain(["score"]).collect();
    let mut table = report::table(&heads);

    for engine in engine_names(points) {
        let cell = |batch| {
            at(points, engine, batch).map_or(String::new(), |m| {
                format!("{} / {}", report::micros(m.p50_us), report::micros(m.p99_us))
            })
        };
        let difference = at(points, engine, BATCHES[0]).and_then(|m| m.score_difference);
        let difference = difference.map_or(String::new(), |d| format!("{d:.0e}"));
        let cells = [engine.to_owned()].into_iter().chain(BATCHES.map(cell)).chain([difference]);
        table.add_row(cells);
    }
    for peer in points.iter().filter_map(Measurement::not_run) {
        table.add_row(peer.cells());
    }
    table
}

/// Draws the CPU time per sample by batch size.
fn chart(path: &Path, report: &BenchReport<PeersMeasurement>) -> Result<()> {
    let names = engine_names(&report.points);
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
    use crate::bars::{BarResult, WORST};
    use crate::tests::reported;

    /// Our engine runs the network, every row stays in the cache, and the report lists the peers as
    /// not run.
    #[test]
    fn without_peers_ours_is_measured_and_they_are_listed() {
        let folder = tempfile::tempdir().unwrap();
        let plot = folder.path().join("a.svg");
        let plan = PeersPlan { rows: 64, rounds: 1, samples: 8, calls_min: 2 };
        let report = reported(|json| run(&plan, folder.path(), json, Some(&plot)));
        let points = report["points"].as_array().unwrap();
        assert_eq!(points.len(), BATCHES.len() * OURS.len() + 4);
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
            Measurement::Measured(PeersFigures {
                family: DLRM.to_owned(),
                engine,
                batch: 1,
                p50_us,
                p99_us: p50_us,
                score_difference,
            })
        };
        let mut points = [
            point(ORT, 100.0, 0.0),
            point(OURS[0].0, 80.0, 0.0),
            point(OURS[1].0, 50.0, 1e-3),
            point(OURS[2].0, 10.0, 2e-3),
            point(ORT_INT8, 10.0, 4e-3),
        ];
        let of = |points: &[PeersMeasurement], name: &str| {
            bars(points).into_iter().find(|b| b.name.starts_with(name)).unwrap().result
        };
        assert_eq!(
            of(&points, "p99 of ONNX Runtime / f32, batch 1"),
            BarResult::Measured { value: 1.25, holds: true }
        );
        assert_eq!(
            of(&points, "p50 of ONNX Runtime / f16 or int8, batch 1"),
            BarResult::Measured { value: 2.0, holds: true }
        );
        assert_eq!(of(&points, "score"), BarResult::Measured { value: 2.0, holds: true });

        points[3] = point(OURS[2].0, 10.0, f64::NAN);
        assert_eq!(of(&points, "score"), BarResult::Measured { value: 0.0, holds: false });
        let Measurement::Measured(ours) = point(OURS[0].0, 1.0, f64::NAN) else { panic!() };
        let other = Measurement::Measured(PeersFigures { family: "DIN".to_owned(), ..ours });
        let difference = request_families::bars(&[other]).pop().unwrap().result;
        assert_eq!(difference, BarResult::Measured { value: WORST, holds: false });
    }
}
