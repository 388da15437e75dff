//! Pages that a request reads under each layout of the rows: key order alone, the most used rows
//! clustered by popularity, and clustered by popularity and co-access. Counts pages, so the figures
//! are the same on every machine. Never measures times.

use super::data::{Data, Draw};
use super::figures::{Figures, OURS, measure};
use super::table::{self, TableFiles};
use crate::pack::clustering::by_co_access;
use anyhow::{Context, Result};
use hatchback::flash::clustered_rows_max;
use hatchback::flash::segment::Part;
use hatchback::flash::table::TableRows;
use hatchback::io::disk;
use hatchback::{Cache, KeySpaces, RowKey};
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// Most rows of the table.
const COUNTED_ROWS: u64 = 2_000_000;
/// Requests in the trainer's log, which `pack` clusters by.
const TRAINED_ON: usize = 20_000;
/// Counted requests. The requests before them fill the cache.
const MEASURED: usize = 2000;
/// Lookups per request.
const LOOKUPS: usize = 64;
/// Sizes of the cache, in per cent of the rows.
const CACHES: [u64; 3] = [0, 1, 5];

/// Draws `n` requests; each user has one interest.
fn requests(data: &Data, seed: u64, n: usize) -> Result<Vec<Vec<u64>>> {
    let mut draw = Draw::new(*data, seed)?;
    Ok((0..n).map(|_| draw.session(LOOKUPS)).collect())
}

/// Returns the `most` most requested keys, the most requested first.
fn by_popularity(requests: &[Vec<u64>], most: usize) -> Vec<u64> {
    let mut counts: HashMap<u64, u64> = HashMap::new();
    requests.iter().flatten().for_each(|key| *counts.entry(*key).or_default() += 1);
    let mut keys: Vec<(u64, u64)> = counts.into_iter().collect();
    keys.sort_unstable_by_key(|(key, count)| (std::cmp::Reverse(*count), *key));
    keys.into_iter().map(|(key, _)| key).take(most).collect()
}

/// Bytes of a slot of the cache: a row of 8 bytes and 10 bytes of overhead.
const SLOT_BYTES: usize = 18;

/// The layouts of the rows.
#[derive(Clone, Copy)]
enum RowLayout<'a> {
    /// The base alone.
    KeyOrder,
    /// The base, and these keys in a clustered segment.
    Clustered(&'a [u64]),
}

/// A table on flash, rewritten for each layout.
struct LayoutTable<'a> {
    data: &'a Data,
    base: PathBuf,
    clustered: PathBuf,
}

impl LayoutTable<'_> {
    /// Writes the clustered segment of `layout`, if it has one, and opens the table.
    fn open(&self, layout: RowLayout<'_>) -> Result<TableRows> {
        let disk = disk::system();
        let clustered = match layout {
            RowLayout::KeyOrder => None,
            RowLayout::Clustered(keys) => {
                let each = |put: table::Put<'_>| self.data.each_of(keys, put);
                table::write(disk.as_ref(), &self.clustered, self.data, Part::Clustered, each)?;
                Some(self.clustered.as_path())
            }
        };
        let files = TableFiles { base: &self.base, clustered, delta: None };
        table::open(disk.as_ref(), self.data, &files)
    }
}

/// Counts the pages of requests and of a preload under each layout.
///
/// # Errors
/// A file cannot be written or read.
pub fn measure(data: &Data, folder: &Path, figures: &mut Figures) -> Result<()> {
    let data = Data { rows: data.rows.min(COUNTED_ROWS), ..*data };
    let (base, clustered) = (folder.join("base.seg"), folder.join("clustered.seg"));
    let disk = disk::system();
    table::write(disk.as_ref(), &base, &data, Part::Base, |put| data.each_row(put))?;

    let trained_on = requests(&data, 11, TRAINED_ON)?;
    let hot = by_popularity(&trained_on, clustered_rows_max(data.rows) as usize);
    let per_page = table::kind(&data, Part::Clustered)?.rows_per_page();
    let together = by_co_access(&hot, trained_on.iter().map(Vec::as_slice), per_page);
    let requests = requests(&data, 12, TRAINED_ON + MEASURED)?;

    let table = LayoutTable { data: &data, base, clustered };
    let preloaded = |rows: &TableRows| -> f64 {
        hot.iter().filter_map(|key| rows.locate(*key)).collect::<BTreeSet<_>>().len() as f64
    };
    let mut pages = |rows: &TableRows, names: [&'static str; 3]| -> Result<()> {
        for (percent, name) in CACHES.into_iter().zip(names) {
            figures.put(OURS, name, pages_a_request(rows, &data, percent, &requests)?);
        }
        Ok(())
    };

    let key_order = table.open(RowLayout::KeyOrder)?;
    pages(&key_order, measure::KEY_ORDER)?;
    let preload_key_order = preloaded(&key_order);
    let popular = table.open(RowLayout::Clustered(&hot))?;
    pages(&popular, measure::BY_POPULARITY)?;
    let co_access = table.open(RowLayout::Clustered(&together))?;
    pages(&co_access, measure::BY_CO_ACCESS)?;

    let index_bits = 8.0 * co_access.index_bytes() as f64 / data.rows as f64;
    figures.put(OURS, measure::CLUSTERED_INDEX_BITS, index_bits);
    figures.put(OURS, measure::PRELOAD_KEY_ORDER, preload_key_order);
    figures.put(OURS, measure::PRELOAD_CLUSTERED, preloaded(&co_access));
    Ok(())
}

/// Returns the mean number of distinct pages that a request reads through a cache of `percent` of
/// the rows. Every miss inserts its row. Only the last [`MEASURED`] requests count.
fn pages_a_request(
    rows: &TableRows,
    data: &Data,
    percent: u64,
    requests: &[Vec<u64>],
) -> Result<f64> {
    const ROW: [u8; 8] = [0; 8];
    let slots = (data.rows * percent / 100) as usize;
    let key_spaces = KeySpaces::new(vec![None]);
    let bytes = Cache::bytes_min(ROW.len(), &key_spaces) + slots * SLOT_BYTES;
    let cache = match slots {
        0 => None,
        _ => Some(Cache::new(ROW.len(), bytes, &key_spaces).context("too few rows for a cache")?),
    };

    let (mut total, mut out) = (0, ROW);
    for (i, request) in requests.iter().enumerate() {
        let cached = |key: u64, out: &mut [u8]| {
            cache.as_ref().is_some_and(|c| c.query(RowKey { table: 0, key }, out))
        };
        let missed: BTreeSet<u64> =
            request.iter().copied().filter(|key| !cached(*key, &mut out)).collect();
        let pages: BTreeSet<_> = missed.iter().filter_map(|key| rows.locate(*key)).collect();
        if i >= TRAINED_ON {
            total += pages.len();
        }

        for (cache, &key) in cache.iter().flat_map(|c| missed.iter().map(move |key| (c, key))) {
            let row = RowKey { table: 0, key };
            cache.insert(row, &ROW, cache.epoch(row));
        }
    }
    Ok(total as f64 / MEASURED as f64)
}
