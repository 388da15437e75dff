//! The cached rows that a swap changes: removes them, and reads those of the new generation. Never
//! decides when. `transition.rs` has the order of the steps.

use crate::flash::segment::SegmentError;
use crate::model::Model;
use crate::model::generation_change::{GenerationChange, TableChange};
use crate::model::preload::Preloader;
use crate::model::row_writer::RowWriter;
use crate::model::served_tables::Storage;
use hatchback_kernels::cache::address::RowKey;
use hatchback_kernels::cache::codec::ROW_BYTES_MAX;
use hatchback_kernels::cuda::driver::CudaError;

/// Keys whose rows a swap reads at a time. The reads need memory for each key. The keys are in the
/// order of the segments, so pieces share few pages.
pub(super) const KEYS_PER_READ: usize = 1 << 16;

/// The rows of a table that a swap removed from the caches.
pub(super) struct RemovedRows {
    table: u16,
    pub keys: Vec<u64>,
}

/// Returns the most bytes that the lists of rows take during a swap with this `change`.
pub(super) fn list_bytes(model: &Model, change: &GenerationChange) -> u64 {
    list_bytes_of(model, |table| match change.of(table) {
        TableChange::Keys(keys) => keys.len() as u64,
        TableChange::All => u64::MAX,
    })
}

/// Returns the most bytes that the lists of rows take during any swap.
pub(super) fn list_bytes_max(model: &Model) -> u64 {
    list_bytes_of(model, |_| u64::MAX)
}

/// Returns the most bytes that the lists take if at most `changed` rows of each table differ.
fn list_bytes_of(model: &Model, changed: impl Fn(u16) -> u64) -> u64 {
    // Two lists that grow by doubling, of the keys that may differ and of those that were cached,
    // and a byte for each comparison.
    const BYTES_PER_KEY: u64 = 16 + 16 + 1;

    let tables = model.schema().tables.iter().zip(model.tables()).enumerate();
    let cached = tables.filter(|(_, (_, served))| matches!(served.storage, Storage::Cached(_)));
    let rows = cached.map(|(number, (table, _))| changed(number as u16).min(table.rows));
    let rows = rows.sum::<u64>().min(model.backend().cache_slots() as u64);
    let dump = model.backend().device_tables().map_or(0, |tables| tables.dump_bytes());
    rows * BYTES_PER_KEY + read_bytes(rows) + dump as u64
}

/// Returns the most bytes that the lists of a read take while `keys` rows are read in pieces.
pub(super) fn read_bytes(keys: u64) -> u64 {
    // Where the rows of a piece are (16), and three lists of their pages.
    const BYTES_PER_READ: u64 = 16 + 3 * 32;
    keys.min(KEYS_PER_READ as u64) * BYTES_PER_READ
}

/// Removes the changed rows from the caches. Returns those that were cached.
pub(super) fn remove_changed(
    writer: &mut RowWriter<'_>,
    model: &Model,
    change: &GenerationChange,
    yield_now: &dyn Fn(),
) -> Result<Vec<RemovedRows>, CudaError> {
    let mut removed = Vec::new();
    for (table, served) in model.tables().iter().enumerate() {
        let (table, Storage::Cached(cache)) = (table as u16, served.storage) else { continue };
        let differing;
        let keys = match change.of(table) {
            TableChange::Keys(keys) => keys,
            TableChange::All => {
                differing = differing_keys(model, table, cache, yield_now)?;
                &differing
            }
        };
        let rows = keys.iter().map(|&key| RowKey { table, key });
        let mut of_table = RemovedRows { table, keys: Vec::new() };
        writer.invalidate(rows, yield_now, |row| of_table.keys.push(row.key))?;
        removed.push(of_table);
    }
    Ok(removed)
}

/// Returns the cached keys of a table whose rows may differ in `model`. In host memory each row is
/// read and compared; on a GPU all cached keys are returned.
fn differing_keys(
    model: &Model,
    table: u16,
    cache: usize,
    yield_now: &dyn Fn(),
) -> Result<Vec<u64>, CudaError> {
    let mut keys = Vec::new();
    if let Some(tables) = model.backend().device_tables() {
        tables.dump(cache, yield_now, |row, _| {
            keys.extend((row.table == table).then_some(row.key));
        })?;
        return Ok(keys);
    }

    let cache = &model.backend().cpu_caches()[cache];
    cache.each_key(|row| keys.extend((row.table == table).then_some(row.key)));
    let space = model.schema().tables[usize::from(table)].keys;
    keys.sort_unstable_by_key(|key| space.order(*key));
    let mut is_same = vec![false; keys.len()];
    let mut preloader = Preloader::new(model, Some(yield_now));
    for (keys, is_same) in keys.chunks(KEYS_PER_READ).zip(is_same.chunks_mut(KEYS_PER_READ)) {
        let read = preloader.read_rows(model.rows(table), keys, |key, bytes| {
            let mut cached = [0; ROW_BYTES_MAX];
            let cached = &mut cached[..bytes.len()];
            let is_cached = cache.query(RowKey { table, key }, cached);
            if let Ok(at) = keys.binary_search_by_key(&space.order(key), |key| space.order(*key)) {
                is_same[at] = is_cached && cached == bytes;
            }
        });
        log_unread(table, read);
    }
    let mut is_same = is_same.into_iter();
    keys.retain(|_| !is_same.next().unwrap_or(false));
    Ok(keys)
}

/// Reads removed rows into the caches again. Returns the number of rows read.
pub(super) fn read_again(
    writer: &mut RowWriter<'_>,
    model: &Model,
    removed: &mut [RemovedRows],
    yield_now: &dyn Fn(),
) -> Result<usize, CudaError> {
    let mut preloader = Preloader::new(model, Some(yield_now));
    let (mut count, mut failed) = (0, None);
    for &mut RemovedRows { table, ref mut keys } in removed {
        let space = model.schema().tables[usize::from(table)].keys;
        keys.sort_unstable_by_key(|key| space.order(*key));
        for keys in keys.chunks(KEYS_PER_READ) {
            let read = preloader.read_rows(model.rows(table), keys, |key, bytes| {
                count += 1;
                let inserted = writer.insert(RowKey { table, key }, bytes);
                failed = failed.take().or(inserted.err());
            });
            log_unread(table, read);
        }
    }
    writer.flush()?;
    failed.map_or(Ok(count), Err)
}

fn log_unread(table: u16, read: Result<(), SegmentError>) {
    if let Err(e) = read {
        log::error!("rows of table {table} leave the cache: {e}");
    }
}
