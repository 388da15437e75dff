//! The byte budget of the front door: what requests and answers may hold together, and what one
//! connection may hold of it. A request that would exceed either is refused before its bytes are
//! kept. Never waits.

use crate::limits::{RETRY_MAX, SHARES};
use crate::problem::{Code, Problem};
use hyper::body::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// The bytes that all requests and answers may hold together.
#[derive(Debug)]
pub struct ByteBudget {
    bytes_max: usize,
    /// Bytes of one connection that may wait for its caller.
    share_bytes_max: usize,
    used: AtomicUsize,
    /// Those of the bytes that are decoded: they wait for no caller.
    decoded: AtomicUsize,
}

impl ByteBudget {
    /// Returns a budget of `bytes_max` bytes, of which none is used, for requests with bodies of at
    /// most `request_bytes_max` bytes.
    pub fn new(bytes_max: usize, request_bytes_max: usize) -> Arc<Self> {
        // The largest request is in memory twice: as received, and decoded.
        let request = request_bytes_max.saturating_mul(2);
        let share_bytes_max = (bytes_max / SHARES).max(request).min(bytes_max);
        let (used, decoded) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Arc::new(Self { bytes_max, share_bytes_max, used, decoded })
    }

    /// Returns the bytes that are used now.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns the bytes that wait for callers.
    fn waiting(&self) -> usize {
        self.used().saturating_sub(self.decoded.load(Ordering::Relaxed))
    }

    /// Returns whether a connection with `bytes` is small. Larger ones leave room for small ones.
    pub fn is_small(&self, bytes: usize) -> bool {
        bytes <= self.bytes_max / (SHARES * SHARES)
    }

    /// Returns how many bytes too many would wait for callers, if `more` did for a connection that
    /// then has `needed`: small connections may use three quarters, larger ones half.
    pub fn excess(&self, more: usize, needed: usize) -> usize {
        let quarters = if self.is_small(needed) { 3 } else { 2 };
        self.waiting().saturating_add(more).saturating_sub(self.bytes_max / 4 * quarters)
    }
}

/// The bytes that one connection holds of the budget.
#[derive(Debug)]
pub struct Share {
    budget: Arc<ByteBudget>,
    used: AtomicUsize,
    decoded: AtomicUsize,
    /// Answers that wait for the caller, by the parity of the period in which they were made.
    answers: [AtomicU32; 2],
    period: AtomicUsize,
    /// Bytes of bodies that came and of answers that went since `has_moved` was true.
    moved: AtomicUsize,
}

impl Share {
    /// Returns a share of `budget`, of which none is used.
    pub fn new(budget: &Arc<ByteBudget>) -> Arc<Self> {
        let [used, decoded, period, moved] = [0; 4].map(AtomicUsize::new);
        let (budget, answers) = (Arc::clone(budget), Default::default());
        Arc::new(Self { budget, used, decoded, answers, period, moved })
    }

    /// Returns the bytes that wait for the caller.
    pub fn waiting(&self) -> usize {
        let decoded = self.decoded.load(Ordering::Relaxed);
        self.used.load(Ordering::Relaxed).saturating_sub(decoded)
    }

    /// Counts `bytes` that moved. Returns whether a part of the bytes that wait has moved since the
    /// last time that it had.
    pub fn has_moved(&self, bytes: usize) -> bool {
        let moved = self.moved.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let is_part = moved > 0 && moved >= self.waiting() / SHARES;
        if is_part {
            self.moved.store(0, Ordering::Relaxed);
        }
        is_part
    }

    /// Returns a reservation without bytes.
    pub fn reservation(self: &Arc<Self>) -> Reservation {
        Reservation { share: Arc::clone(self), bytes: 0, decoded: 0, refused: 0 }
    }

    /// Begins the next period. Returns whether the caller has taken every answer that was made
    /// before the last period.
    pub fn begin_period(&self) -> bool {
        let period = self.period.fetch_add(1, Ordering::Relaxed) + 1;
        self.answers[period % 2].load(Ordering::Relaxed) == 0
    }

    /// Returns the refusal of `more` bytes.
    pub fn refusal(&self, more: usize) -> Problem {
        let ByteBudget { bytes_max, share_bytes_max, .. } = &*self.budget;
        let (used, own) = (self.budget.used(), self.used.load(Ordering::Relaxed));
        let message = format!(
            "busy: server.bytes_max = {bytes_max}, {used} bytes are in use and {more} more are \
             needed; this connection has {own} and may have {share_bytes_max}"
        );
        Problem::busy(message, RETRY_MAX)
    }
}

/// Bytes of a connection's share; dropping it gives them back.
#[derive(Debug)]
pub struct Reservation {
    share: Arc<Share>,
    bytes: usize,
    decoded: usize,
    /// Bytes that could not be reserved for decoding, though the budget may have them later.
    refused: usize,
}

impl Reservation {
    /// Returns the share of which these bytes are.
    pub fn share(&self) -> &Arc<Share> {
        &self.share
    }

    /// Reserves `more` bytes for what is decoded or encoded now, until the next change.
    ///
    /// # Errors
    /// The budget has no room for them now, or never has. The reservation is then unchanged.
    pub fn grow(&mut self, more: usize) -> Result<(), Problem> {
        let (bytes_max, needed) = (self.share.budget.bytes_max, self.bytes.saturating_add(more));
        if needed > bytes_max {
            // No retry would help.
            let message = format!("{needed} bytes in memory, server.bytes_max = {bytes_max}");
            return Err(Problem::new(Code::TooLarge, message + "; send fewer or binary values"));
        }
        self.reserve(more, usize::MAX).inspect_err(|_| self.refused = more)?;
        self.decoded += more;
        self.share.decoded.fetch_add(more, Ordering::Relaxed);
        self.share.budget.decoded.fetch_add(more, Ordering::Relaxed);
        Ok(())
    }

    /// Returns how many bytes too many wait for callers to decode what was refused.
    pub fn excess(&self) -> usize {
        let ByteBudget { bytes_max, .. } = *self.share.budget;
        // What others decode is given back soon, so no caller must go for that.
        let needed = self.share.budget.waiting() + self.decoded + self.refused;
        if self.refused > 0 { needed.saturating_sub(bytes_max) } else { 0 }
    }

    /// Reserves `more` bytes that wait for the caller. Only [`Connections`] calls this.
    ///
    /// [`Connections`]: crate::connections::Connections
    ///
    /// # Errors
    /// The share or the budget has no room for them. The reservation is then unchanged.
    pub fn grow_waiting(&mut self, more: usize) -> Result<(), Problem> {
        self.reserve(more, self.share.budget.share_bytes_max)
    }

    fn reserve(&mut self, more: usize, share_bytes_max: usize) -> Result<(), Problem> {
        let Share { budget, used, .. } = &*self.share;
        // Relaxed, because no other memory depends on the numbers.
        let add = |used: &AtomicUsize, most: usize| {
            let grown = |used: usize| used.checked_add(more).filter(|sum| *sum <= most);
            used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, grown).is_ok()
        };
        if !add(used, share_bytes_max) {
            return Err(self.share.refusal(more));
        }
        if !add(&budget.used, budget.bytes_max) {
            used.fetch_sub(more, Ordering::Relaxed);
            return Err(self.share.refusal(more));
        }
        self.bytes += more;
        Ok(())
    }

    /// Gives all but `bytes` back. Those wait for the caller.
    pub fn shrink(&mut self, bytes: usize) {
        let decoded = std::mem::take(&mut self.decoded);
        self.share.decoded.fetch_sub(decoded, Ordering::Relaxed);
        self.share.budget.decoded.fetch_sub(decoded, Ordering::Relaxed);
        let less = self.bytes.saturating_sub(bytes);
        self.bytes -= less;
        self.share.used.fetch_sub(less, Ordering::Relaxed);
        self.share.budget.used.fetch_sub(less, Ordering::Relaxed);
    }

    /// Reserves exactly `bytes`, which wait for the caller.
    ///
    /// # Errors
    /// As [`Reservation::grow_waiting`].
    pub fn resize(&mut self, bytes: usize) -> Result<(), Problem> {
        self.shrink(bytes);
        self.grow_waiting(bytes - self.bytes)
    }

    /// Returns `data`, which gives the bytes back when the caller has taken it.
    pub fn hold(self, data: Bytes) -> Bytes {
        let period = self.share.period.load(Ordering::Relaxed) % 2;
        self.share.answers[period].fetch_add(1, Ordering::Relaxed);
        Bytes::from_owner(Held { data, memory: self, period })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

/// Bytes of an answer with their part of the budget.
struct Held {
    data: Bytes,
    memory: Reservation,
    period: usize,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.memory.share.answers[self.period].fetch_sub(1, Ordering::Relaxed);
        self.memory.share.moved.fetch_add(self.data.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reservation_beyond_the_budget_or_its_share_is_refused_and_changes_nothing() {
        let budget = ByteBudget::new(100, 30);
        let (mut first, mut other) =
            (Share::new(&budget).reservation(), Share::new(&budget).reservation());
        first.grow_waiting(60).unwrap();
        assert!(other.grow_waiting(41).is_err() && first.grow_waiting(1).is_err());
        assert!(other.grow(usize::MAX).is_err());
        assert_eq!((budget.used(), budget.excess(60, 60)), (60, 70));
        other.grow(39).unwrap();
        first.grow(1).unwrap();
        assert_eq!((first.share.waiting(), other.share.waiting()), (60, 0));
        assert!(first.resize(61).is_err(), "decoded bytes that wait need room in the share");
        first.resize(50).unwrap();
        assert_eq!((budget.used(), first.share.waiting()), (89, 50));
        // One byte of a hundred is small.
        assert_eq!((budget.excess(20, 20), budget.excess(26, 1)), (20, 1));
        drop((first, other));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn an_answer_that_is_held_for_a_whole_period_is_noticed() {
        let budget = ByteBudget::new(100, 30);
        let share = Share::new(&budget);
        let mut memory = share.reservation();
        memory.grow(7).unwrap();
        let held = memory.hold(Bytes::from_static(b"answer"));
        assert_eq!((share.begin_period(), budget.used()), (true, 7));
        assert!(!share.begin_period());
        drop(held);
        assert_eq!((share.begin_period(), budget.used()), (true, 0));
    }
}
