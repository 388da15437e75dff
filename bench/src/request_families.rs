//! Eight more model families beside ONNX Runtime, for `bench request --peers`. The peer's program
//! writes each family with random weights, as `pack` reads it. Never reads flash inside a
//! measurement.

use super::bars::{Bar, WORST};
use super::peer::{self, BestTimes, Peer, PeerAbout, PeerScores, RoundTimes};
use super::peer_figures::{self, DLRM, ORT, PeersFigures, PeersMeasurement, PeersPlan, figures_at};
use super::results::{Measurement, PeerNotRun, distinct};
use anyhow::{Context, Result, ensure};
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Worker;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use hatchback_tools::pack::{Overrides, PackJob, read_samples};
use hatchback_tools::report::metrics::largest_difference;
use hatchback_tools::{report, serve};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

/// Samples in a request.
const BATCHES: [u32; 4] = [1, 8, 32, 64];
/// Name of our engine.
const OURS: &str = "Hatchback, f32";
/// Folder of the trainer's package, which defines the families.
const TRAINER: &str = "tools/trainer";
/// Rows of each table. Every row fits the cache.
const ROWS: usize = 2000;
/// Samples that all engines share. A request takes consecutive ones.
const SAMPLES: usize = 1024;
/// Samples whose scores the bench compares.
const SCORES_COMPARED: usize = 256;
/// Largest difference of a score from ONNX Runtime's, in units of 1e-6.
const SCORE_DIFFERENCE: f64 = 10.0;

/// Measures all families, or says why the peer does not run. The peer writes into `folder`.
///
/// # Errors
/// The runtime refuses a family, or the peer fails after its start.
pub fn measure(plan: &PeersPlan, venv: &Path, folder: &Path) -> Result<Vec<PeersMeasurement>> {
    let (mut peer, about) = match start(venv, folder) {
        Ok(running) => running,
        Err(e) => {
            let missing = PeerNotRun::new(
                "ONNX Runtime, eight more families",
                report::explain(&e),
                peer::SETUP,
            );
            return Ok(vec![Measurement::NotRun(missing)]);
        }
    };

    let steps = (about.engines.len() * BATCHES.len() * plan.rounds) as u64;
    let bar = serve::progress_bar(steps, "measuring families", "{pos}/{len} rounds");
    let mut points = Vec::new();
    for (number, name) in about.engines.iter().enumerate() {
        let mut family = Family::open(name, &folder.join(number.to_string()))?;
        let difference = family.difference(&mut peer)?;
        for batch in BATCHES {
            let [ours, theirs] = family.times(&mut peer, plan, batch, &mut || bar.inc(1))?;
            for (engine, best, difference) in [(OURS, ours, difference), (ORT, theirs, 0.0)] {
                points.push(Measurement::Measured(PeersFigures {
                    family: name.clone(),
                    engine: engine.to_owned(),
                    batch,
                    p50_us: best.p50_us,
                    p99_us: best.p99_us,
                    score_difference: Some(difference),
                }));
            }
        }
    }
    bar.finish_and_clear();
    Ok(points)
}

fn start(venv: &Path, folder: &Path) -> Result<(Peer, PeerAbout)> {
    let mut peer = Peer::start(venv, peer::FAMILIES)?;
    let trainer = std::fs::canonicalize(TRAINER).context(TRAINER)?;
    let options = json!({ "folder": folder, "trainer": trainer, "rows": ROWS, "samples": SAMPLES });
    let about = peer.request("setup", &options)?;
    Ok((peer, about))
}

/// A family on our engine, with every row cached.
struct Family<'a> {
    name: &'a str,
    worker: Worker,
    samples: Vec<Sample>,
}

impl<'a> Family<'a> {
    /// Packs and opens the family that the peer wrote into `folder`.
    fn open(name: &'a str, folder: &Path) -> Result<Self> {
        let (spec, bundle) = (folder.join("model.toml"), folder.join("model.hatch"));
        let job = PackJob::read(&spec, Overrides::default())?;
        let packed = job.pack(None, &bundle, &mut |_, _| ())?;
        let flash = serve::install(&bundle, &folder.join("flash"))?;
        // Sets that are a third full on average almost never overflow.
        let rows_bytes: u64 = packed.schema.tables.iter().map(|t| t.row_bytes_total()).sum();
        let keys_bytes: u64 = packed.schema.tables.iter().map(|t| 64 * t.rows).sum();
        let budget = Budget {
            memory_bytes_max: u64::MAX,
            cache_bytes_max: 3 * (rows_bytes + keys_bytes),
            ..Budget::default()
        };
        let model = Arc::new(Model::from_flash(&flash, budget)?);
        let samples = read_samples(&folder.join("requests.jsonl"), model.schema())?;
        ensure!(samples.len() == SAMPLES, "{name}: {} samples", samples.len());
        let worker = serve::worker(&model);
        let mut family = Self { name, worker, samples };
        family.read_every_row()?;
        Ok(family)
    }

    /// Scores every sample twice. All rows of the second time must hit.
    fn read_every_row(&mut self) -> Result<()> {
        let batches = self.requests(64, 0, SAMPLES / 64)?;
        peer_figures::times(&mut self.worker, &batches)?;
        let before = self.worker.counters();
        peer_figures::times(&mut self.worker, &batches)?;
        let misses = self.worker.counters().since(&before).misses;
        ensure!(misses == 0, "{}: {misses} rows do not stay in the cache", self.name);
        Ok(())
    }

    /// Returns requests `first` to `first + calls` of `batch` samples. The peer takes the same.
    fn requests(&self, batch: u32, first: usize, calls: usize) -> Result<Vec<Batch>> {
        let (schema, size) = (self.worker.model().schema(), batch as usize);
        let request = |number: usize| {
            let at = number * size % (self.samples.len() - size + 1);
            let mut request = Batch::new(schema, size);
            self.samples[at..at + size].iter().try_for_each(|s| request.push(schema, s))?;
            Ok(request)
        };
        (first..first + calls).map(request).collect()
    }

    /// Returns the best times of our engine and of the peer, in turn over the rounds of `plan`.
    fn times(
        &mut self,
        peer: &mut Peer,
        plan: &PeersPlan,
        batch: u32,
        each: &mut dyn FnMut(),
    ) -> Result<[BestTimes; 2]> {
        let (mut ours, mut theirs) = (BestTimes::default(), BestTimes::default());
        let calls = plan.calls(batch);
        for round in 0..plan.rounds {
            let first = round * calls;
            let requests = self.requests(batch, first, calls)?;
            ours.add_round(peer_figures::times(&mut self.worker, &requests)?);
            let options =
                json!({ "engine": self.name, "batch": batch, "calls": calls, "first": first });
            theirs.add_round(peer.request::<RoundTimes>("round", &options)?.times_us);
            each();
        }
        Ok([ours, theirs])
    }

    /// Returns the largest difference of a score from ONNX Runtime's.
    fn difference(&mut self, peer: &mut Peer) -> Result<f64> {
        let batch = self.requests(SCORES_COMPARED as u32, 0, 1)?.remove(0);
        let ours = self.worker.score(&batch, None)?.values.to_vec();
        let options = json!({ "engine": self.name, "samples": SCORES_COMPARED });
        let theirs: PeerScores = peer.request("scores", &options)?;
        ensure!(ours.len() == theirs.scores.len(), "{}: {} scores", self.name, ours.len());
        Ok(largest_difference(&ours, &theirs.scores))
    }
}

/// Returns the names of the measured families but for the DLRM.
fn families(points: &[PeersMeasurement]) -> Vec<&str> {
    let others = points.iter().filter_map(Measurement::figures).filter(|m| m.family != DLRM);
    distinct(others.map(|m| m.family.as_str()))
}

/// Returns ONNX Runtime's p50 over ours.
fn ratio(points: &[PeersMeasurement], family: &str, batch: u32) -> Option<f64> {
    let p50 = |engine| figures_at(points, family, engine, batch).map(|m| m.p50_us);
    Some(p50(ORT)? / p50(OURS)?)
}

/// Returns the demanded figures: no family is slower than in ONNX Runtime, and scores agree.
pub fn bars(points: &[PeersMeasurement]) -> Vec<Bar> {
    let mut bars = Vec::new();
    for family in families(points) {
        for batch in BATCHES {
            let name = format!("p50 of {ORT} / f32, {family}, batch {batch}");
            let bar = Bar::at_least(name, ratio(points, family, batch), 1.0);
            bars.push(bar.because("a peer did not run"));
        }
        let difference = figures_at(points, family, OURS, 1).and_then(|m| m.score_difference);
        if let Some(difference) = difference {
            let name = format!("score difference from {ORT}, {family}, 1e-6");
            // Of a NaN and a number, `min` returns the number.
            bars.push(Bar::at_most(name, (difference * 1e6).min(WORST), SCORE_DIFFERENCE));
        }
    }
    if bars.is_empty() {
        bars.push(Bar::not_run("p50 of eight more families", 1.0, "a peer did not run"));
    }
    bars
}

/// Returns the table of times: a row for each family, a column for each batch size.
pub fn table(points: &[PeersMeasurement]) -> comfy_table::Table {
    let heads = BATCHES.map(|b| format!("batch {b}"));
    let heads: Vec<&str> =
        ["family"].into_iter().chain(heads.iter().map(String::as_str)).chain(["score"]).collect();
    let mut table = report::table(&heads);

    for family in families(points) {
        let cell = |batch| {
            let p50 = |engine| figures_at(points, family, engine, batch).map(|m| m.p50_us);
            match (p50(OURS), p50(ORT)) {
                (Some(ours), Some(theirs)) => {
                    format!("{} / {}", report::micros(ours), report::micros(theirs))
                }
                _ => String::new(),
            }
        };
        let difference = figures_at(points, family, OURS, 1).and_then(|m| m.score_difference);
        let difference = difference.map_or(String::new(), |d| format!("{d:.0e}"));
        table.add_row([family.to_owned()].into_iter().chain(BATCHES.map(cell)).chain([difference]));
    }
    table
}
