//! The socket's file, and the request to stop. A socket that a killed daemon left is replaced. A
//! socket on which another process answers, or a file of another kind, is not.

use anyhow::{Context, Result, bail};
use hatchback_server::{Listener, Stopping};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A request to stop, made by SIGTERM or SIGINT.
#[derive(Default)]
pub struct Stop {
    stopping: Stopping,
    /// The listeners; empty before the daemon serves.
    listeners: Mutex<Vec<Arc<Listener>>>,
}

impl Stop {
    /// Handles the signals from now on. A signal before the socket exists calls `early` and ends
    /// the process.
    ///
    /// # Errors
    /// The system refuses a signal handler or a thread.
    pub fn on_signal(self: &Arc<Self>, early: impl FnOnce() + Send + 'static) -> Result<()> {
        let (mut signals, stop) = (Signals::new([SIGTERM, SIGINT])?, Arc::clone(self));
        let end = move || {
            if signals.forever().next().is_none() {
                return;
            }
            // The lock is held until the exit. Otherwise `end` could add listeners that nobody
            // shuts down.
            let listeners = stop.listeners();
            // Before the listeners are shut down: an accepting thread that wakes must find the
            // request.
            stop.stopping.request();
            if listeners.is_empty() {
                log::info!("stopping before the socket is open");
                early();
                std::process::exit(0);
            }
            log::info!("stopping: no new connections; answering the requests that were received");
            for listener in listeners.iter() {
                if let Err(e) = listener.shut_down() {
                    log::error!("cannot shut a listener down: {e}");
                }
            }
        };
        std::thread::Builder::new().name("signals".to_owned()).spawn(end)?;
        Ok(())
    }

    fn listeners(&self) -> MutexGuard<'_, Vec<Arc<Listener>>> {
        self.listeners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shuts `listeners` down when the daemon is asked to stop.
    pub fn end(&self, listeners: &[Arc<Listener>]) {
        self.listeners().extend(listeners.iter().cloned());
    }

    /// Returns the stop request that the front door watches.
    pub fn stopping(&self) -> &Stopping {
        &self.stopping
    }
}

/// Device and inode number of a file: another file may later have the same path.
type FileId = [u64; 2];

/// Returns the identity of the socket at `path`.
///
/// # Errors
/// Nothing is at `path`, or a file of another kind.
fn socket_at(path: &Path) -> io::Result<FileId> {
    let found = std::fs::symlink_metadata(path)?;
    if !found.file_type().is_socket() {
        return Err(io::Error::other("is a file of another kind than a socket"));
    }
    Ok([found.dev(), found.ino()])
}

/// The socket; its file is removed when this is dropped.
pub struct Socket<'a> {
    listener: Arc<Listener>,
    path: &'a Path,
    file: FileId,
}

impl<'a> Socket<'a> {
    /// Binds the socket at `path`. Callers can connect from then on. Replaces a socket on which no
    /// process answers.
    ///
    /// # Errors
    /// A daemon answers at `path`, `path` is a file of another kind, or its folder cannot be
    /// written.
    pub fn listen(path: &'a Path) -> Result<Self> {
        let name = || format!("socket {}", path.display());
        let listener = match UnixListener::bind(path) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                remove_stale(path).with_context(name)?;
                UnixListener::bind(path)
            }
            bound => bound,
        };
        let listener = listener.with_context(name)?;
        let file = socket_at(path).with_context(name)?;

        Ok(Self { listener: Arc::new(Listener::Unix(listener)), path, file })
    }

    /// Returns the listener.
    pub fn listener(&self) -> &Arc<Listener> {
        &self.listener
    }
}

/// Removes the socket at `path` if no process answers on it.
fn remove_stale(path: &Path) -> Result<()> {
    let file = socket_at(path)?;
    // A blocking `connect` would wait while the other daemon's backlog is full.
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let caller = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&caller, &SocketAddrUnix::new(path)?) {
        // Another daemon may have replaced the file after the refusal. The path must still be the
        // file that refused.
        Err(Errno::CONNREFUSED) if socket_at(path)? == file => {
            log::info!("socket {}: no process answers on it; it is replaced", path.display());
            Ok(std::fs::remove_file(path)?)
        }
        Ok(()) | Err(Errno::AGAIN | Errno::CONNREFUSED) => {
            bail!("another process answers on it; stop that process or pass another --socket")
        }
        Err(e) => Err(e).context("is in use, and a connection to it failed"),
    }
}

impl Drop for Socket<'_> {
    fn drop(&mut self) {
        // Another daemon may have bound the path since.
        let removed = match socket_at(self.path) {
            Ok(file) if file == self.file => std::fs::remove_file(self.path),
            Ok(_) => Ok(()),
            Err(e) => Err(e),
        };
        match removed {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                log::warn!("socket {}: {e}", self.path.display());
            }
            _ => {}
        }
    }
}
