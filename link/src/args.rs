//! What a command line says of a car and of its way to a repository; the same for the daemon and
//! for the desk. Only reads: the work is the sync's.

use crate::{LinkOptions, OpenError, open};
use anyhow::{Context, Result};
use clap::Args;
use hatchback::io::disk;
use hatchback::update::Updater;
use hatchback::update::link::Link;
use hatchback::update::trust::Trust;
use std::path::PathBuf;

/// The car and its link.
#[derive(Args, Clone, Debug)]
pub struct CarArgs {
    /// The sync directory: what is trusted, what is being fetched, and where the update is
    #[arg(long)]
    state: PathBuf,
    /// The fleet's root, the first time
    #[arg(long)]
    root: Option<PathBuf>,
    /// Which model, where nothing is live yet and the repository has several
    #[arg(long)]
    lineage: Option<String>,
    /// When this car gets a release that a share of the fleet gets first: from 0, with the first
    /// per cent, to 99
    #[arg(long, default_value_t = 99, value_parser = clap::value_parser!(u8).range(..100))]
    cohort: u8,
    /// Certificates to trust, a PEM file [default: the system's]
    #[arg(long)]
    ca: Option<PathBuf>,
    /// This car's certificate chain and key, a PEM file
    #[arg(long)]
    client: Option<PathBuf>,
    /// The address of a proxy
    #[arg(long)]
    proxy: Option<String>,
}

impl CarArgs {
    /// The sync of the car whose flash directory this is.
    pub fn sync(&self, flash: PathBuf) -> Updater {
        let (directory, lineage, cohort) = (self.state.clone(), self.lineage.clone(), self.cohort);
        Updater { disk: disk::system(), directory, flash, lineage, cohort }
    }

    /// Puts the fleet's root into the sync directory of `sync`, if it is the first time.
    ///
    /// # Errors
    /// The root cannot be read or used, or the directory cannot be written.
    pub fn provision(&self, sync: &Updater) -> Result<()> {
        let Some(root) = &self.root else { return Ok(()) };
        let root = std::fs::read(root).with_context(|| root.display().to_string())?;
        Ok(Trust::init(sync.disk.as_ref(), &sync.directory, &root)?)
    }

    /// The link to the repository at `from`, at so many bytes a second; 0 for no limit.
    ///
    /// # Errors
    /// Its options are wrong.
    pub fn link(&self, from: &str, bytes_per_s_max: u64) -> Result<Box<dyn Link>, OpenError> {
        let (ca, client, proxy) = (self.ca.clone(), self.client.clone(), self.proxy.clone());
        open(from, &LinkOptions { ca, client, proxy, bytes_per_s_max })
    }
}
