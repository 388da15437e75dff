//! After warm-up a request allocates nothing, from its submission to the scores of the dense
//! network, whatever state its rows are in. A counting allocator proves it. The heap memory of a
//! model is within its memory plan.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback::Pooling;
use hatchback::clock::SystemClock;
use hatchback::flash::Flash;
use hatchback::io::disk;
use hatchback::io::page::AlignedPage;
use hatchback::io::reader::{PageReader, ReadMethod};
use hatchback::model::Model;
use hatchback::model::budget::Budget;
use hatchback::request::error::NotFinite;
use hatchback::request::pipeline::{RequestError, Ticket};
use hatchback::request::serving::Serving;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use hatchback::schema::{KeySpace, MissPolicy, Placement};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::{KeySpaces, RowKey};
use hatchback_kernels::cuda::Device;
use hatchback_tests::models::{FeaturePlan, ModelPlan, Packed, TablePlan, batch_for, install};
use hatchback_tests::{onnx, standin};
use hatchback_tools::pack::spec::CodecChoice;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

struct Counting;

static COUNTS: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// Bytes of the heap in use, and the most since `PEAK` was last set.
static HELD: AtomicI64 = AtomicI64::new(0);
static PEAK: AtomicI64 = AtomicI64::new(0);
/// Held by the test that runs: the counters are those of the whole process.
static ALONE: Mutex<()> = Mutex::new(());

fn hold(more: usize, less: usize) {
    let change = more as i64 - less as i64;
    PEAK.fetch_max(HELD.fetch_add(change, Ordering::Relaxed) + change, Ordering::Relaxed);
}

fn count() {
    if COUNTS.load(Ordering::Relaxed) {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator with its arguments unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        hold(layout.size(), 0);
        // SAFETY: the caller keeps the contract of the system's allocator.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        hold(0, layout.size());
        // SAFETY: the caller keeps the contract of the system's allocator.
        unsafe { System.dealloc(block, layout) }
    }
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        hold(bytes, layout.size());
        // SAFETY: the caller keeps the contract of the system's allocator.
        unsafe { System.realloc(block, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the allocations of all threads while `work` runs.
fn allocations(work: impl FnOnce()) -> u64 {
    ALLOCATIONS.store(0, Ordering::SeqCst);
    COUNTS.store(true, Ordering::SeqCst);
    work();
    COUNTS.store(false, Ordering::SeqCst);
    ALLOCATIONS.load(Ordering::SeqCst)
}

const BATCH_MAX: usize = 4;
/// Bytes of the heap that no line of the memory plan covers, at most.
const BESIDE: i64 = 256 << 10;
const NAME: &str = "m";

struct Fixture {
    packed: Packed,
    flash: Flash,
    /// Keys of each table.
    keys: Vec<Vec<u64>>,
    /// The device that looks up rows.
    device: Device,
}

impl Fixture {
    /// One table for each miss policy, and for each table a feature of up to three keys.
    fn new(device: Device) -> Self {
        let policies = [MissPolicy::Wait, MissPolicy::Deadline, MissPolicy::Default];
        let table = |miss| TablePlan {
            miss,
            ..TablePlan::cached(KeySpace::Sparse, 3000, 16, CodecChoice::U8)
        };
        let feature = |t| FeaturePlan { hotness_max: 3, ..FeaturePlan::one_hot(t) };
        let (tables, features) = (policies.map(table).to_vec(), (0..3).map(feature).collect());
        let plan = ModelPlan {
            name: "counted".to_owned(),
            sequence: 1,
            seed: 21,
            dense: 2,
            tables,
            features,
        };
        let packed = plan.pack();
        let flash = Flash::open(&disk::system(), &packed.install()).unwrap();
        let keys = packed.rows.iter().map(|rows| rows.all_keys()).collect();
        Self { packed, flash, keys, device }
    }

    fn serving(&self, change: impl FnOnce(&mut Budget)) -> Serving {
        serving_on(&self.device, &self.flash, change)
    }

    /// Returns a request of `n` samples for the keys from number `from` on, of every table or of
    /// one.
    fn batch(&self, n: usize, from: usize, table: Option<usize>) -> Batch {
        let bag = |t: usize, i: usize| match table {
            Some(only) if only != t => Vec::new(),
            _ => (0..3).map(|k| self.keys[t][(from + 3 * i + k) % 3000]).collect(),
        };
        let sample = |i| Sample {
            dense: vec![1.0; 2],
            sparse: (0..3).map(|t| bag(t, i)).collect(),
            ..Sample::default()
        };
        batch_for(&self.packed.schema, BATCH_MAX, &(0..n).map(sample).collect::<Vec<_>>())
    }
}

fn serving_on(device: &Device, flash: &Flash, change: impl FnOnce(&mut Budget)) -> Serving {
    let mut budget = Budget {
        cache_bytes_max: 1 << 20,
        batch_max: BATCH_MAX as u32,
        slots: 4,
        ..Budget::default()
    };
    change(&mut budget);
    let serving = Serving::new(1 << 30, 16, Arc::new(SystemClock::default()))
        .on(device.clone(), Default::default());
    serving.load(NAME, flash, budget).unwrap();
    serving
}

fn answer(serving: &Serving, batch: &Batch, timeout: Option<Duration>) {
    let deadline = timeout.map(|timeout| serving.now().saturating_add(timeout));
    // A request whose caller stopped waiting keeps its slot until a worker takes it.
    let ticket = loop {
        match serving.get(NAME).unwrap().submit(batch, deadline) {
            Err(RequestError::Busy(_)) => std::thread::yield_now(),
            submitted => break submitted.unwrap(),
        }
    };
    let answered = ticket.wait().map(|answer| answer.scores().statuses.len());
    match answered {
        // A slow machine may miss the deadline.
        Err(RequestError::DeadlineExceeded) if timeout.is_some() => {}
        answered => assert_eq!(answered.unwrap(), batch.size()),
    }
}

/// Waits until the workers have fetched all deferred rows: until their page count stops growing.
fn wait_for_deferred(serving: &Serving) {
    let mut before = 0;
    loop {
        answer_nothing(serving);
        let now = serving.get(NAME).unwrap().stats().unwrap().counters.pages;
        if now == before && serving.get(NAME).unwrap().stats().unwrap().prefetch_waiting == 0 {
            return;
        }
        before = now;
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn answer_nothing(serving: &Serving) {
    let empty = serving
        .get(NAME)
        .unwrap()
        .submit(&Batch::new(&serving.model(NAME).unwrap().schema().clone(), 0), None)
        .unwrap();
    drop(empty.wait().unwrap());
}

/// Sends each batch in turn. The first half warms up; the allocations of the second half are
/// counted.
fn phase(what: &str, serving: &Serving, batches: &[Batch], timeout: Option<Duration>) {
    let (first, second) = batches.split_at(batches.len() / 2);
    first.iter().for_each(|b| answer(serving, b, timeout));
    wait_for_deferred(serving);
    let before = serving.get(NAME).unwrap().stats().unwrap().counters;
    let counted = allocations(|| second.iter().for_each(|b| answer(serving, b, timeout)));
    wait_for_deferred(serving);
    let counters = serving.get(NAME).unwrap().stats().unwrap().counters.since(&before);
    assert_eq!(counted, 0, "{what}: {counters:?}");
    assert_eq!(counters.missed_lookups == 0, what.ends_with("hits"), "{what}: {counters:?}");
}

#[test]
fn after_warm_up_nothing_is_allocated() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // The driver's own memory is not counted.
    for device in [Device::Cpu, Device::Cuda(standin::gpu(23))] {
        every_path(&Fixture::new(device));
    }
    [false, true].into_iter().for_each(every_pooling);
    // These run last, because the test harness allocates on its own thread when a test starts.
    cache_verbs();
    reading_threads();
}

#[test]
fn the_memory_plan_covers_the_heap() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    memory_is_summed(&Fixture::new(Device::Cpu));
    memory_of_a_swap_is_summed();
    memory_of_a_start_is_summed();
}

/// A start reads a resident table into its place, and sorts the most used keys of a cached one in
/// as few rounds as the budget has room for. Both take no more than the memory plan says.
fn memory_of_a_start_is_summed() {
    const ROWS: u64 = 200_000;
    let table = |keys| TablePlan::cached(keys, ROWS, 4, CodecChoice::F32);
    let resident = TablePlan { placement: Placement::Resident, ..table(KeySpace::Sparse) };
    let tables = vec![resident, TablePlan { counts: true, ..table(KeySpace::Index) }];
    let features = (0..2).map(FeaturePlan::one_hot).collect();
    let (name, seed) = ("started".to_owned(), 34);
    let packed = ModelPlan { name, sequence: 1, seed, dense: 1, tables, features }.pack();
    let flash = Flash::open(&disk::system(), &packed.install()).unwrap();
    let budget = Budget { cache_bytes_max: 8 << 20, slots: 1, batch_max: 1, ..Budget::default() };
    // Returns the memory plan, the bytes of the heap and the cached rows of a start.
    let start = |memory_bytes_max| {
        let before = HELD.load(Ordering::SeqCst);
        PEAK.store(before, Ordering::SeqCst);
        let model = Model::from_flash(&flash, Budget { memory_bytes_max, ..budget }).unwrap();
        let (plan, peak) = (model.memory().clone(), PEAK.load(Ordering::SeqCst) - before);
        // Caches and resident rows are mapped memory; the index of the resident rows is heap.
        let heap = plan.total() - plan.lines()[0].1 - 16 * ROWS + plan.opening_bytes();
        println!("{peak} bytes of the heap at most, {heap} in the plan");
        assert!(peak <= heap as i64 + BESIDE, "{peak} bytes at most:\n{plan}");
        (plan, model.cache_use().unwrap().rows)
    };

    let (roomy, rows) = start(1 << 30);
    assert!(roomy.opening_bytes() > 0 && rows > ROWS / 2, "{rows} rows are cached:\n{roomy}");
    let (tight, same) = start(roomy.total() + (400 << 10));
    assert!(tight.opening_bytes() < roomy.opening_bytes() / 4, "{tight}");
    assert_eq!(same, rows, "a start in rounds caches the same rows");
}

/// A swap to a snapshot, which names no changed rows, compares and reads all cached rows, in
/// several pieces. Its lists of these rows are in the memory plan.
fn memory_of_a_swap_is_summed() {
    const ROWS: usize = 200_000;
    const KEYS: usize = 100;
    let table = TablePlan::cached(KeySpace::Index, ROWS as u64, 4, CodecChoice::F32);
    let feature = FeaturePlan { hotness_max: KEYS as u32, ..FeaturePlan::one_hot(0) };
    let plan = |sequence| ModelPlan {
        name: "swapped".to_owned(),
        sequence,
        seed: 30 + sequence,
        dense: 1,
        tables: vec![table.clone()],
        features: vec![feature.clone()],
    };
    let [first, second] = [1, 2].map(|sequence| plan(sequence).pack());
    let directory = first.install();
    let mut budget = Budget::default();
    let flash = Flash::open(&disk::system(), &directory).unwrap();
    let serving = serving_on(&Device::Cpu, &flash, |b| {
        (b.cache_bytes_max, b.batch_max) = (16 << 20, 64);
        budget = *b;
    });
    for from in (0..ROWS as u64).step_by(64 * KEYS) {
        let bag = |i: u64| (0..KEYS as u64).map(|k| (from + 100 * i + k) % ROWS as u64).collect();
        let sample = |i| Sample { dense: vec![1.0], sparse: vec![bag(i)], ..Sample::default() };
        let samples: Vec<Sample> = (0..64).map(sample).collect();
        answer(&serving, &batch_for(&first.schema, 64, &samples), None);
    }

    install(&directory, &second.bundle);
    let flash = Flash::open(&disk::system(), &directory).unwrap();
    let before = HELD.load(Ordering::SeqCst);
    PEAK.store(before, Ordering::SeqCst);
    let swapped = serving.swap(NAME, &flash, budget, &|_| {}).unwrap();
    let peak = PEAK.load(Ordering::SeqCst) - before;
    let plan = serving.memory().remove(0).1;
    println!("{peak} bytes of the heap at most, {} in the plan", plan.opening_bytes());
    assert_eq!((swapped.read, swapped.dropped), (ROWS, 0));
    assert!(peak <= plan.opening_bytes() as i64 + BESIDE, "{peak} bytes at most:\n{plan}");
}

/// The heap memory that no line of the memory plan covers (names and threads) stays small, however
/// large the budget is.
fn memory_is_summed(fixture: &Fixture) {
    for (batch_max, slots, workers) in [(4, 4, 1), (512, 64, 3)] {
        let before = HELD.load(Ordering::SeqCst);
        let serving =
            fixture.serving(|b| (b.batch_max, b.slots, b.workers) = (batch_max, slots, workers));
        (0..40).for_each(|i| answer(&serving, &fixture.batch(4, 12 * i, None), None));
        wait_for_deferred(&serving);
        let held = HELD.load(Ordering::SeqCst) - before;
        let plan = serving.memory().remove(0).1;
        // The first two lines, caches and resident tables, are mapped memory, not heap.
        let summed: u64 = plan.lines()[2..].iter().map(|(_, bytes)| bytes).sum();
        println!("{held} bytes of the heap, {summed} in the plan");
        assert!(held <= summed as i64 + BESIDE, "{held} bytes are held:\n{plan}");
    }
}

fn every_path(fixture: &Fixture) {
    prefetch(fixture);
    let serving = fixture.serving(|_| ());
    let fresh = |table: usize, from: usize| -> Vec<Batch> {
        (0..60).map(|i| fixture.batch(1 + i % BATCH_MAX, from + 12 * i, Some(table))).collect()
    };
    let again = |table| [fresh(table, 0), fresh(table, 0)].concat();
    phase("misses that wait", &serving, &fresh(0, 0), None);
    phase("hits", &serving, &again(0), None);
    phase("deadlines that are over", &serving, &fresh(1, 0), Some(Duration::ZERO));
    // A request that no worker took in time deferred nothing.
    again(1).iter().for_each(|batch| answer(&serving, batch, None));
    phase("late ones as hits", &serving, &again(1), Some(Duration::ZERO));
    phase("deadlines that are kept", &serving, &fresh(1, 1000), Some(Duration::MAX));
    phase("defaults", &serving, &fresh(2, 0), None);
    phase("defaults as hits", &serving, &again(2), None);
    eviction(fixture);
    unknown_keys(fixture, &serving);
    merged(fixture);
    two_workers(fixture);
    not_finite(fixture);
}

/// Weighted sums and every pooling, with lengths and masks as inputs, and each feature in two of
/// them. If `shared`, the samples of a request share every second feature.
fn every_pooling(shared: bool) {
    let feature = |(t, pooling)| FeaturePlan {
        shared: shared && t % 2 == 0,
        pooling,
        weighted: pooling == Pooling::Sum,
        hotness_max: 3,
        ..FeaturePlan::one_hot(t)
    };
    let poolings = [Pooling::Sum, Pooling::Sqrtn, Pooling::Max, Pooling::None];
    let tables = vec![TablePlan::cached(KeySpace::Sparse, 3000, 16, CodecChoice::U8); 4];
    let features = poolings.into_iter().enumerate().map(feature).collect();
    let (name, sequence, seed, dense) = ("pooled".to_owned(), 1, 22, 2);
    let plan = ModelPlan { name, sequence, seed, dense, tables, features };
    let packed = plan.pack_spec(&plan.spec_with_bag_inputs(), onnx::concat);
    let flash = Flash::open(&disk::system(), &packed.install()).unwrap();
    let keys: Vec<Vec<u64>> = packed.rows.iter().map(|rows| rows.all_keys()).collect();

    let serving = serving_on(&Device::Cpu, &flash, |_| ());
    let sample = |from: usize| Sample {
        dense: vec![1.0; 2],
        sparse: keys.iter().map(|keys| (0..3).map(|k| keys[(from + k) % 3000]).collect()).collect(),
        weights: vec![vec![0.5; 3], vec![], vec![], vec![]],
        ..Sample::default()
    };
    let batch = |i: usize| {
        let samples: Vec<Sample> = (0..1 + i % BATCH_MAX).map(|n| sample(12 * i + 3 * n)).collect();
        batch_for(&packed.schema, BATCH_MAX, &samples)
    };
    let batches: Vec<Batch> = (0..60).map(batch).collect();
    phase("all poolings, misses", &serving, &batches, None);
    phase("all poolings, hits", &serving, &[batches.clone(), batches].concat(), None);
}

/// With the smallest cache every request evicts rows of an earlier one.
fn eviction(fixture: &Fixture) {
    let serving = fixture.serving(|b| b.cache_bytes_max = 8 << 10);
    let batches: Vec<Batch> = (0..200).map(|i| fixture.batch(2, 12 * i, None)).collect();
    phase("misses that evict", &serving, &batches, None);
}

fn unknown_keys(fixture: &Fixture, serving: &Serving) {
    let unknown = |i: u64| Sample {
        dense: vec![0.0; 2],
        sparse: vec![vec![3 * i + 1, 7], vec![3 * i + 1], vec![3 * i + 2]],
        ..Sample::default()
    };
    let batch = |i| batch_for(&fixture.packed.schema, 1, &[unknown(i)]);
    phase("keys that no table has", serving, &(0..40).map(batch).collect::<Vec<_>>(), None);
}

/// Four requests of one sample are always one batch. A fifth is refused.
fn merged(fixture: &Fixture) {
    let serving = fixture.serving(|b| b.batch_delay_us_max = u32::MAX);
    let requests: Vec<Batch> = (0..4).map(|i| fixture.batch(1, 3 * i, Some(0))).collect();
    let round = || {
        let submit = |b| serving.get(NAME).unwrap().submit(b, None).unwrap();
        let tickets: [Ticket; 4] = std::array::from_fn(|i| submit(&requests[i]));
        let refused = serving.get(NAME).unwrap().submit(&requests[0], None);
        // Requests that are served keep their slots until their tickets are dropped.
        assert!(matches!(refused, Err(RequestError::Busy(4))));
        tickets.iter().for_each(|t| drop(t.wait().unwrap()));
    };
    (0..20).for_each(|_| round());
    let counted = allocations(|| (0..50).for_each(|_| round()));
    let stats = serving.get(NAME).unwrap().stats().unwrap();
    assert_eq!((stats.requests, stats.batches), (280, 70));
    assert_eq!(counted, 0, "merged");
}

/// A request whose score is not a number is refused without an allocation, beside one that has a
/// score.
fn not_finite(fixture: &Fixture) {
    let plan = ModelPlan {
        name: "squares".to_owned(),
        sequence: 1,
        seed: 3,
        dense: 1,
        tables: vec![TablePlan::cached(KeySpace::Index, 9, 2, CodecChoice::F32)],
        features: vec![FeaturePlan::one_hot(0)],
    };
    let packed = plan.pack_with(onnx::concat_and_square);
    let flash = Flash::open(&disk::system(), &packed.install()).unwrap();
    let serving = serving_on(&fixture.device, &flash, |b| {
        (b.batch_delay_us_max, b.slots, b.batch_max) = (u32::MAX, 2, 2);
    });

    let request = |value| {
        let sample = Sample { dense: vec![value], sparse: vec![vec![7]], ..Sample::default() };
        batch_for(&packed.schema, 1, &[sample])
    };
    let [small, large] = [2.0, 1e30].map(request);
    let round = || {
        let tickets =
            [&large, &small].map(|batch| serving.get(NAME).unwrap().submit(batch, None).unwrap());
        let refused = tickets[0].wait().err().unwrap();
        assert!(matches!(
            refused,
            RequestError::NotFinite(NotFinite { sample: 0, output: 3, value: f32::INFINITY })
        ));
        assert_eq!(tickets[1].wait().unwrap().scores().values[3], 4.0);
    };
    (0..20).for_each(|_| round());
    assert_eq!(allocations(|| (0..50).for_each(|_| round())), 0, "not finite");
    let stats = serving.get(NAME).unwrap().stats().unwrap();
    assert_eq!((stats.requests, stats.batches, stats.failed), (140, 70, 70));
}

fn prefetch(fixture: &Fixture) {
    let serving = fixture.serving(|_| ());
    let prefetch = |keys: &[u64]| {
        assert_eq!(serving.get(NAME).unwrap().prefetch(0, keys), keys.len());
        while serving.get(NAME).unwrap().stats().unwrap().prefetch_waiting > 0 {
            std::thread::yield_now();
        }
    };
    fixture.keys[0][..300].chunks(50).for_each(prefetch);
    let counted = allocations(|| fixture.keys[0][300..900].chunks(50).for_each(prefetch));
    assert_eq!(counted, 0, "prefetch");
    assert!(serving.get(NAME).unwrap().stats().unwrap().counters.pages > 0);
}

/// Two workers and three callers use every path at the same time. A batch is one request. On busy
/// cores one worker may serve the whole warm-up, so the other begins to run in a counted round.
/// What a request allocates is in each round.
fn two_workers(fixture: &Fixture) {
    let serving =
        fixture.serving(|b| (b.workers, b.batch_max, b.cache_bytes_max) = (2, 1, 8 << 10));
    let callers: Vec<Vec<Batch>> = (0..3)
        .map(|c| (0..300).map(|i| fixture.batch(1, 1000 * c + 6 * i, None)).collect())
        .collect();
    let send = |batches: &[Batch]| {
        for batch in batches {
            answer(
                &serving,
                batch,
                [None, Some(Duration::ZERO)][batch.bags(0).keys[0] as usize % 2],
            );
        }
    };

    const ROUNDS: usize = 3;
    let (ready, go) = (std::sync::Barrier::new(4), std::sync::Barrier::new(4));
    std::thread::scope(|scope| {
        for batches in &callers {
            scope.spawn(|| {
                send(&batches[..150]);
                ready.wait();
                for _ in 0..ROUNDS {
                    go.wait();
                    send(&batches[150..]);
                    ready.wait();
                }
            });
        }

        ready.wait();
        let counted = [(); ROUNDS].map(|()| {
            allocations(|| {
                go.wait();
                ready.wait();
            })
        });

        assert!(counted.contains(&0), "two workers: {counted:?}");
    });
}

fn cache_verbs() {
    let (cache, mut out) =
        (Cache::new(20, 10_000, &KeySpaces::new(vec![Some(0), None])).unwrap(), [0; 20]);
    let counted = allocations(|| {
        for key in 0..5000 {
            let row = RowKey { table: 1, key: key % 700 };
            cache.insert(row, &[key as u8; 20], cache.epoch(row));
            // An insert may evict the new row itself. A row that a query finds can be updated.
            assert!(!cache.query(row, &mut out) || cache.update(row, &[1; 20]));
            cache.invalidate(RowKey { table: 1, key: key % 90 });
        }
    });
    assert_eq!(counted, 0, "cache verbs");
}

/// Without io_uring a pool of threads reads.
fn reading_threads() {
    let path = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&path, vec![7; 64 * size_of::<AlignedPage>()]).unwrap();
    let file = disk::system().open_pages(path.path()).unwrap();
    let mut reader = PageReader::new(8, ReadMethod::Threads);
    let mut read = |pages: u32| {
        for page in 0..pages {
            while !reader.reserve() {
                assert!(reader.next(None, |_, page| assert_eq!(page.unwrap()[99], 7)));
            }
            reader.begin(&file, page % 64, 0);
        }
        while reader.next(None, |_, _| ()) {}
    };
    read(2000);
    assert_eq!(allocations(|| read(2000)), 0, "reading threads");
}
