//! The byte budget of the front door: what requests and answers may hold together. A request that
//! would exceed it is refused before its bytes are kept. Never waits.

use crate::limits::RETRY_MAX;
use crate::problem::Problem;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The bytes that all requests and answers may hold together.
#[derive(Debug)]
pub struct ByteBudget {
    bytes_max: usize,
    used: AtomicUsize,
}

impl ByteBudget {
    /// Returns a budget of `bytes_max` bytes, of which none is used.
    pub fn new(bytes_max: usize) -> Arc<Self> {
        Arc::new(Self { bytes_max, used: AtomicUsize::new(0) })
    }

    /// Returns the bytes that are used now.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Reserves `bytes`.
    ///
    /// # Errors
    /// The budget has no room for them.
    pub fn reserve(self: &Arc<Self>, bytes: usize) -> Result<Reservation, Problem> {
        let mut reservation = Reservation { budget: Arc::clone(self), bytes: 0 };
        reservation.grow(bytes).map(|()| reservation)
    }
}

/// Bytes of the budget; dropping it gives them back.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<ByteBudget>,
    bytes: usize,
}

impl Reservation {
    /// Reserves `more` bytes beside those that are reserved.
    ///
    /// # Errors
    /// The budget has no room for them. The reservation is then unchanged.
    pub fn grow(&mut self, more: usize) -> Result<(), Problem> {
        let ByteBudget { bytes_max, used } = &*self.budget;
        let grown = |used: usize| used.checked_add(more).filter(|sum| sum <= bytes_max);
        // Relaxed, because no other memory depends on the number.
        match used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown) {
            Ok(_) => {
                self.bytes += more;
                Ok(())
            }
            Err(used) => {
                let message = format!(
                    "busy: server.bytes_max = {bytes_max}, {used} bytes are in use and {more} more \
                     are needed"
                );
                Err(Problem::busy(message, RETRY_MAX))
            }
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_beyond_the_budget_is_refused_and_changes_nothing() {
        let budget = ByteBudget::new(100);
        let mut first = budget.reserve(60).unwrap();
        assert!(budget.reserve(41).is_err() && first.grow(usize::MAX).is_err());
        assert_eq!(budget.used(), 60);
        first.grow(40).unwrap();
        assert_eq!(budget.used(), 100);
        drop(first);
        assert_eq!(budget.used(), 0);
    }
}
