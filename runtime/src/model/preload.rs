//! Preloading: reads rows into the caches before a request needs them, in the order in which flash
//! stores them. A damaged page costs only its rows' place in the cache.

use crate::flash::Flash;
use crate::flash::table::{RowLocation, TableRows};
use crate::io::reader::{DeviceDepth, PageReader, ReadMethod};
use crate::model::opened::Model;
use crate::model::served_tables::{ServedTable, Storage};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::RowKey;
use std::sync::Arc;

/// Puts the trainer's most used keys into the caches in host memory, up to each table's fair share.
/// Does nothing for a model whose caches are on a GPU.
pub(crate) fn preload_hot_keys(model: &Model, flash: &Flash, yield_now: Option<&dyn Fn()>) {
    let caches = model.backend().cpu_caches();
    let mut preloader = Preloader::new(model.read_depth(), yield_now);
    for (number, table) in model.tables().iter().enumerate() {
        let Storage::Cached { cache: cache_number, rows } = &table.storage else { continue };
        let Some(cache) = caches.get(*cache_number) else { continue };
        let sharing = rows_of_cache(model.tables(), *cache_number).max(1);
        let share = cache.slots() as u128 * u128::from(rows.base_rows()) / u128::from(sharing);

        // The hot list only says which rows to read first.
        let mut keys = flash.hot_keys(number).unwrap_or_else(|e| {
            log::error!("table {number} starts with a cold cache: {e}");
            Vec::new()
        });
        // Some sets overflow before all slots are taken. Three quarters of the keys almost surely
        // find a slot.
        keys.truncate((share * 3 / 4) as usize);
        preloader.read_rows(number as u16, rows, cache, &keys);
    }
}

/// Returns the rows of all tables that share cache `number`.
fn rows_of_cache(tables: &[ServedTable], number: usize) -> u64 {
    let rows = |table: &ServedTable| match &table.storage {
        Storage::Cached { cache, rows } if *cache == number => rows.base_rows(),
        _ => 0,
    };
    tables.iter().map(rows).sum()
}

/// Reads rows into caches. With a `yield_now` it calls that before each batch of reads, while no
/// read is in flight, so that reads of requests do not queue behind its own.
pub(crate) struct Preloader<'a> {
    reader: PageReader,
    yield_now: Option<&'a dyn Fn()>,
}

impl<'a> Preloader<'a> {
    /// Reads through a reader of its own within the shared `depth`.
    pub fn new(depth: &Arc<DeviceDepth>, yield_now: Option<&'a dyn Fn()>) -> Self {
        Self { reader: PageReader::on(depth, ReadMethod::Auto), yield_now }
    }

    /// Reads the pages of `keys` in file order and inserts the rows of these keys into `cache`.
    pub fn read_rows(&mut self, table: u16, rows: &TableRows, cache: &Cache, keys: &[u64]) {
        let mut located: Vec<(RowLocation, u64)> =
            keys.iter().filter_map(|&key| Some((rows.locate(key)?, key))).collect();
        located.sort_unstable();
        let pages: Vec<&[(RowLocation, u64)]> = located.chunk_by(|a, b| a.0 == b.0).collect();

        let mut started = 0;
        while started < pages.len() || self.reader.in_flight() > 0 {
            self.start_reads(rows, &pages, &mut started);
            let arrived = self.reader.next(None, |number, page| {
                let wanted = pages[number as usize];
                let (location, segment) = (wanted[0].0, rows.segment(wanted[0].0));
                match segment.check_read(location.page, page) {
                    Err(e) => log::error!("{e}"),
                    Ok(page) => wanted.iter().for_each(|&(_, key)| {
                        if let Some(bytes) = segment.row(&page, key) {
                            let row = RowKey { table, key };
                            cache.insert(row, bytes, cache.epoch(row));
                        }
                    }),
                }
            });
            if !arrived {
                log::error!("table {table}: preloading stopped because the page reader failed");
                return;
            }
        }
    }

    /// Starts reads until the reader is full, or, where it must yield, only if none is in flight.
    fn start_reads(
        &mut self,
        rows: &TableRows,
        pages: &[&[(RowLocation, u64)]],
        started: &mut usize,
    ) {
        if let Some(yield_now) = self.yield_now {
            if self.reader.in_flight() > 0 {
                return;
            }
            yield_now();
        }
        while *started < pages.len() && self.reader.has_room() {
            let location = pages[*started][0].0;
            self.reader.begin(rows.segment(location).file(), location.page, *started as u64);
            *started += 1;
        }
    }
}
