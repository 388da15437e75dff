//! What lies in a flash directory against what [`Versions`] says must. Never changes anything.

use crate::versions::{Rows, Versions};
use hatchback::flash::Flash;

/// The newest rows of a table.
pub fn rows_of(flash: &Flash, table: usize) -> Rows {
    let (mut rows, table) = (Rows::new(), flash.table(table).unwrap());
    table
        .scan(|order, row| assert!(rows.insert(order, row.to_vec()).is_none()), |e| panic!("{e}"))
        .unwrap();
    rows
}

/// The live generation, every row of which must be as it was made.
pub fn whole_generation(flash: &Flash, versions: &Versions, what: &str) -> usize {
    let generation = flash.manifest().generation.sequence as usize;
    for table in 0..2 {
        let same = rows_of(flash, table) == versions.rows[generation - 1][table];
        assert!(same, "{what}: table {table} of generation {generation} is not what it was");
    }
    assert!(!flash.dense().unwrap().is_empty(), "{what}: no dense network");
    generation
}
