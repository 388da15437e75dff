//! redb: a copy-on-write B-tree in one file.

use hatchback_bench::flash::store::{CACHE_BYTES, PeerStore, put};
use hatchback_bench::flash::data::Data;
use anyhow::Result;
use redb::{Database, ReadableDatabase, TableDefinition};
use std::path::{Path, PathBuf};

const ROWS: TableDefinition<'_, u64, &[u8]> = TableDefinition::new("rows");

/// An open database.
pub struct Redb(Database);

fn file(folder: &Path) -> PathBuf {
    folder.join("rows.redb")
}

impl PeerStore for Redb {
    fn load(folder: &Path, data: &Data) -> Result<()> {
        let db = Database::builder().set_cache_size(CACHE_BYTES).create(file(folder))?;
        let write = db.begin_write()?;
        {
            let mut table = write.open_table(ROWS)?;
            data.each_row(|order, row| Ok(table.insert(order, row).map(drop)?))?;
        }
        Ok(write.commit()?)
    }

    fn open(folder: &Path, _: &Data) -> Result<Self> {
        Ok(Self(Database::builder().set_cache_size(CACHE_BYTES).open(file(folder))?))
    }

    fn read(&self, orders: &[u64], out: &mut [u8]) -> Result<()> {
        let table = self.0.begin_read()?.open_table(ROWS)?;
        let row_bytes = out.len() / orders.len().max(1);
        for (order, row) in orders.iter().zip(out.chunks_exact_mut(row_bytes.max(1))) {
            let found = redb::ReadableTable::get(&table, order)?;
            let found = found.ok_or_else(|| anyhow::anyhow!("no row for order {order:#018x}"))?;
            put(row, found.value())?;
        }
        Ok(())
    }

    fn update(&self, data: &Data) -> Result<()> {
        let write = self.0.begin_write()?;
        {
            let mut table = write.open_table(ROWS)?;
            data.each_changed(|order, row| Ok(table.insert(order, row).map(drop)?))?;
        }
        Ok(write.commit()?)
    }
}
