//! A stall of a simulated flash device: while it lasts, no page is read.

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
        *self.is_on.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }

    /// Lets every page read pass.
    pub fn end(&self) {
        *self.is_on.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.over.notify_all();
    }

    /// Waits until the stall is over.
    pub fn wait(&self) {
        let is_on = self.is_on.lock().unwrap_or_else(PoisonError::into_inner);
        let over = self.over.wait_while(is_on, |is_on| *is_on);
        drop(over.unwrap_or_else(PoisonError::into_inner));
    }
}
