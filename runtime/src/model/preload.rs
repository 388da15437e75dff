//! Preloading: reads rows before a request needs them, in the order in which flash stores them. A
//! damaged page costs only its own rows.

use crate::flash::Flash;
use crate::flash::segment::SegmentError;
use crate::flash::table::{RowLocation, TableRows};
use crate::io::page::{AlignedPage, PageBytes};
use crate::io::reader::PageReader;
use crate::limits::VERIFY_PAGES;
use crate::model::opened::Model;
use crate::model::served_tables::{ServedTable, Storage};
use hatchback_kernels::cache::address::RowKey;
use std::io;

/// Puts the trainer's most used keys into the caches in host memory, up to each table's fair share.
/// Does nothing for a model whose caches are on a GPU.
pub(crate) fn preload_hot_keys(model: &Model, flash: &Flash, yield_now: Option<&dyn Fn()>) {
    let caches = model.backend().cpu_caches();
    let mut preloader = Preloader::new(model, yield_now);
    for (number, table) in model.tables().iter().enumerate() {
        let Storage::Cached(cache_number) = table.storage else { continue };
        let (rows, Some(cache)) = (&table.rows, caches.get(cache_number)) else { continue };
        let sharing = rows_of_cache(model.tables(), cache_number).max(1);
        let share = cache.slots() as u128 * u128::from(rows.base_rows()) / u128::from(sharing);

        // The hot list only says which rows to read first.
        let mut keys = flash.hot_keys(number).unwrap_or_else(|e| {
            log::error!("table {number} starts with a cold cache: {e}");
            Vec::new()
        });
        // Some sets overflow before all slots are taken. Three quarters of the keys almost surely
        // find a slot.
        keys.truncate((share * 3 / 4) as usize);
        let read = preloader.read_rows(rows, &keys, |key, bytes| {
            let row = RowKey { table: number as u16, key };
            cache.insert(row, bytes, cache.epoch(row));
        });
        read.unwrap_or_else(|e| log::error!("table {number} starts with a colder cache: {e}"));
    }
}

/// Returns the rows of all tables that share cache `number`.
fn rows_of_cache(tables: &[ServedTable], number: usize) -> u64 {
    let cached = tables.iter().filter(|table| table.storage == Storage::Cached(number));
    cached.map(|table| table.rows.base_rows()).sum()
}

/// The keys of a page, at least one, each with the place of the page.
type WantedPage<'a> = &'a [(RowLocation, u64)];

/// Passes the rows of the keys of one page to `take`.
fn take_rows(
    rows: &TableRows,
    wanted: WantedPage<'_>,
    page: io::Result<&PageBytes>,
    take: &mut impl FnMut(u64, &[u8]),
) -> Result<(), SegmentError> {
    let (location, segment) = (wanted[0].0, rows.segment(wanted[0].0));
    let page = segment.check_read(location.page, page)?;
    for &(_, key) in wanted {
        if let Some(bytes) = segment.row(&page, key) {
            take(key, bytes);
        }
    }
    Ok(())
}

/// Reads the pages that follow each other on flash, up to a mebibyte at a time, as a device reads
/// fastest. Returns the pages that it left out because few follow each other, and the first error.
fn read_runs<'a>(
    rows: &TableRows,
    pages: &[WantedPage<'a>],
    take: &mut impl FnMut(u64, &[u8]),
) -> (Vec<WantedPage<'a>>, Option<SegmentError>) {
    /// Pages of a run at least. Shorter ones take less time with many reads in flight.
    const RUN_PAGES_MIN: usize = 16;
    let follows = |a: &WantedPage<'_>, b: &WantedPage<'_>| {
        let next = RowLocation { page: a[0].0.page.saturating_add(1), ..a[0].0 };
        next == b[0].0
    };

    let (mut left, mut failed, mut buffer) = (Vec::new(), None, Vec::new());
    for run in pages.chunk_by(follows) {
        if run.len() < RUN_PAGES_MIN {
            left.extend_from_slice(run);
            continue;
        }
        buffer.resize_with(run.len().min(VERIFY_PAGES).max(buffer.len()), AlignedPage::zeroed);
        for some in run.chunks(VERIFY_PAGES) {
            let location = some[0][0].0;
            let buffer = &mut buffer[..some.len()];
            if rows.segment(location).file().read_pages(location.page, buffer).is_err() {
                left.extend_from_slice(some);
                continue;
            }
            for (wanted, page) in some.iter().zip(buffer) {
                let taken = take_rows(rows, wanted, Ok(&page.0), take);
                failed = failed.take().or(taken.err());
            }
        }
    }
    (left, failed)
}

/// Reads rows. With a `yield_now` it calls that before each batch of reads, while no
/// read is in flight, so that reads of requests do not queue behind its own.
pub(crate) struct Preloader<'a> {
    reader: PageReader,
    yield_now: Option<&'a dyn Fn()>,
}

impl<'a> Preloader<'a> {
    /// Reads pages of `model` through a reader of its own, within the depth of the model's device.
    pub fn new(model: &Model, yield_now: Option<&'a dyn Fn()>) -> Self {
        Self { reader: model.page_reader(), yield_now }
    }

    /// Reads the pages of `keys` in file order and passes the row of each key to `take`. A key that
    /// the table does not have is left out.
    ///
    /// # Errors
    /// The first error of a page. The rows of the other pages were passed on.
    pub fn read_rows(
        &mut self,
        rows: &TableRows,
        keys: &[u64],
        mut take: impl FnMut(u64, &[u8]),
    ) -> Result<(), SegmentError> {
        let mut located: Vec<(RowLocation, u64)> =
            keys.iter().filter_map(|&key| Some((rows.locate(key)?, key))).collect();
        located.sort_unstable();
        let pages: Vec<WantedPage<'_>> = located.chunk_by(|a, b| a.0 == b.0).collect();

        let (pages, failed) = match self.yield_now {
            None => read_runs(rows, &pages, &mut take),
            Some(_) => (pages, None),
        };
        let scattered = self.read_scattered(rows, &pages, &mut take);
        failed.map_or(scattered, Err)
    }

    /// Reads pages, many in flight.
    fn read_scattered(
        &mut self,
        rows: &TableRows,
        pages: &[WantedPage<'_>],
        take: &mut impl FnMut(u64, &[u8]),
    ) -> Result<(), SegmentError> {
        let (mut started, mut failed) = (0, None);
        while started < pages.len() || self.reader.in_flight() > 0 {
            self.start_reads(rows, pages, &mut started);
            let arrived = self.reader.next(None, |number, page| {
                let taken = take_rows(rows, pages[number as usize], page, take);
                failed = failed.take().or(taken.err());
            });
            if !arrived {
                let path = rows.segments()[0].path();
                return Err(SegmentError::field(path, "pages", "the page reader failed"));
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Starts reads until the reader is full, or, where it must yield, only if none is in flight.
    fn start_reads(&mut self, rows: &TableRows, pages: &[WantedPage<'_>], started: &mut usize) {
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
