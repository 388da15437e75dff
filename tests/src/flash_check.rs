//! Compares the rows of a flash directory with those of [`Versions`]. Never changes the directory.

use crate::versions::{Rows, Versions};
use hatchback::flash::Flash;

/// Returns the newest version of every row of a table.
pub fn rows_of(flash: &Flash, table: usize) -> Rows {
    let (mut rows, table) = (Rows::new(), flash.table(table).unwrap());
    table
        .scan(|order, row| assert!(rows.insert(order, row.to_vec()).is_none()), |e| panic!("{e}"))
        .unwrap();
    rows
}

/// Checks that every row of the live generation is as `versions` made it. Returns the generation.
pub fn whole_generation(flash: &Flash, versions: &Versions, what: &str) -> usize {
    let generation = flash.manifest().generation.sequence as usize;
    has_rows_of(flash, versions, generation, what);
    generation
}

/// Checks that every row is as `versions` made that of `generation`.
pub fn has_rows_of(flash: &Flash, versions: &Versions, generation: usize, what: &str) {
    for table in 0..2 {
        let same = rows_of(flash, table) == versions.rows[generation - 1][table];
        assert!(same, "{what}: table {table} of generation {generation} differs");
    }
    assert!(!flash.dense().unwrap().is_empty(), "{what}: no dense network");
}
