//! `sync`: what a car does, once: takes up what a repository has signed and brings a flash directory forward to
//! it. Only reads the command line and shows the progress; the work is `hatchback::sync`.

use crate::link::{DirectoryLink, HttpLink, HttpOptions};
use crate::report;
use crate::serve::progress_bar;
use anyhow::{Context, Result};
use clap::Args;
use hatchback::disk;
use hatchback::score::SystemClock;
use hatchback::sync::Sync;
use hatchback::sync::link::{Fetcher, Link, LinkLimits};
use hatchback::sync::trust::Trust;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Brings a flash directory forward to a repository's newest release
#[derive(Args, Debug)]
pub struct SyncArgs {
    /// The repository: a directory, or the address of a web server
    #[arg(long, required_unless_present = "status")]
    from: Option<String>,
    /// The sync directory: what is trusted, and what is being fetched
    #[arg(long)]
    state: PathBuf,
    /// The flash directory
    #[arg(long, required_unless_present = "status")]
    flash: Option<PathBuf>,
    /// The fleet's root, the first time
    #[arg(long)]
    root: Option<PathBuf>,
    /// Which model, where nothing is live yet and the repository has several
    #[arg(long)]
    lineage: Option<String>,
    /// Most MiB to receive in this run; the next one goes on
    #[arg(long)]
    mib_max: Option<f64>,
    /// Certificates to trust, a PEM file [default: the system's]
    #[arg(long)]
    ca: Option<PathBuf>,
    /// This car's certificate chain and key, a PEM file
    #[arg(long)]
    client: Option<PathBuf>,
    /// The address of a proxy
    #[arg(long)]
    proxy: Option<String>,
    /// Prints what the last run did, and does nothing
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

/// The link to the repository at `from`.
///
/// # Errors
/// Its options are wrong.
pub fn link(from: &str, options: &HttpOptions) -> Result<Box<dyn Link>> {
    if from.starts_with("http://") || from.starts_with("https://") {
        return Ok(Box::new(HttpLink::new(from, options)?));
    }
    let path = from.strip_prefix("file://").unwrap_or(from);
    Ok(Box::new(DirectoryLink(path.into())))
}

/// Runs the command.
///
/// # Errors
/// Why the sync stopped; what was live is live.
pub fn run(args: &SyncArgs) -> Result<()> {
    let disk = disk::system();
    let flash = args.flash.clone().unwrap_or_default();
    let sync = Sync { disk, directory: args.state.clone(), flash, lineage: args.lineage.clone() };
    if !args.status {
        if let Some(root) = &args.root {
            let root = std::fs::read(root).with_context(|| root.display().to_string())?;
            Trust::init(sync.disk.as_ref(), &sync.directory, &root)?;
        }
        let (ca, client, proxy) = (args.ca.clone(), args.client.clone(), args.proxy.clone());
        let mut link = link(args.from.as_deref().unwrap_or_default(), &HttpOptions { ca, client, proxy })?;
        let bytes_max = args.mib_max.map_or(u64::MAX, |mib| (mib * 1_048_576.0) as u64);
        let clock = SystemClock::default();
        let limits = LinkLimits { bytes_max, ..LinkLimits::default() };
        let mut fetcher = Fetcher::new(link.as_mut(), &clock, limits);
        let bar = progress_bar(0, "fetching", "{bytes}/{total_bytes}");
        let ran = sync.run(&mut fetcher, now()?, |bytes, total| {
            bar.set_length(total);
            bar.set_position(bytes);
        });
        bar.finish_and_clear();
        if let Err(e) = ran {
            if args.json {
                report::write_json(Path::new("-"), &sync.status())?;
            }
            return Err(e.into());
        }
    }
    let status = sync.status();
    if args.json {
        return report::write_json(Path::new("-"), &status);
    }
    let live = status.live.as_deref().unwrap_or("nothing");
    status.installed.iter().for_each(|release| println!("installed {release}"));
    println!("{live} is live; {} received", report::bytes(status.bytes_received));
    if let Some(error) = &status.error {
        println!("the last run stopped: {error}");
    }
    Ok(())
}
