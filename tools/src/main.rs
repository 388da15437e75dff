//! `hatchback`: the program for the datacenter and the desk. Reads the command line; the library
//! does the work.

#![forbid(unsafe_code)]

use clap::Parser;
use hatchback::io::disk::raise_open_files;
use hatchback_link::program;
use hatchback_tools::cli::{self, Cli};
use hatchback_tools::report::temporary;
use std::process::ExitCode;

fn main() -> ExitCode {
    program::end(run())
}

fn run() -> anyhow::Result<()> {
    #[cfg(feature = "generate")]
    if hatchback_link::generate::generate_if_asked::<Cli>("1")? {
        return Ok(());
    }

    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let cli = Cli::parse();
    if let Err(e) = raise_open_files() {
        log::warn!("the limit of open files stays: {e}");
    }
    temporary::remove_at_signals()?;
    cli::run(cli)
}
