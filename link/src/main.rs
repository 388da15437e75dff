//! `hatchback-sync`: the process with the link, as a small program of its own beside `hatchbackd
//! serve`. Only reads the command line.

#![forbid(unsafe_code)]

use anyhow::Result;
use clap::Parser;
use hatchback::target::Target;
use hatchback_link::daemon::{self, SyncArgs};
use std::path::PathBuf;

/// Fetches releases for `hatchbackd serve` to take up
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// What this machine is and may use, such as targets/cpu.toml
    #[arg(long)]
    target: PathBuf,
    /// The flash directory; it is only read
    #[arg(long)]
    flash: PathBuf,
    #[command(flatten)]
    sync: SyncArgs,
}

fn main() -> Result<()> {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).init();
    let cli = Cli::parse();
    let target = Target::load(&cli.target)?;
    daemon::run(&cli.sync, cli.flash, target.link)
}
