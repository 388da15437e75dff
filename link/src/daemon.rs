//! The sync process, which has the network: `hatchback-sync`, or `hatchbackd sync`. It polls for
//! releases and stages them; the serving process looks for staged releases every second. It writes
//! the sync directory only. It never opens a model and never makes a release live: the serving
//! process does that.

use crate::args::CarArgs;
use crate::program::explain;
use anyhow::Result;
use clap::Args;
use hatchback::car::sync_steps::SyncSteps;
use hatchback::clock::SystemClock;
use hatchback::update::link::LinkRules;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

/// Interval at which the process reads the status record.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);

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
/// An option is wrong, or with `--once` the poll failed.
pub fn run(args: &SyncArgs, flash: PathBuf, rules: LinkRules) -> Result<()> {
    let updater = args.car.updater(flash);
    let root = args.car.provision(&updater)?;
    // A wrong option must fail at the start, not at the first poll, which may be hours away.
    args.car.link(&args.from, rules.bytes_per_s_max)?;

    let (mut steps, clock) = (SyncSteps::new(updater, root, rules), SystemClock::default());
    loop {
        if steps.is_due(&clock, now()) {
            match poll(&mut steps, &clock, args, rules) {
                Ok(()) => {}
                Err(e) if args.once => return Err(e),
                Err(e) => log::warn!("{}", explain(&e)),
            }
            if args.once {
                return Ok(());
            }
        }
        std::thread::sleep(STATUS_INTERVAL);
    }
}

fn poll(
    steps: &mut SyncSteps,
    clock: &SystemClock,
    args: &SyncArgs,
    rules: LinkRules,
) -> Result<()> {
    let mut link = args.car.link(&args.from, rules.bytes_per_s_max)?;
    let random = RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64;
    let status = steps.poll(link.as_mut(), clock, now(), random)?;
    log::info!(
        "polled {}: state {}, {} bytes received",
        link.address(""),
        status.state,
        status.bytes_received
    );
    Ok(())
}
