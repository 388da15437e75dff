//! `eval`: scores a labelled set through the whole request path and measures AUC, logloss, hit
//! rate, statuses, latency and the largest difference from the trainer's recorded scores. Samples
//! whose score is not a number are counted and are in no mean. Never changes the model.

use crate::pack::read_samples;
use crate::report;
use crate::report::Json;
use crate::report::metrics::{Latencies, Lookups, Percentiles, auc, largest_difference, logloss};
use crate::report::plot::TimeSlice;
use crate::say;
use crate::serve::{self, ServeArgs};
use anyhow::{Result, ensure};
use clap::Args;
use hatchback::model::Model;
use hatchback::request::worker::{NotFinite, Scores};
use hatchback::schema::sample::Sample;
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Scores a labelled set and measures quality and latency
#[derive(Args, Debug)]
pub struct EvalArgs {
    #[command(flatten)]
    serve: ServeArgs,
    /// Samples with labels, one line of JSON each [default: the bundle's probe set]
    #[arg(long)]
    samples: Option<PathBuf>,
    /// Samples in one request
    #[arg(long, default_value_t = 1, value_parser = report::args::batch)]
    batch: usize,
    #[command(flatten)]
    json: Json,
}

/// The result of an evaluation.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Evaluation {
    /// The generation of the model.
    pub generation: String,
    /// The engine of the dense network.
    pub dense_engine: String,
    /// Number of samples.
    pub samples: usize,
    /// Samples whose score is not a number. Quality is that of the other samples.
    pub not_finite: usize,
    /// The quality of the first output.
    #[serde(flatten)]
    pub first_output: OutputQuality,
    /// The quality of each further output.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub further_outputs: Vec<OutputQuality>,
    /// Share of the lookups in cached tables that were cache hits, `0..=1`; absent without any.
    pub hit_rate: Option<f64>,
    /// Lookups by status.
    pub rows: Lookups,
    /// Number of all lookups.
    pub lookups: u64,
    /// Pages read from flash.
    pub pages: u64,
    /// Latency of a request.
    pub latency: Percentiles,
    /// Latency and hit rate over time.
    #[serde(skip)]
    pub slices: Vec<TimeSlice>,
    /// Hatchback's scores in the order of the samples, one for each named output; `None` where a
    /// score of the sample is not a number.
    #[serde(skip)]
    pub scores: Vec<Option<Vec<f32>>>,
    /// The first sample whose score is not a number, counted from 0, and its error.
    #[serde(skip)]
    pub first_not_finite: Option<String>,
}

/// How good the scores of one output are.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct OutputQuality {
    /// The name of the output.
    pub output: String,
    /// Samples with a label for the output.
    pub labelled: usize,
    /// AUC of Hatchback's scores; absent unless both labels occur, and all are from 0 to 1.
    pub auc: Option<f64>,
    /// Mean logloss of Hatchback's scores; absent unless all labels are from 0 to 1.
    pub logloss: Option<f64>,
    /// AUC of the trainer's recorded scores.
    pub reference_auc: Option<f64>,
    /// Mean logloss of the trainer's recorded scores.
    pub reference_logloss: Option<f64>,
    /// Largest difference from a recorded score.
    pub score_difference_max: Option<f64>,
}

/// Slices of the run, each with its latency and hit rate.
const SLICES: usize = 40;

/// Scores `samples` on one worker in requests of `batch` samples.
///
/// # Errors
/// `batch` is above the model's, a sample does not fit the model, or the dense network fails.
pub fn evaluate(model: &Arc<Model>, samples: &[Sample], batch: usize) -> Result<Evaluation> {
    serve::check_batch(batch, model)?;
    let (mut worker, mut request) = (serve::worker(model), model.batch());
    let mut found = Evaluation {
        generation: model.generation().to_string(),
        dense_engine: model.dense_runs_on(),
        ..Evaluation::default()
    };
    let mut all = Latencies::default();
    let start = Instant::now();

    for slice in samples.chunks(samples.len().div_ceil(SLICES).next_multiple_of(batch).max(1)) {
        let (before, mut latencies) = (worker.counters(), Latencies::default());
        for group in slice.chunks(batch) {
            request.clear();
            group.iter().try_for_each(|sample| request.push(model.schema(), sample))?;
            let sent = Instant::now();
            let scores = worker.score_requests(&request, None)?;
            latencies.record(sent.elapsed());
            let outputs = model.schema().network.outputs.len();
            (0..group.len())
                .for_each(|sample| found.take(scores.request(sample..sample + 1), outputs));
        }
        all.add(&latencies);
        let (seconds, counters) = (start.elapsed().as_secs_f64(), worker.counters().since(&before));
        found.slices.push(TimeSlice::new(seconds, &latencies.percentiles(), &counters));
    }

    let counters = worker.counters();
    found.samples = samples.len();
    found.hit_rate = (counters.cached_lookups > 0).then(|| counters.hit_rate());
    (found.lookups, found.pages) = (counters.lookups, counters.pages);
    found.latency = all.percentiles();
    found.judge_all(model, samples)?;
    Ok(found)
}

impl Evaluation {
    /// Takes the result of the next sample.
    fn take(&mut self, scores: Result<Scores<'_>, NotFinite>, outputs: usize) {
        match scores {
            Ok(scores) => {
                self.scores.push(Some(scores.values[..outputs].to_vec()));
                self.rows.count(scores.statuses);
            }
            Err(e) => {
                let number = self.scores.len() + 1;
                self.first_not_finite
                    .get_or_insert_with(|| format!("sample {number} of the set: {e}"));
                self.not_finite += 1;
                self.scores.push(None);
            }
        }
    }

    /// Checks that every sample has a score.
    ///
    /// # Errors
    /// The number of samples without one, and the first.
    pub fn check_scores(&self) -> Result<()> {
        let (failed, all) = (self.not_finite, self.samples);
        let first = self.first_not_finite.as_deref().unwrap_or_default();
        ensure!(failed == 0, "{failed} of {all} samples have no score; the first: {first}");
        Ok(())
    }

    /// Compares the scores of each output with its labels and recorded scores.
    fn judge_all(&mut self, model: &Model, samples: &[Sample]) -> Result<()> {
        let outputs = model.schema().network.outputs.iter().enumerate();
        let judged = outputs.map(|(number, output)| self.judge(number, &output.name, samples));
        let mut judged = judged.collect::<Result<Vec<_>>>()?.into_iter();

        self.first_output = judged.next().unwrap_or_default();
        self.further_outputs = judged.collect();
        Ok(())
    }

    /// Compares the scores of output `number` with the labels and with the recorded scores. The
    /// quality is that of the samples with a label for this output; the trainer's is only known if
    /// all of these have a recorded score.
    fn judge(&self, number: usize, name: &str, samples: &[Sample]) -> Result<OutputQuality> {
        let scored: Vec<(&Sample, f32)> = samples
            .iter()
            .zip(&self.scores)
            .filter_map(|(sample, scores)| Some((sample, scores.as_ref()?[number])))
            .collect();
        let mut found = OutputQuality { output: name.to_owned(), ..OutputQuality::default() };

        let labelled = || scored.iter().filter(|(sample, _)| sample.label(number).is_some());
        let labels: Vec<f32> = labelled().filter_map(|(s, _)| s.label(number)).collect();
        let scores: Vec<f32> = labelled().map(|(_, score)| *score).collect();
        let reference: Option<Vec<f32>> = labelled().map(|(s, _)| s.score(number)).collect();
        found.labelled = labels.len();
        (found.auc, found.logloss) = (auc(&scores, &labels), logloss(&scores, &labels));
        if let Some(reference) = &reference {
            (found.reference_auc, found.reference_logloss) =
                (auc(reference, &labels), logloss(reference, &labels));
        }

        let recorded: Option<Vec<f32>> = scored.iter().map(|(s, _)| s.score(number)).collect();
        if let Some(recorded) = &recorded {
            let scores: Vec<f32> = scored.iter().map(|(_, score)| *score).collect();
            let difference = largest_difference(&scores, recorded);
            ensure!(!difference.is_nan(), "a recorded score is not a number");
            found.score_difference_max = Some(difference);
        }
        Ok(found)
    }

    /// Returns the report as a table.
    pub fn table(&self) -> comfy_table::Table {
        let mut table = report::table(&[&self.generation, "Hatchback", "trainer"]);
        let mut row = |what: &str, ours: String, theirs: String| {
            table.add_row([what.to_owned(), ours, theirs]);
        };

        row("samples", report::count(self.samples as u64), String::new());
        if self.not_finite > 0 {
            let without = report::count(self.not_finite as u64);
            row("samples without a score", without, String::new());
        }
        for found in std::iter::once(&self.first_output).chain(&self.further_outputs) {
            // With a single output its name is left out.
            let of = match self.further_outputs.len() {
                0 => String::new(),
                _ => format!(" of {}", found.output),
            };
            row(
                &format!("AUC{of}"),
                report::quality(found.auc),
                report::quality(found.reference_auc),
            );
            row(
                &format!("logloss{of}"),
                report::quality(found.logloss),
                report::quality(found.reference_logloss),
            );
            let difference = found.score_difference_max;
            let difference = report::or_dash(difference, |d| format!("{d:.2e}"));
            row(&format!("largest score difference{of}"), difference, String::new());
        }
        row(
            "hit rate, cached tables",
            report::or_dash(self.hit_rate, report::percent),
            String::new(),
        );
        for (what, n) in [
            ("lookups fresh", self.rows.fresh),
            ("lookups defaulted", self.rows.defaulted),
            ("lookups absent", self.rows.absent),
            ("lookups damaged", self.rows.damaged),
        ] {
            row(what, report::count(n), String::new());
        }
        row("pages read from flash", report::count(self.pages), String::new());
        for (what, us) in [
            ("p50", self.latency.p50_us),
            ("p99", self.latency.p99_us),
            ("max", self.latency.max_us),
        ] {
            row(&format!("latency {what}"), format!("{us:.1} µs"), String::new());
        }
        table
    }
}

/// Runs the command.
///
/// # Errors
/// The model or the samples are refused, a report cannot be written, or a score is not a number.
pub fn run(args: &EvalArgs) -> Result<()> {
    let flash = args.serve.flash()?;
    let samples = match &args.samples {
        Some(path) => read_samples(path, &flash.manifest().schema)?,
        None => flash.probe()?,
    };
    ensure!(
        !samples.is_empty(),
        "the model has no probe set: pass a file of samples with --samples"
    );

    let model = args.serve.open_from(&flash)?;
    let found = evaluate(&model, &samples, args.batch)?;

    args.json.write(&found, || {
        say!("{}\n{}", found.table(), serve::memory_table(&model))?;
        say!("dense network: {}", found.dense_engine)
    })?;
    found.check_scores()
}
