//! Preloading: reads rows before a request needs them, in the order in which flash stores them. A
//! damaged page costs only its own rows.

use crate::flash::Flash;
use crate::flash::segment::SegmentError;
use crate::flash::table::{RowLocation, TableRows};
use crate::io::page::{AlignedPage, PageBytes};
use crate::io::reader::PageReader;
use crate::limits::{BACKGROUND_RUN_PAGES, VERIFY_PAGES};
use crate::model::opened::Model;
use crate::model::served_tables::{ServedTable, Storage};
use hatchback_kernels::cache::address::RowKey;
use std::io;

/// Puts the trainer's most used keys into the caches in host memory, up to each table's fair share.
/// Does nothing for a model whose caches are on a GPU.
pub(crate) fn preload_hot_keys(model: &Model, flash: &Flash, yield_now: Option<&dyn Fn()>) {
    let mut preloader = Preloader::new(model, yield_now);
    for number in 0..model.tables().len() {
        let Some(cache) = model.cpu_cache(number as u16) else { continue };
        let keys = hot_keys(model, flash, number);
        let read = preloader.read_rows(model.rows(number as u16), &keys, |key, bytes| {
            let row = RowKey { table: number as u16, key };
            cache.insert(row, bytes, cache.epoch(row));
        });
        read.unwrap_or_else(|e| log::error!("table {number} starts with a colder cache: {e}"));
    }
}

/// Returns the keys of table `number` that the trainer used most, the most used key first, up to
/// the table's fair share of its cache. Returns none for a table without a cache in host memory.
pub(crate) fn hot_keys(model: &Model, flash: &Flash, number: usize) -> Vec<u64> {
    let Some(table) = model.tables().get(number) else { return Vec::new() };
    let Storage::Cached(cache_number) = table.storage else { return Vec::new() };
    let Some(cache) = model.backend().cpu_caches().get(cache_number) else { return Vec::new() };
    let sharing = rows_of_cache(model.tables(), cache_number).max(1);
    let share = cache.slots() as u128 * u128::from(table.rows.base_rows()) / u128::from(sharing);

    // The hot list only says which rows to read first.
    let mut keys = flash.hot_keys(number).unwrap_or_else(|e| {
        log::error!("table {number} starts with a cold cache: {e}");
        Vec::new()
    });
    // Some sets overflow before all slots are taken. Three quarters of the keys almost surely find
    // a slot.
    keys.truncate((share * 3 / 4) as usize);
    keys
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

/// Pages of a run at least. Shorter ones take less time with many reads in flight.
const RUN_PAGES_MIN: usize = 16;

/// What [`Preloader::read_runs`] left to do.
struct AfterRuns<'a> {
    /// The pages that it left out because few follow each other.
    scattered: Vec<WantedPage<'a>>,
    /// The first error.
    failed: Option<SegmentError>,
}

/// Reads rows. With a `yield_now` it is a background reader: it has few reads in flight, and calls
/// `yield_now` before each few, while none is in flight. Reads of requests then queue behind few
/// reads of its own.
pub(crate) struct Preloader<'a> {
    reader: PageReader,
    yield_now: Option<&'a dyn Fn()>,
    /// Pages of a run, empty before the first run.
    run: Vec<AlignedPage>,
}

impl<'a> Preloader<'a> {
    /// Reads pages of `model` through a reader of its own, within the depth of the model's device.
    pub fn new(model: &Model, yield_now: Option<&'a dyn Fn()>) -> Self {
        let reader = match yield_now {
            Some(_) => model.background_reader(),
            None => model.page_reader(),
        };
        Self { reader, yield_now, run: Vec::new() }
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

        let AfterRuns { scattered, failed } = self.read_runs(rows, &pages, &mut take);
        let scattered = self.read_scattered(rows, &scattered, &mut take);
        failed.map_or(scattered, Err)
    }

    /// Reads the pages that follow each other on flash, many at a time, as a device reads fastest.
    fn read_runs<'p>(
        &mut self,
        rows: &TableRows,
        pages: &[WantedPage<'p>],
        take: &mut impl FnMut(u64, &[u8]),
    ) -> AfterRuns<'p> {
        let follows = |a: &WantedPage<'_>, b: &WantedPage<'_>| {
            let next = RowLocation { page: a[0].0.page.saturating_add(1), ..a[0].0 };
            next == b[0].0
        };
        let pages_max = if self.yield_now.is_some() { BACKGROUND_RUN_PAGES } else { VERIFY_PAGES };

        let mut after = AfterRuns { scattered: Vec::new(), failed: None };
        for run in pages.chunk_by(follows) {
            if run.len() < RUN_PAGES_MIN {
                after.scattered.extend_from_slice(run);
                continue;
            }
            let room = run.len().min(pages_max).max(self.run.len());
            self.run.resize_with(room, AlignedPage::zeroed);
            for some in run.chunks(pages_max) {
                if let Some(yield_now) = self.yield_now {
                    yield_now();
                }
                let location = some[0][0].0;
                let read = &mut self.run[..some.len()];
                if rows.segment(location).file().read_pages(location.page, read).is_err() {
                    after.scattered.extend_from_slice(some);
                    continue;
                }
                for (wanted, page) in some.iter().zip(read) {
                    let taken = take_rows(rows, wanted, Ok(&page.0), take);
                    after.failed = after.failed.take().or(taken.err());
                }
            }
        }
        after
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
