//! `sync`: what a car does, once, in one process: takes up what a repository has signed and brings
//! a flash directory forward to it. Only reads the command line and shows the progress; the work is
//! `hatchback::update`.

use crate::report;
use crate::serve::progress_bar;
use anyhow::{Context, Result, ensure};
use clap::Args;
use hatchback::model::budget::Budget;
use hatchback::request::worker::SystemClock;
use hatchback::target::Target;
use hatchback::update::Updater;
use hatchback::update::apply::{Host, Policy};
use hatchback::update::link::{Fetcher, LinkLimits};
use hatchback::update::state::{UpdateState, UpdateStatus};
use hatchback_link::args::CarArgs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Brings a flash directory forward to a repository's newest release
#[derive(Args, Debug)]
pub struct SyncArgs {
    /// The repository: a directory, or the address of a web server
    #[arg(long, required_unless_present_any = ["status", "consent"])]
    from: Option<String>,
    #[command(flatten)]
    car: CarArgs,
    /// The flash directory
    #[arg(long, required_unless_present_any = ["status", "consent"])]
    flash: Option<PathBuf>,
    /// A target file, such as targets/cpu.toml, that says what a release must show [default: no
    /// more than its probe set]
    #[arg(long)]
    target: Option<PathBuf>,
    /// Most MiB to receive in this run, but a chunk at least; the next one goes on
    #[arg(long)]
    mib_max: Option<f64>,
    /// Most MiB a second
    #[arg(long)]
    mib_per_s: Option<f64>,
    /// Agrees to the release that waits for it, and does nothing else
    #[arg(long)]
    consent: bool,
    /// Prints where the update is and how it came there, and does nothing
    #[arg(long)]
    status: bool,
    /// Prints the status as JSON
    #[arg(long)]
    json: bool,
}

/// The system's time, seconds since 1970.
///
/// # Errors
/// The clock is before 1970.
pub fn now() -> Result<u64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH).context("the clock is before 1970")?.as_secs())
}

/// Runs the command.
///
/// # Errors
/// Why the sync stopped; what was live is live.
pub fn run(args: &SyncArgs) -> Result<()> {
    let flash = args.flash.clone().unwrap_or_default();
    let sync = args.car.sync(flash);
    let ran = if args.consent {
        sync.consent(now()?).map_err(Into::into).and_then(|asked| {
            ensure!(asked, "nothing waits for consent");
            Ok(())
        })
    } else if args.status {
        Ok(())
    } else {
        forward(args, &sync)
    };
    let status = sync.status();
    if args.json {
        report::write_json(Path::new("-"), &status?)?;
    } else if ran.is_ok() {
        print_status(&status?, args.status);
    }
    ran
}

fn forward(args: &SyncArgs, sync: &Updater) -> Result<()> {
    args.car.provision(sync)?;
    let (budget, policy) = match &args.target {
        Some(path) => Target::load(path).map(|target| (target.budget, target.update))?,
        None => (Budget::default(), Policy::default()),
    };
    let bytes = |mib: f64| (mib * 1_048_576.0) as u64;
    let mut link =
        args.car.link(args.from.as_deref().unwrap_or_default(), args.mib_per_s.map_or(0, bytes))?;
    let bytes_max = args.mib_max.map_or(u64::MAX, bytes);
    let clock = SystemClock::default();
    let limits = LinkLimits { bytes_max, ..LinkLimits::default() };
    let mut fetcher = Fetcher::new(link.as_mut(), &clock, limits);
    let host = Host { policy, budget, watched: None, root: None, rest: &|| {} };
    let bar = progress_bar(0, "fetching", "{bytes}/{total_bytes}");
    let ran = sync.run(&mut fetcher, &host, now()?, |bytes, total| {
        bar.set_length(total);
        bar.set_position(bytes);
    });
    bar.finish_and_clear();
    ran?;
    Ok(())
}

fn print_status(status: &UpdateStatus, history: bool) {
    if history && !status.history.is_empty() {
        let mut table = report::table(&["when", "state", "release", ""]);
        for event in &status.history {
            let when = jiff::Timestamp::from_second(event.at as i64).map(|t| t.to_string());
            let (release, note) = (event.release.clone(), event.note.clone());
            let when = when.unwrap_or_else(|_| event.at.to_string());
            table.add_row([
                when,
                event.state.to_string(),
                release.unwrap_or_default(),
                note.unwrap_or_default(),
            ]);
        }
        println!("{table}");
    }
    let live = status.live.as_deref().unwrap_or("nothing");
    println!("{live} is live; {}; {} received", status.state, report::bytes(status.bytes_received));
    if status.withdrawn {
        println!("the live release was taken back, and nothing newer is published yet");
    }
    match (&status.error, status.state) {
        (Some(error), _) => println!("the last attempt ended: {error}"),
        (None, UpdateState::AwaitConsent) => {
            println!("the owner is asked: `hatchback sync --consent`")
        }
        (None, _) => {}
    }
}
