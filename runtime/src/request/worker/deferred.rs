//! Rows that no request waits for: those that were answered with defaults, and those that callers
//! named ahead. Read between requests, a few pages at a time.

use crate::flash::table::RowLocation;
use crate::io::page::PageBytes;
use crate::model::Model;
use crate::request::gpu::OnGpu;
use crate::request::negative_cache::NegativeCache;
use crate::request::worker::fetch::{check_page, group_len};
use crate::request::worker::{Counters, Worker};
use hatchback_kernels::cache::Epoch;
use hatchback_kernels::cache::address::RowKey;
use hatchback_kernels::cache::codec::ROW_BYTES_MAX;
use hatchback_kernels::cuda::driver::CudaError;
use hatchback_kernels::lookup::miss_list::{Miss, MissList};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// The slot of a row that a GPU has not been asked for.
const NOT_ASKED: u32 = u32::MAX - 1;
/// The slot of a row that is not to be inserted: it is in the cache already, or not on its page.
const NOT_WANTED: u32 = u32::MAX;

impl Worker {
    /// Notes a row that a request to come will look up; `fetch_behind` fetches it. Returns whether
    /// there was room; a row that is in memory or in no table needs none.
    pub fn fetch_ahead(&mut self, row: RowKey) -> bool {
        let model = Arc::clone(&self.model);
        if self.broken().is_some() {
            return false;
        }
        if !model.is_cached(row.table) {
            return true;
        }
        let Some(place) = model.locate(row) else { return true };
        if self.absent.holds(row) {
            return true;
        }
        // A GPU is asked for all of them together, in `fetch_behind`.
        let (mut epoch, mut slot) = (Epoch::default(), NOT_ASKED);
        if let Some(cache) = model.cache(row.table) {
            (epoch, slot) = (cache.epoch(row), 0);
            if cache.query(row, &mut [0; ROW_BYTES_MAX][..cache.row_bytes()]) {
                return true;
            }
        }
        let has_room = self.behind.len() < self.behind.capacity();
        if has_room {
            self.behind.push(Miss { row, slot, place: place.pack(), epoch });
        }
        has_room
    }

    /// Rows that `fetch_behind` has yet to fetch.
    pub fn behind(&self) -> usize {
        self.behind.len()
    }

    /// Fetches, after the answer is out, the rows that the last requests answered with defaults, so
    /// that the next request finds them in the cache. Reads at most `pages_max` pages and leaves
    /// the rest for the next call. Returns how many rows went in.
    pub fn fetch_behind(&mut self, pages_max: usize) -> usize {
        let model = Arc::clone(&self.model);
        let (mut next, mut begun, mut waiting, mut inserted) = (0, 0, 0, 0);
        self.ask_gpu();
        if self.broken().is_some() {
            self.behind.clear();
        }
        if self.behind.is_empty() {
            return 0;
        }
        self.round = self.round.wrapping_add(1);
        self.behind.sort_unstable_by_key(|m| (m.row.table, m.place));
        loop {
            while next < self.behind.len() && begun < pages_max && self.reader.has_room() {
                let Miss { row, place, .. } = self.behind[next];
                let token = u64::from(self.round) << 32 | next as u64;
                let place = RowLocation::unpack(place);
                self.reader.begin(model.rows(row.table).segment(place).file(), place.page, token);
                next += group_len(&self.behind[next..]);
                begun += 1;
                waiting += 1;
            }
            let Self { reader, behind, misses, absent, counters, round, .. } = self;
            let more = waiting > 0 || (next < behind.len() && begun < pages_max);
            let done = more
                && reader.next(None, |token, page| {
                    if (token >> 32) as u32 == *round {
                        waiting -= 1;
                        let start = token as u32 as usize;
                        let range = start..start + group_len(&behind[start..]);
                        inserted += insert(
                            &model,
                            (&mut behind[..], range),
                            misses,
                            absent,
                            page,
                            counters,
                        );
                    }
                });
            if !done {
                // Where the reader failed nothing is tried again.
                let end = if more { self.behind.len() } else { next };
                inserted += self.insert_on_gpu(if more { 0 } else { next });
                self.behind.drain(..end);
                return inserted;
            }
        }
    }

    /// Asks the GPU for rows that were named ahead: those that it holds need no reading.
    fn ask_gpu(&mut self) {
        let Some(Ok(gpu)) = &mut self.gpu else { return };
        let lookup = gpu.lookup();
        self.behind.sort_unstable_by_key(|m| m.slot == NOT_ASKED);
        let known = self.behind.partition_point(|m| m.slot != NOT_ASKED);
        let asked = lookup.probe(&mut self.behind[known..], |miss, cached, epoch| {
            (miss.slot, miss.epoch) = (if cached { NOT_WANTED } else { 0 }, epoch);
        });
        match asked {
            Ok(()) => self.behind.retain(|m| m.slot != NOT_WANTED),
            Err(e) => {
                self.behind.truncate(known);
                self.recover("rows named ahead", &e);
            }
        }
    }

    /// Lets the GPU be used on after it failed at `what`, if it can be.
    fn recover(&mut self, what: &str, e: &CudaError) {
        log::error!("{what}: {e}");
        self.gpu = self.gpu.take().map(|gpu| gpu.and_then(OnGpu::recovered));
    }

    /// Puts the first `read` rows of `behind`, which are staged in the slots that they name, into
    /// the GPU's caches.
    fn insert_on_gpu(&mut self, read: usize) -> usize {
        let Some(Ok(gpu)) = &mut self.gpu else { return 0 };
        let lookup = gpu.lookup();
        let rows = self.behind[..read].iter().filter(|m| m.slot != NOT_WANTED);
        let inserted = lookup.insert(&self.misses, rows);
        inserted.unwrap_or_else(|e| {
            self.recover("rows that were read behind", &e);
            0
        })
    }
}

/// Caches the rows of a page for the misses in `range` of `behind`, which are all of it; returns
/// how many went in. For a GPU it stages them, each in the slot of its own number.
fn insert(
    model: &Model,
    (behind, range): (&mut [Miss], Range<usize>),
    staging: &mut MissList,
    absent: &mut NegativeCache,
    page: io::Result<&PageBytes>,
    counters: &mut Counters,
) -> usize {
    let first = behind[range.start];
    let page = check_page(model, first, page, counters);
    let segment = model.rows(first.row.table).segment(RowLocation::unpack(first.place));
    let mut inserted = 0;
    for number in range {
        let miss = &mut behind[number];
        miss.slot = NOT_WANTED;
        let Some(page) = &page else { continue };
        match (segment.row(page, miss.row.key), model.cache(miss.row.table)) {
            (None, _) => absent.note(miss.row),
            (Some(bytes), Some(cache)) => {
                inserted += usize::from(cache.insert(miss.row, bytes, miss.epoch))
            }
            (Some(bytes), None) => {
                staging.row_mut(number as u32)[..bytes.len()].copy_from_slice(bytes);
                miss.slot = number as u32;
            }
        }
    }
    inserted
}
