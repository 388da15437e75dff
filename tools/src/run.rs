//! `run`: reads samples (JSON lines) and writes their scores with status (JSON lines), in order. A
//! line may be a request with several candidates: its answer has one for each.
//! Never skips a line: a line that is not a sample, and a sample whose score is not a number, get
//! an error as their answer.

use crate::report;
use crate::report::Json;
use crate::report::output::output_error;
use crate::serve::{self, ServeArgs};
use anyhow::{Context, Result, ensure};
use clap::Args;
use hatchback::LookupStatus;
use hatchback::clock::{Clock, SystemClock};
use hatchback::request::worker::{BatchScores, ScoreError, Worker};
use hatchback::schema::Schema;
use hatchback::schema::batch::{Batch, BatchError};
use hatchback::schema::key_function::KeyFunction;
use hatchback::schema::outputs::NamedScores;
use hatchback::schema::sample::{Sample, SampleError};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Scores samples from a file or from standard input
#[derive(Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    serve: ServeArgs,
    /// Samples, one line of JSON each; `-` is standard input
    #[arg(long, default_value = "-")]
    samples: PathBuf,
    /// Samples in one request
    #[arg(long, default_value_t = 1, value_parser = report::args::batch)]
    batch: usize,
    /// Time for each request, µs. Rows that are not read by then are replaced by default rows, or
    /// the request has no scores, as the table's miss policy says
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    timeout_us: Option<u64>,
    /// Scores each request this many times and prints its last answer, for instruction counts
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    #[command(flatten)]
    json: Json,
}

/// The report of `--json`: the answers, and the generation that made them.
#[derive(Serialize)]
struct RunReport {
    generation: String,
    samples: usize,
    /// Lines that were not samples.
    refused: usize,
    /// Samples whose score is not a number.
    not_finite: usize,
    /// Samples whose request had no scores in time.
    overdue: usize,
    answers: Vec<serde_json::Value>,
}

/// A line of output: a score, or the error of a line of input.
#[derive(Serialize)]
#[serde(untagged)]
enum Answer<'a> {
    Score {
        score: NamedScores<'a>,
        status: LookupStatus,
        #[serde(flatten)]
        differences: Differences,
    },
    Error {
        line: usize,
        error: String,
    },
    Candidates {
        candidates: Vec<Answer<'a>>,
    },
}

/// The differences between the inputs of a sample and those of the model that are no error, as an
/// answer of the protocol names them: separated by commas.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Differences {
    /// Inputs of retired features, which were not read.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ignored_inputs: String,
    /// Features that were not sent.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub absent_inputs: String,
}

/// The names of the inputs in a line.
#[derive(Default, Deserialize)]
#[serde(default)]
struct SentNames {
    dense: SentDense,
    sparse: BTreeMap<String, IgnoredAny>,
    candidates: Option<Vec<SentNames>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum SentDense {
    List(Vec<IgnoredAny>),
    Named(BTreeMap<String, IgnoredAny>),
}

impl Default for SentDense {
    fn default() -> Self {
        Self::List(Vec::new())
    }
}

/// What a line sends beside the values.
pub struct Sent {
    /// Whether it has candidates.
    pub has_candidates: bool,
    /// The differences of each sample.
    pub differences: Vec<Differences>,
}

impl Sent {
    /// Reads `line`, which fits `schema`.
    pub fn read(line: &str, schema: &Schema) -> Self {
        // The line was read as samples, so the names can be read too.
        let names: SentNames = serde_json::from_str(line).unwrap_or_default();
        let differences = names.differences(schema);
        Self { has_candidates: names.candidates.is_some(), differences }
    }
}

impl SentNames {
    fn differences(&self, schema: &Schema) -> Vec<Differences> {
        match &self.candidates {
            None => vec![differences_of(&[self], schema)],
            Some(candidates) => {
                candidates.iter().map(|own| differences_of(&[self, own], schema)).collect()
            }
        }
    }
}

/// Returns the differences of the sample whose inputs are in `parts`: a request and a candidate.
fn differences_of(parts: &[&SentNames], schema: &Schema) -> Differences {
    let is_sent = |name: &String| parts.iter().any(|part| part.sparse.contains_key(name));
    let is_named = |name: &String| {
        parts
            .iter()
            .any(|part| matches!(&part.dense, SentDense::Named(all) if all.contains_key(name)))
    };
    let is_listed = |place: usize| {
        parts.iter().any(|part| matches!(&part.dense, SentDense::List(all) if place < all.len()))
    };
    let (mut ignored, mut absent) = (Vec::new(), Vec::new());
    for feature in &schema.features {
        // A cross needs no input of its own.
        let is_input = !feature.retired && !matches!(feature.key, KeyFunction::Cross { .. });
        match is_sent(&feature.name) {
            true if feature.retired => ignored.push(feature.name.as_str()),
            false if is_input => absent.push(feature.name.as_str()),
            _ => {}
        }
    }
    for (place, feature) in schema.dense_features.iter().enumerate() {
        match is_named(&feature.name) {
            true if feature.retired => ignored.push(feature.name.as_str()),
            false if !feature.retired && !is_listed(place) => absent.push(feature.name.as_str()),
            _ => {}
        }
    }
    Differences { ignored_inputs: ignored.join(","), absent_inputs: absent.join(",") }
}

/// What a line holds.
struct Parsed {
    samples: Vec<Sample>,
    sent: Sent,
}

impl Parsed {
    fn read(line: &str, schema: &Schema) -> Result<Self, SampleError> {
        let samples = Sample::request_from_json(line, schema)?;
        Ok(Self { samples, sent: Sent::read(line, schema) })
    }
}

/// A line whose samples are in the batch.
struct Scored {
    line: usize,
    samples: usize,
    has_candidates: bool,
    differences: Vec<Differences>,
}

struct Output<W: Write> {
    to: W,
    json: Json,
    /// The answers for the report of `--json`.
    answers: Vec<serde_json::Value>,
    schema: Arc<Schema>,
    repeat: u32,
    /// The lines of the samples in the batch.
    lines: Vec<Scored>,
    /// Samples so far.
    samples: usize,
    /// Lines that were not samples.
    refused: usize,
    /// Samples whose score is not a number.
    not_finite: usize,
    /// Samples whose request had no scores in time.
    overdue: usize,
    timeout: Option<Duration>,
    clock: Arc<dyn Clock>,
}

impl<W: Write> Output<W> {
    fn put(&mut self, answer: &Answer<'_>) -> Result<()> {
        if self.json.is_given() {
            // Through text, because a `Value` of an f32 has digits that the f32 has not.
            self.answers.push(serde_json::from_str(&serde_json::to_string(answer)?)?);
        }
        if self.json.is_standard_output() {
            return Ok(());
        }
        serde_json::to_writer(&mut self.to, answer).map_err(|e| output_error(e.into()))?;
        self.to.write_all(b"\n").map_err(output_error)
    }

    /// Checks that every line of `name` was answered with a score.
    fn check(&self, name: &str) -> Result<()> {
        let say = |n, one: &str, many: &str| match n {
            0 => None,
            1 => Some(format!("1 {one}")),
            n => Some(format!("{n} {many}")),
        };
        let refused = say(self.refused, "line was not a sample", "lines were not samples");
        let not_finite = say(
            self.not_finite,
            "sample has a score that is not a number",
            "samples have a score that is not a number",
        );
        let overdue =
            say(self.overdue, "sample has no score in time", "samples have no score in time");
        let problems: Vec<String> = refused.into_iter().chain(not_finite).chain(overdue).collect();
        ensure!(problems.is_empty(), "{name}: {}; their answers say why", problems.join(", "));
        Ok(())
    }

    /// Writes the scores of the samples in `lines`.
    fn put_scores(&mut self, lines: &[Scored], all: BatchScores<'_>) -> Result<()> {
        let (schema, mut start) = (Arc::clone(&self.schema), 0);
        for Scored { line, samples, has_candidates, differences } in lines {
            let (line, samples) = (*line, *samples);
            let answer = |sample: usize| match all.request(sample..sample + 1) {
                Ok(scores) => {
                    let outputs = &schema.network.outputs;
                    let score = NamedScores { outputs, values: scores.values };
                    let differences = differences.get(sample - start).cloned();
                    let (status, differences) =
                        (scores.statuses[0], differences.unwrap_or_default());
                    Answer::Score { score, status, differences }
                }
                Err(e) => Answer::Error { line, error: e.to_string() },
            };
            let answers: Vec<Answer<'_>> = (start..start + samples).map(answer).collect();
            start += samples;
            let is_error = |answer: &&Answer<'_>| matches!(answer, Answer::Error { .. });
            self.not_finite += answers.iter().filter(is_error).count();
            if *has_candidates {
                self.put(&Answer::Candidates { candidates: answers })?;
            } else {
                answers.iter().try_for_each(|answer| self.put(answer))?;
            }
        }
        Ok(())
    }

    /// Adds the samples of line `line` to `batch`; first scores it if they do not fit. A line that
    /// does not fit the model gets its answer.
    fn add(
        &mut self,
        worker: &mut Worker,
        batch: &mut Batch,
        line: usize,
        parsed: Result<Parsed, SampleError>,
    ) -> Result<()> {
        let model = Arc::clone(worker.model());
        let needed = parsed.as_ref().map_or(0, |parsed| parsed.samples.len());
        if parsed.is_err() || batch.size() + needed > model.budget().batch_max as usize {
            self.score(worker, batch)?;
        }
        let added = parsed.map_err(BatchError::from).and_then(|parsed| {
            batch.push_request(model.schema(), &parsed.samples)?;
            Ok(parsed)
        });
        match added {
            Ok(Parsed { samples, sent: Sent { has_candidates, differences } }) => {
                let samples = samples.len();
                self.samples += samples;
                self.lines.push(Scored { line, samples, has_candidates, differences });
                Ok(())
            }
            Err(e) => {
                self.score(worker, batch)?;
                self.refused += 1;
                self.put(&Answer::Error { line, error: e.to_string() })
            }
        }
    }

    /// Scores `batch`, writes the answers and clears it.
    fn score(&mut self, worker: &mut Worker, batch: &mut Batch) -> Result<()> {
        for _ in 1..self.repeat {
            worker.score_requests(batch, None)?;
        }

        let deadline = self.timeout.map(|timeout| self.clock.now() + timeout);
        let lines = std::mem::take(&mut self.lines);
        match worker.score_requests(batch, deadline) {
            Ok(all) => self.put_scores(&lines, all)?,
            Err(e @ ScoreError::DeadlineExceeded) => {
                let error = e.to_string();
                for Scored { line, samples, .. } in lines {
                    self.overdue += samples;
                    self.put(&Answer::Error { line, error: error.clone() })?;
                }
            }
            Err(e) => return Err(e.into()),
        }
        batch.clear();
        self.to.flush().map_err(output_error)
    }
}

/// Runs the command.
///
/// # Errors
/// The model is refused, a file cannot be read, a line was not a sample, or a score is not a number
/// (the answer of that line is an error).
pub fn run(args: &RunArgs) -> Result<()> {
    let model = args.serve.open()?;
    serve::check_batch(args.batch, &model)?;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::default());
    let mut worker = Worker::new(Arc::clone(&model), Arc::clone(&clock));
    let mut batch = model.batch();
    let to = BufWriter::new(io::stdout().lock());
    let (lines, repeat) = (Vec::with_capacity(args.batch), args.repeat);
    let timeout = args.timeout_us.map(Duration::from_micros);
    let mut output = Output {
        to,
        json: args.json.clone(),
        answers: Vec::new(),
        schema: Arc::clone(model.schema()),
        repeat,
        lines,
        samples: 0,
        refused: 0,
        not_finite: 0,
        overdue: 0,
        timeout,
        clock,
    };
    let (input, name) = open_samples(&args.samples)?;

    for (number, line) in (1..).zip(input.lines()) {
        let line = line.with_context(|| format!("{name}:{number}"))?;
        let parsed = Parsed::read(&line, model.schema());
        output.add(&mut worker, &mut batch, number, parsed)?;
        if batch.size() >= args.batch {
            output.score(&mut worker, &mut batch)?;
        }
    }
    output.score(&mut worker, &mut batch)?;

    let Output { samples, refused, not_finite, overdue, .. } = output;
    let answers = std::mem::take(&mut output.answers);
    let generation = model.generation().to_string();
    let report = RunReport { generation, samples, refused, not_finite, overdue, answers };
    // The lock of standard output is this thread's own, so the report is written under it.
    args.json.write(&report, || Ok(()))?;
    output.check(&name)
}

/// Opens the file of samples; returns the name by which messages call it.
fn open_samples(path: &Path) -> Result<(Box<dyn BufRead>, String)> {
    if path == Path::new("-") {
        return Ok((Box::new(io::stdin().lock()), "standard input".to_owned()));
    }
    let name = path.display().to_string();
    let file = File::open(path).with_context(|| name.clone())?;
    Ok((Box::new(BufReader::new(file)), name))
}
