//! The models of a car: finds their directories, opens them, and loads them into a server. Never
//! writes to flash.

use crate::cli::NamedDirectory;
use anyhow::{Context, Result};
use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::request::serving::{Served, Serving};
use hatchback::targets::{DeviceKind, Target};
use std::io::ErrorKind::NotFound;
use std::path::Path;
use std::sync::Arc;

/// Returns the folders in `folder`, sorted, each with its own name.
pub fn folders_in(folder: &Path) -> Vec<NamedDirectory> {
    let entries = std::fs::read_dir(folder).inspect_err(|e| {
        if e.kind() != NotFound {
            log::error!("{}: {e}", folder.display());
        }
    });
    let entries = entries.into_iter().flatten().flatten().map(|entry| entry.path());

    // Every ext4 file system has a `lost+found`.
    let mut folders: Vec<_> =
        entries.filter(|path| path.is_dir() && !path.ends_with("lost+found")).collect();
    folders.sort();

    let with_name = |directory: std::path::PathBuf| {
        let name = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
        NamedDirectory { name: Some(name), directory }
    };
    folders.into_iter().map(with_name).collect()
}

/// Returns the models in `folder`: the folders with a live record, which may be damaged.
pub fn models_in(folder: &Path) -> Vec<NamedDirectory> {
    let disk = disk::system();
    let has_live_record =
        |model: &NamedDirectory| Flash::has_live_record(disk.as_ref(), &model.directory);
    folders_in(folder).into_iter().filter(has_live_record).collect()
}

/// Adds to `models` those that have a directory in `sync` but no generation in `folder` yet.
pub fn add_awaited(models: &mut Vec<NamedDirectory>, sync: &[NamedDirectory], folder: &Path) {
    for name in sync.iter().filter_map(|sync| sync.name.as_ref()) {
        if !models.iter().any(|model| model.name.as_ref() == Some(name)) {
            models.push(NamedDirectory { name: Some(name.clone()), directory: folder.join(name) });
        }
    }
}

/// Opens the flash directory of `model`. Returns the open directory and the name that the model is
/// served under: the name on the command line, or its lineage.
///
/// # Errors
/// Nothing is live in the directory, or its live record is damaged.
pub fn open(model: &NamedDirectory) -> Result<(String, Flash)> {
    let flash = Flash::open(&disk::system(), &model.directory)?;
    let lineage = &flash.manifest().generation.lineage;
    Ok((model.name.as_ref().unwrap_or(lineage).clone(), flash))
}

/// Returns a server without models, within the budget of `target`, that computes on `device`.
/// `front` is the memory of the front door. `path` is the target's file, for error messages.
///
/// # Errors
/// The machine has no such device.
pub fn new_serving(
    target: &Target,
    path: &Path,
    device: DeviceKind,
    front: &[(&'static str, u64)],
) -> Result<Arc<Serving>> {
    let device = device.open(target.tegra_profile).with_context(|| {
        format!("{}: cannot open the device (`--device cpu` needs none)", path.display())
    })?;
    log::info!("lookups on: {}", device.name());

    let (budget, clock) = (target.budget, Arc::new(SystemClock::default()));
    let serving = Serving::new(budget.memory_bytes_max, budget.reads_max, clock);
    let serving = front.iter().fold(serving, |serving, (line, bytes)| serving.beside(line, *bytes));
    Ok(Arc::new(serving.on(device, target.gpu_dense())))
}

/// Loads `model` into `serving`. Returns its handle.
///
/// # Errors
/// The model cannot be opened, or does not fit the budget beside the others.
pub fn load(serving: &Serving, target: &Target, model: &NamedDirectory) -> Result<Arc<Served>> {
    let (name, flash) = open(model)?;
    let served = serving.load(&name, &flash, target.budget)?;
    log::info!("serving {} as `{name}` for {}", flash.manifest().generation, target.triple);
    Ok(served)
}

/// Logs the memory of every model, line by line, and the sum.
pub fn log_memory(serving: &Serving) {
    let plans = serving.memory();
    for (name, plan) in &plans {
        log::info!("memory of `{name}`, all taken now:\n{plan}");
    }
    let beside = serving.memory_beside();
    if beside.total() > 0 {
        log::info!("memory beside the models, at most:\n{beside}");
    }
    let (total, max) = (serving.memory_taken(), serving.memory_bytes_max());
    log::info!("memory in all: {total} of {max} bytes");
}
