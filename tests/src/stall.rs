//! A stall of a simulated flash device: while it lasts, no page is read.

use hatchback::locks::lock;
use std::sync::{Condvar, Mutex, PoisonError};

/// Blocks page reads while it is on.
#[derive(Default)]
pub struct Stall {
    is_on: Mutex<bool>,
    over: Condvar,
}

impl Stall {
    /// Blocks every page read from now on.
    pub fn begin(&self) {
        *lock(&self.is_on) = true;
    }

    /// Lets every page read pass.
    pub fn end(&self) {
        *lock(&self.is_on) = false;
        self.over.notify_all();
    }

    /// Waits until the stall is over.
    pub fn wait(&self) {
        let is_on = lock(&self.is_on);
        let over = self.over.wait_while(is_on, |is_on| *is_on);
        drop(over.unwrap_or_else(PoisonError::into_inner));
    }
}
