//! fjall: a log-structured merge tree.

use hatchback_bench::flash::store::{CACHE_BYTES, PeerStore, copy_each};
use hatchback_bench::flash::data::Data;
use anyhow::Result;
use fjall::config::CompressionPolicy;
use fjall::{Database, Keyspace, KeyspaceCreateOptions, PersistMode};
use std::path::Path;

/// An open database.
pub struct Fjall {
    db: Database,
    rows: Keyspace,
}

impl PeerStore for Fjall {
    fn load(folder: &Path, data: &Data) -> Result<()> {
        let store = Self::open(folder, data)?;
        let mut ingestion = store.rows.start_ingestion()?;
        data.each_row(|order, row| Ok(ingestion.write(order.to_be_bytes(), row)?))?;
        ingestion.finish()?;
        Ok(store.db.persist(PersistMode::SyncAll)?)
    }

    fn open(folder: &Path, _: &Data) -> Result<Self> {
        let db = Database::builder(folder).cache_size(CACHE_BYTES as u64).open()?;
        // The rows are as good as random, and every requested key exists.
        let options = || {
            KeyspaceCreateOptions::default()
                .data_block_compression_policy(CompressionPolicy::disabled())
                .expect_point_read_hits(true)
        };
        let rows = db.keyspace("rows", options)?;
        Ok(Self { db, rows })
    }

    fn read(&self, orders: &[u64], out: &mut [u8]) -> Result<()> {
        copy_each(orders, out, |order| Ok(self.rows.get(order.to_be_bytes())?))
    }

    fn update(&self, data: &Data) -> Result<()> {
        let mut batch = self.db.batch().durability(Some(PersistMode::SyncAll));
        data.each_changed(|order, row| {
            batch.insert(&self.rows, order.to_be_bytes(), row);
            Ok(())
        })?;
        Ok(batch.commit()?)
    }
}
