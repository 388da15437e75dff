//! `sync`: one update of a car in one process. It fetches the newest signed release from a
//! repository and installs it into a flash directory. This file reads the command line and shows
//! the progress; `hatchback::update` does the work.

use crate::report;
use crate::report::Json;
use crate::report::args::mib_to_bytes;
use crate::repository::now;
use crate::say;
use crate::serve::progress_bar;
use anyhow::{Result, bail};
use clap::Args;
use hatchback::clock::{SystemClock, utc};
use hatchback::model::budget::Budget;
use hatchback::targets::Target;
use hatchback::update::Updater;
use hatchback::update::host::{Host, Policy};
use hatchback::update::link::{Fetcher, LinkLimits};
use hatchback::update::status::{UpdateState, UpdateStatus};
use hatchback_link::args::CarArgs;
use std::path::PathBuf;

/// Updates a flash directory to a repository's newest release
#[derive(Args, Debug)]
pub struct SyncArgs {
    /// The repository: a directory, or the URL of a web server
    #[arg(long, required_unless_present_any = ["status", "consent"])]
    from: Option<String>,
    #[command(flatten)]
    car: CarArgs,
    /// The flash directory
    #[arg(long)]
    flash: PathBuf,
    /// A target file, such as targets/cpu.toml, with the checks that a release must pass [default:
    /// only its probe set]
    #[arg(long)]
    target: Option<PathBuf>,
    /// MiB to receive in this run at most, but at least one chunk; the next run continues
    #[arg(long, value_parser = report::args::mib)]
    mib_max: Option<f64>,
    /// MiB a second at most
    #[arg(long, value_parser = report::args::mib_above_zero)]
    mib_per_s: Option<f64>,
    /// Gives the owner's consent to the release that waits for it, and does nothing else
    #[arg(long)]
    consent: bool,
    /// Prints the state of the update and its history, and does nothing else
    #[arg(long)]
    status: bool,
    #[command(flatten)]
    json: Json,
}

/// Runs the command. Reports the status of the update even if the update fails.
///
/// # Errors
/// The reason for which the update stopped. The live generation stays live.
pub fn run(args: &SyncArgs) -> Result<()> {
    let updater = args.car.updater(args.flash.clone());
    let updated = match args.action() {
        Action::Consent => args.car.check_state().and_then(|()| consent(&updater)),
        Action::Status => return args.car.check_state().and_then(|()| args.report(&updater)),
        Action::Update => update(args, &updater),
    };

    if updated.is_err() && !args.json.is_given() {
        return updated;
    }
    args.report(&updater)?;
    updated
}

/// Updates the car as [`run`] does, and prints nothing.
///
/// # Errors
/// The reason for which the update stopped.
pub fn update_car(args: &SyncArgs) -> Result<()> {
    update(args, &args.car.updater(args.flash.clone()))
}

/// The action of a run.
enum Action {
    Update,
    Consent,
    Status,
}

impl SyncArgs {
    fn report(&self, updater: &Updater) -> Result<()> {
        let status = updater.status()?;
        self.json.write(&status, || print_status(&status, self.status))
    }

    fn action(&self) -> Action {
        match (self.consent, self.status) {
            (true, _) => Action::Consent,
            (false, true) => Action::Status,
            (false, false) => Action::Update,
        }
    }
}

fn consent(updater: &Updater) -> Result<()> {
    if !updater.consent(now()?)? {
        bail!("--consent: no release waits for the owner's consent");
    }
    Ok(())
}

fn update(args: &SyncArgs, updater: &Updater) -> Result<()> {
    args.car.provision(updater)?;
    let (budget, policy) = match &args.target {
        Some(path) => Target::load(path).map(|target| (target.budget, target.update))?,
        None => (Budget::default(), Policy::default()),
    };

    let from = args.from.as_deref().unwrap_or_default();
    let mut link = args.car.link(from, args.mib_per_s.map_or(0, mib_to_bytes))?;
    let clock = SystemClock::default();
    let bytes_max = args.mib_max.map_or(u64::MAX, mib_to_bytes);
    let limits = LinkLimits { bytes_max, ..LinkLimits::default() };
    let mut fetcher = Fetcher::new(link.as_mut(), &clock, limits);
    let host = Host {
        policy,
        budget,
        watched: None,
        unservable: None,
        root: None,
        boot: 0,
        yield_now: &|| {},
    };

    let bar = progress_bar(0, "fetching", "{bytes}/{total_bytes}");
    let updated = updater.run(&mut fetcher, &host, now()?, |bytes, total| {
        bar.set_length(total);
        bar.set_position(bytes);
    });
    bar.finish_and_clear();
    updated?;
    Ok(())
}

fn print_status(status: &UpdateStatus, with_history: bool) -> Result<()> {
    if with_history && !status.history.is_empty() {
        let mut table = report::table_with_texts(&["when", "state", "release", ""]);
        for event in &status.history {
            let (release, note) = (event.release.clone(), event.note.clone());
            table.add_row([
                utc(event.at),
                event.state.to_string(),
                release.unwrap_or_default(),
                note.unwrap_or_default(),
            ]);
        }
        say!("{table}")?;
    }

    let live = status.live.as_deref().unwrap_or("nothing");
    let received = report::bytes(status.bytes_received);
    say!("{live} is live; {}; {received} received", status.state)?;
    if status.withdrawn {
        say!("the live release was revoked, and no newer one is published yet")?;
    }
    if let Some(skipped) = &status.skipped {
        say!("{skipped}")?;
    }
    if status.state == UpdateState::AwaitConsent {
        say!("a release waits for the owner's consent: `hatchback sync --consent`")?;
    }
    match (&status.error, status.state) {
        (None, _) => Ok(()),
        (
            Some(error),
            UpdateState::AwaitConsent | UpdateState::Applying | UpdateState::Probation,
        ) => {
            say!("the last poll failed: {error}")
        }
        (Some(error), _) => say!("the last update stopped: {error}"),
    }
}
