//! `hatchback`: the program for the datacenter and the desk. Reads the command line and turns the
//! result into an exit status; the library does the work.

#![forbid(unsafe_code)]

use clap::Parser;
use hatchback_tools::cli::{self, Cli};
use hatchback_tools::machine_fault;
use hatchback_tools::report::output::CLOSED_PIPE_STATUS;
use hatchback_tools::report::{self, OutputClosed};
use std::process::ExitCode;

fn main() -> ExitCode {
    #[cfg(feature = "generate")]
    match hatchback_link::generate::generate_if_asked::<Cli>("1") {
        Ok(false) => {}
        Ok(true) => return ExitCode::SUCCESS,
        Err(error) => {
            report::note(format_args!("error: --generate: {error}"));
            return ExitCode::FAILURE;
        }
    }

    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    match cli::run(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is::<OutputClosed>() => ExitCode::from(CLOSED_PIPE_STATUS),
        Err(error) => {
            report::note(format_args!("error: {}", report::explain(&error)));
            match machine_fault::is_machine_fault(&error) {
                true => ExitCode::from(machine_fault::STATUS),
                false => ExitCode::FAILURE,
            }
        }
    }
}
