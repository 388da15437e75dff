//! A car under attack, for tests of hostile bundles and damaged flash. Contains no attack.

use crate::models::{FeaturePlan, ModelPlan, TablePlan, batch_of, install, open_model};
use crate::rewrite::Parts;
use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::Manifest;
use hatchback::clock::SystemClock;
use hatchback::flash::{Flash, FlashError};
use hatchback::io::page::PageBytes;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Worker;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, Placement};
use hatchback_tools::pack::spec::CodecChoice;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;

/// The table with rows by hash, in u8: 10 pages and one of fences.
pub const HASHED: usize = 0;
/// The table with rows by position, in f32, resident: 4 pages.
pub const INDEXED: usize = 1;
/// The table with a hot list, rows by hash, in f16.
pub const HOT: usize = 2;

/// Returns a model of this lineage and generation. Each generation has other content.
pub fn plan(lineage: &str, sequence: u64) -> ModelPlan {
    let tables = vec![
        TablePlan::cached(KeySpace::Sparse, 1200, 20, CodecChoice::U8),
        TablePlan {
            placement: Placement::Resident,
            ..TablePlan::cached(KeySpace::Index, 500, 8, CodecChoice::F32)
        },
        TablePlan { counts: true, ..TablePlan::cached(KeySpace::Sparse, 300, 6, CodecChoice::F16) },
    ];
    let feature = |table| FeaturePlan { hotness_max: 3, ..FeaturePlan::one_hot(table) };
    let features = (0..3).map(feature).collect();
    ModelPlan { name: lineage.to_owned(), sequence, seed: sequence, dense: 2, tables, features }
}

/// A car with generation 5 live and the parts of generation 6. `drop` checks that generation 5
/// still serves the same scores and that the true generation 6 still installs.
pub struct Victim {
    folder: TempDir,
    /// The flash directory.
    pub flash: PathBuf,
    /// The live record.
    pub live: Vec<u8>,
    scores: Vec<u32>,
    /// The parts of generation 6.
    pub next: Parts,
}

impl Default for Victim {
    fn default() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let flash = folder.path().join("flash");
        install(&flash, &plan("victim", 5).pack().bundle);
        let next = Parts::read(&plan("victim", 6).pack().bundle);
        let live = std::fs::read(flash.join("live.a")).unwrap();
        let mut victim = Self { folder, flash, live, scores: Vec::new(), next };
        victim.scores = victim.score();
        victim
    }
}

impl Victim {
    fn score(&self) -> Vec<u32> {
        let model = Arc::new(open_model(&self.flash, Budget::default()).unwrap());
        let samples: Vec<Sample> = (0..60).map(|id| plan("victim", 5).sample(id)).collect();
        let batch = batch_of(&model, &samples);
        let mut worker = Worker::new(model, Arc::new(SystemClock::default()));
        let scores = worker.score(&batch, None).unwrap();
        assert_eq!(scores.status().damaged, 0);
        scores.values.iter().map(|v| v.to_bits()).collect()
    }

    /// Returns the path of the attacking bundle.
    pub fn bundle(&self) -> PathBuf {
        self.folder.path().join("attack.bundle")
    }

    /// Installs these bytes.
    ///
    /// # Errors
    /// Those of `Flash::install`.
    pub fn install(&self, bundle: &[u8]) -> Result<Flash, FlashError> {
        std::fs::write(self.bundle(), bundle).unwrap();
        Flash::install(
            &hatchback::io::disk::system(),
            &self.flash,
            &mut BundleReader::open(&self.bundle())?,
            |_| {},
        )
    }

    /// Checks that the install of these bytes fails with an error that names a file and all
    /// `texts`.
    pub fn refuses(&self, bundle: &[u8], texts: &[&str]) {
        let error = self
            .install(bundle)
            .err()
            .unwrap_or_else(|| panic!("installed: {texts:?}"))
            .to_string();
        let root = self.folder.path().display().to_string();
        assert!(error.starts_with(&root), "the error names no file: {error}");
        texts.iter().for_each(|text| assert!(error.contains(text), "no `{text}` in: {error}"));
        assert_eq!(std::fs::read(self.flash.join("live.a")).unwrap(), self.live, "{error}");
    }

    /// Returns a changed generation 6 with valid hashes.
    pub fn attacked(&self, change: impl FnOnce(&mut Parts)) -> Vec<u8> {
        let mut parts = self.next.clone();
        change(&mut parts);
        parts.bytes()
    }

    /// Checks that generation 6 with a changed manifest is refused.
    pub fn refuses_manifest(&self, change: impl FnOnce(&mut Manifest), texts: &[&str]) {
        self.refuses(&self.attacked(|p| change(&mut p.manifest)), texts);
    }

    /// Checks that generation 6 with changed pages of a table is refused.
    pub fn refuses_segment(
        &self,
        table: usize,
        edit: impl FnOnce(&mut Vec<PageBytes>),
        texts: &[&str],
    ) {
        self.refuses(&self.attacked(|p| p.edit_segment(table, edit)), texts);
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        assert!(self.score() == self.scores, "generation 5 has other scores");
        let flash = self.install(&self.next.clone().bytes()).unwrap();
        assert_eq!(flash.manifest().generation.sequence, 6);
        assert!(self.score() != self.scores);
    }
}
