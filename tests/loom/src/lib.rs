//! The embedding cache's own sources, built on the model checker's atomics (`--cfg loom`).
#![cfg(loom)]

#[path = "../../../kernels/src/cache.rs"]
pub mod cache;
#[path = "../../../kernels/src/changes.rs"]
mod changes;
#[path = "../../../kernels/src/codec.rs"]
pub mod codec;
#[path = "../../../kernels/src/eviction.rs"]
mod eviction;
#[path = "../../../kernels/src/heads.rs"]
mod heads;
#[path = "../../../kernels/src/isa.rs"]
mod isa;
#[path = "../../../kernels/src/names.rs"]
pub mod names;
#[path = "../../../kernels/src/simd.rs"]
mod simd;
#[path = "../../../kernels/src/sync.rs"]
mod sync;

/// Memory of the model checker's atomics, which cannot be made from zeroed bytes.
mod memory {
    pub struct Zeroed<T>(Box<[T]>);

    impl<T: Default> Zeroed<T> {
        pub fn new(len: usize) -> Self {
            Self((0..len).map(|_| T::default()).collect())
        }
    }

    impl<T> std::ops::Deref for Zeroed<T> {
        type Target = [T];

        fn deref(&self) -> &[T] {
            &self.0
        }
    }
}

/// The changes of `cache` that have ended.
pub fn ended(cache: &cache::Cache) -> u32 {
    cache.changes().ended()
}

/// Whether no change is known but those that had ended then.
pub fn none_since(cache: &cache::Cache, ended: u32) -> bool {
    cache.changes().none_since(ended)
}

/// The rows of a bag as `query` takes them: all seen, then all read, then proved together. `None`
/// if one is not there or changed meanwhile.
pub fn bag<const N: usize>(cache: &cache::Cache, rows: [names::RowKey; N]) -> Option<[[u8; 8]; N]> {
    use simd::{Plain, Simd};
    let changes = ended(cache);
    let seen = rows.map(|row| cache.heads().see::<Plain>(cache.name_of(row)));
    let mut out = [[0; 8]; N];
    for (seen, out) in seen.iter().zip(&mut out) {
        if !seen.is_there() {
            return None;
        }
        Plain::copy_racing(cache.row(seen.slot()), out);
    }
    (none_since(cache, changes) || cache.heads().are_unchanged(seen.into_iter())).then_some(out)
}
