//! A generation's tables as they are served: resident ones are read whole, the others' indexes.

use crate::flash::Flash;
use crate::flash::segment::SegmentError;
use crate::flash::table::TableRows;
use crate::model::OpenError;
use crate::schema::{KeySpace, Schema, Table};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::mix;
use hatchback_kernels::cache::codec::RowFormat;
use hatchback_kernels::cache::resident::Resident;

/// Where a table's rows are looked for.
pub(crate) enum Store {
    /// Empty where the rows are on a GPU.
    Resident(Resident),
    /// Number of the cache in `Model::caches`.
    Cached { cache: usize, rows: TableRows },
}

/// One table as it is served.
pub(crate) struct ServedTable {
    pub format: RowFormat,
    pub store: Store,
}

/// Opens every table of `schema`, `rest` between them.
pub(crate) fn open_tables(
    flash: &Flash,
    schema: &Schema,
    resident: &[bool],
    caches: &[Cache],
    rest: &dyn Fn(),
) -> Result<Vec<ServedTable>, OpenError> {
    let mut tables = Vec::with_capacity(schema.tables.len());
    for (number, table) in schema.tables.iter().enumerate() {
        rest();
        let rows = flash.table(number)?;
        let format = table.format().ok_or_else(|| SegmentError::Field {
            path: flash.directory().to_owned(),
            field: "unit_exp",
            problem: format!("table `{}` does not fit its codec", table.name),
        })?;
        let store = if resident[number] {
            Store::Resident(load_resident(&rows, table, format)?)
        } else {
            let cache = caches.iter().position(|c| c.row_bytes() == format.row_bytes());
            Store::Cached { cache: cache.unwrap_or_default(), rows }
        };
        tables.push(ServedTable { format, store });
    }
    Ok(tables)
}

/// Reads a whole table. A damaged page of a resident table refuses the start: its rows would be
/// gone for every request.
fn load_resident(
    rows: &TableRows,
    table: &Table,
    format: RowFormat,
) -> Result<Resident, OpenError> {
    // Positions serve an index table only while it is whole and in key order.
    let indexed = table.keys == KeySpace::Index && rows.changed() == 0;
    let (mut bytes, mut hashes, mut damaged) = (Vec::new(), Vec::new(), None);
    rows.scan(
        |order, row| {
            bytes.extend_from_slice(row);
            if !indexed {
                hashes.push(if table.keys == KeySpace::Index { mix(order) } else { order });
            }
        },
        |e| damaged = Some(e),
    )?;
    match damaged {
        Some(e) => Err(e.into()),
        None if indexed => Ok(Resident::indexed(format.row_bytes(), &bytes)),
        None => Ok(sorted_resident(format.row_bytes(), &hashes, &bytes)),
    }
}

fn sorted_resident(row_bytes: usize, hashes: &[u64], rows: &[u8]) -> Resident {
    let mut order: Vec<usize> = (0..hashes.len()).collect();
    order.sort_unstable_by_key(|&i| hashes[i]);
    let sorted_hashes = order.iter().map(|&i| hashes[i]).collect();
    let sorted_rows: Vec<u8> =
        order.iter().flat_map(|&i| &rows[i * row_bytes..(i + 1) * row_bytes]).copied().collect();
    Resident::hashed(row_bytes, sorted_hashes, &sorted_rows)
}
