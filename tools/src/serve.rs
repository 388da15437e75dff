//! Code that `run`, `eval`, `demo` and the benches share: opens a bundle or a flash directory as a
//! model within the budget of a target and of the command line. Never scores a request.

use crate::report;
use crate::report::args::mib_to_bytes;
use crate::report::temporary::Claim;
use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::Generation;
use hatchback::clock::SystemClock;
use hatchback::flash::{Flash, FlashError};
use hatchback::io::disk;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Worker;
use hatchback::targets::{DeviceKind, Target};
use hatchback_kernels::cuda::Device;
use indicatif::{ProgressBar, ProgressStyle};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The model to serve and its budget.
#[derive(Args, Clone, Debug)]
pub struct ServeArgs {
    /// A bundle (installed into a flash directory first) or a flash directory
    pub model: PathBuf,
    /// The flash directory for a bundle [default: the bundle's name with the extension `.flash`]
    #[arg(long)]
    pub flash: Option<PathBuf>,
    /// A target file, such as targets/cpu.toml, that sets the budget
    #[arg(long)]
    pub target: Option<PathBuf>,
    /// Embedding cache, MiB [default: the target's]
    #[arg(long, value_parser = report::args::mib)]
    pub cache_mib: Option<f64>,
    /// Memory for resident tables, MiB [default: the target's]
    #[arg(long, value_parser = report::args::mib)]
    pub resident_mib: Option<f64>,
    /// Samples in a request at most [default: the target's]
    #[arg(long, value_parser = report::args::batch_max)]
    pub batch_max: Option<u32>,
    /// Device that looks up embeddings, `cpu` or `cuda` [default: the target's, or the CPU]
    #[arg(long)]
    pub device: Option<DeviceKind>,
}

impl ServeArgs {
    fn target(&self) -> Result<Option<Target>> {
        Ok(self.target.as_deref().map(Target::load).transpose()?)
    }

    /// Returns the target's budget with the values of the command line.
    ///
    /// # Errors
    /// The target does not load.
    pub fn budget(&self) -> Result<Budget> {
        let mut budget = self.target()?.map_or_else(Budget::default, |target| target.budget);
        budget.cache_bytes_max = self.cache_mib.map_or(budget.cache_bytes_max, mib_to_bytes);
        budget.resident_bytes_max =
            self.resident_mib.map_or(budget.resident_bytes_max, mib_to_bytes);
        budget.batch_max = self.batch_max.unwrap_or(budget.batch_max);
        Ok(budget)
    }

    /// Opens the flash directory. Installs a bundle first.
    ///
    /// # Errors
    /// The bundle or the directory is refused.
    pub fn flash(&self) -> Result<Flash> {
        let directory = self.flash.clone().unwrap_or_else(|| self.model.with_extension("flash"));
        open_flash(&self.model, &directory)
    }

    /// Opens the model.
    ///
    /// # Errors
    /// The model is refused or does not fit the budget.
    pub fn open(&self) -> Result<Arc<Model>> {
        self.open_from(&self.flash()?)
    }

    /// Opens the live generation of `flash`, as the target serves it.
    ///
    /// # Errors
    /// The model is refused or does not fit the budget.
    pub fn open_from(&self, flash: &Flash) -> Result<Arc<Model>> {
        let dense = self.target()?.map(|target| target.gpu_dense()).unwrap_or_default();
        Ok(Arc::new(Model::on_device(flash, self.budget()?, &self.device()?, &dense)?))
    }

    /// Opens the device that looks up embeddings.
    ///
    /// # Errors
    /// The target does not load, or the machine has no such device.
    pub fn device(&self) -> Result<Device> {
        let target = self.target()?;
        let (kind, tegra) =
            target.map_or((DeviceKind::Cpu, false), |t| (t.device, t.tegra_profile));
        self.device.unwrap_or(kind).open(tegra).context("device (`--device cpu` needs none)")
    }
}

/// Checks the value of `--batch` against the budget of `model`.
///
/// # Errors
/// A request of the model takes fewer samples.
pub fn check_batch(batch: usize, model: &Model) -> Result<()> {
    let batch_max = model.budget().batch_max;
    ensure!(
        batch <= batch_max as usize,
        "--batch {batch}: a request takes at most {batch_max} samples; raise --batch-max"
    );
    Ok(())
}

/// Returns a worker on `model` with the system's clock.
pub fn worker(model: &Arc<Model>) -> Worker {
    Worker::new(Arc::clone(model), Arc::new(SystemClock::default()))
}

/// Opens the flash directory at `path`. If `path` is a bundle, installs it into the flash directory
/// `directory` first.
///
/// # Errors
/// The bundle or the directory is refused.
pub fn open_flash(path: &Path, directory: &Path) -> Result<Flash> {
    if path.is_dir() {
        return Ok(Flash::open(&disk::system(), path)?);
    }
    install(path, directory)
}

/// Opens what `paths` hold: a flash directory, or the bundles of a chain, a snapshot and the deltas
/// after it. Installs bundles into the flash directory `directory`. `option` is that of `paths`.
/// Continues a chain of which an earlier run has installed a part.
///
/// # Errors
/// A bundle or the directory is refused, or a delta has no parent among the bundles. The bundles
/// before it stay installed.
pub fn open_chain(option: &str, paths: &[PathBuf], directory: &Path) -> Result<Option<Flash>> {
    if let [path] = paths
        && path.is_dir()
    {
        return open_flash(path, directory).map(Some);
    }
    let mut chain: Vec<(Generation, Option<u64>, &PathBuf)> = Vec::new();
    for path in paths {
        let named = || format!("{option} {}: pass a flash directory alone", path.display());
        ensure!(!path.is_dir(), named());
        let bundle = BundleReader::open(path)?;
        chain.push((bundle.manifest().generation.clone(), bundle.manifest().parent, path));
    }
    chain.sort_unstable_by_key(|(generation, _, path)| (generation.sequence, *path));

    let disk = disk::system();
    // A directory that cannot be opened is for the installation to refuse or to repair.
    if Flash::has_live_record(disk.as_ref(), directory)
        && let Ok(held) = Flash::open(&disk, directory)
    {
        let live = &held.manifest().generation;
        let earlier = chain.partition_point(|(one, ..)| one.sequence < live.sequence);
        // What does not continue `live` is for the installation to refuse, with all its bundles.
        let continues = |(first, parent, _): &(Generation, Option<u64>, &PathBuf)| {
            let follows = parent.is_none_or(|parent| parent == live.sequence);
            first.lineage == live.lineage && (first == live || follows)
        };
        if chain.get(earlier).is_some_and(continues) {
            chain.drain(..earlier);
        }
    }

    let mut last = None;
    let _claim = claim_new(directory)?;
    for (_, _, path) in chain {
        let installed = install_claimed(path, directory);
        last = Some(installed.map_err(|error| match error.downcast_ref() {
            Some(FlashError::Parent { parent, live, .. }) => anyhow!(
                "{option} {}: is a delta from sequence {parent}, and {live} is before it; pass \
                 {option} for each bundle from a snapshot on, or one flash directory",
                path.display()
            ),
            _ => error,
        })?);
    }
    Ok(last)
}

/// Installs the bundle at `path` into the flash directory `directory`, with a progress bar.
///
/// # Errors
/// The bundle is refused, or the directory cannot be written.
pub fn install(path: &Path, directory: &Path) -> Result<Flash> {
    let _claim = claim_new(directory)?;
    install_claimed(path, directory)
}

/// A directory that a command created. It is removed if nothing is in it.
pub(crate) struct NewDirectory(Claim);

impl Drop for NewDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(self.0.path());
    }
}

/// Creates and claims a directory that does not exist yet. An interrupted change of a directory
/// that holds a model is continued or repeated.
pub(crate) fn claim_new(directory: &Path) -> Result<Option<NewDirectory>> {
    let create = || {
        disk::create_directories(directory, 0o777)
            .with_context(|| directory.display().to_string())?;
        Ok(directory.to_owned())
    };
    (!directory.exists()).then(|| Claim::of(create).map(NewDirectory)).transpose()
}

fn install_claimed(path: &Path, directory: &Path) -> Result<Flash> {
    // The disk replaces a file that stands where it creates a directory. Here the path is a user's.
    let is_taken = directory.exists() && !directory.is_dir();
    ensure!(!is_taken, "{}: exists and is not a flash directory", directory.display());
    let mut bundle = BundleReader::open(path)?;
    let manifest = bundle.manifest();
    let total = (0..manifest.tables.len()).map(|number| manifest.segment_bytes(number)).sum();

    let bar = progress_bar(total, "installing on flash", "{bytes}/{total_bytes}");
    let flash = Flash::install(&disk::system(), directory, &mut bundle, |bytes| bar.inc(bytes));
    bar.finish_and_clear();
    flash.with_context(|| {
        format!("{}: cannot be installed into {}", path.display(), directory.display())
    })
}

/// Returns a progress bar on standard error. It is invisible unless that is a terminal.
pub fn progress_bar(total: u64, what: &str, unit: &str) -> ProgressBar {
    let bar = ProgressBar::new(total).with_message(what.to_owned());
    let template = format!("{{msg:20}} [{{bar:40}}] {unit} {{eta}}");
    // A wrong template changes only how the bar looks.
    bar.set_style(
        ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    bar
}

/// Returns the memory plan as a table.
pub fn memory_table(model: &Model) -> comfy_table::Table {
    let mut table = report::table(&["memory", "bytes", ""]);
    for (what, bytes) in model.memory().lines() {
        table.add_row([what.to_owned(), report::count(bytes), report::bytes(bytes)]);
    }
    let total = model.memory().total();
    table.add_row(["total".to_owned(), report::count(total), report::bytes(total)]);

    let opening = model.memory().opening_bytes();
    if opening > 0 {
        let what = "more for a while, during an open or a swap".to_owned();
        table.add_row([what, report::count(opening), report::bytes(opening)]);
    }
    table
}
