//! `page`: writes docs/measured.md, the one page of measured figures, from stored reports of the
//! benches. The page has the bars of each report and no other text. Never measures.

use anyhow::{Context, Result, ensure};
use clap::Args;
use hatchback_tools::report::digits;
use serde::Deserialize;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Where the reports are, and where the page goes
#[derive(Args, Debug)]
pub struct PageArgs {
    /// Folder of the reports that `--json` wrote
    #[arg(default_value = "docs/measured")]
    reports: PathBuf,
    /// The page
    #[arg(long, default_value = "docs/measured.md")]
    out: PathBuf,
}

const HEAD: &str = "# Measured figures\n\n\
    `cargo run --release -p hatchback-bench -- page` writes this page from the reports in\n\
    [docs/measured](measured), one JSON document a bench. [benchmarks.md](benchmarks.md) says\n\
    what a bench measures. Compare ratios of one run only. Older figures are in the history of\n\
    git.\n";

/// A report, as far as the page shows it.
#[derive(Deserialize)]
struct StoredReport {
    bench: String,
    machine: StoredMachine,
    model: String,
    bars: Vec<StoredBar>,
}

#[derive(Deserialize)]
struct StoredMachine {
    cpu: String,
    cores: usize,
    platform: String,
}

#[derive(Deserialize)]
struct StoredBar {
    name: String,
    bar: f64,
    value: Option<f64>,
    holds: Option<bool>,
    #[serde(rename = "not run")]
    not_run: Option<String>,
}

/// Writes the page.
///
/// # Errors
/// A report cannot be read, or the page cannot be written.
pub fn run(args: &PageArgs) -> Result<()> {
    let page = page(&args.reports)?;
    std::fs::write(&args.out, page).with_context(|| args.out.display().to_string())
}

/// Returns the page of the reports in `folder`, in the order of their file names.
///
/// # Errors
/// A report cannot be read.
pub fn page(folder: &Path) -> Result<String> {
    let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let mut files: Vec<PathBuf> = entries.map(|e| Ok(e?.path())).collect::<Result<_>>()?;
    files.retain(|file| file.extension().is_some_and(|ending| ending == "json"));
    files.sort();
    ensure!(!files.is_empty(), "{}: no report", folder.display());

    let mut page = HEAD.to_owned();
    for file in files {
        let place = || file.display().to_string();
        let text = std::fs::read_to_string(&file).with_context(place)?;
        let report: StoredReport = serde_json::from_str(&text).with_context(place)?;
        write_report(&mut page, &report)?;
    }
    Ok(page)
}

fn write_report(page: &mut String, report: &StoredReport) -> Result<()> {
    let StoredMachine { cpu, cores, platform } = &report.machine;
    let (bench, model) = (&report.bench, &report.model);
    writeln!(page, "\n## `{bench}`\n\n{model}.\n\n{cpu}, {cores} cores, {platform}.\n")?;
    writeln!(page, "| bar | measured | demanded | |\n|---|---|---|---|")?;
    for StoredBar { name, bar, value, holds, not_run } in &report.bars {
        let reason = not_run.as_deref().unwrap_or("not measured");
        let (measured, result) = match (value, holds) {
            (Some(value), Some(true)) => (digits(*value), "holds"),
            (Some(value), Some(false)) => (digits(*value), "MISSED"),
            (None, _) | (_, None) => ("not run".to_owned(), reason),
        };
        writeln!(page, "| {name} | {measured} | {} | {result} |", digits(*bar))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_shown_with_its_result_or_the_reason_for_none() {
        let folder = tempfile::tempdir().unwrap();
        let report = r#"{"bench": "flash", "model": "rows", "points": [1],
            "machine": {"cpu": "a CPU", "cores": 2, "platform": "x86_64-linux", "version": "0"},
            "bars": [{"name": "speed", "bar": 1.0, "value": 1.25, "holds": true},
                     {"name": "space", "bar": 2.0, "value": 3.0, "holds": false},
                     {"name": "ratio", "bar": 1.0, "value": null, "holds": false},
                     {"name": "peer", "bar": 1.0, "not run": "a peer did not run"}]}"#;
        std::fs::write(folder.path().join("flash.json"), report).unwrap();
        std::fs::write(folder.path().join("notes.txt"), "no report").unwrap();
        let page = page(folder.path()).unwrap();
        for row in [
            "| speed | 1.25 | 1.00 | holds |",
            "| 2.00 | MISSED |",
            "| peer | not run | 1.00 | a peer",
            "| ratio | not run | 1.00 | not measured |",
        ] {
            assert!(page.contains(row), "{row}\n{page}");
        }
        std::fs::write(folder.path().join("other.json"), "{}").unwrap();
        let refused = format!("{:#}", super::page(folder.path()).unwrap_err());
        assert!(refused.contains("other.json") && refused.contains("bench"), "{refused}");
    }
}
