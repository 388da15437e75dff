//! `tuf`: the three commands by which the public conformance suite of The Update Framework drives a
//! client. Metadata files stand in one folder under their plain names; the floor and what else is
//! ours stands beside it, in a folder of the same name with `.floor`. Fetches small targets only:
//! releases are `sync`'s.

use crate::sync::now;
use anyhow::{Context, Result, ensure};
use clap::{Args, Subcommand};
use hatchback::bundle::manifest::sha256;
use hatchback::io::disk;
use hatchback::limits::CHUNK_BYTES;
use hatchback::request::worker::SystemClock;
use hatchback::update::link::{Fetcher, Link, LinkError, LinkLimits, Take};
use hatchback::update::trust::Trust;
use hatchback_link::{LinkOptions, open};
use std::path::{Path, PathBuf};

/// Speaks the commands of the public TUF conformance suite
#[derive(Args, Debug)]
pub struct TufArgs {
    /// The folder of trusted metadata
    #[arg(long)]
    metadata_dir: PathBuf,
    /// The address of the metadata
    #[arg(long)]
    metadata_url: Option<String>,
    /// Targets to download, in order
    #[arg(long)]
    target_name: Vec<String>,
    /// The address of the targets
    #[arg(long)]
    target_base_url: Option<String>,
    /// The folder for targets
    #[arg(long)]
    target_dir: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Takes the root that everything begins with
    Init {
        /// The root
        root: PathBuf,
    },
    /// Takes up what was signed
    Refresh,
    /// Takes up what was signed and downloads targets
    Download,
}

/// The newest metadata as the suite wants to find them.
const FILES: [&str; 4] = ["root.json", "timestamp.json", "snapshot.json", "targets.json"];

/// Runs the command.
///
/// # Errors
/// Anything is refused.
pub fn run(args: &TufArgs) -> Result<()> {
    let mut kept = args.metadata_dir.clone().into_os_string();
    kept.push(".floor");
    let (kept, disk) = (PathBuf::from(kept), disk::system());
    if let Command::Init { root } = &args.command {
        let root = std::fs::read(root).with_context(|| root.display().to_string())?;
        Trust::init(disk.as_ref(), &kept, &root)?;
        return show(&kept, &args.metadata_dir);
    }
    let base =
        args.metadata_url.as_deref().context("--metadata-url is needed")?.trim_end_matches('/');
    let mut link = Metadata { link: open(base, &LinkOptions::default())? };
    let clock = SystemClock::default();
    let mut fetcher = Fetcher::new(&mut link, &clock, LinkLimits::default());
    let refreshed = Trust::open(&disk, &kept)?.refresh(&mut fetcher, now()?);
    show(&kept, &args.metadata_dir)?;
    let targets = refreshed?;
    if !matches!(args.command, Command::Download) {
        return Ok(());
    }
    let folder = args.target_dir.as_deref().context("--target-dir is needed")?;
    let base = args.target_base_url.as_deref().context("--target-base-url is needed")?;
    for name in &args.target_name {
        let target =
            targets.targets.get(name).with_context(|| format!("{name}: is not a target"))?;
        let hash = target.hashes.get("sha256").with_context(|| format!("{name}: has no sha256"))?;
        let place = folder.join(name.replace('/', "%2F"));
        let is_there = |bytes: &[u8]| hex(bytes) == *hash && bytes.len() as u64 == target.length;
        if std::fs::read(&place).is_ok_and(|bytes| is_there(&bytes)) {
            continue;
        }
        ensure!(
            target.length <= CHUNK_BYTES as u64,
            "{name}: {} bytes are for `sync`",
            target.length
        );
        let (directory, file) = name
            .rsplit_once('/')
            .map_or((String::new(), name.as_str()), |(d, f)| (format!("{d}/"), f));
        let mut link = open(base, &LinkOptions::default())?;
        let mut fetcher = Fetcher::new(link.as_mut(), &clock, LinkLimits::default());
        let bytes = fetcher.get(&format!("{directory}{hash}.{file}"), target.length)?;
        ensure!(is_there(&bytes), "{name}: does not match its signed hash or length");
        std::fs::write(&place, bytes).with_context(|| place.display().to_string())?;
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    hatchback::update::release::hex(&sha256(bytes))
}

/// Copies the trusted metadata to where the suite looks.
fn show(kept: &Path, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    for name in FILES {
        match std::fs::read(kept.join(name)) {
            Ok(bytes) => std::fs::write(folder.join(name), bytes)?,
            Err(_) => drop(std::fs::remove_file(folder.join(name))),
        }
    }
    Ok(())
}

/// A repository whose metadata have an address of their own.
struct Metadata {
    link: Box<dyn Link>,
}

impl Link for Metadata {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        self.link.get(path.strip_prefix("metadata/").unwrap_or(path), from, take)
    }
}
