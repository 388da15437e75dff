//! The gate of the requests. While the machine is too hot or draws too much power, one request at a
//! time passes, and the others are refused immediately.

use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::{Mutex, MutexGuard};

/// Lets every request pass, or one at a time.
#[derive(Debug, Default)]
pub struct Gate {
    is_limited: AtomicBool,
    /// The right of the one request, while the gate is limited.
    one: Mutex<()>,
}

/// The right to serve a request; dropping it gives the right back.
pub type Turn<'a> = Option<MutexGuard<'a, ()>>;

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
            return Some(None);
        }
        self.one.try_lock().ok().map(Some)
    }
}
