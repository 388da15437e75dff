//! The memory's part of a lookup: the loads of the requested rows, one word of each cache line.
//! Where memory bounds an engine, the engine takes about as long as these loads. Never adds rows
//! and never writes a result.

use super::calls::Calls;
use crate::filled_cache::TABLES;
use crate::peer::cpu_us;
use hatchback_kernels::simd::huge_pages::Zeroed;
use hatchback_kernels::simd::prefetch_l2;
use hatchback_tools::workload::key_distributions::Scatter;
use std::hint::black_box;

/// Values of a cache line.
const LINE: usize = 16;
/// Prefetch distance, in keys: that of the lookups.
const DISTANCE: usize = 64;

/// Tables of rows that are only read.
pub struct RowReads {
    memory: Zeroed<f32>,
    /// Rows of a table.
    rows: usize,
    /// Values of a row, at least 1.
    row_values: usize,
    scatters: Vec<Scatter>,
}

impl RowReads {
    /// Fills the tables, each with `rows` rows of `row_bytes` bytes.
    pub fn new(rows: usize, row_bytes: usize) -> Self {
        let row_values = row_bytes.div_ceil(size_of::<f32>()).max(1);
        // The system maps a page that was never written to one page of zeros.
        let mut memory = Zeroed::new(TABLES * rows * row_values);
        memory.fill(1.0);
        let scatters = (0..TABLES).map(|table| Scatter::of_table(table, rows as u64));
        Self { memory, rows, row_values, scatters: scatters.collect() }
    }

    /// Returns the CPU time of each timed call, µs.
    pub fn run(&self, calls: &Calls) -> Vec<f64> {
        let drawn = calls.keys(|table, rank| self.scatters[table].position(rank));
        let time = |keys: &Vec<Vec<u64>>| {
            let start = cpu_us();
            let sums = keys.iter().enumerate().map(|(table, keys)| self.read(table, keys));
            black_box(sums.fold(0, u32::wrapping_add));
            cpu_us() - start
        };
        let mut times: Vec<f64> = drawn.iter().map(time).collect();
        times.remove(0);
        times
    }

    /// Returns a sum of the bits of the loaded words, so that the compiler keeps the loads.
    fn read(&self, table: usize, keys: &[u64]) -> u32 {
        let table = &self.memory[table * self.rows * self.row_values..];
        let row = |key: u64| &table[key as usize * self.row_values..][..self.row_values];
        let mut sum = 0u32;
        for (n, key) in keys.iter().enumerate() {
            if let Some(later) = keys.get(n + DISTANCE) {
                row(*later).iter().step_by(LINE).for_each(|value| prefetch_l2(value));
                row(*later).last().inspect(|value| prefetch_l2(*value));
            }
            let words = row(*key).iter().step_by(LINE).chain(row(*key).last());
            sum = words.fold(sum, |sum, value| sum.wrapping_add(value.to_bits()));
        }
        sum
    }
}
