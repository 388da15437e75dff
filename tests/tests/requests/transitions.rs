//! Transitions between generations that share their caches and resident tables: each answer has the
//! rows of one generation, bit for bit, and rows that did not change are not read again. Callers
//! submit requests throughout.

use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::pipeline::RequestError;
use hatchback::request::serving::{Serving, Swapped};
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use hatchback::schema::{Placement, Schema};
use hatchback::unmix;
use hatchback_tests::models::install;
use hatchback_tests::versions::{Kind, Rows, Versions, copy};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const GENERATIONS: usize = 12;

/// Returns the values of the row of `order`, or zeros if there is none.
fn values(rows: &Rows, order: u64, dim: usize) -> Vec<f32> {
    let decode =
        |row: &Vec<u8>| row.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    rows.get(&order).map_or(vec![0.0; dim], decode)
}

/// Scores the rows of these orders and checks that every value is that of the generation that
/// answers. Returns its sequence.
fn score(serving: &Serving, schema: &Schema, versions: &Versions, orders: &[(u64, u64)]) -> usize {
    let mut batch = Batch::new(schema, orders.len());
    for (index, hashed) in orders {
        let sample =
            Sample { sparse: vec![vec![*index], vec![unmix(*hashed)]], ..Sample::default() };
        batch.push(schema, &sample).unwrap();
    }
    let ticket = loop {
        match serving.get("m").unwrap().submit(&batch, None) {
            Ok(ticket) => break ticket,
            Err(RequestError::Busy(_)) => std::thread::yield_now(),
            Err(e) => panic!("{e}"),
        }
    };
    let answer = ticket.wait().unwrap();
    let sequence = answer.generation().sequence as usize;
    let rows = &versions.rows[sequence - 1];
    for ((index, hashed), found) in orders.iter().zip(answer.scores().values.chunks(10)) {
        let expected = [values(&rows[0], *index, 4), values(&rows[1], *hashed, 6)].concat();
        assert_eq!(found, expected, "generation {sequence}: keys {index} and {hashed:x}");
    }
    sequence
}

/// A served model of several generations, and every key that any of them has.
struct Car {
    versions: Versions,
    folder: tempfile::TempDir,
    serving: Serving,
    schema: Arc<Schema>,
    pairs: Vec<(u64, u64)>,
}

fn budget() -> Budget {
    Budget {
        cache_bytes_max: 1 << 20,
        resident_bytes_max: 1 << 20,
        workers: 2,
        batch_max: 64,
        ..Budget::default()
    }
}

impl Car {
    fn new(versions: Versions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let flash = install(folder.path(), &versions.snapshots[0]);
        let serving = Serving::new(1 << 30, 64, Arc::new(SystemClock::default()));
        serving.load("m", &flash, budget()).unwrap();
        let schema = serving.model("m").unwrap().schema().clone();

        let orders = |table: usize| {
            let all = versions.rows.iter().flat_map(|rows| rows[table].keys().copied());
            all.collect::<BTreeSet<u64>>().into_iter().collect::<Vec<u64>>()
        };
        let (index, hashed) = (orders(0), orders(1));
        let longest = index.len().max(hashed.len());
        let pair = |i: usize| (index[i % index.len()], hashed[i % hashed.len()]);
        let pairs = (0..longest).map(pair).collect();
        Self { versions, folder, serving, schema, pairs }
    }

    fn flash(&self, bundle: &Path) -> Flash {
        install(self.folder.path(), bundle)
    }

    fn swap(&self, flash: &Flash) -> Swapped {
        self.serving.swap("m", flash, budget(), &|_| {}).unwrap()
    }

    fn score(&self, some: &[(u64, u64)]) -> usize {
        score(&self.serving, &self.schema, &self.versions, some)
    }

    fn score_everything(&self) {
        for some in self.pairs.chunks(64) {
            self.score(some);
        }
    }

    /// Runs `work` while two callers score, with their answers checked.
    fn under_load(&self, work: impl FnOnce()) {
        let (stop, served) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for caller in 0..2usize {
                let (stop, served) = (&stop, &served);
                scope.spawn(move || {
                    for some in self.pairs.chunks(7 + caller).cycle() {
                        self.score(some);
                        served.fetch_add(1, Ordering::Relaxed);
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                    }
                });
            }
            // The callers end also if `work` panics.
            let worked = catch_unwind(AssertUnwindSafe(work));
            stop.store(true, Ordering::Relaxed);
            worked.unwrap_or_else(|panic| resume_unwind(panic));
        });
        assert!(served.load(Ordering::Relaxed) > 0);
    }

    /// Returns how many lookups of existing rows missed since `before`, of all lookups.
    fn missed(&self, generation: usize) -> f64 {
        let before = self.serving.get("m").unwrap().stats().unwrap().counters;
        self.score_everything();
        let counters = self.serving.get("m").unwrap().stats().unwrap().counters.since(&before);
        let rows = &self.versions.rows[generation - 1];
        let gone = |(i, h): &&(u64, u64)| {
            usize::from(!rows[0].contains_key(i)) + usize::from(!rows[1].contains_key(h))
        };
        let gone: usize = self.pairs.iter().map(|pair| gone(&pair)).sum();
        counters.missed_lookups.saturating_sub(gone as u64) as f64 / counters.lookups as f64
    }
}

/// Both placements, with and without changes of keys.
fn kinds() -> impl Iterator<Item = Kind> {
    let placements = [Placement::Cached, Placement::Resident].into_iter();
    placements
        .flat_map(|placement| [false, true].map(|changes_keys| Kind { placement, changes_keys }))
}

#[test]
fn every_answer_is_of_one_generation_and_the_caches_stay_warm() {
    for kind in kinds() {
        let car = Car::new(Versions::of(kind, &[12; GENERATIONS - 1], 2000, 31));
        car.score_everything();
        car.under_load(|| {
            for generation in 2..=GENERATIONS {
                let flash = car.flash(&car.versions.deltas[generation - 1]);
                let swapped = car.swap(&flash);
                let changed: usize = (0..2).map(|t| flash.table(t).unwrap().changed()).sum();
                match kind {
                    Kind { placement: Placement::Cached, .. } => {
                        assert!(swapped.read > 100 && swapped.read <= changed, "{swapped:?}");
                        assert_eq!(swapped.patched, 0);
                    }
                    Kind { changes_keys: false, .. } => {
                        assert!(swapped.patched > 100 && swapped.read == 0, "{swapped:?}");
                    }
                    _ => assert_eq!(swapped.read, 0),
                }
            }
        });
        assert_eq!(car.score(&car.pairs[..1]), GENERATIONS);
        let missed = car.missed(GENERATIONS);
        assert!(missed <= 0.01, "{kind:?}: {missed} of the lookups missed");
    }
}

#[test]
fn a_table_without_rows_grows_by_deltas_and_loses_them_again() {
    for kind in kinds().filter(|kind| kind.changes_keys) {
        let car = Car::new(Versions::of(kind, &[1], 0, 4));
        assert!(car.versions.rows[0].iter().all(Rows::is_empty));
        let empty = Flash::open(&disk::system(), car.folder.path()).unwrap();
        car.score_everything();
        let full = car.flash(&car.versions.deltas[1]);
        for to in [&full, &empty, &full, &empty] {
            car.under_load(|| {
                car.swap(to);
            });
            car.score_everything();
        }
        assert_eq!(car.score(&car.pairs[..1]), 1);
    }
}

#[test]
fn a_rollback_brings_the_old_rows_back() {
    for kind in kinds() {
        let car = Car::new(Versions::of(kind, &[12], 2000, 77));
        let one = Flash::open(&disk::system(), car.folder.path()).unwrap();
        let two = car.flash(&car.versions.deltas[1]);
        car.score_everything();
        car.under_load(|| {
            for _ in 0..10 {
                for to in [&two, &one] {
                    let swapped = car.swap(to);
                    let is_cached = kind.placement == Placement::Cached;
                    assert!(!is_cached || swapped.read > 0, "{swapped:?}");
                }
            }
        });
        assert_eq!(car.score(&car.pairs[..1]), 1);
        // Keys that only the first generation has come back uncached.
        assert!(car.missed(1) <= 0.05, "{kind:?}");
    }
}

/// A sparse base has a page for each key, so the page alone says that an added row is gone again.
#[test]
fn a_rollback_takes_away_the_rows_that_a_delta_only_added() {
    for kind in kinds().filter(|kind| kind.changes_keys) {
        let car = Car::new(Versions::of(kind, &[84], 40, 9));
        let [before, after] = [0, 1].map(|generation| &car.versions.rows[generation][1]);
        assert!(before.keys().all(|key| after.contains_key(key)) && before.len() < after.len());
        let one = Flash::open(&disk::system(), car.folder.path()).unwrap();
        let two = car.flash(&car.versions.deltas[1]);
        for (to, generation) in [(&two, 2), (&one, 1), (&two, 2)] {
            car.swap(to);
            car.score_everything();
            assert_eq!(car.score(&car.pairs[..1]), generation);
        }
    }
}

/// A follower serves release 3, which leads from release 1 as release 2 does. It then finds release
/// 2 live, and has not seen the rollback to release 1.
#[test]
fn a_lower_release_of_another_branch_brings_its_own_rows() {
    for kind in kinds() {
        let mut versions = Versions::of(kind, &[12, 12], 2000, 63);
        versions.rows[2] = versions.rows[0].clone();
        let car = Car::new(versions);
        let branch = tempfile::tempdir().unwrap();
        copy(car.folder.path(), branch.path());
        let one = Flash::open(&disk::system(), car.folder.path()).unwrap();
        car.score_everything();
        car.swap(&car.flash(&car.versions.over(&one, 3, 1)));
        car.score_everything();
        assert_eq!(car.score(&car.pairs[..1]), 3);
        car.swap(&install(branch.path(), &car.versions.deltas[1]));
        car.score_everything();
        assert_eq!(car.score(&car.pairs[..1]), 2);
    }
}

/// The directory was removed, and made anew with another training whose sequence is lower. Its
/// files have the names of the old ones.
#[test]
fn a_directory_that_was_made_anew_brings_its_own_rows() {
    for kind in kinds() {
        let mut car = Car::new(Versions::of(kind, &[12], 2000, 65));
        car.swap(&car.flash(&car.versions.deltas[1]));
        car.score_everything();
        let (other, anew) = (Versions::of(kind, &[12], 2000, 66), tempfile::tempdir().unwrap());
        car.swap(&install(anew.path(), &other.snapshots[0]));
        car.versions = other;
        car.score_everything();
        assert_eq!(car.score(&car.pairs[..1]), 1);
    }
}

/// A damaged key page of the release that is left must not keep the one before from being served.
#[test]
fn a_rollback_from_a_damaged_delta_brings_the_old_rows_back() {
    for kind in kinds() {
        let car = Car::new(Versions::of(kind, &[12], 2000, 67));
        let one = Flash::open(&disk::system(), car.folder.path()).unwrap();
        car.swap(&car.flash(&car.versions.deltas[1]));
        car.score_everything();
        for table in 0..2 {
            let path = car.folder.path().join(format!("g000000000002/t000{table}-0000.seg"));
            let mut bytes = std::fs::read(&path).unwrap();
            // The last page is the trailer, the one before has keys.
            let at = bytes.len() - 2 * 4096 + 100;
            bytes[at] ^= 1;
            std::fs::write(&path, bytes).unwrap();
        }
        car.swap(&one);
        car.score_everything();
        assert_eq!(car.score(&car.pairs[..1]), 1);
    }
}

/// A snapshot has other files, so each cached row is compared before the swap.
#[test]
fn a_snapshot_keeps_the_rows_that_are_equal() {
    for kind in kinds() {
        let car = Car::new(Versions::of(kind, &[12], 2000, 5));
        car.score_everything();
        car.under_load(|| {
            let swapped = car.swap(&car.flash(&car.versions.snapshots[1]));
            if kind.placement == Placement::Cached {
                let [old, new] = [&car.versions.rows[0], &car.versions.rows[1]];
                let changed = (0..2).map(|t| {
                    old[t]
                        .iter()
                        .filter(|(key, row)| new[t].get(key).is_some_and(|r| r != *row))
                        .count()
                });
                let changed: usize = changed.sum();
                assert!(swapped.read <= changed && swapped.read > changed / 2, "{swapped:?}");
            }
        });
        assert_eq!(car.score(&car.pairs[..1]), 2);
        assert!(car.missed(2) <= 0.02, "{kind:?}");
    }
}

/// Returns how many files below `folder` this process has open.
fn open_files(folder: &Path) -> usize {
    let files = std::fs::read_dir("/proc/self/fd").unwrap();
    let below = |file: &Path| std::fs::read_link(file).is_ok_and(|path| path.starts_with(folder));
    files.filter(|file| below(&file.as_ref().unwrap().path())).count()
}

#[test]
fn swaps_leave_no_file_open_and_no_memory_taken() {
    let car = Car::new(Versions::of(Kind::default(), &[12], 500, 9));
    let one = Flash::open(&disk::system(), car.folder.path()).unwrap();
    let two = car.flash(&car.versions.deltas[1]);
    car.swap(&two);
    car.swap(&one);
    let (files, memory) = (open_files(car.folder.path()), car.serving.memory()[0].1.total());
    for _ in 0..50 {
        car.swap(&two);
        car.swap(&one);
    }
    assert_eq!(open_files(car.folder.path()), files);
    assert_eq!(car.serving.memory()[0].1.total(), memory);
}

/// A start after deltas that change nearly every row of a resident table plans the rows that the
/// table has: each changed row once. With the bytes of that plan the model opens.
#[test]
fn a_start_after_deltas_plans_the_rows_of_a_resident_table_once() {
    let kind = Kind { placement: Placement::Resident, ..Kind::default() };
    let versions = Versions::of(kind, &[1, 1], 2000, 41);
    let residents = |bundles: &[&Path]| {
        let folder = tempfile::tempdir().unwrap();
        let mut flashes = bundles.iter().map(|bundle| install(folder.path(), bundle));
        let flash = flashes.by_ref().last().unwrap();
        let plan = Model::from_flash(&flash, budget()).unwrap().memory().clone();
        let memory_bytes_max = plan.total() + plan.opening_bytes();
        let again = Model::from_flash(&flash, Budget { memory_bytes_max, ..budget() }).unwrap();
        assert_eq!(again.memory().to_string(), plan.to_string());
        plan.lines().into_iter().find(|(name, _)| *name == "resident tables").unwrap().1
    };
    let whole = residents(&[&versions.snapshots[2]]);
    let changed = residents(&[&versions.snapshots[0], &versions.deltas[1], &versions.deltas[2]]);
    // An index table with changed rows finds them by their hashes, 8.5 bytes a row.
    let rows: usize = versions.rows[2].iter().map(|rows| rows.len()).sum();
    let most = whole + 9 * rows as u64 + whole / 8;
    assert!(whole > 0 && changed <= most, "{changed} bytes with deltas, {whole} without");
}

/// A swap plans its memory before it takes it: where a resident table does not fit twice, none of
/// its rows is read, and so no damage of them is found. The planned bytes of an update suffice.
#[test]
fn a_swap_beyond_the_budget_reads_no_row_of_a_resident_table() {
    let kind = Kind { placement: Placement::Resident, ..Kind::default() };
    let versions = Versions::of(kind, &[1], 20_000, 43);
    let swap = |room: &dyn Fn(&Model) -> u64, is_damaged: bool| {
        let folder = tempfile::tempdir().unwrap();
        let one = install(folder.path(), &versions.snapshots[0]);
        let alone = Model::from_flash(&one, budget()).unwrap();
        let bytes = alone.memory().total() + room(&alone);
        let serving = Serving::new(bytes, 64, Arc::new(SystemClock::default()));
        serving.load("m", &one, budget()).unwrap();
        let two = install(folder.path(), &versions.snapshots[1]);
        if is_damaged {
            let segment = two.directory().join("g000000000002").join("t0000-0000.seg");
            let mut bytes = std::fs::read(&segment).unwrap();
            bytes[40] ^= 1;
            std::fs::write(&segment, bytes).unwrap();
        }
        let swapped = serving.swap("m", &two, budget(), &|_| {});
        let sequence = serving.model("m").unwrap().generation().sequence;
        assert_eq!(sequence, if swapped.is_ok() { 2 } else { 1 });
        swapped.map(drop).map_err(|e| e.to_string())
    };
    let refused = swap(&|_| 100 << 10, true).unwrap_err();
    assert!(refused.contains("beside the one that is served"), "{refused}");
    let refused = swap(&|_| 64 << 20, true).unwrap_err();
    assert!(refused.contains("t0000-0000.seg"), "{refused}");
    swap(&|model| model.update_bytes(), false).unwrap();
}
