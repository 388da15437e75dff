//! Preloading: reads rows before a request needs them, in their order on flash. A damaged page
//! loses only its own rows.

use crate::flash::live::TableState;
use crate::flash::segment::SegmentError;
use crate::flash::segment::fences::LOCATE_KEYS;
use crate::flash::table::{RowLocation, TableRows};
use crate::flash::{Flash, FlashError};
use crate::io::page::PageBytes;
use crate::io::reader::PageReader;
use crate::limits::VERIFY_PAGES;
use crate::model::budget::Budget;
use crate::model::memory_plan::{MemoryPlan, Part};
use crate::model::opened::Model;
use crate::model::read_ahead::{self, Run, read_ahead};
use crate::model::served_tables::{ServedTable, Storage};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::RowKey;
use std::io;

/// Bytes that preloading takes for each key of a round, at most: the key twice, its place, and its
/// page in two lists.
const KEY_BYTES: u64 = 64;
/// Keys of a round, at least.
const ROUND_KEYS_MIN: u64 = 4096;

/// Returns the bytes of all page buffers of a preloader of `tables`.
fn buffer_bytes(tables: &[ServedTable], budget: &Budget) -> u64 {
    let pages = tables.iter().map(|table| table.rows.pages_max()).max().unwrap_or(0);
    (PageReader::bytes(budget.reads_max as usize) + read_ahead::buffer_bytes(pages)) as u64
}

/// Returns the keys that are preloaded in one round. Few rounds read few pages twice. But the lists
/// of a round must fit in what the budget leaves beside `plan` and in what is made later.
fn round_keys(tables: &[ServedTable], budget: &Budget, plan: &MemoryPlan) -> u64 {
    let left = budget.memory_bytes_max.saturating_sub(plan.total());
    let room = left.saturating_add(plan.later_bytes()).saturating_sub(buffer_bytes(tables, budget));
    (room / KEY_BYTES).max(ROUND_KEYS_MIN)
}

/// Returns the bytes that preloading the caches of `tables` takes for a while, at most.
pub(crate) fn bytes_max(
    flash: &Flash,
    tables: &[ServedTable],
    budget: &Budget,
    plan: &MemoryPlan,
) -> u64 {
    let of_table = |(table, state): (&ServedTable, &TableState)| {
        let Storage::Cached(_) = table.storage else { return None };
        // No cache has more rows than its bytes.
        let rows = plan.bytes_of(&[Part::Caches]) / table.format.row_bytes() as u64;
        Some((state.hot?.bytes / 8).min(rows))
    };
    match tables.iter().zip(&flash.record().live.tables).filter_map(of_table).max() {
        Some(keys) => {
            KEY_BYTES * keys.min(round_keys(tables, budget, plan)) + buffer_bytes(tables, budget)
        }
        None => 0,
    }
}

/// Puts the trainer's most used keys into the caches in host memory, up to each table's fair share.
/// Does nothing for a model whose caches are on a GPU.
pub(crate) fn preload_hot_keys(model: &Model, flash: &Flash, yield_now: Option<&dyn Fn()>) {
    let round = round_keys(model.tables(), model.budget(), model.memory());
    let mut preloader = Preloader::new(model, yield_now);
    for number in 0..model.tables().len() {
        let Some(cache) = model.cpu_cache(number as u16) else { continue };
        let mut preload = || -> Result<(), FlashError> {
            let Some(mut hot) = flash.first_hot_keys(number)? else { return Ok(()) };
            let (mut left, mut inserts) = (hot_keys_max(model, cache, number), Inserts::new(cache));
            while left > 0 {
                let keys = hot.read(round.min(left) as usize)?;
                left = if keys.is_empty() { 0 } else { left - keys.len() as u64 };
                let read = preloader.read_rows(model.rows(number as u16), &keys, |key, bytes| {
                    inserts.add(RowKey { table: number as u16, key }, bytes);
                });
                inserts.make();
                // A start goes on: a row that is not cached is read when a request needs it.
                read.unwrap_or_else(|e| log::error!("table {number} starts with fewer rows: {e}"));
            }
            Ok(())
        };
        preload().unwrap_or_else(|e| log::error!("table {number} starts with a colder cache: {e}"));
    }
}

/// Rows that are inserted together, so that the reads of their sets overlap.
struct Inserts<'a> {
    cache: &'a Cache,
    rows: Vec<RowKey>,
    /// `[rows.len(), row_bytes]`
    bytes: Vec<u8>,
}

impl<'a> Inserts<'a> {
    const ROWS: usize = 32;

    fn new(cache: &'a Cache) -> Self {
        let bytes = Vec::with_capacity(Self::ROWS * cache.row_bytes());
        Self { cache, rows: Vec::with_capacity(Self::ROWS), bytes }
    }

    fn add(&mut self, row: RowKey, bytes: &[u8]) {
        self.cache.prefetch_insert(row);
        self.rows.push(row);
        self.bytes.extend_from_slice(bytes);
        if self.rows.len() == Self::ROWS {
            self.make();
        }
    }

    /// Inserts the rows that were added.
    fn make(&mut self) {
        let bytes = self.bytes.chunks_exact(self.cache.row_bytes());
        for (row, bytes) in self.rows.drain(..).zip(bytes) {
            // No other thread uses these caches yet, so the set has the epoch that it had at the
            // read.
            self.cache.insert(row, bytes, self.cache.epoch(row));
        }
        self.bytes.clear();
    }
}

/// Returns the number of the most used keys of table `number` that are preloaded: the table's fair
/// share of `cache`.
fn hot_keys_max(model: &Model, cache: &Cache, number: usize) -> u64 {
    let sharing = rows_of_cache(model.tables(), model.tables()[number].storage).max(1);
    let rows = model.tables()[number].rows.base_rows();
    let share = cache.slots() as u128 * u128::from(rows) / u128::from(sharing);
    // Some sets overflow before all slots are taken. Three quarters of the keys almost surely find
    // a slot. Keys of a damaged list only warm the cache less: each row is checked, and a key
    // without a row is skipped.
    (share * 3 / 4) as u64
}

/// Returns the rows of all tables in `cache`.
fn rows_of_cache(tables: &[ServedTable], cache: Storage) -> u64 {
    let cached = tables.iter().filter(|table| table.storage == cache);
    cached.map(|table| table.rows.base_rows()).sum()
}

/// The wanted keys of one page, at least one, each with the location of the page.
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

/// Consecutive pages from which on one long read is faster than many single reads in flight.
const RUN_PAGES_MIN: usize = 16;

/// Result of [`Preloader::read_runs`].
struct AfterRuns<'a> {
    /// The pages that it did not read: few follow each other, the device refused the run, or this
    /// is a background reader.
    scattered: Vec<WantedPage<'a>>,
    /// The first error.
    failed: Option<SegmentError>,
}

/// Reads rows. With a `yield_now` it is a background reader with few reads in flight. It calls
/// `yield_now` before it starts some reads, while none is in flight. A request's read then waits
/// for few reads of this reader.
pub(crate) struct Preloader<'a> {
    reader: PageReader,
    yield_now: Option<&'a dyn Fn()>,
}

impl<'a> Preloader<'a> {
    /// Returns a preloader with a reader of its own, within the depth of the device of `model`.
    pub fn new(model: &Model, yield_now: Option<&'a dyn Fn()>) -> Self {
        let reader = match yield_now {
            Some(_) => model.background_reader(),
            None => model.page_reader(),
        };
        Self { reader, yield_now }
    }

    /// Reads the pages of `keys` in file order and passes the row of each key to `take`. Skips a
    /// key that the table does not have.
    ///
    /// # Errors
    /// The first error of a page. The rows of the other pages were passed on.
    pub fn read_rows(
        &mut self,
        rows: &TableRows,
        keys: &[u64],
        mut take: impl FnMut(u64, &[u8]),
    ) -> Result<(), SegmentError> {
        let mut located: Vec<(RowLocation, u64)> = Vec::with_capacity(keys.len());
        for keys in keys.chunks(LOCATE_KEYS) {
            let mut locations = [None; LOCATE_KEYS];
            rows.locate_all(keys, &mut locations);
            let found = locations.into_iter().zip(keys);
            located.extend(found.filter_map(|(location, &key)| Some((location?, key))));
        }
        // Keys of one page become neighbours, so each page is read once.
        located.sort_unstable_by_key(|(location, _)| location.pack());
        let same_page = |a: &(RowLocation, u64), b: &(RowLocation, u64)| a.0 == b.0;
        // Exactly sized, as `KEY_BYTES` counts them.
        let mut pages = Vec::<WantedPage<'_>>::with_capacity(located.chunk_by(same_page).count());
        pages.extend(located.chunk_by(same_page));

        let AfterRuns { scattered, failed } = self.read_runs(rows, &pages, &mut take);
        let scattered = self.read_scattered(rows, &scattered, &mut take);
        failed.map_or(scattered, Err)
    }

    /// Reads runs of consecutive pages, many pages with each call, which is the fastest way for a
    /// device. A background reader reads none.
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
        let mut after = AfterRuns { scattered: Vec::with_capacity(pages.len()), failed: None };
        let mut runs: Vec<&[WantedPage<'p>]> = Vec::new();
        for run in pages.chunk_by(follows) {
            match self.yield_now.is_some() || run.len() < RUN_PAGES_MIN {
                true => after.scattered.extend_from_slice(run),
                false => runs.extend(run.chunks(VERIFY_PAGES)),
            }
        }

        let place = |run: &&[WantedPage<'p>]| Run { first: run[0][0].0, pages: run.len() };
        let places: Vec<Run> = runs.iter().map(place).collect();
        read_ahead(rows, &places, |number, read| {
            let run = runs[number];
            // One bad page fails the whole run. Read one by one, only its own rows are lost.
            let Some(read) = read else { return after.scattered.extend_from_slice(run) };
            for (wanted, page) in run.iter().zip(read) {
                let taken = take_rows(rows, wanted, Ok(&page.0), take);
                after.failed = after.failed.take().or(taken.err());
            }
        });
        after
    }

    /// Reads single pages, many of them in flight.
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

    /// Starts reads until the reader is full. A background reader starts some only while none is in
    /// flight.
    fn start_reads(&mut self, rows: &TableRows, pages: &[WantedPage<'_>], started: &mut usize) {
        if let Some(yield_now) = self.yield_now {
            if self.reader.in_flight() > 0 {
                return;
            }
            yield_now();
        }
        while *started < pages.len() && self.reader.reserve() {
            let location = pages[*started][0].0;
            self.reader.begin(rows.segment(location).file(), location.page, *started as u64);
            *started += 1;
        }
    }
}
