//! The synthetic model that `bench request` and `bench concurrency` measure if the user names none.
//! Never opens the model.

use anyhow::{Context, Result};
use hatchback_tools::serve::progress_bar;
use hatchback_tools::workload::synthetic::pack_criteo;
use std::path::PathBuf;
use tempfile::TempDir;

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
