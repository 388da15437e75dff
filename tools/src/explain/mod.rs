//! `explain`: says why a sample has its score. `row` does so for one row. Both read a flash
//! directory without a lock, also one that a daemon serves. `row` also reads a repository.

mod difference;
mod explanation;
mod listed;
pub mod row;

use crate::explain::difference::Difference;
use crate::report::Json;
use crate::serve;
use anyhow::{Context, Result, ensure};
use clap::Args;
use hatchback::flash::read_settled;
use hatchback::request::explain::{Explanation, explain};
use hatchback::{Flash, Schema};
use serde::Serialize;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};

/// Explains the score of a sample: its rows, their releases, and what each feature contributes
#[derive(Args, Debug)]
pub struct ExplainArgs {
    /// A bundle (installed into a flash directory first) or a flash directory
    model: PathBuf,
    /// The sample: a line of JSON, or a file whose first line it is; `-` is standard input
    sample: String,
    /// A bundle or flash directory with another generation: shows what differs there
    #[arg(long, value_name = "MODEL")]
    against: Option<PathBuf>,
    #[command(flatten)]
    json: Json,
}

/// The report of the command.
#[derive(Serialize)]
struct ExplainReport {
    #[serde(flatten)]
    explanation: Explanation,
    /// What another generation does with the sample.
    #[serde(skip_serializing_if = "Option::is_none")]
    against: Option<Difference>,
}

/// Runs the command.
///
/// # Errors
/// A model or the sample is refused.
pub fn run(args: &ExplainArgs) -> Result<()> {
    let line = read_line(&args.sample)?;
    let explain_one = |flash: &Flash| {
        let explanation = explain(flash, &line)?;
        Ok((explanation, flash.manifest().schema.clone()))
    };
    let (explanation, schema) = read_settled(|| open(&args.model), explain_one, |_| true)
        .with_context(|| args.model.display().to_string())?;
    let compare = |other: &PathBuf| -> Result<Difference> {
        let explain_other = |flash: &Flash| {
            let line = difference::line_for(&line, &schema, &flash.manifest().schema)?;
            Ok(explain(flash, &line)?)
        };
        let there = read_settled(|| open(other), explain_other, |_| true)
            .with_context(|| format!("--against {}", other.display()))?;
        Ok(Difference::between(&explanation, there))
    };
    let against = args.against.as_ref().map(compare).transpose()?;
    let report = ExplainReport { explanation, against };
    args.json.write(&report, || {
        explanation::print(&report.explanation)?;
        report.against.iter().try_for_each(|difference| difference.print(&report.explanation))
    })
}

/// Opens the flash directory of `model`: the directory, or that of a bundle.
fn open(model: &Path) -> Result<Flash> {
    serve::open_flash(model, &model.with_extension("flash"))
}

/// Returns the sample that the command line names.
fn read_line(sample: &str) -> Result<String> {
    if sample.trim_start().starts_with('{') {
        return Ok(sample.to_owned());
    }
    let mut line = String::new();
    let read = match sample {
        "-" => io::stdin().lock().read_line(&mut line),
        path => File::open(path).and_then(|file| BufReader::new(file).read_line(&mut line)),
    };
    ensure!(read.with_context(|| sample.to_owned())? > 0, "{sample}: holds no sample");
    Ok(line)
}

/// Returns the number of the table with this name.
///
/// # Errors
/// The model has no such table.
fn table_number(schema: &Schema, name: &str) -> Result<usize> {
    let number = schema.tables.iter().position(|table| table.name == name);
    let names = || schema.tables.iter().map(|t| t.name.as_str()).collect::<Vec<_>>().join(", ");
    ensure!(number.is_some(), "TABLE {name}: the model has the tables {}", names());
    Ok(number.unwrap_or_default())
}
