//! The sync process, which has the link: `hatchback-sync`, or `hatchbackd sync`. It polls for
//! releases, stages them and wakes the serving process. It writes the sync directory only. It never
//! opens a model and never makes a release live: the serving process does that.

use crate::args::CarArgs;
use anyhow::{Result, ensure};
use clap::Args;
use hatchback::clock::SystemClock;
use hatchback::maintenance::wear::WearBudget;
use hatchback::update::Updater;
use hatchback::update::error::UpdateError;
use hatchback::update::link::{Fetcher, LinkLimits, LinkRules};
use hatchback::update::state::UpdateState;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Interval at which the process reads the status record.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);

/// Returns the path of the socket in a sync directory that wakes the serving process.
pub fn wake_socket(directory: &Path) -> PathBuf {
    directory.join("wake")
}

/// Returns the time in seconds since 1970; 0 if the clock is before 1970.
pub fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The repository and the car.
#[derive(Args, Debug)]
pub struct SyncArgs {
    /// The repository: a directory, or the address of a web server
    #[arg(long)]
    from: String,
    #[command(flatten)]
    car: CarArgs,
    /// Ends after the first poll
    #[arg(long)]
    once: bool,
}

/// Polls until the process is killed, which may happen at any moment.
///
/// # Errors
/// The options are wrong, or with `--once` why the poll failed.
pub fn run(args: &SyncArgs, flash: PathBuf, rules: LinkRules) -> Result<()> {
    ensure!(rules.poll_minutes > 0, "link.poll_minutes = 0: must be at least 1");
    let updater = args.car.updater(flash);
    args.car.provision(&updater)?;
    // A wrong option must fail now and not at the first poll, which may be hours away.
    args.car.link(&args.from, rules.bytes_per_s_max)?;

    let (mut due, mut is_in_hand) = (Instant::now(), false);
    loop {
        // When the serving process has finished a release, the next one on the path may be fetched.
        let is_finished = updater.status().is_ok_and(|status| status.state.is_fetching());
        if is_in_hand && is_finished {
            due = Instant::now();
        }
        is_in_hand = !is_finished;

        if due <= Instant::now() && rules.is_open(now()) {
            let polled = poll(&updater, args, rules);
            due = Instant::now() + interval(rules, polled.is_ok());
            match polled {
                Ok(state) if state.is_fetching() => {}
                Ok(_) => wake(&updater),
                Err(e) if args.once => return Err(e),
                Err(e) => log::warn!("{e:#}"),
            }
            if args.once {
                return Ok(());
            }
        }
        std::thread::sleep(STATUS_INTERVAL);
    }
}

fn poll(updater: &Updater, args: &SyncArgs, rules: LinkRules) -> Result<UpdateState> {
    let mut link = args.car.link(&args.from, rules.bytes_per_s_max)?;
    let bytes_max = rules.bytes_per_day_max;
    let budget = WearBudget { bytes_per_day_max: bytes_max };
    let left = updater.status()?.received.left(budget, Duration::from_secs(now()));
    if left == 0 {
        return Err(UpdateError::ByteBudget { bytes_max }.into());
    }

    let clock = SystemClock::default();
    let limits =
        LinkLimits { bytes_max: left, time_max: rules.open_for(now()), ..LinkLimits::default() };
    let mut fetcher = Fetcher::new(link.as_mut(), &clock, limits);
    let status = updater.fetch(&mut fetcher, now(), |_, _| {})?;
    log::info!(
        "polled {}: state {}, {} bytes received",
        link.address(""),
        status.state,
        status.bytes_received
    );
    Ok(status.state)
}

/// Returns the time until the next poll: the target's interval, varied at random by up to a quarter
/// so that cars which start together spread. After an error the time is a sixteenth of that.
fn interval(rules: LinkRules, is_ok: bool) -> Duration {
    let random = RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64;
    let minutes = Duration::from_secs(60 * u64::from(rules.poll_minutes));
    let interval = minutes.mul_f64(0.75 + random / 2.0);
    if is_ok { interval } else { interval / 16 }
}

/// Wakes the serving process. If none runs, the staged release waits until one starts.
fn wake(updater: &Updater) {
    let socket = wake_socket(&updater.directory);
    let sent = UnixDatagram::unbound().and_then(|s| s.send_to(b"staged", socket));
    if let Err(e) = sent {
        log::info!(
            "no process serves {} now; the staged release waits for one ({e})",
            updater.flash.display()
        );
    }
}
