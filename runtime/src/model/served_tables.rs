//! A generation's tables as a model serves them. A resident table is read whole; of a cached table
//! only the indexes are read. A damaged page of a resident table is an error, because every request
//! would miss its rows.

use crate::flash::Flash;
use crate::flash::live::TableState;
use crate::flash::segment::SegmentError;
use crate::flash::table::TableRows;
use crate::io::field_error::FieldError;
use crate::limits::{PAGE_BYTES, VERIFY_PAGES};
use crate::model::capacity;
use crate::model::error::OpenError;
use crate::schema::{KeySpace, Schema, Table};
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

/// Opens the indexes of every table of `schema`, and reads no row; calls `yield_now` before each.
/// `before` has the same tables in an earlier generation, or is empty. The result shares open
/// segments with `before`.
pub(crate) fn open_indexes(
    flash: &Flash,
    schema: &Schema,
    is_resident: &[bool],
    before: &[ServedTable],
    yield_now: &dyn Fn(),
) -> Result<Vec<ServedTable>, OpenError> {
    let (mut tables, mut residents) = (Vec::with_capacity(schema.tables.len()), 0);
    let widths = capacity::cache_widths(schema, is_resident);
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
            residents += 1;
            Storage::Resident(residents - 1)
        } else {
            let cache = widths.iter().position(|width| *width == format.row_bytes());
            // Always found: there is a cache for each row width of these tables.
            Storage::Cached(cache.unwrap_or_default())
        };
        let segments = flash.record().live.tables[number].clone();
        tables.push(ServedTable { format, storage, rows, segments });
    }
    Ok(tables)
}

impl ServedTable {
    fn is_resident(&self) -> bool {
        matches!(self.storage, Storage::Resident(_))
    }

    /// Returns whether a key is the position of its row: in an index table without changed rows.
    fn is_indexed(&self, table: &Table) -> bool {
        table.keys == KeySpace::Index && self.rows.changed() == 0
    }

    /// Returns the rows that the table has, at most: each changed key may be new.
    fn rows_max(&self) -> usize {
        self.rows.base_rows() as usize + self.rows.changed()
    }

    /// Returns the rows that the table has by its schema.
    fn rows_declared(&self, table: &Table) -> usize {
        self.rows_max().min(table.rows as usize)
    }

    /// Returns the bytes of the table in memory, and those that reading and sorting its rows takes.
    pub fn resident_bytes(&self, table: &Table) -> (u64, u64) {
        let (rows, is_hashed) = (self.rows_declared(table), !self.is_indexed(table));
        let pages = self.rows.pages_max().min(VERIFY_PAGES) * PAGE_BYTES;
        let sorting = if is_hashed { rows * size_of::<u32>() } else { 0 };
        let bytes = Resident::bytes_in(self.format.row_bytes(), rows, is_hashed);
        (bytes as u64, (pages + sorting) as u64)
    }
}

/// The memory that the resident tables of a model take.
pub(crate) struct ResidentBytes {
    pub tables: u64,
    /// For a while, beside the tables.
    pub loading: u64,
}

/// Returns the bytes of the resident tables among `tables` of `schema`. They may be read yet.
pub(crate) fn resident_bytes(schema: &Schema, tables: &[ServedTable]) -> ResidentBytes {
    let residents = schema.tables.iter().zip(tables).filter(|(_, served)| served.is_resident());
    let bytes = residents.map(|(table, served)| served.resident_bytes(table));
    bytes.fold(ResidentBytes { tables: 0, loading: 0 }, |sum, (bytes, loading)| ResidentBytes {
        tables: sum.tables + bytes,
        loading: sum.loading.max(loading),
    })
}

/// Reads the resident tables among `tables` of `schema`; calls `yield_now` before each.
pub(crate) fn load_residents(
    schema: &Schema,
    tables: &[ServedTable],
    yield_now: &dyn Fn(),
) -> Result<Vec<Arc<Resident>>, OpenError> {
    let residents = schema.tables.iter().zip(tables).filter(|(_, served)| served.is_resident());
    residents
        .map(|(table, served)| {
            yield_now();
            load_resident(served, table).map(Arc::new)
        })
        .collect()
}

/// Reads a whole table. Fails if any page is damaged.
pub(crate) fn load_resident(served: &ServedTable, table: &Table) -> Result<Resident, OpenError> {
    let (rows_max, is_indexed) = (served.rows_max(), served.is_indexed(table));
    let mut resident = Resident::with_room(served.format.row_bytes(), rows_max);
    let mut hashes = Vec::with_capacity(if is_indexed { 0 } else { served.rows_declared(table) });
    let (mut damaged, mut misplaced) = (None, None);
    served.rows.scan(
        |order, row| {
            let rows = resident.rows_len();
            if rows == rows_max || is_indexed && order != rows as u64 {
                misplaced.get_or_insert(order);
                return;
            }
            resident.push(row);
            if !is_indexed {
                // The order of a sparse key is its `mix` already.
                hashes.push(if table.keys == KeySpace::Index { mix(order) } else { order });
            }
        },
        |e| damaged = Some(e),
    )?;

    // Such pages agree with their checksums, so whoever wrote them was wrong.
    let path = served.rows.segments()[0].path();
    let misplaced = misplaced.map(|order| {
        let problem = format!(
            "the row with the order {order} is not among {rows_max} rows in their places; publish \
             a snapshot"
        );
        SegmentError::field(path, "keys", problem)
    });
    match damaged.or(misplaced) {
        Some(e) => Err(e.into()),
        None if is_indexed => Ok(resident),
        None => Ok(resident.hashed(hashes)),
    }
}
