//! The model of `bench request`, `concurrency` and `daemon`: that of the user, or else a synthetic
//! one. Never opens the model.

use anyhow::{Context, Result};
use clap::Args;
use hatchback_tools::report;
use hatchback_tools::serve::{ServeArgs, progress_bar};
use hatchback_tools::workload::synthetic::pack_criteo;
use std::path::PathBuf;
use tempfile::TempDir;

/// The model to measure
#[derive(Args, Debug)]
pub struct ModelArgs {
    /// A bundle or a flash directory [default: a synthetic model in the shape of MLPerf's Criteo]
    model: Option<PathBuf>,
    /// A smaller synthetic model, fewer points, less time
    #[arg(long)]
    pub quick: bool,
    /// Rows of the largest tables of the synthetic model [default: 400000; quick: 40000]
    #[arg(long)]
    pub rows_max: Option<u64>,
    /// Tables kept whole, MiB [default: the target's]
    #[arg(long, value_parser = report::args::mib)]
    resident_mib: Option<f64>,
    /// A target file that gives the budget
    #[arg(long)]
    pub target: Option<PathBuf>,
    /// Directory that the model is installed into [default: beside the bundle, or a temporary
    /// folder]
    #[arg(long)]
    flash: Option<PathBuf>,
}

impl ModelArgs {
    /// Returns the rows of the largest tables of the synthetic model.
    pub fn rows_max(&self) -> u64 {
        self.rows_max.unwrap_or(if self.quick { 40_000 } else { 400_000 })
    }

    /// Packs the synthetic model if the user names none.
    ///
    /// # Errors
    /// The bundle cannot be written.
    pub fn prepare(&self) -> Result<PreparedModel> {
        let made = match &self.model {
            None => Some(SyntheticModel::pack(self.rows_max())?),
            Some(_) => None,
        };
        let bundle = made.as_ref().map(SyntheticModel::bundle);
        let serve = ServeArgs {
            model: self.model.clone().or(bundle).context("no model")?,
            flash: self.flash.clone().or(made.as_ref().map(SyntheticModel::flash)),
            target: self.target.clone(),
            cache_mib: None,
            resident_mib: self.resident_mib,
            batch_max: None,
            device: None,
        };
        Ok(PreparedModel { serve, _made: made })
    }
}

/// The arguments that open a model, and the files of a synthetic one.
pub struct PreparedModel {
    pub serve: ServeArgs,
    _made: Option<SyntheticModel>,
}

/// The packed model in a temporary folder, which is removed on drop.
pub struct SyntheticModel {
    folder: TempDir,
}

impl SyntheticModel {
    /// Packs the model; its largest tables have `rows_max` rows.
    ///
    /// # Errors
    /// The bundle cannot be written.
    pub fn pack(rows_max: u64) -> Result<Self> {
        let made = Self { folder: tempfile::tempdir().context("a temporary folder")? };
        let bar = progress_bar(0, "packing", "{human_pos}/{human_len} rows");

        let packed = pack_criteo(rows_max, &made.bundle(), &mut |rows, total| {
            bar.set_length(total);
            bar.inc(rows);
        });
        bar.finish_and_clear();

        packed.map(|_| made)
    }

    /// Returns the path of the bundle.
    pub fn bundle(&self) -> PathBuf {
        self.folder.path().join("synthetic-criteo.hatch")
    }

    /// Returns the directory that `bench` installs the bundle into.
    pub fn flash(&self) -> PathBuf {
        self.folder.path().join("flash")
    }
}
