//! The benches with the peers that link other crates: row stores for `flash`, a cache for `hits`.
//! It has a lock of its own, so that no such crate stands in the lock of the product.

#![forbid(unsafe_code)]

mod fjall;
mod lmdb;
mod quick;
mod redb;
#[cfg(feature = "rocksdb")]
mod rocksdb;
mod sled;

use hatchback_bench::flash::store::measure;
use hatchback_bench::hits::policies::CRATE;
use hatchback_bench::{Peers, main_with};
use std::process::ExitCode;

fn main() -> ExitCode {
    main_with(&Peers {
        stores: vec![
            #[cfg(feature = "rocksdb")]
            (hatchback_bench::flash::figures::ROCKSDB, measure::<rocksdb::Rocks>),
            ("LMDB", measure::<lmdb::Lmdb>),
            ("fjall", measure::<fjall::Fjall>),
            ("redb", measure::<redb::Redb>),
            ("sled", measure::<sled::Sled>),
        ],
        caches: vec![(CRATE, quick::QuickCache::make)],
    })
}
