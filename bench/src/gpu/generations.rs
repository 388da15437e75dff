//! The generations of the model that `bench gpu swap` serves. Half of its tables are resident, with
//! rows of f16. The other half are cached, with rows of u8. From one generation to the next a
//! stated number of rows changes. Never measures.

use super::model::MeasuredNetwork;
use crate::filled_cache::TABLES;
use anyhow::{Context, Result};
use hatchback::flash::Flash;
use hatchback::schema::{KeySpace, MissPolicy, Placement};
use hatchback_tools::import::{RowSource, Source, TakeBlock};
use hatchback_tools::pack::spec::{CodecChoice, DefaultRow, ModelSpec, TableSpec};
use hatchback_tools::pack::{Overrides, PackJob};
use hatchback_tools::workload::synthetic::{dlrm_spec, powerlaw_counts, push_normals};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Rows of a block.
const BLOCK_ROWS: usize = 1024;
/// Tables of each placement.
pub const TABLES_EACH: usize = TABLES / 2;

/// The rows that change from one generation to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ChangedRows {
    /// Whether they are rows of resident tables or of cached ones.
    pub placement: Placement,
    /// Their number in all tables of that placement.
    pub rows: usize,
}

impl ChangedRows {
    /// Returns whether the row at `position` of a table of `rows` rows changes: the changed rows of
    /// a table are at even distances.
    fn contains(&self, table: usize, position: usize, rows: usize) -> bool {
        let in_table = (self.rows / TABLES_EACH).min(rows);
        let before = |position: usize| position * in_table / rows;
        placement(table) == self.placement && before(position + 1) > before(position)
    }
}

/// Returns the placement of a table.
fn placement(table: usize) -> Placement {
    if table.is_multiple_of(2) { Placement::Resident } else { Placement::Cached }
}

/// Returns the codec of the tables of one placement. Their rows have different lengths: a swap
/// refuses the caches of the old generation if a resident table has rows as long as theirs.
fn codec(placement: Placement) -> CodecChoice {
    if placement == Placement::Resident { CodecChoice::F16 } else { CodecChoice::U8 }
}

/// Packs the generations of a model.
pub struct Generations {
    network: MeasuredNetwork,
    /// Rows of each table.
    rows: usize,
    /// The changes after the first generation, in order.
    changes: Arc<[ChangedRows]>,
}

impl Generations {
    /// Describes a model with `rows` rows in each table. `changes` lead from each generation to the
    /// next.
    pub fn new(network: MeasuredNetwork, rows: usize, changes: &[ChangedRows]) -> Self {
        Self { network, rows, changes: changes.into() }
    }

    /// Returns the bytes of the rows of all tables of one placement.
    pub fn row_bytes(&self, placement: Placement) -> u64 {
        let rows = (TABLES_EACH * self.rows) as u64;
        rows * codec(placement).resolve(0, 0).row_bytes(self.network.dim) as u64
    }

    /// Packs generation `sequence`, counted from 1, into the bundle `out`: the first as a snapshot,
    /// a later one as a delta on `parent`.
    ///
    /// # Errors
    /// The bundle cannot be written, or `parent` cannot be read.
    pub fn pack(&self, sequence: u64, parent: Option<&Flash>, out: &Path) -> Result<()> {
        let base = tempfile::tempdir().context("a temporary folder")?;
        std::fs::write(base.path().join("dense.onnx"), &self.network.onnx)?;
        let source = |table| {
            let (changes, dim) = (Arc::clone(&self.changes), self.network.dim);
            let rows = GeneratedRows { table, rows: self.rows, dim, sequence, changes };
            Box::new(rows) as Box<dyn RowSource>
        };
        let sources: Vec<_> = (0..TABLES).map(source).collect();
        let job = PackJob::new(self.spec(sequence), base.path(), Overrides::default());
        job.pack_rows(&sources, parent, out, &mut |_, _| ())?;
        Ok(())
    }

    fn spec(&self, sequence: u64) -> ModelSpec {
        let names: Vec<String> = (0..TABLES).map(|n| format!("cat_{n}")).collect();
        let table = |(number, name): (usize, &String)| TableSpec {
            name: name.clone(),
            dim: self.network.dim,
            keys: KeySpace::Index,
            codec: codec(placement(number)),
            placement: placement(number),
            miss: MissPolicy::Wait,
            default: DefaultRow::Zeros,
            // `pack` gets the rows from a `RowSource` and never opens this file.
            source: Source::Npy { path: PathBuf::new(), keys: None, counts: None },
        };
        let tables = names.iter().enumerate().map(table).collect();
        dlrm_spec("swapped", sequence, self.network.inputs, tables)
    }
}

/// The rows of one table in one generation, computed when they are read.
struct GeneratedRows {
    table: usize,
    rows: usize,
    dim: usize,
    sequence: u64,
    changes: Arc<[ChangedRows]>,
}

impl GeneratedRows {
    /// Returns how often the row at `position` has changed.
    fn version(&self, position: usize) -> u64 {
        let so_far = self.changes.iter().take(self.sequence as usize - 1);
        so_far.filter(|change| change.contains(self.table, position, self.rows)).count() as u64
    }
}

impl RowSource for GeneratedRows {
    fn rows(&self) -> u64 {
        self.rows as u64
    }

    fn has_keys(&self) -> bool {
        false
    }

    /// Returns the expected counts of the callers' keys, so that the caches are filled from the
    /// start. A delta has none: it would be much smaller than the list of hot keys.
    fn counts(&self) -> Result<Option<Vec<u64>>> {
        if placement(self.table) == Placement::Resident || self.sequence > 1 {
            return Ok(None);
        }
        let order: Vec<u64> = (0..self.rows as u64).collect();
        Ok(Some(powerlaw_counts(self.table, &order)))
    }

    fn each_block(&self, take: TakeBlock<'_>) -> Result<()> {
        let (dim, mut values) = (self.dim, Vec::new());
        for first in (0..self.rows).step_by(BLOCK_ROWS) {
            values.clear();
            let rows = first..self.rows.min(first + BLOCK_ROWS);
            for position in rows.clone() {
                let seed = ((self.table * self.rows + position) * dim) as u64;
                let seed = seed + (self.version(position) << 48);
                push_normals(seed, dim, 1.0 / (dim as f32).sqrt(), &mut values);
            }
            take(&rows.map(|row| row as u64).collect::<Vec<_>>(), &values)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_rows_change_as_stated() {
        for (rows, changed) in [(300, 0), (300, 130), (300, 1300), (40_000, 50_000)] {
            for placed in [Placement::Resident, Placement::Cached] {
                let change = ChangedRows { placement: placed, rows: changed };
                let is_changed = |table, position| change.contains(table, position, rows);
                let count = |table| (0..rows).filter(|&p| is_changed(table, p)).count();
                let counts: Vec<usize> = (0..TABLES).map(count).collect();
                let expected = |t| if placement(t) == placed { changed / TABLES_EACH } else { 0 };
                assert!(counts.iter().enumerate().all(|(t, n)| *n == expected(t)), "{counts:?}");
            }
        }
    }

    #[test]
    fn a_row_changes_once_in_its_generation() {
        let change = ChangedRows { placement: Placement::Cached, rows: 13 };
        let changes: Arc<[ChangedRows]> = [change, change].into();
        let rows = |sequence| GeneratedRows {
            table: 1,
            rows: 10,
            dim: 2,
            sequence,
            changes: Arc::clone(&changes),
        };
        let versions = |sequence| (0..10).map(|p| rows(sequence).version(p)).sum::<u64>();
        assert_eq!([1, 2, 3].map(versions), [0, 1, 2]);
    }
}
