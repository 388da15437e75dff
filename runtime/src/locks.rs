//! The lock of every mutex of the runtime and of the front door. A panic of another thread does not
//! keep the callers out: no code can panic between two changes that belong together.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also after a thread has panicked with it.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
