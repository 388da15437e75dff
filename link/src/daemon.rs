//! The process that has the link: `hatchback-sync`, or `hatchbackd sync`. Looks for releases,
//! stages them, and says so; writes nothing but the sync directory. Never opens a model, and never
//! makes anything live: that is the serving process.

use crate::args::CarArgs;
use anyhow::Result;
use clap::Args;
use hatchback::maintenance::wear::WearBudget;
use hatchback::request::worker::SystemClock;
use hatchback::update::Updater;
use hatchback::update::error::UpdateError;
use hatchback::update::link::{Fetcher, LinkLimits, LinkRules};
use hatchback::update::state::UpdateState;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// How often to look whether the serving process is done with a release.
const LOOK: Duration = Duration::from_secs(1);

/// The socket in a sync directory on which the serving process is told to look.
pub fn wake_socket(directory: &Path) -> PathBuf {
    directory.join("wake")
}

/// The time, seconds since 1970; 0 where the clock is before that.
pub fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// What the link leads to.
#[derive(Args, Debug)]
pub struct SyncArgs {
    /// The repository: a directory, or the address of a web server
    #[arg(long)]
    from: String,
    #[command(flatten)]
    car: CarArgs,
    /// Ends after the first look
    #[arg(long)]
    once: bool,
}

/// Runs until it is killed, which may be at any moment.
///
/// # Errors
/// The options are wrong, or with `once` why the sync stopped.
pub fn run(args: &SyncArgs, flash: PathBuf, rules: LinkRules) -> Result<()> {
    let sync = args.car.sync(flash);
    args.car.provision(&sync)?;
    // Wrong options are to be known now and not in an hour.
    args.car.link(&args.from, rules.bytes_per_s_max)?;
    let (mut due, mut in_hand) = (Instant::now(), false);
    loop {
        // Once the serving process is done with a release there may be a next one on the way to the
        // newest.
        let is_done = sync.status().is_ok_and(|status| status.state.is_fetching());
        if in_hand && is_done {
            due = Instant::now();
        }
        in_hand = !is_done;
        if due <= Instant::now() && rules.is_open(now()) {
            let looked = look(&sync, args, rules);
            due = Instant::now() + wait(rules, looked.is_ok());
            match looked {
                Ok(state) if state.is_fetching() => {}
                Ok(_) => tell(&sync),
                Err(e) if args.once => return Err(e),
                Err(e) => log::warn!("{e:#}"),
            }
            if args.once {
                return Ok(());
            }
        }
        std::thread::sleep(LOOK);
    }
}

fn look(sync: &Updater, args: &SyncArgs, rules: LinkRules) -> Result<UpdateState> {
    let mut link = args.car.link(&args.from, rules.bytes_per_s_max)?;
    let budget = WearBudget { bytes_per_day_max: rules.bytes_per_day_max };
    let left = sync.status()?.received.left(budget, Duration::from_secs(now()));
    if left == 0 {
        let bytes_max = rules.bytes_per_day_max;
        return Err(UpdateError::Budget { bytes_max }.into());
    }
    let clock = SystemClock::default();
    let limits =
        LinkLimits { bytes_max: left, open: rules.open_for(now()), ..LinkLimits::default() };
    let mut fetcher = Fetcher::new(link.as_mut(), &clock, limits);
    let status = sync.fetch(&mut fetcher, now(), |_, _| {})?;
    log::info!("{}: {} bytes received", status.state, status.bytes_received);
    Ok(status.state)
}

/// How long until the next look: the rule's time, up to a quarter more or less by chance so that
/// cars which start together do not stay together; after an error a sixteenth of that.
fn wait(rules: LinkRules, is_ok: bool) -> Duration {
    let chance = RandomState::new().build_hasher().finish() as f64 / u64::MAX as f64;
    let minutes = Duration::from_secs(60 * u64::from(rules.poll_minutes.max(1)));
    let wait = minutes.mul_f64(0.75 + chance / 2.0);
    if is_ok { wait } else { wait / 16 }
}

/// Wakes the serving process. Without one the release waits; it looks when it starts.
fn tell(sync: &Updater) {
    let told =
        UnixDatagram::unbound().and_then(|s| s.send_to(b"staged", wake_socket(&sync.directory)));
    if let Err(e) = told {
        log::info!("nobody serves {} now: {e}", sync.flash.display());
    }
}
