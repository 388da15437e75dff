//! The candidates of one table: every key that the backlog or a new window changes, once, with its
//! newest change. Holds 32 bytes a candidate and no values.

use crate::window::{Window, WindowError, WindowTable};
use hatchback::schema::{KeySpace, Table};

/// Share of the expected traffic that is kept from one window to the next.
const TRAFFIC_KEPT: f32 = 0.5;

/// A kind of change of the fleet's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowChange {
    /// The fleet holds another row for the key.
    Update,
    /// The fleet has no row for the key.
    Insert,
    /// The trainer deleted the key.
    Delete,
}

/// Whether the fleet needs a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// The fleet lacks it.
    Lacks,
    /// The fleet lacks it, by less than the floor.
    BelowFloor,
    /// The fleet holds it, unless a delta that was written but not installed takes it away.
    Holds,
}

/// A change that the fleet may lack.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// The order of the key ([`KeySpace::order`]).
    pub order: u64,
    /// The window since which the fleet lacks the change.
    pub since: u64,
    /// Expected lookups in a window.
    pub traffic: f32,
    /// Distance of the trainer's row to what the fleet answers now. 0 until it is measured.
    pub distance: f32,
    /// The position among the rows or deleted keys of the source.
    pub row: u32,
    /// The number of the source that has the newest change.
    pub source: u16,
    /// The kind of change.
    pub change: RowChange,
    /// Whether the fleet needs it.
    pub need: Need,
}

/// The windows from which candidates come, oldest first.
pub struct Sources<'a> {
    /// The backlog, if there is one, and the new windows.
    pub windows: Vec<&'a Window>,
    /// Whether the first window is the backlog.
    pub has_backlog: bool,
}

impl Sources<'_> {
    /// Returns the new windows.
    pub fn new_windows(&self) -> &[&Window] {
        &self.windows[usize::from(self.has_backlog)..]
    }

    /// Returns what source `source` says of the table `name`.
    pub fn table(&self, source: usize, name: &str) -> Option<&WindowTable> {
        self.windows[source].table(name)
    }

    /// Returns the candidates of `table` in the order of their keys, not yet compared with the
    /// fleet. `change` is `Insert` for every row.
    ///
    /// # Errors
    /// A window has a key twice, or its columns do not fit the table.
    pub fn candidates(&self, table: &Table) -> Result<Vec<Candidate>, WindowError> {
        let mut all: Vec<Candidate> = Vec::new();
        for source in 0..self.windows.len() {
            self.append(source, table, &mut all)?;
        }
        all.sort_unstable_by_key(|candidate| (candidate.order, candidate.source));
        self.check_unique(table, &all)?;

        // The newest change is kept, with the age of the oldest.
        let mut kept = 0;
        for at in 0..all.len() {
            if kept > 0 && all[kept - 1].order == all[at].order {
                let (before, traffic) = (all[kept - 1].since, all[kept - 1].traffic);
                all[kept - 1] = all[at];
                all[kept - 1].since = before;
                all[kept - 1].traffic += traffic;
            } else {
                all[kept] = all[at];
                kept += 1;
            }
        }
        all.truncate(kept);
        Ok(all)
    }

    fn append(
        &self,
        source: usize,
        table: &Table,
        all: &mut Vec<Candidate>,
    ) -> Result<(), WindowError> {
        let window = self.windows[source];
        let Some(changes) = window.table(&table.name) else { return Ok(()) };
        let columns = &changes.columns;
        check_table(window, changes, table)?;

        let traffic = columns.traffic.map(|column| window.floats(column)).transpose()?;
        let waits = |column: Option<_>| column.map(|column| window.words(column)).transpose();
        let (since, deleted_since) = (waits(columns.since)?, waits(columns.deleted_since)?);
        let age = (self.windows.len() - 1 - source) as i32;
        let kept = TRAFFIC_KEPT.powi(age);

        let candidate = |row: usize, key: u64, since: &Option<Vec<u64>>, change| Candidate {
            order: table.keys.order(key),
            since: since.as_ref().map_or(window.head.window, |since| since[row]),
            traffic: 0.0,
            distance: 0.0,
            row: row as u32,
            source: source as u16,
            change,
            need: Need::Lacks,
        };
        for (row, key) in window.words(columns.keys)?.into_iter().enumerate() {
            let mut next = candidate(row, key, &since, RowChange::Insert);
            next.traffic = kept * traffic.as_ref().map_or(1.0, |traffic| traffic[row]);
            all.push(next);
        }
        for (row, key) in window.words(columns.deleted)?.into_iter().enumerate() {
            all.push(candidate(row, key, &deleted_since, RowChange::Delete));
        }
        Ok(())
    }

    /// Checks that no window has a key twice in `sorted`.
    fn check_unique(&self, table: &Table, sorted: &[Candidate]) -> Result<(), WindowError> {
        let same = |pair: &&[Candidate]| {
            (pair[0].order, pair[0].source) == (pair[1].order, pair[1].source)
        };
        let Some(twice) = sorted.windows(2).find(same) else { return Ok(()) };
        let path = self.windows[usize::from(twice[0].source)].folder();
        let (field, key) = (format!("{}.keys", table.name), key_of(table.keys, twice[0].order));
        Err(WindowError::field(path, field, key, "twice, or both written and deleted"))
    }
}

/// Returns the key with `order`.
pub fn key_of(keys: KeySpace, order: u64) -> u64 {
    match keys {
        KeySpace::Index => order,
        KeySpace::Sparse => hatchback::unmix(order),
    }
}

/// Returns whether a row with `order` would be a new row at the end of an index table.
pub fn grows(table: &Table, order: u64) -> bool {
    table.keys == KeySpace::Index && order >= table.rows
}

/// Checks that the columns of a window fit the fleet's table.
fn check_table(window: &Window, changes: &WindowTable, table: &Table) -> Result<(), WindowError> {
    let (columns, dim) = (&changes.columns, table.dim as usize);
    if columns.rows.count > 0 && columns.dim != dim {
        let field = format!("dim of {}.rows", changes.name);
        let why = format!("but the fleet's table has dim {dim}");
        return Err(WindowError::field(window.folder(), field, columns.dim, why));
    }
    Ok(())
}
