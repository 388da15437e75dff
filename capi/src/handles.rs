//! Handles: numbers for what a caller opened. A number is never given twice, and the kinds of
//! handles share no number, so a closed handle or one of another kind is recognised. A value that a
//! call uses lives until the call ends, even if another thread closes its handle.

use std::sync::{Arc, PoisonError, RwLock};

/// The open values of one type, by handle. Zero is never a handle.
pub struct Handles<T> {
    open: RwLock<Open<T>>,
}

struct Open<T> {
    /// The next handle.
    next: u64,
    /// In ascending order of handles.
    values: Vec<(u64, Arc<T>)>,
}

impl<T> Handles<T> {
    /// Returns an empty set of handles. The first is 1 or 2, so that two kinds share none.
    pub const fn new(first: u64) -> Self {
        Self { open: RwLock::new(Open { next: first, values: Vec::new() }) }
    }

    /// Returns a handle of `value`.
    pub fn open(&self, value: Arc<T>) -> u64 {
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        let handle = open.next;
        open.next += 2;
        open.values.push((handle, value));
        handle
    }

    /// Returns the value of `handle`, if it is open.
    pub fn get(&self, handle: u64) -> Option<Arc<T>> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        let at = open.values.binary_search_by_key(&handle, |(handle, _)| *handle).ok()?;
        Some(Arc::clone(&open.values[at].1))
    }

    /// Closes `handle` and returns its value, if it is open.
    pub fn close(&self, handle: u64) -> Option<Arc<T>> {
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        let at = open.values.binary_search_by_key(&handle, |(handle, _)| *handle).ok()?;
        Some(open.values.remove(at).1)
    }

    /// Closes the handles of all values for which `is_closed` is true.
    pub fn close_if(&self, is_closed: impl Fn(&T) -> bool) {
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        open.values.retain(|(_, value)| !is_closed(value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_given_once() {
        let handles = Handles::new(1);
        let [a, b] = [1, 2].map(|value| handles.open(Arc::new(value)));
        assert_eq!((handles.get(a).as_deref(), handles.get(0)), (Some(&1), None));
        let used = handles.get(a).unwrap();
        assert_eq!(handles.close(a).as_deref(), Some(&1));
        assert_eq!((handles.get(a), handles.close(a), *used), (None, None, 1));

        let c = handles.open(Arc::new(3));
        let others = Handles::new(2);
        let other = others.open(Arc::new(4));
        assert_eq!((others.get(a), others.get(c), handles.close(other)), (None, None, None));
        assert!(c != a && handles.get(b).as_deref() == Some(&2));
        handles.close_if(|value| *value > 2);
        assert_eq!((handles.get(b).as_deref(), handles.get(c)), (Some(&2), None));
    }
}
