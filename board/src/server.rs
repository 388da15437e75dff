//! The socket: one sample a line in, one score a line out, in order, with a thread for each
//! connection. When all request slots of a model are taken, the answer is `busy`, immediately. On
//! SIGTERM the server accepts no further connection, answers the lines that it has received, and
//! returns. Before the socket exists, SIGTERM ends the process.

use crate::latency::Latencies;
use crate::limits::{CONNECTIONS_MAX, LINE_BYTES_MAX};
use crate::shed::Shed;
use anyhow::{Context, Result};
use hatchback::request::pipeline::RequestError;
use hatchback::request::serving::Serving;
use hatchback::schema::batch::Batch;
use hatchback::schema::sample::Sample;
use rustix::net::{Shutdown, shutdown};
use serde::Deserialize;
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often an idle connection checks whether the daemon is stopping.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// What a connection needs to answer requests.
#[derive(Clone, Copy)]
pub struct Server<'a> {
    /// The models.
    pub serving: &'a Serving,
    /// Latencies, by model.
    pub latencies: &'a Latencies,
    /// The load shedding of the daemon.
    pub shed: &'a Shed,
    /// Whether the car has exactly one model, so that callers need not name it.
    pub is_only: bool,
}

/// A request to stop, made by SIGTERM or SIGINT.
#[derive(Default)]
pub struct Stop {
    is_requested: AtomicBool,
    listener: Mutex<Option<UnixListener>>,
}

impl Stop {
    /// Handles the signals from now on. A signal before the socket exists calls `early` and ends
    /// the process.
    ///
    /// # Errors
    /// The system refuses a signal handler.
    pub fn on_signal(self: &Arc<Self>, early: impl FnOnce() + Send + 'static) -> Result<()> {
        let (mut signals, stop) = (Signals::new([SIGTERM, SIGINT])?, Arc::clone(self));
        std::thread::spawn(move || {
            if signals.forever().next().is_none() {
                return;
            }
            stop.is_requested.store(true, Ordering::Release);
            let Some(listener) = &*stop.listener() else {
                log::info!("stopping before the socket is open");
                early();
                std::process::exit(0);
            };
            log::info!("stopping: no new connections; answering the requests that were received");
            // Ends `accept`, also where the socket's file was removed.
            if let Err(e) = shutdown(listener, Shutdown::Both) {
                log::error!("cannot shut the socket down: {e}");
            }
        });
        Ok(())
    }

    fn listener(&self) -> MutexGuard<'_, Option<UnixListener>> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_requested(&self) -> bool {
        self.is_requested.load(Ordering::Acquire)
    }
}

/// The socket; its file is removed when this is dropped.
pub struct Socket<'a> {
    listener: UnixListener,
    path: &'a Path,
}

impl<'a> Socket<'a> {
    /// Binds the socket at `path`. Callers can connect from then on, until `stop`.
    ///
    /// # Errors
    /// `path` exists, or its folder cannot be written.
    pub fn listen(path: &'a Path, stop: &Stop) -> Result<Self> {
        let listener = UnixListener::bind(path).with_context(|| path.display().to_string())?;
        let socket = Self { listener, path };
        *stop.listener() = Some(socket.listener.try_clone()?);
        Ok(socket)
    }
}

impl Drop for Socket<'_> {
    fn drop(&mut self) {
        match std::fs::remove_file(self.path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                log::warn!("{}: {e}", self.path.display())
            }
            _ => {}
        }
    }
}

/// Serves until `stop` is requested.
pub fn serve(server: Server<'_>, socket: &Socket<'_>, stop: &Stop) {
    let open = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for connection in socket.listener.incoming() {
            if stop.is_requested() {
                return;
            }

            let open = &open;
            let started = connection.and_then(|connection| {
                if open.load(Ordering::Acquire) >= CONNECTIONS_MAX {
                    return answer(&connection, &json!({"error": "busy"}), stop);
                }

                open.fetch_add(1, Ordering::AcqRel);
                let work = move || {
                    if let Err(e) = answer_all(server, &connection, stop) {
                        log::warn!("a connection ended early: {e}");
                    }
                    open.fetch_sub(1, Ordering::AcqRel);
                };

                let started = std::thread::Builder::new().spawn_scoped(scope, work).map(drop);
                started.inspect_err(|_| {
                    open.fetch_sub(1, Ordering::AcqRel);
                })
            });

            if let Err(e) = started {
                log::warn!("a connection ended early: {e}");
            }
        }
    });
}

fn answer_all(server: Server<'_>, connection: &UnixStream, stop: &Stop) -> io::Result<()> {
    connection.set_read_timeout(Some(STOP_CHECK_INTERVAL))?;
    connection.set_write_timeout(Some(STOP_CHECK_INTERVAL))?;
    let (mut reader, mut line) = (BufReader::new(connection), Vec::new());

    loop {
        let is_short = line.len() < LINE_BYTES_MAX;
        let bytes_max = if is_short { LINE_BYTES_MAX } else { line_bytes_max(server.serving) };
        let room = bytes_max.saturating_sub(line.len()) as u64;

        match reader.by_ref().take(room).read_until(b'\n', &mut line) {
            Ok(0) if line.is_empty() => return Ok(()),
            Ok(0) if room == 0 => {
                return answer(connection, &json!({"error": "the line is too long"}), stop);
            }
            Ok(n) if n as u64 == room && line.last() != Some(&b'\n') => {}
            Ok(_) => {
                answer(connection, &score(server, &line), stop)?;
                line.clear();
                // A caller that never pauses must not keep the daemon from stopping.
                if stop.is_requested() && reader.buffer().is_empty() {
                    return Ok(());
                }
            }
            // `line` keeps the part of the line that was read.
            Err(e) if is_timeout(&e) => {
                if stop.is_requested() {
                    return Ok(());
                }
            }
            Err(e) => return Err(e),
        }
    }
}

fn is_timeout(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

/// Returns the bytes of the longest line that can be a sample of a served model.
fn line_bytes_max(serving: &Serving) -> usize {
    let schemas = serving.names().into_iter().filter_map(|name| serving.schema(&name));
    schemas.map(|schema| Sample::json_bytes_max(&schema)).max().unwrap_or(0).max(LINE_BYTES_MAX)
}

/// The field of a line beside its sample.
#[derive(Deserialize)]
struct Address {
    model: Option<String>,
}

fn score(server: Server<'_>, line: &[u8]) -> Value {
    let Some(_turn) = server.shed.turn() else { return json!({"error": "busy"}) };
    try_score(server, line).unwrap_or_else(|problem| json!({"error": problem}))
}

fn try_score(server: Server<'_>, line: &[u8]) -> Result<Value, String> {
    let serving = server.serving;
    let text = std::str::from_utf8(line).map_err(|e| e.to_string())?;

    let names = serving.names();
    let name = match (serde_json::from_str(text).map_err(|e| e.to_string())?, names.as_slice()) {
        (Address { model: Some(name) }, _) => name,
        (_, []) => return Err("no model is served yet".to_owned()),
        (_, [only]) if server.is_only => only.clone(),
        _ => return Err(format!("`model` must be one of {}", names.join(", "))),
    };

    let schema = serving.schema(&name).ok_or_else(|| RequestError::NotServed.to_string())?;
    let sample = Sample::from_json(text, &schema).map_err(|e| e.to_string())?;
    let mut batch = Batch::new(&schema, 1);
    batch.push(&schema, &sample).map_err(|e| e.to_string())?;

    let start = Instant::now();
    let ticket = serving.submit(&name, &batch, None).map_err(|e| match e {
        RequestError::Busy(_) => "busy".to_owned(),
        e => e.to_string(),
    })?;
    let answer = ticket.wait().map_err(|e| e.to_string())?;
    server.latencies.record(&name, ticket.generation(), start.elapsed());
    let scores = answer.scores();
    Ok(json!({"score": scores.values, "status": scores.statuses[0]}))
}

/// Writes `value`. A caller that does not read blocks its own connection only, and only until the
/// daemon stops.
fn answer(mut connection: &UnixStream, value: &Value, stop: &Stop) -> io::Result<()> {
    let text = format!("{value}\n");
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        match connection.write(rest) {
            Ok(n) => rest = &rest[n..],
            Err(e)
                if e.kind() == io::ErrorKind::Interrupted
                    || is_timeout(&e) && !stop.is_requested() => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
