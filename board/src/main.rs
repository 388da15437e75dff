//! `hatchbackd`: the in-car daemon. Reads a target and a flash directory, takes all memory at start, then
//! checks the model against its probe set or serves scores on a Unix socket;
//! keeps the flash tier healthy meanwhile. Never touches the network.

#![forbid(unsafe_code)]

mod server;
mod upkeep;

use anyhow::{Result, bail, ensure};
use clap::{Parser, Subcommand};
use hatchback::disk;
use hatchback::flash::Flash;
use hatchback::model::Model;
use hatchback::score::{SystemClock, Worker};
use hatchback::target::{DeviceKind, Target};
use std::path::PathBuf;
use std::sync::Arc;
use upkeep::UpkeepThread;

/// Serves a recommendation model from flash
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// What this machine is and may use, such as targets/cpu.toml
    #[arg(long)]
    target: PathBuf,
    /// The flash directory
    #[arg(long)]
    flash: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Scores the probe set and compares with the scores that the trainer recorded
    Check {
        /// Largest difference allowed (quantized tables differ more than f32 ones)
        #[arg(long, default_value_t = 0.01)]
        tolerance: f32,
    },
    /// Serves samples on a Unix socket, one line of JSON each way
    Serve {
        /// The socket; created at start, removed at the end
        #[arg(long)]
        socket: PathBuf,
    },
}

fn main() -> Result<()> {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).init();
    let cli = Cli::parse();
    let target = Target::load(&cli.target)?;
    if target.device == DeviceKind::Cuda {
        bail!(
            "{}: device: this version computes on the CPU only; take targets/cpu.toml",
            cli.target.display()
        );
    }
    let model = Arc::new(Model::open(&disk::system(), &cli.flash, target.budget)?);
    log::info!("serving {} for {}", model.generation(), target.triple);
    log::info!("memory, all taken now:\n{}", model.memory());
    match cli.command {
        Command::Check { tolerance } => check(&cli.flash, &model, tolerance),
        Command::Serve { socket } => {
            let upkeep = UpkeepThread::start(&cli.flash, target.upkeep)?;
            let served = server::serve(&model, &socket);
            upkeep.stop();
            served
        }
    }
}

/// Scores the probe set, one sample a request, as it would arrive.
fn check(flash: &std::path::Path, model: &Arc<Model>, tolerance: f32) -> Result<()> {
    let probe = Flash::open(&disk::system(), flash)?.probe()?;
    let mut worker = Worker::new(Arc::clone(model), Arc::new(SystemClock::default()));
    let (mut batch, mut difference, mut compared) = (model.batch(), 0f32, 0);
    for sample in &probe {
        batch.clear();
        batch.push(model.schema(), sample)?;
        let scores = worker.score(&batch, None)?;
        let damaged = scores.status().damaged;
        ensure!(damaged == 0, "{damaged} rows of a probe sample are damaged on flash");
        if let Some(expected) = sample.score {
            difference = difference.max((scores.values[0] - expected).abs());
            compared += 1;
        }
    }
    ensure!(compared > 0, "the bundle has no probe set with scores");
    ensure!(difference <= tolerance, "a probe score differs by {difference}, over {tolerance}");
    log::info!("{compared} probe scores equal the trainer's within {difference:.1e}");
    Ok(())
}
