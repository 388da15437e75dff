//! Batch reads from a table on flash as the request path does them: locate, sort by page, each page
//! read once with many in flight, checked, its rows copied out. And the same pages read without
//! looking at them, which is what the device can give.

use anyhow::{Context, Result, ensure};
use hatchback::flash::table::{RowLocation, TableRows};
use hatchback::io::page::PageBytes;
use hatchback::io::reader::{PageFile, PageReader, ReadMethod};
use std::io;
use std::sync::Arc;

/// A row that is wanted.
#[derive(Clone, Copy)]
struct Miss {
    place: u64,
    key: u64,
    /// Where the row goes.
    slot: usize,
}

/// Reads with a fixed number of pages in flight.
pub struct Fetcher {
    reader: PageReader,
    places: Vec<Option<RowLocation>>,
    misses: Vec<Miss>,
}

impl Fetcher {
    /// Up to `depth` pages in flight.
    pub fn new(depth: usize) -> Self {
        Self {
            reader: PageReader::new(depth, ReadMethod::Auto),
            places: Vec::new(),
            misses: Vec::new(),
        }
    }

    /// `io_uring` or `threads`.
    pub fn method(&self) -> &'static str {
        self.reader.method()
    }

    /// Reads the rows of `keys` into `out`, one after the other. Returns how many pages were read.
    ///
    /// # Errors
    /// The device refused, a page is damaged, or a key is not in the table.
    pub fn fetch(&mut self, rows: &TableRows, keys: &[u64], out: &mut [u8]) -> Result<u64> {
        self.misses.clear();
        self.places.clear();
        self.places.resize(keys.len(), None);
        rows.locate_all(keys, &mut self.places);
        for (slot, (&key, place)) in keys.iter().zip(&self.places).enumerate() {
            let place = place.context("a key is not in the table")?.pack();
            self.misses.push(Miss { place, key, slot });
        }
        self.misses.sort_unstable_by_key(|m| m.place);
        let Self { reader, misses, .. } = self;
        let row_bytes = out.len() / keys.len().max(1);
        let (mut next, mut pages) = (0, 0);
        drive(
            reader,
            |reader| {
                let Some(miss) = misses.get(next) else { return false };
                let place = RowLocation::unpack(miss.place);
                reader.begin(rows.segment(place).file(), place.page, next as u64);
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

    /// Reads `pages` of `file` and looks at none of them.
    ///
    /// # Errors
    /// The device refused.
    pub fn raw(&mut self, file: &Arc<dyn PageFile>, pages: &[u32]) -> Result<()> {
        let mut next = pages.iter();
        drive(
            &mut self.reader,
            |reader| next.next().map(|page| reader.begin(file, *page, 0)).is_some(),
            |_, page| Ok(page.map(drop)?),
        )
    }
}

/// Keeps the reader full by `begin` until that has no more, and hands each page to `take`.
fn drive(
    reader: &mut PageReader,
    mut begin: impl FnMut(&mut PageReader) -> bool,
    mut take: impl FnMut(u64, io::Result<&PageBytes>) -> Result<()>,
) -> Result<()> {
    let mut taken = Ok(());
    loop {
        while reader.has_room() && begin(reader) {}
        if reader.in_flight() == 0 {
            return taken;
        }
        let one = reader.next(None, |token, page| {
            let this = take(token, page);
            if taken.is_ok() {
                taken = this;
            }
        });
        ensure!(one, "the reader gave up");
    }
}

/// The misses at the front that are on one page.
fn group(misses: &[Miss]) -> &[Miss] {
    let len = misses.iter().take_while(|m| m.place == misses[0].place).count();
    &misses[..len]
}

fn copy_rows(
    rows: &TableRows,
    misses: &[Miss],
    page: io::Result<&PageBytes>,
    row_bytes: usize,
    out: &mut [u8],
) -> Result<()> {
    let Some(first) = misses.first() else { return Ok(()) };
    let place = RowLocation::unpack(first.place);
    let segment = rows.segment(place);
    let page = segment.check_read(place.page, page)?;
    for miss in misses {
        let row = segment.row(&page, miss.key).context("a key is not on its page")?;
        out[miss.slot * row_bytes..][..row_bytes].copy_from_slice(row);
    }
    Ok(())
}
