//! The rows that may differ between two generations of one model, table by table. They are found in
//! the key pages of the deltas, without reading a row. A row that is not listed is the same in both
//! generations; a listed row may also be the same. Takes 8 bytes of memory for each listed key.

use crate::flash::segment::SegmentError;
use crate::flash::table::TableRows;
use crate::model::opened::Model;
use crate::model::served_tables::ServedTable;
use hatchback_kernels::cache::address::RowKey;

/// The rows of one table that may differ.
pub(crate) enum TableChange {
    /// The rows of these keys, ascending.
    Keys(Vec<u64>),
    /// Every row.
    All,
}

/// The rows of each table that may differ between two generations.
pub(crate) struct GenerationChange {
    tables: Vec<TableChange>,
}

impl GenerationChange {
    /// Finds the rows that may differ between `old` and `new`, two generations with the same
    /// tables.
    ///
    /// # Errors
    /// [`SegmentError`] if a key page of a delta is damaged.
    pub fn between(old: &Model, new: &Model) -> Result<Self, SegmentError> {
        let (before, after) = (old.generation(), new.generation());
        let is_same = old.id().manifest == new.id().manifest;
        // One number with two manifests: a snapshot has replaced the damaged generation.
        let is_unrelated = before.lineage != after.lineage || before.sequence == after.sequence;

        let both = old.tables().iter().zip(new.tables());
        let tables = both.map(|(old, new)| match before.sequence <= after.sequence {
            _ if is_same => Ok(TableChange::Keys(Vec::new())),
            _ if is_unrelated => Ok(TableChange::All),
            true => changed_since(before.sequence, new),
            // After a rollback the live generation is the older one.
            false => Ok(changed_beyond(new, old)),
        });
        Ok(Self { tables: tables.collect::<Result<_, _>>()? })
    }

    /// Returns whether `row` may differ.
    pub fn contains(&self, row: RowKey) -> bool {
        match self.of(row.table) {
            TableChange::Keys(keys) => keys.binary_search(&row.key).is_ok(),
            TableChange::All => true,
        }
    }

    /// Returns the rows of `table` that may differ.
    pub fn of(&self, table: u16) -> &TableChange {
        &self.tables[usize::from(table)]
    }

    /// Returns the bytes of memory.
    pub fn bytes(&self) -> u64 {
        let keys = |change: &TableChange| match change {
            TableChange::Keys(keys) => (size_of::<u64>() * keys.capacity()) as u64,
            TableChange::All => 0,
        };
        self.tables.iter().map(keys).sum()
    }
}

/// Returns the rows of `later` that may have changed after the generation `sequence`. A segment
/// holds no row that is newer than the generation in whose folder it is.
fn changed_since(sequence: u64, later: &ServedTable) -> Result<TableChange, SegmentError> {
    if later.segments.base.sequence > sequence {
        return Ok(TableChange::All);
    }
    let deltas = later.segments.deltas.iter().enumerate();
    let newer = deltas.filter(|(_, delta)| delta.sequence > sequence).map(|(number, _)| number);
    newest_keys(&later.rows, newer).map(TableChange::Keys)
}

/// Returns the rows of `later` that may differ from those of `earlier`. A lower sequence makes
/// `earlier` no ancestor: the live record may have taken another branch since. Only equal segments
/// prove that `later` came from it.
fn changed_beyond(earlier: &ServedTable, later: &ServedTable) -> TableChange {
    let (before, after) = (&earlier.segments, &later.segments);
    if before.base != after.base || !after.deltas.starts_with(&before.deltas) {
        return TableChange::All;
    }
    let own = before.deltas.len()..after.deltas.len();
    // Damage of the generation that is left must not keep the other one from being served.
    newest_keys(&later.rows, own).map_or(TableChange::All, TableChange::Keys)
}

/// Returns the keys of the `deltas` of a table, ascending.
fn newest_keys(
    rows: &TableRows,
    deltas: impl Iterator<Item = usize> + Clone,
) -> Result<Vec<u64>, SegmentError> {
    let delta_of = |number: usize| &rows.segments()[number + 1];
    let counts = deltas.clone().map(|number| delta_of(number).counts());
    // The trailers tell the keys, so that the list does not take twice its bytes while it grows.
    let mut keys =
        Vec::with_capacity(counts.map(|counts| (counts.rows + counts.deletes) as usize).sum());
    for number in deltas {
        let delta = delta_of(number);
        let space = delta.kind().keys();
        delta.each_key(|order, _| keys.push(space.key_of(order)))?;
    }
    // The orders of sparse keys are hashes, and several deltas may have the same key.
    keys.sort_unstable();
    keys.dedup();
    Ok(keys)
}
