//! `hatchbackd`: the in-car daemon. Reads a target and flash directories, then reports what the
//! machine is, checks the models against their probe sets, or serves scores to callers. While
//! it serves it maintains the flash tier and installs staged releases. The process that serves
//! never opens a network connection; `hatchbackd sync` is another process and never opens a model.

#![forbid(unsafe_code)]

mod car;
mod check;
mod cli;
mod front;
mod latency;
mod limits;
mod machine;
mod maintenance;
mod models;
mod serve;
mod settings;
mod shed;
mod socket;
mod systemd;
mod update;

use anyhow::{Result, bail};
use car::Car;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use cli::{Cli, Command};
use hatchback::targets::Target;
use hatchback_link::{daemon, program};
use machine::{Report, Root};
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

fn main() -> ExitCode {
    program::end(run())
}

fn run() -> Result<()> {
    #[cfg(feature = "generate")]
    if hatchback_link::generate::generate_if_asked::<Cli>("8")? {
        return Ok(());
    }

    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).init();
    let cli = Cli::parse();
    let (target, root) = (Target::load(&cli.target)?, Root::new(&cli.system));
    let device = cli.device.unwrap_or(target.device);

    let are_found = cli.flash.is_empty();
    let models = if are_found { models::models_in(&target.machine.models) } else { cli.flash };
    let target_path = &cli.target;
    let mut car = Car { root: &root, target: &target, target_path, device, models, are_found };

    match cli.command {
        None if cli.report => report(&car, cli.json),
        Some(_) if cli.report => {
            let both = "--report reports and ends: leave out the command";
            Cli::command().error(ErrorKind::ArgumentConflict, both).exit()
        }
        None => {
            let missing = "pass --report or a command; --help lists the commands";
            Cli::command().error(ErrorKind::MissingSubcommand, missing).exit()
        }
        Some(Command::Check { tolerance, json }) => {
            car.require_models()?;
            let serving = models::new_serving(&target, &cli.target, device, &[])?;
            let tolerance = tolerance.unwrap_or(target.update.probe_difference_max);
            let (checked, result) = check::run(&serving, &target, &car.models, tolerance)?;
            if json {
                print(&(serde_json::to_string_pretty(&checked)? + "\n"))?;
            }
            result
        }
        Some(Command::Serve(args)) => {
            let sync = car.sync_directories(&args);
            car.require_models()?;
            serve::run(&car, &args, &sync)
        }
        Some(Command::Sync(args)) => {
            car.require_models()?;
            let [model] = car.models.as_slice() else {
                let n = car.models.len();
                bail!("`sync` fetches for one model, and there are {n}: pass one --flash");
            };
            daemon::run(&args, model.directory.clone(), target.link)
        }
    }
}

/// Prints what the machine is. Reads only: no setting of this process or of the machine changes.
fn report(car: &Car<'_>, json: bool) -> Result<()> {
    let directories: Vec<PathBuf> = car.models.iter().map(|m| m.directory.clone()).collect();
    let settings = settings::preview(car.root, car.target);
    let report = Report::new(car.root, car.target, car.device, &directories, settings);
    let text =
        if json { serde_json::to_string_pretty(&report)? + "\n" } else { report.to_string() };

    print(&text)
}

fn print(text: &str) -> Result<()> {
    io::stdout().lock().write_all(text.as_bytes()).map_err(program::output_error)
}
