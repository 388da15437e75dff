//! Other row stores on the same rows, each with its documented bulk load and its documented cache.
//! The feature `peers` compiles them in; RocksDB needs `peers-rocksdb`, because it links the
//! system's library. Never omits a store from the report: one that is missing or fails is listed as
//! not run.

#[cfg(feature = "peers")]
mod fjall;
#[cfg(feature = "peers")]
mod lmdb;
#[cfg(feature = "peers")]
mod redb;
#[cfg(feature = "peers-rocksdb")]
mod rocksdb;
#[cfg(feature = "peers")]
mod sled;
#[cfg(feature = "peers")]
mod store;

use super::data::Data;
use super::figures::{Figures, FlashMeasurement, ROCKSDB};
use super::plan::FlashPlan;
use crate::bench::results::PeerNotRun;
use anyhow::Result;
use std::path::Path;

/// Names of all stores.
pub const NAMES: [&str; 5] = [ROCKSDB, "LMDB", "fjall", "redb", "sled"];
/// Command that compiles the stores in.
const PEERS: &str = "cargo run --release -p hatchback-tools --features peers -- bench flash";
/// Command that compiles RocksDB in too.
const PEERS_ROCKSDB: &str = "apt-get install librocksdb-dev libclang-dev; \
    ROCKSDB_LIB_DIR=/usr/lib/$(uname -m)-linux-gnu ROCKSDB_INCLUDE_DIR=/usr/include \
    cargo run --release -p hatchback-tools --features peers-rocksdb -- bench flash";

/// Measures one store.
type Measure = fn(&Data, &FlashPlan, &Path, &'static str) -> Result<Figures>;

/// Measures every store in a folder of its own under `folder`. Calls `done` after each.
pub fn measure(
    data: &Data,
    plan: &FlashPlan,
    folder: &Path,
    figures: &mut Figures,
    mut done: impl FnMut(),
) {
    for engine in NAMES {
        let own = folder.join(engine);
        let command = if engine == ROCKSDB { PEERS_ROCKSDB } else { PEERS };
        let not_run = |reason| FlashMeasurement::NotRun(PeerNotRun::new(engine, reason, command));
        match compiled(engine).map(|measure| measure(data, plan, &own, engine)) {
            None => figures.0.push(not_run("not compiled in".to_owned())),
            Some(Err(e)) => figures.0.push(not_run(format!("{e:#}"))),
            Some(Ok(found)) => figures.0.extend(found.0),
        }
        // The temporary folder above removes what cannot be removed here.
        let _ = std::fs::remove_dir_all(&own);
        done();
    }
}

/// Returns the measurement of `engine`, or `None` if it is not compiled in.
fn compiled(engine: &str) -> Option<Measure> {
    match engine {
        #[cfg(feature = "peers")]
        "LMDB" => Some(store::measure::<lmdb::Lmdb>),
        #[cfg(feature = "peers")]
        "fjall" => Some(store::measure::<fjall::Fjall>),
        #[cfg(feature = "peers")]
        "redb" => Some(store::measure::<redb::Redb>),
        #[cfg(feature = "peers")]
        "sled" => Some(store::measure::<sled::Sled>),
        #[cfg(feature = "peers-rocksdb")]
        ROCKSDB => Some(store::measure::<rocksdb::Rocks>),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_peer_runs_or_says_why_not() {
        let folder = tempfile::tempdir().unwrap();
        let (data, plan) = (Data { rows: 2000, row_bytes: 16 }, crate::bench::flash::plan::QUICK);
        let plan = FlashPlan { batch: 64, rounds: 2, ..plan };
        let (mut figures, mut steps) = (Figures::default(), 0);
        measure(&data, &plan, folder.path(), &mut figures, || steps += 1);
        assert_eq!(steps, NAMES.len());
        for engine in NAMES {
            let listed = figures.0.iter().find(|p| {
                matches!(p, FlashMeasurement::NotRun(peer) if peer.engine == engine)
                    || matches!(p, FlashMeasurement::Measured(f) if f.engine == engine)
            });
            match listed.unwrap() {
                FlashMeasurement::NotRun(peer) => {
                    assert!(compiled(engine).is_none(), "{engine}: {}", peer.reason)
                }
                FlashMeasurement::Measured(_) => assert!(compiled(engine).is_some()),
            }
        }
    }
}
