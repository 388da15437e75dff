//! Compares the kernels that change a cache with their CPU twin, to the byte: what a cache holds
//! after any changes, its dump and its epochs. Runs on the stand-in for the driver, or with
//! `HATCHBACK_GPU=real` on the machine's GPU.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use hatchback_kernels::cache::address::{KeySpaces, RowKey, mix, unmix};
use hatchback_kernels::cache::codec::ROW_BYTES_MAX;
use hatchback_kernels::cache::{Cache, Epoch};
use hatchback_kernels::cuda::driver::Gpu;
use hatchback_kernels::cuda::memory::Mapped;
use hatchback_kernels::gpu::tables::{DeviceTables, RowChanges, TableStorage};
use hatchback_tests::random::Random;
use hatchback_tests::standin;
use std::collections::HashMap;
use std::sync::Arc;

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

#[test]
fn all_of_it_under_address_sanitizer() {
    standin::again_under_address_sanitizer("all_of_it_under_address_sanitizer");
}
