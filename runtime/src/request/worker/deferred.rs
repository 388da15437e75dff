//! Fetches rows that no request waits for. These are rows that a request answered with the default
//! row, and rows that callers prefetch. A worker reads them between requests, a few pages at a
//! time, on its own thread. This needs no further queue, and the next request finds the rows.

use crate::flash::table::RowLocation;
use crate::io::page::Page;
use crate::model::Model;
use crate::request::negative_cache::NegativeCache;
use crate::request::worker::backend::WorkerBackend;
use crate::request::worker::fetch::{
    RowFetcher, check_page, index_in, page_len, refuse_barred, token,
};
use crate::request::worker::live_model::LiveModel;
use hatchback_kernels::cache::Epoch;
use hatchback_kernels::cache::address::RowKey;
use hatchback_kernels::cache::codec::ROW_BYTES_MAX;
use hatchback_kernels::cuda::driver::CudaError;
use hatchback_kernels::lookup::miss_list::{Miss, MissList};

/// Slot of a row that the GPU has not probed yet.
const NOT_PROBED: u32 = u32::MAX - 1;
/// Slot of a row that is not inserted: it is in the cache already, or not on its page.
const NOT_WANTED: u32 = u32::MAX;

/// The location of a row that a caller prefetches.
enum Prefetched {
    /// In memory, or in no table. No read is needed.
    Known,
    /// On flash.
    Missing(Miss),
}

/// Result of `read_deferred`.
struct DeferredReads {
    /// Rows that were inserted into a cache in host memory.
    inserted: usize,
    /// Rows at the front of `deferred` whose pages were read.
    read: usize,
    /// Rows at the front of `deferred` that need no further work.
    done: usize,
}

impl RowFetcher {
    /// Adds a row that a later request will look up to the deferred rows, if it is not in memory.
    /// Returns false if there was no room for it.
    pub fn enqueue_prefetch(&mut self, model: &Model, row: RowKey) -> bool {
        let Prefetched::Missing(miss) = self.find(model, row) else { return true };
        // A full list would grow, and after warm-up nothing may be allocated.
        let has_room = self.deferred.len() < self.deferred.capacity();
        if has_room {
            self.deferred.push(miss);
        }
        has_room
    }

    fn find(&self, model: &Model, row: RowKey) -> Prefetched {
        if !model.is_cached(row.table) {
            return Prefetched::Known;
        }
        let Some(location) = model.locate(row) else { return Prefetched::Known };
        if self.negative_cache.contains(row) {
            return Prefetched::Known;
        }
        let place = location.pack();
        let Some(cache) = model.cpu_cache(row.table) else {
            // `fetch_deferred` probes a GPU for all rows together.
            let (slot, epoch) = (NOT_PROBED, Epoch::default());
            return Prefetched::Missing(Miss { row, slot, place, epoch });
        };
        // The epoch is taken before the query: if the row changes after that, its insert is
        // refused.
        let epoch = cache.epoch(row);
        if cache.query(row, &mut [0; ROW_BYTES_MAX][..cache.row_bytes()]) {
            return Prefetched::Known;
        }
        Prefetched::Missing(Miss { row, slot: 0, place, epoch })
    }

    /// Fetches deferred rows into the caches. Reads at most `pages_max` pages and leaves the other
    /// rows for the next call. Returns how many rows were inserted.
    pub fn fetch_deferred(
        &mut self,
        model: &Model,
        live: &LiveModel,
        backend: &mut WorkerBackend,
        pages_max: usize,
    ) -> usize {
        self.probe_gpu(backend);
        if backend.failure().is_some() {
            // Rows that stay here count as work (`RequestQueue::next`), and the worker would never
            // sleep.
            self.deferred.clear();
        }
        if self.deferred.is_empty() {
            return 0;
        }

        let reads = self.read_deferred(model, live, pages_max);
        let inserted = reads.inserted + self.insert_on_gpu(backend, reads.read);
        self.deferred.drain(..reads.done);
        inserted
    }

    /// Removes the rows that the GPU has cached already.
    fn probe_gpu(&mut self, backend: &mut WorkerBackend) {
        let Some(gpu) = backend.gpu() else { return };
        self.deferred.sort_unstable_by_key(|m| m.slot == NOT_PROBED);
        let known = self.deferred.partition_point(|m| m.slot != NOT_PROBED);
        let probed = gpu.probe(&mut self.deferred[known..], |miss, is_cached, epoch| {
            (miss.slot, miss.epoch) = (if is_cached { NOT_WANTED } else { 0 }, epoch);
        });
        match probed {
            Ok(()) => self.deferred.retain(|m| m.slot != NOT_WANTED),
            Err(e) => {
                // These rows are given up. Tried again, they would keep the worker busy while the
                // GPU fails.
                self.deferred.truncate(known);
                recover(backend, "probing the GPU for prefetched rows failed", &e);
            }
        }
    }

    /// Reads the pages of deferred rows. Inserts the rows into caches in host memory; for a GPU,
    /// stages each row in the slot of its own index.
    fn read_deferred(
        &mut self,
        model: &Model,
        live: &LiveModel,
        pages_max: usize,
    ) -> DeferredReads {
        let (mut next, mut started, mut waiting, mut inserted) = (0, 0, 0, 0);
        self.round = self.round.wrapping_add(1);
        self.deferred.sort_unstable_by_key(|m| (m.row.table, m.place));
        loop {
            while next < self.deferred.len() && started < pages_max && self.reader.reserve() {
                let Miss { row, place, .. } = self.deferred[next];
                let location = RowLocation::unpack(place);
                let file = model.rows(row.table).segment(location).file();
                self.reader.begin(file, location.page, token(self.round, next));
                next += page_len(&self.deferred[next..]);
                started += 1;
                waiting += 1;
            }
            // Reads of earlier rounds may fill the reader. Then rows are left to read although none
            // of this round is in flight.
            if waiting == 0 && (next == self.deferred.len() || started == pages_max) {
                return DeferredReads { inserted, read: next, done: next };
            }

            let Self { reader, deferred, misses, negative_cache, counters, round, .. } = self;
            let arrived = reader.next(None, |token, page| {
                let Some(start) = index_in(token, *round) else { return };
                waiting -= 1;
                let rows = start..start + page_len(&deferred[start..]);
                let rows = &mut deferred[rows];
                // A transition may have begun while the page was read.
                rows.iter_mut().for_each(|miss| refuse_barred(live, miss));
                let page = check_page(model, rows[0], page, counters);
                inserted += insert(model, rows, start, page.as_ref(), misses, negative_cache);
            });
            if !arrived {
                // After the reader failed, no row is tried again.
                return DeferredReads { inserted, read: 0, done: self.deferred.len() };
            }
        }
    }

    /// Inserts the first `read` deferred rows, which are staged, into the caches on the GPU.
    fn insert_on_gpu(&mut self, backend: &mut WorkerBackend, read: usize) -> usize {
        let Some(gpu) = backend.gpu() else { return 0 };
        let rows = self.deferred[..read].iter().filter(|m| m.slot != NOT_WANTED);
        gpu.insert(&self.misses, rows).unwrap_or_else(|e| {
            recover(backend, "inserting deferred rows on the GPU failed", &e);
            0
        })
    }
}

/// Logs an error of the GPU and makes the backend usable again if possible.
fn recover(backend: &mut WorkerBackend, problem: &str, e: &CudaError) {
    log::error!("{problem}: {e}");
    backend.recover();
}

/// Inserts `rows`, which are all on `page`, and returns how many a cache in host memory took. For a
/// GPU it stages them: `rows[i]` in slot `first + i`. A `page` of `None` is damaged.
fn insert(
    model: &Model,
    rows: &mut [Miss],
    first: usize,
    page: Option<&Page<'_>>,
    staging: &mut MissList,
    negative_cache: &mut NegativeCache,
) -> usize {
    let segment = model.rows(rows[0].row.table).segment(RowLocation::unpack(rows[0].place));
    let mut inserted = 0;

    for (number, miss) in rows.iter_mut().enumerate() {
        miss.slot = NOT_WANTED;
        let Some(page) = page else { continue };

        match (segment.row(page, miss.row.key), model.cpu_cache(miss.row.table)) {
            (None, _) => negative_cache.insert(miss.row),
            (Some(bytes), Some(cache)) => {
                inserted += usize::from(cache.insert(miss.row, bytes, miss.epoch));
            }
            (Some(bytes), None) => {
                miss.slot = (first + number) as u32;
                staging.row_mut(miss.slot)[..bytes.len()].copy_from_slice(bytes);
            }
        }
    }

    inserted
}
