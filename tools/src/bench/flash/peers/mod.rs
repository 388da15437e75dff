//! Other row stores on the same rows, each by its documented bulk load and with the cache that it
//! documents. Compiled in by the feature `peers` (RocksDB by `peers-rocksdb`, since it links the
//! system's library). One that is missing or fails is listed as not run, never left out.

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

use super::Plan;
use super::data::Data;
use super::figures::{Figures, Point, ROCKSDB};
use crate::bench::NotRun;
use anyhow::Result;
use std::path::Path;

/// All of them.
pub const NAMES: [&str; 5] = [ROCKSDB, "LMDB", "fjall", "redb", "sled"];
const PEERS: &str = "cargo run --release -p hatchback-tools --features peers -- bench flash";
const PEERS_ROCKSDB: &str = "apt-get install librocksdb-dev libclang-dev; \
    ROCKSDB_LIB_DIR=/usr/lib/$(uname -m)-linux-gnu ROCKSDB_INCLUDE_DIR=/usr/include \
    cargo run --release -p hatchback-tools --features peers-rocksdb -- bench flash";

/// Measures one peer; `None` if it is not compiled in.
type Measure = fn(&Data, &Plan, &Path, &'static str) -> Result<Figures>;

/// Measures every peer in a folder of its own under `folder`.
pub fn measure(
    data: &Data,
    plan: &Plan,
    folder: &Path,
    figures: &mut Figures,
    mut done: impl FnMut(),
) {
    for engine in NAMES {
        let own = folder.join(engine);
        let command = if engine == ROCKSDB { PEERS_ROCKSDB } else { PEERS };
        let not_run = |reason| Point::NotRun(NotRun::new(engine, reason, command));
        match compiled(engine).map(|measure| measure(data, plan, &own, engine)) {
            None => figures.0.push(not_run("not compiled in".to_owned())),
            Some(Err(e)) => figures.0.push(not_run(format!("{e:#}"))),
            Some(Ok(found)) => figures.0.extend(found.0),
        }
        // What cannot be removed now goes with the temporary folder that it is in.
        let _ = std::fs::remove_dir_all(&own);
        done();
    }
}

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
        let (data, plan) = (Data { rows: 2000, row_bytes: 16 }, crate::bench::flash::QUICK);
        let plan = Plan { batch: 64, rounds: 2, ..plan };
        let (mut figures, mut steps) = (Figures::default(), 0);
        measure(&data, &plan, folder.path(), &mut figures, || steps += 1);
        assert_eq!(steps, NAMES.len());
        for engine in NAMES {
            let listed = figures.0.iter().find(|p| {
                matches!(p, Point::NotRun(peer) if peer.engine == engine)
                    || matches!(p, Point::Figure(f) if f.engine == engine)
            });
            match listed.unwrap() {
                Point::NotRun(peer) => {
                    assert!(compiled(engine).is_none(), "{engine}: {}", peer.reason)
                }
                Point::Figure(_) => assert!(compiled(engine).is_some()),
            }
        }
    }
}
