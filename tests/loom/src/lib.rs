//! The embedding cache's own sources, compiled on the model checker's atomics (`--cfg loom`).
#![cfg(loom)]

#[path = "../../../kernels/src/cache/mod.rs"]
pub mod cache;
#[path = "../../../kernels/src/simd/mod.rs"]
mod simd;

use cache::Cache;
use cache::address::RowKey;
use simd::atomics::Ordering;
use simd::{Plain, Simd};

/// Returns the number of writes to `cache` that have ended.
pub fn writes_ended(cache: &Cache) -> u32 {
    cache.writes().ended()
}

/// Returns true if no write has started since `writes_ended` returned `since`.
pub fn no_writes_since(cache: &Cache, since: u32) -> bool {
    cache.writes().no_writes_since(since)
}

/// Reads the rows of a bag as a lookup does: all rows are probed, then all are read, then all are
/// validated together. Returns `None` if a row is not cached or changed during the read.
pub fn read_bag<const N: usize>(cache: &Cache, rows: [RowKey; N]) -> Option<[[u8; 8]; N]> {
    let since = writes_ended(cache);
    let probes =
        rows.map(|row| cache.headers().probe::<Plain>(cache.addresses().address_of(row)));

    let mut out = [[0; 8]; N];
    for (probe, out) in probes.iter().zip(&mut out) {
        if !probe.is_hit() {
            return None;
        }
        Plain::copy_racing(cache.row(probe.slot()), out);
    }

    let valid =
        no_writes_since(cache, since) || cache.headers().validate(probes.into_iter());
    valid.then_some(out)
}

/// Reads the rows of a bag of a whole cache as a lookup does (`whole_rows.rs`). It samples the
/// counter, checks the bits, reads the rows, and compares the counter. Returns `None` if a row is
/// not cached or a write overlapped.
pub fn read_whole_bag<const N: usize>(cache: &Cache, rows: [RowKey; N]) -> Option<[[u8; 8]; N]> {
    let since = writes_ended(cache);
    let slots = rows.map(|row| cache.addresses().slots_of(row.table).unwrap().slot(row.key));
    let is_present = |slot: &u32| {
        let word = cache.present()[*slot as usize / 32].load(Ordering::Relaxed);
        word >> (slot % 32) & 1 == 1
    };
    if !slots.iter().all(is_present) {
        return None;
    }

    let mut out = [[0; 8]; N];
    for (slot, out) in slots.iter().zip(&mut out) {
        Plain::copy_racing(cache.row(*slot), out);
    }
    no_writes_since(cache, since).then_some(out)
}
