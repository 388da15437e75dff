//! Pages that a request reads under each way to lay out rows: key order alone, the hottest placed
//! by popularity, and placed by popularity and co-access. Counts, no times: the same on every
//! machine.

use super::data::{Data, Draw};
use super::figures::{Figures, OURS, measure};
use super::table;
use crate::pack::clustering::by_co_access;
use anyhow::{Context, Result};
use hatchback::flash::placed_rows_max;
use hatchback::flash::segment::Part;
use hatchback::flash::table::TableRows;
use hatchback::io::disk;
use hatchback::{Cache, KeySpaces, RowKey};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

/// Rows of the table at most.
pub const ROWS_MAX: u64 = 2_000_000;
/// Requests that the trainer counted and `pack` was given.
const TRAINED_ON: usize = 20_000;
/// Requests that are measured, after the first so many fill the cache.
const MEASURED: usize = 2000;
/// Lookups of a request in this table.
const LOOKUPS: usize = 64;
/// Shares of the rows that the cache in front holds, in per cent.
const CACHES: [u64; 3] = [0, 1, 5];

/// Draws the requests of people who each have one of the interests.
fn requests(data: &Data, seed: u64, n: usize) -> Result<Vec<Vec<u64>>> {
    let mut draw = Draw::new(*data, seed)?;
    Ok((0..n).map(|_| draw.session(LOOKUPS)).collect())
}

/// Keys by how often they were asked for, the most used first.
fn by_popularity(requests: &[Vec<u64>], most: usize) -> Vec<u64> {
    let mut counts: HashMap<u64, u64> = HashMap::new();
    requests.iter().flatten().for_each(|key| *counts.entry(*key).or_default() += 1);
    let mut keys: Vec<(u64, u64)> = counts.into_iter().collect();
    keys.sort_unstable_by_key(|(key, count)| (std::cmp::Reverse(*count), *key));
    keys.into_iter().map(|(key, _)| key).take(most).collect()
}

/// Bytes of a slot of the cache: a row of 8, and 10 beside it.
const SLOT_BYTES: usize = 18;

/// Counts pages under each layout.
///
/// # Errors
/// A file cannot be written or read.
pub fn measure(data: &Data, folder: &Path, figures: &mut Figures) -> Result<()> {
    let data = Data { rows: data.rows.min(ROWS_MAX), ..*data };
    let (disk, base, placed) = (disk::system(), folder.join("base.seg"), folder.join("placed.seg"));
    table::write(disk.as_ref(), &base, &data, Part::Base, |put| data.each_row(put))?;
    let trained_on = requests(&data, 11, TRAINED_ON)?;
    let hot = by_popularity(&trained_on, placed_rows_max(data.rows) as usize);
    let per_page = table::kind(&data, Part::Placed)?.rows_per_page();
    let together = by_co_access(&hot, trained_on.iter().map(Vec::as_slice), per_page);
    let seen = requests(&data, 12, TRAINED_ON + MEASURED)?;
    for (keys, names) in [
        (None, measure::KEY_ORDER),
        (Some(&hot), measure::BY_POPULARITY),
        (Some(&together), measure::BY_CO_ACCESS),
    ] {
        if let Some(keys) = keys {
            table::write(disk.as_ref(), &placed, &data, Part::Placed, |put| {
                data.each_of(keys, put)
            })?;
        }
        let rows = table::open(disk.as_ref(), &data, &base, keys.map(|_| placed.as_path()), None)?;
        for (percent, name) in CACHES.into_iter().zip(names) {
            figures.put(OURS, name, pages_a_request(&rows, &data, percent, &seen)?);
        }
        let (index, name) =
            (8.0 * rows.index_bytes() as f64 / data.rows as f64, measure::PLACED_INDEX_BITS);
        if names == measure::BY_CO_ACCESS {
            figures.put(OURS, name, index);
        }
        let preload: BTreeSet<_> = hot.iter().filter_map(|key| rows.locate(*key)).collect();
        match names {
            measure::KEY_ORDER => {
                figures.put(OURS, measure::PRELOAD_KEY_ORDER, preload.len() as f64)
            }
            measure::BY_CO_ACCESS => {
                figures.put(OURS, measure::PRELOAD_PLACED, preload.len() as f64)
            }
            _ => {}
        }
    }
    Ok(())
}

/// Pages that a request reads on average, each page once, behind a cache of `percent` of the rows.
/// What is read goes into the cache; only the last requests count.
fn pages_a_request(
    rows: &TableRows,
    data: &Data,
    percent: u64,
    requests: &[Vec<u64>],
) -> Result<f64> {
    const ROW: [u8; 8] = [0; 8];
    let slots = (data.rows * percent / 100) as usize;
    let names = KeySpaces::new(vec![None]);
    let bytes = Cache::bytes_min(ROW.len(), &names) + slots * SLOT_BYTES;
    let cache = match slots {
        0 => None,
        _ => Some(Cache::new(ROW.len(), bytes, &names).context("a cache smaller than its least")?),
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
