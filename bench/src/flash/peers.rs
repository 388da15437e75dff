//! Other row stores on the same rows, each with its documented bulk load and its documented cache.
//! `bench/stores` links them. Never omits a store from the report: one that is missing or fails is
//! listed as not run.

use super::data::Data;
use super::figures::{Figures, FlashMeasurement, ROCKSDB};
use super::plan::FlashPlan;
use crate::results::PeerNotRun;
use anyhow::Result;
use std::path::Path;

/// Names of all stores.
pub const NAMES: [&str; 5] = [ROCKSDB, "LMDB", "fjall", "redb", "sled"];
/// Command that links the stores.
const STORES: &str = "cargo run --release --manifest-path bench/stores/Cargo.toml -- flash";
/// Command that links RocksDB too.
const STORES_ROCKSDB: &str = "apt-get install librocksdb-dev libclang-dev; \
    ROCKSDB_LIB_DIR=/usr/lib/$(uname -m)-linux-gnu ROCKSDB_INCLUDE_DIR=/usr/include \
    cargo run --release --manifest-path bench/stores/Cargo.toml --features rocksdb -- flash";

/// A row store: its name, one of [`NAMES`], and its measurement.
pub type Store = (&'static str, Measure);

/// Measures one store.
pub type Measure = fn(&Data, &FlashPlan, &Path, &'static str) -> Result<Figures>;

/// Measures every store in a folder of its own under `folder`. Calls `done` after each.
pub fn measure(
    stores: &[Store],
    data: &Data,
    plan: &FlashPlan,
    folder: &Path,
    figures: &mut Figures,
    mut done: impl FnMut(),
) {
    for engine in NAMES {
        let own = folder.join(engine);
        let command = if engine == ROCKSDB { STORES_ROCKSDB } else { STORES };
        let not_run = |reason| FlashMeasurement::NotRun(PeerNotRun::new(engine, reason, command));
        let store = stores.iter().find(|(name, _)| *name == engine);
        match store.map(|(_, measure)| measure(data, plan, &own, engine)) {
            None => figures.0.push(not_run("not linked".to_owned())),
            Some(Err(e)) => figures.0.push(not_run(format!("{e:#}"))),
            Some(Ok(found)) => figures.0.extend(found.0),
        }
        // The temporary folder above removes what cannot be removed here.
        let _ = std::fs::remove_dir_all(&own);
        done();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    fn fails(_: &Data, _: &FlashPlan, _: &Path, _: &'static str) -> Result<Figures> {
        bail!("no such store")
    }

    fn measures(_: &Data, _: &FlashPlan, _: &Path, name: &'static str) -> Result<Figures> {
        let mut figures = Figures::default();
        figures.put(name, super::super::figures::measure::LOAD, 1.0);
        Ok(figures)
    }

    #[test]
    fn every_peer_runs_or_says_why_not() {
        let folder = tempfile::tempdir().unwrap();
        let (data, plan) = (Data { rows: 2000, row_bytes: 16 }, crate::flash::plan::QUICK);
        let (mut figures, mut steps) = (Figures::default(), 0);
        let stores: [Store; 2] = [("LMDB", measures), ("redb", fails)];
        measure(&stores, &data, &plan, folder.path(), &mut figures, || steps += 1);
        assert_eq!(steps, NAMES.len());
        for engine in NAMES {
            let listed = figures.0.iter().find_map(|point| match point {
                FlashMeasurement::NotRun(peer) if peer.engine == engine => Some(Some(peer)),
                FlashMeasurement::Measured(found) if found.engine == engine => Some(None),
                _ => None,
            });
            let reason = listed.unwrap().map(|peer| peer.reason.as_str());
            let expected = match engine {
                "LMDB" => None,
                "redb" => Some("no such store"),
                _ => Some("not linked"),
            };
            assert_eq!(reason, expected, "{engine}");
        }
    }
}
