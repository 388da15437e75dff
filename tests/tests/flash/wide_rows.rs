//! Sparse tables whose pages hold few rows. Their keys have hashes with equal top halves, as two of
//! any 100,000 keys have.

use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::maintenance::compact::Compaction;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Worker;
use hatchback::schema::KeySpace;
use hatchback::schema::sample::Sample;
use hatchback::unmix;
use hatchback_tests::models::{FeaturePlan, ModelPlan, TablePlan, TableRows, batch_of, install};
use hatchback_tests::onnx;
use hatchback_tools::import::RowSource;
use hatchback_tools::pack::spec::CodecChoice;
use hatchback_tools::pack::{Overrides, PackJob};
use std::path::Path;
use std::sync::Arc;

/// Returns the key of number `i`: five of them share the top half of their hash.
fn key(i: u64) -> u64 {
    unmix((7 + i / 5) << 32 | (i % 5) << 7)
}

/// Returns the rows of the keys of `numbers`.
fn rows(numbers: &[u64], dim: usize) -> TableRows {
    let row = |&i: &u64| (0..dim).map(move |column| (i * 1000) as f32 + column as f32);
    let values = numbers.iter().flat_map(row).collect();
    TableRows { keys: Some(numbers.iter().copied().map(key).collect()), values, dim, counts: None }
}

fn pack(folder: &Path, sequence: u64, rows: &TableRows, parent: Option<&Flash>) -> Flash {
    let table = TablePlan {
        default_zeros: true,
        ..TablePlan::cached(KeySpace::Sparse, 0, rows.dim, CodecChoice::F32)
    };
    let plan = ModelPlan {
        name: "wide".to_owned(),
        sequence,
        seed: 1,
        dense: 0,
        tables: vec![table],
        features: vec![FeaturePlan::one_hot(0)],
    };
    std::fs::write(folder.join("dense.onnx"), onnx::concat(&[("a".to_owned(), rows.dim)], "out"))
        .unwrap();
    std::fs::write(folder.join("probe.jsonl"), "").unwrap();
    let bundle = folder.join(format!("{sequence}.hatch"));
    let job = PackJob::new(plan.spec(), folder, Overrides::default());
    let sources = [Box::new(rows.clone()) as Box<dyn RowSource>];
    job.pack_rows(&sources, parent, &bundle, &mut |_, _| {}).unwrap();
    install(&folder.join("flash"), &bundle)
}

/// Each of the keys before `end` has its row; every one of `lost` has the default row.
fn check(flash: &Flash, dim: usize, end: u64, lost: &[u64]) {
    let model = Arc::new(Model::from_flash(flash, Budget::default()).unwrap());
    let mut worker = Worker::new(Arc::clone(&model), Arc::new(SystemClock::default()));
    for i in 0..end + 3 {
        let sample = Sample { sparse: vec![vec![key(i)]], ..Sample::default() };
        let scores = worker.score(&batch_of(&model, &[sample]), None).unwrap();
        let found = (scores.values[0], scores.values[dim - 1]);
        let first = (i * 1000) as f32;
        let expected = (first, first + (dim - 1) as f32);
        let is_there = i < end && !lost.contains(&i);
        assert_eq!(found, if is_there { expected } else { (0.0, 0.0) }, "key {i}, dim {dim}");
    }
}

#[test]
fn rows_whose_hashes_share_a_top_half_are_packed_found_and_merged() {
    // One, two, three and four rows a page.
    for dim in [768, 400, 300, 250] {
        let folder = tempfile::tempdir().unwrap();
        let first: Vec<u64> = (0..40).collect();
        let flash = pack(folder.path(), 1, &rows(&first, dim), None);
        check(&flash, dim, 40, &[]);

        let next: Vec<u64> = (0..60).filter(|i| *i != 12).collect();
        let mut flash = pack(folder.path(), 2, &rows(&next, dim), Some(&flash));
        check(&flash, dim, 60, &[12]);

        let mut merge = Compaction::begin(&flash, 0).unwrap().unwrap();
        while merge.step(&flash, 4, u64::MAX).unwrap() {}
        merge.finish(&mut flash).unwrap();
        let flash = Flash::open(&disk::system(), flash.directory()).unwrap();
        assert!(flash.record().live.tables[0].deltas.is_empty());
        check(&flash, dim, 60, &[12]);
    }
}
