//! Rows that are read into the caches before anybody asks for them, in the order in which they lie
//! on flash.

use crate::flash::Flash;
use crate::flash::table::{RowLocation, TableRows};
use crate::io::reader::{PageReader, ReadMethod};
use crate::model::tables::{ServedTable, Store};
use crate::model::{Model, OpenError};
use hatchback_kernels::cache::Cache;
use hatchback_kernels::cache::address::RowKey;

impl Model {
    /// Puts the trainer's most used keys into the caches, up to each table's fair share.
    pub(crate) fn preload(&self, flash: &Flash, rest: Option<&dyn Fn()>) -> Result<(), OpenError> {
        let mut reader = PageReader::on(self.device(), ReadMethod::Auto);
        for (number, table) in self.tables.iter().enumerate() {
            let Store::Cached { cache, rows } = &table.store else { continue };
            let (cached, cache) = (self.rows_behind(*cache), &self.caches[*cache]);
            let share =
                cache.slots() as u128 * u128::from(rows.base_rows()) / u128::from(cached.max(1));
            let mut keys = flash.hot_keys(number)?;
            // A set overflows before all slots are taken; three quarters go in almost surely.
            keys.truncate((share * 3 / 4) as usize);
            preload_table(number, rows, cache, &keys, (&mut reader, rest));
        }
        Ok(())
    }

    /// Rows of all tables that share this cache.
    fn rows_behind(&self, cache: usize) -> u64 {
        let rows = |t: &ServedTable| match &t.store {
            Store::Cached { cache: c, rows } if *c == cache => rows.base_rows(),
            _ => 0,
        };
        self.tables.iter().map(rows).sum()
    }
}

/// Reads the pages of `keys` in file order and inserts those keys' rows. Where there is to be
/// `rest`, no read is in flight meanwhile: it would keep others' waiting. A bad page costs its
/// rows' warmth only.
pub(crate) fn preload_table(
    number: usize,
    rows: &TableRows,
    cache: &Cache,
    keys: &[u64],
    (reader, rest): (&mut PageReader, Option<&dyn Fn()>),
) {
    let mut places: Vec<(RowLocation, u64)> =
        keys.iter().filter_map(|&k| Some((rows.locate(k)?, k))).collect();
    places.sort_unstable();
    let groups: Vec<&[(RowLocation, u64)]> = places.chunk_by(|a, b| a.0 == b.0).collect();
    let mut begun = 0;
    while begun < groups.len() || reader.in_flight() > 0 {
        let mut goes_on = true;
        if let Some(rest) = rest {
            goes_on = reader.in_flight() == 0;
            if goes_on {
                rest();
            }
        }
        while goes_on && begun < groups.len() && reader.has_room() {
            let place = groups[begun][0].0;
            reader.begin(rows.segment(place).file(), place.page, begun as u64);
            begun += 1;
        }
        let done = reader.next(None, |group, page| {
            let group = groups[group as usize];
            let (place, segment) = (group[0].0, rows.segment(group[0].0));
            match segment.check_read(place.page, page) {
                Err(e) => log::error!("{e}"),
                Ok(page) => group.iter().for_each(|&(_, key)| {
                    if let Some(row) = segment.row(&page, key) {
                        let name = RowKey { table: number as u16, key };
                        cache.insert(name, row, cache.epoch(name));
                    }
                }),
            }
        });
        if !done {
            return log::error!(
                "table {number}: the reader failed; the rest of its hot rows stay cold"
            );
        }
    }
}
