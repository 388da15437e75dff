//! Clustered segments, which repeat the most used rows in order of co-access. Every lookup returns
//! the row of the base, bit for bit, and never a stale row, also after deltas, rollbacks,
//! compactions and damage.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback::bundle::BundleReader;
use hatchback::bundle::manifest::Manifest;
use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::flash::segment::Part;
use hatchback::flash::table::{CLUSTERED, TableRows};
use hatchback::io::disk;
use hatchback::io::page::{AlignedPage, PageBytes};
use hatchback::maintenance::compact::Compaction;
use hatchback::maintenance::scrub::Scrub;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Worker;
use hatchback::schema::KeySpace;
use hatchback::schema::sample::Sample;
use hatchback_tests::models::{FeaturePlan, ModelPlan, Packed, TablePlan, batch_of};
use hatchback_tests::random::Random;
use hatchback_tests::reference::same_bits;
use hatchback_tests::rewrite::{Parts, count, keys_on, kind, pages_of, renumber, reseal};
use hatchback_tests::versions::{Rows, Versions};
use hatchback_tests::victim::{HASHED, HOT, Victim};
use hatchback_tools::pack::spec::CodecChoice;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

fn plan(seed: u64, counts: bool) -> ModelPlan {
    let mut random = Random::new(seed);
    let table = |keys, codec, random: &mut Random| TablePlan {
        counts,
        ..TablePlan::cached(keys, 100 + random.below(1500), 1 + random.below(40) as usize, codec)
    };
    let tables = vec![
        table(KeySpace::Sparse, CodecChoice::U8, &mut random),
        table(KeySpace::Index, CodecChoice::F16, &mut random),
    ];
    let feature = |table| FeaturePlan { hotness_max: 6, ..FeaturePlan::one_hot(table) };
    let features = vec![feature(0), feature(1), feature(0)];
    ModelPlan { name: "clustered".to_owned(), sequence: 1, seed, dense: 0, tables, features }
}

fn worker(packed: &Packed) -> Worker {
    let budget = Budget { cache_bytes_max: 64 << 10, ..Budget::default() };
    let model = Model::open(&disk::system(), &packed.install(), budget).unwrap();
    Worker::new(Arc::new(model), Arc::new(SystemClock::default()))
}

#[test]
fn clustered_lookups_are_those_of_key_order() {
    for seed in 0..40 {
        let (packed, key_order) = (plan(seed, true).pack(), plan(seed, false).pack());
        let (mut clustered, mut key_order) = (worker(&packed), worker(&key_order));
        for number in 0..2 {
            let flash = Flash::open(&disk::system(), &packed.folder().join("flash")).unwrap();
            assert!(
                flash.table(number).unwrap().clustered().is_some_and(|p| p.counts().rows > 50),
                "seed {seed}"
            );
        }
        let samples: Vec<Sample> = (0..200).map(|id| plan(seed, true).sample(id)).collect();
        for samples in samples.chunks(20) {
            let batch = batch_of(&Arc::clone(clustered.model()), samples);
            let expected = key_order.score(&batch, None).unwrap();
            let (values, statuses) = (expected.values.to_vec(), expected.statuses.to_vec());
            let found = clustered.score(&batch, None).unwrap();
            assert!(same_bits(found.values, &values), "seed {seed}");
            assert_eq!(found.statuses, statuses, "seed {seed}");
        }
    }
}

/// Returns the newest row of each key, read through its one page, and the number of pages that were
/// clustered.
fn looked_up(
    table: &TableRows,
    keys: KeySpace,
    orders: impl Iterator<Item = u64>,
) -> (Rows, usize) {
    let (mut rows, mut clustered, mut page) = (Rows::new(), 0, AlignedPage::zeroed());
    for order in orders {
        let key = if keys == KeySpace::Sparse { hatchback::unmix(order) } else { order };
        let Some(place) = table.locate(key) else { continue };
        let segment = table.segment(place);
        segment.read_page(place.page, &mut page).unwrap();
        let checked = segment.check(place.page, &page.0).unwrap();
        if let Some(row) = segment.row(&checked, key) {
            rows.insert(order, row.to_vec());
            clustered += usize::from(place.segment == CLUSTERED);
        }
    }
    (rows, clustered)
}

/// Looks up every key that any generation has and checks that the rows are those of `generation`.
/// Returns how many rows of each table came from clustered pages.
fn check(flash: &Flash, versions: &Versions, generation: usize) -> [usize; 2] {
    assert_eq!(flash.manifest().generation.sequence as usize, generation);
    std::array::from_fn(|t| {
        let all: BTreeSet<u64> =
            versions.rows.iter().flat_map(|rows| rows[t].keys().copied()).collect();
        let keys = flash.manifest().schema.tables[t].keys;
        let (rows, clustered) = looked_up(&flash.table(t).unwrap(), keys, all.into_iter());
        assert!(rows == versions.rows[generation - 1][t], "table {t} of generation {generation}");
        clustered
    })
}

fn install(directory: &Path, bundle: &Path) -> Flash {
    Flash::install(&disk::system(), directory, &mut BundleReader::open(bundle).unwrap(), |_| ())
        .unwrap()
}

#[test]
fn changed_rows_are_never_read_from_clustered_pages() {
    let (versions, folder) = (Versions::new(3, 900, 21), tempfile::tempdir().unwrap());
    let flash = install(folder.path(), &versions.deltas[0]);
    assert_eq!(flash.table(0).unwrap().changed(), 0, "a clustered row is no change");

    let at_first = check(&flash, &versions, 1);
    assert_eq!(at_first, [256, 256]);
    let flash = install(folder.path(), &versions.deltas[1]);
    let over = check(&flash, &versions, 2);

    for table in [0, 1].map(|t| flash.table(t).unwrap()) {
        let delta = table.segments()[1].counts();
        assert_eq!(table.changed() as u64, delta.rows + delta.deletes);
    }
    assert!(over.iter().zip(&at_first).all(|(o, f)| o < f && *o > 100), "{over:?}");

    // After a rollback to the snapshot, every clustered row is current again. Then the deltas
    // follow anew.
    let flash = flash.rollback().unwrap();
    assert_eq!(check(&flash, &versions, 1), at_first);

    install(folder.path(), &versions.deltas[1]);
    let mut flash = install(folder.path(), &versions.deltas[2]);
    check(&flash, &versions, 3);

    for table in 0..2 {
        let mut merge = Compaction::begin(&flash, table).unwrap().unwrap();
        while merge.step(&flash, 2, u64::MAX).unwrap() {}
        merge.finish(&mut flash).unwrap();
    }

    assert_eq!(check(&flash, &versions, 3), [0, 0], "a merged table has no clustered rows");
    let file = folder.path().join("g000000000001/t0000-0001.seg");
    assert!(file.exists(), "generation 2 is retained and reads it");

    // A snapshot brings a new clustered segment. The old file is removed when no generation
    // references it.
    let other = Versions::new(4, 900, 21);
    let flash = install(folder.path(), &other.snapshots[3]);
    assert_eq!(check(&flash, &other, 4), [256, 256]);
    assert!(!file.exists());
}

#[test]
fn a_damaged_clustered_page_is_found_and_repaired() {
    let (versions, folder) = (Versions::new(1, 900, 22), tempfile::tempdir().unwrap());
    let flash = install(folder.path(), &versions.deltas[0]);
    let path = folder.path().join("g000000000001/t0001-0001.seg");
    let good = std::fs::read(&path).unwrap();
    let mut bad = good.clone();
    bad[4096 + 1000] ^= 4;
    std::fs::write(&path, &bad).unwrap();
    let scrub = || {
        let mut scrub = Scrub::default();
        while scrub.step(&flash, 3) {}
        scrub.damage
    };
    let damage = scrub();
    assert_eq!(damage.len(), 1);
    assert_eq!((damage[0].table, damage[0].part, damage[0].page), (1, Part::Clustered, 1));
    let page: PageBytes = good[4096..8192].try_into().unwrap();
    flash.repair(&damage[0], &page).unwrap();
    assert_eq!(scrub(), []);
    check(&flash, &versions, 1);
}

/// Attacks the clustered segment of the table with counts and checks that it is refused.
fn refuses(victim: &Victim, edit: impl FnOnce(&mut Vec<PageBytes>), texts: &[&str]) {
    victim.refuses(&victim.attacked(|p| edit_clustered(p, edit)), texts);
}

fn keys_page(pages: &[PageBytes]) -> usize {
    pages.iter().position(|p| kind(p) == 5).unwrap()
}

fn edit_clustered(parts: &mut Parts, edit: impl FnOnce(&mut Vec<PageBytes>)) {
    let blob = parts.manifest.tables[HOT].clustered.unwrap();
    let mut pages = pages_of(&parts.content(blob));
    edit(&mut pages);
    parts.set_content(blob, &pages.concat());
}

#[test]
fn clustered_rows_that_are_not_the_bases() {
    let victim = Victim::default();
    let another_value = |pages: &mut Vec<PageBytes>| {
        let last_row = 16 + 20 * count(&pages[0]) - 12;
        pages[0][last_row] ^= 1;
        reseal(&mut pages[0]);
    };

    refuses(
        &victim,
        another_value,
        &["t0002-0000.seg: clustered: row of key order", "differs from the base"],
    );

    // Another key instead of the last one, in the page and in the list of keys.
    let another_key = |pages: &mut Vec<PageBytes>| {
        let last = keys_on(pages, 0).len() - 1;
        for page in [0, keys_page(pages)] {
            pages[page][16 + 8 * last..24 + 8 * last].fill(0xff);
            reseal(&mut pages[page]);
        }
    };

    refuses(
        &victim,
        another_key,
        &["t0002-0000.seg: clustered: key order 0xffffffffffffffff is not in the base"],
    );

    let swapped = |pages: &mut Vec<PageBytes>| {
        (0..8).for_each(|i| pages[0].swap(16 + i, 24 + i));
        reseal(&mut pages[0]);
    };
    refuses(&victim, swapped, &["t0002-0001.seg: page 0: keys do not ascend at entry 1"]);

    let wrong_keys = |pages: &mut Vec<PageBytes>| {
        let page = keys_page(pages);
        pages[page][16] ^= 1;
        reseal(&mut pages[page]);
    };

    refuses(&victim, wrong_keys, &["t0002-0001.seg: keys: entry 0 is not"]);
}

#[test]
fn clustered_segments_that_do_not_belong() {
    let victim = Victim::default();
    let deletes = |pages: &mut Vec<PageBytes>| {
        let at = keys_page(pages);
        let mut page = pages[at];
        page[14] = 6;
        pages.insert(at + 1, page);
        renumber(pages, at as u32, 2);
    };

    refuses(&victim, deletes, &["t0002-0001.seg: deletes: only a delta deletes keys"]);
    let segment = |m: &Manifest, t: usize| Some(m.tables[t].segment);
    victim.refuses_manifest(
        |m| m.tables[HASHED].clustered = segment(m, HASHED),
        &["t0000-0001.seg: page 0"],
    );
    victim.refuses_manifest(
        |m| m.tables[HASHED].clustered = m.tables[HOT].clustered,
        &["t0000-0001.seg: page 0"],
    );
    victim.refuses_manifest(
        |m| m.tables[HOT].clustered = segment(m, HOT),
        &["t0002-0001.seg: page 0"],
    );
    victim.refuses_manifest(
        |m| m.tables[HOT].clustered = Some(99),
        &["manifest: tables[2].clustered: 99 of"],
    );
    victim.refuses_manifest(
        |m| m.parent = Some(5),
        &["tables[2].clustered: only a snapshot has a clustered segment"],
    );
}

#[test]
fn clustered_files_missing_on_flash() {
    let victim = Victim::default();
    let path = victim.flash.join("g000000000005").join("t0002-0001.seg");
    let whole = std::fs::read(&path).unwrap();
    let error = || {
        Model::open(&disk::system(), &victim.flash, Budget::default()).err().unwrap().to_string()
    };
    std::fs::remove_file(&path).unwrap();
    assert!(error().contains("t0002-0001.seg: No such file"));
    for length in [0, 1, whole.len() - 4096, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        assert!(error().contains("t0002-0001.seg"));
    }
    std::fs::write(&path, whole).unwrap();
}
