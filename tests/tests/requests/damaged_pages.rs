//! Damaged pages on flash: their keys, and no others, get the default row and the status `damaged`.
//! Never a wrong row, never a crash.

use hatchback::LookupStatus;
use hatchback::clock::SystemClock;
use hatchback::io::page::PageBytes;
use hatchback::limits::PAGE_BYTES;
use hatchback::model::budget::Budget;
use hatchback::request::worker::Worker;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, MissPolicy, Placement};
use hatchback_tests::models::{FeaturePlan, ModelPlan, Packed, TablePlan, batch_of, open_model};
use hatchback_tests::reference::{Reference, same_bits};
use hatchback_tests::rewrite::{keys_on, kind, pages_of};
use hatchback_tools::pack::spec::CodecChoice;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const KEYS_A_BAG: usize = 4;

/// A model with one table and a feature of four keys.
struct Fixture {
    packed: Packed,
    reference: Reference,
    flash: PathBuf,
    samples: Vec<Sample>,
}

impl Fixture {
    fn new(change: impl FnOnce(&mut TablePlan)) -> Self {
        let mut table = TablePlan::cached(KeySpace::Sparse, 1200, 20, CodecChoice::U8);
        change(&mut table);
        let feature = FeaturePlan { hotness_max: KEYS_A_BAG as u32, ..FeaturePlan::one_hot(0) };
        let (tables, features) = (vec![table], vec![feature]);
        let plan = ModelPlan {
            name: "damaged".to_owned(),
            sequence: 1,
            seed: 3,
            dense: 0,
            tables,
            features,
        };
        let packed = plan.pack();
        let reference = Reference::new(&packed.schema, &packed.rows);
        let sample = |bag: &[u64]| Sample { sparse: vec![bag.to_vec()], ..Sample::default() };
        let samples = packed.rows[0].all_keys().chunks(KEYS_A_BAG).map(sample).collect();
        Self { flash: packed.install(), reference, samples, packed }
    }

    fn segment(&self) -> PathBuf {
        self.flash.join("g000000000001").join("t0000-0000.seg")
    }

    fn pages(&self) -> Vec<PageBytes> {
        pages_of(&std::fs::read(self.segment()).unwrap())
    }

    /// The middle data page.
    fn middle(&self) -> usize {
        let data = self.pages().iter().filter(|p| kind(p) < 3).count();
        assert!(data > 4);
        data / 2
    }

    fn write(&self, pages: &[PageBytes]) {
        std::fs::write(self.segment(), pages.concat()).unwrap();
    }

    fn flip(&self, page: usize, bit: usize) {
        let mut pages = self.pages();
        pages[page][bit / 8] ^= 1 << (bit % 8);
        self.write(&pages);
    }

    fn open(&self) -> Worker {
        let model = open_model(&self.flash, Budget::default()).unwrap();
        Worker::new(Arc::new(model), Arc::new(SystemClock::default()))
    }

    /// Looks up every key of the table. Exactly the `lost` keys must have the status `damaged`.
    /// Returns the sum of all statuses.
    fn check(&self, worker: &mut Worker, lost: &HashSet<u64>) -> LookupStatus {
        let lost = |_: usize, key: u64| lost.contains(&key);
        let mut sum = LookupStatus::default();
        for samples in self.samples.chunks(100) {
            let batch = batch_of(&Arc::clone(worker.model()), samples);
            let scores = worker.score(&batch, None).unwrap();
            for (i, sample) in samples.iter().enumerate() {
                let row = &scores.values[i * self.packed.schema.tables[0].dim as usize..];
                let expected = self.reference.output_without(sample, &lost);
                assert!(same_bits(&row[..expected.len()], &expected), "{sample:?}");
                assert_eq!(
                    scores.statuses[i],
                    self.reference.status_without(sample, &lost),
                    "{sample:?}"
                );
                sum.add(&scores.statuses[i]);
            }
        }
        assert_eq!(sum.lookups(), 1200);
        sum
    }

    fn open_error(&self) -> String {
        open_model(&self.flash, Budget::default()).err().expect("the model opened").to_string()
    }
}

/// A bit flips in the checksum, in the header, among the keys, among the rows, or in the padding.
#[test]
fn a_flipped_bit_costs_its_page_and_no_other() {
    for keys in [KeySpace::Index, KeySpace::Sparse] {
        for codec in [CodecChoice::U8, CodecChoice::F32] {
            for bit in
                [3, 8 * 5, 8 * 9, 8 * 12, 8 * 14, 8 * 20 + 1, 8 * 2000 + 7, 8 * PAGE_BYTES - 1]
            {
                let fixture = Fixture::new(|t| (t.keys, t.codec) = (keys, codec));
                let page = fixture.middle();
                let lost: HashSet<u64> = keys_on(&fixture.pages(), page).into_iter().collect();
                fixture.flip(page, bit);
                let mut worker = fixture.open();
                // In the second turn the rows of the other pages come from the cache.
                for turn in 1..=2 {
                    let status = fixture.check(&mut worker, &lost);
                    assert_eq!(status.damaged as usize, lost.len());
                    assert!(lost.len() > 20 && status.fresh as usize == 1200 - lost.len());
                    assert!(worker.counters().pages_damaged >= turn);
                }
            }
        }
    }
}

#[test]
fn a_damaged_page_is_counted_once_a_request() {
    let fixture = Fixture::new(|_| ());
    let lost = keys_on(&fixture.pages(), fixture.middle());
    fixture.flip(fixture.middle(), 8 * 100);
    let mut worker = fixture.open();
    let sample = Sample { sparse: vec![lost[..KEYS_A_BAG].to_vec()], ..Sample::default() };
    let batch = batch_of(&Arc::clone(worker.model()), &[sample.clone(), sample]);
    for turn in 1..=3 {
        let status = worker.score(&batch, None).unwrap().status();
        assert_eq!(
            status,
            LookupStatus { damaged: 2 * KEYS_A_BAG as u32, ..LookupStatus::default() }
        );
        assert_eq!((worker.counters().pages, worker.counters().pages_damaged), (turn, turn));
    }
}

/// Whole pages at the wrong place, as after a misdirected write.
#[test]
fn a_misplaced_page_is_damage() {
    for keys in [KeySpace::Index, KeySpace::Sparse] {
        let fixture = Fixture::new(|t| t.keys = keys);
        let (mut pages, page) = (fixture.pages(), fixture.middle());
        let lost = keys_on(&pages, page).into_iter().chain(keys_on(&pages, page + 1)).collect();
        pages.swap(page, page + 1);
        fixture.write(&pages);
        fixture.check(&mut fixture.open(), &lost);
    }
}

#[test]
fn pages_of_zeros_are_damage() {
    let fixture = Fixture::new(|_| ());
    let mut pages = fixture.pages();
    let lost = (2..5).flat_map(|page| keys_on(&pages, page)).collect();
    pages[2..5].fill([0; PAGE_BYTES]);
    fixture.write(&pages);
    fixture.check(&mut fixture.open(), &lost);
}

/// The file is truncated while the model serves.
#[test]
fn a_file_that_shrinks_is_damage() {
    let fixture = Fixture::new(|t| t.keys = KeySpace::Index);
    let (pages, page) = (fixture.pages(), fixture.middle());
    let data = pages.iter().filter(|p| kind(p) < 3).count();
    let lost = (page..data).flat_map(|number| keys_on(&pages, number)).collect();
    let mut worker = fixture.open();
    let file = std::fs::File::options().write(true).open(fixture.segment()).unwrap();
    file.set_len((page * PAGE_BYTES + 100) as u64).unwrap();
    fixture.check(&mut worker, &lost);
}

#[test]
fn damage_found_by_a_deferred_fetch_is_not_cached() {
    let fixture = Fixture::new(|t| t.miss = MissPolicy::Default);
    let lost: HashSet<u64> = keys_on(&fixture.pages(), fixture.middle()).into_iter().collect();
    fixture.flip(fixture.middle(), 8 * 1000);
    let mut worker = fixture.open();
    let batches: Vec<_> =
        fixture.samples.chunks(100).map(|s| batch_of(worker.model(), s)).collect();
    for batch in &batches {
        assert_eq!(worker.score(batch, None).unwrap().status().fresh, 0);
    }
    assert_eq!(worker.fetch_deferred(usize::MAX), 1200 - lost.len());
    let (mut fresh, mut defaulted) = (0, 0);
    for batch in &batches {
        let status = worker.score(batch, None).unwrap().status();
        (fresh, defaulted) = (fresh + status.fresh, defaulted + status.defaulted);
    }
    assert_eq!((fresh as usize, defaulted as usize), (1200 - lost.len(), lost.len()));
}

/// The start preloads the hot list. A damaged page leaves its rows out of the cache.
#[test]
fn a_damaged_page_does_not_stop_the_start_of_a_cached_table() {
    let fixture = Fixture::new(|t| t.counts = true);
    let lost: HashSet<u64> = keys_on(&fixture.pages(), fixture.middle()).into_iter().collect();
    fixture.flip(fixture.middle(), 8 * 1000);
    let mut worker = fixture.open();
    assert!(worker.model().cache_slots() > 1200);
    fixture.check(&mut worker, &lost);
    let counters = worker.counters();
    assert!(counters.missed_lookups < counters.cached_lookups / 2, "nothing was preloaded");
}

/// A start does not check the hot list. A shortened, damaged or missing one costs hits only.
#[test]
fn a_damaged_hot_list_does_not_change_any_score() {
    let fixture = Fixture::new(|t| t.counts = true);
    let path = fixture.segment().with_file_name("t0000.hot");
    let list = std::fs::read(&path).unwrap();
    let absent_keys: Vec<u8> = list.iter().map(|byte| !byte).collect();
    for bytes in [&list[..8 * 10 + 3], &absent_keys, &[]] {
        std::fs::write(&path, bytes).unwrap();
        fixture.check(&mut fixture.open(), &HashSet::new());
    }
    std::fs::remove_file(&path).unwrap();
    fixture.check(&mut fixture.open(), &HashSet::new());
}

fn names(error: &str, path: &Path, what: &str) {
    assert!(error.starts_with(&path.display().to_string()) && error.contains(what), "{error}");
}

/// A resident table must be whole: the model does not open, and the error names the page.
#[test]
fn a_model_with_a_damaged_resident_table_does_not_open() {
    for keys in [KeySpace::Index, KeySpace::Sparse] {
        let fixture = Fixture::new(|t| (t.keys, t.placement) = (keys, Placement::Resident));
        fixture.flip(fixture.middle(), 8 * 1000);
        let page = format!("page {}: checksum", fixture.middle());
        names(&fixture.open_error(), &fixture.segment(), &page);
    }
}

#[test]
fn a_model_with_a_damaged_trailer_or_fence_does_not_open() {
    let fixture = Fixture::new(|_| ());
    let pages = fixture.pages();
    for page in [pages.len() - 1, pages.len() - 2] {
        fixture.flip(page, 8 * 30);
        names(&fixture.open_error(), &fixture.segment(), &format!("page {page}: checksum"));
        fixture.write(&pages);
    }
    fixture.check(&mut fixture.open(), &HashSet::new());
    for length in
        [0, 1, PAGE_BYTES - 1, PAGE_BYTES * (pages.len() - 1), PAGE_BYTES * pages.len() - 1]
    {
        std::fs::write(fixture.segment(), &pages.concat()[..length]).unwrap();
        names(&fixture.open_error(), &fixture.segment(), "");
    }
    std::fs::remove_file(fixture.segment()).unwrap();
    names(&fixture.open_error(), &fixture.segment(), "No such file");
}
