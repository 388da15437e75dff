//! LMDB: a memory-mapped B-tree.

use hatchback_bench::flash::store::{PeerStore, copy_each};
use hatchback_bench::flash::data::Data;
use anyhow::Result;
use lmdb::{Database, Environment, EnvironmentFlags, Transaction, WriteFlags};
use std::path::Path;

/// An open environment.
pub struct Lmdb {
    env: Environment,
    rows: Database,
}

impl PeerStore for Lmdb {
    fn load(folder: &Path, data: &Data) -> Result<()> {
        let store = Self::open(folder, data)?;
        let mut txn = store.env.begin_rw_txn()?;
        data.each_row(|order, row| {
            Ok(txn.put(store.rows, &order.to_be_bytes(), &row, WriteFlags::APPEND)?)
        })?;
        Ok(txn.commit()?)
    }

    fn open(folder: &Path, data: &Data) -> Result<Self> {
        let map = (1 << 30) + 4 * data.rows * (data.row_bytes as u64 + 32);
        let env = Environment::new()
            .set_map_size(usize::try_from(map)?)
            // The documented setting for random reads of more data than fits in memory.
            .set_flags(EnvironmentFlags::NO_READAHEAD)
            .open(folder)?;
        let rows = env.open_db(None)?;
        Ok(Self { env, rows })
    }

    fn read(&self, orders: &[u64], out: &mut [u8]) -> Result<()> {
        let txn = self.env.begin_ro_txn()?;
        copy_each(orders, out, |order| Ok(Some(txn.get(self.rows, &order.to_be_bytes())?)))
    }

    fn update(&self, data: &Data) -> Result<()> {
        let mut txn = self.env.begin_rw_txn()?;
        data.each_changed(|order, row| {
            Ok(txn.put(self.rows, &order.to_be_bytes(), &row, WriteFlags::empty())?)
        })?;
        Ok(txn.commit()?)
    }
}
