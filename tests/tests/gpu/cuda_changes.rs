//! Compares the kernels that change a cache with their CPU twin, to the byte: what a cache holds
//! after any changes, its dump and its epochs. Runs on the stand-in for the driver, or with
//! `HATCHBACK_GPU=real` on the machine's GPU.

use crate::one_key::{OneKey, exact};
use crate::tensorrt::sum_network_of;
use hatchback_kernels::cache::address::{KeySpaces, RowKey, mix, unmix};
use hatchback_kernels::cache::codec::ROW_BYTES_MAX;
use hatchback_kernels::cache::{Cache, Epoch};
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::cuda::memory::Mapped;
use hatchback_kernels::dense::Activation;
use hatchback_kernels::gpu::lookup::Keys;
use hatchback_kernels::gpu::step::Step;
use hatchback_kernels::gpu::tables::{DeviceTables, RowChanges, TableStorage};
use hatchback_kernels::gpu::{DenseNetwork, DeviceEngine};
use hatchback_kernels::lookup::miss_list::MissList;
use hatchback_kernels::lookup::{Bags, LookupStatus};
use hatchback_tests::random::Random;
use hatchback_tests::standin;
use std::collections::HashMap;
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

/// Calls a function for every row that a cache holds.
type Dump<'a> = dyn Fn(&mut dyn FnMut(RowKey, &[u8])) + 'a;

/// Number of the naming whose cache is whole.
const WHOLE: usize = 2;

/// Indexed tables, whose tags have 32 bits, tables of any keys, whose tags have 64, and small
/// indexed tables.
fn namings() -> [KeySpaces; 3] {
    [
        KeySpaces::new(vec![Some(90), Some(4_000_000_000), Some(0)]),
        KeySpaces::new(vec![None, Some(70), None]),
        KeySpaces::new(vec![Some(90), Some(40), Some(0)]),
    ]
}

/// A row that a table of the key spaces can have, or cannot.
fn any_row(naming: usize, random: &mut Random) -> RowKey {
    let table = random.below(3) as u16;
    let key = match (naming, table) {
        (0, 1) => random.below(150) * 26_000_000,
        (1, 0 | 2) => mix(random.below(150)),
        _ => random.below(100),
    };
    let row = RowKey { table, key };
    if naming == 1 && table != 1 && random.one_in(3) { sibling(row) } else { row }
}

/// A row whose hash differs in one bit: it has the same set and the same low half of its tag.
fn sibling(row: RowKey) -> RowKey {
    let salt = unmix(RowKey { key: 0, ..row }.hash());
    RowKey { key: unmix(row.hash() ^ 1 << 40) ^ salt, ..row }
}

struct Twin {
    cpu: Cache,
    tables: Arc<DeviceTables>,
    changes: RowChanges,
    staged: Mapped<u8>,
    stride: usize,
    naming: usize,
}

impl Twin {
    /// Creates a cache on both sides with the same rows, which were inserted on the host.
    fn new(gpu: &Arc<Gpu>, naming: usize, row_bytes: usize, random: &mut Random) -> Self {
        let names = &namings()[naming];
        let bytes = Cache::bytes_min(row_bytes, names) + 6 * 14 * (row_bytes + 11);
        let make = || match naming {
            WHOLE => Cache::whole(row_bytes, usize::MAX, names).unwrap(),
            _ => Cache::new(row_bytes, bytes, names).unwrap(),
        };
        let (cpu, other) = (make(), make());
        for _ in 0..40 {
            let (row, bytes) = (any_row(naming, random), vec![random.bits() as u8; row_bytes]);
            for cache in [&cpu, &other] {
                cache.insert(row, &bytes, cache.epoch(row));
                cache.query(row, &mut vec![0; row_bytes]);
            }
        }
        let tables = Arc::new(
            DeviceTables::new(gpu, vec![TableStorage::Cached(0); 3], vec![other], &[]).unwrap(),
        );
        let stride = row_bytes.div_ceil(4) + random.below(3) as usize;
        let changes = RowChanges::new(&tables, 64).unwrap();
        Self { cpu, tables, changes, staged: gpu.mapped(64 * 4 * stride).unwrap(), stride, naming }
    }

    /// Makes random changes of one kind on both sides; some inserts have an old epoch.
    fn change(&mut self, random: &mut Random) {
        let (verb, count) = (random.below(4), random.below(65) as usize);
        let mut expected = Vec::new();
        for slot in 0..count {
            let row = any_row(self.naming, random);
            let bytes = &mut self.staged[4 * slot * self.stride..][..4 * self.stride];
            // The bytes after a row are not part of the row.
            bytes.iter_mut().for_each(|b| *b = random.bits() as u8);
            let bytes = &bytes[..self.cpu.row_bytes()];
            let since =
                if verb == 0 && random.one_in(5) { Epoch::default() } else { self.cpu.epoch(row) };
            self.changes.add(row, slot as u32, since);
            expected.push(u8::from(match verb {
                0 | 1 => self.cpu.insert(row, bytes, since),
                2 => self.cpu.update(row, bytes),
                _ => self.cpu.invalidate(row),
            }));
        }
        let done = match verb {
            0 | 1 => self.changes.insert(&self.staged, self.stride),
            2 => self.changes.update(&self.staged, self.stride),
            _ => self.changes.invalidate(&self.staged, self.stride),
        };
        assert_eq!(done.unwrap(), expected, "verb {verb}");
    }

    fn check(&mut self, random: &mut Random) {
        assert!(self.tables.image(0).unwrap() == self.cpu.image(), "the caches differ");
        let held = |dump: &Dump<'_>| {
            let mut rows = HashMap::new();
            dump(&mut |row, bytes| assert!(rows.insert(row, bytes.to_vec()).is_none()));
            rows
        };
        let on_cpu = held(&|each| self.cpu.dump(each));
        assert_eq!(held(&|each| self.tables.dump(0, &|| {}, each).unwrap()), on_cpu);
        let rows: Vec<RowKey> = (0..20).map(|_| any_row(self.naming, random)).collect();
        rows.iter().for_each(|row| self.changes.add(*row, 0, Epoch::default()));
        let (mut seen, cpu) = (0, &self.cpu);
        self.changes
            .probe(|number, cached, epoch| {
                assert_eq!(
                    (cached, epoch),
                    (on_cpu.contains_key(&rows[number]), cpu.epoch(rows[number]))
                );
                seen += 1;
            })
            .unwrap();
        assert_eq!(seen, rows.len());
    }
}

#[test]
fn changes_leave_the_same_bytes() {
    let _turn = standin::alone();
    for seed in 0..24 {
        let gpu = standin::gpu(seed);
        let mut random = Random::new(seed);
        let row_bytes = *random.pick(&[1, 4, 13, 20, 64, 132, 520, ROW_BYTES_MAX]);
        let mut twin = Twin::new(&gpu, seed as usize % 3, row_bytes, &mut random);
        for _ in 0..12 {
            twin.change(&mut random);
        }
        twin.check(&mut random);
    }
}

/// A wait for the stream of changes would hold its lock, which requests with missing rows take.
#[test]
fn a_recovery_waits_for_its_own_changes_only() {
    let _turn = standin::alone();
    let Some(stand_in) = standin::load() else {
        return println!("SKIPPED: a call that fails: only the stand-in can inject a fault");
    };
    let mut twin = Twin::new(&standin::gpu(7), 0, 64, &mut Random::new(7));
    twin.changes.add(RowKey { table: 0, key: 1 }, 0, Epoch::default());
    stand_in.fault(c"update_rows", 0, 1);
    assert!(twin.changes.update(&twin.staged, twin.stride).is_err());
    stand_in.fault(c"wait", 0, 1);
    twin.changes.recover().unwrap();
    stand_in.fault(c"wait", 0, 0);
    twin.check(&mut Random::new(8));
}

/// Sizes of the requests whose rows change during the query.
struct LitmusSizes {
    batch: usize,
    features: usize,
    dim: usize,
    rounds: usize,
}

impl LitmusSizes {
    /// On a GPU the query takes longer than the host needs to launch the changes.
    fn of(gpu: &Gpu) -> Self {
        match gpu.name().contains("stand-in") {
            true => Self { batch: 32, features: 2, dim: 32, rounds: 20 },
            false => Self { batch: 1 << 16, features: 26, dim: 32, rounds: 20 },
        }
    }

    fn width(&self) -> usize {
        self.features * self.dim
    }
}

/// Rows of the litmus, each of which every round changes. They are few, so that the launch of the
/// changes follows the launch of the query within microseconds.
const LITMUS_ROWS: usize = 64;

/// One request step on a table whose rows change while it runs. All values of a row are the row's
/// version. A score is the sum of the sample's pooled values.
struct Litmus {
    sizes: LitmusSizes,
    step: Step,
    changes: RowChanges,
    misses: MissList,
    staged: Mapped<u8>,
    statuses: Vec<LookupStatus>,
}

impl Litmus {
    fn new(gpu: &Arc<Gpu>) -> Self {
        let sizes = LitmusSizes::of(gpu);
        let features = OneKey {
            tables: vec![0; sizes.features],
            keys_end: LITMUS_ROWS as u64,
            dim: sizes.dim,
        };
        let (format, width) = (features.format(), sizes.width());
        let spaces = KeySpaces::new(vec![Some(LITMUS_ROWS as u64)]);
        let cache = Cache::whole(format.row_bytes(), usize::MAX, &spaces).unwrap();
        for key in 0..LITMUS_ROWS as u64 {
            let row = RowKey { table: 0, key };
            assert!(cache.insert(row, &vec![0; format.row_bytes()], cache.epoch(row)));
        }
        let storage = vec![TableStorage::Cached(0)];
        let tables = Arc::new(DeviceTables::new(gpu, storage, vec![cache], &[]).unwrap());

        let engine = Arc::new(sum_of_columns(gpu, width, sizes.batch));
        // Their copy delays the query, so that the changes are launched before it ends.
        let limits = features.limits(sizes.batch, LITMUS_ROWS, Keys::Copied);
        let (step, misses) = features.step(&tables, &engine, &[("x", width)], limits);
        Self {
            step,
            changes: RowChanges::new(&tables, LITMUS_ROWS).unwrap(),
            misses,
            staged: gpu.mapped(LITMUS_ROWS * format.row_bytes()).unwrap(),
            statuses: vec![LookupStatus::default(); sizes.batch],
            sizes,
        }
    }

    /// Makes `version` the version of all rows, and waits. Returns the time that it took, in µs.
    fn change_rows(&mut self, version: u64) -> f64 {
        let value = (version as f32).to_le_bytes();
        self.staged.chunks_exact_mut(4).for_each(|bytes| bytes.copy_from_slice(&value));
        for key in 0..LITMUS_ROWS as u32 {
            let row = RowKey { table: 0, key: key.into() };
            self.changes.add(row, key, Epoch::default());
        }
        let start = Instant::now();
        let done = self.changes.update(&self.staged, self.sizes.dim).unwrap();
        assert_eq!(done, [1; LITMUS_ROWS]);
        start.elapsed().as_secs_f64() * 1e6
    }

    /// Begins a request of all samples, and calls `meanwhile` before it waits for the scores.
    /// Returns the smallest and the largest version of its rows, as the scores show it.
    fn versions(
        &mut self,
        random: &mut Random,
        is_recorded: bool,
        meanwhile: impl FnOnce(&mut Self),
    ) -> [f32; 2] {
        let LitmusSizes { batch, .. } = self.sizes;
        let key = |_| random.below(LITMUS_ROWS as u64);
        let keys: Vec<u64> = (0..batch).map(key).collect();
        let offsets: Vec<u32> = (0..=batch as u32).collect();
        let bags = |_| Bags::new(&keys, &offsets);
        match is_recorded {
            true => self.step.begin(batch, bags, |_, _| {}).unwrap(),
            false => self.step.begin_unrecorded(batch, bags, |_, _| {}).unwrap(),
        }
        meanwhile(self);

        let more = self.step.lookup().collect(&mut self.misses, &mut self.statuses).unwrap();
        assert!(!more && self.misses.is_empty(), "a row is missing");
        let versions = self.step.scores(batch).iter().map(|sum| sum / self.sizes.width() as f32);
        versions.fold([f32::MAX, f32::MIN], |[least, most], v| [least.min(v), most.max(v)])
    }
}

/// Loads a network whose one output is the sum of its input's columns.
fn sum_of_columns(gpu: &Arc<Gpu>, width: usize, batch_max: usize) -> DeviceEngine {
    let inputs = [("x", width)];
    let (onnx, activation) = (&sum_network_of(width), Activation::None);
    let network = DenseNetwork { onnx, inputs: &inputs, parts: &[], output: "sum", activation };
    DeviceEngine::load(gpu, &network, &exact(batch_max, Vec::new())).unwrap()
}

/// Changes that are launched right after a query must wait for the query, also where a graph
/// launches the query and records the event that the changes wait for. The next request, which the
/// host begins after the changes, must see them.
#[test]
fn changes_wait_for_the_queries_of_recorded_graphs() {
    let _turn = standin::alone();
    if let (Some(_), Some(stand_in)) = (std::env::var_os(UNSEEN_RECORDS), standin::load()) {
        stand_in.fault(c"record of a graph", 0, u32::MAX);
    }
    let gpu = standin::gpu(300);
    let mut litmus = Litmus::new(&gpu);
    assert!(litmus.step.refused().is_none(), "{:?}", litmus.step.refused());
    let (mut random, mut version) = (Random::new(300), 0);

    for is_recorded in [false, true] {
        let mut us = [Vec::new(), Vec::new()];
        for _ in 0..litmus.sizes.rounds {
            let before = version as f32;
            version += 1;
            let seen = litmus.versions(&mut random, is_recorded, |litmus| {
                us[0].push(litmus.change_rows(version));
            });
            assert_eq!(seen, [before; 2], "rows of a later change, graph: {is_recorded}");
            let seen = litmus.versions(&mut random, is_recorded, |_| ());
            assert_eq!(
                seen, [version as f32; 2],
                "rows of an earlier change, graph: {is_recorded}"
            );
            version += 1;
            us[1].push(litmus.change_rows(version));
        }
        let [beside, alone] = us.map(|us| us.into_iter().fold(f64::MAX, f64::min));
        let mode = if is_recorded { "one graph" } else { "kernel by kernel" };
        println!("{mode}: changes took {beside:.0} µs beside a query, {alone:.0} µs alone");
        // On the stand-in other load may delay either.
        assert!(
            gpu.name().contains("stand-in") || beside > 2.0 * alone,
            "the queries ended before the changes were launched, so this shows nothing"
        );
    }
}

/// Set for a run of the test above in which a wait does not see the records of launched graphs.
const UNSEEN_RECORDS: &str = "HATCHBACK_UNSEEN_RECORDS";

/// The test above notices a driver on which changes do not wait for the query of a graph.
#[test]
fn a_driver_whose_graphs_record_too_late_is_noticed() {
    if standin::load().is_none() {
        return println!("SKIPPED: a real driver records when it records");
    }
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cuda_changes::changes_wait_for_the_queries_of_recorded_graphs"])
        .env(UNSEEN_RECORDS, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
    assert!(!run.status.success() && said.contains("a later change, graph: true"), "{said}");
}
