//! The open connections, at most `server.connections_max`. If few places are left, the connection
//! that was silent longest is closed for the next caller. A connection that has a request in
//! progress is never closed for that. If too many bytes wait for callers, the connection that holds
//! most of them is closed. Never reads or writes the bytes of a connection.

pub mod alarm;
pub mod gate;
pub mod log_limit;
pub mod memory;
pub mod tls;

use crate::connections::log_limit::LogLimit;
use crate::connections::memory::{ByteBudget, Reservation, Share};
use crate::limits::{
    FLOOD_BYTES_MAX, REQUEST_FRAME_BYTES, SHARES, SILENT_TIME_MIN, SPARE_PLACES, TURN_BYTES_FIRST,
    TURN_BYTES_MAX, TURN_BYTES_MIN, TURNS_WAIT_MAX,
};
use crate::problem::{Code, Problem};
use hatchback::locks::lock;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// The bit of `Connection::state` that says that the connection closes to make room for another
/// one. The other bits are the number of its requests in progress.
const CLOSING: u32 = 1 << 31;

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

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(user) => write!(f, "user {user}"),
            Self::Loopback => f.write_str("a caller on the loopback device"),
            Self::Certified(address) => write!(f, "the caller at {address}"),
        }
    }
}

/// One open connection.
#[derive(Debug)]
pub struct Connection {
    /// The caller.
    pub peer: Peer,
    /// The bytes that its requests and answers hold.
    pub share: Arc<Share>,
    /// Requests in progress, and [`CLOSING`].
    state: AtomicU32,
    opened: Instant,
    /// When the caller last sent or took bytes, in µs since `opened`.
    active_us: AtomicU64,
    /// When a part of what the connection holds had last moved, in µs since `opened`.
    moved_us: AtomicU64,
    close: Notify,
    /// Bytes that may be read in a turn.
    turn_bytes_max: AtomicUsize,
    /// Bytes that may be read before other connections have their turn.
    turn_bytes: AtomicUsize,
    /// Whether a request was answered in this turn.
    has_answered: AtomicBool,
    /// Requests in a row that came before their caller had read the answer of the one before.
    ahead: AtomicU32,
    /// Bytes that were read in this period and belong to no request.
    idle_bytes: AtomicUsize,
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
    /// Returns a connection that was opened now, with a share of `bytes`.
    pub fn new(peer: Peer, bytes: &Arc<ByteBudget>) -> Self {
        Self {
            peer,
            share: Share::new(bytes),
            state: AtomicU32::new(0),
            opened: Instant::now(),
            active_us: AtomicU64::new(0),
            moved_us: AtomicU64::new(0),
            close: Notify::new(),
            turn_bytes_max: AtomicUsize::new(TURN_BYTES_FIRST),
            turn_bytes: AtomicUsize::new(0),
            has_answered: AtomicBool::new(false),
            ahead: AtomicU32::new(0),
            idle_bytes: AtomicUsize::new(0),
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

    /// Notes that `bytes` of a body came; with 0, looks only whether answers went. Other frames,
    /// and few bytes beside many that are held, are no progress: they cost a caller nothing.
    pub fn note_moved(&self, bytes: usize) {
        if self.share.has_moved(bytes) {
            self.moved_us.store(self.age_us(), Ordering::Relaxed);
        }
    }

    /// Returns the bytes that wait for the caller. They weigh more if they do not move.
    fn weight(&self) -> usize {
        let moved = Duration::from_micros(self.moved_us.load(Ordering::Relaxed));
        let is_stuck = self.opened.elapsed().saturating_sub(moved) >= SILENT_TIME_MIN;
        self.share.waiting().saturating_mul(if is_stuck { SHARES } else { 1 })
    }

    /// Begins a turn. A connection whose bytes belong to requests may read twice as much in each
    /// turn as in the one before. Frames without requests cost more time than their bytes.
    pub fn begin_turn(&self) {
        let (last, idle) = (&self.turn_bytes_max, self.idle_bytes.load(Ordering::Relaxed));
        let max = last.load(Ordering::Relaxed);
        let max = if idle > TURN_BYTES_FIRST { max / 2 } else { max * 2 };
        let max = max.clamp(TURN_BYTES_MIN, TURN_BYTES_MAX);
        last.store(max, Ordering::Relaxed);
        self.turn_bytes.store(max, Ordering::Relaxed);
        self.has_answered.store(false, Ordering::Relaxed);
    }

    /// Returns how many turns a request that came now must wait. A caller that sends requests
    /// without reading answers has its next one answered in the same turn otherwise, and the next.
    pub fn turns_to_wait(&self) -> u32 {
        let is_ahead = self.has_answered.load(Ordering::Relaxed);
        let ahead = if is_ahead { self.ahead.load(Ordering::Relaxed) + 1 } else { 0 };
        self.ahead.store(ahead, Ordering::Relaxed);
        ahead.min(TURNS_WAIT_MAX)
    }

    /// Notes that a request was answered.
    pub fn note_answer(&self) {
        self.has_answered.store(true, Ordering::Relaxed);
    }

    /// Returns how many bytes may be read until the next turn.
    pub fn turn_bytes(&self) -> usize {
        self.turn_bytes.load(Ordering::Relaxed)
    }

    /// Counts `bytes` that were read.
    ///
    /// # Errors
    /// The caller sends more frames without requests than `FLOOD_BYTES_MAX` in a period.
    pub fn count_read(&self, bytes: usize) -> io::Result<()> {
        // Only the task of the connection reads, so load and store need not be one step.
        let left = self.turn_bytes.load(Ordering::Relaxed).saturating_sub(bytes);
        self.turn_bytes.store(left, Ordering::Relaxed);
        if self.idle_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > FLOOD_BYTES_MAX {
            let message = format!("{FLOOD_BYTES_MAX} bytes of frames belong to no request");
            return Err(io::Error::other(message));
        }
        Ok(())
    }

    /// Counts `bytes` that were read as part of a request.
    pub fn count_used(&self, bytes: usize) {
        let less = |idle: usize| Some(idle.saturating_sub(bytes));
        let _ = self.idle_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
    }

    /// Begins a period.
    ///
    /// # Errors
    /// The caller has not taken an answer during the whole last period.
    pub fn begin_period(&self) -> io::Result<()> {
        self.idle_bytes.store(0, Ordering::Relaxed);
        let stuck = || io::Error::other("the caller did not take its answer in time");
        self.share.begin_period().then_some(()).ok_or_else(stuck)
    }

    fn last_activity(&self) -> Instant {
        self.opened + Duration::from_micros(self.active_us.load(Ordering::Relaxed))
    }

    /// Counts a request as in progress until the result is dropped.
    ///
    /// # Errors
    /// The connection is already closing.
    pub fn begin_work(&self) -> Result<Work<'_>, Problem> {
        let more = |works: u32| (works & CLOSING == 0).then_some(works + 1);
        let begun = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        let message = "the connection is being closed for another one";
        begun.map(|_| Work(self)).map_err(|_| Problem::new(Code::Unavailable, message))
    }

    /// Counts a request against the rate of `per_s` requests a second; 0 is no limit. The requests
    /// of one second may arrive together.
    ///
    /// # Errors
    /// The caller sends faster; the problem says when to repeat the request.
    pub fn count_request(&self, per_s: u32) -> Result<(), Problem> {
        self.count_used(REQUEST_FRAME_BYTES);
        if per_s == 0 {
            return Ok(());
        }
        let (now, interval_us) = (self.age_us(), 1_000_000 / u64::from(per_s));
        let mut next = lock(&self.next_us);
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

    /// Closes the connection with its requests.
    fn close(&self) {
        self.state.fetch_or(CLOSING, Ordering::AcqRel);
        self.close.notify_one();
    }

    fn is_closing(&self) -> bool {
        self.state.load(Ordering::Acquire) & CLOSING != 0
    }
}

/// The open connections.
#[derive(Debug)]
pub struct Connections {
    connections_max: usize,
    bytes: Arc<ByteBudget>,
    open: Mutex<Vec<Arc<Connection>>>,
    /// Signals that a connection ended.
    ended: Condvar,
    closed: LogLimit,
}

/// A connection's place among the open ones; dropping it gives the place to another one.
#[derive(Debug)]
pub struct Place {
    connections: Arc<Connections>,
    pub connection: Arc<Connection>,
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.connections.open).retain(|open| !Arc::ptr_eq(open, &self.connection));
        self.connections.ended.notify_all();
    }
}

impl Connections {
    /// Returns room for `connections_max` connections, whose requests and answers hold `bytes`.
    pub fn new(connections_max: usize, bytes: &Arc<ByteBudget>) -> Arc<Self> {
        let closed = LogLimit::new("closed a connection to make room");
        let (open, ended, bytes) = (Mutex::default(), Condvar::new(), Arc::clone(bytes));
        Arc::new(Self { connections_max, bytes, open, ended, closed })
    }

    /// Returns the number of open connections.
    pub fn count(&self) -> usize {
        lock(&self.open).len()
    }

    /// Gives a connection of `peer` a place. If few are left, closes the connection that was silent
    /// longest. If none is left, waits until one has ended. Returns `None` if every connection has
    /// a request in progress.
    pub fn admit(self: &Arc<Self>, peer: Peer) -> Option<Place> {
        let mut open = lock(&self.open);
        // Free places let a burst of callers in before those that make room for it have ended.
        let kept = open.iter().filter(|connection| !connection.is_closing()).count();
        if kept + self.connections_max / SPARE_PLACES >= self.connections_max {
            self.close_longest_silent(&open);
        }
        while open.len() >= self.connections_max {
            // A connection that closes already makes room. Closing one more would be one too many.
            if !open.iter().any(|connection| connection.is_closing())
                && !self.close_longest_silent(&open)
            {
                return None;
            }
            open = self.ended.wait(open).unwrap_or_else(PoisonError::into_inner);
        }

        let connection = Arc::new(Connection::new(peer, &self.bytes));
        open.push(Arc::clone(&connection));
        Some(Place { connections: Arc::clone(self), connection })
    }

    /// Closes the connection of `open` that was silent longest. Returns false if none is silent.
    fn close_longest_silent(&self, open: &[Arc<Connection>]) -> bool {
        loop {
            let silent = open.iter().filter(|c| c.state.load(Ordering::Acquire) == 0);
            let Some(longest) = silent.min_by_key(|connection| connection.last_activity()) else {
                return false;
            };
            // A request may have arrived after the choice; then another connection is chosen.
            if longest.close_silent() {
                let (max, peer) = (self.connections_max, longest.peer);
                let seconds = longest.last_activity().elapsed().as_secs();
                let detail = format!(
                    "{} of {max} are open; that of {peer} was silent longest, {seconds} s",
                    open.len()
                );
                self.closed.warn(&detail);
                return true;
            }
        }
    }

    /// Reserves `more` bytes in `memory` for a body that arrives, at the pace of its caller.
    ///
    /// # Errors
    /// The budget has no room for them, and no larger connection makes room.
    pub fn grow(&self, memory: &mut Reservation, more: usize) -> Result<(), Problem> {
        self.check_room(memory, more)?;
        memory.grow_waiting(more)
    }

    /// Reserves exactly `bytes` in `memory` for an answer that its caller will take.
    ///
    /// # Errors
    /// As [`Connections::grow`].
    pub fn resize(&self, memory: &mut Reservation, bytes: usize) -> Result<(), Problem> {
        memory.resize(bytes)?;
        self.check_room(memory, 0)
    }

    fn check_room(&self, memory: &Reservation, more: usize) -> Result<(), Problem> {
        let needed = memory.share().waiting().saturating_add(more);
        let excess = self.bytes.excess(more, needed);
        match excess > 0 && !self.make_room(memory.share(), needed, excess) {
            true => Err(memory.share().refusal(more)),
            false => Ok(()),
        }
    }

    /// Makes room for what could not be decoded in `memory`, if bytes that wait for callers leave
    /// none. The caller finds the room when it repeats its request.
    pub fn make_room_to_decode(&self, memory: &Reservation) {
        let open = lock(&self.open);
        // Many small connections may hold what one request needs.
        while memory.excess() > closing_bytes(&open)
            && self.close_heaviest(&open, memory.share(), memory.share().waiting())
        {}
    }

    /// Closes a connection for that of `share`, which needs `needed`. Returns false if none holds
    /// enough.
    fn make_room(&self, share: &Arc<Share>, needed: usize, excess: usize) -> bool {
        let open = lock(&self.open);
        // A connection that closes already makes room.
        closing_bytes(&open) >= excess || self.close_heaviest(&open, share, needed)
    }

    /// Closes the heaviest of `open` for the connection of `share`. It must outweigh `needed`, and
    /// twice that if `needed` is not small: two callers of one size must not close each other.
    fn close_heaviest(&self, open: &[Arc<Connection>], share: &Arc<Share>, needed: usize) -> bool {
        let least = if self.bytes.is_small(needed) { needed } else { needed.saturating_mul(2) };
        let is_other = |c: &&Arc<Connection>| !Arc::ptr_eq(&c.share, share) && !c.is_closing();
        // Weighed once, because a weight changes meanwhile.
        let others = open.iter().filter(is_other).map(|other| (other.weight(), other));
        let heaviest = others.max_by_key(|other| other.0).filter(|other| other.0 > least);
        let Some((_, heaviest)) = heaviest else { return false };
        heaviest.close();
        let (peer, held) = (heaviest.peer, heaviest.share.waiting());
        self.closed.warn(&format!("that of {peer} held {held} of server.bytes_max"));
        true
    }

    /// Waits until every connection has ended, for at most `time`. Returns how many are left.
    pub fn wait_ended(&self, time: Duration) -> usize {
        let is_left = |open: &mut Vec<_>| !open.is_empty();
        let waited = self.ended.wait_timeout_while(lock(&self.open), time, is_left);
        let open = waited.unwrap_or_else(PoisonError::into_inner).0;
        self.closed.end();
        open.len()
    }
}

/// Returns the bytes of those connections of `open` that close already.
fn closing_bytes(open: &[Arc<Connection>]) -> usize {
    let closing = open.iter().filter(|connection| connection.is_closing());
    closing.map(|connection| connection.share.waiting()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: Peer = Peer::User(7);

    /// Admits `count` connections. Returns their places, and a reservation of each.
    fn admitted(count: usize) -> (Arc<Connections>, Vec<Place>, Vec<Reservation>) {
        // So that the last of them leaves enough places free.
        let max = if count < SPARE_PLACES { count } else { 2 * count };
        let connections = Connections::new(max, &ByteBudget::new(6400, 1600));
        let places: Vec<Place> = (0..count).map(|_| connections.admit(PEER).unwrap()).collect();
        let memory = places.iter().map(|place| place.connection.share.reservation()).collect();
        (connections, places, memory)
    }

    /// Admits one more connection while a thread ends `place` as soon as it is closing.
    fn admit_beside(connections: &Arc<Connections>, place: Place) -> Option<Place> {
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while !place.connection.is_closing() {
                    std::thread::yield_now();
                }
            });
            connections.admit(PEER)
        })
    }

    #[test]
    fn the_connection_that_was_silent_longest_makes_room() {
        let (connections, mut places, _) = admitted(8);
        std::thread::sleep(Duration::from_millis(1));
        for (number, place) in places.iter().enumerate().filter(|(number, _)| *number != 5) {
            std::thread::sleep(Duration::from_micros(number as u64));
            place.connection.note_activity();
        }
        let last = admit_beside(&connections, places.remove(5)).unwrap();
        assert_eq!(connections.count(), 8);
        assert!(places.iter().all(|place| !place.connection.is_closing()));
        drop(last);
        assert_eq!(connections.count(), 7);
    }

    #[test]
    fn a_connection_with_a_request_in_progress_is_not_closed() {
        let (connections, mut places, _) = admitted(3);
        let held: Vec<Arc<Connection>> =
            places.iter().map(|place| Arc::clone(&place.connection)).collect();
        let mut works: Vec<Work<'_>> = held.iter().map(|c| c.begin_work().unwrap()).collect();
        assert!(connections.admit(PEER).is_none(), "all have a request in progress");

        drop(works.remove(1));
        assert!(admit_beside(&connections, places.remove(1)).is_some());
        assert!(held[1].begin_work().is_err(), "a closing connection begins no request");
    }

    /// Makes the bytes of `place` move, whatever the time is, or rest since it was opened.
    fn set_moving(place: &Place, is_moving: bool) {
        place.connection.moved_us.store(u64::from(is_moving) << 62, Ordering::Relaxed);
    }

    /// 3200 of 6400 bytes may wait for large callers, and 4800 for small ones of up to 100 bytes.
    #[test]
    fn the_largest_connection_makes_room_for_a_small_one_and_a_silent_one_for_any() {
        let (connections, places, mut memory) = admitted(4);
        let closing = || places.iter().filter(|place| place.connection.is_closing()).count();
        places.iter().for_each(|place| set_moving(place, true));
        connections.grow(&mut memory[0], 1700).unwrap();
        connections.grow(&mut memory[1], 1500).unwrap();
        assert!(connections.grow(&mut memory[1], 1).is_err(), "a caller that sends stays");
        memory[1].grow(1600).unwrap();
        connections.grow(&mut memory[3], 100).unwrap();
        assert_eq!(closing(), 0, "what is decoded waits for no caller");
        connections.resize(&mut memory[1], 3100).unwrap_err();
        connections.grow(&mut memory[2], 1).unwrap();
        assert!(places[1].connection.is_closing() && closing() == 1, "the largest");
        assert!(places[1].connection.begin_work().is_err());

        memory[1].resize(1500).unwrap();
        std::thread::sleep(SILENT_TIME_MIN);
        set_moving(&places[0], false);
        connections.grow(&mut memory[3], 1300).unwrap();
        assert_eq!(closing(), 1, "a closing one makes room already");
        memory[1].shrink(0);
        connections.resize(&mut memory[2], 1600).unwrap();
        assert!(places[0].connection.is_closing() && closing() == 2);
    }

    #[test]
    fn a_connection_whose_bytes_do_not_move_makes_room_whatever_else_it_sends() {
        let (connections, places, mut memory) = admitted(3);
        connections.grow(&mut memory[0], 1600).unwrap();
        connections.grow(&mut memory[1], 1600).unwrap();
        std::thread::sleep(SILENT_TIME_MIN);
        places[0].connection.note_activity();
        places[0].connection.note_moved(1600 / SHARES - 1);
        let moved = |place: &Place| place.connection.moved_us.load(Ordering::Relaxed);
        places[1].connection.note_moved(1600 / SHARES);
        assert!(moved(&places[1]) > 0 && moved(&places[0]) == 0);
        // The machine may pause here for longer than bytes may rest.
        set_moving(&places[1], true);
        connections.grow(&mut memory[2], 1500).unwrap();
        assert!(places[0].connection.is_closing(), "a trickle is no progress");
        assert!(!places[1].connection.is_closing());
    }

    /// 4800 bytes wait in small connections, and 3200 are needed.
    #[test]
    fn what_cannot_be_decoded_finds_room_when_it_is_asked_for_again() {
        let (connections, mut places, mut memory) = admitted(49);
        let mut own = memory.pop().unwrap();
        memory.iter_mut().for_each(|memory| connections.grow(memory, 99).unwrap());
        connections.grow(&mut own, 48).unwrap();
        connections.make_room_to_decode(&own);
        assert!(places.iter().all(|place| !place.connection.is_closing()), "none was refused");
        assert_eq!(own.grow(3200).unwrap_err().code, Code::Busy);
        connections.make_room_to_decode(&own);
        places.retain(|place| !place.connection.is_closing());
        assert_eq!(49 - places.len(), (48usize * 99 + 48 + 3200 - 6400).div_ceil(99));
        memory.truncate(places.len() - 1);
        own.grow(3200).unwrap();
        assert_eq!(own.grow(3200).unwrap_err().code, Code::TooLarge);
    }

    #[test]
    fn bytes_that_belong_to_no_request_shorten_the_turns_and_then_end_the_connection() {
        let connection = Connection::new(PEER, &ByteBudget::new(1, 1));
        let turn = |is_used: bool| {
            connection.begin_turn();
            let bytes = connection.turn_bytes();
            connection.count_read(bytes).unwrap();
            assert_eq!(connection.turn_bytes(), 0);
            connection.count_used(if is_used { bytes } else { 0 });
            bytes
        };
        let most = (0..1000).map(|_| turn(true)).max();
        assert_eq!(most, Some(TURN_BYTES_MAX), "bytes of requests are no flood");
        let least = (0..100).map(|_| turn(false)).min();
        assert_eq!(least, Some(TURN_BYTES_MIN));

        connection.begin_period().unwrap();
        connection.count_read(FLOOD_BYTES_MAX).unwrap();
        assert!(connection.count_read(1).is_err());
        connection.begin_period().unwrap();
        connection.count_read(1).unwrap();
    }

    #[test]
    fn a_caller_that_does_not_read_answers_waits_longer_for_each() {
        let connection = Connection::new(PEER, &ByteBudget::new(1, 1));
        let next = |has_read: bool| {
            if has_read {
                connection.begin_turn();
            }
            let turns = connection.turns_to_wait();
            (0..turns).for_each(|_| connection.begin_turn());
            connection.note_answer();
            turns
        };
        assert!((0..100).all(|_| next(true) == 0));
        let turns: Vec<u32> = (0..100).map(|_| next(false)).collect();
        assert!((1..=100).map(|ahead| TURNS_WAIT_MAX.min(ahead)).eq(turns));
        assert_eq!(next(true), 0);
    }

    #[test]
    fn a_caller_above_its_rate_is_told_when_to_repeat() {
        let connection = Connection::new(PEER, &ByteBudget::new(1, 1));
        assert!((0..1000).all(|_| connection.count_request(0).is_ok()));
        let allowed = (0..1000).filter(|_| connection.count_request(100).is_ok()).count();
        assert!((99..200).contains(&allowed), "{allowed}");
        let refused = connection.count_request(1).unwrap_err();
        assert!(refused.code == Code::TooOften && refused.retry_after.is_some());
    }
}
