//! The command line of the benches: a short run of one, its report, and the pages about them.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use clap::CommandFactory;
use hatchback_bench::Cli;
use serde_json::Value;
use std::path::Path;
use std::process::Command;

#[test]
fn a_bench_writes_its_report_and_its_chart() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("bench.svg");
    let run = Command::new(env!("CARGO_BIN_EXE_hatchback-bench"))
        .args(["request", "--rows-max", "20000", "--seconds", "0.1", "--batch", "1,8"])
        .args(["--keys", "uniform,powerlaw", "--cache-mib", "1", "--json", "-", "--plot"])
        .arg(&plot)
        .output()
        .unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let report: Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!(report["points"].as_array().unwrap().len(), 4);
    assert!(report["bars"].is_array() && plot.exists());
}

#[test]
fn the_page_of_figures_is_that_of_the_stored_reports() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let page = hatchback_bench::page::page(&docs.join("measured")).unwrap();
    let stored = std::fs::read_to_string(docs.join("measured.md")).unwrap();
    assert!(page == stored, "docs/measured.md is not what `hatchback-bench page` writes");
}

#[test]
fn the_page_explains_every_bench() {
    Cli::command().debug_assert();
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/benchmarks.md");
    let page = std::fs::read_to_string(page).unwrap();
    for bench in Cli::command().get_subcommands() {
        // Two benches have pages of their own.
        let name = bench.get_name();
        let entries = [format!("\n## `{name}`\n"), format!("[`{name}`](")];
        let is_there = entries.iter().any(|entry| page.contains(entry));
        assert!(is_there, "docs/benchmarks.md does not explain `{name}`");
    }
}
