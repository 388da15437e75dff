//! The open connections of the socket, at most [`CONNECTIONS_MAX`]. Where all are taken, the one
//! that was silent longest is closed for the next caller. A connection that has a request in work
//! is never closed. Never reads or writes what a connection carries.

use crate::limits::CONNECTIONS_MAX;
use crate::log_limit::LogLimit;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a connection does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Stage {
    /// The daemon waits for the caller: for a line, or until an answer is taken.
    Silent,
    /// A request of the connection is in work.
    InWork,
    /// The connection makes room for another one.
    Closing,
}

/// One open connection.
#[derive(Debug)]
pub struct Connection {
    /// The stream to the caller.
    pub stream: UnixStream,
    /// A [`Stage`] as its number.
    stage: AtomicU8,
    opened: Instant,
    /// When the caller last sent or took bytes, in µs since `opened`.
    heard_us: AtomicU64,
}

impl Connection {
    fn new(stream: UnixStream) -> Self {
        let (stage, heard_us) = (AtomicU8::new(Stage::Silent as u8), AtomicU64::new(0));
        Self { stream, stage, opened: Instant::now(), heard_us }
    }

    /// Notes that the caller sent or took bytes now.
    pub fn hear(&self) {
        self.heard_us.store(self.opened.elapsed().as_micros() as u64, Ordering::Relaxed);
    }

    fn heard(&self) -> Instant {
        self.opened + Duration::from_micros(self.heard_us.load(Ordering::Relaxed))
    }

    /// Notes that a request is in work from now on. Returns false if the connection is closing.
    pub fn begin_work(&self) -> bool {
        self.change(Stage::InWork)
    }

    /// Notes that the request is done. Its answer is not yet taken.
    pub fn end_work(&self) {
        self.hear();
        self.stage.store(Stage::Silent as u8, Ordering::Release);
    }

    /// Returns whether the connection makes room for another one.
    pub fn is_closing(&self) -> bool {
        self.stage.load(Ordering::Acquire) == Stage::Closing as u8
    }

    /// Changes a silent connection to `stage`. Returns false if the connection is not silent.
    fn change(&self, stage: Stage) -> bool {
        let (silent, stage) = (Stage::Silent as u8, stage as u8);
        self.stage.compare_exchange(silent, stage, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// The open connections.
#[derive(Debug)]
pub struct Connections {
    open: Mutex<Vec<Arc<Connection>>>,
    /// Signals that a connection ended.
    ended: Condvar,
    closed: LogLimit,
}

/// A connection's place among the open ones; dropping it gives the place to another one.
#[derive(Debug)]
pub struct Place<'a> {
    connections: &'a Connections,
    connection: Arc<Connection>,
}

impl Place<'_> {
    /// Returns the connection.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.connections.open().retain(|open| !Arc::ptr_eq(open, &self.connection));
        self.connections.ended.notify_all();
    }
}

impl Connections {
    /// Returns no connections.
    pub fn new() -> Self {
        let closed = LogLimit::new("closed the connection that was silent longest");
        Self { open: Mutex::default(), ended: Condvar::new(), closed }
    }

    fn open(&self) -> MutexGuard<'_, Vec<Arc<Connection>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives `stream` a place. If all are taken, closes the connection that was silent longest and
    /// waits for its thread, which ends at once.
    ///
    /// # Errors
    /// Returns `stream` if every connection has a request in work.
    pub fn admit(&self, stream: UnixStream) -> Result<Place<'_>, UnixStream> {
        let mut open = self.open();
        while open.len() >= CONNECTIONS_MAX {
            if !open.iter().any(|connection| connection.is_closing())
                && !self.close_longest_silent(&open)
            {
                return Err(stream);
            }
            open = self.ended.wait(open).unwrap_or_else(PoisonError::into_inner);
        }

        let connection = Arc::new(Connection::new(stream));
        open.push(Arc::clone(&connection));
        Ok(Place { connections: self, connection })
    }

    /// Closes the connection of `open` that was silent longest. Returns false if none is silent.
    fn close_longest_silent(&self, open: &[Arc<Connection>]) -> bool {
        loop {
            let is_silent =
                |c: &&Arc<Connection>| c.stage.load(Ordering::Acquire) == Stage::Silent as u8;
            let Some(longest) = open.iter().filter(is_silent).min_by_key(|c| c.heard()) else {
                return false;
            };
            // A request may have arrived meanwhile; then another connection is chosen.
            if longest.change(Stage::Closing) {
                // An error means that the caller has closed the connection.
                let _ = longest.stream.shutdown(Shutdown::Both);
                let seconds = longest.heard().elapsed().as_secs();
                let detail = format!("all {CONNECTIONS_MAX} are open, it was silent {seconds} s");
                self.closed.warn(&detail);
                return true;
            }
        }
    }

    /// Logs what had no line, at the end of the daemon.
    pub fn end(&self) {
        self.closed.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    /// Opens all connections; returns them with their callers' ends.
    fn full(connections: &Connections) -> (Vec<Place<'_>>, Vec<UnixStream>) {
        let open = |_| {
            let (ours, theirs) = UnixStream::pair().unwrap();
            (connections.admit(ours).unwrap(), theirs)
        };
        (0..CONNECTIONS_MAX).map(open).unzip()
    }

    /// Admits one more connection while a thread serves `place` as the server does: it ends when
    /// its stream is closed.
    fn admit_beside<'a>(connections: &'a Connections, place: Place<'a>) -> Place<'a> {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || (&place.connection().stream).read(&mut [0; 9]));
            connections.admit(ours).unwrap()
        })
    }

    #[test]
    fn the_connection_that_was_silent_longest_makes_room() {
        let connections = Connections::new();
        let (mut places, mut callers) = full(&connections);
        // All but number 100 sent a byte after they connected.
        for (number, place) in places.iter().enumerate().filter(|(number, _)| *number != 100) {
            std::thread::sleep(Duration::from_micros(if number == 0 { 100 } else { 0 }));
            place.connection().hear();
        }

        let last = admit_beside(&connections, places.remove(100));
        assert_eq!(connections.open().len(), CONNECTIONS_MAX);
        assert_eq!(callers.remove(100).read(&mut [0; 9]).unwrap(), 0, "the caller sees the end");
        assert!(places.iter().all(|place| !place.connection().is_closing()));
        drop(last);
        assert_eq!(connections.open().len(), CONNECTIONS_MAX - 1);
    }

    #[test]
    fn a_connection_with_a_request_in_work_is_not_closed() {
        let connections = Connections::new();
        let (mut places, _callers) = full(&connections);
        assert!(places.iter().all(|place| place.connection().begin_work()));
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert!(connections.admit(ours).is_err(), "all are in work");

        places[7].connection().end_work();
        let _last = admit_beside(&connections, places.remove(7));
        assert!(places.iter().all(|place| !place.connection().is_closing()));
    }

    #[test]
    fn a_closing_connection_begins_no_request() {
        let connections = Connections::new();
        let (places, _callers) = full(&connections);
        assert!(connections.close_longest_silent(&connections.open()));
        let closing: Vec<_> = places.iter().filter(|p| p.connection().is_closing()).collect();
        assert!(closing.len() == 1 && !closing[0].connection().begin_work());
    }
}
