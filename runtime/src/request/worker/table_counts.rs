//! Counts of each table's lookups. A worker has counters of its own, which only it writes, so
//! counting takes no lock and no atomic addition. Readers add up the counters of all workers.

use hatchback_kernels::lookup::miss_list::RowState;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of the lookups of one table.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct TableCounts {
    /// The table's name.
    pub table: String,
    /// Lookups.
    pub lookups: u64,
    /// Rows that were not in memory, each counted once a request.
    pub misses: u64,
    /// Of these, rows that the miss policy or the deadline did not wait for.
    pub defaulted: u64,
    /// Of these, rows that the table does not have.
    pub absent: u64,
    /// Of these, rows whose page failed its check or could not be read.
    pub damaged: u64,
}

const LOOKUPS: usize = 0;
const MISSES: usize = 1;
const DEFAULTED: usize = 2;
const ABSENT: usize = 3;
const DAMAGED: usize = 4;
const FIELDS: usize = 5;

/// The counters of one worker, one group for each table.
#[derive(Debug)]
pub(crate) struct TableCounters(Box<[[AtomicU64; FIELDS]]>);

impl TableCounters {
    /// Returns counters for `tables` tables.
    pub fn new(tables: usize) -> Self {
        Self((0..tables).map(|_| Default::default()).collect())
    }

    /// Returns the bytes of the counters of one worker.
    pub fn bytes(tables: usize) -> usize {
        tables * FIELDS * size_of::<AtomicU64>()
    }

    fn add(&self, table: u16, field: usize, count: u64) {
        let counter = &self.0[usize::from(table)][field];
        // The worker is the only writer.
        counter.store(counter.load(Ordering::Relaxed) + count, Ordering::Relaxed);
    }

    /// Counts lookups of `table`.
    pub fn look_up(&self, table: u16, lookups: u64) {
        self.add(table, LOOKUPS, lookups);
    }

    /// Counts a missing row of `table`, by its final state.
    pub fn miss(&self, table: u16, state: RowState) {
        self.add(table, MISSES, 1);
        match state {
            RowState::Fresh => {}
            RowState::Pending | RowState::Late => self.add(table, DEFAULTED, 1),
            RowState::Absent => self.add(table, ABSENT, 1),
            RowState::Damaged => self.add(table, DAMAGED, 1),
        }
    }

    /// Adds the counters to `sums`, one for each table.
    pub fn add_to(&self, sums: &mut [TableCounts]) {
        for (counters, sum) in self.0.iter().zip(sums) {
            let count = |field: usize| counters[field].load(Ordering::Relaxed);
            sum.lookups += count(LOOKUPS);
            sum.misses += count(MISSES);
            sum.defaulted += count(DEFAULTED);
            sum.absent += count(ABSENT);
            sum.damaged += count(DAMAGED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counters_of_workers_add_up() {
        let (a, b) = (TableCounters::new(2), TableCounters::new(2));
        a.look_up(1, 5);
        b.look_up(1, 2);
        for state in [RowState::Fresh, RowState::Late, RowState::Pending, RowState::Absent] {
            a.miss(1, state);
        }
        b.miss(1, RowState::Damaged);
        let mut sums = vec![TableCounts::default(); 2];
        a.add_to(&mut sums);
        b.add_to(&mut sums);
        let TableCounts { lookups, misses, defaulted, absent, damaged, .. } = sums[1];
        assert_eq!([lookups, misses, defaulted, absent, damaged], [7, 5, 2, 1, 1]);
        assert_eq!(sums[0], TableCounts::default());
    }
}
