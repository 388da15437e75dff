//! `install`: makes a flash directory of bundles, or follows one with deltas. It is what a car does
//! with a release that it trusts, without signatures, probation or the network.

use crate::report::Json;
use crate::serve::open_chain;
use crate::{report, say};
use anyhow::Result;
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;

/// Installs bundles into a flash directory
#[derive(Args, Debug)]
pub struct InstallArgs {
    /// The bundles: a snapshot, and the deltas after it, or deltas of what is live
    #[arg(required = true)]
    bundles: Vec<PathBuf>,
    /// The flash directory; made if it is missing
    #[arg(long)]
    flash: PathBuf,
    #[command(flatten)]
    json: Json,
}

/// The report of the command.
#[derive(Serialize)]
struct InstallReport {
    flash: PathBuf,
    /// The live generation.
    generation: String,
    /// Bytes of the directory.
    bytes: u64,
}

/// Runs the command.
///
/// # Errors
/// A bundle or the directory is refused. The bundles before it stay installed, and the same command
/// continues behind them.
pub fn run(args: &InstallArgs) -> Result<()> {
    let Some(flash) = open_chain("BUNDLES", &args.bundles, &args.flash)? else { return Ok(()) };
    let (generation, bytes) = (flash.manifest().generation.to_string(), flash.bytes()?);
    let report = InstallReport { flash: args.flash.clone(), generation, bytes };
    args.json.write(&report, || {
        let (path, size) = (args.flash.display(), report::bytes(bytes));
        say!("{path}: {} is live, {size}", report.generation)
    })
}
