//! Command-line options that describe a car and its link to a repository, shared by the daemon and
//! the desk. This file only reads options: `Updater` does the work.

use crate::{LinkOptions, OpenError, open};
use anyhow::{Context, Result};
use clap::Args;
use hatchback::io::disk;
use hatchback::update::Updater;
use hatchback::update::link::Link;
use hatchback::update::trust::Trust;
use std::path::PathBuf;

/// A car and its link.
#[derive(Args, Clone, Debug)]
pub struct CarArgs {
    /// The sync directory: trusted metadata, staged releases and the status of the update
    #[arg(long)]
    state: PathBuf,
    /// The fleet's root metadata, to provision a new sync directory
    #[arg(long)]
    root: Option<PathBuf>,
    /// The model to follow while nothing is live, if the repository has several
    #[arg(long)]
    lineage: Option<String>,
    /// This car's place in a gradual rollout: 0 is in the first per cent of the fleet, 99 in the
    /// last
    #[arg(long, default_value_t = 99, value_parser = clap::value_parser!(u8).range(..100))]
    cohort: u8,
    /// Certificates to trust, a PEM file [default: the system's]
    #[arg(long)]
    ca: Option<PathBuf>,
    /// This car's certificate chain and private key, a PEM file
    #[arg(long)]
    client: Option<PathBuf>,
    /// The address of a proxy
    #[arg(long)]
    proxy: Option<String>,
}

impl CarArgs {
    /// Returns the updater of the car with the flash directory `flash`.
    pub fn updater(&self, flash: PathBuf) -> Updater {
        let (directory, lineage, cohort) = (self.state.clone(), self.lineage.clone(), self.cohort);
        Updater { disk: disk::system(), directory, flash, lineage, cohort }
    }

    /// Provisions the sync directory of `updater` if it is new and `--root` is given.
    ///
    /// # Errors
    /// The root cannot be read or does not sign itself, or the directory cannot be written.
    pub fn provision(&self, updater: &Updater) -> Result<()> {
        let Some(path) = &self.root else { return Ok(()) };
        let root = std::fs::read(path)
            .with_context(|| format!("{}: the root metadata cannot be read", path.display()))?;
        Ok(Trust::init(updater.disk.as_ref(), &updater.directory, &root)?)
    }

    /// Opens the link to the repository at `from`, at most `bytes_per_s_max` bytes a second; 0 for
    /// no limit.
    ///
    /// # Errors
    /// A certificate file, the proxy's address or the repository's address cannot be used.
    pub fn link(&self, from: &str, bytes_per_s_max: u64) -> Result<Box<dyn Link>, OpenError> {
        let (ca, client, proxy) = (self.ca.clone(), self.client.clone(), self.proxy.clone());
        open(from, &LinkOptions { ca, client, proxy, bytes_per_s_max })
    }
}
