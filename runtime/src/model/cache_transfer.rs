//! The warm cache over a swap: the rows that the old generation's caches hold, here or on a GPU, go
//! into the new one's, as the new one has them, and before those go to a GPU themselves. Rows of
//! segments that both have are copied; rows that a delta changed are read from flash; rows that are
//! gone are left out. The old caches stay as they are: requests in flight are still answered from
//! them.

use crate::flash::Flash;
use crate::flash::table::{PLACED, RowLocation, TableRows};
use crate::io::reader::{PageReader, ReadMethod};
use crate::model::Model;
use crate::model::preload::preload_table;
use crate::model::tables::Store;
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::RowKey;
use hatchback_kernels::cuda::driver::CudaError;
use serde::Serialize;
use std::path::PathBuf;

/// What became of the rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Transferred {
    /// Rows that both generations have alike.
    pub copied: usize,
    /// Rows that were read anew.
    pub read: usize,
    /// Rows that the new generation does not have, or that were too many to read.
    pub left: usize,
}

/// Rows that are read anew at most: one in so many of a cache's slots. Beyond that requests warm it
/// sooner.
const READ_ONE_IN: usize = 4;

/// Rows between two rests.
const REST_ROWS: usize = 256;

/// For each segment number of `old`, as a place has it, the number of the same segment in `new`.
fn same_segments(old: &TableRows, new: &TableRows) -> [Option<u8>; 256] {
    let numbered = |rows: &TableRows| -> Vec<(u8, PathBuf)> {
        let segments =
            rows.segments().iter().enumerate().map(|(n, s)| (n as u8, s.path().to_owned()));
        segments.chain(rows.placed().map(|s| (PLACED, s.path().to_owned()))).collect()
    };
    let (mut same, new) = ([None; 256], numbered(new));
    for (number, path) in numbered(old) {
        same[usize::from(number)] = new.iter().find(|(_, p)| *p == path).map(|(n, _)| *n);
    }
    same
}

/// One table in both generations.
struct Alike<'a> {
    new: &'a TableRows,
    old: &'a TableRows,
    /// The new generation's.
    cache: &'a Cache,
    same: [Option<u8>; 256],
}

impl Model {
    /// Fills the caches, which are in host memory still, from those of `old`, wherever those are,
    /// whose model this is a later or earlier generation of; `rest` is called between rows.
    pub(crate) fn carry(&mut self, old: &Self, rest: &dyn Fn()) -> Transferred {
        self.note_opening(old.on_gpu.as_ref().map_or(0, |tables| tables.dump_bytes() as u64));
        let mut carried = Transferred::default();
        let mut rows: usize = 0;
        let tables = self.tables.len().min(old.tables.len());
        let mut changed: Vec<Vec<u64>> = vec![Vec::new(); tables];
        let alike: Vec<_> = (0..tables).map(|t| self.alike(old, t)).collect();
        let each = |row: RowKey, bytes: &[u8]| {
            rows += 1;
            if rows.is_multiple_of(REST_ROWS) {
                rest();
            }
            let table = usize::from(row.table);
            let Some(Some(Alike { new, old, cache, same })) = alike.get(table) else { return };
            let Some(to) = new.locate(row.key) else {
                carried.left += 1;
                return;
            };
            let moved = |from: RowLocation| {
                Some(RowLocation { segment: same[usize::from(from.segment)]?, ..from })
            };
            if old.locate(row.key).and_then(moved) == Some(to) {
                carried.copied += usize::from(cache.insert(row, bytes, cache.epoch(row)));
            } else if changed[table].len() < cache.slots() / READ_ONE_IN {
                changed[table].push(row.key);
            } else {
                carried.left += 1;
            }
        };
        if let Err(e) = old.dump(rest, each) {
            log::error!("the rows that are left of the caches stay behind: {e}");
        }
        let mut reader = PageReader::on(self.device(), ReadMethod::Auto);
        for (number, keys) in changed.iter().enumerate() {
            let Store::Cached { cache, rows } = &self.tables[number].store else { continue };
            preload_table(number, rows, &self.caches[*cache], keys, (&mut reader, Some(rest)));
            carried.read += keys.len();
        }
        carried
    }

    /// Calls `each` for every row that the caches hold, and `rest` between pieces of those on a
    /// GPU.
    fn dump(&self, rest: &dyn Fn(), mut each: impl FnMut(RowKey, &[u8])) -> Result<(), CudaError> {
        self.caches.iter().for_each(|cache| cache.dump(&mut each));
        let Some(tables) = &self.on_gpu else { return Ok(()) };
        (0..tables.caches()).try_for_each(|number| tables.dump(number, rest, &mut each))
    }

    /// Whether a swap to what is live in `flash` will carry most of the rows here: after a delta
    /// nearly all are of segments that both have.
    pub(crate) fn carries_to(&self, flash: &Flash) -> bool {
        self.cache_slots() > 0 && flash.manifest().parent == Some(self.generation().sequence)
    }

    /// What table `number` has here and in `old`; `None` if one of them keeps it elsewhere or
    /// encodes it otherwise.
    fn alike<'a>(&'a self, old: &'a Self, number: usize) -> Option<Alike<'a>> {
        let (ours, theirs) = (&self.tables[number], &old.tables[number]);
        let named = |model: &Self| model.schema().tables[number].name.clone();
        match (&ours.store, &theirs.store) {
            (Store::Cached { cache, rows: new }, Store::Cached { rows: old_rows, .. })
                if ours.format == theirs.format && named(self) == named(old) =>
            {
                let same = same_segments(old_rows, new);
                Some(Alike { new, old: old_rows, cache: &self.caches[*cache], same })
            }
            _ => None,
        }
    }
}
