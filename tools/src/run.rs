//! `run`: samples in (JSON lines), scores with their status out (JSON lines), in order.

use crate::serve::{self, ServeArgs};
use anyhow::{Context, Result, ensure};
use clap::Args;
use hatchback::LookupStatus;
use hatchback::request::worker::Worker;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use serde::Serialize;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Scores samples from a file or standard input
#[derive(Args, Debug)]
pub struct RunArgs {
    #[command(flatten)]
    serve: ServeArgs,
    /// Samples, one line of JSON each; `-` is standard input
    #[arg(long, default_value = "-")]
    samples: PathBuf,
    /// Samples scored together
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Scores each request this often and prints its last answer (for who counts instructions)
    #[arg(long, default_value_t = 1)]
    repeat: u32,
}

/// A line of output: a score, or what is wrong with the line of input.
#[derive(Serialize)]
#[serde(untagged)]
enum Answer<'a> {
    Score { score: &'a [f32], status: LookupStatus },
    Error { line: usize, error: String },
}

struct Output<W: Write> {
    to: W,
    repeat: u32,
    refused: usize,
}

impl<W: Write> Output<W> {
    fn put(&mut self, answer: &Answer<'_>) -> Result<()> {
        serde_json::to_writer(&mut self.to, answer)?;
        Ok(self.to.write_all(b"\n")?)
    }

    /// Scores what was collected and forgets it.
    fn score(&mut self, worker: &mut Worker, batch: &mut Batch) -> Result<()> {
        let outputs = worker.model().outputs();
        for _ in 1..self.repeat {
            worker.score(batch, None)?;
        }
        let scores = worker.score(batch, None)?;
        for (score, status) in scores.values.chunks_exact(outputs).zip(scores.statuses) {
            self.put(&Answer::Score { score, status: *status })?;
        }
        batch.clear();
        Ok(self.to.flush()?)
    }
}

/// Runs the command.
///
/// # Errors
/// The model is refused, a file cannot be read, or some lines were not samples (each is answered
/// with an error in its place).
pub fn run(args: &RunArgs) -> Result<()> {
    let model = args.serve.open()?;
    let (mut worker, mut batch) = (serve::worker(&model), model.batch());
    let at_once = args.batch.clamp(1, model.budget().batch_max as usize);
    let to = BufWriter::new(io::stdout().lock());
    let mut output = Output { to, repeat: args.repeat, refused: 0 };
    let input: Box<dyn BufRead> = if args.samples == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(BufReader::new(
            File::open(&args.samples).with_context(|| args.samples.display().to_string())?,
        ))
    };
    for (number, line) in input.lines().enumerate() {
        let line =
            line.with_context(|| format!("{}: line {}", args.samples.display(), number + 1))?;
        match Sample::from_json(&line, model.schema()) {
            Ok(sample) => batch.push(model.schema(), &sample)?,
            Err(e) => {
                output.score(&mut worker, &mut batch)?;
                output.refused += 1;
                output.put(&Answer::Error { line: number + 1, error: e.to_string() })?;
            }
        }
        if batch.size() == at_once {
            output.score(&mut worker, &mut batch)?;
        }
    }
    output.score(&mut worker, &mut batch)?;
    ensure!(output.refused == 0, "{} lines were not samples", output.refused);
    Ok(())
}
