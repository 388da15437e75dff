//! Swaps a model on a GPU to another generation: its caches are kept, and the swap asks the GPU for
//! what changed only. Runs on the stand-in for the driver, or with `HATCHBACK_GPU=real` on the
//! machine's GPU.

use hatchback::clock::SystemClock;
use hatchback::model::budget::Budget;
use hatchback::request::serving::Serving;
use hatchback::schema::Placement;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use hatchback_kernels::cuda::Device;
use hatchback_tests::models::install;
use hatchback_tests::standin;
use hatchback_tests::versions::{Kind, Versions};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// The tests share one driver: the test that counts calls locks it for writing, the other for
/// reading.
static COUNTING: RwLock<()> = RwLock::new(());

/// After a swap to a delta on a GPU, unchanged rows are still cached and changed rows are those of
/// the new generation. The swap copies and launches for what changed only.
#[test]
fn a_swap_keeps_the_caches_on_the_gpu() {
    let _turn = standin::alone();
    let _shared = COUNTING.read().unwrap_or_else(PoisonError::into_inner);
    let versions = Versions::changing(&[12], 400, 31);
    let folder = tempfile::tempdir().unwrap();
    let flash = install(folder.path(), &versions.snapshots[0]);
    let budget = Budget { cache_bytes_max: 1 << 20, batch_max: 64, ..Budget::default() };
    let serving = Serving::new(1 << 30, 64, Arc::new(SystemClock::default()));
    let serving = serving.on(Device::Cuda(standin::gpu(21)), Default::default());
    serving.load("m", &flash, budget).unwrap();
    let schema = serving.model("m").unwrap().schema().clone();

    // The keys of both generations.
    let both = |t: usize| {
        let [old, new] = [0, 1].map(|g: usize| &versions.rows[g][t]);
        old.keys().filter(|order| new.contains_key(order)).copied().collect::<Vec<u64>>()
    };

    let (index, hashed) = (both(0), both(1));
    let pairs: Vec<(u64, u64)> = (0..index.len().max(hashed.len()))
        .map(|i| (index[i % index.len()], hashed[i % hashed.len()]))
        .collect();
    let everything = |generation: usize| {
        for some in pairs.chunks(64) {
            let mut batch = Batch::new(&schema, some.len());
            for (index, hashed) in some {
                let sparse = vec![vec![*index], vec![hatchback::unmix(*hashed)]];
                batch.push(&schema, &Sample { sparse, ..Sample::default() }).unwrap();
            }

            let ticket = serving.get("m").unwrap().submit(&batch, None).unwrap();
            let answer = ticket.wait().unwrap();
            for ((index, hashed), found) in some.iter().zip(answer.scores().values.chunks(10)) {
                let [a, b] = &versions.rows[generation];
                let bytes: Vec<u8> = found.iter().flat_map(|value| value.to_le_bytes()).collect();
                assert_eq!(bytes, [&a[index][..], &b[hashed][..]].concat());
            }
        }
    };

    everything(0);
    let flash = install(folder.path(), &versions.deltas[1]);
    let rested = AtomicUsize::new(0);
    let rest = |_| {
        rested.fetch_add(1, Ordering::Relaxed);
    };
    let swapped = serving.swap("m", &flash, budget, &rest).unwrap();
    let unchanged =
        |t: usize, order: &u64| versions.rows[0][t][order] == versions.rows[1][t][order];
    let alike = index.iter().filter(|o| unchanged(0, o)).count()
        + hashed.iter().filter(|o| unchanged(1, o)).count();
    let changed = index.len() + hashed.len() - alike;

    assert_eq!(swapped.read, changed, "{swapped:?}");
    assert!(changed > 20 && rested.load(Ordering::Relaxed) > 2);
    everything(1);
    let counters = serving.get("m").unwrap().stats().unwrap().counters;

    assert_eq!((counters.misses, counters.pages), (0, 0));
    assert!(serving.memory()[0].1.opening_bytes() > 0);
}

/// A rollback takes away a row that only the newer generation has, also from the copy on the GPU.
#[test]
fn a_rollback_takes_added_rows_from_a_resident_table_on_the_gpu() {
    let _turn = standin::alone();
    let _shared = COUNTING.read().unwrap_or_else(PoisonError::into_inner);
    let kind = Kind { placement: Placement::Resident, changes_keys: true };
    let versions = Versions::of(kind, &[84], 40, 9);
    let [before, after] = [0, 1].map(|generation| &versions.rows[generation][1]);
    let added: Vec<u64> = after.keys().filter(|o| !before.contains_key(o)).copied().collect();
    assert!(before.keys().all(|order| after.contains_key(order)) && !added.is_empty());

    let folder = tempfile::tempdir().unwrap();
    let budget = Budget { cache_bytes_max: 1 << 20, batch_max: 64, ..Budget::default() };
    let serving = Serving::new(1 << 30, 64, Arc::new(SystemClock::default()));
    let serving = serving.on(Device::Cuda(standin::gpu(21)), Default::default());
    let one = install(folder.path(), &versions.snapshots[0]);
    let served = serving.load("m", &one, budget).unwrap();
    let two = install(folder.path(), &versions.deltas[1]);
    let mut batch = Batch::new(served.model().unwrap().schema(), 1);
    let sparse = vec![vec![], vec![hatchback::unmix(added[0])]];
    batch.push(served.model().unwrap().schema(), &Sample { sparse, ..Sample::default() }).unwrap();
    for (to, has_row) in [(&two, true), (&one, false)] {
        serving.swap("m", to, budget, &|_| ()).unwrap();
        let ticket = served.submit(&batch, None).unwrap();
        let is_zero = ticket.wait().unwrap().scores().values.iter().all(|value| *value == 0.0);
        assert_eq!(is_zero, !has_row);
    }
}

/// A swap asks the GPU for launches and copies in proportion to the cached rows that changed. Rows
/// of resident tables are copied together before lookups pause; however many there are, the pause
/// has one launch and no wait. When the swap ends, the memory of the old generation is free.
#[test]
fn a_swap_asks_the_gpu_for_what_changed() {
    let _turn = standin::alone();
    let _alone = COUNTING.write().unwrap_or_else(PoisonError::into_inner);
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: counting launches: only the stand-in counts");
    };
    for placement in [Placement::Cached, Placement::Resident] {
        let kind = Kind { placement, changes_keys: false };
        let versions = Versions::of(kind, &[0, 100, 5], 12_000, 5);
        let folder = tempfile::tempdir().unwrap();
        let budget = Budget { cache_bytes_max: 4 << 20, batch_max: 64, ..Budget::default() };
        let serving = Serving::new(1 << 30, 64, Arc::new(SystemClock::default()));
        let serving = serving.on(Device::Cuda(standin::gpu(21)), Default::default());
        serving.load("m", &install(folder.path(), &versions.snapshots[0]), budget).unwrap();
        let (mut none, mut of_residents) = (None, Vec::new());
        for delta in &versions.deltas[1..] {
            let flash = install(folder.path(), delta);
            let before = stand_in.counts();
            let swapped = serving.swap("m", &flash, budget, &|_| ()).unwrap();
            let after = stand_in.counts();

            // The first delta changes no row: what it asks is the price of any swap.
            assert_eq!(after.bytes, before.bytes, "{placement:?}: {swapped:?}");
            let asked = [
                after.launches - before.launches,
                after.copies - before.copies,
                after.waits - before.waits,
            ];
            let base = *none.get_or_insert(asked);
            let [launches, copies, waits] = std::array::from_fn(|i| asked[i] - base[i]);
            let changed = (swapped.read + swapped.patched) as u64;
            let said = format!("{placement:?}: {swapped:?}, {launches} launches, {copies} copies");
            match placement {
                // Removed and inserted 2,048 at a time, with a few kernels each; no copy.
                Placement::Cached => {
                    assert!(launches <= 6 * changed.div_ceil(2048) && copies == 0, "{said}");
                    assert!((launches > 0) == (changed > 0), "{said}");
                }
                _ if changed > 0 => of_residents.push([changed, launches, copies, waits]),
                _ => assert_eq!([launches, copies, waits], [0; 3], "{said}"),
            }
        }
        if let [few, many] = *of_residents {
            assert!(many[0] > 10 * few[0] && many[1] == 1, "{few:?}, {many:?}");
            assert_eq!(few[1..], many[1..], "launches, copies, waits");
        }
        assert_eq!(of_residents.len(), if placement == Placement::Resident { 2 } else { 0 });
    }
}

/// The thread of a swap frees what the old generation had. Requests are answered while the driver
/// keeps that thread in a free, whichever it is.
#[test]
fn no_request_waits_for_a_free() {
    let _turn = standin::alone();
    let _alone = COUNTING.write().unwrap_or_else(PoisonError::into_inner);
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: a driver's frees cannot be held");
    };
    let kind = Kind { placement: Placement::Resident, changes_keys: false };
    let versions = Versions::of(kind, &[0, 100], 2_000, 5);
    let folder = tempfile::tempdir().unwrap();
    let budget = Budget { cache_bytes_max: 4 << 20, batch_max: 64, ..Budget::default() };
    let serving = Serving::new(1 << 30, 64, Arc::new(SystemClock::default()));
    let serving = serving.on(Device::Cuda(standin::gpu(21)), Default::default());
    let served =
        serving.load("m", &install(folder.path(), &versions.snapshots[0]), budget).unwrap();
    let schema = Arc::clone(served.model().unwrap().schema());
    let mut batch = Batch::new(&schema, 1);
    let first = *versions.rows[1][0].keys().next().unwrap();
    let second = hatchback::unmix(*versions.rows[1][1].keys().next().unwrap());
    let sample = Sample { sparse: vec![vec![first], vec![second]], ..Sample::default() };
    batch.push(&schema, &sample).unwrap();
    let score = || {
        served.submit(&batch, None).unwrap().wait().unwrap();
    };
    score();

    let delta = install(folder.path(), &versions.deltas[1]);
    stand_in.hold_frees(true);
    let mut of_new = 0;
    std::thread::scope(|scope| {
        let swap = scope.spawn(|| serving.swap("m", &delta, budget, &|_| ()).unwrap());
        while !swap.is_finished() {
            // Each worker has a turn. One that freed would never answer.
            for _ in 0..8 {
                score();
            }
            if stand_in.frees_held() > 0 {
                of_new += usize::from(served.model().unwrap().generation().sequence == 2);
                stand_in.let_free();
            }
        }
    });
    stand_in.hold_frees(false);
    assert!(of_new > 20, "{of_new} frees after the switch");
}
