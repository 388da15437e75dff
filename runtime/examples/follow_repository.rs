//! Brings a flash directory to the newest release of a signed repository in a local folder: fetch,
//! verify, install, probe, commit. The link is written here: the runtime opens no socket.
//!
//! ```sh
//! hatchback keys new keys
//! hatchback publish coupon.hatch --keys keys --to repository
//! cargo run --release -p hatchback --example follow_repository -- \
//!     repository keys/1.root.json state car.flash
//! ```

use hatchback::{
    Budget, Fetcher, Flash, Host, Link, LinkError, LinkLimits, Policy, Program, SystemClock, Take,
    Trust, Updater, system_disk,
};
use std::error::Error;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// A repository in a folder.
struct Folder(PathBuf);

impl Link for Folder {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        let bytes = std::fs::read(self.0.join(path)).map_err(|e| match e.kind() {
            ErrorKind::NotFound => LinkError::NotFound,
            _ => LinkError::Broken(e.to_string()),
        })?;
        // `Break` means that the updater wants no more of this object.
        let rest = bytes.get(from as usize..).unwrap_or_default();
        let _ = rest.chunks(64 << 10).try_for_each(take);
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [repository, root, state, flash] = arguments.as_slice() else {
        return Err("usage: follow_repository REPOSITORY ROOT.json SYNC-DIRECTORY FLASH".into());
    };

    let updater = Updater {
        disk: system_disk(),
        directory: PathBuf::from(state),
        flash: PathBuf::from(flash),
        lineage: None,
        cohort: 99,
        program: Program::this(),
    };

    // The first root is the car's trust anchor; a later call with another root changes nothing.
    Trust::init(updater.disk.as_ref(), &updater.directory, &std::fs::read(root)?)?;

    // A release must reproduce its recorded probe scores. With `watched: None` no probation
    // follows: this process serves no requests that could be counted.
    let host = Host {
        policy: Policy { probe_samples_min: 1, ..Policy::default() },
        budget: Budget::default(),
        watched: None,
        unservable: None,
        root: None,
        boot: 0,
        yield_now: &|| {},
    };

    let (mut link, clock) = (Folder(PathBuf::from(repository)), SystemClock::default());
    let mut fetcher = Fetcher::new(&mut link, &clock, LinkLimits::default());
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let status = updater.run(&mut fetcher, &host, now, |_, _| {})?;

    println!("{}; {} bytes received", status.state, status.bytes_received);
    for event in &status.history {
        println!("  {} {}", event.state, event.release.as_deref().unwrap_or_default());
    }
    let live = Flash::open(&system_disk(), Path::new(flash))?;
    println!("live: {}", live.manifest().generation);
    Ok(())
}
