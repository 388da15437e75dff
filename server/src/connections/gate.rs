//! The gate of the requests. While the machine is too hot or draws too much power, one request at a
//! time passes, and the others are refused immediately. Loads and unloads have one that is always
//! limited.

use std::sync::atomic::{AtomicBool, Ordering};

/// Lets every request pass, or one at a time.
#[derive(Debug, Default)]
pub struct Gate {
    is_limited: AtomicBool,
    /// Whether the gate is limited and one request is being served.
    is_taken: AtomicBool,
}

/// The right to serve a request; dropping it gives the right back.
#[derive(Debug)]
pub struct Turn<'a>(Option<&'a AtomicBool>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(is_taken) = self.0 {
            is_taken.store(false, Ordering::Release);
        }
    }
}

impl Gate {
    /// Lets one request at a time pass from now on, or every request.
    pub fn limit(&self, is_limited: bool) {
        self.is_limited.store(is_limited, Ordering::Relaxed);
    }

    /// Returns the right to serve a request now; `None` while the gate is limited and another
    /// request is being served.
    pub fn turn(&self) -> Option<Turn<'_>> {
        // Such a request does not count as the one in progress, even if the limit comes while it is
        // served.
        if !self.is_limited.load(Ordering::Relaxed) {
            return Some(Turn(None));
        }
        (!self.is_taken.swap(true, Ordering::AcqRel)).then_some(Turn(Some(&self.is_taken)))
    }
}
