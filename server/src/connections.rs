//! The open connections, at most `server.connections_max`. If all are taken, the connection that
//! was silent longest is closed for the next caller. A connection that has a request in progress is
//! never closed. Never reads or writes the bytes of a connection.

use crate::log_limit::LogLimit;
use crate::problem::{Code, Problem};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// The value of `Connection::state` while the connection closes to make room for another one. Every
/// other value is the number of its requests in progress.
const CLOSING: u32 = u32::MAX;

/// The caller at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A process of this user, on a Unix socket.
    User(u32),
    /// A process of this machine, on the loopback device.
    Loopback,
    /// A caller at this address with a certificate of the target's authorities.
    Certified(SocketAddr),
}

/// One open connection.
#[derive(Debug)]
pub struct Connection {
    /// The caller.
    pub peer: Peer,
    /// Requests in progress, or [`CLOSING`].
    state: AtomicU32,
    opened: Instant,
    /// When the caller last sent or took bytes, in µs since `opened`.
    active_us: AtomicU64,
    close: Notify,
    /// The earliest time of the next request at a steady rate, in µs since `opened`.
    next_us: Mutex<u64>,
}

/// A request in progress: while this value lives, its connection is not closed for another one.
#[derive(Debug)]
pub struct Work<'a>(&'a Connection);

impl Drop for Work<'_> {
    fn drop(&mut self) {
        // Before the count falls: a connection without requests must not look silent since before
        // this one.
        self.0.note_activity();
        self.0.state.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Connection {
    /// Returns a connection that was opened now.
    pub fn new(peer: Peer) -> Self {
        Self {
            peer,
            state: AtomicU32::new(0),
            opened: Instant::now(),
            active_us: AtomicU64::new(0),
            close: Notify::new(),
            next_us: Mutex::new(0),
        }
    }

    fn age_us(&self) -> u64 {
        self.opened.elapsed().as_micros() as u64
    }

    /// Notes that the caller sent or took bytes now.
    pub fn note_activity(&self) {
        self.active_us.store(self.age_us(), Ordering::Relaxed);
    }

    fn last_activity(&self) -> Instant {
        self.opened + Duration::from_micros(self.active_us.load(Ordering::Relaxed))
    }

    /// Counts a request as in progress until the result is dropped. Returns `None` if the
    /// connection is closing.
    pub fn begin_work(&self) -> Option<Work<'_>> {
        // `CLOSING` is the largest number, so a closing connection begins no work.
        let more = |works: u32| works.checked_add(1).filter(|works| *works != CLOSING);
        let begun = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        begun.ok().map(|_| Work(self))
    }

    /// Counts a request against the rate of `per_s` requests a second; 0 is no limit. The requests
    /// of one second may arrive together.
    ///
    /// # Errors
    /// The caller sends faster; the problem says when to repeat the request.
    pub fn count_request(&self, per_s: u32) -> Result<(), Problem> {
        if per_s == 0 {
            return Ok(());
        }
        let (now, interval_us) = (self.age_us(), 1_000_000 / u64::from(per_s));
        let mut next = self.next_us.lock().unwrap_or_else(PoisonError::into_inner);
        let after = (*next).max(now) + interval_us.max(1);
        if after > now + 1_000_000 {
            let wait = Duration::from_micros(after - now - 1_000_000);
            let message = format!("server.requests_per_s_max = {per_s}: too many requests");
            let problem = Problem::new(Code::TooOften, message);
            return Err(Problem { retry_after: Some(wait), ..problem });
        }
        // Only if admitted: a caller that repeats too early does not push its next request back.
        *next = after;
        Ok(())
    }

    /// Completes when the connection must end to make room.
    pub async fn closed(&self) {
        self.close.notified().await;
    }

    /// Closes a silent connection. Returns false if the connection is not silent.
    fn close_silent(&self) -> bool {
        let changed = self.state.compare_exchange(0, CLOSING, Ordering::AcqRel, Ordering::Acquire);
        if changed.is_ok() {
            self.close.notify_one();
        }
        changed.is_ok()
    }

    fn state(&self) -> u32 {
        self.state.load(Ordering::Acquire)
    }
}

/// The open connections.
#[derive(Debug)]
pub struct Connections {
    connections_max: usize,
    open: Mutex<Vec<Arc<Connection>>>,
    /// Signals that a connection ended.
    ended: Condvar,
    closed: LogLimit,
}

/// A connection's place among the open ones; dropping it gives the place to another one.
#[derive(Debug)]
pub struct Place {
    connections: Arc<Connections>,
    connection: Arc<Connection>,
}

impl Place {
    /// Returns the connection.
    pub fn connection(&self) -> &Arc<Connection> {
        &self.connection
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.connections.open().retain(|open| !Arc::ptr_eq(open, &self.connection));
        self.connections.ended.notify_all();
    }
}

impl Connections {
    /// Returns room for `connections_max` connections.
    pub fn new(connections_max: usize) -> Arc<Self> {
        let closed = LogLimit::new("closed the connection that was silent longest");
        Arc::new(Self { connections_max, open: Mutex::default(), ended: Condvar::new(), closed })
    }

    fn open(&self) -> MutexGuard<'_, Vec<Arc<Connection>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of open connections.
    pub fn count(&self) -> usize {
        self.open().len()
    }

    /// Gives a connection of `peer` a place. If all are taken, closes the connection that was
    /// silent longest and waits until it has ended. Returns `None` if every connection has a
    /// request in progress.
    pub fn admit(self: &Arc<Self>, peer: Peer) -> Option<Place> {
        let mut open = self.open();
        while open.len() >= self.connections_max {
            // A connection that closes already makes room. Closing one more would be one too many.
            if !open.iter().any(|connection| connection.state() == CLOSING)
                && !self.close_longest_silent(&open)
            {
                return None;
            }
            open = self.ended.wait(open).unwrap_or_else(PoisonError::into_inner);
        }

        let connection = Arc::new(Connection::new(peer));
        open.push(Arc::clone(&connection));
        Some(Place { connections: Arc::clone(self), connection })
    }

    /// Closes the connection of `open` that was silent longest. Returns false if none is silent.
    fn close_longest_silent(&self, open: &[Arc<Connection>]) -> bool {
        loop {
            let silent = open.iter().filter(|connection| connection.state() == 0);
            let Some(longest) = silent.min_by_key(|connection| connection.last_activity()) else {
                return false;
            };
            // A request may have arrived after the choice; then another connection is chosen.
            if longest.close_silent() {
                let (max, peer) = (self.connections_max, longest.peer);
                let seconds = longest.last_activity().elapsed().as_secs();
                let detail =
                    format!("all {max} are open; that of {peer:?} was silent for {seconds} s");
                self.closed.warn(&detail);
                return true;
            }
        }
    }

    /// Waits until every connection has ended, for at most `time`. Returns how many are left.
    pub fn wait_ended(&self, time: Duration) -> usize {
        let (open, start) = (self.open(), Instant::now());
        let left = |open: &mut Vec<_>| !open.is_empty();
        let waited =
            self.ended.wait_timeout_while(open, time.saturating_sub(start.elapsed()), left);
        let open = waited.unwrap_or_else(PoisonError::into_inner).0;
        self.closed.end();
        open.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: Peer = Peer::User(7);

    /// Admits one more connection while a thread ends `place` as soon as it is closing.
    fn admit_beside(connections: &Arc<Connections>, place: Place) -> Option<Place> {
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while place.connection().state() != CLOSING {
                    std::thread::yield_now();
                }
            });
            connections.admit(PEER)
        })
    }

    #[test]
    fn the_connection_that_was_silent_longest_makes_room() {
        let connections = Connections::new(8);
        let mut places: Vec<Place> = (0..8).map(|_| connections.admit(PEER).unwrap()).collect();
        std::thread::sleep(Duration::from_millis(1));
        for (number, place) in places.iter().enumerate().filter(|(number, _)| *number != 5) {
            std::thread::sleep(Duration::from_micros(number as u64));
            place.connection().note_activity();
        }
        let last = admit_beside(&connections, places.remove(5)).unwrap();
        assert_eq!(connections.count(), 8);
        assert!(places.iter().all(|place| place.connection().state() == 0));
        drop(last);
        assert_eq!(connections.count(), 7);
    }

    #[test]
    fn a_connection_with_a_request_in_progress_is_not_closed() {
        let connections = Connections::new(3);
        let mut places: Vec<Place> = (0..3).map(|_| connections.admit(PEER).unwrap()).collect();
        let held: Vec<Arc<Connection>> =
            places.iter().map(|place| Arc::clone(place.connection())).collect();
        let mut works: Vec<Work<'_>> = held.iter().map(|c| c.begin_work().unwrap()).collect();
        assert!(connections.admit(PEER).is_none(), "all have a request in progress");

        drop(works.remove(1));
        assert!(admit_beside(&connections, places.remove(1)).is_some());
        assert!(held[1].begin_work().is_none(), "a closing connection begins no request");
    }

    #[test]
    fn a_caller_above_its_rate_is_told_when_to_repeat() {
        let connection = Connection::new(PEER);
        assert!((0..1000).all(|_| connection.count_request(0).is_ok()));
        let allowed = (0..1000).filter(|_| connection.count_request(100).is_ok()).count();
        assert!((99..200).contains(&allowed), "{allowed}");
        let refused = connection.count_request(1).unwrap_err();
        assert!(refused.code == Code::TooOften && refused.retry_after.is_some());
    }
}
