//! A transition: replaces the model of a pipeline with the next generation, which shares its caches
//! and resident tables. `worker/live_model.rs` explains why no request sees rows of two
//! generations. Requests are served throughout.

use crate::clock::Clock;
use crate::flash::segment::SegmentError;
use crate::maintenance::background::{outside_idle_class, unhurried};
use crate::model::Model;
use crate::model::generation_change::{GenerationChange, TableChange};
use crate::model::preload::Preloader;
use crate::model::row_writer::RowWriter;
use crate::model::served_tables::Storage;
use crate::request::pipeline::Pipeline;
use crate::request::successor::Opened;
use crate::request::worker::backend::WorkerBackend;
use crate::request::worker::live_model::Successor;
use hatchback_kernels::cache::address::RowKey;
use hatchback_kernels::cache::codec::ROW_BYTES_MAX;
use hatchback_kernels::cuda::driver::CudaError;
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;

/// Keys whose rows a swap reads at a time. The reads need memory for each key.
const KEYS_PER_READ: usize = 1 << 18;

/// The effects of a swap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Swapped {
    /// Cached rows that were removed because they changed, and read anew after the swap.
    pub read: usize,
    /// Cached rows that were removed and not read again: they no longer exist, or could not be
    /// read.
    pub dropped: usize,
    /// Rows of resident tables that were replaced.
    pub patched: usize,
    /// Longest time for which no lookup could start.
    #[serde(skip)]
    pub pause: Duration,
}

/// Serves `opened` in place of the model of `pipeline`. Returns when no request uses the old model.
/// Calls `yield_now` between pieces of work.
///
/// # Errors
/// `CudaError` if the GPU failed. The old model is still served; some of its rows may no longer be
/// cached.
pub(crate) fn run(
    pipeline: &Pipeline,
    opened: Opened,
    clock: &dyn Clock,
    yield_now: &dyn Fn(),
) -> Result<Swapped, CudaError> {
    let Opened { model, change, patches } = opened;
    let (model, change) = (Arc::new(model), Arc::new(change));
    let workers = model.budget().workers;
    let backends: Vec<_> =
        (0..workers).map(|_| WorkerBackend::new(&model)).collect::<Result<_, _>>()?;
    let mut writer = RowWriter::on(&model)?;

    let live = pipeline.live();
    live.bar(Arc::clone(&change));
    let (users, first_pause) = outside_idle_class(|| live.renew(clock));
    pipeline.wait_until_left(&users, yield_now);
    let removed = remove_changed(&mut writer, &model, &change, yield_now);
    let switched = removed.and_then(|removed| {
        let patch = || patches.iter().try_for_each(|patch| patch.apply(model.backend()));
        // Lookups wait for the patch.
        patches.iter().for_each(|patch| patch.prefetch(model.backend()));
        let successor = Successor { model: Arc::clone(&model), backends };
        let (users, pause) = outside_idle_class(|| live.switch(successor, clock, patch))?;
        Ok((removed, users, pause))
    });
    let (removed, users, pause) = switched.inspect_err(|_| live.lift())?;

    pipeline.reset_stats();
    pipeline.wait_until_left(&users, yield_now);
    live.lift();
    // The new model is served whether or not its changed rows return to the caches.
    let read = unhurried(|| read_again(&mut writer, &model, &removed, yield_now));
    let read = read.unwrap_or_else(|e| {
        log::error!("the changed rows of {} stay out of the caches: {e}", model.generation());
        0
    });
    Ok(Swapped {
        read,
        dropped: removed.iter().map(|of_table| of_table.keys.len()).sum::<usize>() - read,
        patched: patches.iter().map(|patch| patch.rows.len()).sum(),
        pause: pause.max(first_pause),
    })
}

/// The rows of a table that a swap removed from the caches.
struct RemovedRows {
    table: u16,
    /// Ascending.
    keys: Vec<u64>,
}

/// Returns the most bytes that the lists of rows take during a swap with this `change`.
pub(crate) fn list_bytes(model: &Model, change: &GenerationChange) -> u64 {
    // The keys of a table that may differ, those that were cached in a list that grows by doubling,
    // and a byte for each comparison.
    const BYTES_PER_KEY: usize = 8 + 16 + 1;
    // Where the rows of a piece are, and the pages with these rows.
    const BYTES_PER_READ: usize = 64;

    let slots = model.backend().cache_slots();
    let cached = model.tables().iter().map(|table| table.storage).enumerate();
    let cached = cached.filter(|(_, storage)| matches!(storage, Storage::Cached(_)));
    let rows = cached.map(|(table, _)| match change.of(table as u16) {
        TableChange::Keys(keys) => keys.len(),
        TableChange::All => slots,
    });
    let rows = rows.fold(0, usize::saturating_add).min(slots);
    let dump = model.backend().device_tables().map_or(0, |tables| tables.dump_bytes());
    (rows * BYTES_PER_KEY + rows.min(KEYS_PER_READ) * BYTES_PER_READ + dump) as u64
}

/// Removes the changed rows from the caches. Returns those that were cached.
fn remove_changed(
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

/// Returns the cached keys of a table whose rows may differ in `model`, ascending. In host memory
/// each row is read and compared; on a GPU all cached keys are returned.
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
        keys.sort_unstable();
        return Ok(keys);
    }

    let cache = &model.backend().cpu_caches()[cache];
    cache.each_key(|row| keys.extend((row.table == table).then_some(row.key)));
    keys.sort_unstable();
    let mut is_same = vec![false; keys.len()];
    let mut preloader = Preloader::new(model, Some(yield_now));
    for (keys, is_same) in keys.chunks(KEYS_PER_READ).zip(is_same.chunks_mut(KEYS_PER_READ)) {
        let read = preloader.read_rows(model.rows(table), keys, |key, bytes| {
            let mut cached = [0; ROW_BYTES_MAX];
            let cached = &mut cached[..bytes.len()];
            let is_cached = cache.query(RowKey { table, key }, cached);
            if let Ok(at) = keys.binary_search(&key) {
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
fn read_again(
    writer: &mut RowWriter<'_>,
    model: &Model,
    removed: &[RemovedRows],
    yield_now: &dyn Fn(),
) -> Result<usize, CudaError> {
    let mut preloader = Preloader::new(model, Some(yield_now));
    let (mut count, mut failed) = (0, None);
    for &RemovedRows { table, ref keys } in removed {
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
