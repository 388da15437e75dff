//! Compares the kernels of a query with their CPU twin, to the bit: sums, misses and counts, for
//! every codec, pooling, storage and hit rate. Runs on the stand-in for the driver, or with
//! `HATCHBACK_GPU=real` on the machine's GPU.

use hatchback_kernels::cache::address::{KeySpaces, RowKey, mix};
use hatchback_kernels::cache::codec::{Codec, ROW_BYTES_MAX, RowFormat};
use hatchback_kernels::cache::resident::Resident;
use hatchback_kernels::cache::{Cache, Epoch};
use hatchback_kernels::cuda::Device;
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::cuda::memory::Mapped;
use hatchback_kernels::gpu::InputType;
use hatchback_kernels::gpu::lookup::{
    FeatureOnDevice, GpuLookup, Keys, LookupLimits, PIECE_COLUMNS,
};
use hatchback_kernels::gpu::tables::{DeviceTables, RowChanges, TableStorage};
use hatchback_kernels::lookup::miss_list::{Miss, MissList, RowState};
use hatchback_kernels::lookup::{Bags, FeatureView, Input, LookupStatus, Pooling, RowStore};
use hatchback_kernels::simd::isa::Isa;
use hatchback_tests::random::Random;
use hatchback_tests::{reference, standin};
use std::collections::HashMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

/// A table of a model: its rows as flash holds them, and how they are served.
struct Table {
    format: RowFormat,
    indexed: bool,
    place: TableStorage,
    keys: Vec<u64>,
    rows: HashMap<u64, Vec<u8>>,
}

/// The bags of one feature.
struct TestBags {
    keys: Vec<u64>,
    offsets: Vec<u32>,
    weights: Vec<f32>,
}

impl TestBags {
    fn bags(&self) -> Bags<'_> {
        Bags { keys: &self.keys, offsets: &self.offsets, weights: &self.weights }
    }
}

struct Plan {
    pooling: Pooling,
    weighted: bool,
    table: usize,
    hotness_max: usize,
    input: usize,
    column: usize,
    width: usize,
    default_row: Vec<f32>,
}

/// A random small model, on both sides.
struct World {
    tables: Vec<Table>,
    features: Vec<Plan>,
    strides: [usize; 2],
    types: [InputType; 2],
    caches: Vec<Cache>,
    residents: Vec<Resident>,
    misses_max: usize,
    /// Whether caches of indexed tables are whole.
    prefers_whole: bool,
}

/// Columns of rows: whole pieces and teams, parts of both, and rows of several passes.
const DIMS: [usize; 21] =
    [1, 2, 3, 8, 9, 12, 16, 17, 24, 32, 48, 64, 96, 127, 128, 129, 256, 300, 512, 1000, 3000];

fn format(random: &mut Random) -> RowFormat {
    loop {
        let codec = *random.pick(&[Codec::F32, Codec::F16, Codec::U8, Codec::U4]);
        let dim = *random.pick(&DIMS);
        let unit = if codec.is_quantized() { random.below(9) as i8 - 4 } else { 0 };
        match RowFormat::new(codec, dim, unit) {
            Some(format) if format.row_bytes() <= ROW_BYTES_MAX => return format,
            _ => {}
        }
    }
}

impl Table {
    /// Makes a table of random rows. Adds its row width to `widths`, or its rows to `residents`.
    fn new(
        random: &mut Random,
        format: RowFormat,
        widths: &mut Vec<usize>,
        residents: &mut Vec<Resident>,
    ) -> Self {
        let (indexed, n) = (random.one_in(2), 1 + random.below(120));
        let keys: Vec<u64> = (0..n).map(|i| if indexed { i } else { mix(i + 7) }).collect();
        let row = |random: &mut Random| {
            let value = |random: &mut Random| if random.one_in(9) { -0.0 } else { random.signed() };
            let values: Vec<f32> = (0..format.dim()).map(|_| value(random)).collect();
            let mut bytes = vec![0; format.row_bytes()];
            format.encode(&values, &mut bytes).unwrap();
            bytes
        };
        let rows: HashMap<u64, Vec<u8>> = keys.iter().map(|&k| (k, row(random))).collect();

        let width = format.row_bytes();
        let place = if random.one_in(3) {
            let bytes: Vec<u8> = keys.iter().flat_map(|k| rows[k].clone()).collect();
            let in_order = Resident::indexed(width, &bytes);
            let hashes = || keys.iter().map(|&k| mix(k)).collect();
            residents.push(if indexed { in_order } else { in_order.hashed(hashes()) });
            TableStorage::Resident(residents.len() - 1)
        } else {
            let number = widths.iter().position(|w| *w == width).unwrap_or_else(|| {
                widths.push(width);
                widths.len() - 1
            });
            TableStorage::Cached(number)
        };
        Self { format, indexed, place, keys, rows }
    }
}

impl World {
    fn new(random: &mut Random) -> Self {
        let count = 1 + random.below(4) as usize;
        // Tables of one row width share a cache.
        let shared = format(random);
        let (mut widths, mut residents) = (Vec::<usize>::new(), Vec::new());
        let tables = (0..count)
            .map(|_| {
                let format = if random.one_in(2) { shared } else { format(random) };
                Table::new(random, format, &mut widths, &mut residents)
            })
            .collect();

        let misses_max = 8 + random.below(300) as usize;
        let mut world = Self {
            tables,
            features: Vec::new(),
            strides: [0; 2],
            types: [InputType::F32; 2],
            caches: Vec::new(),
            residents,
            misses_max,
            prefers_whole: random.one_in(3),
        };
        world.caches = world.make_caches(&widths);
        for _ in 0..1 + random.below(6) {
            world.add_feature(random);
        }
        for input in 0..2 {
            let in_pieces = |plan: &Plan| {
                let dim = world.tables[plan.table].format.dim();
                plan.input != input || dim.is_multiple_of(PIECE_COLUMNS)
            };
            if world.features.iter().all(in_pieces) && random.one_in(2) {
                world.types[input] = InputType::F16;
            }
        }
        world
    }

    fn add_feature(&mut self, random: &mut Random) {
        let (table, hotness_max) =
            (random.below(self.tables.len() as u64) as usize, 1 + random.below(7) as usize);
        let pooling = *random.pick(&[
            Pooling::Sum,
            Pooling::Mean,
            Pooling::None,
            Pooling::Sqrtn,
            Pooling::Max,
        ]);
        let weighted = !matches!(pooling, Pooling::None | Pooling::Max) && random.one_in(2);
        let dim = self.tables[table].format.dim();
        let width = if pooling == Pooling::None { hotness_max * dim } else { dim };
        let input = random.below(2) as usize;
        let default_row = (0..dim).map(|_| 100.0 * random.signed()).collect();

        let column = self.strides[input];
        self.strides[input] += width;
        let plan =
            Plan { pooling, weighted, table, hotness_max, input, column, width, default_row };
        self.features.push(plan);
    }

    /// Creates the initial caches, the same every time.
    fn make_caches(&self, widths: &[usize]) -> Vec<Cache> {
        let of_width = |(number, width): (usize, &usize)| {
            let end = |t: &Table| match t.place == TableStorage::Cached(number) {
                false => Some(0),
                true => t.indexed.then_some(t.keys.len() as u64),
            };
            let names = KeySpaces::new(self.tables.iter().map(end).collect());
            if self.prefers_whole
                && let Some(whole) = Cache::whole(*width, usize::MAX, &names)
            {
                return whole;
            }
            Cache::new(*width, Cache::bytes_min(*width, &names) + 3 * 14 * (width + 11), &names)
                .unwrap()
        };
        widths.iter().enumerate().map(of_width).collect()
    }

    fn bags(&self, feature: &Plan, batch: usize, random: &mut Random) -> TestBags {
        let (table, mut keys, mut offsets) = (&self.tables[feature.table], Vec::new(), vec![0]);
        let hot = random.one_in(2);
        for _ in 0..batch {
            let n = if random.one_in(4) { 0 } else { random.below(feature.hotness_max as u64 + 1) };
            for _ in 0..n {
                let few = if hot { table.keys.len().min(6) } else { table.keys.len() };
                keys.push(match random.below(12) {
                    0 => *random.pick(&[table.keys.len() as u64, u64::MAX, 1 << 32, 12345]),
                    1 if !keys.is_empty() => *keys.last().unwrap(),
                    _ => *random.pick(&table.keys[..few]),
                });
            }
            offsets.push(keys.len() as u32);
        }
        let weights = if feature.weighted { keys.len() } else { 0 };
        let weights = (0..weights).map(|_| random.signed()).collect();
        TestBags { keys, offsets, weights }
    }

    /// Returns the features for the CPU's query.
    fn feature<'a>(&'a self, number: usize) -> FeatureView<'a> {
        let plan = &self.features[number];
        let table = &self.tables[plan.table];
        FeatureView {
            id: number as u16,
            table: plan.table as u16,
            format: table.format,
            keys_end: table.indexed.then_some(table.keys.len() as u64),
            default_row: &plan.default_row,
            pooling: plan.pooling,
            rows: match table.place {
                TableStorage::Cached(number) => RowStore::Cached(&self.caches[number]),
                TableStorage::Resident(number) => RowStore::Resident(&self.residents[number]),
            },
            column: plan.column,
            width: plan.width,
        }
    }

    /// Returns the features for the GPU's query.
    fn on_device<'a>(&'a self, plan: &'a Plan, inputs: &[Mapped<f32>; 2]) -> FeatureOnDevice<'a> {
        let table = &self.tables[plan.table];
        FeatureOnDevice {
            table: plan.table as u16,
            format: table.format,
            keys_end: table.indexed.then_some(table.keys.len() as u64),
            default_row: &plan.default_row,
            pooling: plan.pooling,
            weighted: plan.weighted,
            shared: false,
            hotness_max: plan.hotness_max,
            input: inputs[plan.input].address(),
            input_type: self.types[plan.input],
            stride: self.strides[plan.input],
            column: plan.column,
            width: plan.width,
        }
    }

    /// Reads the missing rows as flash would hold them; some are damaged, some late.
    fn fetch(&self, misses: &mut MissList) {
        misses.list_mut().sort_by_key(|m| m.row);
        for i in 0..misses.list().len() {
            let Miss { row, slot, .. } = misses.list()[i];
            let state = match self.tables[usize::from(row.table)].rows.get(&row.key) {
                None => RowState::Absent,
                Some(_) if mix(row.key).is_multiple_of(11) => RowState::Damaged,
                Some(_) if mix(row.key) % 11 == 1 => RowState::Late,
                Some(bytes) => {
                    misses.row_mut(slot)[..bytes.len()].copy_from_slice(bytes);
                    RowState::Fresh
                }
            };
            misses.set_state(slot, state);
        }
    }

    fn row_bytes_max(&self) -> usize {
        self.tables.iter().map(|t| t.format.row_bytes()).max().unwrap()
    }

    /// Computes the CPU's results, batch after batch on the same caches.
    fn on_cpu(&self, batch: usize, bags: &[TestBags]) -> ([Vec<f32>; 2], Vec<LookupStatus>) {
        let mut inputs = self.strides.map(|stride| vec![f32::NAN; batch * stride]);
        let (mut statuses, mut misses) = (
            vec![LookupStatus::default(); batch],
            MissList::new(self.misses_max, self.row_bytes_max()),
        );
        let isa = Isa::detect();
        let settle = |misses: &mut MissList,
                      inputs: &mut [Vec<f32>; 2],
                      statuses: &mut [LookupStatus]| {
            self.fetch(misses);
            for miss in misses.list().iter().filter(|m| misses.state(m.slot) == RowState::Fresh) {
                let TableStorage::Cached(number) = self.tables[usize::from(miss.row.table)].place
                else {
                    unreachable!()
                };
                let cache = &self.caches[number];
                cache.insert(miss.row, &misses.row(miss.slot)[..cache.row_bytes()], miss.epoch);
            }

            for bag in misses.bags() {
                let plan = &self.features[usize::from(bag.feature)];
                let mut into =
                    Input { data: &mut inputs[plan.input], stride: self.strides[plan.input] };
                let bags = bags[usize::from(bag.feature)].bags();
                self.feature(usize::from(bag.feature))
                    .finish(isa, bag, bags, misses, &mut into, statuses);
            }

            misses.clear();
        };
        for (f, of_feature) in bags.iter().enumerate() {
            let mut done = 0;
            while done < batch {
                let plan = &self.features[f];
                let mut into =
                    Input { data: &mut inputs[plan.input], stride: self.strides[plan.input] };
                let bags = of_feature.bags();
                done =
                    self.feature(f).query(isa, bags, done, &mut into, &mut misses, &mut statuses);
                if done < batch {
                    settle(&mut misses, &mut inputs, &mut statuses);
                }
            }
        }

        settle(&mut misses, &mut inputs, &mut statuses);
        (inputs, statuses)
    }
}

/// The tables, lookup and misses of one world on the GPU.
struct OnGpu {
    tables: Arc<DeviceTables>,
    lookup: GpuLookup,
    inputs: [Mapped<f32>; 2],
    misses: MissList,
}

impl OnGpu {
    fn new(gpu: &Arc<Gpu>, world: &World, batch_max: usize, keys: Keys) -> Self {
        let places = world.tables.iter().map(|t| t.place).collect();
        let widths: Vec<usize> = world.caches.iter().map(Cache::row_bytes).collect();
        let residents: Vec<&Resident> = world.residents.iter().collect();
        let tables = Arc::new(
            DeviceTables::new(gpu, places, world.make_caches(&widths), &residents).unwrap(),
        );
        let inputs = world.strides.map(|stride| gpu.mapped(batch_max * stride).unwrap());
        let features: Vec<FeatureOnDevice> =
            world.features.iter().map(|plan| world.on_device(plan, &inputs)).collect();
        let (misses_max, row_bytes_max) = (world.misses_max, world.row_bytes_max());
        let is_shared = false;
        let limits = LookupLimits { batch_max, misses_max, row_bytes_max, keys, is_shared };
        let lookup = GpuLookup::new(&tables, &features, limits).unwrap();
        let misses =
            MissList::on(&Device::Cuda(Arc::clone(gpu)), world.misses_max, world.row_bytes_max())
                .unwrap();
        Self { tables, lookup, inputs, misses }
    }

    /// Drops some rows on both sides, so that the epochs of some sets change.
    fn invalidate(&self, gpu: &Arc<Gpu>, world: &World, random: &mut Random) {
        let (mut changes, none) =
            (RowChanges::new(&self.tables, 4).unwrap(), gpu.mapped(0).unwrap());
        for _ in 0..random.below(4) {
            let table = random.below(world.tables.len() as u64) as u16;
            let Table { place: TableStorage::Cached(number), keys, .. } =
                &world.tables[usize::from(table)]
            else {
                continue;
            };
            let row = RowKey { table, key: *random.pick(keys) };
            world.caches[*number].invalidate(row);
            changes.add(row, 0, Epoch::default());
        }
        changes.invalidate(&none, 0).unwrap();
    }

    fn answer(
        &mut self,
        world: &World,
        batch: usize,
        bags: &[TestBags],
    ) -> (usize, Vec<LookupStatus>) {
        let mut statuses = vec![LookupStatus::default(); batch];
        self.inputs.iter_mut().for_each(|input| input.fill(f32::NAN));
        self.lookup.begin(batch, |f| bags[f].bags()).unwrap();
        let (mut rounds, mut more) =
            (1, self.lookup.collect(&mut self.misses, &mut statuses).unwrap());
        loop {
            if !self.misses.is_empty() {
                world.fetch(&mut self.misses);
                self.lookup.finish_bags(&self.misses, &mut statuses).unwrap();
                self.misses.clear();
            }
            if !more {
                return (rounds, statuses);
            }
            rounds += 1;
            more = self.lookup.requery(&mut self.misses, &mut statuses).unwrap();
        }
    }
}

/// Returns the image of `cache`. Clears the use counts if `cache` is whole: they have no effect
/// there, and only the GPU counts the uses of pooled rows.
fn without_uses(cache: &Cache, mut image: Vec<u32>) -> Vec<u32> {
    const WAYS: usize = 14;
    const HEADER_WORDS: usize = 16;
    if cache.is_whole() {
        let headers = image.chunks_mut(HEADER_WORDS).take(cache.slots() / WAYS);
        headers.for_each(|header| header[HEADER_WORDS - 1] = 0);
    }
    image
}

#[test]
fn queries_pool_the_same_bits() {
    let _turn = standin::shared();
    let (mut several_rounds, mut halves) = (0, 0);
    for seed in 100..160 {
        let gpu = standin::gpu(seed);
        let mut random = Random::new(seed);
        let world = World::new(&mut random);
        let batch_max = 1 + random.below(40) as usize;
        let keys = [Keys::InPlace, Keys::Copied][seed as usize / 2 % 2];
        let mut on_gpu = OnGpu::new(&gpu, &world, batch_max, keys);
        let mut rounds_max = 1;

        for _ in 0..5 {
            on_gpu.invalidate(&gpu, &world, &mut random);
            let batch = random.below(batch_max as u64 + 1) as usize;
            let bags: Vec<_> =
                world.features.iter().map(|f| world.bags(f, batch, &mut random)).collect();
            let (inputs, statuses) = world.on_cpu(batch, &bags);
            let (rounds, same) = on_gpu.answer(&world, batch, &bags);
            rounds_max = rounds_max.max(rounds);
            assert_eq!(same, statuses, "seed {seed}");
            for ((input, expected), of) in on_gpu.inputs.iter().zip(&inputs).zip(world.types) {
                let expected = of.encode(expected);
                assert!(reference::same_bits(&input[..expected.len()], &expected), "seed {seed}");
                halves += usize::from(of == InputType::F16 && !expected.is_empty());
            }
        }
        several_rounds += usize::from(rounds_max > 1);

        // In several rounds the order of bags differs, and with it the order of inserts.
        if rounds_max == 1 {
            for (number, cache) in world.caches.iter().enumerate() {
                let image = on_gpu.tables.image(number).unwrap();
                assert!(
                    without_uses(cache, image) == without_uses(cache, cache.image()),
                    "seed {seed}: cache {number}"
                );
            }
        }
    }

    assert!(
        (1..30).contains(&several_rounds),
        "{several_rounds} of 60 worlds had too small a miss list"
    );
    assert!(halves > 50, "{halves} inputs of f16");
}

/// Completes a query of 64 samples; missing rows are read in `version`. Returns the number of
/// misses.
fn answer_all(lookup: &mut GpuLookup, misses: &mut MissList, version: u64, dim: usize) -> usize {
    let (mut statuses, mut missed) = ([LookupStatus::default(); 64], 0);
    let mut more = lookup.collect(misses, &mut statuses).unwrap();
    loop {
        for Miss { row, slot, .. } in misses.list().to_vec() {
            let value = ((4096 * row.key + version) as f32).to_le_bytes();
            misses.row_mut(slot)[..4 * dim].chunks_mut(4).for_each(|b| b.copy_from_slice(&value));
            misses.set_state(slot, RowState::Fresh);
        }
        missed += misses.list().len();
        lookup.finish_bags(misses, &mut statuses).unwrap();
        misses.clear();
        if !more {
            return missed;
        }
        more = lookup.requery(misses, &mut statuses).unwrap();
    }
}

/// Asserts that each pooled row of `input`, `[batch, dim]`, is a sum of whole rows of its bag's
/// keys, none newer than `version`.
fn assert_whole_rows(input: &[f32], dim: usize, bags: Bags<'_>, version: u64) {
    for (sample, ends) in bags.offsets.windows(2).enumerate() {
        let row = &input[sample * dim..][..dim];
        let keys = &bags.keys[ends[0] as usize..ends[1] as usize];
        assert!(row.iter().all(|v| v.to_bits() == row[0].to_bits()), "a torn row: {row:?}");

        let (of, written) = (row[0] as u64 / 4096, row[0] as u64 % 4096);
        assert!(
            of == keys.iter().sum::<u64>() && written <= version * keys.len() as u64,
            "keys {keys:?} were answered with rows of {of}, versions {written}"
        );
    }
}

/// Changes run on one stream and queries on another. A pooled row must be whole, belong to its key,
/// and be no newer than the changes.
#[test]
fn no_query_sees_a_torn_or_foreign_row() {
    let _turn = standin::shared();
    if let (Some(_), Some(stand_in)) = (std::env::var_os(WITHOUT_ORDER), standin::load()) {
        stand_in.fault(c"wait for an event", 0, u32::MAX);
    }
    let (mut hits, mut refused) = (0, 0);
    for seed in 200..218 {
        // More keys than fit, so that they evict each other; or so few that the same rows are
        // changed and read all the time.
        let keys_end = if seed % 2 == 0 { 60 } else { 6 };

        // Rows that are read as a whole before they are added, or piece by piece.
        let (dim, versions) = if seed % 3 < 2 { (64, 26) } else { (300, 14) };
        let format = RowFormat::new(Codec::F32, dim, 0).unwrap();
        let default_row = vec![0.0; dim];
        let gpu = standin::gpu(seed);
        let mut random = Random::new(seed);
        let names = KeySpaces::new(vec![Some(keys_end)]);
        let cache = Cache::new(4 * dim, 2 * 14 * (4 * dim + 11), &names).unwrap();
        let tables = Arc::new(
            DeviceTables::new(&gpu, vec![TableStorage::Cached(0)], vec![cache], &[]).unwrap(),
        );
        let input = gpu.mapped::<f32>(64 * dim).unwrap();
        let feature = FeatureOnDevice {
            table: 0,
            format,
            keys_end: Some(keys_end),
            default_row: &default_row,
            pooling: Pooling::Sum,
            weighted: false,
            shared: false,
            hotness_max: 3,
            input: input.address(),
            input_type: InputType::F32,
            stride: dim,
            column: 0,
            width: dim,
        };

        let keys = Keys::on(&gpu);
        let (batch_max, misses_max, row_bytes_max, is_shared) = (64, 192, 4 * dim, false);
        let limits = LookupLimits { batch_max, misses_max, row_bytes_max, keys, is_shared };
        let mut lookup = GpuLookup::new(&tables, &[feature], limits).unwrap();
        let mut misses = MissList::on(&Device::Cuda(Arc::clone(&gpu)), 192, 4 * dim).unwrap();
        let (mut changes, mut staged) =
            (RowChanges::new(&tables, 16).unwrap(), gpu.mapped::<u8>(16 * 4 * dim).unwrap());
        for version in 1..versions {
            let rows = [(); 16].map(|()| RowKey { table: 0, key: random.below(keys_end) });
            let mut epochs = [Epoch::default(); 16];
            rows.iter().for_each(|row| changes.add(*row, 0, Epoch::default()));
            changes.probe(|number, _, epoch| epochs[number] = epoch).unwrap();

            for (slot, row) in rows.into_iter().enumerate() {
                let value = ((4096 * row.key + version) as f32).to_le_bytes();
                staged[4 * dim * slot..][..4 * dim]
                    .chunks_mut(4)
                    .for_each(|b| b.copy_from_slice(&value));
                changes.add(row, slot as u32, epochs[slot]);
            }

            let mut offsets = vec![0];
            (0..64).for_each(|i| offsets.push(offsets[i] + random.below(4) as u32));
            let keys: Vec<u64> = (0..offsets[64]).map(|_| random.below(keys_end)).collect();
            lookup.begin(64, |_| Bags::new(&keys, &offsets)).unwrap();

            // Waits for the changes only, while the query runs.
            match version % 4 {
                0 => changes.invalidate(&staged, dim),
                1 => changes.update(&staged, dim),
                _ => changes.insert(&staged, dim),
            }
            .unwrap();

            refused += answer_all(&mut lookup, &mut misses, version, dim);
            hits += keys.len();
            assert_whole_rows(&input, dim, Bags::new(&keys, &offsets), version);
        }
    }

    let summary = format!("{hits} lookups, {refused} rows missed");
    println!("{summary}");
    assert!(hits > 20_000 && refused > 2000, "{summary}");
}

/// Set for a run of the test above in which streams do not wait for events.
const WITHOUT_ORDER: &str = "HATCHBACK_WITHOUT_ORDER";

/// Nothing but the order of queries and changes keeps rows whole: without it the test above fails.
#[test]
fn without_the_order_of_queries_and_changes_rows_are_torn() {
    if standin::load().is_none() {
        return println!("SKIPPED: a real driver keeps every order");
    }
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cuda_kernels::no_query_sees_a_torn_or_foreign_row"])
        .env(WITHOUT_ORDER, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
    assert!(!run.status.success(), "{said}");
    assert!(said.contains("a torn row") || said.contains("were answered with rows"), "{said}");
}

/// Copies the files of `from`, without its folders, to the new folder `to`.
fn copy_files(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for file in std::fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()) {
        if file.is_file() {
            std::fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
        }
    }
}

/// The stand-in ends a run in which a lane reads shared words of another lane without a
/// `__syncwarp` in between: a copy of the kernels lacks one. `tests/standin/removals` removes each.
#[test]
fn without_a_syncwarp_the_stand_in_ends_the_run() {
    if standin::load().is_none() || std::env::var_os("HATCHBACK_STANDIN").is_some() {
        return println!("SKIPPED: only a stand-in that this test builds can lack a `__syncwarp`");
    }
    let (tree, copy) = (Path::new(env!("CARGO_MANIFEST_DIR")), tempfile::tempdir().unwrap());
    let sources = copy.path().join("kernels/cuda");
    copy_files(&tree.join("standin"), &copy.path().join("tests/standin"));
    copy_files(&tree.join("../kernels/cuda"), &sources);
    let text = std::fs::read_to_string(sources.join("lookup.cu")).unwrap();
    let (before, after) = text.split_once("__syncwarp();").unwrap();
    std::fs::write(sources.join("lookup.cu"), [before, after].concat()).unwrap();

    let out = copy.path().join("out");
    let made = Command::new(copy.path().join("tests/standin/make")).arg(&out).status();
    assert!(made.unwrap().success());
    let run = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cuda_kernels::queries_pool_the_same_bits"])
        .env("HATCHBACK_STANDIN", out.join("libcuda.so"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&run.stdout) + String::from_utf8_lossy(&run.stderr);
    assert!(!run.status.success() && said.contains("no __syncwarp is between"), "{said}");
}
