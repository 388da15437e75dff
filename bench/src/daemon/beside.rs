//! What runs beside the good callers of a soak: whether it goes on, and what it has done.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What runs beside the good callers.
#[derive(Default)]
pub struct Beside {
    pub is_over: AtomicBool,
    pub is_attacked: AtomicBool,
    pub attacks: AtomicU64,
    pub loads: AtomicU64,
    pub swaps: AtomicU64,
}

impl Beside {
    /// Returns whether the run is not over.
    pub fn goes_on(&self) -> bool {
        !self.is_over.load(Ordering::Relaxed)
    }
}
