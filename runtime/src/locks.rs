//! The lock of a mutex whose holders never panic between two changes that belong together. A panic
//! of another thread therefore does not keep the callers out.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks `mutex`, also after a thread has panicked with it.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
