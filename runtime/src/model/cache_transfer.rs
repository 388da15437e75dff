//! The cache transfer of a swap: copies the rows in the old generation's caches, in host memory or
//! on a GPU, into the new generation's caches while these are in host memory. A row whose segment
//! both generations have is copied. A row that a delta changed is read from flash. A row that the
//! new generation does not have is dropped. Never changes the old caches: requests in flight still
//! use them.

use crate::flash::Flash;
use crate::flash::table::{CLUSTERED, RowLocation, TableRows};
use crate::model::backend::ModelBackend;
use crate::model::opened::Model;
use crate::model::preload::Preloader;
use crate::model::served_tables::Storage;
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::RowKey;
use hatchback_kernels::cuda::driver::CudaError;
use serde::Serialize;
use std::path::PathBuf;

/// Rows of the old caches by what the transfer did with them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Transferred {
    /// Rows that are equal in both generations and were copied.
    pub copied: usize,
    /// Rows that changed and were read from flash.
    pub read: usize,
    /// Rows that the new generation does not have, or that exceeded the number to read.
    #[serde(rename = "left")]
    pub dropped: usize,
}

/// At most one of so many slots of a cache is filled by a read from flash. Requests warm the rest.
const SLOTS_PER_READ: usize = 4;

/// Rows between two calls of `yield_now`.
const ROWS_PER_YIELD: usize = 64;

/// One table that both generations have in a cache and encode alike.
struct SharedTable<'a> {
    new: &'a TableRows,
    old: &'a TableRows,
    /// The new generation's cache.
    cache: &'a Cache,
    /// For each segment number of `old`, the number of the same segment in `new`.
    same_segments: [Option<u8>; 256],
}

impl<'a> SharedTable<'a> {
    /// Returns table `number` if both models cache it under the same name in the same format.
    fn new(new: &'a Model, old: &'a Model, number: usize) -> Option<Self> {
        let (new_table, old_table) = (&new.tables()[number], &old.tables()[number]);
        let name_in = |model: &'a Model| &model.schema().tables[number].name;
        let (Storage::Cached { cache, rows: new_rows }, Storage::Cached { rows: old_rows, .. }) =
            (&new_table.storage, &old_table.storage)
        else {
            return None;
        };
        if new_table.format != old_table.format || name_in(new) != name_in(old) {
            return None;
        }
        Some(Self {
            new: new_rows,
            old: old_rows,
            cache: new.backend().cpu_caches().get(*cache)?,
            same_segments: same_segments(old_rows, new_rows),
        })
    }

    /// Returns whether the row of `key` has in the old generation the bytes that `location` holds
    /// in the new one.
    fn is_unchanged(&self, key: u64, location: RowLocation) -> bool {
        let in_new = |from: RowLocation| {
            Some(RowLocation { segment: self.same_segments[usize::from(from.segment)]?, ..from })
        };
        self.old.locate(key).and_then(in_new) == Some(location)
    }
}

/// Returns for each segment number of `old` the number of the same segment in `new`.
fn same_segments(old: &TableRows, new: &TableRows) -> [Option<u8>; 256] {
    let numbered = |rows: &TableRows| -> Vec<(u8, PathBuf)> {
        let segments =
            rows.segments().iter().enumerate().map(|(n, s)| (n as u8, s.path().to_owned()));
        segments.chain(rows.clustered().map(|s| (CLUSTERED, s.path().to_owned()))).collect()
    };
    let (mut same, new) = ([None; 256], numbered(new));
    for (number, path) in numbered(old) {
        same[usize::from(number)] = new.iter().find(|(_, p)| *p == path).map(|(n, _)| *n);
    }
    same
}

/// Fills the caches of `model`, which are in host memory, from the caches of `old`, an earlier or
/// later generation of the same model. Calls `yield_now` between pieces of work.
pub(crate) fn warm_from(model: &mut Model, old: &Model, yield_now: &dyn Fn()) -> Transferred {
    let dump_bytes = old.backend().device_tables().map_or(0, |tables| tables.dump_bytes());
    model.record_peak(dump_bytes as u64);

    let mut transferred = Transferred::default();
    let mut rows: usize = 0;
    let tables = model.tables().len().min(old.tables().len());
    let mut changed: Vec<Vec<u64>> = vec![Vec::new(); tables];
    let shared: Vec<_> = (0..tables).map(|t| SharedTable::new(model, old, t)).collect();

    let each = |row: RowKey, bytes: &[u8]| {
        rows += 1;
        if rows.is_multiple_of(ROWS_PER_YIELD) {
            yield_now();
        }
        let table = usize::from(row.table);
        let Some(Some(shared)) = shared.get(table) else { return };
        let Some(location) = shared.new.locate(row.key) else {
            transferred.dropped += 1;
            return;
        };
        let cache = shared.cache;
        if shared.is_unchanged(row.key, location) {
            transferred.copied += usize::from(cache.insert(row, bytes, cache.epoch(row)));
        } else if changed[table].len() < cache.slots() / SLOTS_PER_READ {
            changed[table].push(row.key);
        } else {
            transferred.dropped += 1;
        }
    };
    if let Err(e) = dump_caches(old.backend(), yield_now, each) {
        log::error!("the cache transfer stopped, the remaining rows start cold: {e}");
    }

    let mut preloader = Preloader::new(model.read_depth(), Some(yield_now));
    for (number, keys) in changed.iter().enumerate() {
        let Some(shared) = &shared[number] else { continue };
        preloader.read_rows(number as u16, shared.new, shared.cache, keys);
        transferred.read += keys.len();
    }
    transferred
}

/// Calls `each` for every row that the caches hold, and `yield_now` between pieces of a cache on a
/// GPU.
fn dump_caches(
    backend: &ModelBackend,
    yield_now: &dyn Fn(),
    mut each: impl FnMut(RowKey, &[u8]),
) -> Result<(), CudaError> {
    match backend {
        ModelBackend::Cpu { tables, .. } => {
            tables.caches.iter().for_each(|cache| cache.dump(&mut each));
            Ok(())
        }
        ModelBackend::GpuTables { tables, .. } | ModelBackend::Gpu { tables, .. } => {
            (0..tables.caches()).try_for_each(|number| tables.dump(number, yield_now, &mut each))
        }
    }
}

/// Returns whether a swap from `old` to the live generation of `flash` will copy most rows: after a
/// delta, nearly all rows are in segments that both generations have.
pub(crate) fn shares_segments_with(old: &Model, flash: &Flash) -> bool {
    old.cache_slots() > 0 && flash.manifest().parent == Some(old.generation().sequence)
}
