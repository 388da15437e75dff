//! The three commands through which the public conformance suite of The Update Framework
//! drives a client. The suite finds the trusted metadata in one folder under their plain names. The
//! rollback floor and the rest of Hatchback's state are in a folder beside it, with the suffix
//! `.floor`. Fetches small targets only; releases need `sync`.

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use hatchback::bundle::manifest::sha256;
use hatchback::clock::SystemClock;
use hatchback::io::disk;
use hatchback::limits::CHUNK_BYTES;
use hatchback::update::link::{Fetcher, Link, LinkError, LinkLimits, Take};
use hatchback::update::trust::Trust;
use hatchback_link::{LinkOptions, open};
use hatchback_tools::repository::now;
use sigstore_tuf::TargetFile;
use std::path::{Path, PathBuf};

/// Speaks the commands of the public TUF conformance suite
#[derive(Parser, Debug)]
struct Args {
    /// The folder of trusted metadata
    #[arg(long)]
    metadata_dir: PathBuf,
    /// The URL of the metadata
    #[arg(long)]
    metadata_url: Option<String>,
    /// Targets to download, in order
    #[arg(long)]
    target_name: Vec<String>,
    /// The URL of the targets
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
    /// Stores the first trusted root
    Init {
        /// The file of the root
        root: PathBuf,
    },
    /// Fetches and verifies the newest metadata
    Refresh,
    /// Fetches and verifies the newest metadata and downloads targets
    Download,
}

/// Names under which the suite finds the newest metadata.
const FILES: [&str; 4] = ["root.json", "timestamp.json", "snapshot.json", "targets.json"];

fn main() -> Result<()> {
    let args = Args::parse();
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
        let target = targets.targets.get(name);
        let target =
            target.with_context(|| format!("{name}: the repository has no such target"))?;
        download(name, target, base, folder)?;
    }
    Ok(())
}

/// Downloads `target` from the URL `base` into `folder`, unless the folder has it.
fn download(name: &str, target: &TargetFile, base: &str, folder: &Path) -> Result<()> {
    let hash = target.hashes.get("sha256");
    let hash = hash.with_context(|| format!("{name}: the target has no SHA-256"))?;
    let path = folder.join(name.replace('/', "%2F"));
    let matches = |bytes: &[u8]| sha256_hex(bytes) == *hash && bytes.len() as u64 == target.length;
    if std::fs::read(&path).is_ok_and(|bytes| matches(&bytes)) {
        return Ok(());
    }
    ensure!(
        target.length <= CHUNK_BYTES as u64,
        "{name}: {} bytes, larger than a chunk; only `sync` fetches releases",
        target.length
    );

    let (directory, file) = match name.rsplit_once('/') {
        Some((directory, file)) => (format!("{directory}/"), file),
        None => (String::new(), name),
    };
    let (mut link, clock) = (open(base, &LinkOptions::default())?, SystemClock::default());
    let mut fetcher = Fetcher::new(link.as_mut(), &clock, LinkLimits::default());
    let bytes = fetcher.get(&format!("{directory}{hash}.{file}"), target.length)?;
    ensure!(matches(&bytes), "{name}: does not match its signed hash or length");
    std::fs::write(&path, bytes).with_context(|| path.display().to_string())
}

fn sha256_hex(bytes: &[u8]) -> String {
    hatchback::bundle::manifest::hex(&sha256(bytes))
}

/// Copies the trusted metadata to the suite's folder.
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

/// A link to a repository whose metadata are at a URL of their own.
struct Metadata {
    link: Box<dyn Link>,
}

impl Link for Metadata {
    fn get(&mut self, path: &str, from: u64, take: Take<'_>) -> Result<(), LinkError> {
        self.link.get(path.strip_prefix("metadata/").unwrap_or(path), from, take)
    }
}
