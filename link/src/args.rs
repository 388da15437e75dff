//! Command-line options of a car and of its link to a repository, which `hatchback-sync`,
//! `hatchbackd sync` and `hatchback sync` share. This file only reads options: `Updater` does the
//! work.

use crate::{LinkOptions, OpenError, ProxyAddress, open};
use anyhow::{Context, Result, ensure};
use clap::Args;
use hatchback::io::disk;
use hatchback::update::Updater;
use hatchback::update::link::Link;
use hatchback::update::program::Program;
use hatchback::update::trust::Trust;
use std::path::PathBuf;

/// The environment variable with the address of a proxy: other users can read a command line, but
/// not this.
const PROXY_VARIABLE: &str = "HATCHBACK_PROXY";

fn proxy_of_environment() -> Option<ProxyAddress> {
    let address = std::env::var_os(PROXY_VARIABLE).filter(|address| !address.is_empty())?;
    Some(address.to_string_lossy().as_ref().into())
}

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
    #[arg(long, default_value_t = 99, value_parser = clap::value_parser!(u8).range(..=99))]
    cohort: u8,
    /// Certificates to trust, a PEM file [default: the system's]
    #[arg(long)]
    ca: Option<PathBuf>,
    /// This car's certificate chain and private key, a PEM file
    #[arg(long)]
    client: Option<PathBuf>,
    /// The address of a proxy [default: the environment variable HATCHBACK_PROXY]
    ///
    /// Every user of the machine can read the command line of a process. An address with a password
    /// belongs in the variable.
    #[arg(long)]
    proxy: Option<ProxyAddress>,
}

impl CarArgs {
    /// Returns the updater of the car with the flash directory `flash`.
    pub fn updater(&self, flash: PathBuf) -> Updater {
        let (directory, lineage, cohort) = (self.state.clone(), self.lineage.clone(), self.cohort);
        let program = Program::this();
        Updater { disk: disk::system(), directory, flash, lineage, cohort, program }
    }

    /// Checks that the sync directory exists, for a command that only reads it.
    ///
    /// # Errors
    /// It does not.
    pub fn check_state(&self) -> Result<()> {
        ensure!(self.state.is_dir(), "--state {}: no such sync directory", self.state.display());
        Ok(())
    }

    /// Provisions the sync directory of `updater` if it is new and `--root` is given. Returns the
    /// root.
    ///
    /// # Errors
    /// The root cannot be read or does not sign itself, or the directory cannot be written.
    pub fn provision(&self, updater: &Updater) -> Result<Option<Vec<u8>>> {
        let Some(path) = &self.root else { return Ok(None) };
        let root = std::fs::read(path)
            .with_context(|| format!("{}: the root metadata cannot be read", path.display()))?;
        Trust::init(updater.disk.as_ref(), &updater.directory, &root)?;
        Ok(Some(root))
    }

    /// Opens the link to the repository at `from`, through the proxy of the options or of the
    /// environment. It passes at most `bytes_per_s_max` bytes a second; 0 is no limit.
    ///
    /// # Errors
    /// A certificate file, the proxy's address or the repository's address cannot be used.
    pub fn link(&self, from: &str, bytes_per_s_max: u64) -> Result<Box<dyn Link>, OpenError> {
        let (ca, client) = (self.ca.clone(), self.client.clone());
        let proxy = self.proxy.clone().or_else(proxy_of_environment);
        open(from, &LinkOptions { ca, client, proxy, bytes_per_s_max })
    }
}
