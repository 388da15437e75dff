//! `hatchback-sync`: the sync process as a program of its own. This file only reads the command
//! line.

#![forbid(unsafe_code)]

use clap::Parser;
use hatchback::targets::Target;
use hatchback_link::daemon::{self, SyncArgs};
use hatchback_link::program;
use std::path::PathBuf;
use std::process::ExitCode;

/// Fetches releases for `hatchbackd serve` to install
///
/// Follows a repository of signed releases. Fetches each new release chunk by chunk, verifies every
/// chunk, and hands the release to `hatchbackd serve`. Writes nothing but the sync directory, and
/// needs no GPU. May be killed at any moment: the next run continues at the chunk.
#[derive(Parser)]
#[command(
    name = "hatchback-sync",
    version,
    after_long_help = "Files: the target file, whose section [link] has the rules of fetching.\n\
                       See also: hatchbackd(8), hatchback(1)."
)]
struct Cli {
    /// The target file of this machine, such as targets/cpu.toml
    #[arg(long)]
    target: PathBuf,
    /// The flash directory; this program only reads it
    #[arg(long)]
    flash: PathBuf,
    #[command(flatten)]
    sync: SyncArgs,
}

fn main() -> ExitCode {
    program::end(run())
}

fn run() -> anyhow::Result<()> {
    #[cfg(feature = "generate")]
    if hatchback_link::generate::generate_if_asked::<Cli>("8")? {
        return Ok(());
    }

    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).init();
    let cli = Cli::parse();
    let target = Target::load(&cli.target)?;
    daemon::run(&cli.sync, cli.flash, target.link)
}
