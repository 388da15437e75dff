//! What `run`, `eval`, `bench` and `demo` share: a bundle or a flash directory becomes a model
//! ready to serve, within the budget of a target and of the command line.

use crate::report;
use anyhow::{Context, Result};
use clap::Args;
use hatchback::bundle::BundleReader;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::worker::{SystemClock, Worker};
use hatchback::target::{DeviceKind, Target};
use hatchback_kernels::cuda::Device;
use indicatif::{ProgressBar, ProgressStyle};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Which model to serve and what it may use.
#[derive(Args, Clone, Debug)]
pub struct ServeArgs {
    /// A bundle (it is laid on flash first) or a flash directory
    pub model: PathBuf,
    /// Where a bundle is laid on flash [default: the bundle's name with `.flash`]
    #[arg(long)]
    pub flash: Option<PathBuf>,
    /// A target file, such as targets/cpu.toml, that gives the budget
    #[arg(long)]
    pub target: Option<PathBuf>,
    /// Embedding cache, MiB [default: the target's]
    #[arg(long)]
    pub cache_mib: Option<f64>,
    /// Tables kept whole, MiB [default: the target's]
    #[arg(long)]
    pub resident_mib: Option<f64>,
    /// Most samples in a request [default: the target's]
    #[arg(long)]
    pub batch_max: Option<u32>,
    /// Where embeddings are looked up, `cpu` or `cuda` [default: the target's, or the CPU]
    #[arg(long)]
    pub device: Option<DeviceKind>,
}

fn mib(n: f64) -> u64 {
    (n * 1_048_576.0) as u64
}

impl ServeArgs {
    fn target(&self) -> Result<Option<Target>> {
        Ok(self.target.as_deref().map(Target::load).transpose()?)
    }

    /// The budget: the target's, with what the command line says on top.
    ///
    /// # Errors
    /// The target does not load.
    pub fn budget(&self) -> Result<Budget> {
        let mut budget = self.target()?.map_or_else(Budget::default, |target| target.budget);
        budget.cache_bytes_max = self.cache_mib.map_or(budget.cache_bytes_max, mib);
        budget.resident_bytes_max = self.resident_mib.map_or(budget.resident_bytes_max, mib);
        budget.batch_max = self.batch_max.unwrap_or(budget.batch_max);
        Ok(budget)
    }

    /// Opens the flash directory; a bundle is laid there first.
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
        let flash = self.flash()?;
        let tensorrt = self.target()?.and_then(|target| target.tensorrt_options);
        let model = Model::from_flash(&flash, self.budget()?)?.onto(&self.device()?)?;
        Ok(Arc::new(model.with_dense(&flash, tensorrt.as_ref())?))
    }

    /// Where embeddings are looked up.
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

/// A worker on `model` with the system's clock.
pub fn worker(model: &Arc<Model>) -> Worker {
    Worker::new(Arc::clone(model), Arc::new(SystemClock::default()))
}

/// Opens the flash directory at `path`; if that is a bundle, lays it on flash under `directory`
/// first.
///
/// # Errors
/// The bundle or the directory is refused.
pub fn open_flash(path: &Path, directory: &Path) -> Result<Flash> {
    if path.is_dir() {
        return Ok(Flash::open(&disk::system(), path)?);
    }
    lay_on_flash(path, directory)
}

/// Lays the bundle at `path` on flash under `directory`, with a progress bar.
///
/// # Errors
/// The bundle is refused or cannot be written.
pub fn lay_on_flash(path: &Path, directory: &Path) -> Result<Flash> {
    let mut bundle = BundleReader::open(path)?;
    let rows = |t: &hatchback::bundle::manifest::TableBlobs| {
        bundle.manifest().blobs[t.segment as usize].raw_bytes()
    };
    let total = bundle.manifest().tables.iter().map(rows).sum();
    let bar = progress_bar(total, "laying on flash", "{bytes}/{total_bytes}");
    let flash = Flash::install(&disk::system(), directory, &mut bundle, |bytes| bar.inc(bytes));
    bar.finish_and_clear();
    flash.with_context(|| format!("{} was not laid on flash", path.display()))
}

/// A progress bar on standard error; invisible where that is not a terminal.
pub fn progress_bar(total: u64, what: &str, unit: &str) -> ProgressBar {
    let bar = ProgressBar::new(total).with_message(what.to_owned());
    let template = format!("{{msg:20}} [{{bar:40}}] {unit} {{eta}}");
    // A template that does not parse would only cost the bar its looks.
    bar.set_style(
        ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    bar
}

/// The memory plan as a table.
pub fn memory_table(model: &Model) -> comfy_table::Table {
    let mut table = report::table(&["memory", "bytes", ""]);
    for (what, bytes) in model.memory().lines() {
        table.add_row([(*what).to_owned(), report::count(*bytes), report::bytes(*bytes)]);
    }
    let total = model.memory().total();
    table.add_row(["total".to_owned(), report::count(total), report::bytes(total)]);
    let opening = model.memory().opening();
    if opening > 0 {
        let what = "more while it was opened, on its way to the GPU".to_owned();
        table.add_row([what, report::count(opening), report::bytes(opening)]);
    }
    table
}
