//! A car as the command line and the target describe it: machine, target and models. Opens no
//! model.

use crate::cli::{NamedDirectory, ServeArgs};
use crate::machine::Root;
use crate::models;
use anyhow::{Result, ensure};
use hatchback::targets::{DeviceKind, Target};
use std::path::Path;

/// The machine and its models.
pub struct Car<'a> {
    /// The folder tree from which the facts of the machine are read.
    pub root: &'a Root,
    /// The target.
    pub target: &'a Target,
    /// The file of the target.
    pub target_path: &'a Path,
    /// The processor that computes requests.
    pub device: DeviceKind,
    /// The models; sorted by name where they were found in a folder.
    pub models: Vec<NamedDirectory>,
    /// Whether the models were found in the target's folder, and not given by `--flash`.
    pub are_found: bool,
}

impl Car<'_> {
    /// Returns the sync directories of `args`. If neither `--flash` nor `--sync` is given, returns
    /// those in the target's folder, and adds models that have no generation yet.
    pub fn sync_directories(&mut self, args: &ServeArgs) -> Vec<NamedDirectory> {
        if !self.are_found || !args.sync.is_empty() {
            return args.sync.clone();
        }
        let machine = &self.target.machine;
        let sync = models::folders_in(&machine.updates);
        models::add_awaited(&mut self.models, &sync, &machine.models);
        sync
    }

    /// Checks that the car has a model.
    ///
    /// # Errors
    /// It has none.
    pub fn require_models(&self) -> Result<()> {
        let folder = self.target.machine.models.display();
        ensure!(!self.models.is_empty(), "{folder}: has no model; install one or pass --flash");
        Ok(())
    }
}
