//! `hatchbackd`: the in-car daemon. Reads a target and flash directories, reports what the machine
//! is, or takes all memory at start, then checks the models against their probe sets or serves
//! scores on a Unix socket; keeps the flash tier healthy and takes staged releases up meanwhile.
//! What serves never touches the network; what fetches (`sync`) is a process of its own that never
//! opens a model.

#![forbid(unsafe_code)]

mod latency;
mod machine;
mod server;
mod settings;
mod shed;
mod supervisor;
mod update;
mod upkeep;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::request::serving::Serving;
use hatchback::request::worker::SystemClock;
use hatchback::schema::batch::Batch;
use hatchback::target::{DeviceKind, Target};
use hatchback_link::daemon::{self, SyncArgs};
use latency::Latencies;
use machine::{Report, Root};
use server::{Server, Socket, Stop};
use shed::Shed;
use std::collections::BTreeSet;
use std::io::{self, ErrorKind::NotFound};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use update::{Update, UpdateThread};
use upkeep::UpkeepThread;

/// Serves recommendation models from flash
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// What this machine is and may use, such as targets/cpu.toml
    #[arg(long)]
    target: PathBuf,
    /// A flash directory; several models are given as several NAME=DIR [default name: the model's
    /// own; default: every folder where the target keeps models]
    #[arg(long, value_name = "[NAME=]DIR")]
    flash: Vec<String>,
    /// Tells what this machine is, what it lacks of the target and what could not be read, and ends
    #[arg(long)]
    report: bool,
    /// The report for programs
    #[arg(long, requires = "report")]
    json: bool,
    /// Where /proc, /sys and /dev are, such as in a copy of a board's
    #[arg(long, default_value = "/")]
    system: PathBuf,
    /// Where embeddings are looked up, `cpu` or `cuda` [default: the target's]
    #[arg(long)]
    device: Option<DeviceKind>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Scores the probe sets and compares with the scores that the trainer recorded
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
        /// The sync directory from which a model takes its releases [default name: the only
        /// model's; default without --flash: every folder where the target keeps them]
        #[arg(long, value_name = "[NAME=]DIR")]
        sync: Vec<String>,
        /// The fleet's first root, in a place that `sync` cannot write; read where there is a sync
        /// directory
        #[arg(long)]
        root: Option<PathBuf>,
    },
    /// Fetches releases for `serve` to take up
    Sync(SyncArgs),
}

fn main() -> Result<()> {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).init();
    let cli = Cli::parse();
    let (target, root) = (Target::load(&cli.target)?, Root::new(&cli.system));
    let device = cli.device.unwrap_or(target.device);
    let named_none = cli.flash.is_empty();
    let mut flash = if named_none { models(&target.machine.models) } else { cli.flash };
    let Some(mut command) = cli.command.filter(|_| !cli.report) else {
        ensure!(cli.report, "neither --report nor a command: try --help");
        return report(&root, &target, device, &flash, cli.json);
    };
    if let Command::Serve { sync, .. } = &mut command
        && named_none
        && sync.is_empty()
    {
        *sync = folders(&target.machine.updates);
        await_models(&mut flash, sync, &target.machine.models);
    }
    ensure!(!flash.is_empty(), "{}: no model is there", target.machine.models.display());
    let updates = match &command {
        Command::Sync(args) => {
            ensure!(flash.len() == 1, "one `sync` serves one flash directory");
            return daemon::run(args, named(&flash[0]).1.to_owned(), target.link);
        }
        Command::Serve { sync, root, .. } => updates(&flash, sync, root.as_deref(), &target)?,
        Command::Check { .. } => Vec::new(),
    };
    let syncs: Vec<_> = updates.iter().map(|update| update.sync.clone()).collect();
    let stop = Arc::new(Stop::default());
    if let Command::Serve { .. } = command {
        for refused in settings::apply(&target).iter().filter_map(settings::refused) {
            log::warn!("{refused}");
        }
        let syncs = syncs.clone();
        stop.on_signal(move || syncs.iter().for_each(update::ended))?;
    }
    let lookups = device.open(target.tegra_profile);
    let lookups = lookups
        .with_context(|| format!("{}: device (`--device cpu` needs none)", cli.target.display()))?;
    log::info!("lookups on: {}", lookups.name());
    let budget = target.budget;
    let clock = Arc::new(SystemClock::default());
    let serving = Serving::new(budget.memory_bytes_max, budget.reads_max, clock);
    let serving = Arc::new(serving.on(lookups, target.tensorrt_options.clone()));
    let load = |given: &String| -> Result<()> {
        let (name, flash) = open(given)?;
        serving.load(&name, &flash, budget)?;
        log::info!("serving {} as `{name}` for {}", flash.manifest().generation, target.triple);
        Ok(())
    };
    match command {
        Command::Check { tolerance } => {
            flash.iter().try_for_each(load)?;
            report_memory(&serving, budget.memory_bytes_max);
            flash.iter().try_for_each(|given| {
                let (name, flash) = open(given)?;
                check(&serving, &name, &flash, tolerance).with_context(|| format!("model `{name}`"))
            })
        }
        Command::Serve { socket, .. } => {
            updates.iter().for_each(Update::begin);
            let served = load_each(&flash, &updates, load).and_then(|()| {
                report_memory(&serving, budget.memory_bytes_max);
                serve(&serving, &target, &flash, updates, &root, &socket, &stop)
            });
            // Nothing that comes here is a release's fault: with one that cannot be opened others
            // are served.
            served.inspect_err(|_| syncs.iter().for_each(update::ended))
        }
        Command::Sync(_) => Ok(()),
    }
}

/// Loads the models that can be: one that waits for its first release, or is damaged, keeps no
/// other from being served.
///
/// # Errors
/// None can be, nor may a release change that.
fn load_each(
    flash: &[String],
    updates: &[Update],
    load: impl Fn(&String) -> Result<()>,
) -> Result<()> {
    let awaited = |given: &&String| updates.iter().any(|update| update.awaited_at(named(given).1));
    let (mut loaded, mut fault) = (0, None);
    for given in flash.iter().filter(|given| !awaited(given)) {
        match load(given) {
            Ok(()) => loaded += 1,
            Err(e) => {
                log::error!("{given} is not served: {e:#}");
                fault = Some(e);
            }
        }
    }
    fault.filter(|_| loaded == 0 && updates.is_empty()).map_or(Ok(()), Err)
}

/// Serves on `socket`, with upkeep of the directories and updates beside it.
fn serve(
    serving: &Arc<Serving>,
    target: &Target,
    flash: &[String],
    updates: Vec<Update>,
    root: &Root,
    socket: &Path,
    stop: &Stop,
) -> Result<()> {
    let socket = Socket::listen(socket, stop)?;
    let (shed, latencies) = (Arc::new(Shed::default()), Arc::new(Latencies::default()));
    // Two models may be two names of one directory.
    let directories: BTreeSet<&Path> = flash.iter().map(|given| named(given).1).collect();
    let start = |directory| UpkeepThread::start(directory, target.upkeep, Arc::clone(&shed));
    let upkeep = directories.into_iter().map(start).collect::<Result<Vec<_>>>()?;
    let start = |update| UpdateThread::start(update, serving, &latencies);
    let updates = updates.into_iter().map(start).collect::<Result<Vec<_>>>()?;
    let server = Server { serving, latencies: &latencies, shed: &shed, is_only: flash.len() == 1 };
    let serve = || server::serve(server, &socket, stop);
    shed.watch(root, &target.shed, || supervisor::watched(serving, serve));
    updates.into_iter().for_each(UpdateThread::stop);
    upkeep.into_iter().for_each(UpkeepThread::stop);
    Ok(())
}

/// Prints what the machine tells.
fn report(
    root: &Root,
    target: &Target,
    device: DeviceKind,
    flash: &[String],
    json: bool,
) -> Result<()> {
    let directories: Vec<PathBuf> = flash.iter().map(|given| named(given).1.to_owned()).collect();
    let report = Report::new(root, target, device, &directories);
    if json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{report}");
    }
    Ok(())
}

/// What lies in `folder`, in order, each as NAME=DIR.
fn folders(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).inspect_err(|e| {
        if e.kind() != NotFound {
            log::error!("{}: {e}", folder.display());
        }
    });
    let entries = entries.into_iter().flatten().flatten().map(|entry| entry.path());
    // Every ext4 file system has a `lost+found`.
    let mut folders: Vec<_> =
        entries.filter(|path| path.is_dir() && !path.ends_with("lost+found")).collect();
    folders.sort();
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    folders.iter().map(|path| format!("{}={}", name(path), path.display())).collect()
}

/// The models in `folder`: where there is a live record, whatever its state.
fn models(folder: &Path) -> Vec<String> {
    let missing = |e: io::Error| e.kind() == NotFound;
    let live = |given: &String| !named(given).1.join("live").metadata().is_err_and(missing);
    folders(folder).into_iter().filter(live).collect()
}

/// Adds the models in `folder` that wait for their first release.
fn await_models(flash: &mut Vec<String>, sync: &[String], folder: &Path) {
    for name in sync.iter().filter_map(|given| named(given).0) {
        if !flash.iter().any(|given| named(given).0 == Some(name)) {
            flash.push(format!("{name}={}", folder.join(name).display()));
        }
    }
}

/// The parts of `DIR` or `NAME=DIR`.
fn named(given: &str) -> (Option<&str>, &Path) {
    match given.split_once('=') {
        Some((name, directory)) if !name.contains('/') => (Some(name), Path::new(directory)),
        _ => (None, Path::new(given)),
    }
}

/// The updates of the models that have a sync directory.
fn updates(
    flash: &[String],
    sync: &[String],
    root: Option<&Path>,
    target: &Target,
) -> Result<Vec<Update>> {
    let root = root.filter(|_| !sync.is_empty());
    let root = root
        .map(|path| std::fs::read(path).with_context(|| path.display().to_string()))
        .transpose()?;
    let update = |given: &String| {
        let (name, directory) = named(given);
        let of = flash.iter().map(|f| named(f)).find(|(n, _)| flash.len() == 1 || *n == name);
        let (served, place) =
            of.with_context(|| format!("--sync {given}: no such model is served"))?;
        let (disk, directory) = (disk::system(), directory.to_owned());
        let sync = hatchback::update::Updater {
            disk,
            directory,
            flash: place.to_owned(),
            lineage: None,
            cohort: 0,
        };
        let name = served.or(name).unwrap_or_default().to_owned();
        Ok(Update { name, sync, budget: target.budget, policy: target.update, root: root.clone() })
    };
    sync.iter().map(update).collect()
}

/// Opens a flash directory; without a name the model has its own.
fn open(given: &str) -> Result<(String, Flash)> {
    let (name, directory) = named(given);
    let flash = Flash::open(&disk::system(), directory)?;
    Ok((name.unwrap_or(&flash.manifest().generation.lineage).to_owned(), flash))
}

fn report_memory(serving: &Serving, max: u64) {
    let plans = serving.memory();
    for (name, plan) in &plans {
        log::info!("memory of `{name}`, all taken now:\n{plan}");
    }
    let total: u64 = plans.iter().map(|(_, plan)| plan.total()).sum();
    log::info!("memory of all models: {total} of {max} bytes");
}

/// Scores the probe set, one sample a request, as it would arrive.
fn check(serving: &Serving, name: &str, flash: &Flash, tolerance: f32) -> Result<()> {
    let schema = &flash.manifest().schema;
    let (mut batch, mut difference, mut compared) = (Batch::new(schema, 1), 0f32, 0);
    for sample in &flash.probe()? {
        batch.clear();
        batch.push(schema, sample)?;
        let ticket = serving.submit(name, &batch, None)?;
        let answer = ticket.wait()?;
        let damaged = answer.scores().status().damaged;
        ensure!(damaged == 0, "{damaged} rows of a probe sample are damaged on flash");
        if let Some(expected) = sample.score {
            difference = difference.max((answer.scores().values[0] - expected).abs());
            compared += 1;
        }
    }
    ensure!(compared > 0, "the bundle has no probe set with scores");
    ensure!(difference <= tolerance, "a probe score differs by {difference}, over {tolerance}");
    log::info!("`{name}`: {compared} probe scores equal the trainer's within {difference:.1e}");
    Ok(())
}
