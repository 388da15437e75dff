//! Batch reads from a table on flash in the steps of the request path: locate the rows, sort them
//! by page, read each page once with many reads in flight, verify the page, copy its rows. Also raw
//! reads of pages, which measure the device. Never caches a row.

use anyhow::{Context, Result, ensure};
use hatchback::flash::table::{RowLocation, TableRows};
use hatchback::io::page::PageBytes;
use hatchback::io::reader::{PageFile, PageReader, ReadMethod};
use std::hint::black_box;
use std::io;
use std::sync::Arc;

/// A requested row.
#[derive(Clone, Copy)]
struct Miss {
    location: u64,
    key: u64,
    /// Position of the row in the output.
    slot: usize,
}

/// Reads with a fixed number of pages in flight.
pub struct Fetcher {
    reader: PageReader,
    locations: Vec<Option<RowLocation>>,
    misses: Vec<Miss>,
}

impl Fetcher {
    /// Creates a reader with up to `depth` pages in flight.
    pub fn new(depth: usize) -> Self {
        Self {
            reader: PageReader::new(depth, ReadMethod::Auto),
            locations: Vec::new(),
            misses: Vec::new(),
        }
    }

    /// Returns the read method: `io_uring` or `threads`.
    pub fn method(&self) -> &'static str {
        self.reader.method()
    }

    /// Reads the rows of `keys` into `out`, `[keys, row_bytes]`. Returns the number of pages read.
    ///
    /// # Errors
    /// A read fails, a page is damaged, or a key is not in the table.
    pub fn fetch(&mut self, rows: &TableRows, keys: &[u64], out: &mut [u8]) -> Result<u64> {
        self.misses.clear();
        self.locations.clear();
        self.locations.resize(keys.len(), None);
        rows.locate_all(keys, &mut self.locations);
        for (slot, (&key, location)) in keys.iter().zip(&self.locations).enumerate() {
            let location = location.context("a key is not in the table")?.pack();
            self.misses.push(Miss { location, key, slot });
        }
        self.misses.sort_unstable_by_key(|m| m.location);

        let Self { reader, misses, .. } = self;
        let row_bytes = out.len() / keys.len().max(1);
        let (mut next, mut pages) = (0, 0);
        drive(
            reader,
            |reader| {
                let Some(miss) = misses.get(next) else { return false };
                let location = RowLocation::unpack(miss.location);
                reader.begin(rows.segment(location).file(), location.page, next as u64);
                next += group(&misses[next..]).len();
                true
            },
            |token, page| {
                pages += 1;
                copy_rows(rows, group(&misses[token as usize..]), page, row_bytes, out)
            },
        )?;
        Ok(pages)
    }

    /// Reads `pages` of `file`, without any check.
    ///
    /// # Errors
    /// A read fails.
    pub fn raw(
        &mut self,
        file: &Arc<dyn PageFile>,
        pages: &[u32],
        content: PageContent,
    ) -> Result<()> {
        let mut next = pages.iter();
        drive(
            &mut self.reader,
            |reader| next.next().map(|page| reader.begin(file, *page, 0)).is_some(),
            |_, page| {
                let page = page?;
                if content == PageContent::Loaded {
                    let lines = page.iter().step_by(LINE_BYTES);
                    black_box(lines.fold(0, |all, byte| all ^ byte));
                }
                Ok(())
            },
        )
    }
}

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// The use of a page by a raw read.
#[derive(Clone, Copy, PartialEq)]
pub enum PageContent {
    /// The processor loads no byte of the page.
    Ignored,
    /// The processor loads each cache line of the page once, as any check of a page must.
    Loaded,
}

/// Keeps the reader full until `begin` has no more pages. Calls `take` with each page.
fn drive(
    reader: &mut PageReader,
    mut begin: impl FnMut(&mut PageReader) -> bool,
    mut take: impl FnMut(u64, io::Result<&PageBytes>) -> Result<()>,
) -> Result<()> {
    let mut taken = Ok(());
    loop {
        while reader.reserve() && begin(reader) {}
        if reader.in_flight() == 0 {
            return taken;
        }
        let one = reader.next(None, |token, page| {
            let this = take(token, page);
            if taken.is_ok() {
                taken = this;
            }
        });
        ensure!(one, "the reader has reads in flight but returned none");
    }
}

/// Returns the misses at the front that are on one page.
fn group(misses: &[Miss]) -> &[Miss] {
    let len = misses.iter().take_while(|m| m.location == misses[0].location).count();
    &misses[..len]
}

/// Verifies a page and copies the rows of `misses` to their slots.
fn copy_rows(
    rows: &TableRows,
    misses: &[Miss],
    page: io::Result<&PageBytes>,
    row_bytes: usize,
    out: &mut [u8],
) -> Result<()> {
    let Some(first) = misses.first() else { return Ok(()) };
    let location = RowLocation::unpack(first.location);
    let segment = rows.segment(location);
    let page = segment.check_read(location.page, page)?;
    for miss in misses {
        let row = segment.row(&page, miss.key).context("a key is not on its page")?;
        out[miss.slot * row_bytes..][..row_bytes].copy_from_slice(row);
    }
    Ok(())
}
