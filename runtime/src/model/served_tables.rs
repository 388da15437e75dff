//! A generation's tables as a model serves them. A resident table is read whole; of a cached table
//! only the indexes are read. A damaged page of a resident table is an error, because every request
//! would miss its rows.

use crate::flash::Flash;
use crate::flash::live::TableState;
use crate::flash::segment::SegmentError;
use crate::flash::table::TableRows;
use crate::io::field_error::FieldError;
use crate::model::error::OpenError;
use crate::schema::{KeySpace, Schema, Table};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::mix;
use hatchback_kernels::cache::codec::RowFormat;
use hatchback_kernels::cache::resident::Resident;
use std::sync::Arc;

/// The place where a table's rows are looked up. The numbers count the model's resident tables or
/// its caches, in host memory or on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Storage {
    /// In memory, as the resident table of this number.
    Resident(usize),
    /// In the cache of this number; rows that are not cached are read from flash.
    Cached(usize),
}

/// One table as it is served.
pub(crate) struct ServedTable {
    pub format: RowFormat,
    pub storage: Storage,
    /// The rows on flash. A swap reads the changed rows of a resident table there.
    pub rows: TableRows,
    /// The files of `rows`.
    pub segments: TableState,
}

/// The tables of a model and the rows of those that are resident.
pub(crate) struct OpenedTables {
    pub tables: Vec<ServedTable>,
    pub residents: Vec<Arc<Resident>>,
}

/// Opens every table of `schema`; calls `yield_now` before each. `before` has the same tables in an
/// earlier generation, or is empty. The result shares open segments with `before`.
pub(crate) fn open_tables(
    flash: &Flash,
    schema: &Schema,
    is_resident: &[bool],
    caches: &[Arc<Cache>],
    before: &[ServedTable],
    yield_now: &dyn Fn(),
) -> Result<OpenedTables, OpenError> {
    let mut opened =
        OpenedTables { tables: Vec::with_capacity(schema.tables.len()), residents: Vec::new() };
    for (number, table) in schema.tables.iter().enumerate() {
        yield_now();
        let rows = match before.get(number) {
            Some(before) => flash.table_after(number, &before.rows, &before.segments)?,
            None => flash.table(number)?,
        };
        let format = table.format().ok_or_else(|| {
            let problem =
                format!("table `{}`: {} does not fit its codec", table.name, table.unit_exp);
            SegmentError::Field(FieldError::new(flash.directory(), "unit_exp", problem))
        })?;

        let storage = if is_resident[number] {
            opened.residents.push(Arc::new(load_resident(&rows, table, format)?));
            Storage::Resident(opened.residents.len() - 1)
        } else {
            let cache = caches.iter().position(|c| c.row_bytes() == format.row_bytes());
            // Always found: `make_caches` makes a cache for each row width of these tables.
            Storage::Cached(cache.unwrap_or_default())
        };
        let segments = flash.record().live.tables[number].clone();
        opened.tables.push(ServedTable { format, storage, rows, segments });
    }
    Ok(opened)
}

/// Reads a whole table. Fails if any page is damaged.
pub(crate) fn load_resident(
    rows: &TableRows,
    table: &Table,
    format: RowFormat,
) -> Result<Resident, OpenError> {
    // A key is the position of its row only if the table is an index table without changed rows.
    let is_indexed = table.keys == KeySpace::Index && rows.changed() == 0;
    let (mut bytes, mut hashes, mut damaged) = (Vec::new(), Vec::new(), None);
    rows.scan(
        |order, row| {
            bytes.extend_from_slice(row);
            if !is_indexed {
                // The order of a sparse key is its `mix` already.
                hashes.push(if table.keys == KeySpace::Index { mix(order) } else { order });
            }
        },
        |e| damaged = Some(e),
    )?;

    match damaged {
        Some(e) => Err(e.into()),
        None if is_indexed => Ok(Resident::indexed(format.row_bytes(), &bytes)),
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
