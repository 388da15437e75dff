//! The embedding cache's own sources, built on the model checker's atomics (`--cfg loom`).
#![cfg(loom)]

#[path = "../../../kernels/src/cache.rs"]
pub mod cache;
#[path = "../../../kernels/src/codec.rs"]
pub mod codec;
#[path = "../../../kernels/src/eviction.rs"]
mod eviction;
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
