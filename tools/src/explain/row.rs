//! `row`: shows a row as a request finds it, the error of its codec, and its versions in the
//! releases that the flash directory still holds, or that a repository lists.

use crate::explain::difference::distance;
use crate::explain::listed::ListedRow;
use crate::explain::{open, table_number};
use crate::report::Json;
use crate::{report, say};
use anyhow::{Context, Result};
use clap::Args;
use hatchback::Flash;
use hatchback::flash::read_settled;
use hatchback::flash::row_version::{RowVersion, TableReader};
use serde::Serialize;
use std::num::ParseIntError;
use std::path::PathBuf;

/// Shows a row: its values, the error of its codec, and its versions by release
#[derive(Args, Debug)]
pub struct RowArgs {
    /// A bundle (installed into a flash directory first) or a flash directory; with --from the
    /// name of a model
    model: PathBuf,
    /// The name of the table
    table: String,
    /// The key, as `explain` prints it; a negative one is the u64 of the same bits
    #[arg(allow_negative_numbers = true, value_parser = key)]
    key: u64,
    /// A repository, as for `publish --to`: shows the row in each release that it lists. Only the
    /// chunks that the row needs are read
    #[arg(long, value_name = "REPOSITORY")]
    from: Option<String>,
    #[command(flatten)]
    json: Json,
}

fn key(text: &str) -> Result<u64, ParseIntError> {
    if text.starts_with('-') { text.parse().map(i64::cast_unsigned) } else { text.parse() }
}

/// The report of the command.
#[derive(Serialize)]
struct RowReport {
    table: String,
    key: u64,
    generation: String,
    codec: &'static str,
    /// What a request gets.
    #[serde(flatten)]
    row: RowVersion,
    /// All versions that the live generation's files hold, from the oldest.
    history: Vec<RowVersion>,
}

/// Runs the command.
///
/// # Errors
/// A model is refused, or it has no such table.
pub fn run(args: &RowArgs) -> Result<()> {
    if let Some(from) = &args.from {
        let model = args.model.to_string_lossy();
        let report = ListedRow::read(from, &model, &args.table, args.key);
        let report = report.with_context(|| from.clone())?;
        return args.json.write(&report, || report.print());
    }
    let read = |flash: &Flash| RowReport::read(flash, &args.table, args.key);
    let report = read_settled(|| open(&args.model), read, |_| true)
        .with_context(|| args.model.display().to_string())?;
    args.json.write(&report, || report.print())
}

impl RowReport {
    fn read(flash: &Flash, table: &str, key: u64) -> Result<Self> {
        let schema = &flash.manifest().schema;
        let number = table_number(schema, table)?;
        let rows = flash.table(number)?;
        let reader = TableReader::new(flash, number, &rows);
        Ok(Self {
            table: table.to_owned(),
            key,
            generation: flash.manifest().generation.to_string(),
            codec: schema.tables[number].codec.name(),
            row: reader.newest(key)?,
            history: reader.history(key)?,
        })
    }

    fn print(&self) -> Result<()> {
        let Self { generation, table, key, row, codec, .. } = self;
        let (table, origin) = (report::printable(table), row.origin());
        say!("{generation}: {table} {key}: {origin}, {codec}, norm {:.6}", row.norm)?;
        row.damage.iter().try_for_each(|damage| say!("{damage}"))?;
        match row.codec_error_max {
            Some(error) => say!("each value is within {error:.1e} of the trainer's")?,
            None => say!("a request gets the default row, and counts the key in its status")?,
        }
        say!("{:?}", row.values)?;
        if self.history.is_empty() {
            return Ok(());
        }
        let mut versions = report::table(&["version", "norm", "distance from the one before"]);
        let mut before: Option<&RowVersion> = None;
        for version in &self.history {
            let distance = before.and_then(|before| distance(&version.values, &before.values));
            let distance = report::or_dash(distance, |d| format!("{d:.6}"));
            versions.add_row([version.origin(), format!("{:.6}", version.norm), distance]);
            before = Some(version);
        }
        say!("{versions}")
    }
}
